"""Modules with cached quantized weights whose parameters torch swaps or averages."""

from __future__ import annotations

import pytest
import torch

from tests.nn.test_quantized_weights import assert_all_same, by_format, by_module, kept, make, step


@by_module
@pytest.mark.parametrize("forget", [False, True])
def test_moves_that_swap_parameters(kind: str, forget: bool) -> None:
    """There is no weak reference to a weight, with which torch could not swap it."""
    module, plain = make(kind), make(kind).bfloat16().float()
    module.quantize_weights()
    step(module)
    if forget:
        module.forget_quantized_weights()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.bfloat16().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert not kept(module)
    module.quantize_weights()
    assert_all_same(step(module), step(plain))


@by_module
@by_format
def test_averaged_models(kind: str, name: str) -> None:
    """The average of two equal models equals the model, but its weights have changed, which raises an error."""
    module = make(kind, name)
    module.quantize_weights()
    averaged = torch.optim.swa_utils.AveragedModel(module, use_buffers=True)
    for _ in range(2):
        averaged.update_parameters(module)
    with pytest.raises(ValueError, match="changed in place"):
        step(averaged.module, name)
    averaged.module.quantize_weights()
    assert_all_same(step(averaged.module, name), step(module, name))
