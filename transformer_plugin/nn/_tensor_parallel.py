"""Tensor parallelism of a layer: this rank's slices of its parameters, and what moves before and after its product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn import Parameter

from transformer_plugin import ops
from transformer_plugin._arguments import class_name
from transformer_plugin.parallel._group_names import name_with_rank
from transformer_plugin.parallel._layer_shards import REPLACED, Replacement, note_layer
from transformer_plugin.parallel._parameter_shard import layout_of
from transformer_plugin.parallel._shard_states import handle_module
from transformer_plugin.parallel._tensor_slices import (
    TENSOR_SLICES,
    Pieces,
    TensorSlices,
    even_slices,
    padded_slices,
)
from transformer_plugin.parallel._wrapping import install_wrapper_checks
from transformer_plugin.tensor._layout import message

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from transformer_plugin.nn._shardable import ShardableModule

#: Set on a full parameter whose slices a layer has.
_OWN_SLICES = "slices_of_this_rank"
Given = TypeVar("Given", Tensor, Tensor | None)
ParallelMode = Literal["column", "row"]


@dataclass(frozen=True)
class TensorParallel:
    """How a rank takes part in the product of a layer."""

    #: "column": the weight's outputs are sharded, "row": its inputs.
    mode: ParallelMode
    #: Global ranks of the group, this process's place among them, and the group's name.
    ranks: tuple[int, ...]
    rank: int
    group_name: str
    #: Whether rows of the tensors outside of the sharded products are sharded, too.
    sequence_parallel: bool = False
    #: The arguments of ops: the size of the group, and its name with this process's rank in it.
    group: tuple[int, str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        name = name_with_rank(self.group_name, self.rank)
        object.__setattr__(self, "group", (len(self.ranks), name))

    def gathers(self, into: dict[str, Any]) -> bool:
        """Whether the op of the product gathers rows itself. If so, its arguments say that."""
        if self.mode == "row" or not self.sequence_parallel:
            return False
        into.update(sequence_parallel_size=self.group[0], sequence_parallel_group=self.group[1])
        return True

    def input(self, input: Tensor) -> Tensor:
        """What the product reads."""
        if self.mode == "row":
            return input
        if self.sequence_parallel:
            return ops.all_gather(input, *self.group)
        return ops.copy_to_group(input, *self.group)

    def before(
        self, input: Tensor, bias: Tensor | None, own_bias: Tensor | None, into: dict[str, Any] | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The input and the bias of the product, the bias that the layer may return, and the one that it adds.

        ``into``: arguments of the op, which then gathers rows of the input; None for an op that cannot.
        """
        if self.mode == "column":
            gathers = into is not None and self.gathers(into)
            return input if gathers else self.input(input), bias, own_bias, None
        return input, None, self.of_rows(own_bias), self.of_rows(bias)

    def once(self, tensor: Given) -> Given:
        """A full tensor on the first rank, and zeros on the others, so that a sum over ranks has it once."""
        copied = self.copied(tensor)
        return None if copied is None else copied * (1.0 if self.rank == 0 else 0.0)

    def output(self, product: Tensor, bias: Tensor | None) -> Tensor:
        """What the layer returns; ``bias`` is that of mode "row", which is added once."""
        if self.mode == "column":
            return product
        summed = ops.reduce_scatter if self.sequence_parallel else ops.all_reduce
        output = summed(product, *self.group)
        return output if bias is None else output + bias

    def copied(self, tensor: Given) -> Given:
        """A full tensor that each rank uses in another way; its gradient is the sum over ranks."""
        return None if tensor is None else ops.copy_to_group(tensor, *self.group)

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the ranks of a value that each has for its rows."""
        return ops.all_reduce(value, *self.group) / len(self.ranks)

    def of_rows(self, parameter: Given) -> Given:
        """A full parameter that is applied to this rank's rows; its gradient is the sum over ranks."""
        return self.copied(parameter) if self.sequence_parallel else parameter

    def __str__(self) -> str:
        text = f", parallel_mode={self.mode!r}, tp_size={len(self.ranks)}"
        return text + (", sequence_parallel=True" if self.sequence_parallel else "")


def tensor_parallel_of(
    layer: str,
    mode: str | None,
    group: ProcessGroup | DeviceMesh | None,
    sequence_parallel: bool,
    modes: Sequence[str] = ("column", "row"),
) -> TensorParallel | None:
    """The arguments of a layer; None without a mode, or if the group has one rank."""
    if mode is None:
        for name, value in (("tp_group", group), ("sequence_parallel", sequence_parallel or None)):
            if value is not None:
                got = f"parallel_mode=None and {name}={value}"
                advice = f"Pass parallel_mode='column' or 'row' and tp_group, or leave out {name}"
                _refuse(layer, name, "parallel_mode beside it", got, advice)
        return None
    if mode not in modes:
        _refuse(layer, "parallel_mode", " or ".join(repr(each) for each in modes), repr(mode))
    if group is None:
        _refuse(layer, "tp_group", "the group of ranks that share the layer", "None")
    name, ranks = group_of(layer, group)
    if len(ranks) == 1:
        return None
    made: Any = mode
    return TensorParallel(made, ranks, ranks.index(dist.get_rank()), name, bool(sequence_parallel))


def check_division(
    layer: str, mode: str | None, sections: Any, pads_outputs: bool = False, out_features: int | None = None
) -> None:
    """Refuses ``sections`` and ``pad_outputs`` where they have no meaning, or another one than with more ranks."""
    is_sequence = isinstance(sections, Sequence) and not isinstance(sections, str | bytes)
    if not is_sequence or not all(type(each) is int for each in sections):
        _refuse(layer, "sections", "a sequence of sizes", repr(sections), "Pass for example [q, k, v]")
    for name, value in (("sections", list(sections)), ("pad_outputs", pads_outputs)):
        if value and mode is None:
            got, advice = (
                f"parallel_mode=None and {name}={value}",
                f"Pass parallel_mode='column', or leave out {name}",
            )
            _refuse(layer, name, "parallel_mode beside it", got, advice)
        if value and mode == "row":
            _refuse(layer, name, "its default with parallel_mode='row'", str(value), "Leave it out")
    if out_features is not None:
        _check_sections(layer, SlicePlan(0, "out_features", tuple(sections), pads_outputs), out_features)


def group_of(layer: str, group: Any) -> tuple[str, tuple[int, ...]]:
    """The name and the global ranks of a process group, or of the only dimension of a mesh."""
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            got = f"a mesh of {group.ndim} dimensions"
            _refuse(layer, "tp_group", "a process group, or a mesh of one dimension", got)
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        _refuse(layer, "tp_group", "a process group of which this process is a member", repr(group))
    return group.group_name, tuple(dist.get_process_group_ranks(group))


def shard_parameters(layer: ShardableModule, parallel: TensorParallel, plan: dict[str, SlicePlan]) -> None:
    """Replaces full parameters by this rank's slices."""
    _check_full(layer, plan)
    made: dict[str, TensorSlices] = {}
    for name, how in plan.items():
        given = layer._parameters.get(name)
        if given is not None:
            made[name] = _slices(class_name(layer), given, parallel, how)
    own = {name: _slices_of(layer, name, slices) for name, slices in made.items()}
    layer.tensor_parallel, layer.tensor_slices = parallel, made
    for name, parameter in own.items():
        layer.register_parameter(name, parameter)
    handle_module(layer)
    install_wrapper_checks()
    watch_shards()
    same_on_ranks(layer)


def _slices_of(layer: ShardableModule, name: str, slices: TensorSlices) -> Parameter:
    """This rank's slices of a parameter; those of another layer with the same one, which stays tied."""
    full: Any = layer._parameters[name]
    own: Any = full.__dict__.get(_OWN_SLICES)
    if own is not None:
        if own.__dict__[TENSOR_SLICES] != slices:
            got = "slices of other rows or columns than another layer has"
            _refuse(class_name(layer), name, "the same slices of a weight that layers share", got)
        return own
    own = Parameter(slices.local_shard_of(full.detach()), full.requires_grad)
    for key, value in full.__dict__.items():
        if key != "main_grad":  # a buffer for the full gradient
            setattr(own, key, value)
    setattr(own, TENSOR_SLICES, slices)
    setattr(full, _OWN_SLICES, own)
    # Of a model that exists an optimizer may have it already; a constructor's is nobody's.
    full_name = f"the full '{class_name(layer)}.{name}'"
    setattr(full, REPLACED, Replacement(full_name, "parallelize_module"))
    return own


def _check_full(layer: ShardableModule, plan: dict[str, SlicePlan]) -> None:
    layout = getattr(layer, "parameter_layout", "packed")
    if layout != "packed":
        _refuse(class_name(layer), "parameters", "'packed' with parallel_mode", repr(layout))
    for name in plan:
        if name not in layer._parameters:  # a parametrization, or a hook, computes it
            _refuse(class_name(layer), name, "a plain, unsharded parameter", "one that is computed")
    for name, parameter in layer._parameters.items():
        if parameter is not None and (type(parameter) is not Parameter or layout_of(parameter) is not None):
            kind = "a shard" if layout_of(parameter) is not None else f"a {type(parameter).__name__}"
            _refuse(class_name(layer), name, "a plain, unsharded parameter", kind)


@dataclass(frozen=True)
class SlicePlan:
    """How a dimension of a parameter is divided among ranks."""

    dim: int
    #: The argument that has its size, for errors.
    argument: str
    #: Sizes of sections of the dimension that are divided one by one.
    sections: tuple[int, ...] = ()
    #: Whether the last ranks may have fewer, and zeros.
    pads: bool = False


def _check_sections(layer: str, plan: SlicePlan, size: int) -> None:
    """Raises if sections do not add up to a dimension."""
    if any(section < 1 for section in plan.sections):
        advice = "Leave out sections without outputs"
        _refuse(layer, "sections", "sizes of at least 1", str(list(plan.sections)), advice)
    if plan.sections and sum(plan.sections) != size:
        got = f"{list(plan.sections)}, {sum(plan.sections)} together"
        _refuse(layer, "sections", f"sizes that add up to {plan.argument}={size}", got, "Pass all of them")
    if plan.sections and plan.pads:
        advice = "Leave out sections or pad_outputs"
        _refuse(layer, "sections", "none with pad_outputs", str(list(plan.sections)), advice)


def _slices(layer: str, full: Tensor, parallel: TensorParallel, plan: SlicePlan) -> TensorSlices:
    size, ranks = full.shape[plan.dim], len(parallel.ranks)
    _check_sections(layer, plan, size)
    for section in plan.sections or (size,):
        if section % ranks and not plan.pads:
            argument = "sections" if plan.sections else plan.argument
            _refuse(layer, argument, f"a multiple of {ranks}, the ranks of tp_group", str(section))
    pieces: tuple[Pieces, ...]
    pieces = padded_slices(size, ranks) if plan.pads else even_slices(size, ranks, plan.sections)
    return TensorSlices(
        dim=plan.dim,
        size=size,
        local_size=-(-size // ranks),
        pieces=pieces,
        rank=parallel.rank,
        ranks=parallel.ranks,
        group_name=parallel.group_name,
    )


def plan_of(
    layer: str, mode: ParallelMode, sections: Sequence[int] = (), pads_outputs: bool = False, dim: int = 0
) -> dict[str, SlicePlan]:
    """How ranks divide a weight, whose outputs are dimension ``dim``, and its bias."""
    check_division(layer, mode, sections, pads_outputs)
    if mode == "row":
        return {"weight": SlicePlan(dim + 1, "in_features")}
    outputs = SlicePlan(dim, "out_features", tuple(sections), pads_outputs)
    return {"weight": outputs, "bias": outputs}


@contextmanager
def initialize_full_params(
    layer: ShardableModule, made_by_id: dict[int, Parameter] | None = None
) -> Iterator[None]:
    """Context in which a layer has full parameters, of which it keeps this rank's slices and rows.

    For initial values: they depend on the full sizes, and are values of one model if all ranks have the same random
    state. ``made_by_id``: full parameters of other layers, by the shard, which this layer may share.
    """
    made_by_id = {} if made_by_id is None else made_by_id
    note_layer(layer)
    found = {name: layout_of(p) for name, p in layer._parameters.items() if p is not None}
    layouts = {name: layout for name, layout in found.items() if layout is not None}
    shards: dict[str, Any] = {name: layer._parameters[name] for name in layouts}
    for name, shard in shards.items():
        if id(shard) not in made_by_id:
            full = shard.detach().new_empty(layouts[name].shape)
            made_by_id[id(shard)] = Parameter(full, shard.requires_grad)
        layer._parameters[name] = made_by_id[id(shard)]
    outer, layer.has_full_parameters = layer.has_full_parameters, True
    try:
        yield
        with torch.no_grad():
            for name, shard in shards.items():
                made: Any = layer._parameters[name]
                shard.copy_(layouts[name].local_shard_of(made))
    finally:
        layer._parameters.update(shards)
        layer.has_full_parameters = outer
    if shards:
        same_on_ranks(layer)


def same_on_ranks(module: Any) -> None:
    """Gives the replicated parameters of a layer the first rank's values: other ranks may have another random state."""
    parallel: TensorParallel | None = module.tensor_parallel
    if parallel is None:
        return
    slices = getattr(module, "tensor_slices", {})
    for name, parameter in module._parameters.items():
        if parameter is None or name in slices or parameter.is_meta:
            continue
        with torch.no_grad():
            values = _on_device_of_group(parameter.detach().reshape(1, -1), parallel.group_name)
            parameter.copy_(ops.all_gather(values, *parallel.group)[0].view(parameter.shape))


def _on_device_of_group(tensor: Tensor, name: str) -> Tensor:
    """Values of a model on the CPU are exchanged on the GPU if the group is of GPUs alone."""
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    devices = resolve(name)._device_types
    return tensor if tensor.device in devices or tensor.device.type != "cpu" else tensor.to(devices[0])


def check_group(parallel: TensorParallel | None) -> None:
    """Raises if a layer that was loaded has a group name that is now that of other ranks, or of another place."""
    if parallel is None or not dist.is_initialized():
        return
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    try:
        group = resolve(parallel.group_name)
        ranks, rank = tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)
    except (RuntimeError, ValueError, KeyError):
        return  # the first forward says so
    if (ranks, rank) != (parallel.ranks, parallel.rank):
        got = f"a group '{parallel.group_name}' of the ranks {list(ranks)}, and its rank {rank}"
        expected = f"the group of the ranks {list(parallel.ranks)}, as when the layer was saved"
        expected += "" if ranks != parallel.ranks else f" on its rank {parallel.rank}"
        advice = "Make the groups in the same order as then, or load a state_dict into a new layer"
        raise ValueError(message("tensor_parallel", "tp_group", expected, got, advice))


def watch_shards() -> None:
    """State dicts of optimizers and torch's clipping take note of shards."""
    from transformer_plugin.parallel._watching import watch_shards

    watch_shards()


def without_buffers(layer: str, parallel: TensorParallel | None, out: Any, dgrad_out: Any) -> None:
    """Raises if a tensor-parallel layer gets a buffer: what it returns comes from a collective."""
    for name, buffer in (("out", out), ("dgrad_out", dgrad_out)):
        if parallel is not None and buffer is not None:
            _refuse(layer, name, "None with parallel_mode", "a buffer")


def sequence_parallel_group(layer: str, group: Any, sequence_parallel: bool) -> TensorParallel | None:
    """Of a layer whose parameters are replicated, such as a norm: the ranks that apply them to other rows."""
    if not sequence_parallel:
        if group is not None:
            advice = "Pass sequence_parallel=True, too, or leave out tp_group where ranks have the same rows"
            _refuse(layer, "tp_group", "None without sequence_parallel", repr(group), advice)
        return None
    return tensor_parallel_of(layer, "column", group, True)


def with_mode(parallel: TensorParallel, mode: ParallelMode) -> TensorParallel:
    """The same ranks in a mode."""
    return replace(parallel, mode=mode)


def _refuse(layer: str, argument: str, expected: str, got: str, advice: str = "") -> NoReturn:
    usual = {
        "tp_group": "Pass the tensor-parallel group, for example mesh['tp']",
        "parallel_mode": "Use one of these, or None",
        "parameters": "Leave it out, or leave out parallel_mode",
        "out": "Leave it out",
        "pad_outputs": "Leave it out",
        "dgrad_out": "Leave it out",
        "weight": "Divide a layer among ranks once, before other wrappers",
        "bias": "Divide a layer among ranks once, before other wrappers",
    }.get(argument, "Choose sizes that divide by the ranks, or fewer ranks")
    raise ValueError(message(layer, argument, expected, got, advice or usual))
