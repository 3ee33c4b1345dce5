"""The grouped products to measure: shapes, their tensors, and the calls of each op and its peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.quantize_grouped import skewed_sizes
from transformer_plugin import ops, reference
from transformer_plugin.formats import BLOCK
from transformer_plugin.recipes import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling

RECIPE = Float8BlockScaling()
INPUT_FORMAT, WEIGHT_FORMAT, GRAD_FORMAT = RECIPE.input_format, RECIPE.weight_format, RECIPE.grad_format
TENSOR_FORMAT = Float8CurrentScaling().weight_format
#: The format in which grouped layers on Hopper save the operands of weight gradients.
ALIGNED_INPUT_FORMAT, ALIGNED_GRAD_FORMAT = (key + ",aligned" for key in (INPUT_FORMAT, GRAD_FORMAT))
MX_FORMAT, NV_FORMAT = MXFP8BlockScaling().input_format, "nvfp4"


@dataclass(frozen=True)
class Shape:
    """``rows`` in groups, each multiplied by its ``[n, k]``, and the kinds of group sizes to measure."""

    name: str
    groups: int
    n: int
    k: int
    rows: int
    kinds: tuple[str, ...] = ("even", "skewed", "any")


MODELS = (  # the shapes of the geometric means
    Shape("Qwen3-30B fc1", 128, 1536, 2048, 65536),
    Shape("Qwen3-30B fc2", 128, 2048, 768, 65536),
    Shape("DeepSeek-V3 fc1", 32, 4096, 7168, 32768),
    Shape("DeepSeek-V3 fc2", 32, 7168, 2048, 32768),
    Shape("Mixtral fc1", 8, 28672, 4096, 16384),
    Shape("Mixtral fc2", 8, 4096, 14336, 16384),
)
SHAPES = (
    *MODELS,
    Shape("few tokens", 32, 4096, 7168, 4096, ("even", "skewed")),
    Shape("16 rows a group", 32, 4096, 7168, 512, ("even",)),
)


def tiny(shape: Shape) -> Shape:
    """Returns a shape that a CPU multiplies in a moment."""
    rows = 8 * min(shape.rows // shape.groups, BLOCK)
    return replace(shape, groups=8, n=2 * BLOCK, k=BLOCK, rows=rows)


def group_sizes(shape: Shape, kind: str, device: torch.device) -> Tensor:
    """Returns int32 ``[groups]``, whose sum is the shape's rows."""
    if kind == "even":
        sizes = torch.full((shape.groups,), shape.rows // shape.groups, dtype=torch.int32, device=device)
    elif kind == "skewed":
        sizes = skewed_sizes(shape.rows, shape.groups, BLOCK, device)
    else:
        full = shape.groups - -(-shape.groups // 10)
        order = torch.randperm(shape.groups, generator=torch.Generator().manual_seed(shape.groups))
        sizes = torch.zeros(shape.groups, dtype=torch.int32, device=device)
        sizes[order[:full].to(device)] = skewed_sizes(shape.rows, full, 1, device)
    assert int(sizes.sum()) == shape.rows
    return sizes


Quantized = tuple[Tensor, Tensor]
ROW_FORMAT = "fp8_row"


class Data:
    """The tensors of a shape. Sizes, their cumulative sums and the quantized input exist for each kind of sizes."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        def normals(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(size, dtype=dtype, device=device)

        self.x = normals(shape.rows, shape.k)
        self.grad = normals(shape.rows, shape.n)
        self.weight = normals(shape.groups, shape.n, shape.k)
        self.main_grad = normals(shape.groups, shape.n, shape.k, dtype=torch.float32)
        self.sizes = {kind: group_sizes(shape, kind, device) for kind in shape.kinds}
        self.rows = torch.randperm(shape.rows, device=device)
        self.ends = {kind: sizes.cumsum(0, dtype=torch.int32) for kind, sizes in self.sizes.items()}
        both = ops.quantize(self.weight, WEIGHT_FORMAT, columnwise=True)
        self.weight8, self.weight8_t = both[:2], both[2:]
        self.x8, self.x8_t = self._quantized(self.x, INPUT_FORMAT)
        self.grad8, self.grad8_t = self._quantized(self.grad, GRAD_FORMAT)
        _, self.x8_aligned = self._quantized(self.x, ALIGNED_INPUT_FORMAT)
        _, self.grad8_aligned = self._quantized(self.grad, ALIGNED_GRAD_FORMAT)
        self.weight8_whole = ops.quantize(self.weight, TENSOR_FORMAT)
        self.x8_whole = {
            kind: ops.quantize(self.x, TENSOR_FORMAT, sizes) for kind, sizes in self.sizes.items()
        }
        # one scale per row, as torch requires
        self.x8_row_scale = {
            kind: self.x8_whole[kind][1].repeat_interleave(sizes, output_size=shape.rows)
            for kind, sizes in self.sizes.items()
        }
        self.weight8_row_scale = self.weight8_whole[1].unsqueeze(1).expand(-1, shape.n).contiguous()
        self.x8_rows, self.weight8_rows = (
            ops.quantize(self.x, "fp8_row"),
            ops.quantize(self.weight, "fp8_row"),
        )
        self.weight_mx = ops.quantize(self.weight, MX_FORMAT)
        self.x_mx = {kind: ops.quantize(self.x, MX_FORMAT, sizes) for kind, sizes in self.sizes.items()}
        self.weight_amax = ops.amax(self.weight, NV_FORMAT)
        self.weight_nv = ops.quantize(self.weight, NV_FORMAT, amax=self.weight_amax)
        self.x_amax = {kind: ops.amax(self.x, NV_FORMAT, sizes) for kind, sizes in self.sizes.items()}
        self.x_nv = {
            kind: ops.quantize(self.x, NV_FORMAT, sizes, amax=self.x_amax[kind])
            for kind, sizes in self.sizes.items()
        }
        torch._dynamo.reset()  # dynamo's recompile limit counts earlier shapes
        self.add = torch.compile(_add, dynamic=False, fullgraph=True)

    def _quantized(self, matrix: Tensor, key: str) -> tuple[dict[str, Quantized], dict[str, Quantized]]:
        both = {kind: ops.quantize(matrix, key, sizes, columnwise=True) for kind, sizes in self.sizes.items()}
        return {kind: four[:2] for kind, four in both.items()}, {
            kind: four[2:] for kind, four in both.items()
        }

    def rows_of(self, kind: str, group: int) -> slice:
        """Returns the rows of a group."""
        end = int(self.ends[kind][group])
        return slice(end - int(self.sizes[kind][group]), end)


Call = Callable[[Data, str], Tensor]
Factors = tuple[Tensor, Tensor]


def _add(total: Tensor, term: Tensor) -> None:
    total.add_(term)


def forward(data: Data, kind: str) -> Tensor:
    return ops.grouped_gemm(data.x, data.weight, data.sizes[kind])


def torch_forward(data: Data, kind: str) -> Tensor:
    return torch._grouped_mm(data.x, data.weight.mT, offs=data.ends[kind])


def _forward_by_rows(data: Data, kind: str) -> Tensor:
    return ops.grouped_gemm(data.x, data.weight, data.sizes[kind], rows=data.rows)


def _torch_forward_by_rows(data: Data, kind: str) -> Tensor:
    taken = data.x.index_select(0, data.rows)
    return torch._grouped_mm(taken, data.weight.mT, offs=data.ends[kind])


def _quantized_product(
    data: Data, kind: str, a: tuple[Tensor, ...], b: tuple[Tensor, ...], a_format: str, b_format: str
) -> Tensor:
    scales = {"a_scale": a[1:], "b_scale": b[1:]}
    return ops.grouped_gemm(a[0], b[0], data.sizes[kind], **scales, a_format=a_format, b_format=b_format)


def _fp8_forward(data: Data, kind: str) -> Tensor:
    return _quantized_product(data, kind, data.x8[kind], data.weight8, INPUT_FORMAT, WEIGHT_FORMAT)


def _fp8_data_gradient(data: Data, kind: str) -> Tensor:
    return _quantized_product(data, kind, data.grad8[kind], data.weight8_t, GRAD_FORMAT, WEIGHT_FORMAT)


def _fp8_whole_forward(data: Data, kind: str) -> Tensor:
    return _quantized_product(
        data, kind, data.x8_whole[kind], data.weight8_whole, TENSOR_FORMAT, TENSOR_FORMAT
    )


def _torch_fp8_forward(data: Data, kind: str) -> Tensor:
    return torch._scaled_grouped_mm(
        data.x8_whole[kind][0],
        data.weight8_whole[0].mT,
        data.x8_row_scale[kind],
        data.weight8_row_scale,
        data.ends[kind],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _fp8_rows_forward(data: Data, kind: str) -> Tensor:
    return _quantized_product(data, kind, data.x8_rows, data.weight8_rows, ROW_FORMAT, ROW_FORMAT)


def _torch_fp8_rows_forward(data: Data, kind: str) -> Tensor:
    (x, x_scale), (weight, weight_scale) = data.x8_rows, data.weight8_rows
    return torch._scaled_grouped_mm(
        x,
        weight.mT,
        x_scale,
        weight_scale,
        data.ends[kind],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _mx_forward(data: Data, kind: str) -> Tensor:
    return _quantized_product(data, kind, data.x_mx[kind], data.weight_mx, MX_FORMAT, MX_FORMAT)


def _nv_forward(data: Data, kind: str) -> Tensor:
    a, b = (*data.x_nv[kind], data.x_amax[kind]), (*data.weight_nv, data.weight_amax)
    return _quantized_product(data, kind, a, b, NV_FORMAT, NV_FORMAT)


def _data_gradient(data: Data, kind: str) -> Tensor:
    return ops.grouped_gemm(data.grad, data.weight, data.sizes[kind], transpose_b=False)


def _torch_data_gradient(data: Data, kind: str) -> Tensor:
    return torch._grouped_mm(data.grad, data.weight, offs=data.ends[kind])


def _weight_gradient(data: Data, kind: str) -> Tensor:
    return ops.grouped_gemm_wgrad(data.grad, data.x, data.sizes[kind])


def _torch_weight_gradient(data: Data, kind: str) -> Tensor:
    return torch._grouped_mm(data.grad.t(), data.x, offs=data.ends[kind])


def _weight_gradient_added(data: Data, kind: str) -> Tensor:
    ops.grouped_gemm_wgrad_out(data.grad, data.x, data.sizes[kind], data.main_grad)
    return data.main_grad


def _quantized_wgrad(
    data: Data, kind: str, grad: Quantized, input: Quantized, grad_format: str, input_format: str
) -> Tensor:
    formats = {"grad_format": grad_format, "input_format": input_format}
    scales = {"grad_scale": grad[1], "input_scale": input[1]}
    ops.grouped_gemm_wgrad_out(grad[0], input[0], data.sizes[kind], data.main_grad, **scales, **formats)
    return data.main_grad


def _fp8_weight_gradient_added(data: Data, kind: str) -> Tensor:
    return _quantized_wgrad(data, kind, data.grad8_t[kind], data.x8_t[kind], GRAD_FORMAT, INPUT_FORMAT)


def _fp8_weight_gradient_aligned(data: Data, kind: str) -> Tensor:
    operands = data.grad8_aligned[kind], data.x8_aligned[kind]
    return _quantized_wgrad(data, kind, *operands, ALIGNED_GRAD_FORMAT, ALIGNED_INPUT_FORMAT)


def _torch_weight_gradient_added(data: Data, kind: str) -> Tensor:
    data.add(data.main_grad, _torch_weight_gradient(data, kind))
    return data.main_grad


def _forward_factors(data: Data, kind: str, group: int) -> Factors:
    return data.x[data.rows_of(kind, group)], data.weight[group].T


def _forward_by_rows_factors(data: Data, kind: str, group: int) -> Factors:
    return data.x[data.rows[data.rows_of(kind, group)]], data.weight[group].T


def _fp8_forward_factors(data: Data, kind: str, group: int) -> Factors:
    (x, x_scale), (weight, weight_scale), rows = data.x8[kind], data.weight8, data.rows_of(kind, group)
    return (
        reference.dequantize(x[rows], x_scale[:, rows], INPUT_FORMAT),
        reference.dequantize(weight[group], weight_scale[group], WEIGHT_FORMAT).T,
    )


def _fp8_whole_forward_factors(data: Data, kind: str, group: int) -> Factors:
    (x, x_scale), (weight, weight_scale) = data.x8_whole[kind], data.weight8_whole
    rows = data.rows_of(kind, group)
    return x[rows].float() * x_scale[group], (weight[group].float() * weight_scale[group]).T


def _fp8_rows_forward_factors(data: Data, kind: str, group: int) -> Factors:
    (x, x_scale), (weight, weight_scale), rows = data.x8_rows, data.weight8_rows, data.rows_of(kind, group)
    return x[rows].float() * x_scale[rows, None], (weight[group].float() * weight_scale[group, :, None]).T


def _mx_forward_factors(data: Data, kind: str, group: int) -> Factors:
    x = ops.dequantize(*data.x_mx[kind], MX_FORMAT, torch.float32, data.sizes[kind])
    weight, scale = data.weight_mx
    return x[data.rows_of(kind, group)], ops.dequantize(
        weight[group], scale[group], MX_FORMAT, torch.float32
    ).T


def _nv_forward_factors(data: Data, kind: str, group: int) -> Factors:
    sizes, amax = data.sizes[kind], data.x_amax[kind]
    x = ops.dequantize(*data.x_nv[kind], NV_FORMAT, torch.float32, sizes, amax=amax)
    weight, scale = data.weight_nv
    own = ops.dequantize(
        weight[group], scale[group], NV_FORMAT, torch.float32, amax=data.weight_amax[group : group + 1]
    )
    return x[data.rows_of(kind, group)], own.T


def _data_gradient_factors(data: Data, kind: str, group: int) -> Factors:
    return data.grad[data.rows_of(kind, group)], data.weight[group]


def _fp8_data_gradient_factors(data: Data, kind: str, group: int) -> Factors:
    (grad, grad_scale), (weight, weight_scale) = data.grad8[kind], data.weight8_t
    rows = data.rows_of(kind, group)
    return (
        reference.dequantize(grad[rows], grad_scale[:, rows], GRAD_FORMAT),
        reference.dequantize(weight[group], weight_scale[group], WEIGHT_FORMAT).T,
    )


def _fp8_weight_gradient_factors(data: Data, kind: str, group: int) -> Factors:
    def values(operand: Quantized, key: str) -> Tensor:
        sizes = data.sizes[kind]
        return ops.dequantize(*operand, key, torch.float32, sizes, True)[data.rows_of(kind, group)]

    return values(data.grad8_t[kind], GRAD_FORMAT).T, values(data.x8_t[kind], INPUT_FORMAT)


def _weight_gradient_factors(data: Data, kind: str, group: int) -> Factors:
    rows = data.rows_of(kind, group)
    return data.grad[rows].T, data.x[rows]


@dataclass(frozen=True)
class Work:
    """An op's call for a kind of group sizes, the peer's call, and the two matrices of a group's product."""

    name: str
    op: Call
    peer: Call
    peer_name: str
    factors: Callable[[Data, str, int], Factors]
    #: whether the product is added to a main gradient.
    added: bool = False
    #: whether the peer multiplies the same values.
    same_numbers: bool = True
    #: whether the peer needs a GPU.
    gpu_peer: bool = False


WORKS = (
    Work("forward", forward, torch_forward, "_grouped_mm", _forward_factors),
    Work(
        "rows by an index", _forward_by_rows, _torch_forward_by_rows, "index_select, _grouped_mm",
        _forward_by_rows_factors,
    ),
    Work(
        "FP8 forward", _fp8_forward, torch_forward, "_grouped_mm of bfloat16", _fp8_forward_factors,
        same_numbers=False,
    ),
    Work(
        "FP8 forward, whole groups", _fp8_whole_forward, _torch_fp8_forward,
        "_scaled_grouped_mm by rows, fast accumulation", _fp8_whole_forward_factors,
        gpu_peer=True,
    ),
    Work(
        "FP8 forward, per row", _fp8_rows_forward, _torch_fp8_rows_forward,
        "_scaled_grouped_mm by rows, fast accumulation", _fp8_rows_forward_factors,
        gpu_peer=True,
    ),
    Work(
        "MXFP8 forward", _mx_forward, forward, "grouped_gemm of bfloat16", _mx_forward_factors, same_numbers=False
    ),
    Work(
        "NVFP4 forward", _nv_forward, forward, "grouped_gemm of bfloat16", _nv_forward_factors, same_numbers=False
    ),
    Work("data gradient", _data_gradient, _torch_data_gradient, "_grouped_mm", _data_gradient_factors),
    Work(
        "FP8 data gradient", _fp8_data_gradient, _torch_data_gradient, "_grouped_mm of bfloat16",
        _fp8_data_gradient_factors, same_numbers=False,
    ),
    Work(
        "weight gradient", _weight_gradient, _torch_weight_gradient, "_grouped_mm", _weight_gradient_factors
    ),
    Work(
        "weight gradient added", _weight_gradient_added, _torch_weight_gradient_added,
        "_grouped_mm, compiled add", _weight_gradient_factors, added=True,
    ),
    Work(
        "FP8 weight gradient added", _fp8_weight_gradient_added, _torch_weight_gradient_added,
        "_grouped_mm of bfloat16, compiled add", _fp8_weight_gradient_factors, added=True, same_numbers=False,
    ),
    Work(
        "FP8 weight gradient added, aligned", _fp8_weight_gradient_aligned, _torch_weight_gradient_added,
        "_grouped_mm of bfloat16, compiled add", _fp8_weight_gradient_factors, added=True, same_numbers=False,
    ),
)  # fmt: skip
