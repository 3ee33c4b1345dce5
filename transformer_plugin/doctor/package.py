"""What the package says of itself, in a process that can import it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transformer_plugin import _library
from transformer_plugin._schemas import SCHEMAS
from transformer_plugin.doctor import values
from transformer_plugin.recipes import RECIPES
from transformer_plugin.support import explain_support

#: What explain_support says of products, before the lines of a GPU.
_PRODUCTS = "products: "


def loaded() -> dict[str, Any]:
    """The library, and whether it has kernels for GPUs."""
    has_kernels = torch._C._dispatch_has_kernel_for_dispatch_key("transformer_plugin::quantize", "CUDA")
    return {"library": _library.LIBRARY.name, "ops": len(SCHEMAS), "has_kernels": bool(has_kernels)}


def _by_text(lines: list[str]) -> str:
    """``forward: a``, ``data_grad: a``, ``weight_grad: b`` as one line in which equal ones stand together."""
    names: dict[str, list[str]] = {}
    for line in lines:
        product, _, text = line.strip().partition(": ")
        names.setdefault(text, []).append(product)
    return "; ".join(f"{', '.join(products)}: {text}" for text, products in names.items())


def kernels(device: str) -> dict[str, list[str]]:
    """What multiplies with each recipe on a device, and why nothing faster does: of explain_support."""
    found = {}
    for name, recipe in RECIPES.items():
        lines = explain_support(recipe, device).splitlines()
        at = next((i for i, line in enumerate(lines) if line.startswith(_PRODUCTS)), None)
        if at is None:  # it says that nothing runs there
            found[name] = lines[:1]
            continue
        found[name] = [_by_text(lines[at + 1 :]) or lines[at].removeprefix(_PRODUCTS)]
        if device != "cpu":  # where no recipe is faster than another
            found[name] += [line for line in lines[:at] if line.startswith(("widths such as", "speed: "))]
    return found


def examine(device: str) -> dict[str, dict[str, Any]]:
    """The kernels of a device, and what of its values is wrong: of each a ``result`` or an ``error``."""
    looks: dict[str, Callable[[], Any]] = {
        "kernels": lambda: kernels(device),
        "bytes": lambda: values.wrong_bytes(torch.device(device)),
        "products": lambda: values.wrong_products(torch.device(device)),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, look in looks.items():
        try:
            found[name] = {"result": look()}
        except Exception as error:  # the others may work
            found[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return found


def shared_memory(device_name: str, rank: int, ranks: int, port: int, seconds: float) -> list[Any]:
    """Whether the GPUs of all ranks, one each, reach each other's memory, and why not; on this rank."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from transformer_plugin.ops import peer_memory_support

    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = timedelta(seconds=seconds)
    store = TCPStore("127.0.0.1", port, ranks, rank == 0, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    group = dist.group.WORLD
    assert group is not None
    answer = list(peer_memory_support(group.group_name, int(seconds * 1000), device))
    dist.barrier()  # nobody leaves while another one reads
    dist.destroy_process_group()
    return answer
