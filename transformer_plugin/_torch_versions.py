"""The versions of torch that this package has been tried with, and which compiled library serves the running one.

Imports nothing but the standard library: the build reads it before there is a library.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

#: Minor versions. A library serves the minor version of torch that it was built with.
OLDEST, NEWEST = (2, 11), (2, 15)
#: The versions that were tried, one of each minor version; a wheel has a library for each.
TRIED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
#: An environment variable: 1 lets the build and the import go on with a version newer than the newest tried.
SETTING = "TRANSFORMER_PLUGIN_UNTRIED_TORCH"

#: What builds the library for the running torch.
BUILD = "`pip install --no-build-isolation --force-reinstall --no-deps .` in the source tree"


def text(version: tuple[int, int]) -> str:
    """``(2, 11)`` as ``2.11``."""
    return f"{version[0]}.{version[1]}"


#: As a requirement of pip's.
REQUIREMENT = f"torch>={text(OLDEST)},<{NEWEST[0]}.{NEWEST[1] + 1}"

#: What the import says where there is no torch at all.
NO_TORCH = (
    f"transformer_plugin: expected torch {text(OLDEST)} to {text(NEWEST)}, found none in this Python. Run `pip install "
    f"'{REQUIREMENT}'`, then build for it: {BUILD}."
)


def minor(version: str) -> tuple[int, int]:
    """The first two numbers of a version such as ``2.15.0+cu132``; 0 for one that it does not have."""
    major, second = [*map(int, re.findall(r"\d+", version)[:2]), 0, 0][:2]
    return major, second


def refusal(version: str) -> str | None:
    """Why this version of torch is not served, and what to do; None if it is."""
    found, setting = minor(version), os.environ.get(SETTING, "")
    if OLDEST <= found <= NEWEST or (found > NEWEST and setting == "1"):
        return None
    reason = f"expected torch {text(OLDEST)} to {text(NEWEST)}, got {version or repr(version)}. "
    reason += f"Run `pip install '{REQUIREMENT}'`"
    if found > NEWEST:
        other = f" (it is {setting!r})" if setting not in ("", "0") else ""
        return f"{reason}, or try this version: set {SETTING}=1{other}, and build for it: {BUILD}"
    return f"{reason}, then build for it: {BUILD}"


def fsdp_reduces_in_param_dtype(version: str) -> bool:
    """Whether FSDP2 without a ``reduce_dtype`` reduces gradients in ``param_dtype``, as before torch 2.15, and not in
    the dtype of the sharded parameter."""
    return minor(version) < (2, 15)


def library_name(version: str, cuda: str | None) -> str:
    """The file of the library for a version of torch, built with a version of CUDA or without it."""
    return f"_C.torch{text(minor(version))}.{f'cu{minor(cuda)[0]}' if cuda else 'cpu'}.so"


def kernels_name(cuda: str) -> str:
    """The file of the kernels, which serve every torch, for a version of CUDA."""
    return f"_kernels.cu{minor(cuda)[0]}.so"


_LIBRARY = re.compile(r"_C\.torch(\d+\.\d+)\.(?:cu(\d+)|cpu)\.so")


def described(name: str) -> str:
    """A library by its file's name: ``torch 2.11 with CUDA 13``; empty if the file is none."""
    match = re.fullmatch(_LIBRARY, name)
    if match is None:
        return ""
    torch, cuda = match.groups()
    return f"torch {torch} {f'with CUDA {cuda}' if cuda else 'without CUDA'}"


def find_library(folder: Path, version: str, cuda: str | None) -> Path:
    """Returns the library for the running torch, of this version and CUDA version.

    One without CUDA also serves a torch with CUDA, on CPUs. Raises an ImportError with both versions if there is none.
    """
    refused = refusal(version)
    if refused:
        raise ImportError(f"transformer_plugin: {refused}.")
    wanted, without_cuda = library_name(version, cuda), library_name(version, None)
    found = sorted(path.name for path in folder.glob("_C.torch*.so") if _LIBRARY.fullmatch(path.name))
    if wanted in found:
        if cuda and not (folder / kernels_name(cuda)).exists():
            raise ImportError(
                f"transformer_plugin: expected the kernels {kernels_name(cuda)} next to {wanted}, found none. "
                f"Build them: {BUILD}."
            )
        return folder / wanted
    # Beside a library for another CUDA, the one without CUDA was not built for this torch.
    if [name for name in found if name.startswith(without_cuda.removesuffix("cpu.so"))] == [without_cuda]:
        return folder / without_cuda
    running = f"torch {version} {f'with CUDA {cuda}' if cuda else 'without CUDA'}"
    if not found:
        raise ImportError(
            f"transformer_plugin: expected the compiled library {wanted} next to the package, for {running}, found "
            f"none. Build it: {BUILD}."
        )
    raise ImportError(
        f"transformer_plugin: expected a compiled library for {running}, found one for "
        f"{' and one for '.join(described(name) for name in found)}. Build it again for this torch: {BUILD}."
    )


if __name__ == "__main__":  # called by the Makefile, with a requirement such as torch==2.15.0
    refused = refusal(sys.argv[1].removeprefix("torch=="))
    sys.exit(None if refused is None else f"TORCH: {refused.partition('. Run ')[0]}")
