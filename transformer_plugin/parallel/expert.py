"""Expert parallelism for a layer: a context whose configuration is the same on all ranks, and the plans of its calls.

A process may have several ``EpContext`` objects, over several groups or with several capacities. The functions of
:mod:`transformer_plugin.parallel.compat.transformer_engine` (``ep_bootstrap`` and so on) wrap one context under
TransformerEngine's names.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from transformer_plugin.config import settings
from transformer_plugin.nn._slots import SlotsOfRanks
from transformer_plugin.ops import expert_parallel as ops
from transformer_plugin.ops.peer_memory import open_channel, peer_memory_support
from transformer_plugin.parallel._ep_checks import (
    check_columns,
    check_config,
    check_limit,
    check_same,
    check_type,
    device_named,
    device_of,
    group_exists,
    refuse,
)
from transformer_plugin.parallel._group_names import name_with_rank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Overflow = Literal["raise", "drop"]
Transport = Literal["auto", "all_gather", "all_to_all", "one_sided"]
#: the least timeout of what connects the ranks: their GPUs may be first used in it.
FIRST_CALL_MS = 30_000


@dataclass(frozen=True)
class EpConfig:
    """The configuration of a context, the same on all its ranks."""

    #: E, the number of experts of all ranks together; a multiple of the number of ranks.
    num_experts: int
    #: the largest number of tokens of any rank in one call.
    max_tokens_per_rank: int
    #: H, the columns of a token.
    hidden_dim: int
    #: K, the number of experts of one token.
    num_topk: int
    #: rows that one rank can receive in one call. None: enough for any routing in which the experts of a token differ,
    #: ``R * max_tokens_per_rank * min(K, E / R)`` rows plus padding, or ``max_received_tokens * min(K, E / R)``.
    capacity: int | None = None
    #: each expert's rows are padded with zero rows to a multiple of this: 0, 1 or a power of two.
    alignment: int = 1
    #: how rows past the capacity, and tokens past ``max_received_tokens``, are handled: "raise" an error, or "drop"
    #: them.
    overflow: Overflow = "raise"
    #: tokens that one rank can receive in one call, its own included, each counted once. None: those of all ranks.
    max_received_tokens: int | None = None
    #: how tokens move between the ranks, with the same bits. "all_gather": every rank receives all tokens.
    #: "all_to_all": each rank receives exactly the tokens of its experts; the host reads how many, so that a GPU's
    #: stream is waited for and the call cannot be captured in a CUDA graph. "one_sided": ranks store exactly these rows
    #: into each other's memory, for GPUs of one host that NVLink connects; the host reads nothing. "auto": "one_sided"
    #: where all ranks have it, otherwise "all_gather": see
    #: :func:`~transformer_plugin.ops.expert_parallel.select_transport`.
    transport: Transport = "auto"
    #: the widest dtype of tokens; the memory of "one_sided" is as large as they need. The first call with a wider one
    #: adds larger memory, for which it waits for the other ranks; while a CUDA graph is captured it is an error.
    max_token_dtype: torch.dtype = torch.float32
    #: multiprocessors that dispatch and combine of "one_sided", and their gradients, use at most to move rows; 0: all.
    #: The kernels of other transports have no such limit: with these it must be 0.
    max_num_sms: int = 0


class EpPlan(NamedTuple):
    """The routing of one call, made by :meth:`EpContext.plan`: plain tensors that are not modified later."""

    #: int32 ``[N, K]``, see :class:`transformer_plugin.ops.expert_parallel.Plan`, as of the others.
    slot: Tensor
    #: int32 ``[capacity]``.
    source: Tensor
    #: int64 ``[E / R]``: rows of each local expert, padding included. Their sum is at most the capacity. These are the
    #: group sizes of a grouped GEMM.
    tokens_per_expert: Tensor
    #: int64 ``[R]``: rows that each rank needs, before any is dropped.
    required: Tensor
    #: int32 ``[1]``: 1 when any rank needs more than the capacity or ``max_received_tokens``.
    overflow: Tensor
    #: T, the number of tokens of this rank.
    num_tokens: int
    #: the index of this rank in the group.
    rank: int
    #: int32 ``[N]``, or ``[4, R + 1]`` with the transports "all_to_all" and "one_sided"; see
    #: :class:`transformer_plugin.ops.expert_parallel.CompactPlan`. None where the received rows are the tokens of all
    #: ranks, as are the next two.
    received: Tensor | None = None
    #: int32 ``[R * max_tokens]``, or ``[3, max_tokens, min(K, R)]``.
    position: Tensor | None = None
    #: int64 ``[R]``: tokens that each rank needs, before any is dropped.
    required_tokens: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """int64 ``[1]``: the rows that this rank needs, padding included, before any is dropped."""
        return self.required[self.rank : self.rank + 1]


class EpContext:
    """Expert parallelism over one group with one configuration.

    The constructor is collective: all ranks of the group create their contexts in the same order, and the constructor
    checks that their configurations are equal. Every call on the context is collective too.

    Args:
        group: the c10d process group, Gloo for CPU tensors or NCCL for CUDA tensors; None for this process alone.
        num_experts, max_tokens_per_rank, hidden_dim, num_topk, capacity, alignment, overflow: see :class:`EpConfig`.
        max_received_tokens, transport, max_token_dtype, max_num_sms: likewise.
        channel: with the transport "one_sided", the number of the memory that the context uses. Contexts of a group
            with one number use the same memory, one call after the other in the order of one stream; calls of contexts
            with different numbers may be in flight at the same time.
        timeout: the longest wait for other ranks in seconds; None for ``config.settings.peer_timeout``. On a CPU a
            longer wait raises :class:`~transformer_plugin.errors.PeerTimeoutError`. On CUDA the process prints the
            text of that error and exits, because a stream that waits for a lost rank cannot be recovered. Choose a
            timeout shorter than the group's.
        device: the device of the tensors; by default this process's GPU if the group has NCCL, else the CPU.

    Raises:
        ValueError: an invalid configuration (for example ``num_experts`` that is not a multiple of the ranks), or one
            that differs between ranks: the error names the fields and the ranks.
        PeerTimeoutError: a rank did not take part in time.

    Close it with :meth:`finalize` or as a context manager, before ``dist.destroy_process_group``. Before that, delete
    captured CUDA graphs that contain its calls. :meth:`finalize` is local and does not synchronize.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        *,
        num_experts: int,
        max_tokens_per_rank: int,
        hidden_dim: int,
        num_topk: int,
        capacity: int | None = None,
        alignment: int = 1,
        overflow: Overflow = "raise",
        max_received_tokens: int | None = None,
        transport: Transport = "auto",
        max_token_dtype: torch.dtype = torch.float32,
        max_num_sms: int = 0,
        channel: int = 0,
        timeout: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if group is not None:
            check_type("EpContext", "group", group, dist.ProcessGroup, "a process group or None")
        sizes = (num_experts, max_tokens_per_rank, hidden_dim, num_topk, capacity, alignment, overflow)
        self.config = EpConfig(*sizes, max_received_tokens, transport, max_token_dtype, max_num_sms)
        self.group = group
        self.num_ranks = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.group_name = "" if group is None else group.group_name
        #: The argument of ops.
        self._name_with_rank = "" if group is None else name_with_rank(self.group_name, self.rank)
        self.device = device_named(device, "EpContext") if device is not None else device_of(group)
        timeout = settings.peer_timeout if timeout is None else timeout
        check_config(self.config, self.num_ranks, timeout)
        self.timeout_ms = int(timeout * 1000)
        self.num_local_experts = num_experts // self.num_ranks
        self.capacity, self._open, self._channel = self.capacity_for(alignment), True, channel
        self._compare()
        #: how tokens move between the ranks ("none": there is one), and why so.
        self.transport, self.transport_reason = self._choose_transport()
        check_limit(self.config, self.transport, self.transport_reason)
        if self.num_ranks > 1:
            # The first call connects the ranks: NCCL creates its communicator, which cannot be captured in a graph.
            self.plan(torch.empty(0, num_topk, dtype=torch.int32, device=self.device))

    def _compare(self) -> None:
        mine = {**asdict(self.config), "ranks": self.num_ranks, "device": self.device.type}
        mine["max_token_dtype"] = str(self.config.max_token_dtype)
        texts = ops.all_gather_text(json.dumps(mine), self.group_name, self.timeout_ms)
        check_same(mine, texts, self.group_name)

    def _choose_transport(self) -> tuple[str, str]:
        """Returns the transport and the reason, after the memory that it needs is open. Collective, with one answer."""
        wanted, has_memory, why_not = self.config.transport, False, ""
        if wanted == "auto" and self.num_ranks > 1 and self.device.type == "cuda":
            first = max(self.timeout_ms, FIRST_CALL_MS)
            has_memory, why_not = peer_memory_support(self.group_name, first, self.device)
        chosen, reason = ops.select_transport(self.num_ranks, self.device.type, has_memory)
        if wanted != "auto" and self.num_ranks > 1:
            chosen, reason = wanted, f'transport="{wanted}" was given'
        if chosen == "one_sided":
            why_not = self._open_channel()
        if chosen == "one_sided" and why_not:
            if wanted != "auto":
                refuse(
                    "transport", "ranks that reach each other's memory", why_not, "EpContext", "Pass 'auto'"
                )
            chosen, reason = ops.select_transport(self.num_ranks, self.device.type, False)
        return chosen, f"{reason}; not one_sided: {why_not}" if why_not else reason

    def _open_channel(self) -> str:
        """Opens the memory in which ranks store rows, collectively. Returns why the ranks cannot have it, or ""."""
        name = f"{self._name_with_rank}#channel={self._channel}"
        sizes = _channel_sizes(self.config, self.num_ranks, self.capacity)
        first = max(self.timeout_ms, FIRST_CALL_MS)
        reason = open_channel(name, **sizes, timeout_ms=first, device=self.device)
        if not reason:
            limit = self.config.max_num_sms
            self._name_with_rank = name + (f"#max_sms={limit}" if limit else "")
        return reason

    def capacity_for(self, alignment: int) -> int:
        """Returns the capacity of a call without its own: the context's, or enough rows for any routing."""
        return self.config.capacity if self.config.capacity is not None else self._worst_case(alignment)

    def plan(
        self,
        topk_idx: Tensor,
        capacity: int | None = None,
        alignment: int | None = None,
        *,
        compact: bool = False,
    ) -> EpPlan:
        """Compute the destination of every token of the group.

        Args:
            topk_idx: ``[..., K]`` int32 or int64, contiguous, at most ``max_tokens_per_rank`` tokens: experts of the
                group, -1 for none.
            capacity: rows of this call, at most the context's and the same on every rank; None for the context's.
            alignment: alignment of this call, the same on every rank; None for the context's.
            compact: whether to keep of the tokens of all ranks only those that have a row here; the same on every rank.
                It saves memory where the capacity is less than R * max_tokens_per_rank, and is done only there. With a
                smaller ``max_received_tokens``, or another transport than "all_gather", it is always done.

        Raises:
            ValueError: an invalid argument; an index of any rank that is neither an expert nor -1; or rows do not fit
                and the policy is "raise". The last two are raised on a CPU in this call, on every rank; on CUDA in a
                later call, after the GPU has counted them (``ops.check_group_sizes()`` raises the second, too).
        """
        self._check_open()
        check_type("plan", "topk_idx", topk_idx, Tensor, "a tensor")
        for name, value in (("capacity", capacity), ("alignment", alignment)):
            if value is not None:
                check_type("plan", name, value, _INTEGERS, "an integer or None")
        if topk_idx.shape[-1:] != (self.config.num_topk,):
            refuse("topk_idx", f"{self.config.num_topk} columns (num_topk)", tuple(topk_idx.shape), "plan")
        alignment = self.config.alignment if alignment is None else alignment
        limit = self.capacity_for(alignment)
        check_type("plan", "compact", compact, bool, "True or False")
        if capacity is not None and not 0 <= capacity <= limit:
            refuse("capacity", f"from 0 to {limit} rows, the capacity of the context", capacity, "plan")
        arguments = (
            topk_idx,
            self.config.num_experts,
            self.config.max_tokens_per_rank,
            limit if capacity is None else capacity,
            alignment,
            self.num_ranks,
            self._name_with_rank,
            self.config.overflow == "raise",
            self.timeout_ms,
        )
        tokens, bound = self.num_ranks * self.config.max_tokens_per_rank, self.config.max_received_tokens
        here = (topk_idx.numel() // self.config.num_topk, self.rank)
        is_bounded = bound is not None and bound < tokens
        records = self.transport in ("all_to_all", "one_sided")
        if is_bounded or records or (compact and arguments[3] < tokens):
            routing = ops.compact_plan(*arguments, bound if is_bounded else None, records)
            return EpPlan(*routing[:5], *here, *routing[5:])
        return EpPlan(*ops.plan(*arguments), *here)

    def dispatch(
        self, plan: EpPlan, tokens: Tensor, topk_weights: Tensor | None = None, *, expand: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Send ``tokens [T, H]`` and ``topk_weights [..., K]`` to their experts: ``(recv, recv_weights)``.

        With ``expand`` ``recv`` has the rows of the experts, ``[capacity, H]``; without it each received token once,
        ``[N, H]``, for experts that read them by ``plan.slot`` and ``plan.source``.
        See :func:`transformer_plugin.ops.expert_parallel.dispatch`.
        """
        self._check_open()
        check_type("dispatch", "plan", plan, EpPlan, "an EpPlan", "Pass what plan() returned")
        topk_weights = self._checked_weights(plan, tokens, topk_weights)
        check_type("dispatch", "expand", expand, bool, "True or False")
        maps, group = (plan.received, plan.position), (self._name_with_rank, self.timeout_ms)
        return ops.dispatch(tokens, topk_weights, plan.slot, plan.source, *group, -1, expand, *maps)

    def _checked_weights(self, plan: EpPlan, tokens: Tensor, topk_weights: Tensor | None) -> Tensor | None:
        check_type("dispatch", "tokens", tokens, Tensor, "a tensor")
        self._check_tokens("tokens", tokens, plan.num_tokens, "dispatch")
        if topk_weights is None:
            return None
        check_type("dispatch", "topk_weights", topk_weights, Tensor, "a tensor or None")
        check_columns(topk_weights)
        return topk_weights.reshape(-1, topk_weights.shape[-1])

    def slots_of(self, plan: EpPlan, tokens: Tensor, weights: Tensor) -> tuple[SlotsOfRanks, Tensor]:
        """Returns the maps of a plan, and the weights as ``[T, K]``, for a :class:`~transformer_plugin.nn.GroupedMLP`
        that exchanges its tokens itself."""
        self._check_open()
        check_type("slots_of", "plan", plan, EpPlan, "an EpPlan", "Pass what plan() returned")
        check_type("slots_of", "weights", weights, Tensor, "a tensor")
        maps = (plan.slot, plan.source, plan.tokens_per_expert, plan.received, plan.position)
        checked = cast(Tensor, self._checked_weights(plan, tokens, weights))
        return SlotsOfRanks(*maps, self._name_with_rank, self.timeout_ms), checked

    def combine(
        self, plan: EpPlan, rows: Tensor, num_tokens: int | None = None, *, expand: bool = True
    ) -> Tensor:
        """Sum the experts' ``rows [capacity, H]`` for each token: ``[T, H]`` (or ``num_tokens`` rows).

        Without ``expand`` the rows are ``[N, H]``, the sums of each received token's rows on this rank.
        See :func:`transformer_plugin.ops.expert_parallel.combine`.
        """
        self._check_open()
        check_type("combine", "plan", plan, EpPlan, "an EpPlan", "Pass what plan() returned")
        check_type("combine", "expand", expand, bool, "True or False")
        tokens = plan.num_tokens if num_tokens is None else num_tokens
        maps, group = (plan.received, plan.position), (self._name_with_rank, self.timeout_ms)
        return ops.combine(rows, plan.slot, plan.source, tokens, *group, -1, expand, *maps)

    def finalize(self) -> None:
        """Closes the context. It is local and may be repeated. Later calls on the context raise an error."""
        if not self._open:
            return
        self._open = False
        torch.ops.transformer_plugin.release_group(self.group_name)

    def __enter__(self) -> EpContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finalize()

    def _worst_case(self, alignment: int) -> int:
        local = self.num_local_experts
        align = max(1, alignment)
        tokens = self.num_ranks * self.config.max_tokens_per_rank
        if self.config.max_received_tokens is not None:
            tokens = min(tokens, self.config.max_received_tokens)
        rows = tokens * min(self.config.num_topk, local)
        return -(-(rows + local * (align - 1)) // align) * align

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError(
                "transformer_plugin::EpContext: expected an open context, got one after finalize(). "
                "Make a new EpContext on every rank."
            )
        if self.group is None or torch.compiler.is_compiling() or group_exists(self.group):
            return
        raise RuntimeError(
            f"transformer_plugin::EpContext: expected group '{self.group_name}', which the context was made for, got "
            "a destroyed group. Make a new EpContext on every rank, for the new group."
        )

    def _check_tokens(self, name: str, tokens: Tensor, rows: int, op: str) -> None:
        if tokens.dim() != 2 or tokens.shape[0] != rows or tokens.shape[1] != self.config.hidden_dim:
            refuse(
                name,
                f"[{rows}, {self.config.hidden_dim}], as in the plan and hidden_dim",
                tuple(tokens.shape),
                op,
            )


def _channel_sizes(config: EpConfig, ranks: int, capacity: int) -> dict[str, int]:
    """The sizes of ``open_channel`` for the calls of a context."""
    item = config.max_token_dtype.itemsize
    tokens = ranks * config.max_tokens_per_rank
    bound = tokens if config.max_received_tokens is None else min(tokens, config.max_received_tokens)
    planned = min(capacity, bound)
    return {
        "received_rows": min(planned, tokens - config.max_tokens_per_rank),
        "returned_rows": config.max_tokens_per_rank * min(config.num_topk, ranks - 1),
        "record_bytes": _aligned(config.hidden_dim * item) + _aligned(config.num_topk * max(4, item)),
        "num_experts": config.num_experts,
        "planned_rows": planned,
        "topk": config.num_topk,
    }


def _aligned(size: int) -> int:
    """Rows, and their weights, begin at multiples of 16 bytes."""
    return -(-size // 16) * 16


_INTEGERS = (int, torch.SymInt)
