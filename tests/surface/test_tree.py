"""The tree: files and functions short enough to read, settings in one place, nothing of one machine in it."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.surface.surface import ROOT

FILE_LINES = 400
FUNCTION_LINES = 60
SOURCE = {".py", ".cpp", ".h", ".cu", ".cuh", ".sh"}
TEXT = SOURCE | {".md", ".toml", ".cfg", ".yml", ".json", ".txt", ""}
# Spelled in pieces, so that this file is not found.
MACHINE = re.compile(
    r"/(?:wor"
    + r"k|roo"
    + r"t|hom"
    + r"e|opt)/[\w.]|pypi\.or"
    + r"g|files\.pythonhoste"
    + r"d|download\.pytorc"
    + r"h"
)


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_files_are_short() -> None:
    sources = [path for path in tracked() if path.suffix in SOURCE]
    assert len(sources) > 20
    lines = {relative(path): len(path.read_text().splitlines()) for path in sources}
    assert {name: count for name, count in lines.items() if count > FILE_LINES} == {}


def test_functions_are_short() -> None:
    long = {}
    for path in tracked():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES:
                long[f"{relative(path)}:{node.lineno} {node.name}"] = (node.end_lineno or 0) - node.lineno + 1
    assert long == {}


def test_environment_is_read_in_one_place() -> None:
    readers = [
        relative(path)
        for path in tracked()
        if relative(path).startswith(("transformer_plugin/", "csrc/"))
        and path.suffix in SOURCE
        and re.search(r"os\.environ|getenv", path.read_text())
    ]
    assert readers == ["transformer_plugin/config.py"]


def test_nothing_of_one_machine() -> None:
    found = {
        relative(path): sorted(set(MACHINE.findall(path.read_text(errors="replace"))))
        for path in tracked()
        if path.suffix in TEXT and MACHINE.search(path.read_text(errors="replace"))
    }
    assert found == {}


def test_setup_is_short() -> None:
    assert len((ROOT / "setup.py").read_text().splitlines()) < 60
