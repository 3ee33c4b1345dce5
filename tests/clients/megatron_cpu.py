"""megatron-core on CPUs: what it asks of CUDA, answered with a CPU.

Megatron makes its buffers on ``torch.cuda.current_device()``, some tensors on ``"cuda"``, and sorts parameters by the
name that ``type()`` gives. All else that it does to a model is plain torch and runs anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **options: Any) -> Tensor:
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return make(*args, **options)

    return made


def _type(self: Tensor, *args: Any, **options: Any) -> Any:
    result = torch._C.TensorBase.type(self, *args, **options)
    return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result


@contextmanager
def for_device(device: torch.device) -> Iterator[None]:
    """Context in which megatron-core runs on a device, which may be a CPU."""
    with ExitStack() as stack:
        if device.type == "cpu":
            for name in ("tensor", "zeros"):
                stack.enter_context(patch.object(torch, name, _on_cpu(getattr(torch, name))))
            stack.enter_context(patch.object(torch.Tensor, "type", _type))
            stack.enter_context(patch.object(torch.cuda, "current_device", lambda: device))
            stack.enter_context(patch.object(torch.cuda, "current_stream", lambda: None))
        yield
