"""Shared by the tests of a whole MoE layer: kinds of routing, recipes, a float64 reference, and NaN in fresh memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_plugin import ops
from transformer_plugin.formats import Format
from transformer_plugin.nn import DispatchConfig, MoE, RouterConfig, Routing, TopKRouter
from transformer_plugin.recipes import DelayedScaling, NVFP4BlockScaling, Recipe, recipe_from_name
from transformer_plugin.testing.quantize_cases import width_for

NAMES = ("none", "bf16", "fp8_block", "fp8_tensor", "fp8_delayed", "fp8_row", "mxfp8", "nvfp4")
#: the relative error (norm) that a bfloat16 result may have after several roundings.
BF16_BOUND = 2**-6
#: ``skewed``: how much lower the logits of each expert are than those of the one before.
LIFT = 4.0


@dataclass(frozen=True)
class Case:
    """A layer, its tokens, and how they choose experts.

    ``plan``: ``""``, as random logits say; ``"skewed"``, expert 0 most and the last ones never; ``"masked"`` and
    ``"duplicated"``, by a router that names no expert (-1), or one expert twice.
    """

    name: str
    tokens: int = 48
    hidden: int = 64
    ffn: int = 96
    experts: int = 6
    topk: int = 2
    capacity: int | None = None
    alignment: int | None = None
    bias: bool = False
    plan: str = ""

    def fitting(self, name: str) -> Case:
        """The case with widths that a recipe takes."""
        recipe = recipe_of(name)
        keys = () if recipe is None else (recipe.input_format, recipe.weight_format, recipe.grad_format)
        return replace(self, hidden=width_for(self.hidden, *keys), ffn=width_for(self.ffn, *keys))

    @property
    def is_planned(self) -> bool:
        return self.plan in ("masked", "duplicated")


CASES = (
    Case("natural"),
    Case("biases", bias=True),
    Case("dropped rows", capacity=64),
    Case("dropped rows, skewed", capacity=48, plan="skewed", bias=True),
    Case("padded rows", alignment=16, bias=True),
    Case("padded and dropped rows", tokens=43, alignment=16, capacity=80, plan="skewed"),
    Case("almost all rows dropped", capacity=16),
    Case("masked", plan="masked"),
    Case("duplicated", plan="duplicated"),
    Case("masked, dropped rows", plan="masked", capacity=32),
    Case("uneven, experts without tokens", plan="skewed"),
    Case("one expert has all tokens", plan="skewed", topk=1),
    Case("no tokens", tokens=0),
    Case("one token", tokens=1),
    Case("topk 1", topk=1),
    Case("topk is all experts", topk=6),
    Case("1024 experts", tokens=12, hidden=32, ffn=16, experts=1024, topk=4),
    Case("odd widths", hidden=37, ffn=29),
    Case("odd widths, biases", hidden=130, ffn=37, bias=True),
)


def recipe_of(name: str) -> Recipe | None:
    """The recipe of a name, without random rounding."""
    return NVFP4BlockScaling(stochastic_rounding=False) if name == "nvfp4" else recipe_from_name(name)


def row_multiple(name: str) -> int:
    """What the rows of each expert are a multiple of."""
    recipe = recipe_of(name)
    return 1 if recipe is None else Format.parse(recipe.input_format).group_multiple


def bounds(name: str, dtype: torch.dtype) -> tuple[float, float]:
    """The relative errors (norm) that are allowed for the output and for gradients: those of the formats' products, of
    which three follow each other."""
    least = BF16_BOUND if dtype == torch.bfloat16 else 1e-5
    recipe = recipe_of(name)
    if recipe is None:
        return least, least
    keys = (recipe.input_format, recipe.weight_format, recipe.grad_format)
    input, weight, grad = (Format.parse(key).gemm_tolerance for key in keys)
    return max(least, 3 * max(input, weight)), max(least, 3 * max(input, weight, grad))


class PlannedRouter(torch.nn.Module):
    """Chooses given experts, and weights them by the softmax of their logits."""

    def __init__(self, weight: Parameter, indices: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.indices = indices

    def forward(self, tokens: Tensor) -> Routing:
        logits = ops.router_logits(tokens, self.weight)
        weights = logits.gather(1, self.indices.clamp(0, self.weight.shape[0] - 1).long()).softmax(-1)
        load = ops.count_tokens_per_expert(self.indices, self.weight.shape[0])
        return Routing(self.indices, weights, logits.new_zeros(()), load)


def planned(case: Case, generator: torch.Generator) -> Tensor:
    """The experts of each token. Expert 1 has no token, a token has no expert, another one has two times the same."""
    indices = torch.rand(case.tokens, case.experts, generator=generator)
    indices[:, 1] = 2.0
    indices = indices.argsort(1)[:, : case.topk].int()
    if case.plan == "masked":
        indices[torch.rand(indices.shape, generator=generator) < 0.3] = -1
        indices[3] = -1
        indices[7, 0] = -1
    else:
        indices[::3, 1] = indices[::3, 0]
    return indices


def layer_of(case: Case, name: str, dtype: torch.dtype, device: torch.device, **options: object) -> MoE:
    """A layer with the same initial values in every call and on every device."""
    # With the softmax over one expert the router would have no gradient.
    router = RouterConfig(score_function="sigmoid" if case.topk == 1 else "softmax")
    layer = MoE(
        case.hidden,
        case.ffn,
        case.experts,
        case.topk,
        router=router,
        dispatch=DispatchConfig(capacity=case.capacity, alignment=case.alignment),
        bias=case.bias,
        dtype=dtype,
        device=device,
        recipe=recipe_of(name),
        **options,  # type: ignore[arg-type]
    )
    weight, generator = layer.router.weight, torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            values = torch.rand(parameter.shape, generator=generator) * 2 - 1
            parameter.copy_(values * parameter.shape[-1] ** -0.5)
        if case.plan == "skewed":  # the first column of all tokens is 1
            weight[:, 0] = -LIFT * torch.arange(case.experts)
    if case.is_planned:
        layer.router = PlannedRouter(weight, planned(case, generator).to(device))
    return layer


def tokens_of(case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The tokens, and the gradient of the output."""
    generator = torch.Generator().manual_seed(100 + seed)
    tokens, grad = (torch.randn(case.tokens, case.hidden, generator=generator) for _ in range(2))
    if case.plan == "skewed":
        tokens[:, 0] = 1.0
    return tokens.to(device, dtype), grad.to(device, dtype)


def run(layer: MoE, forward: Callable[[Tensor], Tensor], tokens: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The output and all gradients of a step. Delayed scaling has the scales of a step before with the same values."""
    recipe = layer.experts.fc1.recipe
    for _ in range(2 if isinstance(recipe, DelayedScaling) else 1):
        leaves = {"tokens": tokens.clone().requires_grad_(), **dict(layer.named_parameters())}
        output = forward(leaves["tokens"])
        gradients = torch.autograd.grad(output, list(leaves.values()), grad)
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN, or the largest integer, so that whatever is read before it is written has an effect."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def leave_nan(device: torch.device) -> None:
    """Fills memory that is allocated next with bytes that are NaN in every float format, and -1 as an integer."""
    blocks = [torch.full((2**k,), 255, dtype=torch.uint8, device=device) for k in range(8, 20)]
    if device.type == "cuda":  # smaller blocks are parts of these
        blocks += [torch.full((2**23,), 255, dtype=torch.uint8, device=device) for _ in range(4)]
    blocks.clear()


def indices_of(layer: MoE, tokens: Tensor) -> Tensor:
    """The experts that the layer's router chooses."""
    router = layer.router
    assert isinstance(router, TopKRouter | PlannedRouter)
    return router(tokens).indices.cpu().long()


def kept_pairs(indices: Tensor, experts: int, capacity: int | None, multiple: int) -> Tensor:
    """Which (token, k) have a row: those of an expert, up to the capacity, expert by expert."""
    kept = torch.zeros(indices.shape, dtype=torch.bool)
    row = 0
    for expert in range(experts):
        for token, k in (indices == expert).nonzero().tolist():
            kept[token, k] = capacity is None or row < capacity
            row += 1
        row = -(-row // multiple) * multiple
    return kept


def in_float64(case: Case, name: str, layer: MoE, tokens: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The output and all gradients: a loop over experts in plain PyTorch. Only the choice of experts is the layer's."""
    indices = indices_of(layer, tokens)
    kept = kept_pairs(indices, case.experts, case.capacity, case.alignment or row_multiple(name))
    leaves = {"tokens": tokens, **dict(layer.named_parameters())}
    leaf = {key: value.detach().cpu().double().requires_grad_() for key, value in leaves.items()}
    logits = leaf["tokens"] @ leaf["router.weight"].t()
    chosen = logits.gather(1, indices.clamp(0, case.experts - 1))
    if not case.is_planned:  # the choice is right, up to ties of rounded logits
        assert bool((logits.topk(case.topk).values[:, -1] - chosen.amin(1) < 2e-2).all())
    weights = chosen.sigmoid() if case.topk == 1 else chosen.softmax(1)
    output = leaf["tokens"] * 0.0
    for expert in range(case.experts):
        token, k = ((indices == expert) & kept).nonzero(as_tuple=True)
        if not len(token):
            continue
        hidden = leaf["tokens"][token] @ leaf["experts.fc1.weight"][expert].t()
        if case.bias:
            hidden = hidden + leaf["experts.fc1.bias"][expert]
        gate, linear = hidden.chunk(2, dim=1)
        rows = (gate * gate.sigmoid() * linear) @ leaf["experts.fc2.weight"][expert].t()
        if case.bias:
            rows = rows + leaf["experts.fc2.bias"][expert]
        output = output.index_add(0, token, rows * weights[token, k, None])
    gradients = torch.autograd.grad(output, list(leaf.values()), grad.cpu().double(), materialize_grads=True)
    return {"output": output.detach(), **dict(zip(leaf, gradients, strict=True))}
