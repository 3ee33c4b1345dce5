#!/usr/bin/env python3
"""A mixture-of-experts language model over ranks, on one page: experts, FSDP2, sharded weights and a checkpoint.

    torchrun --nproc-per-node 4 examples/minimal_moe.py    # 4 GPUs, or a CPU

Pairs of ranks share the experts. ``shard_`` shards the weights of dense layers over all ranks, which gather each in FP8
just before its product; FSDP2 shards the rest. Halfway a new model loads what is saved, and goes on as the first does.
"""

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import transformer_plugin as tp
from transformer_plugin.recipes import Float8BlockScaling

VOCABULARY, HIDDEN, HEADS, FFN, EXPERTS, TOPK, LAYERS = 64, 128, 4, 256, 8, 2, 2
SEQUENCE, BATCH, STEPS = 32, 8, 16  # of each rank


class Block(torch.nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        options: Any = {"recipe": Float8BlockScaling(), "device": mesh.device_type}
        dispatch = tp.nn.DispatchConfig(max_tokens=BATCH * SEQUENCE)  # of any rank in one call
        self.qkv = tp.nn.LayerNormLinear(HIDDEN, 3 * HIDDEN, bias=False, **options)
        self.out = tp.nn.Linear(HIDDEN, HIDDEN, bias=False, **options)
        self.norm = torch.nn.RMSNorm(HIDDEN, device=mesh.device_type)
        self.moe = tp.nn.MoE(HIDDEN, FFN, EXPERTS, TOPK, mesh=mesh["experts"], dispatch=dispatch, **options)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.moe(self.norm(x)).output


class Model(torch.nn.Module):
    """Tokens ``[B, T]`` to logits ``[B, T, V]``."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.embed = tp.nn.Embedding(VOCABULARY, HIDDEN, device=mesh.device_type)
        self.blocks = torch.nn.ModuleList(Block(mesh) for _ in range(LAYERS))
        self.head = tp.nn.Linear(HIDDEN, VOCABULARY, bias=False, device=mesh.device_type)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(torch.nn.Sequential(*self.blocks)(self.embed(tokens)))


def make(mesh: DeviceMesh) -> tuple[Model, torch.optim.Optimizer]:
    """All gradients will be those of the mean of the ranks' losses."""
    torch.manual_seed(0)  # one seed: what ranks share starts equal, and experts start different
    model = Model(mesh)
    tp.parallel.shard_(model, dist.group.WORLD, filter=lambda name, layer: ".moe." not in name)
    dense = [model.embed, model.head, *(layer for block in model.blocks for layer in (block.qkv, block.out))]
    sharded = {layer.weight for layer in dense}
    for module in (*model.blocks, model):
        tp.parallel.fully_shard(module, mesh, ignored_params=sharded)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # two kinds of parameters


def train(model: Model, optimizer: torch.optim.Optimizer, steps: range, device: torch.device) -> list[float]:
    """Learns that a token is 3 times the last one plus 1. Returns the mean loss of the ranks in each step."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (BATCH, 1), generator=generator).to(device)
        for _ in range(SEQUENCE):
            tokens = torch.cat([tokens, (3 * tokens[:, -1:] + 1) % VOCABULARY], dim=1)
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
        if dist.get_rank() == 0:
            print(f"step {step + 1:2d}  loss {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    mesh = init_device_mesh(
        device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("copies", "experts")
    )
    model, optimizer = make(mesh)
    losses = train(model, optimizer, range(STEPS // 2), device)

    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
    loaded, its_optimizer = make(mesh)
    weights, states = get_state_dict(loaded, its_optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
    set_state_dict(loaded, its_optimizer, model_state_dict=weights, optim_state_dict=states)

    both = ((model, optimizer), (loaded, its_optimizer))
    rest, again = (train(*each, range(STEPS // 2, STEPS), device) for each in both)
    dist.destroy_process_group()
    differs = any(abs(one - other) > 1e-3 for one, other in zip(rest, again, strict=True))
    if differs or rest[-1] > 0.5 * losses[0]:
        raise SystemExit("WRONG: the loaded model has other losses, or nothing was learned")


if __name__ == "__main__":
    main()
