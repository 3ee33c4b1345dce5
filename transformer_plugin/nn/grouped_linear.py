"""GroupedLinear: one linear layer per group of rows, with the weights packed into one parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_plugin import ops
from transformer_plugin._arguments import class_name, is_strided, typed
from transformer_plugin.functional._values import is_quantized
from transformer_plugin.launch import LaunchOptions, checked
from transformer_plugin.nn._attributes import fixed
from transformer_plugin.nn._autocast import as_float32, fits_rows, like_input, operands
from transformer_plugin.nn._caller_buffers import into_buffers
from transformer_plugin.nn._delayed_scaling import op_accepts, reset_state, scales_of_call
from transformer_plugin.nn._layouts import (
    Layout,
    checked_layout,
    convert_state,
    names_of,
    packed,
    plain_state,
    register,
)
from transformer_plugin.nn._module import check_sizes, layer_forward, registered
from transformer_plugin.nn._recipe import RecipeModule
from transformer_plugin.nn._slots import sizes_tensor
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
from transformer_plugin.parallel._shard_experts import draw_uniform
from transformer_plugin.recipes import DelayedScaling, Recipe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_ops = torch.ops.transformer_plugin
_NO_OPTIONS = LaunchOptions()


class GroupedLinear(RecipeModule):
    """Multiplies each group of rows by its own weight: ``output_g = input_g @ weight[g].T + bias[g]``.

    The rows are sorted by group. The group sizes are a tensor on the data's device, and the host does not read them on
    CUDA, so one compiled graph or CUDA graph serves every routing. Rows past the last group are zero in the output and
    in the gradient.

    Args:
        num_groups: G, for example this rank's experts. Any number.
        in_features: K, the columns of the input.
        out_features: N, the columns of the output.
        bias: whether each group adds a learned ``[N]``.
        device, dtype: of the parameters; ``device="meta"`` defers the initial values to ``reset_parameters()``.
        recipe: the formats of input, weight and gradient; None multiplies in the dtype of the parameters.
        scale_bias: whether the bias of each row is multiplied by ``bias_scale`` of that row, an argument that
            ``forward`` then requires.
        launch_options: of the GEMMs of forward and backward; an attribute that may be set later.
        parameters: ``"packed"``: plain tensors ``weight [G, N, K]`` and ``bias [G, N]``, which work with every
            optimizer, ``state_dict`` and sharding. ``"list"``: ``weight0 [N, K]``, ``weight1``, ... and ``bias0 [N]``,
            ..., as Megatron-LM names them. ``"grouped"``: ``weight`` and ``bias`` are
            :class:`~transformer_plugin.tensor.GroupedTensor` s. The ``state_dict`` of each layout loads into the
            others; that of ``"grouped"`` has plain tensors. The biases of a list are stacked in each forward;
            weights are never copied.
        fuse_wgrad_accumulation: whether the backward adds the weight's gradient to ``main_grad``, a float32 or bfloat16
            attribute of each weight, in the GEMM's epilogue, in place of ``.grad``; an attribute that may be set later.
            See :func:`transformer_plugin.ops.grouped_linear` for the buffers. Attributes of a weight as Megatron-LM has
            them: with ``overwrite_main_grad`` the buffer is written over; where ``grad_added_to_main_grad`` exists, it
            is set to True and autograd gets an uninitialized gradient, zeros with ``zero_out_wgrad``.
        delay_wgrad_compute: whether the backward leaves the weight's gradient to :meth:`backward_dw`, and keeps its
            operands until then; an attribute that may be set later. Not with ``DelayedScaling``.
        return_bias: whether ``forward`` leaves out the bias and returns it beside the output; ``bias_scale`` is then
            the caller's to apply.
        save_original_input, cache_weights: as in :class:`Linear`.
        parallel_mode, tp_group, sections: tensor parallelism of every group's product, as in :class:`Linear`, with
            packed parameters. All ranks have the same rows and ``bias_scale``; in mode "row" the first adds the bias.

    Initial values are those of G layers ``torch.nn.Linear(K, N)``.

    Buffers: with ``DelayedScaling`` ``delayed_history [H, 3 * G]``, ``delayed_scale [3 * G]`` and
    ``delayed_amax [3 * G]``, float32: first the input's groups, then the weights, then the gradient's groups.
    """

    weight: Parameter
    bias: Parameter | None
    num_groups: int = fixed("num_groups")
    in_features: int = fixed("in_features")
    out_features: int = fixed("out_features")
    parameter_layout: Layout = fixed("parameter_layout")
    _launch_options: LaunchOptions = LaunchOptions()

    @typed
    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        scale_bias: bool = False,
        launch_options: LaunchOptions = LaunchOptions(),  # noqa: B008 immutable
        parameters: Layout = "packed",
        fuse_wgrad_accumulation: bool = False,
        return_bias: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        parallel_mode: ParallelMode | None = None,
        tp_group: ProcessGroup | DeviceMesh | None = None,
        sections: Sequence[int] = (),
        cache_weights: bool = False,
    ) -> None:
        super().__init__()
        parallel = tensor_parallel_of(class_name(self), parallel_mode, tp_group, False)
        if scale_bias and not bias:
            text = "expected False without a bias, got True. Pass bias=True or leave scale_bias out."
            raise ValueError(f"transformer_plugin::GroupedLinear: argument 'scale_bias': {text}")
        sizes = {"num_groups": num_groups, "in_features": in_features, "out_features": out_features}
        check_sizes("GroupedLinear", dtype, **sizes)
        check_division(class_name(self), parallel_mode, sections, out_features=out_features)
        self.num_groups, self.scale_bias, self.launch_options = num_groups, scale_bias, launch_options
        if num_groups == 0 and parameters == "list":
            raise ValueError(
                "transformer_plugin::GroupedLinear: argument 'num_groups': expected at least 1 with "
                "parameters='list', got 0. Use 'packed', whose weight has a device and a dtype without groups."
            )
        self.parameter_layout = checked_layout(parameters, class_name(self))
        self.fuse_wgrad_accumulation, self.return_bias = fuse_wgrad_accumulation, return_bias
        self.delay_wgrad_compute, self.save_original_input = delay_wgrad_compute, save_original_input
        options: Any = {"device": device, "dtype": dtype}
        register(self, "weight", parameters, torch.empty(num_groups, out_features, in_features, **options))
        self._weight_names = names_of("weight", parameters, num_groups)
        self._bias_names = names_of("bias", parameters, num_groups if bias else 0)
        if bias:
            register(self, "bias", parameters, torch.empty(num_groups, out_features, **options))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        self.in_features, self.out_features = in_features, out_features
        if parallel is not None:
            self._divide(parallel, sections)
        self.cache_weights, self.recipe = cache_weights, chosen_recipe(recipe)
        if chosen_recipe(None) is not None:
            self._check_quantizable_layout()
            quantize_parameter(self, "weight", self._formats[1])

    def _divide(self, parallel: TensorParallel, sections: Sequence[int] = ()) -> None:
        """Keeps this rank's slices."""
        shard_parameters(self, parallel, plan_of(class_name(self), parallel.mode, sections, dim=1))
        self._out_features, self._in_features = self.weight.shape[1:]

    def _check_quantizable_layout(self) -> None:
        if self.parameter_layout != "list":
            return
        raise ValueError(
            "transformer_plugin::GroupedLinear: argument 'parameters': expected 'packed' or 'grouped' in "
            "quantized_init, got 'list'. Products read the quantized weights of all groups from one tensor."
        )

    def _parameters_named(self, names: tuple[str, ...]) -> list[Tensor]:
        """The parameters of these names; those that are computed (parametrizations) are attributes only."""
        return [registered(self, self._parameters, name) for name in names]

    def _source_weight(self) -> Tensor | list[Tensor]:
        weights = self._parameters_named(self._weight_names)
        return weights if self.parameter_layout == "list" else weights[0]

    def _any_weight(self) -> Tensor:
        first = self._parameters_named(self._weight_names[:1])
        if not first:
            return torch.empty(0, self.out_features, self.in_features)
        if self.parameter_layout == "list" and self.num_groups != 1:  # delayed scaling counts the matrices
            return first[0].detach().expand(self.num_groups, *first[0].shape)
        return first[0] if first[0].dim() == 3 else first[0][None]

    def _biases(self) -> Any:
        """The biases as their layout has them."""
        biases = self._parameters_named(self._bias_names)
        return biases if self.parameter_layout == "list" else biases[0]

    @property
    def local_weight(self) -> Tensor:
        """This rank's shard of the weight."""
        return self._local(self.weight)

    @property
    def local_bias(self) -> Tensor | None:
        """This rank's shard of the bias."""
        return None if self.bias is None else self._local(self.bias)

    @property
    def has_bias(self) -> bool:
        """Whether each group has a bias."""
        if self._parameter_layout == "list":
            return bool(self._bias_names)
        return registered(self, self._parameters, "bias") is not None

    def _packed_parameters(self) -> tuple[Tensor, Tensor | None]:
        """This rank's shard of the packed weight and bias."""
        found = self._parameters
        weight, bias = registered(self, found, "weight"), registered(self, found, "bias")
        if self.tensor_parallel is not None and self.tensor_parallel.mode == "row":
            bias = self.tensor_parallel.once(bias)
        if self._expert_ranks is None:
            return weight, bias
        return self._local(weight), None if bias is None else self._local(bias)

    def _operands(self, input: Tensor) -> tuple[Tensor, Tensor | list[Tensor], Tensor | None]:
        """Input, weight and bias as the ops take them, cast as ``torch.autocast`` casts those of a linear layer."""
        if self._parameter_layout == "packed":
            return operands(input, *self._packed_parameters())
        bias: Tensor | None = None
        if self.has_bias:
            biases = self._biases()
            bias = torch.stack(biases) if self.parameter_layout == "list" else packed(biases)
        weights = self._parameters_named(self._weight_names)
        if self.parameter_layout == "grouped":
            weight = weights[0]
            return operands(input, weight if is_quantized(weight) else packed(weight), bias)
        cast = [operands(input, weight, None)[1] for weight in weights]
        input, _, bias = operands(input, cast[0], bias)
        return input, cast, bias

    @property
    def launch_options(self) -> LaunchOptions:
        """The launch options of the GEMMs of forward and backward; may be set at any time."""
        return self._launch_options

    @launch_options.setter
    def launch_options(self, options: LaunchOptions) -> None:
        self._launch_options = checked(options, class_name(self))

    def reset_parameters(self) -> None:
        """Uniform within ``1 / sqrt(K)``, as in ``torch.nn.Linear``. Also resets the state of delayed scaling."""
        with torch.no_grad(), in_high_precision(self, *self._weight_names), initialize_full_params(self):
            weights = self._parameters_named(self._weight_names[:1])
            columns = weights[0].shape[-1] if weights else 0
            bound = 1 / math.sqrt(columns) if columns else 0.0
            for parameter in self._parameters_named((*self._weight_names, *self._bias_names)):
                if parameter is not None:
                    draw_uniform(self, packed(parameter), bound)
        reset_state(self)

    @layer_forward
    def forward(
        self,
        input: Tensor,
        group_sizes: Tensor | Sequence[int],
        bias_scale: Tensor | None = None,
        *,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        """Multiplies each group of rows by its weight.

        Args:
            input: ``[T, K]``, the rows of group 0, then of group 1, and so on; rows past the last group are
                ignored.
            group_sizes: int32 or int64 ``[G]`` on the device of ``input``, each at least 0, with a sum of at
                most T. For a backward with ``NVFP4BlockScaling`` the sizes and T are multiples of 16. A list or a
                tuple of integers is converted to a tensor in each call; on a GPU this waits for a copy.
            bias_scale: ``[T]``, only with ``scale_bias``: the factor of each row's bias. It is converted to
                float32 if it has another dtype.
            out, dgrad_out: ``[T, N]`` and ``[T, K]``, buffers as in :meth:`Linear.forward`. Rows past the last group
                become zero.

        Returns:
            ``[T, N]`` in the dtype of ``input``, differentiable in ``input``, the parameters and ``bias_scale``.
            Under ``torch.autocast`` input, weight and bias are cast first, and the output has autocast's dtype. With
            ``return_bias`` a pair: the output without the bias, and the bias: the parameter, a list of them, or None.
        """
        group_sizes = sizes_tensor(group_sizes, input)
        if (bias_scale is not None) != self.scale_bias:
            self._refuse_bias_scale()
        options = self._weight_arguments()  # of _weight_source and _wgrad_destination
        input, weight, bias = self._operands(input)
        bias_scale = None if bias_scale is None else as_float32(bias_scale)
        weight = like_input(weight, input) if self._weight_source.is_external else weight
        kept_bias = self._biases() if self.return_bias and self.has_bias else None
        if self.return_bias:
            bias = bias_scale = None
        parallel = self.tensor_parallel
        if parallel is not None:
            without_buffers(class_name(self), parallel, out, dgrad_out)
            self._check_slices()
            input, bias_scale = parallel.input(input), parallel.copied(bias_scale)
        if out is not None or dgrad_out is not None:
            out, buffers = into_buffers(class_name(self), self.recipe, out, dgrad_out, self.weight_shard)
            options.update(buffers)
        output = self._product((input, weight, group_sizes, bias, bias_scale), options, out)
        if self._wgrad_destination.into_main_grad:
            self._wgrad_destination.accepted(self, options)
        if options and self._parameter_layout == "grouped":
            self._wgrad_destination.watch_capture(self, "grouped_linear", output)
        if parallel is not None:
            output = parallel.output(output, None)
        return (output, kept_bias) if self.return_bias else output

    def _product(self, operands: tuple[Any, ...], options: dict[str, Any], out: Tensor | None) -> Tensor:
        """Calls the op of the recipe with the operands, and with buffers for what it and its backward compute."""
        input, weight, group_sizes, bias, bias_scale = operands
        if isinstance(self._recipe, DelayedScaling):
            return self._delayed_product(self._recipe, options.get("weight_shard", ""), *operands)
        is_plain = self._recipe is None and self._launch_options == _NO_OPTIONS
        if is_plain and out is None and not options:
            # What is not passed need not be parsed, and the wrapper has nothing to convert.
            matrices = [weight] if isinstance(weight, Tensor) else weight
            output: Tensor = _ops.grouped_linear.default(input, matrices, group_sizes, bias, bias_scale)
            return output
        max_sms, expected_rows = self._launch_options
        launch: dict[str, Any] = {"max_sms": max_sms, "expected_rows": expected_rows, **options}
        if out is None:
            return ops.grouped_linear(input, weight, group_sizes, bias, bias_scale, *self._formats, **launch)
        ops.grouped_linear_out(input, weight, group_sizes, out, bias, bias_scale, *self._formats, **launch)
        return out

    def _refuse_bias_scale(self) -> NoReturn:
        raise ValueError(
            "transformer_plugin::GroupedLinear: argument 'bias_scale': expected "
            f"{'a tensor [T]' if self.scale_bias else 'None'} with scale_bias={self.scale_bias}, got "
            f"{'None' if self.scale_bias else 'a tensor'}. Use the same choice in the constructor and the call."
        )

    def _delayed_product(
        self,
        recipe: DelayedScaling,
        shard: str,
        input: Tensor,
        weight: Tensor | list[Tensor],
        group_sizes: Tensor,
        bias: Tensor | None,
        bias_scale: Tensor | None,
    ) -> Tensor:
        if not isinstance(weight, Tensor):
            raise ValueError(
                "transformer_plugin::GroupedLinear: argument 'recipe': expected parameters='packed' or 'grouped' with "
                "DelayedScaling, got 'list'. Use another recipe, for example Float8CurrentScaling()."
            )
        accepted = op_accepts(self, input, weight, bias)
        accepted = accepted and self._op_accepts_rows(input, group_sizes, bias_scale)
        scale, amax = scales_of_call(self, recipe, accepted)
        options: dict[str, Any] = {**self.launch_options._asdict(), "weight_shard": shard}
        operands = (input, weight, group_sizes, bias, bias_scale)
        return ops.grouped_linear(*operands, *self._formats, scale=scale, amax=amax, **options)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            for name in (*self._weight_names, *self._bias_names):
                plain_state(destination, prefix + name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        errors = arguments[-1]
        for name in ("weight", "bias") if self.has_bias else ("weight",):
            convert_state(state_dict, prefix, name, self.parameter_layout, self, errors)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _op_accepts_rows(self, input: Tensor, group_sizes: Tensor, bias_scale: Tensor | None) -> bool:
        """Whether the op will accept these arguments. On a CPU this includes the values of the group sizes."""
        if (
            not is_strided(group_sizes)
            or input.dim() != 2
            or group_sizes.shape != (self.num_groups,)
            or group_sizes.device != input.device
        ):
            return False
        if group_sizes.dtype not in (torch.int32, torch.int64) or not group_sizes.is_contiguous():
            return False
        if bias_scale is not None and not fits_rows(bias_scale, input):
            return False
        if torch.compiler.is_compiling() or type(group_sizes) is not Tensor or group_sizes.is_cuda:
            return True
        sizes = group_sizes.tolist() if group_sizes.device.type == "cpu" else []
        return min(sizes, default=0) >= 0 and sum(sizes) <= input.shape[0]

    def extra_repr(self) -> str:
        """The sizes and the recipe."""
        text = f"num_groups={self.num_groups}, in_features={self.in_features}, "
        text += f"out_features={self.out_features}, bias={self.has_bias}"
        text += ", scale_bias=True" if self.scale_bias else ""
        text += "" if self.parameter_layout == "packed" else f", parameters={self.parameter_layout!r}"
        text += self._extra_options()
        text += f", launch_options={self.launch_options}" if self.launch_options != LaunchOptions() else ""
        return text + (f", recipe={self.recipe}" if self.recipe else "")
