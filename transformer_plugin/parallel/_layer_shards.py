"""The parameters of layers that are shards or slices, also after PyTorch has replaced them.

Which rows a rank has is known to the layer (``parameter_shards``, ``tensor_slices``), and noted on its parameters for
optimizers, norms and checkpoints, which see parameters alone. Assignments and conversions note it again at once. What
exchanges a parameter without a call of its layer (``torch.utils.swap_tensors``, writes into ``module._parameters``) is
found by :func:`note_shards`, with which everything begins that reads the notes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d

from transformer_plugin import ops
from transformer_plugin._arguments import check_strided, class_name
from transformer_plugin.parallel._parameter_shard import (
    PARAMETER_SHARD,
    ParameterShard,
    layout_of,
    shard_of_parameter,
)
from transformer_plugin.parallel._tensor_slices import (
    TENSOR_PARALLELISM,
    TENSOR_SLICES,
    TensorSlices,
    slices_of,
)
from transformer_plugin.tensor._base import FormatTensor
from transformer_plugin.tensor._layout import message

#: The layers of this process that have shards or slices: parameters do not refer to their layers.
_LAYERS: weakref.WeakSet[Any] = weakref.WeakSet()
#: The attribute of a parameter that another one has replaced in its layer.
REPLACED = "replaced"


class Replacement(NamedTuple):
    """Of a parameter that is not a layer's any more."""

    #: Its name, for errors.
    what: str
    #: What replaced it: a function of this package or of PyTorch.
    by: str


def shard_names(layer: Any) -> tuple[str, ...]:
    """The names of a layer's parameters that are shards or slices."""
    return tuple({**layer.parameter_shards, **layer.tensor_slices})


def note_layer(layer: Any) -> None:
    """Notes on the parameters of a layer what they are shards and slices of."""
    if layer.has_full_parameters:
        return
    _LAYERS.add(layer)
    for name in shard_names(layer):
        parameter = layer._parameters.get(name)
        if parameter is not None:
            note(parameter, layer.parameter_shards.get(name), layer.tensor_slices.get(name))


def note_shards() -> None:
    """Notes it on the parameters of all layers."""
    for layer in list(_LAYERS):
        note_layer(layer)


def note(parameter: Any, shard: ParameterShard | None, slices: TensorSlices | None) -> None:
    """Notes on a tensor which shard and which slices it is; None: it is none."""
    notes = parameter.__dict__
    for attribute, known in ((PARAMETER_SHARD, shard), (TENSOR_SLICES, slices)):
        if known is None:
            notes.pop(attribute, None)  # of another layer, which had the parameter before
        elif notes.get(attribute) is not known and notes.get(attribute) != known:
            setattr(parameter, attribute, known)
    if slices is not None and slices.kind == TENSOR_PARALLELISM and "partition_stride" not in notes:
        # Megatron-LM's: its norm counts parameters without the first on one rank only. Each of `partition_stride`
        # sections of the dimension is divided among the ranks.
        parameter.tensor_model_parallel, parameter.partition_dim = True, slices.dim
        parameter.partition_stride = max(1, len(slices.own))


def register(layer: Any, name: str, parameter: Any, register_parameter: Any) -> None:
    """``register_parameter(name, parameter)`` of a layer: a shard takes the place of a shard, or nothing is changed."""
    is_shard = name in layer.parameter_shards or name in layer.tensor_slices
    old = layer._parameters.get(name)
    if isinstance(parameter, torch.Tensor):
        check_strided(class_name(layer), name, parameter)
    if parameter is not None and not layer.has_full_parameters:
        if is_shard:
            _check_shard(layer, name, parameter, old)
        elif old is None or old.shape != getattr(parameter, "shape", None):
            _check_full(layer, name, parameter)
    register_parameter(name, parameter)
    if is_shard and not layer.has_full_parameters:
        if parameter is not None:
            parameter.__dict__.pop(REPLACED, None)
        note_replaced(layer, name, old, "register_parameter")
        note_layer(layer)


def check_shard(layer: Any, name: str, attribute: str) -> None:
    """In eager forwards: notes the shards again after ``swap_tensors``. Raises if there is a full weight now, which
    ``swap_tensors`` or ``weight.data = full`` put there. ``attribute``: of the parameter, which knows its sizes."""
    if torch.compiler.is_compiling():
        return
    parameter = layer._parameters.get(name)
    if parameter is None:
        return
    known = parameter.__dict__.get(attribute)
    if known is None:
        note_layer(layer)
    elif parameter.shape[known.dim] == known.local_size:
        return
    layout_of(parameter)


def note_replaced(layer: Any, name: str, old: Any, by: str) -> None:
    """Called after a parameter of a layer was replaced: its optimizer has lost it, and its rows are not gathered."""
    now = layer._parameters.get(name)
    if old is None or old is now or not _is_noted(old):
        return
    shard = shard_of_parameter(old)
    what = f"the shard '{shard.name if shard is not None else f'{class_name(layer)}.{name}'}'"
    old.__dict__.setdefault(REPLACED, Replacement(what, by))
    if shard is not None and _exists(shard.group):
        # Ranks may free the old memory at different times, and only some would still gather it ahead of use.
        ops.clear_gathers(shard.group.group_name)


def refuse_replaced(parameters: Iterable[Any]) -> None:
    """Raises if a parameter of an optimizer has been replaced in its layer, which steps of it would not change."""
    for parameter in parameters:
        found = parameter.__dict__.get(REPLACED)
        if found is None or _is_held(parameter):
            continue
        got, advice = f"{found.what}, which {found.by} replaced", f"Make the optimizer after {found.by}"
        raise ValueError(message(found.by, "optimizer", "parameters of the model", got, advice))


def refuse_computed(parameter: Any, op: str, name: str = "weight") -> None:
    """Raises if a parameter that is a shard or a slice would be computed from others in each forward."""
    if _is_noted(parameter):
        expected = "a parameter of which this rank has all elements"
        advice = "Leave the weight as it is, or this layer out of shard_ and tensor parallelism"
        raise ValueError(message(op, name, expected, described(parameter), advice))


def refuse_deletion(layer: Any, name: str) -> None:
    """Raises: what deletes a parameter puts others in its place, from which the layer computes it."""
    parameter = layer._parameters.get(name)
    expected = "a layer that keeps its parameter, of which this rank has a shard"
    got = f"a deletion of {described(parameter)}, as parametrizations, spectral_norm and pruning do"
    advice = "Assign another parameter of the same sizes without deleting this one"
    raise ValueError(message(class_name(layer), name, expected, got, advice))


@contextmanager
def noting_conversion(layer: Any) -> Iterator[None]:
    """Context of a layer's ``_apply``."""
    with keeping_ties(layer) as before:
        yield
    for name, old in before.items():
        note_replaced(layer, name, old, "_apply")
    note_layer(layer)


@contextmanager
def keeping_ties(layer: Any) -> Iterator[dict[str, Any]]:
    """Context of a conversion or a load: layers that share a shard share what replaces it. Yields the old ones."""
    before = {name: layer._parameters[name] for name in shard_names(layer) if name in layer._parameters}
    yield before
    for name, old in before.items():
        now = layer._parameters.get(name)
        if old is None or now is None or old is now:
            continue
        for other, key in list(_holders(old)):
            other._parameters[key] = now
            note_layer(other)


def _check_shard(layer: Any, name: str, parameter: Any, old: Any) -> None:
    """Raises if a parameter cannot take the place of a shard or slice."""
    shard, slices = layer.parameter_shards.get(name), layer.tensor_slices.get(name)
    sizes = list(parameter.shape if old is None else old.shape)
    if slices is not None:
        sizes[slices.dim] = slices.local_size
    if shard is not None:
        sizes[0] = shard.local_size
    ranks = (shard or slices).ranks
    kind = "a plain tensor" if shard is not None else "a tensor"
    expected = f"{kind} of sizes {sizes}, this rank's shard over the ranks {list(ranks)}"
    advice = "Assign this rank's shard, or load the full tensor with load_state_dict"
    got = ""
    if hasattr(parameter, "to_local") or (shard is not None and isinstance(parameter, FormatTensor)):
        got = f"a {type(parameter).__name__}"
    elif list(parameter.shape) != sizes:
        got = f"one of sizes {list(parameter.shape)}"
    elif _is_other_shard(parameter, shard, slices):
        got = f"{described(parameter)}, which is another shard in the layer that has it"
    if got:
        raise ValueError(message(class_name(layer), name, expected, got, advice))


def _is_other_shard(parameter: Any, shard: ParameterShard | None, slices: TensorSlices | None) -> bool:
    """Whether another layer has a parameter as another shard."""
    found = shard_of_parameter(parameter), slices_of(parameter)
    if found == (None, None):
        return False
    same = found[1] == slices and _place(found[0]) == _place(shard)
    return not same and _is_held(parameter)


def _place(shard: ParameterShard | None) -> Any:
    if shard is None:
        return None
    return (shard.shard.rows, shard.shard.align, shard.shard.mean, shard.rank, shard.ranks)


def _check_full(layer: Any, name: str, parameter: Any) -> None:
    """Raises if a shard of another layer, or of another parameter, would be one that is not a shard."""
    if _is_noted(parameter) and _is_held(parameter):
        expected = "a parameter of which this rank has all elements"
        advice = "Shard both layers in the same way, for tied weights with shard_(..., tied=True)"
        raise ValueError(message(class_name(layer), name, expected, described(parameter), advice))


def _is_noted(parameter: Any) -> bool:
    notes = getattr(parameter, "__dict__", {})
    return PARAMETER_SHARD in notes or TENSOR_SLICES in notes


def _is_held(parameter: Any) -> bool:
    """Whether a layer has this parameter as a shard."""
    return next(_holders(parameter), None) is not None


def _holders(parameter: Any) -> Iterator[tuple[Any, str]]:
    """The layers that have a parameter as a shard, with its names there."""
    every = ((layer, name) for layer in list(_LAYERS) for name in shard_names(layer))
    return (each for each in every if each[0]._parameters.get(each[1]) is parameter)


def _exists(group: Any) -> bool:
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    try:
        return resolve(group.group_name) is group
    except (RuntimeError, ValueError, KeyError):
        return False


def described(parameter: Any) -> str:
    """A shard or slice, for errors."""
    shard, slices = shard_of_parameter(parameter), slices_of(parameter)
    ranks = list((shard or slices).ranks)  # type: ignore[union-attr]
    name = f"'{shard.name}', " if shard is not None else ""
    return f"{name}a shard of sizes {list(parameter.shape)} over the ranks {ranks}"
