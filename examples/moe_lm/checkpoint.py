"""Checkpoints: one folder per saved step, whole or not there at all.

    OUT/checkpoints/step-00000100/manifest.json   step, config, size and SHA-256 of every file
                                 /rank0.pt ...    what each rank saved; loads with weights_only=True

A folder is written under a temporary name and renamed once every rank's file is on disk. The last two
are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_lm.config import Config, UserError, difference, shortened
from moe_lm.world import World

VERSION = 1
KEPT = 2


def save(out: Path, step: int, config: Config, state: dict[str, Any], world: World) -> None:
    """Saves ``state`` of every rank after ``step`` steps. A collective call."""
    final = out / "checkpoints" / f"step-{step:08d}"
    temporary = final.with_suffix(".tmp")
    if world.first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier(group=world.group)
    path = temporary / f"rank{world.rank}.pt"
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    entries: list[Any] = [None] * world.size
    entry = (path.name, {"bytes": path.stat().st_size, "sha256": _sha256(path)})
    dist.all_gather_object(entries, entry, group=world.group)
    if world.first:
        manifest = {"version": VERSION, "step": step, "config": asdict(config), "files": dict(entries)}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        for old in _folders(out)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier(group=world.group)


def check(out: Path, config: Config) -> Path:
    """The newest checkpoint, every byte of it checked; :class:`UserError` if it cannot be used."""
    folders = _folders(out)
    if not folders:
        raise UserError(
            "argument '--resume'",
            f"a checkpoint under '{out / 'checkpoints'}'",
            "none",
            "Start without --resume, or give the --out of an earlier run.",
        )
    folder = folders[-1]
    manifest = _manifest(folder)
    changed = difference(manifest["config"], config)
    if changed:
        raise UserError(
            "argument '--resume'",
            f"the configuration of '{folder}'",
            "; ".join(changed),
            "Resume with the options of the first run, or start anew in another --out.",
        )
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise _corrupt(folder, f"no file '{name}'")
        try:
            same = path.stat().st_size == entry["bytes"] and _sha256(path) == entry["sha256"]
        except OSError as error:
            raise _corrupt(folder, f"a file '{name}' that cannot be read ({error.strerror})") from None
        if not same:
            raise _corrupt(folder, f"a file '{name}' with other content")
    return folder


def load(folder: Path, world: World) -> tuple[int, dict[str, Any]]:
    """The step and this rank's state from a folder that :func:`check` returned."""
    state = torch.load(folder / f"rank{world.rank}.pt", map_location=world.device, weights_only=True)
    return int(_manifest(folder)["step"]), state


def _folders(out: Path) -> list[Path]:
    found = (out / "checkpoints").glob("step-*")
    return sorted(path for path in found if re.fullmatch(r"step-\d{8}", path.name) and path.is_dir())


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if not path.exists():
        raise _corrupt(folder, "no file 'manifest.json'")
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ValueError
        manifest = json.loads(path.read_text())
        version = manifest["version"]
        parts = {name: manifest[name] for name in ("step", "config", "files")} if version == VERSION else {}
    except (KeyError, TypeError, ValueError, OSError, RecursionError):
        raise _corrupt(folder, "a file 'manifest.json' that cannot be read") from None
    if not parts:
        raise _corrupt(folder, f"version {shortened(str(version))}")
    _check_shape(folder, parts)
    return parts


def _check_shape(folder: Path, manifest: dict[str, Any]) -> None:
    """Refuses what :func:`save` does not write."""
    step, config, files = manifest["step"], manifest["config"], manifest["files"]
    if type(step) is not int or f"step-{step:08d}" != folder.name:
        raise _corrupt(folder, "a file 'manifest.json' of another step")
    if not isinstance(config, dict):
        raise _corrupt(folder, "a file 'manifest.json' without a configuration")
    ranks = config.get("ranks")
    names = {f"rank{rank}.pt" for rank in range(ranks)} if type(ranks) is int and ranks <= 1024 else set()
    if not isinstance(files, dict) or files.keys() != names or not names:
        raise _corrupt(folder, "a file 'manifest.json' that does not list one file for each rank")
    for entry in files.values():
        known = isinstance(entry, dict) and entry.keys() == {"bytes", "sha256"}
        if not known or type(entry["bytes"]) is not int or not isinstance(entry["sha256"], str):
            raise _corrupt(folder, "a file 'manifest.json' without the size and the digest of each file")


def _corrupt(folder: Path, got: str) -> UserError:
    return UserError(
        f"checkpoint '{folder}'",
        "the files that its manifest.json lists, unchanged",
        got,
        "Remove this folder: --resume then takes the checkpoint before it.",
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
