"""The source tree: files and functions are short, settings are read in one place, and nothing depends on one
machine."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.surface.surface import ROOT

FILE_LINES = 400
FUNCTION_LINES = 60
CPP_FUNCTION_LINES = 100
#: Longer C++ functions, with their numbers of lines. Entries may only shrink or be removed.
LONG_CPP_FUNCTIONS: dict[str, int] = {}
SOURCE = {".py", ".cpp", ".h", ".cu", ".cuh", ".sh"}
TEXT = SOURCE | {".md", ".toml", ".cfg", ".yml", ".json", ".txt", ""}
# In parts, so that this file does not match.
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


LITERALS = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'(?!\w)|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*""",
    re.DOTALL | re.MULTILINE,
)
ATTRIBUTES = re.compile(r"__\w+__\s*\((?:[^()]|\([^()]*\))*\)|\[\[\w+\]\]")


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """Yields the name and number of lines of the functions in a C++ file. Lambdas are part of the function that
    contains them.

    A block is a function if it is not inside another function and its head, the code since the last semicolon or
    brace, has a parenthesis. Comments, literals, preprocessor lines and attributes do not count.
    """
    code = LITERALS.sub(lambda match: "\n" * match.group(0).count("\n"), text)
    head, head_line, line = "", 1, 1
    blocks: list[tuple[str, int] | None] = []  # open blocks: a function's name and first line, or None
    for character in code:
        if character == "{":
            name = re.search(r"([\w:~]+)\s*\(", ATTRIBUTES.sub("", head))
            blocks.append((name.group(1), head_line) if name and not any(blocks) else None)
        elif character == "}" and blocks and (function := blocks.pop()):
            yield function[0], line - function[1] + 1
        if character in ";{}":
            head = ""
        elif head or not character.isspace():
            head_line = head_line if head else line
            head += character
        line += character == "\n"


def test_cpp_functions_are_short() -> None:
    long = {
        f"{relative(path)} {name}": lines
        for path in tracked()
        if relative(path).startswith("csrc/") and path.suffix in SOURCE
        for name, lines in cpp_functions(path.read_text())
        if lines > CPP_FUNCTION_LINES and name != "TORCH_LIBRARY"  # registration.cpp: the list of schemas
    }
    assert {name: lines for name, lines in long.items() if lines > LONG_CPP_FUNCTIONS.get(name, 0)} == {}
    assert (
        sorted(set(LONG_CPP_FUNCTIONS) - set(long)) == []
    )  # entries that are now short must be removed from the list


def test_cpp_functions_are_counted() -> None:
    source = """
namespace a {
struct S {
  int f(int x) const {  // }
    const auto g = [&] { return '}'; };
    return g();
  }
};
template <typename T>
__global__ void __launch_bounds__(256, (2))
    kernel(const T* x) {
#define B {
  if (x) { *x = "}"; }
}
}
"""
    assert list(cpp_functions(source)) == [("f", 4), ("kernel", 6)]


def test_environment_is_read_in_one_place() -> None:
    """Ours, and what the build reads too; one CPU file reads a variable of oneDNN's, which limits its instructions."""
    readers = [
        relative(path)
        for path in tracked()
        if relative(path).startswith(("transformer_plugin/", "csrc/"))
        and path.suffix in SOURCE
        and re.search(r"os\.environ|getenv", path.read_text())
    ]
    files = ("_torch_versions.py", "config.py")
    assert readers == ["csrc/gemm/generic/matmul_cpu.cpp", *(f"transformer_plugin/{name}" for name in files)]


def test_no_machine_paths_or_registries() -> None:
    found = {
        relative(path): sorted(set(MACHINE.findall(path.read_text(errors="replace"))))
        for path in tracked()
        if path.suffix in TEXT and MACHINE.search(path.read_text(errors="replace"))
    }
    assert found == {}


def test_setup_is_short() -> None:
    assert len((ROOT / "setup.py").read_text().splitlines()) < 60


def test_versions_are_one() -> None:
    found = {
        name: re.findall(pattern, (ROOT / name).read_text(), re.MULTILINE)
        for name, pattern in {
            "pyproject.toml": r'^version = "(.*)"$',
            "CITATION.cff": r"^version: (.*)$",
            "transformer_plugin/__init__.py": r'^__version__ = "(.*)"$',
        }.items()
    }
    assert len({tuple(versions) for versions in found.values()}) == 1, found
