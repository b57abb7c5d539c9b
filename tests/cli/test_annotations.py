"""Annotations from the command line: written back from a file, listed, shown by diff, dropped; refusals in one line."""

from pathlib import Path

import pandas as pd
import pytest

from command import ask, read
from raggedatlas import RaggedAtlas
from support.atlases import small_anndata


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An atlas of six cells with a snapshot, and a file of their clusters next to it."""
    atlas = RaggedAtlas.create(tmp_path / "a")
    atlas.add(small_anndata(1, 6), "d1", organism="human", progress=False)
    uids = atlas.checkout(atlas.snapshot()).query().to_pandas().index
    pd.DataFrame({"uid": uids, "leiden": [0, 1, 0, 1, 0, 1], "x": 0.5}).to_csv(tmp_path / "clusters.csv", index=False)
    return tmp_path


def test_annotations_from_the_command_line(place: Path) -> None:
    """`annotate`, `annotations`, `diff` and `drop-annotation` do what the functions do, in JSON and in lines."""
    atlas, file = place / "a", place / "clusters.csv"
    words = ("annotate", atlas, file, "--column", "leiden=cluster", "--cast", "leiden=str")
    assert read(*words, "--dry-run")["status"] == "dry run"
    assert "No annotations yet" in ask("annotations", atlas).stdout
    report = read(*words)
    assert (report["name"], report["status"], report["columns"][0]["n_values"]) == ("clusters", "added", 6)
    assert "unchanged" in ask(*words).stdout
    assert [row["columns"] for row in read("annotations", atlas)] == ["cluster"]
    assert "clusters" in ask("annotations", atlas).stdout
    read("snapshot", atlas)
    assert read("diff", atlas, 1, 2)["assets_added"]["annotations"][0].startswith("clusters (")
    assert "cluster" in read("info", atlas)["columns"]
    assert read("drop-annotation", atlas, "clusters")["notes"]
    assert read("annotations", atlas) == []
    assert [row["name"] for row in read("annotations", atlas, "--at", 2)] == ["clusters"]
