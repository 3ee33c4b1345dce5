"""Errors of the package that are not plain ``ValueError`` or ``TypeError``."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any

import torch.distributed as dist

_Base: type[Exception] = dist.DistError if dist.is_available() else RuntimeError

#: The text of the C++ side (csrc/distributed/liveness.cpp); torch shows it as ``DistBackendError``.
_TEXT = re.compile(
    r"PeerTimeoutError: transformer_plugin::(?P<op>\w+): phase '(?P<phase>[^']*)': .*?rank\(s\) (?P<ranks>[\w,]+)"
)


class PeerTimeoutError(_Base):  # type: ignore[valid-type, misc]
    """A rank of the group did not take part in an op within its timeout, or is gone.

    Raised on every surviving rank, within the timeout plus 5 seconds. The group cannot be used again; this process,
    its tensors and its other groups can.

    Attributes:
        rank: the rank of the group that is missing, the lowest of them; None if it could not be determined.
        ranks: all ranks that are missing.
        op: the op that waited, ``"dispatch"`` for one.
        phase: what it waited for, ``"tokens"`` for one.
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

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.op, self.phase, self.message, self.ranks)


def peer_timeout(error: BaseException) -> PeerTimeoutError | None:
    """The :class:`PeerTimeoutError` that ``error`` carries from C++ in its text, or None."""
    found = _TEXT.search(str(error))
    if found is None or isinstance(error, PeerTimeoutError):
        return None
    named = found["ranks"]
    ranks = () if named in ("unknown", "none") else tuple(int(rank) for rank in named.split(","))
    text = str(error)[found.start() :]
    return PeerTimeoutError(ranks[0] if ranks else None, found["op"], found["phase"], text, ranks)


class peer_errors:  # noqa: N801  a context manager, used like a function
    """``with peer_errors(): loss.backward()`` raises :class:`PeerTimeoutError` where torch raises its own error.

    An op that runs inside a backward, in compiled code or in TorchScript raises ``torch.distributed.DistBackendError``
    with the same text. Without this context that error is not converted; it is a ``RuntimeError`` too.
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
