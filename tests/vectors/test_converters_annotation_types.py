"""Neuroglancer annotations of all five types: bytes, relationships, the spatial index, refusals, and Neuroglancer's own package."""

import json
import struct
import subprocess
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.errors import AtlasError, SourceError, ValuesError
from raggedatlas.vectors.builder import ChunkingOptions
from raggedatlas.vectors.converters.annotation_codec import PER_CELL, VECTORS
from raggedatlas.vectors.converters.content import Content, decode_categories
from raggedatlas.vectors.converters.convert import Conversion, convert, plan_losses, read_file, write_file
from raggedatlas.vectors.converters.precomputed import read_blobs
from raggedatlas.vectors.converters.precomputed_annotations import groups_of
from raggedatlas.vectors.reader import open_vectors
from raggedatlas.vectors.shapes import Attribute, Groups, Shapes

FORMAT = "precomputed-annotations"
PEERED = ("boxes", "ellipsoids", "polylines", "related")


@pytest.fixture(scope="session")
def peers(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """Folder with files that other libraries wrote."""
    folder = tmp_path_factory.mktemp("peers")
    with zipfile.ZipFile(data_dir / "geometry_peers.zip") as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(PEERED)])
    return folder


def made(kind: str, n: int, rank: int = 3, seed: int = 0) -> Content:
    """Annotations of a type with two properties and one relationship, in which some names stand twice."""
    rng = np.random.default_rng(seed)
    each = rng.integers(2, 5, n) if VECTORS[kind] is None else np.full(n, VECTORS[kind])
    if kind == "ELLIPSOID":
        each = np.ones(n, np.int64)
    ids = np.sort(rng.choice(10 * n + 1, n, replace=False)).astype(np.int64)
    positions = rng.normal(size=(int(each.sum()), rank)).astype(np.float32) * 50
    values = {
        "mark": Attribute(rng.integers(-9, 9, n).astype(np.int8)),
        "score": Attribute(rng.random(n).astype(np.float32)),
    }
    counts = rng.integers(0, 4, n)
    related = (np.concatenate([[0], np.cumsum(counts)]), rng.integers(2**63, 2**63 + 4, counts.sum(), dtype=np.uint64))
    groups = groups_of(["pre"], [related], ids)
    metadata = {
        "dimensions": {"xyzw"[axis]: [1, "m"] for axis in range(rank)},
        "annotation_type": kind,
        "annotation_properties": ["score", "mark"],
        "relationships": ["pre"],
    }
    if kind in ("POINT", "ELLIPSOID"):
        radii = {"radii": Attribute(rng.random((n, rank)).astype(np.float32) * 9)} if kind == "ELLIPSOID" else {}
        shapes = Shapes(
            "point_cloud", positions, np.arange(n + 1), ids, vertex_attributes=radii | values, groups=groups
        )
    else:
        shape = "polyline" if kind == "POLYLINE" else "line"
        offsets = np.concatenate([[0], np.cumsum(each)])
        shapes = Shapes(shape, positions, offsets, ids, object_attributes=values, groups=groups)
    return Content(shapes, metadata)


def same(one: Content, other: Content) -> None:
    """Compare annotations: type, ids, places, values with their types, relationships."""
    assert one.metadata == other.metadata
    a, b = one.shapes, other.shapes
    assert a.kind == b.kind
    assert np.array_equal(a.positions.astype(np.float32), b.positions)
    assert np.array_equal(np.asarray(a.ids), np.asarray(b.ids))
    assert np.array_equal(a.offsets, b.offsets)
    for family in ("vertex_attributes", "object_attributes"):
        mine, theirs = getattr(a, family), getattr(b, family)
        assert set(mine) == set(theirs)
        for name, attribute in mine.items():
            assert np.array_equal(attribute.values, theirs[name].values)
            assert attribute.values.dtype == theirs[name].values.dtype
            assert dict(attribute.metadata) == dict(theirs[name].metadata)
    assert a.groups is not None and b.groups is not None  # noqa: PT018
    assert np.array_equal(a.groups.offsets, b.groups.offsets)
    assert np.array_equal(a.groups.ids, b.groups.ids)
    for name, attribute in a.groups.attributes.items():
        assert np.array_equal(attribute.values, b.groups.attributes[name].values)


@given(
    st.sampled_from(sorted(VECTORS)), st.integers(0, 30), st.integers(2, 4), st.integers(0, 2**32 - 1), st.booleans()
)
def test_annotations_of_each_type_come_back(kind: str, n: int, rank: int, seed: int, by_id: bool) -> None:
    """Ids, places, values and relationships, with order and repetition of related ids, are the same after a round trip."""
    content = made(kind, n, rank, seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        assert write_file(content, path, format=FORMAT, strict=True) == []
        if by_id:
            info = json.loads((path / "info").read_text())
            (path / "info").write_text(json.dumps({**info, "spatial": []}))
        same(content, read_file(path))


@pytest.mark.parametrize("layout", ["0.9", "0.7"])
@pytest.mark.parametrize("kind", sorted(VECTORS))
def test_annotations_go_through_a_store(kind: str, layout: str, tmp_path: Path) -> None:
    """A store in either layout, cut into small chunks, keeps all of the annotations; objects and groups are found in it."""
    content = made(kind, 40)
    write_file(content, tmp_path / "a", format=FORMAT)
    convert(
        tmp_path / "a", tmp_path / "s.zv", Conversion(layout=layout, cutting=ChunkingOptions(chunk_shape=(40.0,) * 3))
    )
    assert convert(tmp_path / "s.zv", tmp_path / "b", Conversion(written=FORMAT, strict=True)) == []
    same(content, read_file(tmp_path / "b"))
    store, groups = open_vectors(tmp_path / "s.zv"), content.shapes.groups
    assert groups is not None
    assert set(np.asarray(store.group(0).ids).tolist()) == set(groups.members(0).tolist())


RECORDS: dict[str, tuple[str, list[int], bytes]] = {
    "POINT": ("point_cloud", [0, 1], struct.pack("<2f", 1, 2)),
    "ELLIPSOID": ("point_cloud", [0, 1], struct.pack("<4f", 1, 2, 0.5, 0)),
    "LINE": ("line", [0, 2], struct.pack("<4f", 1, 2, -3, 4)),
    "AXIS_ALIGNED_BOUNDING_BOX": ("line", [0, 2], struct.pack("<4f", 1, 2, -3, 4)),
    "POLYLINE": ("polyline", [0, 3], struct.pack("<I6f", 3, 1, 2, -3, 4, 5, 6)),
}


@pytest.mark.parametrize("kind", sorted(RECORDS))
def test_records_have_the_bytes_of_the_format(kind: str, tmp_path: Path) -> None:
    """A record is its vectors (a polyline's count before them), values from wide to narrow, and filling; by id the related ids follow, in a
    list the ids. The corners of a box stand as they are given, in any order."""
    shape, offsets, vectors = RECORDS[kind]
    positions = np.array([[1, 2], [-3, 4], [5, 6]], np.float32)[: offsets[-1]]
    values = {"a": np.array([-2], np.int8), "b": np.array([7], np.uint16), "c": np.array([0.5], np.float32)}
    family = "vertex_attributes" if shape == "point_cloud" else "object_attributes"
    radii = {"radii": np.array([[0.5, 0]], np.float32)} if kind == "ELLIPSOID" else {}
    related = (np.array([0, 2]), np.array([2**64 - 1, 3], np.uint64))
    groups = groups_of(["of"], [related], np.array([9]))
    shapes = Shapes(shape, positions, np.array(offsets), np.array([9]), **{family: radii | values}, groups=groups)
    write_file(Content(shapes, {"annotation_type": kind}), tmp_path / "a", format=FORMAT, strict=True)
    info = json.loads((tmp_path / "a" / "info").read_text())
    assert info["annotation_type"] == kind
    record = vectors + struct.pack("<fHbx", 0.5, 7, -2)
    listed = struct.pack("<Q", 1) + record + struct.pack("<Q", 9)
    assert (tmp_path / "a" / "spatial0" / "0_0").read_bytes() == listed
    (by_id,) = read_blobs(tmp_path / "a" / "by_id", info["by_id"]["sharding"])
    assert (by_id.key, by_id.data) == (9, record + struct.pack("<IQQ", 2, 2**64 - 1, 3))
    (relation,) = info["relationships"]
    assert relation["id"] == "of"
    index = list(read_blobs(tmp_path / "a" / relation["key"], relation["sharding"]))
    assert [(blob.key, blob.data) for blob in index] == [(3, listed), (2**64 - 1, listed)]


def test_annotations_of_neuroglancer_of_each_type_are_read(peers: Path) -> None:
    """Boxes, ellipsoids, polylines and related points that neuroglancer wrote have their places, values, labels and related ids."""
    boxes = read_file(peers / "boxes")
    assert boxes.shapes.kind == "line"
    assert boxes.shapes.positions.reshape(6, 4).tolist() == [[i, 0.25, 3 - i, 1.5] for i in range(6)]
    assert np.asarray(boxes.shapes.ids).tolist() == [2**40 + 7 * i for i in range(6)]
    assert decode_categories(boxes.shapes.object_attributes["kind"]).tolist() == ["axon", "soma"] * 3
    assert boxes.metadata["dimensions"] == {"x": [4e-9, "m"], "y": [1, "s"]}
    round_ = read_file(peers / "ellipsoids").shapes
    assert round_.positions.tolist() == [[i, 0.25] for i in range(6)]
    assert round_.vertex_attributes["radii"].values.tolist() == [[i / 2, 1.5] for i in range(6)]
    assert round_.vertex_attributes["radii"].channels == ("x", "y")
    lines = read_file(peers / "polylines").shapes
    assert lines.vertex_counts.tolist() == [2, 3, 4, 2, 3, 4]
    assert lines.positions[2:5].tolist() == [[1, 0], [1, 0.5], [1, 1]]
    points = read_file(peers / "related").shapes
    assert points.positions.tolist() == [[i, -i] for i in range(6)]
    assert points.groups is not None
    said = points.groups.attributes
    pre = [k for k in range(points.groups.n_groups) if said["relationship"].values[k] == "pre"]
    assert [(said["related_id"].values[k], said["place"].values[k]) for k in pre] == [(8, 0), (7, 1), (8, 2)]
    assert [points.groups.members(k).tolist() for k in pre] == [
        [2**40 + 7 * i for i in rows] for rows in ([1, 2, 3, 5], [2, 3], [3])
    ]
    assert set(said["related_id"].values.tolist()) == {7, 8, *range(2**64 - 6, 2**64)}


def test_what_neuroglancer_says_of_properties_comes_back(peers: Path, tmp_path: Path) -> None:
    """The info of what is read and written again says the same of each property: type, codes, labels, description, order."""
    for name in PEERED:
        write_file(read_file(peers / name), tmp_path / name, format=FORMAT, strict=True)
        said = [json.loads((folder / name / "info").read_text())["properties"] for folder in (peers, tmp_path)]
        assert said[0] == said[1]


def test_names_that_mean_something_else_are_kept(tmp_path: Path) -> None:
    """Properties called as our own attributes stand beside them, and have their names again in the file."""
    properties = [{"id": name, "type": "uint8"} for name in ("radii", "annotation_id", "radii_")]
    info = {
        "@type": "neuroglancer_annotations_v1", "dimensions": {"x": [1, "m"], "y": [1, "m"]}, "annotation_type": "ellipsoid",
        "properties": properties, "lower_bound": [0, 0], "upper_bound": [4, 4], "relationships": [],
        "spatial": [{"key": "s", "grid_shape": [1, 1], "chunk_size": [4, 4], "limit": 1}],
    }  # fmt: skip
    (tmp_path / "a" / "s").mkdir(parents=True)
    (tmp_path / "a" / "info").write_text(json.dumps(info))
    data = struct.pack("<Q4f3BxQ", 1, 1, 1, 2, 2, 7, 8, 9, 5)
    (tmp_path / "a" / "s" / "0_0").write_bytes(data)
    found = read_file(tmp_path / "a")
    values = {name: a.values.tolist() for name, a in found.shapes.vertex_attributes.items()}
    assert values == {"annotation_id": [5], "radii": [[2, 2]], "radii__": [7], "annotation_id_": [8], "radii_": [9]}
    write_file(found, tmp_path / "b", format=FORMAT, strict=True)
    assert json.loads((tmp_path / "b" / "info").read_text())["properties"] == properties
    assert (tmp_path / "b" / "spatial0" / "0_0").read_bytes() == data


@pytest.mark.parametrize("kind", ["AXIS_ALIGNED_BOUNDING_BOX", "ELLIPSOID", "POLYLINE"])
def test_each_annotation_stands_on_one_level_in_the_cells_it_touches(kind: str, tmp_path: Path) -> None:
    """An annotation is in exactly the cells of its level that its box touches; the box of an ellipsoid is its centre and its radii."""
    content = made(kind, PER_CELL + 500, 2)
    write_file(content, tmp_path / "a", format=FORMAT)
    info = json.loads((tmp_path / "a" / "info").read_text())
    assert len(info["spatial"]) > 1
    shapes, found = content.shapes, {}
    rows = {int(key): row for row, key in enumerate(np.asarray(shapes.ids))}
    for number, level in enumerate(info["spatial"]):
        for file in (tmp_path / "a" / level["key"]).iterdir():
            data = file.read_bytes()
            count = int(np.frombuffer(data, "<u8", 1)[0])
            assert count <= level["limit"]
            for key in np.frombuffer(data, "<u8", count, len(data) - 8 * count).tolist():
                found.setdefault(key, set()).add((number, *map(int, file.name.split("_"))))
    assert len(found) == len(rows)
    low = np.array(info["lower_bound"])
    for key in [*found][::97]:
        places = shapes.positions[slice(*shapes.offsets[rows[key] : rows[key] + 2])].astype(np.float64)
        if kind == "ELLIPSOID":
            radii = shapes.vertex_attributes["radii"].values[rows[key]].astype(np.float64)
            places = np.stack([places[0] - radii, places[0] + radii])
        (number,) = {cell[0] for cell in found[key]}
        size = np.array(info["spatial"][number]["chunk_size"])
        first, last = (
            np.floor((places.min(0) - low) / size).astype(int),
            np.floor((places.max(0) - low) / size).astype(int),
        )
        expected = {
            (number, int(x), int(y)) for x in range(first[0], last[0] + 1) for y in range(first[1], last[1] + 1)
        }
        assert found[key] == expected
        assert (places.min(0) >= low).all() and (places.max(0) <= info["upper_bound"]).all()  # noqa: PT018


def test_what_no_finer_cell_parts_stands_together(tmp_path: Path) -> None:
    """Points in one place and boxes that all overlap end in a level of many, not in ever finer ones."""
    n = PER_CELL + 1_000
    piled = np.zeros((2 * n, 2), np.float32)
    piled[-1] = 1
    write_file(Shapes("point_cloud", piled[-n:]), tmp_path / "p", format=FORMAT)
    assert read_file(tmp_path / "p").shapes.n_vertices == n
    rng = np.random.default_rng(0)
    both = np.stack([rng.random((n, 2)), 9 + rng.random((n, 2))], 1).reshape(-1, 2).astype(np.float32)
    boxes = Shapes("line", both, np.arange(0, 2 * n + 1, 2), np.arange(n))
    write_file(boxes, tmp_path / "b", format=FORMAT, annotation_type="axis_aligned_bounding_box")
    info = json.loads((tmp_path / "b" / "info").read_text())
    assert len(info["spatial"]) <= 3
    assert info["annotation_type"] == "AXIS_ALIGNED_BOUNDING_BOX"
    assert np.array_equal(read_file(tmp_path / "b").shapes.positions, both)


def lone(kind: str = "ELLIPSOID", radii: Any = (1.0, 2.0)) -> Content:
    content = made(kind, 1, 2)
    if kind != "ELLIPSOID":
        return content
    attributes = {**content.shapes.vertex_attributes, "radii": Attribute(np.array([radii]))}
    return replace(content, shapes=replace(content.shapes, vertex_attributes=attributes))


@pytest.mark.parametrize("radii", [(-1.0, 2.0), (np.nan, 1.0), (1.0, np.inf), (1e300, 1.0)])
def test_radii_that_are_none_are_refused(radii: tuple[float, float], tmp_path: Path) -> None:
    """Radii that are negative, no numbers, or beyond 32-bit floats are refused on writing; nothing is left."""
    with pytest.raises(ValuesError, match=r"ellipsoid \d+ has the radii .*none negative"):
        write_file(lone(radii=radii), tmp_path / "a", format=FORMAT)
    assert not [*tmp_path.iterdir()]


def test_stored_values_that_are_none_are_refused(tmp_path: Path) -> None:
    """Negative radii, corners that are no numbers, and polylines of one point are refused on reading, by the annotation."""
    for kind, number, match in (
        ("ELLIPSOID", -2.0, "ellipsoid 5 has the radii"),
        ("AXIS_ALIGNED_BOUNDING_BOX", np.nan, r"vertex 1 of object 5 lies at \[.*nan"),
    ):
        write_file(lone(kind), tmp_path / kind, format=FORMAT)
        info = json.loads((tmp_path / kind / "info").read_text())
        (tmp_path / kind / "info").write_text(json.dumps({**info, "relationships": [], "by_id": None}))
        cell = tmp_path / kind / "spatial0" / "0_0"
        data = bytearray(cell.read_bytes())
        data[20:24] = np.float32(number).tobytes()
        data[-8:] = np.uint64(5).tobytes()
        cell.write_bytes(data)
        with pytest.raises(ValuesError, match=match):
            read_file(tmp_path / kind)
    write_file(lone("POLYLINE"), tmp_path / "p", format=FORMAT)
    cell = tmp_path / "p" / "spatial0" / "0_0"
    cell.write_bytes(struct.pack("<QI2f", 1, 1, 0, 0) + bytes(8) + bytes(8))
    info = json.loads((tmp_path / "p" / "info").read_text())
    (tmp_path / "p" / "info").write_text(json.dumps({**info, "relationships": []}))
    with pytest.raises(SourceError, match="polyline of 1 points"):
        read_file(tmp_path / "p")


@pytest.mark.parametrize("kind", sorted(VECTORS))
def test_annotations_that_are_cut_off_are_refused(kind: str, tmp_path: Path) -> None:
    """Every beginning of a cell and of an entry by id is refused by its name, and one byte too many."""
    write_file(made(kind, 2, 2, seed=3), tmp_path / "a", format=FORMAT)
    info = json.loads((tmp_path / "a" / "info").read_text())
    cell = tmp_path / "a" / "spatial0" / "0_0"
    whole = cell.read_bytes()
    (tmp_path / "a" / "info").write_text(json.dumps({**info, "relationships": []}))
    for data in [*(whole[:end] for end in range(len(whole))), whole + b"\0"]:
        cell.write_bytes(data)
        with pytest.raises(SourceError, match="0_0 has "):
            read_file(tmp_path / "a")
    blobs = list(read_blobs(tmp_path / "a" / "by_id", info["by_id"]["sharding"]))
    plain = {"by_id": {"key": "plain"}}
    (tmp_path / "a" / "plain").mkdir()
    (tmp_path / "a" / "info").write_text(json.dumps(info | plain))
    one = tmp_path / "a" / "plain" / str(blobs[0].key)
    for data in [*(blobs[0].data[:end] for end in range(len(blobs[0].data))), blobs[0].data + b"\0"]:
        one.write_bytes(data)
        with pytest.raises(SourceError, match=rf"annotation {blobs[0].key} has "):
            read_file(tmp_path / "a")
    one.write_bytes(blobs[0].data)
    assert np.asarray(read_file(tmp_path / "a").shapes.ids).tolist() == [blobs[0].key]


def test_types_that_the_geometry_cannot_be_are_refused(tmp_path: Path) -> None:
    """Points are no boxes, points without radii no ellipsoids, lines of three points no boxes, and polylines have two points."""
    points = Shapes("point_cloud", np.zeros((1, 2)))
    line = Shapes("line", np.zeros((3, 2)))
    cases: list[tuple[Shapes, str | None, str]] = [
        (points, "AXIS_ALIGNED_BOUNDING_BOX", "expected POINT"),
        (points, "ELLIPSOID", "attribute 'radii', of 2 floats"),
        (lone().shapes, "POINT", "expected ELLIPSOID"),
        (line, "sphere", "expected LINE or AXIS_ALIGNED_BOUNDING_BOX"),
        (line, "AXIS_ALIGNED_BOUNDING_BOX", "Line 0 has 3 vertices; expected 2 in each"),
        (Shapes("polyline", np.zeros((1, 2))), None, "Polyline 0 has 1 vertices; expected 2 or more"),
        (Shapes("point_cloud", np.full((1, 2), 1e300)), None, "beyond floats of 32 bits"),
        (Shapes("line", np.array([[0, np.nan], [1, 1]])), "AXIS_ALIGNED_BOUNDING_BOX", "expected finite numbers"),
    ]
    for shapes, kind, match in cases:
        with pytest.raises(AtlasError, match=match):
            write_file(shapes, tmp_path / "a", format=FORMAT, annotation_type=kind)
    assert not [*tmp_path.iterdir()]


def test_relationships_that_lead_nowhere_are_refused_or_told(tmp_path: Path) -> None:
    """Groups of annotations that are not there and negative related ids are refused; without an index of ids the lists are told as left."""
    content = made("LINE", 3)
    groups = content.shapes.groups
    assert groups is not None
    far = replace(content.shapes, groups=replace(groups, ids=groups.ids + 1000))
    with pytest.raises(SourceError, match=r"names annotation \d+, which is not there"):
        write_file(far, tmp_path / "a", format=FORMAT)
    below = {**groups.attributes, "related_id": Attribute(np.full(groups.n_groups, -1))}
    with pytest.raises(SourceError, match="related id -1"):
        write_file(replace(content.shapes, groups=replace(groups, attributes=below)), tmp_path / "a", format=FORMAT)
    write_file(content, tmp_path / "a", format=FORMAT)
    info = json.loads((tmp_path / "a" / "info").read_text())
    (tmp_path / "a" / "info").write_text(json.dumps({**info, "by_id": None}))
    found = read_file(tmp_path / "a")
    assert found.left == ("relationship 'pre' is left out: there is no index of ids",)
    assert np.array_equal(found.shapes.positions, content.shapes.positions)
    twice = [{"id": "a", "type": "int8"}] * 2
    (tmp_path / "a" / "info").write_text(json.dumps({**info, "properties": twice}))
    with pytest.raises(SourceError, match="two properties 'a'"):
        read_file(tmp_path / "a")


def test_what_is_left_of_objects_and_groups_is_told() -> None:
    """Groups that are no relationships, their further attributes, ids that another attribute stands for, and rounding are told."""
    content = made("LINE", 3)
    groups = content.shapes.groups
    assert groups is not None
    assert plan_losses(content, FORMAT) == []
    plain = Groups(np.array([0, 1]), np.asarray(content.shapes.ids)[:1], {"name": Attribute(np.array(["g"]))})
    assert plan_losses(replace(content.shapes, groups=plain), FORMAT)[0].startswith("groups: 1 are left out")
    named = replace(groups, attributes={**groups.attributes, "note": Attribute(np.zeros(groups.n_groups))})
    assert plan_losses(replace(content.shapes, groups=named), FORMAT) == ["group attribute 'note' is left out"]
    points = made("POINT", 3).shapes
    numbered = {"annotation_id": Attribute(np.array([5, 6, 7]))}
    assert plan_losses(replace(points, vertex_attributes=numbered), FORMAT) == [
        "objects: their ids are left out; 'annotation_id' stands for them"
    ]
    again = {"annotation_id": Attribute(np.array([5, 6, 6]))}
    assert plan_losses(replace(points, vertex_attributes=again), FORMAT)[0].startswith(
        "attribute 'annotation_id' is left"
    )
    assert plan_losses(lone(), FORMAT) == ["rounded: vertex attribute 'radii', to 32-bit floats"]


ROOT = Path(__file__).parent.parent.parent


def peer(verb: str, folder: Path) -> str:
    """Let the package neuroglancer write annotations, or read all of a folder, by id, by place and by related id."""
    python = ROOT / ".venv-peers-neuroglancer" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python.parent.parent.name} is not there; benchmarks/peers.sh converters makes it")
    script = Path(__file__).with_name("peer_geometry.py")
    command = [str(python), "-W", "ignore", str(script), verb, "annotations", str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


@pytest.mark.peers
@pytest.mark.timeout(120)
def test_neuroglancer_finds_in_ours_what_it_wrote(tmp_path: Path) -> None:
    """All types that neuroglancer wrote, read, kept in a store, and written by us, are to its own reader what they were."""
    first, last = tmp_path / "first", tmp_path / "last"
    first.mkdir()
    last.mkdir()
    peer("make", first)
    for name in PEERED:
        convert(first / name, tmp_path / f"{name}.zv", Conversion(cutting=ChunkingOptions(chunk_shape=(2.0, 1.0))))
        convert(tmp_path / f"{name}.zv", last / name, Conversion(written=FORMAT, strict=True))
    assert json.loads(peer("check", first)) == json.loads(peer("check", last))


@pytest.mark.peers
@pytest.mark.timeout(120)
def test_neuroglancer_reads_ours(tmp_path: Path) -> None:
    """Neuroglancer's reader finds the places, values and related ids of what we wrote, over several levels."""
    contents = {kind: made(kind, 40 if kind != "ELLIPSOID" else PER_CELL + 100, 2) for kind in VECTORS}
    for kind, content in contents.items():
        write_file(content, tmp_path / kind, format=FORMAT, strict=True)
    seen = json.loads(peer("check", tmp_path))
    for kind, content in contents.items():
        shapes, said = content.shapes, seen[kind]
        assert said["type"] == kind.lower()
        values = shapes.vertex_attributes or shapes.object_attributes
        for row, key in enumerate(np.asarray(shapes.ids).tolist()):
            places = shapes.positions[shapes.offsets[row] : shapes.offsets[row + 1]].ravel().tolist()
            places += values["radii"].values[row].tolist() if kind == "ELLIPSOID" else []
            stored = [values["score"].values[row].item(), values["mark"].values[row].item()]
            assert said["found"][str(key)] == [places, stored]
        assert shapes.groups is not None
        count = sum(len(lists[0]) for lists in said["related"].values())
        assert count == len(shapes.groups.ids)
