"""Ops that write the caller's memory, in code of Inductor: it passes that memory itself, and no copy of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from transformer_plugin.ops import expert_parallel as ep
from transformer_plugin.testing.numerics import assert_same_bits

#: Sizes that no other tensor of the calls has.
HIDDEN, CAPACITY, TOKENS = 24, 37, 5
SPARE = 3  # rows before and after buffers that are a part of the caller's memory


def arguments_of(code: str, op: str) -> list[str]:
    """What the only call of an op in the generated code is given by position; of a view, what it is a view of."""
    name = f"torch.ops.transformer_plugin.{op}.default"
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    (call,) = (each for each in calls if ast.unparse(each.func) == name)
    views = "reinterpret_tensor"
    given = [
        each.args[0] if isinstance(each, ast.Call) and ast.unparse(each.func) == views else each
        for each in call.args
    ]
    return [ast.unparse(each) for each in given]


def drawn() -> tuple[ep.Plan, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    indices = torch.rand(TOKENS, 4, generator=generator).argsort(1)[:, :2].contiguous()
    tensors = [torch.randn(TOKENS, width, generator=generator) for width in (HIDDEN, 2, HIDDEN)]
    return ep.plan(indices, 4, TOKENS, CAPACITY), tensors


def whole_memory() -> list[Tensor]:
    """For tokens and weights that dispatch receives, and for the gradient of the rows of combine."""
    rows = CAPACITY + 2 * SPARE
    return [torch.full((rows, HIDDEN), 7.0), torch.full((rows,), 7.0), torch.full((rows, HIDDEN), 7.0)]


def buffers_of(memory: list[Tensor]) -> list[Tensor]:
    return [each[SPARE : SPARE + CAPACITY] for each in memory]


@pytest.mark.parametrize("views", [False, True], ids=["buffers", "views in the graph"])
@pytest.mark.usefixtures("fresh_compiler")
def test_inductor_passes_the_memory_of_the_caller(views: bool) -> None:
    """The graph writes to the buffers by the ops, and by itself, and reads them. With ``views`` it makes them from
    larger tensors of the caller."""
    plan, inputs = drawn()

    def call(x: Tensor, w: Tensor, grad: Tensor, *given: Tensor) -> Tensor:
        recv, recv_weights, grad_rows = buffers_of(list(given)) if views else given
        ep.dispatch_out(2 * x, w, plan.slot, plan.source, recv, recv_weights)
        ep.combine_backward_out(grad + 1, plan.slot, plan.source, grad_rows)
        grad_rows.mul_(2)
        return recv[:, 0] + recv_weights + grad_rows[:, 0]

    def run(function: Callable[..., Tensor], memory: list[Tensor]) -> Tensor:
        return function(*inputs, *(memory if views else buffers_of(memory)))

    memory, expected = whole_memory(), whole_memory()
    wanted = run(call, expected)
    compiled = torch.compile(call, fullgraph=True)
    got, codes = run_and_get_code(run, compiled, memory)
    assert_same_bits(got, wanted)
    for number, (mine, other) in enumerate(zip(memory, expected, strict=True)):
        assert_same_bits(mine, other, f"buffer {number}")
        assert (mine[:SPARE] == 7).all() and (mine[-SPARE:] == 7).all()
    (code,) = codes
    dispatch, backward = (arguments_of(code, op) for op in ("dispatch_out", "combine_backward_out"))
    for argument in (dispatch[4], dispatch[5], backward[3]):
        assert re.fullmatch(r"arg\d+_1", argument), code  # an input of the compiled function
    # Nothing of the size of a buffer is allocated: a copy would be.
    for rows in (CAPACITY, CAPACITY + 2 * SPARE):
        assert f"empty_strided_cpu(({rows}, {HIDDEN})" not in code
