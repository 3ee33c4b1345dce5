"""Grouped layers with packed, separate and grouped parameters, and gradients that go into main_grad."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_plugin as tp
from tests.nn.common import RECIPES, rows_of, width_of
from transformer_plugin.nn import GroupedLinear, GroupedMLP, LayerNormLinear, Linear, MoE
from transformer_plugin.recipes import DelayedScaling, Float8CurrentScaling
from transformer_plugin.testing.numerics import assert_same_bits

G = 3
LAYOUTS = ("packed", "list", "grouped")
by_layout = pytest.mark.parametrize("layout", LAYOUTS)
by_recipe = pytest.mark.parametrize("name", [n for n, (recipe, *_) in RECIPES.items() if "delayed" not in n])


def make(kind: str, name: str, device: torch.device, **options: Any) -> Any:
    """A layer with the same numbers in every layout."""
    k, recipe = width_of(name, 48), RECIPES[name][0]
    if kind == "GroupedLinear":
        layer: Any = GroupedLinear(G, k, 96, device=device, recipe=recipe, **options)
    else:
        layer = GroupedMLP(G, k, 128, True, device=device, recipe=recipe, **options)
    torch.manual_seed(0)
    with torch.no_grad():
        for part in [layer] if kind == "GroupedLinear" else [layer.fc1, layer.fc2]:
            n, width = part.out_features, part.in_features
            part.load_state_dict({"weight": torch.randn(G, n, width) / 4, "bias": torch.randn(G, n)})
    return layer


def run(layer: Any, name: str, seed: int = 3) -> tuple[Tensor, Tensor]:
    """The output and the gradient of the input; gradients of parameters go where the layer puts them."""
    first: Tensor = next(layer.parameters())
    generator = torch.Generator().manual_seed(seed)
    counts = [rows_of(name, size) for size in (40, 0, 50)]
    rows = sum(counts) + rows_of(name, 8)
    k = width_of(name, 48)
    x = torch.randn(rows, k, generator=generator).to(first.device).requires_grad_()
    arguments = [x, torch.tensor(counts, device=first.device)]
    if isinstance(layer, GroupedMLP):
        arguments.append(torch.rand(rows, generator=generator).to(first.device))
    torch.manual_seed(9)
    output = layer(*arguments)
    output.backward(torch.randn(output.shape, generator=generator).to(first.device))
    assert x.grad is not None
    return output.detach(), x.grad


def gradients(layer: Any) -> dict[str, Tensor]:
    """Those of all parameters by the names of the packed layout."""
    result: dict[str, list[Tensor]] = {}
    for name, p in layer.named_parameters():
        if p.grad is not None:
            result.setdefault(name.rstrip("0123456789"), []).append(p.grad)
    listed = any(name[-1].isdigit() for name, _ in layer.named_parameters())
    return {name: torch.stack(values) if listed else values[0] for name, values in result.items()}


@by_layout
@by_recipe
@pytest.mark.parametrize("kind", ["GroupedLinear", "GroupedMLP"])
def test_same_bits_in_every_layout(kind: str, name: str, layout: str, device: torch.device) -> None:
    expected, layer = make(kind, name, device), make(kind, name, device, parameters=layout)
    for got, wanted in zip(run(layer, name), run(expected, name), strict=True):
        assert_same_bits(got, wanted)
    wanted_gradients = gradients(expected)
    got_gradients = gradients(layer)
    assert got_gradients.keys() == wanted_gradients.keys() and len(got_gradients) >= 2
    for key, gradient in wanted_gradients.items():
        assert_same_bits(got_gradients[key], gradient, key)
    names = [n for n, _ in layer.named_parameters()]
    if layout == "list":
        assert any(n.endswith("weight2") for n in names) and not any(n.endswith("weight") for n in names)
    if layout == "grouped":
        assert all(type(p) is tp.GroupedTensor for p in layer.parameters())


@pytest.mark.parametrize("source", LAYOUTS)
@by_layout
def test_checkpoints_load_into_each_layout(source: str, layout: str, device: torch.device) -> None:
    torch.manual_seed(1)
    old: Any = GroupedMLP(G, 16, 8, True, device=device, parameters=source)
    new: Any = GroupedMLP(G, 16, 8, True, device=device, parameters=layout)
    state = old.state_dict()
    assert all(type(value) is Tensor for value in state.values())
    addresses = [p.data_ptr() for p in new.parameters()]
    new.load_state_dict(copy.deepcopy(state))
    assert addresses == [p.data_ptr() for p in new.parameters()]
    x, sizes = torch.randn(9, 16, device=device), torch.tensor([4, 0, 5], device=device)
    assert_same_bits(new(x, sizes, torch.ones(9, device=device)), old(x, sizes, torch.ones(9, device=device)))
    container = torch.nn.Sequential(new)
    container.load_state_dict({f"0.{key}": value for key, value in state.items()}, assign=True)
    assert_same_bits(new(x, sizes, torch.ones(9, device=device)), old(x, sizes, torch.ones(9, device=device)))


@by_layout
def test_safetensors(layout: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    old: Any = GroupedMLP(G, 16, 8, True, parameters=layout)
    safetensors.save_file(old.state_dict(), tmp_path / "experts.safetensors")
    state = safetensors.load_file(tmp_path / "experts.safetensors")
    for other in LAYOUTS:
        new: Any = GroupedMLP(G, 16, 8, True, parameters=other)
        new.load_state_dict(dict(state))
        x, sizes = torch.randn(9, 16), torch.tensor([4, 0, 5])
        assert_same_bits(new(x, sizes, torch.ones(9)), old(x, sizes, torch.ones(9)))


@by_layout
def test_wrong_checkpoints_are_refused(layout: str) -> None:
    layer: Any = GroupedLinear(G, 16, 8, parameters=layout)
    before = copy.deepcopy(layer.state_dict())
    for other in LAYOUTS:
        for groups, k, n in ((4, 16, 8), (2, 16, 8), (3, 16, 9), (3, 32, 8)):
            state = GroupedLinear(groups, k, n, parameters=other).state_dict()
            with pytest.raises(RuntimeError, match="size mismatch"):
                layer.load_state_dict(state)
    ragged = {"weight0": torch.zeros(8, 16), "weight1": torch.zeros(8, 16), "weight2": torch.zeros(7, 16)}
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({**ragged, "bias": torch.zeros(G, 8)})
    for key, value in layer.state_dict().items():
        assert_same_bits(value, before[key])


def with_main_grad(layer: Any, dtype: torch.dtype, fill: float, marked: bool = False) -> Tensor:
    """Gives each weight a view of one flat buffer, as Megatron does, and returns the buffer."""
    weights = [p for n, p in layer.named_parameters() if "weight" in n]
    flat = torch.full((sum(p.numel() for p in weights) + 64,), fill, dtype=dtype, device=weights[0].device)
    begin = 64  # aligned, as frameworks align it
    for p in weights:
        p.main_grad = flat[begin : begin + p.numel()].view(p.shape)
        if marked:
            p.grad_added_to_main_grad = False
        begin += p.numel()
    return flat


@by_layout
@by_recipe
@pytest.mark.parametrize("kind", ["GroupedLinear", "GroupedMLP"])
def test_main_grad(kind: str, name: str, layout: str, device: torch.device) -> None:
    layer = make(kind, name, device, parameters=layout, fuse_wgrad_accumulation=True)
    expected = make(kind, name, device)
    flat = with_main_grad(layer, torch.float32, 0.25)
    for seed in (3, 4):
        assert_same_bits(run(layer, name, seed)[0], run(expected, name, seed)[0])
    reference = make(kind, name, device)
    total: dict[str, Tensor] = {}
    for seed in (3, 4):
        run(reference, name, seed)
        for key, gradient in gradients(reference).items():
            total[key] = total.get(key, torch.full_like(gradient, 0.25)) + gradient
        reference.zero_grad()
    assert bool((flat[:64] == 0.25).all())
    got_gradients = gradients_of_main(layer)
    assert got_gradients.keys() == {key for key in total if "weight" in key}
    for key, value in got_gradients.items():
        torch.testing.assert_close(value, total[key], atol=1e-4, rtol=1e-5)
    assert all(p.grad is None for n, p in layer.named_parameters() if "weight" in n)
    assert all(p.grad is not None for n, p in layer.named_parameters() if "bias" in n)


def gradients_of_main(layer: Any) -> dict[str, Tensor]:
    """The main_grad of the weights by the names of the packed layout."""
    result: dict[str, list[Tensor]] = {}
    for name, p in layer.named_parameters():
        if hasattr(p, "main_grad"):
            result.setdefault(name.rstrip("0123456789"), []).append(p.main_grad)
    listed = any(name[-1].isdigit() for name, _ in layer.named_parameters())
    return {name: torch.stack(values) if listed else values[0] for name, values in result.items()}


@by_layout
def test_flags_of_main_grad(layout: str, device: torch.device) -> None:
    layer = make("GroupedLinear", "fp8_block", device, parameters=layout, fuse_wgrad_accumulation=True)
    weights = [p for n, p in layer.named_parameters() if "weight" in n]
    hooks: list[Tensor] = []
    for p in weights:
        node: Any = p.expand_as(p).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, p=p: hooks.append(p))
        p.node = node
    with_main_grad(layer, torch.float32, float("nan"), marked=True)
    for p in weights:
        p.overwrite_main_grad = True
    run(layer, "fp8_block")
    assert len(hooks) == len(weights)
    for p in weights:
        assert p.grad_added_to_main_grad and p.grad is not None and p.grad.shape == p.shape
        assert not bool(p.main_grad.isnan().any())
        p.zero_out_wgrad, p.grad = True, None
    run(layer, "fp8_block")
    assert all(not bool(p.grad.any()) for p in weights)
    if layout == "list":
        weights[0].overwrite_main_grad = False
        with pytest.raises(ValueError, match="the same 'overwrite_main_grad' on all weights"):
            run(layer, "fp8_block")
        weights[0].overwrite_main_grad = True
    kept = [p.main_grad.clone() for p in weights]
    for p in weights:
        p.requires_grad_(False)
    run(layer, "fp8_block")
    assert all(torch.equal(p.main_grad, old) for p, old in zip(weights, kept, strict=True))
    weights[0].requires_grad_(True)
    for wrong in (None, torch.zeros(2), torch.zeros(weights[0].shape, dtype=torch.float16, device=device)):
        weights[0].main_grad = wrong
        with pytest.raises((TypeError, ValueError), match=r"expected .*, got .*"):
            run(layer, "fp8_block")


@pytest.mark.parametrize("name", ["none", "fp8_block", "mxfp8"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_main_grad_of_dense_layers(kind: str, name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    maker: Any = {"Linear": Linear, "LayerNormLinear": LayerNormLinear}[kind]
    layer = maker(64, 32, device=device, recipe=RECIPES[name][0], fuse_wgrad_accumulation=True)
    expected = copy.deepcopy(layer)
    expected.fuse_wgrad_accumulation = False
    layer.weight.main_grad = torch.zeros(32, 64, device=device)
    x = torch.randn(48, 64, device=device)
    for module in (layer, expected):
        module(x).square().sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.weight.main_grad, expected.weight.grad, atol=1e-4, rtol=1e-5)
    assert_same_bits(layer.bias.grad, expected.bias.grad)


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "GroupedLinear", "GroupedMLP"])
def test_a_refused_call_leaves_the_flag(kind: str) -> None:
    """The flag says that main_grad has the gradient, which a call that the op refuses never computes."""
    sizes = {"GroupedLinear": (G, 48, 96), "GroupedMLP": (G, 48, 128)}.get(kind, (48, 96))
    layer: Any = getattr(tp.nn, kind)(*sizes, fuse_wgrad_accumulation=True)
    more = [torch.tensor([4, 0, 5])] if kind.startswith("Grouped") else []
    more += [torch.rand(9)] if kind == "GroupedMLP" else []
    with_main_grad(layer, torch.float32, 0.0, marked=True)
    marked = [p for n, p in layer.named_parameters() if "weight" in n and "norm" not in n]
    with pytest.raises((ValueError, TypeError)):
        layer(torch.randn(9, 40), *more)
    assert not any(p.grad_added_to_main_grad for p in marked)
    layer(torch.randn(9, 48), *more)
    assert all(p.grad_added_to_main_grad for p in marked)


def test_lists_have_members() -> None:
    for kind in (GroupedLinear, GroupedMLP):
        with pytest.raises(
            ValueError, match="argument 'num_groups': expected at least 1 with parameters='list'"
        ):
            kind(0, 32, 32, parameters="list")
        assert kind(0, 32, 32).num_groups == 0


@by_layout
@pytest.mark.parametrize("name", ["none", "fp8_block", "mxfp8"])
def test_compiled(name: str, layout: str, device: torch.device) -> None:
    torch._dynamo.reset()
    results = []
    for compiles in (False, True):
        layer = make("GroupedMLP", name, device, parameters=layout, fuse_wgrad_accumulation=True)
        for p in layer.parameters():
            p.main_grad = torch.full(p.shape, 0.25, device=device)
            p.grad_added_to_main_grad = False
        run_layer = torch.compile(layer, fullgraph=True) if compiles else layer
        for seed in (3, 4):
            output = run_through(run_layer, layer, name, seed)
        flags = [p.grad_added_to_main_grad for n, p in layer.named_parameters() if "weight" in n]
        assert all(flags)
        results.append([output, *(p.main_grad for p in layer.parameters())])
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)


def run_through(call: Any, layer: Any, name: str, seed: int) -> Tensor:
    """One step through a compiled layer."""
    first: Tensor = next(layer.parameters())
    generator = torch.Generator().manual_seed(seed)
    counts = [rows_of(name, 40 + seed), 0, rows_of(name, 50)]
    rows = sum(counts) + rows_of(name, 8)
    x = torch.randn(rows, width_of(name, 48), generator=generator).to(first.device)
    probs = torch.rand(rows, generator=generator).to(first.device)
    output: Tensor = call(x, torch.tensor(counts, device=first.device), probs)
    output.square().sum().backward()
    return output.detach()


@by_layout
def test_no_tokens_keep_the_graph(layout: str, device: torch.device) -> None:
    layer: Any = GroupedLinear(G, 16, 8, device=device, parameters=layout)
    fired: list[str] = []
    for name, p in layer.named_parameters():
        p.register_hook(lambda grad, name=name: fired.append(name))
    output = layer(torch.randn(0, 16, device=device), torch.zeros(G, dtype=torch.int64, device=device))
    output.sum().backward()
    assert sorted(fired) == sorted(n for n, _ in layer.named_parameters())
    assert all(not bool(p.grad.any()) for p in layer.parameters())


@by_layout
def test_returned_bias(layout: str, device: torch.device) -> None:
    layer: Any = GroupedLinear(G, 16, 8, device=device, parameters=layout, return_bias=True)
    x, sizes = torch.randn(9, 16, device=device), torch.tensor([4, 0, 5], device=device)
    output, bias = layer(x, sizes)
    whole: Any = GroupedLinear(G, 16, 8, False, device=device)
    whole.load_state_dict({k: v for k, v in layer.state_dict().items() if "weight" in k})
    if layout == "list":
        assert all(b is p for b, p in zip(bias, (layer.bias0, layer.bias1, layer.bias2), strict=True))
    else:
        assert bias is layer.bias
    assert_same_bits(output, whole(x, sizes))
    dense: Any = Linear(16, 8, device=device, return_bias=True)
    output, bias = dense(x)
    assert bias is dense.bias
    assert_same_bits(output, torch.nn.functional.linear(x, dense.weight))


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="argument 'parameters': expected 'packed', 'list' or 'grouped'"):
        GroupedLinear(G, 16, 8, parameters="discrete")  # type: ignore[arg-type]
    layer: Any = GroupedLinear(G, 16, 8, parameters="list", recipe=DelayedScaling())
    with pytest.raises(ValueError, match="expected parameters='packed' or 'grouped'"):
        layer(torch.randn(9, 16), torch.tensor([4, 0, 5]))
    fused: Any = Linear(16, 8, fuse_wgrad_accumulation=True, recipe=DelayedScaling())
    with pytest.raises(ValueError, match="fuse_wgrad_accumulation=False"):
        fused(torch.randn(9, 16))


@by_layout
def test_moe(layout: str, device: torch.device) -> None:
    torch.manual_seed(0)
    moe: Any = MoE(32, 16, 4, 2, device=device, recipe=Float8CurrentScaling(), parameters=layout)
    expected: Any = MoE(32, 16, 4, 2, device=device, recipe=Float8CurrentScaling())
    expected.load_state_dict(moe.state_dict())
    x = torch.randn(20, 32, device=device)
    assert_same_bits(moe(x).output, expected(x).output)


@by_layout
@pytest.mark.parametrize("kind", ["GroupedLinear", "GroupedMLP"])
def test_settings_that_change_before_the_backward(kind: str, layout: str, device: torch.device) -> None:
    """A backward is that of its forward, whatever is set between them."""
    name = "fp8_block"
    rows = rows_of(name, 40) + rows_of(name, 50)
    x = torch.randn(rows, width_of(name, 48), device=device)
    arguments: list[Tensor] = [x, torch.tensor([rows_of(name, 40), 0, rows_of(name, 50)], device=device)]
    if kind == "GroupedMLP":
        arguments.append(torch.rand(rows, device=device))
    results = []
    for changes in (False, True):
        layer = make(kind, name, device, parameters=layout)
        leaf = x.clone().requires_grad_()
        output = layer(leaf, *arguments[1:])
        if changes:
            layer.recipe = Float8CurrentScaling()
            layer.eval()
            for part in layer.modules():
                if isinstance(part, GroupedLinear):
                    part.fuse_wgrad_accumulation = True
                    part.launch_options = tp.LaunchOptions(max_sms=8)
        output.backward(torch.ones_like(output))
        assert leaf.grad is not None
        results.append([leaf.grad, *gradients(layer).values()])
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)


@by_layout
@by_recipe
def test_clipped_gradients(name: str, layout: str, device: torch.device) -> None:
    layer, expected = make("GroupedMLP", name, device, parameters=layout), make("GroupedMLP", name, device)
    norms = []
    for module, clip in ((layer, tp.clip_grad_norm_), (expected, torch.nn.utils.clip_grad_norm_)):
        run(module, name)
        norms.append(clip(module.parameters(), 0.5))
    torch.testing.assert_close(norms[0], norms[1], atol=0.0, rtol=1e-5)
    wanted = gradients(expected)
    for key, gradient in gradients(layer).items():
        torch.testing.assert_close(gradient, wanted[key], atol=1e-7, rtol=1e-5)
