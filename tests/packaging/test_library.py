"""The built library: its dependencies, what it must not contain, and the effects of an import."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from transformer_plugin._library import LIBRARY


def tool(name: str, *arguments: str) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    return subprocess.run([name, *arguments, str(LIBRARY)], capture_output=True, text=True, check=True).stdout


def test_needs_no_symbol_of_python_or_pybind() -> None:
    undefined = [line.split()[-1] for line in tool("nm", "-D", "--undefined-only").splitlines()]
    assert len(undefined) > 100  # the list was read
    python = re.compile(r"^(_?Py[A-Z_]|.*pybind|_ZN5torch6python)")
    assert [symbol for symbol in undefined if python.match(symbol)] == []


def test_names_no_place_of_the_machine_that_built_it() -> None:
    dynamic = tool("readelf", "-d")
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert "libc10.so" in needed
    assert not [name for name in needed if "python" in name or "/" in name]


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
