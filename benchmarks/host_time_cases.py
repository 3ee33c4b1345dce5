"""The cases of :mod:`benchmarks.host_time`: an op's call, the torch calls that it replaces, and their tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from transformer_plugin import nn, ops, reference

BLOCKS = "fp8_block:e4m3,pow2"


@dataclass(frozen=True)
class Pair:
    """An op's call and the torch calls that it replaces, each a function of the first tensor."""

    op: str
    torch_name: str
    call: Callable[[Tensor], Any]
    torch_call: Callable[[Tensor], Any]
    input: Tensor
    differentiable: bool = True


def _torch_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """With one scale: the fewest launches with which torch can do it."""
    amax = x.abs().amax()
    scale = torch.where(amax > 0, 448.0 / amax, torch.ones_like(amax))
    return (x * scale).to(torch.float8_e4m3fn), 1 / scale


def _torch_quantize_both(x: Tensor) -> tuple[Tensor, ...]:
    return *_torch_quantize(x), *_torch_quantize(x.t().contiguous())


QUANTIZE = "abs, amax, where, mul, to, div"


def _activation(device: torch.device) -> Iterator[Pair]:
    x, probs = torch.randn(4, 32, device=device), torch.rand(4, device=device)
    grad, wide = torch.randn(1, 128, device=device), torch.randn(1, 256, device=device)  # full tiles
    one = torch.rand(1, device=device)

    def torch_swiglu(x: Tensor) -> Tensor:
        gate, linear = x.chunk(2, -1)
        return functional.silu(gate) * linear * probs[:, None]

    def torch_backward(grad: Tensor) -> tuple[Tensor, ...]:
        return *_torch_quantize_both(torch.cat([grad * wide[:, :128], grad * wide[:, 128:]], 1)), grad.sum(1)

    yield Pair("swiglu", "chunk, silu, mul, mul", lambda x: ops.activation(x, probs), torch_swiglu, x)
    yield Pair(
        "swiglu_quantize",
        "the same, " + QUANTIZE,
        lambda x: ops.activation_quantize(x, BLOCKS, probs),
        lambda x: _torch_quantize(torch_swiglu(x)),
        x,
        differentiable=False,
    )
    yield Pair(
        "swiglu_backward_quantize",
        "mul, mul, cat, sum, two times " + QUANTIZE,
        lambda grad: ops.activation_backward_quantize(grad, wide, BLOCKS, one),
        torch_backward,
        grad,
        differentiable=False,
    )


def _norm(device: torch.device) -> Iterator[Pair]:
    x, weight, bias = (torch.randn(*size, device=device) for size in ((4, 32), (32,), (32,)))

    def torch_rms(x: Tensor) -> Tensor:
        return functional.rms_norm(x, (32,), weight, 1e-5)

    def torch_layer(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (32,), weight, bias, 1e-5)

    yield Pair("rms_norm", "rms_norm", lambda x: ops.rms_norm(x, weight, 1e-5), torch_rms, x)
    yield Pair("layer_norm", "layer_norm", lambda x: ops.layer_norm(x, weight, bias, 1e-5), torch_layer, x)
    yield Pair(
        "rms_norm_quantize",
        "rms_norm, " + QUANTIZE,
        lambda x: ops.rms_norm_quantize(x, weight, 1e-5, BLOCKS),
        lambda x: _torch_quantize(torch_rms(x)),
        x,
        differentiable=False,
    )
    yield Pair(
        "layer_norm_quantize",
        "layer_norm, " + QUANTIZE,
        lambda x: ops.layer_norm_quantize(x, weight, bias, 1e-5, BLOCKS),
        lambda x: _torch_quantize(torch_layer(x)),
        x,
        differentiable=False,
    )
    second = torch.randn(16, 32, device=device)
    yield Pair(
        "norm_linear",
        "rms_norm, linear",
        lambda x: ops.norm_linear(x, weight, None, second, None, 1e-5)[0],
        lambda x: functional.linear(torch_rms(x), second),
        x,
    )


def _quantize(device: torch.device) -> Iterator[Pair]:
    x = torch.randn(4, 32, device=device)
    square = torch.randn(16, 16, device=device)  # the smallest input of nvfp4 in both directions
    found = torch.ones(1, device=device)

    def rows(key: str, *given: Tensor) -> Pair:
        def call(x: Tensor) -> tuple[Tensor, ...]:
            return ops.quantize(x, key, None, *given)

        return Pair(f"quantize {key}", QUANTIZE, call, _torch_quantize, x, differentiable=False)

    def both(key: str, *given: Tensor) -> Pair:
        def call(x: Tensor) -> tuple[Tensor, ...]:
            return ops.quantize(x, key, None, *given, columnwise=True)

        name, least = f"quantize, both directions, {key}", square if given else x
        return Pair(name, "two times " + QUANTIZE, call, _torch_quantize_both, least, differentiable=False)

    for key in ("fp8_tensor:e4m3", BLOCKS, "mxfp8:e4m3"):
        yield rows(key)
    yield rows("nvfp4:e2m1", found)
    for key in (BLOCKS, "mxfp8:e4m3"):
        yield both(key)
    yield both("nvfp4:e2m1", found, found)


def _around_quantize(device: torch.device) -> Iterator[Pair]:
    x = torch.randn(4, 32, device=device)
    scale, amax = torch.ones(1, device=device), torch.zeros(1, device=device)
    sizes = torch.tensor([2, 2], device=device, dtype=torch.int32)
    data, scale_inv = ops.quantize(x, BLOCKS)

    def torch_scaled(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * scale).to(torch.float8_e4m3fn), torch.maximum(amax, x.abs().amax())

    def torch_dequantize(x: Tensor) -> Tensor:
        return data.to(torch.float32) * scale_inv[0, :1]

    calls: list[tuple[str, str, Callable[[Tensor], Any], Callable[[Tensor], Any]]] = [
        (
            "quantize_scaled",
            "mul, to, abs, amax, maximum",
            lambda x: ops.quantize_scaled(x, scale, "fp8_tensor:e4m3", amax),
            torch_scaled,
        ),
        ("amax", "abs, amax", lambda x: ops.amax(x, "nvfp4:e2m1"), lambda x: x.abs().amax()),
        (
            "quantize of groups",
            QUANTIZE,
            lambda x: ops.quantize(x, BLOCKS, sizes),
            _torch_quantize,
        ),
        (
            "bias_backward_quantize",
            "sum, " + QUANTIZE,
            lambda x: ops.bias_backward_quantize(x, BLOCKS),
            lambda x: (*_torch_quantize(x), x.sum(0)),
        ),
        (
            "dequantize",
            "to, mul",
            lambda x: ops.dequantize(data, scale_inv, BLOCKS),
            torch_dequantize,
        ),
        (
            "requantize_transposed",
            "to, mul, t, contiguous, " + QUANTIZE,
            lambda x: ops.requantize_transposed(data, scale_inv, BLOCKS),
            lambda x: _torch_quantize(torch_dequantize(x).t().contiguous()),
        ),
    ]
    for name, torch_name, call, torch_call in calls:
        yield Pair(name, torch_name, call, torch_call, x, differentiable=False)


def _gemm(device: torch.device) -> Iterator[Pair]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(16, 16, device=device, dtype=dtype)
    weight = torch.randn(16, 16, device=device, dtype=dtype)
    weights = torch.randn(2, 16, 16, device=device, dtype=dtype)
    sizes = torch.tensor([8, 8], device=device, dtype=torch.int32)
    ends = sizes.cumsum(0).to(torch.int32)

    def torch_grouped(a: Tensor) -> Tensor:
        if a.dtype == torch.bfloat16:
            return functional.grouped_mm(a, weights.transpose(1, 2), offs=ends)
        return torch.cat(
            [functional.linear(part, w) for part, w in zip(a.split([8, 8]), weights, strict=True)]
        )

    yield Pair(
        "gemm",
        "mm",
        lambda a: ops.gemm(a, weight),
        lambda a: torch.mm(a, weight.t()),
        x,
        differentiable=False,
    )
    grouped = "grouped_mm" if dtype == torch.bfloat16 else "split, linear, cat"
    yield Pair("linear", "linear", lambda a: ops.linear(a, weight), lambda a: functional.linear(a, weight), x)
    yield Pair(
        "router_logits",
        "to, to, linear" if dtype == torch.bfloat16 else "linear",
        lambda a: ops.router_logits(a, weight),
        lambda a: functional.linear(a.float(), weight.float()),
        x,
    )
    yield Pair("grouped_linear", grouped, lambda a: ops.grouped_linear(a, weights, sizes), torch_grouped, x)


def _routing(device: torch.device) -> Iterator[Pair]:
    tokens = torch.randn(8, 16, device=device)
    indices = torch.arange(16, device=device, dtype=torch.int32).reshape(8, 2) % 4
    experts = torch.arange(4, device=device, dtype=torch.int32)
    rows, _, slot, source, _ = reference.permute(tokens, indices, 4, 16)
    weights = torch.rand(8, 2, device=device)
    back = slot.long()

    def torch_permute(x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = indices.flatten()
        order = chosen.argsort(stable=True)
        return x.index_select(0, order // 2), (chosen[:, None] == experts).sum(0)

    def torch_unpermute(x: Tensor) -> Tensor:
        return (x[back] * weights[..., None]).sum(1)

    yield Pair(
        "permute",
        "argsort, div, index_select, eq, sum",
        lambda x: ops.permute(x, indices, 4, 16),
        torch_permute,
        tokens,
    )
    yield Pair(
        "unpermute",
        "index, mul, sum",
        lambda x: ops.unpermute(x, slot, source, weights),
        torch_unpermute,
        rows,
    )


def _torch_mlp(mlp: nn.GroupedMLP, x: Tensor, sizes: Tensor, probs: Tensor) -> Tensor:
    ends = sizes.cumsum(0).to(torch.int32)
    gate, linear = functional.grouped_mm(x, mlp.fc1.weight.transpose(1, 2), offs=ends).chunk(2, -1)
    activation = functional.silu(gate) * linear * probs[:, None].to(x.dtype)
    return functional.grouped_mm(activation, mlp.fc2.weight.transpose(1, 2), offs=ends)


def _torch_moe(moe: nn.MoE, x: Tensor, experts: Tensor) -> Tensor:
    logits, chosen = functional.linear(x.float(), moe.router.weight.float()).topk(2)
    order = chosen.flatten().argsort(stable=True)
    sizes = (chosen.flatten()[:, None] == experts).sum(0)
    probs = logits.softmax(-1).flatten().index_select(0, order)
    rows = _torch_mlp(moe.experts, x.index_select(0, order // 2), sizes, probs)
    return torch.zeros_like(x).index_add(0, order // 2, rows)


def _modules(device: torch.device) -> Iterator[Pair]:
    """Layers, whose Python code counts too: without a gradient frozen, with it trained."""
    x = torch.randn(8, 16, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    sizes, probs = torch.tensor([4, 4], device=device), torch.rand(8, device=device)
    experts = torch.arange(2, device=device)

    def pair(
        torch_name: str,
        module: torch.nn.Module,
        call: Callable[[Any, Tensor], Any],
        torch_call: Callable[[Any, Tensor], Any],
    ) -> Pair:
        trained = module.to(device, x.dtype)
        frozen = copy.deepcopy(trained).requires_grad_(False)

        def of_either(run: Callable[[Any, Tensor], Any]) -> Callable[[Tensor], Any]:
            return lambda x: run(trained if x.requires_grad else frozen, x)

        return Pair(f"nn.{type(module).__name__}", torch_name, of_either(call), of_either(torch_call), x)

    def torch_grouped(layer: nn.GroupedLinear, x: Tensor) -> Tensor:
        return functional.grouped_mm(x, layer.weight.transpose(1, 2), offs=sizes.cumsum(0).to(torch.int32))

    grouped = "cumsum, to, grouped_mm"
    experts_of_torch = f"{grouped}, chunk, silu, mul, to, mul, grouped_mm"
    yield pair(
        "linear",
        nn.Linear(16, 16),
        lambda layer, x: layer(x),
        lambda layer, x: functional.linear(x, layer.weight, layer.bias),
    )
    yield pair(
        grouped, nn.GroupedLinear(2, 16, 16, bias=False), lambda layer, x: layer(x, sizes), torch_grouped
    )
    yield pair(
        experts_of_torch,
        nn.GroupedMLP(2, 16, 16),
        lambda mlp, x: mlp(x, sizes, probs),
        lambda mlp, x: _torch_mlp(mlp, x, sizes, probs),
    )
    yield pair(
        f"linear, topk, argsort, eq, sum, softmax, index_select two times, {experts_of_torch}, index_add",
        nn.MoE(16, 16, 2, 2),
        lambda moe, x: moe(x),
        lambda moe, x: _torch_moe(moe, x, experts),
    )


def pairs(device: torch.device) -> Iterator[Pair]:
    """Yields every small op and module with the calls that it replaces."""
    yield from _activation(device)
    yield from _norm(device)
    yield from _quantize(device)
    yield from _around_quantize(device)
    yield from _gemm(device)
    yield from _routing(device)
    yield from _modules(device)
