"""Exchanges of many kinds of routing over one transport, compared bit for bit with those of "all_gather". The same
checks run between GPUs, between ranks of one GPU, and, over another transport, on CPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_plugin.ops import expert_parallel as ops
from transformer_plugin.parallel import EpContext, EpPlan
from transformer_plugin.testing.distributed import Rank
from transformer_plugin.testing.numerics import assert_same_bits

SIZES: dict[str, Any] = {"max_tokens_per_rank": 200, "hidden_dim": 264, "num_topk": 4}
REPLAYS = range(2, 14)
#: cycles of a GPU, about a millisecond
LATE = 2_000_000


@dataclass(frozen=True)
class Setup:
    """What is tested, and the device on which the contexts run whose bits are expected; "": that of the rank."""

    transport: str
    device: str = ""
    expected_on: str = ""

    def place(self, rank: Rank) -> Rank:
        """The rank with the device of its exchanges. A GPU is that of all ranks."""
        if not self.device:
            return rank
        device = torch.device(self.device)
        if device.type == "cuda":
            # torch reads it at each rendezvous.
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
            torch.cuda.set_device(device)
        return replace(rank, device=device)

    def contexts(
        self, rank: Rank, local_experts: int = 8, max_num_sms: int = 0, **options: Any
    ) -> tuple[EpContext, EpContext]:
        """The context that is tested, with the limit if it takes one, and the one of "all_gather"."""
        sizes = {**SIZES, "num_experts": local_experts * rank.size, **options}
        own = {"transport": self.transport, "device": rank.device}
        own["max_num_sms"] = max_num_sms if self.transport == "one_sided" else 0
        ours = EpContext(rank.group, **sizes, **own)
        expected_on = self.expected_on or rank.device
        return ours, EpContext(rank.group, **sizes, transport="all_gather", device=expected_on)


class Drawn(NamedTuple):
    """The inputs of one exchange on one rank."""

    indices: Tensor
    tokens: Tensor
    weights: Tensor
    grad_rows: Tensor  # of what dispatch returns, and the rows that combine is given
    grad_weights: Tensor  # of the weights that dispatch returns
    grad: Tensor  # of what combine returns

    def to(self, device: torch.device) -> Drawn:
        return Drawn(*(each.to(device) for each in self))


def draw(rank: Rank, context: EpContext, seed: int, dtype: torch.dtype) -> Drawn:
    """On a CPU, other values on each rank. In turn all tokens are one rank's, each rank has one, and each any number;
    some name no expert, or all of them one."""
    generator = torch.Generator().manual_seed(1000 * seed + rank.rank)
    config = context.config
    most, topk, width = config.max_tokens_per_rank, config.num_topk, config.hidden_dim
    tokens = int(torch.randint(most + 1, (1,), generator=generator))
    tokens = {0: most * (rank.rank == seed // 4 % rank.size), 1: 1}.get(seed % 8, tokens)
    indices = torch.rand(tokens, config.num_experts, generator=generator).argsort(1)[:, :topk].contiguous()
    indices[torch.rand(tokens, topk, generator=generator) < 0.2] = -1
    if seed % 5 == 4:
        indices[indices == 3] = -1
        indices[:, 0] = 3
    rows = max(context.capacity, rank.size * most)
    shapes = [(tokens, width), (tokens, topk), (rows, width), (context.capacity,), (tokens, width)]
    x, weights, grad_rows, grad_weights, grad = (torch.randn(each, generator=generator) for each in shapes)
    return Drawn(indices, x.to(dtype), weights, grad_rows.to(dtype), grad_weights, grad.to(dtype))


def step(context: EpContext, plan: EpPlan, drawn: Drawn, expand: bool) -> dict[str, Tensor]:
    """dispatch and combine with their gradients, and which of the rows are in use. The host waits for nothing."""
    x, w = drawn.tokens.clone().requires_grad_(), drawn.weights.clone().requires_grad_()
    recv, recv_weights = context.dispatch(plan, x, w, expand=expand)
    rows = drawn.grad_rows[: len(recv)]
    z = rows.clone().requires_grad_()
    out = context.combine(plan, z, expand=expand)
    (grad_rows,) = torch.autograd.grad(out, z, drawn.grad)
    grads = torch.autograd.grad((recv, recv_weights), (x, w), (rows, drawn.grad_weights))
    return {
        "used": plan.source >= 0 if expand else torch.ones(len(recv), dtype=torch.bool, device=x.device),
        "recv": recv.detach(),
        "recv_weights": recv_weights.detach(),
        "out": out.detach(),
        "grad_rows": grad_rows,
        "grad_tokens": grads[0],
        "grad_weights": grads[1],
    }


def assert_all_same(got: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    """What ``got`` has of the results of :func:`step`."""
    used = expected["used"].cpu()
    for name in got:
        both = (got[name].cpu(), expected[name].cpu())
        if name in ("recv", "grad_rows"):
            both = (both[0][used], both[1][used])
        assert_same_bits(*both, f"{where}, {name}")


def assert_same_plan(got: EpPlan, expected: EpPlan, where: str) -> None:
    """Of what does not depend on the transport."""
    for name in ("tokens_per_expert", "required", "overflow"):
        assert_same_bits(getattr(got, name), getattr(expected, name), f"{where}, {name}")


def streams_of(rank: Rank) -> list[torch.cuda.Stream]:
    """Three of a GPU, the current one first."""
    if rank.device.type == "cpu":
        return []
    return [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]


@contextmanager
def on_stream(streams: list[torch.cuda.Stream], number: int) -> Iterator[None]:
    """Between what comes before and after on the current stream."""
    if not streams:
        yield
        return
    before, chosen = torch.cuda.current_stream(), streams[number % len(streams)]
    chosen.wait_stream(before)
    with torch.cuda.stream(chosen):
        yield
    before.wait_stream(chosen)


def come_late(rank: Rank) -> None:
    if rank.device.type == "cuda":
        torch.cuda._sleep(LATE)
    else:
        time.sleep(0.001)


def check_many(
    rank: Rank,
    setup: Setup,
    count: int,
    options: tuple[dict[str, Any], ...] = ({},),
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,),
) -> None:
    """Exchanges of contexts with these options in turn, which use one channel, on several streams, with late ranks."""
    rank = setup.place(rank)
    pairs = [setup.contexts(rank, **each) for each in options]
    streams = streams_of(rank)
    for seed in range(count):
        ours, peer = pairs[seed % len(pairs)]
        drawn = draw(rank, ours, seed, dtypes[seed // len(pairs) % len(dtypes)])
        expand = seed // len(pairs) % 2 == 0
        mine, theirs = drawn.to(ours.device), drawn.to(peer.device)
        plan = peer.plan(theirs.indices, compact=True)
        if plan.received is None:  # all tokens are received: other rows than those of a plan by records
            expand = True
        if seed % (rank.size + 1) == rank.rank:
            come_late(rank)
        with on_stream(streams, seed + rank.rank):
            got_plan = ours.plan(mine.indices)
            got = step(ours, got_plan, mine, expand)
        assert_same_plan(got_plan, plan, f"seed {seed}")
        assert_all_same(got, step(peer, plan, theirs, expand), f"seed {seed}")
    for pair in pairs:
        for context in pair:
            context.finalize()


class Replay:
    """Calls that one CUDA graph holds; on a CPU they are made anew."""

    def __init__(self, rank: Rank, call: Callable[[], tuple[Any, ...]]) -> None:
        self._call = call
        self._graph: torch.cuda.CUDAGraph | None = None
        if rank.device.type == "cpu":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._outputs = call()

    def __call__(self) -> tuple[Any, ...]:
        if self._graph is None:
            return self._call()
        self._graph.replay()
        return self._outputs


def static_inputs(rank: Rank, context: EpContext) -> Drawn:
    """Inputs of graphs, with room for the most tokens."""
    like = draw(rank, context, 2, torch.bfloat16)
    of_rows = (like.grad_rows, like.grad_weights)
    most = context.config.max_tokens_per_rank
    heights = [len(each) if any(each is other for other in of_rows) else most for each in like]
    made = (each.new_zeros(height, *each.shape[1:]) for height, each in zip(heights, like, strict=True))
    return Drawn(*made).to(rank.device)


def load(static: Drawn, drawn: Drawn) -> None:
    """Past the number of tokens there are tokens without an expert."""
    for buffer, values in zip(static, drawn, strict=True):
        buffer.fill_(-1 if buffer is static.indices else 0)
        buffer[: len(values)] = values.to(buffer.device)


def check_graph(rank: Rank, setup: Setup) -> None:
    """Plan, dispatch and combine of one captured graph, replayed with other routings and numbers of tokens."""
    rank = setup.place(rank)
    ours, peer = setup.contexts(rank)
    static = static_inputs(rank, ours)

    def call() -> tuple[EpPlan, Tensor, Tensor, Tensor]:
        plan = ours.plan(static.indices)
        received = ours.dispatch(plan, static.tokens, static.weights)
        return plan, *received, ours.combine(plan, static.grad_rows[: ours.capacity])

    load(static, draw(rank, ours, 1, torch.bfloat16))
    graph = Replay(rank, call)
    for seed in REPLAYS:
        drawn = draw(rank, ours, seed, torch.bfloat16)
        load(static, drawn)
        if rank.rank == seed % rank.size:
            come_late(rank)
        plan, recv, recv_weights, out = graph()
        drawn = drawn.to(peer.device)
        same, tokens = peer.plan(drawn.indices), len(drawn.tokens)
        assert_same_plan(plan, same, f"seed {seed}")
        got = {"used": plan.source >= 0, "recv": recv, "recv_weights": recv_weights, "out": out[:tokens]}
        assert_all_same(got, step(peer, same, drawn, True), f"seed {seed}")
        assert not out[tokens:].any()


def check_two_graphs(rank: Rank, setup: Setup) -> None:
    """A graph of the forward and one of its gradients, replayed in turn. Some forwards have no backward."""
    rank = setup.place(rank)
    ours, peer = setup.contexts(rank)
    static = static_inputs(rank, ours)
    rows = static.grad_rows[: ours.capacity]
    plans: list[EpPlan] = []

    def forward() -> tuple[Tensor, ...]:
        plans.append(ours.plan(static.indices))
        received = ours.dispatch(plans[-1], static.tokens, static.weights)
        return plans[-1].source >= 0, *received, ours.combine(plans[-1], rows)

    def backward() -> tuple[Tensor, ...]:
        plan, group = plans[-1], (ours._name_with_rank, ours.timeout_ms, True)
        maps = (plan.received, plan.position)
        grad_rows = ops.combine_backward(static.grad, plan.slot, plan.source, *group, *maps)
        sizes = (plan.num_tokens, rows.shape[1], rows.dtype, True, True)
        return grad_rows, *ops.dispatch_backward(rows, static.grad_weights, plan.slot, *sizes, *group, *maps)

    load(static, draw(rank, ours, 1, torch.bfloat16))
    forward_graph = Replay(rank, forward)
    forward_graph()  # which makes the plan for the call before the capture of the backward
    backward_graph = Replay(rank, backward)
    for seed in REPLAYS:
        drawn = draw(rank, ours, seed, torch.bfloat16)
        load(static, drawn)
        if rank.rank == seed % rank.size:
            come_late(rank)
        names, got = ("used", "recv", "recv_weights", "out"), forward_graph()
        if seed % 4 == 3:
            continue
        got_all = dict(zip(names, got, strict=True))
        names = ("grad_rows", "grad_tokens", "grad_weights")
        got_all |= zip(names, backward_graph(), strict=True)
        tokens = len(drawn.tokens)
        for name in ("out", "grad_tokens", "grad_weights"):
            assert not got_all[name][tokens:].any()
            got_all[name] = got_all[name][:tokens]
        drawn = drawn.to(peer.device)
        assert_all_same(got_all, step(peer, peer.plan(drawn.indices), drawn, True), f"seed {seed}")


def fill_caches(streams: list[torch.cuda.Stream]) -> None:
    """Leaves memory in the streams' caches, so that no call waits for an allocation."""
    for stream in streams:
        with torch.cuda.stream(stream):
            small = [torch.empty(500_000, dtype=torch.uint8, device="cuda") for _ in range(64)]
            small.append(torch.empty(2**27, dtype=torch.uint8, device="cuda"))


def check_two_channels(rank: Rank, setup: Setup, count: int) -> None:
    """Exchanges of two channels in flight at the same time, on two streams. Every other rank's host makes those of the
    second channel first: on GPUs only, as collectives on CPUs have one order."""
    rank = setup.place(rank)
    pairs = [setup.contexts(rank, channel=channel) for channel in (0, 1)]
    streams = streams_of(rank)[1:]
    fill_caches(streams)
    for number in range(count):
        # In the first exchange the ranks compare their kinds of calls, and CUDA loads kernels.
        second_first = bool(streams) and number > 0 and rank.rank % 2 == 1
        order = (1, 0) if second_first else (0, 1)
        drawn = [draw(rank, ours, 2 * number + 2 + i, torch.bfloat16) for i, (ours, _) in enumerate(pairs)]
        mine = [each.to(rank.device) for each in drawn]
        if number % (rank.size + 1) == rank.rank:
            come_late(rank)
        if streams:
            torch.cuda.synchronize()
        got = exchange_in_turn([ours for ours, _ in pairs], mine, streams, order, number % 2 == 1)
        if streams:
            torch.cuda.synchronize()
        for i, (_, peer) in enumerate(pairs):
            theirs = drawn[i].to(peer.device)
            expected = step(peer, peer.plan(theirs.indices), theirs, True)
            assert_all_same(got[i], expected, f"exchange {number}, channel {i}")


def exchange_in_turn(
    contexts: list[EpContext],
    drawn: list[Drawn],
    streams: list[torch.cuda.Stream],
    order: tuple[int, ...],
    plans_first: bool,
) -> dict[int, dict[str, Tensor]]:
    """The results of each context, whose calls are made in this order; or all plans, then all other calls."""
    plans: dict[int, EpPlan] = {}
    got: dict[int, dict[str, Tensor]] = {}

    def plan(i: int) -> None:
        plans[i] = contexts[i].plan(drawn[i].indices)

    def exchange(i: int) -> None:
        got[i] = step(contexts[i], plans[i], drawn[i], True)

    calls = [(i, call) for i in order for call in (plan, exchange)]
    if plans_first:
        calls = [(i, call) for call in (plan, exchange) for i in order]
    for i, call in calls:
        with torch.cuda.stream(streams[i]) if streams else nullcontext():
            call(i)
    return got
