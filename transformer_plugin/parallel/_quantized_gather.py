"""Weights that FSDP2 gathers in the format of their recipe: shards in high precision, full weights quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import _unsafe_preserve_version_counter  # type: ignore[attr-defined]
from torch.nn import Parameter

from transformer_plugin._arguments import class_name, typed
from transformer_plugin.parallel import _gather_layout as layout
from transformer_plugin.parallel._gather_layout import BufferLayout, Shards, refuse
from transformer_plugin.parallel._other_layers import not_quantized, warn_of
from transformer_plugin.parallel._parameter_shard import layout_of
from transformer_plugin.parallel._shard_experts import Ranks
from transformer_plugin.recipes import DelayedScaling
from transformer_plugin.tensor import GroupedTensor, QuantizedTensor, _layout
from transformer_plugin.tensor._base import Buffers, FormatTensor

#: Ops of which the result is a weight of this kind, too: what FSDP2, DTensor and torch.nn.Module do to make shards,
#: copy and move them. The result of any other op is a plain tensor.
_KEEPING = frozenset(
    f"aten::{name}"
    for name in (
        *(
            "detach",
            "alias",
            "lift_fresh",
            "view",
            "_unsafe_view",
            "as_strided",
            "slice",
            "split",
            "split_with_sizes",
        ),
        *("clone", "_to_copy", "_pin_memory", "empty_like", "new_empty", "new_zeros"),
    )
)


class QuantizedGatherTensor(Tensor):
    """A weight, or a rank's rows of it, in high precision, which FSDP2 quantizes before its all-gather.

    It has the methods that FSDP2 looks for, ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``. Ops act on the plain
    tensor that it holds.
    """

    high_precision: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, high_precision: Tensor, requires_grad: bool = False) -> QuantizedGatherTensor:
        plain = high_precision.detach()
        value: QuantizedGatherTensor = Tensor._make_wrapper_subclass(
            cls,
            plain.shape,
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            device=plain.device,
            requires_grad=requires_grad,
        )
        value.high_precision = plain
        return value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{class_name(self)}({self.high_precision!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high_precision"], None

    @classmethod
    def __tensor_unflatten__(
        cls, tensors: dict[str, Tensor], meta: Any, outer_size: Any, outer_stride: Any
    ) -> Any:
        return cls(tensors["high_precision"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = {name: _unwrapped(value) for name, value in (kwargs or {}).items()}
        result = func(*(_unwrapped(argument) for argument in args), **named)
        if func._schema.name in _KEEPING:
            return _wrapped(result)
        in_place = func._schema.is_mutable and isinstance(result, Tensor) and isinstance(args[0], cls)
        return args[0] if in_place else result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Quantizes this rank's rows, and reduces what all ranks' rows have in common.

        Returns:
            What FSDP2 gathers, and what it hands to :meth:`fsdp_post_all_gather`: the layout, and tensors that are
            the same on all ranks.
        """
        formats = tuple(module._formats)
        if not _layout.parsed(formats[1]).is_quantized or isinstance(module.recipe, DelayedScaling):
            advice = "Set the recipe before quantize_all_gather, or shard a layer that was not changed by it"
            refuse("model", "a recipe that quantizes weights from their values", str(module.recipe), advice)
        rows, key = self.high_precision, _layout.parsed(formats[1]).key
        first = module.__dict__.setdefault("_gathered_format", key)  # FSDP2 keeps buffers of these sizes
        if key != first:
            advice = "Set the recipe before the first forward"
            refuse("model", f"'{first}', the weight format of the first all-gather", f"'{key}'", advice)
        shards = Shards(key, tuple(outer_size), mesh.size(), layout.columns_of(formats, rows.device))
        layout.check(shards, type(module).__name__)
        _check_rows(shards, rows)
        if mp_policy.param_dtype is not None:  # what FSDP2 would gather, so that the result has the same bits
            rows = rows.to(mp_policy.param_dtype)
        if rows.shape[0] < shards.rows:
            padding = rows.new_zeros(shards.rows - rows.shape[0], *rows.shape[1:])
            rows = torch.cat([rows, padding])
        buffers = layout.quantize_shard(shards, rows, mesh.get_group())
        sent: dict[str, Tensor] = {}
        kept: dict[str, Tensor] = {}
        for one in layout.buffer_layouts(shards):
            (kept if one.axis is None else sent)[one.name] = layout.plain(buffers[one.name]).contiguous()
        if mesh.size() == 1:  # FSDP2 then hands over only the first tensor
            kept.update({name: sent.pop(name) for name in list(sent)[1:]})
        inputs = [t.view(torch.uint8) for t in sent.values()]
        return (inputs[0], *(t.view(-1) for t in inputs[1:])), (shards, tuple(sent), kept)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """Makes the full weight of what was gathered, or writes into the buffers of ``out``, made by an earlier call.

        Returns:
            A quantized value, and those of its buffers that are not views of what was gathered; None with ``out``.
        """
        shards, names, kept = metadata
        gathered = dict(zip(names, (t.view(-1) for t in all_gather_outputs), strict=True))
        for name, tensor in kept.items():
            if tensor.is_cuda:  # made on the stream of the all-gather, and freed after this call
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            gathered[name] = tensor.view(torch.uint8).view(-1)
        layouts = layout.buffer_layouts(shards)
        copied = [one for one in layouts if not (one.is_joined and one.name in names)]
        if out is not None:
            value = getattr(out, "_local_tensor", out)  # of experts over ranks
            _fill(shards, copied, gathered, value._buffers._asdict())
            return None
        device = all_gather_outputs[0].device  # with CPU offload not that of the shard
        buffers = {one.name: one.joined(gathered[one.name]) for one in layouts if one not in copied}
        buffers.update(
            {one.name: torch.empty(one.unsharded, dtype=one.dtype, device=device) for one in copied}
        )
        own = [buffers[one.name] for one in copied]
        if shards.columns == "transposed":
            columns = layout.transposed_buffers(shards, device)
            buffers.update(columns)
            own += columns.values()
        _fill(shards, copied, gathered, buffers)
        kind = GroupedTensor if shards.is_stack else QuantizedTensor
        value = kind._make(Buffers(**buffers), shards.key, torch.Size(shards.size), param_dtype)
        return value, tuple(own)


def _unwrapped(argument: Any) -> Any:
    if isinstance(argument, QuantizedGatherTensor):
        return argument.high_precision
    if isinstance(argument, list | tuple):
        return type(argument)(_unwrapped(a) for a in argument)
    return argument


def _wrapped(result: Any) -> Any:
    if isinstance(result, Tensor):
        return QuantizedGatherTensor(result) if result.is_floating_point() else result
    return type(result)(_wrapped(each) for each in result)


def _check_rows(shards: Shards, rows: Tensor) -> None:
    """Refuses shards along another dimension than the first."""
    if rows.shape[1:] == torch.Size(shards.size[1:]):
        return
    refuse("model", "shards along dimension 0", f"{list(rows.shape)} of {list(shards.size)}", "Use Shard(0)")


def _fill(
    shards: Shards, copied: list[BufferLayout], gathered: dict[str, Tensor], buffers: dict[str, Tensor]
) -> None:
    """Writes those buffers that are not views of what was gathered.

    Autograd has saved them in the forward; they get the same bytes again for the backward, which is no change.
    """
    written = [buffers[one.name] for one in copied]
    columns = ("columnwise_data", "columnwise_scale_inv")
    if shards.columns == "transposed":
        written += [buffers[name] for name in columns]
    with (
        torch.no_grad(),
        _unsafe_preserve_version_counter(tuple(t for t in written if not t.is_inference())),
    ):
        for one in copied:
            one.assemble(gathered[one.name], buffers[one.name])
        if shards.columns == "transposed":
            rows = (buffers["rowwise_data"], buffers["scale_inv"])
            layout.transpose(shards, *rows, *(buffers[name] for name in columns))


@typed
def quantize_all_gather(
    model: torch.nn.Module, filter: Callable[[torch.nn.Module, str], bool] | None = None
) -> torch.nn.Module:
    """Makes FSDP2 gather the weights of a model in the formats of their recipes, in place of their dtype.

    Call it before ``fully_shard``, of torch or of this package. The weights of ``Linear``, ``LayerNormLinear``,
    ``GroupedLinear`` and ``GroupedMLP`` that have a recipe stay in their dtype: shards, gradients, optimizer and
    ``state_dict`` are as without it. Each all-gather quantizes the shard first and sends bytes and scales. The full
    weight is then a :class:`~transformer_plugin.tensor.QuantizedTensor`, or a
    :class:`~transformer_plugin.tensor.GroupedTensor`, which the layer multiplies as it is. Outputs and gradients have
    the bits that they have without it.

    With a ``MixedPrecisionPolicy`` the shard is cast to ``param_dtype`` first, as FSDP2 casts what it gathers.

    - Of matrices ``[N, K]`` FSDP2 shards N: with R ranks it is a multiple of R, of R * 128 for ``Float8BlockScaling``,
      R * 32 for ``MXFP8BlockScaling`` and R * 16 for ``NVFP4BlockScaling``, so that shards are whole blocks. Any N for
      ``Float8CurrentScaling``, whose amax is reduced over the ranks in each all-gather, as those of NVFP4 and of the
      columns of ``Float8RowwiseScaling``.
    - Of experts ``[G, N, K]`` FSDP2 shards G, a multiple of R. Of experts over ranks, G are those of one rank.

    A wrong number is a ValueError in the first forward, on all ranks.

    Experts of other libraries, and those that :func:`transformer_plugin.convert` has converted, are gathered in their
    dtype, and one ``UserWarning`` names them. So are layers without a recipe, without a warning.

    Args:
        model: with parameters in high precision, on any device, also ``"meta"``.
        filter: called with each such layer and its name; its weight is changed where it returns True. None: all. It
            is also called with the modules that a warning would name, and silences it where it returns False.

    Returns:
        The model.

    Raises:
        TypeError: no module. ValueError: no layer with a recipe that quantizes its weight; ``DelayedScaling``,
        ``nonfinite="nan"``, ``parameters="list"``; weights that are sharded, quantized or shared between modules.
        Nothing is changed then.
    """
    if not isinstance(model, torch.nn.Module):
        refuse("model", "a torch.nn.Module", type(model).__name__, "Pass the model", TypeError)
    chosen = [found for found in _layers(model) if filter is None or filter(found[1], found[0])]
    left = not_quantized(model, filter)
    if not chosen:
        advice = "Give layers a recipe first, for example Float8BlockScaling()"
        refuse("model", "a layer with a recipe that quantizes its weight", left or "none", advice)
    uses = _uses(model)
    for name, module in chosen:
        _check_layer(name, module, uses)
    for _, module in chosen:
        if not _is_replaced(module):
            _restore(module)
            module.register_state_dict_post_hook(_save_plain)
            module.register_load_state_dict_post_hook(_restore)
    warn_of(left, layout.OP, "model", "FSDP2 gathers them in their dtype")
    return model


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that quantize their weights, by name."""
    from transformer_plugin.nn._recipe import RecipeModule

    for name, module in model.named_modules():
        if isinstance(module, RecipeModule) and _layout.parsed(module._formats[1]).is_quantized:
            yield name, module


def _uses(model: torch.nn.Module) -> dict[int, int]:
    """How many names each parameter has."""
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return uses


def _check_layer(name: str, module: Any, uses: dict[int, int]) -> None:
    """Raises if the weight of a layer cannot be gathered in its format."""
    what, format = f"'{name}', {type(module).__name__}", _layout.parsed(module._formats[1])
    weight = module._parameters.get("weight")
    if isinstance(module.recipe, DelayedScaling):
        expected = "a recipe that quantizes weights from their values"
        refuse("model", expected, f"{module.recipe} of {what}", "Use Float8CurrentScaling(), or 'filter'")
    if format.nonfinite_is_nan or format.stochastic_rounding or format.row_scaled or format.tiled_scales:
        expected = "a weight format without nan, sr, row_scaled and tiled"
        refuse(
            "model", expected, f"'{format.key}' of {what}", "Use a recipe without these options, or 'filter'"
        )
    if weight is None:
        expected = "one parameter 'weight'"
        refuse(
            "model",
            expected,
            f"none in {what}",
            "Use parameters='packed', without parametrizations, or 'filter'",
        )
    ranks = module._expert_ranks
    if hasattr(weight, "to_local") and not (isinstance(ranks, Ranks) and ranks.mesh == weight.device_mesh):
        refuse(
            "model",
            "weights that FSDP2 has not sharded",
            f"a DTensor in {what}",
            "Call it before fully_shard",
        )
    if layout_of(weight) is not None:
        advice = "Leave it out with 'filter': FSDP2 does not gather it, and shard_ sends quantized weights by itself"
        refuse("model", "weights of which this rank has all elements", f"a shard or slices in {what}", advice)
    if isinstance(weight, FormatTensor) and weight.format.is_quantized:
        refuse(
            "model",
            "weights in high precision",
            f"{weight._described()} in {what}",
            "Leave out quantized_init",
        )
    if uses.get(id(weight), 1) > 1:
        advice = "Leave the layer out with 'filter'"
        refuse("model", "weights of one module each", f"one with {uses[id(weight)]} names, {what}", advice)


def _replace(module: Any, weight: Any) -> None:
    """The weight of a layer as a parameter of the class, over the same memory."""
    values = weight.packed() if isinstance(weight, GroupedTensor) else weight
    parameter = Parameter(QuantizedGatherTensor(values), weight.requires_grad)
    names = {
        name: value
        for name, value in weight.__dict__.items()
        if name not in ("_buffers", "_key", "_is_param")
    }
    parameter.__dict__.update(names)
    module._parameters["weight"] = parameter


def _save_plain(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """After ``state_dict()``: checkpoints have plain tensors, over the same memory."""
    saved = state.get(f"{prefix}weight")
    if saved is None or saved is module._parameters.get(
        "weight"
    ):  # with keep_vars=True the parameters themselves
        return
    if isinstance(saved, QuantizedGatherTensor):
        state[f"{prefix}weight"] = saved.high_precision
    elif isinstance(getattr(saved, "_local_tensor", None), QuantizedGatherTensor):
        from torch.distributed.tensor import DTensor

        plain = saved._local_tensor.high_precision
        state[f"{prefix}weight"] = DTensor(plain, saved._spec, requires_grad=False)


def _is_replaced(module: torch.nn.Module) -> bool:
    """Whether the weight, or this rank's shard of it, has the class, or is unsharded and quantized just now."""
    weight: Any = module._parameters["weight"]
    local = getattr(weight, "_local_tensor", weight)
    return isinstance(local, QuantizedGatherTensor) or (
        isinstance(local, FormatTensor) and local.format.is_quantized
    )


def _restore(module: torch.nn.Module, *_: Any) -> None:
    """Gives the weight the class: at first, and after ``load_state_dict(assign=True)``, which replaces parameters."""
    weight: Any = module._parameters["weight"]
    if _is_replaced(module):
        return
    if hasattr(weight, "_local_tensor"):
        weight._local_tensor = QuantizedGatherTensor(weight._local_tensor)
    else:
        _replace(module, weight)
