"""torchtitan 0.3, on torch 2.13 or newer: its experts, dispatchers and linear layers with a recipe of this package.

Two overrides, which torchtitan finds by name, of a command line or a config; the arguments are keyword arguments::

    --override.imports 'transformer_plugin.integrations.torchtitan.experts={"recipe": "fp8_block"}'
    --override.imports 'transformer_plugin.integrations.torchtitan.routed_experts={"recipe": "fp8_block"}'

:func:`experts` swaps the products of the routed experts, :func:`routed_experts` also how tokens reach them. List one of
the two. :class:`LinearConverter` is a model converter, for linear layers.

Parameters, their names, initial values and sharding, and state dicts stay torchtitan's, so checkpoints, also of
optimizers, are interchangeable in both directions. The weights of gate and up (``w1_EFD``, ``w3_EFD``) stay two
parameters: FSDP2 gathers each into memory of its own, so that one product for both would copy both in each forward.
They are read where they lie, by a grouped product each, with the activation between these and the third product.

This module imports torchtitan; ``import transformer_plugin`` does not import this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from transformer_plugin import nn, ops
from transformer_plugin._public import only_public_names
from transformer_plugin.formats import resolve
from transformer_plugin.integrations._torchtitan_versions import check_versions, installed_titan
from transformer_plugin.nn._autocast import as_float32
from transformer_plugin.nn._formats import RoleFormats, formats_of, row_rules, width_multiple
from transformer_plugin.nn._slots import Slots
from transformer_plugin.parallel import token_dispatcher as dispatchers
from transformer_plugin.parallel.expert import Transport
from transformer_plugin.recipes import RECIPES, DelayedScaling, Recipe
from transformer_plugin.tensor._layout import message

check_versions(torch.__version__, installed_titan())

from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import derive, override
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
    LocalTokenDispatcher,
)
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

__all__ = ["Experts", "Linear", "LinearConverter", "TokenDispatcher", "experts", "routed_experts"]

_OWNER = "integrations.torchtitan."
#: Recipes whose scales come from current values: state of delayed scaling would be in the state dict.
_NAMES = [name for name, recipe in RECIPES.items() if not isinstance(recipe, DelayedScaling)]


class Experts(GroupedExperts):
    """torchtitan's grouped experts, ``w2(silu(w1(x)) * w3(x))``, with three grouped products of this package.

    Input ``[R, D]``, sorted by expert, and the rows of each expert, ``[E]``; output ``[R, D]`` in the dtype of the
    input, rows past the last expert zero. As in torchtitan the products are in bfloat16, or in the formats of the
    recipe, and the activation is computed in bfloat16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """torchtitan's, and the name of a recipe."""

        recipe: str = "none"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._formats = formats_of(_recipe("experts", config.recipe))

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Runs the experts. See the class."""
        w1, w3, w2 = (_local(weight).bfloat16() for weight in (self.w1_EFD, self.w3_EFD, self.w2_EDF))
        rows, formats = x_RD.bfloat16(), self._formats
        if formats != RoleFormats():
            device = rows.device
            formats = RoleFormats(
                resolve(formats.input, device), formats.weight, resolve(formats.grad, device)
            )
        of_products = (num_tokens_per_expert_E, None, None, *formats)
        gate = torch.nn.functional.silu(ops.grouped_linear(rows, w1, *of_products))
        hidden = gate * ops.grouped_linear(rows, w3, *of_products)
        return ops.grouped_linear(hidden, w2, *of_products).type_as(x_RD)


class _Origin(NamedTuple):
    """What :meth:`TokenDispatcher.combine` needs of the dispatch."""

    #: of one rank: the rows of each token, and the routing scores in float32.
    slots: Slots | None = None
    scores: Tensor | None = None
    #: of several ranks.
    received: dispatchers.Received | None = None


class TokenDispatcher(BaseEPTokenDispatcher):
    """Moves tokens to experts with ops of this package: on one rank, or over the ranks of the mesh "ep".

    The scores are applied to the outputs of the experts, in float32; the rows of a token are summed in float32 and in
    a fixed order. The host reads nothing on a GPU, but for the transport "all_to_all", which reads how much to send.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """torchtitan's, and what :func:`routed_experts` adds."""

        hidden_dim: int
        recipe: str = "none"
        max_tokens_per_rank: int | None = None
        capacity: int | None = None
        transport: Transport = "auto"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._config = config
        self._rules = row_rules(formats_of(_recipe("routed_experts", config.recipe)))
        every_row = dispatchers.DispatchConfig()
        self._of_rank = dispatchers.LocalTokenDispatcher(config.num_experts, every_row, *self._rules)
        self._of_ranks: dispatchers.TokenDispatcher | None = None
        self._max_tokens = 0

    def init_buffer(self) -> None:
        """Makes the context of the ranks, if it is known for how many tokens. Collective."""
        if self.ep_mesh is not None and self._config.max_tokens_per_rank is not None:
            self._connect(self._config.max_tokens_per_rank, torch.bfloat16)

    def _connect(self, max_tokens: int, dtype: torch.dtype) -> dispatchers.TokenDispatcher:
        config = self._config
        options: dict[str, Any] = {"capacity": config.capacity, "transport": config.transport}
        self._of_ranks = dispatchers.TokenDispatcher(
            self.ep_mesh.get_group(),
            config.num_experts,
            config.hidden_dim,
            config.top_k,
            dispatchers.DispatchConfig(max_tokens=max_tokens, **options),
            *self._rules,
            None,
            dtype,
        )
        self._max_tokens = max_tokens
        return self._of_ranks

    def _connected(self, tokens: Tensor) -> dispatchers.TokenDispatcher:
        """The dispatcher of the ranks, which all have as many tokens in a call: a larger call makes another."""
        count, limit = tokens.shape[0], self._config.max_tokens_per_rank
        if self._of_ranks is not None and (limit is not None or count <= self._max_tokens):
            return self._of_ranks
        if torch.compiler.is_compiling():
            advice = "Pass the tokens of a rank in one call: local_batch_size * seq_len"
            raise ValueError(
                _message(
                    "routed_experts", "max_tokens_per_rank", "a number in a compiled model", "None", advice
                )
            )
        return self._connect(count, tokens.dtype)

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, _Origin]:
        """The rows of this rank's experts, sorted by expert, and how many each has, with padding."""
        if self.ep_mesh is None:
            scores = as_float32(topk_scores_TK)
            slots, _, _ = self._of_rank.assign(topk_expert_ids_TK, scores)
            rows = ops.permute_rows(x_TD, slots.slot, slots.source)
            return rows, slots.group_sizes, _Origin(slots, scores)
        dispatcher = self._connected(x_TD)
        received = dispatcher.dispatch(x_TD, topk_expert_ids_TK.contiguous(), as_float32(topk_scores_TK))
        return received.rows, received.group_sizes, _Origin(received=received)

    def combine(self, routed_output_RD: Tensor, metadata: _Origin, x_TD: Tensor) -> Tensor:
        """The sum of each token's rows times its scores, ``[T, D]`` in the dtype of the rows."""
        slots, scores, received = metadata
        if slots is not None:
            return ops.unpermute(routed_output_RD, slots.slot, slots.source, scores)
        assert received is not None and self._of_ranks is not None
        weighted = routed_output_RD.float() * received.probs[:, None]
        return self._of_ranks.combine(weighted.to(routed_output_RD.dtype), received)


class Linear(nn.Linear, Module):
    """:class:`transformer_plugin.nn.Linear` as a module of torchtitan."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):
        """torchtitan's, and the name of a recipe."""

        recipe: str = "none"

    def __init__(self, config: Config) -> None:
        recipe = _recipe("LinearConverter", config.recipe)
        super().__init__(config.in_features, config.out_features, config.bias, recipe=recipe)


class LinearConverter(QuantizationConverter):
    """A model converter: torchtitan's linear layers with a recipe.

    For ``model_registry(..., converters=[LinearConverter.Config(recipe="fp8_block")])``. Subclasses of torchtitan's
    ``Linear``, and layers whose sizes the format does not take, are left; the log names these.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """The recipe, and the layers: those with one of ``fqns`` in their name, all if it is empty, but not those with
        one of ``filter_fqns``, by default the router's and that of the logits."""

        recipe: str
        fqns: list[str] = field(default_factory=list)
        filter_fqns: list[str] = field(default_factory=lambda: ["router.gate", "lm_head"])

    def __init__(self, config: Config) -> None:
        self.config = config
        formats = formats_of(_recipe("LinearConverter", config.recipe))
        self._multiple = max(width_multiple(key) for key in formats)

    def convert(self, model_config: Any) -> Any:
        """Replaces the configs of the layers. See the class."""
        config, left, count = self.config, list[str](), 0
        for fqn, layer, parent, name in model_config.traverse(TitanLinear.Config):
            is_named = not config.fqns or any(part in fqn for part in config.fqns)
            if not is_named or any(part in fqn for part in config.filter_fqns):
                continue
            sizes = layer.in_features, layer.out_features
            if type(layer) is not TitanLinear.Config or any(size % self._multiple for size in sizes):
                left.append(fqn)
                continue
            converted, count = derive(layer, Linear.Config, recipe=config.recipe), count + 1
            if parent is None:
                model_config = converted
            elif isinstance(parent, list):
                parent[name] = converted
            else:
                setattr(parent, name, converted)
        also = f"; left, of another class or size: {', '.join(left)}" if left else ""
        logger.info(f"transformer_plugin: {count} linear layers with the recipe {config.recipe}{also}")
        return model_config


@override(target=GroupedExperts.Config, description="transformer_plugin: grouped products with a recipe")
def experts(cfg: Any, *, recipe: str = "none") -> Any:
    """The override of torchtitan's ``GroupedExperts``: their products with a recipe.

    Args:
        cfg: of experts with SwiGLU, ``GroupedExperts`` itself.
        recipe: a name, see :func:`transformer_plugin.recipes.recipe_from_name`; not ``"fp8_delayed"``. With
            ``"nvfp4"``, which pads the rows of an expert, use :func:`routed_experts`.

    Raises:
        ValueError: another recipe; sizes that its format does not take. TypeError: a subclass of ``GroupedExperts``,
            whose activation may be another.
    """
    multiple = row_rules(formats_of(_recipe("experts", recipe))).multiple
    if multiple > 1:
        expected = "a recipe that takes any number of rows of an expert"
        advice = f"Use the override routed_experts, which pads them to a multiple of {multiple}"
        raise ValueError(_message("experts", "recipe", expected, repr(recipe), advice))
    return _experts("experts", cfg, recipe)


@override(
    target=RoutedExperts.Config,
    description="transformer_plugin: dispatch, grouped products with a recipe, combine",
)
def routed_experts(
    cfg: Any,
    *,
    recipe: str = "none",
    max_tokens_per_rank: int | None = None,
    capacity: int | None = None,
    transport: Transport = "auto",
) -> Any:
    """The override of torchtitan's ``RoutedExperts``: :func:`experts`, and the dispatcher of this package.

    Args:
        cfg: with torchtitan's ``LocalTokenDispatcher`` or ``AllToAllTokenDispatcher``, those of
            ``moe_comm_backend="standard"``.
        recipe: as in :func:`experts`.
        max_tokens_per_rank: the largest number of tokens of a rank in one call. None: that of the first call, and of
            each larger one; not in a compiled model over several ranks.
        capacity, transport: as in :class:`~transformer_plugin.parallel.token_dispatcher.DispatchConfig`, of several
            ranks. Without a capacity there is room for any routing, on a GPU also where it is not used.

    Raises:
        ValueError, TypeError: as :func:`experts`; another dispatcher.
    """
    dispatcher = cfg.token_dispatcher
    if type(dispatcher) not in (LocalTokenDispatcher.Config, AllToAllTokenDispatcher.Config):
        expected = "torchtitan's LocalTokenDispatcher or AllToAllTokenDispatcher"
        advice = (
            "Leave moe_comm_backend at 'standard', or use the override experts, which keeps the dispatcher"
        )
        raise TypeError(
            _message("routed_experts", "token_dispatcher", expected, type(dispatcher).__qualname__, advice)
        )
    ours = derive(
        dispatcher,
        TokenDispatcher.Config,
        hidden_dim=cfg.inner_experts.dim,
        recipe=recipe,
        max_tokens_per_rank=max_tokens_per_rank,
        capacity=capacity,
        transport=transport,
    )
    return replace(
        cfg, inner_experts=_experts("routed_experts", cfg.inner_experts, recipe), token_dispatcher=ours
    )


def _experts(owner: str, cfg: Any, recipe: str) -> Any:
    """The config of :class:`Experts`."""
    formats = formats_of(_recipe(owner, recipe))
    if type(cfg) is not GroupedExperts.Config:
        expected = "torchtitan's GroupedExperts, whose activation is SwiGLU with SiLU"
        advice = "Leave these experts out, with another override.imports or model"
        raise TypeError(_message(owner, "cfg", expected, type(cfg).__qualname__, advice))
    multiple = max(width_multiple(key) for key in formats)
    if cfg.dim % multiple or cfg.hidden_dim % multiple:
        expected = f"a dim and a hidden_dim that are multiples of {multiple} with the recipe {recipe!r}"
        advice = "Use a recipe that takes any size, such as 'fp8_block'"
        raise ValueError(_message(owner, "cfg", expected, f"{cfg.dim} and {cfg.hidden_dim}", advice))
    return derive(cfg, Experts.Config, recipe=recipe)


def _recipe(owner: str, name: Any) -> Recipe | None:
    """The recipe of a name."""
    if name not in _NAMES:
        expected, advice = f"one of {', '.join(_NAMES)}", "Pass the name of a recipe without state"
        raise ValueError(_message(owner, "recipe", expected, repr(name), advice))
    return RECIPES[name]


def _message(owner: str, *parts: str) -> str:
    return message(_OWNER + owner, *parts)


def _local(weight: Tensor) -> Tensor:
    """This rank's experts."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


only_public_names(__name__)
