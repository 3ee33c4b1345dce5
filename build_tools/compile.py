"""Compiles and links shared libraries with ninja: which file with which flags, and behind which precompiled header.

Host files read torch's headers precompiled. Most of the time of a file that does little is spent in templates that
these headers name, so there are two: one with what registers ops and gradients, and a small one for files that include
neither. A file still includes what it uses. Compilers other than GCC read the headers themselves.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from build_tools.toolchain import ToolchainError

#: The headers that are precompiled for the files that include one of them, the first that applies.
PRECOMPILED = {
    "library": (
        "ATen/core/dispatch/Dispatcher.h",
        "torch/csrc/autograd/custom_function.h",
        "torch/csrc/autograd/function.h",
        "torch/library.h",
    ),
    "tensor": ("ATen/core/Tensor.h",),
}
#: Of fewer files, reading the headers takes less time than precompiling them.
FEWEST_FILES = 6
# Of torch's headers, which silence it by pragmas that a precompiled header forgets.
SILENT = "-Wno-sign-compare"

RULES = """ninja_required_version = 1.5
rule cxx
  command = $cxx -MMD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = $in
rule header
  command = $cxx -MMD -MF $out.d $flags -x c++-header $in -o $out
  depfile = $out.d
  deps = gcc
  description = headers of torch, precompiled: $out
rule nvcc
  command = $nvcc -MD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = $in
rule link
  command = $cxx -shared @$out.rsp -o $out $flags
  rspfile = $out.rsp
  rspfile_content = $in
  description = $out
"""


@dataclass
class Library:
    """A shared library: ``flags_of`` are those of each source, ``link`` those behind the object files."""

    path: Path
    flags_of: dict[Path, list[str]]
    link: list[str]
    needs: list[Path] = field(default_factory=list)  # files that are made before it is linked


@dataclass
class Build:
    """Libraries whose object files lie in ``folder``, beside the file that says how they were made."""

    root: Path  # of the sources
    folder: Path
    cxx: list[str]
    nvcc: Path | None
    libraries: list[Library]
    precompiles: bool = True

    def run(self, jobs: int) -> None:
        """Makes what is missing or older than what it is made from."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "build.ninja"
        text = self.text()
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        command = [find_ninja(), "-f", str(file), "-j", str(jobs)]
        command += ["-v"] if os.environ.get("VERBOSE") == "1" else []
        cache = {"CCACHE_SLOPPINESS": "pch_defines,time_macros"}  # what ccache wants for precompiled headers
        if subprocess.run(command, env={**cache, **os.environ}).returncode != 0:
            raise ToolchainError("a file did not compile; its errors are above. VERBOSE=1 shows the commands")

    def text(self) -> str:
        """What ninja reads."""
        launcher = [*_ccache(), *self.cxx]
        lines = [f"builddir = {_escaped(self.folder)}", f"cxx = {shlex.join(launcher)}"]
        lines += [f"nvcc = {shlex.join([*_ccache(), str(self.nvcc)])}", RULES]
        includes = Includes(self.root / "csrc")
        headers = self._headers(lines, includes) if self.precompiles else {}
        for library in self.libraries:
            objects = []
            for source, flags in library.flags_of.items():
                made = self.folder / source.relative_to(self.root).with_suffix(".o")
                objects.append(made)
                if source.suffix == ".cu":
                    lines += _edge("nvcc", made, [source], flags)
                    continue
                header = headers.get((includes.precompiled(source), shlex.join(flags)))
                lines += _edge(
                    "cxx", made, [source], [*flags, *_with(header)], [_made(header)] if header else []
                )
            lines += _edge("link", library.path, objects, library.link, library.needs)
        return "\n".join(lines) + "\n"

    def _headers(self, lines: list[str], includes: Includes) -> dict[tuple[str, str], Path]:
        """Adds the precompiled headers to the lines; returns them by their names and the flags of what reads them."""
        keys = Counter(
            (includes.precompiled(source), shlex.join(flags))
            for library in self.libraries
            for source, flags in library.flags_of.items()
            if source.suffix != ".cu"
        )
        headers = {}
        for (name, flags), files in keys.items():
            if not name or files < FEWEST_FILES:
                continue
            path = self.folder / "precompiled" / f"{name}{len(headers)}.h"
            path.parent.mkdir(parents=True, exist_ok=True)
            text = "".join(f"#include <{header}>\n" for header in PRECOMPILED[name])
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
            lines += _edge("header", _made(path), [path], [*shlex.split(flags), SILENT])
            headers[name, flags] = path
        return headers


def _made(header: Path) -> Path:
    return header.with_name(f"{header.name}.gch")


def _with(header: Path | None) -> list[str]:
    """Flags of a file that reads a precompiled header. ccache has to see which, in the preprocessed file."""
    if header is None:
        return []
    return [SILENT, "-include", str(header), *(["-fpch-preprocess"] if _ccache() else [])]


def _escaped(path: Path | str) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


def _edge(
    rule: str, made: Path, of: list[Path], flags: list[str], before: list[Path] | None = None
) -> list[str]:
    names = " ".join(_escaped(each) for each in of)
    needs = f" | {' '.join(_escaped(each) for each in before)}" if before else ""
    return [
        f"build {_escaped(made)}: {rule} {names}{needs}",
        f"  flags = {shlex.join(flags).replace('$', '$$')}",
    ]


class Includes:
    """The headers of others that files include, themselves or through ours, which lie in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, dict[Path, set[str]]()

    def of(self, file: Path) -> set[str]:
        """Those of one file."""
        if file not in self._known:
            found = self._known[file] = set()
            for quote, name in re.findall(r'^#include ([<"])([^>"]+)', file.read_text(), re.MULTILINE):
                if quote == "<":
                    found.add(name)
                elif (self._folder / name).exists():
                    found |= self.of(self._folder / name)
        return self._known[file]

    def precompiled(self, file: Path) -> str:
        """Which of the precompiled headers a file reads, or ""."""
        includes = self.of(file)
        return next((name for name, headers in PRECOMPILED.items() if includes & {*headers}), "")


def _ccache() -> tuple[str, ...]:
    """ccache before the compiler, where it is installed and the compiler is not already ccache."""
    found = shutil.which("ccache")
    if found is None or os.environ.get("CCACHE_DISABLE"):
        return ()
    compiler = shutil.which(os.environ.get("CXX", "c++").split()[0])
    return () if compiler and _is_ccache(compiler) else (found,)


def _is_ccache(program: str) -> bool:
    return "ccache" in Path(program).resolve().name


def is_gcc(cxx: list[str]) -> bool:
    """GCC precompiles headers; what calls it may not pass them on."""
    name = shutil.which(cxx[0])
    if name is None or len(cxx) > 1 or _is_ccache(name):
        return False
    banner = subprocess.run([name, "--version"], capture_output=True, text=True).stdout
    return "Free Software Foundation" in banner and "clang" not in banner


def find_ninja() -> str:
    """ninja of the package of that name, or of the system."""
    found = shutil.which("ninja")
    try:
        import ninja

        of_package = Path(
            ninja.BIN_DIR, "ninja"
        )  # the folder is "" where the package came without its program
        found = str(of_package) if ninja.BIN_DIR and of_package.exists() else found
    except ImportError:
        pass
    if found is None:
        raise ToolchainError("found no ninja, which runs the compilers. Run `pip install ninja`")
    return found
