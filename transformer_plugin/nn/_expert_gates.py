"""The gates of Hugging Face experts that the op's SwiGLU computes: classes that define ``_apply_gate`` themselves.

Such a function is known if it compiles to the code of one of the functions below, which are transformers' (Apache
License 2.0), up to the names of its limit and its alpha. Any other function runs itself.
"""

from __future__ import annotations

from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from transformer_plugin._on_import import on_import


class _Gate(NamedTuple):
    """A function and the options of its activation."""

    function: Any
    options: tuple[str, ...] = ()


def _silu_of_module(self, gate_up):  # type: ignore[no-untyped-def]
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=self.limit)
    up = up.clamp(min=-self.limit, max=self.limit)
    return self.act_fn(gate) * up


def _silu(self, gate_up):  # type: ignore[no-untyped-def]
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(min=None, max=self.limit)
    up = up.clamp(min=-self.limit, max=self.limit)
    return F.silu(gate) * up


def _with_alpha(self, gate_up):  # type: ignore[no-untyped-def]
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=self.limit)
    up = up.clamp(min=-self.limit, max=self.limit)
    glu = gate * torch.sigmoid(gate * self.alpha)
    return (up + 1.0) * glu


def _with_alpha_of_halves(self, gate_up):  # type: ignore[no-untyped-def]
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(min=None, max=self.limit)
    up = up.clamp(min=-self.limit, max=self.limit)
    glu = gate * torch.sigmoid(gate * self.alpha)
    gated_output = (up + 1) * glu
    return gated_output


def _with_alpha_of_columns(self, gate_up):  # type: ignore[no-untyped-def]
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate = gate.clamp(min=None, max=self.limit)
    up = up.clamp(min=-self.limit, max=self.limit)
    glu = gate * torch.sigmoid(gate * self.alpha)
    gated_output = (up + 1) * glu
    return gated_output


_GATES = (
    _Gate(_silu_of_module),
    _Gate(_silu),
    _Gate(_with_alpha, ("offset=1",)),
    _Gate(_with_alpha_of_halves, ("offset=1",)),
    _Gate(_with_alpha_of_columns, ("interleave=1", "offset=1")),
)
#: Other names of attributes, as in the configurations.
_NAMES = {"swiglu_limit": "limit", "swiglu_alpha": "alpha"}
#: What the functions find outside of themselves.
_GLOBALS = {"F": F, "torch": torch}


def _code(code: CodeType) -> tuple[Any, ...]:
    names = tuple(_NAMES.get(name, name) for name in code.co_names)
    return code.co_code, repr(code.co_consts), names, code.co_varnames, code.co_freevars, code.co_argcount


@cache
def _options_of(function: FunctionType) -> str:
    """The options of a known function; "" of others. A name behind a colon is the attribute that has the number."""
    code = function.__code__
    known = next((gate for gate in _GATES if _code(gate.function.__code__) == _code(code)), None)
    if known is None or any(
        function.__globals__.get(name) is not value
        for name, value in _GLOBALS.items()
        if name in code.co_names
    ):
        return ""
    numbers = (f"{_NAMES.get(name, name)}:{name}" for name in code.co_names)
    return ",".join([*known.options, *(text for text in numbers if text.startswith(("limit:", "alpha:")))])


def _options_of_class(kind: type[torch.nn.Module]) -> str:
    gate: Any = getattr(kind, "_apply_gate", None)
    return _options_of(gate) if isinstance(gate, FunctionType) else ""


# torch's compiler, which takes long to import, is not to look into it.
on_import("torch._dynamo", lambda: torch.compiler.assume_constant_result(_options_of_class))


def _constant(number: Any) -> float:
    """The number, a constant of a graph: torch's compiler makes a variable of one that differs between layers."""
    if not torch.compiler.is_compiling():
        return float(number)
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return float(guard_scalar(number))


def key_of_gate(module: torch.nn.Module, function: str) -> str:
    """The key of the activation that ``_apply_gate`` of a class computes; "" if no op has it.

    ``function``: the op's name of the module's ``act_fn``; "" if it has none.
    """
    known = "" if "_apply_gate" in module.__dict__ else _options_of_class(type(module))
    if known == "" or (hasattr(module, "act_fn") and function != "swiglu"):
        return ""
    options = []
    for option in known.split(","):
        name, _, attribute = option.partition(":")
        number = getattr(module, attribute, None) if attribute else None
        if attribute and not (isinstance(number, int | float) and 1e-30 < number < 1e30):
            return ""
        options.append(f"{name}={_constant(number)}" if attribute else option)
    return f"swiglu:{','.join(options)}"
