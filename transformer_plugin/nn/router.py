"""TopKRouter: which experts a token goes to, and with what weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_plugin import ops
from transformer_plugin.nn._attributes import fixed
from transformer_plugin.nn._recipe import keeps_float32
from transformer_plugin.ops.routing import ScoreFunction


@dataclass(frozen=True)
class RouterConfig:
    """How scores become choices and weights. By default softmax over the chosen logits, no auxiliary loss."""

    score_function: ScoreFunction = "softmax"
    #: softmax over all experts before choosing (the weights then sum to less than 1), instead of after.
    pre_softmax: bool = False
    #: choose ``group_topk`` of ``num_groups`` groups of experts first, then experts within them.
    num_groups: int = 1
    group_topk: int = 1
    #: multiplies the weights.
    scaling_factor: float = 1.0
    #: a buffer ``expert_bias [E]`` is added to the scores when choosing, not when weighting.
    expert_bias: bool = False
    #: the auxiliary load-balancing loss is multiplied by this; 0 leaves it out.
    aux_loss_coeff: float = 0.0


class Routing(NamedTuple):
    """The choice for T tokens."""

    #: int32 ``[T, topk]``, the experts of each token.
    indices: Tensor
    #: float32 ``[T, topk]``, their weights, differentiable.
    weights: Tensor
    #: float32 scalar, already times its coefficient; 0 without one. Add it to the loss.
    aux_loss: Tensor
    #: int64 ``[E]``, how many of these tokens chose each expert.
    expert_load: Tensor


class TopKRouter(torch.nn.Module):
    """Scores each token against each expert and keeps the best ``topk``. Logits and scores are float32.

    Args:
        hidden: H, the columns of the tokens.
        num_experts: E, the experts of all ranks.
        topk: K, how many experts a token goes to.
        config: how scores become choices and weights.
        device, dtype: of the parameter.

    Parameters: ``weight [E, H]``. Buffers: ``expert_bias`` ``[E]`` when the config asks for it, float32
    whatever the module is cast to.
    """

    weight: Parameter
    expert_bias: Tensor | None
    num_experts: int = fixed("num_experts")

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        topk: int,
        config: RouterConfig = RouterConfig(),
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= topk <= num_experts:
            raise ValueError(
                "transformer_plugin::TopKRouter: argument 'topk': expected 1 to the number of experts, "
                f"{num_experts}, got {topk}. Choose fewer experts per token."
            )
        self.num_experts = num_experts
        self.topk = topk
        self._config = config
        self.weight = Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype))
        bias = torch.empty(num_experts, device=device, dtype=torch.float32) if config.expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weight as in ``torch.nn.Linear``, the bias of the choice zero."""
        bound = self.weight.shape[1] ** -0.5 if self.weight.shape[1] else 0.0
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.expert_bias is not None:
            torch.nn.init.zeros_(self.expert_bias)

    @property
    def config(self) -> RouterConfig:
        """How scores become choices and weights. May be replaced: ``expert_bias`` comes, as zeros, and goes with it."""
        return self._config

    @config.setter
    def config(self, config: RouterConfig) -> None:
        if not isinstance(config, RouterConfig):
            raise TypeError(
                "transformer_plugin::TopKRouter: argument 'config': expected a RouterConfig, got "
                f"{config!r}. Make one of it."
            )
        if not config.expert_bias:
            self.expert_bias = None
        elif self.expert_bias is None:
            self.expert_bias = torch.zeros(self.num_experts, device=self.weight.device, dtype=torch.float32)
        self._config = config

    def forward(self, tokens: Tensor) -> Routing:
        """Routes ``tokens [T, H]``."""
        config = self.config
        logits = ops.linear(tokens.float(), self.weight.float())
        weights, indices = ops.topk_router(
            logits,
            self.expert_bias,
            self.topk,
            config.score_function,
            config.pre_softmax,
            config.num_groups,
            config.group_topk,
            config.scaling_factor,
        )
        load = ops.count_tokens_per_expert(indices, self.num_experts)
        return Routing(indices, weights, self._aux_loss(logits, load), load)

    def _aux_loss(self, logits: Tensor, load: Tensor) -> Tensor:
        if self.config.aux_loss_coeff == 0:
            return torch.zeros((), dtype=torch.float32, device=logits.device)
        scores = ops.router_scores(logits, self.config.score_function)
        return ops.aux_loss(scores, load, logits.shape[0], self.topk, self.config.aux_loss_coeff)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        with keeps_float32(self, "expert_bias"):
            return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """The sizes and the configuration."""
        return (
            f"hidden={self.weight.shape[1]}, num_experts={self.num_experts}, topk={self.topk}, {self.config}"
        )
