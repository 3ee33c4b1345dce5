"""Calls of vocab_parallel_cross_entropy: fullgraph, CUDA graphs, opcheck, errors, ranks that disagree. Values:
test_vocab_parallel_cross_entropy.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.on_gpu import captured
from tests.parallel.test_vocab_parallel_cross_entropy import FLOATS, SIZES, TIMEOUT_MS, drawn
from transformer_plugin import ops
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

_ops = torch.ops.transformer_plugin


def check_compiled(rank: Rank, backend: str) -> None:
    """One graph; the number of rows changes without another one."""

    def step(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = hidden @ weight.t()
        losses = ops.vocab_parallel_cross_entropy(
            logits, target, 2 * 16 - 1, rank.size, rank.group_name, 0.1, -100, TIMEOUT_MS
        )
        return losses.sum() * 0.5

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for rows in (4, 6, 10):
        generator = torch.Generator().manual_seed(rows)
        hidden = torch.randn(rows, 8, generator=generator)
        weight = torch.randn(2, 16, 8, generator=generator)[rank.rank].contiguous()
        target = torch.randint(31, (rows,), generator=generator).to(rank.device)
        results = []
        for function in (step, compiled):
            leaves = [t.to(rank.device).clone().requires_grad_() for t in (hidden, weight)]
            loss = function(*leaves, target)
            loss.backward()
            results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
        for got, wanted in zip(*reversed(results), strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled(pair: RankPool, backend: str) -> None:
    pair.run(check_compiled, backend)


def check_graph(rank: Rank) -> None:
    """Replays read what the tensors hold now, forward and backward."""
    vocabulary, rows = 999, 50
    parts = [torch.zeros(rows, -(-vocabulary // rank.size), device=rank.device, dtype=torch.bfloat16)]
    part, target = parts[0].requires_grad_(), torch.zeros(rows, device=rank.device, dtype=torch.int64)
    out = torch.zeros(rows, device=rank.device)
    options = vocabulary, rank.size, rank.group_name, 0.1, -100, TIMEOUT_MS

    def step() -> None:
        losses = ops.vocab_parallel_cross_entropy(part, target, *options)
        (part.grad,) = torch.autograd.grad(losses.mean(), part)
        out.copy_(losses.detach())

    graph = captured(step, "thread_local")
    grads = part.grad
    assert grads is not None
    for seed in (1, 2, 3):
        generator = torch.Generator().manual_seed(seed)
        full = (torch.randn(rows, part.shape[1] * rank.size, generator=generator) * 3.0).bfloat16()
        with torch.no_grad():
            part.copy_(full.chunk(rank.size, -1)[rank.rank])
        target.copy_(torch.randint(vocabulary, (rows,), generator=generator))
        graph.replay()
        wanted = ops.vocab_parallel_cross_entropy(part, target, *options)
        assert_same_bits(out, wanted.detach())
        assert_same_bits(grads, torch.autograd.grad(wanted.mean(), part)[0])
    del graph


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.gpus(n)) for n in (1, 2)])
def test_graph_replays_with_other_values(make_pool: Any, ranks: int) -> None:
    make_pool(ranks, "nccl").run(check_graph)


def test_opcheck(device: torch.device) -> None:
    for sizes, vocabulary in SIZES:
        full, target = (t.to(device) for t in drawn(sizes, vocabulary, vocabulary, torch.float32))
        full, arguments = full.nan_to_num(0.0, 0.0, 0.0), (target, vocabulary, 1, "", 0.1)
        opcheck(_ops.vocab_parallel_cross_entropy.default, (full.requires_grad_(), *arguments))
        logits = full.detach()
        opcheck(_ops.vocab_parallel_cross_entropy_forward.default, (logits, *arguments))
        _, stats = ops.vocab_parallel_cross_entropy_forward(logits, *arguments)
        grad = torch.ones(sizes, device=device)
        opcheck(
            _ops.vocab_parallel_cross_entropy_backward.default,
            (grad, logits, target, stats, vocabulary, 1, ""),
        )


def test_meta() -> None:
    logits = torch.empty(2, 3, 16, dtype=torch.bfloat16, device="meta")
    target = torch.empty(2, 3, dtype=torch.int32, device="meta")
    losses = ops.vocab_parallel_cross_entropy(logits, target, 60, 4, "a group that is not here")
    assert losses.shape == (2, 3) and losses.dtype == torch.float32


def test_differentiable_once() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    losses = ops.vocab_parallel_cross_entropy(logits, torch.tensor([0, 1]), 3, 1, "")
    (grad,) = torch.autograd.grad(losses.sum(), logits, create_graph=True)
    with pytest.raises(
        RuntimeError, match="vocab_parallel_cross_entropy: gradient: expected to be differentiated"
    ):
        grad.sum().backward()


ROWS = {"logits": torch.zeros(2, 4), "target": torch.zeros(2, dtype=torch.int64), "vocabulary": 4}


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"logits": torch.zeros(2, 4).double()}, TypeError, "'logits': expected one of the dtypes float32"),
        ({"logits": torch.tensor(0.0)}, ValueError, "'logits': expected at least 1 dimension"),
        (
            {"target": torch.zeros(2)},
            TypeError,
            "'target': expected one of the dtypes int64, int32, got float32",
        ),
        (
            {"target": torch.zeros(3, dtype=torch.int64)},
            ValueError,
            "'target': expected an index for each row of 'logits', float32[2, 4] on cpu, got int64[3] on cpu. Flatten",
        ),
        ({"vocabulary": 0}, ValueError, "'vocabulary': expected at least 1, got 0"),
        (
            {"vocabulary": 9, "num_ranks": 2},
            ValueError,
            "'logits': expected at least 5 columns, a vocabulary of 9 over 2 ranks, got float32[2, 4] on cpu. Pad the",
        ),
        ({"num_ranks": 0}, ValueError, "'num_ranks': expected at least 1, got 0"),
        (
            {"num_ranks": 2},
            ValueError,
            "'num_ranks': expected 1, the size of the group, got 2. Pass the size",
        ),
        (
            {"label_smoothing": 1.0},
            ValueError,
            "'label_smoothing': expected at least 0 and below 1, got 1. Pass",
        ),
        (
            {"label_smoothing": -0.1},
            ValueError,
            "'label_smoothing': expected at least 0 and below 1, got -0.1",
        ),
        ({"label_smoothing": float("nan")}, ValueError, "'label_smoothing': expected at least 0 and below 1"),
        (
            {"group_name": "nowhere"},
            ValueError,
            "'group_name': expected the name of a c10d process group of this",
        ),
        (
            {"target": torch.tensor([0, 4])},
            ValueError,
            "'target': expected indices of the vocabulary, 0 to 3, or the ignore_index -100, got 4. Pass the same",
        ),
        ({"target": torch.tensor([0, -1])}, ValueError, "or the ignore_index -100, got -1"),
        ({"timeout_ms": 10**13}, ValueError, "'timeout_ms': expected at most 10^12 milliseconds"),
    ],
)
def test_errors(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments = {**ROWS, "num_ranks": 1, "group_name": "", **changed}
    with pytest.raises(error, match=re.escape(text)) as raised:
        ops.vocab_parallel_cross_entropy(**arguments)
    assert str(raised.value).startswith("transformer_plugin::vocab_parallel_cross_entropy: argument '")


def test_errors_of_the_backward() -> None:
    good: dict[str, Any] = {**ROWS, "num_ranks": 1, "group_name": "", "grad": torch.ones(2)}
    good["stats"] = torch.ones(2, 2)
    for name, value, error, text in (
        (
            "grad",
            torch.ones(2).double(),
            TypeError,
            "'grad': expected one of the dtypes float32, got float64",
        ),
        ("grad", torch.ones(1), ValueError, "'grad': expected the sizes of 'target', int64[2] on cpu"),
        ("stats", torch.ones(2), ValueError, "'stats': expected two numbers for each row of 'logits'"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            ops.vocab_parallel_cross_entropy_backward(**{**good, name: value})


def check_disagreements(rank: Rank) -> None:
    """Every rank raises, no payload moves, and the group stays usable."""
    r, group = rank.rank, (rank.size, rank.group_name)

    def loss(rows: int, width: int, vocabulary: int, dtype: torch.dtype, *options: Any) -> Tensor:
        target = torch.zeros(rows, dtype=torch.int64)
        return ops.vocab_parallel_cross_entropy(
            torch.zeros(rows, width, dtype=dtype), target, vocabulary, *group, *options
        )

    for arguments, text in (
        ((r + 1, 3, 6, torch.float32), "rows is 1 on rank 0, 2 on rank 1"),
        ((2, r + 3, 6, torch.float32), "width is 3 on rank 0, 4 on rank 1"),
        ((2, 3, r + 5, torch.float32), "vocabulary is 5 on rank 0, 6 on rank 1"),
        ((2, 3, 6, FLOATS[r]), "dtype is float32 on rank 0, bfloat16 on rank 1"),
        ((2, 3, 6, torch.float32, 0.1 * r), "checksum of label_smoothing and ignore_index is"),
        ((2, 3, 6, torch.float32, 0.0, 5 + r), "checksum of label_smoothing and ignore_index is"),
    ):
        with pytest.raises(ValueError, match=text):
            loss(*arguments)
    with pytest.raises(ValueError, match="expected indices of the vocabulary"):
        ops.vocab_parallel_cross_entropy(torch.zeros(1, 3), torch.tensor([6]), 6, *group)
    with pytest.raises(
        ValueError, match="op is vocab_parallel_cross_entropy on rank 0, all_gather on rank 1"
    ):
        loss(2, 3, 6, torch.float32) if r == 0 else ops.all_gather(torch.ones(2, 3), *group)
    torch.testing.assert_close(loss(1, 3, 6, torch.float32), torch.tensor([6.0]).log())


def test_disagreements(make_pool: Any) -> None:
    make_pool(2).run(check_disagreements)
