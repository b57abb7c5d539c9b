"""Files that are broken are refused by name, with the line, row or feature; what a format cannot hold is listed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raggedatlas.errors import SourceError
from raggedatlas.wings.vectors.converters.convert import plan_losses, read_file, write_file
from raggedatlas.wings.vectors.shapes import Shapes

BROKEN: list[tuple[str, str | bytes, str]] = [
    ("a.csv", "x,y\n1,2\n1,2,3\n", "rows of one length"),
    ("a.csv", "x,y,x\n1,2,3\n", "several columns 'x'"),
    ("a.csv", "x,y\n1,\n", "no number in row 0"),
    ("a.csv", "x,y\n1,a\n", "'y' is string"),
    ("a.csv", "a,b\n1,2\n", "no columns x and y; it has a, b"),
    ("a.csv", "x,y\n1,nan\n", "no number in row 0"),
    ("a.csv", "x,y\n1,inf\n", "vertex 0 is at"),
    ("a.csv", "x,y,n\n1,2,3\n1,2,\n", "'n' has no value in row 1"),
    ("a.csv", "x,y,object_id\n1,2,3\n1,2,-1\n", "the id -1 in row 1"),
    ("a.csv", "x,y,object_id\n1,2,3\n1,2,\n", "names no object in row 1"),
    ("a.geojson", "[1", "no GeoJSON"),
    ("a.geojson", '{"type": "FeatureCollection"}', "no GeoJSON"),
    ("a.geojson", '{"type": "FeatureCollection", "features": null}', "no GeoJSON"),
    ("a.geojson", '{"type": "FeatureCollection", "features": 3}', "no GeoJSON"),
    ("a.geojson", '{"type": "FeatureCollection", "features": {"a": 1}}', "feature 0 has no geometry that can be read"),
    (
        "a.geojson",
        '{"type": "Feature", "geometry": {"type": "Point", "coordinates": [0, 0]}, "properties": ["a"]}',
        "no GeoJSON",
    ),
    (
        "a.geojson",
        '{"type": "Feature", "geometry": {"type": "Point", "coordinates": [0, 0]}, "properties": 3}',
        "no GeoJSON",
    ),
    (
        "a.geojson",
        '{"type": "FeatureCollection", "features": [{"type": "Feature", "geometry": null}]}',
        "feature 0 has no geometry",
    ),
    (
        "a.geojson",
        '{"type": "FeatureCollection", "features": [{"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [[[0, 0]]]}}]}',
        "feature 0 has no geometry that can be read",
    ),
    (
        "a.geojson",
        '{"type": "FeatureCollection", "features": [{"type": "Point", "coordinates": [0, 0]},'
        ' {"type": "LineString", "coordinates": [[0, 0], [1, 1]]}]}',
        "kinds LineString, Point",
    ),
    ("a.geojson", '{"type": "Point", "coordinates": [0, NaN]}', "vertex 0 is at"),
    ("a.obj", b"v 0 0 0\nv 1 0 0\nf 1 2 3\n", "no OBJ that can be read"),
    ("a.obj", b"v 0 0\nf 1 1 1\n", "vertices of 2 numbers"),
    ("a.obj", b"v 0 0 x\nf 1 1 1\n", "no OBJ"),
    ("a.obj", b"v 0 0 0\nv 1 0 0\nf 1 2\n", "line 3 is 'f 1 2'"),
    ("a.obj", b"v 0 0 0\nv 1 0 0\nv 0 1 0\nf -1 -2 -3\n", "line 4 is"),
    ("a.stl", b"\0" * 80 + b"\5\0\0\0" + b"\0" * 60, "cut off"),
    ("a.stl", b"solid a\nfacet normal 0 0 1\nouter loop\nvertex 0 0 0\nvertex 1 0 0\n", "ends inside"),
    ("a.stl", b"solid a\nfacet normal 0 0 1\nouter loop\nvertex 0 0\nendsolid\n", "no STL"),
    ("a.stl", b"solid a\nnonsense\n", "ends inside"),
    ("a.ply", b"plx\n", "no complete PLY"),
    (
        "a.ply",
        b"ply\nformat ascii 1.0\nelement vertex 1\nproperty float x\nend_header\n1\n",
        "no complete PLY",
    ),
    ("a.ply", b"ply\nformat ascii 1.0\nelement vertex 1\nproperty quad x\nend_header\n", "no complete PLY"),
    (
        "a.ply",
        b"ply\nformat ascii 1.0\nelement vertex 2\nproperty float x\nproperty float y\nproperty float z\nend_header\n0 0 0\n0 0\n",
        "a vertex is not as its header says",
    ),
    (
        "a.ply",
        b"ply\nformat binary_little_endian 1.0\nelement vertex 9\nproperty float x\nproperty float y\nproperty float z\n"
        b"end_header\n0000",
        "no complete PLY",
    ),
    (
        "a.ply",
        b"ply\nformat ascii 1.0\nelement vertex 1\nproperty float x\nproperty float y\nproperty float z\nelement face 1\n"
        b"property list uchar int vertex_indices\nend_header\n0 0 0\n3 0 0 9\n",
        "link 0 has the ends",
    ),
]


@pytest.mark.parametrize(("name", "data", "says"), BROKEN)
def test_a_broken_file_is_refused(tmp_path: Path, name: str, data: str | bytes, says: str) -> None:
    """Each way to be wrong is refused with the file and the line, row, face or feature."""
    (tmp_path / name).write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(SourceError, match=name.replace(".", r"\.")) as caught:
        read_file(tmp_path / name)
    assert says in str(caught.value)


def mesh(**changes: Any) -> Shapes:
    return Shapes("mesh", **{"positions": np.eye(3), "links": np.array([[0, 1, 2]]), **changes})


TWO = {
    "positions": np.eye(6, 3, dtype=np.float32),
    "offsets": np.array([0, 3, 6]),
    "ids": np.array([7, 2]),
    "links": np.array([[0, 1, 2], [3, 4, 5]]),
    "vertex_attributes": {"color": np.zeros((6, 3), np.uint8)},
}


@pytest.mark.parametrize(
    ("shapes", "name", "losses"),
    [
        (
            mesh(**TWO),
            "stl",
            [
                "objects: 2 are joined into one",
                "vertex attribute 'color' is left out",
                "vertices: those at one place become one",
            ],
        ),
        (mesh(positions=np.eye(3) / 3), "stl", ["rounded: positions, from float64 to 32 bits"]),
        (
            Shapes(
                "polyline",
                np.zeros((2, 2)),
                vertex_attributes={"t": np.zeros(2)},
                object_attributes={"rgb": np.zeros((1, 3))},
            ),
            "geojson",
            ["vertex attribute 't' is left out", "object attribute 'rgb' is left out: it has 3 channels"],
        ),
    ],
)
def test_what_a_format_does_not_hold_is_listed(tmp_path: Path, shapes: Shapes, name: str, losses: list[str]) -> None:
    """Joined objects, ids, attributes and rounded positions are losses; `strict` refuses all but rounding."""
    assert plan_losses(shapes, name) == losses
    if losses[0].startswith("rounded"):
        assert write_file(shapes, tmp_path / f"a.{name}", strict=True) == losses
        return
    with pytest.raises(SourceError, match="would not hold all"):
        write_file(shapes, tmp_path / f"a.{name}", strict=True)


def test_a_kind_that_a_format_does_not_hold_is_refused() -> None:
    """A format without meshes refuses a mesh by its name."""
    with pytest.raises(SourceError, match="geoparquet holds no mesh"):
        plan_losses(mesh(), "geoparquet")
