"""Results of an atlas from the command line: added, listed, taken along, searched, dropped; refusals in one line."""

import json
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
from typer.testing import CliRunner

from raggedatlas.cli.commands import app
from raggedatlas.testing.atlases import Modelled, make_modelled


def ask(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def done(*words: object) -> Any:
    """Run a command that must succeed with --json, and return the document."""
    result = ask(*words, "--json")
    assert result.exit_code == 0, (result.stdout, result.stderr, result.exception)
    return json.loads(result.stdout)


def refused(*words: object, code: int = 1) -> str:
    """Run a command that must be refused in one line; return the line."""
    result = ask(*words)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("raggedatlas: ")]
    return str(line)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Modelled:
    """An atlas and results; the tests below walk through it in their order."""
    return make_modelled(tmp_path_factory.mktemp("cli"))


@pytest.mark.nightly
def test_results_from_the_command_line(own: Modelled, tmp_path: Path) -> None:
    """Each verb does what its function does, and says it in JSON or in lines."""
    atlas, folder = own.folder / "atlas", own.folder / "z"
    added = done("add", atlas, folder, "--space", "embedding", "--name", "z")
    assert (added["status"], added["kind"], added["n_cells"]) == ("added", "space", 20)
    assert "v: added, 20 cells of 2 datasets" in ask("add", atlas, folder, "--name", "v", "--as", "vector").stdout
    assert [row["name"] for row in done("results", atlas)] == ["z", "v"]
    assert "encoder" in ask("results", atlas).stdout
    assert done("info", atlas)["results"] == ["z", "v"]
    done("snapshot", atlas)
    done("export", atlas, tmp_path / "x.h5ad", "--with-results", "z", "--with-results", "v")
    adata = ad.read_h5ad(tmp_path / "x.h5ad")
    for name in "zv":
        np.testing.assert_array_equal(adata.obsm[name], own.expected())
    uid = own.uids[own.known][0]
    found = [
        done("search", atlas, uid, "--column", name, "-k", 3, "-w", "cell_type = 'T'", "--obs", "cell_type")
        for name in "zv"
    ]
    assert found[0] == found[1]
    assert {row["cell_type"] for row in found[0]} == {"T"}
    assert uid not in {row["uid"] for row in found[0]}
    assert "search_distance" in ask("search", atlas, uid, "--column", "z").stdout
    assert [r[:2] for r in done("diff", atlas, 1, 2)["results_added"]] == ["z ", "v "]
    assert "results added" in ask("diff", atlas, 1, 2).stdout
    assert "raggedatlas gc ATLAS" in ask("drop-result", atlas, "v").stdout
    assert done("drop-result", atlas, "z")["notes"]
    assert "No results yet" in ask("results", atlas).stdout
    assert [row["name"] for row in done("results", atlas, "--at", 2)] == ["z", "v"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["add", "ATLAS", "Z", "--name", "cell_type"], 1, "column 'cell_type'"),
        (["add", "ATLAS", "Z", "--name", "n", "--space", "obsm/z=embedding"], 2, "--space"),
        (["add", "ATLAS", "Z", "--name", "n", "--space", "nope"], 1, "nope"),
        (["drop-result", "ATLAS", "nope"], 1, "no result 'nope'"),
        (["query", "ATLAS", "--with-results", "nope"], 1, "no result 'nope'"),
        (["search", "ATLAS", "x", "--column", "nope"], 1, "no column 'nope'"),
    ],
)
def test_refusals(own: Modelled, words: list[str], code: int, said: str) -> None:
    """What cannot be done is told in one line, with its exit code."""
    places = {"ATLAS": str(own.folder / "atlas"), "Z": str(own.folder / "z")}
    assert said in refused(*(places.get(word, word) for word in words), code=code)
