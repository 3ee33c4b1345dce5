"""The cases of :mod:`benchmarks.quantize`: an op, its arguments, and the code with which its bytes are compared."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.peers import Tensors
from benchmarks.quantize_case import DIRECTIONS, Call, Case
from benchmarks.quantize_grouped import grouped_cases
from transformer_plugin import ops, reference
from transformer_plugin.formats import BLOCK, FAMILIES, Format

FEATURES = 2048  # columns of SwiGLU's output; at most a third of the matrix


def _width(fmt: Format) -> int:
    """Returns the width of the format's blocks."""
    assert fmt.block is not None
    return fmt.block[1]


def _single(label: str, key: str, direction: str) -> Case:
    fmt = Format.parse(key)
    op, meaning = (partial(module.quantize, **DIRECTIONS[direction]) for module in (ops, reference))
    return Case(
        f"{label} {direction}",
        fmt,
        prepare=lambda x: (x,),
        op=lambda x: op(x, fmt.key),
        reference=lambda x: meaning(x, fmt),
        compiled=peers.quantizer(fmt, direction),
        reads=2 if fmt.family == "fp8_tensor" else 1,
    )


def _scaled(direction: str) -> Case:
    """Delayed scaling: the scale is an argument, and the amax is computed in the same pass. It is not an output."""
    fmt = Format.parse("fp8_tensor:e4m3")
    op, meaning = (partial(module.quantize_scaled, **DIRECTIONS[direction]) for module in (ops, reference))
    return Case(
        f"fp8_tensor, given scale {direction}",
        fmt,
        prepare=lambda x: (x, torch.full((1,), 100.0, device=x.device), torch.zeros(1, device=x.device)),
        op=lambda x, scale, amax: op(x, scale, fmt.key, amax),
        reference=lambda x, scale, amax: meaning(x, scale, fmt, amax),
        compiled={"rows": peers.scaled_rows, "both": peers.scaled_both}[direction],
    )


def _with_amax(label: str, key: str, direction: str) -> Case:
    """A format whose amax is an argument; with a seed if it rounds at random."""
    fmt = Format.parse(key)
    op, meaning = (partial(module.quantize, **DIRECTIONS[direction]) for module in (ops, reference))
    names = ["amax", "amax_t"] if direction == "both" else ["amax"]

    def prepare(x: Tensor) -> Tensors:
        amaxes = ops.amax(x, fmt.key, columnwise=True)
        return (
            x,
            *amaxes[: 1 + (direction == "both")],
            *([torch.tensor([7], device=x.device)] if fmt.stochastic_rounding else []),
        )

    names += ["seed"] if fmt.stochastic_rounding else []

    return Case(
        f"{label} {direction}",
        fmt,
        prepare=prepare,
        op=lambda x, *more: op(x, fmt.key, **dict(zip(names, more, strict=True))),
        reference=lambda x, *more: meaning(x, fmt, **dict(zip(names, more, strict=True))),
        compiled=None if fmt.random_hadamard else peers.quantizer(fmt, direction),
    )


def _swiglu_arguments(x: Tensor) -> Tensors:
    """Splits a matrix into a gradient [T, F], an input [T, 2F] and probabilities [T]."""
    features = min(FEATURES, x.shape[1] // 3 // BLOCK * BLOCK)
    grad, wide, _ = x.split((features, 2 * features, x.shape[1] - 3 * features), dim=1)
    return grad.contiguous(), wide.contiguous(), torch.rand(x.shape[0], device=x.device)


def _swiglu(label: str, key: str, direction: str) -> Case:
    """SwiGLU times a probability, quantized in the same pass; the bytes are those of the two separate ops."""
    fmt = Format.parse(key)
    op, meaning = (
        partial(module.activation_quantize, **DIRECTIONS[direction]) for module in (ops, reference)
    )
    step = partial(ops.quantize, **DIRECTIONS[direction])
    peer = peers.quantizer(fmt, direction)
    return Case(
        f"swiglu into {label} {direction}",
        fmt,
        prepare=lambda x: _swiglu_arguments(x)[1:],
        op=lambda x, probs: op(x, fmt.key, probs),
        reference=lambda x, probs: meaning(x, fmt, probs),
        steps=lambda x, probs: step(ops.activation(x, probs), fmt.key),
        compiled=lambda x, probs: peer(peers.swiglu(x, probs)),
    )


def _swiglu_backward(label: str, key: str) -> Case:
    fmt = Format.parse(key)
    peer, width = peers.quantizer(fmt, "both"), _width(fmt)

    def steps(grad: Tensor, x: Tensor, probs: Tensor) -> Tensors:
        grad_input, grad_probs = ops.activation_backward(grad, x, probs)
        return *ops.quantize(grad_input, fmt.key, columnwise=True), grad_probs

    def plain(grad: Tensor, x: Tensor, probs: Tensor) -> Tensors:
        *halves, grad_probs = peers.swiglu_backward(grad, x, probs, width)
        return *peer(*halves), grad_probs

    return Case(
        f"swiglu backward into {label} both",
        fmt,
        prepare=_swiglu_arguments,
        op=lambda grad, x, probs: ops.activation_backward_quantize(grad, x, fmt.key, probs),
        reference=lambda grad, x, probs: reference.activation_backward_quantize(grad, x, fmt, probs),
        steps=steps,
        compiled=plain,
    )


def _bias_backward(label: str, key: str, direction: str) -> Case:
    """A gradient quantized and summed over its rows in one pass, compared with the two separate ops."""
    fmt = Format.parse(key)
    op, meaning = (
        partial(module.bias_backward_quantize, **DIRECTIONS[direction]) for module in (ops, reference)
    )
    step = partial(ops.quantize, **DIRECTIONS[direction])
    peer, width = peers.quantizer(fmt, direction), _width(fmt)
    return Case(
        f"bias gradient with {label} {direction}",
        fmt,
        prepare=lambda grad: (grad,),
        op=lambda grad: op(grad, fmt.key),
        reference=lambda grad: meaning(grad, fmt),
        steps=lambda grad: (*step(grad, fmt.key), ops.bias_backward(grad)),
        compiled=lambda grad: (*peer(grad), peers.bias_backward(grad, width)),
        single=lambda grad: step(grad, fmt.key),
    )


def _bias_backward_alone() -> Case:
    """Only the column sums: almost no output."""
    return Case(
        "bias gradient",
        Format.parse("bf16"),
        prepare=lambda grad: (grad,),
        op=ops.bias_backward,
        reference=reference.bias_backward,
        compiled=lambda grad: grad.float().sum(0),
    )


def _norm(name: str, label: str, key: str) -> Case:
    """A norm with quantized rows as output; peers add in another order."""
    fmt = Format.parse(key)
    op, meaning, plain = (
        getattr(ops, name + "_quantize"),
        getattr(reference, name + "_quantize"),
        getattr(torch.nn.functional, name),
    )
    forward, peer = getattr(peers, name), peers.quantizer(fmt, "rows")
    vectors = 2 if name == "layer_norm" else 1  # the weight, and the bias of layer_norm

    def compiled(x: Tensor, *parameters: Tensor) -> Tensors:
        output, *moments = forward(x, *parameters, 1e-5)
        return *peer(output), *moments

    return Case(
        f"{name} into {label} rows",
        fmt,
        prepare=lambda x: (x, *(torch.rand_like(x[0]) for _ in range(vectors))),
        op=lambda x, *parameters: op(x, *parameters, 1e-5, fmt.key),
        reference=lambda x, *parameters: meaning(x, *parameters, 1e-5, fmt),
        peer=lambda x, *parameters: reference.quantize(plain(x, x.shape[1:], *parameters, eps=1e-5), fmt),
        compiled=compiled,
    )


def _scaling_arguments(x: Tensor, fmt: Format, direction: str) -> dict[str, Tensor]:
    """Returns the amaxes that a format needs for this matrix, and a seed if it rounds at random, by argument name."""
    if fmt.family == "fp8_tensor":
        return {"amax": ops.amax(x, fmt.key)}
    given = dict(zip(("amax", "amax_t"), ops.amax(x, fmt.key, columnwise=True), strict=True))
    if direction == "rows":
        del given["amax_t"]
    return given | ({"seed": torch.tensor([7], device=x.device)} if fmt.stochastic_rounding else {})


def _fused_with_amax(
    name: str, label: str, key: str, direction: str, arguments: Call, made: Call, fused: Call, compared: bool
) -> Case:
    """An op that computes a matrix and quantizes it with a given amax. ``single`` are its separate ops if ``compared``.

    ``arguments`` makes the inputs from a matrix. ``made`` computes from them the outputs, first the one to quantize.
    ``fused`` is the op of ``ops`` or ``reference``, with the inputs, a format, and the amaxes and seed.
    """
    fmt = Format.parse(key)
    step = partial(ops.quantize, **DIRECTIONS[direction])
    names = list(_scaling_arguments(torch.ones(16, 16), fmt, direction))

    def prepare(x: Tensor) -> Tensors:
        own = arguments(x)
        return *own, *_scaling_arguments(made(*own)[0], fmt, direction).values()

    def steps(*inputs: Tensor) -> Tensors:
        own, given = split(inputs)
        first, *rest = made(*own)
        return *step(first, fmt.key, **given), *rest

    def split(inputs: Tensors) -> tuple[Tensors, dict[str, Tensor]]:
        count = len(inputs) - len(names)
        return inputs[:count], dict(zip(names, inputs[count:], strict=True))

    def op(*inputs: Tensor) -> Tensors:
        own, given = split(inputs)
        return fused(ops, *own, fmt.key, given)

    def meaning(*inputs: Tensor) -> Tensors:
        own, given = split(inputs)
        return fused(reference, *own, fmt, given)

    single = steps if compared else None
    return Case(f"{name} {label} {direction}", fmt, prepare, op, meaning, steps, single=single)


def _fused_cases_with_amax() -> Iterator[Case]:
    labels = {"nvfp4": "nvfp4:e2m1", "nvfp4 random": "nvfp4:e2m1,rht,sr", "fp8_tensor": "fp8_tensor:e4m3"}
    for label, key in labels.items():
        for direction in ("rows", "both"):
            flags = DIRECTIONS[direction]
            yield _fused_with_amax(
                "swiglu into",
                label,
                key,
                direction,
                lambda x: _swiglu_arguments(x)[1:],
                lambda *own: (ops.activation(*own),),
                lambda module, x, probs, format, given, flags=flags: module.activation_quantize(
                    x, format, probs, **given, **flags
                ),
                True,
            )
        yield _fused_with_amax(
            "swiglu backward into",
            label,
            key,
            "both",
            _swiglu_arguments,
            ops.activation_backward,
            lambda module, grad, x, probs, format, given: module.activation_backward_quantize(
                grad, x, format, probs, **given
            ),
            False,
        )
        yield _fused_with_amax(
            "rms_norm into",
            label,
            key,
            "rows",
            lambda x: (x, torch.rand_like(x[0])),
            lambda x, weight: ops.rms_norm_forward(x, weight, 1e-5),
            lambda module, x, weight, format, given: module.rms_norm_quantize(
                x, weight, 1e-5, format, **given
            ),
            True,
        )
        if label == "fp8_tensor":
            continue
        yield _fused_with_amax(
            "bias gradient with",
            label,
            key,
            "both",
            lambda grad: (grad,),
            lambda grad: (grad, ops.bias_backward(grad)),
            lambda module, grad, format, given: module.bias_backward_quantize(
                grad, format, **given, columnwise=True
            ),
            True,
        )


def _dequantize(label: str, key: str) -> Case:
    fmt = Format.parse(key)
    return Case(
        f"dequantize {label} rows",
        fmt,
        prepare=lambda x: ops.quantize(x, fmt.key),
        op=lambda data, scale: ops.dequantize(data, scale, fmt.key, torch.bfloat16),
        reference=lambda data, scale: reference.dequantize(data, scale, fmt, torch.bfloat16),
        compiled=lambda data, scale: peers.dequantize(data, scale, fmt),
    )


def _requantize(label: str, key: str) -> Case:
    """Row-wise data to transposed data. Scales of dtypes that Inductor does not support are passed as bytes."""
    fmt = Format.parse(key)
    peer, dtype = peers.quantizer(fmt, "transposed"), fmt.scale_dtype
    assert dtype is not None
    known = torch.uint8 if dtype == torch.float8_e8m0fnu else dtype

    def prepare(x: Tensor) -> Tensors:
        data, scale = ops.quantize(x, fmt.key)
        return data, scale.view(known)

    def op(data: Tensor, scale: Tensor) -> Tensors:
        return ops.requantize_transposed(data, scale.view(dtype), fmt.key, torch.bfloat16)

    def meaning(data: Tensor, scale: Tensor) -> Tensors:
        return reference.requantize_transposed(data, scale.view(dtype), fmt, torch.bfloat16)

    def steps(data: Tensor, scale: Tensor) -> Tensors:
        matrix = ops.dequantize(data, scale.view(dtype), fmt.key, torch.bfloat16)
        return ops.quantize(matrix, fmt.key, rowwise=False, columnwise=True)

    return Case(
        f"requantize {label} transposed",
        fmt,
        prepare=prepare,
        op=op,
        reference=meaning,
        steps=steps,
        compiled=lambda data, scale: peer(peers.dequantize(data, scale, fmt)),
    )


def cases() -> Iterator[Case]:
    """Yields every row of the result."""
    for direction in DIRECTIONS:
        yield _single("fp8_block", "fp8_block:e4m3", direction)
    for direction in ("rows", "both"):
        yield _single("fp8_block square", "fp8_block:e4m3,square", direction)
    for direction in ("rows", "both"):
        yield _single("fp8_tensor", "fp8_tensor:e4m3", direction)
    for direction in ("rows", "both"):
        yield _scaled(direction)
    if "mxfp8" in FAMILIES:
        for direction in DIRECTIONS:
            yield _single("mxfp8", "mxfp8:e4m3", direction)
    for direction in ("rows", "both"):
        yield _with_amax("nvfp4, amax given,", "nvfp4:e2m1", direction)
    yield _with_amax("nvfp4, rotated, random,", "nvfp4:e2m1,rht,sr", "both")
    for label, key in (("fp8_block", "fp8_block:e4m3"), ("mxfp8", "mxfp8:e4m3")):
        for direction in ("rows", "both"):
            yield _swiglu(label, key, direction)
        yield _swiglu_backward(label, key)
    for label, key in (("fp8_block", "fp8_block:e4m3"), ("mxfp8", "mxfp8:e4m3")):
        for direction in ("transposed", "both"):
            yield _bias_backward(label, key, direction)
    yield _bias_backward_alone()
    for label, key in (("fp8_block", "fp8_block:e4m3"), ("mxfp8", "mxfp8:e4m3")):
        for name in ("rms_norm", "layer_norm"):
            yield _norm(name, label, key)
    yield from _fused_cases_with_amax()
    yield _dequantize("fp8_block", "fp8_block:e4m3")
    yield _requantize("fp8_block", "fp8_block:e4m3")
    yield _requantize("mxfp8", "mxfp8:e4m3")
    yield from grouped_cases()
