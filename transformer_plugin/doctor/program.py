"""The command line of ``python -m transformer_plugin``. Standard library alone."""

from __future__ import annotations

import argparse
from typing import Any

from transformer_plugin import __version__
from transformer_plugin._torch_versions import BUILD, NO_TORCH
from transformer_plugin.doctor import child, gpus
from transformer_plugin.doctor.installation import installation
from transformer_plugin.doctor.machine import machine
from transformer_plugin.doctor.report import Section, as_json, as_text, failures

_OWN = "transformer_plugin: "
_REPORT = "Report a bug with all of this output."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m transformer_plugin",
        description="Says whether this installation of transformer_plugin is right: versions, libraries, GPUs, which "
        "kernels each recipe uses, and whether quantized bytes and products are the stored ones. It also runs where "
        "the package cannot be imported, and then says why. It writes no files and reads no data of yours.",
        epilog="Exit status: 0 if all is right, 1 if a line says FAILED, 2 for wrong arguments. A GPU that is not "
        "there is no fault. Paste the output into bug reports.",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON, for programs")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="how long each look may take before it is reported as hanging (default: 120)",
    )
    parser.add_argument("--version", action="version", version=f"transformer_plugin {__version__}")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise ValueError
    return value


def _split(error: str) -> tuple[str, str]:
    """The sentence that says what is wrong, and the one that says what to do, which errors of this package have."""
    if not error.startswith(_OWN):
        return error, ""
    reason, _, todo = error.removeprefix(_OWN).partition(". ")
    return reason, todo


def _torch(answer: child.Answer, of_driver: dict[str, Any]) -> tuple[Section, dict[str, Any]]:
    section = Section("torch")
    if answer.error.startswith("ModuleNotFoundError: No module named 'torch'"):
        section.failed("torch", *_split(NO_TORCH))
    elif answer.error:
        todo = "Make `python -c 'import torch'` work first: nothing of this package is in it."
        section.failed("torch", f"it does not work: {answer.error}", todo)
    if answer.error:
        return section, {}
    facts: dict[str, Any] = answer.result
    cuda = facts["cuda"]
    section.ok("torch", f"{facts['version']}, built {f'with CUDA {cuda}' if cuda else 'without CUDA'}")
    section.ok("CPU kernels", f"{facts['isa']}, {facts['threads']} threads")
    if not facts["distributed"]:
        todo = "Install another build of torch: this package's library needs it."
        section.failed("torch.distributed", "not in this torch", todo)
    if cuda:
        if facts["runtime"]:
            section.ok("CUDA runtime", facts["runtime"])
        if facts["architectures"]:
            section.ok("built for", " ".join(facts["architectures"]))
        if facts["nccl"]:
            section.ok("NCCL", facts["nccl"])
        elif facts["distributed"]:
            value = (
                "none: groups of several GPUs have Gloo alone, which has no collectives of their memory here"
            )
            section.no("NCCL", value, "Install a torch with NCCL to train on several GPUs.")
    gpus.torch_and_gpus(facts, of_driver, section)
    return section, facts


def _imported(answer: child.Answer) -> tuple[Section, dict[str, Any] | None]:
    """Whether the package can be imported."""
    section = Section("import transformer_plugin")
    if answer.error:
        reason, todo = _split(answer.error)
        section.failed("import", reason, todo or f"Build it again: {BUILD}. If it stays: {_REPORT.lower()}")
        return section, None
    kernels = "kernels for CPUs and GPUs" if answer.result["has_kernels"] else "kernels for CPUs alone"
    section.ok("import", f"{answer.result['ops']} ops of {answer.result['library']}, {kernels}")
    return section, answer.result


def _compared(section: Section, name: str, answer: child.Answer, what: str) -> None:
    """The values that were compared, as one line; or one for each that is wrong."""
    todo = f"Build it again: {BUILD}. If it stays: {_REPORT.lower()}"
    if "expected a GPU for which the library was built" in answer.error:
        reason, _, instead = answer.error.partition("transformer_plugin: ")[2].partition(". ")
        section.failed(name, reason, instead)
    elif answer.error:
        section.failed(name, answer.error, todo)
    elif not answer.result["wrong"]:
        section.ok(name, f"{what}: {answer.result['compared']} values are those stored")
    else:
        for each, got, expected in answer.result["wrong"]:
            section.failed(name, f"{each}: expected {expected}, got {got}", todo)


def _device(device: str, seconds: float) -> Section:
    """Which kernels run on a device, and whether they are right."""
    section, answer = Section(f"on {device}"), child.ask(seconds, gpus.PACKAGE, "examine", device)
    if answer.error:
        section.failed("kernels", answer.error, _REPORT)
        return section
    kernels, of_bytes, of_products = (
        child.Answer(**answer.result[name]) for name in ("kernels", "bytes", "products")
    )
    if kernels.error:
        section.failed("kernels", kernels.error, _REPORT)
    for name, lines in (kernels.result or {}).items():
        for line in lines:
            section.ok(name, line)
    _compared(section, "quantized bytes", of_bytes, "all formats")
    _compared(section, "products", of_products, "all recipes, forward and backward")
    return section


def examine(seconds: float) -> list[Section]:
    """All sections of the report."""
    first = ((gpus.OF_DRIVER, "driver"), (gpus.OF_TORCH, "versions"), (gpus.PACKAGE, "loaded"))
    by_driver, by_torch, by_package = child.ask_all(seconds, first)
    driver_section, of_driver = gpus.driver(by_driver)
    torch_section, of_torch = _torch(by_torch, of_driver)
    imported, loaded = _imported(by_package)
    sections = [machine(), driver_section, torch_section, installation(__version__), imported]
    usable = int(of_torch.get("devices", 0))
    has_kernels = loaded is not None and bool(loaded["has_kernels"])
    if loaded is not None:
        sections.append(_device("cpu", seconds))
        if has_kernels:
            sections += [_device(f"cuda:{i}", seconds) for i in range(usable)]
        elif usable:
            imported.no(
                "GPUs", "not used by this build, which has no CUDA kernels", f"Build with nvcc: {BUILD}."
            )
    sections.append(gpus.between(usable, seconds, has_kernels))
    return sections


def main(arguments: list[str]) -> int:
    """Prints the report. Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        sections = examine(options.timeout)
    except KeyboardInterrupt:
        return 130
    print(as_json(sections) if options.json else as_text(sections))
    return 1 if failures(sections) else 0
