"""Recipes: the number format of each operand of a product. They are frozen data; modules have a ``recipe=`` argument.

A product ``output = input @ weight^T`` has three operands in training: the input, the weight, and the
gradient of the output. A recipe gives a format key (:mod:`transformer_plugin.formats`) for each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from transformer_plugin._arguments import check_fields, typed
from transformer_plugin.formats import Element, Family, Format, FourOverSix

__all__ = [
    "BFloat16",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Recipe",
    "Role",
    "recipe_from_name",
]


#: An operand of a product in training.
Role = Literal["input", "weight", "grad"]

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Recipe:
    """Base class of the recipes. ``Recipe()`` leaves operands unchanged; it is the recipe named ``"none"``.

    Args:
        nonfinite: keyword of every recipe: the effect of a NaN or an infinity in an operand.
            ``"round"``: the format's own, which may be a finite number. ``"nan"``: in an input or a weight, it makes
            the output NaN, and the gradients that are computed from that operand; in a gradient of the output, it makes
            all gradients NaN except the bias's, which is the plain sum. ``Recipe()`` quantizes nothing, so the option
            has no effect there.

    Raises:
        TypeError: an argument of another type. ValueError: an unknown choice.
    """

    nonfinite: Literal["round", "nan"] = field(default="round", kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self, f"transformer_plugin.{type(self).__name__}")
        if self.nonfinite not in ("round", "nan"):
            raise ValueError(
                f"transformer_plugin.{type(self).__name__}: argument 'nonfinite': expected 'round' or 'nan', got "
                f"{self.nonfinite!r}. The default is 'round'."
            )

    def _error(self, argument: str, expected: str, got: object, advice: str) -> ValueError:
        return ValueError(
            f"transformer_plugin.{type(self).__name__}: argument '{argument}': expected {expected}, got {got}. "
            f"{advice}."
        )

    def _check_epsilon(self, epsilon: float) -> None:
        if epsilon != 0.0 and not 2.0**-149 <= epsilon < 2.0**128:
            raise ValueError(
                f"transformer_plugin.{type(self).__name__}: argument 'amax_epsilon': expected 0 or a positive number "
                f"in float32's range, got {epsilon}. Use 0 for no lower bound."
            )

    @property
    def _nan(self) -> bool:
        return self.nonfinite == "nan"

    def _format_of(self, role: Role) -> str:
        """The key of one operand's format."""
        return "none"

    @property
    def input_format(self) -> str:
        """Key of the format that the input is quantized to."""
        return self._format_of("input")

    @property
    def weight_format(self) -> str:
        """Key of the format that the weight is quantized to."""
        return self._format_of("weight")

    @property
    def grad_format(self) -> str:
        """Key of the format that the output's gradient is quantized to in the backward."""
        return self._format_of("grad")


@dataclass(frozen=True)
class BFloat16(Recipe):
    """Operands rounded to bfloat16, sums in FP32, the output in the input's dtype."""

    def _format_of(self, role: Role) -> str:
        return Format("bf16", nonfinite_is_nan=self._nan).key


class _HybridFloat8(Recipe):
    """FP8 operands of one family, with another element for gradients if ``hybrid``."""

    _family: ClassVar[Family]
    if TYPE_CHECKING:  # fields of the recipes, which have different defaults
        hybrid: bool
        power_of_two_scales: bool
        amax_epsilon: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_epsilon(self.amax_epsilon)  # here, so that the error is not first raised in a forward

    def _format_of(self, role: Role) -> str:
        return Format(
            self._family,
            "e5m2" if self.hybrid and role == "grad" else "e4m3",
            self.power_of_two_scales,
            epsilon=self.amax_epsilon,
            nonfinite_is_nan=self._nan,
        ).key


@dataclass(frozen=True)
class Float8CurrentScaling(_HybridFloat8):
    """FP8 with one scale per tensor (per group in grouped products), from the tensor's current amax.

    Args:
        hybrid: True: E5M2 for gradients, E4M3 otherwise; False: E4M3 for all operands.
        power_of_two_scales: whether scales are rounded down to a power of two.
        amax_epsilon: a lower bound of the amax.
    """

    hybrid: bool = True
    power_of_two_scales: bool = False
    amax_epsilon: float = 0.0

    _family: ClassVar[Family] = "fp8_tensor"


@dataclass(frozen=True)
class Float8RowwiseScaling(_HybridFloat8):
    """FP8 with one scale per row: per token of inputs and gradients, per output feature of weights.

    The data gradient quantizes the weight again, with one scale per input feature. Weight gradients sum over the rows,
    so no scale of a row is a factor of the sum: they are computed from the unquantized operands, in their dtype.

    Args:
        hybrid: gradients in E5M2, the rest in E4M3; False: all in E4M3.
        power_of_two_scales: scales rounded down to a power of two.
        amax_epsilon: a lower bound of the amax.

    Source: the recipe ``rowwise_with_gw_hp`` of torchao, with its defaults.
    """

    hybrid: bool = False
    power_of_two_scales: bool = True
    amax_epsilon: float = 0.0

    _family: ClassVar[Family] = "fp8_row"


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with one scale per tensor (per group in grouped products), from the amaxes of earlier steps.

    The modules keep scales and amaxes as buffers in their ``state_dict``, and update them at the start of each training
    forward, see :func:`transformer_plugin.ops.update_delayed_scale_`. In the first step the scale is 1.

    Args:
        margin: scales are divided by ``2**margin``, from -100 to 100, to leave room for values that grow.
        hybrid: True: E5M2 for gradients, E4M3 otherwise; False: E4M3 for all operands.
        amax_history_len: the number of steps whose amaxes are kept, at least 1.
        amax_compute_algo: ``"max"``: the scale comes from the largest amax of the history; ``"most_recent"``: from the
            latest one.
        amax_group: keyword: the ranks that reduce their amaxes to the maximum and so use the same scales: a process
            group or its name, or ``""`` for none. The name is stored. Each layer reduces its amaxes at the start of
            each training forward, so all ranks of the group must call it equally often and in the same order. An
            evaluation does not communicate and uses the scales of the last training forward.
            :func:`transformer_plugin.nn.reduce_amax` instead reduces a whole model with one collective.

    The format keys are ``fp8_tensor``, which says how the operands are stored. With these keys
    :func:`transformer_plugin.ops.linear` computes scales from the data unless its argument ``scale`` gives them.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433; NVIDIA TransformerEngine's recipe of
    this name.
    """

    margin: int = 0
    hybrid: bool = True
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    amax_group: ProcessGroup | str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -100 <= self.margin <= 100:
            raise self._error("margin", "a number from -100 to 100", self.margin, "0 is usual")
        if self.amax_history_len < 1:
            raise self._error("amax_history_len", "at least 1", self.amax_history_len, "1024 is usual")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise self._error(
                "amax_compute_algo",
                "'max' or 'most_recent'",
                repr(self.amax_compute_algo),
                "Choose one of them",
            )
        if not isinstance(self.amax_group, str):
            name = getattr(self.amax_group, "group_name", None)
            if not isinstance(name, str):
                raise TypeError(
                    "transformer_plugin.DelayedScaling: argument 'amax_group': expected a process group or its name, "
                    f"got {self.amax_group!r}. Call torch.distributed.init_process_group first, or leave it out."
                )
            object.__setattr__(self, "amax_group", name)

    def _format_of(self, role: Role) -> str:
        element: Element = "e5m2" if self.hybrid and role == "grad" else "e4m3"
        return Format("fp8_tensor", element, nonfinite_is_nan=self._nan).key


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 E4M3 with one scale per 1x128 block of inputs and gradients and per 128x128 block of weights.

    Args:
        power_of_two_scales: whether scales are rounded down to a power of two.
        amax_epsilon: a lower bound of the amax.

    Source: DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.
    """

    power_of_two_scales: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_epsilon(self.amax_epsilon)

    def _format_of(self, role: Role) -> str:
        return Format(
            "fp8_block",
            "e4m3",
            self.power_of_two_scales,
            role == "weight",
            self.amax_epsilon,
            nonfinite_is_nan=self._nan,
        ).key


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8: FP8 E4M3 with one power-of-two scale (E8M0) per 1x32 block.

    The last dimensions of input, weight and output must be multiples of 32.

    Args:
        square_weights: True: one scale per 32x32 block of weights, so that a weight has the same values in the
            forward and the backward. False: 1x32 blocks along the reduction dimension of each product.

    Source: OCP Microscaling Formats (MX) v1.0 specification, with the conventions of NVIDIA
    TransformerEngine's recipe of this name (``square_weights`` is its ``enable_2d_quantization``).
    """

    square_weights: bool = False

    def _format_of(self, role: Role) -> str:
        square = role == "weight" and self.square_weights
        return Format("mxfp8", square_blocks=square, nonfinite_is_nan=self._nan).key


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4: 4-bit E2M1 with one E4M3 scale per 1x16 block and one FP32 amax per tensor (or per group).

    The last dimensions of input, weight and output must be multiples of 16. For the backward the number of rows, in
    grouped products of each group, must be a multiple of 16, too. :class:`~transformer_plugin.nn.MoE` pads its groups.

    Args:
        random_hadamard: the two operands of the weight gradient are multiplied by the same random orthogonal matrix
            along the reduction dimension. This spreads outliers over neighboring elements; the product is the same.
        stochastic_rounding: gradients are rounded up or down at random, without bias. The seed of each call is
            drawn from torch's generator of the device.
        square_weights: True: one scale per 16x16 block of weights, so that a weight has the same values in the
            forward and the backward. False: 1x16 blocks along the reduction dimension of each product.
        row_scaled_activations: an FP32 amax for each row of the input. It excludes ``random_hadamard``.
        four_over_six: ``"mae"`` or ``"mse"``: each block of inputs and weights uses either the scale that maps its amax
            to 6 or the one that maps it to 4, whichever has the smaller mean absolute or squared error. It excludes
            ``random_hadamard`` and ``square_weights``.

    Raises:
        ValueError: arguments that exclude each other.

    Source: "Pretraining Large Language Models with NVFP4", arXiv:2509.25149; Four Over Six, arXiv:2512.02010; with
    the conventions of NVIDIA TransformerEngine's recipe of this name.
    """

    random_hadamard: bool = True
    stochastic_rounding: bool = True
    square_weights: bool = True
    row_scaled_activations: bool = False
    four_over_six: Literal["none", "mae", "mse"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.four_over_six not in ("none", "mae", "mse"):
            raise self._error(
                "four_over_six", "'none', 'mae' or 'mse'", repr(self.four_over_six), "Choose one"
            )
        for chosen, name, excluded in (
            (self.row_scaled_activations, "row_scaled_activations=True", ("random_hadamard",)),
            (
                self.four_over_six != "none",
                f"four_over_six='{self.four_over_six}'",
                ("random_hadamard", "square_weights"),
            ),
        ):
            for other in excluded:
                if chosen and getattr(self, other):
                    raise self._error(other, f"False with {name}", "True", f"Pass {other}=False")

    @property
    def _four_over_six(self) -> FourOverSix:
        return "" if self.four_over_six == "none" else self.four_over_six

    @property
    def input_format(self) -> str:
        return Format(
            "nvfp4",
            random_hadamard=self.random_hadamard,
            row_scaled=self.row_scaled_activations,
            four_over_six=self._four_over_six,
            nonfinite_is_nan=self._nan,
        ).key

    @property
    def weight_format(self) -> str:
        return Format(
            "nvfp4",
            square_blocks=self.square_weights,
            four_over_six=self._four_over_six,
            nonfinite_is_nan=self._nan,
        ).key

    @property
    def grad_format(self) -> str:
        return Format(
            "nvfp4",
            random_hadamard=self.random_hadamard,
            stochastic_rounding=self.stochastic_rounding,
            nonfinite_is_nan=self._nan,
        ).key


#: The names of the recipes, of :func:`recipe_from_name`.
RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "bf16": BFloat16(),
    "fp8_tensor": Float8CurrentScaling(),
    "fp8_row": Float8RowwiseScaling(),
    "fp8_delayed": DelayedScaling(),
    "fp8_block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}


@typed
def recipe_from_name(name: str) -> Recipe | None:
    """Returns the recipe of a name, with default arguments.

    Names: none, bf16, fp8_tensor, fp8_row, fp8_delayed, fp8_block, mxfp8, nvfp4.

    Returns None for "none".
    """
    if name not in RECIPES:
        raise ValueError(
            "transformer_plugin.recipe_from_name: argument 'name': expected one of "
            f"{', '.join(RECIPES)}, got '{name}'. Choose one of them, or construct a recipe."
        )
    return RECIPES[name]
