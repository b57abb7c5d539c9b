"""Whether shapes meet a box: points, edges and triangles by separating axes, outlines also by what they enclose."""

import numpy as np
from numpy.typing import NDArray

from raggedatlas.vectors.shapes import SEQUENTIAL, Shapes, object_rows

Floats = NDArray[np.float64]


def shapes_meet_box(shapes: Shapes, lo: Floats, hi: Floats, *, closed: bool = False) -> NDArray[np.bool_]:
    """Tell which objects have a point in a box, both ends inclusive.

    Parameters
    ----------
    shapes : Shapes
        B objects.
    lo, hi : (D',) float
        Corners; D' may be fewer than the axes of the shapes, whose others are then of no matter.
    closed : bool
        Whether a line of two axes is an outline: its last vertex is joined with the first, and what it encloses counts.

    Returns
    -------
    (B,) bool

    Examples
    --------
    >>> ring = Shapes("polyline", np.array([[0.0, 0], [10, 0], [10, 10], [0, 10]]))
    >>> [bool(shapes_meet_box(ring, np.array([4.0, 4]), np.array([5.0, 5]), closed=c)[0]) for c in (False, True)]
    [False, True]
    """
    positions = shapes.positions[:, : len(lo)].astype(np.float64)
    owner = object_rows(shapes)
    met = np.zeros(len(shapes.offsets) - 1, bool)
    met[owner[((positions >= lo) & (positions <= hi)).all(axis=1)]] = True
    links, of = _links(shapes, owner, closed=closed)
    wanted = ~met[of]
    links, of = links[wanted], of[wanted]
    if len(links):
        met[of[simplices_meet_box(positions[links], lo, hi)]] = True
    if closed and len(lo) == 2 and shapes.kind in SEQUENTIAL:
        met |= _encloses(positions, links, of, lo, len(met))
    return met


def simplices_meet_box(corners: Floats, lo: Floats, hi: Floats) -> NDArray[np.bool_]:
    """Tell which edges or triangles have a point in a box: exactly in two and three axes, by separating axes.

    Parameters
    ----------
    corners : (n, k, D) float
        k = 2 for edges, 3 for triangles. Beyond three axes, boxes along the further ones are compared.
    lo, hi : (D,) float
        Corners of the box.

    Examples
    --------
    >>> edge = np.array([[[0.0, 3.0], [3.0, 0.0]]])
    >>> (
    ...     simplices_meet_box(edge, np.zeros(2), np.ones(2)).tolist(),
    ...     simplices_meet_box(edge, np.zeros(2), np.full(2, 2.0)).tolist(),
    ... )
    ([False], [True])
    """
    met: NDArray[np.bool_] = ((corners.max(axis=1) >= lo) & (corners.min(axis=1) <= hi)).all(axis=1)
    n_dims = min(3, corners.shape[2])
    finite = np.isfinite(lo) & np.isfinite(hi)
    if not finite[:n_dims].all():
        far = np.abs(corners).max(initial=0.0) + 1
        lo, hi = np.maximum(lo, -far), np.minimum(hi, far)
    points = corners[:, :, :n_dims]
    middle, half = (lo + hi)[:n_dims] / 2, (hi - lo)[:n_dims] / 2
    edges = np.roll(points, -1, axis=1) - points
    if points.shape[1] == 2:
        edges = edges[:, :1]
    for axis in _axes(edges, n_dims):
        reach = np.abs(axis) @ half
        along = np.einsum("nkd,nd->nk", points - middle, axis)
        met &= (along.min(axis=1) <= reach) & (along.max(axis=1) >= -reach)
    return met


def _axes(edges: Floats, n_dims: int) -> list[Floats]:
    """Give the directions that may separate, beside those of the box: (n, D) each."""
    if n_dims == 2:
        return [np.stack([-edges[:, i, 1], edges[:, i, 0]], axis=1) for i in range(edges.shape[1])]
    units = np.eye(3)
    axes = [np.cross(edges[:, i], unit) for i in range(edges.shape[1]) for unit in units]
    return [*axes, np.cross(edges[:, 0], edges[:, 1])] if edges.shape[1] == 3 else axes


def _links(shapes: Shapes, owner: NDArray[np.int64], *, closed: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give the edges or faces of all objects as rows of vertices, and the object of each; polygons as fans of triangles."""
    if shapes.kind in SEQUENTIAL:
        first = np.flatnonzero(owner[1:] == owner[:-1])
        links = np.stack([first, first + 1], axis=1)
        if closed:
            some = np.flatnonzero(np.diff(shapes.offsets) > 2)
            back = np.stack([shapes.offsets[1:][some] - 1, shapes.offsets[:-1][some]], axis=1)
            links = np.concatenate([links, back])
    elif shapes.links is None:
        return np.zeros((0, 2), np.int64), np.zeros(0, np.int64)
    else:
        links = shapes.links.astype(np.int64)
        if links.shape[1] > 3:
            fans = [links[:, [0, i, i + 1]] for i in range(1, links.shape[1] - 1)]
            links = np.concatenate(fans)
    return links, owner[links[:, 0]]


def _encloses(
    positions: Floats, links: NDArray[np.int64], of: NDArray[np.int64], point: Floats, n: int
) -> NDArray[np.bool_]:
    """Tell which outlines have a point inside, by the parity of edges to its right."""
    a, b = positions[links[:, 0]], positions[links[:, 1]]
    spans = (a[:, 1] > point[1]) != (b[:, 1] > point[1])
    rise = np.where(spans, b[:, 1] - a[:, 1], 1.0)
    crossing = a[:, 0] + (point[1] - a[:, 1]) * (b[:, 0] - a[:, 0]) / rise
    odd: NDArray[np.bool_] = np.bincount(of[spans & (point[0] < crossing)], minlength=n) % 2 == 1
    return odd
