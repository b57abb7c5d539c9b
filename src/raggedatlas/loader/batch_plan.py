"""Planning of batches: a query and options become a `BatchPlan` and an `Order`; every error that needs no values is raised here."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import QueryError
from raggedatlas.loader.batch import BatchMetadata, ModalityMetadata
from raggedatlas.loader.options import LoaderOptions, ReadOptions
from raggedatlas.loader.order import BALANCED, GROUPED, OWN, WEIGHTED, Order, Share, Strategy, count_batches
from raggedatlas.model.frames import facts_of
from raggedatlas.query.cells import cell_columns, metadata_names
from raggedatlas.query.plan import plan_read
from raggedatlas.query.query import Query
from raggedatlas.query.read_plan import SpacePlan

_ALWAYS = ("uid", "cell_name", "dataset")


@dataclass(frozen=True, eq=False)
class ObsColumn:
    """One metadata column of all cells.

    Parameters
    ----------
    values : (n_cells,) array
        Numbers; integers with missing values are float64 with NaN. Or int32 codes, -1 where the value is missing.
    categories : (n_categories,) object array, or None
        What the codes mean; None for numbers.
    """

    values: NDArray[Any]
    categories: NDArray[np.object_] | None = None


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """All that is needed to make batches, without the catalog; picklable for threads and processes.

    Parameters
    ----------
    spaces : mapping of str to SpacePlan
        What is read.
    uids : (n_cells,) bytes
        Cell uids.
    columns : mapping of str to ObsColumn
        Metadata.
    facts : BatchMetadata
        What all batches share.
    options : ReadOptions
        What values come as.
    """

    spaces: Mapping[str, SpacePlan]
    uids: NDArray[np.bytes_]
    columns: Mapping[str, ObsColumn]
    facts: BatchMetadata
    options: ReadOptions

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return len(self.uids)


def plan_batches(query: Query, options: ReadOptions, extra: str | None = None) -> tuple[BatchPlan, ObsColumn | None]:
    """Plan the batches of a query.

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
    # Fixed-width bytes are one block of memory, which is indexed for batches and hashed as it is.
    uids = np.array(plan.obs.column("uid").cast(pa.binary()).to_pylist(), dtype=np.bytes_)
    spaces = {**plan.spaces, **plan.results}
    facts = _facts(spaces, uids, columns)
    return (
        BatchPlan(spaces, uids, columns, facts, options),
        obs_column(plan.obs, shown[extra]) if extra else None,
    )


def plan_order(plan: BatchPlan, options: LoaderOptions, column: ObsColumn | None) -> Order:
    """Derive the order of epochs from the options.

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
    # All NaN become one value, whose code is turned into -1: the cell is left out.
    known, codes = np.unique(column.values, return_inverse=True)
    return np.where(np.isnan(known)[codes], -1, codes) if known.dtype.kind == "f" else codes


def _names_in_table(query: Query, table: pa.Table) -> dict[str, str]:
    """Map each requested name to its column in a plan's `obs`, which uses the names of the files."""
    known = cell_columns(query.catalog)
    asked = query.spec.obs or ()
    # A plan has these columns first, then the asked ones in order, then those of a search, so `strict=False`.
    shown = dict(zip(metadata_names(known, asked), table.column_names[len(_ALWAYS) :], strict=False))
    return {name: name if name in _ALWAYS else shown[known.stored(name)] for name in asked}


def _facts(
    spaces: Mapping[str, SpacePlan], uids: NDArray[np.bytes_], columns: Mapping[str, ObsColumn]
) -> BatchMetadata:
    categories = {name: column.categories for name, column in columns.items() if column.categories is not None}
    modalities = {
        name: ModalityMetadata(
            space.features, space.layouts, np.vstack([space.measured, np.zeros((1, len(space.features)), bool)])
        )
        for name, space in spaces.items()
    }
    # The key stands for cells, columns and codes: a loader refuses a state that was taken with another key.
    key = hashlib.blake2b(uids.tobytes(), digest_size=16)
    for name, space in spaces.items():
        parts: Sequence[object] = (name, space.layers, space.n_cols, space.nan, *space.features.tolist())
        key.update(repr(parts).encode())
    key.update(repr({name: known.tolist() for name, known in categories.items()}).encode())
    return BatchMetadata(key.hexdigest(), modalities, categories)


def plan_part(
    plan: BatchPlan,
    order: Order,
    options: LoaderOptions,
    rows: NDArray[np.int64],
    *,
    drawn: bool,
    share: Share | None,
) -> tuple[BatchPlan, Order, LoaderOptions]:
    """Plan batches of a subset of the cells; what is read, and how, is unchanged.

    Parameters
    ----------
    plan, order, options : BatchPlan, Order, LoaderOptions
        Of all the cells.
    rows : (k,) int64
        Positions among them.
    drawn : bool
        Whether cells are drawn as in the full loader; else each comes once, in the order of `rows`.
    share : Share or None
        Rank and world size of the part; None keeps those of the full loader.

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
    """Return the plan of some of its cells."""
    # A part has its own key, as its positions count other cells; features and codes are shared.
    key = hashlib.blake2b(plan.facts.key.encode() + np.ascontiguousarray(rows).tobytes(), digest_size=16).hexdigest()
    columns = {name: replace(column, values=column.values[rows]) for name, column in plan.columns.items()}
    spaces = {name: space.take(rows) for name, space in plan.spaces.items()}
    facts = replace(plan.facts, key=key)
    return replace(plan, spaces=spaces, uids=plan.uids[rows], columns=columns, facts=facts)


def obs_column(table: pa.Table, name: str, categories: Sequence[Any] | None = None) -> ObsColumn:
    """Turn a column of a plan's `obs` into an array.

    Parameters
    ----------
    table : pyarrow.Table
        Metadata with facts.
    name : str
        A column of it.
    categories : sequence or None
        The categories, in the order of their codes. None takes those that the atlas knows for a categorical column, all of them
        and in their order, else the values that occur, sorted.

    Raises
    ------
    QueryError
        For a column of lists or structs, or categories that repeat or do not fit.

    Examples
    --------
    >>> column = obs_column(pa.table({"donor": ["b", None, "a"]}), "donor")
    >>> column.values, column.categories
    (array([ 1, -1,  0], dtype=int32), array(['a', 'b'], dtype=object))
    """
    column = table.column(name)
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_nested(kind):
        raise QueryError(
            f"The metadata column {name!r} holds {kind}; batches carry columns of numbers, text, truth values or times."
        )
    facts = facts_of(table.schema.field(name))
    if categories is None and facts is not None and facts.categories is not None:
        categories = facts.categories
    if categories is None and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return ObsColumn(_numbers(column.cast(kind)))
    known = _known(column.cast(kind), kind) if categories is None else _given(name, kind, categories)
    codes = pc.index_in(column.cast(kind), value_set=known).fill_null(-1)
    return ObsColumn(codes.to_numpy().astype(np.int32), np.array(known.to_pylist(), dtype=object))


def obs_columns(
    table: pa.Table, names: Mapping[str, str], categories: Mapping[str, Sequence[Any]]
) -> dict[str, ObsColumn]:
    """Turn several columns into arrays: asked name -> column, for asked name -> name in the table."""
    unknown = sorted(set(categories) - set(names))
    if unknown:
        raise QueryError(f"categories names {unknown}, which obs={list(names)} does not ask for.")
    return {asked: obs_column(table, name, categories.get(asked)) for asked, name in names.items()}


def _numbers(column: pa.ChunkedArray) -> NDArray[Any]:
    if column.null_count and pa.types.is_integer(column.type):
        # Unsafe, because a safe cast refuses integers beyond 2**53.
        column = column.cast(pa.float64(), safe=False)
    if column.null_count:
        column = column.fill_null(float("nan"))
    values: NDArray[Any] = np.ascontiguousarray(column.to_numpy())
    return values


def _known(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    if pa.types.is_boolean(kind):
        # Both, so that codes do not depend on which of them occur.
        return pa.array([False, True])
    distinct = pc.unique(column).drop_null()
    return distinct.take(pc.sort_indices(distinct))


def _given(name: str, kind: pa.DataType, categories: Sequence[Any]) -> pa.Array:
    if isinstance(categories, str) or len(set(categories)) != len(categories):
        raise QueryError(f"The categories of {name!r} must be a list without duplicates, not {categories!r}.")
    try:
        return pa.array(list(categories)).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise QueryError(
            f"The column {name!r} holds {kind}; the categories {list(categories)!r} do not fit."
        ) from error
