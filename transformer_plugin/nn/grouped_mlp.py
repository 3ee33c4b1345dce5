"""GroupedMLP: the experts of a mixture, feed-forward networks over groups of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin._arguments import class_name, is_strided, typed
from transformer_plugin.activations import Activation
from transformer_plugin.launch import LaunchOptions, checked
from transformer_plugin.nn._attributes import fixed
from transformer_plugin.nn._autocast import as_float32, check_rows_factor, is_autocast
from transformer_plugin.nn._caller_buffers import (
    buffer_of,
    check_buffer,
    copied_into,
    into_buffers,
    with_gradient_into,
)
from transformer_plugin.nn._containers import LayerContainer, quantize_layers, recipe_layers
from transformer_plugin.nn._formats import RoleFormats
from transformer_plugin.nn._hooks import allow_one_op, call_forward_hooks, call_pre_hooks, have_hooks
from transformer_plugin.nn._layouts import Layout
from transformer_plugin.nn._mlp_activation import check_interleave, chosen_activation
from transformer_plugin.nn._mlp_arguments import of_both, of_slots
from transformer_plugin.nn._module import check_sizes, layer_forward, registered
from transformer_plugin.nn._slots import Slots, SlotsOfRanks, sizes_tensor
from transformer_plugin.nn._tensor_parallel import (
    TensorParallel,
    tensor_parallel_of,
    with_mode,
    without_buffers,
)
from transformer_plugin.nn.grouped_linear import GroupedLinear
from transformer_plugin.recipes import DelayedScaling, Recipe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def _is_plain(layer: Any) -> bool:
    """Whether calling the layer runs exactly ``GroupedLinear.forward`` and its hooks, with current scales."""
    kind = type(layer)
    same: bool = getattr(kind, "forward", None) is GroupedLinear.forward and kind.__call__ is _CALL
    return same and "forward" not in layer.__dict__ and not isinstance(layer._recipe, DelayedScaling)


_CALL = torch.nn.Module.__call__
_NO_FORMATS, _NO_OPTIONS = RoleFormats(), LaunchOptions()
_ops = torch.ops.transformer_plugin


def _matrices(weight: Tensor | list[Tensor]) -> list[Tensor]:
    return [weight] if isinstance(weight, Tensor) else weight


def takes_tokens(experts: Any) -> bool:
    """Whether calling the experts runs :meth:`GroupedMLP.forward`, which takes :class:`Slots`."""
    kind = type(experts)
    return getattr(kind, "forward", None) is GroupedMLP.forward and "forward" not in experts.__dict__


class GroupedMLP(LayerContainer):
    """``fc2(activation(fc1(input)) * probs)`` for each group, with its own weights.

    The probability of a row scales the row between the two products, and also the bias of ``fc2``. The output is the
    expert's output times the probability, so combining is a plain sum.

    Args:
        num_groups: G, the experts of this rank.
        hidden: H, the columns of input and output.
        ffn_hidden: F, the columns between the products. ``fc1`` has 2F output columns, the gate's first; without a gate
            F.
        bias: whether both products add a learned bias.
        device, dtype: as in :class:`GroupedLinear`.
        recipe: the formats of both products. Setting it later sets it in both layers.
        activation: the function between the products, a key or an :class:`~transformer_plugin.activations.Activation`:
            ``"swiglu"``, ``"swiglu:limit=7,alpha=1.702,offset=1"``, or another of
            :func:`~transformer_plugin.ops.activation`. The attribute is the parsed form.
        glu_interleave: the order of the 2F rows of ``fc1.weight`` and ``fc1.bias``, as ``interleave`` of the
            activation. 0: the gate's F rows first. 1: rows of gate and linear part alternate. 32: blocks of 32 rows of
            each alternate; F is then a multiple of 32. With 1 and 32 and a recipe the activation and its quantization
            are two passes.
        launch_options: of the GEMMs of both layers; an attribute that may be set later.
        parameters, fuse_wgrad_accumulation, delay_wgrad_compute, cache_weights: of both layers, as in
            :class:`GroupedLinear`.
        tp_group: a process group or a mesh of one dimension whose ranks divide F: tensor parallelism of each expert.
            All ranks have the same rows, sizes and probabilities. ``ffn_hidden`` of the module is this rank's.

    Parameters, packed: ``fc1.weight [G, 2F, H]``, ``fc2.weight [G, H, F]``, and with bias ``fc1.bias [G, 2F]``,
    ``fc2.bias [G, H]``; without a gate F in place of 2F.

    One op, :func:`~transformer_plugin.ops.grouped_mlp`, runs both layers; the result has the same bits as calling them.
    They are called one by one if a hook needs a tensor between them (see below), one has another forward, they have
    different formats, or use :class:`~transformer_plugin.recipes.DelayedScaling`. Modules that replace them are called
    in the same way: ``fc1(input, group_sizes)``, and ``fc2(activation, group_sizes, bias_scale)``, where ``bias_scale``
    is ``probs`` with biases and None without.

    Hooks that keep the one op: all hooks of this module; forward pre-hooks of ``fc1``, which may replace its input;
    forward pre-hooks and forward hooks of ``fc2`` whose code does not use the input of ``fc2``, such as
    ``hook(module, *unused)``. They run before the op, and after it. A forward pre-hook of ``fc2`` does not change
    the parameters of ``fc1``. Under ``torch.compile`` hooks of ``fc2`` do not keep it.
    """

    num_groups: int = fixed("num_groups")
    hidden: int = fixed("hidden")
    ffn_hidden: int = fixed("ffn_hidden")
    bias: bool = fixed("bias")
    activation: Activation = fixed("activation")
    glu_interleave: int = fixed("glu_interleave", lambda mlp: mlp.activation.interleave)

    @typed
    def __init__(
        self,
        num_groups: int,
        hidden: int,
        ffn_hidden: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        activation: str | Activation = "swiglu",
        glu_interleave: int = 0,
        launch_options: LaunchOptions = LaunchOptions(),  # noqa: B008 immutable
        parameters: Layout = "packed",
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        tp_group: ProcessGroup | DeviceMesh | None = None,
        cache_weights: bool = False,
    ) -> None:
        super().__init__()
        mode = None if tp_group is None else "column"
        parallel = tensor_parallel_of(class_name(self), mode, tp_group, False)
        check_sizes(class_name(self), dtype, num_groups=num_groups, hidden=hidden, ffn_hidden=ffn_hidden)
        checked(launch_options, class_name(self))
        self.activation = chosen_activation(activation, glu_interleave, ffn_hidden)
        self._activation_key = self.activation.key
        self.num_groups, self.hidden, self.ffn_hidden, self.bias = num_groups, hidden, ffn_hidden, bias
        of_layers: dict[str, Any] = {"device": device, "dtype": dtype, "recipe": recipe}
        of_layers.update(launch_options=launch_options, parameters=parameters, cache_weights=cache_weights)
        of_layers["fuse_wgrad_accumulation"] = fuse_wgrad_accumulation
        of_layers["delay_wgrad_compute"] = delay_wgrad_compute
        column, row = dict[str, Any](), dict[str, Any]()
        if parallel is not None:
            column = {"parallel_mode": "column", "tp_group": tp_group, "sections": self._gate_and_linear()}
            row = {"parallel_mode": "row", "tp_group": tp_group}
        columns = self.activation.input_columns(ffn_hidden)
        self.fc1 = GroupedLinear(num_groups, hidden, columns, bias, **of_layers, **column)
        self.fc2 = GroupedLinear(num_groups, ffn_hidden, hidden, bias, scale_bias=bias, **of_layers, **row)
        if parallel is not None:
            self._have_slices(parallel)

    def _gate_and_linear(self) -> tuple[int, ...]:
        """The parts of the rows of ``fc1`` of which each rank has a slice; none if it has one slice of all."""
        in_two = self.activation.traits.gated and self.glu_interleave == 0
        return (self.ffn_hidden, self.ffn_hidden) if in_two else ()

    def _divide(self, parallel: TensorParallel) -> None:
        """Keeps this rank's slices of both layers."""
        self.fc1._divide(with_mode(parallel, "column"), self._gate_and_linear())
        self.fc2._divide(with_mode(parallel, "row"))
        self._have_slices(parallel)

    def _have_slices(self, parallel: TensorParallel) -> None:
        self._ffn_hidden, self.tensor_parallel = self.fc2.in_features, parallel
        check_interleave(self.glu_interleave, self.ffn_hidden)

    def reset_parameters(self) -> None:
        """Fresh initial values for both products."""
        for layer in recipe_layers(self):
            layer.reset_parameters()

    def quantize_weights(self, first_micro_batch: bool | Tensor = True) -> None:
        """Calls :meth:`GroupedLinear.quantize_weights` of both layers. Call it after each optimizer step."""
        quantize_layers(self, first_micro_batch)

    def forget_quantized_weights(self) -> None:
        """Drops the quantized weights: each forward quantizes again."""
        for layer in recipe_layers(self):
            layer.forget_quantized_weights()

    @layer_forward
    def forward(
        self,
        input: Tensor,
        group_sizes: Tensor | Sequence[int] | Slots | SlotsOfRanks,
        probs: Tensor,
        *,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Tensor:
        """Runs the experts.

        Args:
            input: ``[T, H]``, sorted by group.
            group_sizes: int32 or int64 ``[G]`` on the device of ``input``; a list or a tuple is converted in each call.
                Or :class:`Slots`: ``input`` is tokens ``[tokens, H]``, in any order, T is the capacity, and the output
                is the sum of each token's rows, ``[tokens, H]``. Without a recipe no copy of the rows is made on
                Hopper. Or :class:`SlotsOfRanks`: the same for tokens of this rank whose experts are on all ranks of a
                group, each of which calls its experts.
            probs: ``[T]``, the weight of each row; with :class:`SlotsOfRanks` ``[tokens, K]``, that of each expert of a
                token. It is converted to float32 if it has another dtype.
            out, dgrad_out: ``[T, H]``, buffers of the output and of the gradient of ``input`` as in
                :meth:`Linear.forward`.

        Returns:
            ``[T, H]`` in the dtype of ``input``, differentiable in ``input``, ``probs`` and the parameters. Under
            ``torch.autocast`` input, weights and biases are cast first, and the output has autocast's dtype.
            Rows past the last group are zero.
        """
        probs, (fc1, fc2) = as_float32(probs), self._layers()
        slots = group_sizes if isinstance(group_sizes, Slots | SlotsOfRanks) else None
        sizes: Tensor = sizes_tensor(group_sizes, input) if slots is None else slots.group_sizes  # type: ignore[arg-type]
        fuses = self._can_fuse(fc1, fc2) and not have_hooks(fc1, fc2)
        if isinstance(slots, SlotsOfRanks) and not (fuses and self._exchanges(fc1, input, out)):
            return self._between_exchanges(input, slots, probs, out, dgrad_out)
        if fuses:
            return self._fused(fc1, fc2, input, sizes, probs, out, dgrad_out, slots)
        if isinstance(slots, Slots):
            return self._with_copies(input, slots, probs, out, dgrad_out)
        return self._one_by_one(fc1, fc2, input, sizes, probs, out, dgrad_out)

    def _one_by_one(
        self,
        fc1: Any,
        fc2: Any,
        input: Tensor,
        group_sizes: Tensor,
        probs: Tensor,
        out: Tensor | None,
        dgrad_out: Tensor | None,
    ) -> Tensor:
        """The layers, or what replaces them, and their hooks."""
        parallel, of_activation = self.tensor_parallel or getattr(fc1, "tensor_parallel", None), probs
        if parallel is not None:
            without_buffers(class_name(self), parallel, out, dgrad_out)
            of_activation = parallel.copied(probs)  # fc2 copies those of its bias
        elif out is None and dgrad_out is None and self._can_fuse(fc1, fc2) and allow_one_op(fc1, fc2):
            return self._fused_with_hooks(input, group_sizes, probs)
        if is_strided(input) and input.dim() == 2:  # before fc1 changes its state of delayed scaling
            check_rows_factor(class_name(self), "probs", probs, input)
        of_first = {} if dgrad_out is None else {"dgrad_out": dgrad_out}
        of_second = {} if out is None else {"out": out}
        linear = fc1(input, group_sizes, **of_first)
        activation = ops.activation(linear, of_activation, None, self._activation_key)
        scale = probs if getattr(fc2, "scale_bias", self.bias) else None
        return fc2(activation, group_sizes, scale, **of_second)

    def _layers(self) -> tuple[Any, Any]:
        """The two layers, or modules that replace them."""
        modules = self._modules
        return registered(self, modules, "fc1"), registered(self, modules, "fc2")

    def _with_copies(
        self, input: Tensor, slots: Slots, probs: Tensor, out: Tensor | None, dgrad_out: Tensor | None
    ) -> Tensor:
        """The layers one by one, whose hooks see rows: copies of the tokens."""
        if dgrad_out is not None:
            input = with_gradient_into(class_name(self), input, dgrad_out)
        rows = ops.permute_rows(input, slots.slot, slots.source)
        output = GroupedMLP.forward(self, rows, slots.group_sizes, probs)
        return self._into(out, ops.unpermute(output, slots.slot, slots.source))

    @staticmethod
    def _exchanges(fc1: GroupedLinear, input: Tensor, out: Tensor | None) -> bool:
        """Whether the op that runs both layers also exchanges the tokens.

        Otherwise the exchange would be in another dtype under autocast, or before the sum over ranks of a tensor
        parallel layer.
        """
        return fc1.tensor_parallel is None and out is None and not is_autocast(input)

    def _between_exchanges(
        self, input: Tensor, slots: SlotsOfRanks, probs: Tensor, out: Tensor | None, dgrad_out: Tensor | None
    ) -> Tensor:
        """The layers, of received tokens, and an op for each exchange."""
        if dgrad_out is not None:
            input = with_gradient_into(class_name(self), input, dgrad_out)
        plan = (slots.group_name, slots.timeout_ms, -1, False, slots.received, slots.position)
        received, of_rows = ops.dispatch(input, probs, slots.slot, slots.source, *plan)
        own = Slots(slots.slot, slots.source, slots.group_sizes)
        sums = GroupedMLP.forward(self, received, own, of_rows)
        return self._into(out, ops.combine(sums, slots.slot, slots.source, input.shape[0], *plan))

    def _into(self, out: Tensor | None, output: Tensor) -> Tensor:
        """The output, copied into a buffer if there is one."""
        if out is None:
            return output
        check_buffer(class_name(self), "out", out, output)
        return copied_into(output, out)

    def _fused_with_hooks(self, input: Tensor, group_sizes: Tensor, probs: Tensor) -> Tensor:
        """Both layers in one op, and the hooks that need no tensor between them, in their order."""
        fc1, fc2 = self.fc1, self.fc2
        scale = probs if fc2.scale_bias else None
        first = call_pre_hooks(fc1, (input, group_sizes))
        unmade = (None, group_sizes, scale)
        second = call_pre_hooks(fc2, unmade)
        (args, kwargs), is_made = first, second[0] is not unmade
        only_input = len(args) == 2 and args[1] is group_sizes and not kwargs
        is_same = self._can_fuse(fc1, fc2) and allow_one_op(fc1, fc2)
        if only_input and not is_made and not second[1] and is_same:
            return call_forward_hooks(fc2, second, self._fused(fc1, fc2, args[0], group_sizes, probs))
        # Hooks have changed what the layers get, or the layers themselves.
        linear = call_forward_hooks(fc1, first, fc1.forward(*args, **kwargs))
        activation = ops.activation(linear, probs, None, self._activation_key)
        if not is_made:
            second = (activation, group_sizes, scale), second[1]
        return call_forward_hooks(fc2, second, fc2.forward(*second[0], **second[1]))

    def _fused(
        self,
        fc1: GroupedLinear,
        fc2: GroupedLinear,
        input: Tensor,
        group_sizes: Tensor,
        probs: Tensor,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
        slots: Slots | SlotsOfRanks | None = None,
    ) -> Tensor:
        """Both layers in one op, whose output is a partial sum under tensor parallelism."""
        parallel = fc2.tensor_parallel
        if parallel is not None:
            without_buffers(class_name(self), parallel, out, dgrad_out)
            for layer in (fc1, fc2):
                layer._check_slices()
            input, probs = parallel.copied(input), parallel.copied(probs)
        first, second = fc1._weight_arguments(), fc2._weight_arguments()
        options = self._own_options(fc1)
        if first or second:
            options.update(of_both(first, second))
        if dgrad_out is not None:
            options["dgrad_out"] = dgrad_out
        input, fc1_weight, fc1_bias = fc1._operands(input)
        _, fc2_weight, fc2_bias = fc2._operands(input)  # the input is cast already
        rows = of_slots(slots)
        output: Tensor
        if out is None and not options:
            # The wrapper has nothing to convert, and what is not passed need not be parsed.
            weights = (_matrices(fc1_weight), _matrices(fc2_weight))
            rest = (group_sizes, probs, fc1_bias, fc2_bias)
            output = _ops.grouped_mlp.default(input, *weights, *rest, **rows)
            return output if parallel is None else parallel.output(output, None)
        required = (input, fc1_weight, fc2_weight, group_sizes, probs)
        options.update(fc1_bias=fc1_bias, fc2_bias=fc2_bias, **rows)
        if out is None:
            output = ops.grouped_mlp(*required, **options)
        else:
            if fc1.weight_shard:
                into_buffers(class_name(self), None, out, None, fc1.weight_shard)  # raises
            output = buffer_of(out)
            ops.grouped_mlp_out(*required, output, **options)
        for layer, own, prefix in ((fc1, first, "fc1_"), (fc2, second, "fc2_")):
            layer._wgrad_destination.accepted(layer, own)
            if fc1.parameter_layout == "grouped":
                layer._wgrad_destination.watch_capture(layer, "grouped_mlp", output, prefix)
        return output if parallel is None else parallel.output(output, None)

    def _own_options(self, fc1: GroupedLinear) -> dict[str, Any]:
        """What the op gets in place of its defaults, besides weights, their gradients, and buffers."""
        options: dict[str, Any] = {}
        if fc1._formats != _NO_FORMATS:
            options.update(zip(("input_format", "weight_format", "grad_format"), fc1._formats, strict=True))
        if fc1._launch_options != _NO_OPTIONS:
            options.update(fc1._launch_options._asdict())
        if self._activation_key != "swiglu":
            options["activation"] = self._activation_key
        return options

    def extra_repr(self) -> str:
        """The sizes and the activation."""
        text = f"num_groups={self.num_groups}, hidden={self.hidden}, ffn_hidden={self.ffn_hidden}, bias={self.bias}"
        return text + (f", activation={key}" if (key := self._activation_key) != "swiglu" else "")

    @staticmethod
    def _can_fuse(fc1: GroupedLinear, fc2: GroupedLinear) -> bool:
        """Whether one op can run both layers without hooks. Checked in every forward, because recipes may change."""
        if not (_is_plain(fc1) and _is_plain(fc2)):
            return False
        shard = fc1._weight_source.weight_shard
        return (
            fc1._formats == fc2._formats
            and fc1._launch_options == fc2._launch_options
            and not fc1.scale_bias
            and fc2.scale_bias == fc2.has_bias
            and not (fc1.return_bias or fc2.return_bias)
            and (fc1.tensor_parallel is None) == (fc2.tensor_parallel is None)
            and shard == fc2._weight_source.weight_shard
            and not (shard and fc1.parameter_layout == "list")
            and not (fc1.save_original_input or fc2.save_original_input)
            and fc1._wgrad_destination.into_main_grad == fc2._wgrad_destination.into_main_grad
        )
