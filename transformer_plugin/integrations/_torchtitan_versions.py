"""Which versions of torchtitan and torch the integration takes. Imports neither."""

from __future__ import annotations

from importlib import metadata

from transformer_plugin._torch_versions import minor, text

#: The versions of torchtitan, and the oldest torch that these import on.
TITAN, OLDEST_TORCH = (0, 3), (2, 13)
_OWNER = "transformer_plugin.integrations.torchtitan"


def check_versions(torch_version: str, titan_version: str | None) -> None:
    """Raises ImportError for a version that is not served, None of torchtitan for one that is not installed."""
    wanted = f"torchtitan {text(TITAN)}"
    if titan_version is None:
        raise ImportError(
            f"{_OWNER}: expected {wanted}, found none in this Python. Run `pip install 'torchtitan=={text(TITAN)}.*'`, "
            f"with torch {text(OLDEST_TORCH)} or newer."
        )
    if minor(titan_version) != TITAN:
        raise ImportError(
            f"{_OWNER}: expected {wanted}, got {titan_version}. Run `pip install 'torchtitan=={text(TITAN)}.*'`."
        )
    if minor(torch_version) < OLDEST_TORCH:
        raise ImportError(
            f"{_OWNER}: expected torch {text(OLDEST_TORCH)} or newer, which {wanted} imports on, got {torch_version}. "
            f"Run `pip install 'torch>={text(OLDEST_TORCH)}'`."
        )


def installed_titan() -> str | None:
    """The installed version of torchtitan; None without one."""
    try:
        return metadata.version("torchtitan")
    except metadata.PackageNotFoundError:
        return None
