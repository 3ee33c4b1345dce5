"""docs/determinism.md names the test of each claim: the tests exist."""

from __future__ import annotations

import ast
import re

from tests.surface.surface import ROOT

PAGE = ROOT / "docs" / "determinism.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_named_test_exists() -> None:
    named = NAMED.findall(PAGE.read_text())
    assert len(named) > 50
    tests: dict[str, set[str]] = {}
    for path, name in named:
        if path not in tests:
            tree = ast.parse((ROOT / path).read_text())
            tests[path] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in tests[path], f"{path}::{name}"


def test_every_row_names_a_test() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    heads = ("| equal |", "| ops |")
    assert [row for row in rows if not row.startswith(heads) and not NAMED.search(row)] == []
