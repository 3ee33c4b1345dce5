"""Packages that a test imports when it runs: they take every process of pytest seconds if a file of tests does it."""

from __future__ import annotations

import functools
from typing import Any

import pytest


@functools.cache
def peft() -> Any:
    return pytest.importorskip("peft")


@functools.cache
def transformers() -> Any:
    return pytest.importorskip("transformers")
