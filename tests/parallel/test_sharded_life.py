"""Models with sharded weights from their initial values to their end: names, hooks, frozen layers, tables that are used
twice, padding, what is kept between a forward and its backward, and what is left of a model that is gone."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.sharded_models import RECIPES, Experts, dense, dense_batch, expert_batch
from transformer_plugin import nn as tnn
from transformer_plugin import ops, parallel, recipes
from transformer_plugin.parallel import full_weight, shard_
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits


def integers(*sizes: int, seed: int) -> Tensor:
    return torch.randint(-1, 2, sizes, generator=torch.Generator().manual_seed(seed)).float()


def fill(model: torch.nn.Module) -> torch.nn.Module:
    """With small integers, whose sums are exact."""
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(integers(*parameter.shape, seed=i))
    return model


def own(parameter: Tensor, value: Tensor) -> Tensor:
    shard = shard_of_parameter(parameter)
    return value if shard is None else shard.local_shard_of(value)


def added_over_ranks(rank: Rank, model: torch.nn.Module, backward: Any) -> dict[str, Tensor]:
    """The gradients of a model with full weights, each the sum over the ranks."""
    for other in range(rank.size):
        backward(model, other)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compare(model: torch.nn.Module, wanted: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if shard_of_parameter(parameter) is not None:
            assert (parameter.grad is None) == (name not in wanted), name
            if parameter.grad is not None:
                assert_same_bits(parameter.grad, own(parameter, wanted[name]), name)


def kinds() -> torch.nn.Module:
    """Every kind of layer, at several depths."""
    experts = tnn.GroupedMLP(5, 8, 6, True)
    block = torch.nn.ModuleDict({"norm": tnn.LayerNormLinear(8, 10), "deep": torch.nn.Sequential(experts)})
    return torch.nn.ModuleDict(
        {"table": tnn.Embedding(9, 8, padding_idx=7), "block": block, "head": tnn.Linear(8, 9)}
    )


NAMES = ("table", "block.norm", "block.deep.0.fc1", "block.deep.0.fc2", "head")


def check_names(rank: Rank) -> None:
    """Shards know their parameter; what 'filter' leaves out, and all that is no weight, is the object from before."""
    model = kinds()
    before = dict(model.named_parameters())
    shard_(model, rank.group, filter=lambda name, _: name != "head")
    if rank.size == 1:
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
        return
    for name, parameter in model.named_parameters():
        shard = shard_of_parameter(parameter)
        layer = name.removesuffix(".weight")
        assert (shard is not None) == (layer in NAMES[:-1] and name.endswith("weight")), name
        if shard is None:
            assert parameter is before[name] and parameter.shape == before[name].shape, name
            continue
        assert shard.name == name and shard.ranks == tuple(range(rank.size)) and shard.rank == rank.rank
        assert type(parameter) is torch.nn.Parameter
        share = -(-before[name].shape[0] // rank.size)
        assert parameter.shape == (share, *before[name].shape[1:])
        assert parameter.untyped_storage().nbytes() == parameter.nbytes  # and not of the full weight


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_names(make_pool: Any, ranks: int) -> None:
    make_pool(ranks).run(check_names)


def check_initial_values(rank: Rank) -> None:
    """Values that are drawn after shard_, as of models that are made without memory, are those of the full model."""
    torch.manual_seed(3)
    full = kinds()
    torch.manual_seed(4)
    for layer in full.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    with torch.device("meta"):
        model = kinds()
    shard_(model, rank.group)
    model.to_empty(device=rank.device)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    torch.manual_seed(4)
    for layer in model.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter.detach(), own(parameter, full.get_parameter(name).detach()), name)
    torch.manual_seed(5)
    with parallel.initialize_full_params(model):
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    torch.manual_seed(5)
    for parameter in full.parameters():
        torch.nn.init.normal_(parameter)
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter.detach(), own(parameter, full.get_parameter(name).detach()), name)


@pytest.mark.parametrize("ranks", [2, 3])
def test_initial_values(make_pool: Any, ranks: int) -> None:
    make_pool(ranks).run(check_initial_values)


def check_hooks(rank: Rank) -> None:
    """A hook of a weight runs once for each backward, after all uses have been added."""
    layers = torch.nn.Sequential(tnn.Linear(6, 6), tnn.Linear(6, 6, bias=False))
    model, full = (
        shard_(fill(layers), rank.group, gradient="sum"),
        fill(torch.nn.Sequential(tnn.Linear(6, 6), tnn.Linear(6, 6, bias=False))),
    )

    def backward(of: Any, other: int) -> None:
        x = integers(4, 6, seed=20 + other)
        of(of(of[0](x))).backward(integers(4, 6, seed=30 + other))

    wanted = added_over_ranks(rank, full, backward)
    seen: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.setdefault(name, []).append(p.grad.clone())
        )
    for step in range(2):
        backward(model, rank.rank)
        for name in ("0.weight", "1.weight"):
            assert len(seen[name]) == step + 1, (name, len(seen[name]))
            assert_same_bits(seen[name][-1], own(model.get_parameter(name), wanted[name]), name)
        compare(model, wanted)
        model.zero_grad()


def check_frozen(rank: Rank) -> None:
    """Any weights frozen, the first and the last of a model, too; the gradients of the others arrive."""

    def chain() -> torch.nn.Module:
        return fill(torch.nn.Sequential(*[tnn.Linear(5, 5, bias=False) for _ in range(3)]))

    def backward(of: Any, other: int) -> None:
        of(integers(4, 5, seed=40 + other)).backward(integers(4, 5, seed=50 + other))

    model = shard_(chain(), rank.group, gradient="sum")
    for frozen in itertools.product([False, True], repeat=3):
        full = chain()
        for of in (model, full):
            of.zero_grad()
            for layer, freezes in zip(of.children(), frozen, strict=True):
                layer.weight.requires_grad_(not freezes)  # type: ignore[union-attr,operator]
        if all(frozen):
            assert not model(integers(4, 5, seed=0)).requires_grad
            continue
        backward(model, rank.rank)
        compare(model, added_over_ranks(rank, full, backward))


class TwoHeads(torch.nn.Module):
    """A table of words that is also the weight of the output, for the next word and for the one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = tnn.Embedding(9, 6)
        self.mix = tnn.Linear(6, 6, bias=False)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        key, table = self.table.named_weight_shard, self.table.weight
        hidden = self.mix(self.table(words))
        first = ops.linear(hidden, table, None, weight_shard=key)
        second = ops.linear(self.mix(hidden + self.table(words + 1)), table, None, weight_shard=key)
        return first, second


def check_table(rank: Rank) -> None:
    def backward(of: Any, other: int) -> None:
        words = torch.randint(8, (7,), generator=torch.Generator().manual_seed(other))
        first, second = of(words)
        torch.autograd.backward(
            [first, second], [integers(7, 9, seed=60 + other), integers(7, 9, seed=70 + other)]
        )

    model = shard_(fill(TwoHeads()), rank.group, gradient="sum")
    wanted = added_over_ranks(rank, fill(TwoHeads()), backward)
    for _ in range(3):
        model.zero_grad()
        backward(model, rank.rank)
        compare(model, wanted)


def check_padding(rank: Rank) -> None:
    """Rows that no rank has stay zero, whatever an optimizer does, and count in no norm."""
    model = shard_(torch.nn.Sequential(tnn.Linear(5, 7), tnn.Linear(7, 1)), rank.group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(3):
        optimizer.zero_grad()
        model(integers(4, 5, seed=80 + step + rank.rank)).square().sum().backward()
        optimizer.step()
    for parameter in model.parameters():
        shard = shard_of_parameter(parameter)
        if shard is None:
            continue
        for tensor in (parameter.detach(), parameter.grad, *optimizer.state[parameter].values()):
            if isinstance(tensor, Tensor) and tensor.shape == parameter.shape:
                assert (tensor[shard.valid_rows :] == 0).all()
    assert shard_of_parameter(model[1].weight).valid_rows == (1 if rank.rank == 0 else 0)  # type: ignore[index,union-attr]


def check_two_models(rank: Rank) -> None:
    """Two models of one group, used in turns; of one that is deleted nothing is left."""
    torch.manual_seed(0)
    models: list[Any] = [
        shard_(dense(RECIPES[key](), rank.device), rank.group) for key in ("bf16", "fp8_tensor")
    ]
    batch = dense_batch(rank.rank, 0, rank.device).arguments[0]
    want = [model(batch).detach() for model in models]
    before = ops.count_gathers(rank.group_name)
    for _ in range(3):
        outputs = [model[0](batch) for model in models]
        for i in (1, 2):
            outputs = [model[i](output) for model, output in zip(models, outputs, strict=True)]
        for output, expected in zip(outputs, want, strict=True):
            assert_same_bits(output.detach(), expected)
            output.float().sum().backward()
    refs = [weakref.ref(p) for p in models[1].parameters()]
    refs += [weakref.ref(layer) for layer in models[1].modules()]
    refs += [weakref.ref(t) for layer in models[1] for t in layer.quantized_weight.tensors]
    del models[1], outputs, output, expected
    gc.collect()
    assert not [ref() for ref in refs if ref() is not None]
    assert_same_bits(models[0](batch).detach(), want[0])
    ops.clear_gathers(rank.group_name)
    made = [now - then for now, then in zip(ops.count_gathers(rank.group_name), before, strict=True)]
    assert made[1] <= made[2] + made[3] <= made[1] + 2  # those before may have been in flight


def check_kept(rank: Rank) -> None:
    """Between a forward and its backward a layer keeps its shard, and no full weight in any format."""
    for key in ("bf16", "fp8_block", "nvfp4"):
        models: list[tuple[Any, Any]] = [
            (shard_(dense(RECIPES[key](), rank.device), rank.group), dense_batch(rank.rank, 0, rank.device)),
            (
                shard_(Experts(RECIPES[key](), rank.device, 5), rank.group),
                expert_batch(rank.rank, 0, rank.device, 5),
            ),
        ]
        for model, batch in models:
            saved: list[Tensor] = []

            def pack(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
                saved.append(tensor)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                model(batch.arguments[0][: 48 if len(batch.arguments) == 1 else None], *batch.arguments[1:])
            known = [(p, shard_of_parameter(p)) for p in model.parameters()]
            full = {shard.shard.rows * p[0].numel() for p, shard in known if shard is not None}
            full |= {elements // 2 for elements in full if key == "nvfp4"}
            own_memory = {p.untyped_storage().data_ptr() for p in model.parameters()}
            for layer in model.modules():
                if getattr(layer, "quantized_weight", None) is not None:
                    own_memory |= {t.untyped_storage().data_ptr() for t in layer.quantized_weight.tensors}
            others = [t for t in saved if t.untyped_storage().data_ptr() not in own_memory]
            assert len(others) < len(saved)
            assert not [t.shape for t in others if t.numel() in full and 48 not in t.shape], key


CHECKS = [check_hooks, check_frozen, check_table, check_padding, check_two_models, check_kept]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_uses(make_pool: Any, ranks: int, check: Any) -> None:
    pool: RankPool = make_pool(ranks)
    pool.run(check)


def check_announced(rank: Rank) -> None:
    """Changes that torch does not count: quantized shards follow quantize_weights()."""
    for key in ("fp8_tensor", "mxfp8"):
        torch.manual_seed(0)
        full, sharded = (dense(RECIPES[key](), rank.device) for _ in range(2))
        sharded.load_state_dict(full.state_dict())
        shard_(sharded, rank.group)
        x = dense_batch(0, 0, rank.device).arguments[0]
        sharded(x)
        sharded(x)
        for name, parameter in sharded.named_parameters():
            parameter.data.mul_(2.0)
            full.get_parameter(name).data.mul_(2.0)
        ops.invalidate_prefetched()
        for layer in sharded.children():
            layer.quantize_weights()  # type: ignore[operator]
        assert_same_bits(sharded(x).detach(), full(x).detach())
        assert_same_bits(full_weight(sharded[0].weight), full[0].weight.detach())  # type: ignore[index]


def test_announced_changes(make_pool: Any) -> None:
    make_pool(2).run(check_announced)


def check_refusals(rank: Rank) -> None:
    """What cannot be sharded is named, and nothing is changed then, of any layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.utils.parametrizations import weight_norm

    mesh = init_device_mesh("cpu", (rank.size,))
    wrapped = tnn.Linear(8, 8)
    fully_shard(wrapped, mesh=mesh)
    dispatch = tnn.DispatchConfig(max_tokens=4)
    experts, dtensors = (
        tnn.MoE(8, 16, 4, 2, group=rank.group, dispatch=dispatch, dtensor=d) for d in (False, True)
    )

    def last(name: str, _: Any) -> bool:
        return name == "1"

    cases: list[tuple[torch.nn.Module, dict[str, Any], str]] = [
        (
            wrapped,
            {},
            "expected plain parameters, got '1.weight', a DTensor, which another wrapper has sharded",
        ),
        (dtensors, {}, "a ShardedParameter, which another wrapper"),
        (
            experts,
            {},
            f"the ranks {list(range(rank.size))}, which hold different experts of '1.experts.fc1.weight'",
        ),
        (weight_norm(tnn.Linear(8, 8)), {}, "'1.weight', which is computed"),
        (
            tnn.Linear(128, 128, recipe=recipes.Float8BlockScaling()),
            {"format": "mxfp8", "filter": last},
            "for '1', whose recipe quantizes",
        ),
        (tnn.Linear(8, 8), {"format": "fp8_tensor"}, "argument 'format'"),
        (tnn.Linear(8, 8), {"prefetch": -1}, "argument 'prefetch': expected at least 0, got -1"),
        (tnn.Linear(8, 8), {"gradient_dtype": torch.float16}, "expected None or torch.bfloat16"),
    ]
    for module, options, text in cases:
        model = torch.nn.Sequential(tnn.Linear(8, 8), module)
        before = {name: id(p) for name, p in model.named_parameters()}
        with pytest.raises(ValueError, match="transformer_plugin::shard_: argument") as caught:
            shard_(model, rank.group, **options)
        assert text in str(caught.value), caught.value
        assert before == {name: id(p) for name, p in model.named_parameters()}, text


def test_refusals(make_pool: Any) -> None:
    make_pool(2).run(check_refusals)
