"""Layers with ``DTensor`` parameters: ops on this rank's shards, between two changes of layout.

torch's ``parallelize_module`` makes such parameters. The layout of the weight says what a layer computes:

- ``Shard(0)``, by columns: from the full input, this rank's columns of the output;
- ``Shard(1)``, by rows: from this rank's columns of the input, a term of the output's sum;
- ``Replicate()``: from this rank's rows of the input, if it is sharded along rows, those of the output.

The ops get plain tensors, so every format works, and a scale belongs to what one rank multiplies. The gradient of a
parameter has the layout of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_plugin import ops
from transformer_plugin._arguments import check_dtype, class_name
from transformer_plugin.parallel._collectives import torch_collectives
from transformer_plugin.recipes import DelayedScaling

if TYPE_CHECKING:
    from transformer_plugin.nn._recipe import RecipeModule
    from transformer_plugin.nn._shardable import ShardableModule
    from transformer_plugin.nn.embedding import Embedding
    from transformer_plugin.nn.layer_norm_linear import LayerNormLinear


def is_dtensor(tensor: Any) -> bool:
    """Whether a parameter is a ``DTensor``. In a forward under FSDP2 a parameter is a plain tensor."""
    return type(tensor) is not Parameter and hasattr(tensor, "device_mesh")


def run_norm(layer: str, norm: Callable[..., Tensor], input: Any, weight: Any, *bias: Any) -> Tensor:
    """Calls ``norm(input, weight, *bias)`` with this rank's rows, or with all rows. The parameters are replicated."""
    mesh = _mesh_of(layer, input, weight)
    _check_layout(layer, "weight", weight, "Replicate()")
    for parameter in bias:
        _check_layout(layer, "bias", parameter, "Replicate()")
    layout = _rows_layout(input)
    sums = layout.is_shard()
    output = norm(_local_of(input, layout), *[_replicated(parameter, sums) for parameter in (weight, *bias)])
    return _as_dtensor(output, mesh, layout, input.shape)


class ProductLayout(NamedTuple):
    """Of a product that each rank computes for itself: what its output is a shard of, or a partial sum of."""

    mesh: Any
    placement: Any
    sizes: tuple[int, ...]

    def of_output(self, product: Tensor) -> Tensor:
        """The DTensor of which ``product`` is this rank's."""
        return _as_dtensor(product, self.mesh, self.placement, self.sizes)


def local_operands(
    layer: RecipeModule, operands: tuple[Any, Any, Any], options: Mapping[str, Any], out: Any
) -> tuple[tuple[Any, Any, Any], ProductLayout]:
    """The input, the weight and the bias of this rank's product.

    Args:
        layer: the layer.
        operands: input, weight and bias.
        options: of the op.
        out: refused, as there is no DTensor to write into.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    input, weight, bias = operands
    name, last = class_name(layer), input.dim() - 1
    mesh, layout = _mesh_of(name, input, weight), _weight_layout(layer, input, weight, bias, options)
    _refuse_buffers(name, out is not None or "dgrad_out" in options)
    sizes = (*input.shape[:-1], weight.shape[0])
    if layout == Shard(0):
        own = _local_of(input, Replicate(), Partial()), _local_shard_of(weight), _local_shard_of(bias)
        return own, ProductLayout(mesh, Shard(last), sizes)
    if layout == Shard(1):
        own_bias = _on_rank_0(_replicated(bias, False), mesh)
        own = _local_of(input, Shard(last)), _local_shard_of(weight), own_bias
        return own, ProductLayout(mesh, Partial(), sizes)
    rows = _rows_layout(input)
    own = _local_of(input, rows), _replicated(weight, rows.is_shard()), _replicated(bias, rows.is_shard())
    return own, ProductLayout(mesh, rows, sizes)


def run_norm_linear(
    layer: LayerNormLinear, operands: tuple[Any, ...], options: dict[str, Any], out: Any
) -> tuple[Tensor, Tensor]:
    """``ops.norm_linear`` of a layer, or the norm and then the product, where the norm's rows are sharded.

    Args:
        layer: the layer.
        operands: input, ``norm_weight``, ``norm_bias``, ``weight`` and ``bias``.
        options, out: as for :func:`local_operands`.
    """
    from torch.distributed.tensor import Partial, Shard

    input, norm_weight, norm_bias, weight, bias = operands
    name = class_name(layer)
    mesh, layout = _mesh_of(name, input, weight), _weight_layout(layer, input, weight, bias, options)
    _check_layout(name, "norm_weight", norm_weight, "Replicate()")
    _check_layout(name, "norm_bias", norm_bias, "Replicate()")
    rows = _rows_layout(input)
    in_two = layer.return_normalized or layout == Shard(1) or (layout == Shard(0) and rows.is_shard())
    if in_two:
        normalized = run_norm(name, layer._norm, input, norm_weight, norm_bias)
        own, of_product = local_operands(layer, (normalized, weight, bias), options, out)
        return of_product.of_output(ops.linear(*own, *layer._formats, **options)), normalized
    _refuse_buffers(name, out is not None)
    by_columns = layout == Shard(0)
    # By columns, each rank has the gradient by its columns of the output.
    sums = by_columns or rows.is_shard()
    local_input = _local_of(input, rows, Partial() if by_columns else None)
    of_norm = _replicated(norm_weight, sums), _replicated(norm_bias, sums)
    if by_columns:
        parameters = _local_shard_of(weight), _local_shard_of(bias)
    else:
        parameters = _replicated(weight, sums), _replicated(bias, sums)
    norm = "layer_norm" if layer.normalization == "LayerNorm" else "rms_norm"
    rule: tuple[Any, ...] = (layer.eps, norm, layer.zero_centered, False, *layer._formats)
    output, normalized = ops.norm_linear(local_input, *of_norm, *parameters, *rule, **options)
    sizes = (*input.shape[:-1], weight.shape[0])
    return _as_dtensor(output, mesh, Shard(input.dim() - 1) if by_columns else rows, sizes), normalized


def run_embedding(layer: Embedding, input: Any, weight: Any, padding: int) -> Tensor:
    """``ops.embedding`` of a table that is sharded by rows (``Shard(0)``), by columns (``Shard(1)``) or not."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    name = class_name(layer)
    mesh, layout = _mesh_of(name, input, weight), weight.placements[0]
    _refuse_shards(layer)
    if layout == Shard(0):
        found = _rows_here(_local_of(input, Replicate()), _local_shard_of(weight), weight, padding)
        output_layout: Any = Partial()
    elif layout == Shard(1):
        found = ops.embedding(_local_of(input, Replicate()), _local_shard_of(weight), padding)
        output_layout = Shard(input.dim())
    else:
        _check_layout(name, "weight", weight, "Shard(0), Shard(1) or Replicate()")
        placement = input.placements[0]
        output_layout = placement if placement.is_shard() else Replicate()
        table = _replicated(weight, output_layout.is_shard())
        found = ops.embedding(_local_of(input, output_layout), table, padding)
    return _as_dtensor(found, mesh, output_layout, (*input.shape, weight.shape[1]))


def _rows_here(indices: Tensor, table: Tensor, full: Any, padding: int) -> Tensor:
    """The rows that this rank's shard of a table has, and zeros for others."""
    check_dtype("embedding", "indices", indices, torch.int64, torch.int32)
    mesh, rows = full.device_mesh, full.shape[0]
    if indices.is_cpu and not torch.compiler.is_compiling() and indices.numel() > 0:
        _check_indices(indices, rows)
    each = -(-rows // mesh.size())
    first = min(mesh.get_local_rank() * each, rows)
    count = min(each, rows - first)
    if count == 0:  # the sum connects the gradient, which has no elements
        return table.new_zeros((*indices.shape, table.shape[1])) + table.sum()
    elsewhere = (indices < first) | (indices >= first + count)
    own_padding = padding - first if first <= padding < first + count else -1
    found = ops.embedding((indices - first).masked_fill(elsewhere, 0), table, own_padding)
    return found.masked_fill(elsewhere.unsqueeze(-1), 0.0)


def _check_indices(indices: Tensor, rows: int) -> None:
    least, most = (int(value) for value in torch.aminmax(indices))
    if least < 0 or most >= rows:
        got = f"{least} to {most}"
        _refuse("embedding", "indices", f"rows of the table, 0 to {rows - 1}", got, "Pass indices of rows")


class _UnequalShard(torch.autograd.Function):
    """This rank's shard of a parameter in unequal shards: ``to_local`` gives gradients the strides of equal ones."""

    @staticmethod
    def forward(ctx: Any, parameter: Any) -> Tensor:
        ctx.mesh, ctx.layouts = parameter.device_mesh, parameter.placements
        ctx.shape, ctx.strides = parameter.shape, parameter.stride()
        local: Tensor = parameter.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        from torch.distributed.tensor import DTensor

        sizes = {"shape": ctx.shape, "stride": ctx.strides}
        return DTensor.from_local(grad.contiguous(), ctx.mesh, ctx.layouts, run_check=False, **sizes)


def _local_shard_of(parameter: Any) -> Any:
    """This rank's shard of a sharded parameter."""
    if parameter is None:
        return None
    layout = parameter.placements[0]
    if parameter.shape[layout.dim] % parameter.device_mesh.size() != 0:
        return _UnequalShard.apply(parameter)
    return _local_of(parameter, layout)


def _local_of(tensor: Any, layout: Any, grad_layout: Any = None) -> Any:
    """This rank's tensor of a DTensor in a layout. Its gradient is in ``grad_layout``, or in the same."""
    if tensor is None:
        return None
    if tensor.placements[0] != layout:
        tensor = _in_layout(tensor, layout)
    return tensor.to_local(grad_placements=[layout if grad_layout is None else grad_layout])


def _in_layout(tensor: Any, layout: Any) -> Any:
    if torch.compiler.is_compiling():
        return tensor.redistribute(placements=[layout])
    with torch_collectives("redistribute", f"{tensor.placements[0]} to {layout}", tensor.device_mesh):
        return tensor.redistribute(placements=[layout])


def _replicated(parameter: Any, sums: bool) -> Any:
    """A replicated parameter. With ``sums``, its gradient is the sum of those that the ranks compute."""
    from torch.distributed.tensor import Partial, Replicate

    if parameter is None or not sums or not torch.is_grad_enabled():
        return _local_of(parameter, Replicate())
    # The layout stays. In the backward it changes from Partial(), which no .grad should have.
    return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _on_rank_0(bias: Tensor | None, mesh: Any) -> Tensor | None:
    """The bias on the first rank and zeros on the others, so that a sum over ranks has it once.

    Each rank has the gradient of that sum, and so the full gradient of the bias. All ranks compile the same graph.
    """
    if bias is None:
        return None
    return bias - bias.detach() * (0.0 if mesh.get_local_rank() == 0 else 1.0)


def _as_dtensor(local: Tensor, mesh: Any, layout: Any, sizes: tuple[int, ...]) -> Tensor:
    """The DTensor of these sizes of which ``local`` is this rank's."""
    from torch.distributed.tensor import DTensor

    given: dict[str, Any] = {}
    # Without sizes torch takes the shards to be equal.
    if layout.is_shard() and sizes[layout.dim] % mesh.size() != 0:
        strides = [1] * len(sizes)
        for i in range(len(sizes) - 1, 0, -1):
            strides[i - 1] = strides[i] * sizes[i]
        given = {"shape": torch.Size(sizes), "stride": tuple(strides)}
    return DTensor.from_local(local, mesh, [layout], run_check=False, **given)


def _rows_layout(input: Any) -> Any:
    """The layout in which replicated parameters compute: that of the input, if each rank has full rows."""
    from torch.distributed.tensor import Replicate

    placement = input.placements[0]
    return placement if placement.is_shard() and placement.dim < input.dim() - 1 else Replicate()


def _weight_layout(
    layer: RecipeModule, input: Any, weight: Any, bias: Any, options: Mapping[str, Any]
) -> Any:
    """The layout of a linear layer's weight. Refuses what cannot run on DTensors."""
    name, layout = class_name(layer), weight.placements[0]
    _refuse_shards(layer)
    if isinstance(layer.recipe, DelayedScaling):
        expected, advice = "one with scales of the current values", "Use for example Float8CurrentScaling()"
        _refuse(name, "recipe", f"{expected}, as the weight is a DTensor", "DelayedScaling", advice)
    if layout.is_shard() and layout.dim <= 1:
        _check_layout(name, "bias", bias, "Shard(0)" if layout.dim == 0 else "Replicate()")
        return layout
    _check_layout(name, "weight", weight, "Shard(0), Shard(1) or Replicate()")
    _check_layout(name, "bias", bias, "Replicate()")
    if _rows_layout(input).is_shard() and ("main_grad" in options or "wgrad_queue" in options):
        _refuse(
            name,
            "weight",
            "a sharded weight with fuse_wgrad_accumulation or delay_wgrad_compute",
            "a replicated one with a sharded input, whose gradient is a sum over ranks",
            "Leave both out, or shard the weight",
        )
    return layout


def _refuse_shards(layer: ShardableModule) -> None:
    if layer.weight_shard:
        advice = "Parallelize other layers, or shard other weights"
        expected = "a weight that shard_ has not sharded"
        _refuse(class_name(layer), "weight", expected, "a DTensor of a shard that shard_ made", advice)


def _refuse_buffers(layer: str, given: bool) -> None:
    if given:
        _refuse(layer, "out", "none with DTensor parameters, nor 'dgrad_out'", "one", "Leave both out")


def _check_layout(layer: str, argument: str, parameter: Any, expected: str) -> None:
    """Refuses a parameter in another layout than ``Shard(0)``, if that is expected, else than ``Replicate()``."""
    if parameter is None:
        return
    advice = "Parallelize the layer with the styles of torch.distributed.tensor.parallel"
    if not hasattr(parameter, "device_mesh"):
        _refuse(layer, argument, f"a DTensor in {expected}, as the weight is one", "a plain tensor", advice)
    placement = parameter.placements[0]
    fits = placement.is_replicate()
    if expected == "Shard(0)":
        fits = placement.is_shard() and placement.dim == 0
    if not fits:
        _refuse(layer, argument, f"a DTensor in {expected}", f"one in {placement}", advice)


def _mesh_of(layer: str, input: Any, weight: Any) -> Any:
    """The mesh of the weight. Refuses more than one dimension, and an input that is not on it."""
    mesh = weight.device_mesh
    if mesh.ndim != 1:
        _refuse(
            layer,
            "weight",
            "a DTensor on a mesh of one dimension",
            f"one on a mesh of {mesh.ndim}",
            "Pass the dimension of tensor parallelism to parallelize_module, for example mesh['tp'], and the others "
            "to fully_shard",
        )
    if not hasattr(input, "device_mesh"):
        _refuse(
            layer,
            "input",
            "a DTensor, as the weight is one",
            "a plain tensor",
            "Parallelize the layer with ColwiseParallel, RowwiseParallel or SequenceParallel, or convert its input "
            "with PrepareModuleInput or DTensor.from_local",
        )
    if not torch.compiler.is_compiling() and input.device_mesh != mesh:
        _refuse(
            layer, "input", "a DTensor on the mesh of the weight", "one on another", "Use one mesh for both"
        )
    return mesh


def _refuse(layer: str, argument: str, expected: str, got: str, advice: str) -> NoReturn:
    raise ValueError(
        f"transformer_plugin::{layer}: argument '{argument}': expected {expected}, got {got}. {advice}."
    )
