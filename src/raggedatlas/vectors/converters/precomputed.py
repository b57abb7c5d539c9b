"""Neuroglancer's precomputed formats: skeletons, and meshes of a single resolution."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.content import Capabilities, Content
from raggedatlas.vectors.geometry import Axis
from raggedatlas.vectors.shapes import Attribute, Shapes, counts_to_offsets, each_object

TYPES = ("float32", "int8", "uint8", "int16", "uint16", "int32", "uint32")
"""Element types of values."""

IDENTITY = [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]


def read_info(path: Path) -> dict[str, Any]:
    """Return the ``info`` of a folder; `SourceError` if it cannot be read."""
    try:
        info = json.loads((path / "info").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SourceError(f"{path} has no file 'info' in JSON; it is no precomputed folder.") from None
    if not isinstance(info, dict):
        raise SourceError(f"{path}/info is no JSON object; it is no precomputed folder.")
    for key in ("skeletons", "mesh"):
        if isinstance(info.get(key), str) and "scales" in info:
            raise SourceError(f"{path} is a volume of images; its shapes lie in {path / info[key]}. Give that folder.")
    return info


def moved(positions: NDArray[Any], info: Mapping[str, Any], path: Path) -> NDArray[Any]:
    """Return stored positions in the space of the model; `SourceError` if the transform is invalid."""
    try:
        matrix = np.array(info.get("transform", IDENTITY), np.float64).reshape(3, 4)
    except (TypeError, ValueError):
        raise SourceError(f"{path}/info has a transform that is not 12 numbers.") from None
    if np.array_equal(matrix.ravel(), IDENTITY):
        return positions
    return (positions.astype(np.float64) @ matrix[:, :3].T + matrix[:, 3]).astype(np.float32)


def read_blobs(path: Path, sharding: Mapping[str, Any] | None) -> Iterator[tuple[int, bytes]]:
    """Yield the ids of a folder, ascending, and the bytes of each.

    Parameters
    ----------
    path : Path
        The folder.
    sharding : mapping or None
        The value of the same name in ``info``; None: a file for each id.

    Raises
    ------
    SourceError
        If a shard is truncated or has an unknown encoding.
    """
    if sharding is not None:
        shards = [blob for file in sorted(path.glob("*.shard")) for blob in _read_shard(file, sharding)]
        # Ids are hashed to shards; only all shards together can be sorted.
        yield from sorted(shards, key=itemgetter(0))
        return
    for file in sorted((file for file in path.iterdir() if file.name.isdecimal()), key=lambda file: int(file.name)):
        yield int(file.name), file.read_bytes()


def _read_shard(file: Path, sharding: Mapping[str, Any]) -> Iterator[tuple[int, bytes]]:
    data = file.read_bytes()
    codecs: dict[str, Callable[[bytes], bytes]] = {"raw": bytes, "gzip": gzip.decompress}
    try:
        unpack_list = codecs[sharding.get("minishard_index_encoding", "raw")]
        unpack = codecs[sharding.get("data_encoding", "raw")]
        n_lists = 1 << int(sharding["minishard_bits"])
        # A shard begins with the byte range of each minishard's index; all other offsets count from the end of these.
        base = 16 * n_lists
        # Every minishard is read, so the hash of the sharding is not needed.
        for first, last in np.frombuffer(data, "<u8", 2 * n_lists).reshape(-1, 2).tolist():
            packed = data[base + first : base + last]
            if base + last > len(data):
                raise ValueError("it ends inside a list of its blobs")
            if last > first:
                keys, gaps, sizes = np.frombuffer(unpack_list(packed), "<u8").reshape(3, -1)
                # Ids are differences to the previous id, and starts are gaps to the end of the previous blob.
                ends = np.cumsum(gaps + sizes).tolist()
                for key, size, end in zip(np.cumsum(keys).tolist(), sizes.tolist(), ends, strict=True):
                    if base + end > len(data):
                        raise ValueError("it ends inside a blob")
                    yield key, unpack(data[base + end - size : base + end])
    except (KeyError, ValueError, TypeError, EOFError, OSError, zlib.error) as error:
        raise SourceError(f"{file} is no shard that can be read: {type(error).__name__}: {error}.") from None


def take_bytes(data: bytes, at: int, count: int, kind: str, where: str) -> tuple[NDArray[Any], int]:
    """Return `count` values at a place of a blob and the place behind them; `SourceError` if it ends before."""
    size = np.dtype(kind).itemsize * count
    if at + size > len(data):
        raise SourceError(f"{where} has {len(data)} bytes; expected {at + size} or more. It is cut off.")
    return np.frombuffer(data, kind, count, at), at + size


def stored_type(attribute: Attribute) -> str | None:
    """Return the element type that holds an attribute, or None: wide integers become narrow where they fit, doubles become floats."""
    values = attribute.values
    if values.dtype.kind == "f":
        return "float32"
    if values.dtype.kind not in "iu":
        return None
    if values.dtype.name in TYPES:
        return str(values.dtype.name)
    fits = (kind for kind in ("int32", "uint32") if _fits(values, kind))
    return next(fits, None)


def _fits(values: NDArray[Any], kind: str) -> bool:
    limits = np.iinfo(kind)
    return not values.size or bool(limits.min <= values.min() and values.max() <= limits.max)


def value_losses(family: str, name: str, attribute: Attribute) -> Iterator[str]:
    """Yield the losses of an attribute's values."""
    kind = stored_type(attribute)
    if kind is None:
        if "categories" not in attribute.metadata and attribute.values.dtype.kind in "iuf":
            yield f"{family} attribute {name!r} is left out: it needs 64 bits"
    elif attribute.values.dtype.kind == "f" and attribute.values.dtype.itemsize > 4:
        yield f"rounded: {family} attribute {name!r}, to 32-bit floats"


SKELETON_TYPE = "neuroglancer_skeletons"

SKELETON_HOLDING = Capabilities(kinds=("skeleton", "graph"), dims=(3,), link=(), object=(), strings=False, float32=True)

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
        Skeletons with links (child, parent): as stored if they form trees, otherwise directed away from the first vertex of each part.
        A graph if any of them has a loop. Positions are moved by the transform of the info.

    Raises
    ------
    SourceError
        If the info or a file cannot be read, a file is truncated, or an edge refers to a missing vertex.
    """
    info = read_info(path)
    columns = []
    for facts in info.get("vertex_attributes", []):
        if facts.get("data_type") not in TYPES or int(facts.get("num_components", 0)) < 1:
            raise SourceError(f"{path}/info says the attribute {facts}; expected a data_type of {', '.join(TYPES)}.")
        columns.append((str(facts["id"]), str(facts["data_type"]), int(facts["num_components"])))
    parts = [_read_one(key, data, columns, path) for key, data in read_blobs(path, info.get("sharding"))]
    if not parts:
        raise SourceError(f"{path} holds no skeletons.")
    offsets = counts_to_offsets(np.array([len(points) for _, points, _, _ in parts]))
    links = np.concatenate([edges + start for (_, _, edges, _), start in zip(parts, offsets, strict=False)])
    positions = moved(np.concatenate([points for _, points, _, _ in parts]), info, path)
    # Edges stay in their rows and at most swap their ends, so the offsets of links remain valid.
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
    key: int, data: bytes, columns: list[tuple[str, str, int]], path: Path
) -> tuple[int, NDArray[Any], NDArray[np.int64], list[NDArray[Any]]]:
    where = f"{path}, skeleton {key}"
    (n, m), at = take_bytes(data, 0, 2, "<u4", where)
    points, at = take_bytes(data, at, 3 * int(n), "<f4", where)
    edges, at = take_bytes(data, at, 2 * int(m), "<u4", where)
    # Unchecked, such an edge would lead into the next skeleton after concatenation.
    if len(edges) and edges.max() >= n:
        raise SourceError(f"{where} has an edge to vertex {edges.max()}; it has {n}.")
    values = []
    for _, kind, channels in columns:
        flat, at = take_bytes(data, at, int(n) * channels, np.dtype(kind).newbyteorder("<").str, where)
        flat = flat.astype(kind)
        values.append(flat.reshape(-1, channels) if channels > 1 else flat)
    if at != len(data):
        raise SourceError(f"{where} has {len(data)} bytes; expected {at} by its info.")
    return key, points.reshape(-1, 3).astype(np.float32), edges.reshape(-1, 2).astype(np.int64), values


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
    # A part without a loop has one edge fewer than vertices.
    if len(links) != n_vertices - n_parts:
        return None
    if len(np.unique(links[:, 0])) == len(links):
        return links
    roots = np.unique(labels, return_index=True)[1]
    # An additional vertex above all roots, so that one search visits every part.
    ends = np.concatenate([links, np.stack([np.full(n_parts, n_vertices), roots], 1)])
    tree = csr_array((np.ones(len(ends), np.int8), (ends[:, 0], ends[:, 1])), shape=(n_vertices + 1, n_vertices + 1))
    above = breadth_first_order(tree, n_vertices, directed=False)[1]
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
    for key, one in each_object(shapes):
        edges = one.edges().astype("<u4")
        parts = [np.array([one.n_vertices, len(edges)], "<u4"), one.positions.astype("<f4"), edges]
        # Attributes have no names in the bytes: their order is that of `info`.
        for name, _, kind in kept:
            parts.append(one.vertex_attributes[name].values.astype(np.dtype(kind).newbyteorder("<")))
        (path / str(key)).write_bytes(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))


def _coded(attribute: Attribute) -> bool:
    return "categories" in attribute.metadata


def skeleton_losses(shapes: Shapes) -> Iterator[str]:
    """Yield which values become narrower, or are left out."""
    for name, attribute in shapes.vertex_attributes.items():
        yield from value_losses("vertex", name, attribute)


MESH_TYPE = "neuroglancer_legacy_mesh"

MESH_HOLDING = Capabilities(kinds=("mesh",), dims=(3,), vertex=(), link=(), object=(), float32=True)


def read_meshes(path: Path) -> Content:
    """Read a folder of precomputed meshes.

    Parameters
    ----------
    path : Path
        A folder with a manifest ``<id>:0`` for each mesh, with or without ``info``.

    Returns
    -------
    Content
        A mesh for each id; its fragments are concatenated; vertices on their seams remain duplicated.

    Raises
    ------
    SourceError
        If a file is missing, truncated, or refers to a missing vertex.
    """
    info = read_info(path) if (path / "info").exists() else {}
    files = {int(f.name[:-2]): f for f in path.iterdir() if f.name.endswith(":0") and f.name[:-2].isdecimal()}
    if not files:
        raise SourceError(f"{path} holds no meshes.")
    ids = np.array(sorted(files))
    meshes = [_read_mesh(files[key]) for key in ids.tolist()]
    points, faces, offsets = _concat_surfaces(meshes)
    face_offsets = counts_to_offsets(np.array([len(one) for _, one in meshes]))
    return Content(Shapes("mesh", moved(points, info, path), offsets, ids, faces, face_offsets), axes=NANOMETRES)


def _concat_surfaces(
    surfaces: Sequence[tuple[NDArray[Any], NDArray[np.int64]]],
) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
    """Return the points (N, 3) of all surfaces, their triangles (M, 3) as rows of these, and offsets of the points."""
    offsets = counts_to_offsets(np.array([len(points) for points, _ in surfaces], np.int64))
    points = np.concatenate([np.zeros((0, 3), np.float32), *(points for points, _ in surfaces)])
    faces = [part + start for (_, part), start in zip(surfaces, offsets, strict=False)]
    return points.astype(np.float32), np.concatenate([np.zeros((0, 3), np.int64), *faces]), offsets


def _read_mesh(file: Path) -> tuple[NDArray[Any], NDArray[np.int64]]:
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
    points, faces, _ = _concat_surfaces(parts)
    return points, faces


def write_meshes(content: Content, path: Path) -> None:
    """Write meshes as a folder in the single-resolution format, one fragment for each."""
    shapes = content.shapes
    if shapes.links is not None and shapes.links.shape[1] != 3:
        raise SourceError(
            f"The mesh has faces of {shapes.links.shape[1]} corners; Neuroglancer's formats hold triangles. "
            "Cut the faces first."
        )
    path.mkdir()
    (path / "info").write_text(json.dumps({"@type": MESH_TYPE}), encoding="utf-8")
    for key, one in each_object(shapes):
        faces = one.edges(3).astype("<u4")
        (path / f"{key}:0").write_text(json.dumps({"fragments": [f"{key}:0:0"]}), encoding="utf-8")
        points = np.ascontiguousarray(one.positions, "<f4")
        (path / f"{key}:0:0").write_bytes(np.uint32(one.n_vertices).tobytes() + points.tobytes() + faces.tobytes())
