"""Collectives in two steps: the values and gradients of the collective as a whole, with work between the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.on_gpu import captured
from transformer_plugin import ops
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

NAMES = ("all_gather", "reduce_scatter")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def operand(rank: Rank, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Other numbers on each rank; rows that all ranks can share."""
    generator = torch.Generator().manual_seed(100 * seed + rank.rank)
    return torch.randn(6 * rank.size, 40, generator=generator).to(rank.device, dtype)


def full(name: str, rank: Rank, value: Tensor) -> Tensor:
    result: Tensor = getattr(ops, name)(value, rank.size, rank.group_name)
    return result


def start(name: str, rank: Rank, value: Tensor) -> Tensor:
    token: Tensor = getattr(ops, f"start_{name}")(value, rank.size, rank.group_name)
    return token


def finish(name: str, rank: Rank, token: Tensor, value: Tensor, after: Tensor | None = None) -> Tensor:
    result: Tensor = getattr(ops, f"finish_{name}")(token, value, rank.size, rank.group_name, -1, after)
    return result


def check_values(rank: Rank) -> None:
    for name in NAMES:
        for seed, dtype in enumerate(DTYPES):
            one = operand(rank, seed, dtype).requires_grad_()
            other = one.detach().clone().requires_grad_()
            token = start(name, rank, one)
            got, want = finish(name, rank, token, one), full(name, rank, other)
            assert_same_bits(got.detach(), want.detach(), f"{name} {dtype}")
            weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(rank.rank)).to(want)
            (got * weight).sum().backward()
            (want * weight).sum().backward()
            assert_same_bits(one.grad, other.grad, f"gradient of {name} {dtype}")
        columns = operand(rank, 9).t().contiguous().t()  # other strides
        assert_same_bits(finish(name, rank, start(name, rank, columns), columns), full(name, rank, columns))


def test_values(ranks: RankPool) -> None:
    ranks.run(check_values)


def test_three_ranks(make_pool: Any) -> None:
    make_pool(3).run(check_values)


def check_several(rank: Rank) -> None:
    """In flight together, finished in another order. One is never finished; a token that is not known is no error."""
    values = [operand(rank, seed) for seed in range(5)]
    names = [NAMES[seed % 2] for seed in range(5)]
    tokens = [start(name, rank, value) for name, value in zip(names, values, strict=True)]
    for i in (3, 0, 4, 1):
        assert_same_bits(finish(names[i], rank, tokens[i], values[i]), full(names[i], rank, values[i]))
    del tokens
    first = start(names[2], rank, values[2])
    other = torch.zeros(1, dtype=torch.int64, device=rank.device)
    assert_same_bits(finish(names[0], rank, other, values[0]), full(names[0], rank, values[0]))
    assert_same_bits(finish(names[2], rank, first, values[2]), full(names[2], rank, values[2]))
    again = finish(names[2], rank, first, values[2])  # finished before: the collective as a whole
    assert_same_bits(again, full(names[2], rank, values[2]))


def test_several_at_once(ranks: RankPool) -> None:
    ranks.run(check_several)


def steps(rank: Rank) -> Callable[[Tensor, Tensor], Tensor]:
    def forward(part: Tensor, weight: Tensor) -> Tensor:
        token = start("all_gather", rank, part)
        hidden = weight.sin()
        every = finish("all_gather", rank, token, part, hidden)
        product = every * hidden
        token = start("reduce_scatter", rank, product)
        other = hidden.cos()
        return finish("reduce_scatter", rank, token, product, other) + other[: part.shape[0]]

    return forward


def arguments(rank: Rank, seed: int) -> tuple[Tensor, Tensor]:
    part = operand(rank, seed, torch.float32).requires_grad_()
    return part, torch.randn(part.shape[0] * rank.size, 40, device=rank.device).requires_grad_()


def check_compiled(rank: Rank, backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(rank.rank)
    eager = steps(rank)
    compiled: Any = torch.compile(eager, fullgraph=True, backend=backend)
    for seed in range(2):
        given = arguments(rank, seed)
        results = []
        for call in (eager, compiled):
            for tensor in given:
                tensor.grad = None
            output = call(*given)
            output.square().sum().backward()
            results.append([output.detach(), *(tensor.grad for tensor in given)])
        for got, want in zip(results[1], results[0], strict=True):
            if backend == "inductor":  # whose sine and cosine round in another way
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
            else:
                assert_same_bits(got, want)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled(pair: RankPool, backend: str) -> None:
    pair.run(check_compiled, backend, timeout=300)


def check_graph(rank: Rank) -> None:
    """A captured pair of steps, replayed with other values."""
    torch.manual_seed(rank.rank)
    forward = steps(rank)
    part, weight = (tensor.detach() for tensor in arguments(rank, 0))
    outputs: list[Tensor] = []
    graph = captured(lambda: outputs.append(forward(part, weight)), "thread_local")
    for seed in range(1, 4):
        for tensor, other in zip((part, weight), arguments(rank, seed), strict=True):
            tensor.copy_(other.detach())
        graph.replay()
        assert_same_bits(outputs[-1], forward(part.clone(), weight.clone()))


def test_graph(pair_of_gpus: RankPool) -> None:
    pair_of_gpus.run(check_graph)


def check_late(rank: Rank) -> None:
    """Streams and ranks that are late change no bit, also where the memory of a part is used again."""
    generator = torch.Generator().manual_seed(rank.rank)

    def late() -> None:
        if torch.rand((), generator=generator) < 0.5:
            torch.cuda._sleep(int(torch.randint(2_000_000, (), generator=generator)))

    for seed in range(50):
        name = NAMES[seed % 2]
        value = operand(rank, seed)
        want = full(name, rank, value.clone())
        late()
        token = start(name, rank, value)
        late()
        got = finish(name, rank, token, value)
        value.fill_(float("nan"))
        del value, token
        torch.full((6 * rank.size, 40), float("nan"), device=rank.device, dtype=torch.bfloat16)
        late()
        assert_same_bits(got, want, f"{name} {seed}")


def test_late_streams_and_ranks(pair_of_gpus: RankPool) -> None:
    pair_of_gpus.run(check_late)


def check_failed_capture(rank: Rank) -> None:
    """A capture that an error ends between the steps leaves nothing that later collectives would wait for."""
    value = operand(rank, 0)
    want = full("all_gather", rank, value)
    finish("all_gather", rank, start("all_gather", rank, value), value)
    tokens = []
    failing = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
    with pytest.raises((ZeroDivisionError, RuntimeError)), failing:
        tokens.append(start("all_gather", rank, value))
        raise ZeroDivisionError
    tokens.clear()
    for _ in range(2):
        assert_same_bits(finish("all_gather", rank, start("all_gather", rank, value), value), want)


def test_failed_capture(pair_of_gpus: RankPool) -> None:
    with RankPool(
        pair_of_gpus.size, "nccl"
    ) as pool:  # of its own: torch's allocator may keep the pool of the capture
        pool.run(check_failed_capture)


def check_errors(rank: Rank) -> None:
    value = operand(rank, 0)
    with pytest.raises(ValueError, match="start_reduce_scatter: argument 'input': expected rows that"):
        start("reduce_scatter", rank, value[:-1])
    with pytest.raises(TypeError, match="finish_all_gather: argument 'work': expected"):
        finish("all_gather", rank, value, value)
    with pytest.raises(ValueError, match="start_all_gather: argument 'num_ranks'"):
        ops.start_all_gather(value, rank.size + 1, rank.group_name)
    if rank.device.type == "cpu":  # rows differ between ranks: all raise, and the group stays usable
        with pytest.raises(ValueError, match=r"start_all_gather.*rows"):
            start("all_gather", rank, value[: value.shape[0] - rank.rank])
        for name in NAMES:
            with pytest.raises(
                ValueError, match=f"start_{name}.*the gradient is needed on rank 0, not needed"
            ):
                start(name, rank, value.clone().requires_grad_(rank.rank == 0))
        assert_same_bits(
            finish("all_gather", rank, start("all_gather", rank, value), value),
            full("all_gather", rank, value),
        )


def test_errors(pair: RankPool) -> None:
    pair.run(check_errors)


def check_other_tokens(rank: Rank) -> None:
    """A token of another op or operand is refused, and its collective is finished afterwards."""
    value = operand(rank, 0)
    tokens = {name: start(name, rank, value) for name in NAMES}
    for name, other in zip(NAMES, reversed(NAMES), strict=True):
        with pytest.raises(
            ValueError, match=f"'work': expected what start_{name} returned, got what start_{other} returned"
        ):
            finish(name, rank, tokens[other], value)
        for wrong in (value[: rank.size], value.float()):
            with pytest.raises(
                ValueError, match=f"finish_{name}: argument 'input': expected what start_{name} took"
            ):
                finish(name, rank, tokens[name], wrong)
    for name, token in tokens.items():
        assert_same_bits(finish(name, rank, token, value), full(name, rank, value))


def test_other_tokens(pair: RankPool) -> None:
    pair.run(check_other_tokens)
