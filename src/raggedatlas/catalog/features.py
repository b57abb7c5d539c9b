"""Feature registries: read them, resolve names, find the datasets that measured some features."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import DATASETS, LAYOUTS, Catalog
from raggedatlas.errors import FeatureError, NotFoundError
from raggedatlas.model.ids import split_version


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
        by_id = by_name(zip(self.table.column("feature_id").to_pylist(), uids, strict=True))
        by_symbol = by_name(zip(self.table.column("symbol").to_pylist(), uids, strict=True))
        aliases = self.table.column("aliases").to_pylist()
        by_alias = by_name((alias, uid) for names, uid in zip(aliases, uids, strict=True) for alias in names or ())
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


def by_name(pairs: Iterable[tuple[str | None, str]]) -> dict[str, list[str]]:
    """Gather what answers to each name; empty names are nobody's."""
    found: dict[str, list[str]] = {}
    for name, uid in pairs:
        if name:
            found.setdefault(name, []).append(uid)
    return found
