"""The configuration of a run (:class:`Config`: what the losses depend on) and its execution (:class:`Options`)."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """An error that the user can fix. It is printed as one line, without a traceback."""

    def __init__(self, what: str, expected: str, got: str, do: str) -> None:
        line = f"train_moe: {what}: expected {expected}, got {got}. {do}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))

    @classmethod
    def of_line(cls, line: str) -> UserError:
        """Makes an error from a complete line."""
        error = cls.__new__(cls)
        ValueError.__init__(error, line)
        return error


#: limits of integer options, both ends included. The upper limits are far above any run; they turn a typing error into
#: a message instead of an overflow.
INTEGERS: dict[str, tuple[int, int]] = {
    "layers": (1, 10_000),
    "dim": (1, 2**20),
    "heads": (1, 2**16),
    "hidden": (1, 2**20),
    "experts": (1, 1024),
    "topk": (1, 1024),
    "alignment": (0, 2**14),
    "text_bytes": (1, 2**36),
    "seq_len": (1, 2**20),
    "batch_size": (1, 2**20),
    "ranks": (1, 1024),
    "expert_ranks": (0, 1024),
    "steps": (1, 99_999_999),  # a checkpoint's folder name has 8 digits
    "warmup_steps": (0, 99_999_999),
    "seed": (-(2**63), 2**63 - 1),
    "eval_every": (1, 10**9),
    "eval_batches": (1, 10**6),
    "stop_at": (0, 10**9),
    "checkpoint_every": (1, 10**9),
    "sample_length": (0, 10**6),
}
#: limits of float options, both ends included. Infinity and NaN are never valid.
FLOATS: dict[str, tuple[float, float]] = {
    "capacity_factor": (0.0, 1e4),
    "lr": (0.0, 1e3),
    "weight_decay": (0.0, 1e3),
    "clip_norm": (1e-9, 1e30),
    "aux_loss_coeff": (0.0, 1e3),
}


def check_limits(options: Any) -> None:
    """Raises for the first number of a :class:`Config` or :class:`Options` that is outside its limits."""
    for field in fields(options):
        low, high = {**INTEGERS, **FLOATS}.get(field.name, (None, None))
        if low is None or high is None:
            continue
        value = getattr(options, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            expected, do = "a finite number", f"The default is {field.default}."
        elif value < low:
            expected, do = f"at least {low}", "Raise it."
        elif value > high:
            expected, do = f"at most {high}", "Lower it."
        else:
            continue
        raise UserError(option(field.name), expected, shortened(str(value)), do)


def shortened(text: str, length: int = 60) -> str:
    """Shortens a value for a message of one line."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def option(name: str) -> str:
    """Returns a field's name on the command line."""
    return f"argument '--{name.replace('_', '-')}'"


@dataclass(frozen=True)
class Config:
    """Everything that the losses depend on. A checkpoint can only be resumed with an equal Config.

    Exception: ranks and batch_size may change if their product is the same, because the text is then the same, and so
    may expert_ranks.
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
    # The data.
    text: str | None = None
    text_bytes: int = 8_000_000
    seq_len: int = 256
    #: sequences per rank and step.
    batch_size: int = 4
    ranks: int = 2
    # The training.
    steps: int = 550
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
    def autocasts(self) -> bool:
        """Whether parameters stay float32 and torch.autocast converts them. FSDP2 converts what it gathers."""
        return self.data_parallel != "fsdp" and self.dtype != "float32"

    def in_plain_pytorch(self) -> Config:
        """The configuration of the other implementation in a comparison, on the same ranks."""
        changes = {"format": "none", "parameters": "packed", "cached_weights": False}
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
        tokens = self.batch_size * self.seq_len
        dense = 2 * 256 * self.dim + self.layers * (4 * self.dim**2 + self.experts * self.dim)
        experts = self.layers * self.experts * 3 * self.hidden * self.dim
        if self.data_parallel == "fsdp":
            parameters = (dense + experts) // self.ranks
        else:
            parameters = dense + experts // self.sharing
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


SHARED_OUT = (
    "ranks",
    "batch_size",
)  # the ranks divide the sequences of a step, so only the product matters
PARALLEL_OPTIONS = ("parameters", "cached_weights", "data_parallel", "expert_ranks")  # newer than checkpoints


def difference(old: dict[str, Any], new: Config) -> list[str]:
    """Returns lines ``name was OLD and is NEW`` for all values that differ."""
    old = {**{name: getattr(Config, name) for name in PARALLEL_OPTIONS}, **old}
    before, now = (
        {**each, "ranks * batch_size": each["ranks"] * each["batch_size"]} for each in (old, asdict(new))
    )
    free = {*SHARED_OUT, "expert_ranks"}
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
