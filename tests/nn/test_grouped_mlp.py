"""GroupedMLP runs as one op if its layers are unmodified, and otherwise calls the layers: the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard

from tests.nn.common import RECIPES, by_recipe, rows_of, width_of
from transformer_plugin import ops
from transformer_plugin.nn import GroupedLinear, GroupedMLP, grouped_linear
from transformer_plugin.nn import grouped_mlp as module_of_mlp
from transformer_plugin.recipes import BFloat16, DelayedScaling, Float8BlockScaling
from transformer_plugin.testing.numerics import assert_same_bits

GROUPS, FEATURES = 3, 128


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the ops that the module calls, in order."""
    names: list[str] = []

    def counted(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            return op(*args, **kwargs)

        return call

    for name in ("grouped_mlp", "grouped_linear", "activation"):
        monkeypatch.setattr(ops, name, counted(name, getattr(ops, name)))
    # Modules without a recipe call the registered op.
    for name, module in (("grouped_linear", grouped_linear), ("grouped_mlp", module_of_mlp)):
        registered = getattr(torch.ops.transformer_plugin, name).default
        op = SimpleNamespace(default=counted(name, registered))
        monkeypatch.setattr(module, "_ops", SimpleNamespace(**{name: op}))
    return names


ONE, LAYERS = ["grouped_mlp"], ["grouped_linear", "activation", "grouped_linear"]


def make(name: str = "none", bias: bool = True, device: torch.device | str = "cpu") -> GroupedMLP:
    torch.manual_seed(0)
    recipe = RECIPES[name][0]
    return GroupedMLP(GROUPS, width_of(name, 48), FEATURES, bias, device=device, recipe=recipe)


def step(
    module: torch.nn.Module, name: str = "none", run: Callable[..., Tensor] | None = None
) -> list[Tensor]:
    """Returns the output and all gradients; random numbers come from a fixed seed."""
    parameters = list(module.parameters())
    device = parameters[0].device
    generator = torch.Generator().manual_seed(3)
    counts = [rows_of(name, size) for size in (40, 0, 50)]
    rows = sum(counts) + rows_of(name, 8)
    x = torch.randn(rows, width_of(name, 48), generator=generator).to(device).requires_grad_()
    probs = torch.rand(rows, generator=generator).to(device).requires_grad_()
    torch.manual_seed(9)
    output = (module if run is None else run)(x, torch.tensor(counts, device=device), probs)
    grad = torch.randn(output.shape, generator=generator).to(device)
    return [output.detach(), *torch.autograd.grad(output, [x, probs, *parameters], grad)]


def assert_all_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a, b)


@by_recipe
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_one_op_has_the_bits_of_the_layers(
    name: str, bias: bool, calls: list[str], device: torch.device
) -> None:
    module = make(name, bias, device)
    got = step(module, name)
    assert calls == ONE
    module.fc1.register_forward_hook(lambda *_: None)
    assert_all_same(got, step(module, name))
    assert calls == ONE + LAYERS


@by_recipe
def test_under_deterministic_algorithms(name: str) -> None:
    """In deterministic mode torch fills new tensors, which it does not support for FP4."""
    module = make(name)
    expected = step(module, name)
    torch.use_deterministic_algorithms(True)
    try:
        got = step(module, name)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_all_same(got, expected)


def forward_hook(layer: GroupedLinear, seen: list[str]) -> Any:
    return layer.register_forward_hook(lambda *_: seen.append("after"))


def pre_hook(layer: GroupedLinear, seen: list[str]) -> Any:
    return layer.register_forward_pre_hook(lambda *_: seen.append("before"))


def backward_hook(layer: GroupedLinear, seen: list[str]) -> Any:
    return layer.register_full_backward_hook(lambda *_: seen.append("backward"))


def backward_pre_hook(layer: GroupedLinear, seen: list[str]) -> Any:
    return layer.register_full_backward_pre_hook(lambda *_: seen.append("backward before"))


def hook_of_all_modules(layer: GroupedLinear, seen: list[str]) -> Any:
    def hook(module: torch.nn.Module, *_: Any) -> None:
        if module is layer:
            seen.append("any")

    return torch.nn.modules.module.register_module_forward_hook(hook)


@pytest.mark.parametrize(
    "register", [forward_hook, pre_hook, backward_hook, backward_pre_hook, hook_of_all_modules]
)
@pytest.mark.parametrize("layer", ["fc1", "fc2"])
def test_hooks_of_a_layer_are_called(register: Callable[..., Any], layer: str, calls: list[str]) -> None:
    module = make()
    expected = step(module)
    seen: list[str] = []
    handle = register(getattr(module, layer), seen)
    assert_all_same(step(module), expected)
    assert len(seen) == 1
    handle.remove()
    assert_all_same(step(module), expected)
    fused = (register, layer) in ((pre_hook, "fc1"), (pre_hook, "fc2"), (forward_hook, "fc2"))
    assert len(seen) == 1 and calls == ONE + (ONE if fused else LAYERS) + ONE


def test_a_hook_changes_what_it_changes() -> None:
    module = make()
    with module.fc1.register_forward_hook(lambda layer, args, output: 0 * output):
        assert not module(torch.randn(4, 48), torch.tensor([1, 1, 2]), torch.zeros(4)).any()
    assert step(module)[0].any()


def test_hooks_of_the_mlp_itself_do_not_split_it(calls: list[str]) -> None:
    module = make()
    seen: list[str] = []
    module.register_forward_hook(lambda *_: seen.append("after"))
    step(module)
    assert seen == ["after"] and calls == ONE


class Doubled(GroupedLinear):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


class Wrapped(torch.nn.Module):
    """A layer that wraps another, as adapters do."""

    def __init__(self, layer: GroupedLinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> Tensor:
        return 2 * self.layer(*args)


def subclassed(module: GroupedMLP) -> None:
    module.fc1.__class__ = Doubled


def wrapped(module: GroupedMLP) -> None:
    module.fc1 = Wrapped(module.fc1)


def replaced_forward(module: GroupedMLP) -> None:
    forward = module.fc1.forward
    module.fc1.forward = lambda *args: 2 * forward(*args)


def parametrized(module: GroupedMLP) -> None:
    class Twice(torch.nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    torch.nn.utils.parametrize.register_parametrization(module.fc1, "weight", Twice())


def test_parametrized_layers_are_fused(calls: list[str]) -> None:
    module = make(bias=False)
    weight = 2 * module.fc1.weight.detach()
    parametrized(module)
    got = step(module)
    assert calls == ONE
    with torch.no_grad():
        plain = make(bias=False)
        plain.fc1.weight.copy_(weight)
    assert_same_bits(got[0], step(plain)[0])


@pytest.mark.parametrize("change", [subclassed, wrapped, replaced_forward])
def test_changed_layers_are_called(change: Callable[[GroupedMLP], None], calls: list[str]) -> None:
    """The wrapper doubles the first product including the gate, which only a call of the changed layer can give."""
    module = make(bias=False)
    weight = 2 * module.fc1.weight.detach()
    change(module)
    got = step(module)
    assert calls == LAYERS
    with torch.no_grad():
        plain = make(bias=False)
        plain.fc1.weight.copy_(weight)
    torch.testing.assert_close(got[0], step(plain)[0], rtol=1e-5, atol=1e-6)


def test_other_layers(calls: list[str]) -> None:
    """Layers with different formats, biases other than those of the constructor, delayed scaling."""
    module = make("fp8_block")
    one = step(module, "fp8_block")
    module.fc2.recipe = BFloat16()
    assert (step(module, "fp8_block")[0] != one[0]).any()
    assert calls == ONE + LAYERS
    module.fc2.recipe = Float8BlockScaling()  # an equal recipe, another object
    assert_all_same(step(module, "fp8_block"), one)
    assert calls == ONE + LAYERS + ONE

    calls.clear()
    delayed = GroupedMLP(GROUPS, 48, FEATURES, recipe=DelayedScaling())
    step(delayed)
    assert calls == LAYERS

    calls.clear()
    unscaled = make()
    unscaled.fc2.scale_bias = False
    step(unscaled)
    assert calls == LAYERS
    calls.clear()
    first_only = make()
    first_only.fc2 = GroupedLinear(GROUPS, FEATURES, 48, bias=False)
    got = step(first_only)
    assert calls == ONE
    first_only.fc1.register_forward_hook(lambda *_: None)
    assert_all_same(step(first_only), got)
    assert calls == ONE + LAYERS


def test_calls_with_parameters_given_from_outside(calls: list[str]) -> None:
    module = make()
    given = {name: 2 * value.detach() for name, value in module.named_parameters()}
    arguments = torch.randn(4, 48), torch.tensor([1, 1, 2]), torch.rand(4)
    got = torch.func.functional_call(module, given, arguments)
    module.load_state_dict(given)
    assert_same_bits(got.detach(), module(*arguments).detach())
    assert calls == ONE + ONE


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("each", [False, True], ids=["the mlp", "its layers"])
def test_sharded(each: bool, calls: list[str]) -> None:
    """Layers that are sharded separately are called, so that their weights are gathered first."""
    module = make("fp8_block")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    if each:
        fully_shard(module.fc1, mesh=mesh)
        fully_shard(module.fc2, mesh=mesh)
    fully_shard(module, mesh=mesh)
    x = torch.randn(6, 48)
    arguments = x, torch.tensor([1, 2, 2]), torch.rand(6)
    calls.clear()
    got = module(*arguments)
    assert calls == (LAYERS if each else ONE)
    assert_same_bits(got.detach(), make("fp8_block")(*arguments).detach())
    got.sum().backward()
    assert all(parameter.grad.full_tensor().any() for parameter in module.parameters())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["none", "fp8_block"])
def test_compiled(name: str, device: torch.device) -> None:
    """One graph while nothing changes; a layer of another class gives another graph, with its behavior."""
    module = make(name, device=device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    expected = step(module, name)
    assert_all_same(step(module, name, compiled), expected)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert_all_same(step(module, name, compiled), expected)
    graphs = [node.target for node in counter.graphs[0].graph.nodes if node.op == "call_function"]
    assert torch.ops.transformer_plugin.grouped_mlp.default in graphs
    subclassed(module)
    changed = step(module, name)
    assert (changed[0] != expected[0]).any()
    assert_all_same(step(module, name, compiled), changed)
    assert counter.frame_count == 2


def test_the_check_is_of_the_module() -> None:
    """The check for one op reads only attributes that every module has."""
    assert not module_of_mlp._is_plain(torch.nn.Identity())
    assert module_of_mlp._is_plain(GroupedLinear(1, 2, 3))


@pytest.mark.parametrize(
    ("probs", "error", "got"),
    [
        (torch.rand(9), ValueError, "Tensor [9] of float32 on cpu"),
        (torch.ones(8, dtype=torch.int32), TypeError, "Tensor [8] of int32 on cpu"),
        (0.5, TypeError, "float"),
    ],
)
def test_wrong_probabilities_change_no_state(probs: Any, error: type[Exception], got: str) -> None:
    """The first layer would record amaxes of delayed scaling before the op that takes them sees them."""
    mlp = GroupedMLP(2, 32, 32, recipe=DelayedScaling())
    before = copy.deepcopy(mlp.state_dict())
    with pytest.raises(error) as caught:
        mlp(torch.randn(8, 32), torch.tensor([5, 3]), probs)
    assert str(caught.value) == (
        "transformer_plugin::GroupedMLP: argument 'probs': expected a floating-point tensor [8] on cpu, a value for "
        f"each row of 'input', got {got}. Pass one value for each row."
    )
    for name, value in mlp.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, before[name]), name
