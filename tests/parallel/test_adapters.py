"""Adapters of PEFT on layers of which each rank has a shard or slices: right, or refused by name."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

from tests.clients.imported import peft
from tests.parallel.replaced_layers import drawn
from tests.parallel.replacements import close
from transformer_plugin import nn as tnn
from transformer_plugin import parallel
from transformer_plugin.recipes import Float8BlockScaling
from transformer_plugin.testing.distributed import Rank, RankPool

#: Rows that two ranks do not share evenly.
V, H, F = 9, 16, 7


class Model(torch.nn.Module):
    """Of torch's layers, or the same of this package's, with the same values."""

    def __init__(self, nn: Any = torch.nn, column: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(V, H)
        self.up = nn.Linear(H, F) if column is None else tnn.Linear(H, F - 1, **column)
        self.down = nn.Linear(F, H)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(silu(self.up(self.table(tokens))))


def lora(**options: Any) -> Any:
    return peft().LoraConfig(r=2, lora_alpha=3, **{"target_modules": ["table", "up", "down"], **options})


def fill(model: Any, seed: int) -> None:
    """Gives adapters values that are the same on all ranks."""
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_" in name or "ia3_" in name:
                parameter.copy_(0.3 * drawn(*parameter.shape, seed=seed + i))


#: How a model that is sharded gets adapters: before, or afterwards.
ORDERS: dict[str, Callable[[Rank, Any], Any]] = {
    "sharded first": lambda rank, config: peft().get_peft_model(sharded(rank), config),
    "adapted first": lambda rank, config: parallel.shard_(
        peft().get_peft_model(Model(tnn).to(rank.device), config), rank.group, gradient="sum"
    ),
}


def sharded(rank: Rank) -> Any:
    return parallel.shard_(Model(tnn).to(rank.device), rank.group, gradient="sum")


def close_enough(one: Tensor, other: Any, what: str) -> None:
    close(one, other, "sharded", what)


def inputs(rank: Rank) -> list[Tensor]:
    return [(torch.arange(6) * 5 + each) % V for each in range(rank.size)]


def check_step(adapted: Any, wanted: Any, rank: Rank) -> None:
    """Outputs and gradients, and a step."""
    for model in (adapted, wanted):
        model.zero_grad()
    close_enough(adapted(inputs(rank)[rank.rank].to(rank.device)), wanted(inputs(rank)[rank.rank]), "output")
    adapted(inputs(rank)[rank.rank].to(rank.device)).square().sum().backward()
    torch.stack([wanted(x).square().sum() for x in inputs(rank)]).sum().backward()
    found = {n: p for n, p in adapted.named_parameters() if p.grad is not None}
    expected = {n: p for n, p in wanted.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys() and len(found) >= 2
    for name, parameter in found.items():
        dist.all_reduce(parameter.grad, group=rank.group)
        close_enough(parameter.grad, expected[name].grad, name)
    for parameters in (found, expected):
        torch.optim.SGD(parameters.values(), lr=0.01).step()


def check_right(rank: Rank, order: str, config: Callable[[], Any]) -> None:
    """Everything that PEFT does with its adapters."""
    x, on_device = inputs(rank)[rank.rank], inputs(rank)[rank.rank].to(rank.device)
    adapted = ORDERS[order](rank, config())
    wanted = peft().get_peft_model(Model(), config())
    for model in (adapted, wanted):
        model.add_adapter("other", config())
        fill(model, 5)
    for name in ("other", "default"):
        adapted.set_adapter(name), wanted.set_adapter(name)
        check_step(adapted, wanted, rank)
    with adapted.disable_adapter():
        close_enough(adapted(on_device), Model()(x), "disabled")
    for safe in (False, True):
        for act in ("merge_adapter", "unmerge_adapter"):
            options = {"safe_merge": safe} if act == "merge_adapter" else {}
            for model in (adapted, wanted):
                getattr(model, act)(**options)
            close_enough(adapted(on_device), wanted(x), act)
            for name, value in parallel.full_state_dict(adapted).items():
                close_enough(value, wanted.state_dict()[name], f"{act} {name}")
    with tempfile.TemporaryDirectory() as folder:
        adapted.save_pretrained(folder)
        close_enough(peft().PeftModel.from_pretrained(sharded(rank), folder)(on_device), wanted(x), "loaded")
        close_enough(peft().PeftModel.from_pretrained(Model(), folder)(x), wanted(x), "loaded elsewhere")
    merged, wanted = adapted.merge_and_unload(), wanted.merge_and_unload()
    close_enough(merged(on_device), wanted(x), "merged")
    assert merged.up.weight.shape == (4, H)
    for name, value in parallel.full_state_dict(merged).items():
        close_enough(value, wanted.state_dict()[name], name)


def check_both(rank: Rank) -> None:
    for order in ORDERS:
        check_right(rank, order, lora)
        linears = {"target_modules": ["up", "down"], "feedforward_modules": ["down"]}
        check_right(rank, order, lambda: peft().IA3Config(**linears))  # noqa: B023


def test_sharded(pair: RankPool) -> None:
    """LoRA and IA3 of modules, on layers and on a table."""
    pair.run(check_both)


def check_merged_and_quantized(rank: Rank) -> None:
    """The quantized copy, which travels, follows a merge. Of a tied weight the other layer has it, too."""
    torch.manual_seed(0)
    layer, full = (tnn.Linear(128, 256, bias=False, recipe=Float8BlockScaling()) for _ in range(2))
    full.load_state_dict(layer.state_dict())
    full.to(rank.device)
    layer = parallel.shard_(torch.nn.Sequential(layer.to(rank.device)), rank.group)
    adapted = peft().get_peft_model(layer, lora(target_modules=["0"]))
    x = drawn(16, 128, seed=rank.rank).to(rank.device)
    fill(adapted, 5)
    adapted(x)
    a, b = (getattr(adapted.base_model.model[0], f"lora_{each}")["default"].weight for each in "AB")
    adapted.merge_adapter()
    with torch.no_grad():
        full.weight += 1.5 * b @ a
    torch.testing.assert_close(adapted(x), full(x), rtol=1e-3, atol=1e-3)
    table, head = tnn.Embedding(V, H), tnn.Linear(H, V, bias=False)
    head.weight = table.weight
    full = table.weight.detach().clone()
    tied = parallel.shard_(torch.nn.Sequential(table, head).to(rank.device), rank.group, tied=True)
    adapted = peft().get_peft_model(tied, lora(target_modules=["1"]))
    fill(adapted, 5)
    a, b = (getattr(adapted.base_model.model[1], f"lora_{each}")["default"].weight.cpu() for each in "AB")
    merged = adapted.merge_and_unload()
    assert merged[0].weight is merged[1].weight
    close_enough(parallel.full_weight(merged[0].weight), full + 1.5 * b @ a, "tied")


def test_merged_and_quantized(pair: RankPool) -> None:
    pair.run(check_merged_and_quantized)


def moe(rank: Rank, dtensor: bool) -> torch.nn.Module:
    dispatch = tnn.DispatchConfig(max_tokens=8)
    return tnn.MoE(H, F, 4, 2, group=rank.group, dispatch=dispatch, dtensor=dtensor, device=rank.device)


#: A layer, and what an error says of it.
_ALL = "expected a parameter of which this rank has all elements, as the adapter"


def check_refusals(rank: Rank) -> None:
    def refused(make: Callable[[], torch.nn.Module], config: Any, text: str, reads: str = "Linear") -> None:
        with pytest.raises(ValueError, match=f"argument 'weight': {_ALL} {reads} reads it, got {text}"):
            peft().get_peft_model(make(), config)
        if make is shards:
            with pytest.raises(
                ValueError, match=rf"{_ALL} {reads} reads it, got one of sizes .* shard_ would"
            ):
                parallel.shard_(peft().get_peft_model(Model(tnn).to(rank.device), config), rank.group)

    def shards() -> Any:
        return sharded(rank)

    up = r"'up.weight', a shard of sizes \[4, 16\] over the ranks \[0, 1\]"
    refused(shards, lora(target_modules=["up"], use_dora=True), f"{up}, with DoraLinearVariant")
    config = lora(target_modules=[], target_parameters=["up.weight"])
    refused(shards, config, up, "ParamWrapper")
    refused(shards, peft().LoHaConfig(target_modules=["up"]), up)
    tokens = peft().TrainableTokensConfig(target_modules=["table"], token_indices=[1])
    refused(shards, tokens, "'table.weight', a shard", "TrainableTokensLayer")
    with pytest.raises(
        ValueError, match=f"{up}, with init_lora_weights='pissa'. Make the adapters before shard_"
    ):
        peft().get_peft_model(sharded(rank), lora(target_modules=["up"], init_lora_weights="pissa"))
    for sequence_parallel in (False, True):
        options = {"parallel_mode": "column", "tp_group": rank.group, "sequence_parallel": sequence_parallel}
        slices = r"a shard of sizes \[3, 16\] over the ranks \[0, 1\]\. Leave tensor-parallel layers out"
        for config in (lora(), peft().IA3Config(target_modules=["up"], feedforward_modules=[])):
            refused(lambda o=options: Model(tnn, o).to(rank.device), config, slices)  # type: ignore[misc]
    for dtensor in (False, True):
        config = lora(target_modules=[], target_parameters=["0.experts.fc1.weight"])
        text = r"experts that are sharded over the ranks \[0, 1\]\. Leave the experts out"
        refused(lambda d=dtensor: torch.nn.Sequential(moe(rank, d)), config, text, "ParamWrapper")  # type: ignore[misc]
    adapted = peft().get_peft_model(sharded(rank), lora(target_modules=["up"], modules_to_save=["down"]))
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(
            ValueError, match=r"expected a tensor whose elements are all on this rank.*full_state_dict"
        ):
            adapted.save_pretrained(folder)
        fill(adapted, 5)
        adapted.save_pretrained(folder, state_dict=parallel.full_state_dict(adapted))
        loaded = peft().PeftModel.from_pretrained(Model(), folder)
    x = inputs(rank)[rank.rank]
    close_enough(adapted(x.to(rank.device)), loaded(x), "saved modules")


def test_refusals(pair: RankPool) -> None:
    pair.run(check_refusals)
