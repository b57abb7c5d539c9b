"""Neuroglancer precomputed meshes: both formats in, the single-resolution one out."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.content import Capabilities, Content
from raggedatlas.vectors.converters.octree import Surface
from raggedatlas.vectors.converters.precomputed import moved, read_info, take_bytes
from raggedatlas.vectors.converters.precomputed_draco import DRACO_TYPE, check_triangles, joined_surfaces, read_levels
from raggedatlas.vectors.converters.precomputed_skeletons import NANOMETRES
from raggedatlas.vectors.converters.stl import rounded
from raggedatlas.vectors.selection import counts_to_offsets, take_objects
from raggedatlas.vectors.shapes import Shapes

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
