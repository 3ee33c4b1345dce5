"""Arguments for an op: valid calls with some arguments changed, and arbitrary values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.testing.every_op import Sizes, calls, registered

BIG = 2**40
#: Devices and sizes of the valid calls. Large tensors have no elements, or are on meta.
TABLES = (
    ("cpu", Sizes()),
    ("cpu", Sizes(T=0, groups=(0, 0, 0))),
    ("cpu", Sizes(groups=())),
    ("cpu", Sizes(N=0, K=0)),
    ("cpu", Sizes(T=0, N=0, K=BIG, groups=(0, 0, 0))),
    ("cpu", Sizes(T=BIG, N=0, K=0, groups=(0, 0, 0))),
    ("meta", Sizes()),
    ("meta", Sizes(T=BIG, N=2**20, K=2**20)),
    ("meta", Sizes(T=2**31 - 128, N=2**31, K=256)),
)
INTEGERS = (
    0,
    1,
    2,
    3,
    7,
    32,
    128,
    -1,
    -2,
    2**31 - 1,
    2**31,
    2**32,
    2**39,
    2**62,
    2**63 - 1,
    -(2**31),
    -(2**63),
)
FLOATS = (0.0, 1.0, -1.0, 1e-5, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"))
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
)
STRINGS = (
    *(
        "none",
        "bf16",
        "fp8_tensor",
        "fp8_tensor:e5m2,pow2",
        "fp8_block",
        "fp8_block:square",
        "fp8_block:aligned",
    ),
    *(
        "mxfp8",
        "mxfp8:square,tiled",
        "nvfp4",
        "nvfp4:square,sr",
        "nvfp4:rht,sr",
        "nvfp4:row_scaled",
        "nvfp4:4over6",
    ),
    *("swiglu", "swiglu:interleave=32", "swiglu:interleave=16"),
    *("softmax", "sigmoid", "sqrtsoftplus", "max", "most_recent", "forward", "weight_grad", "e5m2", ""),
    *(
        "fp8_block:eps=1e999",
        "fp8_block:eps=",
        "nvfp4:",
        ":",
        "fp8_tensor:e4m3,e4m3",
        "é\0ß",
        "x" * 5000,
        "%s%n",
    ),
)
LENGTHS = (0, 0, 1, 1, 2, 3, 16, 17, 32, 127, 128, 129, 256)
HUGE = (2**31 - 1, 2**31, 2**32, 2**39, 2**40, 2**62)

Mutation = Callable[[random.Random, Tensor, list[Tensor]], Any]


def random_tensor(rng: random.Random) -> Tensor:
    """A tensor of any dtype, shape, strides and device, small or without elements."""
    sizes = [rng.choice(LENGTHS) for _ in range(rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4)))]
    if sizes and rng.random() < 0.2:
        sizes[rng.randrange(len(sizes))] = rng.choice(HUGE)
    elements = 1
    for size in sizes:
        elements *= size
    dtype = rng.choice(DTYPES)
    if elements > 2**20:
        if elements < 2**62 and rng.random() < 0.5:
            return torch.empty(sizes, dtype=dtype, device="meta")
        return fill(rng, (1,) * len(sizes), dtype).expand(sizes) if elements < 2**62 else torch.empty(0)
    return fill(rng, tuple(sizes), dtype)


def fill(rng: random.Random, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Fills a tensor with numbers, limits of an integer's range, or random bits."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    tensor = torch.empty(sizes, dtype=dtype)
    if tensor.numel() == 0:
        return tensor
    if dtype in (torch.int32, torch.int64) and rng.random() < 0.6:
        values = [wrapped(rng.choice(INTEGERS), dtype) for _ in range(min(tensor.numel(), 64))]
        flat = tensor.view(-1)
        for i in range(0, flat.numel(), len(values)):
            part = flat[i : i + len(values)]
            part.copy_(torch.tensor(values[: part.numel()], dtype=dtype))
        return tensor
    if dtype.is_floating_point and tensor.element_size() > 1 and rng.random() < 0.8:
        return torch.randn(sizes, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.rand(sizes, generator=generator) < 0.5
    bytes_of = tensor.view(-1).view(torch.uint8)
    bytes_of.copy_(torch.randint(256, bytes_of.shape, generator=generator))
    return tensor


def wrapped(value: int, dtype: torch.dtype) -> int:
    """Wraps the integer to 32 bits for 32-bit dtypes."""
    return value if dtype == torch.int64 else (value + 2**31) % 2**32 - 2**31


def other_dtype(rng: random.Random, tensor: Tensor, others: list[Tensor]) -> Tensor:
    dtype = rng.choice(DTYPES)
    if tensor.is_meta or tensor.numel() > 2**20:
        return torch.empty(tensor.shape, dtype=dtype, device="meta")
    return fill(rng, tuple(tensor.shape), dtype)


def other_size(rng: random.Random, tensor: Tensor, others: list[Tensor]) -> Tensor:
    if tensor.dim() == 0:
        return tensor[None]
    sizes = list(tensor.shape)
    for _ in range(rng.choice((1, 1, 2))):
        sizes[rng.randrange(len(sizes))] = rng.choice((*LENGTHS, *HUGE))
    elements = 1
    for size in sizes:
        elements *= size
    if elements >= 2**62:
        sizes[rng.randrange(len(sizes))] = 0
        elements = 0
    if tensor.is_meta or (elements > 2**20 and rng.random() < 0.3):
        return torch.empty(sizes, dtype=tensor.dtype, device="meta")
    if elements > 2**20:
        return fill(rng, (1,) * len(sizes), tensor.dtype).expand(sizes)
    return fill(rng, tuple(sizes), tensor.dtype)


def other_values(rng: random.Random, tensor: Tensor, others: list[Tensor]) -> Tensor:
    if tensor.is_meta or tensor.numel() > 2**20:
        return tensor
    return fill(rng, tuple(tensor.shape), tensor.dtype)


def other_strides(rng: random.Random, tensor: Tensor, others: list[Tensor]) -> Tensor:
    kind = rng.randrange(4)
    if kind == 0 and tensor.dim() >= 2:
        return tensor.transpose(0, -1)
    if tensor.numel() > 2**20 or tensor.is_meta or tensor.dim() == 0:
        return tensor
    if kind == 1:
        return fill(rng, (*tensor.shape[:-1], 2 * tensor.shape[-1]), tensor.dtype)[..., ::2]
    if kind == 2:
        return fill(rng, (1,) * tensor.dim(), tensor.dtype).expand(tensor.shape)
    bigger = fill(rng, (tensor.numel() * tensor.element_size() + 16,), torch.uint8)
    offset = rng.choice((1, 2, 4, 8)) if tensor.element_size() == 1 else tensor.element_size()
    cut = bigger[offset : offset + tensor.numel() * tensor.element_size()]
    return cut.view(tensor.dtype).view(tensor.shape)


def negated(rng: random.Random, tensor: Tensor, others: list[Tensor]) -> Tensor:
    """Sets the negative or the conjugate bit."""
    if (
        tensor.is_meta
        or tensor.numel() > 2**20
        or tensor.dtype not in (torch.float32, torch.float64, torch.float16)
    ):
        return torch.ones(tensor.shape, dtype=torch.complex64, device=tensor.device).conj()
    z = torch.complex(tensor, tensor).conj()
    return z.imag if rng.random() < 0.8 else z


def other_device(rng: random.Random, tensor: Tensor, others: list[Tensor]) -> Tensor:
    return (
        torch.empty_like(tensor, device="meta") if not tensor.is_meta else torch.empty(0, dtype=tensor.dtype)
    )


def other_dim(rng: random.Random, tensor: Tensor, others: list[Tensor]) -> Tensor:
    if rng.random() < 0.5 or tensor.dim() == 0:
        return tensor[None]
    return tensor[0] if tensor.shape[0] else tensor.flatten()


def wants_gradient(rng: random.Random, tensor: Tensor, others: list[Tensor]) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def same_memory(rng: random.Random, tensor: Tensor, others: list[Tensor]) -> Tensor:
    other = rng.choice(others) if others else tensor
    if other.is_meta or tensor.is_meta or not other.is_contiguous():
        return other
    held, wanted = other.view(-1).view(torch.uint8), tensor.numel() * tensor.element_size()
    if held.numel() < wanted or tensor.numel() == 0:
        return other
    return held[:wanted].view(tensor.dtype).view(tensor.shape)


def strange(rng: random.Random, tensor: Tensor, others: list[Tensor]) -> Any:
    kind = rng.randrange(7)
    if kind == 0:
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    if kind == 1:
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    if kind == 2:
        return torch.ones(4, 32).to_sparse()
    if kind == 3:
        return torch.quantize_per_tensor(torch.ones(4, 32), 0.1, 0, torch.quint8)
    if kind == 4:
        return list(range(3))
    return None if kind == 5 else random_tensor(rng)


MUTATIONS: tuple[Mutation, ...] = (
    *(other_dtype, other_size, other_size, other_size, other_values, other_values, other_strides, negated),
    *(other_device, other_dim, wants_gradient, same_memory, strange),
)


def mutate(rng: random.Random, value: Any, type_name: str, others: list[Tensor]) -> Any:
    """Returns another value of the argument, mostly of its type."""
    if isinstance(value, Tensor):
        return rng.choice(MUTATIONS)(rng, value, others)
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        changed = list(value)
        for _ in range(rng.choice((1, 1, 2))):
            kind, at = rng.randrange(4), rng.randrange(len(changed)) if changed else 0
            if kind == 0 and changed:
                del changed[at]
            elif kind == 1:
                changed.append(rng.choice(value))
            elif changed:
                changed[at] = (
                    rng.choice(MUTATIONS)(rng, changed[at], others) if _is_tensor(changed[at]) else None
                )
        return changed
    return anything(rng, type_name)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def anything(rng: random.Random, type_name: str) -> Any:
    """Returns any value of this type of a schema."""
    if type_name.startswith("Optional[") and rng.random() < 0.3:
        return None
    base = type_name.removeprefix("Optional[").rstrip("]") if type_name.startswith("Optional[") else type_name
    if base.startswith("List[Tensor"):
        return [random_tensor(rng) for _ in range(rng.choice((0, 1, 2, 3)))]
    if base.startswith("List[str"):
        return [rng.choice(STRINGS) for _ in range(rng.choice((0, 1, 3)))]
    if base == "Tensor":
        return random_tensor(rng)
    if base == "int":
        return rng.choice((*INTEGERS, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64))
    if base == "float":
        return rng.choice(FLOATS)
    if base == "bool":
        return rng.random() < 0.5
    if base == "str":
        return rng.choice(STRINGS)
    return rng.choice((*DTYPES, None, 3))


class Tables:
    """Valid calls of every op, with several sizes and devices, from which others are derived."""

    def __init__(self) -> None:
        self.schemas = registered()
        self.calls: dict[str, list[list[dict[str, Any]]]] = {op: [] for op in self.schemas}
        for device, sizes in TABLES:
            found: dict[str, list[dict[str, Any]]] = {}
            for call in calls(sizes, device, strict=False):
                found.setdefault(call.op, []).append(call.arguments)
            for op, ones in found.items():
                self.calls[op].append(ones)

    def draw(self, op: str, seed: int) -> dict[str, Any]:
        """Returns arguments by name, which depend only on the seed."""
        rng = random.Random(f"{op} {seed}")
        arguments = self.schemas[op].arguments
        if rng.random() < 0.15:
            drawn = {a.name: anything(rng, str(a.type)) for a in arguments if a.name not in ("group_name",)}
            return {**drawn, **{a.name: "" for a in arguments if a.name == "group_name"}}
        tables = self.calls[op]
        table = tables[0] if rng.random() < 0.5 else rng.choice(tables)
        given = {name: copied(value) for name, value in rng.choice(table).items()}
        tensors = [value for value in given.values() if isinstance(value, Tensor)]
        changed = [a for a in arguments if a.name != "group_name"]
        for argument in rng.sample(changed, min(len(changed), rng.choice((0, 1, 1, 1, 2, 2, 3)))):
            given[argument.name] = mutate(rng, given.get(argument.name), str(argument.type), tensors)
        return given


def copied(value: Any) -> Any:
    """Returns a copy to which a call may write; a tensor with one value everywhere is returned itself."""
    if isinstance(value, list):
        return [copied(item) for item in value]
    return value.clone() if isinstance(value, Tensor) and value.numel() <= 2**24 else value
