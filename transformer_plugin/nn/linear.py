"""Linear: torch.nn.Linear with a recipe."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.nn._recipe import TakesRecipe
from transformer_plugin.recipes import Recipe


class Linear(TakesRecipe, torch.nn.Linear):
    """``input @ weight.T + bias``, with the operands in the formats of a recipe.

    A drop-in for :class:`torch.nn.Linear`: the same constructor, initial values, parameters and
    ``state_dict``, and one keyword more. It is a ``torch.nn.Linear``, so code that looks for those finds it.

    Args:
        in_features: K, the last dimension of the input. With ``Float8BlockScaling`` any K is right; multiples
            of 128 waste nothing. With ``MXFP8BlockScaling`` a multiple of 32.
        out_features: N, the last dimension of the output; with ``MXFP8BlockScaling`` a multiple of 32.
        bias: whether to add a learned ``[N]``.
        device, dtype: of the parameters; ``device="meta"`` defers the initial values to
            ``reset_parameters()``.
        recipe: the formats of input, weight and gradient; None multiplies in the dtype of the parameters.

    Shapes: input ``[..., K]``, output ``[..., N]`` in the dtype of the input.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = recipe

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        return ops.linear(input, self.weight, self.bias, *self._formats)

    def extra_repr(self) -> str:
        """The sizes, and the recipe where there is one."""
        return super().extra_repr() + (f", recipe={self.recipe}" if self.recipe else "")
