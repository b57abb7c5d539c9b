"""Reports of operations, and inspections of files."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from math import prod
from pathlib import Path
from typing import Any, Literal, cast

from raggedatlas.model.choices import StoredAs
from raggedatlas.model.shown import Shown


class Report(Shown):
    """Base of reports: plain values for ``--json``; Python, notebooks and the command all show the text of `repr`."""

    # A base class without slots would give the subclasses, which have slots, a `__dict__`.
    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dictionaries, lists and plain values, as ``--json`` prints it."""
        return asdict(cast("Any", self))


_SHOWN = 20
"""Groups of arrays that a report names as text."""

ColumnOrder = Literal["file", "detected", "shared"]

Fate = Literal["kept", "renamed", "cast", "linked", "refused", "left out"]

Done = Literal["added", "skipped", "replaced"]

Status = Literal[Done, "dry run"]


_ORDERS: dict[ColumnOrder, str] = {
    "file": "",
    "detected": ", columns ordered by detection",
    "shared": ", columns ordered as in a layout that is there",
}


@dataclass(frozen=True, slots=True)
class ColumnReport:
    """What happened to one obs column, layer or other element."""

    name: str  # in the source
    fate: Fate
    stored_as: str = ""  # its stored name; empty when it is not stored
    note: str = ""  # the reason, or how to change the outcome


@dataclass(frozen=True, slots=True)
class SpaceReport:
    """What one feature space received."""

    space: str
    group: str
    layout_uid: str  # of the ordered feature list
    layers: tuple[str, ...]
    n_features: int
    n_new_features: int  # that the registry did not know
    n_entries: int  # stored entries
    # As in the file, by how many cells detect them, or as in the layout of a dataset with the same features.
    column_order: ColumnOrder = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddReport(Report):
    """What `add` did with one source, or would do (``dry_run``): what the reports of all kinds of sources have.

    Parameters
    ----------
    name : str
        Of the dataset, the result or the geometry.
    status : {"added", "skipped", "replaced", "dry run"}
        What happened.
    n_cells : int
        Cells of the dataset, or cells that the result or geometry is attached to.
    content_hash, source : str
        Of what was added, and where it came from.
    notes : tuple of str
        What else there is to know, one line each.
    """

    name: str
    status: Status
    n_cells: int
    content_hash: str = ""
    source: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestReport(AddReport):
    """What `add` did with a source of cells, or would do (``dry_run``).

    Parameters
    ----------
    dataset_uid : str
        The dataset; empty where nothing was written.
    spaces : tuple of SpaceReport
        Per Zarr group.
    columns : tuple of ColumnReport
        Every obs column.
    elements : tuple of ColumnReport
        Every other element: layers, raw, obsm, uns, ...
    name, status, n_cells, content_hash, source, notes
        See `AddReport`; notes are about features in several columns, entries summed, ids and symbols chosen.
    """

    dataset_uid: str
    spaces: tuple[SpaceReport, ...] = ()
    columns: tuple[ColumnReport, ...] = ()
    elements: tuple[ColumnReport, ...] = ()

    def __repr__(self) -> str:
        """Return the report as lines of text."""
        lines = [f"{self.name}: {self.status}, {self.n_cells:,} cells, dataset {self.dataset_uid or '(none)'}"]
        for s in self.spaces:
            # Spaces without features, such as image tiles, have no layout.
            counted = f"{s.n_features:,} features ({s.n_new_features:,} new), " if s.layout_uid else ""
            lines.append(
                f"  {s.space} ({', '.join(s.layers)}): {counted}{s.n_entries:,} entries{_ORDERS[s.column_order]}"
            )
        # A 10x file has six; a line each would hide what else there is to read.
        left = [row for row in self.elements if row.fate == "left out"]
        folded = left if len(left) > 2 else []
        for title, rows in (("columns", self.columns), ("elements", self.elements)):
            for row in rows:
                if row.fate != "kept" and row not in folded:
                    arrow = f" -> {row.stored_as}" if row.stored_as else ""
                    lines.append(f"  {title[:-1]} {row.name}{arrow}: {row.fate}{'; ' + row.note if row.note else ''}")
        if folded:
            lines.append(
                f"  left out: {', '.join(row.name + (f' ({row.note})' if row.note else '') for row in folded)}"
            )
        lines.extend(f"  {note}" for note in self.notes)
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultReport(AddReport):
    """What `add` did with a model's result, or would do (``dry_run``).

    Parameters
    ----------
    kind, space, column : str
        ``space`` or ``vector``, and its location.
    width, dtype : int, str
        Values of a cell.
    n_datasets : int
        Datasets of the cells that have one.
    name, status, n_cells, content_hash, source, notes
        See `AddReport`; notes are about ids left out, cells without a result, the index and its recall.
    """

    kind: StoredAs
    space: str
    column: str
    width: int
    dtype: str
    n_datasets: int

    def __repr__(self) -> str:
        """Return the report as lines of text."""
        where = f"feature space {self.space}" if self.kind == "space" else "vectors in the cell table"
        first = f"{self.name}: {self.status}, {self.n_cells:,} cells of {self.n_datasets:,} datasets, {self.width} x {self.dtype}, {where}"
        return "\n".join([first, *(f"  {note}" for note in self.notes)])


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometryReport(AddReport):
    """What `add` did with geometry, or would do (``dry_run``).

    Parameters
    ----------
    space, column, zarr_group : str
        Its feature space, and the location of its pointers and shapes.
    types : tuple of str
        Geometry types.
    n_objects, n_vertices, n_levels : int
        Of the store.
    n_new_cells, n_datasets : int
        Cells with a shape that are new, and datasets of all cells that have one.
    n_bytes : int
        Of the store.
    dataset_uid : str
        Of the new cells; empty without any.
    name, status, n_cells, content_hash, source, notes
        See `AddReport`; notes are about objects and cells left out, points of no cell.
    """

    space: str
    column: str
    zarr_group: str
    types: tuple[str, ...]
    n_objects: int
    n_vertices: int
    n_levels: int
    n_new_cells: int
    n_datasets: int
    n_bytes: int = 0
    dataset_uid: str = ""

    def __repr__(self) -> str:
        """Return the report as lines of text."""
        fresh = f" ({self.n_new_cells:,} new)" if self.n_new_cells else ""
        first = (
            f"{self.name}: {self.status}, {self.n_cells:,} cells{fresh} of {self.n_datasets:,} datasets, {self.n_objects:,} objects "
            f"({', '.join(self.types)}), {self.n_vertices:,} vertices, feature space {self.space}"
        )
        return "\n".join([first, *(f"  {note}" for note in self.notes)])


@dataclass(frozen=True, slots=True)
class AnnotationColumnReport:
    """What `annotate` did with one column."""

    name: str  # as results show it
    # Whether the atlas had no such column, had one that got values, or has all the values already.
    status: Literal["new", "merged", "unchanged"]
    n_values: int = 0  # cells that got a value
    n_same: int = 0  # cells that had the same value
    n_replaced: int = 0  # cells that had another value and got the new one
    n_kept: int = 0  # cells that had another value and kept it


@dataclass(frozen=True, slots=True)
class AnnotationReport(Report):
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

    def __repr__(self) -> str:
        """Return the report as lines of text."""
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


@dataclass(frozen=True, slots=True)
class MaintenanceReport(Report):
    """What `gc`, `repair`, `drop_dataset`, `delete_cells` or `purge` removed or would remove.

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
    datasets : mapping of str to int
        Dataset uid -> its cells, of `delete_cells`.
    """

    groups: tuple[str, ...] = ()
    n_cells: int = 0
    n_bytes: int = 0
    dry_run: bool = False
    kept: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    datasets: Mapping[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return the report as lines of text."""
        counts = ((self.n_cells, "cells"), (len(self.groups), "groups of arrays"), (self.n_bytes, "bytes"))
        found = ", ".join(f"{n:,} {what}" for n, what in counts if n) or ("" if self.notes else "nothing")
        kept = (f"kept for a running add: {group}" for group in self.kept)
        head = ": ".join(filter(None, ("Dry run" if self.dry_run else "Done", found)))
        more = [f"... and {len(self.groups) - _SHOWN:,} more groups"] if len(self.groups) > _SHOWN else []
        return "\n".join([head, *(f"  {line}" for line in (*self.groups[:_SHOWN], *more, *kept, *self.notes))])


@dataclass(frozen=True, slots=True)
class Difference(Report):
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
    assets_added, assets_removed : mapping of str to tuple of str
        ``"results"``, ``"geometry"``, ``"annotations"`` or another kind -> names with uids; what was replaced is removed and added.
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
    assets_added: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    assets_removed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return the differences as lines of text, with the first names of many."""
        lines = []
        for name, value in self.to_dict().items():
            shown = name.replace("_", " ")
            by_space = (
                {f"{space} {shown}": names for space, names in value.items()}
                if isinstance(value, dict)
                else {shown: value}
            )
            lines += [
                f"  {what}: {_few(found)}" for what, found in by_space.items() if found and name not in ("old", "new")
            ]
        return _compared(self.old, self.new, lines)


@dataclass(frozen=True, slots=True)
class FileDifference(Report):
    """In which files two snapshots differ, of one atlas or two.

    Parameters
    ----------
    old, new : int
        The snapshots.
    old_root, new_root : str
        Their root hashes. Snapshots of equal root hashes are equal.
    added, removed, changed : tuple of str
        Paths below the atlas: files of tables, frames, arrays and geometry stores.
    """

    old: int
    new: int
    old_root: str
    new_root: str
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether both have the same files; they may still differ in number, label and time."""
        return not (self.added or self.removed or self.changed)

    def __repr__(self) -> str:
        """Return the paths as lines of text, with a sign each."""
        signs = {"-": self.removed, "+": self.added, "~": self.changed}
        return _compared(self.old, self.new, [f"{sign} {path}" for sign, paths in signs.items() for path in paths])


def _compared(old: int, new: int, lines: list[str]) -> str:
    return "\n".join([f"Snapshots {old} and {new}:", *lines]) if lines else f"Snapshots {old} and {new} do not differ."


def _few(found: int | tuple[str, ...]) -> str:
    if isinstance(found, int):
        return f"{found:,}"
    return ", ".join(found[:5]) + (f", ... ({len(found):,} in all)" if len(found) > 5 else "")


FOLDED = {
    "csr_matrix", "csc_matrix", "categorical", "nullable-integer", "nullable-boolean", "nullable-string-array", "awkward-array",
}  # fmt: skip
"""Encodings whose members are parts of one value and are displayed on one line."""


_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a file."""

    path: str
    name: str  # last part of the path
    encoding: str  # type and version as declared, "" where it declares none
    kind: str  # what it is: the declared type, or what it looks like
    shape: tuple[int, ...] | None = None  # None for a mapping
    dtype: str = ""  # of its values; of a group, of its main part
    chunks: tuple[int, ...] | None = None  # what is decoded at once
    shards: tuple[int, ...] | None = None  # what is stored as one object
    compression: str = ""  # filters and compressors in the order of writing, "" for none
    n_bytes: int = 0  # decoded size without variable-length text
    n_stored: int = 0  # bytes in the file; text of variable length in HDF5 is not counted
    n_entries: int | None = None  # stored entries of a sparse matrix
    fault: str = ""  # why it cannot be read, "" where it can
    children: "tuple[Element, ...]" = ()  # what a group holds

    @property
    def shown(self) -> "tuple[Element, ...]":
        """The children that have a line of their own."""
        # Without a declared encoding the kind is a guess, so the members are displayed.
        return () if self.encoding and self.kind in FOLDED else self.children

    def facts(self) -> str:
        """Return a one-line description."""
        parts = [self.encoding or (f"({self.kind}, undeclared)" if self.kind else "")]
        if self.shape is not None:
            parts.append(" x ".join(f"{n:,}" for n in self.shape) or "one value")
        parts.append(self.dtype)
        if self.n_entries is not None:
            cells = prod(self.shape or (0,))
            parts.append(f"{self.n_entries:,} entries" + (f" ({self.n_entries / cells:.1%})" if cells else ""))
        if self.chunks:
            parts.append(f"chunks {_sizes(self.chunks)}" + (f" in shards {_sizes(self.shards)}" if self.shards else ""))
        parts.append(self.compression)
        if self.n_stored or self.n_bytes:
            packed = self.compression and 0 < self.n_stored < self.n_bytes
            parts.append(size_text(self.n_stored) + (f" of {size_text(self.n_bytes)}" if packed else ""))
        parts.append(f"UNREADABLE: {self.fault}" if self.fault else "")
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `inspect` found; prints as a tree, and shows as one in a notebook.

    Parameters
    ----------
    path : str
        The file.
    store : str
        ``"HDF5"``, ``"Zarr 2"`` or ``"Zarr 3"``.
    n_bytes : int
        Its size.
    root : Element
        Its top.
    """

    path: str
    store: str
    n_bytes: int
    root: Element

    def lines(self, depth: int | None = None) -> Iterator[tuple[str, Element]]:
        """Iterate over the tree.

        Parameters
        ----------
        depth : int, optional
            How many levels below the root.

        Yields
        ------
        branch : str
            What is drawn before the name.
        element : Element
            The element.
        """
        yield from _lines(self.root, "", depth)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain Python."""
        return asdict(self)

    def text(self, depth: int | None = None) -> str:
        """Draw the tree, or as many of its levels."""
        head = f"{Path(self.path).name}: {self.store}, {size_text(self.n_bytes)}; {self.root.facts()}"
        lines = (f"{branch}{element.name}: {element.facts()}" for branch, element in self.lines(depth))
        return "\n".join([head, *lines])

    def __str__(self) -> str:
        """Draw the tree."""
        return self.text()

    def _repr_html_(self) -> str:
        head = f"<b>{escape(Path(self.path).name)}</b> {escape(self.store)}, {size_text(self.n_bytes)}"
        inner = "".join(_html(child, opened=True) for child in self.root.shown)
        return f'<div style="font-family:monospace;line-height:1.5">{head}{_html_facts(self.root)}{inner}</div>'


def size_text(n: int) -> str:
    """Write a number of bytes.

    Examples
    --------
    >>> size_text(0), size_text(999), size_text(12_345), size_text(1_234_567_890)
    ('0 B', '999 B', '12.3 kB', '1.23 GB')
    """
    value, unit = float(n), 0
    # From 999.5 on, three digits would be rounded to 1e+03.
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{n} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def _sizes(sizes: tuple[int, ...] | None) -> str:
    return "x".join(f"{n:,}" for n in sizes or ())


def _lines(element: Element, stem: str, depth: int | None) -> Iterator[tuple[str, Element]]:
    if depth is not None and depth <= 0:
        return
    children = element.shown
    for i, child in enumerate(children):
        last = i == len(children) - 1
        yield stem + ("└── " if last else "├── "), child
        yield from _lines(child, stem + ("    " if last else "│   "), None if depth is None else depth - 1)


def _html(element: Element, *, opened: bool) -> str:
    line = f"<b>{escape(element.name)}</b>{_html_facts(element)}"
    if not element.shown:
        return f'<div style="margin-left:2.4em">{line}</div>'
    inner = "".join(_html(child, opened=False) for child in element.shown)
    state = " open" if opened else ""
    return (
        f'<details{state} style="margin-left:1.2em"><summary style="cursor:pointer">{line}</summary>{inner}</details>'
    )


def _html_facts(element: Element) -> str:
    color = "#b00020" if element.fault else "#666"
    return f' <span style="color:{color}">{escape(element.facts())}</span>'
