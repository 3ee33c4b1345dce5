"""The model on paper of steps with sharded weights."""

from __future__ import annotations

import json

import pytest

from benchmarks.common import RESULTS
from benchmarks.sharded_scale import BYTES, Clock, Machine, Weight, check, measured, step

WEIGHTS = [Weight(100.0, 0.5), Weight(100.0, 0.5)]


def test_without_exchanges() -> None:
    assert step(WEIGHTS, 6.0, 2.0, Machine(1, 1e30, 0.0)).total == pytest.approx(6.0, abs=1e-3)


def test_exchanges_alone() -> None:
    """With products that take no time, three exchanges of each weight run one after the other."""
    machine = Machine(2, 100.0, 0.0)
    total, waiting = step(WEIGHTS, 0.0, 2.0, machine)
    assert total == pytest.approx(waiting)
    assert total == pytest.approx(6 * machine.seconds(200.0))


def test_hidden() -> None:
    """Only the first gather and the last sum are not beside a product."""
    machine = Machine(2, 1000.0, 0.0)
    one = machine.seconds(200.0)
    total, waiting = step(WEIGHTS, 60.0, 2.0, machine)
    assert waiting == pytest.approx(one)
    assert total == pytest.approx(60.0 + one)


def test_products_beside_an_exchange_are_slower() -> None:
    clock = Clock(0.5)
    clock.begin(2.0)
    clock.compute(3.0)
    assert clock.now == pytest.approx(4.0)  # one second of products in the first two


def test_two_ranks_take_as_long_as_measured() -> None:
    document = json.loads((RESULTS / "sharded_layers_cuda.json").read_text())
    for model in ("dense", "experts"):
        rows = check(model, measured([row for row in document["rows"] if row["model"] == model]))
        assert [row["format"] for row in rows] == list(BYTES)
        assert all(0.95 < row["computed_of_measured"] < 1.05 for row in rows), rows
