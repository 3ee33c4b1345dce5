"""Finds and loads the one shared library, which registers every op with torch."""

from __future__ import annotations

from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("_C.abi3.so")


def load() -> None:
    """Loads ``_C.abi3.so``. A library built for another torch is an ImportError that says so."""
    if not LIBRARY.exists():
        raise ImportError(
            f"transformer_plugin: expected the compiled library {LIBRARY.name} beside the package, found none. "
            "Build it: `pip install --no-build-isolation .` in the source tree."
        )
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"transformer_plugin: {LIBRARY.name} does not load with torch {torch.__version__} "
            f"(CUDA {torch.version.cuda}): {error}. It was built for another torch; build it again: "
            "`pip install --no-build-isolation --force-reinstall --no-deps .`"
        ) from error
