"""A few valid calls of every op of ``torch.ops.transformer_plugin``, with small arguments, by name.

Tests of properties that all ops must have use this table: which arguments they refuse, that a refused call changes no
argument, and that no arguments end the process. A test compares it with the registry, so no op is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.testing.every_op_layers import (
    deferred_wgrad_calls,
    layer_calls,
    layer_out_calls,
    operand,
)
from transformer_plugin.testing.every_op_quantize import (
    BFLOAT16,
    DENSE,
    FLOAT32,
    GROUPED,
    ROLES,
    SIZES,
    Calls,
    Draw,
    Sizes,
    amaxes_and_seed,
    list_calls,
    ops,
    quantize_calls,
    scaled_calls,
)


@dataclass(frozen=True)
class Call:
    """One call of an op, with its arguments by name."""

    op: str  # of an overload "linear.scaled"
    name: str
    arguments: dict[str, Any]

    @property
    def packet(self) -> str:
        """The op without the name of an overload."""
        return self.op.partition(".")[0]

    @property
    def function(self) -> torch._ops.OpOverload:
        """What the call calls."""
        return overload(self.op)


def overload(op: str) -> torch._ops.OpOverload:
    """Returns the overload of this name."""
    packet, _, name = op.partition(".")
    found: torch._ops.OpOverload = getattr(getattr(torch.ops.transformer_plugin, packet), name or "default")
    return found


def _gemm_calls(draw: Draw) -> Calls:
    T, N, K, G = draw.TNKG
    dense = {"a": draw(T, K), "b": draw(N, K), "bias": draw(N), "transpose_b": True, "alpha": draw.rand(1)}
    yield "gemm", "", dense
    for name, of_out in (("", {"beta": draw.rand(1)}), ("accumulate", {"accumulate": True})):
        yield "gemm_out", name, {**dense, "out": draw.zeros(T, N), **of_out}
    each: dict[str, Any] = {
        "alpha": draw.rand(G),
        "bias": draw(G, N),
        "bias_scale": draw(T),
        "max_sms": 0,
        "expected_rows": -1,
    }
    sizes = {"group_sizes": draw.group_sizes()}
    rows = {"rows": draw.rows()}
    grouped = {"a": draw(T, K), "b": [draw(G, N, K)], **sizes, "transpose_b": True, **each}
    out = {"out": draw.zeros(T, N), "beta": draw.rand(G)}
    yield "grouped_gemm", "", {**grouped, **rows}
    yield "grouped_gemm", "b is not transposed", {**grouped, "b": [draw(G, K, N)], "transpose_b": False}
    yield "grouped_gemm_out", "", {**grouped, **rows, **out}
    if G > 0:
        matrices = {"b": [draw(N, K) for _ in draw.groups]}
        yield "grouped_gemm", "a list", {**grouped, **rows, **matrices}
        yield "grouped_gemm_out", "a list", {**grouped, **rows, **out, **matrices}
    yield "gather_rows_backward", "", {"grad": draw(T, K), **rows, **sizes, "num_rows": T}
    wgrad = {
        "grad": draw(T, N),
        "input": draw(T, K),
        **sizes,
        "alpha": draw.rand(G),
        "input_rows": draw.rows(),
        "grad_rows": draw.rows(),
    }
    yield "grouped_gemm_wgrad", "", {**wgrad, "dtype": FLOAT32}
    into = {"accumulate": False, "beta": draw.rand(G)}
    yield "grouped_gemm_wgrad_out", "", {**wgrad, "out": [draw.zeros(G, N, K)], **into}
    if G > 0:
        out_list = [draw.zeros(N, K) for _ in draw.groups]
        yield "grouped_gemm_wgrad_out", "a list", {**wgrad, "out": out_list, **into}
    yield from _quantized_product_calls(draw, out, each)
    yield from _fp8_row_calls(draw, out, each)
    dtypes = {"dtype": BFLOAT16, "out_dtype": BFLOAT16}
    plan = {"rows": T, "groups": G, "n": N, "k": K, "multiprocessors": 132, **dtypes}
    for product in ("forward", "data_grad", "weight_grad"):
        formats = {"product": product, "a_format": "none", "b_format": "none"}
        yield "grouped_gemm_plan", product, {**formats, **plan}
    yield "bias_backward", "", {"grad": draw(T, N)}
    yield (
        "grouped_bias_backward",
        "",
        {"grad": draw(T, N), **sizes, "bias": draw(G, N), "bias_scale": draw(T)},
    )


def _separate(b: dict[str, Any]) -> dict[str, Any]:
    """Returns the matrices of a quantized stack as a list, with separate scales."""
    scales = [scale.view(1) if scale.dim() == 0 else scale for part in b["b_scale"] for scale in part]
    return {**b, "b": list(b["b"]), "b_scale": scales}


def _quantized_product_calls(draw: Draw, out: dict[str, Any], each: dict[str, Any]) -> Calls:
    T, N, K, G = draw.TNKG
    sizes, kept = draw.group_sizes(), {"alpha": each["alpha"]}
    for a_key, b_key in (("fp8_tensor", "fp8_tensor"), ("fp8_block", "fp8_block:square"), ("nvfp4", "nvfp4")):
        b = operand("b", draw(N, K), b_key)
        dense = {**operand("a", draw(T, K), a_key), **b, "bias": draw(N)}
        yield "gemm", a_key, {**dense, "dtype": BFLOAT16}
        yield "gemm_out", a_key, {**dense, "out": draw.zeros(T, N), "beta": draw.rand(1)}
        a = operand("a", draw(T, K), a_key, sizes)
        b = operand("b", draw(G, N, K), b_key)
        grouped = {**a, **b, "group_sizes": sizes, **each}
        one = {**grouped, "b": [b["b"]]}
        yield "grouped_gemm", a_key, {**one, "dtype": BFLOAT16}
        yield "grouped_gemm_out", a_key, {**one, **out}
        if G > 0:
            of_list = {**grouped, **_separate(b)}
            yield "grouped_gemm", f"{a_key}, a list", {**of_list, "dtype": BFLOAT16}
            yield "grouped_gemm_out", f"{a_key}, a list", {**of_list, **out}
        grad = operand("grad", draw(T, N), a_key, sizes, transposed=True)
        input = operand("input", draw(T, K), a_key, sizes, transposed=True)
        of_grad: dict[str, Any] = {**grad, **input, "group_sizes": sizes, **kept}
        yield "grouped_gemm_wgrad", a_key, {**of_grad, "dtype": BFLOAT16}
        into = {"accumulate": False, "beta": draw.rand(G)}
        yield "grouped_gemm_wgrad_out", a_key, {**of_grad, "out": [draw.zeros(G, N, K)], **into}
        if G > 0:
            buffers = [draw.zeros(N, K) for _ in draw.groups]
            yield "grouped_gemm_wgrad_out", f"{a_key}, a list", {**of_grad, "out": buffers, **into}


def _fp8_row_calls(draw: Draw, out: dict[str, Any], each: dict[str, Any]) -> Calls:
    T, N, K, G = draw.TNKG
    a, one = operand("a", draw(T, K), "fp8_row"), {"alpha": draw.rand(1), "bias": draw(N)}
    dense = {**a, **operand("b", draw(N, K), "fp8_row"), **one}
    yield "gemm", "fp8_row", {**dense, "dtype": FLOAT32}
    yield "gemm_out", "fp8_row", {**dense, "out": draw.zeros(T, N), "beta": draw.rand(1)}
    b = operand("b", draw(G, N, K), "fp8_row")
    grouped = {**a, **b, **each, "group_sizes": draw.group_sizes()}
    yield "grouped_gemm", "fp8_row", {**grouped, "b": [b["b"]], "dtype": FLOAT32}
    yield "grouped_gemm_out", "fp8_row", {**grouped, "b": [b["b"]], **out}
    if G > 0:
        yield "grouped_gemm", "fp8_row, a list", {**grouped, **_separate(b), "dtype": FLOAT32}


def _norm_calls(draw: Draw) -> Calls:
    T, _, K, _ = draw.TNKG
    if K == 0:
        return  # nothing to normalize
    x, weight, bias = draw(T, K), {"weight": draw(K)}, {"bias": draw(K)}
    mean, rstd = {"mean": draw(T)}, {"rstd": draw.rand(T)}
    options = {"eps": 1e-5, "zero_centered": True}
    zero_centered = {"zero_centered": True}
    for op in ("rms_norm", "rms_norm_forward"):
        yield op, "", {"input": x, **weight, **options}
    for op in ("layer_norm", "layer_norm_forward"):
        yield op, "", {"input": x, **weight, **bias, **options}
    grads = {"grad": draw(T, K), "input": x, **weight, **rstd, **zero_centered}
    yield "rms_norm_backward", "", grads
    yield "layer_norm_backward", "", {**grads, **mean, "has_bias": True}
    for key in ("fp8_block", "mxfp8", "nvfp4:sr"):
        more = amaxes_and_seed(x, key, "rows")
        yield "rms_norm_quantize", key, {"input": x, **weight, **options, "format": key, **more}
        yield "layer_norm_quantize", key, {"input": x, **weight, **bias, **options, "format": key, **more}


def _norm_linear_calls(draw: Draw) -> Calls:
    T, N, K, _ = draw.TNKG
    if K == 0:
        return  # nothing to normalize
    for i, keys in enumerate(ROLES):
        roles = dict(zip(("input_format", "weight_format", "grad_format"), keys, strict=True))
        weight = draw(N, K, dtype=BFLOAT16)
        norm = {"normalization": "layer_norm", "norm_bias": draw(K, dtype=BFLOAT16)}
        yield (
            "norm_linear",
            keys[0],
            {
                **{"input": draw(T, K, dtype=BFLOAT16), "norm_weight": draw(K, dtype=BFLOAT16)},
                **(norm if i % 2 else {"normalization": "rms_norm", "norm_bias": None}),
                **{"weight": weight, "bias": draw(N, dtype=BFLOAT16), "eps": 1e-5, **roles},
                **{"zero_centered": True, "return_normalized": i % 3 == 0},
                "quantized_weight": None if keys[0] == "none" else ops.quantize_weight([weight], **roles),
                **({"main_grad": draw.zeros(N, K), "weight_grad": "empty"} if i % 2 else {}),
            },
        )


def _routing_calls(draw: Draw) -> Calls:
    T, _, K, _ = draw.TNKG
    tokens, experts, topk, capacity = T, 8, 2, 2 * T
    logits, indices = draw(tokens, experts), draw.indices(tokens, topk, experts)
    for dtype in (FLOAT32, BFLOAT16):
        product = {"input": draw(tokens, K, dtype=dtype), "weight": draw(experts, K, dtype=dtype)}
        name, both = str(dtype).removeprefix("torch."), {"for_input": True, "for_weight": True}
        yield "router_logits", name, product
        yield "router_logits_with_tokens", name, product
        addend = {"grad_tokens": draw(tokens, K, dtype=dtype)}
        yield "router_logits_backward", name, {"grad": logits, **product, **both, **addend}
    score = {"score_function": "sigmoid"}
    groups = {"num_groups": 4, "group_topk": 2, "scaling_factor": 2.0}
    router = {"logits": logits, "topk": topk, "pre_softmax": False}
    yield "topk_router", "sigmoid", {**router, **score, **groups, "expert_bias": draw(experts)}
    yield "topk_router", "softmax", {**router, "score_function": "softmax", "expert_bias": None}
    loaded = {**router, **score, **groups, "group_score_topk": 2}
    yield "topk_router_with_load", "", {**loaded, "expert_bias": draw(experts)}
    backward = {"grad": draw(tokens, topk), "logits": logits, "indices": indices.int(), **score}
    yield "topk_router_backward", "", {**backward, "pre_softmax": False, "scaling_factor": 2.0}
    yield "router_scores", "", {"logits": logits, **score}
    yield "router_scores_backward", "", {"grad": draw(tokens, experts), "logits": logits, **score}
    loss = {"tokens_per_expert": draw.integers([2] * experts), "total_tokens": draw.integers(tokens)}
    yield "aux_loss", "", {"scores": logits.softmax(1), **loss, "topk": topk, "coeff": 0.1}
    yield (
        "aux_loss_backward",
        "",
        {"grad": draw.rand(), **loss, "tokens": tokens, "topk": topk, "coeff": 0.1},
    )
    sizes = {"num_experts": experts, "capacity": capacity, "alignment": 1}
    yield "assign_slots", "", {"indices": indices, "first_expert": 0, **sizes}
    weighted = {"indices": indices, "weights": draw.rand(tokens, topk)}
    yield "assign_weighted_slots", "", {**weighted, "first_expert": 0, **sizes}
    yield "count_tokens_per_expert", "", {"indices": indices, "num_experts": experts}
    yield "permute", "", {"tokens": draw(tokens, K), "indices": indices, **sizes}
    slot, source, _, _, _ = ops.assign_slots(indices, 0, experts, capacity, 1)
    slots = {"slot": slot, "source": source}
    rows, weights = draw(capacity, K), {"weights": draw.rand(tokens, topk)}
    yield "permute_backward", "", {"grad": rows, "slot": slot}
    for name, of_rows in (("", {}), ("groups", {"group_sizes": draw.integers([capacity])})):
        yield "permute_rows", name, {"tokens": draw(tokens, K), **slots, **of_rows}
    yield "unpermute", "", {"rows": rows, **slots, **weights}
    yield "unpermute_backward", "", {"grad": draw(tokens, K), "rows": rows, **slots, **weights}
    yield from _expert_parallel_calls(draw, indices, experts, capacity)


def _cross_entropy_calls(draw: Draw) -> Calls:
    """Calls with this process alone, whose last column is padding."""
    T, _, K, _ = draw.TNKG
    if K < 2:
        return  # no vocabulary
    logits, target = draw(T, K), draw.indices(T, 1, K - 1)[:, 0]
    options = {"vocabulary": K - 1, "num_ranks": 1, "group_name": "", "label_smoothing": 0.1}
    rows = {"logits": logits, "target": target, **options, "ignore_index": 0}
    for op in ("vocab_parallel_cross_entropy", "vocab_parallel_cross_entropy_forward"):
        yield op, "", {**rows, "timeout_ms": 1000}
    stats = torch.stack([logits.amax(1), draw.rand(T) + 1.0], 1)
    yield "vocab_parallel_cross_entropy_backward", "", {"grad": draw(T), **rows, "stats": stats}


def _expert_parallel_calls(draw: Draw, indices: Tensor, experts: int, capacity: int) -> Calls:
    """Calls of the ops that exchange tensors with other ranks, in a group of this process only."""
    K = draw.TNKG[2]
    tokens, topk = indices.shape
    group = {"group_name": "", "timeout_ms": 1000}
    plan = {"topk_idx": indices, "num_experts": experts, "max_tokens": tokens, "capacity": capacity}
    yield "plan", "", {**plan, "alignment": 1, "num_ranks": 1, "raise_on_overflow": False, **group}
    yield "compact_plan", "", {**plan, "alignment": 1, "num_ranks": 1, "max_received_tokens": 3, **group}
    yield "compact_plan", "by records", {**plan, "alignment": 1, "num_ranks": 1, "records": True, **group}
    yield (
        "select_transport",
        "",
        {"num_ranks": 2, "device_type": indices.device.type, "peer_memory": False},
    )
    slot, source, *_ = ops.plan(indices, experts, tokens, capacity)
    slots = {"slot": slot, "source": source}
    weights = draw.rand(tokens, topk)
    yield "dispatch", "", {"tokens": draw(tokens, K), "topk_weights": weights, **slots, **group}
    rows = draw(capacity, K)
    buffers = {"recv": draw(capacity, K), "recv_weights": draw(capacity)}
    given = {"tokens": draw(tokens, K), "topk_weights": weights, **slots}
    yield "dispatch_out", "", {**given, **buffers, **group}
    backward = {"grad_recv": rows, "grad_recv_weights": draw(capacity), "slot": slot, "num_tokens": tokens}
    yield "dispatch_backward", "", {**backward, "hidden_size": K, "dtype": FLOAT32, **group}
    yield "combine", "", {"rows": rows, **slots, "num_tokens": tokens, **group}
    yield "combine_backward", "", {"grad": draw(tokens, K), **slots, **group}
    yield (
        "combine_backward_out",
        "",
        {"grad": draw(tokens, K), **slots, "grad_rows": draw(capacity, K), **group},
    )
    once = {**slots, "expand": False, **group}
    yield "dispatch", "each token once", {"tokens": draw(tokens, K), "topk_weights": weights, **once}
    yield "combine", "each token once", {"rows": draw(tokens, K), "num_tokens": tokens, **once}
    yield from _collective_calls(draw, indices, experts)


def _collective_calls(draw: Draw, indices: Tensor, experts: int) -> Calls:
    """Calls of the other ops over ranks, likewise."""
    K, tokens = draw.TNKG[2], indices.shape[0]
    group = {"group_name": "", "timeout_ms": 1000}
    yield "all_gather", "", {"input": draw(tokens, K), "num_ranks": 1, **group}
    yield "reduce_scatter", "", {"input": draw(tokens, K), "num_ranks": 1, **group}
    yield "all_reduce", "", {"input": draw(tokens, K), "num_ranks": 1, **group}
    yield "copy_to_group", "", {"input": draw(tokens, K), "num_ranks": 1, **group}
    work = torch.zeros(1, dtype=torch.int64, device=indices.device)
    for name, given in (
        ("all_gather", {"input": draw(tokens, K)}),
        ("reduce_scatter", {"input": draw(tokens, K)}),
    ):
        yield f"start_{name}", "", {**given, "num_ranks": 1, **group}
        yield f"finish_{name}", "", {"work": work, **given, "num_ranks": 1, **group}
    both = {"inputs": [draw(tokens, K), draw(K)], "out": [draw(tokens, K), draw(K)]}
    yield "all_gather_list_out", "", {**both, "num_ranks": 1, **group}
    summed = {"input": draw(tokens, K), "out": draw(tokens, K), "accumulate": True}
    yield "reduce_scatter_out", "", {**summed, "num_ranks": 1, **group}
    yield from _cross_entropy_calls(draw)
    yield "embedding", "", {"indices": indices, "weight": draw(experts, K), "padding_idx": 1}
    part = draw(tokens, K), None, None, "none", False, False, f"rows={tokens},ranks=1,group="
    names = ("data", "scale_inv", "amax", "format", "columnwise", "backward", "shard")
    yield "gather_weight", "", dict(zip(names, part, strict=True))
    matrices = {"shards": [draw(tokens, K), draw(tokens, K)], "backward": False}
    yield "gather_weight_list", "", {**matrices, "shard": f"rows={tokens},ranks=1,list,group="}
    summed = {
        "unsharded_grad": draw(tokens, K),
        "weight": draw(tokens, K),
        "out": draw(tokens, K),
        "accumulate": True,
    }
    yield "reduce_gradient_out", "", {**summed, "shard": f"rows={tokens},ranks=1,mean,group="}
    begun = {"unsharded_grad": summed["unsharded_grad"], "shard": f"rows={tokens},ranks=1,mean,group="}
    begun["weight"] = draw(tokens, K)
    yield "start_reduce_gradient", "", begun
    yield "finish_reduce_gradient", "", {"work": work, **begun}
    yield "configure_gathers", "", {"group_name": "", "distance": 1, "in_graphs": False}
    for name in ("clear_gathers", "count_gathers"):
        yield name, "", {"group_name": ""}
    yield "invalidate_prefetched", "", {}
    yield "enter_gather_region", "", {"input": draw(tokens, K), "group_name": ""}
    yield "leave_gather_region", "", {"output": draw(tokens, K), "group_name": ""}
    yield "all_gather_text", "", {"group_name": "", "text": "one configuration", "timeout_ms": 1000}
    yield "compare_header", "", {"group_name": "", "dtype": FLOAT32, "width": 8, "timeout_ms": 1000}
    sizes = dict.fromkeys(
        ("received_rows", "returned_rows", "record_bytes", "num_experts", "planned_rows", "topk"), 8
    )
    yield "open_channel", "", {"group_name": "", **sizes, "timeout_ms": 1000, "device": None}
    yield "peer_memory_support", "", {"group_name": "", "timeout_ms": 1000, "device": None}
    yield "symmetric_allocate", "", {"group_name": "", "num_bytes": 64, "timeout_ms": 1000, "device": None}
    allocation, _ = torch.ops.transformer_plugin.symmetric_allocate("", 64)
    yield "symmetric_empty", "", {"group_name": "", "allocation": allocation, "num_bytes": 8}
    yield "is_symmetric", "", {"tensor": draw(tokens, K)}
    yield "release_group", "", {"group_name": ""}


def _families(draw: Draw) -> Iterator[Calls]:
    for key in DENSE:
        yield quantize_calls(draw, key, False)
    for key in GROUPED:
        yield quantize_calls(draw, key, True)
    families = (list_calls, scaled_calls, _gemm_calls, layer_calls, _norm_calls, _norm_linear_calls)
    for family in (*families, layer_out_calls, deferred_wgrad_calls, _routing_calls):
        yield family(draw)


def calls(sizes: Sizes = SIZES, device: str = "cpu", *, strict: bool = True) -> Iterator[Call]:
    """Yields the table with newly drawn tensors: at least one call for each op. If not `strict`, calls whose sizes
    an op refuses are left out."""
    for family in _families(Draw(sizes, device)):
        try:
            for op, name, arguments in family:
                yield Call(op, name, arguments)
        except (ValueError, TypeError, RuntimeError, MemoryError):
            if strict:
                raise


def registered() -> dict[str, torch._C.FunctionSchema]:
    """Returns the schema of every op, by name."""
    schemas = torch._C._jit_get_all_schemas()
    prefix = "transformer_plugin::"
    found = {}
    for schema in schemas:
        if schema.name.startswith(prefix):
            end = f".{schema.overload_name}" if schema.overload_name else ""
            found[schema.name.removeprefix(prefix) + end] = schema
    return found
