"""Neurons go in as skeletons with levels of detail, and boxes find them. Made up, not measured."""

from pathlib import Path

import numpy as np

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.wings.vectors.builder import make_geometry
from raggedatlas.wings.vectors.pyramid import make_pyramid
from raggedatlas.wings.vectors.shapes import Shapes
from raggedatlas.wings.vectors.writer import write


def test_neurons_with_levels_of_detail(tmp_path: Path) -> None:
    """Skeletons of three axes are found by boxes of two and three; a coarse level and a budget give fewer vertices of the same cells."""
    rng = np.random.default_rng(1)
    n, length = 6, 200
    paths = np.cumsum(rng.normal(size=(n, length, 3)), axis=1) + np.arange(n)[:, None, None] * 100
    first = np.arange(n * length).reshape(n, length)
    links = np.stack([first[:, 1:], first[:, :-1]], axis=-1).reshape(-1, 2)
    trees = Shapes("skeleton", paths.reshape(-1, 3), np.arange(n + 1) * length, links=links)
    write(make_geometry(trees, coarser=make_pyramid(trees)), str(tmp_path / "neurons.zv"))
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(str(tmp_path / "neurons.zv"), dataset="neurons", progress=False)
    view = atlas.checkout(atlas.snapshot())
    query = view.query().within((150, 150, 350, 350), "morphology")
    fine, coarse = query.geometry(), query.geometry(level=1)
    assert fine.n_objects == coarse.n_objects == query.count()
    own = paths[fine.object_attributes["object_id"].values[0]]
    assert np.array_equal(np.sort(fine.positions[: fine.offsets[1]], axis=0), np.sort(own, axis=0))
    assert view.query().within((150, 150, 150, 350, 350, 350), "morphology", by="exact").count() <= query.count()
    assert 0 < coarse.n_vertices < fine.n_vertices
    assert query.geometry(budget=coarse.n_vertices * 3).n_vertices == coarse.n_vertices
