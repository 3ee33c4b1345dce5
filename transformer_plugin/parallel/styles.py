"""Styles for torch's ``parallelize_module`` that make layers of this package tensor parallel, with plain parameters.

As the arguments ``parallel_mode``, ``tp_group`` and ``sequence_parallel`` of the layers do, for a model that exists
already; see :doc:`/tensor-parallel`. torch's own styles work, too: parameters are then ``DTensor`` s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from transformer_plugin.nn._tensor_parallel import TensorParallel, tensor_parallel_of
from transformer_plugin.nn.embedding import Embedding
from transformer_plugin.nn.grouped_linear import GroupedLinear
from transformer_plugin.nn.grouped_mlp import GroupedMLP
from transformer_plugin.nn.layer_norm_linear import LayerNormLinear
from transformer_plugin.nn.linear import Linear
from transformer_plugin.nn.norms import LayerNorm, RMSNorm
from transformer_plugin.tensor._layout import message

__all__ = ["ColumnParallel", "RowParallel", "SequenceParallel", "SlicedExperts"]


class _Style(ParallelStyle):
    """What the styles share."""

    kinds: tuple[type, ...] = ()

    def __init__(self, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def _ranks(self, module: Any, mesh: DeviceMesh, mode: str) -> TensorParallel | None:
        name, kind_of = type(self).__name__, type(module)
        if not issubclass(kind_of, self.kinds):
            names = " or ".join(kind.__name__ for kind in self.kinds)
            _refuse(name, "module", names, kind_of.__name__, "Use another style for this module")
        if module.tensor_parallel is not None:
            _refuse(name, "module", "a whole layer", "one that is tensor parallel", "Apply one style, once")
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
        return module


class SlicedExperts(_Style):
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


def _refuse(style: str, argument: str, expected: str, got: str, advice: str) -> NoReturn:
    raise ValueError(message(style, argument, expected, got, advice))
