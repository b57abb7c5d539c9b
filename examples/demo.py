"""The main job on real data: add files that do not share their genes, snapshot, query, export, and draw what was measured.

Usage: python examples/demo.py [OUTPUT_FOLDER]
"""

import shutil
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np

import raggedatlas as ra

mpl.use("Agg")

DATA = Path(__file__).parent.parent / "tests" / "data"
MARKERS = [
    "CD3D",
    "IL7R",
    "NKG7",
    "CD79A",
    "MS4A1",
    "CD14",
    "LYZ",
    "FCGR3A",
    "HLA-DRA",
    "MARCO",
    "SFTPC",
    "MIR1302-2HG",
]


def step(title: str) -> None:
    """Print a heading."""
    print(f"\n== {title}")


def fill(atlas: ra.RaggedAtlas) -> None:
    """Add five real files: three formats, four gene panels, one with proteins and genes."""
    for name in ("pbmc_10k_protein_v3.h5ad", "pbmc_5k_protein_v3.h5ad"):
        print(atlas.add(DATA / name, organism="human", spaces={"obsm/protein_expression": "protein_abundance"}))
    for name in ("lung_C144.h5", "lung_C149.h5"):
        print(atlas.add(DATA / name))
    print(atlas.add(DATA / "pbmc68k_reduced.h5ad", organism="human", obs={"bulk_labels": "cell_type"}))


def draw(view: ra.AtlasView, path: Path) -> None:
    """Draw the share of cells that show a marker, per dataset and per cell type; unmeasured is a cross, not a zero."""
    import matplotlib.pyplot as plt

    counts = view.query().where("cell_type IS NULL").features(MARKERS).aggregate("dataset")
    known = view.query().where("cell_type IS NOT NULL").layers("raw").features(MARKERS).aggregate("cell_type")
    figure, axes = plt.subplots(1, 2, figsize=(12, 5.2), width_ratios=[1, 2.1], layout="constrained")
    for axis, result, column in ((axes[0], counts, "dataset"), (axes[1], known, "cell_type")):
        measured = result.layers["n_measured"]
        share = np.divide(
            result.layers["count_nonzero"], measured, out=np.full(measured.shape, np.nan), where=measured > 0
        )
        image = axis.imshow(share.T, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        gene, group = np.nonzero(measured.T == 0)
        axis.scatter(group, gene, marker="x", color="0.45", s=22, linewidths=1)
        axis.set_xticks(range(result.n_obs), [str(label) for label in result.obs[column]], rotation=40, ha="right")
        axis.set_yticks(range(result.n_vars), result.var["symbol"])
        axis.set_title(f"by {column.replace('_', ' ')}")
    figure.colorbar(image, ax=axes, label="share of cells with the gene")
    figure.suptitle("Detected, not detected, and not measured (x)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(folder: Path) -> None:
    """Run the whole walk in a fresh folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    step("Create an atlas and add five real files")
    atlas = ra.RaggedAtlas.create(str(folder / "demo.atlas"))
    fill(atlas)
    step("Take a snapshot that never changes")
    view = atlas.checkout(atlas.snapshot("demo"))
    print(view)
    step("Which datasets measured SFTPC and CD19?")
    for uid, names in view.find_datasets_with_features(["SFTPC", "CD19"], every=False).items():
        print(f"  {view.dataset(uid).name}: {', '.join(names)}")
    step("Query two genes over all counted cells")
    query = view.query().where("cell_type IS NULL").features("CD79A", "SFTPC")
    print(query.explain())
    found = query.to_anndata()
    print(found)
    print(found.varm["measured"])
    step("Export, one h5ad of four datasets, in bounded memory")
    target = folder / "lung_and_blood.h5ad"
    print(view.query().where("cell_type IS NULL").write(str(target)), f"{target.stat().st_size / 2**20:.1f} MiB")
    step("Give one dataset back: its own matrices, obs and var")
    print(view.dataset("pbmc68k_reduced").to_anndata())
    picture = folder / "markers.png"
    draw(view, picture)
    print(f"\nThe picture is {picture}; all of it is in {folder}.")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-output"))
