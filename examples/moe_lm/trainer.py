"""One model in training: steps, evaluations, and the state to save."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import transformer_plugin as tp
from moe_lm.config import Config
from moe_lm.data import Corpus, draw_batch
from moe_lm.model import LanguageModel, initialise
from moe_lm.world import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shard(model: LanguageModel, config: Config, mesh: DeviceMesh) -> None:
    """FSDP2: every rank stores a shard of the float32 parameters, and computes in ``config.dtype``.

    The experts of ``tp.nn.MoE`` are sharded over all ranks already. With a mesh of one dimension FSDP2 leaves them
    alone, so a block has no hooks inside and compiles to one graph; it converts their weights to ``config.dtype``.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[config.dtype], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in model.blocks:
        if config.reference and mesh.size() > 1:  # these have no mark that says how they are sharded
            fully_shard(block.moe.experts, mesh=mesh["copies"], mp_policy=policy)
            block.moe.experts.set_gradient_divide_factor(mesh.size())
        tp.parallel.fully_shard(block, mesh["experts"], mp_policy=policy)
    tp.parallel.fully_shard(model, mesh["experts"], mp_policy=policy)


def compile_blocks(model: LanguageModel, config: Config) -> None:
    """Compiles each block to one graph. Call it before :func:`shard`, so that FSDP2's hooks stay outside."""
    for block in model.blocks:
        if config.reference:  # the host reads the sizes of its exchange, between two graphs
            block.moe.forward = torch.compiler.disable(block.moe.forward)
        block.forward = torch.compile(block.forward, fullgraph=not config.reference)


class Trainer:
    """Model, optimizer and data of a run on this rank: a ``Stateful`` of ``torch.distributed.checkpoint``."""

    def __init__(self, config: Config, world: World, corpus: Corpus) -> None:
        self.config, self.world, self.corpus = config, world, corpus
        self.model = LanguageModel(config, world.mesh["experts"], world.device, DTYPES[config.dtype])
        initialise(self.model, config)
        if config.compile:
            compile_blocks(self.model, config)
        shard(self.model, config, world.mesh)
        decayed, others = [], []
        for parameter in self.model.parameters():
            (decayed if parameter.ndim > 1 else others).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks together."""
        return self.config.batch_size * self.config.seq_len * self.world.size

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a half cosine down to a twentieth."""
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
        config, world = self.config, self.world
        inputs, targets = self._batch(self.corpus.train, config.seed, step)
        # nvfp4 rounds at random. The seed depends on the step, so checkpoints need not save generator states.
        torch.manual_seed(((config.seed * 1_000_003 + step) * 4099 + world.rank) % 2**63)
        logits, balance = self.model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss + balance).backward()
        norm = tp.clip_grad_norm_(self.model, config.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        wish = torch.full((), float(stop), device=world.device)
        numbers = torch.stack([loss.detach(), balance.detach(), wish])
        dist.all_reduce(numbers, group=world.group)
        return torch.cat([numbers / world.size, norm[None]])

    @torch.no_grad()
    def evaluate(self, before_each: Callable[[], None] = lambda: None) -> float:
        """Returns the mean cross entropy over fixed windows of the validation text, nats per byte."""
        losses = []
        self.model.eval()  # the recipe's state is not updated
        for i in range(self.config.eval_batches):
            before_each()
            inputs, targets = self._batch(self.corpus.validation, 123, i)
            logits, _ = self.model(inputs)
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
        """Returns this rank's shards. The position in the data is the step, which is in the checkpoint's manifest."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a result of :meth:`state_dict`, bit for bit."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
