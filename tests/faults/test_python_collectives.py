"""A rank that is lost before a function of the package waits for it: the others name it, and the function, in time
(Gloo)."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import transformer_plugin
from tests.faults.test_expert_parallel_faults import Outcome, leave, observe
from transformer_plugin import nn as tnn
from transformer_plugin import ops, recipes
from transformer_plugin.optim import Muon
from transformer_plugin.parallel import (
    clip_grad_norm_,
    data_parallel,
    quantize_all_gather,
    shard_,
)
from transformer_plugin.parallel._collectives import torch_collectives
from transformer_plugin.parallel.styles import NormColwiseParallel
from transformer_plugin.testing.distributed import Rank, RankPool

VICTIM = 1
#: Of the groups, which ranks also make within it, and the longest time of the remaining ranks.
TIMEOUT = 5.0
PROMISE = TIMEOUT + 5.0
Action = Callable[[], Any]


def with_gradients(model: torch.nn.Module) -> torch.nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def mesh_of(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def clip(norm: float, kind: str) -> Callable[[Any], Action]:
    def prepare(group: Any) -> Action:
        model: Any = tnn.Linear(6, 6)
        if kind == "shards":
            model = shard_(model, group)
        elif kind == "slices":
            model = tnn.Linear(6, 6, parallel_mode="column", tp_group=group)
        else:
            fully_shard(model, mesh=mesh_of(group))
        with_gradients(model)
        return lambda: clip_grad_norm_(model, 1.0, norm)

    return prepare


def delayed(make: Callable[[Any], Any], *given: Any, compiled: bool = False) -> Callable[[Any], Action]:
    """A forward that begins with the maximum of amaxes over a group."""

    def prepare(group: Any) -> Action:
        layer = make(recipes.DelayedScaling(amax_group=group))
        input = torch.ones(4, 8)
        call: Any = torch.compile(layer, backend="aot_eager") if compiled else layer
        call(input, *given)
        return lambda: call(input, *given)

    return prepare


def reduce_amax(group: Any) -> Action:
    model = tnn.Linear(8, 8, recipe=recipes.DelayedScaling())
    return lambda: tnn.reduce_amax(model, group)


def update_scale(group: Any) -> Action:
    state = torch.zeros(4, 3), torch.ones(3), torch.ones(3)
    return lambda: ops.update_delayed_scale_(*state, ["fp8_tensor"], group=group.group_name)


def gather_quantized(group: Any) -> Action:
    """FSDP2 gathers a weight whose scale is that of all ranks."""
    model = torch.nn.Sequential(tnn.Linear(16, 12, recipe=recipes.Float8CurrentScaling()))
    quantize_all_gather(model)
    fully_shard(model, mesh=mesh_of(group))
    return lambda: model(torch.ones(4, 16))


def redistribute(group: Any) -> Action:
    """A layer that gathers the rows which its norm has computed."""
    layer = tnn.LayerNormLinear(8, 6)
    parallelize_module(layer, mesh_of(group), NormColwiseParallel(input_layouts=Shard(0)))
    return lambda: layer(torch.ones(2, 8))


def styled(group: Any) -> Action:
    layer = tnn.LayerNormLinear(8, 6)
    return lambda: parallelize_module(layer, mesh_of(group), NormColwiseParallel())


def muon(group: Any) -> Action:
    model = shard_(tnn.Linear(6, 6, bias=False), group)
    optimizer = Muon(with_gradients(model).parameters(), lr=0.1)
    return optimizer.step


def shard(group: Any) -> Action:
    model = tnn.Linear(6, 6)
    return lambda: shard_(model, group)


def replicate(group: Any) -> Action:
    model = shard_(tnn.Linear(6, 6), group)
    return lambda: data_parallel(model, process_group=group)


def grouped(recipe: Any) -> torch.nn.Module:
    return tnn.GroupedLinear(2, 8, 8, recipe=recipe)


def linear(recipe: Any) -> torch.nn.Module:
    return tnn.Linear(8, 8, recipe=recipe)


#: What is prepared on all ranks, and then called by those that are left; the op and the phase of their error.
AMAX = ("update_delayed_scale_", "amax")
ACTIONS: dict[str, tuple[Callable[[Any], Action], tuple[str, str]]] = {
    "reduce_amax": (reduce_amax, ("reduce_amax", "amaxes")),
    "update_delayed_scale_": (update_scale, AMAX),
    "delayed Linear": (delayed(linear), AMAX),
    "delayed Linear, compiled": (delayed(linear, compiled=True), AMAX),
    "delayed GroupedLinear": (delayed(grouped, [1, 3]), AMAX),
    "clip_grad_norm_ of shards": (clip(2.0, "shards"), ("clip_grad_norm_", "norms")),
    "clip_grad_norm_ of slices": (clip(float("inf"), "slices"), ("clip_grad_norm_", "norms")),
    "clip_grad_norm_ of DTensors": (clip(2.0, "DTensors"), ("clip_grad_norm_", "norms")),
    "quantize_all_gather": (gather_quantized, ("quantize_all_gather", "amaxes")),
    "DTensors": (redistribute, ("redistribute", "S(0) to R")),
    "NormColwiseParallel": (styled, ("NormColwiseParallel", "parameters")),
    "Muon": (muon, ("all_gather", "input")),
    "shard_": (shard, ("shard_", "weights")),
    "data_parallel": (replicate, ("data_parallel", "places")),
}
#: Those that are also played with a rank that stops, whose connections stay.
STOPS = ("delayed Linear", "clip_grad_norm_ of shards", "DTensors")
SCENARIOS = [(name, "dies") for name in ACTIONS] + [(name, "stops") for name in STOPS]


def lose(rank: Rank, name: str, how: str) -> Outcome:
    dist.barrier()
    # Ranks compile for different times; their connections exist afterwards, so that a lost one is found at once.
    timeout = 100.0 if "compiled" in name else TIMEOUT
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    action = ACTIONS[name][0](group)
    dist.barrier()
    if rank.rank == VICTIM:
        leave(how)
    return observe(action)


def play(name: str, how: str) -> list[Outcome]:
    with RankPool(3) as pool:
        pool.start(lose, name, how)
        outcomes = [pool.result(rank, 60) for rank in (0, 2)]
        pool.kill(VICTIM)
        return outcomes


@pytest.fixture(scope="module")
def played() -> Iterator[dict[tuple[str, str], Future]]:
    """Runs all scenarios in parallel, because they mostly wait."""
    with ThreadPoolExecutor(4) as threads:
        yield {scenario: threads.submit(play, *scenario) for scenario in SCENARIOS}


@pytest.mark.parametrize(("name", "how"), SCENARIOS)
def test_the_function_and_the_lost_rank_are_named(
    played: dict[tuple[str, str], Future], name: str, how: str
) -> None:
    for outcome in played[name, how].result():
        assert outcome.error == "PeerTimeoutError", outcome
        assert (outcome.op, outcome.phase) == ACTIONS[name][1], outcome
        assert (outcome.rank, outcome.ranks) == (VICTIM, (VICTIM,)), outcome
        assert outcome.text.startswith(
            f"transformer_plugin::{outcome.op}: phase '{outcome.phase}': expected all 3 ranks"
        ), outcome
        assert outcome.seconds < PROMISE, outcome


def lose_in_backward(rank: Rank) -> Outcome:
    """Of copies of shards, whose gradients data_parallel averages: ranks 1 and 3 have the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), tnn.Linear(6, 6, bias=False))
    shard_(model, mesh["shards"])
    replicas = data_parallel(model)
    replicas(torch.ones(2, 6)).sum().backward()
    output = replicas(torch.ones(2, 6)).sum()
    dist.barrier()
    if rank.rank == VICTIM:
        leave("dies")
    return observe(output.backward)


def test_copies_in_a_backward() -> None:
    with RankPool(4, group_timeout=20) as pool:
        pool.start(lose_in_backward)
        outcome = pool.result(3, 60)
        pool.kill(VICTIM)
        for rank in (0, 2):
            pool.kill(rank)
    assert outcome.error == "PeerTimeoutError", outcome
    assert (outcome.op, outcome.phase, outcome.ranks) == ("data_parallel", "gradients", (0,)), outcome
    assert outcome.seconds < PROMISE, outcome


def fail_alike(rank: Rank) -> None:
    for text in ("Connection refused", "other sizes"):
        with pytest.raises(RuntimeError, match=text) as caught, torch_collectives("f", "g", rank.group):
            raise RuntimeError(text)
        assert type(caught.value) is RuntimeError


def test_an_error_of_all_ranks_stays_as_it_is() -> None:
    with RankPool(2) as pool:
        pool.run(fail_alike)


#: Calls of torch that communicate, by the last part of their names.
COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "all_gather_tensor"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter"),
    *("broadcast", "broadcast_object_list", "gather_object", "scatter_object_list", "reduce", "barrier"),
    *("monitored_barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv", "new_group", "_flatten"),
    *("redistribute", "full_tensor", "distribute_tensor", "init_device_mesh"),
}
#: Of these, methods and functions that are not called by the name of a module.
OF_OBJECTS = ("redistribute", "full_tensor", "_flatten", "distribute_tensor")
#: Those of the package, inside of ``torch_collectives``.
KNOWN = {
    ("parallel/data.py", "new_group"),
    ("parallel/data.py", "broadcast"),
    ("parallel/data.py", "_flatten"),
    ("parallel/styles.py", "distribute_tensor"),
    ("nn/_dtensor.py", "redistribute"),
    ("integrations/_hf_expert_parallel.py", "redistribute"),
    ("integrations/_hf_expert_parallel.py", "full_tensor"),
}
#: Folders that are no part of a training.
OTHERS = ("testing", "reference", "doctor")


def called_collectives(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        of = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
        of_torch = of.split(".")[-1] in (
            "dist",
            "distributed",
            "funcol",
            "distributed_c10d",
            "_functional_collectives",
        )
        if name in COLLECTIVES and (of_torch or name in OF_OBJECTS):
            yield name


def test_no_other_collective_of_torch() -> None:
    """A collective that the package issues through torch is bounded, and named, only by ``torch_collectives``."""
    root = Path(transformer_plugin.__file__).parent
    found = {
        (path.relative_to(root).as_posix(), name)
        for path in root.rglob("*.py")
        if path.relative_to(root).parts[0] not in OTHERS
        for name in called_collectives(path)
    }
    assert found == KNOWN
