"""The configuration of a run (:class:`Config`: what the losses depend on) and its execution (:class:`Options`)."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moe_lm.limits import UserError, check_limits, option


@dataclass(frozen=True)
class Config:
    """Everything that the losses depend on. A checkpoint can only be resumed with an equal Config.

    Exceptions: ranks, tensor_parallel and batch_size may change if each step has as many sequences, because the text is
    then the same; so may expert_ranks and shard, and steps, because the learning rate depends on the schedule alone.
    """

    # The model. hidden is the width inside one expert; all sizes count elements.
    layers: int = 4
    dim: int = 256
    heads: int = 4
    hidden: int = 256
    experts: int = 8
    topk: int = 2
    #: capacity of a rank's experts in rows, as a multiple of the even share; 0: enough for all rows, none is dropped.
    capacity_factor: float = 0.0
    #: an expert's rows are padded to a multiple of this; 0: the kernels' preferred alignment (not in plain PyTorch).
    alignment: int = 0
    #: the number format of the experts' products: none (operands in dtype), bf16, fp8_tensor, fp8_row, fp8_delayed,
    #: fp8_block, mxfp8, nvfp4.
    format: str = "none"
    #: dtype of parameters and activations, float32 or bfloat16; the optimizer always keeps float32 copies.
    dtype: str = "float32"
    #: whether the experts run in plain PyTorch instead of transformer_plugin.
    reference: bool = False
    compile: bool = False
    #: how the weights of the experts are laid out: packed, list or grouped, as in transformer_plugin.nn.GroupedLinear.
    parameters: str = "packed"
    #: whether the experts' weights are quantized once after each optimizer step, not in each forward.
    cached_weights: bool = False
    # The ranks.
    #: how gradients are averaged over ranks: fsdp (FSDP2), ddp, or none, for one rank.
    data_parallel: str = "fsdp"
    #: ranks over which the experts are sharded; 0: all with packed parameters, otherwise one.
    expert_ranks: int = 0
    #: ranks that share the sequences and the products of the dense layers; they follow each other.
    tensor_parallel: int = 1
    #: ranks with different sequences over which the weights of the dense layers are sharded.
    shard: int = 1
    # The data.
    text: str | None = None
    text_bytes: int = 8_000_000
    seq_len: int = 256
    #: sequences per step and rank, or per step and group of tensor-parallel ranks.
    batch_size: int = 4
    ranks: int = 2
    # The training.
    steps: int = 550
    #: steps after which the learning rate has fallen to a twentieth, where it stays; 0: steps.
    schedule_steps: int = 0
    lr: float = 1e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    aux_loss_coeff: float = 0.01
    seed: int = 0
    eval_every: int = 50
    eval_batches: int = 4

    def check(self) -> None:
        """Raises for a configuration that cannot run, before anything is started."""
        check_limits(self)
        self._check_expert_ranks()
        self._check_dense_ranks()
        if self.topk > self.experts:
            raise UserError(
                "argument '--topk'", f"at most the {self.experts} experts", str(self.topk), "Lower it."
            )
        if self.dim % (2 * self.heads):
            raise UserError(
                "argument '--dim'",
                f"a multiple of twice the number of heads ({self.heads})",
                str(self.dim),
                "Change --dim or --heads.",
            )
        self._check_blocks()
        if self.reference and self.format != "none":
            do = "Leave out one of them, or --compare the two."
            raise UserError(
                option("format"), "none, because plain PyTorch supports no other", self.format, do
            )
        self._check_layout()

    @property
    def sharing(self) -> int:
        """The number of ranks over which the experts are sharded."""
        return self.expert_ranks or (self.ranks if self.parameters == "packed" else 1)

    @property
    def schedule(self) -> int:
        """The number of steps over which the learning rate falls."""
        return self.schedule_steps or self.steps

    @property
    def data_ranks(self) -> int:
        """The number of ranks, or groups of tensor-parallel ranks, with different sequences."""
        return self.ranks // self.tensor_parallel

    @property
    def divides_dense(self) -> bool:
        """Whether a rank has a part of the dense layers' weights."""
        return self.tensor_parallel > 1 or self.shard > 1

    @property
    def shards_experts(self) -> bool:
        """Whether ``shard`` is for the experts, too: if every rank would have all of them, as one parameter."""
        whole = self.sharing == 1 and self.parameters == "packed"
        return self.shard > 1 and whole and self.format != "fp8_delayed"

    @property
    def autocasts(self) -> bool:
        """Whether parameters stay float32 and torch.autocast converts them. FSDP2 converts what it gathers."""
        return self.data_parallel != "fsdp" and self.dtype != "float32"

    def in_plain_pytorch(self) -> Config:
        """The configuration of the other implementation in a comparison, on the same ranks."""
        changes: dict[str, Any] = {"format": "none", "parameters": "packed", "cached_weights": False}
        if self.divides_dense:  # the same sequences, divided among all ranks
            changes |= {"data_parallel": "fsdp", "tensor_parallel": 1, "shard": 1}
            changes["batch_size"] = self.batch_size // self.tensor_parallel
        return replace(self, reference=True, expert_ranks=self.sharing, **changes)

    def _check_expert_ranks(self) -> None:
        """Checks that the ranks can share the experts."""
        if self.expert_ranks and self.ranks % self.expert_ranks:
            raise UserError(
                option("expert_ranks"),
                f"a divisor of the number of ranks ({self.ranks})",
                str(self.expert_ranks),
                "Use for example --expert-ranks 1.",
            )
        if self.sharing > self.experts:
            raise UserError(
                "argument '--ranks'",
                f"at most one rank per expert ({self.experts} experts)",
                f"{self.sharing} ranks",
                "Use fewer ranks or more --experts.",
            )
        if self.experts % self.sharing:
            raise UserError(
                "argument '--experts'",
                f"a multiple of the number of ranks ({self.sharing})",
                str(self.experts),
                f"Use for example --experts {-(-self.experts // self.sharing) * self.sharing}.",
            )
        if self.data_parallel == "none" and self.ranks > 1:
            raise UserError(
                option("data_parallel"),
                f"fsdp or ddp, which average the gradients of {self.ranks} ranks",
                "none",
                "Choose one of them, or use --ranks 1.",
            )

    def _check_dense_ranks(self) -> None:
        """Checks that the ranks can share the dense layers."""
        tensor_ranks, shards = self.tensor_parallel, self.shard
        if self.ranks % tensor_ranks:
            expected = f"a divisor of the number of ranks ({self.ranks})"
            raise UserError(option("tensor_parallel"), expected, str(tensor_ranks), "Change one of them.")
        if self.data_ranks % shards:
            expected = f"a divisor of the {self.data_ranks} ranks with different sequences"
            do = "Change it, --ranks or --tensor-parallel."
            raise UserError(option("shard"), expected, str(shards), do)
        for name in ("heads", "batch_size"):
            size = getattr(self, name)
            if size % tensor_ranks:
                expected, do = f"a multiple of --tensor-parallel ({tensor_ranks})", "Change one of them."
                raise UserError(option(name), expected, str(size), do)
        if self.sharing % tensor_ranks:
            name = "expert_ranks" if self.expert_ranks or self.parameters == "packed" else "parameters"
            expected = f"experts over a multiple of the {tensor_ranks} tensor-parallel ranks"
            got, do = f"experts over {self.sharing}", "Leave it out, or raise --expert-ranks."
            raise UserError(option(name), expected, got, do)
        if not self.divides_dense:
            return
        name = "tensor_parallel" if tensor_ranks > 1 else "shard"
        if self.reference:
            do = "Leave out one of them, or --compare the two."
            raise UserError(option(name), "1, for plain PyTorch", str(getattr(self, name)), do)
        if self.data_parallel != "ddp":
            expected = f"ddp, for --{name.replace('_', '-')}"
            raise UserError(option("data_parallel"), expected, self.data_parallel, "Leave it out.")

    def _check_layout(self) -> None:
        """Checks options of the experts' weights that exclude each other."""
        if self.parameters != "packed" and self.sharing > 1:
            expected = f"packed, for experts that are sharded over {self.sharing} ranks"
            raise UserError(option("parameters"), expected, self.parameters, "Use --expert-ranks 1.")
        if self.reference and self.parameters != "packed":
            raise UserError(
                option("parameters"),
                "packed, the only one in plain PyTorch",
                self.parameters,
                "Leave it out.",
            )
        if self.format == "fp8_delayed" and self.parameters == "list":
            expected = "packed or grouped, for the scales of --format fp8_delayed"
            raise UserError(
                option("parameters"), expected, "list", "Choose one of them, or another --format."
            )
        if self.reference and self.data_parallel == "ddp" and self.sharing > 1:
            expected = "fsdp, for plain PyTorch with experts that are sharded over ranks"
            raise UserError(option("data_parallel"), expected, "ddp", "Use --expert-ranks 1.")
        if not self.cached_weights:
            return
        if self.reference or self.format in ("none", "fp8_delayed"):
            got = "plain PyTorch" if self.reference else f"--format {self.format}"
            expected = "a format that quantizes weights from their present values"
            raise UserError(
                option("cached_weights"), expected, got, "Leave it out, or choose another --format."
            )
        if self.data_parallel == "fsdp":
            expected = "--data-parallel ddp or none, because FSDP2 gathers new weights in each forward"
            raise UserError(option("cached_weights"), expected, "fsdp", "Choose one of them.")

    def _check_blocks(self) -> None:
        """Checks that the widths, and for nvfp4 the rows of an expert, are multiples of the format's block."""
        block = {"mxfp8": 32, "nvfp4": 16}.get(self.format, 1)
        sizes = ("dim", "hidden", "alignment") if self.format == "nvfp4" else ("dim", "hidden")
        for name in sizes:
            size = getattr(self, name)
            if size % block:
                raise UserError(
                    f"argument '--{name}'",
                    f"a multiple of {block}, the block of {self.format}",
                    str(size),
                    f"Use for example --{name} {-(-size // block) * block}.",
                )

    def least_memory(self, ranks_here: int) -> int:
        """A lower bound of the bytes for ``ranks_here`` ranks: weights, gradients, moments, the largest activations.

        A run needs more. The bound rejects sizes that are certainly impossible.
        """
        tokens = self.batch_size * self.seq_len // self.tensor_parallel
        dense = 2 * 256 * self.dim + self.layers * (4 * self.dim**2 + self.experts * self.dim)
        experts = self.layers * self.experts * 3 * self.hidden * self.dim
        if self.data_parallel == "fsdp":
            parameters = (dense + experts) // self.ranks
        else:
            parameters = dense // (self.tensor_parallel * self.shard) + experts // self.sharing
            parameters -= experts - experts // self.shard if self.shards_experts else 0
        rows = int(self.capacity_factor * tokens * self.topk) + self.experts // self.sharing * self.alignment
        rows = 0 if self.reference else rows
        activations = tokens * (256 * 4 + self.layers * self.dim * 2) + rows * self.dim * 2
        return ranks_here * (PROCESS_BYTES + 16 * parameters + activations)

    def check_memory(self, available: int, ranks_here: int) -> None:
        """Raises if the model certainly needs more than ``available`` bytes."""
        needed = self.least_memory(ranks_here)
        if needed > available:
            raise UserError(
                "the sizes of the model, its batch and its ranks",
                f"what fits into this machine's {available / 2**30:.1f} GiB of memory",
                f"at least {needed / 2**30:,.1f} GiB for {ranks_here} ranks",
                "Lower --layers, --dim, --hidden, --experts, --batch-size, --seq-len or --ranks.",
            )


def memory_here() -> int:
    """Returns the bytes of memory of this machine, or of the container."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError):
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes)


PROCESS_BYTES = 2**27  # a Python process that has imported torch needs more memory than this


@dataclass(frozen=True)
class Options:
    """How a run is executed; nothing here changes a loss."""

    out: str = "runs/train_moe"
    resume: bool = False
    #: stop after this step as if interrupted; 0: run to the end.
    stop_at: int = 0
    checkpoint_every: int = 100
    sample_length: int = 400
    compare: bool = False
    #: whether a whole training step is one CUDA graph.
    cuda_graph: bool = False
    #: name of the sizes that the other options override, for config.json.
    preset: str = "small"

    def check(self) -> None:
        """Raises for options that exclude each other."""
        check_limits(self)
        if self.compare and self.resume:
            raise UserError(option("resume"), "no --compare", "both", "A comparison always starts anew.")
        if self.compare and self.cuda_graph:
            do = "Leave out one of them."
            raise UserError(option("cuda_graph"), "no --compare, which reads sizes on the host", "both", do)
        if not self.out:
            raise UserError(option("out"), "the name of a folder", "''", f"The default is {Options.out}.")

    def check_graph(self, config: Config, gpus: int) -> None:
        """Raises if the steps of this run cannot be a CUDA graph."""
        if not self.cuda_graph:
            return
        name = option("cuda_graph")
        if gpus == 0:
            raise UserError(name, "a GPU", "none", "Leave it out.")
        if config.ranks > 1 or config.data_parallel != "none":
            got = f"--ranks {config.ranks} --data-parallel {config.data_parallel}"
            raise UserError(name, "--ranks 1 --data-parallel none", got, "Add these options.")
        if config.reference:
            raise UserError(
                name, "no --reference, which reads sizes on the host", "both", "Leave out one of them."
            )


#: model sizes; each entry overrides the defaults of Config.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "layers": 2,
        "dim": 64,
        "heads": 4,
        "hidden": 64,
        "experts": 4,
        "seq_len": 64,
        "batch_size": 8,
        "steps": 60,
        "lr": 1e-2,
    },
    "small": {},
    "medium": {
        "layers": 8,
        "dim": 1024,
        "heads": 16,
        "hidden": 1024,
        "experts": 16,
        "topk": 4,
        "seq_len": 1024,
        "batch_size": 16,
        "lr": 6e-4,
    },
}


SHARED_OUT = ("ranks", "batch_size")  # the ranks divide the sequences of a step, so only the product matters
MAY_CHANGE = (*SHARED_OUT, "expert_ranks", "tensor_parallel", "shard", "steps")  # when a run is resumed
#: newer than checkpoints
NEWER_OPTIONS = (
    *("parameters", "cached_weights", "data_parallel", "expert_ranks"),
    *("tensor_parallel", "shard", "schedule_steps"),
)


def difference(old: dict[str, Any], new: Config) -> list[str]:
    """Returns lines ``name was OLD and is NEW`` for all values that differ."""
    old = {**{name: getattr(Config, name) for name in NEWER_OPTIONS}, **old}
    name = "ranks * batch_size"
    if max(old["tensor_parallel"], new.tensor_parallel) > 1:
        name = "ranks / tensor_parallel * batch_size"
    before, now = (
        {**each, name: each["ranks"] // each["tensor_parallel"] * each["batch_size"]}
        for each in (old, asdict(new))
    )
    before["schedule_steps"], now["schedule_steps"] = (
        before["schedule_steps"] or before["steps"],
        new.schedule,
    )
    free = set(MAY_CHANGE)
    if new.format == "fp8_delayed" and (_sharing(old) == 1) != (new.sharing == 1):
        free -= {"ranks", "expert_ranks"}  # the state of delayed scaling of sharded experts has another shape
    return [
        f"{name} was {before.get(name)!r} and is {value!r}"
        for name, value in now.items()
        if name not in free and before.get(name) != value
    ]


def _sharing(old: dict[str, Any]) -> int:
    """The number of ranks that shared the experts of a saved configuration."""
    every = old["ranks"] if old["parameters"] == "packed" else 1
    ranks: int = old["expert_ranks"] or every
    return ranks
