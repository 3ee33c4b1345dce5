"""What layers compute, in plain PyTorch: of full parameters and inputs, in any dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Tensors = dict[str, Tensor]


def normalized(input: Tensor, weight: Tensor, bias: Tensor | None, zero_centered: bool) -> Tensor:
    """A layer norm with a bias, without one an RMS norm."""
    gamma = 1 + weight if zero_centered else weight
    if bias is None:
        return functional.rms_norm(input, weight.shape, gamma, 1e-5)
    return functional.layer_norm(input, weight.shape, gamma, bias, 1e-5)


def norm_linear(
    p: Tensors, input: Tensor, zero_centered: bool, returns_bias: bool, returns_norm: bool
) -> Sequence[Tensor]:
    """The product of the norm, then what else the layer returns."""
    norm = normalized(input, p["norm_weight"], p.get("norm_bias"), zero_centered)
    product = functional.linear(norm, p["weight"])
    results = [product, p["bias"]] if returns_bias else [product + p["bias"]]
    return [*results, norm] if returns_norm else results


def grouped(p: Tensors, x: Tensors, sizes: Sequence[int], returns_bias: bool) -> Sequence[Tensor]:
    """One product for each group of rows, zeros after the last."""
    input, rows = x["input"], []
    for g, part in enumerate(input.split([*sizes, input.shape[0] - sum(sizes)])[:-1]):
        product = functional.linear(part, p["weight"][g])
        if "bias" in p and not returns_bias:
            first = sum(sizes[:g])
            scale: Any = x["bias_scale"][first : first + sizes[g], None] if "bias_scale" in x else 1.0
            product = product + scale * p["bias"][g]
        rows.append(product)
    output = torch.cat([*rows, input.new_zeros(input.shape[0] - sum(sizes), rows[0].shape[1])])
    return (output, p["bias"]) if returns_bias else (output,)


def expert(p: Tensors, g: int, input: Tensor, probs: Tensor, interleave: int = 0) -> Tensor:
    """One expert's output for its rows, times their probabilities."""
    hidden = functional.linear(input, p["fc1.weight"][g], p["fc1.bias"][g] if "fc1.bias" in p else None)
    if interleave:
        gate, up = hidden.unflatten(1, (-1, 2, interleave)).unbind(2)
        gate, up = gate.flatten(1), up.flatten(1)
    else:
        gate, up = hidden.chunk(2, -1)
    output = functional.linear(functional.silu(gate) * up * probs[:, None], p["fc2.weight"][g])
    return output + probs[:, None] * p["fc2.bias"][g] if "fc2.bias" in p else output


def experts(p: Tensors, input: Tensor, probs: Tensor, sizes: Sequence[int], interleave: int) -> Tensor:
    """All groups of rows, zeros after the last."""
    left = input.shape[0] - sum(sizes)
    groups = zip(input.split([*sizes, left]), probs.split([*sizes, left]), strict=True)
    rows = [expert(p, g, *group, interleave) for g, group in enumerate(groups) if g < len(sizes)]
    return torch.cat([*rows, input.new_zeros(left, input.shape[1])])


def routing(weight: Tensor, tokens: Tensor, topk: int, coeff: float) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of each token's experts, by the sigmoids of its logits, the experts, and the auxiliary loss."""
    scores = functional.linear(tokens, weight).sigmoid()
    chosen, indices = scores.topk(topk, -1)
    load = torch.bincount(indices.flatten(), minlength=weight.shape[0]).to(tokens)
    of_all = (scores / scores.sum(-1, keepdim=True)).sum(0)
    aux = coeff * weight.shape[0] / (topk * tokens.shape[0] ** 2) * (load * of_all).sum()
    return chosen / chosen.sum(-1, keepdim=True), indices, aux


def mixture(p: Tensors, input: Tensor, topk: int, coeff: float, ranks: int) -> Sequence[Tensor]:
    """A mixture of experts, and the mean of the auxiliary losses of the rows of each of some ranks."""
    own = {name.removeprefix("experts."): value for name, value in p.items()}
    weights, indices, _ = routing(p["router.weight"], input, topk, coeff)
    output = torch.zeros_like(input)
    for g in range(p["router.weight"].shape[0]):
        token, slot = (indices == g).nonzero(as_tuple=True)
        output = output.index_add(0, token, expert(own, g, input[token], weights[token, slot]))
    losses = [routing(p["router.weight"], rows, topk, coeff)[2] for rows in input.chunk(ranks)]
    return output, torch.stack(losses).mean()
