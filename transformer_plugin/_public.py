"""Tab completion of modules: ``dir()`` has what is public, and no import of the module's own."""

from __future__ import annotations

import functools
import sys


def only_public_names(package: str) -> None:
    """Lets ``dir()`` of the modules of this package that are imported and have an ``__all__`` return these names."""
    below = [name for name in list(sys.modules) if f"{name}.".startswith(f"{package}.")]
    for module in map(sys.modules.__getitem__, below):
        if hasattr(module, "__all__"):
            vars(module)["__dir__"] = functools.partial(sorted, module.__all__)
