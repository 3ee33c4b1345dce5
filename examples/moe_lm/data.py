"""Text as bytes: reading it, splitting it, and drawing batches that depend on (seed, step, rank) alone."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_lm.config import UserError

#: folders of the standard library that are not its source, or are mostly tables.
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
    """Two texts, uint8, and where they came from."""

    train: Tensor
    validation: Tensor
    source: str


def load_corpus(text: str | None, limit: int, shortest: int) -> Corpus:
    """Reads up to ``limit`` bytes and holds back about a twentieth for validation.

    Args:
        text: a file or a folder; None: the source of this Python's standard library.
        limit: bytes to take, whole files in sorted order.
        shortest: bytes that each of the two parts needs at least.
    """
    root = Path(sysconfig.get_path("stdlib")) if text is None else Path(text)
    if root.is_dir():
        pieces, skipped = _read_folder(root, limit, pattern="*.py" if text is None else "*")
        source = f"{len(pieces)} files of {root}" + (
            f" ({skipped} that are not text skipped)" if skipped else ""
        )
    else:
        pieces, source = [_read_file(root)[:limit]], str(root)
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


def _is_text(content: bytes) -> bool:
    if b"\0" in content:
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _read_file(path: Path) -> bytes:
    if not path.exists():
        raise UserError(
            "argument '--text'", "a file or a folder", f"'{path}', which does not exist", "Check the path."
        )
    content = path.read_bytes()
    if not content.strip():
        raise UserError(
            "argument '--text'", "a file with text", f"'{path}', which is empty", "Give another file."
        )
    if not _is_text(content):
        raise UserError(
            "argument '--text'",
            "UTF-8 text",
            f"'{path}', which is not",
            "Give a text file, or convert it to UTF-8.",
        )
    return content


def _read_folder(root: Path, limit: int, pattern: str) -> tuple[list[bytes], int]:
    pieces, total, skipped = [], 0, 0
    for path in sorted(root.rglob(pattern), key=lambda path: path.relative_to(root).parts):
        if SKIPPED.intersection(path.relative_to(root).parts) or not path.is_file():
            continue
        content = path.read_bytes()
        if not _is_text(content):
            skipped += 1
        elif content.strip():
            pieces.append(content[: limit - total])
            total += len(pieces[-1])
        if total >= limit:
            break
    if not pieces:
        raise UserError(
            "argument '--text'",
            "a folder with text files",
            f"'{root}', which has none",
            "Give another folder.",
        )
    return pieces, skipped


def _split(pieces: list[bytes]) -> tuple[bytes, bytes]:
    """Whole files for validation where there are enough; otherwise the end of the text."""
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
    """Random windows: inputs and the bytes that follow them, int64 ``[batch_size, seq_len]`` each.

    The windows are a function of the arguments alone, so a resumed run sees the data it would have seen.
    """
    generator = torch.Generator().manual_seed(((seed * 1_000_003 + step) * 4099 + rank) % 2**63)
    starts = torch.randint(len(text) - seq_len, (batch_size, 1), generator=generator)
    windows = text[starts + torch.arange(seq_len + 1)].long().to(device, non_blocking=True)
    return windows[:, :-1], windows[:, 1:]
