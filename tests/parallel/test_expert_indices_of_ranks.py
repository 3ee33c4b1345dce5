"""Wrong expert indices of one rank: all ranks of a CPU group raise the same error, and the group stays usable."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.test_expert_indices import FixedRouter
from tests.parallel.test_ep_context import error_of
from transformer_plugin import ops
from transformer_plugin.nn import DispatchConfig, MoE
from transformer_plugin.parallel import (
    EpBuffer,
    EpContext,
    ep_bootstrap,
    ep_dispatch,
    ep_finalize,
    ep_prepare,
)
from transformer_plugin.testing.distributed import Rank, RankPool

EXPERTS, TOKENS, HIDDEN = 4, 5, 8


def indices_of(rank: Rank, wrong: int | None) -> Tensor:
    """Different ones on each rank; token 2 of the last rank names a wrong expert."""
    indices = (torch.arange(2 * TOKENS).view(TOKENS, 2) + rank.rank) % EXPERTS
    if wrong is not None and rank.rank == rank.size - 1:
        indices[2, 1] = wrong
    return indices.to(rank.device)


def check_error(rank: Rank, call, wrong: int) -> None:
    """`call` takes the indices, and all ranks call it together. On a GPU a later op raises, or the one that asks."""
    found = max(min(wrong, 2**31 - 1), 1 - 2**31)
    expected = "expected experts from 0 to 3, or -1 for none, "
    if rank.device.type == "cpu":
        assert error_of(lambda: call(indices_of(rank, wrong))) == (
            f"transformer_plugin::plan: argument 'topk_idx': {expected}got {found} at [{rank.size - 1}, 2, 1]. Name an "
            "expert, or pass -1 for none; the position is [rank, token, k]."
        )
    else:

        def call_and_ask() -> None:
            call(indices_of(rank, wrong))
            torch.cuda.synchronize()
            ops.check_group_sizes()

        place = ((rank.size - 1) * TOKENS + 2) * 2 + 1
        op, _, text = error_of(call_and_ask).partition(": ")
        assert op.startswith("transformer_plugin::") and text == (
            f"argument 'indices': {expected}in the calls before this one, got 1 "
            f"that are neither, one of them element {place} of its call. They were treated as -1: fix what chooses the "
            "experts."
        )
    call(indices_of(rank, None))  # the group still works
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
        ops.check_group_sizes()


def check_context(rank: Rank) -> None:
    sizes = {"max_tokens_per_rank": TOKENS, "hidden_dim": HIDDEN, "num_topk": 2, "device": rank.device}
    with EpContext(rank.group, num_experts=EXPERTS, **sizes) as context:
        for wrong in (EXPERTS, -2, 2**32, -(2**40)):
            check_error(rank, context.plan, wrong)


def check_names_of_transformer_engine(rank: Rank) -> None:
    ep_bootstrap(rank.group, EXPERTS, TOKENS, HIDDEN, 2)
    buffer = EpBuffer(2, TOKENS, HIDDEN, EXPERTS // rank.size)
    tokens = torch.ones(TOKENS, HIDDEN, device=rank.device)
    weights = torch.ones(TOKENS, 2, device=rank.device)
    check_error(rank, lambda i: ep_prepare(buffer, i), EXPERTS)
    check_error(rank, lambda i: ep_dispatch(buffer, tokens, i, weights), -2)
    ep_finalize()


def check_moe(rank: Rank) -> None:
    dispatch = DispatchConfig(max_tokens=TOKENS)
    layer = MoE(HIDDEN, 16, EXPERTS, 2, group=rank.group, dispatch=dispatch, device=rank.device)
    x = torch.ones(TOKENS, HIDDEN, device=rank.device)

    def call(indices: Tensor) -> None:
        layer.router = FixedRouter(indices)
        layer(x)

    # Without the wait it depends on the GPU whether this layer or the next one raises.
    layer.experts.register_forward_pre_hook(lambda *_: torch.cuda.synchronize() if x.is_cuda else None)
    for wrong in (EXPERTS, -2):
        check_error(rank, call, wrong)


def test_context(pair: RankPool) -> None:
    pair.run(check_context)


def test_names_of_transformer_engine(pair: RankPool) -> None:
    pair.run(check_names_of_transformer_engine)


def test_moe(pair: RankPool) -> None:
    pair.run(check_moe)
