"""Which cells each batch of an epoch holds: pure functions of sizes, seeds, ranks and workers. No I/O, no state."""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import QueryError

Shuffle = Literal["full", "blocks"] | None
Even = Literal["pad", "drop"] | None
Sampler = Callable[[int, np.random.Generator], NDArray[np.int64]]
"""Called with the number of cells and a generator; returns the cells of one epoch, in order."""

EVERY, WEIGHTED, BALANCED, GROUPED, OWN = "every", "weighted", "balanced", "grouped", "own"


@dataclass(frozen=True)
class Strategy:
    """How the cells of an epoch are chosen.

    Parameters
    ----------
    kind : {"every", "weighted", "balanced", "grouped", "own"}
        A key of `STRATEGIES`.
    values : (n_cells,) array, or None
        Weights, or the group of each cell as a code (-1: the cell is left out).
    n_samples : int
        Cells of an epoch, where they are drawn.
    own : callable or None
        For ``"own"``.
    """

    kind: str = EVERY
    values: NDArray[Any] | None = None
    n_samples: int = 0
    own: Sampler | None = None

    def digest(self) -> str:
        """Return a short identifier of this strategy."""
        values = b"" if self.values is None else np.ascontiguousarray(self.values).tobytes()
        own = "" if self.own is None else getattr(self.own, "__qualname__", type(self.own).__qualname__)
        return f"{self.kind} {own}{blake2b(values, digest_size=8).hexdigest()} {self.n_samples}"


@dataclass(frozen=True)
class Share:
    """The share of an epoch of this process.

    Parameters
    ----------
    rank, world_size : int
        This process among those that train together.
    even : {"pad", "drop"} or None
        None shares out every cell once, so that ranks may differ by one cell; ``"pad"`` repeats the first cells of the epoch and
        ``"drop"`` leaves out the last, so that all ranks have as many.
    drop_last : bool
        Full batches only, the same number on every rank.
    """

    rank: int = 0
    world_size: int = 1
    even: Even = None
    drop_last: bool = False


@dataclass(frozen=True)
class Order:
    """All that determines the order of every epoch.

    Parameters
    ----------
    n_cells : int
        Cells to choose from.
    batch_size : int
        Cells of a batch.
    seed : int
        From 0 on.
    shuffle : {"full", "blocks"} or None
        A uniform permutation; or blocks of neighbours permuted and then shuffled within a buffer; or the cells as they come.
    block_size, buffer_size : int
        For ``"blocks"``: cells of a block, and about how many cells are shuffled with each other.
    strategy : Strategy
        Which cells.
    share : Share
        Whose.
    """

    n_cells: int
    batch_size: int
    seed: int = 0
    shuffle: Shuffle = "full"
    block_size: int = 64
    buffer_size: int = 4096
    strategy: Strategy = field(default_factory=Strategy)
    share: Share = field(default_factory=Share)


@dataclass(frozen=True)
class Batches:
    """Batches, one after the other.

    Parameters
    ----------
    rows : (n_rows,) int64
        Cells.
    bounds : (n_batches + 1,) int64
        Batch b is ``rows[bounds[b] : bounds[b + 1]]``.
    """

    rows: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        """Count the batches."""
        return len(self.bounds) - 1

    def span(self, first: int, last: int) -> "Batches":
        """Return the batches from `first` up to, but not including, `last`."""
        bounds = self.bounds[first : last + 1]
        return Batches(self.rows[bounds[0] : bounds[-1]], bounds - bounds[0])

    def take(self, numbers: NDArray[np.int64]) -> "Batches":
        """Return some batches, in the given order."""
        first, last = self.bounds[numbers], self.bounds[numbers + 1]
        bounds = np.zeros(len(numbers) + 1, np.int64)
        np.cumsum(last - first, out=bounds[1:])
        # Where the batch begins, minus where it begins in the output, plus the place in the output.
        at = np.repeat(first - bounds[:-1], last - first) + np.arange(bounds[-1])
        return Batches(self.rows[at], bounds)


def epoch_batches(order: Order, epoch: int) -> Batches:
    """Return the batches of one rank in one epoch.

    Parameters
    ----------
    order : Order
        Sizes and seeds.
    epoch : int
        From 0 on; each has an order of its own.

    Returns
    -------
    Batches
        The same on every machine for the same arguments. How many workers share them changes nothing: see `worker_batches`.

    Examples
    --------
    >>> epoch_batches(Order(n_cells=5, batch_size=2, shuffle=None), epoch=0)
    Batches(rows=array([0, 1, 2, 3, 4]), bounds=array([0, 2, 4, 5]))
    """
    share = order.share
    rows, bounds = STRATEGIES[order.strategy.kind](order, _generator(order.seed, epoch))
    if bounds is not None:
        batches = Batches(rows, bounds)
        return batches.take(_shared_out(len(batches), share)[: _most(len(batches), share)])
    own = rows[_shared_out(len(rows), share)]
    if order.shuffle == "blocks":
        # From 1: `SeedSequence` pads a key with zeros, so a last 0 would repeat the numbers drawn above.
        own = _shuffle_within(own, order.buffer_size, _generator(order.seed, epoch, 1 + share.rank))
    if share.drop_last:
        # Shares may differ by one cell, so all are cut to the full batches of the smallest.
        own = own[: _most(len(rows), share) // order.batch_size * order.batch_size]
    return Batches(own, np.append(np.arange(0, len(own), order.batch_size), len(own)))


def count_batches(order: Order) -> int:
    """Count the batches of one rank; every epoch has as many.

    Examples
    --------
    >>> count_batches(Order(n_cells=5, batch_size=2)), count_batches(Order(5, 2, share=Share(drop_last=True)))
    (3, 2)
    """
    share, strategy = order.share, order.strategy
    if strategy.kind == GROUPED:
        n = len(_cut_groups(_group_sizes(strategy), order)) - 1
        return min(len(_shared_out(n, share)), _most(n, share))
    n = order.n_cells if strategy.kind == EVERY else strategy.n_samples
    if share.drop_last:
        return _most(n, share) // order.batch_size
    return -(-len(_shared_out(n, share)) // order.batch_size)


def worker_batches(n_batches: int, start: int, worker: int, n_workers: int) -> NDArray[np.int64]:
    """Assign the batches of a rank to its workers in turn.

    A DataLoader asks its workers in turn, so the batches come in the same order whatever the number of workers.

    Returns
    -------
    (k,) int64
        Numbers of the worker's batches.

    Examples
    --------
    >>> worker_batches(7, start=2, worker=1, n_workers=2)
    array([3, 5])
    """
    return np.arange(start + worker, n_batches, n_workers)


def read_units(batches: Batches, n_rows: int) -> list[tuple[int, int]]:
    """Join neighbouring batches into reads of about `n_rows` cells, at least one batch each.

    Returns
    -------
    list of (int, int)
        Half-open ranges of batches.

    Examples
    --------
    >>> read_units(Batches(np.arange(10), np.array([0, 3, 6, 9, 10])), 6)
    [(0, 2), (2, 4)]
    """
    unit = batches.bounds[:-1] // n_rows
    edges = [0, *(np.flatnonzero(np.diff(unit)) + 1).tolist(), len(batches)]
    return [(first, last) for first, last in pairwise(edges) if last > first]


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def _shared_out(n: int, share: Share) -> NDArray[np.int64]:
    """Return the share of a rank of n items."""
    rank, ranks = share.rank, share.world_size
    if share.even == "pad":
        each = -(-n // ranks)
        return np.arange(rank * each, (rank + 1) * each) % max(1, n)
    if share.even == "drop":
        each = n // ranks
        return np.arange(rank * each, (rank + 1) * each)
    return np.arange(n * rank // ranks, n * (rank + 1) // ranks)


def _most(n: int, share: Share) -> int:
    """Return how many of n items every rank has if all must have the same number; else n."""
    if not share.drop_last:
        return n
    return -(-n // share.world_size) if share.even == "pad" else n // share.world_size


def _every_cell(order: Order, rng: np.random.Generator) -> tuple[NDArray[np.int64], None]:
    n = order.n_cells
    if order.shuffle == "full":
        return rng.permutation(n), None
    if order.shuffle == "blocks":
        starts = rng.permutation(-(-n // order.block_size)) * order.block_size
        lengths = np.minimum(starts + order.block_size, n) - starts
        ends = np.cumsum(lengths)
        # As in `Batches.take`, for blocks; only the last block of the cells may be shorter.
        return np.repeat(starts - (ends - lengths), lengths) + np.arange(n), None
    return np.arange(n), None


def _shuffle_within(rows: NDArray[np.int64], buffer_size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Shuffle each run of `buffer_size` cells."""
    for start in range(0, len(rows), buffer_size):
        rng.shuffle(rows[start : start + buffer_size])
    return rows


def _draw_weighted(order: Order, rng: np.random.Generator) -> tuple[NDArray[np.int64], None]:
    """Draw with replacement, each cell with a chance in proportion to its weight."""
    assert order.strategy.values is not None
    total = np.cumsum(order.strategy.values, dtype=np.float64)
    # sorted draws walk through the sums in order, which is several times faster than finding them at random
    drawn = np.sort(rng.random(order.strategy.n_samples)) * total[-1]
    # A product may round up to `total[-1]`, for which the search is beyond the last cell that has a weight.
    last = np.flatnonzero(order.strategy.values)[-1]
    rows = np.minimum(np.searchsorted(total, drawn, side="right"), last).astype(np.int64)
    rng.shuffle(rows)
    return rows, None


def _draw_balanced(order: Order, rng: np.random.Generator) -> tuple[NDArray[np.int64], None]:
    """Draw with replacement: a group, all with the same chance, and one of its cells."""
    assert order.strategy.values is not None
    codes = order.strategy.values
    # Code -1, cells without a value, comes first and is cut off.
    cells = np.argsort(codes, kind="stable")[int((codes < 0).sum()) :]
    sizes = _group_sizes(order.strategy)
    starts, held = np.cumsum(sizes) - sizes, np.flatnonzero(sizes)
    group = held[rng.integers(0, len(held), order.strategy.n_samples)]
    return cells[starts[group] + rng.integers(0, sizes[group])], None


def _grouped(order: Order, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Create batches of one group each, every cell once, and shuffle the batches."""
    assert order.strategy.values is not None
    codes = order.strategy.values
    cells = rng.permutation(order.n_cells) if order.shuffle else np.arange(order.n_cells)
    cells = cells[np.argsort(codes[cells], kind="stable")][int((codes < 0).sum()) :]
    sizes = _group_sizes(order.strategy)
    if order.share.drop_last:
        place = np.arange(len(cells)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        cells = cells[place < np.repeat(sizes - sizes % order.batch_size, sizes)]
    batches = Batches(cells, _cut_groups(sizes, order))
    if order.shuffle:
        batches = batches.take(rng.permutation(len(batches)))
    return batches.rows, batches.bounds


def _ask_caller(order: Order, rng: np.random.Generator) -> tuple[NDArray[np.int64], None]:
    """Call a user-defined sampler."""
    assert order.strategy.own is not None
    rows = np.asarray(order.strategy.own(order.n_cells, rng))
    wanted = order.strategy.n_samples
    fits = rows.dtype.kind in "iu" and rows.shape == (wanted,)
    if not fits or (wanted and not 0 <= int(rows.min()) <= int(rows.max()) < order.n_cells):
        raise QueryError(
            f"The sampler gave {rows.dtype} of shape {rows.shape}; expected {wanted:,} whole numbers from 0 to "
            f"{order.n_cells - 1:,}. Pass n_samples=... where an epoch is not one cell for each cell."
        )
    return rows.astype(np.int64), None


def _group_sizes(strategy: Strategy) -> NDArray[np.int64]:
    assert strategy.values is not None
    return np.bincount(strategy.values[strategy.values >= 0], minlength=1).astype(np.int64)


def _cut_groups(sizes: NDArray[np.int64], order: Order) -> NDArray[np.int64]:
    """Split each group into batches, and return the bounds of all."""
    size = order.batch_size
    kept = sizes - sizes % size if order.share.drop_last else sizes
    counts = -(-kept // size)
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.append(np.repeat(np.cumsum(kept) - kept, counts) + place * size, kept.sum())


STRATEGIES: dict[str, Callable[[Order, np.random.Generator], tuple[NDArray[np.int64], NDArray[np.int64] | None]]] = {
    EVERY: _every_cell,
    WEIGHTED: _draw_weighted,
    BALANCED: _draw_balanced,
    GROUPED: _grouped,
    OWN: _ask_caller,
}
"""Sampling strategies: each returns rows, and the bounds of batches if they differ in size."""
