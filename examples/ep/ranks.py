"""Starts the ranks of the programs in this folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import TCPStore

#: What a rank computes: whether its results are right.
Main = Callable[[torch.device], bool]
#: The number of ranks without a launcher.
RANKS = 2


def run(main: Main) -> NoReturn:
    """Calls ``main(device)`` on each rank, and ends with status 1 if it returns False on one of them.

    The ranks are those of torchrun, or two new processes. Each has a GPU if there is one for every rank.
    """
    if "RANK" in os.environ:
        sys.exit(_status(main))
    # This process hosts the store, on a free port that stays open.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # A forked process has torch already, but CUDA does not work in it.
    method = "spawn" if torch.cuda.device_count() >= RANKS else "fork"
    try:
        mp.start_processes(_start, (main, store.port), RANKS, start_method=method)
    except mp.ProcessExitedException as error:  # the rank has printed why
        sys.exit(error.exit_code)
    sys.exit(0)


def _start(rank: int, main: Main, port: int) -> None:
    """The main function of a process: gets the environment that torchrun would give it."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the ranks are clients of the store
    )
    sys.exit(_status(main))


def _status(main: Main) -> int:
    """Joins the group of all ranks and runs ``main``. All ranks return the same."""
    local_rank, local_size = (int(os.environ.get(name, 0)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    device = torch.device("cpu")
    if torch.cuda.device_count() >= max(1, local_size):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)  # before the first collective
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    wrong = torch.tensor(0 if main(device) else 1, device=device)
    dist.all_reduce(wrong)
    status = min(1, int(wrong))
    dist.destroy_process_group()
    return status


def show(text: str) -> None:
    """Prints on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)
