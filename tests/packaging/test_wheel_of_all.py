"""The wheel with a library for each version of torch: its contents, from libraries that are not compiled here."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from build_tools import wheel
from build_tools.extension import Libraries, Toolkit
from build_tools.toolchain import ToolchainError, torch_versions
from build_tools.torch_tree import TorchTree
from transformer_plugin import _torch_versions

ROOT = Path(__file__).resolve().parent.parent.parent


def trees(cuda: str | None) -> list[TorchTree]:
    return [TorchTree(Path(version), f"{version}+x", cuda) for version in torch_versions.TRIED]


def test_a_library_for_each_version_and_one_of_kernels() -> None:
    toolkit = Toolkit(Path("cuda"), ("9.0a",))
    built = wheel.ManyLibraries([Libraries(ROOT, tree, toolkit) for tree in trees("13.0")])
    minors = ["2.11", "2.12", "2.13", "2.14", "2.15"]
    assert [*built.names.values()] == ["_kernels.cu13.so", *(f"_C.torch{minor}.cu13.so" for minor in minors)]
    without = wheel.ManyLibraries([Libraries(ROOT, tree, None) for tree in trees("13.0")])
    assert [*without.names.values()] == [f"_C.torch{minor}.cpu.so" for minor in minors]


def test_a_version_of_each_minor_was_tried() -> None:
    minors = [_torch_versions.minor(version) for version in _torch_versions.TRIED]
    assert minors == [
        (2, number) for number in range(_torch_versions.OLDEST[1], _torch_versions.NEWEST[1] + 1)
    ]


def test_a_torch_without_cuda_is_no_torch_of_this_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries of one wheel have the same kernels, or none of them has any."""
    monkeypatch.delenv("TRANSFORMER_PLUGIN_CPU_ONLY", raising=False)
    monkeypatch.setattr(wheel, "use_cuda", lambda version, cuda: tmp_path if cuda else None)
    with pytest.raises(
        ToolchainError, match=r"expected every torch of one wheel with CUDA, or none, got 2\.15\.0\+x"
    ):
        wheel.toolkit_for([*trees("13.0")[:4], *trees(None)[4:]])
    assert wheel.toolkit_for(trees(None)) is None
    assert wheel.toolkit_for(trees("13.0")).home == tmp_path


CODE = """
import sys
from pathlib import Path
from build_tools import wheel
class Fake:
    names = {"transformer_plugin._kernels": "_kernels.cu13.so", "transformer_plugin._C_0": "_C.torch2.11.cu13.so",
             "transformer_plugin._C_1": "_C.torch2.15.cu13.so"}
    kernels, ops = "_kernels.cu13.so", "_C.torch2.11.cu13.so"
    def build(self, folder):
        for name in self.names.values():
            (folder / name).write_bytes(name.encode())
print(wheel.package(Fake(), Path(sys.argv[1])))
"""


def test_contents(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path / "out")],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (path,) = (tmp_path / "out").glob("*.whl")
    assert "-cp310-abi3-linux_" in path.name
    with zipfile.ZipFile(path) as archive:
        libraries = {name for name in archive.namelist() if name.endswith(".so")}
        assert libraries == {
            f"transformer_plugin/{name}"
            for name in ("_kernels.cu13.so", "_C.torch2.11.cu13.so", "_C.torch2.15.cu13.so")
        }
        assert archive.read("transformer_plugin/_kernels.cu13.so") == b"_kernels.cu13.so"
        sources = {str(each.relative_to(ROOT)) for each in (ROOT / "transformer_plugin").rglob("*.py")}
        assert {name for name in archive.namelist() if name.endswith(".py")} == sources


def test_unpacks_what_compiling_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a wheel of torch its headers, its libraries and its version."""
    calls = []

    def download(command: list[str]) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        folder = Path(command[command.index("-d") + 1])
        folder.mkdir()
        with zipfile.ZipFile(folder / "torch-2.15.0-cp311.whl", "w") as archive:
            for name in ("include/a.h", "lib/libc10.so", "nn/modules/a.py", "share/x"):
                archive.writestr(f"torch/{name}", "")
            archive.writestr("torch/version.py", "__version__ = '2.15.0+cu132'\ncuda = '13.2'\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(wheel, "FOLDER", tmp_path)
    monkeypatch.setattr(wheel.subprocess, "run", download)
    for _ in range(2):  # the second time it is there
        tree = wheel.unpacked("2.15.0")
        assert (tree.version, tree.cuda) == ("2.15.0+cu132", "13.2")
    assert len(calls) == 1 and calls[0][-1] == "torch==2.15.0" and "--no-deps" in calls[0]
    files = {str(each.relative_to(tree.folder)) for each in tree.folder.rglob("*") if each.is_file()}
    assert files == {"include/a.h", "lib/libc10.so", "version.py"}
    assert not (tmp_path / "downloads").exists()


def test_a_torch_for_another_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is asked for its wheel, which lies beside that for this processor."""

    def download(command: list[str]) -> subprocess.CompletedProcess[str]:
        machine = "aarch64" if "manylinux_2_28_aarch64" in command else "mine"
        folder = Path(command[command.index("-d") + 1])
        folder.mkdir()
        with zipfile.ZipFile(folder / "torch-2.15.0.whl", "w") as archive:
            archive.writestr("torch/include/of.h", machine)
            archive.writestr("torch/version.py", "__version__ = '2.15.0+cu132'\ncuda = '13.2'\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(wheel, "FOLDER", tmp_path)
    monkeypatch.setattr(wheel.subprocess, "run", download)
    trees = [wheel.unpacked("2.15.0", machine) for machine in ("aarch64", "", "aarch64")]
    assert [(tree.folder / "include" / "of.h").read_text() for tree in trees] == [
        "aarch64",
        "mine",
        "aarch64",
    ]


def test_a_download_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "FOLDER", tmp_path)
    monkeypatch.setattr(wheel.subprocess, "run", lambda command: subprocess.CompletedProcess(command, 1))
    with pytest.raises(ToolchainError, match=r"could not download torch 2\.15\.0"):
        wheel.unpacked("2.15.0")


def test_a_source_distribution_has_all_that_a_build_reads(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path),
         "sdist", "--dist-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = [ROOT / "csrc", ROOT / "build_tools", ROOT / "transformer_plugin"]
    files = {each for folder in folders for each in folder.rglob("*") if each.is_file()}
    needed = {
        str(each.relative_to(ROOT))
        for each in files
        if each.suffix != ".so" and "__pycache__" not in each.parts
    }
    assert needed | {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]
