"""Every way in which PyTorch replaces a parameter, on every layer: right afterwards, or refused by name.

A row is a layer (``replaced_layers.CASES``), a column a way (``replacements.WAYS``). Right means: outputs, gradients,
their norm, state dicts, checkpoints, the next step of an optimizer and Muon's are those of full parameters in plain
PyTorch.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.nn import Parameter

from tests.parallel.replaced_layers import CASES, FP8, Case, T, drawn, own
from tests.parallel.replaced_on_grid import ON_GRID
from tests.parallel.replacements import (
    COMPUTING,
    SHARDS,
    WAYS,
    close,
    full_state,
    layer_of,
    local,
    write_values,
)
from transformer_plugin import nn as tnn
from transformer_plugin import optim, parallel
from transformer_plugin.nn._shardable import ShardableModule
from transformer_plugin.testing.distributed import Rank, RankPool


class Reference:
    """The layer with full parameters, in plain PyTorch."""

    def __init__(self, case: Case, state: dict[str, Tensor], rank: Rank) -> None:
        self.case, self.rank = case, rank
        self.parameters = {name: value.requires_grad_() for name, value in state.items()}
        self.data, self.slices = case.places(rank)
        self.inputs = case.draw(T * self.data.size).chunk(self.data.size)

    def outputs(self) -> list[Tensor]:
        return [self.case.compute(self.parameters, x) for x in self.inputs]

    def own(self, outputs: list[Tensor]) -> Tensor:
        return own(outputs[self.data.rank], self.case.output_dim, self.slices)

    def input(self) -> Tensor:
        return own(self.inputs[self.data.rank], self.case.input_dim, self.slices).to(self.rank.device)


def backward(model: Any, reference: Reference) -> None:
    """Outputs and gradients of both, and their norms, which must be the same."""
    case, rank = reference.case, reference.rank
    model.zero_grad()
    wanted = reference.outputs()
    factors = [drawn(*out.shape, seed=2 + i) for i, out in enumerate(wanted)]
    for parameter in reference.parameters.values():
        parameter.grad = None
    sum((out * f).sum() for out, f in zip(wanted, factors, strict=True)).backward()  # type: ignore[union-attr]
    output = model(reference.input())
    close(output, reference.own(wanted), case.kind, "output")
    (output * reference.own(factors).to(output)).sum().backward()
    for name, parameter in model.named_parameters():
        is_full = parameter.shape == reference.parameters[name].shape and not hasattr(parameter, "to_local")
        if is_full and reference.data.size > 1:
            dist.all_reduce(parameter.grad, group=case.data_group(rank))
    weight = layer_of(model, case).get_parameter(case.name)
    want = case.shard_of(reference.parameters[case.full_name].grad, rank)  # type: ignore[arg-type]
    close(local(weight.grad), want, case.kind, "gradient")
    norm = parallel.clip_grad_norm_(model.parameters(), 1e9)
    wanted_norm = torch.stack([p.grad.norm() for p in reference.parameters.values()]).norm()  # type: ignore[union-attr]
    close(norm.float(), wanted_norm, case.kind, "norm")


def step_muon(model: Any, reference: Reference) -> None:
    case = reference.case
    weight, full = layer_of(model, case).get_parameter(case.name), reference.parameters[case.full_name]
    if full.dim() < 2 or case.is_quantized:
        return
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.0}
    before = full.detach().clone()
    matrices = [full.detach().clone()] if full.dim() == 2 else list(full.detach().clone())
    gradients = [full.grad] if full.dim() == 2 else list(full.grad)  # type: ignore[arg-type]
    for matrix, gradient in zip(matrices, gradients, strict=True):
        matrix.requires_grad_().grad = gradient
    torch.optim.Muon(matrices, **options).step()
    if full.dim() == 2 and case.kind in SHARDS:
        with pytest.raises(ValueError, match=r"Muon: argument 'params': expected full parameters, got"):
            torch.optim.Muon([weight], **options).step()
    optim.Muon([weight], **options).step()
    with torch.no_grad():
        full.copy_(matrices[0] if full.dim() == 2 else torch.stack([m.detach() for m in matrices]))
    change, wanted = local(weight).cpu() - case.shard_of(before, reference.rank), full.detach() - before
    wanted = case.shard_of(wanted, reference.rank)
    assert (change - wanted).norm() < 0.05 * wanted.norm().clamp(min=1e-3), "Muon"
    with torch.no_grad():  # the same values again, which bfloat16 has rounded
        write_values(layer_of(model, case), case.name, case.shard_of(full.detach(), reference.rank))


def step_adam(model: Any, reference: Reference) -> None:
    parameters = list(model.parameters())
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
    if reference.case.is_quantized:
        master = optim.MasterWeights(parameters, lambda weights: torch.optim.AdamW(weights, **options))
        master.step()
    else:
        fused = reference.case.kind != "dtensor"
        torch.optim.AdamW(parameters, fused=fused, **options).step()
    torch.optim.AdamW(list(reference.parameters.values()), **options).step()


def check_right(model: Any, reference: Reference) -> dict[str, Any]:
    """Everything that reads the parameters; returns a state dict."""
    backward(model, reference)
    step_muon(model, reference)
    step_adam(model, reference)
    backward(model, reference)
    for name, value in full_state(model).items():
        close(value, reference.parameters[name], reference.case.kind, f"state_dict {name}")
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    # Bytes load into quantized parameters.
    return {name: local(value) if hasattr(value, "format") else value for name, value in state.items()}


def check_old_optimizer(optimizer: Any, old: Any, layer: Any, case: Case) -> None:
    """The optimizer has a parameter that is not the layer's any more."""
    if case.kind not in SHARDS or layer.get_parameter(case.name) is old:
        optimizer.step()
        return
    with pytest.raises(ValueError, match=r"which \w+ replaced. Make the optimizer after"):
        optimizer.step()


def check_computed(model: Any, reference: Reference, name: str) -> None:
    """A weight that is computed from others, in a layer that is not divided: its output."""
    case, holder = reference.case, torch.nn.Module()
    setattr(holder, case.name, Parameter(reference.parameters[case.full_name].detach().clone()))
    torch.manual_seed(3)
    COMPUTING[name](holder, case.name)
    for buffer_name, buffer in holder.named_buffers():  # a power iteration begins at random, by device
        value = layer_of(model, case).get_buffer(buffer_name)
        buffer.copy_(value.full_tensor() if hasattr(value, "full_tensor") else value)
    for hook in holder._forward_pre_hooks.values():
        hook(holder, ())
    reference.parameters[case.full_name] = getattr(holder, case.name)
    close(model(reference.input()), reference.own(reference.outputs()), case.kind, "output")


def check_cell(rank: Rank, case: Case, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the state dict afterwards, and what it is of full parameters."""
    way, refusals = WAYS[name]
    model = case.make(rank)
    layer, state = layer_of(model, case), full_state(model)
    old, optimizer = getattr(layer, case.name), torch.optim.SGD(model.parameters(), lr=0.0)
    new = 0.3 * drawn(*state[case.full_name].shape, seed=9)
    value, text = case.shard_of(new, rank), refusals.get(case.kind)
    torch.manual_seed(3)
    try:
        after = way(model, case, value) or model
    except (ValueError, TypeError, RuntimeError) as error:
        if text is None or not re.search(text, str(error)):
            raise
        after = model
        layer._buffers.pop(f"{case.name}_mask", None)  # which torch's pruning leaves there after an error
        assert getattr(layer, case.name) is old
    else:
        assert text is None, f"expected an error: {text}"
    if text is None and name in COMPUTING:
        state[case.full_name] = new
        check_computed(model, Reference(case, state, rank), name)
        return {}, {}
    own_now = local(layer_of(after, case).get_parameter(case.name)).cpu()
    if text is None or not torch.equal(own_now, case.shard_of(state[case.full_name], rank)):
        close(own_now, value, case.kind, "values")
        state[case.full_name] = new
    if case.is_quantized:
        state[case.full_name] = full_state(after)[case.full_name]
    if (
        after is model and name != "_parameters"
    ):  # which PyTorch's functions undo, or follow by a registration
        check_old_optimizer(optimizer, old, layer, case)
    reference = Reference(case, state, rank)
    saved = check_right(after, reference)
    return saved, {n: p.detach() for n, p in reference.parameters.items()}


def check_layer(rank: Rank, key: str, folder: str, ways: Iterable[str] = WAYS) -> list[str]:
    """These ways for a layer. Returns what is wrong."""
    case, wrong = {**CASES, **ON_GRID}[key], []
    saved: dict[str, Any] = {}
    wanted: dict[str, Tensor] = {}
    for name in ways:
        try:
            state, values = check_cell(rank, case, name)
            saved.update({f"{name}/{n}": each for n, each in state.items()})
            wanted.update({f"{name}/{n}": each for n, each in values.items()})
        except (Exception, pytest.fail.Exception):
            wrong.append(f"{key}, {name}: {traceback.format_exc(limit=-3)}")
    found: list[Any] = [None] * rank.size
    dist.all_gather_object(found, wrong)
    if any(found):
        return wrong
    dcp.save(saved, checkpoint_id=folder)
    loaded = {name: torch.zeros_like(value) for name, value in wanted.items()}
    dcp.load(loaded, checkpoint_id=folder)
    for name, value in loaded.items():
        close(value, wanted[name], case.kind, f"checkpoint {name}")
    return []


@pytest.mark.parametrize("key", CASES)
def test_replaced(pair: RankPool, key: str, tmp_path: Path) -> None:
    wrong = pair.run(check_layer, key, str(tmp_path))
    assert not any(wrong), "\n\n".join(text for each in wrong for text in each)


#: Of layers that are sharded and tensor parallel: one way for each function that replaces parameters, or computes them.
ON_GRID_WAYS = (
    "assign",
    "swap_tensors",
    "_parameters",
    "load_with_assign",
    "to_empty",
    "to_swaps",
    "deepcopy",
)
ON_GRID_WAYS += ("adapter", "tie_and_untie", "weight_norm", "spectral_norm_hook", "assign_full")


@pytest.mark.parametrize("key", ON_GRID)
def test_on_grid(four: RankPool, key: str, tmp_path: Path) -> None:
    wrong = four.run(check_layer, key, str(tmp_path), ON_GRID_WAYS)
    assert not any(wrong), "\n\n".join(text for each in wrong for text in each)


def check_quantized_shards(rank: Rank) -> None:
    """Quantized copies, which travel, follow another shard, and fused steps of its optimizer, which count no change."""
    torch.manual_seed(0)
    layer, full = (tnn.Linear(128, 256, bias=False, recipe=FP8, device=rank.device) for _ in range(2))
    parallel.shard_(layer, rank.group)
    x = drawn(16, 128, seed=rank.rank).to(rank.device)
    layer(x)
    layer.weight = Parameter(2 * layer.weight.detach())
    for step in range(2):
        layer(x).square().sum().backward()
        torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True).step()
        with torch.no_grad():
            full.weight.copy_(parallel.full_weight(layer.weight))
        torch.testing.assert_close(layer(x), full(x), rtol=1e-3, atol=1e-3, msg=str(step))


def test_quantized_shards(pair: RankPool) -> None:
    pair.run(check_quantized_shards)


def test_all_layers_are_in_the_table() -> None:
    """Each layer with tensor-parallel or sharded weights, in the kinds that it can have."""
    layers = {each for each in vars(tnn).values() if inspect.isclass(each)}
    sliced = {each for each in layers if "tp_group" in inspect.signature(each).parameters}
    sharded = {each for each in layers if issubclass(each, ShardableModule)}
    assert {each.__name__ for each in sliced | sharded} <= {case.of.__name__ for case in CASES.values()}
    for kind, classes in (("sharded", sharded), ("sliced", sliced & sharded)):
        found = {case.of.__name__ for case in CASES.values() if case.kind == kind}
        assert {each.__name__ for each in classes} <= found, kind
