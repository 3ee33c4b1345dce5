"""The transport "all_to_all", which sends each row once to the ranks that need it: bits of "all_gather", and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.opcheck import opcheck
from tests.parallel.test_received_tokens import Copying, layer, maps, results
from transformer_plugin.nn import DispatchConfig, MoE
from transformer_plugin.ops import expert_parallel as ep
from transformer_plugin.parallel import EpContext
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

CONFIGS: list[dict[str, Any]] = [
    {"max_tokens": 48},
    {"max_tokens": 48, "capacity": 64},
    {"max_tokens": 48, "max_received_tokens": 30},
    {"max_tokens": 48, "max_received_tokens": 30, "capacity": 64},
]
_ops = torch.ops.transformer_plugin
SIZES: dict[str, Any] = {"max_tokens_per_rank": 4, "hidden_dim": 8, "num_topk": 2}


def check_layers(
    rank: Rank,
    recipe: str,
    sizes: dict[str, Any],
    copies: bool,
    transports: tuple[str, ...] = ("all_to_all", "all_gather"),
) -> None:
    multiple = 16 if recipe == "nvfp4" else 1
    by_transport = []
    for transport in transports:
        config = DispatchConfig(**sizes, alignment=multiple, transport=transport)
        moe = layer(rank, recipe, config)
        if copies:
            moe.experts.__class__ = Copying
        count = (48, 0, 17, 40)[rank.rank % 4]
        by_transport.append(results(moe, rank, count))
    got, expected = by_transport
    for name in expected:
        assert_same_bits(got[name], expected[name], name)


@pytest.mark.parametrize("recipe", ["none", "bf16", "fp8_block", "mxfp8", "nvfp4"])
def test_same_bits_as_all_gather(ranks: RankPool, recipe: str) -> None:
    for sizes in CONFIGS:
        for copies in (False, True):
            ranks.run(check_layers, recipe, sizes, copies)


def error_of(call: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def everyones(rank: Rank, text: str) -> list[str]:
    return ep.all_gather_text(text, rank.group_name)


def check_errors(rank: Rank) -> None:
    if rank.size == 1 and rank.device.type == "cuda":
        return  # of one rank, which has no transport, errors are raised by a later call
    sizes = {**SIZES, "num_experts": 2 * rank.size}
    indices = torch.zeros(4, 2, dtype=torch.int64, device=rank.device)
    indices[:, 1] = rank.size  # every token needs the first rank
    options = {"transport": "all_to_all", "device": rank.device}
    with EpContext(rank.group, **sizes, max_received_tokens=2 * rank.size, **options) as context:
        text = error_of(lambda: context.plan(indices))
        assert f"expected room for {4 * rank.size} tokens, which rank 0 needs" in text
        assert set(everyones(rank, text)) == {text}
    with EpContext(rank.group, **sizes, capacity=7, **options) as context:
        text = error_of(lambda: context.plan(indices))
        assert "argument 'capacity': expected room for " in text and set(everyones(rank, text)) == {text}
        # The last rank's index is wrong, and all ranks say so. The group still works.
        wrong = indices.clone()
        if rank.rank == rank.size - 1:
            wrong[3, 1], wrong[2, 0] = 77, -3
        text = error_of(lambda: context.plan(wrong))
        assert f"got -3 at [{rank.size - 1}, 2, 0] and 1 more that are neither" in text
        assert set(everyones(rank, text)) == {text}
        few = indices.masked_fill(torch.arange(8, device=rank.device).view(4, 2) >= 1, -1)
        plan = context.plan(few) if rank.rank == 0 else context.plan(few[:0])
        assert int(plan.tokens_per_expert.sum()) == (1 if rank.rank == 0 else 0)
    for wrong_transport in ("one_sided_", None):
        expected = "argument 'transport': expected 'auto', 'all_gather', 'all_to_all' or 'one_sided'"
        with pytest.raises((ValueError, TypeError), match=expected):
            EpContext(rank.group, **sizes, transport=wrong_transport)
    if rank.size > 1:
        own = "all_to_all" if rank.rank == 0 else "all_gather"
        text = error_of(lambda: EpContext(rank.group, **sizes, transport=own, device=rank.device))
        assert "transport is 'all_to_all' on rank 0, 'all_gather' on rank 1" in text


def test_errors(pool: RankPool) -> None:
    pool.run(check_errors)


def check_different_calls(rank: Rank) -> None:
    indices = torch.zeros(4, 2, dtype=torch.int64)
    text = error_of(lambda: ep.compact_plan(indices, 2, 4, 16, 1, 2, rank.group_name, records=rank.rank == 1))
    assert "records is False on rank 0, True on rank 1" in text
    plans = [ep.compact_plan(indices, 2, 4, 16, 1, 2, rank.group_name, records=True) for _ in range(2)]
    gathered = ep.compact_plan(indices, 2, 4, 16, 1, 2, rank.group_name)
    tokens, group = torch.zeros(4, 8), (rank.group_name, 60_000, -1, True)
    for plan, other in ((plans[0], plans[1]), (plans[0], gathered), (gathered, plans[0])):
        for given in ((None, None), maps(other), (maps(plan)[0], None), (maps(plan)[0], maps(other)[1])):
            with pytest.raises(ValueError, match=r"argument '(position|received|slot)': expected"):
                ep.dispatch(tokens, None, plan.slot, plan.source, *group, *given)
    ep.dispatch(tokens, None, plans[0].slot, plans[0].source, *group, *maps(plans[0]))


def test_different_calls_are_errors(make_pool: Any) -> None:
    make_pool(2, "gloo").run(check_different_calls)


def check_ops(rank: Rank) -> None:
    """Schemas, fake tensors and gradients of the ops with a plan by records."""
    indices = torch.tensor([[0, 3], [2, 1], [3, -1], [0, 2]][: 4 - rank.rank])
    sizes, tail = (4, 4, 9, 1, rank.size), (rank.group_name, 60_000)
    opcheck(_ops.compact_plan.default, (indices, *sizes, rank.group_name, False, 60_000, None, True))
    plan = ep.compact_plan(indices, *sizes, rank.group_name, records=True)
    for needs_grad in (False, True):
        x = torch.randn(len(indices), 5, requires_grad=needs_grad)
        w = torch.rand(indices.shape, requires_grad=needs_grad)
        rows = torch.randn(9, 5, requires_grad=needs_grad)
        last = (*tail, -1, True, *maps(plan))
        opcheck(_ops.dispatch.default, (x, w, plan.slot, plan.source, *last))
        opcheck(_ops.combine.default, (rows, plan.slot, plan.source, len(indices), *last))


def test_opcheck(make_pool: Any) -> None:
    make_pool(2, "gloo").run(check_ops)


def check_compiled(rank: Rank) -> None:
    """One graph, for tokens that are routed anew in each call."""
    config = DispatchConfig(max_tokens=48, transport="all_to_all")
    moe = layer(rank, "none", config)
    plain = layer(rank, "none", DispatchConfig(max_tokens=48, transport="all_gather"))

    def loss(module: MoE, x: Tensor) -> Tensor:
        out: Tensor = module(x).output
        return out.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        generator = torch.Generator().manual_seed(10 * seed + rank.rank)
        x = torch.randn(48, 64, generator=generator).to(rank.device)
        grads = []
        for call, module in ((compiled, moe), (loss, plain)):
            leaf = x.clone().requires_grad_()
            grads.append(torch.autograd.grad(call(module, leaf), [leaf, *module.parameters()]))
        for got, expected in zip(*grads, strict=True):
            assert_same_bits(got, expected)


def test_compiled(pair: RankPool) -> None:
    pair.run(check_compiled)


def check_graph(rank: Rank) -> None:
    with EpContext(rank.group, **SIZES, num_experts=2 * rank.size, transport="all_to_all") as context:
        indices = torch.zeros(4, 2, dtype=torch.int64, device=rank.device)
        context.plan(indices)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            text = error_of(lambda: context.plan(indices))
            graph.capture_end()
        assert "argument 'topk_idx': expected a stream that is not captured" in text
        dist.barrier(device_ids=[rank.device.index])


@pytest.mark.gpus(2)
def test_a_capture_is_an_error(make_pool: Any) -> None:
    make_pool(2, "nccl").run(check_graph)


def test_select_transport() -> None:
    for ranks_of_group in (2, 8, 72, 73, 512):
        for device, peer_memory, expected in (
            ("cpu", False, ("all_gather", "Gloo")),
            ("cpu", True, ("all_gather", "Gloo")),
            ("cuda", False, ("all_gather", "NCCL")),
            ("cuda", True, ("one_sided", "into the memory of the ranks")),
        ):
            if ranks_of_group > 72 and device == "cuda":
                expected = ("all_gather", "NCCL")
            transport, reason = ep.select_transport(ranks_of_group, device, peer_memory)
            assert transport == expected[0] and expected[1] in reason
            assert ep.select_transport(1, device, peer_memory).transport == "none"
    for wrong, argument in (((0, "cpu", True), "num_ranks"), ((2, "meta", False), "device_type")):
        with pytest.raises(ValueError, match=f"select_transport: argument '{argument}': expected"):
            ep.select_transport(*wrong)
