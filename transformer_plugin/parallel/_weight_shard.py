"""The key that tells ops how a weight is sharded over ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightShard:
    """How the rows of a weight are sharded over the ranks of a group, see :mod:`transformer_plugin.ops.sharded`.

    ``str()`` of it is the argument ``weight_shard`` of the ops of layers, and ``shard`` of
    :func:`~transformer_plugin.ops.gather_weight`.
    """

    #: Rows of the whole weight, or matrices of a stack; with ``list`` rows of every matrix of a list.
    rows: int
    #: Size of the group.
    ranks: int
    #: ``group_name`` of the c10d group. With ``"#rank=0"`` after it this process must have that rank in the group.
    group_name: str
    #: Whether the gradient is the mean over the ranks, or their sum.
    mean: bool = True
    #: Whether gradients travel in bfloat16 where they are added to float32.
    bfloat16_parts: bool = False
    #: Whether, on CUDA, gradients are complete at the end of the backward, and not before.
    asynchronous: bool = False
    #: For each wait on other ranks; None: the timeout of the group.
    timeout_ms: int | None = None
    #: A number of the weights that are used together and exist as long as each other; only those are gathered ahead of
    #: their use, one after the other. 0: none.
    set: int = 0
    #: Of the parameter, for errors; "" for none.
    name: str = ""
    #: Whether the weight is a list of matrices, of each of which the rows are sharded.
    each: bool = False

    def __str__(self) -> str:
        options = ["list"] if self.each else []
        options += ["mean"] if self.mean else []
        options += ["reduce_dtype=bf16"] if self.bfloat16_parts else []
        options += ["async"] if self.asynchronous else []
        options += [] if self.timeout_ms is None else [f"timeout_ms={self.timeout_ms}"]
        options += [f"param_group={self.set}"] if self.set else []
        options += [f"name={self.name}"] if self.name else []
        return ",".join([f"rows={self.rows}", f"ranks={self.ranks}", *options, f"group={self.group_name}"])
