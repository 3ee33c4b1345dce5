"""Builds the shared libraries, transformer_plugin/_kernels.cu*.so and _C.torch*.so. Metadata is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from build_tools.toolchain import ToolchainError, check_torch  # noqa: E402

try:
    check_torch()
    from build_tools.extension import build_command, libraries

    built = libraries(ROOT)
    setup(
        ext_modules=[Extension(name, [], py_limited_api=True) for name in built.names],
        cmdclass={"build_ext": build_command(built)},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )
except ToolchainError as error:
    sys.exit(f"\ntransformer_plugin cannot be built here: {error}\n")
