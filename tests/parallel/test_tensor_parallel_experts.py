"""Experts and embeddings with tensor parallelism, and what constructors refuse."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.sharded_models import RECIPES
from tests.parallel.tensor_parallel_models import (
    ROWS,
    F,
    K,
    assert_state,
    close,
    drawn,
    full_grad,
)
from transformer_plugin import nn as tnn
from transformer_plugin import ops
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


class Experts(torch.nn.Module):
    """Grouped layers, one after the other and in a GroupedMLP."""

    def __init__(self, recipe: Any, device: torch.device, bias: bool, tp_group: Any = None) -> None:
        super().__init__()
        options: dict[str, Any] = {"recipe": recipe, "device": device, "dtype": torch.bfloat16}
        column, row = (
            ({}, {})
            if tp_group is None
            else ({"tp_group": tp_group, "parallel_mode": mode} for mode in ("column", "row"))
        )
        self.mlp = tnn.GroupedMLP(3, K, F, bias, **options, **({"tp_group": tp_group} if column else {}))
        self.first = tnn.GroupedLinear(3, K, F, bias, **options, **column)
        self.second = tnn.GroupedLinear(3, F, K, bias, **options, **row)

    def forward(self, x: Tensor, sizes: Tensor, probs: Tensor) -> Tensor:
        return self.second(self.first(self.mlp(x, sizes, probs), sizes), sizes)


def experts_in_float64(
    model: Experts, x: Tensor, sizes: Tensor, probs: Tensor, weight: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    p = {name: value.detach().double().requires_grad_() for name, value in model.named_parameters()}
    x, probs = x.detach().double().requires_grad_(), probs.detach().double().requires_grad_()
    linear, outputs = torch.nn.functional.linear, []
    ends = sizes.cumsum(0).tolist()
    for g, (first, last) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        b = {name: value[g] for name, value in p.items()}
        gate, up = linear(x[first:last], b["mlp.fc1.weight"], b.get("mlp.fc1.bias")).chunk(2, -1)
        scale = probs[first:last, None]
        hidden = linear(torch.nn.functional.silu(gate) * up * scale, b["mlp.fc2.weight"])
        hidden = hidden + (scale * b["mlp.fc2.bias"] if "mlp.fc2.bias" in b else 0.0)
        hidden = linear(hidden, b["first.weight"], b.get("first.bias"))
        outputs.append(linear(hidden, b["second.weight"], b.get("second.bias")))
    output = torch.cat([*outputs, x.new_zeros(x.shape[0] - ends[-1], K)])
    (output * weight).sum().backward()
    both = (*p.items(), ("x", x), ("probs", probs))
    return output.detach(), {name: value.grad for name, value in both if value.grad is not None}


def check_experts(rank: Rank, key: str, bias: bool, hook: bool) -> None:
    torch.manual_seed(1)
    full = Experts(RECIPES[key](), rank.device, bias)
    torch.manual_seed(1)
    parallel = Experts(RECIPES[key](), rank.device, bias, rank.group)
    assert_state(full, parallel)
    if hook:  # the layers run one by one
        parallel.mlp.fc2.register_forward_pre_hook(lambda _, arguments: arguments[0].sum() and None)
    for seed, counts in enumerate(([32, 0, 16], [0, 48, 16])):
        sizes = torch.tensor(counts, device=rank.device)
        arguments = drawn(ROWS, K, seed=seed, device=rank.device), torch.rand(ROWS, device=rank.device)
        weight = drawn(ROWS, K, seed=7 + seed, device=rank.device)
        probs = ops.all_gather(arguments[1][None], rank.size, rank.group_name)[0]
        exact, grads = experts_in_float64(full, arguments[0], sizes, probs, weight)
        found = []
        for model in (full, parallel):
            leaves = arguments[0].clone().requires_grad_(), probs.clone().requires_grad_()
            model.zero_grad()
            output = model(leaves[0], sizes, leaves[1])
            (output * weight).sum().backward()
            found.append((output.detach(), *(leaf.grad for leaf in leaves)))
        for got, own, want, name in zip(
            found[1], found[0], (exact, grads["x"], grads["probs"]), ("output", "x", "probs"), strict=True
        ):
            close(got, own, want, name)
        for name, parameter in parallel.named_parameters():
            close(full_grad(parameter), full.get_parameter(name).grad, grads[name], name)  # type: ignore[arg-type]


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("key", ["bf16", "fp8_block", "fp8_tensor", "mxfp8"])
def test_experts(pair: RankPool, key: str, bias: bool, hook: bool) -> None:
    pair.run(check_experts, key, bias, hook)


def check_embedding(rank: Rank, vocabulary: int, padding: int | None) -> None:
    """The rows of the full table, also where the last ranks have few of them or none."""
    torch.manual_seed(2)
    options: dict[str, Any] = {"padding_idx": padding, "device": rank.device, "dtype": torch.bfloat16}
    full = tnn.Embedding(vocabulary, 16, **options)
    for sequence_parallel in (False, True):
        torch.manual_seed(2)
        own = tnn.Embedding(
            vocabulary, 16, **options, tp_group=rank.group, sequence_parallel=sequence_parallel
        )
        assert own.weight.shape == (-(-vocabulary // rank.size), 16)
        assert_state(full, own)
        generator = torch.Generator().manual_seed(3)
        indices = torch.randint(vocabulary, (8, 3), generator=generator).to(rank.device)
        weight = drawn(8, 3, 16, seed=4, device=rank.device)
        full.weight.grad = None
        want = full(indices)
        (want * weight).sum().backward()
        rows = slice(8 * rank.rank // rank.size, 8 * (rank.rank + 1) // rank.size)
        rows = rows if sequence_parallel else slice(None)
        got = own(indices)
        assert torch.equal(got, want[rows])
        (got * weight[rows]).sum().backward()
        assert_same_bits(full_grad(own.weight), full.weight.grad)
        if rank.device.type == "cpu":
            with pytest.raises(
                ValueError, match=f"expected rows of the table, 0 to {vocabulary - 1}, got 0 to"
            ):
                own(torch.tensor([0, vocabulary]))
        # True and False minus the first row of a rank would be int64, and those of other ranks.
        for wrong in (torch.tensor([True]), torch.tensor([1.0]), torch.tensor([1]).to_sparse(), [1]):
            with pytest.raises(
                TypeError, match="transformer_plugin::embedding: argument 'indices': expected "
            ):
                own(wrong)


@pytest.mark.parametrize(("vocabulary", "padding"), [(64, None), (37, 36), (3, 1)])
def test_embedding(ranks: RankPool, vocabulary: int, padding: int | None) -> None:
    ranks.run(check_embedding, vocabulary, padding)


def wrong_divisions(group: Any) -> list[tuple[Any, str]]:
    return [
        (
            lambda: tnn.Linear(8, 7, parallel_mode="column", tp_group=group),
            "'out_features': expected a multiple",
        ),
        (
            lambda: tnn.Linear(7, 8, parallel_mode="row", tp_group=group),
            "'in_features': expected a multiple of 2",
        ),
        (
            lambda: tnn.Linear(8, 8, parallel_mode="column", tp_group=group, sections=(4, 2)),
            "'sections': expected sizes that add up to out_features=8, got [4, 2], 6 together",
        ),
        (
            lambda: tnn.Linear(
                8, 8, parallel_mode="column", tp_group=group, sections=(4, 4), pad_outputs=True
            ),
            "'sections': expected none with pad_outputs, got [4, 4]",
        ),
        (
            lambda: tnn.Linear(8, 8, parallel_mode="row", tp_group=group, sections=(4, 4)),
            "'sections': expected its default with parallel_mode='row', got [4, 4]",
        ),
        (
            lambda: tnn.Linear(8, 8, parallel_mode="row", tp_group=group, pad_outputs=True),
            "'pad_outputs': expected its default with parallel_mode='row', got True. Leave it out",
        ),
        (
            lambda: tnn.Linear(8, 8, parallel_mode="rows", tp_group=group),
            "'parallel_mode': expected 'column' or",
        ),
    ]


BESIDE = "expected parallel_mode beside it, got parallel_mode=None and "
BOTH = "Pass parallel_mode='column' or 'row' and tp_group, or leave out "
SEQUENCE = "Pass sequence_parallel=True, too, or leave out tp_group where ranks have the same rows."


def check_errors(rank: Rank) -> None:
    group = rank.group
    cases: list[tuple[Any, str]] = [
        *wrong_divisions(group),
        (lambda: tnn.Linear(8, 8, parallel_mode="row"), "'tp_group': expected the group of ranks"),
        (lambda: tnn.Linear(8, 8, tp_group=group), f"{BESIDE}tp_group={group}. {BOTH}tp_group."),
        (
            lambda: tnn.Linear(8, 8, sequence_parallel=True),
            f"{BESIDE}sequence_parallel=True. {BOTH}sequence_parallel.",
        ),
        (
            lambda: tnn.Embedding(8, 8, sequence_parallel=True),
            "Embedding: argument 'tp_group': expected the group of ranks that share the layer, got None",
        ),
        *(
            (make, f"'tp_group': expected None without sequence_parallel, got {group!r}. {SEQUENCE}")
            for make in (
                lambda: tnn.RMSNorm(8, tp_group=group),
                lambda: tnn.LayerNorm(8, tp_group=group),
                lambda: tnn.MoE(8, 8, 4, 2, tp_group=group),
            )
        ),
        (
            lambda: tnn.LayerNormLinear(8, 8, parallel_mode="row", tp_group=group),
            "LayerNormLinear: argument 'parallel_mode': expected 'column', got 'row'",
        ),
        (
            lambda: tnn.GroupedLinear(2, 8, 8, parallel_mode="row", tp_group=group, parameters="list"),
            "GroupedLinear: argument 'parameters': expected 'packed' with parallel_mode, got 'list'",
        ),
        (
            lambda: tnn.Linear(8, 8, parallel_mode="row", tp_group=group)(
                torch.ones(2, 4), out=torch.empty(2, 8)
            ),
            "argument 'out': expected None with parallel_mode, got a buffer. Leave it out",
        ),
    ]
    for make, text in cases:
        with pytest.raises(ValueError, match=re.escape(text)):
            make()


def test_errors(make_pool: Any) -> None:
    make_pool(2).run(check_errors)


def check_one_rank(rank: Rank) -> None:
    """A group of one changes nothing."""
    layer = tnn.Linear(8, 6, parallel_mode="column", tp_group=rank.group, sequence_parallel=True)
    assert layer.tensor_parallel is None and type(layer.state_dict()["weight"]) is Tensor


def test_one_rank(make_pool: Any) -> None:
    make_pool(1).run(check_one_rank)
