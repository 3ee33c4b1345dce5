"""Compiles and links shared libraries with ninja: which file with which flags, and behind which precompiled header.

Host files read torch's headers precompiled. Most of the time of a file that does little is spent in templates that
these headers name, and that the compiler instantiates for each object file. So there are two precompiled headers: one
with what registers ops and gradients and with process groups, and a small one for files that include none of these. And
files that read the large one are compiled several at once, as one unit, which takes less than half of the time. A file
still includes what it uses: compilers other than GCC get each file alone, without a precompiled header.

The compilers run in the folder of the sources and are given paths from there on, so that no library names the folder in
which it was built.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import zlib
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
        "torch/csrc/distributed/c10d/ProcessGroup.hpp",
        "torch/library.h",
    ),
    "tensor": ("ATen/core/Tensor.h",),
}
#: The header whose files are compiled several at once.
UNITED = "library"
#: Of fewer files, reading the headers takes less time than precompiling them.
FEWEST_FILES = 6
# Of torch's headers, which silence it by pragmas that a precompiled header forgets.
SILENT = "-Wno-sign-compare"

RULES = """ninja_required_version = 1.5
rule cxx
  command = $cxx -MMD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = $what
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
        command = [find_ninja(), "-C", str(self.root), "-f", str(file), "-j", str(jobs)]
        command += ["-v"] if os.environ.get("VERBOSE") == "1" else []
        cache = {"CCACHE_SLOPPINESS": "pch_defines,time_macros"}  # what ccache wants for precompiled headers
        if subprocess.run(command, env={**cache, **os.environ}).returncode != 0:
            raise ToolchainError("a file did not compile; its errors are above. VERBOSE=1 shows the commands")

    def text(self) -> str:
        """What ninja reads."""
        launcher = [*_ccache(), *self.cxx]
        lines = [f"builddir = {_escaped(self._path(self.folder))}", f"cxx = {shlex.join(launcher)}"]
        lines += [f"nvcc = {shlex.join([*_ccache(), str(self.nvcc)])}", RULES]
        includes = Includes(self.root / "csrc")
        headers = self._headers(lines, includes) if self.precompiles else {}
        for library in self.libraries:
            objects = []
            for source, flags in library.flags_of.items():
                if source.suffix == ".cu":
                    objects.append(self._object(source))
                    lines += self._edge("nvcc", objects[-1], [source], flags)
            for key, sources in self._host_files(library, includes).items():
                unites = self.precompiles and key[0] == UNITED
                for unit in units(sources) if unites else [[source] for source in sources]:
                    objects.append(self._host_object(lines, unit, shlex.split(key[1]), headers.get(key)))
            lines += self._edge("link", library.path, objects, library.link, library.needs)
        return "\n".join(lines) + "\n"

    def _host_object(self, lines: list[str], unit: list[Path], flags: list[str], header: Path | None) -> Path:
        """Adds to the lines how the object file of these sources is made."""
        source = unit[0] if len(unit) == 1 else self._unit(unit)
        made = self._object(source)
        of_unit = ["-iquote", "."] if len(unit) > 1 else []  # it includes its files by their paths
        with_header = _with(self._path(header)) if header else []
        before = [_made(header)] if header else []
        lines += self._edge("cxx", made, [source], [*flags, *of_unit, *with_header], before)
        lines.append(f"  what = {' '.join(str(self._path(each)) for each in unit)}")
        return made

    def _path(self, path: Path) -> Path:
        """From the folder of the sources on, where ninja runs, for what lies in it."""
        return path.relative_to(self.root) if path.is_relative_to(self.root) else path

    def _edge(
        self, rule: str, made: Path, of: list[Path], flags: list[str], before: list[Path] | None = None
    ) -> list[str]:
        names = " ".join(_escaped(self._path(each)) for each in of)
        needs = f" | {' '.join(_escaped(self._path(each)) for each in before)}" if before else ""
        return [
            f"build {_escaped(self._path(made))}: {rule} {names}{needs}",
            f"  flags = {shlex.join(flags).replace('$', '$$')}",
        ]

    def _object(self, source: Path) -> Path:
        of = self.folder if source.is_relative_to(self.folder) else self.root
        return self.folder / source.relative_to(of).with_suffix(".o")

    def _unit(self, sources: list[Path]) -> Path:
        """The file that includes these."""
        text = "".join(f'#include "{self._path(source)}"\n' for source in sources)
        path = self.folder / "units" / f"{sources[0].stem}_{zlib.crc32(text.encode()):08x}.cpp"
        _write(path, text)
        return path

    def _host_files(self, library: Library, includes: Includes) -> dict[tuple[str, str], list[Path]]:
        """The files by the name of their precompiled header and by their flags."""
        found: dict[tuple[str, str], list[Path]] = {}
        for source, flags in library.flags_of.items():
            if source.suffix != ".cu":
                found.setdefault((includes.precompiled(source), shlex.join(flags)), []).append(source)
        return found

    def _headers(self, lines: list[str], includes: Includes) -> dict[tuple[str, str], Path]:
        """Adds the precompiled headers to the lines; returns them by their names and the flags of what reads them."""
        keys = Counter[tuple[str, str]]()
        for library in self.libraries:
            keys.update({key: len(files) for key, files in self._host_files(library, includes).items()})
        headers = {}
        for (name, flags), files in keys.items():
            if not name or files < FEWEST_FILES:
                continue
            path = self.folder / "precompiled" / f"{name}{len(headers)}.h"
            _write(path, "".join(f"#include <{header}>\n" for header in PRECOMPILED[name]))
            lines += self._edge("header", _made(path), [path], [*shlex.split(flags), SILENT])
            headers[name, flags] = path
        return headers


def units(sources: list[Path]) -> list[list[Path]]:
    """The files that are compiled at once: each in another namespace, because files of one namespace may give the same
    name to different things that nobody else sees. Files of a namespace come before those of the one around it, whose
    own things they would see. A file in no namespace, or in several, is alone."""
    of_namespace: dict[str, list[Path]] = {}
    alone = []
    for source in sources:
        names = {*re.findall(r"^namespace (\w[\w:]*) \{", source.read_text(), re.MULTILINE)}
        if len(names) == 1:
            of_namespace.setdefault(names.pop(), []).append(source)
        else:
            alone.append([source])
    together: list[list[Path]] = [[] for _ in range(max(map(len, of_namespace.values()), default=0))]
    # As many units as the largest namespace has files; each namespace goes on where the one before ended.
    inner_first = sorted(of_namespace.items(), reverse=True)
    for number, source in enumerate(source for _, files in inner_first for source in files):
        together[number % len(together)].append(source)
    return [*together, *alone]


def _write(path: Path, text: str) -> None:
    """Only if the file has another text, so that what is made from it is not made again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _made(header: Path) -> Path:
    return header.with_name(f"{header.name}.gch")


def _with(header: Path) -> list[str]:
    """Flags of a file that reads a precompiled header. ccache has to see which, in the preprocessed file."""
    return [SILENT, "-include", str(header), *(["-fpch-preprocess"] if _ccache() else [])]


def _escaped(path: Path | str) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


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
