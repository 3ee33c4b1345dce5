"""torch.library.opcheck of every op of the registry, with each call that testing/every_op.py lists."""

from __future__ import annotations

import pytest

from tests.opcheck import opcheck
from tests.ops.test_refusals import CALLS, copied
from transformer_plugin.testing.every_op import Call, registered

#: These ops take or return no tensors, and therefore have no kernels and no Meta function to check.
HOST_OPS = {"check_group_sizes", "compare_header", "grouped_gemm_plan", "select_transport"}
HOST_OPS |= {
    "count_deferred_wgrads",
    "is_symmetric",
    "new_wgrad_queue",
    "open_channel",
    "peer_memory_support",
    "release_wgrad_queue",
    "symmetric_allocate",
    "symmetric_empty",
}
HOST_OPS |= {"clear_gathers", "configure_gathers", "count_gathers", "invalidate_prefetched"}
FIRST = list({(call.op, call.name): call for call in CALLS if call.op not in HOST_OPS}.values())


@pytest.mark.parametrize("call", FIRST, ids=[f"{call.op}-{call.name}" for call in FIRST])
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(call: Call) -> None:
    opcheck(call.function, (), copied(call.arguments), always_trace=True)


def test_every_op_is_checked() -> None:
    assert {call.op for call in FIRST} >= set(registered()) - HOST_OPS - {"all_gather_text", "release_group"}
