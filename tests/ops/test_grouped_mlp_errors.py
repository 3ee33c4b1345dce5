"""grouped_mlp refuses bad arguments on every path before it computes anything; each error has four parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.test_grouped_mlp_memory import RecordedCalls
from tests.ops.test_linear_ops import RECIPES, keys
from transformer_plugin import ops

BLOCK, MX, NV = (keys(RECIPES[name]) for name in ("block", "mx", "nv"))


def arguments(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Returns valid arguments filled with ones: T 8, H 32, F 64, G 2."""
    shapes = {
        "input": (8, 32),
        "fc1_weight": (2, 128, 32),
        "fc2_weight": (2, 32, 64),
        "probs": (8,),
        "fc1_bias": (2, 128),
        "fc2_bias": (2, 32),
    }
    tensors = {name: torch.ones(shape, device=device) for name, shape in shapes.items()}
    return tensors | {"group_sizes": torch.tensor([3, 4], device=device)}


def formats(keys: tuple[str, str, str]) -> dict[str, str]:
    return dict(zip(("input_format", "weight_format", "grad_format"), keys, strict=True))


CASES: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"input": torch.ones(8, 32, dtype=torch.float64)},
        TypeError,
        "argument 'input': expected one of the dtypes float32, bfloat16, float16, got float64. "
        "Convert it with .to() first.",
    ),
    (
        {"input": torch.ones(8)},
        ValueError,
        "argument 'input': expected 2 dimensions, got float32[8] on cpu. Reshape it first.",
    ),
    (
        {"fc1_weight": torch.ones(2, 128, 32).bfloat16()},
        TypeError,
        "argument 'fc1_weight': expected float32, like input, got bfloat16. Convert one of them with .to() first.",
    ),
    (
        {"fc1_weight": torch.ones(2, 128, 16)},
        ValueError,
        "argument 'fc1_weight': expected size 32 in dimension 2 (the columns of 'input'), got float32[2, 128, 16] "
        "on cpu. Pass tensors whose sizes agree.",
    ),
    (
        {"fc1_weight": torch.ones(2, 127, 32)},
        ValueError,
        "argument 'fc1_weight': expected an even number of rows (gate and linear halves) in each group, got "
        "float32[2, 127, 32] on cpu. Concatenate the two halves along dimension 1.",
    ),
    (
        {"fc2_weight": torch.ones(3, 32, 64)},
        ValueError,
        "argument 'fc2_weight': expected size 2 in dimension 0 (the groups of 'fc1_weight'), got float32[3, 32, 64] "
        "on cpu. Pass tensors whose sizes agree.",
    ),
    (
        {"fc2_weight": torch.ones(2, 31, 64)},
        ValueError,
        "argument 'fc2_weight': expected size 32 in dimension 1 (the columns of 'input'), got float32[2, 31, 64] "
        "on cpu. Pass tensors whose sizes agree.",
    ),
    (
        {"fc2_weight": torch.ones(2, 32, 128)},
        ValueError,
        "argument 'fc2_weight': expected size 64 in dimension 2 (half the rows of 'fc1_weight' in a group), got "
        "float32[2, 32, 128] on cpu. Pass tensors whose sizes agree.",
    ),
    (
        {"group_sizes": torch.tensor([3, 4, 0])},
        ValueError,
        "argument 'group_sizes': expected size 2 in dimension 0 (the matrices of 'fc1_weight'), got int64[3] on cpu. "
        "Pass tensors whose sizes agree.",
    ),
    (
        {"probs": torch.ones(8).bfloat16()},
        TypeError,
        "argument 'probs': expected one of the dtypes float32, got bfloat16. Convert it with .to() first.",
    ),
    (
        {"probs": torch.ones(7)},
        ValueError,
        "argument 'probs': expected size 8 in dimension 0 (the rows of 'input'), got float32[7] on cpu. "
        "Pass tensors whose sizes agree.",
    ),
    (
        {"fc1_bias": torch.ones(2, 64)},
        ValueError,
        "argument 'fc1_bias': expected size 128 in dimension 1 (the columns of the output), got float32[2, 64] on "
        "cpu. Pass tensors whose sizes agree.",
    ),
    (
        {"fc2_bias": torch.ones(1, 32)},
        ValueError,
        "argument 'fc2_bias': expected size 2 in dimension 0 (the groups), got float32[1, 32] on cpu. "
        "Pass tensors whose sizes agree.",
    ),
    (
        {"fc2_weight": torch.ones(2, 32, 64, device="meta")},
        ValueError,
        "argument 'fc2_weight': expected a tensor on cpu, like input, got float32[2, 32, 64] on meta. "
        'Move it with .to("cpu") first.',
    ),
    (
        formats((BLOCK[1], BLOCK[1], BLOCK[0])),
        ValueError,
        "argument 'input_format': expected blocks along rows, which end where a group ends, got "
        "'fp8_block:e4m3,pow2,square'. Square blocks are for the weight.",
    ),
    (
        formats((BLOCK[0], MX[1], BLOCK[2])),
        ValueError,
        "argument 'weight_format': expected a format of the family of input_format, 'fp8_block:e4m3,pow2', got "
        "'mxfp8:e4m3'. Use the three formats of one recipe.",
    ),
    (
        formats(MX)
        | {
            "input": torch.ones(8, 24),
            "fc1_weight": torch.ones(2, 128, 24),
            "fc2_weight": torch.ones(2, 24, 64),
            "fc2_bias": None,
        },
        ValueError,
        "argument 'input': expected a last dimension that is a multiple of 32, the block of mxfp8, got "
        "float32[8, 24] on cpu. Pad it with zeros, for example with torch.nn.functional.pad.",
    ),
    (
        formats(NV)
        | {"fc1_weight": torch.ones(2, 80, 32), "fc2_weight": torch.ones(2, 32, 40), "fc1_bias": None},
        ValueError,
        "argument 'fc2_weight': expected a last dimension that is a multiple of 16, the block of nvfp4, got "
        "float32[2, 32, 40] on cpu. Pad the weights with zeros, both halves of the first.",
    ),
    (
        {"weight_shard": "rows=2,ranks=2,handle=7,name=fc1.weight,group="},
        ValueError,
        "argument 'weight_shard': expected a key without 'handle', which stands for one weight, got "
        "'rows=2,ranks=2,handle=7,name=fc1.weight,group='. Call grouped_linear for each weight.",
    ),
]


#: A tensor on another device is no error where all are on the meta device.
ON_PATHS = [
    pytest.param(*case, path, id=f"{path}-{case[2][:40]}")
    for path in ("plain", "gradient", "meta")
    for case in CASES
    if path != "meta" or not ("like input" in case[2] and "cpu" in case[2])
]


@pytest.mark.parametrize(("changed", "error", "text", "path"), ON_PATHS)
def test_errors_have_four_parts(
    changed: dict[str, Any], error: type[Exception], text: str, path: str
) -> None:
    all_arguments = arguments() | changed
    if path == "gradient":
        all_arguments["fc2_weight"] = all_arguments["fc2_weight"].clone().requires_grad_()
    if path == "meta":
        all_arguments = {
            name: value.to("meta") if isinstance(value, Tensor) else value
            for name, value in all_arguments.items()
        }
        text = text.replace("on cpu", "on meta")
    with RecordedCalls() as calls, pytest.raises(error) as caught:
        ops.grouped_mlp(**all_arguments)
    assert calls.names in ([], ["grouped_mlp"]), "nothing was computed"
    assert str(caught.value) == f"transformer_plugin::grouped_mlp: {text}"


def test_valid_arguments_are_accepted() -> None:
    assert ops.grouped_mlp(**arguments()).shape == (8, 32)
    assert ops.grouped_mlp(**arguments("meta")).shape == (8, 32)


@pytest.mark.parametrize("sizes", [[3, 6], [-1, 4]])
@pytest.mark.parametrize("keys", [("none",) * 3, BLOCK, MX])
def test_sizes_are_checked_on_a_cpu(sizes: list[int], keys: tuple[str, str, str]) -> None:
    """The first op that reads the sizes checks them, and the error names that op."""
    all_arguments = arguments() | {"group_sizes": torch.tensor(sizes)} | formats(keys)
    with pytest.raises(ValueError, match="argument 'group_sizes': expected sizes"):
        ops.grouped_mlp(**all_arguments)


def test_nvfp4_backward_requires_whole_blocks_of_rows() -> None:
    """A backward requires whole blocks of rows, and a forward does not."""
    all_arguments = arguments() | formats(NV)
    assert ops.grouped_mlp(**all_arguments).isfinite().all()
    all_arguments["fc1_weight"] = all_arguments["fc1_weight"].requires_grad_()
    with pytest.raises(ValueError, match="multiple of 16, the block of nvfp4 in transposed data"):
        ops.grouped_mlp(**all_arguments)
