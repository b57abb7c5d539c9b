"""From shapes to a geometry store in memory: chunks, fragments, object index, links across chunks, levels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.vectors.geometry import Axis, Geometry
from raggedatlas.vectors.shapes import Shapes


@dataclass(frozen=True)
class Coarser:
    """The shapes of one coarser level, for `make_geometry`; made by the algorithms that coarsen.

    Parameters
    ----------
    shapes : Shapes
        Fewer vertices of the same objects. `ids` are those of the finer level; objects that were dropped may be left out (they
        stay in the index, empty).
    bin_ratio : tuple of D ints
        How many bins of level 0 one bin of this level spans on each axis.
    chunk_ratio : tuple of D ints or None
        How many chunks of level 0 one chunk of this level spans; None: 1.
    parents : (N_finer,) int64 or None
        For each vertex of the next finer level, in the order of its shapes, the row in `shapes` that stands for it, or -1;
        needed for links across levels only.
    method : str
        ``"per_object"``, ``"manual"`` or ``"none"``.
    sparsity : float
        Share of the objects that are kept, in (0, 1].
    """

    shapes: Shapes
    bin_ratio: tuple[int, ...]
    chunk_ratio: tuple[int, ...] | None = None
    parents: NDArray[np.int64] | None = None
    method: str = "per_object"
    sparsity: float = 1.0


@dataclass(frozen=True)
class Cutting:
    """How shapes are cut, for `make_geometry`.

    Parameters
    ----------
    chunk_shape : tuple of D floats or None
        Edges of a chunk; None: cubes of about 16,384 vertices.
    bin_shape : tuple of D floats or None
        Edges of a bin, dividing those of a chunk: points without objects stand bin by bin, one fragment each. None: a bin is a chunk.
    axes : tuple of Axis or None
        None: ``x``, ``y``, ``z``, ``w``... without units.
    bounds : ((float, ...), (float, ...)) or None
        Least and greatest coordinates, which vertices may not leave; None: those of the vertices.
    boundary : str
        ``"explicit_links"`` (links across chunks are stored), ``"boundary_deduplication"`` (the far end is repeated in the near
        chunk) or ``"both"``.
    cross_level_storage : str
        ``"none"``, ``"implicit"`` (from finer to coarser) or ``"explicit"`` (both ways), where `Coarser.parents` are given.
    encoding : str
        ``"raw"``, or ``"draco"`` for meshes (extra ``draco``; positions are quantised).
    """

    chunk_shape: tuple[float, ...] | None = None
    bin_shape: tuple[float, ...] | None = None
    axes: tuple[Axis, ...] | None = None
    bounds: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    boundary: str = "explicit_links"
    cross_level_storage: str = "none"
    encoding: str = "raw"


def make_geometry(
    shapes: Shapes,
    cutting: Cutting = Cutting(),
    *,
    coarser: Sequence[Coarser] = (),
    metadata: dict[str, Any] | None = None,
) -> Geometry:
    """Cut shapes into chunks, ready for `raggedatlas.vectors.writing.write` (seed 002 §7.0-7.11).

    Parameters
    ----------
    shapes : Shapes
        The finest level.
    cutting : Cutting
        Chunks, bins, axes, bounds, boundary policy.
    coarser : sequence of Coarser
        Coarser levels, finest first.
    metadata : dict or None
        Further keys of the root, e.g. ``crs``.

    Returns
    -------
    Geometry
        Links whose convention is implicit are not stored; an int64 fragment attribute ``object_id`` names the owner of each fragment
        where there are objects.

    Raises
    ------
    SourceError
        If links are out of range, lengths do not match, bins do not divide chunks, or a kind lacks what it needs.
    ValuesError
        If a position is NaN or infinite, or leaves the bounds.

    Examples
    --------
    >>> import numpy as np
    >>> points = Shapes("point_cloud", np.array([[0.5, 0.5], [1.5, -0.5]], np.float32))
    >>> make_geometry(points, Cutting(chunk_shape=(1, 1))).levels[0].chunks.tolist()
    [[0, 0], [1, -1]]
    """
    raise AssertionError
