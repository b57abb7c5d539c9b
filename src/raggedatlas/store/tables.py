"""Lance tables: rows (read, append, merge, delete), columns, tags, compaction, indexes and clean-up."""

import contextlib
import copy
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import ConflictError, CorruptError, DuplicateError, NotFoundError, StoreError
from raggedatlas.model.ids import check_name
from raggedatlas.model.records import PurgeMark
from raggedatlas.model.wings import asset_tables
from raggedatlas.store.location import Location, refuse_symlinks
from raggedatlas.store.manifests import compare_table
from raggedatlas.store.runtime import map_fetches
from raggedatlas.store.sql import parenthesized
from raggedatlas.store.storage_errors import (
    FILE_FORMAT,
    check_rows,
    check_schema,
    filter_errors,
    lance_errors,
    lance_kind,
    store_errors,
)

if TYPE_CHECKING:
    import lance

T = TypeVar("T")

ROW_ID = "_rowid"
"""Column of the stable row ids."""

ROW_ADDRESS = "_rowaddr"
"""Column of where rows are in a version of a table: a fragment and a row of it, of 32 bits each."""

CHANGED_AT = "_row_last_updated_at_version"
"""Column of the version that last wrote a row; compaction does not change it."""

_ATTEMPTS = 40

_MOVING = threading.Lock()
"""Held while a session moves on to a version of a table."""

_MARKED, PURGE_KEY = "atlas_versions", "raggedatlas.purging"
"""Table, and key of its metadata: the `PurgeMark` of an unfinished purge."""

LISTING = ""
"""Key of the names of all tables among the open tables."""

_GROUPS = re.compile(r"\b(?:dataset|layout)_uid\b")
"""Indexed columns of which many rows share a value; the other ones are unique ids, of which filters name a few."""

_TRANSACTION = re.compile(rb"b.(\d+-[0-9a-f-]{36}\.txn)", re.DOTALL)
"""Field of a manifest: the file of the transaction that made the version."""

_SHORT = 500
"""Characters of the row ids of a fragment without holes, with room for some ranges."""


WHOLE_VALUES: dict[str, Any] = {
    "base_tokenizer": "raw",
    "lower_case": False,
    "stem": False,
    "remove_stop_words": False,
    "ascii_folding": False,
}
"""Full-text indexes on uids index exact values; those on other columns index words."""

_SMALL_ROWS = 1 << 16
"""Tables in an object store with at most this many rows are read in one pass, even with a filter."""

_CACHE_BYTES = 64 << 20
"""Size of each of the two caches of Lance that a session leaves for the next."""

_WALK_BUFFER = 8 << 20
"""Bytes that `walk` may have read and not yet decoded."""


@dataclass
class Latest:
    """What sessions of one atlas leave for the next.

    These are tables at the versions that were the newest, so that each is only asked whether it still is.
    """

    session: Any = None  # `lance.Session` of the tables
    # Tables, copied and never changed, and whether the mark of a purge was looked for after each was opened
    tables: "dict[str, tuple[lance.LanceDataset, bool]]" = field(default_factory=dict)
    process: int = 0  # that opened the tables; Lance's threads do not outlive a fork

    def clear(self) -> None:
        """Forget them."""
        self.session, self.tables, self.process = None, {}, os.getpid()


@dataclass(frozen=True)
class Tables:
    """The tables of one atlas: at their tip, pinned to one snapshot, or in a session.

    In a session, which `hold` and `resume` begin, unpinned tables stay open, at the version that was the newest or that
    the last commit through this object made, and what was read of manifests is shared.
    """

    location: Location  # the folder ``lance_db``
    pinned: Mapping[str, int] | None = None  # table name -> Lance version; None reads and writes the tip
    session: Any = field(default=None, repr=False, compare=False)  # `lance.Session` of the tables that stay open
    _opened: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    # Of a snapshot: name of the manifest with which tables that are read whole are compared when they are opened
    compared_with: str = ""
    purges: bool = False  # whether these are the tables of a purge, which may commit while it is unfinished
    latest: Latest = field(default_factory=Latest, repr=False, compare=False)
    _cleared: set[str] = field(default_factory=set, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leave open handles behind when pickled."""
        return {
            "location": self.location, "pinned": self.pinned, "session": None, "_opened": {}, "compared_with": self.compared_with,
            "purges": self.purges, "latest": Latest(), "_cleared": set(),
        }  # fmt: skip

    def hold(self) -> Self:
        """Begin a session in which nothing is known: each table is opened once, by two requests, and files are read as they are."""
        import lance

        session: Any = lance.Session  # type: ignore[attr-defined]
        return type(self)(self.location, session=session(), purges=self.purges)

    def resume(self) -> Self:
        """Begin a session with the tables of the last one; `refresh` asks whether they are the newest.

        Files that something other than this library has changed since may not be seen.
        """
        import lance

        if self.latest.process != os.getpid():
            self.latest.clear()
        if self.latest.session is None:
            session: Any = lance.Session  # type: ignore[attr-defined]
            self.latest.session = session(index_cache_size_bytes=_CACHE_BYTES, metadata_cache_size_bytes=_CACHE_BYTES)
        known = dict(self.latest.tables)
        # Each gets a handle of its own: other threads may be in a session too.
        opened = {name: copy.copy(table) for name, (table, _) in known.items()}
        cleared = {name for name, (_, looked) in known.items() if looked}
        return type(self)(self.location, None, self.latest.session, opened, "", self.purges, self.latest, cleared)

    def at(self, versions: Mapping[str, int], compared_with: str = "") -> Self:
        """Return the same tables pinned to some versions; those that are held at the same version are not opened again."""
        held = {name: self._opened[name] for name in versions if self.session is not None and name in self._opened}
        held = {name: table for name, table in held.items() if table.version == versions[name]}
        # Each gets a handle of its own, because a write moves the handle that it goes through.
        opened = {name: copy.copy(table) for name, table in held.items()}
        return type(self)(self.location, dict(versions), self.session, opened, compared_with, self.purges)

    def leave(self) -> Self:
        """Return the same tables outside of the session, which `resume` goes on with."""
        return type(self)(self.location, purges=self.purges, latest=self.latest)

    def forget(self, name: str) -> None:
        """Close a table that is held, so that its newest version is opened next."""
        if self.pinned is None:
            self._opened.pop(name, None)
            self._cleared.discard(name)

    def keep(self, name: str, table: "lance.LanceDataset") -> None:
        """Hold what was opened, or what a commit made, as the newest version of a table."""
        if self.session is None or self.pinned is not None:
            return
        self._opened[name] = table
        if self.session is self.latest.session:
            self.latest.tables[name] = copy.copy(table), name in self._cleared

    def refresh(self, names: Collection[str] | None = None) -> dict[str, int]:
        """Move tables of a session to their newest versions, side by side. Other tables are left.

        `names` are tables, of which those that are open are asked, and `LISTING` for the names of all; None takes all
        of these. Each takes one request if it is at its newest version already. Returns by how many versions each of
        those that moved did; less than 0 where there is another table now, or none.
        """
        if self.session is None or self.pinned is not None:
            return {}
        known = [LISTING, *self.held()] if names is None else [n for n in names if n in {LISTING, *self._opened}]

        def newest(name: str) -> int:
            if name == LISTING:
                self._opened[LISTING] = self._list()
                return 0
            known = self.open(name)
            table, before = copy.copy(known), int(known.version)
            try:
                with lance_errors(self.place(name)):
                    table.checkout_latest()  # type: ignore[no-untyped-call]
            except NotFoundError:
                self.forget(name)
                return -before
            now = int(table.version)
            with _MOVING:
                # Another thread may have committed, or have asked later, meanwhile.
                held = self._opened.get(name, known)
                if now != before and (held is known or int(held.version) < now):
                    self._cleared.discard(name)
                    self.keep(name, table)
            return now - before

        moved = zip(known, map_fetches(newest, known), strict=True)
        return {name: n for name, n in moved if n}

    def uri(self, name: str) -> str:
        """Return the address of a table."""
        return f"{self.location.lance_uri()}/{check_name(name, 'table')}.lance"

    def place(self, name: str) -> str:
        """Return the address of a table as messages show it: of a published atlas, that where it was published."""
        return f"{self.location.uri}/{check_name(name, 'table')}.lance"

    def names(self) -> list[str]:
        """List the tables that exist, sorted; of tables that are held, those that existed when this was first called."""
        if self.pinned is not None:
            return sorted(self.pinned)
        if LISTING in self._opened:
            return [*self._opened[LISTING]]
        names = self._list()
        if self.session is not None:
            self._opened[LISTING] = names
        return names

    def _list(self) -> list[str]:
        return sorted(n.removesuffix(".lance") for n in self.location.list_children() if n.endswith(".lance"))

    def open(self, name: str) -> "lance.LanceDataset":
        """Open a table: at its pinned version (kept open), or at its newest. Raises `NotFoundError` if it is not there."""
        import lance

        if name in self._opened:
            opened: lance.LanceDataset = self._opened[name]
            return opened
        version = None if self.pinned is None else self.pinned.get(name)
        if self.pinned is not None and version is None:
            raise NotFoundError(f"The snapshot has no table {name!r}; it names {sorted(self.pinned)}.")
        refuse_symlinks(self.location.child(f"{name}.lance"))
        try:
            with lance_errors(self.place(name)):
                table = lance.dataset(
                    self.uri(name), version=version, storage_options=self.location.lance_options(), session=self.session
                )
        except NotFoundError as error:
            suffix = "" if version is None else f" at version {version}"
            raise NotFoundError(
                f"There is no table {name!r}{suffix} in {self.location.uri}. If it was open during a purge() or gc(), open it again; "
                "else check the address, or run validate() and repair()."
            ) from error
        if self.compared_with:
            compare_table(self.location, self.compared_with, name)
        if self.pinned is not None:
            self._opened[name] = table
        self.keep(name, table)
        return table

    def open_copy(self, name: str, version: int | None = None) -> "lance.LanceDataset":
        """Open a table, or a version of it, as a handle of its own, which a commit moves while other threads read through the one that is held."""
        return copy.copy(self.open(name) if version is None else self.at({name: version}).open(name))

    def open_to_change(self, name: str, version: int | None = None) -> "lance.LanceDataset":
        """Open the version of a table on which a commit will be based, as `open_copy` does.

        A purge commits to every table after it has left its mark, and that commit conflicts with all that are based on
        what was there before. The mark is looked for once after a table was opened, so a commit is either refused here
        with a `ConflictError`, conflicts, or is seen by the purge.
        """
        table = self.open_copy(name, version)
        self._refuse_purge(name)
        return table

    def _refuse_purge(self, name: str) -> None:
        rewritten = name in ("cells", "datasets") or name in asset_tables()
        mark = self.unfinished_purge() if rewritten and not self.purges and name not in self._cleared else None
        if mark is not None:
            raise mark.refusal(f"A write to {name!r}", self.location.uri.removesuffix("/lance_db"))

    def unfinished_purge(self, *, leased: bool = False) -> PurgeMark | None:
        """Return the mark of a purge that has begun and is not finished, or None; in a session, too, as it is now.

        With `leased`, the caller has a lease, so that no purge can begin, and all tables of a session are brought up to
        date: one that ended since they were opened has deleted files of theirs.
        """
        if self.pinned is not None:
            return type(self)(self.location).unfinished_purge()
        opened = {*self.held()} - {_MARKED}
        if _MARKED in self.refresh(None if leased else [_MARKED]) and leased:
            self.refresh()
        mark = self.known_purge()
        if mark is None:
            self._cleared.update(opened)
            for name in opened & {*self.held()}:
                self.keep(name, self._opened[name])
        return mark

    def known_purge(self) -> PurgeMark | None:
        """Return the mark of an unfinished purge, in a session as it was when the tables were opened."""
        try:
            marked = self.metadata(_MARKED).get(PURGE_KEY, "null")
        except NotFoundError:  # an atlas that is being created
            return None
        return PurgeMark.from_json(marked)

    def has(self, name: str) -> bool:
        """Return whether a table exists."""
        if name in self._opened:
            return True
        if LISTING in self._opened and name not in self._opened[LISTING]:
            return False
        try:
            self.open(name)
        except NotFoundError:
            return False
        return True

    def versions(self, names: Sequence[str]) -> dict[str, int]:
        """Return the versions of those of some tables that exist, in their order.

        One listing spares the requests of opening tables that are not there; those that are listed are opened, because
        a process that died while it created one leaves a folder without a table.
        """
        listed = {*self._opened, *(() if all(name in self._opened for name in names) else self.names())}
        found: dict[str, int] = {}
        for name in names:
            with contextlib.suppress(NotFoundError):
                if name in listed:
                    found[name] = self.version(name)
        return found

    def create(self, name: str, schema: pa.Schema, rows: pa.Table | None = None) -> None:
        """Create a table, by default an empty one; an existing one with these columns and no rows is reused if it is to be empty."""
        import lance

        try:
            with lance_errors(self.place(name)):
                made = lance.write_dataset(
                    schema.empty_table() if rows is None else rows,
                    self.uri(name),
                    schema=schema,
                    mode="create",
                    storage_options=self.location.lance_options(),
                    data_storage_version=FILE_FORMAT,
                    enable_stable_row_ids=True,
                )
            self.keep(name, made)
        except StoreError as error:
            if rows is not None or error.__cause__ is None or lance_kind(error.__cause__) != "exists":
                raise
            existing = self.open(name)
            if existing.count_rows() or existing.schema.names != schema.names:
                raise
        if LISTING in self._opened:
            self._opened[LISTING] = sorted({*self._opened[LISTING], name})

    def held(self) -> list[str]:
        """Return the tables that are open."""
        # A copy first: other threads may open tables meanwhile.
        return [name for name in [*self._opened] if name != LISTING]

    def open_all(self, names: Sequence[str]) -> None:
        """Open those of some tables that exist and are not open yet, side by side."""
        listed = {*self.names()}
        missing = [name for name in names if name in listed and name not in self._opened]
        map_fetches(self.has, missing)

    def schema(self, name: str) -> pa.Schema:
        """Return a table's schema with its field metadata."""
        with lance_errors(self.place(name)):
            return self.open(name).schema

    def version(self, name: str) -> int:
        """Return the version of a table that `open` opens."""
        return int(self.open(name).version)

    def count(self, name: str, where: str | None = None) -> int:
        """Count rows, or those that pass the SQL filter `where`."""
        table = self.open(name)
        with filter_errors(where, table):
            if where is None:
                return int(table.count_rows())
            scan = table.scanner(
                [], parenthesized(where), with_row_id=True, use_scalar_index=index_serves(table, where)
            )
            return int(scan.count_rows())

    def read(
        self, name: str, columns: Sequence[str] | None = None, where: str | None = None, *, row_ids: bool = False
    ) -> pa.Table:
        """Read rows in table order: the order in which they were added, regardless of compaction.

        `columns` are read in this order; None reads all. `where` is an SQL filter. `row_ids` keeps the column
        ``_rowid`` of stable row ids.
        """

        def scan() -> pa.Table:
            table = self.open(name)
            with filter_errors(where, table):
                return table.to_table(
                    columns=None if columns is None else list(columns),
                    filter=parenthesized(where),
                    with_row_id=True,
                    use_scalar_index=index_serves(table, where),
                    **_at_once(self.location, table),
                )

        try:
            rows = scan()
        except StoreError:
            # A purge has deleted files of the version that a session holds.
            if not self.refresh([name]):
                raise
            rows = scan()
        check_rows(rows, self.place(name))
        ids = rows.column("_rowid").to_numpy()
        rows = rows if row_ids else rows.drop_columns(["_rowid"])
        if len(ids) > 1 and not bool(np.all(ids[1:] > ids[:-1])):
            rows = rows.take(pa.array(np.argsort(ids, kind="stable")))
        return rows

    def batches(self, name: str, columns: Sequence[str], n: int | None = None) -> Iterator[pa.RecordBatch]:
        """Walk over some columns of all rows, at most `n` rows at a time, or as many as Lance takes."""
        with lance_errors(self.place(name)):
            for batch in self.open(name).to_batches(columns=list(columns), batch_size=n):
                yield check_rows(batch, self.place(name))

    def append(self, name: str, rows: pa.Table) -> int:
        """Add rows in one commit, and return the version it made.

        Columns without values that another writer has dropped meanwhile are left out; those with values are a
        `ConflictError`.
        """
        import lance

        if rows.num_rows == 0:
            return self.version(name)

        lost: list[str] = []

        def drop_absent() -> bool:
            """Leave out columns without values that another writer has dropped since the rows were made; note those with values."""
            nonlocal rows
            gone = [c for c in rows.column_names if c not in self.schema(name).names]
            lost[:] = [c for c in gone if rows.column(c).null_count < rows.num_rows]
            rows = rows.drop_columns([c for c in gone if c not in lost])
            return bool(gone)

        def once() -> int:
            try:
                # Through the open table, or Lance opens it once more.
                done = lance.write_dataset(
                    plain(rows), self.open(name), mode="append", storage_options=self.location.lance_options(),
                    data_storage_version=FILE_FORMAT,
                )  # fmt: skip
            except OSError as error:
                if lance_kind(error) == "schema" and drop_absent():
                    if lost:
                        return -1
                    raise ConflictError(f"A column of {self.place(name)} was dropped meanwhile.") from error
                raise
            self.keep(name, done)
            return int(done.version)

        version = self.retry(name, once)
        if lost:
            raise ConflictError(
                f"Another process has removed the columns {lost} of {self.place(name)} meanwhile; run it again."
            )
        return version

    def append_alone(self, name: str, rows: pa.Table, read_version: int) -> None:
        """Add rows in one commit; unlike `append`, raise `ConflictError` if another writer has committed since `read_version`."""
        import lance

        if not self.open_copy(name, read_version).get_fragments():
            # Lance numbers new fragments after all that a table ever had, which only its own commits know.
            self.overwrite(name, plain(rows), read_version)
            return

        def once() -> None:
            table = self.open_to_change(name, read_version)
            steps: list[Callable[[], Any]] = [
                partial(
                    lance.fragment.write_fragments, plain(rows), table, mode="append",
                    storage_options=self.location.lance_options(), data_storage_version=FILE_FORMAT,
                    enable_stable_row_ids=True,
                ),
                lambda: table.latest_version,
            ]  # fmt: skip
            fragments, newest = self.location.side_by_side(steps)
            # Lance checks for conflicts with the later commits whose versions still exist. `gc` or a purge may have deleted some, and the commit
            # below replaces the whole list of fragments.
            if newest != read_version:
                raise ConflictError(f"{name} of {self.location.uri} changed")
            there = table.get_fragments()
            for number, fragment in enumerate(fragments, 1 + max(f.fragment_id for f in there)):
                fragment.id = number
            # Lance lets two appends pass, but a merge of columns conflicts with any change of rows.
            operation = lance.LanceOperation.Merge([*(f.metadata for f in there), *fragments], table.lance_schema)
            tried.append(lance.Transaction(read_version, operation))
            self._commit(name, table, tried[0])

        tried: list[lance.Transaction] = []
        try:
            self.attempt(name, once)
        except ConflictError:
            if not (tried and self._is_done(name, tried[0])):
                raise

    def merge(
        self,
        name: str,
        on: Sequence[str],
        rows: pa.Table,
        *,
        update: bool,
        retry: bool = True,
        read_version: int | None = None,
    ) -> int:
        """Insert rows with new keys, and with `update` overwrite those with existing keys; return the number inserted.

        This is one commit. `on` are the key columns. A later commit than `read_version`, of which `rows` derive, to
        these rows is a conflict; None means the newest version. After a lost race it runs again; without `retry`, the
        caller does so with rows read afresh.
        """

        def once() -> int:
            target = self.open_to_change(name, read_version)
            # With an index on the key, Lance commits no note of the inserted keys, and two writers may insert the same one.
            merge = (
                target.merge_insert(list(on))
                .when_not_matched_insert_all()
                .use_index(use_index=False)
                .conflict_retries(0)
            )
            stats = (merge.when_matched_update_all() if update else merge).execute(plain(rows))
            # The handle has moved to what it wrote.
            self.keep(name, target)
            return int(stats["num_inserted_rows"])

        if rows.num_rows == 0:
            return 0
        return self.retry(name, once) if retry else self.attempt(name, once)

    def delete_rows(self, name: str, row_ids: pa.Array) -> int:
        """Delete the rows with some row ids, in one commit, and return how many."""

        def find(table: "lance.LanceDataset") -> pa.Array:
            rows = table.to_table([], with_row_id=True, with_row_address=True)
            return rows.filter(pc.is_in(rows.column(ROW_ID), value_set=row_ids)).column(ROW_ADDRESS)

        return self._delete(name, find)

    def delete_at(self, name: str, addresses: pa.Array, read_version: int) -> None:
        """Delete the rows that have some addresses at a version, in one commit; a later commit to their fragments is a conflict."""
        self._delete(name, lambda _: addresses, read_version)

    def delete(self, name: str, where: str | Callable[[], str]) -> int:
        """Delete rows in one commit, and return how many.

        A callable returns the condition; it is called after the version that the commit is based on was opened, and
        again for each retry.
        """

        def find(table: "lance.LanceDataset") -> pa.Array:
            condition = where if isinstance(where, str) else where()
            rows = table.to_table([], condition, with_row_address=True, use_scalar_index=index_serves(table, condition))
            return rows.column(ROW_ADDRESS)

        return self._delete(name, find)

    def _delete(
        self, name: str, find: "Callable[[lance.LanceDataset], pa.Array]", read_version: int | None = None
    ) -> int:
        """Delete the rows whose addresses `find` returns, in one commit."""
        import lance

        def once() -> int:
            if read_version is None:
                # Rows that another writer has added since are deleted, too.
                self.refresh([name])
            table = self.open_to_change(name, read_version)
            addresses = find(table).to_numpy()
            # A filter that lists 300,000 values takes Lance half a minute, one over an index with holes seconds (see `index_serves`).
            owner, offset = split_addresses(addresses)
            touched = set(np.unique(owner).tolist())
            changed = {
                fragment.fragment_id: fragment.delete_rows(offset[owner == fragment.fragment_id].tolist())
                for fragment in table.get_fragments()
                if fragment.fragment_id in touched
            }
            if changed:
                # A fragment without rows is left out.
                updated = [fragment for fragment in changed.values() if fragment is not None]
                emptied = [number for number, fragment in changed.items() if fragment is None]
                operation = lance.LanceOperation.Delete(updated, emptied, f"{len(addresses)} rows")
                self._commit(name, table, lance.Transaction(table.version, operation))
            return len(addresses)

        return self.retry(name, once) if read_version is None else self.attempt(name, once)

    def change(self, name: str, action: "Callable[[lance.LanceDataset], T]", *, moves: bool = True) -> T:
        """Run an action that commits through the handle it gets, again while it loses races, and hold what that has become.

        `moves` says whether it changes rows or columns, which is refused during an unfinished purge.
        """

        def once() -> T:
            table = self.open_to_change(name) if moves else self.open_copy(name)
            before = table.version
            done = action(table)
            if table.version != before:
                self.keep(name, table)
            return done

        return self.retry(name, once)

    def add_columns(self, name: str, fields: Sequence[pa.Field]) -> None:
        """Add the columns that the table lacks, null in every row; columns that another writer added meanwhile are taken as they are."""

        def add(table: "lance.LanceDataset") -> None:
            missing = [f.with_nullable(nullable=True) for f in fields if f.name not in table.schema.names]
            if missing:
                check_schema(pa.schema(missing), self.place(name))
                table.add_columns(pa.schema(missing))

        self.change(name, add)

    def update_field_metadata(
        self, name: str, change: Callable[[pa.Schema], Mapping[str, Mapping[bytes, bytes]]]
    ) -> None:
        """Change field metadata by a function of the current schema, again if another writer came between."""

        def update(table: "lance.LanceDataset") -> None:
            updates = change(table.schema)
            if updates:
                table.update_field_metadata(
                    {column: {k.decode(): v.decode() for k, v in facts.items()} for column, facts in updates.items()}
                )

        self.change(name, update)

    def overwrite(self, name: str, rows: pa.Table, read_version: int) -> None:
        """Replace all rows, in the action of a `retry`, which repeats it where somebody has committed since `read_version`."""
        if not self.overwrite_if(name, rows, read_version):
            raise ConflictError(f"{name} of {self.location.uri} changed")

    def overwrite_if(self, name: str, rows: pa.Table, read_version: int) -> bool:
        """Replace all rows if nobody has committed since `read_version`; tell whether that was so."""
        import lance

        uri, options = self.uri(name), self.location.lance_options()
        # Through the open table, or Lance opens it for each of the two steps again.
        target = self.open_to_change(name, read_version)
        with lance_errors(uri):
            # Not "append": the rows may have a column that the table, which an older version made, has not.
            fragments = lance.fragment.write_fragments(
                rows, target, mode="overwrite", storage_options=options, data_storage_version=FILE_FORMAT,
                enable_stable_row_ids=True,
            ) if rows.num_rows else []  # fmt: skip
        operation = lance.LanceOperation.Overwrite(rows.schema, fragments)
        transaction = lance.Transaction(read_version, operation)
        try:
            self.attempt(name, partial(self._commit, name, target, transaction, enable_stable_row_ids=True))
        except ConflictError:
            return self._is_done(name, transaction)
        return True

    def _commit(
        self,
        name: str,
        table: "lance.LanceDataset",
        transaction: "lance.Transaction",
        *,
        enable_stable_row_ids: bool | None = None,
    ) -> None:
        """Commit a transaction, once, and hold the table as it is then."""
        import lance

        done = lance.LanceDataset.commit(
            table, transaction, max_retries=0, storage_options=self.location.lance_options(),
            enable_stable_row_ids=enable_stable_row_ids,
        )  # fmt: skip
        self.keep(name, done)

    def _is_done(self, name: str, transaction: "lance.Transaction") -> bool:
        """Return whether a commit that reported a conflict was made: if a store loses the response, the retry conflicts with the first attempt."""
        with lance_errors(self.place(name)):
            made = self.open(name).read_transaction(transaction.read_version + 1)
        return made is not None and made.uuid == transaction.uuid

    def attempt(self, name: str, action: Callable[[], T]) -> T:
        """Run an action that commits, once; where it fails, a session does not know what is there, and opens the table again."""
        try:
            with lance_errors(self.place(name)):
                return action()
        except BaseException:
            self.forget(name)
            raise

    def retry(self, name: str, action: Callable[[], T]) -> T:
        """Run an action again while it loses races against other writers; raise `ConflictError` when it has lost too often."""
        chance = random.Random()
        for attempt in range(_ATTEMPTS):
            try:
                return self.attempt(name, action)
            except ConflictError:
                # The next attempt must see all that the other writer did, in other tables too.
                self.refresh()
                self._refuse_purge(name)
                if attempt + 1 < _ATTEMPTS:
                    time.sleep(chance.uniform(0, min(1.0, 0.02 * 2**attempt)))
            except (NotFoundError, StoreError):
                # A purge has deleted files of versions that a session holds.
                if not self.refresh():
                    raise
        raise ConflictError(
            f"Other writers kept changing table {name!r} of {self.location.uri} while this call tried {_ATTEMPTS} times; "
            "nothing of it is visible. Run it again."
        )

    def metadata(self, name: str) -> dict[str, str]:
        """Read the table's own key-value metadata."""
        with lance_errors(self.place(name)):
            return dict(self.open(name).metadata)

    def update_metadata(self, name: str, values: Mapping[str, str]) -> None:
        """Change keys of the table's own key-value metadata."""
        self.change(name, lambda table: table.update_metadata(dict(values)), moves=False)

    def update_metadata_if(self, name: str, values: Mapping[str, str], read_version: int) -> bool:
        """Change keys of the table's metadata if nobody has changed them since `read_version`; tell whether that was so."""

        def once() -> None:
            table = self.open_copy(name, read_version)
            table.update_metadata(dict(values))
            self.keep(name, table)

        try:
            self.attempt(name, once)
        except ConflictError:
            return False
        return True

    def fill_columns(self, name: str, make: "Callable[[Tables], pa.RecordBatchReader | None]") -> None:
        """Add columns with a value in every row, in one commit.

        `make` gets the table at one version, and returns the new columns: a value for every row, in the order of
        `batches`; None adds none. It is called again, for a later version, if another writer came between.
        """

        def once() -> None:
            version = self.version(name)
            # `make` opens a separate handle: Lance reads the batches while it holds the table that they are for.
            reader = make(self.at({name: version}))
            if reader is None:
                return
            table = self.open_to_change(name, version)
            taken = [column for column in reader.schema.names if column in table.schema.names]
            if taken:
                raise DuplicateError(f"The table {name!r} of {self.location.uri} has the columns {taken} already.")
            check_schema(reader.schema, self.place(name))
            table.add_columns(reader)
            self.keep(name, table)

        self.retry(name, once)

    def rename_columns(self, name: str, names: Mapping[str, str]) -> None:
        """Rename columns (old -> new) in one commit."""
        changes: Any = [{"path": old, "name": new} for old, new in names.items()]

        self.change(name, lambda table: table.alter_columns(*changes))

    def drop_columns(self, name: str, columns: Sequence[str], kept: Callable[[], Collection[str]] = tuple) -> list[str]:
        """Drop columns of a table in one commit, and return those that were there.

        `kept` returns columns to keep after all; it is called after the version that the commit is based on was opened.
        """

        def once() -> list[str]:
            self.refresh([name])
            table = self.open_to_change(name)
            spared = kept()
            existing = [column for column in columns if column in table.schema.names and column not in spared]
            if existing:
                table.drop_columns(existing)
                self.keep(name, table)
            return existing

        return self.retry(name, once)

    def settled(self, name: str) -> bool:
        """Return whether a table has nothing to compact: at most one fragment, and no deleted row in it."""
        fragments = self.open(name).get_fragments()
        return len(fragments) < 2 and not any(f.num_deletions for f in fragments)

    def has_deleted_rows(self, name: str) -> bool:
        """Return whether the files of a table contain deleted rows."""
        return any(fragment.num_deletions for fragment in self.open(name).get_fragments())

    def fence(self, name: str) -> None:
        """Commit a version with the same content, on which all commits that are based on earlier ones conflict."""
        import lance

        def once() -> None:
            table = self.open_to_change(name)
            # Lance takes columns to be merged with any commit to be in conflict; the schema keeps the ids of columns.
            operation = lance.LanceOperation.Merge([f.metadata for f in table.get_fragments()], table.lance_schema)
            self._commit(name, table, lance.Transaction(table.version, operation))

        self.retry(name, once)

    def restore(self, name: str, version: int) -> int:
        """Restore an old version, and return the version number of the restored one."""

        def once() -> int:
            # Lance bases this commit on the newest version, with which no commit of a purge conflicts: its mark is looked for now.
            self._cleared.discard(name)
            table = self.open_to_change(name, version)
            table.restore()  # type: ignore[no-untyped-call]
            self.keep(name, table)
            return int(table.version)

        return self.retry(name, once)

    def tags(self, name: str) -> dict[str, int]:
        """List a table's tags with the versions they keep; Lance takes two requests for each."""
        names = self.tag_names(name)
        kept = (
            [self.tagged(name, tag) for tag in names]
            if self.location.is_local
            else map_fetches(partial(self.tagged, name), names)
        )
        return {tag: version for tag, version in zip(names, kept, strict=True) if version is not None}

    def tagged(self, name: str, tag: str) -> int | None:
        """Return the version that a tag keeps; None if it is not there."""
        path = self.tag_file(tag)
        try:
            return int(json.loads(self.location.child(f"{name}.lance").read_bytes(path))["version"])
        except NotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptError(
                f"The tag {self.place(name)}/{path} is damaged: {error}. Put it back from a copy."
            ) from error

    def tag_names(self, name: str) -> list[str]:
        """List a table's tags by one request, without the versions they keep."""
        folder = self.location.child(f"{name}.lance", "_refs", "tags")
        return sorted(key.removesuffix(".json") for key, _, _ in folder.list_objects())

    def files(self, name: str, version: int) -> list[str]:
        """List the files that a version of a table consists of: paths below the table, sorted.

        These are its manifest, data, deletion, index and transaction files; none of them ever changes.
        """
        table = self.at({name: version}).open(name)
        with lance_errors(self.place(name)):
            if table.describe_indices():
                rows = table.tracked_files(min_version=version).read_all().to_pylist()
                return sorted({row["path"] for row in rows if row["version"] == version})
            # `tracked_files` reads the manifests of all later versions too, and `read_transaction` two files of which the manifest names the other.
            # What is pickled of a table has the manifest; a version of Lance that pickles something else is asked.
            state = table.__getstate__()  # type: ignore[no-untyped-call]
            manifests = [part for part in state if isinstance(part, bytes)] if isinstance(state, tuple) else []
            named = {match.decode() for part in manifests for match in _TRANSACTION.findall(part)}
            if len(named) != 1:
                written = table.read_transaction(version)
                named = {f"{written.read_version}-{written.uuid}.txn"} if written is not None else set()
            fragments = [(one.fragment_id, one.metadata) for one in table.get_fragments()]
        found = {manifest_path(version)}
        found |= {f"data/{file.path}" for _, facts in fragments for file in facts.files}
        found |= {facts.deletion_file.path(number) for number, facts in fragments if facts.deletion_file is not None}
        found |= {f"_transactions/{file}" for file in named}
        return sorted(found)

    @staticmethod
    def tag_file(tag: str) -> str:
        """Return the path of a tag below its table."""
        return f"_refs/tags/{tag}.json"

    def make_tag(self, name: str, version: int) -> bytes:
        """Return the content of a tag that keeps a version of a table permanently."""
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        folder, key = self.location.child(f"{name}.lance"), manifest_path(version)
        try:
            with store_errors(f"read {folder.uri}/{key}"):
                if folder.is_local:
                    n_bytes = Path(folder.checked_path(), key).stat().st_size
                else:
                    import obstore

                    n_bytes = int(obstore.head(folder.store(), key)["size"])
        except FileNotFoundError as error:
            raise NotFoundError(f"Table {name!r} has no version {version} in {folder.uri}.") from error
        facts = {"branch": None, "version": version, "createdAt": now, "updatedAt": now, "manifestSize": n_bytes}
        return json.dumps({**facts, "metadata": {}}).encode()

    def tag(self, name: str, tag: str, version: int, made: bytes | None = None) -> bytes:
        """Keep a version permanently under a tag; an existing tag is moved. Return the content of the tag.

        Written here, because Lance takes five requests for one: it opens the table, and asks for the manifest twice.
        `made` is what `make_tag` returned for the version; None makes it.
        """
        made = self.make_tag(name, version) if made is None else made
        self.location.child(f"{name}.lance").write_bytes(self.tag_file(tag), made)
        return made

    def untag(self, name: str, tag: str) -> None:
        """Remove a tag, if it is there."""
        self.location.child(f"{name}.lance").delete_objects([self.tag_file(tag)])

    def indices(self, name: str) -> dict[str, list[str]]:
        """List the indexes of a table: name -> columns."""
        return {index.name: [str(f) for f in index.field_names] for index in self.open(name).describe_indices()}


def split_addresses(addresses: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the fragment of each row address, and the place of the row in it."""
    return addresses >> np.uint64(32), addresses & np.uint64(2**32 - 1)


def index_serves(table: "lance.LanceDataset", where: str | None) -> bool:
    """Return whether Lance is to look for an index before it scans the columns of a filter.

    Lance finds each row that an index names in the list of row ids of its fragment. Where rows were deleted between the
    others (by deletion of cells, or of a dataset among others that were compacted with it), that is a bitmap that Lance
    counts through from its beginning, for every single row: seconds for 100,000 rows, where a scan takes milliseconds.
    """
    if where is None or not _GROUPS.search(where):
        return True
    # Row ids without holes are one range of some bytes; long lists of them are in a file of their own.
    metas = (fragment.metadata.row_id_meta for fragment in table.get_fragments())
    ids = ("" if meta is None else meta.json() for meta in metas)
    return not any(len(one) > _SHORT or "External" in one for one in ids)


def _at_once(location: Location, table: "lance.LanceDataset") -> dict[str, Any]:
    """Return scan options: for a small table in an object store, read all columns together with those of the filter instead of afterwards."""
    return {} if location.is_local or table.count_rows() > _SMALL_ROWS else {"late_materialization": False}


def walk(
    tables: Tables,
    name: str,
    columns: Sequence[str],
    where: str | None = None,
    *,
    use_index: bool = True,
    addresses: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Walk over some columns of rows as they are stored, and their `ROW_ID`, in as little memory as that takes.

    `columns`, `where` and errors are as in `Tables.read`; `addresses` adds `ROW_ADDRESS`. Rows come in the order of
    the files, which is table order until some were updated. Indexes serve filters that few rows pass.
    """
    table = tables.open(name)
    with filter_errors(where, table):
        # On a disk, reading ahead would take more memory than all that is kept of a column. In an object store each fragment takes a
        # request, so several are read at the same time.
        for batch in table.scanner(
            columns=list(columns),
            filter=parenthesized(where),
            with_row_id=True,
            with_row_address=addresses,
            batch_readahead=2,
            fragment_readahead=1 if tables.location.is_local else 8,
            **_at_once(tables.location, table),
            io_buffer_size=_WALK_BUFFER,
            scan_in_order=True,
            use_scalar_index=use_index and index_serves(table, where),
        ).to_batches():
            yield check_rows(batch, table.uri)


def plain(rows: pa.Table) -> pa.Table:
    """Cast dictionary columns to their values: narrow dictionaries do not survive compaction in Lance."""
    for i, column in enumerate(rows.schema):
        if pa.types.is_dictionary(column.type):
            value = column.with_type(column.type.value_type)
            rows = rows.set_column(i, value, rows.column(i).cast(value.type))
    return rows


def manifest_path(version: int) -> str:
    """Return the path of the manifest of a version below its table; Lance counts backwards, so that the newest comes first in a listing."""
    return f"_versions/{2**64 - 1 - version:020}.manifest"


def update_columns(tables: Tables, name: str, key: str, rows: pa.Table, read_version: int) -> None:
    """Overwrite some columns of the rows with the given keys in one commit; unknown keys are ignored.

    `rows` are the column `key`, which identifies rows, and the columns. They derive from `read_version`: a later commit
    to the same rows is a `ConflictError`, and nothing is written then. Row ids, and so the order of the table, do not
    change. `tables` are at the tip.
    """

    def once() -> None:
        table = tables.open_to_change(name, read_version)
        merge = table.merge_insert([key]).when_matched_update_all()
        merge.use_index(use_index=False).conflict_retries(0).execute(rows)
        tables.keep(name, table)

    tables.attempt(name, once)
