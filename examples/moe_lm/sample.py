"""Generates text with a trained model, byte by byte."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule

from moe_lm.trainer import Trainer

CONTEXT = 128
PROMPT = "def "


@torch.no_grad()
def generate(trainer: Trainer, length: int, temperature: float = 0.7) -> str:
    """Continues ``PROMPT`` by ``length`` bytes, at the end of a run. All ranks must call it, as each has a shard.

    Tensor-parallel ranks draw the same bytes. The window has a fixed size and is padded on the right. Attention is
    causal, so the padding does not change the prediction.
    """
    config, world = trainer.config, trainer.world
    window = min(CONTEXT, config.seq_len)
    trainer.model.eval()
    if isinstance(trainer.model, FSDPModule):
        trainer.model.set_reshard_after_forward(False)  # gather the parameters once
    rank = world.rank // config.tensor_parallel
    generator = torch.Generator().manual_seed((config.seed * 4099 + rank) % 2**63)
    text = list(PROMPT.encode())
    with torch.compiler.set_stance("force_eager"):  # compiling is slower than one short sequence
        for _ in range(length):
            recent = text[-window:]
            padded = torch.tensor([recent + [0] * (window - len(recent))], device=world.device)
            logits = trainer.predict(padded)
            probabilities = (logits[0, len(recent) - 1].double().cpu() / temperature).softmax(-1)
            text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text).decode("utf-8", errors="replace")
