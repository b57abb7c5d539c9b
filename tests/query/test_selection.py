"""Cells that are chosen while the cell table is streamed are those that are chosen among all of them at once."""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.query.cells import hash_uids
from raggedatlas.query.query import Query
from raggedatlas.store.filters import col
from raggedatlas.store.tables import walk

SIZE = 5

columns = st.sampled_from(["cell_type", "stage", "score", "n", "donor", "dataset", "cell_name"])


@st.composite
def choices(draw: st.DrawFn) -> Callable[[Query], Query]:
    """Draw a way to choose cells: some of filter, sample, order and limit."""
    where = draw(st.none() | st.sampled_from([{"flag": True}, col("score") > 0, col("cell_type").is_null()]))
    sample = draw(st.none() | st.tuples(st.integers(0, 30), st.none() | columns, st.integers(0, 3)))
    order = draw(st.lists(columns, max_size=2, unique=True))
    limit = draw(st.none() | st.integers(0, 40))
    down = draw(st.booleans())

    def choose(query: Query) -> Query:
        query = query if where is None else query.where(where)
        query = query if sample is None else query.sample(sample[0], by=sample[1], seed=sample[2])
        query = query.order_by(*order, descending=down) if order else query
        return query if limit is None else query.limit(limit)

    return choose


def walk_shuffled(*asked: Any, **more: Any) -> Iterator[pa.RecordBatch]:
    """Walk over the table in small batches, and not in its order."""
    pieces = [b.slice(at, SIZE) for b in walk(*asked, **more) for at in range(0, b.num_rows, SIZE)]
    return iter(pieces[1::2] + pieces[::2])


@given(choices(), st.sampled_from([None, "cell_type", "score", "dataset"]))
def test_streamed_choices_are_those_among_all_cells(
    small: Any, choose: Callable[[Query], Query], by: str | None
) -> None:
    """Filter, sample, order, limit and count do not depend on how the table is cut, nor on the order of its files."""
    query = choose(small.query)
    cells, counted = query.to_pandas(), query.count(by)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raggedatlas.query.cells.walk", walk_shuffled)
        for name in ("raggedatlas.query.cells.BLOCK_CELLS", "raggedatlas.query.compute.BLOCK_CELLS"):
            patch.setattr(name, SIZE)
        patch.setattr("raggedatlas.query.cells._LISTED_ROWS", 3)
        streamed = choose(Query(small.catalog))
        found = streamed.to_pandas()
        again = streamed.count(by)
    assert found.index.tolist() == cells.index.tolist()
    assert found.equals(cells)
    if by is None:
        assert counted == again == len(cells)
    else:
        assert again.equals(counted)
        assert counted.sum() == len(cells)


@pytest.mark.parametrize("condition", [None, {"flag": True}])
def test_a_limit_reads_no_further_than_its_cells(
    small: Any, condition: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows behind the last cell of a limit are not read, but for what is read ahead; an order needs them all."""
    n_read = 0

    def walk_counted(tables: Any, name: str, columns: Any, *asked: Any) -> Iterator[pa.RecordBatch]:
        nonlocal n_read
        for batch in walk(tables, name, columns, *asked):
            for at in range(0, batch.num_rows, SIZE):
                # Without columns, nothing is read but the table's list of rows.
                n_read += len(batch.slice(at, SIZE)) if columns else 0
                yield batch.slice(at, SIZE)

    query = small.query if condition is None else small.query.where(condition)
    ordered = query.order_by("score", "cell_name", "dataset")
    stored, sorted_uids = query.to_pandas().index.tolist(), ordered.to_pandas().index.tolist()
    monkeypatch.setattr("raggedatlas.query.cells.walk", walk_counted)
    assert query.limit(3).to_pandas().index.tolist() == stored[:3]
    assert n_read <= 3 * SIZE < len(stored)
    n_read = 0
    assert ordered.limit(3).to_pandas().index.tolist() == sorted_uids[:3]
    assert n_read == len(stored)


def test_the_hash_of_a_uid_never_changes() -> None:
    """Samples of one seed stay what they were in older releases, and a uid is hashed by itself."""
    uids = np.array([b"0123456789abcdef", b"cell one", b"ffffffffffffffff"])
    expected = [12503360025960120825, 14018506205041004282, 15979092690670923289]
    assert hash_uids(uids, 3).tolist() == expected
    assert [hash_uids(uids[i : i + 1], 3)[0] for i in range(3)] == expected
    assert hash_uids(np.array([b"0123456789abcdef0"]), 3) != expected[0]


@given(st.lists(st.text("0123456789abcdefABGghp:@/` ", min_size=15, max_size=17), min_size=1, max_size=20))
def test_only_uids_of_hex_digits_are_numbers(uids: list[str]) -> None:
    """A hash of 64 bits is one to one on uids that are 16 hex digits; of others it is a hash of their SHA-256."""
    found = hash_uids(np.array([uid.encode() for uid in uids]), 0)
    regular = [uid for uid in uids if re.fullmatch("[0-9a-f]{16}", uid)]
    like = [uid if uid in regular else hashlib.sha256(uid.encode()).hexdigest()[:16] for uid in uids]
    assert found.tolist() == hash_uids(np.array([uid.encode() for uid in like]), 0).tolist()
    assert len({*hash_uids(np.array([uid.encode() for uid in {*regular, "0" * 16}]), 0).tolist()}) == len(
        {*regular, "0" * 16}
    )
