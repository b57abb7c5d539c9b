"""Results of an atlas from the command line: added, listed, taken along, searched, dropped; refusals in one line."""

from pathlib import Path

import anndata as ad
import numpy as np
import pytest

from command import ask, read
from support.atlases import Modelled, make_modelled


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Modelled:
    """An atlas and results; the tests below walk through it in their order."""
    return make_modelled(tmp_path_factory.mktemp("cli"))


@pytest.mark.nightly
def test_results_from_the_command_line(own: Modelled, tmp_path: Path) -> None:
    """Each verb does what its function does, and says it in JSON or in lines."""
    atlas, folder = own.folder / "atlas", own.folder / "z"
    added = read("add", atlas, folder, "--space", "embedding", "--name", "z")
    assert (added["status"], added["kind"], added["n_cells"]) == ("added", "space", 20)
    assert "v: added, 20 cells of 2 datasets" in ask("add", atlas, folder, "--name", "v", "--as", "vector").stdout
    assert [row["name"] for row in read("results", atlas)] == ["z", "v"]
    assert "encoder" in ask("results", atlas).stdout
    assert read("info", atlas)["assets"]["results"] == {"z": 20, "v": 20}
    read("snapshot", atlas)
    read("export", atlas, tmp_path / "x.h5ad", "--with-results", "z", "--with-results", "v")
    adata = ad.read_h5ad(tmp_path / "x.h5ad")
    for name in "zv":
        np.testing.assert_array_equal(adata.obsm[name], own.expected())
    uid = own.uids[own.known][0]
    found = [
        read("search", atlas, uid, "--column", name, "-k", 3, "-w", "cell_type = 'T'", "--obs", "cell_type")
        for name in "zv"
    ]
    assert found[0] == found[1]
    assert {row["cell_type"] for row in found[0]} == {"T"}
    assert uid not in {row["uid"] for row in found[0]}
    assert "search_distance" in ask("search", atlas, uid, "--column", "z").stdout
    assert [r[:2] for r in read("diff", atlas, 1, 2)["assets_added"]["results"]] == ["z ", "v "]
    assert "results assets added" in ask("diff", atlas, 1, 2).stdout
    assert "raggedatlas gc ATLAS" in ask("drop-result", atlas, "v").stdout
    assert read("drop-result", atlas, "z")["notes"]
    assert "No results yet" in ask("results", atlas).stdout
    assert [row["name"] for row in read("results", atlas, "--at", 2)] == ["z", "v"]
