"""Graphs and skeletons become simpler between their branch points, which all stay."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.store.native import library
from raggedatlas.vectors.blobs import raise_fault
from raggedatlas.vectors.coarsening.lines import keep_heaviest, vertex_tolerances
from raggedatlas.vectors.coarsening.options import (
    LevelStep,
    PyramidOptions,
    build_coarse_levels,
    masks_from_weights,
    nearest_kept,
)
from raggedatlas.vectors.selection import counts_to_offsets
from raggedatlas.vectors.shapes import Shapes


@dataclass(frozen=True)
class Paths:
    """The unbranched runs of a graph.

    Parameters
    ----------
    members : (T,) int64
        Vertices, run after run, both ends included.
    offsets : (chains + 1,) int64
        Where runs begin.
    forward : (chains,) bool
        Whether links point along the run, or against it.
    """

    members: NDArray[np.int64]
    offsets: NDArray[np.int64]
    forward: NDArray[np.bool_]


def find_paths(links: NDArray[Any], n_vertices: int, fixed: NDArray[np.bool_]) -> Paths:
    """Cut a graph at its fixed vertices into unbranched runs; rings without one are cut at their lowest vertex.

    Parameters
    ----------
    links : (M, 2) integers
        Edges.
    n_vertices : int
        How many vertices.
    fixed : (N,) bool
        Where runs end; all vertices that do not have two edges must be among them.
    """
    links = links.astype(np.int64).reshape(-1, 2)
    n_links = len(links)
    near, far = links.T.ravel(), links[:, ::-1].T.ravel()
    order = np.argsort(near, kind="stable")
    adjacency = np.stack([far[order], order % max(n_links, 1)], 1)
    bounds = counts_to_offsets(np.bincount(near, minlength=n_vertices))
    members, ends = np.empty(2 * n_links, np.int64), np.empty((n_links, 2), np.int64)
    n_chains, fixed = np.zeros(1, np.int64), np.ascontiguousarray(fixed).view(np.uint8)
    fault = library().ra_walk_chains(
        adjacency, n_links, bounds, fixed, n_vertices, np.zeros(n_links, np.uint8), members, ends, n_chains
    )
    raise_fault(fault, "A graph")
    ends = ends[: n_chains[0]]
    offsets = np.concatenate([[0], ends[:, 0]]).astype(np.int64)
    members = members[: offsets[-1]]
    return Paths(members, offsets, links[ends[:, 1], 0] == members[offsets[:-1]])


def fixed_vertices(shapes: Shapes, links: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which vertices stay: branch points, ends, lone vertices, ends of loops, and the roots of skeletons."""
    degree = np.bincount(links.ravel(), minlength=shapes.n_vertices)
    fixed: NDArray[np.bool_] = degree != 2
    fixed[links[links[:, 0] == links[:, 1], 0]] = True
    if shapes.kind == "skeleton":
        has_parent = np.zeros(shapes.n_vertices, bool)
        has_parent[links[:, 0]] = True
        fixed |= ~has_parent
    return fixed


def required_inner_vertices(chains: Paths) -> NDArray[np.int64]:
    """Return how many inner vertices each run must keep so that no loop and no parallel run is lost."""
    ends = np.sort(np.stack([chains.members[chains.offsets[:-1]], chains.members[chains.offsets[1:] - 1]], 1), 1)
    _, which, counts = np.unique(ends, axis=0, return_inverse=True, return_counts=True)
    return np.where(ends[:, 0] == ends[:, 1], 2, np.where(counts[which.ravel()] > 1, 1, 0))


def graph_levels(shapes: Shapes, steps: PyramidOptions) -> Iterator[LevelStep]:
    """Yield coarser levels of graphs and skeletons.

    Branch points, ends, lone vertices and roots stay. The runs between them are simplified by Douglas and Peucker's algorithm;
    a loop keeps two inner vertices and parallel runs one each, so that components, branches and loops are as many as before. A
    new link points as the links did that it stands for; attributes of links are not carried, as links are merged.
    """
    links = np.zeros((0, 2), np.int64) if shapes.links is None else np.asarray(shapes.links, np.int64)
    if links.shape[1] != 2:
        raise SourceError(f"Links of a {shapes.kind} have {links.shape[1]} ends; expected 2.")
    chains = find_paths(links, shapes.n_vertices, fixed_vertices(shapes, links))
    points = shapes.positions.astype(np.float64)
    along = vertex_tolerances(points[chains.members], chains.offsets)
    keep_heaviest(along, chains.offsets, required_inner_vertices(chains))
    weights = np.full(shapes.n_vertices, np.inf)
    weights[chains.members] = along
    chain = np.repeat(np.arange(len(chains.forward)), np.diff(chains.offsets))

    def stand_in(kept: NDArray[np.bool_]) -> NDArray[np.int64]:
        stands = np.arange(len(kept))
        stands[chains.members] = chains.members[nearest_kept(points[chains.members], kept[chains.members])]
        return stands

    def relink(kept: NDArray[np.bool_]) -> NDArray[np.int64]:
        rows = np.flatnonzero(kept[chains.members])
        joined = chain[rows[:-1]] == chain[rows[1:]]
        near, far = chains.members[rows[:-1][joined]], chains.members[rows[1:][joined]]
        forward = chains.forward[chain[rows[:-1][joined]]]
        return np.stack([np.where(forward, near, far), np.where(forward, far, near)], 1)

    yield from build_coarse_levels(shapes, masks_from_weights(shapes, weights, steps), stand_in, relink)
