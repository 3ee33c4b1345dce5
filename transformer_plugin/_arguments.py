"""Types of arguments of Python functions: those that a function does not have are errors of four parts."""

from __future__ import annotations

import functools
import inspect
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


class Kind(NamedTuple):
    """What an annotation allows, in words, and whether a value is so."""

    text: str
    allows: Callable[[Any], bool]


def is_flag(value: object) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")  # also numpy's


def _is_number(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_scalar(value: object) -> bool:
    return _is_number(value, numbers.Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _is_infinity(value: object) -> bool:
    return isinstance(value, str) and value == "inf"


def _is_device(value: object) -> bool:
    if isinstance(value, torch.device) or _is_number(value, int):
        return isinstance(value, torch.device) or 0 <= value < 256  # type: ignore[operator]
    try:
        return isinstance(value, str) and torch.device(value) is not None
    except RuntimeError:
        return False


#: By the annotation. Others are checked where the argument is used.
KINDS: dict[str, Kind] = {
    "bool": Kind("True or False", is_flag),
    "int": Kind("an integer", lambda value: _is_number(value, numbers.Integral | torch.SymInt)),
    "float": Kind("a number", lambda value: _is_number(value, numbers.Real | torch.SymInt | torch.SymFloat)),
    "float | Tensor": Kind("a number or a tensor of one", lambda value: _is_scalar(value)),
    "float | Literal['inf'] | Tensor": Kind(
        "a number, 'inf' or a tensor of one", lambda value: _is_scalar(value) or _is_infinity(value)
    ),
    "str": Kind("a string", lambda value: isinstance(value, str)),
    "Tensor": Kind("a tensor", lambda value: isinstance(value, torch.Tensor)),
    "torch.dtype": Kind("a torch.dtype", lambda value: isinstance(value, torch.dtype)),
    "torch.device | str": Kind("a device or its name", _is_device),
    "torch.nn.Module": Kind("a torch.nn.Module", lambda value: isinstance(value, torch.nn.Module)),
    "Iterable[torch.nn.Module]": Kind(
        "a sequence of torch.nn.Module", lambda value: _holds(value, torch.nn.Module)
    ),
    "Iterable[Tensor]": Kind("a sequence of tensors", lambda value: _holds(value, torch.Tensor)),
    "torch.nn.Module | Tensor | Iterable[Tensor]": Kind(
        "a torch.nn.Module, a tensor or a sequence of tensors",
        lambda value: isinstance(value, torch.nn.Module | torch.Tensor) or _holds(value, torch.Tensor),
    ),
    "ProcessGroup": Kind("a process group", lambda value: isinstance(value, torch.distributed.ProcessGroup)),
    "DeviceMesh": Kind("a DeviceMesh", lambda value: _has_base(value, "DeviceMesh")),
    # nn.Module would register a parameter before its property refuses one; other values are refused there.
    "Recipe": Kind(
        "a recipe of transformer_plugin.recipes", lambda value: not isinstance(value, torch.Tensor)
    ),
    "LaunchOptions": Kind("LaunchOptions", lambda value: not isinstance(value, torch.Tensor)),
    # Which strings are allowed is checked, and said, where they are used.
    "Family": Kind("the name of a family", lambda value: isinstance(value, str)),
    "Function": Kind("the name of a function", lambda value: isinstance(value, str)),
    "Element": Kind("the name of an element", lambda value: isinstance(value, str)),
    "ScoreFunction": Kind("a name", lambda value: isinstance(value, str)),
    "FourOverSix": Kind("'', 'mae' or 'mse'", lambda value: isinstance(value, str)),
    "ParallelMode": Kind("'column' or 'row'", lambda value: isinstance(value, str)),
    "Layout": Kind("'packed', 'list' or 'grouped'", lambda value: isinstance(value, str)),
}


def _has_base(value: object, name: str) -> bool:
    """Whether a value is of a class with this name, which is not imported for that."""
    return any(each.__name__ == name for each in type(value).__mro__)


def _holds(value: object, kind: type) -> bool:
    """Whether a value holds others of a kind. Nothing is taken from an iterator."""
    if isinstance(value, str | bytes | dict | torch.Tensor) or not isinstance(value, Iterable):
        return False
    return isinstance(value, Iterator) or all(isinstance(each, kind) for each in value)


def _function_of(taken: str) -> Kind:
    """A function that can be called with arguments of these types. What has no signature is not looked into."""
    count = len(re.sub(r"\[[^\]]*\]", "", taken).split(",")) if taken else 0

    def allows(value: Any) -> bool:
        try:
            inspect.signature(value).bind(*[None] * count)
        except TypeError:  # no function, or other arguments
            return False
        except ValueError:
            return callable(value)
        return True

    return Kind(f"a function of ({taken})" if taken else "a function without arguments", allows)


@functools.cache
def kind_of(annotation: str) -> Kind | None:
    """What an annotation allows, where it is one of the table, a choice of strings or a callable; None of others."""
    plain = annotation.removesuffix(" | None")
    kind = KINDS.get(plain)
    if kind is None and plain.startswith("Literal["):
        choices = re.findall(r"['\"](\w+)['\"]", plain)
        kind = Kind(" or ".join(f"'{choice}'" for choice in choices), lambda value: isinstance(value, str))
    if kind is None and plain.startswith("Callable["):
        taken = re.match(r"Callable\[\[(.*)\], ", plain)
        kind = Kind("a function", callable) if taken is None else _function_of(taken[1])
    if kind is None or plain == annotation:
        return kind
    allows = kind.allows
    return Kind(f"{kind.text} or None", lambda value: value is None or allows(value))


def non_strided_kind(tensor: torch.Tensor) -> str | None:
    """What a tensor is that is not strided: nested, sparse, mkldnn or quantized by torch. None for a strided one."""
    if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized:
        return None
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return f"a tensor that torch quantized, {str(tensor.dtype).removeprefix('torch.')}"
    layout = str(tensor.layout).removeprefix("torch.").title().replace("_", "").removesuffix("Coo")
    return f"one of layout {layout}"


def is_strided(value: object) -> bool:
    """Whether it is a tensor whose sizes can be read."""
    return isinstance(value, torch.Tensor) and non_strided_kind(value) is None


def non_strided_error(owner: str, argument: str, tensor: torch.Tensor) -> str | None:
    """The error for nested, sparse and torch-quantized tensors, in the words of the ops; None of others."""
    kind = non_strided_kind(tensor)
    if kind is None:
        return None
    advice = "Convert it with .to_dense() first"
    if tensor.is_nested:
        advice = (
            "Pass its rows as one tensor, .values() of a jagged one, and to grouped ops their numbers as "
        )
        advice += "group_sizes"
    elif tensor.is_quantized:
        advice = "Convert it with .dequantize() first"
    expected = "a tensor whose numbers lie in memory by strides"
    return f"{owner}: argument '{argument}': expected {expected}, got {kind}. {advice}."


def check_strided(owner: str, argument: str, tensor: torch.Tensor) -> None:
    """Raises it where the sizes of a tensor are read before an op sees them: torch has errors of its own for that."""
    text = non_strided_error(f"transformer_plugin::{owner}", argument, tensor)
    if text is not None:
        raise TypeError(text)


def check_dtype(owner: str, argument: str, tensor: object, *dtypes: torch.dtype) -> None:
    """Refuses another dtype in the words of the ops, where a layer would convert it before an op sees it."""
    if not isinstance(tensor, torch.Tensor):
        raise wrong_type(f"transformer_plugin::{owner}", argument, tensor, KINDS["Tensor"], MISSING)
    if tensor.dtype in dtypes and tensor.layout is torch.strided and not tensor.is_nested:
        return  # in every forward
    check_strided(owner, argument, tensor)
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(
            f"transformer_plugin::{owner}: argument '{argument}': expected one of the dtypes {allowed}, got {got}. "
            "Convert it with .to() first."
        )


def one_of(names: Sequence[str]) -> str:
    """``"a, b or c"``."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


def class_name(instance: object) -> str:
    """The name of a class as its author wrote it: torch gives modules with parametrizations, or under FSDP2, a class
    that is derived from theirs."""
    derived = ("torch.nn.utils.", "torch.distributed.fsdp.")
    return next(
        kind.__name__ for kind in type(instance).__mro__ if not f"{kind.__module__}.".startswith(derived)
    )


def described(value: object) -> str:
    """A value for an error, in one line."""
    text = type(value).__name__
    if isinstance(value, str | int | float | complex | torch.dtype | None):
        text = repr(value)
    elif inspect.isroutine(value) and not inspect.isbuiltin(value):
        text = f"a function of {inspect.signature(value)}"
    return text if len(text) <= 100 else f"{text[:100]}..."


def wrong_type(owner: str, argument: str, value: object, kind: Kind, default: object) -> Exception:
    """The error; a ValueError where the type is right, as of the name of a device that does not exist."""
    missing = (inspect.Parameter.empty, MISSING)
    advice = f"Pass {kind.text}" if default in missing else f"The default is {default!r}"
    is_name = isinstance(value, str) and "name" in kind.text
    return (ValueError if is_name else TypeError)(
        f"{owner}: argument '{argument}': expected {kind.text}, got {described(value)}. {advice}."
    )


def check_fields(config: Any, name: str) -> None:
    """Checks the fields of a dataclass, outside of compiled code."""
    if torch.compiler.is_compiling():
        return
    for field in fields(config):
        kind, value = kind_of(str(field.type)), getattr(config, field.name)
        if kind is not None and not kind.allows(value):
            raise wrong_type(name, field.name, value, kind, field.default)


def typed(function: Function) -> Function:
    """Decorates a function or a constructor: checks the arguments whose annotations are in the table. Not in compiled
    code, which has its values."""
    parameters = inspect.signature(function).parameters
    is_layer = "device" in parameters  # whose sizes and dtype check_sizes() checks
    left_out = ("int", "torch.dtype | None") if is_layer else ()
    kinds = {
        name: (kind, p.default)
        for name, p in parameters.items()
        if p.annotation not in left_out and (kind := kind_of(str(p.annotation)))
    }
    kinds_of_parameters = [p.kind for p in parameters.values()]
    several = inspect.Parameter.VAR_POSITIONAL
    positional = kinds_of_parameters.index(several) if several in kinds_of_parameters else len(parameters)
    names = list(parameters)[:positional]
    is_constructor = function.__name__ == "__init__"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                if name in kinds and not kinds[name][0].allows(value):
                    op = class_name(args[0]) if is_constructor else function.__name__
                    raise wrong_type(f"transformer_plugin::{op}", name, value, *kinds[name])
            if is_constructor and not parameters.keys() >= kwargs.keys():
                from transformer_plugin.nn._transformer_engine import refuse_names

                refuse_names(args[0], function, kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
