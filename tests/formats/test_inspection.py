"""Looking at a file: a tree of what stands in it, in text and for notebooks."""

import json
import re
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import h5py
import numpy as np
import pytest

from raggedatlas.formats.anndata import Element, inspect
from raggedatlas.testing.anndata_faults import FORMS, Form, damage, write_good


def all_of(element: Element) -> list[Element]:
    return [element, *(inner for child in element.children for inner in all_of(child))]


@pytest.mark.parametrize("form", FORMS)
def test_a_tree_says_what_stands_there(form: Form, tmp_path: Path) -> None:
    """Encodings, shapes, types, chunks and sizes are those of the file, in every kind of file; parts of a value are folded."""
    path = write_good(tmp_path / "x", form, awkward=True)
    found = inspect(path)
    by_path = {element.path: element for element in all_of(found.root)}
    x, kind, pca = by_path["X"], by_path["obs/kind"], by_path["obsm/pca"]
    assert (x.encoding, x.shape, x.dtype, x.n_entries, x.shown) == ("csr_matrix 0.1.0", (3, 4), "float32", 5, ())
    assert (kind.shape, kind.dtype, by_path["obs"].shape) == ((3,), "int8", (3, 6))
    assert (pca.shape, pca.dtype, pca.n_bytes) == ((3, 2), "float32", 24)
    assert by_path["obs/word"].dtype == "text"
    assert found.n_bytes > sum(element.n_stored for element in found.root.children) > 0
    text = str(found)
    assert text.count("\n") == len(list(found.lines()))
    assert "X: csr_matrix 0.1.0, 3 x 4, float32, 5 entries (41.7%)" in text
    assert [branch for branch, element in found.lines(1)][-1] == "└── "
    assert len(list(found.lines(1))) == len(found.root.children)
    assert json.loads(json.dumps(found.to_dict()))["root"]["encoding"] == "anndata 0.1.0"


def test_a_zip_file_has_the_stored_bytes_of_its_folder(tmp_path: Path) -> None:
    """Each element of a zipped Zarr folder takes as many bytes as in the folder."""
    folder = write_good(tmp_path / "x.zarr", "zarr3")
    packed = tmp_path / "x.zarr.zip"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for file in folder.rglob("*"):
            archive.write(file, file.relative_to(folder))
    stored = {element.path: element.n_stored for element in all_of(inspect(folder).root)}
    assert {element.path: element.n_stored for element in all_of(inspect(packed).root)} == stored
    assert stored["X"] > 0


def test_chunks_and_filters_are_told(tmp_path: Path) -> None:
    """Filters are named in the order of writing, with what they saved."""
    path = write_good(tmp_path / "x.h5ad", "hdf5")
    with h5py.File(path, "r+") as file:
        file.create_dataset("uns/big", data=np.zeros(10_000), chunks=(500,), shuffle=True, compression="gzip")
    line = next(element.facts() for element in all_of(inspect(path).root) if element.name == "big")
    assert re.fullmatch(
        r"\(array, undeclared\), 10,000, float64, chunks 500, shuffle \+ gzip 4, \S+ k?B of 80 kB", line
    )


def test_what_cannot_be_opened_is_in_the_tree(tmp_path: Path) -> None:
    """A link to another file and an unknown filter are shown with the reason, and nothing is followed."""
    path = write_good(tmp_path / "x.h5ad", "hdf5")
    damage(path, lambda root: root.__setitem__("uns/away", h5py.ExternalLink("elsewhere.h5", "x")))
    element = next(element for element in all_of(inspect(path).root) if element.name == "away")
    assert "UNREADABLE: away is a link to another file (elsewhere.h5)" in element.facts()


class Balance(HTMLParser):
    """Counts that every tag is closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_notebooks_see_a_tree(tmp_path: Path) -> None:
    """The HTML is balanced, folds its groups, and escapes the names of elements and files."""
    path = write_good(tmp_path / "<b>x.h5ad", "hdf5")
    damage(path, lambda root: root["uns"].create_group("<script>alert(1)<").attrs.update({"encoding-type": "<i>"}))
    page = inspect(path)._repr_html_()
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert balance.seen == {"div", "b", "span", "details", "summary"}
    assert "&lt;script&gt;alert(1)&lt;" in page
    assert "&lt;b&gt;x.h5ad" in page
