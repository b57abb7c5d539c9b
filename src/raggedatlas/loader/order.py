"""Which cells each batch of an epoch holds: pure functions of sizes, seeds, ranks and workers. No state, and no I/O but a scratch file."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import QueryError
from raggedatlas.store.native import GOOD, library
from raggedatlas.store.runtime import scratch_array

Shuffle = Literal["full", "blocks"] | None
Even = Literal["pad", "drop"] | None
Sampler = Callable[[int, np.random.Generator], NDArray[np.int64]]
"""Called with the number of cells and a generator; returns the cells of one epoch, in order."""

_BLOCK = 2**16
"""Cells whose values are looked at together."""

EVERY, WEIGHTED, BALANCED, GROUPED, OWN = "every", "weighted", "balanced", "grouped", "own"
VALUED = (WEIGHTED, BALANCED, GROUPED)
"""Strategies by a value of each cell."""


@dataclass(frozen=True)
class Strategy:
    """How the cells of an epoch are chosen."""

    kind: str = EVERY  # a key of `STRATEGIES`
    # (n_cells,): weights, or the code of each cell's group; cells of code -1 are left out
    values: NDArray[Any] | None = None
    n_samples: int = 0  # cells of an epoch, where they are drawn
    own: Sampler | None = None  # for "own"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without what is derived from the values, which is as large as these."""
        return Strategy, (self.kind, self.values, self.n_samples, self.own)

    @cached_property
    def cumulated(self) -> NDArray[np.float64]:
        """Sum of the weights up to and including each cell, (n_cells,)."""
        assert self.values is not None
        made, total = scratch_array((len(self.values),), np.float64), np.zeros(1)
        for start, values in self._blocks(np.float64):
            # From the sum before, so that sums are those over all cells to the last bit.
            sums = np.cumsum(np.concatenate([total, values]))
            made[start : start + len(values)] = sums[1:]
            total = sums[-1:]
        return made

    @cached_property
    def last_weighted(self) -> int:
        """The last cell with a weight above 0."""
        return max(
            start + int(np.flatnonzero(values)[-1]) for start, values in self._blocks(np.float64) if values.any()
        )

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Number of cells of each group, (n_groups,)."""
        sizes = np.zeros(1, np.int64)
        for _, codes in self._blocks(np.int64):
            here = np.bincount(codes[codes >= 0], minlength=len(sizes))
            here[: len(sizes)] += sizes
            sizes = here
        return sizes

    @cached_property
    def by_group(self) -> NDArray[Any]:
        """Cells that have a group, sorted by group."""
        assert self.values is not None
        sizes = self.sizes
        made = scratch_array((int(sizes.sum()),), np.uint32 if len(self.values) <= 2**32 else np.int64)
        place = np.cumsum(sizes) - sizes
        for start, codes in self._blocks(np.int64):
            # Code -1, cells without a value, comes first and is cut off.
            cells = np.argsort(codes, kind="stable")[int((codes < 0).sum()) :]
            groups, first, counts = np.unique(codes[cells], return_index=True, return_counts=True)
            made[np.repeat(place[groups] - first, counts) + np.arange(len(cells))] = start + cells
            place[groups] += counts
        return made

    @cached_property
    def _values_hash(self) -> str:
        digest = blake2b(digest_size=8)
        for _, values in self._blocks(np.float64 if self.kind == WEIGHTED else np.int64):
            digest.update(values.tobytes())
        return digest.hexdigest()

    def _blocks(self, dtype: type[np.generic]) -> Iterator[tuple[int, NDArray[Any]]]:
        """Iterate over the values, which may be mapped from a file, with the number of the first cell of each block."""
        values = np.empty(0) if self.values is None else self.values
        for start in range(0, len(values), _BLOCK):
            yield start, np.ascontiguousarray(values[start : start + _BLOCK], dtype)

    def digest(self) -> str:
        """Return a short identifier of this strategy."""
        own = "" if self.own is None else getattr(self.own, "__qualname__", type(self.own).__qualname__)
        return f"{self.kind} {own}{self._values_hash} {self.n_samples}"


@dataclass(frozen=True)
class Share:
    """The share of an epoch of this process, `rank` of `world_size`.

    With `even` None every cell is shared out once, so that ranks may differ by one cell; "pad" repeats the first cells
    of the epoch and "drop" leaves out the last, so that all ranks have as many.
    """

    rank: int = 0
    world_size: int = 1
    even: Even = None
    drop_last: bool = False  # full batches only, the same number on every rank


@dataclass(frozen=True)
class Order:
    """All that determines the order of every epoch.

    `shuffle` "full" is a uniform permutation; "blocks" permutes blocks of neighbours and then shuffles cells within a
    buffer; None takes the cells as they come. `block_size`, `buffer_size` (about how many cells are shuffled with each
    other) and `blocks` are for "blocks".
    """

    n_cells: int  # to choose from
    batch_size: int  # cells of a batch; with `sets`, sets
    seed: int = 0  # from 0 on
    shuffle: Shuffle = "full"
    block_size: int = 64
    buffer_size: int = 4096
    strategy: Strategy = field(default_factory=Strategy)
    share: Share = field(default_factory=Share)
    # (n_blocks + 1,): where each block begins and the last ends, if they differ in size
    blocks: NDArray[np.int64] | None = field(default=None, compare=False)
    sets: "StratumSets | NeighborSets | None" = None  # in place of `strategy` and `shuffle`

    def digest(self) -> str:
        """Return a short identifier of which cells are chosen."""
        return self.strategy.digest() if self.sets is None else self.sets.digest()


@dataclass(frozen=True)
class Batches:
    """Batches, one after the other."""

    rows: NDArray[np.int64]  # (n_rows,): cells
    bounds: NDArray[np.int64]  # (n_batches + 1,): batch b is `rows[bounds[b] : bounds[b + 1]]`

    def __len__(self) -> int:
        """Count the batches."""
        return len(self.bounds) - 1


@dataclass(frozen=True)
class LazyBatches:
    """The batches of one rank in one epoch; their cells are computed when they are taken."""

    # (n_batches + 1,): where each batch begins and the last ends, among the positions of the rank
    bounds: NDArray[np.int64]
    locate: Callable[[NDArray[np.int64]], NDArray[np.int64]]  # returns the cells of positions, both (k,)

    def __len__(self) -> int:
        """Count the batches."""
        return len(self.bounds) - 1

    def take(self, numbers: NDArray[np.int64]) -> Batches:
        """Return some batches, in the given order."""
        first, last = self.bounds[numbers], self.bounds[numbers + 1]
        if len(numbers) and (first[1:] == last[:-1]).all():
            # Neighbours, as one process alone takes them.
            bounds = np.append(first, last[-1:])
            return Batches(self.locate(np.arange(bounds[0], bounds[-1])), bounds - bounds[0])
        bounds = np.append(0, np.cumsum(last - first))
        # Where the batch begins, minus where it begins in the output, plus the place in the output.
        positions = np.repeat(first - bounds[:-1], last - first) + np.arange(bounds[-1])
        return Batches(self.locate(positions), bounds)


def epoch_batches(order: Order, epoch: int) -> LazyBatches:
    """Return the batches of one rank in one epoch.

    They are the same on every machine for the same arguments, and each epoch, from 0 on, has an order of its own. How
    many workers share them changes nothing: see `worker_batches`.
    """
    share = order.share
    drawn = (
        STRATEGIES[order.strategy.kind](order, epoch)
        if order.sets is None
        else order.sets.draw(order.seed, epoch, drop_last=share.drop_last)
    )
    if drawn.bounds is not None:
        numbers = _shared_out(np.arange(count_batches(order)), len(drawn.bounds) - 1, share)
        bounds, place = _reordered(drawn.bounds, numbers)
        return LazyBatches(bounds, lambda own: drawn.locate(place(own)))
    n = _own_count(drawn.n, share)
    if share.drop_last:
        # Shares may differ by one cell, so all are cut to the full batches of the smallest.
        n = _most(drawn.n, share) // order.batch_size * order.batch_size
    within = _shuffle_within(order, epoch, n) if order.shuffle == "blocks" else lambda own: own
    bounds = np.append(np.arange(0, n, order.batch_size), n)
    return LazyBatches(bounds, lambda own: drawn.locate(_shared_out(within(own), drawn.n, share)))


def count_batches(order: Order) -> int:
    """Count the batches of one rank; every epoch has as many."""
    share, strategy = order.share, order.strategy
    if order.sets is not None or strategy.kind == GROUPED:
        if order.sets is None:
            n = len(_cut_groups(strategy.sizes, order)) - 1
        else:
            n, per_batch = order.sets.total, order.sets.per_batch
            n = n // per_batch if share.drop_last else -(-n // per_batch)
        return min(_own_count(n, share), _most(n, share))
    n = order.n_cells if strategy.kind == EVERY else strategy.n_samples
    if share.drop_last:
        return _most(n, share) // order.batch_size
    return -(-_own_count(n, share) // order.batch_size)


def worker_batches(n_batches: int, start: int, worker: int, n_workers: int) -> NDArray[np.int64]:
    """Assign the batches of a rank to its workers in turn, and return the numbers of one worker's batches, (k,).

    A DataLoader asks its workers in turn, so the batches come in the same order whatever the number of workers.
    `start` is the first batch that has not been taken.
    """
    return np.arange(start + worker, n_batches, n_workers)


def read_units(sizes: NDArray[np.int64], n_rows: int) -> NDArray[np.int64]:
    """Join neighbouring batches into reads of about `n_rows` cells, at least one batch each.

    `sizes` are the cells of each batch. Of the result, (n_reads + 1,), read r takes the batches from ``edges[r]`` up
    to, but not including, ``edges[r + 1]``.
    """
    unit = (np.cumsum(sizes) - sizes) // n_rows
    return np.concatenate([[0], np.flatnonzero(np.diff(unit)) + 1, [len(sizes)]])[not len(sizes) :]


_TABLE = 2**16
"""Up to this many items a permutation is a table (512 KiB at most), exactly uniform; longer ones are computed."""

_ROUNDS = 6
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Factors of the finalizer of SplitMix64."""


class Permutation:
    """A pseudorandom permutation of ``range(n)`` that is evaluated where it is needed and takes no memory.

    An unbalanced Feistel network on the smallest power of two that holds `n`; a value beyond `n` is permuted again
    until it is below (cycle walking), which takes less than two turns on average. See ``ra_permute`` of the compiled
    library. Up to `_TABLE` items it is a table. `key` is what it depends on, such as seed and epoch.
    """

    def __init__(self, n: int, *key: int) -> None:
        self.n = n
        rng = _generator(*key)
        self._table = rng.permutation(n) if n <= _TABLE else None
        self._keys = rng.integers(0, 2**64, _ROUNDS, np.uint64)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the items at some positions, (k,) int64."""
        items: NDArray[np.int64]
        if self._table is not None:
            items = self._table[positions]
        else:
            items = np.array(positions, np.int64)
            status = library().ra_permute(items, len(items), self.n, self._keys, len(self._keys))
            # Positions are those of batches, so none is outside.
            assert status == GOOD
        return items


def _mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Hash numbers; the upper bits depend on all bits of number and key."""
    mixed = (values ^ key) * _MIX[0]
    mixed ^= mixed >> np.uint64(31)
    mixed *= _MIX[1]
    return mixed


def pair_keys(*key: int) -> Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.uint64]]:
    """Return a function that gives a key for each pair of numbers, (k,) uint64."""
    keys = _generator(*key).integers(0, 2**64, 2, np.uint64)

    def made(items: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.uint64]:
        mixed = _mix(items.astype(np.uint64), keys[0])
        mixed ^= mixed >> np.uint64(32)
        mixed ^= others.astype(np.uint64)
        return _mix(mixed, keys[1])

    return made


def uniform(positions: NDArray[np.int64], *key: int) -> NDArray[np.float64]:
    """Return a number from 0 up to, but not including, 1 for each position, independent of the others."""
    keys = _generator(*key).integers(0, 2**64, 2, np.uint64)
    mixed = _mix(positions.astype(np.uint64), keys[0])
    bits = _mix(mixed ^ mixed >> np.uint64(32), keys[1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def _own_count(n: int, share: Share) -> int:
    """Count the items of a rank of n items."""
    rank, ranks = share.rank, share.world_size
    if share.even is None:
        return n * (rank + 1) // ranks - n * rank // ranks
    return -(-n // ranks) if share.even == "pad" else n // ranks


def _shared_out(own: NDArray[np.int64], n: int, share: Share) -> NDArray[np.int64]:
    """Return which of n items a rank has at its positions."""
    if share.even is None:
        # Where the counts of the ranks before end: see `_own_count`.
        return own + n * share.rank // share.world_size
    return (own + share.rank * _own_count(n, share)) % max(1, n)


def _most(n: int, share: Share) -> int:
    """Return how many of n items every rank has if all must have the same number; else n."""
    if not share.drop_last:
        return n
    return -(-n // share.world_size) if share.even == "pad" else n // share.world_size


@dataclass(frozen=True)
class Draw:
    """The cells of an epoch, of all ranks."""

    n: int  # number of cells; with `bounds`, their last
    locate: Callable[[NDArray[np.int64]], NDArray[np.int64]]  # returns the cells at some positions, both (k,)
    bounds: NDArray[np.int64] | None = None  # (n_batches + 1,): bounds of batches, where they differ in size


def _every_cell(order: Order, epoch: int) -> Draw:
    n, size = order.n_cells, order.block_size
    if order.shuffle is None:
        return Draw(n, lambda positions: positions)
    if order.shuffle == "full":
        return Draw(n, Permutation(n, order.seed, epoch))
    if order.blocks is not None:
        blocks = Permutation(len(order.blocks) - 1, order.seed, epoch)(np.arange(len(order.blocks) - 1))
        return Draw(n, _reordered(order.blocks, blocks)[1])
    # The last block may be shorter; it gets a random place among the permuted full ones.
    permuted, short = Permutation(n // size, order.seed, epoch), n % size
    place = int(_generator(order.seed, epoch, 0, 1).integers(0, n // size + 1)) * size

    def locate(positions: NDArray[np.int64]) -> NDArray[np.int64]:
        inside = (positions >= place) & (positions < place + short)
        among_full = np.where(positions >= place + short, positions - short, positions)
        rows = positions - place + (n - short)
        full = ~inside
        rows[full] = permuted(among_full[full] // size) * size + among_full[full] % size
        return rows

    return Draw(n, locate)


def _reordered(
    bounds: NDArray[np.int64], numbers: NDArray[np.int64]
) -> tuple[NDArray[np.int64], Callable[[NDArray[np.int64]], NDArray[np.int64]]]:
    """Put some runs of positions, whose bounds are given, after each other by their numbers; return their new bounds, and a function from new positions to old."""
    begins, starts = bounds[numbers], np.zeros(len(numbers) + 1, np.int64)
    np.cumsum(bounds[numbers + 1] - begins, out=starts[1:])

    def locate(positions: NDArray[np.int64]) -> NDArray[np.int64]:
        run = np.searchsorted(starts, positions, side="right") - 1
        found: NDArray[np.int64] = begins[run] + positions - starts[run]
        return found

    return starts, locate


def _shuffle_within(order: Order, epoch: int, n: int) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Shuffle the positions of a rank within each run of `buffer_size`."""
    size = order.buffer_size

    @lru_cache(8)
    def permutation(buffer: int) -> Permutation:
        # From 1: `SeedSequence` pads a key with zeros, so a last 0 would repeat the numbers drawn above.
        return Permutation(min(size, n - buffer * size), order.seed, epoch, 1 + order.share.rank, 1 + buffer)

    def shuffled(own: NDArray[np.int64]) -> NDArray[np.int64]:
        buffers, moved = own // size, own.copy()
        for buffer in np.unique(buffers).tolist():
            here = buffers == buffer
            moved[here] = permutation(buffer)(own[here] - buffer * size) + buffer * size
        return moved

    return shuffled


def _draw_weighted(order: Order, epoch: int) -> Draw:
    """Draw with replacement, each cell with a chance in proportion to its weight."""
    total, last = order.strategy.cumulated, order.strategy.last_weighted

    def locate(positions: NDArray[np.int64]) -> NDArray[np.int64]:
        drawn = uniform(positions, order.seed, epoch) * total[-1]
        # A product may round up to `total[-1]`, for which the search is beyond the last cell that has a weight.
        rows: NDArray[np.int64] = np.minimum(np.searchsorted(total, drawn, side="right"), last)
        return rows

    return Draw(order.strategy.n_samples, locate)


def _draw_balanced(order: Order, epoch: int) -> Draw:
    """Draw with replacement: a group, all with the same chance, and one of its cells."""
    cells, sizes = order.strategy.by_group, order.strategy.sizes
    starts, held = np.cumsum(sizes) - sizes, np.flatnonzero(sizes)

    def locate(positions: NDArray[np.int64]) -> NDArray[np.int64]:
        group = held[(uniform(positions, order.seed, epoch) * len(held)).astype(np.int64)]
        within = (uniform(positions, order.seed, epoch, 1) * sizes[group]).astype(np.int64)
        rows: NDArray[np.int64] = cells[starts[group] + within].astype(np.int64)
        return rows

    return Draw(order.strategy.n_samples, locate)


def _grouped(order: Order, epoch: int) -> Draw:
    """Create batches of one group each, every cell once, and shuffle the batches."""
    cells, sizes, bounds = order.strategy.by_group, order.strategy.sizes, _cut_groups(order.strategy.sizes, order)
    kept = sizes - sizes % order.batch_size if order.share.drop_last else sizes
    ends, starts = np.cumsum(kept), np.cumsum(sizes) - sizes
    numbers = np.arange(len(bounds) - 1)
    if order.shuffle:
        numbers = Permutation(len(numbers), order.seed, epoch)(numbers)
    # Batches in their shuffled order, each a run of positions of one group.
    shuffled, positions_of = _reordered(bounds, numbers)

    @lru_cache(64)
    def permutation(group: int) -> Permutation:
        return Permutation(int(sizes[group]), order.seed, epoch, 1, 1 + group)

    def locate(positions: NDArray[np.int64]) -> NDArray[np.int64]:
        within = positions_of(positions)
        group = np.searchsorted(ends, within, side="right")
        place = within - (ends - kept)[group]
        if order.shuffle:
            for one in np.unique(group).tolist():
                here = group == one
                place[here] = permutation(one)(place[here])
        rows: NDArray[np.int64] = cells[starts[group] + place].astype(np.int64)
        return rows

    return Draw(int(bounds[-1]), locate, shuffled)


def _ask_caller(order: Order, epoch: int) -> Draw:
    """Call a user-defined sampler."""
    assert order.strategy.own is not None
    rows = np.asarray(order.strategy.own(order.n_cells, _generator(order.seed, epoch)))
    wanted = order.strategy.n_samples
    fits = rows.dtype.kind in "iu" and rows.shape == (wanted,)
    if not fits or (wanted and not 0 <= int(rows.min()) <= int(rows.max()) < order.n_cells):
        raise QueryError(
            f"The sampler gave {rows.dtype} of shape {rows.shape}; expected {wanted:,} whole numbers from 0 to "
            f"{order.n_cells - 1:,}. Pass n_samples=... where an epoch is not one cell for each cell."
        )
    return Draw(wanted, lambda positions: rows[positions].astype(np.int64))


def _cut_groups(sizes: NDArray[np.int64], order: Order) -> NDArray[np.int64]:
    """Split each group into batches, and return the bounds of all."""
    size = order.batch_size
    kept = sizes - sizes % size if order.share.drop_last else sizes
    counts = -(-kept // size)
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.append(np.repeat(np.cumsum(kept) - kept, counts) + place * size, kept.sum())


STRATEGIES: dict[str, Callable[[Order, int], Draw]] = {
    EVERY: _every_cell,
    WEIGHTED: _draw_weighted,
    BALANCED: _draw_balanced,
    GROUPED: _grouped,
    OWN: _ask_caller,
}
"""Sampling strategies: each returns the cells of an epoch."""


_PLACE, _CHOICE = 1, 2
"""What chance decides; part of the key."""


@dataclass(frozen=True, eq=False)
class StratumSets:
    """Sets of cells of one stratum, each with as many cells of its pool.

    With `replace` the cells of a set are drawn independently, so that one may be there twice. Else a stratum's sets
    take its cells in turn, in a new order each time they have all been taken, and repeat cells in a set only of a
    stratum, or a pool, that has fewer than `set_size`.

    Notes
    -----
    Sets of strata with the same pool take its cells in turn too, so that in an epoch no control is in many more sets than another.
    """

    # (n,): cells, those of a stratum next to each other, and strata that are compared with the same cells too
    cells: NDArray[Any]
    starts: NDArray[np.int64]  # (n_strata,): where the cells of each stratum are among `cells`
    sizes: NDArray[np.int64]
    pool_starts: NDArray[np.int64]  # (n_strata,): where the cells are that it is compared with, its pool
    pool_sizes: NDArray[np.int64]
    set_size: int  # cells of a set
    per_batch: int  # sets of a batch
    # (n_strata,): draw strata in proportion; None: as many sets as have room for all cells
    weights: NDArray[np.float64] | None = None
    n_sets: int = 0  # sets of an epoch, where they are drawn
    replace: bool = False
    without_own: bool = False  # whether the cells of the stratum lie in its pool, and are left out of it

    @property
    def n_own(self) -> int:
        """Cells of a set."""
        return self.set_size

    @property
    def n_compared(self) -> int:
        """Cells with which a set is compared."""
        return self.set_size

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Sets of each stratum in an epoch in which every cell is in one, (n_strata,) int64."""
        return -(-self.sizes // self.set_size)

    @property
    def total(self) -> int:
        """Sets of an epoch."""
        return int(self.counts.sum()) if self.weights is None else self.n_sets

    def digest(self) -> str:
        """Return a short identifier of cells and choices."""
        found = blake2b(digest_size=8)
        for values in (self.starts, self.sizes, self.pool_starts, self.pool_sizes, self.weights):
            found.update(b"" if values is None else values.tobytes())
        for start in range(0, len(self.cells), _BLOCK):
            found.update(np.ascontiguousarray(self.cells[start : start + _BLOCK], np.int64).tobytes())
        return f"sets {found.hexdigest()} {self.set_size} {self.total} {self.replace} {self.without_own}"

    def draw(self, seed: int, epoch: int, *, drop_last: bool) -> Draw:
        """Return the cells of an epoch, in batches of sets and then of what these are compared with."""
        strata, size = self._strata_of(seed, epoch), self.set_size
        # Which stratum's sets share a turn: its own cells for one, those of its pool for the other.
        owners = np.arange(len(self.sizes)) if self.without_own else self.pool_starts
        n_compared = self.pool_sizes - self.sizes if self.without_own else self.pool_sizes
        turns = np.stack([_turns(strata), _turns(owners[strata])])
        sizes = np.stack([self.sizes, n_compared])
        key_of = pair_keys(seed, epoch, _PLACE)
        runs = np.stack([self.counts, np.maximum(1, n_compared // size)])

        def find(number: NDArray[np.int64], place: NDArray[np.int64], compared: NDArray[np.bool_]) -> NDArray[np.int64]:
            # What is the same for all cells of a set is computed once for each.
            first = np.flatnonzero(np.diff(number * 2 + compared, prepend=-1))
            each = np.diff(np.append(first, len(number)))
            which, side = number[first], compared[first].astype(np.int64)
            stratum = strata[which]
            n = np.repeat(sizes[side, stratum], each)
            if self.replace:
                drawn = uniform((number * 2 + compared) * size + place, seed, epoch, _PLACE)
                at = (drawn * n).astype(np.int64)
            else:
                cycle, run = np.divmod(turns[side, which], runs[side, stratum])
                at = (np.repeat(run * size, each) + place) % n
                owner = np.where(side == 1, owners[stratum], stratum) * 2 + side
                keys = np.repeat(key_of(owner, cycle), each)
                status = library().ra_permute_each(at, n, keys, len(at))
                # Places are below their sizes, so none is outside.
                assert status == GOOD
            at += np.repeat(np.where(side == 1, self.pool_starts[stratum], self.starts[stratum]), each)
            if self.without_own:
                own = np.repeat(np.where(side == 1, self.starts[stratum], np.iinfo(np.int64).max), each)
                at = np.where(at >= own, at + np.repeat(self.sizes[stratum], each), at)
            rows: NDArray[np.int64] = self.cells[at].astype(np.int64)
            return rows

        return _draw_sets(find, self.total, self.per_batch, (size, size), drop_last=drop_last)

    def _strata_of(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the stratum of each set of an epoch, in order, (total,) int64."""
        if self.weights is None:
            every = np.repeat(np.arange(len(self.counts)), self.counts)
            return every[Permutation(len(every), seed, epoch)(np.arange(len(every)))]
        ends = np.cumsum(self.weights)
        drawn = uniform(np.arange(self.total), seed, epoch, _CHOICE) * ends[-1]
        last = int(np.flatnonzero(self.weights)[-1])
        found: NDArray[np.int64] = np.minimum(np.searchsorted(ends, drawn, side="right"), last)
        return found


@dataclass(frozen=True, eq=False)
class NeighborSets:
    """Cells, each with its neighbours, in a new order each epoch."""

    cells: NDArray[np.int64]
    neighbors: NDArray[Any]  # (n, k): of each cell, nearest first
    per_batch: int  # cells of a batch, without their neighbours

    n_own = 1

    @property
    def n_compared(self) -> int:
        """Neighbours of a cell."""
        return int(self.neighbors.shape[1])

    @property
    def total(self) -> int:
        """Number of cells with neighbours."""
        return len(self.cells)

    def digest(self) -> str:
        """Return a short identifier of the cells and their neighbours."""
        found = blake2b(np.ascontiguousarray(self.cells).tobytes(), digest_size=8)
        found.update(np.ascontiguousarray(self.neighbors).tobytes())
        return f"neighbors {found.hexdigest()}"

    def draw(self, seed: int, epoch: int, *, drop_last: bool) -> Draw:
        """Return the cells of an epoch, in batches of cells and then of their neighbours."""
        order = Permutation(len(self.cells), seed, epoch)

        def find(number: NDArray[np.int64], place: NDArray[np.int64], compared: NDArray[np.bool_]) -> NDArray[np.int64]:
            at = order(number)
            return np.where(compared, self.neighbors[at, place], self.cells[at]).astype(np.int64)

        return _draw_sets(find, self.total, self.per_batch, (1, self.n_compared), drop_last=drop_last)


Find = Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]], NDArray[np.int64]]
"""Returns cells by the number of their set, their place in it, and whether they are of what it is compared with; all (k,)."""


def _draw_sets(find: Find, total: int, per_batch: int, sizes: tuple[int, int], *, drop_last: bool) -> Draw:
    """Return the draw of an epoch: batches of sets, the cells of all sets first, and then what they are compared with.

    `total` and `per_batch` are the sets of the epoch and of a batch; `sizes` are the cells of a set, and of what it is
    compared with. `drop_last` leaves out a batch of fewer sets.
    """
    n_own, n_compared = sizes
    kept = total - total % per_batch if drop_last else total
    bounds = np.append(np.arange(0, kept, per_batch), kept) * sum(sizes)

    def locate(positions: NDArray[np.int64]) -> NDArray[np.int64]:
        first = positions // (per_batch * sum(sizes)) * per_batch
        of_own = np.minimum(kept - first, per_batch) * n_own
        within = positions - first * sum(sizes)
        compared = within >= of_own
        within = np.where(compared, within - of_own, within)
        width = np.where(compared, n_compared, n_own)
        return find(first + within // width, within % width, compared)

    return Draw(int(bounds[-1]), locate, bounds)


def _turns(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many earlier sets have the same key, for each set."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    sizes = np.diff(np.append(starts, len(ordered)))
    turns = np.empty(len(keys), np.int64)
    turns[order] = np.arange(len(keys)) - np.repeat(starts, sizes)
    return turns
