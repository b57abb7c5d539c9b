"""Put a real piece of breast cancer tissue into an atlas and draw its cells coloured by a gene: the picture of docs/how-to/spatial.md.

Run as ``python examples/draw_tissue.py tissue.png``; needs the extra ``geometry`` and matplotlib. tests/data/README.md says whose the data are.
"""

import sys
import tempfile
import zipfile
from pathlib import Path

import anndata
import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Rectangle

import raggedatlas as ra
from raggedatlas.query.query import Query
from raggedatlas.wings.vectors.converters.convert import read_file
from raggedatlas.wings.vectors.shapes import Shapes

DATA = Path(__file__).parent.parent / "tests" / "data" / "xenium_breast.zip"
MICRONS = 0.2125
"""Edge of a pixel; the store's coordinate system counts pixels."""
GENE = "LUM"
BOX = (12270, 12020, 12430, 12240)
MARKERS = {
    "LUM": ("fibroblasts", "#e69f00"),
    "CD163": ("macrophages", "#d6219c"),
    "IL7R": ("T cells", "#0072b2"),
    "MZB1": ("plasma cells", "#009e73"),
}
RED, INK = "#d62728", "#222222"


def make_atlas(folder: str) -> ra.RaggedAtlas:
    """Add expression, outlines of cells and of nuclei, and transcripts of a SpatialData store."""
    with zipfile.ZipFile(DATA) as archive:
        archive.extractall(folder)
    store = Path(folder) / "breast.zarr"
    spots = read_file(store / "points" / "transcripts").shapes
    table = anndata.read_zarr(store / "table" / "table")
    table.var_names = spots.vertex_attributes["feature_name"].metadata["categories"]  # its own are numbers
    atlas = ra.RaggedAtlas.create(f"{folder}/breast.atlas")
    atlas.add(table, "breast", organism="human", progress=False)
    link, quiet = {"cell_boundaries": "name"}, {"progress": False}
    atlas.add(read_file(store / "shapes" / "cell_boundaries").shapes, "cells", link=link, **quiet)
    atlas.add(read_file(store / "shapes" / "nucleus_boundaries").shapes, "nuclei", link=link, unknown="skip", **quiet)
    owners = {"link": "cell_boundaries", "cells": "cell_boundaries", "unassigned": ""}
    atlas.add(spots, space="transcripts", genes="feature_name", **owners, **quiet)
    return atlas


def rings(shapes: Shapes) -> list[np.ndarray]:
    """Return the outline of every cell, (n, 2)."""
    return np.split(shapes.positions, shapes.offsets[1:-1])


def draw_cells(ax: Axes, query: Query) -> PolyCollection:
    """Draw cells coloured by their counts of the gene, and their nuclei."""
    counts = query.to_anndata()[:, GENE].X.toarray().ravel()
    look = {"cmap": "viridis", "clim": (0, counts.max()), "edgecolor": INK, "linewidth": 0.8}
    cells = PolyCollection(rings(query.geometry("cells")), array=counts, **look)
    ax.add_collection(cells)
    nuclei = rings(query.geometry("nuclei"))
    ax.add_collection(PolyCollection(nuclei, facecolor="none", edgecolor="white", linewidth=0.9))
    return cells


def draw_transcripts(ax: Axes, query: Query) -> None:
    """Draw cells, nuclei, and each transcript in its place, those of some markers in colour."""
    cells, nuclei = rings(query.geometry("cells")), rings(query.geometry("nuclei"))
    ax.add_collection(PolyCollection(cells, facecolor="#f4f4f2", edgecolor=INK, linewidth=0.9))
    ax.add_collection(PolyCollection(nuclei, facecolor="#dcdce6", edgecolor="#8a8aa0", linewidth=0.7))
    points = query.geometry("transcripts")
    gene = points.vertex_attributes["feature_name"]
    names = np.array(gene.metadata["categories"])[gene.values]
    others = points.positions[~np.isin(names, list(MARKERS))]
    for name, (kind, colour) in MARKERS.items():
        own = points.positions[names == name]
        ax.scatter(*own.T, s=26, color=colour, edgecolor="white", linewidth=0.4, label=f"$\\it{{{name}}}$, {kind}")
    ax.scatter(*others.T, s=3, color="#a6a6ac", linewidth=0, zorder=1.5, label="other genes")
    ax.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9, markerscale=1.3, title="Transcripts of"
    )


def finish(ax: Axes, title: str, bar: int) -> None:
    """Draw the box that was asked for and a scale bar of so many micrometres; leave the axes out."""
    edges = (BOX[2] - BOX[0], BOX[3] - BOX[1])
    ax.add_patch(Rectangle(BOX[:2], *edges, fill=False, edgecolor=RED, linewidth=1.8, zorder=5))
    ax.set(aspect="equal")
    ax.axis("off")
    ax.autoscale_view()
    ax.invert_yaxis()  # as the microscope sees it: pixels count downwards
    ax.set_title(title, loc="left", fontsize=11)
    (left, _), (low, _) = ax.get_xlim(), ax.get_ylim()
    ax.plot([left, left + bar / MICRONS], [low, low], color=INK, linewidth=3, solid_capstyle="butt", clip_on=False)
    ax.annotate(f"{bar} µm", (left + bar / MICRONS / 2, low), (0, 5), textcoords="offset points", ha="center")


def main(path: str) -> None:
    """Create the atlas, and draw all cells next to those of a box."""
    with tempfile.TemporaryDirectory() as folder:
        atlas = make_atlas(folder)
        view = atlas.checkout(atlas.snapshot())
        inside = view.query().within(BOX, space="cells", by="exact")
        figure, axes = plt.subplots(1, 2, figsize=(12, 5.2), layout="constrained", width_ratios=[1.15, 1])
        drawn = draw_cells(axes[0], view.query())
        finish(axes[0], f"{view.query().count()} cells of a breast cancer (Xenium)", 20)
        figure.colorbar(drawn, ax=axes[0], label=f"$\\it{{{GENE}}}$, transcripts per cell", shrink=0.7, pad=0.02)
        draw_transcripts(axes[1], inside)
        finish(axes[1], f"The {inside.count()} cells that meet the box", 10)
        figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1])
