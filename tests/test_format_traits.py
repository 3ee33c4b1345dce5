"""The table of what the ops have for each family of formats: the ops do as it says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from transformer_plugin import ops
from transformer_plugin.formats import FAMILIES, Family, Format


@pytest.mark.parametrize("family", FAMILIES)
def test_traits_are_those_of_the_ops(family: Family) -> None:
    """Each op takes a family exactly if the table says so."""
    traits, x, sizes = Format(family).traits, torch.ones(32, 32), torch.tensor([16, 16])
    one = {"amax": torch.ones(1)} if family in ("fp8_tensor", "nvfp4") else {}
    of_columns = {"amax_t": torch.ones(2), "columnwise": True, "rowwise": False}
    if family == "fp8_tensor":
        of_columns = {"amax": torch.ones(2), "columnwise": True, "rowwise": False}
    elif family != "nvfp4":
        of_columns.pop("amax_t")

    def accepts(call: Callable[[], object]) -> bool:
        try:
            call()
        except ValueError as error:
            assert "argument 'format'" in str(error) or "argument 'columnwise'" in str(error)
            return False
        return True

    assert accepts(lambda: ops.quantize(x, family, **one)) == traits.has_scales
    assert accepts(lambda: ops.quantize(x, family, sizes, **of_columns)) == traits.has_group_columns
    assert accepts(lambda: ops.rms_norm_quantize(x, None, 1e-5, family, **one)) == traits.has_fused_ops
    assert accepts(lambda: ops.activation_quantize(torch.ones(32, 64), family, **one)) == traits.has_fused_ops
    if traits.has_scales:
        assert (ops.quantize(x, family, **one)[1].shape == (32,)) == traits.has_row_scales
