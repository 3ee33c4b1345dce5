"""Tokens are received once, and experts read them by index: bits, bounds, and what is saved for the backward."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_plugin.nn import DispatchConfig, GroupedMLP, MoE
from transformer_plugin.ops import expert_parallel as ep
from transformer_plugin.parallel import EpContext
from transformer_plugin.recipes import NVFP4BlockScaling, recipe_from_name
from transformer_plugin.reference import expert_parallel as all_ranks
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.expert_parallel_cases import EpCase, duplicated, ep_cases, masked, one_expert
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

CASES = [case for case in ep_cases() if case.hidden <= 17]
#: the received rows are the tokens of all ranks (None), those with rows, or at most so many: options of compact_plan.
FORMS: dict[str, dict[str, Any] | None] = {
    "all": None,
    "compact": {},
    "bound-1": {"max_received_tokens": 1},
    "bound-5": {"max_received_tokens": 5},
    "bound-9": {"max_received_tokens": 9},
    "bound-of-all": {"max_received_tokens": 1000},
    "records": {"records": True},
    "records-bound-1": {"max_received_tokens": 1, "records": True},
    "records-bound-5": {"max_received_tokens": 5, "records": True},
}


def draws(shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """The same tensors on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def maps(plan: ep.Plan | ep.CompactPlan) -> tuple[Tensor | None, Tensor | None]:
    return (plan.received, plan.position) if isinstance(plan, ep.CompactPlan) else (None, None)


def check_case(rank: Rank, case: EpCase, options: dict[str, Any] | None, expand: bool) -> None:
    name, me, device = rank.group_name, rank.rank, rank.device
    drawn = [case.draw(r, rank.size) for r in range(rank.size)]
    indices, tokens, weights = (list(each) for each in zip(*drawn, strict=True))
    counts = [len(each) for each in tokens]
    sizes = (case.experts(rank.size), case.max_tokens, case.capacity, case.alignment)
    plan: ep.Plan | ep.CompactPlan
    if options is None:
        plans = same = all_ranks.plan(indices, *sizes)
        plan = ep.plan(indices[me].to(device), *sizes, rank.size, name)
    else:
        bound = options.get("max_received_tokens")
        plans = same = all_ranks.compact_plan(indices, *sizes, max_received_tokens=bound)
        if options.get("records"):
            same = all_ranks.by_records(plans, indices[me].shape[-1])
        plan = ep.compact_plan(indices[me].to(device), *sizes, rank.size, name, **options)
    for field, got, expected in zip(plan._fields, plan, same[me], strict=True):
        assert_same_bits(got, expected, field)

    last = (name, 60_000, -1, expand, *maps(plan))
    x, w = tokens[me].to(device).requires_grad_(), weights[me].to(device).requires_grad_()
    recv, recv_weights = ep.dispatch(x, w, plan.slot, plan.source, *last)
    expected = all_ranks.dispatch(tokens, weights, plans, expand)[me]
    used = torch.ones(len(recv), dtype=torch.bool) if expand else (plans[me].slot >= 0).any(1)
    assert recv.shape == expected[0].shape
    assert_same_bits(recv[used.to(device)], expected[0][used], "recv")  # rows without a slot are not read
    assert_same_bits(recv_weights, expected[1], "recv_weights")

    shapes = [((case.capacity if expand else len(each.slot)), case.hidden) for each in plans]
    rows = draws(shapes, case.dtype, 5)
    unused = [(each.source < 0) if expand else (each.slot < 0).all(1) for each in plans]
    # What experts leave: nothing where rows have a meaning, else zero.
    rows = [r.masked_fill(u[:, None], torch.nan if expand else 0) for r, u in zip(rows, unused, strict=True)]
    grads = draws([(case.capacity,)] * rank.size, weights[0].dtype, 6)
    got = torch.autograd.grad((recv, recv_weights), (x, w), (rows[me].to(device), grads[me].to(device)))
    expected = all_ranks.dispatch_backward(rows, grads, plans, counts, expand)[me]
    assert_same_bits(got[0], expected[0], "grad_tokens")
    assert_same_bits(got[1], expected[1], "grad_topk_weights")

    z = rows[me].to(device).requires_grad_()
    output = ep.combine(z, plan.slot, plan.source, counts[me], *last)
    assert_same_bits(output, all_ranks.combine(rows, plans, counts, expand)[me], "combine")
    grads = draws([(c, case.hidden) for c in counts], case.dtype, 7)
    (got_rows,) = torch.autograd.grad(output, z, grads[me].to(device))
    expected_rows = all_ranks.combine_backward(grads, plans, expand)[me]
    assert_same_bits(got_rows[used.to(device)], expected_rows[used], "grad_rows")


def check_cases(rank: Rank, options: dict[str, Any] | None) -> None:
    for case in CASES:
        if rank.device.type == "cuda" and case.dtype == torch.float64:
            continue
        for expand in (False, True):
            try:
                check_case(rank, case, options, expand)
            except Exception as error:
                raise AssertionError(f"case {case.name}, expand={expand}: {error}") from error


@pytest.mark.parametrize("form", FORMS)
def test_bits_of_the_reference(pool: RankPool, form: str) -> None:
    pool.run(check_cases, FORMS[form])


def test_reference_drops_the_last_tokens_first() -> None:
    """Two ranks of one expert each; rank 1 needs tokens 0, 1 of rank 0 and 0 of rank 1."""
    indices = [torch.tensor([[1, 0], [1, -1], [0, -1]]), torch.tensor([[0, 1], [-1, -1], [-1, -1]])]
    first, second = all_ranks.compact_plan(indices, 2, 3, 8, max_received_tokens=2)
    assert first.required_tokens.tolist() == [3, 3] and first.overflow.tolist() == [1]
    assert first.received.tolist() == [0, 2] and first.slot.tolist() == [[-1, 0], [1, -1]]
    assert second.received.tolist() == [0, 1] and second.slot.tolist() == [[0, -1], [1, -1]]
    assert second.position.tolist() == [0, 1, -1, -1, -1, -1] and second.required.tolist() == [3, 3]
    # Both bounds: tokens first, so that of expert 0's rows 0, 2, 3 the last one has gone before the capacity cuts.
    (first, _) = all_ranks.compact_plan(indices, 2, 3, 1, max_received_tokens=2)
    assert first.received.tolist() == [0] and first.source.tolist() == [0]


class Copying(GroupedMLP):
    """Experts that get a copy of each row, because their forward is their own."""

    def forward(self, input: Tensor, group_sizes: Any, probs: Tensor, **options: Any) -> Tensor:
        assert isinstance(group_sizes, Tensor)
        return super().forward(input, group_sizes, probs, **options)


RECIPES = ("none", "bf16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4")


def layer(rank: Rank, recipe: str, config: DispatchConfig, **sizes: int) -> MoE:
    """The same layer on each call; another part of the experts on each rank."""
    torch.manual_seed(3)
    sizes = {"hidden": 64, "ffn_hidden": 96, "num_experts": 8, "topk": 4} | sizes
    of_recipe = (
        NVFP4BlockScaling(stochastic_rounding=False) if recipe == "nvfp4" else recipe_from_name(recipe)
    )
    dtype = torch.float32 if recipe == "none" else torch.bfloat16
    options: dict[str, Any] = {"dtype": dtype, "device": rank.device, "recipe": of_recipe}
    return MoE(**sizes, group=rank.group, dispatch=config, dtensor=False, **options)


def results(moe: MoE, rank: Rank, count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(50 + rank.rank)
    draw = torch.randn(2, count, moe.hidden, generator=generator).to(rank.device, moe.router.weight.dtype)
    x = draw[0].clone().requires_grad_()
    out = moe(x)
    leaves = {"input": x} | dict(moe.named_parameters())
    grads = torch.autograd.grad((out.output * draw[1]).sum(), list(leaves.values()))
    return {"output": out.output.detach(), "received": out.received} | dict(zip(leaves, grads, strict=True))


def check_same_bits_as_copies(
    rank: Rank, recipe: str, config: DispatchConfig, counts: tuple[int, ...]
) -> None:
    by_index, by_copy = (layer(rank, recipe, config) for _ in range(2))
    by_copy.experts.__class__ = Copying
    count = counts[rank.rank % len(counts)]
    got, expected = results(by_index, rank, count), results(by_copy, rank, count)
    for name in expected:
        assert_same_bits(got[name], expected[name], name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_same_bits_as_copies(ranks: RankPool, recipe: str) -> None:
    multiple = 16 if recipe == "nvfp4" else 1
    for config in (
        DispatchConfig(max_tokens=48, alignment=multiple),
        DispatchConfig(max_tokens=48, capacity=64, alignment=multiple),
        DispatchConfig(max_tokens=48, max_received_tokens=30, alignment=multiple),
        DispatchConfig(max_tokens=48, max_received_tokens=30, capacity=64, alignment=multiple),
    ):
        ranks.run(check_same_bits_as_copies, recipe, config, (48, 0, 17, 40))


def check_bound(rank: Rank, bound: int) -> None:
    """Experts of dropped pairs count as zero: the layer of one process, with the weights of these pairs set to 0."""
    config = DispatchConfig(max_tokens=20, max_received_tokens=bound)
    part = layer(rank, "none", config, topk=2)
    routed = part.router(
        torch.randn(20, 64, generator=torch.Generator().manual_seed(rank.rank)).to(rank.device)
    )
    gathered = [torch.zeros_like(routed.indices) for _ in range(rank.size)]
    torch.distributed.all_gather(gathered, routed.indices)
    everyone = [each.cpu() for each in gathered]
    plans = all_ranks.compact_plan(everyone, 8, 20, 1000, max_received_tokens=bound)
    assert plans[0].overflow.tolist() == [int(bound < int(plans[0].required_tokens.max()))]
    local = 8 // rank.size
    kept = torch.zeros(20, 2)
    for r, plan in enumerate(plans):
        for t in range(20):
            n = rank.rank * 20 + t
            row = int(plan.position[n])
            if row >= 0:
                kept[t] += ((everyone[rank.rank][t] // local) == r).float()
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(rank.rank)).to(rank.device)
    got, total = part.dispatcher.run(part.experts, x, routed.indices, routed.weights)
    free = layer(rank, "none", DispatchConfig(max_tokens=20), topk=2)
    weights = routed.weights * kept.to(rank.device)
    expected, same_total = free.dispatcher.run(free.experts, x, routed.indices, weights)
    assert relative_error(got.detach(), expected.detach()) < 1e-6
    assert torch.equal(total, same_total)  # before any is dropped


@pytest.mark.parametrize("bound", [1, 13, 25, 80])
def test_a_bound_drops_tokens(ranks: RankPool, bound: int) -> None:
    ranks.run(check_bound, bound)


def check_raises(rank: Rank) -> None:
    sizes: dict[str, Any] = {
        "num_experts": 2 * rank.size,
        "max_tokens_per_rank": 4,
        "hidden_dim": 8,
        "num_topk": 2,
    }
    indices = torch.zeros(4, 2, dtype=torch.int64, device=rank.device)
    indices[:, 1] = rank.size  # every token needs rank 0
    with EpContext(rank.group, **sizes, max_received_tokens=2 * rank.size, device=rank.device) as context:
        if rank.device.type == "cpu":
            with pytest.raises(
                ValueError, match=r"argument 'max_received_tokens': expected room for \d+ tokens, which "
            ):
                context.plan(indices)
            return
        context.plan(indices)
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match=r"argument 'max_received_tokens': expected room for \d+ tokens"):
            context.plan(indices)


def test_too_many_tokens_are_an_error(ranks: RankPool) -> None:
    ranks.run(check_raises)


def check_disagreement(rank: Rank) -> None:
    sizes: dict[str, Any] = {
        "num_experts": 2 * rank.size,
        "max_tokens_per_rank": 4,
        "hidden_dim": 8,
        "num_topk": 2,
    }
    with pytest.raises(ValueError, match="max_received_tokens is "):
        EpContext(rank.group, **sizes, max_received_tokens=4 + rank.rank, device=rank.device)


def test_ranks_agree_on_the_bound(ranks: RankPool) -> None:
    ranks.run(check_disagreement)


def saved_bytes(moe: MoE, x: Tensor) -> int:
    """Bytes that autograd saves in a forward, each memory once, without parameters and their copies."""
    parameters = {p.untyped_storage().data_ptr() for p in moe.parameters()}
    storages: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        kept = moe(x)
    del kept
    return sum(storages.values())


def check_saved_memory(rank: Rank) -> None:
    sizes = {"num_experts": 8 * rank.size, "topk": 8}
    config = DispatchConfig(max_tokens=32)
    by_index, by_copy = (layer(rank, "bf16", config, **sizes) for _ in range(2))
    by_copy.experts.__class__ = Copying
    x = torch.randn(32, 64, device=rank.device, dtype=torch.bfloat16, requires_grad=True)
    rows = int(by_index(x).received)
    # The rows of the experts are not saved; the received tokens are, once.
    less = (rows - rank.size * 32) * 64 * 2
    assert less > 0
    assert saved_bytes(by_index, x) <= saved_bytes(by_copy, x) - less


def test_saved_memory(ranks: RankPool) -> None:
    ranks.run(check_saved_memory)


def check_maps(rank: Rank) -> None:
    """A compact plan without its maps, or with those of another, is refused on a CPU."""
    case = CASES[0]
    sizes = (case.experts(rank.size), case.max_tokens, case.capacity)
    indices, tokens, _ = case.draw(rank.rank, rank.size)
    plans = [ep.compact_plan(indices, *sizes, 1, rank.size, rank.group_name) for _ in range(2)]
    plain = ep.plan(indices, *sizes, 1, rank.size, rank.group_name)
    for plan, given in ((plans[0], (None, None)), (plans[0], maps(plans[1])), (plain, maps(plans[0]))):
        with pytest.raises(ValueError, match=r"argument '(position|slot|received)': expected"):
            ep.dispatch(tokens, None, plan.slot, plan.source, rank.group_name, 60_000, -1, True, *given)
    rows, group = torch.zeros(case.capacity, tokens.shape[1]), (rank.group_name, 60_000)
    for plan, other in ((plans[0], plans[1]), (plain, plans[0])):
        for source in (plan.source, other.source):
            refused = pytest.raises(ValueError, match="argument 'source': expected that of the plan")
            with refused if source is other.source else contextlib.nullcontext():
                ep.dispatch(tokens, None, plan.slot, source, *group, -1, True, *maps(plan))
            with refused if source is other.source else contextlib.nullcontext():
                ep.combine(rows, plan.slot, source, 2, *group, -1, True, *maps(plan))


def test_maps_of_the_plan(make_pool: Any) -> None:
    make_pool(2, "gloo").run(check_maps)


def check_hooks(rank: Rank) -> None:
    """A hook on the experts changes what they make of a token, once for each rank that has an expert of it."""
    for config in (
        DispatchConfig(max_tokens=20),
        DispatchConfig(max_tokens=20, max_received_tokens=19 * rank.size),
    ):
        moe = layer(rank, "none", config, topk=1)
        bias = torch.full((64,), 0.5, device=rank.device, requires_grad=True)
        x = torch.randn(20, 64, generator=torch.Generator().manual_seed(rank.rank)).to(rank.device)
        indices = torch.full((20, 1), -1, device=rank.device)
        indices[:5, 0] = torch.arange(5, device=rank.device) % 8
        weights = torch.ones(20, 1, device=rank.device)
        plain, _ = moe.dispatcher.run(moe.experts, x, indices, weights)
        moe.experts.register_forward_hook(lambda module, args, output: output + bias)  # noqa: B023
        hooked, _ = moe.dispatcher.run(moe.experts, x, indices, weights)
        assert relative_error(hooked[:5].detach(), plain[:5].detach() + 0.5) < 1e-6
        assert not hooked[5:].any()
        hooked.sum().backward()
        of_ranks = bias.grad.clone()
        torch.distributed.all_reduce(of_ranks)
        assert of_ranks.tolist() == [5.0 * rank.size] * 64


def test_hooks_of_experts(ranks: RankPool) -> None:
    ranks.run(check_hooks)


def test_results_are_contiguous() -> None:
    """On one rank, where the result of a transport may be the argument."""
    plan = ep.plan(torch.zeros(6, 1, dtype=torch.int64), 1, 6, 6)
    rows = torch.randn(8, 6).t()
    output = ep.combine(rows, plan.slot, plan.source, 6, expand=False)
    grad, _ = ep.dispatch_backward(rows, None, plan.slot, 6, 8, torch.float32, True, False, expand=False)
    for got in (output, grad):
        assert_same_bits(got, rows)
        assert got.is_contiguous() and got.data_ptr() != rows.data_ptr()


def test_buffers_apart_from_the_maps() -> None:
    plan = ep.compact_plan(torch.zeros(4, 1, dtype=torch.int64), 1, 4, 4)
    tokens = torch.randn(4, 1)
    buffer = plan.position.view(torch.float32).view(4, 1)
    given = {"received": plan.received, "position": plan.position}
    with pytest.raises(ValueError, match="dispatch_out: argument 'recv'"):
        ep.dispatch_out(tokens, None, plan.slot, plan.source, buffer, **given)
    with pytest.raises(ValueError, match="combine_backward_out: argument 'grad_rows'"):
        ep.combine_backward_out(tokens, plan.slot, plan.source, buffer, **given)
    assert plan.position.tolist() == [0, 1, 2, 3]


def random_case(number: int) -> tuple[EpCase, dict[str, Any] | None]:
    draw = torch.Generator().manual_seed(number)

    def choice(options: Any) -> Any:
        return options[int(torch.randint(len(options), (1,), generator=draw))]

    case = replace(
        choice(CASES),
        routing=choice((masked, duplicated, one_expert)),
        topk=choice((1, 2, 3, 8)),
        local_experts=choice((1, 2, 5)),
        capacity=choice((0, 1, 9, 40, 300)),
        alignment=choice((0, 1, 4)),
    )
    return case, choice([*FORMS.values(), {"max_received_tokens": 3}, {"max_received_tokens": 14}])


def check_random(rank: Rank, numbers: range) -> None:
    for number in numbers:
        case, options = random_case(number)
        if rank.device.type == "cuda" and case.dtype == torch.float64:
            continue
        try:
            check_case(rank, case, options, bool(number % 2))
        except Exception as error:
            raise AssertionError(f"random case {number}: {case}, {options}: {error}") from error


@pytest.mark.long
def test_random_cases(pool: RankPool) -> None:
    for start in range(0, 400, 50):
        pool.run(check_random, range(start, start + 50), timeout=250)
