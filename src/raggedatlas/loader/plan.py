"""Options and planning: a query and options become a `BatchPlan` and an `Order`; every error that needs no values is raised here."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.catalog.features import read_ahead
from raggedatlas.errors import ArgumentError, QueryError
from raggedatlas.loader.batch import BatchMetadata
from raggedatlas.loader.cells import CellRequest, ObsColumn, PlannedCells, cells_in_memory, stream_cells
from raggedatlas.loader.linked import chunk_blocks, pack_linked, warn_of_slow_reads
from raggedatlas.loader.order import (
    BALANCED,
    GROUPED,
    OWN,
    WEIGHTED,
    Even,
    Order,
    Sampler,
    Share,
    Shuffle,
    Strategy,
    count_batches,
)
from raggedatlas.model.choices import OutputFormat, refuse_unused
from raggedatlas.model.frames import DATASET
from raggedatlas.query.cells import BLOCK_CELLS, cell_columns
from raggedatlas.query.query import Query
from raggedatlas.query.read import SpacePlan
from raggedatlas.query.split import Split
from raggedatlas.store.runtime import scratch_array


class ReadChoices(TypedDict, total=False):
    """Keyword arguments of `Loader` and `CellDataset` about what is read, all optional.

    Attributes
    ----------
    layers, features : sequence of str
        As `Query.layers` and `Query.features`, which they replace.
    categories : mapping of str to sequence
        Column -> its categories, in the order of their codes; so that a training and a test query number them alike. Values that are
        not among them become -1, with a warning that names them. By default the values that occur, in the atlas' order of categories.
    dtype : str or numpy dtype, or None
        Of the values; None is ``float32`` for dense arrays and tensors, and the layers' own for ``"csr"``.
    sort : bool
        Sort the columns of every sparse row; they need not be else, but sparse tensors always are.
    buffers : int
        Buffers kept for reuse once their batch is released; 0 allocates new memory each time.
    results : sequence of str
        As `Query.with_results`: results of models, which are in ``batch.spaces`` by name.
    pack : bool
        Copy the values of linked datasets into the atlas first, as `RaggedAtlas.materialize` does, and read them from there; the snapshot
        stays linked.
    """

    layers: Sequence[str]
    features: Sequence[str]
    categories: Mapping[str, Sequence[Any]]
    dtype: Any
    sort: bool
    buffers: int
    results: Sequence[str]
    pack: bool


class IterationChoices(ReadChoices, total=False):
    """Keyword arguments of `Loader` and `SetLoader` about processes, threads and devices, all optional.

    Attributes
    ----------
    rank, world_size : int
        This process among those that train together.
    even : {"pad", "drop"} or None
        None gives every cell, or batch of sets, to exactly one rank, so that ranks may differ by one; ``"pad"`` and ``"drop"`` give every
        rank the same number of batches, as distributed training needs.
    drop_last : bool
        Whole batches only, on every rank the same number.
    threads : int or None
        Threads that each read whole batches; 0 reads in the caller. None is one per core, at most 4, and 0 in a worker.
    prefetch : int or None
        Batches read ahead; None is one read for each thread. Memory is bounded by it.
    device : str or None
        For tensors: ``"cuda"`` moves batches through pinned memory on a stream of their own.
    pin_memory : bool
        For tensors: put them into pinned memory.
    """

    rank: int
    world_size: int
    even: Even
    drop_last: bool
    threads: int | None
    prefetch: int | None
    device: str | None
    pin_memory: bool


class LoaderChoices(IterationChoices, total=False):
    """Keyword arguments of `Loader`, all optional; at most one of `weights`, `balance`, `group` and `sampler`.

    Attributes
    ----------
    weights : (n_cells,) array, or str
        Draw cells with replacement in proportion to a weight, or to a numeric column.
    balance : str
        Draw with replacement so that every value of this column is as likely; cells without a value are left out.
    group : str
        Batches of cells that share their value of this column; cells without a value are left out.
    sampler : callable
        A strategy of your own: called with the number of cells and a seeded generator, it returns the cells of an epoch.
        Equal arguments must give equal cells, and spawned workers need one that can be pickled.
    n_samples : int or None
        Cells of an epoch where they are drawn; None is as many as there are.
    block_size, buffer_size : int
        For ``shuffle="blocks"``: cells of a block, and how many cells are read and shuffled together. Blocks of linked compressed files
        end where a chunk of the file does, and have at least about `block_size` cells.
    """

    weights: Any
    balance: str
    group: str
    sampler: Sampler
    n_samples: int | None
    block_size: int
    buffer_size: int


@dataclass(frozen=True)
class ReadOptions:
    """`ReadChoices` with every default filled in."""

    obs: tuple[str, ...] | None = None  # metadata columns; None takes those that the query names
    as_: OutputFormat = "csr"
    layers: Sequence[str] = ()
    features: Sequence[str] = ()
    categories: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    dtype: Any = None
    sort: bool = False
    device: str | None = None
    pin_memory: bool = False
    buffers: int = 8
    results: Sequence[str] = ()
    pack: bool = False

    @property
    def tensors(self) -> bool:
        """Whether batches hold tensors."""
        return self.as_ in {"torch", "torch-dense"}

    @property
    def pins(self) -> bool:
        """Whether tensors are put into pinned memory."""
        return self.pin_memory or (self.device is not None and self.device.startswith("cuda"))

    @property
    def value_dtype(self) -> np.dtype[Any] | None:
        """The dtype of the values; None for the layers' own."""
        asked = self.dtype
        if asked is None and self.as_ != "csr":
            asked = np.float32
        dtype: np.dtype[Any] | None = None if asked is None else np.dtype(asked)
        return dtype


@dataclass(frozen=True)
class LoaderOptions:
    """What of `LoaderChoices` is not about reading, with every default filled in."""

    batch_size: int = 512
    shuffle: Shuffle = "full"
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    even: Even = None
    drop_last: bool = False
    weights: Any = None
    balance: str | None = None
    group: str | None = None
    sampler: Sampler | None = None
    n_samples: int | None = None
    block_size: int = 64
    buffer_size: int = 4096
    threads: int | None = None
    prefetch: int | None = None

    @property
    def strategy_column(self) -> str | None:
        """The metadata column that the strategy needs."""
        return self.weights if isinstance(self.weights, str) else self.balance or self.group


def split_choices(call: str, choices: Mapping[str, Any]) -> tuple[ReadOptions, LoaderOptions]:
    """Check keyword arguments, whose types `checked` has compared with the signature, and fill in the defaults."""
    reading, walking = set(ReadOptions.__dataclass_fields__), set(LoaderOptions.__dataclass_fields__)
    if call == "CellDataset":
        reading, walking = reading - {"device", "pin_memory"}, set()
    elif call == "SetLoader":
        walking &= {*IterationChoices.__annotations__, "seed"}
    unknown = sorted(set(choices) - reading - walking)
    if unknown:
        raise QueryError(f"{call} does not know {unknown}; it takes {sorted(reading | walking)}.")
    read = ReadOptions(**{k: v for k, v in choices.items() if k in reading})
    walk = LoaderOptions(**{k: v for k, v in choices.items() if k in walking})
    # A text is a sequence too, and would be taken for a list of letters.
    for name in ("obs", "layers", "features", "results"):
        if isinstance(getattr(read, name), str):
            raise QueryError(f"{call} takes {name} as a list of names, not {getattr(read, name)!r}.")
    given: dict[str, int | None] = {"buffers": read.buffers} | {
        name: getattr(walk, name) for name in _LEAST if name != "buffers"
    }
    for name, value in given.items():
        if value is not None and value < _LEAST[name]:
            raise QueryError(f"{call} takes {name} as a whole number from {_LEAST[name]} on, not {value!r}.")
    if (read.device is not None or read.pin_memory) and not read.tensors:
        raise ArgumentError(
            f"{call}: device and pin_memory are for tensors, not as_={read.as_!r}; ask for as_='torch'."
        )
    refuse_unused(call, f"with as_={read.as_!r}, only with 'csr'", sort=read.sort and read.as_ != "csr")
    try:
        kind = np.dtype(read.dtype).kind if read.dtype is not None else "f"
    except TypeError as error:
        raise QueryError(f"{call} does not know the dtype {read.dtype!r}; e.g. 'float32'.") from error
    if kind not in "fiu":
        raise QueryError(f"{call} gives numbers, not {read.dtype!r}; e.g. dtype='float32'.")
    if walk.rank >= walk.world_size:
        raise QueryError(f"{call}: rank {walk.rank} is not one of {walk.world_size} ranks; they are numbered from 0.")
    ways = [name for name in ("weights", "balance", "group", "sampler") if getattr(walk, name) is not None]
    if len(ways) > 1:
        raise QueryError(f"Loader takes one of {ways}, not {len(ways)}: each decides alone which cells are chosen.")
    if ways and walk.shuffle == "blocks":
        raise QueryError(f"Loader: shuffle='blocks' shuffles every cell; with {ways[0]} leave it out.")
    if ways and ways[0] in {"weights", "balance"} and walk.shuffle is None:
        raise QueryError(f"Loader: {ways[0]} draws by chance, which shuffle=None excludes; leave it out.")
    refuse_unused(
        "Loader",
        f"with shuffle={walk.shuffle!r}, only with 'blocks'",
        block_size=walk.shuffle != "blocks" and walk.block_size != LoaderOptions.block_size,
        buffer_size=walk.shuffle != "blocks" and walk.buffer_size != LoaderOptions.buffer_size,
    )
    refuse_unused(call, "with threads=0", prefetch=walk.threads == 0 and walk.prefetch is not None)
    # An epoch of groups has every cell with a value once, so its length is given.
    if walk.n_samples is not None and (not ways or ways[0] == "group"):
        raise ArgumentError("Loader: n_samples is for weights, balance and sampler; other epochs hold every cell once.")
    return read, walk


_LEAST = {
    "buffers": 0, "batch_size": 1, "seed": 0, "rank": 0, "world_size": 1, "block_size": 1, "buffer_size": 1, "n_samples": 1, "threads": 0,
    "prefetch": 1,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """All that is needed to make batches, without the catalog; picklable for threads and processes."""

    cells: PlannedCells  # all cells of the query
    options: ReadOptions
    rows: NDArray[Any] | None = None  # (n_cells,): the plan's cells among `cells`; None means all, in their order
    key: str = ""  # identifies the cells; empty for the key of `cells`

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return self.cells.n if self.rows is None else len(self.rows)

    @property
    def spaces(self) -> Mapping[str, SpacePlan]:
        """What is read; their cells are those of `cells`, see `at`."""
        return self.cells.spaces

    @cached_property
    def facts(self) -> BatchMetadata:
        """What all batches share."""
        return replace(self.cells.facts, key=self.key) if self.key else self.cells.facts

    @cached_property
    def uids(self) -> NDArray[np.bytes_]:
        """Cell uids, (n_cells,) bytes."""
        return self.cells.uids if self.rows is None else self.cells.uids[self.rows]

    @cached_property
    def columns(self) -> Mapping[str, ObsColumn]:
        """Metadata of the cells."""
        if self.rows is None:
            return self.cells.columns
        return {name: replace(column, values=column.values[self.rows]) for name, column in self.cells.columns.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is derived, which may be as large as the cells."""
        return {"cells": self.cells, "options": self.options, "rows": self.rows, "key": self.key}

    def at(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where cells of the plan are among all cells, (k,) int64."""
        return rows if self.rows is None else self.rows[rows].astype(np.int64)

    def part(self, rows: NDArray[np.int64]) -> "BatchPlan":
        """Return the plan of some of its cells."""
        # A part has its own key, as its positions count other cells; features and codes are shared.
        key = hashlib.blake2b(self.facts.key.encode(), digest_size=16)
        for start in range(0, len(rows), BLOCK_CELLS):
            key.update(np.ascontiguousarray(rows[start : start + BLOCK_CELLS], np.int64).tobytes())
        # No wider than needed: they are held for each cell.
        chosen = rows if self.rows is None else self.rows[rows]
        narrow = chosen.astype(np.min_scalar_type(max(self.cells.n - 1, 0)))
        return replace(self, rows=narrow, key=key.hexdigest())


def plan_batches(query: Query, options: ReadOptions, extra: str | None = None) -> tuple[BatchPlan, ObsColumn | None]:
    """Plan the batches of a query.

    `extra` is a metadata column that is needed once, and not in batches; it is returned beside the plan. A query
    without cells is refused.
    """
    read_ahead(query.catalog)
    query = query.layers(list(options.layers)) if options.layers else query
    query = query.features(list(options.features)) if options.features else query
    query = query.with_results(list(options.results)) if options.results else query
    asked = tuple(dict.fromkeys((query.spec.obs or ()) if options.obs is None else options.obs))
    unknown = sorted(set(options.categories) - set(asked))
    if unknown:
        raise QueryError(f"categories names {unknown}, which obs={list(asked)} does not ask for.")
    query = query.obs([*asked, *([extra] if extra else [])])
    columns = cell_columns(query.catalog)
    # What the cell table calls them.
    stored = {
        name: name if name in {"uid", "cell_name", DATASET} else columns.stored(name)
        for name in [*asked, *([] if extra is None else [extra])]
    }
    names = {name: stored[name] for name in asked}
    request = CellRequest(query, names, options.categories, None if extra is None else stored[extra])
    streamed = stream_cells(request)
    cells = cells_in_memory(request) if streamed is None else streamed
    if not cells.n:
        raise QueryError(f"{query!r} has no cells with {list(cells.spaces)}; there is nothing to train on.")
    cells = pack_linked(cells) if options.pack else cells
    return BatchPlan(cells, options), cells.extra


def part_rows(plan: BatchPlan, split: Split, part: str) -> NDArray[np.int64]:
    """Return the cells of a plan that are in a part of a split, ascending, (k,) int64."""
    found = []
    for start in range(0, plan.n_cells, BLOCK_CELLS):
        uids = plan.uids[start : start + BLOCK_CELLS]
        inside = split.contains(pa.array(np.asarray(uids), pa.binary()).cast(pa.string()), part)
        found.append(start + np.flatnonzero(inside))
    return np.concatenate(found) if found else np.empty(0, np.int64)


def plan_order(plan: BatchPlan, options: LoaderOptions, column: ObsColumn | None) -> Order:
    """Derive the order of epochs from checked options; `column` is the metadata column that the strategy needs.

    Raises `QueryError` for unusable weights, a column without values, and choices that leave this rank no batch.
    """
    n_cells, n_samples = plan.n_cells, options.n_samples or plan.n_cells
    strategy = Strategy()
    if options.sampler is not None:
        strategy = Strategy(OWN, None, n_samples, options.sampler)
    elif options.weights is not None:
        strategy = Strategy(WEIGHTED, _weights(n_cells, options, column), n_samples)
    elif column is not None:
        strategy = Strategy(GROUPED if options.group else BALANCED, _group_codes(column), n_samples)
        if not strategy.sizes.any():
            raise QueryError(
                f"Loader: the column {options.strategy_column!r} has no value in any of {n_cells:,} cells."
            )
    share = Share(options.rank, options.world_size, options.even, options.drop_last)
    blocks = chunk_blocks(plan.cells, None, options.block_size) if options.shuffle == "blocks" else None
    warn_of_slow_reads(plan.cells, random=options.shuffle == "full")
    order = Order(
        n_cells, options.batch_size, options.seed, options.shuffle, options.block_size, options.buffer_size, strategy, share, blocks
    )  # fmt: skip
    if not count_batches(order):
        raise QueryError(
            f"Loader: {plan.n_cells:,} cells over {options.world_size} ranks in batches of {options.batch_size:,} "
            f"(even={options.even!r}, drop_last={options.drop_last}) leave no batch for rank {options.rank}; "
            "take a smaller batch_size, or even='pad' without drop_last."
        )
    return order


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
    parts = (weights[start : start + BLOCK_CELLS] for start in range(0, n_cells, BLOCK_CELLS))
    sound, any_above = True, False
    for part in parts:
        sound = sound and bool((np.isfinite(part) & (part >= 0)).all())
        any_above = any_above or bool(part.any())
    if not sound or not any_above:
        raise QueryError("Loader: weights are finite numbers from 0 on, at least one of them above 0.")
    return weights


def _group_codes(column: ObsColumn) -> NDArray[Any]:
    if column.categories is not None:
        return column.values
    known, codes = distinct_numbers(column.values), scratch_array((len(column.values),), np.int32)
    for start in range(0, len(codes), BLOCK_CELLS):
        codes[start : start + BLOCK_CELLS] = number_codes(column.values[start : start + BLOCK_CELLS], known)
    return codes


def distinct_numbers(values: NDArray[Any]) -> NDArray[Any]:
    """Return which numbers there are, ascending and without NaN, looking at one block after the other."""
    known = np.empty(0, values.dtype)
    for start in range(0, len(values), BLOCK_CELLS):
        known = np.unique(np.concatenate([known, values[start : start + BLOCK_CELLS]]))
    return known[~np.isnan(known)] if known.dtype.kind == "f" else known


def number_codes(values: NDArray[Any], known: NDArray[Any]) -> NDArray[np.int64]:
    """Return where numbers are among the distinct ones; -1 for NaN, so that the cell is left out."""
    missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)
    return np.where(missing, -1, np.searchsorted(known, values))


def strategy_values(plan: BatchPlan, options: LoaderOptions) -> NDArray[Any] | None:
    """Return the values of a strategy that a column gives, from a plan whose cells still have it; None if no column gives any."""
    column = plan.cells.extra
    if column is None:
        return None
    values = _group_codes(column) if options.weights is None else _weights(plan.cells.n, options, column)
    return values if plan.rows is None else values[plan.rows]
