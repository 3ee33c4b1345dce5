"""The arguments ``group`` and ``mesh`` of a layer: the ranks over which its experts are distributed."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from transformer_plugin.config import launched_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def group_and_mesh(
    group: ProcessGroup | DeviceMesh | Literal["local"] | None, mesh: DeviceMesh | None
) -> tuple[ProcessGroup | None, DeviceMesh | None]:
    """Returns the process group (None: this process alone), and the mesh if one was passed."""
    if mesh is not None:
        if not _is_mesh(mesh):
            raise _error(
                "mesh", "a DeviceMesh or None", repr(mesh), "Pass a process group as group=", TypeError
            )
        if group is not None and group != "local":
            raise _error("mesh", "None together with a group", repr(mesh), "Pass one of the two")
        return _group_of(mesh, "mesh"), mesh
    if isinstance(group, str):
        if group != "local":
            raise _error("group", '"local" or a process group', repr(group), "Pass the group, not its name")
        return None, None
    if group is None:
        _check_none()
        return None, None
    if _is_mesh(group):
        return _group_of(group, "group"), group  # type: ignore[return-value]
    if not isinstance(group, dist.ProcessGroup):
        # On a rank that is not a member, new_group() returns a number, not a group.
        expected = "a process group of which this rank is a member, or a DeviceMesh"
        advice = "Make the layer on the ranks of the group only"
        raise _error("group", expected, repr(group), advice, TypeError)
    return group, None


def mesh_of(group: ProcessGroup, device: torch.device) -> DeviceMesh:
    """Returns a one-dimensional mesh over the ranks of a group."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("experts",))


def _is_mesh(value: Any) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(value, DeviceMesh)


def _group_of(mesh: Any, argument: str) -> ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        example = f"mesh[{names[-1]!r}]" if names else "a mesh with mesh_dim_names, and mesh[name]"
        raise _error(argument, "a mesh of one dimension", repr(mesh), f"Pass {example}, for example")
    if mesh.get_coordinate() is None:
        expected = "a mesh of which this rank is a member"
        raise _error(argument, expected, repr(mesh), "Make the layer on the ranks of the mesh only")
    group: ProcessGroup = mesh.get_group()
    return group


def _check_none() -> None:
    """Warns or raises for None before ``init_process_group``: ``dist.group.WORLD`` is then None, too."""
    if not dist.is_available() or dist.is_initialized():
        return
    expected = "a process group, or no argument for all experts on this rank"
    if launched_ranks() > 1:
        got = f"None in one of {launched_ranks()} launched processes, before torch.distributed.init_process_group()"
        advice = 'Call init_process_group() before the layer is made, or pass group="local"'
        raise _error("group", expected, got, advice)
    text = (
        f"transformer_plugin::MoE: argument 'group': expected {expected}, got None. Before "
        "torch.distributed.init_process_group(), torch.distributed.group.WORLD is None, too: all experts are on this "
        "rank. To shard the experts over ranks, call init_process_group() first; otherwise leave group out, or pass "
        'group="local".'
    )
    warnings.warn(text, UserWarning, stacklevel=5)  # where the layer is made, through a decorated constructor


def _error(
    argument: str, expected: str, got: str, advice: str, kind: type[Exception] = ValueError
) -> Exception:
    return kind(f"transformer_plugin::MoE: argument '{argument}': expected {expected}, got {got}. {advice}.")
