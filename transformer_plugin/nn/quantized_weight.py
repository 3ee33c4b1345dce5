"""QuantizedWeight: a weight that is quantized once for many micro-batches."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from transformer_plugin import ops
from transformer_plugin.formats import Format
from transformer_plugin.parallel._merged_adapters import watch_merges
from transformer_plugin.parallel._shard_experts import local
from transformer_plugin.parallel._watching import watch_steps
from transformer_plugin.tensor import GroupedTensor, QuantizedTensor
from transformer_plugin.tensor._base import Buffers, FormatTensor
from transformer_plugin.tensor._layout import message

Formats = tuple[str, str, str]


class QuantizedWeight:
    """The quantized copy of a weight, made once and read by many forwards and backwards.

    A module makes one with its method ``quantize_weights``; for the ops, :attr:`tensors` is their argument
    ``quantized_weight``. The copy has fixed addresses: :meth:`refresh` writes into the same memory, so that a CUDA
    graph may hold it, and may hold the refresh itself.

    In eager code a forward raises an error if the weight was changed in place since the last refresh, also by a step of
    any ``torch.optim.Optimizer`` or by an adapter of PEFT that was merged or unmerged, has other memory or is another
    tensor. Other changes that torch does not count go unnoticed: ``weight.data.add_(1)``, kernels of other libraries,
    compiled code and replays of a CUDA graph. Call :func:`transformer_plugin.optim.refresh_after` for those, or
    :meth:`refresh` in the step.

    Args:
        weight: ``[N, K]`` or ``[G, N, K]``, or G matrices ``[N, K]``: plain tensors, or an unquantized
            :class:`~transformer_plugin.tensor.GroupedTensor`.
        formats: the keys of the formats of input, weight and gradient, of one family other than ``none``.

    Raises:
        TypeError, ValueError: as :func:`transformer_plugin.ops.quantize_weight`.
    """

    #: Whether a forward quantizes again where the weight has changed, in place of raising an error.
    refreshes_itself = False

    def __init__(self, weight: Tensor | Sequence[Tensor], formats: Formats) -> None:
        _check_arguments(weight, formats)
        self.formats: Formats = (formats[0], formats[1], formats[2])
        self._take(weight)
        with torch.no_grad(), outside_of_inference_mode():
            #: What the ops take: data, scales and, of ``nvfp4``, amaxes, along rows and, where needed, along columns.
            self.tensors: list[Tensor] = self._quantize()
            self._bytes = _with_bytes(self.tensors)
        self._seen: list[Seen] | None = [Seen.of(source) for source in self._sources]

    def _take(self, weight: Tensor | Sequence[Tensor]) -> None:
        self._is_list = not isinstance(weight, Tensor)
        self._sources: list[Tensor] = [weight] if isinstance(weight, Tensor) else list(weight)
        for source in self._sources:
            copies_of(source).add(self)
        watch_steps()
        watch_merges()

    def refresh(self, first_micro_batch: bool | Tensor = True) -> None:
        """Quantizes the weight again, into the same memory.

        Args:
            first_micro_batch: False leaves everything as it is. A tensor of one element on the device of the weight is
                read when the kernels run: with 0 every byte stays, so that one CUDA graph serves first and later
                micro-batches.

        The versions of the tensors change: the backward of an earlier forward that read them raises an error.
        """
        if first_micro_batch is False:
            return
        noop = None
        if isinstance(first_micro_batch, Tensor):
            noop = (first_micro_batch == 0).float().reshape(1)
        with torch.no_grad():
            self._quantize_into(self.op_tensors(), noop)
        self.note_refreshed()

    def note_refreshed(self) -> None:
        """The copy is that of the present weight."""
        # Compiled code cannot read versions: eager code then has nothing to compare with.
        compiling = torch.compiler.is_compiling()
        self._seen = None if compiling else [Seen.of(source) for source in self._sources]

    def note_changed(self) -> None:
        """The weight has changed, also where torch does not count it."""
        self._seen = [Seen.of(source, versions_behind=1) for source in self._sources]

    def _quantize(self) -> list[Tensor]:
        return ops.quantize_weight(self._values(), *self.formats)

    def _quantize_into(self, out: list[Tensor], noop: Tensor | None) -> None:
        ops.quantize_weight_out(self._values(), *self.formats, out, noop)

    def op_tensors(self) -> list[Tensor]:
        """The tensors as the ops take them. In compiled code E8M0 scales are bytes: torch's compiler cannot trace an op
        that writes an argument and takes that dtype."""
        return self._bytes if torch.compiler.is_compiling() else self.tensors

    @property
    def value(self) -> QuantizedTensor | GroupedTensor | Tensor:
        """The copy as a value, over the same memory; a plain tensor of the format ``bf16``."""
        format, dtype = Format.parse(self.formats[1]), self._sources[0].dtype
        if not format.is_quantized:
            return self.tensors[0]
        each = 3 if format.needs_amax else 2
        rows, columns = self.tensors[:each], self.tensors[each:]
        tensors: list[Tensor | None] = [*rows, *([] if each == 3 else [None])]
        tensors += [*columns, None, None, None][:3]
        shape = list(self.tensors[0].shape)
        shape[-1] *= 2 if format.family == "nvfp4" else 1
        cls = GroupedTensor if len(shape) == 3 else QuantizedTensor
        value: QuantizedTensor | GroupedTensor = cls._make(Buffers(*tensors), format.key, shape, dtype)
        return value

    def ensure_current(self, weight: Tensor | Sequence[Tensor], layer: str) -> None:
        """Makes sure that the copy is that of the present weight. One that refreshes itself quantizes a changed weight
        again; of any other one a change, or another weight, is a ``ValueError``.

        Args:
            weight: the present weight.
            layer: the name for the error.
        """
        present = [weight] if isinstance(weight, Tensor) else list(weight)
        if self.refreshes_itself:
            self._follow_and_refresh(present)
            return
        if any(a is not b for a, b in zip(present, self._sources, strict=True)):
            got = "another tensor"
        elif self._seen is None:
            return
        elif any(
            seen.version != version_of(source) for seen, source in zip(self._seen, present, strict=True)
        ):
            got = "one that was changed in place afterwards"
        elif any(seen.has_new_memory(source) for seen, source in zip(self._seen, present, strict=True)):
            got = "one whose .data was replaced afterwards"
        else:
            return
        raise ValueError(
            f"transformer_plugin::{layer}: argument 'weight': expected the weight that quantize_weights() quantized, "
            f"got {got}. Call quantize_weights() again after each change of the weight, or forget_quantized_weights()."
        )

    def _follow_and_refresh(self, present: list[Tensor]) -> None:
        raise NotImplementedError  # of a subclass that refreshes itself

    def is_like(self, weight: Tensor | Sequence[Tensor], formats: Formats) -> bool:
        """Whether a refresh can take a weight: of the same sizes, dtype, device and formats."""
        present = [weight] if isinstance(weight, Tensor) else list(weight)
        kinds = [[(t.shape, t.dtype, t.device) for t in tensors] for tensors in (present, self._sources)]
        same_list = self._is_list != isinstance(weight, Tensor)
        return same_list and kinds[0] == kinds[1] and tuple(formats) == self.formats

    def follow(self, weight: Tensor | Sequence[Tensor]) -> None:
        """Quantizes another weight like the first from now on."""
        self._take(weight)

    def _values(self) -> Tensor | list[Tensor]:
        """The weight as the ops read it: this rank's shard of a sharded one."""
        values = [plain(source) for source in self._sources]
        return values if self._is_list else values[0]

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: by how many versions the copy is outdated, as the other weight has other versions."""
        behind = None
        if self._seen is not None:
            behind = [seen.versions_behind(t) for seen, t in zip(self._seen, self._sources, strict=True)]
        # As bytes: pickle has no FP8 tensors.
        stored = [(t.view(torch.uint8) if t.element_size() == 1 else t, t.dtype) for t in self.tensors]
        return {
            "formats": self.formats,
            "sources": self._sources if self._is_list else self._sources[0],
            "behind": behind,
            "tensors": stored,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.formats = state["formats"]
        self._take(state["sources"])
        self.tensors = [t.view(dtype) for t, dtype in state["tensors"]]
        self._bytes = _with_bytes(self.tensors)
        self._seen = None
        if state["behind"] is not None:
            pairs = zip(self._sources, state["behind"], strict=True)
            self._seen = [Seen.of(source, behind) for source, behind in pairs]


def _check_arguments(weight: object, formats: object) -> None:
    listed = weight if isinstance(weight, list | tuple) else [weight]
    if not listed or not all(isinstance(each, Tensor) for each in listed):
        got, advice = f"{type(weight).__name__}", "Pass the parameter of a layer, or a list of them"
        raise TypeError(message("QuantizedWeight", "weight", "a tensor or a list of tensors", got, advice))
    keys = formats if isinstance(formats, list | tuple) else ()
    if len(keys) != 3 or not all(isinstance(key, str) for key in keys):
        advice = "Pass those of input, weight and gradient: ('mxfp8', 'mxfp8', 'mxfp8')"
        raise TypeError(message("QuantizedWeight", "formats", "three format keys", repr(formats), advice))


def _with_bytes(tensors: list[Tensor]) -> list[Tensor]:
    """The same memory with scales in E8M0 as bytes."""
    return [t.view(torch.uint8) if t.dtype == torch.float8_e8m0fnu else t for t in tensors]


def outside_of_inference_mode() -> AbstractContextManager[Any]:
    """For tensors that later backwards may keep, which autograd refuses of those made in inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


class QuantizedCopies:
    """The quantized copies of a parameter, which is their key: an attribute of the parameter refers to them weakly."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[QuantizedWeight]] = []

    def add(self, weight: QuantizedWeight) -> None:
        """Adds a copy, and drops those that are gone."""
        self._refs = [ref for ref in self._refs if ref() not in (None, weight)] + [weakref.ref(weight)]

    def __iter__(self) -> Iterator[QuantizedWeight]:
        return (weight for ref in self._refs if (weight := ref()) is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        return QuantizedCopies, ()  # a copy of a parameter has no quantized copies yet


torch.serialization.add_safe_globals([QuantizedCopies])


def copies_of(weight: Tensor) -> QuantizedCopies:
    """The quantized copies of a tensor."""
    found = weight.__dict__.get("quantized_copies")
    if found is None:
        found = weight.quantized_copies = QuantizedCopies()  # type: ignore[attr-defined]
    return found


def plain(weight: Tensor) -> Tensor:
    """This rank's shard of a weight as a plain tensor, without a gradient."""
    with torch.no_grad():
        own = local(weight)
        return own.packed() if isinstance(own, GroupedTensor) else own


def memory_of(weight: Tensor) -> Tensor:
    """A plain tensor that has the memory of this rank's shard of a weight, of a quantized one that of its data."""
    with torch.no_grad():
        own = local(weight)
    return next(own._buffers.of_values())[1] if isinstance(own, FormatTensor) else own


def version_of(weight: Tensor) -> int:
    """Counts the in-place changes of a tensor, of its local shard, and of the buffers of a value, which ``quantize_()``
    and ``weight.data.copy_()`` of a value write. Inference tensors have no version: 0."""
    if weight.is_inference():
        return 0
    with torch.no_grad():
        own = local(weight)
    version = weight._version + (0 if own is weight else own._version)
    if isinstance(own, FormatTensor):
        version += sum(t._version for _, t in own._buffers.of_values() if not t.is_inference())
    return version


class Seen(NamedTuple):
    """The state of a weight when it was copied: its version and its memory.

    The memory may be freed and its address reused later; the reference to the storage detects that.
    """

    version: int
    storage: StorageWeakRef
    address: int

    @staticmethod
    def of(weight: Tensor, versions_behind: int = 0) -> Seen:
        memory = memory_of(weight)
        storage = StorageWeakRef(memory.untyped_storage())
        return Seen(version_of(weight) - versions_behind, storage, memory.data_ptr())

    def has_new_memory(self, weight: Tensor) -> bool:
        """Whether the tensor has other memory now, as after ``weight.data = other``."""
        memory = memory_of(weight)
        return self.address != memory.data_ptr() or self.storage != StorageWeakRef(memory.untyped_storage())

    def is_outdated(self, weight: Tensor) -> bool:
        """Whether the weight has changed, or has other memory."""
        return self.version != version_of(weight) or self.has_new_memory(weight)

    def versions_behind(self, weight: Tensor) -> int:
        """By how many changes the copy is outdated; -1 with other memory."""
        return -1 if self.has_new_memory(weight) else version_of(weight) - self.version
