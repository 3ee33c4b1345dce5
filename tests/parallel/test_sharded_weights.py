"""Weights that are sharded over ranks: outputs and gradients of the layer with the full weight, bit for bit, with
other inputs on each rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.ops.on_gpu import captured
from tests.parallel.sharded_models import (
    RECIPES,
    Experts,
    change,
    change_sharded,
    computed,
    dense,
    dense_batch,
    expected_grad,
    expert_batch,
    twins,
)
from transformer_plugin import nn as tnn
from transformer_plugin import ops
from transformer_plugin.parallel import full_weight, shard_
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

pytestmark = pytest.mark.bits


def compare(rank: Rank, full: Any, sharded: Any, batch: Any, step: int, mean: bool = True) -> None:
    """This rank's results of the sharded model with those of the full model, whose gradients are added over ranks."""
    each = [computed(full, batch(r, step, rank.device)) for r in range(rank.size)]
    mine, own = each[rank.rank], computed(sharded, batch(rank.rank, step, rank.device))
    assert_same_bits(own.output, mine.output)
    assert_same_bits(own.grad_input, mine.grad_input)
    for name, parameter in sharded.named_parameters():
        if shard_of_parameter(parameter) is None:
            assert_same_bits(own.grads[name], mine.grads[name], name)
            continue
        want = expected_grad([results.grads[name] for results in each], parameter, mean)
        assert_same_bits(own.grads[name], want, name)
        assert_same_bits(full_weight(parameter), full.get_parameter(name).detach(), name)


def check_dense(rank: Rank, key: str, options: dict[str, Any]) -> None:
    full, sharded = twins(rank, lambda: dense(RECIPES[key](), rank.device), **options)
    for step in range(3):
        compare(rank, full, sharded, dense_batch, step, options.get("gradient") != "sum")
        change(full, sharded, step)


@pytest.mark.parametrize("key", RECIPES)
def test_dense_layers(ranks: RankPool, key: str) -> None:
    ranks.run(check_dense, key, {})


@pytest.mark.parametrize("key", RECIPES)
def test_three_ranks(make_pool: Any, key: str) -> None:
    """Rows that do not divide by the ranks, and a mean that no power of two divides."""
    make_pool(3).run(check_dense, key, {})


@pytest.mark.parametrize(
    "options", [{"gradient": "sum"}, {"format": "none"}, {"prefetch": 0}, {"prefetch": 3}], ids=str
)
def test_options(pair: RankPool, options: dict[str, Any]) -> None:
    for key in ("bf16", "fp8_tensor"):
        pair.run(check_dense, key, options)


def check_experts(rank: Rank, key: str, experts: int, bias: bool) -> None:
    full, sharded = twins(rank, lambda: Experts(RECIPES[key](), rank.device, experts, bias))
    for step in range(3):
        compare(rank, full, sharded, partial(expert_batch, experts=experts), step)
        change(full, sharded, step)


@pytest.mark.parametrize("key", RECIPES)
def test_experts(ranks: RankPool, key: str) -> None:
    """Five experts: some ranks have one less, and of four ranks one has none."""
    ranks.run(check_experts, key, 5, False)
    ranks.run(check_experts, key, 4, True)


def check_order_of_use(rank: Rank) -> None:
    """From the third step on each gather but the first is begun early, and none in vain."""
    _, sharded = twins(rank, lambda: dense(RECIPES["fp8_block"](), rank.device))
    before = None
    for step in range(5):
        computed(sharded, dense_batch(rank.rank, step, rank.device))
        counts = ops.count_gathers(rank.group_name)
        if before is not None and step >= 2:
            made = [now - then for now, then in zip(counts, before, strict=True)]
            assert made[:4] == [6, 5, 5, 0], made
        before = counts


def test_the_order_of_use_is_learned(ranks: RankPool) -> None:
    ranks.run(check_order_of_use)


def check_compiled(rank: Rank, key: str, backend: str) -> None:
    torch._dynamo.reset()
    _, eager = twins(rank, lambda: dense(RECIPES[key](), rank.device))
    _, sharded = twins(rank, lambda: dense(RECIPES[key](), rank.device))
    compiled: Any = torch.compile(sharded, fullgraph=True, backend=backend)
    for step in range(3):
        batch = dense_batch(rank.rank, step, rank.device)
        want = computed(eager, batch)
        got = computed(compiled, batch)
        assert_same_bits(got.output, want.output)
        assert_same_bits(got.grad_input, want.grad_input)
        for name, grad in want.grads.items():
            assert_same_bits(got.grads[f"_orig_mod.{name}"], grad, name)


@pytest.mark.parametrize(
    ("key", "backend"),
    [
        ("mxfp8", "aot_eager"),
        ("fp8_block", "inductor"),
        pytest.param("bf16", "aot_eager", marks=pytest.mark.long),
        pytest.param("fp8_block", "aot_eager", marks=pytest.mark.long),
        pytest.param("bf16", "inductor", marks=pytest.mark.long),
        pytest.param("mxfp8", "inductor", marks=pytest.mark.long),
    ],
)
def test_compiled(pair: RankPool, key: str, backend: str) -> None:
    pair.run(check_compiled, key, backend, timeout=400)


def check_graph(rank: Rank, key: str, in_graphs: bool) -> None:
    """A captured forward and backward, replayed with other weights and inputs, is eager bit for bit."""
    _, sharded = twins(rank, lambda: dense(RECIPES[key](), rank.device))
    torch.manual_seed(0)
    eager = dense(RECIPES[key](), rank.device)
    shard_(eager, rank.group)
    ops.configure_gathers(rank.group_name, 1, in_graphs)
    input = dense_batch(rank.rank, 0, rank.device).arguments[0].clone().requires_grad_()
    for tensor in (input, *sharded.parameters()):
        tensor.grad = torch.zeros_like(tensor)

    def step() -> torch.Tensor:
        for tensor in (input, *sharded.parameters()):
            assert tensor.grad is not None
            tensor.grad.zero_()
        output: torch.Tensor = sharded(input)
        output.float().square().mean().backward()
        return output

    outputs: list[torch.Tensor] = []
    graph = captured(lambda: outputs.append(step()), "thread_local")
    for seed in range(3):
        for model in (eager, sharded):
            change_sharded(model, seed)
        for layer in sharded.modules():
            if getattr(layer, "gathers_quantized", False):
                layer.quantize_weights()
        batch = dense_batch(rank.rank, seed + 1, rank.device)
        with torch.no_grad():
            input.copy_(batch.arguments[0])
        graph.replay()
        want = computed(eager, batch)
        assert_same_bits(outputs[-1].detach(), want.output)
        assert_same_bits(input.grad, want.grad_input)
        for name, grad in want.grads.items():
            assert_same_bits(sharded.get_parameter(name).grad, grad, name)
    ops.configure_gathers(rank.group_name, 1)


@pytest.mark.parametrize("in_graphs", [False, True])
@pytest.mark.parametrize("key", ["bf16", "fp8_block", "fp8_tensor", "mxfp8"])
def test_graphs(pair_of_gpus: RankPool, key: str, in_graphs: bool) -> None:
    pair_of_gpus.run(check_graph, key, in_graphs)


def check_sleeps(rank: Rank, key: str, seeds: int) -> None:
    """Streams and ranks that are late at random places change no bit. Later on, no memory is taken from the GPU."""
    _, sharded = twins(rank, lambda: dense(RECIPES[key](), rank.device))
    batch = dense_batch(rank.rank, 0, rank.device)
    want = computed(sharded, batch)
    before = 0
    generator = torch.Generator()

    def late(*_: Any) -> None:
        if torch.rand((), generator=generator) < 0.5:
            torch.cuda._sleep(int(torch.randint(2_000_000, (), generator=generator)))

    hooks = [layer.register_forward_pre_hook(late) for layer in sharded.children()]
    hooks += [layer.register_full_backward_pre_hook(late) for layer in sharded.children()]
    for seed in range(seeds):
        generator.manual_seed(1000 * rank.rank + seed)
        if seed == seeds // 2:  # late streams hold memory for longer, so that a few steps take some
            before = torch.cuda.memory_stats()["num_device_alloc"]
        got = computed(sharded, batch)
        late()
        assert_same_bits(got.output, want.output)
        assert_same_bits(got.grad_input, want.grad_input)
        for name, grad in want.grads.items():
            assert_same_bits(got.grads[name], grad, f"{name} {seed}")
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("key", ["bf16", "mxfp8"])
def test_late_streams_and_ranks(pair_of_gpus: RankPool, key: str) -> None:
    pair_of_gpus.run(check_sleeps, key, 50)


class Words(torch.nn.Module):
    """An embedding and an output layer of 50 words, which no number of ranks divides."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.table = tnn.Embedding(50, 32, padding_idx=3, device=device, dtype=torch.bfloat16)
        self.output = tnn.Linear(32, 50, bias=False, device=device, dtype=torch.bfloat16)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.output(self.table(words)).float(), (words + 1) % 50)


def check_words(rank: Rank, compiled: bool) -> None:
    torch._dynamo.reset()
    full, sharded = twins(rank, lambda: Words(rank.device))
    model: Any = torch.compile(sharded, fullgraph=True, backend="aot_eager") if compiled else sharded
    plain = torch.nn.Embedding(50, 32, padding_idx=3, device=rank.device, dtype=torch.bfloat16)
    plain.load_state_dict(full.table.state_dict())
    for step in range(2):
        each = []
        for other in range(rank.size):
            words = torch.randint(50, (40,), generator=torch.Generator().manual_seed(10 * step + other)).to(
                rank.device
            )
            full.zero_grad()
            loss = full(words)
            loss.backward()
            each.append({n: p.grad.clone() for n, p in full.named_parameters() if p.grad is not None})
            assert_same_bits(full.table(words).detach(), plain(words).detach())
            if other == rank.rank:
                sharded.zero_grad()
                own = model(words)
                own.backward()
                assert_same_bits(own.detach(), loss.detach())
        for name, parameter in sharded.named_parameters():
            assert parameter.grad is not None
            assert_same_bits(parameter.grad, expected_grad([g[name] for g in each], parameter, True), name)


def test_embedding_and_output(ranks: RankPool) -> None:
    ranks.run(check_words, False)


def test_compiled_embedding_and_output(pair: RankPool) -> None:
    pair.run(check_words, True)
