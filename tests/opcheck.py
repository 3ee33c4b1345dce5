"""torch.library.opcheck, and additional checks that every op rejects unsuitable tensors.

Nearly all of the time of torch's opcheck is one check, ``test_aot_dispatch_dynamic``, which traces an op for all sizes.
``test_opcheck.py`` traces every op with every format. Elsewhere a process on a CPU traces once for each
:func:`kind_of_call`: another call of the kind takes the same way through autograd and the fake kernels. The other
checks run with every call.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.optests import aot_autograd_check
from torch.utils._pytree import tree_map_only

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
TRACE = CHECKS[-1]
#: What this process has traced on a CPU.
TRACED: set[tuple[Any, ...]] = set()


def opcheck(
    op: torch._ops.OpOverload,
    arguments: tuple[Any, ...],
    options: dict[str, Any] | None = None,
    test_utils: tuple[str, ...] = CHECKS,
    always_trace: bool = False,
) -> None:
    """Checks an op with a valid call: torch's opcheck passes, and the op rejects None for a tensor, a buffer that
    requires a gradient and, on a GPU, each tensor that is on the CPU.

    Each error must name the argument, and no buffer may change.
    """
    schema = op._schema.arguments
    given = dict(zip((argument.name for argument in schema), arguments, strict=False)) | (options or {})
    kind = kind_of_call(op, given)
    checks = test_utils if always_trace or kind not in TRACED else tuple(c for c in test_utils if c != TRACE)
    if TRACE in checks and any("main_grad" in name and value is not None for name, value in given.items()):
        checks = tuple(check for check in checks if check != TRACE)
        trace(op, arguments, options or {})
    torch.library.opcheck(op, arguments, options or {}, test_utils=checks)
    if TRACE in test_utils and not any(
        isinstance(value, Tensor) and value.is_cuda for value in given.values()
    ):
        TRACED.add(kind)
    required = [argument.name for argument in schema if str(argument.type) == "Tensor"]
    written = [
        argument.name
        for argument in schema
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and _is_tensor(given, argument.name)
    ]
    alone = (
        sum(_holds_tensors(value) for value in given.values()) == 1
    )  # without it torch finds no kernel to call
    for name in required if not alone else []:
        _refuses(op, {**given, name: None}, name, "expected a tensor, got None.", TypeError, written)
    for name in written:
        if given[name].is_floating_point():
            leaf = given[name].detach().requires_grad_()
            wanted = "expected a tensor with requires_grad=False, got "
            _refuses(op, {**given, name: leaf}, name, wanted, ValueError, written)
    for name, tensor in given.items() if not alone else []:
        if isinstance(tensor, Tensor) and tensor.is_cuda:
            _refuses(op, {**given, name: tensor.cpu()}, r"[\w\[\]]+", "expected ", ValueError, written)


def trace(op: torch._ops.OpOverload, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """``test_aot_dispatch_dynamic``, which newer versions of torch call with copies of inputs that require a gradient.

    torch.autograd.grad of such a copy of a weight with a ``main_grad`` is refused. Here copies are made inside.
    """

    def with_copies(*arguments: Any, **options: Any) -> Any:
        arguments, options = tree_map_only(Tensor, torch.clone, (arguments, options))
        return op(*arguments, **options)

    aot_autograd_check(with_copies, arguments, options, dynamic=True, check_gradients="auto")


def kind_of_call(op: torch._ops.OpOverload, given: dict[str, Any]) -> tuple[Any, ...]:
    """Returns which arguments are given and, if one requires a gradient, what decides how autograd gets it."""
    if not any(_requires_grad(value) for value in given.values()):
        return (
            op,
            *sorted(name for name, value in given.items() if isinstance(value, Tensor | list | tuple)),
        )
    return (op, *((name, _kind(value)) for name, value in sorted(given.items())))


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.requires_grad, value.dtype.itemsize)
    if isinstance(value, list | tuple):
        return frozenset(_kind(one) for one in value)
    if isinstance(value, str):
        return value.split(":")[0]  # a format without its options
    return value if value is None or isinstance(value, bool) else type(value)


def _requires_grad(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_requires_grad(one) for one in value)
    return isinstance(value, Tensor) and value.requires_grad


def _is_tensor(given: dict[str, Any], name: str) -> bool:
    return isinstance(given.get(name), Tensor)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, list) and any(isinstance(x, Tensor) for x in value)
    )


def _refuses(
    op: torch._ops.OpOverload,
    given: dict[str, Any],
    name: str,
    why: str,
    error: type[Exception],
    written: list[str],
) -> None:
    held = {own: given[own].detach().clone() for own in written if given[own] is not None}
    with pytest.raises(error, match=f"argument '{name}': {re.escape(why)}"):
        op(**given)
    for own, before in held.items():
        torch.testing.assert_close(given[own].detach(), before, rtol=0, atol=0, equal_nan=True)
