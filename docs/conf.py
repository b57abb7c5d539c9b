"""Configuration of the documentation site: `scripts/docs` builds it."""

import re
import urllib.request
from importlib.metadata import version as installed_version

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
html_static_path: list[str] = []
templates_path = ["_templates"]

# Single backticks in docstrings mark code, as in the Markdown pages.
default_role = "code"
autosummary_generate = True
autodoc_member_order = "bysource"
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


def setup(app: Sphinx) -> None:
    """Connect the events of this configuration."""
    app.connect("source-read", link_files)
