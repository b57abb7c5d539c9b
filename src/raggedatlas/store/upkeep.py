"""Upkeep of Lance tables: compaction, indexes and clean-up, at a cost that follows what was written since the last time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from raggedatlas.errors import ConflictError, CorruptError
from raggedatlas.store.indexes import WHOLE_VALUES
from raggedatlas.store.storage_errors import lance_kind
from raggedatlas.store.tables import Tables

if TYPE_CHECKING:
    import lance

LARGE_ROWS, LARGE_BYTES = 1 << 20, 1 << 28
"""A fragment of as many rows or bytes is not compacted any more."""

SMALL_ROWS = 1 << 16
"""Up to so many rows, fragments are compacted and parts of an index merged without regard to their sizes."""

_MOST_DELETED = 0.1
"""Share of deleted rows from which a fragment is rewritten, whatever its size."""


@dataclass(frozen=True)
class Size:
    """Size of a fragment.

    Parameters
    ----------
    number : int
        Its id.
    rows, deleted, n_bytes : int
        Live and deleted rows, and bytes of its data files.
    """

    number: int
    rows: int
    deleted: int = 0
    n_bytes: int = 0


def choose_fragments(fragments: Sequence[Size]) -> set[int]:
    """Choose the fragments to compact: runs of small ones, of which none has more rows than the others together.

    So every row is rewritten as often as the logarithm of the size of a large fragment says, and a large fragment and few new rows
    are never rewritten together.

    Parameters
    ----------
    fragments : sequence of Size
        All of the table, in its order.

    Examples
    --------
    >>> rows = [2_000_000, 500_000, 10, 10]
    >>> sorted(choose_fragments([Size(i, n) for i, n in enumerate(rows)]))
    [2, 3]
    """
    chosen = {f.number for f in fragments if f.deleted > _MOST_DELETED * (f.rows + f.deleted)}
    run: list[Size] = []
    for fragment in [*fragments, None]:
        if fragment is not None and fragment.rows < LARGE_ROWS and fragment.n_bytes < LARGE_BYTES:
            run.append(fragment)
            continue
        chosen |= _balanced(run)
        run = []
    return chosen


def _balanced(run: Sequence[Size]) -> set[int]:
    """Return the fragments of a run without those that are larger than the rest on their side."""
    if len(run) < 2:
        return set()
    total, largest = sum(f.rows for f in run), max(range(len(run)), key=lambda i: run[i].rows)
    if total <= SMALL_ROWS or 2 * run[largest].rows <= total:
        return {f.number for f in run}
    return _balanced(run[:largest]) | _balanced(run[largest + 1 :])


def parts_to_merge(parts: Sequence[int], n_new: int) -> int:
    """Return how many of the last parts of an index are merged with new rows: those that are not much larger than what comes after them.

    Parameters
    ----------
    parts : sequence of int
        Rows that each part covers, oldest first.
    n_new : int
        Rows that none covers.

    Examples
    --------
    >>> parts_to_merge([5_000_000, 200_000, 150_000], 100_000)
    2
    """
    n = 0
    for rows in reversed(parts):
        if rows > max(2 * n_new, SMALL_ROWS):
            break
        n, n_new = n + 1, n_new + rows
    return n


def sizes(table: "lance.LanceDataset") -> list[Size]:
    """Return the sizes of all fragments of a table, from its manifest alone."""
    found = []
    for fragment in table.get_fragments():
        facts, deleted = fragment.metadata, fragment.num_deletions
        n_bytes = sum(file.file_size_bytes or 0 for file in facts.files)
        found.append(Size(fragment.fragment_id, facts.physical_rows - deleted, deleted, n_bytes))
    return found


def compact(tables: Tables, name: str, *, everything: bool = False) -> bool:
    """Merge small fragments and leave deleted rows out; what was rewritten is read back before this returns.

    Parameters
    ----------
    tables : Tables
        At the tip.
    name : str
        Table.
    everything : bool
        Whether to rewrite every fragment that has a deleted row, however few they are.

    Returns
    -------
    bool
        Whether anything was rewritten.

    Raises
    ------
    CorruptError
        If the compacted version does not read. The version before it has been restored, unless others wrote meanwhile.
    """

    def once() -> bool:
        table = tables.open(name)
        there = sizes(table)
        chosen = choose_fragments(there)
        if everything:
            chosen |= {f.number for f in there if f.deleted}
        if not chosen:
            return False
        options: dict[str, Any] = {"materialize_deletions_threshold": 0.0} if everything else {}
        before, old_ids = int(table.version), {f.number for f in there}
        table.optimize.compact_files(
            target_rows_per_fragment=LARGE_ROWS, excluded_fragment_ids=sorted(old_ids - chosen), **options
        )
        if int(table.version) == before:
            return False
        fresh = [f for f in table.get_fragments() if f.fragment_id not in old_ids]
        try:
            readable = all(sum(b.num_rows for b in f.to_batches()) == f.count_rows() for f in fresh)
        except (OSError, ValueError, RuntimeError):
            readable = False
        if not readable:
            _undo(tables, name, int(table.version), before)
        return True

    return tables.retry(name, once, keep=True)


def _undo(tables: Tables, name: str, bad: int, before: int) -> None:
    tables.forget(name)
    is_newest = tables.version(name) == bad
    if is_newest:
        tables.restore(name, before)
    outcome = f"version {before} has been restored" if is_newest else f"the last good version is {before}"
    raise CorruptError(
        f"Table {name!r} of {tables.location.uri} does not read back after compaction (version {bad}); {outcome}. "
        "Please report this with the table's schema."
    )


def index(tables: Tables, name: str, column: str, kind: str, *, rebuild: bool = False, least: int = 1) -> bool:
    """Build or update a scalar (``BTREE``, ``BITMAP``) or full-text (``FTS``) index; return whether it was necessary.

    Parameters
    ----------
    tables : Tables
        At the tip.
    name, column, kind : str
        Table, column and kind of the index.
    rebuild : bool
        Whether to build it anew; with too few rows, one that is there is removed.
    least : int
        Number of rows without an index from which it is built or updated.
    """
    index_name = f"{column}_{kind.lower()}_idx"
    options = WHOLE_VALUES if kind == "FTS" and column.endswith("uid") else {}
    stored: Any = "INVERTED" if kind == "FTS" else kind

    def once() -> bool:
        table = tables.open(name)
        parts = _parts(table, there := {f.number: f.rows for f in sizes(table)}).get(index_name)
        n_rows = sum(there.values())
        if rebuild and parts is not None:
            table.drop_index(index_name)
        if n_rows < least and (rebuild or parts is None):
            return rebuild and parts is not None
        if rebuild or parts is None:
            table.create_scalar_index(column, stored, name=index_name, **options)
            return True
        n_new = n_rows - sum(parts)
        if n_new < least:
            return False
        table.optimize.optimize_indices(index_names=[index_name], num_indices_to_merge=parts_to_merge(parts, n_new))
        return True

    return tables.retry(name, once, keep=True)


def _parts(table: "lance.LanceDataset", rows: Mapping[int, int]) -> dict[str, list[int]]:
    """Return for each index of a table the rows that each of its parts covers, oldest part first."""
    return {
        index.name: [
            sum(rows.get(number, 0) for number in part.fragment_ids)
            for part in sorted(index.segments, key=lambda part: part.dataset_version_at_last_update)
        ]
        for index in table.describe_indices()
    }


def index_vectors(tables: Tables, name: str, column: str, metric: str, n_partitions: int) -> None:
    """Build or replace the index over a column of vectors (``IVF_SQ``)."""

    def once() -> None:
        tables.open(name).create_index(
            column, "IVF_SQ", name=f"{column}_vectors", metric=metric, num_partitions=n_partitions, replace=True
        )

    tables.retry(name, once, keep=True)


def refresh_vectors(tables: Tables, name: str) -> bool:
    """Update the indexes over vectors; return whether it was necessary."""

    def once() -> bool:
        table = tables.open(name)
        rows = {f.number: f.rows for f in sizes(table)}
        parts = _parts(table, rows)
        names = [i.name for i in table.describe_indices() if i.name == f"{i.field_names[0]}_vectors"]
        outdated = [i for i in names if sum(parts[i]) < sum(rows.values())]
        if outdated:
            table.optimize.optimize_indices(index_names=outdated)
        return bool(outdated)

    return tables.retry(name, once, keep=True)


def clean_up(tables: Tables, name: str, older_than: timedelta) -> int:
    """Remove versions older than a span, never a tagged one, and return the bytes freed."""

    def once() -> int:
        try:
            stats = tables.open(name).cleanup_old_versions(older_than=older_than, error_if_tagged_old_versions=False)
        except (OSError, ValueError) as error:
            # Lance lists the tags and then reads each, and another snapshot may take back a provisional one in between.
            if lance_kind(error) != "missing":
                raise
            raise ConflictError(f"A tag of {tables.uri(name)} was removed while it was cleaned up.") from error
        return int(stats.bytes_removed)

    return tables.retry(name, once, keep=True)


def count_old_versions(tables: Tables, name: str, older_than: timedelta) -> int:
    """Return how many versions of a table are older than a span, by one listing; `clean_up` takes a request for each version."""
    oldest = datetime.now(UTC) - older_than
    return sum(when <= oldest for _, _, when in tables.location.child(f"{name}.lance", "_versions").list_objects())
