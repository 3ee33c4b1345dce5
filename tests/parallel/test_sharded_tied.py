"""An embedding and an output layer that share a weight, which is sharded over ranks."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.parallel.sharded_models import RECIPES
from transformer_plugin import nn as tnn
from transformer_plugin import ops, parallel
from transformer_plugin.parallel import full_weight, shard_
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.parallel._shard_tensor import ShardTensor
from transformer_plugin.testing.distributed import Rank
from transformer_plugin.testing.numerics import assert_same_bits

ROWS, TOKENS = 11, 16


class Tied(torch.nn.Module):
    """Of small integers. The head has the table's weight."""

    def __init__(
        self, recipe: Any = None, rows: int = ROWS, columns: int = 6, dtype: Any = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.rows = rows
        self.table = tnn.Embedding(rows, columns, dtype=dtype)
        self.middle = tnn.Linear(columns, columns, bias=False, dtype=dtype)
        self.head = tnn.Linear(columns, rows, dtype=dtype, recipe=recipe)
        self.head.weight = self.table.weight
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(integers(*parameter.shape, seed=seed + i))

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.middle(self.table(tokens)))
        return result


def integers(*sizes: int, seed: int) -> Tensor:
    return torch.randint(-2, 3, sizes, generator=torch.Generator().manual_seed(seed)).float()


def step_of(model: Any, rank: int, step: int = 0) -> Tensor:
    inner = getattr(model, "module", model)
    seed = 100 * step + rank
    tokens = torch.randint(inner.rows, (TOKENS,), generator=torch.Generator().manual_seed(seed))
    output: Tensor = model(tokens.to(inner.table.weight.device))
    output.backward(integers(*output.shape, seed=7 + seed).to(output))
    return output.detach()


def gradients_of(full: torch.nn.Module, ranks: int, step: int = 0) -> dict[str, Tensor]:
    full.zero_grad()
    for rank in range(ranks):
        step_of(full, rank, step)
    found = {name: p.grad.clone() for name, p in full.named_parameters() if p.grad is not None}
    full.zero_grad()
    return found


def own(parameter: Tensor, value: Tensor) -> Tensor:
    shard = shard_of_parameter(parameter)
    return value if shard is None else shard.local_shard_of(value)


def assert_weights(model: torch.nn.Module, full: torch.nn.Module) -> None:
    for (name, one), (_, other) in zip(model.named_parameters(), full.named_parameters(), strict=True):
        assert_same_bits(full_weight(one), other.detach(), name)


def check_training(rank: Rank, kind: str) -> None:
    """Outputs, gradients, their norm and the weights of some steps are those of full tied weights."""
    full, sharded = Tied().to(rank.device), Tied().to(rank.device)
    shard_(sharded, rank.group, tied=True, gradient="sum")
    assert sharded.head.weight is sharded.table.weight
    assert sharded.head.parameter_shards == sharded.table.parameter_shards
    if rank.size > 1:
        assert "name=head.weight" in sharded.head.named_weight_shard
        assert "name=table.weight" in sharded.table.named_weight_shard
        if kind == "order":
            parallel.set_gather_order(sharded.modules())
    assert len(list(sharded.parameters())) == 3
    model: Any = sharded
    if kind == "compiled":
        torch._dynamo.reset()
        model = torch.compile(sharded, backend="aot_eager", fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.5) for m in (full, sharded)]
    for step in range(3):
        wanted = gradients_of(full, rank.size, step)
        assert_same_bits(step_of(model, rank.rank, step), step_of(full, rank.rank, step))
        if rank.size > 1:
            dist.all_reduce(sharded.head.bias.grad, group=rank.group)
        for name, parameter in sharded.named_parameters():
            assert_same_bits(parameter.grad, own(parameter, wanted[name]), name)
        for name, parameter in full.named_parameters():
            parameter.grad = wanted[name]
        norms = [f(m.parameters(), 1e9) for f, m in zip(CLIPPING, (full, sharded), strict=True)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_weights(sharded, full)
        with torch.no_grad():  # small integers again, for exact sums
            for one, other in zip(full.parameters(), sharded.parameters(), strict=True):
                for parameter in (one, other):
                    parameter.copy_(parameter.remainder(3).floor())


CLIPPING = (torch.nn.utils.clip_grad_norm_, parallel.clip_grad_norm_)


def places(ranks: Any) -> Any:
    return pytest.mark.parametrize(
        "place",
        [*ranks, pytest.param((2, "nccl"), marks=pytest.mark.gpus(2))],
        ids=lambda place: f"{place[0]}-{place[1]}",
    )


@pytest.mark.parametrize("kind", ["eager", "order"])
@places([(1, "gloo"), (2, "gloo"), (3, "gloo")])
def test_training(make_pool: Any, place: tuple[int, str], kind: str) -> None:
    make_pool(*place).run(check_training, kind)


@places([(2, "gloo"), *(pytest.param((ranks, "gloo"), marks=pytest.mark.long) for ranks in (1, 3))])
def test_compiled_training(make_pool: Any, place: tuple[int, str]) -> None:
    make_pool(*place).run(check_training, "compiled")


def check_copies(rank: Rank) -> None:
    """State dicts, copies, initial values and data parallelism; both names have the weight."""
    # Sums, as thirds of integers would be rounded before those of the two layers are added.
    full, sharded = Tied(), shard_(Tied(), rank.group, tied=True, gradient="sum")
    state = sharded.state_dict()
    assert isinstance(state["table.weight"], ShardTensor) and isinstance(state["head.weight"], ShardTensor)
    for name, value in parallel.full_state_dict(sharded).items():
        assert_same_bits(value, full.state_dict()[name], name)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    other = shard_(Tied(seed=50), rank.group, tied=True)
    other.load_state_dict(torch.load(buffer))
    assert_weights(other, full)
    other.load_state_dict(Tied(seed=20).state_dict())
    assert_weights(other, Tied(seed=20))
    twin = copy.deepcopy(sharded)
    assert twin.head.weight is twin.table.weight and shard_of_parameter(twin.head.weight) is not None
    step_of(twin, rank.rank)
    assert sharded.head.weight.grad is None
    wanted = gradients_of(full, rank.size)
    assert_same_bits(twin.head.weight.grad, own(twin.head.weight, wanted["table.weight"]))
    moved = twin.to(torch.float64)
    assert moved.head.weight is moved.table.weight and shard_of_parameter(moved.head.weight) is not None
    with parallel.initialize_full_params(other):
        assert other.head.weight is other.table.weight
        for i, parameter in enumerate(other.parameters()):
            parameter.data.copy_(integers(*parameter.shape, seed=i))
    assert_weights(other, full)
    wrapped = parallel.data_parallel(sharded)
    step_of(wrapped, rank.rank)
    for name, parameter in sharded.named_parameters():
        want = own(parameter, wanted[name] / rank.size)
        if shard_of_parameter(parameter) is not None:
            assert_same_bits(parameter.grad, want, name)
        torch.testing.assert_close(parameter.grad, want, msg=name)


@pytest.mark.parametrize("ranks", [2, 3])
def test_copies(make_pool: Any, ranks: int) -> None:
    make_pool(ranks).run(check_copies)


def check_checkpoint(rank: Rank, folder: str, save: bool) -> None:
    model = shard_(Tied(seed=0 if save else 50), rank.group, tied=True, gradient="sum")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    step_of(model, 0)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    moment = optimizer.state[model.head.weight]["momentum_buffer"]
    if save:
        dcp.save(state, checkpoint_id=folder)
        weights = [full_weight(model.head.weight), joined(model.head.weight, moment)]
        if rank.rank == 0:
            torch.save(weights, f"{folder}/expected.pt")
        return
    dcp.load(state, checkpoint_id=folder)
    optimizer.load_state_dict(state["optimizer"])
    moment = optimizer.state[model.head.weight]["momentum_buffer"]
    wanted = torch.load(f"{folder}/expected.pt")
    assert_same_bits(full_weight(model.table.weight), wanted[0])
    assert_same_bits(joined(model.head.weight, moment), wanted[1])


def joined(parameter: Tensor, value: Tensor) -> Tensor:
    shard = shard_of_parameter(parameter)
    if shard is None:
        return value
    return shard.shard.unpadded(ops.all_gather(value, shard.shard.ranks, shard.group.group_name))


def test_checkpoints_on_other_numbers_of_ranks(make_pool: Any, tmp_path: Path) -> None:
    make_pool(2).run(check_checkpoint, str(tmp_path), True)
    for ranks in (1, 2, 3):
        make_pool(ranks).run(check_checkpoint, str(tmp_path), False)


def check_recipes(rank: Rank, key: str) -> None:
    """Ranks have whole blocks of the head's format; the table has the same rows."""
    full, sharded = (Tied(RECIPES[key](), 288, 64, torch.bfloat16) for _ in range(2))
    shard_(sharded, rank.group, tied=True, gradient="sum")
    shard = sharded.table.parameter_shards["weight"]
    assert shard.shard.align == {"fp8_block": 128, "mxfp8": 32, "fp8_tensor": 1, "nvfp4": 16}[key]
    assert sharded.head.gathers_quantized
    for step in range(2):
        totals = {}
        for other in range(rank.size):
            torch.manual_seed(other)  # of stochastic rounding
            output = step_of(full, other, step)
            for name, parameter in full.named_parameters():
                totals[name] = totals.get(name, 0.0) + parameter.grad.float()  # type: ignore[union-attr]
            full.zero_grad()
            if other == rank.rank:
                torch.manual_seed(other)
                assert_same_bits(step_of(sharded, other, step), output)
        for name, parameter in sharded.named_parameters():
            if shard_of_parameter(parameter) is not None:
                want = own(parameter, totals[name])
                # The gradients of the two layers are rounded before they are added.
                torch.testing.assert_close(
                    parameter.grad.float(), want, rtol=2e-2, atol=2e-2 * want.abs().max().item()
                )
        sharded.zero_grad()
        with torch.no_grad():
            full.table.weight += 1
            sharded.table.weight += own(sharded.table.weight, torch.ones_like(full.table.weight))


@pytest.mark.parametrize("key", ["fp8_block", "fp8_tensor", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_recipes(make_pool: Any, ranks: int, key: str) -> None:
    make_pool(ranks).run(check_recipes, key)


class Other(torch.nn.Module):
    """A plain embedding, and a head with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(8, 4), tnn.Linear(4, 8)
        self.head.weight = self.table.weight


def check_refusals(rank: Rank) -> None:
    def refused(text: str, model: torch.nn.Module, **options: Any) -> None:
        before = list(model.parameters())
        with pytest.raises(ValueError, match="transformer_plugin::shard_: argument 'module'") as caught:
            shard_(model, rank.group, **options)
        assert text in str(caught.value), caught.value
        assert [id(p) for p in model.parameters()] == [id(p) for p in before]

    refused("one that ['table.weight', 'head.weight'] share. Pass tied=True", Tied())
    refused(
        "got ['head.weight'] of ['table.weight', 'head.weight'], which share one",
        Tied(),
        tied=True,
        filter=lambda name, _: name != "head",
    )
    refused("tied weights that are all packed and sharded, got ['table.weight'] of", Other(), tied=True)
    mixed = Tied()
    if rank.rank == 1:
        mixed.head.weight = torch.nn.Parameter(mixed.head.weight.detach().clone())
    refused("on rank 0 and", mixed, tied=True)
    left_out = shard_(Tied(), rank.group, filter=lambda name, _: name == "middle")
    assert left_out.head.weight is left_out.table.weight


def test_refusals(make_pool: Any) -> None:
    make_pool(2).run(check_refusals)


def on_meta() -> Tied:
    with torch.device("meta"):
        table, middle, head = tnn.Embedding(ROWS, 6), tnn.Linear(6, 6, bias=False), tnn.Linear(6, ROWS)
    model = Tied()
    model.table, model.middle, model.head = table, middle, head
    model.head.weight = model.table.weight
    return model


def check_converted(rank: Rank) -> None:
    """Conversions and loads that replace parameters keep the tie, of the model or of one layer after the other."""

    def to_empty(model: Any) -> None:
        model.to_empty(device=rank.device)

    def by_layers(model: Any) -> None:
        for layer in (model.head, model.middle, model.table):
            layer.to_empty(device=rank.device)

    def overwrite(model: Any) -> None:
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            model.to_empty(device=rank.device).to(torch.float64).to(torch.float32)
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)

    def tie_again(model: Any) -> None:
        model.to_empty(device=rank.device)
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
        model.head.weight = model.table.weight

    def one_layer(model: Any) -> None:
        model.to_empty(device=rank.device)
        for layer in (model.table, model.head):
            layer.to("meta")
            layer.to_empty(device=rank.device)

    def assign(model: Any) -> None:
        model.again = model.head  # the same module twice
        other = shard_(Tied(seed=50).to(rank.device), rank.group, tied=True)
        state = other.state_dict()
        model.load_state_dict(
            {**state, **{f"again.{n}": state[f"head.{n}"] for n in ("weight", "bias")}}, assign=True
        )
        del model.again

    full = Tied()
    wanted = gradients_of(full, rank.size)
    for convert in (to_empty, by_layers, overwrite, tie_again, one_layer, assign):
        sharded = shard_(on_meta(), rank.group, tied=True, gradient="sum")
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
        convert(sharded)
        assert sharded.head.weight is sharded.table.weight and not sharded.head.weight.is_meta
        sharded.load_state_dict(full.state_dict())
        step_of(sharded, rank.rank)
        assert_same_bits(sharded.head.weight.grad.cpu(), own(sharded.head.weight, wanted["table.weight"]))
        for name, parameter in sharded.named_parameters():
            assert_same_bits(full_weight(parameter).cpu(), full.get_parameter(name).detach(), name)
        with pytest.raises(ValueError, match=r"got the shard 'table.weight', which \w+ replaced"):
            optimizer.step()


def check_untied(rank: Rank) -> None:
    """A tied layer that gets a shard of its own, and one of a layer that is sharded in another way."""
    full, sharded = (Tied().to(rank.device) for _ in range(2))
    shard_(sharded, rank.group, tied=True, gradient="sum")
    full.head.weight = torch.nn.Parameter(full.table.weight.detach() + 1)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
    sharded.head.weight = torch.nn.Parameter(own(sharded.table.weight, full.head.weight.detach()))
    optimizer.step()  # the table still has its parameter
    wanted = gradients_of(full, rank.size)
    step_of(sharded, rank.rank)
    for name in ("table.weight", "head.weight"):
        assert_same_bits(sharded.get_parameter(name).grad, own(sharded.table.weight, wanted[name]), name)
    assert_weights(sharded, full)
    other = tnn.Linear(6, sharded.table.weight.shape[0] + 1, device=rank.device)
    with pytest.raises(
        ValueError, match=r"Linear: argument 'weight': expected a parameter of which this rank has all"
    ):
        other.weight = sharded.table.weight
    other = shard_(tnn.Linear(6, ROWS + 1, device=rank.device), rank.group)
    with pytest.raises(
        ValueError, match=r"Linear: argument 'weight': expected a plain tensor of sizes .*which is"
    ):
        other.weight = sharded.table.weight


@pytest.mark.parametrize("check", [check_converted, check_untied])
def test_replaced(pair: Any, check: Any) -> None:
    pair.run(check)
