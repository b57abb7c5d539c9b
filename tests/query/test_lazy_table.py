"""Laws of columns that wait until they are asked for: the same values as read at once, and never two at a time."""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pyarrow as pa
import pytest

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.query.cells import LazyTable, read_rows
from raggedatlas.query.plan import plan_read
from raggedatlas.query.query import Query
from raggedatlas.store.filters import col
from raggedatlas.store.tables import ROW_ID, Tables, walk

# anndata 0.13 asks pandas 3 for options that pandas 3 deprecates.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The '(future.infer_string|mode.chained_assignment)' option:DeprecationWarning"
)

WAYS: dict[str, Callable[[Query], Query]] = {
    "all": lambda q: q,
    "where": lambda q: q.where(col("score") > 0),
    "end": lambda q: q.where({"dataset": ["third"]}),
    "order": lambda q: q.order_by("score", descending=True),
    "names": lambda q: q.order_by("cell_name", "dataset"),
    "sample": lambda q: q.sample(7, seed=2),
    "each": lambda q: q.sample(3, by="cell_type", seed=1),
    "limit": lambda q: q.limit(5),
    "none": lambda q: q.where(col("score") > 1e9),
    "lacking": lambda q: q.spaces("protein_abundance"),
    "two": lambda q: q.spaces("gene_expression", "protein_abundance").where({"flag": True}),
    "columns": lambda q: q.obs("donor", "percent.mt"),
    "search": lambda q: q.search([0.1, 0.2, 0.3], column="embedding", k=9),
}
"""Ways to choose and order cells."""


def assert_same_plan(query: Query) -> None:
    """Compare a plan whose columns wait with one whose columns do not: whole, in chunks, and for some rows."""
    whole, waiting = (plan_read(query.spec, query.catalog, deferred=wait) for wait in (False, True))
    expected, found = whole.obs, waiting.obs
    assert isinstance(found, LazyTable)
    assert not isinstance(expected, LazyTable)
    assert (found.schema, found.num_rows) == (expected.schema, expected.num_rows)
    rows = pa.array([i for i in (3, 0, 1) if i < expected.num_rows], pa.int64())
    some = found.take(rows)
    for i, name in enumerate(expected.column_names):
        values = listed(expected.column(name).chunks)
        assert listed(found.column(name).chunks) == listed(found.chunks(i)) == values, name
        taken = [values[row] for row in rows.to_pylist()]
        assert listed(some.column(i).chunks) == listed(some.chunks(i)) == taken, name
    for name, space in whole.spaces.items():
        for one, other in zip(space.parts, waiting.spaces[name].parts, strict=True):
            assert (one.code == other.code).all()
            assert (one.start == other.start).all()
            assert (one.end == other.end).all()


def listed(chunks: Iterable[Any]) -> list[str]:
    """Give values in a form in which NaN equals itself."""
    return [repr(value) for chunk in chunks for value in chunk.to_pylist()]


@pytest.mark.parametrize("way", WAYS)
def test_what_waits_is_what_is_read_at_once(query: Query, way: str) -> None:
    """Whatever chooses and orders the cells, every column and every pointer is the same."""
    assert_same_plan(WAYS[way](query))


@pytest.mark.parametrize("way", ["all", "where", "order", "limit"])
def test_rows_that_are_stored_in_another_order_come_in_theirs(
    own: tuple[Catalog, Callable[[Catalog], Query]], way: str
) -> None:
    """Rows that were updated lie behind the others in the table; the cells still come in the order in which they were added."""
    catalog, freeze = own
    rows = catalog.tables.read(CELLS)
    catalog.tables.merge(CELLS, ["uid"], rows.slice(2, 3), update=True)
    query = freeze(catalog)
    stored = [i for batch in walk(query.catalog.tables, CELLS, []) for i in batch.column(ROW_ID).to_pylist()]
    assert stored != sorted(stored)
    assert plan_read(query.spec, query.catalog).obs.column("uid").to_pylist() == rows.column("uid").to_pylist()
    assert_same_plan(WAYS[way](query))


def test_the_tip_does_not_let_columns_wait(own: tuple[Catalog, Callable[[Catalog], Query]]) -> None:
    """Rows of an atlas that others write to may change before they are read."""
    catalog, _ = own
    plan = plan_read(Query(catalog).spec, catalog, deferred=True)
    assert isinstance(plan.obs, pa.Table)


def test_many_cells_of_many_batches_are_found_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All batches together take less than comparing a few of them with all chosen cells would."""
    n, size = 2**20, 2**12

    def walked(*_: Any) -> Iterator[pa.RecordBatch]:
        for start in range(0, 2 * n, size):
            ids = np.arange(start, start + size, dtype=np.uint64)
            yield pa.RecordBatch.from_arrays([pa.array(ids)] * 2, names=["value", ROW_ID])

    monkeypatch.setattr("raggedatlas.query.cells.walk", walked)
    ids = np.arange(1, 2 * n, 2, dtype=np.uint64)
    start = time.process_time()
    np.isin(np.arange(size, dtype=np.uint64), ids, assume_unique=True)
    one = time.process_time() - start
    tables: Any = None
    waiting = LazyTable(pa.schema([("value", pa.uint64())]), tables, None, ids, {"value": "value"}, {})
    start = time.process_time()
    found = pa.chunked_array(waiting.chunks(0))
    table = read_rows(tables, ["value"], None, ids[::-1])
    # As many as 512 batches are compared, twice.
    assert time.process_time() - start < 200 * one
    np.testing.assert_array_equal(found.to_numpy(), ids)
    np.testing.assert_array_equal(table.column("value").to_numpy(), ids[::-1])


@pytest.mark.parametrize("ending", ["h5ad", "zarr", "h5mu"])
def test_writing_asks_for_one_column_after_the_other(
    query: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Of the cell table, what describes the cells is read one column at a time, and no text with the pointers."""
    if ending == "h5mu":
        pytest.importorskip("mudata")
    expected = plan_read(query.spec, query.catalog).obs
    asked: list[list[str]] = []
    real_walk, real_read = walk, Tables.read

    def walked(tables: Any, name: str, columns: Any, where: str | None = None) -> Any:
        asked.append(list(columns) if name == CELLS else [])
        return real_walk(tables, name, columns, where)

    def read(self: Tables, name: str, columns: Any = None, where: Any = None, *, row_ids: bool = False) -> pa.Table:
        asked.append(list(columns or ["*"]) if name == CELLS else [])
        return real_read(self, name, columns, where, row_ids=row_ids)

    monkeypatch.setattr("raggedatlas.query.cells.walk", walked)
    monkeypatch.setattr(Tables, "read", read)
    query.write(str(tmp_path / f"x.{ending}"))
    pointers = {name for columns in asked for name in columns if "." in name}
    assert pointers
    for columns in asked:
        described = [name for name in columns if name not in pointers | {"dataset_uid"}]
        assert len(described) <= 1, columns
    read_once = {name for columns in asked if len(columns) == 1 for name in columns}
    assert len(read_once - {"dataset_uid"}) >= expected.num_columns - 1


def test_a_dataset_is_written_column_by_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Any) -> None:
    """The kept table of cells is unpacked one column at a time, and never whole."""
    given = small.files["first"]
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(given, "d", progress=False)
    opened: list[int] = []

    def chunks(self: Any, column: int) -> Any:
        opened.append(column)
        return real(self, column)

    from raggedatlas.catalog.cells import StoredFrame

    real = StoredFrame.chunks
    monkeypatch.setattr(StoredFrame, "chunks", chunks)
    monkeypatch.setattr("raggedatlas.query.dataset.read_frame", _no_obs)
    atlas.dataset("d").write(tmp_path / "x.h5ad")
    assert sorted(set(opened)) == list(range(1 + given.obs.shape[1]))
    assert ad.read_h5ad(tmp_path / "x.h5ad").obs_names.tolist() == given.obs_names.tolist()


def test_a_step_of_a_dataset_has_few_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Any) -> None:
    """However many rows are asked for, a step of a sparse matrix stops at so many entries, but takes a row; none is lost."""
    monkeypatch.setattr("raggedatlas.query.dataset.ENTRIES", 5)
    given = small.files["first"]
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(given, "d", progress=False)
    blocks = [block for (block,) in atlas.dataset("d").source().blocks(("X",), 10**6)]
    assert all(len(block.indices) <= 5 or block.n_rows == 1 for block in blocks)
    assert sum(block.n_rows for block in blocks) == given.n_obs
    assert [v for block in blocks for v in block.layers["values"].tolist()] == given.X.data.tolist()


def _no_obs(catalog: Any, uid: str, name: str) -> Any:
    from raggedatlas.catalog.cells import read_frame

    assert name != "obs", "the table of cells was read whole"
    return read_frame(catalog, uid, name)
