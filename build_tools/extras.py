"""Prints the requirements of pyproject.toml's extras, one a line: installs the pinned tools without building us."""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib


def requirements(names: list[str]) -> list[str]:
    """The requirements of the named extras, in order."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    return [line for name in names for line in project["optional-dependencies"][name]]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
