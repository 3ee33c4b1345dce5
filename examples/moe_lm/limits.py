"""Errors that the user can fix, and the limits of numbers on the command line."""

from __future__ import annotations

import math
from dataclasses import fields
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
    "tensor_parallel": (1, 1024),
    "shard": (1, 1024),
    "steps": (1, 99_999_999),  # a checkpoint's folder name has 8 digits
    "schedule_steps": (0, 99_999_999),
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

#: the values of options that are words.
CHOICES: dict[str, tuple[str, ...]] = {
    "format": ("none", "bf16", "fp8_tensor", "fp8_row", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"),
    "dtype": ("float32", "bfloat16"),
    "parameters": ("packed", "list", "grouped"),
    "data_parallel": ("fsdp", "ddp", "none"),
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
