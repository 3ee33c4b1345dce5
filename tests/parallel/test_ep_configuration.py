"""The configuration of an EpContext that a rank cannot read: another rank runs other code."""

from __future__ import annotations

import pytest

from tests.parallel.test_ep_context import SIZES, error_of
from transformer_plugin.ops import expert_parallel as ep
from transformer_plugin.parallel import EpContext
from transformer_plugin.testing.distributed import Rank


def check_other_code(rank: Rank, text: str) -> None:
    """Rank 1 runs other code, which sends another text where rank 0 sends its configuration."""
    if rank.rank == 1:
        ep.all_gather_text(text, rank.group_name)
    else:
        got = error_of(lambda: EpContext(rank.group, **SIZES))
        if text.startswith("{"):
            assert (
                "num_experts is 4 on rank 0, 8 on rank 1; max_tokens_per_rank is 8 on rank 0, 'missing' on"
                in got
            )
            assert got.endswith(
                "new is 'missing' on rank 0, 'x' on rank 1. Pass the same arguments on every rank."
            )
        else:
            shown = text if len(text) <= 80 else text[:80] + "..."
            assert got == (
                "transformer_plugin::EpContext: argument 'group': expected the configuration of an EpContext from "
                f"every rank, got {shown!r} from rank 1. Make the same calls in the same order on every rank, with "
                "one version of the package."
            )
    EpContext(rank.group, **SIZES).finalize()  # the group still works


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "null",
        "3",
        '["num_experts"]',
        '"text"',
        "[" * 100_000,
        '{"num_experts": 8, "new": "x"}',
    ],
)
def test_a_rank_that_runs_other_code(make_pool, text: str) -> None:
    make_pool(2).run(check_other_code, text)
