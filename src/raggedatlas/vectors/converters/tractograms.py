"""TRK and TCK: streamlines as TrackVis and MRtrix keep them (nibabel)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.content import OBJECT_ID, Capabilities, Content, is_text
from raggedatlas.vectors.converters.stl import rounded
from raggedatlas.vectors.converters.trx import MILLIMETRES, TRACTOGRAM
from raggedatlas.vectors.libraries import library
from raggedatlas.vectors.selection import counts_to_offsets
from raggedatlas.vectors.shapes import SEQUENTIAL, Attribute, Attributes, Shapes

TRK_HOLDING = Capabilities(kinds=SEQUENTIAL, dims=(3,), link=(), strings=False)
TCK_HOLDING = Capabilities(kinds=SEQUENTIAL, dims=(3,), objects="anonymous", vertex=(), link=(), object=())

NAME_BYTES = 18
"""How long the name of a value may be in TRK: 20 bytes, two for its channels."""

MOST_VALUES = 10
"""How many values TRK names for vertices, and for lines."""


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
        dimensions of TRK stand in ``metadata["tractogram"]``.

    Raises
    ------
    SourceError
        If the file cannot be read or is cut off.
    MissingExtraError
        Without nibabel.
    """
    streamlines = library("nibabel.streamlines")
    try:
        file = streamlines.load(str(path), lazy_load=False)
    except Exception as error:  # noqa: BLE001 - the library raises whatever a damaged file leads to
        raise SourceError(
            f"{path} is no {path.suffix} file that can be read: {type(error).__name__}: {error}."
        ) from None
    lines = file.tractogram.streamlines
    counts = np.array(lines._lengths, np.int64).reshape(-1)
    said = file.header.get("nb_streamlines", file.header.get("count", len(counts)))
    if int(said) not in (0, len(counts)):
        raise SourceError(f"{path} has {len(counts)} streamlines; its header says {int(said)}. It is cut off.")
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
    streamlines = library("nibabel.streamlines")
    sequence = streamlines.ArraySequence
    shapes = content.shapes

    def cut(values: NDArray[Any]) -> Any:  # noqa: ANN401  (an ArraySequence)
        made = sequence()
        made._data = np.asarray(values, np.float32).reshape(shapes.n_vertices, -1)
        made._offsets, made._lengths = shapes.offsets[:-1], np.diff(shapes.offsets)
        return made

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
            "voxel_order": "".join(library("nibabel").aff2axcodes(affine)),
        }
        points = {name: cut(shapes.vertex_attributes[name].values) for name in _named(shapes.vertex_attributes)}
        lines = {
            name: np.asarray(shapes.object_attributes[name].values, np.float32).reshape(shapes.n_objects, -1)
            for name in _named(shapes.object_attributes)
        }
        ids = np.asarray(shapes.ids)
        if not np.array_equal(ids, np.arange(shapes.n_objects)) and _exact(ids):
            lines[OBJECT_ID] = ids.astype(np.float32).reshape(-1, 1)
    tractogram = streamlines.Tractogram(
        cut(shapes.positions), data_per_point=points, data_per_streamline=lines, affine_to_rasmm=np.eye(4)
    )
    streamlines.save(tractogram, str(path), header=header)


def _named(attributes: Attributes) -> list[str]:
    """Return the names of the attributes that TRK holds."""
    fits = [
        name
        for name, a in attributes.items()
        if not is_text(a) and len(name.encode("latin-1", "replace")) <= NAME_BYTES
    ]
    return fits[: MOST_VALUES - 1]


def trk_losses(shapes: Shapes) -> Iterator[str]:
    """Yield what TRK does not hold: long names, more than nine values, numbers that need more than 32-bit floats."""
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
    return bool((np.abs(ids) <= 1 << np.finfo(np.float32).nmant).all())


def tck_losses(shapes: Shapes) -> Iterator[str]:
    """Yield what TCK does not hold besides attributes: wide positions."""
    yield from rounded(shapes, np.float32, "32 bits")
