"""Starts one process per rank on this machine, and leaves none behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from torch.distributed import TCPStore

from moe_lm.stopping import INTERRUPTED, LAUNCHER, NEVER, SIGNALS, StopRequest

GRACE = 5.0  # seconds that the other ranks have once one has failed or left,
GRACE_AGAIN = 2.0  # and that all have after a second Ctrl-C


def run_ranks(command: list[str], ranks: int, stop: StopRequest) -> int:
    """Runs ``command`` on each rank, with the environment that torchrun gives. Returns the first status that is not 0.

    A signal is handed on to the ranks, which decide together when to stop. When one fails the others are stopped.
    """
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # a free port, held for the whole run
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the ranks are clients of this store
        "TORCHELASTIC_RESTART_COUNT": "0",
        LAUNCHER: str(os.getpid()),
    }
    stop.during("the run", NEVER)
    processes: list[subprocess.Popen[bytes]] = []
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a rank inherits this until it can hear them
    try:
        for rank in range(ranks):
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=environment))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return _wait(processes, stop)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], stop: StopRequest) -> int:
    told, told_again, status, deadline = False, False, 0, NEVER
    while running := [process for process in processes if process.poll() is None]:
        if stop.requested and not told:
            told = _tell(running, stop.number)
        if status == 0 and (failed := next((p for p in processes if p.returncode not in (None, 0)), None)):
            status, deadline = failed.returncode, time.monotonic() + GRACE
            told = told or _tell(running, signal.SIGTERM)
        if stop.again and not told_again:
            told_again = _tell(running, signal.SIGINT)
            deadline = min(deadline, time.monotonic() + GRACE_AGAIN)
        if time.monotonic() > deadline:
            status = status or INTERRUPTED
            break
        time.sleep(0.05)
    status = status or next((p.returncode for p in processes if p.returncode), 0)
    return _as_exit_status(status, processes, stop)


def _tell(processes: list[subprocess.Popen[bytes]], number: int) -> bool:
    for process in processes:
        process.send_signal(number)
    return True


def _as_exit_status(status: int, processes: list[subprocess.Popen[bytes]], stop: StopRequest) -> int:
    if status >= 0:
        return status
    if stop.requested:
        return INTERRUPTED
    rank = next(i for i, process in enumerate(processes) if process.returncode == status)
    print(f"train_moe: rank {rank} was ended by {signal.Signals(-status).name}", file=sys.stderr)
    return 1
