"""Neuroglancer precomputed meshes: both formats in, the single-resolution one out."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, SourceError
from raggedatlas.vectors.converters.content import Capabilities, Content
from raggedatlas.vectors.converters.meshes import rounded
from raggedatlas.vectors.converters.precomputed import (
    IDENTITY,
    NANOMETRES,
    Blob,
    moved,
    read_blobs,
    read_info,
    take_bytes,
    write_shard,
)
from raggedatlas.vectors.shapes import Shapes, counts_to_offsets, take_objects
from raggedatlas.vectors.storage.codecs import decode_cell, encode_grid

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


LEGACY_TYPE = "neuroglancer_legacy_mesh"

MESH_HOLDING = Capabilities(kinds=("mesh",), dims=(3,), vertex=(), link=(), object=())


def read_meshes(path: Path) -> Content:
    """Read a folder of precomputed meshes.

    Parameters
    ----------
    path : Path
        A folder of single-resolution meshes (``<id>:0`` files, with or without ``info``), or of multi-resolution ones, with or without
        shards.

    Returns
    -------
    Content
        A mesh for each id; fragments are joined as they stand, with their seams. `Content.coarser` has the coarser levels of detail.

    Raises
    ------
    SourceError
        If a file is missing, cut off, or names a vertex that is not there.
    MissingExtraError
        For Draco without DracoPy.
    """
    info: dict[str, Any] = {"@type": LEGACY_TYPE}
    if (path / "info").exists():
        info = read_info(path)
    if info.get("@type") == DRACO_TYPE:
        levels = read_levels(path, info)
    else:
        names = sorted(
            (int(f.name[:-2]), f) for f in path.iterdir() if f.name.endswith(":0") and f.name[:-2].isdecimal()
        )
        levels = [{key: _read_legacy(file) for key, file in names}]
    if not levels or not levels[0]:
        raise SourceError(f"{path} holds no meshes.")
    finest, *coarser = (_shapes(meshes, info, path) for meshes in levels)
    return Content(finest, axes=NANOMETRES, coarser=tuple(coarser))


def _shapes(meshes: dict[int, Surface], info: dict[str, Any], path: Path) -> Shapes:
    """Return surfaces as objects, with their ids."""
    offsets = counts_to_offsets(np.array([len(points) for points, _ in meshes.values()]))
    links = [faces + start for (_, faces), start in zip(meshes.values(), offsets, strict=False)]
    positions = moved(np.concatenate([points for points, _ in meshes.values()]), info, path)
    bounds = counts_to_offsets(np.array([len(part) for part in links]))
    return Shapes("mesh", positions, offsets, np.array([*meshes]), np.concatenate(links), bounds)


def _read_legacy(file: Path) -> Surface:
    try:
        names = [str(name) for name in json.loads(file.read_text(encoding="utf-8"))["fragments"]]
    except (ValueError, KeyError, TypeError):
        raise SourceError(f"{file} names no fragments; expected JSON with the key 'fragments'.") from None
    parts = []
    for name in names:
        fragment = file.parent / name
        if fragment.parent != file.parent or not fragment.is_file():
            raise SourceError(f"{file} names the fragment {name!r}, which is not in its folder.")
        data = fragment.read_bytes()
        (n,), at = take_bytes(data, 0, 1, "<u4", str(fragment))
        points, at = take_bytes(data, at, 3 * int(n), "<f4", str(fragment))
        if (len(data) - at) % 12:
            raise SourceError(
                f"{fragment} has {len(data) - at} bytes of faces; expected a multiple of 12. It is cut off."
            )
        faces = np.frombuffer(data, "<u4", -1, at).reshape(-1, 3)
        if len(faces) and faces.max() >= n:
            raise SourceError(f"{fragment} has a face of vertex {faces.max()}; it has {n}.")
        parts.append((points.reshape(-1, 3), faces.astype(np.int64)))
    return joined_surfaces(parts)


def write_meshes(content: Content, path: Path) -> None:
    """Write meshes as a folder in the single-resolution format, one fragment for each."""
    shapes = content.shapes
    check_triangles(shapes)
    path.mkdir()
    (path / "info").write_text(json.dumps({"@type": LEGACY_TYPE}), encoding="utf-8")
    for row, key in enumerate(np.asarray(shapes.ids).tolist()):
        one = take_objects(shapes, np.array([row]))
        faces = np.zeros((0, 3), "<u4") if one.links is None else one.links.astype("<u4")
        (path / f"{key}:0").write_text(json.dumps({"fragments": [f"{key}:0:0"]}), encoding="utf-8")
        points = np.ascontiguousarray(one.positions, "<f4")
        (path / f"{key}:0:0").write_bytes(np.uint32(one.n_vertices).tobytes() + points.tobytes() + faces.tobytes())


def mesh_losses(shapes: Shapes) -> Iterator[str]:
    """Yield whether positions become narrower."""
    yield from rounded(shapes, np.float32, "32 bits")
