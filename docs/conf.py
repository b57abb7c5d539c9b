"""Configuration of the documentation site: `scripts/docs` builds it."""

import re
import tomllib
import urllib.request
from importlib.metadata import version as installed_version
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

project = "raggedatlas"
author = "the raggedatlas developers"
copyright = author
release = installed_version("raggedatlas")
version = release

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "scanpydoc"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]

# The links of [project.urls] in pyproject.toml are icons above the search box.
ICONS = {"Source": "fa-solid fa-code", "Changes": "fa-solid fa-clock-rotate-left", "Issues": "fa-regular fa-circle-dot"}
URLS = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text("utf-8"))["project"].get("urls", {})
html_theme_options = {
    "icon_links": [
        {"name": name, "url": url, "icon": ICONS.get(name, "fa-solid fa-link")} for name, url in URLS.items()
    ],
    "max_navbar_depth": 2,  # the pages of single functions are reached from the page of all
    "navbar_persistent": [],  # the sidebar has the search box
}

# Single backticks in docstrings mark code, as in the Markdown pages.
default_role = "code"
autosummary_generate = True
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
autodoc_typehints = "signature"
napoleon_google_docstring = False
napoleon_use_rtype = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 300
nb_merge_streams = True


def is_online() -> bool:
    """Return whether the inventories of other projects can be fetched; links to them are plain text otherwise."""
    try:
        urllib.request.urlopen("https://docs.python.org/3/objects.inv", timeout=5).close()
    except OSError:
        return False
    return True


intersphinx_mapping = (
    {
        "anndata": ("https://anndata.readthedocs.io/en/stable/", None),
        "numpy": ("https://numpy.org/doc/stable/", None),
        "pyarrow": ("https://arrow.apache.org/docs/", None),
        "python": ("https://docs.python.org/3/", None),
        "scanpy": ("https://scanpy.readthedocs.io/en/stable/", None),
        "zarr": ("https://zarr.readthedocs.io/en/stable/", None),
    }
    if is_online()
    else {}
)


def link_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn links to files outside `docs`, which read well in the repository, into downloads."""
    source[0] = re.sub(r"(?<!!)(\[[^\]]*\]\()(?=(\.\./)+(benchmarks|examples|tests)/)", r"\1path:", source[0])


def keep_words(app: Sphinx, document: nodes.document) -> None:
    """Leave words in the types of parameters (`table`, `columns`) without a link; Sphinx takes them for attributes of that name."""
    for reference in document.findall(pending_xref):
        if reference["reftarget"].islower():
            reference.attributes.pop("refspecific", None)


def setup(app: Sphinx) -> None:
    """Connect the events of this configuration."""
    app.connect("source-read", link_files)
    app.connect("doctree-read", keep_words)
