"""Options that mean something only beside another one, and numbers out of range: errors of four parts, none ignored."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import transformer_plugin as tp
from tests.nn.test_wrong_types import CONTEXT, FOUR_PARTS, model, sizes_of, weight
from transformer_plugin import nn
from transformer_plugin.parallel import EpBuffer, EpContext, ep_bootstrap, ep_finalize, shard_

NAN, INF = float("nan"), float("inf")


def refused(call: Callable[[], Any], kind: type[Exception], owner: str, argument: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert text.startswith(f"transformer_plugin::{owner}: argument '{argument}': expected "), text
    assert re.match(FOUR_PARTS, text, re.DOTALL), text


@pytest.mark.parametrize("sections", ["x", "", -1, NAN, None, (4, 4), [8], (1.0,), (True,), ("a",)], ids=repr)
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "GroupedLinear"])
def test_sections_need_a_parallel_mode(name: str, sections: Any) -> None:
    refused(lambda: getattr(nn, name)(**sizes_of(name), sections=sections), ValueError, name, "sections")
    getattr(nn, name)(**sizes_of(name), sections=())


@pytest.mark.parametrize(
    ("name", "options", "argument"),
    [
        ("Linear", {"pad_outputs": True}, "pad_outputs"),
        ("LayerNormLinear", {"pad_outputs": True}, "pad_outputs"),
        ("Linear", {"sequence_parallel": True}, "sequence_parallel"),
        ("LayerNormLinear", {"sequence_parallel": True}, "sequence_parallel"),
        ("GroupedLinear", {"bias": False, "scale_bias": True}, "scale_bias"),
        ("RMSNorm", {"elementwise_affine": False, "zero_centered": True}, "zero_centered"),
        ("LayerNorm", {"elementwise_affine": False, "zero_centered": True}, "zero_centered"),
        ("RMSNorm", {"sequence_parallel": True}, "tp_group"),
        ("MoE", {"sequence_parallel": True}, "tp_group"),
    ],
    ids=str,
)
def test_options_that_need_another(name: str, options: dict[str, Any], argument: str) -> None:
    refused(lambda: getattr(nn, name)(**sizes_of(name), **options), ValueError, name, argument)


@pytest.mark.parametrize("eps", [-1.0, -1e-30, NAN, INF, 1e300])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "LayerNormLinear"])
def test_eps_of_norms(name: str, eps: float) -> None:
    refused(lambda: getattr(nn, name)(**sizes_of(name), eps=eps), ValueError, name, "eps")
    assert getattr(nn, name)(**sizes_of(name), eps=0.0).eps == 0.0


@pytest.mark.parametrize("wrong", [0, -1, 2**31, 2**70])
@pytest.mark.parametrize("name", ["capacity", "max_tokens", "alignment"])
def test_sizes_of_a_dispatch(name: str, wrong: int) -> None:
    refused(lambda: nn.DispatchConfig(**{name: wrong}), ValueError, "DispatchConfig", name)
    assert getattr(nn.DispatchConfig(**{name: 1}), name) == 1


@pytest.mark.parametrize("wrong", [0, 0.0, -1, -0.5, NAN, INF, -INF, 1e9])
def test_timeouts(wrong: float) -> None:
    refused(lambda: nn.DispatchConfig(timeout=wrong), ValueError, "DispatchConfig", "timeout")
    refused(lambda: EpContext(None, **CONTEXT, timeout=wrong), ValueError, "EpContext", "timeout")
    assert nn.DispatchConfig(timeout=0.5).timeout == 0.5


@pytest.mark.parametrize("name", ["scaling_factor", "aux_loss_coeff"])
def test_factors_of_a_router(name: str) -> None:
    for wrong in (-1.0, NAN, INF, 1e39):
        refused(lambda w=wrong: nn.RouterConfig(**{name: w}), ValueError, "RouterConfig", name)


@pytest.mark.parametrize("name", [*CONTEXT, "capacity", "alignment"])
def test_sizes_of_a_context(name: str) -> None:
    for wrong in (-1, 2**31, 2**70):
        refused(lambda w=wrong: EpContext(None, **{**CONTEXT, name: w}), ValueError, "EpContext", name)


def test_sizes_of_a_buffer() -> None:
    sizes = {"top_k": 2, "max_tokens_per_rank": 8, "hidden_dim": 3, "num_local_experts": 4}
    ep_finalize()
    ep_bootstrap(None, **CONTEXT)
    try:
        for name, wrong in (("recv_capacity_per_rank", -1), ("alignment", 2**40), ("alignment", -1)):
            refused(lambda n=name, w=wrong: EpBuffer(**sizes, **{n: w}), ValueError, "EpBuffer", name)
    finally:
        ep_finalize()


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"gradient": "max"}, ValueError),
        ({"gradient_dtype": torch.int8}, ValueError),
        ({"prefetch": -1}, ValueError),
        ({"timeout_ms": 0}, ValueError),
        ({"format": "fp9"}, ValueError),
        ({"format": 3}, TypeError),
        ({"filter": lambda name: True}, TypeError),
    ],
    ids=["gradient", "gradient_dtype", "prefetch", "timeout_ms", "no format", "number", "filter"],
)
def test_options_of_shard_without_a_group(options: dict[str, Any], kind: type[Exception]) -> None:
    """What is wrong on many ranks is wrong on one."""
    refused(lambda: shard_(model(), None, **options), kind, "shard_", next(iter(options)))


@pytest.mark.parametrize("wrong", [-1.0, -1e-30, NAN])
def test_largest_norm(wrong: float) -> None:
    """A negative one would turn gradients round."""
    parameter = weight()
    parameter.grad = torch.ones(32, 32)
    refused(lambda: tp.clip_grad_norm_([parameter], wrong), ValueError, "clip_grad_norm_", "max_norm")
    assert torch.equal(parameter.grad, torch.ones(32, 32))
    assert tp.clip_grad_norm_([parameter], INF) == 32


def test_functions_that_take_other_arguments() -> None:
    """Filters, factories and what is checkpointed: before they are called."""
    filtered = torch.nn.Sequential(torch.nn.Linear(32, 32))
    refused(lambda: tp.convert(filtered, None, lambda module: True), TypeError, "convert", "filter")
    assert type(filtered[0]) is torch.nn.Linear
    all_gather: Any = tp.parallel.quantize_all_gather
    refused(lambda: all_gather(model(), lambda module: True), TypeError, "quantize_all_gather", "filter")
    for make in (lambda: None, lambda weights: None, 3):
        wrong: Any = make
        refused(lambda m=wrong: tp.optim.MasterWeights([weight()], m), TypeError, "MasterWeights", "make")
    for function in (None, 3, "text", torch.ones(2)):
        other: Any = function
        refused(lambda f=other: tp.checkpoint(f, torch.ones(2)), TypeError, "checkpoint", "function")
    tp.convert(filtered, None, lambda module, name, *rest: True)
    assert type(filtered[0]) is nn.Linear


def test_checkpoint_passes_arguments_on() -> None:
    """Those of the function are not those of checkpoint(), whichever their place."""
    x = torch.ones(2, requires_grad=True)
    result = tp.checkpoint(lambda a, b, c, flag: (a * b * c, flag), x, 2, 3.0, "text")
    result[0].sum().backward()
    assert result[1] == "text" and torch.equal(x.grad, torch.tensor([6.0, 6.0]))
    refused(lambda: tp.checkpoint(torch.sin, x, use_reentrant="no"), TypeError, "checkpoint", "use_reentrant")


def test_closure_of_master_weights() -> None:
    """As torch's optimizers: it computes loss and gradients, with gradients enabled, and its result is returned."""
    torch.manual_seed(0)
    x = torch.randn(4, 32)
    parameters = [torch.nn.Parameter(torch.full((32, 32), 0.5)) for _ in range(2)]
    own, expected = (
        tp.optim.MasterWeights([p], lambda weights: torch.optim.SGD(weights, lr=0.1)) for p in parameters
    )

    def closure() -> torch.Tensor:
        loss = (x @ parameters[0]).square().mean()
        loss.backward()
        return loss

    loss = own.step(closure)
    other = (x @ parameters[1]).square().mean()
    other.backward()
    assert expected.step() is None
    assert torch.equal(loss, other) and torch.equal(*parameters)
    assert not torch.equal(parameters[0], torch.full((32, 32), 0.5))
    refused(lambda: own.step(3), TypeError, "MasterWeights", "closure")  # type: ignore[arg-type]
    for state in ({}, None, {"optimizer": {}}):
        wrong: Any = state
        refused(lambda s=wrong: own.load_state_dict(s), ValueError, "MasterWeights", "state")
