"""The table of ops of torch in docs/value-types.md: as functions and as methods, of every kind of value."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_plugin as tp
from transformer_plugin.tensor import GroupedTensor
from transformer_plugin.tensor._base import FormatTensor

PAGE = Path(__file__).parents[2] / "docs" / "value-types.md"
KINDS = ("quantized", "stack", "ragged")
SHAPES = {"quantized": (3, 16, 32), "stack": (3, 16, 32), "ragged": (48, 32)}
#: Of the ragged value; the last rows are in no group.
GROUPS, IN_GROUPS = (16, 0, 24), 40

#: Tested elsewhere: they need a GPU, a group of ranks, an optimizer or the weights of a layer.
ELSEWHERE = {
    *("_pin_memory", "is_pinned", "record_stream", "lift_fresh"),
    *("broadcast_", "allreduce_", "allgather_", "_allgather_base_"),
    *("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"),
    *("linear", "norm_linear", "grouped_linear", "grouped_mlp"),
    *("linear_out", "grouped_linear_out", "grouped_mlp_out"),
    "_amp_foreach_non_finite_check_and_unscale_",
}
#: Their results are random or undefined: only type and shape are compared.
RANDOM = ("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "rand", "randn", "empty")


def rows_of_the_page() -> list[tuple[str, dict[str, str]]]:
    """Each op of the table, and what the columns say."""
    section = PAGE.read_text().split("## Ops of torch")[1].split("\n## ")[0]
    found = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or cells[0] in ("ops", "---"):
            continue
        allowed = dict(zip(KINDS, cells[1:], strict=True))
        listed_names = re.sub(r"\([^)]*\)", "", cells[0].split(": ", 1)[1])  # without methods in parentheses
        names = list(dict.fromkeys(re.findall(r"`(\w+)`", listed_names)))
        prefix = "_foreach_" if "_foreach_" in names else ""
        plain = names[: names.index("_foreach_")] if prefix else names
        listed = names[names.index("_foreach_") + 1 :] if prefix else []
        if prefix and plain:  # "also _foreach_ with these, and ..."
            listed = [*(name for name in plain), *listed]
        found += [(name, allowed) for name in (*plain, *(prefix + name for name in listed))]
    return [(name, allowed) for name, allowed in found if name not in ELSEWHERE]


ROWS = rows_of_the_page()


def numbers(kind: str, device: torch.device, seed: int = 0) -> Tensor:
    """Positive numbers, so that every op has finite results."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(SHAPES[kind], generator=generator) + 0.25).to(device)


def value_of(kind: str, device: torch.device) -> Any:
    x = numbers(kind, device)
    if kind == "quantized":
        return tp.quantize(x, "fp8_block", columnwise=True)
    return GroupedTensor(x, torch.tensor(GROUPS, device=device) if kind == "ragged" else None)


def arguments(name: str, kind: str, device: torch.device) -> tuple[Any, ...]:
    """What follows the value, or for ``_foreach_`` the list of it."""
    base = name.removeprefix("_foreach_").rstrip("_")
    other, shape = numbers(kind, device, 1), SHAPES[kind]
    if name.startswith("_foreach_"):
        other = [other]  # type: ignore[assignment]
    special: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("add", "sub", "mul", "div", "pow", "rsub", "fill", "full_like"), (2.0,)),
        **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "clamp_min", "clamp_max"), (0.5,)),
        **dict.fromkeys(("maximum", "minimum", "copy"), (other,)),
        **dict.fromkeys(("addcmul", "addcdiv"), (other, other)),
        **dict.fromkeys(("new_empty", "new_zeros", "new_ones"), ((2, 3),)),
        **dict.fromkeys(("expand", "view_copy"), (shape,)),
        "lerp": (other, 0.5),
        "clamp": (0.3, 0.9),
        "masked_fill": (numbers(kind, device, 2) > 0.6, 0.0),
        "new_full": ((2, 3), 1.0),
        "new_empty_strided": ((2, 3), (3, 1)),
        "as_strided": (shape, torch.empty(shape).stride()),
        "view": (-1,),
        "_unsafe_view": ([-1],),
        "select": (0, 1),
        "split": (1,),
        "split_with_sizes": ([1, 2],),
        "bernoulli": (0.5,),
    }
    if name.startswith("_foreach_") and base in ("maximum", "minimum", "clamp_min", "clamp_max"):
        return (2.0,)
    return special.get(base, ())


def as_function(name: str) -> Callable[..., Any]:
    """torch's function, or where there is none the op."""
    if name in ("slice", "copy_"):
        return getattr(torch.ops.aten, name)
    if name == "view":
        return lambda value, size: torch.ops.aten.view(value, [size])
    found: Any = getattr(torch, name, None) or getattr(torch.ops.aten, name)
    return found


def forms(name: str, kind: str, device: torch.device) -> dict[str, Callable[[Any], Any]]:
    """The op as a function of a value, in each form that torch has."""
    rest = arguments(name, kind, device)
    if name.startswith("_foreach_"):
        return {"function": lambda v: as_function(name)([v], *rest)}
    result: dict[str, Callable[[Any], Any]] = {"function": lambda v: as_function(name)(v, *rest)}
    if name == "equal":
        result["function"] = lambda v: torch.equal(v, v)
        return {**result, "method": lambda v: v.equal(v)}
    if hasattr(Tensor, name) and name != "view_copy":
        result["method"] = lambda v: getattr(v, name)(*rest)
    return result


def parts_of(result: Any) -> list[Any]:
    """All tensors of a result, values as the plain tensor that they are."""
    if isinstance(result, list | tuple):
        return [part for each in result for part in parts_of(each)]
    return [result.dequantize() if isinstance(result, FormatTensor) else result]


def is_allowed(name: str, kind: str, allowed: str) -> bool:
    if allowed.startswith("only to its own shape"):
        return False  # the arguments above ask for the flat storage
    return not allowed.startswith("no")


def check_result(name: str, kind: str, got: Any, value: Any, wanted: Any, x: Tensor) -> None:
    """Against a plain tensor of the same numbers, ``x``, of which ``wanted`` is the result."""
    base = name.removeprefix("_foreach_")
    random = any(base.startswith(each) for each in RANDOM) or "empty" in base
    if name.endswith("_") and base != "detach_":
        expected = x.clone()
        if kind == "ragged" and base != "copy_":
            expected[IN_GROUPS:] = numbers(kind, x.device)[IN_GROUPS:]
        changed = value.dequantize()
        tolerance = 0.07 if kind == "quantized" else 0.0
        rows = slice(0, IN_GROUPS if kind == "ragged" else None)
        if not random:
            torch.testing.assert_close(changed[rows], expected[rows], rtol=tolerance, atol=0, equal_nan=True)
        if kind == "ragged" and base != "copy_":
            assert torch.equal(changed[IN_GROUPS:], expected[IN_GROUPS:]), "rows of no group"
        return
    for a, b in zip(parts_of(got), parts_of(wanted), strict=True):
        if not isinstance(b, Tensor):
            assert a == b
            continue
        assert a.shape == b.shape and a.dtype == b.dtype
        if not random:
            tolerance = 0.07 if kind == "quantized" else 1e-6
            torch.testing.assert_close(a, b, rtol=tolerance, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "allowed"), ROWS, ids=[name for name, _ in ROWS])
def test_ops_as_functions_and_methods(
    name: str, allowed: dict[str, str], kind: str, device: torch.device
) -> None:
    """Allowed ops give what they give of a plain tensor with the same numbers; others are a ValueError."""
    for form, call in forms(name, kind, device).items():
        value, x = value_of(kind, device), numbers(kind, device)
        if not is_allowed(name, kind, allowed[kind]):
            if (name, form, kind) == ("amax", "method", "quantized"):
                assert value.amax is None  # the attribute, as the page says
                continue
            with pytest.raises(ValueError, match="transformer_plugin::"):
                call(value)
            continue
        got, wanted = call(value), call(x)
        check_result(name, kind, got, value, wanted, x)


def test_the_page_has_many_ops() -> None:
    assert len(ROWS) > 110 and len({name for name, _ in ROWS}) == len(ROWS)
    assert {"amax", "add_", "_foreach_add_", "_foreach_norm", "detach_", "view_copy"} <= {n for n, _ in ROWS}


def test_amax_is_a_buffer_of_a_quantized_value(device: torch.device) -> None:
    x = numbers("stack", device)
    value = tp.quantize(x, "nvfp4")
    assert value.amax.shape == (3,) and torch.equal(value.amax, x.flatten(1).amax(1))
    stack = GroupedTensor(x)
    assert torch.equal(stack.amax(-1), x.amax(-1)) and torch.equal(stack.amax((0, 1)), x.amax((0, 1)))
