"""csrc/common/ops has a handle of every op with the types of its schema; a kernel of other types does not compile."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

from build_tools import op_handles
from tests.surface.surface import ROOT

SOURCE = """
#include "common/ops/routing.h"
#include "common/register.h"
using namespace transformer_plugin;
at::Tensor of_ints(const at::Tensor& grad, const at::Tensor& counts, const at::Tensor& total, int64_t tokens,
                   int64_t topk, double coeff) { return grad; }
at::Tensor fewer(const at::Tensor& scores, const at::Tensor& counts, const at::Tensor& total, int64_t topk) {
  return scores;
}
at::Tensor other(const at::Tensor& logits, std::string function) { return logits; }
int64_t result(const at::Tensor& logits, std::string_view function) { return 0; }
TP_IMPL_FOR(CPU, aux_loss_backward, of_ints);
TP_IMPL_FOR(CPU, aux_loss, fewer);
TP_IMPL_FOR(CPU, router_scores, other);
TP_IMPL_FOR(Meta, router_scores, result);
"""
WRONG = "the types of the kernel are not those of the schema in registration.cpp"


def test_headers_are_those_of_the_schemas() -> None:
    texts = op_handles.headers()
    assert set(op_handles.HANDLES.glob("*")) == set(texts)
    for path, text in texts.items():
        assert path.read_text() == text, f"{path.name}: run python -m build_tools.op_handles"
    assert op_handles.CHECKSUMS.read_text() == op_handles.checksums(), "run python -m build_tools.op_handles"


def test_every_op_has_a_handle() -> None:
    registered = re.findall(r'm\.def\(\s*"([\w.]+)\(', (ROOT / "csrc" / "registration.cpp").read_text())
    named = re.findall(r'Op<"([\w.]+)"', "".join(op_handles.headers().values()))
    assert sorted(named) == sorted(registered)


def test_handle_of_a_schema() -> None:
    schema = 'f(Tensor(a!) x, Tensor? y=None, Tensor(b!)[]? z=None, int[] k=[1, 2], str s="a, b", SymInt? n=None) -> '
    arguments = (
        "const Tensor& x, OptionalTensorArg y, std::optional<TensorList> z, at::IntArrayRef k, std::string_view s, "
        "std::optional<SymInt> n"
    )
    results = {
        "()": "void",
        "Tensor": "Tensor",
        "(Tensor a, int[] b)": "std::tuple<Tensor, std::vector<int64_t>>",
        "Tensor(a!)": "Tensor",
    }
    for result, of_cpp in results.items():
        text = " ".join(op_handles.declaration(schema + result).split())
        assert text == f'inline constexpr Op<"f", {of_cpp}({arguments})> f;'


def test_kernels_of_other_types_do_not_compile(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    source = tmp_path / "kernel.cpp"
    source.write_text(SOURCE)
    folders = [f"-I{folder}" for folder in (ROOT / "csrc", *include_paths("cpu"))]
    command = [compiler, "-std=c++20", "-fsyntax-only", *folders, str(source)]
    run = subprocess.run(command, capture_output=True, text=True)
    # The first takes an int64_t where the schema has a SymInt.
    wrong = re.findall(r"OpHandle = Op<OpName<\d+>\{\"(\w+)\"\}", run.stderr)
    assert wrong == ["aux_loss", "router_scores", "router_scores"], run.stderr
    assert (
        len(re.findall(r"error: (.*)", run.stderr))
        == run.stderr.count(f"static assertion failed: {WRONG}")
        == 3
    )
