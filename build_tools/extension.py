"""Sources, flags and names of the shared libraries.

The kernels are one library for a major version of CUDA. They use nothing of torch, so that it serves every torch. The
other library has the ops: it is built for a minor version of torch, and loads the kernels from its own folder.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_tools.compile import Build, Library, is_gcc
from build_tools.toolchain import architectures, check_compiler, job_count, torch_versions, use_cuda
from build_tools.torch_tree import TorchTree

# -ffp-contract=off and --fmad=false: a multiply and an add stay two roundings unless the source says fma,
# so that CPU and CUDA give the same bits. -fno-trapping-math changes no result; without it GCC vectorises no
# arithmetic under a condition.
CXX_FLAGS = [
    "-fPIC",
    "-DNDEBUG",
    "-fwrapv",
    "-std=c++20",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fopenmp",
]
CXX_FLAGS += ["-fno-math-errno", "-fno-trapping-math"]
CXX_FLAGS += ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-unknown-pragmas", "-g0"]
NVCC_FLAGS = ["-O3", "-std=c++20", "--compiler-options", "-fPIC", "--fmad=false", "--threads=1"]
NVCC_FLAGS += ["--expt-relaxed-constexpr", "--expt-extended-lambda"]
NVCC_FLAGS += [
    f"-D__CUDA_NO_{name}__"
    for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS")
]
# Device code that nobody has packed is five times as large. It is unpacked when a kernel is first called.
PACK_FLAGS = ["--compress-mode=size"]
LINK_FLAGS = ["-Wl,--no-undefined", "-Wl,--as-needed"]
# `make sanitize`.
SANITIZE_FLAGS = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
]

KERNELS, OPS = "transformer_plugin._kernels", "transformer_plugin._C"


def is_kernel(source: Path) -> bool:
    """Whether a host file has kernels for CPUs. The others check arguments and call."""
    return source.stem.endswith("_cpu") or source.parent.name == "cpu"


def host_flags(source: Path) -> list[str]:
    """The flags of a host file but for macros and folders. What CFLAGS says wins. With -O1, calls take 3 % longer."""
    flags = [*CXX_FLAGS, "-O3" if is_kernel(source) else "-O2", *shlex.split(os.environ.get("CFLAGS", ""))]
    return [*flags, *(SANITIZE_FLAGS if sanitize() else [])]


def sanitize() -> bool:
    """Whether this is the build that `make sanitize` runs the tests with."""
    return os.environ.get("TRANSFORMER_PLUGIN_SANITIZE") == "1"


@dataclass(frozen=True)
class Toolkit:
    """nvcc's folder above ``bin``, and what it compiles for."""

    home: Path
    archs: tuple[str, ...]  # such as 9.0a

    @property
    def nvcc(self) -> Path:
        return self.home / "bin" / "nvcc"

    @property
    def libraries(self) -> Path:
        """The folder of libcudart."""
        return self.home / "lib64" if (self.home / "lib64").exists() else self.home / "lib"

    @property
    def macros(self) -> list[str]:
        """What Hopper alone has is in the library if it is compiled for Hopper."""
        hopper = ["-DTRANSFORMER_PLUGIN_SM90A=1"] if "9.0a" in self.archs else []
        return ["-DTRANSFORMER_PLUGIN_CUDA=1", *hopper]


class Libraries:
    """The libraries for one torch: their names, and how they are built into a folder."""

    def __init__(self, root: Path, torch: TorchTree, toolkit: Toolkit | None, target: str = "") -> None:
        self.root, self.torch, self.toolkit = root, torch, toolkit
        self.target = target  # another processor or GPU than the usual, whose objects lie apart, or ""
        cuda = torch.cuda if toolkit else None
        self.ops = torch_versions.library_name(torch.version, cuda)
        self.kernels = torch_versions.kernels_name(cuda) if cuda else None

    @property
    def names(self) -> dict[str, str]:
        """The files by the names of their extensions, in the order in which they are built."""
        kernels = {KERNELS: self.kernels} if self.kernels else {}
        return {**kernels, OPS: self.ops}

    def build(self, folder: Path) -> None:
        """Makes the libraries in a folder. Object files lie in build/, where every way to build finds them again."""
        folder = folder.resolve()
        if self.kernels:
            self.build_kernels(folder)
        kind = "asan" if sanitize() else re.sub(r"^_C\.|\.so$", "", self.ops)
        self._run(kind, self._ops(folder), is_gcc(_cxx()) and not sanitize())

    def build_kernels(self, folder: Path) -> Path:
        """Makes theirs alone. What is built for one torch is there for the next: their folder names no torch."""
        assert self.kernels
        library = self._kernels(folder.resolve())
        self._run(re.sub(r"^_kernels\.|\.so$", "", self.kernels), library, False)
        return library.path

    def _run(self, kind: str, library: Library, precompiles: bool) -> None:
        objects = self.root / "build" / (f"{kind}.{self.target}" if self.target else kind) / "objects"
        nvcc = self.toolkit.nvcc if self.toolkit else None
        jobs = int(os.environ.get("MAX_JOBS", job_count()))
        Build(self.root, objects, _cxx(), nvcc, [library], precompiles).run(jobs)

    def _sources(self, suffix: str) -> list[Path]:
        return sorted((self.root / "csrc").rglob(f"*{suffix}"))

    def _kernels(self, folder: Path) -> Library:
        """The .cu files."""
        assert self.kernels and self.toolkit
        flags = [
            *host_compiler(),
            *NVCC_FLAGS,
            *(PACK_FLAGS if self.torch.cuda_major >= 13 else []),
            *self.toolkit.macros,
        ]
        flags += [
            "-Icsrc",
            *(code for arch in self.toolkit.archs for code in generate_code(arch)),
        ]
        script = self.root / "build_tools" / "kernels.map"
        link = [*LINK_FLAGS, f"-Wl,-soname,{self.kernels}", f"-Wl,--version-script={script}"]
        link += [f"-L{self.toolkit.libraries}", "-lcudart", *shlex.split(os.environ.get("LDFLAGS", ""))]
        return Library(folder / self.kernels, dict.fromkeys(self._sources(".cu"), flags), link, [script])

    def _ops(self, folder: Path) -> Library:
        """The .cpp files."""
        includes = ["-Icsrc", *(f"-I{each}" for each in self.torch.includes)]
        # The headers name themselves in errors.
        includes.append(f"-ffile-prefix-map={self.torch.folder}=torch")
        # Another patch release has other commands: its headers may be older than the objects.
        includes.append(f"-DTRANSFORMER_PLUGIN_TORCH={self.torch.version}")
        link = ["-fopenmp", *(SANITIZE_FLAGS[:1] if sanitize() else LINK_FLAGS), f"-L{self.torch.libraries}"]
        link += ["-lc10", "-ltorch", "-ltorch_cpu"]
        needs = []
        if self.toolkit:
            assert self.kernels
            includes += [*self.toolkit.macros, f"-I{self.toolkit.home / 'include'}"]
            link += [f"-L{self.toolkit.libraries}", "-lc10_cuda", "-ltorch_cuda", "-lcudart"]
            link += [f"-L{folder}", f"-l:{self.kernels}", "-Wl,-rpath,$ORIGIN"]
            needs = [folder / self.kernels]
        # Without CUDA nothing calls the functions that launch kernels.
        silent = [] if self.toolkit else ["-Wno-unused-function"]
        flags = {source: [*includes, *host_flags(source), *silent] for source in self._sources(".cpp")}
        return Library(folder / self.ops, flags, [*link, *shlex.split(os.environ.get("LDFLAGS", ""))], needs)


def _cxx() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


def host_compiler() -> list[str]:
    """nvcc's flag for the host compiler that CC or CXX names; without it nvcc takes the system's."""
    named = shlex.split(os.environ.get("CC") or os.environ.get("CXX") or "")
    return ["-ccbin", named[-1]] if named and not os.environ.get("NVCC_CCBIN") else []


def generate_code(arch: str) -> list[str]:
    """nvcc's flags for an entry of TORCH_CUDA_ARCH_LIST: 9.0a, or 12.0a+PTX with code for the driver too."""
    number = arch.removesuffix("+PTX").replace(".", "")
    flags = ["-gencode", f"arch=compute_{number},code=sm_{number}"]
    return (
        [*flags, "-gencode", f"arch=compute_{number},code=compute_{number}"]
        if arch.endswith("+PTX")
        else flags
    )


def libraries(root: Path) -> Libraries:
    """Those for the torch that is installed. They hold no Python symbol, so that one build serves every Python from
    3.10."""
    check_compiler()
    torch = TorchTree.installed()
    home = use_cuda(torch.version, torch.cuda)
    return Libraries(root, torch, Toolkit(home, architectures()) if home else None)


def remove_others(folder: Path, keep: set[str]) -> None:
    """Removes the libraries of earlier builds from a folder."""
    for path in [*folder.glob("_C.*so"), *folder.glob("_kernels.*so")]:
        if path.name not in keep:
            path.unlink()


def remove_ops_of_other_kernels(folder: Path, kernels: Path, keep: str) -> None:
    """Removes libraries for other versions of torch if the kernels in their folder are about to be replaced by other
    ones, whose arguments may differ from those that the libraries were compiled with."""
    there = folder / kernels.name
    if there.exists() and there.read_bytes() == kernels.read_bytes():
        return
    for path in folder.glob(f"_C.torch*{kernels.name.removeprefix('_kernels')}"):
        if path.name != keep:
            path.unlink()


def build_command(built: Libraries) -> Any:
    """setuptools' command, which builds the libraries and leaves the rest of its work as it is."""
    from setuptools.command.build_ext import build_ext

    class BuildLibraries(build_ext):
        def get_ext_filename(self, fullname: str) -> str:
            *folders, name = fullname.split(".")  # the helpers ask with and without the package
            return str(Path(*folders, built.names[f"transformer_plugin.{name}"]))

        def run(self) -> None:
            folder = Path(self.build_lib, "transformer_plugin")
            folder.mkdir(parents=True, exist_ok=True)
            built.build(folder)
            if not self.inplace:  # a wheel takes what lies in its folder
                return remove_others(folder, {*built.names.values()})
            if built.kernels:
                package = Path(self.get_finalized_command("build_py").get_package_dir("transformer_plugin"))
                remove_ops_of_other_kernels(package, folder / built.kernels, built.ops)
            self.copy_extensions_to_source()

    return BuildLibraries
