"""One model in training: steps, evaluations, and the state to save."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import transformer_plugin as tp
from moe_lm.config import Config
from moe_lm.data import Corpus, draw_batch
from moe_lm.dense import cross_entropy, full_logits
from moe_lm.gradients import average_in_rank_order
from moe_lm.graph import GraphedIteration
from moe_lm.model import VOCABULARY, LanguageModel, initialise
from moe_lm.world import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shard(model: LanguageModel, config: Config, mesh: DeviceMesh) -> None:
    """FSDP2: every rank stores a shard of the float32 parameters, and computes in ``config.dtype``.

    The experts of ``tp.nn.MoE`` may be sharded over all ranks already. With a mesh of one dimension FSDP2 leaves them
    alone, so a block has no hooks inside and compiles to one graph; it converts their weights to ``config.dtype``.
    """
    copies, sharing = mesh["copies"].size(), mesh["experts"].size()
    whole = mesh["experts"] if copies == 1 else mesh["copies"] if sharing == 1 else mesh
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[config.dtype], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in model.blocks:
        if config.reference and sharing > 1:  # these have no mark that says how they are sharded
            fully_shard(block.moe.experts, mesh=mesh["copies"], mp_policy=policy)
            block.moe.experts.set_gradient_divide_factor(mesh.size())
            if copies > 1:  # Gloo has no reduction with a factor
                block.moe.experts.set_force_sum_reduction_for_comms(True)
        tp.parallel.fully_shard(block, whole, mp_policy=policy)
    tp.parallel.fully_shard(model, whole, mp_policy=policy)


def shard_weights(model: LanguageModel, config: Config, mesh: DeviceMesh) -> None:
    """Cuts weights over the ranks of the mesh, which gather each just before its product. Call it before the optimizer.

    Experts that are DTensors are cut already. Others are cut if every rank would have all of them.
    """

    def takes(name: str, _: torch.nn.Module) -> bool:
        return ".experts." not in name or config.shards_experts

    tp.parallel.shard_(model, mesh, filter=takes)


def parallelize(model: LanguageModel, config: Config, mesh: DeviceMesh) -> torch.nn.Module:
    """Returns what to call for a forward whose backward averages gradients over all ranks."""
    if config.data_parallel == "ddp":
        # Buffers are constants, or equal on ranks with the same experts.
        wrapped = tp.parallel.data_parallel(model, broadcast_buffers=False)
        wrapped.register_comm_hook(dist.group.WORLD, average_in_rank_order)
        return wrapped
    if config.data_parallel == "fsdp":
        shard(model, config, mesh)
    return model


def compiles_whole_blocks(config: Config) -> bool:
    """Whether a block is one graph.

    FSDP2 has hooks inside of a block whose experts are sharded over some of the ranks, and in plain PyTorch the host
    reads the sizes of the exchange between two graphs.
    """
    hooked = config.data_parallel == "fsdp" and 1 < config.sharing < config.ranks
    return not config.reference and not hooked


def about_compiling(config: Config) -> str:
    """What happens in the first step, in one line for the terminal."""
    graphs = "one graph for all" if compiles_whole_blocks(config) else "several graphs"
    return (
        f"torch.compile: {config.layers} blocks, {graphs}, forward and backward. The first step compiles them, which "
        "takes about a minute; the first evaluation compiles a forward"
    )


def compile_blocks(model: LanguageModel, config: Config) -> None:
    """Compiles each block. Call it before :func:`parallelize`, so that FSDP2's hooks stay outside."""
    for block in model.blocks:
        if config.reference:
            block.moe.forward = torch.compiler.disable(block.moe.forward)
        block.forward = torch.compile(block.forward, fullgraph=compiles_whole_blocks(config))


def make_optimizer(model: LanguageModel, config: Config) -> torch.optim.Optimizer:
    """AdamW. The fused kernel needs one class of tensor in each group; experts may be another one."""
    decayed, others, experts = [], [], []
    for name, parameter in model.named_parameters():
        group = experts if ".experts." in name else decayed if parameter.ndim > 1 else others
        group.append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
        {"params": experts, "weight_decay": config.weight_decay},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


class Trainer:
    """Model, optimizer and data of a run on this rank: a ``Stateful`` of ``torch.distributed.checkpoint``.

    Args:
        config, world, corpus: of the run.
        cuda_graph: whether a step is a CUDA graph, on one GPU without data parallelism.
    """

    def __init__(self, config: Config, world: World, corpus: Corpus, cuda_graph: bool = False) -> None:
        self.config, self.world, self.corpus = config, world, corpus
        dense = world.dense_mesh
        self.tensor_ranks = dense["tensor"] if dense is not None and config.tensor_parallel > 1 else None
        place = world.device, DTYPES[config.dtype], self.tensor_ranks
        self.model = LanguageModel(config, world.mesh["experts"], *place)
        initialise(self.model, config)
        if dense is not None and config.shard > 1:
            shard_weights(self.model, config, dense["shards"])
        if config.compile:
            compile_blocks(self.model, config)
        self.parallel = parallelize(self.model, config, world.mesh)
        self.optimizer = make_optimizer(self.model, config)
        if config.cached_weights:
            self._quantize_weights()
            tp.optim.refresh_after(self.optimizer)
        self.iterate: Callable[[Tensor, Tensor], Tensor] = self._iterate
        if cuda_graph:
            self.iterate = GraphedIteration(self._iterate, self._make_capturable)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks together."""
        return self.config.batch_size * self.config.seq_len * self.config.data_ranks

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a half cosine down to a twentieth at the end of the schedule, and this from then on.

        A number of float32, as it is in a CUDA graph.
        """
        config = self.config
        if step < config.warmup_steps:
            rate = config.lr * (step + 1) / config.warmup_steps
        else:
            done = (step - config.warmup_steps) / max(1, config.schedule - config.warmup_steps)
            rate = config.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
        return float(torch.tensor(rate, dtype=torch.float32))

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
        self._set_learning_rate(self.learning_rate(step))
        losses = self.iterate(inputs, targets)
        wish = torch.full((1,), float(stop), device=world.device)
        numbers = torch.cat([losses[:2], wish])
        dist.all_reduce(numbers, group=world.group)
        return torch.cat([numbers / world.size, losses[2:]])

    def _iterate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward, clipping and the optimizer's step, without waiting for the device.

        Returns:
            float32 ``[3]``, cross entropy and load-balancing loss of this rank, and the norm of the gradient.
        """
        with self._autocast():
            logits, balance = self.parallel(inputs)
        loss = self._cross_entropy(logits, targets)
        (loss + balance).backward()
        if self.config.format == "fp8_delayed" and self.config.sharing < self.world.size:
            tp.nn.reduce_amax(
                self.model, self.world.mesh.get_group("copies")
            )  # copies of experts use the same scales
        norm = tp.clip_grad_norm_(self.model, self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack([loss.detach(), balance.detach(), norm])

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.world.device.type, DTYPES[self.config.dtype], enabled=self.config.autocasts
        )

    def _set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _make_capturable(self) -> None:
        """Lets a CUDA graph read the learning rate, which changes, from memory."""
        for group in self.optimizer.param_groups:
            group["lr"] = torch.full((), group["lr"], device=self.world.device)
            group["capturable"] = True

    def _quantize_weights(self) -> None:
        for block in self.model.blocks:
            block.moe.experts.quantize_weights()

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets, VOCABULARY, self.tensor_ranks)

    def _predict(self, inputs: Tensor) -> Tensor:
        """Returns logits, without changing the state of a recipe in ``eval`` mode."""
        with self._autocast():
            logits, _ = self.model(inputs)
        return logits

    def predict(self, inputs: Tensor) -> Tensor:
        """Returns logits of one sequence ``[1, T]``, which tensor-parallel ranks have in common."""
        logits = self._predict(inputs.expand(self.config.tensor_parallel, -1))
        return full_logits(logits[:1], VOCABULARY, self.tensor_ranks)

    @torch.no_grad()
    def evaluate(self, before_each: Callable[[], None] = lambda: None) -> float:
        """Returns the mean cross entropy over fixed windows of the validation text, nats per byte."""
        losses = []
        self.model.eval()  # the recipe's state is not updated
        for i in range(self.config.eval_batches):
            before_each()
            inputs, targets = self._batch(self.corpus.validation, 123, i)
            losses.append(self._cross_entropy(self._predict(inputs), targets))
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
            rank=world.rank // config.tensor_parallel,
            device=world.device,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's shards. The position in the data is the step, which is in the checkpoint's manifest."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        for group in optimizer["param_groups"]:  # the same with a CUDA graph as without
            group.update(lr=float(group["lr"]), capturable=False)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a result of :meth:`state_dict`, bit for bit."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        if self.config.cached_weights:
            self._quantize_weights()
