"""Any value for a size or input of a layer, and for arguments of expert parallelism: it is valid, or an error of four
parts, never one of torch or Python."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import transformer_plugin as tp
from tests.ops.test_wrong_types import OTHERS
from transformer_plugin.parallel import (
    EpBuffer,
    EpContext,
    ep_bootstrap,
    ep_combine,
    ep_dispatch,
    ep_finalize,
    ep_prepare,
)

FOUR_PARTS = r"transformer_plugin(::|\.nn\.)\w+: (argument|attribute) '[\w\[\]]+': expected .*, got .*\. \S"
SIZES: dict[str, tuple[str, ...]] = {
    "Linear": ("in_features", "out_features"),
    "GroupedLinear": ("num_groups", "in_features", "out_features"),
    "GroupedMLP": ("num_groups", "hidden", "ffn_hidden"),
    "LayerNormLinear": ("in_features", "out_features"),
    "LayerNorm": ("normalized_shape",),
    "MoE": ("hidden", "ffn_hidden", "num_experts", "topk"),
    "RMSNorm": ("normalized_shape",),
    "TopKRouter": ("hidden", "num_experts", "topk"),
}


def sizes_of(name: str) -> dict[str, Any]:
    return {size: {"topk": 2, "num_experts": 4}.get(size, 8) for size in SIZES[name]}


def others_are_named(
    function: Callable[..., Any], arguments: Callable[[], dict[str, Any]], names: Any
) -> None:
    for name in names:
        for value in (object(), *OTHERS):
            try:
                function(**{**arguments(), name: value})
            except (ValueError, TypeError) as error:
                assert re.match(FOUR_PARTS, str(error), re.DOTALL), f"{name}={value!r}: {error}"


@pytest.mark.parametrize("name", SIZES)
def test_constructors(name: str) -> None:
    layer = getattr(tp.nn, name)
    others_are_named(layer, lambda: sizes_of(name), (*SIZES[name], "dtype"))


@pytest.mark.parametrize("wrong", [-1, -8, -(2**62)])
@pytest.mark.parametrize(("name", "size"), [(name, size) for name, sizes in SIZES.items() for size in sizes])
def test_negative_sizes(name: str, size: str, wrong: int) -> None:
    with pytest.raises(ValueError) as caught:
        getattr(tp.nn, name)(**{**sizes_of(name), size: wrong})
    assert str(caught.value).startswith(
        f"transformer_plugin::{name}: argument '{size}': expected from 0 to 2^31 - 1, got {wrong}. "
    )


@pytest.mark.parametrize("name", SIZES)
def test_inputs(name: str) -> None:
    layer = getattr(tp.nn, name)(**sizes_of(name))
    grouped = {"group_sizes": torch.tensor([1] * 8)} if name.startswith("Grouped") else {}
    probs = {"probs": torch.ones(8)} if name == "GroupedMLP" else {}
    first, *_ = inspect.signature(layer.forward).parameters
    arguments = {first: torch.ones(8, 8), **grouped, **probs}
    layer(**arguments)
    others_are_named(layer, lambda: arguments, inspect.signature(layer.forward).parameters)


CONTEXT = {"num_experts": 4, "max_tokens_per_rank": 8, "hidden_dim": 3, "num_topk": 2}
TOKENS, INDICES, WEIGHTS = torch.ones(4, 3), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)


def test_contexts() -> None:
    others_are_named(EpContext, lambda: {"group": None, **CONTEXT}, inspect.signature(EpContext).parameters)
    context = EpContext(None, **CONTEXT)  # type: ignore[arg-type]
    plan = context.plan(INDICES)
    rows, _ = context.dispatch(plan, TOKENS, WEIGHTS)
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (context.plan, {"topk_idx": INDICES}),
        (context.dispatch, {"plan": plan, "tokens": TOKENS, "topk_weights": WEIGHTS}),
        (context.combine, {"plan": plan, "rows": rows}),
    ]
    for call, arguments in calls:
        others_are_named(call, lambda a=arguments: a, inspect.signature(call).parameters)


def test_functions_with_the_names_of_transformer_engine() -> None:
    def bootstrap(**arguments: Any) -> None:
        ep_finalize()
        ep_bootstrap(**arguments)

    try:
        arguments = {"ep_group": None, **CONTEXT}
        others_are_named(bootstrap, lambda: arguments, inspect.signature(ep_bootstrap).parameters)
        bootstrap(**arguments)
        buffer = EpBuffer(2, 8, 3, 4)
        ep_dispatch(buffer, TOKENS, INDICES, WEIGHTS)
        routed = {"tokens": TOKENS, "topk_idx": INDICES, "topk_weights": WEIGHTS}
        made = {"top_k": 2, "max_tokens_per_rank": 8, "hidden_dim": 3, "num_local_experts": 4}
        calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
            (EpBuffer, made),
            (ep_prepare, {"buffer": buffer, "topk_idx": INDICES}),
            (ep_dispatch, {"buffer": buffer, **routed}),
            (ep_combine, {"buffer": buffer, "expert_out": torch.ones(buffer.recv_capacity_per_rank, 3)}),
        ]
        for call, given in calls:
            others_are_named(call, lambda g=given: g, inspect.signature(call).parameters)
    finally:
        ep_finalize()
