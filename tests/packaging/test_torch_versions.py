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
    """A folder with a CUDA library for torch 2.11, its kernels, and a CPU library for torch 2.15."""
    monkeypatch.delenv(_torch_versions.SETTING, raising=False)
    for name in ("_C.torch2.11.cu13.so", "_C.torch2.15.cpu.so", "_kernels.cu13.so"):
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


@pytest.mark.parametrize(("version", "got"), [("", "''"), ("unknown", "unknown"), ("2", "2")])
def test_a_version_without_numbers(folder: Path, version: str, got: str) -> None:
    assert error(folder, version, None).startswith(
        f"transformer_plugin: expected torch 2.11 to 2.15, got {got}. Run "
    )


def test_a_library_without_its_kernels(folder: Path) -> None:
    (folder / "_kernels.cu13.so").rename(folder / "_kernels.cu12.so")
    assert error(folder, "2.11.0", "13.0") == (
        "transformer_plugin: expected the kernels _kernels.cu13.so next to _C.torch2.11.cu13.so, found none. "
        f"Build them: {BUILD}."
    )


def test_other_files_are_no_libraries(folder: Path) -> None:
    for name in ("_C.torch_old.so", "_C.torch2.15.cpu (1).so", "_C.torch2.15.cpu.old.so"):
        (folder / name).touch()
    assert find_library(folder, "2.15.0+cu132", "13.2") == folder / "_C.torch2.15.cpu.so"
    assert find_library(folder, "2.11.0", "13") == folder / "_C.torch2.11.cu13.so"
    assert "found one for torch 2.11 with CUDA 13 and one for torch 2.15 without CUDA. " in error(
        folder, "2.12.1", None
    )


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


def test_another_value_of_the_setting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_torch_versions.SETTING, "yes")
    assert "set TRANSFORMER_PLUGIN_UNTRIED_TORCH=1 (it is 'yes'), and build for it" in error(
        folder, "2.16.0", None
    )


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


@pytest.mark.parametrize(
    ("reason", "got"),
    [
        ("x.so: undefined symbol: _ZN3c105ErrorC2E", "one that was built for another torch of that name"),
        ("x.so: file too short", "x.so: file too short"),
    ],
)
@pytest.mark.parametrize("is_wrapped", [True, False], ids=["cause", "itself"])
def test_a_file_that_does_not_load(
    monkeypatch: pytest.MonkeyPatch, reason: str, got: str, is_wrapped: bool
) -> None:
    def load_library(path: str) -> None:
        if is_wrapped:
            raise OSError(f"Could not load this library: {path}") from OSError(reason)
        raise OSError(reason)

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    with pytest.raises(ImportError) as caught:
        _library.load()
    assert str(caught.value) == (
        f"transformer_plugin: expected a compiled library for torch {torch.__version__} (CUDA {torch.version.cuda}) in "
        f"{_library.LIBRARY.name}, got {got}. Build it again for this torch: {BUILD}."
    )
    assert caught.value.__suppress_context__


def make(*arguments: str, folder: Path = ROOT, **more: str) -> subprocess.CompletedProcess[str]:
    """What make would do, outside of the one that runs the tests. It takes no TORCH from the environment."""
    outer = (
        "MAKEFLAGS",
        "MAKELEVEL",
        "MFLAGS",
        "CFLAGS",
        "LDFLAGS",
        "CXX",
        "TORCH_CUDA_ARCH_LIST",
        "TRANSFORMER_PLUGIN_CPU_ONLY",
    )
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    environment |= {"TORCH": "nobody's", **more}
    return subprocess.run(
        ["make", "-n", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "torch", ["torch", "2.15.0", "torch>=2.12", "torch==2.15.*", "torch==2.15.0 ", "./x.whl"]
)
def test_make_refuses_what_is_no_version(torch: str) -> None:
    done = make("setup", f"TORCH={torch}")
    assert done.returncode == 2
    assert f"TORCH: expected a version, such as torch==2.15.0, got {torch}" in done.stderr


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0"])
def test_make_refuses_other_versions_before_it_installs(version: str) -> None:
    script = ROOT / "transformer_plugin" / "_torch_versions.py"
    assert f'{script.relative_to(ROOT)} "torch=={version}"' in make("setup", f"TORCH=torch=={version}").stdout
    environment = {name: value for name, value in os.environ.items() if name != _torch_versions.SETTING}
    done = subprocess.run(
        [sys.executable, str(script), f"torch=={version}"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == f"TORCH: expected torch 2.11 to 2.15, got {version}\n"


def test_make_builds_again_what_another_build_has_replaced(tmp_path: Path) -> None:
    for path in ("Makefile", "setup.py", "pyproject.toml", "transformer_plugin/_torch_versions.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    shutil.copytree(ROOT / "build_tools", tmp_path / "build_tools")
    library, stamps = tmp_path / "transformer_plugin" / "_C.torch2.11.cu13.so", tmp_path / ".venv"
    for each in (tmp_path / "csrc", tmp_path / "examples", stamps):
        each.mkdir()
    library.touch()
    (stamps / ".runs").touch()
    (stamps / ".ready").touch()
    (stamps / ".built").write_text(f"cpu_only= cflags= ldflags= cxx= archs=\n{library}\n")
    (stamps / ".installed").touch()

    def builds(**environment: str) -> bool:
        done = make("build", folder=tmp_path, **environment)
        assert done.returncode == 0, done.stderr
        return "building the library" in done.stdout

    assert not builds()
    assert (
        builds(TRANSFORMER_PLUGIN_CPU_ONLY="1")
        and builds(CFLAGS="-O1")
        and builds(CXX="g++-12")
        and builds(TORCH_CUDA_ARCH_LIST="10.0a")
    )
    later = (stamps / ".built").stat().st_mtime + 5
    os.utime(library, (later, later))
    assert builds()
    os.utime(stamps / ".built", (later, later))
    os.utime(stamps / ".installed", (later, later))
    assert not builds()
    library.unlink()
    assert builds()


def test_metadata_and_pages_name_the_same_versions() -> None:
    assert f'dependencies = ["{_torch_versions.REQUIREMENT}"]' in (ROOT / "pyproject.toml").read_text()
    span = f"torch {_torch_versions.text(_torch_versions.OLDEST)} to {_torch_versions.text(_torch_versions.NEWEST)}"
    for page in ("README.md", "docs/install.md"):
        assert span in re.sub(r"\s+", " ", (ROOT / page).read_text()), page
