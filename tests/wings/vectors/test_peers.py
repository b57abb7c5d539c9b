"""The public packages as oracles, both ways: zarr-vectors 0.2.0 for layout 0.7, and 0.9.2 for layout 0.9 (items 102 to 107).

Most are asked for by ``-m peers`` and need the environments that ``benchmarks/peers.sh vectors`` makes; stores that the packages wrote
are also kept in ``tests/data/zarr_vectors_peers.zip``.
"""

import json
import os
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raggedatlas.errors import QueryError
from raggedatlas.wings.vectors import validate
from raggedatlas.wings.vectors.builder import ChunkingOptions, make_geometry
from raggedatlas.wings.vectors.geometry import Fragments, Geometry
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.shapes import Attribute, Groups, Shapes
from raggedatlas.wings.vectors.writer import write
from support.spatial import (
    EDGE,
    by_kind,
    corners_of,
    graph,
    lines,
    mesh,
    paths,
    rows_of,
    spots,
    tree,
    walk,
)

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("peer_zarr_vectors.py")
VENVS = {"0.7": ROOT / ".venv-peers-vectors-0.2", "0.9": ROOT / ".venv-peers-vectors-0.9"}

CUT = ChunkingOptions(chunk_shape=EDGE)
pytestmark = pytest.mark.timeout(600)


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


@pytest.mark.peers
@pytest.mark.parametrize("layout", ["0.7", "0.9"])
def test_we_read_what_it_writes(layout: str, tmp_path: Path) -> None:
    """Items 103, 105: stores of all seven kinds, a pyramid and one cut by an attribute, written by the package, are read as the package reads them."""
    peer(layout, "write", tmp_path)
    stores = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    assert len(stores) == 13
    for path in stores:
        compare(path, open_vectors(path), dict(np.load(path.with_suffix(".npz"))), layout)
        assert not [problem for problem in validate(path) if problem.level == "must"]


@pytest.fixture(scope="module")
def kept(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores that the packages wrote."""
    folder = tmp_path_factory.mktemp("kept")
    with zipfile.ZipFile(data_dir / "zarr_vectors_peers.zip") as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("layout", ["0.7", "0.9"])
def test_stores_that_the_packages_wrote(layout: str, kept: Path, tmp_path: Path) -> None:
    """Items 20, 21, 53, 103, 105: columns that no shape declares, texts, and fragments that objects share are read as the packages read
    them, survive both layouts, and break no rule that a store must keep."""
    for path in sorted(path for path in (kept / layout).iterdir() if path.is_dir()):
        found = dict(np.load(path.with_suffix(".npz")))
        compare(path, open_vectors(path), found, layout)
        assert not [str(problem) for problem in validate(path) if problem.level == "must"], path
        for other in ("0.7", "0.9"):
            write(open_vectors(path).load(), tmp_path / path.name / other, layout=other)
            again, before = open_vectors(tmp_path / path.name / other).read(), open_vectors(path).read()
            assert np.array_equal(again.positions, before.positions)
            assert corners_of(replace(again, link_attributes={})) == corners_of(replace(before, link_attributes={}))
            for name, attribute in before.vertex_attributes.items():
                assert np.array_equal(again.vertex_attributes[name].values, attribute.values)
                assert again.vertex_attributes[name].metadata.get("categories") == attribute.metadata.get("categories")


def test_shared_fragments_are_read_once(kept: Path) -> None:
    """Item 33: a store or a box gives each vertex and face once, though objects share fragments; by object each is complete."""
    path = kept / "0.7" / "mesh-halves"
    store, found = open_vectors(path), dict(np.load(path.with_suffix(".npz")))
    once, each = store.read(), store.read(shared="each")
    assert (once.n_vertices, once.n_links) == (len(found["positions"]), len(found["links"]))
    assert each.n_vertices > once.n_vertices
    assert np.array_equal(each.vertex_counts, [store.objects([int(i)]).n_vertices for i in store.object_ids()])
    box = store.box([-99] * 3, [99] * 3)
    assert (box.n_vertices, box.n_links) == (once.n_vertices, once.n_links)
    coarse = open_vectors(kept / "0.7" / "point_cloud-pyramid").read(level=1)
    assert len(coarse.positions) == len(np.unique(coarse.positions, axis=0))
    with pytest.raises(QueryError, match="'once' or 'each'"):
        store.read(shared="never")


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
    if path.name.endswith("kinds"):
        own = shapes.vertex_attributes
        assert np.array_equal(own["kind"].values, own["v"].values.astype(np.int64) % 3)
    if layout == "0.7" and path.name.endswith("kinds"):
        found.pop("box")  # 0.2.0 finds nothing by a box where chunks are also cut by an attribute
    for key, value in found.items():
        what, _, name = key.partition(":")
        if what in {"oa", "ga", "members"}:
            compare_tables(path, store, (what, name), value)
        elif what == "v":
            own = shapes.vertex_attributes[name]
            if value.dtype.kind == "U":
                assert sorted(set(value)) == own.metadata["categories"]
            codes = np.unique(value, return_inverse=True)[1] if value.dtype.kind == "U" else value
            mine = own.values.reshape(len(value), -1)
            both = np.concatenate([shapes.positions, mine], axis=1)
            at = found.get("at", found["positions"])
            assert rows_of(both) == rows_of(np.concatenate([at, codes.reshape(len(codes), -1)], axis=1))
        elif what == "level":
            assert sorted(set(rows_of(store.read(level=int(name)).positions))) == sorted(set(rows_of(value)))
        elif what in {"object", "group", "box"}:
            asked = {
                "object": lambda i: store.objects([i]),
                "group": store.group,
                "box": lambda _: store.box([-30] * 3, [40] * 3),
            }
            assert rows_of(asked[what](int(name or 0)).positions) == rows_of(value)


def compare_tables(path: Path, store: Any, key: tuple[str, str], value: Any) -> None:
    """Compare the attributes of objects and groups, and the members of groups."""
    what, name = key
    if what == "oa":
        assert same_table(path / "0/object_attributes" / name, store.object_attributes()[name].values, value)
    elif what == "ga":
        assert same_table(path / "0/group_attributes" / name, store.groups().attributes[name].values, value)
    else:
        assert np.array_equal(store.groups().members(int(name)), value)


def same_table(path: Path, mine: Any, value: Any) -> bool:
    """Compare rows of an attribute; 0.2.0 knows no strings, and reads their codes."""
    if mine.dtype.kind in "UTO" and value.dtype.kind in "iu":
        categories = json.loads((path / "zarr.json").read_text())["attributes"]["categories"]
        value = np.array(categories)[value]
    return mine.shape == value.shape and bool((mine == value).all())


def tables_of(n_objects: int, n_groups: int) -> dict[str, Any]:
    """Attributes of objects and groups: numbers, rows of channels, and strings."""
    rows = np.arange(2 * n_objects, dtype=np.int16).reshape(n_objects, 2)
    of_groups = {
        "code": Attribute(np.arange(n_groups, dtype=np.uint8) + 3),
        "ends": Attribute(np.arange(3.0 * n_groups).reshape(n_groups, 3), ("x", "y", "z")),
        "name": Attribute(np.array([f"group {i}" for i in range(n_groups)])),
    }
    own = {"v": np.arange(n_objects) / 2, "w": rows, "name": np.array([f"n{i % 3}" for i in range(n_objects)])}
    return {"object_attributes": own, "of_groups": of_groups}


def with_tables(shapes: Shapes) -> Shapes:
    """Give shapes attributes of objects and groups."""
    groups = shapes.groups or Groups(np.array([0, 2]), np.asarray(shapes.ids)[:2])
    made = tables_of(shapes.n_objects, groups.n_groups)
    return replace(
        shapes, object_attributes=made["object_attributes"], groups=replace(groups, attributes=made["of_groups"])
    )


def stores_of_ours() -> dict[str, Geometry]:
    """What is written for the packages to read: every kind, objects with all kinds of manifests, groups."""
    cutting = ChunkingOptions(chunk_shape=EDGE)
    shapes = {
        "point_cloud-plain": Shapes("point_cloud", walk(60), vertex_attributes={"v": np.arange(60, dtype="f4")}),
        "point_cloud-objects": with_tables(replace(paths(), kind="point_cloud", offsets=np.array([0, 5, 5, 6, 40]))),
        "line-all": lines(),
        "polyline-all": with_tables(replace(paths("polyline"), offsets=np.array([0, 5, 8, 20, 40]))),
        "streamline-all": replace(paths(), offsets=np.array([0, 5, 8, 20, 40])),
        "graph-all": replace(graph(), link_attributes={}),
        "skeleton-all": replace(tree(), offsets=np.array([0, 40]), links=tree_links(), ids=np.array([0])),
        "mesh-all": with_tables(replace(mesh(), link_attributes={})),
    }
    made = {name: make_geometry(value, cutting) for name, value in shapes.items()}
    made["point_cloud-objects"] = with_modes(made["point_cloud-objects"])
    made["point_cloud-kinds"] = by_kind(Shapes("point_cloud", walk(40), vertex_attributes={"v": np.arange(40.0)}))
    return made


def tree_links() -> Any:
    """One binary tree over all vertices."""
    return np.array([[i, (i - 1) // 2] for i in range(1, 40)])


def with_modes(geometry: Geometry) -> Geometry:
    """Give the object index blocks of all three modes."""
    level = geometry.levels[0]
    objects = level.objects
    modes = (np.arange(len(objects.modes)) % 3).astype(np.uint8)
    listed = modes == 2
    starts = objects.starts.copy()
    starts[listed] = np.arange(listed.sum())
    index = replace(objects, modes=modes, starts=starts, fragments=objects.starts[listed])
    return replace(geometry, levels=(replace(level, objects=index),))


@pytest.mark.peers
@pytest.mark.parametrize("layout", ["0.7", "0.9"])
def test_it_reads_what_we_write(layout: str, tmp_path: Path) -> None:
    """Items 102, 104: all seven kinds, boxes, objects of every mode, groups, and attributes of objects and groups (numbers, channels,
    strings) come back from the package as we read them."""
    for name, geometry in stores_of_ours().items():
        write(geometry, tmp_path / name, layout=layout, compat="0.2" if layout == "0.7" else None)
    peer(layout, "read", tmp_path)
    for path in sorted(tmp_path.iterdir()):
        if path.is_dir():
            found = dict(np.load(path.with_suffix(".npz")))
            compare(path, open_vectors(path), found, layout)
            asked = {"oa:v", "oa:w", "oa:name", "ga:code", "ga:ends", "ga:name", "members:0"}
            assert asked <= set(found) or path.name not in {"point_cloud-objects", "polyline-all", "mesh-all"}


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


def many() -> Shapes:
    """Fifty objects; a group of two of them, one of a run of ids, and one of none."""
    groups = Groups(np.array([0, 2, 42, 42]), np.concatenate([[7, 3], np.arange(3, 43)]))
    return Shapes("point_cloud", walk(60), offsets=np.append(np.arange(50), 60), groups=groups)


@pytest.mark.peers
def test_it_reads_every_spelling_of_0_9(tmp_path: Path) -> None:
    """Item 104: overlapping and explicit fragments, files for each chunk, compressed cells, sparse ids beyond 32 bits, the index in both forms
    (v1 of row numbers, v2 with a table of ids), groups as ranges and narrow links are read by 0.9.2."""
    plain = make_geometry(Shapes("point_cloud", walk(60)), ChunkingOptions(chunk_shape=EDGE))
    write(with_lists(plain), tmp_path / "point_cloud-lists")
    write(plain, tmp_path / "point_cloud-files", shards=False)
    write(plain, tmp_path / "point_cloud-zstd", compression="zstd")
    write(plain, tmp_path / "point_cloud-blosc", compression="blosc")
    write(plain, tmp_path / "point_cloud-lz4", compression="lz4")
    whole = np.rint(walk(60) * 10).astype(np.int16)
    write(
        make_geometry(Shapes("point_cloud", whole), ChunkingOptions(chunk_shape=(40, 40, 40))),
        tmp_path / "point_cloud-whole",
    )
    own = spots()
    write(make_geometry(with_tables(replace(own, offsets=np.array([0, 5, 5, 40]))), CUT), tmp_path / "point_cloud-v2")
    write(make_geometry(with_tables(many()), CUT), tmp_path / "point_cloud-v1")
    index = [json.loads((tmp_path / f"point_cloud-{v}/0/object_index/zarr.json").read_text()) for v in ("v1", "v2")]
    assert [node["attributes"]["layout"] for node in index] == ["vlen_manifests_v1", "vlen_manifests_v2"]
    block = json.loads((tmp_path / "point_cloud-v1/0/groups/zarr.json").read_text())["attributes"]
    assert block["group_ranges"] == {"1": [3, 43]}
    peer("0.9", "read", tmp_path)
    for path in sorted(tmp_path.iterdir()):
        if path.is_dir():
            found = dict(np.load(path.with_suffix(".npz")))
            if path.name.endswith("lists"):
                found.pop("box")  # the package repeats the rows that fragments share, as reading whole does
            compare(path, open_vectors(path), found, "0.9")


@pytest.mark.peers
def test_it_finds_nothing_wrong(tmp_path: Path) -> None:
    """Item 104: the package's validator at level 5 passes what we write in layout 0.9."""
    for name, geometry in stores_of_ours().items():
        write(geometry, tmp_path / name)
    for name, shapes in (("sparse", spots()), ("ranges", many())):
        write(make_geometry(with_tables(shapes), CUT), tmp_path / name)
    reports = [json.loads(line) for line in peer("0.9", "validate", tmp_path).splitlines()]
    assert len(reports) == 11
    assert [report for report in reports if not report["ok"]] == []
