"""torch's headers are precompiled if that helps, and the build continues without them otherwise."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from build_tools import precompiled
from tests.packaging.test_toolchain import program

GCC = "c++ (Debian 12.2.0-14) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc."


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("TRANSFORMER_PLUGIN_SANITIZE", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_helps_gcc_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not precompiled.helps("c++")
    program(path, "c++", GCC)
    assert precompiled.helps("c++")
    assert not precompiled.helps("ccache c++")
    program(path, "clang++", "Debian clang version 14.0.6")
    assert not precompiled.helps("clang++")
    program(path / "lib", "ccache", GCC)
    (path / "g++").symlink_to(path / "lib" / "ccache")
    assert not precompiled.helps("g++")
    monkeypatch.setenv("TRANSFORMER_PLUGIN_SANITIZE", "1")
    assert not precompiled.helps("c++")


def real_gcc() -> str:
    """A GCC that is not wrapped by ccache."""
    for folder in os.get_exec_path():
        compiler = shutil.which("g++", path=folder)
        if compiler and precompiled.helps(compiler):
            return compiler
    pytest.skip("no g++ here that precompiles")


@pytest.mark.parametrize(("text", "given"), [("#include <vector>\n", True), ("#error no\n", False)])
def test_a_header(text: str, given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", real_gcc())
    (tmp_path / "one.h").write_text(text)
    monkeypatch.setattr(precompiled, "HEADERS", ("one.h",))
    base = SimpleNamespace(compiler_so=["c++", "-fPIC"], include_dirs=[str(tmp_path)])
    extension = SimpleNamespace(
        define_macros=[("A", "1"), ("B", None)], include_dirs=[], extra_compile_args={"cxx": ["-std=c++20"]}
    )
    made = tmp_path / "build" / "precompiled" / "torch.h.gch"
    precompiled.include_precompiled(extension, base, tmp_path / "build")
    header = str(made.with_suffix(""))
    assert made.exists() == given
    assert extension.extra_compile_args["cxx"][1:] == (
        ["-Wno-sign-compare", "-include", header] if given else []
    )
    if given:  # once for the same flags, again for others
        times = []
        for flags in (["-std=c++20"], ["-std=c++20", "-O1"]):
            os.utime(made, (1, 1))
            extension.extra_compile_args["cxx"] = list(flags)
            precompiled.include_precompiled(extension, base, tmp_path / "build")
            times.append(made.stat().st_mtime == 1)
        assert times == [True, False]
