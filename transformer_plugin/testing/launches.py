"""What a call launches on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def launched(call: Callable[[], Any]) -> list[str]:
    """The names of the kernels and memsets that a call launches. Call it once before: a first call may launch more."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    return [
        event.name
        for event in profile.events() or []
        if event.device_type == cuda and not event.is_user_annotation and not event.name.startswith("Memcpy")
    ]
