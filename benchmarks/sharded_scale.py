"""How much of a step with sharded weights is waiting for other ranks, for numbers of ranks that were not measured.

A model on paper: products, gathers and sums of a step in the order in which ``parallel.shard_`` runs them, with times
that are measured on two GPUs (``results/sharded_layers_cuda.json``) and scaled. Products take a time in proportion to
tokens. An exchange moves ``(ranks - 1) / ranks`` of a weight at a bandwidth, after a latency for each other rank;
within NVLink the bandwidth is the measured one, over a network it is assumed. While an exchange runs, products are
slower by a measured share. For two ranks the result is compared with the measured step.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import RESULTS, write

#: Bytes of an element that is gathered; gradients travel in bfloat16.
BYTES = {"bf16": 2.0, "fp8_block": 1.0 + 4 / 128**2}
GRADIENT_BYTES = 2.0
RANKS = (2, 4, 8, 16, 32, 64)
TOKENS = {"dense": (1024, 2048, 4096, 8192), "experts": (8192, 16384, 32768, 65536)}
#: Bytes a second between the GPUs of different hosts: 400 Gb/s for each GPU.
NETWORK = 50e9
#: Seconds for the first other rank, and for each further one.
LATENCY, LATENCY_OF_A_RANK = 10e-6, 2e-6


class Weight(NamedTuple):
    """Elements of a weight, and the share of all products that are its own."""

    elements: float
    part: float


@dataclass(frozen=True)
class Machine:
    """What exchanges between ranks cost."""

    ranks: int
    bandwidth: float  #: bytes a second that one GPU sends
    slowdown: float  #: the share of a product's speed that an exchange beside it takes

    def seconds(self, full_bytes: float) -> float:
        """For the gather of a tensor of that size, or the sum."""
        others = self.ranks - 1
        latency = LATENCY + LATENCY_OF_A_RANK * (others - 1)
        return latency + full_bytes * others / self.ranks / self.bandwidth


class Step(NamedTuple):
    """Seconds of a step, and of them those without a product."""

    total: float
    waiting: float


class Clock:
    """Runs products one after the other, and exchanges beside them in the order in which they are begun."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._begun: deque[tuple[int, float]] = deque()
        self._numbers = 0
        self._done = 0
        self.now = 0.0
        self.waiting = 0.0

    def begin(self, seconds: float) -> int:
        """Begins an exchange; returns its number."""
        self._begun.append((self._numbers, seconds))
        self._numbers += 1
        return self._numbers - 1

    def _exchange(self, seconds: float) -> None:
        number, left = self._begun.popleft()
        if left > seconds:
            self._begun.appendleft((number, left - seconds))
        else:
            self._done = number + 1

    def wait(self, number: int) -> None:
        """Waits until an exchange is done."""
        while self._done <= number:
            left = self._begun[0][1]
            self.now += left
            self.waiting += left
            self._exchange(left)

    def compute(self, seconds: float) -> None:
        """A product that takes so long without an exchange beside it."""
        while seconds > 0:
            speed = 1 - self._slowdown if self._begun else 1.0
            slice_ = min(seconds / speed, self._begun[0][1]) if self._begun else seconds
            self.now += slice_
            seconds = max(0.0, seconds - slice_ * speed)
            if seconds < 1e-12:
                seconds = 0.0
            if self._begun:
                self._exchange(slice_)


def step(weights: list[Weight], products: float, gathered_bytes: float, machine: Machine) -> Step:
    """One forward and backward. ``products``: their seconds without exchanges, of which a third is the forward. The
    next weight is gathered while one is used; a sum is begun after the next gather, as in ``csrc/sharded``."""
    clock = Clock(machine.slowdown)

    def gather(weight: Weight) -> int:
        return clock.begin(machine.seconds(weight.elements * gathered_bytes))

    ahead = gather(weights[0])
    for i, weight in enumerate(weights):
        clock.wait(ahead)
        following = (
            weights[i + 1] if i + 1 < len(weights) else weights[-1]
        )  # the backward begins with the last one
        ahead = gather(following)
        clock.compute(products * weight.part / 3)
    sums: list[int] = []
    for i, weight in reversed(list(enumerate(weights))):
        clock.compute(products * weight.part / 3)  # its gradient
        clock.wait(ahead)
        if i > 0:
            ahead = gather(weights[i - 1])
        sums.append(clock.begin(machine.seconds(weight.elements * GRADIENT_BYTES)))
        if len(sums) > 2:  # at most two are in flight
            clock.wait(sums[-3])
        clock.compute(products * weight.part / 3)  # the data gradient
    clock.wait(sums[-1])
    return Step(clock.now, clock.waiting)


def weights_of(row: dict[str, Any]) -> list[Weight]:
    """Of the benchmark's model: a layer has two, of which the first holds two matrices, of gate and up."""
    one = row["hidden"] * row["ffn"] * row.get("experts", 1)
    return [Weight(n * one, n / 3 / row["layers"]) for _ in range(row["layers"]) for n in (2, 1)]


class Measured(NamedTuple):
    """Of a model on two ranks."""

    weights: list[Weight]
    tokens: int
    products: dict[str, float]  #: seconds of a step without exchanges, by format
    bandwidth: dict[str, float]
    slowdown: float
    step: dict[str, float]


def measured(rows: list[dict[str, Any]]) -> Measured:
    """What is taken from the benchmark, of the rows of one model. How much exchanges slow products follows from
    bfloat16 with sharded and with full weights; products in eight bits were only measured beside exchanges."""
    by = {row["competitor"]: row for row in rows}
    weights = weights_of(rows[0])
    elements = sum(weight.elements for weight in weights)
    full, beside = by["whole bf16"]["trace"], by["sharded bf16"]["trace"]
    slowdown = (beside["compute_ms"] - full["compute_ms"]) / beside["exchange_ms"]
    products, bandwidth, steps = {}, {}, {}
    for key in BYTES:
        row = by[f"sharded {key}"]
        trace = row["trace"]
        products[key] = (trace["compute_ms"] - slowdown * trace["exchange_ms"]) / 1e3
        sent = elements * (2 * BYTES[key] + GRADIENT_BYTES) / 2
        bandwidth[key] = sent / (trace["exchange_ms"] / 1e3)
        steps[key] = row["step_us"]["median"] / 1e6
    return Measured(weights, rows[0]["tokens"], products, bandwidth, slowdown, steps)


def rows_of(model: str, known: Measured) -> list[dict[str, Any]]:
    """The computed steps of one model."""
    rows = []
    for key, gathered in BYTES.items():
        for tokens in TOKENS[model]:
            products = known.products[key] * tokens / known.tokens
            for where, bandwidth in (("nvlink", known.bandwidth[key]), ("network", NETWORK)):
                for ranks in RANKS:
                    machine = Machine(ranks, bandwidth, known.slowdown)
                    total, waiting = step(known.weights, products, gathered, machine)
                    rows.append(
                        {
                            "model": model,
                            "format": key,
                            "tokens": tokens,
                            "where": where,
                            "ranks": ranks,
                            "step_ms": round(total * 1e3, 2),
                            "waiting_part": round(waiting / total, 4),
                            "of_products": round(total / products, 4),
                        }
                    )
    return rows


def check(model: str, known: Measured) -> list[dict[str, Any]]:
    """The computed step of two ranks beside the measured one."""
    result = []
    for key, gathered in BYTES.items():
        machine = Machine(2, known.bandwidth[key], known.slowdown)
        computed = step(known.weights, known.products[key], gathered, machine).total
        result.append(
            {
                "model": model,
                "format": key,
                "computed_ms": round(computed * 1e3, 1),
                "measured_ms": round(known.step[key] * 1e3, 1),
                "computed_of_measured": round(computed / known.step[key], 3),
                "bandwidth_gb_s": round(known.bandwidth[key] / 1e9, 1),
                "slowdown": round(known.slowdown, 3),
            }
        )
    return result


def main(source: Path = RESULTS / "sharded_layers_cuda.json") -> None:
    """Computes all cases and writes them."""
    document = json.loads(source.read_text())
    rows, checks = [], []
    for model in TOKENS:
        known = measured([row for row in document["rows"] if row["model"] == model])
        rows += rows_of(model, known)
        checks += check(model, known)
    for line in checks:
        print(line)
    write("sharded_scale", torch.device("cpu"), rows, measured_on=document["environment"], checks=checks)


if __name__ == "__main__":
    main()
