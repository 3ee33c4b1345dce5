"""A Hugging Face model with this package's experts beside its own: training steps, a layer, the experts of gpt-oss.

    python -m benchmarks.hf_step            # needs a GPU of 80 GB
    python -m benchmarks.hf_step --quick    # small sizes, on any device: shows that it runs

Models are a few layers of Qwen3-30B with random weights; a step is forward, backward and AdamW on 2 x 4096 words.
Competitors of a group alternate in one run; losses of the first step are compared before timing. ``by name`` is
``experts_implementation="transformer_plugin"``, ``converted`` is ``tp.convert``, which takes the linear layers, too.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import transformer_plugin as tp
from benchmarks.common import Time, launched_sustained_times, launched_times, synchronize, write
from transformer_plugin.integrations import hf
from transformer_plugin.recipes import Float8BlockScaling, Recipe

#: A step's loss may differ from that of the stock model by so much, relative to it.
TOLERANCE = {"": 2e-2, "fp8_block": 5e-2}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run."""

    layers: int = 4
    words: tuple[int, int] = (2, 4096)
    micro_batches: int = 4
    model: tuple[tuple[str, int], ...] = (
        ("vocab_size", 151936),
        ("hidden_size", 2048),
        ("intermediate_size", 6144),
        ("moe_intermediate_size", 768),
        ("num_experts", 128),
        ("num_experts_per_tok", 8),
        ("num_attention_heads", 32),
        ("num_key_value_heads", 4),
        ("head_dim", 128),
    )
    #: of gpt-oss-20b: hidden and intermediate size, experts, experts per token, tokens.
    gpt_oss: tuple[int, int, int, int, int] = (2880, 2880, 32, 4, 8192)


QUICK = Sizes(
    2,
    (2, 32),
    2,
    (
        ("vocab_size", 128),
        ("hidden_size", 128),
        ("intermediate_size", 128),
        ("moe_intermediate_size", 128),
        ("num_experts", 8),
        ("num_experts_per_tok", 2),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 2),
        ("head_dim", 32),
    ),
    (128, 128, 4, 2, 64),
)


@dataclass(frozen=True)
class Variant:
    """How the experts of a model are computed."""

    name: str
    implementation: str = "transformer_plugin"
    converts: bool = False
    recipe: Recipe | None = None

    @property
    def tolerance(self) -> float:
        return TOLERANCE["fp8_block" if self.recipe else ""]


STOCK = Variant("stock", "grouped_mm")
BF16 = Variant("by name")
VARIANTS = (
    STOCK,
    BF16,
    Variant("converted", "grouped_mm", True),
    Variant("converted, fp8_block", "grouped_mm", True, Float8BlockScaling()),
)


class Step:
    """Training of one model on the same words."""

    def __init__(self, variant: Variant, sizes: Sizes, device: torch.device, compiled: bool) -> None:
        import transformers

        config = transformers.Qwen3MoeConfig(
            num_hidden_layers=sizes.layers, mlp_only_layers=[], **dict(sizes.model)
        )
        torch.manual_seed(0)
        with device:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.set_experts_implementation(variant.implementation)
        if variant.converts:
            tp.convert(model, variant.recipe, lambda module, name: name != "lm_head")
        elif variant.recipe is not None:
            hf.set_recipe(model, variant.recipe)
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=device.type == "cuda")
        self.run: Callable[..., Any] = torch.compile(model) if compiled else model
        generator = torch.Generator().manual_seed(1)
        vocabulary = dict(sizes.model)["vocab_size"]
        shape = (sizes.micro_batches, *sizes.words)
        self.words = torch.randint(vocabulary, shape, generator=generator).to(device)

    def __call__(self, micro_batches: int = 1) -> Tensor:
        """One step; returns the loss of its first micro-batch."""
        losses = []
        for words in self.words[:micro_batches]:
            loss = self.run(words, labels=words, use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return losses[0]


def measured(calls: dict[str, Callable[[], Any]], device: torch.device, base: str) -> list[dict[str, Any]]:
    """The times of calls, rested and sustained, and their ratios to one of them."""
    if device.type != "cuda":
        from benchmarks.common import host_times

        rested = sustained = host_times(calls, device, rounds=3, repeat=1, warm=1)
    else:
        rested = launched_times(calls, rounds=5, most=1)
        sustained = launched_sustained_times(calls, rounds=8)
    return [
        {
            "variant": name,
            "us": rested[name],
            "sustained_us": sustained[name],
            f"{base}_over": ratio(rested[base], rested[name]),
            f"{base}_over_sustained": ratio(sustained[base], sustained[name]),
        }
        for name in calls
    ]


def ratio(base: Time, other: Time) -> float:
    return round(base.median / other.median, 3)


def step_rows(sizes: Sizes, device: torch.device, compiled: bool) -> list[dict[str, Any]]:
    """Whole steps, of one and of several micro-batches."""
    steps = {variant.name: Step(variant, sizes, device, compiled) for variant in VARIANTS}
    expected = float(steps[STOCK.name]())
    for variant in VARIANTS[1:]:
        loss = float(steps[variant.name]())
        assert abs(loss - expected) < variant.tolerance * expected, (variant.name, loss, expected)
    rows = []
    for count in (1, sizes.micro_batches):
        calls = {name: (lambda step=step, count=count: step(count)) for name, step in steps.items()}
        for row in measured(calls, device, STOCK.name):
            rows.append({"work": "step", "compiled": compiled, "micro_batches": count, **row})
    return rows


def layer_rows(sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """The experts of a layer through the registry, beside the layer of this package with the same weights."""
    import transformers
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    of = dict(sizes.model)
    config = transformers.Qwen3MoeConfig(**of)
    config._experts_implementation = hf.NAME
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    tokens_count, hidden, topk = sizes.words[0] * sizes.words[1], of["hidden_size"], of["num_experts_per_tok"]
    experts = Qwen3MoeExperts(config).to(**options)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.02)
    ours = tp.nn.GroupedMLP(of["num_experts"], hidden, of["moe_intermediate_size"], **options)
    with torch.no_grad():
        ours.fc1.weight.copy_(experts.gate_up_proj)
        ours.fc2.weight.copy_(experts.down_proj)
    tokens = torch.randn(tokens_count, hidden, **options).requires_grad_()
    weights, indices = torch.rand(tokens_count, of["num_experts"], device=device).topk(topk)
    grad = torch.randn(tokens_count, hidden, **options)
    dispatcher = tp.nn.MoE(hidden, of["moe_intermediate_size"], of["num_experts"], topk, **options).dispatcher

    def by_name() -> Tensor:
        tokens.grad = None
        output: Tensor = experts(tokens, indices, weights)
        output.backward(grad)
        return output

    def of_package() -> Tensor:
        tokens.grad = None
        output = dispatcher.run(ours, tokens, indices, weights)[0]
        output.backward(grad)
        return output

    assert torch.equal(by_name(), of_package())
    calls: dict[str, Callable[[], Any]] = {"tp.nn.MoE": of_package, "by name": by_name}
    return [{"work": "experts of a layer", **row} for row in measured(calls, device, "tp.nn.MoE")]


def gpt_oss_rows(sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """The experts of gpt-oss-20b, forward and backward, beside transformers' grouped_mm."""
    import transformers
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    hidden, inner, count, topk, tokens_count = sizes.gpt_oss
    config = transformers.GptOssConfig(
        hidden_size=hidden, intermediate_size=inner, num_local_experts=count, num_experts_per_tok=topk
    )
    experts = GptOssExperts(config).to(device=device, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.02)
    tokens = torch.randn(tokens_count, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    logits = torch.randn(tokens_count, count, device=device)
    weights, indices = logits.topk(topk)
    weights = weights.softmax(-1).to(torch.bfloat16)
    grad = torch.randn(tokens_count, hidden, device=device, dtype=torch.bfloat16)

    def call(implementation: str) -> Callable[[], Tensor]:
        def step() -> Tensor:
            config._experts_implementation = experts.config._experts_implementation = implementation
            tokens.grad = None
            output: Tensor = experts(tokens, indices, weights)
            output.backward(grad)
            return output

        return step

    calls: dict[str, Callable[[], Any]] = {"stock": call("grouped_mm"), "by name": call(hf.NAME)}
    stock, ours = (each().detach().float() for each in calls.values())
    error = float((stock - ours).norm() / stock.norm())
    assert error < 2e-2, error
    return [{"work": "experts of gpt-oss", **row} for row in measured(calls, device, "stock")]


def main() -> None:
    """Measures and writes one file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hf_step")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--no-compile", action="store_true", help="eager models alone")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = QUICK if given.quick else Sizes()
    works: list[Callable[[], list[dict[str, Any]]]] = [
        lambda: layer_rows(sizes, device),
        lambda: gpt_oss_rows(sizes, device),
        lambda: step_rows(sizes, device, compiled=False),
    ]
    if not given.no_compile:
        works.append(lambda: step_rows(sizes, device, compiled=True))
    rows = []
    for work in works:
        for row in work():
            rows.append(row)
            print(", ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
        gc.collect()
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    import transformers

    write("hf_step", device, rows, transformers=transformers.__version__, quick=given.quick)


def _short(value: Any) -> Any:
    return f"{value.median:.1f}" if isinstance(value, Time) else value


if __name__ == "__main__":
    main()
