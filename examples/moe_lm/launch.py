"""Starts one process per rank on this machine, and ends all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from torch.distributed import TCPStore

from moe_lm.stopping import INTERRUPTED, LAUNCHER, NEVER, SIGNALS, StopRequest

GRACE = 5.0  # seconds until the other ranks are killed after one has failed or exited
GRACE_AGAIN = 2.0  # seconds until all ranks are killed after a second Ctrl-C


def run_ranks(command: list[str], ranks: int, stop: StopRequest) -> int:
    """Runs ``command`` on each rank, with torchrun's environment. Returns the first exit status that is not 0.

    Signals are forwarded to the ranks, which decide together when to stop. If one fails, the others are stopped.
    """
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # uses a free port, which stays open for the whole run
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
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # ranks inherit this until they have installed handlers
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
    signaled, interrupted_again, status, deadline = False, False, 0, NEVER
    while running := [process for process in processes if process.poll() is None]:
        if stop.requested and not signaled:
            signaled = _signal_all(running, stop.number)
        if status == 0 and (failed := next((p for p in processes if p.returncode not in (None, 0)), None)):
            status, deadline = failed.returncode, time.monotonic() + GRACE
            signaled = signaled or _signal_all(running, signal.SIGTERM)
        if stop.again and not interrupted_again:
            interrupted_again = _signal_all(running, signal.SIGINT)
            deadline = min(deadline, time.monotonic() + GRACE_AGAIN)
        if time.monotonic() > deadline:
            status = status or INTERRUPTED
            break
        time.sleep(0.05)
    status = status or next((p.returncode for p in processes if p.returncode), 0)
    return _as_exit_status(status, processes, stop)


def _signal_all(processes: list[subprocess.Popen[bytes]], number: int) -> bool:
    for process in processes:
        process.send_signal(number)
    return True


def _as_exit_status(status: int, processes: list[subprocess.Popen[bytes]], stop: StopRequest) -> int:
    if status >= 0:
        return status
    if stop.requested:
        return INTERRUPTED
    rank = next(i for i, process in enumerate(processes) if process.returncode == status)
    print(f"train_moe: rank {rank} was killed by {signal.Signals(-status).name}", file=sys.stderr)
    return 1
