"""A query as a LightningDataModule: splits, ranks taken from the trainer, epochs, and resuming in the middle of one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Self, Unpack

import numpy as np

from raggedatlas.errors import MissingExtraError, QueryError
from raggedatlas.loader.batch import require_torch
from raggedatlas.loader.loader import BatchIterator, Loader
from raggedatlas.loader.order import Share, Shuffle
from raggedatlas.loader.plan import LoaderChoices, part_rows
from raggedatlas.model.arguments import checked
from raggedatlas.model.choices import OutputFormat
from raggedatlas.query.query import Query
from raggedatlas.query.split import Split

_OWN_SEEDS = 1 << 64
"""`Query.sample` takes the cells whose hashes with small seeds are the lowest; a split of a sample must not see the same hashes."""


@checked
def split_loader(loader: Loader, split: Split) -> dict[str, Loader]:
    """Split a loader into several with the same features, codes and options.

    Parameters
    ----------
    loader : Loader
        Of all the cells.
    split : Split
        Which cells are in which part; cells without a part are in none.

    Returns
    -------
    mapping of str to Loader
        ``"train"`` draws its cells as `loader` does; the others give each of theirs once, in the order of the query.

    Raises
    ------
    QueryError
        For a part without cells among those of the loader.

    Examples
    --------
    >>> loader = Loader(query, obs=["cell_type", "donor"], as_="torch")  # doctest: +SKIP
    >>> parts = split_loader(loader, Split.by(query, "donor", {"train": 0.8, "val": 0.2}))  # doctest: +SKIP
    """
    parts = {part: part_rows(loader.plan, split, part) for part in split.parts}
    for part, rows in parts.items():
        if not len(rows):
            raise QueryError(f"{split!r} has none of the loader's {loader.n_cells:,} cells in the part {part!r}.")
    return {part: loader.part(rows, drawn=part == "train") for part, rows in parts.items()}


def align_query(query: Query, loader: Loader) -> Query:
    """Make a query read the feature spaces, features and layers of a loader.

    Features that none of its datasets measured are there too, as ones that nobody measured. If an output is asked for
    and its datasets lack a layer, that raises `QueryError`.
    """
    spaces = loader.plan.spaces
    layers = tuple(dict.fromkeys(layer for space in spaces.values() for layer in space.layers))
    features = tuple((name, tuple(space.features.tolist())) for name, space in spaces.items() if len(space.features))
    asked = replace(query.spec, spaces=tuple(spaces), layers=layers, features=features, join="union")
    return Query(query.catalog, asked)


_FOR_TRAINING = {"weights", "balance", "group", "sampler", "n_samples", "even", "drop_last", "layers", "features"}
"""Choices that other cells do not share: how training draws, and what `align_query` says."""

_LEFT_TO_THE_TRAINER = ("rank", "world_size", "device")


class ModuleChoices(LoaderChoices, total=False):
    """Keyword arguments of `AtlasDataModule`, all optional: those of `Loader` except `rank`, `world_size` and `device`.

    Attributes
    ----------
    shuffle, seed, obs, as_
        As in `Loader`; ``as_`` is ``"torch"`` or ``"torch-dense"``, the default.
    """

    shuffle: Shuffle
    seed: int
    obs: Sequence[str]
    as_: OutputFormat


class EpochBatches:
    """A loader for a trainer: it follows the epoch, reads in workers or here, and resumes from checkpoints.

    Parameters
    ----------
    loader : Loader or SetLoader
        Of one rank.
    num_workers : int
        Processes that read; 0 reads with the loader's threads. They stay for all epochs.
    pin_memory : bool
        Whether the DataLoader of the workers pins.

    Examples
    --------
    >>> class Screens(lightning.LightningDataModule):  # doctest: +SKIP
    ...     def train_dataloader(self):
    ...         ranks = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size, "even": "pad"}
    ...         return EpochBatches(ra.SetLoader(query, ["gene"], {"gene": "control"}, as_="torch-dense", **ranks))
    """

    def __init__(self, loader: BatchIterator, num_workers: int = 0, *, pin_memory: bool = False) -> None:
        self.loader = loader
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self._epoch, self._taken = 0, 0
        self._resumed: int | None = None
        self._served: Any = None
        self._serves = (0, 0)

    @property
    def sampler(self) -> Self:
        """The object whose `set_epoch` Lightning calls, as it does for a sampler."""
        return self

    @property
    def batch_sampler(self) -> Self:
        """The same; Lightning asks for both."""
        return self

    def __len__(self) -> int:
        """Count the batches of an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of the epoch; after a loaded state, over the rest."""
        # A loaded position is of one epoch; if the trainer goes to another, that starts at its first batch.
        self._taken, self._resumed = (self._taken, None) if self._resumed == self._epoch else (0, None)
        for batch in self._read(self._epoch, self._taken):
            # Before the yield, so that a checkpoint during this batch counts it as taken.
            self._taken += 1
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of batches taken; the state of one rank is valid for all."""
        return {**self.loader.state_dict(), "epoch": self._epoch, "batch": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken.

        Raises
        ------
        QueryError
            If the state is of other cells or choices.
        """
        self.loader.load_state_dict(state)
        self._epoch = self._resumed = int(state["epoch"])
        self._taken = int(state["batch"])

    def close(self) -> None:
        """End the workers; another iteration starts new ones."""
        self._served = None

    def _read(self, epoch: int, done: int) -> Iterator[Any]:
        # Workers have copies of the loader, which go on to the next epoch by themselves.
        # For any other position these are given up, and new workers start with the state set here.
        if self._served is None or self._serves != (epoch, done):
            self.loader.load_state_dict({**self.loader.state_dict(), "epoch": epoch, "batch": done})
            self._served = None
        if not self._num_workers:
            return iter(self.loader)
        if self._served is None:
            # With `spawn`, since a loader refuses to work in a forked child.
            self._served = require_torch().utils.data.DataLoader(
                self.loader.torch_dataset(),
                batch_size=None,
                num_workers=self._num_workers,
                multiprocessing_context="spawn",
                persistent_workers=True,
                pin_memory=self._pin_memory,
            )
        self._serves = (epoch + 1, 0)
        return iter(self._served)


class AtlasDataModule:
    """The cells of a query for Lightning; a `lightning.LightningDataModule`, which becomes its base when one is made.

    Parameters
    ----------
    query : Query
        The cells to train on, what is read of them, and those to predict for.
    batch_size : int
        Cells of a batch.
    split : Split or None
        Which cells are for training, validation and test; None takes a tenth for validation, unless `val` or `test` name cells.
    val, test, predict : Query or None
        Cells of their own for validation, test and prediction; of them is read what `query` reads. Without `predict`, predictions are
        for all cells of `query`, in its order.
    num_workers : int
        Processes that read, for each part; 0 reads in threads, which is faster unless a training step keeps Python busy.
    **choices
        See `ModuleChoices`.

    Raises
    ------
    MissingExtraError
        Without Lightning.
    QueryError, FeatureError
        For choices that mean nothing; what needs the atlas is checked by `setup`.

    Notes
    -----
    Every rank gets as many batches (``even="pad"`` unless chosen otherwise); predictions are made once for each cell. A checkpoint taken
    in the middle of an epoch resumes there, with the batches that an uninterrupted run would have had.

    Examples
    --------
    >>> split = Split.by(query, "donor", {"train": 0.8, "val": 0.2})  # doctest: +SKIP
    >>> data = AtlasDataModule(query, 512, split=split, obs=["cell_type"])  # doctest: +SKIP
    >>> lightning.Trainer(max_epochs=5).fit(model, datamodule=data)  # doctest: +SKIP
    """

    trainer: Any = None

    def __new__(cls, *_: object, **__: object) -> Self:
        """Create an instance that is a LightningDataModule too."""
        plain: type = cls
        made: Self = object.__new__(with_lightning(plain))
        return made

    def __init__(
        self,
        query: Query,
        batch_size: int = 512,
        *,
        split: Split | None = None,
        val: Query | None = None,
        test: Query | None = None,
        predict: Query | None = None,
        num_workers: int = 0,
        **choices: Unpack[ModuleChoices],
    ) -> None:
        super().__init__()
        given: dict[str, Any] = {"as_": "torch-dense", "batch_size": batch_size, **choices}
        if taken := sorted(given.keys() & set(_LEFT_TO_THE_TRAINER)):
            raise QueryError(
                f"{type(self).__name__} takes no {taken}: the trainer numbers its processes and moves batches."
            )
        named = {name: cells for name, cells in {"val": val, "test": test}.items() if cells is not None}
        if split is not None and named:
            raise QueryError(f"{type(self).__name__} takes either split or {list(named)}; both say what to hold out.")
        self._query, self._named, self._predict = query, named, predict
        self._split = split
        self._num_workers = num_workers
        # With workers, the DataLoader pins; else `pin_memory` stays among the choices, and the loader does.
        self._pin_memory = bool(num_workers and given.pop("pin_memory", False))
        self._choices = given
        self._loaders: dict[str, Loader] = {}
        self._handed: list[EpochBatches] = []

    def setup(self, stage: str | None = None) -> None:
        """Plan what is read; Lightning calls this on every process.

        Raises
        ------
        QueryError, FeatureError
            For what the atlas does not have as asked.
        """
        # Lightning calls this again for every stage.
        if self._loaders:
            return
        every = self._load(self._query, self._choices)
        others = {name: cells for name, cells in {**self._named, "predict": self._predict}.items() if cells is not None}
        split = self._split
        if split is None and not self._named:
            split = Split.by(self._query, fractions={"train": 0.9, "val": 0.1})
        self._loaders = {
            "all": every,
            **({"train": every} if split is None else split_loader(every, split)),
            **{name: self._load_like(every, cells) for name, cells in others.items()},
        }

    def loader(self, part: str = "all") -> Loader:
        """Return the loader of ``"all"`` cells of the query, or of ``"train"``, ``"val"``, ``"test"`` or ``"predict"``, for one rank.

        Raises
        ------
        QueryError
            For a part that there is not.
        """
        self.setup()
        if part not in self._loaders:
            raise QueryError(f"The data module has the parts {list(self._loaders)}, not {part!r}.")
        return self._loaders[part]

    def train_dataloader(self) -> EpochBatches:
        """Return the training batches of this rank."""
        return self._hand("train", even="pad")

    def val_dataloader(self) -> EpochBatches | list[Any]:
        """Return the validation batches of this rank, or none."""
        self.setup()
        return self._hand("val", even="pad") if "val" in self._loaders else []

    def test_dataloader(self) -> EpochBatches:
        """Return the test batches of this rank.

        Raises
        ------
        QueryError
            Without test cells.
        """
        return self._hand("test", even="pad")

    def predict_dataloader(self) -> EpochBatches:
        """Return this rank's share of the cells to predict for, each once."""
        self.setup()
        return self._hand("predict" if "predict" in self._loaders else "all", even=None)

    def teardown(self, stage: str | None = None) -> None:
        """End the workers."""
        for batches in self._handed:
            batches.close()
        self._handed = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what was asked; another process plans for itself."""
        # A class that got its base on demand cannot be found by name; pickle keeps the one without.
        plain = vars(type(self)).get("without_lightning", type(self))
        return _revive, (plain,), {**self.__dict__, "_handed": [], "_loaders": {}}

    def _load(self, query: Query, choices: Mapping[str, Any]) -> Loader:
        """Plan what is read of some cells."""
        if choices["as_"] not in {"torch", "torch-dense"}:
            raise QueryError(f"Lightning moves tensors; take as_='torch' or 'torch-dense', not {choices['as_']!r}.")
        return Loader(query, **{**choices, "obs": choices.get("obs", query.spec.obs) or ()})

    def _load_like(self, every: Loader, query: Query, **changes: Any) -> Loader:  # noqa: ANN401  (choices)
        """Plan to read of other cells what `every` reads of its own, each once and in order."""
        # With the categories of `every`: other values get the code -1 and no code of their own.
        plain = {name: value for name, value in self._choices.items() if name not in _FOR_TRAINING}
        plain |= {
            "obs": self._choices.get("obs", self._query.spec.obs),
            "categories": every.categories,
            "shuffle": None,
        }
        return self._load(align_query(query, every), {**plain, **changes})

    def _hand(self, part: str, even: Any) -> EpochBatches:  # noqa: ANN401  (a literal)
        loader, trainer = self.loader(part), self.trainer
        ranks = (0, 1) if trainer is None else (int(trainer.global_rank), int(trainer.world_size))
        given = self._choices.get("even") or even
        drawn = part == "train"
        whole = drawn and bool(self._choices.get("drop_last"))
        # Without `even`, for predictions, each cell belongs to exactly one rank whatever training has chosen.
        share = Share(*ranks, given if even and ranks[1] > 1 else None, whole)
        own = loader.part(np.arange(loader.n_cells), drawn=drawn, share=share)
        batches = EpochBatches(own, self._num_workers, pin_memory=self._pin_memory)
        self._handed.append(batches)
        return batches


@cache
def with_lightning(cls: type) -> type:
    """Make a class a LightningDataModule too."""
    try:
        from lightning.pytorch import LightningDataModule
    except ImportError as error:
        raise MissingExtraError(
            f"{cls.__name__} needs Lightning, which is not installed; pip install 'raggedatlas[lightning]'."
        ) from error
    if issubclass(cls, LightningDataModule):
        return cls
    facts = {"__doc__": cls.__doc__, "__module__": cls.__module__, "without_lightning": cls}
    return type(cls.__name__, (cls, LightningDataModule), facts)


def _revive(cls: type) -> Any:  # noqa: ANN401  (a class made on demand)
    return object.__new__(with_lightning(cls))
