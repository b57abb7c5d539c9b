"""Keeping one table in order: indexes, compaction, clean-up of old versions."""

from collections.abc import Sequence
from datetime import timedelta

from raggedatlas.catalog.catalog import CELLS, DATASETS, LAYOUTS, OPTIONAL, VERSIONS, Catalog
from raggedatlas.errors import ConflictError
from raggedatlas.model.results import ResultRecord

KEEP = timedelta(days=7)
"""How long table versions that no snapshot names are kept, so that readers of the tip finish in peace."""

INDEXES = {
    CELLS: (("uid", "BTREE"), ("dataset_uid", "BTREE")),
    LAYOUTS: (("layout_uid", "BTREE"), ("feature_uid", "BTREE"), ("feature_uid", "FTS")),
}
"""Indexes of the tables; registries have a BTREE on `uid`."""


def tidy_table(catalog: Catalog, name: str, *, everything: bool = False, results: Sequence[ResultRecord] = ()) -> bool:
    """Index and compact one table; indexes first, because fragments inside and outside an index do not merge.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    name : str
        Table.
    everything : bool
        Whether to rewrite whatever has a deleted row, and the indexes from scratch, so that nothing of it is left.
    results : sequence of ResultRecord
        Results whose indexes of vectors are built from scratch then.

    Returns
    -------
    bool
        Whether anything was written.
    """
    columns = INDEXES.get(name, () if name in {DATASETS, VERSIONS, *OPTIONAL} else (("uid", "BTREE"),))
    compacted = everything and catalog.tables.compact(name, everything=True)
    indexed = [catalog.tables.index(name, column, kind, rebuild=everything) for column, kind in columns]
    if name == CELLS:
        indexed.append(_tidy_vectors(catalog, results))
    return (not everything and catalog.tables.compact(name)) or any(indexed) or compacted


def _tidy_vectors(catalog: Catalog, rebuilt: Sequence[ResultRecord]) -> bool:
    """Build some indexes over vectors from scratch, and bring the others up to date."""
    there = catalog.tables.schema(CELLS).names
    for record in rebuilt:
        index = record.index_facts
        if index is not None and record.column in there:
            catalog.tables.index_vectors(CELLS, record.column, record.metric, index.n_partitions)
    return catalog.tables.refresh_vectors(CELLS) or bool(rebuilt)


def clean_up(catalog: Catalog, names: list[str], keep: timedelta, notes: list[str]) -> int:
    """Remove untagged versions of some tables that are older than a span; return the bytes freed."""
    freed = 0
    for name in names:
        try:
            freed += catalog.tables.clean_up(name, keep)
        except ConflictError:
            notes.append(f"{name}: others were writing; not cleaned up")
    return freed
