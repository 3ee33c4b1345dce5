"""The manual's pages on formats: their Python blocks run, their pictures are the script's, no page is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_plugin.formats import FAMILIES, Format

DOCS = Path(__file__).resolve().parent.parent / "docs"
FORMATS = [family for family in FAMILIES if Format(family).is_quantized]


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_run(name: str) -> None:
    page = DOCS / "formats" / f"{name}.md"
    text = page.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert blocks
    namespace: dict[str, object] = {"__name__": name}
    for block in blocks:
        line = text[: block.start(1)].count("\n")  # so that tracebacks have the line number of the page
        exec(compile("\n" * line + block.group(1), str(page), "exec"), namespace)


def test_every_format_has_a_page_a_row_and_a_picture() -> None:
    index = (DOCS / "formats" / "index.md").read_text()
    for name in FORMATS:
        assert f"[`{name}`]({name}.md)" in index
        page = (DOCS / "formats" / f"{name}.md").read_text()
        assert page.startswith(f"# {name}\n") and f"(../images/format_{name}.svg)" in page
        for heading in ("## Arithmetic", "## Layout", "## When to use it"):
            assert heading in page, f"{name}: {heading}"


def test_pictures_are_what_the_script_draws(tmp_path: Path) -> None:
    script = tmp_path / "draw_formats.py"
    script.write_text((DOCS / "images" / "draw_formats.py").read_text())
    subprocess.run([sys.executable, str(script)], check=True)
    drawn = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert drawn == sorted(f"format_{name}.svg" for name in FORMATS)
    for name in drawn:
        assert (tmp_path / name).read_text() == (DOCS / "images" / name).read_text(), name


def test_picture_of_the_layers(tmp_path: Path) -> None:
    for name in ("draw_formats.py", "draw_layers.py"):
        (tmp_path / name).write_text((DOCS / "images" / name).read_text())
    subprocess.run([sys.executable, str(tmp_path / "draw_layers.py")], check=True)
    assert (tmp_path / "layers.svg").read_text() == (DOCS / "images" / "layers.svg").read_text()
