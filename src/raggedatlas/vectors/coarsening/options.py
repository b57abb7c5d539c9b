"""The steps of a pyramid: how many, how far apart, and which vertices and objects stay at each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.selection import object_rows, take_objects, take_vertices
from raggedatlas.vectors.shapes import Shapes

KEEP = ("random", "largest")

LevelStep = tuple[Shapes, NDArray[np.int64]]
"""The shapes of a level, and for each vertex of the next finer one the row that stands for it, or -1."""

LinkBuilder = Callable[[NDArray[np.bool_]], NDArray[Any] | None]
ParentFinder = Callable[[NDArray[np.bool_]], NDArray[np.int64]]


@dataclass(frozen=True)
class PyramidOptions:
    """How a pyramid is made.

    Parameters
    ----------
    n_levels : int
        How many levels are coarser than the finest.
    factor : float
        Each level has about so many times fewer vertices than the one before (of the objects it keeps), above 1.
    bin_ratio : tuple of D ints or None
        How many bins of the finer level one bin spans on each axis; None: the D-th root of `factor`, rounded, at least 2.
    tolerances : tuple of floats or None
        Lines, skeletons and graphs: what Douglas and Peucker's algorithm may move a line at each coarser level, world
        units, rising. None: as `factor` asks.
    sparsity : float
        Share of the objects of a level that the next one keeps, in (0, 1].
    keep : str
        Which: ``"random"``, or ``"largest"``, those with most vertices.
    seed : int
        Of all that is left to chance; equal seeds give equal pyramids.

    Examples
    --------
    >>> PyramidOptions(n_levels=3, factor=4).bins(2)
    (2, 2)
    """

    n_levels: int = 2
    factor: float = 8.0
    bin_ratio: tuple[int, ...] | None = None
    tolerances: tuple[float, ...] | None = None
    sparsity: float = 1.0
    keep: str = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what makes no pyramid."""
        rising = self.tolerances is None or (
            len(self.tolerances) == self.n_levels and bool(np.all(np.diff([0, *self.tolerances]) >= 0))
        )
        for fits, what in (
            (self.n_levels >= 0, f"n_levels is {self.n_levels}; expected 0 or more"),
            (self.factor > 1, f"factor is {self.factor}; expected more than 1"),
            (0 < self.sparsity <= 1, f"sparsity is {self.sparsity}; expected more than 0, at most 1"),
            (self.keep in KEEP, f"keep is {self.keep!r}; expected one of {', '.join(KEEP)}"),
            (rising, f"tolerances are {self.tolerances}; expected {self.n_levels}, not negative, never falling"),
            (self.bin_ratio is None or min(self.bin_ratio) >= 1, f"bin_ratio is {self.bin_ratio}; expected 1 or more"),
        ):
            if not fits:
                raise SourceError(f"No pyramid can be made: {what}.")

    def bins(self, n_dims: int) -> tuple[int, ...]:
        """Return how many bins of the finer level one bin spans on each axis."""
        if self.bin_ratio is not None:
            return tuple(int(ratio) for ratio in self.bin_ratio)
        return (max(2, round(self.factor ** (1 / n_dims))),) * n_dims


def select_objects(shapes: Shapes, steps: PyramidOptions) -> list[NDArray[np.bool_]]:
    """Return, for each coarser level, which objects it keeps; each level keeps some of those of the one before."""
    n_objects = len(shapes.offsets) - 1
    order = np.random.default_rng(steps.seed).permutation(n_objects)
    if steps.keep == "largest":
        order = order[np.argsort(-np.diff(shapes.offsets)[order], kind="stable")]
    made = []
    for level in range(1, steps.n_levels + 1):
        kept = np.zeros(n_objects, bool)
        kept[order[: int(np.ceil(n_objects * steps.sparsity**level - 1e-9))]] = True
        made.append(kept)
    return made


def masks_from_weights(
    shapes: Shapes, weights: NDArray[np.float64], steps: PyramidOptions
) -> Iterator[NDArray[np.bool_]]:
    """Yield which vertices each level keeps by their weights: those above a tolerance, or so many as `factor` asks.

    Vertices that weigh nothing go at the first step, those that weigh infinity stay as long as their object.
    """
    owner, bar = object_rows(shapes), 0.0
    for level, objects in enumerate(select_objects(shapes, steps)):
        alive = objects[owner]
        if steps.tolerances is not None:
            yield alive & (weights > steps.tolerances[level])
            continue
        there = weights[alive]
        wanted = int(np.ceil(len(there) / steps.factor ** (level + 1)))
        if 0 < wanted < len(there):
            bar = max(bar, float(np.partition(there, len(there) - wanted)[len(there) - wanted]))
        yield alive & (weights >= bar) & (weights > 0)


def build_coarse_levels(
    shapes: Shapes, kept: Iterator[NDArray[np.bool_]], stand_in: ParentFinder, relink: LinkBuilder
) -> Iterator[LevelStep]:
    """Yield the levels whose vertices are some of those of the finest.

    Parameters
    ----------
    shapes : Shapes
        The finest level.
    kept : iterator of (N,) bool
        Which of its vertices each level keeps.
    stand_in : callable
        For what is kept, the vertex that stands for each vertex; anything where its object is gone.
    relink : callable
        For what is kept, the links between kept vertices.
    """
    owner, finer = object_rows(shapes), np.arange(shapes.n_vertices)
    for mask in kept:
        places = np.cumsum(mask) - 1
        stands = stand_in(mask)
        found = np.where(mask[stands] & (owner[stands] == owner), places[stands], -1)
        level = take_vertices(shapes, mask, relink(mask))
        gone = np.diff(shapes.offsets) > 0
        gone &= np.bincount(owner[mask], minlength=len(gone)) == 0
        if shapes.ids is not None and gone.any():
            level = take_objects(level, np.flatnonzero(~gone))
        yield level, found[finer]
        finer = np.flatnonzero(mask)


def no_links(kept: NDArray[np.bool_]) -> None:
    """Return the links of what has none."""
    del kept


def nearest_kept(points: NDArray[np.float64], kept: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return, for each vertex of a sequence, the kept one before or behind it that lies nearer.

    Where none is before, or none behind, the other is taken; without any, the vertex itself.
    """
    n = len(kept)
    rows = np.arange(n)
    before = np.maximum.accumulate(np.where(kept, rows, -1)) if n else rows
    behind = np.minimum.accumulate(np.where(kept, rows, n)[::-1])[::-1] if n else rows
    before, behind = np.where(before < 0, behind, before), np.where(behind >= n, before, behind)
    before, behind = np.where(before >= n, rows, before), np.where(behind < 0, rows, behind)
    behind = np.where(behind >= n, rows, behind)
    gaps = [((points - points[other]) ** 2).sum(1) for other in (before, behind)]
    return np.where(gaps[0] <= gaps[1], before, behind)
