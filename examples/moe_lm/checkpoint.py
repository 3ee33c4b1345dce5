"""Checkpoints of ``torch.distributed.checkpoint``: one folder per saved step, which is complete or does not exist.

    OUT/checkpoints/step-00000100/manifest.json           step, config, size and SHA-256 of every other file
                                 /.metadata, __0_0.distcp, ...   torch's: every weight once, readable by any rank count

A folder is written under a temporary name and renamed when the files of all ranks are on disk. The last two are kept.
torch's files contain pickles: resume only from checkpoints that you trust.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

from moe_lm.config import SHARED_OUT, Config, difference
from moe_lm.folder import checkpoints, is_saved, newest_checkpoint
from moe_lm.limits import UserError, option, shortened
from moe_lm.world import World

VERSION = 2
KEPT = 2
FILES = re.compile(r"\.metadata|__\d+_\d+\.distcp")


def save(out: Path, step: int, config: Config, state: Stateful, world: World) -> None:
    """Saves ``state`` after ``step`` steps. A collective call, which succeeds on all ranks or on none."""
    final = out / "checkpoints" / f"step-{step:08d}"
    temporary = final.with_suffix(".tmp")
    with world.together(), _one_line_errors(final):
        if world.first:
            temporary.mkdir(parents=True)
    with world.together(), _one_line_errors(final):
        try:
            dcp.save({"trainer": state}, storage_writer=_Writer(temporary), process_group=world.group)
            if world.first:  # all ranks have written
                files = {path.name: _entry(path) for path in temporary.iterdir()}
                manifest = {"version": VERSION, "step": step, "config": asdict(config), "files": files}
                (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
                temporary.rename(final)
        except BaseException:
            if world.first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
    if world.first:
        for old in checkpoints(out)[:-KEPT]:
            if is_saved(old):
                shutil.rmtree(old, ignore_errors=True)


class _Writer(dcp.FileSystemWriter):
    """Raises the disk's error. torch.save instead raises a RuntimeError about the position in the file."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None


@contextmanager
def _one_line_errors(folder: Path) -> Iterator[None]:
    """Context that turns errors of writing a checkpoint into one line."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        raise UserError(
            f"checkpoint '{folder}'",
            "a complete write",
            shortened(_cause(error), 300),
            "Free some space, or give another --out; the earlier checkpoints are complete.",
        ) from None


def _cause(error: BaseException) -> str:
    """Describes the cause of a failed write, with the rank on which it occurred."""
    if isinstance(error, CheckpointException):
        rank, (error, _) = next(iter(error.failures.items()))
        return f"on rank {rank}: {_cause(error)}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: '{error.filename}'" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def check(out: Path, config: Config) -> Path:
    """Returns the newest checkpoint after verifying every byte; raises :class:`UserError` if it cannot be used."""
    folder = newest_checkpoint(out)
    manifest = _manifest(folder)
    changed = difference(manifest["config"], config)
    if changed:
        raise UserError(
            "argument '--resume'",
            f"the configuration of '{folder}'",
            "; ".join(changed),
            "Resume with the options of the first run, or start anew in another --out.",
        )
    if config.steps < manifest["step"]:
        expected, do = f"at least {manifest['step']}, as many as '{folder}' has", "Raise it, or leave it out."
        raise UserError(option("steps"), expected, str(config.steps), do)
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise _corrupt(folder, f"no file '{name}'")
        try:
            same = _entry(path) == entry
        except OSError as error:
            raise _corrupt(folder, f"a file '{name}' that cannot be read ({error.strerror})") from None
        if not same:
            raise _corrupt(folder, f"a file '{name}' with other content")
    return folder


def load(folder: Path, state: Stateful, world: World) -> int:
    """Loads a folder that :func:`check` returned into ``state``; returns the step. A collective call."""
    with world.together():
        try:
            dcp.load({"trainer": state}, checkpoint_id=folder, process_group=world.group)
        except CheckpointException as error:
            raise _corrupt(folder, _cause(error)) from None
    return int(_manifest(folder)["step"])


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if not path.exists():
        raise _corrupt(folder, "no file 'manifest.json'")
    try:
        if not path.is_file():  # opening a pipe would block
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
    """Raises if the manifest is not of the form that :func:`save` writes."""
    step, config, files = manifest["step"], manifest["config"], manifest["files"]
    if type(step) is not int or f"step-{step:08d}" != folder.name:
        raise _corrupt(folder, "a file 'manifest.json' of another step")
    if not isinstance(config, dict) or any(type(config.get(name)) is not int for name in SHARED_OUT):
        raise _corrupt(folder, "a file 'manifest.json' without a configuration")
    tensor_ranks = config.get("tensor_parallel", 1)  # newer than checkpoints
    if type(tensor_ranks) is not int or tensor_ranks < 1:
        raise _corrupt(folder, "a file 'manifest.json' of another configuration")
    if not isinstance(files, dict) or ".metadata" not in files or not all(map(FILES.fullmatch, files)):
        raise _corrupt(folder, "a file 'manifest.json' that does not list torch's files")
    for entry in files.values():
        known = isinstance(entry, dict) and entry.keys() == {"bytes", "sha256"}
        if not known or type(entry["bytes"]) is not int or not isinstance(entry["sha256"], str):
            raise _corrupt(folder, "a file 'manifest.json' without the size and the digest of each file")


def _corrupt(folder: Path, got: str) -> UserError:
    return UserError(
        f"checkpoint '{folder}'",
        "the files that its manifest.json lists, unchanged",
        got,
        "Remove this folder: --resume then uses the previous checkpoint.",
    )


def _entry(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
