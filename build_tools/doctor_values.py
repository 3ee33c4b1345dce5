"""Writes the checksums that the doctor compares with: ``python -m build_tools.doctor_values``.

They are those of the references in plain PyTorch, on a CPU, and not of the code that the doctor examines.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from transformer_plugin import reference
from transformer_plugin.doctor import values
from transformer_plugin.reference.linear import grouped_linear, linear

STORED = Path(values.__file__).with_name("_stored.py")


def _products() -> Iterator[tuple[str, str]]:
    for name, exact_in_nvfp4 in (("integers", False), ("quarters", True)):
        scale = 0.25 if exact_in_nvfp4 else 1.0
        made = [(x * scale).bfloat16() for x in values.operands(exact_in_nvfp4)]
        for layer in ("linear", "grouped_linear"):
            input, weight, bias = made[0].clone(), made[1].clone(), made[3].clone()
            if layer == "linear":
                weight, bias = weight[0], bias[0]
            leaves: list[Tensor] = [input, weight, bias]
            for leaf in leaves:
                leaf.requires_grad_()
            sizes = torch.tensor(values.SIZES)
            output = (
                linear(input, weight, bias)
                if layer == "linear"
                else grouped_linear(input, weight, sizes, bias)
            )
            output.backward(made[2])
            results = (output, *(leaf.grad for leaf in leaves))
            for result, tensor in zip(values.RESULTS, results, strict=True):
                assert tensor is not None
                yield f"{name} {layer} {result}", values.checksum(tensor)


def checksums() -> dict[str, str]:
    """All of them, by name."""
    return {**dict(values.quantized(torch.device("cpu"), reference)), **dict(_products())}


def text() -> str:
    """The text of the module."""
    lines = "".join(f'    "{name}": "{value}",\n' for name, value in checksums().items())
    return (
        '"""Checksums of the values that :mod:`transformer_plugin.doctor.values` makes. Written by\n'
        '``python -m build_tools.doctor_values``."""\n\n'
        f"STORED = {{\n{lines}}}\n"
    )


if __name__ == "__main__":
    STORED.write_text(text())
    print(f"wrote {STORED.relative_to(Path.cwd())}")
