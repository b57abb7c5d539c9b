"""Looking into a geometry store, and the commands that do: inspect and validate."""

import json
from pathlib import Path

import pytest
from tests.command import ask, done, read

from raggedatlas.errors import NotFoundError, SourceError
from raggedatlas.wings.vectors import inspect
from raggedatlas.wings.vectors.builder import ChunkingOptions, make_geometry
from raggedatlas.wings.vectors.inspection import is_geometry_store
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.writer import write
from support.spatial import ALL, EDGE


@pytest.mark.parametrize("layout", ["0.7", "0.9"])
def test_all_of_a_store_is_told(layout: str, tmp_path: Path) -> None:
    """Generation, type, axes, bounds, levels, arrays, counts and sizes of every kind, and the whole as HTML."""
    for name, make in ALL.items():
        path = tmp_path / name
        write(make_geometry(make(), ChunkingOptions(chunk_shape=EDGE)), path, layout=layout)
        found = inspect(path)
        assert (found.layout, found.types) == (layout, (make().kind,))
        assert found.axes == ("x", "y", "z")
        assert len(found.bounds[0]) == 3
        assert found.n_bytes == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        text = str(found)
        assert "chunks 3 x 3 x 3" in text
        assert "level, 40 vertices" in text
        assert "vertex_fragments" in text
        assert "UNREADABLE" not in text
        store = open_vectors(path)
        assert "level, 40 vertices" in store._repr_html_()
        assert layout in repr(store)
        assert json.dumps(found.to_dict())
    assert "3 groups" in str(inspect(tmp_path / "spots"))
    assert "3 objects" in str(inspect(tmp_path / "spots"))


def test_damage_is_shown_where_it_is(tmp_path: Path) -> None:
    """An array that cannot be read is in the tree, with the reason; what is no store is refused."""
    write(make_geometry(ALL["cloud"]()), tmp_path / "a")
    (tmp_path / "a/0/vertices/zarr.json").write_text("{")
    assert "UNREADABLE" in str(inspect(tmp_path / "a"))
    with pytest.raises(NotFoundError):
        inspect(tmp_path)
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    with pytest.raises(SourceError):
        inspect(tmp_path)
    assert is_geometry_store(tmp_path / "a")
    assert not is_geometry_store(tmp_path)


def test_the_commands_tell_a_store_by_what_lies_there(tmp_path: Path) -> None:
    """`inspect` and `validate` take a geometry store as they take files: text, JSON, levels, and 1 where a must is broken."""
    path = tmp_path / "lines"
    write(make_geometry(ALL["streamline"](), ChunkingOptions(chunk_shape=EDGE)), path)
    assert "zarr-vectors 0.9.2" in done("inspect", path)
    assert read("inspect", path)["types"] == ["streamline"]
    assert done("validate", path).strip() == "Nothing is wrong (pyramid)."
    node = json.loads((path / "0/zarr.json").read_text())
    node["attributes"]["zarr_vectors_level"]["vertex_count"] = 41
    (path / "0/zarr.json").write_text(json.dumps(node))
    bad = ask("validate", path, "--json")
    assert bad.exit_code == 1
    assert [(p["rule"], p["resolution"]) for p in json.loads(bad.output)] == [("V098", 0)]
    done("validate", path, "--level", "structure")
    assert ask("validate", path, "--level", "quick").exit_code == 2
    assert ask("fix", path, tmp_path / "x").exit_code == 2
