"""Compiles and links the kernels for GPUs that are not tested, to see that they compile. Nothing is run.

    python -m build_tools.other_gpus           # for 10.0a and 12.0a; others may be named
    python -m build_tools.other_gpus 10.0a

The library is not for use: no test has run on such a GPU. The ops need nothing else than on Hopper.
"""

from __future__ import annotations

import argparse
import os
import sys

from build_tools.extension import Libraries, Toolkit
from build_tools.toolchain import ToolchainError, architectures, check_compiler, use_cuda
from build_tools.torch_tree import TorchTree
from build_tools.wheel import ROOT


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m build_tools.other_gpus")
    parser.add_argument("architecture", nargs="*", default=["10.0a", "12.0a"], help="such as 10.0a")
    named = parser.parse_args().architecture
    os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(named)
    check_compiler()
    torch = TorchTree.installed()
    home = use_cuda(torch.version, torch.cuda)
    if home is None:
        raise ToolchainError("expected nvcc and a torch with CUDA, got one without. Install both")
    target = "_".join(named)
    folder = ROOT / "build" / "other_gpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    print(Libraries(ROOT, torch, Toolkit(home, architectures()), target).build_kernels(folder))


if __name__ == "__main__":
    try:
        main()
    except ToolchainError as error:
        sys.exit(f"transformer_plugin: not built: {error}")
