"""start_reduce_gradient and finish_reduce_gradient: sums of one's own, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.parallel import WeightShard
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


def key_of(rank: Rank, rows: int) -> str:
    return str(WeightShard(rows=rows, ranks=rank.size, group_name=rank.group_name))


def gradient(rank: Rank, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of the full weight, with other numbers on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + rank.rank)
    return torch.randn(4 * rank.size, 16, generator=generator).to(rank.device, dtype)


def total_of(rank: Rank, grad: Tensor, weight: Tensor, key: str) -> Tensor:
    total = torch.empty_like(weight)
    factor = 1 / rank.size if "mean" in key else 1.0
    ops.reduce_scatter_out(grad, total, False, rank.size, rank.group_name, factor=factor)
    return total


def check_sums(rank: Rank) -> None:
    """Any number in flight, finished in another order; float32 of a float32 weight."""
    weight, key = torch.zeros(4, 16, device=rank.device), key_of(rank, 4 * rank.size)
    grads = [gradient(rank, seed, (torch.float32, torch.bfloat16)[seed % 2]) for seed in range(6)]
    tokens = [ops.start_reduce_gradient(grad, weight, key) for grad in grads]
    for token, grad in reversed(list(zip(tokens, grads, strict=True))):
        want = total_of(rank, grad, weight, key)
        assert_same_bits(ops.finish_reduce_gradient(token, grad, weight, key), want)


def test_sums(pair: RankPool) -> None:
    pair.run(check_sums)


def check_token_of_another_weight(rank: Rank) -> None:
    weight, grad = torch.zeros(4, 16, device=rank.device), gradient(rank, 0)
    token = ops.start_reduce_gradient(grad, weight, key_of(rank, 4 * rank.size))
    with pytest.raises(
        ValueError, match="argument 'weight': expected the weight that the work was begun for"
    ):
        ops.finish_reduce_gradient(token, grad[: rank.size], weight[:1], key_of(rank, rank.size))


def test_a_token_of_another_weight(pair: RankPool) -> None:
    pair.run(check_token_of_another_weight)


def check_tokens_of_other_ops(rank: Rank) -> None:
    """Collectives of all ops are kept in one place. A token of another op is one that is not known."""
    weight, grad = torch.zeros(4, 16, device=rank.device), gradient(rank, 0)
    key, group = key_of(rank, 4 * rank.size), (rank.size, rank.group_name)
    full, total = ops.all_gather(grad, *group), total_of(rank, grad, weight, key)
    sum_token, gather_token = ops.start_reduce_gradient(grad, weight, key), ops.start_all_gather(grad, *group)
    for gather, add in ((sum_token, gather_token), (gather_token, sum_token)):
        assert_same_bits(ops.finish_all_gather(gather, grad, *group), full)
        assert_same_bits(ops.finish_reduce_gradient(add, grad, weight, key), total)


def test_tokens_of_other_ops(pair: RankPool) -> None:
    pair.run(check_tokens_of_other_ops)


def check_after_an_error(rank: Rank) -> None:
    """Gradients that differ raise on all ranks, once: the group stays usable."""
    weight, key = torch.zeros(4, 16), key_of(rank, 4 * rank.size)
    wrong = gradient(rank, 0, (torch.float32, torch.bfloat16)[rank.rank % 2])
    with pytest.raises(ValueError, match="dtype is float32 on rank 0, bfloat16 on rank 1"):
        ops.start_reduce_gradient(wrong, weight, key)
    assert ops.gather_weight(weight, None, None, "none", False, False, key)[0].shape == (4 * rank.size, 16)
    grad = gradient(rank, 1)
    token = ops.start_reduce_gradient(grad, weight, key)
    assert ops.finish_reduce_gradient(token, grad, weight, key).shape == weight.shape


def test_after_an_error(make_pool: type[RankPool]) -> None:
    make_pool(2).run(check_after_an_error)
