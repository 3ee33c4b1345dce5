"""How many kernels and memsets a bfloat16 MoE layer launches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from transformer_plugin.nn import MoE
from transformer_plugin.testing.launches import launched

MOST_FORWARD, MOST_BACKWARD = 12, 20


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [256, 4096])
def test_launches_of_a_layer(tokens: int) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("counted where the Hopper kernels run")
    layer = MoE(512, 256, 16, 4, device="cuda", dtype=torch.bfloat16)
    given = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(given)
    layer(given).output.backward(grad)
    layer.zero_grad(set_to_none=True)
    given.grad = None
    outputs: list[Tensor] = []
    forward = launched(lambda: outputs.append(layer(given).output))
    backward = launched(lambda: outputs[0].backward(grad))
    assert len(forward) <= MOST_FORWARD, forward
    assert len(backward) <= MOST_BACKWARD, backward
    for names in (forward, backward):
        assert sum("group_offsets_kernel" in name for name in names) == 1, names
    assert not any("count_in_" in name for name in forward), forward
