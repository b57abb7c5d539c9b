"""The public packages as oracles, both ways: zarr-vectors 0.2.0 for layout 0.7, and 0.9.2 for layout 0.9 (items 102 to 107).

Asked for by ``-m peers``; needs the environments that ``benchmarks/peers.sh vectors`` makes.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raggedatlas.testing.geometry import EDGE, corners_of, graph, lines, mesh, paths, rows_of, tree, walk
from raggedatlas.vectors.building import Cutting, make_geometry
from raggedatlas.vectors.geometry import Fragments, Geometry
from raggedatlas.vectors.reading import open_vectors
from raggedatlas.vectors.shapes import Shapes
from raggedatlas.vectors.writing import write

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).with_name("peer_zarr_vectors.py")
VENVS = {"0.7": ROOT / ".venv-peers-vectors-0.2", "0.9": ROOT / ".venv-peers-vectors-0.9"}

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]


def peer(layout: str, verb: str, folder: Path) -> str:
    """Run the package of a layout; its complaint is the failure."""
    python = VENVS[layout] / "bin" / "python"
    if not python.exists():
        pytest.skip(f"zarr-vectors for layout {layout} is not installed; benchmarks/peers.sh vectors installs it")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [str(python), "-W", "ignore", str(SCRIPT), verb, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


@pytest.mark.parametrize("layout", ["0.7", "0.9"])
def test_we_read_what_it_writes(layout: str, tmp_path: Path) -> None:
    """Items 103, 105: stores of all seven kinds and a pyramid, written by the package, are read as the package reads them."""
    peer(layout, "write", tmp_path)
    stores = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    assert len(stores) == 9
    for path in stores:
        compare(path, open_vectors(path), dict(np.load(path.with_suffix(".npz"))), layout)


def compare(path: Path, store: Any, found: dict[str, Any], layout: str) -> None:
    """Compare what we read with what the package reads."""
    kind, shapes = path.name.split("-")[0], store.read()
    assert shapes.kind == kind
    assert store.layout == layout
    assert rows_of(shapes.positions) == rows_of(found["positions"])
    if kind in {"line", "polyline", "streamline"}:
        assert np.array_equal(shapes.positions, found["positions"])
    if "offsets" in found:
        assert np.array_equal(shapes.offsets, found["offsets"])
    # the skeleton reader of 0.2.0 takes the last vertex of one piece for the parent of the next one
    if "links" in found and not (kind == "skeleton" and layout == "0.7"):
        other = Shapes("graph", found["positions"], links=found["links"])
        assert corners_of(replace(shapes, link_attributes={})) == corners_of(other)
    for key, value in found.items():
        what, _, name = key.partition(":")
        if what == "object":
            assert rows_of(store.objects([int(name)]).positions) == rows_of(value)
        elif what == "group":
            assert rows_of(store.group(int(name)).positions) == rows_of(value)
        elif what == "level":
            assert sorted(set(rows_of(store.read(level=int(name)).positions))) == sorted(set(rows_of(value)))
        elif what == "box":
            assert rows_of(store.box([-30] * 3, [40] * 3).positions) == rows_of(value)
        elif what == "v":
            mine = shapes.vertex_attributes[name].values.reshape(len(value), -1)
            both = np.concatenate([shapes.positions, mine], axis=1)
            assert rows_of(both) == rows_of(np.concatenate([found["positions"], value.reshape(len(value), -1)], axis=1))


def stores_of_ours() -> dict[str, Geometry]:
    """What is written for the packages to read: every kind, objects with all kinds of manifests, groups."""
    cutting = Cutting(chunk_shape=EDGE)
    shapes = {
        "point_cloud-plain": Shapes("point_cloud", walk(60), vertex_attributes={"v": np.arange(60, dtype="f4")}),
        "point_cloud-objects": replace(
            paths(), kind="point_cloud", offsets=np.array([0, 5, 5, 6, 40]), object_attributes={"v": np.arange(4.0)}
        ),
        "line-all": lines(),
        "polyline-all": replace(paths("polyline"), offsets=np.array([0, 5, 8, 20, 40])),
        "streamline-all": replace(paths(), offsets=np.array([0, 5, 8, 20, 40])),
        "graph-all": replace(graph(), link_attributes={}),
        "skeleton-all": replace(tree(), offsets=np.array([0, 40]), links=tree_links(), ids=np.array([0])),
        "mesh-all": replace(mesh(), link_attributes={}),
    }
    made = {name: make_geometry(value, cutting) for name, value in shapes.items()}
    made["point_cloud-objects"] = with_modes(made["point_cloud-objects"])
    return made


def tree_links() -> Any:
    """One binary tree over all vertices."""
    return np.array([[i, (i - 1) // 2] for i in range(1, 40)])


def with_modes(geometry: Geometry) -> Geometry:
    """Give the object index blocks of all three modes."""
    level = geometry.levels[0]
    objects = level.objects
    assert objects is not None
    modes = (np.arange(len(objects.modes)) % 3).astype(np.uint8)
    listed = modes == 2
    starts = objects.starts.copy()
    starts[listed] = np.arange(listed.sum())
    index = replace(objects, modes=modes, starts=starts, fragments=objects.starts[listed])
    return replace(geometry, levels=(replace(level, objects=index),))


@pytest.mark.parametrize("layout", ["0.7", "0.9"])
def test_it_reads_what_we_write(layout: str, tmp_path: Path) -> None:
    """Items 102, 104: all seven kinds, boxes, objects of every mode and groups come back from the package as we read them."""
    for name, geometry in stores_of_ours().items():
        write(geometry, tmp_path / name, layout=layout, compat="0.2" if layout == "0.7" else None)
    peer(layout, "read", tmp_path)
    for path in sorted(tmp_path.iterdir()):
        if path.is_dir():
            compare(path, open_vectors(path), dict(np.load(path.with_suffix(".npz"))), layout)


def with_lists(geometry: Geometry) -> Geometry:
    """Give a cloud fragments that overlap, repeat and leave gaps, as explicit lists and out of order."""
    level = geometry.levels[0]
    sizes = np.diff(level.bounds)
    n = len(sizes)
    bounds = np.arange(n + 1) * 3
    is_range = np.tile([True, False, True], n)
    starts, counts = np.zeros(3 * n, np.int64), np.zeros(3 * n, np.int64)
    starts[0::3], counts[0::3] = sizes // 2, sizes - sizes // 2
    counts[1::3] = 2
    starts[1::3] = np.arange(n) * 2
    counts[2::3] = np.minimum(sizes, 2)
    rows = np.stack([sizes - 1, np.zeros(n, np.int64)], axis=1).reshape(-1)
    fragments = Fragments(bounds, is_range, starts, counts, rows)
    return replace(geometry, levels=(replace(level, fragments=fragments, fragment_attributes={}),))


def test_it_reads_every_spelling_of_0_9(tmp_path: Path) -> None:
    """Item 104: overlapping and explicit fragments, files for each chunk, compressed cells, sparse ids and narrow links are read by 0.9.2."""
    plain = make_geometry(Shapes("point_cloud", walk(60)), Cutting(chunk_shape=EDGE))
    write(with_lists(plain), tmp_path / "point_cloud-lists")
    write(plain, tmp_path / "point_cloud-files", shards=False)
    write(plain, tmp_path / "point_cloud-zstd", compression="zstd")
    write(plain, tmp_path / "point_cloud-blosc", compression="blosc")
    whole = np.rint(walk(60) * 10).astype(np.int16)
    write(
        make_geometry(Shapes("point_cloud", whole), Cutting(chunk_shape=(40, 40, 40))), tmp_path / "point_cloud-whole"
    )
    peer("0.9", "read", tmp_path)
    for path in sorted(tmp_path.iterdir()):
        if path.is_dir():
            found = dict(np.load(path.with_suffix(".npz")))
            if path.name.endswith("lists"):
                found.pop("box")  # the package repeats the rows that fragments share, as reading whole does
            compare(path, open_vectors(path), found, "0.9")


def test_it_finds_nothing_wrong(tmp_path: Path) -> None:
    """Item 104: the package's validator at level 5 passes what we write in layout 0.9."""
    for name, geometry in stores_of_ours().items():
        write(geometry, tmp_path / name)
    reports = [json.loads(line) for line in peer("0.9", "validate", tmp_path).splitlines()]
    assert len(reports) == 8
    assert [report for report in reports if not report["ok"]] == []
