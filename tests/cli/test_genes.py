"""``raggedatlas genes``: each verb done, with and without --json, and refused in one line with nothing changed."""

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import raggedatlas as ra
from command import done, read

HGNC = Path("tests/data/gene_tables/hgnc_complete_set_extract.txt")


def ask(*words: object) -> str:
    return done("genes", *words)


def told(*words: object) -> Any:
    return read("genes", *words)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An atlas of two datasets that call a gene differently, with a snapshot."""
    path = str(tmp_path_factory.mktemp("genes") / "a")
    atlas = ra.RaggedAtlas.create(path)
    for i, names in enumerate((["SEPT7", "GFP"], ["SEPTIN7", "X"])):
        var = pd.DataFrame(index=names)
        cells = ad.AnnData(np.ones((2, 2), np.float32), pd.DataFrame(index=[f"{i}a", f"{i}b"]), var)
        atlas.add(cells, f"d{i}", organism="human", progress=False)
    atlas.snapshot("plain")
    return path


def test_tables_are_loaded_listed_and_removed(place: str) -> None:
    """What a table joins is seen in `status` and `explain`, at the tip and not at the snapshot before, and is gone with it."""
    assert [row["alone"] for row in told("status", place)] == [2, 2]
    assert ask("tables", place) == "No gene tables were loaded.\n"
    [loaded] = told("load", place, HGNC, "--release", "2026-09", "--name", "names of genes")
    assert (loaded["name"], loaded["source"], loaded["release"], loaded["n_rows"]) == (
        "names of genes",
        "HGNC",
        "2026-09",
        101,
    )
    assert told("tables", place) == [loaded]
    assert told("tables", place, "--at", "plain") == []
    assert [(row["previous symbol"], row["alone"]) for row in told("status", place)] == [(1, 1), (0, 1)]
    assert [row["alone"] for row in told("status", place, "--at", "plain")] == [2, 2]
    why = {row["feature_id"]: row["evidence"] for row in told("explain", place, "SEPT7")}
    assert why == {"SEPT7": "HGNC previous symbol, release 2026-09", "SEPTIN7": ""}
    assert "HGNC previous symbol" in ask("explain", place, "SEPT7")
    assert "snapshot" in ask("remove", place, "names of genes")
    assert [row["alone"] for row in told("status", place)] == [2, 2]


def test_links_are_made_explained_and_taken_back(place: str) -> None:
    """`history` keeps a link with its evidence after it was taken back."""
    assert told("link", place, "SEPT7", "SEPTIN7", "--evidence", "a paper") == {"done": "SEPT7 counts as SEPTIN7"}
    assert {row["feature_id"]: row["counts_as"] for row in told("explain", place, "SEPT7")} == {
        "SEPT7": "SEPTIN7",
        "SEPTIN7": "SEPTIN7",
    }
    assert [row["by hand"] for row in told("status", place)] == [1, 0]
    assert "SEPT7 was unlinked" in ask("unlink", place, "SEPT7")
    [row] = told("history", place)
    assert (row["evidence"], row["revoked_at"] is None) == ("a paper", False)
    assert "a paper" in ask("history", place)
    assert told("history", place, "--at", "plain") == []
