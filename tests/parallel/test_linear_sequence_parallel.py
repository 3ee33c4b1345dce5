"""linear with rows of the input over ranks: the bits of a gather and a product one by one, and less memory."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.sharded_models import RECIPES
from tests.parallel.test_tensor_parallel_ops import drawn
from transformer_plugin import ops
from transformer_plugin.nn._formats import formats_of
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

pytestmark = pytest.mark.bits

#: Leading dimensions of a rank's input; whole blocks of 128 rows, parts of them, three dimensions.
LEADING = [(128,), (48,), (16, 3)]


def leaves(rank: Rank, leading: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    tensors = [
        drawn(rank.size, (*leading, 64), dtype, seed=1)[rank.rank],
        drawn(rank.size, (96, 64), dtype, seed=2)[rank.rank],
        drawn(rank.size, (96,), dtype, seed=3)[rank.rank],
    ]
    return [t.to(rank.device).requires_grad_() for t in tensors]


def check_bits(rank: Rank, key: str, dtype: torch.dtype) -> None:
    formats, group = formats_of(RECIPES[key]()), (rank.size, rank.group_name)
    for leading in LEADING:
        factors = drawn(rank.size, (rank.size * leading[0], *leading[1:], 96), dtype, seed=4)[rank.rank]
        results = []
        for gathers in (True, False):
            input, weight, bias = own = leaves(rank, leading, dtype)
            with torch.no_grad():
                options = {"sequence_parallel_size": rank.size, "sequence_parallel_group": rank.group_name}
                inferred = ops.linear(input, weight, bias, *formats, **options)  # type: ignore[arg-type]
            torch.manual_seed(5)
            if gathers:
                output = ops.linear(input, weight, bias, *formats, **options)  # type: ignore[arg-type]
            else:
                output = ops.linear(ops.all_gather(input, *group), weight, bias, *formats)
            (output * factors.to(rank.device)).sum().backward()
            results.append([inferred, output.detach(), *(leaf.grad for leaf in own)])
        for got, want in zip(*results, strict=True):
            assert_same_bits(got, want, f"{key} {leading}")
        assert_same_bits(results[0][0], results[0][1])


@pytest.mark.parametrize("key", RECIPES)
def test_bits(ranks: RankPool, key: str) -> None:
    ranks.run(check_bits, key, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtypes(pair: RankPool, dtype: torch.dtype) -> None:
    pair.run(check_bits, "bf16", dtype)


def check_saved(rank: Rank, key: str) -> None:
    """What the backward keeps of the input is this rank's rows."""
    formats = formats_of(RECIPES[key]())
    input, weight, _ = leaves(rank, (128,), torch.bfloat16)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ops.linear(
            input,
            weight,
            None,
            *formats,
            sequence_parallel_size=rank.size,
            sequence_parallel_group=rank.group_name,
        )
    assert any(t.untyped_storage().data_ptr() == input.untyped_storage().data_ptr() for t in saved)
    assert all(t.shape[:1] != (128 * rank.size,) and t.shape[-1:] != (128 * rank.size,) for t in saved)


@pytest.mark.parametrize("key", ["bf16", "fp8_block", "fp8_tensor", "mxfp8"])
def test_saved_rows(pair: RankPool, key: str) -> None:
    pair.run(check_saved, key)


def check_compiled(rank: Rank, key: str, dynamic: bool) -> None:
    """One graph for several numbers of rows."""
    formats = formats_of(RECIPES[key]())

    def step(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.linear(
            input,
            weight,
            bias,
            *formats,
            sequence_parallel_size=rank.size,
            sequence_parallel_group=rank.group_name,
        )

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (64, 32, 160):
        results = []
        for function in (step, compiled):
            own = leaves(rank, (rows,), torch.bfloat16)
            output = function(*own)
            output.float().square().sum().backward()
            results.append([output.detach(), *(leaf.grad for leaf in own)])
        for got, want in zip(*results, strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize(
    ("key", "dynamic"),
    [
        ("bf16", True),
        ("fp8_block", False),
        pytest.param("fp8_block", True, marks=pytest.mark.long),
        ("mxfp8", True),
    ],
)
def test_compiled(pair: RankPool, key: str, dynamic: bool) -> None:
    pair.run(check_compiled, key, dynamic)


def test_errors() -> None:
    x, w = torch.ones(4, 8), torch.ones(6, 8)
    cases: list[tuple[tuple[Tensor, ...], dict[str, Any], str]] = [
        (
            (x, w),
            {"sequence_parallel_size": 0},
            "argument 'sequence_parallel_size': expected at least 1, got 0. Pass group.size()",
        ),
        (
            (x[0], w),
            {"sequence_parallel_size": 2},
            "argument 'input': expected at least 2 dimensions with sequence_parallel_size",
        ),
        (
            (x, w),
            {"sequence_parallel_size": 2, "dgrad_out": torch.empty(4, 8)},
            "argument 'dgrad_out': expected None with sequence_parallel_size",
        ),
        (
            (x, w),
            {"sequence_parallel_size": 2},
            "argument 'num_ranks': expected 1, the size of the group, got 2",
        ),
    ]
    for operands, options, text in cases:
        with pytest.raises(ValueError, match=re.escape(text)):
            ops.linear(*operands, **options)
