"""The experts classes of transformers: found in its source, and made with small sizes and random weights."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.clients.imported import transformers
from transformer_plugin.nn._experts import not_computed, not_one_op

EXPERTS, HIDDEN, FFN, TOKENS, TOPK = 4, 32, 64, 24, 2


class Config:
    """What the classes read of their configurations, under all of its names. Activations are those of the families."""

    num_experts = num_local_experts = n_routed_experts = moe_num_experts = EXPERTS
    hidden_size = moe_hidden_size = HIDDEN
    moe_intermediate_size = intermediate_size = FFN
    moe_latent_size = None
    hidden_act = "silu"
    hidden_activation, mlp_hidden_act = "gelu_pytorch_tanh", "relu2"
    swiglu_alpha, swiglu_limit = 1.702, 0.5
    mlp_gate_softcap = mlp_up_softcap = 2.0
    post_norm_eps = 1e-6
    _experts_implementation = "eager"

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(options)


#: A decorated class, as transformers' own files write it.
_DECORATED = re.compile(r"^@use_experts_implementation(?:\(.*\))?\nclass (\w+)\(", re.MULTILINE)


@cache
def classes() -> dict[str, str]:
    """The decorated classes by name, and the module of each."""
    found: dict[str, str] = {}
    for file in sorted((Path(transformers().__file__).parent / "models").glob("*/modeling_*.py")):
        text = file.read_text()
        names = _DECORATED.findall(text)
        assert len(names) == text.count("\n@use_experts_implementation"), file
        found.update(dict.fromkeys(names, f"transformers.models.{file.parent.name}.{file.stem}"))
    return found


def kind_of(name: str) -> Any:
    if name not in classes():
        pytest.skip(f"transformers {transformers().__version__} has no {name}")
    return getattr(importlib.import_module(classes()[name]), name)


def make(name: str, **options: Any) -> Any:
    """An experts module with random weights."""
    torch.manual_seed(0)
    experts = kind_of(name)(Config(**options))
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 4)
    return experts


def routed(masked: int = EXPERTS) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, choices and routing weights: a masked choice, a token without expert, an expert without tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator)
    index = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:TOPK] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, TOPK, generator=generator)
    index[3, 1], index[5, :] = masked, masked
    return tokens, index, weights.masked_fill(index == masked, 0.0)


def results(experts: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """The output, and the gradients of tokens, routing weights and parameters."""
    tokens, index, weights = inputs
    tokens, weights = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    experts.zero_grad()
    output = experts(tokens, index, weights)
    output.square().sum().backward()
    grads = [tokens.grad, weights.grad, *(parameter.grad for parameter in experts.parameters())]
    assert all(grad is not None for grad in grads)
    return [output.detach(), *(grad.clone() for grad in grads if grad is not None)]


def expected_results(experts: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """The same of transformers' eager forward."""
    tokens, index, weights = inputs
    masked = index == EXPERTS
    # Some cannot take the index of no expert, before 5.24 none. An expert with a weight of 0 adds nothing, either.
    index = index.masked_fill(masked, 0)
    experts.config._experts_implementation = "eager"
    output, of_tokens, of_weights, *others = results(experts, (tokens, index, weights))
    experts.config._experts_implementation = "transformer_plugin"
    return [output, of_tokens, of_weights.masked_fill(masked, 0.0), *others]


def differences(got: list[Tensor], expected: list[Tensor]) -> list[float]:
    """The largest difference of each, relative to the largest value."""
    pairs = zip(got, expected, strict=True)
    return [float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs]


def are_near(found: list[float], output: float = 1e-5, gradients: float = 1e-4) -> bool:
    return found[0] <= output and all(each <= gradients for each in found[1:])


def table() -> str:
    """The rows of the page ``docs/training-frameworks.md``: how the classes are computed, and which."""
    rows: dict[str, list[str]] = {}
    for name in classes():
        experts = make(name)
        own = not_one_op(experts)
        how = not_computed(experts) or (f"own functions: {own}" if own else "one op")
        rows.setdefault(how, []).append(f"`{name}`")
    order = sorted(rows, key=lambda how: -len(rows[how]))
    return "\n".join(f"| {how} | {len(rows[how])} | {', '.join(rows[how])} |" for how in order)


if __name__ == "__main__":
    print(table())
