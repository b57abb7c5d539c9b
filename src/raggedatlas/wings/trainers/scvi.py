"""A query as a data module of scvi-tools: models train from the atlas itself, without an AnnData in memory."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import MissingExtraError, QueryError
from raggedatlas.loader.batch import TrainingBatch, require_torch
from raggedatlas.loader.cells import ObsColumn
from raggedatlas.loader.loader import Loader
from raggedatlas.model.frames import INDEX
from raggedatlas.query.modalities import make_var
from raggedatlas.query.query import Query
from raggedatlas.query.read import SpacePlan
from raggedatlas.wings.trainers.lightning import AtlasDataModule, ModuleChoices

_KEYS = ("batch_key", "labels_key", "sample_key")
_LISTS = ("categorical_covariate_keys", "continuous_covariate_keys")


class ScviChoices(ModuleChoices, total=False):
    """Keyword arguments of `ScviDataModule`, all optional, in addition to those of `AtlasDataModule`; named as scvi-tools names them.

    Attributes
    ----------
    batch_key, labels_key, sample_key : str
        Metadata columns. Cells without a label get `unlabeled_category`; the others must have a value for every cell.
    size_factor_key : str
        A numeric column.
    categorical_covariate_keys, continuous_covariate_keys : sequence of str
        More metadata columns.
    unlabeled_category : str
        Stands last among the labels; ``"Unknown"`` unless named.
    model_name : str
        Stands in the registry; ``"SCVI"`` unless named.
    """

    batch_key: str
    labels_key: str
    sample_key: str
    size_factor_key: str
    categorical_covariate_keys: Sequence[str]
    continuous_covariate_keys: Sequence[str]
    unlabeled_category: str
    model_name: str


class ScviDataModule(AtlasDataModule):
    """The cells of a query for scvi-tools, with the surface of its own data modules.

    Parameters
    ----------
    query : Query
        Cells, features and a layer of counts; one feature space.
    batch_size : int
        Cells of a batch of training data.
    **choices
        See `ScviChoices`, and `AtlasDataModule` for the split, queries and workers.

    Raises
    ------
    MissingExtraError
        Without scvi-tools.
    QueryError, FeatureError
        For what cannot be had as asked.

    Notes
    -----
    Genes are named as `Query.to_anndata` names them, so a model trained here can be used with an AnnData of the same query.

    Examples
    --------
    >>> data = ScviDataModule(view.query(), 128, batch_key="dataset")  # doctest: +SKIP
    >>> model = scvi.model.SCVI(registry=data.registry)  # doctest: +SKIP
    >>> model.train(max_epochs=10, datamodule=data)  # doctest: +SKIP
    >>> model.get_latent_representation(dataloader=data.inference_dataloader())  # doctest: +SKIP
    """

    def __init__(self, query: Query, batch_size: int = 128, **choices: Unpack[ScviChoices]) -> None:
        given: dict[str, Any] = dict(choices)
        # First, so that a missing package is reported before anything else.
        try:
            import scvi
        except ImportError as error:
            raise MissingExtraError(
                "ScviDataModule needs scvi-tools, which is not installed; pip install 'raggedatlas[scvi]'."
            ) from error
        self._release = str(scvi.__version__)
        self.unlabeled_category = str(given.pop("unlabeled_category", "Unknown"))
        self.model_name = str(given.pop("model_name", "SCVI"))
        self._keys = {name: given.pop(name, None) for name in (*_KEYS, "size_factor_key")}
        self._lists = {name: list(given.pop(name, None) or ()) for name in _LISTS}
        named = [*filter(None, self._keys.values()), *(key for keys in self._lists.values() for key in keys)]
        super().__init__(query, batch_size, **{**given, "obs": (*given.get("obs", ()), *named), "as_": "torch-dense"})

    @property
    def n_obs(self) -> int:
        """Number of cells of the query."""
        return self.loader().n_cells

    @property
    def n_vars(self) -> int:
        """Number of genes."""
        return self._space.n_cols

    @property
    def n_batch(self) -> int:
        """Number of batches in the sense of scvi-tools: values of `batch_key`."""
        return len(self.batch_labels)

    @property
    def n_labels(self) -> int:
        """Number of labels, the unlabeled category among them."""
        return len(self.labels)

    @property
    def n_samples(self) -> int:
        """Number of samples; 0 without `sample_key`."""
        return 0 if self.samples is None else len(self.samples)

    @property
    def n_continuous_cov(self) -> int:
        """Number of continuous covariates."""
        return len(self._lists["continuous_covariate_keys"])

    @property
    def n_cats_per_cov(self) -> list[int] | None:
        """Number of categories of each categorical covariate; None without any."""
        return [len(self._known(key)) for key in self._lists["categorical_covariate_keys"]] or None

    @property
    def n_train(self) -> int:
        """Number of cells to train on."""
        return self.loader("train").n_cells

    @property
    def n_val(self) -> int:
        """Number of cells to validate on."""
        # Not by `loader`, which raises where no cells are held out.
        self.setup()
        return self._loaders["val"].n_cells if "val" in self._loaders else 0

    @cached_property
    def var_names(self) -> NDArray[np.object_]:
        """Names of the genes, as `Query.to_anndata` has them, (n_vars,) object."""
        names: NDArray[np.object_] = (
            make_var(self._space, self._query.catalog, self._query.spec.names).table.column(INDEX).to_numpy()
        )
        return names

    @property
    def batch_labels(self) -> NDArray[np.object_]:
        """Values of `batch_key` in the order of their codes; one zero without it."""
        key = self._keys["batch_key"]
        return np.array([0], object) if key is None else self._known(key)

    @property
    def labels(self) -> NDArray[np.object_]:
        """Labels in the order of their codes, the unlabeled category last unless it is one of them."""
        key = self._keys["labels_key"]
        known = [] if key is None else self._known(key).tolist()
        return np.array([*known, *({self.unlabeled_category} - set(known))], object)

    @property
    def labels_(self) -> NDArray[np.object_]:
        """The label of every cell of the query, (n_obs,) object."""
        key = self._keys["labels_key"]
        codes = np.full(self.n_obs, -1) if key is None else self.loader().plan.columns[key].values
        found: NDArray[np.object_] = self.labels[np.where(codes < 0, self._unlabeled, codes)]
        return found

    @property
    def label_keys(self) -> list[str] | None:
        """The labels' column, as a list; None without one."""
        key = self._keys["labels_key"]
        return None if key is None else [key]

    @property
    def samples(self) -> NDArray[np.object_] | None:
        """Values of `sample_key` in the order of their codes; None without it."""
        key = self._keys["sample_key"]
        return None if key is None else self._known(key)

    @property
    def registry(self) -> dict[str, Any]:
        """What scvi-tools makes a model from: sizes, names, and the meaning of all codes."""
        keys = self._keys
        labels = _codes("labels", self.labels, keys["labels_key"])
        labels["state_registry"]["unlabeled_category"] = self.unlabeled_category
        axes = {"n_obs": self.n_obs, "n_vars": self.n_vars, "column_names": self.var_names}
        fields = {
            "X": _field("X", None, axes, {"n_vars": self.n_vars, "n_cells": self.n_obs}),
            "batch": _codes("batch", self.batch_labels, keys["batch_key"]),
            "labels": labels,
            "sample": _codes("sample", self.samples, keys["sample_key"]),
            "ind_x": _field("obs", "_indices", {}, {}),
            "size_factor": _field("obs", "_scvi_size_factor", {}, {}) if keys["size_factor_key"] else _NO_FIELD,
            **self._covariates(),
        }
        lists = {name: listed or None for name, listed in self._lists.items()}
        return {
            "scvi_version": self._release,
            "model_name": self.model_name,
            "setup_args": {"layer": None, **keys, **lists},
            "field_registries": fields,
            "setup_method_name": "setup_datamodule",
        }

    def inference_dataloader(self, query: Query | None = None, batch_size: int | None = None) -> "TensorBatches":
        """Return cells in order, each once, as models take them with ``dataloader=``.

        Parameters
        ----------
        query : Query or None
            Other cells, of which the same is read. None is all cells of the module's query.
        batch_size : int or None
            None is that of the module.

        Raises
        ------
        QueryError
            For values of a key that the module's query does not have.
        """
        size = self._choices["batch_size"] if batch_size is None else batch_size
        return TensorBatches(self, self._load_like(self.loader(), query or self._query, batch_size=size))

    def on_before_batch_transfer(self, batch: TrainingBatch, dataloader_idx: int = 0) -> dict[str, Any]:
        """Turn a batch into the tensors that scvi-tools names, each with as many rows as the batch has cells."""
        torch, keys = require_torch(), self._keys
        # Code 0 of the single category that `batch_labels` and `labels` have without a key.
        nothing = torch.zeros((len(batch), 1), dtype=torch.int64)
        made = {"X": batch.X, "batch": nothing, "labels": nothing}
        for name, key in (("batch", keys["batch_key"]), ("sample", keys["sample_key"])):
            if key is not None:
                made[name] = batch.obs[key][:, None]
        if keys["labels_key"] is not None:
            codes = batch.obs[keys["labels_key"]]
            # Cells without a label have code -1, which no embedding can look up.
            made["labels"] = torch.where(codes < 0, self._unlabeled, codes)[:, None]
        if keys["size_factor_key"] is not None:
            made["size_factor"] = batch.obs[keys["size_factor_key"]].float()[:, None]
        if cats := self._lists["categorical_covariate_keys"]:
            made["extra_categorical_covs"] = torch.cat([batch.obs[key][:, None] for key in cats], 1)
        if columns := self._lists["continuous_covariate_keys"]:
            made["extra_continuous_covs"] = torch.stack([batch.obs[key].float() for key in columns], 1)
        return made

    @property
    def _space(self) -> SpacePlan:
        return next(iter(self.loader().plan.spaces.values()))

    @property
    def _unlabeled(self) -> int:
        """The code of cells without a label."""
        return int(np.flatnonzero(self.labels == self.unlabeled_category)[0])

    def _known(self, key: str) -> NDArray[np.object_]:
        return self.loader().categories[key]

    def _covariates(self) -> dict[str, dict[str, Any]]:
        """Describe the covariates as scvi-tools registers them."""
        cats = {key: self._known(key) for key in self._lists["categorical_covariate_keys"]}
        numbers = self._lists["continuous_covariate_keys"]
        sizes: dict[str, Any] = {"field_keys": list(cats), "mapping": cats, "n_cats_per_key": self.n_cats_per_cov}
        columns: dict[str, Any] = {"columns": np.array(numbers, object)}
        fields: dict[str, tuple[Any, dict[str, Any]]] = {
            "extra_categorical_covs": (cats, sizes),
            "extra_continuous_covs": (numbers, columns),
        }
        return {
            name: {
                **(_field("obsm", f"_scvi_{name}", state, {}) if own else _NO_FIELD),
                "summary_stats": {f"n_{name}": len(own)},
            }
            for name, (own, state) in fields.items()
        }

    def _load(self, query: Query, choices: Mapping[str, Any]) -> Loader:
        """Plan, and refuse keys that are no codes, or not known of every cell."""
        loader = super()._load(query, choices)
        plan = loader.plan
        if len(plan.spaces) != 1 or not next(iter(plan.spaces.values())).sparse:
            raise QueryError(
                f"ScviDataModule reads one space of counts, not {list(plan.spaces)}; name it with .spaces(...)."
            )
        numbers = [*filter(None, [self._keys["size_factor_key"]]), *self._lists["continuous_covariate_keys"]]
        codes = [*filter(None, (self._keys[name] for name in _KEYS)), *self._lists["categorical_covariate_keys"]]
        for key in (*codes, *numbers):
            missing = _count_missing(key, plan.columns[key], numeric=key in numbers)
            # Labels may be missing, as they become the unlabeled category; other keys have no substitute.
            if missing and key != self._keys["labels_key"]:
                raise QueryError(
                    f"{missing:,} of {plan.n_cells:,} cells have no {key!r}, or one that the training cells do not have; leave them out, "
                    f"e.g. query.where(~col({key!r}).is_null())."
                )
        return loader


class TensorBatches:
    """A loader whose batches come as the tensors that scvi-tools names; iterated again, it starts again."""

    def __init__(self, module: ScviDataModule, loader: Loader) -> None:
        self._module, self._loader = module, loader

    def __len__(self) -> int:
        """Count the batches."""
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over every cell once."""
        # Each time is the loader's next epoch; `_load_like` turned shuffling off, so all of them are in order.
        return map(self._module.on_before_batch_transfer, self._loader)


_NO_FIELD: dict[str, Any] = {"data_registry": {}, "state_registry": {}, "summary_stats": {}}


def _count_missing(key: str, column: ObsColumn, *, numeric: bool) -> int:
    """Count the cells without a value, and refuse a column of the wrong kind."""
    if numeric != (column.categories is None):
        held = "numbers" if column.categories is None else "categories"
        raise QueryError(
            f"The column {key!r} holds {held}, not what its key takes: size factors and continuous covariates are numbers, other "
            f"keys name categories. Numbers become categories with categories={{{key!r}: [...]}}."
        )
    missing = np.isnan(column.values.astype(np.float64)) if numeric else column.values < 0
    return int(missing.sum())


def _field(name: str, key: str | None, state: dict[str, Any], stats: dict[str, int]) -> dict[str, Any]:
    """Describe one field of the registry."""
    return {"data_registry": {"attr_name": name, "attr_key": key}, "state_registry": state, "summary_stats": stats}


def _codes(name: str, known: NDArray[np.object_] | None, column: str | None) -> dict[str, Any]:
    """Describe a field of codes."""
    stats = {f"n_{name}": 0 if known is None else len(known)}
    return _field("obs", f"_scvi_{name}", {"categorical_mapping": known, "original_key": column}, stats)
