"""Facts of an installation, and the report of them, as text or as JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

#: ``ok``: as it should be. ``no``: not there, or not used, which is no fault. ``FAILED``: a fault.
Mark = Literal["ok", "no", "FAILED"]

WIDTH = 120


@dataclass(frozen=True)
class Fact:
    """One line of the report. A fault says what to do."""

    mark: Mark
    name: str
    value: str
    todo: str = ""


@dataclass
class Section:
    """Facts under one heading."""

    name: str
    facts: list[Fact] = field(default_factory=list)

    def ok(self, name: str, value: str) -> None:
        self.facts.append(Fact("ok", name, value))

    def no(self, name: str, value: str, todo: str = "") -> None:
        self.facts.append(Fact("no", name, value, todo))

    def failed(self, name: str, value: str, todo: str) -> None:
        self.facts.append(Fact("FAILED", name, value, todo))


def failures(sections: list[Section]) -> list[Fact]:
    """The faults."""
    return [fact for section in sections for fact in section.facts if fact.mark == "FAILED"]


def without_home(text: str) -> str:
    """The text with ``~`` for the user's folder, whose name need not stand in a report."""
    try:
        home = str(Path.home())
    except RuntimeError:  # a user without one
        return text
    return text if len(home) < 2 else text.replace(home, "~")


def _line(mark: str, name: str, value: str, width: int) -> str:
    head = f"  {mark:<6}  {name:<{width}}  "
    return textwrap.fill(
        value,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_text(sections: list[Section]) -> str:
    """The report to read, and to paste: no colors, and no line that is longer than it has to be."""
    lines = []
    width = max(len(fact.name) for section in sections for fact in section.facts)
    for section in sections:
        lines.append(section.name)
        for fact in section.facts:
            lines.append(_line(fact.mark, fact.name, fact.value, width))
            if fact.todo:
                lines.append(_line("", "", f"-> {fact.todo}", width))
        lines.append("")
    wrong = failures(sections)
    if wrong:
        names = ", ".join(dict.fromkeys(fact.name for fact in wrong))
        lines.append(f"FAILED: {names}. Each has a line that begins with -> and says what to do.")
    else:
        lines.append("ok: everything that was looked at is right.")
    return without_home("\n".join(lines))


def as_json(sections: list[Section]) -> str:
    """The same for programs: ``{"ok", "sections": [{"name", "facts": [{"mark", "name", "value", "todo"}]}]}``."""
    content = {"ok": not failures(sections), "sections": [asdict(section) for section in sections]}
    return without_home(json.dumps(content, indent=1, ensure_ascii=False))
