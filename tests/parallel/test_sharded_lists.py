"""Experts in lists whose rows are sharded over ranks: the layer with full weights, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.utils.checkpoint

from tests.parallel.sharded_models import (
    RECIPES,
    Batch,
    change,
    computed,
    expected_grad,
    expert_batch,
    twins,
)
from transformer_plugin import nn as tnn
from transformer_plugin import ops, parallel
from transformer_plugin.parallel import full_state_dict, full_weight, shard_
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.parallel._shard_tensor import ShardTensor
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


class Lists(torch.nn.Module):
    """Experts in lists: a fused pair of layers and a single one. 96 rows are no multiple of a block of 128."""

    def __init__(
        self, recipe: Any, device: Any, experts: int = 3, rows: int = 64, layout: Any = "list"
    ) -> None:
        super().__init__()
        options = {"recipe": recipe, "device": device, "dtype": torch.bfloat16, "parameters": layout}
        self.mlp = tnn.GroupedMLP(experts, 128, 96, True, **options)
        self.last = tnn.GroupedLinear(experts, 128, rows, **options)

    def forward(self, input: torch.Tensor, sizes: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.mlp(input, sizes, probs), sizes)
        return output


def batch_of(rank: int, step: int, device: torch.device, experts: int = 3) -> Batch:
    return expert_batch(rank, step, device, experts)


def compare(rank: Rank, full: Any, sharded: Any, step: int, experts: int = 3, mean: bool = True) -> None:
    each = [computed(full, batch_of(r, step, rank.device, experts)) for r in range(rank.size)]
    mine, own = each[rank.rank], computed(sharded, batch_of(rank.rank, step, rank.device, experts))
    assert_same_bits(own.output, mine.output)
    assert_same_bits(own.grad_input, mine.grad_input)
    assert own.grads.keys() == mine.grads.keys()
    for name, parameter in sharded.named_parameters():
        if shard_of_parameter(parameter) is None:
            assert "bias" in name or rank.size == 1
            if name in mine.grads:
                assert_same_bits(own.grads[name], mine.grads[name], name)
            continue
        assert parameter.dim() == 2
        assert_same_bits(full_weight(parameter), full.get_parameter(name).detach(), name)
        if name in own.grads:
            want = expected_grad([results.grads[name] for results in each], parameter, mean)
            assert_same_bits(own.grads[name], want, name)


def check_lists(rank: Rank, key: str, experts: int, rows: int, options: dict[str, Any]) -> None:
    make = lambda: Lists(RECIPES[key](), rank.device, experts, rows)  # noqa: E731
    full, sharded = twins(rank, make, **options)
    for step in range(3):
        compare(rank, full, sharded, step, experts, options.get("gradient") != "sum")
        change(full, sharded, step)


@pytest.mark.parametrize("key", RECIPES)
def test_lists(pool: RankPool, key: str) -> None:
    """On 1 to 4 ranks; one expert; and rows of which some are padding, if there is more than one rank."""
    pool.run(check_lists, key, 3, 64, {})
    padded = (2, 96 if key in ("mxfp8", "nvfp4") else 50)
    for experts, rows in {1: [(1, 64)], 2: [padded]}.get(pool.size, [(1, 64), padded]):
        pool.run(check_lists, key, experts, rows, {})


@pytest.mark.parametrize("key", ["bf16", "nvfp4"])
def test_three_ranks(make_pool: Any, key: str) -> None:
    make_pool(3).run(check_lists, key, 3, 64, {"gradient": "sum"})


@pytest.mark.parametrize("options", [{"gradient": "sum"}, {"prefetch": 0}, {"prefetch": 3}], ids=str)
def test_options(pair: RankPool, options: dict[str, Any]) -> None:
    pair.run(check_lists, "bf16", 3, 64, options)


def check_calls(rank: Rank) -> None:
    """One collective for all experts of a layer and direction, and from the third step on begun early."""
    _, sharded = twins(rank, lambda: Lists(None, rank.device, 5))
    before = None
    for step in range(5):
        computed(sharded, batch_of(rank.rank, step, rank.device, 5))
        counts = ops.count_gathers(rank.group_name)
        if before is not None and step >= 2:
            made = [now - then for now, then in zip(counts, before, strict=True)]
            assert made[:4] == [6, 5, 5, 0], made
        before = counts


def check_sums(rank: Rank) -> None:
    """Where nothing waits for a gradient it is not returned by the node, but added at the end of the backward."""
    _, sharded = twins(rank, lambda: Lists(None, rank.device))
    for observed in (False, True):
        if observed:
            sharded.last.weight1.register_hook(lambda grad: None)
        with torch.profiler.profile() as profile:
            computed(sharded, batch_of(rank.rank, 0, rank.device))
        calls = {event.key: event.count for event in profile.key_averages()}
        assert calls.get("transformer_plugin::start_reduce_gradient", 0) == int(observed), calls
        assert calls["transformer_plugin::reduce_scatter_out"] == 3


def test_one_sum_for_all_experts(pair: RankPool) -> None:
    pair.run(check_sums)


def check_data_parallel(rank: Rank) -> None:
    """Biases, which are unsharded, are averaged over the ranks; shards are left alone."""
    _, sharded = twins(rank, lambda: Lists(None, rank.device))
    _, plain = twins(rank, lambda: Lists(None, rank.device))
    wrapped = parallel.data_parallel(sharded)
    batch = batch_of(rank.rank, 0, rank.device)
    want = computed(plain, batch).grads
    got = computed(wrapped, batch).grads
    for name, parameter in plain.named_parameters():
        grad = want[name]
        if shard_of_parameter(parameter) is None:
            dist.all_reduce(grad)
            grad /= rank.size
        own = next(value for key, value in got.items() if key.endswith(name))
        error = (own.float() - grad.float()).norm()
        assert error <= 2**-8 * grad.float().norm(), name


def test_data_parallel(pair: RankPool) -> None:
    pair.run(check_data_parallel)


def check_recomputed(rank: Rank) -> None:
    """Activation checkpointing gathers once more."""
    _, sharded = twins(rank, lambda: Lists(None, rank.device))
    _, plain = twins(rank, lambda: Lists(None, rank.device))
    batch = batch_of(rank.rank, 0, rank.device)
    want = computed(plain, batch)

    class Again(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = sharded

        def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = torch.utils.checkpoint.checkpoint(
                self.model, *arguments, use_reentrant=False
            )
            return output

    got = computed(Again(), batch)
    assert_same_bits(got.output, want.output)
    for name, grad in want.grads.items():
        assert_same_bits(got.grads[f"model.{name}"], grad, name)


def test_activation_checkpointing(pair: RankPool) -> None:
    pair.run(check_recomputed)


def test_one_gather_for_all_experts(ranks: RankPool) -> None:
    ranks.run(check_calls)


def check_frozen(rank: Rank) -> None:
    """Experts without a gradient, in one of the layers all; hooks fire once, and see the sum over the ranks."""
    full, sharded = twins(rank, lambda: Lists(None, rank.device))
    for model in (full, sharded):
        for name in ("mlp.fc1.weight1", "last.weight0", "last.weight1", "last.weight2"):
            model.get_parameter(name).requires_grad_(False)
    compare(rank, full, sharded, 0)
    seen: list[torch.Tensor] = []
    hook = sharded.get_parameter("mlp.fc1.weight2").register_hook(lambda grad: seen.append(grad.clone()))
    compare(rank, full, sharded, 1)
    assert len(seen) == 1
    assert_same_bits(seen[0], sharded.get_parameter("mlp.fc1.weight2").grad)
    hook.remove()
    after: list[torch.Tensor] = []
    watched = sharded.get_parameter("mlp.fc1.weight2")
    watched.register_post_accumulate_grad_hook(lambda p: after.append(p.grad))
    compare(rank, full, sharded, 2)
    assert len(after) == 1


def test_frozen_experts_and_hooks(ranks: RankPool) -> None:
    ranks.run(check_frozen)


def integers(rank: int, step: int, device: torch.device) -> Batch:
    batch = batch_of(rank, step, device)
    return Batch(((batch.arguments[0] * 2).round(), batch.arguments[1]), batch.seed)


class Twice(torch.nn.Module):
    """A layer that is used twice in a forward."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layer = tnn.GroupedLinear(3, 128, 128, False, device=device, parameters="list")
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_((weight * 20).round())

    def forward(self, input: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(input.float(), sizes), sizes)


def check_uses(rank: Rank) -> None:
    """Used twice, in micro-batches, under no_grad, and with torch.autograd.grad; integers add up without rounding."""
    full, sharded = twins(rank, lambda: Twice(rank.device))
    batches = [[integers(r, step, rank.device) for step in range(3)] for r in range(rank.size)]
    for model, mine in ((sharded, batches[rank.rank : rank.rank + 1]), (full, batches)):
        for own in mine:
            for batch in own:
                model(*batch.arguments).sum().backward()
    for name, parameter in sharded.named_parameters():
        want = full.get_parameter(name).grad
        assert want is not None and want.abs().max() > 100
        wanted = shard_of_parameter(parameter).local_shard_of(want / rank.size)
        assert_same_bits(parameter.grad + 0, wanted + 0, name)
    batch = batches[rank.rank][0]
    with torch.no_grad():
        assert_same_bits(sharded(*batch.arguments), full(*batch.arguments))
    weights = [sharded.layer.weight0, sharded.layer.weight2]
    got = torch.autograd.grad(sharded(*batch.arguments).sum(), weights)
    for weight, gradient, name in zip(weights, got, ("layer.weight0", "layer.weight2"), strict=True):
        every = [full(*each[0].arguments).sum() for each in batches]
        total = sum(torch.autograd.grad(loss, full.get_parameter(name))[0] for loss in every)
        assert_same_bits(gradient + 0, shard_of_parameter(weight).local_shard_of(total / rank.size) + 0)


def test_other_uses(ranks: RankPool) -> None:
    ranks.run(check_uses)


def check_main_grad(rank: Rank, dtype: torch.dtype, observed: bool) -> None:
    full, sharded = twins(rank, lambda: Twice(rank.device))
    sharded.layer.fuse_wgrad_accumulation = True
    sharded.layer.weight1.requires_grad_(False)
    for parameter in sharded.parameters():
        parameter.main_grad = torch.full_like(parameter, 3, dtype=dtype)
    if observed:
        sharded.layer.weight0.register_hook(lambda grad: None)
    batches = [integers(r, 0, rank.device) for r in range(rank.size)]
    sharded(*batches[rank.rank].arguments).sum().backward()
    for batch in batches:
        full(*batch.arguments).sum().backward()
    for name, parameter in sharded.named_parameters():
        assert parameter.grad is None
        want = shard_of_parameter(parameter).local_shard_of(full.get_parameter(name).grad) / rank.size
        if parameter is sharded.layer.weight1:
            want.zero_()
        error = (parameter.main_grad.float() - (want + 3)).norm() / (want + 3).norm()
        assert error <= (0 if dtype == torch.float32 else 2**-8), (
            name,
            error,
        )  # gradients travel in this dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("observed", [False, True])
def test_main_grad(ranks: RankPool, dtype: torch.dtype, observed: bool) -> None:
    ranks.run(check_main_grad, dtype, observed)


def check_compiled(rank: Rank, key: str, backend: str, main_grad: bool) -> None:
    torch._dynamo.reset()
    models = [twins(rank, lambda: Lists(RECIPES[key](), rank.device))[1] for _ in range(2)]
    for model in models if main_grad else ():
        for layer in (model.mlp.fc1, model.mlp.fc2, model.last):
            layer.fuse_wgrad_accumulation = True
            for weight in layer._weights():
                weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    eager, sharded = models
    compiled: Any = torch.compile(sharded, fullgraph=True, backend=backend)
    for step in range(2):
        batch = batch_of(rank.rank, step, rank.device)
        want, got = computed(eager, batch), computed(compiled, batch)
        assert_same_bits(got.output, want.output)
        assert_same_bits(got.grad_input, want.grad_input)
        for name, grad in want.grads.items():
            assert_same_bits(got.grads[f"_orig_mod.{name}"], grad, name)
        for one, other in zip(eager.parameters(), sharded.parameters(), strict=True):
            assert hasattr(one, "main_grad") == (main_grad and shard_of_parameter(one) is not None)
            if hasattr(one, "main_grad"):
                assert_same_bits(other.main_grad, one.main_grad)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize(("key", "main_grad"), [("bf16", True), ("fp8_block", False)])
def test_compiled(pair: RankPool, key: str, backend: str, main_grad: bool) -> None:
    pair.run(check_compiled, key, backend, main_grad, timeout=400)


def trained(rank: Rank, model: torch.nn.Module, clip: float = 0.0) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    computed(model, batch_of(rank.rank, 0, rank.device))
    for parameter in model.parameters():
        if shard_of_parameter(parameter) is None and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= rank.size
    norm = parallel.clip_grad_norm_(model, clip) if clip else None
    optimizer.step()
    return optimizer, norm


def check_states(rank: Rank, folder: str, save: bool) -> None:
    torch.manual_seed(0 if save else 1)
    model = shard_(Lists(None, rank.device, rows=50), rank.group)
    trained(rank, model)
    state = model.state_dict()
    assert isinstance(state["last.weight1"], ShardTensor) or rank.size == 1
    assert list(state["last.weight1"].shape) == [50, 128]
    if save:
        dcp.save({"model": state}, checkpoint_id=folder)
        full = full_state_dict(model)
        if rank.rank == 0:
            torch.save(full, f"{folder}/expected.pt")
        return
    dcp.load({"model": state}, checkpoint_id=folder)
    model.load_state_dict(state)
    expected = torch.load(f"{folder}/expected.pt", map_location=rank.device)
    for name, value in full_state_dict(model).items():
        assert_same_bits(value, expected[name], name)
    for layout in ("list", "packed"):
        other = Lists(None, rank.device, rows=50, layout=layout)
        other.load_state_dict(expected)  # what is not sharded loads it
        shard_(model := Lists(None, rank.device, rows=50), rank.group).load_state_dict(other.state_dict())
        for name, value in full_state_dict(model).items():
            assert_same_bits(value, expected[name], f"{layout} {name}")
    copied = copy.deepcopy(model)
    assert shard_of_parameter(copied.last.weight1) is shard_of_parameter(model.last.weight1)  # type: ignore[arg-type]
    batch = batch_of(rank.rank, 1, rank.device)
    assert_same_bits(computed(copied, batch).output, computed(model, batch).output)


def test_states_on_other_numbers_of_ranks(make_pool: Any, tmp_path: Path) -> None:
    make_pool(2).run(check_states, str(tmp_path), True)
    for size in (1, 2, 3, 4):
        make_pool(size).run(check_states, str(tmp_path), False)


def check_clipping(rank: Rank) -> None:
    """The norm counts each gradient once, and the step is that of full weights."""
    full, sharded = twins(rank, lambda: Lists(None, rank.device, rows=50))
    norms = []
    for model in (full, sharded):
        if model is full:
            grads: dict[str, list[torch.Tensor]] = {}
            for other in range(rank.size):
                for name, grad in computed(full, batch_of(other, 0, rank.device)).grads.items():
                    grads.setdefault(name, []).append(grad.float())
            total = sum((torch.stack(each).mean(0).double() ** 2).sum() for each in grads.values())
            norms.append(float(total) ** 0.5)
        else:
            norms.append(float(trained(rank, sharded, 0.1)[1]))
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)


def test_clipping(ranks: RankPool) -> None:
    ranks.run(check_clipping)


def check_refused(rank: Rank) -> None:
    layer = tnn.GroupedLinear(2, 32, 32, parameters="list", recipe=RECIPES["mxfp8"](), device=rank.device)
    with pytest.raises(
        ValueError, match="argument 'format': expected None or 'none' for parameters in lists"
    ):
        shard_(layer, rank.group, format="mxfp8:e4m3")
    assert shard_of_parameter(layer.weight0) is None
    shard_(layer, rank.group)
    with pytest.raises(ValueError, match="expected a weight whose ranks exchange quantized shards"):
        layer.quantize_weights()
    with pytest.raises(ValueError, match="'weight0', which is sharded over the ranks"):
        shard_(layer, rank.group)
    grouped = tnn.GroupedLinear(2, 32, 32, parameters="grouped", device=rank.device)
    with pytest.raises(ValueError, match="expected layers with parameters='packed' or 'list'"):
        shard_(grouped, rank.group)


def test_refused(pair: RankPool) -> None:
    pair.run(check_refused)
