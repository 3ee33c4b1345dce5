"""What is compiled again after which change, what at once and with which precompiled header, and builds against a torch
that is not installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from build_tools import compile as compiling
from build_tools.compile import Build, Library, is_gcc
from build_tools.extension import Libraries
from build_tools.toolchain import ToolchainError
from build_tools.torch_tree import TorchTree
from tests.packaging.test_toolchain import program

GCC = "c++ (Debian 12.2.0-14) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc."


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_gcc_precompiles(path: Path) -> None:
    assert not is_gcc(["c++"])
    program(path, "c++", GCC)
    assert is_gcc(["c++"])
    assert not is_gcc(["ccache", "c++"])
    program(path, "clang++", "Debian clang version 14.0.6")
    assert not is_gcc(["clang++"])
    program(path / "lib", "ccache", GCC)
    (path / "g++").symlink_to(path / "lib" / "ccache")
    assert not is_gcc(["g++"])


def test_ccache_is_used_where_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CCACHE_DISABLE", raising=False)
    program(path, "c++", GCC)
    assert compiling._ccache() == ()
    cache = program(path, "ccache", "ccache version 4.7.5")
    assert compiling._ccache() == (str(cache),)
    monkeypatch.setenv("CCACHE_DISABLE", "1")
    assert compiling._ccache() == ()
    monkeypatch.delenv("CCACHE_DISABLE")
    (path / "c++").unlink()
    (path / "c++").symlink_to(cache)  # not twice
    assert compiling._ccache() == ()


class Project:
    """Files that include headers ``one.h`` and ``ATen/core/Tensor.h`` of a folder, compiled to a library."""

    def __init__(self, root: Path, files: int) -> None:
        self.root, self.library = root, root / "library.so"
        self.includes = root / "include"
        (root / "csrc").mkdir()
        for header in (self.includes / name for names in compiling.PRECOMPILED.values() for name in names):
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text("#pragma once\n#include <ATen/core/Tensor.h>\n")
        (self.includes / "ATen/core/Tensor.h").write_text("#pragma once\ninline int torchs() { return 1; }\n")
        (root / "csrc" / "ours.h").write_text("#pragma once\n#include <ATen/core/Tensor.h>\n")
        self.sources = []
        for number in range(files):
            source = root / "csrc" / f"file{number}.cpp"
            source.write_text(f'#include "ours.h"\nint value{number}() {{ return torchs(); }}\n')
            self.sources.append(source)

    def build(self, flags: tuple[str, ...] = ("-O0",)) -> set[str]:
        """Returns the object files that were made."""
        folder = self.root / "objects"
        before = {each: each.stat().st_mtime_ns for each in folder.rglob("*.o")}
        own = ["-fPIC", "-std=c++20", f"-I{self.root / 'csrc'}", f"-I{self.includes}", *flags]
        library = Library(self.library, dict.fromkeys(self.sources, own), [])
        Build(self.root, folder, [gcc()], None, [library]).run(2)
        return {each.name for each in folder.rglob("*.o") if before.get(each) != each.stat().st_mtime_ns}


def gcc() -> str:
    """A GCC that is not wrapped by ccache."""
    for folder in os.get_exec_path():
        compiler = shutil.which("g++", path=folder)
        if compiler and is_gcc([compiler]):
            return compiler
    pytest.skip("no g++ here that precompiles")


@pytest.mark.parametrize("cached", [False, True])
def test_what_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    if not cached:
        monkeypatch.setenv("CCACHE_DISABLE", "1")
    monkeypatch.setenv("CCACHE_DIR", str(tmp_path / "cache"))
    project = Project(tmp_path, compiling.FEWEST_FILES + 1)
    everything = {f"file{number}.o" for number in range(compiling.FEWEST_FILES + 1)}
    assert project.build() == everything
    assert project.build() == set()
    project.sources[2].write_text("int other() { return 2; }\n")
    assert project.build() == {"file2.o"}
    (tmp_path / "csrc" / "ours.h").write_text("#pragma once\n#include <ATen/core/Tensor.h>\nint x();\n")
    assert project.build() == everything - {"file2.o"}
    header = project.includes / "ATen/core/Tensor.h"  # in the precompiled header alone
    header.write_text(header.read_text() + "int y();\n")
    assert project.build() == everything - {"file2.o"}
    assert project.build(("-O1",)) == everything
    symbols = subprocess.run(["nm", "-DC", str(project.library)], capture_output=True, text=True).stdout
    assert {f"value{number}()" in symbols for number in (0, 1, 3)} == {True} and "other()" in symbols


def test_ccache_finds_objects_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files that read a precompiled header too."""
    if shutil.which("ccache") is None:
        pytest.skip("ccache is not installed")
    monkeypatch.delenv("CCACHE_DISABLE", raising=False)
    monkeypatch.setenv("CCACHE_DIR", str(tmp_path / "cache"))
    project = Project(tmp_path, compiling.FEWEST_FILES)

    def hits() -> int:
        done = subprocess.run(["ccache", "--print-stats"], capture_output=True, text=True, check=True)
        counts = dict(line.split() for line in done.stdout.splitlines())
        return int(counts["direct_cache_hit"]) + int(counts["preprocessed_cache_hit"])

    project.build()
    assert hits() == 0
    shutil.rmtree(tmp_path / "objects")
    project.build()
    assert hits() == compiling.FEWEST_FILES + 1  # and the header


def test_a_file_reads_the_header_of_what_it_includes(tmp_path: Path) -> None:
    project = Project(tmp_path, 2 * compiling.FEWEST_FILES)
    for source in project.sources[: compiling.FEWEST_FILES]:
        source.write_text("#include <torch/library.h>\n" + source.read_text().replace("torchs()", "0"))
    few = [tmp_path / "csrc" / f"few{number}.cpp" for number in range(2)]
    for number, source in enumerate(few):
        source.write_text(f"int few{number}() {{ return 0; }}\n")
    library = Library(project.library, {each: ["-O1"] for each in [*project.sources, *few]}, [])
    lines = Build(tmp_path, tmp_path / "objects", [gcc()], None, [library]).text().splitlines()
    reads = {}
    for line, flags in pairwise(lines):
        if line.startswith("build ") and ": cxx " in line:
            name = Path(line.split()[1].rstrip(":")).stem
            reads[name] = next(
                (name for name in ("library", "tensor") if f"precompiled/{name}" in flags), None
            )
    for number in range(2 * compiling.FEWEST_FILES):
        assert reads[f"file{number}"] == ("library" if number < compiling.FEWEST_FILES else "tensor")
    assert reads["few0"] is None and reads["few1"] is None


def test_files_of_different_namespaces_are_one_unit(tmp_path: Path) -> None:
    def write(name: str, text: str) -> Path:
        path = tmp_path / f"{name}.cpp"
        path.write_text(text)
        return path

    def of(namespace: str, name: str) -> Path:
        return write(
            name,
            f"namespace p::{namespace} {{\nnamespace {{ int same; }}\nint {name}() {{ return same; }}\n}}\n",
        )

    a, b = [of("a", f"a{number}") for number in range(3)], [of("b", f"b{number}") for number in range(2)]
    c = of("c", "c0")
    none, two = write("none", "int none;\n"), write("two", "namespace p::a {\n}\nnamespace p::b {\n}\n")
    found = compiling.units([*a, none, *b, two, c])
    assert found == [[c, a[0]], [b[0], a[1]], [b[1], a[2]], [none], [two]]  # b::x before b, were there one
    assert compiling.units([none]) == [[none]] and compiling.units([]) == []


def test_a_unit_is_compiled_again_with_each_of_its_files(tmp_path: Path) -> None:
    project = Project(tmp_path, compiling.FEWEST_FILES)
    for number, source in enumerate(project.sources):
        source.write_text(
            f"#include <torch/library.h>\nnamespace p::n{number % 3} {{\n"
            "namespace { int same() { return torchs(); } }\n"
            f"int value{number}() {{ return same(); }}\n}}\n"
        )
    assert len(project.build()) == 2  # of three files each
    assert project.build() == set()
    project.sources[4].write_text(project.sources[4].read_text() + "int more() { return 0; }\n")
    assert len(project.build()) == 1
    symbols = subprocess.run(["nm", "-DC", str(project.library)], capture_output=True, text=True).stdout
    names = [f"p::n{number % 3}::value{number}()" for number in range(compiling.FEWEST_FILES)]
    assert all(name in symbols for name in [*names, "more()"])
    project.sources[0].write_text(project.sources[0].read_text().replace("p::n0", "p::n1"))  # other units
    assert len(project.build()) > 1


def test_errors_of_the_compiler_end_the_build(tmp_path: Path) -> None:
    project = Project(tmp_path, 1)
    project.sources[0].write_text("#error no\n")
    with pytest.raises(ToolchainError, match="a file did not compile"):
        project.build()


def test_no_ninja(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(BIN_DIR=str(path / "package"))
    monkeypatch.setitem(sys.modules, "ninja", package)
    own = program(path / "package", "ninja", "1.13.0")
    assert compiling.find_ninja() == str(own)
    own.unlink()
    own = program(path, "ninja", "1.12.0")  # of the system
    assert compiling.find_ninja() == str(own)
    own.unlink()
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(
        ToolchainError, match=r"found no ninja, which runs the compilers\. Run `pip install ninja`"
    ):
        compiling.find_ninja()


def test_an_unpacked_torch(tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.15.0+cu132'\ncuda: Optional[str] = '13.2'\n"
    )
    tree = TorchTree.unpacked(tmp_path)
    assert (tree.version, tree.cuda, tree.cuda_major) == ("2.15.0+cu132", "13.2", 13)
    (tmp_path / "version.py").write_text("__version__ = '2.15.0+cpu'\ncuda = None\n")
    assert TorchTree.unpacked(tmp_path).cuda_major == 0


def test_the_installed_torch() -> None:
    import torch

    tree = TorchTree.installed()
    assert (tree.version, tree.cuda) == (torch.__version__, torch.version.cuda)
    assert (tree.includes[0] / "ATen" / "core" / "Tensor.h").exists() and any(
        tree.libraries.glob("libc10.so")
    )


def test_another_patch_release_of_torch_compiles_again(tmp_path: Path) -> None:
    """Its headers may be older than the object files of the first, and lie in the same folder."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.cpp").touch()

    def commands(version: str) -> str:
        (tmp_path / "version.py").write_text(f"__version__ = {version!r}\ncuda = None\n")
        Libraries(tmp_path, TorchTree.unpacked(tmp_path), None).build(tmp_path)
        return (tmp_path / "build" / "torch2.11.cpu" / "objects" / "build.ninja").read_text()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, ""))
        assert commands("2.11.0") == commands("2.11.0") != commands("2.11.1")


def test_united_files_have_nothing_outside_of_their_namespace() -> None:
    """The next file of the unit would see it."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "csrc").is_dir():
        pytest.skip("needs the source tree")
    includes = compiling.Includes(root / "csrc")
    sources = [
        each for each in (root / "csrc").rglob("*.cpp") if includes.precompiled(each) == compiling.UNITED
    ]
    united = [source for unit in compiling.units(sources) if len(unit) > 1 for source in unit]
    assert len(united) > 100
    for source in united:
        text = re.sub(r"//.*|/\*.*?\*/", "", source.read_text())
        assert len(re.findall(r"^namespace \w", text, re.MULTILINE)) == 1, source
        outside = re.sub(r"^namespace \w.*^\}", "", text, flags=re.DOTALL | re.MULTILINE)
        others = [
            line
            for line in outside.splitlines()
            if line.strip() and not re.match(r"#(include|if|endif|else)", line)
        ]
        assert not others, (source, others)
        assert "#define" not in text, source
