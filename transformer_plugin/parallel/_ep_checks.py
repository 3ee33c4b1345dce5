"""Checks of the arguments of expert parallelism, and of what other ranks send of theirs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from transformer_plugin._arguments import check_strided
from transformer_plugin.tensor._layout import describe, message

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from transformer_plugin.parallel.expert import EpConfig


def check_type(op: str, name: str, value: Any, kind: Any, expected: str, advice: str = "") -> None:
    """Refuses a value of another type, and tensors whose sizes torch does not tell."""
    if not isinstance(value, kind):
        raise TypeError(message(op, name, expected, describe(value), advice or f"Pass {expected}"))
    if kind is Tensor:
        check_strided(op, name, value)


def device_named(device: Any, op: str) -> torch.device:
    """The device of an argument."""
    try:
        return torch.device(device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(message(op, "device", "a device", repr(device), "Pass for example 'cuda'")) from None


def device_of(group: ProcessGroup | None) -> torch.device:
    """The device of a group's tensors: this process's GPU with NCCL, else the CPU."""
    if group is not None and dist.get_backend(group) != "gloo" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def refuse(
    argument: str, expected: str, got: Any, op: str, advice: str = "Pass what the context was made for"
) -> None:
    raise ValueError(
        f"transformer_plugin::{op}: argument '{argument}': expected {expected}, got {got}. {advice}."
    )


def configuration_of(text: str, rank: int) -> dict[str, Any]:
    """What a rank sent. Another rank may run other code, and send anything."""
    try:
        configuration = json.loads(text)
    except (ValueError, RecursionError):
        configuration = None
    if not isinstance(configuration, dict):
        shown = repr(text if len(text) <= 80 else text[:80] + "...")
        advice = "Make the same calls in the same order on every rank, with one version of the package"
        expected = "the configuration of an EpContext from every rank"
        refuse("group", expected, f"{shown} from rank {rank}", "EpContext", advice)
    return configuration


def check_same(mine: dict[str, Any], texts: list[str], group_name: str) -> None:
    """Refuses configurations of which one is unlike the others; ``texts`` are what the ranks sent."""
    all_ranks = [configuration_of(text, rank) for rank, text in enumerate(texts)]
    names = dict.fromkeys(name for other in (mine, *all_ranks) for name in other)
    values = {name: [repr(other.get(name, "missing")) for other in all_ranks] for name in names}
    differing = [name for name, each in values.items() if len(set(each)) > 1]
    if not differing:
        return
    differences = "; ".join(
        f"{name} is " + ", ".join(f"{value} on rank {r}" for r, value in enumerate(values[name]))
        for name in differing
    )
    raise ValueError(
        f"transformer_plugin::EpContext: argument '{differing[0]}': expected the same configuration on all "
        f"{len(texts)} ranks of group '{group_name}', got different ones: {differences}. "
        "Pass the same arguments on every rank."
    )


def check_limit(config: EpConfig, transport: str, reason: str) -> None:
    """Refuses a limit of multiprocessors that the transport would not obey. One rank obeys any."""
    limit = config.max_num_sms
    if limit and transport not in ("one_sided", "none"):
        expected = f"0 with the transport '{transport}' ({reason}), whose kernels have no limit"
        refuse("max_num_sms", expected, limit, "EpContext", "Pass 0, or choose the transport 'one_sided'")


def check_config(config: EpConfig, ranks: int, timeout: float) -> None:
    op = "EpContext"
    for name in ("num_experts", "max_tokens_per_rank", "hidden_dim", "num_topk", "alignment"):
        check_type(op, name, getattr(config, name), int, "an integer")
    if config.capacity is not None:
        check_type(op, "capacity", config.capacity, int, "an integer or None")
    received = config.max_received_tokens
    if received is not None:
        check_type(op, "max_received_tokens", received, int, "an integer or None")
        if isinstance(received, bool) or not 1 <= received < 2**31:
            advice = "Pass None for the tokens of all ranks"
            refuse("max_received_tokens", "from 1 to 2^31 - 1, or None", received, op, advice)
    check_type(op, "timeout", timeout, int | float, "a number of seconds")
    check_type(op, "overflow", config.overflow, str, "'raise' or 'drop'", "Choose one of them")
    for name in ("num_experts", "max_tokens_per_rank", "hidden_dim", "num_topk"):
        if not 1 <= getattr(config, name) < 2**31:
            refuse(name, "from 1 to 2^31 - 1", getattr(config, name), op, "Pass a positive size")
    if config.num_experts < ranks:
        refuse(
            "num_experts",
            f"at least one expert for each of the {ranks} ranks",
            config.num_experts,
            op,
            "Use more experts or a smaller group",
        )
    if config.num_experts % ranks:
        refuse(
            "num_experts",
            f"a multiple of the {ranks} ranks",
            config.num_experts,
            op,
            "Give every rank the same number of experts",
        )
    if not 0 <= config.alignment < 2**31 or config.alignment & (config.alignment - 1):
        refuse(
            "alignment", "0, 1 or a power of two below 2^31", config.alignment, op, "Pass 1 for no padding"
        )
    if config.capacity is not None and not 0 <= config.capacity < 2**31:
        refuse(
            "capacity",
            "from 0 to 2^31 - 1 rows, or None",
            config.capacity,
            op,
            "Pass None for enough rows for any routing",
        )
    if config.overflow not in ("raise", "drop"):
        refuse("overflow", "'raise' or 'drop'", repr(config.overflow), op, "Choose one of them")
    expected = "'auto', 'all_gather', 'all_to_all' or 'one_sided'"
    check_type(op, "transport", config.transport, str, expected, "Choose one of them")
    if config.transport not in ("auto", "all_gather", "all_to_all", "one_sided"):
        refuse("transport", expected, repr(config.transport), op, "Choose one of them")
    check_type(op, "max_token_dtype", config.max_token_dtype, torch.dtype, "a dtype")
    limit = config.max_num_sms
    check_type(op, "max_num_sms", limit, int, "an integer")
    if isinstance(limit, bool) or not 0 <= limit < 2**31:
        refuse("max_num_sms", "from 0 to 2^31 - 1", limit, op, "Pass 0 for all multiprocessors")
    if not 0 < timeout < 1e9:
        refuse("timeout", "a positive number of seconds below 1e9", timeout, op, "Pass for example 60.0")


def check_columns(topk_weights: Tensor) -> None:
    """Raises an error for weights without columns."""
    if topk_weights.dim() == 0 or topk_weights.shape[-1] == 0:
        refuse("topk_weights", "[..., K] with at least one column", tuple(topk_weights.shape), "dispatch")


def group_exists(group: ProcessGroup) -> bool:
    """Whether the group's name still refers to this group object, and not to a newer group of the same name."""
    try:
        return torch._C._distributed_c10d._resolve_process_group(group.group_name) is group
    except RuntimeError:
        return False
