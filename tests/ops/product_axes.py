"""For the reference of every product: the axes of its arguments and results, powers of two along those axes, and
which elements of a result depend on an element of an argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.ops.domain_draw import exact_scale
from transformer_plugin.activations import Activation

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Product:
    """The axes of arguments and results, one letter per axis: t rows, u rows of the matrix that ``rows`` indexes, n
    and k columns, G groups, j features after the activation, j2 the features of their gradient, l features before it, p
    rows of probabilities, 1 no axis. Also the powers of two by which an argument may be multiplied and those by
    which its results are multiplied in turn: for each axis a sum of letters (:class:`Powers`)."""

    arguments: dict[str, Axes]
    results: list[Axes]
    powers: dict[str, Axes] = field(default_factory=dict)
    of_results: list[Axes] = field(default_factory=list)
    #: Whether infinities may saturate or become finite, so that only NaN propagates.
    nan_only: bool = False


def _grouped(b: Axes, powers_of_b: Axes, **more: Axes) -> Product:
    each: dict[str, Axes] = {"alpha": ("G",), "bias": ("G", "n"), "bias_scale": ("t",), "beta": ("G",)}
    return Product(
        {"a": ("u", "k"), "b": b, "out": ("t", "n"), **each},
        [("t", "n")],
        {"a": ("u", "k"), "b": powers_of_b, "out": ("t g", "n"), "alpha": ("G",), "bias": ("G", "n")}
        | {"bias_scale": ("t",)},
        [("t g", "n")],
    )


_WGRAD = Product(
    {"grad": ("t", "n"), "input": ("u", "k"), "alpha": ("G",), "out": ("G", "n", "k"), "beta": ("G",)},
    [("G", "n", "k")],
    {"grad": ("t", "n"), "input": ("-u", "m"), "alpha": ("G",), "out": ("G", "n", "m")},
    [("G", "n", "m")],
)
_GEMM = Product(
    {"a": ("t", "k"), "b": ("n", "k"), "alpha": ("1",), "bias": ("n",), "out": ("t", "n"), "beta": ("1",)},
    [("t", "n")],
    {"a": ("t", "k"), "b": ("n", "-k"), "alpha": ("A",), "bias": ("n T A",), "out": ("t A", "n")},
    [("t A", "n")],
)
_GROUPED = _grouped(("G", "n", "k"), ("", "n", "-k"))
_ACTIVATION = Product(
    {"a": ("t", "k"), "b": ("G", "l", "k"), "bias": ("G", "l"), "probs": ("p",)},
    [("t", "j"), ("t", "l")],
    {"a": ("", "k"), "b": ("", "l", "-k"), "bias": ("", "l"), "probs": ("t",)},
    [("t", "j"), ("", "l")],
    nan_only=True,
)
_GEMM_ROWS = Product(
    {
        "a_scale": ("t",),
        "b_scale": ("n",),
        "alpha": ("1",),
        "bias": ("n",),
        "out": ("t", "n"),
        "beta": ("1",),
    },
    [("t", "n")],
    {"a_scale": ("t",), "b_scale": ("n",), "alpha": ("A",), "bias": ("n T A",), "out": ("t A", "n")},
    [("t A", "n")],
)
_GROUPED_ROWS = Product(
    {
        **{
            "a_scale": ("t",),
            "b_scale": ("G", "n"),
            "alpha": ("G",),
            "bias": ("G", "n"),
            "bias_scale": ("t",),
        },
        **{"out": ("t", "n"), "beta": ("G",)},
    },
    [("t", "n")],
    {
        **{
            "a_scale": ("t",),
            "b_scale": ("", "n"),
            "alpha": ("G",),
            "bias": ("G", "n"),
            "bias_scale": ("t",),
        },
        "out": ("t g", "n"),
    },
    [("t g", "n")],
)
_SCALED = {"input": ("t", "k"), "weight": ("n", "k"), "bias": ("n",)}
_SCALED_POWERS = {"input": ("A",), "weight": ("D",), "bias": ("A D",), "scale": ("s",), "amax": ("-s",)}
_GROUPED_SCALED = {"input": ("t", "k"), "weight": ("G", "n", "k"), "bias": ("G", "n"), "bias_scale": ("t",)}
_GROUPED_SCALED_POWERS = {
    **{"input": ("g", ""), "weight": ("B", "", ""), "bias": ("G B", ""), "scale": ("s",), "amax": ("-s",)},
}
PRODUCTS = {
    "gemm": _GEMM,
    "gemm_out": _GEMM,
    "linear": Product(
        {"input": ("t", "k"), "weight": ("n", "k"), "bias": ("n",)},
        [("t", "n")],
        {"input": ("t", "k"), "weight": ("n", "-k"), "bias": ("n T",)},
        [("t", "n")],
    ),
    "grouped_gemm": _GROUPED,
    "grouped_gemm_out": _GROUPED,
    "grouped_linear": Product(
        {"input": ("t", "k"), "weight": ("G", "n", "k"), "bias": ("G", "n"), "bias_scale": ("t",)},
        [("t", "n")],
        {"input": ("t", "k"), "weight": ("", "n", "-k"), "bias": ("", "n"), "bias_scale": ("t",)},
        [("t", "n")],
    ),
    "grouped_gemm_wgrad": _WGRAD,
    "grouped_gemm_wgrad_out": _WGRAD,
    "gather_rows_backward": Product({"grad": ("t", "k")}, [("u", "k")], {"grad": ("c", "m")}, [("c", "m")]),
    "gemm fp8_row": _GEMM_ROWS,
    "gemm_out fp8_row": _GEMM_ROWS,
    "grouped_gemm fp8_row": _GROUPED_ROWS,
    "grouped_gemm_out fp8_row": _GROUPED_ROWS,
    "linear.scaled": Product(_SCALED, [("t", "n")], _SCALED_POWERS, [("A D",)], nan_only=True),
    "grouped_linear.scaled": Product(
        _GROUPED_SCALED, [("t", "n")], _GROUPED_SCALED_POWERS, [("g b", "")], nan_only=True
    ),
    "grouped_gemm_activation": _ACTIVATION,
    "grouped_gemm_activation_quantize": Product(
        _ACTIVATION.arguments,
        _ACTIVATION.results,
        {**_ACTIVATION.powers, "b": ("", "L", "-k"), "bias": ("", "L")},
        [("t J", ""), ("", "L")],
    ),
    "grouped_mlp": Product(
        {
            **{"input": ("t", "k"), "fc1_weight": ("G", "l", "k"), "fc1_bias": ("G", "l"), "probs": ("p",)},
            **{"fc2_weight": ("G", "n", "j"), "fc2_bias": ("G", "n")},
        },
        [("t", "n")],
        {
            **{"input": ("", "k"), "fc1_weight": ("", "l", "-k"), "fc1_bias": ("", "l"), "probs": ("t",)},
            **{"fc2_weight": ("", "n", "-j"), "fc2_bias": ("", "n")},
        },
        [("t", "n")],
        nan_only=True,
    ),
}

#: Arguments that do not affect a result: the product before an activation, and a probability's own gradient.
NOT_USED = (("probs", ("t", "l")), ("probs", ("t",)))
STANDS_FOR = {"u": "t", "T": "t", "g": "G", "b": "B", "D": "B", "l": "j", "L": "j", "J": "j"}
#: The largest power that is drawn for each letter.
REACH = {
    "t": 35,
    "u": 35,
    "n": 35,
    "m": 35,
    "k": 40,
    "G": 8,
    "A": 8,
    "B": 30,
    "D": 30,
    "j": 20,
    "p": 20,
    "c": 50,
}


def groups_of(rows: int, sizes: Tensor | None) -> Tensor:
    """Returns the group of each row; rows past the groups are -1."""
    if sizes is None:
        return torch.zeros(rows, dtype=torch.int64)
    group = torch.arange(len(sizes)).repeat_interleave(sizes)
    return torch.cat([group, torch.full((rows - len(group),), -1)])


def interleave_of(arguments: dict[str, Any]) -> int:
    """Returns how many columns of a gate lie side by side, or 0 for all."""
    return Activation.parse(arguments.get("activation", "swiglu")).interleave


def whole(tensors: list[Tensor]) -> Tensor:
    """Returns one tensor unchanged, and a list of one tensor per group as a stack."""
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors)


def split_like(tensor: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Reverses ``whole``: returns the list that it was called with."""
    return [tensor] if len(like) == 1 else list(tensor.unbind())


class Powers:
    """Powers of two by letter; ``-`` negates them. A lower-case letter has one power per index of an axis. T, J, A,
    D and c are a single power; G and B have one per group, and g and b expand those to the rows of each group. l is
    0 for gates and j for linear parts, and L is the same for J. s cancels in the scales what their operands are
    multiplied by."""

    def __init__(self, arguments: dict[str, Any], everywhere: dict[str, int] | None, by_row: bool, seed: int):
        self.arguments, self.everywhere, self.by_row = arguments, everywhere, by_row
        self.generator = torch.Generator().manual_seed(seed)
        self.drawn: dict[str, Tensor] = {}

    def _own(self, letter: str, length: int) -> Tensor:
        """Returns the powers of a letter, which are drawn once. Without ``by_row`` all rows have the same power."""
        if letter not in self.drawn:
            if self.everywhere is not None:
                power = self.everywhere.get(STANDS_FOR.get(letter, letter), 0)
                self.drawn[letter] = torch.full((1,), power)
            else:
                count = 1 if letter in "AcD" or (letter in "tu" and not self.by_row) else length
                reach = REACH[letter]
                self.drawn[letter] = torch.randint(-reach, reach + 1, (count,), generator=self.generator)
        own = self.drawn[letter]
        return own.expand(length) if len(own) == 1 else own

    def of(self, letter: str, length: int) -> Tensor:
        if letter.startswith("-"):
            return -self.of(letter[1:], length)
        rows = self.arguments.get("rows", self.arguments.get("input_rows"))
        if letter == "t" and isinstance(rows, Tensor):
            return (
                self._own("u", len(rows))[rows.clamp(min=0)]
                if len(rows)
                else torch.zeros(0, dtype=torch.int64)
            )
        if letter == "u" and not isinstance(rows, Tensor):
            return self.of("t", length)
        if letter in "gb":
            group = groups_of(length, self.arguments["group_sizes"])
            own = self._own(letter.upper(), len(self.arguments["group_sizes"]))
            return torch.where(group < 0, 0, torch.cat([own, torch.zeros(1, dtype=own.dtype)])[group])
        if letter == "T":
            return self._own("t", 1)
        if letter == "J":
            return self._own("j", 1)
        if letter in "lL":
            return self._halves(letter, length)
        if letter == "s":
            letters = "GB" if "group_sizes" in self.arguments else "AD"
            each = length // 3
            own = [-self._own(x, each) for x in letters]
            return torch.cat([*own, torch.zeros(each, dtype=torch.int64)])
        return self._own(letter, length)

    def _halves(self, letter: str, length: int) -> Tensor:
        """Returns 0 for gates and j for linear parts, in the order of their columns."""
        own = self.of("J", 1).expand(length // 2) if letter == "L" else self._own("j", length // 2)
        both = torch.stack([torch.zeros_like(own), own])
        interleave = interleave_of(self.arguments) or max(1, length // 2)
        return both.unflatten(1, (-1, interleave)).transpose(0, 1).flatten()

    def times(self, value: Any, axes: Axes) -> Any:
        """Multiplies a tensor, or a list of the matrices of a stack, by the powers along its axes."""
        if isinstance(value, list):
            return split_like(self.times(whole(value), axes), value)
        total = torch.zeros((), dtype=torch.int64)
        for axis, letters in enumerate(axes):
            for letter in letters.split():
                of = self.of(letter, value.shape[axis])
                total = total + of.view(-1, *[1] * (value.dim() - axis - 1))
        return exact_scale(value, total)


def multiply(product: Product, arguments: dict[str, Any], powers: Powers) -> dict[str, Any]:
    """Multiplies the arguments by their powers. Arguments that cannot be multiplied are unchanged."""
    arguments_by_name = dict(arguments)
    for name, axes in product.powers.items():
        if arguments_by_name.get(name) is None:
            continue
        transposed = name == "b" and len(axes) == 3 and arguments_by_name.get("transpose_b") is False
        arguments_by_name[name] = powers.times(
            arguments_by_name[name], (axes[0], axes[2], axes[1]) if transposed else axes
        )
    return arguments_by_name


def reached(
    product: Product,
    axes: Axes,
    place: tuple[int, ...],
    result: Axes,
    shape: torch.Size,
    arguments_by_name: dict[str, Any],
) -> Tensor:
    """Returns a mask of the elements of a result that depend on one element of an argument."""
    known = {letter: torch.tensor([i]) for letter, i in zip(axes, place, strict=True)}
    sizes, rows = (
        arguments_by_name.get("group_sizes"),
        arguments_by_name.get("rows", arguments_by_name.get("input_rows")),
    )
    count = len(
        arguments_by_name["grad"]
        if "grad" in arguments_by_name
        else arguments_by_name.get("a", arguments_by_name.get("input"))
    )
    group = groups_of(len(rows) if isinstance(rows, Tensor) else count, sizes)
    everything = torch.arange(len(group))
    if "p" in known:
        known["t"] = known["p"]
    if "u" in known:
        known["t"] = everything[rows == known["u"]] if isinstance(rows, Tensor) else known["u"]
    if "t" in known:
        known["t"] = known["t"][group[known["t"]] >= 0]
    if "G" in known and "t" not in known:
        known["t"] = everything[group == known["G"]]
    if "G" not in known and "t" in known:
        known["G"] = group[known["t"]]
    if "t" in known and "u" not in known and isinstance(rows, Tensor):
        known["u"] = rows[known["t"]]
    if "l" in known:
        interleave = interleave_of(arguments_by_name) or 1
        half = (
            arguments_by_name["b"].shape[1] // 2
            if "b" in arguments_by_name
            else whole(arguments_by_name["fc1_weight"]).shape[1] // 2
        )
        at = known["l"]
        known["j"] = at // (2 * interleave) * interleave + at % interleave if interleave > 1 else at % half
    if "j" in known and "j2" in result:
        known["j2"] = torch.cat([known["j"], known["j"] + shape[-1] // 2])
    if "j" in axes:
        known.pop("l", None)
    mask = torch.ones(shape, dtype=torch.bool)
    for axis, letter in enumerate(result):
        if letter in known:
            along = torch.zeros(shape[axis], dtype=torch.bool)
            along[known[letter]] = True
            mask &= along.view(-1, *[1] * (len(shape) - axis - 1))
    return mask
