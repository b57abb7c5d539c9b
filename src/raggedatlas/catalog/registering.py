"""Writing feature registries: register and correct features, assign dense indices, redirect merged ones."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import LAYOUTS, Catalog
from raggedatlas.catalog.features import by_name, read_registry
from raggedatlas.errors import FeatureError, SchemaError

_PROTECTED = ("uid", "global_index", "redirect")


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
        is given here and not null; a symbol that it replaces stays as an alias, and aliases add up. A later table corrects an
        earlier one; all go in with one commit.

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
    for some in given:
        foreign = sorted(set(some.column_names) - set(schema.names))
        if foreign or "uid" not in some.column_names:
            raise SchemaError(
                f"Features of {space!r} have the columns {schema.names}; got {some.column_names}. Leave out {foreign} or create the "
                "atlas with registries={...: YourFeatureSchema}."
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


def merge_features(catalog: Catalog, space: str, redirects: Mapping[str, str]) -> None:
    """Redirect features to others that they are the same as; indices stay as they are.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    space : str
        Feature space.
    redirects : mapping of str to str
        Name -> name of the feature that it is to mean from now on.
    """
    registry = read_registry(catalog, space)
    targets = {name: registry.require([name])[0] for name in redirects.values()}
    pairs = {registry.require([name])[0]: targets[into] for name, into in redirects.items()}
    circular = [uid for uid, into in pairs.items() if uid == into or pairs.get(into) == uid]
    if circular:
        raise FeatureError(f"Features {circular} would be redirected to themselves; name two different features.")
    table = catalog.space(space).registry

    def changes() -> tuple[pa.Table, int]:
        known = catalog.tables.read(table)
        rows = known.filter(pc.is_in(known.column("uid"), value_set=pa.array(list(pairs), pa.string())))
        into = pa.array([pairs[uid] for uid in rows.column("uid").to_pylist()], pa.string())
        return rows.set_column(rows.column_names.index("redirect"), rows.schema.field("redirect"), into), 0

    _merge_fresh(catalog, table, changes)


def reindex_registry(catalog: Catalog, space: str) -> int:
    """Give every feature without one a dense index, counting on from the largest; an assigned index never changes.

    Joins features known by symbol alone to better known ones first (`join_symbols`).

    Returns
    -------
    int
        How many were assigned.
    """
    table = catalog.space(space).registry
    join_symbols(catalog, space)

    def changes() -> tuple[pa.Table, int]:
        known = catalog.tables.read(table)
        fresh = known.filter(known.column("global_index").is_null()).sort_by("uid")
        if fresh.num_rows == 0:
            return fresh, 0
        largest = pc.max(known.column("global_index")).as_py()
        start = 0 if largest is None else largest + 1
        index = pa.array(np.arange(start, start + fresh.num_rows))
        at = fresh.column_names.index("global_index")
        return fresh.set_column(at, fresh.schema.field(at), index), fresh.num_rows

    return _merge_fresh(catalog, table, changes)


def join_symbols(catalog: Catalog, space: str) -> int:
    """Redirect features known by symbol alone to the one better known feature of that symbol, whatever was added first.

    A feature whose id is its symbol means the same as the feature with that symbol and an id of its own (Ensembl), or the
    same id under a known organism, if there is exactly one such. Redirects change no index and no stored value, and
    `merge_features` can point them elsewhere.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    space : str
        Feature space.

    Returns
    -------
    int
        How many features were redirected.
    """
    table = catalog.space(space).registry

    def changes() -> tuple[pa.Table, int]:
        known = _sharing_symbols(catalog.tables.read(table))
        ids, symbols = known.column("feature_id").to_pylist(), known.column("symbol").to_pylist()
        organisms = known.column("organism").to_pylist()
        plain = [i == s or i is None for i, s in zip(ids, symbols, strict=True)]
        rank = [2 * (not p) + (o not in (None, "unknown")) for p, o in zip(plain, organisms, strict=True)]
        by_symbol = by_name((s, str(row)) for row, s in enumerate(symbols))
        into: dict[int, int] = {}
        for row, symbol in enumerate(symbols):
            if not plain[row]:
                continue
            rivals = [int(r) for r in by_symbol[symbol] if rank[int(r)] > rank[row]]
            rivals = [r for r in rivals if organisms[row] in (None, "unknown", organisms[r])]
            best = [r for r in rivals if rank[r] == max(rank[x] for x in rivals)]
            if len(best) == 1:
                into[row] = best[0]
        rows = known.take(pa.array(list(into), pa.int64()))
        targets = known.column("uid").take(pa.array(list(into.values()), pa.int64()))
        return rows.set_column(rows.column_names.index("redirect"), rows.schema.field("redirect"), targets), len(into)

    return _merge_fresh(catalog, table, changes)


def _sharing_symbols(known: pa.Table) -> pa.Table:
    """Keep the features that are not redirected and have a symbol that another of them has too."""
    symbols = known.column("symbol")
    named = pc.and_kleene(pc.is_null(known.column("redirect")), pc.not_equal(pc.fill_null(symbols, ""), ""))
    live = known.filter(named)
    counted = pc.value_counts(live.column("symbol"))
    shared = counted.field("values").filter(pc.greater(counted.field("counts"), 1))
    return live.filter(pc.is_in(live.column("symbol"), value_set=shared))


def sync_layouts(catalog: Catalog) -> int:
    """Copy newly assigned indices into the layouts, and remove rows that two writers wrote twice; return rows changed."""
    _drop_repeated(catalog)
    stale = catalog.tables.read(LAYOUTS, where="global_index IS NULL")
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
    for name in set(given.column_names) - {*_PROTECTED, "aliases"}:
        was = old.column(name)
        now = pc.coalesce(given.column(name).cast(was.type), was)
        differs = pc.fill_null(pc.not_equal(now, was), fill_value=False).to_numpy()
        changed |= differs | (was.is_null().to_numpy() & now.is_valid().to_numpy())
        columns[name] = now
    if _may_gain_aliases(old, given):
        aliases, gained = _joined_aliases(old, given)
        columns["aliases"] = pa.array(aliases, old.schema.field("aliases").type)
        changed |= gained
    kept = pa.array(changed, pa.bool_())
    return pa.table([columns[name] for name in old.column_names], schema=old.schema).filter(kept)


def _may_gain_aliases(old: pa.Table, given: pa.Table) -> bool:
    """Tell whether any row is given an alias or another symbol, without making a Python object of every row."""
    if old.column("aliases").null_count:
        return True
    offered = given.column("aliases") if "aliases" in given.column_names else None
    if offered is not None and pc.sum(pc.list_value_length(offered)).as_py():
        return True
    if "symbol" not in given.column_names:
        return False
    return bool(pc.any(pc.not_equal(given.column("symbol"), old.column("symbol"))).as_py())


def _joined_aliases(old: pa.Table, given: pa.Table) -> tuple[list[list[str]], NDArray[np.bool_]]:
    aliases = [names or [] for names in old.column("aliases").to_pylist()]
    gained = np.zeros(len(aliases), bool)
    more = given.column("aliases").to_pylist() if "aliases" in given.column_names else [None] * len(aliases)
    was = old.column("symbol").to_pylist()
    now = given.column("symbol").to_pylist() if "symbol" in given.column_names else was
    for row, names in enumerate(aliases):
        fresh = {*(more[row] or ())} | ({was[row]} if was[row] and now[row] and was[row] != now[row] else set())
        if not fresh <= set(names):
            aliases[row] = sorted(fresh.union(names))
            gained[row] = True
    return aliases, gained
