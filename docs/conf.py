"""The site: ``make docs`` builds it from these pages and from the docstrings of psync.

Sphinx with MyST, and the theme of numpy, pandas and scipy: it is kept by the projects that use it,
has a dark mode, a search in the page, and works without JavaScript. Material for MkDocs, the other
one that was looked at, is in maintenance mode, and MkDocs itself unmaintained.
"""

import re
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
highlight_language = "none"  # of blocks that name none: commands and outputs
exclude_patterns = ["_build", "pictures"]
source_suffix = {".md": "markdown"}
suppress_warnings = ["config.cache", "ref.python"]  # names that several modules have

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_mock_imports = ["torch", "jax", "keras", "optax", "ray", "dask", "distributed"]
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Class attributes", "Attributes")]

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
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_sidebars = {"index": [], "start": []}
html_show_sourcelink = False
copybutton_prompt_text = "$ "


def _mark_code(app, what, name, obj, options, lines):
    """Say which lines of a docstring are code: those of "Example:", and what is indented alone."""
    marked, after_blank, section = [], True, False
    for line in lines:
        indented = line.startswith(" ")
        if not indented and line:
            section = bool(re.fullmatch(r"[A-Z]\w*:", line))
            if line in ("Example:", "Examples:"):
                marked += [".. rubric:: Example", "", "::", ""]
                after_blank, section = False, True
                continue
        elif indented and after_blank and not section and not _lists(marked):
            marked += ["::", ""]
            section = True
        marked.append(line)
        after_blank = not line
    lines[:] = marked


def _lists(lines):
    """Whether the last paragraph is an item of a list, which goes on in indented lines."""
    last = next((line for line in reversed(lines) if line), "")
    return bool(re.match(r"\s*([-*]|\d+\.) |\s{2,}\S", last)) or last.endswith("::")


def setup(app):
    app.connect("autodoc-process-docstring", _mark_code, priority=400)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}
