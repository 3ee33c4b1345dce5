"""Writes what is made from the schemas in csrc/registration.cpp, which so stand in one place:
``python -m build_tools.op_handles``.

csrc/common/ops has the C++ handles of all ops. Calls through a handle, and the kernels that common/register.h registers
for it, are compared with the schema when they are compiled. transformer_plugin/_schemas.py has a checksum of each
schema, by which an import tells a library that was built from other sources.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REGISTRATION = ROOT / "csrc/registration.cpp"
HANDLES = ROOT / "csrc/common/ops"
CHECKSUMS = ROOT / "transformer_plugin/_schemas.py"

#: C++ types of arguments and of results, as c10's dispatcher has them. Names of aliases are left out before.
ARGUMENTS = {
    "Tensor": "const Tensor&",
    "Tensor?": "OptionalTensorArg",
    "Tensor[]": "TensorList",
    "Tensor[]?": "std::optional<TensorList>",
    "ScalarType": "ScalarType",
    "ScalarType?": "std::optional<ScalarType>",
    "SymInt": "SymInt",
    "SymInt?": "std::optional<SymInt>",
    "bool": "bool",
    "Device?": "std::optional<c10::Device>",
    "float": "double",
    "int": "int64_t",
    "int?": "std::optional<int64_t>",
    "int[]": "at::IntArrayRef",
    "str": "std::string_view",
    "str[]": "const std::vector<std::string>&",
}
RESULTS = {
    "Tensor": "Tensor",
    "Tensor[]": "std::vector<Tensor>",
    "bool": "bool",
    "int": "int64_t",
    "int[]": "std::vector<int64_t>",
    "str": "std::string",
    "str[]": "std::vector<std::string>",
}

#: columns of a line.
WIDTH = 130

_SECTION = re.compile(r"^  // (\w+): ")
_SCHEMA = re.compile(r"([\w.]+)\((.*)\) -> (.*)")


def schemas() -> dict[str, list[str]]:
    """Returns the schemas of each section. A section begins with a comment that names a folder of csrc."""
    folders = {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    found: dict[str, list[str]] = {}
    section, pending = "", ""
    for line in REGISTRATION.read_text().splitlines():
        comment = _SECTION.match(line)
        if comment and comment[1] in folders:
            section = comment[1]
        if line.startswith("  m.def("):
            pending = ""
        if not line.startswith("  //"):
            pending += "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', line))
        if pending and line.rstrip().split("  //")[0].endswith(");"):
            found.setdefault(section, []).append(pending.replace('\\"', '"'))
            pending = ""
    return found


def _without_alias(text: str) -> str:
    return re.sub(r"\([a-z]!?\)", "", text)


def _arguments(text: str) -> list[str]:
    """C++ declarations of the arguments of a schema."""
    found = []
    for argument in re.split(r", (?=[A-Za-z]+(?:\([a-z]!?\))?[\[\]?]* \w)", text) if text else []:
        kind, name = _without_alias(argument).split("=")[0].split(" ")
        found.append(f"{ARGUMENTS[kind]} {name}")
    return found


def _result(text: str) -> str:
    text = _without_alias(text)
    if not text.startswith("("):
        return RESULTS[text]
    kinds = [each.split(" ")[0] for each in text[1:-1].split(", ")] if text != "()" else []
    return f"std::tuple<{', '.join(RESULTS[kind] for kind in kinds)}>" if kinds else "void"


def declaration(schema: str) -> str:
    """The handle of one op."""
    match = _SCHEMA.fullmatch(schema)
    assert match, schema
    name, arguments, result = match.groups()
    first, *rest = [f"{each}," for each in _arguments(arguments)] or [""]
    units = [f'inline constexpr Op<"{name}", {_result(result)}({first}', *rest]
    units[-1] = units[-1].rstrip(",") + f")> {name.replace('.', '_')};"
    lines = [units[0]]
    for unit in units[1:]:
        if len(lines[-1]) + len(unit) < WIDTH:
            lines[-1] += f" {unit}"
        else:
            lines.append(f"    {unit}")
    return "\n".join(lines)


def headers() -> dict[Path, str]:
    """The text of each header."""
    found = {}
    for section, of_section in schemas().items():
        declarations = "\n".join(declaration(schema) for schema in of_section)
        found[HANDLES / f"{section}.h"] = (
            f"// Handles of the ops of {section}. Written by build_tools/op_handles.py from registration.cpp.\n"
            "// clang-format off\n#pragma once\n\n"
            '#include "common/op.h"\n\n'
            f"namespace transformer_plugin::ops {{\n\n{declarations}\n\n}}  // namespace transformer_plugin::ops\n"
        )
    return found


def checksums() -> str:
    """The text of the module with the checksums, of schemas as torch prints them."""
    import torch

    found = {}
    for schema in (each for of_section in schemas().values() for each in of_section):
        printed = str(torch._C.parse_schema(f"transformer_plugin::{schema}"))
        found[schema.partition("(")[0]] = zlib.crc32(printed.encode())
    lines = "".join(f'    "{name}": 0x{found[name]:08X},\n' for name in sorted(found))
    return (
        '"""Checksums of the schemas of the ops that these files call. Written by build_tools/op_handles.py."""\n\n'
        f"SCHEMAS = {{\n{lines}}}\n"
    )


def main() -> None:
    """Writes the files, and removes the headers of sections that are gone."""
    texts = headers()
    CHECKSUMS.write_text(checksums())
    HANDLES.mkdir(exist_ok=True)
    for path in set(HANDLES.glob("*.h")) - set(texts):
        path.unlink()
    for path, text in texts.items():
        path.write_text(text)
    print(
        f"{sum(len(each) for each in schemas().values())} ops in {len(texts)} headers of {HANDLES.relative_to(ROOT)}"
    )


if __name__ == "__main__":
    main()
