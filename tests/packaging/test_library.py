"""The built libraries: their dependencies, what they must not contain, and the effects of an import."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_plugin._library import LIBRARIES, LIBRARY

each_library = pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)


def tool(name: str, *arguments: str) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    return subprocess.run([name, *arguments], capture_output=True, text=True, check=True).stdout


def undefined(library: Path, *options: str) -> list[str]:
    """Symbols that other libraries have. Demangled ones contain spaces."""
    lines = tool("nm", "-D", "--undefined-only", *options, str(library)).splitlines()
    return [line.partition(" U ")[2] or line.partition(" w ")[2] for line in lines]


def needed(library: Path) -> list[str]:
    return re.findall(r"NEEDED.*\[(.*)\]", tool("readelf", "-d", str(library)))


@each_library
def test_needs_no_symbol_of_python_or_pybind(library: Path) -> None:
    symbols = undefined(library)
    assert len(symbols) > 30  # the list was read
    python = re.compile(r"^(_?Py[A-Z_]|.*pybind|_ZN5torch6python)")
    assert [symbol for symbol in symbols if python.match(symbol)] == []


@each_library
def test_names_no_place_of_the_machine_that_built_it(library: Path) -> None:
    places = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", tool("readelf", "-d", str(library)))
    assert places == (["$ORIGIN"] if library == LIBRARY and len(LIBRARIES) > 1 else [])
    assert not [name for name in needed(library) if "python" in name or "/" in name]


def test_ops_need_torch_and_the_kernels() -> None:
    assert "libc10.so" in needed(LIBRARY)
    assert {path.name for path in LIBRARIES[1:]} <= set(needed(LIBRARY))


@pytest.mark.skipif(len(LIBRARIES) == 1, reason="this build has no kernels")
def test_kernels_need_nothing_of_torch() -> None:
    """So one library of them serves every torch."""
    kernels = LIBRARIES[1]
    assert [name for name in needed(kernels) if re.match(r"libcudart\.so\.\d+", name)]
    assert not [name for name in needed(kernels) if re.match(r"lib(torch|c10|shm)", name)]
    symbols = undefined(kernels, "-C")
    assert any(symbol.startswith("cudaLaunchKernel") for symbol in symbols)
    assert [symbol for symbol in symbols if re.search(r"\b(at|c10|torch|caffe2)::", symbol)] == []


@pytest.mark.skipif(len(LIBRARIES) == 1, reason="this build has no kernels")
def test_kernels_export_functions_of_this_package_alone() -> None:
    lines = tool("nm", "-DC", "--defined-only", str(LIBRARIES[1])).splitlines()
    exported = [line.split(maxsplit=2)[2] for line in lines]
    assert len(exported) > 50
    assert [name for name in exported if not re.match(r"(void )?transformer_plugin::", name)] == []


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_starts_no_cuda_context() -> None:
    assert run("import torch, transformer_plugin; print(torch.cuda.is_initialized())") == "False"


def test_import_needs_no_gpu() -> None:
    code = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''; import torch, transformer_plugin as t; "
    assert run(code + "print(t.ops.activation(torch.ones(1, 2)).shape)") == "torch.Size([1, 1])"


def test_import_survives_a_fork() -> None:
    code = """
import os, torch, transformer_plugin as t
x = torch.ones(2, 4, requires_grad=True)
t.ops.activation(x)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # a forked OpenMP pool is gone, as for torch's own ops
    t.ops.activation(x).sum().backward()
    os._exit(0 if x.grad is not None else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(code) == "0"


def test_import_imports_no_compiler() -> None:
    """Half a second of every program's start, most of it sympy."""
    code = "import sys, transformer_plugin; print(sorted({'sympy', 'torch._dynamo'} & set(sys.modules)))"
    assert run(code) == "[]"


def test_import_adds_at_most_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    """Of CPU time, which other tests on the machine do not lengthen."""
    code = """
import time, torch
begin = time.process_time()
import transformer_plugin
print(time.process_time() - begin)
"""
    seconds = min(float(run(code)) for _ in range(3))
    with capsys.disabled():
        print(f" [import adds {seconds:.2f} s]", end="")
    assert seconds <= 1.0
