"""Streamlines: TRX, and the formats of TrackVis and MRtrix, TRK and TCK (nibabel)."""

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.content import OBJECT_ID, Capabilities, Content, is_text, read_errors
from raggedatlas.vectors.geometry import Axis
from raggedatlas.vectors.libraries import load_library
from raggedatlas.vectors.shapes import SEQUENTIAL, Attribute, Attributes, Groups, Shapes, counts_to_offsets

TRACTOGRAM = "tractogram"
"""Key of the metadata: ``voxel_to_rasmm`` (4 x 4) and ``dimensions`` (3) of the image in which the lines were traced."""

TRX_HOLDING = Capabilities(kinds=SEQUENTIAL, dims=(3,), link=(), strings=False, groups=True)

MILLIMETRES = tuple(Axis(name, "millimeter") for name in "xyz")


def read_trx(path: Path) -> Content:
    """Read a TRX file or folder: streamlines in RAS+ millimetres.

    Parameters
    ----------
    path : Path
        A ``.trx`` zip, compressed or not, or a folder with ``header.json``.

    Returns
    -------
    Content
        ``dpv`` become vertex attributes, ``dps`` object attributes, groups keep their names and ``dpg``. The affine and the dimensions
        are in ``metadata["tractogram"]``.

    Raises
    ------
    SourceError
        If a part is missing, has an invalid type, or not the number of values that the header declares.
    """
    parts = dict(_folder_parts(path) if path.is_dir() else _zip_parts(path))
    header = _header(parts, path)
    arrays = {name: _array(name, data, path) for name, data in parts.items() if not name.endswith(".json")}
    n_lines, n_vertices = int(header["NB_STREAMLINES"]), int(header["NB_VERTICES"])
    positions = _only(arrays, "positions", path, n_vertices) if n_vertices else np.zeros((0, 3), np.float32)
    offsets = _only(arrays, "offsets", path, None).ravel().astype(np.int64) if n_lines else np.zeros(1, np.int64)
    # Older files omit the last offset.
    if len(offsets) == n_lines:
        offsets = np.append(offsets, n_vertices)
    if positions.shape != (n_vertices, 3) or len(offsets) != n_lines + 1:
        raise SourceError(
            f"{path} has positions of the shape {positions.shape} and {len(offsets)} offsets; its header says "
            f"{n_vertices} vertices and {n_lines} streamlines."
        )
    vertex, lines = _rows(arrays, "dpv/", n_vertices, path), _rows(arrays, "dps/", n_lines, path)
    ids = lines.pop(OBJECT_ID).values if OBJECT_ID in lines else np.arange(n_lines)
    shapes = Shapes(
        "streamline",
        positions,
        offsets,
        ids.astype(np.int64),
        vertex_attributes=vertex,
        object_attributes=lines,
        groups=_groups(arrays, ids.astype(np.int64), path),
    )
    affine = np.array(header["VOXEL_TO_RASMM"], np.float64).reshape(4, 4).tolist()
    image = {"voxel_to_rasmm": affine, "dimensions": [int(size) for size in header["DIMENSIONS"]]}
    return Content(shapes, {TRACTOGRAM: image}, MILLIMETRES)


def _zip_parts(path: Path) -> Iterator[tuple[str, bytes]]:
    # A zip that is encrypted, or of an unknown compression, is a RuntimeError.
    errors = zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, OSError
    with read_errors(path, "zip file", *errors), zipfile.ZipFile(path) as file:
        for item in file.infolist():
            if not item.is_dir():
                yield item.filename, file.read(item)


def _folder_parts(path: Path) -> Iterator[tuple[str, bytes]]:
    for file in sorted(path.rglob("*")):
        if file.is_file():
            yield file.relative_to(path).as_posix(), file.read_bytes()


def _header(parts: Mapping[str, bytes], path: Path) -> dict[str, Any]:
    wanted = ("NB_STREAMLINES", "NB_VERTICES", "VOXEL_TO_RASMM", "DIMENSIONS")
    try:
        header = json.loads(parts["header.json"])
        if all(key in header for key in wanted) and np.size(header["VOXEL_TO_RASMM"]) == 16:
            return dict(header)
    except (KeyError, ValueError, TypeError):
        pass
    raise SourceError(f"{path} has no header.json with {', '.join(wanted)}; it is no TRX.")


def _array(name: str, data: bytes, path: Path) -> NDArray[Any]:
    """Read ``folder/name.channels.dtype``; bits are bytes of 0 and 1, as the library reads them."""
    words = name.rsplit("/", 1)[-1].split(".")
    try:
        kind = np.dtype(np.uint8 if words[-1] in ("bit", "bool") else words[-1]).newbyteorder("<")
        channels = int(words[1]) if len(words) == 3 else 1
        if kind.kind not in "iuf" or len(words) not in (2, 3) or channels < 1:
            raise ValueError
        values = np.frombuffer(data, kind).astype(kind.newbyteorder("="))
        return values.reshape(-1, channels) if len(words) == 3 else values
    except (TypeError, ValueError):
        raise SourceError(
            f"{path}: {name} has {len(data)} bytes; expected a name like 'fa.float32' or 'color.3.uint8' and whole rows."
        ) from None


def _only(arrays: Mapping[str, NDArray[Any]], stem: str, path: Path, rows: int | None) -> NDArray[Any]:
    for name, values in arrays.items():
        # Files in folders keep their folder before the first dot, so only those at the top match.
        if name.split(".")[0] == stem:
            return values
    raise SourceError(f"{path} has no {stem}; expected {'' if rows is None else rows} of them.")


def _rows(arrays: Mapping[str, NDArray[Any]], folder: str, rows: int, path: Path) -> dict[str, Attribute]:
    result = {}
    for name, values in arrays.items():
        if name.startswith(folder):
            if len(values) != rows:
                raise SourceError(f"{path}: {name} has {len(values)} rows; expected {rows}.")
            result[name.removeprefix(folder).split(".")[0]] = _flat(values)
    return result


def _groups(arrays: Mapping[str, NDArray[Any]], ids: NDArray[np.int64], path: Path) -> Groups | None:
    members = {
        name.removeprefix("groups/").split(".")[0]: values.ravel().astype(np.int64)
        for name, values in arrays.items()
        if name.startswith("groups/")
    }
    if not members:
        return None
    for name, rows in members.items():
        if len(rows) and (rows.min() < 0 or rows.max() >= len(ids)):
            raise SourceError(f"{path}: group {name!r} names streamline {rows.max()}; there are {len(ids)}.")
    attributes = {"name": Attribute(np.array(list(members), dtype=str))}
    values: dict[str, dict[str, NDArray[Any]]] = {}
    for name, value in arrays.items():
        words = name.split("/")
        if words[0] == "dpg" and len(words) == 3 and words[1] in members:
            values.setdefault(words[2].split(".")[0], {})[words[1]] = value.ravel()
    attributes |= {key: _group_column(key, rows, list(members), path) for key, rows in values.items()}
    flat = np.concatenate(list(members.values()))
    # TRX stores row numbers of streamlines; `Groups` stores ids.
    return Groups(counts_to_offsets(np.array([len(rows) for rows in members.values()])), ids[flat], attributes)


def _group_column(name: str, rows: Mapping[str, NDArray[Any]], groups: list[str], path: Path) -> Attribute:
    first = next(iter(rows.values()))
    if any(row.shape != first.shape for row in rows.values()):
        raise SourceError(f"{path}: dpg {name!r} has different lengths in different groups.")
    present = np.array([group in rows for group in groups])
    column = np.zeros((len(groups), len(first)), first.dtype)
    for k, group in enumerate(groups):
        column[k] = rows.get(group, 0)
    return Attribute(column[:, 0] if len(first) == 1 else column, present=None if present.all() else present)


def write_trx(content: Content, path: Path) -> None:
    """Write streamlines as TRX, a zip that is not compressed; ids that are not row numbers are stored as the dps ``object_id``."""
    shapes = content.shapes
    image = content.metadata.get(TRACTOGRAM, {})
    header = {
        "DIMENSIONS": image.get("dimensions", [1, 1, 1]),
        "VOXEL_TO_RASMM": image.get("voxel_to_rasmm", np.eye(4).tolist()),
        "NB_VERTICES": shapes.n_vertices,
        "NB_STREAMLINES": shapes.n_objects,
    }
    positions = shapes.positions if shapes.positions.dtype.kind == "f" else shapes.positions.astype(np.float64)
    parts: dict[str, NDArray[Any]] = {
        f"positions.3.{positions.dtype.name}": positions,
        "offsets.uint64": shapes.offsets.astype(np.uint64),
    }
    ids = np.asarray(shapes.ids)
    if not np.array_equal(ids, np.arange(len(ids))):
        parts[f"dps/{OBJECT_ID}.int64"] = ids
    parts |= _parts("dpv", shapes.vertex_attributes) | _parts("dps", shapes.object_attributes)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("header.json", json.dumps(header))
        for name, values in (parts | group_parts(shapes)).items():
            file.writestr(name, np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes())


def _parts(folder: str, attributes: Attributes) -> dict[str, NDArray[Any]]:
    return {
        f"{folder}/{file_name(name)}{f'.{a.n_channels}' if a.values.ndim == 2 else ''}.{a.values.dtype.name}": a.values
        for name, a in attributes.items()
        if not is_text(a)
    }


def file_name(name: str) -> str:
    """Return a name for a file name, in which dots and slashes are separators.

    Examples
    --------
    >>> file_name("mean.fa")
    'mean_fa'
    """
    return name.replace(".", "_").replace("/", "_")


def group_parts(shapes: Shapes) -> dict[str, NDArray[Any]]:
    """Return the groups of shapes and their numbers, by names of files in a TRX."""
    if shapes.groups is None:
        return {}
    order = np.argsort(np.asarray(shapes.ids))
    names = group_names(shapes.groups)
    parts: dict[str, NDArray[Any]] = {}
    for k, name in enumerate(names):
        members = shapes.groups.members(k)
        # Members that are no streamlines are clipped to some row here and dropped by the comparison with their id.
        place = np.minimum(np.searchsorted(np.asarray(shapes.ids)[order], members), max(len(order) - 1, 0))
        rows = order[place] if len(order) else order
        exists = np.asarray(shapes.ids)[rows] == members[: len(rows)]
        parts[f"groups/{name}.uint32"] = rows[exists].astype(np.uint32)
        for key, attribute in shapes.groups.attributes.items():
            there = attribute.present is None or attribute.present[k]
            if there and attribute.values.dtype.kind in "iuf":
                row = attribute.values[k].reshape(-1)
                parts[f"dpg/{name}/{file_name(key)}.{len(row)}.{row.dtype.name}"] = row
    return parts


def group_names(groups: Groups) -> list[str]:
    """Return names of groups that can be names of files: their own, else ``group_0``, ``group_1``, ..."""
    given = groups.attributes.get("name")
    names = [] if given is None else [file_name(str(name)) for name in given.values]
    if len({*names}) == groups.n_groups and all(names):
        return names
    return [f"group_{k}" for k in range(groups.n_groups)]


def trx_losses(shapes: Shapes) -> Iterator[str]:
    """Yield which attributes and members of groups TRX cannot store, and which names change."""
    for family in ("vertex", "object"):
        for name in getattr(shapes, f"{family}_attributes"):
            if file_name(name) != name:
                yield f"{family} attribute {name!r} is called {file_name(name)!r}"
    if shapes.groups is None:
        return
    for name, attribute in shapes.groups.attributes.items():
        if attribute.values.dtype.kind not in "iuf" and name != "name":
            yield f"group attribute {name!r} is left out: it is text"
    missing = np.setdiff1d(shapes.groups.ids, np.asarray(shapes.ids))
    if len(missing):
        yield f"groups: {len(missing)} members that are not among the streamlines are left out"


TRK_HOLDING = Capabilities(kinds=SEQUENTIAL, dims=(3,), link=(), strings=False)
TCK_HOLDING = Capabilities(
    kinds=SEQUENTIAL, dims=(3,), objects="anonymous", vertex=(), link=(), object=(), float32=True
)

NAME_BYTES = 18
"""Maximum length of the name of a value in TRK: 20 bytes, of which two are for its channels."""

MOST_VALUES = 10
"""Maximum number of named values of vertices, and of lines, in TRK."""


def read_tractogram(path: Path) -> Content:
    """Read a ``.trk`` or ``.tck`` file: streamlines in RAS+ millimetres.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    Content
        Values of points become vertex attributes, those of lines object attributes; ``object_id`` of lines becomes their ids. Affine and
        dimensions of TRK are in ``metadata["tractogram"]``.

    Raises
    ------
    SourceError
        If the file cannot be read or is truncated.
    MissingExtraError
        Without nibabel.
    """
    streamlines = load_library("nibabel.streamlines")
    with read_errors(path, f"{path.suffix} file"):
        file = streamlines.load(str(path), lazy_load=False)
    lines = file.tractogram.streamlines
    counts = np.array(lines._lengths, np.int64).reshape(-1)
    declared = file.header.get("nb_streamlines", file.header.get("count", len(counts)))
    # Zero means that the header does not count the streamlines.
    if int(declared) not in (0, len(counts)):
        raise SourceError(f"{path} has {len(counts)} streamlines; its header says {int(declared)}. It is cut off.")
    positions = np.asarray(lines.get_data(), np.float32).reshape(-1, 3)
    vertex = {name: _flat(values.get_data()) for name, values in file.tractogram.data_per_point.items()}
    objects = {name: _flat(values) for name, values in file.tractogram.data_per_streamline.items()}
    ids = np.arange(len(counts))
    if OBJECT_ID in objects:
        ids = objects.pop(OBJECT_ID).values.astype(np.int64)
    shapes = Shapes(
        "streamline", positions, counts_to_offsets(counts), ids, vertex_attributes=vertex, object_attributes=objects
    )
    metadata = {}
    if path.suffix == ".trk":
        image = {
            "voxel_to_rasmm": np.asarray(file.header["voxel_to_rasmm"], np.float64).tolist(),
            "dimensions": [int(size) for size in file.header["dimensions"]],
        }
        metadata[TRACTOGRAM] = image
    return Content(shapes, metadata, MILLIMETRES)


def _flat(values: NDArray[Any]) -> Attribute:
    values = np.asarray(values)
    return Attribute(values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values)


def write_tractogram(content: Content, path: Path) -> None:
    """Write streamlines as ``.trk`` or ``.tck``, as floats of 32 bits."""
    streamlines = load_library("nibabel.streamlines")
    sequence = streamlines.ArraySequence
    shapes = content.shapes

    def cut(values: NDArray[Any]) -> Any:  # noqa: ANN401  (an ArraySequence)
        sequences = sequence()
        sequences._data = _rows_of(values)
        sequences._offsets, sequences._lengths = shapes.offsets[:-1], np.diff(shapes.offsets)
        return sequences

    header: dict[str, Any] = {}
    points: dict[str, Any] = {}
    lines: dict[str, NDArray[Any]] = {}
    if path.suffix == ".trk":
        image = content.metadata.get(TRACTOGRAM, {})
        affine = np.array(image.get("voxel_to_rasmm", np.eye(4)), np.float32)
        header = {
            "voxel_to_rasmm": affine,
            "dimensions": np.array(image.get("dimensions", [1, 1, 1]), np.int16),
            "voxel_sizes": np.linalg.norm(affine[:3, :3], axis=0),
            "voxel_order": "".join(load_library("nibabel").aff2axcodes(affine)),
        }
        points = {name: cut(shapes.vertex_attributes[name].values) for name in _named(shapes.vertex_attributes)}
        lines = {name: _rows_of(shapes.object_attributes[name].values) for name in _named(shapes.object_attributes)}
        ids = np.asarray(shapes.ids)
        if not np.array_equal(ids, np.arange(shapes.n_objects)) and _exact(ids):
            lines[OBJECT_ID] = ids.astype(np.float32).reshape(-1, 1)
    tractogram = streamlines.Tractogram(
        # Positions are in millimetres already, hence the identity; saving applies the affine of a TRK header.
        cut(shapes.positions),
        data_per_point=points,
        data_per_streamline=lines,
        affine_to_rasmm=np.eye(4),
    )
    streamlines.save(tractogram, str(path), header=header)


def _rows_of(values: NDArray[Any]) -> NDArray[np.float32]:
    rows = np.asarray(values, np.float32)
    return rows if rows.ndim == 2 else rows[:, None]


def _named(attributes: Attributes) -> list[str]:
    """Return the names of the attributes that TRK can store."""
    fits = [
        name
        for name, a in attributes.items()
        if not is_text(a) and len(name.encode("latin-1", "replace")) <= NAME_BYTES
    ]
    # One of the values is reserved for `object_id`.
    return fits[: MOST_VALUES - 1]


def trk_losses(shapes: Shapes) -> Iterator[str]:
    """Yield what TRK cannot store: long names, more than nine values, numbers that need more than 32-bit floats."""
    yield "rounded: positions, which pass through voxels as floats of 32 bits"
    for family in ("vertex", "object"):
        attributes: Attributes = getattr(shapes, f"{family}_attributes")
        kept = _named(attributes)
        for name, attribute in attributes.items():
            if is_text(attribute):
                continue
            if name not in kept:
                yield f"{family} attribute {name!r} is left out: TRK holds nine, with names of {NAME_BYTES} bytes"
            elif not np.array_equal(
                attribute.values.astype(np.float32).astype(attribute.values.dtype), attribute.values
            ):
                yield f"rounded: {family} attribute {name!r}, to 32-bit floats"
    if not _exact(np.asarray(shapes.ids)):
        yield "objects: their ids are left out, as they need more than 32-bit floats"


def _exact(ids: NDArray[np.int64]) -> bool:
    # Up to 2**23, all integers are float32 values.
    return bool((np.abs(ids) <= 1 << np.finfo(np.float32).nmant).all())
