"""Random numbers of tensor-parallel ranks."""

from __future__ import annotations

import hashlib
from types import TracebackType
from typing import Any

import torch


class TensorParallelRNG:
    """A context in which each rank of a group draws other random numbers: for dropout of what ranks have slices of.

    ::

        random = TensorParallelRNG(mesh["tp"])
        with random:
            hidden = torch.nn.functional.dropout(hidden, 0.1)  # hidden: this rank's columns, or its rows
        output = torch.nn.functional.dropout(output, 0.1)  # the same on all ranks

    As with torch's ``DTensor`` the ranks' generators stay in step: where they had the same state before, and drew
    equally many numbers inside, they have the same state afterwards. There is no other state, so a checkpoint of
    torch's generators is enough, and activation checkpointing repeats the same numbers. Not under ``torch.compile``,
    and not while a CUDA graph is captured.

    Args:
        group: a process group, or a mesh of one dimension.
        device: whose default generator is used; None: the current GPU if there is one, otherwise the CPU.
    """

    def __init__(self, group: Any, device: torch.device | str | None = None) -> None:
        from transformer_plugin.nn._tensor_parallel import group_of

        _, ranks = group_of("TensorParallelRNG", group)
        self._place = ranks.index(torch.distributed.get_rank())
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.init()
        #: The generator's state on a CPU, its seed on a GPU; a context may be entered in itself.
        self._saved: list[Any] = []

    def _generator(self) -> torch.Generator:
        if self._device.type == "cpu":
            return torch.default_generator
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        generator: torch.Generator = torch.cuda.default_generators[index]
        return generator

    def __enter__(self) -> TensorParallelRNG:
        generator = self._generator()
        if self._device.type == "cpu":
            # One number of the common state seeds the numbers inside, so that they differ each time.
            common = int(torch.randint(2**62, (), generator=generator))
            self._saved.append(generator.get_state())
            generator.manual_seed(self._mixed(common))
        else:
            seed, offset = generator.initial_seed(), generator.get_offset()
            self._saved.append(seed)
            generator.manual_seed(self._mixed(seed))
            generator.set_offset(offset)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        generator, saved = self._generator(), self._saved.pop()
        if self._device.type == "cpu":
            generator.set_state(saved)
        else:
            offset = generator.get_offset()
            generator.manual_seed(saved)
            generator.set_offset(offset)

    def _mixed(self, seed: int) -> int:
        text = f"{seed} {self._place}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
