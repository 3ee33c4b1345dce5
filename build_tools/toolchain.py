"""What is installed here, and whether it can build us: torch, the C++ compiler and the CUDA toolkit.

Every check names the versions seen and the command to use. Nothing here looks at a GPU: a machine without
one builds the same library.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

MINIMUM_GCC = 11
MINIMUM_CLANG = 14
DEFAULT_CUDA_ARCH = "9.0a"
OLDEST_CUDA_ARCH = (9, 0)  # older GPUs lack instructions of the kernels


class ToolchainError(RuntimeError):
    """Something needed for the build is missing, too old, or does not go with the rest."""


def _read_versions() -> ModuleType:
    """The package's module of torch's versions. To import the package would load the library, which is not there."""
    path = Path(__file__).parent.parent / "transformer_plugin" / "_torch_versions.py"
    spec = importlib.util.spec_from_file_location("transformer_plugin._torch_versions", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


torch_versions = _read_versions()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ToolchainError(
            f"running `{' '.join(command)}` failed ({error}). Install a C++20 compiler "
            "(`apt install g++`) or name one with CXX=/path/to/g++."
        ) from error


def check_torch() -> None:
    """torch must be importable during the build, so that the library matches the one it will run with."""
    try:
        import torch
    except ImportError as error:
        raise ToolchainError(
            f"torch is not importable in this build environment ({error}). Install it first, then build "
            f"against it: `pip install '{torch_versions.REQUIREMENT}'` and `pip install --no-build-isolation .`"
        ) from error
    refused = torch_versions.refusal(torch.__version__)
    if refused:
        raise ToolchainError(refused)


def check_compiler() -> None:
    """The host compiler must know C++20."""
    compiler = os.environ.get("CXX", "c++")  # torch's build helper has the same default
    if shutil.which(compiler.split()[0]) is None:
        raise ToolchainError(
            f"found no C++ compiler under the name `{compiler}`, need g++ {MINIMUM_GCC} or later. "
            "Run `apt install g++`, or set CXX=/path/to/g++."
        )
    banner = _output(*compiler.split(), "--version")
    is_clang = "clang" in banner
    match = re.search(r"(\d+)\.\d+\.\d+", banner)
    minimum = MINIMUM_CLANG if is_clang else MINIMUM_GCC
    if match and int(match.group(1)) < minimum:
        name = "clang++" if is_clang else "g++"
        raise ToolchainError(
            f"found {name} {match.group(0)} (`{compiler}`), need {name} {minimum} or later for C++20. "
            f"Install a newer one and set CXX, for example CXX=g++-12."
        )


def _toolkit() -> Path | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = Path(home) / "bin" / "nvcc" if home else Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    return nvcc if nvcc.exists() else None


def _cpu_only_because(nvcc: Path | None, torch_cuda: str | None) -> str | None:
    """Why there is nothing to build CUDA code with, or None."""
    if os.environ.get("TRANSFORMER_PLUGIN_CPU_ONLY") == "1":
        return "TRANSFORMER_PLUGIN_CPU_ONLY=1"
    if torch_cuda is None:
        return "this torch was built without CUDA"
    return "found no nvcc (CUDA_HOME/bin, PATH, /usr/local/cuda/bin)" if nvcc is None else None


def _check_toolkit(nvcc: Path, torch_version: str, torch_cuda: str) -> str:
    match = re.search(r"release (\d+)\.(\d+)", _output(str(nvcc), "--version"))
    if match is None:
        raise ToolchainError(
            f"could not read a version from `{nvcc} --version`; set CUDA_HOME to a CUDA toolkit."
        )
    major = _numbers(torch_cuda)[0]
    if int(match.group(1)) != major:
        raise ToolchainError(
            f"found CUDA toolkit {match.group(1)}.{match.group(2)} ({nvcc}), but torch {torch_version} was built "
            f"with CUDA {torch_cuda}; the major versions must agree. Set CUDA_HOME to a CUDA {major}.x toolkit, "
            "or build without CUDA: `TRANSFORMER_PLUGIN_CPU_ONLY=1 pip install --no-build-isolation .`"
        )
    return f"{match.group(1)}.{match.group(2)}"


def use_cuda(torch_version: str, torch_cuda: str | None) -> Path | None:
    """The folder of the CUDA toolkit, if nvcc is here and torch was built with CUDA, whether or not a GPU is."""
    nvcc = _toolkit()
    reason = _cpu_only_because(nvcc, torch_cuda)
    if reason or nvcc is None or torch_cuda is None:
        print(f"transformer_plugin: building for the CPU only: {reason}", flush=True)
        return None
    version = _check_toolkit(nvcc, torch_version, torch_cuda)
    named = " ".join(architectures())
    print(f"transformer_plugin: building for the CPU and CUDA {version} ({named})", flush=True)
    return nvcc.parent.parent


def architectures() -> tuple[str, ...]:
    """The architectures of GPUs to compile for: those of TORCH_CUDA_ARCH_LIST, such as ``9.0a;10.0a``. The kernels must
    compile for each, which the compiler says only after minutes."""
    names = re.split(r"[\s;]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip(" ;") or DEFAULT_CUDA_ARCH)
    for name in names:
        if not re.fullmatch(r"\d+\.\da(\+PTX)?", name) or _numbers(name) < OLDEST_CUDA_ARCH:
            raise ToolchainError(
                "TORCH_CUDA_ARCH_LIST: expected architectures with all of their instructions, from 9.0a on, such as "
                f"'9.0a;10.0a', got '{name}'. Change it, or build without CUDA: `TRANSFORMER_PLUGIN_CPU_ONLY=1 pip "
                "install --no-build-isolation .`"
            )
    return tuple(names)


def job_count(gib_per_job: int = 4, meminfo: str = "/proc/meminfo") -> int:
    """As many compile jobs as there are cores, and as memory allows at `gib_per_job` each."""
    cores = len(os.sched_getaffinity(0))
    lines = Path(meminfo).read_text().splitlines()
    available_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return max(1, min(cores, available_kib // (gib_per_job * 1024 * 1024)))
