"""Public schemas and names change only on purpose, and every op has kernels, a wrapper, a reference and a page."""

from __future__ import annotations

import inspect
import json
import re
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.surface.surface import FROZEN, NAMESPACE, ROOT, op_schemas, surface
from transformer_plugin import ops, reference
from transformer_plugin.ops import expert_parallel
from transformer_plugin.reference import (
    expert_parallel as expert_parallel_reference,
)
from transformer_plugin.reference import (
    tensor_parallel as tensor_parallel_reference,
)

OPS = sorted(op_schemas())
# Ops without tensors, which communicate with other ranks' hosts, and those of a tensor's memory: they need neither
# kernels nor a reference.
HOST_OPS = {name for name, schema in op_schemas().items() if "Tensor" not in schema}
HOST_OPS |= {"is_symmetric", "symmetric_empty"}
TENSOR_OPS = [name for name in OPS if name not in HOST_OPS]
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
by_op = pytest.mark.parametrize("name", TENSOR_OPS)
HINT = "If that is meant, run `python -m tests.surface.update` and commit the difference."


def wrapper_of(name: str) -> Any:
    """Returns the wrapper from ``ops``, or from ``ops.expert_parallel``, whose names are clear only within the
    module."""
    name = name.split(".")[0]
    family: ModuleType = expert_parallel if hasattr(expert_parallel, name) else ops
    if family is ops:
        assert name in ops.__all__
    return getattr(family, name)


@pytest.mark.parametrize("part", ["ops", "names", "environment"])
def test_public_surface_is_frozen(part: str) -> None:
    frozen, now = json.loads(FROZEN.read_text())[part], surface()[part]
    assert now == frozen, HINT


def test_registration_lists_every_op_and_no_other() -> None:
    text = (ROOT / "csrc" / "registration.cpp").read_text()
    assert sorted(re.findall(r'm\.def\(\s*"([\w.]+)\(', text)) == OPS


def test_host_ops_are_few() -> None:
    assert {
        "all_gather_text",
        "check_group_sizes",
        "clear_gathers",
        "compare_header",
        "configure_gathers",
        "count_deferred_wgrads",
        "count_gathers",
        "grouped_gemm_plan",
        "new_wgrad_queue",
        "invalidate_prefetched",
        "is_symmetric",
        "open_channel",
        "peer_memory_support",
        "release_group",
        "release_wgrad_queue",
        "select_transport",
        "symmetric_allocate",
        "symmetric_empty",
    } >= HOST_OPS


@by_op
def test_op_has_a_kernel_for_every_backend(name: str) -> None:
    if has_kernel(f"{NAMESPACE}::{name}", "CompositeImplicitAutograd"):
        return  # one function for all of them, which calls other ops
    keys = ["CPU", "Meta"]
    if has_kernel(f"{NAMESPACE}::activation", "CUDA"):  # only if built with CUDA
        keys.append("CUDA")
    assert [key for key in keys if not has_kernel(f"{NAMESPACE}::{name}", key)] == []


@by_op
def test_op_has_a_wrapper_with_the_same_arguments(name: str) -> None:
    wrapper = wrapper_of(name)
    assert len(inspect.getdoc(wrapper) or "") > 40, "the wrapper needs a docstring"
    packet = getattr(getattr(torch.ops, NAMESPACE), name.split(".")[0])
    arguments: dict[str, None] = {}
    for overload in ("default", *(each for each in packet.overloads() if each != "default")):
        arguments |= dict.fromkeys(a.name for a in getattr(packet, overload)._schema.arguments)
    assert list(inspect.signature(wrapper).parameters) == list(arguments)


@by_op
def test_op_has_a_reference(name: str) -> None:
    name = name.split(".")[0]
    forward = name.removesuffix("_backward")  # the gradient of a reference comes from torch's autograd
    names = [name, forward] + [n.replace("_quantized", "") for n in (name,) if "_quantized" in n]
    modules = (reference, expert_parallel_reference, tensor_parallel_reference)
    assert any(hasattr(module, n) for module in modules for n in names)


@pytest.fixture(scope="module")
def pages() -> list[str]:
    return [path.read_text() for path in (ROOT / "docs").rglob("*.md")]


@by_op
def test_op_is_in_the_manual(name: str, pages: list[str]) -> None:
    module = wrapper_of(name).__module__
    assert any(f"automodule:: {module}\n" in page for page in pages), f"no page of docs/ documents {module}"
