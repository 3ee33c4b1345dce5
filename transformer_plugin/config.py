"""Settings. Every environment variable that the package reads is here, read once, at import; but for that of
``_torch_versions``, which the build reads too."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Settings", "read_settings", "settings"]


@dataclass(frozen=True)
class Settings:
    """Settings from the environment.

    Attributes:
        peer_timeout: seconds that an expert-parallel group waits for a peer before it raises, unless the call that
            makes the group gives a timeout. ``TRANSFORMER_PLUGIN_PEER_TIMEOUT``.
    """

    peer_timeout: float = 60.0


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ValueError(
            f"transformer_plugin.config: {name}: expected a positive number of seconds, got {text!r}. "
            f"Unset it for the default of {default:g}."
        )
    return value


def read_settings() -> Settings:
    """The settings as the environment has them now."""
    return Settings(peer_timeout=_seconds("TRANSFORMER_PLUGIN_PEER_TIMEOUT", Settings.peer_timeout))


def launched_ranks() -> int:
    """How many processes a launcher such as torchrun says that it has started; 1 without a launcher."""
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 1


settings = read_settings()
