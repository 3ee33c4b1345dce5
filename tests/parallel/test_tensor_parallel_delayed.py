"""Delayed scaling with tensor parallelism: with an ``amax_group`` the scales are those of the full layer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.tensor_parallel_models import FACTOR, ROWS, F, K, drawn, full_grad, relative
from transformer_plugin import nn as tnn
from transformer_plugin.nn import reduce_amax
from transformer_plugin.parallel.styles import ColumnParallel, RowParallel
from transformer_plugin.recipes import DelayedScaling
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import assert_same_bits

STEPS = 4


def layers(rank: Rank, kind: Any, mode: str, sequence_parallel: bool, group: Any) -> tuple[Any, Any]:
    """The full layer, and the same with slices."""
    made = []
    for parallel in (False, True):
        torch.manual_seed(1)
        options: dict[str, Any] = {"device": rank.device, "dtype": torch.bfloat16}
        options["recipe"] = DelayedScaling(amax_history_len=2, amax_group=group if parallel else "")
        if parallel:
            options |= {"parallel_mode": mode, "tp_group": rank.group, "sequence_parallel": sequence_parallel}
        made.append(kind(K, F, **options))
    return made[0], made[1]


def part(rank: Rank, size: int) -> slice:
    return slice(rank.rank * size // rank.size, (rank.rank + 1) * size // rank.size)


def step_data(rank: Rank, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output gradient of all ranks, whose largest values are on another rank in each step."""
    x, g = drawn(ROWS, K, seed=step, device=rank.device), drawn(ROWS, F, seed=50 + step, device=rank.device)
    x[:, step * K // STEPS] *= 2.0 ** (step + 1)
    g[step * ROWS // STEPS, (STEPS - 1 - step) * F // STEPS] *= 2.0 ** (step + 1)
    return x, g


def change(full: Any, own: Any, step: int) -> None:
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            of_full = full.get_parameter(name)
            of_full += 0.1 * drawn(*of_full.shape, seed=step, device=of_full.device)
            of_full.view(-1)[step * of_full.numel() // STEPS] = 2.0 + step
            slices = getattr(parameter, "tensor_slices", None)
            parameter.copy_(of_full if slices is None else slices.local_shard_of(of_full))


def check_layer(rank: Rank, kind: Any, mode: str, sequence_parallel: bool) -> None:
    full, own = layers(rank, kind, mode, sequence_parallel, rank.group)
    seen = []
    for step in range(STEPS):
        x, g = step_data(rank, step)
        rows, columns = part(rank, ROWS) if sequence_parallel else slice(None), slice(None)
        mine = x[rows] if mode == "column" else x[:, part(rank, K)]
        if mode == "column":
            columns = part(rank, F)
        x, mine = x.requires_grad_(), mine.detach().clone().requires_grad_()
        output, of_own = full(x), own(mine)
        assert_same_bits(own.delayed_scale, full.delayed_scale, f"scales in step {step}")
        seen.append(own.delayed_scale.clone())
        output.backward(g)
        if mode == "column":
            assert_same_bits(of_own, output[:, columns].contiguous(), f"output in step {step}")
            of_own.backward(g[:, columns])
            want = x.grad[rows]
        else:
            assert relative(of_own, output[rows]) < 2**-6  # partial sums are rounded, too
            of_own.backward(g[rows])
            want = x.grad[:, part(rank, K)]
        assert relative(mine.grad, want) < (2**-6 if mode == "column" else 1e-7)
        for name, parameter in own.named_parameters():
            if "norm" in name or (name == "bias" and mode == "row"):  # sums over ranks
                assert relative(parameter.grad, full.get_parameter(name).grad) < 2**-6
            else:
                assert_same_bits(full_grad(parameter), full.get_parameter(name).grad, name)
            parameter.grad = full.get_parameter(name).grad = None
        change(full, own, step)
    assert all((one != other).any() for one, other in itertools.pairwise(seen)), seen


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("kind", "mode"),
    [(tnn.Linear, "column"), (tnn.Linear, "row"), (tnn.LayerNormLinear, "column")],
)
def test_layers(ranks: RankPool, kind: Any, mode: str, sequence_parallel: bool) -> None:
    ranks.run(check_layer, kind, mode, sequence_parallel)


class Experts(torch.nn.Module):
    """Slices of every expert; the single layer in both modes."""

    def __init__(self, rank: Rank, parallel: bool, group: Any) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": rank.device, "dtype": torch.bfloat16}
        options["recipe"] = DelayedScaling(amax_history_len=2, amax_group=group if parallel else "")
        column, row = ({"parallel_mode": mode, "tp_group": rank.group} for mode in ("column", "row"))
        self.mlp = tnn.GroupedMLP(
            2, 64, 128, True, **options, **({"tp_group": rank.group} if parallel else {})
        )
        self.up = tnn.GroupedLinear(2, 64, 128, **options, **(column if parallel else {}))
        self.down = tnn.GroupedLinear(2, 128, 64, **options, **(row if parallel else {}))

    def forward(self, x: torch.Tensor, sizes: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(self.up(self.mlp(x, sizes, probs), sizes), sizes)
        return output


def check_experts(rank: Rank) -> None:
    torch.manual_seed(1)
    full = Experts(rank, False, "")
    own = Experts(rank, True, rank.group)
    own.load_state_dict(full.state_dict())
    sizes = torch.tensor([12, 20], device=rank.device)
    probs = torch.rand(32, generator=torch.Generator().manual_seed(1)).to(rank.device)
    for step in range(STEPS):
        x = drawn(32, 64, seed=step, device=rank.device) * (1 + step)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [model(each, sizes, probs) for model, each in zip((full, own), inputs, strict=True)]
        assert relative(outputs[1], outputs[0]) < 0.05, step
        for output in outputs:
            output.float().square().sum().backward()
        assert relative(inputs[1].grad, inputs[0].grad) < 0.15, step
        for name, parameter in own.named_parameters():
            error = relative(full_grad(parameter), full.get_parameter(name).grad)
            assert error < 0.15, (step, name, error)  # of 8-bit gradients through three layers
            parameter.grad = full.get_parameter(name).grad = None
        for name, buffer in own.named_buffers():
            if name.endswith("delayed_scale"):
                want = full.get_buffer(name)
                assert ((buffer / want - 1).abs() < 0.2).all(), (step, name)
                assert_same_bits(buffer[2:4], want[2:4], name)  # of the weights
                everyone = [torch.empty_like(buffer) for _ in range(rank.size)]
                dist.all_gather(everyone, buffer, group=rank.group)
                assert all(torch.equal(buffer, each) for each in everyone)


def test_experts(ranks: RankPool) -> None:
    ranks.run(check_experts)


def check_alone(rank: Rank) -> None:
    """Without a group each rank has the scales of its slices, which are as accurate."""
    full, own = layers(rank, tnn.Linear, "column", True, "")
    exact = []
    for step in range(STEPS):
        x, g = step_data(rank, step)
        output, of_own = full(x), own(x[part(rank, ROWS)])
        exact = (x.double() @ full.weight.detach().double().t() + full.bias.double())[:, part(rank, F)]
        if step:
            error, of_full = relative(of_own, exact), relative(output[:, part(rank, F)], exact)
            assert error <= FACTOR * of_full + 2**-9
        output.backward(g)
        of_own.backward(g[:, part(rank, F)])
        change(full, own, step)
    everyone = [torch.empty_like(own.delayed_scale) for _ in range(rank.size)]
    dist.all_gather(everyone, own.delayed_scale, group=rank.group)
    assert any((one[1:] != everyone[0][1:]).any() for one in everyone)  # of weight and gradient
    assert all(one[0] == everyone[0][0] for one in everyone)  # all ranks have all rows of the input


def test_without_a_group(ranks: RankPool) -> None:
    ranks.run(check_alone)


def check_styles(rank: Rank) -> None:
    """Of layers that exist and have trained: the slices go on with the scales of the full layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh(rank.device.type, (rank.size,))
    torch.manual_seed(1)
    recipe = DelayedScaling(amax_history_len=2, amax_group=mesh.get_group())
    options: dict[str, Any] = {"device": rank.device, "dtype": torch.bfloat16}
    full = torch.nn.Sequential(
        tnn.Linear(K, F, recipe=DelayedScaling(amax_history_len=2), **options),
        tnn.Linear(F, K, recipe=DelayedScaling(amax_history_len=2), **options),
    )
    own = torch.nn.Sequential(
        tnn.Linear(K, F, recipe=recipe, **options), tnn.Linear(F, K, recipe=recipe, **options)
    )
    own.load_state_dict(full.state_dict())
    for step in range(4):
        x, _ = step_data(rank, step)
        outputs = [model(x) for model in (full, own)]
        assert relative(outputs[1], outputs[0]) < 0.02
        assert_same_bits(own[0].delayed_scale[:2], full[0].delayed_scale[:2])
        assert_same_bits(own[1].delayed_scale[1:2], full[1].delayed_scale[1:2])
        for output in outputs:
            output.float().square().sum().backward()
        if step == 1:
            parallelize_module(own, mesh, {"0": ColumnParallel(), "1": RowParallel()})
            assert own[0].weight.shape[0] == F // rank.size


def test_styles(ranks: RankPool) -> None:
    ranks.run(check_styles)


def check_states(rank: Rank, folder: str) -> None:
    """A checkpoint has one state for all ranks: saved after reduce_amax it is that of the full layer."""
    import torch.distributed.checkpoint as dcp

    full, own = layers(rank, tnn.Linear, "column", False, rank.group)
    for step in range(3):
        x, g = step_data(rank, step)
        for layer, columns in ((full, slice(None)), (own, part(rank, F))):
            layer(x).backward(g[:, columns])
    reduce_amax(own, rank.group)
    for name in ("delayed_history", "delayed_scale", "delayed_amax"):
        assert_same_bits(own.state_dict()[name], full.state_dict()[name], name)
    dcp.save({"model": own.state_dict()}, checkpoint_id=folder)
    others = layers(rank, tnn.Linear, "row", False, rank.group)
    for loaded in others:  # in another mode, and unsharded
        state = {"model": loaded.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        loaded.load_state_dict(state["model"])
    x, _ = step_data(rank, 3)
    for layer, columns in (
        (full, slice(None)),
        (own, slice(None)),
        (others[0], slice(None)),
        (others[1], part(rank, K)),
    ):
        layer(x[:, columns])
        assert_same_bits(layer.delayed_scale, full.delayed_scale)


def test_states(ranks: RankPool, tmp_path: Any) -> None:
    ranks.run(check_states, str(tmp_path))


def check_compiled(rank: Rank) -> None:
    torch._dynamo.reset()
    _, eager = layers(rank, tnn.LayerNormLinear, "column", True, rank.group)
    _, own = layers(rank, tnn.LayerNormLinear, "column", True, rank.group)
    compiled: Any = torch.compile(own, fullgraph=True, backend="aot_eager")
    for step in range(STEPS):
        x, g = step_data(rank, step)
        outputs = [model(x[part(rank, ROWS)]) for model in (eager, compiled)]
        assert_same_bits(outputs[1], outputs[0])
        assert_same_bits(own.delayed_scale, eager.delayed_scale)
        for output in outputs:
            output.backward(g[:, part(rank, F)])
        for one, other in zip(eager.parameters(), own.parameters(), strict=True):
            assert_same_bits(other.grad, one.grad)


def test_compiled(pair: RankPool) -> None:
    pair.run(check_compiled)
