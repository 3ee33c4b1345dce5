"""Builds one wheel for every version of torch that is served: the kernels once, the ops for each minor version.

    python -m build_tools.wheel                    # into dist/; each version takes as long as a build
    python -m build_tools.wheel --torch 2.15.0     # for this version alone; several may be named

The wheels of other versions of torch are downloaded and unpacked, not installed: compiling needs their headers, linking
their libraries. At the end auditwheel checks which systems the wheel runs on, and names them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from build_tools.extension import KERNELS, OPS, Libraries, Toolkit, build_command
from build_tools.toolchain import ToolchainError, architectures, check_compiler, torch_versions, use_cuda
from build_tools.torch_tree import TorchTree

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "wheel"
#: The system whose libraries are the oldest that the wheel runs on: glibc 2.34 and GCC 11's libstdc++.
PLATFORM = "manylinux_2_34"
#: What torch brings, or the system has with it.
OF_TORCH = ("libtorch*", "libc10*", "libcudart.so*", "libgomp*")


def unpacked(version: str, machine: str = "") -> TorchTree:
    """The headers and libraries of a torch from the package index, under build/wheel/: for this processor, or for
    another one, such as aarch64."""
    folder = FOLDER / f"torch-{version}{f'-{machine}' if machine else ''}"
    if not (folder / "complete").exists():
        print(f"downloading torch {version} {machine}".rstrip(), flush=True)
        wheels = FOLDER / "downloads"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(wheels, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--platform", f"manylinux_2_28_{machine}"] if machine else []
        if subprocess.run([*command, "-d", str(wheels), f"torch=={version}"]).returncode != 0:
            raise ToolchainError(f"could not download torch {version}; what pip says is above")
        (wheel,) = wheels.glob("torch-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            parts = ("torch/include/", "torch/lib/", "torch/version.py")
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(parts)])
        shutil.rmtree(wheels)
        (folder / "complete").touch()
    return TorchTree.unpacked(folder / "torch")


def tree_of(version: str) -> TorchTree:
    """That of the package index, or the same that is installed, for which most may be compiled already."""
    installed = TorchTree.installed()
    is_same = installed.cuda is not None and installed.version.partition("+")[0] == version
    return installed if is_same else unpacked(version)


class ManyLibraries:
    """The libraries for several versions of torch, as setuptools builds them."""

    def __init__(self, each: list[Libraries]) -> None:
        self.each, self.ops, self.kernels = each, each[0].ops, each[0].kernels
        kernels = {KERNELS: self.kernels} if self.kernels else {}
        self.names = {**kernels, **{f"{OPS}_{number}": one.ops for number, one in enumerate(each)}}

    def build(self, folder: Path) -> None:
        """Makes all of them in a folder, one after the other."""
        for number, one in enumerate(self.each):
            print(f"torch {one.torch.version}: {number + 1} of {len(self.each)}", flush=True)
            one.build(folder)


def toolkit_for(trees: list[TorchTree]) -> Toolkit | None:
    """One for all; each version of torch is checked against it."""
    homes = {tree.version: use_cuda(tree.version, tree.cuda) for tree in trees}
    without = [version for version, home in homes.items() if home is None]
    if len(without) == len(homes):
        return None
    if without:
        raise ToolchainError(
            f"expected every torch of one wheel with CUDA, or none, got {', '.join(without)} without. Name others"
        )
    return Toolkit(next(home for home in homes.values() if home), architectures())


def package(built: Any, folder: Path) -> Path:
    """Builds the libraries, and packs them with the Python files. Returns the wheel."""
    from setuptools import Extension, setup

    os.chdir(ROOT)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Everything in the folder: another build may run at the same time.
    commands = [["egg_info", "--egg-base", str(folder)], ["build", "--build-lib", str(folder / "package")]]
    commands += [["bdist_wheel", "--bdist-dir", str(folder / "tree"), "--dist-dir", str(folder)]]
    setup(
        script_args=["--quiet", *(word for command in commands for word in command)],
        ext_modules=[Extension(name, [], py_limited_api=True) for name in built.names],
        cmdclass={"build_ext": build_command(built)},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def audited(wheel: Path, folder: Path) -> Path:
    """The same wheel under the name of the systems that it runs on, which auditwheel finds out."""
    command = [sys.executable, "-m", "auditwheel", "repair", str(wheel), "--wheel-dir", str(folder)]
    command += ["--plat", f"{PLATFORM}_{os.uname().machine}", "--strip"]
    command += [word for name in OF_TORCH for word in ("--exclude", name)]
    if subprocess.run(command).returncode != 0:
        raise ToolchainError(f"auditwheel refuses {wheel.name}: what it says is above")
    return max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", nargs="+", default=[*torch_versions.TRIED], metavar="VERSION")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel")
    options = parser.parse_args()
    check_compiler()
    trees = [tree_of(version) for version in options.torch]
    toolkit = toolkit_for(trees)
    built = ManyLibraries([Libraries(ROOT, tree, toolkit) for tree in trees])
    options.out.mkdir(parents=True, exist_ok=True)
    print(audited(package(built, FOLDER / "wheel"), options.out))


if __name__ == "__main__":
    try:
        main()
    except ToolchainError as error:
        sys.exit(f"transformer_plugin: no wheel: {error}")
