"""Updates the frozen surface: ``python -m tests.surface.update``. Review the difference, because users depend on
it."""

from __future__ import annotations

import json

from tests.surface import kernel_table
from tests.surface.surface import FROZEN, surface

if __name__ == "__main__":
    FROZEN.write_text(json.dumps(surface(), indent=1, sort_keys=True) + "\n")
    print(f"wrote {FROZEN}")
    kernel_table.update()
    print(f"wrote the tables of {kernel_table.PAGE}")
