"""Finds and loads the one shared library, which registers every op with torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LIBRARY = Path(__file__).with_name("_C.abi3.so")


def load() -> None:
    """Loads ``_C.abi3.so``. A library built for another torch is an ImportError that says so."""
    if not LIBRARY.exists():
        raise ImportError(
            f"transformer_plugin: expected the compiled library {LIBRARY.name} next to the package, found none. "
            "Build it: `pip install --no-build-isolation .` in the source tree."
        )
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"transformer_plugin: {LIBRARY.name} does not load with torch {torch.__version__} "
            f"(CUDA {torch.version.cuda}): {error}. It was built for another torch; build it again: "
            "`pip install --no-build-isolation --force-reinstall --no-deps .`"
        ) from error
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, op = schema.name.partition("::")
        if namespace == "transformer_plugin":
            _name_wrong_types(getattr(torch.ops.transformer_plugin, op).default)


_MISMATCH = re.compile(
    r"(transformer_plugin::\w+)\(\) Expected a value of type '([^']+)' for argument '(\w+)' but instead found "
    r"type '([^']+)'"
)
_TYPES = {
    "Tensor": "a tensor",
    "Optional[Tensor]": "a tensor or None",
    "List[Tensor]": "a list of tensors",
    "Optional[List[Tensor]]": "a list of tensors or None",
    "str": "a string",
    "bool": "True or False",
    "int": "an integer",
    "float": "a number",
}


def _name_wrong_types(overload: torch._ops.OpOverload) -> None:
    """Gives an op its own error for an argument of a type that its schema does not have. Torch's error comes before any
    code of the op is reached, and quotes the whole schema."""
    call: Callable[..., Any] = overload._op

    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            found = _MISMATCH.match(str(error))
            if found is None:
                raise
            op, type_name, argument, got = found.groups()
            expected = _TYPES.get(type_name, type_name)
            advice = f"Pass {expected}"
            if argument == "group_sizes":
                advice = (
                    "Make one tensor of the sizes for many calls: torch.tensor(sizes, device=input.device)"
                )
            message = f"{op}: argument '{argument}': expected {expected}, got {got}. {advice}."
        raise TypeError(message)

    overload._op = named
