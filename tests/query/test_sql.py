"""SQL on a snapshot: the views are what queries give, whatever the statement asks of them, and nothing else can be read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from tests.command import done
from tests.command import read as read_json

import raggedatlas as ra
from raggedatlas.errors import CorruptError, FeatureError, QueryError, StoreError
from support.atlases import GENES, make_modelled, small_anndata

duckdb = pytest.importorskip("duckdb")

N = 40


def with_columns(seed: int, genes: list[str]) -> ad.AnnData:
    """Return a dataset with cell columns of many kinds, values missing in each."""
    rng = np.random.default_rng(seed)
    adata = small_anndata(seed, N, genes)
    gone = rng.random(N) < 0.2
    adata.obs['say "hi"'] = np.where(gone, None, rng.choice(["a", "it's", "ü", ""], N)).astype(object)
    adata.obs["a share"] = np.where(gone, np.nan, rng.random(N))
    adata.obs["n"] = pd.array(rng.integers(-3, 3, N), "Int64")
    adata.obs.loc[adata.obs_names[gone], "n"] = pd.NA
    adata.obs["flag"] = rng.random(N) < 0.5
    adata.obs["kind"] = pd.Categorical(rng.choice(["x", "y"], N))
    adata.obs["select"] = rng.integers(0, 9, N)
    return adata


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> ra.AtlasView:
    """Two datasets that share some genes."""
    atlas = ra.RaggedAtlas.create(tmp_path_factory.mktemp("sql") / "atlas")
    atlas.add(with_columns(1, GENES[:8]), "one", organism="human", progress=False)
    atlas.add(with_columns(2, GENES[4:12]), "two", organism="human", progress=False)
    return atlas.checkout(atlas.snapshot())


CONDITIONS = [
    "true", "n = 2", "n IN (-1, 2)", "n IS NULL", "n <> 0 OR flag", "NOT flag", "\"a share\" < 0.5", "\"a share\" > 0.9", "\"a share\" IS NULL",
    "\"say \"\"hi\"\"\" = 'it''s'", "\"say \"\"hi\"\"\" = ''", "\"say \"\"hi\"\"\" > 'b'", "\"say \"\"hi\"\"\" LIKE 'it%'", "kind = 'x' AND n > 0", "\"select\" % 2 = 1",
    "dataset = 'one'", "dataset <> 'one' AND kind IN ('x', 'y')", "uid < '8'", "cell_name = 'CELL1-3'", "length(kind) = 1", "\"select\" BETWEEN 2 AND 4",
]  # fmt: skip


@pytest.mark.parametrize("condition", CONDITIONS)
def test_cells_are_those_of_a_query(view: ra.AtlasView, condition: str) -> None:
    """DuckDB gives the same of the view and of the table that a query reads, of all columns and of one that the condition has not."""
    table = view.query().to_arrow()
    found = view.sql(f"SELECT * FROM cells WHERE {condition} ORDER BY uid", as_="arrow")
    memory = duckdb.connect()
    memory.register("cells", table)
    expected = memory.sql(f"SELECT * FROM cells WHERE {condition} ORDER BY uid").to_arrow_table()
    assert found.column_names == table.column_names
    assert found.to_pylist() == expected.to_pylist()
    few = f"SELECT count(*), max(uid) FROM cells WHERE {condition}"
    assert view.sql(few, as_="arrow").to_pylist() == memory.sql(few).to_arrow_table().to_pylist()


def test_columns_that_differ_in_case_are_told_apart(tmp_path: Path) -> None:
    """DuckDB would give the first of them for all; the others get underscores, and their own names are refused with those."""
    adata = small_anndata(1, N, GENES[:8])
    adata.obs["donor"], adata.obs["Donor"], adata.obs["Donor_"], adata.obs["UID"] = "a", "b", "c", "d"
    atlas = ra.RaggedAtlas.create(tmp_path / "atlas")
    atlas.add(adata, "one", organism="human", progress=False)
    view = atlas.checkout(atlas.snapshot())
    assert {"donor", "Donor__", "Donor_", "UID_"} <= {*view.sql("SELECT * FROM cells").columns}
    few = view.sql('SELECT "donor", "Donor__", "Donor_", "UID_" FROM cells LIMIT 1', as_="arrow")
    assert few.to_pylist() == [{"donor": "a", "Donor__": "b", "Donor_": "c", "UID_": "d"}]
    assert view.sql("SELECT uid FROM cells", as_="arrow")["uid"].to_pylist() == [*view.query().to_pandas().index]
    for name, own in (("Donor", "Donor__"), ("UID", "UID_")):
        with pytest.raises(QueryError, match=f"'{name}' of the cells is called '{own}'"):
            view.sql(f'SELECT "{name}" FROM cells')


def values_of(view: ra.AtlasView, genes: list[str]) -> dict[tuple[str, str], float | None]:
    """Return the values of a query by cell and gene, None where a gene was not measured."""
    adata = view.query().features(genes).missing("nan").to_anndata()
    return {
        (cell, gene): None if np.isnan(value) else value
        for cell, row in zip(adata.obs_names, np.asarray(adata.X.todense() if hasattr(adata.X, "todense") else adata.X).tolist(), strict=True)
        for gene, value in zip(genes, row, strict=True)
    }  # fmt: skip


def test_expression_has_a_value_or_null_for_each_cell_and_feature(view: ra.AtlasView) -> None:
    """NULL where it was not measured, with the names that were asked for, in the call, in a subquery and in a second call."""
    genes = [GENES[5], GENES[0], GENES[11]]
    rows = view.sql(f"FROM expression(features := {genes})", as_="arrow").to_pylist()
    assert len(rows) == 2 * N * 3
    assert {(r["uid"], r["feature"]): r["value"] for r in rows} == values_of(view, genes)
    assert all(r["measured"] == (r["value"] is not None) for r in rows)
    same = view.sql(
        f"WITH a AS (FROM expression(features := (SELECT list(feature_id) FROM features WHERE feature_id = '{genes[0]}'))) "
        f"SELECT count(*) AS n, bool_and(a.value = b.value) AS same /* expression( */ FROM a JOIN expression(features := '{genes[0]}', "
        "layer := 'counts', space := 'gene_expression') b USING (uid, feature) JOIN a AS again USING (uid)"
    )
    assert same.to_dict("records") == [{"n": 2 * N, "same": True}]
    some = view.sql(f"SELECT DISTINCT uid FROM expression(features := {genes}, cells := 'kind = ''x''')")
    assert {*some["uid"]} == {*view.query().where(kind="x").to_pandas().index}
    none = view.sql(f"SELECT count(*) AS n FROM expression(features := {genes}, cells := 'n > 99')")
    assert none["n"].tolist() == [0]


def test_datasets_and_features_are_listed(view: ra.AtlasView) -> None:
    assert view.sql("SELECT name, n_cells FROM datasets")["name"].tolist() == ["one", "two"]
    found = view.sql("SELECT space, feature_id FROM features ORDER BY feature_id")
    assert found["feature_id"].tolist() == sorted(view.features()["feature_id"])
    assert {*found["space"]} == {"gene_expression"}


@pytest.mark.parametrize("as_", ["space", "vector"])
def test_results_are_views(tmp_path: Path, as_: str) -> None:
    """Cells that have one, with its values."""
    made = make_modelled(tmp_path)
    atlas = made.open()
    atlas.add(ra.ResultDataset({}, tmp_path / "z"), name="my_z", as_=as_, progress=False)  # type: ignore[arg-type]
    view = atlas.checkout(atlas.snapshot())
    rows = view.sql('SELECT uid, "value" FROM "results_my_z" JOIN cells USING (uid)', as_="arrow").to_pylist()
    expected = dict(zip(made.uids[made.known], made.values.tolist(), strict=True))
    assert {row["uid"]: row["value"] for row in rows} == expected


def test_a_snapshot_does_not_change_and_half_added_cells_are_no_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raggedatlas.ingest import add

    atlas = ra.RaggedAtlas.create(tmp_path / "atlas")
    atlas.add(small_anndata(1, 10), "one", progress=False)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(add, "commit_records", die)
        patch.setattr(add, "_discard", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            atlas.add(small_anndata(2, 10), "two", progress=False)
    assert atlas._catalog.tables.count("cells") == 20
    view = atlas.checkout(atlas.snapshot())
    atlas.add(small_anndata(3, 10), "three", progress=False)
    atlas.delete_cells("cell_name = 'CELL1-3'")
    assert view.sql("SELECT dataset, count(*) AS n FROM cells GROUP BY 1").to_dict("records") == [
        {"dataset": "one", "n": 10}
    ]


def test_an_empty_atlas_has_all_views(tmp_path: Path) -> None:
    atlas = ra.RaggedAtlas.create(tmp_path / "atlas")
    view = atlas.checkout(atlas.snapshot())
    for name in ("cells", "datasets", "features"):
        assert view.sql(f"SELECT count(*) AS n FROM {name}")["n"].tolist() == [0]


REFUSED = {
    "": "one statement that reads",
    "SELECT 1; SELECT 2": "one statement that reads",
    "DELETE FROM cells": "annotate\\(\\), delete_cells\\(\\)",
    "COPY (SELECT 1) TO 'x.csv'": "one statement that reads",
    "ATTACH 'x.db'": "one statement that reads",
    "SET enable_external_access = true": "one statement that reads",
    "SELECT * FROM read_csv('/etc/passwd')": "asks for files",
    "SELECT * FROM read_text('/etc/passwd')": "asks for files",
    "SELECT * FROM glob('/etc/*')": "asks for files",
    "SELECT * FROM read_parquet('https://example.org/x.parquet')": "files|DuckDB does not answer",
    "SELECT * FROM '/etc/passwd'": "DuckDB does not answer",
    "SELECT * FROM view": "DuckDB does not answer",
    "SELECT * FROM nope": "nope does not exist",
    "SELEC 1": "syntax error",
    "SELECT nope FROM cells": "nope",
    "SELECT * FROM expression(['A'])": "named arguments: expression\\(features := ",
    "SELECT * FROM expression(layer := 'counts')": "it needs features",
    "SELECT * FROM expression(features := 5)": "as a list of names",
    "SELECT * FROM expression(features := [])": "as a list of names",
    "SELECT * FROM expression(features := (SELECT list(NULL::VARCHAR)))": "as a list of names",
    "SELECT * FROM expression(features := ['GENE1'], layer := 5)": "layer|str",
    "SELECT * FROM expression(features := ['GENE1'], lyer := 'counts')": "no argument 'lyer'",
    "SELECT * FROM expression(features := ['GENE1'], layer := 'nope')": "nope",
    "SELECT * FROM expression(features := ['GENE1'], cells := 'nope = 1')": "nope",
    "SELECT * FROM expression(features := ['GENE1']": "syntax error",
}


@pytest.mark.parametrize("statement", REFUSED)
def test_what_cannot_be_answered_is_refused(view: ra.AtlasView, statement: str) -> None:
    """On one line, by our error."""
    with pytest.raises(QueryError, match=REFUSED[statement]) as caught:
        view.sql(statement)
    assert "\n" not in str(caught.value)


def test_damage_is_told_as_it_is(tmp_path: Path) -> None:
    """Not as an error of the statement."""
    atlas = ra.RaggedAtlas.create(tmp_path / "atlas")
    atlas.add(with_columns(1, GENES[:8]), "one", organism="human", progress=False)
    atlas.snapshot()
    for path in (tmp_path / "atlas" / "lance_db" / "cells.lance" / "data").iterdir():
        path.write_bytes(b"no" * 500)
    view = ra.RaggedAtlas.checkout_latest(str(tmp_path / "atlas"))
    with pytest.raises((CorruptError, StoreError)):
        view.sql("SELECT max(n) FROM cells WHERE n > 0")


def test_unknown_features_are_named(view: ra.AtlasView) -> None:
    with pytest.raises(FeatureError, match="NOPE"):
        view.sql("SELECT * FROM expression(features := ['NOPE'])")


def test_rows_come_as_they_are_read(view: ra.AtlasView) -> None:
    """Of a statement that would never end, and with our error where one fails on the way."""
    reader = view.sql("SELECT i FROM range(1000000000000) t(i)", as_="reader")
    assert isinstance(reader, pa.RecordBatchReader)
    assert reader.read_next_batch().column(0)[0].as_py() == 0
    with pytest.raises(QueryError, match="Conversion Error"):
        view.sql("SELECT CASE WHEN i < 300000 THEN 1 ELSE 'a'::INT END FROM range(400000) t(i)")


@pytest.mark.parametrize("read", [pd.read_csv, pd.read_parquet])
def test_the_command_answers(view: ra.AtlasView, tmp_path: Path, read: Callable[[Path], Any]) -> None:
    """As a table, JSON, CSV or file."""
    statement = "SELECT dataset, count(*) AS n FROM cells GROUP BY 1 ORDER BY 1"
    assert "two" in done("sql", view.uri, statement)
    expected = [{"dataset": "one", "n": N}, {"dataset": "two", "n": N}]
    assert read_json("sql", view.uri, statement) == expected
    assert done("sql", view.uri, statement, "--csv").splitlines() == ['"dataset","n"', f'"one",{N}', f'"two",{N}']
    target = tmp_path / f"out.{read.__name__.removeprefix('read_')}"
    done("sql", view.uri, statement, "--output", target)
    assert read(target).to_dict("records") == expected
