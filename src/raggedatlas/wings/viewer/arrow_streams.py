"""The data of a page as Arrow streams: places as whole numbers, ids as bytes, each column on its own."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.wings.viewer.columns import PointColumn
from raggedatlas.wings.viewer.palette import read_colors
from raggedatlas.wings.viewer.scene import Scene

VALUE = "v"
STEPS = 65_535
"""Places are whole numbers up to this over the width and the height of the map: steps far finer than a screen's."""

_HEX = "^[0-9a-f]{16}$"
_HEX_BYTES = 8


def bounds_of(scene: Scene) -> list[float]:
    """Return the edges of the map: left, right, bottom, top."""
    if scene.n == 0:
        return [0.0, 1.0, 0.0, 1.0]
    low, high = scene.coordinates.min(axis=0), scene.coordinates.max(axis=0)
    return [float(low[0]), float(high[0]), float(low[1]), float(high[1])]


def points_part(scene: Scene) -> bytes:
    """Encode the places: ``x`` and ``y`` as uint16 over the edges of the map."""
    left, right, bottom, top = bounds_of(scene)
    places = scene.coordinates.astype(np.float64)
    return _stream({"x": pa.array(_steps(places[:, 0], left, right)), "y": pa.array(_steps(places[:, 1], bottom, top))})


def _steps(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.uint16]:
    if high <= low:
        return np.zeros(len(values), np.uint16)
    return np.rint((values - low) * (STEPS / (high - low))).astype(np.uint16)


def ids_part(scene: Scene) -> bytes:
    """Encode the ids: those of cells, which are 16 hexadecimal digits, as 8 bytes, others as texts."""
    if not is_hex(scene.ids):
        return _stream({VALUE: scene.ids})
    # Piece by piece: Python strings of all ids at once would take far more memory than the ids.
    size = 2**16
    kept = b"".join(
        bytes.fromhex("".join(piece.to_pylist()))
        for piece in [scene.ids.slice(start, size) for start in range(0, len(scene.ids), size)]
    )
    kind = pa.binary(_HEX_BYTES)
    return _stream({VALUE: pa.FixedSizeBinaryArray.from_buffers(kind, scene.n, [None, pa.py_buffer(kept)])})


def is_hex(ids: pa.Array) -> bool:
    """Return whether all ids are those of cells: 16 hexadecimal digits in lower case."""
    return len(ids) > 0 and bool(pc.all(pc.match_substring_regex(ids, _HEX)).as_py())


def column_part(column: PointColumn) -> bytes:
    """Encode a column: categories as the smallest codes, whose last category means missing; numbers; texts."""
    if column.kind != "category":
        return _stream({VALUE: column.values.cast(pa.string()) if column.kind == "text" else column.values})
    labels = column.values.dictionary.to_pylist()
    codes = column.values.indices.fill_null(len(labels)).to_numpy(zero_copy_only=False)
    kept = [*labels, ""] if column.values.null_count else labels
    # Codes fit into 16 bits: a column of more than `MOST_CATEGORIES` labels is a text.
    narrow = codes.astype(np.uint8 if len(kept) <= 2**8 else np.uint16)
    return _stream({VALUE: pa.DictionaryArray.from_arrays(pa.array(narrow), pa.array(kept, pa.string()))})


def numbers_part(values: NDArray[np.float32]) -> bytes:
    """Encode values of a gene: counts as the smallest whole numbers that hold them, others as floats."""
    if len(values) and np.isfinite(values).all():
        for kind in (np.uint8, np.uint16):
            # Clipped first, because casting a float outside of an integer's range is undefined.
            small = values.clip(0, np.iinfo(kind).max).astype(kind)
            if (small == values).all():
                return _stream({VALUE: pa.array(small)})
    return _stream({VALUE: pa.array(values)})


def describe_columns(scene: Scene) -> list[dict[str, Any]]:
    """Describe the columns for the page: name, kind, part, whether values are missing, colours."""
    described = []
    for i, column in enumerate(scene.columns):
        spec: dict[str, Any] = {"name": column.name, "kind": column.kind, "key": f"c{i}"}
        if column.kind == "category":
            spec["missing"] = column.values.null_count > 0
            spec["colors"] = read_colors({column.name: column.colors}).get(column.name, {})
        described.append(spec)
    return described


def _stream(arrays: dict[str, pa.Array]) -> bytes:
    batch = pa.record_batch(list(arrays.values()), names=list(arrays))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())
