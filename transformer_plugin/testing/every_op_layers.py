"""Calls of the layers and of delayed weight gradients, for testing/every_op.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.testing.every_op_quantize import (
    BFLOAT16,
    DIRECTIONS,
    ROLES,
    Calls,
    Draw,
    amaxes_and_seed,
    ops,
)


def operand(
    name: str, x: Tensor, key: str, sizes: Tensor | None = None, *, transposed: bool = False
) -> dict[str, Any]:
    direction = "columns" if transposed else "rows"
    more = amaxes_and_seed(x, key, direction, sizes)
    data, scale = ops.quantize(x, key, sizes, **more, **DIRECTIONS[direction])
    amax = [more["amax_t" if transposed else "amax"]] if Format.parse(key).needs_amax else []
    return {name: data, f"{name}_scale": [scale, *amax], f"{name}_format": key}


def _list_layer_calls(
    draw: Draw, weights: tuple[Tensor, Tensor], common: dict[str, Any], probs: dict[str, Any]
) -> Calls:
    """Calls of the grouped layers whose weight is a list, with buffers for its gradients."""
    fc1, fc2 = map(list, weights)
    first, second = ([draw.zeros(*matrix.shape) for matrix in weight] for weight in (fc1, fc2))
    name, into = f"{common['input_format']}, a list", {"accumulate": False, "weight_grad": "zeros"}
    yield "grouped_linear", name, {**common, "weight": fc1, "main_grad": first, **into}
    main_grads = {"fc1_main_grad": first, "fc2_main_grad": second}
    yield "grouped_mlp", name, {**common, **probs, "fc1_weight": fc1, "fc2_weight": fc2, **main_grads, **into}


def layer_calls(draw: Draw) -> Calls:
    T, N, K, G = draw.TNKG
    sizes, probs = {"group_sizes": draw.group_sizes()}, {"probs": draw(T)}
    for keys in ROLES:
        roles = dict(zip(("input_format", "weight_format", "grad_format"), keys, strict=True))
        weight, weights = draw(N, K, dtype=BFLOAT16), draw(G, N, K, dtype=BFLOAT16)
        fc2 = draw(G, K, N // 2, dtype=BFLOAT16)
        kept, quantized, kept_fc1, kept_fc2 = ({}, {}, {}, {})
        if keys[0] != "none":
            fresh = ops.quantize_weight([weight], **roles)
            yield "quantize_weight", keys[0], {"weight": [weight], **roles}
            yield "quantize_weight_out", keys[0], {"weight": [weight], **roles, "out": fresh}
            kept = {"quantized_weight": fresh}
            fresh = ops.quantize_weight([weights], **roles)
            if G > 1:
                of_list, name = {"weight": list(weights), **roles}, f"{keys[0]}, a list"
                yield "quantize_weight", name, of_list
                yield "quantize_weight_out", name, {**of_list, "out": fresh}
            quantized, kept_fc1 = {"quantized_weight": fresh}, {"quantized_fc1_weight": fresh}
            kept_fc2 = {"quantized_fc2_weight": ops.quantize_weight([fc2], **roles)}
        input, bias = draw(T, K, dtype=BFLOAT16), draw(N, dtype=BFLOAT16)
        yield "linear", keys[0], {"input": input, "weight": weight, "bias": bias, **roles, **kept}
        into = {"main_grad": draw.zeros(N, K), "accumulate": False, "weight_grad": "zeros"}
        yield "linear", f"{keys[0]}, main_grad", {"input": input, "weight": weight, **roles, **into}
        biases = {"bias": draw(G, N, dtype=BFLOAT16), "bias_scale": draw(T)}
        yield (
            "grouped_linear",
            keys[0],
            {"input": input, "weight": [weights], **sizes, **biases, **roles, **quantized},
        )
        yield (
            "grouped_mlp",
            keys[0],
            {
                **{"input": input, "fc1_weight": [weights], "fc2_weight": [fc2], **sizes, **probs, **roles},
                **{"fc1_bias": draw(G, N, dtype=BFLOAT16), "fc2_bias": draw(G, K, dtype=BFLOAT16)},
                **{**kept_fc1, **kept_fc2},
            },
        )
        if G > 0:
            yield from _list_layer_calls(draw, (weights, fc2), {"input": input, **sizes, **roles}, probs)
    product = {
        "a": draw(T, K),
        "b": draw(G, 2 * N, K),
        **sizes,
        **probs,
        "bias": draw(G, 2 * N),
        "activation": "swiglu:interleave=32",
    }
    yield "grouped_gemm_activation", "", {**product, "keep_input": True}
    yield "grouped_gemm_activation_quantize", "", {**product, "keep_input": True, "format": "mxfp8"}
    yield "check_group_sizes", "", {}
    every_row = {"group_sizes": draw.integers([T])}  # others have unspecified results, which differ
    yield from _activation_calls(draw, probs, every_row)


def _activation_calls(draw: Draw, probs: dict[str, Any], every_row: dict[str, Any]) -> Calls:
    T, _, K, _ = draw.TNKG
    for name, of_rows in (("", {}), ("groups", every_row)):
        yield "activation", name, {"input": draw(T, K), **probs, **of_rows}
        yield "activation_backward", name, {"grad": draw(T, K // 2), "input": draw(T, K), **probs, **of_rows}
    for key in ("swiglu:interleave=1,limit=0.5,alpha=1.702,offset=1", "geglu_tanh"):
        other = {"input": draw(T, K), **probs, "activation": key}
        yield "activation", key, other
        yield "activation_backward", key, {"grad": draw(T, K // 2), **other}
    without_gate = {"input": draw(T, K), **probs, "activation": "relu2"}
    yield "activation", "without a gate", without_gate
    yield "activation_backward", "without a gate", {"grad": draw(T, K), **without_gate}


def _token_calls(draw: Draw, mlp: dict[str, Any], roles: dict[str, str]) -> Calls:
    """Calls of experts that read rows of tokens: one row for each token, in their order."""
    T, _, K, G = draw.TNKG
    slot, source, _, sizes, _ = ops.assign_slots(draw.indices(T, 1, G), 0, G, T, 1)
    tokens = {**mlp, "group_sizes": sizes, "slot": slot, "source": source}
    yield "grouped_mlp", "tokens", {**tokens, **roles}
    alone = {"over_ranks": True, "group_name": "", "timeout_ms": 1000}
    yield "grouped_mlp", "over ranks", {**tokens, **roles, "probs": draw.rand(T, 1), **alone}
    yield "grouped_mlp_out", "tokens", {**tokens, "out": draw(T, K, dtype=BFLOAT16)}


def layer_out_calls(draw: Draw) -> Calls:
    """Layers with buffers of the caller, which the forward and the backward write."""
    T, N, K, G = draw.TNKG
    keys = ("fp8_block", "fp8_block:square", "fp8_block")
    roles = dict(zip(("input_format", "weight_format", "grad_format"), keys, strict=True))
    input, sizes = draw(T, K, dtype=BFLOAT16), {"group_sizes": draw.group_sizes()}
    out, dgrad_out = ({"out": draw(T, width, dtype=BFLOAT16)} for width in (N, K))
    keeps = {"save_original_input": True, "dgrad_out": dgrad_out["out"]}
    linear = {"input": input, "weight": draw(N, K, dtype=BFLOAT16), **keeps}
    yield "linear", "buffers", {**linear, **roles}
    yield "linear_out", "", {**linear, **out, "bias": draw(N)}
    grouped = {"input": input, **sizes, "weight": [draw(G, N, K, dtype=BFLOAT16)], **keeps}
    yield "grouped_linear", "buffers", {**grouped, **roles}
    yield "grouped_linear_out", "", {**grouped, **out, "bias": draw(G, N), "bias_scale": draw(T)}
    weights = {
        "fc1_weight": [draw(G, N, K, dtype=BFLOAT16)],
        "fc2_weight": [draw(G, K, N // 2, dtype=BFLOAT16)],
    }
    yield "connect_gradient", "", {"value": draw(T, K), "source": draw(T, K)}
    mlp = {"input": input, **weights, **sizes, "probs": draw(T)}
    yield "grouped_mlp", "buffers", {**mlp, **roles, "dgrad_out": keeps["dgrad_out"]}
    if G > 0:
        yield from _token_calls(draw, mlp, roles)
    yield "grouped_mlp_out", "", {**mlp, "out": draw(T, K, dtype=BFLOAT16), "dgrad_out": keeps["dgrad_out"]}


def deferred_wgrad_calls(draw: Draw) -> Calls:
    T, N, K, G = draw.TNKG
    sizes, queue = draw.group_sizes(), {"queue": torch.tensor(ops.new_wgrad_queue())}
    options: dict[str, Any] = {"dtype": BFLOAT16, "max_sms": 0, "expected_rows": -1, "copy": True}
    yield "defer_wgrad", "", {**queue, "grad": draw(T, N), "input": draw(T, K), **options}
    for key in ("fp8_block", "nvfp4"):
        grad = operand("grad", draw(T, N), key, sizes, transposed=True)
        input = operand("input", draw(T, K), key, sizes, transposed=True)
        yield "defer_wgrad", key, {**queue, **grad, **input, "group_sizes": sizes, **options}
    queue = {"queue": torch.tensor(ops.new_wgrad_queue())}
    for accumulate in (False, True):
        yield (
            "run_deferred_wgrads",
            f"{accumulate}",
            {
                **queue,
                "out": [draw.zeros(G, N, K)],
                "accumulate": accumulate,
            },
        )
    number = int(queue["queue"])
    yield "new_wgrad_queue", "", {}
    yield "count_deferred_wgrads", "", {"queue": number}
    layer = {"input": draw(T, K, dtype=BFLOAT16), "wgrad_queue": queue["queue"]}
    yield "linear", "a queue", {**layer, "weight": draw(N, K, dtype=BFLOAT16)}
    weights = [draw(G, N, K, dtype=BFLOAT16)]
    yield "grouped_linear", "a queue", {**layer, "weight": weights, "group_sizes": sizes}
    yield "release_wgrad_queue", "", {"queue": ops.new_wgrad_queue()}
