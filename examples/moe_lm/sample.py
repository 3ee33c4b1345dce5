"""Text from a trained model, one byte at a time."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_lm.model import LanguageModel
from moe_lm.trainer import Trainer

CONTEXT = 128
PROMPT = "def "


@torch.no_grad()
def generate(trainer: Trainer, length: int, temperature: float = 0.7) -> str:
    """Continues ``PROMPT`` by ``length`` bytes. Every rank must call it: each holds some of the experts.

    The model is the trained one with room for one short sequence, sharing its parameters. The window has a fixed
    size, filled up on the right: attention is causal, so what follows a byte does not change what comes after it.
    """
    world, window = trainer.world, min(CONTEXT, trainer.config.seq_len)
    config = replace(trainer.config, batch_size=1, seq_len=window, capacity_factor=0.0)
    model = LanguageModel(config, world.group, world.device, next(trainer.model.parameters()).dtype)
    model.load_state_dict(trainer.model.state_dict(), assign=True)
    model.eval()
    generator = torch.Generator().manual_seed((config.seed * 4099 + world.rank) % 2**63)
    text = list(PROMPT.encode())
    for _ in range(length):
        recent = text[-window:]
        padded = torch.tensor([recent + [0] * (window - len(recent))], device=world.device)
        logits, _ = model(padded)
        probabilities = (logits[0, len(recent) - 1].double().cpu() / temperature).softmax(-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text).decode("utf-8", errors="replace")
