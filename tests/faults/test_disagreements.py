"""Ranks that make different calls (Gloo): all ranks get an error that names the ranks, in time, and no payload is
mistaken for another.

A draw is one disagreement: its kind, the op and turn in which it happens, and the rank that differs. The ranks run
three turns of plan, dispatch, combine and backward and one more plan, in a separate group for each draw.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from transformer_plugin.errors import PeerTimeoutError, peer_errors
from transformer_plugin.ops import expert_parallel as ep
from transformer_plugin.testing.distributed import Rank, RankPool

TIMEOUT = 2.0
PROMISE = TIMEOUT + 5.0
TURNS = 3
EXPERTS, MAX_TOKENS, TOPK, HIDDEN, CAPACITY = 4, 5, 2, 6, 20

#: For each op: the kinds of disagreement, and the difference that the error names.
KINDS = {
    "plan": {
        "max_tokens": "max_tokens is",
        "capacity": "capacity is",
        "alignment": "alignment is",
        "topk": "topk is",
        "experts": "num_experts is",
        "policy": "raise_on_overflow is",
        "skip": "op is",
        "raise": "",
    },
    "dispatch": {
        "dtype": "dtype is",
        "width": "width is",
        "weights": "topk_weights is",
        "tokens": "whose plan has",
        "gradient": "the gradient of the rows is",
        "weight-gradient": "the gradient of topk_weights is",
        "no-grad": "the gradient of the rows is",
        "other-plan": "the plan is",
        "skip": "op is",
        "raise": "",
    },
    "combine": {
        "dtype": "dtype is",
        "width": "width is",
        "gradient": "the gradient of the rows is",
        "skip": "op is",
        "raise": "",
    },
    "backward": {"skip": "op is", "twice": "op is", "raise": ""},
}


class Draw(NamedTuple):
    """One disagreement."""

    number: int
    op: str
    kind: str
    rank: int
    turn: int


class OwnError(Exception):
    """An error that the program raises between two calls."""


def draws(count: int, seed: int) -> Iterator[Draw]:
    draw = random.Random(seed)
    pairs = [(op, kind) for op, kinds in KINDS.items() for kind in kinds]
    for number in range(count):
        # Every pair occurs before any is repeated, in random order.
        if number % len(pairs) == 0:
            draw.shuffle(pairs)
        op, kind = pairs[number % len(pairs)]
        yield Draw(
            number, op, kind, draw.randrange(2), draw.randrange(1 if kind == "other-plan" else 0, TURNS)
        )


class Program:
    """The calls of one rank. ``self.kind`` is the draw's kind while this rank differs, otherwise ""."""

    def __init__(self, rank: int, draw: Draw, group_name: str) -> None:
        self.rank, self.draw, self.group_name = rank, draw, group_name
        self.plans: list[ep.Plan] = []
        self.where = ""

    def step(self, op: str, turn: int) -> str:
        draw = self.draw
        self.where = f"{op} {turn}"
        kind = draw.kind if (self.rank, op, turn) == (draw.rank, draw.op, draw.turn) else ""
        if kind == "raise":
            raise OwnError
        return kind

    def plan(self, turn: int) -> ep.Plan | None:
        kind = self.step("plan", turn)
        if kind == "skip":
            return None
        generator = torch.Generator().manual_seed(10 * turn + self.rank)
        topk = TOPK + (kind == "topk")
        indices = torch.randint(0, EXPERTS, (MAX_TOKENS - 1, topk), generator=generator)
        return ep.plan(
            indices,
            EXPERTS * (1 + (kind == "experts")),
            MAX_TOKENS + (kind == "max_tokens"),
            CAPACITY - (kind == "capacity"),
            2 if kind == "alignment" else 1,
            2,
            self.group_name,
            kind == "policy",
            int(TIMEOUT * 1000),
        )

    def dispatch(self, turn: int, plan: ep.Plan) -> tuple[torch.Tensor, torch.Tensor]:
        kind = self.step("dispatch", turn)
        tokens = torch.full((MAX_TOKENS - 1, HIDDEN), float(self.rank + 1))
        weights = torch.rand(MAX_TOKENS - 1, TOPK)
        if kind == "dtype":
            tokens = tokens.bfloat16()
        if kind == "width":
            tokens = tokens[:, :-1]
        if kind == "tokens":
            tokens, weights = tokens[:-1], weights[:-1]
        tokens = tokens.clone().requires_grad_(kind != "gradient")
        weights.requires_grad_(kind != "weight-gradient")
        if kind == "skip":
            return torch.zeros(CAPACITY, HIDDEN, requires_grad=True), torch.zeros(CAPACITY)
        if kind == "other-plan":
            plan = self.plans[turn - 1]
        with torch.set_grad_enabled(kind != "no-grad"):
            recv, recv_weights = ep.dispatch(
                tokens,
                None if kind == "weights" else weights,
                plan.slot,
                plan.source,
                self.group_name,
                int(TIMEOUT * 1000),
            )
        senders = torch.where(plan.source < 0, 0.0, plan.source.div(MAX_TOKENS, rounding_mode="floor") + 1.0)
        assert torch.equal(recv.detach(), senders[:, None].expand(-1, HIDDEN))
        return recv, recv_weights

    def combine(self, turn: int, plan: ep.Plan, recv: torch.Tensor) -> torch.Tensor:
        kind = self.step("combine", turn)
        if kind == "dtype":
            recv = recv.half()
        if kind == "width":
            recv = recv[:, :-1]
        if kind == "gradient":
            recv = recv.detach()
        if kind == "skip":
            return torch.zeros(MAX_TOKENS - 1, HIDDEN, requires_grad=True)
        return ep.combine(recv, plan.slot, plan.source, MAX_TOKENS - 1, self.group_name, int(TIMEOUT * 1000))

    def backward(self, turn: int, loss: torch.Tensor) -> None:
        kind = self.step("backward", turn)
        if kind == "skip":
            return
        loss.backward(retain_graph=True)
        if kind == "twice":
            loss.backward()

    def run(self) -> None:
        for turn in range(TURNS):
            plan = self.plan(turn)
            if plan is None:
                plan = (
                    self.plans[-1]
                    if self.plans
                    else ep.Plan(
                        torch.zeros(2 * MAX_TOKENS, TOPK, dtype=torch.int32),
                        torch.zeros(CAPACITY, dtype=torch.int32),
                        *(torch.zeros(2, dtype=torch.int64) for _ in range(3)),
                    )
                )
            self.plans.append(plan)
            recv, recv_weights = self.dispatch(turn, plan)
            output = self.combine(turn, plan, recv)
            self.backward(turn, output.sum() + recv_weights.sum())
        self.where = "end"
        self.draw = self.draw._replace(op="none")
        self.plan(TURNS)


def play(rank: Rank, some: list[Draw]) -> list[tuple[str, str, str, float]]:
    """Returns for each draw: the error's type, its text, the op that raised it, and the seconds it took."""
    store = dist.distributed_c10d._get_default_store()
    outcomes = []
    for draw in some:
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"draw-{draw.number}", store),
            rank=rank.rank,
            world_size=2,
            timeout=timedelta(seconds=60),
        )
        program = Program(rank.rank, draw, rank.group_name)
        begun = time.monotonic()
        outcome: Any = ("none", "")
        try:
            with peer_errors():
                program.run()
        except Exception as error:
            outcome = (type(error).__name__, str(error))
        outcomes.append((*outcome, program.where, time.monotonic() - begun))
    return outcomes


def check(draw: Draw, outcomes: list[tuple[str, str, str, float]]) -> None:
    expected_text = KINDS[draw.op][draw.kind]
    for rank, (error, text, where, seconds) in enumerate(outcomes):
        case = f"{draw}: rank {rank}: {error} in {where} after {seconds:.1f} s: {text}"
        assert seconds < PROMISE + 2, case
        if draw.kind == "raise":
            if rank == draw.rank:
                assert error == "OwnError", case
                continue
            assert error == PeerTimeoutError.__name__, case
            assert f"rank(s) {draw.rank} did not take part. This is rank {rank};" in text, case
            continue
        assert error == "ValueError", case
        assert text.startswith("transformer_plugin::") and expected_text in text, case
        assert "rank 0" in text or draw.kind == "tokens", case
        if draw.kind not in ("skip", "twice"):
            assert where == f"{draw.op} {draw.turn}", case


def play_and_check(pool: RankPool, some: list[Draw], at_once: int = 20) -> None:
    for start in range(0, len(some), at_once):
        part = some[start : start + at_once]
        for draw, *outcomes in zip(part, *pool.run(play, part, timeout=280), strict=True):
            check(draw, outcomes)


def test_a_few_disagreements() -> None:
    with RankPool(2) as pool:
        play_and_check(pool, list(draws(20, seed=7)))
        pool.dismiss()
        assert [pool.wait(rank, 20) for rank in range(2)] == [0, 0]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_disagreements() -> None:
    with RankPool(2) as pool:
        play_and_check(pool, list(draws(200, seed=11)))
        pool.dismiss()
        assert [pool.wait(rank, 20) for rank in range(2)] == [0, 0]
