"""Which cells make the sets of an epoch: sets of one stratum each, and for each set cells to compare it with. Pure functions of sizes and seeds."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.loader.order import Draw, Permutation, pair_keys, uniform
from raggedatlas.store.native import GOOD, library

_PLACE, _CHOICE = 1, 2
"""What chance decides; part of the key."""


@dataclass(frozen=True, eq=False)
class Strata:
    """Cells in strata, and with which cells each stratum is compared."""

    # (n,): those of a stratum next to each other, and strata that are compared with the same cells too
    cells: NDArray[Any]
    starts: NDArray[np.int64]  # (n_strata,): where the cells of each stratum are among `cells`
    sizes: NDArray[np.int64]
    pool_starts: NDArray[np.int64]  # (n_strata,): where the cells are that it is compared with
    pool_sizes: NDArray[np.int64]
    without_own: bool = False  # whether the cells of the stratum lie in its pool, and are left out of it

    @property
    def compared(self) -> NDArray[np.int64]:
        """Number of cells that each stratum is compared with, (n_strata,) int64."""
        return self.pool_sizes - self.sizes if self.without_own else self.pool_sizes


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

    strata: Strata
    set_size: int  # cells of a set
    per_batch: int  # sets of a batch
    # (n_strata,): draw strata in proportion; None: as many sets as have room for all cells
    weights: NDArray[np.float64] | None = None
    n_sets: int = 0  # sets of an epoch, where they are drawn
    replace: bool = False

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
        return -(-self.strata.sizes // self.set_size)

    @property
    def total(self) -> int:
        """Sets of an epoch."""
        return int(self.counts.sum()) if self.weights is None else self.n_sets

    def digest(self) -> str:
        """Return a short identifier of cells and choices."""
        found = blake2b(digest_size=8)
        strata = self.strata
        for values in (strata.starts, strata.sizes, strata.pool_starts, strata.pool_sizes, self.weights):
            found.update(b"" if values is None else values.tobytes())
        for start in range(0, len(strata.cells), 1 << 16):
            found.update(np.ascontiguousarray(strata.cells[start : start + (1 << 16)], np.int64).tobytes())
        return f"sets {found.hexdigest()} {self.set_size} {self.total} {self.replace} {strata.without_own}"

    def draw(self, seed: int, epoch: int, *, drop_last: bool) -> Draw:
        """Return the cells of an epoch, in batches of sets and then of what these are compared with."""
        strata, size, cells = self._strata_of(seed, epoch), self.set_size, self.strata
        # Which stratum's sets share a turn: its own cells for one, those of its pool for the other.
        owners = np.arange(len(cells.sizes)) if cells.without_own else cells.pool_starts
        turns = np.stack([_turns(strata), _turns(owners[strata])])
        sizes = np.stack([cells.sizes, cells.compared])
        key_of = pair_keys(seed, epoch, _PLACE)
        runs = np.stack([self.counts, np.maximum(1, cells.compared // size)])

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
            at += np.repeat(np.where(side == 1, cells.pool_starts[stratum], cells.starts[stratum]), each)
            if cells.without_own:
                own = np.repeat(np.where(side == 1, cells.starts[stratum], np.iinfo(np.int64).max), each)
                at = np.where(at >= own, at + np.repeat(cells.sizes[stratum], each), at)
            rows: NDArray[np.int64] = cells.cells[at].astype(np.int64)
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
    """Return how many earlier sets have the same key, for each set.

    Examples
    --------
    >>> _turns(np.array([7, 3, 7, 7]))
    array([0, 0, 1, 2])
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    sizes = np.diff(np.append(starts, len(ordered)))
    turns = np.empty(len(keys), np.int64)
    turns[order] = np.arange(len(keys)) - np.repeat(starts, sizes)
    return turns
