"""Number formats as frozen data: what a format key says. The C++ twin is ``csrc/common/format.h``.

A key is a family, then options after a colon: ``"fp8_block:e4m3,pow2,square,eps=1e-12"``. Ops take keys,
because a string is a constant under ``torch.compile``, ``torch.export`` and TorchScript; :class:`Format`
gives them names.

What the ops have for a family (:data:`TRAITS`, :attr:`Format.traits`):

============== ============ ================= ============= ===========
family         row scales   group columns     fused ops     list kernel
============== ============ ================= ============= ===========
``fp8_tensor``              yes               yes           yes
``fp8_row``    yes
``fp8_block``               yes               yes           yes
``mxfp8``                   yes               yes           yes
``nvfp4``                   yes               yes           yes
============== ============ ================= ============= ===========
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from transformer_plugin._arguments import check_fields, one_of
from transformer_plugin._float32 import float32, is_epsilon, shortest

__all__ = ["BLOCK", "FAMILIES", "GROUP_ALIGNMENT", "MX_BLOCK", "NV_BLOCK", "QUANTIZED", "TRAITS", "Element"]
__all__ += ["Family", "FamilyTraits", "Format", "FourOverSix", "resolve"]

Family = Literal["none", "bf16", "fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "nvfp4"]
Element = Literal["e4m3", "e5m2", "e2m1"]
FourOverSix = Literal["", "mae", "mse"]


class FamilyTraits(NamedTuple):
    """What the ops have for a family. The C++ twin is ``kFormatFamilies`` of ``csrc/common/format.h``."""

    has_scales: bool = False
    #: One scale per row of the whole matrix.
    has_row_scales: bool = False
    #: ``quantize_list`` takes many matrices in one launch.
    has_list_kernel: bool = False
    #: ``activation_quantize``, ``rms_norm_quantize``, ``requantize_transposed`` and the like.
    has_fused_ops: bool = False
    #: The columns of a ragged matrix can be quantized. If not, weight gradients take unquantized operands.
    has_group_columns: bool = False


_ALL = FamilyTraits(True, False, True, True, True)
TRAITS: dict[Family, FamilyTraits] = {
    **dict.fromkeys(("none", "bf16"), FamilyTraits()),
    "fp8_tensor": _ALL,
    "fp8_row": FamilyTraits(has_scales=True, has_row_scales=True),
    **dict.fromkeys(("fp8_block", "mxfp8", "nvfp4"), _ALL),
}
FAMILIES: tuple[Family, ...] = tuple(TRAITS)
#: Those whose tensors are data and scales.
QUANTIZED: tuple[Family, ...] = tuple(family for family, traits in TRAITS.items() if traits.has_scales)
#: Length of a block of ``fp8_block``, along a row or along both sides.
BLOCK = 128
#: Length of a block of ``mxfp8``: k of the OCP Microscaling Formats (MX) v1.0 specification.
MX_BLOCK = 32
#: Length of a block of ``nvfp4``.
NV_BLOCK = 16
#: Aligned groups begin at multiples of this in a row of transposed data, in one-byte elements: a memory sector.
GROUP_ALIGNMENT = 32

_WIDTHS = {"fp8_block": BLOCK, "mxfp8": MX_BLOCK, "nvfp4": NV_BLOCK}
#: Options of ``nvfp4`` and the fields that they set, in the order of a key.
_NV_OPTIONS: dict[str, tuple[str, object]] = {
    "rht": ("random_hadamard", True),
    "sr": ("stochastic_rounding", True),
    "row_scaled": ("row_scaled", True),
    "4over6": ("four_over_six", "mae"),
    "4over6_mse": ("four_over_six", "mse"),
}
#: Which options of ``nvfp4`` may not stand together, and why.
_EXCLUSIONS = (
    ("row_scaled", ("square_blocks", "random_hadamard", "stochastic_rounding")),
    ("four_over_six", ("square_blocks", "random_hadamard", "stochastic_rounding")),
    ("square_blocks", ("random_hadamard",)),
)

#: What errors about a key say: what was expected, and what to do.
EXPECTED_KEY = f"a format key: {one_of(FAMILIES)}, then options like fp8_block:e4m3,pow2,square,eps=1e-12"
KEY_ADVICE = "transformer_plugin.formats lists them"


@dataclass(frozen=True)
class Format:
    """How the values of a matrix are stored.

    Attributes:
        family: ``"none"`` (unchanged), ``"bf16"``, ``"fp8_tensor"`` (one FP32 scale per tensor, from its
            own amax now), ``"fp8_row"`` (one FP32 scale per row), ``"fp8_block"`` (one FP32 scale per 1x128 block
            along a row), ``"mxfp8"`` (one E8M0 scale, a byte, per 1x32 block along a row) or ``"nvfp4"`` (one E4M3
            scale, a byte, per 1x16 block along a row, under one FP32 amax that is an argument of the ops).
        element: ``"e4m3"`` (largest 448) or ``"e5m2"`` (57344) for the FP8 families, ``"e2m1"`` (6), two to a
            byte, for ``nvfp4``. None takes the family's default, E4M3 or E2M1.
        power_of_two_scales: scales that are powers of two. None takes the family's default: False for
            ``fp8_tensor``, ``fp8_row`` and ``nvfp4``, which has no others; True for ``fp8_block`` and ``mxfp8``, which
            has no others.
        square_blocks: 128x128 blocks instead of 1x128 in ``fp8_block``, 32x32 instead of 1x32 in ``mxfp8``,
            16x16 instead of 1x16 in ``nvfp4``.
        epsilon: a lower bound of the amax; kept as the nearest float32. Not ``mxfp8`` and ``nvfp4``.
        random_hadamard: ``nvfp4``: the transposed copy is of the matrix whose rows, 16 at a time, were multiplied by a
            Hadamard matrix with random signs. Not with square blocks.
        stochastic_rounding: ``nvfp4``: elements are rounded up or down at random, without bias; the ops
            take a ``seed``.
        row_scaled: ``nvfp4``: an FP32 amax for each row instead of each matrix.
        four_over_six: ``nvfp4``: each block takes the scale that maps its amax to 6 or the one that maps it to
            4, by the smaller mean absolute (``"mae"``) or squared (``"mse"``) error; ``""``: always 6.
        tiled_scales: ``mxfp8`` and ``nvfp4``: scales in 128x4 tiles, the order that Blackwell's tensor cores
            read, instead of row by row.
        aligned_groups: ``fp8_tensor`` and ``fp8_block``: each group of a ragged matrix begins at a multiple of 32 in a
            row of transposed data (:meth:`line_length`, :meth:`line_begin`), with zeros between groups, so that weight
            gradients on Hopper read groups of any sizes without a copy. Nothing else depends on it.
        nonfinite_is_nan: all but ``none``: a NaN or an infinity in an operand makes the outputs and gradients of a
            layer NaN. Data and scales of the quantize ops do not depend on it.

    Raises:
        ValueError: options that the family does not have or that exclude each other (``row_scaled`` and
            ``four_over_six`` exclude square blocks, the Hadamard transform and stochastic rounding), or an
            epsilon that is negative or not finite.

    Source: of ``mxfp8`` the OCP Microscaling Formats (MX) v1.0 specification, of ``nvfp4`` NVIDIA's
    "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149) and Four Over Six (arXiv:2512.02010); of
    both, the conventions of NVIDIA TransformerEngine.
    """

    family: Family = "none"
    element: Element | None = None
    power_of_two_scales: bool | None = None
    square_blocks: bool = False
    epsilon: float = 0.0
    random_hadamard: bool = False
    stochastic_rounding: bool = False
    row_scaled: bool = False
    four_over_six: FourOverSix = ""
    tiled_scales: bool = False
    aligned_groups: bool = False
    nonfinite_is_nan: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "transformer_plugin.Format")
        if self.family not in FAMILIES:
            raise _error("family", f"one of {', '.join(FAMILIES)}", repr(self.family), "Choose one of them")
        self._set_element()
        if self.square_blocks and self.family not in _WIDTHS:
            expected = "False unless the family is fp8_block, mxfp8 or nvfp4"
            raise _error("square_blocks", expected, "True", "Leave it out")
        object.__setattr__(self, "epsilon", float32(self.epsilon))
        if not (0.0 <= self.epsilon < math.inf):
            expected = "a finite number that is not negative"
            raise _error("epsilon", expected, str(self.epsilon), "Use 0 for none")
        if not self.is_quantized and (self.element != "e4m3" or self.power_of_two_scales or self.epsilon > 0):
            expected = f"{one_of(QUANTIZED)}, which have scales"
            raise _error("family", expected, repr(self.family), "Leave the rest out")
        self._set_scales()
        self._check_options()
        object.__setattr__(self, "_key", self._written())

    def _set_element(self) -> None:
        """The family's own where there is none; others are refused."""
        elements = ("e2m1",) if self.family == "nvfp4" else ("e4m3", "e5m2")
        if self.element is None:
            object.__setattr__(self, "element", elements[0])
        if self.element not in elements:
            expected = "'e2m1' for nvfp4" if self.family == "nvfp4" else "'e4m3' or 'e5m2'"
            raise _error("element", expected, repr(self.element), "Choose one of them")

    def _set_scales(self) -> None:
        """The family's default where there is none; what scales that are bytes do not have is refused."""
        default = self.family in ("fp8_block", "mxfp8")
        if self.family in ("mxfp8", "nvfp4"):
            kind = "exponents" if self.family == "mxfp8" else "E4M3"
            if self.power_of_two_scales not in (None, default):
                raise _error(
                    "power_of_two_scales",
                    f"{default} or None for {self.family}, whose scales are {kind}",
                    str(self.power_of_two_scales),
                    "Leave it out",
                )
            if self.epsilon > 0:
                expected = f"0 for {self.family}, whose scales have no bound"
                raise _error("epsilon", expected, str(self.epsilon), "Leave it out")
        if self.power_of_two_scales is None:
            object.__setattr__(self, "power_of_two_scales", default)

    def _check_options(self) -> None:
        """Options of the families that have blocks smaller than 128, and which go together."""
        if self.four_over_six not in ("", "mae", "mse"):
            raise _error(
                "four_over_six", "'', 'mae' or 'mse'", repr(self.four_over_six), "Choose one of them"
            )
        if self.tiled_scales and self.family not in ("mxfp8", "nvfp4"):
            raise _error("tiled_scales", "False unless the family is mxfp8 or nvfp4", "True", "Leave it out")
        if self.aligned_groups and self.family not in ("fp8_tensor", "fp8_block"):
            expected = "False unless the family is fp8_tensor or fp8_block"
            raise _error("aligned_groups", expected, "True", "Leave it out")
        if self.nonfinite_is_nan and self.family == "none":
            raise _error(
                "nonfinite_is_nan", "False for none, whose products are IEEE's", "True", "Leave it out"
            )
        for name in ("random_hadamard", "stochastic_rounding", "row_scaled", "four_over_six"):
            value = getattr(self, name)
            if value and self.family != "nvfp4":
                none = "''" if name == "four_over_six" else "False"
                raise _error(name, f"{none} unless the family is nvfp4", repr(value), "Leave it out")
        for name, excluded in _EXCLUSIONS:
            for other in excluded:
                if getattr(self, name) and getattr(self, other):
                    raise _error(other, f"False with {name}", "True", "Leave one of the two out")

    @classmethod
    def parse(cls, key: str) -> Format:
        """The format that ``key`` names, the last of repeated options; ValueError when it names none."""
        if not isinstance(key, str):
            raise _error(
                "key", "a string such as 'fp8_block'", type(key).__name__, "A Format has one: format.key"
            )
        family, colon, options = key.partition(":")
        values: dict[str, object] = {}
        valid = family in FAMILIES and (colon == "" or (options != "" and family != "none"))
        for option in options.split(",") if options else ():
            read = _read_option(family, option)
            valid = valid and read is not None
            values.update([read] if read is not None else [])
        for name, excluded in _EXCLUSIONS:
            valid = valid and not (values.get(name) and any(values.get(other) for other in excluded))
        if not valid:
            raise ValueError(
                f"transformer_plugin.Format.parse: argument 'key': expected {EXPECTED_KEY}, got '{key}'. {KEY_ADVICE}."
            )
        return cls(family, **values)  # type: ignore[arg-type]

    @property
    def key(self) -> str:
        """The key that ops take, with all options written out, so equal formats have equal keys."""
        return self._key  # type: ignore[attr-defined]

    def _written(self) -> str:
        if not self.is_quantized:
            return self.family + (":nan" if self.nonfinite_is_nan else "")
        options: list[str] = [str(self.element)]
        if self.family not in ("mxfp8", "nvfp4"):
            options += ["pow2" if self.power_of_two_scales else "fp32"]
        options += ["square"] if self.square_blocks else []
        options += [f"eps={shortest(self.epsilon)}"] if self.epsilon > 0 else []
        options += [option for option, (name, value) in _NV_OPTIONS.items() if getattr(self, name) == value]
        options += ["tiled"] if self.tiled_scales else []
        options += ["aligned"] if self.aligned_groups else []
        options += ["nan"] if self.nonfinite_is_nan else []
        return f"{self.family}:{','.join(options)}"

    @property
    def traits(self) -> FamilyTraits:
        """What the ops have for the family."""
        return TRAITS[self.family]

    @property
    def is_quantized(self) -> bool:
        """Whether a tensor in it is data and scales."""
        return self.traits.has_scales

    @property
    def needs_amax(self) -> bool:
        """Whether ops take the largest magnitude as an argument: ``transformer_plugin.ops.amax`` gives it."""
        return self.family == "nvfp4"

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the data; None for ``none``, which changes nothing."""
        if self.family == "nvfp4":
            return torch.float4_e2m1fn_x2
        if self.is_quantized:
            return torch.float8_e4m3fn if self.element == "e4m3" else torch.float8_e5m2
        return torch.bfloat16 if self.family == "bf16" else None

    @property
    def scale_dtype(self) -> torch.dtype | None:
        """Of the scales: ``torch.float8_e8m0fnu`` for ``mxfp8``, a byte that is the exponent of a power of two;
        ``torch.float8_e4m3fn`` for ``nvfp4``; float32 for the other families with scales; None for those
        without."""
        if not self.is_quantized:
            return None
        return {"mxfp8": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn}.get(self.family, torch.float32)

    @property
    def largest(self) -> float:
        """Largest finite value of the element."""
        return {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}[str(self.element)]

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale; None where there is one for the tensor or for each row, or none."""
        if self.family not in _WIDTHS:
            return None
        width = _WIDTHS[self.family]
        return (width, width) if self.square_blocks else (1, width)

    @property
    def alignment(self) -> int:
        """Modules pad each group of rows to a multiple of this, for the GPU's GEMM kernels.

        Results do not depend on it, and ops take groups of any size, where :attr:`group_multiple` is 1. 16 bytes
        of a row of the transposed operand; for blocks, one block.
        """
        return _WIDTHS.get(self.family, 16 if self.is_quantized else 8)

    @property
    def group_multiple(self) -> int:
        """What the rows of each group of a ragged matrix must be a multiple of, to be quantized along columns."""
        return NV_BLOCK if self.family == "nvfp4" else 1

    def line_length(self, rows: int, groups: int) -> int:
        """Elements in a row of the transposed data of a ragged matrix with ``rows`` rows."""
        if not self.aligned_groups:
            return rows
        return -(-rows // GROUP_ALIGNMENT) * GROUP_ALIGNMENT + GROUP_ALIGNMENT * (groups + 1)

    def line_begin(self, row: int, group: int) -> int:
        """Where the group whose first row is ``row`` begins in such a row; the tail counts as one more group."""
        if not self.aligned_groups:
            return row
        return -(-row // GROUP_ALIGNMENT) * GROUP_ALIGNMENT + GROUP_ALIGNMENT * group

    @property
    def gemm_tolerance(self) -> float:
        """Bound on ``||got - exact|| / ||exact||`` of a product of two normal random operands in this format.

        ``exact`` is the FP64 product of the operands before they were quantized. Each operand adds an
        independent error, root mean square: about 2.6 % in E4M3 (3 mantissa bits) and 5.3 % in E5M2 (2 bits).
        In E2M1 the error follows from steps of 1/2, 1 and 2 out of the 6 that the block's amax becomes: 9.4 %
        where 16 values share it, 11.1 % where 256 do, and the square root of 2 times that when rounded at
        random. The bound is 4/3 of the two together.
        """
        if self.family == "nvfp4":
            nearest, random = (0.21, 0.3) if self.square_blocks else (0.18, 0.25)
            return random if self.stochastic_rounding else nearest
        if self.is_quantized:
            return 0.05 if self.element == "e4m3" else 0.1
        return 0.01 if self.family == "bf16" else 1e-5


def resolve(format: str | Format, device: torch.device | str) -> str:
    """The key that a layer passes for an input or a gradient in this format on this device.

    Where this package's FP8 kernels run (CUDA devices of compute capability 9.0), ragged operands in ``fp8_tensor`` and
    ``fp8_block`` get the option ``aligned``, so that weight gradients read groups of any sizes without a copy.
    Everywhere else, and for other formats, the key is unchanged. Results have the same bits either way. The modules
    call this; callers of ``ops.grouped_linear`` and ``ops.grouped_mlp`` may.

    Args:
        format: a format or its key.
        device: of the operands. A CUDA device's context is started.
    """
    key = format if isinstance(format, str) else format.key
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return key
    parsed = Format.parse(key)
    if parsed.family not in ("fp8_tensor", "fp8_block") or torch.cuda.get_device_capability(device) != (9, 0):
        return key
    return replace(parsed, aligned_groups=True).key


def _read_option(family: str, option: str) -> tuple[str, object] | None:
    """The field that an option of a family sets, and its value; None when the family has no such option."""
    if option == "nan":
        return "nonfinite_is_nan", True
    if family == "bf16":
        return None
    if option in (("e2m1",) if family == "nvfp4" else ("e4m3", "e5m2")):
        return "element", option
    if option == "square" and family in _WIDTHS:
        return "square_blocks", True
    if family in ("mxfp8", "nvfp4"):
        if option == "tiled":
            return "tiled_scales", True
        return _NV_OPTIONS.get(option) if family == "nvfp4" else None
    if option == "aligned":
        return ("aligned_groups", True) if family in ("fp8_tensor", "fp8_block") else None
    if option in ("pow2", "fp32"):
        return "power_of_two_scales", option == "pow2"
    if option.startswith("eps=") and is_epsilon(option[4:]):
        return "epsilon", float(option[4:])
    return None


def _error(argument: str, expected: str, got: str, advice: str) -> ValueError:
    return ValueError(
        f"transformer_plugin.Format: argument '{argument}': expected {expected}, got {got}. {advice}."
    )
