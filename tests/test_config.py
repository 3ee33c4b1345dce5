"""The settings: defaults, values from the environment, and errors."""

from __future__ import annotations

import pytest

from transformer_plugin.config import Settings, read_settings


def test_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSFORMER_PLUGIN_PEER_TIMEOUT", raising=False)
    assert read_settings() == Settings(peer_timeout=60.0)


def test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMER_PLUGIN_PEER_TIMEOUT", "2.5")
    assert read_settings() == Settings(peer_timeout=2.5)


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "inf", "nan"])
def test_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TRANSFORMER_PLUGIN_PEER_TIMEOUT", text)
    with pytest.raises(ValueError) as caught:
        read_settings()
    assert str(caught.value) == (
        "transformer_plugin.config: TRANSFORMER_PLUGIN_PEER_TIMEOUT: expected a positive number of seconds, "
        f"got {text!r}. Unset it for the default of 60."
    )
