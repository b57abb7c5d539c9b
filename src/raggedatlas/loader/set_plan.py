"""Planning of sets: metadata columns become strata, strata get the cells they are compared with, and what has none is left out by name."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import ArgumentError, QueryError
from raggedatlas.loader.cells import ObsColumn
from raggedatlas.loader.order import BALANCED, NeighborSets, Strategy, StratumSets
from raggedatlas.loader.plan import BatchPlan, distinct_numbers, number_codes, part_rows
from raggedatlas.model.frames import DATASET
from raggedatlas.model.ids import UidIndex
from raggedatlas.query.cells import BLOCK_CELLS
from raggedatlas.query.query import Query
from raggedatlas.query.spec import AND
from raggedatlas.query.split import Split, target_labels
from raggedatlas.store.filters import Filter
from raggedatlas.store.runtime import scratch_array
from raggedatlas.store.sql_parser import as_filter

if TYPE_CHECKING:
    import pandas as pd

OTHERS = "others"
NEIGHBORS = "neighbors"
EQUAL = "equal"

Control = Mapping[str, Any] | Literal["others"] | None
SetBy = str | Sequence[str | tuple[str, ...]]
PartOf = str | tuple[str | Split, str] | None
"""A part of the split that the column `split` stores, of that of another column, or of a `Split`."""

FACTS = ("n_cells", "n_controls", "n_sets", "left_out")
"""Columns of the table of strata that are no columns of the cells."""

_MOST_NAMED = 3
_SPAN = 2**62


@dataclass(frozen=True)
class SetOptions:
    """What `SetLoader`, which says what each choice means, was asked for."""

    set_by: tuple[str | tuple[str, ...], ...]
    control: Control
    match: tuple[str, ...] | Literal["neighbors"]
    set_size: int
    per_batch: int  # sets of a batch
    replace: bool | None
    min_cells: int
    min_controls: int
    weights: str | None
    n_sets: int | None
    targets: tuple[str, ...]
    separator: str | None
    split: PartOf
    controls_from: tuple[str, ...]
    space: str | None

    def __post_init__(self) -> None:
        """Refuse choices that contradict each other."""
        for name in ("set_size", "per_batch", "min_cells", "min_controls", "n_sets"):
            value = getattr(self, name)
            if value is not None and value < 1:
                shown = "sets" if name == "per_batch" else name
                raise QueryError(f"SetLoader takes {shown} as a whole number from 1 on, not {value!r}.")
        if self.match == NEIGHBORS:
            given = {
                "set_by": self.set_by, "control": self.control, "replace": self.replace, "weights": self.weights, "targets": self.targets,
                "controls_from": self.controls_from, "n_sets": self.n_sets,
            }  # fmt: skip
            if wrong := [name for name, value in given.items() if value not in (None, ())]:
                raise ArgumentError(
                    f"SetLoader: with match='neighbors' every cell is a set of its own, and {wrong} say nothing; leave them out."
                )
            return
        if not self.set_by or self.control is None:
            raise ArgumentError(
                "SetLoader takes set_by and control, e.g. set_by=['perturbation'], control={'perturbation': 'non-targeting'}, or match='neighbors'."
            )
        if taken := sorted({*self.keys, *self.match} & {*FACTS}):
            raise QueryError(
                f"SetLoader: set_by and match cannot name {taken[0]!r}, which is a column of strata; annotate its values under another name."
            )
        if self.control != OTHERS and not self.control:
            raise ArgumentError("SetLoader: control={} names no control cells.")
        if self.space is not None:
            raise ArgumentError("SetLoader: space is for match='neighbors'; leave it out.")
        if self.n_sets is not None and self.weights is None:
            raise ArgumentError(
                "SetLoader: n_sets is for weights; without them every treated cell is in a set of each epoch."
            )
        if self.controls_from and (self.split is None or self.control == OTHERS):
            raise ArgumentError(
                "SetLoader: controls_from names parts of a split for its controls; give split and control too."
            )
        if self.separator is not None and not self.targets:
            raise ArgumentError("SetLoader: separator is for targets; leave it out.")
        if unknown := [name for name in self.targets if name not in self.keys]:
            raise ArgumentError(f"SetLoader: targets names {unknown}, which set_by={list(self.set_by)} does not.")

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of `set_by`, one by one."""
        return tuple(name for one in self.set_by for name in ([one] if isinstance(one, str) else one))

    @property
    def columns(self) -> tuple[str, ...]:
        """All metadata columns that are needed."""
        match = () if isinstance(self.match, str) else self.match
        control = [*self.control] if isinstance(self.control, Mapping) else []
        weights = [] if self.weights is None or self.weights == EQUAL else [self.weights]
        return tuple(dict.fromkeys([*self.keys, *match, *control, *weights]))

    @property
    def part(self) -> tuple[str | Split, str] | None:
        """Which split, by the name of its column or itself, and which part."""
        return ("split", self.split) if isinstance(self.split, str) else self.split

    def choose(self, query: Query) -> Query:
        """Return the cells of the part, if a column stores the split, and the controls of other parts that are asked for."""
        name, part = self.part or (None, "")
        if name is None or isinstance(name, Split):
            return query
        chosen = query.split(part, name=name)
        if not self.controls_from:
            return chosen
        others = query.split(*self.controls_from, name=name)
        assert isinstance(self.control, Mapping)
        wanted: Filter = chosen.spec.filters[-1] | (as_filter(dict(self.control)) & others.spec.filters[-1])
        return query.where(wanted)


@dataclass(frozen=True, eq=False)
class PlannedSets:
    """Sets, and what is said of them."""

    recipe: StratumSets | NeighborSets  # which cells make the sets of an epoch
    table: "pd.DataFrame"  # a row for each stratum
    # (n_cells,): place in `rows`, -1 for cells that no set has; None for neighbours
    codes: NDArray[np.int32] | None = None
    # (n_codes,): row of `table`, -1 for controls
    rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    notes: tuple[str, ...] = ()  # what was left out, and what else there is to know

    def key(self, cells: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the values that the sets of some cells have, (k,) each, by column."""
        if self.codes is None:
            return {}
        rows = self.rows[self.codes[cells]]
        return {name: values[rows] for name, values in self._labels.items()}

    @cached_property
    def _labels(self) -> dict[str, NDArray[Any]]:
        return {name: self.table[name].to_numpy() for name in self.table.columns if name not in FACTS}


class _Key:
    """One column, or several whose order does not count, as codes; `renamed` maps a label to the label that it counts as."""

    def __init__(self, columns: Sequence[ObsColumn], renamed: Mapping[str, str]) -> None:
        self._columns, self._numbers = columns, [_numbers(column) for column in columns]
        every = [known for known, _ in self._numbers]
        if len(every) == 1 and not renamed:
            self.labels: NDArray[Any] = every[0]
            self._maps = [np.arange(len(every[0]))]
        else:
            texts = [[renamed.get(str(one), str(one)) for one in known.tolist()] for known in every]
            self.labels = np.array(sorted({text for some in texts for text in some}), object)
            place = {text: i for i, text in enumerate(self.labels.tolist())}
            self._maps = [np.array([place[text] for text in some], np.int64) for some in texts]
        self.n = max(1, len(self.labels)) ** len(columns)

    def codes(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the codes of some cells, -1 where a value is missing."""
        found = []
        for column, (known, coded), own in zip(self._columns, self._numbers, self._maps, strict=True):
            values = column.values[start:stop]
            codes = values.astype(np.int64) if coded else number_codes(values, known)
            found.append(np.where(codes < 0, -1, own[np.maximum(codes, 0)] if len(own) else -1))
        if len(found) == 1:
            return found[0]
        ordered = np.sort(np.stack(found), axis=0)
        made = np.zeros(stop - start, np.int64)
        for one in ordered:
            made = made * len(self.labels) + one
        return np.where(ordered[0] < 0, -1, made)

    def label(self, codes: NDArray[np.int64]) -> NDArray[Any]:
        """Return what codes mean."""
        if len(self._columns) == 1:
            return self.labels[codes]
        parts, left = [], codes
        for _ in self._columns:
            left, one = np.divmod(left, len(self.labels))
            parts.append(self.labels[one])
        return np.array([AND.join(some) for some in zip(*reversed(parts), strict=True)], object)


def _numbers(column: ObsColumn) -> tuple[NDArray[Any], bool]:
    """Return the distinct values of a column, and whether it has codes of them."""
    if column.categories is not None:
        return column.categories, True
    return distinct_numbers(column.values), False


def _blocks(n: int) -> Iterator[tuple[int, int]]:
    return ((start, min(n, start + BLOCK_CELLS)) for start in range(0, n, BLOCK_CELLS))


def plan_sets(plan: BatchPlan, options: SetOptions, query: Query) -> PlannedSets:
    """Plan the sets of a plan's cells.

    `plan` has the columns `SetOptions.columns`; `query` has the cells before the part of a split was chosen. Raises
    `QueryError` if no set is left.
    """
    part = options.part
    chosen: NDArray[np.bool_] | None = None
    if part is not None and isinstance(part[0], Split):
        chosen = _rows_mask(plan, part[0], [part[1]])
    if options.match == NEIGHBORS:
        return _plan_neighbors(plan, options, query, chosen)
    controls_of = None
    if chosen is not None and options.controls_from:
        assert part is not None
        assert isinstance(part[0], Split)
        controls_of = _rows_mask(plan, part[0], [part[1], *options.controls_from])
    keys = _Keys(plan, options, query.catalog, chosen, controls_of)
    numbers, counts, n_missing = keys.sizes()
    return _assemble(plan, options, keys, numbers, counts, [
        *([f"{n_missing:,} cells lack a value of {', '.join(map(repr, options.columns))} and are in no set"] if n_missing else []),
        *_shared_controls(plan, options, query),
    ])  # fmt: skip


def _rows_mask(plan: BatchPlan, split: Split, parts: Sequence[str]) -> NDArray[np.bool_]:
    made = np.zeros(plan.n_cells, bool)
    for part in parts:
        made[part_rows(plan, split, part)] = True
    return made


def _shared_controls(plan: BatchPlan, options: SetOptions, query: Query) -> list[str]:
    """Say how many controls of the part are in other parts of the split too."""
    if options.part is None or not isinstance(options.control, Mapping):
        return []
    split, part = options.part
    controls = query.where(dict(options.control))
    if isinstance(split, Split):
        uids = controls.obs([]).to_arrow().column("uid").cast(pa.string()).combine_chunks()
        others = np.zeros(len(uids), bool)
        for other in split.parts:
            others |= split.contains(uids, other) if other != part else False
        n = int((split.contains(uids, part) & others).sum())
    else:
        sizes: Any = controls.split(part, name=split).count(split)
        n = int(sum(size for label, size in sizes.items() if AND in label))
    return [f"{n:,} controls of {part!r} are in other parts of the split too"] if n else []


class _Keys:
    """What makes the strata: one number for each cell, which sorts by `match` first, then controls before others, then by `set_by`.

    `chosen`, (n_cells,), are the cells of a part, None for all; of `controls_of` controls may be taken too.
    """

    def __init__(
        self,
        plan: BatchPlan,
        options: SetOptions,
        catalog: Catalog,
        chosen: NDArray[np.bool_] | None,
        controls_of: NDArray[np.bool_] | None,
    ) -> None:
        columns, self.n_cells, self._chosen, self._controls_of = plan.columns, plan.n_cells, chosen, controls_of

        def key(names: Sequence[str]) -> _Key:
            renamed: dict[str, str] = {}
            for name in names:
                if name in options.targets:
                    known = columns[name].categories
                    if known is None:
                        raise QueryError(
                            f"SetLoader: targets={name!r} names a column of numbers; its values name genes."
                        )
                    renamed |= target_labels(catalog, map(str, known.tolist()), options.separator)
            return _Key([columns[name] for name in names], renamed)

        assert not isinstance(options.match, str)
        self.match = {name: key([name]) for name in options.match}
        listed = [(one,) if isinstance(one, str) else one for one in options.set_by]
        self.own = {AND.join(names): key(names) for names in listed if names[0] not in self.match or len(names) > 1}
        # Columns that tell controls, and which of their values do; without any, no cell is a control.
        self._control: list[tuple[_Key, NDArray[np.bool_]]] = []
        for name, value in options.control.items() if isinstance(options.control, Mapping) else ():
            plain = _Key([columns[name]], {})
            values = [*value] if isinstance(value, list | tuple | set | frozenset | np.ndarray) else [value]
            known = plain.labels.tolist()
            if lacking := [one for one in values if one not in known]:
                shown = ", ".join(map(repr, known[:10])) + (", ..." if len(known) > 10 else "")
                raise QueryError(
                    f"SetLoader: no cell has {name!r} = {lacking[0]!r}, which control names; there are {shown}."
                )
            self._control.append((plain, np.isin(np.arange(len(known)), [known.index(one) for one in values])))
        self.n_own = int(np.prod([float(key.n) for key in self.own.values()], initial=1.0))
        span = float(self.n_own) * 2 * float(np.prod([float(key.n) for key in self.match.values()], initial=1.0))
        if span > _SPAN:
            raise QueryError(
                f"The columns {[*self.match, *self.own]} have {span:.1g} combinations of values, and at most {_SPAN:.1g} can be told apart; leave one out."
            )

    def of_cells(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the number of each cell, -1 where a value is missing, -2 for cells of other parts."""
        n = stop - start
        is_control = np.full(n, bool(self._control))
        for key, wanted in self._control:
            codes = key.codes(start, stop)
            is_control &= (codes >= 0) & wanted[np.maximum(codes, 0)]
        made: NDArray[np.int64] = np.zeros(n, np.int64)
        missing = np.zeros(n, bool)
        for key in self.match.values():
            codes = key.codes(start, stop)
            missing |= codes < 0
            made = made * key.n + codes
        made = made * 2 + ~is_control
        for key in self.own.values():
            codes = key.codes(start, stop)
            missing |= (codes < 0) & ~is_control
            made = made * key.n + np.where(is_control, 0, codes)
        made[missing] = -1
        if self._chosen is not None:
            inside, more = self._chosen[start:stop], self._controls_of
            made[~(inside if more is None else inside | (is_control & more[start:stop]))] = -2
        return made

    def sizes(self) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Return the numbers that cells have, ascending, and how many have each; and how many cells have none."""
        numbers, counts, n_missing = np.empty(0, np.int64), np.empty(0, np.int64), 0
        for start, stop in _blocks(self.n_cells):
            made = self.of_cells(start, stop)
            n_missing += int((made == -1).sum())
            own, n = np.unique(made[made >= 0], return_counts=True)
            numbers, inverse = np.unique(np.concatenate([numbers, own]), return_inverse=True)
            counts = np.bincount(inverse, np.concatenate([counts, n]), len(numbers)).astype(np.int64)
        return numbers, counts, n_missing

    def split(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the part of numbers that `match` decides, and which are of controls."""
        above = numbers // self.n_own
        return above // 2, above % 2 == 0

    def labels(self, numbers: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the values of each column for some numbers."""
        found = {}
        for keys, own in ((self.match, numbers // self.n_own // 2), (self.own, numbers % self.n_own)):
            left = own
            for name, key in reversed([*keys.items()]):
                left, codes = np.divmod(left, key.n)
                found[name] = key.label(codes)
        return {name: found[name] for name in (*self.own, *self.match)}


def _assemble(
    plan: BatchPlan,
    options: SetOptions,
    keys: _Keys,
    numbers: NDArray[np.int64],
    counts: NDArray[np.int64],
    notes: Sequence[str],
) -> PlannedSets:
    """Give each stratum the cells that it is compared with, and leave out those that lack them."""
    import pandas as pd

    matched, is_control = keys.split(numbers)
    own = np.flatnonzero(~is_control)
    contrastive = options.control == OTHERS
    # Numbers that agree in `match` are neighbours; their controls, if there are any, come first.
    firsts = np.searchsorted(matched, matched[own], side="left")
    lasts = np.searchsorted(matched, matched[own], side="right")
    totals = np.append(0, np.cumsum(counts))
    if contrastive:
        n_compared = totals[lasts] - totals[firsts] - counts[own]
    else:
        n_compared = np.where(is_control[firsts], counts[firsts], 0)
    table = pd.DataFrame({**keys.labels(numbers[own]), "n_cells": counts[own], "n_controls": n_compared})
    reasons = np.full(len(own), "", object)
    least = options.set_size if options.replace is False else 1
    what = "cells of others" if contrastive else "controls"
    for name, sizes, fewest in (
        (what, n_compared, max(least, options.min_controls)), ("cells", counts[own], max(least, options.min_cells)),
    ):  # fmt: skip
        reasons[sizes < fewest] = f"fewer than {fewest} {name}"
    reasons[n_compared == 0] = f"no {what}"
    kept = np.flatnonzero(reasons == "")
    if not len(kept):
        reason, n = next(iter(pd.Series(reasons).value_counts().items())) if len(reasons) else ("no cell is treated", 0)
        raise QueryError(f"SetLoader: no set is left of {len(own):,} strata; {reason} in {n:,} of them.")
    used = np.zeros(len(numbers), bool)
    used[own if contrastive else own[kept]] = True
    if not contrastive:
        used[firsts[kept]] = True
    code_of = np.where(used, np.cumsum(used) - 1, -1)
    codes = scratch_array((plan.n_cells,), np.int32)
    for start, stop in _blocks(plan.n_cells):
        made = keys.of_cells(start, stop)
        at = np.minimum(np.searchsorted(numbers, made), len(numbers) - 1)
        codes[start:stop] = np.where(made >= 0, code_of[at], -1)
    grouped = Strategy(BALANCED, codes)
    sizes = grouped.sizes
    starts = np.cumsum(sizes) - sizes
    ours = code_of[own[kept]]
    if contrastive:
        pool_starts, pool_sizes = starts[code_of[firsts[kept]]], n_compared[kept] + counts[own[kept]]
    else:
        pool_starts, pool_sizes = starts[code_of[firsts[kept]]], counts[firsts[kept]]
    recipe = StratumSets(
        grouped.by_group, starts[ours], sizes[ours], pool_starts, pool_sizes, options.set_size, options.per_batch,
        _weights(plan, options, codes, ours, len(sizes)), options.n_sets or int((-(-sizes[ours] // options.set_size)).sum()),
        replace=options.replace is True, without_own=contrastive,
    )  # fmt: skip
    table["n_sets"] = 0
    if recipe.weights is None:
        table.loc[kept, "n_sets"] = recipe.counts
    table["left_out"] = reasons
    rows = np.full(len(sizes), -1, np.int64)
    rows[ours] = kept
    return PlannedSets(recipe, table, codes, rows, (*_left_out(table, [*keys.labels(numbers[:0])]), *notes))


def _left_out(table: "pd.DataFrame", names: Sequence[str]) -> list[str]:
    notes = []
    for reason, some in table[table["left_out"] != ""].groupby("left_out"):
        shown = "; ".join(
            ", ".join(map(str, row)) for row in some[list(names)].head(_MOST_NAMED).itertuples(index=False)
        )
        more = "; ..." if len(some) > _MOST_NAMED else ""
        notes.append(
            f"left out for {reason}: {len(some):,} of {len(table):,} strata, {int(some['n_cells'].sum()):,} cells ({shown}{more})"
        )
    return notes


def _weights(
    plan: BatchPlan, options: SetOptions, codes: NDArray[np.int32], ours: NDArray[np.int64], n_codes: int
) -> NDArray[np.float64] | None:
    """Return how strata are drawn: alike, or by the sum of a column over their cells."""
    if options.weights is None:
        return None
    if options.weights == EQUAL:
        return np.ones(len(ours))
    column = plan.columns[options.weights]
    if column.categories is not None:
        raise QueryError(f"SetLoader: weights={options.weights!r} names a column that holds no numbers.")
    sums = np.zeros(n_codes)
    for start, stop in _blocks(plan.n_cells):
        own, values = codes[start:stop], np.asarray(column.values[start:stop], np.float64)
        used = own >= 0
        if not (np.isfinite(values[used]) & (values[used] >= 0)).all():
            raise QueryError(
                f"SetLoader: weights={options.weights!r} are finite numbers from 0 on; a cell has another value."
            )
        sums += np.bincount(own[used], values[used], n_codes)
    if not sums[ours].any():
        raise QueryError(f"SetLoader: the column {options.weights!r} is 0 for all cells of the sets.")
    return sums[ours]


def _plan_neighbors(
    plan: BatchPlan, options: SetOptions, query: Query, chosen: NDArray[np.bool_] | None
) -> PlannedSets:
    """Find the neighbours of each cell among those of its dataset, by the centroids of its geometry."""
    import pandas as pd
    from scipy.spatial import cKDTree

    index = UidIndex(pa.array(np.asarray(plan.uids), pa.binary()).cast(pa.string()))
    located = query.spaces([]).obs([]).with_centroids(options.space, "_centroid")
    points: NDArray[np.float64] | None = None
    datasets = np.full(plan.n_cells, None, object)
    for batch in located.batches(BLOCK_CELLS):
        at = index.find(batch.obs.column("uid").cast(pa.string()).combine_chunks())
        own = batch.obsm["_centroid"]
        points = np.full((plan.n_cells, own.shape[1]), np.nan) if points is None else points
        points[at[at >= 0]] = own[at >= 0]
        datasets[at[at >= 0]] = np.asarray(batch.obs.column(DATASET).to_pandas(), object)[at >= 0]
    assert points is not None
    there = np.isfinite(points).all(axis=1)
    there = there if chosen is None else there & chosen
    k, cells, neighbors, rows = options.set_size, [], [], []
    for dataset in dict.fromkeys(datasets[there].tolist()):
        own = np.flatnonzero(there & (datasets == dataset))
        reason = "" if len(own) > k else f"fewer than {k} neighbours"
        rows.append(
            {
                DATASET: dataset,
                "n_cells": len(own),
                "n_controls": max(0, len(own) - 1),
                "n_sets": 0 if reason else len(own),
                "left_out": reason,
            }
        )
        if reason:
            continue
        near = np.asarray(cKDTree(points[own]).query(points[own], k + 1)[1])
        # A cell is its own neighbour, though not the first one where others lie at the same place.
        self_at = near == np.arange(len(own))[:, None]
        self_at[~self_at.any(axis=1), -1] = True
        cells.append(own)
        neighbors.append(own[near[~self_at].reshape(len(own), k)])
    table = pd.DataFrame(rows, columns=[DATASET, "n_cells", "n_controls", "n_sets", "left_out"])
    if not cells:
        raise QueryError(f"SetLoader: no cell has {k} neighbours with a place in its dataset.")
    n_lost = int((~there).sum()) if chosen is None else int((chosen & ~there).sum())
    notes = [*_left_out(table, [DATASET]), *([f"{n_lost:,} cells have no place and are in no set"] if n_lost else [])]
    recipe = NeighborSets(np.concatenate(cells), np.concatenate(neighbors), options.per_batch)
    return PlannedSets(recipe, table, notes=tuple(notes))
