"""Expert parallelism with TransformerEngine's names, over one :class:`~transformer_plugin.parallel.EpContext`.

The names and signatures are those of its pull request 3035. Differences: a group of one rank works; CPU tensors work;
the payload may be float32, bfloat16 or float16; ``recv_capacity_per_rank=None`` means the rows in use in eager calls,
for which each call waits for the GPU, and the static worst case in compiled functions, in CUDA graphs and with buffers
of the caller; overflow without ``drop_on_overflow`` raises an error and does not trap; ``num_local_tokens`` of
``ep_combine`` defaults to the number of dispatched tokens. With ``zero_copy`` other ranks store the rows of a dispatch,
and of the gradient of a combine, directly into tensors that are in symmetric memory; each rank decides this for its own
tensors. Others get their rows through the memory of the transport. Rows for a combine are read where they lie, in any
memory.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from transformer_plugin.parallel._ep_checks import check_type, device_named, refuse
from transformer_plugin.parallel.compat._caller_buffers import CombineGradInto, DispatchInto
from transformer_plugin.parallel.compat._symmetric_memory import (
    check_zero_copy,
    has_pool,
    is_symm_backed,
    open_pool,
    pooled,
    release_symm_mem_pool,
    symm_mem_alloc,
)
from transformer_plugin.parallel.expert import EpContext, EpPlan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "EpBuffer",
    "ep_bootstrap",
    "ep_combine",
    "ep_dispatch",
    "ep_finalize",
    "ep_prepare",
    "is_ep_bootstrapped",
    "is_symm_backed",
    "release_symm_mem_pool",
    "symm_mem_alloc",
]

_context: EpContext | None = None


def ep_bootstrap(
    ep_group: ProcessGroup | None,
    num_experts: int,
    max_tokens_per_rank: int,
    hidden_dim: int,
    num_topk: int,
    recv_capacity_per_rank: int | None = None,
    max_num_sms: int = 0,
    zero_copy: bool = False,
    drop_on_overflow: bool = False,
    max_token_dtype: torch.dtype = torch.bfloat16,
    *,
    timeout: float | None = None,
    symm_mem_pool_bytes: int | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Create the process's default context. Collective over ``ep_group``.

    Args:
        ep_group: the ranks that share the experts; None for this process alone.
        num_experts, max_tokens_per_rank, hidden_dim, num_topk: see :class:`~transformer_plugin.parallel.EpConfig`.
        recv_capacity_per_rank: rows of the receive layout. None: those in use, which an eager call reads from the GPU;
            the worst case where nothing can be read.
        max_num_sms: as in :class:`~transformer_plugin.parallel.EpConfig`.
        zero_copy: whether rows go to tensors in symmetric memory without a copy; needs ``recv_capacity_per_rank``, and
            GPUs of one host that NVLink connects. Other results come from a pool of such memory, if it has room,
            outside of CUDA graphs and compiled functions.
        drop_on_overflow: drop rows past the capacity instead of raising.
        max_token_dtype: likewise. timeout, device: as of ``EpContext``.
        symm_mem_pool_bytes: the size of that pool on each rank; None for four results of ``max_token_dtype``.

    Raises:
        RuntimeError: already bootstrapped. ValueError, PeerTimeoutError: as those of ``EpContext``.
    """
    global _context
    if _context is not None:
        raise RuntimeError(
            "transformer_plugin::ep_bootstrap: expected one call before ep_finalize(), got a second one. "
            "Call ep_finalize() first, or use EpContext objects for several configurations."
        )
    check_type("ep_bootstrap", "max_num_sms", max_num_sms, int, "an integer, 0 for all")
    check_type("ep_bootstrap", "drop_on_overflow", drop_on_overflow, bool, "True or False")
    check_zero_copy(zero_copy, recv_capacity_per_rank, symm_mem_pool_bytes)
    context = EpContext(
        ep_group,
        num_experts=num_experts,
        max_tokens_per_rank=max_tokens_per_rank,
        hidden_dim=hidden_dim,
        num_topk=num_topk,
        capacity=recv_capacity_per_rank,
        overflow="drop" if drop_on_overflow else "raise",
        transport="one_sided" if zero_copy else "auto",
        max_token_dtype=max_token_dtype,
        max_num_sms=max_num_sms,
        timeout=timeout,
        device=device,
    )
    if zero_copy:
        open_pool(context, symm_mem_pool_bytes)
    _context = context


def ep_finalize() -> None:
    """Close the default context, if there is one. Call it before ``dist.destroy_process_group``."""
    global _context
    release_symm_mem_pool()
    context, _context = _context, None
    if context is not None:
        context.finalize()


def is_ep_bootstrapped() -> bool:
    """Whether :func:`ep_bootstrap` was called and :func:`ep_finalize` was not."""
    return _context is not None


class EpBuffer:
    """The routing of one call: filled by ``ep_prepare`` and used by the other functions.

    It holds no payload. A gradient keeps the plan of its forward, so the buffer may be prepared again before the
    backward of an earlier call.

    Attributes:
        tokens_per_expert: int64 ``[E / R]``, a new tensor for each prepare; None before the first.
        total_recv_tokens: int64 ``[1]``, rows needed before any is dropped; None before the first.
    """

    def __init__(
        self,
        top_k: int,
        max_tokens_per_rank: int,
        hidden_dim: int,
        num_local_experts: int,
        recv_capacity_per_rank: int | None = None,
        alignment: int = 0,
        payload_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        if _context is None:
            raise RuntimeError(
                "transformer_plugin::EpBuffer: expected a call of ep_bootstrap() first, got none. Call it on each rank."
            )
        given: dict[str, Any] = {
            "top_k": (top_k, _context.config.num_topk),
            "max_tokens_per_rank": (max_tokens_per_rank, _context.config.max_tokens_per_rank),
            "hidden_dim": (hidden_dim, _context.config.hidden_dim),
            "num_local_experts": (num_local_experts, _context.num_local_experts),
        }
        for name, (got, expected) in given.items():
            check_type("EpBuffer", name, got, int, "an integer")
            if got != expected:
                refuse(name, f"{expected}, as in ep_bootstrap", got, "EpBuffer")
        check_type("EpBuffer", "alignment", alignment, int, "an integer")
        if recv_capacity_per_rank is not None:
            check_type(
                "EpBuffer", "recv_capacity_per_rank", recv_capacity_per_rank, int, "an integer or None"
            )
            if recv_capacity_per_rank < 0:
                advice = "Pass None for the capacity of ep_bootstrap"
                refuse("recv_capacity_per_rank", "0 or more", recv_capacity_per_rank, "EpBuffer", advice)
        if not 0 <= alignment < 2**31 or alignment & (alignment - 1):
            refuse(
                "alignment",
                "0, 1 or a power of two below 2^31",
                alignment,
                "EpBuffer",
                "Pass 1 for no padding",
            )
        self.top_k = top_k
        self.max_tokens_per_rank = max_tokens_per_rank
        self.hidden_dim = hidden_dim
        self.num_local_experts = num_local_experts
        self.alignment = alignment
        self.payload_dtype = payload_dtype
        self.device = _context.device if device is None else device_named(device, "EpBuffer")
        self.recv_capacity_per_rank = (
            _context.capacity_for(alignment) if recv_capacity_per_rank is None else recv_capacity_per_rank
        )
        self._reads_rows = recv_capacity_per_rank is None and _context.config.capacity is None
        self.plan: EpPlan | None = None
        self._context = _context

    @property
    def tokens_per_expert(self) -> Tensor | None:
        return None if self.plan is None else self.plan.tokens_per_expert

    @property
    def total_recv_tokens(self) -> Tensor | None:
        return None if self.plan is None else self.plan.total

    def prepared(self, op: str) -> EpPlan:
        """Returns the plan of the last prepare."""
        if self.plan is None:
            raise RuntimeError(
                f"transformer_plugin::{op}: expected a buffer after ep_prepare() or ep_dispatch(), got one before. "
                "Call one of them on every rank first."
            )
        return self.plan


def ep_prepare(buffer: EpBuffer, topk_idx: Tensor) -> Tensor:
    """Plan the routing of ``topk_idx [..., K]``; returns ``tokens_per_expert`` int64 ``[E / R]``."""
    check_type("ep_prepare", "buffer", buffer, EpBuffer, "an EpBuffer")
    buffer.plan = _rows_in_use(buffer, _planned(buffer, topk_idx))
    return buffer.plan.tokens_per_expert


def _planned(buffer: EpBuffer, topk_idx: Tensor) -> EpPlan:
    return buffer._context.plan(topk_idx, buffer.recv_capacity_per_rank, buffer.alignment)


def _rows_in_use(buffer: EpBuffer, plan: EpPlan) -> EpPlan:
    """Returns the plan without unused rows, where no capacity was given and their number can be read."""
    if (
        not buffer._reads_rows
        or torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()  # fake tensors have no values, and tracing would record a constant
        or (plan.source.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return plan
    return plan._replace(source=plan.source[: int(plan.tokens_per_expert.sum())])


def ep_dispatch(
    buffer: EpBuffer,
    tokens: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    *,
    recv_tokens: Tensor | None = None,
    recv_topk_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Plan, then send tokens and weights to their experts.

    Args:
        buffer: keeps the plan for the combine.
        tokens: ``[T, H]``.
        topk_idx: ``[T, K]`` int32 or int64.
        topk_weights: ``[T, K]`` float32.
        recv_tokens, recv_topk_weights: ``[capacity, H]`` in the dtype of ``tokens`` and ``[capacity]`` float32,
            contiguous, without gradients: the results are written there and returned in the same memory. They are
            valid until the next dispatch into these tensors; if a backward still needs the old values, torch raises an
            error.

    Returns:
        ``(recv_tokens [rows, H], recv_topk_weights [rows], tokens_per_expert int64 [E / R])``, the first two
        differentiable. The rows are the capacity, and those past the last expert are zero; or those in use, see
        :func:`ep_bootstrap`.
    """
    check_type("ep_dispatch", "buffer", buffer, EpBuffer, "an EpBuffer")
    given = {"tokens": tokens, "topk_idx": topk_idx, "topk_weights": topk_weights}
    for name, value in given.items():
        check_type("ep_dispatch", name, value, Tensor, "a tensor")
    if tokens.dim() != 2 or tokens.shape[1] != buffer.hidden_dim:
        refuse(
            "tokens", f"[T, {buffer.hidden_dim}], of hidden_dim columns", tuple(tokens.shape), "ep_dispatch"
        )
    _check_target(
        "recv_tokens", recv_tokens, (buffer.recv_capacity_per_rank, buffer.hidden_dim), tokens.dtype, tokens
    )
    _check_target(
        "recv_topk_weights", recv_topk_weights, (buffer.recv_capacity_per_rank,), topk_weights.dtype, tokens
    )
    _check_routing(tokens, topk_idx, topk_weights)
    if recv_tokens is None:
        shape = (buffer.recv_capacity_per_rank, buffer.hidden_dim)
        recv_tokens = pooled(buffer._context.group, shape, tokens)
    if recv_tokens is None and recv_topk_weights is None:
        counts = ep_prepare(buffer, topk_idx)
        recv, weights = buffer._context.dispatch(buffer.prepared("ep_dispatch"), tokens, topk_weights)
        return recv, weights, counts
    buffer.plan = plan = _planned(buffer, topk_idx)
    rows = buffer.recv_capacity_per_rank
    if recv_tokens is None:
        recv_tokens = tokens.new_empty(rows, buffer.hidden_dim)
    if recv_topk_weights is None:
        recv_topk_weights = topk_weights.new_empty(rows)
    weights = topk_weights.reshape(-1, topk_weights.shape[-1])
    recv, weights = DispatchInto.apply(
        tokens, weights, recv_tokens, recv_topk_weights, *_arguments(buffer, plan)
    )
    return recv, weights, plan.tokens_per_expert


def _check_routing(tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
    if topk_weights.dtype != torch.float32 and tokens.dtype != torch.float64:
        raise TypeError(
            "transformer_plugin::ep_dispatch: argument 'topk_weights': expected float32, got "
            f"{str(topk_weights.dtype)[6:]}. Convert it with .float() first."
        )
    if tokens.shape[:1] != topk_idx.shape[:1] or topk_weights.shape != topk_idx.shape:
        refuse(
            "topk_weights",
            "tokens [T, H], topk_idx [T, K] and topk_weights [T, K]",
            f"{tuple(tokens.shape)}, {tuple(topk_idx.shape)} and {tuple(topk_weights.shape)}",
            "ep_dispatch",
            "Pass the same tokens in all three",
        )


def _arguments(buffer: EpBuffer, plan: EpPlan) -> tuple[Any, ...]:
    """What the ops take of a plan and its group."""
    context = buffer._context
    maps = (plan.slot, plan.source, plan.received, plan.position)
    return (*maps, context._name_with_rank, context.timeout_ms)


def ep_combine(
    buffer: EpBuffer,
    expert_out: Tensor,
    *,
    num_local_tokens: int | None = None,
    grad_out: Tensor | None = None,
) -> Tensor:
    """Sum the experts' rows ``[capacity, H]`` for each token, without weights: ``[num_local_tokens, H]``.

    Args:
        buffer: as ``ep_dispatch`` left it.
        num_local_tokens: rows of the result; by default the number of tokens that were dispatched. Further rows are
            zero.
        grad_out: ``[capacity, H]``, contiguous, without gradients: the backward writes the gradient of ``expert_out``
            there.
            A buffer belongs to one combine of a backward: autograd may hold it until the backward ends. None: a new
            tensor, with ``zero_copy`` one of the pool.
    """
    check_type("ep_combine", "buffer", buffer, EpBuffer, "an EpBuffer")
    check_type("ep_combine", "expert_out", expert_out, Tensor, "a tensor")
    plan = buffer.prepared("ep_combine")
    _check_target(
        "grad_out", grad_out, tuple(expert_out.shape), expert_out.dtype, expert_out, op="ep_combine"
    )
    if grad_out is None and (torch.compiler.is_compiling() or not has_pool(buffer._context.group)):
        return buffer._context.combine(plan, expert_out, num_local_tokens)
    buffer._context._check_open()
    tokens = plan.num_tokens if num_local_tokens is None else num_local_tokens
    new_rows = partial(_new_rows, buffer._context.group)
    combined: Tensor = CombineGradInto.apply(
        expert_out, grad_out, new_rows, tokens, *_arguments(buffer, plan)
    )
    return combined


def _new_rows(group: ProcessGroup | None, shape: tuple[int, int], like: Tensor) -> Tensor:
    rows = pooled(group, shape, like)
    return like.new_empty(shape) if rows is None else rows


def _check_target(
    name: str,
    target: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    like: Tensor,
    op: str = "ep_dispatch",
) -> None:
    if target is None:
        return
    check_type(op, name, target, Tensor, "a tensor or None")
    if tuple(target.shape) != shape or not target.is_contiguous() or target.device != like.device:
        refuse(
            name,
            f"a contiguous tensor {list(shape)} on {like.device}",
            f"{tuple(target.shape)} on {target.device}",
            op,
            "Allocate it with the capacity of the buffer",
        )
    if target.dtype != dtype:
        raise TypeError(
            f"transformer_plugin::{op}: argument '{name}': expected {str(dtype)[6:]}, got {str(target.dtype)[6:]}. "
            "Allocate it in the dtype of the payload."
        )
    if target.requires_grad:
        refuse(name, "a tensor that does not require gradients", "one that does", op, "Pass target.detach()")
