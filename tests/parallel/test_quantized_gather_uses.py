"""Checkpoints, deferred values, other ways of FSDP2, and refusals of models with quantized all-gathers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import transformer_plugin as tp
from tests.parallel.gathered_model import (
    HIDDEN,
    QUANTIZED,
    Model,
    assert_alike,
    batch,
    local,
    made,
    shard,
    step_of,
)
from tests.parallel.sharded_model import Block, mesh_of, one_step, rows_of
from transformer_plugin.nn import GroupedLinear, Linear
from transformer_plugin.parallel import quantize_all_gather
from transformer_plugin.parallel._quantized_gather import QuantizedGatherTensor
from transformer_plugin.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


def resume(rank: Rank, folder: str) -> None:
    """Made on the meta device, checkpointed by DCP, and loaded into models that are not sharded or not quantized."""
    recipe = Float8BlockScaling()
    with torch.device("meta"):
        model = Model(recipe)
    shard(rank, quantize_all_gather(model)).to_empty(device=rank.device)
    assert all(type(model.get_parameter(n)._local_tensor) is QuantizedGatherTensor for n in QUANTIZED)
    for layer in (model.first, model.norm, model.experts, model.last):
        torch.manual_seed(1)
        layer.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step_of(model, rank, 0)
    optimizer.step()
    optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    for name in QUANTIZED:
        assert type(weights[name]._local_tensor) is Tensor
        assert weights[name]._local_tensor.data_ptr() == local(model.get_parameter(name)).data_ptr()
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    dist.barrier()
    expected = {name: p.full_tensor() for name, p in model.named_parameters()}
    inputs = batch(rank.rank, 5, rank.device)
    output = model(*inputs).detach()
    # Another sharded model, with other values, and its optimizer.
    torch.manual_seed(7)
    again = shard(rank, quantize_all_gather(Model(recipe).to(rank.device)))
    other = torch.optim.AdamW(again.parameters(), lr=0.01)
    weights, states = get_state_dict(again, other)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(again, other, model_state_dict=weights, optim_state_dict=states)
    assert_same_bits(again(*inputs).detach(), output)
    for one, opt in ((model, optimizer), (again, other)):
        step_of(one, rank, 1)
        opt.step()
    assert_alike(again, model)
    # One process's model, not sharded, in high precision and as a quantized one.
    full = Model(recipe).to(rank.device)
    state = {"model": full.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    full.load_state_dict(state["model"])
    for name, p in full.named_parameters():
        assert_same_bits(p.detach(), expected[name])
    assert_same_bits(full(*inputs).detach(), output)
    with tp.quantized_init(recipe):
        quantized = Model(None).to(rank.device)
    quantized.load_state_dict(state["model"])
    assert_same_bits(quantized(*inputs).detach(), output)


def test_checkpoints_and_deferred_values(pair: RankPool, tmp_path: Path) -> None:
    pair.run(resume, str(tmp_path / "checkpoint"))


def load_by_assignment(rank: Rank) -> None:
    """load_state_dict(assign=True) replaces the parameters, before and after the first all-gather."""
    recipe = Float8CurrentScaling()
    source = shard(rank, quantize_all_gather(made(rank, recipe)))
    with torch.no_grad():
        for p in source.parameters():
            p.mul_(1.5)
    inputs = batch(rank.rank, 0, rank.device)
    expected = source(*inputs).detach()
    with torch.device("meta"):
        model = Model(recipe)
    shard(rank, quantize_all_gather(model)).load_state_dict(source.state_dict(), assign=True)
    for _ in range(2):
        assert_same_bits(model(*inputs).detach(), expected)
        for name in QUANTIZED:
            assert type(model.get_parameter(name)._local_tensor) is QuantizedGatherTensor
        model.load_state_dict(source.state_dict(), assign=True)
    plain = quantize_all_gather(made(rank, recipe))  # not sharded yet
    plain.load_state_dict(made(rank, recipe).state_dict(), assign=True)
    assert type(plain.first.weight) is QuantizedGatherTensor


def test_loads_by_assignment(pair: RankPool) -> None:
    pair.run(load_by_assignment)


def recompute(rank: Rank) -> None:
    """Activation checkpoints run the forward again, inside the backward, with the weight of the second all-gather."""
    results = []
    for gathers in (False, True):
        model = made(rank, MXFP8BlockScaling())
        shard(rank, quantize_all_gather(model) if gathers else model)
        x, *rest = batch(rank.rank, 0, rank.device)
        hidden = checkpoint(lambda x, m=model: m.norm(m.first(x)), x.requires_grad_(), use_reentrant=False)
        model.experts(hidden, *rest).square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    for got, expected in zip(*reversed(results), strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            assert_same_bits(local(got), local(expected))


def test_activation_checkpoints(pair: RankPool) -> None:
    pair.run(recompute)


def other_uses(rank: Rank) -> None:
    """Evaluation, clipping, fused optimizers, gradients without synchronization, uneven shards."""
    models = []
    for gathers in (False, True):
        torch.manual_seed(0)
        layers = [Linear(HIDDEN, 33, recipe=Float8CurrentScaling()), torch.nn.Linear(33, 5)]
        model = torch.nn.Sequential(*layers).to(rank.device)
        if gathers:
            quantize_all_gather(model)
        models.append(model)
        fully_shard(model[0])
        fully_shard(model, reshard_after_forward=False)
    x = batch(rank.rank, 0, rank.device)[0]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same_bits(models[1](x), models[0](x))
    norms = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model(x).square().sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor())
        optimizer.step()
    assert_same_bits(norms[1], norms[0])
    assert_alike(*reversed(models), "gradients")
    assert_alike(*reversed(models))
    assert_same_bits(models[1](x).detach(), models[0](x).detach())


def test_evaluation_clipping_and_uneven_shards(pair: RankPool) -> None:
    pair.run(other_uses)


def hybrid(rank: Rank) -> None:
    """Shards over two ranks, copies on two."""
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("copies", "shards"))
    outputs = []
    for gathers in (False, True):
        model = made(rank, Float8CurrentScaling())
        for part in (model.first, model.experts, model) if not gathers else ():
            fully_shard(part, mesh=mesh)
        if gathers:
            quantize_all_gather(model)
            for part in (model.first, model.experts, model):
                fully_shard(part, mesh=mesh)
        outputs.append(step_of(model, rank, 0) + [local(p.grad) for p in model.parameters()])
    for got, expected in zip(*reversed(outputs), strict=True):
        assert_same_bits(got, expected)


def test_hybrid_sharding(four: RankPool) -> None:
    four.run(hybrid)


def refused(rank: Rank) -> None:
    cases: list[tuple[Any, str]] = [
        (
            Linear(128, 384, recipe=Float8BlockScaling()),
            "a multiple of 256 rows, .* blocks of 128 .*, got 384 in a",
        ),
        (Linear(128, 96, recipe=MXFP8BlockScaling()), "a multiple of 64 rows, .* blocks of 32 .* Use 128"),
        (GroupedLinear(3, 128, 128, recipe=Float8BlockScaling()), "a multiple of 2 matrices, .* got 3 in a"),
    ]
    for layer, text in cases:
        layer = fully_shard(quantize_all_gather(layer.to(rank.device)))
        arguments = [torch.randn(16, 128, device=rank.device)]
        if isinstance(layer, GroupedLinear):
            arguments.append(torch.tensor([16, 0, 0], device=rank.device))
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"quantize_all_gather: argument 'model': expected {text}"):
                layer(*arguments)
    layer = fully_shard(quantize_all_gather(Linear(256, 256, recipe=Float8BlockScaling()).to(rank.device)))
    with pytest.raises(ValueError, match="expected weights that FSDP2 has not sharded, got a DTensor"):
        quantize_all_gather(layer)
    divided = [tp.parallel.shard_(Linear(256, 256, recipe=Float8BlockScaling()), rank.group)]
    tensor_parallel: dict[str, Any] = {"parallel_mode": "row", "tp_group": rank.group}
    divided.append(Linear(256, 256, recipe=Float8BlockScaling(), **tensor_parallel))
    for each in divided:
        with pytest.raises(
            ValueError, match="expected weights of which this rank has all elements, got a shard or"
        ):
            quantize_all_gather(each)
    layer(torch.randn(16, 256, device=rank.device))
    layer.reshard()
    layer.recipe = MXFP8BlockScaling()
    with pytest.raises(
        ValueError, match=r"expected 'fp8_block:e4m3,pow2,square', .* first all-gather, got 'mxfp8"
    ):
        layer(torch.randn(16, 256, device=rank.device))
    layer.recipe = None
    with pytest.raises(
        ValueError, match="expected a recipe that quantizes weights from their values, got None"
    ):
        layer(torch.randn(16, 256, device=rank.device))
    moved = fully_shard(
        quantize_all_gather(Linear(256, 256, recipe=Float8BlockScaling()).to(rank.device)),
        shard_placement_fn=lambda p: Shard(p.dim() - 1),
    )
    with pytest.raises(ValueError, match="expected shards along dimension 0"):
        moved(torch.randn(16, 256, device=rank.device))
    with tp.quantized_init(Float8BlockScaling()):
        quantized = torch.nn.Sequential(torch.nn.Linear(8, 256), Linear(256, 256)).to(rank.device)
    before = [type(p) for p in quantized.parameters()]
    with pytest.raises(
        ValueError, match=r"fully_shard: argument 'module': expected parameters in high precision"
    ):
        fully_shard(quantized)
    assert before == [type(p) for p in quantized.parameters()]


def test_refused_by_all_ranks(pair: RankPool) -> None:
    pair.run(refused)


def test_refused() -> None:
    recipe = Float8BlockScaling()
    tied = torch.nn.Sequential(Linear(256, 256, recipe=recipe), torch.nn.Linear(256, 256))
    tied[1].weight = tied[0].weight
    with tp.quantized_init(recipe):
        quantized = Linear(256, 256)
    cases: list[tuple[Any, str]] = [
        (torch.nn.Linear(4, 4), "a layer with a recipe"),
        (Linear(256, 256), "a layer with a recipe"),
        (tied, "weights of one module each"),
        (quantized, "weights in high precision"),
        (Linear(256, 256, recipe=DelayedScaling()), "a recipe that quantizes weights from their values"),
        (Linear(256, 256, recipe=Float8BlockScaling(nonfinite="nan")), "a weight format without nan"),
        (GroupedLinear(2, 256, 256, recipe=recipe, parameters="list"), "one parameter 'weight'"),
    ]
    for model, text in cases:
        both = torch.nn.ModuleList([Linear(256, 256, recipe=recipe), model])
        for refusing in (model, both) if "a layer" not in text else (model,):
            with pytest.raises(ValueError, match=rf"quantize_all_gather: argument 'model': expected {text}"):
                quantize_all_gather(refusing)
        assert type(both[0].weight) is torch.nn.Parameter
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        quantize_all_gather(3)  # type: ignore[arg-type]
    some = quantize_all_gather(both, lambda module, name: name == "0")
    assert type(some[0].weight) is QuantizedGatherTensor and "weight0" in dict(some[1].named_parameters())


def test_unsharded(device: torch.device) -> None:
    """Before fully_shard, and where a layer stays without it, the weight is what it was."""
    torch.manual_seed(0)
    model: Any = Model(Float8BlockScaling()).to(device)
    plain, inputs = copy.deepcopy(model), batch(0, 0, device)
    model.first.weight.main_grad = torch.ones(1)
    addresses = [p.data_ptr() for p in model.parameters()]
    assert quantize_all_gather(model) is model and quantize_all_gather(model) is model
    assert model.first.weight.main_grad.shape == (1,) and "QuantizedGatherTensor" in repr(model.first.weight)
    assert [local(p).data_ptr() for p in model.parameters()] == addresses
    for one in (copy.deepcopy(model), model):
        assert_same_bits(one(*inputs).detach(), plain(*inputs).detach())
    for one in (model, plain):
        one(*inputs).square().sum().backward()
    assert_alike(model, plain, "gradients")
    for one in (model, plain):
        # torch chooses between its implementations, which round differently, by the class of the parameters.
        torch.optim.AdamW(one.parameters(), lr=0.1, foreach=False).step()
    assert_alike(model, plain)
    state = model.state_dict()
    assert all(type(t) is Tensor for t in state.values())
    assert type(model.state_dict(keep_vars=True)["first.weight"]) is QuantizedGatherTensor
    other = quantize_all_gather(Model(Float8BlockScaling()).to(device))
    other.load_state_dict(state)
    assert_alike(other, plain)
    other.half()
    assert type(other.first.weight) is QuantizedGatherTensor and other.first.weight.dtype == torch.float16
    with torch.no_grad():
        assert other.first.weight.mul_(2) is other.first.weight
        assert type(other.first.weight * 2) is Tensor


def experts_over_ranks(rank: Rank, recipe: Any) -> None:
    """Experts over two ranks, and the copies of each sharded by FSDP2: a DTensor of two meshes."""
    mesh = mesh_of(rank)
    results = []
    for gathers in (False, True):
        torch.manual_seed(0)
        block: Any = Block(rank.device, recipe, mesh=mesh["experts"])
        if gathers:
            quantize_all_gather(block)
            one_step(rank, block)  # before it is sharded
            block.zero_grad()
        tp.parallel.fully_shard(block, mesh)
        optimizer = torch.optim.AdamW(block.parameters(), lr=0.1)
        for step in range(2):
            for i in range(2):
                one_step(rank, block, 2 * step + i)
            gradients = [local(p.grad).clone() for p in block.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        rows = rows_of(rank.rank).to(rank.device)
        results.append([*gradients, *(local(p) for p in block.parameters()), block(rows).detach()])
    for got, expected in zip(*reversed(results), strict=True):
        assert_same_bits(got, expected)
    for name in ("fc1", "fc2"):
        weight = getattr(block.moe.experts, name).weight
        assert isinstance(weight, DTensor) and type(weight._local_tensor) is QuantizedGatherTensor
    with pytest.raises(ValueError, match="expected weights that FSDP2 has not sharded, got a DTensor"):
        quantize_all_gather(tp.parallel.fully_shard(Block(rank.device, recipe, mesh=mesh["experts"]), mesh))
    state = block.state_dict()
    assert type(state["moe.experts.fc1.weight"]._local_tensor) is Tensor
    again = Block(rank.device, recipe, mesh=mesh["experts"])
    tp.parallel.fully_shard(quantize_all_gather(again), mesh).load_state_dict(state)
    assert_same_bits(again(rows).detach(), results[1][-1])


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling()], ids=["tensor", "block"])
def test_experts_over_ranks(ranks: RankPool, recipe: Any) -> None:
    ranks.run(experts_over_ranks, recipe)


def compiled(rank: Rank) -> None:
    """Blocks are compiled, as frameworks do it, and FSDP2 gathers around them."""
    results = []
    for compiles in (False, True):
        torch._dynamo.reset()
        model = quantize_all_gather(made(rank, Float8BlockScaling()))
        if compiles:
            for part in (model.first, model.norm, model.experts):
                part.compile(fullgraph=True, backend="aot_eager")
        shard(rank, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(2):
            outputs = step_of(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        results.append([*outputs, *(local(p) for p in model.parameters())])
    for got, expected in zip(*reversed(results), strict=True):
        assert_same_bits(got, expected)


def test_compiled_blocks(pair: RankPool) -> None:
    pair.run(compiled)
