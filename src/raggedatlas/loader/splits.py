"""Train, validation and test cells of one loader, by a hash that keeps every cell where it is."""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import QueryError
from raggedatlas.loader.batch_plan import BatchPlan, ObsColumn
from raggedatlas.loader.loader import Loader
from raggedatlas.model.arguments import checked
from raggedatlas.query.cells import hash_uids
from raggedatlas.query.query import Query

_OWN_SEEDS = 1 << 64
"""`Query.sample` takes the cells whose hashes with small seeds are the lowest; a split of a sample must not see the same hashes."""


@checked
@dataclass(frozen=True)
class Split:
    """How cells are shared out between training, validation and test.

    Parameters
    ----------
    val, test : float
        Expected share of the cells, from 0 to below 1 together; training has the others.
    by : str or None
        A metadata column whose values stay together, e.g. the donor; None shares out cell by cell.
    seed : int
        Different seeds make different splits.

    Notes
    -----
    The hash is of the cell's uid, or of the value of `by`, with the seed, and of nothing else: cells that join the atlas later, a
    narrower query, or another machine move no cell from one part to another. Values of `by` keep their part in every atlas.
    """

    val: float = 0.1
    test: float = 0.0
    by: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse shares that leave nothing to train on."""
        if not (self.val >= 0 and self.test >= 0 and self.val + self.test < 1):
            raise QueryError(
                f"Split takes val and test as shares from 0 to below 1 together, not {self.val!r} and {self.test!r}."
            )


def split_rows(hashes: NDArray[np.uint64], split: Split) -> dict[str, NDArray[np.int64]]:
    """Split rows by their hashes.

    Parameters
    ----------
    hashes : (n,) uint64
        Evenly spread.
    split : Split
        The shares.

    Returns
    -------
    mapping of str to (k,) int64
        Rows of ``"train"``, ``"val"`` and ``"test"``, each ascending; together every row once.

    Examples
    --------
    >>> split_rows(np.array([2**63, 1, 2**64 - 1], np.uint64), Split(val=0.25))["val"]
    array([1])
    """
    place = hashes / 2.0**64
    val, test = place < split.val, (place >= split.val) & (place < split.val + split.test)
    chosen = {"train": ~(val | test), "val": val, "test": test}
    return {name: np.flatnonzero(own) for name, own in chosen.items()}


@checked
def split_loader(loader: Loader, split: Split) -> dict[str, Loader]:
    """Split a loader into several with the same features, codes and options.

    Parameters
    ----------
    loader : Loader
        Of all the cells.
    split : Split
        The shares; its column has to be among the loader's `obs`.

    Returns
    -------
    mapping of str to Loader
        ``"train"`` draws its cells as `loader` does; ``"val"`` and ``"test"``, which are there if their shares are above 0, give each
        of theirs once, in the order of the query.

    Raises
    ------
    QueryError
        For a column that the loader does not have or that is not known of every cell, or a part without cells.

    Examples
    --------
    >>> loader = Loader(view.query(), obs=["cell_type", "donor"], as_="torch")  # doctest: +SKIP
    >>> parts = split_loader(loader, Split(val=0.2, by="donor"))  # doctest: +SKIP
    """
    plan = loader.plan
    shares = {"train": 1.0, "val": split.val, "test": split.test}
    parts = {name: rows for name, rows in split_rows(_hashes(plan, split), split).items() if shares[name]}
    for name, rows in parts.items():
        if not len(rows):
            raise QueryError(
                f"{split} leaves none of {plan.n_cells:,} cells for {name!r}; choose another seed, larger shares, or a column with "
                "more values."
            )
    return {name: loader.part(rows, drawn=name == "train") for name, rows in parts.items()}


def align_query(query: Query, loader: Loader) -> Query:
    """Make a query read the feature spaces, features and layers of a loader.

    Parameters
    ----------
    query : Query
        Which cells.
    loader : Loader
        What of them.

    Returns
    -------
    Query
        Features that none of its datasets measured are there too, as ones that nobody measured.

    Raises
    ------
    QueryError
        If an output is asked for and its datasets lack a layer.
    """
    spaces = loader.plan.spaces
    layers = tuple(dict.fromkeys(layer for space in spaces.values() for layer in space.layers))
    features = tuple((name, tuple(space.features.tolist())) for name, space in spaces.items() if len(space.features))
    asked = replace(query.spec, spaces=tuple(spaces), layers=layers, features=features, join="union")
    return Query(query.catalog, asked)


def _hashes(plan: BatchPlan, split: Split) -> NDArray[np.uint64]:
    if split.by is None:
        return hash_uids(
            pa.chunked_array([pa.array(plan.uids.astype(str).tolist(), pa.string())]), split.seed + _OWN_SEEDS
        )
    if split.by not in plan.columns:
        raise QueryError(f"The loader's obs are {list(plan.columns)}; add {split.by!r} to split by it.")
    known, codes = _values(split.by, plan.columns[split.by])
    texts = (f"split {split.seed} {value}".encode() for value in known)
    return np.array([int(hashlib.sha256(text).hexdigest()[:16], 16) for text in texts], np.uint64)[codes]


def _values(name: str, column: ObsColumn) -> tuple[list[object], NDArray[np.int64]]:
    """Return the distinct values of a column and the code of every cell; raise if one is missing."""
    if column.categories is not None:
        known, codes = column.categories.tolist(), column.values
        missing = codes < 0
    else:
        distinct, codes = np.unique(column.values, return_inverse=True)
        known, missing = distinct.tolist(), np.isnan(column.values.astype(np.float64))
    if missing.any():
        raise QueryError(
            f"{int(missing.sum()):,} of {len(codes):,} cells have no {name!r} to split by; leave them out, e.g. "
            f"query.where(~col({name!r}).is_null())."
        )
    return known, codes.astype(np.int64)
