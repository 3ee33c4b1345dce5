"""EpContext: equal configurations on all ranks, capacities, several groups, and the text of errors."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.error_text import text_of
from tests.parallel.test_expert_parallel_gradients import context_of, drawn_leaves
from transformer_plugin.ops import expert_parallel as ep
from transformer_plugin.parallel import EpContext
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.expert_parallel_cases import EpCase

SIZES = {"num_experts": 4, "max_tokens_per_rank": 8, "hidden_dim": 3, "num_topk": 2}


def error_of(action, kind: type[Exception] = ValueError) -> str:
    try:
        action()
    except kind as error:
        return text_of(error)
    raise AssertionError(f"no {kind.__name__}")


def check_disagreement(rank: Rank) -> None:
    for name, values in (("max_tokens_per_rank", (8, 9)), ("hidden_dim", (3, 5)), ("capacity", (None, 16))):
        text = error_of(lambda n=name, v=values: EpContext(rank.group, **{**SIZES, n: v[rank.rank]}))
        assert text == (
            f"transformer_plugin::EpContext: argument '{name}': expected the same configuration on all 2 ranks of "
            f"group '{rank.group_name}', got different ones: {name} is {values[0]!r} on rank 0, {values[1]!r} on "
            "rank 1. Pass the same arguments on every rank."
        )
    both = {**SIZES, "num_topk": 1 + rank.rank, "overflow": ("raise", "drop")[rank.rank]}
    text = error_of(lambda: EpContext(rank.group, **both))
    assert "num_topk is 1 on rank 0, 2 on rank 1; overflow is 'raise' on rank 0, 'drop' on rank 1" in text
    EpContext(rank.group, **SIZES).finalize()  # the group still works


def test_ranks_that_disagree(pair: RankPool) -> None:
    pair.run(check_disagreement)


def check_too_few_experts(rank: Rank) -> None:
    assert error_of(lambda: EpContext(rank.group, **{**SIZES, "num_experts": 3})) == (
        "transformer_plugin::EpContext: argument 'num_experts': expected at least one expert for each of the 4 ranks, "
        "got 3. Use more experts or a smaller group."
    )
    assert error_of(lambda: EpContext(rank.group, **{**SIZES, "num_experts": 6})) == (
        "transformer_plugin::EpContext: argument 'num_experts': expected a multiple of the 4 ranks, got 6. "
        "Give every rank the same number of experts."
    )
    indices = torch.zeros(2, 2, dtype=torch.int32)
    assert error_of(lambda: ep.plan(indices, 3, 8, 8, 1, 4, rank.group_name)) == (
        "transformer_plugin::plan: argument 'num_experts': expected at least one expert for each of the 4 ranks, "
        "got 3. Use more experts or a smaller group."
    )
    assert error_of(lambda: ep.plan(indices, 4, 8, 8, 1, 2, rank.group_name)) == (
        f"transformer_plugin::plan: argument 'num_ranks': expected 4, the size of group '{rank.group_name}', got 2. "
        "Pass group.size()."
    )


def test_more_ranks_than_experts(make_pool) -> None:
    make_pool(4).run(check_too_few_experts)


def check_overflow(rank: Rank) -> None:
    # Rank r's tokens go to expert 0 of rank 0: five rows from each.
    indices = torch.zeros(5, 1, dtype=torch.int64, device=rank.device)
    sizes = {**SIZES, "num_topk": 1, "device": rank.device}
    need = 5 * rank.size
    with EpContext(rank.group, **sizes, capacity=need, alignment=1) as fits:
        plan = fits.plan(indices)
        assert plan.required.tolist() == [need] + [0] * (rank.size - 1)
        assert plan.total.tolist() == [need if rank.rank == 0 else 0] and plan.overflow.tolist() == [0]
        # A smaller capacity for one call: an error on every rank, also on those with enough.
        text = (
            f"transformer_plugin::plan: argument 'capacity': expected room for {need} rows, which rank 0 needs, got "
            f'{need - 1}. Raise the capacity on every rank, or use the overflow policy "drop".'
        )
        if rank.device.type == "cpu":
            assert error_of(lambda: fits.plan(indices, need - 1)) == text
        else:
            late = fits.plan(indices, need - 1)
            torch.cuda.synchronize()
            assert error_of(lambda: fits.plan(indices)) == (
                f"transformer_plugin::plan: argument 'capacity': expected room for {need} rows, which a rank of the "
                "group needed, got less, in an earlier call on this GPU. Raise the capacity, or use the overflow "
                'policy "drop".'
            )
            assert late.overflow.tolist() == [1]
        assert fits.plan(indices).overflow.tolist() == [0]  # the error is raised once
    with EpContext(rank.group, **sizes, capacity=need - 1, overflow="drop") as drops:
        plan = drops.plan(indices)
        assert plan.required.tolist()[0] == need and plan.overflow.tolist() == [1]
        assert int(plan.tokens_per_expert.sum()) == (need - 1 if rank.rank == 0 else 0)
        tokens = torch.ones(5, 3, device=rank.device, requires_grad=True)
        recv, _ = drops.dispatch(plan, tokens)
        output = drops.combine(plan, recv)
        output.sum().backward()
        lost = rank.rank == rank.size - 1  # the last rank's last token is dropped
        expected = torch.ones(5, 3)
        expected[4] = 0.0 if lost else 1.0
        assert output.tolist() == tokens.grad.tolist() == expected.tolist()


def test_overflow(pool: RankPool) -> None:
    pool.run(check_overflow)


def test_worst_case_capacity() -> None:
    context = EpContext(None, **{**SIZES, "num_experts": 1}, alignment=16)
    assert context.capacity == 32  # 8 tokens in one expert and up to 15 padding rows, as a multiple of 16
    with pytest.raises(ValueError, match="capacity"):
        EpContext(None, **SIZES, capacity=-1)
    for timeout in (0.0, float("nan"), float("inf"), 1e300):
        with pytest.raises(
            ValueError, match="argument 'timeout': expected a positive number of seconds below 1e9"
        ):
            EpContext(None, **SIZES, timeout=timeout)


def plan_of(indices: torch.Tensor, *sizes: object) -> ep.Plan:
    return ep.plan(indices, *(sizes or (4, 8, 16)))


I32 = torch.zeros(5, 2, dtype=torch.int32)
X = torch.zeros(5, 3)
W = torch.zeros(5, 2)
SLOT, SOURCE = torch.full((8, 2), -1, dtype=torch.int32), torch.full((16,), -1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("action", "error", "text"),
    [
        (
            lambda: plan_of(I32.to(torch.int16)),
            TypeError,
            "transformer_plugin::plan: argument 'topk_idx': expected one of the dtypes int32, int64, got Short. "
            "Convert it with .to() first.",
        ),
        (
            lambda: plan_of(I32.float()),
            TypeError,
            "transformer_plugin::plan: argument 'topk_idx': expected one of the dtypes int32, int64, got float32. "
            "Convert it with .to() first.",
        ),
        (
            lambda: plan_of(I32[:, 0].contiguous()),
            ValueError,
            "transformer_plugin::plan: argument 'topk_idx': expected 2 dimensions or more, [..., K], got int32[5] on "
            "cpu. Reshape it first.",
        ),
        (
            lambda: plan_of(I32.t().contiguous().t()),
            ValueError,
            "transformer_plugin::plan: argument 'topk_idx': expected a contiguous tensor, got int32[5, 2] on cpu with "
            "strides [1, 5]. Call .contiguous() on it first.",
        ),
        (
            lambda: plan_of(I32[:, :0].contiguous()),
            ValueError,
            "transformer_plugin::plan: argument 'topk_idx': expected from 1 to 1024 columns, got int32[5, 0] on cpu. "
            "Choose at least one expert for each token.",
        ),
        (
            lambda: plan_of(I32, 4, 4, 16),
            ValueError,
            "transformer_plugin::plan: argument 'topk_idx': expected at most 4 tokens (max_tokens), got int32[5, 2] on "
            "cpu. Pass a larger max_tokens on every rank.",
        ),
        (
            lambda: plan_of(I32, 4, 8, 16, 3),
            ValueError,
            "transformer_plugin::plan: argument 'alignment': expected 0, 1 or a power of two, got 3. "
            "Pass 1 for no padding.",
        ),
        (
            lambda: plan_of(I32, 4, 8, -1),
            ValueError,
            "transformer_plugin::plan: argument 'capacity': expected 0 or more rows, got -1. "
            "Pass the rows that the experts of one rank can take.",
        ),
        (
            lambda: plan_of(I32, 4, 8, 16, 1, 1, "nobody"),
            ValueError,
            "transformer_plugin::plan: argument 'group_name': expected the name of a c10d process group of this "
            "process, or \"\", got 'nobody'. Pass group.group_name, and do not use a group after it is destroyed.",
        ),
        (
            lambda: ep.dispatch(X.int(), None, SLOT, SOURCE),
            TypeError,
            "transformer_plugin::dispatch: argument 'tokens': expected one of the dtypes float32, bfloat16, float16, "
            "float64, got int32. Convert it with .to() first.",
        ),
        (
            lambda: ep.dispatch(X, W.double(), SLOT, SOURCE),
            TypeError,
            "transformer_plugin::dispatch: argument 'topk_weights': expected one of the dtypes float32, got float64. "
            "Convert it with .to() first.",
        ),
        (
            lambda: ep.dispatch(X, W[:4], SLOT, SOURCE),
            ValueError,
            "transformer_plugin::dispatch: argument 'topk_weights': expected size 5 in dimension 0 (the rows of "
            "'tokens'), got float32[4, 2] on cpu. Pass tensors whose sizes agree.",
        ),
        (
            lambda: ep.dispatch(X, None, SLOT[:4], SOURCE),
            ValueError,
            "transformer_plugin::dispatch: argument 'tokens': expected at most 4 rows (max_tokens of the plan), got "
            "float32[5, 3] on cpu. Make the plan with a larger max_tokens on every rank.",
        ),
        (
            lambda: ep.dispatch(X, None, SLOT.long(), SOURCE),
            TypeError,
            "transformer_plugin::dispatch: argument 'slot': expected one of the dtypes int32, got int64. "
            "Convert it with .to() first.",
        ),
        (
            lambda: ep.combine(X, SLOT, SOURCE, 5),
            ValueError,
            "transformer_plugin::combine: argument 'rows': expected size 16 in dimension 0 (the capacity of the plan), "
            "got float32[5, 3] on cpu. Pass tensors whose sizes agree.",
        ),
        (
            lambda: ep.combine(torch.zeros(16, 3), SLOT, SOURCE, 9),
            ValueError,
            "transformer_plugin::combine: argument 'num_tokens': expected from 0 to max_tokens of the plan, got 9. "
            "Pass the number of tokens of this rank.",
        ),
    ],
)
def test_errors_have_four_parts(action, error: type[Exception], text: str) -> None:
    assert error_of(action, error) == text


LONG = 2**63 - 1
LATE = "argument 'timeout_ms': expected at most 10^12 milliseconds, got 9223372036854775807. Pass 0 or less for the "
COUNT = "from 0 to 8, got -1. Pass the rows that dispatch was given."
WIDTH = "from 0 to 2147483647, got -1. Pass the columns that dispatch was given."


def backward_of(
    slot: torch.Tensor, rows: int, width: int, dtype: torch.dtype = torch.float32, timeout: int = -1
):
    return ep.dispatch_backward(None, None, slot, rows, width, dtype, timeout_ms=timeout)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("op", "action", "text"),
    [
        ("plan", lambda d: ep.plan(I32.to(d), 4, 8, 16, timeout_ms=LONG), LATE),
        (
            "plan",
            lambda d: ep.plan(I32.to(d), 4, 8, 2**62),
            "argument 'capacity': expected at most 2^31 - 1 rows",
        ),
        (
            "plan",
            lambda d: ep.plan(I32.to(d), 4, 2**62, 16),
            "argument 'max_tokens': expected at most 2^31 - 1",
        ),
        (
            "plan",
            lambda d: ep.plan(I32.to(d), 4, -1, 16),
            "argument 'max_tokens': expected 0 or more, got -1",
        ),
        (
            "plan",
            lambda d: ep.plan(I32.to(d), 4, 8, 16, 1, -1),
            "argument 'num_ranks': expected 1 or more, got -1",
        ),
        (
            "plan",
            lambda d: ep.plan(I32.to(d), 4, 8, 16, -2),
            "argument 'alignment': expected 0, 1 or a power of",
        ),
        ("dispatch", lambda d: ep.dispatch(X.to(d), None, SLOT.to(d), SOURCE.to(d), "", LONG), LATE),
        (
            "combine",
            lambda d: ep.combine(torch.zeros(16, 3, device=d), SLOT.to(d), SOURCE.to(d), 5, "", LONG),
            LATE,
        ),
        (
            "combine",
            lambda d: ep.combine(torch.zeros(16, 3, device=d), SLOT.to(d), SOURCE.to(d), -1),
            "argument 'num_tokens': expected from 0 to max_tokens of the plan, got -1",
        ),
        (
            "combine_backward",
            lambda d: ep.combine_backward(X.to(d), SLOT.to(d), SOURCE.to(d), "", LONG),
            LATE,
        ),
        ("dispatch_backward", lambda d: backward_of(SLOT.to(d), 5, 3, timeout=LONG), LATE),
        (
            "dispatch_backward",
            lambda d: backward_of(SLOT.to(d), -1, 3),
            f"argument 'num_tokens': expected {COUNT}",
        ),
        (
            "dispatch_backward",
            lambda d: backward_of(SLOT.to(d), 5, -1),
            f"argument 'hidden_size': expected {WIDTH}",
        ),
    ],
)
def test_counts_and_timeouts(device: str, op: str, action, text: str) -> None:
    assert error_of(lambda: action(device)).startswith(f"transformer_plugin::{op}: {text}")


def test_other_arguments_out_of_range() -> None:
    assert error_of(lambda: backward_of(SLOT, 5, 3, torch.int32), TypeError) == (
        "transformer_plugin::dispatch_backward: argument 'dtype': expected one of the dtypes float32, bfloat16, "
        "float16, float64, got int32. Pass the dtype of the tokens."
    )
    assert error_of(lambda: ep.all_gather_text("a text", "", LONG)).startswith(
        f"transformer_plugin::all_gather_text: {LATE}"
    )
    assert error_of(lambda: ep.compare_header("", torch.float32, 3, LONG)).startswith(
        f"transformer_plugin::compare_header: {LATE}"
    )


def test_a_plan_that_lies_is_not_followed_out_of_bounds() -> None:
    """Values that no plan has, as in a corrupted tensor, cause no read or write out of bounds."""
    slot = torch.tensor([[5, 2**31 - 1], [-7, 0]], dtype=torch.int32)
    source = torch.tensor([1, 99, -9, 2**31 - 1], dtype=torch.int32)
    tokens, weights = torch.ones(2, 3), torch.ones(2, 2)
    recv, recv_weights = ep.dispatch(tokens, weights, slot, source)
    assert recv.tolist() == [[1.0] * 3] + [[0.0] * 3] * 3
    assert recv_weights.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert ep.combine(torch.ones(4, 3), slot, source, 2).tolist() == [[0.0] * 3, [1.0] * 3]


def check_two_groups(rank: Rank) -> None:
    """Contexts over different groups of the same ranks, one after the other and interleaved."""
    group = torch.distributed.new_group(list(range(rank.size)))
    contexts = [context_of(rank), EpContext(group, **{**SIZES, "num_experts": 4}, device=rank.device)]
    case = EpCase("other", hidden=3, tokens=(4, 8))
    for _ in range(2):
        for context, (indices, tokens, _) in zip(
            contexts, (drawn_leaves(rank), drawn_leaves(rank, case)), strict=True
        ):
            plan = context.plan(indices)
            recv, _ = context.dispatch(plan, tokens)
            count = (indices >= 0).sum(1, keepdim=True)
            torch.testing.assert_close(context.combine(plan, recv), tokens * count)
    for context in contexts:
        context.finalize()
    torch.distributed.destroy_process_group(group)


def test_two_groups(pair: RankPool) -> None:
    pair.run(check_two_groups)


def check_collected_contexts(rank: Rank) -> None:
    """Contexts that were never finalized and are collected on one rank only do not desynchronize the ranks."""
    kept = [EpContext(rank.group, **SIZES, timeout=5.0) for _ in range(2)]
    if rank.rank == 0:
        kept.clear()
        gc.collect()
    for _ in range(2):
        with EpContext(rank.group, **SIZES, timeout=5.0) as context:
            plan = context.plan(torch.zeros(1, 2, dtype=torch.int32, device=context.device))
            assert plan.required.tolist() == [4, 0]
    assert len(kept) == 2 * rank.rank


def test_collected_contexts(pair: RankPool) -> None:
    pair.run(check_collected_contexts)
