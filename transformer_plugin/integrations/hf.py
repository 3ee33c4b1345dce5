"""Hugging Face transformers: the name ``"transformer_plugin"`` for the experts of its models.

Importing this module registers it, and so does importing the package. Then this is all::

    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="transformer_plugin")

or ``model.set_experts_implementation("transformer_plugin")``. Every experts class that transformers decorates with
``use_experts_implementation`` is computed, by its flags. Parameters, state dicts and hooks stay as they are.

Over ranks the same name is transformers' ``ep_implementation``: tokens go through this package's exchange. ::

    DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="transformer_plugin")

transformers is not imported: what it imports first registers the name.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from transformer_plugin._arguments import typed
from transformer_plugin._on_import import on_import
from transformer_plugin.integrations._hf_expert_parallel import ATTRIBUTE as RANKS
from transformer_plugin.integrations._hf_expert_parallel import ExpertsOverRanks
from transformer_plugin.integrations._hf_recipe import KEY, recipe_of, saved
from transformer_plugin.nn._experts import (
    ConvertedExperts,
    not_computed,
    refuse_delayed,
    run_experts,
    set_cache_weights,
)
from transformer_plugin.parallel.token_dispatcher import DispatchConfig
from transformer_plugin.recipes import DelayedScaling, Recipe
from transformer_plugin.tensor._layout import message

__all__ = ["NAME", "experts_forward", "set_dispatch", "set_recipe"]

#: What ``experts_implementation`` takes, and ``ep_implementation``.
NAME = "transformer_plugin"
_REGISTRY = "transformers.integrations.moe"
#: transformers 5.17 has none.
_OF_RANKS = "transformers.distributed.expert_parallel"


def experts_forward(
    self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of an experts module of transformers, as its registry calls it.

    Args:
        self: the module. One op computes it, without a copy of the tokens, if it has the form of
            :class:`transformer_plugin.nn.MoE`; else its own functions run between two grouped products. See
            ``transformer_plugin.nn.convert.explain``.
        hidden_states: ``[T, H]``.
        top_k_index: ``[T, K]``; -1 and ``num_experts`` name no expert.
        top_k_weights: ``[T, K]``.

    Returns:
        ``[T, H]`` in the dtype of ``hidden_states``. Differentiable in all but the indices.
    """
    return run_experts(self, hidden_states, top_k_index, top_k_weights, recipe_of(self))


@typed
def set_recipe(
    model: torch.nn.Module, recipe: Recipe | None, *, cache_weights: bool | None = None
) -> torch.nn.Module:
    """Sets the recipe of the experts of a model whose implementation is ``"transformer_plugin"``.

    It is kept in the model's configuration under one key, ``transformer_plugin_recipe``, which ``save_pretrained``
    saves and ``from_pretrained`` reads. Other implementations do not read it. State dicts do not have it.

    Args:
        model: a model of transformers, or a part of it.
        recipe: of :mod:`transformer_plugin.recipes`, but not ``DelayedScaling``; None for the products as they are.
        cache_weights: whether the experts keep their quantized weights until these change, as
            :attr:`transformer_plugin.nn.Linear.cache_weights` says; None leaves it as it is, at first False. It is an
            attribute of the modules and not of the configuration, so that it is not saved.

    Returns:
        The model.

    Raises:
        TypeError: no recipe. ValueError: ``DelayedScaling``; a model without experts of transformers.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        advice = "Make one, or call transformer_plugin.recipes.recipe_from_name()"
        expected = "a recipe of transformer_plugin.recipes or None"
        raise TypeError(message("set_recipe", "recipe", expected, repr(recipe), advice))
    if isinstance(recipe, DelayedScaling):
        refuse_delayed("set_recipe", recipe)
    found = [module for module in model.modules() if _is_computed(module)]
    if not found:
        expected = "a model with experts of transformers that are computed here"
        advice = "Call transformer_plugin.nn.convert.explain() to see what it has"
        raise ValueError(message("set_recipe", "model", expected, type(model).__name__, advice))
    value = saved(recipe)
    for module in found:
        setattr(module.config, KEY, value)
        if cache_weights is not None:
            set_cache_weights(module, cache_weights)
    return model


@typed
def set_dispatch(model: torch.nn.Module, dispatch: DispatchConfig) -> torch.nn.Module:
    """Sets how many tokens the experts of ``ep_implementation="transformer_plugin"`` exchange, and how.

    Call it on every rank before the first forward, in which the ranks make their exchange. Without it ``max_tokens`` is
    the most tokens of any rank in the first forward, rounded up to a power of two; a later call with more raises.

    Args:
        model: a model of transformers that was loaded with this ``ep_implementation``, or a part of it.
        dispatch: as of :class:`transformer_plugin.nn.MoE`; its ``max_tokens`` counts the tokens of one rank in one
            call, padding included.

    Returns:
        The model.

    Raises:
        TypeError: no DispatchConfig. ValueError: a model without such experts. RuntimeError: the ranks have made their
            exchange.
    """
    if not isinstance(dispatch, DispatchConfig):
        advice = "Make one: transformer_plugin.nn.DispatchConfig(max_tokens=...)"
        raise TypeError(message("set_dispatch", "dispatch", "a DispatchConfig", repr(dispatch), advice))
    found = [getattr(module, RANKS) for module in model.modules() if hasattr(module, RANKS)]
    if not found:
        expected = f'a model whose distributed_config has ep_implementation="{NAME}"'
        advice = f'Load it with DistributedConfig(ep_size=..., ep_implementation="{NAME}")'
        raise ValueError(message("set_dispatch", "model", expected, type(model).__name__, advice))
    if any(each.dispatcher is not None for each in found):
        expected, got = "a model before its first forward", "one whose ranks have made their exchange"
        raise RuntimeError(
            message("set_dispatch", "model", expected, got, "Call it before, or load the model again")
        )
    for each in found:
        each.config = dispatch
    return model


def _is_computed(module: Any) -> bool:
    if isinstance(module, ConvertedExperts) or not hasattr(module, "config"):
        return False
    return hasattr(type(module), "_apply_gate") and not not_computed(module)


def _register() -> None:
    sys.modules[_REGISTRY].ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def _register_over_ranks() -> None:
    sys.modules[_OF_RANKS].EPImplementationInterface.register(NAME, ExpertsOverRanks)


on_import(_REGISTRY, _register)
on_import(_OF_RANKS, _register_over_ranks)
