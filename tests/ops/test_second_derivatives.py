"""Second derivatives and forward mode are either right or refused; no tensor is silently treated as a constant."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from transformer_plugin import ops

SIZES = torch.tensor([3, 0, 4])
FORMATS = ("fp8_tensor",) * 3
REFUSAL = "gradient: expected to be differentiated once, got a second time"


def leaves(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    sizes = {"x": (7, 16), "w": (3, 12, 16), "w2": (3, 16, 6), "bias": (12,), "rows": (7,), "row": (16,)}
    return {
        name: torch.randn(size, generator=generator).to(dtype).requires_grad_()
        for name, size in sizes.items()
    }


OnceOrTwice = tuple[Callable[[dict[str, Tensor]], Tensor], tuple[str, ...]]
#: Ops that refuse a second derivative, and the leaves whose gradients refuse it.
ONCE: dict[str, OnceOrTwice] = {
    "activation": (lambda t: ops.activation(t["x"], t["rows"]), ("x", "rows")),
    "rms_norm": (lambda t: ops.rms_norm(t["x"], t["row"], 1e-5), ("x", "row")),
    "layer_norm": (lambda t: ops.layer_norm(t["x"], t["row"], t["row"], 1e-5), ("x", "row")),
    "grouped_gemm": (lambda t: ops.grouped_gemm(t["x"], t["w"], SIZES), ("w",)),
    "grouped_gemm with a list": (lambda t: ops.grouped_gemm(t["x"], [*t["w"]], SIZES), ("w",)),
    "grouped_gemm_activation": (
        lambda t: ops.grouped_gemm_activation(t["x"], t["w"], SIZES, t["rows"])[0],
        ("x", "w", "rows"),
    ),
    "grouped_mlp": (
        lambda t: ops.grouped_mlp(t["x"], t["w"], t["w2"].mT.reshape(3, 16, 6), SIZES, t["rows"]),
        ("x", "w", "w2", "rows"),
    ),
    "linear": (lambda t: ops.linear(t["x"], t["w"][0], None, *FORMATS), ("x", "w")),
    "router_logits": (lambda t: ops.router_logits(t["x"], t["w"][0]), ("x", "w")),
    "router_logits_with_tokens": (lambda t: ops.router_logits_with_tokens(t["x"], t["w"][0])[0], ("x", "w")),
    "norm_linear": (
        lambda t: ops.norm_linear(t["x"], t["row"], None, t["w"][0], t["bias"], 1e-5)[0],
        ("x", "row", "w"),
    ),
}
#: Functions with a right second derivative, and the same in torch.
TWICE: dict[str, tuple[Callable[[dict[str, Tensor]], Tensor], Callable[[dict[str, Tensor]], Tensor]]] = {
    "linear": (
        lambda t: ops.linear(t["x"], t["w"][0]),
        lambda t: torch.nn.functional.linear(t["x"], t["w"][0]),
    ),
    "gemm": (lambda t: ops.gemm(t["x"], t["w"][0]), lambda t: t["x"] @ t["w"][0].T),
}


@pytest.mark.parametrize("name", list(ONCE))
def test_second_derivative_is_refused(name: str) -> None:
    function, wanted = ONCE[name]
    t = leaves()
    gradients = torch.autograd.grad(
        function(t).square().sum(), [t[leaf] for leaf in wanted], create_graph=True
    )
    for leaf, gradient in zip(wanted, gradients, strict=True):
        assert gradient.requires_grad, leaf
        loss = gradient.square().sum() + t["x"].square().sum()
        with pytest.raises(RuntimeError, match=f"transformer_plugin::{name.split()[0]}: {REFUSAL}"):
            torch.autograd.grad(loss, t["x"], retain_graph=True)


@pytest.mark.parametrize("name", list(ONCE))
def test_create_graph_does_not_change_the_first_derivative(name: str) -> None:
    function, wanted = ONCE[name]
    t = leaves()
    for create_graph in (False, True):
        own = [t[leaf] for leaf in wanted]
        gradients = torch.autograd.grad(function(t).square().sum(), own, create_graph=create_graph)
        if not create_graph:
            expected = gradients
    assert all(torch.equal(g, e) for g, e in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("name", list(TWICE))
def test_second_derivative_agrees_with_torch(name: str) -> None:
    t = leaves(torch.float64)
    results = []
    for function in TWICE[name]:
        gradients = torch.autograd.grad(function(t).square().sum(), [t["x"], t["w"]], create_graph=True)
        penalty = sum((g.square().sum() for g in gradients), torch.zeros(()))
        results.append(torch.autograd.grad(penalty, [t["x"], t["w"]]))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


def test_second_derivative_of_the_gradient_of_a() -> None:
    """The gradient of ``a`` is a grouped product itself, so it can be differentiated."""
    t = leaves(torch.float64)
    results = []
    for function in (
        lambda: ops.grouped_gemm(t["x"], t["w"], SIZES),
        lambda: torch.cat([t["x"][:3] @ t["w"][0].T, t["x"][3:] @ t["w"][2].T]),
    ):
        (gradient,) = torch.autograd.grad(function().square().sum(), t["x"], create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), [t["x"], t["w"]]))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", [*ONCE, "gemm", "linear without formats"])
def test_forward_mode_is_refused(name: str) -> None:
    function = ONCE[name][0] if name in ONCE else TWICE[name.split()[0]][0]
    t = {key: leaf.detach() for key, leaf in leaves().items()}
    with forward_ad.dual_level(), torch.no_grad():
        dual = {key: forward_ad.make_dual(leaf, torch.ones_like(leaf)) for key, leaf in t.items()}
        with pytest.raises(RuntimeError, match="jvp is not implemented"):
            function(dual)
    with pytest.raises(RuntimeError):
        torch.func.jvp(lambda x: function({**t, "x": x}), (t["x"],), (torch.ones_like(t["x"]),))


def test_forward_mode_is_refused_for_each_tensor() -> None:
    """Also for a tensor of a list, for a factor, and for arguments that an op without a gradient reads or writes."""
    t = {key: leaf.detach() for key, leaf in leaves().items()}
    x, weights, sizes = t["x"], [*t["w"]], SIZES
    alpha, out = torch.ones(3), torch.zeros(7, 12)
    with forward_ad.dual_level(), torch.no_grad():

        def dual(tensor: Tensor) -> Tensor:
            return forward_ad.make_dual(tensor, torch.ones_like(tensor))

        with pytest.raises(RuntimeError, match="jvp is not implemented"):
            ops.grouped_gemm(x, [weights[0], dual(weights[1]), weights[2]], sizes)
        refused: dict[str, Callable[[], object]] = {
            "alpha": lambda: ops.grouped_gemm(x, t["w"], sizes, alpha=dual(alpha)),
            "a": lambda: ops.grouped_gemm_out(dual(x), t["w"], sizes, out),
            "out": lambda: ops.grouped_gemm_out(x, t["w"], sizes, dual(out)),
            "out[0]": lambda: ops.grouped_gemm_wgrad_out(
                out, x, sizes, [dual(weights[0]), weights[1], weights[2]]
            ),
        }
        for name, call in refused.items():
            expected = "a tensor without a forward-mode tangent, got .* with a forward-mode tangent"
            text = rf"argument '{re.escape(name)}': expected {expected}"
            with pytest.raises(ValueError, match=text):
                call()
    assert not out.any()
