"""The files of the package: which libraries there are, and for what they were built. Standard library alone."""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path

from transformer_plugin._torch_versions import BUILD, described
from transformer_plugin.doctor.report import Section

FOLDER = Path(__file__).resolve().parent.parent

#: nvcc puts the code for GPUs into "fat binaries": a header, then an entry for each architecture.
_FAT_BINARY = struct.Struct("<IHHQ")  # magic number, version, size of the header, size of the entries
_ENTRY = struct.Struct(
    "<HHIQIIHHI"
)  # kind, -, size of the header, size of the code, -, -, -, -, architecture
_MAGIC, _CODE = 0xBA55ED50, 2  # a kind of 1 is PTX
_FLAGS = struct.Struct("<Q")  # of an entry, at byte 40
_ONE_ARCHITECTURE = 1 << 20  # the "a" of 9.0a: instructions that later architectures do not have


def architectures(library: Path) -> list[str]:
    """The architectures that a library has code for, such as ``["9.0a"]``."""
    found = set()
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(struct.pack("<I", _MAGIC))
        while 0 <= at <= len(data) - _FAT_BINARY.size:
            _, _, header, size = _FAT_BINARY.unpack_from(data, at)
            end = min(at + header + size, len(data))
            entry = at + header
            while entry + 48 <= end:
                kind, _, own_header, own_size, *_, number = _ENTRY.unpack_from(data, entry)
                if kind not in (1, _CODE) or not 48 <= own_header <= 4096:
                    break  # bytes that look like a header
                if kind == _CODE:
                    suffix = "a" if _FLAGS.unpack_from(data, entry + 40)[0] & _ONE_ARCHITECTURE else ""
                    found.add((number, suffix))
                entry += own_header + own_size
            at = data.find(struct.pack("<I", _MAGIC), at + 4)
    return [f"{number // 10}.{number % 10}{suffix}" for number, suffix in sorted(found)]


def libraries() -> dict[str, list[str]]:
    """The architectures of each library of kernels, by its name."""
    return {path.name: _architectures(path) for path in sorted(FOLDER.glob("_kernels.cu*.so"))}


def _architectures(path: Path) -> list[str]:
    try:
        return architectures(path)
    except (OSError, ValueError):  # of a file that is empty or not readable
        return []


def installation(version: str) -> Section:
    """What lies in the folder of the package."""
    section = Section("package")
    kind = "source tree" if (FOLDER.parent / "setup.py").exists() else "installed"
    section.ok("transformer_plugin", f"{version}, {kind}: {FOLDER}")
    ops = sorted(path for path in FOLDER.glob("_C.torch*.so") if described(path.name))
    for path in ops:
        section.ok(path.name, f"ops for {described(path.name)}{_size(path)}")
    for name, found in libraries().items():
        major = re.sub(r"\D", "", name)
        value = f"kernels for CUDA {major}, compute capability {' '.join(found) or 'unknown'}{_size(FOLDER / name)}"
        section.ok(name, value)
    if not ops:
        section.failed("libraries", f"found none in {FOLDER}", f"Build one: {BUILD}.")
    elif not libraries():
        section.no("kernels", "none: this was built without CUDA, and runs on CPUs")
    return section


def _size(path: Path) -> str:
    try:
        return f", {path.stat().st_size / 2**20:.1f} MiB"
    except OSError as error:
        return f", {error.strerror}"
