"""Memory that all ranks of a group read and write: its rendezvous, its refusals, and the op that tries it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.surface.surface import ROOT
from transformer_plugin.errors import PeerTimeoutError
from transformer_plugin.ops import open_channel, peer_memory_support
from transformer_plugin.testing.distributed import Rank, RankPool

#: Renames the keys that follow "keys", of one rendezvous, or says why the ranks whose facts follow refuse.
PROGRAM = """
#include <cstdio>
#include <string>
#include <vector>

#include "distributed/symmetric/rank_facts.h"
#include "distributed/symmetric/rendezvous_key.h"

using namespace transformer_plugin::distributed;

int main(int count, char** arguments) {
  ExchangeNumbers numbers;
  std::vector<RankFacts> ranks;
  for (int i = 2; i < count; ++i) {
    if (arguments[1] == std::string("keys")) {
      std::puts(rendezvous_key(arguments[i], numbers).c_str());
    } else {
      ranks.push_back(RankFacts::parse(RankFacts::parse(arguments[i]).text()));
    }
  }
  if (!ranks.empty()) std::puts(refusal_of(ranks).c_str());
}
"""

Program = Callable[..., list[str]]

ONE_GPU = "ranks {} are on one GPU, {}, which TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 on every rank allows"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The program, which takes arguments and returns lines."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler here")
    folder = tmp_path_factory.mktemp("peer_memory")
    (folder / "main.cpp").write_text(PROGRAM)
    facts = ROOT / "csrc/distributed/symmetric/rank_facts.cpp"
    command = [compiler, "-std=c++20", f"-I{ROOT}/csrc", "-o", str(folder / "main")]
    subprocess.run([*command, str(folder / "main.cpp"), str(facts)], check=True)

    def run(*arguments: str) -> list[str]:
        done = subprocess.run([folder / "main", *arguments], check=True, capture_output=True, text=True)
        return done.stdout.splitlines()

    return run


def keys_of_rendezvous(first: int, size: int, rank: int, exchange: str = "CUDASymmetricMemory") -> list[str]:
    """The keys of three exchanges on a rank whose process has made ``first`` before: each is written, then read."""
    keys = []
    for number in range(first, first + 3):
        keys.append(f"{exchange}/{number}/{rank}")
        keys += [f"{exchange}/{number}/{peer}" for peer in range(size) if peer != rank]
    return keys


def test_keys_agree_between_ranks_with_other_rendezvous_before(program: Program) -> None:
    for size, earlier in ((2, (0, 0)), (2, (7, 0)), (4, (3, 98, 9, 11))):
        used = [
            set(program("keys", *keys_of_rendezvous(first, size, rank))) for rank, first in enumerate(earlier)
        ]
        expected = {f"CUDASymmetricMemory/{number}/{rank}" for number in range(3) for rank in range(size)}
        assert used == [expected] * size


def test_keys_agree_when_another_rendezvous_comes_between(program: Program) -> None:
    """Another thread of the process has used the number 6 in a group of its own."""
    assert program(
        "keys", "CUDASymmetricMemory/5/0", "CUDASymmetricMemory/7/0", "CUDASymmetricMemory/7/1"
    ) == [
        "CUDASymmetricMemory/0/0",
        "CUDASymmetricMemory/1/0",
        "CUDASymmetricMemory/1/1",
    ]


def test_keys_of_several_exchanges_and_of_other_forms(program: Program) -> None:
    renamed = {
        "CUDASymmetricMemory/4/1": "CUDASymmetricMemory/0/1",
        "symm_mem_validate/transformer_plugin/0/8/2/1": "symm_mem_validate/transformer_plugin/0/8/0/1",
        "NCCLSymmetricMemory/9/0": "NCCLSymmetricMemory/0/0",
        "CUDASymmetricMemory/5/1": "CUDASymmetricMemory/1/1",
    }
    assert program("keys", *renamed) == list(renamed.values())
    others = ["", "key", "/", "a/b", "/1/2", "a/1/", "a//1", "a/x/1", "a/1/x", "a/-1/0"]
    assert program("keys", *others) == [key if key != "/1/2" else "/0/2" for key in others]


def facts(
    gpu: str,
    *,
    refusal: str = "",
    size: int = 4096,
    host: str = "node",
    boot: str = "b",
    folder: str = "1:2",
    visible: str = "",
    reachable: str = "",
    may_share: str = "0",
) -> str:
    """What a rank sends, as ``RankFacts::text`` writes it."""
    lines = [refusal, "3", str(size), host, boot, folder, gpu, visible, reachable, may_share]
    return "\n".join(lines) + "\n"


def test_refusals_name_ranks(program: Program) -> None:
    cases = [
        ([facts("A", visible="B", reachable="B"), facts("B", visible="A C", reachable="A")], ""),
        ([facts("A"), facts("B")], ""),  # each process sees one GPU
        ([facts("A", refusal="no")] * 2, "no"),
        ([facts("A"), facts("B", refusal="no"), facts("C", refusal="never")], "rank 1: no; rank 2: never"),
        (
            [facts("A"), facts("B", size=8192), facts("C")],
            "the ranks ask for different sizes: 4096 bytes on ranks 0, 2; 8192 bytes on rank 1",
        ),
        (
            [facts("A"), facts("B"), facts("A", host="other")],
            "the ranks are on different hosts: node on ranks 0, 1; other on rank 2",
        ),
        (
            [facts("A"), facts("B", folder="1:3")],
            "the ranks have different folders of temporary files, through which they would pass memory: "
            "1:2 on rank 0; 1:3 on rank 1",
        ),
        ([facts("A"), facts("B"), facts("B")], ONE_GPU.format("1, 2", "B")),
        ([facts("A", may_share="1"), facts("A")], ONE_GPU.format("0, 1", "A")),
        ([facts("A", may_share="1")] * 4, ""),
        (
            [facts("A", may_share="1"), facts("A", may_share="1", size=1)],
            "the ranks ask for different sizes: 4096 bytes on rank 0; 1 bytes on rank 1",
        ),
        (
            [facts("A", visible="B"), facts("B", visible="A", reachable="A")],
            "the GPU of rank 0 cannot access the memory of the GPU of rank 1",
        ),
    ]
    for ranks, expected in cases:
        assert program("facts", *ranks) == [expected]


def support(name: str, device: torch.device | None = None, timeout_ms: int = 20_000) -> tuple[bool, str]:
    return peer_memory_support(name, timeout_ms, device)


def check_on_cpus(rank: Rank) -> list[tuple[bool, str]]:
    answers = [support(rank.group_name, rank.device) for _ in range(2)]
    with pytest.raises(ValueError, match="argument 'device': expected a CPU or a CUDA device, got meta"):
        support(rank.group_name, torch.device("meta"))
    return [*answers, support("")]


@pytest.mark.parametrize("size", [2, 4])
def test_cpus_have_none(make_pool: Callable[..., RankPool], size: int) -> None:
    nothing = (False, "symmetric memory is of GPUs")
    answers = make_pool(size).run(check_on_cpus)
    assert answers == [[nothing, nothing, (False, "the group has one rank")]] * size


def check_mixed(rank: Rank) -> tuple[bool, str]:
    return support(rank.group_name, torch.device("cpu") if rank.rank else torch.device("cuda", 0))


def test_ranks_on_different_devices_have_one_answer() -> None:
    with RankPool(2) as pool:
        answers = pool.run(check_mixed)
    assert answers[0] == answers[1]
    assert not answers[0][0]
    assert answers[0][1].endswith("rank 1: symmetric memory is of GPUs")


def check_missing(rank: Rank) -> None:
    if rank.rank:
        return
    with pytest.raises(
        PeerTimeoutError, match=r"allocate_peer_memory.*rank\(s\) 1 did not take part"
    ) as caught:
        support(rank.group_name, timeout_ms=1000)
    assert caught.value.ranks == (1,)


def test_a_rank_that_does_not_come() -> None:
    with RankPool(2) as pool:
        pool.run(check_missing)


def check_one_gpu(rank: Rank, allowed_on: tuple[int, ...]) -> tuple[bool, str]:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = str(int(rank.rank in allowed_on))
    return support(rank.group_name, torch.device("cuda", 0))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("allowed_on", [(), (0,), (0, 1)])
def test_two_ranks_on_one_gpu(allowed_on: tuple[int, ...]) -> None:
    with RankPool(2) as pool:
        answers = pool.run(check_one_gpu, allowed_on)
    assert answers[0] == answers[1]
    if len(allowed_on) == 2:
        assert answers[0] == (True, "")
    else:
        assert not answers[0][0]
        assert answers[0][1].startswith("ranks 0, 1 are on one GPU, GPU-")


def check_supported(rank: Rank, backend: str) -> None:
    """The op itself writes words from every rank to every rank, and reads them on every rank."""
    from torch.distributed import _symmetric_memory as symmetric

    device = torch.device("cuda", rank.rank)
    torch.cuda.set_device(device)
    assert support(rank.group_name, device) == (True, "")
    for count in range(2):  # rank 0 makes more rendezvous than rank 1, in a group of its own
        alone = dist.new_group([0], backend=backend)
        if rank.rank == 0:
            for _ in range(count + 1):
                symmetric.rendezvous(symmetric.empty(64, device=device), alone.group_name)
        again = dist.new_group([0, 1], backend=backend)
        assert support(again.group_name, device) == (True, "")
        assert support(again.group_name, device) == (True, "")  # known, without a rendezvous


@pytest.mark.gpus(2)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_two_gpus(make_pool: Callable[..., RankPool], backend: str) -> None:
    make_pool(2, backend).run(check_supported, backend)


def check_capture(rank: Rank) -> None:
    stream = torch.cuda.Stream(rank.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            with pytest.raises(
                ValueError, match="Make the context, which allocates the memory, before the capture"
            ):
                support(dist.new_group([0, 1], backend="gloo").group_name, rank.device)
        finally:
            graph.capture_end()


@pytest.mark.gpus(2)
def test_no_allocation_in_a_capture(make_pool: Callable[..., RankPool]) -> None:
    make_pool(2, "nccl").run(check_capture)


def check_freed(rank: Rank) -> None:
    """Memory of destroyed groups is freed by a later allocation. It is large beside what other processes of the GPU
    allocate meanwhile."""
    device = torch.device("cuda", rank.rank)
    torch.cuda.set_device(device)
    half = 2**30  # bytes of a region, of which a channel has two
    rows = dict.fromkeys(("received_rows", "returned_rows", "planned_rows", "topk"), 1)
    free = []
    for _ in range(12):
        group = dist.new_group([0, 1], backend="gloo")
        reason = open_channel(group.group_name, **rows, record_bytes=half, num_experts=2, device=device)
        assert reason == ""
        dist.destroy_process_group(group)
        del group
        torch.ops.transformer_plugin.release_group("")
        free.append(torch.cuda.mem_get_info(device)[0])
    assert free[1] - free[-1] < 5 * 2 * half, free  # 10 channels less if none were freed


@pytest.mark.gpus(2)
def test_memory_of_destroyed_groups_is_freed(make_pool: Callable[..., RankPool]) -> None:
    make_pool(2, "gloo").run(check_freed)
