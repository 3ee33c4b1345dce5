"""torch's headers, read once: a precompiled header for the host files, which halves the time of most of them.

Files still include what they use. A compiler that cannot use the precompiled header reads the header itself, and where
it would not help, with another compiler than GCC or behind ccache, there is none.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

HEADERS = ("ATen/core/dispatch/Dispatcher.h", "torch/csrc/autograd/custom_function.h", "torch/library.h")
# Of torch's headers, which silence it by pragmas that a precompiled header forgets.
SILENT = "-Wno-sign-compare"


def helps(compiler: str) -> bool:
    """GCC precompiles. ccache keeps whole objects, and would no longer find them."""
    name = shutil.which(compiler)
    if os.environ.get("TRANSFORMER_PLUGIN_SANITIZE") == "1" or name is None or len(compiler.split()) > 1:
        return False
    if "ccache" in os.path.realpath(name):
        return False
    banner = subprocess.run([name, "--version"], capture_output=True, text=True).stdout
    return "Free Software Foundation" in banner and "clang" not in banner


def _command(compiler: str, ext: Any, base: Any) -> list[str]:
    """The flags that torch's build helper gives every host file, but for the header itself."""
    macros = [f"-D{name}" if value is None else f"-D{name}={value}" for name, value in ext.define_macros]
    folders = [f"-I{folder}" for folder in [*ext.include_dirs, *base.include_dirs]]
    return [compiler, *base.compiler_so[1:], *macros, *folders, *ext.extra_compile_args["cxx"], SILENT]


def include_precompiled(ext: Any, base: Any, folder: Path) -> None:
    """Adds the header to the flags of the host files of ``ext``; precompiles it where that was not yet done."""
    compiler = os.environ.get("CXX", "c++")  # torch's build helper has the same default
    if not helps(compiler):
        return
    import torch

    command = _command(compiler, ext, base)
    header, made = (folder.resolve() / "precompiled" / name for name in ("torch.h", "torch.h.gch"))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    key = "\n".join([shlex.join(command), torch.__version__, version])
    stamp = header.with_name("key.txt")
    if not (made.exists() and stamp.exists() and stamp.read_text() == key):
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text("".join(f"#include <{name}>\n" for name in HEADERS))
        print("precompiling torch's headers", flush=True)
        stamp.unlink(missing_ok=True)
        if subprocess.run([*command, "-x", "c++-header", str(header), "-o", str(made)]).returncode != 0:
            return  # of no use here; the build goes on without
        stamp.write_text(key)
    ext.extra_compile_args["cxx"] += [SILENT, "-include", str(header)]
