"""Weights of another runtime: one for each expert, of which the first leads; and what is refused when attached."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import transformer_plugin as tp
from tests.parallel.external_layers import KINDS, RECIPES, G, K, N, Shard, T, batch, driven, layer_of, run
from transformer_plugin import nn as tnn
from transformer_plugin import ops, optim, parallel, recipes
from transformer_plugin.parallel import attach_distributed_weights, shard_
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


@pytest.mark.parametrize("groups", [1, 3])
def test_what_the_first_expert_is_called_for(groups: int) -> None:
    """Twice the weights for a forward, four times for a backward, and 100 more for each gradient: which product read
    and wrote what, in integers that are exact."""
    generator = torch.Generator().manual_seed(0)
    layer = tnn.GroupedLinear(groups, 6, 5, bias=False, parameters="list")
    values = torch.randint(-2, 3, (groups, 5, 6), generator=generator).float()
    for i in range(groups):
        layer._parameters[f"weight{i}"] = Parameter(values[i])
    leader = driven(layer, lambda full, backward: (4 if backward else 2) * full)
    leader.shift = 100
    x = torch.randint(-2, 3, (8, 6), generator=generator).float().requires_grad_()
    grad = torch.randint(-2, 3, (8, 5), generator=generator).float()
    ends = [0, 3, 3, 8] if groups == 3 else [0, 8]
    rows = [slice(*pair) for pair in itertools.pairwise(ends)]
    output = layer(x, torch.tensor(ends).diff())
    output.backward(grad)
    assert leader.calls == ["forward", "backward", "finalize"]
    assert torch.equal(
        output.detach(), torch.cat([x[r] @ (2 * w).T for r, w in zip(rows, values, strict=True)])
    )
    assert torch.equal(x.grad, torch.cat([grad[r] @ (4 * w) for r, w in zip(rows, values, strict=True)]))  # type: ignore[arg-type]
    for i, r in enumerate(rows):
        of_weight = grad[r].T @ x.detach()[r]
        assert torch.equal(leader.wgrads[i], of_weight)
        assert torch.equal(layer._parameters[f"weight{i}"].grad, of_weight[:3] + 100)  # type: ignore[arg-type,union-attr]
    assert leader.calls == ["forward", "backward", "finalize"]  # the others' methods would say so too
    x.requires_grad_(False)
    layer(x, torch.tensor(ends).diff()).sum().backward()
    assert leader.calls == ["forward", "backward", "finalize"] * 2  # also without a data gradient


@pytest.mark.parametrize("of_first", [False, True])
def test_gradient_buffers_of_experts(of_first: bool) -> None:
    """Those of each, or a list of the first, are written over."""
    layer = layer_of("GroupedLinear list", dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    full = layer_of("GroupedLinear list", dtype=torch.bfloat16)
    leader, buffers = driven(layer), [torch.full((N, K), 7.0) for _ in range(G)]
    leader.keeps = True
    for buffer, shard in zip(buffers, layer._parameters_named(layer._weight_names), strict=True):
        shard.buffers = [buffers if of_first else buffer]
    run(layer, "GroupedLinear", torch.bfloat16)
    run(full, "GroupedLinear", torch.bfloat16)
    for i, buffer in enumerate(buffers):
        assert layer._parameters[f"weight{i}"].grad is None
        torch.testing.assert_close(buffer, full._parameters[f"weight{i}"].grad.float(), rtol=1e-2, atol=1e-2)
    for buffer, shard in zip(buffers, layer._parameters_named(layer._weight_names), strict=True):
        shard.buffers = [buffers if of_first else buffer]
    x, sizes, _ = batch("GroupedLinear", torch.bfloat16)
    text = "got torch.autograd.grad for the gradient of its weight, as pipeline schedules with a zero bubble call it"
    with pytest.raises(ValueError, match=text):
        torch.autograd.grad(layer(x, sizes).sum(), layer.weight0)


class Unattached(Parameter):
    is_distributed_weight = True

    def _none(self) -> None:
        raise AssertionError("not called")

    materialize_group_for_forward = materialize_group_for_backward = grad_buffer = _none

    def finalize_group_grads(self, wgrads: list[Tensor]) -> None:
        self._none()


def marked(layer: Any, *names: str, rows: int = 3, columns: int = 6) -> Any:
    """A layer with marked shards."""
    for name in names:
        layer.register_parameter(name, Unattached(torch.ones(rows, columns)))
    return layer


def of_list(**options: Any) -> Any:
    return tnn.GroupedLinear(2, 6, 5, parameters="list", **options)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "not the first": (
        lambda: marked(of_list(), "weight1"),
        "a mark on the first weight of the layer, 'weight0', got",
    ),
    "a bias": (
        lambda: marked(tnn.Linear(6, 5), "bias"),
        "expected marks on weights of Linear, LayerNormLinear or Gr",
    ),
    "a norm": (
        lambda: marked(tnn.LayerNormLinear(6, 5), "norm_weight"),
        "got 'layer.norm_weight' of LayerNormLinear",
    ),
    "an embedding": (lambda: marked(tnn.Embedding(5, 6), "weight"), "got 'layer.weight' of Embedding("),
    "a router": (lambda: marked(tnn.TopKRouter(6, 5, 2), "weight"), "got 'layer.weight' of TopKRouter("),
    "of torch": (lambda: marked(torch.nn.Linear(6, 5), "weight"), "got 'layer.weight' of Linear("),
    "delayed scaling": (
        lambda: marked(tnn.Linear(6, 5, recipe=recipes.DelayedScaling()), "weight"),
        "expected recipes without delayed scaling",
    ),
    "delayed gradients": (
        lambda: marked(of_list(delay_wgrad_compute=True), "weight0", "weight1"),
        "expected a layer without delay_wgrad_compute and shard_",
    ),
    "other columns": (
        lambda: marked(tnn.Linear(6, 5), "weight", columns=7),
        "expected a shard of 2 dimensions with 6 col",
    ),
    "a matrix of a stack": (
        lambda: marked(tnn.GroupedLinear(2, 6, 5), "weight"),
        "expected a shard of 3 dimensions",
    ),
    "unlike shards": (
        lambda: marked(marked(of_list(), "weight0"), "weight1", rows=2),
        "expected shards like that of 'layer.weight0', [3, 6] torch.float32 on cpu, got 'layer.weight1'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_when_attached(name: str) -> None:
    """And no other layer is attached then."""
    make, text = REFUSED[name]
    first = marked(tnn.Linear(6, 5), "weight")
    model = torch.nn.ModuleDict({"first": first, "layer": make()})
    with pytest.raises(ValueError, match=re.escape(text)) as error:
        attach_distributed_weights(model)
    assert str(error.value).startswith(
        "transformer_plugin::attach_distributed_weights: argument 'module': expected "
    )
    assert first.weight_shard == ""


class Adapter(torch.nn.Module):
    """As PEFT wraps a layer: it has the attributes of the layer, and none of its parameters."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.base_layer = layer
        self.own = tnn.Linear(K, N, bias=False)

    @property
    def weight(self) -> Any:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.own(x)


def test_adapters() -> None:
    layer, full = layer_of("Linear"), layer_of("Linear")
    leader = driven(layer)
    adapter = Adapter(layer)
    assert attach_distributed_weights(torch.nn.Sequential(adapter)) == ["0.base_layer.weight"]
    x = batch("Linear")[0].detach()
    assert_same_bits(adapter(x).detach(), (full(x) + adapter.own(x)).detach())
    assert leader.calls == ["forward"]


def test_quantized_shards_are_refused() -> None:
    for layer, name in (
        (tnn.Linear(K, N), "weight"),
        (tnn.GroupedLinear(G, K, N, parameters="grouped"), "weight"),
    ):
        weight = layer._parameters[name]
        value: Any = tp.quantize(weight.detach(), "fp8_tensor") if weight.dim() == 2 else weight  # type: ignore[union-attr,arg-type]
        value = Parameter(value)
        value.is_distributed_weight = True
        for method in ("materialize_group_for_forward", "materialize_group_for_backward"):
            setattr(value, method, lambda: None)
        value.finalize_group_grads = value.grad_buffer = lambda *_: None
        layer._parameters[name] = value
        with pytest.raises(
            ValueError, match="expected shards that are plain tensors, neither quantized nor grouped"
        ):
            attach_distributed_weights(layer)


OF_ALL_RANKS: dict[str, Callable[[Any, Any], Any]] = {
    "clip_grad_norm_": lambda layer, shard: parallel.clip_grad_norm_(layer, 1.0),
    "full_weight": lambda layer, shard: parallel.full_weight(shard),
    "full_state_dict": lambda layer, shard: parallel.full_state_dict(layer),
    "Muon": lambda layer, shard: optim.Muon([shard]),
}


@pytest.mark.parametrize("name", OF_ALL_RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_functions_that_need_all_ranks(kind: str, name: str) -> None:
    """Of whose shards this package knows nothing, unless this rank has all rows."""
    layer = layer_of(kind)
    shard = driven(layer)
    run(layer, kind)
    before = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    if name != "Muon" or shard.dim() == 2:
        weight = "weight0" if "list" in kind else "weight"
        text = rf"{name}: argument '\w+': expected .*, got '{weight}' of \w*Linear, \d+ of its \d+ rows, a shard of"
        with pytest.raises(ValueError, match=text):
            OF_ALL_RANKS[name](layer, shard)
    assert all(torch.equal(*pair) for pair in zip(before, [p.grad for p in layer.parameters()], strict=True))  # type: ignore[arg-type]
    alone = layer_of(kind)
    weight = driven(alone)
    for key in getattr(alone, "_weight_names", ("weight",)):
        alone._parameters[key].data = layer_of(kind)._parameters[key].data
    run(alone, kind)
    OF_ALL_RANKS[name](alone, weight)


class Gathered(Shard):
    """Of one expert, gathered over ranks; the first gathers all of them, and sums their gradients."""

    rank: Rank
    siblings: list[Tensor]

    def _all(self, backward: bool) -> list[Any]:
        return [ops.all_gather(s.detach(), self.rank.size, self.rank.group_name) for s in self.siblings]

    def finalize_group_grads(self, wgrads: list[Tensor]) -> list[Tensor | None]:
        return [
            ops.reduce_scatter(wgrad, self.rank.size, self.rank.group_name) / self.rank.size
            for wgrad in wgrads
        ]


def check_experts(rank: Rank, name: str) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        options: Any = {"recipe": RECIPES[name], "device": rank.device, "dtype": torch.bfloat16}
        models.append(tnn.GroupedMLP(G, K, N, True, parameters="list", **options))
    sharded, model = shard_(models[0], rank.group, format="none"), models[1]
    for layer in (model.fc1, model.fc2):
        shards = []
        for weight in layer._weight_names:
            shard = Gathered(layer._parameters[weight].detach().chunk(rank.size)[rank.rank].clone())
            shard.rank, shard.calls, shard.siblings = rank, [], []
            layer.register_parameter(weight, shard)
            shards.append(shard)
        shards[0].siblings = list(shards)
    names = attach_distributed_weights(model)
    assert names == [f"{layer}.weight{i}" for layer in ("fc1", "fc2") for i in range(G)]
    generator = torch.Generator().manual_seed(rank.rank)
    x, probs = torch.randn(T, K, generator=generator).bfloat16(), torch.rand(T, generator=generator)
    sizes, results = torch.tensor([16, 0, 16], device=rank.device), []
    for each in (sharded, model):
        input = x.to(rank.device).requires_grad_()
        output = each(input, sizes, probs.to(rank.device))
        output.float().square().mean().backward()
        results.append([output.detach(), input.grad])
    for got, wanted in zip(*results, strict=True):
        assert_same_bits(got, wanted)  # type: ignore[arg-type]
    for (key, got), of_shard in zip(model.named_parameters(), sharded.parameters(), strict=True):
        assert got.grad is not None and of_shard.grad is not None
        torch.testing.assert_close(got.grad, of_shard.grad, rtol=2e-2, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", ["none", "fp8_block", "mxfp8"])
def test_experts_over_ranks(pair: RankPool, name: str) -> None:
    """As those that shard_ shards, whose values travel."""
    pair.run(check_experts, name)
