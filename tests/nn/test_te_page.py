"""docs/howto/from-transformer-engine.md: its names exist, and its tables say what the code does."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import transformer_plugin as tp
from transformer_plugin.parallel import EpBuffer, ep_bootstrap, ep_combine, ep_dispatch, ep_finalize

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "from-transformer-engine.md"
TEXT = PAGE.read_text() if PAGE.exists() else ""
pytestmark = pytest.mark.skipif(not TEXT, reason="needs the source tree")
PARALLEL = ("tp_group", "parallel_mode", "sequence_parallel")


def row_of(text: str) -> list[str]:
    """The cells of the row of a table whose first cell begins with a text."""
    [row] = [line for line in TEXT.splitlines() if line.startswith("| " + text)]
    return [cell.strip() for cell in row.strip("|").split(" | ")]


def test_names_exist() -> None:
    names = set(re.findall(r"\btp\.(\w+(?:\.\w+)*)", TEXT))
    assert len(names) > 25
    for name in names:
        found: Any = tp
        for part in name.split("."):
            assert hasattr(found, part), f"tp.{name}"
            found = getattr(found, part)


def test_arguments_exist() -> None:
    """``name=`` beside a call of something of the package is an argument of it."""
    calls = re.findall(r"`tp\.([\w.]+)\(([^`]*)\)`", TEXT)
    assert len(calls) >= 10
    for name, given in calls:
        found: Any = tp
        for part in name.split("."):
            found = getattr(found, part)
        arguments = inspect.signature(found).parameters
        for argument in re.findall(r"(\w+)=", given):
            assert argument in arguments, f"tp.{name}({argument}=)"


def test_tensor_parallel_arguments() -> None:
    listed = {
        layer: set(re.findall(r"`(\w+)`", group.partition(" of ")[0]))
        for group in row_of("`tp_group`")[1].split("; ")
        for layer in re.findall(r"`(\w+)`", group.partition(" of ")[2])
    }
    layers = {name: getattr(tp.nn, name) for name in tp.nn.__all__ if inspect.isclass(getattr(tp.nn, name))}
    taken = {
        name: set(PARALLEL) & set(inspect.signature(layer).parameters)
        for name, layer in layers.items()
        if issubclass(layer, torch.nn.Module)
    }
    assert listed == {name: arguments for name, arguments in taken.items() if arguments}


def test_rows_of_expert_parallelism() -> None:
    """Without a capacity the rows in use, or the worst case in a buffer; and as many tokens as were dispatched."""
    experts, most, topk = 4, 10, 2
    ep_bootstrap(None, experts, most, 8, topk)
    try:
        buffer = EpBuffer(topk, most, 8, experts)
        tokens, indices = torch.randn(3, 8), torch.tensor([[0, 1], [1, 2], [3, 0]])
        recv, _, counts = ep_dispatch(buffer, tokens, indices, torch.ones(3, topk))
        assert (
            "ranks * max_tokens_per_rank * min(top_k, local experts)" in row_of("rows that `ep_dispatch`")[2]
        )
        assert recv.shape[0] == 6 and counts.tolist() == [2, 2, 1, 1]
        memory = torch.ones(1 * most * min(topk, experts), 8)
        whole, _, _ = ep_dispatch(buffer, tokens, indices, torch.ones(3, topk), recv_tokens=memory)
        assert torch.equal(whole[:6], recv)
        assert not memory[6:].any(), "rows past the last expert are 0"
        assert row_of("rows that `ep_combine`")[1:] == ["`max_tokens_per_rank`", "as many as were dispatched"]
        assert ep_combine(buffer, whole).shape == (3, 8)
        assert ep_combine(buffer, whole, num_local_tokens=most).shape == (most, 8)
    finally:
        ep_finalize()


def test_shape_of_a_grouped_tensor() -> None:
    assert "3-D `[G, M, K]`; `[T, K]` with `group_sizes`" in row_of("shape of a `GroupedTensor`")[2]
    stack = tp.quantize(torch.randn(3, 32, 64), "fp8_block")
    ragged = tp.quantize(torch.randn(96, 64), "fp8_block", group_sizes=torch.tensor([32, 0, 64]))
    assert type(stack) is type(ragged) is tp.GroupedTensor
    assert stack.shape == (3, 32, 64) and ragged.shape == (96, 64)


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "GroupedLinear"])
def test_initial_values_of_a_bias(name: str) -> None:
    assert row_of("initial values of a bias")[2].startswith("uniform, as of `torch.nn.Linear`")
    torch.manual_seed(0)
    layer = tp.nn.GroupedLinear(2, 64, 256) if name == "GroupedLinear" else getattr(tp.nn, name)(64, 256)
    bias = layer.bias.detach()
    assert bias.abs().max() <= 1 / 8 and bias.abs().mean() > 0.4 / 8  # 1 / sqrt(64); the mean of half of it


def test_rows_past_the_last_group() -> None:
    assert row_of("rows past the last group")[2] == "0"
    layer = tp.nn.GroupedLinear(2, 64, 32, bias=True)
    x = torch.randn(10, 64, requires_grad=True)
    output = layer(x, torch.tensor([3, 4]))
    output.sum().backward()
    assert not output[7:].any() and x.grad is not None and not x.grad[7:].any()
    assert output[:7].all() and x.grad[:7].any(1).all()
