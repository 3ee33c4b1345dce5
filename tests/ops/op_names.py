"""Names op calls, including what their arguments select, for tests of which ops a layer runs."""

from __future__ import annotations

from typing import Any

#: Ops that take a dense or a ragged matrix.
EITHER = ("quantize", "dequantize", "amax")
SUFFIXES = {(True, True): " both", (False, True): " columns", (True, False): ""}


def name_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> str:
    """Returns, for example, ``grouped quantize both``. A quantize op without a suffix is row-wise only. Takes the
    arguments that a dispatch mode receives."""
    schema = func._schema
    values = {argument.name: argument.default_value for argument in schema.arguments}
    values |= dict(zip(values, args, strict=False)) | (kwargs or {})
    name = str(schema.name).removeprefix("transformer_plugin::")
    if name in EITHER and values["group_sizes"] is not None:
        name = f"grouped {name}"
    return name + SUFFIXES[values["rowwise"], values["columnwise"]] if "rowwise" in values else name
