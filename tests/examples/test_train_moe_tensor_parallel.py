"""``--tensor-parallel`` and ``--shard`` of examples/train_moe.py: the losses, shards and checkpoints of full layers."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from moe_lm.config import PRESETS, Config, difference
from moe_lm.dense import cross_entropy, full_logits
from moe_lm.trainer import Trainer
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh

from tests.examples.conftest import losses_of, read_checkpoint, train
from tests.examples.trainers import losses, trainer_of
from transformer_plugin.testing.distributed import Rank, RankPool

pytestmark = pytest.mark.bits

#: Bounds of relative differences. float32 sums over columns and over ranks are made in another order; a quantized value
#: may then be another code, up to 2**-3 away; bfloat16 outputs of row layers are rounded on each rank before the sum.
ROUNDING = {"none": 1e-5, "quantized": 1e-3, "bfloat16": 2**-8}
SEQUENCES = 16  # in each step


class Pools:
    """Ranks on one kind of device, started when they are needed, and the losses of what they have trained."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.of_size: dict[int, RankPool] = {}
        self.known: dict[Config, list[float]] = {}

    def have(self, ranks: int) -> bool:
        return self.backend == "gloo" or torch.cuda.device_count() >= ranks

    def __getitem__(self, ranks: int) -> RankPool:
        if not self.have(ranks):
            pytest.skip(f"needs {ranks} GPUs")
        if ranks not in self.of_size:
            self.of_size[ranks] = RankPool(ranks, self.backend)
        return self.of_size[ranks]

    def losses(self, config: Config) -> list[float]:
        """The losses over all ranks, which each rank returns."""
        if config not in self.known:
            results: list[list[float]] = self[config.ranks].run(losses, config, timeout=280)
            assert all(result == results[0] for result in results)
            assert results[0][-1] < results[0][0] - 0.2, "nothing was learned, so nothing is compared"
            self.known[config] = results[0]
        return self.known[config]

    def close(self) -> None:
        for pool in self.of_size.values():
            pool.close()


@pytest.fixture(
    scope="module",
    params=[pytest.param("gloo", id="cpu"), pytest.param("nccl", id="cuda", marks=pytest.mark.gpus(2))],
)
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    pools = Pools(request.param)
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def config(text_file: Path) -> Config:
    """The balance loss is left out: each rank has one of its own tokens. Gradients are clipped."""
    settings = {**PRESETS["tiny"], "aux_loss_coeff": 0.0, "clip_norm": 0.5}
    return Config(**settings, text=str(text_file), dtype="float32", data_parallel="ddp")


def over(config: Config, ranks: int, tensor_parallel: int = 1, shard: int = 1, **changes: Any) -> Config:
    """The same sequences in each step, over so many ranks."""
    sizes = {"ranks": ranks, "tensor_parallel": tensor_parallel, "shard": shard}
    return replace(config, **sizes, batch_size=SEQUENCES * tensor_parallel // ranks, **changes)


#: Ranks, ranks that share products, ranks that shard weights.
DIVISIONS = [(2, 2, 1), (2, 1, 2), (4, 2, 2), (4, 2, 1), (4, 1, 2), (4, 4, 1), (4, 1, 4)]


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
@pytest.mark.parametrize("format", ["none", "fp8_block"])
def test_losses(pools: Pools, config: Config, format: str, division: tuple[int, ...]) -> None:
    """Those of one rank with all sequences."""
    rounding = ROUNDING["none" if format == "none" else "quantized"]
    config = replace(config, format=format)
    got, expected = (pools.losses(over(config, *each)) for each in (division, (1,)))
    assert got == pytest.approx(expected, rel=rounding)


@pytest.mark.parametrize(
    ("division", "changes", "rounding"),
    [
        ((4, 2, 2), {"expert_ranks": 2}, "none"),
        ((4, 1, 2), {"expert_ranks": 2}, "none"),
        ((4, 1, 2), {"expert_ranks": 1}, "none"),
        ((2, 1, 2), {"expert_ranks": 1, "parameters": "list"}, "none"),
        ((2, 1, 2), {"expert_ranks": 1, "format": "fp8_block", "cached_weights": True}, "quantized"),
        ((4, 2, 2), {"format": "fp8_block", "cached_weights": True}, "quantized"),
        ((2, 1, 2), {"expert_ranks": 1, "format": "fp8_delayed"}, "quantized"),
        ((4, 2, 2), {"dtype": "bfloat16"}, "bfloat16"),
        ((4, 2, 2), {"dtype": "bfloat16", "format": "mxfp8"}, "bfloat16"),
    ],
    ids=str,
)
def test_losses_with_other_options(
    pools: Pools, config: Config, division: tuple[int, ...], changes: Any, rounding: str
) -> None:
    ranks = division[0]
    got = pools.losses(over(config, *division, **changes))
    assert got == pytest.approx(pools.losses(over(config, ranks, **changes)), rel=ROUNDING[rounding])


def numbers_with(rank: Rank, config: Config) -> tuple[list[float], dict[str, tuple[int, ...]], int]:
    """Losses and the norm of the gradient in one step, the sizes of parameters, and the tokens of a step."""
    trainer = trainer_of(rank, config)
    sizes = {
        name: tuple(getattr(p, "to_local", lambda p=p: p)().shape)
        for name, p in trainer.model.named_parameters()
    }
    return trainer.step(0).tolist(), sizes, trainer.tokens_per_step


def test_parts_norm_and_balance_loss(pools: Pools, config: Config) -> None:
    """With as many sequences per rank, the balance losses are those of plain data parallelism, too."""
    config = replace(config, aux_loss_coeff=0.1)
    expected, full, tokens = pools[4].run(numbers_with, over(config, 4))[0]
    for numbers, sizes, got_tokens in pools[4].run(numbers_with, over(config, 4, 2, 2)):
        assert numbers == pytest.approx(expected, rel=ROUNDING["none"])
        assert numbers[1] > 0.1 and numbers[3] > config.clip_norm and got_tokens == tokens
        for name, size in full.items():
            part = list(size)
            if name == "embedding.weight" or name.endswith(("qkv.weight", "head.weight")):
                part[0] //= 4
            elif name.endswith("out.weight"):
                part = [size[0] // 2, size[1] // 2]
            assert sizes[name] == tuple(part), name
    _, sizes, _ = pools[4].run(numbers_with, over(config, 4, 1, 2, expert_ranks=1))[0]
    assert sizes["blocks.0.moe.experts.fc1.weight"][0] == config.experts // 2


def check_cross_entropy(rank: Rank) -> None:
    """256 columns over three ranks, of which the last has two columns fewer and zeros in their place."""
    mesh = init_device_mesh(rank.device.type, (rank.size,), mesh_dim_names=("tensor",))
    generator = torch.Generator().manual_seed(1)
    full = torch.randn(4, 5, 256, generator=generator).mul(20).requires_grad_()
    targets = torch.randint(256, (4, 5), generator=generator)
    targets[0] = torch.tensor([0, 85, 86, 171, 255])
    own = torch.nn.functional.pad(full.detach(), (0, 2)).chunk(3, -1)[rank.rank].requires_grad_()
    got, expected = (
        cross_entropy(logits, targets, 256, each) for logits, each in ((own, mesh), (full, None))
    )
    torch.testing.assert_close(got, expected)
    got.backward()
    expected.backward()
    assert full.grad is not None
    torch.testing.assert_close(own.grad, torch.nn.functional.pad(full.grad, (0, 2)).chunk(3, -1)[rank.rank])
    assert torch.equal(full_logits(own, 256, mesh), full)


def test_columns_that_do_not_divide(config: Config) -> None:
    config = replace(config, dim=96, heads=3, experts=6, batch_size=6)
    with RankPool(1, "gloo") as one, RankPool(3, "gloo") as three:
        three.run(check_cross_entropy)
        expected = one.run(losses, replace(config, ranks=1))[0]
        for got in three.run(losses, replace(config, ranks=3, tensor_parallel=3)):
            assert got == pytest.approx(expected, rel=ROUNDING["none"])


def save_after(rank: Rank, config: Config, source: str | None, target: str) -> None:
    """Saves a checkpoint after two steps, or what was loaded from another one."""
    trainer = trainer_of(rank, config)
    for step in range(2):
        trainer.step(step + (source is not None))
    if source is not None:
        dcp.load({"trainer": trainer}, checkpoint_id=source)
    dcp.save({"trainer": trainer}, checkpoint_id=target)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    file = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, file)
    state: Any = torch.load(file, weights_only=True)["trainer"]
    found = {f"model.{name}": value for name, value in state["model"].items()}
    for name, moments in state["optimizer"]["state"].items():
        found |= {f"{name}.{key}": value for key, value in moments.items()}
    return found


@pytest.mark.parametrize("saved", [(4, 2, 2), pytest.param((4, 1, 2), marks=pytest.mark.long), (1,)], ids=str)
def test_checkpoints_of_other_divisions(
    pools: Pools, config: Config, tmp_path: Path, saved: tuple[int, ...]
) -> None:
    """Loaded and saved again, weights and moments have the same bits."""
    pools[saved[0]].run(save_after, over(config, *saved), None, str(tmp_path / "first"))
    expected = tensors_of(tmp_path / "first")
    assert len(expected) > 3 * 18
    for division in filter(lambda each: pools.have(each[0]), [(1,), (2,), *DIVISIONS]):
        folder = tmp_path / "-".join(map(str, division))
        each = over(config, *division, **({"expert_ranks": 1} if division == (2, 1, 2) else {}))
        pools[division[0]].run(save_after, each, str(tmp_path / "first"), str(folder))
        got = tensors_of(folder)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(got[name], value), (division, name)


def digests(trainer: Trainer) -> dict[str, str]:
    """Of the parameters of this rank."""
    found = ((name, getattr(p, "to_local", p.detach)()) for name, p in trainer.model.named_parameters())
    return {
        name: sha256(p.detach().view(torch.uint8).cpu().numpy().tobytes()).hexdigest() for name, p in found
    }


def resumed_and_full(rank: Rank, config: Config, folder: str) -> tuple[list[Any], list[Any]]:
    """The numbers of two steps and the parameters after them, without a stop and from a checkpoint."""
    full = trainer_of(rank, config)
    for step in range(2):
        full.step(step)
    dcp.save({"trainer": full}, checkpoint_id=folder)
    resumed = trainer_of(rank, config)
    dcp.load({"trainer": resumed}, checkpoint_id=folder)
    got, expected = (
        [*each.step(2).tolist(), *each.step(3).tolist(), digests(each)] for each in (resumed, full)
    )
    return got, expected


@pytest.mark.parametrize("format", ["none", "fp8_block"])
def test_resumed_with_the_same_division(pools: Pools, config: Config, tmp_path: Path, format: str) -> None:
    """Bit for bit."""
    changed = over(config, 4, 2, 2, format=format, cached_weights=format != "none")
    for got, expected in pools[4].run(resumed_and_full, changed, str(tmp_path / "saved")):
        assert got == expected


@pytest.mark.parametrize(
    ("before", "now", "got"),
    [
        ((2, 1, 1, 8), (4, 2, 2, 8), ""),
        ((4, 2, 2, 8), (2, 1, 2, 8), ""),
        ((4, 2, 1, 8), (1, 1, 1, 16), ""),
        ((4, 2, 1, 8), (4, 1, 1, 8), "ranks / tensor_parallel * batch_size was 16 and is 32"),
    ],
)
def test_divisions_with_the_same_sequences(before: Any, now: Any, got: str) -> None:
    names = ("ranks", "tensor_parallel", "shard", "batch_size")
    old, new = (Config(**dict(zip(names, each, strict=True)), data_parallel="ddp") for each in (before, now))
    assert "; ".join(difference(asdict(old), new)) == got


def compiled_and_eager(rank: Rank, config: Config, backend: str) -> tuple[list[float], list[float], Any]:
    eager = losses(rank, config)
    torch._dynamo.reset()
    counters.clear()
    torch.compile = functools.partial(
        torch.compile, backend=backend
    )  # in this process, which is the test's own
    compiled = losses(rank, replace(config, compile=True))
    return eager, compiled, {name: dict(counters[name]) for name in ("stats", "graph_break")}


@pytest.mark.parametrize(
    ("place", "backend"),
    [
        pytest.param("gloo", "aot_eager", id="cpu"),
        pytest.param("nccl", "inductor", id="cuda", marks=pytest.mark.gpus(2)),
    ],
)
@pytest.mark.parametrize("division", [(2, 2, 1), pytest.param((4, 2, 2), marks=pytest.mark.long)], ids=str)
def test_compiled(config: Config, division: tuple[int, ...], place: str, backend: str) -> None:
    """All blocks are one graph, without a break. aot_eager runs the kernels of eager."""
    if place == "nccl" and torch.cuda.device_count() < division[0]:
        pytest.skip(f"needs {division[0]} GPUs")
    config = over(config, *division, format="fp8_block", dtype="bfloat16")
    with RankPool(config.ranks, place) as pool:
        for eager, compiled, counted in pool.run(compiled_and_eager, config, backend, timeout=280):
            assert counted["graph_break"] == {} and counted["stats"]["unique_graphs"] == 2
            assert compiled == pytest.approx(eager, rel=0 if backend == "aot_eager" else 2**-7)


def test_runs_that_resume_with_another_division(text_file: Path, tmp_path: Path) -> None:
    """The command line: a run over two tensor-parallel ranks continues over two that shard weights."""
    options = ["--text", str(text_file), "--steps", "6", "--eval-batches", "1", "--aux-loss-coeff", "0"]
    full, out = tmp_path / "whole", tmp_path / "run"
    train(full, *options, "--data-parallel", "ddp")
    done = train(out, *options, "--tensor-parallel", "2", "--batch-size", "16", "--stop-at", "3")
    assert (
        "2 ranks on cpu (ddp, tensor parallel 2): 2 layers, 4 experts, top 2, 0.2 M parameters" in done.stdout
    )
    done = train(out, "--tensor-parallel", "1", "--batch-size", "8", "--shard", "2", "--resume")
    assert "(ddp, shard 2)" in done.stdout and (out / "sample.txt").read_text()
    assert losses_of(out) == pytest.approx(losses_of(full), rel=ROUNDING["none"])
    got, expected = (read_checkpoint(each, 6)["model"] for each in (out, full))
    assert {n: v.shape for n, v in got.items()} == {n: v.shape for n, v in expected.items()}


def test_comparison(text_file: Path, tmp_path: Path) -> None:
    """Plain PyTorch has the same sequences, half of them on each rank, and so the same balance losses."""
    options = ["--tensor-parallel", "2", "--compare", "--eval-batches", "1", "--steps", "8"]
    train(tmp_path / "run", *options, "--text", str(text_file), "--batch-size", "16")
    report = json.loads((tmp_path / "run/compare.json").read_text())
    plain, plugin = report["losses"].values()
    assert plugin == pytest.approx(plain, rel=ROUNDING["none"]) and plain[-1] < plain[0] - 0.5
