"""Small perturbation screens, of different panels, for splits and sets."""

from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

import raggedatlas as ra

CONTROL = "non-targeting"
PERTURBATIONS = (CONTROL, "STAT1", "JAK2", "SEPT7", "SEPTIN7", "IRF1")


def screen(seed: int, n_cells: int = 240, lines: tuple[str, ...] = ("K562", "RPE1"), first: int = 0) -> ad.AnnData:
    """Create a screen: `gene` (the perturbation), `cell_type` (the line), `batch`, `dose` and `donor`.

    Parameters
    ----------
    seed : int
        Where chance starts.
    n_cells : int
        Rows.
    lines : tuple of str
        Values of `cell_type`.
    first : int
        The panel is 25 genes from this number on, and the genes that are perturbed.
    """
    rng = np.random.default_rng(seed)
    counts = rng.poisson(1.5, (n_cells, 30)).astype(np.float32)
    obs = pd.DataFrame(
        {
            "gene": pd.Categorical(rng.choice(PERTURBATIONS, n_cells, p=[0.3, 0.2, 0.2, 0.1, 0.1, 0.1])),
            "cell_type": pd.Categorical(rng.choice(lines, n_cells)),
            "batch": pd.Categorical(rng.choice(["1", "2"], n_cells)),
            "dose": rng.choice([0.5, 2.0], n_cells),
            "donor": pd.Categorical(rng.choice([f"d{i}" for i in range(10)], n_cells)),
        },
        index=[f"s{seed}-{i}" for i in range(n_cells)],
    )
    genes = [*(f"GENE{i + first}" for i in range(25)), "STAT1", "JAK2", "SEPTIN7", "IRF1", "OAS1"]
    made = ad.AnnData(sp.csr_matrix(counts), obs, pd.DataFrame(index=genes))
    made.obsm["X_hvg"] = counts
    return made


def screens(folder: Path) -> ra.RaggedAtlas:
    """Create an atlas of three screens added from files, `one` and `two` of one folder, without a snapshot."""
    (folder / "set").mkdir(parents=True)
    (folder / "other").mkdir()
    atlas = ra.RaggedAtlas.create(folder / "screens.atlas")
    for name, made in {
        "set/one": screen(1), "set/two": screen(2, 180, ("RPE1", "HEPG2"), 5), "other/three": screen(3, 150, ("K562",)),
    }.items():  # fmt: skip
        made.write_h5ad(folder / f"{name}.h5ad")
        atlas.add(folder / f"{name}.h5ad", progress=False)
    return atlas
