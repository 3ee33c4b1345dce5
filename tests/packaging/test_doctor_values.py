"""The values that the doctor compares with: of the references, exact in any order of sums, on every device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from build_tools import doctor_values
from transformer_plugin.doctor import package, values
from transformer_plugin.doctor._stored import STORED
from transformer_plugin.formats import Format
from transformer_plugin.recipes import RECIPES


def test_the_stored_checksums_are_those_of_the_references() -> None:
    assert doctor_values.checksums() == STORED, "run `python -m build_tools.doctor_values`"
    assert doctor_values.STORED.read_text() == doctor_values.text()


def test_all_formats_of_recipes_are_looked_at() -> None:
    families = {Format.parse(key).family for key in values.FORMATS}
    assert families == {"fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "nvfp4"}
    assert {name.split(" ")[0] for name in STORED} == {*values.FORMATS, "integers", "quarters"}


def test_values_are_those_stored(device: torch.device) -> None:
    of_bytes, of_products = values.wrong_bytes(device), values.wrong_products(device)
    assert (of_bytes["wrong"], of_products["wrong"]) == ([], [])
    assert of_bytes["compared"] == sum(name.split(" ")[0] in values.FORMATS for name in STORED)
    assert of_products["compared"] == 2 * len(values.RESULTS) * len(RECIPES)


LIMITS = (
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: "-".join(limit.values()))
def test_other_processors_give_the_same(limit: dict[str, str]) -> None:
    """Of ops and references."""
    code = (
        "from transformer_plugin.doctor import package; from transformer_plugin.doctor._stored import STORED; "
        "from build_tools.doctor_values import checksums; found = package.examine('cpu'); "
        "print([found[name]['result']['wrong'] for name in ('bytes', 'products')], checksums() == STORED)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **limit}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[[], []] True", done.stderr


@pytest.mark.parametrize("exact_in_nvfp4", [False, True])
def test_sums_are_exact_in_any_order(exact_in_nvfp4: bool) -> None:
    """FP8 tensor cores add 128 products with about 13 bits next to the largest of the terms; all others have 24."""
    input, weight, grad, bias = values.operands(exact_in_nvfp4)
    unit, bits = (49, 24) if exact_in_nvfp4 else (1, 12)
    if not exact_in_nvfp4:  # in these columns, which no 128 products leave, all terms are even
        input[:, values.K // 2 :] //= 2
    for a, b in ((input, weight[0].T), (grad, weight[0]), (grad.T, input)):
        for begin in range(0, a.shape[1], 128):
            sums = a[:, begin : begin + 128].abs() @ b[begin : begin + 128].abs()
            assert int(sums.max()) // unit < 2**bits
        assert int((a.abs() @ b.abs()).max()) < 2**24
    assert int(bias.abs().max()) < 8


def test_a_wrong_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    name, product = next(iter(STORED)), "integers linear output"
    monkeypatch.setitem(values.STORED, name, "0" * 16)
    monkeypatch.setitem(values.STORED, product, "1" * 16)
    found = package.examine("cpu")
    assert found["bytes"]["result"]["wrong"] == [
        [name, dict(values.quantized(torch.device("cpu")))[name], "0" * 16]
    ]
    wrong = found["products"]["result"]["wrong"]
    assert [each[0] for each in wrong] == [
        f"{recipe} linear output" for recipe in RECIPES if recipe != "nvfp4"
    ]
    assert {each[2] for each in wrong} == {"1" * 16}


def test_an_error_is_one_line_and_stops_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("one\ntwo")

    monkeypatch.setattr(values, "wrong_bytes", broken)
    found = package.examine("cpu")
    assert found["bytes"] == {"error": "RuntimeError: one two"}
    assert found["products"]["result"]["wrong"] == []
    assert list(found["kernels"]["result"]) == list(RECIPES)
