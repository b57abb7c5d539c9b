"""A slide goes in with expression, outlines and transcripts; what a box query gives of the three agrees. Made up, not measured."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.wings.vectors.attachment import transcripts_to_counts
from raggedatlas.wings.vectors.builder import ChunkingOptions, make_geometry
from raggedatlas.wings.vectors.pyramid import make_pyramid
from raggedatlas.wings.vectors.shapes import Shapes
from raggedatlas.wings.vectors.writer import write
from support.spatial import Slide, make_slide

BOUNDARY = "segmentation_boundary"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a segmentation leaves: a table of counts, outlines and transcripts as stores of both layouts."""
    slide, place = make_slide(80, seed=11), tmp_path_factory.mktemp("slide")
    slide.data.write_h5ad(place / "slide.h5ad")
    write(make_geometry(slide.outlines, ChunkingOptions(chunk_shape=(25, 25))), str(place / "cells.zv"))
    write(
        make_geometry(slide.transcripts, ChunkingOptions(chunk_shape=(25, 25))), str(place / "spots.zv"), layout="0.7"
    )
    return place


@pytest.mark.long
def test_a_slide_with_transcripts_outlines_and_expression(folder: Path, tmp_path: Path) -> None:
    """A box query returns cells whose counts, shapes and transcripts agree, cell by cell and gene by gene."""
    slide = make_slide(80, seed=11)
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(str(folder / "slide.h5ad"), progress=False)
    atlas.add(str(folder / "cells.zv"), link="segment_id", space=BOUNDARY, progress=False)
    spots = atlas.add(str(folder / "spots.zv"), link="segment_id", space="transcripts", cells="cell_id", progress=False)
    assert any("40 points belong to no cell" in note for note in spots.notes)
    view = atlas.checkout(atlas.snapshot("slide"))
    assert view.validate("deep") == []
    query = view.query().within((20, 30, 70, 60), BOUNDARY, by="exact").with_centroids(BOUNDARY)
    data, outlines, points = query.to_anndata(), query.geometry(BOUNDARY), query.geometry("transcripts")
    assert 5 < data.n_obs < 60
    assert outlines.object_attributes["object_id"].values.tolist() == data.obs["segment_id"].tolist()
    codes = points.vertex_attributes["gene"]
    names = np.array(codes.metadata["categories"])
    counted = np.zeros((data.n_obs, len(names)), int)
    row = np.repeat(np.arange(data.n_obs), points.vertex_counts)
    np.add.at(counted, (row, codes.values), 1)
    assert np.array_equal(data[:, names].X.toarray(), counted)
    assert np.array_equal(points.vertex_attributes["cell_id"].values, data.obs["segment_id"].to_numpy()[row])
    for i in range(data.n_obs):
        ring = outlines.positions[outlines.offsets[i] : outlines.offsets[i + 1]]
        own = points.positions[points.offsets[i] : points.offsets[i + 1]]
        assert (own >= ring.min(axis=0)).all()
        assert (own <= ring.max(axis=0)).all()
        assert np.allclose(data.obsm["spatial"][i], ring.mean(axis=0))
    _agree_with_plain_counts(slide, folder)


def _agree_with_plain_counts(slide: Slide, folder: Path) -> None:
    """The transcripts of the whole slide, counted from the store, are its expression."""
    counts = transcripts_to_counts(str(folder / "spots.zv"), cells="cell_id")
    order = np.argsort(slide.outlines.ids)
    assert np.array_equal(counts[:, list(slide.data.var_names)].X.toarray(), slide.data.X.toarray()[order])


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


@pytest.mark.nightly
def test_a_killed_add_of_geometry(folder: Path, tmp_path: Path) -> None:
    """A process killed before the last commit leaves nothing visible; repair clears it, and the same call succeeds."""
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(str(folder / "slide.h5ad"), progress=False)
    script = (
        "import os, sys\nfrom raggedatlas.atlas import RaggedAtlas\n"
        "RaggedAtlas.open(sys.argv[1]).add(sys.argv[2], link='segment_id', "
        "progress=lambda step, *_: step == 'pointers' and os.kill(os.getpid(), 9))"
    )
    given = [sys.executable, "-c", script, str(tmp_path / "atlas"), str(folder / "cells.zv")]
    assert subprocess.run(given, check=False, env=dict(os.environ)).returncode == -signal.SIGKILL
    assert atlas.geometries().empty
    view = atlas.checkout(atlas.snapshot())
    assert view.geometries().empty
    assert len(atlas.repair().groups) == 1
    atlas.add(str(folder / "cells.zv"), link="segment_id", progress=False)
    assert len(atlas.geometries()) == 1
    atlas.optimize()
    assert atlas.validate("deep") == []
