"""What every module here does around its forward: errors say which layer raised them, and profiles show it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch.autograd import profiler
from torch.utils._pytree import _register_namedtuple

Forward = TypeVar("Forward", bound=Callable[..., Any])
Output = TypeVar("Output", bound=tuple[Any, ...])

_NOTE = "raised in the layer "


class PluginModule(torch.nn.Module):
    """A module of the package."""

    def __prepare_scriptable__(self) -> NoReturn:
        """Asked by ``torch.jit.script`` of a module and of those within."""
        raise TypeError(
            f"transformer_plugin.nn.{type(self).__name__}: expected another way into a graph than torch.jit.script, "
            "which does not take the modules of this package. Use torch.export or torch.jit.trace; functions "
            "of torch.ops.transformer_plugin can be scripted."
        )


def layer_forward(forward: Forward) -> Forward:
    """Of a module: an error that leaves it carries a note with the layer's name and sizes, and while torch's profiler
    runs the call is a range. Compiled code has neither, and pays for neither."""
    name = f"transformer_plugin.nn.{forward.__qualname__.split('.')[0]}"

    @functools.wraps(forward)
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        try:
            if not profiler._is_profiler_enabled:
                return forward(self, *args, **kwargs)
            with profiler.record_function(name):
                return forward(self, *args, **kwargs)
        except (ValueError, TypeError, RuntimeError) as error:
            _add_layer_note(error, self)
            raise

    return cast(Forward, call)


def serializable(output: type[Output]) -> type[Output]:
    """A named tuple that modules return: ``torch.export.save`` and AOTInductor write its name down."""
    _register_namedtuple(output, serialized_type_name=f"{output.__module__}.{output.__qualname__}")
    return output


def _add_layer_note(error: Exception, module: torch.nn.Module) -> None:
    """Adds the note, once: the innermost layer knows best."""
    notes: list[str] = getattr(error, "__notes__", [])
    if any(note.startswith(_NOTE) for note in notes):
        return
    name = _qualified_name(module)
    note = f"{_NOTE}{name + ': ' if name else ''}{type(module).__name__}({module.extra_repr()})"
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*notes, note]  # type: ignore[attr-defined]
        if error.args and isinstance(error.args[0], str):  # nothing else would show it
            error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def _qualified_name(module: torch.nn.Module) -> str:
    """As in ``named_modules()`` of the outermost module whose call this is in. A module does not know where it is."""
    outermost, frame = module, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.nn.Module):
            outermost = caller
    names = (name for name, part in outermost.named_modules() if part is module and name)
    return next((f"'{name}' of {type(outermost).__name__}" for name in names), "")
