"""Errors of the package that are not plain ``ValueError`` or ``TypeError``."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any

import torch.distributed as dist

__all__ = ["PeerTimeoutError", "peer_errors", "peer_timeout"]

_Base: type[Exception] = dist.DistError if dist.is_available() else RuntimeError

#: The text of the C++ error (``peer_error`` in csrc/distributed/liveness.cpp); torch raises it as ``DistBackendError``.
_TEXT = re.compile(
    r"PeerTimeoutError: (?P<text>transformer_plugin)::(?P<op>\w+): phase '(?P<phase>[^']*)': .*?"
    r"(rank\(s\) (?P<ranks>[\d,]+) did not take part|could not determine the missing ranks|no rank is missing)"
)


class PeerTimeoutError(_Base):  # type: ignore[valid-type, misc]
    """A rank of the group did not take part in an op within the timeout, or has ended.

    Raised on every remaining rank, within the timeout plus 5 seconds. The group cannot be used again; the process, its
    tensors and its other groups can.

    Attributes:
        rank: the missing rank of the group, the lowest if there are several; None if it could not be determined.
        ranks: all missing ranks.
        op: the op that waited, for example ``"dispatch"``.
        phase: what the op waited for, for example ``"tokens"``.
    """

    def __init__(
        self, rank: int | None, op: str, phase: str, message: str | None = None, ranks: tuple[int, ...] = ()
    ) -> None:
        self.rank = rank
        self.op = op
        self.phase = phase
        self.ranks = ranks or (() if rank is None else (rank,))
        self.message = message or f"rank {rank} did not take part in {op} ({phase})"
        super().__init__(self.message)

    def of(self, op: str, phase: str) -> PeerTimeoutError:
        """The same error of a function that waited for other ranks in this op."""
        inner, outer = (
            f"transformer_plugin::{o}: phase '{p}'" for o, p in ((self.op, self.phase), (op, phase))
        )
        return PeerTimeoutError(self.rank, op, phase, self.message.replace(inner, outer, 1), self.ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.op, self.phase, self.message, self.ranks)


def peer_timeout(error: BaseException) -> PeerTimeoutError | None:
    """The :class:`PeerTimeoutError` that the text of a C++ error describes, or None."""
    found = _TEXT.search(str(error))
    if found is None or isinstance(error, PeerTimeoutError):
        return None
    ranks = tuple(int(rank) for rank in found["ranks"].split(",")) if found["ranks"] else ()
    text = str(error)[found.start("text") :]  # tracebacks print the name of the class before it
    return PeerTimeoutError(ranks[0] if ranks else None, found["op"], found["phase"], text, ranks)


def with_peers(op: Any, *arguments: Any, **options: Any) -> Any:
    """Calls an op as in :class:`peer_errors`, which takes the host longer: for layers, whose calls are short."""
    try:
        return op(*arguments, **options)
    except RuntimeError as error:
        raise peer_timeout(error) or error from None


class peer_errors:  # noqa: N801  a context manager, used like a function
    """``with peer_errors(): loss.backward()`` converts torch's error into :class:`PeerTimeoutError`.

    In a backward, in compiled code and in TorchScript the ops raise ``torch.distributed.DistBackendError`` with the
    same text, which is also a ``RuntimeError``.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        named = peer_timeout(error)
        if named is not None:
            raise named from error
