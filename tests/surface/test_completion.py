"""What tab completion of a public module has: the names in ``__all__``, and none that the module imports."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType

import pytest

import transformer_plugin
from tests.surface.surface import ROOT, modules
from transformer_plugin import config, reference

MODULES = {module.__name__: module for module in modules() if hasattr(module, "__all__")}
HELPERS = {"annotations", "torch", "Tensor", "dataclass", "field", "math", "re", "Any", "Literal"}


def completed(module: ModuleType) -> set[ModuleType]:
    """The modules that a user reaches from this one by completion."""
    below = [thing for name in dir(module) if isinstance(thing := getattr(module, name), ModuleType)]
    return {module}.union(*(completed(each) for each in below))


def test_every_module_that_is_completed_lists_its_names() -> None:
    public = completed(transformer_plugin) | completed(reference) | {config}
    assert len(public) > 10
    assert {module.__name__ for module in public} <= MODULES.keys()


@pytest.mark.parametrize("name", MODULES)
def test_only_public_names(name: str) -> None:
    module = MODULES[name]
    assert dir(module) == sorted(module.__all__)
    assert not HELPERS & {*dir(module)}
    assert [each for each in dir(module) if not hasattr(module, each)] == []


def test_a_program_that_imports_the_package_alone() -> None:
    """Modules that only tests import have no part in it."""
    program = "import json, transformer_plugin as tp; print(json.dumps([dir(tp), dir(tp.recipes), dir(tp.formats)]))"
    text = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    package, recipes, formats = json.loads(text)
    assert package == sorted(transformer_plugin.__all__)
    assert "Float8BlockScaling" in recipes and "Format" in formats
    assert not HELPERS & {*package, *recipes, *formats}
