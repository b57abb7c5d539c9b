"""Geometry stores of tests: written and opened, looked into, and changed on disk."""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from raggedatlas.store.location import write_pieces
from raggedatlas.wings.vectors.builder import ChunkingOptions, make_geometry
from raggedatlas.wings.vectors.geometry import Geometry
from raggedatlas.wings.vectors.reader import VectorStore, open_vectors
from raggedatlas.wings.vectors.shapes import Shapes
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
