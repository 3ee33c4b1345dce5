"""The manual's table of ops lists every registered op once, with its page and whether autograd records it.

Everything is read as text, so these tests need no compiled library.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = ROOT / "docs" / "ops"
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| \[(\w+)\]\((\w+\.md)\) \| (yes|no) \|$", re.MULTILINE)
#: Ops without a wrapper in ``transformer_plugin.ops``.
UNWRAPPED = {"release_group"}

pytestmark = pytest.mark.skipif(not PAGES.exists(), reason="needs the source tree")


def rows() -> list[tuple[str, str, str, str, str]]:
    """Returns the rows of the table: name, what the op computes, title and file of its page, differentiable."""
    return ROW.findall((PAGES / "index.md").read_text())


def registered() -> list[str]:
    """Returns every op in the order of csrc/registration.cpp."""
    return re.findall(r'm\.def\(\s*"(\w+)\(', (ROOT / "csrc" / "registration.cpp").read_text())


def modules_by_op() -> dict[str, str]:
    """Returns the name of the file of ``transformer_plugin/ops`` that defines each wrapper."""
    found = {}
    for path in (ROOT / "transformer_plugin" / "ops").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = path.stem
    return found


def with_autograd_node() -> set[str]:
    """Returns the names of autograd nodes: ``kName`` of each ``CheckedFunction``."""
    names: set[str] = set()
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in {".cpp", ".h"}:
            for line in re.findall(r"\bkName = ([^;]*);", path.read_text()):
                names.update(re.findall(r'"(\w+)"', line))
    return names


def test_table_lists_every_op_once() -> None:
    listed = [row[0] for row in rows()]
    assert len(listed) == len(set(listed)), "an op is listed twice"
    assert sorted(listed) == sorted(registered()), "docs/ops/index.md and csrc/registration.cpp differ"
    lines = [line for line in (PAGES / "index.md").read_text().splitlines() if line.startswith("| `")]
    assert len(lines) == len(listed), "a row has another form than the rest"


def test_pages_document_their_ops() -> None:
    modules = modules_by_op()
    for name, _, title, page, _ in rows():
        text = (PAGES / page).read_text()
        assert title == Path(page).stem, name
        if name not in UNWRAPPED:
            assert f"automodule:: transformer_plugin.ops.{modules[name]}\n" in text, f"{name}: {page}"


def test_differentiable_ops_have_an_autograd_node() -> None:
    nodes = with_autograd_node()
    assert len(nodes) > 10
    nodes |= {
        f"{layer}_out" for layer in ("linear", "grouped_linear", "grouped_mlp")
    }  # have those of the layers
    for name, _, _, _, differentiable in rows():
        assert (differentiable == "yes") == (name.removesuffix("_") in nodes), name
