"""Format: keys are parsed, written and rejected as in C++."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.ops.quantize_oracle import assert_all_same
from transformer_plugin import ops, reference
from transformer_plugin.formats import BLOCK, MX_BLOCK, NV_BLOCK, Format
from transformer_plugin.testing.quantize_cases import amax_of, extras, rows_of

QUANTIZED = [
    ("fp8_tensor", Format("fp8_tensor")),
    ("fp8_tensor:pow2", Format("fp8_tensor", power_of_two_scales=True)),
    ("fp8_tensor:e5m2,eps=0.5", Format("fp8_tensor", "e5m2", epsilon=0.5)),
    ("fp8_tensor:eps=1e-12", Format("fp8_tensor", epsilon=1e-12)),
    ("fp8_tensor:eps=.5E1,e5m2,e4m3", Format("fp8_tensor", epsilon=5.0)),
    ("fp8_row", Format("fp8_row")),
    ("fp8_row:e5m2,pow2,eps=0.25", Format("fp8_row", "e5m2", True, epsilon=0.25)),
    ("fp8_block", Format("fp8_block")),
    ("fp8_block:fp32", Format("fp8_block", power_of_two_scales=False)),
    ("fp8_block:square,e5m2", Format("fp8_block", "e5m2", square_blocks=True)),
    ("fp8_block:e4m3,pow2,square,eps=3.4e38", Format("fp8_block", square_blocks=True, epsilon=3.4e38)),
    ("fp8_block:eps=0", Format("fp8_block")),
    ("fp8_block:eps=-0.0", Format("fp8_block")),
    ("mxfp8", Format("mxfp8")),
    ("mxfp8:e5m2", Format("mxfp8", "e5m2")),
    ("mxfp8:square,e5m2,e4m3", Format("mxfp8", square_blocks=True)),
    ("mxfp8:e5m2,square", Format("mxfp8", "e5m2", True, True)),
]
#: Each key with its canonical form, in which all options are written.
CANONICAL = [
    ("mxfp8:tiled", Format("mxfp8", tiled_scales=True), "mxfp8:e4m3,tiled"),
    (
        "mxfp8:tiled,square,e5m2",
        Format("mxfp8", "e5m2", None, True, tiled_scales=True),
        "mxfp8:e5m2,square,tiled",
    ),
    ("fp8_tensor:aligned", Format("fp8_tensor", aligned_groups=True), "fp8_tensor:e4m3,fp32,aligned"),
    (
        "fp8_block:aligned,e5m2,eps=0.5",
        Format("fp8_block", "e5m2", epsilon=0.5, aligned_groups=True),
        "fp8_block:e5m2,pow2,eps=0.5,aligned",
    ),
    ("nvfp4", Format("nvfp4"), "nvfp4:e2m1"),
    ("nvfp4:e2m1,e2m1", Format("nvfp4", "e2m1", False), "nvfp4:e2m1"),
    ("nvfp4:square", Format("nvfp4", square_blocks=True), "nvfp4:e2m1,square"),
    ("nvfp4:rht", Format("nvfp4", random_hadamard=True), "nvfp4:e2m1,rht"),
    (
        "nvfp4:tiled,sr,rht",
        Format("nvfp4", random_hadamard=True, stochastic_rounding=True, tiled_scales=True),
        "nvfp4:e2m1,rht,sr,tiled",
    ),
    (
        "nvfp4:sr,square",
        Format("nvfp4", square_blocks=True, stochastic_rounding=True),
        "nvfp4:e2m1,square,sr",
    ),
    ("nvfp4:row_scaled", Format("nvfp4", row_scaled=True), "nvfp4:e2m1,row_scaled"),
    ("nvfp4:4over6", Format("nvfp4", four_over_six="mae"), "nvfp4:e2m1,4over6"),
    ("nvfp4:4over6,4over6_mse", Format("nvfp4", four_over_six="mse"), "nvfp4:e2m1,4over6_mse"),
    ("nvfp4:4over6_mse,4over6", Format("nvfp4", four_over_six="mae"), "nvfp4:e2m1,4over6"),
    (
        "nvfp4:4over6_mse,tiled,row_scaled",
        Format("nvfp4", row_scaled=True, four_over_six="mse", tiled_scales=True),
        "nvfp4:e2m1,row_scaled,4over6_mse,tiled",
    ),
]
REFUSED = [
    "",
    "fp8",
    "FP8_BLOCK",
    "fp8_block:",
    "fp8_block:e4m3,",
    "fp8_block:,e4m3",
    "fp8_block:e4m3,,pow2",
    "fp8_block: e4m3",
    "fp8_block:e3m4",
    "fp8_tensor:square",
    "fp8_row:square",
    "fp8_row:aligned",
    "fp8_row:tiled",
    "fp8_row:rht",
    "fp8_row:e2m1",
    "fp8_row:",
    "fp8_block:eps",
    "fp8_block:eps=",
    "fp8_block:eps=-1",
    "fp8_block:eps=+1",
    "fp8_block:eps=0x1p3",
    "fp8_block:eps=1e",
    "fp8_block:eps=nan",
    "fp8_block:eps=inf",
    "fp8_block:eps=1e39",
    "fp8_block:eps=1e-60",
    "fp8_block:eps=1 ",
    "none:e4m3",
    "bf16:pow2",
    "bf16:",
    "MXFP8",
    "mxfp8:",
    "mxfp8:e4m3,",
    "mxfp8:e2m1",
    "mxfp8:pow2",
    "mxfp8:fp32",
    "mxfp8:e4m3,square,eps=0",
    "mxfp8:eps=1e-12",
    "mxfp4",
    "NVFP4",
    "nvfp4:",
    "nvfp4:e2m1,",
    "nvfp4:e4m3",
    "nvfp4:e5m2",
    "nvfp4:pow2",
    "nvfp4:fp32",
    "nvfp4:eps=1",
    "nvfp4:4over6_mae",
    "nvfp4:4OVER6",
    "nvfp4:row_scaled,square",
    "nvfp4:square,row_scaled",
    "nvfp4:row_scaled,rht",
    "nvfp4:sr,row_scaled",
    "nvfp4:4over6,square",
    "nvfp4:rht,4over6",
    "nvfp4:4over6_mse,sr",
    "nvfp4:square,rht",
    "nvfp4:rht,sr,square",
    "fp8_tensor:e2m1",
    "fp8_tensor:tiled",
    "fp8_block:tiled",
    "fp8_block:rht",
    "mxfp8:aligned",
    "nvfp4:aligned",
    "bf16:aligned",
    "mxfp8:rht",
    "mxfp8:sr",
    "mxfp8:row_scaled",
    "mxfp8:4over6",
]


READ = [*QUANTIZED, *((key, format) for key, format, _ in CANONICAL)]


@pytest.mark.parametrize(("key", "format"), READ, ids=[key for key, _ in READ])
def test_keys_read_as_cpp_does(key: str, format: Format) -> None:
    assert Format.parse(key) == format
    assert Format.parse(format.key) == format, "a key reads back as what wrote it"
    input = torch.randn(144, 160, generator=torch.Generator().manual_seed(0))
    more = extras(input, key)
    got = ops.quantize(input, key, **more, columnwise=True)
    assert_all_same(got, ops.quantize(input, format.key, **more, columnwise=True))
    assert tuple(output.dtype for output in got) == (format.dtype, format.scale_dtype) * 2
    assert_all_same(got, reference.quantize(input, format, **more, columnwise=True))


@pytest.mark.parametrize("key", REFUSED)
def test_keys_refused_as_cpp_does(key: str) -> None:
    text = (
        "expected a format key: none, bf16, fp8_tensor, fp8_row, fp8_block, mxfp8 or nvfp4, then options like "
        f"fp8_block:e4m3,pow2,square,eps=1e-12, got '{key}'. transformer_plugin.formats lists them."
    )
    with pytest.raises(ValueError) as caught:
        ops.quantize(torch.ones(2, 2), key)
    assert str(caught.value) == f"transformer_plugin::quantize: argument 'format': {text}"
    with pytest.raises(ValueError) as caught:
        Format.parse(key)
    assert str(caught.value) == f"transformer_plugin.Format.parse: argument 'key': {text}"


@pytest.mark.parametrize(("key", "format", "canonical"), CANONICAL, ids=[key for key, _, _ in CANONICAL])
def test_canonical_keys(key: str, format: Format, canonical: str) -> None:
    assert format.key == canonical and Format.parse(canonical) == format


def test_formats_without_scales() -> None:
    assert Format.parse("none") == Format() and Format().key == "none"
    assert Format.parse("bf16") == Format("bf16") and Format("bf16").key == "bf16"
    assert not Format().is_quantized and not Format("bf16").is_quantized
    assert (Format().dtype, Format("bf16").dtype) == (None, torch.bfloat16)
    assert (Format().scale_dtype, Format("bf16").scale_dtype) == (None, None)


@pytest.mark.parametrize("epsilon", [1e-12, 0.1, 3.4e38, 1e-40, 1.1754944e-38, 0.30000001192092896])
def test_epsilon_is_the_float32_that_cpp_reads(epsilon: float) -> None:
    format = Format("fp8_tensor", epsilon=epsilon)
    assert format.epsilon == torch.tensor(epsilon, dtype=torch.float32).item()
    assert Format.parse(format.key).epsilon == format.epsilon
    scale = ops.quantize(torch.zeros(1, 1), format.key)[1]
    factor = torch.tensor(448.0) / torch.tensor(epsilon, dtype=torch.float32)
    factor = factor.clamp(max=torch.finfo(torch.float32).max)
    assert torch.equal(scale, (1 / factor).reshape(1))


def test_what_formats_say() -> None:
    block, square = Format("fp8_block"), Format("fp8_block", square_blocks=True)
    tensor, e5m2 = Format("fp8_tensor"), Format("fp8_tensor", "e5m2")
    assert (block.block, square.block, tensor.block, Format("bf16").block) == (
        (1, BLOCK),
        (BLOCK, BLOCK),
        None,
        None,
    )
    assert (block.dtype, e5m2.dtype) == (torch.float8_e4m3fn, torch.float8_e5m2)
    assert (tensor.largest, e5m2.largest) == (torch.finfo(tensor.dtype).max, torch.finfo(e5m2.dtype).max)
    assert (block.alignment, tensor.alignment, Format("bf16").alignment) == (128, 16, 8)
    assert (block.power_of_two_scales, tensor.power_of_two_scales) == (True, False)
    assert block.key == "fp8_block:e4m3,pow2"
    assert hash(block) == hash(Format.parse("fp8_block"))
    assert (block.scale_dtype, tensor.scale_dtype) == (torch.float32, torch.float32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        block.element = "e5m2"  # type: ignore[misc]


def test_what_mxfp8_says() -> None:
    rows, square, e5m2 = Format("mxfp8"), Format("mxfp8", square_blocks=True), Format("mxfp8", "e5m2")
    assert (rows.key, square.key, e5m2.key) == ("mxfp8:e4m3", "mxfp8:e4m3,square", "mxfp8:e5m2")
    assert (rows.block, square.block) == ((1, MX_BLOCK), (MX_BLOCK, MX_BLOCK)) and MX_BLOCK == 32
    assert (rows.dtype, e5m2.dtype) == (torch.float8_e4m3fn, torch.float8_e5m2)
    assert rows.is_quantized and rows.power_of_two_scales and rows.epsilon == 0.0
    assert rows.scale_dtype == torch.float8_e8m0fnu
    assert rows.alignment == 32
    assert (rows.largest, e5m2.largest) == (448.0, 57344.0)
    assert rows == Format("mxfp8", power_of_two_scales=True) and hash(rows) == hash(Format.parse("mxfp8"))


def test_what_nvfp4_says() -> None:
    rows, square = Format("nvfp4"), Format("nvfp4", square_blocks=True)
    assert (rows.element, rows.power_of_two_scales, rows.epsilon) == ("e2m1", False, 0.0)
    assert (rows.block, square.block) == ((1, NV_BLOCK), (NV_BLOCK, NV_BLOCK)) and NV_BLOCK == 16
    assert (rows.dtype, rows.scale_dtype) == (torch.float4_e2m1fn_x2, torch.float8_e4m3fn)
    assert (rows.alignment, rows.group_multiple, rows.largest) == (16, 16, 6.0)
    assert rows.is_quantized and rows.needs_amax
    others = [Format("none"), *map(Format, ("bf16", "fp8_tensor", "fp8_block", "mxfp8"))]
    assert not any(other.needs_amax for other in others)
    assert {other.group_multiple for other in others} == {1}
    assert hash(rows) == hash(Format.parse("nvfp4:e2m1"))


@pytest.mark.parametrize(
    "format",
    [
        Format("bf16"),
        *(Format(f, e) for f in ("fp8_tensor", "fp8_block", "mxfp8") for e in ("e4m3", "e5m2")),
        Format("mxfp8", square_blocks=True),
        Format("nvfp4"),
        Format("nvfp4", square_blocks=True),
        Format("nvfp4", row_scaled=True),
        Format("nvfp4", four_over_six="mae"),
        Format("nvfp4", four_over_six="mse"),
        Format("nvfp4", stochastic_rounding=True),
        Format("nvfp4", square_blocks=True, stochastic_rounding=True),
    ],
    ids=lambda format: format.key,
)
def test_gemm_tolerance_is_the_error_of_rounding_both_operands(format: Format) -> None:
    """The tolerance is not so wide that a format with fewer bits would pass."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(128, 512, generator=generator) for _ in range(2))

    def rounded(x: torch.Tensor) -> torch.Tensor:
        if not format.is_quantized:
            return x.bfloat16().double()
        more = extras(x, format.key)
        return ops.dequantize(*ops.quantize(x, format, **rows_of(more)), format, **amax_of(more)).double()

    exact = a.double() @ b.double().T
    error = float((rounded(a) @ rounded(b).T - exact).norm() / exact.norm())
    assert format.gemm_tolerance / 5 < error < 0.9 * format.gemm_tolerance


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"family": "fp4"},
            "'family': expected one of none, bf16, fp8_tensor, fp8_row, fp8_block, mxfp8, nvfp4, got 'fp4'. {choose}",
        ),
        (
            {"family": "fp8_block", "element": "e8"},
            "'element': expected 'e4m3' or 'e5m2', got 'e8'. {choose}",
        ),
        (
            {"family": "fp8_tensor", "square_blocks": True},
            "'square_blocks': expected False unless the family is fp8_block, mxfp8 or nvfp4, got True. "
            "Leave it out.",
        ),
        ({"family": "fp8_block", "epsilon": -1.0}, "{epsilon} -1.0. Use 0 for none."),
        ({"family": "fp8_block", "epsilon": math.inf}, "{epsilon} inf. Use 0 for none."),
        ({"family": "fp8_block", "epsilon": 1e300}, "{epsilon} inf. Use 0 for none."),
        ({"family": "fp8_block", "epsilon": math.nan}, "{epsilon} nan. Use 0 for none."),
        ({"family": "bf16", "epsilon": 1.0}, "{scales} got 'bf16'. Leave the rest out."),
        (
            {"family": "mxfp8", "power_of_two_scales": False},
            "'power_of_two_scales': expected True or None for mxfp8, whose scales are exponents, got False. "
            "Leave it out.",
        ),
        (
            {"family": "mxfp8", "epsilon": 1.0},
            "'epsilon': expected 0 for mxfp8, whose scales have no bound, got 1.0. Leave it out.",
        ),
        ({"family": "none", "element": "e5m2"}, "{scales} got 'none'. Leave the rest out."),
        (
            {"family": "mxfp8", "element": "e2m1"},
            "'element': expected 'e4m3' or 'e5m2', got 'e2m1'. {choose}",
        ),
        (
            {"family": "nvfp4", "element": "e4m3"},
            "'element': expected 'e2m1' for nvfp4, got 'e4m3'. {choose}",
        ),
        (
            {"family": "nvfp4", "power_of_two_scales": True},
            "'power_of_two_scales': expected False or None for nvfp4, whose scales are E4M3, got True. "
            "Leave it out.",
        ),
        (
            {"family": "nvfp4", "epsilon": 0.5},
            "'epsilon': expected 0 for nvfp4, whose scales have no bound, got 0.5. Leave it out.",
        ),
        (
            {"family": "nvfp4", "four_over_six": "max"},
            "'four_over_six': expected '', 'mae' or 'mse', got 'max'. {choose}",
        ),
        (
            {"family": "fp8_block", "tiled_scales": True},
            "'tiled_scales': expected False unless the family is mxfp8 or nvfp4, got True. Leave it out.",
        ),
        (
            {"family": "nvfp4", "aligned_groups": True},
            "'aligned_groups': expected False unless the family is fp8_tensor or fp8_block, got True. Leave it out.",
        ),
        (
            {"family": "mxfp8", "random_hadamard": True},
            "'random_hadamard': expected False unless the family is nvfp4, got True. Leave it out.",
        ),
        (
            {"family": "bf16", "stochastic_rounding": True},
            "'stochastic_rounding': expected False unless the family is nvfp4, got True. Leave it out.",
        ),
        (
            {"row_scaled": True},
            "'row_scaled': expected False unless the family is nvfp4, got True. Leave it out.",
        ),
        (
            {"family": "fp8_tensor", "four_over_six": "mae"},
            "'four_over_six': expected '' unless the family is nvfp4, got 'mae'. Leave it out.",
        ),
        *(
            (
                {"family": "nvfp4", name: "mse" if name == "four_over_six" else True, other: True},
                f"'{other}': expected False with {name}, got True. Leave one of the two out.",
            )
            for name in ("row_scaled", "four_over_six")
            for other in ("square_blocks", "random_hadamard", "stochastic_rounding")
        ),
        (
            {"family": "nvfp4", "square_blocks": True, "random_hadamard": True},
            "'random_hadamard': expected False with square_blocks, got True. Leave one of the two out.",
        ),
    ],
)
def test_errors_have_four_parts(arguments: dict, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        Format(**arguments)
    text = text.format(
        choose="Choose one of them.",
        epsilon="'epsilon': expected a finite number that is not negative, got",
        scales="'family': expected fp8_tensor, fp8_row, fp8_block, mxfp8 or nvfp4, which have scales,",
    )
    assert str(caught.value) == f"transformer_plugin.Format: argument {text}"
