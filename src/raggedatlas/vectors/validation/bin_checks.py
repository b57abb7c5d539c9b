"""Bins of points without objects: how many fragments a chunk may have, and where their vertices lie."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.vectors.blobs import concat_ranges
from raggedatlas.vectors.geometry import Fragments
from raggedatlas.vectors.grids import bins_per_chunk
from raggedatlas.vectors.metadata import level_chunk_shape
from raggedatlas.vectors.validation.context import CheckLocation, LevelSummary, ValidationContext
from raggedatlas.vectors.validation.root_metadata import divides

_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Bins:
    """The bins of a level.

    Parameters
    ----------
    edges : (D,) float64
        Of a bin.
    ratio : (D,) int64
        How many a chunk has on each axis; fragment ``k`` of a chunk is bin ``k``, last axis fastest.
    """

    edges: NDArray[np.float64]
    ratio: NDArray[np.int64]

    @property
    def n(self) -> int:
        """How many bins a chunk has."""
        return int(np.prod(self.ratio))


def level_bins(checking: ValidationContext, seen: LevelSummary) -> Bins | None:
    """Return the bins of points without objects; None for anything else, and where a chunk is one bin."""
    root = checking.root
    if root is None or root.types != ("point_cloud",) or root.index_convention == "identity":
        return None
    if checking.node(CheckLocation(seen.number, "object_index")) is not None:
        return None
    with checking.guarded("V100", CheckLocation(seen.number)):
        edges = level_chunk_shape(root, seen.facts)
        bins = seen.facts.get("bin_shape") if seen.number else root.bin_shape
        if bins is not None and divides(bins, edges):
            made = Bins(np.asarray(bins, np.float64), bins_per_chunk(edges, tuple(bins)))
            return made if made.n > 1 else None
    return None


def check_fragments(checking: ValidationContext, place: CheckLocation, found: Fragments, bins: Bins) -> None:
    """Check that a chunk has no more fragments than bins."""
    if found.n_fragments > bins.n:
        checking.report("V113", place, f"it has {found.n_fragments:,} fragments, and {bins.n:,} bins.")


def check_bin_positions(
    checking: ValidationContext, place: CheckLocation, points: NDArray[Any], of: tuple[Fragments, Bins]
) -> None:
    """Check that the vertices of each fragment of a chunk lie in its bin, but for rounding."""
    found, bins = of
    if found.n_fragments != bins.n or not found.is_range.all():
        return
    key = np.asarray(place.chunk)[-points.shape[1] :]
    number = np.repeat(np.arange(bins.n), found.counts)
    own = points[concat_ranges(found.starts, found.counts)].astype(np.float64)
    low = (key * bins.ratio + np.stack(np.unravel_index(number, tuple(bins.ratio)), axis=1)) * bins.edges
    slack = _TOLERANCE * np.maximum(np.abs(low), bins.edges)
    out = ((own < low - slack) | (own > low + bins.edges + slack)).any(axis=1)
    if out.any():
        first = int(np.flatnonzero(out)[0])
        text = f"{np.count_nonzero(out):,} vertices lie outside of their bin, e.g. {own[first].tolist()} of bin {number[first]}."
        checking.report("V114", place, text)
