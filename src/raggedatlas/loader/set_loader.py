"""Training batches of sets: cells of one stratum with the cells that they are compared with, in an order of the loader."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import QueryError
from raggedatlas.loader.batch import ModalityBatch, TrainingBatch, WireBatch, check_device
from raggedatlas.loader.loader import BatchIterator, Collator
from raggedatlas.loader.order import Batches, Order, Share, count_batches
from raggedatlas.loader.plan import IterationChoices, plan_batches, split_choices
from raggedatlas.loader.set_plan import Control, PartOf, SetBy, SetOptions, plan_sets
from raggedatlas.model.arguments import checked
from raggedatlas.model.choices import OutputFormat
from raggedatlas.query.query import Query
from raggedatlas.query.split import Split

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, eq=False)
class SetBatch:
    """Some sets of cells and the cells that they are compared with.

    Parameters
    ----------
    cells : TrainingBatch
        The cells of all sets, one set after the other, as many of each.
    control : TrainingBatch
        The cells that these are compared with, in the same order of sets; for neighbours, those of each cell, nearest first.
    key : mapping of str to (n_sets,) array
        Column -> its value in each set.
    n_sets : int
        Number of sets.
    """

    cells: TrainingBatch
    control: TrainingBatch
    key: Mapping[str, NDArray[Any]]
    n_sets: int

    @property
    def X(self) -> Any:  # noqa: ANN401  (one of several matrix types)
        """Values of the cells of the sets, as `TrainingBatch.X`; ``X[i * set_size : (i + 1) * set_size]`` are of set i."""
        return self.cells.X

    @property
    def obs(self) -> Mapping[str, Any]:
        """Metadata of the cells of the sets, as `TrainingBatch.obs`."""
        return self.cells.obs

    @property
    def spaces(self) -> Mapping[str, ModalityBatch]:
        """Values of the cells of the sets, by feature space."""
        return self.cells.spaces

    @property
    def uids(self) -> NDArray[np.str_]:
        """Uids of the cells of the sets, (n,) text."""
        return self.cells.uids

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Which features the dataset of each cell of the sets measured, (n, n_features) bool."""
        return next(iter(self.cells.spaces.values())).measured()

    def __len__(self) -> int:
        """Count the cells of the sets, without those that they are compared with."""
        return len(self.cells)

    def both(self, change: Callable[[TrainingBatch], Any]) -> "SetBatch":
        """Return the batch with its cells, and those that they are compared with, changed by a function."""
        return dataclasses.replace(self, cells=change(self.cells), control=change(self.control))

    def pin_memory(self) -> "SetBatch":
        """Copy every tensor to pinned memory; a DataLoader with ``pin_memory=True`` calls this."""
        return self.both(lambda batch: batch.pin_memory())

    def to(self, device: Any, *, non_blocking: bool = False) -> "SetBatch":  # noqa: ANN401  (what torch takes)
        """Move every tensor to a device."""
        return self.both(lambda batch: batch.to(device, non_blocking=non_blocking))

    def tensors(self) -> list[Any]:
        """List every tensor."""
        return [*self.cells.tensors(), *self.control.tensors()]

    def __repr__(self) -> str:
        """Return the numbers of sets and cells."""
        return f"SetBatch of {self.n_sets:,} sets: {len(self.cells):,} cells, compared with {len(self.control):,}"


@checked
class SetLoader(BatchIterator):
    """Training batches of sets of cells, each set with the cells that it is compared with.

    A set has `set_size` cells that agree in the columns of `set_by` and `match`, such as the cells of one perturbation in one cell line of one
    dataset, and comes with as many control cells that agree in the columns of `match`. What has no such controls is left out and listed in
    `strata`; controls never come from elsewhere.

    Parameters
    ----------
    query : Query
        Which cells, features, layers and feature spaces; controls are among its cells. All batches have the same features.
    set_by : str or sequence of (str or tuple of str)
        Columns whose values make the sets, such as perturbation, dose and cell line. A tuple names columns of a combination, whose order does
        not count.
    control : mapping, "others" or None
        Column -> the value, or values, of control cells. ``"others"`` compares a set with cells of other values of `set_by`: negatives for
        contrastive training.
    match : sequence of str, or "neighbors"
        Columns in which a set and its controls agree. ``"neighbors"`` makes each cell a set of its own, and gives it the `set_size` nearest
        cells of its dataset by the centroids of its geometry.
    set_size, sets : int
        Cells of a set, and sets of a batch.
    split : str, (str or Split, str) or None
        A part of the split that the column ``split`` stores; or a part of that of another column, or of a `Split`: ``("by_donor", "train")``.
    controls_from : sequence of str
        Other parts of the split whose control cells may be used too; by default those of the own part alone.
    replace : bool or None
        True draws the cells of a set independently. None and False take the cells of a stratum in turn, so that every cell is in a set of each
        epoch, and controls in turn too. Where a stratum or its controls are fewer than `set_size`, None repeats cells within the set, and
        False leaves the stratum out.
    min_cells, min_controls : int
        Strata of fewer cells, or with fewer controls, are left out.
    weights : str or None
        Draw the strata of an epoch: ``"equal"``, all with the same chance, or in proportion to the sum over their cells of a column of numbers.
    n_sets : int or None
        Sets of an epoch where strata are drawn; None is as many as hold every cell once.
    targets : str or sequence of str
        Columns of `set_by` whose values name genes: names of one gene, by the atlas's identity, are one value.
    separator : str or None
        Between the genes of a value of `targets`; their order does not count.
    space : str or None
        Geometry of the neighbours; None takes the only one.
    seed : int
        The same seed gives the same sets, on any number of ranks and workers.
    obs : sequence of str, or None
        Metadata columns of a batch, in addition to those named above; None takes those of ``query.obs(...)``.
    as_ : {"csr", "dense", "torch", "torch-dense"}
        What values come as, as in `Loader`.
    **choices
        See `IterationChoices`.

    Raises
    ------
    QueryError, FeatureError, ArgumentError
        For what cannot be had as asked, before anything is read; if no set is left.

    Warns
    -----
    UserWarning
        Of what is left out; `notes` has the same lines.

    Examples
    --------
    >>> loader = ra.SetLoader(  # doctest: +SKIP
    ...     view.query(),
    ...     ["perturbation", "cell_line"],
    ...     {"perturbation": "non-targeting"},
    ...     ["dataset", "cell_line", "batch"],
    ...     split="train",
    ...     as_="torch-dense",
    ... )
    >>> for batch in loader:  # doctest: +SKIP
    ...     shift = model(batch.X, batch.control.X, batch.key["perturbation"])
    """

    def __init__(
        self,
        query: Query,
        set_by: SetBy = (),
        control: Control = None,
        match: Sequence[str] | Literal["neighbors"] = ("dataset",),
        *,
        set_size: int = 64,
        sets: int = 8,
        split: PartOf = None,
        controls_from: Sequence[str] = (),
        replace: bool | None = None,
        min_cells: int = 1,
        min_controls: int = 1,
        weights: str | None = None,
        n_sets: int | None = None,
        targets: str | Sequence[str] = (),
        separator: str | None = None,
        space: str | None = None,
        seed: int = 0,
        obs: Sequence[str] | None = None,
        as_: OutputFormat = "csr",
        **choices: Unpack[IterationChoices],
    ) -> None:
        asked = SetOptions(
            (set_by,) if isinstance(set_by, str) else tuple(set_by), control, match if match == "neighbors" else _names("match", match),
            set_size, sets, replace, min_cells, min_controls, weights, n_sets,
            (targets,) if isinstance(targets, str) else tuple(targets), separator, split, _names("controls_from", controls_from), space,
        )  # fmt: skip
        columns = [*dict.fromkeys([*((query.spec.obs or ()) if obs is None else obs), *asked.columns])]
        own = {"seed": seed, "obs": columns, "as_": as_}
        reading, options = split_choices("SetLoader", {**choices, **own})
        if reading.tensors:
            check_device(reading.device, pinned=reading.pins)
        plan, _ = plan_batches(asked.choose(query), reading)
        self._asked, self._query = asked, query
        self._sets = plan_sets(plan, asked, query)
        share = Share(options.rank, options.world_size, options.even, options.drop_last)
        order = Order(plan.n_cells, sets, seed, "full", share=share, sets=self._sets.recipe)
        if not count_batches(order):
            raise QueryError(
                f"SetLoader: {self._sets.recipe.total:,} sets over {share.world_size} ranks in batches of {sets:,} (even={share.even!r}, "
                f"drop_last={share.drop_last}) leave no batch for rank {share.rank}; take fewer sets a batch, or even='pad' without drop_last."
            )
        super().__init__(plan, order, options)
        if self.notes:
            warnings.warn(f"SetLoader: {'; '.join(self.notes)}.", UserWarning, stacklevel=3)

    @property
    def strata(self) -> "pd.DataFrame":
        """A row for each stratum: the values of its columns, `n_cells`, `n_controls`, `n_sets` of an epoch (0 where they are drawn) and `left_out`."""
        return self._sets.table.copy()

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out and why, a line each."""
        return self._sets.notes

    @property
    def n_sets(self) -> int:
        """Sets of an epoch, of all ranks."""
        return self._sets.recipe.total

    def __repr__(self) -> str:
        """Return what is read and how."""
        recipe, share = self._sets.recipe, self._order.share
        return (
            f"SetLoader of {self.n_sets:,} sets of {recipe.n_own:,} cells, each compared with {recipe.n_compared:,}, {len(self):,} batches of "
            f"{recipe.per_batch:,} (as_={self._plan.options.as_!r}, rank {share.rank} of {share.world_size})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out sets that another process finds again from the file of the cells."""
        state = super().__getstate__()
        records, part = self._plan.cells.records, self._asked.part
        if records is not None and records.path is not None and not (part is not None and isinstance(part[0], Split)):
            state |= {"_sets": None, "_order": dataclasses.replace(self._order, sets=None)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore in another process."""
        super().__setstate__(state)
        if self._order.sets is None:
            self._sets = plan_sets(self._plan, self._asked, self._query)
            self._order = dataclasses.replace(self._order, sets=self._sets.recipe)

    def _made(self, maker: Collator, batches: Batches) -> Sequence[SetBatch]:
        """Read batches: of each the cells of the sets, and what they are compared with."""
        recipe = self._sets.recipe
        n_sets = np.diff(batches.bounds) // (recipe.n_own + recipe.n_compared)
        middles = batches.bounds[:-1] + n_sets * recipe.n_own
        bounds = np.append(np.stack([batches.bounds[:-1], middles], axis=1).ravel(), batches.bounds[-1:])
        made = maker.make(Batches(batches.rows, bounds))
        return [
            SetBatch(cells, control, self._sets.key(cells.rows[:: recipe.n_own]), int(n))
            for cells, control, n in zip(made[::2], made[1::2], n_sets, strict=True)
        ]

    def _sent(self, batch: SetBatch) -> SetBatch:
        """Return a batch as it is sent from a worker."""
        return batch.both(WireBatch)


def _names(argument: str, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise QueryError(f"SetLoader takes {argument} as a list of names, not {given!r}.")
    return tuple(given)
