"""What the axes of products' arguments and results are, for every reference of a product; powers of two along them, and
which elements of a result an element of an argument is used for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.ops.domain_draw import exact_scale

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Product:
    """What the axes of arguments and results are, a letter each: t rows, u those that ``rows`` takes them from, n and k
    columns, G groups, j features behind SwiGLU, j2 their gradients, l those before it, p rows of probabilities, 1 no
    axis. And the powers of two that an argument may be multiplied by, and by which its results are then: along each
    axis a sum of letters (:class:`Powers`)."""

    arguments: dict[str, Axes]
    results: list[Axes]
    powers: dict[str, Axes] = field(default_factory=dict)
    of_results: list[Axes] = field(default_factory=list)
    #: Where infinities saturate, or are curved into numbers.
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
_SWIGLU = Product(
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
    "linear_scaled": Product(_SCALED, [("t", "n")], _SCALED_POWERS, [("A D",)], nan_only=True),
    "grouped_linear_scaled": Product(
        _GROUPED_SCALED, [("t", "n")], _GROUPED_SCALED_POWERS, [("g b", "")], nan_only=True
    ),
    "grouped_gemm_swiglu": _SWIGLU,
    "grouped_gemm_swiglu_quantize": Product(
        _SWIGLU.arguments,
        _SWIGLU.results,
        {**_SWIGLU.powers, "b": ("", "L", "-k"), "bias": ("", "L")},
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

#: What a result is not made of: the product before SwiGLU, and a probability's own gradient.
NOT_USED = (("probs", ("t", "l")), ("probs", ("t",)))
STANDS_FOR = {"u": "t", "T": "t", "g": "G", "b": "B", "D": "B", "l": "j", "L": "j", "J": "j"}
#: How far powers of each letter go that are drawn.
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
    """The group of each row, -1 past the last."""
    if sizes is None:
        return torch.zeros(rows, dtype=torch.int64)
    group = torch.arange(len(sizes)).repeat_interleave(sizes)
    return torch.cat([group, torch.full((rows - len(group),), -1)])


def whole(tensors: list[Tensor]) -> Tensor:
    """One tensor, or what is a tensor for each group as a stack."""
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors)


def parted(tensor: Tensor, like: list[Tensor]) -> list[Tensor]:
    """As ``whole`` found it."""
    return [tensor] if len(like) == 1 else list(tensor.unbind())


class Powers:
    """Powers of two by letter, - for less. A lower-case letter has one for each index of an axis; T, J, A, D and c are
    one number; G and B are by group, and g and b those of a row's group; l is none for gates and j for linear parts, L
    the same of J; s undoes in scales what their operands are multiplied by."""

    def __init__(self, arguments: dict[str, Any], everywhere: dict[str, int] | None, by_row: bool, seed: int):
        self.arguments, self.everywhere, self.by_row = arguments, everywhere, by_row
        self.generator = torch.Generator().manual_seed(seed)
        self.drawn: dict[str, Tensor] = {}

    def _own(self, letter: str, length: int) -> Tensor:
        """Drawn once. Without ``by_row`` rows have the same one."""
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
        """None of gates, j of linear parts, as they lie."""
        own = self.of("J", 1).expand(length // 2) if letter == "L" else self._own("j", length // 2)
        both = torch.stack([torch.zeros_like(own), own])
        interleave = self.arguments.get("interleave", 0) or max(1, length // 2)
        return both.unflatten(1, (-1, interleave)).transpose(0, 1).flatten()

    def times(self, value: Any, axes: Axes) -> Any:
        """A tensor, or a list of what is a stack otherwise, by the powers along its axes."""
        if isinstance(value, list):
            return parted(self.times(whole(value), axes), value)
        total = torch.zeros((), dtype=torch.int64)
        for axis, letters in enumerate(axes):
            for letter in letters.split():
                of = self.of(letter, value.shape[axis])
                total = total + of.view(-1, *[1] * (value.dim() - axis - 1))
        return exact_scale(value, total)


def multiplied(product: Product, arguments: dict[str, Any], powers: Powers) -> dict[str, Any]:
    """Without what cannot be multiplied by row."""
    given = dict(arguments)
    for name, axes in product.powers.items():
        if given.get(name) is None:
            continue
        transposed = name == "b" and len(axes) == 3 and given.get("transpose_b") is False
        given[name] = powers.times(given[name], (axes[0], axes[2], axes[1]) if transposed else axes)
    return given


def reached(
    product: Product,
    axes: Axes,
    place: tuple[int, ...],
    result: Axes,
    shape: torch.Size,
    given: dict[str, Any],
) -> Tensor:
    """Which elements of a result an argument's element is used for."""
    known = {letter: torch.tensor([i]) for letter, i in zip(axes, place, strict=True)}
    sizes, rows = given.get("group_sizes"), given.get("rows", given.get("input_rows"))
    count = len(given["grad"] if "grad" in given else given.get("a", given.get("input")))
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
        interleave = given.get("interleave", 0) or 1
        half = given["b"].shape[1] // 2 if "b" in given else given["fc1_weight"].shape[1] // 2
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
