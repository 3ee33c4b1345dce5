"""The text of an error of a layer, and the note that names the layer, which Python 3.10 has at the end of the text."""

from __future__ import annotations

START = "raised in the layer "


def text_of(error: BaseException) -> str:
    return str(error).split(f"\n{START}")[0]


def note_of(error: BaseException) -> str:
    notes = [*getattr(error, "__notes__", []), *str(error).splitlines()]
    [note] = [note for note in notes if note.startswith(START)]
    return str(note)
