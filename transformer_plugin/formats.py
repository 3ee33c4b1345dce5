"""Number formats as frozen data: what a format key says. The C++ twin is ``csrc/common/format.h``.

A key is a family, then options after a colon: ``"fp8_block:e4m3,pow2,square,eps=1e-12"``. Ops take keys,
because a string is a constant under ``torch.compile``, ``torch.export`` and TorchScript; :class:`Format`
gives them names.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from typing import Literal

import torch

Family = Literal["none", "bf16", "fp8_tensor", "fp8_block", "mxfp8"]
Element = Literal["e4m3", "e5m2"]

FAMILIES: tuple[Family, ...] = ("none", "bf16", "fp8_tensor", "fp8_block", "mxfp8")
#: Length of a block of ``fp8_block``, along a row or along both sides.
BLOCK = 128
#: Length of a block of ``mxfp8``: k of the OCP Microscaling Formats (MX) v1.0 specification.
MX_BLOCK = 32

_QUANTIZED = ("fp8_tensor", "fp8_block", "mxfp8")
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Format:
    """How the values of a matrix are stored.

    Attributes:
        family: ``"none"`` (as they come), ``"bf16"``, ``"fp8_tensor"`` (one FP32 scale per tensor, from its
            own amax now), ``"fp8_block"`` (one FP32 scale per 1x128 block along a row) or ``"mxfp8"`` (one
            E8M0 scale, a byte, per 1x32 block along a row).
        element: ``"e4m3"`` (largest 448) or ``"e5m2"`` (57344), for the families with scales.
        power_of_two_scales: scales that are powers of two. None takes the family's default: False for
            ``fp8_tensor``, True for ``fp8_block`` and ``mxfp8``, which has no others.
        square_blocks: 128x128 blocks instead of 1x128 in ``fp8_block``, 32x32 instead of 1x32 in ``mxfp8``.
        epsilon: an amax below it counts as it; kept as the float32 nearest to what was given. Not ``mxfp8``.

    Raises:
        ValueError: options that the family does not have, or an epsilon that is negative or not finite.

    Source of ``mxfp8``: OCP Microscaling Formats (MX) v1.0 specification, with the conventions of NVIDIA
    TransformerEngine.
    """

    family: Family = "none"
    element: Element = "e4m3"
    power_of_two_scales: bool | None = None
    square_blocks: bool = False
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise _error("family", f"one of {', '.join(FAMILIES)}", repr(self.family), "Choose one of them")
        if self.element not in ("e4m3", "e5m2"):
            raise _error("element", "'e4m3' or 'e5m2'", repr(self.element), "Choose one of them")
        if self.square_blocks and self.family not in ("fp8_block", "mxfp8"):
            raise _error(
                "square_blocks", "False unless the family is fp8_block or mxfp8", "True", "Leave it out"
            )
        object.__setattr__(self, "epsilon", _float32(self.epsilon))
        if not (0.0 <= self.epsilon < math.inf):
            raise _error(
                "epsilon", "a finite number that is not negative", str(self.epsilon), "Use 0 for none"
            )
        if not self.is_quantized and (self.element != "e4m3" or self.power_of_two_scales or self.epsilon > 0):
            raise _error(
                "family",
                "fp8_tensor, fp8_block or mxfp8, which have scales",
                repr(self.family),
                "Leave the rest out",
            )
        if self.family == "mxfp8" and self.power_of_two_scales is False:
            raise _error(
                "power_of_two_scales",
                "True or None for mxfp8, whose scales are exponents",
                "False",
                "Leave it out",
            )
        if self.family == "mxfp8" and self.epsilon > 0:
            raise _error(
                "epsilon", "0 for mxfp8, whose scales have no bound", str(self.epsilon), "Leave it out"
            )
        if self.power_of_two_scales is None:
            object.__setattr__(self, "power_of_two_scales", self.family in ("fp8_block", "mxfp8"))

    @classmethod
    def parse(cls, key: str) -> Format:
        """The format that ``key`` names, the last of repeated options; ValueError when it names none."""
        family, colon, options = key.partition(":")
        values: dict[str, object] = {}
        valid = family in FAMILIES and (colon == "" or (options != "" and family in _QUANTIZED))
        for option in options.split(",") if options else ():
            if option in ("e4m3", "e5m2"):
                values["element"] = option
            elif option == "square" and family in ("fp8_block", "mxfp8"):
                values["square_blocks"] = True
            elif family == "mxfp8":  # its scales leave nothing else to choose
                valid = False
            elif option in ("pow2", "fp32"):
                values["power_of_two_scales"] = option == "pow2"
            elif option.startswith("eps=") and _is_epsilon(option[4:]):
                values["epsilon"] = float(option[4:])
            else:
                valid = False
        if not valid:
            raise ValueError(
                "transformer_plugin.Format.parse: argument 'key': expected a format key: none, bf16, "
                "fp8_tensor, fp8_block or mxfp8, then options like fp8_block:e4m3,pow2,square,eps=1e-12, "
                f"got '{key}'. transformer_plugin.formats lists them."
            )
        return cls(family, **values)  # type: ignore[arg-type]

    @property
    def key(self) -> str:
        """What ops take. All options spelled out, so equal formats have equal keys."""
        if not self.is_quantized:
            return self.family
        options: list[str] = [self.element]
        if self.family != "mxfp8":
            options += ["pow2" if self.power_of_two_scales else "fp32"]
        options += ["square"] if self.square_blocks else []
        options += [f"eps={_shortest(self.epsilon)}"] if self.epsilon > 0 else []
        return f"{self.family}:{','.join(options)}"

    @property
    def is_quantized(self) -> bool:
        """Whether a tensor in it is data and scales."""
        return self.family in _QUANTIZED

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the data; None for ``none``, which keeps what comes."""
        if self.is_quantized:
            return torch.float8_e4m3fn if self.element == "e4m3" else torch.float8_e5m2
        return torch.bfloat16 if self.family == "bf16" else None

    @property
    def scale_dtype(self) -> torch.dtype | None:
        """Of the scales: ``torch.float8_e8m0fnu`` for ``mxfp8``, a byte that is the exponent of a power of two;
        float32 for the other families with scales; None for those without."""
        if not self.is_quantized:
            return None
        return torch.float8_e8m0fnu if self.family == "mxfp8" else torch.float32

    @property
    def largest(self) -> float:
        """Largest finite value of the FP8 element."""
        return 448.0 if self.element == "e4m3" else 57344.0

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale; None where there is one for the whole tensor, or none."""
        if self.family not in ("fp8_block", "mxfp8"):
            return None
        width = MX_BLOCK if self.family == "mxfp8" else BLOCK
        return (width, width) if self.square_blocks else (1, width)

    @property
    def alignment(self) -> int:
        """Modules that lay out groups of rows pad each to a multiple of this, for the GPU's matrix kernels.

        Ops take groups of any size. 16 bytes of a row of the transposed operand; for blocks, one block.
        """
        return {"none": 8, "bf16": 8, "fp8_tensor": 16, "fp8_block": BLOCK, "mxfp8": MX_BLOCK}[self.family]

    @property
    def gemm_tolerance(self) -> float:
        """Bound on ``||got - exact|| / ||exact||`` of a product of two normal random operands in this format.

        ``exact`` is the FP64 product of the operands before they were quantized. Each operand's element adds
        an independent error of about 2.6 % (3 mantissa bits) or 5.3 % (2 bits), root mean square.
        """
        if self.is_quantized:
            return 0.05 if self.element == "e4m3" else 0.1
        return 0.01 if self.family == "bf16" else 1e-5


def _error(argument: str, expected: str, got: str, advice: str) -> ValueError:
    return ValueError(
        f"transformer_plugin.Format: argument '{argument}': expected {expected}, got {got}. {advice}."
    )


def _is_epsilon(text: str) -> bool:
    """A decimal that float32 can hold, not negative."""
    if not _NUMBER.fullmatch(text):
        return False
    value = float(text)
    underflows = _float32(value) == 0.0 and any(digit in "123456789" for digit in re.split("[eE]", text)[0])
    return 0.0 <= _float32(value) < math.inf and not underflows


def _float32(value: float) -> float:
    """The float32 nearest to ``value``, as C++ reads it."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf


def _shortest(value: float) -> str:
    """The shortest decimal that reads back as the float32 ``value``."""
    return next(text for digits in range(1, 18) if _float32(float(text := f"{value:.{digits}g}")) == value)
