"""The tables and arrays of an atlas, at its tip or at a snapshot; creation is atomic."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import pyarrow as pa

from raggedatlas.errors import (
    AtlasError,
    ConflictError,
    CorruptError,
    NotFoundError,
    ReadOnlyError,
    SchemaError,
    StoreError,
)
from raggedatlas.model.assets import DeletionRecord
from raggedatlas.model.ids import check_length, new_uid
from raggedatlas.model.records import (
    DATASETS_SCHEMA,
    LAYOUTS_SCHEMA,
    VERSIONS_SCHEMA,
    AtlasVersionRecord,
    DatasetRecord,
    datasets_from_table,
    read_json,
)
from raggedatlas.model.schemas import FeatureBaseSchema, HoxBaseSchema
from raggedatlas.model.spaces import BUILT_IN, FeatureSpace, known_spaces, pointer_columns
from raggedatlas.model.wings import asset_tables
from raggedatlas.store.codecs import chunk_encoder
from raggedatlas.store.location import Location, probe_conditional_puts
from raggedatlas.store.runtime import map_requests
from raggedatlas.store.sources import SourceAccess, Sources
from raggedatlas.store.sql import in_list
from raggedatlas.store.tables import CHANGED_AT, LISTING, Tables

CELLS, DATASETS, LAYOUTS, VERSIONS = "cells", "datasets", "_feature_layouts", "atlas_versions"
IDENTITY, FACTS, LINKS = "_feature_identity", "_feature_facts", "_feature_links"
GENE_TABLE, ORTHOLOG_TABLE, TERM_TABLE = "_genes", "_orthologs", "_terms"
"""Table names. `VERSIONS`, and the version of the format in the metadata of `DATASETS`, mark a complete atlas and are written last; `IDENTITY` with the first snapshot or link, `LINKS` with the first link, `TERM_TABLE` with the first ontology, the other two with the first gene table, `FACTS` with the first snapshot after it."""

IDENTITY_TABLES = (IDENTITY, FACTS, LINKS, GENE_TABLE, ORTHOLOG_TABLE, TERM_TABLE)
T = TypeVar("T")

FORMAT = "1"
"""Version of the on-disk format."""

_FORMAT_KEY, _SPACE_KEY, _CODEC_KEY = "raggedatlas.format", "raggedatlas.space.", "raggedatlas.codec"
UID_KEY = "raggedatlas.uid"
"""Table metadata of `datasets`: tells the atlas from others; copies of it have the same."""

_SHARED_KEY = "raggedatlas.shared_bundles"
"""Table metadata of `datasets`: there since datasets first shared a bundle (see ``raggedatlas.catalog.bundles``)."""

DELETIONS_KEY = "raggedatlas.deletions"
"""Table metadata of `cells`: JSON list of a `DeletionRecord` for each call of `delete_cells`, oldest first."""

_REMEMBERED = 3

_SMALL_ROWS = 1 << 16
"""Rows up to which a table in an object store is read whole where some of its rows are needed."""

DEFAULT_CODEC = "packed"
"""Default codec profile of a new atlas."""

BASE_CELLS = pa.schema(
    [
        pa.field("uid", pa.string(), nullable=False),
        pa.field("dataset_uid", pa.string(), nullable=False),
        pa.field("cell_name", pa.string()),
    ]
)
"""Columns of a cell table without a schema class; `add` widens it."""

REGISTRY_COLUMNS = FeatureBaseSchema.arrow_schema()
"""Columns of every registry."""


@dataclass(frozen=True)
class Catalog:
    """The tables and arrays of an atlas; all code below the facade takes a catalog, never the facade."""

    location: Location  # the folder that holds ``lance_db`` and ``zarr_store``
    tables: Tables  # at the tip or pinned
    arrays: Location  # the Zarr store
    snapshot: AtlasVersionRecord | None = None  # the snapshot it is pinned to; None at the tip
    # how the files are reached that datasets are linked to; None reads those that the records name
    sources: SourceAccess = field(default=None, compare=False)  # type: ignore[assignment]
    _memo: dict[str, object] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Read linked files where nothing else is said."""
        if self.sources is None:
            object.__setattr__(self, "sources", SourceAccess(self.location))

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the cache."""
        return {**vars(self), "_memo": {}}

    def with_tables(self, tables: Tables, snapshot: AtlasVersionRecord | None = None) -> "Catalog":
        """Return the same atlas with other versions of its tables."""
        return Catalog(self.location, tables, self.arrays, snapshot, self.sources)

    @property
    def read_only(self) -> bool:
        """Whether this is a snapshot."""
        return self.snapshot is not None

    def remember(self, kind: str, facts: Hashable, make: Callable[[], T]) -> T:
        """Return a cached object, or make it; only a snapshot caches, and only the last few objects of a kind.

        `facts` are everything that the object depends on apart from the snapshot. What `make` returns must not be
        modified.
        """
        # The tip changes under the process; an object made from it could be outdated at the next call.
        if not self.read_only:
            return make()
        known: dict[Hashable, T] = self._memo.setdefault(kind, {})  # type: ignore[assignment]
        # One look-up, and a copy of the keys: other threads add and remove objects meanwhile.
        with suppress(KeyError):
            return known[facts]
        made = make()
        # Dicts keep insertion order: the first keys are the oldest.
        for oldest in list(known)[: max(0, len(known) - _REMEMBERED + 1)]:
            known.pop(oldest, None)
        known[facts] = made
        return made

    def reads_whole(self, table: str) -> bool:
        """Return whether to read a whole table where some rows are needed: it is small, and a filter would fetch its index as well."""
        return not self.location.is_local and self.tables.count(table) <= _SMALL_ROWS

    def require_tip(self, action: str) -> None:
        """Raise if this is a snapshot, or a purge is unfinished."""
        self.require_writable(action)
        self.refuse_unfinished_purge(action)

    def require_writable(self, action: str) -> None:
        """Raise if this is a snapshot; unlike `require_tip`, this does not look for an unfinished purge."""
        if self.snapshot is not None:
            raise ReadOnlyError(
                f"{action} cannot be done on snapshot {self.snapshot.version} of {self.location.uri}, which never changes; "
                f"open the atlas itself with RaggedAtlas.open({self.location.uri!r})."
            )

    def refuse_unfinished_purge(self, action: str) -> None:
        """Raise while a purge is unfinished: commits to tables that it rewrites would be lost."""
        mark = self.tables.unfinished_purge()
        if mark is not None:
            raise mark.refusal(action, self.location.uri)

    def recorded_deletions(self) -> tuple[DeletionRecord, ...]:
        """Return the records of all deletions of cells, those included that have not finished or died."""
        text = self.tables.metadata(CELLS).get(DELETIONS_KEY, "[]")
        return read_json(tuple[DeletionRecord, ...], text, CELLS, "table metadata", DELETIONS_KEY)

    def deletions(self) -> tuple[DeletionRecord, ...]:
        """Return the deletions whose cells are gone, oldest first.

        A record is written before its cells are deleted. As all of them go in one commit, one of each dataset tells
        whether they are.
        """

        def find() -> tuple[DeletionRecord, ...]:
            recorded = self.recorded_deletions()
            witnesses = sorted({cells.witness for record in recorded for cells in record.datasets.values()})
            there = set(
                self.tables.read(CELLS, ["uid"], in_list("uid", witnesses)).column(0).to_pylist() if recorded else ()
            )
            gone = (r.of([uid for uid, c in r.datasets.items() if c.witness not in there]) for r in recorded)
            return tuple(record for record in gone if record.datasets)

        return self.remember("deletions", (), find)

    def n_deleted(self) -> dict[str, int]:
        """Return how many cells of datasets were deleted: uid -> cells."""
        counts = Counter[str]()
        for record in self.deletions():
            counts.update({uid: cells.n_cells for uid, cells in record.datasets.items()})
        return counts

    def dataset_records(self) -> "DatasetRecords":
        """Return the records of all datasets, in the order of adding; at the tip, only rows that changed since the last call are read."""
        known = self._memo.get(DATASETS)
        if not isinstance(known, DatasetRecords):
            known = DatasetRecords(0, ())
        table = self.tables.open(DATASETS)
        version = int(table.version)
        if known.version == version:
            return known
        pinned = Tables(self.tables.location, {DATASETS: version}, None, {DATASETS: table})
        try:
            self._memo[DATASETS] = made = known.updated(pinned, version)
        except StoreError:
            # A purge has deleted files of the version that a session holds.
            if not self.tables.refresh([DATASETS]):
                raise
            return self.dataset_records()
        return made

    def note_records(
        self, before: "DatasetRecords", written: Sequence[DatasetRecord], removed: Collection[str] = ()
    ) -> None:
        """Remember the records after a commit that wrote some, and removed those of datasets, unless another commit came between."""
        if self.tables.session is not None and self.tables.version(DATASETS) == before.version + 1:
            known = {record.zarr_group: record for record in before.records if record.uid not in removed}
            known |= {record.zarr_group: record for record in written}
            self._memo[DATASETS] = DatasetRecords(before.version + 1, tuple(known.values()))

    def current(self) -> "Catalog":
        """Return the current content, which differs from the newest table versions only during a purge.

        A purge makes the content of old snapshots the newest version of a table for a while. Its mark names the
        versions that hold the current content, and readers of the tip go by them.
        """
        mark = None if self.read_only else self.tables.unfinished_purge()
        # In the stages `begun` and `deleting`, the newest versions are the current content.
        if mark is None or mark.stage != "rewriting":
            return self
        newest = Tables(self.tables.location)
        versions = {name: newest.version(name) for name in newest.names() if newest.has(name)}
        return self.with_tables(Tables(newest.location, {**versions, **mark.tables}))

    def tip(self) -> "Catalog":
        """Return the same atlas, unpinned."""
        return self.with_tables(Tables(self.tables.location))

    def hold(self) -> "Catalog":
        """Return the same atlas, unpinned, whose tables are open, the datasets before the others; see `Tables.hold`."""
        held = self.with_tables(self.tables.hold())
        held._open_all()
        return held

    def session(self, action: str, *, anew: bool = False, purges: bool = False) -> "Catalog":
        """Return the atlas as it is now, for one call that writes; its tables are open and follow the call's commits.

        Tables that the last session left are asked side by side whether they are the newest; at first all are opened.
        What another process commits during the call is seen by what conflicts with it, and where `Tables.refresh` asks.

        `action` names the call in messages. `anew` uses nothing of the last session: for calls that delete files, which
        need the tables as they are, also where something other than this library has changed them. An unfinished purge
        is refused unless `purges`, for calls that go on with it.
        """
        self.require_writable(action)
        held = self
        if self.tables.session is None and anew:
            held = self.hold()
        elif self.tables.session is None:
            held = replace(self, tables=self.tables.resume())
            known = held._uid()
            moved = held.tables.refresh()
            if any(n < 0 for n in moved.values()) or held._uid() != known:
                # There is another atlas at the address now.
                self._memo.clear()
                self.tables.latest.clear()
                held = replace(self, tables=self.tables.resume())
            elif moved:
                # Again, so that every record finds its cells, layouts, features and columns: they were written before it.
                held.tables.refresh([n for n in held.tables.held() if n not in (DATASETS, VERSIONS, *asset_tables())])
            held._open_all()
        mark = None if purges else held.tables.known_purge()
        if mark is not None:
            raise mark.refusal(action, self.location.uri)
        return held

    def _uid(self) -> str:
        """Return what tells the atlas from others at its address; empty where no table is open."""
        return self.tables.metadata(DATASETS).get(UID_KEY, "") if DATASETS in self.tables.held() else ""

    def _open_all(self) -> None:
        """Open what is not open yet side by side, the datasets before the others."""
        tables = self.tables
        map_requests(lambda name: tables.open(name) if name else tables.names(), (LISTING, DATASETS, VERSIONS))
        registries = [space.registry for space in self.spaces().values() if space.has_features]
        # The optional tables, and those of assets, are the others whose names begin so.
        tables.open_all((CELLS, *(name for name in tables.names() if name.startswith("_")), *registries))

    def newest_tables(self) -> Tables:
        """Return the tables, unpinned."""
        return self.tables if self.tables.pinned is None else Tables(self.tables.location)

    def at(self, record: AtlasVersionRecord) -> "Catalog":
        """Return the same atlas, pinned to a snapshot; each table is opened when it is first read.

        A table version that is gone (something other than this library cleaned up) is reported then, by a
        `NotFoundError` that names it.
        """
        return self.with_tables(self.tables.at(record.table_versions, record.manifest), record)

    @cached_property
    def _pinned_spaces(self) -> dict[str, FeatureSpace]:
        stored = self.snapshot.spaces if self.snapshot is not None else {}
        return {name: FeatureSpace.from_json(text) for name, text in stored.items()}

    def spaces(self) -> dict[str, FeatureSpace]:
        """Return the feature spaces of this atlas, by name."""
        if self.snapshot is not None:
            return dict(self._pinned_spaces)
        return {
            key.removeprefix(_SPACE_KEY): FeatureSpace.from_json(text)
            for key, text in self.tables.metadata(DATASETS).items()
            if key.startswith(_SPACE_KEY)
        }

    def space(self, name: str) -> FeatureSpace:
        """Return one feature space."""
        spaces = self.spaces()
        if name not in spaces:
            raise NotFoundError(
                f"The atlas {self.location.uri} knows no feature space {name!r}, only {sorted(spaces)}; "
                "define it with atlas.register_space(FeatureSpace(...))."
            )
        return spaces[name]

    def codec(self) -> str:
        """Return the name of the codec profile that new arrays are written with.

        It was chosen when the atlas was created; an atlas without a choice has ``"standard"``.
        """
        return self.tables.metadata(DATASETS).get(_CODEC_KEY, "standard")

    def add_space(self, space: FeatureSpace, registry: type[FeatureBaseSchema] = FeatureBaseSchema) -> None:
        """Store a feature space in the atlas, with an empty registry if its columns are features."""
        self.require_writable("register_space()")
        check_length(space.name, "name of a feature space")

        def attempt() -> None:
            known = self.spaces().get(space.name)
            if known is not None and known != space:
                raise SchemaError(
                    f"The atlas {self.location.uri} has a feature space {space.name!r} already, defined as {known}; choose another name."
                )
            if known is None:
                self.refuse_unfinished_purge("register_space()")
            if space.has_features:
                ensure_table(self.tables, space.registry, registry.arrow_schema())
            if known is None:
                at = self.tables.version(DATASETS)
                there = self.tables.at({DATASETS: at}).metadata(DATASETS)
                if _SPACE_KEY + space.name in there or not self.tables.update_metadata_if(
                    DATASETS, {_SPACE_KEY + space.name: space.to_json()}, at
                ):
                    raise ConflictError(
                        f"Another process registered the feature space {space.name!r}, the same or another one, or changed the datasets of "
                        f"{self.location.uri} meanwhile; try again."
                    )

        # The table stays open where nothing is to be written, as with every further dataset of a space.
        self.tables.retry(DATASETS, attempt)


_IDENTIFYING = ("zarr_group", "name", "content_hash")


@dataclass(frozen=True)
class DatasetRecords:
    """The records of all datasets at one version of their table."""

    version: int  # 0 is before the first
    records: tuple[DatasetRecord, ...]  # in the order in which they were added

    def updated(self, tables: Tables, version: int) -> "DatasetRecords":
        """Return the records at a version; an atlas may have thousands, of which one `add` changes two."""
        if self.records and self.version < version:
            known = {record.zarr_group: record for record in self.records}
            changed = datasets_from_table(tables.read(DATASETS, where=f"{CHANGED_AT} > {self.version}"))
            known |= {record.zarr_group: record for record in changed}
            columns = [column.to_pylist() for column in tables.read(DATASETS, _IDENTIFYING).columns]
            records = tuple(known[group] for group in columns[0] if group in known)
            # Unlike in a table that something other than this library has restored.
            if columns == [[getattr(r, name) for r in records] for name in _IDENTIFYING]:
                return DatasetRecords(version, records)
        return DatasetRecords(version, tuple(datasets_from_table(tables.read(DATASETS))))


def create_catalog(
    location: Location,
    cell_schema: type[HoxBaseSchema] | None = None,
    *,
    registries: Mapping[str, type[FeatureBaseSchema]] | None = None,
    spaces: Iterable[FeatureSpace] = (),
    codec: str = DEFAULT_CODEC,
) -> Catalog:
    """Create an empty atlas, all of it or nothing.

    The place must not hold an atlas yet. Without a `cell_schema`, the cells start with uid, dataset and name alone.
    `registries` maps a feature space to the schema of its registry; others take `FeatureBaseSchema`. `spaces` are
    further spaces to know from the start. `codec` is the profile of every array that will be written.
    """
    # Called for its check: an unknown profile raises before anything is written.
    chunk_encoder(codec, np.uint32)
    _refuse_file(location)
    catalog = catalog_at(location)
    if is_atlas(location):
        raise StoreError(
            f"There is an atlas at {location.uri} already; open it with RaggedAtlas.open, or choose another place."
        )
    probe_conditional_puts(location)
    chosen = dict(registries or {})
    schema = BASE_CELLS if cell_schema is None else cell_schema.arrow_schema()
    every = {s.name: s for s in (*BUILT_IN, *spaces)}
    for space, _ in pointer_columns(schema).values():
        every.setdefault(space, known_spaces()[space])
    unknown = sorted(set(chosen) - set(every))
    if unknown:
        raise SchemaError(
            f"registries names feature spaces that are not defined: {unknown}; pass them in spaces=[FeatureSpace(...)]."
        )
    pointed = {every[space] for space, _ in pointer_columns(schema).values() if every[space].has_features}
    registries_made = {space.registry: FeatureBaseSchema.arrow_schema() for space in pointed}
    registries_made |= {every[name].registry: registry.arrow_schema() for name, registry in chosen.items()}
    made = {**registries_made, LAYOUTS: LAYOUTS_SCHEMA, CELLS: schema, DATASETS: DATASETS_SCHEMA}
    meta = {_FORMAT_KEY: FORMAT, _CODEC_KEY: codec, UID_KEY: new_uid()}
    meta |= {_SPACE_KEY + s.name: s.to_json() for s in every.values()}
    tables = catalog.tables.resume()
    # Repeating a create that died is safe: `Tables.create` reuses an empty table with the same columns.
    location.side_by_side([partial(tables.create, name, columns) for name, columns in made.items()])
    # Both make it an atlas.
    location.side_by_side(
        [partial(tables.update_metadata, DATASETS, meta), partial(tables.create, VERSIONS, VERSIONS_SCHEMA)]
    )
    return replace(catalog, tables=tables.leave())


def open_catalog(location: Location, sources: Sources = "allow") -> Catalog:
    """Open an atlas at its tip; `sources` is the rule of `SourceAccess`."""
    held = open_held(location, sources)
    return replace(held, tables=held.tables.leave())


def open_held(location: Location, sources: Sources = "allow") -> Catalog:
    """Open an atlas as `open_catalog` does, for one call: the tables that were looked at stay open."""
    _refuse_file(location)
    tables, access = Tables(location.child("lance_db")).resume(), SourceAccess(location, sources)
    catalog = Catalog(location, tables, location.child("zarr_store"), sources=access)
    # Side by side, because each takes two requests.
    map_requests(catalog.tables.has, (DATASETS, VERSIONS))
    try:
        version = catalog.tables.metadata(DATASETS).get(_FORMAT_KEY)
        complete = version is not None and catalog.tables.has(VERSIONS)
    except NotFoundError as error:
        if location.is_local and (location.path / "head.json").is_file():
            raise ReadOnlyError(
                f"{location.uri} is a published atlas, in which nothing is written; make an atlas of your own from it with clone(), or read it, as "
                "raggedatlas.open and the commands that read do."
            ) from error
        raise NotFoundError(
            f"There is no atlas at {location.uri}; check the address, or make one with RaggedAtlas.create({location.uri!r})."
        ) from error
    if not complete:
        raise NotFoundError(
            f"The atlas at {location.uri} was never completed; run RaggedAtlas.create({location.uri!r}) again."
        )
    if version != FORMAT:
        raise AtlasError(
            f"The atlas at {location.uri} has format {version!r}, and this version of raggedatlas reads {FORMAT!r}; use the version "
            "that wrote it."
        )
    return catalog


def ensure_table(tables: Tables, name: str, schema: pa.Schema) -> None:
    """Create a table where there is none; another process may do so at the same time."""
    if not tables.has(name):
        try:
            tables.create(name, schema)
        except StoreError:
            if not tables.has(name):
                raise


def note_shared_bundles(catalog: Catalog) -> None:
    """Note that datasets of an atlas share bundles; without the note, nothing looks for them."""
    if not shares_bundles(catalog):
        catalog.tables.update_metadata(DATASETS, {_SHARED_KEY: "1"})


def shares_bundles(catalog: Catalog) -> bool:
    """Return whether datasets of an atlas, at its tip or at any snapshot, may share bundles."""
    return _SHARED_KEY in catalog.newest_tables().metadata(DATASETS)


def _refuse_file(location: Location) -> None:
    if location.is_local and location.path.is_file():
        raise NotFoundError(
            f"{location.uri} is a file, and an atlas is a folder; add the file to an atlas, or look at it alone with "
            "raggedatlas inspect, view or serve."
        )


def wrong_columns(there: pa.Schema, wanted: pa.Schema) -> list[str]:
    """Return the wanted columns that a table lacks or has with another type."""
    return [f.name for f in wanted if f.name not in there.names or there.field(f.name).type != f.type]


def refuse_wrong_columns(there: pa.Schema, wanted: pa.Schema, table: str) -> None:
    """Refuse a table that lacks columns, as one does whose list of columns is damaged."""
    if wrong := wrong_columns(there, wanted):
        raise CorruptError(
            f"The columns {wrong} of the table {table!r} are missing or have another type; run validate('deep'), and restore the "
            "atlas from a copy."
        )


def is_atlas(location: Location) -> bool:
    """Return whether a location holds a complete atlas."""
    tables = catalog_at(location).tables
    return tables.has(VERSIONS) and tables.has(DATASETS) and _FORMAT_KEY in tables.metadata(DATASETS)


def catalog_at(location: Location) -> Catalog:
    """Return the catalog of a location, whether or not there is an atlas yet."""
    return Catalog(location, Tables(location.child("lance_db")), location.child("zarr_store"))
