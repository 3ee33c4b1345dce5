"""``--resume``: the configuration that a run has written, with the options of the command that continues it."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from moe_lm.config import MAY_CHANGE, NEWER_OPTIONS, Config
from moe_lm.folder import MARKER, newest_checkpoint
from moe_lm.limits import CHOICES, UserError, option, shortened

LARGEST = 1 << 20  # bytes of a config.json; a run writes a thousand
NOT_WRITTEN = ("program", "preset")  # names of config.json that no Config has
TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "str | None": (str, type(None)),
}


def continued(out: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of the configuration with which a run goes on.

    Args:
        out: the run's folder.
        given: the options of the command, by the names of fields.

    Raises:
        UserError: no checkpoint, a ``config.json`` that the run cannot have written, or an option that contradicts it.
    """
    newest = newest_checkpoint(out)
    path = out / MARKER
    content = _read(path, newest)
    saved = _values(path, content, newest)
    preset = {"preset": content["preset"]} if "preset" in content else {}
    _check_options(path, {**saved, **preset}, given)
    values = {**saved, **{name: given[name] for name in MAY_CHANGE if name in given}}
    _check_division(saved["data_parallel"], values)
    if values["steps"] != saved["steps"] and not saved["schedule_steps"]:
        values["schedule_steps"] = saved["steps"]  # the learning rate of a step never changes
    return values


def _read(path: Path, newest: Path) -> dict[str, Any]:
    if not path.exists():
        raise _broken(path, "no such file", newest)
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:  # opening a pipe would block
            raise ValueError
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        raise _broken(path, "a file that cannot be read", newest) from None
    if not isinstance(content, dict):
        raise _broken(path, "JSON without names", newest)
    return content


def _values(path: Path, content: dict[str, Any], newest: Path) -> dict[str, Any]:
    """Returns the values of a valid Config."""
    known = {field.name: field for field in fields(Config)}
    unknown = sorted(content.keys() - known.keys() - set(NOT_WRITTEN))
    if unknown:
        raise _broken(path, f"the unknown name '{shortened(unknown[0])}'", newest)
    values = {}
    for name, field in known.items():
        value = content.get(name, getattr(Config, name) if name in NEWER_OPTIONS else MISSING)
        if value is MISSING:
            raise _broken(path, f"no '{name}'", newest)
        right = type(value) in TYPES[str(field.type)] and value in CHOICES.get(name, (value,))
        if not right:
            raise _broken(path, f"{shortened(repr(value))} for '{name}'", newest)
        values[name] = value
    try:
        Config(**values).check()
    except UserError as error:
        reason = str(error).removeprefix("train_moe: ").rstrip(".")
        raise _broken(path, f"a configuration that cannot run ({reason})", newest) from None
    return values


def _check_options(path: Path, saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Raises if an option has another value than the run, and may not change."""
    names = [
        name
        for name, value in given.items()
        if name in saved and name not in MAY_CHANGE and value != saved[name]
    ]
    if names:
        several = len(names) > 1
        what = f"arguments {', '.join(option(name)[9:] for name in names)}" if several else option(names[0])
        expected, got = (
            ", ".join(shortened(str(values[name])) for name in names) for values in (saved, given)
        )
        do = f"Leave {'them' if several else 'it'} out, or start anew in another --out."
        raise UserError(what, f"{expected}, as in '{path}'", got, do)


def _check_division(data_parallel: str, values: dict[str, Any]) -> None:
    for name in ("tensor_parallel", "shard"):
        if values[name] > 1 and data_parallel != "ddp":
            expected = f"1, because the run has --data-parallel {data_parallel}"
            do = "Leave it out, or start anew in another --out."
            raise UserError(option(name), expected, str(values[name]), do)


def _broken(path: Path, got: str, newest: Path) -> UserError:
    do = f"Write into it what '{newest / 'manifest.json'}' has as 'config'."
    return UserError(f"'{path}'", "the configuration that the run has written", got, do)
