"""From files to geometry stores and back, in both layouts, from Python and from the command line."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from tests.command import ask

from raggedatlas.errors import ArgumentError, DuplicateError, MissingExtraError, NotFoundError, SourceError, StoreError
from raggedatlas.wings.vectors.builder import ChunkingOptions
from raggedatlas.wings.vectors.converters.content import Content, decode_categories
from raggedatlas.wings.vectors.converters.convert import (
    CONVERTERS,
    REORDERED,
    Conversion,
    convert,
    is_store,
    read_file,
    write_file,
    write_store,
)
from raggedatlas.wings.vectors.converters.geospatial import shapes_of_geometries
from raggedatlas.wings.vectors.converters.interop import to_trimesh
from raggedatlas.wings.vectors.libraries import LIBRARIES, load_library
from raggedatlas.wings.vectors.pyramid import PyramidOptions
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.shapes import Attribute, Shapes


def points() -> Shapes:
    rng = np.random.default_rng(0)
    metadata = {"encoding": "dictionary", "categories": ["A", "B"], "ordered": False, "_FillValue": -1}
    return Shapes(
        "point_cloud", rng.normal(size=(30, 3)) * 10, np.array([0, 20, 20, 30]), np.array([2, 5, 9]),
        vertex_attributes={"gene": Attribute(np.arange(30, dtype=np.int16) % 3 - 1, metadata=metadata), "q": np.arange(30.0)},
    )  # fmt: skip


def surface() -> Shapes:
    x, y = np.meshgrid(np.arange(6.0), np.arange(6.0))
    faces = np.array([[r * 6 + c, r * 6 + c + 1, (r + 1) * 6 + c] for r in range(5) for c in range(5)])
    positions = np.stack([x.ravel(), y.ravel(), (x * y).ravel()], 1).astype(np.float32)
    return Shapes(
        "mesh",
        positions,
        links=faces,
        ids=np.array([3]),
        vertex_attributes={"color": np.arange(108, dtype=np.uint8).reshape(36, 3)},
    )


def polygons() -> Shapes:
    holed = shapely.Polygon([(-9, -9), (9, -9), (9, 9), (-9, 9)], [[(-1, -1), (1, -1), (0, 7)]])
    ids = {"object_id": Attribute(np.array([8, 1])), "label": Attribute(np.array(["x", "y"]))}
    return shapes_of_geometries(np.array([holed, shapely.box(20, 20, 29, 21)]), ids, "x")


MADE: dict[str, tuple[Shapes, tuple[str, ...]]] = {
    "points": (points(), ("csv", "parquet", "ply")),
    "surface": (surface(), ("obj", "ply", "stl")),
    "polygons": (polygons(), ("geojson", "geoparquet", "spatialdata")),
}


def drawn(shapes: Shapes) -> list[Any]:
    """Return what shapes draw, whatever the order of their vertices."""
    rows = [tuple(np.round(row, 3).tolist()) for row in np.asarray(shapes.positions, np.float64) + 0.0]
    if shapes.links is None or shapes.kind == "polyline":
        return sorted(rows) if shapes.kind == "point_cloud" else rows
    return sorted(tuple(sorted(rows[end] for end in link)) for link in np.asarray(shapes.links).tolist())


@pytest.mark.parametrize("layout", ["0.9", "0.7"])
@pytest.mark.parametrize(("made", "name"), [(made, name) for made, (_, names) in MADE.items() for name in names])
def test_a_file_goes_through_a_store_and_back(tmp_path: Path, made: str, name: str, layout: str) -> None:
    """File to store, cut into small chunks, to file: the same places, links, ids and values, in each format and both layouts."""
    converter = CONVERTERS[name]
    ending = converter.endings[0] if converter.endings else ""
    first, last = tmp_path / f"first{ending}", tmp_path / f"last{ending}"
    write_file(MADE[made][0], first, format=name)
    shape = (7.0,) * MADE[made][0].n_dims
    convert(first, tmp_path / "a.zv", Conversion(read=name, layout=layout, cutting=ChunkingOptions(chunk_shape=shape)))
    assert open_vectors(tmp_path / "a.zv").layout == layout
    convert(tmp_path / "a.zv", last, Conversion(written=name))
    one, other = read_file(first, format=name).shapes, read_file(last, format=name).shapes
    assert drawn(one) == drawn(other)
    assert np.array_equal(np.sort(np.asarray(one.ids)), np.sort(np.asarray(other.ids)))
    assert set(one.vertex_attributes) == set(other.vertex_attributes)
    assert set(one.object_attributes) == set(other.object_attributes)
    for attribute, values in one.vertex_attributes.items():
        again = decode_categories(other.vertex_attributes[attribute]).tolist()
        assert sorted(map(str, decode_categories(values).tolist())) == sorted(map(str, again)), attribute


@given(
    rows=st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=12),
    kind=st.sampled_from(["point_cloud", "mesh", "polyline"]),
    n=st.sampled_from([None, 1, 2]),
    bins=st.booleans(),
)
def test_an_order_that_a_store_does_not_keep_is_told(
    rows: list[tuple[int, int, int]], kind: str, n: int | None, bins: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Vertices that come back in another order are told, and only these."""
    n = n or (None if kind == "point_cloud" else 1)
    links = np.array([[0, 0, 0]]) if kind == "mesh" else None
    shapes = Shapes(
        kind, np.array(rows, float), None if n is None else np.linspace(0, len(rows), n + 1).astype(int), links=links
    )
    if kind == "mesh":
        links = np.repeat(shapes.offsets[:-1][np.diff(shapes.offsets) > 0][:, None], 3, axis=1)
        shapes = replace(shapes, links=links, link_offsets=None)
    place = tmp_path_factory.mktemp("order") / "a.zv"
    cutting = ChunkingOptions(chunk_shape=(4, 4, 4), bin_shape=(2, 2, 2) if bins and n is None else None)
    told = write_store(Content(shapes), place, Conversion(cutting=cutting))
    assert (told == [REORDERED]) == (not np.array_equal(open_vectors(place).read().positions, shapes.positions))


def test_layouts_are_converted_without_loss(tmp_path: Path) -> None:
    """Item 106: from store to store, with levels, nothing changes but the layout."""
    write_file(points(), tmp_path / "a.csv")
    convert(tmp_path / "a.csv", tmp_path / "a.zv", Conversion(steps=PyramidOptions(2, 2.0)))
    assert convert(tmp_path / "a.zv", tmp_path / "b.zv", Conversion(layout="0.7", strict=True)) == []
    one, other = open_vectors(tmp_path / "a.zv"), open_vectors(tmp_path / "b.zv")
    assert (one.layout, other.layout, one.n_levels, other.n_levels) == ("0.9", "0.7", 3, 3)
    for level in range(3):
        assert np.array_equal(one.read(level=level).positions, other.read(level=level).positions)


def test_what_a_file_cannot_hold_of_a_store_is_told(tmp_path: Path) -> None:
    """Coarser levels are lost by name unless one is asked for; strict refuses them; a level is written as it is."""
    write_file(points(), tmp_path / "a.csv")
    convert(tmp_path / "a.csv", tmp_path / "a.zv", Conversion(steps=PyramidOptions(1, 2.0)))
    assert convert(tmp_path / "a.zv", tmp_path / "b.csv") == ["levels: 1 coarser ones are left out"]
    with pytest.raises(SourceError, match="would not be converted completely: levels"):
        convert(tmp_path / "a.zv", tmp_path / "c.csv", Conversion(strict=True))
    assert not (tmp_path / "c.csv").exists()
    convert(tmp_path / "a.zv", tmp_path / "c.csv", Conversion(level=1, strict=True))
    assert read_file(tmp_path / "c.csv").shapes.n_vertices == open_vectors(tmp_path / "a.zv").read(level=1).n_vertices
    for target in ("d.csv", "d.zv"):
        with pytest.raises(SourceError, match="mean nothing for a geometry store"):
            convert(tmp_path / "a.zv", tmp_path / target, Conversion(options={"axes": ["x"]}))
        assert not (tmp_path / target).exists()
    for how in (
        Conversion(steps=PyramidOptions(1)),
        Conversion(cutting=ChunkingOptions((1, 1))),
        Conversion(layout="0.7"),
    ):
        with pytest.raises(ArgumentError, match="has no effect where the target is a file"):
            convert(tmp_path / "a.zv", tmp_path / "d.csv", how)
    with pytest.raises(ArgumentError, match=r"level=\.\.\. has no effect where the source is a file"):
        convert(tmp_path / "a.csv", tmp_path / "d.zv", Conversion(level=1))
    assert not (tmp_path / "d.csv").exists()
    assert not (tmp_path / "d.zv").exists()
    with pytest.raises(DuplicateError):
        convert(tmp_path / "a.csv", tmp_path / "a.zv")
    with pytest.raises(NotFoundError):
        convert(tmp_path / "no.zv", tmp_path / "d.csv")
    with pytest.raises(StoreError, match="no folder"):
        convert(tmp_path / "a.zv", tmp_path / "no" / "d.csv")


def test_nothing_is_left_of_a_conversion_that_fails(tmp_path: Path) -> None:
    """A file that is refused leaves no store, and a target that cannot be drawn no file, and nothing hidden."""
    (tmp_path / "a.csv").write_text("x,y\n1,\n")
    with pytest.raises(SourceError):
        convert(tmp_path / "a.csv", tmp_path / "a.zv")
    wide = Shapes("point_cloud", np.zeros((1, 2)), vertex_attributes={"n": np.array([np.inf])})
    with pytest.raises(SourceError, match="infinite"):
        write_file(wide, tmp_path / "a.geojson")
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_stores_are_told_from_other_folders(tmp_path: Path) -> None:
    """A folder is a store by what its metadata say; a name that ends in .zv is one to be."""
    write_file(points(), tmp_path / "a.csv")
    convert(tmp_path / "a.csv", tmp_path / "plain", Conversion(written="store"))
    assert is_store(tmp_path / "plain")
    assert is_store("anything.zv")
    assert not is_store(tmp_path)
    (tmp_path / "zarr.json").write_text("[]")
    assert not is_store(tmp_path)


def run(*words: str) -> Result:
    return ask("convert", *words)


@pytest.mark.long
def test_the_command_converts_geometry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`raggedatlas convert` takes files and stores of geometry by their endings, tells losses, and refuses."""
    monkeypatch.chdir(tmp_path)
    write_file(points(), "a.csv")
    made = run("a.csv", "a.zv", "--levels", "1", "--chunk-shape", "9,9,9", "--level-links", "explicit")
    assert (made.exit_code, made.stdout) == (0, "Wrote a.zv\n")
    assert open_vectors("a.zv").n_levels == 2
    made = run("a.zv", "b.csv", "--json")
    assert json.loads(made.stdout)["losses"][0] == "levels: 1 coarser ones are left out"
    told = run("a.zv", "c.csv")
    assert "lost: levels: 1 coarser ones are left out" in told.stderr
    assert run("a.zv", "d.csv", "--strict").exit_code == 1
    assert run("a.zv", "d.csv", "--where", "x > 1").exit_code == 2
    assert run("a.zv", "d.zv", "--chunk-shape", "wide").exit_code == 2
    assert run("b.csv", "back", "--to", "store", "--layout", "0.7").exit_code == 0
    assert run("b.csv", "f.zv", "--write-option", "ascii=true").exit_code == 1
    assert run("b.csv", "f.csv", "--write-option", "strict=true").exit_code == 1
    assert run("back", "e.parquet", "--level", "0").exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a.csv", "a.zv", "b.csv", "c.csv", "back", "e.parquet"}


def test_options_reach_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--write-option` gives the writer values; what it does not know is refused, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    write_file(points(), "a.csv")
    assert run("a.csv", "s.zarr", "--to", "spatialdata", "--write-option", "name=spots").exit_code == 0
    assert (tmp_path / "s.zarr" / "points" / "spots").is_dir()
    assert run("a.csv", "n.ply", "--write-option", "ascii=true").exit_code == 1
    assert not Path("n.ply").exists()


def test_each_library_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every library of the extra says how to get it."""
    for name in LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingExtraError, match=r"pip install 'raggedatlas\[geometry\]'"):
            load_library(name)


def test_meshes_become_trimesh() -> None:
    """Meshes become Trimesh with their attributes; other kinds are refused."""
    mesh = to_trimesh(surface())[3]
    assert mesh.vertex_attributes["color"].shape == (36, 3)
    with pytest.raises(SourceError, match="makes no trimesh"):
        to_trimesh(points())


ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-peers-spatialdata" / "bin" / "python"


def peer(folder: Path) -> dict[str, Any]:
    """Let spatialdata open what we wrote."""
    if not PYTHON.exists():
        pytest.skip(".venv-peers-spatialdata is not there; benchmarks/peers.sh converters makes it")
    script = Path(__file__).with_name("peer_geometry.py")
    command = [str(PYTHON), "-W", "ignore", str(script), "check", str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    return dict(json.loads(found.stdout))


@pytest.mark.peers
def test_spatialdata_opens_ours(tmp_path: Path) -> None:
    """spatialdata reads the points, circles and polygons that we wrote."""
    write_file(points(), tmp_path / "p.zarr", format="spatialdata", name="spots")
    seen = peer(tmp_path / "p.zarr")["spots"]
    assert seen["gene"][1:3] == ["A", "B"]
    assert np.allclose(np.array(seen["x"], float), points().positions[:, 0])
    write_file(polygons(), tmp_path / "s.zarr", format="spatialdata", name="cells")
    assert peer(tmp_path / "s.zarr")["cells"]["index"] == ["8", "1"]
    shutil.rmtree(tmp_path / "s.zarr")


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".ply", ".geojson"])
def test_vertices_of_no_object_are_told_as_left_out(tmp_path: Path, ending: str) -> None:
    """Files that separate objects hold no vertices of none, which is told, or refused on request."""
    shapes = Shapes("point_cloud", np.arange(15.0).reshape(5, 3), np.array([0, 2, 4]), np.array([4, 7]))
    file = tmp_path / f"a{ending}"
    with pytest.raises(SourceError, match="1 of no object"):
        write_file(shapes, file, strict=True)
    assert write_file(shapes, file) == ["vertices: 1 of no object are left out"]
    found = read_file(file).shapes
    assert np.asarray(found.ids).tolist() == [4, 7]
    assert np.array_equal(found.positions, shapes.positions[:4])
