"""The doctor, `python -m transformer_plugin`: report, exit status, and how it looks at what may hang or crash."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from transformer_plugin import __version__
from transformer_plugin._library import LIBRARIES
from transformer_plugin._program import is_starting
from transformer_plugin.doctor import child, gpus, program
from transformer_plugin.doctor.child import Answer
from transformer_plugin.doctor.installation import architectures
from transformer_plugin.doctor.report import WIDTH, Fact, Section, as_json, as_text, failures
from transformer_plugin.recipes import RECIPES

Report = dict[str, dict[str, list[dict[str, str]]]]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "transformer_plugin", *arguments], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def report() -> Report:
    """The facts of this installation, by section and name."""
    done = run("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(done.stdout)
    assert content["ok"] is True
    found: Report = {}
    for section in content["sections"]:
        facts = found.setdefault(section["name"], {})
        for fact in section["facts"]:
            assert list(fact) == ["mark", "name", "value", "todo"] and fact["mark"] in ("ok", "no")
            facts.setdefault(fact["name"], []).append(fact)
    return found


def test_sections(report: Report) -> None:
    devices = [f"on cuda:{i}" for i in range(torch.cuda.device_count())] if len(LIBRARIES) > 1 else []
    assert list(report) == [
        *("machine", "driver and GPUs", "torch", "package", "import transformer_plugin", "on cpu"),
        *devices,
        "between GPUs",
    ]
    assert report["torch"]["torch"][0]["value"].startswith(f"{torch.__version__}, built with")
    assert report["package"]["transformer_plugin"][0]["value"].startswith(__version__)
    for library in LIBRARIES:
        assert report["package"][library.name][0]["mark"] == "ok"


def test_every_recipe_and_value_on_every_device(report: Report) -> None:
    for name, facts in report.items():
        if name.startswith("on "):
            assert list(facts) == [*RECIPES, "quantized bytes", "products"]
            assert all(fact["mark"] == "ok" for of_name in facts.values() for fact in of_name)


@pytest.mark.gpu
@pytest.mark.skipif(len(LIBRARIES) == 1, reason="this build has no kernels")
def test_a_gpu(report: Report) -> None:
    assert report["driver and GPUs"]["GPU 0"][0]["value"].startswith(torch.cuda.get_device_name(0))
    assert report["torch"]["GPUs of torch"][0]["value"] == str(torch.cuda.device_count())
    (fact, *_) = report["on cuda:0"]["fp8_block"]
    assert fact["value"].startswith("forward, data_grad, weight_grad: ")


@pytest.mark.gpus(2)
@pytest.mark.skipif(len(LIBRARIES) == 1, reason="this build has no kernels")
def test_between_two_gpus(report: Report) -> None:
    facts = report["between GPUs"]
    assert {"GPU 0 accesses", "GPU 1 accesses", "symmetric memory"} <= set(facts)
    reaches = all(torch.cuda.can_device_access_peer(i, 1 - i) for i in (0, 1))
    if torch.cuda.device_count() == 2 and reaches:
        assert facts["symmetric memory"][0]["mark"] == "ok"


def test_help_and_arguments() -> None:
    done = run("--help")
    assert done.returncode == 0
    for word in ("--json", "--timeout SECONDS", "It writes no files", "Exit status: 0 if all is right"):
        assert word in " ".join(done.stdout.split())
    for wrong in (("--timeout", "0"), ("--timeout", "soon"), ("--colour",), ("x",)):
        done = run(*wrong)
        assert done.returncode == 2 and "Traceback" not in done.stderr
    assert run("--version").stdout == f"transformer_plugin {__version__}\n"


def test_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    first = Section("one", [Fact("ok", "a", f"{tmp_path}/x"), Fact("no", "long", "word " * 60)])
    lines = as_text([first]).splitlines()
    assert lines[:2] == ["one", "  ok      a     ~/x"]
    assert max(map(len, lines)) <= WIDTH
    assert lines[-1] == "ok: everything that was looked at is right."
    second = Section("two")
    second.failed("b", "wrong", "Do this.")
    lines = as_text([first, second]).splitlines()
    assert lines[-5:] == [
        "two",
        "  FAILED  b     wrong",
        "                -> Do this.",
        "",
        "FAILED: b. Each has a line that begins with -> and says what to do.",
    ]
    assert "\033" not in "".join(lines)
    assert json.loads(as_json([second])) == {
        "ok": False,
        "sections": [
            {"name": "two", "facts": [{"mark": "FAILED", "name": "b", "value": "wrong", "todo": "Do this."}]}
        ],
    }


def test_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    section = Section("one", [Fact("no", "a", "b")])
    monkeypatch.setattr(program, "examine", lambda seconds: [section])
    assert program.main([]) == 0
    section.failed("c", "d", "e")
    assert program.main(["--json"]) == 1
    assert '"ok": false' in capsys.readouterr().out


def test_what_an_import_says() -> None:
    section, loaded = program._imported(
        Answer(error="transformer_plugin: expected a 2.11, got b. Do c. Or d.")
    )
    assert loaded is None and section.facts == [
        Fact("FAILED", "import", "expected a 2.11, got b", "Do c. Or d.")
    ]
    for error in ("OSError: a. b", "the process was ended by signal SIGSEGV: a. b"):
        (fact,) = program._imported(Answer(error=error))[0].facts
        assert fact.value == error and fact.todo.startswith("Build it again: ")


def test_children(tmp_path: Path) -> None:
    """What they return, raise, and how they end."""
    file = tmp_path / "looks.py"
    file.write_text(
        "import os, signal, sys, time\n"
        "def add(a, b):\n    print('noise', 3, flush=True)\n    return [a + b]\n"
        "def wrong():\n    raise ValueError('one\\ntwo')\n"
        "def refused():\n    raise ImportError('transformer_plugin: expected a, got b. Do c.')\n"
        "def crash():\n    print('last words', file=sys.stderr, flush=True)\n    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "def leave():\n    os._exit(3)\n"
        "def hang():\n    time.sleep(600)\n"
    )

    def ask(function: str, *arguments: Any, seconds: float = 60) -> Answer:
        return child.ask(seconds, str(file), function, *arguments)

    assert ask("add", 1, 2) == Answer(result=[3])
    assert ask("wrong") == Answer(error="ValueError: one two")
    assert ask("refused") == Answer(error="transformer_plugin: expected a, got b. Do c.")
    crash = Answer(error="the process was ended by signal SIGSEGV: last words")
    assert ask("crash") == crash
    assert ask("leave") == Answer(error="the process ended with status 3 and no answer")
    begin = time.monotonic()
    late = Answer(error="no answer within 1 seconds")
    assert ask("hang", seconds=1) == late
    assert time.monotonic() - begin < 5
    several = child.ask_all(30, [(str(file), "crash"), (str(file), "add", 1, 1)])
    assert several == [crash, Answer(result=[2])]


def driver_facts(**more: Any) -> dict[str, Any]:
    device = {"name": "H200", "capability": [9, 0], "bytes": 2**37}
    facts = {"found": True, "version": "580.1", "cuda": [13, 0], "error": "", "devices": [device]}
    return facts | more


def marks(section: Section) -> dict[str, str]:
    return {fact.name: fact.mark for fact in section.facts}


def test_drivers() -> None:
    section, _ = gpus.driver(Answer(result=driver_facts()))
    assert section.facts == [
        Fact("ok", "CUDA driver", "580.1, for programs of CUDA 13.0 and earlier"),
        Fact("ok", "GPU 0", "H200, compute capability 9.0, 128.0 GiB"),
    ]
    assert marks(gpus.driver(Answer(result=driver_facts(devices=[])))[0]) == {
        "CUDA driver": "ok",
        "GPUs": "no",
    }
    assert marks(gpus.driver(Answer(result=driver_facts(found=False)))[0]) == {"CUDA driver": "no"}
    for answer in (
        Answer(result=driver_facts(error="CUDA_ERROR_SYSTEM_NOT_READY (802)", devices=[])),
        Answer(error="no answer within 1 seconds"),
    ):
        (fact,) = gpus.driver(answer)[0].facts
        assert fact.mark == "FAILED" and "nvidia-smi" in fact.todo


@pytest.mark.parametrize(
    ("driver", "cuda", "devices", "mark", "value"),
    [
        ({}, "13.0", 1, "ok", "1"),
        (
            {"cuda": [12, 4]},
            "13.0",
            0,
            "FAILED",
            "none: the driver serves CUDA 12.4, and torch was built with CUDA 13.0",
        ),
        ({}, "13.0", 0, "FAILED", "none of 1: no reason"),
        ({}, None, 0, "no", "none: it was built without CUDA"),
    ],
)
def test_torch_and_the_driver(
    driver: dict[str, Any], cuda: str | None, devices: int, mark: str, value: str
) -> None:
    section = Section("torch")
    gpus.torch_and_gpus(
        {"cuda": cuda, "devices": devices, "error": "no reason"}, driver_facts(**driver), section
    )
    (fact,) = section.facts
    assert (fact.mark, fact.value) == (mark, value)
    assert bool(fact.todo) == (mark != "ok")


def test_a_machine_without_gpus_is_no_fault() -> None:
    section = Section("torch")
    for driver in (driver_facts(found=False, cuda=[0, 0], devices=[]), driver_facts(devices=[])):
        gpus.torch_and_gpus({"cuda": "13.0", "devices": 0, "error": "no driver"}, driver, section)
    assert section.facts == []


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_gpus_have_one_line(count: int) -> None:
    (fact,) = gpus.between(count, 1.0, True).facts
    assert fact.mark == "no" and fact.value == f"nothing to try with {'1 GPU' if count else 'no GPUs'}"


def test_gpus_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "ask", lambda *_: Answer(error="no answer within 1 seconds"))
    section = gpus.between(2, 1.0, False)
    assert marks(section) == {"peer access": "FAILED", "symmetric memory": "no"}


@pytest.mark.parametrize(
    ("answers", "mark", "value"),
    [
        ([Answer(result=[True, ""])] * 2, "ok", "2 GPUs write and read each other's memory"),
        ([Answer(result=[False, "why"])] * 2, "no", "why; experts over ranks use the transport all_gather"),
        (
            [Answer(result=[True, ""]), Answer(error="the process was ended by signal SIGSEGV")],
            "FAILED",
            "rank 1: the process was ended by signal SIGSEGV",
        ),
    ],
)
def test_symmetric_memory(
    monkeypatch: pytest.MonkeyPatch, answers: list[Answer], mark: str, value: str
) -> None:
    monkeypatch.setattr(child, "ask", lambda *_: Answer(result=[[True, True], [False, True]]))
    monkeypatch.setattr(child, "ask_all", lambda *_: answers)
    facts = {fact.name: fact for fact in gpus.between(2, 1.0, True).facts}
    assert facts["GPU 0 accesses"].mark == "ok" and facts["GPU 0 accesses"].value == "GPUs 1 (of 1 others)"
    assert facts["GPU 1 accesses"].mark == "no"
    assert (facts["symmetric memory"].mark, facts["symmetric memory"].value) == (mark, value)


def test_ranks_of_symmetric_memory() -> None:
    """As processes of the doctor, here on a CPU; and one alone says that the other has not come."""
    port = gpus._free_port()
    tasks = [(gpus.PACKAGE, "shared_memory", "cpu", rank, 2, port, 30.0) for rank in range(2)]
    assert child.ask_all(60, tasks) == [Answer(result=[False, "symmetric memory is of GPUs"])] * 2
    answer = child.ask(60, gpus.PACKAGE, "shared_memory", "cpu", 0, 2, gpus._free_port(), 1.0)
    assert answer.result is None and "Error: " in answer.error and "\n" not in answer.error


def test_wrong_values_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose bytes are wrong, and whose products have no kernel."""
    image = (
        "RuntimeError: transformer_plugin: kernel 'gemm': expected a GPU for which the library was built, of compute "
        "capability 9.0a, got one of 10.0a. Build it for this GPU: `TORCH_CUDA_ARCH_LIST=10.0a pip install .`."
    )
    found = {
        "kernels": {"result": {"fp8_block": ["how"]}},
        "bytes": {"result": {"compared": 2, "wrong": [["mxfp8 matrix", "got", "stored"]]}},
        "products": {"error": image},
    }
    monkeypatch.setattr(child, "ask", lambda *_: Answer(result=found))
    section = program._device("cuda:0", 1.0)
    assert section.facts[0] == Fact("ok", "fp8_block", "how")
    of_bytes, of_products = failures([section])
    assert of_bytes.value == "mxfp8 matrix: expected stored, got got"
    assert of_products.value == (
        "kernel 'gemm': expected a GPU for which the library was built, of compute capability 9.0a, got one of 10.0a"
    )
    assert of_products.todo == "Build it for this GPU: `TORCH_CUDA_ARCH_LIST=10.0a pip install .`."
    monkeypatch.setattr(child, "ask", lambda *_: Answer(error="no answer"))
    (fact,) = program._device("cuda:0", 1.0).facts
    assert (fact.mark, fact.value) == ("FAILED", "no answer")


def fat_binary(*entries: tuple[int, int, int]) -> bytes:
    """As nvcc writes it, of (kind, architecture, flags)."""
    body = b""
    for kind, number, flags in entries:
        head = kind.to_bytes(2, "little") + bytes(2) + (64).to_bytes(4, "little") + (8).to_bytes(8, "little")
        head += bytes(12) + number.to_bytes(4, "little")
        body += head.ljust(40, b"\0") + flags.to_bytes(8, "little") + bytes(16) + bytes(8)
    return 0xBA55ED50.to_bytes(4, "little") + b"\1\0\x10\0" + len(body).to_bytes(8, "little") + body


def test_architectures_of_a_library(tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    entries = ((2, 80, 0x11), (2, 90, 0x108011), (1, 90, 0x8011), (2, 120, 0x11))
    library.write_bytes(b"\x7fELF" + fat_binary(*entries) + b"\x50\xed\x55\xba" + bytes(3))
    assert architectures(library) == ["8.0", "9.0a", "12.0"]
    library.write_bytes(b"\x7fELF")
    assert architectures(library) == []


@pytest.mark.skipif(len(LIBRARIES) == 1, reason="this build has no kernels")
def test_architectures_of_the_kernels() -> None:
    assert architectures(LIBRARIES[1])


@pytest.mark.parametrize(
    ("argv", "original", "is_it"),
    [
        (["-m", "--json"], ["python", "-m", "transformer_plugin", "--json"], True),
        (["-m"], ["python", "-mtransformer_plugin"], True),
        (["-m", "--json"], ["python", "-I", "-Wignore", "-Xmtransformer_plugin", "--json"], False),
        (["-m"], ["python", "-Imtransformer_plugin"], True),
        (["-m"], ["python", "-m", "transformer_plugin.launch"], False),
        (["train.py"], ["python", "train.py"], False),
    ],
)
def test_when_the_package_is_run(
    argv: list[str], original: list[str], is_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", original)
    assert is_starting() is is_it
