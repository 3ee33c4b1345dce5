"""Trainers of examples/train_moe.py in the processes of a pool of ranks."""

from __future__ import annotations

from functools import cache

from moe_lm.config import Config
from moe_lm.data import load_corpus
from moe_lm.trainer import Trainer
from moe_lm.world import World, dense_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from transformer_plugin.testing.distributed import Rank

STEPS = 5


@cache
def meshes(
    rank: Rank, sharing: int, tensor_parallel: int, shard: int
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The meshes of the experts and of the dense layers. Made once: the threads of idle groups slow other tests."""
    sizes = (rank.size // sharing, sharing)
    experts = init_device_mesh(rank.device.type, sizes, mesh_dim_names=("copies", "experts"))
    return experts, dense_mesh(rank.device, rank.size, tensor_parallel, shard)


def trainer_of(rank: Rank, config: Config, cuda_graph: bool = False) -> Trainer:
    """A trainer with fresh parameters."""
    config.check()
    mesh, dense = meshes(rank, config.sharing, config.tensor_parallel, config.shard)
    world = World(rank.rank, rank.size, rank.device, rank.group, mesh, dense)
    corpus = load_corpus(config.text, config.text_bytes, config.seq_len + 1)
    return Trainer(config, world, corpus, cuda_graph)


def losses(rank: Rank, config: Config) -> list[float]:
    """Of some steps of training, and of an evaluation."""
    trainer = trainer_of(rank, config)
    return [*(float(trainer.step(step)[0]) for step in range(STEPS)), trainer.evaluate()]
