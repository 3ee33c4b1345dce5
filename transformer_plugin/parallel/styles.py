"""Styles for torch's ``parallelize_module`` that make layers of this package tensor parallel, with plain parameters.

As the arguments ``parallel_mode``, ``tp_group`` and ``sequence_parallel`` of the layers do, for a model that exists
already; see :doc:`/tensor-parallel`. torch's own styles work, too: parameters are then ``DTensor`` s
(:doc:`/tensor-parallel-dtensor`); :class:`NormColwiseParallel` is one for layers that those do not take.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from transformer_plugin._arguments import class_name
from transformer_plugin._public import only_public_names
from transformer_plugin.nn._tensor_parallel import TensorParallel, same_on_ranks, tensor_parallel_of
from transformer_plugin.nn.embedding import Embedding
from transformer_plugin.nn.grouped_linear import GroupedLinear
from transformer_plugin.nn.grouped_mlp import GroupedMLP
from transformer_plugin.nn.layer_norm_linear import LayerNormLinear
from transformer_plugin.nn.linear import Linear
from transformer_plugin.nn.norms import LayerNorm, RMSNorm
from transformer_plugin.parallel._collectives import torch_collectives
from transformer_plugin.tensor._layout import message

__all__ = ["ColumnParallel", "ExpertTensorParallel", "NormColwiseParallel", "RowParallel", "SequenceParallel"]
only_public_names(__name__)


class _Style(ParallelStyle):
    """What the styles share."""

    kinds: tuple[type, ...] = ()

    def __init__(self, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def _ranks(self, module: Any, mesh: DeviceMesh, mode: str) -> TensorParallel | None:
        name, kind_of = class_name(self), type(module)
        if not issubclass(kind_of, self.kinds):
            names = " or ".join(kind.__name__ for kind in self.kinds)
            _refuse(name, "module", names, kind_of.__name__, "Use another style for this module")
        if module.tensor_parallel is not None:
            _refuse(
                name, "module", "an unsharded layer", "one that is tensor parallel", "Apply one style, once"
            )
        return tensor_parallel_of(name, mode, mesh, self.sequence_parallel)


class ColumnParallel(_Style):
    """Each rank keeps some of the outputs of a :class:`~transformer_plugin.nn.Linear`,
    :class:`~transformer_plugin.nn.LayerNormLinear` or :class:`~transformer_plugin.nn.GroupedLinear`.

    Args:
        sequence_parallel, sections, pad_outputs: as in :class:`~transformer_plugin.nn.Linear`.
    """

    kinds = (Linear, LayerNormLinear, GroupedLinear)

    def __init__(
        self,
        *,
        sequence_parallel: bool = False,
        sections: Sequence[int] = (),
        pad_outputs: bool = False,
    ) -> None:
        super().__init__(sequence_parallel=sequence_parallel)
        self.sections, self.pad_outputs = tuple(sections), pad_outputs

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        layer: Any = module
        parallel = self._ranks(layer, device_mesh, "column")
        if parallel is None:
            return module
        if isinstance(layer, GroupedLinear):
            if self.pad_outputs or self.sequence_parallel:
                got = f"pad_outputs={self.pad_outputs}, sequence_parallel={self.sequence_parallel}"
                _refuse("ColumnParallel", "module", "neither for a GroupedLinear", got, "Leave them out")
            layer._divide(parallel, self.sections)
        else:
            layer._divide(parallel, self.sections, self.pad_outputs)
        return module


class RowParallel(_Style):
    """Each rank keeps some of the inputs of a :class:`~transformer_plugin.nn.Linear` or
    :class:`~transformer_plugin.nn.GroupedLinear`, or some rows of an :class:`~transformer_plugin.nn.Embedding`.

    Args:
        sequence_parallel: as in :class:`~transformer_plugin.nn.Linear`.
    """

    kinds = (Linear, GroupedLinear, Embedding)

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        layer: Any = module
        parallel = self._ranks(layer, device_mesh, "row")
        if parallel is not None:
            layer._divide(parallel)
        return module


class SequenceParallel(_Style):
    """Each rank normalizes its own rows: for :class:`~transformer_plugin.nn.RMSNorm` and
    :class:`~transformer_plugin.nn.LayerNorm`."""

    kinds = (RMSNorm, LayerNorm)

    def __init__(self) -> None:
        super().__init__(sequence_parallel=True)

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        layer: Any = module
        layer.tensor_parallel = self._ranks(layer, device_mesh, "column")
        same_on_ranks(layer)
        return module


class ExpertTensorParallel(_Style):
    """Each rank keeps a slice of every expert of a :class:`~transformer_plugin.nn.GroupedMLP`."""

    kinds = (GroupedMLP,)

    def __init__(self) -> None:
        super().__init__()

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        layer: Any = module
        parallel = self._ranks(layer, device_mesh, "column")
        if parallel is not None:
            layer._divide(parallel)
        return module


class NormColwiseParallel(ColwiseParallel):
    """``ColwiseParallel`` of a :class:`~transformer_plugin.nn.LayerNormLinear`: its norm is replicated.

    Each rank has a shard of the rows of ``weight`` and ``bias``, and all of ``norm_weight`` and ``norm_bias``. An input
    that is sharded along its rows (``Shard(0)`` of ``[T, K]``, ``Shard(1)`` of ``[B, S, K]``) stays so for the norm,
    and is gathered for the product: sequence parallelism.

    Args:
        input_layouts: the layout of the input, if that is a plain tensor. None: ``Replicate()``.
        output_layouts: the layout of the output. None: ``Shard(-1)``.
        use_local_output: whether the output is this rank's shard, a plain tensor, in place of a ``DTensor``.
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

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
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

    def _partition(self, name: str, module: torch.nn.Module, device_mesh: DeviceMesh) -> None:
        with torch_collectives("NormColwiseParallel", "parameters", device_mesh):
            for own, parameter in list(module.named_parameters(recurse=False)):
                layout = Replicate() if own.startswith("norm_") else Shard(0)
                shard = distribute_tensor(parameter, device_mesh, [layout], src_data_rank=self.src_data_rank)
                module.register_parameter(own, torch.nn.Parameter(shard, parameter.requires_grad))


def _refuse(style: str, argument: str, expected: str, got: str, advice: str) -> NoReturn:
    raise ValueError(message(style, argument, expected, got, advice))
