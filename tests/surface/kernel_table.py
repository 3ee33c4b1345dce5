"""The manual's tables of which kernel runs, computed with ``grouped_gemm_plan`` and written by
``tests.surface.update``."""

from __future__ import annotations

import torch

from tests.surface.surface import ROOT
from transformer_plugin import ops

PAGE = ROOT / "docs" / "ops" / "gemm.md"
BEGIN, END = "<!-- which kernel runs: begin -->\n", "<!-- which kernel runs: end -->"
DEVICES = {"Hopper": 90, "Blackwell, 10.0": 100, "Blackwell, 12.0": 120}
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
#: Name, dtype of unquantized operands, and formats of rows, of a weight, and of the operands of a weight
#: gradient.
OPERANDS = (
    ("bfloat16", BFLOAT16, "none", "none", "none"),
    ("float16", FLOAT16, "none", "none", "none"),
    ("float32", FLOAT32, "none", "none", "none"),
    ("`fp8_tensor`", BFLOAT16, "fp8_tensor", "fp8_tensor", "fp8_tensor"),
    ("`fp8_row`", BFLOAT16, "fp8_row", "fp8_row", "none"),
    ("`fp8_block`", BFLOAT16, "fp8_block", "fp8_block:square", "fp8_block"),
    ("`mxfp8`", BFLOAT16, "mxfp8", "mxfp8", "mxfp8"),
    ("`nvfp4`", BFLOAT16, "nvfp4", "nvfp4:square", "nvfp4"),
)


def _plan(product: str, dtype: torch.dtype, out: torch.dtype, a: str, b: str, capability: int) -> str:
    sizes = {"rows": 8192, "groups": 8, "n": 2048, "k": 2048, "multiprocessors": 132}
    formats = {"a_format": a, "b_format": b, "capability": capability}
    return ops.grouped_gemm_plan(product, dtype, out, **sizes, **formats).backend


def table(capability: int) -> list[str]:
    """Returns the table of one device, with one row per kind of operands."""
    lines = [
        "| operands | output | data gradient | weight gradient | weight gradient in float32 |",
        "|---|---|---|---|---|",
    ]
    for name, dtype, rows, weight, columns in OPERANDS:
        cells = [
            _plan("forward", dtype, dtype, rows, weight, capability),
            # The data gradient uses a column-wise quantized weight, for which the product is a "forward".
            _plan("data_grad" if rows == "none" else "forward", dtype, dtype, rows, weight, capability),
            _plan("weight_grad", dtype, dtype, columns, columns, capability),
            _plan("weight_grad", dtype, FLOAT32, columns, columns, capability),
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def text() -> str:
    """Returns the tables of all devices."""
    blocks = [f"{name}:\n\n" + "\n".join(table(capability)) for name, capability in DEVICES.items()]
    return BEGIN + "\n" + "\n\n".join(blocks) + "\n\n" + END


def written() -> str:
    """Returns the tables in the manual."""
    page = PAGE.read_text()
    return page[page.index(BEGIN) : page.index(END) + len(END)]


def update() -> None:
    """Replaces the tables in the manual."""
    PAGE.write_text(PAGE.read_text().replace(written(), text()))
