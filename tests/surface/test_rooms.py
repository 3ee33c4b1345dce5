"""Which folders may include which: every folder of csrc includes itself and folders below it in the list, never one
above."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from tests.surface.surface import ROOT

CSRC = ROOT / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
ENUM = re.compile(r"^\s*enum (?:class )?(\w+)", re.MULTILINE)

#: Each folder, with its subfolders, and the folders that it may include.
BELOW: dict[str, set[str]] = {
    "common": set(),
    "distributed": {"common"},
    "activation": {"common"},
    "quantize/args": {"common", "activation"},
    "quantize/cpu": {"common", "activation", "quantize/args"},
    "quantize/cuda": {"common", "activation", "quantize/args"},
    "quantize/ops": {"common", "distributed", "activation", "quantize/args"},
    "norm": {"common", "quantize/args", "quantize/cpu", "quantize/cuda", "quantize/ops"},
    "gemm/args": {"common", "activation"},
    "gemm/generic": {"common", "quantize/cuda", "gemm/args"},
    "routing": {"common", "gemm/generic"},
    "gemm/cpu": {"common", "quantize/ops", "gemm/args", "gemm/generic"},
    "gemm/sm90": {"common", "activation", "quantize/args", "quantize/cuda", "gemm/args"},
    "gemm/dispatch": {
        *("common", "activation", "quantize/args", "quantize/ops"),
        *("gemm/args", "gemm/generic", "gemm/cpu", "gemm/sm90"),
    },
    "gemm/ops": {
        *("common", "activation", "quantize/ops"),
        *("gemm/args", "gemm/generic", "gemm/sm90", "gemm/dispatch"),
    },
    "tensor_parallel": {"common", "distributed"},
    "sharded": {"common", "distributed", "quantize/ops", "tensor_parallel"},
    "expert_parallel": {"common", "distributed", "routing"},
    "linear": {
        "common",
        "tensor_parallel",
        "sharded",
        "expert_parallel",
        "activation",
        "quantize/ops",
        "gemm/args",
        "gemm/generic",
        "gemm/dispatch",
        "gemm/ops",
        "norm",
    },
}


def folder_of(path: str) -> str | None:
    """Returns the entry of BELOW that contains a path within csrc."""
    folders = [folder for folder in BELOW if path.startswith(folder + "/")]
    return max(folders, key=len, default=None)


def sources() -> list[Path]:
    return [path for path in CSRC.rglob("*") if path.suffix in {".h", ".cuh", ".cpp", ".cu"}]


def test_every_file_has_a_folder() -> None:
    names = [path.relative_to(CSRC).as_posix() for path in sources()]
    assert len(names) > 300
    assert [name for name in names if folder_of(name) is None] == ["registration.cpp"]


def test_folders_include_only_folders_below_them() -> None:
    wrong = []
    for path in sources():
        name = path.relative_to(CSRC).as_posix()
        folder = folder_of(name)
        for included in INCLUDE.findall(path.read_text()):
            assert (CSRC / included).is_file(), f"{name} includes {included}, which is not there"
            other = folder_of(included)
            if folder is not None and other != folder and other not in BELOW[folder]:
                wrong.append(f"{name} -> {included}")
    assert wrong == []


def test_order_of_folders_has_no_cycle() -> None:
    order: list[str] = []
    for folder, below in BELOW.items():  # listed from the bottom to the top
        assert below <= set(order), folder
        order.append(folder)


def test_enums_have_names_of_their_own() -> None:
    """A name means one thing, whatever the namespace. Enums that a .cpp file keeps to itself may repeat."""
    files = defaultdict(list)
    for path in sources():
        for name in ENUM.findall(path.read_text()):
            files[name].append(path)
    assert len(files) > 10
    shared = {name: paths for name, paths in files.items() if any(path.suffix != ".cpp" for path in paths)}
    assert {name: paths for name, paths in shared.items() if len(paths) > 1} == {}
