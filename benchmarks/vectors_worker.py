"""Measure geometry of one system, in a separate process: write, read by box and by object, decode.

Runs in the interpreter of the system that it measures; prints one JSON document. Times are processor milliseconds of the process,
the best of some repeats (of reads: the mean over some boxes or objects, and of those means the best). Every store is read once before.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measuring import bytes_on_disk

EDGE = (100.0, 100.0, 100.0)
REPEATS = 3
Found = dict[str, Any]


def points(n: int) -> tuple[Any, Any]:
    """Points evenly in a cube of 1,000, and a value of each."""
    rng = np.random.default_rng(0)
    return rng.uniform(0, 1000, (n, 3)).astype("f4"), rng.random(n).astype("f4")


def streamlines(n: int) -> Any:
    """Smooth lines of 100 vertices, (n, 100, 3)."""
    rng = np.random.default_rng(1)
    ways = rng.normal(size=(n, 1, 3))
    ways = ways / np.linalg.norm(ways, axis=2, keepdims=True) + rng.normal(0, 0.3, (n, 100, 3))
    return np.clip(rng.uniform(100, 900, (n, 1, 3)) + np.cumsum(ways, axis=1), 0, 999.9).astype("f4")


def meshes(n: int) -> tuple[Any, Any]:
    """Closed surfaces of 162 vertices and 320 faces each: vertices (162 n, 3) and faces (320 n, 3)."""
    rows, columns = np.meshgrid(np.arange(1, 11) * np.pi / 11, np.arange(16) * np.pi / 8, indexing="ij")
    ring = np.stack([np.sin(rows) * np.cos(columns), np.sin(rows) * np.sin(columns), np.cos(rows)], axis=2)
    one = np.concatenate([ring.reshape(-1, 3), [[0, 0, 1], [0, 0, -1]]])
    faces = []
    for column in range(16):
        after = (column + 1) % 16
        faces += [(160, column, after), (161, 144 + after, 144 + column)]
        for row in range(9):
            a, b, c, d = row * 16 + column, row * 16 + after, row * 16 + 16 + column, row * 16 + 16 + after
            faces += [(a, c, b), (b, c, d)]
    centres = np.random.default_rng(2).uniform(20, 980, (n, 1, 3))
    whole = np.array(faces)[None] + 162 * np.arange(n)[:, None, None]
    return (centres + 12 * one[None]).reshape(-1, 3).astype("f4"), whole.reshape(-1, 3)


def boxes(edge: float, n: int) -> list[tuple[Any, Any]]:
    """Some boxes within the cube."""
    low = np.random.default_rng(3).uniform(0, 1000 - edge, (n, 3))
    return [(each, each + edge) for each in low]


def blocks(folder: Path) -> int:
    """Bytes that the files of a folder take of the disk, in whole blocks."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def best(call: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Processor milliseconds at best."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return min(taken) * 1e3


def mean(call: Callable[[Any], Any], over: list[Any], repeats: int = REPEATS) -> float:
    """Processor milliseconds of one of some calls, at best."""
    call(over[0])

    def one_by_one() -> None:
        for each in over:
            call(each)  # nobody keeps the answers, else their memory is new every time

    return best(one_by_one, repeats) / len(over)


class Ours:
    """raggedatlas."""

    def write(self, what: str, folder: Path, n: int) -> Callable[[], Any]:
        from raggedatlas.wings.vectors.builder import ChunkingOptions, make_geometry
        from raggedatlas.wings.vectors.shapes import Attribute, Shapes
        from raggedatlas.wings.vectors.writer import write

        if what == "points":
            positions, values = points(n)
            shapes = Shapes("point_cloud", positions, vertex_attributes={"v": Attribute(values)})
        elif what == "streamlines":
            lines = streamlines(n)
            shapes = Shapes("streamline", lines.reshape(-1, 3), offsets=np.arange(n + 1) * 100)
        else:
            vertices, faces = meshes(n)
            shapes = Shapes("mesh", vertices, offsets=np.arange(n + 1) * 162, links=faces)
        return lambda: write(make_geometry(shapes, ChunkingOptions(chunk_shape=EDGE)), folder)

    def open(self, folder: Path) -> Any:
        from raggedatlas.wings.vectors.reader import open_vectors

        return open_vectors(folder)

    def box(self, store: Any, box: tuple[Any, Any]) -> Any:
        return store.box(*box)

    def count(self, found: Any) -> tuple[int, int]:
        return found.n_vertices, found.n_objects if found.kind == "streamline" else 0

    def one(self, store: Any, i: int) -> Any:
        return store.objects([i])

    def decode(self) -> float:
        from raggedatlas.wings.vectors.storage.codecs import Blobs, decode_fragments, fragment_rows

        blob = index_of_lists()
        blobs, which = Blobs(blob, np.array([0, blob.size])), np.arange(4096)
        return mean(lambda _: fragment_rows(decode_fragments(blobs), which), list(range(20)))


class Theirs:
    """zarr-vectors 0.9.2, opened once as ours."""

    def write(self, what: str, folder: Path, n: int) -> Callable[[], Any]:
        from zarr_vectors.types.meshes import write_mesh
        from zarr_vectors.types.points import write_points
        from zarr_vectors.types.polylines import write_polylines

        ends = ([0.0] * 3, [1000.0] * 3)
        if what == "points":
            positions, values = points(n)
            named = {"v": values}
            return lambda: write_points(str(folder), positions, chunk_shape=EDGE, bounds=ends, vertex_attributes=named)
        if what == "streamlines":
            lines = list(streamlines(n))
            return lambda: write_polylines(str(folder), lines, chunk_shape=EDGE, bounds=ends)
        vertices, faces = meshes(n)
        ids = np.repeat(np.arange(n), 162)
        return lambda: write_mesh(str(folder), vertices, faces, chunk_shape=EDGE, bounds=ends, object_ids=ids)

    def open(self, folder: Path) -> Any:
        from zarr_vectors.core.store import open_store

        return open_store(str(folder))

    def box(self, store: Any, box: tuple[Any, Any]) -> Any:
        from zarr_vectors.types.points import read_points
        from zarr_vectors.types.polylines import read_polylines

        if self.what == "points":
            return read_points(store, bbox=box, attribute_names=["v"])
        return read_polylines(store, bbox=box)

    def count(self, found: Any) -> tuple[int, int]:
        if "positions" in found:
            return len(found["positions"]), 0
        return 0, len(found["polylines"])

    def one(self, store: Any, i: int) -> Any:
        from zarr_vectors.types.meshes import read_mesh
        from zarr_vectors.types.polylines import read_polylines

        return (read_polylines if self.what == "streamlines" else read_mesh)(store, object_ids=[i])

    def decode(self) -> float:
        from zarr_vectors.encoding.fragments import decode_fragments

        blob = index_of_lists().tobytes()

        def every(_: Any) -> Any:
            index = decode_fragments(blob)
            return [index.indices(f) for f in range(4096)]

        return mean(every, [0, 1])

    what = "points"


class Parquet:
    """pyarrow: rows sorted by chunk, row groups of 20,000 with statistics of each column."""

    def write(self, what: str, folder: Path, n: int) -> Callable[[], Any]:
        import pyarrow as pa
        import pyarrow.parquet as papq

        assert what == "points"
        positions, values = points(n)

        def write() -> None:
            key = np.floor(positions / 100).astype(np.int64)
            order = np.argsort(key[:, 0] * 100 + key[:, 1] * 10 + key[:, 2], kind="stable")
            columns = {name: positions[order, i] for i, name in enumerate("xyz")} | {"v": values[order]}
            folder.mkdir(parents=True)
            papq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=20_000, compression="none")

        return write

    def open(self, folder: Path) -> Any:
        import pyarrow.dataset as ds

        found = ds.dataset(folder, format="parquet")
        found.to_table(filter=ds.field("x") < -1)
        return found

    def box(self, store: Any, box: tuple[Any, Any]) -> Any:
        import pyarrow.dataset as ds

        low, high = box
        kept = [
            (ds.field(name) >= float(a)) & (ds.field(name) <= float(b))
            for name, a, b in zip("xyz", low, high, strict=True)
        ]
        return store.to_table(filter=kept[0] & kept[1] & kept[2])

    def count(self, found: Any) -> tuple[int, int]:
        return found.num_rows, 0


def index_of_lists() -> Any:
    """A fragment index of 4,096 fragments, half of them runs, half lists of eight rows."""
    kinds = np.tile([1, 0], 2048).astype(np.uint8)
    table = np.stack([np.arange(2048) * 16, np.full(2048, 8)], axis=1).astype("<i8")
    offsets = (np.arange(2049) * 8).astype("<u4")
    rows = np.arange(2048 * 8, dtype="<i8")[::-1].copy()
    head = np.array([0x5A564647, 1, 4096, 2048], "<u4")
    bitmap = np.packbits(kinds, bitorder="little")
    return np.concatenate([part.reshape(-1).view(np.uint8) for part in (head, bitmap, table, offsets, rows)])


SYSTEMS: dict[str, Callable[[], Any]] = {
    "raggedatlas": Ours,
    "zarr-vectors": Theirs,
    "parquet": Parquet,
}


def measure(name: str, what: str, folder: Path, n: int) -> Found:
    """Write the data of one kind, and read them."""
    system = SYSTEMS[name]()
    system.what = what
    found: Found = {}
    call = system.write(what, folder, n)
    # once on a few, so that imports and kernels are loaded
    warm = folder.with_name("warm")
    shutil.rmtree(warm, ignore_errors=True)
    system.write(what, warm, max(10, n // 1000))()
    shutil.rmtree(warm)

    def again() -> float:
        shutil.rmtree(folder, ignore_errors=True)
        start = time.process_time()
        call()
        return (time.process_time() - start) * 1e3

    found["write"] = min(again() for _ in range(REPEATS))
    found["bytes"] = bytes_on_disk(folder)
    found["disk"] = blocks(folder)
    found["files"] = sum(path.is_file() for path in folder.rglob("*"))
    found["links"] = bytes_on_disk(folder / "0" / "links")
    found["links_disk"] = blocks(folder / "0" / "links")
    store = system.open(folder)
    slow = name == "zarr-vectors"
    if what != "meshes" and hasattr(system, "box"):
        small, large = boxes(100, 2 if slow and what == "streamlines" else 20), boxes(500, 3)
        found["box"] = mean(lambda box: system.box(store, box), small, 2 if slow else REPEATS)
        found["answer"] = system.count(system.box(store, boxes(100, 1)[0]))
        if what == "points":
            found["large"] = mean(lambda box: system.box(store, box), large)
            found["opened"] = mean(lambda box: system.box(system.open(folder), box), small)
        else:
            found["box10"] = mean(
                lambda box: system.box(store, box), boxes(10, 2 if slow else 20), 1 if slow else REPEATS
            )
    if what != "points" and hasattr(system, "one"):
        which = np.random.default_rng(4).integers(0, n, 5 if slow else 200).tolist()
        try:
            found["one"] = mean(lambda i: system.one(store, i), which)
        except NotImplementedError as error:
            found["one_refused"] = str(error)[:100]
    if what == "points" and hasattr(system, "decode"):
        found["decode"] = system.decode()
    return found


def main() -> None:
    """Measure what the command line names."""
    name, what, folder, n = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    sys.stdout.write(json.dumps(measure(name, what, folder, n)) + "\n")


if __name__ == "__main__":
    main()
