"""Whether Python has been started as ``python -m transformer_plugin``. Imports the standard library alone."""

from __future__ import annotations

import re
import sys


def is_starting() -> bool:
    """Whether Python is about to run the package as a program, for which it imports the package first.

    While it looks for the program, ``sys.argv`` is ``["-m", ...]`` with the arguments that follow the name. A program
    that runs the package in its own process, such as ``runpy.run_module``, imports all of it.
    """
    if sys.argv[:1] != ["-m"]:
        return False
    module = sys.orig_argv[
        -len(sys.argv)
    ]  # or its name behind options of Python's own, as in -Imtransformer_plugin
    return re.fullmatch(r"(-[bBdEiIOPqsSuvx]*m)?transformer_plugin", module) is not None
