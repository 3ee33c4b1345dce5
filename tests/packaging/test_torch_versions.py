"""Which torch is served, by which library, and what build and import say of every other environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.surface.surface import ROOT
from transformer_plugin import _library, _torch_versions
from transformer_plugin._torch_versions import find_library, library_name, refusal

BUILD = "`pip install --no-build-isolation --force-reinstall --no-deps .` in the source tree"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a CUDA library for torch 2.11 and a CPU library for torch 2.15."""
    monkeypatch.delenv(_torch_versions.SETTING, raising=False)
    for name in ("_C.torch2.11.cu13.so", "_C.torch2.15.cpu.so"):
        (tmp_path / name).touch()
    return tmp_path


def error(folder: Path, version: str, cuda: str | None) -> str:
    with pytest.raises(ImportError) as caught:
        find_library(folder, version, cuda)
    return str(caught.value)


@pytest.mark.parametrize(
    ("version", "cuda", "name"),
    [
        ("2.11.0", "13.0", "_C.torch2.11.cu13.so"),
        ("2.11.1+cu132", "13.2", "_C.torch2.11.cu13.so"),
        ("2.15.0+cpu", None, "_C.torch2.15.cpu.so"),
        ("2.15.0a0+git1234", "13.2", "_C.torch2.15.cpu.so"),  # on CPUs; no library has CUDA code for it
    ],
)
def test_the_library_of_the_running_torch_is_found(
    folder: Path, version: str, cuda: str | None, name: str
) -> None:
    assert find_library(folder, version, cuda) == folder / name


@pytest.mark.parametrize("version", ["2.10.0+cu130", "2.9.1", "1.13.1"])
def test_older_torch(folder: Path, version: str) -> None:
    expected = f"expected torch 2.11 to 2.15, got {version}. Run `pip install 'torch>=2.11,<2.16'`, then build for it: "
    assert error(folder, version, "13.0") == f"transformer_plugin: {expected}{BUILD}."
    assert refusal(version) == expected + BUILD


@pytest.mark.parametrize("version", ["2.16.0.dev20261101+cu132", "3.0.0"])
def test_newer_torch(folder: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(folder, version, "13.2") == (
        f"transformer_plugin: expected torch 2.11 to 2.15, got {version}. Run `pip install 'torch>=2.11,<2.16'`, or "
        f"try this version: set TRANSFORMER_PLUGIN_UNTRIED_TORCH=1, and build for it: {BUILD}."
    )
    monkeypatch.setenv(_torch_versions.SETTING, "1")
    assert refusal(version) is None
    assert "expected a compiled library for torch" in error(folder, version, "13.2")
    (folder / library_name(version, "13.2")).touch()
    assert find_library(folder, version, "13.2").name == library_name(version, "13.2")


def test_the_setting_is_for_newer_versions_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_torch_versions.SETTING, "1")
    assert error(folder, "2.10.0", None).startswith(
        "transformer_plugin: expected torch 2.11 to 2.15, got 2.10.0. "
    )


@pytest.mark.parametrize(
    ("version", "cuda", "running"),
    [
        ("2.12.1+cu130", "13.0", "torch 2.12.1+cu130 with CUDA 13.0"),
        ("2.11.0+cu128", "12.8", "torch 2.11.0+cu128 with CUDA 12.8"),
        ("2.11.0+cpu", None, "torch 2.11.0+cpu without CUDA"),
    ],
    ids=["minor", "cuda", "cpu"],
)
def test_a_library_for_another_torch(folder: Path, version: str, cuda: str | None, running: str) -> None:
    assert error(folder, version, cuda) == (
        f"transformer_plugin: expected a compiled library for {running}, found one for torch 2.11 with CUDA 13 and one "
        f"for torch 2.15 without CUDA. Build it again for this torch: {BUILD}."
    )


def test_no_library(tmp_path: Path) -> None:
    assert error(tmp_path, "2.11.0", "13.0") == (
        "transformer_plugin: expected the compiled library _C.torch2.11.cu13.so next to the package, for torch 2.11.0 "
        f"with CUDA 13.0, found none. Build it: {BUILD}."
    )


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ("torch.__version__ = '2.10.0+cu130'", "expected torch 2.11 to 2.15, got 2.10.0+cu130."),
        ("torch.__version__ = '2.16.0'", "expected torch 2.11 to 2.15, got 2.16.0."),
        ("torch.version.cuda = '12.8'", "with CUDA 12.8, found one for torch"),
        ("torch.version.cuda = None", "without CUDA, found one for torch"),
    ],
)
def test_import_says_it_in_one_sentence(tmp_path: Path, environment: str, expected: str) -> None:
    """With this library as one with CUDA code, in a torch that says that it is another."""
    shutil.copytree(
        ROOT / "transformer_plugin", tmp_path / "transformer_plugin", ignore=shutil.ignore_patterns("*.so")
    )
    (tmp_path / "transformer_plugin" / library_name(torch.__version__, "13.0")).symlink_to(_library.LIBRARY)
    done = subprocess.run(
        [sys.executable, "-c", f"import torch; {environment}; import transformer_plugin"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != _torch_versions.SETTING},
        capture_output=True,
        text=True,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError: transformer_plugin: ") and expected in last
    assert "undefined symbol" not in done.stderr


def test_metadata_and_pages_name_the_same_versions() -> None:
    assert f'dependencies = ["{_torch_versions.REQUIREMENT}"]' in (ROOT / "pyproject.toml").read_text()
    span = f"torch {_torch_versions.text(_torch_versions.OLDEST)} to {_torch_versions.text(_torch_versions.NEWEST)}"
    for page in ("README.md", "docs/install.md"):
        assert span in re.sub(r"\s+", " ", (ROOT / page).read_text()), page
