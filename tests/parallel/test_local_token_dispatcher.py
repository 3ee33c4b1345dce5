"""The alignment of experts' rows on one rank: the kernels' preferred one, none where experts have few rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from transformer_plugin import nn
from transformer_plugin.parallel.token_dispatcher import FEW_ROWS, DispatchConfig, LocalTokenDispatcher
from transformer_plugin.recipes import recipe_from_name
from transformer_plugin.testing.numerics import assert_same_bits

EXPERTS, TOPK = 4, 2
MANY = FEW_ROWS * EXPERTS


def test_alignment() -> None:
    dispatcher = LocalTokenDispatcher(EXPERTS, DispatchConfig(), 128)
    assert dispatcher.alignment_of(MANY, True) == 128
    assert dispatcher.alignment_of(MANY - 1, True) == 1
    assert dispatcher.alignment_of(MANY, False) == 1
    assert dispatcher.with_alignment(128, 16).alignment_of(8, True) == 16  # what the recipe requires
    assert LocalTokenDispatcher(EXPERTS, DispatchConfig(alignment=32), 128).alignment_of(8, True) == 32
    assert LocalTokenDispatcher(EXPERTS, DispatchConfig(capacity=64), 128).alignment_of(MANY, True) == 1


class Assign(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dispatcher = LocalTokenDispatcher(EXPERTS, DispatchConfig(), 128)

    def forward(self, indices: Tensor, weights: Tensor) -> Tensor:
        return self.dispatcher.assign(indices, weights)[0].source


def routed(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(0, EXPERTS, (tokens, TOPK), generator=generator), torch.rand(tokens, TOPK)


def test_a_tracer_that_does_not_know_the_tokens_takes_one_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: one graph for few and many tokens, and an export whose number of tokens has no other limits."""
    alignment_of = LocalTokenDispatcher.alignment_of
    monkeypatch.setattr(
        LocalTokenDispatcher, "alignment_of", lambda self, rows, _: alignment_of(self, rows, True)
    )
    padded = EXPERTS * 127
    few, many = routed(8), routed(MANY)
    assert [Assign()(*each).shape[0] for each in (few, many)] == [8 * TOPK, MANY * TOPK + padded]
    static = torch.compile(Assign(), fullgraph=True, backend="aot_eager", dynamic=False)
    assert static(*few).shape[0] == 8 * TOPK
    torch._dynamo.reset()
    counter = CompileCounter()
    dynamic = torch.compile(Assign(), fullgraph=True, backend=counter, dynamic=True)
    assert [dynamic(*each).shape[0] - each[0].numel() for each in (few, many)] == [padded, padded]
    assert counter.frame_count == 1
    tokens = torch.export.Dim("tokens", min=2, max=10 * MANY)
    exported = torch.export.export(Assign(), few, dynamic_shapes=({0: tokens}, {0: tokens})).module()
    assert [exported(*each).shape[0] - each[0].numel() for each in (few, many)] == [padded, padded]
    traced = make_fx(Assign(), tracing_mode="symbolic")(*few)
    assert [traced(*each).shape[0] - each[0].numel() for each in (few, many)] == [padded, padded]
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        tokens = shapes.create_unbacked_symint()  # as of nonzero(): it cannot be compared
        torch._check(tokens < 10 * MANY)
        rows = Assign()(torch.empty(tokens, TOPK, dtype=torch.int64), torch.empty(tokens, TOPK)).shape[0]
        assert rows == tokens * TOPK + padded


@pytest.mark.parametrize("tokens", [0, 1, 40, 41])
@pytest.mark.parametrize("recipe", ["none", "fp8_block", "fp8_tensor", "mxfp8", "fp8_row", "fp8_delayed"])
def test_same_results_with_any_alignment(recipe: str, tokens: int, device: torch.device) -> None:
    """Few rows for each expert, one of them without any; without tokens there are no rows at all. The same bits on a
    GPU; on a CPU torch's products sum in another order where a group has another number of rows."""
    made = recipe_from_name(recipe)
    results = []
    for alignment in (None, 128):
        torch.manual_seed(0)
        layer = nn.MoE(
            256,
            128,
            16,
            TOPK,
            device=device,
            dtype=torch.bfloat16,
            recipe=made,
            dispatch=DispatchConfig(alignment=alignment),
        )
        input = torch.randn(tokens, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
        torch.manual_seed(1)
        output = layer(input)
        output.output.backward(torch.ones_like(input))
        grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
        results.append({"output": output.output.detach(), "tokens": input.grad, **grads})
        is_padded = tokens > 0 and alignment is not None
        assert (int(output.received) > tokens * TOPK) == is_padded
    for name, value in results[0].items():
        other = results[1][name]
        if device.type == "cuda":
            assert_same_bits(value, other, name)
        else:
            assert (value - other).float().norm() <= 2**-6 * other.float().norm(), name
