"""Layers whose weights are quantized parameters, and their training through master weights."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_plugin as tp
from tests.nn.common import RECIPES, rows_of, width_of
from transformer_plugin.nn import GroupedLinear, GroupedMLP, LayerNormLinear, Linear, MoE
from transformer_plugin.recipes import BFloat16, DelayedScaling, Float8BlockScaling, MXFP8BlockScaling
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

NAMES = [name for name in RECIPES if name not in ("none", "bf16")]
by_recipe = pytest.mark.parametrize("name", NAMES)
MAKERS: dict[str, Any] = {
    "Linear": lambda k, **o: Linear(k, 96, **o),
    "LayerNormLinear": lambda k, **o: LayerNormLinear(k, 96, **o),
    "GroupedLinear": lambda k, **o: GroupedLinear(3, k, 96, **o),
    "GroupedMLP": lambda k, **o: GroupedMLP(3, k, 128, True, **o),
}
by_module = pytest.mark.parametrize("kind", list(MAKERS))


def make(kind: str, name: str, device: torch.device, **options: Any) -> tuple[Any, Any]:
    """A layer with quantized parameters, and the same layer that quantizes its weight in each forward."""
    k, recipe = width_of(name, 48), RECIPES[name][0]
    torch.manual_seed(0)
    plain = MAKERS[kind](k, recipe=recipe, device=device)
    torch.manual_seed(0)
    with tp.quantized_init(recipe, **options):
        quantized = MAKERS[kind](k, device=device)
    return quantized, plain


def weights(module: torch.nn.Module) -> list[Any]:
    return [p for n, p in module.named_parameters() if n.endswith("weight") and "norm" not in n]


def run(module: Any, name: str, seed: int = 3) -> list[Tensor]:
    """The output and the gradients of input and parameters."""
    device, generator = next(module.parameters()).device, torch.Generator().manual_seed(seed)
    counts = [rows_of(name, size) for size in (40, 0, 50)]
    rows = sum(counts) + rows_of(name, 8)
    x = torch.randn(rows, width_of(name, 48), generator=generator).to(device).requires_grad_()
    arguments: list[Tensor] = [x]
    if isinstance(module, GroupedLinear | GroupedMLP):
        arguments.append(torch.tensor(counts, device=device))
    if isinstance(module, GroupedMLP):
        arguments.append(torch.rand(rows, generator=generator).to(device))
    torch.manual_seed(9)
    output = module(*arguments)
    grad = torch.randn(output.shape, generator=generator).to(device)
    with torch.no_grad():
        torch.manual_seed(9)
        assert_same_bits(module(*arguments), output.detach())
    return [output.detach(), *torch.autograd.grad(output, [x, *module.parameters()], grad)]


@by_recipe
@by_module
def test_same_bits_as_weights_quantized_in_each_forward(kind: str, name: str, device: torch.device) -> None:
    quantized, plain = make(kind, name, device)
    assert [n for n, _ in quantized.named_parameters()] == [n for n, _ in plain.named_parameters()]
    for p, q in zip(weights(quantized), weights(plain), strict=True):
        assert (
            isinstance(p, tp.QuantizedTensor | tp.GroupedTensor) and p.shape == q.shape and p.dtype == q.dtype
        )
        assert p.columnwise_data is not None and p.get_high_precision_init_val() is None
    results = [run(module, name) for module in (quantized, plain)]
    names = ["output", "input", *(n for n, _ in plain.named_parameters())]
    for i, (got, expected) in enumerate(zip(*results, strict=True)):
        if names[i] in ("output", "weight", "bias", "fc2.weight", "fc2.bias"):
            assert_same_bits(got, expected, names[i])
        else:  # of a product with the columnwise weight, which a CPU may add in another order
            assert relative_error(got, expected) < 1e-4, names[i]


@by_module
def test_trained_through_master_weights(kind: str, device: torch.device) -> None:
    """The parameters are what the master weights are when quantized; masters follow the gradients."""
    name = "fp8_block"
    quantized, plain = make(kind, name, device, preserve_high_precision_init_val=True)
    for p, q in zip(weights(quantized), weights(plain), strict=True):
        assert torch.equal(p.get_high_precision_init_val(), q.detach().cpu())
    optimizer = tp.optim.MasterWeights(quantized.parameters(), lambda p: torch.optim.AdamW(p, lr=0.02))
    reference = torch.optim.AdamW(plain.parameters(), lr=0.02)
    addresses = [p.data_ptr() for p in quantized.parameters()]
    for seed in range(3):
        for module in (quantized, plain):
            gradients = run(module, name, seed)[2:]
            for p, gradient in zip(module.parameters(), gradients, strict=True):
                p.grad = gradient.clone()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        reference.zero_grad()
    for master, q in zip(optimizer.master_weights, plain.parameters(), strict=True):
        torch.testing.assert_close(master.detach(), q.detach(), atol=2e-3, rtol=1e-2)
    for p, master in zip(quantized.parameters(), optimizer.master_weights, strict=True):
        if isinstance(p, tp.QuantizedTensor | tp.GroupedTensor):
            expected = tp.quantize(master.detach(), p.format, columnwise=True)
            assert torch.equal(p.rowwise_data.view(torch.uint8), expected.rowwise_data.view(torch.uint8))
            p.clear_high_precision_init_val()
            assert p.get_high_precision_init_val() is None
    assert addresses == [p.data_ptr() for p in quantized.parameters()]
    twin, _ = make(kind, name, device)
    other = tp.optim.MasterWeights(twin.parameters(), lambda p: torch.optim.AdamW(p, lr=0.02))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for got, wanted in zip(run(twin, name), run(quantized, name), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("added", [False, True])
def test_master_weights_of_main_grads(added: bool) -> None:
    """The gradient that the backward left: main_grad, beside a .grad that has no meaning where the flag says so."""
    torch.manual_seed(0)
    layer: Any = Linear(32, 48, fuse_wgrad_accumulation=True)
    reference = torch.nn.Linear(32, 48)
    reference.load_state_dict(layer.state_dict())
    layer.weight.main_grad = torch.zeros(48, 32)
    if added:
        layer.weight.grad_added_to_main_grad = False
    optimizer = tp.optim.MasterWeights(layer.parameters(), lambda p: torch.optim.SGD(p, lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        x = torch.randn(8, 32)
        layer(x).square().sum().backward()
        assert (layer.weight.grad is not None) == added
        if added:
            assert layer.weight.grad_added_to_main_grad
            layer.weight.grad.fill_(float("nan"))
        reference(x).square().sum().backward()
        optimizer.step()
        plain.step()
        for p, q in zip(layer.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)
        optimizer.zero_grad(set_to_none=step == 0)
        plain.zero_grad()
        assert not layer.weight.main_grad.any() and not getattr(
            layer.weight, "grad_added_to_main_grad", False
        )
    assert layer.weight.grad is None or not layer.weight.grad.any()


def test_refused_states_of_master_weights_change_nothing() -> None:
    with tp.quantized_init(Float8BlockScaling()):
        layer = Linear(32, 48)
    optimizer = tp.optim.MasterWeights(layer.parameters(), lambda p: torch.optim.AdamW(p, lr=0.1))
    for p in layer.parameters():
        p.grad = torch.ones(p.shape)
    optimizer.step()
    weight: Any = layer.weight
    before = copy.deepcopy((optimizer.state_dict(), layer.bias.detach(), weight.rowwise_data))
    good = copy.deepcopy(before[0])
    good["master_weights"] = [torch.zeros(48, 32), torch.zeros(48)]
    wrong: dict[str, tuple[type[Exception], dict[str, Any]]] = {
        "sizes": (ValueError, {**good, "master_weights": [torch.zeros(48, 32), torch.zeros(32)]}),
        "number": (ValueError, {**good, "master_weights": [torch.zeros(48, 32)]}),
        "none": (ValueError, {"master_weights": good["master_weights"]}),
        "groups": (ValueError, {**good, "optimizer": {"state": {}, "param_groups": []}}),
    }
    for error, state in wrong.values():
        with pytest.raises(error):
            optimizer.load_state_dict(state)
        after = (optimizer.state_dict(), layer.bias.detach(), weight.rowwise_data)
        for got, expected in zip(after[0]["master_weights"], before[0]["master_weights"], strict=True):
            assert_same_bits(got, expected)
        for i, entry in before[0]["optimizer"]["state"].items():
            for name, value in entry.items():
                assert_same_bits(after[0]["optimizer"]["state"][i][name], value)
        assert_same_bits(after[1], before[1])
        assert torch.equal(after[2].view(torch.uint8), before[2].view(torch.uint8))
    optimizer.load_state_dict(good)
    assert not layer.bias.any() and not weight.dequantize().any()


@by_module
def test_main_grad_of_quantized_parameters(kind: str, device: torch.device) -> None:
    quantized, plain = make(kind, "mxfp8", device)
    for module in quantized.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
    for p in weights(quantized):
        p.main_grad = torch.zeros(p.shape, device=device)
    rows = rows_of("mxfp8", 40)
    x = torch.randn(rows, width_of("mxfp8", 48), device=device)
    arguments: list[Tensor] = [x]
    if "Grouped" in kind:
        arguments.append(torch.tensor([rows, 0, 0], device=device))
    if kind == "GroupedMLP":
        arguments.append(torch.rand(rows, device=device))
    for module in (quantized, plain):
        module(*arguments).square().sum().backward()
    for p, q in zip(weights(quantized), weights(plain), strict=True):
        assert p.grad is None
        torch.testing.assert_close(p.main_grad, q.grad, atol=1e-2, rtol=1e-3)


@by_module
def test_compiled(kind: str, device: torch.device) -> None:
    torch._dynamo.reset()
    quantized, _ = make(kind, "fp8_block", device)
    expected = run(quantized, "fp8_block")
    device, generator = expected[0].device, torch.Generator().manual_seed(3)
    x = torch.randn(98, width_of("fp8_block", 48), generator=generator).to(device).requires_grad_()
    arguments: list[Tensor] = [x]
    if "Grouped" in kind:
        arguments.append(torch.tensor([40, 0, 50], device=device))
    if kind == "GroupedMLP":
        arguments.append(torch.rand(98, generator=generator).to(device))
    results = []
    for call in (quantized, torch.compile(quantized, fullgraph=True, backend="aot_eager")):
        output = call(*arguments)
        gradients = torch.autograd.grad(output.sum(), [x, *quantized.parameters()])
        results.append([output.detach(), *gradients])
    for got, wanted in zip(*results, strict=True):
        assert_same_bits(got, wanted)


@by_module
def test_files_and_resets(kind: str, device: torch.device) -> None:
    quantized, plain = make(kind, "fp8_block", device)
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    twin, _ = make(kind, "fp8_block", device)
    with torch.no_grad():
        for p in twin.parameters():
            p.copy_(torch.zeros(p.shape, device=device))
    twin.load_state_dict(state)
    for got, wanted in zip(run(twin, "fp8_block"), run(quantized, "fp8_block"), strict=True):
        assert_same_bits(got, wanted)
    twin.load_state_dict(plain.state_dict())  # high precision is quantized
    assert_same_bits(run(twin, "fp8_block")[0], run(quantized, "fp8_block")[0])
    torch.manual_seed(1)
    twin.reset_parameters()
    torch.manual_seed(1)
    plain.reset_parameters()
    assert_same_bits(run(twin, "fp8_block")[0], run(plain, "fp8_block")[0])
    copied = copy.deepcopy(quantized)
    assert_same_bits(run(copied, "fp8_block")[0], run(quantized, "fp8_block")[0])


def test_mixtures(device: torch.device) -> None:
    with tp.quantized_init(Float8BlockScaling()):
        moe: Any = MoE(32, 64, 4, 2, device=device)
    assert type(moe.experts.fc1.weight) is tp.GroupedTensor and type(moe.router.weight) is torch.nn.Parameter
    moe(torch.randn(10, 32, device=device)).output.sum().backward()
    assert moe.experts.fc1.weight.grad.shape == moe.experts.fc1.weight.shape


def test_refused() -> None:
    for wrong, error in ((None, TypeError), (DelayedScaling(), ValueError), (BFloat16(), ValueError)):
        with pytest.raises(error, match="transformer_plugin::quantized_init: argument 'recipe': expected"):
            tp.quantized_init(wrong).__enter__()  # type: ignore[arg-type]
    with tp.quantized_init(Float8BlockScaling()):
        with pytest.raises(ValueError, match="argument 'recipe': expected None"):
            Linear(32, 32, recipe=MXFP8BlockScaling())
        with pytest.raises(ValueError, match="argument 'parameters': expected 'packed' or 'grouped'"):
            GroupedLinear(3, 32, 32, parameters="list")
        layer = Linear(32, 32)
    assert type(Linear(32, 32).weight) is torch.nn.Parameter
    layer.weight.grad = torch.ones(32, 32)
    with pytest.raises(ValueError, match="values in high precision"):
        torch.optim.SGD([layer.weight], lr=0.1).step()


def test_no_layer_in_the_context() -> None:
    """A model of another library is made as without it, which is said at the end."""
    with (
        pytest.warns(
            UserWarning, match=r"quantized_init: expected layers of transformer_plugin\.nn in the"
        ) as found,
        tp.quantized_init(Float8BlockScaling()),
    ):
        layer = torch.nn.Linear(32, 32)
    assert type(layer.weight) is torch.nn.Parameter and found[0].filename == __file__


CONVERSIONS: dict[str, Any] = {
    "cast": lambda m, device: m.bfloat16(),
    "moved": lambda m, device: m.to("cpu" if device.type == "cuda" else device),
    "both": lambda m, device: m.to(device, torch.float16),
    "empty": lambda m, device: m.to_empty(device=device),
    "shared": lambda m, device: m.share_memory(),
}


@pytest.mark.parametrize("how", CONVERSIONS)
@by_module
def test_conversions_keep_attributes_and_hooks(kind: str, how: str, device: torch.device) -> None:
    """torch exchanges the contents of two tensors, and with them what a framework has put on a parameter."""
    quantized, _ = make(kind, "fp8_block", device, preserve_high_precision_init_val=True)
    calls: list[str] = []
    kept = {}
    for name, p in quantized.named_parameters():
        p.main_grad = torch.zeros(p.shape)
        p.sequence_parallel = name
        kept[name] = (p, p.main_grad, p.__dict__.get("high_precision_init_val"))
        p.register_hook(lambda grad: calls.append("hook"))
        p.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
    removed = [p.register_hook(lambda grad: calls.append("removed")) for p in quantized.parameters()]
    before = [type(p) for p in quantized.parameters()]
    CONVERSIONS[how](quantized, device)
    assert before == [type(p) for p in quantized.parameters()]
    for name, p in quantized.named_parameters():
        parameter, main_grad, values = kept[name]
        assert p is parameter and p.main_grad is main_grad and p.sequence_parallel == name
        assert p.__dict__.get("high_precision_init_val") is values
        assert p.requires_grad and isinstance(p, torch.nn.Parameter)
    for handle in removed:
        handle.remove()
    for p in weights(quantized):
        p.backward(torch.ones(p.shape, dtype=p.dtype, device=p.device))
    assert calls == ["hook", "after"] * len(weights(quantized))


@by_module
def test_made_on_the_meta_device(kind: str, device: torch.device) -> None:
    """to_empty() keeps the types; reset_parameters() then draws the values that a layer made here has."""
    expected, _ = make(kind, "fp8_block", device, preserve_high_precision_init_val=True)
    deferred, _ = make(kind, "fp8_block", torch.device("meta"), preserve_high_precision_init_val=True)
    for p in weights(deferred):
        assert p.device.type == "meta" and p.get_high_precision_init_val() is None
    deferred.to_empty(device=device)
    for p, q in zip(deferred.parameters(), expected.parameters(), strict=True):
        assert type(p) is type(q) and (p.shape, p.dtype, p.device) == (q.shape, q.dtype, q.device)
    for p, q in zip(weights(deferred), weights(expected), strict=True):
        assert p.format == q.format and p.get_high_precision_init_val() is None
        assert [n for n, _ in p._buffers.present()] == [n for n, _ in q._buffers.present()]
        assert all(t.device == q.device for _, t in p._buffers.present())
    torch.manual_seed(5)
    expected.reset_parameters()
    torch.manual_seed(5)
    deferred.reset_parameters()
    for p, q in zip(deferred.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)
    for p, q in zip(weights(deferred), weights(expected), strict=True):
        values = p.get_high_precision_init_val()
        assert type(values) is Tensor and values.device.type == "cpu" and bool(values.any())
        assert torch.equal(values, q.get_high_precision_init_val())
        assert torch.equal(tp.quantize(values.to(device), p.format, columnwise=True), p.detach())
    state = expected.state_dict()
    other, _ = make(kind, "fp8_block", torch.device("meta"))
    other.load_state_dict(state, assign=True)
    other.to_empty(device=device).load_state_dict({name: t.cpu().half() for name, t in state.items()})
    for p, q in zip(weights(other), weights(expected), strict=True):
        assert torch.equal(p, q)


def test_grouped_layout(device: torch.device) -> None:
    with tp.quantized_init(Float8BlockScaling(), preserve_high_precision_init_val=True):
        layer = GroupedLinear(3, 32, 32, parameters="grouped", device=device)
    assert type(layer.weight.get_high_precision_init_val()) is Tensor  # type: ignore[operator]
    plain = GroupedLinear(3, 32, 32, parameters="grouped", device="meta")
    plain.weight.main_grad = kept = torch.zeros(3, 32, 32)  # type: ignore[attr-defined]
    plain.to_empty(device=device).reset_parameters()
    assert type(plain.weight) is type(plain.bias) is tp.GroupedTensor and plain.weight.main_grad is kept
    optimizer = tp.optim.MasterWeights(layer.parameters(), lambda p: torch.optim.SGD(p, lr=0.1))
    layer(torch.randn(9, 32, device=device), [4, 0, 5]).sum().backward()
    optimizer.step()


@by_module
def test_autocast(kind: str, device: torch.device) -> None:
    """The nominal dtype is cast, no byte: with weights that bfloat16 has exactly, the bits of a plain layer."""
    quantized, plain = make(kind, "fp8_block", device)
    with torch.no_grad():
        for p, q in zip(quantized.parameters(), plain.parameters(), strict=True):
            q.copy_(q.bfloat16())
            p.copy_(q)
    results = []
    for module in (quantized, plain):
        with torch.autocast(device.type, torch.bfloat16):
            results.append(run(module, "fp8_block"))
    assert results[0][0].dtype == torch.bfloat16
    for got, expected in zip(*results, strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)
    assert_same_bits(results[0][0], results[1][0])
