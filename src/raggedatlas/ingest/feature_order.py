"""The order in which a sparse group keeps its columns: those that many cells detect first, as a sample of the cells shows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.assets import read_records
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.layouts import read_layouts, records_with_features
from raggedatlas.errors import SchemaError
from raggedatlas.ingest.content_hash import block_rows
from raggedatlas.ingest.options import IngestOptions
from raggedatlas.ingest.plan import GroupPlan, IngestPlan
from raggedatlas.ingest.values import to_csr
from raggedatlas.model.protocols import MatrixInfo, Source
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.spaces import PointerKind
from raggedatlas.store.sparse import count_columns

SAMPLE_ENTRIES = 4 * 2**20
"""About how many entries are looked at (four times as many numbers of a dense matrix); a smaller matrix is read whole."""

SLABS = 16
"""Runs of neighbouring rows that a sample is made of, spread evenly over the file."""


ColumnOrders = Mapping[str, Sequence[str]]
"""Hash of a set of features -> their uids in the order in which others store them."""


def order_columns(
    catalog: Catalog,
    source: Source,
    plan: IngestPlan,
    staged: Sequence[IngestPlan],
    options: IngestOptions,
    orders: ColumnOrders,
) -> IngestPlan:
    """Decide the stored column order of every sparse group with features.

    Neighbouring columns that most cells detect make short gaps, so the stored numbers are small. A layout of the same
    features keeps its order, so that datasets with the same features share one layout, whatever their files' orders.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    source : Source
        A bounded, evenly spread sample of its values is read.
    plan : IngestPlan
        As `plan_ingest` makes it: columns in the file's order.
    staged : sequence of IngestPlan
        Ordered plans that are to be committed together with this one.
    options : IngestOptions
        The caller's choices; ``column_order="file"`` changes nothing.
    orders : mapping of str to sequence of str
        Column orders of sources that others write.

    Raises
    ------
    SchemaError
        If the choice is not understood.
    SourceError
        If the sample cannot be read.
    """
    if options.column_order not in ("detected", "file"):
        raise SchemaError(f"column_order={options.column_order!r} is not understood; use 'detected' or 'file'.")
    if options.column_order == "file":
        return plan
    records = read_records(catalog)
    known = {g.feature_set: g for p in staged for g in p.groups if g.features is not None}
    groups: list[GroupPlan] = []
    for group in plan.groups:
        if group.features is None or group.space.kind is not PointerKind.SPARSE:
            groups.append(group)
            continue
        # The order of a committed dataset comes first: its layout cannot change any more.
        there = _stored_order(catalog, group, records)
        if not there and group.feature_set in known:
            there = known[group.feature_set].stored_uids
        there = there or orders.get(group.feature_set, ())
        if there:
            groups.append(_in_order(group, there))
        else:
            groups.append(group.reordered(rank_columns(_counts(source, group, plan.groups)), "detected"))
        # Further groups of this source with the same features follow this one.
        known[group.feature_set] = groups[-1]
    return replace(plan, groups=tuple(groups))


def _in_order(group: GroupPlan, there: Sequence[str]) -> GroupPlan:
    place = {uid: i for i, uid in enumerate(there)}
    uids = () if group.features is None else group.features.uids
    return group.reordered(np.array([place[uid] for uid in uids], np.int64), "shared")


def _stored_order(catalog: Catalog, group: GroupPlan, records: Sequence[DatasetRecord]) -> Sequence[str]:
    same = records_with_features(catalog, records, group.space.name, group.width, group.feature_set)
    layouts = read_layouts(catalog, [r.layout_uid for r in same[:1]])
    return tuple(layouts[same[0].layout_uid].features.tolist()) if layouts else ()


def _counts(source: Source, group: GroupPlan, groups: Sequence[GroupPlan]) -> NDArray[np.int64]:
    """Add up over all groups with these features: a matrix without zeros, as scaling makes it, says nothing by itself."""
    uids = () if group.features is None else group.features.uids
    place = {uid: i for i, uid in enumerate(uids)}
    counts = np.zeros(len(uids), np.int64)
    for other in groups:
        if other.features is group.features:
            counts += sample_counts(source, other.layers[0].info)
        elif other.features is not None and other.feature_set == group.feature_set:
            columns = np.array([place[uid] for uid in other.features.uids], np.int64)
            counts[columns] += sample_counts(source, other.layers[0].info)
    return counts


def rank_columns(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return every column its place by falling count; equal counts keep their order.

    Parameters
    ----------
    counts : (n_columns,) int64
        How many cells detect each column.

    Returns
    -------
    (n_columns,) int64
        New place of each column.

    Examples
    --------
    >>> rank_columns(np.array([0, 5, 5, 9]))
    array([3, 1, 2, 0])
    """
    places = np.empty(len(counts), np.int64)
    # `argsort` gives the column at each place; the assignment inverts that.
    places[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    return places


def sample_counts(source: Source, info: MatrixInfo) -> NDArray[np.int64]:
    """Count in how many cells of a sample each column of a matrix is stored.

    The sample depends on the matrix's shape and number of entries alone, so the same file gives the same counts.

    Returns
    -------
    (n_columns,) int64
    """
    counts = np.zeros(info.shape[1], np.int64)
    slabs, limit = plan_sample(info)
    for rows in slabs:
        seen = 0
        for (block,) in source.blocks((info.key,), block_rows(info), rows):
            indices = to_csr(block).indices
            counts += count_columns(indices, len(counts))
            seen += indices.size
            # Ends this run of rows only; the others are spread over the file and are needed too.
            if seen >= limit:
                break
    return counts


def plan_sample(info: MatrixInfo) -> tuple[list[tuple[int, int]], int]:
    """Choose the rows to look at, and after how many entries of one run to stop looking (rows may be of uneven length).

    Returns
    -------
    tuple
        Runs of rows ``(start, stop)``, and the limit.
    """
    height = info.shape[0]
    if info.form == "dense":
        total, wanted = height * info.shape[1], 4 * SAMPLE_ENTRIES
    else:
        total, wanted = info.n_entries if info.n_entries is not None else height * info.shape[1] // 10, SAMPLE_ENTRIES
    if total <= wanted:
        return [(0, height)], 4 * SAMPLE_ENTRIES
    rows = max(1, height * wanted // total // SLABS)
    # Where there are fewer rows than slabs, starts coincide and their cells would count several times.
    starts = np.unique(np.linspace(0, height - rows, SLABS).astype(np.int64)).tolist()
    return [(start, start + rows) for start in starts], 2 * SAMPLE_ENTRIES // SLABS
