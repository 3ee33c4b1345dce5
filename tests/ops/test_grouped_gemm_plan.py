"""grouped_gemm_plan: which kernel a GPU would run, why, and how it is launched. It works on any host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import quantized_arguments, wgrad_arguments
from transformer_plugin.testing.quantize_cases import amax_of, columns_of, extras, rows_of

_ops = torch.ops.transformer_plugin
BF16, FP32 = torch.bfloat16, torch.float32
FP8 = "fp8_block"
PRODUCTS = ["forward", "data_grad", "weight_grad"]
by_product = pytest.mark.parametrize("product", PRODUCTS)
SMS = 132
KEYS = (
    *("fp8_tensor", "fp8_tensor:e5m2,aligned", "fp8_row", "fp8_row:e5m2", "fp8_block", "fp8_block:square"),
    *("fp8_block:aligned", "mxfp8", "mxfp8:square", "nvfp4", "nvfp4:square", "nvfp4:rht", "nvfp4:row_scaled"),
)


def plan(product: str = "forward", **changed: Any) -> ops.GroupedGemmPlan:
    """Returns the plan of a large bfloat16 product in 8 groups, except for the arguments in `changed`."""
    default = {"dtype": BF16, "out_dtype": BF16, "rows": 8192, "groups": 8, "n": 2048, "k": 4096}
    if isinstance(dtype := changed.get("dtype"), str):  # a format for both operands
        square = ",square" if dtype == FP8 and product != "weight_grad" else ""
        formats = {"a_format": dtype, "b_format": f"fp8_block:e4m3{square}" if dtype == FP8 else dtype}
        changed = changed | {"dtype": BF16} | formats
    return ops.grouped_gemm_plan(product, **(default | {"multiprocessors": SMS} | changed))


def uses_hopper_kernel(got: ops.GroupedGemmPlan) -> bool:
    return got.backend == "sm90"


def pairs_of(product: str, sizes: list[int], n: int, k: int) -> int:
    """Returns the number of tile pairs of groups of these sizes, or of half tiles where the kernels split tiles."""
    rows = [n] * len(sizes) if product == "weight_grad" else sizes
    columns = -(-(n if product == "forward" else k) // 256)
    tiles = [-(-size // 128) for size in rows]
    pairs = sum(t // 2 * columns + t % 2 * -(-columns // 2) for t in tiles)
    return 2 * pairs if product != "weight_grad" and (n if product == "forward" else k) > 128 else pairs


@by_product
def test_clusters_fit_the_multiprocessors(product: str) -> None:
    for multiprocessors in (2, 3, 78, 114, 131, 132, 144):
        got = plan(product, multiprocessors=multiprocessors)
        assert uses_hopper_kernel(got) and got[2:] == (multiprocessors // 2, 0, False)
        for groups in (1, 7, 1024):
            for rows in (1, 100, 129, 70000):
                got = plan(product, multiprocessors=multiprocessors, groups=groups, rows=rows)
                assert uses_hopper_kernel(got)
                assert 1 <= got.clusters <= multiprocessors // 2
    # The product would not run, but there is no division by 0.
    assert plan(product, multiprocessors=1).clusters == 1


@by_product
def test_max_sms_limits_the_clusters(product: str) -> None:
    assert plan(product, max_sms=0) == plan(product)
    clusters = [plan(product, max_sms=most).clusters for most in range(1, 300)]
    assert clusters == [min(max(1, most // 2), SMS // 2) for most in range(1, 300)]
    small = {"rows": 1, "groups": 1, "n": 128, "k": 128}
    assert [plan(product, **small, max_sms=most) for most in (1, 64, 10**12)] == [plan(product, **small)] * 3


@by_product
@pytest.mark.parametrize("n", [8, 128, 384, 512, 776])
@pytest.mark.parametrize("k", [8, 256, 520, 1024])
def test_every_cluster_has_a_tile(product: str, n: int, k: int) -> None:
    """The number of clusters is the number of tile pairs in the worst case of sizes, which this test searches for
    few groups."""
    for groups in (1, 2, 3):
        for rows in (1, 2, 127, 128, 129, 256, 257, 384, 400):
            ends = [[rows], [1, rows - 1], [129, rows - 129], [1, 1, rows - 2], [1, 129, rows - 130]]
            sizes = [s + [0] * (groups - len(s)) for s in ends if len(s) <= groups and min(s) >= 0]
            got = plan(product, rows=rows, groups=groups, n=n, k=k, multiprocessors=10**6)
            most = max(pairs_of(product, s, n, k) for s in sizes)
            if product == "weight_grad" or groups == 1:
                assert got.clusters == most
            assert got.clusters >= most
            if product != "weight_grad":
                bound = pairs_of(product, [rows], n, k) + (groups - 1) * pairs_of(product, [1], n, k)
                assert got.clusters <= bound


def test_clusters_of_many_groups() -> None:
    """Every group may have a partial tile, which two clusters share; at most as many groups as rows are not empty."""
    few = {"n": 256, "k": 256, "multiprocessors": 10**6}
    assert plan(groups=1024, rows=1024, **few).clusters == 2 * 1024
    assert plan(groups=1024, rows=5, **few).clusters == 2 * 5
    assert plan(groups=1024, rows=128 * 1024, **few).clusters == (128 + 127) * 1024 // 128 + 1024
    assert plan("weight_grad", groups=1024, rows=5, **few).clusters == 1024
    assert plan(groups=2**29, rows=2**29, n=2**29, k=8).clusters == SMS // 2
    assert plan("weight_grad", groups=2**29, rows=8, n=2**29, k=2**29).clusters == SMS // 2


@by_product
@pytest.mark.parametrize("what", ["rows", "groups", "n", "k", "multiprocessors", "max_sms"])
def test_more_never_means_fewer_clusters(product: str, what: str) -> None:
    small = {"rows": 300, "groups": 3, "n": 512, "k": 768, "multiprocessors": 10**6}
    clusters = [plan(product, **(small | {what: 8 * i})).clusters for i in range(1, 200)]
    assert clusters == sorted(clusters)


def test_empty_products_do_not_use_the_hopper_kernel() -> None:
    for product in PRODUCTS:
        for empty in ("rows", "groups", "n", "k"):
            got = plan(product, **{empty: 0})
            assert not uses_hopper_kernel(got) and got[2:] == (0, 0, False)


def test_operands_of_the_hopper_kernels() -> None:
    def uses_it(product: str, dtype: torch.dtype | str, out_dtype: torch.dtype, **changed: Any) -> bool:
        return uses_hopper_kernel(plan(product, dtype=dtype, out_dtype=out_dtype, **changed))

    for product in PRODUCTS:
        for dtype in (BF16, torch.float16):
            assert uses_it(product, dtype, dtype)
            assert uses_it(product, dtype, FP32) == (product == "weight_grad")
            assert not uses_it(product, dtype, dtype, n=2044)  # rows must be multiples of 16 bytes
            assert not uses_it(product, dtype, dtype, k=4092)
            assert not uses_it(product, dtype, dtype, rows=2**30)
        assert not uses_it(product, FP32, FP32)
        assert uses_it(product, FP8, BF16)
        assert uses_it(product, FP8, FP32) == (product == "weight_grad")
    assert not uses_it("forward", FP8, BF16, k=4104)
    assert uses_it("forward", FP8, BF16, n=2056)
    assert uses_it("weight_grad", FP8, BF16, n=2044)
    assert uses_it("weight_grad", BF16, FP32, accumulate=True)
    assert not uses_it("weight_grad", BF16, BF16, accumulate=True)  # the sum would be rounded twice


def test_backends_and_reasons() -> None:
    """Checks the order of preference, and the reason if the first choice does not apply."""
    for product in PRODUCTS:
        assert plan(product).backend == "sm90"
        got = plan(product, capability=100)
        assert (got.backend, got.reason) == ("torch", "torch has a kernel for this GPU")
        for capability in (80, 120):
            got = plan(product, capability=capability)
            assert (got.backend, got.reason) == (
                "generic",
                "the GPU is not a Hopper (compute capability 9.0)",
            )
        assert plan(product, dtype=FP32, out_dtype=FP32).reason == (
            "the Hopper kernels do not take operands of this dtype or format"
        )
        assert plan(product, n=2044).reason == (
            "a size is 0, or 2^30 - 1 or more, or a row is not a multiple of 16 bytes"
        )
        assert plan(product, dtype=FP8, capability=100).backend == "steps"
    assert plan(out_dtype=FP32).reason == "the dtype of the output is not one that the Hopper kernels write"


def test_expected_rows_select_how_tiles_accumulate() -> None:
    def thread_boxes_of(dtype: torch.dtype | str, rows: int, expected: int = -1) -> int:
        return plan(
            "weight_grad", dtype=dtype, out_dtype=FP32, rows=rows, accumulate=True, expected_rows=expected
        ).thread_boxes

    none, half, most = 0, 0b10101010, 0b11101110
    rows_of_a_group = (1, 767, 768, 1535, 1536)
    assert [thread_boxes_of(BF16, 8 * rows) for rows in rows_of_a_group] == [half, half, none, none, none]
    assert [thread_boxes_of(FP8, 8 * rows) for rows in rows_of_a_group] == [most, most, half, half, none]
    for dtype in (BF16, FP8):
        for rows in (0, 1, 767, 768, 1536, 3000):
            assert thread_boxes_of(dtype, 8 * 4096, 8 * rows) == thread_boxes_of(dtype, 8 * max(rows, 1))
        # The hint is limited to the rows of the buffer.
        assert thread_boxes_of(dtype, 8 * 100, 8 * 4096) == thread_boxes_of(dtype, 8 * 100)
    assert plan("weight_grad", out_dtype=FP32, rows=8, expected_rows=0).thread_boxes == 0
    assert plan(rows=8192, expected_rows=5) == plan(rows=8192)


MX, NV = {"dtype": "mxfp8"}, {"dtype": "nvfp4"}


@pytest.mark.parametrize("formats", [MX, NV], ids=["mxfp8", "nvfp4"])
def test_rows_are_dequantized_during_long_gemms(formats: dict[str, Any]) -> None:
    def overlaps(**changed: Any) -> bool:
        got = plan(**formats, **changed)
        assert uses_hopper_kernel(got)
        return got.overlaps_dequantize

    assert overlaps(rows=65536, groups=128, n=1536, k=2048)  # 1536 pairs of tiles of 256 rows by 128 columns
    # With few columns, dequantization is slower than the products.
    assert not overlaps(rows=65536, groups=128, n=1016, k=2048)
    assert overlaps(rows=65536, groups=128, n=1024, k=2048)
    assert [
        overlaps(rows=rows, groups=1, n=1024, k=512, multiprocessors=8) for rows in (768, 1024, 1025)
    ] == [
        False,  # the first products wait for their rows, which would be a large part of the time
        True,
        True,
    ]
    assert overlaps(rows=1024, groups=264, n=1024, k=512)  # each group has a partial tile
    assert uses_hopper_kernel(plan("data_grad", **formats))  # the weight is quantized column-wise
    got = plan("weight_grad", **formats)
    assert got == ("steps", "no kernel multiplies these two formats", 0, 0, False)
    assert not plan(dtype=FP8).overlaps_dequantize  # fp8_block is not dequantized


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        (
            {"product": "wgrad"},
            ValueError,
            "'product': expected one of forward, data_grad, weight_grad, got 'wgrad'. "
            "Name the product that is meant.",
        ),
        (
            {"dtype": torch.float64},
            TypeError,
            "'dtype': expected one of float32, bfloat16, float16, got float64. "
            "Pass the dtype of the values, and formats for quantized operands.",
        ),
        (
            {"capability": -1},
            ValueError,
            "'capability': expected from 0 to 2^31 - 1, got -1. Pass what the call has.",
        ),
        (
            {"rows": -1},
            ValueError,
            "'rows': expected from 0 to 2^31 - 1, got -1. Pass what the call has.",
        ),
        (
            {"multiprocessors": 0},
            ValueError,
            "'multiprocessors': expected from 1 to 2^31 - 1, got 0. Pass what the call has.",
        ),
        (
            {"max_sms": -1},
            ValueError,
            "'max_sms': expected a number of multiprocessors, or 0 for all, got -1. "
            "Pass how many the product may take.",
        ),
    ],
)
def test_plan_errors(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        plan(**changed)
    assert str(caught.value) == f"transformer_plugin::grouped_gemm_plan: argument {text}"


def op_of_pair(product: str, a_format: str, b_format: str) -> None:
    """Runs a small product of operands in these formats, in groups of 16 rows."""
    sizes, a, b = torch.tensor([16, 16]), torch.ones(32, 32), torch.ones(2, 32, 32)
    weight_grad = product == "weight_grad"

    def quantized(x: torch.Tensor, format: str, groups: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        more = extras(x, format, groups)
        if not weight_grad:
            return *ops.quantize(x, format, groups, **rows_of(more)), *amax_of(more).values()
        values = ops.quantize(x, format, groups, **columns_of(more), rowwise=False, columnwise=True)
        return *values, *amax_of(more, transposed=True).values()

    if weight_grad:
        operands = quantized(a, a_format, sizes), quantized(a, b_format, sizes)
        ops.grouped_gemm_wgrad(**wgrad_arguments(*operands, a_format, b_format), group_sizes=sizes)
    else:
        operands = quantized(a, a_format, sizes), quantized(b, b_format, None)
        ops.grouped_gemm(**quantized_arguments(*operands, a_format, b_format), group_sizes=sizes)


def is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("product", ["forward", "weight_grad"])
@pytest.mark.parametrize("a_format", KEYS)
def test_plan_refuses_what_the_op_refuses(product: str, a_format: str) -> None:
    for b_format in KEYS:
        with_op = is_refused(lambda b=b_format: op_of_pair(product, a_format, b))
        with_plan = is_refused(lambda b=b_format: plan(product, a_format=a_format, b_format=b, groups=2))
        assert with_op == with_plan, b_format
