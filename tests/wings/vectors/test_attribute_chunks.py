"""Levels whose chunks are also cut by an attribute: chunk keys have a leading part for its value."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raggedatlas.errors import CorruptError
from raggedatlas.wings.vectors import validate
from raggedatlas.wings.vectors.converters.content import decode_categories
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.shapes import Attribute, Shapes
from raggedatlas.wings.vectors.writer import write
from support.geometry_stores import with_level
from support.spatial import by_kind, corners_of, rows_of, walk


def cloud() -> Shapes:
    """Points with a number each."""
    return Shapes("point_cloud", walk(40), vertex_attributes={"row": Attribute(np.arange(40))})


def spots() -> Shapes:
    """Points of objects that have several kinds, one object empty."""
    return replace(cloud(), offsets=np.array([0, 7, 7, 40]), ids=np.array([2**40, 3, 4]))


def graph() -> Shapes:
    """A path through chunks of all kinds."""
    links = np.stack([np.arange(39), np.arange(1, 40)], axis=1)
    return Shapes("graph", walk(40), links=links, link_attributes={"w": Attribute(np.arange(39.0))})


def same_kinds(shapes: Shapes, found: Shapes) -> bool:
    """Tell whether each vertex that was read has its kind, a text: its row in the shapes modulo 3."""
    rows = {tuple(place): row for row, place in enumerate(shapes.positions.tolist())}
    kinds = ["abc"[rows[tuple(place)] % 3] for place in found.positions.tolist()]
    return decode_categories(found.vertex_attributes["kind"]).tolist() == kinds and len(kinds) > 0


@pytest.mark.parametrize("layout", ["0.7", "0.9"])
@pytest.mark.parametrize("make", [cloud, spots, graph])
def test_levels_cut_by_an_attribute(layout: str, make: object, tmp_path: Path) -> None:
    """Items 9, 13, 17, 66, 75, 106: keys with a leading part are written, read whole, by box and by id, validated, and turned into the
    other layout; a box is of space alone."""
    shapes = make()
    geometry = by_kind(shapes)
    write(geometry, tmp_path / "s", layout=layout)
    assert [str(problem) for problem in validate(tmp_path / "s")] == []
    store = open_vectors(tmp_path / "s")
    whole, (level,) = store.read(), store.load().levels
    assert level.chunks.shape[1] == 4
    assert level.metadata["chunk_attribute_values"] == ["a", "b", "c"]
    assert rows_of(whole.positions) == rows_of(shapes.positions)
    assert corners_of(whole) == corners_of(shapes)
    inside = ((shapes.positions >= -3) & (shapes.positions <= 2)).all(axis=1)
    assert 0 < inside.sum() < 40
    assert rows_of(store.box([-3] * 3, [2] * 3).positions) == rows_of(shapes.positions[inside])
    assert same_kinds(shapes, whole)
    assert same_kinds(shapes, store.box([-3] * 3, [2] * 3))
    assert same_kinds(shapes, store.read(attributes=["kind"]))
    assert "kind" not in store.read(attributes=["row"]).vertex_attributes
    assert "kind" not in level.vertex_attributes
    if shapes.vertex_attributes:
        kinds = np.repeat(level.chunks[:, 0], np.diff(level.bounds))
        assert np.array_equal(level.vertex_attributes["row"].values % 3, kinds)
        assert np.array_equal(shapes.positions[whole.vertex_attributes["row"].values], whole.positions)
    if shapes.kind == "point_cloud" and shapes.ids is not None:
        assert rows_of(store.objects([2**40]).positions) == rows_of(shapes.positions[:7])
        assert store.objects([3]).n_vertices == 0
        assert same_kinds(shapes, store.objects([4, 2**40]))
    other = {"0.7": "0.9", "0.9": "0.7"}[layout]
    write(store.load(), tmp_path / "t", layout=other)
    again = open_vectors(tmp_path / "t").load().levels[0]
    assert np.array_equal(again.chunks, level.chunks)
    assert np.array_equal(again.positions, level.positions)
    assert dict(again.metadata) == dict(level.metadata)


def test_the_attribute_of_keys_has_the_type_of_its_values(tmp_path: Path) -> None:
    """Numbers stay numbers, texts become categories; numbers of values that are not there are refused."""
    geometry = by_kind(cloud())
    facts = geometry.levels[0].metadata
    for name, values in (("numbers", [0.5, 1.5, 2.5]), ("few", ["x"])):
        write(with_level(geometry, metadata={**facts, "chunk_attribute_values": values}), tmp_path / name)
    found = open_vectors(tmp_path / "numbers").read().vertex_attributes
    assert np.array_equal(found["kind"].values, found["row"].values % 3 + 0.5)
    with pytest.raises(CorruptError, match="value 1 of 'kind', which has 1 values"):
        open_vectors(tmp_path / "few").read()
