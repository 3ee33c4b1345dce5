"""The example of adding an op in CONTRIBUTING.md: its list of files is short and complete."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.surface.surface import ROOT

OP = "router_scores"
#: The largest number of files that may be edited to add an op.
MOST = 12
#: Files that call the op, or are about several ops.
CALLERS = (
    "transformer_plugin/nn/",
    "transformer_plugin/parallel/",
    "benchmarks/",
    "examples/",
    "docs/howto/",
    "tests/",
)


def listed() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text[text.index("## Add an op") : text.index("## Add a format")]
    assert f"`{OP}` is an example" in section
    return re.findall(r"^\d+\. `([^`]+)`:", section, re.MULTILINE)


def test_list_is_short_and_its_files_exist() -> None:
    files = listed()
    assert 0 < len(files) <= MOST and len(set(files)) == len(files)
    for name in files:
        assert OP in name or re.search(rf"\b{OP}\b", (ROOT / name).read_text()), name


def test_no_other_file_defines_the_op() -> None:
    command = ["git", "grep", "-lwz", OP, "--", ".", ":!CONTRIBUTING.md"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode != 0:
        pytest.skip("not a git checkout")
    others = {name for name in found.stdout.split("\0") if name and not name.startswith(CALLERS)}
    assert others - set(listed()) == set()
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob(f"{OP}*")}
    assert sources - set(listed()) == set()
