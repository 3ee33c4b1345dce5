"""Moves tokens to their experts and back: on one rank here, over a group in parallel/expert.py."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from transformer_plugin import ops
from transformer_plugin.nn._tracing import is_tracing, permute_all
from transformer_plugin.parallel import EpContext, EpPlan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class DispatchConfig:
    """How many rows the experts of one rank receive. All sizes are static; the defaults never drop a row."""

    #: rows that the experts of this rank take; more are dropped, the last expert's first. None: room for all.
    capacity: int | None = None
    #: the most tokens that any rank of the group brings in one call; needed with a group, unused without one.
    max_tokens: int | None = None
    #: the rows of each expert are padded with zero rows to a multiple of this. None: the
    #: preferred alignment of the recipe's kernels, 1 on a CPU and ``Format.alignment`` on a GPU, where it changes no
    #: result; and 1 with a ``capacity``, because padding takes room and a GPU would drop other rows than a CPU. With
    #: ``NVFP4BlockScaling`` a multiple of 16, as the capacity; None is 16.
    alignment: int | None = None
    #: seconds that a wait for other ranks may take. None: the setting TRANSFORMER_PLUGIN_PEER_TIMEOUT, 60 unless set.
    timeout: float | None = None

    def __post_init__(self) -> None:
        advice = {
            "capacity": "Use None for room for every row",
            "max_tokens": "Use the largest number of tokens of any rank",
            "alignment": "Use 1 for no padding",
        }
        for name, text in advice.items():
            value, least = getattr(self, name), 1 if name == "alignment" else 0
            if value is not None and value < least:
                raise ValueError(
                    f"transformer_plugin::DispatchConfig: argument '{name}': expected at least {least}, "
                    f"got {value}. {text}."
                )

    def row_alignment(self, preferred: int, multiple: int) -> int:
        """``alignment``, or where it is None the kernels' ``preferred`` one if that cannot drop a row, and at least
        the ``multiple`` that the recipe wants. Both are powers of two."""
        return self.alignment or max(preferred if self.capacity is None else 1, multiple)

    def check_multiple(self, multiple: int) -> None:
        """Refuses an alignment or a capacity after which an expert's rows are no multiple of what the recipe wants."""
        for name, value in (("alignment", self.alignment), ("capacity", self.capacity)):
            if value is not None and value % multiple:
                raise ValueError(
                    f"transformer_plugin::MoE: argument 'dispatch': expected a DispatchConfig whose {name} is None "
                    f"or a multiple of {multiple}, as the recipe requires for each expert's rows, got {value}. "
                    f"Use for example {-(-value // multiple) * multiple}."
                )


class Received(NamedTuple):
    """The input of this rank's experts."""

    #: ``[capacity, H]``, sorted by expert, each expert's rows padded with zeros. Eager calls over a group on a CPU
    #: have only the rows in use.
    rows: Tensor
    #: float32 ``[capacity]``, the weight of each row, 0 in padding.
    probs: Tensor
    #: int64 ``[experts of this rank]``, rows with padding.
    group_sizes: Tensor
    #: int64 ``[1]``, the rows before any was dropped.
    total: Tensor
    #: where the rows came from: what ``combine`` of the same exchange needs.
    origin: Any


@dataclass(frozen=True)
class LocalExchange:
    """All experts are on this rank: rows are copied, not sent."""

    num_experts: int
    config: DispatchConfig
    #: the preferred alignment of the GPU's kernels.
    gpu_alignment: int
    #: what each expert's rows must be a multiple of.
    row_multiple: int = 1
    #: no ranks share the experts.
    group: ClassVar[None] = None

    def __post_init__(self) -> None:
        self.config.check_multiple(self.row_multiple)

    def fitted(self, gpu_alignment: int, row_multiple: int) -> LocalExchange:
        """The same for experts of another recipe."""
        return LocalExchange(self.num_experts, self.config, gpu_alignment, row_multiple)

    def dispatch(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Received:
        """Copies each token to its experts."""
        multiple = self.row_multiple
        alignment = self.config.row_alignment(self.gpu_alignment if tokens.is_cuda else 1, multiple)
        capacity = self.config.capacity
        if capacity is None and is_tracing():
            permuted = permute_all(tokens, indices, self.num_experts, alignment, multiple)
        else:
            if capacity is None:
                capacity = indices.shape[0] * indices.shape[1] + self.num_experts * (alignment - 1)
                capacity = -(-capacity // multiple) * multiple
            permuted = ops.permute(tokens, indices, self.num_experts, capacity, alignment)
        rows, sizes, slot, source, total = permuted
        return Received(rows, ops.permute_weights(weights, slot, source), sizes, total, (slot, source))

    def combine(self, rows: Tensor, received: Received) -> Tensor:
        """Sums the rows of each token."""
        return ops.unpermute(rows, *received.origin)


class GroupExchange:
    """The experts are spread over a group of ranks, which exchange tokens. The constructor is collective."""

    def __init__(
        self,
        group: ProcessGroup,
        num_experts: int,
        hidden: int,
        topk: int,
        config: DispatchConfig,
        gpu_alignment: int,
        row_multiple: int,
        device: torch.device | str | None,
    ) -> None:
        config.check_multiple(row_multiple)
        if config.max_tokens is None:
            raise ValueError(
                "transformer_plugin::MoE: argument 'dispatch': expected max_tokens with a group of several ranks, "
                "got None. Pass dispatch=DispatchConfig(max_tokens=the most tokens of any rank in one call)."
            )
        self.config = config
        self.context = EpContext(
            group,
            num_experts=num_experts,
            max_tokens_per_rank=config.max_tokens,
            hidden_dim=hidden,
            num_topk=topk,
            capacity=config.capacity,
            alignment=config.alignment or row_multiple,
            overflow="drop",
            timeout=config.timeout,
            device=None if device is None or torch.device(device).type == "meta" else device,
        )
        self.alignment = self._row_alignment(gpu_alignment, row_multiple)

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that share the experts."""
        return self.context.group

    def _row_alignment(self, gpu_alignment: int, row_multiple: int) -> int:
        on_gpu = self.context.device.type == "cuda"
        return self.config.row_alignment(gpu_alignment if on_gpu else 1, row_multiple)

    def fitted(self, gpu_alignment: int, row_multiple: int) -> GroupExchange:
        """The same for experts of another recipe, which every rank's have: what the ranks agreed on holds."""
        self.config.check_multiple(row_multiple)
        fitted = copy.copy(self)
        fitted.alignment = self._row_alignment(gpu_alignment, row_multiple)
        return fitted

    def dispatch(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Received:
        """Sends each token to the ranks of its experts."""
        if is_tracing():
            raise ValueError(
                "transformer_plugin::MoE: argument 'group': expected None under torch.jit.trace, which would keep the "
                f"number of tokens of its example, got a group of {self.context.num_ranks} ranks. Use torch.export or "
                "torch.compile."
            )
        plan = _rows_in_use(self.context.plan(indices, alignment=self.alignment))
        rows, probs = self.context.dispatch(plan, tokens, weights)
        return Received(rows, probs, plan.tokens_per_expert, plan.total, plan)

    def combine(self, rows: Tensor, received: Received) -> Tensor:
        """Sends the rows back and sums those of each token."""
        return self.context.combine(received.origin, rows)

    def __copy__(self) -> GroupExchange:
        """Another object on the same ranks."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupExchange:
        """The same: what the ranks agreed on holds for a copy of the module as well."""
        return self

    def __reduce__(self) -> NoReturn:
        """A group of processes cannot be written to a file, and to make one anew is collective."""
        raise TypeError(
            "transformer_plugin::MoE: argument 'group': expected a layer without one where the module itself is "
            f"pickled (torch.save of a module, for one), got the group '{self.context.group_name}' of "
            f"{self.context.num_ranks} ranks. Save state_dict(), with torch.distributed.checkpoint for another number "
            "of ranks to read, and load it into a layer made with the group of the new processes."
        )

    def __repr__(self) -> str:
        return f"GroupExchange(rank {self.context.rank} of {self.context.num_ranks}, config={self.config})"


def _rows_in_use(plan: EpPlan) -> EpPlan:
    """The plan without unused rows, where their number is known: on a CPU, outside of any graph.

    Room for the worst routing is R times what even routing needs, and every op writes its zeros there.
    """
    if (
        torch.compiler.is_compiling()
        or plan.source.device.type != "cpu"
        or is_in_torch_dispatch_mode()  # fake tensors have no values, and a traced number would be a constant
    ):
        return plan
    return plan._replace(source=plan.source[: int(plan.tokens_per_expert.sum())])
