"""The peers of :mod:`benchmarks.moe_layer`: the same layer with stock PyTorch and with other libraries.

Libraries are used as installed, and are left out where they are not. Their routers are those of the stock block unless
the library has one.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from benchmarks.moe_layer_cases import Competitor, Data

#: TFLOP/s of a forward and backward that a library's authors published, by peer and layer, with the GPU.
PUBLISHED: dict[tuple[str, str], tuple[float, str]] = {
    ("liger", "Qwen3-30B, 32768 tokens"): (413.0, "NVIDIA H100"),
}


def _swiglu(x: Tensor) -> Tensor:
    gate, linear = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * linear).to(x.dtype)


def _weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """Sums the rows of each token, ``[tokens, topk, hidden]``, times their weights, in float32."""
    return (rows.float() * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


def route(tokens: Tensor, router: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Returns weights (float32) and experts of each token: the softmax of its largest bfloat16 logits."""
    logits, experts = F.linear(tokens, router).topk(topk, dim=-1)
    return logits.softmax(-1, dtype=torch.float32), experts


class _Expand(torch.autograd.Function):
    """Rows of tokens in the order of experts. The gradient is a sum over each token's rows, without atomics."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, topk: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.topk = topk
        return tokens.index_select(0, order // topk)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        rows = grad.index_select(0, inverse).view(-1, ctx.topk, grad.shape[1])
        return rows.sum(1, dtype=torch.float32).to(grad.dtype), None, None, None


class Reorder(torch.autograd.Function):
    """``rows[order]`` for a permutation, of which the gradient takes the inverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None


class Stock(Competitor):
    """Sort of the choices, gather, ``torch._grouped_mm``, SwiGLU and a weighted sum in float32; the last two compiled.

    The compiled mode is one graph of everything.
    """

    name = "stock"
    modes = ("eager", "compiled", "graph")
    captured = "compiled"

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.swiglu: Callable[..., Tensor] = _swiglu
        self.weighted_sum: Callable[..., Tensor] = _weighted_sum
        if data.device.type == "cuda":
            self.swiglu, self.weighted_sum = (
                torch.compile(function, dynamic=False, fullgraph=True)
                for function in (_swiglu, _weighted_sum)
            )
        self.each_expert = torch.arange(data.layer.experts, device=data.device)

    def forward(self, tokens: Tensor) -> Tensor:
        topk = self.data.layer.topk
        swiglu, weighted_sum = self.swiglu, self.weighted_sum
        if torch.compiler.is_compiling():
            swiglu, weighted_sum = _swiglu, _weighted_sum
        weights, experts = route(tokens, self.router, topk)
        sorted_experts, order = experts.flatten().sort(stable=True)
        inverse = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        ends = torch.searchsorted(sorted_experts, self.each_expert, right=True, out_int32=True)
        rows: Tensor = _Expand.apply(tokens, order, inverse, topk)
        middle = swiglu(torch._grouped_mm(rows, self.fc1.mT, offs=ends))
        rows = torch._grouped_mm(middle, self.fc2.mT, offs=ends)
        rows = Reorder.apply(rows, inverse, order)
        return weighted_sum(rows.view(-1, topk, rows.shape[1]), weights)


class Transformers(Competitor):
    """``Qwen3MoeSparseMoeBlock`` of Hugging Face transformers with its ``grouped_mm`` experts."""

    name = "transformers"
    modes = ("eager", "graph")

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        layer = data.layer
        config = Qwen3MoeConfig(
            hidden_size=layer.hidden,
            moe_intermediate_size=layer.ffn_hidden,
            num_experts=layer.experts,
            num_experts_per_tok=layer.topk,
            norm_topk_prob=True,
            experts_implementation="grouped_mm",
        )
        with torch.device("meta"):
            self.block = Qwen3MoeSparseMoeBlock(config)
        self.block.gate.weight = self.router
        self.block.experts.gate_up_proj, self.block.experts.down_proj = self.fc1, self.fc2

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.block(tokens.unsqueeze(0))
        return output.squeeze(0)


class Liger(Competitor):
    """The fused experts of liger-kernel (Triton), after the stock router. Each forward reads a size on the host."""

    name = "liger"

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        from liger_kernel.ops import LigerFusedMoEFunction

        self.function = LigerFusedMoEFunction

    def forward(self, tokens: Tensor) -> Tensor:
        weights, experts = route(tokens, self.router, self.data.layer.topk)
        experts = experts.to(torch.int32)
        output: Tensor = self.function.apply(tokens, self.fc1, self.fc2, experts, weights.to(tokens.dtype))
        return output


class Sonic(Competitor):
    """The layer of SonicMoE with its own router. Rows of gate and linear part alternate in its first weight."""

    name = "sonicmoe"

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        from sonicmoe import moe_TC_softmax_topk_layer
        from sonicmoe.enums import ActivationType

        self.function, self.activation = moe_TC_softmax_topk_layer, ActivationType.SWIGLU
        halves = data.fc1.unflatten(1, (2, -1))
        self.fc1 = Parameter(halves.transpose(1, 2).flatten(1, 2).contiguous())

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor
        output, _, _ = self.function(
            tokens,
            self.router,
            self.fc1.permute(1, 2, 0),
            None,
            self.fc2.permute(1, 2, 0),
            None,
            self.data.layer.topk,
            torch.cuda.current_stream().cuda_stream,
            self.activation,
            not torch.is_grad_enabled(),
        )
        return output

    def gradients(self) -> dict[str, Tensor]:
        found = super().gradients()
        halves = found["fc1"].unflatten(1, (-1, 2))
        return {**found, "fc1": halves.transpose(1, 2).flatten(1, 2)}


class TransformerEngine(Competitor):
    """``GroupedLinear`` of TransformerEngine in bfloat16 between its permutations, after the stock router.

    It takes the experts' sizes on the host, so each forward waits for the GPU.
    """

    name = "transformer_engine"

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        import transformer_engine.pytorch as te

        layer = data.layer
        options = {"bias": False, "params_dtype": torch.bfloat16, "device": data.device}
        self.te = te
        self.first = te.GroupedLinear(layer.experts, layer.hidden, 2 * layer.ffn_hidden, **options)
        self.second = te.GroupedLinear(layer.experts, layer.ffn_hidden, layer.hidden, **options)
        for module, weights in ((self.first, data.fc1), (self.second, data.fc2)):
            for expert in range(layer.experts):
                setattr(module, f"weight{expert}", Parameter(weights[expert]))
        self.swiglu = torch.compile(_swiglu, dynamic=False, fullgraph=True)

    def forward(self, tokens: Tensor) -> Tensor:
        layer = self.data.layer
        weights, experts = route(tokens, self.router, layer.topk)
        sizes = torch.bincount(experts.flatten(), minlength=layer.experts).tolist()
        rows, row_map = self.te.moe_permute(tokens, experts.to(torch.int32), map_type="index")
        rows = self.second(self.swiglu(self.first(rows, sizes)), sizes)
        output: Tensor = self.te.moe_unpermute(rows, row_map, merging_probs=weights, map_type="index")
        return output

    def _weights(self) -> list[list[Tensor]]:
        return [
            [getattr(module, f"weight{expert}") for expert in range(self.data.layer.experts)]
            for module in (self.first, self.second)
        ]

    def leaves(self) -> list[Tensor]:
        first, second = self._weights()
        return [self.router, *first, *second]

    def gradients(self) -> dict[str, Tensor]:
        first, second = (torch.stack([weight.grad for weight in weights]) for weights in self._weights())
        return {"router": self.router.grad, "fc1": first, "fc2": second}


#: Each with the distribution that it needs.
PEERS: dict[str, tuple[type[Competitor], str]] = {
    "stock": (Stock, "torch"),
    "transformers": (Transformers, "transformers"),
    "liger": (Liger, "liger-kernel"),
    "sonicmoe": (Sonic, "sonic-moe"),
    "transformer_engine": (TransformerEngine, "transformer-engine"),
}


def installed(name: str) -> str | None:
    """The version of a peer's library; None if it is not installed."""
    try:
        return version(PEERS[name][1])
    except PackageNotFoundError:
        return None
