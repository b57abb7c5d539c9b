"""OBJ, PLY and STL, against trimesh."""

from pathlib import Path

import numpy as np
import pytest
import trimesh

from raggedatlas.errors import MissingExtraError, SourceError
from raggedatlas.wings.vectors.converters.convert import convert, read_file, write_file
from raggedatlas.wings.vectors.converters.interop import to_trimesh
from raggedatlas.wings.vectors.shapes import Shapes


def ball(shift: float = 0) -> trimesh.Trimesh:
    made = trimesh.creation.icosphere(subdivisions=1)
    made.apply_translation([shift, 0, 0])
    return made


def two_balls() -> Shapes:
    first, second = ball(), ball(5)
    n = len(first.vertices)
    return Shapes(
        "mesh",
        np.concatenate([first.vertices, second.vertices]).astype(np.float32),
        np.array([0, n, 2 * n]),
        np.array([7, 2]),
        np.concatenate([first.faces, second.faces + n]),
        vertex_attributes={"color": np.arange(6 * n, dtype=np.uint8).reshape(-1, 3)},
    )


def same_surface(shapes: Shapes, mesh: trimesh.Trimesh, row: int = 0) -> None:
    first = to_trimesh(shapes)[int(np.asarray(shapes.ids)[row])]
    assert np.allclose(np.sort(first.triangles.reshape(-1, 9), 0), np.sort(mesh.triangles.reshape(-1, 9), 0), atol=1e-6)


@pytest.mark.parametrize("ending", [".obj", ".ply", ".stl"])
def test_files_of_trimesh_are_read(tmp_path: Path, ending: str) -> None:
    """A mesh that trimesh wrote is read with the same triangles, and hangs together: it is closed."""
    ball().export(tmp_path / f"a{ending}")
    content = read_file(tmp_path / f"a{ending}")
    same_surface(content.shapes, ball())
    assert to_trimesh(content.shapes)[0].is_watertight
    assert content.shapes.positions.dtype == (np.float32 if ending == ".ply" else np.float64)


@pytest.mark.parametrize("ending", [".obj", ".ply", ".stl"])
def test_our_files_are_read_by_trimesh(tmp_path: Path, ending: str) -> None:
    """A mesh that we wrote is read by trimesh with the same triangles."""
    shapes = Shapes("mesh", ball().vertices.astype(np.float32), links=ball().faces)
    assert write_file(shapes, tmp_path / f"a{ending}", strict=True) == []
    loaded = trimesh.load_mesh(tmp_path / f"a{ending}", process=False)
    assert np.allclose(loaded.triangles, ball().triangles, atol=1e-6)


def test_text_stl_and_ply_of_trimesh_are_read(tmp_path: Path) -> None:
    """The text forms say the same as the binary ones."""
    (tmp_path / "a.stl").write_text(ball().export(file_type="stl_ascii"))
    same_surface(read_file(tmp_path / "a.stl").shapes, ball())
    (tmp_path / "a.ply").write_bytes(ball().export(file_type="ply", encoding="ascii"))
    same_surface(read_file(tmp_path / "a.ply").shapes, ball())


def test_colours_and_objects_come_back(tmp_path: Path) -> None:
    """Ids, colours and objects survive OBJ and PLY; trimesh sees the same colours and object names."""
    for name in ("a.ply", "a.obj"):
        assert [loss for loss in write_file(two_balls(), tmp_path / name, strict=True) if "rounded" not in loss] == []
        again = read_file(tmp_path / name).shapes
        order = [np.asarray(again.ids).tolist().index(number) for number in (7, 2)]
        assert np.asarray(again.ids)[order].tolist() == [7, 2]
        for row, at in enumerate(order):
            same_surface(again, ball(5 * row), at)
        assert sorted(again.vertex_attributes["color"].values.ravel().tolist()) == sorted(range(252))
    loaded = trimesh.load_mesh(tmp_path / "a.ply", process=False)
    assert np.array_equal(loaded.visual.vertex_colors[:, :3], two_balls().vertex_attributes["color"].values)
    scene = trimesh.load_scene(tmp_path / "a.obj", split_objects=True)
    assert sorted(scene.geometry) == ["object_2", "object_7"]


def test_further_columns_of_ply_are_kept(tmp_path: Path) -> None:
    """Columns that trimesh drops become attributes of vertices and faces; normals are joined."""
    text = (
        "ply\nformat ascii 1.0\ncomment made by hand\nelement vertex 3\nproperty float x\nproperty float y\nproperty float z\n"
        "property float nx\nproperty float ny\nproperty float nz\nproperty ushort label\nelement face 1\n"
        "property list uchar int vertex_indices\nproperty float area\nelement other 1\nproperty int k\nend_header\n"
        "0 0 0 0 0 1 7\n1 0 0 0 0 1 8\n0 1 0 0 0 1 9\n3 0 1 2 0.5\n4\n"
    )
    (tmp_path / "a.ply").write_text(text)
    content = read_file(tmp_path / "a.ply")
    assert content.shapes.vertex_attributes["label"].values.tolist() == [7, 8, 9]
    assert content.shapes.vertex_attributes["normal"].values.tolist() == [[0, 0, 1]] * 3
    assert content.shapes.link_attributes["area"].values.tolist() == [0.5]
    assert content.left == ("element 'other' is left out",)


def test_faces_of_more_corners_are_cut(tmp_path: Path) -> None:
    """Bytes of the other order are read; text may mix faces, which are cut, as are quads on the way to STL and OBJ; bytes may not."""
    header = "ply\nformat {} 1.0\nelement vertex 5\nproperty double x\nproperty double y\nproperty double z\nelement face 2\n"
    header += "property list uchar uint vertex_index\nproperty uchar k\nend_header\n"
    points = "0 0 0\n1 0 0\n1 1 0\n0 1 0\n0 0 1\n"
    (tmp_path / "a.ply").write_text(header.format("ascii") + points + "3 0 1 2 5\n4 1 2 3 4 6\n")
    content = read_file(tmp_path / "a.ply")
    assert np.asarray(content.shapes.links).tolist() == [[0, 1, 2], [1, 2, 3], [1, 3, 4]]
    assert content.shapes.link_attributes["k"].values.tolist() == [5, 6, 6]
    assert content.left == ("1 faces of more than three corners are cut into triangles",)
    rows = np.arange(15, dtype=">f8").tobytes()
    faces = [b"\4" + np.array(face, ">u4").tobytes() + b"\5" for face in ([0, 1, 2, 3], [1, 2, 3, 4])]
    (tmp_path / "b.ply").write_bytes(header.format("binary_big_endian").encode() + rows + b"".join(faces))
    assert np.asarray(read_file(tmp_path / "b.ply").shapes.links).tolist() == [[0, 1, 2, 3], [1, 2, 3, 4]]
    for ending in (".stl", ".obj", ".ply"):
        assert "2 faces of more than three corners" in str(convert(tmp_path / "b.ply", tmp_path / f"c{ending}"))
        assert read_file(tmp_path / f"c{ending}").shapes.n_links == 4
    # Four, three and five corners are as many bytes as three times four.
    for counts in ([3, 4], [4, 3], [4, 3, 5]):
        mixed = b"".join(bytes([n]) + np.arange(n).astype(">u4").tobytes() + b"\5" for n in counts)
        start = header.replace("face 2", f"face {len(counts)}").format("binary_big_endian").encode()
        (tmp_path / "b.ply").write_bytes(start + rows + mixed)
        with pytest.raises(SourceError, match="faces of equally many corners: write it as text"):
            read_file(tmp_path / "b.ply")


def test_objects_of_obj_of_other_programs(tmp_path: Path) -> None:
    """Objects keep names, also with `#`; quads are cut, tabs, comments and continued lines read; normals are of vertices, the rest is told."""
    text = (
        "mtllib a.mtl\no left #1\nv\t0 0 0\nv 1 0 0 # corner\nv 1 1 0\nv 0 1 0\nvn 0 0 1\n"
        "f 1//1 2//1 3//1 \\\n 4//1\nusemtl red\no left #2\nv 5 0 0\n  f 2//1 5//1 3//1\n"
    )
    (tmp_path / "a.obj").write_text(text)
    content = read_file(tmp_path / "a.obj")
    assert content.shapes.object_attributes["name"].values.tolist() == ["left #1", "left #2"]
    assert content.shapes.vertex_counts.tolist() == [4, 3]
    assert content.shapes.vertex_attributes["normal"].values.tolist() == [[0, 0, 1]] * 7
    assert content.left == (
        "1 faces of more than three corners are cut into triangles",
        "lines mtllib, usemtl are left out",
    )
    assert write_file(content, tmp_path / "b.obj") == ["vertex attribute 'normal' is left out"]
    again = read_file(tmp_path / "b.obj").shapes
    assert np.array_equal(again.positions, content.shapes.positions)
    assert np.array_equal(again.links, content.shapes.links)
    assert (again.ids.tolist(), again.object_attributes["name"].values.tolist()) == ([0, 1], ["left #1", "left #2"])


def test_stl_in_capitals_and_of_several_solids(tmp_path: Path) -> None:
    """Key words have any case; each solid is an object with its name."""
    facet = "facet normal 0 0 1\nouter loop\nvertex 0 0 0\nvertex 1 0 0\nvertex 0 1 0\nendloop\nendfacet\n"
    (tmp_path / "a.stl").write_text(f"SOLID One\n{facet.upper()}ENDSOLID One\nsolid two\n{facet}endsolid two\n")
    shapes = read_file(tmp_path / "a.stl").shapes
    assert shapes.object_attributes["name"].values.tolist() == ["One", "two"]
    assert (shapes.vertex_counts.tolist(), shapes.n_links) == ([3, 3], 2)


@pytest.mark.parametrize("form", ["ascii", "binary_little_endian"])
@pytest.mark.parametrize("further", ["", "property int flag\n"])
def test_a_ply_with_no_rows_of_faces_is_points(tmp_path: Path, form: str, further: str) -> None:
    """Point clouds of other programs declare a table of faces that has no rows, as text or bytes, with further columns or not."""
    axes = "".join(f"property float {name}\n" for name in "xyz")
    faces = f"element face 0\nproperty list uchar int vertex_indices\n{further}"
    header = f"ply\nformat {form} 1.0\nelement vertex 1\n{axes}{faces}end_header\n"
    row = b"1 2 3\n" if form == "ascii" else np.array([1, 2, 3], "<f4").tobytes()
    (tmp_path / "a.ply").write_bytes(header.encode() + row)
    shapes = read_file(tmp_path / "a.ply").shapes
    assert (shapes.kind, shapes.positions.tolist()) == ("point_cloud", [[1, 2, 3]])


def test_an_empty_mesh_with_colours_is_written_as_obj(tmp_path: Path) -> None:
    """No vertices have no colours, normals and textures; the file is written."""
    columns = {name: np.zeros((0, 3)) for name in ("color", "normal")}
    empty = Shapes("mesh", np.zeros((0, 3)), links=np.zeros((0, 3), int), vertex_attributes=columns)
    write_file(empty, tmp_path / "a.obj")
    assert "v " not in (tmp_path / "a.obj").read_text()


def test_numbers_of_obj_that_are_no_ids_stay_names(tmp_path: Path) -> None:
    """Numbers beyond 64 bits, and those with zeros before them, are names."""
    for name in (f"object_{2**63}", "object_007"):
        (tmp_path / "a.obj").write_text(f"o {name}\nv 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 3\n")
        assert read_file(tmp_path / "a.obj").shapes.object_attributes["name"].values.tolist() == [name]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its library a format says which extra to install."""
    import sys

    monkeypatch.setitem(sys.modules, "trimesh", None)
    with pytest.raises(MissingExtraError, match=r"raggedatlas\[geometry\]"):
        to_trimesh(two_balls())
