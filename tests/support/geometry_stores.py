"""Geometry stores of tests: written and opened, looked into, and changed on disk."""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.store.location import write_pieces
from raggedatlas.wings.vectors.builder import ChunkingOptions, make_geometry
from raggedatlas.wings.vectors.geometry import Geometry
from raggedatlas.wings.vectors.reader import VectorStore, open_vectors
from raggedatlas.wings.vectors.shapes import Shapes
from raggedatlas.wings.vectors.storage.codecs import HEADER_BYTES, Bytes, from_bytes, locate_fragments
from raggedatlas.wings.vectors.storage.layouts import File
from raggedatlas.wings.vectors.writer import write
from support.spatial import ALL, EDGE

CUT = ChunkingOptions(chunk_shape=EDGE)
LAYOUTS = ("0.7", "0.9")


def stored(path: Path, shapes: Shapes | str, cutting: ChunkingOptions = CUT, **options: Any) -> VectorStore:
    """Write shapes, or the small ones of a name, and open them."""
    made = ALL[shapes]() if isinstance(shapes, str) else shapes
    write(make_geometry(made, cutting), path, overwrite=True, **options)
    return open_vectors(path)


def with_level(geometry: Geometry, **changes: Any) -> Geometry:
    """Return a geometry with other arrays in its finest level."""
    return replace(geometry, levels=(replace(geometry.levels[0], **changes), *geometry.levels[1:]))


def attributes(store: Path, path: str) -> dict[str, Any]:
    """Return the attributes of a node."""
    found: dict[str, Any] = json.loads((store / path / "zarr.json").read_text())["attributes"]
    return found


def edit(store: Path, path: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the ``zarr.json`` of a node."""
    file = store / path / "zarr.json"
    node = json.loads(file.read_text())
    change(node)
    file.write_text(json.dumps(node))


def edit_block(store: Path, path: str, *names: str, **changes: Any) -> None:
    """Set keys of the attributes of a node, or of what has a name there; None removes a key."""

    def change(node: dict[str, Any]) -> None:
        block = node["attributes"]
        for name in names:
            block = block[name]
        block.update(changes)
        for key in [key for key, value in changes.items() if value is None]:
            block.pop(key)

    edit(store, path, change)


def edit_root(store: Path, **changes: Any) -> None:
    """Set keys of the root."""
    edit_block(store, "", "zarr_vectors", **changes)


def put(store: Path, path: str, files: Iterable[File]) -> None:
    """Replace a node by these files."""
    shutil.rmtree(store / path, ignore_errors=True)
    for key, pieces in files:
        (store / key).parent.mkdir(parents=True, exist_ok=True)
        with (store / key).open("wb", buffering=0) as file:
            write_pieces(file.fileno(), pieces)


def data_files(folder: Path) -> list[Path]:
    """Return the files of chunks below a folder."""
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name != "zarr.json")


class FragmentIndex:
    """Random access to the fragments of one chunk, a ZVFG blob, as readers of rows locate them."""

    def __init__(self, blob: Bytes) -> None:
        self.blob = np.ascontiguousarray(blob)
        locate_fragments(self.blob, np.zeros(0, np.int64), 0, np.zeros((0, 3), np.int64))
        self.n_fragments, self.n_ranges = (int(value) for value in self.blob[8:HEADER_BYTES].copy().view("<u4"))

    def _span(self, f: int) -> tuple[int, int, int]:
        """Return the first row of a range or -1, the byte offset of a list, and the number of rows."""
        spans = np.empty((1, 3), np.int64)
        # The number of rows of the chunk is not known here, so ranges are not checked against it.
        locate_fragments(self.blob, np.array([f]), np.iinfo(np.int64).max, spans)
        first, byte, count = spans[0].tolist()
        return first, byte, count

    def is_range(self, f: int) -> bool:
        """Return whether fragment `f` is a range."""
        return self._span(f)[0] >= 0

    def range(self, f: int) -> tuple[int, int]:
        """Return start and count of a range."""
        first, _, count = self._span(f)
        assert first >= 0
        return first, count

    def indices(self, f: int) -> NDArray[np.int64]:
        """Return the rows of a fragment, with ranges expanded."""
        first, byte, count = self._span(f)
        if first >= 0:
            return np.arange(first, first + count)
        return from_bytes(self.blob[byte : byte + 8 * count], np.int64)
