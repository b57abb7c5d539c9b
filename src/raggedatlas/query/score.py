"""Scores of gene sets per cell: weighted means, areas under recovery curves, and t-values of linear models, over what was measured."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.features import Registry
from raggedatlas.errors import ArgumentError, QueryError
from raggedatlas.formats.gene_sets import read_gmt
from raggedatlas.model.arguments import Progress, brief
from raggedatlas.model.batch import Batch
from raggedatlas.model.choices import Unmatched
from raggedatlas.model.frames import DATASET
from raggedatlas.query.compare import logarithms
from raggedatlas.query.compute import kept_features, map_batches, plan_layer, with_all_features
from raggedatlas.query.plan import apply_identity
from raggedatlas.query.read import ReadPlan
from raggedatlas.query.spec import QuerySpec
from raggedatlas.store.executors import Workers
from raggedatlas.store.filters import calling_level
from raggedatlas.store.location import Address, with_options

if TYPE_CHECKING:
    from scipy.sparse import csc_array, csr_array

SCORE_METHODS = ("mean", "aucell", "ulm")
TOP = 0.05
"""Share of the features of a cell that `aucell` looks at."""

_BATCH = 1024
_MOST_NAMED = 5


@dataclass(frozen=True)
class ScoreOptions:
    """How sets are scored; see `Query.score`."""

    method: str = "mean"
    normalize: bool | None = None
    min_features: int = 5
    top: int | float | None = None
    unknown: Unmatched = "error"

    def __post_init__(self) -> None:
        """Check that the options belong together."""
        if self.method not in SCORE_METHODS:
            raise QueryError(f"score knows the methods {SCORE_METHODS}, not {self.method!r}.")
        if self.min_features < 1:
            raise QueryError(f"min_features={self.min_features}: a score needs one measured feature at least.")
        if self.method == "aucell":
            if self.normalize is not None:
                raise ArgumentError(
                    "normalize does not change ranks within a cell, by which method='aucell' scores; leave it out."
                )
        elif self.top is not None:
            raise ArgumentError(f"top={self.top} belongs to method='aucell'; {self.method!r} uses all features.")
        share = isinstance(self.top, float)
        if self.top is not None and not (0 < self.top <= 1 if share else self.top >= 2):
            raise QueryError(
                f"top={self.top}: name a share of the features above 0 and up to 1, such as 0.05, or their number, from 2 on."
            )


def score_batch(
    batch: Batch, *, names: Sequence[str], weights: "csc_array", kept: NDArray[np.bool_], options: ScoreOptions
) -> dict[str, NDArray[np.float64]]:
    """Return the score of every set for each cell of a batch, (n_cells,) float64 each, NaN where it is missing.

    `weights`, (n_features, n_sets), are those of the columns of the batch in the sets called `names`; `kept`,
    (n_features,), tells which columns count.
    """
    (part,) = batch.spaces.values()
    layouts, layout = np.unique(part.layout_uids, return_inverse=True)
    measured = np.stack([part.measured[uid] & kept for uid in layouts.tolist()])
    normalize = False if options.method == "aucell" else options.normalize
    values, _ = logarithms(part.block, normalize=normalize)
    values = values.astype(np.float64)
    # What does not count takes no part in sums and ranks; features that were not measured have no entries.
    values.data[~kept[values.indices]] = 0
    values.eliminate_zeros()
    with np.errstate(invalid="ignore", divide="ignore"):
        if options.method == "mean":
            # By the sum of the sizes of the weights of measured members.
            scores = (values @ weights).toarray() / _summed(measured, abs(weights))[layout]
        elif options.method == "aucell":
            scores = _areas(values, weights, measured, layout, options.top)
        else:
            scores = _slopes(values, weights, measured, layout)
    few = count_members(measured, weights) < options.min_features
    scores[few[layout]] = np.nan
    return {name: np.ascontiguousarray(scores[:, i]) for i, name in enumerate(names)}


def _areas(
    values: "csr_array",
    weights: "csc_array",
    measured: NDArray[np.bool_],
    layout: NDArray[np.int64],
    top: int | float | None,
) -> NDArray[np.float64]:
    """Return areas under recovery curves, relative to the largest that is possible."""
    from scipy.sparse import csr_array

    n = measured.sum(axis=1)
    top = TOP if top is None else top
    n_top = np.ceil(top * n) if isinstance(top, float) else np.full(len(n), top)
    n_top = np.minimum(np.maximum(n_top, 2), n).astype(np.int64)
    shares, zero_share, varies = rank_shares(values, n[layout], n_top[layout])
    ranked = csr_array((shares, values.indices, values.indptr), values.shape)
    members = count_members(measured, weights)
    # Entries have what they are above the zeros, which all measured members have.
    areas = (ranked @ abs(weights.sign())).toarray() + zero_share[:, None] * members[layout]
    found: NDArray[np.float64] = areas / _area_of_first(members, n_top[:, None])[layout]
    found[~varies] = np.nan
    return found


def _slopes(
    values: "csr_array", weights: "csc_array", measured: NDArray[np.bool_], layout: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return t-values of the slopes of values on weights."""
    n = measured.sum(axis=1).astype(np.float64)[layout]
    ones, squared = np.ones(values.shape[1]), values.copy()
    np.square(squared.data, out=squared.data)
    sums, squares = values @ ones, squared @ ones
    spread = squares - sums**2 / n
    # A difference within the rounding of the sums is that of a constant.
    spread[spread < 1e-13 * squares] = np.nan
    weight_sums = _summed(measured, weights)
    squared_weights = _summed(measured, weights.power(2))
    weight_spread = squared_weights - weight_sums**2 / measured.sum(axis=1)[:, None]
    weight_spread[weight_spread < 1e-13 * squared_weights] = np.nan
    shared = (values @ weights).toarray() - sums[:, None] * weight_sums[layout] / n[:, None]
    correlation = np.clip(shared / np.sqrt(spread[:, None] * weight_spread[layout]), -1, 1)
    freedom = np.where(n > 2, n - 2, np.nan)
    found: NDArray[np.float64] = correlation * np.sqrt(freedom[:, None] / (1 - correlation**2))
    return found


def count_members(measured: NDArray[np.bool_], weights: "csc_array") -> NDArray[np.int64]:
    """Count the features of each set that each layout measured, (n_layouts, n_sets) int64."""
    return _summed(measured, abs(weights.sign())).astype(np.int64)


def _summed(measured: NDArray[np.bool_], weights: "csc_array") -> NDArray[np.float64]:
    """Sum weights over the features that each layout measured, (n_layouts, n_sets)."""
    found: NDArray[np.float64] = (weights.T @ measured.T.astype(np.float64)).T
    return found


def _area_of_first(n: NDArray[np.int64], n_top: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the area under a curve that gains one at each of the first n ranks, up to the rank `n_top`."""
    n = np.minimum(n, n_top)
    found: NDArray[np.int64] = n * n_top - n * (n + 1) // 2
    return found


def rank_shares(
    values: "csr_array", n_measured: NDArray[np.int64], n_top: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return what each entry adds to the area under a recovery curve.

    A feature of rank r adds ``max(n_top - r, 0)``. Equal values share the mean of what their ranks add, which is what
    ranks in random order give on average, so the result does not depend on the order of the features.

    `values`, (n_cells, n_features), have no explicit zeros; `n_measured` and `n_top`, (n_cells,), are the numbers of
    features that were ranked and that are looked at. Returns what each entry adds beyond a zero, (n_entries,); what
    each zero adds, (n_cells,); and whether a cell has more than one value and no NaN, (n_cells,).
    """
    n_cells, data = values.shape[0], values.data
    row = np.repeat(np.arange(n_cells), np.diff(values.indptr))
    n_entries = np.diff(values.indptr).astype(np.int64)
    n_positive = np.bincount(row[data > 0], minlength=n_cells)
    n_zero = n_measured - n_entries
    area_before = _area_of_first(n_positive, n_top)
    n_up_to_zero = n_positive + n_zero
    zero_share = np.zeros(n_cells)
    some = n_zero > 0
    zero_share[some] = (_area_of_first(n_up_to_zero, n_top) - area_before)[some] / n_zero[some]
    order = np.lexsort((-data, row))
    ranked, of = data[order], row[order]
    # Runs of one value in one cell, and the ranks before and after each; negative values come after the zeros.
    first = np.ones(len(order), bool)
    first[1:] = (ranked[1:] != ranked[:-1]) | (of[1:] != of[:-1])
    starts: NDArray[np.int64] = np.flatnonzero(first)
    stops = np.append(starts[1:], len(order))
    own = of[starts] if len(starts) else np.zeros(0, np.int64)
    shift = np.where(ranked[starts] < 0, n_zero[own], 0) - values.indptr[own].astype(np.int64)
    added = _area_of_first(stops + shift, n_top[own]) - _area_of_first(starts + shift, n_top[own])
    shares = np.empty(len(order))
    shares[order] = np.repeat(added / (stops - starts) - zero_share[own], stops - starts)
    n_runs = np.bincount(own, minlength=n_cells)
    broken = np.bincount(row[np.isnan(data)], minlength=n_cells) > 0
    return shares, zero_share, (n_runs + (n_zero > 0) > 1) & ~broken


def score(
    spec: QuerySpec,
    catalog: Catalog,
    sets: Mapping[str, Any] | Address,
    options: ScoreOptions,
    executor: Executor | Workers | None = None,
    progress: Progress | None = None,
) -> pa.Table:
    """Score sets of features for each cell; see `Query.score`."""
    given = sets if isinstance(sets, Mapping) else read_gmt(with_options(sets, catalog.location.storage_options))
    members = {name: weigh_members(name, given[name], options) for name in given}
    if not members:
        raise QueryError("score() got no set; give a mapping such as {'B cell': ['CD79A', 'MS4A1']}.")
    plan = plan_layer(replace(with_all_features(spec), obs=()), catalog, "score")
    space = plan.single()
    if not space.space.has_features:
        raise QueryError(f"The columns of {space.name!r} have no names, so no set can be of them.")
    registry, _ = apply_identity(spec, catalog, space.space.name)
    found = find_sets(members, registry, options.unknown)
    kept = kept_features(spec, catalog, space)
    weights = _weights_of(found, space.features)
    _warn_of_few(plan, found, count_members(space.measured & kept, weights), options)
    schema = pa.schema([(name, pa.float64()) for name in found])
    scores = partial(score_batch, names=[*found], weights=weights, kept=kept, options=options)
    return map_batches(plan, scores, _BATCH, schema, executor, catalog.location, progress)


def weigh_members(name: object, given: Any, options: ScoreOptions) -> dict[str, float]:  # noqa: ANN401  (what a user gives)
    """Return the weight of each name of a set; of names alone, 1."""
    if not isinstance(name, str) or name in {"", "uid"}:
        raise ArgumentError(
            f"score() got a set called {brief(name)}; sets have names, other than 'uid', the column of the cells."
        )
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if isinstance(given, str) or not all(isinstance(one, str) for one in names):
        raise ArgumentError(
            f"The set {name!r} is {brief(given)}; a set is a list of names, or a mapping of names to weights."
        )
    if not names:
        raise QueryError(f"The set {name!r} has no features; name some, or leave it out.")
    if not isinstance(given, Mapping):
        return dict.fromkeys(map(str, names), 1.0)
    try:
        weights = {str(one): float(given[one]) for one in names}
    except (TypeError, ValueError):
        raise ArgumentError(f"The weights of the set {name!r} are no numbers, such as {{'CD79A': 1.5}}.") from None
    wrong = [one for one, weight in weights.items() if weight == 0 or not np.isfinite(weight)]
    if wrong:
        raise QueryError(
            f"In the set {name!r}, {wrong[0]!r} has the weight {weights[wrong[0]]}; weights are finite and not 0. Leave out what has none."
        )
    if options.method == "aucell" and any(weight != 1 for weight in weights.values()):
        raise QueryError(f"The set {name!r} has weights, which method='aucell' does not know; give names alone.")
    return weights


def find_sets(
    given: Mapping[str, Mapping[str, float]], registry: Registry, unknown: Unmatched
) -> dict[str, dict[str, float]]:
    """Find the weights of the features that the names of sets mean, by uid; with `unknown` "skip", names that the atlas does not know are left out with a warning."""
    names = [*dict.fromkeys(name for members in given.values() for name in members)]
    if unknown == "skip" and (lost := {*registry.resolve(names).unknown}):
        shown = ", ".join(repr(name) for name in [name for name in names if name in lost][:_MOST_NAMED])
        warnings.warn(
            f"Left out of the sets, as the atlas does not know them: {len(lost):,} of {len(names):,} names, {shown}{', ...' * (len(lost) > _MOST_NAMED)}.",
            stacklevel=calling_level(),
        )
        names = [name for name in names if name not in lost]
    uid_of = dict(zip(names, registry.require(names, once=False), strict=True))
    found = {}
    for set_name, members in given.items():
        weights: dict[str, float] = {}
        for name, weight in members.items():
            uid = uid_of.get(name)
            # Several names of one feature are one member.
            if uid is not None and weights.setdefault(uid, weight) != weight:
                raise QueryError(
                    f"In the set {set_name!r}, {name!r} and another name mean one feature, with the weights {weight} and {weights[uid]}; name it once."
                )
        found[set_name] = weights
    return found


def _weights_of(sets: Mapping[str, Mapping[str, float]], features: NDArray[np.object_]) -> "csc_array":
    """Return the weights of columns in sets, (n_features, n_sets); features that the query leaves out have no column."""
    from scipy.sparse import csc_array

    column = {uid: i for i, uid in enumerate(features.tolist())}
    rows, columns, weights = list[int](), list[int](), list[float]()
    for number, one in enumerate(sets.values()):
        there = [uid for uid in one if uid in column]
        rows += [column[uid] for uid in there]
        columns += [number] * len(there)
        weights += [one[uid] for uid in there]
    return csc_array((weights, (rows, columns)), shape=(len(features), len(sets)), dtype=np.float64)


def _warn_of_few(
    plan: ReadPlan, sets: Mapping[str, Mapping[str, float]], n_members: NDArray[np.int64], options: ScoreOptions
) -> None:
    """Warn of the sets of which some cells have no score, because their dataset measured too few of its features."""
    cells = np.bincount(plan.single().layout_code, minlength=len(n_members))
    few = (n_members < options.min_features) & (cells > 0)[:, None]
    lacking = np.flatnonzero(few.any(axis=0)).tolist()
    if not lacking:
        return
    names, shown = [*sets], []
    for number in lacking[:_MOST_NAMED]:
        at = int(np.argmax(few[plan.single().layout_code, number]))
        layout = plan.single().layout_code[at]
        dataset = plan.obs.column(DATASET)[at].as_py()
        shown.append(
            f"{names[number]!r} of {int(cells[few[:, number]].sum()):,} cells (dataset {dataset!r} measured {n_members[layout, number]} of its "
            f"{len(sets[names[number]])})"
        )
    more = f"; and {len(lacking) - _MOST_NAMED:,} more sets" if len(lacking) > _MOST_NAMED else ""
    warnings.warn(
        f"Scores are missing where fewer than min_features={options.min_features} features of a set were measured: {'; '.join(shown)}{more}.",
        stacklevel=calling_level(),
    )
