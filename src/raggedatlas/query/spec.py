"""What a query asks: frozen, picklable and of JSON's types."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from raggedatlas.errors import QueryError
from raggedatlas.model.choices import FeatureNames, Missing, OnMerge
from raggedatlas.store.filters import Filter

DEFAULT, AS_GIVEN = "default", "as-given"
"""Mappings of features that are not named after a snapshot: the one of the queried snapshot, and none."""

AND = "+"
"""Between the parts of a split that one cell is in."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A reproducible random sample of cells."""

    n: int  # in all, or of each group
    by: str | None = None  # column whose values are the groups
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Search:
    """A ranked search over cells."""

    query: tuple[float, ...] | str  # a vector, or text
    column: str  # a cell column, or an embedding
    k: int = 10  # at most this many cells
    metric: str = "l2"  # "l2", "cosine" or "dot"


@dataclass(frozen=True, slots=True)
class QuerySpec:
    """All conditions of a query; rows are selected by filter, search, sample, order and limit, in this sequence."""

    filters: tuple[Filter, ...] = ()  # all must hold
    search: Search | None = None
    sample: Sample | None = None
    order: tuple[tuple[str, bool], ...] = ()  # columns, and whether each descends
    limit: int | None = None  # at most this many cells; 0 means none
    spaces: tuple[str, ...] | None = None  # empty for no values, None for the usual one
    # feature space (None for the usual one) and names in the asked order
    features: tuple[tuple[str | None, tuple[str, ...]], ...] = ()
    join: str | int = "union"  # "union", "intersection", or features that at least so many datasets have
    layers: tuple[str, ...] = ()  # in the asked order; empty for the usual one
    obs: tuple[str, ...] | None = None  # metadata columns; None for all
    missing: Missing = "zero"  # what becomes of features that were not measured
    results: tuple[str, ...] = ()  # results of models to add to `obsm`
    centroids: tuple[tuple[str, str], ...] = ()  # geometries whose centroids are added, and their names in `obsm`
    # what counts as the same: `DEFAULT`, `AS_GIVEN`, label or number of a snapshot, or gene uids: first as second
    identity: str | int | tuple[tuple[str, str], ...] = DEFAULT
    on_merge: OnMerge = "counts"  # how columns of one dataset that are the same feature are combined
    orthologs: str | None = None  # organism as whose genes the one-to-one orthologs of other organisms count
    names: FeatureNames = "id"  # what the features of the result are named by

    def to_dict(self) -> dict[str, Any]:
        """Return every part in JSON's types; `Query.from_dict` reads them."""
        return {part.name: _to_json(getattr(self, part.name)) for part in fields(self)}

    def summary(self) -> dict[str, Any]:
        """Return the parts that differ from the default query for people, long lists cut."""
        parts: dict[str, Any] = {}
        if self.filters:
            parts["where"] = " AND ".join(repr(f) for f in self.filters)
        if self.search is not None:
            what = self.search.query if isinstance(self.search.query, str) else f"vector of {len(self.search.query)}"
            parts["search"] = f"{what} in {self.search.column}, {self.search.k} nearest ({self.search.metric})"
        if self.sample is not None:
            each = "" if self.sample.by is None else f" of each {self.sample.by}"
            parts["sample"] = f"{self.sample.n}{each}, seed {self.sample.seed}"
        if self.limit is not None:
            parts["limit"] = self.limit
        named = {
            "order_by": [f"{name} descending" if down else name for name, down in self.order],
            "spaces": ("none",) if self.spaces == () else self.spaces or (),
            "layers": self.layers,
            "with_results": self.results,
            "with_centroids": [f"{name} as {key}" for name, key in self.centroids],
        }
        parts |= {key: ", ".join(names) for key, names in named.items() if names}
        for space, names in self.features:
            shown = ", ".join(names[:20]) + (f", ... {len(names)} in all" if len(names) > 20 else "")
            parts["features" if space is None else f"features of {space}"] = shown
        if self.join != "union":
            parts["join"] = self.join if isinstance(self.join, str) else f"min_datasets={self.join}"
        if self.obs is not None:
            parts["obs"] = ", ".join(self.obs)
        usual = {"missing": "zero", "identity": DEFAULT, "on_merge": "counts", "orthologs": None, "names": "id"}
        parts |= {key: getattr(self, key) for key, value in usual.items() if getattr(self, key) != value}
        return parts | ({"identity": self.describe_identity()} if "identity" in parts else {})

    def describe_identity(self) -> str:
        """Describe the requested mapping of features."""
        if not isinstance(self.identity, tuple):
            return str(self.identity)
        return ", ".join(f"{feature} = {target}" for feature, target in self.identity)

    def describe(self) -> str:
        """Describe the query in one line."""
        parts = [f"{key} {value}" for key, value in self.summary().items()]
        return "; ".join(parts) if parts else "all cells"


def _to_json(value: Any) -> Any:  # noqa: ANN401  (a part of a query)
    if isinstance(value, Filter):
        return value.to_dict()
    if isinstance(value, Sample | Search):
        return {part.name: _to_json(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, np.generic):
        return value.item()
    return [*map(_to_json, value)] if isinstance(value, tuple) else value


def flatten_names(call: str, names: Sequence[Any]) -> tuple[str, ...]:
    """Return names that were passed one by one or as one list; there must be one at least."""
    given = names[0] if len(names) == 1 and not isinstance(names[0], str) else names
    listed = tuple(given)
    wrong = [name for name in listed if not isinstance(name, str)]
    if wrong or not listed:
        raise QueryError(f"{call} takes names, one by one or as a list; got {wrong[0] if wrong else 'none'!r}.")
    return tuple(map(str, listed))


def check_count(call: str, n: object) -> int:
    """Read a number of cells: a whole number from 0 on, not a bool."""
    # A bool is an `int` in Python: True would be taken for 1.
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0:
        raise QueryError(f"{call} takes a whole number from 0 on, not {n!r}.")
    return int(n)
