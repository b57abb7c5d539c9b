"""What a query answers with the help of workers is what it answers without, to the last bit."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from raggedatlas import Query, RaggedAtlas, Workers
from raggedatlas.catalog import file_checks
from raggedatlas.errors import QueryError, SourceError, UnknownValueWarning, WorkersError
from raggedatlas.model.batch import Batch, CsrBlock
from raggedatlas.query import compute, outputs, read
from raggedatlas.query.plan import plan_read
from raggedatlas.store.location import Location
from support.processes import POOLS, dask_workers, processes

SCHEMA = pa.schema([("sum", pa.float64()), ("kind", pa.string()), ("first", pa.list_(pa.float32(), 2))])


def describe(batch: Batch) -> dict[str, Any]:
    """Add up each cell, in one call for each batch."""
    (space,) = batch.spaces.values()
    assert isinstance(space.block, CsrBlock)
    (values,) = space.block.layers.values()
    sums = np.add.reduceat(np.append(values, 0.0), space.block.indptr[:-1]) * (np.diff(space.block.indptr) > 0)
    kinds = batch.obs.column("cell_type").cast(pa.string())
    return {"sum": sums.astype(np.float64), "kind": kinds, "first": np.stack([sums, -sums], axis=1)}


def die(batch: Batch) -> dict[str, Any]:
    """Be killed at a cell in the middle."""
    if "third" in batch.obs.column("dataset").to_pylist():
        os.kill(os.getpid(), signal.SIGKILL)
    return describe(batch)


def hang(batch: Batch) -> dict[str, Any]:
    """Hang at a cell in the middle, until the process is killed."""
    if "third" in batch.obs.column("dataset").to_pylist():
        time.sleep(600)
    return describe(batch)


def killed(*given: Any) -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


class DiesOnce:
    """Is killed at a cell in the middle when it is called there for the first time."""

    def __init__(self, note: Path) -> None:
        self.note = note

    def __call__(self, batch: Batch) -> dict[str, Any]:
        if "third" in batch.obs.column("dataset").to_pylist() and not self.note.exists():
            self.note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return describe(batch)


@pytest.fixture(scope="module", params=["processes", pytest.param("dask", marks=pytest.mark.nightly)])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Two spawned processes, or two workers of a dask cluster."""
    if request.param == "dask":
        pytest.importorskip("distributed")
    with POOLS[request.param]() as made:
        yield made


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the small atlas into many blocks and tasks."""
    for module, name, value in ((read, "BLOCK_BYTES", 300), (outputs, "STEP_BYTES", 300), (compute, "TASK_CELLS", 8)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(read.row_blocks, "__defaults__", (300,))
    monkeypatch.setattr(read.block_plans, "__defaults__", (300,))


def queries(query: Query) -> dict[str, Query]:
    """Queries of every kind of space and result."""
    return {
        "counts": query,
        "floats": query.layers("scaled"),
        "nan": query.missing("nan"),
        "dense": query.spaces("embedding"),
        "few": query.features("LYZ", "GNLY").order_by("score").limit(31),
        "none": query.limit(0),
    }


@pytest.mark.long
@pytest.mark.usefixtures("fine")
def test_aggregates_and_files_are_the_same(executor: Executor, query: Query, tmp_path: Path) -> None:
    """Sums, means and counts of groups, and files, are equal bit for bit."""
    for name, asked in queries(query).items():
        local, shared = (asked.aggregate(["cell_type", "dataset"], executor=e) for e in (None, executor))
        assert local.obs.equals(shared.obs)
        for layer in local.layers:
            assert local.layers[layer].tobytes() == shared.layers[layer].tobytes(), (name, layer)
        paths = [asked.write(tmp_path / f"{name}{i}.h5ad", executor=e) for i, e in enumerate((None, executor))]
        assert Path(paths[0]).read_bytes() == Path(paths[1]).read_bytes(), name


@pytest.mark.parametrize("by", [None, "cell_type", ["dataset", "stage"], ["donor", "n", "flag"]])
def test_counts_are_the_same(executor: Executor, query: Query, by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts have the same groups in the same order and types, whoever counts the datasets."""
    monkeypatch.setattr(compute, "COUNT_CELLS", 20)
    asks = [
        query,
        query.where("score > 0"),
        query.where(cell_type="B"),
        query.limit(20),
        query.sample(9),
        query.limit(0),
    ]
    for asked in asks:
        local, shared = asked.count(by), asked.count(by, executor=executor)
        if by is None:
            assert local == shared == asked.to_arrow().num_rows
        else:
            pd.testing.assert_series_equal(local, shared)
    with pytest.warns(UnknownValueWarning, match="No cell has donor 'D9'"):
        query.where(donor="D9").count(by, executor=executor)


@pytest.mark.usefixtures("fine")
@pytest.mark.parametrize("size", [1, 3, 500])
def test_a_function_is_given_each_cell_once(executor: Executor, query: Query, size: int) -> None:
    """The table has the cells in order with what the function gives for each, whatever the batches and whoever calls it."""
    expected = query.to_anndata()
    for shared in (None, executor):
        steps = mock.Mock()
        table = query.map(describe, size, SCHEMA, executor=shared, progress=steps)
        assert table.schema.names == ["uid", *SCHEMA.names]
        assert table.column("uid").to_pylist() == list(expected.obs_names)
        assert np.array_equal(table.column("sum").to_numpy(), expected.X.sum(axis=1).A1)
        kinds = expected.obs["cell_type"].astype(object).where(expected.obs["cell_type"].notna(), None)
        assert table.column("kind").to_pylist() == list(kinds)
        assert table.column("first")[0].as_py() == [table.column("sum")[0].as_py(), -table.column("sum")[0].as_py()]
        assert steps.call_args.args == ("cells", expected.n_obs, expected.n_obs)


@pytest.mark.long
def test_a_table_goes_back_into_the_atlas(own: Any) -> None:
    """What `map` gives is what `annotate` takes."""
    catalog, freeze = own
    table = freeze(catalog).map(describe, 4, SCHEMA)
    atlas = RaggedAtlas.open(catalog.location.uri)
    atlas.annotate(table.select(["uid", "sum"]), "sums")
    again = atlas.checkout(atlas.snapshot()).query().to_arrow()
    assert again.column("sum").to_pylist() == table.column("sum").to_pylist()


@pytest.mark.nightly
def test_validation_is_the_same(executor: Executor, own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems are those that are found without workers, in the same order; a lost worker is no problem of the atlas."""
    catalog, freeze = own
    freeze(catalog)
    atlas = RaggedAtlas.open(catalog.location.uri)
    assert atlas.validate("deep", executor=executor) == []
    damaged = [path for path in catalog.arrays.path.rglob("c/*") if path.is_file()][:3]
    assert damaged
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-1])
    assert atlas.validate("deep", executor=executor) == atlas.validate("deep") != []
    monkeypatch.setattr(file_checks, "check_bytes", killed)
    with processes() as pool, pytest.raises(WorkersError, match="A worker died"):
        atlas.validate("deep", executor=pool)


@pytest.mark.nightly
@pytest.mark.usefixtures("fine")
def test_workers_that_die_or_hang_are_reported(query: Query) -> None:
    """One clear line, whether the worker was killed or does not come to an end."""
    with processes() as pool, pytest.raises(WorkersError, match=r"A worker died: .* Nothing was written\."):
        query.map(die, 4, SCHEMA, executor=pool)
    with processes() as pool, pytest.raises(WorkersError, match=r"timeout=8 seconds, .* a worker hangs"):
        query.map(hang, 4, SCHEMA, executor=Workers(pool, timeout=8))


@pytest.mark.nightly
@pytest.mark.usefixtures("fine")
def test_dask_goes_on_without_a_worker(query: Query, tmp_path: Path) -> None:
    """Tasks of a dask worker that was killed run on another one, and the result has each cell once."""
    pytest.importorskip("distributed")
    with dask_workers() as cluster:
        table = query.map(DiesOnce(tmp_path / "died"), 4, SCHEMA, executor=cluster)
        assert (tmp_path / "died").exists()
        assert table.equals(query.map(describe, 4, SCHEMA))
        with pytest.raises(WorkersError, match=r"lost with its worker 1 time\(s\), at last by: KilledWorker"):
            query.map(die, 4, SCHEMA, executor=Workers(cluster, retries=0))


def test_workers_must_reach_the_atlas(executor: Executor, query: Query, tmp_path: Path) -> None:
    """A worker that does not see the folder says so, with the address."""
    plan, gone = plan_read(query.spec, query.catalog), Location(str(tmp_path / "gone"))
    with pytest.raises(WorkersError, match=r"does not reach .*gone: there is nothing at this address"):
        compute.map_batches(plan, describe, 4, SCHEMA, executor, gone, None)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda batch: 4, r"gave 4 for cells 0 to 6 of the query; it must give an Arrow table"),
        (lambda batch: {"a": [1]}, r"gave 1 values of 'a' for 7 cells, cells 0 to 6"),
        (
            lambda batch: {"b": [1] * 7},
            r"gave the columns \['b'\] for cells 0 to 6 of the query; output_schema has \['a'\]",
        ),
        (
            lambda batch: {"a": ["x"] * batch.obs.num_rows},
            r"values of 'a' for cells 0 to 6 of the query that are not int64",
        ),
        (
            lambda batch: {"a": [1.5] * batch.obs.num_rows},
            r"values of 'a' for cells 0 to 6 of the query that are not int64",
        ),
        (lambda batch: {"a": [None] * batch.obs.num_rows}, r"7 missing values of 'a' for cells 0 to 6"),
    ],
)
def test_what_a_function_gives_must_fit(query: Query, function: Any, said: str) -> None:
    """Other columns, types and lengths are refused, naming the cells."""
    with pytest.raises(SourceError, match=said):
        query.map(function, 7, pa.schema([pa.field("a", pa.int64(), nullable=False)]))


@pytest.mark.parametrize(
    "schema", [pa.schema([]), pa.schema([("uid", "string")]), pa.schema([("a", "int8"), ("a", "int8")])]
)
def test_schemas_must_name_columns_once(query: Query, schema: pa.Schema) -> None:
    """The cells' uids come by themselves."""
    with pytest.raises(QueryError, match="name at least one, each once"):
        query.map(describe, 7, schema)
    with pytest.raises(QueryError, match="batch_size=0"):
        query.map(describe, 0, SCHEMA)


def test_an_error_of_the_function_names_its_cells(executor: Executor, query: Query) -> None:
    """The function's own error is raised, with the cells that it was given."""
    with pytest.raises(KeyError) as error:
        query.map(lambda batch: batch.spaces["nothing"], 7, SCHEMA, executor=executor)
    assert "cells 0 to 6" in error.value.__notes__[0]
