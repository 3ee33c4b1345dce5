"""Weights that are sharded over ranks: each rank keeps a shard, and layers gather the full weight for a product."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.nn import Parameter

from transformer_plugin import ops
from transformer_plugin._arguments import typed
from transformer_plugin.formats import Format
from transformer_plugin.parallel._adapters import check_adapters
from transformer_plugin.parallel._collectives import all_gather_value
from transformer_plugin.parallel._expert_slices import mark_experts
from transformer_plugin.parallel._group_names import name_with_rank
from transformer_plugin.parallel._layer_shards import REPLACED, Replacement
from transformer_plugin.parallel._other_layers import not_sharded, warn_of
from transformer_plugin.parallel._parameter_shard import PARAMETER_SHARD, ParameterShard, shard_of_parameter
from transformer_plugin.parallel._shard_formats import align_of, formats_of, sends_values
from transformer_plugin.parallel._shard_states import handle_module
from transformer_plugin.parallel._tensor_slices import TENSOR_PARALLELISM, TensorSlices, slices_of
from transformer_plugin.parallel._watching import watch_shards
from transformer_plugin.parallel._weight_shard import WeightShard
from transformer_plugin.parallel._wrapping import install_wrapper_checks
from transformer_plugin.recipes import DelayedScaling
from transformer_plugin.tensor._checks import format_of
from transformer_plugin.tensor._layout import message

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_OP = "shard_"
#: Numbers of calls, in this process; all ranks make the same calls.
_PARAM_GROUPS = itertools.count(1)


class _Target(NamedTuple):
    name: str
    module: Any
    #: The parameter's name in the module: "weight", or of a list "weight0" and so on.
    key: str
    weight: Parameter

    @property
    def is_of_list(self) -> bool:
        return self.key != "weight"

    @property
    def full_name(self) -> str:
        return f"{self.name}.{self.key}" if self.name else self.key


class _Options(NamedTuple):
    format: str | None
    mean: bool
    reduce_in_bfloat16: bool
    timeout_ms: int | None
    param_group: int = 0  # of the weights that this call shards


@typed
def shard_(
    module: torch.nn.Module,
    group: ProcessGroup | DeviceMesh | None,
    *,
    format: str | Format | None = None,
    gradient: Literal["mean", "sum"] = "mean",
    gradient_dtype: torch.dtype | None = None,
    prefetch: int = 1,
    timeout_ms: int | None = None,
    filter: Callable[[str, torch.nn.Module], bool] | None = None,
    tied: bool = False,
) -> torch.nn.Module:
    """Shards the weights of a module's layers over the ranks of a group, in place; see :doc:`/sharded-weights`.

    A weight ``[N, K]`` becomes a parameter ``[S, K]``, this rank's rows, and ``[G, N, K]`` becomes ``[S, N, K]``, this
    rank's experts, with zeros after the last. Of experts in a list each ``[N, K]`` becomes ``[S, K]``. Biases and norms
    stay unsharded, and so do layers of other libraries and converted experts, which one ``UserWarning`` names. Make the
    optimizer afterwards. Call it once for a model: weights of different calls are not gathered ahead of use together.

    Args:
        module: with :class:`~transformer_plugin.nn.Linear`, :class:`~transformer_plugin.nn.LayerNormLinear`,
            :class:`~transformer_plugin.nn.GroupedLinear` and :class:`~transformer_plugin.nn.Embedding`, at any depth.
            All ranks have the same model.
        group: the ranks, which compute on different inputs: a process group, or a mesh of one dimension. None changes
            nothing. Neither does a group of one, except that state dicts are of all experts where ranks have some.
        format: what travels. None: quantized weights where recipes quantize them, otherwise the values. ``"none"``: the
            values, which are quantized after each gather, as those of lists always are. Or the format of the recipes.
        gradient: whether the gradient of a shard is the mean over the ranks or their sum.
        gradient_dtype: ``torch.bfloat16``: gradients travel in it also where ``main_grad`` is float32.
        prefetch: how many weights are gathered ahead of their use.
        timeout_ms: for each wait on other ranks; None: the timeout of the group.
        filter: which layers, by name and module; None: all. Where it returns False, the warning names no module.
        tied: whether layers may share a weight, such as an embedding and the output layer. They then share a shard, of
            which the gradient is the sum of theirs. False: a shared weight is an error.

    Returns:
        The module.

    Raises:
        ValueError: no layer to shard; what cannot be sharded, or differs between ranks; nothing is changed then.
        PeerTimeoutError: a rank does not call this.
    """
    group, options = _process_group(group), _options(format, gradient, gradient_dtype, prefetch, timeout_ms)
    if group is None:
        return module
    left = _left_unsharded(module, filter)
    if group.size() == 1:
        return _mark_experts(module, filter)
    options = options._replace(param_group=next(_PARAM_GROUPS))
    targets = list(_targets(module, filter))
    names = _shared(module, targets, tied)
    _check_targets(module, targets, group, options)
    _compare_ranks(targets, names, group, options, prefetch)
    _place(targets, _shards_of(targets, group, options), options)
    ops.configure_gathers(group.group_name, prefetch)
    watch_shards()
    install_wrapper_checks()
    warn_of(left, _OP, "module", "Their weights stay unsharded on every rank")
    return module


def _left_unsharded(module: torch.nn.Module, filter: Callable[[str, torch.nn.Module], bool] | None) -> str:
    """The layers that cannot be sharded, for a warning. Raises if there are no others."""
    left = not_sharded(module, filter)
    if next(_layers(module, filter), None) is None:
        advice = "Pass a model with such layers, or another 'filter'"
        _refuse("module", "layers of transformer_plugin.nn with weights", left or "none", advice)
    return left


def _mark_experts(
    module: torch.nn.Module, filter: Callable[[str, torch.nn.Module], bool] | None
) -> torch.nn.Module:
    """Of weights that are not sharded: says which of all experts this rank has."""
    marked = [mark_experts(layer) for _, layer in _layers(module, filter)]
    if any(marked):
        watch_shards()
        install_wrapper_checks()
    return module


def _process_group(group: Any) -> ProcessGroup | None:
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if not hasattr(group, "get_group") or group.ndim != 1:
        got = f"a mesh of {group.ndim} dimensions" if hasattr(group, "get_group") else repr(group)
        expected = "a process group of which this process is a member, or a mesh of one dimension"
        _refuse("group", expected, got, "Pass for example mesh['data']")
    found: ProcessGroup = group.get_group()
    return found


def _options(
    format: str | Format | None,
    gradient: str,
    gradient_dtype: torch.dtype | None,
    prefetch: int,
    timeout_ms: int | None,
) -> _Options:
    if gradient not in ("mean", "sum"):
        _refuse("gradient", "'mean' or 'sum'", repr(gradient), "Use one of the two")
    if gradient_dtype not in (None, torch.bfloat16):
        _refuse("gradient_dtype", "None or torch.bfloat16", str(gradient_dtype), "Use one of the two")
    if prefetch < 0:
        _refuse("prefetch", "at least 0", str(prefetch), "Pass how many weights are gathered ahead")
    if timeout_ms is not None and timeout_ms < 1:
        _refuse("timeout_ms", "at least 1", str(timeout_ms), "None is the group's timeout")
    key = None if format is None else format_of(_OP, format).key
    return _Options(key, gradient == "mean", gradient_dtype is not None, timeout_ms)


def _layers(
    module: torch.nn.Module, filter: Callable[[str, torch.nn.Module], bool] | None
) -> Iterator[tuple[str, Any]]:
    # Not at the top: modules of nn import this package.
    from transformer_plugin.nn._recipe import RecipeModule
    from transformer_plugin.nn.embedding import Embedding

    for name, layer in module.named_modules():
        if isinstance(layer, RecipeModule | Embedding) and (filter is None or filter(name, layer)):
            yield name, layer


def _targets(
    module: torch.nn.Module, filter: Callable[[str, torch.nn.Module], bool] | None
) -> Iterator[_Target]:
    for name, layer in _layers(module, filter):
        if getattr(layer, "parameter_layout", None) == "grouped":
            got = f"parameters={layer.parameter_layout!r} in '{name}'"
            expected = "layers with parameters='packed' or 'list'"
            _refuse("module", expected, got, "Make the layer with packed parameters")
        for key in getattr(layer, "_weight_names", ("weight",)):
            weight = layer._parameters.get(key)
            if weight is None:
                advice = "Remove the parametrization, or leave the layer out with 'filter'"
                _refuse("module", "weights that are parameters", f"'{name}.{key}', which is computed", advice)
            yield _Target(name, layer, key, weight)


def _shared(module: torch.nn.Module, targets: list[_Target], tied: bool) -> dict[int, list[str]]:
    """The names of each weight. Raises if layers share one without saying so, or with another parameter."""
    owners: dict[int, list[str]] = {}
    for name, layer in module.named_modules():
        for key, parameter in layer._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(f"{name}.{key}" if name else key)
    sharded = {target.full_name for target in targets}
    for target in targets:
        names = owners[id(target.weight)]
        if len(names) == 1:
            continue
        if not tied:
            advice = "Pass tied=True, give each layer its own weight, or leave all of them out with 'filter'"
            _refuse("module", "a weight for each layer", f"one that {names} share", advice)
        unsharded = [name for name in names if name not in sharded]
        if unsharded or target.is_of_list:
            got = f"{unsharded or names} of {names}, which share one"
            advice = "Use Linear, LayerNormLinear and Embedding for all of them, and 'filter' for all or none"
            _refuse("module", "tied weights that are all packed and sharded", got, advice)
    return owners


def _check_targets(
    module: torch.nn.Module, targets: list[_Target], group: ProcessGroup, options: _Options
) -> None:
    for target in targets:
        _check(target, tuple(dist.get_process_group_ranks(group)), options)
    check_adapters(module, targets)


def _check(target: _Target, ranks: tuple[int, ...], options: _Options) -> None:
    name, layer, weight = target.full_name, target.module, target.weight
    shard = shard_of_parameter(weight)
    if shard is not None:
        got = f"'{name}', which is sharded over the ranks {list(shard.ranks)} already"
        _refuse("module", "unsharded weights", got, "Call shard_ once, or choose layers with 'filter'")
    if hasattr(weight, "to_local") or type(weight) is not Parameter:
        got = f"'{name}', a {type(weight).__name__}, which another wrapper has sharded or quantized"
        advice = (
            "Call shard_ before fully_shard, with other ranks; experts of a MoE need dtensor=False, and quantized_init "
            "makes parameters that cannot be sharded"
        )
        _refuse("module", "plain parameters", got, advice)
    experts = getattr(layer, "_expert_ranks", None)
    shared = sorted(set(ranks) & set(experts.ranks)) if experts is not None else []
    if len(shared) > 1:
        got = f"the ranks {shared}, which hold different experts of '{name}'"
        _refuse("group", "ranks with the same weights", got, "Pass the group of ranks with the same experts")
    slices = slices_of(weight)
    _check_plain_experts(target, slices)
    peers = sorted(set(ranks) & set(slices.ranks)) if slices is not None else []
    if len(peers) > 1:
        got = f"the ranks {peers}, which have different slices of '{name}' under tensor parallelism"
        _refuse("group", "ranks with the same slices", got, "Pass a group across the tensor-parallel groups")
    if not hasattr(layer, "recipe"):
        return  # an embedding
    if isinstance(layer.recipe, DelayedScaling) and target.is_of_list:
        advice = "Use another recipe, for example Float8CurrentScaling()"
        _refuse("module", "packed experts with delayed scaling", f"a list in '{target.name}'", advice)
    if layer.delay_wgrad_compute:
        advice = "Leave out delay_wgrad_compute: ranks add gradients in the backward"
        _refuse(
            "module", "weight gradients in the backward", f"delay_wgrad_compute in '{target.name}'", advice
        )
    _check_format(target, options)


def _check_plain_experts(target: _Target, slices: TensorSlices | None) -> None:
    """Raises where state dicts could not say which experts this rank has."""
    if getattr(target.module, "_expert_ranks", None) is None:
        return
    if target.is_of_list:
        got = f"a list in '{target.name}', of which each rank has other experts under the same names"
        _refuse("module", "packed experts where ranks have some of them", got, "Use parameters='packed'")
    if slices is not None and slices.kind == TENSOR_PARALLELISM:
        got = f"'{target.full_name}', of which ranks have slices, too"
        _refuse("module", "whole experts where ranks have some of them", got, "Leave out parallel_mode")


def _check_format(target: _Target, options: _Options) -> None:
    key, given = target.module._formats[1], options.format
    if given in (None, "none") and not (key != "none" and "tiled" in key):
        return
    if sends_values(target.module, target.is_of_list) and given not in (None, "none"):
        got, advice = f"'{given}' for '{target.full_name}'", "Leave it out: ranks exchange values there"
        _refuse("format", "None or 'none' for parameters in lists and with delayed scaling", got, advice)
    wanted, own = Format.parse(given or "none"), Format.parse(key)
    if "tiled" in key or "row_scaled" in key:
        advice = "Use a recipe whose weights have plain scales"
        _refuse("module", "weights whose scales follow the rows", f"'{key}' in '{target.name}'", advice)
    if wanted.family != own.family and not (wanted.family == "bf16" and own.family == "none"):
        got = f"'{given}' for '{target.name}', whose recipe quantizes weights to '{key}'"
        _refuse("format", "None, 'none', or the format of the recipe", got, "Leave it out")


def _compare_ranks(
    targets: list[_Target],
    names: dict[int, list[str]],
    group: ProcessGroup,
    options: _Options,
    prefetch: int,
) -> None:
    """Raises on all ranks if they do not shard the same weights in the same way."""
    lines = [
        f"{' = '.join(names[id(t.weight)])} {list(t.weight.shape)} {t.weight.dtype} {formats_of(t.module)}"
        for t in targets
    ]
    mine = "\n".join([f"{options._replace(param_group=0)} prefetch={prefetch}", *lines])
    every = all_gather_value(_OP, "weights", mine, group)
    for rank, other in enumerate(every):
        if other == every[0]:
            continue
        pairs = itertools.zip_longest(every[0].split("\n"), other.split("\n"), fillvalue="nothing")
        first, here = next((a, b) for a, b in pairs if a != b)
        got = f"'{first}' on rank 0 and '{here}' on rank {rank}"
        expected = "the same weights, formats and options on all ranks"
        _refuse("module", expected, got, "Make the same model everywhere")


def _shards_of(targets: list[_Target], group: ProcessGroup, options: _Options) -> dict[int, Parameter]:
    """This rank's shard of each weight, by the id of the weight, which layers may share."""
    ranks = tuple(dist.get_process_group_ranks(group))
    layers = tuple(weakref.ref(module) for module in dict.fromkeys(target.module for target in targets))
    aligns: dict[int, int] = {}
    for target in targets:
        rows = align_of(target.module, target.weight, target.is_of_list, _quantizes(target, options))
        aligns[id(target.weight)] = math.lcm(rows, aligns.get(id(target.weight), 1))
    shards: dict[int, Parameter] = {}
    for target in targets:
        full = target.weight
        if id(full) in shards:
            continue
        mark_experts(target.module)
        how = _weight_shard(target, group, options, aligns[id(full)])
        known = ParameterShard(target.full_name, how, group.rank(), ranks, group, layers)
        shard = Parameter(known.local_shard_of(full), full.requires_grad)
        for name, value in full.__dict__.items():
            setattr(shard, name, value)
        setattr(shard, PARAMETER_SHARD, known)
        setattr(full, REPLACED, Replacement(f"the full '{target.full_name}'", _OP))
        shards[id(full)] = shard
    return shards


def _weight_shard(target: _Target, group: ProcessGroup, options: _Options, align: int) -> WeightShard:
    return WeightShard(
        rows=target.weight.shape[0],
        ranks=group.size(),
        group_name=name_with_rank(group.group_name, group.rank()),
        mean=options.mean,
        reduce_in_bfloat16=options.reduce_in_bfloat16,
        asynchronous=True,
        timeout_ms=options.timeout_ms,
        param_group=options.param_group,
        is_list=target.is_of_list,
        align=align,
    )


def _quantizes(target: _Target, options: _Options) -> bool:
    """Whether ranks quantize their shards of the weight."""
    has_format = Format.parse(formats_of(target.module)[1]).is_quantized and options.format != "none"
    return has_format and not sends_values(target.module, target.is_of_list)


def _place(targets: list[_Target], shards: dict[int, Parameter], options: _Options) -> None:
    """Gives layers their shards, and the quantized copies of those that have one."""
    for target in targets:
        _place_one(target, shards[id(target.weight)], options)
    for target in targets:
        source = target.module._weight_source
        if source.exchanges_quantized and not target.module.weight.is_meta:
            source.quantized_shard(target.module)  # compiled code cannot make it


def _place_one(target: _Target, shard: Parameter, options: _Options) -> None:
    """Gives a layer its shard, and the source that gathers the weight."""
    from transformer_plugin.nn._weight_source import ShardedWeight  # nn imports this package

    layer, known = target.module, shard.__dict__[PARAMETER_SHARD]
    name = target.full_name.removesuffix(target.key) + ("weight*" if target.is_of_list else target.key)
    how = replace(known.shard, name=name.replace(",", "_"))
    shards = {**layer.parameter_shards, target.key: known}
    gathers_quantized = hasattr(layer, "recipe") and _quantizes(target, options)
    layer._take_weight_from(ShardedWeight(how, shards, gathers_quantized))
    layer.register_parameter(target.key, shard)
    handle_module(layer)


def _refuse(argument: str, expected: str, got: str, advice: str) -> NoReturn:
    raise ValueError(message(_OP, argument, expected, got, advice))
