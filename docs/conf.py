"""The site: ``make docs`` builds it from these pages and from the docstrings of psync.

Sphinx with MyST, and the theme of numpy, pandas and scipy: it is kept by the projects that use it,
has a dark mode, a search in the page, and works without JavaScript. Material for MkDocs, the other
one that was looked at, is in maintenance mode, and MkDocs itself unmaintained.
"""

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

import psync  # noqa: E402

project = "psync"
release = version = psync.__version__
copyright = "the authors of psync"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "pictures"]
source_suffix = {".md": "markdown"}
nitpicky = False
suppress_warnings = ["config.cache"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_mock_imports = ["torch", "jax", "keras", "optax", "ray", "dask", "distributed"]
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_use_rtype = False

html_theme = "pydata_sphinx_theme"
html_title = "psync"
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["sphinx-version"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_show_sourcelink = False
copybutton_prompt_text = "$ "


def _plain_docstrings(app, what, name, obj, options, lines):
    """Say once what is inherited: psync's errors and handles have docstrings of their own."""
    if what == "class" and inspect.isclass(obj) and not inspect.getdoc(obj):
        lines[:] = [f"See {obj.__mro__[1].__name__}."]


def setup(app):
    app.connect("autodoc-process-docstring", _plain_docstrings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
