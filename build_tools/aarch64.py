"""Compiles and links the ops for aarch64 (Grace, Graviton), without CUDA, to see that they compile. Nothing is run.

    apt install g++-aarch64-linux-gnu
    python -m build_tools.aarch64      # CXX names another compiler for aarch64

torch for aarch64 is downloaded and unpacked. The library is not for use: no test has run on such a processor.
"""

from __future__ import annotations

import os
import sys

from build_tools.extension import Libraries
from build_tools.toolchain import ToolchainError, check_compiler, torch_versions
from build_tools.wheel import ROOT, unpacked


def main() -> None:
    os.environ.setdefault("CXX", "aarch64-linux-gnu-g++")
    check_compiler()
    built = Libraries(ROOT, unpacked(torch_versions.TRIED[0], "aarch64"), None, "aarch64")
    folder = ROOT / "build" / "aarch64"
    folder.mkdir(parents=True, exist_ok=True)
    built.build(folder)
    print(folder / built.ops)


if __name__ == "__main__":
    try:
        main()
    except ToolchainError as error:
        sys.exit(f"transformer_plugin: not built: {error}")
