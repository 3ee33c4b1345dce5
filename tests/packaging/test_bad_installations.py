"""What import and doctor say of a wrong installation: a sentence with the reason and what to do, no traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.surface.surface import ROOT
from transformer_plugin import _library
from transformer_plugin._torch_versions import BUILD, NO_TORCH, SETTING, kernels_name, library_name

OWN = library_name(torch.__version__, None)
WITH_CUDA = library_name(torch.__version__, "13.0")

#: A module in place of torch, which becomes torch with a change.
REPLACED = """
import sys
folders = list(sys.path)
del sys.modules["torch"]
sys.path[:] = [folder for folder in folders if folder not in ('', {folder!r})]
import torch
sys.path[:] = folders
{change}
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package without its libraries, in a folder of its own."""
    there = tmp_path / "transformer_plugin"
    shutil.copytree(ROOT / "transformer_plugin", there, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return there


def with_library(copy: Path, name: str = "") -> None:
    """Gives it the libraries of this build, of which the first may have another name."""
    for library in _library.LIBRARIES:
        (copy / library.name).symlink_to(library)
    if name and name != _library.LIBRARY.name:
        (copy / _library.LIBRARY.name).rename(copy / name)


def with_torch(copy: Path, text: str) -> None:
    """Gives it a module of that text in place of torch."""
    (copy.parent / "torch").mkdir()
    (copy.parent / "torch" / "__init__.py").write_text(text)


def changed_torch(copy: Path, change: str) -> None:
    with_torch(copy, REPLACED.format(folder=str(copy.parent), change=change))


def run(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != SETTING}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=copy.parent,
        env={**environment, "PYTHONPATH": str(copy.parent)},
        capture_output=True,
        text=True,
    )


def doctor(copy: Path) -> tuple[int, dict[str, Any]]:
    """Its exit status and facts, by name. The package's folder is that of the copy."""
    done = run(copy, "-m", "transformer_plugin", "--json")
    assert done.stderr == "" and "Traceback" not in done.stdout
    report = json.loads(done.stdout)
    assert report["ok"] == (done.returncode == 0)
    facts = {fact["name"]: fact for section in report["sections"] for fact in section["facts"]}
    assert all(fact["todo"] for fact in facts.values() if fact["mark"] == "FAILED")
    assert facts["transformer_plugin"]["value"].endswith("transformer_plugin")
    return done.returncode, facts


def failed_import(copy: Path) -> str:
    """The sentence of the import, which is that of the doctor."""
    status, facts = doctor(copy)
    assert status == 1
    last = run(copy, "-c", "import transformer_plugin").stderr.strip().splitlines()[-1]
    kind, _, text = last.partition(": ")
    assert kind in ("ImportError", "ModuleNotFoundError")
    assert facts["import"]["mark"] == "FAILED"
    assert f"transformer_plugin: {facts['import']['value']}. {facts['import']['todo']}" == text
    return text


def test_no_torch(copy: Path) -> None:
    with_library(copy)
    with_torch(copy, "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    assert failed_import(copy) == NO_TORCH
    status, facts = doctor(copy)
    assert status == 1 and facts["torch"]["value"] in NO_TORCH and facts["torch"]["todo"] in NO_TORCH
    assert facts["Python"]["mark"] == "ok"


def test_a_torch_that_does_not_import(copy: Path) -> None:
    """As where a library that it needs is not there, that of NCCL for example."""
    with_library(copy)
    with_torch(copy, "raise ImportError('libnccl.so.2: cannot open shared object file')")
    status, facts = doctor(copy)
    assert status == 1
    reason = "ImportError: libnccl.so.2: cannot open shared object file"
    assert facts["torch"]["value"] == f"it does not work: {reason}"
    assert facts["import"]["value"] == reason


def test_a_torch_without_cuda_and_a_library_with_cuda(copy: Path) -> None:
    with_library(copy, WITH_CUDA)
    (copy / kernels_name("13.0")).touch()
    changed_torch(copy, "torch.version.cuda = None")
    assert "without CUDA, found one for torch" in failed_import(copy)


def test_another_cuda(copy: Path) -> None:
    with_library(copy, WITH_CUDA)
    changed_torch(copy, "torch.version.cuda = '12.8'")
    text = failed_import(copy)
    assert (
        "with CUDA 12.8, found one for torch" in text
        and f"with CUDA 13. Build it again for this torch: {BUILD}." in text
    )


def test_no_library(copy: Path) -> None:
    status, facts = doctor(copy)
    assert status == 1
    assert facts["libraries"]["mark"] == facts["import"]["mark"] == "FAILED"
    assert "expected the compiled library" in facts["import"]["value"]


def test_a_file_that_is_no_library(copy: Path) -> None:
    (copy / OWN).touch()
    text = failed_import(copy)
    assert "file too short" in text and text.endswith(f"Build it again for this torch: {BUILD}.")


@pytest.mark.parametrize(
    ("line", "got"),
    [
        ('"an_op": 0,', "one without an_op"),
        ('"linear": 0,', "one with other arguments of linear"),
        (
            "".join(f'"op_{i}": 0, ' for i in range(6)),
            "one without op_0, op_1, op_2 and 3 others",
        ),
    ],
    ids=["missing", "changed", "several"],
)
def test_a_library_of_other_sources(copy: Path, line: str, got: str) -> None:
    with_library(copy)
    schemas = copy / "_schemas.py"
    schemas.write_text(f"{schemas.read_text().rstrip().removesuffix('}')}{line}}}\n")
    assert failed_import(copy) == (
        "transformer_plugin: expected a library with the ops of these Python files in "
        f"{_library.LIBRARY.name}, got {got}, of another version. Build it again: {BUILD}."
    )


def test_a_torch_without_distributed(copy: Path) -> None:
    with_library(copy)
    changed_torch(copy, "torch.distributed.is_available = lambda: False")
    assert failed_import(copy) == (
        "transformer_plugin: expected a torch with torch.distributed, got one that was built without it, "
        f"{torch.__version__}. Install another build of torch, then build for it: {BUILD}."
    )


def test_a_torch_without_nccl(copy: Path) -> None:
    """It is no fault: the ops of one GPU need none, and those of several say what they need."""
    with_library(copy)
    changed_torch(copy, "torch.distributed.is_nccl_available = lambda: False")
    status, facts = doctor(copy)
    assert status == 0
    if torch.version.cuda:
        assert facts["NCCL"]["mark"] == "no" and facts["NCCL"]["todo"].startswith("Install a torch with NCCL")


def test_a_folder_that_nobody_writes(copy: Path) -> None:
    with_library(copy)
    folders = [copy, *(path for path in copy.rglob("*") if path.is_dir())]
    before = sorted(copy.parent.rglob("*"))
    try:
        for path in (*folders, copy.parent):
            path.chmod(0o555)
        status, facts = doctor(copy)
    finally:
        for path in (*folders, copy.parent):
            path.chmod(0o755)
    assert status == 0 and facts["products"]["mark"] == "ok"
    made = [path for path in sorted(copy.parent.rglob("*")) if "__pycache__" not in path.parts]
    assert made == before  # but for what Python compiles, where the user may write after all


def test_kernels_of_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_library(path: str) -> None:
        raise OSError(f"{path}: undefined symbol: _ZN18transformer_plugin6launchEv")

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    with pytest.raises(
        ImportError, match=f"got one that was built with other kernels than {_library.LIBRARIES[-1].name}. "
    ):
        _library.load()


def test_other_programs_import_all_of_the_package(copy: Path) -> None:
    """Only `python -m transformer_plugin` starts without it."""
    with_library(copy)
    (copy / "testing" / "program.py").write_text(
        "import transformer_plugin\nprint(transformer_plugin.ops.__name__)\n"
    )
    assert run(copy, "-m", "transformer_plugin.testing.program").stdout == "transformer_plugin.ops\n"
    code = "import runpy; runpy.run_module('transformer_plugin', run_name='x'); import transformer_plugin as t; t.ops"
    assert run(copy, "-c", code).returncode == 0
    assert (
        run(
            copy, "-m", "timeit", "-n1", "-r1", "import transformer_plugin; transformer_plugin.ops"
        ).returncode
        == 0
    )
