"""torch.library.opcheck, and additional checks that every op rejects unsuitable tensors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor


def opcheck(
    op: torch._ops.OpOverload,
    arguments: tuple[Any, ...],
    options: dict[str, Any] | None = None,
    test_utils: tuple[str, ...] | None = None,
) -> None:
    """Checks an op with a valid call: torch's opcheck passes, and the op rejects None for a tensor, a buffer that
    requires a gradient and, on a GPU, each tensor that is on the CPU.

    Each error must name the argument, and no buffer may change.
    """
    torch.library.opcheck(op, arguments, options or {}, **({"test_utils": test_utils} if test_utils else {}))
    schema = op._schema.arguments
    given = dict(zip((argument.name for argument in schema), arguments, strict=False)) | (options or {})
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
