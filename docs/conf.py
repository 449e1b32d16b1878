"""Settings of Sphinx. `make docs` builds the site into build/docs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "streambp-fx"
author = "The streambp-fx developers"
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated", "mathml"]
exclude_patterns = ["_generated"]

html_theme = "furo"
html_title = "streambp-fx"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_show_copyright = False
html_copy_source = False
pygments_style = "a11y-light"
pygments_dark_style = "github-dark"

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3

# Docstrings are Google's form, with `code` in single backticks.
default_role = "literal"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 80
