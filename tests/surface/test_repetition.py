"""Little code is repeated: the percentage of lines that are in a run of lines which occurs more than once."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.surface.test_tree import relative, tracked

#: The length of a run in lines of code. Blank lines, comments, includes, imports, lines with only brackets,
#: and arguments in the signatures of Python functions (ops, references and fakes share them) do not count.
RUN = 6
SKIPPED = re.compile(
    r"\s*(//|#|\*|from |import |using |namespace |[(){}\[\],;]*\s*$|\w+: [\w.\[\], |]+( = [^:]+)?,$)"
)
#: The largest percentage of repeated lines in each part. It may only be lowered.
LIMITS = {"csrc/": 0.8, "transformer_plugin/": 1.8, "tests/": 1.6}


def code_lines(text: str) -> list[tuple[int, str]]:
    """Returns the lines of code with their numbers, without docstrings and whitespace."""
    text = re.sub(r'"""(?:.|\n)*?"""', lambda match: "\n" * match.group(0).count("\n"), text)
    lines = enumerate(text.splitlines(), 1)
    return [(number, re.sub(r"\s+", "", line)) for number, line in lines if not SKIPPED.match(line)]


def repeated(files: dict[str, str]) -> tuple[float, dict[str, list[str]]]:
    """Returns the percentage of lines in repeated runs, and the places of each repeated run."""
    runs: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    code = {name: code_lines(text) for name, text in files.items()}
    for name, lines in code.items():
        for i in range(len(lines) - RUN + 1):
            runs[tuple(line for _, line in lines[i : i + RUN])].append((name, i))
    places = {run: found for run, found in runs.items() if len(found) > 1}
    covered = {(name, i + j) for found in places.values() for name, i in found for j in range(RUN)}
    where = {run[0]: [f"{name}:{code[name][i][0]}" for name, i in found] for run, found in places.items()}
    return 100 * len(covered) / max(1, sum(map(len, code.values()))), where


@pytest.mark.parametrize("part", LIMITS)
def test_little_is_repeated(part: str) -> None:
    suffixes = {".py", ".cpp", ".h", ".cu", ".cuh"}
    files = {
        relative(path): path.read_text()
        for path in map(Path, tracked())
        if relative(path).startswith(part) and path.suffix in suffixes
    }
    assert len(files) > 20
    percent, where = repeated(files)
    assert percent <= LIMITS[part], f"{percent:.2f} % of the lines of {part} are repeated: {where}"


def test_repeated_lines_are_detected() -> None:
    shared = "\n".join(f"x{i} = f({i})" for i in range(RUN))
    percent, where = repeated({"a.py": f"{shared}\n# comment\n\ny = 1", "b.py": f"z = 2\n{shared}\n"})
    assert percent == pytest.approx(100 * 2 * RUN / (2 * RUN + 2))
    assert list(where.values()) == [["a.py:1", "b.py:2"]]
