"""Names of groups as layers keep them: with the rank of this process, so that another group of the name is noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from transformer_plugin.tensor._layout import message

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def name_with_rank(group_name: str, rank: int) -> str:
    """The argument ``group_name`` of an op that raises if this process has another rank in the group of the name.

    A world that is destroyed and created again has the same name. What a layer holds is that of its old rank.
    """
    return f"{group_name}#rank={rank}"


def group_named(op: str, group_name: str, rank: int) -> ProcessGroup:
    """The group of a name, in which this process has the rank that it had when a layer was made.

    Raises:
        ValueError: there is no such group, or this process has another rank in it.
    """
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    expected = f"the group '{group_name}' in which this process is rank {rank}, as when the layer was made"
    try:
        group: ProcessGroup = resolve(group_name)
        got = f"one in which it is rank {dist.get_rank(group)}"
    except (RuntimeError, ValueError, KeyError):
        got = "no such group"
    if got != f"one in which it is rank {rank}":
        advice = "Make the layer again with the new group, and load its state_dict()"
        raise ValueError(message(op, "group_name", expected, got, advice))
    return group
