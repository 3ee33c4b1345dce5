"""Sources, flags and name of the one shared library."""

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
NVCC_FLAGS = [
    "-O3",
    "-std=c++20",
    "--fmad=false",
    "--threads=1",
    "-Xcompiler=-fvisibility=hidden",
    "-lineinfo",
]
NVCC_FLAGS += ["--expt-relaxed-constexpr", "--expt-extended-lambda"]
# Device code that nobody has packed is five times as large. It is unpacked when a kernel is first called.
PACK_FLAGS = ["--compress-mode=size"]
LINK_FLAGS = ["-fopenmp", "-Wl,--no-undefined", "-Wl,--as-needed"]
# `make sanitize`.
SANITIZE_FLAGS = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
]


def optimization() -> list[str]:
    """What CFLAGS says wins. torch's build helper puts our flags behind it."""
    return [] if re.search(r"(^|\s)-O", os.environ.get("CFLAGS", "")) else ["-O3"]


def sanitize() -> bool:
    """Whether this is the build that `make sanitize` runs the tests with."""
    return os.environ.get("TRANSFORMER_PLUGIN_SANITIZE") == "1"


def library(root: Path) -> Any:
    """The one extension. It holds no Python symbol, so one build serves every Python from 3.10."""
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    check_compiler()
    cuda = use_cuda()
    os.environ.setdefault("MAX_JOBS", str(job_count()))
    # torch's build helper looks for ninja on the PATH, where a virtual environment that is not active has none.
    os.environ["PATH"] = os.pathsep.join(
        [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    )
    sources = sorted(str(p.relative_to(root)) for p in (root / "csrc").rglob("*.cpp"))
    flags: dict[str, list[str]] = {"cxx": optimization() + CXX_FLAGS + (SANITIZE_FLAGS if sanitize() else [])}
    macros = [("Py_LIMITED_API", "0x030A0000")]
    if cuda:
        sources += sorted(str(p.relative_to(root)) for p in (root / "csrc").rglob("*.cu"))
        macros.append(("TRANSFORMER_PLUGIN_CUDA", "1"))
        if "9.0a" in os.environ["TORCH_CUDA_ARCH_LIST"]:  # what Hopper alone has is in it
            macros.append(("TRANSFORMER_PLUGIN_SM90A", "1"))
        flags["nvcc"] = NVCC_FLAGS + (PACK_FLAGS if toolkit_of_torch() >= 13 else [])
    return (CUDAExtension if cuda else CppExtension)(
        "transformer_plugin._C",
        sources,
        include_dirs=[str(root / "csrc")],
        define_macros=macros,
        extra_compile_args=flags,
        extra_link_args=LINK_FLAGS if not sanitize() else ["-fopenmp", *SANITIZE_FLAGS[:1]],
        py_limited_api=True,
    )


def portable(linker: list[str]) -> list[str]:
    """A link command without the places of the Python that builds: the library needs none, and it may move."""
    return [word for word in linker if not word.startswith(("-Wl,-rpath", "-Wl,-R", "-L"))]


def file_name(ext: Any) -> str:
    """The library's file: it names the versions of torch and CUDA that it serves."""
    import torch

    cuda = torch.version.cuda if ("TRANSFORMER_PLUGIN_CUDA", "1") in ext.define_macros else None
    return str(torch_versions.library_name(torch.__version__, cuda))


def remove_others(library: Path, other_torch: bool) -> None:
    """Removes libraries of earlier builds from the folder: those for the same torch, or for any."""
    same = ".".join(library.name.split(".")[:3])  # _C.torch2.11
    for path in library.parent.glob("_C.*so" if other_torch else f"{same}.*so"):
        if path.name != library.name:
            path.unlink()


def build_command(ext: Any) -> Any:
    """torch's build helper, keeping its object files where every way to build finds them again."""
    from torch.utils.cpp_extension import BuildExtension

    name = file_name(ext)

    class BuildLibrary(BuildExtension):  # type: ignore[misc]
        def finalize_options(self) -> None:
            super().finalize_options()
            # `pip install -e` would otherwise compile in a temporary folder, anew each time.
            kind = "asan" if sanitize() else name.removeprefix("_C.").removesuffix(".so")
            self.build_temp = f"build/{kind}/objects"

        def get_ext_filename(self, fullname: str) -> str:
            return str(Path(*fullname.split(".")[:-1], name))

        def build_extensions(self) -> None:
            for name in ("linker_so", "linker_so_cxx"):
                if getattr(self.compiler, name, None):
                    setattr(self.compiler, name, portable(getattr(self.compiler, name)))
            super().build_extensions()

        def build_extension(self, ext: Any) -> None:
            include_precompiled(ext, self.compiler, Path(self.build_temp))
            super().build_extension(ext)
            # A wheel takes what lies in its folder. In the source tree there is a library for each torch.
            remove_others(Path(self.get_ext_fullpath(ext.name)), other_torch=not self.inplace)

    return BuildLibrary
