"""The base class of the modules, and the wrapper around their forward that annotates errors and profiles."""

from __future__ import annotations

import functools
import numbers
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
from torch.autograd import profiler
from torch.compiler import is_compiling
from torch.utils._pytree import _register_namedtuple

from transformer_plugin._arguments import class_name
from transformer_plugin.errors import peer_timeout
from transformer_plugin.nn._transformer_engine import drop_extra_state, refuse_names

if TYPE_CHECKING:
    from transformer_plugin.nn._tensor_parallel import TensorParallel

Forward = TypeVar("Forward", bound=Callable[..., Any])
Output = TypeVar("Output", bound=tuple[Any, ...])

_NOTE = "raised in the layer "


def check_sizes(module: str, dtype: Any = None, **sizes: Any) -> None:
    """Checks the sizes of a layer, which torch would refuse without naming them, and the dtype of its parameters."""
    for name, value in sizes.items():
        if not isinstance(value, numbers.Integral | torch.SymInt) or isinstance(value, bool):
            raise TypeError(
                f"transformer_plugin::{module}: argument '{name}': expected an integer, got {value!r}. Pass an int."
            )
        if not 0 <= int(value) < 2**31:
            raise ValueError(
                f"transformer_plugin::{module}: argument '{name}': expected from 0 to 2^31 - 1, got {value}. Pass the "
                "size of the layer."
            )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"transformer_plugin::{module}: argument 'dtype': expected a torch.dtype, got {dtype!r}. Leave it out for "
            "the default dtype."
        )


class PluginModule(torch.nn.Module):
    """Base class of the package's modules."""

    #: the names that attribute lookup finds in the class; None if a subclass has another ``__getattr__``.
    _class_attributes: frozenset[str] | None = None
    #: the ranks that share the module's product, or apply it to other rows of one loss; None if there are none.
    tensor_parallel: TensorParallel | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Notes the names of the class for :func:`registered`."""
        super().__init_subclass__(**options)
        is_same = cls.__getattr__ is torch.nn.Module.__getattr__
        cls._class_attributes = frozenset(dir(cls)) if is_same else None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        drop_extra_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def __prepare_scriptable__(self) -> NoReturn:
        """Raises an error. ``torch.jit.script`` calls this method on a module and on its submodules."""
        raise TypeError(
            f"transformer_plugin.nn.{class_name(self)}: expected torch.export, torch.compile or torch.jit.trace, "
            "got torch.jit.script, which does not support the modules of this package. Use one of those; functions "
            "that call torch.ops.transformer_plugin can be scripted."
        )


def registered(module: PluginModule, kind: dict[str, Any], name: str) -> Any:
    """The attribute that a module has registered in ``_modules``, ``_parameters`` or ``_buffers``, which is ``kind``.

    ``Module.__getattr__`` takes most of a microsecond to find it. What is not there may be computed when it is read, as
    parametrizations do. What is there may be hidden: a wrapper may keep its shards there and give the module a subclass
    with a property of the same name. Python finds attributes of the class and of the instance first.
    """
    of_class = module._class_attributes
    if name not in kind or of_class is None or name in of_class or name in module.__dict__:
        return getattr(module, name)
    return kind[name]


def layer_forward(forward: Forward) -> Forward:
    """Decorates a module's forward.

    An error that leaves it gets a note with the layer's name and sizes. While torch's profiler runs, the call is a
    profiler range. Compiled code has neither and no overhead.
    """
    name = f"transformer_plugin.nn.{forward.__qualname__.split('.')[0]}"

    @functools.wraps(forward)
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return forward(self, *args, **kwargs)
        try:
            if not profiler._is_profiler_enabled:
                return forward(self, *args, **kwargs)
            with profiler.record_function(name):
                return forward(self, *args, **kwargs)
        except (ValueError, TypeError, RuntimeError) as error:
            if kwargs and isinstance(error, TypeError):
                refuse_names(self, forward, kwargs)
            lost = peer_timeout(error)
            _add_layer_note(lost or error, self)
            if lost is not None:
                raise lost from None
            raise

    # torch.compile counts recompilations by code object, and calls of all classes would otherwise be of one.
    call.__code__ = call.__code__.replace(co_name=forward.__qualname__)  # type: ignore[attr-defined]
    return cast(Forward, call)


def serializable(output: type[Output]) -> type[Output]:
    """Registers a named tuple that modules return, so that ``torch.export.save`` and AOTInductor can serialize it."""
    _register_namedtuple(output, serialized_type_name=f"{output.__module__}.{output.__qualname__}")
    return output


def _add_layer_note(error: Exception, module: torch.nn.Module) -> None:
    """Adds the layer's note to an error, unless an inner layer has added one."""
    notes: list[str] = getattr(error, "__notes__", [])
    text = error.args[0] if error.args and isinstance(error.args[0], str) else ""
    if any(note.startswith(_NOTE) for note in notes) or f"\n{_NOTE}" in text:
        return
    name = _qualified_name(module)
    try:
        sizes = module.extra_repr()
    except (RuntimeError, AttributeError):  # of a parameter that is the reason for the error
        sizes = "..."
    note = f"{_NOTE}{name + ': ' if name else ''}{class_name(module)}({sizes})"
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif text:  # tracebacks of Python 3.10 do not show notes
        error.args = (f"{text}\n{note}", *error.args[1:])
    else:
        error.__notes__ = [*notes, note]  # type: ignore[attr-defined]


def _qualified_name(module: torch.nn.Module) -> str:
    """Returns the module's name in the outermost module whose forward is running.

    A module does not know its parents, so they are found in the call stack.
    """
    outermost, frame = module, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.nn.Module):
            outermost = caller
    names = (name for name, part in outermost.named_modules() if part is module and name)
    return next((f"'{name}' of {type(outermost).__name__}" for name in names), "")
