"""A grouped product has the same bits in a hundred calls, whatever else runs at the same time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.ops.grouped_products import END, FAMILIES, Product, assert_all_same

CAPACITY = END + 5
TIMES = 100
by_family = pytest.mark.parametrize("family", FAMILIES)
CUDA = torch.device("cuda")


@by_family
def test_repeated_calls_give_the_same_bits(family: str, device: torch.device) -> None:
    for name, product in FAMILIES[family](CAPACITY, device).items():
        times = TIMES if device.type == "cuda" else 3
        first = product()
        assert_all_same([product() for _ in range(times)], first, name)


@by_family
def test_bits_do_not_depend_on_the_tail(family: str, device: torch.device) -> None:
    """The number of rows past the groups does not change the rows before them."""
    expected = {name: product() for name, product in FAMILIES[family](CAPACITY, device).items()}
    more = [0, 1, 11, 16, 130, 513, 2000] if device.type == "cuda" else [0, 16, 130]
    for tail in more:
        for name, product in FAMILIES[family](END + tail, device).items():
            assert_all_same([product()], expected[name], f"{name}, {tail} rows past the groups")


@by_family
def test_bits_do_not_depend_on_launch_options(family: str, device: torch.device) -> None:
    """One cluster computes whole tiles only; with more clusters, all of the last tiles or a few of them are split
    into halves. A CPU ignores both options."""
    limits = (0, 6, 10, 22, 40, 64, 100) if device.type == "cuda" else (0, 6)
    for name, product in FAMILIES[family](CAPACITY, device).items():
        expected = product(max_sms=2)
        for most in limits:
            assert_all_same([product(max_sms=most)], expected, f"{name}, {most} multiprocessors")
        assert_all_same([product(expected_rows=5)], expected, f"{name}, few rows expected")


def on_another_stream(product: Product) -> list[Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = [product() for _ in range(TIMES)]
    torch.cuda.synchronize()
    return results


def in_a_graph(product: Product) -> list[Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        product()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product()
    results = []
    for _ in range(TIMES):
        captured.fill_(float("nan"))
        graph.replay()
        results.append(captured.clone())
    return results


def during_copies(product: Product) -> list[Tensor]:
    """Another stream copies 256 MiB at a time, and always has more copies queued than it can finish meanwhile."""
    stream, large = torch.cuda.Stream(), torch.ones(2**26, device=CUDA)
    stream.wait_stream(torch.cuda.current_stream())
    results: list[Tensor] = []
    for _ in range(TIMES):
        with torch.cuda.stream(stream):
            for _ in range(3):
                large.clone()
        results.append(product())
    torch.cuda.synchronize()
    return results


def on_two_streams(product: Product) -> list[Tensor]:
    """Two streams compute the product at the same time."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results: list[Tensor] = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for i in range(TIMES):
        with torch.cuda.stream(streams[i % 2]):
            results.append(product())
    torch.cuda.synchronize()
    return results


CONDITIONS = (on_another_stream, in_a_graph, during_copies, on_two_streams)


@pytest.mark.gpu
@by_family
@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.__name__)
def test_same_bits_under_other_conditions(condition: Callable[[Product], list[Tensor]], family: str) -> None:
    for name, product in FAMILIES[family](CAPACITY, CUDA).items():
        first = product()
        torch.cuda.synchronize()
        assert_all_same(condition(product), first, name)
