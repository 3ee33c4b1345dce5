"""Recipes: the format of each operand of a product. Frozen data; modules take one as ``recipe=``.

A product ``output = input @ weight^T`` has three operands in training: the input, the weight, and the
gradient of the output. A recipe names a format for each, as a key (:mod:`transformer_plugin.formats`).
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

from transformer_plugin.formats import Element, Format, FourOverSix

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Recipe:
    """Base of the recipes: operands unchanged. ``Recipe()`` is the recipe named ``"none"``.

    Args:
        nonfinite: of every recipe, by keyword: the effect of a NaN or an infinity in an operand.
            ``"round"``: that of its format, which may be a finite number. ``"nan"``: such an input or weight makes the
            output NaN, and the gradients that are products of it; such a gradient of the output makes all gradients NaN
            except the bias's, which is the plain sum. ``Recipe()`` quantizes nothing, so the option has no effect
            there.

    Raises:
        TypeError: an argument of another type. ValueError: an unknown choice.
    """

    nonfinite: Literal["round", "nan"] = field(default="round", kw_only=True)

    def __post_init__(self) -> None:
        kinds = {
            "bool": (bool, "True or False"),
            "int": (numbers.Integral, "an integer"),
            "float": (numbers.Real, "a number"),
        }
        for argument in fields(self):
            kind, expected = kinds.get(str(argument.type), (object, ""))
            value = getattr(self, argument.name)
            if not isinstance(value, kind) or (
                isinstance(value, bool) and kind in (numbers.Integral, numbers.Real)
            ):
                raise TypeError(
                    f"transformer_plugin.{type(self).__name__}: argument '{argument.name}': expected {expected}, got "
                    f"{value!r}. {argument.default!r} is the default."
                )
        if self.nonfinite not in ("round", "nan"):
            raise ValueError(
                f"transformer_plugin.{type(self).__name__}: argument 'nonfinite': expected 'round' or 'nan', got "
                f"{self.nonfinite!r}. 'round' is the default."
            )

    def _check_epsilon(self, epsilon: float) -> None:
        if epsilon != 0.0 and not 2.0**-149 <= epsilon < 2.0**128:
            raise ValueError(
                f"transformer_plugin.{type(self).__name__}: argument 'amax_epsilon': expected 0 or a positive number "
                f"that float32 holds, got {epsilon}. Use 0 for none."
            )

    @property
    def _nan(self) -> bool:
        return self.nonfinite == "nan"

    @property
    def input_format(self) -> str:
        """Key of the format that the input is rounded to."""
        return "none"

    @property
    def weight_format(self) -> str:
        """Key of the format that the weight is rounded to."""
        return "none"

    @property
    def grad_format(self) -> str:
        """Key of the format that the gradient of the output is rounded to in the backward."""
        return "none"


@dataclass(frozen=True)
class BFloat16(Recipe):
    """Operands rounded to bfloat16, sums in FP32, the output in the input's dtype."""

    @property
    def input_format(self) -> str:
        return Format("bf16", nonfinite_is_nan=self._nan).key

    @property
    def weight_format(self) -> str:
        return Format("bf16", nonfinite_is_nan=self._nan).key

    @property
    def grad_format(self) -> str:
        return Format("bf16", nonfinite_is_nan=self._nan).key


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor (per group, where ragged), from the tensor's current amax.

    Args:
        hybrid: gradients in E5M2, the rest in E4M3; False: all in E4M3.
        power_of_two_scales: scales rounded down to a power of two.
        amax_epsilon: a lower bound of the amax.
    """

    hybrid: bool = True
    power_of_two_scales: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_epsilon(self.amax_epsilon)  # now, not in the first step

    def _format(self, element: Element) -> str:
        return Format(
            "fp8_tensor",
            element,
            self.power_of_two_scales,
            epsilon=self.amax_epsilon,
            nonfinite_is_nan=self._nan,
        ).key

    @property
    def input_format(self) -> str:
        return self._format("e4m3")

    @property
    def weight_format(self) -> str:
        return self._format("e4m3")

    @property
    def grad_format(self) -> str:
        return self._format("e5m2" if self.hybrid else "e4m3")


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with one scale per tensor (per group, where ragged), from the amaxes of earlier steps.

    The modules keep scales and amaxes as buffers, in their ``state_dict``, and update them at the start of each
    forward in training; :func:`transformer_plugin.ops.update_delayed_scale_` says how. The first step has a scale of 1.

    Args:
        margin: scales are divided by ``2**margin``, from -100 to 100: room for values that grow.
        hybrid: gradients in E5M2, the rest in E4M3; False: all in E4M3.
        amax_history_len: the number of steps whose amaxes are kept, at least 1.
        amax_compute_algo: ``"max"``: the scale from the largest amax of the history; ``"most_recent"``: from the last
            one.
        amax_group: by keyword: the ranks that reduce their amaxes with a maximum and so use the same scales: a process
            group or its name, or ``""`` for none. It is stored as the name. Each layer reduces its amaxes at the start
            of each forward in training, so all ranks of the group must call it equally often, in the same order; an
            evaluation communicates nothing and takes the scales of the last training forward.
            :func:`transformer_plugin.nn.reduce_amax` does it for a whole model with one collective.

    The keys say how the operands are stored, ``fp8_tensor``. :func:`transformer_plugin.ops.linear` would compute scales
    from the data; :func:`transformer_plugin.ops.linear_scaled` takes given scales.

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

    @staticmethod
    def _error(argument: str, expected: str, got: object, advice: str) -> ValueError:
        return ValueError(
            f"transformer_plugin.DelayedScaling: argument '{argument}': expected {expected}, got {got}. {advice}."
        )

    @property
    def input_format(self) -> str:
        return Format("fp8_tensor", "e4m3", nonfinite_is_nan=self._nan).key

    @property
    def weight_format(self) -> str:
        return Format("fp8_tensor", "e4m3", nonfinite_is_nan=self._nan).key

    @property
    def grad_format(self) -> str:
        return Format("fp8_tensor", "e5m2" if self.hybrid else "e4m3", nonfinite_is_nan=self._nan).key


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 E4M3 with one scale per 1x128 block of inputs and gradients and per 128x128 block of weights.

    Args:
        power_of_two_scales: scales rounded down to a power of two.
        amax_epsilon: a lower bound of the amax.

    Source: DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.
    """

    power_of_two_scales: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_epsilon(self.amax_epsilon)

    def _format(self, square: bool) -> str:
        return Format(
            "fp8_block",
            "e4m3",
            self.power_of_two_scales,
            square,
            self.amax_epsilon,
            nonfinite_is_nan=self._nan,
        ).key

    @property
    def input_format(self) -> str:
        return self._format(square=False)

    @property
    def weight_format(self) -> str:
        return self._format(square=True)

    @property
    def grad_format(self) -> str:
        return self._format(square=False)


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8: FP8 E4M3 with one power-of-two scale (E8M0) per 1x32 block.

    Widths must be multiples of 32: the input's, the weight's and the output's last dimension.

    Args:
        square_weights: one scale per 32x32 block of weights, so that a weight has the same values in the
            forward and in the backward. False: 1x32 blocks along the summed dimension of each product.

    Source: OCP Microscaling Formats (MX) v1.0 specification, with the conventions of NVIDIA
    TransformerEngine's recipe of this name (``square_weights`` is its ``enable_2d_quantization``).
    """

    square_weights: bool = False

    @property
    def input_format(self) -> str:
        return Format("mxfp8", nonfinite_is_nan=self._nan).key

    @property
    def weight_format(self) -> str:
        return Format("mxfp8", square_blocks=self.square_weights, nonfinite_is_nan=self._nan).key

    @property
    def grad_format(self) -> str:
        return Format("mxfp8", nonfinite_is_nan=self._nan).key


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4: 4-bit E2M1 with one E4M3 scale per 1x16 block, under one FP32 amax per tensor (per group, where ragged).

    Widths must be multiples of 16: the input's, the weight's and the output's last dimension, and for the backward
    the number of rows, in ragged products of each group. :class:`~transformer_plugin.nn.MoE` pads its groups.

    Args:
        random_hadamard: the two operands of the weight gradient are multiplied by one random orthogonal matrix along
            the reduction dimension, which spreads outliers; the product is the same.
        stochastic_rounding: gradients are rounded up or down at random, without bias. The seed of each call is
            drawn from torch's generator of the device.
        square_weights: one scale per 16x16 block of weights, so that a weight has the same values in the forward
            and in the backward. False: 1x16 blocks along the summed dimension of each product.
        row_scaled_activations: an FP32 amax for each row of the input; not with ``random_hadamard``.
        four_over_six: ``"mae"`` or ``"mse"``: blocks of inputs and weights use the scale that maps their amax to 6
            or the one that maps it to 4, by the smaller mean absolute or squared error; not with ``random_hadamard``
            and ``square_weights``.

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

    @staticmethod
    def _error(argument: str, expected: str, got: str, advice: str) -> ValueError:
        return ValueError(
            f"transformer_plugin.NVFP4BlockScaling: argument '{argument}': expected {expected}, got {got}. {advice}."
        )

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


def recipe_from_name(name: str) -> Recipe | None:
    """The recipe of a name, with its defaults: none (gives None), bf16, fp8_tensor, fp8_delayed,
    fp8_block, mxfp8 or nvfp4."""
    recipes: dict[str, Recipe | None] = {
        "none": None,
        "bf16": BFloat16(),
        "fp8_tensor": Float8CurrentScaling(),
        "fp8_delayed": DelayedScaling(),
        "fp8_block": Float8BlockScaling(),
        "mxfp8": MXFP8BlockScaling(),
        "nvfp4": NVFP4BlockScaling(),
    }
    if name not in recipes:
        raise ValueError(
            "transformer_plugin.recipe_from_name: argument 'name': expected one of "
            f"{', '.join(recipes)}, got '{name}'. Choose one of them, or make a recipe yourself."
        )
    return recipes[name]
