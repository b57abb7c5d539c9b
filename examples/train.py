"""Train from an atlas of real files: a cell-type classifier and a small VAE in plain PyTorch, and their learning curves as a picture.

Usage: python examples/train.py [OUTPUT_FOLDER]
"""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import raggedatlas as ra
from raggedatlas.wings.trainers.lightning import split_loader

DATA = Path(__file__).parent.parent / "tests" / "data"
BLOOD = ["pbmc_10k_protein_v3", "pbmc_5k_protein_v3"]
LUNG = ["lung_C144", "lung_C149"]
COLORS = {"train": "#4269d0", "val": "#ff725c"}
DATASET_COLORS = ["#4269d0", "#97bbf5", "#ff725c", "#efb118"]


def make_view(folder: Path) -> ra.AtlasView:
    """Make an atlas of five real files, three formats, and four gene panels."""
    atlas = ra.RaggedAtlas.create(str(folder / "train.atlas"))
    for name in BLOOD:
        atlas.add(DATA / f"{name}.h5ad", organism="human")
    for name in LUNG:
        atlas.add(DATA / f"{name}.h5")
    atlas.add(DATA / "pbmc68k_reduced.h5ad", organism="human", obs={"bulk_labels": "cell_type"})
    return atlas.checkout(atlas.snapshot("train"))


def train_classifier(view: ra.AtlasView, epochs: int = 30) -> dict[str, Any]:
    """Learn the labels of the annotated cells by a linear model, rare types as often as common ones."""
    labelled = view.query().where("cell_type IS NOT NULL").layers("raw")
    loader = ra.Loader(labelled, 32, obs=["cell_type", "cell_name"], as_="torch-dense", balance="cell_type", seed=1)
    parts = split_loader(loader, ra.Split.by(labelled, "cell_name", {"train": 0.75, "val": 0.25}))
    n_genes, types = len(loader.features["gene_expression"]), loader.categories["cell_type"]
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(n_genes, len(types)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    curves: dict[str, list[float]] = {"train": [], "val": []}
    for _ in range(epochs):
        model.train()
        right = []
        for batch in parts["train"]:
            scores, labels = model(batch.X), batch.obs["cell_type"]
            loss = F.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right.append((scores.argmax(1) == labels).float())
        curves["train"].append(float(torch.cat(right).mean()))
        model.eval()
        with torch.no_grad():
            right = [(model(batch.X).argmax(1) == batch.obs["cell_type"]).float() for batch in parts["val"]]
        curves["val"].append(float(torch.cat(right).mean()))
    labels = torch.cat([batch.obs["cell_type"] for batch in parts["val"]])
    return {"curves": curves, "common": float(labels.bincount().max() / len(labels)), "types": types}


class Vae(nn.Module):
    """Counts -> a normal distribution over a few numbers -> Poisson rates of the measured genes."""

    def __init__(self, n_genes: int, n_hidden: int = 64, n_latent: int = 8) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(n_genes, n_hidden), nn.ReLU(), nn.Linear(n_hidden, 2 * n_latent))
        self.decode = nn.Sequential(nn.Linear(n_latent, n_hidden), nn.ReLU(), nn.Linear(n_hidden, n_genes))

    def forward(self, counts: torch.Tensor, measured: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the negative evidence bound per cell, over the genes that its dataset measured, and the means."""
        total = counts.sum(1, keepdim=True).clamp(min=1)
        mean, log_var = self.encode(torch.log1p(1e4 * counts / total)).chunk(2, dim=1)
        latent = mean + torch.exp(log_var / 2) * torch.randn_like(mean) if self.training else mean
        # a gene that was not measured gets no part of the cell's counts, and no say in the loss
        share = self.decode(latent).masked_fill(~measured, -torch.inf).softmax(1)
        fit = F.poisson_nll_loss(share * total, counts, log_input=False, full=True, reduction="none")
        divergence = (mean**2 + log_var.exp() - 1 - log_var).sum(1) / 2
        return (fit * measured).sum(1) + divergence, mean


def train_vae(view: ra.AtlasView, epochs: int = 40, n_genes: int = 1000) -> dict[str, Any]:
    """Learn the counts of blood and lung together, although their gene panels differ."""
    query = view.query().where({"dataset": [*BLOOD, *LUNG]})
    detected = np.asarray(query.aggregate("dataset").layers["count_nonzero"].max(axis=0)).ravel()
    genes = query.to_anndata().var["uid"].to_numpy()[np.argsort(-detected, kind="stable")[:n_genes]]
    loader = ra.Loader(query.features(list(genes)), 64, obs=["dataset", "cell_name"], as_="torch-dense", seed=1)
    parts = split_loader(loader, ra.Split.by(query, "cell_name", {"train": 0.8, "val": 0.2}))
    model = Vae(n_genes)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    curves: dict[str, list[float]] = {"train": [], "val": []}
    for _ in range(epochs):
        for name, part in parts.items():
            model.train(name == "train")
            losses = []
            for batch in part:
                cells = batch.spaces["gene_expression"]
                with torch.set_grad_enabled(name == "train"):
                    loss, _ = model(cells.X, torch.from_numpy(cells.measured()))
                if name == "train":
                    optimizer.zero_grad()
                    loss.mean().backward()
                    optimizer.step()
                losses.append(loss.detach())
            curves[name].append(float(torch.cat(losses).mean()))
    latent, dataset = [], []
    with torch.no_grad():
        for batch in parts["val"]:
            cells = batch.spaces["gene_expression"]
            latent.append(model(cells.X, torch.from_numpy(cells.measured()))[1])
            dataset.append(batch.labels("dataset"))
    return {"curves": curves, "latent": torch.cat(latent), "dataset": np.concatenate(dataset)}


def draw(classifier: Mapping[str, Any], vae: Mapping[str, Any], path: Path) -> None:
    """Draw both learning curves, and where the cells that were held out lie."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.9), layout="constrained")
    names = {"train": "training", "val": "held out"}
    for axis, result in zip(axes, (classifier, vae), strict=False):
        for part, values in result["curves"].items():
            axis.plot(range(1, len(values) + 1), values, color=COLORS[part], label=names[part], linewidth=1.8)
        axis.set_xlabel("epoch")
    axes[0].axhline(classifier["common"], color="0.5", linestyle=":", label="always the commonest type")
    axes[0].set(title=f"Classifier: {len(classifier['types'])} cell types", ylabel="accuracy", ylim=(0, 1.02))
    axes[1].set(title="VAE: blood and lung", ylabel="negative evidence bound per cell")
    centred = vae["latent"] - vae["latent"].mean(0)
    flat = centred @ torch.linalg.svd(centred, full_matrices=False).Vh[:2].T
    for name, color in zip([*BLOOD, *LUNG], DATASET_COLORS, strict=True):
        own = vae["dataset"] == name
        axes[2].scatter(*flat[own].T, s=16, color=color, label=name, alpha=0.85, linewidths=0)
    axes[2].set(title="Held-out cells in the VAE's latent space", xlabel="component 1", ylabel="component 2")
    for axis in axes:
        axis.legend(frameon=False, fontsize=8.5)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(folder: Path) -> None:
    """Make the atlas, train both models, and draw."""
    import matplotlib as mpl

    mpl.use("Agg")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(1)
    torch.set_num_threads(1)  # models this small gain nothing from more, and the loader reads meanwhile
    view = make_view(folder)
    classifier = train_classifier(view)
    print(f"classifier: accuracy {classifier['curves']['val'][-1]:.2f} on held-out cells")
    vae = train_vae(view)
    print(f"VAE: {vae['curves']['val'][0]:.0f} -> {vae['curves']['val'][-1]:.0f} on held-out cells")
    draw(classifier, vae, folder / "train.png")
    print(f"drawn: {folder / 'train.png'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "train-output"))
