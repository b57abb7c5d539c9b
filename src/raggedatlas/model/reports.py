"""What an operation did, said in full: columns, layers, features, problems."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, Literal

ColumnOrder = Literal["file", "detected", "shared"]

Fate = Literal["kept", "renamed", "cast", "refused", "left out"]


_ORDERS: dict[ColumnOrder, str] = {
    "file": "",
    "detected": ", columns ordered by detection",
    "shared": ", columns ordered as in a layout that is there",
}


@dataclass(frozen=True, slots=True)
class ColumnReport:
    """What became of one obs column, layer or other element.

    Parameters
    ----------
    name : str
        Its name in the source.
    fate : {"kept", "renamed", "cast", "refused", "left out"}
        What was done.
    stored_as : str
        Where it is now; empty when it is nowhere.
    note : str
        Why, or how to have it otherwise.
    """

    name: str
    fate: Fate
    stored_as: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class SpaceReport:
    """What one feature space received.

    Parameters
    ----------
    space, group, layout_uid : str
        Feature space, Zarr group, and ordered feature list.
    layers : tuple of str
        Layers in the group.
    n_features, n_new_features, n_entries : int
        Columns, columns that the registry did not know, and stored entries.
    n_bytes : int
        Bytes of the arrays on disk.
    column_order : {"file", "detected", "shared"}
        How the stored columns are ordered: as in the file, by how many cells detect them, or as in the layout of a dataset
        with the same features.
    """

    space: str
    group: str
    layout_uid: str
    layers: tuple[str, ...]
    n_features: int
    n_new_features: int
    n_entries: int
    n_bytes: int = 0
    column_order: ColumnOrder = "file"


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What `add` did with one source, or would do (``dry_run``).

    Parameters
    ----------
    dataset_uid, name, source, content_hash : str
        The dataset.
    n_cells : int
        Its cells.
    status : {"added", "skipped", "replaced", "dry run"}
        What happened.
    spaces : tuple of SpaceReport
        Per Zarr group.
    columns : tuple of ColumnReport
        Every obs column.
    elements : tuple of ColumnReport
        Every other element: layers, raw, obsm, uns, ...
    notes : tuple of str
        Everything else worth knowing: features in several columns, entries summed, ids and symbols chosen.
    """

    dataset_uid: str
    name: str
    source: str
    content_hash: str
    n_cells: int
    status: Literal["added", "skipped", "replaced", "dry run"]
    spaces: tuple[SpaceReport, ...] = ()
    columns: tuple[ColumnReport, ...] = ()
    elements: tuple[ColumnReport, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Give the report as plain dictionaries and lists, as ``--json`` prints it."""
        return asdict(self)

    def __repr__(self) -> str:
        """Say it in lines."""
        lines = [f"{self.name}: {self.status}, {self.n_cells:,} cells, dataset {self.dataset_uid or '(none)'}"]
        lines += [
            f"  {s.space} ({', '.join(s.layers)}): {s.n_features:,} features ({s.n_new_features:,} new), {s.n_entries:,} entries"
            f"{_ORDERS[s.column_order]}"
            for s in self.spaces
        ]
        for title, rows in (("columns", self.columns), ("elements", self.elements)):
            for row in rows:
                if row.fate != "kept":
                    arrow = f" -> {row.stored_as}" if row.stored_as else ""
                    lines.append(f"  {title[:-1]} {row.name}{arrow}: {row.fate}{'; ' + row.note if row.note else ''}")
        lines.extend(f"  {note}" for note in self.notes)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"


@dataclass(frozen=True, slots=True)
class ResultReport:
    """What `add` did with a model's result, or would do (``dry_run``).

    Parameters
    ----------
    name, kind, space, column : str
        What it is called, ``space`` or ``vector``, and where it lies.
    width, dtype : int, str
        Values of a cell.
    n_cells, n_datasets : int
        Cells that have one, and datasets that these are of.
    status : {"added", "skipped", "replaced", "dry run"}
        What happened.
    content_hash, source : str
        Of ids and values, and the result folder.
    notes : tuple of str
        Everything else worth knowing: ids left out, cells without a result, the index and its recall.
    """

    name: str
    kind: Literal["space", "vector"]
    space: str
    column: str
    width: int
    dtype: str
    n_cells: int
    n_datasets: int
    status: Literal["added", "skipped", "replaced", "dry run"]
    content_hash: str = ""
    source: str = ""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Give the report as plain values, as ``--json`` prints it."""
        return asdict(self)

    def __repr__(self) -> str:
        """Say it in lines."""
        where = f"feature space {self.space}" if self.kind == "space" else "vectors in the cell table"
        first = f"{self.name}: {self.status}, {self.n_cells:,} cells of {self.n_datasets:,} datasets, {self.width} x {self.dtype}, {where}"
        return "\n".join([first, *(f"  {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"


@dataclass(frozen=True, slots=True)
class AnnotationColumnReport:
    """What `annotate` did with one column.

    Parameters
    ----------
    name : str
        As results show it.
    status : {"new", "merged", "unchanged"}
        Whether the atlas had no such column, had one that got values, or has all the values already.
    n_values : int
        Cells that got a value.
    n_same, n_replaced, n_kept : int
        Cells that had the same value, that had another and got the new one, and that had another and kept it.
    """

    name: str
    status: Literal["new", "merged", "unchanged"]
    n_values: int = 0
    n_same: int = 0
    n_replaced: int = 0
    n_kept: int = 0


@dataclass(frozen=True, slots=True)
class AnnotationReport:
    """What `annotate` did, or would do (``dry_run``).

    Parameters
    ----------
    name : str
        Of the annotation.
    status : {"added", "unchanged", "dry run"}
        What happened; ``unchanged`` means that the atlas has all the values, and nothing was written.
    n_cells, n_unknown : int
        Cells of the atlas that the source names, and rows of the source that name none.
    columns : tuple of AnnotationColumnReport
        One for each column.
    source : str
        The file, or the type of the object.
    snapshot : int or None
        Snapshot from which the cells were queried, where the source says so.
    results : tuple of ResultReport
        Members of `obsm`.
    """

    name: str
    status: Literal["added", "unchanged", "dry run"]
    n_cells: int
    n_unknown: int
    columns: tuple[AnnotationColumnReport, ...]
    source: str = ""
    snapshot: int | None = None
    results: tuple[ResultReport, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, as ``--json`` prints it."""
        return asdict(self)

    def __repr__(self) -> str:
        """Return it as lines."""
        unknown = f", {self.n_unknown:,} rows name no cell" if self.n_unknown else ""
        lines = [f"{self.name}: {self.status}, {self.n_cells:,} cells{unknown}"]
        for column in self.columns:
            counts = [
                f"{count:,} {word}"
                for word, count in (
                    ("values", column.n_values), ("of them replaced", column.n_replaced), ("same", column.n_same),
                    ("kept", column.n_kept),
                )
                if count or word == "values"
            ]  # fmt: skip
            lines.append(f"  {column.name}: {column.status}, {', '.join(counts)}")
        return "\n".join([*lines, *(repr(result) for result in self.results)])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that `validate` found wrong.

    Parameters
    ----------
    rule : str
        Stable short name, for instance ``pointer-bounds``.
    place : str
        Table, dataset or group.
    message : str
        What is wrong.
    mend : str
        The way out.
    """

    rule: str
    place: str
    message: str
    mend: str = ""

    def __str__(self) -> str:
        """Say it in one line."""
        return f"{self.place}: {self.message} [{self.rule}]{' ' + self.mend if self.mend else ''}"


@dataclass(frozen=True, slots=True)
class MaintenanceReport:
    """What `gc`, `repair`, `drop_dataset` or `purge` removed or would remove.

    Parameters
    ----------
    groups : tuple of str
        Zarr groups.
    n_cells : int
        Rows of the cell table.
    n_bytes : int
        Bytes of arrays.
    dry_run : bool
        Whether it only looked.
    kept : tuple of str
        Groups left alone because an `add` may be writing them.
    notes : tuple of str
        Everything else.
    """

    groups: tuple[str, ...] = ()
    n_cells: int = 0
    n_bytes: int = 0
    dry_run: bool = False
    kept: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Give the report as plain dictionaries and lists."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Difference:
    """What changed between two snapshots.

    Parameters
    ----------
    old, new : int
        The snapshots.
    datasets_added, datasets_removed : tuple of str
        Names with uids.
    cells_added, cells_removed, cells_changed : int
        By cell uid; changed means that a metadata value differs.
    features_added, features_removed, features_changed : mapping of str to tuple of str
        Feature space -> ids or symbols.
    identity_added, identity_removed : mapping of str to tuple of str
        Feature space -> features that count as another, or no longer do, with their evidence.
    columns_added, columns_removed : tuple of str
        Columns of cells, as results show them.
    results_added, results_removed : tuple of str
        Names with uids; a result that was replaced is removed and added.
    geometry_added, geometry_removed : tuple of str
        Names with uids; likewise.
    annotations_added, annotations_removed : tuple of str
        Names with uids.
    """

    old: int
    new: int
    datasets_added: tuple[str, ...] = ()
    datasets_removed: tuple[str, ...] = ()
    cells_added: int = 0
    cells_removed: int = 0
    cells_changed: int = 0
    features_added: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    features_removed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    features_changed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    identity_added: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    identity_removed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    columns_added: tuple[str, ...] = ()
    columns_removed: tuple[str, ...] = ()
    results_added: tuple[str, ...] = ()
    results_removed: tuple[str, ...] = ()
    geometry_added: tuple[str, ...] = ()
    geometry_removed: tuple[str, ...] = ()
    annotations_added: tuple[str, ...] = ()
    annotations_removed: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Give the difference as plain dictionaries and lists."""
        return asdict(self)
