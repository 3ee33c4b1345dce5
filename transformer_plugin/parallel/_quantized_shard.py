"""The quantized copies of this rank's shards of weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.errors import PeerTimeoutError
from transformer_plugin.formats import Format
from transformer_plugin.nn.quantized_weight import Formats, QuantizedWeight
from transformer_plugin.parallel._gather_layout import Shards, columns_of, plain, quantize_shard
from transformer_plugin.parallel._parameter_shard import ParameterShard

_NAMES = ("rowwise_data", "scale_inv", "amax", "columnwise_data", "columnwise_scale_inv", "columnwise_amax")


class QuantizedShard(QuantizedWeight):
    """A :class:`~transformer_plugin.nn.QuantizedWeight` of this rank's shard, which has the bytes that the full weight
    has there: amaxes of the full weight are those of all ranks.

    A forward quantizes again when the shard has changed, and with it the other shards of the model that have: what is
    gathered ahead is then up to date, and one reduction finds the amaxes of all. All ranks do this at the same place,
    as they change their shards together.

    Args:
        shard: this rank's shard.
        formats: as for the base class.
        place: what this is a shard of.
    """

    refreshes_itself = True

    def __init__(self, shard: Tensor, formats: Formats, place: ParameterShard) -> None:
        format = Format.parse(formats[1])
        #: the scale of the full matrix is that of its largest element, on any rank.
        self.reduces_amax = shard.dim() == 2 and (format.needs_amax or format.family == "fp8_tensor")
        self._reduces_rows = shard.dim() == 2 and format.block is None and not self.reduces_amax
        self.place = place
        super().__init__(shard, formats)

    def refresh(self, first_micro_batch: bool | Tensor = True) -> None:
        """As in the base class. The ranks call it together."""
        if first_micro_batch is not False:
            noop = None
            if isinstance(first_micro_batch, Tensor):
                noop = (first_micro_batch == 0).float().reshape(1)
            refresh_together([self], noop)

    def _follow_and_refresh(self, present: list[Tensor]) -> None:
        if not self._is_outdated(present[0]):
            return
        outdated = {id(self): self}
        self._take(present[0])
        for ref in self.place.layers:
            layer = ref()
            copy: Any = getattr(layer, "quantized_weight", None)
            if layer is not None and isinstance(copy, QuantizedShard) and copy._is_outdated(layer.weight):
                copy._take(layer.weight)
                outdated[id(copy)] = copy
        refresh_together(outdated.values(), None)

    def _is_outdated(self, present: Tensor) -> bool:
        if present is not self._sources[0]:
            return True
        return self._seen is not None and self._seen[0].is_outdated(present)

    def _quantize(self) -> list[Tensor]:
        if not (self.reduces_amax or self._reduces_rows):
            return super()._quantize()
        shard, key = self._sources[0].detach(), self.formats[1]
        columns: Any = "none" if columns_of(self.formats, shard.device) == "none" else "gathered"
        ranks = len(self.place.ranks)
        shards = Shards(key, (shard.shape[0] * ranks, shard.shape[1]), ranks, columns)
        made = quantize_shard(shards, shard, None, self.largest)
        return [made[name].contiguous() for name in _NAMES if name in made]

    def largest(self, values: Tensor) -> Tensor:
        """The largest of each number over the ranks; a missing one is an error that names the weight."""
        place = self.place
        timeout = -1 if place.shard.timeout_ms is None else place.shard.timeout_ms
        try:
            every = ops.all_gather(values.unsqueeze(0), len(place.ranks), place.group_name, timeout)
        except PeerTimeoutError as error:
            message = f"{error.message} (The largest magnitudes of '{place.name}' and others were compared.)"
            raise PeerTimeoutError(error.rank, error.op, error.phase, message, error.ranks) from None
        return every.amax(0)

    def _quantize_into(self, out: list[Tensor], noop: Tensor | None) -> None:
        if not self._reduces_rows:
            super()._quantize_into(out, noop)
            return
        for buffer, value in zip(out, self._quantize(), strict=True):
            _copy(buffer, value, noop)

    def _quantize_with(self, amax: Tensor, noop: Tensor | None) -> None:
        """With an amax ``[1]`` of the full weight."""
        shard, format = self._sources[0].detach(), Format.parse(self.formats[1])
        each = 3 if format.needs_amax else 2
        columns = len(self.tensors) > each
        tensors = self.op_tensors()
        out = [t for i, t in enumerate(tensors) if i % each != 2]
        amax_t = amax if columns and format.needs_amax else None
        ops.quantize_out(shard, self.formats[1], out, None, amax, amax_t, None, noop, True, columns)
        if format.needs_amax:
            for buffer in tensors[2::3]:
                _copy(buffer, amax, noop)
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(out)  # quantize_out does not

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a layer makes its own at its first use."""
        return None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "transformer_plugin::QuantizedShard: expected a model without quantized shards to pickle, got one that has "
            "computed with them. Save its state_dict(), or call forget_quantized_weights() of its layers first."
        )


def refresh_together(shards: Iterable[QuantizedShard], noop: Tensor | None) -> None:
    """Quantizes shards again into their memory, with one reduction of all amaxes for each format and dtype."""
    with torch.no_grad():
        kinds: dict[Any, list[QuantizedShard]] = {}
        for shard in shards:
            if shard.reduces_amax:
                kind = (shard.place.group_name, shard.formats[1], shard._sources[0].dtype)
                kinds.setdefault(kind, []).append(shard)
            else:
                shard._quantize_into(shard.op_tensors(), noop)
            shard.note_refreshed()
        for (_, key, _), some in kinds.items():
            device = some[0]._sources[0].device
            amaxes = torch.zeros(len(some), dtype=torch.float32, device=device)
            ops.amax_list_out([shard._sources[0].detach() for shard in some], key, amaxes)
            amaxes = some[0].largest(amaxes)
            for i, shard in enumerate(some):
                shard._quantize_with(amaxes[i : i + 1], noop)


def _copy(buffer: Tensor, value: Tensor, noop: Tensor | None) -> None:
    """Nothing with ``noop`` = 1."""
    to, source = plain(buffer), plain(value)
    to.copy_(source if noop is None else torch.where(noop == 1, to, source))
