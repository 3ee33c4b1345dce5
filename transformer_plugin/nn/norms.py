"""RMSNorm and LayerNorm: those of torch.nn over the last dimension, computed by the ops of this package."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin._arguments import class_name, typed
from transformer_plugin.nn._autocast import as_weight
from transformer_plugin.nn._dtensor import is_dtensor, run_norm
from transformer_plugin.nn._module import PluginModule, check_sizes, layer_forward, registered
from transformer_plugin.nn._tensor_parallel import sequence_parallel_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

#: The ops add an eps of float32.
_LARGEST = torch.finfo(torch.float32).max


def _last_dimension(
    normalized_shape: int | Sequence[int], module: str, dtype: torch.dtype | None
) -> int | Sequence[int]:
    """Returns the shape if it is one dimension of at least one element, which is what the ops normalize."""
    is_one = not isinstance(normalized_shape, Sequence) or isinstance(normalized_shape, str)
    sizes: list[Any] = [normalized_shape] if is_one else list(normalized_shape)  # type: ignore[arg-type]
    for size in sizes:
        check_sizes(module, dtype, normalized_shape=size)
    if len(sizes) == 1 and sizes[0] >= 1:
        return normalized_shape
    raise ValueError(
        f"transformer_plugin::{module}: argument 'normalized_shape': expected the size of the last dimension, at "
        f"least 1, got {normalized_shape}. Use torch.nn.{module}, or flatten the normalized dimensions."
    )


def checked_eps(module: str, eps: float | None) -> float | None:
    """Returns an eps with which a norm has a result: with an infinity every row would be zeros."""
    if eps is None or 0 <= eps <= _LARGEST:
        return eps
    raise ValueError(
        f"transformer_plugin::{module}: argument 'eps': expected a finite number from 0, got {eps}. 1e-5 is usual."
    )


class _ZeroCenteredNorm(PluginModule):
    """What the two norms share: a gamma that is stored as its difference to 1 if it is zero centered."""

    zero_centered: bool = False  # while torch's constructor runs

    def _center(self, zero_centered: bool, tp_group: Any, sequence_parallel: bool) -> None:
        """Called at the end of a constructor."""
        if zero_centered and self._parameters.get("weight") is None:
            advice = "Leave zero_centered out, or pass elementwise_affine=True"
            text = (
                f"expected False without a gamma, which it stores as its difference to 1, got True. {advice}."
            )
            raise ValueError(f"transformer_plugin::{class_name(self)}: argument 'zero_centered': {text}")
        self.zero_centered = zero_centered
        self.tensor_parallel = sequence_parallel_group(class_name(self), tp_group, sequence_parallel)
        if zero_centered:
            self.reset_parameters()

    def _own(self, name: str) -> Tensor | None:
        """A parameter, whose gradient is the sum over the ranks that apply it to other rows."""
        parameter: Tensor | None = registered(self, self._parameters, name)
        return parameter if self.tensor_parallel is None else self.tensor_parallel.of_rows(parameter)

    def reset_parameters(self) -> None:
        """Sets gamma to 1 (with ``zero_centered`` the weight to 0), and a bias to 0."""
        super().reset_parameters()  # type: ignore[misc]
        weight = self._parameters.get("weight")
        if self.zero_centered and weight is not None:
            torch.nn.init.zeros_(weight)

    def extra_repr(self) -> str:
        """As in torch, and ``zero_centered`` where it is set."""
        return (
            super().extra_repr()
            + (", zero_centered=True" if self.zero_centered else "")
            + (", sequence_parallel=True" if self.tensor_parallel else "")
        )


class RMSNorm(_ZeroCenteredNorm, torch.nn.RMSNorm):
    """``x / sqrt(mean(x^2) + eps) * gamma`` over the last dimension (:func:`transformer_plugin.ops.rms_norm`).

    A drop-in replacement for :class:`torch.nn.RMSNorm`, of which it is a subclass: the same constructor arguments,
    initial values, parameters and ``state_dict``. Forward and backward have the same bits on CPU and CUDA.

    Args:
        normalized_shape: H, the last dimension of the input, as a number or a sequence of one number.
        eps: what is added to the mean of the squares. The default is 1e-5; that of torch is None, which is
            ``torch.finfo(torch.float32).eps`` in each of these dtypes.
        elementwise_affine: whether there is a learned gamma.
        device, dtype: of the parameters; ``device="meta"`` defers the initial values to ``reset_parameters()``.
        zero_centered: whether gamma is 1 + ``weight``, so that weight decay pulls it towards 1; ``weight`` then starts
            at 0. Not without a gamma.
        sequence_parallel: whether the ranks of ``tp_group`` normalize other rows with the same parameters, whose
            gradients are then the sum over these ranks, see :doc:`/tensor-parallel`.
        tp_group: with ``sequence_parallel``, a process group or a mesh of one dimension.

    Parameter: ``weight [H]``, if ``elementwise_affine``.

    Shapes: input and output ``[..., H]`` in the dtype of the weight, float32, bfloat16 or float16. Under
    ``torch.autocast`` the input is cast to that dtype first, so a norm with float32 parameters is computed in float32
    and returns it, as torch's does on a GPU.
    """

    @typed
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-5,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered: bool = False,
        tp_group: ProcessGroup | DeviceMesh | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        shape = _last_dimension(normalized_shape, "RMSNorm", dtype)
        super().__init__(shape, checked_eps("RMSNorm", eps), elementwise_affine, device, dtype)  # type: ignore[arg-type]
        self._center(zero_centered, tp_group, sequence_parallel)

    @layer_forward
    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dimension. See the class for dtypes."""
        weight = self._own("weight")
        x = as_weight(x, weight)
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps  # torch computes in float32
        if is_dtensor(weight):
            norm = functools.partial(ops.rms_norm, eps=eps, zero_centered=self.zero_centered)
            return run_norm("RMSNorm", norm, x, weight)
        return ops.rms_norm(x, weight, eps, self.zero_centered)


class LayerNorm(_ZeroCenteredNorm, torch.nn.LayerNorm):
    """``(x - mean) / sqrt(variance + eps) * gamma + bias`` over the last dimension
    (:func:`transformer_plugin.ops.layer_norm`).

    A drop-in replacement for :class:`torch.nn.LayerNorm`, of which it is a subclass: the same constructor arguments,
    initial values, parameters and ``state_dict``. Forward and backward have the same bits on CPU and CUDA.

    Args:
        normalized_shape: H, the last dimension of the input, as a number or a sequence of one number.
        eps: what is added to the variance.
        elementwise_affine: whether there are a learned gamma and, with ``bias``, a learned bias.
        bias: whether to add a learned ``[H]``.
        device, dtype: of the parameters; ``device="meta"`` defers the initial values to ``reset_parameters()``.
        zero_centered: whether gamma is 1 + ``weight``, so that weight decay pulls it towards 1; ``weight`` then starts
            at 0. Not without a gamma.
        sequence_parallel: whether the ranks of ``tp_group`` normalize other rows with the same parameters, whose
            gradients are then the sum over these ranks, see :doc:`/tensor-parallel`.
        tp_group: with ``sequence_parallel``, a process group or a mesh of one dimension.

    Parameters: ``weight [H]`` and ``bias [H]``.

    Shapes and dtypes: as :class:`RMSNorm`, also under ``torch.autocast``.
    """

    @typed
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered: bool = False,
        tp_group: ProcessGroup | DeviceMesh | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        shape = _last_dimension(normalized_shape, "LayerNorm", dtype)
        super().__init__(shape, checked_eps("LayerNorm", eps), elementwise_affine, bias, device, dtype)  # type: ignore[arg-type]
        self._center(zero_centered, tp_group, sequence_parallel)

    @layer_forward
    def forward(self, input: Tensor) -> Tensor:
        """Normalizes the last dimension. See the class for dtypes."""
        weight, bias = self._own("weight"), self._own("bias")
        input = as_weight(input, weight)
        if is_dtensor(weight):
            norm = functools.partial(ops.layer_norm, eps=self.eps, zero_centered=self.zero_centered)
            return run_norm("LayerNorm", norm, input, weight, bias)
        return ops.layer_norm(input, weight, bias, self.eps, self.zero_centered)
