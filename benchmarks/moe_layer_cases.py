"""Layers, routings and competitors of :mod:`benchmarks.moe_layer`, and the float64 reference of a layer.

Every competitor has the same weights and tokens, and computes its own router. Tokens whose last chosen and first
unchosen logits are nearly equal are drawn again, so that routers with bfloat16 logits choose the same experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from transformer_plugin import nn
from transformer_plugin.formats import Format
from transformer_plugin.recipes import DelayedScaling, Recipe, recipe_from_name
from transformer_plugin.testing.numerics import relative_error

ROUTINGS = ("natural", "even", "maxvio2")
#: of the routing ``maxvio2``: the largest load over the mean load, minus 1.
VIOLATION = 2.0
#: relative distance between the last chosen and the first unchosen logit. Half of it is the rounding to bfloat16.
MARGIN = 1.25 * 2**-7
#: planned routings: the norm of the router's rows, and the logit that a planned expert gets in addition.
ROW_NORM, LIFT = 0.5, 3.0
#: relative error (norm) that is allowed for a bfloat16 result after several roundings.
BF16_BOUND = 2**-6
#: recipes that are always measured, and on request.
RECIPES, MORE_RECIPES = ("fp8_block", "fp8_tensor", "fp8_delayed"), ("mxfp8", "nvfp4")
#: the largest number of tokens whose results are compared with the reference.
VERIFIED_TOKENS = 256


@dataclass(frozen=True)
class Layer:
    """``tokens`` of ``hidden`` columns, each for ``topk`` of ``experts`` with ``ffn_hidden`` columns."""

    name: str
    hidden: int
    ffn_hidden: int
    experts: int
    topk: int
    tokens: int
    forward_only: bool = False

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of the experts' products in a forward; a forward and backward has three times."""
        return 2 * self.tokens * self.topk * 3 * self.hidden * self.ffn_hidden


LAYERS = (
    Layer("Qwen3-30B, 8192 tokens", 2048, 768, 128, 8, 8192),
    Layer("Qwen3-30B, 32768 tokens", 2048, 768, 128, 8, 32768),
    Layer("DeepSeek-V3 slice, 4096 tokens", 7168, 2048, 32, 8, 4096),
    Layer("Qwen3-30B, 256 tokens", 2048, 768, 128, 8, 256, forward_only=True),
)
#: for tests, on a CPU.
QUICK_LAYERS = (
    Layer("tiny", 128, 128, 8, 2, 64),
    Layer("tiny, forward", 128, 128, 8, 2, 16, forward_only=True),
)


def max_violation(indices: Tensor, experts: int) -> float:
    """MaxVio: the load of the busiest expert over the mean load, minus 1."""
    loads = torch.bincount(indices.flatten(), minlength=experts).double()
    return float(loads.max() / loads.mean() - 1)


def planned_experts(layer: Layer, routing: str, generator: torch.Generator) -> Tensor | None:
    """Returns the experts of each token, ``[tokens, topk]``; None for ``natural``, where the router decides."""
    device = generator.device
    if routing == "even":  # random orders of all experts, one after the other
        orders = torch.rand(
            layer.tokens * layer.topk // layer.experts, layer.experts, generator=generator, device=device
        )
        return orders.argsort(1).view(layer.tokens, layer.topk)
    if routing == "maxvio2":
        # Exponential loads: a random choice by logits that fall linearly, as steeply as the violation asks for.
        uniform = torch.rand(
            layer.tokens, layer.experts, generator=generator, device=device, dtype=torch.float64
        )
        noise = -(-uniform.log()).log()
        order = torch.randperm(layer.experts, generator=generator, device=device) / layer.experts
        low, high = 0.0, 50.0
        for _ in range(30):
            middle = (low + high) / 2
            indices = (noise - middle * order).topk(layer.topk).indices
            above = max_violation(indices, layer.experts) > VIOLATION
            low, high = (low, middle) if above else (middle, high)
        return indices
    return None


class Data:
    """Weights, tokens and the output's gradient of a layer. All stay at their addresses, so that CUDA graphs read the
    tokens of another routing."""

    def __init__(self, layer: Layer, device: torch.device) -> None:
        self.layer, self.device = layer, device
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            values = torch.empty(size, device=device, dtype=torch.bfloat16)
            return values.normal_(0.0, scale, generator=generator)

        self.fc1 = normal(layer.experts, 2 * layer.ffn_hidden, layer.hidden, scale=layer.hidden**-0.5)
        self.fc2 = normal(layer.experts, layer.hidden, layer.ffn_hidden, scale=layer.ffn_hidden**-0.5)
        self.grad = normal(layer.tokens, layer.hidden)
        self.router = torch.empty(layer.experts, layer.hidden, device=device, dtype=torch.bfloat16)
        self.tokens = torch.empty(layer.tokens, layer.hidden, device=device, dtype=torch.bfloat16)
        self.tokens.requires_grad_()
        self.indices = torch.empty(layer.tokens, layer.topk, device=device, dtype=torch.int64)
        self.route(ROUTINGS[0])

    @property
    def max_violation(self) -> float:
        """MaxVio of the present routing."""
        return max_violation(self.indices, self.layer.experts)

    @torch.no_grad()
    def route(self, routing: str) -> None:
        """Sets the router's weight and the tokens, in place."""
        layer = self.layer
        generator = torch.Generator(self.device).manual_seed(1 + ROUTINGS.index(routing))
        plan = planned_experts(layer, routing, generator)
        router = torch.randn(layer.hidden, layer.experts, generator=generator, device=self.device)
        if plan is None:
            self.router.copy_(router.t() * layer.hidden**-0.5)
        else:  # orthogonal rows: a token that contains the rows of its experts has large logits for them only
            self.router.copy_(torch.linalg.qr(router)[0].t() * ROW_NORM)
        self._draw_tokens(plan, generator)

    def _draw_tokens(self, plan: Tensor | None, generator: torch.Generator) -> None:
        layer, router = self.layer, self.router
        missing = torch.arange(layer.tokens, device=self.device)
        for _ in range(100):
            tokens = torch.randn(len(missing), layer.hidden, generator=generator, device=self.device)
            if plan is not None:
                chosen = torch.zeros(len(missing), layer.experts, device=self.device)
                tokens += LIFT / ROW_NORM**2 * (chosen.scatter_(1, plan[missing], 1.0) @ router.float())
            rounded = tokens.bfloat16()
            top = (rounded.double() @ router.double().t()).topk(layer.topk + 1)
            last, next_ = top.values[:, -2], top.values[:, -1]
            good = last - next_ > MARGIN * torch.maximum(last.abs(), next_.abs())
            indices = top.indices[:, :-1]
            if plan is not None:
                good &= (indices.sort(1).values == plan[missing].sort(1).values).all(1)
            self.tokens[missing[good]], self.indices[missing[good]] = rounded[good], indices[good]
            missing = missing[~good]
            if not len(missing):
                return
        raise RuntimeError(f"moe_layer: {layer.name}: {len(missing)} tokens are not routed as planned")


class Competitor:
    """One implementation of the layer. Its parameters are the data's memory, with gradients of their own."""

    name: str
    #: how its steps are run: "eager", "compiled" (one graph), "graph" (a captured CUDA graph).
    modes: ClassVar[tuple[str, ...]] = ("eager",)
    #: which of them a CUDA graph captures.
    captured: ClassVar[str] = "eager"
    recipe: Recipe | None = None

    def __init__(self, data: Data) -> None:
        self.data = data
        self.router, self.fc1, self.fc2 = (Parameter(each) for each in (data.router, data.fc1, data.fc2))

    def forward(self, tokens: Tensor) -> Tensor:
        """Computes the layer."""
        raise NotImplementedError

    def leaves(self) -> list[Tensor]:
        """The parameters."""
        return [self.router, self.fc1, self.fc2]

    def gradients(self) -> dict[str, Tensor]:
        """The parameters' gradients, in the layout of the data."""
        return {name: getattr(self, name).grad for name in ("router", "fc1", "fc2")}

    @property
    def caches_weights(self) -> bool:
        """Whether steps read weights that were quantized before them."""
        return False

    def quantize_weights(self) -> None:
        """Quantizes the weights for the steps that follow."""

    def cached_bytes(self) -> int:
        """The memory of the quantized weights."""
        return 0

    def bounds(self) -> tuple[float, float]:
        """The relative errors that are allowed for the output and for gradients."""
        if self.recipe is None:
            return BF16_BOUND, BF16_BOUND
        keys = (self.recipe.input_format, self.recipe.weight_format, self.recipe.grad_format)
        input, weight, grad = (Format.parse(key).gemm_tolerance for key in keys)
        return 3 * max(input, weight), 3 * max(input, weight, grad)


class Ours(Competitor):
    """``transformer_plugin.nn.MoE``, in bfloat16 or with a recipe."""

    modes = ("eager", "compiled", "graph")

    def __init__(self, data: Data, recipe: str) -> None:
        super().__init__(data)
        layer = data.layer
        self.name = f"ours {recipe}"
        self.recipe = None if recipe == "bf16" else recipe_from_name(recipe)
        sizes = (layer.hidden, layer.ffn_hidden, layer.experts, layer.topk)
        self.moe = nn.MoE(*sizes, device=data.device, dtype=torch.bfloat16, recipe=self.recipe)
        self.moe.router.weight = self.router
        self.moe.experts.fc1.weight, self.moe.experts.fc2.weight = self.fc1, self.fc2
        if self.caches_weights:
            self.quantize_weights()

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.moe(tokens).output
        return output

    @property
    def caches_weights(self) -> bool:
        return self.recipe is not None and not isinstance(self.recipe, DelayedScaling)

    def quantize_weights(self) -> None:
        self.moe.experts.quantize_weights()

    def cached_bytes(self) -> int:
        layers = (self.moe.experts.fc1, self.moe.experts.fc2)
        kept = [layer.quantized_weight for layer in layers]
        return sum(tensor.nbytes for each in kept if each is not None for tensor in each.tensors)


def reference(data: Data) -> dict[str, Tensor]:
    """The output and all gradients of the first tokens in float64, with the data's choice of experts."""
    count = min(data.layer.tokens, VERIFIED_TOKENS)
    names = ("tokens", "router", "fc1", "fc2")
    values = (data.tokens[:count], data.router, data.fc1, data.fc2)
    leaf = {name: value.detach().double().requires_grad_() for name, value in zip(names, values, strict=True)}
    indices = data.indices[:count]
    logits = leaf["tokens"] @ leaf["router"].t()
    weights = logits.gather(1, indices).softmax(1)
    output = torch.zeros_like(leaf["tokens"])
    for expert, (fc1, fc2) in enumerate(zip(leaf["fc1"].unbind(), leaf["fc2"].unbind(), strict=True)):
        token, slot = (indices == expert).nonzero(as_tuple=True)
        gate, linear = (leaf["tokens"][token] @ fc1.t()).chunk(2, dim=1)
        rows = (F.silu(gate) * linear) @ fc2.t()
        output = output.index_add(0, token, rows * weights[token, slot, None])
    gradients = torch.autograd.grad(output, list(leaf.values()), data.grad[:count].double())
    return {"output": output.detach(), **dict(zip(names, gradients, strict=True))}


def errors(competitor: Competitor, expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors of the output and all gradients, for the first tokens."""
    data = competitor.data
    count = len(expected["tokens"])
    tokens = data.tokens[:count].detach().clone().requires_grad_()
    for leaf in competitor.leaves():
        leaf.grad = None
    output = competitor.forward(tokens)
    output.backward(data.grad[:count])
    got = {"output": output.detach(), "tokens": tokens.grad, **competitor.gradients()}
    for leaf in competitor.leaves():
        leaf.grad = None
    return {name: relative_error(got[name], value) for name, value in expected.items()}


def fault(competitor: Competitor, found: dict[str, float]) -> str | None:
    """Says which result is further from the reference than allowed; None if all are right."""
    of_output, of_gradients = competitor.bounds()
    for name, error in found.items():
        bound = of_output if name == "output" else of_gradients
        if not error < bound:
            what = name if name == "output" else f"gradient of {name}"
            return f"wrong: {what}: relative error {error:.1e}, allowed {bound:.1e}"
    return None
