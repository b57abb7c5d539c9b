"""The feature axis of a result: which features, in which order, and who measured them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.features import Registry
from raggedatlas.catalog.layouts import Layout
from raggedatlas.errors import CorruptError, QueryError


@dataclass(frozen=True)
class Axis:
    """The columns of a result.

    Parameters
    ----------
    features : (n_features,) object array of str
        Feature uids in column order.
    column_maps : mapping of str to (n_local,) int64
        Layout -> column of the result for each local column, -1 where it is left out.
    layouts : tuple of str
        Layouts whose measurements are told, sorted.
    measured : (n_layouts, n_features) bool
        Which columns each of them measured.
    """

    features: NDArray[np.object_]
    column_maps: Mapping[str, NDArray[np.int64]]
    layouts: tuple[str, ...]
    measured: NDArray[np.bool_]


@dataclass(frozen=True)
class FeatureRows:
    """The features of some layouts as rows of the registry, redirects followed.

    A redirect applies to a layout that does not itself hold the target; of several features of one layout that were merged
    into the same target, the first takes its place and the others stay what they are, so that values are never added up.

    Parameters
    ----------
    registry : Registry
        All features of the space.
    layouts : mapping of str to Layout
        Layouts by uid.
    """

    registry: Registry
    layouts: Mapping[str, Layout]

    @cached_property
    def _row_of_index(self) -> NDArray[np.int64]:
        index = self.registry.global_index
        rows = np.full(int(index.max(initial=-1)) + 1, -1, np.int64)
        assigned = np.flatnonzero(index >= 0)
        rows[index[assigned]] = assigned
        return rows

    @cached_property
    def _target(self) -> NDArray[np.int64]:
        target = np.arange(len(self.registry.uids))
        row_of = self.registry.row_of
        for uid, into in self.registry.redirects.items():
            target[row_of[uid]] = row_of.get(into, row_of[uid])
        return target

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Rank of every registry row on a result's axis: by global index, those without one behind, by uid."""
        index = self.registry.global_index
        last = np.iinfo(np.int64).max
        by = np.lexsort((self.registry.uids.astype(str), np.where(index < 0, last, index)))
        rank = np.empty(len(by), np.int64)
        rank[by] = np.arange(len(by))
        return rank

    def rows(self, layout_uid: str) -> NDArray[np.int64]:
        """Give the registry row that each local column of a layout stands for, (n_local,) int64, no row twice."""
        rows = self._plain_rows(layout_uid)
        target = self._target[rows]
        moved = np.flatnonzero(target != rows)
        if not len(moved):
            return rows
        held = np.zeros(len(self._target), bool)
        held[rows] = True
        moved = moved[~held[target[moved]]]
        _, first = np.unique(target[moved], return_index=True)
        result = rows.copy()
        result[moved[first]] = target[moved[first]]
        return result

    def _plain_rows(self, layout_uid: str) -> NDArray[np.int64]:
        layout = self.layouts.get(layout_uid)
        if layout is None:
            raise CorruptError(
                f"The feature list {layout_uid} of {self.registry.space!r} is not in the atlas; run validate()."
            )
        index = layout.global_index
        inside = (index >= 0) & (index < len(self._row_of_index))
        rows = np.full(len(index), -1, np.int64)
        rows[inside] = self._row_of_index[index[inside]]
        row_of = self.registry.row_of
        for i in np.flatnonzero(rows < 0).tolist():
            rows[i] = row_of.get(layout.features[i], -1)
        if rows.min(initial=0) < 0:
            lost = layout.features[int(np.flatnonzero(rows < 0)[0])]
            raise CorruptError(
                f"The feature {lost} of layout {layout_uid} is not in the registry of {self.registry.space!r}; run validate()."
            )
        return rows


def build_axis(
    features: FeatureRows,
    datasets: Sequence[Sequence[str]],
    *,
    main: Sequence[str],
    join: str | int = "union",
    asked: Sequence[str] | None = None,
) -> Axis:
    """Decide the columns of a result.

    Parameters
    ----------
    features : FeatureRows
        Registry and layouts.
    datasets : sequence of sequence of str
        For each touched dataset, the layouts that are read of it.
    main : sequence of str
        For each touched dataset, the layout of the first layer; `measured` speaks of these.
    join : "union", "intersection" or int
        Keep features that any, every, or at least so many touched datasets measured.
    asked : sequence of str or None
        Feature uids in the order of the result; None takes all in the order of their global index.

    Returns
    -------
    Axis
        Asked features that nobody measured stay under ``"union"``, unmeasured.
    """
    rows_of = {uid: features.rows(uid) for uid in sorted({uid for uids in datasets for uid in uids})}
    n = len(features.registry.uids)
    counts = _count_datasets(rows_of, datasets, n, every=join == "intersection")
    least = 1 if join == "union" else len(datasets) if join == "intersection" else int(join)
    if asked is None:
        kept = np.flatnonzero(counts >= max(1, least))
        kept = kept[np.argsort(features.order[kept], kind="stable")]
    else:
        kept = np.array([features.registry.row_of[uid] for uid in asked], np.int64)
        kept = kept if join == "union" else kept[counts[kept] >= least]
    column = np.full(n, -1, np.int64)
    column[kept] = np.arange(len(kept))
    maps = {uid: column[rows] for uid, rows in rows_of.items()}
    layouts = tuple(sorted(set(main)))
    measured = np.zeros((len(layouts), len(kept)), bool)
    for i, uid in enumerate(layouts):
        measured[i, maps[uid][maps[uid] >= 0]] = True
    return Axis(features.registry.uids[kept], maps, layouts, measured)


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
        held = np.zeros(n, np.int64)
        for uid in uids:
            held[rows_of[uid]] += 1
        counts += times * (held == len(uids) if every else held > 0)
    return counts


def check_join(join: object, min_datasets: object) -> str | int:
    """Read the arguments of `Query.join`.

    Raises
    ------
    QueryError
        For anything but ``"union"``, ``"intersection"`` or ``min_datasets=k``.

    Examples
    --------
    >>> check_join("intersection", None), check_join(None, 3)
    ('intersection', 3)
    """
    if min_datasets is not None and join is None and isinstance(min_datasets, int) and min_datasets >= 1:
        return min_datasets
    if min_datasets is None and join in {"union", "intersection"}:
        return str(join)
    raise QueryError(
        f"join takes 'union', 'intersection', or min_datasets=k with k >= 1; got {join!r}"
        f"{'' if min_datasets is None else f' and min_datasets={min_datasets!r}'}."
    )
