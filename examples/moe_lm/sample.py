"""Text from a trained model, one byte at a time."""

from __future__ import annotations

import torch
from torch import nn

from moe_lm.world import World

CONTEXT = 128
PROMPT = "def "


@torch.no_grad()
def generate(
    model: nn.Module, world: World, length: int, seq_len: int, *, seed: int, temperature: float = 0.7
) -> str:
    """Continues ``PROMPT`` by ``length`` bytes. Every rank must call it: each holds some of the experts.

    The window has a fixed size, filled up on the right: attention is causal, so what follows a byte does not
    change what comes after it.
    """
    window = min(CONTEXT, seq_len)
    generator = torch.Generator().manual_seed(seed * 4099 + world.rank)
    text = list(PROMPT.encode())
    for _ in range(length):
        recent = text[-window:]
        padded = torch.tensor([recent + [0] * (window - len(recent))], device=world.device)
        logits, _ = model(padded)
        probabilities = (logits[0, len(recent) - 1].double().cpu() / temperature).softmax(-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text).decode("utf-8", errors="replace")
