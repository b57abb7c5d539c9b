"""Grids of coarser levels: each chunk holds whole chunks of the finer levels, below zero and on seams too (item 100)."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from raggedatlas.wings.vectors import validate
from raggedatlas.wings.vectors.builder import ChunkingOptions, CoarseLevel, make_geometry
from raggedatlas.wings.vectors.geometry import Geometry, Level
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.shapes import Shapes
from raggedatlas.wings.vectors.writer import write
from support.hypothesis_profile import examples

EXACT = (0.25, 0.75, 1.0, 2.5, 3.0, 10.0, 64.0, 1000.0)
ROUGH = (0.1, 0.3, 1 / 3, 0.7, 1.1, np.pi)
Ratio = tuple[int, ...]


@st.composite
def points(draw: st.DrawFn, edges: tuple[float, ...], types: tuple[str, ...]) -> tuple[Shapes, tuple[float, ...]]:
    """Draw points about the origin, half of them on seams of a grid of chosen edges, and the edges."""
    n_dims, n = draw(st.integers(2, 4)), draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = tuple(draw(st.sampled_from(edges)) for _ in range(n_dims))
    positions = rng.normal(0, 8, (n, n_dims)) * shape
    seams = rng.integers(-30, 30, (n, n_dims)) * np.asarray(shape)
    on = rng.random((n, n_dims)) < 0.5
    positions = np.where(on, seams, positions).astype(draw(st.sampled_from(types)))
    return Shapes("point_cloud", positions, vertex_attributes={"row": np.arange(n)}), shape


def levels_of(shapes: Shapes, edges: tuple[float, ...], ratios: list[Ratio]) -> Geometry:
    """Cut the same points on every level, each of which spans more chunks of level 0."""
    coarser = [CoarseLevel(shapes, ratio, ratio) for ratio in ratios]
    return make_geometry(shapes, ChunkingOptions(chunk_shape=edges), coarser=coarser)


def keys_by_point(level: Level) -> NDArray[np.int64]:
    """Give the chunk of each point, in the order of the points."""
    keys = np.empty((level.n_vertices, level.chunks.shape[1]), np.int64)
    keys[level.vertex_attributes["row"].values] = np.repeat(level.chunks, np.diff(level.bounds), axis=0)
    return keys


@given(st.data())
def test_a_chunk_of_a_level_is_that_of_level_0_divided(data: st.DataObject) -> None:
    """Item 100: chunk coordinates of level N are ``coord_0 // r``, with negative coordinates, seams, floats and integers, 2 to 4 axes."""
    shapes, edges = data.draw(points(EXACT, ("f4", "f8", "i2", "i8")))
    steps = [st.tuples(*[st.integers(1, 5)] * len(edges)) for _ in range(3)]
    ratios = [tuple(data.draw(step)) for step in steps]
    made = levels_of(shapes, edges, [tuple(np.prod(ratios[: k + 1], axis=0).tolist()) for k in range(3)])
    own = keys_by_point(made.levels[0])
    assert np.array_equal(own, np.floor(shapes.positions.astype(np.float64) / edges))
    for k, level in enumerate(made.levels[1:]):
        ratio = np.prod(ratios[: k + 1], axis=0)
        assert np.array_equal(keys_by_point(level), own // ratio)
        assert np.array_equal(level.chunks, np.unique(made.levels[0].chunks // ratio, axis=0))


@pytest.mark.long
@examples(15)
@given(st.data())
def test_edges_without_exact_multiples_nest_up_to_rounding(data: st.DataObject) -> None:
    """Items 17, 100: where a seam has no exact number, only a point on it may stand beside it; on every level its box finds it."""
    shapes, edges = data.draw(points(ROUGH, ("f4", "f8")))
    ratio = data.draw(st.tuples(*[st.integers(1, 5)] * len(edges)))
    made = levels_of(shapes, edges, [ratio])
    fine, coarse = (keys_by_point(level) for level in made.levels)
    other = coarse != fine // np.asarray(ratio)
    places = shapes.positions.astype(np.float64) / (np.asarray(edges) * ratio)
    assert np.allclose(places[other], np.rint(places[other]), rtol=1e-14, atol=0)
    assert (np.abs(coarse - fine // np.asarray(ratio)) <= 1).all()
    with tempfile.TemporaryDirectory() as folder:
        write(made, f"{folder}/s")
        store = open_vectors(f"{folder}/s")
        for point in shapes.positions[:5]:
            for level in (0, 1):
                found = store.box(point, point, level=level).positions
                assert np.count_nonzero((shapes.positions == point).all(axis=1)) == len(found)


@pytest.mark.parametrize("layout", ["0.7", "0.9"])
def test_nested_grids_as_they_are_stored(layout: str, tmp_path: Path) -> None:
    """Item 100: both layouts keep the keys of every level, negative ones too, and the validator finds them nested."""
    spread = np.stack(np.meshgrid([-7.0, -3.0, -0.5, 0.0, 2.0, 6.0], [-9.0, -3.0, 3.0, 3.5]), axis=-1).reshape(-1, 2)
    shapes = Shapes("point_cloud", spread, vertex_attributes={"row": np.arange(len(spread))})
    write(levels_of(shapes, (1.0, 1.5), [(2, 2), (6, 4)]), f"{tmp_path}/s", layout=layout)
    assert validate(f"{tmp_path}/s") == []
    fine, *coarse = open_vectors(f"{tmp_path}/s").load().levels
    assert (fine.chunks < 0).any()
    for level, ratio in zip(coarse, ([2, 2], [6, 4]), strict=True):
        assert np.array_equal(keys_by_point(level), keys_by_point(fine) // np.array(ratio))
        assert level.metadata["chunk_shape"] == [1.0 * ratio[0], 1.5 * ratio[1]]
