"""gather_weight_list: a stack of full matrices, and the keys that layers and ops refuse."""

from __future__ import annotations

import pytest
import torch

from transformer_plugin import ops
from transformer_plugin.reference import tensor_parallel as reference
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


def check_op(rank: Rank) -> None:
    generator = torch.Generator().manual_seed(0)
    every = [[torch.randn(4, 6, generator=generator) for _ in range(3)] for _ in range(rank.size)]
    parts = [part.to(rank.device, copy=True) for part in every[rank.rank]]
    for rows in (4 * rank.size, 4 * rank.size - 3):
        shard = f"rows={rows},ranks={rank.size},list,param_group=1,group={rank.group_name}"
        want = reference.gather_weight_list(every, rows)[rank.rank]
        for backward in (False, True):
            assert_same_bits(ops.gather_weight_list(parts, backward, shard).cpu(), want)
        parts[2].data = parts[2].clone() + 1  # other memory, which no version shows
        every = [[*some[:2], some[2] + 1] for some in every]
        want = reference.gather_weight_list(every, rows)[rank.rank]
        assert_same_bits(ops.gather_weight_list(parts, False, shard).cpu(), want)


def test_op(pool: RankPool) -> None:
    pool.run(check_op)


_ONE = "rows=4,ranks=1,list,group="


@pytest.mark.parametrize(
    ("parts", "shard", "text"),
    [
        (
            [(4, 6)],
            "rows=4,ranks=1,group=",
            "argument 'shard': expected the key of matrices that are sharded over ranks",
        ),
        ([(4, 6), (4, 5)], _ONE, r"argument 'shards\[1\]': expected the sizes \[4, 6\] of 'shards\[0\]'"),
        (
            [(4, 6)],
            "rows=5,ranks=1,list,group=",
            r"argument 'shards\[0\]': expected at least 5 of the 5 rows",
        ),
        ([(4, 6, 1)], _ONE, r"argument 'shards\[0\]': expected"),
    ],
)
def test_op_errors(parts: list[tuple[int, ...]], shard: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"transformer_plugin::gather_weight_list: {text}"):
        ops.gather_weight_list([torch.zeros(sizes) for sizes in parts], False, shard)


def test_layers_refuse_wrong_keys() -> None:
    weights, input, sizes = [torch.zeros(4, 8)] * 2, torch.zeros(3, 8), torch.tensor([1, 2])
    with pytest.raises(ValueError, match="expected '' or a key with 'list' for a weight of several tensors"):
        ops.grouped_linear(input, weights, sizes, weight_shard="rows=4,ranks=1,group=")
    with pytest.raises(ValueError, match="expected no 'list' for a weight of one tensor, got"):
        ops.grouped_linear(input, torch.zeros(2, 4, 8), sizes, weight_shard=_ONE)
    with pytest.raises(ValueError, match="a shard of the 9 rows of each matrix on each of 1 ranks"):
        ops.grouped_linear(input, weights, sizes, weight_shard="rows=9,ranks=1,list,group=")
    with pytest.raises(ValueError, match="gather_weight: argument 'shard': expected a key without 'list'"):
        ops.gather_weight(torch.zeros(4, 8), None, None, "none", False, False, _ONE)
    fc1, fc2 = [torch.zeros(8, 8)] * 2, [torch.zeros(8, 4)] * 2
    with pytest.raises(
        ValueError, match="expected no 'list': the matrices of both weights have different rows"
    ):
        ops.grouped_mlp(input, fc1, fc2, sizes, torch.ones(3), weight_shard="rows=8,ranks=1,list,group=")
