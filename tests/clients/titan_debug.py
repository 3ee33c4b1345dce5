"""torchtitan's debug DeepSeek-V3 on CPUs, as a config of torchtitan's, and what runs its trainer there:

``python -m tests.clients.titan_debug --module tests.clients.titan_debug --config debugmodel ...``, or with torchrun.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# torchtitan asks for the accelerator when it is imported, and takes "cuda" where there is none.
torch._utils._get_available_device_type = lambda: "cpu"

import torchtitan.components.metrics as metrics
import torchtitan.distributed.fsdp as fsdp
import torchtitan.distributed.utils as distributed
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.trainer import Trainer

from transformer_plugin.integrations.torchtitan import LinearConverter

SEQ_LEN, BATCH = 64, 8


class NoMemoryMonitor:
    """torch.cpu counts no memory."""

    device_name = "CPU"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def sum_gradients(model: torch.nn.Module) -> None:
    """What torchtitan asks for, without NCCL's reduction that multiplies first."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


metrics.build_device_memory_monitor = NoMemoryMonitor
fsdp.disable_fsdp_gradient_division = sum_gradients
distributed.set_pg_timeouts = lambda *args, **kwargs: None  # Gloo's barrier takes no device


class NoTokenizer(BaseTokenizer):
    """The data are tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **unused: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


class Chains(BaseDataLoader):
    """Tokens of which each but a tenth follows from the one before it: something to learn. The batch of all ranks is
    the same for any number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab: int = 256

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **unused: Any,
    ) -> None:
        self.vocab, self.ranks, self.rank = config.vocab, dp_world_size, dp_rank
        self.seq_len, self.batch = seq_len, local_batch_size
        self.step = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        follows = torch.randperm(self.vocab, generator=torch.Generator().manual_seed(7))
        while True:
            generator = torch.Generator().manual_seed(1000 + self.step)
            self.step += 1
            rows = self.batch * self.ranks
            tokens = torch.randint(self.vocab, (rows, self.seq_len + 1), generator=generator)
            is_noise = torch.rand(rows, self.seq_len + 1, generator=generator) < 0.1
            for i in range(1, self.seq_len + 1):
                tokens[:, i] = torch.where(is_noise[:, i], tokens[:, i], follows[tokens[:, i - 1]])
            tokens = tokens[self.rank * self.batch : (self.rank + 1) * self.batch]
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state.get("step", 0)


class Losses(metrics.MetricsProcessor):
    """Writes each step's loss and gradient norm to the file that TITAN_LOSSES names."""

    @dataclass(kw_only=True, slots=True)
    class Config(metrics.MetricsProcessor.Config):
        pass

    def log(
        self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float, **more: Any
    ) -> None:
        if int(os.environ["RANK"]) == 0:
            with Path(os.environ["TITAN_LOSSES"]).open("a") as file:
                file.write(json.dumps([step, global_avg_loss, grad_norm]) + "\n")


def debugmodel(converters: Any = None) -> Trainer.Config:
    model_spec = model_registry("debugmodel", converters=converters)
    for _, _, parent, name in model_spec.traverse(FlexAttention.Config):  # it has no backward on a CPU
        setattr(parent, name, ScaledDotProductAttention.Config())
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        metrics=Losses.Config(log_freq=1),
        model_spec=model_spec,
        tokenizer=NoTokenizer.Config(),
        dataloader=Chains.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=2, decay_ratio=0.8, decay_type="linear", min_lr_factor=0.0
        ),
        training=TrainingConfig(local_batch_size=BATCH, seq_len=SEQ_LEN, steps=10, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(expert_parallel_degree=1),
        checkpoint=CheckpointManager.Config(enable=False, interval=1000, last_save_model_only=False),
        activation_checkpoint=None,
    )


def two_layers() -> Trainer.Config:
    """The same, of a dense layer and one with experts, with torchtitan's default of activation checkpoints."""
    config = debugmodel()
    config.activation_checkpoint = SelectiveAC.Config()
    del config.model_spec.model.layers[2:]
    return config


def debugmodel_fp8_block() -> Trainer.Config:
    """The same, its linear layers in FP8 blocks."""
    return debugmodel([LinearConverter.Config(recipe="fp8_block")])


if __name__ == "__main__":
    from torchtitan.train import main

    main()
