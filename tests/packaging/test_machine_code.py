"""Checks the machine code (SASS) of the Hopper GEMM kernels in the library. Needs cuobjdump, and no GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import CUDA_HOME

from transformer_plugin._library import LIBRARIES

GEMM_KERNELS = (
    "sm90_grouped_gemm_kernel",
    "sm90_grouped_gemm_gather_kernel",
    "sm90_grouped_wgrad_kernel",
    "sm90_grouped_gemm_mx_nv_kernel",
)
# Mangled names of the mainloop policies that pass FP8 operands to WGMMA (QGMMA). The others use 16-bit operands.
FP8_MAINLOOPS = (
    "16MainloopFp8BlockE",
    "17MainloopFp8TensorI",
    "14MainloopFp8RowI",
    "21WgradMainloopFp8BlockI",
    "22WgradMainloopFp8TensorI",
)
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);")
BRANCH = re.compile(r"\bBRA\S*\s.*?(?:0x([0-9a-f]+))\s*$")
LONGEST_STEP = 600  # instructions
# Branches and predicates, as cuobjdump writes them.
PARTS = re.compile(r"(@\S+ )?(\S+)\s*(.*)")
GUARD = re.compile(r"@(!?)(P\d) ")
PREDICATE = re.compile(r"P\d$")
CONSTANT = re.compile(
    r"(P\d), PT, PT, PT, PT, 0x(80|8)\b"
)  # every input is true: bit 7 of the table is the result
JUMP = re.compile(r"(@\S+ )?(?:BRA|BSSY|WARPSYNC\.COLLECTIVE)\S*\s.*?0x([0-9a-f]+)\s*$")
ENDS = re.compile(r"(?:EXIT|RET|BRA 0x)")

Code = list[tuple[int, str]]
Known = dict[str, bool]


def cuobjdump(*arguments: str) -> str:
    folders = [os.environ["PATH"], *(str(Path(home) / "bin") for home in [CUDA_HOME] if home)]
    triton = importlib.util.find_spec("triton")  # comes with torch, and brings the tool
    if triton and triton.origin:
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    tool = shutil.which("cuobjdump", path=os.pathsep.join(folders))
    if not tool:
        pytest.skip("needs cuobjdump, of the CUDA toolkit or triton")
    done = subprocess.run([tool, *arguments, str(LIBRARIES[-1])], capture_output=True, text=True, check=False)
    if "does not contain device code" in done.stdout + done.stderr:
        pytest.skip("needs a library with kernels")
    done.check_returncode()
    return done.stdout


@pytest.fixture(scope="module")
def usage() -> dict[str, str]:
    """The resource usage of each kernel."""
    text = cuobjdump("--dump-resource-usage")
    return dict(re.findall(r"Function (\w+):\s+(REG:.*)", text))


@pytest.fixture(scope="module")
def kernels(usage: dict[str, str]) -> dict[str, Code]:
    """The instructions of each GEMM kernel, with their addresses."""
    names = [name for name in usage if any(kernel in name for kernel in GEMM_KERNELS)]
    if not names:
        pytest.skip("needs a library with kernels for 9.0a")
    text = cuobjdump("-sass", "-fun", ",".join(names))
    functions = re.split(r"Function : (\w+)", text)[1:]
    return {
        name: [(int(at, 16), what) for at, what in INSTRUCTION.findall(body)]
        for name, body in zip(functions[::2], functions[1::2], strict=True)
    }


def steps(code: Code) -> list[list[str]]:
    """The mainloops. Longer loops are those over tiles, or jumps back from where a warp waits for a stage."""
    place = {at: i for i, (at, _) in enumerate(code)}
    loops = []
    for i, (_, what) in enumerate(code):
        branch = BRANCH.search(what)
        begin = place.get(int(branch[1], 16)) if branch else None
        if begin is not None and i - LONGEST_STEP < begin < i:
            loops.append([instruction for _, instruction in code[begin : i + 1]])
    return [loop for loop in loops if any("GMMA" in instruction for instruction in loop)]


def test_no_kernel_spills(usage: dict[str, str], kernels: dict[str, Code]) -> None:
    for name in kernels:
        assert "STACK:0 " in usage[name] and "LOCAL:0 " in usage[name], f"{name}: {usage[name]}"


def test_every_kernel_has_its_wgmma_instruction(kernels: dict[str, Code]) -> None:
    assert len(kernels) >= 38
    for name, code in kernels.items():
        wanted, other = "HGMMA", "QGMMA"
        if any(mainloop in name for mainloop in FP8_MAINLOOPS):
            wanted, other = other, wanted
        assert any(wanted in what for _, what in code), name
        assert not any(other in what for _, what in code), name


def test_steps_read_descriptors_from_uniform_registers(kernels: dict[str, Code]) -> None:
    """If descriptors are not in uniform registers, each is moved there (R2UR), which slows the mainloop down."""
    for name, code in kernels.items():
        loops = steps(code)
        assert loops, name
        for loop in loops:
            wgmmas = sum("GMMA" in what for what in loop)
            moves = sum("R2UR" in what for what in loop)
            assert moves <= wgmmas / 4, f"{name}: {moves} moves for {wgmmas} WGMMAs"


def known_before(code: Code) -> list[Known | None]:
    """Predicates with a known value before each instruction, on all paths to it; None if no path is found."""
    place = {at: i for i, (at, _) in enumerate(code)}
    before: list[Known | None] = [{}] + [None] * (len(code) - 1)
    waiting = [0]
    while waiting:
        i = waiting.pop()
        after = known_after(before[i] or {}, code[i][1])
        branch = JUMP.match(code[i][1])
        ways = [place[int(branch[2], 16)]] if branch and int(branch[2], 16) in place else []
        if not ENDS.match(code[i][1]) and i + 1 < len(code):
            ways.append(i + 1)
        for way in ways:
            own = before[way]
            met = after if own is None else {name: x for name, x in own.items() if after.get(name) is x}
            if met != own:
                before[way] = dict(met)
                waiting.append(way)
    return before


def known_after(known: Known, what: str) -> Known:
    if what.startswith(("CALL", "R2P", "@")) and ("CALL" in what or "R2P" in what):
        return {}
    guard, operation, operands = PARTS.match(what).groups()  # type: ignore[union-attr]
    written = {name for name in operands.split(", ")[:2] if PREDICATE.match(name)}
    if operation == "PLOP3.LUT" and (constant := CONSTANT.match(operands)) and not guard:
        return known | {constant[1]: constant[2] == "80"}
    return {name: x for name, x in known.items() if name not in written}


def test_no_instruction_is_guarded_by_a_false_predicate(kernels: dict[str, Code]) -> None:
    """nvcc 13.0 has set a predicate to true and then moved a TMA coordinate under its negation: the copy went to the
    coordinates of the previous one."""
    constants = 0
    for name, code in kernels.items():
        for (at, what), known in zip(code, known_before(code), strict=True):
            constants += len(known or {})
            guard = GUARD.match(what)
            if known is not None and guard:
                assert known.get(guard[2]) is not (guard[1] == "!"), f"{name}, {at:#x}: {what}"
    assert constants, "no predicate is known anywhere: has their notation changed?"
