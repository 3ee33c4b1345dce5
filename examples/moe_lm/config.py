"""What a run is (:class:`Config`: what the numbers depend on) and how it is run (:class:`Options`)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


class UserError(ValueError):
    """Something the user can put right: printed as one line, without a traceback."""

    def __init__(self, what: str, expected: str, got: str, do: str) -> None:
        super().__init__(f"train_moe: {what}: expected {expected}, got {got}. {do}")


@dataclass(frozen=True)
class Config:
    """Everything that the losses depend on. A checkpoint is resumed only under an equal Config."""

    # The model. hidden is the width inside one expert; sizes are numbers of float values.
    layers: int = 4
    dim: int = 256
    heads: int = 4
    hidden: int = 256
    experts: int = 8
    topk: int = 2
    #: rows that a rank's experts take, as a multiple of the even share; 0: room for every row, none dropped.
    capacity_factor: float = 0.0
    #: an expert's rows are padded to a multiple of this; 0: what the kernels like best (no plain PyTorch).
    alignment: int = 0
    #: the numbers that the experts multiply in: none (those of dtype), bf16, fp8_tensor, fp8_delayed,
    #: fp8_block, mxfp8, nvfp4.
    format: str = "none"
    #: dtype of parameters and activations, float32 or bfloat16; the optimizer always keeps float32 copies.
    dtype: str = "float32"
    #: the experts in plain PyTorch instead of transformer_plugin.
    reference: bool = False
    compile: bool = False
    # The data.
    text: str | None = None
    text_bytes: int = 8_000_000
    seq_len: int = 256
    #: sequences of one rank in one step.
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
        """Refuses what cannot run, before anything is started."""
        if self.ranks > self.experts:
            raise UserError(
                "argument '--ranks'",
                f"at most one rank per expert ({self.experts} experts)",
                f"{self.ranks} ranks",
                "Use fewer ranks or more --experts.",
            )
        if self.experts % self.ranks:
            raise UserError(
                "argument '--experts'",
                f"a multiple of the number of ranks ({self.ranks})",
                str(self.experts),
                f"Use for example --experts {-(-self.experts // self.ranks) * self.ranks}.",
            )
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
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise UserError(
                    f"argument '--{name.replace('_', '-')}'",
                    "at least 1",
                    str(getattr(self, name)),
                    "Raise it.",
                )

    def _check_blocks(self) -> None:
        """The widths, and of nvfp4 an expert's rows, are whole blocks."""
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


POSITIVE = (
    "layers",
    "dim",
    "heads",
    "hidden",
    "topk",
    "steps",
    "seq_len",
    "batch_size",
    "ranks",
    "eval_every",
)
POSITIVE += ("eval_batches",)


@dataclass(frozen=True)
class Options:
    """How a run is carried out; nothing here changes a loss."""

    out: str = "runs/train_moe"
    resume: bool = False
    #: stop after this step as if interrupted; 0: run to the end.
    stop_at: int = 0
    checkpoint_every: int = 100
    sample_length: int = 400
    compare: bool = False


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


def difference(old: dict[str, Any], new: Config) -> list[str]:
    """Lines ``name: old, now new`` for every field that is not equal."""
    names = [field.name for field in fields(Config)]
    return [
        f"{name} was {old.get(name)!r} and is {getattr(new, name)!r}"
        for name in names
        if old.get(name) != getattr(new, name)
    ]
