"""Decimals that stand for float32 numbers, as the C++ parser of format keys reads them."""

from __future__ import annotations

import math
import re
import struct

_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def is_epsilon(text: str) -> bool:
    """A decimal that float32 can hold, not negative."""
    if not _NUMBER.fullmatch(text):
        return False
    value = float(text)
    underflows = float32(value) == 0.0 and any(digit in "123456789" for digit in re.split("[eE]", text)[0])
    return 0.0 <= float32(value) < math.inf and not underflows


def float32(value: float) -> float:
    """The float32 nearest to ``value``, as C++ reads it."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf


def shortest(value: float) -> str:
    """The shortest decimal that reads back as the float32 ``value``."""
    return next(text for digits in range(1, 18) if float32(float(text := f"{value:.{digits}g}")) == value)
