"""A small made-up slide: cells with outlines, transcripts and counts that agree, for tests, docs and pictures."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raggedatlas.ingest.transcripts import make_transcripts
from raggedatlas.vectors.shapes import Shapes

if TYPE_CHECKING:
    from anndata import AnnData

GENES = ("EPCAM", "CD3E", "MS4A1", "LYZ", "COL1A1", "ACTA2", "PECAM1", "KRT8")


@dataclass(frozen=True)
class Slide:
    """A segmented slide.

    Parameters
    ----------
    data : AnnData
        Cells x genes, with ``segment_id`` in obs.
    outlines : Shapes
        One closed outline of two axes for each cell; the last vertex is not the first again.
    transcripts : Shapes
        Points with ``gene`` and ``cell_id`` (the segment, -1 for none).
    """

    data: "AnnData"
    outlines: Shapes
    transcripts: Shapes


def make_slide(n_cells: int = 60, *, width: float = 100.0, seed: int = 0, n_loose: int = 40, first: int = 100) -> Slide:
    """Make a slide: cells on a jittered grid, some tens of transcripts in each, some between them; nothing of it is measured.

    Parameters
    ----------
    n_cells : int
        How many.
    width : float
        Edge of the slide.
    seed : int
        Another seed gives another slide.
    n_loose : int
        Transcripts of no cell.
    first : int
        Id of the first segment.

    Examples
    --------
    >>> slide = make_slide(9)
    >>> int(slide.data.X.sum()) == int((slide.transcripts.vertex_attributes["cell_id"].values >= 0).sum())
    True
    """
    import pandas as pd
    from anndata import AnnData
    from scipy.sparse import csr_matrix

    rng = np.random.default_rng(seed)
    ids = first + rng.permutation(n_cells)
    centres, radius = _centres(n_cells, width, rng)
    outlines = _outlines(centres, radius, ids, rng)
    kind = (centres[:, 0] / width * 3).astype(int).clip(0, 2)
    weights = rng.dirichlet(np.full(len(GENES), 0.4), size=3)[kind]
    counts = rng.poisson(weights * rng.integers(15, 45, n_cells)[:, None])
    cell = np.repeat(np.arange(n_cells), counts.sum(axis=1))
    gene = np.concatenate([np.repeat(np.arange(len(GENES)), row) for row in counts])
    angle, far = rng.uniform(0, 2 * np.pi, len(cell)), np.sqrt(rng.uniform(0, 0.6, len(cell)))
    inside = centres[cell] + (radius * far)[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    loose = rng.uniform(0, width, (n_loose, 2))
    order = rng.permutation(len(cell) + n_loose)
    labels = np.array(GENES)[np.concatenate([gene, rng.integers(0, len(GENES), n_loose)])][order]
    owner = np.concatenate([ids[cell], np.full(n_loose, -1)])[order]
    spots = make_transcripts(np.concatenate([inside, loose])[order], labels.tolist(), owner.tolist())
    obs = pd.DataFrame(
        {"segment_id": ids, "region": pd.Categorical(np.array(["tumour", "border", "stroma"])[kind])},
        index=[f"cell-{i}" for i in range(n_cells)],
    )
    data = AnnData(csr_matrix(counts.astype(np.float32)), obs=obs, var=pd.DataFrame(index=list(GENES)))
    return Slide(data, outlines, spots)


def _centres(n: int, width: float, rng: np.random.Generator) -> tuple[NDArray[np.float64], float]:
    side = int(np.ceil(np.sqrt(n)))
    step = width / side
    grid = np.stack(np.divmod(np.arange(n), side), axis=1)[:, ::-1]
    return (grid + 0.5) * step + rng.uniform(-0.12, 0.12, (n, 2)) * step, 0.33 * step


def _outlines(centres: NDArray[np.float64], radius: float, ids: NDArray[np.int64], rng: np.random.Generator) -> Shapes:
    n, corners = len(centres), 16
    angle = np.linspace(0, 2 * np.pi, corners, endpoint=False)
    far = radius * (1 + 0.12 * np.sin(angle[None] * rng.integers(2, 5, n)[:, None] + rng.uniform(0, 6, n)[:, None]))
    ring = centres[:, None] + far[:, :, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    area = 0.5 * np.abs(
        (ring[..., 0] * np.roll(ring[..., 1], -1, 1) - np.roll(ring[..., 0], -1, 1) * ring[..., 1]).sum(1)
    )
    return Shapes(
        "polyline", ring.reshape(-1, 2), np.arange(n + 1) * corners, ids, object_attributes={"area": area}
    )  # fmt: skip
