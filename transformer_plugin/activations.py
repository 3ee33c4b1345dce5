"""Activations as frozen data: what an activation key says. The C++ twin is ``csrc/activation/description.h``.

A key is a function, then options after a colon: ``"swiglu:interleave=32"``. Ops take keys, because a string is a
constant under ``torch.compile``, ``torch.export`` and TorchScript; :class:`Activation` gives them names.

What the ops have for a function (:data:`TRAITS`, :attr:`Activation.traits`):

====================================== ======= ============= ===============
function                               gate    GEMM epilogue fused quantize
====================================== ======= ============= ===============
``swiglu``                             yes     yes           yes
``swiglu`` with limit, alpha or offset yes     yes           yes
``geglu_tanh``                         yes
``relu2``
====================================== ======= ============= ===============
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from transformer_plugin._arguments import check_fields, one_of

__all__ = ["FUNCTIONS", "INTERLEAVE", "TRAITS", "Activation", "ActivationTraits", "Function"]

Function = Literal["swiglu", "geglu_tanh", "relu2"]


class ActivationTraits(NamedTuple):
    """What the ops have for a function. The C++ twin is ``kActivations`` of ``csrc/activation/description.h``."""

    #: The input has a gate and a linear part, ``[T, 2F]``; else it is ``[T, F]``.
    gated: bool = False
    #: ``grouped_gemm_activation`` is one kernel on Hopper.
    has_gemm_epilogue: bool = False
    #: ``activation_quantize`` and ``activation_backward_quantize`` take it.
    has_fused_quantize: bool = False


TRAITS: dict[Function, ActivationTraits] = {
    "swiglu": ActivationTraits(gated=True, has_gemm_epilogue=True, has_fused_quantize=True),
    "geglu_tanh": ActivationTraits(gated=True),
    "relu2": ActivationTraits(),
}
FUNCTIONS: tuple[Function, ...] = tuple(TRAITS)
#: The functions by the names of modules and functions of torch and of transformers, which apply them to the gate, or to
#: all without one.
OF_OTHERS: dict[str, Function] = {
    **dict.fromkeys(("SiLU", "SiLUActivation", "silu"), "swiglu"),
    **dict.fromkeys(("GELUTanh", "PytorchGELUTanh", "NewGELUActivation"), "geglu_tanh"),
    "ReLUSquaredActivation": "relu2",
}
#: Columns of the gate, and of the linear part, that lie side by side where the two are interleaved in blocks.
INTERLEAVE = 32
#: The orders of the columns of an input with a gate.
ORDERS = (0, 1, INTERLEAVE)

#: The numbers of ``swiglu`` and their defaults, in the order of a key.
_NUMBERS = {"limit": math.inf, "alpha": 1.0, "offset": 0.0}
_NUMBER = re.compile(r"(-?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:e[+-]?[0-9]+)?")
#: What errors about a key say: what was expected, and what to do.
EXPECTED_KEY = (
    f"an activation key: {one_of(FUNCTIONS)}, then options like swiglu:interleave={INTERLEAVE} or "
    "swiglu:limit=7,alpha=1.702,offset=1"
)
KEY_ADVICE = "transformer_plugin.activations lists them"


@dataclass(frozen=True)
class Activation:
    """A function between two products, and how the columns of its input lie.

    Attributes:
        function: ``"swiglu"``: ``g * sigmoid(alpha * g) * (u + offset)`` with ``g = min(gate, limit)`` and ``u =
            clamp(linear, -limit, limit)``, where gate and linear part are columns of the input; with the numbers'
            defaults ``silu(gate) * linear``. ``"geglu_tanh"``: ``gelu(gate) * linear`` with the approximation of GELU
            by tanh. ``"relu2"``: ``relu(x) ** 2``, without a gate.
        interleave: the order of the columns of a function with a gate. 0: all columns of the gate first. 1: columns of
            gate and linear part alternate one by one, as gpt-oss stores them. 32: blocks of 32 columns of the gate and
            their 32 of the linear part, alternating; the number of features is then a multiple of 32
            (TransformerEngine's ``glu_interleave_size``).
        limit: of ``swiglu``, positive; ``inf`` is none. As in ``torch.clamp`` a NaN stays one, and the gradient is that
            of the result at a limit, and 0 outside and at a NaN. 7 in gpt-oss, ``swiglu_limit`` of transformers.
        alpha: of ``swiglu``, the factor of the gate in the sigmoid, positive. 1.702 in gpt-oss.
        offset: of ``swiglu``, what is added to the linear part. 1 in gpt-oss (TransformerEngine's
            ``glu_linear_offset``).

    The numbers are those of float32: two that round to the same are equal.

    Raises:
        TypeError: a field of another type. ValueError: another function, or a number or an order that the function does
            not have.

    Source: of ``swiglu`` Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv:2002.05202), equation 6 without
    biases, and with its numbers "gpt-oss-120b & gpt-oss-20b Model Card", 2025 (arXiv:2508.10925), section 2.2; of
    ``geglu_tanh`` Shazeer, equation 6, with Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016
    (arXiv:1606.08415); of ``relu2`` So et al., "Primer: Searching for Efficient Transformers for Language Modeling",
    2021 (arXiv:2109.08668).
    """

    function: Function = "swiglu"
    interleave: int = 0
    limit: float = math.inf
    alpha: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "transformer_plugin.Activation")
        if self.function not in FUNCTIONS:
            expected = f"one of {', '.join(FUNCTIONS)}"
            raise _error("function", expected, repr(self.function), "Choose one of them")
        orders = ORDERS if TRAITS[self.function].gated else (0,)
        if self.interleave not in orders:
            expected = one_of([str(order) for order in orders]) if len(orders) > 1 else "0 without a gate"
            raise _error(
                "interleave", expected, str(self.interleave), "Leave it out for all of the gate first"
            )
        options = [f"interleave={self.interleave}"] if self.interleave else []
        for name, initial in _NUMBERS.items():
            text = self._checked_number(name)
            object.__setattr__(self, name, float(text))
            options += [] if float(text) == initial else [f"{name}={text}"]
        object.__setattr__(self, "_key", ":".join([self.function, *filter(None, [",".join(options)])]))

    def _checked_number(self, name: str) -> str:
        """The text of a number in a key."""
        value, default = float(getattr(self, name)), _NUMBERS[name]
        if self.function != "swiglu" and value != default:
            expected = f"{default:g} with {self.function}"
            raise _error(name, expected, f"{value:g}", "Leave it out, or choose swiglu")
        text = _written(value)
        if text == "" or not _is_allowed(name, float(text)):
            kind = "a number" if name == "offset" else "a positive number"
            expected = f"{kind} of float32" + (" or inf" if name == "limit" else "")
            raise _error(name, expected, f"{value:g}", f"Leave it out for {default:g}")
        return text

    @classmethod
    def parse(cls, key: str) -> Activation:
        """The activation that ``key`` names; ValueError when it names none."""
        if not isinstance(key, str):
            raise _error(
                "key", "a string such as 'swiglu'", type(key).__name__, "An Activation has one: .key"
            )
        function: Any
        function, colon, options = key.partition(":")
        fields = _fields_of(function, options.split(",") if colon else []) if function in FUNCTIONS else None
        if fields is None:
            raise ValueError(
                f"transformer_plugin.Activation.parse: argument 'key': expected {EXPECTED_KEY}, got '{key}'. "
                f"{KEY_ADVICE}."
            )
        return cls(function, **fields)

    @property
    def key(self) -> str:
        """The key that ops take; equal activations have equal keys."""
        return self._key  # type: ignore[attr-defined]

    @property
    def traits(self) -> ActivationTraits:
        """What the ops have for the function with these numbers."""
        return TRAITS[self.function]

    def input_columns(self, features: int) -> int:
        """The columns of an input whose result has ``features`` columns."""
        return 2 * features if self.traits.gated else features


def _fields_of(function: Function, options: list[str]) -> dict[str, Any] | None:
    """The fields that options of a key set; None if one is not valid, or is there twice with two values."""
    fields: dict[str, Any] = {}
    for option in options:
        name, _, text = option.partition("=")
        value: float | None = None
        if name == "interleave" and text in ("1", str(INTERLEAVE)) and TRAITS[function].gated:
            value = int(text)
        elif name in _NUMBERS and function == "swiglu":
            value = _read(text)
            if value is None or not _is_allowed(name, value):
                return None
        initial = _NUMBERS.get(name, 0)
        if value is None or fields.get(name, initial) not in (initial, value):
            return None
        fields[name] = value
    return fields


def _is_allowed(name: str, value: float) -> bool:
    return (math.isfinite(value) or name == "limit") and (value > 0 or name == "offset")


def _as_float32(value: float) -> float | None:
    """Rounded to float32; None where that makes a number infinite or zero, and of NaN."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return None
    return None if math.isnan(value) or (rounded == 0) != (value == 0) else rounded


def _read(text: str) -> float | None:
    """The number of an option, in float32; None if it is not written as one."""
    if text == "inf":
        return math.inf
    found = _NUMBER.fullmatch(text)
    if not found or math.isinf(float(text)) or (float(text) == 0 and re.search("[1-9]", found[1])):
        return None
    return _as_float32(float(text))


def _written(value: float) -> str:
    """The shortest text that is read as the value in float32; "" if float32 has none."""
    rounded = _as_float32(value)
    if rounded is None:
        return ""
    decimals = (float(f"{rounded + 0.0:.{digits}g}") for digits in range(1, 10))
    shortest = next(decimal for decimal in decimals if _as_float32(decimal) == rounded)
    return repr(shortest).removesuffix(".0")


def key_of_activation(activation: str | Activation, op: str, argument: str = "activation") -> str:
    """The key of an activation, which an op takes as an argument of this name."""
    if isinstance(activation, str):
        return activation
    if isinstance(activation, Activation):
        return activation.key
    raise TypeError(
        f"transformer_plugin::{op}: argument '{argument}': expected an activation key or a "
        f"transformer_plugin.activations.Activation, got {type(activation).__name__}. Pass for example 'swiglu'."
    )


def _error(argument: str, expected: str, got: str, advice: str) -> ValueError:
    return ValueError(
        f"transformer_plugin.Activation: argument '{argument}': expected {expected}, got {got}. {advice}."
    )
