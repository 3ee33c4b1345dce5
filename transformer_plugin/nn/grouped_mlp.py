"""GroupedMLP: the experts of a mixture, SwiGLU feed-forward networks over groups of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.nn.grouped_linear import GroupedLinear
from transformer_plugin.recipes import Recipe


class GroupedMLP(torch.nn.Module):
    """``fc2(swiglu(fc1(input)) * probs)`` for each group with its own weights.

    The probability of a row scales it between the two products, and the bias of ``fc2`` too: the output is
    the expert's output times the probability, and combining is then a plain sum.

    Args:
        num_groups: G, the experts of this rank.
        hidden: H, the columns of input and output.
        ffn_hidden: F, the columns between the products; ``fc1`` gives 2F, the gate first.
        bias: whether both products add a learned bias.
        device, dtype, recipe: as in :class:`GroupedLinear`.

    Parameters: ``fc1.weight [G, 2F, H]``, ``fc2.weight [G, H, F]``, and with bias ``fc1.bias [G, 2F]``,
    ``fc2.bias [G, H]``.
    """

    def __init__(
        self,
        num_groups: int,
        hidden: int,
        ffn_hidden: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        self.fc1 = GroupedLinear(
            num_groups, hidden, 2 * ffn_hidden, bias, device=device, dtype=dtype, recipe=recipe
        )
        self.fc2 = GroupedLinear(
            num_groups, ffn_hidden, hidden, bias, device=device, dtype=dtype, recipe=recipe, scale_bias=bias
        )

    def reset_parameters(self) -> None:
        """Fresh initial values for both products."""
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    def forward(self, input: Tensor, group_sizes: Tensor, probs: Tensor) -> Tensor:
        """Runs the experts.

        Args:
            input: ``[T, H]``, sorted by group.
            group_sizes: int32 or int64 ``[G]`` on the device of ``input``.
            probs: float32 ``[T]``, the weight of each row.

        Returns:
            ``[T, H]`` in the dtype of ``input``, differentiable in ``input``, ``probs`` and the parameters.
            Rows past the last group are zero.
        """
        activation = ops.swiglu(self.fc1(input, group_sizes), probs)
        return self.fc2(activation, group_sizes, probs if self.fc2.scale_bias else None)
