"""Triangles in the boxes of a grid: cut where they cross from box to box, each part in one box."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Surface = tuple[NDArray[Any], NDArray[np.int64]]
"""Positions (N, 3) and triangles (M, 3) of rows of them."""


def parted(
    surface: Surface, origin: NDArray[np.float64], edge: NDArray[np.float64], grid: tuple[int, int]
) -> dict[tuple[int, ...], Surface]:
    """Cut a surface along a grid, and return what lies in each of its boxes.

    Parameters
    ----------
    surface : Surface
        Inside of the grid.
    origin, edge : (3,) float64
        Where the grid begins, and the edges of a box.
    grid : (int, int)
        How many boxes there are on each axis, and how many times they are doubled after the cutting: ``(4, 1)`` cuts along four boxes and
        returns what lies in each of two.

    Returns
    -------
    dict
        Box (x, y, z) -> its surface, with the vertices of its triangles in their order.

    Examples
    --------
    >>> points, faces = np.array([[0, 0, 0], [4.0, 0, 0], [0, 1, 0]]), np.array([[0, 1, 2]])
    >>> parts = parted((points, faces), np.zeros(3), np.array([2.0, 2, 2]), (2, 0))
    >>> {box: (part[0].tolist(), part[1].tolist()) for box, part in parts.items() if box == (1, 0, 0)}
    {(1, 0, 0): ([[4.0, 0.0, 0.0], [2.0, 0.0, 0.0], [2.0, 0.5, 0.0]], [[0, 2, 1]])}
    """
    count, doubled = grid
    points, faces = surface
    for axis in range(3):
        for number in range(1, count):
            points, faces = cut_at(points, faces, axis, float(origin[axis] + edge[axis] * number))
    centres = points[faces].mean(axis=1)
    boxes = np.clip(np.floor((centres - origin) / edge).astype(np.int64), 0, count - 1) >> doubled
    places, owner = np.unique(boxes, axis=0, return_inverse=True)
    made = {}
    for number, place in enumerate(places.tolist()):
        inside = faces[owner.ravel() == number]
        rows, corners = np.unique(inside, return_inverse=True)
        made[tuple(place)] = points[rows], corners.reshape(-1, 3).astype(np.int64)
    return made


def cut_at(
    points: NDArray[Any], faces: NDArray[np.int64], axis: int, where: float
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Cut triangles that cross a plane; new vertices, one for each edge that crosses, come behind the others.

    Examples
    --------
    >>> points, faces = cut_at(np.array([[0, 0, 0], [2.0, 0, 0], [0, 2, 0]]), np.array([[0, 1, 2]]), 0, 1.0)
    >>> points[3:].tolist(), faces.tolist()
    ([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]], [[1, 4, 3], [4, 2, 0], [4, 0, 3]])
    """
    side = np.sign(points[:, axis] - where).astype(np.int8)[faces]
    crossing = (side.max(1) > 0) & (side.min(1) < 0)
    if not crossing.any():
        return points, faces
    whole, cut, side = faces[~crossing], faces[crossing], side[crossing]
    # Turn each triangle so that its first corner is the one that is alone on its side; with a corner in the plane, that corner.
    lone = np.where(
        (side == 0).any(1), np.argmax(side == 0, axis=1), np.argmax(side == -np.sign(side.sum(1))[:, None], axis=1)
    )
    turned = np.take_along_axis(cut, (lone[:, None] + np.arange(3)) % 3, axis=1)
    flat = np.take_along_axis(side, lone[:, None], axis=1)[:, 0] == 0
    a, b, c = turned.T
    ends = np.concatenate([np.stack([b, c], 1)[flat], np.stack([a, b], 1)[~flat], np.stack([c, a], 1)[~flat]])
    edges, at = np.unique(np.sort(ends, axis=1), axis=0, return_inverse=True)
    first, last = points[edges[:, 0]], points[edges[:, 1]]
    share = (where - first[:, axis]) / (last[:, axis] - first[:, axis])
    new = first + share[:, None] * (last - first)
    new[:, axis] = where
    middle = at.ravel() + len(points)
    n_flat, n_other = int(flat.sum()), int((~flat).sum())
    m, near, far = middle[:n_flat], middle[n_flat : n_flat + n_other], middle[n_flat + n_other :]
    halves = [np.stack([a[flat], b[flat], m], 1), np.stack([a[flat], m, c[flat]], 1)]
    a, b, c = a[~flat], b[~flat], c[~flat]
    thirds = [np.stack([a, near, far], 1), np.stack([near, b, c], 1), np.stack([near, c, far], 1)]
    return np.concatenate([points, new]), np.concatenate([whole, *halves, *thirds])


def parents_of(nodes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the nodes of the next coarser level that hold these, each once."""
    return np.unique(nodes >> 1, axis=0)


def z_order(nodes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return nodes along a Z-order curve, each once; x counts least.

    Examples
    --------
    >>> z_order(np.array([[0, 0, 1], [1, 1, 0], [0, 1, 0], [1, 0, 0], [0, 1, 0]])).tolist()
    [[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    code = np.zeros(len(nodes), np.int64)
    for bit in range(20):
        for axis in range(3):
            code |= ((nodes[:, axis] >> bit) & 1) << (3 * bit + axis)
    return nodes[np.unique(code, return_index=True)[1]]
