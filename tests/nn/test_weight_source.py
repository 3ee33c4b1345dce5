"""WeightSource and WgradDestination: each layer has its own, and few base classes."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch

from transformer_plugin import nn
from transformer_plugin.nn._recipe import RecipeModule
from transformer_plugin.nn._weight_source import QuantizedCopy, ShardedWeight
from transformer_plugin.parallel import WeightShard
from transformer_plugin.recipes import Float8BlockScaling

MODULES = [each for name in nn.__all__ if inspect.isclass(each := getattr(nn, name))]
MODULES = [each for each in MODULES if issubclass(each, torch.nn.Module)]


@pytest.mark.parametrize("module", MODULES)
def test_bases(module: Any) -> None:
    own = [each for each in module.__mro__[1:] if each.__module__.startswith("transformer_plugin")]
    assert len(own) <= 3, own


def make(**options: Any) -> nn.Linear:
    return nn.Linear(128, 128, dtype=torch.bfloat16, recipe=Float8BlockScaling(), **options)


def test_layers_share_what_they_begin_with() -> None:
    """Until something changes it, which changes that of one layer."""
    source, destination = RecipeModule._weight_source, RecipeModule._wgrad_destination
    first, second = make(), make()
    assert first._weight_source is second._weight_source is source
    first.quantize_weights()
    first.fuse_wgrad_accumulation = True
    first.delay_wgrad_compute = True
    assert isinstance(first._weight_source, QuantizedCopy)
    assert second.quantized_weight is None and source.quantized_weight is None
    assert not (second.fuse_wgrad_accumulation or second.delay_wgrad_compute)
    assert second._weight_source is source and second._wgrad_destination is destination
    first.forget_quantized_weights()
    assert first.quantized_weight is None and first.fuse_wgrad_accumulation


@pytest.mark.parametrize("by", [copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_of_a_sharded_layer_are_gathered_alone(by: Any) -> None:
    layer = make()
    layer._take_weight_from(ShardedWeight(WeightShard(128, 1, "0", param_group=3, name="weight"), {}, True))
    key = layer.named_weight_shard
    copied = by(layer)
    assert layer.named_weight_shard == key and ",param_group=3" in key
    assert copied.named_weight_shard == key.replace(",param_group=3", "")
    copied.forget_quantized_weights()
    copied.fuse_wgrad_accumulation = True
    assert not layer.fuse_wgrad_accumulation and layer.gathers_quantized and copied.gathers_quantized


def test_a_copy_has_a_queue_of_its_own() -> None:
    layer = make(delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    copied = copy.deepcopy(layer)
    first, second = (each._wgrad_destination.queue for each in (layer, copied))
    assert first is not None and second is not None and first.id != second.id
    assert copied.fuse_wgrad_accumulation and copied.delay_wgrad_compute
    layer.delay_wgrad_compute = False
    assert layer._wgrad_destination.queue is first  # what waits in it can still be computed
