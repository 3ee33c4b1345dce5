"""Adapters, sharding, replication and compilation of a GroupedMLP: which of them keep the one op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import transformer_plugin as tp
from tests.nn.test_fused_hooks import LAYERS, NAME, ONE, Dispatched, dispatched, double_the_input, split
from tests.nn.test_grouped_mlp import GROUPS, assert_all_same, make, step
from transformer_plugin.nn import GroupedLinear, MoE
from transformer_plugin.recipes import Float8BlockScaling


class LowRank(GroupedLinear):
    """An adapter that is a subclass: ``y + (x @ a.T) @ b.T`` of each group."""

    a: torch.nn.Parameter
    b: torch.nn.Parameter

    def forward(self, input: Tensor, group_sizes: Any, bias_scale: Tensor | None = None) -> Any:
        low = tp.grouped_linear(input, self.a, group_sizes)
        return super().forward(input, group_sizes, bias_scale) + tp.grouped_linear(low, self.b, group_sizes)


class Other(GroupedLinear):
    """A subclass that computes the same."""


@pytest.mark.parametrize("adapted", [("fc1",), ("fc2",), ("fc1", "fc2")], ids=str)
def test_adapters(adapted: tuple[str, ...]) -> None:
    """A layer with a forward of its own is called, and the result is that of the products one by one."""
    module, plain = make(NAME), make(NAME)
    for name in adapted:
        layer = getattr(module, name)
        layer.__class__ = LowRank
        layer.a = torch.nn.Parameter(torch.randn(GROUPS, 4, layer.in_features) / 4)
        layer.b = torch.nn.Parameter(torch.randn(GROUPS, layer.out_features, 4) / 4)

    def by_hand(input: Tensor, sizes: Tensor, probs: Tensor) -> Tensor:
        def layer(name: str, x: Tensor, *scale: Tensor) -> Tensor:
            own: Any = getattr(module, name)
            result: Tensor = GroupedLinear.forward(own, x, sizes, *scale)
            if name not in adapted:
                return result
            return result + tp.grouped_linear(tp.grouped_linear(x, own.a, sizes), own.b, sizes)

        return layer("fc2", tp.activation(layer("fc1", input), probs), probs)

    assert_all_same(step(module, NAME), step(module, NAME, by_hand))
    names = dispatched(module)
    assert "grouped_mlp" not in names and names.count("grouped_linear") == 2 + 2 * len(adapted)
    for name in adapted:
        layer = getattr(module, name)
        layer.__class__ = Other
        del layer.a, layer.b
    assert dispatched(module) == ONE
    assert_all_same(step(module, NAME)[:3], step(plain, NAME)[:3])


def test_a_call_of_its_own() -> None:
    class Doubled(GroupedLinear):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().__call__(*args, **kwargs)

    module = make(NAME)
    module.fc1.__class__ = Doubled
    assert dispatched(module) == LAYERS


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def backward(module: torch.nn.Module, run: Any) -> list[Tensor]:
    """Two steps; the output and all gradients, as plain tensors."""
    results = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(60, 48, generator=generator).requires_grad_()
        output = run(x, torch.tensor([10, 0, 40]), torch.rand(60, generator=generator))
        output.square().sum().backward()
        assert x.grad is not None
        results += [output.detach(), x.grad]
    grads: list[Any] = [p.grad for p in module.parameters()]
    return results + [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("sharded", "ops"),
    [
        (("",), ONE),
        (("fc1",), LAYERS),
        (("fc2",), LAYERS),
        (("fc1", ""), LAYERS),
        (("fc1", "fc2", ""), LAYERS),
        (("fc1 fc2", ""), LAYERS),
    ],
    ids=str,
)
def test_fsdp(sharded: tuple[str, ...], ops: list[str]) -> None:
    """Its hooks on a layer register what comes before that layer's backward on the layer's output: it is called."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    module = make(NAME)
    for names in sharded:
        layers: Any = [module.get_submodule(name) for name in names.split(" ")]
        fully_shard(layers if len(layers) > 1 else layers[0], mesh=mesh, reshard_after_forward=True)
    expected = split(make(NAME))
    assert_all_same(backward(module, module), backward(expected, expected))
    assert dispatched(module) == ops


@pytest.mark.usefixtures("one_rank")
def test_ddp() -> None:
    module, expected = make(NAME), split(make(NAME))
    replicated = DistributedDataParallel(module)
    assert_all_same(backward(module, replicated), backward(expected, expected))
    assert dispatched(replicated) == ONE


def test_mixtures() -> None:
    """Hooks of the modules around the layers have their own inputs and outputs."""
    torch.manual_seed(0)
    moe = MoE(48, 64, 4, 2, recipe=Float8BlockScaling())
    x = torch.randn(6, 48)
    expected = moe(x).output.detach()
    seen: list[Any] = []
    for module in (moe, moe.experts, moe.router):
        module.register_forward_pre_hook(lambda module, args: seen.append(args))
        module.register_forward_hook(lambda module, args, output: seen.append((args, output)))
    moe.experts.fc1.register_forward_pre_hook(lambda layer, args: seen.append(args))
    with Dispatched() as found, torch.no_grad():
        assert torch.equal(moe(x).output, expected)
    assert found.names.count("grouped_mlp") == 1 and "grouped_linear" not in found.names
    assert len(seen) == 7


@pytest.mark.parametrize(("layer", "ops"), [("fc1", ONE), ("fc2", LAYERS)])
def test_compiled(layer: str, ops: list[str]) -> None:
    torch._dynamo.reset()
    module = make(NAME)
    getattr(module, layer).register_forward_pre_hook(lambda layer, *unused: layer.seen.append(1))
    if layer == "fc1":
        module.fc1.register_forward_pre_hook(double_the_input)
    getattr(module, layer).seen = []
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    compiled = torch.compile(module, fullgraph=True, backend=backend)
    arguments = torch.randn(6, 48), torch.tensor([1, 2, 2]), torch.rand(6)
    assert_all_same([compiled(*arguments).detach()], [module(*arguments).detach()])
    names = [name.split(".")[1] for name in graphs[0] if name.startswith("transformer_plugin")]
    assert names == ops and len(getattr(module, layer).seen) == 2
