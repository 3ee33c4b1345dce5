"""all_gather_list_out and reduce_scatter_out: bit for bit those of the reference, which simulates all ranks; buffers,
errors, fullgraph, CUDA graphs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.on_gpu import captured
from tests.parallel.test_tensor_parallel_ops import FLOATS, OTHERS, SHAPES, as_bytes, drawn, group_of, strided
from transformer_plugin import ops
from transformer_plugin.reference import tensor_parallel as all_ranks
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

_ops = torch.ops.transformer_plugin


def lists(ranks: int, seed: int) -> list[list[Tensor]]:
    """Returns for each rank tensors of all shapes and dtypes, other ones on every rank."""
    kinds = [(shape, dtype) for shape in SHAPES for dtype in (*FLOATS, *OTHERS)]
    of_ranks = [drawn(ranks, shape, dtype, seed + i) for i, (shape, dtype) in enumerate(kinds)]
    return [list(each) for each in zip(*of_ranks, strict=True)]


def buffers_of(parts: list[Tensor], ranks: int, device: torch.device) -> list[Tensor]:
    """Returns buffers of ones."""
    sizes = [(ranks * part.shape[0], *part.shape[1:]) for part in parts]
    return [torch.ones(size, device=device).to(part.dtype) for size, part in zip(sizes, parts, strict=True)]


def check_lists(rank: Rank) -> None:
    """Twice into the same buffers, with other values; also of tensors that are not contiguous."""
    out: list[Tensor] = []
    for seed in (0, 100):
        parts = lists(rank.size, seed)
        expected = [
            [buffer.clone() for buffer in buffers_of(each, rank.size, torch.device("cpu"))] for each in parts
        ]
        all_ranks.all_gather_list_out(parts, expected)
        for form in (0, -1):
            mine = [strided(part.to(rank.device))[form] for part in parts[rank.rank]]
            out = out or buffers_of(mine, rank.size, rank.device)
            places = [buffer.data_ptr() for buffer in out]
            ops.all_gather_list_out(mine, out, *group_of(rank))
            assert places == [buffer.data_ptr() for buffer in out]
            for got, want in zip(out, expected[rank.rank], strict=True):
                assert torch.equal(as_bytes(got.cpu()), as_bytes(want)), (want.shape, want.dtype, seed)
                got.view(torch.uint8).fill_(0) if got.numel() else None


def test_lists(pool: RankPool) -> None:
    pool.run(check_lists)


def check_sums(rank: Rank) -> None:
    for shape in SHAPES:
        for dtype in (*FLOATS, torch.float64):
            for out_dtype in {dtype, torch.float64 if dtype == torch.float64 else torch.float32}:
                for accumulate in (False, True):
                    parts = drawn(rank.size, (rank.size * shape[0], *shape[1:]), dtype, seed=1)
                    expected = drawn(rank.size, shape, out_dtype, seed=2)
                    out = expected[rank.rank].to(rank.device).clone()
                    if not accumulate:
                        out.fill_(float("nan"))
                    all_ranks.reduce_scatter_out(parts, expected, accumulate)
                    for part in strided(parts[rank.rank].to(rank.device)):
                        buffer = out.clone()
                        ops.reduce_scatter_out(part, buffer, accumulate, *group_of(rank))
                        assert_same_bits(
                            buffer, expected[rank.rank], f"{shape} {dtype} {out_dtype} {accumulate}"
                        )


def test_sums(pool: RankPool) -> None:
    pool.run(check_sums)


def check_versions(rank: Rank) -> None:
    """A backward that saved what a buffer held before raises."""
    out, factor = torch.ones(rank.size * 2, 3), torch.ones(rank.size * 2, 3, requires_grad=True)
    for write in (
        lambda: ops.all_gather_list_out([torch.zeros(2, 3)], [out], *group_of(rank)),
        lambda: ops.reduce_scatter_out(torch.zeros(rank.size * out.shape[0], 3), out, True, *group_of(rank)),
    ):
        product = (out * factor).sum()
        version = out._version
        write()
        assert out._version == version + 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@pytest.mark.parametrize("ranks", [1, 2])
def test_writes_are_seen_by_autograd(make_pool: Any, ranks: int) -> None:
    make_pool(ranks).run(check_versions)


def test_bfloat16_parts_are_not_rounded_on_their_way_into_float32(pair: RankPool) -> None:
    pair.run(check_small_parts)


def check_small_parts(rank: Rank) -> None:
    """A sum that bfloat16 cannot hold."""
    parts = torch.full((2, 1), (1.0, 2.0**-12)[rank.rank], dtype=torch.bfloat16, device=rank.device)
    out = torch.full((1, 1), 2.0**-14, device=rank.device)
    ops.reduce_scatter_out(parts, out, True, *group_of(rank))
    assert out.item() == 1.0 + 2.0**-12 + 2.0**-14


def check_compiled(rank: Rank) -> None:
    size, name, timeout = group_of(rank)

    def step(x: Tensor, scale: Tensor, total: Tensor) -> Tensor:
        out = [x.new_empty(size * 4, 3), scale.new_empty(size * 2)]
        ops.all_gather_list_out([x * 2.0, scale], out, size, name, timeout)
        ops.reduce_scatter_out(out[0] * out[1].sum(), total, True, size, name, timeout)
        return out[0] + total.sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed in (0, 1):
        x, scale = (drawn(size, s, torch.float32, seed)[rank.rank].to(rank.device) for s in ((4, 3), (2,)))
        totals = [torch.full((4, 3), float(seed), device=rank.device) for _ in range(2)]
        assert_same_bits(compiled(x, scale, totals[0]), step(x, scale, totals[1]))
        assert_same_bits(totals[0], totals[1])


def test_compiled(pair: RankPool) -> None:
    pair.run(check_compiled)


def check_graph(rank: Rank) -> None:
    """Replays read what the tensors hold now; gradients are added to the buffer again and again."""
    group, shapes = group_of(rank), ((64, 40), (3, 7), (5,))
    dtypes = (torch.bfloat16, torch.uint8, torch.float32)

    def drawn_parts(seed: int) -> list[list[Tensor]]:
        return [drawn(rank.size, shape, dtype, seed) for shape, dtype in zip(shapes, dtypes, strict=True)]

    parts = [each[rank.rank].to(rank.device) for each in drawn_parts(0)]
    out = buffers_of(parts, rank.size, rank.device)
    total = torch.zeros(64, 40, device=rank.device)

    def step() -> None:
        ops.all_gather_list_out(parts, out, *group)
        ops.reduce_scatter_out(out[0], total, True, *group)

    graph = captured(step, "thread_local")
    total.zero_()
    expected = torch.zeros(64, 40)
    for seed in (1, 2, 3):
        values = drawn_parts(seed)
        for part, value in zip(parts, values, strict=True):
            part.copy_(value[rank.rank])
        for buffer in out:
            buffer.zero_()
        graph.replay()
        for got, value in zip(out, values, strict=True):
            assert_same_bits(got, torch.cat(value), f"replay {seed}")
        expected = expected + rank.size * values[0][rank.rank].float()
        torch.testing.assert_close(total.cpu(), expected)
    del graph


@pytest.mark.gpus(2)
def test_graph_replays_with_other_values(make_pool: Any) -> None:
    make_pool(2, "nccl").run(check_graph)


def test_opcheck(device: torch.device) -> None:
    x = torch.randn(4, 3, device=device)
    opcheck(_ops.all_gather_list_out.default, ([x, x[0]], [torch.zeros_like(x), torch.zeros_like(x[0])], 1))
    opcheck(_ops.reduce_scatter_out.default, (x, torch.zeros_like(x), True, 1))


ONES, PAIR = torch.arange(8.0).view(4, 2), torch.full((8, 2), -7.0)


def sevens(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A buffer that holds other values than the parts."""
    return torch.full(size, 7.0).to(dtype)


def freed() -> Tensor:
    tensor = torch.ones(4, 2)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        (
            ops.all_gather_list_out,
            ([], [ONES]),
            ValueError,
            "'inputs': expected at least one tensor, got an empty list",
        ),
        (
            *(ops.all_gather_list_out, ([ONES], []), ValueError),
            "'out': expected 1 tensors, one for each of 'inputs', got 0. Pass one buffer for each input",
        ),
        (
            *(ops.all_gather_list_out, ([ONES, ONES], [PAIR, sevens(4, 2)], 2), ValueError),
            "'out[1]': expected the sizes [8, 2], the inputs of 2 ranks, got float32[4, 2] on cpu",
        ),
        (
            ops.all_gather_list_out,
            ([ONES], [sevens(4, 2, dtype=torch.half)]),
            TypeError,
            "'out[0]': expected float32",
        ),
        (
            ops.all_gather_list_out,
            ([ONES], [ONES]),
            ValueError,
            "'out[0]': expected a buffer apart from 'inputs'",
        ),
        (
            ops.all_gather_list_out,
            ([ONES], [torch.zeros(2, 4).t()]),
            ValueError,
            "'out[0]': expected a contiguous",
        ),
        (
            *(ops.all_gather_list_out, ([ONES.clone().requires_grad_()], [sevens(4, 2)]), ValueError),
            "Call all_gather, which has a gradient",
        ),
        (
            *(ops.reduce_scatter_out, (ONES, sevens(4, 2), False, 2), ValueError),
            "'out': expected the sizes [2, 2], this rank's rows of 'input', got float32[4, 2] on cpu",
        ),
        (
            *(ops.reduce_scatter_out, (ONES, sevens(4, 2, dtype=torch.bfloat16)), TypeError),
            "'out': expected the dtype of 'input', or float32, got bfloat16[4, 2] on cpu",
        ),
        (
            ops.reduce_scatter_out,
            (ONES.double(), sevens(4, 2)),
            TypeError,
            "'out': expected the dtype of 'input'",
        ),
        (ops.reduce_scatter_out, (ONES, ONES), ValueError, "'out': expected a buffer apart from 'input'"),
        (
            ops.reduce_scatter_out,
            (ONES[:3], sevens(1, 2), False, 2),
            ValueError,
            "rows that 2 ranks can share evenly",
        ),
    ],
)
def test_errors(op: Any, arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    tensors = [t for a in arguments for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
    before = [t.detach().clone() for t in tensors]
    with pytest.raises(error, match=re.escape(text)):
        op(*arguments)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old) and tensor._version == 0


def check_disagreements(rank: Rank) -> None:
    """Every rank raises, no buffer is written, and the group stays usable."""
    group = group_of(rank)
    one, two = torch.full((2, 3), 5.0), torch.full((4, 3), 6.0)
    cases = [
        ([one] * (rank.rank + 1), "tensors is 1 on rank 0, 2 on rank 1"),
        ([(one, two)[rank.rank]], "bytes is 24 on rank 0, 48 on rank 1"),
        ([(one, one.t())[rank.rank]], "checksum of dtypes and shapes is"),
        ([(one, one.view(torch.int32))[rank.rank]], "checksum of dtypes and shapes is"),
        ([(one, two), (two, one)][rank.rank], "checksum of dtypes and shapes is"),
    ]
    for parts, text in cases:
        out = buffers_of(list(parts), 2, torch.device("cpu"))
        with pytest.raises(ValueError, match=text):
            ops.all_gather_list_out(parts, out, *group)
        assert all((buffer == 1).all() for buffer in out)
    out, parts = torch.ones(1 + rank.rank, 3), torch.full((2 + 2 * rank.rank, 3), 5.0)
    with pytest.raises(ValueError, match="rows is 2 on rank 0, 4 on rank 1"):
        ops.reduce_scatter_out(parts, out, True, *group)
    assert (out == 1).all()
    ops.reduce_scatter_out(two, one, True, *group)
    assert (one == 5 + 2 * 6).all()


@pytest.mark.parametrize("place", ["inputs", "out"])
def test_a_freed_storage_is_refused(place: str) -> None:
    source, out = (freed(), sevens(4, 2)) if place == "inputs" else (sevens(4, 2), freed())
    for name, call in (
        (f"{place}[0]", lambda: ops.all_gather_list_out([source], [out])),
        (place.removesuffix("s"), lambda: ops.reduce_scatter_out(source, out)),
    ):
        with pytest.raises(
            ValueError, match=re.escape(f"'{name}': expected a tensor whose storage holds its")
        ):
            call()


def check_inference(rank: Rank) -> None:
    with torch.inference_mode():
        out = [torch.zeros(rank.size * 2, 3) for _ in range(2)]
    out[0] = out[0].clone()
    parts = [torch.full((2, 3), 1.0 + rank.rank + i) for i in range(2)]
    ops.all_gather_list_out(parts, out, *group_of(rank))
    for i, buffer in enumerate(out):
        assert_same_bits(buffer, torch.cat([torch.full((2, 3), 1.0 + r + i) for r in range(rank.size)]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_inference_buffers(make_pool: Any, ranks: int) -> None:
    make_pool(ranks).run(check_inference)


def test_meta() -> None:
    x, y = (torch.empty(rows, 5, dtype=torch.bfloat16, device="meta") for rows in (6, 24))
    ops.all_gather_list_out([x], [y], 4, "a group that is not here")
    ops.reduce_scatter_out(y, x, True, 4, "a group that is not here")
    with pytest.raises(ValueError, match="expected the sizes"):
        ops.reduce_scatter_out(y, y, True, 4, "a group that is not here")


def test_disagreements(make_pool: Any) -> None:
    make_pool(2).run(check_disagreements)
