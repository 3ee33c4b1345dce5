"""The tutorial's Python blocks run, in order, in one namespace."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

TUTORIAL = Path(__file__).resolve().parent.parent / "docs" / "tutorial.md"


def test_tutorial_runs() -> None:
    text = TUTORIAL.read_text()
    namespace: dict[str, object] = {"__name__": "tutorial"}
    printed = io.StringIO()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 7
    for block in blocks:
        line = text[: block.start(1)].count("\n")  # so that tracebacks have the line number of the page
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + block.group(1), str(TUTORIAL), "exec"), namespace)
    shown = " ".join(line[2:] for line in text.splitlines() if line.startswith("# transformer_plugin::"))
    assert shown and printed.getvalue().startswith(shown)
