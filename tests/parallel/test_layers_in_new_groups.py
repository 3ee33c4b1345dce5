"""Layers over a world that was destroyed, in a new one of the same name: refused if this process has another rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.replaced_layers import CASES, Case, T, drawn, own
from transformer_plugin import optim, parallel
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

DIVIDED = [key for key, case in CASES.items() if case.kind not in ("plain", "quantized") or not case.adds]
#: Compiling takes seconds, so one layer for each op that moves something.
COMPILED = ("sharded_linear", "column", "grouped_column", "sequence_rms_norm", "dtensor_experts")
NEW_RANK = "argument 'group_name': expected the group '.*' in which this process is rank 0, as when the layer was made"


def remake(store: dist.Store, name: str, rank: int, backend: str) -> str:
    """Creates the world again, with this process as another rank; returns its name."""
    dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.PrefixStore(name, store), rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def input_of(case: Case, rank: Rank) -> torch.Tensor:
    if case.adds:
        return case.draw(T * rank.size).chunk(rank.size)[rank.rank].to(rank.device)
    return own(case.draw(T), case.input_dim, rank).to(rank.device)


def check_refused(rank: Rank, key: str, model: Any, compiled: Any) -> None:
    """In a world with swapped ranks, before any element has moved."""
    case, x = CASES[key], input_of(CASES[key], rank)
    text = NEW_RANK.replace("rank 0", f"rank {rank.rank}")
    is_moe = case.kind in ("experts", "dtensor")
    with pytest.raises(
        RuntimeError if is_moe else ValueError, match="got a destroyed group" if is_moe else text
    ):
        model(x)
    if x.is_floating_point():
        x.requires_grad_()
    if key in COMPILED:
        with pytest.raises(ValueError, match=text):
            compiled(x).sum().backward()  # where the compiled forward sends nothing, in the backward
    weight = model.get_submodule(case.path).get_parameter(case.name)
    weight.grad = torch.ones_like(weight)
    if case.kind not in ("sharded", "sliced"):
        return
    actions = [lambda: parallel.full_weight(weight), lambda: parallel.clip_grad_norm_([weight], 1.0)]
    if (
        case.kind == "sliced" or weight.dim() == 2
    ):  # of a stack each rank has full matrices, which Muon does not gather
        actions.append(lambda: optim.Muon([weight]).step())
    for action in actions:
        with pytest.raises(ValueError, match=text):
            action()


@torch._dynamo.config.patch(recompile_limit=64)  # the models share the code of a forward
def check_worlds(rank: Rank, backend: str) -> None:
    torch._dynamo.reset()
    store = dist.distributed_c10d._get_default_store()
    names = {rank.group_name}
    made = {}
    for key in DIVIDED:
        model, x = CASES[key].make(rank), input_of(CASES[key], rank)
        compiled = torch.compile(model, backend="aot_eager", dynamic=False, fullgraph=True)
        output = model(x)
        if key in COMPILED:
            torch.testing.assert_close(compiled(x), output)
        made[key] = (model, compiled, output)
    names.add(remake(store, "swapped", 1 - rank.rank, backend))
    for key in DIVIDED:
        try:
            check_refused(rank, key, *made[key][:2])
        except pytest.fail.Exception as error:
            raise AssertionError(f"{key}: {error}") from error
    names.add(remake(store, "again", rank.rank, backend))
    assert len(names) == 1, "the names must be the same for this to be a test"
    for key in DIVIDED:
        if CASES[key].kind in ("sharded", "sliced"):  # the same ranks
            model, compiled, output = made[key]
            for run in (model, compiled) if key in COMPILED else (model,):
                assert_same_bits(run(input_of(CASES[key], rank)), output, key)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpus(2))])
def test_new_worlds(backend: str) -> None:
    with RankPool(2, backend) as pool:
        pool.run(check_worlds, backend)


def check_name(rank: Rank) -> None:
    """The name of a group with a rank, as layers pass it to ops."""
    from transformer_plugin import ops

    x = drawn(2, 3, seed=rank.rank).to(rank.device)
    name = f"{rank.group_name}#rank={rank.rank}"
    assert_same_bits(ops.all_gather(x, 2, name), ops.all_gather(x, 2, rank.group_name))
    with pytest.raises(
        ValueError, match=rf"is rank {1 - rank.rank}, .*, got one in which it is rank {rank.rank}\."
    ):
        ops.all_gather(x, 2, f"{rank.group_name}#rank={1 - rank.rank}")
    for wrong in ("x", "", "1x", "-"):
        with pytest.raises(ValueError, match="a name, or a name with '#rank=' and a number"):
            ops.all_gather(x, 2, f"{rank.group_name}#rank={wrong}")


def test_name_with_rank(pair: RankPool) -> None:
    pair.run(check_name)
