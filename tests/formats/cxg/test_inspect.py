"""Looking at a CXG: version and why, arrays, columns and metadata, in text and for notebooks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raggedatlas.errors import NotFoundError, SourceError
from raggedatlas.formats.cxg import CxgInspection, inspect
from raggedatlas.model.reports import Element
from raggedatlas.testing.cxg_files import FORMS, VERSIONS, Form, set_meta, write_cxg

COMMAND = Path(sys.executable).parent / "raggedatlas"
LAYOUTS: dict[Form, str] = {"split": "split", "dense": "dense", "sparse": "sparse", "old": "dense", "unnamed": "dense"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> CxgInspection:
    """A CXG of version 0.3.0, looked at."""
    return inspect(write_cxg(tmp_path_factory.mktemp("inspect") / "x.cxg"))


def all_of(element: Element) -> dict[str, Element]:
    inner = {path: one for child in element.children for path, one in all_of(child).items()}
    return {element.path: element, **inner}


@pytest.mark.parametrize("form", FORMS)
def test_version_and_layout_are_told_with_their_reason(form: Form, tmp_path: Path) -> None:
    """Version and layout of every form are told, and from what."""
    path = write_cxg(tmp_path / "x.cxg", form)
    seen = inspect(path)
    assert (seen.version, seen.layout) == (VERSIONS[form] or "unnamed", LAYOUTS[form])
    assert "cxg_group_metadata" in seen.reason
    assert f"layout {LAYOUTS[form]}" in seen.reason
    assert seen.n_bytes == sum(at.stat().st_size for at in path.rglob("*") if at.is_file())


def test_the_tree_says_what_stands_there(found: CxgInspection) -> None:
    """Shapes, types, categories, filters and metadata are those of the CXG; the document has all of it."""
    seen = all_of(found.root)
    assert found.root.shape == (6, 5)
    assert seen["obs"].shape == (6,)
    assert seen["obs"].encoding == "dense array, 7 columns"
    assert (seen["obs/kind"].encoding, seen["obs/kind"].dtype) == ("categorical of 3", "int8")
    assert (seen["obs/name_0"].encoding, seen["obs/name_0"].dtype) == ("string, the index", "text")
    assert (seen["Xr/var"].shape, seen["Xr/var"].dtype) == ((8,), "uint32")
    assert (seen["emb/umap"].shape, seen["emb/umap"].dtype, seen["emb/umap"].n_bytes) == ((6, 2), "float32", 48)
    assert seen["cxg_group_metadata@cxg_version"].facts() == "metadata 0.3.0"
    assert json.loads(json.dumps(found.to_dict()))["reason"] == found.reason
    text = str(found)
    assert text.startswith("x.cxg: CXG 0.3.0, ")
    assert "└── kind" not in text
    assert "├── kind: categorical of 3, 6, int8" in text
    assert text.count("\n") == len(list(found.lines()))


def test_notebooks_see_a_tree(found: CxgInspection) -> None:
    """The HTML has a line for each element, and what folds is balanced."""
    page = found._repr_html_()
    assert page.count("<details") == page.count("</details>") > 4
    assert page.count("<div") == page.count("</div>")
    assert "percent.mt" in page


def test_hostile_metadata_is_text(cxg: Path) -> None:
    """Markup in metadata is escaped, long values are cut, and their size is said."""
    set_meta(cxg / "uns", spatial="<script>alert(1)</script>" + "x" * 5_000)
    seen = inspect(cxg)
    assert "<script>" not in seen._repr_html_()
    assert "5.03 kB" in all_of(seen.root)["uns@spatial"].facts()


def test_what_cannot_be_opened_is_in_the_tree(tmp_path: Path) -> None:
    """An array whose schema is damaged is shown with the reason; what is no CXG is refused by its rule."""
    path = write_cxg(tmp_path / "x.cxg", "dense")
    schema = next(at for at in (path / "emb" / "pca" / "__schema").iterdir() if at.is_file())
    schema.write_bytes(b"\xff" * schema.stat().st_size)
    broken = all_of(inspect(path).root)["emb/pca"]
    assert "UNREADABLE" in broken.facts()
    with pytest.raises(SourceError, match="C01"):
        inspect("tests/data")
    with pytest.raises(NotFoundError):
        inspect(tmp_path / "absent.cxg")


@pytest.mark.nightly
def test_the_command_draws_it(tmp_path: Path) -> None:
    """`raggedatlas inspect` draws the tree, to a depth, or prints the document."""
    path = write_cxg(tmp_path / "x.cxg")
    words = [COMMAND, "inspect", str(path)]
    drawn = subprocess.run([*words, "--depth", "1"], capture_output=True, text=True, check=True).stdout
    assert "CXG 0.3.0" in drawn
    assert "layout split: there are Xr and Xc" in drawn
    assert len(drawn.splitlines()) == 1 + 7
    document = json.loads(subprocess.run([*words, "--json"], capture_output=True, text=True, check=True).stdout)
    assert (document["version"], document["layout"]) == ("0.3.0", "split")
