"""The modalities of a query: their layers and groups, their features in order, and which datasets measured them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import array_readers, group_by_dataset, read_records, read_results
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.features import Layout, Registry, find_rows, read_registry
from raggedatlas.errors import CorruptError, QueryError
from raggedatlas.model.assets import ResultRecord
from raggedatlas.model.choices import FeatureNames
from raggedatlas.model.frames import INDEX, ColumnFacts
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.spaces import FeatureSpace, PointerKind
from raggedatlas.query.cells import Cells, pointer_column
from raggedatlas.query.read import ColumnCopy, GroupPlan, PartPlan, SpacePlan, VarTable

USUAL = "counts"
"""The layer that is taken where every dataset has it."""

LEGACY = "data"
"""The array of a dense group without named layers."""


@dataclass(frozen=True)
class SpacePointers:
    """One feature space as the cell table points into it: its main pointer column and those of single layers."""

    name: str  # of the main pointer column
    space: FeatureSpace
    records: Mapping[str, tuple[DatasetRecord, ...]]  # dataset uid -> its groups
    is_result: bool = False  # computed by a model: read where it is named, and never by itself

    @cached_property
    def pointers(self) -> tuple[str, ...]:
        """The pointer columns, sorted."""
        return tuple(sorted({pointer_column(r) for records in self.records.values() for r in records}))

    def layers(self, dataset: str) -> dict[str, DatasetRecord]:
        """Return the layers of a dataset with the record that stores each; the main group comes first."""
        held: dict[str, DatasetRecord] = {}
        for record in sorted(
            self.records.get(dataset, ()), key=lambda r: (pointer_column(r) != self.name, r.zarr_group)
        ):
            for layer in record.layers or ([LEGACY] if LEGACY in record.array_specs else []):
                held.setdefault(layer, record)
        return held

    def touched(self, cells: Cells) -> tuple[str, ...]:
        """List the datasets of the cells that have this modality."""
        datasets = cells.columns.datasets
        n_cells = np.bincount(cells.dataset_code[cells.pointing(self.pointers)], minlength=len(datasets))
        return tuple(uid for uid, n in zip(datasets, n_cells, strict=True) if n and uid in self.records)


def choose_layers(modality: SpacePointers, datasets: Sequence[str], asked: Sequence[str]) -> tuple[str, ...]:
    """Choose the layers to read of the touched datasets.

    Without `asked` ones it is `counts` where every dataset has it, else the one they share. Raises `QueryError` if a
    dataset lacks an asked layer, or no single layer is shared; the message lists how many datasets and cells have each
    layer, and the call that reads the most cells.
    """
    held = {uid: tuple(modality.layers(uid)) for uid in datasets}
    shared = [layer for layer in next(iter(held.values()), ()) if all(layer in layers for layers in held.values())]
    lacking = [layer for layer in asked if layer not in shared]
    if asked and not lacking:
        return tuple(dict.fromkeys(asked))
    if not asked and (USUAL in shared or len(shared) == 1):
        return (USUAL,) if USUAL in shared else (shared[0],)
    why = f"share the layers {shared} of {modality.name!r}" if shared else f"share no layer of {modality.name!r}"
    why = f"do not all have the layer {lacking[0]!r} of {modality.name!r}" if lacking else f"{why}, so none is chosen"
    raise QueryError(f"The datasets of the query {why}: {_layer_counts(modality, held, asked)}")


_LISTED = 20
"""Up to this many datasets are named in a call that leaves others out."""


def _layer_counts(modality: SpacePointers, held: Mapping[str, tuple[str, ...]], asked: Sequence[str]) -> str:
    """List how many datasets and cells have each layer, and the call that takes the most cells."""
    n_cells = {uid: modality.records[uid][0].n_cells for uid in held}
    having = {layer: [uid for uid in held if layer in held[uid]] for layers in held.values() for layer in layers}
    by_cells = sorted(having, key=lambda layer: -sum(n_cells[uid] for uid in having[layer]))
    shown = [
        f"{layer!r} is in {len(having[layer]):,} dataset{'s' * (len(having[layer]) > 1)} ({sum(n_cells[uid] for uid in having[layer]):,} cells)"
        for layer in by_cells
    ]
    # Where some dataset has all that was asked, that is what to keep; else the layer of the most cells.
    whole = [uid for uid in held if asked and set(asked) <= set(held[uid])]
    taken, kept = (asked, whole) if whole else (by_cells[:1], having[by_cells[0]])
    call = f".layers({', '.join(map(repr, taken))})"
    if len(kept) < len(held):
        inside, outside = (
            [modality.records[uid][0].name or uid for uid in held if (uid in set(kept)) is among]
            for among in (True, False)
        )
        if min(len(inside), len(outside)) > _LISTED:
            call += ".where({'dataset': [...]}), with the names that list_datasets() shows beside the layer,"
        else:
            few = len(inside) <= len(outside)
            call += f".where({{'dataset': {inside}}})" if few else f".where(~ra.col('dataset').isin({outside}))"
    more = f"; ... {len(shown) - _LISTED} more" if len(shown) > _LISTED else ""
    return f"{'; '.join(shown[:_LISTED])}{more}. {call} reads the most cells; .spaces([]) reads no values."


def plan_parts(
    modality: SpacePointers, datasets: Sequence[str], layers: Sequence[str], cells: Cells, catalog: Catalog
) -> tuple[PartPlan, ...]:
    """Plan the groups that each layer is read from; layers stored together in every dataset become one part.

    Each of the touched `datasets` has every one of the `layers`, see `choose_layers`. A snapshot keeps what it has
    opened, so that paths are checked and specs parsed once.
    """
    together: dict[tuple[str, ...], list[str]] = {}
    for layer in layers:
        paths = tuple(modality.layers(uid)[layer].zarr_group for uid in datasets)
        together.setdefault(paths, []).append(layer)
    every = cells.columns.datasets
    position = {uid: i for i, uid in enumerate(every)}
    parts = []
    for names in map(tuple, together.values()):
        records = [modality.layers(uid)[names[0]] for uid in datasets]
        distinct = {record.zarr_group: record for record in records}
        plan = partial(_plan_groups, [*distinct.values()], modality.space.kind, names, catalog)
        groups = catalog.remember("groups", (tuple(distinct), modality.space.kind, names), plan)
        number = {path: i for i, path in enumerate(distinct)}
        group_of = {c: np.full(len(every) + 1, -1, np.int32) for c in sorted({pointer_column(r) for r in records})}
        for uid, record in zip(datasets, records, strict=True):
            if uid in position:
                group_of[pointer_column(record)][position[uid]] = number[record.zarr_group]
        nothing = np.empty(0, np.int64)
        parts.append(locate(PartPlan(names, groups, np.empty(0, np.int32), nothing, nothing, group_of), cells))
    return tuple(parts)


def locate(part: PartPlan, cells: Cells) -> PartPlan:
    """Return the part for other cells, which are of the same datasets."""
    code = np.full(cells.n, -1, np.int32)
    start, end = np.zeros(cells.n, np.int64), np.zeros(cells.n, np.int64)
    for column, group_of in part.group_of.items():
        if column not in cells.places:
            continue
        first, last, valid = cells.places[column]
        found = np.where(valid, group_of[cells.dataset_code], np.int32(-1))
        here = found >= 0
        if here.all():
            code[:], start[:], end[:] = found, first, last
        else:
            code[here], start[here], end[here] = found[here], first[here], last[here]
    return replace(part, code=code, start=start, end=end)


def _plan_groups(
    records: Sequence[DatasetRecord], kind: PointerKind, layers: Sequence[str], catalog: Catalog
) -> tuple[GroupPlan, ...]:
    plans = []
    for record in records:
        readers = array_readers(catalog, record)
        sparse = kind is PointerKind.SPARSE
        paths = {layer: f"{'csr/' if sparse else ''}layers/{layer}" for layer in layers}
        for layer, path in paths.items():
            # The array of a group without named layers.
            if not sparse and path not in readers and LEGACY in readers and (layer == LEGACY or not record.layers):
                paths[layer] = LEGACY
        lacking = [path for path in [*paths.values(), *(["csr/indices"] if sparse else [])] if path not in readers]
        if lacking:
            raise CorruptError(
                f"The group {record.zarr_group} of dataset {record.name or record.uid!r} has no array {lacking[0]!r}, only {sorted(readers)}; "
                "run validate()."
            )
        # A copy serves only if it has all layers of the part; `csr/indptr` is needed to find the rows of cells.
        copied = {layer: f"csc/layers/{layer}" for layer in layers}
        copy = None
        if sparse and all(path in readers for path in ("csr/indptr", "csc/indptr", "csc/indices", *copied.values())):
            values = {layer: readers[path] for layer, path in copied.items()}
            copy = ColumnCopy(readers["csr/indptr"], readers["csc/indptr"], readers["csc/indices"], values)
        found = {layer: readers[path] for layer, path in paths.items()}
        indices = readers["csr/indices"] if sparse else None
        plans.append(GroupPlan(record.zarr_group, record.layout_uid, indices, found, copy))
    return tuple(plans)


def sum_dtype(stored: np.dtype[Any], n: int, largest: int | None = None) -> np.dtype[Any] | None:
    """Return the smallest dtype, no narrower than `stored`, that holds every sum of n values; of floats, their own.

    `largest` is the largest absolute value, where it is known; else that of the dtype counts. None where no integer
    type is wide enough.
    """
    if stored.kind == "f" or n == 1:
        return stored
    stored = np.dtype(np.uint8) if stored.kind == "b" else stored
    widths = [np.dtype(f"{stored.kind}{size}") for size in (1, 2, 4, 8)]
    lowest, highest = n * int(np.iinfo(stored).min), n * int(np.iinfo(stored).max)
    if largest is not None:
        lowest, highest = min(0, max(lowest, -n * largest)), n * largest
    wide = (w for w in widths if w.itemsize >= stored.itemsize)
    return next((w for w in wide if np.iinfo(w).min <= lowest and highest <= np.iinfo(w).max), None)


def join_dtypes(
    stored: set[np.dtype[np.generic]], *, nan: bool = False, largest: int | None = None
) -> np.dtype[np.generic] | None:
    """Find the smallest dtype that holds every value of several exactly, and NaN if asked; None when there is none.

    `largest` is the largest absolute value of the integers, where it is known; else that of their dtypes counts.
    """
    if not stored:
        return np.dtype(np.float32 if nan else np.uint8)
    joined = np.result_type(*stored, *([np.float32] if any(d.kind == "f" for d in stored) or nan else []))
    joined = np.dtype(np.uint8) if joined == np.dtype(bool) else joined
    integers = {d for d in stored if d.kind in "iu"}
    if integers and joined.kind == "f":
        # NumPy joins int64 with uint64 to float64.
        joined = joined if nan or any(d.kind == "f" for d in stored) else np.dtype(np.int64)
        # A float type holds every integer up to a power of two.
        limit = 2 ** (np.finfo(str(joined)).nmant + 1) if joined.kind == "f" else np.iinfo(joined).max
        if (max(int(np.iinfo(str(d)).max) for d in integers) if largest is None else largest) > limit:
            return None
    return joined


def read_modalities(catalog: Catalog) -> dict[str, SpacePointers]:
    """Return the modalities of the atlas by main pointer column, in the order of adding, and the results that are feature spaces by name."""
    spaces, datasets = catalog.spaces(), group_by_dataset(read_records(catalog))
    found: dict[str, dict[str, list[DatasetRecord]]] = {}
    space_of: dict[str, str] = {}
    for uid, records in datasets.items():
        for record in records:
            # Pointer columns `<space>__<matrix>` are of single layers, which belong to the modality `<space>`.
            name = pointer_column(record).split("__", 1)[0]
            space_of[name] = record.feature_space
            found.setdefault(name, {}).setdefault(uid, []).append(record)
    known = {
        name: SpacePointers(name, spaces[space_of[name]], {uid: tuple(r) for uid, r in held.items()})
        for name, held in found.items()
        if space_of[name] in spaces and spaces[space_of[name]].kind is not PointerKind.GEOMETRY
    }
    for result in read_results(catalog):
        if result.kind == "space" and result.space in spaces:
            # The datasets of a result share one group. The empty uid is a placeholder if none is left: an empty result keeps its width.
            groups = {uid: (result.as_group(),) for uid in result.cells_of if uid in datasets} or {
                "": (result.as_group(),)
            }
            known[result.name] = SpacePointers(result.name, spaces[result.space], groups, is_result=True)
    return known


def find_modality(known: Mapping[str, SpacePointers], name: str, catalog: Catalog) -> SpacePointers:
    """Find what a space name means: the pointer column of that name, or the only one that points into the space."""
    if name in known:
        return known[name]
    of_space = [m for m in known.values() if m.space.name == name]
    if len(of_space) == 1:
        return of_space[0]
    if of_space:
        raise QueryError(
            f"Several pointer columns point into {name!r}; name one of {sorted(m.name for m in of_space)}."
        )
    raise QueryError(f"No dataset of {catalog.location.uri} has the feature space {name!r}; there are {sorted(known)}.")


def vector_results(catalog: Catalog) -> dict[str, ResultRecord]:
    """Return the results stored in the cell table: name -> record."""
    return {record.name: record for record in read_results(catalog) if record.kind == "vector"}


@dataclass(frozen=True)
class FeatureAxis:
    """The columns of a result.

    `column_maps` is layout -> column of the result for each local column, (n_local,), -1 where it is left out. Where
    several columns of a layout are one feature, all but the first have a column from n_features on, which readers add
    to the feature's own.
    """

    features: NDArray[np.object_]  # (n_features,): feature uids in column order
    column_maps: Mapping[str, NDArray[np.int64]]
    layouts: tuple[str, ...]  # those that `measured` describes, sorted
    measured: NDArray[np.bool_]  # (n_layouts, n_features): which columns each layout measured
    # (n_more,): column of the result to which each column from n_features on is added
    merged: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    # layout -> the largest number of its columns that are added up in one; layouts without such columns are left out
    added: Mapping[str, int] = field(default_factory=dict)
    # (k,): columns of the result that are sums in some layout; of features kept apart, their columns
    repeated: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True)
class FeatureRows:
    """The features of some layouts as rows of the registry, each as the feature that it counts as.

    With `apart`, columns of one layout that count as one feature keep rows of their own: a feature then counts as
    itself in a layout that holds the other one too, and of several the first alone takes its place.
    """

    registry: Registry
    layouts: Mapping[str, Layout]  # by uid
    apart: bool = False

    @cached_property
    def _row_of_index(self) -> NDArray[np.int64]:
        index = self.registry.global_index
        # Indices are dense: a larger one is damage, and would take memory without bound.
        if int(index.max(initial=-1)) >= len(index):
            raise CorruptError(
                f"The registry of {self.registry.space!r} has {len(index):,} features and the index {int(index.max()):,}; run validate() "
                "and restore the atlas from a copy or a snapshot."
            )
        rows = np.full(int(index.max(initial=-1)) + 1, -1, np.int64)
        assigned = np.flatnonzero(index >= 0)
        rows[index[assigned]] = assigned
        return rows

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Rank of every registry row on a result's axis: by global index, those without one behind, by uid."""
        index = self.registry.global_index
        by = np.argsort(np.where(index < 0, np.iinfo(np.int64).max, index), kind="stable")
        behind = np.flatnonzero(index < 0)
        if len(behind):
            # Their order in the registry depends on the order in which files were added, the uids do not.
            by[len(by) - len(behind) :] = behind[np.argsort(self.registry.uids[behind].astype(str))]
        rank = np.empty(len(by), np.int64)
        rank[by] = np.arange(len(by))
        return rank

    @cached_property
    def _target_of_index(self) -> NDArray[np.int64]:
        """Registry row that the feature of each index counts as; -1 where no feature has the index."""
        rows = self._row_of_index
        return np.where(rows >= 0, self.registry.targets[rows], -1)

    def rows(self, layout_uid: str) -> NDArray[np.int64]:
        """Return the registry row that each local column of a layout counts as, (n_local,) int64; with `apart` no row twice."""
        if not self.apart:
            found = self._looked_up(layout_uid, self._target_of_index)
            return self.registry.targets[self.own_rows(layout_uid)] if found is None else found
        # A new array on every call: it is changed below, and again by `build_axis`.
        rows = self.own_rows(layout_uid)
        target = self.registry.targets[rows]
        moved = np.flatnonzero(target != rows)
        held = np.zeros(len(self.registry.targets), bool)
        held[rows] = True
        moved = moved[~held[target[moved]]]
        _, first = np.unique(target[moved], return_index=True)
        rows[moved[first]] = target[moved[first]]
        return rows

    def own_rows(self, layout_uid: str) -> NDArray[np.int64]:
        """Return the registry row that each local column of a layout is, (n_local,) int64."""
        rows = self._looked_up(layout_uid, self._row_of_index)
        if rows is not None:
            return rows
        layout = self.layouts[layout_uid]
        inside = (layout.global_index >= 0) & (layout.global_index < len(self._row_of_index))
        rows = np.full(len(layout.global_index), -1, np.int64)
        rows[inside] = self._row_of_index[layout.global_index[inside]]
        # Features without an index, which they get when a snapshot is taken, are found by their uid.
        for i in np.flatnonzero(rows < 0).tolist():
            rows[i] = self.registry.row_of.get(layout.features[i], -1)
        if rows.min(initial=0) < 0:
            lost = layout.features[int(np.flatnonzero(rows < 0)[0])]
            raise CorruptError(
                f"The feature {lost} of layout {layout_uid} is not in the registry of {self.registry.space!r}; run validate()."
            )
        return rows

    def _looked_up(self, layout_uid: str, row_of_index: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return what each index of a layout leads to; None if any leads nowhere."""
        layout = self.layouts.get(layout_uid)
        if layout is None:
            raise CorruptError(
                f"The feature list {layout_uid} of {self.registry.space!r} is not in the atlas; run validate()."
            )
        index = layout.global_index
        if len(index) and (index.min() < 0 or index.max() >= len(row_of_index)):
            return None
        rows: NDArray[np.int64] = row_of_index[index]
        return rows if rows.min(initial=0) >= 0 else None


def build_axis(
    features: FeatureRows,
    datasets: Sequence[Sequence[str]],
    *,
    main: Sequence[str],
    join: str | int = "union",
    drop: bool = False,
    asked: Sequence[str] | None = None,
) -> FeatureAxis:
    """Decide the columns of a result.

    For each touched dataset, `datasets` has the layouts that are read of it, and `main` the layout of the first layer,
    which `measured` is about. `join` keeps features that any, every, or at least so many touched datasets measured;
    `drop` leaves out those that not every one measured. `asked` are feature uids in the order of the result; None takes
    all in the order of their global index. Asked features that nobody measured stay under "union" without `drop`,
    unmeasured.
    """
    rows_of = {uid: features.rows(uid) for uid in sorted({uid for uids in datasets for uid in uids})}
    uids = features.registry.table.column("uid")
    counts = _count_datasets(rows_of, datasets, len(uids), every=drop or join == "intersection")
    least = 1 if join == "union" else len(datasets) if join == "intersection" else int(join)
    least = max(least, len(datasets)) if drop else least
    if asked is None:
        kept = np.flatnonzero(counts >= max(1, least))
        kept = kept[np.argsort(features.order[kept], kind="stable")]
    else:
        found, at = find_rows(uids, pa.array(asked, pa.string()))
        # In the asked order; `find_rows` has that of the registry.
        kept = found[np.argsort(at)]
        kept = kept if join == "union" and not drop else kept[counts[kept] >= least]
    column = np.full(len(uids), -1, np.int64)
    column[kept] = np.arange(len(kept))
    # Before `maps`, which overwrites the arrays of `rows_of`.
    apart = [rows[features.registry.targets[rows] != rows] for rows in rows_of.values()] if features.apart else []
    # All rows are inside; `clip` only spares the buffer that `np.take` needs to write to `out` otherwise.
    maps = {uid: np.take(column, rows, out=rows, mode="clip") for uid, rows in rows_of.items()}
    layouts = tuple(sorted(set(main)))
    measured = np.zeros((len(layouts), len(kept)), bool)
    for i, uid in enumerate(layouts):
        measured[i, maps[uid][maps[uid] >= 0]] = True
    named: NDArray[np.object_] = uids.take(pa.array(kept)).to_numpy()
    if features.apart:
        columns = column[np.unique(np.concatenate([np.empty(0, np.int64), *apart]))]
        return FeatureAxis(named, maps, layouts, measured, repeated=np.sort(columns[columns >= 0]))
    merged, added = _number_repeats(maps, len(kept))
    return FeatureAxis(named, maps, layouts, measured, merged, added, np.unique(merged))


def _count_datasets(
    rows_of: Mapping[str, NDArray[np.int64]], datasets: Sequence[Sequence[str]], n: int, *, every: bool
) -> NDArray[np.int64]:
    """Count for each registry row the datasets that measured it: in any of their layouts, or in every one."""
    combinations: dict[tuple[str, ...], int] = {}
    for uids in datasets:
        key = tuple(sorted(set(uids)))
        combinations[key] = combinations.get(key, 0) + 1
    counts = np.zeros(n, np.int64)
    for uids, times in combinations.items():
        if len(uids) == 1:
            counts[rows_of[uids[0]]] += times  # a row that is there twice counts once
            continue
        held, n_layouts = np.unique(np.concatenate([np.unique(rows_of[uid]) for uid in uids]), return_counts=True)
        counts[held[n_layouts == len(uids)] if every else held] += times
    return counts


def _number_repeats(maps: Mapping[str, NDArray[np.int64]], n_cols: int) -> tuple[NDArray[np.int64], dict[str, int]]:
    """Assign columns from `n_cols` on to all but the first of several columns of a layout with the same target.

    Changes `maps`, and returns `merged` and `added` of `FeatureAxis`. Layouts share the columns: the second of a
    feature has the same number in all of them.
    """
    first = np.empty(n_cols, np.int64)
    found: list[tuple[str, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
    for uid, column_map in maps.items():
        kept = np.flatnonzero(column_map >= 0)
        columns = column_map[kept]
        # Of repeated indices the last value stays; in reverse, that is the first local column of each feature.
        first[columns[::-1]] = kept[::-1]
        again = kept[first[columns] != kept]
        if len(again):
            columns = column_map[again]
            order = np.argsort(columns, kind="stable")
            turn = np.empty_like(columns)
            # How many repeats of the same column come before: position minus where that column begins.
            turn[order] = np.arange(len(order)) - np.searchsorted(columns[order], columns[order])
            found.append((uid, again, columns, turn))
    if not found:
        return np.empty(0, np.int64), {}
    most = max(int(turn.max()) for *_, turn in found) + 1
    keys, numbers = np.unique(np.concatenate([c * most + turn for *_, c, turn in found]), return_inverse=True)
    start = 0
    for uid, again, _, _ in found:
        maps[uid][again] = n_cols + numbers[start : start + len(again)]
        start += len(again)
    return keys // most, {uid: 2 + int(turn.max()) for uid, *_, turn in found}


def merged_columns(column_map: NDArray[np.int64], merged: NDArray[np.int64], n_cols: int) -> dict[int, list[int]]:
    """Return which local columns of a layout are added up: column of the result -> local columns, ascending."""
    own = column_map.copy()
    more = np.flatnonzero(column_map >= n_cols)
    own[more] = merged[column_map[more] - n_cols]
    return {column: np.flatnonzero(own == column).tolist() for column in np.unique(own[more]).tolist()}


def make_var(space: SpacePlan, catalog: Catalog, names: FeatureNames) -> VarTable:
    """Describe the columns of a space, named by feature id where all are known and unique, else by uid; or by symbol.

    The names are in the first column, as of `frame_to_arrow`; the others are those of the registry: `uid`, `symbol`,
    `global_index`, `aliases` joined by ``|``, and the others. Spaces without features number their columns.
    """

    def build() -> pa.Table:
        if not space.space.has_features:
            return _named_rows(pa.array([str(i) for i in range(space.n_cols)], pa.string()), {})
        registry = read_registry(catalog, space.space.name)
        rows = np.array([registry.row_of[uid] for uid in space.features.tolist()], np.int64)
        table = registry.table.take(pa.array(rows))
        ids = table.column("feature_id")
        by_id = ids.null_count == 0 and len(pc.unique(ids)) == len(ids)
        front = ("uid", "symbol", "global_index", "feature_id")
        rest = [n for n in table.column_names if n not in {*front, "symbol_source", "other_type"}]
        columns = {}
        for name in [*front, *rest]:
            values = table.column(name)
            if pa.types.is_list(values.type):
                values = pc.binary_join(values.cast(pa.list_(pa.string())), "|")
            if name == "symbol":  # a gene that no file gave a symbol goes by its id
                values = pc.coalesce(values, ids)
            columns[name] = values.fill_null("") if pa.types.is_string(values.type) else values
        if names == "symbol":
            from anndata.utils import make_index_unique
            from pandas import Index

            symbols = pc.coalesce(table.column("symbol"), ids, table.column("uid"))
            return _named_rows(pa.array(make_index_unique(Index(symbols.to_pylist())), pa.string()), columns)
        return _named_rows(ids if by_id else table.column("uid"), columns)

    # The features are kept with the table, so that no other array can have their identity.
    facts = (space.space.name, space.n_cols, id(space.features), names)
    _, var = catalog.remember("var", facts, lambda: (space.features, VarTable(build())))
    return var


def measured_table(space: SpacePlan, var: pa.Table) -> pa.Table:
    """Return which layout measured which feature: names as in `make_var`, then a column of booleans for each layout."""
    return _named_rows(var.column(INDEX), dict(zip(space.layouts, map(pa.array, space.measured), strict=True)))


def _named_rows(names: pa.ChunkedArray | pa.Array, columns: Mapping[str, Any]) -> pa.Table:
    index = pa.field(INDEX, pa.string(), metadata=ColumnFacts("", "string").to_metadata())
    fields = [pa.field(name, values.type) for name, values in columns.items()]
    return pa.Table.from_arrays([names, *columns.values()], schema=pa.schema([index, *fields]))
