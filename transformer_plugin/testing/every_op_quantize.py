"""Valid calls of the ops that quantize, and the random tensors of the whole table in every_op.py."""

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
    "fp8_row:e5m2,pow2,eps=1e-3",
    "fp8_block",
    "fp8_block:square",
    "mxfp8:tiled",
    "nvfp4:sr",
    "nvfp4:rht",
    "nvfp4:row_scaled",
)
GROUPED = ("fp8_tensor", "fp8_row", "fp8_block:aligned", "mxfp8", "nvfp4:sr", "nvfp4:row_scaled")
#: Formats of the input, the weight and the gradient of a layer.
ROLES = (
    ("none", "none", "none"),
    ("fp8_row", "fp8_row", "fp8_row:e5m2"),
    ("fp8_block", "fp8_block:square", "fp8_block"),
    ("nvfp4", "nvfp4:square", "nvfp4"),
)
SCALED = ("fp8_tensor:e4m3", "fp8_tensor:e4m3", "fp8_tensor:e5m2")
ops = torch.ops.transformer_plugin


Calls = Iterator[tuple[str, str, dict[str, Any]]]


@dataclass(frozen=True)
class Sizes:
    """Rows of the buffer, output and input features, and rows of each group."""

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
        if math.prod(sizes) > 2**24:  # one value for all elements
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
        """Returns the index that selects every row in order."""
        return self._fresh(lambda sizes: torch.arange(sizes[0]), self.TNKG[:1], torch.int64)

    def group_sizes(self) -> Tensor:
        return self.integers(self.groups)

    def indices(self, tokens: int, topk: int, experts: int) -> Tensor:
        few = min(tokens, 2**16)
        chosen = torch.rand(few, experts, generator=self.generator).argsort(1)[:, :topk].contiguous()
        return chosen.to(self.device) if few == tokens else chosen[:1].to(self.device).expand(tokens, topk)


#: Flags of an op that quantizes, by direction.
DIRECTIONS = {
    "rows": {"rowwise": True, "columnwise": False},
    "columns": {"rowwise": False, "columnwise": True},
    "both": {"rowwise": True, "columnwise": True},
}


def amaxes_and_seed(
    x: Tensor, key: str, direction: str = "both", sizes: Tensor | None = None
) -> dict[str, Tensor]:
    """Returns the additional arguments of an op that quantizes ``x`` in a direction: amaxes and a seed."""
    format, more = Format.parse(key), dict[str, Tensor]()
    if format.needs_amax:
        names = {"rows": ["amax"], "columns": ["amax_t"], "both": ["amax", "amax_t"]}[direction]
        more = dict(zip(names, ops.amax(x, key, sizes, **DIRECTIONS[direction]), strict=True))
    elif format.family == "fp8_tensor":
        more = {"amax": ops.amax(x, key, sizes)[0]}
    if format.stochastic_rounding:
        more["seed"] = torch.tensor([7], device=x.device)
    return more


def quantize_calls(draw: Draw, key: str, is_grouped: bool) -> Calls:
    """Yields the calls for one format."""
    T, _, K, _ = draw.TNKG
    format, sizes = Format.parse(key), draw.group_sizes() if is_grouped else None
    name = f"grouped {key}" if is_grouped else key
    x, grouped = draw(T, K, dtype=BFLOAT16), {"group_sizes": sizes}
    grouped_columns = format.traits.has_group_columns or not is_grouped
    for direction in DIRECTIONS if grouped_columns else ("rows",):
        flags = DIRECTIONS[direction]
        more = {**amaxes_and_seed(x, key, direction, sizes), **flags}
        arguments = {"input": x, "format": key, **grouped, **more}
        yield "quantize", f"{name} {direction}", arguments
        if is_grouped:
            yield "quantize", f"{name} {direction} rows", {**arguments, "rows": draw.rows()}
        out = [torch.full_like(o.view(torch.uint8), 7).view(o.dtype) for o in ops.quantize(**arguments)]
        yield "quantize_out", f"{name} {direction}", {**arguments, "out": out, "noop": draw.zeros(1)}
        if not format.traits.has_fused_ops:
            continue
        if format.needs_amax or format.family == "fp8_tensor":
            yield "amax", f"{name} {direction}", {"input": x, "format": key, **grouped, **flags}
        wide = {"input": draw(T, 2 * K, dtype=BFLOAT16), "probs": draw(T)}
        yield "activation_quantize", f"{name} {direction}", {**wide, "format": key, **grouped, **more}
        yield "bias_backward_quantize", f"{name} {direction}", {"grad": x, "format": key, **grouped, **more}
    if format.traits.has_fused_ops:
        yield _activation_backward_call(draw, key, name, sizes)
    yield from _dequantize_calls(x, key, name, sizes)


def _activation_backward_call(
    draw: Draw, key: str, name: str, sizes: Tensor | None
) -> tuple[str, str, dict[str, Any]]:
    T = draw.TNKG[0]
    wide = draw(T, 256, dtype=BFLOAT16)
    arguments = {"grad": wide[:, :128].contiguous(), "input": wide, "probs": draw(T), "group_sizes": sizes}
    more = amaxes_and_seed(wide, key, "both", sizes)
    return "activation_backward_quantize", name, {**arguments, "format": key, **more}


def _dequantize_calls(x: Tensor, key: str, name: str, sizes: Tensor | None) -> Calls:
    format = Format.parse(key)
    grouped_columns = format.traits.has_group_columns or sizes is None
    for direction in ("rows", "columns") if grouped_columns else ("rows",):
        transposed = direction == "columns"
        more = amaxes_and_seed(x, key, direction, sizes)
        data, scale = ops.quantize(x, key, sizes, **more, **DIRECTIONS[direction])
        amax = {"amax": more["amax_t" if transposed else "amax"]} if format.needs_amax else {}
        arguments = {"data": data, "scale_inv": scale, "group_sizes": sizes, "format": key, **amax}
        yield "dequantize", f"{name} {direction}", {**arguments, "dtype": BFLOAT16, "transposed": transposed}
        if not transposed and format.traits.has_fused_ops and "rht" not in key:
            both = amaxes_and_seed(x, key, "both", sizes) if format.needs_amax else {}
            yield "requantize_transposed", name, {**arguments, **both, "dtype": FLOAT32}


def list_calls(draw: Draw) -> Calls:
    T, _, K, _ = draw.TNKG
    matrices = [draw(T, K, dtype=BFLOAT16), draw(16, K, dtype=BFLOAT16)]
    for key in ("fp8_tensor", "fp8_row", "fp8_block:square", "mxfp8", "nvfp4"):
        needs_amax = Format.parse(key).needs_amax
        if needs_amax or key == "fp8_tensor":
            amax = {"amax": draw.zeros(2), "amax_t": draw.zeros(2), "noop": draw.zeros(1)}
            yield "amax_list_out", key, {"inputs": matrices, "format": key, **amax}
        amax = {"amax": draw.rand(2)} if needs_amax else {}
        for direction, flags in DIRECTIONS.items():
            yield "quantize_list", f"{key} {direction}", {"inputs": matrices, "format": key, **amax, **flags}
            alike = {"inputs": [draw(16, K), draw(16, K)], "format": key, "stacked": True}
            yield "quantize_list", f"{key} {direction}, stacked", {**alike, **amax, **flags}


def scaled_calls(draw: Draw) -> Calls:
    T, N, K, G = draw.TNKG
    scale, sizes = draw.rand(3 * G), draw.group_sizes()
    formats = list(SCALED)
    roles = dict(zip(("input_format", "weight_format", "grad_format"), SCALED, strict=True))
    for direction, flags in DIRECTIONS.items():
        arguments = {"input": draw(T, K), "format": SCALED[0], "first": 1, **flags}
        yield "quantize_scaled", direction, {**arguments, "scale": draw.rand(3), "amax": draw.zeros(3)}
        state = {"scale": draw.rand(G + 1), "amax": draw.zeros(G + 1)}
        yield "quantize_scaled", f"grouped {direction}", {**arguments, **state, "group_sizes": sizes}
    history = {"history": draw.rand(4, 3), "scale": draw.rand(3), "amax": draw.rand(3), "formats": formats}
    for op in ("update_delayed_scale_", "delayed_scale"):
        for algorithm in ("max", "most_recent"):
            yield op, algorithm, {**history, "margin": 1, "algorithm": algorithm}
    for name, dense_amax, amax in (("", draw.zeros(3), draw.zeros(3 * G)), ("no amax", None, None)):
        dense = {"input": draw(T, K), "weight": draw(N, K), "scale": draw.rand(3), "bias": draw(N)}
        yield "linear.scaled", name, {**dense, "amax": dense_amax, **roles}
        grouped = {"input": draw(T, K), "weight": draw(G, N, K), "group_sizes": sizes, "scale": scale}
        bias = {"bias": draw(G, N), "bias_scale": draw(T)}
        yield "grouped_linear.scaled", name, {**grouped, **bias, "amax": amax, **roles}
