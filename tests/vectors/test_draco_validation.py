"""The validator on meshes in Draco: nothing is wrong with what is written, and damage is told in its place."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from raggedatlas.testing.spatial import EDGE, mesh, walk
from raggedatlas.vectors.builder import ChunkingOptions, make_geometry
from raggedatlas.vectors.validation import validate
from raggedatlas.vectors.writer import write

pytest.importorskip("DracoPy", reason="the extra draco is not installed")


@pytest.fixture(params=["0.7", "0.9"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A mesh in Draco, a file for each chunk."""
    made = make_geometry(mesh(), ChunkingOptions(chunk_shape=EDGE, encoding="draco"))
    write(made, tmp_path / "store", layout=request.param, shards=False)
    return tmp_path / "store"


def cells(store: Path) -> list[Path]:
    """Give the file of each chunk of the vertices, the smallest first."""
    files = (file for file in (store / "0/vertices").rglob("*") if file.is_file() and file.name != "zarr.json")
    return sorted(files, key=lambda file: (file.stat().st_size, str(file)))


def put(of: Path, at: Path) -> None:
    """Put what one chunk holds in the place of another."""
    if (at.parents[1] / "zarr.json").exists() and at.parent.name == "c":
        shutil.rmtree(at.parents[1])
        shutil.copytree(of.parents[1], at.parents[1])
    else:
        shutil.copyfile(of, at)


@pytest.mark.parametrize("layout", ["0.7", "0.9"])
def test_what_is_written_is_sound(layout: str, tmp_path: Path) -> None:
    """Items 14, 16: a rounded vertex may lie beyond its chunk and the bounds by one step of the rounding; that is no fault."""
    for seed in range(4):
        shapes = replace(mesh(), positions=walk(40, seed=seed))
        write(
            make_geometry(shapes, ChunkingOptions(chunk_shape=EDGE, encoding="draco")),
            tmp_path / f"{seed}",
            layout=layout,
        )
        assert [str(problem) for problem in validate(tmp_path / f"{seed}")] == []


def test_a_cell_that_does_not_decode_is_told(store: Path) -> None:
    """Item 14: a bit stream that is none is told by its chunk, and its faces and vertices are not counted."""
    last = cells(store)[-1]
    whole = last.read_bytes()
    at = whole.index(b"DRACO")
    last.write_bytes(whole[: at + 5] + bytes(len(whole) - at - 5))
    found = validate(store)
    assert [problem.rule for problem in found if problem.path.startswith("0/vertices, chunk")] == ["V000"]


def test_another_mesh_in_a_cell_is_told(store: Path) -> None:
    """Items 14, 16, 34, 54, 82, 98: a cell with vertices and faces of another chunk breaks every rule that counts them."""
    put(cells(store)[0], cells(store)[-1])
    found = {problem.rule: problem for problem in validate(store)}
    assert {"V016", "V034", "V054", "V082", "V098"} <= set(found)
    assert found["V016"].level == "should"
