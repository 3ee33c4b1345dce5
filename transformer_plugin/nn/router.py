"""TopKRouter: chooses the experts of each token, and their weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_plugin import ops
from transformer_plugin._arguments import check_dtype, check_fields, typed
from transformer_plugin.nn._attributes import fixed
from transformer_plugin.nn._delayed_scaling import keep_float32
from transformer_plugin.nn._formats import DTYPES
from transformer_plugin.nn._hooks import have_hooks
from transformer_plugin.nn._module import PluginModule, check_sizes, layer_forward, registered, serializable
from transformer_plugin.ops.routing import ScoreFunction

#: The largest number of experts that :func:`transformer_plugin.ops.topk_router` supports.
MAX_EXPERTS = 1024
#: Weights and losses are float32.
_LARGEST = torch.finfo(torch.float32).max
#: The dtypes of tokens and of the weight; those that the op does not multiply are converted to float32.
_CONVERTED = (*DTYPES, torch.float64)


@dataclass(frozen=True)
class RouterConfig:
    """How a router gets choices and weights from scores. Default: softmax over the chosen logits, no auxiliary loss.

    :meth:`deepseek_v2` and :meth:`deepseek_v3` are the routers of those models.

    Raises:
        TypeError: an argument of another type. ValueError: an impossible configuration.
    """

    score_function: ScoreFunction = "softmax"
    #: softmax over all experts before choosing (the weights then sum to less than 1), instead of after.
    pre_softmax: bool = False
    #: first choose ``group_topk`` of ``num_groups`` groups of experts, then experts within them.
    num_groups: int = 1
    group_topk: int = 1
    #: a factor of the weights.
    scaling_factor: float = 1.0
    #: whether a buffer ``expert_bias [E]`` is added to the scores for the choice, but not for the weights.
    expert_bias: bool = False
    #: the factor of the auxiliary load-balancing loss; 0: no such loss.
    aux_loss_coeff: float = 0.0
    #: the score of a group is the sum of its best experts' scores; this is their number: 1 in DeepSeek-V2, 2 in
    #: DeepSeek-V3. None: ``topk // group_topk``, as in Megatron-LM.
    group_score_topk: int | None = None
    #: the dtype in which tokens and weight are multiplied; the logits are always float32. None: that of both, if both
    #: are bfloat16 or both float16, otherwise float32. ``torch.float32``: both are converted.
    router_dtype: torch.dtype | None = None

    @classmethod
    def deepseek_v2(
        cls,
        num_groups: int = 8,
        group_topk: int = 3,
        scaling_factor: float = 16.0,
        aux_loss_coeff: float = 0.0,
    ) -> RouterConfig:
        """DeepSeek-V2 (arXiv:2405.04434): softmax over all experts; the score of a group is that of its best expert.

        The defaults are those of the model with 160 experts and 6 experts per token. V2-Lite has
        ``num_groups=1, group_topk=1, scaling_factor=1.0``.
        """
        return cls(
            pre_softmax=True,
            num_groups=num_groups,
            group_topk=group_topk,
            scaling_factor=scaling_factor,
            aux_loss_coeff=aux_loss_coeff,
            group_score_topk=1,
        )

    @classmethod
    def deepseek_v3(
        cls,
        num_groups: int = 8,
        group_topk: int = 4,
        scaling_factor: float = 2.5,
        aux_loss_coeff: float = 0.0,
    ) -> RouterConfig:
        """DeepSeek-V3 (arXiv:2412.19437): sigmoid and an expert bias; the score of a group is the sum of its two best
        experts.

        The defaults are those of the model with 256 experts and 8 experts per token.
        """
        return cls(
            "sigmoid",
            num_groups=num_groups,
            group_topk=group_topk,
            scaling_factor=scaling_factor,
            expert_bias=True,
            aux_loss_coeff=aux_loss_coeff,
            group_score_topk=2,
        )

    def __post_init__(self) -> None:
        self._check_types()
        self._expect(
            self.score_function in get_args(ScoreFunction),
            "score_function",
            "softmax, sigmoid or sqrtsoftplus",
            "Pass one of the three names",
        )
        if self.score_function != "softmax":
            advice = "Only the softmax can be applied before or after the choice"
            self._expect(not self.pre_softmax, "pre_softmax", "False with this score function", advice)
        else:
            advice = "Use sigmoid or sqrtsoftplus with an expert bias"
            self._expect(not self.expert_bias, "expert_bias", "False with the softmax", advice)
        self._expect(self.num_groups >= 1, "num_groups", "1 or more", "Pass 1 for no groups")
        self._expect(
            1 <= self.group_topk <= self.num_groups,
            "group_topk",
            f"from 1 to the {self.num_groups} groups",
            "Choose that many groups for each token",
        )
        self._expect(
            self.group_score_topk is None or self.group_score_topk >= 1,
            "group_score_topk",
            "None, or 1 or more",
            "Pass 1 for DeepSeek-V2, 2 for DeepSeek-V3",
        )
        self._expect(
            0.0 < self.scaling_factor <= _LARGEST,
            "scaling_factor",
            "a finite positive number of float32",
            "Pass 1 for unscaled weights",
        )
        self._expect(
            0.0 <= self.aux_loss_coeff <= _LARGEST,
            "aux_loss_coeff",
            "0 or a finite positive number of float32",
            "Pass 0 for no auxiliary loss",
        )

    def check_experts(self, num_experts: int, topk: int) -> None:
        """Raises if ``topk`` of ``num_experts`` experts cannot be chosen with this configuration."""
        self._expect(
            num_experts % self.num_groups == 0,
            "num_groups",
            f"a number that divides the {num_experts} experts",
            "Pass 1 for no groups",
        )
        size = num_experts // self.num_groups
        self._expect(
            self.group_score_topk is None or self.group_score_topk <= size,
            "group_score_topk",
            f"None or from 1 to the {size} experts of a group",
            "Pass 1 for DeepSeek-V2, 2 for DeepSeek-V3",
        )
        if topk > size * self.group_topk:
            raise ValueError(
                f"transformer_plugin::RouterConfig: argument 'group_topk': expected enough groups of {size} experts to "
                f"hold topk={topk} experts, got {self.group_topk}. Choose more groups or fewer experts."
            )
        if self.group_score_topk is None and topk < self.group_topk:
            raise ValueError(
                f"transformer_plugin::RouterConfig: argument 'group_topk': expected at most topk={topk} if "
                f"group_score_topk is None, got {self.group_topk}. Pass group_score_topk: 1 for DeepSeek-V2, 2 for "
                "DeepSeek-V3."
            )

    def _check_types(self) -> None:
        if self.router_dtype is not None and self.router_dtype is not torch.float32:
            raise TypeError(
                "transformer_plugin::RouterConfig: argument 'router_dtype': expected None or torch.float32, got "
                f"{self.router_dtype!r}. Cast tokens and weight to another dtype, and pass None."
            )
        check_fields(self, "transformer_plugin::RouterConfig")

    def _expect(self, condition: bool, name: str, expected: str, advice: str) -> None:
        if not condition:
            raise ValueError(
                f"transformer_plugin::RouterConfig: argument '{name}': expected {expected}, got "
                f"{getattr(self, name)}. {advice}."
            )


@serializable
class Routing(NamedTuple):
    """The routing of T tokens."""

    #: int32 ``[T, topk]``, the experts of each token.
    indices: Tensor
    #: float32 ``[T, topk]``, their weights, differentiable.
    weights: Tensor
    #: float32 scalar, the auxiliary loss times its coefficient; 0 without one. Add it to the loss.
    aux_loss: Tensor
    #: int64 ``[E]``, how many of these tokens chose each expert.
    expert_load: Tensor


def returns_tokens(router: Any) -> bool:
    """Whether calling the router runs :meth:`TopKRouter.forward` and nothing else, so that :meth:`TopKRouter.route` may
    be called in its place."""
    kind = type(router)
    same = getattr(kind, "forward", None) is TopKRouter.forward and kind.__call__ is torch.nn.Module.__call__
    return same and "forward" not in router.__dict__ and not have_hooks(router)


class TopKRouter(PluginModule):
    """Scores each token against each expert and keeps the best ``topk``.

    Logits and scores are float32. If tokens and weight are both bfloat16, or both float16, they are multiplied as they
    are and summed in float32, with the accuracy of a product of float32 copies
    (:func:`transformer_plugin.ops.router_logits`). Otherwise, and with ``router_dtype=torch.float32``, they are
    converted to float32 first.

    Args:
        hidden: H, the columns of the tokens.
        num_experts: E, the experts of all ranks.
        topk: K, the number of experts per token.
        config: how scores become choices and weights.
        device, dtype: of the parameter.

    With ``topk=1`` and the softmax over the chosen experts, the only weight is always 1, so only the auxiliary loss
    would train the router. The constructor warns about this.

    Raises:
        ValueError: a configuration that is impossible with these numbers of experts.

    Parameters: ``weight [E, H]``. Buffers: ``expert_bias [E]`` if the config asks for it; it stays float32 when the
    module is cast.
    """

    weight: Parameter
    expert_bias: Tensor | None
    hidden: int = fixed("hidden")
    num_experts: int = fixed("num_experts")

    @typed
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
        check_sizes("TopKRouter", dtype, hidden=hidden)
        _check_experts(num_experts, topk, config)
        self.hidden, self.num_experts = hidden, num_experts
        self._topk = topk
        self._config = config
        self.weight = Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype))
        bias = torch.empty(num_experts, device=device, dtype=torch.float32) if config.expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the weight as in ``torch.nn.Linear``, and the expert bias with zeros."""
        bound = self.weight.shape[1] ** -0.5 if self.weight.shape[1] else 0.0
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.expert_bias is not None:
            torch.nn.init.zeros_(self.expert_bias)

    @property
    def topk(self) -> int:
        """The number of experts per token. It may be set to another value that the configuration allows."""
        return self._topk

    @topk.setter
    def topk(self, topk: int) -> None:
        _check_experts(self.num_experts, topk, self._config)
        self._topk = topk

    @property
    def config(self) -> RouterConfig:
        """How choices and weights are computed. May be replaced; ``expert_bias`` is then created (zeros) or dropped."""
        return self._config

    @config.setter
    def config(self, config: RouterConfig) -> None:
        _check_experts(self.num_experts, self.topk, config)
        if not config.expert_bias:
            self.expert_bias = None
        elif self.expert_bias is None:
            self.expert_bias = torch.zeros(self.num_experts, device=self.weight.device, dtype=torch.float32)
        self._config = config

    @layer_forward
    def forward(self, tokens: Tensor) -> Routing:
        """Routes ``tokens [T, H]``, float32, bfloat16, float16 or float64.

        Raises:
            TypeError: another dtype, a nested or a sparse tensor.
        """
        tokens, weight = self._operands(tokens)
        return self._routing(ops.router_logits(tokens, weight))

    @layer_forward
    def route(self, tokens: Tensor) -> tuple[Routing, Tensor]:
        """Routes ``tokens [T, H]`` without calling hooks, and returns the tokens for what else reads them.

        In place of a sum by autograd, the router's backward adds the gradient of what is returned to its own
        (:func:`transformer_plugin.ops.router_logits_with_tokens`), if it multiplies the tokens as they are.
        """
        operand, weight = self._operands(tokens)
        if operand is not tokens:
            return self._routing(ops.router_logits(operand, weight)), tokens
        logits, tokens = ops.router_logits_with_tokens(tokens, weight)
        return self._routing(logits), tokens

    def _operands(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        own: Tensor = registered(self, self._parameters, "weight")
        weight = own if self.tensor_parallel is None else self.tensor_parallel.copied(own)
        if not isinstance(tokens, Tensor):  # the op raises the error
            return tokens, weight
        alike = tokens.dtype == weight.dtype and tokens.dtype in DTYPES
        if self._config.router_dtype is None and alike:
            return tokens, weight
        check_dtype("TopKRouter", "tokens", tokens, *_CONVERTED)
        check_dtype("TopKRouter", "weight", weight, *_CONVERTED)
        return tokens.float(), weight.float()

    def _routing(self, logits: Tensor) -> Routing:
        config = self._config
        weights, indices, load, no_loss = ops.topk_router_with_load(
            logits,
            registered(self, self._buffers, "expert_bias"),
            self._topk,
            config.score_function,
            config.pre_softmax,
            config.num_groups,
            config.group_topk,
            config.scaling_factor,
            config.group_score_topk,
        )
        aux_loss = no_loss if config.aux_loss_coeff == 0 else self._aux_loss(logits, load)
        return Routing(indices, weights, aux_loss, load)

    def _aux_loss(self, logits: Tensor, load: Tensor) -> Tensor:
        scores = ops.router_scores(logits, self.config.score_function)
        tokens: int | Tensor = logits.shape[0]
        if isinstance(tokens, Tensor):
            tokens = tokens.to(logits.device)  # torch.jit.trace returns sizes as CPU tensors
        loss = ops.aux_loss(scores, load, tokens, self.topk, self.config.aux_loss_coeff)
        return loss if self.tensor_parallel is None else self.tensor_parallel.mean(loss)

    def _load_from_state_dict(self, state_dict: dict[str, Any], *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, *arguments)
        if self.expert_bias is not None:  # load_state_dict(assign=True) may assign another dtype
            self.expert_bias = self.expert_bias.float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        with keep_float32(self, "expert_bias"):
            return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """The sizes and the configuration."""
        return f"hidden={self.hidden}, num_experts={self.num_experts}, topk={self.topk}, {self.config}"


def _check_experts(num_experts: int, topk: int, config: RouterConfig) -> None:
    """Raises for what the op would reject, and warns of a router that cannot learn."""
    if not isinstance(config, RouterConfig):
        raise TypeError(
            f"transformer_plugin::TopKRouter: argument 'config': expected a RouterConfig, got {config!r}. Construct "
            'one, for example RouterConfig("sigmoid").'
        )
    check_sizes("TopKRouter", num_experts=num_experts, topk=topk)
    if num_experts > MAX_EXPERTS:
        raise ValueError(
            f"transformer_plugin::TopKRouter: argument 'num_experts': expected at most {MAX_EXPERTS}, got "
            f"{num_experts}. Use fewer experts."
        )
    if not 1 <= topk <= num_experts:
        raise ValueError(
            "transformer_plugin::TopKRouter: argument 'topk': expected 1 to the number of experts, "
            f"{num_experts}, got {topk}. Choose fewer experts per token."
        )
    config.check_experts(num_experts, topk)
    if topk == 1 and num_experts > 1 and config.score_function == "softmax" and not config.pre_softmax:
        warnings.warn(
            "transformer_plugin::TopKRouter: argument 'topk': expected 2 or more with the softmax over the chosen "
            "experts, got 1: the only weight is always 1, so the output's gradient does not reach the router. "
            'Pass RouterConfig(pre_softmax=True) or RouterConfig("sigmoid").',
            UserWarning,
            stacklevel=4,
        )
