"""The Python blocks of README and of the how-to pages for one process run, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOWTO = ROOT / "docs" / "howto"
#: Pages for several ranks; tests/parallel/test_manual.py runs them.
FOR_RANKS = {"fsdp2.md", "checkpoints.md"}
#: Pages whose blocks need several nodes.
NOT_RUN = {"multi-node.md"}
PAGES = [
    ROOT / "README.md",
    *sorted(path for path in HOWTO.glob("*.md") if path.name not in FOR_RANKS | NOT_RUN),
]


@pytest.mark.skipif(not HOWTO.exists(), reason="needs the source tree")
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_blocks_run(page: Path) -> None:
    text = page.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert blocks
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in blocks:
        line = text[: block.start(1)].count("\n")  # so that tracebacks have the line number of the page
        exec(compile("\n" * line + block.group(1), str(page), "exec"), namespace)


@pytest.mark.skipif(not HOWTO.exists(), reason="needs the source tree")
def test_every_page_is_in_the_navigation() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = [path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")]
    names = {str(page) for page in pages if page.parts[0] != "_build"} - {"index"}
    listed = [line.strip() for line in index.splitlines() if line.strip() in names]
    assert sorted(listed) == sorted(names)
