"""Annotations from the command line: written back from a file, listed, shown by diff, dropped; refusals in one line."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from raggedatlas import RaggedAtlas
from raggedatlas.cli.commands import app
from raggedatlas.testing.atlases import small_anndata


def ask(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def done(*words: object) -> Any:
    """Run a command that must succeed with --json, and return the document."""
    result = ask(*words, "--json")
    assert result.exit_code == 0, (result.stdout, result.stderr, result.exception)
    return json.loads(result.stdout)


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
    assert done(*words, "--dry-run")["status"] == "dry run"
    assert "No annotations yet" in ask("annotations", atlas).stdout
    report = done(*words)
    assert (report["name"], report["status"], report["columns"][0]["n_values"]) == ("clusters", "added", 6)
    assert "unchanged" in ask(*words).stdout
    assert [row["columns"] for row in done("annotations", atlas)] == ["cluster"]
    assert "clusters" in ask("annotations", atlas).stdout
    done("snapshot", atlas)
    assert done("diff", atlas, 1, 2)["annotations_added"][0].startswith("clusters (")
    assert "cluster" in done("info", atlas)["columns"]
    assert done("drop-annotation", atlas, "clusters")["notes"]
    assert done("annotations", atlas) == []
    assert [row["name"] for row in done("annotations", atlas, "--at", 2)] == ["clusters"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["annotate", "ATLAS", "FILE", "--on", "name"], 2, "--on"),
        (["annotate", "ATLAS", "nowhere.csv"], 1, "nowhere.csv"),
        (["annotate", "ATLAS", "FILE", "--column", "nope"], 1, "nope"),
        (["annotate", "ATLAS", "FILE", "--cast", "leiden"], 2, "--cast"),
        (["annotate", "ATLAS", "FILE", "--obsm", "X_umap"], 1, "obsm"),
        (["drop-annotation", "ATLAS", "nope"], 1, "no annotation 'nope'"),
    ],
)
def test_refusals(place: Path, words: list[str], code: int, said: str) -> None:
    """Each way to be wrong is one line."""
    given = [str(place / {"ATLAS": "a", "FILE": "clusters.csv"}[w]) if w in ("ATLAS", "FILE") else w for w in words]
    result = ask(*given)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    assert said in result.stderr
