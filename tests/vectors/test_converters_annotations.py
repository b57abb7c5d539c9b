"""Neuroglancer annotations, and what other libraries wrote in Neuroglancer's formats."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.annotation_codec import PER_CELL
from raggedatlas.vectors.converters.content import Content, decode_categories
from raggedatlas.vectors.converters.convert import plan_losses, read_file, write_file
from raggedatlas.vectors.shapes import Attribute, Shapes


@pytest.fixture(scope="session")
def peers(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """Folder with files that other libraries wrote."""
    folder = tmp_path_factory.mktemp("peers")
    with zipfile.ZipFile(data_dir / "geometry_peers.zip") as archive:
        archive.extractall(folder)
    return folder


def test_annotations_of_neuroglancer_are_read(peers: Path) -> None:
    """Points and lines that neuroglancer wrote have their ids, values, labels and colours; related ids are groups."""
    points = read_file(peers / "points")
    shapes = points.shapes
    assert shapes.positions.tolist() == [[i, 2 * i + 0.5, 3 * i] for i in range(5)]
    assert shapes.vertex_attributes["annotation_id"].values.tolist() == [10, 13, 16, 19, 22]
    assert shapes.vertex_attributes["size"].values.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert decode_categories(shapes.vertex_attributes["cell_type"]).tolist() == ["B", "T", "B", "T", "B"]
    assert shapes.vertex_attributes["color"].values.tolist() == [[i, 2 * i, 255] for i in range(5)]
    assert points.axes is not None
    assert [axis.unit for axis in points.axes] == ["meter"] * 3
    lines = read_file(peers / "lines")
    assert (lines.shapes.kind, np.asarray(lines.shapes.ids).tolist()) == ("line", [1, 2, 3])
    assert lines.shapes.positions[2:4].tolist() == [[1, 0, 0], [1, 5, 6]]
    assert lines.shapes.object_attributes["w"].values.tolist() == [0, -1, -2]
    assert lines.left == ()
    assert lines.shapes.groups is not None
    assert lines.shapes.groups.attributes["related_id"].values.tolist() == [7, 8]
    assert lines.shapes.groups.members(1).tolist() == [1, 2, 3]


def test_the_index_of_ids_says_the_same(peers: Path, tmp_path: Path) -> None:
    """Where there is no spatial index the annotations are read one by one."""
    import shutil

    shutil.copytree(peers / "points", tmp_path / "points")
    info = json.loads((tmp_path / "points" / "info").read_text())
    (tmp_path / "points" / "info").write_text(json.dumps({**info, "spatial": []}))
    one, other = read_file(tmp_path / "points").shapes, read_file(peers / "points").shapes
    assert np.array_equal(one.positions, other.positions)
    assert np.array_equal(one.vertex_attributes["size"].values, other.vertex_attributes["size"].values)


def test_skeletons_and_meshes_of_cloud_volume_are_read(peers: Path) -> None:
    """A skeleton with radii and types, the same in compressed shards of a hashed layout, and a mesh."""
    alone = read_file(peers / "volume" / "skeletons").shapes
    assert (alone.kind, np.asarray(alone.ids).tolist()) == ("skeleton", [77])
    assert np.asarray(alone.links).tolist() == [[1, 0], [2, 1], [3, 1]]
    assert alone.vertex_attributes["radius"].values.tolist() == [1, 2, 3, 4.5]
    assert alone.vertex_attributes["vertex_types"].values.tolist() == [1, 2, 3, 4]
    many = read_file(peers / "sharded").shapes
    assert np.asarray(many.ids).tolist() == [5, 9, 10, 77, 123456789]
    assert np.array_equal(many.positions, np.tile(alone.positions, (5, 1)))
    mesh = read_file(peers / "meshes").shapes
    assert np.asarray(mesh.links).tolist() == [[0, 1, 2], [0, 3, 1], [0, 2, 3], [1, 3, 2]]
    with pytest.raises(SourceError, match=r"volume of images; its shapes lie in .*skeletons"):
        read_file(peers / "volume")


def test_a_shard_that_is_cut_off_is_refused(peers: Path, tmp_path: Path) -> None:
    """Every beginning of a shard that holds an entry is refused by its name."""
    for name in ("info", "0.shard", "1.shard"):
        (tmp_path / name).write_bytes((peers / "sharded" / name).read_bytes())
    data = (tmp_path / "0.shard").read_bytes()
    for end in (3, 20, len(data) // 2, len(data) - 1):
        (tmp_path / "0.shard").write_bytes(data[:end])
        with pytest.raises(SourceError, match=r"0\.shard is no shard"):
            read_file(tmp_path)


def spots(n: int = 3) -> Shapes:
    rng = np.random.default_rng(0)
    return Shapes(
        "point_cloud",
        rng.random((n, 3)).astype(np.float32) * [8, 4, 2],
        vertex_attributes={
            "gene": Attribute(np.arange(n) % 2, metadata={"categories": ["A", "B"]}),
            "quality": np.arange(n, dtype=np.uint16),
            "color": np.arange(3 * n, dtype=np.uint64).astype(np.uint8).reshape(n, 3),
            "score": np.arange(n, dtype=np.float32),
        },
    )


def test_points_have_the_bytes_of_the_format(tmp_path: Path) -> None:
    """A cell is its count, then annotations (position, values from wide to narrow, filled to four bytes), then ids."""
    assert write_file(spots(2), tmp_path / "a", format="precomputed-annotations", strict=True) == []
    info = json.loads((tmp_path / "a" / "info").read_text())
    assert [(said["id"], said["type"]) for said in info["properties"]] == [
        ("gene", "int32"), ("score", "float32"), ("quality", "uint16"), ("color", "rgb"),
    ]  # fmt: skip
    data = (tmp_path / "a" / "spatial0" / "0_0_0").read_bytes()
    ids = np.frombuffer(data, "<u8", 2, len(data) - 16)
    expected = b"".join(
        spots(2).positions[k].astype("<f4").tobytes() + np.int32(k).tobytes() + np.float32(k).tobytes()
        + np.uint16(k).tobytes() + bytes([3 * k, 3 * k + 1, 3 * k + 2]) + b"\0\0\0"
        for k in ids
    )  # fmt: skip
    assert data == np.uint64(2).tobytes() + expected + ids.tobytes()


def test_annotations_come_back_over_several_levels(tmp_path: Path) -> None:
    """Many points are spread over levels whose cells hold few; all come back, once, as do lines that cross cells."""
    n = 4 * PER_CELL
    write_file(spots(n), f"precomputed://{tmp_path}/p")
    info = json.loads((tmp_path / "p" / "info").read_text())
    assert len(info["spatial"]) > 1
    assert info["spatial"][0]["limit"] == PER_CELL
    for level in info["spatial"]:
        size = np.array(info["upper_bound"]) - info["lower_bound"]
        assert np.allclose(np.array(level["grid_shape"]) * level["chunk_size"], size)
    again = read_file(tmp_path / "p").shapes
    assert np.array_equal(again.positions, spots(n).positions.astype(np.float32))
    assert np.array_equal(again.vertex_attributes["quality"].values, spots(n).vertex_attributes["quality"].values)
    assert decode_categories(again.vertex_attributes["gene"]).tolist()[:3] == ["A", "B", "A"]
    rng = np.random.default_rng(1)
    ends = (rng.random((2 * (PER_CELL + 100), 2)) * 100).astype(np.float32)
    lines = Shapes(
        "line", ends, np.arange(0, len(ends) + 1, 2), np.arange(len(ends) // 2) * 3 + 1,
        object_attributes={"w": np.arange(len(ends) // 2)},
    )  # fmt: skip
    assert write_file(lines, tmp_path / "l", format="precomputed-annotations", strict=True) == []
    back = read_file(tmp_path / "l").shapes
    assert np.array_equal(back.positions, ends)
    assert np.array_equal(np.asarray(back.ids), np.asarray(lines.ids))
    assert np.array_equal(back.object_attributes["w"].values, np.arange(len(ends) // 2))


def test_scales_and_ids_are_kept(tmp_path: Path) -> None:
    """Ids of points, names, scales and units of axes are the same after a round trip."""
    shapes = Shapes("point_cloud", np.eye(2, dtype=np.float32), vertex_attributes={"annotation_id": np.array([9, 4])})
    said = {"dimensions": {"u": [4e-9, "m"], "v": [1, ""]}}
    write_file(Content(shapes, said), tmp_path / "a", format="precomputed-annotations", strict=True)
    again = read_file(tmp_path / "a")
    assert again.metadata == {**said, "annotation_type": "POINT"}
    assert again.shapes.vertex_attributes["annotation_id"].values.tolist() == [4, 9]
    assert again.axes is not None
    assert [(axis.name, axis.unit) for axis in again.axes] == [("u", None), ("v", None)]


def test_what_annotations_do_not_hold_is_told(tmp_path: Path) -> None:
    """Names that Neuroglancer refuses, wide numbers, several channels and objects are lost by name."""
    owned = Shapes(
        "point_cloud", np.zeros((2, 2), np.float32), np.array([0, 0, 2]),
        vertex_attributes={"Big Name": np.zeros(2), "wide": np.array([2**40, 0]), "vec": np.zeros((2, 2))},
        object_attributes={"name": np.array(["a", "b"])},
    )  # fmt: skip
    assert [loss.split(" is left")[0] for loss in plan_losses(owned, "precomputed-annotations")] == [
        "attribute 'Big Name'", "attribute 'wide'", "attribute 'vec'", "attribute 'name'",
        "objects: which of the 2 a point belongs to",
    ]  # fmt: skip
    long = Shapes("line", np.zeros((3, 2), np.float32))
    with pytest.raises(SourceError, match="Line 0 has 3 vertices"):
        write_file(long, tmp_path / "l", format="precomputed-annotations")
    with pytest.raises(SourceError, match="hold no streamline"):
        write_file(Shapes("streamline", np.zeros((2, 3))), f"precomputed://{tmp_path}/s")


def test_broken_annotations_are_refused(tmp_path: Path) -> None:
    """Other types, unknown properties and cells cut off are refused by name."""
    write_file(spots(), tmp_path / "a", format="precomputed-annotations")
    info = json.loads((tmp_path / "a" / "info").read_text())
    cell = tmp_path / "a" / "spatial0" / "0_0_0"
    cell.write_bytes(cell.read_bytes()[:-1])
    with pytest.raises(SourceError, match=r"0_0_0 has .* cut off"):
        read_file(tmp_path / "a")
    (tmp_path / "a" / "info").write_text(json.dumps({**info, "annotation_type": "SPHERE"}))
    with pytest.raises(SourceError, match=r"type SPHERE; POINT, LINE, .* are read"):
        read_file(tmp_path / "a")
    (tmp_path / "a" / "info").write_text(json.dumps({**info, "properties": [{"id": "x", "type": "float64"}]}))
    with pytest.raises(SourceError, match="float64"):
        read_file(tmp_path / "a")
    (tmp_path / "a" / "info").write_text("{")
    with pytest.raises(SourceError, match="no file 'info' in JSON"):
        read_file(tmp_path / "a")
