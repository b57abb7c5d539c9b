"""Writing feature registries: register and correct features, and assign dense indices."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import LAYOUTS, Catalog
from raggedatlas.errors import CorruptError, SchemaError
from raggedatlas.model.accessions import UNKNOWN
from raggedatlas.model.schemas import FeatureBaseSchema
from raggedatlas.store.sql import is_null

_PROTECTED = ("uid", "global_index", "redirect")

BY_HAND = "by hand"
"""Source of a symbol that a person gave; no file's symbol replaces it."""


def register_features(catalog: Catalog, space: str, *given: pa.Table) -> int:
    """Add features that the registry lacks, and correct those that it has; never touches an assigned index.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    space : str
        Feature space.
    *given : pyarrow.Table
        Column `uid`, in which no value comes twice, and any other columns of the registry. A known feature takes every value that
        is given here and not null, but for its id, which stays, its symbol and organism: a symbol given by hand (`symbol_source`) replaces any, one
        from a file only a bare id or a symbol from a file that comes after it in alphabetical order, so that the order of files
        does not matter; a known organism stays. Every symbol ever given stays as an alias, and aliases add up. All tables go in
        with one commit.

    Returns
    -------
    int
        How many were new.

    Raises
    ------
    SchemaError
        If a table has columns that the registry lacks, or sets what only the atlas assigns.
    """
    table = catalog.space(space).registry
    schema = catalog.tables.schema(table)
    later = [name for name in ("symbol_source", "other_type") if name not in schema.names]
    if later:  # a registry of an earlier version
        catalog.tables.add_columns(table, [FeatureBaseSchema.arrow_schema().field(name) for name in later])
        schema = catalog.tables.schema(table)
    for some in given:
        foreign = sorted(set(some.column_names) - set(schema.names))
        if foreign or "uid" not in some.column_names:
            raise SchemaError(
                f"Features of {space!r} have the columns {schema.names}; got {some.column_names}. Leave out {foreign} or create the "
                "atlas with registries={...: YourFeatureSchema}."
            )
        if not (
            pa.types.is_string(some.schema.field("uid").type) or pa.types.is_large_string(some.schema.field("uid").type)
        ):
            raise SchemaError(
                f"Uids of features are texts, as atlas.features() shows them in its index; got {some.schema.field('uid').type}."
            )

    def changes() -> tuple[pa.Table, int]:
        known = catalog.tables.read(table)
        n_new, touched = 0, []
        for some in given:
            at = pc.index_in(some.column("uid"), value_set=known.column("uid").combine_chunks())
            fresh = _fit(some.filter(at.is_null()), schema)
            updated = _corrected(known.take(at.drop_null()), some.filter(at.is_valid()))
            changed = pa.concat_tables([fresh, updated])
            if updated.num_rows:
                known = known.filter(
                    pc.invert(pc.is_in(known.column("uid"), value_set=updated.column("uid").combine_chunks()))
                )
            known = pa.concat_tables([known, changed])
            touched += changed.column("uid").chunks
            n_new += fresh.num_rows
        wanted = pa.chunked_array(touched, pa.string()).combine_chunks()
        return known.filter(pc.is_in(known.column("uid"), value_set=wanted)), n_new

    return _merge_fresh(catalog, table, changes)


def reindex_registry(catalog: Catalog, space: str) -> int:
    """Give every feature without one a dense index, counting on from the largest; an assigned index never changes.

    Returns
    -------
    int
        How many were assigned.

    Raises
    ------
    CorruptError
        If the assigned indices are not dense, so that counting on would spread damage.
    """
    table = catalog.space(space).registry

    def changes() -> tuple[pa.Table, int]:
        known = catalog.tables.read(table)
        fresh = known.filter(known.column("global_index").is_null()).sort_by("uid")
        if fresh.num_rows == 0:
            return fresh, 0
        assigned = np.sort(known.column("global_index").drop_null().to_numpy())
        start = len(assigned)
        if not np.array_equal(assigned, np.arange(start)):
            raise CorruptError(
                f"The {start:,} indices in column global_index of table {table!r} go from {assigned[0]:,} to {assigned[-1]:,}, where "
                f"0 to {start - 1:,}, each once, are expected; run validate() and restore the atlas from a copy or a snapshot."
            )
        index = pa.array(np.arange(start, start + fresh.num_rows))
        at = fresh.column_names.index("global_index")
        return fresh.set_column(at, fresh.schema.field(at), index), fresh.num_rows

    return _merge_fresh(catalog, table, changes)


def sync_layouts(catalog: Catalog) -> int:
    """Copy newly assigned indices into the layouts, and remove rows that two writers wrote twice; return rows changed."""
    _drop_repeated(catalog)
    stale = catalog.tables.read(LAYOUTS, where=is_null("global_index"))
    if stale.num_rows == 0:
        return 0
    known = [
        catalog.tables.read(space.registry, ["uid", "global_index"])
        for space in catalog.spaces().values()
        if space.has_features and catalog.tables.has(space.registry)
    ]
    if not known:
        return 0
    features = pa.concat_tables(known).combine_chunks()
    row = pc.index_in(stale.column("feature_uid"), value_set=features.column("uid").combine_chunks())
    index = features.column("global_index").take(row)
    at = stale.column_names.index("global_index")
    rows = stale.set_column(at, stale.schema.field(at), index).filter(pc.is_valid(index))
    catalog.tables.merge(LAYOUTS, ["layout_uid", "local_index"], rows, update=True)
    return int(rows.num_rows)


def _drop_repeated(catalog: Catalog) -> None:
    rows = catalog.tables.read(LAYOUTS, ["layout_uid", "local_index"], row_ids=True)
    sizes = rows.group_by("layout_uid").aggregate([("local_index", "max"), ("local_index", "count")])
    repeated = sizes.filter(pc.greater(sizes.column("local_index_count"), pc.add(sizes.column("local_index_max"), 1)))
    if repeated.num_rows == 0:
        return
    rows = rows.filter(pc.is_in(rows.column("layout_uid"), value_set=repeated.column("layout_uid").combine_chunks()))
    codes = rows.column("layout_uid").combine_chunks().dictionary_encode().indices.to_numpy()
    keys = np.stack([codes.astype(np.int64), rows.column("local_index").to_numpy().astype(np.int64)])
    _, first = np.unique(keys, axis=1, return_index=True)
    extra = np.delete(np.arange(rows.num_rows), first)
    catalog.tables.delete_rows(LAYOUTS, rows.column("_rowid").to_numpy()[extra])


def _merge_fresh(catalog: Catalog, table: str, changes: Any) -> int:  # noqa: ANN401  (a function of no arguments)
    def once() -> int:
        version = catalog.tables.version(table)
        rows, n = changes()
        if rows.num_rows:
            catalog.tables.merge(table, ["uid"], rows, update=True, retry=False, read_version=version)
        return int(n)

    return catalog.tables.retry(table, once)


def _fit(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = []
    for field in schema:
        if field.name == "aliases" and field.name not in rows.column_names:
            columns.append(pa.array([[]] * rows.num_rows, field.type))
        elif field.name in rows.column_names and field.name not in _PROTECTED[1:]:
            columns.append(rows.column(field.name).cast(field.type))
        else:
            columns.append(pa.nulls(rows.num_rows, field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _corrected(old: pa.Table, given: pa.Table) -> pa.Table:
    columns: dict[str, Any] = {name: old.column(name) for name in old.column_names}
    changed = np.zeros(old.num_rows, bool)
    for name in set(given.column_names) - {*_PROTECTED, "aliases", "symbol", "symbol_source"}:
        was = old.column(name)
        offered = given.column(name).cast(was.type)
        if name == "organism":
            now = _known_organism(was, offered)
        else:
            now = pc.coalesce(was, offered) if name == "feature_id" else pc.coalesce(offered, was)
        differs = pc.fill_null(pc.not_equal(now, was), fill_value=False).to_numpy()
        changed |= differs | (was.is_null().to_numpy() & now.is_valid().to_numpy())
        columns[name] = now
    if "symbol" in given.column_names:
        better = _better_symbols(old, given)
        changed |= better
        for name in ("symbol", "symbol_source"):
            offered = given.column(name) if name in given.column_names else pa.nulls(given.num_rows, pa.string())
            columns[name] = pc.if_else(pa.array(better), offered, old.column(name))
    if _may_gain_aliases(old, given):
        aliases, gained = _joined_aliases(old, given, columns["symbol"])
        columns["aliases"] = pa.array(aliases, old.schema.field("aliases").type)
        changed |= gained
    kept = pa.array(changed, pa.bool_())
    return pa.table([columns[name] for name in old.column_names], schema=old.schema).filter(kept)


def _known_organism(was: pa.ChunkedArray, offered: pa.ChunkedArray) -> pa.ChunkedArray:
    """Keep a known organism; an unknown one takes what is offered."""
    unknown = pc.or_(was.is_null(), pc.fill_null(pc.equal(was, UNKNOWN), fill_value=True))
    return pc.if_else(unknown, pc.coalesce(offered, was), was)


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


def _joined_aliases(
    old: pa.Table, given: pa.Table, chosen: pa.ChunkedArray
) -> tuple[list[list[str]], NDArray[np.bool_]]:
    """Join aliases, and the symbols that were not chosen, and return which rows gained any."""
    none = [None] * old.num_rows
    aliases = [names or [] for names in old.column("aliases").to_pylist()]
    gained = np.zeros(len(aliases), bool)
    more = given.column("aliases").to_pylist() if "aliases" in given.column_names else none
    offered = given.column("symbol").to_pylist() if "symbol" in given.column_names else none
    known = zip(old.column("symbol").to_pylist(), chosen.to_pylist(), old.column("feature_id").to_pylist(), strict=True)
    for row, (was, now, identifier) in enumerate(known):
        names = sorted({*aliases[row], *(more[row] or ()), was, offered[row]} - {None, "", now, identifier})
        gained[row] = names != sorted(aliases[row])
        aliases[row] = names
    return aliases, gained
