"""What a query asks, and the plan of what is read for it, from which arrays into which columns. Frozen and picklable."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import QueryError
from raggedatlas.model.choices import Missing, OnMerge
from raggedatlas.model.frames import arrow_to_frame
from raggedatlas.model.spaces import FeatureSpace, PointerKind
from raggedatlas.store.arrays import ArraySpec
from raggedatlas.store.filters import Filter
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader, read_rows

if TYPE_CHECKING:
    import pandas as pd

DEFAULT, AS_GIVEN = "default", "as-given"
"""Mappings of features that are not named after a snapshot: the one of the queried snapshot, and none."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A reproducible random sample of cells.

    Parameters
    ----------
    n : int
        How many, in all or of each group.
    by : str or None
        Column whose values are the groups.
    seed : int
        Different seeds select different cells.
    """

    n: int
    by: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Search:
    """A ranked search over cells.

    Parameters
    ----------
    query : tuple of float, or str
        A vector, or text.
    column : str
        A cell column, or an embedding.
    k : int
        At most this many cells.
    metric : {"l2", "cosine", "dot"}
        Distance of vectors.
    """

    query: tuple[float, ...] | str
    column: str
    k: int = 10
    metric: str = "l2"


@dataclass(frozen=True, slots=True)
class QuerySpec:
    """All conditions of a query; rows are selected by filter, search, sample, order and limit, in this sequence.

    Parameters
    ----------
    filters : tuple of Filter
        All must hold.
    search, sample : Search or Sample, or None
        Which of the cells.
    order : tuple of (str, bool)
        Columns, and whether each descends.
    limit : int or None
        At most this many cells; 0 means none.
    spaces : tuple of str, or None
        Feature spaces; empty for no values, None for the usual one.
    features : tuple of (str or None, tuple of str)
        Feature space (None for the usual one) and names in the asked order.
    join : "union", "intersection" or int
        Which features a result over several datasets has; an int asks for at least so many datasets.
    layers : tuple of str
        Layers in the asked order; empty for the usual one.
    obs : tuple of str, or None
        Metadata columns; None for all.
    missing : {"zero", "nan", "drop"}
        Fill value of unmeasured features.
    results : tuple of str
        Results of models to add to `obsm`.
    centroids : tuple of (str, str)
        Geometries whose centroids are added, and their names in `obsm`.
    identity : str, int or tuple of (str, str)
        Which features count as the same: `DEFAULT`, `AS_GIVEN`, the label or number of a snapshot, or pairs of uids of genes, of which the
        first counts as the second.
    on_merge : {"counts", "sum", "refuse", "apart"}
        How columns of one dataset that are the same feature are combined.
    orthologs : str or None
        Organism as whose genes the one-to-one orthologs of other organisms count.
    """

    filters: tuple[Filter, ...] = ()
    search: Search | None = None
    sample: Sample | None = None
    order: tuple[tuple[str, bool], ...] = ()
    limit: int | None = None
    spaces: tuple[str, ...] | None = None
    features: tuple[tuple[str | None, tuple[str, ...]], ...] = ()
    join: str | int = "union"
    layers: tuple[str, ...] = ()
    obs: tuple[str, ...] | None = None
    missing: Missing = "zero"
    results: tuple[str, ...] = ()
    centroids: tuple[tuple[str, str], ...] = ()
    identity: str | int | tuple[tuple[str, str], ...] = DEFAULT
    on_merge: OnMerge = "counts"
    orthologs: str | None = None

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
        usual = {"missing": "zero", "identity": DEFAULT, "on_merge": "counts", "orthologs": None}
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
    """Return names that were passed one by one or as one list.

    Raises
    ------
    QueryError
        If there are none, or something else is among them.

    Examples
    --------
    >>> flatten_names("obs", (["donor", "tissue"],)), flatten_names("obs", ("donor",))
    (('donor', 'tissue'), ('donor',))
    """
    given = names[0] if len(names) == 1 and not isinstance(names[0], str) else names
    listed = tuple(given)
    wrong = [name for name in listed if not isinstance(name, str)]
    if wrong or not listed:
        raise QueryError(f"{call} takes names, one by one or as a list; got {wrong[0] if wrong else 'none'!r}.")
    return tuple(map(str, listed))


def check_count(call: str, n: object) -> int:
    """Read a number of cells.

    Raises
    ------
    QueryError
        If it is not an integer, or negative.

    Examples
    --------
    >>> check_count("limit", 3)
    3
    """
    # A bool is an `int` in Python: True would be taken for 1.
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0:
        raise QueryError(f"{call} takes a whole number from 0 on, not {n!r}.")
    return int(n)


@dataclass(frozen=True)
class InMemoryRows(ArrayReader):
    """Rows that are already in memory, in place of a stored array; `read_group_rows` reads either.

    Parameters
    ----------
    values : (n, width) array
        The rows.
    """

    values: NDArray[Any] = field(kw_only=True, repr=False, compare=False)

    @classmethod
    def of(cls, values: NDArray[Any], location: Location) -> "InMemoryRows":
        """Wrap an array."""
        # An `ArraySpec` refuses chunks of width 0.
        width = max(1, values.shape[1])
        spec = ArraySpec("held", (len(values), width), values.dtype.name, (1, width), None, "[]")
        return cls(location, spec, values=values)


def read_group_rows(reader: ArrayReader, rows: NDArray[np.int64]) -> NDArray[Any]:
    """Read rows of a stored array or of an in-memory one."""
    return reader.values[rows] if isinstance(reader, InMemoryRows) else read_rows(reader, rows)


@dataclass(frozen=True)
class ColumnCopy:
    """The column-sorted copy of a sparse group, of which the layers of a part are all there.

    Parameters
    ----------
    row_indptr : ArrayReader
        Bounds of the rows in the group's own arrays, ``csr/indptr``.
    indptr, indices : ArrayReader
        Bounds of the columns in the copy, and the row of every entry.
    layers : mapping of str to ArrayReader
        Values, by layer.
    """

    row_indptr: ArrayReader
    indptr: ArrayReader
    indices: ArrayReader
    layers: Mapping[str, ArrayReader]


@dataclass(frozen=True)
class GroupPlan:
    """One Zarr group of a part.

    Parameters
    ----------
    path : str
        The group's path in the Zarr store.
    layout_uid : str
        Its feature list; empty for spaces without features.
    indices : ArrayReader or None
        Columns of the entries; None for dense groups.
    layers : mapping of str to ArrayReader
        Values, by layer.
    copy : ColumnCopy or None
        Where the group has one.
    """

    path: str
    layout_uid: str
    indices: ArrayReader | None
    layers: Mapping[str, ArrayReader]
    copy: ColumnCopy | None = None

    @property
    def entry_bytes(self) -> int:
        """Stored bytes of one entry (sparse) or one row (dense), decoded."""
        readers = [*self.layers.values(), *([self.indices] if self.indices is not None else [])]
        return sum(np.dtype(r.spec.dtype).itemsize * int(np.prod(r.spec.row_shape)) for r in readers)


@dataclass(frozen=True)
class PartPlan:
    """Layers of one space that share their entries in every dataset, so that indices are read once for all.

    Parameters
    ----------
    layers : tuple of str
        Their names.
    groups : tuple of GroupPlan
        All groups that contain rows.
    code : (n_cells,) int32
        Group of each cell; -1 for none.
    start, end : (n_cells,) int64
        Entries (sparse) or rows (dense) of the cell in its group's arrays; equal where it has none.
    group_of : mapping of str to (n_datasets + 1,) int32
        Pointer column -> the group into which it points, by the position of a cell's dataset among those of the atlas; -1 where it is
        none of them. By it the places of other cells are found; parts of a plan do without.
    """

    layers: tuple[str, ...]
    groups: tuple[GroupPlan, ...]
    code: NDArray[np.int32]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    group_of: Mapping[str, NDArray[np.int32]] = field(default_factory=dict)

    def take(self, rows: NDArray[np.int64]) -> "PartPlan":
        """Keep some cells, in the order given."""
        return PartPlan(self.layers, self.groups, self.code[rows], self.start[rows], self.end[rows])

    def narrow(self) -> "PartPlan":
        """Drop groups and in-memory rows that no cell needs; one group stays if none is needed."""
        used = np.unique(self.code[self.code >= 0]).tolist() or [*range(len(self.groups))][:1]
        # The additional last entry is what code -1 finds, so that it stays -1.
        place = np.full(len(self.groups) + 1, -1, np.int32)
        place[used] = np.arange(len(used))
        start, end, groups = self.start.copy(), self.end.copy(), []
        for number in used:
            group, here = self.groups[number], self.code == number
            held = {n: r for n, r in group.layers.items() if isinstance(r, InMemoryRows)}
            if held:
                # The kept rows move to the front; they are taken out here, before `start` is renumbered below.
                layers = {n: InMemoryRows.of(r.values[start[here]], r.location) for n, r in held.items()}
                start[here] = np.arange(int(here.sum()))
                end[here] = start[here] + 1
                group = replace(group, layers=layers)
            groups.append(group)
        return PartPlan(self.layers, tuple(groups), place[self.code], start, end)


@dataclass(frozen=True)
class SpacePlan:
    """What is read of one feature space, and onto which columns.

    Parameters
    ----------
    name : str
        The requested name: a feature space or a pointer column.
    space : FeatureSpace
        Its definition.
    features : (n_features,) object array of str
        Feature uids in column order; empty for spaces without features.
    n_cols : int
        Columns of the result; 0 where rows have more than one axis.
    layouts : tuple of str
        Layouts of the touched datasets, sorted.
    measured : (n_layouts, n_features) bool
        Which columns each layout measured, after corrections of the registry.
    column_maps : mapping of str to (n_local,) int64
        Layout -> column of the result for each local column, -1 where it is left out; from `n_cols` on, a column that is
        added to another one, see `merged`.
    parts : tuple of PartPlan
        The layers.
    dtypes : mapping of str to numpy dtype
        Layer -> dtype of the result.
    layout_code : (n_cells,) int32
        Position of each cell's layout in `layouts`; -1 where the cell lacks the space or it has no features.
    present : (n_cells,) bool
        Whether the cell has this space.
    nan : bool
        Whether unmeasured values are NaN, else zero.
    merged : (n_more,) int64
        Column of the result to which each column from `n_cols` on is added while reading.
    repeated : (k,) int64
        Columns of the result that are sums in some layout; of features that are kept apart, their columns.
    """

    name: str
    space: FeatureSpace
    features: NDArray[np.object_]
    n_cols: int
    layouts: tuple[str, ...]
    measured: NDArray[np.bool_]
    column_maps: Mapping[str, NDArray[np.int64]]
    parts: tuple[PartPlan, ...]
    dtypes: Mapping[str, np.dtype[np.generic]]
    layout_code: NDArray[np.int32]
    present: NDArray[np.bool_]
    nan: bool = False
    merged: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    repeated: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def n_read(self) -> int:
        """Number of columns that are read, before those that are one feature are added up."""
        return self.n_cols + len(self.merged)

    @property
    def sparse(self) -> bool:
        """Whether results are CSR."""
        return self.space.kind is PointerKind.SPARSE

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers in the asked order."""
        return tuple(self.dtypes)

    def take(self, rows: NDArray[np.int64]) -> "SpacePlan":
        """Keep some cells, in the order given."""
        parts = tuple(part.take(rows) for part in self.parts)
        return replace(self, parts=parts, layout_code=self.layout_code[rows], present=self.present[rows])

    def narrow(self) -> "SpacePlan":
        """Drop groups and layouts that no cell has, so that a plan of few cells pickles small."""
        parts = tuple(part.narrow() for part in self.parts)
        kept = {group.layout_uid for part in parts for group in part.groups}
        used = np.array([uid in kept for uid in self.layouts], bool)
        place = np.append(np.where(used, np.cumsum(used) - 1, -1), -1).astype(np.int32)
        return replace(
            self,
            layouts=tuple(uid for uid in self.layouts if uid in kept),
            measured=self.measured[used] if len(used) else self.measured,
            column_maps={uid: column_map for uid, column_map in self.column_maps.items() if uid in kept},
            parts=parts,
            layout_code=place[self.layout_code],
        )

    def columns_of(self, layout_uid: str) -> NDArray[np.int64]:
        """Return the columns of the result that a layout has, ascending, (k,) int64."""
        column_map = self.column_maps[layout_uid]
        return np.unique(column_map[(column_map >= 0) & (column_map < self.n_cols)])

    def row_bytes(self) -> NDArray[np.int64]:
        """Estimate the bytes of each row in the result: an upper bound, reached when no column is left out.

        Returns
        -------
        (n_cells,) int64
        """
        total = np.zeros(len(self.present), np.int64)
        for part in self.parts:
            width = sum(self.dtypes[layer].itemsize for layer in part.layers)
            if self.sparse:
                # A row has at most one entry per column.
                entries = np.minimum(part.end - part.start, self.n_cols) if self.n_cols else part.end - part.start
                # Layout -1 finds the last layout: for a cell without the space that is too much, never too little.
                extra = (~self.measured).sum(axis=1)[self.layout_code] if self.nan and len(self.layouts) else 0
                entries = entries + extra
                # Columns and bounds of rows are int32, of results too large for that int64, for each layer its own.
                index = 4 if max(int(entries.sum()), self.n_cols) <= np.iinfo(np.int32).max else 8
                total += entries * (width + index * len(part.layers)) + 8 * len(part.layers)
            else:
                shapes = [r.spec.row_shape for g in part.groups for r in g.layers.values()]
                total += width * (self.n_cols or max((int(np.prod(shape)) for shape in shapes), default=0))
        return total

    def work_bytes(self) -> NDArray[np.int64]:
        """Estimate the bytes that reading each row takes: what is decoded of the widest part, and the row in the result.

        Returns
        -------
        (n_cells,) int64
        """
        decoded = np.zeros(len(self.present), np.int64)
        for part in self.parts:
            stored = max((group.entry_bytes for group in part.groups), default=0)
            # Parts are read one after the other, so only the widest is in memory with the result.
            np.maximum(decoded, (part.end - part.start) * stored, out=decoded)
        return decoded + self.row_bytes()


@dataclass(frozen=True, eq=False)
class VarTable:
    """The columns of a space: names first, as of `frame_to_arrow`."""

    table: pa.Table

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the frame."""
        return VarTable, (self.table,)

    @cached_property
    def _frame(self) -> "pd.DataFrame":
        return arrow_to_frame(self.table)

    def frame(self) -> "pd.DataFrame":
        """Return a frame that the caller owns; the texts of tens of thousands of features are turned into Python's once."""
        return self._frame.copy()

    def measured(self, space: SpacePlan) -> "pd.DataFrame":
        """Return which layout measured which feature, (n_vars, n_layouts) bool, layouts as columns."""
        import pandas as pd

        return pd.DataFrame(
            np.ascontiguousarray(space.measured.T), index=self._frame.index, columns=list(space.layouts)
        )


@dataclass(frozen=True)
class ReadPlan:
    """All that a reader needs, without the catalog; picklable for threads and processes.

    Parameters
    ----------
    obs : pyarrow.Table or LazyTable
        One row per cell in the order of the result: `uid`, `cell_name`, `dataset`, the asked columns with their facts.
    spaces : mapping of str to SpacePlan
        What is read, by name.
    n_without : int
        Cells that were chosen but have none of the spaces, and are left out.
    provenance : mapping of str to str
        Where this came from: uri, snapshot, label, query.
    results : mapping of str to SpacePlan
        Results of models to read as well, with the layer `VALUES`; NaN where a cell has none.
    obsm : mapping of str to SpacePlan
        Members of `obsm` that the datasets of the result share, with the layer `VALUES`; see `plan_elements`.
    colors : mapping of str to (n_categories,) object array
        ``<column>_colors`` for `uns`.
    var : VarTable or None
        The columns of the only space; None in a plan that is not for an AnnData.
    modalities : mapping of str to ReadPlan
        In a plan for a MuData, one plan for each space, of the cells that have it.
    """

    obs: pa.Table
    spaces: Mapping[str, SpacePlan]
    n_without: int = 0
    provenance: Mapping[str, str | int] = field(default_factory=dict)
    results: Mapping[str, SpacePlan] = field(default_factory=dict)
    obsm: Mapping[str, SpacePlan] = field(default_factory=dict)
    colors: Mapping[str, NDArray[np.object_]] = field(default_factory=dict)
    var: VarTable | None = None
    modalities: "Mapping[str, ReadPlan]" = field(default_factory=dict)

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return int(self.obs.num_rows)

    def part(self, start: int, stop: int) -> "ReadPlan":
        """Return the plan of the cells ``[start, stop)``, without the groups that only other cells need."""
        rows = np.arange(start, stop)
        # These plans are for `read_batches`, which reads spaces and results but no `obsm`; the text of a query may be long.
        return replace(
            self,
            obs=self.obs.take(pa.array(rows)),
            spaces={name: space.take(rows).narrow() for name, space in self.spaces.items()},
            results={name: space.take(rows).narrow() for name, space in self.results.items()},
            provenance={},
        )

    def single(self) -> SpacePlan:
        """Return the only space."""
        (space,) = self.spaces.values()
        return space


def refuse_arrays(space: SpacePlan, what: str) -> None:
    """Raise if the cells of a space hold more than vectors.

    Raises
    ------
    QueryError
        Naming the way out.
    """
    if space.space.rank != 1:
        raise QueryError(
            f"{what} holds one vector per cell, {space.name!r} has arrays of {space.space.rank} axes; read it with .batches(n)."
        )
