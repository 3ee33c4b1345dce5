"""Layouts of the experts' weights and data parallelism of examples/train_moe.py, on ranks with different data."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from moe_lm.config import PRESETS, Config

from tests.examples.conftest import (
    SCRIPT,
    arguments,
    assert_same_results,
    losses_of,
    read_checkpoint,
    train,
)
from tests.examples.processes import started
from tests.examples.trainers import losses, trainer_of
from transformer_plugin.testing.distributed import Rank, RankPool

LAYOUTS = ("packed", "list", "grouped")
#: Bounds of relative differences of losses if float32 sums are made in another order. A quantized value may then be
#: another code, up to 2**-3 away.
ROUNDING = {"none": 1e-5, "quantized": 1e-3}


class Pools(NamedTuple):
    """Ranks on one kind of device."""

    of_size: dict[int, RankPool]
    #: Whether equal sums have equal bits. On a GPU, products of torch depend on where operands lie.
    exact: bool


@pytest.fixture(
    scope="module",
    params=[pytest.param("gloo", id="cpu"), pytest.param("nccl", id="cuda", marks=pytest.mark.gpus(2))],
)
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    """One rank, and two."""
    with RankPool(1, request.param) as one, RankPool(2, request.param) as two:
        yield Pools({1: one, 2: two}, request.param == "gloo")


@pytest.fixture(scope="module")
def config(text_file: Path) -> Config:
    """Sixteen sequences in each step. The balance loss, which every rank has of its own tokens, is left out, and no
    gradient is clipped: the order of the sum of a norm depends on how parameters are laid out and sharded."""
    settings = {**PRESETS["tiny"], "aux_loss_coeff": 0.0, "clip_norm": 1e30}
    return Config(**settings, text=str(text_file), dtype="float32", ranks=2)


def on_one_rank(config: Config, **changes: Any) -> Config:
    return replace(config, ranks=1, batch_size=config.ranks * config.batch_size, **changes)


def losses_with(pools: Pools, config: Config, **changes: Any) -> list[float]:
    """The losses over all ranks, which each rank returns."""
    config = replace(config, **changes)
    results: list[list[float]] = pools.of_size[config.ranks].run(losses, config, timeout=280)
    assert all(result == results[0] for result in results)
    assert results[0][-1] < results[0][0] - 0.2, "nothing was learned, so nothing is compared"
    return results[0]


def assert_equal(
    pools: Pools, got: list[float], expected: list[float], rounding: float = ROUNDING["none"]
) -> None:
    assert got == pytest.approx(expected, rel=0 if pools.exact else rounding, abs=0)


@pytest.mark.parametrize("format", ["none", "fp8_block"])
def test_layouts_and_wrappers(pools: Pools, config: Config, format: str) -> None:
    """Each layout under FSDP2, under DDP and on one rank with the batch of both.

    The mean of two gradients is exact, so FSDP2 and DDP give the same bits on two ranks; so do the layouts, anywhere.
    One rank adds the same float32 terms in another order.
    """
    rounding = ROUNDING["none" if format == "none" else "quantized"]
    config = replace(config, format=format, expert_ranks=1)
    two = losses_with(pools, config)
    one = losses_with(pools, on_one_rank(config))
    assert one == pytest.approx(two, rel=rounding)
    for layout in LAYOUTS:
        for wrapper in ("fsdp", "ddp"):
            got = losses_with(pools, config, parameters=layout, data_parallel=wrapper)
            assert_equal(pools, got, two, rounding)
        got = losses_with(pools, on_one_rank(config, parameters=layout, data_parallel="none"))
        assert_equal(pools, got, one, rounding)


def test_experts_over_ranks(pools: Pools, config: Config) -> None:
    """The gradient of an expert is one sum over the tokens of both ranks, not the mean of two sums."""
    replicated = losses_with(pools, config, expert_ranks=1)
    sharded = losses_with(pools, config)
    assert sharded == pytest.approx(replicated, rel=ROUNDING["none"])
    assert_equal(pools, losses_with(pools, config, data_parallel="ddp"), sharded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clipped_gradients(pools: Pools, config: Config, dtype: str) -> None:
    """DDP against plain PyTorch and FSDP2: within float32 rounding, or one unit of bfloat16."""
    config = replace(config, clip_norm=1.0, expert_ranks=1, dtype=dtype, data_parallel="ddp")
    mine = losses_with(pools, config)
    bound = ROUNDING["none"] if dtype == "float32" else 2**-8
    for changes in ({"reference": True}, {"data_parallel": "fsdp"}):
        assert mine == pytest.approx(losses_with(pools, config, **changes), rel=bound)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", ["fp8_block", "mxfp8", "nvfp4"])
def test_cached_weights(pools: Pools, config: Config, format: str, layout: str) -> None:
    """Weights that are quantized after the optimizer's step are those that the forward would quantize."""
    config = replace(config, format=format, parameters=layout, data_parallel="ddp")
    fresh = losses_with(pools, config)
    assert_equal(pools, losses_with(pools, config, cached_weights=True), fresh, ROUNDING["quantized"])


def test_delayed_scaling_of_copies(pools: Pools, config: Config) -> None:
    """Ranks with copies of the experts have the same scales, so any of them can save them."""
    config = replace(config, format="fp8_delayed", expert_ranks=1, data_parallel="ddp")
    for states in zip(*pools.of_size[2].run(scales, config), strict=True):
        assert torch.equal(*states)


def scales(rank: Rank, config: Config) -> list[torch.Tensor]:
    """The state of every layer after two steps."""
    trainer = trainer_of(rank, config)
    for step in range(2):
        trainer.step(step)
    found = [value.cpu() for name, value in trainer.model.state_dict().items() if "delayed_" in name]
    assert len(found) == 3 * 2 * config.layers and all(bool(value.any()) for value in found)
    return found


def compiled_and_eager(rank: Rank, config: Config) -> tuple[list[float], list[float]]:
    torch._dynamo.reset()
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # runs the kernels of eager
    return losses(rank, replace(config, compile=True)), losses(rank, config)


@pytest.mark.parametrize(
    ("layout", "wrapper", "cached"),
    [
        ("list", "fsdp", False),
        pytest.param("grouped", "fsdp", False, marks=pytest.mark.long),
        pytest.param("packed", "ddp", False, marks=pytest.mark.long),
        ("list", "ddp", True),
    ],
)
def test_compiled(config: Config, layout: str, wrapper: str, cached: bool) -> None:
    config = replace(
        config, parameters=layout, data_parallel=wrapper, format="fp8_block", cached_weights=cached
    )
    with RankPool(2, "gloo") as pool:
        for got, expected in pool.run(compiled_and_eager, config, timeout=280):
            assert got == expected


def test_comparison(text_file: Path, tmp_path: Path) -> None:
    """Both implementations under DDP; plain PyTorch has packed weights."""
    options = ["--data-parallel", "ddp", "--parameters", "list", "--compare", "--eval-batches", "1"]
    train(tmp_path / "run", *options, "--text", str(text_file), "--steps", "8")
    report = json.loads((tmp_path / "run/compare.json").read_text())
    plain, plugin = report["losses"].values()
    assert plugin == pytest.approx(plain, rel=ROUNDING["none"]) and plain[-1] < plain[0] - 0.5


OPTIONS = ["--data-parallel", "ddp", "--parameters", "list", "--steps", "8", "--eval-batches", "1"]


def test_stopped_under_torchrun_and_resumed(text_file: Path, tmp_path: Path) -> None:
    """With DDP and one parameter for each expert: bit for bit the whole run, and no parameter is missing."""
    options = ["--text", str(text_file), *OPTIONS, "--format", "fp8_block", "--cached-weights"]
    whole, out = tmp_path / "whole", tmp_path / "run"
    done = train(whole, *options)
    assert "2 ranks on cpu (list, ddp)" in done.stdout
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    with started([*launcher, str(SCRIPT), *arguments(out, *options, "--stop-at", "3")[2:]]) as run:
        output, _ = run.communicate(timeout=200)
        assert run.returncode == 0 and "stopped after step 3 of 8" in output
    train(out, "--resume")
    assert_same_results(out, whole, 8)
    names = [name for name in read_checkpoint(out, 8)["model"] if ".experts." in name]
    assert len(names) == 2 * 2 * 4  # layers, products, experts


def test_resumed_with_experts_over_other_ranks(text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--text", str(text_file), "--steps", "8", "--eval-batches", "1", "--aux-loss-coeff", "0"]
    options += ["--data-parallel", "ddp"]
    train(tmp_path / "whole", *options)
    train(out, *options, "--stop-at", "4")
    train(out, *options, "--expert-ranks", "1", "--resume")
    expected = losses_of(tmp_path / "whole")
    assert losses_of(out) == pytest.approx(expected, rel=ROUNDING["none"])
