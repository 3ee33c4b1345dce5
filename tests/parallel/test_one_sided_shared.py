"""The transport "one_sided" between processes that share one GPU, over a Gloo group: the bits of "all_gather" on CPUs.
The same checks run on CPUs with the transport "all_to_all"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.one_sided_cases import (
    Drawn,
    Setup,
    assert_all_same,
    check_graph,
    check_many,
    check_two_channels,
    check_two_graphs,
    draw,
    step,
)
from tests.parallel.test_all_to_all import CONFIGS, check_layers, error_of
from transformer_plugin.parallel import EpContext, EpPlan
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

ON_ONE_GPU = Setup("one_sided", "cuda:0", "cpu")
SETUPS = [
    pytest.param(Setup("all_to_all", "cpu", "cpu"), id="cpu"),
    pytest.param(ON_ONE_GPU, id="cuda", marks=pytest.mark.gpu),
]
DTYPES = (torch.bfloat16, torch.float32)
#: of contexts that use one channel, which grows
OPTIONS: tuple[dict[str, Any], ...] = (
    {"num_topk": 1, "hidden_dim": 8, "max_tokens_per_rank": 70},
    {},
    {"capacity": 150, "overflow": "drop"},
    {"max_received_tokens": 90, "overflow": "drop", "max_num_sms": 2},
    {"local_experts": 2, "num_topk": 4, "alignment": 16},  # more than experts of a rank
    # Ranks of up to three chunks of tokens, whose plan takes several kernels, beside ranks whose plan takes one.
    {"max_tokens_per_rank": 600, "hidden_dim": 8},
    {"local_experts": 3, "max_received_tokens": 120, "capacity": 130, "alignment": 4, "overflow": "drop"},
)

each_setup = pytest.mark.parametrize("setup", SETUPS)
each_size = pytest.mark.parametrize("size", [2, 4])
MakePool = Callable[[int, str], RankPool]


@each_setup
@each_size
def test_many_exchanges(make_pool: MakePool, size: int, setup: Setup) -> None:
    make_pool(size, "gloo").run(check_many, setup, 40, OPTIONS, DTYPES)


@pytest.mark.long
@pytest.mark.timeout(900)
@each_setup
@each_size
def test_a_hundred_exchanges(make_pool: MakePool, size: int, setup: Setup) -> None:
    for options in (OPTIONS, OPTIONS[::-1]):
        make_pool(size, "gloo").run(check_many, setup, 100, options, DTYPES[::-1], timeout=400.0)


@each_setup
@each_size
def test_graph(make_pool: MakePool, size: int, setup: Setup) -> None:
    make_pool(size, "gloo").run(check_graph, setup)


@each_setup
@each_size
def test_graphs_of_forward_and_backward(make_pool: MakePool, size: int, setup: Setup) -> None:
    make_pool(size, "gloo").run(check_two_graphs, setup)


@each_setup
@each_size
def test_two_channels_at_the_same_time(make_pool: MakePool, size: int, setup: Setup) -> None:
    make_pool(size, "gloo").run(check_two_channels, setup, 8)


def check_shared_layers(rank: Rank, recipe: str) -> None:
    """Both layers on the GPU: Gloo moves the tokens of "all_gather"."""
    rank = ON_ONE_GPU.place(rank)
    for sizes in CONFIGS if rank.size == 2 else CONFIGS[-1:]:
        for copies in (False, True):
            check_layers(rank, recipe, sizes, copies, ("one_sided", "all_gather"))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["none", "bf16", "fp8_block", "mxfp8", "nvfp4"])
@each_size
def test_layers(make_pool: MakePool, size: int, recipe: str) -> None:
    make_pool(size, "gloo").run(check_shared_layers, recipe)


def check_wider_dtype(rank: Rank) -> None:
    """A context for bfloat16 that gets float32, between exchanges in bfloat16: its channel, which no other context
    uses, grows."""
    rank = ON_ONE_GPU.place(rank)
    ours, peer = ON_ONE_GPU.contexts(rank, max_token_dtype=torch.bfloat16, channel=7)
    for seed, dtype in enumerate((torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)):
        drawn = draw(rank, ours, seed, dtype)
        mine = drawn.to(ours.device)
        expected = step(peer, peer.plan(drawn.indices), drawn, True)
        assert_all_same(step(ours, ours.plan(mine.indices), mine, True), expected, f"seed {seed}")


def check_wider_dtype_compiled(rank: Rank) -> None:
    """The first call in float32 is one of a compiled function, in its backward too; a capture cannot make room."""
    rank = ON_ONE_GPU.place(rank)
    ours, peer = ON_ONE_GPU.contexts(rank, max_token_dtype=torch.bfloat16, channel=8)
    drawn = draw(rank, ours, 2, torch.float32)
    mine = drawn.to(ours.device)
    plan = ours.plan(mine.indices)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        text = error_of(lambda: ours.dispatch(plan, mine.tokens, mine.weights))
        graph.capture_end()
    assert "transformer_plugin::dispatch: argument 'group_name': expected room for " in text, text
    assert text.endswith("or make this call once before the stream is captured."), text

    def results(context: EpContext, plan: EpPlan, each: Drawn, compiles: bool) -> tuple[Tensor, Tensor]:
        def exchange(x: Tensor) -> Tensor:
            recv, weights = context.dispatch(plan, x, each.weights)
            return context.combine(plan, recv * weights[:, None])

        x = each.tokens.clone().requires_grad_()
        out = torch.compile(exchange, fullgraph=True, backend="aot_eager")(x) if compiles else exchange(x)
        return out.detach(), *torch.autograd.grad(out, x, each.grad)

    expected = results(peer, peer.plan(drawn.indices), drawn, compiles=False)
    for each, other in zip(results(ours, plan, mine, compiles=True), expected, strict=True):
        assert_same_bits(each.cpu(), other)


@pytest.mark.gpu
def test_wider_dtype_in_a_compiled_function(make_pool: MakePool) -> None:
    make_pool(2, "gloo").run(check_wider_dtype_compiled)


@pytest.mark.gpu
def test_wider_dtype(make_pool: MakePool) -> None:
    make_pool(2, "gloo").run(check_wider_dtype)


def check_registered_memory(rank: Rank) -> None:
    """The device has less free memory by what docs/ops/expert_parallel.md says of a channel, and by at most 6 MB of
    each rank for the granularity of mappings and for torch's own flags."""
    rank = ON_ONE_GPU.place(rank)
    ON_ONE_GPU.contexts(rank, channel=9)  # makes what the first context of a process needs
    sizes = {"max_tokens_per_rank": 4096, "hidden_dim": 4096, "max_token_dtype": torch.bfloat16}

    def free_memory() -> int:
        torch.cuda.synchronize()
        torch.distributed.barrier(rank.group)
        free = torch.cuda.mem_get_info()[0]
        torch.distributed.barrier(rank.group)
        return free

    before = free_memory()
    ours, _ = ON_ONE_GPU.contexts(rank, channel=10, **sizes)
    used = (before - free_memory()) / rank.size
    expected = 2 * 4096 * (rank.size - 1) * (4096 * 2 + ours.config.num_topk * 4)
    assert expected <= used <= expected + 6e6 + 4096 * rank.size * 4 * (ours.config.num_topk + 4), (
        used,
        expected,
    )


@pytest.mark.long  # nothing else may use the GPU
@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4, 8])
def test_registered_memory(make_pool: MakePool, size: int) -> None:
    make_pool(size, "gloo").run(check_registered_memory)
