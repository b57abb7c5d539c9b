"""Upkeep of Lance tables: compaction, indexes and clean-up, at a cost that follows what was written since the last time."""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from raggedatlas.errors import ConflictError, CorruptError
from raggedatlas.store.runtime import map_decode
from raggedatlas.store.sql import parenthesized
from raggedatlas.store.storage_errors import (
    FILE_FORMAT,
    LANCE_ERRORS,
    filter_errors,
    is_panic,
    lance_errors,
    lance_kind,
)
from raggedatlas.store.tables import WHOLE_VALUES, Tables, split_addresses

if TYPE_CHECKING:
    import lance
    from lance.fragment import FragmentMetadata

LARGE_ROWS, LARGE_BYTES = 1 << 20, 1 << 28
"""A fragment of as many rows or bytes is not compacted any more."""

SMALL_ROWS = 1 << 16
"""Up to so many rows, fragments are compacted and parts of an index merged without regard to their sizes."""

MANY_FRAGMENTS = 16
"""Number of fragments from which `add` and snapshots merge small ones: fewer are read side by side, and merging takes some ten requests."""

_MOST_DELETED = 0.1
"""Share of deleted rows from which a fragment is rewritten, whatever its size."""


@dataclass(frozen=True)
class Size:
    """Size of a fragment."""

    number: int  # id of the fragment
    rows: int  # live rows
    deleted: int = 0  # deleted rows
    n_bytes: int = 0  # of the data files


def choose_fragments(fragments: Sequence[Size]) -> set[int]:
    """Choose the fragments to compact: runs of small ones, of which none has more rows than the others together.

    So every row is rewritten as often as the logarithm of the size of a large fragment says, and a large fragment and
    few new rows are never rewritten together. `fragments` are all of the table, in its order.
    """
    chosen = {f.number for f in fragments if _many_deleted(f)}
    run: list[Size] = []
    for fragment in [*fragments, None]:
        if fragment is not None and fragment.rows < LARGE_ROWS and fragment.n_bytes < LARGE_BYTES:
            run.append(fragment)
            continue
        chosen |= _balanced(run)
        run = []
    return chosen


def _many_deleted(fragment: Size) -> bool:
    return fragment.deleted > _MOST_DELETED * (fragment.rows + fragment.deleted)


def _balanced(run: Sequence[Size]) -> set[int]:
    """Return the fragments of a run without those that are larger than the rest on their side."""
    if len(run) < 2:
        return set()
    total, largest = sum(f.rows for f in run), max(range(len(run)), key=lambda i: run[i].rows)
    if total <= SMALL_ROWS or 2 * run[largest].rows <= total:
        return {f.number for f in run}
    return _balanced(run[:largest]) | _balanced(run[largest + 1 :])


def parts_to_merge(parts: Sequence[int], n_new: int) -> int:
    """Return how many of the last parts of an index to merge with new rows: those not much larger than what follows.

    `parts` are the rows that each part covers, oldest first; `n_new` rows are covered by none.
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


def compact(tables: Tables, name: str, least: int = 0) -> bool:
    """Merge small fragments and leave deleted rows out; return whether anything was rewritten.

    With fewer than `least` fragments, this is done only if a large one has many deleted rows. `tables` are at the tip.

    What was rewritten is read back before this returns. If it does not read, the version before it is restored, unless
    others wrote meanwhile, and a `CorruptError` raised.
    """

    def once() -> bool:
        table = tables.open_copy(name)
        there = sizes(table)
        chosen = choose_fragments(there)
        large = (f for f in there if f.rows + f.deleted > SMALL_ROWS)
        if not chosen or (len(there) < least and not any(map(_many_deleted, large))):
            return False
        before, old_ids = int(table.version), {f.number for f in there}
        table.optimize.compact_files(
            target_rows_per_fragment=LARGE_ROWS, excluded_fragment_ids=sorted(old_ids - chosen)
        )
        if int(table.version) == before:
            return False
        tables.keep(name, table)
        if not _read(table, [f for f in table.get_fragments() if f.fragment_id not in old_ids]):
            bad = int(table.version)
            tables.forget(name)
            is_newest = tables.version(name) == bad
            if is_newest:
                tables.restore(name, before)
            outcome = f"version {before} has been restored" if is_newest else f"the last good version is {before}"
            raise CorruptError(
                f"Table {name!r} of {tables.location.uri} does not read back after compaction (version {bad}); {outcome}. "
                "Please report this with the table's schema."
            )
        return True

    return tables.retry(name, once)


def _read(table: "lance.LanceDataset", fragments: "Sequence[lance.LanceFragment]") -> bool:
    """Return whether all rows of fragments can be read."""
    if not fragments:
        return True
    try:
        n_rows = sum(int(b.num_rows) for b in table.scanner(fragments=fragments).to_batches())
    except BaseException as error:
        # A panic of Lance is no `Exception`.
        if not is_panic(error) and not isinstance(error, LANCE_ERRORS):
            raise
        return False
    return n_rows == sum(int(f.count_rows()) for f in fragments)


def index(tables: Tables, name: str, column: str, kind: str, *, least: int = 1) -> bool:
    """Build or update a scalar (``BTREE``, ``BITMAP``) or full-text (``FTS``) index; return whether it was necessary.

    It is necessary from `least` rows without an index on. `tables` are at the tip.
    """
    index_name = f"{column}_{kind.lower()}_idx"
    options = WHOLE_VALUES if kind == "FTS" and column.endswith("uid") else {}
    stored: Any = "INVERTED" if kind == "FTS" else kind

    def build(table: "lance.LanceDataset") -> bool:
        parts = _parts(table, there := {f.number: f.rows for f in sizes(table)}).get(index_name)
        n_new = sum(there.values()) - sum(parts or ())
        if n_new < least:
            return False
        if parts is None:
            table.create_scalar_index(column, stored, name=index_name, **options)
        else:
            n = parts_to_merge(parts, n_new)
            table.optimize.optimize_indices(index_names=[index_name], num_indices_to_merge=n)
        return True

    return tables.change(name, build, moves=False)


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
    tables.change(
        name,
        lambda table: table.create_index(
            column, "IVF_SQ", name=f"{column}_vectors", metric=metric, num_partitions=n_partitions, replace=True
        ),
        moves=False,
    )


def refresh_vectors(tables: Tables, name: str) -> bool:
    """Update the indexes over vectors; return whether it was necessary."""

    def update(table: "lance.LanceDataset") -> bool:
        rows = {f.number: f.rows for f in sizes(table)}
        parts = _parts(table, rows)
        names = [i.name for i in table.describe_indices() if i.name == f"{i.field_names[0]}_vectors"]
        outdated = [i for i in names if sum(parts[i]) < sum(rows.values())]
        if outdated:
            table.optimize.optimize_indices(index_names=outdated)
        return bool(outdated)

    return tables.change(name, update, moves=False)


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

    return tables.retry(name, once)


def count_old_versions(tables: Tables, name: str, older_than: timedelta) -> int:
    """Return how many versions of a table are older than a span, by one listing; `clean_up` takes a request for each version."""
    oldest = datetime.now(UTC) - older_than
    return sum(when <= oldest for _, _, when in tables.location.child(f"{name}.lance", "_versions").list_objects())


@dataclass(frozen=True)
class Remainder:
    """What is left of a fragment, or of a version of a table, after rows are removed."""

    n_rows: int  # how many of them there were
    rewritten: bool  # whether its files had any of them, or rows that were deleted before
    fragments: "tuple[FragmentMetadata, ...]"  # what is instead of it


class RowRemoval:
    """Writes versions of a table anew without some rows; a fragment is written once, however many versions have it.

    Row ids, and the versions that made and last changed a row, stay. Nobody else may write to the table meanwhile.
    `tables` are at the tip, held; `where` is an SQL filter of the rows. The fragments of all `versions` are written
    anew when this is made, which is not visible yet.
    """

    def __init__(self, tables: Tables, name: str, where: str, versions: Sequence[int]) -> None:
        self.tables, self.name, self._where = tables, name, where
        self._rests: dict[Hashable, Remainder] = {}
        self._unread: set[Hashable] = set()
        self._written: dict[Hashable, lance.LanceFragment] = {}
        self._fragments: dict[int, list[Hashable]] = {}
        with filter_errors(where, tables.open(name)):
            # The fragments of many versions are written at once.
            batch: dict[Hashable, lance.LanceFragment] = {}
            last: lance.LanceDataset | None = None
            n_rows = 0
            for version in versions:
                table = self._at(version)
                fragments = {_identity(f.metadata): f for f in table.get_fragments()}
                self._fragments[version] = [*fragments]
                fresh = {key: f for key, f in fragments.items() if key not in batch and key not in self._rests}
                numbers = {f.fragment_id for f in batch.values()}
                # Row addresses begin with the number of a fragment, which keeps it where columns are added to it.
                clash = any(f.fragment_id in numbers for f in fresh.values())
                n_rows += sum(f.metadata.physical_rows for f in fresh.values())
                if last is not None and (clash or n_rows > LARGE_ROWS or last.lance_schema != table.lance_schema):
                    self._rewrite(last, batch)
                    batch, n_rows = {}, 0
                batch |= fresh
                last = table
            if last is not None:
                self._rewrite(last, batch)

    def find(self, version: int) -> Remainder:
        """Tell what a version has of the rows, and of which fragments it consists without them."""
        rests = [self._rests[key] for key in self._fragments[version]]
        fragments = tuple(fragment for rest in rests for fragment in rest.fragments)
        return Remainder(sum(rest.n_rows for rest in rests), any(rest.rewritten for rest in rests), fragments)

    def write(self, version: int) -> int:
        """Make a version without the rows, and without indexes, the newest version; return its number. `read_back` is to follow."""
        import lance

        wanted = {_identity(fragment): fragment for fragment in self.find(version).fragments}
        table, newest = self._at(version), self.tables.open(self.name)
        # They differ in fragments alone, and have some, and no indexes.
        alike = (
            newest.lance_schema == table.lance_schema
            and newest.metadata == table.metadata
            and newest.config() == table.config()
            and bool(newest.get_fragments())
            and not newest.describe_indices()
            and not table.describe_indices()
        )
        if not alike:
            self.read_back()
            # The version becomes the newest, with its columns and notes, and loses its indexes: they have the rows too.
            with lance_errors(self.tables.uri(self.name)):
                table.restore()  # type: ignore[no-untyped-call]
                self._note(table, int(newest.version) + 1)
                for name in {index.name for index in table.describe_indices()}:
                    before = int(table.version)
                    table.drop_index(name)
                    self._note(table, before + 1)
            newest = table
        with lance_errors(self.tables.uri(self.name)):
            there = {_identity(f.metadata): f.metadata for f in newest.get_fragments()}
            # Lance replaces at least one fragment, also where some are only added.
            gone = {key: f for key, f in there.items() if key not in wanted} or dict([*there.items()][:1])
            fresh = [f for key, f in wanted.items() if key in gone or key not in there]
            if wanted.keys() != there.keys():
                group = lance.LanceOperation.RewriteGroup([*gone.values()], fresh)
                done = lance.LanceDataset.commit(
                    newest, lance.LanceOperation.Rewrite([group], []), read_version=newest.version, max_retries=0,
                    storage_options=self.tables.location.lance_options(),
                )  # fmt: skip
                self._note(done, int(newest.version) + 1)
                newest = done
            if not self._unread.isdisjoint(wanted):
                self._written |= {_identity(f.metadata): f for f in newest.get_fragments()}
        return int(newest.version)

    def read_back(self) -> None:
        """Read the fragments that were written; raise `CorruptError` if one does not read."""
        fresh = [self._written[key] for key in self._unread & self._written.keys()]
        if not _read(self.tables.open(self.name), fresh):
            raise CorruptError(
                f"Table {self.name!r} of {self.tables.location.uri} does not read back after rows were removed; nothing was deleted. "
                "Please report this with the table's schema."
            )
        self._unread -= self._written.keys()
        self._written.clear()

    def _at(self, version: int) -> "lance.LanceDataset":
        with lance_errors(self.tables.uri(self.name)):
            return self.tables.open(self.name).checkout_version(version)

    def _rewrite(self, table: "lance.LanceDataset", fragments: "Mapping[Hashable, lance.LanceFragment]") -> None:
        """Write fragments without the rows, and without those that were deleted before."""
        if not fragments:
            return
        scan = table.scanner(
            [],
            parenthesized(self._where),
            fragments=[*fragments.values()],
            with_row_address=True,
            use_scalar_index=False,
        )
        addresses = scan.to_table().column("_rowaddr").to_numpy()
        owner, offset = split_addresses(addresses)
        left_over: list[str] = []

        def one(fragment: "lance.LanceFragment") -> Remainder:
            rows = offset[owner == fragment.fragment_id].tolist()
            left = fragment.delete_rows(rows) if rows else fragment.metadata
            if left is None or left.deletion_file is None:
                return Remainder(len(rows), bool(rows), () if left is None else (left,))
            if rows:
                left_over.append(left.deletion_file.path(fragment.fragment_id))
            return Remainder(len(rows), rewritten=True, fragments=_materialize_deletions(table, left))

        rests = dict(zip(fragments, map_decode(one, [*fragments.values()]), strict=True))
        self._rests |= rests
        self._unread |= {_identity(f) for key, rest in rests.items() for f in rest.fragments if rest.rewritten}
        # No version names them, and clean-up would leave them for a week.
        self.tables.location.child(f"{self.name}.lance").delete_objects(left_over)

    def _note(self, table: "lance.LanceDataset", expected: int) -> None:
        """Hold what was committed, which must follow what was there before."""
        self.tables.keep(self.name, table)
        if int(table.version) != expected:
            raise ConflictError(
                f"Another process wrote to {self.tables.uri(self.name)} during a purge, which needs exclusive access; run repair() to finish it."
            )


def _identity(fragment: "FragmentMetadata") -> Hashable:
    """Return what tells a fragment from others of a table: its files, which never change, and the columns that it has of them."""
    deleted = fragment.deletion_file
    files = tuple((file.path, tuple(file.fields)) for file in fragment.files)
    return files, deleted and (deleted.read_version, deleted.id)


def _materialize_deletions(table: "lance.LanceDataset", fragment: "FragmentMetadata") -> "tuple[FragmentMetadata, ...]":
    """Write a fragment, which no version need have, without its deleted rows; nothing is committed."""
    from lance.fragment import FragmentMetadata
    from lance.optimize import CompactionTask

    task = {
        "task": {"fragments": [fragment.to_json()]},
        "read_version": table.version,
        "options": _compaction_options(),
    }
    kind: Any = CompactionTask
    done = kind.from_json(json.dumps(task)).execute(table)
    return tuple(FragmentMetadata.from_json(json.dumps(one)) for one in json.loads(done.json())["new_fragments"])


@cache
def _compaction_options() -> dict[str, Any]:
    """Return all options of a compaction as Lance writes them: those of a plan for a table in memory."""
    import lance
    import pyarrow as pa
    from lance.optimize import Compaction

    rows, uri = pa.table({"n": [0]}), "memory://"
    made: Any = {"data_storage_version": FILE_FORMAT, "enable_stable_row_ids": True}
    table = lance.write_dataset(rows, lance.write_dataset(rows, uri, **made), mode="append")
    plan: Any = Compaction.plan(table, {"target_rows_per_fragment": LARGE_ROWS})
    options: dict[str, Any] = json.loads(plan.tasks[0].json())["options"]
    return options
