"""Differential expression between two sets of cells, streamed in blocks; statistics as scanpy's `rank_genes_groups` defines them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import ArgumentError, QueryError
from raggedatlas.model.batch import Block, CsrBlock
from raggedatlas.query.cells import cell_columns
from raggedatlas.query.compute import count_measured, kept_features, plan_layer, with_all_features
from raggedatlas.query.modalities import make_var
from raggedatlas.query.plan import plan_rows
from raggedatlas.query.read import PartReader, ReadPlan
from raggedatlas.query.spec import QuerySpec
from raggedatlas.store.runtime import map_groups, prefetch

if TYPE_CHECKING:
    import pandas as pd
    from scipy.sparse import csr_array

METHODS = ("t-test", "wilcoxon")
TARGET_SUM = 1e4
"""Counts per cell after normalization."""

ENTRIES = 2**28
"""Entries that are held at once for ranks, about 1 GiB; more are read in several passes of some features each."""

_PER_THREAD = 256

Blocks = Callable[[], Iterator[tuple[NDArray[np.int64], Block]]]
"""Starts a pass over all cells: row numbers of each block, and the block, whose first layer is read."""


@dataclass(frozen=True)
class CompareOptions:
    """How two sets of cells are compared; see `Query.compare`."""

    method: str = "t-test"  # Welch's, or "wilcoxon", by its normal approximation
    # Whether values are divided by the sum of their cell, multiplied by 10,000, and replaced by ``log1p``. None does
    # it for whole numbers, and takes other values, which are usually logarithms already, as they are.
    normalize: bool | None = None
    tie_correct: bool = False  # whether the variance of the rank sum is corrected for ties

    def __post_init__(self) -> None:
        """Check the method."""
        if self.method not in METHODS:
            raise QueryError(f"compare knows the methods {METHODS}, not {self.method!r}.")
        if self.tie_correct and self.method != "wilcoxon":
            raise ArgumentError("tie_correct=True belongs to method='wilcoxon'; a t-test has no ranks.")


@dataclass(frozen=True)
class FeatureRanks:
    """Statistics of every feature, each (n_features,).

    Scores and p-values are NaN where fewer than two cells of a set measured it.
    """

    scores: NDArray[np.float64]  # the statistic
    logfoldchanges: NDArray[np.float64]  # log2 of the ratio of means
    pvals: NDArray[np.float64]  # two-sided
    fractions: NDArray[np.float64]  # (2, n_features): share of the cells of each set whose value is not zero
    normalized: bool = False  # whether values were normalized

    def to_frame(self, var: "pd.DataFrame", kept: NDArray[np.bool_] | None = None) -> "pd.DataFrame":
        """Return the table as `scanpy.get.rank_genes_groups_df` has it, highest score first, ties in feature order.

        `var` has a row for each feature, indexed by the names of the table, with or without the column `symbol`.
        `kept`, (n_features,), are the features of the table, among which p-values are adjusted; None takes all.
        """
        import pandas as pd
        from scipy.stats import false_discovery_control

        known = ~np.isnan(self.scores)
        rows = np.flatnonzero(known if kept is None else known & kept)
        rows = rows[np.argsort(-self.scores[rows], kind="stable")]
        pvals = self.pvals[rows]
        columns = {
            "names": var.index.to_numpy(dtype=object)[rows],
            "scores": self.scores[rows],
            "logfoldchanges": self.logfoldchanges[rows],
            "pvals": pvals,
            "pvals_adj": false_discovery_control(pvals) if len(pvals) else pvals,
            "pct_nz_group": self.fractions[0, rows],
            "pct_nz_reference": self.fractions[1, rows],
        }
        if "symbol" in var:
            columns["symbol"] = var["symbol"].to_numpy(dtype=object)[rows]
        return pd.DataFrame(columns)


def compare(
    spec: QuerySpec, catalog: Catalog, group: pa.Array, reference: pa.Array | None, options: CompareOptions
) -> "pd.DataFrame":
    """Compare two sets of cells of a query, given by their uids; None means all others of the query. See `Query.compare`."""
    plan = plan_layer(replace(with_all_features(spec), obs=()), catalog, "compare")
    space = plan.single()
    codes = _number_planned(spec, catalog, plan, group, reference)
    rows = np.flatnonzero((codes >= 0) & space.present)
    # The first set first, so that nearly every block is of one set and none has to be divided.
    rows = rows[np.argsort(codes[rows], kind="stable")]
    space, codes = space.take(rows), codes[rows]
    (part,) = space.parts
    reader = PartReader(space, part)
    measured = count_measured(space, codes.astype(np.int64), 2)
    n_entries = int((part.end - part.start).sum()) if space.sparse else len(rows) * space.n_cols
    ranks = rank_features(reader.read_blocks, codes, measured, n_entries, options)
    table = ranks.to_frame(make_var(space, catalog, spec.names).frame(), kept_features(spec, catalog, space))
    table.attrs["compare"] = describe(options, ranks, codes, space.layers[0])
    return table


def _number_planned(
    spec: QuerySpec, catalog: Catalog, plan: ReadPlan, group: pa.Array, reference: pa.Array | None
) -> NDArray[np.int8]:
    """Number the cells of a plan, which has those cells of the query that have the space; uids are let go of before values are read."""
    own = pc.cast(plan.obs.column("uid"), pa.string()).combine_chunks()
    if not plan.n_without:
        return number_cells(own, group, reference)
    # The sets may name cells without the space.
    _, obs = plan_rows(replace(spec, obs=()), catalog, cell_columns(catalog))
    every = pc.cast(obs.column("uid"), pa.string()).combine_chunks()
    there = pc.is_in(every, value_set=own).to_numpy(zero_copy_only=False)
    at: NDArray[np.int32] = pc.index_in(own, value_set=every).to_numpy()
    return number_cells(every, group, reference, there)[at]


NO_REPLICATES = "cells are compared as if they were independent; for conclusions about donors or conditions, test samples with Query.test"
"""What a comparison of cells says of itself."""


def describe(options: CompareOptions, ranks: FeatureRanks, codes: NDArray[Any], layer: str) -> dict[str, Any]:
    """Return how a table was computed, as it is kept in its `attrs`."""
    sizes = [int((codes == code).sum()) for code in (0, 1)]
    return {
        "method": options.method,
        "values": describe_values(layer, normalized=ranks.normalized),
        "n_group": sizes[0],
        "n_reference": sizes[1],
        "note": NO_REPLICATES,
    }


def describe_values(layer: str, *, normalized: bool) -> str:
    """Return which values were compared."""
    return f"log1p of {layer} per {TARGET_SUM:,.0f}" if normalized else layer


def number_cells(
    uids: pa.Array, group: pa.Array, reference: pa.Array | None, there: NDArray[np.bool_] | None = None
) -> NDArray[np.int8]:
    """Number the cells by their set: 0 for the group, 1 for the reference (None: all others), -1 for neither.

    `there`, (n_cells,), says which cells have values; None takes all.
    """
    codes = np.full(len(uids), -1 if reference is not None else 1, np.int8)
    for code, wanted in enumerate((group, reference)):
        if wanted is None:
            continue
        rows = pc.index_in(wanted, value_set=uids).fill_null(-1).to_numpy(zero_copy_only=False)
        if (rows < 0).any():
            lost = wanted[int(np.argmax(rows < 0))].as_py()
            raise QueryError(
                f"compare() got {int((rows < 0).sum()):,} uids that are no cells of this query, the first is {lost!r}."
            )
        both = rows[codes[rows] == 0] if code else rows[:0]
        if len(both):
            raise QueryError(
                f"{len(both):,} cells are in both sets, the first is {uids[int(both[0])].as_py()!r}; compare sets that share no cell."
            )
        codes[rows] = code
    if there is not None:
        codes[~there] = -1
    for code, name in enumerate(("first", "second")):
        if (n := int((codes == code).sum())) < 2:
            raise QueryError(f"The {name} set of compare() has {n} cells; a variance needs two at least.")
    return codes


def rank_features(
    blocks: Blocks, codes: NDArray[np.int8], measured: NDArray[np.int64], n_entries: int, options: CompareOptions
) -> FeatureRanks:
    """Compute the statistics of every feature from blocks of cells.

    `blocks` starts a pass over all cells; ranks of more than `ENTRIES` entries need several. `codes`, (n_cells,), is 0
    or 1 for the set of each cell, -1 for cells that take no part. `measured`, (2, n_features), is how many cells of
    each set measured each feature. At most `n_entries` values are not zero.
    """
    n_features = measured.shape[1]
    in_ranks = options.method == "wilcoxon"
    n_passes = max(1, -(-n_entries // ENTRIES)) if in_ranks else 1
    edges = np.linspace(0, n_features, n_passes + 1).astype(np.int64)
    passes = [_Pass(int(low), int(high), options) for low, high in pairwise(edges)]
    for one in passes:
        # The next block is read while this one is added.
        for rows, block in prefetch(blocks()):
            one.add(block, codes[rows])
        one.finish(measured)
    sums, squares, nonzero = (np.concatenate([getattr(one, name) for one in passes], axis=1) for name in _MOMENTS)
    tests = np.concatenate([one.tests for one in passes], axis=1) if in_ranks else None
    ranks = rank_moments(Moments(sums, squares, nonzero), measured, tests)
    return replace(ranks, normalized=any(one.normalized for one in passes))


@dataclass(frozen=True)
class Moments:
    """Sums of values, of their squares, and the number of values other than zero; (n_groups, n_features) float64 each."""

    sums: NDArray[np.float64]
    squares: NDArray[np.float64]
    nonzero: NDArray[np.float64]


def rank_moments(
    moments: Moments, measured: NDArray[np.int64], tests: NDArray[np.float64] | None = None
) -> FeatureRanks:
    """Compare two sets of cells by the sums of their values.

    `measured`, (2, n_features), is how many cells of each set measured each feature. `tests`, (2, n_features), has
    scores and p-values; None takes those of Welch's t-test.
    """
    sums, squares = moments.sums, moments.squares
    with np.errstate(invalid="ignore", divide="ignore"):
        means = sums / measured
        if tests is None:
            from scipy.stats import ttest_ind_from_stats

            spread = squares / measured - means**2
            # A difference within the rounding of the sums is that of a constant.
            spread[spread < 1e-13 * squares / measured] = 0
            spread = np.sqrt(spread * measured / (measured - 1))
            found = ttest_ind_from_stats(
                means[0], spread[0], measured[0], means[1], spread[1], measured[1], equal_var=False
            )
            scores, pvals = np.asarray(found.statistic), np.asarray(found.pvalue)
        else:
            scores, pvals = tests
        # As scanpy: means of logarithms, with a small number so that no ratio is 0 or infinite.
        ratio = (np.expm1(means[0]) + 1e-9) / (np.expm1(means[1]) + 1e-9)
        changes, fractions = np.log2(ratio), moments.nonzero / measured
    known = (measured >= 2).all(axis=0)
    # NaN means equal means without variance, for which scanpy has no difference.
    scores, pvals = np.where(np.isnan(scores), 0.0, scores), np.where(np.isnan(pvals), 1.0, pvals)
    scores[~known], pvals[~known] = np.nan, np.nan
    return FeatureRanks(scores, changes, pvals, fractions)


_MOMENTS = ("sums", "squares", "nonzero")


def logarithms(block: Block, *, normalize: bool | None) -> "tuple[csr_array, bool]":
    """Return the first layer of a block, and whether it was normalized.

    The values are log1p of counts per 10,000 in single precision, or as they are. The block must have all features of
    its cells; `normalize` is that of `CompareOptions`.
    """
    from scipy.sparse import csr_array

    values = next(iter(block.layers.values()))
    if isinstance(block, CsrBlock):
        matrix = csr_array((values, block.indices, block.indptr), (block.n_rows, block.n_cols))
    else:
        matrix = csr_array(values)
    if not (normalize or (normalize is None and matrix.dtype.kind in "iub")):
        return matrix, False
    # In single precision, step by step as `scanpy.pp.normalize_total` and `log1p`, so that equal values stay ties.
    sums = np.asarray(matrix.sum(axis=1)).ravel().astype(np.float32) / np.float32(TARGET_SUM)
    sums[sums == 0] = 1
    matrix = matrix.astype(np.float32)
    matrix.data /= np.repeat(sums, np.diff(matrix.indptr))
    np.log1p(matrix.data, out=matrix.data)
    return matrix, True


class _Pass:
    """Sums of the features ``[low, high)`` of both sets, and for ranks their values that are not zero."""

    def __init__(self, low: int, high: int, options: CompareOptions) -> None:
        self.low, self.high, self.options, self.keeps = low, high, options, options.method == "wilcoxon"
        self.sums, self.squares, self.nonzero = (np.zeros((2, high - low)) for _ in _MOMENTS)
        self.tests = np.zeros((2, 0))
        self.normalized = False
        self._values: tuple[list[Any], list[Any]] = ([], [])

    def add(self, block: Block, codes: NDArray[np.int8]) -> None:
        """Add the cells of a block."""
        matrix, normalized = logarithms(block, normalize=self.options.normalize)
        self.normalized |= normalized
        if self.high - self.low < matrix.shape[1]:
            matrix = matrix[:, self.low : self.high]
        if len(matrix.data) and not matrix.data.all():
            matrix.eliminate_zeros()
        for code in (0, 1):
            rows = np.flatnonzero(codes == code)
            if not len(rows):
                continue
            own: Any = matrix if len(rows) == len(codes) else matrix[rows]
            if self.keeps:
                own = own.tocsc()
                self._values[code].append((own.data, own.indptr))
            # The transpose of CSR shares its memory, so each sum is one pass over the entries.
            ones, wide = np.ones(own.shape[0]), own.astype(np.float64).T
            self.sums[code] += wide @ ones
            np.square(wide.data, out=wide.data)
            self.squares[code] += wide @ ones
            n = np.diff(own.indptr) if self.keeps else np.bincount(own.indices, minlength=self.high - self.low)
            self.nonzero[code] += n

    def finish(self, measured: NDArray[np.int64]) -> None:
        """Test the features by their ranks; the values are dropped."""
        if not self.keeps:
            return
        n = measured[:, self.low : self.high]
        starts = range(0, self.high - self.low, _PER_THREAD)
        parts = map_groups(lambda start: self._test(start, n[:, start : start + _PER_THREAD]), list(starts))
        self.tests = np.concatenate([self.tests, *parts], axis=1)
        self._values = ([], [])

    def _test(self, start: int, n: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return scores and p-values of some features."""
        from scipy.stats import norm

        n = n.astype(np.float64)
        sums, ties = np.zeros(n.shape[1]), np.ones(n.shape[1])
        for i in range(n.shape[1]):
            parts = [[v[p[start + i] : p[start + i + 1]] for v, p in self._values[code]] for code in (0, 1)]
            own, other = (np.sort(np.concatenate(of)) if of else np.zeros(0) for of in parts)
            n_own, n_other = n[:, i]
            sums[i] = _below(own, other, n_own, n_other) + n_own * (n_own + 1) / 2
            if self.options.tie_correct and n_own + n_other >= 2:
                both, n_both = np.sort(np.concatenate([own, other])), n_own + n_other
                edges = (
                    np.flatnonzero(np.concatenate([[True], both[1:] != both[:-1], [True]]))
                    if len(both)
                    else np.zeros(1)
                )
                sizes = np.append(np.diff(edges), n_both - len(both)).astype(np.float64)
                ties[i] = 1 - float((sizes**3 - sizes).sum()) / (n_both**3 - n_both)
        total = n[0] + n[1] + 1
        with np.errstate(invalid="ignore", divide="ignore"):
            scores = (sums - n[0] * total / 2) / np.sqrt(ties * n[0] * n[1] * total / 12)
        # A p-value of NaN is set to 1 later, as that of a score of 0.
        return np.stack([scores, 2 * norm.sf(np.abs(scores))])


def _below(own: NDArray[Any], other: NDArray[Any], n_own: float, n_other: float) -> float:
    """Count the pairs in which the value of `other` is smaller, equal ones as half; both are sorted and lack their zeros."""
    if len(own) > len(other):
        return n_own * n_other - _below(other, own, n_other, n_own)
    negative_own, negative_other = np.searchsorted(own, 0), np.searchsorted(other, 0)
    zeros_own, zeros_other = n_own - len(own), n_other - len(other)
    smaller = np.searchsorted(other, own).sum() + np.searchsorted(other, own, side="right").sum()
    pairs = smaller / 2 + (len(own) - negative_own) * zeros_other
    return float(pairs + zeros_own * (negative_other + zeros_other / 2))
