"""The examples in CONTRIBUTING.md of an op, a format and an activation: their lists of files are short and complete."""

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
    "csrc/common/ops/",  # is written from the schemas, and so is
    "transformer_plugin/_schemas.py",
)


FORMAT = "fp8_row"
#: The most files that are edited to add a format.
MOST_OF_A_FORMAT = 16
#: How code names the format: its key, its family, its kernels, and the trait that no other format has.
NAMES_OF_THE_FORMAT = r"fp8_row|Fp8Row|\bquantize_rows_|launch_quantize_rows|QuantizeRows|has_row_scales"

ACTIVATION = "relu2"
#: The most files that are edited to add an activation.
MOST_OF_AN_ACTIVATION = 8


def section(title: str, example: str) -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    start = text.index(f"## {title}")
    found = text[start : text.index("\n## ", start)]
    assert f"`{example}` is an example" in found
    return found


def listed() -> list[str]:
    return re.findall(r"^\d+\. `([^`]+)`:", section("Add an op", OP), re.MULTILINE)


def tracked(*arguments: str) -> set[str]:
    """The files that git finds, with paths relative to the repository."""
    found = subprocess.run(["git", "grep", "-lz", *arguments], cwd=ROOT, capture_output=True, text=True)
    if found.returncode != 0:
        pytest.skip("not a git checkout")
    return {name for name in found.stdout.split("\0") if name}


def test_list_is_short_and_its_files_exist() -> None:
    files = listed()
    assert 0 < len(files) <= MOST and len(set(files)) == len(files)
    for name in files:
        assert OP in name or re.search(rf"\b{OP}\b", (ROOT / name).read_text()), name


def test_no_other_file_defines_the_op() -> None:
    found = tracked("-w", OP, "--", ".", ":!CONTRIBUTING.md")
    others = {name for name in found if not name.startswith(CALLERS)}
    assert others - set(listed()) == set()
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob(f"{OP}*")}
    assert sources - set(listed()) == set()


def test_the_list_of_a_format_is_short_and_complete() -> None:
    """Besides these files only those of its GEMM kernel, and cases and tests, name the format."""
    text = section("Add a format", FORMAT)
    files = re.findall(r"^\d+\. `([^`]+)`:", text, re.MULTILINE)
    assert 0 < len(files) <= MOST_OF_A_FORMAT and len(set(files)) == len(files)
    found = tracked("-E", NAMES_OF_THE_FORMAT, "--", "csrc", "transformer_plugin", "docs/formats")
    assert set(files) <= found
    kernel = set(re.findall(r"`((?:csrc|transformer_plugin)/[^`]+\.\w+)`", text))
    others = ("transformer_plugin/testing/", "transformer_plugin/doctor/_stored.py")  # the second is written
    assert {name for name in found - kernel if not name.startswith(others)} <= set(files)


def test_the_list_of_an_activation_is_short_and_complete() -> None:
    text = section("Add an activation", ACTIVATION)
    files = re.findall(r"^\d+\. `([^`]+)`:", text, re.MULTILINE)
    assert 0 < len(files) <= MOST_OF_AN_ACTIVATION and len(set(files)) == len(files)
    others = (":!CONTRIBUTING.md", ":!tests/surface", ":!tests/nn", ":!tests/clients")
    found = tracked("-iw", ACTIVATION, "--", ".", *others)
    assert found == set(files)
