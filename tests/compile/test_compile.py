"""torch.compile(fullgraph=True) of every module: no graph break, eager's results, no unnecessary recompilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.compile.model import Batch, Everything, assert_same, batch, of_any_rows, step
from tests.nn.common import RECIPES, row_unit
from transformer_plugin import nn
from transformer_plugin.testing.numerics import relative_error


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: torch.nn.Module, backend: str) -> tuple[torch.nn.Module, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, fullgraph=True, backend=counter), counter


def make(name: str, device: torch.device | str = "cpu") -> Everything:
    torch.manual_seed(0)
    return Everything(RECIPES[name][0], device=device)


def seeded_step(model: torch.nn.Module, data: Batch) -> dict[str, Tensor]:
    """A step with the same random numbers each time."""
    torch.manual_seed(7)
    return step(model, data)


@pytest.mark.parametrize(
    ("backend", "name"),
    [("aot_eager", name) for name in RECIPES] + [("inductor", "none"), ("inductor", "fp8_block")],
)
def test_equals_eager(name: str, backend: str, device: torch.device) -> None:
    """aot_eager runs the kernels of eager: the same bits. Inductor fuses the code between the ops."""
    model = make(name, device)
    fast, counter = compiled(model, backend)
    for seed in range(3):
        data = batch(24 if row_unit(name) == 1 else 128, seed, device, row_unit(name))
        expected = seeded_step(model, data)
        assert all(
            value.any() for key, value in expected.items() if "grouped" not in key and "mlp" not in key
        )
        assert_same(seeded_step(fast, data), expected, 0 if backend == "aot_eager" else 1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("backend", "name", "inside"),
    [
        ("aot_eager", "none", True),
        ("aot_eager", "fp8_block", False),
        ("inductor", "none", False),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("aot_eager", "none", False),
                ("aot_eager", "fp8_block", True),
                ("inductor", "none", True),
            )
        ),
    ],
)
def test_autocast(name: str, backend: str, inside: bool, device: torch.device) -> None:
    """Autocast around the compiled model, or inside. One graph per dtype. Inductor does not round between two ops."""
    model = make(name, device)

    def region(dtype: torch.dtype) -> torch.autocast:
        return torch.autocast(device.type, dtype)

    def forward(*arguments: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        with region(dtype):
            output, aux_loss = model(*arguments)
        return output.float(), aux_loss

    def run(call: Callable[..., tuple[Tensor, Tensor]], data: Batch, dtype: torch.dtype) -> dict[str, Tensor]:
        def module(*arguments: Tensor) -> tuple[Tensor, Tensor]:
            return call(*arguments, dtype=dtype)

        module.named_parameters = model.named_parameters  # type: ignore[attr-defined]
        return step(module, data)

    counter = CompileCounterWithBackend(backend)
    if inside:
        fast = torch.compile(forward, fullgraph=True, backend=counter)
    else:
        whole = torch.compile(model, fullgraph=True, backend=counter)

        def fast(*arguments: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            with region(dtype):
                output, aux_loss = whole(*arguments)
            return output.float(), aux_loss

    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        data = batch(24 if row_unit(name) == 1 else 128, 1, device, row_unit(name))
        expected = run(forward, data, dtype)
        assert_same(run(fast, data, dtype), expected, 0 if backend == "aot_eager" else 2e-2)
    assert counter.frame_count == 2


def test_inference_equals_eager(device: torch.device) -> None:
    model = make("fp8_block", device).eval()
    fast, counter = compiled(model, "inductor")
    with torch.no_grad():
        for seed in range(3):
            data = batch(24, seed, device)
            for got, expected in zip(fast(*data), model(*data), strict=True):
                assert relative_error(got, expected) <= 1e-6
    assert counter.frame_count == 1


def test_routing_and_group_sizes_do_not_recompile(device: torch.device) -> None:
    """Other tokens, experts and sizes, all rows in one group, no rows in any: one graph."""
    model = make("fp8_block", device)
    fast, counter = compiled(model, "aot_eager")
    step(fast, batch(24, 0, device))
    with torch._dynamo.config.patch(error_on_recompile=True):
        loads = set()
        for seed in range(1, 5):
            data = batch(24, seed, device)
            assert_same(step(fast, data), step(model, data), 0)
            loads.add(tuple(model.moe(data.x).expert_load.tolist()))
        for sizes in ([24, 0, 0], [0, 0, 0], [0, 0, 24]):
            data = batch(24, 9, device)._replace(group_sizes=torch.tensor(sizes, device=device))
            assert_same(step(fast, data), step(model, data), 0)
    assert counter.frame_count == 1
    assert len(loads) == 4  # the routings were different


@pytest.mark.parametrize("name", ["none", "fp8_tensor", "fp8_block", "nvfp4"])
def test_the_number_of_tokens_recompiles_at_most_once(name: str, device: torch.device) -> None:
    """Also if the number of tokens crosses one block of 128."""
    model = make(name, device)
    fast, counter = compiled(model, "aot_eager")
    for tokens in (24, 40, 17, 130, 24, 300, 128):
        data = batch(tokens, tokens, device, row_unit(name))
        assert_same(seeded_step(fast, data), seeded_step(model, data), of_any_rows(name, device))
    assert counter.frame_count <= 2


def test_dynamic_from_the_start_never_recompiles(device: torch.device) -> None:
    model = make("fp8_block", device)
    fast = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    step(fast, batch(24, 0, device))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (24, 40, 17):
            data = batch(tokens, tokens, device)
            assert_same(step(fast, data), step(model, data), of_any_rows("fp8_block", device))


def test_a_training_loop(device: torch.device) -> None:
    """Ten compiled SGD steps equal ten eager steps, and the loss decreases."""
    models = [make("bf16", device), make("bf16", device)]
    forwards = [models[0], compiled(models[1], "inductor")[0]]
    losses: list[list[float]] = [[], []]
    data = batch(64, 1, device)
    for model, forward, history in zip(models, forwards, losses, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(10):
            output, aux_loss = forward(*data)
            loss = output.square().mean() + aux_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < 0.9 * losses[0][0]


def test_activation_checkpointing(device: torch.device) -> None:
    """A recomputed forward gives the same gradients, eager and compiled."""
    model = make("fp8_block", device)

    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
            return torch.utils.checkpoint.checkpoint(self.inner, *args, use_reentrant=False)

    data = batch(24, 2, device)
    expected = step(model, data)
    assert_same(step(Checkpointed(), data), expected, 0)
    fast, _ = compiled(Checkpointed(), "aot_eager")
    assert_same(step(fast, data), expected, 0)


def test_kinds_of_layers_do_not_count_as_recompilations_of_each_other(device: torch.device) -> None:
    x, sizes, probs = (
        torch.randn(8, 32, device=device),
        torch.tensor([5, 3], device=device),
        torch.rand(8, device=device),
    )
    calls = [
        (nn.Linear(32, 32), (x,)),
        (nn.LayerNormLinear(32, 32), (x,)),
        (nn.GroupedLinear(2, 32, 32), (x, sizes)),
        (nn.GroupedMLP(2, 32, 32), (x, sizes, probs)),
        (nn.MoE(32, 32, 2, 1), (x,)),
        (nn.TopKRouter(32, 2, 1), (x,)),
        (nn.Embedding(8, 32), (sizes,)),
        (nn.RMSNorm(32), (x,)),
        (nn.LayerNorm(32), (x,)),
    ]
    with torch._dynamo.config.patch(recompile_limit=1):
        for layer, arguments in calls:
            layer.to(device).compile(fullgraph=True, backend="aot_eager")
            layer(*arguments)
