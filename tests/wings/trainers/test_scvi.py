"""Laws of the scvi-tools data module: models train on what the atlas holds, under the names that the files gave."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raggedatlas as ra
from raggedatlas.errors import MissingExtraError, QueryError
from raggedatlas.wings.trainers.scvi import ScviDataModule

torch = pytest.importorskip("torch")
scvi = pytest.importorskip("scvi")
# the warnings of scvi-tools and Lightning about themselves, and about runs that are as short as these
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> ra.AtlasView:
    """Two real files whose genes differ."""
    atlas = ra.RaggedAtlas.create(str(tmp_path_factory.mktemp("scvi") / "real.atlas"))
    atlas.add(data_dir / "pbmc_10k_protein_v3.h5ad", organism="human")
    atlas.add(data_dir / "lung_C144.h5")
    return atlas.checkout(atlas.snapshot())


def test_scvi_trains_from_an_atlas(view: ra.AtlasView, tmp_path: Path) -> None:
    """A model trains, is saved and loaded, and places every cell, in the order of the query, alike from atlas and AnnData."""
    query = view.query().join("intersection")
    data = ScviDataModule(query, 64, batch_key="dataset", split=ra.Split.by(query, None, {"train": 0.8, "val": 0.2}))
    model = scvi.model.SCVI(registry=data.registry, n_hidden=16, n_latent=4)
    model.train(max_epochs=2, datamodule=data, check_val_every_n_epoch=1, enable_progress_bar=False, accelerator="cpu")
    bound = model.history["elbo_validation"].to_numpy().ravel()
    assert bound[1] < bound[0]
    latent = model.get_latent_representation(dataloader=data.inference_dataloader())
    assert latent.shape == (450, 4)
    model.save(str(tmp_path / "model"), datamodule=data)
    loaded = scvi.model.SCVI.load(str(tmp_path / "model"), adata=False, accelerator="cpu")
    other = view.query().where({"dataset": "lung_C144"})
    lung = loaded.get_latent_representation(dataloader=data.inference_dataloader(other, batch_size=100))
    np.testing.assert_allclose(lung, latent[200:], atol=1e-5)
    assert data.var_names.tolist() == query.to_anndata().var_names.tolist() == model.get_var_names().tolist()


def test_the_surface_agrees_with_itself(small: Any) -> None:
    """Sizes, names and codes of the registry are those of the tensors; cells without a label have the unlabeled category."""
    known = small.query.where("kind IS NOT NULL")
    keys = {"batch_key": "dataset", "labels_key": "kind", "sample_key": "donor", "size_factor_key": "percent.mt"}
    covariates = {"categorical_covariate_keys": ["donor"], "continuous_covariate_keys": ["percent.mt", "plate"]}
    data = ScviDataModule(small.query, 16, **keys, **covariates)
    fields = data.registry["field_registries"]
    stats = {name: value for field in fields.values() for name, value in field["summary_stats"].items()}
    assert stats == {
        "n_vars": 6, "n_cells": 70, "n_batch": 2, "n_labels": 3, "n_sample": 2,
        "n_extra_categorical_covs": 1, "n_extra_continuous_covs": 2,
    }  # fmt: skip
    assert (data.n_obs, data.n_vars, data.n_batch, data.n_labels, data.n_samples) == (70, 6, 2, 3, 2)
    assert data.n_train + data.n_val == 70
    assert data.labels.tolist() == ["T", "B", "Unknown"]
    assert data.labels_.tolist() == small.obs["kind"].astype(object).fillna("Unknown").tolist()
    made = list(data.inference_dataloader(batch_size=32))
    whole = {name: torch.cat([one[name] for one in made]) for name in made[0]}
    assert whole["X"].dtype == torch.float32
    np.testing.assert_array_equal(whole["X"].numpy(), small.counts)
    assert data.labels[whole["labels"].ravel()].tolist() == data.labels_.tolist()
    assert data.batch_labels[whole["batch"].ravel()].tolist() == small.obs["dataset"].tolist()
    np.testing.assert_array_equal(data.samples[whole["sample"].ravel()], small.obs["donor"])
    np.testing.assert_allclose(whole["extra_continuous_covs"].numpy(), small.obs[["percent.mt", "plate"]], rtol=1e-6)
    assert {name: tuple(tensor.shape[1:]) for name, tensor in whole.items()} == {
        "X": (6,), "batch": (1,), "labels": (1,), "sample": (1,), "size_factor": (1,),
        "extra_categorical_covs": (1,), "extra_continuous_covs": (2,),
    }  # fmt: skip
    assert ScviDataModule(known, 16).n_batch == ScviDataModule(known, 16).n_labels == 1


def test_what_cannot_be_had_is_refused(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are not known of every cell, keys of the wrong kind, several spaces, and a missing package are refused."""
    for keys, message in (
        ({"batch_key": "kind"}, "have no 'kind'"),
        ({"batch_key": "plate"}, "holds numbers"),
        ({"size_factor_key": "donor"}, "holds categories"),
    ):
        with pytest.raises(QueryError, match=message):
            ScviDataModule(small.query, **keys).setup()
    assert ScviDataModule(small.query, batch_key="plate", categories={"plate": [0, 1, 2]}).n_batch == 3
    with pytest.raises(QueryError, match="one space"):
        ScviDataModule(small.query.spaces("gene_expression", "protein_abundance")).setup()
    query = small.query.where({"dataset": "first"})
    first = ScviDataModule(query, batch_key="dataset", split=ra.Split.by(query, None, {"train": 0.7, "val": 0.3}))
    with pytest.raises(QueryError, match="or one that the training cells do not have"):
        first.inference_dataloader(small.query)
    monkeypatch.setitem(__import__("sys").modules, "scvi", None)
    with pytest.raises(MissingExtraError, match=r"raggedatlas\[scvi\]"):
        ScviDataModule(small.query)
