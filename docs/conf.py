"""Sphinx: MyST pages, API pages from the docstrings, furo's theme. A warning is an error."""

from pathlib import Path

project = "pt214"
copyright = "pt214 developers"
release = Path(__file__).parent.parent.joinpath("VERSION").read_text().strip()

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "requirements.txt"]

autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"pt214 {release}"
