"""Text as bytes: reading and splitting it, and drawing batches that depend only on (seed, step, rank)."""

from __future__ import annotations

import codecs
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_lm.limits import UserError, option

#: folders of the standard library that are skipped: not its source, or mostly tables.
SKIPPED = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "__pycache__",
}
SKIPPED |= {"pydoc_data", "encodings", "turtledemo"}
VALIDATION_EVERY = 20


@dataclass(frozen=True)
class Corpus:
    """Two texts (uint8) for training and validation, and a description of their source."""

    train: Tensor
    validation: Tensor
    source: str


def load_corpus(text: str | None, limit: int, shortest: int, out: str | None = None) -> Corpus:
    """Reads up to ``limit`` bytes and sets about a twentieth aside for validation.

    Args:
        text: a file or a folder; None: the source of this Python's standard library.
        limit: bytes to use, whole files in sorted order. No more is read.
        shortest: the least number of bytes of each of the two parts.
        out: the run's folder, whose files are excluded even if ``text`` contains it.
    """
    root = Path(sysconfig.get_path("stdlib") if text is None else text)
    if text != "" and os.path.isdir(root):
        pieces, skipped = _read_folder(root, limit, ".py" if text is None else "", _results(out))
        source = f"{len(pieces)} files of {root}{skipped}"
    else:
        pieces, source = [_read_file(root if text else None, limit)], str(root)
    train, validation = _split(pieces)
    for part, name in ((train, "training"), (validation, "validation")):
        if len(part) < shortest:
            raise UserError(
                "argument '--text'",
                f"at least {shortest} bytes of {name} text",
                f"{len(part)} bytes from {source}",
                "Give more text, or lower --seq-len.",
            )
    return Corpus(_tensor(train), _tensor(validation), source)


def _is_text(content: bytes, cut: bool) -> bool:
    """Whether ``content`` is UTF-8 without zero bytes. If it was ``cut``, its last character may be incomplete."""
    if b"\0" in content:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content, final=not cut)
    except UnicodeDecodeError:
        return False
    return True


def _refused(expected: str, got: str, do: str) -> UserError:
    return UserError(option("text"), expected, got, do)


def _read(path: Path, limit: int) -> tuple[bytes, bool]:
    """Returns the first ``limit`` bytes of a regular file, and whether it has more. Never blocks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _refused("a file or a folder", f"'{path}', a pipe or a device", "Copy its text to a file.")
        content = file.read(limit)
        return content, len(content) == limit and bool(file.read(1))


def _read_file(path: Path | None, limit: int) -> bytes:
    if path is None:
        raise _refused("a file or a folder", "''", "Leave it out for the standard library of this Python.")
    try:
        content, cut = _read(path, limit)
    except FileNotFoundError:
        raise _refused("a file or a folder", f"'{path}', which does not exist", "Check the path.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, UserError):
            raise
        raise _refused("a file that can be read", f"'{path}': {reason}", "Check the path.") from None
    if not content.strip():
        raise _refused("a file with text", f"'{path}', which is empty", "Give another file.")
    if not _is_text(content, cut):
        raise _refused("UTF-8 text", f"'{path}', which is not", "Give a text file, or convert it to UTF-8.")
    return content


def _results(out: str | None) -> set[str]:
    """Returns the folders of this run and the previous one."""
    return set() if out is None else {os.path.realpath(out), os.path.realpath(out) + ".previous"}


def _walk(folder: Path, without: set[str]) -> Iterator[Path]:
    """Yields the files under ``folder``, sorted by the parts of their paths. It does not follow links to folders."""
    if without and os.path.realpath(folder) in without:
        return
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return  # an unreadable folder counts as empty
    for entry in found:
        if entry.name in SKIPPED:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(folder / entry.name, without)
        else:
            yield folder / entry.name


def _read_folder(root: Path, limit: int, ending: str, without: set[str]) -> tuple[list[bytes], str]:
    pieces: list[bytes] = []
    total = binary = closed = 0
    for path in _walk(root, without):
        if total >= limit:
            break
        if not path.name.endswith(ending) or not path.is_file():
            continue
        try:
            content, cut = _read(path, limit - total)
        except (OSError, UserError):
            closed += 1
            continue
        if not _is_text(content, cut):
            binary += 1
        elif content.strip():
            pieces.append(content)
            total += len(content)
    if not pieces:
        raise _refused("a folder with text files", f"'{root}', which has none", "Give another folder.")
    skipped = [f"{binary} that are not text"] * (binary > 0) + [f"{closed} that cannot be read"] * (
        closed > 0
    )
    return pieces, f" ({', '.join(skipped)} skipped)" if skipped else ""


def _split(pieces: list[bytes]) -> tuple[bytes, bytes]:
    """Splits off whole files for validation if there are enough; otherwise the end of the text."""
    if len(pieces) >= VALIDATION_EVERY:
        held = pieces[VALIDATION_EVERY // 2 :: VALIDATION_EVERY]
        kept = [piece for i, piece in enumerate(pieces) if i % VALIDATION_EVERY != VALIDATION_EVERY // 2]
        return b"\n".join(kept), b"\n".join(held)
    whole = b"\n".join(pieces)
    cut = len(whole) - len(whole) // VALIDATION_EVERY
    return whole[:cut], whole[cut:]


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def draw_batch(
    text: Tensor, batch_size: int, seq_len: int, *, seed: int, step: int, rank: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Draws random windows: inputs and the bytes that follow them, int64 ``[batch_size, seq_len]`` each.

    The windows of all ranks depend only on seed and step, so a resumed run sees the same data, even if another number
    of ranks shares them.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    first = rank * batch_size
    starts = torch.randint(len(text) - seq_len, (first + batch_size, 1), generator=generator)[first:]
    windows = text[starts + torch.arange(seq_len + 1)].long().to(device, non_blocking=True)
    return windows[:, :-1], windows[:, 1:]
