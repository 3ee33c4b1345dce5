"""How products are laid out on a Hopper: as planned on any host, and on the ops, whose bits never depend on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import normals
from transformer_plugin.testing.numerics import assert_same_bits

_ops = torch.ops.transformer_plugin
BF16, FP32 = torch.bfloat16, torch.float32
FP8 = "fp8_block"
PRODUCTS = ["forward", "data_grad", "weight_grad"]
by_product = pytest.mark.parametrize("product", PRODUCTS)
SMS = 132


def plan(product: str = "forward", **changed: Any) -> ops.GroupedGemmPlan:
    """Of a large product of bfloat16 in 8 groups, but for what is `changed`."""
    given = {"dtype": BF16, "out_dtype": BF16, "rows": 8192, "groups": 8, "n": 2048, "k": 4096}
    if isinstance(dtype := changed.get("dtype"), str):  # a format, of both operands
        square = ",square" if dtype == FP8 and product != "weight_grad" else ""
        formats = {"a_format": dtype, "b_format": f"fp8_block:e4m3{square}" if dtype == FP8 else dtype}
        changed = changed | {"dtype": BF16} | formats
    return ops.grouped_gemm_plan(product, **(given | {"multiprocessors": SMS} | changed))


def is_taken(got: ops.GroupedGemmPlan) -> bool:
    return got.backend == "sm90"


def pairs_of(product: str, sizes: list[int], n: int, k: int) -> int:
    """The pairs of tiles of groups of these sizes, or their halves where the kernels may take those."""
    rows = [n] * len(sizes) if product == "weight_grad" else sizes
    columns = -(-(n if product == "forward" else k) // 256)
    tiles = [-(-size // 128) for size in rows]
    pairs = sum(t // 2 * columns + t % 2 * -(-columns // 2) for t in tiles)
    return 2 * pairs if product != "weight_grad" and (n if product == "forward" else k) > 128 else pairs


@by_product
def test_clusters_are_never_more_than_fit(product: str) -> None:
    for multiprocessors in (2, 3, 78, 114, 131, 132, 144):
        got = plan(product, multiprocessors=multiprocessors)
        assert is_taken(got) and got[2:] == (multiprocessors // 2, 0, False)
        for groups in (1, 7, 1024):
            for rows in (1, 100, 129, 70000):
                got = plan(product, multiprocessors=multiprocessors, groups=groups, rows=rows)
                assert is_taken(got)
                assert 1 <= got.clusters <= multiprocessors // 2
    assert plan(product, multiprocessors=1).clusters == 1  # it would not run, but nothing is divided by 0


@by_product
def test_max_sms(product: str) -> None:
    assert plan(product, max_sms=0) == plan(product)
    clusters = [plan(product, max_sms=most).clusters for most in range(1, 300)]
    assert clusters == [min(max(1, most // 2), SMS // 2) for most in range(1, 300)]
    small = {"rows": 1, "groups": 1, "n": 128, "k": 128}
    assert [plan(product, **small, max_sms=most) for most in (1, 64, 10**12)] == [plan(product, **small)] * 3


@by_product
@pytest.mark.parametrize("n", [8, 128, 384, 512, 776])
@pytest.mark.parametrize("k", [8, 256, 520, 1024])
def test_no_cluster_without_a_tile(product: str, n: int, k: int) -> None:
    """As many as the worst sizes have pairs, which with few groups can be tried out."""
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


def test_many_groups() -> None:
    """Every group may have a tile of its own, which two clusters share, but not more groups than there are rows."""
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


def test_nothing_to_do_is_not_taken() -> None:
    for product in PRODUCTS:
        for empty in ("rows", "groups", "n", "k"):
            got = plan(product, **{empty: 0})
            assert not is_taken(got) and got[2:] == (0, 0, False)


def test_what_is_taken() -> None:
    def takes(product: str, dtype: torch.dtype | str, out_dtype: torch.dtype, **changed: Any) -> bool:
        return is_taken(plan(product, dtype=dtype, out_dtype=out_dtype, **changed))

    for product in PRODUCTS:
        for dtype in (BF16, torch.float16):
            assert takes(product, dtype, dtype)
            assert takes(product, dtype, FP32) == (product == "weight_grad")
            assert not takes(product, dtype, dtype, n=2044)  # rows of whole 16 bytes
            assert not takes(product, dtype, dtype, k=4092)
            assert not takes(product, dtype, dtype, rows=2**30)
        assert not takes(product, FP32, FP32)
        assert takes(product, FP8, BF16)
        assert takes(product, FP8, FP32) == (product == "weight_grad")
    assert not takes("forward", FP8, BF16, k=4104)
    assert takes("forward", FP8, BF16, n=2056)
    assert takes("weight_grad", FP8, BF16, n=2044)
    assert takes("weight_grad", BF16, FP32, accumulate=True)
    assert not takes("weight_grad", BF16, BF16, accumulate=True)  # it would be rounded twice


def test_why() -> None:
    """The order of preference, and the reason for what comes after the first."""
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
            "a size is 0 or above 2^30, or a row is not a multiple of 16 bytes"
        )
        assert plan(product, dtype=FP8, capability=100).backend == "steps"
    assert plan(out_dtype=FP32).reason == "the dtype of the output is not one that the Hopper kernels write"


def test_the_hint_chooses_who_adds() -> None:
    def boxes(dtype: torch.dtype | str, rows: int, expected: int = -1) -> int:
        return plan(
            "weight_grad", dtype=dtype, out_dtype=FP32, rows=rows, accumulate=True, expected_rows=expected
        ).thread_boxes

    none, half, most = 0, 0b10101010, 0b11101110
    rows_of_a_group = (1, 767, 768, 1535, 1536)
    assert [boxes(BF16, 8 * rows) for rows in rows_of_a_group] == [half, half, none, none, none]
    assert [boxes(FP8, 8 * rows) for rows in rows_of_a_group] == [most, most, half, half, none]
    for dtype in (BF16, FP8):
        for rows in (0, 1, 767, 768, 1536, 3000):
            assert boxes(dtype, 8 * 4096, 8 * rows) == boxes(dtype, 8 * max(rows, 1))
        assert boxes(dtype, 8 * 100, 8 * 4096) == boxes(dtype, 8 * 100)  # never more than the buffer has
    assert plan("weight_grad", out_dtype=FP32, rows=8, expected_rows=0).thread_boxes == 0
    assert plan(rows=8192, expected_rows=5) == plan(rows=8192)


MX, NV = {"dtype": "mxfp8"}, {"dtype": "nvfp4"}


@pytest.mark.parametrize("codes", [MX, NV], ids=["mxfp8", "nvfp4"])
def test_rows_are_widened_beside_products_where_those_take_long(codes: dict[str, Any]) -> None:
    def widens(**changed: Any) -> bool:
        got = plan(**codes, **changed)
        assert is_taken(got)
        return got.overlaps_dequantize

    assert widens(rows=65536, groups=128, n=1536, k=2048)  # 1536 pairs of tiles of 256 rows by 128 columns
    assert not widens(rows=65536, groups=128, n=1016, k=2048)  # few columns: rows are wanted faster than that
    assert widens(rows=65536, groups=128, n=1024, k=2048)
    assert [widens(rows=rows, groups=1, n=1024, k=512, multiprocessors=8) for rows in (768, 1024, 1025)] == [
        False,  # the first products, which wait for their rows, would be a large part
        True,
        True,
    ]
    assert widens(rows=1024, groups=264, n=1024, k=512)  # a group has a tile of its own
    assert is_taken(plan("data_grad", **codes))  # of the weight quantized along columns
    got = plan("weight_grad", **codes)
    assert got == ("steps", "no kernel multiplies these two formats", 0, 0, False)
    assert not plan(dtype=FP8).overlaps_dequantize  # fp8_block is multiplied as it is


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


# ---- the ops ----------------------------------------------------------------------------------------------------

OPTIONS: list[dict[str, int]] = [
    {"max_sms": 1},
    {"max_sms": 7, "expected_rows": 0},
    {"expected_rows": 1},
    {"expected_rows": 10**9, "max_sms": 10**9},
]


def operands(device: torch.device, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a [T, K], b [G, N, K], sizes and grad [T, N]; several tiles in all directions, and a tail."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((700, 264), (5, 520, 264), (700, 520))
    a, b, grad = (normals(shape, dtype, device, generator) for shape in shapes)
    return a, b, torch.tensor([130, 0, 1, 300, 200], device=device), grad


def quantized_calls(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """Each quantized op as a function of the options."""
    a, b, sizes, grad = operands(device, FP32)
    keys = ("fp8_block", "fp8_block:square")
    rows, weight = ops.grouped_quantize(a, sizes, keys[0]), ops.quantize(b, keys[1])
    columns = [ops.grouped_quantize_transposed(x, sizes, keys[0]) for x in (grad, a)]
    forward = (*rows, *weight, sizes, *keys)
    wgrad = (*columns[0], *columns[1], sizes, keys[0], keys[0])

    def forward_out(**options: int) -> Tensor:
        out = torch.zeros(700, 520, dtype=BF16, device=device)
        ops.grouped_gemm_quantized_out(*forward, out, **options)
        return out

    def wgrad_out(**options: int) -> Tensor:
        out = torch.ones(5, 520, 264, device=device)
        ops.grouped_gemm_wgrad_quantized_out(*wgrad, out, **options)
        return out

    return {
        "forward": lambda **options: ops.grouped_gemm_quantized(*forward, BF16, **options),
        "forward_out": forward_out,
        "wgrad": lambda **options: ops.grouped_gemm_wgrad_quantized(*wgrad, FP32, **options),
        "wgrad_out": wgrad_out,
    }


def calls(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """Each other op as a function of the options."""
    a, b, sizes, grad = operands(device)

    def forward_out(**options: int) -> Tensor:
        out = torch.zeros(700, 520, dtype=BF16, device=device)
        ops.grouped_gemm_out(a, b, sizes, out, **options)
        return out

    def wgrad_out(**options: int) -> Tensor:
        out = normals((5, 520, 264), FP32, device, torch.Generator().manual_seed(2))
        ops.grouped_gemm_wgrad_out(grad, a, sizes, out, **options)
        return out

    return {
        "forward": lambda **options: ops.grouped_gemm(a, b, sizes, **options),
        "data_grad": lambda **options: ops.grouped_gemm(grad, b, sizes, transpose_b=False, **options),
        "forward_out": forward_out,
        "wgrad": lambda **options: ops.grouped_gemm_wgrad(grad, a, sizes, dtype=FP32, **options),
        "wgrad_out": wgrad_out,
    }


@pytest.mark.parametrize("made_by", [calls, quantized_calls])
def test_bits_do_not_depend_on_them(made_by: Callable[..., Any], device: torch.device) -> None:
    for name, call in made_by(device).items():
        expected = call()
        for options in OPTIONS:
            assert_same_bits(call(**options), expected, f"{name} {options}")


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_sums_of_tiny_numbers_do_not_depend_on_them(dtype: torch.dtype, device: torch.device) -> None:
    """Around the smallest normal number, where the copy engine of a GPU takes subnormal numbers for zero."""
    generator, sizes = torch.Generator().manual_seed(3), torch.tensor([200, 0, 1800], device=device)
    grad, input = (normals((2048, width), dtype, device, generator) for width in (136, 520))
    tiny = torch.full((3,), torch.finfo(FP32).tiny / 16, device=device)
    held = normals((3, 136, 520), FP32, device, generator) * torch.finfo(FP32).tiny
    results = []
    for expected_rows in (-1, 0, 2048, 2304):
        out = held.clone()
        ops.grouped_gemm_wgrad_out(grad, input, sizes, out, alpha=tiny, expected_rows=expected_rows)
        results.append(out)
    for out in results[1:]:
        assert_same_bits(out, results[0])


@pytest.mark.parametrize("transpose_b", [True, False])
def test_gradients_take_them_along(transpose_b: bool, device: torch.device) -> None:
    a, b, sizes, grad = operands(device)
    if not transpose_b:
        b = b.transpose(1, 2).contiguous()
    leaves = [a.requires_grad_(), b.requires_grad_()]
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names = [argument.name for argument in func._schema.arguments]
            if "max_sms" in names:
                given = dict(zip(names, args, strict=False))
                seen.append((func._schema.name[20:], given.get("max_sms", 0), given.get("expected_rows", -1)))
            return func(*args, **(kwargs or {}))

    results = []
    for options in ({}, {"max_sms": 8}, {"expected_rows": 640}, {"max_sms": 6, "expected_rows": 0}):
        seen.clear()
        with Watch():
            output = ops.grouped_gemm(*leaves, sizes, transpose_b=transpose_b, **options)
            results.append([output, *torch.autograd.grad(output, leaves, grad)])
        wanted = (options.get("max_sms", 0), options.get("expected_rows", -1))
        names = ["grouped_gemm", "grouped_gemm", "grouped_gemm_wgrad"]
        assert sorted(seen) == [(name, *wanted) for name in names]
        for got, expected in zip(results[-1], results[0], strict=True):
            assert_same_bits(got, expected)


def test_compiled(device: torch.device) -> None:
    a, b, sizes, grad = operands(device, FP32)

    def step(a: Tensor, b: Tensor, most: int) -> Tensor:
        output = ops.grouped_gemm(a, b, sizes, max_sms=most, expected_rows=a.shape[0] // 2)
        (output * grad).sum().backward()
        return output

    compiled = torch.compile(step, fullgraph=False, backend="aot_eager")
    got, expected = [], []
    for results, run in ((got, compiled), (expected, step)):
        leaves = [x.clone().requires_grad_() for x in (a, b)]
        results.extend([run(*leaves, 16), *(leaf.grad for leaf in leaves)])
    for x, y in zip(got, expected, strict=True):
        assert_same_bits(x, y)


@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(device: torch.device) -> None:
    generator, options = torch.Generator().manual_seed(0), {"max_sms": 4, "expected_rows": 3}
    sizes = torch.tensor([2, 1], device=device)
    a, b, grad = (normals(s, FP32, device, generator) for s in ((4, 128), (2, 16, 128), (4, 16)))
    out, weight = torch.zeros(4, 16, device=device), torch.zeros(2, 16, 128, device=device)
    opcheck(_ops.grouped_gemm_out.default, (a, b, sizes, out), options)
    opcheck(_ops.grouped_gemm_wgrad.default, (grad, a, sizes), options)
    opcheck(_ops.grouped_gemm_wgrad_out.default, (grad, a, sizes, weight), options)
    leaves = (a.clone().requires_grad_(), b.clone().requires_grad_())
    opcheck(_ops.grouped_gemm.default, (*leaves, sizes), options)
    key = "fp8_block"
    rows, matrices = ops.grouped_quantize(a, sizes, key), ops.quantize(b, key)
    forward = (*rows, *matrices, sizes, key, key)
    opcheck(_ops.grouped_gemm_quantized.default, (*forward, BF16), options)
    opcheck(_ops.grouped_gemm_quantized_out.default, (*forward, out), options)
    columns = [ops.grouped_quantize_transposed(x, sizes, key) for x in (grad, a)]
    wgrad = (*columns[0], *columns[1], sizes, key, key)
    opcheck(_ops.grouped_gemm_wgrad_quantized.default, (*wgrad, FP32), options)
    opcheck(_ops.grouped_gemm_wgrad_quantized_out.default, (*wgrad, weight), options)


@pytest.mark.parametrize("made_by", [calls, quantized_calls])
def test_errors(made_by: Callable[..., Any], device: torch.device) -> None:
    for name, call in made_by(device).items():
        op = "grouped_gemm" + ("_wgrad" if "wgrad" in name else "")
        op += ("_quantized" if made_by is quantized_calls else "") + ("_out" if "out" in name else "")
        with pytest.raises(ValueError) as caught:
            call(max_sms=-2)
        assert str(caught.value) == (
            f"transformer_plugin::{op}: argument 'max_sms': expected a number of multiprocessors, or 0 for all, "
            "got -2. Pass how many the product may take."
        )
        with pytest.raises(ValueError) as caught:
            call(expected_rows=-2)
        assert str(caught.value) == (
            f"transformer_plugin::{op}: argument 'expected_rows': expected the rows of all groups together, or -1 "
            "for the rows of the buffer, got -2. Leave it out where it is not known."
        )
