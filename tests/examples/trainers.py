"""Trainers of examples/train_moe.py in the processes of a pool of ranks."""

from __future__ import annotations

from moe_lm.config import Config
from moe_lm.data import load_corpus
from moe_lm.trainer import Trainer
from moe_lm.world import World, dense_mesh
from torch.distributed.device_mesh import init_device_mesh

from transformer_plugin.testing.distributed import Rank

STEPS = 5


def trainer_of(rank: Rank, config: Config, cuda_graph: bool = False) -> Trainer:
    """A trainer with fresh parameters."""
    config.check()
    sizes = (rank.size // config.sharing, config.sharing)
    mesh = init_device_mesh(rank.device.type, sizes, mesh_dim_names=("copies", "experts"))
    dense = dense_mesh(rank.device, rank.size, config.tensor_parallel, config.shard)
    world = World(rank.rank, rank.size, rank.device, rank.group, mesh, dense)
    corpus = load_corpus(config.text, config.text_bytes, config.seq_len + 1)
    return Trainer(config, world, corpus, cuda_graph)


def losses(rank: Rank, config: Config) -> list[float]:
    """Of some steps of training, and of an evaluation."""
    trainer = trainer_of(rank, config)
    return [*(float(trainer.step(step)[0]) for step in range(STEPS)), trainer.evaluate()]
