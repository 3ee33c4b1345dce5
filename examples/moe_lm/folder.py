"""The folder of a run: which program owns it, which process writes to it, and what may be moved or deleted.

    OUT/config.json      the configuration, with "program": "examples/train_moe.py"; marks the folder as a run's
       /metrics.jsonl, loss.png, sample.txt, compare.json, compare.png, checkpoints/step-*

A new run moves an earlier one to ``OUT.previous`` and deletes what was there, so both must be runs and contain nothing
else. While a run writes to its folder it has a lock on it, which ends with the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

from moe_lm.config import Config
from moe_lm.limits import UserError, option

PROGRAM = "examples/train_moe.py"
MARKER = "config.json"
RESULTS = {MARKER, "metrics.jsonl", "loss.png", "sample.txt", "compare.json", "compare.png", "checkpoints"}
RESULTS |= {"metrics.jsonl.tmp", "config.json.tmp"}
CHECKPOINT = re.compile(r"step-\d{8}(\.tmp)?")
#: the files of a checkpoint; older versions wrote rank*.pt.
SAVED = re.compile(r"manifest\.json|\.metadata(\.tmp)?|__\d+_\d+\.distcp|rank\d+\.pt")
ANOTHER = "Give another --out."


def check_new(out: Path) -> None:
    """Raises if a new run cannot use this folder. Changes nothing."""
    _refuse_special(out)
    previous, holder = _previous(out), out.absolute()
    if not _is_empty(out):
        _refuse_foreign(out, f"becomes '{previous}'")
        if os.path.ismount(out):
            raise _refused("a folder that can be renamed", f"'{out}', where a file system is mounted")
        holder = holder.parent
        if os.path.lexists(previous):
            _refuse_foreign(previous, f"would be deleted, as '{out}' takes its place")
    try:
        parent = next(parent for parent in (holder, *holder.parents) if os.path.lexists(parent))
        if not os.access(parent, os.W_OK | os.X_OK) or not parent.is_dir():
            raise _refused(
                "a folder that can be made and written to", f"'{out}'; '{parent}' does not allow it"
            )
    except OSError as error:
        raise _unusable(out, error) from None


class RunFolder:
    """A folder to which only this process writes, until it ends."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.lock = _lock(out)

    @classmethod
    def new(cls, out: Path, config: Config, preset: str = "small") -> RunFolder:
        """Makes an empty folder for a new run. An earlier run is renamed to ``<out>.previous``."""
        check_new(out)
        try:
            out.mkdir(parents=True, exist_ok=True)
            folder = cls(out)
            if not _is_empty(out):
                check_new(out)  # again, now that the lock is held
                folder._move_away()
                out.mkdir()
                moved, folder.lock = folder.lock, _lock(out)
                os.close(moved)
            marker = {"program": PROGRAM, "preset": preset, **asdict(config)}
            (out / MARKER).write_text(json.dumps(marker, indent=1) + "\n")
        except OSError as error:
            raise _unusable(out, error) from None
        return folder

    @classmethod
    def old(cls, out: Path) -> RunFolder | None:
        """Opens the folder of a run that continues; None if there is none."""
        try:
            if not out.is_dir():
                return None
            folder = cls(out.resolve())
            _refuse_other_kinds(folder.out)
            for step in (folder.out / "checkpoints").glob("step-*.tmp"):
                if is_saved(step):  # a save that was interrupted
                    shutil.rmtree(step)
            return folder
        except OSError as error:
            raise _unusable(out, error) from None

    def update(self, config: Config) -> None:
        """Writes what is new in the configuration of a run that continues."""
        path = self.out / MARKER
        before = json.loads(path.read_text())
        after = {**before, "program": PROGRAM, **asdict(config)}
        if after == before:
            return
        try:
            complete = path.with_name(f"{MARKER}.tmp")
            complete.write_text(json.dumps(after, indent=1) + "\n")
            complete.replace(path)
        except OSError as error:
            raise _unusable(self.out, error) from None

    def _move_away(self) -> None:
        previous = _previous(self.out)
        if previous.exists():
            held = _lock(previous)
            for name in (
                *sorted(RESULTS - {MARKER}),
                MARKER,
            ):  # config.json last, so that an interrupted move leaves a folder of a run
                with suppress(FileNotFoundError):
                    path = previous / name
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            previous.rmdir()  # fails, and deletes nothing, if it contains something else now
            os.close(held)
        self.out.rename(previous)
        print(f"the earlier run is now {previous}", flush=True)


def _previous(out: Path) -> Path:
    return out.with_name(out.name + ".previous")


def _refuse_special(out: Path) -> None:
    """Raises for links, files, and folders that contain the current or the home folder."""
    try:
        if out.is_symlink():
            raise _refused("a folder", f"'{out}', which is a symbolic link")
        real = out.resolve()
        if os.path.lexists(out) and not out.is_dir():
            raise _refused("a folder", f"'{out}', which is not a folder")
        home = Path(os.path.expanduser("~")).resolve()
        if out.name in ("", "..") or any(path.is_relative_to(real) for path in (Path.cwd(), home)):
            raise _refused(
                "a separate folder", f"'{out}', which is or contains the current or the home folder"
            )
        for parent in out.absolute().parents:
            if os.path.lexists(parent) and not parent.is_dir():
                raise _refused("a folder", f"'{out}', but '{parent}' is not a folder")
        _previous(out).is_symlink()
    except (OSError, RuntimeError) as error:  # RuntimeError: links that form a loop
        raise _unusable(out, error) from None


def _is_empty(folder: Path) -> bool:
    try:
        return not os.path.lexists(folder) or not any(folder.iterdir())
    except OSError as error:
        raise _unusable(folder, error) from None


def _refuse_foreign(folder: Path, fate: str) -> None:
    """Raises unless ``folder`` belongs to an earlier run and contains only files that it wrote."""
    if folder.is_symlink() or not folder.is_dir():
        raise _refused(f"a name for which '{folder}' is free or an earlier run", "another file there")
    if not is_run(folder):
        raise _refused(
            "a new or an empty folder, or one of an earlier run", f"'{folder}', which holds other files"
        )
    try:
        foreign = next((path for path, ours in _entries(folder) if not ours), None)
    except OSError as error:
        raise _unusable(folder, error) from None
    if foreign is not None:
        raise UserError(
            option("out"),
            f"only files of an earlier run in '{folder}', which {fate}",
            f"'{foreign.relative_to(folder)}'",
            "Move it elsewhere, or give another --out.",
        )


def _entries(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yields all entries of a run's folder and of its checkpoints, and whether a run may have written them."""
    for path in sorted(folder.iterdir()):
        yield path, path.name in RESULTS and _is_kind(path, is_folder=path.name == "checkpoints")
    checkpoints = folder / "checkpoints"
    if not checkpoints.is_dir() or checkpoints.is_symlink():
        return
    for step in sorted(checkpoints.iterdir()):
        ours = _is_checkpoint(step)
        yield step, ours
        for path in sorted(step.iterdir()) if ours else ():
            yield path, _is_part(path)


def checkpoints(out: Path) -> list[Path]:
    """Returns the folders of the checkpoints, the newest last."""
    found = (out / "checkpoints").glob("step-*")
    return sorted(path for path in found if re.fullmatch(r"step-\d{8}", path.name) and path.is_dir())


def newest_checkpoint(out: Path) -> Path:
    """Returns its folder; raises if there is none."""
    folders = checkpoints(out)
    if not folders:
        raise UserError(
            option("resume"),
            f"a checkpoint under '{out / 'checkpoints'}'",
            "none",
            "Start without --resume, or give the --out of an earlier run.",
        )
    return folders[-1]


def is_saved(step: Path) -> bool:
    """Whether a run has written this folder of a checkpoint, complete or not, and everything in it."""
    return _is_checkpoint(step) and all(_is_part(path) for path in step.iterdir())


def _is_checkpoint(step: Path) -> bool:
    return CHECKPOINT.fullmatch(step.name) is not None and _is_kind(step, is_folder=True)


def _is_part(path: Path) -> bool:
    return SAVED.fullmatch(path.name) is not None and _is_kind(path, is_folder=False)


def _is_kind(path: Path, is_folder: bool) -> bool:
    """Whether the path is a folder or a regular file as requested: no link, pipe or device."""
    return not path.is_symlink() and (path.is_dir() if is_folder else path.is_file())


def _refuse_other_kinds(folder: Path) -> None:
    """Raises if a name that a run writes to is a link, pipe or device: writing could change other files or block."""
    for name in sorted(RESULTS):
        path = folder / name
        if os.path.lexists(path) and not _is_kind(path, is_folder=name == "checkpoints"):
            kind = "a folder" if name == "checkpoints" else "a file"
            raise UserError(
                option("out"),
                f"a run's folder, in which '{name}' is {kind} or is not there",
                f"'{path}', which is neither",
                "Move it elsewhere, or give another --out.",
            )


def is_run(folder: Path) -> bool:
    """Whether this program has written ``config.json``."""
    try:
        path = folder / MARKER
        if path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 20:
            return False
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(content, dict):
        return False
    unnamed = {
        field.name for field in fields(Config)
    }  # older versions did not write the program's name, only all of these fields
    return content.get("program") == PROGRAM or content.keys() == unnamed


def _lock(folder: Path) -> int:
    """Locks ``folder`` until this process ends; raises if another run has the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine = os.fstat(descriptor)
        there = os.stat(folder, follow_symlinks=False)
        moved = (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino)
    except FileNotFoundError:
        moved = True
    except BlockingIOError:
        moved = True
    except OSError:
        return descriptor  # the file system has no locks
    if moved:
        os.close(descriptor)
        raise _refused("a folder that no other run writes to", f"'{folder}', to which another run writes")
    return descriptor


def _refused(expected: str, got: str) -> UserError:
    return UserError(option("out"), expected, got, ANOTHER)


def _unusable(folder: Path, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or str(error)
    return _refused("a folder that can be made and written to", f"'{folder}': {reason}")
