"""Modules with delayed scaling: which scales each step uses, their state, and several ranks."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.nn import DispatchConfig, GroupedLinear, GroupedMLP, Linear, MoE
from transformer_plugin.recipes import BFloat16, DelayedScaling
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

RECIPE = DelayedScaling(amax_history_len=4)
STATE = ("delayed_history", "delayed_scale", "delayed_amax")
GROUPS = 3
SIZES = (5, 0, 9)


class Plain:
    """The scale of one operand, one tensor, computed by the documented rule in plain Python."""

    def __init__(self, largest: float, recipe: DelayedScaling) -> None:
        self.largest, self.recipe = largest, recipe
        self.window: list[float] = []
        self.scale = torch.tensor(1.0)

    def take(self, amax: float) -> None:
        """Ends a step."""
        if amax == 0:
            return
        self.window = [*self.window, amax][-self.recipe.amax_history_len :]
        top = max(self.window) if self.recipe.amax_compute_algo == "max" else amax
        self.scale = torch.tensor(self.largest * 2.0**-self.recipe.margin) / torch.tensor(top)


def top(tensor: Tensor) -> float:
    return tensor.abs().amax().item() if tensor.numel() else 0.0


def calls(device: torch.device, kind: str, recipe: DelayedScaling) -> tuple[torch.nn.Module, Any]:
    """Returns a module and a function that calls it."""
    torch.manual_seed(0)
    if kind == "linear":
        return Linear(16, 24, device=device, recipe=recipe), lambda module, x: module(x)
    sizes = torch.tensor(SIZES, device=device)
    module = GroupedLinear(GROUPS, 16, 24, device=device, recipe=recipe)
    return module, lambda module, x: module(x, sizes)


@pytest.mark.parametrize("kind", ["linear", "grouped"])
@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        DelayedScaling(margin=1, hybrid=False, amax_history_len=2),
        DelayedScaling(amax_compute_algo="most_recent", amax_history_len=3),
    ],
    ids=str,
)
def test_every_step_takes_the_scales_of_the_steps_before(
    kind: str, recipe: DelayedScaling, device: torch.device
) -> None:
    """Values grow and shrink. The sizes of input, weight and gradient decide the scales of the next step."""
    module, call = calls(device, kind, recipe)
    count = 1 if kind == "linear" else GROUPS
    largest = (448.0, 448.0, 57344.0 if recipe.hybrid else 448.0)
    plain = [[Plain(value, recipe) for _ in range(count)] for value in largest]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step, size in enumerate((1.0, 5.0, 0.25, 0.5, 0.0, 2.0, 0.1)):
        generator = torch.Generator().manual_seed(step)
        x = (torch.randn(14, 16, generator=generator) * size).to(device)
        grad = (torch.randn(14, 24, generator=generator) * size / 100).to(device)
        scales = torch.stack([one.scale for role in plain for one in role])
        module.eval()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        evaluated = call(module, x).detach()
        for name, value in module.state_dict().items():
            assert_same_bits(value, before[name], f"evaluation wrote {name}")
        module.train()
        output = call(module, x)
        assert_same_bits(module.delayed_scale.cpu(), scales, f"scales of step {step}")
        assert_same_bits(output.detach(), evaluated, "an evaluation takes the scales of the next step")
        keys, weight = tuple(module._formats), module.weight.detach()
        if kind == "linear":
            expected = ops.linear(x, weight, module.bias, *keys, scale=scales.to(device))
            parts = [[x], [weight], [grad]]
        else:
            sizes = torch.tensor(SIZES, device=device)
            expected = ops.grouped_linear(x, weight, sizes, module.bias, None, *keys, scale=scales.to(device))
            parts = [x.split(SIZES), weight.unbind(0), grad.split(SIZES)]
        assert_same_bits(output.detach(), expected.detach())
        optimizer.zero_grad()
        output.backward(grad)
        for role, tensors in zip(plain, parts, strict=True):
            for one, tensor in zip(role, tensors, strict=True):
                one.take(top(tensor))
        optimizer.step()


def test_arguments_have_effect(device: torch.device) -> None:
    """Each field of the recipe changes the scales of the third step."""

    def scales(**fields: Any) -> Tensor:
        torch.manual_seed(0)
        module = Linear(16, 16, device=device, recipe=DelayedScaling(**fields))
        for size in (4.0, 1.0, 2.0):
            module((torch.randn(8, 16) * size).to(device)).sum().backward()
        module(torch.zeros(1, 16, device=device))
        return module.delayed_scale.cpu()

    usual = scales()
    assert not torch.equal(scales(margin=1), usual)
    assert scales(hybrid=False)[2] != usual[2] and torch.equal(scales(hybrid=False)[:2], usual[:2])
    assert scales(amax_history_len=2)[0] != usual[0]
    assert scales(amax_compute_algo="most_recent")[0] != usual[0]


def test_accuracy_after_the_first_step(device: torch.device) -> None:
    """After the first step, errors of products are within the bound of the format."""
    torch.manual_seed(0)
    module = Linear(256, 128, bias=False, device=device, recipe=RECIPE)
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(512, 256, generator=generator) * 1e-4).to(device).requires_grad_()
    grad = (torch.randn(512, 128, generator=generator) * 1e-7).to(device)
    for step in range(2):
        output = module(x)
        got = [output, *torch.autograd.grad(output, (x, module.weight), grad)]
        w = module.weight.detach().double()
        exact = [x.double() @ w.T, grad.double() @ w, grad.double().T @ x.double()]
        errors = [relative_error(g, e) for g, e in zip(got, exact, strict=True)]
        if step == 0:
            assert errors[2] > 0.5, "a scale of 1 loses a gradient this small"
    assert errors[0] < 0.05 and errors[1] < 0.1 and errors[2] < 0.1
    assert min(errors) > 1e-4, "too exact for FP8"


def everything(device: torch.device | str = "cpu", recipe: Any = RECIPE) -> torch.nn.Module:
    torch.manual_seed(0)
    return MoE(32, 64, 4, 2, bias=True, dispatch=DispatchConfig(alignment=4), recipe=recipe, device=device)


def train(model: torch.nn.Module, steps: range, device: torch.device | str = "cpu") -> list[Tensor]:
    """Returns the losses, and then the model's state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in steps:
        x = torch.randn(24, 32, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        loss = (model(x).output - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def test_trains_and_goes_on_from_a_state_dict_bit_for_bit(device: torch.device) -> None:
    whole = everything(device)
    losses = train(whole, range(30), device)
    assert losses[-1] < 0.9 * losses[0]
    model = everything(device)
    train(model, range(13), device)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert {f"experts.fc1.{name}" for name in STATE} <= set(state)
    fresh = everything(device)
    fresh.load_state_dict(state)
    rest = train(fresh, range(13, 30), device)
    for got, expected in zip(rest, losses[13:], strict=True):
        assert_same_bits(got, expected)
    for name, value in whole.state_dict().items():
        assert_same_bits(fresh.state_dict()[name], value, name)


def test_grouped_mlp_keeps_state_for_both_products(device: torch.device) -> None:
    mlp = GroupedMLP(GROUPS, 16, 32, device=device, recipe=RECIPE)
    x, probs = torch.randn(14, 16, device=device), torch.rand(14, device=device)
    mlp(x, torch.tensor(SIZES, device=device), probs).square().sum().backward()
    for layer in (mlp.fc1, mlp.fc2):
        seen = layer.delayed_amax.view(3, GROUPS) > 0
        assert seen.tolist() == [[True, False, True], [True, True, True], [True, False, True]]


def test_state_comes_and_goes_with_the_recipe() -> None:
    module = Linear(8, 8, recipe=None)
    assert not list(module.buffers())
    module.recipe = RECIPE
    assert [tuple(b.shape) for b in module.buffers()] == [(4, 3), (3,), (3,)]
    assert [name for name, _ in module.named_buffers()] == list(STATE)
    module(torch.randn(4, 8))
    kept = module.delayed_amax.clone()
    module.recipe = DelayedScaling(margin=2, amax_history_len=4)
    assert_same_bits(module.delayed_amax, kept)
    module.recipe = DelayedScaling(amax_history_len=5)
    assert module.delayed_history.shape == (5, 3) and not module.delayed_amax.any()
    module.recipe = BFloat16()
    assert not list(module.buffers()) and list(module.state_dict()) == ["weight", "bias"]


def test_state_stays_float32_and_moves(device: torch.device) -> None:
    module = GroupedLinear(2, 8, 8, recipe=RECIPE)
    sizes = torch.tensor([2, 2])
    module(torch.randn(4, 8) / 3, sizes)
    kept = [b.clone() for b in module.buffers()]
    module.to(torch.bfloat16).to(device)
    assert module.weight.dtype == torch.bfloat16
    for got, expected in zip(module.buffers(), kept, strict=True):
        assert_same_bits(got.cpu(), expected)
        assert got.device.type == device.type
    other = copy.deepcopy(module)
    other(torch.ones(4, 8, device=device).bfloat16(), sizes.to(device))
    assert_same_bits(module.delayed_amax.cpu(), kept[2], "a deep copy has a state of its own")


def test_from_meta() -> None:
    for make in (
        lambda: Linear(8, 8, device="meta", recipe=RECIPE),
        lambda: GroupedLinear(2, 8, 8, device="meta", recipe=RECIPE),
    ):
        module = make()
        assert all(tensor.is_meta for tensor in module.state_dict().values())
        module.to_empty(device="cpu")
        module.reset_parameters()
        history, scale, amax = module.buffers()
        assert not history.any() and not amax.any() and (scale == 1).all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forwards_take_the_same_scales(reentrant: bool, device: torch.device) -> None:
    """Activation checkpointing runs a forward again in the backward, which must not update the state again."""
    direct, recomputed = everything(device), everything(device)

    def again(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda t: recomputed(t).output, x, use_reentrant=reentrant)

    for step in range(3):
        results = []
        for model, call in ((direct, lambda t: direct(t).output), (recomputed, again)):
            x = torch.randn(24, 32, generator=torch.Generator().manual_seed(step)).to(device).requires_grad_()
            output = call(x)
            model.zero_grad()
            output.square().mean().backward()
            results.append([output.detach(), x.grad, *(p.grad for p in model.parameters())])
        for got, expected in zip(*results, strict=True):
            assert_same_bits(got, expected)
    for got, expected in zip(direct.buffers(), recomputed.buffers(), strict=True):
        assert_same_bits(got, expected)


def refused_calls() -> list[tuple[Any, tuple[Tensor, ...]]]:
    """Modules, some of which have trained a step, and arguments that their ops reject."""
    linear, grouped = Linear(64, 32, recipe=RECIPE), GroupedLinear(2, 64, 32, recipe=RECIPE)
    mlp, x, sizes = GroupedMLP(2, 64, 32, recipe=RECIPE), torch.randn(8, 64), torch.tensor([3, 4])
    linear(x).sum().backward()
    grouped(x, sizes).sum().backward()
    doubled, narrow = Linear(64, 32, recipe=RECIPE).double(), Linear(64, 32, recipe=RECIPE)
    narrow.bias = torch.nn.Parameter(torch.zeros(31))
    return [
        (doubled, (x.double(),)),
        (narrow, (x,)),
        (grouped, (x, torch.tensor([3, 0, 4, 0])[::2])),
        (linear, (torch.randn(8, 63),)),
        (linear, (torch.tensor(1.0),)),
        (linear, (x.bfloat16(),)),
        (grouped, (torch.randn(8, 63), sizes)),
        (grouped, (x[None], sizes)),
        (grouped, (x, torch.tensor([9, 4]))),
        (grouped, (x, torch.tensor([-1, 4]))),
        (grouped, (x, torch.tensor([3]))),
        (grouped, (x, sizes.float())),
        (mlp, (x, sizes, torch.rand(7))),
        (mlp, (x, sizes, torch.ones(8, dtype=torch.int32))),
        (mlp, (x, torch.tensor([9, 4]), torch.rand(8))),
    ]


def test_a_refused_call_changes_no_state() -> None:
    for module, arguments in refused_calls():
        before = copy.deepcopy(module.state_dict())
        with pytest.raises((ValueError, TypeError), match="transformer_plugin::"):
            module(*arguments)
        for key, value in module.state_dict().items():
            assert_same_bits(value, before[key], f"{type(module).__name__}.{key}")
