"""Sources and flags of transformer_plugin/_C.abi3.so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from build_tools.toolchain import check_compiler, job_count, use_cuda

# -ffp-contract=off and --fmad=false: a multiply and an add stay two roundings unless the source says fma,
# so that CPU and CUDA give the same bits.
CXX_FLAGS = ["-O3", "-std=c++20", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fopenmp"]
CXX_FLAGS += ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-unknown-pragmas", "-g0"]
NVCC_FLAGS = ["-O3", "-std=c++20", "--fmad=false", "--threads=1", "-Xcompiler=-fvisibility=hidden", "-lineinfo"]
NVCC_FLAGS += ["--expt-relaxed-constexpr", "--expt-extended-lambda"]


def library(root: Path) -> Any:
    """The one extension. It holds no Python symbol, so one build serves every Python from 3.10."""
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    check_compiler()
    cuda = use_cuda()
    os.environ.setdefault("MAX_JOBS", str(job_count()))
    sources = sorted(str(p.relative_to(root)) for p in (root / "csrc").rglob("*.cpp"))
    macros = [("Py_LIMITED_API", "0x030A0000")]
    flags: dict[str, list[str]] = {"cxx": list(CXX_FLAGS)}
    if cuda:
        sources += sorted(str(p.relative_to(root)) for p in (root / "csrc").rglob("*.cu"))
        macros.append(("TRANSFORMER_PLUGIN_CUDA", "1"))
        flags["nvcc"] = list(NVCC_FLAGS)
    return (CUDAExtension if cuda else CppExtension)(
        "transformer_plugin._C",
        sources,
        include_dirs=[str(root / "csrc")],
        define_macros=macros,
        extra_compile_args=flags,
        extra_link_args=["-fopenmp", "-Wl,--no-undefined", "-Wl,--as-needed"],
        py_limited_api=True,
    )


def build_command() -> Any:
    """torch's build helper, without the object file of a Python module: we have none."""
    from torch.utils.cpp_extension import BuildExtension

    return BuildExtension.with_options(no_python_abi_suffix=False, use_ninja=True)
