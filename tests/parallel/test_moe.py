"""MoE over a group equals one rank with all experts and everybody's tokens, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode

import transformer_plugin as tp
from transformer_plugin.nn import DispatchConfig, MoE, RouterConfig
from transformer_plugin.recipes import Float8BlockScaling, NVFP4BlockScaling, Recipe, recipe_from_name
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

HIDDEN, FFN, EXPERTS, TOPK = 32, 64, 8, 2
ROUTER = RouterConfig(aux_loss_coeff=0.1)
#: The same arithmetic on the same rows, but the router's product over more tokens may add in another order. If that
#: changes the last bit of a weight, a quantized value may be on the other side of a rounding boundary.
LIMITS = {"none": 2e-6, "bf16": 1e-3, "fp8_tensor": 1e-2, "fp8_block": 1e-2, "mxfp8": 1e-2, "nvfp4": 3e-2}


def recipe_of(name: str) -> Recipe | None:
    """The recipe of a name, without random rounding, because ranks would draw different numbers."""
    return NVFP4BlockScaling(stochastic_rounding=False) if name == "nvfp4" else recipe_from_name(name)


def tokens_of(rank: int, count: int) -> Tensor:
    """The tokens of a rank, which every rank can compute."""
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(100 + rank))


def full_and_part(rank: Rank, recipe: str, dispatch: DispatchConfig) -> tuple[MoE, MoE]:
    """Returns a mixture with all experts, and the same mixture with its experts sharded over the ranks."""
    torch.manual_seed(0)
    options = {"router": ROUTER, "bias": True, "device": rank.device, "recipe": recipe_of(recipe)}
    full = MoE(HIDDEN, FFN, EXPERTS, TOPK, dispatch=DispatchConfig(alignment=dispatch.alignment), **options)
    part = MoE(HIDDEN, FFN, EXPERTS, TOPK, group=rank.group, dispatch=dispatch, **options)
    here = slice(rank.rank * EXPERTS // rank.size, (rank.rank + 1) * EXPERTS // rank.size)
    state = full.state_dict()
    part.load_state_dict(
        {k: v[here] if k.startswith("experts.") else v for k, v in state.items()}, strict=True
    )
    return full, part


def gradients(
    output: Tensor, aux_loss: Tensor, grad: Tensor, input: Tensor, module: MoE
) -> dict[str, Tensor]:
    leaves = {"input": input} | dict(module.named_parameters())
    loss = (output * grad).sum() + aux_loss
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {k: g.to_local() if hasattr(g, "to_local") else g for k, g in zip(leaves, grads, strict=True)}


def check_against_one_rank(rank: Rank, recipe: str, counts: list[int], alignment: int) -> None:
    counts = counts[: rank.size]
    full, part = full_and_part(rank, recipe, DispatchConfig(max_tokens=max(counts), alignment=alignment))
    everything = torch.cat([tokens_of(r, count) for r, count in enumerate(counts)]).to(rank.device)
    everything.requires_grad_()
    mine = slice(sum(counts[: rank.rank]), sum(counts[: rank.rank + 1]))
    generator = torch.Generator().manual_seed(7)
    grad = torch.randn(everything.shape, generator=generator).to(rank.device)

    expected = full(everything)
    # The auxiliary loss is computed from a rank's own tokens.
    losses = [full(each).aux_loss for each in everything.split(counts)]
    wanted = gradients(expected.output, sum(losses), grad, everything, full)

    input = everything.detach()[mine].requires_grad_()
    result = part(input)
    got = gradients(result.output, result.aux_loss, grad[mine], input, part)
    dist.all_reduce(got["router.weight"])

    here = slice(rank.rank * EXPERTS // rank.size, (rank.rank + 1) * EXPERTS // rank.size)
    limit = LIMITS[recipe]
    assert_same_bits(result.expert_load, full(everything[mine]).expert_load)
    assert relative_error(result.output.detach(), expected.output.detach()[mine]) <= limit
    assert relative_error(result.aux_loss.detach(), losses[rank.rank].detach()) <= 1e-6
    assert relative_error(got["input"], wanted["input"][mine]) <= limit
    assert relative_error(got["router.weight"], wanted["router.weight"]) <= limit
    for name in got:
        if name.startswith("experts."):
            assert wanted[name][here].any() or not sum(counts)
            assert relative_error(got[name], wanted[name][here]) <= limit, name
    padded = (expected.expert_load + alignment - 1) // alignment * alignment
    assert int(result.received) == int(padded[here].sum())


@pytest.mark.parametrize("recipe", list(LIMITS))
@pytest.mark.parametrize("counts", [[40, 40, 40, 40], [17, 64, 0, 5]], ids=["even", "uneven"])
def test_equals_one_rank_with_everything(pool: RankPool, recipe: str, counts: list[int]) -> None:
    pool.run(check_against_one_rank, recipe, counts, 1 if counts[0] == 40 and recipe != "nvfp4" else 16)


def check_no_tokens_anywhere(rank: Rank) -> None:
    _, part = full_and_part(rank, "fp8_block", DispatchConfig(max_tokens=4))
    input = torch.empty(0, HIDDEN, device=rank.device, requires_grad=True)
    result = part(input)
    (result.output.sum() + result.aux_loss).backward()
    assert result.output.shape == (0, HIDDEN) and input.grad.shape == (0, HIDDEN)
    gradients = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in part.parameters()]
    assert not any(gradient.any() for gradient in gradients)


def test_no_tokens_anywhere(pool: RankPool) -> None:
    pool.run(check_no_tokens_anywhere)


def kept_weights(weights: list[Tensor], indices: list[Tensor], capacity: int, local: int) -> list[Tensor]:
    """The weights of all ranks, 0 for dropped rows: each rank keeps its first ``capacity`` rows."""
    kept = [torch.zeros_like(each) for each in weights]
    rows: dict[int, int] = {}
    for expert in range(EXPERTS):
        for rank, chosen in enumerate(indices):
            for t, k in (chosen == expert).nonzero().tolist():
                home = expert // local
                if rows.setdefault(home, 0) < capacity:
                    kept[rank][t, k] = weights[rank][t, k]
                rows[home] += 1
    return kept


def check_capacity(rank: Rank) -> None:
    dispatch = DispatchConfig(max_tokens=30, capacity=20, alignment=1)
    full, small = full_and_part(rank, "none", dispatch)
    tokens = [tokens_of(r, 30).to(rank.device) for r in range(rank.size)]
    routings = [full.router(each) for each in tokens]
    weights = [each.weights.detach() for each in routings]
    kept = kept_weights(weights, [each.indices for each in routings], 20, EXPERTS // rank.size)[rank.rank]
    assert kept.any() and not kept.all()
    received = full.dispatcher.dispatch(tokens[rank.rank], routings[rank.rank].indices, kept)
    expected = full.dispatcher.combine(
        full.experts(received.rows, received.group_sizes, received.probs), received
    )
    result = small(tokens[rank.rank])
    assert relative_error(result.output.detach(), expected.detach()) <= 1e-6
    assert int(result.received) > 20  # more than the capacity: rows were dropped, and the result shows it


def test_capacity_drops_rows(pair: RankPool) -> None:
    pair.run(check_capacity)


def check_rows_in_use(rank: Rank) -> None:
    """Eager calls on a CPU have only the rows in use; fake tensors, which have no values, the whole capacity."""
    _, part = full_and_part(rank, "none", DispatchConfig(max_tokens=20, alignment=1))
    capacity = part.dispatcher.context.capacity

    def rows_for(tokens: Tensor) -> tuple[int, Tensor]:
        routing = part.router(tokens)
        received = part.dispatcher.dispatch(tokens, routing.indices, routing.weights)
        return received.rows.shape[0], received.total

    rows, total = rows_for(tokens_of(rank.rank, 12 + rank.rank).to(rank.device))
    assert int(total) < capacity == 20 * rank.size * TOPK
    assert rows == (int(total) if rank.device.type == "cpu" else capacity)
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows, _ = rows_for(torch.empty(12, HIDDEN, device=rank.device))
    assert rows == capacity


def test_rows_in_use(pair: RankPool) -> None:
    pair.run(check_rows_in_use)


def check_state(rank: Rank) -> None:
    _, part = full_and_part(rank, "none", DispatchConfig(max_tokens=8))
    input = tokens_of(rank.rank, 8).to(rank.device)
    assert_same_bits(copy.deepcopy(part)(input).output, part(input).output)
    deferred = MoE(
        HIDDEN,
        FFN,
        EXPERTS,
        TOPK,
        group=rank.group,
        dispatch=DispatchConfig(max_tokens=8),
        bias=True,
        device="meta",
        router=ROUTER,
    )
    deferred.load_state_dict(part.state_dict(), assign=True)
    assert_same_bits(deferred(input).output, part(input).output)
    assert f"TokenDispatcher(rank {rank.rank} of 2" in repr(part)


def test_state(pair: RankPool) -> None:
    pair.run(check_state)


def check_errors(rank: Rank) -> None:
    with pytest.raises(ValueError) as caught:
        MoE(8, 16, 4, 2, group=rank.group)
    assert str(caught.value) == (
        "transformer_plugin::MoE: argument 'dispatch': expected max_tokens with a group of several ranks, "
        "got None. Pass dispatch=DispatchConfig(max_tokens=the largest number of tokens of a rank in one call)."
    )
    with pytest.raises(
        ValueError, match=r"argument 'num_experts': expected a multiple of the 2 ranks, got 5"
    ):
        MoE(8, 16, 5, 2, group=rank.group, dispatch=DispatchConfig(max_tokens=4))
    with pytest.raises(ValueError, match="expected at least one expert for each of the 2 ranks, got 1"):
        MoE(8, 16, 1, 1, group=rank.group, dispatch=DispatchConfig(max_tokens=4))
    with pytest.raises(ValueError, match="max_tokens_per_rank is 4 on rank 0, 5 on rank 1"):
        MoE(8, 16, 4, 2, group=rank.group, dispatch=DispatchConfig(max_tokens=4 + rank.rank))


def test_errors(pair: RankPool) -> None:
    pair.run(check_errors)


def check_quantized_experts(rank: Rank) -> None:
    """Plain parameters of each rank; DTensors hold no quantized values."""
    options: dict[str, Any] = {
        "group": rank.group,
        "dispatch": DispatchConfig(max_tokens=12),
        "device": rank.device,
    }
    with tp.quantized_init(Float8BlockScaling(), preserve_high_precision_init_val=True):
        with pytest.raises(ValueError, match="argument 'dtensor': expected False in quantized_init"):
            MoE(HIDDEN, FFN, EXPERTS, TOPK, **options)
        torch.manual_seed(0)
        quantized = MoE(HIDDEN, FFN, EXPERTS, TOPK, dtensor=False, **options)
    torch.manual_seed(0)
    plain = MoE(HIDDEN, FFN, EXPERTS, TOPK, dtensor=False, recipe=Float8BlockScaling(), **options)
    weight: Any = quantized.experts.fc1.weight
    assert type(weight) is tp.GroupedTensor
    assert_same_bits(weight.get_high_precision_init_val(), plain.experts.fc1.weight.detach().cpu())
    results = []
    for moe in (quantized, plain):
        input = tokens_of(rank.rank, 12).to(rank.device).requires_grad_()
        output = moe(input).output
        output.square().sum().backward()
        results.append([output.detach(), input.grad, *(p.grad for p in moe.parameters())])
    names = ["output", "input", *(name for name, _ in plain.named_parameters())]
    for name, got, expected in zip(names, *results, strict=True):
        if name in ("output", "experts.fc2.weight"):
            assert_same_bits(got, expected, name)
        else:  # of a product with the columnwise weight, which a CPU may add in another order
            assert relative_error(got, expected) < 1e-4, name


def test_quantized_experts(pair: RankPool) -> None:
    pair.run(check_quantized_experts)
