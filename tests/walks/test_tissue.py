"""A real piece of breast cancer goes in with expression, outlines of cells and nuclei, and transcripts; what a box query gives of them agrees."""

import runpy
import zipfile
from pathlib import Path

import anndata
import numpy as np
import pytest
import shapely
import zarr

from raggedatlas.atlas import AtlasView, RaggedAtlas
from raggedatlas.wings.vectors.attachment import transcripts_to_counts
from raggedatlas.wings.vectors.converters.content import decode_categories
from raggedatlas.wings.vectors.converters.convert import Conversion, convert, read_file
from raggedatlas.wings.vectors.shapes import Shapes

DATA = Path(__file__).parent.parent / "data"
EXAMPLE = DATA.parent.parent / "examples" / "draw_tissue.py"
SCALE = 4.705882352941177
"""Pixels of the store's coordinate system in a micrometre."""
BOX = (12270.0, 12020.0, 12430.0, 12240.0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The SpatialData store as its package ships it."""
    folder = tmp_path_factory.mktemp("tissue")
    with zipfile.ZipFile(DATA / "xenium_breast.zip") as archive:
        archive.extractall(folder)
    return folder / "breast.zarr"


@pytest.fixture(scope="module")
def spots(store: Path) -> Shapes:
    """Its transcripts."""
    return read_file(store / "points" / "transcripts").shapes


@pytest.fixture(scope="module")
def view(store: Path, spots: Shapes, tmp_path_factory: pytest.TempPathFactory) -> AtlasView:
    """An atlas of all of it: outlines as stores of both layouts, transcripts from memory."""
    folder = tmp_path_factory.mktemp("atlas")
    for name, layout in (("cell", "0.9"), ("nucleus", "0.7")):
        convert(str(store / "shapes" / f"{name}_boundaries"), str(folder / f"{name}.zv"), Conversion(layout=layout))
    table = anndata.read_zarr(store / "table" / "table")
    table.var_names = spots.vertex_attributes["feature_name"].metadata["categories"]
    atlas = RaggedAtlas.create(str(folder / "atlas"))
    atlas.add(table, "breast", organism="human", progress=False)
    link, space = {"cell_boundaries": "name"}, "segmentation_boundary"
    atlas.add(str(folder / "cell.zv"), "cells", link=link, space=space, progress=False)
    nuclei = atlas.add(str(folder / "nucleus.zv"), "nuclei", link=link, space=space, unknown="skip", progress=False)
    assert any(note.startswith("8 of 35 objects") for note in nuclei.notes)
    added = atlas.add(
        spots, link="cell_boundaries", space="transcripts", cells="cell_boundaries", genes="feature_name",
        unassigned="", progress=False,
    )  # fmt: skip
    assert any("4,487 points belong to no cell" in note for note in added.notes)
    return atlas.checkout(atlas.snapshot("breast"))


@pytest.mark.long
def test_a_box_gives_counts_outlines_and_transcripts_that_agree(view: AtlasView, store: Path) -> None:
    """The cells are those whose polygon meets the box; each has its counts, polygon, nucleus and transcripts, and no others."""
    assert view.validate("deep") == []
    polygons = _polygons(store, "cell_boundaries")
    query = view.query().within(BOX, "cells", by="exact").with_centroids("cells")
    data, cells, nuclei, points = (
        query.to_anndata(), query.geometry("cells"), query.geometry("nuclei"), query.geometry("transcripts"),
    )  # fmt: skip
    names = data.obs["cell_boundaries"].tolist()
    assert sorted(names) == sorted(name for name, shape in polygons.items() if shape.intersects(shapely.box(*BOX)))
    assert len(names) == 13
    genes, codes = _genes(points)
    counted = np.zeros((data.n_obs, len(genes)), int)
    row = np.repeat(np.arange(data.n_obs), points.vertex_counts)
    np.add.at(counted, (row, codes), 1)
    assert np.array_equal(data[:, genes].X.toarray(), counted)
    assert decode_categories(points.vertex_attributes["cell_boundaries"]).tolist() == [names[i] for i in row]
    for i, name in enumerate(names):
        ring, own = _part(cells, i), _part(points, i)
        assert np.allclose(ring, shapely.get_coordinates(polygons[name]), rtol=0, atol=1e-6)
        assert shapely.contains_xy(polygons[name], own).all()
        assert polygons[name].intersects(shapely.Polygon(_part(nuclei, i)))
        assert np.allclose(data.obsm["spatial"][i], shapely.get_coordinates(shapely.Polygon(ring).centroid)[0])


def test_transcripts_counted_are_the_shipped_expression(store: Path, spots: Shapes) -> None:
    """Counting all transcripts gives the matrix that ships, 541 features wide with those that no cell shows, but for three transcripts.

    Those lie where two outlines overlap; the table counts them for both cells, and the transcripts name one.
    """
    counts = transcripts_to_counts(spots, genes="feature_name", cells="cell_boundaries", unassigned="")
    shipped = anndata.read_zarr(store / "table" / "table")
    assert counts.shape == shipped.shape == (27, 541)
    assert (counts.uns["transcripts"]["n_unassigned"], int(counts.X.sum())) == (4487, 11773 - 4487)
    assert (counts.X.sum(axis=0) == 0).sum() == 252
    more = shipped.X.toarray() - counts[shipped.obs_names].X.toarray().astype(int)
    cells, genes = np.nonzero(more)
    twice = list(zip(shipped.obs_names[cells], counts.var_names[genes], more[cells, genes], strict=True))
    assert twice == [("94820", "POLR2J3", 1), ("95947", "FSTL3", 1), ("95956", "FBLN1", 1)]
    polygons, (names, codes) = _polygons(store, "cell_boundaries"), _genes(spots)
    whose = decode_categories(spots.vertex_attributes["cell_boundaries"])
    for cell, gene, _ in twice:
        inside = shapely.contains_xy(polygons[cell], spots.positions)
        (other,) = whose[inside & (names[codes] == gene) & (whose != cell)]
        assert polygons[cell].overlaps(polygons[other])


def test_genes_find_their_cells(view: AtlasView) -> None:
    """Boxes compose with conditions on cells: of those in the box, the one with most CD163 is the same by counts and by transcripts."""
    query = view.query().within(BOX, "cells", by="centroid")
    assert 0 < query.count() < view.query().within(BOX, "cells").count()
    data, points = query.to_anndata(), query.geometry("transcripts")
    most = int(np.argmax(data[:, "CD163"].X.toarray()))
    genes, codes = _genes(points)
    seen = np.bincount(np.repeat(np.arange(data.n_obs), points.vertex_counts)[genes[codes] == "CD163"])
    name = data.obs["cell_boundaries"].iloc[most]
    assert (int(np.argmax(seen)), int(seen.max()), name) == (most, 20, "94829")
    alone = query.where({"cell_boundaries": name}).geometry("cells")
    assert np.array_equal(alone.positions, _part(query.geometry("cells"), most))


@pytest.mark.nightly
def test_the_example_draws(tmp_path: Path) -> None:
    """The script that the docs name makes its picture."""
    runpy.run_path(str(EXAMPLE))["main"](str(tmp_path / "tissue.png"))
    assert (tmp_path / "tissue.png").read_bytes()[:4] == b"\x89PNG"


def _polygons(store: Path, name: str) -> dict[str, shapely.Polygon]:
    """Read polygons straight from the arrays, in pixels, not through the code under test."""
    group = zarr.open_group(store / "shapes" / name, mode="r")
    ends, corners = np.asarray(group["offset0"]), np.asarray(group["coords"]).astype(float) * SCALE
    index = [str(label) for label in np.asarray(group["Index"])]
    return {label: shapely.Polygon(corners[ends[i] : ends[i + 1]]) for i, label in enumerate(index)}


def _genes(points: Shapes) -> tuple[np.ndarray, np.ndarray]:
    gene = points.vertex_attributes["feature_name"]
    return np.array(gene.metadata["categories"]), gene.values


def _part(shapes: Shapes, i: int) -> np.ndarray:
    return shapes.positions[shapes.offsets[i] : shapes.offsets[i + 1]]
