"""Sources and flags of transformer_plugin/_C.abi3.so."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from build_tools.precompiled import include_precompiled
from build_tools.toolchain import check_compiler, job_count, toolkit_of_torch, use_cuda

# -ffp-contract=off and --fmad=false: a multiply and an add stay two roundings unless the source says fma,
# so that CPU and CUDA give the same bits. -fno-trapping-math changes no result; without it GCC vectorises no
# arithmetic under a condition.
CXX_FLAGS = ["-O3", "-std=c++20", "-fvisibility=hidden", "-ffp-contract=off", "-fopenmp"]
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
    flags: dict[str, list[str]] = {"cxx": CXX_FLAGS + (SANITIZE_FLAGS if sanitize() else [])}
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


def build_command() -> Any:
    """torch's build helper, keeping its object files where every way to build finds them again."""
    from torch.utils.cpp_extension import BuildExtension

    class BuildLibrary(BuildExtension):  # type: ignore[misc]
        def finalize_options(self) -> None:
            super().finalize_options()
            # `pip install -e` would otherwise compile in a temporary folder, anew each time.
            self.build_temp = "build/asan/objects" if sanitize() else "build/objects"

        def build_extensions(self) -> None:
            for name in ("linker_so", "linker_so_cxx"):
                if getattr(self.compiler, name, None):
                    setattr(self.compiler, name, portable(getattr(self.compiler, name)))
            super().build_extensions()

        def build_extension(self, ext: Any) -> None:
            include_precompiled(ext, self.compiler, Path(self.build_temp))
            super().build_extension(ext)

    return BuildLibrary
