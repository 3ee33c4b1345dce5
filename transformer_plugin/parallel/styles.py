"""Styles of ``parallelize_module`` for layers that torch's styles do not take."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.placement_types import Placement

from transformer_plugin.nn.layer_norm_linear import LayerNormLinear

__all__ = ["NormColwiseParallel"]


class NormColwiseParallel(ColwiseParallel):
    """``ColwiseParallel`` of a :class:`~transformer_plugin.nn.LayerNormLinear`: its norm is replicated.

    Each rank has a part of the rows of ``weight`` and ``bias``, and all of ``norm_weight`` and ``norm_bias``. An input
    that is sharded along its rows (``Shard(0)`` of ``[T, K]``, ``Shard(1)`` of ``[B, S, K]``) stays so for the norm,
    and is gathered for the product: sequence parallelism.

    Args:
        input_layouts: the layout of the input, if that is a plain tensor. None: ``Replicate()``.
        output_layouts: the layout of the output. None: ``Shard(-1)``.
        use_local_output: whether the output is this rank's part, a plain tensor, in place of a ``DTensor``.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output
        )
        self.desired_input_layouts: Any = self.input_layouts  # the layer gathers what the norm returns

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, LayerNormLinear) or module.return_bias or module.return_normalized:
            options = " with return_bias or return_normalized" if isinstance(module, LayerNormLinear) else ""
            raise ValueError(
                "transformer_plugin::NormColwiseParallel: argument 'module': expected a LayerNormLinear with one "
                f"output, got {type(module).__name__}{options}. Use torch's ColwiseParallel for other layers, and "
                "distribute_tensor for a layer with several outputs."
            )

        prepare_input = partial(self._prepare_input_fn, self.input_layouts, self.desired_input_layouts)
        prepare_output = partial(self._prepare_output_fn, self.output_layouts, self.use_local_output)
        return distribute_module(module, device_mesh, self._partition, prepare_input, prepare_output)

    def _partition(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for own, parameter in list(module.named_parameters(recurse=False)):
            layout = Replicate() if own.startswith("norm_") else Shard(0)
            part = distribute_tensor(parameter, device_mesh, [layout], src_data_rank=self.src_data_rank)
            module.register_parameter(own, nn.Parameter(part, requires_grad=parameter.requires_grad))
