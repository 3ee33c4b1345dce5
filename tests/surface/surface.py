"""What users can depend on, collected from the package: op schemas, public names, settings."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import transformer_plugin

ROOT = Path(__file__).resolve().parent.parent.parent
FROZEN = Path(__file__).with_name("frozen.json")
NAMESPACE = "transformer_plugin"


def _name_of(schema: torch._C.FunctionSchema) -> str:
    name: str = schema.name.split("::")[1]
    return f"{name}.{schema.overload_name}" if schema.overload_name else name


def op_schemas() -> dict[str, str]:
    """Returns every registered op's schema, by name; of an overload ``linear.scaled``."""
    schemas = (
        schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(f"{NAMESPACE}::")
    )
    return {_name_of(schema): str(schema) for schema in sorted(schemas, key=str)}


#: Modules that import the library that they are for, which need not be installed.
OF_OTHERS = {f"{NAMESPACE}.integrations.torchtitan"}


def modules() -> list[ModuleType]:
    """Returns the package and every module in it whose name has no leading underscore, but for ``OF_OTHERS``."""
    found = pkgutil.walk_packages(transformer_plugin.__path__, f"{NAMESPACE}.")
    names = [info.name for info in found if not any(part.startswith("_") for part in info.name.split("."))]
    assert set(names) >= OF_OTHERS
    names = [name for name in names if name not in OF_OTHERS]
    return [transformer_plugin, *(importlib.import_module(name) for name in names)]


def _describe(thing: Any) -> str:
    if inspect.isclass(thing):
        owner = next(each for each in thing.__mro__ if "__init__" in vars(each))
        if owner.__module__.startswith("torch."):  # whose arguments differ between versions
            return f"class with the arguments of {owner.__module__}.{owner.__qualname__}"
        return f"class{_signature(thing)}"
    return f"def{_signature(thing)}" if callable(thing) else type(thing).__name__


def _signature(thing: Any) -> str:
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return "(...)"
    # Names and defaults only: how annotations print differs between Python versions.
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))


def public_names() -> dict[str, dict[str, str]]:
    """Returns the names in ``__all__`` of each module that has one, with their signatures."""
    return {
        module.__name__: {name: _describe(getattr(module, name)) for name in sorted(module.__all__)}
        for module in modules()
        if hasattr(module, "__all__")
    }


def environment_variables() -> list[str]:
    """Returns the variables that are read at import."""
    text = "".join((ROOT / NAMESPACE / name).read_text() for name in ("config.py", "_torch_versions.py"))
    return sorted(set(re.findall(r'"(TRANSFORMER_PLUGIN_\w+)"', text)))


def surface() -> dict[str, Any]:
    """Returns everything that frozen.json contains."""
    return {"ops": op_schemas(), "names": public_names(), "environment": environment_variables()}
