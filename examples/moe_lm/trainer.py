"""One model under training: a step, an evaluation, and everything needed to go on later."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_lm.config import Config
from moe_lm.data import Corpus, draw_batch
from moe_lm.flat import FlatParameters
from moe_lm.model import LanguageModel, initialise
from moe_lm.world import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Trainer:
    """Model, optimizer and data of one run on this rank."""

    def __init__(self, config: Config, world: World, corpus: Corpus) -> None:
        self.config, self.world, self.corpus = config, world, corpus
        torch.manual_seed(config.seed)
        self.model = LanguageModel(config, world.group, world.device, DTYPES[config.dtype])
        initialise(self.model, config, world.rank)
        self.flat = FlatParameters(self.model, world)
        groups = self.flat.optimizer_groups(config.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
        self.forward = self._compiled() if config.compile else self.model

    def _compiled(self) -> Any:
        if self.config.reference:  # its exchange reads sizes on the host, which a full graph cannot hold
            for block in self.model.blocks:
                block.moe.forward = torch.compiler.disable(block.moe.forward)
            return torch.compile(self.model)
        return torch.compile(self.model, fullgraph=True)

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.config.batch_size * self.config.seq_len * self.world.size

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to a twentieth."""
        config = self.config
        if step < config.warmup_steps:
            return config.lr * (step + 1) / config.warmup_steps
        done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        return config.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))

    def step(self, step: int, stop: bool = False) -> Tensor:
        """Trains on batch ``step``.

        Returns:
            float32 ``[4]``, means over the ranks: cross entropy in nats per byte, load-balancing loss,
            whether any rank wants to stop (above 0), and the norm of the gradient.
        """
        inputs, targets = self._batch(self.corpus.train, self.config.seed, step)
        self.flat.zero_grad()
        logits, balance = self.forward(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss + balance).backward()
        numbers = self.flat.reduce([loss.detach(), balance.detach(), float(stop)], self.config.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.optimizer.step()
        self.flat.publish()
        return numbers

    @torch.no_grad()
    def evaluate(self, before_each: Callable[[], None] = lambda: None) -> float:
        """Mean cross entropy over fixed windows of the validation text, nats per byte."""
        losses = []
        self.model.eval()  # no state of a recipe is written
        for i in range(self.config.eval_batches):
            before_each()
            inputs, targets = self._batch(self.corpus.validation, 123, i)
            logits, _ = self.forward(inputs)
            losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        self.model.train()
        total = torch.stack(losses).mean()
        dist.all_reduce(total, group=self.world.group)
        return float(total) / self.world.size

    def _batch(self, text: Tensor, seed: int, step: int) -> tuple[Tensor, Tensor]:
        config, world = self.config, self.world
        return draw_batch(
            text,
            config.batch_size,
            config.seq_len,
            seed=seed,
            step=step,
            rank=world.rank,
            device=world.device,
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers. The position in the data is the step, which the checkpoint holds."""
        state = {
            "model": self.model.state_dict(),
            "master": self.flat.master,
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        if self.world.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.world.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what :meth:`state_dict` gave, bit for bit."""
        self.model.load_state_dict(state["model"])
        with torch.no_grad():
            self.flat.master.copy_(state["master"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"].cpu())
        if "cuda_rng" in state and self.world.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"].cpu(), self.world.device)
