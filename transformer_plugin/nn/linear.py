"""Linear: torch.nn.Linear with a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin._arguments import class_name, typed
from transformer_plugin.nn._autocast import like_input, operands
from transformer_plugin.nn._caller_buffers import into_buffers
from transformer_plugin.nn._delayed_scaling import op_accepts, reset_state, scales_of_call
from transformer_plugin.nn._dtensor import is_dtensor, local_operands
from transformer_plugin.nn._module import check_sizes, layer_forward, registered
from transformer_plugin.nn._recipe import RecipeModule
from transformer_plugin.nn._tensor_parallel import (
    ParallelMode,
    TensorParallel,
    check_division,
    initialize_full_params,
    plan_of,
    shard_parameters,
    tensor_parallel_of,
    without_buffers,
)
from transformer_plugin.nn.quantized_parameters import chosen_recipe, in_high_precision, quantize_parameter
from transformer_plugin.recipes import DelayedScaling, Recipe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Linear(RecipeModule, torch.nn.Linear):
    """``input @ weight.T + bias``, with the operands in the formats of a recipe.

    A drop-in replacement for :class:`torch.nn.Linear`, of which it is a subclass: the same constructor, initial values,
    parameters and ``state_dict``, and one more keyword argument.

    Args:
        in_features: K, the last dimension of the input. With ``Float8BlockScaling`` any K; multiples of 128
            need no padding. With ``MXFP8BlockScaling`` a multiple of 32, with ``NVFP4BlockScaling`` of 16.
        out_features: N, the last dimension of the output. The same multiples are required.
        bias: whether to add a learned ``[N]``.
        device, dtype: of the parameters; ``device="meta"`` defers the initial values to
            ``reset_parameters()``.
        recipe: the formats of input, weight and gradient; None multiplies in the dtype of the parameters.
        fuse_wgrad_accumulation: whether the backward adds the weight's gradient to ``weight.main_grad`` in place of
            ``.grad``, as in :class:`GroupedLinear`; an attribute that may be set later. Not with ``DelayedScaling``.
        delay_wgrad_compute: whether the backward leaves the weight's gradient to :meth:`backward_dw`, as in
            :class:`GroupedLinear`; an attribute that may be set later. Not with ``DelayedScaling``.
        return_bias: whether ``forward`` leaves out the bias and returns it beside the output.
        save_original_input: whether the backward keeps the input itself, and quantizes it again for the weight's
            gradient, with the same bits; worth it where another layer keeps that tensor too, which then takes memory
            once. An attribute that may be set later. Not with ``DelayedScaling`` or stochastic rounding of the input.
        parallel_mode: tensor parallelism over the ranks of ``tp_group``, see :doc:`/tensor-parallel`. ``"column"``:
            this rank has some of the outputs, ``weight [N / R, K]`` and ``bias [N / R]``. ``"row"``: it has some of the
            inputs, ``weight [N, K / R]``; the products are summed over ranks, and the bias is added once. N and K are
            the sizes of the full layer; ``in_features`` and ``out_features`` of the module are this rank's.
        tp_group: a process group, or a mesh of one dimension.
        sequence_parallel: whether the rows, the first dimension, of the input of ``"column"`` and of the output of
            ``"row"`` are sharded over the same ranks; otherwise all ranks have all rows.
        sections: with ``"column"``, sizes that add up to N, each of which is divided among the ranks: for weights with
            several outputs, such as gate and up, or query, key and value.
        pad_outputs: with ``"column"`` and without sections, whether N need not divide by the ranks; the outputs of the
            last ranks are then zeros. For the logits of :func:`~transformer_plugin.ops.vocab_parallel_cross_entropy`.
        cache_weights: whether the layer keeps its quantized weight until the weight changes; an attribute that may be
            set later. See :doc:`/modules`.

    Buffers: with ``DelayedScaling`` ``delayed_history [H, 3]``, ``delayed_scale [3]`` and ``delayed_amax [3]``,
    float32, of the input, the weight and the gradient. Otherwise none.

    Shapes: input ``[..., K]``, output ``[..., N]`` in the dtype of the input. Under ``torch.autocast`` input, weight
    and bias are cast first, as in ``torch.nn.Linear``, and the output has autocast's dtype. For a backward with
    ``NVFP4BlockScaling`` the number of input rows (the product of all leading dimensions) is a multiple of 16.
    """

    @typed
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | None = None,
        fuse_wgrad_accumulation: bool = False,
        return_bias: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        parallel_mode: ParallelMode | None = None,
        tp_group: ProcessGroup | DeviceMesh | None = None,
        sequence_parallel: bool = False,
        sections: Sequence[int] = (),
        pad_outputs: bool = False,
        cache_weights: bool = False,
    ) -> None:
        parallel = tensor_parallel_of(class_name(self), parallel_mode, tp_group, sequence_parallel)
        check_sizes(class_name(self), dtype, in_features=in_features, out_features=out_features)
        check_division(class_name(self), parallel_mode, sections, pad_outputs, out_features)
        super().__init__(in_features, out_features, bias, device, dtype)
        if parallel is not None:
            self._divide(parallel, sections, pad_outputs)
        self.save_original_input = save_original_input
        self.fuse_wgrad_accumulation, self.return_bias = fuse_wgrad_accumulation, return_bias
        self.delay_wgrad_compute, self.cache_weights = delay_wgrad_compute, cache_weights
        self.recipe = chosen_recipe(recipe)
        quantize_parameter(self, "weight", self._formats[1])

    def _divide(
        self, parallel: TensorParallel, sections: Sequence[int] = (), pad_outputs: bool = False
    ) -> None:
        """Keeps this rank's slices."""
        shard_parameters(self, parallel, plan_of(class_name(self), parallel.mode, sections, pad_outputs))
        self.out_features, self.in_features = self.weight.shape

    def reset_parameters(self) -> None:
        """Fresh initial values, as in :class:`torch.nn.Linear`. Also resets the state of delayed scaling."""
        with in_high_precision(self, "weight"), initialize_full_params(self):
            super().reset_parameters()
        reset_state(self)

    @layer_forward
    def forward(self, input: Tensor, *, out: Tensor | None = None, dgrad_out: Tensor | None = None) -> Any:
        """Computes ``input @ weight.T + bias``.

        Args:
            input: ``[..., K]``, see the class.
            out: ``[..., N]``, contiguous, in the dtype of the output: the output is written there, and what is
                returned is that memory, with its gradient. Do not write it before the backward of what reads it.
            dgrad_out: ``[..., K]``, contiguous, in the dtype of the product: the backward writes the gradient of
                ``input`` there. Neither with ``DelayedScaling``.

        Returns:
            The output; with ``return_bias`` the output without the bias, and the bias.
        """
        options = self._weight_arguments()  # of _weight_source and _wgrad_destination
        weight = registered(self, self._parameters, "weight")
        own_bias = registered(self, self._parameters, "bias")
        input, weight, bias = operands(input, weight, None if self.return_bias else own_bias)
        if self._weight_source.is_external:
            weight = like_input(weight, input)
        parallel, added, layout = self.tensor_parallel, None, None
        if parallel is not None:
            without_buffers(class_name(self), parallel, out, dgrad_out)
            self._check_slices()
            gathering = None if isinstance(self._recipe, DelayedScaling) else options
            input, bias, own_bias, added = parallel.before(input, bias, own_bias, gathering)
        if out is not None or dgrad_out is not None:
            out, buffers = into_buffers(class_name(self), self.recipe, out, dgrad_out, self.weight_shard)
            options.update(buffers)
        if is_dtensor(weight):
            (input, weight, bias), layout = local_operands(self, (input, weight, bias), options, out)
        output = linear_product(self, input, weight, bias, options, out)
        if self._wgrad_destination.into_main_grad:
            self._wgrad_destination.accepted(self, options)
        if layout is not None:
            output = layout.of_output(output)
        if parallel is not None:
            output = parallel.output(output, added)
        return (output, own_bias) if self.return_bias else output

    def extra_repr(self) -> str:
        """The sizes, and the recipe where there is one."""
        return (
            super().extra_repr() + self._extra_options() + (f", recipe={self.recipe}" if self.recipe else "")
        )


def linear_product(
    layer: RecipeModule,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: dict[str, Any],
    out: Tensor | None = None,
) -> Tensor:
    """``input @ weight.T + bias`` by the op of the layer's recipe.

    Args:
        layer, input, weight, bias: the layer, and this rank's tensors.
        options: ``layer._weight_arguments()``, and others of the op.
        out: what the product is written into; None for a new tensor.
    """
    if isinstance(layer._recipe, DelayedScaling):
        accepted = op_accepts(layer, input, weight, bias)
        scale, amax = scales_of_call(layer, layer._recipe, accepted)
        shard = options.get("weight_shard", "")
        delayed = {"scale": scale, "amax": amax, "weight_shard": shard}
        return ops.linear(input, weight, bias, *layer._formats, **delayed)
    if out is None:
        return ops.linear(input, weight, bias, *layer._formats, **options)
    ops.linear_out(input, weight, out, bias, *layer._formats, **options)
    return out
