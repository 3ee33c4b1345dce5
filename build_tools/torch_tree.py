"""The headers and libraries of a torch: of the one that is installed, or of a wheel that was only unpacked."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TorchTree:
    """A folder ``torch``, with its version and that of its CUDA, or None without CUDA."""

    folder: Path
    version: str
    cuda: str | None

    @classmethod
    def installed(cls) -> TorchTree:
        """That of the running Python, which is not imported."""
        spec = importlib.util.find_spec("torch")
        assert spec is not None and spec.submodule_search_locations is not None
        return cls.unpacked(Path(next(iter(spec.submodule_search_locations))))

    @classmethod
    def unpacked(cls, folder: Path) -> TorchTree:
        """That of a folder ``torch``, whose own file says which version it is."""
        names: dict[str, Any] = {}
        exec((folder / "version.py").read_text(), names)
        return cls(folder, names["__version__"], names["cuda"])

    @property
    def includes(self) -> list[Path]:
        """Folders of headers."""
        return [self.folder / "include", self.folder / "include" / "torch" / "csrc" / "api" / "include"]

    @property
    def libraries(self) -> Path:
        """The folder of its shared libraries."""
        return self.folder / "lib"

    @property
    def cuda_major(self) -> int:
        """13 for CUDA 13.0; 0 without CUDA."""
        return int(self.cuda.split(".")[0]) if self.cuda else 0
