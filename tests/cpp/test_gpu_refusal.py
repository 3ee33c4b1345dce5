"""A kernel that the library does not have for the GPU: one sentence. CUDA's runtime is replaced by functions that
answer as it does there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="needs the source tree")

RUNTIME = r"""
#pragma once
#include <cstddef>
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidDeviceFunction = 98, cudaErrorNoKernelImageForDevice = 209,
                   cudaErrorLaunchFailure = 719 };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76 };
struct cudaFuncAttributes { int ptxVersion; };
#define __global__
extern int error, capability;
inline cudaError_t cudaGetLastError() { return static_cast<cudaError_t>(error); }
inline const char* cudaGetErrorString(cudaError_t) { return "an error of CUDA"; }
inline cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
  *value = name == cudaDevAttrComputeCapabilityMajor ? capability / 10 : capability % 10;
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*)()) { return cudaErrorInvalidDeviceFunction; }
"""
PROGRAM = r"""
#include <cstdlib>
#include <iostream>

#include "common/launch_cuda.cu"

int error, capability;

int main(int, char** arguments) {
  error = std::atoi(arguments[1]);
  capability = std::atoi(arguments[2]);
  try {
    transformer_plugin::check_launch("activation");
  } catch (const std::runtime_error& raised) {
    std::cout << raised.what();
  }
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "cuda_runtime.h").write_text(RUNTIME)
    (folder / "program.cpp").write_text(PROGRAM)
    return folder


def message(folder: Path, architectures: str, error: int, capability: int) -> str:
    """What a library for these architectures raises where CUDA has this error on this GPU."""
    program = folder / architectures.replace(",", "_")
    if not program.exists():
        includes = [f"-I{folder}", f"-I{ROOT / 'csrc'}"]
        given = [f"-D__CUDA_ARCH_LIST__={architectures}", str(folder / "program.cpp")]
        subprocess.run(["c++", "-std=c++20", *includes, *given, "-o", str(program)], check=True)
    return subprocess.check_output([program, str(error), str(capability)], text=True)


@pytest.mark.parametrize("error", [209, 98])
@pytest.mark.parametrize(
    ("architectures", "built", "capability", "own"),
    [
        ("900", "9.0a", 80, "8.0"),
        ("900", "9.0a", 89, "8.9"),
        ("900", "9.0a", 100, "10.0a"),
        ("900", "9.0a", 120, "12.0a"),
        ("1000,1200", "10.0a or 12.0a", 90, "9.0a"),
    ],
)
def test_gpu_for_which_nothing_was_built(
    folder: Path, architectures: str, built: str, capability: int, own: str, error: int
) -> None:
    do = (
        f"Build it for this GPU: `TORCH_CUDA_ARCH_LIST={own} pip install --no-build-isolation --force-reinstall "
        "--no-deps .` in the source tree."
    )
    if capability < 90:
        do = "Use a GPU of 9.0 or later, or a CPU: kernels have instructions that older ones lack."
    assert message(folder, architectures, error, capability) == (
        "transformer_plugin: kernel 'activation': expected a GPU for which the library was built, of compute "
        f"capability {built}, got one of {own}. {do} docs/install.md says which GPUs are tested."
    )


def test_other_errors_and_none(folder: Path) -> None:
    assert message(folder, "900", 719, 90) == (
        "transformer_plugin: launch of activation failed: an error of CUDA"
    )
    assert message(folder, "900", 0, 90) == ""
