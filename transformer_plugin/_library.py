"""Finds and loads the shared library that registers every op with torch. It loads the kernels beside it."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformer_plugin._schemas import SCHEMAS
from transformer_plugin._torch_versions import BUILD, NO_TORCH, find_library, kernels_name

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":  # one that torch itself needs
        raise
    raise ModuleNotFoundError(NO_TORCH, name="torch") from None

from transformer_plugin._arguments import is_strided, non_strided_error

LIBRARY = find_library(Path(__file__).parent, torch.__version__, torch.version.cuda)
#: What is loaded: the library, and with CUDA the kernels.
LIBRARIES = [LIBRARY]
if torch.version.cuda and not LIBRARY.name.endswith(".cpu.so"):
    LIBRARIES.append(LIBRARY.with_name(kernels_name(torch.version.cuda)))


def load() -> None:
    """Loads the library. One that does not load, or has other ops, is an ImportError that says why."""
    if not torch.distributed.is_available():
        raise ImportError(
            "transformer_plugin: expected a torch with torch.distributed, got one that was built without it, "
            f"{torch.__version__}. Install another build of torch, then build for it: {BUILD}."
        )
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        reason = str(error.__cause__ or error)
        if "undefined symbol" in reason:  # as where both are called 2.15 and one is a nightly
            reason = "one that was built for another torch of that name"
            if "transformer_plugin" in str(error.__cause__ or error).partition("undefined symbol")[2]:
                reason = f"one that was built with other kernels than {LIBRARIES[-1].name}"
        raise ImportError(
            f"transformer_plugin: expected a compiled library for torch {torch.__version__} (CUDA "
            f"{torch.version.cuda}) in {LIBRARY.name}, got {reason}. Build it again for this torch: {BUILD}."
        ) from None
    schemas = [
        each for each in torch._C._jit_get_all_schemas() if each.name.startswith("transformer_plugin::")
    ]
    _check_schemas(schemas)
    _separate_compile_caches()
    for op in sorted({schema.name.partition("::")[2] for schema in schemas}):
        _name_wrong_types(getattr(torch.ops.transformer_plugin, op))


def _check_schemas(schemas: list[torch._C.FunctionSchema]) -> None:
    """Refuses a library that was built from other sources than these Python files, which call its ops."""
    found = {}
    for schema in schemas:
        name = schema.name.partition("::")[2]
        name += f".{schema.overload_name}" if schema.overload_name else ""
        found[name] = zlib.crc32(str(schema).encode())
    if missing := sorted(SCHEMAS.keys() - found.keys()):
        got = f"one without {_several(missing)}"
    elif changed := sorted(name for name, checksum in SCHEMAS.items() if found[name] != checksum):
        got = f"one with other arguments of {_several(changed)}"
    else:
        return
    raise ImportError(
        f"transformer_plugin: expected a library with the ops of these Python files in {LIBRARY.name}, got {got}, of "
        f"another version. Build it again: {BUILD}."
    )


def _several(names: list[str]) -> str:
    """Some names: ``a, b, c and 2 others``."""
    more = f" and {len(names) - 3} others" if len(names) > 4 else ""
    return ", ".join(names[:3] if more else names) + more


def _separate_compile_caches() -> None:
    """Makes the library part of the keys of torch's caches of compiled graphs.

    A cached graph holds the calls that the library made when it was traced. torch's keys have the version of torch but
    not of other libraries, so after an upgrade a graph of the old library would be taken from the disk.
    """
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in LIBRARIES))
    tag = f"transformer_plugin-{digest.hexdigest()[:16]}"
    config = torch.compiler.config
    if tag not in config.cache_key_tag:
        config.cache_key_tag = ",".join(filter(None, (config.cache_key_tag, tag)))


# Of several overloads torch quotes the errors of all.
_MISMATCH = re.compile(
    r"(?s)transformer_plugin::\w+\(\) Expected a value of type '[^']+' for argument '(\w+)'"
    r".*?\nDeclaration: transformer_plugin::([\w.]+)\("
)
_TYPES = {
    "Tensor": "a tensor",
    "str": "a string",
    "bool": "True or False",
    "int": "an integer of 64 bits",
    "SymInt": "an integer of 64 bits",
    "float": "a number",
    "ScalarType": "a torch.dtype",
    "Device": "a torch.device",
    "List[Tensor]": "a list of tensors",
    "List[int]": "a list of integers",
    "List[str]": "a list of strings",
}


def _expected(argument: torch.Argument) -> str:
    name = str(argument.real_type)
    optional = re.fullmatch(r"Optional\[(.*)\]", name)
    text = _TYPES.get(optional[1] if optional else name, name)
    return f"{text} or None" if optional else text


def _is_missing(argument: torch.Argument, values: dict[str, Any]) -> bool:
    """Whether None stands for a tensor, or there is none in a list of them."""
    if argument.name not in values:
        return False
    value, kind = values[argument.name], str(argument.type)
    return (kind == "Tensor" and value is None) or (kind == "List[Tensor]" and len(value) == 0)


def _non_strided_error(schema: Any, values: dict[str, Any]) -> str | None:
    """The error for a nested or sparse tensor that an op has passed on, to another op or to torch."""
    for argument in schema.arguments:
        value: Any = values.get(argument.name)
        is_list = isinstance(value, list | tuple)
        for i, tensor in enumerate(value if is_list else [value]):
            if "Tensor" in str(argument.type) and isinstance(tensor, torch.Tensor):
                name = f"{argument.name}[{i}]" if is_list else argument.name
                text = non_strided_error(schema.name, name, tensor)
                if text is not None:
                    return text
    return None


def _is_unreadable(argument: torch.Argument, value: object) -> bool:
    """Whether a sparse or nested tensor stands for a number, which torch looks for in its memory; or what names no
    device for one, in which torch looks for a name."""
    if "Device" in str(argument.type) and value is not None:
        return not _names_device(value)
    return isinstance(value, torch.Tensor) and "Tensor" not in str(argument.type) and not is_strided(value)


def _names_device(value: Any) -> bool:
    try:
        torch.device(value)
    except (RuntimeError, TypeError):
        return False
    return True


def _got(value: object) -> str:
    if isinstance(value, int | float | str):
        return repr(value)
    name = type(value).__name__
    if isinstance(value, list | tuple):
        return f"{name} of {', '.join(sorted({type(x).__name__ for x in value})) or 'nothing'}"
    return name


def _name_wrong_types(op: torch._ops.OpOverloadPacket) -> None:
    """Gives an op its own error for an argument of a type that its schema does not have, called as ``ops.x(...)`` or
    as ``ops.x.default(...)``. Torch's error comes before any code of the op is reached, and quotes the whole schema.

    Calls with a wrong number or a wrong name of arguments keep torch's error.
    """
    for each in op.overloads():
        overload = getattr(op, each)
        overload._op = _naming_wrong_types(overload._op, [overload._schema])
    op._op = _naming_wrong_types(op._op, [getattr(op, each)._schema for each in op.overloads()])
    torch.jit._builtins._register_builtin(op._op, op.default._schema.name)  # by which TorchScript knows it


def _naming_wrong_types(call: Callable[..., Any], schemas: list[Any]) -> Callable[..., Any]:
    """``schemas``: of the overload that is called, or of those among which torch chooses."""

    def mistaken(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """The error in the package's words, of a call that torch refused before the op ran."""
        names = [{a.name for a in each.arguments} for each in schemas]
        schema = next(
            (each for each, own in zip(schemas, names, strict=True) if own >= kwargs.keys()), schemas[0]
        )
        arguments, named_op = schema.arguments, f"{schema.name}: argument '"
        values = {**{a.name: x for a, x in zip(arguments, args, strict=False)}, **kwargs}
        own_name = schema.name.partition("::")[2] + (schema.overload_name and f".{schema.overload_name}")
        found = next((each for each in _MISMATCH.finditer(str(error)) if each[2] == own_name), None)
        if found:
            missing = next((a for a in arguments if a.name == found[1]), None)
        elif str(error).startswith(named_op):
            return None
        elif refused := _non_strided_error(schema, values):
            return refused
        elif unreadable := [a for a in arguments if _is_unreadable(a, values.get(a.name))]:
            missing = unreadable[0]
        elif isinstance(error, TypeError):
            return None
        else:  # None passes for a tensor; where no argument is one torch finds no kernel
            missing = next((a for a in arguments if _is_missing(a, values)), None)
        if missing is None:
            return None
        expected = _expected(missing)
        advice = f"Pass {expected}"
        if missing.name == "group_sizes":
            advice = "Make one tensor of the sizes for many calls: torch.tensor(sizes, device=input.device)"
        got = _got(values.get(missing.name))
        return f"{schema.name}: argument '{missing.name}': expected {expected}, got {got}. {advice}."

    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            message = mistaken(error, args, kwargs)
            if message is None:
                raise
        raise TypeError(message)

    return named
