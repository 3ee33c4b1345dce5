"""The manual's tables of which kernel runs agree with the library."""

from __future__ import annotations

from tests.surface import kernel_table


def test_tables_agree_with_grouped_gemm_plan() -> None:
    assert kernel_table.written() == kernel_table.text(), "run python -m tests.surface.update"
    assert "sm90" in kernel_table.text() and "generic" in kernel_table.text()
