"""Neuroglancer's multi-resolution meshes: levels of detail in the nodes of an octree, quantised, in Draco."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, SourceError
from raggedatlas.vectors.converters.content import Capabilities, Content
from raggedatlas.vectors.converters.octree import Surface, parents_of, parted, z_order
from raggedatlas.vectors.converters.precomputed import IDENTITY, Blob, read_blobs, take_bytes, write_shard
from raggedatlas.vectors.converters.stl import rounded
from raggedatlas.vectors.draco import decode_cell, encode_grid
from raggedatlas.vectors.selection import counts_to_offsets, take_objects
from raggedatlas.vectors.shapes import Shapes

DRACO_TYPE = "neuroglancer_multilod_draco"

BITS = (10, 16)
"""Bits of a coordinate that the format knows."""

MOST_DEPTH = 6

TIE = 1e-6
"""Share of a step by which what is computed may fall short of a half."""

DRACO_HOLDING = Capabilities(kinds=("mesh",), dims=(3,), vertex=(), link=(), object=(), levels=True)


@dataclass(frozen=True)
class Octree:
    """The boxes of one mesh.

    Parameters
    ----------
    origin, shape : (3,) float64
        Where the nodes begin, and the edges of a finest one; both are 32-bit floats.
    depth : int
        The finest nodes are ``2**depth`` on each axis.
    """

    origin: NDArray[np.float64]
    shape: NDArray[np.float64]
    depth: int


def read_levels(path: Path, info: dict[str, Any]) -> list[dict[int, Surface]]:
    """Return the surfaces of each level of detail by id, finest first; positions are those of the stored model.

    Raises
    ------
    SourceError
        If a manifest or its fragments are cut off, or are no Draco mesh.
    MissingExtraError
        Without DracoPy.
    """
    levels: list[dict[int, Surface]] = []
    for blob in read_blobs(path, info.get("sharding"), ".index"):
        for number, surface in enumerate(_surfaces(blob, info, path)):
            if number == len(levels):
                levels.append({})
            levels[number][blob.key] = surface
    return levels


def _surfaces(blob: Blob, info: dict[str, Any], path: Path) -> Iterator[Surface]:
    """Yield the levels of one mesh."""
    where = f"{path}, mesh {blob.key}"
    head, at = take_bytes(blob.data, 0, 6, "<f4", where)
    shape, origin = head[:3].astype(np.float64), head[3:].astype(np.float64)
    (n_levels,), at = take_bytes(blob.data, at, 1, "<u4", where)
    _, at = take_bytes(blob.data, at, int(n_levels), "<f4", where)
    shifts, at = take_bytes(blob.data, at, 3 * int(n_levels), "<f4", where)
    counts, at = take_bytes(blob.data, at, int(n_levels), "<u4", where)
    nodes, sizes = [], []
    for count in counts.tolist():
        places, at = take_bytes(blob.data, at, 3 * count, "<u4", where)
        lengths, at = take_bytes(blob.data, at, count, "<u4", where)
        nodes.append(places.reshape(3, -1).T.astype(np.float64))
        sizes.append(lengths.astype(np.int64))
    total = sum(int(lengths.sum()) for lengths in sizes)
    data = blob.shard[max(0, blob.start - total) : blob.start] if blob.shard else (path / str(blob.key)).read_bytes()
    if total > len(data):
        raise SourceError(f"{where} has {len(data)} bytes of fragments; expected {total}. They are cut off.")
    widest, end = 2 ** int(info.get("vertex_quantization_bits", 16)) - 1, 0
    for level, (places, lengths) in enumerate(zip(nodes, sizes, strict=True)):
        parts = []
        for node, size in zip(places, lengths.tolist(), strict=True):
            end += size
            if size:
                points, faces = _decode(data[end - size : end], where)
                moved = origin + shifts[3 * level : 3 * level + 3] + shape * 2**level * (node + points / widest)
                parts.append((moved, faces))
        yield joined_surfaces(parts)


def _decode(data: bytes, where: str) -> Surface:
    try:
        points, faces = decode_cell(np.frombuffer(data, np.uint8), where)
    except CorruptError as error:
        raise SourceError(f"{where} has a fragment that is no Draco mesh: {error}") from None
    return points.astype(np.float64), faces


def joined_surfaces(parts: Sequence[Surface]) -> Surface:
    """Put surfaces together as they stand, with their seams."""
    starts = counts_to_offsets(np.array([len(points) for points, _ in parts], np.int64))
    points = np.concatenate([np.zeros((0, 3), np.float32), *(points for points, _ in parts)])
    faces = [part + start for (_, part), start in zip(parts, starts, strict=False)]
    return points.astype(np.float32), np.concatenate([np.zeros((0, 3), np.int64), *faces])


def write_draco_meshes(content: Content, path: Path, *, bits: int = 16, depth: int = 0, sharded: bool = True) -> None:
    """Write meshes as a folder in the multi-resolution format, with all levels of the content as levels of detail.

    Parameters
    ----------
    content : Content
        `Content.coarser` has the coarser levels; a mesh has as many as have faces of it.
    path : Path
        The folder.
    bits : int
        10 or 16: positions are rounded to the edge of their node by ``2**bits - 1``; that edge is the mesh's extent by ``2**depth``, times two
        for each coarser level.
    depth : int
        How many times the extent of each mesh is halved on each axis. 0: one node, in which vertices and faces stay as they are. Deeper,
        triangles are cut where they cross nodes, which makes vertices on the seams.
    sharded : bool
        One file of all meshes, or two for each.

    Raises
    ------
    SourceError
        For other bits or depths, and faces that are no triangles.
    MissingExtraError
        Without DracoPy.
    """
    if bits not in BITS or depth not in range(MOST_DEPTH + 1):
        raise SourceError(f"bits={bits}, depth={depth}; expected 10 or 16 bits and a depth of 0 to {MOST_DEPTH}.")
    if not isinstance(sharded, bool):
        raise SourceError(f"sharded={sharded!r}; expected True or False.")
    for shapes in (content.shapes, *content.coarser):
        check_triangles(shapes)
    path.mkdir()
    info: dict[str, Any] = {
        "@type": DRACO_TYPE,
        "vertex_quantization_bits": bits,
        "transform": IDENTITY,
        "lod_scale_multiplier": 1.0,
    }
    ids, manifests, fragments = np.asarray(content.shapes.ids), [], []
    for key in ids.tolist():
        surfaces = [*_of_object(content, key)]
        tree = _octree(surfaces, depth)
        manifest, data = _encoded(surfaces, tree, bits)
        if sharded:
            manifests.append(manifest)
            fragments.append(data)
        else:
            (path / f"{key}.index").write_bytes(manifest)
            (path / str(key)).write_bytes(data)
    if sharded:
        info["sharding"] = write_shard(path, ids.astype(np.uint64), manifests, fragments)
    (path / "info").write_text(json.dumps(info), encoding="utf-8")


def check_triangles(shapes: Shapes) -> None:
    """Refuse faces that are no triangles; `SourceError` says how many corners they have."""
    if shapes.links is not None and shapes.links.shape[1] != 3:
        raise SourceError(
            f"The mesh has faces of {shapes.links.shape[1]} corners; Neuroglancer's formats hold triangles. Cut the faces first."
        )


def _of_object(content: Content, key: int) -> Iterator[Surface]:
    """Yield the levels of one mesh, as many as have faces; the finest in any case."""
    for number, shapes in enumerate((content.shapes, *content.coarser)):
        rows = np.flatnonzero(np.asarray(shapes.ids) == key)
        one = take_objects(shapes, rows)
        faces = np.zeros((0, 3), np.int64) if one.links is None else one.links.astype(np.int64)
        if number and not len(faces):
            return
        yield one.positions.astype(np.float64), faces


def _octree(surfaces: Sequence[Surface], depth: int) -> Octree:
    """Return nodes around all levels of a mesh, in numbers that 32-bit floats hold."""
    points = np.concatenate([points for points, faces in surfaces if len(faces)] or [np.zeros((1, 3))])
    low, high = points.min(0), points.max(0)
    origin = low.astype(np.float32)
    origin = np.where(origin > low, np.nextafter(origin, np.float32(-np.inf)), origin)
    extent = high - origin.astype(np.float64)
    extent[extent <= 0] = extent.max() if extent.max() > 0 else 1.0
    shape = (extent / 2**depth).astype(np.float32)
    shape = np.where(shape.astype(np.float64) * 2**depth < extent, np.nextafter(shape, np.float32(np.inf)), shape)
    return Octree(origin.astype(np.float64), shape.astype(np.float64), depth)


def _encoded(surfaces: Sequence[Surface], tree: Octree, bits: int) -> tuple[bytes, bytes]:
    """Return the manifest and the fragments of one mesh."""
    nodes: list[NDArray[np.int64]] = []
    sizes: list[NDArray[np.int64]] = []
    data: list[bytes] = []
    scales: list[float] = []
    for level, surface in enumerate(surfaces):
        parts = _nodes(surface, tree, level)
        above = parents_of(nodes[-1]) if nodes else np.zeros((0, 3), np.int64)
        places = z_order(np.concatenate([np.array([*parts], np.int64).reshape(-1, 3), above]))
        found = [parts.get(tuple(place)) for place in places.tolist()]
        widest, edge = 2**bits - 1, tree.shape * 2**level
        encoded = [
            b"" if one is None else encode_grid(_on_grid(one[0], tree.origin + edge * place, edge, widest), one[1])
            for place, one in zip(places, found, strict=True)
        ]
        nodes.append(places)
        sizes.append(np.array([len(part) for part in encoded], np.int64))
        data += encoded
        least = float(np.nextafter(np.float32(scales[-1]), np.float32(np.inf))) if scales else 0.0
        scales.append(max(_mean_edge(surface), least))
    counts = np.array([len(places) for places in nodes], "<u4")
    head = [tree.shape.astype("<f4"), tree.origin.astype("<f4"), np.array([len(nodes)], "<u4")]
    head += [np.array(scales, "<f4"), np.zeros(3 * len(nodes), "<f4"), counts]
    for places, lengths in zip(nodes, sizes, strict=True):
        head += [np.ascontiguousarray(places.T, "<u4"), lengths.astype("<u4")]
    return b"".join(part.tobytes() for part in head), b"".join(data)


def _nodes(surface: Surface, tree: Octree, level: int) -> dict[tuple[int, ...], Surface]:
    """Return the surface in each node of a level; no triangle crosses into another node, or from half to half of its own."""
    if not len(surface[1]):
        return {}
    halves = max(tree.depth - level + (level > 0), 0)  # coarser nodes are cut in halves too
    if halves == 0:
        return {(0, 0, 0): surface}
    return parted(surface, tree.origin, tree.shape * 2 ** (tree.depth - halves), (2**halves, int(level > 0)))


def _on_grid(points: NDArray[Any], origin: NDArray[Any], edge: NDArray[Any], widest: int) -> NDArray[np.int32]:
    """Round positions to the whole numbers of a node; what lies between its halves goes up, where viewers divide it."""
    return np.asarray(np.clip(np.floor((points - origin) / edge * widest + 0.5 + TIE), 0, widest), np.int32)


def _mean_edge(surface: Surface) -> float:
    points, faces = surface
    if not len(faces):
        return 0.0
    return float(np.linalg.norm(points[faces] - points[np.roll(faces, 1, axis=1)], axis=2).mean())


def draco_losses(shapes: Shapes) -> Iterator[str]:
    """Yield that positions are rounded, and which objects have vertices but no faces."""
    yield from rounded(shapes, np.float32, "32 bits")
    yield "rounded: positions, to the whole numbers of a grid over each mesh"
    counts = np.zeros(shapes.n_objects, np.int64)
    if shapes.links is not None and shapes.n_links:
        owner = np.searchsorted(shapes.offsets, shapes.links[:, 0], side="right") - 1
        counts = np.bincount(owner, minlength=shapes.n_objects)
    bare = int(np.count_nonzero((counts == 0) & (shapes.vertex_counts > 0)))
    if bare:
        yield f"vertices: those of {bare} meshes without faces are left out"
