"""Adapters of PEFT that change the weight of a layer: its quantized copies are outdated, and a quantized one follows.

PEFT adds to ``weight.data``, which torch does not count as a change of the weight, and which a quantized parameter has
no numbers for. PEFT need not be installed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from transformer_plugin._on_import import on_import
from transformer_plugin.parallel._optimizer_steps import STEPS

#: Methods of adapters that change the weight of their layer in place.
_CHANGING = ("merge", "unmerge", "olora_init")


@functools.cache
def watch_merges() -> None:
    """Once per process, from the first quantized parameter or copy on."""
    on_import("peft.tuners.tuners_utils", _watch_adapters)


def _watch_adapters() -> None:
    """Those that there are, and those that PEFT, or a user, derives from its base class later."""
    base: Any = sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer

    def watch_new(cls: Any, /, **options: Any) -> None:
        super(base, cls).__init_subclass__(**options)
        _watch_all(cls)

    base.__init_subclass__ = classmethod(watch_new)
    for kind in _subclasses(base):
        _watch_all(kind)


def _subclasses(kind: Any) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _watch_all(adapter: Any) -> None:
    for kind in adapter.__mro__:
        if kind is adapter or kind.__module__.startswith("peft."):
            _watch(kind)


@functools.cache
def _watch(kind: Any) -> None:
    for name in _CHANGING:
        if name in kind.__dict__:
            setattr(kind, name, _changing(kind.__dict__[name]))


def _changing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        from transformer_plugin.nn.quantized_parameters import in_high_precision

        layer = self
        while hasattr(layer, "base_layer"):
            layer = layer.base_layer
        try:
            with in_high_precision(layer, *layer._parameters, reads=True):
                return method(self, *arguments, **options)
        finally:  # the first of several adapters may have been merged before an error
            STEPS.advance()  # kept copies are outdated
            for parameter in layer._parameters.values():
                for copy in getattr(parameter, "__dict__", {}).get("quantized_copies", ()):
                    if not copy.refreshes_itself:
                        copy.note_changed()

    return call
