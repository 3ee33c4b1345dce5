"""torch's caches of compiled graphs are separate for each build of the library."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch

from transformer_plugin._library import LIBRARIES

SCRIPT = """
import torch
from torch._dynamo.utils import counters
from transformer_plugin import ops
torch.compiler.config.cache_key_tag += {tag!r}
compiled = torch.compile(lambda x: ops.activation(x), backend="inductor", fullgraph=True)
compiled(torch.ones(4, 64))
print(counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"])
"""


def test_tag_names_the_libraries() -> None:
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in LIBRARIES)).hexdigest()[:16]
    assert torch.compiler.config.cache_key_tag.count(f"transformer_plugin-{digest}") == 1


@pytest.mark.long
def test_a_graph_of_another_library_is_not_used(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def hits_and_misses(tag: str) -> list[int]:
        command = [sys.executable, "-c", SCRIPT.format(tag=tag)]
        return [
            int(n) for n in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        ]

    assert hits_and_misses("") == [0, 1]
    assert hits_and_misses("") == [1, 0]
    assert hits_and_misses(",another-library") == [0, 1]
