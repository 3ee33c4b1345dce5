"""How the grouped GEMMs of a layer are launched."""

from __future__ import annotations

from typing import Any, NamedTuple


class LaunchOptions(NamedTuple):
    """Launch options of a layer's grouped GEMMs, forward and backward. They change the time, never a result.

    Source: the arguments of :func:`transformer_plugin.ops.grouped_gemm` of the same names.
    """

    #: the multiprocessors that a GEMM may use at most, for example to leave some to communication kernels; 0: all.
    max_sms: int = 0
    #: how many rows the groups have together if the host knows, in a buffer that is larger; -1: all rows of the buffer.
    expected_rows: int = -1


def checked(options: Any, module: str) -> LaunchOptions:
    """Returns the options of a module if they are some."""
    whole = isinstance(options, LaunchOptions) and all(type(value) is int for value in options)
    if whole and 0 <= options.max_sms < 2**31 and -1 <= options.expected_rows < 2**31:
        return options
    raise (ValueError if whole else TypeError)(
        f"transformer_plugin::{module}: attribute 'launch_options': expected LaunchOptions with integers, max_sms at "
        f"least 0 and expected_rows at least -1, got {options!r}. Make one with transformer_plugin.nn.LaunchOptions."
    )
