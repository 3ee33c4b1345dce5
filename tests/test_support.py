"""explain_support: correct for each recipe and device, also where nothing runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import transformer_plugin as tp
from transformer_plugin.recipes import (
    BFloat16,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    recipe_from_name,
)


@dataclass(frozen=True)
class Keys(Recipe):
    """A recipe with any three format keys."""

    input_format: str = "none"
    weight_format: str = "none"
    grad_format: str = "none"


@pytest.mark.parametrize(
    "name", ["none", "bf16", "fp8_tensor", "fp8_row", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"]
)
def test_every_recipe_on_every_device(name: str, device: torch.device) -> None:
    recipe = recipe_from_name(name)
    text = tp.explain_support(recipe, device)
    first, *rest = text.splitlines()
    assert first.startswith(
        f"{'no recipe' if recipe is None else type(recipe).__name__} on {device}: complete"
    )
    assert rest[0] == "formats: input {}, weight {}, gradient {}".format(
        *([name] * 3 if recipe is None else [recipe.input_format, recipe.weight_format, recipe.grad_format])
    )
    assert ("quantization: " in text) == name.startswith(("fp8", "mx", "nv"))
    at = next(i for i, line in enumerate(rest) if line.startswith("products: "))
    assert rest[at].endswith(("rounded once", "slower than no recipe"))
    names = [line.split(":")[0].strip() for line in rest[at + 1 :]]
    assert names == ([] if device.type == "cpu" else ["forward", "data_grad", "weight_grad"])


def test_products_are_those_of_the_plan() -> None:
    """Each line agrees with grouped_gemm_plan for the layer's pair of formats."""
    if "this build has no CUDA kernels" in tp.explain_support(None, "cuda"):
        pytest.skip("what a GPU does is said where there are kernels for one")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("what follows is of a Hopper")
    lines = tp.explain_support(Float8BlockScaling(), "cuda").splitlines()[-3:]
    ours = (
        "this package's Hopper kernels on FP8 tensor cores; "
        "after every 128 products the partial sum is added in FP32"
    )
    why = "dtypes, sizes and alignment are those of the Hopper kernels"
    assert lines == [f"  {product}: {ours} ({why})" for product in ("forward", "data_grad", "weight_grad")]
    for recipe in (None, recipe_from_name("bf16")):  # without quantized operands
        first = tp.explain_support(recipe, "cuda").splitlines()[-3]
        assert first == f"  forward: this package's Hopper kernels ({why})"
    row = tp.explain_support(recipe_from_name("fp8_row"), "cuda").splitlines()[-1]
    assert (
        row == f"  weight_grad: this package's Hopper kernels ({why})"
    )  # of operands that are not quantized
    last = tp.explain_support(MXFP8BlockScaling(), "cuda").splitlines()[-1]
    assert last == (
        "  weight_grad: operands are dequantized, then multiplied as without a recipe "
        "(no kernel multiplies these two formats)"
    )


def test_what_the_operands_become() -> None:
    """Only power-of-two scales are exact in bfloat16, and the text says so."""
    exact = "operands are dequantized exactly to bfloat16"
    assert exact in tp.explain_support(Float8BlockScaling(), "cpu")
    assert exact in tp.explain_support(MXFP8BlockScaling(), "cpu")
    for recipe in (Float8BlockScaling(power_of_two_scales=False), Float8CurrentScaling()):
        assert "operands are dequantized to float32" in tp.explain_support(recipe, "cpu")
    plain = NVFP4BlockScaling(stochastic_rounding=False)
    for recipe in (NVFP4BlockScaling(), plain):
        text = tp.explain_support(recipe, "cpu")
        assert "operands are dequantized to float32" in text
        assert "widths, and for the backward the rows (of each group), must be multiples of 16" in text
        assert ("rounded at random, seeded by torch's generator" in text) == (recipe is not plain)
    assert "widths must be multiples of 32" in tp.explain_support(MXFP8BlockScaling(), "cpu")


def test_where_the_scales_come_from() -> None:
    for recipe, words in (
        (DelayedScaling(), "scales: from the largest amax of 1024 steps; each tensor is read once"),
        (
            DelayedScaling(margin=2, amax_compute_algo="most_recent"),
            "scales: from the amax of the previous step, divided by 2^2; each tensor is read once",
        ),
    ):
        assert f"\n{words}, and the module's buffers keep the state\n" in tp.explain_support(recipe, "cpu")
    assert "scales: " not in tp.explain_support(Float8CurrentScaling(), "cpu")


@pytest.mark.parametrize(
    ("recipe", "decodes"),
    [
        (MXFP8BlockScaling(), True),
        (Keys("mxfp8:tiled", "mxfp8:square", "mxfp8:e5m2"), True),
        (Keys("mxfp8", "mxfp8:e5m2,tiled", "mxfp8:e5m2,tiled"), True),
        (NVFP4BlockScaling(), True),
        (Keys("nvfp4:tiled", "nvfp4:square,tiled", "nvfp4"), True),
        (NVFP4BlockScaling(False, False, False, row_scaled_activations=True), False),
        (Float8BlockScaling(), False),
    ],
)
def test_formats_that_hopper_kernels_dequantize(recipe: Recipe, decodes: bool) -> None:
    """For either element and layout of scales, but not with an amax per row."""
    text = tp.explain_support(recipe, "cuda")
    if "this build has no CUDA kernels" in text:
        pytest.skip("what a GPU does is said where there are kernels for one")
    forward = next(line for line in text.splitlines() if line.startswith("  forward: "))
    assert ("which dequantize to bfloat16" in forward) == decodes


def test_what_decides_whether_experts_are_one_op() -> None:
    rule = "experts: GroupedMLP runs both products as one op, while no hook or other forward needs a tensor between"
    assert rule in tp.explain_support(None, "cpu") and rule in tp.explain_support(Float8BlockScaling(), "cpu")
    assert "experts: GroupedMLP calls its two layers" in tp.explain_support(DelayedScaling(), "cpu")


def test_how_tokens_travel() -> None:
    assert (
        "\nbetween ranks: the transport all_gather moves tokens, by collectives of Gloo"
        in tp.explain_support(None, "cpu")
    )
    text = tp.explain_support(None, "cuda")
    if "this build has no CUDA kernels" in text:
        pytest.skip("what a GPU does is said where there are kernels for one")
    assert "the transport one_sided moves tokens, by stores of each row" in text
    assert (
        "elsewhere the transport all_gather moves tokens, by collectives of the group, such as NCCL" in text
    )


def test_which_recipe_is_faster(device: torch.device) -> None:
    """The line is there on devices with a measurement, and recommends no other recipe beside the fastest one."""
    recipes = (None, BFloat16(), Float8CurrentScaling(), Float8BlockScaling())
    texts = [tp.explain_support(recipe, device) for recipe in recipes]
    lines = [[line for line in text.splitlines() if line.startswith("speed: ")] for text in texts]
    if device.type == "cpu":
        (none,), bfloat16, (current,), (block,) = lines
        assert none == "speed: no recipe that quantizes is faster on a CPU"
        assert bfloat16 == []  # nothing is dequantized, and where the parameters are float32 it may be faster
        assert current == block and block.startswith("speed: no recipe is faster on a CPU")
    elif torch.cuda.get_device_capability(device) == (9, 0):
        (none,), (bfloat16,), (current,), (block,) = lines
        assert none == bfloat16 and none.startswith("speed: Float8BlockScaling is faster on Hopper")
        assert current.startswith("speed: Float8BlockScaling is as fast or faster (within 5 %) on Hopper")
        assert block.startswith("speed: the fastest recipe, or within 5 % of it, on Hopper")
    else:
        assert lines == [[], [], [], []]


def test_the_figures_are_those_of_the_page() -> None:
    """Of steps with quantize_weights() once for four micro-batches, in every mode, and once for eight."""
    page = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "moe_layer_cuda.json"
    rows = [row for row in json.loads(page.read_text())["rows"] if "step_us" in row]
    times: dict[tuple[Any, ...], float] = {}
    for row in rows:
        for kind in ("step_us", "sustained_us"):
            if kind in row:
                place = (kind, row["layer"], row["routing"], row["mode"])
                times[(*place, row["competitor"], row["micro_batches"])] = row[kind]["median"]
    blocks = [key for key in times if key[4] == "ours fp8_block" and key[5] in (4, 8)]
    assert len({key[1] for key in blocks}) >= 3
    for *place, _, batches in blocks:
        time = times[(*place, "ours fp8_block", batches)]
        assert time < times[(*place, "ours bf16", None)], place
        assert time < 1.05 * times[(*place, "ours fp8_tensor", batches)], place


def test_how_tokens_are_read(device: torch.device) -> None:
    copied = "tokens: MoE copies the rows of each expert first"
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    for name, words in (
        ("none", "tokens: MoE reads 16-bit tokens by an index"),
        ("bf16", "tokens: MoE reads 16-bit tokens by an index"),
        ("fp8_block", "tokens: MoE quantizes 16-bit tokens"),
        ("fp8_tensor", "tokens: MoE quantizes 16-bit tokens"),
        ("fp8_delayed", copied),
        ("mxfp8", copied),
        ("nvfp4", copied),
    ):
        text = tp.explain_support(recipe_from_name(name), device)
        (line,) = (line for line in text.splitlines() if line.startswith("tokens: "))
        assert line.startswith(words) if hopper else line == copied
    marked = Keys(*("fp8_block:nan",) * 3)
    assert copied + (", as an option `nan` needs them" if hopper else "") in tp.explain_support(
        marked, device
    )


@pytest.mark.parametrize(
    ("name", "width", "backend"),
    [
        ("none", 2049, "this package's kernels for any GPU"),
        ("fp8_block", 2049, "operands are dequantized, then multiplied as without a recipe"),
        ("fp8_tensor", 2049, "operands are dequantized, then multiplied as without a recipe"),
        ("fp8_delayed", 2049, "operands are dequantized, then multiplied as without a recipe"),
        ("mxfp8", None, ""),
    ],
)
def test_widths_with_slower_products(name: str, width: int | None, backend: str) -> None:
    """Odd widths are not multiplied by the Hopper kernels; mxfp8 has no widths but those that are."""
    text = tp.explain_support(recipe_from_name(name), "cuda")
    if "this build has no CUDA kernels" in text:
        pytest.skip("what a GPU does is said where there are kernels for one")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("what follows is of a Hopper")
    lines = [line for line in text.splitlines() if line.startswith("widths such as ")]
    if width is None:
        assert lines == []
        return
    reason = "a size is 0, or 2^30 - 1 or more, or a row is not a multiple of 16 bytes"
    assert lines == [f"widths such as {width}: {backend} ({reason})"]
    assert "widths such as" not in tp.explain_support(recipe_from_name(name), "cpu")


def test_where_nothing_runs() -> None:
    assert tp.explain_support(None, "mps") == (
        "no recipe on mps: this package does not run there; use a CPU or a CUDA device"
    )


def test_error() -> None:
    with pytest.raises(TypeError) as error:
        tp.explain_support("fp8_block", "cpu")  # type: ignore[arg-type]
    assert str(error.value) == (
        "transformer_plugin.explain_support: argument 'recipe': expected a Recipe or None, got str. "
        "Use transformer_plugin.recipes.recipe_from_name to get one from a name."
    )
