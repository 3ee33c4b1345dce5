"""The mark ``dtypes_in_turn``: on a CPU each case of a test runs in only one of three dtypes, alternating.

It is for tests whose CPU path is the same code for every dtype (operands are converted, then multiplied by torch), so
that the dtype and the other parameters do not interact. A case that is skipped is covered twice: the same shape,
formats and options run in another dtype, and its dtype runs with other shapes, formats and options.

Of tests named ``opcheck``, ``compile`` or ``graph`` a CPU runs one of twelve cases, and more where a value
of a parameter would not occur. They check what is registered (schema, fake kernel, autograd), which ``test_opcheck.py``
does for every op, and that code can be traced. Compiling is most of their time, and parameters do not interact in it.

``pytest --all-dtypes`` runs all cases, as do the tests on a GPU, where each dtype has its own kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

TURNS = 3
#: Names of tests of which a CPU runs one of so many cases.
THINNED, THINNED_TO = re.compile("opcheck|compile|graph"), 12
#: In this file all of them run: it has one call of each kind of every op.
WHOLE = "tests/ops/test_opcheck.py"
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
    yield from thinned(items)


def thinned(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yields the opchecks and the tests of compiled code on a CPU to skip."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        callspec, (name, _, _) = getattr(item, "callspec", None), item.nodeid.partition("[")
        if callspec is None or callspec.params.get("device", "cpu") != "cpu" or name.startswith(WHOLE):
            continue
        if THINNED.search(name.rpartition("::")[2]):
            groups.setdefault(name, []).append(item)
    for test, group in groups.items():
        opcheck, seen = "opcheck" in test, set[tuple[str, str]]()
        for i, item in enumerate(group):
            params = item.callspec.params.items()  # type: ignore[attr-defined]
            # The cases of an opcheck are shapes; those of a test of compiled code are layers.
            values = {(name, repr(value)) for name, value in params if name != "case" or not opcheck}
            if i % THINNED_TO and values <= seen:
                yield item
            else:
                seen |= values
