"""Feature registries: register, resolve names, assign dense indices, redirect merged features."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import DATASETS, LAYOUTS, Catalog
from raggedatlas.errors import FeatureError, NotFoundError, SchemaError
from raggedatlas.model.ids import split_version

_PROTECTED = ("uid", "global_index", "redirect")


@dataclass(frozen=True)
class Resolved:
    """What some names mean.

    Parameters
    ----------
    uids : tuple of str
        One per name found, in the asked order.
    matched_by : tuple of str
        ``"uid"``, ``"id"``, ``"symbol"`` or ``"alias"`` for each.
    unknown : tuple of str
        Names that nothing answers to.
    ambiguous : mapping of str to tuple of str
        Name -> the ids of all features that answer to it.
    """

    uids: tuple[str, ...]
    matched_by: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    ambiguous: Mapping[str, tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Registry:
    """All features of one space, read once.

    Parameters
    ----------
    space : str
        Feature space.
    table : pyarrow.Table
        Rows of the registry table, in the order of registration.
    """

    space: str
    table: pa.Table

    @cached_property
    def uids(self) -> NDArray[np.object_]:
        """Feature uids, (n,) str."""
        values: NDArray[np.object_] = self.table.column("uid").to_numpy()
        return values

    @cached_property
    def global_index(self) -> NDArray[np.int64]:
        """Dense indices, (n,) int64; -1 where none is assigned."""
        values: NDArray[np.int64] = self.table.column("global_index").fill_null(-1).to_numpy()
        return values

    @cached_property
    def row_of(self) -> dict[str, int]:
        """Feature uid -> row."""
        return {uid: i for i, uid in enumerate(self.uids.tolist())}

    @cached_property
    def redirects(self) -> dict[str, str]:
        """Merged feature uid -> the uid that it ends at."""
        direct = {
            uid: into
            for uid, into in zip(self.uids.tolist(), self.table.column("redirect").to_pylist(), strict=True)
            if into is not None
        }
        ends = {}
        for uid in direct:
            end, seen = uid, {uid}
            while end in direct and direct[end] not in seen:
                end = direct[end]
                seen.add(end)
            ends[uid] = end
        return ends

    @cached_property
    def _names(self) -> tuple[dict[str, list[str]], ...]:
        uids = self.uids.tolist()
        by_id = _group(zip(self.table.column("feature_id").to_pylist(), uids, strict=True))
        by_symbol = _group(zip(self.table.column("symbol").to_pylist(), uids, strict=True))
        aliases = self.table.column("aliases").to_pylist()
        by_alias = _group((alias, uid) for names, uid in zip(aliases, uids, strict=True) for alias in names or ())
        return by_id, by_symbol, by_alias

    def names_of(self, uids: Iterable[str]) -> list[str]:
        """Give the name that people know for each uid: symbol, else id, else uid."""
        symbols, ids = self.table.column("symbol").to_pylist(), self.table.column("feature_id").to_pylist()
        rows = (self.row_of.get(uid) for uid in uids)
        given = list(uids) if not isinstance(uids, list) else uids
        return [uid if row is None else symbols[row] or ids[row] or uid for uid, row in zip(given, rows, strict=True)]

    def resolve(self, names: Sequence[str]) -> Resolved:
        """Find what some names mean: by uid, by id (with or without its version), by symbol, by alias, in that order.

        Parameters
        ----------
        names : sequence of str
            In any mixture. Case counts; the asked order is kept.

        Returns
        -------
        Resolved
            Merged features are followed to where they ended.
        """
        by_id, by_symbol, by_alias = self._names
        found: list[tuple[str, str]] = []
        unknown: list[str] = []
        ambiguous: dict[str, tuple[str, ...]] = {}
        for name in names:
            how, uids = "uid", [name] if name in self.row_of else []
            for how_next, table, key in (
                ("id", by_id, name), ("id", by_id, split_version(name)[0]), ("symbol", by_symbol, name), ("alias", by_alias, name),
            ):  # fmt: skip
                if not uids:
                    how, uids = how_next, table.get(key, [])
            ends = sorted({self.redirects.get(uid, uid) for uid in uids})
            if len(ends) == 1:
                found.append((ends[0], how))
            elif ends:
                ids = self.table.column("feature_id")
                ambiguous[name] = tuple(str(ids[self.row_of[uid]].as_py() or uid) for uid in ends)
            else:
                unknown.append(name)
        return Resolved(tuple(u for u, _ in found), tuple(h for _, h in found), tuple(unknown), ambiguous)

    def require(self, names: Sequence[str]) -> tuple[str, ...]:
        """Resolve names, all of them.

        Raises
        ------
        FeatureError
            Naming every unknown (with near misses), ambiguous and repeated name.
        """
        resolved = self.resolve(names)
        if resolved.unknown or resolved.ambiguous:
            parts = []
            if resolved.unknown:
                near = self._near(resolved.unknown[0])
                hint = f" (near {resolved.unknown[0]!r}: {near})" if near else ""
                parts.append(f"unknown: {list(resolved.unknown)}{hint}")
            for name, ids in (resolved.ambiguous or {}).items():
                parts.append(f"{name!r} may be any of {list(ids)}")
            raise FeatureError(
                f"Of {len(names)} features asked for in {self.space!r} ({len(self.uids):,} registered), {'; '.join(parts)}. "
                "Use ids, or leave these out."
            )
        repeated = sorted({uid for uid in resolved.uids if resolved.uids.count(uid) > 1})
        if repeated:
            twice = [name for name, uid in zip(names, resolved.uids, strict=True) if uid in repeated]
            raise FeatureError(
                f"The names {twice} mean {len(repeated)} feature(s) asked for more than once; each may appear once."
            )
        return resolved.uids

    def _near(self, name: str) -> list[str]:
        import difflib

        by_id, by_symbol, _ = self._names
        folded = {key.casefold(): key for key in by_symbol} | {key.casefold(): key for key in by_id}
        return [folded[key] for key in difflib.get_close_matches(name.casefold(), folded, n=3)]


def read_registry(catalog: Catalog, space: str) -> Registry:
    """Read all features of one space."""
    key = f"registry:{space}"
    memo = catalog._memo.get(key)
    if isinstance(memo, Registry):
        return memo
    definition = catalog.space(space)
    if not definition.has_features:
        raise NotFoundError(f"The feature space {space!r} has no features to look up: its columns have no names.")
    registry = Registry(space, catalog.tables.read(definition.registry))
    if catalog.read_only:
        catalog._memo[key] = registry
    return registry


def register_features(catalog: Catalog, space: str, rows: pa.Table) -> int:
    """Add features that the registry lacks, and correct those that it has; never touches an assigned index.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    space : str
        Feature space.
    rows : pyarrow.Table
        Column `uid` and any other columns of the registry. A known feature takes every value that is given here and not null;
        a symbol that it replaces stays as an alias, and aliases add up.

    Returns
    -------
    int
        How many were new.

    Raises
    ------
    SchemaError
        If `rows` has columns that the registry lacks, or sets what only the atlas assigns.
    """
    table = catalog.space(space).registry
    schema = catalog.tables.schema(table)
    foreign = sorted(set(rows.column_names) - set(schema.names))
    if foreign or "uid" not in rows.column_names:
        raise SchemaError(
            f"Features of {space!r} have the columns {schema.names}; got {rows.column_names}. Leave out {foreign} or create the atlas "
            "with registries={...: YourFeatureSchema}."
        )

    def changes() -> tuple[pa.Table, int]:
        known = catalog.tables.read(table)
        at = pc.index_in(rows.column("uid"), value_set=known.column("uid").combine_chunks())
        fresh = _fit(rows.filter(at.is_null()), schema)
        old = known.take(at.drop_null())
        updated = _corrected(old, rows.filter(at.is_valid()))
        return pa.concat_tables([fresh, updated]), fresh.num_rows

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
        by_symbol = _group((s, str(row)) for row, s in enumerate(symbols))
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


def find_datasets_with_features(
    catalog: Catalog, space: str, names: Sequence[str], *, every: bool = True
) -> dict[str, tuple[str, ...]]:
    """Find the datasets that measured some features, from the layouts alone.

    Parameters
    ----------
    catalog : Catalog
        At the tip or pinned; works before ``optimize()`` too.
    space : str
        Feature space.
    names : sequence of str
        Uids, ids or symbols.
    every : bool
        Whether a dataset must have measured all of them, or any.

    Returns
    -------
    dict
        Dataset uid -> the asked names that it measured, in the asked order.
    """
    registry = read_registry(catalog, space)
    uids = registry.require(names)
    name_of = dict(zip(uids, names, strict=True))
    answers = {uid: end for uid, end in registry.redirects.items() if end in name_of} | {uid: uid for uid in uids}
    quoted = ", ".join(f"'{uid}'" for uid in answers)
    rows = catalog.tables.read(LAYOUTS, ["layout_uid", "feature_uid"], where=f"feature_uid IN ({quoted})")
    measured: dict[str, set[str]] = {}
    for layout, uid in zip(rows.column("layout_uid").to_pylist(), rows.column("feature_uid").to_pylist(), strict=True):
        measured.setdefault(layout, set()).add(answers[uid])
    records = catalog.tables.read(DATASETS, ["uid", "layout_uid"], where=f"feature_space = '{space}'")
    found: dict[str, set[str]] = {}
    for uid, layout in zip(records.column("uid").to_pylist(), records.column("layout_uid").to_pylist(), strict=True):
        found.setdefault(uid, set()).update(measured.get(layout, set()))
    return {
        uid: tuple(name_of[u] for u in uids if u in got)
        for uid, got in found.items()
        if (len(got) == len(uids) if every else got)
    }


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


def _group(pairs: Iterable[tuple[str | None, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, uid in pairs:
        if name:
            found.setdefault(name, []).append(uid)
    return found


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
