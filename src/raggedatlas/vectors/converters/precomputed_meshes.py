"""Neuroglancer precomputed meshes: the single-resolution format in and out, the finest level of the Draco one in."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, SourceError
from raggedatlas.vectors.converters.content import Content, Holding
from raggedatlas.vectors.converters.precomputed import Blob, moved, read_blobs, read_info, take_bytes
from raggedatlas.vectors.converters.precomputed_skeletons import NANOMETRES
from raggedatlas.vectors.converters.stl import rounded
from raggedatlas.vectors.draco import decode_cell
from raggedatlas.vectors.shapes import Shapes
from raggedatlas.vectors.subsets import spread, take_objects

LEGACY_TYPE, DRACO_TYPE = "neuroglancer_legacy_mesh", "neuroglancer_multilod_draco"

MESH_HOLDING = Holding(kinds=("mesh",), dims=(3,), vertex=(), link=(), object=())

Surface = tuple[NDArray[Any], NDArray[np.int64]]


def read_meshes(path: Path) -> Content:
    """Read a folder of precomputed meshes.

    Parameters
    ----------
    path : Path
        A folder of single-resolution meshes (``<id>:0`` files, with or without ``info``), or of multi-resolution ones, of which the finest
        level is read, with or without shards.

    Returns
    -------
    Content
        A mesh for each id; fragments are joined as they stand, with their seams.

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
        meshes = {blob.key: _read_draco(blob, info, path) for blob in read_blobs(path, info.get("sharding"), ".index")}
        left: tuple[str, ...] = ("coarser levels of detail are left out",)
    else:
        names = sorted(
            (int(f.name[:-2]), f) for f in path.iterdir() if f.name.endswith(":0") and f.name[:-2].isdecimal()
        )
        meshes, left = {key: _read_legacy(file) for key, file in names}, ()
    if not meshes:
        raise SourceError(f"{path} holds no meshes.")
    offsets = spread(np.array([len(points) for points, _ in meshes.values()]))
    links = [faces + start for (_, faces), start in zip(meshes.values(), offsets, strict=False)]
    positions = moved(np.concatenate([points for points, _ in meshes.values()]), info, path)
    bounds = spread(np.array([len(part) for part in links]))
    return Content(
        Shapes("mesh", positions, offsets, np.array([*meshes]), np.concatenate(links), bounds),
        axes=NANOMETRES,
        left=left,
    )


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
    return _joined(parts)


def _joined(parts: list[Surface]) -> Surface:
    starts = spread(np.array([len(points) for points, _ in parts], np.int64))
    points = np.concatenate([np.zeros((0, 3), np.float32), *(points for points, _ in parts)])
    faces = [part + start for (_, part), start in zip(parts, starts, strict=False)]
    return points.astype(np.float32), np.concatenate([np.zeros((0, 3), np.int64), *faces])


def _read_draco(blob: Blob, info: dict[str, Any], path: Path) -> Surface:
    """Read the finest level of one multi-resolution mesh."""
    where = f"{path}, mesh {blob.key}"
    head, at = take_bytes(blob.data, 0, 6, "<f4", where)
    shape, origin = head[:3].astype(np.float64), head[3:].astype(np.float64)
    (n_levels,), at = take_bytes(blob.data, at, 1, "<u4", where)
    _, at = take_bytes(blob.data, at, int(n_levels), "<f4", where)
    shifts, at = take_bytes(blob.data, at, 3 * int(n_levels), "<f4", where)
    counts, at = take_bytes(blob.data, at, int(n_levels), "<u4", where)
    total = 0
    nodes, sizes = np.zeros((0, 3)), np.zeros(0, np.int64)
    for level, count in enumerate(counts.tolist()):
        places, at = take_bytes(blob.data, at, 3 * count, "<u4", where)
        lengths, at = take_bytes(blob.data, at, count, "<u4", where)
        total += int(lengths.astype(np.int64).sum())
        if level == 0:
            nodes, sizes = places.reshape(3, -1).T.astype(np.float64), lengths.astype(np.int64)
    data = blob.shard[blob.start - total : blob.start] if blob.shard else (path / str(blob.key)).read_bytes()
    ends = np.cumsum(sizes)
    if len(ends) and ends[-1] > len(data):
        raise SourceError(f"{where} has {len(data)} bytes of fragments; expected {ends[-1]}. They are cut off.")
    widest = 2 ** int(info.get("vertex_quantization_bits", 16)) - 1
    parts = []
    for node, size, end in zip(nodes, sizes, ends, strict=True):
        if size:
            points, faces = _decode(data[end - size : end], where)
            parts.append((origin + shifts[:3] + shape * (node + points / widest), faces))
    return _joined(parts)


def _decode(data: bytes, where: str) -> Surface:
    try:
        points, faces = decode_cell(np.frombuffer(data, np.uint8), where)
    except CorruptError as error:
        raise SourceError(f"{where} has a fragment that is no Draco mesh: {error}") from None
    return points.astype(np.float64), faces


def write_meshes(content: Content, path: Path) -> None:
    """Write meshes as a folder in the single-resolution format, one fragment for each."""
    shapes = content.shapes
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
