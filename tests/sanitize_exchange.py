"""The kernels of the one-sided exchange for :mod:`tests.sanitize_gpu`: plans, dispatches and combines of several ranks
of one process, with rows in regions and in the outputs of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tests.ops.test_virtual_outputs import check_rows_of_experts
from tests.ops.test_virtual_plan import SMALL, Case, PlanChannel, draw_problem
from tests.ops.test_virtual_ranks import (
    channel_for,
    check_combine,
    check_dispatch,
    draw_routing,
    plans_of,
)

#: Kinds of routing: see ``draw_routing``.
KINDS = range(7)
LARGER = (Case(3, 8, 300, 16, "any", 16, (0.7, 0.7)), Case(8, 40, 90, 50, "any"))


def _exchange(ranks: int, kind: int, chunk_rows: int) -> None:
    generator = torch.Generator().manual_seed(kind)
    channel = channel_for(ranks, torch.bfloat16)
    routing = draw_routing(ranks, kind, generator)
    plans = plans_of(routing.indices, routing.experts, routing.capacity, routing.spare_rows)
    arguments = (channel, routing, plans, (1000, 17, 264)[kind % 3], torch.bfloat16, generator)
    check_dispatch(*arguments, chunk_rows=chunk_rows)
    for slot in (False, True):
        check_combine(*arguments, slot=slot, chunk_rows=chunk_rows)
    some = [(r + kind) % 3 - 1 for r in range(ranks)]
    for where in (None, [1] * ranks, some):
        check_rows_of_experts(channel, routing, 264, torch.bfloat16, kind, where)


def _plan(case: Case) -> None:
    problem = draw_problem(case)
    channel = PlanChannel(case.ranks, problem)
    for _ in range(2):
        channel.plan(problem)


def exchange_calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the name and the function of every call. They use the current GPU."""
    for kind in KINDS:
        for ranks, chunk_rows in ((2, 0), (3, 4), (3, 16)):
            yield f"exchange {ranks} {kind} {chunk_rows}", partial(_exchange, ranks, kind, chunk_rows)
    for case in (*SMALL, *LARGER):
        yield f"plan {case.name()}", partial(_plan, case)
