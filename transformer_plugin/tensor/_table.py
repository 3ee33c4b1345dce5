"""The table of ops that the two value types have, by name, and the error of those that they do not have.

Modules with handlers enter them: :mod:`._views`, :mod:`._copies` and :mod:`._elementwise`. No handler dequantizes,
stacks members or reads group sizes on the host, but ``view_copy``, which is the method ``dequantize``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from transformer_plugin.tensor import _layout

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

#: By the name of the op without its overload.
HANDLERS: dict[str, Handler] = {}
#: What torch makes of this op divides by an argument that it has not checked, which ends the process.
_NOT_DECOMPOSED = "aten::native_channel_shuffle"


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an op of which an argument is a value."""
    handler = HANDLERS.get(func._schema.name)
    if handler is None or "out" in kwargs:
        # Under inference_mode ops that torch makes of others arrive whole.
        if func.namespace == "aten" and func._schema.name != _NOT_DECOMPOSED:
            made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if func.namespace == "transformer_plugin":
            raise _of_this_library(func, args, kwargs)
        raise unsupported(func, values_in((*args, *kwargs.values()))[0])
    return handler(func, args, kwargs)


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Enters a handler of ops of aten in the table."""

    def enter(handler: Handler) -> Handler:
        HANDLERS.update({f"aten::{name}": handler for name in names})
        return handler

    return enter


def values_in(arguments: Any) -> list[Any]:
    """The values among arguments and lists of arguments."""
    found = []
    for argument in arguments:
        if isinstance(argument, list | tuple):
            found += values_in(argument)
        elif hasattr(argument, "_key"):
            found.append(argument)
    return found


def name_of(func: Any) -> str:
    """The op as an error names it: ``mul_.Tensor``."""
    return f"{func._schema.name.partition('::')[2]}.{func._overloadname}"


#: Ops that make another layout, which a value does not have.
_LAYOUT_OPS = frozenset(
    (
        *("reshape", "_reshape_alias", "unflatten", "squeeze", "unsqueeze"),
        *("t", "transpose", "permute", "movedim", "cat", "stack"),
    )
)


def unsupported(func: Any, value: Any) -> ValueError:
    """The error of an op that is not in the table.

    A ValueError, because Python replaces a TypeError that leaves an operator by its own, without this text.
    """
    reason = "an op of its table"
    if func._schema.name.partition("::")[2] in _LAYOUT_OPS:
        reason = "whose layout is fixed: its members lie one after the other in one storage"
    return ValueError(_refusal(name_of(func), f"an op that {type(value).__name__} has, {reason}", value))


def _of_this_library(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ValueError:
    """The error of an op of this library, which takes plain tensors, in its own words."""
    op = func._schema.name.partition("::")[2]
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    name, value = next((name, found[0]) for name, x in given.items() if (found := values_in([x])))
    plain = "dequantize()" if value.format.is_quantized else "packed()"
    advice = f"Call {plain} on it, or the function of this name in transformer_plugin if there is one"
    return ValueError(_layout.message(op, name, "a plain tensor", value._described(), advice))


def refused_method(name: str, error: type[Exception] = ValueError) -> Callable[..., Any]:
    """A method of ``torch.Tensor`` that reads memory without an op, which no handler could refuse."""

    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        expected = "a plain tensor, whose numbers lie in one storage"
        raise error(_refusal(name, expected, self))

    method.__name__ = name
    return method


def _refusal(name: str, expected: str, value: Any) -> str:
    plain = "dequantize() for its numbers" if value.format.is_quantized else "packed() for a plain tensor"
    return _layout.message(
        type(value).__name__,
        "self",
        expected,
        f"{name} of a {value._described()}",
        f"Call {plain}, or a function of transformer_plugin",
    )
