"""The integration of torchtitan where torchtitan, or its torch, is not there: one error that says so."""

from __future__ import annotations

import subprocess
import sys

import pytest

from transformer_plugin.integrations._torchtitan_versions import check_versions

MODULE = "transformer_plugin.integrations.torchtitan"


@pytest.mark.parametrize("torch_version", ["2.13.0", "2.15.0+cu132", "3.0.0a0"])
@pytest.mark.parametrize("titan_version", ["0.3.0", "0.3.12", "0.3.0.dev20261101+cu130"])
def test_served(torch_version: str, titan_version: str) -> None:
    check_versions(torch_version, titan_version)


@pytest.mark.parametrize(
    ("torch_version", "titan_version", "words"),
    [
        (
            "2.15.0",
            None,
            ["expected torchtitan 0.3, found none", "pip install 'torchtitan==0.3.*'", "torch 2.13"],
        ),
        ("2.15.0", "0.2.2", ["expected torchtitan 0.3, got 0.2.2", "pip install 'torchtitan==0.3.*'"]),
        ("2.15.0", "0.30.0", ["expected torchtitan 0.3, got 0.30.0"]),
        ("2.15.0", "1.3.0", ["expected torchtitan 0.3, got 1.3.0"]),
        ("2.12.1", "0.3.0", ["expected torch 2.13 or newer", "got 2.12.1", "pip install 'torch>=2.13'"]),
        ("2.9.0", "0.3.0", ["expected torch 2.13 or newer", "got 2.9.0"]),
    ],
)
def test_refused(torch_version: str, titan_version: str | None, words: list[str]) -> None:
    with pytest.raises(ImportError) as error:
        check_versions(torch_version, titan_version)
    assert str(error.value).startswith(f"{MODULE}: ")
    for word in words:
        assert word in str(error.value)


PROGRAM = """
import sys
from importlib import metadata

class None_:
    def find_spec(self, name, path, target=None):
        if name == "torchtitan" or name.startswith("torchtitan."):
            raise AssertionError("asked for torchtitan")

sys.meta_path.insert(0, None_())
version = metadata.version

def without(name):
    if name == "torchtitan":
        raise metadata.PackageNotFoundError(name)
    return version(name)

metadata.version = without
import transformer_plugin
assert "transformer_plugin.integrations.torchtitan" not in sys.modules
try:
    import transformer_plugin.integrations.torchtitan
except ImportError as error:
    print(error)
"""


def test_import_without_torchtitan() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(
        f"{MODULE}: expected torchtitan 0.3, found none in this Python. Run `pip install"
    )
