"""Token dispatchers: they move tokens to experts and combine what comes back, on one rank or over a group."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.modules import module as of_all_modules
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from transformer_plugin import ops
from transformer_plugin._arguments import check_fields
from transformer_plugin.nn._autocast import as_float32
from transformer_plugin.nn._slots import Slots
from transformer_plugin.nn._tracing import assign_all, is_tracing
from transformer_plugin.nn.grouped_mlp import takes_tokens
from transformer_plugin.parallel.expert import EpContext, EpPlan, Transport
from transformer_plugin.tensor._layout import message

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


#: with fewer rows of an expert on average, aligned groups cost more than they save: most of what is written is padding.
FEW_ROWS = 128


@dataclass(frozen=True)
class DispatchConfig:
    """How many rows the experts of one rank receive. All sizes are static; the defaults never drop a row.

    Raises:
        TypeError: an argument of another type. ValueError: a size below 1 or above 2^31 - 1, a timeout that is not a
            positive number below 1e9.
    """

    #: rows that this rank can receive; further rows are dropped, the last expert's first. None: enough for all rows.
    capacity: int | None = None
    #: the largest number of tokens of any rank in one call; required with a group, unused without one.
    max_tokens: int | None = None
    #: the rows of each expert are padded with zero rows to a multiple of this. None: 1 on a CPU, and on a GPU the
    #: kernels' preferred alignment, ``Format.alignment`` of the recipe (results are the same); without a group 1 there
    #: too if experts have fewer than 128 rows on average. With a ``capacity`` None means 1, because padding uses it and
    #: a GPU would drop other rows than a CPU. With ``NVFP4BlockScaling`` the alignment and the capacity must be
    #: multiples of 16, and None means 16.
    alignment: int | None = None
    #: the longest wait for other ranks in seconds. None: the setting TRANSFORMER_PLUGIN_PEER_TIMEOUT, by default 60.
    timeout: float | None = None
    #: tokens that this rank can receive, its own included, each counted once; of further tokens, in the order of their
    #: ranks and numbers, the rows here are dropped, before those past the ``capacity``. None: the tokens of all ranks.
    #: Unused without a group, and with a group of one rank, where no token is received.
    max_received_tokens: int | None = None
    #: how tokens move between the ranks, with the same bits: see :class:`~transformer_plugin.parallel.EpConfig`.
    transport: Transport = "auto"
    #: multiprocessors that an exchange of the transport "one_sided" uses at most; 0: all. See
    #: :class:`~transformer_plugin.parallel.EpConfig`. Unused without a group, and with a group of one rank.
    max_num_sms: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "transformer_plugin::DispatchConfig")
        advice = {
            "capacity": "Use None for room for every row",
            "max_tokens": "Use the largest number of tokens of any rank",
            "max_received_tokens": "Use None for the tokens of all ranks",
            "alignment": "Use 1 for no padding",
        }
        for name, text in advice.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value < 2**31:
                self._refuse(name, "from 1 to 2^31 - 1", text)
        if not 0 <= self.max_num_sms < 2**31:
            self._refuse("max_num_sms", "from 0 to 2^31 - 1", "Use 0 for all multiprocessors")
        if self.timeout is not None and not 0 < self.timeout < 1e9:
            text = "Use None for the setting of the process"
            self._refuse("timeout", "a positive number of seconds below 1e9", text)

    def _refuse(self, name: str, expected: str, advice: str) -> NoReturn:
        raise ValueError(message("DispatchConfig", name, expected, str(getattr(self, name)), advice))

    def row_alignment(self, preferred: int, multiple: int) -> int:
        """Returns the alignment of each expert's rows; ``preferred`` and ``multiple`` are powers of two.

        It is ``alignment`` if given, otherwise the kernels' ``preferred`` alignment unless padding could cause a
        dropped row. It is at least the ``multiple`` that the recipe requires.
        """
        return self.alignment or max(preferred if self.capacity is None else 1, multiple)

    def check_multiple(self, multiple: int) -> None:
        """Raises if the alignment or the capacity is not a multiple of what the recipe requires for expert rows."""
        for name, value in (("alignment", self.alignment), ("capacity", self.capacity)):
            if value is not None and value % multiple:
                raise ValueError(
                    f"transformer_plugin::MoE: argument 'dispatch': expected a DispatchConfig whose {name} is None "
                    f"or a multiple of {multiple}, as the recipe requires for each expert's rows, got {value}. "
                    f"Use for example {-(-value // multiple) * multiple}."
                )


class Received(NamedTuple):
    """The input of this rank's experts."""

    #: ``[capacity, H]``, sorted by expert, each expert's rows padded with zeros. In eager calls over a group on a
    #: CPU it has only the rows in use.
    rows: Tensor
    #: float32 ``[capacity]``, the weight of each row, 0 in padding.
    probs: Tensor
    #: int64 ``[experts of this rank]``, rows including padding.
    group_sizes: Tensor
    #: int64 ``[1]``, the number of rows before any is dropped.
    total: Tensor
    #: the plan, for the same dispatcher's ``combine``.
    origin: Any


@dataclass(frozen=True)
class LocalTokenDispatcher:
    """All experts are on this rank: rows are copied, not sent."""

    num_experts: int
    config: DispatchConfig
    #: the preferred alignment of the GPU's kernels.
    gpu_alignment: int
    #: each expert's rows must be a multiple of this.
    row_multiple: int = 1
    #: indices from ``num_experts`` up to this name no expert here; -1: there are none of these.
    total_experts: int = -1
    #: None, because the experts are not distributed.
    group: ClassVar[None] = None

    def __post_init__(self) -> None:
        self.config.check_multiple(self.row_multiple)

    def with_alignment(self, gpu_alignment: int, row_multiple: int) -> LocalTokenDispatcher:
        """Returns a copy with the alignments of another recipe."""
        return replace(self, gpu_alignment=gpu_alignment, row_multiple=row_multiple)

    def run(self, experts: Any, tokens: Tensor, indices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of each token's rows, and the total of :class:`Received`.

        :class:`GroupedMLP` reads the tokens where they lie. Other experts get copies of them.
        """
        slots, probs, total = self.assign(indices, weights)
        if takes_tokens(experts):
            return experts(tokens, slots, probs), total
        rows = ops.permute_rows(tokens, slots.slot, slots.source)
        return ops.unpermute(experts(rows, slots.group_sizes, probs), slots.slot, slots.source), total

    def assign(self, indices: Tensor, weights: Tensor) -> tuple[Slots, Tensor, Tensor]:
        """Returns the rows of each token, the weight of each row, and the total of :class:`Received`."""
        multiple = self.row_multiple
        alignment = self.alignment_of(indices.numel(), indices.is_cuda)
        capacity, weights = self.config.capacity, as_float32(weights)
        if capacity is None and is_tracing():
            assigned = assign_all(indices, weights, self.num_experts, alignment, multiple, self.total_experts)
        else:
            if capacity is None:
                capacity = indices.numel() + self.num_experts * (alignment - 1)
                capacity = -(-capacity // multiple) * multiple
            layout = (0, self.num_experts, capacity, alignment, self.total_experts)
            assigned = ops.assign_weighted_slots(indices, weights, *layout)
        slot, source, sizes, total, probs = assigned
        return Slots(slot, source, sizes), probs, total

    def alignment_of(self, rows: int, on_gpu: bool) -> int:
        """Returns the alignment of each expert's rows, of ``rows`` together."""
        preferred = self.gpu_alignment if on_gpu and not self._are_few(rows) else 1
        return self.config.row_alignment(preferred, self.row_multiple)

    def _are_few(self, rows: int) -> bool:
        """Whether padding would be most of the rows. False where a tracer does not know their number."""
        if is_tracing():
            return False
        if torch.compiler.is_compiling() or isinstance(rows, torch.SymInt):
            # With sympy, which takes longer to import than this package; who compiles has imported it.
            from torch.fx.experimental.symbolic_shapes import statically_known_true

            return statically_known_true(rows < FEW_ROWS * self.num_experts)
        return rows < FEW_ROWS * self.num_experts

    def dispatch(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Received:
        """Copies each token to the rows of its experts."""
        slots, probs, total = self.assign(indices, weights)
        rows = ops.permute_rows(tokens, slots.slot, slots.source)
        return Received(rows, probs, slots.group_sizes, total, slots)

    def combine(self, rows: Tensor, received: Received) -> Tensor:
        """Sums the rows of each token."""
        return ops.unpermute(rows, received.origin.slot, received.origin.source)


class TokenDispatcher:
    """The experts are distributed over a group of ranks. The constructor is collective."""

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
        dtype: torch.dtype,
    ) -> None:
        config.check_multiple(row_multiple)
        if config.max_tokens is None:
            raise ValueError(
                "transformer_plugin::MoE: argument 'dispatch': expected max_tokens with a group of several ranks, "
                "got None. Pass dispatch=DispatchConfig(max_tokens=the largest number of tokens of a rank in one call)."
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
            max_received_tokens=config.max_received_tokens,
            transport=config.transport,
            max_token_dtype=dtype,
            max_num_sms=config.max_num_sms,
            timeout=config.timeout,
            device=None if device is None or torch.device(device).type == "meta" else device,
        )
        self.alignment = self._row_alignment(gpu_alignment, row_multiple)

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks over which the experts are distributed."""
        return self.context.group

    def _row_alignment(self, gpu_alignment: int, row_multiple: int) -> int:
        on_gpu = self.context.device.type == "cuda"
        return self.config.row_alignment(gpu_alignment if on_gpu else 1, row_multiple)

    def with_alignment(self, gpu_alignment: int, row_multiple: int) -> TokenDispatcher:
        """Returns a copy with the alignments of another recipe, the same on every rank. The context stays valid."""
        self.config.check_multiple(row_multiple)
        with_alignment = copy.copy(self)
        with_alignment.alignment = self._row_alignment(gpu_alignment, row_multiple)
        return with_alignment

    def run(self, experts: Any, tokens: Tensor, indices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of each token's rows, and the total of :class:`Received`.

        :class:`GroupedMLP` exchanges the tokens in its own node, in which combining them sums their rows. With a hook
        that may see or change what goes between, it gets the received tokens, each once. Other experts get copies.
        """
        plan = self.plan(indices)
        if takes_tokens(experts) and not _hooks_see(experts, tokens):
            slots, weights = self.context.slots_of(plan, tokens, weights)
            return experts(tokens, slots, weights), plan.total
        expand = not takes_tokens(experts)
        received, probs = self.context.dispatch(plan, tokens, weights, expand=expand)
        sizes = plan.tokens_per_expert
        rows = experts(received, sizes if expand else Slots(plan.slot, plan.source, sizes), probs)
        if not expand:
            # GroupedMLP leaves zeros for tokens that have no row here. A hook may change them, and every rank's rows of
            # them would be summed.
            rows = rows.masked_fill((plan.slot < 0).all(1)[:, None], 0)
        return self.context.combine(plan, rows, expand=expand), plan.total

    def plan(self, indices: Tensor) -> EpPlan:
        """Computes which tokens this rank receives, and the rows of its experts."""
        if is_tracing():
            raise ValueError(
                "transformer_plugin::MoE: argument 'group': expected None under torch.jit.trace, which would record "
                f"the example's number of tokens, got a group of {self.context.num_ranks} ranks. Use torch.export or "
                "torch.compile."
            )
        # Up to K ranks the tokens of all ranks are not more than K copies of one rank's, and are used as they came.
        compact = self.context.num_ranks > self.context.config.num_topk
        return _rows_in_use(self.context.plan(indices, alignment=self.alignment, compact=compact))

    def dispatch(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Received:
        """Sends each token to the ranks of its experts, as rows of the experts."""
        plan = self.plan(indices)
        rows, probs = self.context.dispatch(plan, tokens, weights)
        return Received(rows, probs, plan.tokens_per_expert, plan.total, plan)

    def combine(self, rows: Tensor, received: Received) -> Tensor:
        """Sends the rows back and sums those of each token."""
        return self.context.combine(received.origin, rows)

    def __copy__(self) -> TokenDispatcher:
        """A new object with the same context."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenDispatcher:
        """The same object: a copy of the module uses the same context."""
        return self

    def __reduce__(self) -> NoReturn:
        """Raises: a process group cannot be pickled."""
        raise TypeError(
            "transformer_plugin::MoE: argument 'group': expected a layer without a group when the module itself is "
            f"pickled (as by torch.save of a module), got the group '{self.context.group_name}' of "
            f"{self.context.num_ranks} ranks. Save state_dict(), with torch.distributed.checkpoint if another number "
            "of ranks will load it, and load it into a layer made with the group of the new processes."
        )

    def __repr__(self) -> str:
        return f"TokenDispatcher(rank {self.context.rank} of {self.context.num_ranks}, config={self.config})"


def _hooks_see(experts: torch.nn.Module, tokens: Tensor) -> bool:
    """Whether a hook may see or change what the experts get or return. Those of FSDP2 only cast it, if at all."""
    if experts._backward_pre_hooks or experts._backward_hooks or of_all_modules._has_any_global_hook():
        return True
    hooks = (*experts._forward_pre_hooks.values(), *experts._forward_hooks.values())
    return any(not _passes_on(hook, tokens.dtype) for hook in hooks)


def _passes_on(hook: Any, dtype: torch.dtype) -> bool:
    """Whether a hook is FSDP2's and casts no rows of a dtype. Rows must be sent in the dtype that others have."""
    state = getattr(hook, "__self__", None)
    if not type(state).__module__.startswith("torch.distributed.fsdp"):
        return False
    policy: Any = getattr(state, "_mp_policy", None)
    if policy is None:
        return True
    input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
    return input_dtype in (None, dtype) and policy.output_dtype in (None, dtype)


def _rows_in_use(plan: EpPlan) -> EpPlan:
    """Returns the plan without unused rows where reading their number costs nothing: on a CPU, outside of a graph.

    The worst-case capacity is R times the rows of a balanced routing.
    """
    if (
        torch.compiler.is_compiling()
        or plan.source.device.type != "cpu"
        or is_in_torch_dispatch_mode()  # fake tensors have no values, and tracing would record a constant
    ):
        return plan
    plan = plan._replace(source=plan.source[: int(plan.tokens_per_expert.sum())])
    if plan.received is None:
        return plan
    if plan.received.dim() == 2:  # by records
        return plan._replace(slot=plan.slot[: int(plan.received[0, -1])])
    rows = int(plan.received.ge(0).sum())
    return plan._replace(slot=plan.slot[:rows], received=plan.received[:rows])
