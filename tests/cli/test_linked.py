"""Linked datasets as people see them: in listings, `info` and `explain`, and the commands that move their values."""

from pathlib import Path

import pytest
from tests.command import ask, done, read

import raggedatlas as ra
from support.atlases import small_anndata


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An atlas of a linked and a copied dataset."""
    for number in (1, 2):
        small_anndata(number, 40).write_h5ad(tmp_path / f"d{number}.h5ad", compression="gzip")
    atlas = ra.RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(tmp_path / "d1.h5ad", copy=False, progress=False)
    atlas.add(tmp_path / "d2.h5ad", progress=False)
    return tmp_path / "atlas"


def test_they_are_marked(place: Path) -> None:
    """`ls` has their addresses, `info` their files; neither says anything of files where none is linked."""
    assert [row["linked"] for row in read("ls", place)] == ["../d1.h5ad", ""]
    assert done("ls", place).splitlines()[0].split() == [
        "name",
        "cells",
        "features",
        "layers",
        "linked",
        "added",
        "uid",
    ]
    (source,) = read("info", place)["linked files"]
    assert (source["address"], source["n_datasets"]) == ("../d1.h5ad", 1)
    assert source["n_bytes"] == (place.parent / "d1.h5ad").stat().st_size
    assert "../d1.h5ad" in done("info", place)
    done("materialize", place)
    assert "linked" not in done("ls", place).splitlines()[0]
    assert "linked" not in done("info", place)


def test_explain_says_what_comes_from_their_files(place: Path) -> None:
    """Which datasets, chunks touched, and bytes fetched for bytes used; by the references alone."""
    atlas = ra.RaggedAtlas.open(str(place))
    atlas.snapshot()
    (place.parent / "d1.h5ad").unlink()
    query = atlas.checkout(1).query()
    (line,) = [line for line in str(query.explain()).splitlines() if "linked files" in line]
    record = atlas.dataset("d1").records[0]
    assert "of d1: 2 chunks, " in line
    assert f"for {record.n_entries * 8:,} bytes used" in line
    assert "linked files" not in str(query.where("dataset = 'd2'").explain())


def test_they_are_copied_and_moved(place: Path) -> None:
    """`materialize` names what it copied, `relink` the new address."""
    moved = place.parent / "moved.h5ad"
    (place.parent / "d1.h5ad").rename(moved)
    assert read("relink", place, "d1", moved) == {"dataset": "d1", "linked": "../moved.h5ad"}
    assert read("materialize", place, "d1") == {"copied": ["d1"]}
    assert "No dataset is linked." in done("materialize", place)


def test_a_mirror_gets_the_files_and_sources_may_be_refused(place: Path) -> None:
    """`sync --values`; `--sources deny` reads none, and `ask` takes no answer where nobody is there; `relink --full-hash` names the same file."""
    done("snapshot", place)
    done("sync", place, place.parent / "mirror", "--values")
    assert read("relink", place, "d1", "--full-hash") == {"dataset": "d1", "linked": "../d1.h5ad"}
    target = place.parent / "out.h5ad"
    for rule in ("deny", "ask"):
        refused = ask("export", place, target, "--sources", rule)
        assert (refused.exit_code, "may not be read" in refused.output) == (1, True)
    (place.parent / "d1.h5ad").unlink()
    done("export", place.parent / "mirror", target, "--sources", "deny")
    assert target.exists()


def test_columns_are_linked_and_rows_copied(place: Path) -> None:
    """`--link-columns` copies the rows of CSC matrices, which `--link` leaves in the file."""
    adata = small_anndata(3, 40)
    adata.X = adata.X.tocsc()
    file = place.parent / "d3.h5ad"
    adata.write_h5ad(file)
    refused = ask("add", place, file, "--link", "--link-columns")
    assert (refused.exit_code, "--link copies no rows" in refused.output) == (2, True)
    done("add", place, file, "--link-columns")
    assert [row["linked"] for row in read("ls", place)] == ["../d1.h5ad", "", "../d3.h5ad"]
    assert read("materialize", place, "d3") == {"copied": ["d3"]}
    done("drop", place, "d3")
    done("add", place, file, "--link")
    assert read("materialize", place, "d3") == {"copied": ["d3"]}
