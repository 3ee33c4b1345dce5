"""Sphinx: `make docs` builds the manual with warnings as errors."""

from __future__ import annotations

from pathlib import Path

import transformer_plugin

project = "transformer_plugin"
author = "the transformer_plugin authors"
version = release = transformer_plugin.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"transformer_plugin {version}"
html_static_path = [name for name in ["_static"] if (Path(__file__).parent / name).is_dir()]
