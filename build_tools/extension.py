"""Sources, flags and names of the shared libraries.

The kernels are one library for a major version of CUDA. They use nothing of torch, so that it serves every torch. The
other library has the ops: it is built for a minor version of torch, and loads the kernels from its own folder.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from build_tools.precompiled import include_precompiled
from build_tools.toolchain import check_compiler, job_count, toolkit_of_torch, torch_versions, use_cuda

# -ffp-contract=off and --fmad=false: a multiply and an add stay two roundings unless the source says fma,
# so that CPU and CUDA give the same bits. -fno-trapping-math changes no result; without it GCC vectorises no
# arithmetic under a condition.
CXX_FLAGS = ["-std=c++20", "-fvisibility=hidden", "-ffp-contract=off", "-fopenmp"]
CXX_FLAGS += ["-fno-math-errno", "-fno-trapping-math"]
CXX_FLAGS += ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-unknown-pragmas", "-g0"]
NVCC_FLAGS = ["-O3", "-std=c++20", "--fmad=false", "--threads=1", "-lineinfo"]
NVCC_FLAGS += ["--expt-relaxed-constexpr", "--expt-extended-lambda"]
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


def optimization() -> list[str]:
    """What CFLAGS says wins. torch's build helper puts our flags behind it."""
    return [] if re.search(r"(^|\s)-O", os.environ.get("CFLAGS", "")) else ["-O3"]


def sanitize() -> bool:
    """Whether this is the build that `make sanitize` runs the tests with."""
    return os.environ.get("TRANSFORMER_PLUGIN_SANITIZE") == "1"


def libraries(root: Path) -> list[Any]:
    """The extensions, in the order in which they are built. They hold no Python symbol, so that one build serves every
    Python from 3.10."""
    check_compiler()
    cuda = use_cuda()
    os.environ.setdefault("MAX_JOBS", str(job_count()))
    # torch's build helper looks for ninja on the PATH, where a virtual environment that is not active has none.
    os.environ["PATH"] = os.pathsep.join(
        [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    )
    return [_kernels(root), _ops(root, cuda)] if cuda else [_ops(root, cuda)]


def _sources(root: Path, suffix: str) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in (root / "csrc").rglob(f"*{suffix}"))


def _macros() -> list[tuple[str, str | None]]:
    macros: list[tuple[str, str | None]] = [("TRANSFORMER_PLUGIN_CUDA", "1")]
    if "9.0a" in os.environ["TORCH_CUDA_ARCH_LIST"]:  # what Hopper alone has is in it
        macros.append(("TRANSFORMER_PLUGIN_SM90A", "1"))
    return macros


def _kernels(root: Path) -> Any:
    """The .cu files."""
    from torch.utils.cpp_extension import CUDAExtension

    kernels = CUDAExtension(
        KERNELS,
        _sources(root, ".cu"),
        define_macros=_macros(),
        extra_compile_args={"nvcc": NVCC_FLAGS + (PACK_FLAGS if toolkit_of_torch() >= 13 else [])},
        extra_link_args=[
            *LINK_FLAGS,
            f"-Wl,-soname,{torch_versions.kernels_name(_cuda())}",
            f"-Wl,--version-script={root / 'build_tools' / 'kernels.map'}",
        ],
        py_limited_api=True,
    )
    kernels.include_dirs, kernels.libraries = [str(root / "csrc")], ["cudart"]  # and not torch's
    return kernels


def _ops(root: Path, cuda: bool) -> Any:
    """The .cpp files."""
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    linked = ["-fopenmp", "-Wl,-rpath,$ORIGIN", *LINK_FLAGS] if cuda else ["-fopenmp", *LINK_FLAGS]
    return (CUDAExtension if cuda else CppExtension)(
        OPS,
        _sources(root, ".cpp"),
        include_dirs=[str(root / "csrc")],
        define_macros=[("Py_LIMITED_API", "0x030A0000"), *(_macros() if cuda else [])],
        extra_compile_args={"cxx": optimization() + CXX_FLAGS + (SANITIZE_FLAGS if sanitize() else [])},
        extra_link_args=linked if not sanitize() else ["-fopenmp", *SANITIZE_FLAGS[:1]],
        py_limited_api=True,
    )


def portable(linker: list[str]) -> list[str]:
    """A link command without the places of the Python that builds: the library needs none, and it may move."""
    return [word for word in linker if not word.startswith(("-Wl,-rpath", "-Wl,-R", "-L"))]


def _cuda() -> str | None:
    import torch

    return torch.version.cuda


def file_name(ext: Any) -> str:
    """The library's file: it names the versions of torch and CUDA that it serves."""
    import torch

    if ext.name == KERNELS:
        return str(torch_versions.kernels_name(_cuda()))
    cuda = _cuda() if ("TRANSFORMER_PLUGIN_CUDA", "1") in ext.define_macros else None
    return str(torch_versions.library_name(torch.__version__, cuda))


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


def build_command(extensions: list[Any]) -> Any:
    """torch's build helper, keeping object files where every way to build finds them again."""
    from torch.utils.cpp_extension import BuildExtension

    names = {each.name: file_name(each) for each in extensions}

    class BuildLibraries(BuildExtension):  # type: ignore[misc]
        def get_ext_filename(self, fullname: str) -> str:
            *folders, name = fullname.split(".")  # the helpers ask with and without the package
            return str(Path(*folders, names[f"transformer_plugin.{name}"]))

        def build_extensions(self) -> None:
            for name in ("linker_so", "linker_so_cxx"):
                if getattr(self.compiler, name, None):
                    setattr(self.compiler, name, portable(getattr(self.compiler, name)))
            super().build_extensions()

        def build_extension(self, ext: Any) -> None:
            # `pip install -e` would otherwise compile in a temporary folder, anew each time.
            kind = re.sub(r"^_(C|kernels)\.|\.so$", "", names[ext.name])
            self.build_temp = f"build/{'asan' if sanitize() else kind}/objects"
            includes = self.compiler.include_dirs
            if ext.name == KERNELS:  # of no Python either: what is built for one torch is there for the next
                self.compiler.include_dirs = []
            else:
                include_precompiled(ext, self.compiler, Path(self.build_temp))
                if KERNELS in names:
                    kernels = Path(self.get_ext_fullpath(KERNELS))
                    ext.extra_link_args = [f"-L{kernels.parent}", f"-l:{kernels.name}", *ext.extra_link_args]
            super().build_extension(ext)
            self.compiler.include_dirs = includes
            if ext.name == OPS and not self.inplace:  # a wheel takes what lies in its folder
                remove_others(Path(self.get_ext_fullpath(ext.name)).parent, set(names.values()))

        def copy_extensions_to_source(self) -> None:
            if KERNELS in names:
                folder = Path(self.get_finalized_command("build_py").get_package_dir("transformer_plugin"))
                kernels = Path(self.build_lib, "transformer_plugin", names[KERNELS])
                remove_ops_of_other_kernels(folder, kernels, names[OPS])
            super().copy_extensions_to_source()

    return BuildLibraries
