"""The mark ``dtypes_in_turn``: on a CPU each case of a test runs in only one of three dtypes, alternating.

It is for tests whose CPU path is the same code for every dtype (operands are converted, then multiplied by torch), so
that the dtype and the other parameters do not interact. A case that is skipped is covered twice: the same shape,
formats and options run in another dtype, and its dtype runs with other shapes, formats and options. ``pytest
--all-dtypes`` runs all cases, as do the tests on a GPU, where each dtype has its own kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

TURNS = 3
DTYPE = re.compile(r"b?float(64|32|16)")


def key_of(item: pytest.Item) -> tuple[Any, ...]:
    """Identifies a test and its parameters except for dtypes, given as a parameter or in the name of a case."""
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    values = []
    for name, value in sorted(params.items()):
        if isinstance(value, torch.dtype):
            values.append((name, "dtype"))
        elif isinstance(getattr(value, "name", None), str):
            values.append((name, DTYPE.sub("dtype", value.name)))
        else:
            values.append((name, repr(value)))
    return (item.nodeid.split("[")[0], *values)


def left_out(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yields the marked CPU tests to skip."""
    groups: dict[tuple[Any, ...], list[pytest.Item]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        on_cpu = callspec is None or callspec.params.get("device", "cpu") == "cpu"
        if on_cpu and item.get_closest_marker("dtypes_in_turn"):
            groups.setdefault(key_of(item), []).append(item)
    for turn, group in enumerate(groups.values()):
        if len(group) >= TURNS:
            yield from (item for i, item in enumerate(group) if i % TURNS != turn % TURNS)
