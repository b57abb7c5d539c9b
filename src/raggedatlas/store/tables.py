"""The one seam to Lance tables: their rows (`TableRows`), filled columns, tags, compaction, indexes, clean-up."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raggedatlas.errors import ConflictError, CorruptError, DuplicateError
from raggedatlas.store.failures import lance_kind
from raggedatlas.store.lance_errors import lance_errors
from raggedatlas.store.table_rows import TableRows, filter_errors, plain

if TYPE_CHECKING:
    import lance

__all__ = ["Tables", "filter_errors", "plain"]

_WHOLE: dict[str, Any] = {
    "base_tokenizer": "raw",
    "lower_case": False,
    "stem": False,
    "remove_stop_words": False,
    "ascii_folding": False,
}
"""Full-text indexes on uids know whole values, as they stand; those on other columns know words."""


@dataclass(frozen=True)
class Tables(TableRows):
    """The tables of one atlas: rows, and what keeps them in order. `TableRows` describes the parameters.

    Examples
    --------
    >>> import tempfile
    >>> from raggedatlas.store.location import Location
    >>> tables = Tables(Location(tempfile.mkdtemp()))
    >>> tables.names()
    []
    """

    def fill_columns(self, name: str, make: "Callable[[Tables], pa.RecordBatchReader | None]") -> None:
        """Add columns with a value in every row, in one commit; again, from rows read afresh, if another writer came between.

        Parameters
        ----------
        name : str
            Table.
        make : function
            Gets the table at one version, and returns the new columns: a value for every row, in the order of `batches`; None adds none.

        Raises
        ------
        DuplicateError
            If the table has such a column.
        """
        import lance

        def once() -> None:
            version = self.version(name)
            # `make` opens a handle of its own: Lance reads the batches while it holds the table that they are for.
            made = make(type(self)(self.location, {name: version}))
            if made is None:
                return
            table = lance.dataset(self.uri(name), version=version, storage_options=self.location.lance_options())
            taken = [column for column in made.schema.names if column in table.schema.names]
            if taken:
                raise DuplicateError(f"The table {name!r} of {self.location.uri} has the columns {taken} already.")
            table.add_columns(made)

        self.retry(name, once)

    def rename_columns(self, name: str, names: Mapping[str, str]) -> None:
        """Give columns other names (old -> new), all in one commit."""
        changes: Any = [{"path": old, "name": new} for old, new in names.items()]
        self.retry(name, lambda: self.open(name).alter_columns(*changes))

    def drop_columns(self, name: str, columns: Sequence[str]) -> None:
        """Take columns out of a table, in one commit; those that are gone already are no matter."""

        def once() -> None:
            table = self.open(name)
            there = [column for column in columns if column in table.schema.names]
            if there:
                table.drop_columns(there)

        self.retry(name, once)

    def settled(self, name: str) -> bool:
        """Tell whether a table has nothing to compact: at most one fragment, and no deleted row in it."""
        fragments = self.open(name).get_fragments()
        return len(fragments) < 2 and not any(f.num_deletions for f in fragments)

    def has_deleted_rows(self, name: str) -> bool:
        """Tell whether the files of a table hold rows that were deleted from it."""
        return any(fragment.num_deletions for fragment in self.open(name).get_fragments())

    def restore(self, name: str, version: int) -> int:
        """Make an old version the newest, and return the version it became."""
        import lance

        def once() -> int:
            old = lance.dataset(self.uri(name), version=version, storage_options=self.location.lance_options())
            old.restore()  # type: ignore[no-untyped-call]
            return self.version(name)

        return self.retry(name, once)

    def tags(self, name: str) -> dict[str, int]:
        """List a table's tags with the versions they keep."""

        def once() -> dict[str, int]:
            try:
                return {tag: int(entry["version"]) for tag, entry in self.open(name).tags.list().items()}
            except (OSError, ValueError) as error:
                if lance_kind(error) != "missing":
                    raise
                raise ConflictError(f"A tag of {self.uri(name)} was removed while they were listed.") from error

        return self.retry(name, once)

    def files(self, name: str, version: int) -> list[str]:
        """List the files that a version of a table consists of: paths below the table, sorted.

        These are its manifest, data, deletion, index and transaction files; none of them ever changes.

        Raises
        ------
        NotFoundError
            If the version is not there.
        """
        table = type(self)(self.location, {name: version}).open(name)
        with lance_errors(self.uri(name)):
            listed = table.tracked_files(min_version=version).read_all()
        rows = zip(listed.column("version").to_pylist(), listed.column("path").to_pylist(), strict=True)
        return sorted({path for at, path in rows if at == version})

    @staticmethod
    def tag_file(tag: str) -> str:
        """Give the path of a tag below its table."""
        return f"_refs/tags/{tag}.json"

    def tag(self, name: str, tag: str, version: int) -> None:
        """Keep a version for ever under a tag; a tag that is there is moved."""
        with lance_errors(self.uri(name)):
            tags = self.open(name).tags
            try:
                tags.create(tag, version)
            except ValueError as error:
                if lance_kind(error) != "exists":
                    raise
                tags.update(tag, version)

    def untag(self, name: str, tag: str) -> None:
        """Remove a tag."""
        with lance_errors(self.uri(name)):
            self.open(name).tags.delete(tag)

    def compact(self, name: str, *, everything: bool = False) -> bool:
        """Merge small fragments and leave deleted rows out; what was rewritten is read back before this returns.

        Parameters
        ----------
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
        options: dict[str, Any] = {"materialize_deletions_threshold": 0.0} if everything else {}

        def once() -> bool:
            table = self.open(name)
            before, known = int(table.version), {f.fragment_id for f in table.get_fragments()}
            table.optimize.compact_files(**options)
            table = self.open(name)
            if int(table.version) == before:
                return False
            fresh = [f for f in table.get_fragments() if f.fragment_id not in known]
            try:
                whole = all(sum(b.num_rows for b in f.to_batches()) == f.count_rows() for f in fresh)
            except (OSError, ValueError, RuntimeError):
                whole = False
            if not whole:
                self._undo(name, int(table.version), before)
            return True

        return self.retry(name, once)

    def _undo(self, name: str, bad: int, before: int) -> None:
        alone = self.version(name) == bad
        if alone:
            self.restore(name, before)
        then = f"version {before} has been restored" if alone else f"the last good version is {before}"
        raise CorruptError(
            f"Table {name!r} of {self.location.uri} does not read back after compaction (version {bad}); {then}. "
            "Please report this with the table's schema."
        )

    def index(self, name: str, column: str, kind: str, *, rebuild: bool = False) -> bool:
        """Build a scalar (``BTREE``, ``BITMAP``) or full-text (``FTS``) index, or bring it up to date; tell if there was need."""
        index_name = f"{column}_{kind.lower()}_idx"
        options = _WHOLE if kind == "FTS" and column.endswith("uid") else {}
        stored: Any = "INVERTED" if kind == "FTS" else kind

        def once() -> bool:
            table = self.open(name)
            there = any(i["name"] == index_name for i in _indices(table))
            if rebuild and there:
                table.drop_index(index_name)
            if table.count_rows() == 0:
                return rebuild and there
            if rebuild or not there:
                table.create_scalar_index(column, stored, name=index_name, **options)
                return True
            behind = int(table.stats.index_stats(index_name)["num_unindexed_rows"])
            if behind:
                table.optimize.optimize_indices(index_names=[index_name])
            return behind > 0

        return self.retry(name, once)

    def index_vectors(self, name: str, column: str, metric: str, n_partitions: int) -> None:
        """Build an index over a column of vectors (``IVF_SQ``), in place of the one that it has."""

        def once() -> None:
            self.open(name).create_index(
                column, "IVF_SQ", name=f"{column}_vectors", metric=metric, num_partitions=n_partitions, replace=True
            )

        self.retry(name, once)

    def refresh_vectors(self, name: str) -> bool:
        """Bring the indexes over vectors up to date; tell whether there was need."""

        def once() -> bool:
            table = self.open(name)
            own = [i["name"] for i in _indices(table) if i["name"] == f"{i['fields'][0]}_vectors"]
            behind = [i for i in own if int(table.stats.index_stats(i)["num_unindexed_rows"])]
            if behind:
                table.optimize.optimize_indices(index_names=behind)
            return bool(behind)

        return self.retry(name, once)

    def indices(self, name: str) -> dict[str, list[str]]:
        """List the indexes of a table: name -> columns."""
        return {i["name"]: list(i["fields"]) for i in _indices(self.open(name))}

    def clean_up(self, name: str, older_than: timedelta) -> int:
        """Remove versions older than a span, never a tagged one, and return the bytes freed."""

        def once() -> int:
            try:
                stats = self.open(name).cleanup_old_versions(older_than=older_than, error_if_tagged_old_versions=False)
            except (OSError, ValueError) as error:
                # Lance lists the tags and then reads each, and another snapshot may take back a provisional one in between.
                if lance_kind(error) != "missing":
                    raise
                raise ConflictError(f"A tag of {self.uri(name)} was removed while it was cleaned up.") from error
            return int(stats.bytes_removed)

        return self.retry(name, once)


def _indices(table: "lance.LanceDataset") -> list[dict[str, Any]]:
    return [{"name": i.name, "fields": [str(f) for f in i.field_names]} for i in table.describe_indices()]
