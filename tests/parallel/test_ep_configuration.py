"""The configuration of an EpContext: what a rank cannot read, because another rank runs other code, and limits."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.test_ep_context import SIZES, error_of
from transformer_plugin.nn import DispatchConfig, MoE
from transformer_plugin.ops import expert_parallel as ep
from transformer_plugin.parallel import EpContext, ep_bootstrap, ep_finalize
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


def check_limits_of_multiprocessors(rank: Rank) -> None:
    """Only the transport "one_sided" takes one, and only a number of multiprocessors is one."""
    for wrong in (-1, 2**31, True):
        assert error_of(lambda w=wrong: EpContext(rank.group, **SIZES, max_num_sms=w)) == (
            "transformer_plugin::EpContext: argument 'max_num_sms': expected from 0 to 2^31 - 1, "
            f"got {wrong}. Pass 0 for all multiprocessors."
        )
    text = error_of(lambda: EpContext(rank.group, **SIZES, max_num_sms=8.0), TypeError)
    assert text.startswith("transformer_plugin::EpContext: argument 'max_num_sms': expected an integer, got ")
    for transport in ("auto", "all_gather", "all_to_all"):
        text = error_of(lambda t=transport: EpContext(rank.group, **SIZES, transport=t, max_num_sms=8))
        name, reason = transport, f'transport="{transport}" was given'
        if transport == "auto":
            name, reason = "all_gather", "collectives of Gloo, the only ones on a CPU"
        assert text == (
            "transformer_plugin::EpContext: argument 'max_num_sms': expected 0 with the transport "
            f"'{name}' ({reason}), whose kernels have no limit, got 8. Pass 0, or choose the transport 'one_sided'."
        )
    # Of "one_sided" the limits are compared first, and then there is no such memory on a CPU.
    text = error_of(lambda: EpContext(rank.group, **SIZES, transport="one_sided", max_num_sms=8 + rank.rank))
    assert "max_num_sms is 8 on rank 0, 9 on rank 1" in text
    text = error_of(lambda: EpContext(rank.group, **SIZES, transport="one_sided", max_num_sms=8))
    assert "argument 'transport': expected ranks that reach each other's memory" in text
    assert EpContext(rank.group, **SIZES).config.max_num_sms == 0
    text = error_of(lambda: ep_bootstrap(rank.group, 4, 8, 3, 2, max_num_sms=8))
    assert "argument 'max_num_sms': expected 0 with the transport 'all_gather' (" in text
    ep_bootstrap(rank.group, 4, 8, 3, 2)
    ep_finalize()


def check_limits_in_layers(rank: Rank) -> None:
    def layer(**options: int) -> MoE:
        config = DispatchConfig(max_tokens=8, **options)
        return MoE(hidden=8, ffn_hidden=8, num_experts=4, topk=2, group=rank.group, dispatch=config)

    assert "expected 0 with the transport 'all_gather'" in error_of(lambda: layer(max_num_sms=8))
    assert "max_num_sms': expected from 0 to 2^31 - 1, got -1" in error_of(lambda: layer(max_num_sms=-1))
    layer()


@pytest.mark.parametrize("check", [check_limits_of_multiprocessors, check_limits_in_layers])
def test_limits_of_multiprocessors(make_pool, check) -> None:
    make_pool(2).run(check)


def check_name(rank: Rank) -> None:
    """The marks of a group's name: of another transport they say nothing."""
    indices = torch.zeros(2, 2, dtype=torch.int32)
    for marks in ("#channel=1#max_sms=8", "#max_sms=8", f"#rank={rank.rank}#channel=1#max_sms=8"):
        ep.plan(indices, 4, 8, 16, 1, 2, rank.group_name + marks)
    for marks in ("#max_sms=", "#max_sms=x", "#max_sms=8#channel=1"):
        text = error_of(lambda m=marks: ep.plan(indices, 4, 8, 16, 1, 2, rank.group_name + m))
        assert "argument 'group_name': expected" in text


def test_marks_of_a_name(make_pool) -> None:
    make_pool(2).run(check_name)


def check_one_rank(rank: Rank) -> None:
    """One rank exchanges nothing, and so obeys any limit."""
    EpContext(rank.group, **SIZES, max_num_sms=8).finalize()
    ep_bootstrap(rank.group, 4, 8, 3, 2, max_num_sms=8)
    ep_finalize()


def test_one_rank_obeys_any_limit(make_pool) -> None:
    make_pool(1).run(check_one_rank)
