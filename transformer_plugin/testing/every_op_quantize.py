"""Right calls of the ops that quantize, and what every other part of the table in every_op.py is drawn with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.formats import Format

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
DENSE = (
    "fp8_tensor",
    "fp8_block",
    "fp8_block:square",
    "mxfp8:tiled",
    "nvfp4:sr",
    "nvfp4:rht",
    "nvfp4:row_scaled",
)
GROUPED = ("fp8_tensor", "fp8_block:aligned", "mxfp8", "nvfp4:sr", "nvfp4:row_scaled")
#: Formats of the input, the weight and the gradient of a layer.
ROLES = (
    ("none", "none", "none"),
    ("fp8_block", "fp8_block:square", "fp8_block"),
    ("nvfp4", "nvfp4:square", "nvfp4"),
)
SCALED = ("fp8_tensor:e4m3", "fp8_tensor:e4m3", "fp8_tensor:e5m2")
ops = torch.ops.transformer_plugin


Calls = Iterator[tuple[str, str, dict[str, Any]]]


@dataclass(frozen=True)
class Sizes:
    """Rows of the buffer, features out and in, rows of each group."""

    T: int = 80
    N: int = 96
    K: int = 32
    groups: tuple[int, ...] = (16, 0, 32)


SIZES = Sizes()


class Draw:
    """Draws the tensors of a table, on a device."""

    def __init__(self, sizes: Sizes = SIZES, device: str = "cpu", seed: int = 0) -> None:
        self.TNKG = sizes.T, sizes.N, sizes.K, len(sizes.groups)
        self.groups = sizes.groups
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def _fresh(self, make: Callable[..., Tensor], sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.device == "meta":
            return torch.empty(sizes, dtype=dtype, device="meta")
        if math.prod(sizes) > 2**24:  # the same value everywhere
            return make((1,) * len(sizes)).to(dtype).expand(sizes)
        return make(sizes).to(dtype)

    def __call__(self, *sizes: int, dtype: torch.dtype = FLOAT32) -> Tensor:
        return self._fresh(partial(torch.randn, generator=self.generator), sizes, dtype)

    def rand(self, *sizes: int) -> Tensor:
        return self._fresh(lambda n: torch.rand(n, generator=self.generator) + 0.25, sizes, FLOAT32)

    def zeros(self, *sizes: int) -> Tensor:
        return self._fresh(torch.zeros, sizes, FLOAT32)

    def integers(self, values: Sequence[int] | int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)

    def rows(self) -> Tensor:
        """Which row each row is: itself."""
        return self._fresh(lambda sizes: torch.arange(sizes[0]), self.TNKG[:1], torch.int64)

    def group_sizes(self) -> Tensor:
        return self.integers(self.groups)

    def indices(self, tokens: int, topk: int, experts: int) -> Tensor:
        few = min(tokens, 2**16)
        chosen = torch.rand(few, experts, generator=self.generator).argsort(1)[:, :topk].contiguous()
        return chosen.to(self.device) if few == tokens else chosen[:1].to(self.device).expand(tokens, topk)


_KEPT = {"": ("amax", "amax_t", "seed"), "rows": ("amax", "seed"), "columns": ("amax_t", "seed")}


def given_beside(x: Tensor, key: str, direction: str = "", sizes: Tensor | None = None) -> dict[str, Tensor]:
    """What an op that quantizes ``x`` in this direction takes beside it."""
    format, more = Format.parse(key), dict[str, Tensor]()
    if format.needs_amax:
        more = {"amax": ops.amax(x, key, sizes), "amax_t": ops.amax_transposed(x, key, sizes)}
    elif format.family == "fp8_tensor":
        more = {"amax": ops.amax(x, key, sizes)}
    if format.stochastic_rounding:
        more["seed"] = torch.tensor([7], device=x.device)
    kept = {name: more[name] for name in _KEPT[direction] if name in more}
    if direction == "columns" and "amax" in more:
        kept["amax"] = kept.pop("amax_t", more["amax"])
    return kept


def quantize_calls(draw: Draw, key: str, is_grouped: bool) -> Calls:
    """Of one format."""
    T, _, K, _ = draw.TNKG
    noop = draw.zeros(1)
    directions = {"": "rows", "_transposed": "columns", "_both": ""}
    prefix, sizes = ("grouped_", draw.group_sizes()) if is_grouped else ("", None)
    x = draw(T, K, dtype=BFLOAT16)
    grouped = {} if sizes is None else {"group_sizes": sizes}
    for suffix, direction in directions.items():
        more = given_beside(x, key, direction, sizes)
        arguments = {"input": x, **grouped, "format": key, **more}
        op = f"{prefix}quantize{suffix}"
        yield op, key, arguments
        outputs = [
            torch.full_like(o.view(torch.uint8), 7).view(o.dtype) for o in getattr(ops, op)(**arguments)
        ]
        buffers = dict(zip(("data", "scale_inv", "data_t", "scale_t"), outputs, strict=False))
        yield f"{op}_out", key, {**arguments, **buffers, "noop": noop}
        optional = {"group_sizes": sizes}
        if Format.parse(key).needs_amax or key.startswith("fp8_tensor"):
            yield f"amax{suffix}", f"{prefix}{key}", {"input": x, "format": key, **optional}
        yield (
            f"swiglu_quantize{suffix}",
            f"{prefix}{key}",
            {
                **{"input": draw(T, 2 * K, dtype=BFLOAT16), "probs": draw(T), "format": key},
                **{**optional, **more},
            },
        )
        yield (
            f"bias_backward_quantize{suffix}",
            f"{prefix}{key}",
            {
                **{"grad": x, "format": key},
                **{**optional, **more},
            },
        )
    wide = draw(T, 256, dtype=BFLOAT16)
    yield (
        "swiglu_backward_quantize_both",
        f"{prefix}{key}",
        {
            **{"grad": wide[:, :128].contiguous(), "input": wide, "probs": draw(T), "group_sizes": sizes},
            **{"format": key, **given_beside(wide, key, "", sizes)},
        },
    )
    yield from _dequantize_calls(x, key, sizes)


def _dequantize_calls(x: Tensor, key: str, sizes: Tensor | None) -> Calls:
    prefix, grouped = ("", {}) if sizes is None else ("grouped_", {"group_sizes": sizes})
    needs_amax = Format.parse(key).needs_amax
    for direction, suffix in (("rows", ""), ("columns", "_transposed")):
        more = given_beside(x, key, direction, sizes)
        data, scale = getattr(ops, f"{prefix}quantize{suffix}")(x, *grouped.values(), key, **more)
        amax = {"amax": more["amax"]} if needs_amax else {}
        arguments = {"data": data, "scale_inv": scale, **grouped, "format": key, "dtype": BFLOAT16, **amax}
        yield f"{prefix}dequantize", key, {**arguments, "transposed": direction == "columns"}
        if direction == "rows" and "rht" not in key:
            both = given_beside(x, key, "", sizes) if needs_amax else {}
            again = {**arguments, **both, "dtype": FLOAT32, "group_sizes": sizes}
            yield "requantize_transposed", f"{prefix}{key}", again


def list_calls(draw: Draw) -> Calls:
    T, _, K, _ = draw.TNKG
    matrices = [draw(T, K, dtype=BFLOAT16), draw(16, K, dtype=BFLOAT16)]
    for key in ("fp8_tensor", "fp8_block:square", "mxfp8", "nvfp4"):
        needs_amax = Format.parse(key).needs_amax
        if needs_amax or key == "fp8_tensor":
            amax = {"amax": draw.zeros(2), "amax_t": draw.zeros(2), "noop": draw.zeros(1)}
            yield "amax_list_out", key, {"inputs": matrices, "format": key, **amax}
        amax = {"amax": draw.rand(2)} if needs_amax else {}
        for op in ("quantize_list", "quantize_list_both"):
            yield op, key, {"inputs": matrices, "format": key, **amax}


def scaled_calls(draw: Draw) -> Calls:
    T, N, K, G = draw.TNKG
    scale, sizes = draw.rand(3 * G), draw.group_sizes()
    formats = list(SCALED)
    roles = dict(zip(("input_format", "weight_format", "grad_format"), SCALED, strict=True))
    for op in ("quantize_scaled", "quantize_scaled_both"):
        arguments = {"input": draw(T, K), "format": SCALED[0], "first": 1}
        yield op, "", {**arguments, "scale": draw.rand(3), "amax": draw.zeros(3)}
        state = {"scale": draw.rand(G + 1), "amax": draw.zeros(G + 1)}
        yield op, "grouped", {**arguments, **state, "group_sizes": sizes}
    history = {"history": draw.rand(4, 3), "scale": draw.rand(3), "amax": draw.rand(3), "formats": formats}
    for op in ("update_delayed_scale_", "delayed_scale"):
        for algorithm in ("max", "most_recent"):
            yield op, algorithm, {**history, "margin": 1, "algorithm": algorithm}
    for name, dense_amax, amax in (("", draw.zeros(3), draw.zeros(3 * G)), ("no amax", None, None)):
        dense = {"input": draw(T, K), "weight": draw(N, K), "scale": draw.rand(3), "bias": draw(N)}
        yield "linear_scaled", name, {**dense, "amax": dense_amax, **roles}
        grouped = {"input": draw(T, K), "weight": draw(G, N, K), "group_sizes": sizes, "scale": scale}
        bias = {"bias": draw(G, N), "bias_scale": draw(T)}
        yield "grouped_linear_scaled", name, {**grouped, **bias, "amax": amax, **roles}
