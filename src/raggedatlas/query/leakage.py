"""What stands in two parts of a split: values of columns, cells, names, and cells with the same values."""

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.model.batch import CsrBlock
from raggedatlas.model.ids import UidIndex
from raggedatlas.query.query import Query
from raggedatlas.query.spec import AND

if TYPE_CHECKING:
    import pandas as pd

LEAST_DETECTED = 10
"""Cells with fewer features than this may have the same values by chance."""

_BATCH = 4096


def find_leaks(
    query: Query, table: pa.Table, uids: pa.Array, parts: pa.DictionaryArray, *, counts: bool
) -> "pd.DataFrame":
    """List what stands in two parts; see `Split.leakage`.

    `table` has the columns that are compared, a row for each cell that has a part; `uids` and `parts` are those of
    these cells. `counts` tells whether to compare values.
    """
    import pandas as pd

    labels, codes = [str(one).split(AND) for one in parts.dictionary.to_pylist()], parts.indices.to_numpy()
    listed = sorted({part for label in labels for part in label})
    inside = {part: np.array([part in label for label in labels], np.int64) for part in listed}
    several = np.array([len(label) > 1 for label in labels])[codes]
    # What is compared, and of which cells; columns may be called "cell" and "values" too.
    kinds: list[tuple[str, Any, NDArray[np.int64]]] = [
        ("cell", uids.filter(pa.array(several)).to_pylist(), np.flatnonzero(several))
    ]
    for name in table.column_names:
        column = table.column(name).cast(pa.string())
        kinds.append((name, column.drop_null().to_pylist(), np.flatnonzero(column.is_valid().to_numpy())))
    if counts:
        prints = _fingerprints(query, uids)
        kinds.append(("values", prints[prints != 0], np.flatnonzero(prints)))
    found = []
    for number, (kind, values, rows) in enumerate(kinds):
        grouped = pd.DataFrame({part: own[codes[rows]] for part, own in inside.items()}).groupby(
            np.asarray(values), dropna=False
        )
        # A cell that is in several parts is listed as that.
        sums = grouped[listed].sum()[(grouped.size() > 1) | (number == 0)]
        sums = sums[(sums > 0).sum(axis=1) > 1]
        shown = [*map(str, sums.index)]
        if number > table.num_columns:
            # A cell says more than a hash.
            firsts = pd.Series(rows).groupby(np.asarray(values)).first()
            shown = [f"as of the cell {uids[int(row)]}" for row in firsts.loc[sums.index]]
        found.append(sums.assign(kind=kind, value=shown))
    return pd.concat(found)[["kind", "value", *listed]].reset_index(drop=True)


def _fingerprints(query: Query, uids: pa.Array) -> NDArray[np.uint64]:
    """Return a hash of the values of each cell, 0 for cells with few features or without values, whatever the order of the features."""
    index, prints = UidIndex(uids), np.zeros(len(uids), np.uint64)
    hashes: NDArray[np.uint64] | None = None
    for batch in query.obs([]).batches(_BATCH):
        space = next(iter(batch.spaces.values()))
        values = next(iter(space.block.layers.values()))
        if isinstance(space.block, CsrBlock):
            bounds, columns, n_cols = space.block.indptr, space.block.indices, space.block.n_cols
        else:
            flat = values.reshape(len(values), -1)
            rows, columns = np.nonzero(flat)
            values, bounds, n_cols = flat[rows, columns], np.searchsorted(rows, np.arange(len(flat) + 1)), flat.shape[1]
        if hashes is None:
            # Columns of a space without features, such as an embedding, are known by their number.
            names = [*map(str, space.features)] or [*map(str, range(n_cols))]
            hashes = np.array([int(hashlib.sha256(one.encode()).hexdigest()[:16], 16) for one in names], np.uint64)
        entries = values.astype(np.float64)
        # A sum does not depend on the order of what is added.
        mixed = (entries.view(np.uint64) ^ hashes[columns]) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
        there = (entries != 0) & ~np.isnan(entries)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(np.where(there, mixed, 0), dtype=np.uint64)])
        detected = np.concatenate([[0], np.cumsum(there)])
        own = sums[bounds[1:]] - sums[bounds[:-1]]
        own[detected[bounds[1:]] - detected[bounds[:-1]] < LEAST_DETECTED] = 0
        at = index.find(batch.obs.column("uid").cast(pa.string()).combine_chunks())
        prints[at[at >= 0]] = own[at >= 0]
    return prints
