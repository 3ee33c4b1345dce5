"""The wheel: its name and contents, and that one build works with every Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from transformer_plugin._library import LIBRARIES

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel as a user does. It reuses the object files of the library under test, so it mostly links."""
    pytest.importorskip("pip")
    pytest.importorskip("wheel")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    result = subprocess.run([*command, "-w", str(folder), "."], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.timeout(900)
def test_name_says_every_python_from_3_10(wheel: Path) -> None:
    assert wheel.name.startswith("transformer_plugin-")
    assert "-cp310-abi3-linux_" in wheel.name


@pytest.mark.timeout(900)
def test_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
    assert {name.split("/")[0].split("-")[0] for name in names} == {"transformer_plugin"}
    code = [name for name in names if ".dist-info/" not in name]
    libraries = {f"transformer_plugin/{path.name}" for path in LIBRARIES}
    assert {name for name in code if name.endswith(".so")} == libraries
    assert "transformer_plugin/py.typed" in code
    assert {Path(name).suffix for name in code} == {".py", ".so", ".typed", ".cmake"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "transformer_plugin").rglob("*.py")}
    assert {name for name in code if name.endswith(".py")} == sources


@pytest.mark.timeout(900)
def test_no_library_names_a_folder_of_the_build(wheel: Path) -> None:
    """Errors name files from csrc/ and torch/ on. Packed code of kernels has no tables of lines, which name folders."""
    archive = zipfile.ZipFile(wheel)
    for name in archive.namelist():
        if name.endswith(".so"):
            content = archive.read(name)
            assert str(ROOT).encode() not in content
            assert str(Path(torch.__file__).parent).encode() not in content
            assert b"csrc/" in content or "_kernels" in name


@pytest.mark.timeout(900)
@pytest.mark.parametrize("python", PYTHONS)
def test_one_wheel_loads_under_every_python(wheel: Path, tmp_path: Path, python: str) -> None:
    """Other Pythons that have torch: on the PATH, or in the folders of TRANSFORMER_PLUGIN_TEST_PYTHONS."""
    folders = os.environ.get("TRANSFORMER_PLUGIN_TEST_PYTHONS", "")
    mine = python == f"python3.{sys.version_info[1]}"
    found = (
        sys.executable if mine else shutil.which(python, path=os.pathsep.join([folders, os.environ["PATH"]]))
    )
    torch_here = found and subprocess.run([found, "-c", "import torch"], capture_output=True).returncode == 0
    if not torch_here:
        pytest.skip(f"no {python} with torch")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import torch, transformer_plugin as t; x = torch.ones(2, 4, requires_grad=True); "
        "t.ops.activation(x).sum().backward(); print(t.__file__, x.grad.shape)"
    )
    result = subprocess.run(
        [found, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [
        str(tmp_path / "transformer_plugin" / "__init__.py"),
        "torch.Size([2,",
        "4])",
    ]


@pytest.mark.timeout(900)
def test_readme_runs_in_a_new_environment(wheel: Path, tmp_path: Path) -> None:
    """pip installs the wheel into an environment that has torch and nothing else of this folder."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    # .pth files make this folder's package importable; Python does not process .pth files of a folder added by another.
    (site / "torch.pth").write_text(str(Path(torch.__file__).parent.parent) + "\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    installed = subprocess.run(pip, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stdout[-4000:] + installed.stderr[-4000:]
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks and "import transformer_plugin" in blocks[0]
    code = blocks[0] + "\nprint(tp.__file__)\n"
    result = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == str(site / "transformer_plugin" / "__init__.py")
