"""GeoJSON, GeoParquet and SpatialData, against shapely, geopandas and files that spatialdata wrote."""

import json
from pathlib import Path
from typing import Any

import geopandas as gpd
import numpy as np
import pandas as pd
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.errors import SourceError
from raggedatlas.wings.vectors.converters.content import Content, decode_categories
from raggedatlas.wings.vectors.converters.convert import Conversion, convert, detect, read_file, write_file
from raggedatlas.wings.vectors.converters.geospatial import plain_column, shapes_of_geometries
from raggedatlas.wings.vectors.converters.interop import shapely_geometries, to_geopandas
from raggedatlas.wings.vectors.shapes import Attribute, Shapes, take_objects

SQUARE = shapely.Polygon([(0, 0), (2, 0), (2, 2), (0, 0)])
HOLED = shapely.Polygon([(0, 0), (9, 0), (9, 9), (0, 9)], [[(1, 1), (2, 1), (2, 2)], [(4, 4), (5, 4), (5, 5), (4, 5)]])
SEVERAL = shapely.MultiPolygon([shapely.Polygon([(20, 0), (22, 0), (22, 2)]), HOLED])


def frame(*geometries: shapely.Geometry) -> gpd.GeoDataFrame:
    n = len(geometries)
    columns = {"area": np.arange(n) + 0.5, "label": [f"cell {k}" for k in range(n)], "n": np.arange(n, dtype=np.int32)}
    return gpd.GeoDataFrame(columns, geometry=list(geometries), crs="EPSG:3857")


@pytest.mark.parametrize("geometries", [(SQUARE, SQUARE), (SQUARE, HOLED), (SEVERAL, SQUARE, HOLED)])
@pytest.mark.parametrize("ending", [".geojson", ".geoparquet", ".parquet"])
def test_polygons_of_geopandas_come_back(tmp_path: Path, geometries: tuple[shapely.Geometry, ...], ending: str) -> None:
    """Polygons that geopandas wrote, also with holes and of several parts, are read, written and read by geopandas the same."""
    given_frame = frame(*geometries)
    source = tmp_path / f"a{ending}"
    if ending == ".geojson":
        given_frame.to_file(source, driver="GeoJSON")
    else:
        given_frame.to_parquet(source)
    content = read_file(source)
    assert content.shapes.n_objects == len(geometries)
    target = tmp_path / "b.geojson" if ending == ".geojson" else tmp_path / "b.geoparquet"
    assert write_file(content, target, strict=True) == []
    again = gpd.read_file(target) if ending == ".geojson" else gpd.read_parquet(target)
    assert again.crs == given_frame.crs
    assert again.geometry.geom_equals(given_frame.geometry).all()
    assert again["label"].tolist() == given_frame["label"].tolist()
    assert again["area"].tolist() == given_frame["area"].tolist()
    assert again["n"].tolist() == given_frame["n"].tolist()


@pytest.mark.parametrize("geometries", [(SQUARE, SQUARE), (SQUARE, HOLED), (shapely.LineString([(0, 0), (1, 2)]),)])
def test_outlines_written_to_parquet_stay_outlines(tmp_path: Path, geometries: tuple[shapely.Geometry, ...]) -> None:
    """Polygons and lines given the ending .parquet become GeoParquet, which geopandas reads equal; a table is had by its name."""
    frame(*geometries).to_file(tmp_path / "a.geojson", driver="GeoJSON")
    content = read_file(tmp_path / "a.geojson")
    assert write_file(content, tmp_path / "b.parquet", strict=True) == []
    again = gpd.read_parquet(tmp_path / "b.parquet")
    assert again.crs == "EPSG:3857"
    assert all(one.equals(other) for one, other in zip(again.geometry, geometries, strict=True))
    assert detect(tmp_path / "b.parquet") == "geoparquet"
    write_file(content, tmp_path / "c.parquet", format="parquet")
    assert detect(tmp_path / "c.parquet") == "parquet"


def test_simple_polygons_are_closed_lines_and_others_circles_of_links() -> None:
    """One ring each: polylines; with holes: a graph whose every vertex has two links and whose rings are its circles."""
    simple = shapes_of_geometries(np.array([SQUARE, SQUARE]), {}, "x")
    assert simple.kind == "polyline"
    assert np.array_equal(simple.positions[simple.offsets[:-1]], simple.positions[simple.offsets[1:] - 1])
    shapes = shapes_of_geometries(np.array([SEVERAL, SQUARE]), {}, "x")
    assert shapes.kind == "graph"
    assert (np.bincount(np.asarray(shapes.links).ravel()) == 2).all()
    assert shapes.vertex_attributes["ring"].values.tolist() == [0] * 3 + [0] * 4 + [1] * 3 + [2] * 4 + [0] * 3
    assert shapes.vertex_attributes["part"].values.tolist() == [0] * 3 + [1] * 11 + [0] * 3


@given(st.permutations(range(17)))
def test_rings_do_not_need_an_order(order: list[int]) -> None:
    """Vertices that come from chunks in another order make the same polygons."""
    shapes = shapes_of_geometries(np.array([SEVERAL, SQUARE]), {}, "x")
    rows = np.array(order)
    rows = np.concatenate([rows[rows < 14], rows[rows >= 14]])
    turned = Shapes(
        "graph", shapes.positions[rows], shapes.offsets, links=np.argsort(rows)[shapes.links],
        vertex_attributes={name: a.take(rows) for name, a in shapes.vertex_attributes.items()},
    )  # fmt: skip
    assert [a.equals_exact(b) for a, b in zip(shapely_geometries(turned), [SEVERAL, SQUARE], strict=True)] == [
        True,
        True,
    ]
    assert shapely_geometries(take_objects(turned, np.array([1])))[0].equals_exact(SQUARE)


def test_lines_points_and_third_axes_come_back(tmp_path: Path) -> None:
    """Lines become polylines, points a cloud with values at its points, many points an object; z stays."""
    lines = gpd.GeoDataFrame(
        {"k": [1, 2]}, geometry=[shapely.LineString([(0, 0, 1), (1, 1, 2)]), shapely.LineString([(5, 5, 5), (6, 6, 6)])]
    )
    lines.to_parquet(tmp_path / "l.geoparquet")
    shapes = read_file(tmp_path / "l.geoparquet").shapes
    assert (shapes.kind, shapes.n_dims, shapes.object_attributes["k"].values.tolist()) == ("polyline", 3, [1, 2])
    assert to_geopandas(shapes).geometry.tolist() == lines.geometry.tolist()
    points = gpd.GeoDataFrame({"t": ["a", None]}, geometry=[shapely.Point(0, 1), shapely.Point(2, 3)])
    points.to_parquet(tmp_path / "p.geoparquet")
    cloud = read_file(tmp_path / "p.geoparquet").shapes
    assert cloud.ids is None
    assert decode_categories(cloud.vertex_attributes["t"]).tolist() == ["a", None]
    write_file(cloud, tmp_path / "q.geoparquet")
    assert gpd.read_parquet(tmp_path / "q.geoparquet").geometry.tolist() == points.geometry.tolist()
    many = shapes_of_geometries(np.array([shapely.MultiPoint([(0, 0), (1, 1)]), shapely.Point(5, 5)], object), {}, "x")
    assert many.vertex_counts.tolist() == [2, 1]


def test_missing_values_and_ids_of_features_stay(tmp_path: Path) -> None:
    """Ids come from object_id, a missing number or text has no value and is null again; lists and ids of features come back."""
    features = [
        {"type": "Feature", "id": "u", "properties": {"object_id": 7, "n": 3, "t": None, "l": [1, 2]}, "geometry": shapely.geometry.mapping(SQUARE)},
        {"type": "Feature", "properties": {"object_id": 4, "n": None, "t": "x"}, "geometry": shapely.geometry.mapping(SQUARE)},
    ]  # fmt: skip
    (tmp_path / "a.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    shapes = read_file(tmp_path / "a.geojson").shapes
    assert np.asarray(shapes.ids).tolist() == [7, 4]
    assert shapes.object_attributes["n"].present is not None
    convert(tmp_path / "a.geojson", tmp_path / "b.geojson")
    again = json.loads((tmp_path / "b.geojson").read_text())["features"]
    assert again[0]["properties"] == {"object_id": 7, "n": 3, "t": None, "l": [1, 2]}
    assert again[1]["properties"] == {"object_id": 4, "n": None, "t": "x", "l": None}
    assert [feature.get("id") for feature in again] == ["u", None]


def test_cells_of_qupath_come_back(tmp_path: Path) -> None:
    """Ids of features, truth values and objects stay what they are, through a store too; what is not read is listed."""
    outline = shapely.geometry.mapping(SQUARE)
    own = {"classification": {"name": "Tumor", "color": [1, 2, 3]}, "isLocked": False, "name": "n"}
    features = [
        {"type": "Feature", "id": f"fd0c-{i}", "geometry": outline, "nucleusGeometry": outline, "properties": own}
        for i in range(3)
    ]
    (tmp_path / "a.geojson").write_text(json.dumps(features))
    assert convert(tmp_path / "a.geojson", tmp_path / "a.zv") == ["'nucleusGeometry' of 3 features is left out"]
    convert(tmp_path / "a.zv", tmp_path / "b.geojson")
    again = json.loads((tmp_path / "b.geojson").read_text())["features"]
    assert [feature["id"] for feature in again] == [feature["id"] for feature in features]
    assert all(feature["properties"] == own for feature in again)


def test_geometries_beside_others_are_listed(tmp_path: Path) -> None:
    """A second column of geometries, and members of a collection that are not read, are no attributes and are told."""
    frame = gpd.GeoDataFrame({"nucleus": gpd.GeoSeries([SQUARE] * 2), "n": [1, 2]}, geometry=[SQUARE] * 2)
    frame.to_parquet(tmp_path / "a.geoparquet")
    content = read_file(tmp_path / "a.geoparquet")
    assert content.left == ("geometries 'nucleus' are left out, beside 'geometry'",)
    assert [*content.shapes.object_attributes] == ["n"]
    document = {**json.loads(frame[["n", "geometry"]].to_json()), "bbox": [0, 0, 1, 1], "slide": "s1"}
    (tmp_path / "a.geojson").write_text(json.dumps(document))
    assert read_file(tmp_path / "a.geojson").left == ("'slide' of the collection is left out",)


COLUMNS: dict[str, tuple[Any, list[Any]]] = {
    "Int64 with a gap": (pd.array([1, None, 3], "Int64"), [1, None, 3]),
    "Int64": (pd.array([2**60 + 1, 2, 3], "Int64"), [2**60 + 1, 2, 3]),
    "boolean with a gap": (pd.array([True, None, False], "boolean"), [True, None, False]),
    "category": (pd.Categorical(["x", None, "y"]), ["x", None, "y"]),
    "date": (pd.to_datetime(["2020-01-01", None, "2021-01-01"]), ["2020-01-01T00:00:00", None, "2021-01-01T00:00:00"]),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_nullable_columns_are_read(tmp_path: Path, kind: str) -> None:
    """Nullable columns of pandas keep their values and what is missing; dates are texts of ISO 8601."""
    values, expected = COLUMNS[kind]
    gpd.GeoDataFrame({"v": values}, geometry=[SQUARE] * 3).to_parquet(tmp_path / "a.geoparquet")
    column = plain_column(read_file(tmp_path / "a.geoparquet").shapes.object_attributes["v"])
    assert column.tolist() == expected


INDEXES = {
    "named texts": pd.Index(["aaaa-1", "bbbb-1"], name="cell_id"),
    "texts": pd.Index(["aaaa-1", "bbbb-1"]),
    "numbers": pd.Index([9, 4]),
    "named numbers": pd.Index([0, 1], name="cell"),
}


@pytest.mark.parametrize("ending", ["b.geoparquet", "b.zarr"])
@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("circles", [False, True])
def test_the_index_of_cells_comes_back(tmp_path: Path, index: str, ending: str, circles: bool) -> None:
    """The index by which tables name cells is written as it was read, and can be linked with by its name."""
    drawn = [shapely.Point(1, 2), shapely.Point(3, 4)] if circles else [SQUARE, SQUARE]
    columns = {"name": ["u", "v"]} | ({"radius": [1.0, 2.0]} if circles else {})
    table = gpd.GeoDataFrame(columns, geometry=drawn, index=INDEXES[index])
    element = tmp_path / "a.zarr" / "shapes" / "cells"
    write_file(
        shapes_of_geometries(np.array([SQUARE]), {}, "x"), tmp_path / "a.zarr", format="spatialdata", name="cells"
    )
    table.to_parquet(element / "shapes.parquet")
    content = read_file(tmp_path / "a.zarr")
    if index == "named texts":
        assert decode_categories(content.shapes.object_attributes["cell_id"]).tolist() == ["aaaa-1", "bbbb-1"]
    index_name = "name_2" if index == "texts" else INDEXES[index].name
    losses = write_file(content, tmp_path / ending, format="spatialdata" if ending == "b.zarr" else None)
    written = tmp_path / ending if ending != "b.zarr" else tmp_path / ending / "shapes" / "elements" / "shapes.parquet"
    again = gpd.read_parquet(written)
    assert (again.index.tolist(), again.index.name) == (table.index.tolist(), index_name)
    assert again["name"].tolist() == ["u", "v"]
    assert losses == ([] if ending == "b.zarr" or not circles else ["vertex attribute 'radius' is left out"])


@pytest.mark.parametrize(
    ("transform", "factor"),
    [
        ({"type": "scale", "scale": [0.5, 0.5]}, 0.5),
        ({"type": "affine", "affine": [[0, -2, 5], [2, 0, 1]]}, 2),
        ({"type": "scale", "scale": [2, 5]}, None),
        ({"type": "affine", "affine": [[1, 1, 0], [0, 1, 0]]}, None),
    ],
)
def test_radii_of_circles_move_with_them(tmp_path: Path, transform: dict[str, Any], factor: float | None) -> None:
    """Radii are scaled with their centres; what makes ellipses of circles is refused."""
    circles = Shapes(
        "point_cloud", np.array([[1.0, 2], [3, 4]]), np.arange(3), vertex_attributes={"radius": np.array([27.5, 10])}
    )
    write_file(circles, tmp_path / "a.zarr", format="spatialdata")
    node = tmp_path / "a.zarr" / "shapes" / "elements" / "zarr.json"
    attributes = json.loads(node.read_text())
    (old,) = attributes["attributes"]["coordinateTransformations"]
    attributes["attributes"]["coordinateTransformations"] = [{**old, **transform}]
    node.write_text(json.dumps(attributes))
    if factor is None:
        with pytest.raises(SourceError, match="makes ellipses"):
            read_file(tmp_path / "a.zarr")
    else:
        moved = read_file(tmp_path / "a.zarr").shapes.vertex_attributes["radius"].values
        assert np.allclose(moved, [27.5 * factor, 10 * factor])


@pytest.mark.parametrize("store", ["new.zarr", "old.zarr", "oldest.zarr"])
def test_spatialdata_is_read(peers: Path, store: str) -> None:
    """Points, circles and polygons of three generations of spatialdata, moved into the asked coordinate system."""
    path = peers / store
    assert detect(path) == "spatialdata"
    points = read_file(path, element="points/transcripts")
    assert points.shapes.positions.tolist() == [[2, 15], [4, 18], [7, 21], [8, 24]]
    assert decode_categories(points.shapes.vertex_attributes["gene"]).tolist() == ["A", "B", "A", "C"]
    assert points.metadata["spatialdata"] == {"feature_key": "gene", "instance_key": "cell_id"}
    assert read_file(path, element="points/transcripts", system="px").shapes.positions[0].tolist() == [1, 5]
    owned = read_file(path, element="points/transcripts", objects="cell_id").shapes
    assert np.asarray(owned.ids).tolist() == [3, 9]
    spots = read_file(path / "shapes" / "spots").shapes
    assert (np.asarray(spots.ids).tolist(), spots.vertex_attributes["radius"].values.tolist()) == ([4, 7], [0.5, 1.5])
    cells = read_file(path, element="shapes/cells").shapes
    drawn = shapely_geometries(cells)
    assert drawn[0].equals(shapely.Polygon([(1, 2), (1, 4), (3, 4)]))
    assert (drawn[1].area, len(drawn[1].interiors)) == (15.5, 1)
    if store == "oldest.zarr":
        assert np.asarray(cells.ids).tolist() == [3, 9]
    else:
        assert cells.object_attributes["name"].values.tolist() == ["c3", "c9"]
        assert cells.object_attributes["area"].values.tolist() == [3, 15]


def test_points_without_named_axes_are_read(tmp_path: Path) -> None:
    """Stores of the first format may say null for the axes of points; the columns then are the usual ones."""
    write_file(Shapes("point_cloud", np.array([[0.5, 1]])), tmp_path / "a.zarr", format="spatialdata")
    node = tmp_path / "a.zarr" / "points" / "elements" / "zarr.json"
    said = json.loads(node.read_text())
    for axes in (None, []):
        said["attributes"]["axes"] = axes
        node.write_text(json.dumps(said))
        assert read_file(tmp_path / "a.zarr").shapes.positions.tolist() == [[0.5, 1]]


@pytest.mark.parametrize("ending", [".geojson", ".geoparquet"])
def test_missing_numbers_stay_missing(tmp_path: Path, ending: str) -> None:
    """A number that an object does not have is written as none, whatever fills its place, and GeoJSON is valid JSON."""
    columns = {
        "a": Attribute(np.array([1.5, -7.0]), present=np.array([True, False])),
        "b": Attribute(np.array([np.nan, 2.5], np.float32)),
    }
    shapes = shapes_of_geometries(np.array([SQUARE, SQUARE]), columns, "x")
    write_file(shapes, tmp_path / f"a{ending}", strict=True)
    again = read_file(tmp_path / f"a{ending}").shapes.object_attributes
    assert np.array_equal(again["a"].values, [1.5, np.nan], equal_nan=True)
    assert np.array_equal(again["b"].values, [np.nan, 2.5], equal_nan=True)
    if ending == ".geojson":
        assert "NaN" not in (tmp_path / "a.geojson").read_text()
        far = shapes_of_geometries(np.array([SQUARE]), {"a": Attribute(np.array([np.inf]))}, "x")
        with pytest.raises(SourceError, match="infinite"):
            write_file(far, tmp_path / "b.geojson")


def test_what_is_no_element_is_refused(peers: Path, tmp_path: Path) -> None:
    """Several elements ask for a choice; an unknown one, an unknown coordinate system and transformation are refused."""
    for options, said in (
        ({}, "3 elements of points and shapes; choose one: element= of points/transcripts, shapes/cells"),
        ({"element": "shapes/nuclei"}, "no element 'shapes/nuclei'"),
        ({"element": "shapes/cells", "system": "moon"}, "not in the coordinate system 'moon'; it is in global"),
    ):
        with pytest.raises(SourceError) as caught:
            read_file(peers / "new.zarr", **options)
        assert said in str(caught.value)
    write_file(Shapes("point_cloud", np.zeros((1, 2))), tmp_path / "a.zarr", format="spatialdata")
    node = tmp_path / "a.zarr" / "points" / "elements" / "zarr.json"
    node.write_text(node.read_text().replace('"identity"', '"mapAxis"'))
    with pytest.raises(SourceError, match="transformation 'mapAxis'"):
        read_file(tmp_path / "a.zarr")
    (tmp_path / "a.zarr" / "points" / "elements" / "points.parquet" / "part.0.parquet").write_bytes(b"PAR1")
    with pytest.raises(SourceError, match=r"points\.parquet is no Parquet"):
        read_file(tmp_path / "a.zarr")


@pytest.mark.parametrize(
    "said",
    [
        {"type": "scale"},
        {"type": "scale", "scale": [2]},
        {"type": "translation", "translation": ["far", 0]},
        {"type": "affine", "affine": [[1, 0, 0]]},
        {"type": "sequence", "transformations": [5]},
        {"type": "identity", "input": {"axes": [{"name": "y"}]}},
        "identity",
    ],
)
def test_a_broken_transformation_is_refused(tmp_path: Path, said: object) -> None:
    """Numbers and axes that are missing, or no numbers, are refused with the folder of the element."""
    write_file(Shapes("point_cloud", np.zeros((1, 2))), tmp_path / "a.zarr", format="spatialdata")
    node = tmp_path / "a.zarr" / "points" / "elements" / "zarr.json"
    attributes = json.loads(node.read_text())
    attributes["attributes"]["coordinateTransformations"] = [said]
    node.write_text(json.dumps(attributes))
    with pytest.raises(SourceError, match="elements"):
        read_file(tmp_path / "a.zarr")


def test_rings_are_read_as_closed_lines(tmp_path: Path) -> None:
    """A LinearRing, which shapely takes from GeoJSON, is a line that ends where it begins, also among other lines."""
    ring, line = [[0, 0], [2, 0], [2, 2], [0, 0]], [[5, 5], [6, 6]]
    drawn = [{"type": "LinearRing", "coordinates": ring}, {"type": "LineString", "coordinates": line}]
    features = [{"type": "Feature", "properties": {}, "geometry": geometry} for geometry in drawn]
    (tmp_path / "a.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    shapes = read_file(tmp_path / "a.geojson").shapes
    assert (shapes.kind, shapes.positions.tolist()) == ("polyline", [*ring, *line])


def test_spatialdata_comes_back(tmp_path: Path) -> None:
    """Points, circles and polygons that we wrote are read as they were; lines are refused."""
    points = Shapes(
        "point_cloud", np.array([[0.5, 1], [2, 3]]), vertex_attributes={"gene": Attribute(np.array([0, 1]), metadata={"categories": ["A", "B"]})}
    )  # fmt: skip
    said = {"spatialdata": {"feature_key": "gene"}}
    assert write_file(Content(points, said), tmp_path / "p.zarr", format="spatialdata", strict=True) == []
    again = read_file(tmp_path / "p.zarr")
    assert again.metadata == said
    assert decode_categories(again.shapes.vertex_attributes["gene"]).tolist() == ["A", "B"]
    circles = Shapes(
        "point_cloud",
        np.array([[0.5, 1], [2, 3]]),
        np.arange(3),
        np.array([4, 9]),
        vertex_attributes={"radius": np.array([1.0, 2])},
    )
    write_file(circles, tmp_path / "c.zarr", format="spatialdata", strict=True)
    back = read_file(tmp_path / "c.zarr").shapes
    assert (np.asarray(back.ids).tolist(), back.vertex_attributes["radius"].values.tolist()) == ([4, 9], [1, 2])
    polygons = shapes_of_geometries(np.array([SQUARE, HOLED]), {"area": Attribute(np.array([1.0, 2]))}, "x")
    write_file(polygons, tmp_path / "s.zarr", format="spatialdata", strict=True, name="cells")
    cells = read_file(tmp_path / "s.zarr").shapes
    assert shapely_geometries(cells)[1].equals_exact(HOLED)
    assert cells.object_attributes["area"].values.tolist() == [1, 2]
    with pytest.raises(SourceError, match="circles and polygons"):
        write_file(Shapes("polyline", np.zeros((2, 2))), tmp_path / "l.zarr", format="spatialdata")
    assert not (tmp_path / "l.zarr").exists()


def test_a_table_for_people(tmp_path: Path) -> None:
    """A GeoDataFrame has ids as index and attributes as columns; meshes make none."""
    shapes = shapes_of_geometries(
        np.array([SQUARE, HOLED]), {"object_id": Attribute(np.array([9, 3])), "t": Attribute(np.array(["a", "b"]))}, "x"
    )
    table = to_geopandas(shapes, crs="EPSG:3857")
    assert isinstance(table, pd.DataFrame)
    assert (table.index.tolist(), table["t"].tolist()) == ([9, 3], ["a", "b"])
    with pytest.raises(SourceError, match="A mesh of 3 axes"):
        to_geopandas(Shapes("mesh", np.eye(3), links=np.array([[0, 1, 2]])))


def test_lines_of_several_parts_are_graphs(tmp_path: Path) -> None:
    """Parts that meet share a vertex, within an object only; lines beside them are parts of one."""
    parts = {"type": "MultiLineString", "coordinates": [[[0, 0], [1, 0], [2, 0]], [[1, 0], [1, 5]]]}
    line = {"type": "LineString", "coordinates": [[1, 0], [0, 9]]}
    (tmp_path / "a.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": [parts, line]}))
    shapes = read_file(tmp_path / "a.geojson").shapes
    assert (shapes.kind, shapes.vertex_counts.tolist(), shapes.link_offsets.tolist()) == ("graph", [4, 2], [0, 3, 4])
    ends = shapes.positions[shapes.links].tolist()
    assert ends == [[[0, 0], [1, 0]], [[1, 0], [2, 0]], [[1, 0], [1, 5]], [[1, 0], [0, 9]]]
    convert(tmp_path / "a.geojson", tmp_path / "a.zv")
    convert(tmp_path / "a.zv", tmp_path / "b.geoparquet", Conversion(strict=True))
    again = read_file(tmp_path / "b.geoparquet").shapes
    assert sorted(again.positions[again.links].tolist()) == sorted(ends)


def test_properties_of_spatialdata_are_no_ids_and_radii(tmp_path: Path) -> None:
    """An attribute with the name of ids or geometries is listed as lost, and does not replace them; polygons may have a radius."""
    own = {name: Attribute(np.array([5.0])) for name in ("object_id", "geometry", "radius")}
    outline = Shapes("polyline", shapely.get_coordinates(SQUARE), ids=np.array([7]), object_attributes=own)
    losses = write_file(outline, tmp_path / "a.zarr", format="spatialdata")
    assert [line.split("'")[1] for line in losses] == ["object_id", "geometry"]
    back = read_file(tmp_path / "a.zarr").shapes
    assert (back.kind, back.ids.tolist(), [*back.object_attributes]) == ("polyline", [7], ["radius"])
    # Objects of several points are no circles, whatever they have.
    cloud = Shapes("point_cloud", np.eye(2), np.array([0, 2]), np.array([7]), vertex_attributes={"radius": np.ones(2)})
    write_file(cloud, tmp_path / "b.zarr", format="spatialdata", strict=True)
    assert read_file(tmp_path / "b.zarr", objects="object_id").shapes.ids.tolist() == [7]
