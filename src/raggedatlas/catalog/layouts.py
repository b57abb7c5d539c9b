"""Ordered feature lists shared between datasets (seed 000, ``_feature_layouts``)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import LAYOUTS, Catalog
from raggedatlas.model.ids import layout_uid
from raggedatlas.model.records import LAYOUTS_SCHEMA, DatasetRecord
from raggedatlas.store.sql import all_of, equals, in_list


@dataclass(frozen=True, slots=True)
class Layout:
    """One ordered feature list.

    Parameters
    ----------
    uid : str
        Content hash of the list.
    features : (n_features,) object array of str
        Feature uids; position = column in the group's arrays.
    global_index : (n_features,) int64
        Registry index of each; -1 where none has been assigned yet.
    """

    uid: str
    features: NDArray[np.object_]
    global_index: NDArray[np.int64]


def feature_set(feature_uids: Iterable[str]) -> str:
    """Return a hash of a set of features, independent of their order; dataset records store it.

    Examples
    --------
    >>> feature_set(["b", "a"]) == feature_set(["a", "b"])
    True
    """
    return layout_uid(sorted(feature_uids))


def records_with_features(
    catalog: Catalog, records: Iterable[DatasetRecord], space: str, n_features: int, wanted: str
) -> list[DatasetRecord]:
    """Return the records of a space that have exactly some features, in any order.

    Parameters
    ----------
    catalog : Catalog
        Provides the layouts of records without a feature hash.
    records : iterable of DatasetRecord
        The inventory.
    space : str
        Feature space.
    n_features : int
        Number of columns.
    wanted : str
        Their `feature_set`; empty for a space without features.

    Returns
    -------
    list of DatasetRecord
        In the given order.
    """
    alike = [r for r in records if r.feature_space == space and r.n_features == n_features]
    if not wanted:
        return [r for r in alike if not r.layout_uid]
    kept: dict[str, str | None] = {r.zarr_group: r.file_facts.feature_set for r in alike}
    older = read_layouts(catalog, {r.layout_uid for r in alike if kept[r.zarr_group] is None})
    of_layout = {uid: feature_set(layout.features.tolist()) for uid, layout in older.items()}
    return [r for r in alike if (kept[r.zarr_group] or of_layout.get(r.layout_uid)) == wanted]


def ensure_layouts(catalog: Catalog, layouts: Iterable[tuple[Sequence[str], NDArray[np.int64]]]) -> list[str]:
    """Write the missing ordered feature lists, with one commit, and return the uids of all.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    layouts : iterable of (sequence of str, (n_features,) int64)
        Feature uids in column order, and the index that the registry has assigned to each so far; -1 for none.

    Notes
    -----
    Two writers may write the same list at the same time; readers take the first row of each column, and `optimize` removes
    the others.
    """
    wanted = [(layout_uid(uids), uids, index) for uids, index in layouts]
    lists = {uid: (uids, index) for uid, uids, index in wanted if len(uids)}
    if lists:
        where = all_of(in_list("layout_uid", lists), equals("local_index", 0))
        first = catalog.tables.read(LAYOUTS, ["layout_uid"], where)
        there = set(first.column("layout_uid").to_pylist())
        fresh = [_layout_rows(uid, *found) for uid, found in lists.items() if uid not in there]
        if fresh:
            catalog.tables.append(LAYOUTS, pa.concat_tables(fresh))
    return [uid for uid, _, _ in wanted]


def _layout_rows(uid: str, feature_uids: Sequence[str], global_index: NDArray[np.int64]) -> pa.Table:
    n = len(feature_uids)
    return pa.table(
        {
            "layout_uid": pa.array([uid] * n, pa.string()),
            "feature_uid": pa.array(feature_uids, pa.string()),
            "local_index": pa.array(np.arange(n, dtype=np.int32)),
            "global_index": pa.array(global_index, mask=global_index < 0),
        },
        schema=LAYOUTS_SCHEMA,
    )


def read_layouts(catalog: Catalog, uids: Iterable[str]) -> dict[str, Layout]:
    """Read some layouts, each in column order.

    Returns
    -------
    dict
        uid -> `Layout`; uids without rows are absent.
    """
    wanted = sorted({uid for uid in uids if uid})
    memo: dict[str, Layout] = catalog._memo.setdefault("layouts", {})  # type: ignore[assignment]
    known = memo if catalog.read_only else {}
    missing = [uid for uid in wanted if uid not in known]
    if missing:
        rows = catalog.tables.read(LAYOUTS, where=in_list("layout_uid", missing))
        known.update(_split(rows))
    return {uid: known[uid] for uid in wanted if uid in known}


def _split(rows: pa.Table) -> dict[str, Layout]:
    if rows.num_rows == 0:
        return {}
    encoded = rows.column("layout_uid").combine_chunks().dictionary_encode()
    codes = encoded.indices.to_numpy()
    local = rows.column("local_index").to_numpy()
    order = np.lexsort((local, codes))
    codes, local = codes[order], local[order]
    first = np.ones(len(order), bool)
    first[1:] = (codes[1:] != codes[:-1]) | (local[1:] != local[:-1])
    order, codes = order[first], codes[first]
    features: NDArray[Any] = rows.column("feature_uid").to_numpy()[order]
    index = rows.column("global_index").fill_null(-1).to_numpy()[order]
    bounds = np.searchsorted(codes, np.arange(len(encoded.dictionary) + 1))
    return {
        uid: Layout(uid, features[start:stop], index[start:stop])
        for uid, start, stop in zip(encoded.dictionary.to_pylist(), bounds[:-1], bounds[1:], strict=True)
    }
