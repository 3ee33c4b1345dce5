"""Every module in every schedule of torch.distributed.pipelining, on two ranks.

The gradients of all parameters and of the stages' inputs are those of one process that runs all stages. So are weight
gradients outside of ``.grad``, or there is an error that says what to do.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules

from tests.parallel.pipeline_stages import STAGES, H, T, make_stage, name_of
from transformer_plugin import nn
from transformer_plugin.nn import dw_builder
from transformer_plugin.recipes import Float8BlockScaling
from transformer_plugin.testing.distributed import Rank, RankPool
from transformer_plugin.testing.numerics import relative_error

MICROBATCHES = 4
Builder = Callable[[torch.nn.Module], Any]
#: How many stages each of two ranks has, and whether the second ones are in reverse order.
SCHEDULES: dict[str, tuple[int, bool]] = {
    "ScheduleGPipe": (1, False),
    "Schedule1F1B": (1, False),
    "ScheduleInterleaved1F1B": (2, False),
    "ScheduleLoopedBFS": (2, False),
    "ScheduleInterleavedZeroBubble": (2, False),
    "ScheduleZBVZeroBubble": (2, True),
    "ScheduleDualPipeV": (2, True),
}


def test_every_schedule_is_in_the_table() -> None:
    """All that train: those whose names begin with one underscore are base classes."""
    found = {
        name
        for name, value in vars(schedules).items()
        if isinstance(value, type) and name.startswith("Schedule")
    }
    assert set(SCHEDULES) == found


class Recorded(torch.nn.Module):
    """A stage that notes the gradient of each input."""

    def __init__(self, stage: torch.nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.inputs: dict[float, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            key = float(x.detach().double().sum())

            def note(grad: Tensor) -> None:
                self.inputs[key] = grad.clone()

            x.register_hook(note)
        return self.stage(x)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target.float()).square().mean()


def batch(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, target = (torch.randn(MICROBATCHES * T, H, generator=generator) for _ in range(2))
    return x.to(device), target.to(device)


def places_of(rank: Rank, per_rank: int, turns_back: bool) -> list[int]:
    """The stages of a rank."""
    last = per_rank * rank.size - 1
    return [rank.rank, last - rank.rank if turns_back else rank.rank + rank.size][:per_rank]


def pipelined(
    rank: Rank, name: str, stages: list[torch.nn.Module], builder: Builder | None = None, **options: Any
) -> list[int]:
    """Runs one step of a schedule. Returns which of the stages this rank has."""
    own = places_of(rank, *SCHEDULES[name])
    made: Any = []
    for i in own:
        later = builder(stages[i]) if builder else None
        stage = PipelineStage(stages[i], i, len(stages), rank.device, group=rank.group, dw_builder=later)
        if rank.group.name() == "gloo":  # torch first connects neighbours, and Gloo no rank with itself
            stage._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign]
        made.append(stage)
    if SCHEDULES[name][0] == 1:
        made = made[0]
    schedule = getattr(schedules, name)(made, n_microbatches=MICROBATCHES, loss_fn=loss_of, **options)
    x, target = batch(rank.device)
    first, last = 0 in own, len(stages) - 1 in own
    schedule.step(*([x] if first else []), **({"target": target, "losses": []} if last else {}))
    return own


def in_one_process(stages: list[torch.nn.Module], device: torch.device) -> list[torch.nn.Module]:
    """The stages with the gradients of the mean over the microbatches, which schedules compute by default."""
    for x, target in zip(*(t.chunk(MICROBATCHES) for t in batch(device)), strict=True):
        for stage in stages:
            x = stage(x)
        loss_of(x, target).backward()
    for stage in stages:
        for parameter in stage.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(MICROBATCHES)
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.div_(MICROBATCHES)
    return stages


def plain(tensor: Any) -> Tensor:
    return tensor.packed() if hasattr(tensor, "packed") else tensor


def check_same(name: str, got: torch.nn.Module, expected: torch.nn.Module) -> None:
    """Up to the order in which a schedule adds the microbatches' gradients, in float32."""
    for (key, own), wanted in zip(got.named_parameters(), expected.parameters(), strict=True):
        assert (own.grad is None) == (wanted.grad is None), (name, key)
        pairs = [(own.grad, wanted.grad)] if wanted.grad is not None else []
        pairs += [(own.main_grad, wanted.main_grad)] if hasattr(wanted, "main_grad") else []  # type: ignore[attr-defined]
        for one, other in pairs:
            assert plain(other).any() and relative_error(plain(one), plain(other)) < 2.0**-20, (name, key)


#: One of each class, in the layout or with the option that has most to do.
KEYS = [
    *(
        (nn.Linear, ""),
        (nn.LayerNormLinear, "both outputs"),
        (nn.GroupedLinear, "list"),
        (nn.GroupedMLP, "biases"),
    ),
    *((nn.MoE, "hidden == num_experts"), (nn.MoE, "biases and an auxiliary loss"), (nn.RMSNorm, "")),
    *((nn.LayerNorm, ""), (nn.Embedding, ""), (nn.TopKRouter, ""), (nn.QuantizedWeight, "MoE")),
]


def every_module(i: int) -> torch.nn.Module:
    """One after the other, each with a residual connection."""
    recipe = Float8BlockScaling()
    made = {name_of(key): make_stage(key, recipe if key[1] else None, i, torch.float32) for key in KEYS}
    return torch.nn.Sequential(OrderedDict(made))


def stages_of(
    rank: Rank, name: str, make: Callable[[int], torch.nn.Module]
) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """The stages of a schedule, twice."""
    count = SCHEDULES[name][0] * rank.size
    stages: list[torch.nn.Module] = [Recorded(make(i)).to(rank.device) for i in range(count)]
    return stages, copy.deepcopy(stages)


def check_modules(rank: Rank, name: str) -> None:
    assert {key[0] for key in KEYS} == {key[0] for key in STAGES}
    stages, others = stages_of(rank, name, every_module)
    own, expected = pipelined(rank, name, stages), in_one_process(others, rank.device)
    for i in own:
        check_same(f"stage {i} of {name}", stages[i], expected[i])
        one, other = stages[i].inputs, expected[i].inputs
        assert len(other) == (MICROBATCHES if i > 0 else 0), i
        # Some versions of torch also run a stage to learn its shapes.
        assert one.keys() >= other.keys() and all(torch.equal(one[x], other[x]) for x in other), i


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_module(pair: RankPool, name: str) -> None:
    pair.run(check_modules, name)


OPTIONS: dict[str, dict[str, bool]] = {
    "main_grad": {"fuse_wgrad_accumulation": True},
    "delayed": {"delay_wgrad_compute": True},
    "both": {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True},
}
SPLITS = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class Block(torch.nn.Module):
    """One layer of each kind with the options, biases, and a layer without weight gradients."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.LayerNormLinear(H, H, recipe=Float8BlockScaling(), **options)
        self.second = nn.Linear(H, H, **options)
        self.experts = nn.GroupedMLP(2, H, H, True, **options)
        self.moe = nn.MoE(H, H, 4, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(self.first(x))
        sizes, probs = torch.tensor([T // 2, T // 2], device=x.device), torch.ones(T, device=x.device)
        x = x + self.experts(x, sizes, probs)
        return x + self.moe(x).output


def blocks(rank: Rank, name: str, option: str) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """Stages with the options, and the same that compute all gradients in the backward."""

    def make(i: int) -> torch.nn.Module:
        torch.manual_seed(i)
        return Block(**OPTIONS[option])

    stages, expected = stages_of(rank, name, make)
    for stage in (*stages, *expected):
        for layer in stage.modules():
            if getattr(layer, "fuse_wgrad_accumulation", False) and isinstance(layer.weight, Tensor):
                layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)  # type: ignore[attr-defined]
    for stage in expected:
        stage.stage.moe.delay_wgrad_compute = stage.stage.experts.delay_wgrad_compute = False  # type: ignore[union-attr]
        stage.stage.first.delay_wgrad_compute = stage.stage.second.delay_wgrad_compute = False  # type: ignore[union-attr]
    return stages, expected


def check_options(rank: Rank, name: str) -> None:
    for option in OPTIONS:
        stages, expected = blocks(rank, name, option)
        needs_builder = option != "main_grad" or name in SPLITS
        own = pipelined(rank, name, stages, dw_builder if needs_builder else None)
        in_one_process(expected, rank.device)
        for i in own:
            check_same(f"{option} in stage {i} of {name}", stages[i], expected[i])


@pytest.mark.parametrize("name", SCHEDULES)
def test_main_grad_and_delayed_weight_gradients(pair: RankPool, name: str) -> None:
    """They are divided by the number of microbatches, as those of biases are."""
    pair.run(check_options, name)


def refusal(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return str(error)
    raise AssertionError("accepted")


def check_refusals(rank: Rank) -> None:
    """On one rank, because an error of one would leave others waiting."""
    for option, argument in (("main_grad", "fuse_wgrad_accumulation"), ("delayed", "delay_wgrad_compute")):
        stages, _ = blocks(rank, "ScheduleInterleavedZeroBubble", option)
        before = [p.main_grad.clone() for p in stages[1].parameters() if hasattr(p, "main_grad")]
        text = refusal(lambda stages=stages: pipelined(rank, "ScheduleInterleavedZeroBubble", stages))
        assert re.search(
            r"transformer_plugin::\w+: argument '(fc1_)?main_grad(_queue)?': expected a backward that "
            f"accumulates, as the layer has {argument}=True, got torch.autograd.grad for the gradient of its weight, "
            r"as pipeline schedules with a zero bubble call it. Pass dw_builder=transformer_plugin.nn.dw_builder"
            r"\(module\) to PipelineStage, or leave the option out.",
            text,
        ), text
        after = [p.main_grad for p in stages[1].parameters() if hasattr(p, "main_grad")]
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    stages, expected = blocks(rank, "ScheduleGPipe", "delayed")
    assert refusal(lambda: pipelined(rank, "ScheduleGPipe", stages)) == (
        "transformer_plugin::scale_grads: argument 'submod': expected gradients that are complete when the schedule "
        "divides them by the number of microbatches, got 'stage.first' (LayerNormLinear) with "
        "delay_wgrad_compute=True, and weight gradients that wait for backward_dw(). Pass "
        "dw_builder=transformer_plugin.nn.dw_builder(module) to PipelineStage, or scale_grads=False to the "
        "schedule and divide the loss by the number of microbatches."
    )
    stages, expected = blocks(rank, "ScheduleGPipe", "delayed")
    pipelined(rank, "ScheduleGPipe", stages, scale_grads=False)
    dw_builder(stages[0])()()
    in_one_process(expected, rank.device)
    for got, wanted in zip(stages[0].parameters(), expected[0].parameters(), strict=True):
        assert relative_error(got.grad / MICROBATCHES, wanted.grad) < 2.0**-20  # type: ignore[operator,arg-type]


def test_what_is_refused(make_pool: Callable[[int, str], RankPool]) -> None:
    make_pool(1, "gloo").run(check_refusals)


def test_builders_take_modules() -> None:
    with pytest.raises(
        TypeError, match=r"dw_builder: argument 'module': expected a torch.nn.Module, got list"
    ):
        dw_builder([])  # type: ignore[arg-type]
