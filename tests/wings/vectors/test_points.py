"""Points read in parts, and sorted on disk, are those that are read and sorted in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import raggedatlas as ra
from raggedatlas.errors import ArgumentError, NotFoundError, SourceError, StoreError
from raggedatlas.store import runtime
from raggedatlas.wings.vectors import chunking, validate
from raggedatlas.wings.vectors.attachment import make_transcripts, transcripts_to_counts
from raggedatlas.wings.vectors.builder import ChunkingOptions, make_geometry
from raggedatlas.wings.vectors.geometry import Geometry
from raggedatlas.wings.vectors.points import append_points, read_points
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.shapes import Shapes
from raggedatlas.wings.vectors.writer import write

UNASSIGNED = "UNASSIGNED"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few points at once, and every scratch array in a file."""
    monkeypatch.setattr(chunking, "BLOCK_ROWS", 7)
    monkeypatch.setattr(runtime, "_SCRATCH_BYTES", 0)


def transcripts(n: int, seed: int = 0) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(seed)
    places = rng.uniform(0, 50, (n, 2)).astype(np.float32)
    genes = rng.choice(["ACTB", "CD3E", "MS4A1"], n)
    cells = rng.choice(["a", "b", "c", UNASSIGNED], n)
    return places, genes, cells


def table_of(places: NDArray[Any], genes: NDArray[Any], cells: NDArray[Any]) -> pa.Table:
    return pa.table({"x_location": places[:, 0], "y_location": places[:, 1], "gene": genes, "cell_id": cells})


def same_geometry(left: Geometry, right: Geometry) -> None:
    for one, other in zip(left.levels, right.levels, strict=True):
        assert np.array_equal(one.chunks, other.chunks)
        assert np.array_equal(one.bounds, other.bounds)
        assert np.array_equal(one.positions, other.positions)
        for name in ("bounds", "is_range", "starts", "counts", "rows"):
            assert np.array_equal(getattr(one.fragments, name), getattr(other.fragments, name)), name
        assert one.vertex_attributes.keys() == other.vertex_attributes.keys()
        for name, attribute in one.vertex_attributes.items():
            assert np.array_equal(attribute.values, other.vertex_attributes[name].values)
            assert attribute.metadata == other.vertex_attributes[name].metadata


@given(st.integers(0, 40), st.integers(0, 3), st.booleans(), st.sampled_from(["float32", "float64", "int32", "uint64"]))
def test_points_sorted_on_disk_are_those_sorted_in_memory(n: int, seed: int, bins: bool, dtype: str) -> None:
    places, genes, cells = transcripts(n, seed)
    shapes = make_transcripts(places.astype(dtype), genes, cells)
    grid = ChunkingOptions(chunk_shape=(20, 20), bin_shape=(10, 5) if bins else None)
    expected = make_geometry(shapes, grid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "BLOCK_ROWS", 7)
        patch.setattr(runtime, "_SCRATCH_BYTES", 0)
        same_geometry(make_geometry(shapes, grid), expected)
        if n and not bins:
            counted = transcripts_to_counts(shapes, unassigned=UNASSIGNED)
    if n and not bins:
        again = transcripts_to_counts(shapes, unassigned=UNASSIGNED)
        assert counted.obs_names.tolist() == again.obs_names.tolist()
        assert np.array_equal(counted.X.toarray(), again.X.toarray())
        assert np.allclose(counted.obsm["spatial"], again.obsm["spatial"])


@pytest.mark.usefixtures("small_blocks")
def test_parquet_is_read_like_the_same_points_in_memory(tmp_path: Path) -> None:
    given = transcripts(30)
    expected = make_transcripts(*given)
    folder = tmp_path / "points.parquet"
    folder.mkdir()
    # By name alone, the tenth part would come before the second.
    for part in range(11):
        rows = slice(3 * part, 3 * part + 3)
        if len(given[0][rows]):
            pq.write_table(table_of(*(values[rows] for values in given)), folder / f"part.{part}.parquet")
    pq.write_table(table_of(*given), tmp_path / "one.parquet")
    batches = table_of(*given).to_batches(4)
    for source in (folder, tmp_path / "one.parquet", table_of(*given), iter(batches)):
        found = read_points(source)
        assert np.array_equal(found.positions, expected.positions)
        for name, attribute in expected.vertex_attributes.items():
            assert np.array_equal(found.vertex_attributes[name].values, attribute.values), name
            assert found.vertex_attributes[name].metadata == attribute.metadata


@pytest.mark.usefixtures("small_blocks")
def test_types_and_missing_values(tmp_path: Path) -> None:
    table = pa.table(
        {
            "z": pa.array([1, 2], pa.int16()),
            "y": pa.array([0.5, 1.5], pa.float32()),
            "x": pa.array([0, 1], pa.float64()),
            "seen": pa.array([True, False]),
            "quality": pa.array([None, 4.0], pa.float32()),
            "gene": pa.array([b"B", None], pa.binary()),
            "kind": pa.array(["u", "t"]).dictionary_encode(),
            "id": pa.array([2**63, 1], pa.uint64()),
        }
    )
    table = table.replace_schema_metadata()
    pq.write_table(table, tmp_path / "a.parquet")
    found = read_points(tmp_path / "a.parquet")
    assert found.positions.dtype == np.float64
    assert found.positions.tolist() == [[0.0, 0.5, 1.0], [1.0, 1.5, 2.0]]
    values = {name: attribute.values for name, attribute in found.vertex_attributes.items()}
    assert values["seen"].tolist() == [1, 0]
    assert values["seen"].dtype == np.uint8
    assert np.isnan(values["quality"][0])
    assert values["gene"].tolist() == [0, -1]
    assert found.vertex_attributes["kind"].metadata["categories"] == ["t", "u"]
    assert values["kind"].tolist() == [1, 0]
    assert values["id"].tolist() == [2**63, 1]
    plane = read_points(table, positions=["x", "y"], columns=["gene"])
    assert plane.n_dims == 2
    assert list(plane.vertex_attributes) == ["gene"]


def test_row_numbers_of_pandas_are_left_out(tmp_path: Path) -> None:
    frame = table_of(*transcripts(5)).to_pandas()
    frame.index = frame.index[::-1].rename("number")
    frame.to_parquet(tmp_path / "a.parquet")
    assert "number" not in read_points(tmp_path / "a.parquet").vertex_attributes


@pytest.mark.usefixtures("small_blocks")
def test_transcripts_of_parquet_are_added_with_their_counts(tmp_path: Path) -> None:
    given = transcripts(60)
    pq.write_table(table_of(*given), tmp_path / "spots.parquet")
    options = {"space": "transcripts", "counts": True, "cells": "cell_id", "unassigned": UNASSIGNED, "progress": False}
    found = []
    for source in (tmp_path / "spots.parquet", make_transcripts(*given)):
        atlas = ra.RaggedAtlas.create(str(tmp_path / f"{len(found)}.atlas"))
        report = atlas.add(source, **options)
        assert report.n_vertices == 60
        query = atlas.checkout(atlas.snapshot()).query()
        assert not atlas.validate("deep")
        data = query.to_anndata()
        data.obs_names = data.obs["cell_name"]
        shapes = query.geometry("transcripts")
        found.append((data.to_df().sort_index(), shapes.positions, report.content_hash))
    assert found[0][0].equals(found[1][0])
    assert np.array_equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]
    assert report.name == "transcripts"


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("layout", ["0.7", "0.9"])
def test_a_store_of_points_on_disk_is_that_of_points_in_memory(tmp_path: Path, layout: str) -> None:
    given = transcripts(50)
    write(make_geometry(read_points(table_of(*given))), tmp_path / "a", layout=layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.undo()
        write(make_geometry(make_transcripts(*given)), tmp_path / "b", layout=layout)
    files = [
        {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "a", tmp_path / "b")
    ]
    assert files[0].keys() == files[1].keys()
    assert [key for key in files[0] if files[0][key] != files[1][key] and key != "zarr.json"] == []
    assert open_vectors(tmp_path / "a").read().n_vertices == 50


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("layout", ["0.7", "0.9"])
def test_points_are_appended_to_a_store(tmp_path: Path, layout: str) -> None:
    places, genes, cells = transcripts(60)
    first, second = (make_transcripts(places[rows], genes[rows], cells[rows]) for rows in (slice(20), slice(20, 60)))
    grid = ChunkingOptions(chunk_shape=(20, 20), bin_shape=(10, 10))
    write(make_geometry(first, grid, metadata={"crs": {"unit": "um"}}), tmp_path / "a", layout=layout)
    append_points(tmp_path / "a", second)
    store = open_vectors(tmp_path / "a")
    assert store.layout == layout
    assert store.geometry.bin_shape == (10, 10)
    assert store.geometry.metadata["crs"] == {"unit": "um"}
    assert not validate(tmp_path / "a")
    found = store.read()

    def rows(shapes: Shapes) -> list[tuple[Any, ...]]:
        named = [np.array(a.metadata["categories"])[a.values] for _, a in sorted(shapes.vertex_attributes.items())]
        return sorted(zip(shapes.positions.tolist(), *named, strict=True))

    assert rows(found) == rows(make_transcripts(places, genes, cells))


def test_only_like_points_are_appended(tmp_path: Path) -> None:
    shapes = make_transcripts(*transcripts(9))
    write(make_geometry(shapes), tmp_path / "points")
    before = {path: path.read_bytes() for path in (tmp_path / "points").rglob("*") if path.is_file()}
    line = Shapes("line", np.zeros((2, 2)))
    others = {
        "no point cloud without objects": line,
        "dtypes": Shapes("point_cloud", shapes.positions.astype("f8"), vertex_attributes=shapes.vertex_attributes),
        "other attributes": Shapes("point_cloud", shapes.positions),
    }
    for text, other in others.items():
        with pytest.raises(SourceError, match=text):
            append_points(tmp_path / "points", other)
    write(make_geometry(line), tmp_path / "line")
    with pytest.raises(SourceError, match="no point cloud"):
        append_points(tmp_path / "line", shapes)
    assert before == {path: path.read_bytes() for path in (tmp_path / "points").rglob("*") if path.is_file()}


def refused(table: Any, error: type[Exception], text: str, **options: Any) -> None:
    with pytest.raises(error, match=text):
        read_points(table, **options)


def test_what_is_no_table_of_points_is_refused(tmp_path: Path) -> None:
    table = table_of(*transcripts(4))
    refused(table.drop_columns("y_location"), NotFoundError, "no coordinates of a usual name")
    refused(table, NotFoundError, "no column 'where'", positions=["where", "x_location"])
    refused(table, SourceError, "two coordinates", positions=["x_location"])
    refused(table, NotFoundError, "no column 'qv'", columns=["qv"])
    refused(table, SourceError, "holds string", positions=["x_location", "gene"])
    refused(table.append_column("list", [[[1]] * 4]), SourceError, "holds list")
    refused(table.append_column("n", [pa.array([1, None, 2, 3])]), SourceError, "'n' of int64 has missing values")
    refused([table.to_batches()[0], table.drop_columns("gene").to_batches()[0]], SourceError, "different columns")
    refused(iter([table]), SourceError, "expected a pyarrow.RecordBatch")
    refused(3, ArgumentError, "not 3")
    refused(table.slice(0, 0), SourceError, "no points")
    refused(tmp_path / "none.parquet", NotFoundError, "no Parquet file")
    (tmp_path / "parts" / "gene=A").mkdir(parents=True)
    (tmp_path / "parts" / "gene=A" / "0.parquet").touch()
    refused(tmp_path / "parts", SourceError, "has Parquet files in folders")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing else")
    refused(tmp_path / "bad.parquet", SourceError, "bad.parquet is not a Parquet file")
    atlas = ra.RaggedAtlas.create(str(tmp_path / "x.atlas"))
    with pytest.raises(SourceError, match=r"bad\.parquet"):
        atlas.add(tmp_path / "bad.parquet", progress=False)


def test_a_full_temporary_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runtime.os, "posix_fallocate", full)
    with pytest.raises(StoreError, match="TMPDIR"):
        runtime.scratch_array((2**25,), np.int64)
