"""The compiled gather: rows as plain Python reads them, whichever columns are kept and however the rows are stored."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.model.batch import assemble_csr
from raggedatlas.store.arrays import ArrayWriter
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader
from raggedatlas.store.runtime import BufferPool
from raggedatlas.store.sparse import RowGatherer, RowGroup
from raggedatlas.testing.hypothesis_profile import examples

N_COLUMNS = 3000


def stored(folder: str, name: str, values: NDArray[Any], chunk: int, breaks: NDArray[np.int64]) -> ArrayReader:
    """Write one packed array in small chunks."""
    writer = ArrayWriter(Location(folder), name, values.dtype, profile="packed", chunk_rows=chunk, shard_rows=4 * chunk)
    writer.append(values, breaks)
    return ArrayReader(Location(folder), writer.close())


def made_rows(rng: np.random.Generator, lengths: list[int], *, ascend: bool) -> list[NDArray[np.uint16]]:
    """Draw distinct columns for every row, dense ones at the front as detection order has them."""
    weight = 1 / np.arange(1, N_COLUMNS + 1)
    rows = [rng.choice(N_COLUMNS, n, replace=False, p=weight / weight.sum()).astype(np.uint16) for n in lengths]
    return [np.sort(row) for row in rows] if ascend else rows


@pytest.mark.long
@examples(40)
@given(data=st.data())
def test_few_columns_are_found_as_many_are(data: st.DataObject) -> None:
    """Whatever is kept, of rows that ascend or not, across chunks: every kept entry comes once, by ascending column."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    lengths = data.draw(st.lists(st.integers(0, 900), min_size=1, max_size=6))
    rows = made_rows(rng, lengths, ascend=data.draw(st.booleans()))
    ends = np.cumsum([0, *lengths])
    columns = np.concatenate(rows)
    values = rng.integers(0, data.draw(st.sampled_from([2, 200, 60_000])), len(columns)).astype(np.uint16)
    if data.draw(st.booleans()):
        values[: len(values) // 2] = 0  # whole chunks of zeros are not stored
    kept = rng.choice(N_COLUMNS, data.draw(st.sampled_from([0, 1, 7, 60, 90, 200, N_COLUMNS])), replace=False)
    column_map = np.full(N_COLUMNS, -1, np.int64)
    column_map[kept] = rng.permutation(len(kept))
    asked = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9)), np.int64)
    with tempfile.TemporaryDirectory() as folder:
        group = RowGroup(
            stored(folder, "columns", columns, data.draw(st.sampled_from([100, 600])), ends[1:-1]),
            stored(folder, "values", values, data.draw(st.sampled_from([70, 600])), ends[1:-1]),
            column_map,
        )
        gatherer = RowGatherer([group], len(kept), np.dtype(np.uint16), threads=data.draw(st.integers(1, 2)))
        indptr, indices, found = gatherer.gather(np.zeros(len(asked), np.int32), ends[asked], ends[asked + 1])
    for i, row in enumerate(asked.tolist()):
        own = slice(ends[row], ends[row + 1])
        right = {
            int(column_map[c]): int(v) for c, v in zip(columns[own], values[own], strict=True) if column_map[c] >= 0
        }
        span = slice(indptr[i], indptr[i + 1])
        assert indices[span].tolist() == sorted(right)
        assert found[span].tolist() == [right[c] for c in sorted(right)]
    assert len(indices) == indptr[-1]


@pytest.mark.parametrize("n_kept", [40, N_COLUMNS])
def test_a_column_twice_in_a_row_is_refused(n_kept: int) -> None:
    """A row that names a kept column twice is refused by name, by both ways of reading."""
    columns = np.tile(np.arange(400, dtype=np.uint16), 2)
    column_map = np.where(np.arange(N_COLUMNS) < n_kept, np.arange(N_COLUMNS), -1)
    with tempfile.TemporaryDirectory() as folder:
        none = np.empty(0, np.int64)
        parts = stored(folder, "c", columns, 1000, none), stored(folder, "v", columns, 1000, none)
        gatherer = RowGatherer([RowGroup(*parts, column_map)], n_kept, np.dtype(np.uint16), threads=1)
        with pytest.raises(CorruptError, match="a feature twice in one cell"):
            gatherer.gather(np.zeros(1, np.int32), np.array([0]), np.array([800]))


@pytest.mark.usefixtures("level")
def test_bitmaps_at_the_end_of_their_map(tmp_path: Path) -> None:
    """Dense rows are right wherever their map ends within the last bits; a map that ends before their columns is refused."""
    none, group_of = np.empty(0, np.int64), np.zeros(1, np.int32)
    rng = np.random.default_rng(0)
    for n_columns in range(240, 258):
        columns = np.append(np.flatnonzero(rng.random(n_columns - 1) < 0.55), n_columns - 1).astype(np.uint16)
        folder = str(tmp_path / str(n_columns))
        parts = stored(folder, "c", columns, 300, none), stored(folder, "v", columns, 300, none)
        column_map = np.arange(n_columns)[::-1].copy()
        span = np.array([3]), np.array([len(columns) - 1])
        for sizes in (n_columns, int(columns[-1]) - 1):
            gatherer = RowGatherer([RowGroup(*parts, column_map[:sizes])], n_columns, np.dtype(np.uint16), threads=1)
            if sizes < n_columns:
                with pytest.raises(CorruptError):
                    gatherer.gather(group_of, span[0], np.array([len(columns)]))
            else:
                _, indices, values = gatherer.gather(group_of, *span, sort=False)
                assert indices.tolist() == column_map[columns[3:-1]].tolist()
                assert values.tolist() == columns[3:-1].tolist()


def test_results_are_taken_without_a_copy() -> None:
    """A SciPy matrix lies on the memory of a result, fresh or reused, and is what its constructor makes."""
    import scipy.sparse as sp

    pool = BufferPool(2)
    for _ in range(3):
        indices, values = pool.take(60_000, np.dtype(np.int32)), pool.take(60_000, np.dtype(np.uint16))
        indices[:] = np.tile(np.arange(600), 100)
        values[:] = 1
        indptr = np.arange(0, 60_001, 600)
        made = assemble_csr(sp.csr_array, (values, indices, indptr), 700)
        assert np.shares_memory(made.indices, indices)
        assert np.shares_memory(made.data, values)
        right = sp.csr_array((values, indices, indptr), shape=(100, 700))
        assert np.shares_memory(right.data, values)
        assert (made != right).nnz == 0
        assert made.indptr.dtype == made.indices.dtype
        del indices, values, made, right
