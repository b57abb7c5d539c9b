"""Writing features: register them, number them, and keep the ordered feature list of every group."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import read_records
from raggedatlas.catalog.catalog import LAYOUTS, REGISTRY_COLUMNS, Catalog, refuse_wrong_columns
from raggedatlas.catalog.versions import for_tables, registry_tables
from raggedatlas.errors import CorruptError, SchemaError
from raggedatlas.model.accessions import UNKNOWN
from raggedatlas.model.ids import layout_uid
from raggedatlas.model.records import LAYOUTS_SCHEMA, DatasetRecord
from raggedatlas.store.sql import all_of, equals, in_list, is_null
from raggedatlas.store.tables import CHANGED_AT, ROW_ID

_PROTECTED = ("uid", "global_index")

_REMEMBERED_ROWS = 1 << 18
"""Registries with at most this many features stay in memory between calls."""

BY_HAND = "by hand"
"""Source of a symbol that a person gave; no file's symbol replaces it."""


def register_features(catalog: Catalog, space: str, *given: pa.Table) -> int:
    """Add features that the registry lacks, and correct those that it has; return how many are new.

    Each table has a column `uid`, in which no value comes twice, and any other columns of the registry. A known feature
    takes every value that is given here and not null, but for its id, which stays, its symbol and organism: a symbol
    given by hand (`symbol_source`) replaces any, one from a file only a bare id or a symbol from a file that comes
    after it in alphabetical order, so that the order of files does not matter; a known organism stays. Every symbol
    ever given stays as an alias, and aliases add up. An assigned index never changes.

    All tables go in with one commit. New features get dense indices, counted on from the largest, unless the commit
    corrects others, too. A column that the registry lacks, and a `global_index`, which only the atlas assigns, that
    differs from the registry's, are refused.
    """
    table = catalog.space(space).registry
    schema = catalog.tables.schema(table)
    for some in given:
        foreign = sorted(set(some.column_names) - set(schema.names))
        if foreign or "uid" not in some.column_names:
            raise SchemaError(
                f"Features of {space!r} have the columns {schema.names}; got {some.column_names}. Leave out {foreign} or create the "
                "atlas with registries={...: YourFeatureSchema}."
            )
        uids = some.column("uid")
        if uids.null_count or not (pa.types.is_string(uids.type) or pa.types.is_large_string(uids.type)):
            raise SchemaError(
                f"Uids of features are texts, as atlas.features() shows them in its index; got {uids.type}, {uids.null_count:,} of them null."
            )

    def changes(before: pa.Table) -> tuple[pa.Table, pa.Table]:
        known, touched, corrected = before, [], False
        for some in given:
            at = pc.index_in(some.column("uid"), value_set=known.column("uid").combine_chunks())
            for name in [name for name in _PROTECTED[1:] if name in some.column_names]:
                stored = known.column(name).take(at).to_pylist()
                for uid, offered, own in zip(some.column("uid"), some.column(name).to_pylist(), stored, strict=True):
                    if offered is not None and offered != own:
                        raise SchemaError(
                            f"The feature {uid.as_py()!r} of {space!r} is given {offered!r} in the column {name!r}, and has {own!r}; "
                            "only the atlas assigns that column. Leave it out."
                        )
            rows = some.filter(at.is_null())
            columns = []
            for field in schema:
                if field.name == "aliases" and field.name not in rows.column_names:
                    columns.append(pa.array([[]] * rows.num_rows, field.type))
                elif field.name in rows.column_names and field.name not in _PROTECTED[1:]:
                    columns.append(rows.column(field.name).cast(field.type))
                else:
                    columns.append(pa.nulls(rows.num_rows, field.type))
            fresh = pa.Table.from_arrays(columns, schema=schema)
            # Both arguments are in the order of `some`: row i of one is corrected by row i of the other.
            updated = _corrected(known.take(at.drop_null()), some.filter(at.is_valid()))
            changed = pa.concat_tables([fresh, updated])
            if updated.num_rows:
                corrected = True
                known = known.filter(
                    pc.invert(pc.is_in(known.column("uid"), value_set=updated.column("uid").combine_chunks()))
                )
            known = pa.concat_tables([known, changed])
            touched += changed.column("uid").chunks
        if not corrected:
            return known.slice(before.num_rows), known.slice(0, 0)
        wanted = pa.chunked_array(touched, pa.string()).combine_chunks()
        rows = known.filter(pc.is_in(known.column("uid"), value_set=wanted))
        new = pc.invert(pc.is_in(rows.column("uid"), value_set=before.column("uid").combine_chunks()))
        return rows.filter(new), rows.filter(pc.invert(new))

    return _change_registry(catalog, table, changes)[0]


def reindex_registry(catalog: Catalog, space: str) -> int:
    """Give every feature without one a dense index, counting on from the largest; return how many.

    An assigned index never changes. If the assigned ones are not dense, counting on would spread damage, and
    `CorruptError` is raised.
    """
    table = catalog.space(space).registry

    def changes(known: pa.Table) -> tuple[pa.Table, pa.Table]:
        without = known.filter(known.column("global_index").is_null())
        if without.num_rows:
            assigned = np.sort(known.column("global_index").drop_null().to_numpy())
            start = len(assigned)
            if not np.array_equal(assigned, np.arange(start)):
                raise CorruptError(
                    f"The {start:,} indices in column global_index of table {table!r} go from {assigned[0]:,} to {assigned[-1]:,}, where "
                    f"0 to {start - 1:,}, each once, are expected; run validate() and restore the atlas from a copy or a snapshot."
                )
        return known.slice(0, 0), _numbered(without, known)

    return _change_registry(catalog, table, changes)[1]


def registry_rows(catalog: Catalog, table: str) -> tuple[int, pa.Table]:
    """Return the version of a registry and its rows with `CHANGED_AT`, from memory if this process read or wrote that version in a session."""
    version, known = catalog.tables.version(table), catalog._memo.get(table)
    if catalog.tables.session is None or not isinstance(known, tuple) or known[0] != version:
        at = catalog.tables.at({table: version})
        refuse_wrong_columns(at.schema(table), REGISTRY_COLUMNS, table)
        known = version, at.read(table, [*at.schema(table).names, CHANGED_AT])
        _note_registry(catalog, table, *known)
    return known


def _note_registry(catalog: Catalog, table: str, version: int, rows: pa.Table) -> None:
    """Remember the rows of a registry for the next session, if they are few."""
    if catalog.tables.session is not None and rows.num_rows <= _REMEMBERED_ROWS:
        catalog._memo[table] = version, rows
    else:
        catalog._memo.pop(table, None)


def _change_registry(
    catalog: Catalog, table: str, changes: Callable[[pa.Table], tuple[pa.Table, pa.Table]]
) -> tuple[int, int]:
    """Write the new and the changed rows that a function makes of those of a registry, in one commit; return how many."""

    def once() -> tuple[int, int]:
        # Before `changes` reads the rows: a commit in between is a conflict, not a lost update.
        version, known = registry_rows(catalog, table)
        new, changed = changes(known.drop_columns([CHANGED_AT]))
        if changed.num_rows:
            rows = pa.concat_tables([new, changed])
            catalog.tables.merge(table, ["uid"], rows, update=True, retry=False, read_version=version)
        elif new.num_rows:
            index = known.column("global_index")
            n = len(index) - index.null_count
            # No other writer can assign indices at the same time. If the existing ones are damaged, none is assigned: `reindex_registry` raises.
            rows = _numbered(new, known) if n == 0 or pc.max(index).as_py() == n - 1 else new
            catalog.tables.append_alone(table, rows, version)
            changed_at = pa.repeat(pa.scalar(version + 1, known.schema.field(CHANGED_AT).type), rows.num_rows)
            rows = rows.append_column(known.schema.field(CHANGED_AT), changed_at)
            _note_registry(catalog, table, version + 1, pa.concat_tables([known, rows]))
        return new.num_rows, changed.num_rows

    return catalog.tables.retry(table, once)


def _numbered(rows: pa.Table, known: pa.Table) -> pa.Table:
    """Give features the indices that follow those of a registry, in the order of their uids."""
    index = np.empty(rows.num_rows, np.int64)
    index[pc.sort_indices(rows.column("uid")).to_numpy()] = np.arange(rows.num_rows)
    start = known.num_rows - known.column("global_index").null_count
    at = rows.column_names.index("global_index")
    return rows.set_column(at, rows.schema.field(at), pa.array(start + index))


@dataclass(frozen=True, slots=True)
class Unnumbered:
    """Rows of layouts that `sync_layouts` has to change."""

    rows: pa.Table  # those without an index
    repeated: pa.Array  # row ids of those that another one repeats


def unnumbered_layouts(catalog: Catalog) -> Unnumbered:
    """Find the rows of layouts without an index, and those that two writers wrote twice."""
    tables, keys = catalog.tables, ["layout_uid", "local_index"]
    if catalog.reads_whole(LAYOUTS):
        rows = tables.read(LAYOUTS, row_ids=True)
        stale = rows.filter(rows.column("global_index").is_null()).drop_columns([ROW_ID])
    else:
        rows = tables.read(LAYOUTS, keys, row_ids=True)
        stale = tables.read(LAYOUTS, where=is_null("global_index"))
    sizes = rows.group_by("layout_uid").aggregate([("local_index", "max"), ("local_index", "count")])
    # Local indices count from 0, so without repeats the number of rows is the largest index plus one.
    more = pc.greater(sizes.column("local_index_count"), pc.add(sizes.column("local_index_max"), 1))
    uids = sizes.filter(more).column("layout_uid").combine_chunks()
    rows = rows.filter(pc.is_in(rows.column("layout_uid"), value_set=uids))
    codes = rows.column("layout_uid").combine_chunks().dictionary_encode().indices.to_numpy()
    places = np.stack([codes.astype(np.int64), rows.column("local_index").to_numpy().astype(np.int64)])
    _, first = np.unique(places, axis=1, return_index=True)
    extra = pa.array(np.delete(np.arange(rows.num_rows), first), pa.int64())
    return Unnumbered(stale, rows.column(ROW_ID).take(extra).combine_chunks())


def sync_layouts(catalog: Catalog, found: Unnumbered | None = None) -> int:
    """Copy newly assigned indices into the layouts, and remove rows that two writers wrote twice; return rows changed."""
    tables = catalog.tables
    found = unnumbered_layouts(catalog) if found is None else found
    if len(found.repeated):
        tables.delete_rows(LAYOUTS, found.repeated)
        found = unnumbered_layouts(catalog)
    stale, registries = found.rows, registry_tables(catalog).values()
    if stale.num_rows == 0 or not registries:
        return 0
    # One lookup for all spaces: a feature's uid is a hash that includes its space.
    known = for_tables(
        catalog, lambda name: registry_rows(catalog, name)[1].select(["uid", "global_index"]), [*registries]
    )
    features = pa.concat_tables(known.values()).combine_chunks()
    row = pc.index_in(stale.column("feature_uid"), value_set=features.column("uid").combine_chunks())
    index = features.column("global_index").take(row)
    at = stale.column_names.index("global_index")
    rows = stale.set_column(at, stale.schema.field(at), index).filter(pc.is_valid(index))
    tables.merge(LAYOUTS, ["layout_uid", "local_index"], rows, update=True)
    return int(rows.num_rows)


def _corrected(old: pa.Table, given: pa.Table) -> pa.Table:
    columns: dict[str, Any] = {name: old.column(name) for name in old.column_names}
    changed = np.zeros(old.num_rows, bool)
    for name in set(given.column_names) - {*_PROTECTED, "aliases", "symbol", "symbol_source"}:
        was = old.column(name)
        offered = given.column(name).cast(was.type)
        if name == "organism":
            # A known organism stays; an unknown one takes what is offered.
            unknown = pc.or_(was.is_null(), pc.fill_null(pc.equal(was, UNKNOWN), fill_value=True))
            now = pc.if_else(unknown, pc.coalesce(offered, was), was)
        else:
            now = pc.coalesce(was, offered) if name == "feature_id" else pc.coalesce(offered, was)
        differs = pc.fill_null(pc.not_equal(now, was), fill_value=False).to_numpy()
        # `not_equal` is null where either side is, but a value in place of a null is a change.
        changed |= differs | (was.is_null().to_numpy() & now.is_valid().to_numpy())
        columns[name] = now
    if "symbol" in given.column_names:
        better = _better_symbols(old, given)
        changed |= better
        for name in ("symbol", "symbol_source"):
            offered = given.column(name) if name in given.column_names else pa.nulls(given.num_rows, pa.string())
            columns[name] = pc.if_else(pa.array(better), offered, old.column(name))
    if _may_gain_aliases(old, given):
        # Symbols that were not chosen become aliases.
        none = [None] * old.num_rows
        aliases = [names or [] for names in old.column("aliases").to_pylist()]
        more = given.column("aliases").to_pylist() if "aliases" in given.column_names else none
        offered = given.column("symbol").to_pylist() if "symbol" in given.column_names else none
        known = (old.column("symbol"), columns["symbol"], old.column("feature_id"))
        for row, (was, now, identifier) in enumerate(zip(*(column.to_pylist() for column in known), strict=True)):
            names = sorted({*aliases[row], *(more[row] or ()), was, offered[row]} - {None, "", now, identifier})
            changed[row] |= names != sorted(aliases[row])
            aliases[row] = names
        columns["aliases"] = pa.array(aliases, old.schema.field("aliases").type)
    kept = pa.array(changed, pa.bool_())
    return pa.table([columns[name] for name in old.column_names], schema=old.schema).filter(kept)


def _better_symbols(old: pa.Table, given: pa.Table) -> NDArray[np.bool_]:
    """Return for each feature whether the given symbol replaces the one that it has."""

    def ranked(rows: pa.Table) -> NDArray[np.int64]:
        """Rank the symbol of each row: 0 none or the bare id, 1 from a file, 2 by hand."""
        symbol = rows.column("symbol")
        named = pc.fill_null(pc.not_equal(symbol, old.column("feature_id")), fill_value=True)
        rank: NDArray[np.int64] = pc.and_(symbol.is_valid(), named).to_numpy().astype(np.int64)
        if "symbol_source" in rows.column_names:
            by_hand = pc.fill_null(pc.equal(rows.column("symbol_source"), BY_HAND), fill_value=False).to_numpy()
            rank[by_hand & symbol.is_valid().to_numpy()] = 2
        return rank

    was, now = ranked(old), ranked(given)
    earlier = pc.fill_null(pc.less(given.column("symbol"), old.column("symbol")), fill_value=False).to_numpy()
    differs = pc.fill_null(pc.not_equal(given.column("symbol"), old.column("symbol")), fill_value=True).to_numpy()
    offered = given.column("symbol").is_valid().to_numpy()
    result: NDArray[np.bool_] = offered & ((now > was) | (differs & (now == was) & (earlier | (now == 2))))
    result |= offered & old.column("symbol").is_null().to_numpy()
    return result


def _may_gain_aliases(old: pa.Table, given: pa.Table) -> bool:
    """Return whether any row is given an alias or another symbol, without making a Python object of every row."""
    if old.column("aliases").null_count:
        return True
    offered = given.column("aliases") if "aliases" in given.column_names else None
    if offered is not None and pc.sum(pc.list_value_length(offered)).as_py():
        return True
    if "symbol" not in given.column_names:
        return False
    return bool(pc.any(pc.not_equal(given.column("symbol"), old.column("symbol"))).as_py())


def feature_set(feature_uids: Iterable[str]) -> str:
    """Return a hash of a set of features, independent of their order; dataset records store it.

    Examples
    --------
    >>> feature_set(["b", "a"]) == feature_set(["a", "b"])
    True
    """
    return layout_uid(sorted(feature_uids))


def records_with_features(
    records: Iterable[DatasetRecord], space: str, n_features: int, wanted: str
) -> list[DatasetRecord]:
    """Return the records of a space that have exactly some features, by their `feature_set`; empty for a space without features."""
    alike = [r for r in records if r.feature_space == space and r.n_features == n_features]
    return [r for r in alike if (r.feature_set == wanted if wanted else not r.layout_uid)]


def ensure_layouts(catalog: Catalog, layouts: Iterable[tuple[Sequence[str], NDArray[np.int64]]]) -> list[str]:
    """Write the missing ordered feature lists, with one commit, and return the uids of all.

    A layout is the feature uids in column order, and (n_features,) the index that the registry has assigned to each so
    far; -1 for none.

    Notes
    -----
    Two writers may write the same list at the same time; readers take the first row of each column, and `optimize` removes
    the others.
    """
    wanted = [(layout_uid(uids), uids, index) for uids, index in layouts]
    # What a record names is there.
    named = {record.layout_uid for record in read_records(catalog)}
    lists = {uid: (uids, index) for uid, uids, index in wanted if len(uids) and uid not in named}
    if lists:
        # All rows of a layout are appended in one commit, so the first one shows that the others exist.
        where = all_of(in_list("layout_uid", lists), equals("local_index", 0))
        first = catalog.tables.read(LAYOUTS, ["layout_uid"], where)
        there = set(first.column("layout_uid").to_pylist())
        fresh = [
            pa.table(
                {
                    "layout_uid": pa.array([uid] * len(uids), pa.string()),
                    "feature_uid": pa.array(uids, pa.string()),
                    "local_index": pa.array(np.arange(len(uids), dtype=np.int32)),
                    "global_index": pa.array(index, mask=index < 0),
                },
                schema=LAYOUTS_SCHEMA,
            )
            for uid, (uids, index) in lists.items()
            if uid not in there
        ]
        if fresh:
            catalog.tables.append(LAYOUTS, pa.concat_tables(fresh))
    return [uid for uid, _, _ in wanted]
