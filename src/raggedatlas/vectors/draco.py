"""Meshes in Draco: the vertices of a chunk and the faces within it in one bit stream; needs the extra ``draco``."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, MissingExtraError
from raggedatlas.vectors.blobs import Blobs, Bytes, concat_blobs
from raggedatlas.vectors.geometry import Level

QUANTISATION_BITS = 11
"""Positions are rounded to this many bits of the chunk's extent, as the peers do."""


def _library() -> Any:  # noqa: ANN401 - a module
    try:
        import DracoPy
    except ImportError as error:
        raise MissingExtraError(
            "This store holds meshes in Draco, which needs DracoPy: pip install 'raggedatlas[draco]'."
        ) from error
    return DracoPy


def encode_cells(level: Level, width: int | None) -> Blobs:
    """Return one Draco bit stream for each chunk; vertices and faces keep their order.

    Raises
    ------
    MissingExtraError
        Without DracoPy.
    CorruptError
        If the links are no triangles.
    """
    library = _library()
    if width not in (None, 3):
        raise CorruptError(f"Draco holds triangles; these links have {width} ends. Use the encoding 'raw'.")
    cells = []
    for c in range(len(level.chunks)):
        points = level.positions[level.bounds[c] : level.bounds[c + 1]].astype(np.float32)
        faces = None
        if level.links is not None:
            faces = level.links.rows[level.links.bounds[c] : level.links.bounds[c + 1]].astype(np.uint32)
        options: dict[str, Any] = {"quantization_bits": QUANTISATION_BITS, "preserve_order": True}
        cells.append(library.encode(points, faces if faces is not None and len(faces) else None, **options))
    return concat_blobs(cells)


def encode_grid(points: NDArray[np.int32], faces: NDArray[np.int64]) -> bytes:
    """Return a Draco bit stream of triangles whose positions are whole numbers, (N, 3), which it keeps as they are, in their order.

    Raises
    ------
    MissingExtraError
        Without DracoPy.
    """
    options: dict[str, Any] = {"quantization_bits": 0, "preserve_order": True}
    return bytes(_library().encode(points, faces.astype(np.uint32), **options))


def decode_cell(blob: Bytes, what: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return vertices (N, 3) and faces (M, 3) of a Draco bit stream.

    Raises
    ------
    MissingExtraError
        Without DracoPy.
    CorruptError
        If it does not decode.
    """
    library = _library()
    try:
        found = library.decode(blob.tobytes())
    except (ValueError, RuntimeError, library.FileTypeException) as error:
        raise CorruptError(f"{what} does not decode as Draco: {error}") from error
    faces = getattr(found, "faces", None)
    points = np.asarray(found.points, np.float32).reshape(-1, 3)
    return points, np.zeros((0, 3), np.int64) if faces is None else np.asarray(faces, np.int64).reshape(-1, 3)
