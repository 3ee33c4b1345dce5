"""Values of vocab_parallel_cross_entropy: near torch's cross entropy of the full logits in float64, the same bits on
all ranks, devices and numbers of threads; gradients, padding, ignored rows, NaN, strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from transformer_plugin import ops
from transformer_plugin.reference import tensor_parallel as all_ranks
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

TIMEOUT_MS = 60_000
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: Sizes of the rows, and the vocabulary: no rows, one row, one column, a rank that has only padding, lanes with several
#: units, odd sizes, leading dimensions.
SIZES = [((), 9), ((0,), 7), ((1,), 1), ((5,), 4), ((3, 4), 30), ((9,), 8200), ((300,), 515)]


def drawn(sizes: tuple[int, ...], columns: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns full logits and targets, the same ones on every rank. Some rows are ignored, one has a logit of -inf."""
    generator = torch.Generator().manual_seed(columns)
    logits = (torch.randn(*sizes, columns, generator=generator) * 4.0).to(dtype)
    target = torch.randint(vocabulary, sizes, generator=generator)
    if target.numel() > 2:
        target.view(-1)[1::7] = -100
        place = (target.view(-1)[0] + 1) % vocabulary if vocabulary > 1 else vocabulary
        logits.view(-1, columns)[0, place:][:1] = -torch.inf
    logits[..., vocabulary:] = torch.nan
    return logits, target


def expected(
    logits: Tensor, target: Tensor, vocabulary: int, grad: Tensor, smoothing: float, ignored: int = -100
) -> tuple[Tensor, Tensor]:
    """Returns torch's losses and gradients in float64."""
    leaf = logits[..., :vocabulary].double().requires_grad_()
    rows, flat = leaf.reshape(-1, vocabulary), target.reshape(-1).long()
    losses = cross_entropy(rows, flat, reduction="none", label_smoothing=smoothing, ignore_index=ignored)
    losses = losses.view(target.shape)
    (got,) = torch.autograd.grad(losses, leaf, grad.double())
    full = torch.zeros(logits.shape, dtype=torch.float64)
    full[..., :vocabulary] = got
    return losses.detach(), full


def assert_near(got: Tensor, expected: Tensor, error: Tensor | float, name: str) -> None:
    """Within an absolute error; equal where the expected value is infinite, NaN where it is NaN."""
    difference = torch.where(expected.isinf() & (got.cpu() == expected), 0.0, (got.cpu() - expected).abs())
    bad = ~((difference <= error) | (got.cpu().isnan() & expected.isnan()))
    assert got.shape == expected.shape
    assert not bad.any(), f"{name}: {int(bad.sum())} are further than the bound, at most {difference.max()}"


def loss_error(logits: Tensor, losses: Tensor) -> Tensor:
    """The roundings of a loss in float32: those of numbers as large as the logits, and of the exponentials."""
    finite = logits.double().nan_to_num(0.0, 0.0, 0.0).abs()
    largest = finite.amax(-1) if finite.numel() else finite.new_zeros(losses.shape)
    return 2.0**-22 * (largest + losses.nan_to_num(0.0, 0.0).abs() + 2.0)


def check_values(rank: Rank, dtype: torch.dtype) -> None:
    for sizes, vocabulary in SIZES:
        width = -(-vocabulary // rank.size)
        for extra, smoothing in ((0, 0.0), (0, 0.1), (3, 0.9)):
            columns = (width + extra) * rank.size
            full, target = drawn(sizes, columns, vocabulary, dtype)
            grad = torch.linspace(-1.0, 2.0, max(1, target.numel()))[: target.numel()].view(target.shape)
            losses, grads = expected(full, target, vocabulary, grad, smoothing)
            name = f"{sizes} {vocabulary} over {rank.size}, {extra} more, smoothing {smoothing}"
            part = full.chunk(rank.size, -1)[rank.rank].to(rank.device).requires_grad_()
            options = vocabulary, rank.size, rank.group_name, smoothing, -100, TIMEOUT_MS
            got = ops.vocab_parallel_cross_entropy(part, target.to(rank.device), *options)
            assert got.dtype == torch.float32 and got.is_contiguous()
            assert_near(got.detach().double(), losses, loss_error(full[..., :vocabulary], losses), name)
            with torch.no_grad():
                assert_same_bits(
                    ops.vocab_parallel_cross_entropy(part, target.to(rank.device).int(), *options), got
                )
            got.backward(grad.to(rank.device))
            assert part.grad is not None and part.grad.dtype == dtype
            unit = torch.finfo(dtype).eps
            error = grads.chunk(rank.size, -1)[rank.rank].abs() * unit + 2.0**-21 * grad.abs().unsqueeze(-1)
            error = error + torch.finfo(dtype).smallest_normal
            assert_near(part.grad.double(), grads.chunk(rank.size, -1)[rank.rank], error, f"grad, {name}")
            padding = part.grad[..., max(0, vocabulary - rank.rank * (width + extra)) :]
            assert not padding.any(), "padding has no gradient"


@pytest.mark.parametrize("dtype", FLOATS)
def test_values(pool: RankPool, dtype: torch.dtype) -> None:
    pool.run(check_values, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_of_three_ranks(make_pool: Any, dtype: torch.dtype) -> None:
    make_pool(3).run(check_values, dtype)


def check_same_bits(rank: Rank) -> tuple[Tensor, Tensor]:
    full, target = drawn((40,), 5000 * rank.size, 5000 * rank.size - 7, torch.bfloat16)
    part = full.chunk(rank.size, -1)[rank.rank].to(rank.device)
    options = 5000 * rank.size - 7, rank.size, rank.group_name, 0.1
    losses, stats = ops.vocab_parallel_cross_entropy_forward(part, target.to(rank.device), *options)
    return losses.cpu(), stats.cpu()


def test_ranks_have_the_same_bits(ranks: RankPool, make_pool: Any) -> None:
    """On a GPU those of a CPU."""
    first, *others = ranks.run(check_same_bits) + make_pool(ranks.size).run(check_same_bits)
    for other in others:
        for got, expected in zip(other, first, strict=True):
            assert_same_bits(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_devices_have_the_same_bits(dtype: torch.dtype) -> None:
    for rows, vocabulary in ((1, 1), (7, 8), (65, 1001), (33, 2048), (20, 32_000), (3, 200_000), (5000, 40)):
        for padding, smoothing in ((0, 0.0), (0, 0.1), (24, 0.1), (3, 0.0)):
            full, target = drawn((rows,), vocabulary + padding, vocabulary, dtype)
            grad, results = torch.linspace(-1.0, 2.0, rows), []
            for device in ("cpu", "cuda"):
                logits = full.detach().clone().to(device).requires_grad_()
                losses = ops.vocab_parallel_cross_entropy(
                    logits, target.to(device), vocabulary, 1, "", smoothing
                )
                losses.backward(grad.to(device))
                results.append((losses.detach(), logits.grad))
            for name, got, wanted in zip(("losses", "gradient"), *results[::-1], strict=True):
                assert_same_bits(got, wanted, f"{name} {rows} {vocabulary} {padding} {smoothing}")


def test_threads_do_not_change_bits() -> None:
    full, target = drawn((70,), 3000, 3000, torch.float32)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(ops.vocab_parallel_cross_entropy(full, target, 3000, 1, "", 0.1))
    torch.set_num_threads(before)
    assert_same_bits(*results)


def test_strides(device: torch.device) -> None:
    """Logits, targets and gradients that are not contiguous, or not aligned; the gradient of a mean is one number."""
    full, target = (t.to(device) for t in drawn((6, 5), 40, 40, torch.bfloat16))
    ignored = (target != -100).sum()
    wide = torch.randn(6, 5, 81, device=device, dtype=torch.bfloat16)
    wide[..., 1::2] = full
    moved = full.transpose(0, 1).contiguous().transpose(0, 1)
    apart = torch.stack([target, target], -1)[..., 0]
    results = []
    for logits, places in ((full, target), (wide[..., 1::2], target), (moved, apart)):
        leaf = logits.detach().requires_grad_()
        losses = ops.vocab_parallel_cross_entropy(leaf, places, 40, 1, "")
        (losses.sum() / ignored).backward()
        results.append((losses.detach(), leaf.grad))
    shifted = torch.empty(full.numel() + 1, device=device, dtype=full.dtype)[1:].view_as(full).copy_(full)
    leaf = shifted.requires_grad_()
    losses = ops.vocab_parallel_cross_entropy(leaf, target, 40, 1, "")
    losses.backward(torch.ones_like(losses) / ignored)
    for got in (*results[1:], (losses.detach(), leaf.grad)):
        for each, first in zip(got, results[0], strict=True):
            assert_same_bits(each.contiguous(), first.contiguous())


def test_large_logits(device: torch.device) -> None:
    """Differences to the largest logit are taken before anything is rounded."""
    logits = (torch.tensor([[3e4, 3e4 + 1, 3e4 - 2.5], [-1e30, 1e30, 0.0]], device=device)).requires_grad_()
    target = torch.tensor([0, 1], device=device)
    losses = ops.vocab_parallel_cross_entropy(logits, target, 3, 1, "")
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    wanted, grads = expected(logits.detach().cpu(), target.cpu(), 3, torch.ones(2), 0.0)
    assert_near(losses.detach().double(), wanted, 1e-6, "losses")
    assert_near(grad.double(), grads, 1e-6, "gradient")


@pytest.mark.parametrize("smoothing", [0.0, 0.25])
def test_logits_that_are_not_finite(device: torch.device, smoothing: float) -> None:
    """NaN and infinity in a row, as in torch; other rows are not affected, nor is an ignored one."""
    logits = torch.randn(8, 3000)
    logits[1, 5] = logits[2, 2999] = torch.nan
    logits[3, 17] = torch.inf
    logits[4] = -torch.inf
    logits[5, 100:] = -torch.inf
    logits[6, 1:] = torch.nan
    logits[7] = torch.nan
    target = torch.tensor([0, 1, 2, 17, 4, 5, 6, -100])
    losses, grads = expected(logits, target, 3000, torch.ones(8), smoothing)
    leaf = logits.to(device).requires_grad_()
    got = ops.vocab_parallel_cross_entropy(leaf, target.to(device), 3000, 1, "", smoothing)
    (grad,) = torch.autograd.grad(got.sum(), leaf)
    assert_near(got.detach().double(), losses, 1e-5, "losses")
    assert_near(grad[:7].double(), grads[:7], 1e-6, "gradient")
    assert not grad[7].any() and got[7] == 0.0
    assert_near(
        got.detach(), all_ranks.vocab_parallel_cross_entropy([logits], target, 3000, smoothing)[0], 1e-5, ""
    )


def check_not_finite(rank: Rank) -> None:
    """What one rank has reaches all, and so does -infinity in all columns of one."""
    part = torch.zeros(3, 4, device=rank.device)
    part[0, 1] = torch.nan if rank.rank == 1 else 0.0
    part[1] = -torch.inf if rank.rank == 0 else 0.0
    part.requires_grad_()
    target = torch.tensor([0, 5, 3], device=rank.device)
    losses = ops.vocab_parallel_cross_entropy(part, target, 8, rank.size, rank.group_name)
    losses.sum().backward()
    wanted = torch.tensor([torch.nan, 4.0, 8.0]).log()
    assert_near(losses.detach().cpu(), wanted, 1e-6, "losses")
    assert part.grad is not None and part.grad[0].isnan().all() and part.grad[1:].isfinite().all()


def test_ranks_with_logits_that_are_not_finite(pair: RankPool) -> None:
    pair.run(check_not_finite)


def test_ignore_index_in_the_vocabulary(device: torch.device) -> None:
    logits = torch.randn(4, 9, device=device, requires_grad=True)
    target = torch.tensor([0, 3, 8, 3], device=device)
    losses = ops.vocab_parallel_cross_entropy(logits, target, 9, 1, "", ignore_index=3)
    (grad,) = torch.autograd.grad(losses.mean(), logits)
    wanted, grads = expected(logits.detach().cpu(), target.cpu(), 9, torch.full((4,), 0.25), 0.0, 3)
    assert_near(losses.detach().double(), wanted, 1e-6, "losses")
    assert_near(grad.double(), grads, 1e-7, "gradient")
    assert not grad[[1, 3]].any()


def test_reference(device: torch.device) -> None:
    """Its parts, in float32, and it in float64 against torch."""
    full, target = drawn((12,), 60, 57, torch.float32)
    logits = list(full.chunk(3, -1))
    wanted, _ = expected(full, target, 57, torch.ones(12), 0.3)
    for losses in all_ranks.vocab_parallel_cross_entropy([x.double() for x in logits], target, 57, 0.3):
        assert_near(losses, wanted, 1e-12, "losses")
    made = ops.vocab_parallel_cross_entropy_forward(full.to(device), target.to(device), 57, 1, "", 0.3)
    reference = all_ranks.vocab_parallel_cross_entropy_forward(logits, target, 57, 0.3)[0]
    for got, each in zip(made, reference, strict=True):
        assert_near(got, each, 1e-5, "reference")


def test_wrong_target_on_a_gpu_is_nan() -> None:
    """The backward takes one on a CPU, too."""
    stats = torch.tensor([[0.0, 4.0]] * 3)
    target = torch.tensor([0, 4, -1])
    grad = ops.vocab_parallel_cross_entropy_backward(
        torch.ones(3), torch.zeros(3, 5), target, stats, 4, 1, ""
    )
    assert grad[0].isfinite().all() and grad[1:, :4].isnan().all() and not grad[:, 4].any()


@pytest.mark.gpu
def test_wrong_target_is_not_read_by_the_host() -> None:
    logits = torch.zeros(3, 5, device="cuda", requires_grad=True)
    target = torch.tensor([0, 4, -1], device="cuda")
    losses = ops.vocab_parallel_cross_entropy(logits, target, 4, 1, "")
    losses.sum().backward()
    assert losses[0].isfinite() and losses[1:].isnan().all()
    assert logits.grad is not None and logits.grad[0].isfinite().all()
    assert logits.grad[1:, :4].isnan().all() and not logits.grad[:, 4].any()
