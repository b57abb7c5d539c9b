"""Tables of points: CSV, TSV, Parquet."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as papq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp

from raggedatlas.errors import SourceError, ValuesError
from raggedatlas.wings.vectors.converters.content import Content, decode_categories, table_content
from raggedatlas.wings.vectors.converters.convert import read_file, write_file
from raggedatlas.wings.vectors.geometry import Axis
from raggedatlas.wings.vectors.points import read_points
from raggedatlas.wings.vectors.shapes import Attribute, Shapes


def frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "x": [0.5, 1.25, -3.0, 8.0],
            "y": [1.0, 2.0, 3.0, 4.0],
            "gene": ["ACTB", "CD3E", "ACTB", "MS4A1"],
            "quality": np.array([10, 20, 30, 255], np.int64),
            "seen": [True, False, True, True],
            "object_id": [7, 2, 7, 2],
        }
    )


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".parquet"])
def test_tables_of_pandas_come_back(tmp_path: Path, ending: str) -> None:
    """A table that pandas wrote is read, written and read by pandas with the same values; objects are put together."""
    source, target = tmp_path / f"a{ending}", tmp_path / f"b{ending}"
    if ending == ".parquet":
        frame().to_parquet(source)
    else:
        frame().to_csv(source, index=False, sep="\t" if ending == ".tsv" else ",")
    content = read_file(source)
    assert np.asarray(content.shapes.ids).tolist() == [2, 7]
    assert content.shapes.vertex_counts.tolist() == [2, 2]
    assert content.shapes.vertex_attributes["gene"].metadata["categories"] == ["ACTB", "CD3E", "MS4A1"]
    assert write_file(content, target, strict=True) == []
    again = (
        pd.read_parquet(target) if ending == ".parquet" else pd.read_csv(target, sep="\t" if ending == ".tsv" else ",")
    )
    expected = frame().sort_values("object_id", kind="stable", ignore_index=True)
    assert again["gene"].tolist() == expected["gene"].tolist()
    for name in ("x", "y", "quality", "object_id"):
        assert np.array_equal(again[name].to_numpy(), expected[name].to_numpy()), name


def test_columns_can_be_named(tmp_path: Path) -> None:
    """Positions and objects are found by usual names, or by those that are given; names of cells become names of objects."""
    table = pd.DataFrame({"X_location": [1.0, 2], "y_LOCATION": [3.0, 4], "cell": ["b", "a"], "u": [5.0, 6]})
    table.to_csv(tmp_path / "a.csv", index=False)
    assert read_file(tmp_path / "a.csv").shapes.positions.tolist() == [[1, 3], [2, 4]]
    made = read_file(tmp_path / "a.csv", axes=["u", "X_location"], objects="cell").shapes
    assert made.object_attributes["name"].values.tolist() == ["a", "b"]
    assert made.positions.tolist() == [[6, 2], [5, 1]]
    with pytest.raises(SourceError, match="no column 'z'"):
        read_file(tmp_path / "a.csv", axes=["u", "z"])
    with pytest.raises(SourceError, match="no column 'whose' of objects"):
        read_file(tmp_path / "a.csv", objects="whose")
    with pytest.raises(SourceError, match="mean nothing for csv; it takes axes, objects"):
        read_file(tmp_path / "a.csv", columns=["x"])


@pytest.mark.parametrize(
    ("file", "format"), [("a.CSV", None), ("a.Tsv", None), ("a.PARQUET", None), ("a.txt", "csv"), ("a.dat", "parquet")]
)
def test_the_format_is_that_of_the_name_whatever_the_ending(tmp_path: Path, file: str, format: str | None) -> None:
    """An ending in capitals is that ending, and a file of another ending is written and read in the format that is named."""
    points = Shapes("point_cloud", np.array([[0.5, 2.0]]), vertex_attributes={"v": np.array([3])})
    write_file(points, tmp_path / file, format=format)
    made = read_file(tmp_path / file, format=format).shapes
    assert (made.positions.tolist(), made.vertex_attributes["v"].values.tolist()) == ([[0.5, 2.0]], [3])


USUAL = ["x", "Y", "x_location", "y_LOCATION", "Global_X", "global_y", "x_global_px", "y_global_px", "z"]


@given(st.sets(st.sampled_from(USUAL)), st.sampled_from([("x", "y"), ("X", "Y"), ("x_location", "y_location")]))
def test_no_attribute_takes_the_place_of_positions(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], axes: tuple[str, ...]
) -> None:
    """Attributes whose columns would be, or be found as, positions are left out and told; positions come back as they were."""
    path = tmp_path_factory.mktemp("points") / "a.parquet"
    values = {name: np.array([-1.0, -2.0]) for name in names}
    points = Shapes("point_cloud", np.array([[1.0, 2.0], [3.0, 4.0]]), vertex_attributes=values)
    losses = write_file(Content(points, axes=tuple(Axis(axis) for axis in axes)), path)
    made = read_file(path).shapes
    assert made.positions.tolist() == points.positions.tolist()
    left = {name for name in names if any(f"attribute {name!r} is left out" in loss for loss in losses)}
    assert len(losses) == len(left)
    assert {*made.vertex_attributes} == names - left
    assert np.array_equal(read_points(path).positions, made.positions)


def test_the_place_in_the_slide_goes_before_that_in_a_field_of_view(tmp_path: Path) -> None:
    """MERSCOPE tells both; every reader takes the place in the slide, whatever the order and the case of the columns."""
    table = pa.table({"x": [1.0], "y": [2.0], "Global_y": [20.0], "global_X": [10.0]})
    papq.write_table(table, tmp_path / "a.parquet")
    for made in (read_points(tmp_path / "a.parquet"), read_file(tmp_path / "a.parquet").shapes):
        assert made.positions.tolist() == [[10, 20]]
        assert {name: a.values.tolist() for name, a in made.vertex_attributes.items()} == {"x": [1], "y": [2]}


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """An unknown ending, bytes that are no Parquet and text that is none are refused by name."""
    (tmp_path / "a.docx").write_text("x")
    with pytest.raises(SourceError, match=r"a\.docx is in no known format .*\.csv, .*spatialdata"):
        read_file(tmp_path / "a.docx")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(SourceError, match="no Parquet"):
        read_file(tmp_path / "a.parquet")
    points = Shapes("point_cloud", np.zeros((1, 2)))
    with pytest.raises(SourceError, match=r"ending '\.docx'"):
        write_file(points, tmp_path / "b.docx")
    with pytest.raises(SourceError, match="no format 'docx'"):
        write_file(points, tmp_path / "b.docx", format="docx")
    with pytest.raises(SourceError, match="vertex 0 is at"):
        write_file(Shapes("point_cloud", np.full((1, 2), np.nan)), tmp_path / "b.csv")


def test_a_vertex_of_no_object_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    """Vertices behind the last object belong to none; the message names the vertex alone."""
    shapes = Shapes("point_cloud", np.array([[0, 0], [np.nan, 0]]), np.array([0, 1]), np.array([7]))
    with pytest.raises(ValuesError, match="vertex 1 is at"):
        write_file(shapes, tmp_path / "a.csv")


def test_what_tables_do_not_hold_is_told(tmp_path: Path) -> None:
    """Links and attributes of objects are lost by name; several channels become several columns."""
    mesh = Shapes(
        "mesh", np.eye(3), links=np.array([[0, 1, 2]]), vertex_attributes={"rgb": np.zeros((3, 3))},
        object_attributes={"name": np.array(["a"])},
    )  # fmt: skip
    expected = [
        "links: 1 are left out",
        "object attribute 'name' is left out",
        "vertex attribute 'rgb' becomes 3 columns",
    ]
    assert write_file(mesh, tmp_path / "a.csv") == expected
    assert list(pd.read_csv(tmp_path / "a.csv")) == ["x", "y", "z", "object_id", "rgb.0", "rgb.1", "rgb.2"]


def test_missing_texts_stay_missing(tmp_path: Path) -> None:
    """A text that is missing is no text of its own; dictionary columns of Arrow are read as what they stand for."""
    table = pa.table({"x": [1.0, 2], "y": [1.0, 2], "t": pa.array(["a", None]).dictionary_encode()})
    papq.write_table(table, tmp_path / "a.parquet")
    made = read_file(tmp_path / "a.parquet").shapes.vertex_attributes["t"]
    assert decode_categories(made).tolist() == ["a", None]
    write_file(read_file(tmp_path / "a.parquet"), tmp_path / "b.parquet")
    assert papq.read_table(tmp_path / "b.parquet")["t"].to_pylist() == ["a", None]


def test_categories_stay_as_they_are(tmp_path: Path) -> None:
    """A dictionary column keeps its categories in their order, those of no row included; twofold ones and numbers are sorted texts."""
    genes = pa.DictionaryArray.from_arrays(pa.array([2, None, 0], pa.int16()), ["MS4A1", "CD3E", "ACTB"], ordered=True)
    twice = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int8()), ["b", "b", "a"])
    numbers = pa.DictionaryArray.from_arrays(pa.array([0, 1, 1], pa.int8()), pa.array([7, 5]))
    table = pa.table({"x": [1.0, 2, 3], "y": [1.0, 2, 3], "gene": genes, "twice": twice, "number": numbers})
    made = table_content(table, "a table").shapes.vertex_attributes
    assert made["gene"].metadata["categories"] == ["MS4A1", "CD3E", "ACTB"]
    assert (made["gene"].values.tolist(), made["gene"].metadata["ordered"]) == ([2, -1, 0], True)
    assert (made["twice"].metadata["categories"], decode_categories(made["twice"]).tolist()) == (
        ["a", "b"],
        ["b", "b", "a"],
    )
    assert (made["number"].metadata["categories"], decode_categories(made["number"]).tolist()) == (
        ["5", "7"],
        ["7", "5", "5"],
    )
    papq.write_table(table.select(["x", "y", "gene"]), tmp_path / "a.parquet")
    read = read_file(tmp_path / "a.parquet").shapes.vertex_attributes["gene"]
    assert (read.metadata["categories"], read.values.tolist()) == (["MS4A1", "CD3E", "ACTB"], [2, -1, 0])
    write_file(read_file(tmp_path / "a.parquet"), tmp_path / "b.parquet")
    again = read_file(tmp_path / "b.parquet").shapes.vertex_attributes["gene"]
    assert (again.metadata, again.values.tolist()) == (read.metadata, read.values.tolist())
    write_file(read_file(tmp_path / "a.parquet"), tmp_path / "b.csv")
    bare = {"t": Attribute(np.array([-1, -1]), metadata={"categories": []})}
    write_file(Shapes("point_cloud", np.zeros((2, 2)), vertex_attributes=bare), tmp_path / "c.parquet")
    assert papq.read_table(tmp_path / "c.parquet")["t"].to_pylist() == [None, None]
    assert decode_categories(read_file(tmp_path / "c.parquet").shapes.vertex_attributes["t"]).tolist() == [None, None]
    assert pd.read_csv(tmp_path / "b.csv")["gene"].fillna("none").tolist() == ["ACTB", "none", "MS4A1"]
    parts = pa.chunked_array([genes.slice(0, 1), pa.array(["LYZ"]).dictionary_encode().cast(genes.type)])
    joined = table_content(pa.table({"x": [1.0, 2], "y": [1.0, 2], "gene": parts}), "a table").shapes
    assert joined.vertex_attributes["gene"].metadata["categories"] == ["MS4A1", "CD3E", "ACTB", "LYZ"]
    assert decode_categories(joined.vertex_attributes["gene"]).tolist() == ["ACTB", "LYZ"]
    empty = table_content(table.slice(0, 0), "a table").shapes.vertex_attributes["gene"]
    assert (len(empty.values), empty.metadata["categories"]) == (0, ["MS4A1", "CD3E", "ACTB"])


@given(
    stnp.arrays(np.float32, st.tuples(st.integers(1, 9), st.just(3)), elements=st.floats(-1e6, 1e6, width=32)),
    st.sampled_from([".csv", ".ply", ".parquet"]),
)
def test_positions_come_back_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, positions: np.ndarray, ending: str
) -> None:
    """Text or bytes, a position that was written is read as the same number."""
    path = tmp_path_factory.mktemp("points") / f"a{ending}"
    write_file(
        Shapes("point_cloud", positions, vertex_attributes={"v": Attribute(positions[:, 0].astype(np.float64))}), path
    )
    again = read_file(path).shapes
    assert np.array_equal(again.positions.astype(np.float32), positions)
    assert np.array_equal(again.vertex_attributes["v"].values, positions[:, 0])
