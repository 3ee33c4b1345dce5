"""What the compiler made of the kernels for Hopper, read from the library: needs cuobjdump, and no GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import CUDA_HOME

from transformer_plugin._library import LIBRARY

PRODUCTS = (
    "sm90_grouped_gemm_kernel",
    "sm90_grouped_gemm_gather_kernel",
    "sm90_grouped_wgrad_kernel",
    "sm90_grouped_gemm_mx_nv_kernel",
)
# Kinds of operands whose FP8 codes are multiplied as they are. The others are multiplied in 16 bits.
FP8_KINDS = "6BlocksE", "5CodesI", "14RowScaledCodesI", "12BlockColumnsI", "11CodeColumnsI"
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);")
BRANCH = re.compile(r"\bBRA\S*\s.*?(?:0x([0-9a-f]+))\s*$")
LONGEST_STEP = 600  # instructions
# Ways of control and predicates, as cuobjdump writes them.
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
    done = subprocess.run([tool, *arguments, str(LIBRARY)], capture_output=True, text=True, check=False)
    if "does not contain device code" in done.stdout + done.stderr:
        pytest.skip("needs a library with kernels")
    done.check_returncode()
    return done.stdout


@pytest.fixture(scope="module")
def usage() -> dict[str, str]:
    """What each kernel holds beside registers."""
    text = cuobjdump("--dump-resource-usage")
    return dict(re.findall(r"Function (\w+):\s+(REG:.*)", text))


@pytest.fixture(scope="module")
def products(usage: dict[str, str]) -> dict[str, Code]:
    """The instructions of each product, with their addresses."""
    names = [name for name in usage if any(kernel in name for kernel in PRODUCTS)]
    if not names:
        pytest.skip("needs a library with kernels for 9.0a")
    text = cuobjdump("-sass", "-fun", ",".join(names))
    functions = re.split(r"Function : (\w+)", text)[1:]
    return {
        name: [(int(at, 16), what) for at, what in INSTRUCTION.findall(body)]
        for name, body in zip(functions[::2], functions[1::2], strict=True)
    }


def steps(code: Code) -> list[list[str]]:
    """The loops that multiply. Longer ones are of tiles, or lead back from where a warp waits for a stage."""
    place = {at: i for i, (at, _) in enumerate(code)}
    loops = []
    for i, (_, what) in enumerate(code):
        branch = BRANCH.search(what)
        begin = place.get(int(branch[1], 16)) if branch else None
        if begin is not None and i - LONGEST_STEP < begin < i:
            loops.append([instruction for _, instruction in code[begin : i + 1]])
    return [loop for loop in loops if any("GMMA" in instruction for instruction in loop)]


def test_no_product_spills(usage: dict[str, str], products: dict[str, Code]) -> None:
    for name in products:
        assert "STACK:0 " in usage[name] and "LOCAL:0 " in usage[name], f"{name}: {usage[name]}"


def test_every_product_has_its_instruction(products: dict[str, Code]) -> None:
    assert len(products) >= 40
    for name, code in products.items():
        wanted, other = "HGMMA", "QGMMA"
        if any(kind in name for kind in FP8_KINDS):
            wanted, other = other, wanted
        assert any(wanted in what for _, what in code), name
        assert not any(other in what for _, what in code), name


def test_steps_read_descriptors_from_uniform_registers(products: dict[str, Code]) -> None:
    """Where the compiler loses those it moves each descriptor from a thread's, and products take 1 to 6 % longer."""
    for name, code in products.items():
        loops = steps(code)
        assert loops, name
        for loop in loops:
            multiplied = sum("GMMA" in what for what in loop)
            moved = sum("R2UR" in what for what in loop)
            assert moved <= multiplied / 4, f"{name}: {moved} moves for {multiplied} products"


def known_before(code: Code) -> list[Known | None]:
    """The predicates that are true, or false, whichever way leads to an instruction; None where none is seen to."""
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


def test_nothing_waits_for_what_cannot_be(products: dict[str, Code]) -> None:
    """nvcc 13.0 has set a predicate to true just before it moved a coordinate of a copy under the negation: the copy
    went to where the one before it had gone."""
    constants = 0
    for name, code in products.items():
        for (at, what), known in zip(code, known_before(code), strict=True):
            constants += len(known or {})
            guard = GUARD.match(what)
            if known is not None and guard:
                assert known.get(guard[2]) is not (guard[1] == "!"), f"{name}, {at:#x}: {what}"
    assert constants, "no predicate is known anywhere: are they set in other words?"
