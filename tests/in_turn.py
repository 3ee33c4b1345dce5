"""``dtypes_in_turn``: on a CPU each case of a marked test runs in one dtype of three, the next case in the next dtype.

For tests whose CPU path is one code for every dtype (operands are converted, then multiplied by torch), so that the
dtype and the other parameters do not interact. A case that is left out is covered twice: the same shape, formats and
options in another dtype, and its dtype with other shapes, formats and options. ``pytest --all-dtypes`` runs them all,
as do the tests on a GPU, where each dtype has a kernel of its own.
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
    """A test with its parameters, but for dtypes: those given as such, and those in the name of a case."""
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
    """Of the marked tests on a CPU, the dtypes whose turn it is not."""
    groups: dict[tuple[Any, ...], list[pytest.Item]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        on_cpu = callspec is None or callspec.params.get("device", "cpu") == "cpu"
        if on_cpu and item.get_closest_marker("dtypes_in_turn"):
            groups.setdefault(key_of(item), []).append(item)
    for turn, group in enumerate(groups.values()):
        if len(group) >= TURNS:
            yield from (item for i, item in enumerate(group) if i % TURNS != turn % TURNS)
