"""What is registered with a part of torch that takes long to import, and that most programs never do."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Watch(MetaPathFinder):
    """Calls a function after a module was imported, once."""

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self.module = module
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the others find, with the call at the end of its execution."""
        if fullname != self.module or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            self.then()

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def on_import(module: str, then: Callable[[], None]) -> None:
    """Calls ``then`` now if the module has been imported, else when it will have been."""
    if module in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Watch(module, then))
