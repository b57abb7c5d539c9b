"""Query and options -> what batches are made of, and in which order; every refusal that needs no values is made here."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import QueryError
from raggedatlas.loader.batch import BatchFacts, SpaceFacts
from raggedatlas.loader.columns import ObsColumn, obs_column, obs_columns
from raggedatlas.loader.making import BatchPlan
from raggedatlas.loader.options import LoaderOptions, ReadOptions
from raggedatlas.loader.order import BALANCED, GROUPED, OWN, WEIGHTED, Order, Share, Strategy, count_batches
from raggedatlas.query.parts import SpacePlan
from raggedatlas.query.plan import plan_read
from raggedatlas.query.query import Query
from raggedatlas.query.rows import known_columns, metadata_names

_ALWAYS = ("uid", "cell_name", "dataset")


def plan_batches(query: Query, options: ReadOptions, extra: str | None = None) -> tuple[BatchPlan, ObsColumn | None]:
    """Make a query a plan for batches.

    Parameters
    ----------
    query : Query
        Which cells, features and layers.
    options : ReadOptions
        What is read of them.
    extra : str or None
        A metadata column that is needed once, and not in batches.

    Returns
    -------
    (BatchPlan, ObsColumn or None)
        The plan, and the extra column.

    Raises
    ------
    QueryError, FeatureError
        For what the query or the options cannot have; for a query without cells.
    """
    query = query.layers(list(options.layers)) if options.layers else query
    query = query.features(list(options.features)) if options.features else query
    query = query.with_results(list(options.results)) if options.results else query
    asked = tuple(dict.fromkeys((query.spec.obs or ()) if options.obs is None else options.obs))
    query = query.obs([*asked, *([extra] if extra else [])])
    plan = plan_read(query.spec, query.catalog)
    if not plan.n_cells:
        raise QueryError(f"{query!r} has no cells with {list(plan.spaces)}; there is nothing to train on.")
    shown = _names_in_table(query, plan.obs)
    columns = obs_columns(plan.obs, {name: shown[name] for name in asked}, options.categories)
    uids = np.array(plan.obs.column("uid").cast(pa.binary()).to_pylist(), dtype=np.bytes_)
    spaces = {**plan.spaces, **plan.results}
    facts = _facts(spaces, uids, columns)
    return (
        BatchPlan(spaces, uids, columns, facts, options),
        obs_column(plan.obs, shown[extra]) if extra else None,
    )


def plan_order(plan: BatchPlan, options: LoaderOptions, column: ObsColumn | None) -> Order:
    """Decide what the order of every epoch follows from.

    Parameters
    ----------
    plan : BatchPlan
        For its number of cells.
    options : LoaderOptions
        Checked.
    column : ObsColumn or None
        The metadata column that the strategy needs.

    Raises
    ------
    QueryError
        For weights that are none, a column without values, or choices that leave no batch.
    """
    order = Order(
        plan.n_cells,
        options.batch_size,
        options.seed,
        options.shuffle,
        options.block_size,
        options.buffer_size,
        _strategy(plan.n_cells, options, column),
        Share(options.rank, options.world_size, options.even, options.drop_last),
    )
    if not count_batches(order):
        raise QueryError(
            f"Loader: {plan.n_cells:,} cells over {options.world_size} ranks in batches of {options.batch_size:,} "
            f"(even={options.even!r}, drop_last={options.drop_last}) leave no batch for rank {options.rank}; "
            "take a smaller batch_size, or even='pad' without drop_last."
        )
    return order


def _strategy(n_cells: int, options: LoaderOptions, column: ObsColumn | None) -> Strategy:
    n_samples = options.n_samples or n_cells
    if options.sampler is not None:
        return Strategy(OWN, None, n_samples, options.sampler)
    if options.weights is not None:
        return Strategy(WEIGHTED, _weights(n_cells, options, column), n_samples)
    if column is None:
        return Strategy()
    codes = _group_codes(column)
    if not (codes >= 0).any():
        raise QueryError(f"Loader: the column {options.strategy_column!r} has no value in any of {n_cells:,} cells.")
    return Strategy(GROUPED if options.group else BALANCED, codes, n_samples)


def _weights(n_cells: int, options: LoaderOptions, column: ObsColumn | None) -> NDArray[np.float64]:
    if column is not None and column.categories is not None:
        raise QueryError(f"Loader: weights={options.weights!r} names a column that holds no numbers.")
    try:
        weights = np.asarray(options.weights if column is None else column.values, np.float64)
    except (TypeError, ValueError) as error:
        raise QueryError(
            "Loader takes weights as one number for each cell, or the name of a column of numbers."
        ) from error
    if weights.shape != (n_cells,):
        raise QueryError(
            f"Loader got weights of shape {weights.shape} for {n_cells:,} cells; give one weight for each cell, in the query's order."
        )
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
        raise QueryError("Loader: weights are finite numbers from 0 on, at least one of them above 0.")
    return weights


def _group_codes(column: ObsColumn) -> NDArray[np.int64]:
    if column.categories is not None:
        return column.values.astype(np.int64)
    known, codes = np.unique(column.values, return_inverse=True)
    return np.where(np.isnan(known)[codes], -1, codes) if known.dtype.kind == "f" else codes


def _names_in_table(query: Query, table: pa.Table) -> dict[str, str]:
    """Say which column of a plan's `obs` each asked name is; columns stand there under the names of their files."""
    known = known_columns(query.catalog)
    asked = query.spec.obs or ()
    shown = dict(zip(metadata_names(known, asked), table.column_names[len(_ALWAYS) :], strict=False))
    return {name: name if name in _ALWAYS else shown[known.stored(name)] for name in asked}


def _facts(spaces: Mapping[str, SpacePlan], uids: NDArray[np.bytes_], columns: Mapping[str, ObsColumn]) -> BatchFacts:
    categories = {name: column.categories for name, column in columns.items() if column.categories is not None}
    told = {
        name: SpaceFacts(
            space.features, space.layouts, np.vstack([space.measured, np.zeros((1, len(space.features)), bool)])
        )
        for name, space in spaces.items()
    }
    key = hashlib.blake2b(uids.tobytes(), digest_size=16)
    for name, space in spaces.items():
        parts: Sequence[object] = (name, space.layers, space.n_cols, space.nan, *space.features.tolist())
        key.update(repr(parts).encode())
    key.update(repr({name: known.tolist() for name, known in categories.items()}).encode())
    return BatchFacts(key.hexdigest(), told, categories)


def plan_part(
    plan: BatchPlan,
    order: Order,
    options: LoaderOptions,
    rows: NDArray[np.int64],
    *,
    drawn: bool,
    share: Share | None,
) -> tuple[BatchPlan, Order, LoaderOptions]:
    """Plan batches of some of the cells of a plan; what is read, and how, stays as it is.

    Parameters
    ----------
    plan, order, options : BatchPlan, Order, LoaderOptions
        Of all the cells.
    rows : (k,) int64
        Positions among them.
    drawn : bool
        Whether the cells are drawn as in the whole; else each is given once, in the order of `rows`.
    share : Share or None
        Which rank of how many the part is for; None keeps that of the whole.

    Returns
    -------
    (BatchPlan, Order, LoaderOptions)

    Raises
    ------
    QueryError
        If no batch is left.
    """
    strategy = Strategy()
    if drawn:
        values = order.strategy.values
        strategy = replace(
            order.strategy,
            values=None if values is None else values[rows],
            n_samples=options.n_samples or len(rows),
        )
    share = share or order.share
    own = replace(order, n_cells=len(rows), shuffle=order.shuffle if drawn else None, strategy=strategy, share=share)
    if not len(rows) or not count_batches(own):
        raise QueryError(
            f"{len(rows):,} of {plan.n_cells:,} cells in batches of {order.batch_size:,} leave no batch for rank {share.rank} of "
            f"{share.world_size} (even={share.even!r}, drop_last={share.drop_last}); take a smaller batch_size."
        )
    options = replace(options, rank=share.rank, world_size=share.world_size, even=share.even, drop_last=share.drop_last)
    return _take(plan, rows), own, options


def _take(plan: BatchPlan, rows: NDArray[np.int64]) -> BatchPlan:
    """Keep some cells of a plan."""
    key = hashlib.blake2b(plan.facts.key.encode() + np.ascontiguousarray(rows).tobytes(), digest_size=16).hexdigest()
    columns = {name: replace(column, values=column.values[rows]) for name, column in plan.columns.items()}
    spaces = {name: space.take(rows) for name, space in plan.spaces.items()}
    facts = replace(plan.facts, key=key)
    return replace(plan, spaces=spaces, uids=plan.uids[rows], columns=columns, facts=facts)
