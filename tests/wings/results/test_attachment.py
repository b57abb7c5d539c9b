"""A model's result is joined with cells by uid, all of it or nothing; what cannot be added is refused by name."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from raggedatlas import RaggedAtlas, ResultDataset
from raggedatlas.errors import (
    ArgumentError,
    AtlasError,
    DuplicateError,
    NameRefusedError,
    NotFoundError,
    SchemaError,
    SourceError,
    ValuesError,
)
from raggedatlas.query import search
from raggedatlas.wings.results import attachment as result_index
from support.atlases import Modelled, make_modelled, npy_run, small_anndata, write_results


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Modelled:
    """Two datasets and a result for four of five cells; nobody changes it."""
    return make_modelled(tmp_path_factory.mktemp("made"))


@pytest.fixture
def own(made: Modelled, tmp_path: Path) -> Modelled:
    """A copy that a test may change."""
    return made.moved(tmp_path / "own")


def state(atlas: RaggedAtlas) -> Any:
    """What can be seen and what lies there: versions of tables, columns, groups."""
    tables = atlas._catalog.tables
    return (
        {name: tables.version(name) for name in tables.names()},
        sorted(atlas._catalog.arrays.list_children()),
        len(atlas.results()),
    )


@pytest.mark.parametrize("as_", ["space", "vector"])
def test_cells_get_their_results(own: Modelled, as_: str) -> None:
    """Every cell of every dataset has its own result, whatever the order of the results, and no other cell has one."""
    atlas = own.open()
    report = atlas.add(ResultDataset({}, own.folder / "z"), name="z", as_=as_, progress=False)
    assert (report.status, report.n_cells, report.n_datasets, report.width) == ("added", 20, 2, 5)
    assert "5 cells of 25 have no result" in repr(report)
    view = atlas.checkout(atlas.snapshot())
    adata = view.query().with_results("z").to_anndata()
    np.testing.assert_array_equal(adata.obsm["z"], own.expected())
    assert adata.obsm["z"].dtype == np.float32
    assert "z" not in adata.obs
    assert view.validate("deep") == []
    assert own.open().dataset("data-0").to_anndata().shape == (14, 8)


def test_the_registry_says_where_a_result_comes_from(own: Modelled) -> None:
    """Model, its hash, query, parent, folder and the configuration of the original data stand in the registry."""
    atlas = own.open()
    atlas.add(own.folder / "z", "z", progress=False)
    row = atlas.results().loc["z"]
    assert (row["kind"], row["space"], row["column"], row["width"], row["dtype"]) == (
        "space",
        "embedding",
        "z",
        5,
        "float32",
    )
    assert (row["model"], row["model_hash"], row["parent"]) == ("encoder", "ab" * 32, "runs/y")
    assert row["source"] == str(own.folder / "z")
    stored = atlas._catalog.tables.read("_results").to_pylist()[0]
    assert json.loads(stored["config"]) == {"atlas": {"query": "all cells"}}
    assert stored["verb"] == "infer"


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "uint8"])
def test_values_keep_their_type(own: Modelled, dtype: str) -> None:
    """What was stored comes back bit by bit in its own type; whole numbers add_cell_columns only where cells lack one."""
    values = (own.values * 10).astype(dtype) if np.dtype(dtype).kind != "u" else np.abs(own.values * 10).astype(dtype)
    write_results(own.folder / "typed", own.uids[own.known], values)
    atlas = own.open()
    atlas.add(own.folder / "typed", "typed", progress=False)
    query = atlas.checkout(atlas.snapshot()).query()
    kept = query.with_results("typed", missing="drop").to_anndata()
    assert kept.obsm["typed"].dtype == np.dtype(dtype)
    np.testing.assert_array_equal(kept.obsm["typed"], own.expected(values).loc[kept.obs_names].to_numpy())
    wide = query.with_results("typed").to_anndata().obsm["typed"]
    np.testing.assert_array_equal(wide, own.expected(values))
    assert (wide.dtype == np.dtype(dtype)) == (np.dtype(dtype).kind == "f")


def test_one_number_and_other_outputs(own: Modelled) -> None:
    """One number for each cell is a vector of one; `output` names one of several columns."""
    scores = own.values[:, 0]
    write_results(own.folder / "several", own.uids[own.known], {"data": own.values, "score": scores})
    atlas = own.open()
    atlas.add(own.folder / "several", "score", output="score", progress=False)
    adata = atlas.checkout(atlas.snapshot()).query().with_results("score").to_anndata()
    np.testing.assert_array_equal(adata.obsm["score"], own.expected(scores[:, None]))


def test_old_results_are_added_too(own: Modelled) -> None:
    """Results in .npy files join in the same way."""
    npy_run(own.folder / "old", [(list(own.uids[own.known]), own.values)])
    atlas = own.open()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        atlas.add(own.folder / "old", "old", progress=False)
    adata = atlas.checkout(atlas.snapshot()).query().with_results("old").to_anndata()
    np.testing.assert_array_equal(adata.obsm["old"], own.expected())


@pytest.mark.long
def test_a_name_comes_once(own: Modelled) -> None:
    """A name twice is refused, left, or put in the place of the first, whose snapshot keeps it."""
    atlas = own.open()
    atlas.add(own.folder / "z", "z", progress=False)
    first = atlas.snapshot()
    write_results(own.folder / "other", own.uids[own.known], own.values + 1)
    before = state(atlas)
    with pytest.raises(DuplicateError, match="replace"):
        atlas.add(own.folder / "other", "z", progress=False)
    skipped = atlas.add(own.folder / "other", "z", on_duplicate="skip", progress=False)
    assert (skipped.status, state(atlas)) == ("skipped", before)
    assert "with other values" in repr(skipped)
    assert "with the same values" in repr(atlas.add(own.folder / "z", "z", on_duplicate="skip", progress=False))
    assert atlas.add(own.folder / "other", "z", on_duplicate="replace", progress=False).status == "replaced"
    assert len(atlas.results()) == 1
    second = atlas.snapshot()
    for number, values in ((first, own.values), (second, own.values + 1)):
        adata = atlas.checkout(number).query().with_results("z").to_anndata()
        np.testing.assert_array_equal(adata.obsm["z"], own.expected(values))
    assert atlas.validate("deep") == []
    found = atlas.diff(first, second)
    assert [name[:2] for name in (*found.assets_added["results"], *found.assets_removed["results"])] == ["z ", "z "]


def test_unknown_ids_are_refused_or_skipped(own: Modelled) -> None:
    """Ids that are no cells are counted, the first of them named; they are left out where that is asked."""
    ids = ["nobody", *own.uids[own.known], "no one"]
    values = np.vstack([np.zeros(5, np.float32), own.values, np.ones(5, np.float32)])
    write_results(own.folder / "more", ids, values)
    atlas = own.open()
    before = state(atlas)
    with pytest.raises(SourceError, match=r"2 of the 22 ids .* row 0: 'nobody'"):
        atlas.add(own.folder / "more", "z", progress=False)
    assert state(atlas) == before
    assert "2 results of cells" in repr(atlas.add(own.folder / "more", "z", unknown="skip", progress=False))
    adata = atlas.checkout(atlas.snapshot()).query().with_results("z").to_anndata()
    np.testing.assert_array_equal(adata.obsm["z"], own.expected())


def test_dry_run_writes_nothing(own: Modelled) -> None:
    """A dry run makes every check and the report, and leaves no trace."""
    atlas = own.open()
    before = state(atlas)
    assert atlas.add(own.folder / "z", "z", dry_run=True, progress=False).status == "dry run"
    assert state(atlas) == before


BAD = {
    "not a name": ({}, {"name": "scVI 64"}, NameRefusedError, "letters"),
    "a folder's name": ({}, {"name": None, "_folder": "20260101-120000-infer-AbCd"}, NameRefusedError, "name="),
    "filled by queries": ({}, {"name": "uid"}, NameRefusedError, "none of"),
    "an obs column": ({}, {"name": "cell_type"}, SchemaError, "column 'cell_type'"),
    "a feature space": ({}, {"name": "gene_expression"}, SchemaError, "feature space"),
    "no such space": ({}, {"space": "nope"}, NotFoundError, "nope"),
    "features": ({}, {"space": "protein_abundance"}, SchemaError, "named features"),
    "other axes": ({}, {"space": "image_tiles"}, SourceError, "3 axes"),
    "other axes of results": ({"values": np.zeros((20, 2, 3), np.float32)}, {}, SourceError, r"shape \(2, 3\)"),
    "not finite": ({"nan": 7}, {}, ValuesError, r"cell '\w{16}' \(row 7\) holds NaN"),
    "no cells": ({"ids": [f"x{i}" for i in range(20)]}, {}, SourceError, "None of the 20 ids"),
    "texts": ({"values": np.zeros((20, 3), bool)}, {}, SourceError, "holds bool"),
    "no such output": ({}, {"output": "scores"}, NotFoundError, "no output 'scores'"),
    "doubles as vectors": ({"values": np.zeros((20, 3))}, {"as_": "vector"}, SourceError, "float32"),
    "arrays as vectors": ({"values": np.zeros((20, 3, 3), np.float32)}, {"as_": "vector"}, SourceError, "float32"),
    "both forms": ({}, {"as_": "vector", "space": "embedding"}, SourceError, "choose one"),
    "no such form": ({}, {"as_": "matrix"}, ArgumentError, "'matrix'"),
    "no such metric": ({}, {"as_": "vector", "metric": "l1"}, ArgumentError, "'l1'"),
    "no such choice": ({}, {"layers": ["X"]}, SourceError, r"does not know \['layers'\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_added_is_refused(own: Modelled, case: str) -> None:
    """Each refusal names the fault, and leaves the atlas as it was."""
    changed, choices, error, words = BAD[case]
    choices = dict(choices)
    folder = own.folder / choices.pop("_folder", "bad")
    values = np.array(changed.get("values", own.values))
    if "nan" in changed:
        values[changed["nan"]] = np.nan
    write_results(folder, changed.get("ids", own.uids[own.known]), values)
    atlas = own.open()
    before = state(atlas)
    with pytest.raises(error, match=words):
        atlas.add(ResultDataset({}, folder), **{"name": "z", "progress": False, **choices})
    assert state(atlas) == before


def test_ids_that_stand_twice_are_refused(own: Modelled) -> None:
    """A table of another program that has an id twice is refused with the rows."""
    import lance

    table = own.folder / "z" / "lance_db" / "results.lance"
    lance.write_dataset(lance.dataset(str(table)).to_table().slice(3, 1), str(table), mode="append")
    with pytest.raises(SourceError, match=r"1 ids more than once, .* in the rows \[3, 20\]"):
        own.open().add(own.folder / "z", "z", progress=False)


def test_uncommitted_or_missing_results_are_refused(own: Modelled) -> None:
    """A folder without results, and a run that was never committed, are told."""
    (own.folder / "begun" / "lance_db" / "results.lance").mkdir(parents=True)
    with pytest.raises(NotFoundError, match="incomplete"):
        own.open().add(own.folder / "begun", "z", progress=False)
    with pytest.raises(AtlasError):
        own.open().add(own.folder / "nowhere", "z", progress=False)


@pytest.mark.long
def test_datasets_that_come_later(own: Modelled) -> None:
    """A dataset added after a result has none; its obs column of that name gets another name, and cannot take its place."""
    atlas = own.open()
    atlas.add(own.folder / "z", "z", progress=False)
    atlas.add(own.folder / "z", "v", as_="vector", progress=False)
    later = small_anndata(9, 6)
    later.obs["z"] = 1.0
    later.obs["v"] = "text"
    later.obsm["X_v"] = np.ones((6, 2), np.float32)
    atlas.add(later, "later", organism="human", embeddings={"X_v": "v"}, progress=False)
    view = atlas.checkout(atlas.snapshot())
    adata = view.query().with_results("z", "v").to_anndata()
    for name in "zv":
        np.testing.assert_array_equal(adata.obsm[name][:25], own.expected())
        assert np.isnan(adata.obsm[name][25:]).all()
    assert adata.obs["z"].iloc[25:].tolist() == [1.0] * 6  # stored as obs_z
    assert adata.obs["v"].iloc[25:].tolist() == ["text"] * 6
    assert {"obs_z", "obs_v"} <= set(view.cell_columns.names)
    assert atlas.validate("rows") == []


def test_an_index_answers_where_cells_are_many(own: Modelled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit an index is built, its recall measured and noted; its answers are those of comparing every cell."""
    monkeypatch.setattr(result_index, "INDEXED_CELLS", 5)
    atlas = own.open()
    report = atlas.add(own.folder / "z", "v", as_="vector", metric="cosine", progress=False)
    assert "recall@10 1.0000" in repr(report)
    atlas.optimize()
    view = atlas.checkout(atlas.snapshot())
    query = view.query().where({"dataset": "data-0"})
    exact = query.search(own.values[3], column="v", k=4, metric="cosine").to_pandas()
    monkeypatch.setattr(search, "EXACT_CELLS", 0)
    asked = []
    monkeypatch.setattr(search, "_from_index", lambda *a, real=search._from_index: asked.append(1) or real(*a))
    found = query.search(own.values[3], column="v", k=4, metric="cosine").to_pandas()
    assert asked
    pd.testing.assert_frame_equal(found, exact, rtol=1e-4)
    by_l2 = query.search(own.values[3], column="v", k=4).to_pandas()
    assert len(asked) == 1  # made for another distance: every cell is compared
    distances = ((own.expected().loc[by_l2.index] - own.values[3]) ** 2).sum(axis=1)
    np.testing.assert_allclose(by_l2["search_distance"], distances, rtol=1e-5)
