"""Neuroglancer's multi-resolution meshes: bytes, octree, levels, refusals, and cloud-volume."""

import json
import shutil
import struct
import subprocess
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import DracoPy
import numpy as np
import pytest
import trimesh
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.errors import SourceError, ValuesError
from raggedatlas.vectors.builder import ChunkingOptions, make_geometry
from raggedatlas.vectors.converters.content import Content
from raggedatlas.vectors.converters.convert import Conversion, convert, plan_losses, read_file, write_file
from raggedatlas.vectors.converters.precomputed import read_blobs, read_info
from raggedatlas.vectors.converters.precomputed_meshes import cut_at, z_order
from raggedatlas.vectors.pyramid import PyramidOptions, make_pyramid
from raggedatlas.vectors.reader import open_vectors
from raggedatlas.vectors.shapes import Shapes, take_objects
from raggedatlas.vectors.writer import write

FORMAT = "precomputed-draco"
ROOT = Path(__file__).parent.parent.parent


def balls() -> Shapes:
    """Two closed surfaces of different sizes, and an object that is empty."""
    ball = trimesh.creation.icosphere(subdivisions=2)
    points = np.concatenate([ball.vertices * 40 + [5, -6, 7], ball.vertices + np.array([900, 0, 0])]).astype(np.float32)
    n = len(ball.vertices)
    return Shapes(
        "mesh", points, np.array([0, n, n, 2 * n]), np.array([9, 8, 7]), np.concatenate([ball.faces, ball.faces + n])
    )


def levels() -> Content:
    """The balls with a coarser level of both, and one of the first alone."""
    one, two = (step.shapes for step in make_pyramid(balls(), PyramidOptions(n_levels=2, factor=4)))
    return Content(balls(), coarser=(one, take_objects(two, np.flatnonzero(np.asarray(two.ids) == 9))))


def one_of(shapes: Shapes, key: int) -> Shapes:
    return take_objects(shapes, np.flatnonzero(np.asarray(shapes.ids) == key))


def solid(shapes: Shapes, key: int) -> trimesh.Trimesh:
    """Return one mesh with vertices of the same place joined, and without triangles that are then lines."""
    one = one_of(shapes, key)
    places, at = np.unique(one.positions, axis=0, return_inverse=True)
    faces = at.ravel()[np.asarray(one.links)]
    return trimesh.Trimesh(places, faces[(np.diff(np.sort(faces, 1), axis=1) > 0).all(1)], process=False)


def test_a_manifest_has_the_bytes_of_the_format(tmp_path: Path) -> None:
    """Edges of the finest node, origin, levels, scales, offsets, how many nodes; then places axis by axis and sizes. The fragment is a Draco
    mesh of int32 whole numbers, without Draco's own quantisation."""
    corners = np.array([[1, 2, 3], [5, 2, 3], [1, 4, 3]], np.float32)
    shapes = Shapes("mesh", corners, ids=np.array([2**40]), links=np.array([[0, 1, 2]]))
    write_file(shapes, tmp_path / "m", format=FORMAT, strict=True, sharded=False, bits=10)
    assert read_info(tmp_path / "m") == {
        "@type": "neuroglancer_multilod_draco", "vertex_quantization_bits": 10, "lod_scale_multiplier": 1.0,
        "transform": [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0],
    }  # fmt: skip
    data = (tmp_path / "m" / str(2**40)).read_bytes()
    scale = (4 + 20**0.5 + 2) / 3
    head = struct.pack("<6fIf3fI", 4, 2, 4, 1, 2, 3, 1, scale, 0, 0, 0, 1)
    assert (tmp_path / "m" / f"{2**40}.index").read_bytes() == head + struct.pack("<4I", 0, 0, 0, len(data))
    found = DracoPy.decode(data)
    assert found.points.tolist() == [[0, 0, 0], [1023, 0, 0], [0, 1023, 0]]
    assert found.faces.tolist() == [[0, 1, 2]]
    assert found.get_attribute_by_unique_id(0)["data_type"] == DracoPy.DataType.DT_INT32


def test_manifests_stand_behind_their_fragments_in_the_shard(tmp_path: Path) -> None:
    """In shards each manifest is found by its id, and the fragments that it names stand directly before it."""
    for name, sharded in (("one", True), ("two", False)):
        write_file(levels(), tmp_path / name, format=FORMAT, sharded=sharded, depth=1)
    blobs = list(read_blobs(tmp_path / "one", read_info(tmp_path / "one")["sharding"]))
    assert [blob.key for blob in blobs] == [7, 8, 9]
    for blob in blobs:
        data = (tmp_path / "two" / str(blob.key)).read_bytes()
        assert blob.data == (tmp_path / "two" / f"{blob.key}.index").read_bytes()
        assert blob.shard[blob.start - len(data) : blob.start] == data


@given(st.sampled_from([10, 16]), st.booleans(), st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_meshes_of_one_node_come_back(bits: int, sharded: bool, seed: int, n: int) -> None:
    """Ids, vertices and faces come back in their order, each position within half a step of its mesh's extent, level by level."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(3, 9, n)
    ends = np.concatenate([[0], np.cumsum(counts)])
    points = (rng.normal(size=(ends[-1], 3)) * 10.0 ** rng.integers(-2, 5)).astype(np.float32)
    faces = np.concatenate([start + rng.integers(0, count, (4, 3)) for start, count in zip(ends, counts, strict=False)])
    shapes = Shapes("mesh", points, ends, rng.permutation(100)[:n], faces)
    coarser = replace(shapes, positions=shapes.positions[::-1].copy())
    with tempfile.TemporaryDirectory() as folder:
        write_file(Content(shapes, coarser=(coarser,)), f"{folder}/m", format=FORMAT, bits=bits, sharded=sharded)
        found = read_file(f"{folder}/m")
    for level, (mine, theirs) in enumerate(((shapes, found.shapes), (coarser, *found.coarser)[:2])):
        for key in np.asarray(shapes.ids).tolist():
            one, other = one_of(mine, key), one_of(theirs, key)
            both = np.concatenate([one_of(shapes, key).positions, one_of(coarser, key).positions]).astype(np.float64)
            step = (both.max(0) - both.min(0)) * 2**level / (2**bits - 1)
            slack = 1e-6 * np.abs(both).max()
            assert np.array_equal(one.links, other.links)
            assert (np.abs(one.positions.astype(np.float64) - other.positions) <= step / 2 * (1 + 1e-5) + slack).all()


def nodes_of(path: Path, key: int) -> list[list[tuple[tuple[int, ...], bytes]]]:
    """Read a manifest and fragments by struct: for each level the nodes and their bytes."""
    manifest, data = (path / f"{key}.index").read_bytes(), (path / str(key)).read_bytes()
    (n_levels,) = struct.unpack_from("<I", manifest, 24)
    counts = struct.unpack_from(f"<{n_levels}I", manifest, 28 + 16 * n_levels)
    at, end, found = 28 + 20 * n_levels, 0, []
    for count in counts:
        places = np.frombuffer(manifest, "<u4", 3 * count, at).reshape(3, count).T
        level = []
        for place, size in zip(
            places.tolist(), struct.unpack_from(f"<{count}I", manifest, at + 12 * count), strict=True
        ):
            level.append((tuple(place), data[end : end + size]))
            end += size
        at += 16 * count
        found.append(level)
    assert (at, end) == (len(manifest), len(data))
    return found


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("bits", [10, 16])
def test_octrees_are_those_that_viewers_expect(depth: int, bits: int, tmp_path: Path) -> None:
    """Nodes stand along a Z-order curve, each below one of the next level; whole numbers stay in their range, and above the finest level no
    triangle has corners on both sides of the middle, 2**(bits - 1)."""
    write_file(levels(), tmp_path / "m", format=FORMAT, depth=depth, bits=bits, sharded=False)
    found = nodes_of(tmp_path / "m", 9)
    assert len(found) == 3
    assert len(nodes_of(tmp_path / "m", 7)) == 2
    assert nodes_of(tmp_path / "m", 8) == [[]]
    assert len(found[0]) > 4**depth
    for number, level in enumerate(found):
        places = np.array([place for place, _ in level])
        assert np.array_equal(places, z_order(places[::-1]))
        assert places.max() < max(1, 2 ** (depth - number))
        if number + 1 < len(found):
            assert {tuple(place) for place in (places >> 1).tolist()} <= {place for place, _ in found[number + 1]}
        for _, data in level:
            mesh = DracoPy.decode(data) if data else None
            if mesh is None:
                continue
            assert mesh.points.min() >= 0
            assert mesh.points.max() < 2**bits
            side = np.sign(mesh.points - 2 ** (bits - 1))[mesh.faces]
            assert number == 0 or not ((side.max(1) > 0) & (side.min(1) < 0)).any()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_cut_surfaces_are_the_same_surfaces(depth: int, tmp_path: Path) -> None:
    """Cut along nodes, a closed surface is closed again where seams are joined, with the same area, volume and orientation."""
    write_file(levels(), tmp_path / "m", format=FORMAT, depth=depth)
    found = read_file(tmp_path / "m")
    assert np.asarray(found.shapes.ids).tolist() == [7, 8, 9]
    assert one_of(found.shapes, 8).n_vertices == 0
    for mine, theirs in zip((balls(), *levels().coarser), (found.shapes, *found.coarser), strict=True):
        for key in set(np.asarray(mine.ids).tolist()) - {8}:
            one, other = solid(mine, key), solid(theirs, key)
            assert other.is_watertight
            assert np.isclose(one.area, other.area, rtol=1e-4)
            assert np.isclose(one.volume, other.volume, rtol=1e-4)
            assert len(other.faces) >= len(one.faces)


@given(st.lists(st.tuples(*[st.integers(-3, 3)] * 9), min_size=1, max_size=20), st.integers(0, 2), st.integers(-2, 2))
def test_a_cut_leaves_no_triangle_on_both_sides(triangles: list[tuple[int, ...]], axis: int, where: int) -> None:
    """Whatever lies in or across the plane: no triangle crosses it after the cut, and area and normals are as before."""
    points = np.array(triangles, np.float64).reshape(-1, 3)
    faces = np.arange(len(points)).reshape(-1, 3)
    made, cut = cut_at(points, faces, axis, float(where))
    side = np.sign(made[cut][:, :, axis] - where)
    assert not ((side.max(1) > 0) & (side.min(1) < 0)).any()

    def normal(places: Any, rows: Any) -> Any:
        a, b, c = places[rows].transpose(1, 0, 2)
        return np.cross(b - a, c - a)

    assert np.allclose(normal(points, faces).sum(0), normal(made, cut).sum(0))
    areas = [np.linalg.norm(normal(places, rows), axis=1).sum() for places, rows in ((points, faces), (made, cut))]
    assert np.isclose(*areas)


@pytest.mark.parametrize("layout", ["0.9", "0.7"])
def test_levels_go_from_a_store_and_back(layout: str, tmp_path: Path) -> None:
    """A store with a pyramid gives each level as one of detail, and they make a store with the same levels, ids and vertices again."""
    kept = one_of(levels().shapes, 9)
    geometry = make_geometry(
        kept, ChunkingOptions((30.0,) * 3), coarser=make_pyramid(kept, PyramidOptions(n_levels=2, factor=4))
    )
    write(geometry, tmp_path / "a.zv", layout=layout)
    assert convert(tmp_path / "a.zv", tmp_path / "m", Conversion(written=FORMAT, strict=True)) == [
        "rounded: positions, to the whole numbers of a grid over each mesh"
    ]
    assert convert(tmp_path / "m", tmp_path / "b.zv", Conversion(layout=layout, strict=True)) == []
    one, other = open_vectors(tmp_path / "a.zv"), open_vectors(tmp_path / "b.zv")
    assert one.n_levels == other.n_levels == 3
    for level in range(3):
        mine, theirs = one.read(level=level), other.read(level=level)
        assert np.array_equal(np.asarray(mine.ids), np.asarray(theirs.ids))
        pairs = [
            np.asarray(shapes.positions, np.float64)[np.asarray(shapes.links)].mean(1) for shapes in (mine, theirs)
        ]
        assert np.allclose(np.sort(pairs[0], 0), np.sort(pairs[1], 0), atol=2e-3 * 2**level)
    alone = convert(tmp_path / "a.zv", tmp_path / "c", Conversion(written=FORMAT, level=1))
    assert alone[0].startswith("rounded")
    assert read_file(tmp_path / "c").coarser == ()
    told = convert(tmp_path / "m", tmp_path / "d.ply")
    assert told == ["levels: 2 coarser ones are left out"]


def test_a_pyramid_is_made_on_the_way_from_a_file(tmp_path: Path) -> None:
    """Asked for levels, a file of one level becomes one of several; other formats tell that they hold none."""
    write_file(one_of(balls(), 9), tmp_path / "a.ply")
    convert(tmp_path / "a.ply", tmp_path / "m", Conversion(written=FORMAT, steps=PyramidOptions(n_levels=2, factor=4)))
    assert [level.n_links for level in read_file(tmp_path / "m").coarser] == [80, 20]
    assert plan_losses(levels(), "ply")[-1] == "levels: 2 coarser ones are left out"


def test_what_is_not_held_is_told_or_refused(tmp_path: Path) -> None:
    """Meshes without faces lose their vertices by name; other bits and depths, other shapes and places beyond 32-bit floats are refused."""
    bare = replace(balls(), links=np.asarray(balls().links)[:1])
    assert plan_losses(bare, FORMAT)[-1] == "vertices: those of 1 meshes without faces are left out"
    write_file(bare, tmp_path / "bare", format=FORMAT)
    assert one_of(read_file(tmp_path / "bare").shapes, 7).n_vertices == 0
    for options in ({"bits": 12}, {"depth": 7}, {"depth": -1}, {"depth": "x"}):
        with pytest.raises(SourceError, match="expected 10 or 16 bits and a depth of 0 to 6"):
            write_file(balls(), tmp_path / "a", format=FORMAT, **options)
    with pytest.raises(SourceError, match="sharded='no'; expected True or False"):
        write_file(balls(), tmp_path / "a", format=FORMAT, sharded="no")
    with pytest.raises(SourceError, match="holds no point_cloud"):
        write_file(Shapes("point_cloud", np.zeros((1, 3))), tmp_path / "a", format=FORMAT)
    quads = Shapes("mesh", np.zeros((4, 3)), links=np.array([[0, 1, 2, 3]]))
    for name in (FORMAT, "precomputed-meshes"):
        with pytest.raises(SourceError, match="faces of 4 corners"):
            write_file(quads, tmp_path / "a", format=name)
    far = Shapes("mesh", np.eye(3) * 1e300, links=np.array([[0, 1, 2]]))
    with pytest.raises(ValuesError, match="beyond floats of 32 bits"):
        write_file(far, tmp_path / "a", format=FORMAT)
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]


def test_manifests_and_fragments_that_are_cut_off_are_refused(tmp_path: Path) -> None:
    """Beginnings of a manifest and of its fragments are refused by the mesh."""
    write_file(levels(), tmp_path / "m", format=FORMAT, sharded=False)
    for name in ("9.index", "9"):
        whole = (tmp_path / "m" / name).read_bytes()
        for end in range(0, len(whole), max(1, len(whole) // 17)):
            (tmp_path / "m" / name).write_bytes(whole[:end])
            with pytest.raises(SourceError, match=r"mesh 9 has .* cut off"):
                read_file(tmp_path / "m")
        (tmp_path / "m" / name).write_bytes(whole)
    (tmp_path / "m" / "9").write_bytes(bytes(len((tmp_path / "m" / "9").read_bytes())))
    with pytest.raises(SourceError, match="mesh 9 has a fragment that is no Draco mesh"):
        read_file(tmp_path / "m")


@pytest.mark.peers
@pytest.mark.timeout(120)
def test_cloud_volume_reads_our_levels(tmp_path: Path) -> None:
    """cloud-volume finds in shards and in files, cut or not, the triangles of each level that we find."""
    python = ROOT / ".venv-peers-neuroglancer" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python.parent.parent.name} is not there; benchmarks/peers.sh converters makes it")
    made = {"shard": {}, "files": {"sharded": False}, "cut": {"depth": 2}, "cutfiles": {"depth": 2, "sharded": False}}
    for name, options in made.items():
        write_file(levels(), tmp_path / name, format=FORMAT, **options)
    script = Path(__file__).with_name("peer_geometry.py")
    command = [str(python), "-W", "ignore", str(script), "check", "draco", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    seen = json.loads(run.stdout)
    assert len(seen) == 16
    for name in made:
        found = read_file(tmp_path / name)
        for level, shapes in enumerate((found.shapes, *found.coarser[:1])):
            for key in (7, 9):
                points, faces = seen[f"{name} {key} {level}"]
                theirs = np.sort(np.array(points)[np.array(faces)].reshape(-1, 9), 0)
                one = one_of(shapes, key)
                mine = np.sort(one.positions[np.asarray(one.links)].reshape(-1, 9), 0)
                assert np.allclose(mine, theirs, atol=1e-3)


@pytest.mark.peers
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("bits", "depth"), [(16, 0), (16, 2), (10, 1)])
def test_the_viewer_decodes_our_fragments(bits: int, depth: int, tmp_path: Path) -> None:
    """The decoder that Neuroglancer's client runs takes each fragment, and parts those of coarser levels by eighths of their node."""
    clients = sorted(ROOT.glob(".venv-peers-neuroglancer/lib/python3*/site-packages/neuroglancer/static"))
    if not clients or shutil.which("node") is None:
        pytest.skip(
            "Node.js and the package neuroglancer are not there; benchmarks/peers.sh converters makes the latter"
        )
    write_file(levels(), tmp_path / "m", format=FORMAT, depth=depth, bits=bits, sharded=False)
    (tmp_path / "f").mkdir()
    found = {}
    for number, level in enumerate(nodes_of(tmp_path / "m", 9)):
        for row, (_, data) in enumerate(level):
            name = f"{number}-{row}.{min(number, 1)}"
            if data:
                (tmp_path / "f" / name).write_bytes(data)
                found[name] = DracoPy.decode(data)
    script = Path(__file__).with_name("peer_draco.mjs")
    command = ["node", str(script), str(clients[0]), str(tmp_path / "f"), str(bits)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    seen = json.loads(run.stdout)
    assert set(seen) == set(found)
    for name, mesh in found.items():
        points, faces = (np.array(seen[name][part]).reshape(-1, 3) for part in ("points", "faces"))
        assert np.array_equal(points, mesh.points)
        assert sorted(faces.tolist()) == sorted(mesh.faces.tolist())
        if not name.endswith(".0"):
            for part, (first, last) in enumerate(pairwise(seen[name]["offsets"])):
                corners = points[faces[first // 3 : last // 3]].reshape(-1, 3)
                upper = (part >> np.arange(3)) & 1
                middle = 2 ** (bits - 1)
                assert (np.where(upper, corners >= middle, corners <= middle)).all()
