"""The manual's pages on values and functions: blocks run, tables are complete."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

import transformer_plugin as tp
from transformer_plugin.tensor._table import HANDLERS

DOCS = Path(__file__).resolve().parents[2] / "docs"
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="needs the source tree")


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def test_blocks_run() -> None:
    text = page("value-types")
    namespace: dict[str, Any] = {"__name__": "manual"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 9
    printed = io.StringIO()
    for block in blocks:
        line = text[: block.start(1)].count("\n")  # so that tracebacks have the line number of the page
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + block.group(1), str(DOCS / "value-types.md"), "exec"), namespace)
    errors = printed.getvalue().splitlines()
    assert len(errors) == 4 and all(error.startswith("transformer_plugin::") for error in errors)


def test_table_of_torch_ops_is_that_of_the_types() -> None:
    """A row with ``_foreach_`` names the ops that have this prefix too."""
    text = page("value-types")
    section = text[text.index("## Ops of torch") : text.index("## What is an error")]
    listed: set[str] = set()
    for row in (line for line in section.splitlines() if line.startswith("| ")):
        before, prefix, after = row.split(" | ")[0].partition("`_foreach_`")
        words = re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", before))
        listed.update(words)
        if prefix:
            shared = words if "also" in before else []
            listed.update(f"_foreach_{name}" for name in [*shared, *re.findall(r"`(\w+)`", after)])
    listed.add("view")  # written as a call: view(-1)
    names = {name.partition("::")[2] for name in HANDLERS}
    assert listed == names, (sorted(listed - names), sorted(names - listed))


def test_every_function_has_a_row_and_an_entry() -> None:
    text = page("functions")
    rows = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    for name in tp.functional.__all__:
        if name != "Permutation":
            assert f"`{name}`" in rows, name
        if name != "topk_router":
            assert re.search(rf"auto(function|class):: transformer_plugin\.{name}\n", text), name
