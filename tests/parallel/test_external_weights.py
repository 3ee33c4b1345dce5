"""Weights of another runtime: one that implements the four methods gathers and reduces as shard_ does, bit for bit."""

from __future__ import annotations

import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.parallel.sharded_models import RECIPES, TOKENS, dense, dense_batch
from transformer_plugin import nn as tnn
from transformer_plugin import ops, recipes
from transformer_plugin.parallel import attach_distributed_weights, set_gather_order, shard_
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


class GatheredWeight(Parameter):
    """A shard that this test gathers, and whose gradient it reduces; it notes what is called."""

    is_distributed_weight = True
    rank: Rank
    rows: int
    calls: list[str]
    gathered: list[Any]
    grad_scratch: Tensor | None
    keeps_gradient: bool

    def _gathered(self) -> Tensor:
        full = ops.all_gather(self.detach(), self.rank.size, self.rank.group_name)[: self.rows]
        self.gathered.append(weakref.ref(full))
        return full

    def materialize_group_for_forward(self) -> Tensor:
        self.calls.append("forward")
        return self._gathered()

    def materialize_group_for_backward(self) -> list[Tensor]:
        self.calls.append("backward")
        return [self._gathered()]

    def grad_buffer(self) -> Tensor:
        self.calls.append("buffer")
        assert self.grad_scratch is not None
        return self.grad_scratch

    def finalize_group_grads(self, wgrads: list[Tensor]) -> list[Tensor | None]:
        self.calls.append("finalize")
        padded = wgrads[0].new_zeros(self.shape[0] * self.rank.size, *self.shape[1:])
        padded[: self.rows] = wgrads[0]
        out = torch.empty(self.shape, dtype=padded.dtype, device=self.device)
        ops.reduce_scatter_out(
            padded, out, False, self.rank.size, self.rank.group_name, factor=1 / self.rank.size
        )
        if not self.keeps_gradient:
            return [out]
        self.main_grad = out
        return [None]


def driven(rank: Rank, model: torch.nn.Module) -> torch.nn.Module:
    """Puts shards in place of the weights of a model with full ones."""
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None:
            continue
        share = -(-weight.shape[0] // rank.size)
        shard = weight.new_zeros(share, *weight.shape[1:])
        own = weight.detach()[rank.rank * share : (rank.rank + 1) * share]
        shard[: own.shape[0]] = own
        made = GatheredWeight(shard)
        made.rank, made.rows, made.calls, made.gathered = rank, weight.shape[0], [], []
        made.grad_scratch, made.keeps_gradient = None, False
        layer.register_parameter("weight", made)
    attach_distributed_weights(model)
    return model


def models(rank: Rank, key: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        made.append(dense(RECIPES[key](), rank.device))
    return shard_(made[0], rank.group, format="none"), driven(rank, made[1])


def check_same_as_shard(rank: Rank, key: str) -> None:
    sharded, model = models(rank, key)
    for step in range(2):
        batch = dense_batch(rank.rank, step, rank.device)
        results = []
        for each in (sharded, model):
            each.zero_grad()
            torch.manual_seed(batch.seed)
            input = batch.arguments[0].clone().requires_grad_()
            output = each(input)
            output.float().square().mean().backward()
            results.append([output.detach(), input.grad])
        for got, want in zip(*results, strict=True):
            assert_same_bits(got, want)
        for (name, one), other in zip(model.named_parameters(), sharded.parameters(), strict=True):
            assert_same_bits(one.grad, other.grad, name)
    for weight in model.parameters():
        if isinstance(weight, GatheredWeight):
            assert weight.calls == ["forward", "backward", "finalize"] * 2
            assert all(full() is None for full in weight.gathered)  # not even the last is kept


@pytest.mark.parametrize("key", RECIPES)
def test_same_as_sharded_weights(pair: RankPool, key: str) -> None:
    pair.run(check_same_as_shard, key)


def check_kept(rank: Rank) -> None:
    """Between forward and backward no full weight exists, in high precision or quantized."""
    for key in ("bf16", "fp8_block"):
        _, model = models(rank, key)
        saved: list[Tensor] = []

        def pack(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(dense_batch(rank.rank, 0, rank.device).arguments[0][:48].clone().requires_grad_())
        for weight in model.parameters():
            if isinstance(weight, GatheredWeight):
                assert all(full() is None for full in weight.gathered)
                sizes = {(weight.rows, weight.shape[1]), (weight.shape[1], weight.rows)}
                assert not any(tuple(t.shape) in sizes for t in saved)


def test_what_is_kept(pair: RankPool) -> None:
    pair.run(check_kept)


def check_fused(rank: Rank) -> None:
    """The gradient is written into the runtime's buffer, and autograd gets none."""
    torch.manual_seed(0)  # the same weights on all ranks
    layer = tnn.Linear(64, 48, device=rank.device, dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    full = tnn.Linear(64, 48, device=rank.device, dtype=torch.bfloat16)
    full.load_state_dict(layer.state_dict())
    driven(rank, layer)
    weight: Any = layer.weight
    weight.keeps_gradient, weight.grad_scratch = True, torch.full((48, 64), 7.0, device=rank.device)
    x = dense_batch(0, 0, rank.device).arguments[0][:, :64]  # the same on all ranks; needs no gradient
    layer(x).float().sum().backward()
    full(x).float().sum().backward()
    assert weight.grad is None and weight.calls == ["forward", "backward", "buffer", "finalize"]
    assert full.weight.grad is not None and layer.bias.grad is not None
    want = full.weight.grad.float()
    torch.testing.assert_close(weight.grad_scratch, want, rtol=1e-2, atol=1e-2)
    share = 48 // rank.size
    own = weight.grad_scratch[rank.rank * share : (rank.rank + 1) * share]
    torch.testing.assert_close(weight.main_grad, own)
    with torch.no_grad():
        assert_same_bits(layer(x), full(x))


def test_gradient_buffers(pair: RankPool) -> None:
    pair.run(check_fused)


def check_experts(rank: Rank) -> None:
    """Whole experts of a stack, of which the last rank has fewer."""
    torch.manual_seed(1)
    full = tnn.GroupedMLP(3, 32, 48, device=rank.device, dtype=torch.bfloat16)
    torch.manual_seed(1)
    model = driven(rank, tnn.GroupedMLP(3, 32, 48, device=rank.device, dtype=torch.bfloat16))
    x = torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(rank.rank)).bfloat16().to(rank.device)
    sizes, probs = torch.tensor([32, 0, 16], device=rank.device), torch.rand(TOKENS, device=rank.device)
    outputs = [each(x, sizes, probs) for each in (full, model)]
    assert_same_bits(*(output.detach() for output in outputs))
    for output in outputs:
        output.float().square().mean().backward()
    for name, parameter in model.named_parameters():
        mine: Any = full.get_parameter(name).grad
        padded = torch.cat([mine, mine.new_zeros(rank.size * parameter.shape[0] - 3, *mine.shape[1:])])
        want = ops.reduce_scatter(padded.float(), rank.size, rank.group_name) / rank.size
        torch.testing.assert_close(parameter.grad.float(), want, rtol=2e-2, atol=1e-5)  # type: ignore[union-attr]


def test_experts(pair: RankPool) -> None:
    pair.run(check_experts)


class Incomplete(Parameter):
    is_distributed_weight = True


def test_errors() -> None:
    layer = tnn.Linear(8, 8)
    layer.register_parameter("weight", Incomplete(torch.ones(4, 8)))
    with pytest.raises(TypeError, match=re.escape("without ['materialize_group_for_forward'")):
        attach_distributed_weights(layer)

    class Whole(Incomplete):
        result = torch.ones(8, 8)

        def materialize_group_for_forward(self) -> Tensor:
            return self.result

        materialize_group_for_backward = finalize_group_grads = grad_buffer = materialize_group_for_forward

    layer.register_parameter("weight", Whole(torch.ones(4, 8)))
    assert attach_distributed_weights(layer) == ["weight"]
    assert layer(torch.ones(2, 8)).shape == (2, 8)
    with pytest.raises(ValueError, match="set_gather_order: argument 'layers': expected layers with sharded"):
        set_gather_order([layer])  # whose runtime has an order of its own
    for result, text in (
        (torch.ones(10, 8), "expected 8 rows, of the layer, got [10, 8]. Strip the padding"),
        (torch.ones(8, 7), "expected unsharded weights [N, 8] of numbers, got [8, 7]"),
    ):
        layer.weight.result = result  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=re.escape(text)):
            layer(torch.ones(2, 8))
    layer.register_parameter("weight", Parameter(torch.ones(4, 8)))
    with pytest.raises(ValueError, match="expected the weight that was attached, got a Parameter"):
        layer(torch.ones(2, 8))
    delayed = tnn.Linear(8, 8, recipe=recipes.DelayedScaling())
    delayed.register_parameter("weight", Whole(torch.ones(4, 8)))
    with pytest.raises(ValueError, match="expected recipes without delayed scaling"):
        attach_distributed_weights(delayed)


class Scaled(Parameter):
    """Twice the weight for a forward, four times for a backward, and gradients that are 100 too large."""

    is_distributed_weight = True

    def materialize_group_for_forward(self) -> Tensor:
        return 2 * self.detach()

    def materialize_group_for_backward(self) -> Tensor:
        return 4 * self.detach()

    def grad_buffer(self) -> Tensor:
        return torch.empty_like(self)

    def finalize_group_grads(self, wgrads: list[Tensor]) -> list[Tensor]:
        return [wgrad + 100 for wgrad in wgrads]


@pytest.mark.parametrize("kind", ["linear", "norm", "experts"])
def test_what_each_method_is_for(kind: str) -> None:
    """Which product read which weight, shown by integers that are exact."""
    generator = torch.Generator().manual_seed(0)
    made: dict[str, Any] = {
        "linear": lambda: tnn.Linear(6, 5, bias=False),
        "norm": lambda: tnn.LayerNormLinear(6, 5, bias=False),
        "experts": lambda: tnn.GroupedLinear(2, 6, 5, False),
    }
    layer = made[kind]()
    values = torch.randint(-2, 3, layer.weight.shape, generator=generator).float()
    layer.register_parameter("weight", Scaled(values))
    assert attach_distributed_weights(layer) == ["weight"]
    x = torch.randint(-2, 3, (8, 6), generator=generator).float().requires_grad_()
    grad = torch.randint(-2, 3, (8, 5), generator=generator).float()
    arguments = (x, torch.tensor([3, 5])) if kind == "experts" else (x,)
    output = layer(*arguments)
    output.backward(grad)
    hidden = torch.nn.functional.layer_norm(x, (6,)) if kind == "norm" else x
    each = [(0, slice(0, 3)), (1, slice(3, 8))] if kind == "experts" else [(..., slice(0, 8))]
    want = torch.cat([hidden[rows] @ (2 * values[i]).mT for i, rows in each])
    to_hidden = torch.cat([grad[rows] @ (4 * values[i]) for i, rows in each])
    torch.testing.assert_close(output, want, rtol=1e-5, atol=1e-5)
    (to_input,) = torch.autograd.grad(hidden, x, to_hidden) if kind == "norm" else (to_hidden,)
    torch.testing.assert_close(x.grad, to_input, rtol=1e-5, atol=1e-5)
    of_weight = torch.stack([grad[rows].mT @ hidden[rows] for _, rows in each]).view_as(values) + 100
    torch.testing.assert_close(layer.weight.grad, of_weight.detach(), rtol=1e-5, atol=1e-5)


def test_plain_weights_are_left_alone() -> None:
    layer = tnn.Linear(4, 4)
    weight = layer.weight
    assert attach_distributed_weights(layer) == [] and layer.weight is weight and layer.weight_shard == ""
