"""Results that are in an atlas are shown by name; results with an index are looked up by it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raggedatlas import ResultDataset
from raggedatlas.errors import NotFoundError
from raggedatlas.wings import results as wing
from raggedatlas.wings import viewer
from raggedatlas.wings.results import lookup, save_to_database
from raggedatlas.wings.viewer import make_view
from support.atlases import make_modelled, write_results


def test_verbs_are_found_together() -> None:
    """What a person asks for stands in one place."""
    assert {"infer", "umap", "pca", "lookup"} <= set(wing.__all__)
    assert callable(viewer.visualize)


def test_lookup_asks_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is an index over uids, few are found by it, in any order, and no other id is read."""
    values = np.arange(120, dtype=np.float32).reshape(60, 2)
    ids = [f"it's {i}" for i in range(60)]
    write_results(tmp_path / "r", ids, values)
    assert save_to_database(tmp_path / "r", least_rows=1).kind == "IVF_SQ"
    dataset = ResultDataset({}, tmp_path / "r")

    def fail(self: Any) -> None:
        raise AssertionError(self)

    with monkeypatch.context() as patch:
        patch.setattr(ResultDataset, "ids", fail)
        found = lookup(dataset, ["it's 40", "nobody", "it's 3"])
        assert lookup(dataset, "it's 59").tolist() == [118.0, 119.0]
    assert {uid: None if row is None else row.tolist() for uid, row in found.items()} == {
        "it's 40": [80.0, 81.0], "nobody": None, "it's 3": [6.0, 7.0],
    }  # fmt: skip
    assert lookup(dataset, ids)["it's 7"].tolist() == [14.0, 15.0]


@pytest.mark.long
@pytest.mark.parametrize("form", ["space", "vector"])
def test_results_in_an_atlas_are_shown_by_name(tmp_path: Path, form: str) -> None:
    """A map is made of a result by its name, of exactly the cells that have it."""
    own = make_modelled(tmp_path / "own", width=2)
    atlas = own.open()
    atlas.add(own.folder / "z", "z", as_=form, progress=False)
    view = atlas.checkout(atlas.snapshot())
    scene = make_view("z", view)
    uids = scene.ids.to_pylist()
    np.testing.assert_array_equal(scene.coordinates, own.expected().loc[uids].to_numpy())
    assert len(uids) == 20
    assert any("5 of 25" in note for note in scene.notes)
    with pytest.raises(NotFoundError, match="'z'"):
        make_view("y", view)
