"""Neuroglancer precomputed skeletons: a file for each segment, or shards (seed 002 keeps them as skeletons or graphs)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.content import Capabilities, Content
from raggedatlas.vectors.converters.precomputed import (
    IDENTITY,
    TYPES,
    Blob,
    moved,
    read_blobs,
    read_info,
    stored_type,
    take_bytes,
    value_losses,
)
from raggedatlas.vectors.converters.stl import rounded
from raggedatlas.vectors.geometry import Axis
from raggedatlas.vectors.selection import counts_to_offsets, take_objects
from raggedatlas.vectors.shapes import Attribute, Shapes

SKELETON_TYPE = "neuroglancer_skeletons"

SKELETON_HOLDING = Capabilities(kinds=("skeleton", "graph"), dims=(3,), link=(), object=(), strings=False)

NANOMETRES = tuple(Axis(name, "nanometer") for name in "xyz")


def read_skeletons(path: Path) -> Content:
    """Read a folder of precomputed skeletons, with or without shards.

    Parameters
    ----------
    path : Path
        A folder whose ``info`` is of the type ``neuroglancer_skeletons``.

    Returns
    -------
    Content
        Skeletons with links (child, parent): as they stand where they make trees, else directed away from the first vertex of each part.
        A graph if any of them has a loop. Positions are moved by the transform of the info.

    Raises
    ------
    SourceError
        If the info or a file cannot be read, a file is cut off, or an edge names a vertex that is not there.
    """
    info = read_info(path)
    columns = []
    for said in info.get("vertex_attributes", []):
        if said.get("data_type") not in TYPES or int(said.get("num_components", 0)) < 1:
            raise SourceError(f"{path}/info says the attribute {said}; expected a data_type of {', '.join(TYPES)}.")
        columns.append((str(said["id"]), str(said["data_type"]), int(said["num_components"])))
    parts = [_read_one(blob, columns, path) for blob in read_blobs(path, info.get("sharding"))]
    if not parts:
        raise SourceError(f"{path} holds no skeletons.")
    offsets = counts_to_offsets(np.array([len(points) for _, points, _, _ in parts]))
    links = np.concatenate([edges + start for (_, _, edges, _), start in zip(parts, offsets, strict=False)])
    positions = moved(np.concatenate([points for _, points, _, _ in parts]), info, path)
    trees = as_trees(links, len(positions))
    attributes = {
        name: Attribute(np.concatenate([values[k] for _, _, _, values in parts]))
        for k, (name, _, _) in enumerate(columns)
    }
    shapes = Shapes(
        "graph" if trees is None else "skeleton",
        positions,
        offsets,
        np.array([key for key, _, _, _ in parts]),
        links if trees is None else trees,
        counts_to_offsets(np.array([len(edges) for _, _, edges, _ in parts])),
        attributes,
    )
    return Content(shapes, axes=NANOMETRES)


def _read_one(
    blob: Blob, columns: list[tuple[str, str, int]], path: Path
) -> tuple[int, NDArray[Any], NDArray[np.int64], list[NDArray[Any]]]:
    where = f"{path}, skeleton {blob.key}"
    (n, m), at = take_bytes(blob.data, 0, 2, "<u4", where)
    points, at = take_bytes(blob.data, at, 3 * int(n), "<f4", where)
    edges, at = take_bytes(blob.data, at, 2 * int(m), "<u4", where)
    if len(edges) and edges.max() >= n:
        raise SourceError(f"{where} has an edge to vertex {edges.max()}; it has {n}.")
    values = []
    for _, kind, channels in columns:
        flat, at = take_bytes(blob.data, at, int(n) * channels, np.dtype(kind).newbyteorder("<").str, where)
        flat = flat.astype(kind)
        values.append(flat.reshape(-1, channels) if channels > 1 else flat)
    if at != len(blob.data):
        raise SourceError(f"{where} has {len(blob.data)} bytes; expected {at} by its info.")
    return blob.key, points.reshape(-1, 3).astype(np.float32), edges.reshape(-1, 2).astype(np.int64), values


def as_trees(links: NDArray[np.int64], n_vertices: int) -> NDArray[np.int64] | None:
    """Return edges as (child, parent), or None where they have a loop; each tree's root is its first vertex unless they are trees already.

    Examples
    --------
    >>> as_trees(np.array([[0, 1], [2, 1], [0, 3]]), 4).tolist()
    [[1, 0], [2, 1], [3, 0]]
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, connected_components

    ones = np.ones(len(links), np.int8)
    matrix = csr_array((ones, (links[:, 0], links[:, 1])), shape=(n_vertices, n_vertices))
    n_parts, labels = connected_components(matrix, directed=False)
    if len(links) != n_vertices - n_parts:
        return None
    if len(np.unique(links[:, 0])) == len(links):
        return links
    roots = np.unique(labels, return_index=True)[1]
    ends = np.concatenate([links, np.stack([np.full(n_parts, n_vertices), roots], 1)])
    whole = csr_array((np.ones(len(ends), np.int8), (ends[:, 0], ends[:, 1])), shape=(n_vertices + 1, n_vertices + 1))
    above = breadth_first_order(whole, n_vertices, directed=False)[1]
    forward = above[links[:, 0]] == links[:, 1]
    return np.where(forward[:, None], links, links[:, ::-1])


def write_skeletons(content: Content, path: Path) -> None:
    """Write skeletons or graphs as a folder, a file for each; positions in nanometres are expected by viewers."""
    shapes = content.shapes
    kept = [
        (name, a, kind) for name, a in shapes.vertex_attributes.items() if (kind := stored_type(a)) and not _coded(a)
    ]
    info = {
        "@type": SKELETON_TYPE,
        "transform": IDENTITY,
        "vertex_attributes": [
            {"id": name, "data_type": kind, "num_components": attribute.n_channels} for name, attribute, kind in kept
        ],
    }
    path.mkdir()
    (path / "info").write_text(json.dumps(info), encoding="utf-8")
    for row, key in enumerate(np.asarray(shapes.ids).tolist()):
        one = take_objects(shapes, np.array([row]))
        edges = np.zeros((0, 2), "<u4") if one.links is None else one.links.astype("<u4")
        parts = [np.array([one.n_vertices, len(edges)], "<u4"), one.positions.astype("<f4"), edges]
        for name, _, kind in kept:
            parts.append(one.vertex_attributes[name].values.astype(np.dtype(kind).newbyteorder("<")))
        (path / str(key)).write_bytes(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))


def _coded(attribute: Attribute) -> bool:
    return "categories" in attribute.metadata


def skeleton_losses(shapes: Shapes) -> Iterator[str]:
    """Yield which values become narrower, or are left out."""
    yield from rounded(shapes, np.float32, "32 bits")
    for name, attribute in shapes.vertex_attributes.items():
        yield from value_losses("vertex", name, attribute)
