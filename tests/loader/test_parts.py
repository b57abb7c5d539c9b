"""Laws of what a batch is made of: columns as codes, dense rows, re-used memory, and single cells."""

import datetime as dt
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas import CellDataset, Loader
from raggedatlas.errors import NotFoundError, QueryError
from raggedatlas.loader.cells import obs_column
from raggedatlas.loader.loader import format_block, slice_rows
from raggedatlas.model.batch import CsrBlock
from raggedatlas.store.runtime import BufferPool

pytestmark = pytest.mark.fast


def block_of(dense: Any, rng: np.random.Generator) -> CsrBlock:
    """Make sparse rows whose columns stand in any order."""
    order = [rng.permutation(np.flatnonzero(row)) for row in dense]
    indptr = np.cumsum([0, *map(len, order)]).astype(np.int64)
    indices = np.concatenate(order).astype(np.int32)
    values = dense[np.repeat(np.arange(len(dense)), np.diff(indptr)), indices]
    return CsrBlock(indptr, indices, {"counts": values, "twice": values * 2.0}, dense.shape[1])


@given(seed=st.integers(0, 10**6), n_rows=st.integers(1, 20), n_cols=st.integers(1, 130))
def test_rows_survive_cutting_and_densifying(seed: int, n_rows: int, n_cols: int) -> None:
    """Dense rows are the sparse rows, cut anywhere, in whatever order their columns stand."""
    rng = np.random.default_rng(seed)
    dense = rng.poisson(0.7, (n_rows, n_cols)).astype(np.uint16)
    start, stop = sorted(rng.integers(0, n_rows + 1, 2).tolist())
    part = slice_rows(block_of(dense, rng), start, stop)
    made = format_block(part, "dense", np.dtype(np.float32), BufferPool(2))
    np.testing.assert_array_equal(made.layers["counts"], dense[start:stop])
    np.testing.assert_array_equal(made.layers["twice"], dense[start:stop] * 2.0)


@pytest.mark.parametrize("as_", ["csr", "dense"])
def test_held_batches_do_not_change(small: Any, as_: Any, monkeypatch: Any) -> None:
    """A batch that is kept stays as it was, however many follow; memory that is let go is used again."""
    lent: list[Any] = []
    take = BufferPool.take
    monkeypatch.setattr(BufferPool, "take", lambda pool, n, dtype: lent.append(n) or take(pool, n + 2**16, dtype)[:n])
    loader = Loader(small.query, 8, as_=as_, buffers=2, threads=2)
    for batch in [*loader, *loader]:
        values = batch.X.toarray() if as_ == "csr" else batch.X
        np.testing.assert_array_equal(values, small.counts[batch.rows])
    assert lent


def test_columns_ascend_where_it_is_said(small: Any) -> None:
    """Rows are sorted where that is asked for; else the batch does not claim it, and holds the same."""
    plain, ordered = (next(iter(Loader(small.query, 70, sort=sort))) for sort in (False, True))
    found = ordered.spaces["gene_expression"]
    assert (found.sorted, plain.spaces["gene_expression"].sorted) == (True, False)
    starts = np.zeros(len(found.block.indices), bool)
    starts[found.block.indptr[:-1][np.diff(found.block.indptr) > 0]] = True
    assert ((np.diff(found.block.indices) > 0) | starts[1:]).all()
    np.testing.assert_array_equal(plain.X.toarray(), ordered.X.toarray())


def test_columns_become_numbers_or_codes(small: Any) -> None:
    """Numbers stay numbers, NaN where missing; all else is codes: categories in their order, others sorted, -1 where missing."""
    names = ["kind", "donor", "percent.mt", "n", "flag", "plate", "dataset"]
    batch = next(iter(Loader(small.query, 100, shuffle=None, obs=names)))
    known = {name: known.tolist() for name, known in batch.categories.items()}
    assert known == {
        "kind": ["T", "B"],
        "donor": ["D1", "D2"],
        "flag": [False, True],
        "dataset": ["first", "second"],
    }
    for name in known:
        wanted = [None if pd.isna(value) else value for value in small.obs[name].astype(object)]
        assert batch.labels(name).tolist() == wanted
        assert batch.obs[name].dtype == np.int32
    np.testing.assert_array_equal(batch.obs["n"], small.obs["n"].astype("float64"))
    np.testing.assert_array_equal(batch.obs["plate"], small.obs["plate"])
    with pytest.raises(NotFoundError, match="not of 'n'"):
        batch.labels("n")


def test_given_categories_number_the_codes(small: Any) -> None:
    """Codes follow the categories that are given, so that two queries agree; others are missing, and a warning names them."""
    choices: dict[str, Any] = {"obs": ["donor", "plate"], "categories": {"donor": ["D9", "D2"], "plate": [2, 0]}}
    with (
        pytest.warns(UserWarning, match="of 'donor' lack 1 values that cells have: 'D1'"),
        pytest.warns(UserWarning, match="of 'plate' lack"),
    ):
        batch = next(iter(Loader(small.query, 100, shuffle=None, **choices)))
    assert batch.uids.tolist() == small.obs.index.tolist()
    assert set(zip(small.obs["donor"], batch.obs["donor"].tolist(), strict=True)) == {("D1", -1), ("D2", 1)}
    assert batch.obs["plate"].tolist() == small.obs["plate"].map({2: 0, 0: 1}).fillna(-1).tolist()


def test_other_types_are_codes_or_refused() -> None:
    """Times are codes; columns of lists cannot be given."""
    table = pa.table({"day": [dt.date(2020, 1, 2), None, dt.date(2019, 1, 1)], "list": [[1], [2], []]})
    assert obs_column(table, "day").values.tolist() == [1, -1, 0]
    with pytest.raises(QueryError, match="holds list"):
        obs_column(table, "list")


@pytest.mark.parametrize("wide", [2**53, -(2**53), 1020035400000100001])
def test_integers_that_floats_would_round_are_refused(wide: int) -> None:
    """Integers are floats beside a missing value; those that floats cannot hold are refused, and given categories code them exactly."""
    table = pa.table({"full": [wide, 1], "gaps": [wide, None], "small": [2**53 - 1, None]})
    assert obs_column(table, "full").values.tolist() == [wide, 1]
    assert obs_column(table, "small").values[0] == 2**53 - 1
    with pytest.raises(QueryError, match=r"2\*\*53 or more and missing values"):
        obs_column(table, "gaps")
    coded = obs_column(table, "gaps", [wide])
    assert (coded.values.tolist(), coded.categories.tolist()) == ([0, -1], [wide])


def test_any_cells_can_be_asked_for(small: Any) -> None:
    """A map-style dataset gives one cell, several, repeated, from the end or by slice, as the query has them."""
    dataset = CellDataset(small.query, obs=["kind"])
    assert len(dataset) == 70
    for index, rows in ((3, [3]), (-1, [69]), ([5, 5, -2], [5, 5, 68]), (slice(60, None, 4), [60, 64, 68]), ([], [])):
        batch = dataset[index]
        assert batch.rows.tolist() == rows
        np.testing.assert_array_equal(batch.X.toarray(), small.counts[rows])
        assert len(batch.obs["kind"]) == len(rows)
    assert dataset.__getitems__([9, 1]).rows.tolist() == [9, 1]
    assert [batch.rows[0] for batch in dataset][-2:] == [68, 69]
    assert dataset.categories["kind"].tolist() == ["T", "B"]
    for wrong in (70, -71, [0, 70]):
        with pytest.raises(NotFoundError, match="70 cells"):
            dataset[wrong]
    for bad in (1.5, "a", [[1, 2]]):
        with pytest.raises(QueryError, match="whole numbers"):
            dataset[bad]
    with pytest.raises(QueryError, match="does not know"):
        CellDataset(small.query, rank=1)  # type: ignore[call-arg]


def test_layers_that_were_not_read_are_named(small: Any) -> None:
    """A layer that is not in the batch, or tensors of arrays, are refused by name."""
    batch = CellDataset(small.query)[0]
    with pytest.raises(NotFoundError, match="not 'log'"):
        batch.spaces["gene_expression"].layer("log")
    with pytest.raises(NotFoundError, match="as_='torch'"):
        batch.to("cpu")
