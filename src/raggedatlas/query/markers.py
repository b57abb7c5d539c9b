"""Marker tables: every group of cells against the rest by Welch's t-test, in one pass over the cells."""

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.kept_tables import KeptTable, keep_table, read_kept, refuse_gone
from raggedatlas.errors import ArgumentError, CorruptError, NotFoundError, StoreError
from raggedatlas.model.batch import Block
from raggedatlas.model.frames import arrow_to_frame, frame_to_arrow
from raggedatlas.query.compare import NO_REPLICATES, FeatureRanks, Moments, describe_values, logarithms, rank_moments
from raggedatlas.query.compute import count_measured, group_cells, kept_features, with_all_features
from raggedatlas.query.modalities import make_var
from raggedatlas.query.spec import QuerySpec
from raggedatlas.store.executors import Workers

if TYPE_CHECKING:
    import pandas as pd


_FORM = 1
"""Changes with what tables contain, so that those of another form are computed again."""


@dataclass(frozen=True)
class MarkerOptions:
    """Which groups of cells are compared, and how."""

    by: str  # column whose values make the groups
    within: str | None = None  # column within whose values groups are compared with the rest; None takes all cells
    normalize: bool | None = None  # as of `CompareOptions`

    def __post_init__(self) -> None:
        """Check that there are two columns, which the table has not."""
        import pandas as pd

        if self.by == self.within:
            raise ArgumentError(
                f"within={self.within!r} is the column of the groups; name another one, or leave it out."
            )
        if self.within == "group" or self.within in _no_ranks(0).to_frame(pd.DataFrame({"symbol": []})):
            raise ArgumentError(f"within={self.within!r} is a column of the table; rename the column of the cells.")


def kept_markers(
    catalog: Catalog,
    layer: str | None,
    options: MarkerOptions,
    executor: Executor | Workers | None = None,
    keep_in: Catalog | None = None,
) -> "pd.DataFrame":
    """Return the markers of all cells of a snapshot: what is kept of it, else computed.

    `catalog` is pinned to the snapshot. `layer` None takes the usual one. `keep_in` is the tip of the atlas, where what
    is computed is kept; with None nothing is.
    """
    asked = {"form": _FORM, "layer": layer, **asdict(options)}
    kept = read_kept(catalog, asked)
    if kept is None:
        spec = QuerySpec() if layer is None else QuerySpec(layers=(layer,))
        try:
            computed = markers(spec, catalog, options, executor)
        except (NotFoundError, CorruptError, StoreError) as error:
            if keep_in is None or catalog.snapshot is None:
                raise
            refuse_gone(keep_in, catalog.snapshot, error)
        kept = KeptTable(frame_to_arrow(computed), computed.attrs["markers"])
        if keep_in is not None and catalog.snapshot is not None:
            keep_table(keep_in, catalog.snapshot, asked, kept)
    # Also of what was just computed, so that both are the same.
    frame = arrow_to_frame(kept.table).reset_index(drop=True)
    frame.attrs["markers"] = {**kept.known}
    return frame


def _add_moments(
    block: Block, codes: NDArray[np.int64], n_cols: int, *, normalize: bool | None
) -> tuple[NDArray[np.int64], Moments, bool]:
    """Return the groups in a block, their moments, and whether values were normalized."""
    matrix, normalized = logarithms(block, normalize=normalize)
    groups, codes = np.unique(codes, return_inverse=True)
    shape, kept = (len(groups), n_cols), matrix.data != 0
    # Group and column as one number, so that one `bincount` sums every pair.
    at = (np.repeat(codes, np.diff(matrix.indptr)) * n_cols + matrix.indices)[kept]
    values = matrix.data[kept].astype(np.float64)
    found = [np.bincount(at, weights, shape[0] * n_cols).reshape(shape) for weights in (values, values**2, None)]
    return groups, Moments(*(each.astype(np.float64, copy=False) for each in found)), normalized


def markers(
    spec: QuerySpec, catalog: Catalog, options: MarkerOptions, executor: Executor | Workers | None = None
) -> "pd.DataFrame":
    """Compare every group of cells with the rest; see `Query.markers`.

    In memory are one block of cells, and ten dense matrices of groups by features at most.
    """
    import pandas as pd

    columns = [options.by] if options.within is None else [options.within, options.by]
    grouped = group_cells(with_all_features(spec), catalog, columns, "markers")
    unlabelled = grouped.obs[columns].isna().any(axis=1).to_numpy()
    rows, n_cells = np.flatnonzero(~unlabelled[grouped.codes]), len(grouped.codes)
    grouped = replace(grouped, space=grouped.space.take(rows), codes=grouped.codes[rows])
    space, n_groups, obs = grouped.space, grouped.n_groups, grouped.obs
    # Rows on a disk are read group by group, so that a block has few groups; of an object store each chunk is fetched once.
    read = grouped.sorted() if catalog.location.is_local else grouped
    sums, squares, nonzero = (np.zeros((n_groups, space.n_cols)) for _ in range(3))
    add, normalized = partial(_add_moments, normalize=options.normalize), False
    # With all groups in its block, a partial result is as large as the whole.
    for groups, own, changed in read.partials(add, executor, catalog.location, 3 * sums.nbytes):
        sums[groups] += own.sums
        squares[groups] += own.squares
        nonzero[groups] += own.nonzero
        normalized |= changed
    moments = Moments(sums, squares, nonzero)
    measured = count_measured(space, grouped.codes, n_groups)
    sides = np.zeros(n_groups, np.int64) if options.within is None else pd.factorize(obs[options.within])[0]
    var, kept = make_var(space, catalog, spec.names).frame(), kept_features(spec, catalog, space)
    tables, numbers, alone = [_no_ranks(space.n_cols).to_frame(var, kept)], list[int](), list[str]()
    for side in np.unique(sides[~unlabelled]):
        for number, ranks in _against_rest(moments, measured, np.flatnonzero((sides == side) & ~unlabelled)):
            table = ranks.to_frame(var, kept)
            if len(table):
                tables.append(table)
                numbers += [number] * len(table)
            else:
                alone.append(str(obs.index[number]))
    frame = pd.concat(tables[len(tables) > 1 :], ignore_index=True)
    frame.insert(0, "group", obs[options.by].iloc[numbers].reset_index(drop=True))
    if options.within is not None:
        frame[options.within] = obs[options.within].iloc[numbers].reset_index(drop=True)
    frame.attrs["markers"] = {
        "by": options.by, "within": options.within, "values": describe_values(space.layers[0], normalized=normalized),
        "n_cells": len(rows), "n_unlabelled": n_cells - len(rows), "not_compared": alone, "note": NO_REPLICATES,
    }  # fmt: skip
    return frame


def _against_rest(
    moments: Moments, measured: NDArray[np.int64], groups: NDArray[np.int64]
) -> Iterator[tuple[int, FeatureRanks]]:
    """Compare each of some groups with all others of them."""
    every = [moments.sums, moments.squares, moments.nonzero, measured]
    # The rest is the sum of the groups before and after, not all without one, which would cancel.
    after = [np.cumsum(values[groups[::-1]], axis=0)[::-1] for values in every]
    before = [np.zeros(values.shape[1], values.dtype) for values in every]
    for i, number in enumerate(groups.tolist()):
        last = i + 1 == len(groups)
        rest = [sums if last else sums + later[i + 1] for sums, later in zip(before, after, strict=True)]
        pairs = [np.stack([values[number], others]) for values, others in zip(every, rest, strict=True)]
        yield number, rank_moments(Moments(*pairs[:3]), pairs[3])
        before = [sums + values[number] for sums, values in zip(before, every, strict=True)]


def _no_ranks(n: int) -> FeatureRanks:
    """Return the comparison of nothing."""
    missing = np.full(n, np.nan)
    return FeatureRanks(missing, missing, missing, np.full((2, n), np.nan))
