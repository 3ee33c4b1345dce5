"""Ranks for tests: processes that are reused by many cases.

``RankPool(4)`` starts four processes with a Gloo (or NCCL) group. ``pool.run(function, *arguments)`` calls
``function(rank, *arguments)`` on every rank, where ``rank`` is a :class:`Rank`, and returns the results in order. The
parent process hosts the store, as torchrun's agent does, unless a test puts it into rank 0.

If a rank fails in ``run``, all processes are ended, so that no rank waits for it, and the next call starts new ones.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

#: Modules that ranks have from the process that they are forked from: importing them takes seconds.
_IMPORTED_ONCE = [
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformer_plugin.nn",
    "transformer_plugin.parallel",
]
#: Likewise, where there is no GPU: importing them asks CUDA for its devices, which a forked process cannot use then.
_IMPORTED_ONCE_ON_CPU = [
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
]

#: Seconds that the other ranks have to answer after one has failed. Most errors are those of all ranks.
_GRACE = 1.0

#: Held while exit codes are read. Python reads those of all children when it starts one, and of two threads that read
#: one code at the same time, the second gets 255.
_reading_exit_codes = threading.Lock()


@dataclass(frozen=True)
class Rank:
    """The rank, group size and device of a process; the first argument of functions that a pool runs."""

    rank: int
    size: int
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all ranks of the pool."""
        group = dist.group.WORLD
        assert group is not None
        return group

    @property
    def group_name(self) -> str:
        """The c10d name of that group."""
        return self.group.group_name


def _nothing(rank: Rank) -> None:
    pass


class RankError(AssertionError):
    """An error on a rank; the text contains its traceback."""


class RankPool:
    """Processes that form one group. Close the pool, or use it as a context manager."""

    def __init__(
        self,
        size: int,
        backend: str = "gloo",
        group_timeout: float = 120.0,
        store_in_rank_0: bool = False,
        prepare: Callable[..., Any] = _nothing,
    ) -> None:
        self.size = size
        self.backend = backend
        self._options = (backend, group_timeout, store_in_rank_0)
        self._prepare = prepare  # what each new process calls first
        self._pipes: list[Any] = []
        self.processes: list[Any] = []
        self._begin(*self._options)

    def _begin(self, backend: str, group_timeout: float, store_in_rank_0: bool) -> None:
        """Starts the processes, which form a new group."""
        size = self.size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            _IMPORTED_ONCE + ([] if torch.cuda.device_count() else _IMPORTED_ONCE_ON_CPU)
        )
        # The parent's store chooses a free port. With the store in rank 0, only the port number is taken from it.
        self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port = self._store.port
        if store_in_rank_0:
            del self._store
        for rank in range(size):
            ours, theirs = context.Pipe()
            place = (rank, size, backend, port, group_timeout, store_in_rank_0)
            process = context.Process(target=_serve, args=(theirs, *place), daemon=True)
            with _reading_exit_codes:
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        self._send(self._prepare)
        self._results(120.0)

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Starts ``function(rank, *arguments)`` on every rank, without waiting.

        On new processes after a failed run, or if one has ended.
        """
        with _reading_exit_codes:
            alive = [process.is_alive() for process in self.processes]
        if not all(alive):
            self._end()
        if not self.processes:
            self._begin(*self._options)
        self._send(function, *arguments)

    def _send(self, function: Callable[..., Any], *arguments: Any) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # result() tells how the process has ended
                pipe.send((function, arguments))

    def result(self, rank: int, timeout: float = 120.0) -> Any:
        """Returns one rank's result. Raises :class:`RankError` if it raised, exited, or does not answer in time."""
        pipe = self._pipes[rank]
        if not pipe.poll(timeout):
            raise RankError(f"rank {rank} did not answer within {timeout} s")
        try:
            raised, value = pipe.recv()
        except EOFError:
            raise RankError(f"rank {rank} exited with code {self.wait(rank)}") from None
        if raised:
            raise RankError(f"rank {rank} raised:\n{value}")
        return value

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
        """Calls ``function(rank, *arguments)`` on every rank and returns the results in order.

        Raises :class:`RankError` with the errors of all ranks. The processes are then ended, a second after the first
        error, and the next call runs on new ones.
        """
        self.start(function, *arguments)
        return self._results(timeout)

    def _results(self, timeout: float) -> list[Any]:
        """The results of all ranks. Ends the processes and raises if there is an error."""
        outcomes = self._outcomes(timeout)
        errors = [str(outcome) for outcome in outcomes if isinstance(outcome, RankError)]
        if errors:
            self._end()
            raise RankError("\n\n".join(errors))
        return outcomes

    def _outcomes(self, timeout: float) -> list[Any]:
        """The results of all ranks, or their errors. After a first error the others have little time to answer."""
        found: dict[int, Any] = {}
        end, reason = time.monotonic() + timeout, f"did not answer within {timeout} s"
        while len(found) < self.size:
            waiting = {self._pipes[rank]: rank for rank in range(self.size) if rank not in found}
            ready: list[Any] = multiprocessing.connection.wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                break
            for rank in sorted(waiting[pipe] for pipe in ready):
                try:
                    found[rank] = self.result(rank)
                except RankError as error:
                    found[rank] = error
                    end, reason = min(end, time.monotonic() + _GRACE), f"was ended, as rank {rank} had failed"
        late = {rank: RankError(f"rank {rank} {reason}") for rank in range(self.size) if rank not in found}
        return [{**found, **late}[rank] for rank in range(self.size)]

    def kill(self, rank: int) -> None:
        """Kills one rank's process."""
        self.processes[rank].kill()

    def stop(self, rank: int) -> None:
        """Suspends one rank's process with SIGSTOP."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

    def wait(self, rank: int, timeout: float = 30.0) -> int | None:
        """Waits for a rank's process to end; returns its exit code, or None if it still runs."""
        return _exit_code(self.processes[rank], timeout)

    def dismiss(self) -> None:
        """Signals the processes to destroy their group and exit; call :meth:`wait` for each afterwards."""
        for pipe in self._pipes:
            pipe.close()

    def _end(self) -> None:
        """Kills all processes."""
        for process in self.processes:
            process.kill()
        self.close()
        self._pipes, self.processes = [], []

    def close(self) -> None:
        """Ends all processes: asks them to exit, then kills those that still run."""
        self.dismiss()
        for process in self.processes:
            if _exit_code(process, 0.1 if _stopped(process.pid) else 10.0) is None:
                process.kill()
                _exit_code(process, None)
            process.join()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _exit_code(process: Any, timeout: float | None) -> int | None:
    """Waits for a process to end; returns its exit code, or None if it still runs."""
    multiprocessing.connection.wait([process.sentinel], timeout)
    with _reading_exit_codes:
        return process.exitcode


def _stopped(pid: int | None) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _serve(
    pipe: Any, rank: int, size: int, backend: str, port: int, group_timeout: float, store_in_rank_0: bool
) -> None:
    """The main function of one process: joins the group and runs what the pipe sends until the pipe closes."""
    gc.freeze()  # collections leave out the imported modules, which live to the end
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    is_host = store_in_rank_0 and rank == 0
    store = TCPStore("127.0.0.1", port, None, is_host, wait_for_workers=False)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=group_timeout)
    )
    place = Rank(rank, size, device)
    while True:
        try:
            function, arguments = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            answer = (False, function(place, *arguments))
        except BaseException:
            answer = (True, traceback.format_exc())
        pipe.send(answer)
    dist.destroy_process_group()
