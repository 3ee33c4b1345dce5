"""MoE and TopKRouter on one rank, compared with a loop over tokens and experts in FP64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.error_text import text_of
from tests.nn.common import RECIPES, by_recipe, check_module_state, row_unit
from transformer_plugin.nn import DispatchConfig, MoE, RouterConfig, TopKRouter
from transformer_plugin.recipes import NVFP4BlockScaling
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

HIDDEN, FFN, EXPERTS = 64, 64, 8


def tokens_of(shape: tuple[int, ...], device: torch.device | str = "cpu", seed: int = 3) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(device)


def route_fp64(
    tokens: Tensor, weight: Tensor, topk: int, config: RouterConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Choices, weights and auxiliary loss, computed step by step."""
    logits = tokens @ weight.T
    scores = logits.softmax(-1) if config.score_function == "softmax" else logits.sigmoid()
    indices = logits.topk(topk, dim=-1).indices
    if config.score_function == "sigmoid":
        weights = scores.gather(1, indices)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) if topk > 1 else weights
    elif config.pre_softmax:
        weights = scores.gather(1, indices)
    else:
        weights = logits.gather(1, indices).softmax(-1)
    if config.score_function == "sigmoid":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    count = torch.zeros(weight.shape[0], dtype=tokens.dtype, device=tokens.device)
    count.scatter_add_(0, indices.flatten(), torch.ones_like(indices.flatten(), dtype=tokens.dtype))
    rows = max(tokens.shape[0], 1)
    aux_loss = config.aux_loss_coeff * weight.shape[0] * (count / (rows * topk) * scores.sum(0) / rows).sum()
    return indices, weights * config.scaling_factor, aux_loss


def moe_fp64(
    input: Tensor, parameters: dict[str, Tensor], topk: int, config: RouterConfig
) -> tuple[Tensor, Tensor]:
    tokens = input.reshape(-1, input.shape[-1])
    indices, weights, aux_loss = route_fp64(tokens, parameters["router.weight"], topk, config)
    output = torch.zeros_like(tokens)
    for e in range(EXPERTS):
        token, k = (indices == e).nonzero(as_tuple=True)
        hidden = tokens[token] @ parameters["experts.fc1.weight"][e].T
        if "experts.fc1.bias" in parameters:
            hidden = hidden + parameters["experts.fc1.bias"][e]
        gate, linear = hidden.chunk(2, dim=-1)
        result = (torch.nn.functional.silu(gate) * linear) @ parameters["experts.fc2.weight"][e].T
        if "experts.fc2.bias" in parameters:
            result = result + parameters["experts.fc2.bias"][e]
        output = output.index_add(0, token, result * weights[token, k, None])
    return output.view(input.shape), aux_loss


def compare_with_fp64(
    module: MoE, input: Tensor, topk: int, config: RouterConfig, limit: float, low: float = 0.0
) -> None:
    input = input.requires_grad_()
    leaves = {"input": input} | dict(module.named_parameters())
    result = module(input)
    grad = tokens_of(tuple(input.shape[:-1]), input.device, 5)
    loss = (result.output * grad).sum() + result.aux_loss
    got = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    doubles = {key: leaf.detach().double().requires_grad_() for key, leaf in leaves.items()}
    output, aux_loss = moe_fp64(doubles["input"], doubles, topk, config)
    loss = (output * grad.double()).sum() + aux_loss
    expected = dict(zip(doubles, torch.autograd.grad(loss, list(doubles.values())), strict=True))
    assert result.output.shape == input.shape and result.output.dtype == input.dtype
    assert result.aux_loss.dtype == torch.float32 and result.aux_loss.dim() == 0
    assert float(result.aux_loss.detach()) == pytest.approx(float(aux_loss.detach()), rel=1e-5, abs=1e-7)
    assert bool(result.aux_loss != 0) == (config.aux_loss_coeff != 0 and input.numel() > 0)
    for key, g, e in [
        ("output", result.output.detach(), output.detach()),
        *((key, got[key], expected[key]) for key in got),
    ]:
        assert relative_error(g, e) <= limit, f"{key}: {relative_error(g, e):.3g}"
    if input.numel() > 4000:
        assert relative_error(result.output.detach(), output.detach()) >= low, "too exact for the recipe"


CONFIGS = {
    "softmax": RouterConfig(),
    "pre-softmax": RouterConfig(pre_softmax=True),
    "sigmoid": RouterConfig(score_function="sigmoid", scaling_factor=2.5),
    "aux loss": RouterConfig(aux_loss_coeff=0.5),
    "sigmoid aux loss": RouterConfig(score_function="sigmoid", aux_loss_coeff=0.5),
}


@pytest.mark.parametrize("config", list(CONFIGS))
@pytest.mark.parametrize("topk", [1, 2, 8])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_moe_in_float32(config: str, topk: int, bias: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    module = MoE(HIDDEN, FFN, EXPERTS, topk, router=CONFIGS[config], bias=bias, device=device)
    compare_with_fp64(module, tokens_of((5, 13), device), topk, CONFIGS[config], 1e-5, 0.0)


@by_recipe
@pytest.mark.parametrize("alignment", [1, 16, 128])
def test_moe_with_a_recipe(name: str, alignment: int, device: torch.device) -> None:
    recipe, bound = RECIPES[name]
    torch.manual_seed(0)
    config = CONFIGS["aux loss"]
    dispatch = DispatchConfig(alignment=max(alignment, row_unit(name)))
    module = MoE(
        HIDDEN, FFN, EXPERTS, 2, router=config, dispatch=dispatch, bias=True, device=device, recipe=recipe
    )
    # Two products, as in the tests of GroupedMLP; 1e-5 for the router's FP32 sums.
    limit = 4 * max(bound.forward, bound.backward, 2.5e-6)
    compare_with_fp64(module, tokens_of((120,), device), 2, config, limit, bound.low)


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 0), (3, 2)], ids=str)
@by_recipe
def test_few_tokens(name: str, shape: tuple[int, ...], device: torch.device) -> None:
    torch.manual_seed(0)
    recipe, bound = RECIPES[name]
    config = CONFIGS["aux loss"]
    module = MoE(HIDDEN, FFN, EXPERTS, 2, router=config, bias=True, device=device, recipe=recipe)
    limit = 6 * max(bound.forward, bound.backward, 2.5e-6)
    compare_with_fp64(module, tokens_of(shape, device), 2, config, limit, 0.0)


def test_alignment_changes_no_bit(device: torch.device) -> None:
    results = []
    for alignment in (1, 8, 64):
        torch.manual_seed(0)
        module = MoE(
            HIDDEN, FFN, EXPERTS, 2, dispatch=DispatchConfig(alignment=alignment), bias=True, device=device
        )
        input = tokens_of((70,), device).requires_grad_()
        output = module(input).output
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), input)])
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            assert_same_bits(got, expected)


def test_loads_and_received_rows(device: torch.device) -> None:
    torch.manual_seed(0)
    module = MoE(HIDDEN, FFN, EXPERTS, 2, dispatch=DispatchConfig(alignment=16), device=device)
    result = module(tokens_of((3, 20), device))
    indices = module.router(tokens_of((60,), device)).indices
    expected = torch.bincount(indices.flatten().long(), minlength=EXPERTS)
    assert_same_bits(result.expert_load, expected)
    assert int(result.expert_load.sum()) == 120
    assert int(result.received) == int(((expected + 15) // 16 * 16).sum())


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A CPU's BLAS divides rows among threads, and the number of rows per thread may change a product's last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_capacity_drops_the_last_experts(device: torch.device, one_thread: None) -> None:
    """Rows past the capacity have no output and no gradient; the others keep their bits."""
    torch.manual_seed(0)
    full = MoE(HIDDEN, FFN, EXPERTS, 1, dispatch=DispatchConfig(alignment=1), device=device)
    small = MoE(HIDDEN, FFN, EXPERTS, 1, dispatch=DispatchConfig(capacity=40), device=device)
    small.load_state_dict(full.state_dict())
    input = tokens_of((60,), device)
    chosen = full.router(input).indices[:, 0].long()
    order = torch.argsort(chosen, stable=True)
    kept = torch.zeros(60, dtype=torch.bool, device=device)
    kept[order[:40]] = True
    expected, got = full(input), small(input)
    assert_same_bits(got.output[kept], expected.output[kept])
    assert expected.output.any(1).all() and not got.output[~kept].any()
    assert int(got.received) == 60 == int(expected.received)
    leaf = input.clone().requires_grad_()
    (grad,) = torch.autograd.grad(small(leaf).output.sum(), leaf)
    assert not grad[~kept].any() and grad[kept].any(1).all()


def test_router_weights_receive_gradients_where_outputs_differ(device: torch.device) -> None:
    """The router's gradient equals finite differences in FP64: no path is missing."""
    torch.manual_seed(0)
    module = MoE(HIDDEN, FFN, EXPERTS, 2, device=device)
    input = tokens_of((40,), device)
    (grad,) = torch.autograd.grad(module(input).output.square().sum(), module.router.weight)
    direction = torch.randn(module.router.weight.shape, generator=torch.Generator().manual_seed(1)).to(device)
    parameters = {key: value.detach().double() for key, value in module.named_parameters()}
    losses = []
    for sign in (1, -1):
        shifted = parameters | {
            "router.weight": parameters["router.weight"] + sign * 1e-6 * direction.double()
        }
        losses.append(moe_fp64(input.double(), shifted, 2, RouterConfig())[0].square().sum())
    slope = float(losses[0] - losses[1]) / 2e-6
    assert float((grad.double() * direction.double()).sum()) == pytest.approx(slope, rel=1e-3)


def test_expert_bias_moves_choices_not_weights(device: torch.device) -> None:
    torch.manual_seed(0)
    config = RouterConfig(score_function="sigmoid", expert_bias=True)
    router = TopKRouter(HIDDEN, EXPERTS, 2, config, device=device)
    assert list(router.state_dict()) == ["weight", "expert_bias"]
    tokens = tokens_of((50,), device)
    plain = router(tokens)
    router.expert_bias[3] = 10.0
    pushed = router(tokens)
    assert (pushed.indices == 3).any(1).all() and not (plain.indices == 3).any(1).all()
    scores = (tokens @ router.weight.detach().T).sigmoid().gather(1, pushed.indices.long())
    torch.testing.assert_close(pushed.weights, scores / scores.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6)


def test_bfloat16_parameters(device: torch.device) -> None:
    torch.manual_seed(0)
    module = MoE(HIDDEN, FFN, EXPERTS, 2, dtype=torch.bfloat16, device=device)
    input = tokens_of((120,), device).bfloat16()
    result = module(input)
    assert result.output.dtype == torch.bfloat16
    expected, _ = moe_fp64(
        input.double(), {k: v.detach().double() for k, v in module.named_parameters()}, 2, RouterConfig()
    )
    assert relative_error(result.output.detach(), expected) <= 1.5e-2
    result.output.float().square().sum().backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.any() for p in module.parameters())


@by_recipe
def test_state(name: str) -> None:
    input = tokens_of((12,))
    check_module_state(
        lambda **factory: MoE(HIDDEN, FFN, EXPERTS, 2, bias=True, recipe=RECIPES[name][0], **factory),
        lambda module: module(input).output.detach(),
    )


def test_errors_have_four_parts() -> None:
    with pytest.raises(ValueError) as caught:
        MoE(8, 16, num_experts=4, topk=5)
    assert str(caught.value) == (
        "transformer_plugin::TopKRouter: argument 'topk': expected 1 to the number of experts, 4, got 5. "
        "Choose fewer experts per token."
    )
    with pytest.raises(ValueError) as caught:
        MoE(8, 16, 4, 2)(torch.zeros(3, 7))
    assert text_of(caught.value) == (
        "transformer_plugin::MoE: argument 'input': expected a last dimension of 8 (hidden), got [3, 7]. "
        "Project the tokens to the hidden size first."
    )
    with pytest.raises(ValueError) as caught:
        MoE(8, 16, 4, 2, dispatch=DispatchConfig(alignment=0))
    assert str(caught.value) == (
        "transformer_plugin::DispatchConfig: argument 'alignment': expected from 1 to 2^31 - 1, got 0. "
        "Use 1 for no padding."
    )
    for name, given, use in (("alignment", 8, 16), ("capacity", 40, 48)):
        with pytest.raises(ValueError) as caught:
            MoE(32, 32, 4, 2, dispatch=DispatchConfig(**{name: given}), recipe=NVFP4BlockScaling())
        assert str(caught.value) == (
            f"transformer_plugin::MoE: argument 'dispatch': expected a DispatchConfig whose {name} is None or a "
            f"multiple of 16, as the recipe requires for each expert's rows, got {given}. "
            f"Use for example {use}."
        )


@pytest.mark.parametrize("capacity", [None, 64])
def test_groups_are_what_nvfp4_wants(capacity: int | None, device: torch.device) -> None:
    """The default padding is a multiple of nvfp4's block, also if rows are dropped, and so is the buffer."""
    torch.manual_seed(0)
    dispatch = DispatchConfig(capacity=capacity)
    module = MoE(HIDDEN, FFN, EXPERTS, 2, dispatch=dispatch, device=device, recipe=NVFP4BlockScaling())
    for tokens in (0, 1, 7, 60):
        input = tokens_of((tokens,), device).requires_grad_()
        routing = module.router(input)
        received = module.dispatcher.dispatch(input, routing.indices, routing.weights)
        assert not (received.group_sizes % 16).any() and received.rows.shape[0] % 16 == 0
        assert capacity is None or received.rows.shape[0] == capacity
        (grad,) = torch.autograd.grad(module(input).output.square().sum(), input)
        assert grad.isfinite().all()
