"""Meshes get fewer faces by quadric decimation, object by object (fast-simplification)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.coarsening.options import LevelStep, PyramidOptions, select_objects
from raggedatlas.vectors.libraries import library
from raggedatlas.vectors.selection import counts_to_offsets, take_attributes, take_objects
from raggedatlas.vectors.shapes import Shapes

AGGRESSIVENESS = (7.0, 4.0, 1.0)
"""What the library is asked for, in turn, until a closed surface stays closed."""

MIN_FACES = 4


@dataclass(frozen=True)
class Surface:
    """One mesh: vertices, faces, and which old vertex each new one takes its values from.

    Parameters
    ----------
    points : (n, 3) float64
        Vertices.
    faces : (m, 3) int64
        Their rows.
    mapping : (old,) int64
        For each old vertex the new one that stands for it, or -1.
    """

    points: NDArray[np.float64]
    faces: NDArray[np.int64]
    mapping: NDArray[np.int64]


def is_closed(faces: NDArray[Any]) -> bool:
    """Tell whether every edge belongs to exactly two faces.

    Examples
    --------
    >>> is_closed(np.array([[0, 1, 2], [0, 3, 1], [0, 2, 3], [1, 3, 2]]))
    True
    """
    edges = np.sort(faces[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2), 1)
    return bool((np.unique(edges, axis=0, return_counts=True)[1] == 2).all()) and len(faces) > 0


def decimate(points: NDArray[np.float64], faces: NDArray[np.int64], n_faces: int) -> Surface:
    """Return a mesh with about `n_faces` faces, inside the box of the old one; closed if the old one was.

    Where the library cannot keep a closed surface closed, or finds no fewer faces, the mesh stays as it is.

    Parameters
    ----------
    points : (n, 3) float64
        Vertices.
    faces : (m, 3) int64
        Their rows.
    n_faces : int
        How many faces are wanted.

    Raises
    ------
    MissingExtraError
        Without fast-simplification.
    """
    fast = library("fast_simplification")
    same = Surface(points, faces, np.arange(len(points)))
    if len(faces) <= max(n_faces, MIN_FACES):
        return same
    closed, flat = is_closed(faces), np.ptp(points, axis=0).min() == 0 if len(points) else True
    narrow = faces.astype(np.int32)
    for aggressiveness in AGGRESSIVENESS:
        collapses = fast.simplify(
            points,
            narrow,
            target_count=max(n_faces, MIN_FACES),
            agg=aggressiveness,
            return_collapses=True,
            preserve_border=bool(flat),
        )[2]
        if not len(collapses):
            return same
        made, left, mapping = fast.replay_simplification(points, narrow, collapses)
        if len(left) and (not closed or is_closed(left)):
            inside = np.clip(made, points.min(0), points.max(0))
            return Surface(inside, left.astype(np.int64), mapping.astype(np.int64))
    return same


def source_vertices(points: NDArray[np.float64], surface: Surface) -> NDArray[np.int64]:
    """Return for each new vertex the nearest of the old ones that it stands for, (new,)."""
    olds = np.flatnonzero(surface.mapping >= 0)
    news = surface.mapping[olds]
    gaps = ((points[olds] - surface.points[news]) ** 2).sum(1)
    order = np.lexsort((gaps, news))
    found = np.zeros(len(surface.points), np.int64)
    values, first = np.unique(news[order], return_index=True)
    found[values] = olds[order[first]]
    return found


def mesh_levels(shapes: Shapes, steps: PyramidOptions) -> Iterator[LevelStep]:
    """Yield coarser levels of meshes, each decimated from the one before.

    A new vertex has the attributes of the nearest of the vertices that it stands for; attributes of faces are not carried.
    """
    if shapes.links is not None and shapes.links.shape[1] != 3:
        raise SourceError(
            f"Faces have {shapes.links.shape[1]} corners; only triangles are decimated. Cut them into triangles first."
        )
    if shapes.n_dims > 3:
        raise SourceError(f"Meshes of {shapes.n_dims} dimensions are not decimated; expected 2 or 3.")
    objects = np.arange(len(shapes.offsets) - 1)
    level, faces_before = shapes, _local_faces(shapes)
    for kept in select_objects(shapes, steps):
        alive = np.flatnonzero(kept[objects])
        surfaces = []
        for row in range(len(objects)):
            first, last = level.offsets[row], level.offsets[row + 1]
            points = _pad_to_3d(level.positions[first:last])
            faces = faces_before[row]
            wanted = int(np.ceil(len(faces) / steps.factor)) if kept[objects[row]] else len(faces)
            surfaces.append(decimate(points, faces, wanted))
        full = _replace_meshes(level, surfaces)
        mapping = np.concatenate(
            [np.where(s.mapping >= 0, s.mapping + start, -1) for s, start in zip(surfaces, full.offsets, strict=False)]
            or [np.zeros(0, np.int64)]
        )
        coarse = take_objects(full, alive)
        place = np.full(full.n_vertices + 1, -1, np.int64)
        rows = np.repeat(full.offsets[:-1][alive] - coarse.offsets[:-1], np.diff(coarse.offsets))
        place[rows + np.arange(coarse.n_vertices)] = np.arange(coarse.n_vertices)
        yield coarse, place[mapping]
        faces_before = [surfaces[row].faces for row in alive]
        level, objects = coarse, objects[alive]


def _pad_to_3d(positions: NDArray[Any]) -> NDArray[np.float64]:
    points = np.zeros((len(positions), 3))
    points[:, : positions.shape[1]] = positions
    return points


def _local_faces(shapes: Shapes) -> list[NDArray[np.int64]]:
    """Return each object's faces, as rows of its own vertices."""
    faces = np.zeros((0, 3), np.int64) if shapes.links is None else np.asarray(shapes.links, np.int64)
    owner = np.searchsorted(shapes.offsets, faces[:, 0], side="right") - 1
    order = np.argsort(owner, kind="stable")
    parts = np.split(faces[order], np.cumsum(np.bincount(owner, minlength=len(shapes.offsets) - 1))[:-1])
    return [part - start for part, start in zip(parts, shapes.offsets, strict=False)]


def _replace_meshes(level: Shapes, surfaces: list[Surface]) -> Shapes:
    """Put decimated meshes in the place of those of a level."""
    offsets = counts_to_offsets(np.array([len(surface.points) for surface in surfaces], np.int64))
    rows = [
        source_vertices(_pad_to_3d(level.positions[first:last]), surface) + first
        for surface, first, last in zip(surfaces, level.offsets, level.offsets[1:], strict=False)
    ]
    points = np.concatenate([surface.points for surface in surfaces] or [np.zeros((0, 3))])[:, : level.n_dims]
    if level.positions.dtype.kind in "iu":
        points = np.rint(points)
    faces = [surface.faces + start for surface, start in zip(surfaces, offsets, strict=False)]
    return replace(
        level,
        positions=points.astype(level.positions.dtype),
        offsets=offsets,
        links=np.concatenate(faces or [np.zeros((0, 3), np.int64)]),
        link_offsets=counts_to_offsets(np.array([len(surface.faces) for surface in surfaces], np.int64)),
        vertex_attributes=take_attributes(level.vertex_attributes, np.concatenate(rows or [np.zeros(0, np.int64)])),
        link_attributes={},
        fragment_offsets=None,
        fragment_attributes={},
    )
