"""Every layer in every way in which ranks share it, and what the full layer computes in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.parallel.layer_case import Case, Place, ShardOf, even, everything, padded
from tests.parallel.plain_layers import Tensors, experts, grouped, mixture, norm_linear, normalized, routing
from transformer_plugin import nn as tnn
from transformer_plugin import ops, recipes
from transformer_plugin.launch import LaunchOptions
from transformer_plugin.parallel.styles import ExpertTensorParallel

#: Rows of an input, and widths: slices of four ranks have blocks of 16, of two ranks 32.
ROWS, K, N, F = 24, 64, 128, 64
#: Of three groups; the last rows belong to none.
SIZES = [9, 0, 11]
EXPERTS, TOPK, AUX = 4, 2, 0.5
VOCABULARY = 21


def linear_cases() -> Iterator[Case]:
    for returns in (False, True):
        for rows in (False, True):
            for note, columns, options in (
                ("", even(0), {}),
                ("sections", even(0, (96, 32)), {"sections": (96, 32)}),
                ("padded", padded(0), {"pad_outputs": True}),
            ):
                outputs = N - 3 if note == "padded" else N
                of_columns = padded(-1) if note == "padded" else even(-1, options.get("sections", ()))
                yield linear("column", rows, returns, (outputs, columns, of_columns), options, note)
            yield linear("row", rows, returns, (N, everything, everything), {}, "")


def linear(
    mode: str,
    rows: bool,
    returns: bool,
    columns: tuple[int, ShardOf, ShardOf],
    options: dict[str, Any],
    note: str,
) -> Case:
    outputs, of_weight, of_output = columns
    of_rows = even(0) if rows else everything
    is_row = mode == "row"
    options = {**options, "parallel_mode": mode, "sequence_parallel": rows}

    def make(place: Place, common: dict[str, Any]) -> Any:
        return tnn.Linear(K, outputs, return_bias=returns, **common, **place.parallel(**options))

    def results(found: Any) -> Sequence[Tensor]:
        if is_row and returns:  # added outside, by each rank to its rows
            return (found[0] + found[1],)
        return tuple(found) if returns else (found,)

    def plain(p: Tensors, x: Tensors) -> Sequence[Tensor]:
        product = functional.linear(x["input"], p["weight"])
        return (product, p["bias"]) if returns and not is_row else (product + p["bias"],)

    return Case(
        layer="Linear",
        way=mode,
        make=make,
        parameters={
            "weight": ((outputs, K), even(1) if is_row else of_weight),
            "bias": ((outputs,), of_weight),
        },
        inputs={"input": ((ROWS, 2, K), even(-1) if is_row else of_rows)},
        outputs=[of_rows] if is_row else [of_output, of_weight][: 1 + returns],
        plain=plain,
        results=results,
        note=f"{note} rows={rows} return_bias={returns}",
    )


def norm_linear_cases() -> Iterator[Case]:
    for kind in ("LayerNorm", "RMSNorm"):
        for rows in (False, True):
            for returns_bias, returns_norm in ((False, False), (True, False), (False, True), (True, True)):
                yield norm_linear_case(kind, rows, returns_bias, returns_norm)


def norm_linear_case(
    kind: str, rows: bool, returns_bias: bool, returns_norm: bool, sections: tuple[int, ...] = (96, 32)
) -> Case:
    of_rows = even(0) if rows else everything
    parallel = {"parallel_mode": "column", "sequence_parallel": rows, "sections": sections}
    options: dict[str, Any] = {"normalization": kind, "zero_centered": rows, "return_bias": returns_bias}

    def make(place: Place, common: dict[str, Any]) -> Any:
        own = place.parallel(**parallel)
        return tnn.LayerNormLinear(K, N, return_normalized=returns_norm, **options, **common, **own)

    of_norm = {"norm_weight": ((K,), everything)}
    of_norm |= {"norm_bias": ((K,), everything)} if kind == "LayerNorm" else {}
    returned = [even(0, sections)] if returns_bias else []
    return Case(
        layer="LayerNormLinear",
        way="column",
        make=make,
        parameters={**of_norm, "weight": ((N, K), even(0, sections)), "bias": ((N,), even(0, sections))},
        inputs={"input": ((ROWS, 2, K), of_rows)},
        outputs=[even(-1, sections), *returned, *([of_rows] if returns_norm else [])],
        plain=lambda p, x: norm_linear(p, x["input"], rows, returns_bias, returns_norm),
        note=f"{kind} rows={rows} return_bias={returns_bias} return_normalized={returns_norm}",
    )


def grouped_cases() -> Iterator[Case]:
    for way in ("column", "row", "full list"):
        for bias, scale, returns in (
            (False, False, False),
            (True, False, False),
            (True, True, False),
            (True, False, True),
        ):
            yield grouped_case(way, bias, scale, returns)


def grouped_case(way: str, bias: bool, scale: bool, returns: bool) -> Case:
    is_row, sections = way == "row", (96, 32)
    columns = everything if is_row else even(1, sections)
    parallel = {"parallel_mode": way, **({} if is_row else {"sections": sections})}
    options: dict[str, Any] = {"scale_bias": scale, "return_bias": returns}
    if "list" in way:
        options["parameters"] = "list"

    def make(place: Place, common: dict[str, Any]) -> Any:
        own = {} if "list" in way else place.parallel(**parallel)
        return tnn.GroupedLinear(len(SIZES), K, N, bias, **options, **common, **own)

    inputs = {"input": ((ROWS, K), even(-1) if is_row else everything)}
    inputs |= {"bias_scale": ((ROWS,), everything)} if scale else {}
    of_bias = {"bias": ((len(SIZES), N), columns)} if bias else {}
    return Case(
        layer="GroupedLinear",
        way=way,
        make=make,
        parameters={"weight": ((len(SIZES), N, K), even(2) if is_row else columns), **of_bias},
        inputs=inputs,
        outputs=[everything if is_row else even(-1, sections), *([columns] if returns else [])],
        plain=lambda p, x: grouped(p, x, SIZES, returns),
        given={"group_sizes": (torch.tensor(SIZES), everything)},
        results=lambda result: flattened(result),
        note=f"bias={bias} scale_bias={scale} return_bias={returns}",
    )


def flattened(result: Any) -> Sequence[Tensor]:
    """The output, and the biases that were returned, in one tensor."""
    if isinstance(result, Tensor):
        return (result,)
    output, bias = result
    return output, torch.stack(list(bias)) if isinstance(bias, list) else bias


class Wrapper(torch.nn.Module):
    """Around a layer, as adapters are: of its attributes it has none."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *arguments: Any) -> Any:
        return self.inner(*arguments)


def mlp_cases() -> Iterator[Case]:
    for bias in (False, True):
        for note in ("", "interleaved", "hook", "other launch", "wrapped", "list"):
            yield mlp_case(bias, note)


def mlp_case(bias: bool, note: str) -> Case:
    interleave = 32 if note == "interleaved" else 0
    gate_and_linear = even(1, () if interleave else (F, F))

    def make(place: Place, common: dict[str, Any]) -> Any:
        options = {"parameters": "list"} if note == "list" else place.parallel()
        layer = tnn.GroupedMLP(len(SIZES), K, F, bias, glu_interleave=interleave, **common, **options)
        if note == "hook":  # the layers run one by one, as in the next case
            layer.fc2.register_forward_pre_hook(lambda _, arguments: arguments[0].sum() and None)
        if note == "other launch":
            layer.fc2.launch_options = LaunchOptions(max_sms=4)
        if note == "wrapped":
            layer.fc1 = Wrapper(layer.fc1)
        return layer

    def plain(p: Tensors, x: Tensors) -> Sequence[Tensor]:
        own = {name.replace(".inner", ""): value for name, value in p.items()}
        return (experts(own, x["input"], x["probs"], SIZES, interleave),)

    groups, fc1 = len(SIZES), "fc1.inner" if note == "wrapped" else "fc1"
    biases = {f"{fc1}.bias": ((groups, 2 * F), gate_and_linear), "fc2.bias": ((groups, K), everything)}
    return Case(
        layer="GroupedMLP",
        way="full list" if note == "list" else "sliced",
        make=make,
        parameters={
            f"{fc1}.weight": ((groups, 2 * F, K), gate_and_linear),
            "fc2.weight": ((groups, K, F), even(2)),
            **(biases if bias else {}),
        },
        inputs={"input": ((ROWS, K), everything), "probs": ((ROWS,), everything)},
        outputs=[everything],
        plain=plain,
        given={"group_sizes": (torch.tensor(SIZES), everything)},
        note=f"{note} bias={bias}",
    )


def moe_cases() -> Iterator[Case]:
    """Sliced experts, experts of other ranks, and these with ranks that have other rows of one loss."""
    router = tnn.RouterConfig("sigmoid", aux_loss_coeff=AUX)
    for way in ("sliced", "experts", "experts plain", "experts rows"):
        for bias in (False, True):
            yield moe_case(way, bias, router)


def moe_case(way: str, bias: bool, router: Any) -> Case:
    def make(place: Place, common: dict[str, Any]) -> Any:
        options: dict[str, Any] = {"router": router, "bias": bias, **common}
        if way == "sliced":
            layer = tnn.MoE(K, F, EXPERTS, TOPK, **options)
            if place.tensor.size > 1:
                mesh = torch.distributed.device_mesh.DeviceMesh.from_group(
                    place.tensor.group, place.device.type
                )
                ExpertTensorParallel()._apply(layer.experts, mesh)
            return layer
        over = place.tensor if way == "experts rows" else place.data
        options |= {"group": over.group, "dispatch": tnn.DispatchConfig(max_tokens=ROWS)}
        if way == "experts rows":
            options |= {"tp_group": over.group, "sequence_parallel": True}
        return tnn.MoE(K, F, EXPERTS, TOPK, dtensor=way == "experts", **options)

    slices = way == "sliced"
    first, second = (even(1, (F, F)), even(2)) if slices else (even(0), even(0))
    last = everything if slices else even(0)
    biases = {"experts.fc1.bias": ((EXPERTS, 2 * F), first), "experts.fc2.bias": ((EXPERTS, K), last)}
    rows = even(0) if way == "experts rows" else everything
    return Case(
        layer="MoE",
        way=way,
        make=make,
        parameters={
            "router.weight": ((EXPERTS, K), everything),
            "experts.fc1.weight": ((EXPERTS, 2 * F, K), first),
            "experts.fc2.weight": ((EXPERTS, K, F), second),
            **(biases if bias else {}),
        },
        inputs={"input": ((ROWS, K), rows)},
        outputs=[rows, everything],
        plain=lambda p, x: mixture(p, x["input"], TOPK, AUX, 2 if way == "experts rows" else 1),
        results=lambda result: (result.output, result.aux_loss),
        note=f"bias={bias}",
    )


def router_case() -> Case:
    config = tnn.RouterConfig("sigmoid", aux_loss_coeff=AUX)

    def make(place: Place, common: dict[str, Any]) -> Any:
        return tnn.TopKRouter(K, EXPERTS, TOPK, config, device=common["device"], dtype=common["dtype"])

    def plain(p: Tensors, x: Tensors) -> Sequence[Tensor]:
        weights, _, aux = routing(p["weight"], x["tokens"], TOPK, AUX)
        return weights, aux

    return Case(
        layer="TopKRouter",
        way="alone",
        make=make,
        parameters={"weight": ((EXPERTS, K), everything)},
        inputs={"tokens": ((ROWS, K), everything)},
        outputs=[everything, everything],
        plain=plain,
        results=lambda result: (result.weights, result.aux_loss),
        has_recipe=False,
    )


def norm_cases() -> Iterator[Case]:
    for layer in ("LayerNorm", "RMSNorm"):
        for centered in (False, True):
            yield norm_case(layer, centered)


def norm_case(layer: str, centered: bool) -> Case:
    def make(place: Place, common: dict[str, Any]) -> Any:
        common = {name: value for name, value in common.items() if name != "recipe"}
        own = place.parallel(sequence_parallel=True)
        return getattr(tnn, layer)(K, zero_centered=centered, **common, **own)

    bias = {"bias": ((K,), everything)} if layer == "LayerNorm" else {}
    name = "input" if layer == "LayerNorm" else "x"
    return Case(
        layer=layer,
        way="rows",
        make=make,
        parameters={"weight": ((K,), everything), **bias},
        inputs={name: ((ROWS, 2, K), even(0))},
        outputs=[even(0)],
        plain=lambda p, x: (normalized(x[name], p["weight"], p.get("bias"), centered),),
        has_recipe=False,
        note=f"zero_centered={centered}",
    )


def vocabulary_cases() -> Iterator[Case]:
    """Tables, and the losses of logits of a vocabulary that is no multiple of the ranks."""
    indices = torch.randint(VOCABULARY, (ROWS, 2), generator=torch.Generator().manual_seed(5))
    for rows in (False, True):
        for padding in (None, 4):
            yield embedding_case(indices, rows, padding)
        yield head_case(indices[:, 0], rows)


def embedding_case(indices: Tensor, rows: bool, padding: int | None, vocabulary: int = VOCABULARY) -> Case:
    def make(place: Place, common: dict[str, Any]) -> Any:
        common = {name: value for name, value in common.items() if name != "recipe"}
        own = place.parallel(sequence_parallel=rows)
        return tnn.Embedding(vocabulary, K, padding_idx=padding, **common, **own)

    return Case(
        layer="Embedding",
        way="row",
        make=make,
        parameters={"weight": ((vocabulary, K), padded(0))},
        inputs={},
        outputs=[even(0) if rows else everything],
        plain=lambda p, x: (functional.embedding(indices.to(p["weight"].device), p["weight"], padding),),
        given={"input": (indices, everything)},
        has_recipe=False,
        note=f"rows={rows} padding_idx={padding}",
    )


class Head(torch.nn.Module):
    """The losses of rows."""

    def __init__(self, place: Place, common: dict[str, Any], rows: bool) -> None:
        super().__init__()
        own = place.parallel(parallel_mode="column", pad_outputs=True, sequence_parallel=rows)
        self.output = tnn.Linear(K, VOCABULARY, **common, **own)
        self.group = (
            (1, "") if place.tensor.group is None else (place.tensor.size, place.tensor.group.group_name)
        )

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return ops.vocab_parallel_cross_entropy(self.output(input), target, VOCABULARY, *self.group)


def head_case(target: Tensor, rows: bool) -> Case:
    def plain(p: Tensors, x: Tensors) -> Sequence[Tensor]:
        logits = functional.linear(x["input"], p["output.weight"], p["output.bias"])
        return (functional.cross_entropy(logits, target.to(logits.device), reduction="none"),)

    return Case(
        layer="Head",
        way="column",
        make=lambda place, common: Head(place, common, rows),
        parameters={
            "output.weight": ((VOCABULARY, K), padded(0)),
            "output.bias": ((VOCABULARY,), padded(0)),
        },
        inputs={"input": ((ROWS, K), even(0) if rows else everything)},
        outputs=[everything],
        plain=plain,
        given={"target": (target, everything)},
        note=f"rows={rows}",
    )


def every_case() -> Iterator[Case]:
    yield from linear_cases()
    yield from norm_linear_cases()
    yield from grouped_cases()
    yield from mlp_cases()
    yield from moe_cases()
    yield router_case()
    yield from norm_cases()
    yield from vocabulary_cases()


CASES = {case.name: case for case in every_case()}
RECIPES: dict[str, tuple[Callable[[], Any], torch.dtype]] = {
    "float32": (lambda: None, torch.float32),
    "bf16": (lambda: None, torch.bfloat16),
    "float16": (lambda: None, torch.float16),
    "fp8_block": (recipes.Float8BlockScaling, torch.bfloat16),
    "delayed": (recipes.DelayedScaling, torch.bfloat16),
}
