"""Recipes: their format keys, and the effect of every argument."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch

from transformer_plugin import ops
from transformer_plugin.formats import Format
from transformer_plugin.recipes import (
    BFloat16,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    recipe_from_name,
)


def roles(recipe: Recipe) -> tuple[str, str, str]:
    return recipe.input_format, recipe.weight_format, recipe.grad_format


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Recipe(), ("none", "none", "none")),
        (BFloat16(), ("bf16", "bf16", "bf16")),
        (
            Float8CurrentScaling(),
            ("fp8_tensor:e4m3,fp32", "fp8_tensor:e4m3,fp32", "fp8_tensor:e5m2,fp32"),
        ),
        (
            Float8CurrentScaling(hybrid=False, power_of_two_scales=True),
            ("fp8_tensor:e4m3,pow2", "fp8_tensor:e4m3,pow2", "fp8_tensor:e4m3,pow2"),
        ),
        (
            Float8CurrentScaling(amax_epsilon=0.5),
            ("fp8_tensor:e4m3,fp32,eps=0.5", "fp8_tensor:e4m3,fp32,eps=0.5", "fp8_tensor:e5m2,fp32,eps=0.5"),
        ),
        (Float8RowwiseScaling(), ("fp8_row:e4m3,pow2",) * 3),
        (
            Float8RowwiseScaling(hybrid=True, power_of_two_scales=False, amax_epsilon=0.5),
            ("fp8_row:e4m3,fp32,eps=0.5", "fp8_row:e4m3,fp32,eps=0.5", "fp8_row:e5m2,fp32,eps=0.5"),
        ),
        (DelayedScaling(), ("fp8_tensor:e4m3,fp32", "fp8_tensor:e4m3,fp32", "fp8_tensor:e5m2,fp32")),
        (DelayedScaling(hybrid=False), ("fp8_tensor:e4m3,fp32",) * 3),
        (
            Float8BlockScaling(),
            ("fp8_block:e4m3,pow2", "fp8_block:e4m3,pow2,square", "fp8_block:e4m3,pow2"),
        ),
        (
            Float8BlockScaling(power_of_two_scales=False, amax_epsilon=1e-12),
            (
                "fp8_block:e4m3,fp32,eps=1e-12",
                "fp8_block:e4m3,fp32,square,eps=1e-12",
                "fp8_block:e4m3,fp32,eps=1e-12",
            ),
        ),
        (MXFP8BlockScaling(), ("mxfp8:e4m3", "mxfp8:e4m3", "mxfp8:e4m3")),
        (MXFP8BlockScaling(square_weights=True), ("mxfp8:e4m3", "mxfp8:e4m3,square", "mxfp8:e4m3")),
        (NVFP4BlockScaling(), ("nvfp4:e2m1,rht", "nvfp4:e2m1,square", "nvfp4:e2m1,rht,sr")),
        (
            NVFP4BlockScaling(random_hadamard=False, stochastic_rounding=False, square_weights=False),
            ("nvfp4:e2m1", "nvfp4:e2m1", "nvfp4:e2m1"),
        ),
        (
            NVFP4BlockScaling(random_hadamard=False, row_scaled_activations=True),
            ("nvfp4:e2m1,row_scaled", "nvfp4:e2m1,square", "nvfp4:e2m1,sr"),
        ),
        (
            NVFP4BlockScaling(random_hadamard=False, square_weights=False, four_over_six="mae"),
            ("nvfp4:e2m1,4over6", "nvfp4:e2m1,4over6", "nvfp4:e2m1,sr"),
        ),
        (
            NVFP4BlockScaling(False, False, False, True, "mse"),
            ("nvfp4:e2m1,row_scaled,4over6_mse", "nvfp4:e2m1,4over6_mse", "nvfp4:e2m1"),
        ),
    ],
    ids=str,
)
def test_formats(recipe: Recipe, expected: tuple[str, str, str]) -> None:
    assert roles(recipe) == expected
    for key in expected:
        assert Format.parse(key).key == key


def test_every_argument_changes_bytes() -> None:
    input = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))

    def same(a: str, b: str) -> bool:
        pairs = zip(ops.quantize(input, a), ops.quantize(input, b), strict=True)
        return all(
            x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs
        )

    for plain, changed in [
        (Float8CurrentScaling(), Float8CurrentScaling(hybrid=False)),
        (Float8CurrentScaling(), Float8CurrentScaling(power_of_two_scales=True)),
        (Float8CurrentScaling(), Float8CurrentScaling(amax_epsilon=7.0)),
        (Float8BlockScaling(), Float8BlockScaling(power_of_two_scales=False)),
        (Float8BlockScaling(), Float8BlockScaling(amax_epsilon=7.0)),
    ]:
        assert not same(plain.grad_format, changed.grad_format), changed
    square = MXFP8BlockScaling(square_weights=True)
    assert not same(MXFP8BlockScaling().weight_format, square.weight_format)


def test_frozen_values() -> None:
    recipe = Float8CurrentScaling(amax_epsilon=1e-6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.hybrid = False  # type: ignore[misc]
    assert recipe == Float8CurrentScaling(amax_epsilon=1e-6) and recipe != Float8CurrentScaling()
    assert hash(recipe) == hash(Float8CurrentScaling(amax_epsilon=1e-6))
    assert pickle.loads(pickle.dumps(recipe)) == recipe


def test_names() -> None:
    assert recipe_from_name("none") is None
    assert recipe_from_name("bf16") == BFloat16()
    assert recipe_from_name("fp8_tensor") == Float8CurrentScaling()
    assert recipe_from_name("fp8_row") == Float8RowwiseScaling()
    assert recipe_from_name("fp8_delayed") == DelayedScaling()
    assert recipe_from_name("fp8_block") == Float8BlockScaling()
    assert recipe_from_name("mxfp8") == MXFP8BlockScaling()
    assert recipe_from_name("nvfp4") == NVFP4BlockScaling()
    with pytest.raises(ValueError) as caught:
        recipe_from_name("int4")
    assert str(caught.value) == (
        "transformer_plugin.recipe_from_name: argument 'name': expected one of none, bf16, fp8_tensor, "
        "fp8_row, fp8_delayed, fp8_block, mxfp8, nvfp4, got 'int4'. Choose one of them, or construct a recipe."
    )


def test_a_bad_epsilon_is_refused_when_the_recipe_is_made() -> None:
    for make in (Float8CurrentScaling, Float8RowwiseScaling, Float8BlockScaling):
        for epsilon in (-1.0, 1e-60, 1e60, math.inf, math.nan):  # in float32 1e-60 is zero
            with pytest.raises(ValueError) as caught:
                make(amax_epsilon=epsilon)
            assert str(caught.value) == (
                f"transformer_plugin.{make.__name__}: argument 'amax_epsilon': expected 0 or a positive number in "
                f"float32's range, got {epsilon}. Use 0 for no lower bound."
            )
        assert make(amax_epsilon=1).input_format == make(amax_epsilon=1.0).input_format


@pytest.mark.parametrize(
    ("make", "fields", "text"),
    [
        (DelayedScaling, {"amax_history_len": 2.5}, "expected an integer, got 2.5. The default is 1024."),
        (DelayedScaling, {"margin": 0.5}, "expected an integer, got 0.5. The default is 0."),
        (DelayedScaling, {"margin": True}, "expected an integer, got True. The default is 0."),
        (
            Float8CurrentScaling,
            {"hybrid": "e5m2"},
            "expected True or False, got 'e5m2'. The default is True.",
        ),
        (Float8BlockScaling, {"amax_epsilon": "x"}, "expected a number, got 'x'. The default is 0.0."),
        (
            MXFP8BlockScaling,
            {"square_weights": "no"},
            "expected True or False, got 'no'. The default is False.",
        ),
        (
            NVFP4BlockScaling,
            {"random_hadamard": None},
            "expected True or False, got None. The default is True.",
        ),
    ],
    ids=str,
)
def test_arguments_of_another_type(make: type[Recipe], fields: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError) as caught:
        make(**fields)
    (name,) = fields
    assert str(caught.value) == f"transformer_plugin.{make.__name__}: argument '{name}': {text}"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"row_scaled_activations": True},
            "'random_hadamard': expected False with row_scaled_activations=True, got True. "
            "Pass random_hadamard=False.",
        ),
        (
            {"four_over_six": "mae"},
            "'random_hadamard': expected False with four_over_six='mae', got True. Pass random_hadamard=False.",
        ),
        (
            {"four_over_six": "mse", "random_hadamard": False},
            "'square_weights': expected False with four_over_six='mse', got True. Pass square_weights=False.",
        ),
        (
            {"four_over_six": ""},
            "'four_over_six': expected 'none', 'mae' or 'mse', got ''. Choose one.",
        ),
    ],
)
def test_arguments_of_nvfp4_that_exclude_each_other(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        NVFP4BlockScaling(**arguments)
    assert str(caught.value) == f"transformer_plugin.NVFP4BlockScaling: argument {text}"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"margin": -101}, "'margin': expected a number from -100 to 100, got -101. 0 is usual."),
        ({"amax_history_len": 0}, "'amax_history_len': expected at least 1, got 0. 1024 is usual."),
        (
            {"amax_compute_algo": "mean"},
            "'amax_compute_algo': expected 'max' or 'most_recent', got 'mean'. Choose one of them.",
        ),
    ],
    ids=str,
)
def test_bad_arguments_of_delayed_scaling(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        DelayedScaling(**fields)
    assert str(caught.value) == f"transformer_plugin.DelayedScaling: argument {text}"
