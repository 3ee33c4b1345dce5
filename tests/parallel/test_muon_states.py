"""Muon of shards in checkpoints and with master weights, DTensors, and what is refused."""

from __future__ import annotations

import copy
import inspect
import re
import textwrap
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

import transformer_plugin
from tests.parallel.muon_models import (
    EXPERTS,
    Reference,
    drawn_grads,
    full_of,
    give,
    momentum_of,
    twins,
    weights_of,
)
from tests.parallel.sharded_model import everything, full_block, mesh_of, one_step, sharded_block
from transformer_plugin import nn as tnn
from transformer_plugin import optim, quantized_init
from transformer_plugin.errors import PeerTimeoutError
from transformer_plugin.parallel import full_weight, shard_
from transformer_plugin.parallel._shard_tensor import ShardTensor
from transformer_plugin.recipes import Float8BlockScaling
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


def stepped(model: torch.nn.Module, optimizer: Any, grads: dict[str, Tensor]) -> None:
    give(model, grads)
    optimizer.step()


def values_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Full weights, and full momenta."""
    weights = {name: full_weight(p) for name, p in weights_of(model).items()}
    momenta = {f"{n} momentum": full_of(p, momentum_of(optimizer, p)) for n, p in weights_of(model).items()}
    return weights | momenta


def check_checkpoint(rank: Rank, folder: str, tp: int, phase: str) -> None:
    """What one mesh saves, others load, and then make the same next step."""
    full, model, _ = twins(rank, tp, seed=1 if phase == "save" else 2)
    optimizer = optim.Muon(weights_of(model).values(), lr=0.05)
    if phase == "save":
        for step in range(2):
            stepped(model, optimizer, drawn_grads(full, step))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if phase == "save":
        dcp.save(states, checkpoint_id=folder)
    else:
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )
    found = values_of(model, optimizer)
    stepped(model, optimizer, drawn_grads(full, 2))
    found |= {f"{name} afterwards": value for name, value in values_of(model, optimizer).items()}
    if phase == "save" and rank.rank == 0:
        torch.save(found, f"{folder}/expected.pt")
    if phase == "load":
        expected = torch.load(f"{folder}/expected.pt", map_location=rank.device)
        assert expected.keys() == found.keys()
        for name, value in found.items():
            assert_same_bits(value, expected[name], name)


def test_checkpoints_on_other_meshes(make_pool: Callable[..., RankPool], tmp_path: Path) -> None:
    for save in (1, 2):
        folder = str(tmp_path / str(save))
        make_pool(4).run(check_checkpoint, folder, save, "save")
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        size = metadata["optimizer.state.experts.fc2.weight.momentum_buffer"].size  # type: ignore[union-attr]
        assert list(size) == [EXPERTS, 48, 96]
        for ranks, tp in ((4, 2), (4, 4), (3, 1), (2, 2), (1, 1)):
            make_pool(ranks).run(check_checkpoint, folder, tp, "load")


def check_state_dict(rank: Rank) -> None:
    """A state holds full momenta and loads again; so does that of an optimizer of full weights."""
    full, model, _ = twins(rank, 1)
    weights = weights_of(model)
    optimizer = optim.Muon(weights.values(), lr=0.05)
    reference = optim.Muon(weights_of(full).values(), lr=0.05)
    stepped(model, optimizer, drawn_grads(full, 0))
    stepped(full, reference, drawn_grads(full, 0))
    state = optimizer.state_dict()
    assert all(isinstance(value["momentum_buffer"], ShardTensor) for value in state["state"].values())
    for saved in (state, reference.state_dict()):
        other = optim.Muon(weights.values())
        other.load_state_dict(copy.deepcopy(saved))
        assert other.param_groups[0]["lr"] == 0.05
        for parameter in weights.values():
            momenta = [full_of(parameter, momentum_of(each, parameter)) for each in (other, optimizer)]
            assert_same_bits(*momenta)


def test_state_dicts(pair: RankPool) -> None:
    pair.run(check_state_dict)


def check_master_weights(rank: Rank) -> None:
    """Float32 copies of shards are shards, too, and groups of parameters keep their options."""
    for tp in (1, rank.size):
        full, model, _ = twins(rank, tp)
        weights = weights_of(model)
        names = list(weights)
        masters = optim.MasterWeights(weights.values(), lambda w: optim.Muon(w, lr=0.05))
        reference = Reference(full.float(), lr=0.05)
        for step in range(2):
            grads = {name: grad.bfloat16() for name, grad in drawn_grads(full, step).items()}
            stepped(model, masters, grads)
            reference.step({name: grad.float() for name, grad in grads.items()})
        for name, master in zip(names, masters.master_weights, strict=True):
            if not (master.is_cuda and name in reference.stacks):
                assert_same_bits(full_weight(master), reference.weight(name), name)
            assert_same_bits(weights[name].detach(), master.detach().bfloat16(), name)
        state = copy.deepcopy(masters.state_dict())
        masters.load_state_dict(state)
    others = optim.MasterWeights(weights_of(full).values(), lambda w: optim.Muon(w, lr=0.05))
    before = copy.deepcopy(others.state_dict())
    with pytest.raises(ValueError, match=r"argument 'master_weights.0': expected full master weights"):
        others.load_state_dict(state)
    assert str(others.state_dict()) == str(before)


def test_master_weights(pair: RankPool) -> None:
    pair.run(check_master_weights)


def check_groups(rank: Rank) -> None:
    """Of two groups of parameters each has its options; a weight that no rank has a gradient of stays."""
    full, model, _ = twins(rank, 1)
    own, other = weights_of(model), weights_of(full)
    optimizers = []
    for kind, weights in ((optim.Muon, own), (torch.optim.Muon, other)):
        matrices = [p for p in weights.values() if p.dim() == 2]
        groups = [{"params": matrices[:2]}, {"params": matrices[2:], "lr": 0.3, "weight_decay": 0.0}]
        optimizers.append(kind(groups, lr=0.1))
    for step in range(2):
        grads = drawn_grads(full, step)
        for model_, optimizer in ((model, optimizers[0]), (full, optimizers[1])):
            give(model_, grads)
            model_.down.weight.grad = None
            optimizer.step()
    for name, parameter in own.items():
        assert_same_bits(full_weight(parameter), other[name].detach(), name)


def test_groups(pair: RankPool) -> None:
    pair.run(check_groups)


def check_dtensors(rank: Rank) -> None:
    """Those of which a rank has full matrices are stepped where they are; others are refused."""
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    torch.manual_seed(0)
    values = torch.randn(5, 8, 24, device=rank.device), torch.randn(16, 8, device=rank.device)
    placements: list[tuple[Placement, Placement]] = [(Shard(0), Replicate()), (Replicate(), Replicate())]
    for stack, matrix in placements:
        full = [Parameter(value.clone()) for value in values]
        pairs = zip(values, (stack, matrix), strict=True)
        shards = [Parameter(distribute_tensor(value.clone(), mesh, [p])) for value, p in pairs]
        optimizers = optim.Muon(full), optim.Muon(shards)
        for _ in range(2):
            for one, two in zip(full, shards, strict=True):
                one.grad = torch.randn_like(one)
                two.grad = distribute_tensor(one.grad.clone(), mesh, two.placements)  # type: ignore[attr-defined]
            versions = [shard._version for shard in shards]
            for optimizer in optimizers:
                optimizer.step()
            assert all(shard._version > version for shard, version in zip(shards, versions, strict=True))
        for one, two in zip(full, shards, strict=True):
            momentum = optimizers[1].state[two]["momentum_buffer"]
            assert isinstance(momentum, DTensor) and momentum.placements == two.placements  # type: ignore[attr-defined]
            full = two.detach().full_tensor()  # type: ignore[attr-defined]
            torch.testing.assert_close(
                full, one.detach(), rtol=0, atol=0 if full.device.type == "cpu" else 1e-3
            )
    for value, placement in ((values[1], Shard(0)), (values[1], Shard(1)), (values[0], Shard(1))):
        shard = Parameter(distribute_tensor(value, mesh, [placement]))
        with pytest.raises(
            TypeError, match="Muon: argument 'params': expected tensors of which this rank has"
        ):
            optim.Muon([shard])


def test_dtensors(pair: RankPool) -> None:
    pair.run(check_dtensors)


def check_experts_under_fsdp(rank: Rank) -> None:
    """Experts over ranks, in FSDP2 over copies of them: each rank steps its own."""
    block = sharded_block(full_block(rank.device), rank.device, mesh=(mesh := mesh_of(rank))["experts"])
    transformer_plugin.parallel.fully_shard(block, mesh)
    one_step(rank, block)
    stacks = [p for p in block.moe.experts.parameters() if p.dim() == 3]
    assert len(stacks) == 2 and all(isinstance(p, DTensor) for p in stacks)
    full = [Parameter(everything(p.detach()).clone()) for p in stacks]
    for one, shard in zip(full, stacks, strict=True):
        one.grad = everything(shard.grad).clone()  # type: ignore[arg-type]
    for parameters in (full, stacks):
        optim.Muon(parameters, lr=0.1).step()
    for one, shard in zip(full, stacks, strict=True):
        close = {"rtol": 0, "atol": 0 if one.device.type == "cpu" else 1e-3}
        torch.testing.assert_close(everything(shard.detach()), one.detach(), **close)


def test_experts_under_fsdp(ranks: RankPool) -> None:
    ranks.run(check_experts_under_fsdp)


def check_refusals(rank: Rank) -> None:
    """torch's Muon on a shard, also a subclass and of master weights, and gradients on some ranks only."""
    _, sharded, _mesh = twins(rank, 1)
    _, sliced, _ = twins(rank, rank.size)
    for model, name in ((sharded, "'up.weight'"), (sliced, "a tensor-parallel parameter")):
        text = (
            "transformer_plugin::torch.optim.Muon: argument 'params': expected full parameters, got "
            f"{name}, of which each of {rank.size} ranks has a shard. Use transformer_plugin.optim.Muon."
        )
        before = model.up.weight.detach().clone()
        model.up.weight.grad = torch.ones_like(before)
        derived = type("Derived", (torch.optim.Muon,), {})
        for make in (torch.optim.Muon, derived, lambda w: optim.MasterWeights(w, torch.optim.Muon)):
            with pytest.raises(ValueError) as caught:
                make([model.up.weight]).step()
            assert str(caught.value) == text
        assert_same_bits(model.up.weight.detach(), before)
    for model, name, count in ((sharded, "'up.weight'", 1), (sliced, "a parameter of sizes [192, 48]", 1)):
        optimizer = optim.Muon(weights_of(model).values())
        give(model, drawn_grads(twins(rank, 1)[0], 0))
        before = model.down.weight.detach().clone()
        if rank.rank > 0:
            model.up.weight.grad = None
        with pytest.raises(ValueError) as caught:
            optimizer.step()
        assert str(caught.value) == (
            "transformer_plugin::Muon: argument 'params': expected gradients on all ranks of a matrix, or on none, "
            f"got a gradient of {name} on {count} of {rank.size} ranks. Run the same layers on all ranks, or set the "
            "gradient to zeros where it is None."
        )
        assert_same_bits(model.down.weight.detach(), before)
        model.up.weight.grad = None
        optimizer.step()  # the group stays usable
        assert not torch.equal(model.down.weight.detach(), before)


def test_refusals(ranks: RankPool) -> None:
    ranks.run(check_refusals)


def check_manual(rank: Rank, code: str) -> None:
    """Of a model with a head, biases of experts and norms, Muon gets the matrices of layers."""
    _, model, _ = twins(rank, 1)
    namespace: dict[str, Any] = {
        "model": model,
        "torch": torch,
        "nn": tnn,
        "transformer_plugin": transformer_plugin,
    }
    exec(code, namespace)
    muon, other = namespace["optimizers"]
    assert type(muon) is optim.Muon and muon.defaults["adjust_lr_fn"] == "match_rms_adamw"
    expected = [p for name, p in weights_of(model).items() if name != "head.weight"]
    assert [id(p) for p in muon.param_groups[0]["params"]] == [id(p) for p in expected]
    assert len(expected) + len(other.param_groups[0]["params"]) == len(list(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    muon.step()


def test_examples(make_pool: Callable[..., RankPool]) -> None:
    """Those of the manual and of the docstring are one, and run."""
    page = Path(__file__).resolve().parents[2] / "docs" / "sharded-weights.md"
    if not page.exists():
        pytest.skip("needs the source tree")
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    of_page = next(block for block in blocks if "optim.Muon" in block)
    documentation = inspect.cleandoc(optim.Muon.__doc__ or "")
    of_class = textwrap.dedent(re.findall(r"^    .*?(?=\n\S)", documentation, re.MULTILINE | re.DOTALL)[0])
    lines = of_page.replace("    optim.Muon", "    transformer_plugin.optim.Muon").splitlines()[2:]
    assert of_class.strip().splitlines() == lines
    for code in (of_page, of_class):
        make_pool(2).run(check_manual, code)


def test_quantized_parameters_are_refused(device: torch.device) -> None:
    with quantized_init(Float8BlockScaling()):
        layer = tnn.Linear(128, 128, device=device, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"got QuantizedTensor .* Train float32 copies: MasterWeights"):
        optim.Muon([layer.weight])
    masters = optim.MasterWeights([layer.weight], optim.Muon)
    before = masters.master_weights[0].detach().clone()
    layer.weight.grad = torch.ones_like(before).bfloat16()
    masters.step()
    assert not torch.equal(masters.master_weights[0].detach(), before)


def check_lost_rank(rank: Rank) -> str:
    group = dist.new_group(list(range(rank.size)), timeout=timedelta(seconds=2))
    layer = shard_(tnn.Linear(8, 8, device=rank.device), group)
    optimizer = optim.Muon([layer.weight])
    layer.weight.grad = torch.ones_like(layer.weight)
    if rank.rank == 0:
        with pytest.raises(PeerTimeoutError, match=r"rank\(s\) 1 did not take part"):
            optimizer.step()
    dist.barrier()
    return "done"


def test_a_lost_rank(make_pool: Callable[..., RankPool]) -> None:
    assert make_pool(2).run(check_lost_rank) == ["done"] * 2
