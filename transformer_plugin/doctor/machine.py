"""The system: Python, operating system, processor. Standard library alone."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

from transformer_plugin.doctor.report import Section

#: Instructions that change which kernels run, or their speed.
_INSTRUCTIONS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_fp16",
    "sve",
    "bf16",
    "i8mm",
)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _processor(cpuinfo: str) -> str:
    """The name of the processor and its instructions, of /proc/cpuinfo."""
    name = re.search(r"^(?:model name|Model|CPU part)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    own = set(flags[1].split()) if flags else set()
    return f"{name[1] if name else 'unknown'}, with {' '.join(i for i in _INSTRUCTIONS if i in own) or 'no AVX2'}"


def machine() -> Section:
    """What the standard library says."""
    section = Section("machine")
    section.ok(
        "Python", f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}"
    )
    release = re.search(r'^PRETTY_NAME="?(.*?)"?$', _text("/etc/os-release"), re.MULTILINE)
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform == "linux":
        section.ok("system", f"{release[1] if release else 'unknown distribution'}, {system}")
        section.ok("C library", " ".join(platform.libc_ver()).strip() or "not glibc")
        memory = re.search(r"^MemTotal:\s*(\d+)", _text("/proc/meminfo"), re.MULTILINE)
        cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable"
        gib = f", {int(memory[1]) / 2**20:.0f} GiB of memory" if memory else ""
        section.ok("processor", f"{_processor(_text('/proc/cpuinfo'))}; {cores}{gib}")
    else:
        section.failed("system", system, "Use Linux, where alone this package runs.")
    return section
