"""defer_wgrad and run_deferred_wgrads against the reference and against the products that they put off."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops, reference
from transformer_plugin.testing.numerics import assert_same_bits

SIZES = [5, 0, 16, 3]
ROWS, N, K, G = 26, 24, 40, len(SIZES)


@pytest.fixture
def queue() -> Iterator[Tensor]:
    made = ops.new_wgrad_queue()
    yield made
    ops.release_wgrad_queue(made)


def operands(
    seed: int, device: torch.device, grouped: bool = True, dtype: Any = torch.float32
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    grad, input = (torch.randn(ROWS, width, generator=generator).to(device, dtype) for width in (N, K))
    return {
        "grad": grad,
        "input": input,
        "group_sizes": torch.tensor(SIZES, device=device) if grouped else None,
    }


def buffers(layout: str, device: torch.device, dtype: Any = torch.float32) -> list[Tensor]:
    """What the gradients are added to, not zero."""
    torch.manual_seed(3)
    if layout == "dense":
        return [torch.randn(N, K, device=device).to(dtype)]
    stack = torch.randn(G, N, K, device=device).to(dtype)
    return [stack] if layout == "stack" else [member.clone() for member in stack]


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("rounded", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["dense", "stack", "list"])
def test_matches_the_reference(
    layout: str, rounded: Any, accumulate: bool, queue: Tensor, device: torch.device
) -> None:
    """Three gradients, the second of which is written over the first."""
    got, wanted, waiting = buffers(layout, device), buffers(layout, device), []
    for seed, of_one in enumerate(({}, {"accumulate": False}, {})):
        given = {**operands(seed, device, layout != "dense"), **of_one, "dtype": rounded}
        if layout == "list":
            given["skipped"] = [1]
        ops.defer_wgrad(queue, **given)
        on_cpu = {
            k: v.double().cpu() if isinstance(v, Tensor) and k != "group_sizes" else v
            for k, v in given.items()
        }
        if on_cpu["group_sizes"] is not None:
            on_cpu["group_sizes"] = on_cpu["group_sizes"].cpu()
        reference.defer_wgrad(waiting, **on_cpu)
    assert ops.count_deferred_wgrads(queue) == 3
    doubles = [buffer.double().cpu() for buffer in wanted]
    ops.run_deferred_wgrads(queue, got, accumulate)
    reference.run_deferred_wgrads(waiting, doubles, accumulate)
    assert ops.count_deferred_wgrads(queue) == 0
    # Against float64: sums in float32; or each product rounded to bfloat16, which moves an element near a tie by 2**-8.
    tolerance = 1e-5 if rounded is None else 2e-2
    for one, other in zip(got, doubles, strict=True):
        torch.testing.assert_close(one.double().cpu(), other, rtol=tolerance, atol=tolerance)
    if layout == "list":
        assert_same_bits(got[1], wanted[1] if accumulate else torch.zeros_like(wanted[1]))


@pytest.mark.parametrize("key", ["fp8_tensor", "fp8_block", "mxfp8", "nvfp4"])
def test_quantized_operands(key: str, queue: Tensor, device: torch.device) -> None:
    sizes = torch.tensor([16, 0, 48], device=device)
    grad, input = (torch.randn(64, width, device=device) for width in (64, 32))
    found: dict[str, Any] = {"group_sizes": sizes}
    for name, x in (("grad", grad), ("input", input)):
        more: dict[str, Any] = {}
        if key == "nvfp4":
            [amax] = torch.ops.transformer_plugin.amax(x, key, sizes, rowwise=False, columnwise=True)
            more = {"amax_t": amax}
        data, scale = ops.quantize(x, key, sizes, rowwise=False, columnwise=True, **more)
        found |= {name: data, f"{name}_scale": [scale, *more.values()], f"{name}_format": key}
    got, wanted = (torch.ones(3, 64, 32, device=device) for _ in range(2))
    ops.defer_wgrad(queue, **found)
    ops.defer_wgrad(queue, **found, dtype=torch.bfloat16)
    ops.run_deferred_wgrads(queue, got)
    ops.grouped_gemm_wgrad_out(out=wanted, **found)
    wanted += ops.grouped_gemm_wgrad(dtype=torch.bfloat16, **found)
    assert_same_bits(got, wanted)


def test_copies(queue: Tensor, device: torch.device) -> None:
    """With copy=True the operands may change; without it, that is an error and nothing is written."""
    out, given = buffers("stack", device), operands(0, device)
    expected = [buffer.clone() for buffer in out]
    ops.grouped_gemm_wgrad_out(out=expected[0], **given)
    ops.defer_wgrad(queue, **given, copy=True)
    for tensor in given.values():
        tensor.zero_()
    ops.run_deferred_wgrads(queue, out)
    assert_same_bits(out[0], expected[0])
    for name in given:
        changed = operands(1, device)
        ops.defer_wgrad(queue, **changed)
        changed[name].add_(1)
        with pytest.raises(
            ValueError, match="argument 'queue': expected operands as they were in the backward"
        ):
            ops.run_deferred_wgrads(queue, out)
        assert_same_bits(out[0], expected[0])
        assert ops.count_deferred_wgrads(queue) == 1
        ops.release_wgrad_queue(queue)
        queue.fill_(int(ops.new_wgrad_queue()))


def test_nothing_waits(queue: Tensor, device: torch.device) -> None:
    out = buffers("list", device)
    kept = [buffer.clone() for buffer in out]
    ops.run_deferred_wgrads(queue, out)
    for buffer, before in zip(out, kept, strict=True):
        assert_same_bits(buffer, before)
    ops.run_deferred_wgrads(queue, out, accumulate=False)
    assert not any(bool(buffer.any()) for buffer in out)


def test_many_threads(queue: Tensor) -> None:
    """Backwards on several threads while another one computes: no gradient is lost or counted twice."""
    grad, input, out = torch.ones(2, 4), torch.ones(2, 3), torch.zeros(4, 3)

    def push() -> None:
        for _ in range(200):
            ops.defer_wgrad(queue, grad, input)

    threads = [threading.Thread(target=push) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        ops.run_deferred_wgrads(queue, out)
    ops.run_deferred_wgrads(queue, out)
    assert bool((out == 4 * 200 * 2).all())


NO_QUEUE = (
    "transformer_plugin::count_deferred_wgrads: argument 'queue': expected the id of a queue that new_wgrad_queue() "
    "made and nobody released, got 7. Make a queue, and keep it while a layer uses it."
)


def test_errors(queue: Tensor) -> None:
    given, out = operands(0, torch.device("cpu")), buffers("stack", torch.device("cpu"))
    wrong = torch.tensor(7)
    x = torch.randn(4, 8, requires_grad=True)
    for call in (
        lambda: ops.defer_wgrad(wrong, **given),
        lambda: ops.run_deferred_wgrads(wrong, out),
        lambda: ops.count_deferred_wgrads(7),
        lambda: ops.release_wgrad_queue(7),
        lambda: ops.linear(x, torch.randn(3, 8), wgrad_queue=wrong),
    ):
        with pytest.raises(
            ValueError, match=r"argument '(wgrad_)?queue': expected the id of a queue that new_wgra"
        ):
            call()
    with pytest.raises(ValueError) as caught:
        ops.count_deferred_wgrads(7)
    assert str(caught.value) == NO_QUEUE
    with pytest.raises(TypeError, match="argument 'wgrad_queue': expected "):
        ops.linear(x, torch.randn(3, 8), wgrad_queue=torch.tensor(7.0))
    ops.defer_wgrad(queue, **given)
    for bad in ([out[0][:-1]], [out[0][0]], [torch.zeros(N, K + 1) for _ in range(G)]):
        with pytest.raises(
            ValueError, match=r"argument 'out': expected one tensor of the sizes \[4, 24, 40\], or 4 of"
        ):
            ops.run_deferred_wgrads(queue, bad)
    assert ops.count_deferred_wgrads(queue) == 1
