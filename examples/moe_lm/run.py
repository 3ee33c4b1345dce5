"""The training loop: progress, metrics, checkpoints, and the final results."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from moe_lm import checkpoint
from moe_lm.config import Config, Options
from moe_lm.data import Corpus, load_corpus
from moe_lm.folder import RunFolder, checkpoints
from moe_lm.limits import UserError
from moe_lm.sample import generate
from moe_lm.stopping import SAVING, STEP, StopRequest
from moe_lm.trainer import Trainer, about_compiling
from moe_lm.world import World

READ_EVERY = {"cpu": 1, "cuda": 10}  # steps between reads of the losses; a read waits for the device


def describe(config: Config, trainer: Trainer) -> str:
    """Describes the model in one line, for the terminal and the plots."""
    whole = trainer.model.state_dict()  # a parameter may be this rank's part
    sizes = {name: whole[name].numel() for name, _ in trainer.model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    shared = sum(sizes.values()) - experts
    active = shared + experts * config.topk // config.experts
    kind = "plain PyTorch" if config.reference else "transformer_plugin"
    number = config.dtype if config.format == "none" else f"{config.format} on {config.dtype}"
    parts = [config.parameters] * (config.parameters != "packed")
    parts += [config.data_parallel] * (config.data_parallel != "fsdp")
    parts += [f"tensor parallel {config.tensor_parallel}"] * (config.tensor_parallel > 1)
    parts += [f"shard {config.shard}"] * (config.shard > 1)
    other = f" ({', '.join(parts)})" if parts else ""
    return (
        f"{kind}, {number}, {trainer.world.size} ranks on {trainer.world.device.type}{other}: "
        f"{config.layers} layers, {config.experts} experts, top {config.topk}, "
        f"{(shared + experts) / 1e6:.1f} M parameters, {active / 1e6:.1f} M active"
    )


class Metrics:
    """Rank 0's metrics: JSON lines in a file, and the curves in memory."""

    def __init__(self, path: Path, upto: int) -> None:
        self.losses: dict[int, float] = {}
        self.validation: dict[int, float] = {}
        if os.path.lexists(path) and not path.is_file():  # opening a pipe would block
            raise UserError(f"'{path}'", "a file", "something else", "Remove it.")
        kept = read_records(path.read_bytes(), upto) if upto and path.exists() else []
        whole = path.with_name(path.name + ".tmp")
        self.file = whole.open("w")
        for record in kept:
            self.write(record)
        whole.replace(path)

    def write(self, record: dict[str, float]) -> None:
        """Appends one line."""
        step = int(record["step"])
        if "loss" in record:
            self.losses[step] = record["loss"]
        if "validation_loss" in record:
            self.validation[step] = record["validation_loss"]
        self.file.write(json.dumps(record) + "\n")
        try:
            self.file.flush()
        except OSError:
            # Closing fails too. Left to the interpreter's exit, Python 3.13 would report it below the program's error.
            with suppress(OSError):
                self.file.close()
            raise


def read_records(content: bytes, upto: int) -> list[dict[str, Any]]:
    """Returns the records of steps up to ``upto``. Skips lines that a full disk has truncated."""
    records = []
    for line in content.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict) or any(type(value) not in (int, float) for value in record.values()):
            continue
        if any(type(value) is int and abs(value) >= 1 << 63 for value in record.values()):
            continue  # an integer too large for a float
        if type(record.get("step")) is int and record["step"] <= upto:
            records.append(record)
    return records


class Run:
    """Training of one model, from its start or a checkpoint to its end or a stop request."""

    def __init__(self, config: Config, options: Options, world: World, stop: StopRequest) -> None:
        self.config, self.options, self.world, self.stop = config, options, world, stop
        self.out = Path(options.out)
        corpus = load_text(config, options, world)
        self.step, self.interrupted = 0, False
        self.owned = claim_folder(self.out, None if options.resume else config, world, options.preset)
        folder = None
        if options.resume:
            with world.together():
                folder = checkpoint.check(self.out, config)
        self.trainer = Trainer(config, world, corpus, options.cuda_graph)
        if folder is not None:
            self.step = checkpoint.load(folder, self.trainer, world)
            with world.together():
                if self.owned is not None:
                    self.owned.update(config)
        stop.resumable = self._resumable
        dist.barrier(group=world.group)
        self.saved = self.step
        self.pending: list[tuple[int, Tensor]] = []
        self.read_at = time.perf_counter()
        stop.during(STEP)
        self.description = describe(config, self.trainer)
        with world.together():
            if world.first:
                self.metrics = Metrics(self.out / "metrics.jsonl", self.step)
        if world.first:
            say(f"{self.description}\ntext: {corpus.source}, {len(corpus.train) / 1e6:.1f} MB")
            if folder is not None:
                say(f"resumed from {folder}")
                if self.step == config.steps:
                    say(f"all {self.step} steps are done; --steps makes the run longer")
            if config.compile and self.step < config.steps:
                say(about_compiling(config))
            self.bar = tqdm(
                total=config.steps, initial=self.step, unit="step", dynamic_ncols=True, file=sys.stderr,
                mininterval=0.5 if sys.stderr.isatty() else 15,
            )  # fmt: skip

    def train(self) -> bool:
        """Trains; returns whether the end was reached. Saves a checkpoint in both cases."""
        try:
            return self._train()
        finally:
            if self.world.first:
                self.bar.close()

    def _train(self) -> bool:
        config, options = self.config, self.options
        end = min(config.steps, options.stop_at or config.steps)
        read_every = READ_EVERY[self.world.device.type]
        stopping = False
        while self.step < end and not stopping:
            if not self.pending:
                self.stop.during(STEP)
            numbers = self.trainer.step(self.step, self.stop.requested)
            self.step += 1
            self.pending.append((self.step, numbers))
            if self.step % read_every == 0 or self.step == end:
                stopping = self._read()
                self.stop.done()
            if self.step % config.eval_every == 0 or self.step == config.steps:
                self._evaluate()
            if self.step % options.checkpoint_every == 0:
                self._save()
        if self.saved != self.step:
            self._save()
        self.interrupted = stopping and self.step < config.steps
        return self.step == config.steps

    def _read(self) -> bool:
        """Copies the numbers of the last steps to the host. All ranks get the same numbers, so all decide alike."""
        rows = [(step, numbers.tolist()) for step, numbers in self.pending]
        now = time.perf_counter()
        seconds = (now - self.read_at) / len(rows)
        self.pending, self.read_at = [], now
        if self.world.first:
            speed = self.trainer.tokens_per_step / seconds
            for step, (loss, balance, _, norm) in rows:
                self.metrics.write(
                    {
                        "step": step,
                        "loss": loss,
                        "balance_loss": balance,
                        "gradient_norm": norm,
                        "learning_rate": self.trainer.learning_rate(step - 1),
                        "tokens": step * self.trainer.tokens_per_step,
                        "tokens_per_second": round(speed),
                    }
                )
            self.bar.set_postfix_str(f"loss {rows[-1][1][0]:.3f}, {speed:,.0f} tokens/s", refresh=False)
            self.bar.update(len(rows))
        if not all(math.isfinite(number) for number in rows[-1][1]):
            raise UserError(
                f"step {rows[-1][0]}", "a finite loss", str(rows[-1][1][0]), "Lower --lr; --resume goes back."
            )
        return any(numbers[2] > 0 for _, numbers in rows)

    def _evaluate(self) -> None:
        loss = self.trainer.evaluate(before_each=lambda: self.stop.during(STEP))
        if self.world.first:
            self.metrics.write({"step": self.step, "validation_loss": loss})
        self.read_at = time.perf_counter()
        self.stop.during(STEP)

    def _save(self) -> None:
        self.stop.during(SAVING)
        checkpoint.save(self.out, self.step, self.config, self.trainer, self.world)
        self.stop.done()
        self.saved, self.read_at = self.step, time.perf_counter()
        self.stop.during(STEP)

    def _resumable(self) -> str:
        """The newest checkpoint's step. Its folder may be complete while this rank waits for the others' last word."""
        return next((str(int(path.name[5:])) for path in reversed(checkpoints(self.out))), "")

    def finish(self) -> None:
        """Writes the plot and the sample, and prints the paths of the results."""
        self.stop.during("the sample", 0.0)
        text = generate(self.trainer, self.options.sample_length)
        if not self.world.first:
            return
        from moe_lm.plots import loss_curve

        (self.out / "sample.txt").write_text(text)
        metrics = self.metrics
        say(f"\n--- sample ---\n{text}\n--------------")
        if not metrics.losses:
            say(f"no losses in {self.out / 'metrics.jsonl'}, so no plot")
            return
        loss_curve(self.out / "loss.png", metrics.losses, metrics.validation, self.description)
        first, last = min(metrics.losses), max(metrics.losses)
        validation = list(metrics.validation.values())
        say(
            f"loss {metrics.losses[first]:.3f} at step {first}, {metrics.losses[last]:.3f} at step {last}"
            + (f"; validation {validation[-1]:.3f}" if validation else "")
            + " (nats per byte)"
        )
        for name in ("loss.png", "metrics.jsonl", "sample.txt", "checkpoints"):
            say(f"  {self.out / name}")


def load_text(config: Config, options: Options, world: World) -> Corpus:
    """Loads the text, on all ranks or on none. A collective call."""
    with world.together():
        corpus = load_corpus(config.text, config.text_bytes, config.seq_len + 1, options.out)
    return corpus


def claim_folder(out: Path, config: Config | None, world: World, preset: str) -> RunFolder | None:
    """Makes or opens the run's folder: a new one with ``config``, the existing one with None. A collective call.

    The first rank must keep the returned object until the run ends.
    """
    owned = None
    with world.together():
        if world.first:
            owned = RunFolder.old(out) if config is None else RunFolder.new(out, config, preset)
    return owned


def say(text: str) -> None:
    """Prints, and continues if the reader has exited: Ctrl-C also ends ``| tee`` in a pipeline."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
