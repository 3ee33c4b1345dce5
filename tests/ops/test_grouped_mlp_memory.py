"""grouped_mlp: which ops run, which tensors are saved for the backward, and when they are freed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.op_names import name_of
from tests.ops.test_grouped_memory import peak
from tests.ops.test_grouped_mlp import (
    FORMATS,
    NAMES,
    NONE,
    Formats,
    assert_all_same,
    by_formats,
    leaves_of,
    one_case,
    run,
    steps,
)
from tests.ops.test_linear_ops import saved_bytes
from transformer_plugin import ops
from transformer_plugin.testing.grouped_mlp_cases import MLP_SHAPES, MlpShape, mlp_arguments
from transformer_plugin.testing.numerics import assert_same_bits


class RecordedCalls(TorchDispatchMode):
    """Records the names of this library's ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "transformer_plugin":
            self.names.append(name_of(func, args, kwargs))
        return func(*args, **(kwargs or {}))


def calls_of(formats: Formats, biases: tuple[bool, bool], wanted: tuple[str, ...] = NAMES) -> list[str]:
    arguments = one_case(formats, torch.device("cpu"), biases)
    with RecordedCalls() as calls:
        run(ops.grouped_mlp, arguments, formats, wanted)
    return calls.names


@pytest.mark.parametrize("name", ["block", "mx"])
def test_activations_are_quantized_by_the_op_that_computes_them(name: str) -> None:
    """Each operand of the six products is quantized once. The activations are quantized by the op that computes
    them, without an unquantized copy in memory."""
    formats = FORMATS[name]
    weight = "quantize both" if name == "mx" else "quantize"  # on a CPU square blocks serve both directions
    product, gradient = "grouped_gemm", "grouped_gemm_wgrad"
    assert calls_of(formats, (False, False)) == [
        *("grouped quantize both", weight, product, "activation_quantize both", weight, product),
        *("grouped quantize both", product, "activation_backward_quantize", gradient, product, gradient),
    ]
    assert calls_of(formats, (True, False))[
        -5:
    ] == [  # the gradient of a bias sums values before quantization
        *("activation_backward", "bias_backward_quantize both", gradient, product, gradient),
    ]
    assert calls_of(formats, (False, False), ("fc2_weight",)) == [
        *("grouped quantize", "quantize", product, "activation_quantize both", "quantize", product),
        *("grouped quantize columns", gradient),
    ]
    assert calls_of(formats, (False, False), ("probs",))[-3:] == [
        *("grouped quantize", product, "activation_backward"),
    ]


class CopiedRows(TorchDispatchMode):
    """Counts the copies that torch's ops make of matrices of at least ``rows`` rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.copies = rows, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and func.overloadpacket.__name__ in (
            "clone",
            "copy_",
            "contiguous",
            "cat",
        ):
            self.copies += result.dim() > 1 and result.shape[0] >= self.rows
        return result


@by_formats
def test_alternating_columns_are_not_copied(formats: Formats) -> None:
    """A copy would be one of all rows, of groups or not."""
    shape = MLP_SHAPES[1].fitted(formats)
    shape = replace(shape, features=-(-shape.features // 32) * 32)
    arguments = mlp_arguments(
        shape, torch.bfloat16, (False, False), torch.device("cpu"), torch.Generator().manual_seed(1)
    )
    copies = []
    for activation in ("swiglu", "swiglu:interleave=32"):
        with CopiedRows(shape.rows) as calls:
            run(partial(ops.grouped_mlp, activation=activation), arguments, formats)
        copies.append(calls.copies)
    assert copies[1] == copies[0]


def test_weight_gradients_are_computed_when_they_take_least_memory() -> None:
    """Where groups have many rows, a weight gradient is computed early, because it takes less memory than the
    tensors that are freed after it."""
    shape = MlpShape("", (1400, 600), 2048, 128, 256)
    generator = torch.Generator().manual_seed(1)
    arguments = mlp_arguments(shape, torch.bfloat16, (False, False), torch.device("cpu"), generator)
    with RecordedCalls() as calls:
        run(ops.grouped_mlp, arguments, FORMATS["block"])
    product, gradient = "grouped_gemm", "grouped_gemm_wgrad"
    assert calls.names[-6:] == [
        *("grouped quantize both", gradient, product, "activation_backward_quantize", gradient, product)
    ]


def test_only_tensors_that_gradients_need_are_saved() -> None:
    """No 16-bit activation is saved, no row-wise data where column-wise data is enough, and nothing for a frozen
    weight."""
    shape = MlpShape("", (1400, 600), 2048, 128, 256)
    t, h, f, g = shape.rows, shape.hidden, shape.features, 2
    arguments = mlp_arguments(
        shape, torch.bfloat16, (False, False), torch.device("cpu"), torch.Generator().manual_seed(1)
    )
    weights, linear = 3 * g * f * h, 2 * t * 2 * f

    def saved(function: Any, name: str, wanted: tuple[str, ...] = NAMES) -> int:
        x, fc1, fc2, probs = leaves_of(arguments, wanted).values()
        return saved_bytes(lambda: function(x, fc1, fc2, arguments[3], probs, None, None, *FORMATS[name]))

    for name, width in (("block", 1), ("mx", 1), ("none", 2)):
        assert saved(ops.grouped_mlp, name) == saved(steps, name)
        data_bytes = width * (weights + t * (h + f)) + linear
        # The rest is scales, sizes and probabilities.
        assert data_bytes < saved(ops.grouped_mlp, name) < 1.05 * data_bytes
        data_bytes = width * weights + linear
        assert data_bytes < saved(ops.grouped_mlp, name, ("input",)) < 1.05 * data_bytes
        assert saved(ops.grouped_mlp, name, ()) == 0
        assert saved(ops.grouped_mlp, name, ("fc2_weight",)) < 1.05 * width * t * f + 5 * t


class FreedTensors(RecordedCalls):
    """Records, for each op that runs, which of the tensors saved for the backward still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, StorageWeakRef] = {}
        self.there: list[tuple[str, set[str]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        there = {name for name, storage in self.kept.items() if not storage.expired()}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = name_of(func, args, kwargs)
        self.there.append((name, there))
        which = {"activation_quantize both": 2, "quantize": 0, "grouped_gemm": None, "activation": None}
        if name in which and len(self.kept) < 4:
            index = which[name]
            made = result if index is None else result[index]
            self.kept[f"{name} {self.names.count(name)}"] = StorageWeakRef(made.untyped_storage())
        return result


@pytest.mark.parametrize("retain", [False, True], ids=["once", "retained"])
def test_saved_tensors_are_freed_after_their_last_use(retain: bool) -> None:
    """Tensors are freed while the backward node runs, so that they do not coexist with all weight gradients."""
    arguments = one_case(FORMATS["block"], torch.device("cpu"), (False, False))
    x, fc1, fc2, probs = leaves_of(arguments).values()
    with FreedTensors() as freed:
        output = ops.grouped_mlp(x, fc1, fc2, arguments[3], probs, None, None, *FORMATS["block"])
        leaves = (x, fc1, fc2, probs)
        first = torch.autograd.grad(output, leaves, torch.ones_like(output), retain_graph=retain)
    assert list(freed.kept) == [
        "quantize 1",
        "grouped_gemm 1",
        "activation_quantize both 1",
        "quantize 2",
    ]
    # the last call of each name
    there = {name: saved for name, saved in freed.there if name in freed.names[-5:]}
    first_weight, linear, activation, second_weight = freed.kept
    assert there["activation_backward_quantize"] >= {linear, activation, first_weight}
    assert first_weight in there["grouped_gemm"]
    for name in (linear, activation, second_weight):
        assert (name in there["grouped_gemm"]) == retain
    for name in freed.kept:  # when the gradient of the first weight is computed, none of them is left
        assert (name in there["grouped_gemm_wgrad"]) == retain
    if retain:
        again = torch.autograd.grad(output, leaves, torch.ones_like(output))
        for a, b in zip(again, first, strict=True):
            assert_same_bits(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output, leaves, torch.ones_like(output))


@by_formats
def test_tensors_in_saved_tensor_hooks_are_not_freed(formats: Formats) -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    expected = run(ops.grouped_mlp, one_case(formats, torch.device("cpu")), formats)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        got = run(ops.grouped_mlp, one_case(formats, torch.device("cpu")), formats)
    assert_all_same(got, expected)
    assert len(saved) > 5 and all(tensor.numel() for tensor in saved)


def test_changed_operand_raises_in_the_backward() -> None:
    """As in torch's own products, a saved tensor must not change before the backward."""
    for name, formats in (("none", NONE), ("bf16", FORMATS["bf16"])):
        for changed in ("input", "fc1_weight", "fc2_weight", "probs"):
            leaves = leaves_of(one_case(formats, torch.device("cpu"), (False, False)))
            sizes = one_case(formats, torch.device("cpu"))[3]
            weights = leaves["fc1_weight"], leaves["fc2_weight"]
            output = ops.grouped_mlp(leaves["input"], *weights, sizes, leaves["probs"], None, None, *formats)
            with torch.no_grad():
                leaves[changed].mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                output.sum().backward()
            assert all(leaf.grad is None for leaf in leaves.values()), (name, changed)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["none", "block", "mx"])
def test_peak_memory_is_at_most_that_of_the_steps(name: str) -> None:
    """Compares the forward without and with gradients, and the backward."""
    device, formats = torch.device("cuda"), FORMATS[name]
    shape = MlpShape("", (2**14, 2**14 - 5), 2**15, 512, 512)
    generator = torch.Generator().manual_seed(0)
    arguments = mlp_arguments(shape, torch.bfloat16, (False, False), device, generator)
    x, fc1, fc2, probs = leaves = tuple(leaves_of(arguments).values())
    grad = torch.ones_like(x)

    def forward(function: Callable[..., Tensor]) -> Tensor:
        return function(x, fc1, fc2, arguments[3], probs, None, None, *formats)

    def backward(function: Callable[..., Tensor]) -> int:
        allocated = -1  # autograd's thread may still be freeing tensors of the previous backward
        while allocated != (allocated := torch.cuda.memory_allocated()):
            time.sleep(0.02)
        output = forward(function)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(output, leaves, grad)
        return torch.cuda.max_memory_allocated() - before

    activation = 2 * shape.rows * shape.features
    with torch.no_grad():
        one, three = (peak(lambda f=f: forward(f)) for f in (ops.grouped_mlp, steps))
        assert one <= three
    one, three = (peak(lambda f=f: forward(f)) for f in (ops.grouped_mlp, steps))
    assert one <= three - (0 if name == "none" else activation // 2)
    for function in (ops.grouped_mlp, steps):
        backward(function)  # allocations that happen once
    assert backward(ops.grouped_mlp) <= 1.02 * backward(steps)
