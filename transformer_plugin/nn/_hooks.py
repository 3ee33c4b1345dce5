"""Hooks of two layers that one op runs: whether the op has every tensor that they need, and their calls.

The rule: the op runs both layers while no hook needs a tensor that it does not make, which are the output of the first
layer and the input of the second.

- Forward pre-hooks of the first layer get its input and may replace it.
- Forward pre-hooks and forward hooks of the second layer are called if their code does not use the parameter that holds
  the layer's input: ``hook(module, *unused)``, ``hook(module, args, output)`` that uses ``module`` and ``output``.
- With any other hook, the two layers are called one after the other: forward hooks of the first layer, which run
  between the products; backward hooks of either, which need gradients between them; and hooks that are called even if
  the layer raises.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.nn.modules import module as of_all_modules

#: Functions that read the variables of their caller.
_READ_FRAMES = frozenset(("locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe", "stack"))


def have_hooks(*layers: torch.nn.Module) -> bool:
    """Whether torch would call any hook of the layers."""
    for layer in layers:
        if (
            layer._forward_pre_hooks
            or layer._forward_hooks
            or layer._backward_pre_hooks
            or layer._backward_hooks
        ):
            return True
    return bool(of_all_modules._has_any_global_hook())


def allow_one_op(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    """Whether no hook of the two layers needs a tensor between them."""
    if (
        first._forward_hooks
        or first._backward_pre_hooks
        or first._backward_hooks
        or second._backward_pre_hooks
        or second._backward_hooks
        or second._forward_hooks_always_called
        or of_all_modules._global_forward_hooks
        or of_all_modules._global_backward_pre_hooks
        or of_all_modules._global_backward_hooks
    ):
        return False
    hooks = (
        *of_all_modules._global_forward_pre_hooks.values(),
        *second._forward_pre_hooks.values(),
        *second._forward_hooks.values(),
    )
    # The compiler does not look into the code of a function.
    return not hooks or (not torch.compiler.is_compiling() and not any(uses_input(hook) for hook in hooks))


def uses_input(hook: Callable[..., Any]) -> bool:
    """Whether a hook may use its second argument, the layer's input. False only if its code never names it."""
    called: Any = hook
    position = 1
    while isinstance(called, functools.partial | MethodType):
        if isinstance(called, MethodType):
            called, position = called.__func__, position + 1
        else:
            called, position = called.func, position + len(called.args)
    return not isinstance(called, FunctionType) or _uses(called.__code__, position)


@functools.lru_cache(maxsize=1024)
def _uses(code: CodeType, position: int) -> bool:
    """Whether code may use the argument at a position."""
    if position < code.co_argcount:
        name = code.co_varnames[position]
    elif code.co_flags & inspect.CO_VARARGS:
        name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
    else:
        return True
    if name in code.co_cellvars or not _READ_FRAMES.isdisjoint(code.co_names):
        return True
    operands = (i.argval for i in dis.get_instructions(code))  # some instructions load two variables
    return any(name in operand if isinstance(operand, tuple) else name == operand for operand in operands)


Call = tuple[tuple[Any, ...], dict[str, Any]]


def call_pre_hooks(layer: torch.nn.Module, args: tuple[Any, ...]) -> Call:
    """Calls the forward pre-hooks as ``Module.__call__`` does. Returns the arguments that the layer then gets."""
    kwargs: dict[str, Any] = {}
    hooks = (*of_all_modules._global_forward_pre_hooks.items(), *layer._forward_pre_hooks.items())
    for key, hook in hooks:
        with_kwargs = key in layer._forward_pre_hooks_with_kwargs
        result: Any = hook(layer, args, kwargs) if with_kwargs else hook(layer, args)
        if result is None:
            continue
        if not with_kwargs:
            args = result if isinstance(result, tuple) else (result,)
        elif isinstance(result, tuple) and len(result) == 2:
            args, kwargs = result
        else:
            raise RuntimeError(
                f"forward pre-hook must return None or a tuple of (new_args, new_kwargs), but got {result}."
            )
    return args, kwargs


def call_forward_hooks(layer: torch.nn.Module, call: Call, output: Any) -> Any:
    """Calls the forward hooks as ``Module.__call__`` does. Returns the output that the caller then gets."""
    for key, hook in (*of_all_modules._global_forward_hooks.items(), *layer._forward_hooks.items()):
        with_kwargs = (
            key in layer._forward_hooks_with_kwargs or key in of_all_modules._global_forward_hooks_with_kwargs
        )
        args, kwargs = call
        result = hook(layer, args, kwargs, output) if with_kwargs else hook(layer, args, output)
        output = output if result is None else result
    return output
