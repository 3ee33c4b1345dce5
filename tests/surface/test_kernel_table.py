"""The manual's tables of which kernel runs are what the library answers."""

from __future__ import annotations

from tests.surface import kernel_table


def test_the_tables_are_the_answers_of_the_plan() -> None:
    assert kernel_table.written() == kernel_table.text(), "run python -m tests.surface.update"
    assert "sm90" in kernel_table.text() and "generic" in kernel_table.text()
