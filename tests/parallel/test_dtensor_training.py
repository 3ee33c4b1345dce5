"""Training with DTensor parameters: steps, checkpoints, cached quantized weights, main_grad, FSDP2, dropout."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import transformer_plugin as tp
from tests.parallel.dtensor_model import INNER, ROWS, WIDTH, Mlp, Model, distance, full, plan
from transformer_plugin.nn import Linear
from transformer_plugin.recipes import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from transformer_plugin.testing.distributed import Rank, RankPool

MLP_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def model_of(rank: Rank, recipe: Recipe | None, mesh: Any = None) -> Model:
    torch.manual_seed(0)
    model = Model(recipe).to(rank.device)
    if mesh is not None:
        parallelize_module(model, mesh, plan(True))
    return model


def batch(rank: Rank, step: int, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(ROWS, (rows, 32), generator=generator).to(rank.device)


def train(rank: Rank, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        model(batch(rank, step)).square().mean().backward()
        tp.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def training(rank: Rank, recipe: Recipe | None, bound: float) -> None:
    """A few clipped steps, in which the parameters become those of one process."""
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    models = model_of(rank, recipe), model_of(rank, recipe, mesh)
    start = copy.deepcopy(models[0].state_dict())
    for model in models:
        train(rank, model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
    for name, parameter in models[1].named_parameters():
        moved = models[0].get_parameter(name).detach() - start[name]
        assert distance(full(parameter.detach()) - start[name], moved) <= bound, name


def test_training(pair: RankPool) -> None:
    pair.run(training, None, 1e-3)
    pair.run(training, Float8CurrentScaling(), 0.2)


def save(rank: Rank, path: str) -> list[Any]:
    """Two steps, then a checkpoint. Returns the full parameters, and the output of the next batch."""
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    model = model_of(rank, MXFP8BlockScaling(), mesh)
    train(rank, model, torch.optim.AdamW(model.parameters(), lr=0.01), 2)
    dcp.save(model.state_dict(), checkpoint_id=path)
    full_state = {name: full(value).detach().cpu() for name, value in model.state_dict().items()}
    return [full_state, model(batch(rank, 5)).detach().cpu()]


def load(rank: Rank, path: str, expected: dict[str, Tensor]) -> None:
    """A checkpoint of a full model goes into a parallel one."""
    model = model_of(rank, MXFP8BlockScaling(), init_device_mesh(rank.device.type, (rank.size,)))
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(full(value).detach().cpu(), expected[name]), name


def test_checkpoints(pair: RankPool, tmp_path: Path) -> None:
    state, output = pair.run(save, str(tmp_path / "parallel"))[0]
    model = Model(MXFP8BlockScaling())
    loaded = model.state_dict()
    dcp.load(loaded, checkpoint_id=tmp_path / "parallel", no_dist=True)
    model.load_state_dict(loaded)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert distance(model(batch(Rank(0, 1, torch.device("cpu")), 5)).detach(), output) < 0.02
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "whole", no_dist=True)
    pair.run(load, str(tmp_path / "whole"), state)


def mlp_of(rank: Rank, mesh: Any, **options: Any) -> Mlp:
    torch.manual_seed(0)
    mlp = Mlp(**options).to(rank.device)
    parallelize_module(mlp, mesh, MLP_PLAN)
    return mlp


def cached_weights(rank: Rank) -> None:
    """The shards are quantized once, with the same bits, and again after a step."""
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    fresh, cached = (mlp_of(rank, mesh, recipe=Float8BlockScaling()) for _ in range(2))
    optimizers = [torch.optim.SGD(mlp.parameters(), lr=0.1) for mlp in (fresh, cached)]
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)).to(rank.device)
    tp.optim.refresh_after(optimizers[1])
    for layer in (cached.up, cached.down):
        layer.quantize_weights()
        assert layer.quantized_weight is not None
        shard = layer.weight.to_local()  # type: ignore[operator]
        assert layer.quantized_weight.tensors[0].shape == shard.shape
    for _ in range(2):
        outputs = [mlp(x) for mlp in (fresh, cached)]
        assert torch.equal(*outputs)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            output.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(fresh.parameters(), cached.parameters(), strict=True):
        assert torch.equal(full(a), full(b))


def where_gradients_go(rank: Rank) -> None:
    """main_grad holds this rank's shard; delayed gradients arrive in .grad as DTensors."""
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    recipe = Float8BlockScaling()
    plain = mlp_of(rank, mesh, recipe=recipe)
    fused = mlp_of(rank, mesh, recipe=recipe, fuse_wgrad_accumulation=True)
    delayed = mlp_of(rank, mesh, recipe=recipe, delay_wgrad_compute=True)
    layers = [(getattr(plain, name), getattr(fused, name), getattr(delayed, name)) for name in ("up", "down")]
    for _, layer, _ in layers:
        shard = layer.weight.to_local()
        layer.weight.main_grad = torch.zeros(shard.shape, device=rank.device)
        layer.weight.grad_added_to_main_grad = False
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)).to(rank.device)
    for mlp in (plain, fused, delayed):
        for _ in range(2):
            mlp(x).square().sum().backward()
    for expected, by_main_grad, later in layers:
        later.backward_dw()
        assert torch.equal(later.weight.grad.full_tensor(), expected.weight.grad.full_tensor())
        assert later.weight.grad.placements == expected.weight.placements
        full_grad = DTensor.from_local(by_main_grad.weight.main_grad, mesh, expected.weight.placements)
        torch.testing.assert_close(full_grad.full_tensor(), expected.weight.grad.full_tensor())
        assert by_main_grad.weight.grad_added_to_main_grad


def under_autocast(rank: Rank) -> None:
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)).to(rank.device)
    parallel = mlp_of(rank, mesh, recipe=Float8BlockScaling())
    torch.manual_seed(0)
    single = Mlp(recipe=Float8BlockScaling()).to(rank.device)
    found = []
    for mlp in (single, parallel):
        with torch.autocast(rank.device.type, torch.bfloat16):
            output = mlp(x)
        assert output.dtype == torch.bfloat16
        output.float().square().sum().backward()
        grads = [full(parameter.grad) for parameter in mlp.parameters()]
        assert all(grad.dtype == torch.float32 for grad in grads)
        found.append([output.detach(), *grads])
    for got, expected in zip(found[1], found[0], strict=True):
        assert distance(got, expected) < 0.05


def recomputed(rank: Rank) -> None:
    """Activation checkpointing gives the same bits."""
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    model, again = (model_of(rank, MXFP8BlockScaling(), mesh) for _ in range(2))
    model(batch(rank, 1)).square().sum().backward()
    torch.utils.checkpoint.checkpoint(again, batch(rank, 1), use_reentrant=False).square().sum().backward()
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(full(a.grad), full(b.grad))


def without_gradients(rank: Rank) -> None:
    model = model_of(rank, MXFP8BlockScaling(), init_device_mesh(rank.device.type, (rank.size,)))
    expected = model(batch(rank, 1)).detach()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(model(batch(rank, 1)), expected)


def compiled_for_any_length(rank: Rank) -> None:
    torch._dynamo.reset()
    model = model_of(rank, MXFP8BlockScaling(), init_device_mesh(rank.device.type, (rank.size,)))
    run = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (2, 4, 6):
        output = run(batch(rank, 1, rows))
        assert torch.equal(output, model(batch(rank, 1, rows)))
        output.sum().backward()


def made_on_meta(rank: Rank) -> None:
    """Initial values after the parameters were distributed."""
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    model = Model(MXFP8BlockScaling(), device="meta")
    parallelize_module(model, mesh, plan(True))
    model.to_empty(device=rank.device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model(batch(rank, 1)).sum().backward()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor), name
        assert bool(parameter.full_tensor().isfinite().all()), name


def converted(rank: Rank) -> None:
    """Layers of torch that were parallelized before they were converted."""
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, INNER), torch.nn.Linear(INNER, WIDTH)).to(rank.device)
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)).to(rank.device)
    expected = model(x)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model = tp.convert(model, Float8BlockScaling())
    assert type(model[0]) is Linear
    output = model(x)
    assert 0.0 < distance(output.detach(), expected.detach()) < 0.1
    output.sum().backward()
    weight: Any = model[0].weight
    assert weight.grad.placements == weight.placements == (Shard(0),)


def test_uses(pair: RankPool) -> None:
    for check in (cached_weights, where_gradients_go, under_autocast, recomputed):
        pair.run(check)
    for check in (without_gradients, compiled_for_any_length, made_on_meta, converted):
        pair.run(check)


def with_fsdp(rank: Rank, recipe: Recipe | None) -> None:
    """Sharded by FSDP2 over one dimension of a mesh and tensor parallel over the other."""
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    single, parallel = Model(recipe).to(rank.device), model_of(rank, recipe, mesh["tp"])
    single.load_state_dict(model_of(rank, recipe).state_dict())
    for module in (parallel.mlp, parallel.head, parallel):
        fully_shard(module, mesh=mesh["dp"])
    halves = [batch(rank, 1), batch(rank, 2)]
    for half in halves:
        (single(half).square().mean() / 2).backward()
    parallel(halves[mesh["dp"].get_local_rank()]).square().mean().backward()
    for name, parameter in parallel.named_parameters():
        expected = single.get_parameter(name).grad
        assert expected is not None and isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements
        assert distance(parameter.grad.full_tensor(), expected) <= 1e-4, name


def test_with_fsdp(four: RankPool) -> None:
    for recipe in (None, Float8BlockScaling()):
        four.run(with_fsdp, recipe)


def dropout(rank: Rank) -> None:
    """Dropout of a layer's output draws as after a layer of torch."""
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)).to(rank.device)
    masks = []
    for cls in (torch.nn.Linear, Linear):
        for layout in (Shard(0), Shard(1), Replicate()):
            layer = cls(WIDTH, INNER).to(rank.device)
            style = ColwiseParallel(output_layouts=layout, use_local_output=False)
            parallelize_module(layer, mesh, style)
            torch.manual_seed(7)
            dropped: Any = torch.nn.functional.dropout(layer(x), 0.5)
            assert dropped.placements == (layout,)
            masks.append(dropped.full_tensor() != 0)
            assert 0.4 < float(masks[-1].float().mean()) < 0.6
    for of_torch, ours in zip(masks[:3], masks[3:], strict=True):
        assert torch.equal(of_torch, ours)
    rows, columns, _ = masks[:3]
    # On CPUs each rank draws its shard from its own generator, and all have the same seed.
    equal = rank.device.type == "cpu"
    assert torch.equal(*rows.chunk(rank.size, 0)) == equal
    assert torch.equal(*columns.chunk(rank.size, 1)) == equal


def test_dropout(pair: RankPool) -> None:
    pair.run(dropout)
