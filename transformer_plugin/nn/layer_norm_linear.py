"""LayerNormLinear: a norm and a linear layer as one op, with a recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_plugin import ops
from transformer_plugin._arguments import class_name, typed
from transformer_plugin.nn._attributes import fixed
from transformer_plugin.nn._autocast import like_input, operands
from transformer_plugin.nn._caller_buffers import into_buffers, with_gradient_into
from transformer_plugin.nn._delayed_scaling import reset_state
from transformer_plugin.nn._dtensor import is_dtensor, run_norm_linear
from transformer_plugin.nn._module import check_sizes, layer_forward, registered
from transformer_plugin.nn._recipe import RecipeModule
from transformer_plugin.nn._tensor_parallel import (
    TensorParallel,
    check_division,
    initialize_full_params,
    plan_of,
    shard_parameters,
    tensor_parallel_of,
    without_buffers,
)
from transformer_plugin.nn._transformer_engine import rename
from transformer_plugin.nn.linear import linear_product
from transformer_plugin.nn.norms import checked_eps
from transformer_plugin.nn.quantized_parameters import chosen_recipe, in_high_precision, quantize_parameter
from transformer_plugin.recipes import DelayedScaling, Recipe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

#: The names of the norms, and what the ops call them.
_NORMS = {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}
#: Entries of its state dicts, which ``load_state_dict`` takes too.
_NAMES_OF_TRANSFORMER_ENGINE = {"layer_norm_weight": "norm_weight", "layer_norm_bias": "norm_bias"}


class LayerNormLinear(RecipeModule):
    """``norm(input) @ weight.T + bias``, where a norm and a linear layer follow each other.

    Bit for bit :class:`LayerNorm` or :class:`RMSNorm` and then :class:`Linear` with the same recipe. It is one op,
    :func:`transformer_plugin.ops.norm_linear`: in formats with block scales the norm is quantized in the pass that
    computes it, and the backward keeps the input and no normalized values.

    With ``DelayedScaling`` the two steps run one after the other, the norm and
    :func:`transformer_plugin.ops.linear`, because the amax of the norm is collected while it is quantized. The
    backward then also keeps the quantized norm.

    Args:
        in_features: K, the last dimension of the input, which is normalized; at least 1. Multiples as for
            :class:`Linear`.
        out_features: N, the last dimension of the output.
        bias: whether the linear layer adds a learned ``[N]``.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        eps: what is added to the variance, or to the mean of the squares.
        zero_centered: whether gamma is 1 + ``norm_weight``, which then starts at 0.
        return_normalized: whether ``forward`` returns the norm, too.
        fuse_wgrad_accumulation, delay_wgrad_compute, return_bias, cache_weights: as in :class:`Linear`.
        parallel_mode: ``"column"``: tensor parallelism, as in :class:`Linear`. Each rank normalizes full rows: all of
            them, or with ``sequence_parallel`` its own, which are then gathered. The norm's gradients are complete.
        tp_group, sequence_parallel, sections, pad_outputs: as in :class:`Linear`.
        recipe: the formats of the normalized input, the weight and the gradient; None multiplies in the dtype of the
            parameters.
        device, dtype: of the parameters; ``device="meta"`` defers the initial values to ``reset_parameters()``.

    Parameters: ``norm_weight [K]``, ``norm_bias [K]`` (``LayerNorm`` only), ``weight [N, K]`` and ``bias [N]``. Initial
    values are those of torch's norm and of ``torch.nn.Linear``.

    Buffers: those of :class:`Linear`.

    Shapes: input ``[..., K]``, output ``[..., N]`` in the dtype of the input. Under ``torch.autocast`` the input and
    all parameters are cast first; the norm is computed in float32 from the cast values. For a backward with
    ``NVFP4BlockScaling`` the number of input rows is a multiple of 16.
    """

    weight: Parameter
    bias: Parameter | None
    norm_weight: Parameter
    norm_bias: Parameter | None
    in_features: int = fixed("in_features")
    out_features: int = fixed("out_features")
    normalization: str = fixed("normalization")

    @typed
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm",
        eps: float = 1e-5,
        zero_centered: bool = False,
        return_normalized: bool = False,
        recipe: Recipe | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        fuse_wgrad_accumulation: bool = False,
        return_bias: bool = False,
        delay_wgrad_compute: bool = False,
        parallel_mode: Literal["column"] | None = None,
        tp_group: ProcessGroup | DeviceMesh | None = None,
        sequence_parallel: bool = False,
        sections: Sequence[int] = (),
        pad_outputs: bool = False,
        cache_weights: bool = False,
    ) -> None:
        super().__init__()
        own = class_name(self)
        parallel = tensor_parallel_of(own, parallel_mode, tp_group, sequence_parallel, ("column",))
        self.fuse_wgrad_accumulation, self.return_bias = fuse_wgrad_accumulation, return_bias
        self.delay_wgrad_compute, self.cache_weights = delay_wgrad_compute, cache_weights
        check_sizes(own, dtype, in_features=in_features, out_features=out_features)
        checked_eps(own, eps)
        check_division(own, parallel_mode, sections, pad_outputs, out_features)
        self._check(normalization, in_features)
        self.in_features, self.out_features = in_features, out_features
        self.normalization = normalization
        self.eps = eps
        self.zero_centered = zero_centered
        self.return_normalized = return_normalized

        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm_weight = Parameter(torch.empty(in_features, **options))
        of_norm = Parameter(torch.empty(in_features, **options)) if normalization == "LayerNorm" else None
        self.register_parameter("norm_bias", of_norm)
        self.weight = Parameter(torch.empty(out_features, in_features, **options))
        self.register_parameter("bias", Parameter(torch.empty(out_features, **options)) if bias else None)
        self.reset_parameters()
        if parallel is not None:
            self._divide(parallel, sections, pad_outputs)
        self.recipe = chosen_recipe(recipe)
        quantize_parameter(self, "weight", self._formats[1])

    def _divide(
        self, parallel: TensorParallel, sections: Sequence[int] = (), pad_outputs: bool = False
    ) -> None:
        """Keeps this rank's slices."""
        shard_parameters(self, parallel, plan_of(class_name(self), "column", sections, pad_outputs))
        self._out_features = self.weight.shape[0]

    def _check(self, normalization: str, in_features: int) -> None:
        if normalization not in tuple(_NORMS):
            raise self._error(
                "normalization", "'LayerNorm' or 'RMSNorm'", repr(normalization), "Use one of the two"
            )
        if in_features < 1:
            raise self._error(
                "in_features", "at least 1", in_features, "There is nothing to normalize in an empty row"
            )

    def reset_parameters(self) -> None:
        """Gamma 1, the norm's bias 0, weight and bias as in ``torch.nn.Linear``. Also resets delayed scaling."""
        torch.nn.init.constant_(self.norm_weight, 0.0 if self.zero_centered else 1.0)
        if self.norm_bias is not None:
            torch.nn.init.zeros_(self.norm_bias)
        with in_high_precision(self, "weight"), initialize_full_params(self):
            torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
            if self.bias is not None:
                bound = 1 / math.sqrt(self.in_features)
                torch.nn.init.uniform_(self.bias, -bound, bound)
        reset_state(self)

    @layer_forward
    def forward(self, input: Tensor, *, out: Tensor | None = None, dgrad_out: Tensor | None = None) -> Any:
        """Computes ``norm(input) @ weight.T + bias``.

        Args:
            input: ``[..., K]``, see the class.
            out: as in :meth:`Linear.forward`. The norm and the product are then two ops, and the backward keeps what
                those of :class:`Linear` keeps.
            dgrad_out: likewise. The gradient, which the backward of the norm makes, is copied into it. Neither with
                ``DelayedScaling``.

        Returns:
            The output; then, with ``return_bias``, the bias, which the output lacks; then, with ``return_normalized``,
            the norm ``[..., K]``, differentiable as the output.
        """
        options = self._weight_arguments()  # of _weight_source and _wgrad_destination
        names = ("norm_weight", "norm_bias", "weight", "bias")
        *of_norm, own_weight, own_bias = [registered(self, self._parameters, name) for name in names]
        input, norm_weight, norm_bias = operands(input, *of_norm)
        _, weight, bias = operands(input, own_weight, None if self.return_bias else own_bias)
        if self._weight_source.is_external:
            weight = like_input(weight, input)
        parallel = self.tensor_parallel
        if parallel is not None:
            without_buffers(class_name(self), parallel, out, dgrad_out)
            self._check_slices()
        if out is not None or dgrad_out is not None:
            out, _ = into_buffers(class_name(self), self.recipe, out, dgrad_out, self.weight_shard)
            if dgrad_out is not None:
                input = with_gradient_into(class_name(self), input, dgrad_out)
        tensors = (input, norm_weight, norm_bias, weight, bias)
        if is_dtensor(weight):
            output, normalized = run_norm_linear(self, tensors, options, out)
        elif self._is_one_op() and out is None:
            output, normalized = self._one_op(tensors, options)
        else:
            output, normalized = self._two_ops(tensors, options, out)
        if self._wgrad_destination.into_main_grad:
            self._wgrad_destination.accepted(self, options)
        results: list[Any] = [output]
        results += [own_bias] if self.return_bias else []
        results += [normalized] if self.return_normalized else []
        return tuple(results) if len(results) > 1 else output

    def _is_one_op(self) -> bool:
        """Whether one op has the norm and the product."""
        if isinstance(self.recipe, DelayedScaling):
            return False
        # Of a tensor-parallel product the gradient is a partial sum over ranks, that of the norm it returns is not.
        parallel = self.tensor_parallel
        return parallel is None or not (parallel.sequence_parallel or self.return_normalized)

    def _one_op(self, tensors: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        input, norm_weight, norm_bias, weight, bias = tensors
        parallel = self.tensor_parallel
        if parallel is not None:  # gradients of the norm's sum over ranks
            input, norm_weight = parallel.copied(input), parallel.copied(norm_weight)
            norm_bias = parallel.copied(norm_bias)
        norm = (self.eps, _NORMS[self.normalization], self.zero_centered, self.return_normalized)
        return ops.norm_linear(input, norm_weight, norm_bias, weight, bias, *norm, *self._formats, **options)

    def _two_ops(
        self, tensors: tuple[Any, ...], options: dict[str, Any], out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        input, norm_weight, norm_bias, weight, bias = tensors
        parallel = self.tensor_parallel
        if parallel is not None:
            norm_weight, norm_bias = parallel.of_rows(norm_weight), parallel.of_rows(norm_bias)
        normalized = gathered = self._norm(input, norm_weight, norm_bias)
        if parallel is not None and (
            isinstance(self.recipe, DelayedScaling) or not parallel.gathers(options)
        ):
            gathered = parallel.input(normalized)
        return linear_product(self, gathered, weight, bias, options, out), normalized

    def _norm(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.normalization == "LayerNorm":
            return ops.layer_norm(input, weight, bias, self.eps, self.zero_centered)
        return ops.rms_norm(input, weight, self.eps, self.zero_centered)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        rename(self, state_dict, prefix, _NAMES_OF_TRANSFORMER_ENGINE, arguments[-1])
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        """The sizes, the norm, and the recipe where there is one."""
        text = (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )
        text += f", normalization={self.normalization}, eps={self.eps}"
        text += ", zero_centered=True" if self.zero_centered else ""
        text += ", return_normalized=True" if self.return_normalized else ""
        text += self._extra_options()
        return text + (f", recipe={self.recipe}" if self.recipe else "")

    @staticmethod
    def _error(argument: str, expected: str, got: object, advice: str) -> ValueError:
        return ValueError(
            f"transformer_plugin::LayerNormLinear: argument '{argument}': expected {expected}, got {got}. {advice}."
        )
