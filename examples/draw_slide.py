"""Draw outlines coloured by a gene, and the transcripts of the cells in a box: the picture of docs/how-to/spatial.md.

Run as ``python examples/draw_slide.py slide.png``. The slide is made up, not measured.
"""

import sys
import tempfile

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Rectangle

import raggedatlas as ra
from raggedatlas.query.query import Query
from raggedatlas.testing.slides import make_slide

GENE, BOX, RED = "EPCAM", (150, 120, 230, 200), "#d62728"


def draw(ax: Axes, query: Query, title: str) -> PolyCollection:
    """Draw the outlines of the cells of a query, filled by their counts of the gene."""
    rings, data = query.geometry("segmentation_boundary"), query.to_anndata()
    values = data[:, GENE].X.toarray().ravel()
    outlines = np.split(rings.positions, rings.offsets[1:-1])
    made = PolyCollection(outlines, array=values, cmap="viridis", edgecolor="#333333", linewidth=0.5, clim=(0, 20))
    ax.add_collection(made)
    edges = (BOX[2] - BOX[0], BOX[3] - BOX[1])
    ax.add_patch(Rectangle(BOX[:2], *edges, fill=False, edgecolor=RED, linewidth=2))
    ax.set(aspect="equal", xlabel="x (µm)", ylabel="y (µm)")
    ax.set_title(title, loc="left", fontsize=11)
    ax.autoscale_view()
    return made


def main(path: str) -> None:
    """Make an atlas of a slide, and draw all of it beside a box."""
    slide = make_slide(400, width=400.0, seed=7, n_loose=800)
    atlas = ra.RaggedAtlas.create(tempfile.mkdtemp() + "/slide.atlas")
    atlas.add(slide.data, "slide", progress=False)
    atlas.add(slide.outlines, link="segment_id", progress=False)
    atlas.add(slide.transcripts, link="segment_id", space="transcripts", cells="cell_id", progress=False)
    view = atlas.checkout(atlas.snapshot())
    figure, axes = plt.subplots(1, 2, figsize=(11.5, 5.2), layout="constrained")
    drawn = draw(axes[0], view.query(), "All 400 cells")
    inside = view.query().within(BOX, space="segmentation_boundary", by="exact")
    draw(axes[1], inside, f"The {inside.count()} cells that meet the box, and their transcripts")
    points = inside.geometry("transcripts")
    gene = points.vertex_attributes["gene"]
    own = np.array(gene.metadata["categories"])[gene.values] == GENE
    axes[1].scatter(*points.positions[~own].T, s=3, color="#bbbbbb", linewidth=0, label="transcripts of other genes")
    axes[1].scatter(*points.positions[own].T, s=8, color=RED, linewidth=0, label=f"transcripts of {GENE}")
    axes[1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=2, fontsize=8, frameon=False, markerscale=2)
    figure.colorbar(drawn, ax=axes, label=f"{GENE}, counts per cell", shrink=0.8)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(sys.argv[1])
