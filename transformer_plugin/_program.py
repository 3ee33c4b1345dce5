"""Whether Python has been started as ``python -m transformer_plugin``. Imports the standard library alone."""

from __future__ import annotations

import sys


def is_starting() -> bool:
    """Whether Python is about to run the package as a program, for which it imports the package first.

    While it looks for the program, ``sys.argv`` is ``["-m", ...]`` with the arguments that follow the name. A program
    that runs the package in its own process, such as ``runpy.run_module``, imports all of it.
    """
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv) :][:1] == ["transformer_plugin"]
