"""Every reason why a build cannot start: one clear error each, with the detected versions and the command to use."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from build_tools import toolchain
from build_tools.extension import (
    Toolkit,
    generate_code,
    host_compiler,
    host_flags,
    remove_ops_of_other_kernels,
    remove_others,
)
from build_tools.toolchain import ToolchainError, torch_versions

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty machine: the PATH has only what a test puts there, and there are no CUDA settings."""
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "TRANSFORMER_PLUGIN_CPU_ONLY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def program(folder: Path, name: str, prints: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{prints}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def message(function: object, *arguments: object) -> str:
    with pytest.raises(ToolchainError) as caught:
        function(*arguments)  # type: ignore[operator]
    return str(caught.value)


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    text = message(toolchain.check_torch)
    assert text.startswith("torch is not importable in this build environment (")
    assert text.endswith("`pip install 'torch>=2.11,<2.16'` and `pip install --no-build-isolation .`")


def test_torch_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert message(toolchain.check_torch) == torch_versions.refusal("2.9.1+cu128")


def test_torch_that_nobody_has_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(torch_versions.SETTING, raising=False)
    monkeypatch.setattr(torch, "__version__", "3.0.0a0+git1234")
    assert f"or try this version: set {torch_versions.SETTING}=1, and build" in message(toolchain.check_torch)
    monkeypatch.setenv(torch_versions.SETTING, "1")
    toolchain.check_torch()


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0+cpu", "2.14.1", "2.15.0a0+git1234"])
def test_torch_that_serves(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    toolchain.check_torch()


def test_no_compiler(machine: Path) -> None:
    assert message(toolchain.check_compiler) == (
        "found no C++ compiler under the name `c++`, need g++ 11 or later. "
        "Run `apt install g++`, or set CXX=/path/to/g++."
    )


@pytest.mark.parametrize(
    ("banner", "seen"),
    [
        (
            "g++ (Debian 10.2.1-6) 10.2.1 20210110",
            "found g++ 10.2.1 (`c++`), need g++ 11 or later for C++20.",
        ),
        (
            "Debian clang version 13.0.1-11",
            "found clang++ 13.0.1 (`c++`), need clang++ 14 or later for C++20.",
        ),
    ],
)
def test_compiler_too_old(machine: Path, banner: str, seen: str) -> None:
    program(machine, "c++", banner)
    assert message(toolchain.check_compiler) == (
        f"{seen} Install a newer one and set CXX, for example CXX=g++-12."
    )


def test_compiler_that_serves(machine: Path) -> None:
    program(machine, "c++", "c++ (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0")
    toolchain.check_compiler()


def test_compiler_named_by_cxx(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(machine, "g++-12", "g++-12 (Debian 12.2.0-14) 12.2.0")
    monkeypatch.setenv("CXX", "g++-12")
    toolchain.check_compiler()


def test_broken_compiler(machine: Path) -> None:
    program(machine, "c++", "x").write_text("#!/bin/sh\nexit 3\n")
    assert message(toolchain.check_compiler).startswith("running `c++ --version` failed (")


def test_toolkit_of_another_major_version(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = program(machine, "nvcc", "Cuda compilation tools, release 12.4, V12.4.131")
    assert message(toolchain.use_cuda, "2.11.0+cu130", "13.0") == (
        f"found CUDA toolkit 12.4 ({nvcc}), but torch 2.11.0+cu130 was built with CUDA 13.0; the major versions must "
        "agree. Set CUDA_HOME to a CUDA 13.x toolkit, or build without CUDA: "
        "`TRANSFORMER_PLUGIN_CPU_ONLY=1 pip install --no-build-isolation .`"
    )
    monkeypatch.setenv("TRANSFORMER_PLUGIN_CPU_ONLY", "1")
    assert toolchain.use_cuda("2.11.0+cu130", "13.0") is None


def test_toolkit_that_does_not_say_its_version(machine: Path) -> None:
    nvcc = program(machine, "nvcc", "hello")
    assert message(toolchain.use_cuda, "2.11.0+cu130", "13.0") == (
        f"could not read a version from `{nvcc} --version`; set CUDA_HOME to a CUDA toolkit."
    )


def test_cuda_is_decided_by_the_toolkit_not_by_a_gpu(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_at_a_gpu(*_: object) -> None:
        raise AssertionError("the build looked for a GPU")

    for name in ("is_available", "device_count", "get_device_capability"):
        monkeypatch.setattr(torch.cuda, name, look_at_a_gpu)
    program(machine, "toolkit/bin/nvcc", "Cuda compilation tools, release 13.1, V13.1.80")
    monkeypatch.setenv("CUDA_HOME", str(machine / "toolkit"))
    assert toolchain.use_cuda("2.11.0+cu130", "13.0") == machine / "toolkit"


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        (None, ("9.0a",)),
        ("", ("9.0a",)),
        ("10.0a", ("10.0a",)),
        ("9.0a;10.0a", ("9.0a", "10.0a")),
        ("9.0a 12.0a+PTX", ("9.0a", "12.0a+PTX")),
    ],
)
def test_architectures_that_compile(
    machine: Path, monkeypatch: pytest.MonkeyPatch, setting: str | None, names: tuple[str, ...]
) -> None:
    if setting is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", setting)
    assert toolchain.architectures() == names


@pytest.mark.parametrize(
    ("names", "got"),
    [("8.0", "8.0"), ("9.0a;8.9+PTX", "8.9+PTX"), ("9.0 10.0a", "9.0"), ("Hopper", "Hopper")],
)
def test_architectures_that_do_not_compile(
    machine: Path, monkeypatch: pytest.MonkeyPatch, names: str, got: str
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", names)
    assert message(toolchain.architectures) == (
        "TORCH_CUDA_ARCH_LIST: expected architectures with all of their instructions, from 9.0a on, such as "
        f"'9.0a;10.0a', got '{got}'. Change it, or build without CUDA: `TRANSFORMER_PLUGIN_CPU_ONLY=1 pip install "
        "--no-build-isolation .`"
    )


def test_the_host_compiler_of_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CC", "CXX", "NVCC_CCBIN"):
        monkeypatch.delenv(name, raising=False)
    assert host_compiler() == []
    monkeypatch.setenv("CXX", "ccache g++-12")
    assert host_compiler() == ["-ccbin", "g++-12"]
    monkeypatch.setenv("CC", "gcc-13")
    assert host_compiler() == ["-ccbin", "gcc-13"]
    monkeypatch.setenv("NVCC_CCBIN", "gcc-11")
    assert host_compiler() == []


def test_the_toolkit_of_a_package_manager(tmp_path: Path) -> None:
    toolkit = Toolkit(tmp_path, ("9.0a",))
    assert toolkit.libraries == tmp_path / "lib"
    (tmp_path / "lib64").mkdir()
    assert toolkit.libraries == tmp_path / "lib64"


def test_code_for_an_architecture() -> None:
    assert generate_code("9.0a") == ["-gencode", "arch=compute_90a,code=sm_90a"]
    assert generate_code("12.0a+PTX") == [
        "-gencode", "arch=compute_120a,code=sm_120a", "-gencode", "arch=compute_120a,code=compute_120a"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("torch_cuda", "reason"),
    [
        (None, "this torch was built without CUDA"),
        ("13.0", "found no nvcc (CUDA_HOME/bin, PATH, /usr/local/cuda/bin)"),
    ],
)
def test_cpu_only(
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    torch_cuda: str | None,
    reason: str,
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(machine / "nothing"))
    assert toolchain.use_cuda("2.11.0", torch_cuda) is None
    assert capsys.readouterr().out == f"transformer_plugin: building for the CPU only: {reason}\n"


@pytest.mark.parametrize(("gib", "cores", "jobs"), [(64, 2, 2), (9, 8, 2), (1, 8, 1), (64, 16, 16)])
def test_jobs_fit_cores_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int, cores: int, jobs: int
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 999999999 kB\nMemAvailable: {gib * 1024 * 1024} kB\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert toolchain.job_count(meminfo=str(meminfo)) == jobs


def test_setup_ends_with_the_message_alone(tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": "no-such-compiler"}
    result = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    assert (
        "transformer_plugin cannot be built here: found no C++ compiler under the name `no-such-compiler`"
        in (result.stderr)
    )
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arrange", "expected"),
    [
        (
            "none",
            "found no Python under the name 'python3', need 3.10 to 3.13. Run: apt install python3 python3-venv",
        ),
        ("old", "need Python 3.10 to 3.13. Name another: make PYTHON=/path/to/python3.12"),
        ("no venv", "without its venv module. Run: apt install python3-venv"),
        (
            "no compiler",
            "found no C++ compiler under the name 'c++', need g++ 11 or later. Run: apt install g++",
        ),
    ],
)
def test_machine_check_names_the_package_to_install(machine: Path, arrange: str, expected: str) -> None:
    answers = {"old": "exit 1", "no venv": 'case "$2" in *ensurepip*) exit 1;; esac', "no compiler": "exit 0"}
    if arrange != "none":
        python = program(machine, "python3", "")
        python.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit 0\n{answers[arrange]}\n'
        )
    result = subprocess.run(
        ["/bin/bash", str(ROOT / "build_tools" / "check_machine.sh"), "python3"],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert result.returncode == 1
    assert expected in result.stderr


def test_the_environment_chooses_the_optimization(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for CPUs are optimized more than what checks and calls; of two flags the last one counts."""
    kernel, glue = Path("csrc/gemm/cpu/x.cpp"), Path("csrc/gemm/ops/x.cpp")
    monkeypatch.delenv("CFLAGS", raising=False)
    monkeypatch.delenv("TRANSFORMER_PLUGIN_SANITIZE", raising=False)
    assert [host_flags(each)[-1] for each in (kernel, Path("csrc/x_cpu.cpp"), glue)] == ["-O3", "-O3", "-O2"]
    monkeypatch.setenv("CFLAGS", "-g -O0")
    assert [host_flags(each)[-3:] for each in (kernel, glue)] == [["-O3", "-g", "-O0"], ["-O2", "-g", "-O0"]]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_libraries_of_other_kernels_are_removed(tmp_path: Path) -> None:
    built, source = tmp_path / "built", tmp_path / "source"
    mine, other, on_cpu = "_C.torch2.15.cu13.so", "_C.torch2.11.cu13.so", "_C.torch2.11.cpu.so"
    for folder in (built, source):
        folder.mkdir()
        (folder / "_kernels.cu13.so").write_bytes(b"kernels")
    for name in (mine, other, on_cpu):
        (source / name).touch()
    remove_ops_of_other_kernels(source, built / "_kernels.cu13.so", mine)
    assert names_in(source) == {mine, other, on_cpu, "_kernels.cu13.so"}
    (built / "_kernels.cu13.so").write_bytes(b"others")
    remove_ops_of_other_kernels(source, built / "_kernels.cu13.so", mine)
    assert names_in(source) == {mine, on_cpu, "_kernels.cu13.so"}


def test_a_wheel_has_the_libraries_of_its_build(tmp_path: Path) -> None:
    for name in ("_C.torch2.11.cu13.so", "_C.torch2.11.cpu.so", "_kernels.cu13.so", "other.so"):
        (tmp_path / name).touch()
    remove_others(tmp_path, {"_C.torch2.11.cpu.so"})
    assert names_in(tmp_path) == {"_C.torch2.11.cpu.so", "other.so"}
