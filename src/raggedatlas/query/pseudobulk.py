"""Sums of counts per sample for statistics on samples: streamed and sparse, with what was measured and what the design allows."""

import contextlib
import io
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import MissingExtraError, QueryError
from raggedatlas.model.batch import Block, CsrBlock
from raggedatlas.model.frames import DATASET, nan_to_null
from raggedatlas.query.cells import cell_columns, group_codes
from raggedatlas.query.compute import SIZE, GroupedCells, add_block, count_layouts, first_cells, frame_of, group_cells
from raggedatlas.query.modalities import make_var
from raggedatlas.query.plan import pin_cells, plan_read
from raggedatlas.query.spec import QuerySpec
from raggedatlas.store.executors import Workers
from raggedatlas.store.runtime import release_unused_memory, warnings_as

if TYPE_CHECKING:
    import anndata as ad
    import pandas as pd
    from scipy.sparse import csr_matrix

LEAST_MEASURED = 0.5
"""Share of the features that a sample has to have measured; of those below, the notes tell."""

_DENSE, _DENSE_SHARE = 1 << 20, 4
"""Blocks are added up in dense memory of at most so many values, and so many for each entry."""

FACTS = (SIZE, "n_counts", "n_features", "measured_share")
"""Columns of `obs` that are of the samples, and not of the cells."""

_MOST_NAMED = 5
_PARTIAL_BYTES = 1 << 26


@dataclass(frozen=True)
class _SampleSums:
    """Sums of some groups, as a sparse matrix with two values an entry."""

    groups: NDArray[np.int64]  # (k,): ascending
    bounds: NDArray[np.int64]  # (k + 1,): where the entries of each group begin, and where the last ones end
    columns: NDArray[np.int32]  # (n,): columns of the entries, ascending in each group
    sums: NDArray[Any]  # (n,) int32 or int64
    nonzero: NDArray[np.int32]  # (n,): how many cells have a value other than zero

    @classmethod
    def of(
        cls,
        groups: NDArray[np.int64],
        bounds: NDArray[Any],
        columns: NDArray[Any],
        sums: NDArray[Any],
        nonzero: NDArray[Any],
    ) -> "_SampleSums":
        """Make one with the smallest types that hold the values."""
        small = not len(sums) or sums.max() < 2**31
        return cls(
            groups,
            bounds.astype(np.int64),
            columns.astype(np.int32),
            sums.astype(np.int32 if small else np.int64),
            nonzero.astype(np.int32),
        )

    def __getitem__(self, rows: slice) -> "_SampleSums":
        """Return neighbouring groups, as views."""
        start, stop, _ = rows.indices(len(self.groups))
        entries = slice(int(self.bounds[start]), int(self.bounds[stop]))
        bounds = self.bounds[start : stop + 1] - self.bounds[start]
        return _SampleSums(self.groups[rows], bounds, self.columns[entries], self.sums[entries], self.nonzero[entries])

    def add(self, other: "_SampleSums", n_cols: int) -> "_SampleSums":
        """Add those of the same groups."""
        sums = self.matrix(self.sums, n_cols).astype(np.int64) + other.matrix(other.sums, n_cols)
        nonzero = self.matrix(self.nonzero, n_cols) + other.matrix(other.nonzero, n_cols)
        return self.of(self.groups, sums.indptr, sums.indices, sums.data, nonzero.data)

    def matrix(self, values: NDArray[Any], n_cols: int) -> "csr_matrix":
        """Return a matrix of groups by columns with some values."""
        from scipy.sparse import csr_matrix

        return csr_matrix((values, self.columns, self.bounds), shape=(len(self.groups), n_cols), copy=False)

    def spread(self, n_groups: int) -> "_SampleSums":
        """Return the same with a row for each of all groups."""
        lengths = np.zeros(n_groups + 1, np.int64)
        lengths[self.groups + 1] = np.diff(self.bounds)
        return replace(self, groups=np.arange(n_groups), bounds=np.cumsum(lengths))


def _add_counts(block: Block, codes: NDArray[np.int64], n_cols: int) -> _SampleSums:
    """Add up the cells of each group of a block."""
    from scipy.sparse import csr_matrix

    (values,) = block.layers.values()
    if values.dtype.kind == "f":
        wrong = ~np.isfinite(values) | (np.rint(values) != values) | (values < 0)
        if wrong.any():
            raise QueryError(
                f"The layer holds {values[wrong][0]}, which is no count; pseudobulk adds up counts. Name their layer with layer=..., or take "
                "aggregate() for sums of other values."
            )
    groups, own = np.unique(codes, return_inverse=True)
    if not isinstance(block, CsrBlock) or len(groups) * n_cols <= _DENSE_SHARE * len(values) + _DENSE:
        _, summed, counted = add_block(block, codes, n_cols)
        at = np.flatnonzero(counted)
        bounds = np.searchsorted(at, np.arange(len(groups) + 1) * n_cols)
        return _SampleSums.of(groups, bounds, at % max(n_cols, 1), summed.ravel()[at], counted.ravel()[at])
    # Many groups of few cells: a matrix of ones, so that the product adds up the rows of each group.
    cells = csr_matrix((values.astype(np.int64), block.indices, block.indptr), shape=(len(codes), n_cols))
    cells.eliminate_zeros()
    there = csr_matrix((np.ones(cells.nnz, np.int64), cells.indices, cells.indptr), shape=cells.shape)
    ones = csr_matrix((np.ones(len(codes), np.int64), (own, np.arange(len(codes)))), shape=(len(groups), len(codes)))
    sums, nonzero = ones @ cells, ones @ there
    for made in (sums, nonzero):
        made.sort_indices()
    return _SampleSums.of(groups, sums.indptr, sums.indices, sums.data, nonzero.data)


def _add_sorted(parts: Iterable[_SampleSums], n_cols: int) -> list[_SampleSums]:
    """Return the sums of all groups, in order, of blocks of cells that are sorted by their group."""
    done: list[_SampleSums] = []
    for part in parts:
        # The last group of a block may go on in the next.
        if done and done[-1].groups[-1] == part.groups[0]:
            last = done.pop()
            parted = (last[:-1], last[-1:].add(part[:1], n_cols), part[1:])
            done += [one for one in parted if len(one.groups)]
        else:
            done.append(part)
        # What adding took lies between the sums that stay, where nothing else would use it.
        release_unused_memory()
    return done


def _add_any(parts: Iterable[_SampleSums], n_groups: int, n_cols: int) -> list[_SampleSums]:
    """Return the sums of all groups, of blocks of cells in any order.

    As in a log-structured merge tree: a matrix is added to another of its size, so that each entry is added a few times
    however many blocks there are, and what is in memory is about the result.
    """
    levels: list[_SampleSums] = []
    for part in parts:
        whole = part.spread(n_groups)
        while levels and len(levels[-1].sums) <= 2 * len(whole.sums):
            whole = whole.add(levels.pop(), n_cols)
        levels.append(whole)
    while len(levels) > 1:
        levels.append(levels.pop().add(levels.pop(), n_cols))
    return levels


def _joined(parts: list[_SampleSums]) -> _SampleSums:
    """Put groups after each other; the list is emptied, so that nothing is in memory twice for long."""
    if not parts:
        empty = np.zeros(0, np.int64)
        return _SampleSums.of(empty, np.zeros(1, np.int64), empty, empty, empty)
    if len(parts) == 1:
        return parts[0]
    groups = np.concatenate([part.groups for part in parts])
    bounds = np.cumsum(np.concatenate([[0], *(np.diff(part.bounds) for part in parts)]))
    each = [[part.columns for part in parts], [part.sums for part in parts], [part.nonzero for part in parts]]
    parts.clear()
    arrays = []
    for some in each:
        arrays.append(np.concatenate(some))
        some.clear()
    return _SampleSums(groups, bounds, *arrays)


def pseudobulk(
    spec: QuerySpec, catalog: Catalog, by: Sequence[str], min_cells: int, executor: Executor | Workers | None = None
) -> "ad.AnnData":
    """Sum counts per sample; see `Query.pseudobulk`."""
    import anndata as ad

    if min_cells < 1:
        raise QueryError(f"min_cells={min_cells}: a sample has at least one cell.")
    if wrong := [name for name in by if name in FACTS]:
        raise QueryError(
            f"pseudobulk by {wrong[0]!r}: the result has a column {wrong[0]!r} of its own; annotate the values under another name."
        )
    # The cells are read more than once.
    catalog = pin_cells(catalog)
    grouped = group_cells(spec, catalog, by, "pseudobulk")
    space, n_groups = grouped.space, grouped.n_groups
    if not space.space.is_counts:
        raise QueryError(
            f"The feature space {space.name!r} holds no counts; take aggregate() for sums of other values."
        )
    missing = grouped.obs[list(by)].isna().any(axis=1).to_numpy()
    few = ~missing & (grouped.obs["n_cells"].to_numpy() < min_cells)
    kept = np.flatnonzero(~missing & ~few)
    measured = _measured(grouped, kept)
    obs, codes, facts = grouped.obs.iloc[kept].copy(), grouped.codes, grouped.facts
    notes = [
        *_dropped(grouped.obs[missing], "cells without a value of what makes the samples"),
        *_dropped(grouped.obs[few], f"samples of fewer than {min_cells} cells"),
    ]
    # Rows on a disk are read in any order; of an object store each chunk should be fetched once.
    is_sorted = catalog.location.is_local
    read = grouped.sorted() if is_sorted else grouped
    # Of many cells even their places take memory: what follows knows the space, and not its cells.
    space = grouped.space.take(np.empty(0, np.int64))
    del grouped
    parts = read.partials(_add_counts, executor, catalog.location, _PARTIAL_BYTES)
    del read
    sums = _add_sorted(parts, space.n_cols) if is_sorted else _add_any(parts, n_groups, space.n_cols)
    found = _joined(sums)
    total, detected = (found.matrix(values, space.n_cols) for values in (found.sums, found.nonzero))
    if len(kept) < n_groups:
        total, detected = total[kept], detected[kept]
    del found
    obs["n_counts"] = np.asarray(total.sum(axis=1, dtype=np.int64)).ravel()
    obs["n_features"] = np.diff(total.indptr)
    obs["measured_share"] = measured.mean(axis=1) if space.n_cols else 1.0
    constant, varying = _constant_columns(spec, catalog, by, codes, kept)
    if own := [name for name in constant if name in FACTS]:
        notes.append(f"left out: columns of the cells that are called as those of the samples ({', '.join(own)})")
    obs = obs.join(constant.drop(columns=own).set_axis(obs.index))
    notes += check_design(obs, [*by])
    var = make_var(space, catalog, spec.names)
    made = ad.AnnData(total, obs=obs, var=var.frame(), layers={"count_nonzero": detected, "measured": measured})
    if space.space.has_features:
        made.varm["measured"] = var.measured(space)
    made.uns["atlas"] = {**facts, "by": np.array(list(by), dtype=object)}
    made.uns["pseudobulk"] = {
        "by": np.array(list(by), dtype=object), "min_cells": min_cells, "varying": np.array(varying, dtype=object),
        "notes": np.array(notes, dtype=object),
    }  # fmt: skip
    return made


def _measured(grouped: GroupedCells, kept: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which features each of some groups measured, (k, n_features)."""
    space = grouped.space
    if not space.space.has_features:
        return np.ones((len(kept), space.n_cols), bool)
    has = count_layouts(space, grouped.codes, grouped.n_groups)[kept] > 0
    # Samples have few combinations of layouts; where all have one, one row stands for all of them and takes no memory.
    kinds, kind = np.unique(has, axis=0, return_inverse=True)
    masks = (
        np.stack([space.measured[own].any(axis=0) for own in kinds])
        if len(kinds)
        else np.zeros((0, space.n_cols), bool)
    )
    shape = (len(kept), space.n_cols)
    return np.broadcast_to(masks[0], shape) if len(masks) == 1 else masks[kind.reshape(-1)].reshape(shape)


def _dropped(groups: "pd.DataFrame", what: str) -> list[str]:
    if not len(groups):
        return []
    names = [*map(str, groups.index[:_MOST_NAMED])]
    more = ", ..." if len(groups) > _MOST_NAMED else ""
    return [f"left out: {len(groups):,} {what} ({', '.join(names)}{more}), {int(groups['n_cells'].sum()):,} cells"]


def _constant_columns(
    spec: QuerySpec, catalog: Catalog, by: Sequence[str], codes: NDArray[np.int64], kept: NDArray[np.int64]
) -> "tuple[pd.DataFrame, list[str]]":
    """Return the columns of the cells that have one value in each sample, and the names of the others; one column at a time is read."""
    import pandas as pd

    columns, found, varying = cell_columns(catalog), {}, list[str]()
    names = [DATASET, *columns.shown.values()]
    if spec.obs is not None:
        names = [name for name in names if name in spec.obs]
    first = first_cells(codes, int(codes.max(initial=-1)) + 1)
    # Columns are read when they are asked for.
    obs = plan_read(spec, catalog, deferred=True).obs
    for name in names:
        if name in by:
            continue
        column = obs.column(name)
        table = pa.table([column.take(pa.array(first[kept]))], schema=pa.schema([obs.schema.field(name)]))
        try:
            values = frame_of(table, [name], columns)[name]
        except QueryError:
            # Vectors, such as embeddings, are of cells.
            continue
        numbers, _ = group_codes(nan_to_null(column))
        if (numbers == numbers[first][codes]).all():
            found[name] = values.reset_index(drop=True)
        else:
            varying.append(name)
    return pd.DataFrame(found, index=pd.RangeIndex(len(kept))), varying


def check_design(obs: "pd.DataFrame", columns: Sequence[str]) -> list[str]:
    """Return what a table of samples does not allow to tell apart, a line each.

    `obs` has a row for each sample, with `measured_share` where it is known; `columns` are what is to be compared or
    adjusted for.

    Examples
    --------
    >>> import pandas as pd
    >>> check_design(pd.DataFrame({"condition": ["a", "a", "b"], "batch": ["1", "1", "2"]}), ["condition", "batch"])
    ["condition = 'b' has a single sample", "batch = '2' has a single sample", 'condition and batch go together in all samples: their effects cannot be told apart']
    """
    notes = []
    for name in columns:
        sizes = obs[name].astype(str).value_counts()
        alone = [one for one, n in sizes.items() if n == 1]
        if len(sizes) == 1 and len(obs) > 1:
            notes.append(f"{name} is {sizes.index[0]!r} in all samples")
        # Where each sample has a value of its own, such as a donor, that is what makes the samples.
        elif alone and len(alone) < len(sizes):
            shown = ", ".join(map(repr, alone[:_MOST_NAMED])) + (", ..." if len(alone) > _MOST_NAMED else "")
            notes.append(
                f"{name} = {shown} has a single sample"
                if len(alone) == 1
                else f"{name} = {shown} have a single sample each"
            )
    for i, one in enumerate(columns):
        for other in columns[i + 1 :]:
            pairs = obs[[one, other]].astype(str).drop_duplicates()
            n, m = pairs[one].nunique(), pairs[other].nunique()
            if n > 1 and n == m == len(pairs) < len(obs):
                notes.append(f"{one} and {other} go together in all samples: their effects cannot be told apart")
    if "measured_share" in obs:
        poor = obs.index[obs["measured_share"] < LEAST_MEASURED]
        if len(poor):
            shown = ", ".join(map(str, poor[:_MOST_NAMED])) + (", ..." if len(poor) > _MOST_NAMED else "")
            notes.append(f"measured fewer than half of the features: {shown}")
    return notes


def test_samples(samples: "ad.AnnData", design: str, contrast: Sequence[str]) -> "pd.DataFrame":
    """Test sums of samples by the model of DESeq2; see `Query.test`."""
    try:
        from pydeseq2.dds import DeseqDataSet
        from pydeseq2.ds import DeseqStats
    except ImportError as error:
        raise MissingExtraError("test() needs pydeseq2; install it with pip install 'raggedatlas[stats]'.") from error
    import pandas as pd

    if len(contrast) != 3:
        raise QueryError(
            f"The contrast {tuple(contrast)!r} has not three parts; expected (column, tested value, reference)."
        )
    column, tested, reference = contrast
    terms = _names_in(design)
    for name in dict.fromkeys([column, *terms]):
        if name not in samples.obs:
            raise QueryError(
                f"The samples have no column {name!r}. They have {[*samples.obs.columns]}; columns that vary within samples are "
                f"{[*samples.uns['pseudobulk']['varying']]}."
            )
    if column not in terms:
        raise QueryError(f"The contrast is of {column!r}, which the design {design!r} does not name.")
    # As text: values of a formula are levels.
    metadata = (
        samples.obs[[*dict.fromkeys([column, *terms])]]
        .astype(object)
        .map(lambda value: value if isinstance(value, int | float) else str(value))
    )
    for side in (tested, reference):
        n = int((metadata[column].astype(str) == str(side)).sum())
        if n < 2:
            there = sorted(set(metadata[column].astype(str)))
            raise QueryError(
                f"{column} = {side!r} has {n} sample(s), and a test needs two of each side; there are {there}."
            )
    metadata[column] = metadata[column].astype(str)
    shared = np.asarray(samples.layers["measured"]).all(axis=0)
    found = np.asarray(samples.X.sum(axis=0)).ravel() > 0
    kept = np.flatnonzero(shared & found)
    if not len(kept):
        raise QueryError(
            "No feature was measured by all samples and has a count in one. Leave out samples that measured others; obs['measured_share'] says how "
            "much each measured."
        )
    counts = pd.DataFrame(samples.X[:, kept].toarray(), index=samples.obs_names, columns=samples.var_names[kept])
    # It prints its table, and calls what pandas deprecates, with one warning or the other.
    deprecated = warnings_as("ignore", DeprecationWarning), warnings_as("ignore", FutureWarning)
    with contextlib.redirect_stdout(io.StringIO()), deprecated[0], deprecated[1]:
        model = DeseqDataSet(counts=counts, metadata=metadata, design=design, quiet=True)
        model.deseq2()
        tests = DeseqStats(model, contrast=[column, str(tested), str(reference)], quiet=True)
        tests.summary()
    table: pd.DataFrame = tests.results_df
    if "symbol" in samples.var:
        table = table.assign(symbol=samples.var["symbol"].iloc[kept].to_numpy())
    table = table.sort_values("padj", kind="stable")
    notes = [*samples.uns["pseudobulk"]["notes"], *check_design(samples.obs, [*dict.fromkeys([column, *terms])])]
    table.attrs["pseudobulk"] = {
        "design": design, "contrast": tuple(contrast), "n_samples": samples.n_obs, "notes": [*dict.fromkeys(map(str, notes))],
        "not_measured_by_all": int((~shared).sum()), "without_counts": int((shared & ~found).sum()),
    }  # fmt: skip
    return table


def _names_in(design: str) -> list[str]:
    """Return the columns that a formula names."""
    unquoted = re.sub(r"['\"][^'\"]*['\"]", "", design)
    # Neither functions, such as `np.log(`, nor their options, such as `levels=`.
    names = re.findall(r"`([^`]+)`|(?<![\w.])([^\W\d][\w.]*)(?![\w.]*\s*(?:\(|=(?!=)))", unquoted)
    return [*dict.fromkeys(marked or plain for marked, plain in names)]
