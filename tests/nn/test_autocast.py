"""Under torch.autocast the modules behave as torch.nn.Linear does, and the ops keep their dtypes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from tests.nn.common import by_recipe
from transformer_plugin import ops
from transformer_plugin.nn import GroupedLinear, GroupedMLP, LayerNormLinear, Linear, MoE, RouterConfig
from transformer_plugin.recipes import DelayedScaling, NVFP4BlockScaling, Recipe, recipe_from_name
from transformer_plugin.testing.gemm_cases import quantized_arguments
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

SIZES = (32, 0, 16)
ROWS = 64
narrow_dtypes = pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
by_kind = pytest.mark.parametrize(
    "kind", ["Linear", "LayerNormLinear", "GroupedLinear", "GroupedMLP", "GroupedMLP, called"]
)


def recipe_of(name: str) -> Recipe | None:
    """The recipe of a name, without random rounding."""
    return NVFP4BlockScaling(stochastic_rounding=False) if name == "nvfp4" else recipe_from_name(name)


def module_of(
    kind: str, recipe: Recipe | None, device: torch.device
) -> tuple[torch.nn.Module, Callable[[torch.nn.Module, Tensor], Tensor]]:
    """Returns a module, and a function that calls a module of this kind with an input [ROWS, 64]."""
    sizes = torch.tensor(SIZES, device=device)
    if kind == "Linear":
        return Linear(64, 96, device=device, recipe=recipe), lambda module, x: module(x)
    if kind == "LayerNormLinear":
        return LayerNormLinear(64, 96, device=device, recipe=recipe), lambda module, x: module(x)
    if kind == "GroupedLinear":
        grouped = GroupedLinear(len(SIZES), 64, 96, device=device, recipe=recipe)
        return grouped, lambda module, x: module(x, sizes)
    mlp = GroupedMLP(len(SIZES), 64, 32, bias=True, device=device, recipe=recipe)
    if kind == "GroupedMLP, called":
        mlp.fc2.register_forward_hook(lambda *_: None)
    probs = torch.rand(ROWS, device=device)
    return mlp, lambda module, x: module(x, sizes, probs)


def step(call: Callable[..., Tensor], module: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and the parameters."""
    x = x.detach().requires_grad_()
    output = call(module, x)
    grad = torch.linspace(-1, 1, output.numel(), device=x.device).view(output.shape).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, [x, *module.parameters()], grad)]


def check_casts(call: Callable[..., Tensor], module: torch.nn.Module, x: Tensor, narrow: torch.dtype) -> None:
    """Checks that under autocast the module gives the same as a module with cast parameters for a cast input.

    Two steps, because delayed scaling has state.
    """
    cast = copy.deepcopy(module).to(narrow)
    for _ in range(2):
        expected = step(call, cast, x.to(narrow))
        with torch.autocast(x.device.type, narrow):
            got = step(call, module, x)
        assert got[0].dtype == narrow
        assert_same_bits(got[0], expected[0])
        for g, e in zip(got[1:], expected[1:], strict=True):
            assert g.dtype == torch.float32
            assert_same_bits(g, e.float())


@by_recipe
@by_kind
@narrow_dtypes
def test_operands_are_cast_and_then_rounded(
    kind: str, name: str, narrow: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    module, call = module_of(kind, recipe_of(name), device)
    check_casts(call, module, torch.randn(ROWS, 64, device=device), narrow)


@by_kind
def test_delayed_scaling(kind: str, device: torch.device) -> None:
    torch.manual_seed(0)
    module, call = module_of(kind, DelayedScaling(amax_history_len=2), device)
    check_casts(call, module, torch.randn(ROWS, 64, device=device), torch.bfloat16)
    assert all(buffer.dtype == torch.float32 for buffer in module.buffers())


@narrow_dtypes
def test_dtypes_are_those_of_torch_nn_linear(narrow: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    ours = Linear(64, 96, device=device)
    theirs = torch.nn.Linear(64, 96, device=device)
    theirs.load_state_dict(ours.state_dict())

    def compare(dtype: torch.dtype, enabled: bool = True) -> torch.dtype:
        x = torch.randn(ROWS, 64, device=device, dtype=dtype)
        results = []
        for module in (theirs, ours):
            with torch.autocast(device.type, narrow), torch.autocast(device.type, enabled=enabled):
                results.append(step(lambda module, x: module(x), module, x))
        for expected, got in zip(*results, strict=True):
            assert got.dtype == expected.dtype
            assert relative_error(got, expected) < (1e-5 if expected.dtype == torch.float64 else 2e-2)
        return results[0][0].dtype

    other = torch.float16 if narrow == torch.bfloat16 else torch.bfloat16
    assert [compare(dtype) for dtype in (torch.float32, narrow, other)] == [narrow] * 3
    assert compare(torch.float32, enabled=False) == torch.float32
    ours.double(), theirs.double()
    assert compare(torch.float64) == torch.float64  # autocast does not cast float64
    ours.float()
    x = torch.randn(ROWS, 64, device=device, dtype=torch.float64)
    with torch.autocast(device.type, narrow), pytest.raises((TypeError, ValueError), match="float64"):
        ours(x)  # torch.nn.Linear raises, too


def test_values_past_float16_overflow_as_in_torch_nn_linear(device: torch.device) -> None:
    module = Linear(64, 96, device=device)
    x = torch.full((1, 64), 1e5, device=device)
    with torch.autocast(device.type, torch.float16):
        assert not module(x).isfinite().any()
    with torch.autocast(device.type, torch.bfloat16):
        assert module(x).isfinite().all()


def test_another_device_s_region_changes_nothing() -> None:
    module, x = Linear(64, 96), torch.randn(3, 64)
    expected = module(x)
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
        assert_same_bits(module(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        empty = Linear(64, 96, device="meta")(torch.empty(3, 64, device="meta"))
        assert empty.dtype == torch.nn.Linear(64, 96, device="meta")(empty.new_empty(3, 64)).dtype


def test_a_mixture_routes_in_float32(device: torch.device) -> None:
    torch.manual_seed(0)
    moe = MoE(64, 32, 8, 2, router=RouterConfig(aux_loss_coeff=0.1), bias=True, device=device)
    x = torch.randn(5, 7, 64, device=device)
    expected = moe(x)
    with torch.autocast(device.type, torch.bfloat16):
        got = moe(x)
    assert got.output.dtype == torch.bfloat16 and got.output.shape == x.shape
    assert torch.equal(got.expert_load, expected.expert_load)
    assert_same_bits(got.aux_loss.detach(), expected.aux_loss.detach())
    assert 1e-4 < relative_error(got.output.detach(), expected.output.detach()) < 2e-2
    got.output.float().square().mean().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in moe.parameters())


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_probabilities_of_any_float_dtype(dtype: torch.dtype, bias: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    sizes = torch.tensor(SIZES, device=device)
    mlp = GroupedMLP(len(SIZES), 64, 32, bias=bias, device=device)
    x, probs = torch.randn(ROWS, 64, device=device), torch.rand(ROWS, device=device, dtype=dtype)
    results = []
    for given in (probs.requires_grad_(), probs.detach().float().requires_grad_()):
        output = mlp(x, sizes, given)
        results.append((output.detach(), *torch.autograd.grad(output.sum(), given)))
    assert_same_bits(results[0][0], results[1][0])
    assert results[0][1].dtype == dtype
    assert_same_bits(results[0][1], results[1][1].to(dtype))
    if bias:  # the second layer alone, for which a framework may cast
        row = mlp.fc2(x[:, :32], sizes, probs)
        assert_same_bits(row, mlp.fc2(x[:, :32], sizes, probs.float()))
    with pytest.raises(TypeError, match="probs"):
        mlp(x, sizes, torch.ones(ROWS, device=device, dtype=torch.int32))


class Model(torch.nn.Module):
    """A layer of each kind."""

    def __init__(self, linear: type[torch.nn.Linear], device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = linear(32, 64, device=device)
        self.moe = MoE(64, 32, 4, 2, device=device)
        self.last = linear(64, 8, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.moe(torch.nn.functional.relu(self.first(x))).output)


@narrow_dtypes
def test_a_training_loop_is_that_of_torch_nn_linear(narrow: torch.dtype, device: torch.device) -> None:
    losses = []
    for linear in (torch.nn.Linear, Linear):
        model = Model(linear, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler(device.type, enabled=narrow == torch.float16)
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(device)
        target = x[:, :8].cumsum(1)
        losses.append([])
        for _ in range(20):
            with torch.autocast(device.type, narrow):
                loss = torch.nn.functional.mse_loss(model(x).float(), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses[-1].append(float(loss.detach()))
    assert losses[1][-1] < 0.5 * losses[1][0]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@contextmanager
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("cast_inputs", [True, False], ids=["inputs cast", "inputs as they are"])
def test_fsdp_s_mixed_precision_of_the_experts_alone(cast_inputs: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    mlp, sizes = GroupedMLP(len(SIZES), 64, 32, bias=True), torch.tensor(SIZES)
    plain = copy.deepcopy(mlp).bfloat16()
    # Newer versions of FSDP2 take gradients in the dtype of the reduction, others in that of the parameter.
    if hasattr(FSDPParam, "unsharded_grad_dtype"):
        for parameter in plain.parameters():
            parameter.grad_dtype = torch.float32
    x, probs = torch.randn(ROWS, 64), torch.rand(ROWS)
    given = (x, probs.bfloat16().float()) if cast_inputs else (x.bfloat16(), probs)
    expected = plain(given[0].bfloat16(), sizes, given[1])
    expected.sum().backward()
    with one_rank(tmp_path):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=cast_inputs)
        fully_shard(mlp, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        probabilities = given[1].clone().requires_grad_()
        output = mlp(given[0], sizes, probabilities)
        output.sum().backward()
        assert_same_bits(output.detach(), expected.detach())
        assert probabilities.grad is not None and probabilities.grad.dtype == torch.float32
        for got, parameter in zip(mlp.parameters(), plain.parameters(), strict=True):
            assert_same_bits(got.grad.full_tensor(), parameter.grad.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense_products(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(64, 64, device=device, dtype=dtype) for _ in range(2))
    bias, alpha = torch.randn(64, device=device), torch.full((1,), 3.0, device=device)
    out = torch.empty(64, 64, device=device)

    def results() -> list[Tensor]:
        ops.gemm_out(a, b, out)
        ops.gemm_out(a, b, out, bias, alpha=alpha, beta=torch.ones_like(alpha))
        return [
            ops.gemm(a, b, dtype=torch.float32),
            ops.gemm(a, b, bias, alpha=alpha),
            ops.gemm(
                **quantized_arguments(ops.quantize(a, "mxfp8"), ops.quantize(b, "mxfp8"), "mxfp8", "mxfp8"),
                dtype=torch.float32,
            ),
            out.clone(),
        ]

    expected = results()
    with torch.autocast(device.type, torch.bfloat16):
        got = results()
    for g, e in zip(got, expected, strict=True):
        assert_same_bits(g, e)
