"""Activations as frozen data: what an activation key says. The C++ twin is ``csrc/activation/description.h``.

A key is a function, then options after a colon: ``"swiglu:interleave=32"``. Ops take keys, because a string is a
constant under ``torch.compile``, ``torch.export`` and TorchScript; :class:`Activation` gives them names.

What the ops have for a function (:data:`TRAITS`, :attr:`Activation.traits`):

============== ======= ============= ===============
function       gate    GEMM epilogue fused quantize
============== ======= ============= ===============
``swiglu``     yes     yes           yes
``relu2``
============== ======= ============= ===============
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from transformer_plugin._arguments import check_fields, one_of

__all__ = ["FUNCTIONS", "INTERLEAVE", "TRAITS", "Activation", "ActivationTraits", "Function"]

Function = Literal["swiglu", "relu2"]


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
    "relu2": ActivationTraits(),
}
FUNCTIONS: tuple[Function, ...] = tuple(TRAITS)
#: The functions by the names of modules and functions of torch and of transformers, which apply them to the gate, or to
#: all without one.
OF_OTHERS: dict[str, Function] = {
    **dict.fromkeys(("SiLU", "SiLUActivation", "silu"), "swiglu"),
    "ReLUSquaredActivation": "relu2",
}
#: Columns of the gate, and of the linear part, that lie side by side where the two are interleaved.
INTERLEAVE = 32

_OPTION = f"interleave={INTERLEAVE}"
#: What errors about a key say: what was expected, and what to do.
EXPECTED_KEY = f"an activation key: {one_of(FUNCTIONS)}, then options like swiglu:{_OPTION}"
KEY_ADVICE = "transformer_plugin.activations lists them"


@dataclass(frozen=True)
class Activation:
    """A function between two products, and how the columns of its input lie.

    Attributes:
        function: ``"swiglu"``: ``silu(gate) * linear``, where gate and linear part are columns of the input; or
            ``"relu2"``: ``relu(x) ** 2``, without a gate.
        interleave: the order of the columns of a function with a gate. 0: all columns of the gate first. 32: blocks of
            32 columns of the gate and their 32 of the linear part, alternating; the number of features is then a
            multiple of 32 (TransformerEngine's ``glu_interleave_size``).

    Raises:
        TypeError: a field of another type. ValueError: another function, or an order that the function does not have.

    Source: of ``swiglu`` Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv:2002.05202), equation 6 without
    biases; of ``relu2`` So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021
    (arXiv:2109.08668).
    """

    function: Function = "swiglu"
    interleave: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "transformer_plugin.Activation")
        if self.function not in FUNCTIONS:
            expected = f"one of {', '.join(FUNCTIONS)}"
            raise _error("function", expected, repr(self.function), "Choose one of them")
        orders = (0, INTERLEAVE) if self.traits.gated else (0,)
        if self.interleave not in orders:
            expected = " or ".join(map(str, orders)) + ("" if self.traits.gated else " without a gate")
            raise _error(
                "interleave", expected, str(self.interleave), "Leave it out for all of the gate first"
            )
        object.__setattr__(self, "_key", self.function + (f":{_OPTION}" if self.interleave else ""))

    @classmethod
    def parse(cls, key: str) -> Activation:
        """The activation that ``key`` names; ValueError when it names none."""
        if not isinstance(key, str):
            raise _error(
                "key", "a string such as 'swiglu'", type(key).__name__, "An Activation has one: .key"
            )
        function, colon, options = key.partition(":")
        valid = function in FUNCTIONS and all(
            option == _OPTION and TRAITS[function].gated for option in (options.split(",") if colon else ())
        )
        if not valid:
            raise ValueError(
                f"transformer_plugin.Activation.parse: argument 'key': expected {EXPECTED_KEY}, got '{key}'. "
                f"{KEY_ADVICE}."
            )
        return cls(function, INTERLEAVE if colon else 0)  # type: ignore[arg-type]

    @property
    def key(self) -> str:
        """The key that ops take; equal activations have equal keys."""
        return self._key  # type: ignore[attr-defined]

    @property
    def traits(self) -> ActivationTraits:
        """What the ops have for the function."""
        return TRAITS[self.function]

    def input_columns(self, features: int) -> int:
        """The columns of an input whose result has ``features`` columns."""
        return 2 * features if self.traits.gated else features


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
