"""The C++ examples, built and run: training through the dispatcher, a scripted module's numbers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from transformer_plugin._library import LIBRARY

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "cpp" / LIBRARY.name.removesuffix(".so")  # that of each torch
_ops = torch.ops.transformer_plugin

pytestmark = pytest.mark.skipif(not (ROOT / "examples" / "cpp").is_dir(), reason="needs the source tree")


@pytest.fixture(scope="module")
def programs() -> Path:
    """Builds both once; make checks what has changed."""
    assert shutil.which("make"), "the C++ examples are built by make: install it"
    command = ["make", "-C", str(ROOT / "examples" / "cpp"), f"PYTHON={sys.executable}", f"OUT={OUT}"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return OUT


def run(program: Path, *arguments: object, **environment: str) -> str:
    """Runs a program without Python's environment variables; returns its output."""
    done = subprocess.run(
        [str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""} | environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_expert_mlp_trains(programs: Path) -> None:
    lines = run(programs / "expert_mlp", LIBRARY).splitlines()
    assert [line.split()[0] for line in lines] == ["fp32", "bf16", "fp8_block"]
    losses = [[float(x) for x in re.findall(r"\d+\.\d+", line)] for line in lines]
    for before, after in losses:
        assert 0.5 < before < 1.5  # the outputs are small and the targets normal: about 1
        assert after < 0.9 * before
    fp32, bf16, fp8 = (after for _, after in losses)
    assert bf16 == pytest.approx(fp32, rel=0.01) and fp8 == pytest.approx(fp32, rel=0.03)


@pytest.mark.parametrize("program", ["expert_mlp", "scripted"])
def test_no_python_in_the_process(programs: Path, program: str, tmp_path: Path) -> None:
    linked = subprocess.run(
        ["ldd", str(programs / program)], capture_output=True, text=True, check=True
    ).stdout
    assert "libtorch_cpu" in linked and "not found" not in linked
    assert not re.search(r"libpython|libtorch_python", linked)
    arguments = [LIBRARY] if program == "expert_mlp" else [LIBRARY, *save_scripted(tmp_path)]
    loaded = run(
        programs / program, *arguments, LD_DEBUG="files"
    )  # prints the name of every library that is opened
    assert re.search(rf"{re.escape(LIBRARY.name)}", loaded) and "libtorch_cpu" in loaded
    assert not re.search(r"file=\S*(libpython|torch_python)", loaded)


class Experts(torch.nn.Module):
    """A scriptable expert MLP: two grouped products in FP8 with block scales, and SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = torch.nn.Parameter(torch.randn(3, 2 * 96, 64) * 0.1)
        self.fc2 = torch.nn.Parameter(torch.randn(3, 64, 96) * 0.1)

    def forward(self, input: Tensor, group_sizes: Tensor, probs: Tensor) -> Tensor:
        """fc2(swiglu(fc1(input)) * probs)."""
        rows, square = "fp8_block:e4m3,pow2", "fp8_block:e4m3,pow2,square"
        hidden = torch.ops.transformer_plugin.grouped_linear(
            input, [self.fc1], group_sizes, None, None, rows, square, rows
        )
        hidden = torch.ops.transformer_plugin.activation(hidden, probs)
        return torch.ops.transformer_plugin.grouped_linear(
            hidden, [self.fc2], group_sizes, None, None, rows, square, rows
        )


class Box(torch.nn.Module):
    """A scripted module that only contains tensors, to pass them to C++ by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self) -> int:
        """A scripted module must have a forward."""
        return 0


def save_scripted(folder: Path, spoil: bool = False) -> tuple[Path, Path]:
    """Saves a scripted module and its results; with ``spoil`` one bit of the output is changed."""
    torch.manual_seed(0)
    module = torch.jit.script(Experts())
    input = torch.randn(50, 64, requires_grad=True)
    group_sizes, probs = torch.tensor([20, 0, 25]), torch.rand(50)
    output = module(input, group_sizes, probs)
    (grad,) = torch.autograd.grad(output.square().sum(), input)
    assert output[:45].any(1).all() and grad[:45].any(1).all()
    saved = output.detach().clone()
    if spoil:
        saved.view(torch.int32)[7, 7] ^= 1
    box = Box(
        {"input": input.detach(), "group_sizes": group_sizes, "probs": probs, "output": saved, "grad": grad}
    )
    module.save(str(folder / "module.pt"))
    torch.jit.script(box).save(str(folder / "data.pt"))
    return folder / "module.pt", folder / "data.pt"


def test_scripted_module_gives_the_bits_of_python(programs: Path, tmp_path: Path) -> None:
    lines = run(programs / "scripted", LIBRARY, *save_scripted(tmp_path)).splitlines()
    assert [line.split(":")[0] for line in lines] == ["output equal", "grad equal"]


def test_a_changed_bit_is_seen(programs: Path, tmp_path: Path) -> None:
    files = map(str, save_scripted(tmp_path, spoil=True))
    done = subprocess.run(
        [str(programs / "scripted"), str(LIBRARY), *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "output DIFFERENT" in done.stdout and "grad equal" in done.stdout


@pytest.fixture(scope="module")
def linked() -> Path:
    """The programs linked with the library by CMake; it checks what has changed."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    if torch.version.cuda and not Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")).exists():
        pytest.skip("CMake's package of a torch with CUDA needs the CUDA toolkit")
    folder = OUT / "cmake"
    environment = {**os.environ, "TORCH_CUDA_ARCH_LIST": "9.0"}  # torch's package asks a GPU otherwise
    # CMake would keep what it found for another torch or library.
    found = [
        f"-DTorch_DIR={torch.utils.cmake_prefix_path}/Torch",
        f"-Dtransformer_plugin_DIR={LIBRARY.parent}/cmake",
    ]
    for arguments in (
        ["-S", str(ROOT / "examples" / "cpp"), "-B", str(folder), *found],
        ["--build", str(folder)],
    ):
        done = subprocess.run(["cmake", *arguments], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_programs_that_link_the_target(linked: Path, tmp_path: Path) -> None:
    """They name no library when they run."""
    lines = run(linked / "expert_mlp").splitlines()
    assert [line.split()[0] for line in lines] == ["fp32", "bf16", "fp8_block"]
    lines = run(linked / "scripted", *save_scripted(tmp_path)).splitlines()
    assert [line.split(":")[0] for line in lines] == ["output equal", "grad equal"]


def choose(folder: Path, cuda: str | None, *names: str, version: str = "") -> str:
    """What CMake says of the library that a program for torch 2.12 with this CUDA links, of those of these names, if it
    asks for this version of the package, which is 1.2.3."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    package, tree = folder / "with space" / "transformer_plugin", folder / "torch"
    shutil.copytree(LIBRARY.parent / "cmake", package / "cmake")
    for name in names:
        (package / name).touch()
    (package / "__init__.py").write_text('"""A package."""\n\n__version__ = "1.2.3"\n')
    tree.mkdir()
    (tree / "version.py").write_text(f"__version__ = '2.12.1'\ncuda: Optional[str] = {cuda!r}\n")
    # CUDA_VERSION: that of another toolkit
    (tree / "TorchConfig.cmake").write_text(f'set(TORCH_INSTALL_PREFIX "{tree}")\nset(CUDA_VERSION 12.8)\n')
    of_torch = 'set(PACKAGE_VERSION "2.12.1")\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n'
    (tree / "TorchConfigVersion.cmake").write_text(of_torch)
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(x NONE)\n"
        f"find_package(transformer_plugin {version} REQUIRED)\n"
        "get_target_property(libraries transformer_plugin::transformer_plugin INTERFACE_LINK_LIBRARIES)\n"
        'message(STATUS "links ${libraries} of ${transformer_plugin_VERSION}")\n'
    )
    found = [f"-DTorch_DIR={tree}", f"-Dtransformer_plugin_DIR={package}/cmake"]
    command = ["cmake", "-S", str(folder), "-B", str(folder / "out"), *found]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = " ".join((done.stdout + done.stderr).split())
    assert (done.returncode == 0) == ("links" in said)
    return said


@pytest.mark.parametrize(
    ("cuda", "names", "chosen"),
    [
        (
            "13.0",
            ["_C.torch2.11.cu13.so", "_C.torch2.12.cu13.so", "_C.torch2.12.cpu.so"],
            "_C.torch2.12.cu13.so",
        ),
        ("13.0", ["_C.torch2.11.cu13.so", "_C.torch2.12.cpu.so"], "_C.torch2.12.cpu.so"),
        (None, ["_C.torch2.12.cu13.so", "_C.torch2.12.cpu.so"], "_C.torch2.12.cpu.so"),
    ],
)
def test_which_library_the_target_is(tmp_path: Path, cuda: str | None, names: list[str], chosen: str) -> None:
    said = choose(tmp_path, cuda, *names)
    assert f'with space/transformer_plugin/{chosen}",' in said
    assert not [name for name in names if name != chosen and name in said]


@pytest.mark.parametrize(
    ("version", "serves"),
    [("1", True), ("1.2", True), ("1.2.3 EXACT", True), ("1.3", False), ("0.9", False), ("2", False)],
)
def test_the_version_that_a_program_asks_for(tmp_path: Path, version: str, serves: bool) -> None:
    said = choose(tmp_path, None, "_C.torch2.12.cpu.so", version=version)
    assert ("links" in said and "of 1.2.3" in said) == serves
    assert ("version: 1.2.3" in said) != serves  # CMake names what it found instead


@pytest.mark.parametrize(("version", "serves"), [("0.1", True), ("0.0.9", False), ("0.2", False)])
def test_before_1_0_a_minor_version_serves_itself_alone(tmp_path: Path, version: str, serves: bool) -> None:
    text = (LIBRARY.parent / "__init__.py").read_text()
    assert '__version__ = "0.1.' in text
    script = tmp_path / "ask.cmake"
    file = LIBRARY.parent / "cmake" / "transformer_pluginConfigVersion.cmake"
    script.write_text(
        f'set(PACKAGE_FIND_VERSION {version})\ninclude("{file}")\nmessage("${{PACKAGE_VERSION_COMPATIBLE}}")\n'
    )
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    done = subprocess.run(["cmake", "-P", str(script)], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == str(serves).upper()


@pytest.mark.parametrize(
    ("cuda", "names", "wanted"),
    [
        ("13.0", ["_C.torch2.11.cu13.so"], "_C.torch2.12.cu13.so"),
        ("12.9", ["_C.torch2.12.cpu.so", "_C.torch2.12.cu13.so"], "_C.torch2.12.cu12.so"),
        (None, ["_C.torch2.12.cu13.so"], "_C.torch2.12.cpu.so"),
    ],
)
def test_no_library_for_the_target(tmp_path: Path, cuda: str | None, names: list[str], wanted: str) -> None:
    said = choose(tmp_path, cuda, *names)
    assert (
        f"expected {wanted} in {tmp_path}/with space/transformer_plugin, for torch 2.12.1, found: {';'.join(names)}."
        in said
    )


def test_a_missing_library_is_an_error(programs: Path) -> None:
    done = subprocess.run(
        [str(programs / "expert_mlp"), "/nowhere/_C.abi3.so"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and "/nowhere/_C.abi3.so" in done.stderr
