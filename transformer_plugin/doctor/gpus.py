"""The GPUs: what driver and torch say of them, and whether they reach each other's memory. Standard library alone."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from transformer_plugin.doctor import child
from transformer_plugin.doctor.report import Section

OF_DRIVER = str(Path(__file__).with_name("_of_driver.py"))
OF_TORCH = str(Path(__file__).with_name("_of_torch.py"))
PACKAGE = "transformer_plugin.doctor.package"


def _text(numbers: list[int]) -> str:
    return ".".join(map(str, numbers))


def driver(answer: child.Answer) -> tuple[Section, dict[str, Any]]:
    """The section of the driver and its GPUs, and what it says."""
    section = Section("driver and GPUs")
    if answer.error:
        todo = "Run nvidia-smi: if it fails too, the driver has to be repaired or the machine started again."
        section.failed("CUDA driver", answer.error, todo)
        return section, {"found": False, "cuda": [0, 0], "error": "", "devices": []}
    facts: dict[str, Any] = answer.result
    if not facts["found"]:
        section.no("CUDA driver", "none here, so no GPU")
        return section, facts
    value = (
        f"{facts['version'] or 'version unknown'}, for programs of CUDA {_text(facts['cuda'])} and earlier"
    )
    if facts["error"]:
        todo = "Run nvidia-smi; in a container, its driver libraries must be those of the host."
        section.failed("CUDA driver", f"{value}; it does not start: {facts['error']}", todo)
        return section, facts
    section.ok("CUDA driver", value)
    for i, device in enumerate(facts["devices"]):
        gib = device["bytes"] / 2**30
        capability = _text(device["capability"])
        section.ok(f"GPU {i}", f"{device['name']}, compute capability {capability}, {gib:.1f} GiB")
    if not facts["devices"]:
        section.no("GPUs", "none that this process may use")
    return section, facts


def torch_and_gpus(facts: dict[str, Any], of_driver: dict[str, Any], section: Section) -> None:
    """Whether torch can use the GPUs that the driver has."""
    gpus, cuda, needed = len(of_driver["devices"]), facts["cuda"], facts["cuda"] or ""
    major = int(needed.split(".")[0]) if needed else 0
    if not cuda:
        if gpus:
            section.no(
                "GPUs of torch", "none: it was built without CUDA", "Install a torch with CUDA to use GPUs."
            )
    elif of_driver["found"] and of_driver["cuda"][0] < major and of_driver["cuda"][0]:
        section.failed(
            "GPUs of torch",
            f"none: the driver serves CUDA {_text(of_driver['cuda'])}, and torch was built with CUDA {cuda}",
            f"Install a driver for CUDA {major}, or a torch that was built with CUDA {of_driver['cuda'][0]}.",
        )
    elif gpus and facts["devices"] == 0:
        todo = "Make `python -c 'import torch; torch.cuda.init()'` work: it is torch and the driver alone."
        section.failed("GPUs of torch", f"none of {gpus}: {facts['error'] or 'it does not say why'}", todo)
    elif gpus:
        section.ok("GPUs of torch", str(facts["devices"]))


def _access(section: Section, seconds: float) -> None:
    answer = child.ask(seconds, OF_TORCH, "peer_access")
    if answer.error:
        todo = "Run nvidia-smi topo -p2p r, and look for errors of the driver in dmesg."
        section.failed("peer access", answer.error, todo)
        return
    matrix: list[list[bool]] = answer.result
    for i, row in enumerate(matrix):
        others = [j for j in range(len(row)) if j != i]
        reached = [str(j) for j in others if row[j]]
        value = f"GPUs {', '.join(reached) or 'none'} (of {len(others)} others)"
        if len(reached) == len(others):
            section.ok(f"GPU {i} accesses", value)
        else:
            section.no(f"GPU {i} accesses", value)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def between(gpus: int, seconds: float, has_kernels: bool) -> Section:
    """Whether GPUs reach each other's memory: what the driver says, and what happens."""
    section = Section("between GPUs")
    if gpus < 2:
        section.no("peer access", f"nothing to try with {gpus or 'no'} GPU{'s' * (gpus == 0)}")
        return section
    _access(section, seconds)
    if not has_kernels:
        section.no("symmetric memory", "not tried without CUDA kernels that can be imported")
        return section
    port = _free_port()
    limit = max(1.0, seconds * 0.75)  # less than the processes have, so that they say who is missing
    tasks = [(PACKAGE, "shared_memory", f"cuda:{rank}", rank, gpus, port, limit) for rank in range(gpus)]
    answers = child.ask_all(seconds, tasks)
    errors = [f"rank {rank}: {each.error}" for rank, each in enumerate(answers) if each.error]
    if errors:
        todo = "Experts over ranks work with EpContext(transport='all_gather') meanwhile; report a bug with this."
        section.failed("symmetric memory", "; ".join(dict.fromkeys(errors)), todo)
        return section
    works, reason = answers[0].result
    if works:
        section.ok("symmetric memory", f"{gpus} GPUs write and read each other's memory")
    else:
        section.no("symmetric memory", f"{reason}; experts over ranks use the transport all_gather")
    return section
