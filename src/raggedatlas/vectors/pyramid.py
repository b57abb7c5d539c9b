"""Pyramids: coarser levels of shapes, object by object and with the same ids (seed 002 §7.6; levels, chapter 9)."""

from collections.abc import Callable, Iterator

from raggedatlas.errors import SourceError
from raggedatlas.vectors.builder import CoarseLevel
from raggedatlas.vectors.coarsening.lines import line_levels
from raggedatlas.vectors.coarsening.meshes import mesh_levels
from raggedatlas.vectors.coarsening.options import LevelStep, PyramidOptions
from raggedatlas.vectors.coarsening.paths import graph_levels
from raggedatlas.vectors.coarsening.points import point_levels
from raggedatlas.vectors.shapes import Shapes

COARSENERS: dict[str, Callable[[Shapes, PyramidOptions], Iterator[LevelStep]]] = {
    "point_cloud": point_levels,
    "line": line_levels,
    "polyline": line_levels,
    "streamline": line_levels,
    "graph": graph_levels,
    "skeleton": graph_levels,
    "mesh": mesh_levels,
}
"""Geometry type -> what makes it coarser."""


def make_pyramid(shapes: Shapes, steps: PyramidOptions | None = None) -> tuple[CoarseLevel, ...]:
    """Make coarser levels of shapes, for ``make_geometry(..., coarser=...)``.

    Objects keep their ids, groups and attributes; objects that a level drops (`PyramidOptions.sparsity`) are left out of its shapes and
    stay in its index, empty. Vertices of points, lines, graphs and skeletons are some of those of the finer level, as they are; those
    of meshes are new. Chunks grow with bins, so that a chunk has about as many vertices on every level.

    Parameters
    ----------
    shapes : Shapes
        The finest level.
    steps : PyramidOptions or None
        How many levels and how far apart; None: two, of 8 times fewer vertices each.

    Returns
    -------
    tuple of CoarseLevel
        Finest first, with parents, by which `make_geometry` links levels where that is asked for.

    Raises
    ------
    SourceError
        If objects are to be dropped where there are none, or faces are no triangles.
    MissingExtraError
        For meshes without the extra ``geometry``.

    Examples
    --------
    >>> import numpy as np
    >>> line = Shapes("streamline", np.array([[0, 0], [1, 0], [2, 0.1], [3, 2]]), ids=np.array([7]))
    >>> (level,) = make_pyramid(line, PyramidOptions(n_levels=1, tolerances=(0.5,)))
    >>> level.shapes.positions.tolist(), level.shapes.ids.tolist(), level.parents.tolist()
    ([[0.0, 0.0], [2.0, 0.1], [3.0, 2.0]], [7], [0, 0, 1, 2])
    """
    steps = PyramidOptions() if steps is None else steps
    if shapes.ids is None and steps.sparsity < 1:
        raise SourceError(f"sparsity is {steps.sparsity} where there are no objects; expected 1.")
    ratio = steps.bins(shapes.n_dims)
    if len(ratio) != shapes.n_dims:
        raise SourceError(f"bin_ratio is {ratio}; expected {shapes.n_dims} numbers, one for each axis.")
    made = []
    for number, (level, parents) in enumerate(COARSENERS[shapes.kind](shapes, steps), 1):
        spans = tuple(one**number for one in ratio)
        made.append(CoarseLevel(level, spans, spans, parents, "per_object", steps.sparsity**number))
    return tuple(made)
