"""Add geometry, and transcripts with their counts: the store first, then the pointers of cells, the record last (seed 002)."""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from raggedatlas.catalog.assets import (
    GEOMETRY_ASSETS,
    Commit,
    clear_orphaned_pointers,
    commit_records,
    delete_cells_of_datasets,
    groups_in_use,
    is_visible,
    read_records,
    release_lease,
    take_lease,
)
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.cells import CellColumn, add_cell_columns, cell_rows, write_frame
from raggedatlas.errors import (
    AtlasError,
    ConflictError,
    CorruptError,
    DuplicateError,
    NotFoundError,
    SourceError,
    StoreError,
)
from raggedatlas.formats.registry import open_source
from raggedatlas.ingest.columns import ColumnPlan, column_values, plan_columns
from raggedatlas.ingest.commit import add_sources
from raggedatlas.ingest.geometry_plan import (
    GeometryPlan,
    GeometrySource,
    check_duplicates,
    object_centroids,
    open_geometry,
    owner_codes,
    plan_geometry,
)
from raggedatlas.ingest.options import (
    GeometryOptions,
    IngestOptions,
    check_options,
    open_progress,
    read_options,
)
from raggedatlas.model.arguments import Progress, checked, no_progress
from raggedatlas.model.assets import GeometryRecord
from raggedatlas.model.frames import INDEX
from raggedatlas.model.ids import new_uids
from raggedatlas.model.protocols import Source
from raggedatlas.model.records import DatasetFacts, DatasetRecord
from raggedatlas.model.reports import GeometryReport, IngestReport
from raggedatlas.model.spaces import AXES, GeometryPointer, PointerKind, pointer_field
from raggedatlas.store.location import digest_files, list_files, read_file
from raggedatlas.store.sql import equals, is_not_null
from raggedatlas.store.tables import Tables, update_columns
from raggedatlas.vectors.shapes import Attribute, Shapes
from raggedatlas.vectors.writer import publish_files, write

if TYPE_CHECKING:
    from anndata import AnnData


GEOMETRY_STEPS = ("plan", "lease", "store", "columns", "pointers", "cells", "record", "done")
"""The steps of adding geometry, in order; each is reported just before the next begins."""


@dataclass(frozen=True)
class NewCells:
    """Cells that are made of objects.

    Parameters
    ----------
    n : int
        How many; 0 for none.
    name : str
        Of their dataset.
    frame : pyarrow.Table
        Their names and attributes.
    plans : sequence of ColumnPlan
        What becomes of the attributes.
    left : tuple of str
        Attributes that become no columns.
    """

    n: int
    name: str
    frame: pa.Table
    plans: Sequence[ColumnPlan] = ()
    left: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the report."""
        notes = [f"{self.n:,} new cells in the dataset {self.name!r}"] if self.n else []
        if self.left:
            notes.append(
                f"object attributes of several channels are no cell columns, they stay in the store: {list(self.left)}"
            )
        return tuple(notes)

    @property
    def columns(self) -> list[CellColumn]:
        """Cell columns that they bring."""
        return [plan.column for plan in self.plans]

    def named(self, record: GeometryRecord) -> GeometryRecord:
        """Return the row of the registry with their dataset."""
        if not self.n:
            return record
        return record.model_copy(update={"datasets": json.dumps({**record.cells_of, record.uid: self.n})})

    def write(self, catalog: Catalog, record: GeometryRecord, pointers: pa.StructArray) -> DatasetRecord:
        """Append the cells, and return the record of their dataset, which makes all of it visible once it is committed."""
        uid = record.uid
        digest = write_frame(catalog, uid, "obs", self.frame)
        schema = catalog.tables.schema(CELLS)
        columns = {
            "uid": new_uids(self.n),
            "dataset_uid": pa.array([uid] * self.n, pa.string()),
            "cell_name": self.frame.column(INDEX).cast(pa.string()),
            record.column: pointers,
        }
        for plan in self.plans:
            values = column_values(plan, self.frame)
            # Another writer may have created the column with another type since the plan.
            columns[plan.column.stored] = values.cast(schema.field(plan.column.stored).type)
        catalog.tables.append(CELLS, cell_rows(schema, columns, self.n))
        return DatasetRecord(
            uid=uid, zarr_group=record.zarr_group, feature_space=record.space, n_cells=self.n, pointer=record.column, name=self.name,
            source=record.source, content_hash=record.content_hash,
            facts=DatasetFacts(format="zarr-vectors", n_cells=self.n, frames={"obs": digest}).to_json(),
        )  # fmt: skip


def add_geometry(
    catalog: Catalog,
    source: Any,  # noqa: ANN401  (Shapes, Geometry, or a store)
    choices: Mapping[str, Any],
    progress: Progress | bool | None = None,  # noqa: FBT001  (passed on as the caller gave it)
) -> GeometryReport:
    """Add a geometry store, or shapes in memory, and point cells to its objects.

    The store is copied as it is under a group of its own, then cells get their pointers in one commit, then its row in
    ``_geometry`` makes it visible (with new cells: the record of their dataset, after it). A process killed on the way leaves nothing
    visible; the call can be run again, and `repair` and `gc` free what was left.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    source : Shapes, Geometry, str or path
        Shapes in memory, or a zarr-vectors store of either layout.
    choices : mapping
        Keyword arguments of `GeometryOptions`.
    progress : callable, bool or None
        A callback; None draws a bar on a terminal, False draws nothing.

    Returns
    -------
    GeometryReport
        What was done.

    Raises
    ------
    AtlasError
        As `open_geometry` and `plan_geometry` refuse; and if another process adds the same meanwhile. The atlas is as it was.
    """
    catalog.require_tip("add()")
    options = read_options(GeometryOptions, choices, "add() of geometry")
    with open_progress(progress, options.name or options.space or "add") as callback:
        return _add(catalog, source, options, callback)


def _add(catalog: Catalog, source: Any, options: GeometryOptions, progress: Progress) -> GeometryReport:  # noqa: ANN401
    progress("plan", 0, 1)
    opened = open_geometry(source, options.cells, options.unassigned, options.layout)
    plan = plan_geometry(catalog, opened, options)
    if plan.skipped:
        return geometry_report(plan, "skipped")
    fresh = plan_cells(catalog, plan, options)
    if options.dry_run:
        return geometry_report(plan, "dry run", fresh)
    uid, written = plan.record.uid, plan.record
    try:
        take_lease(catalog, uid)
        progress("lease", 1, 1)
        written = write_store(catalog, plan)
        progress("store", 1, 1)
        add_cell_columns(catalog, fresh.columns, [])
        progress("columns", 1, 1)
        written = write_pointers(catalog, plan, written)
        progress("pointers", 1, 1)
        _refuse_moved(catalog, plan, written)
        written = fresh.named(written)
        # With new cells, the row of the registry is invisible until the record of their dataset is committed.
        if fresh.n:
            register_geometry(catalog, written)
            progress("cells", 0, 1)
            made = fresh.write(catalog, written, pointer_values(plan.source, plan.fresh, written.zarr_group))
            plan, name = _commit_cells(catalog, made, written, plan, options)
            fresh = replace(fresh, name=name)
        else:
            progress("cells", 1, 1)
            plan = _commit_row(catalog, written, plan, options)
        progress("record", 1, 1)
    except BaseException:
        discard(catalog, uid)
        raise
    # Another process has added the same since the plan, and duplicates are skipped.
    if plan.skipped:
        discard(catalog, uid)
        return geometry_report(plan, "skipped")
    # The geometry is visible now; `repair` removes what stays of what it replaces.
    with contextlib.suppress(AtlasError):
        _clear_replaced(catalog, plan.replaces)
    with contextlib.suppress(StoreError):
        release_lease(catalog, uid)
    progress("done", 1, 1)
    return geometry_report(replace(plan, record=written), "replaced" if plan.replaces else "added", fresh)


def write_store(catalog: Catalog, plan: GeometryPlan) -> GeometryRecord:
    """Write the store to its group; a store on disk is copied byte for byte.

    Raises
    ------
    ConflictError
        If the store changed since it was read.
    """
    record, source = plan.record, plan.source
    place = catalog.arrays.child(*record.zarr_group.split("/"))
    if source.location is not None:
        origin = source.location
        files = [key for key, _ in list_files(origin)]
        publish_files(place, ((key, [read_file(origin, key)]) for key in files), overwrite=False)
    elif source.geometry is not None:
        write(source.geometry, place, layout=source.layout)
    # Of the copy: it differs from the digest of the source if that changed since it was read.
    n_files, n_bytes, digest = digest_files(place)
    if source.location is not None and digest != source.digest:
        raise ConflictError(f"{source.uri} changed while it was added; nothing of it is visible. Run it again.")
    return record.model_copy(update={"n_files": n_files, "n_bytes": n_bytes, "digest": digest})


def pointer_values(source: GeometrySource, rows: NDArray[np.int64], group: str) -> pa.StructArray:
    """Build pointers to some objects of a store.

    Parameters
    ----------
    source : GeometrySource
        The shapes.
    rows : (n,) int64
        Rows of the objects.
    group : str
        Path of the store.
    """
    ids = source.shapes.ids
    assert ids is not None
    lo, hi = source.bounds
    middle = object_centroids(source.shapes)
    parts: dict[str, Any] = {
        "zarr_group": pa.array([group] * len(rows), pa.string()),
        "object_id": pa.array(ids[rows]),
        "level": pa.array(source.levels[rows], pa.int16()),
    }
    for i, axis in enumerate(AXES[: source.shapes.n_dims]):
        for name, values in ((f"{axis}_min", lo), (f"{axis}_max", hi), (axis, middle)):
            # The NaN of an object without vertices becomes null.
            parts[name] = pa.array(values[rows, i], from_pandas=True)
    fields = list(GeometryPointer.arrow_type)
    arrays = [parts.get(field.name, pa.nulls(len(rows), field.type)) for field in fields]
    return pa.StructArray.from_arrays(arrays, fields=fields)


def write_pointers(catalog: Catalog, plan: GeometryPlan, record: GeometryRecord) -> GeometryRecord:
    """Write the pointers of existing cells in one commit; no pointer to another store that can be seen is overwritten.

    Returns
    -------
    GeometryRecord
        With the column that was taken.
    """
    uids = plan.uids
    pointers = pointer_values(plan.source, plan.objects, record.zarr_group)

    def once() -> str:
        column = _column(catalog, record, uids)
        field = pointer_field(column, PointerKind.GEOMETRY, record.space)
        add_cell_columns(catalog, [], [field])
        at = catalog.tables.version(CELLS)
        # Checked at the version that the update is based on; `update_columns` refuses what is committed later.
        if len(uids) and _column(catalog, record, uids, at) != column:
            raise ConflictError(f"the column {column!r} of {catalog.tables.uri(CELLS)} was filled meanwhile")
        if len(uids):
            rows = pa.table([uids, pointers], schema=pa.schema([pa.field("uid", pa.string(), nullable=False), field]))
            update_columns(catalog.tables, CELLS, "uid", rows, at)
        return column

    return record.model_copy(update={"column": catalog.tables.retry(CELLS, once)})


def _column(catalog: Catalog, record: GeometryRecord, uids: pa.Array, version: int | None = None) -> str:
    """Choose the column: that of the name, or one of its own where these cells have a pointer of the name that is followed."""
    tables = catalog.tables if version is None else Tables(catalog.tables.location, {CELLS: version})
    if record.name not in tables.schema(CELLS).names or not len(uids):
        return record.name
    group = f"{record.name}.zarr_group"
    rows = tables.read(CELLS, ["uid", group], is_not_null(group))
    there = rows.column(1).filter(pc.is_in(rows.column(0), value_set=uids))
    groups = [group for group in pc.unique(there).to_pylist() if group != record.zarr_group]
    # Pointers to groups that are neither registered nor being written lead nowhere and may be overwritten.
    return f"{record.name}_{record.uid[:8]}" if groups_in_use(catalog, groups) else record.name


def _refuse_moved(catalog: Catalog, plan: GeometryPlan, record: GeometryRecord) -> None:
    """Refuse to go on where another process took some of the cells since they were looked at."""
    if len(plan.uids):
        n = catalog.tables.count(CELLS, equals(f"{record.column}.zarr_group", record.zarr_group))
        if n != len(plan.uids):
            raise ConflictError(
                f"{len(plan.uids) - n:,} cells were dropped or pointed elsewhere while {plan.source.uri} was added; run it again."
            )


def register_geometry(catalog: Catalog, record: GeometryRecord) -> None:
    """Write a row of the registry, which becomes visible with the record of its dataset."""
    GEOMETRY_ASSETS.change(catalog, lambda old: [*old, record])


def _commit_cells(
    catalog: Catalog, made: DatasetRecord, record: GeometryRecord, plan: GeometryPlan, options: GeometryOptions
) -> tuple[GeometryPlan, str]:
    """Commit the dataset of new cells, which makes their announced geometry visible; return the plan as it was done, and its name.

    Raises
    ------
    DuplicateError
        If another process has added the same, or taken the name, since it was looked at.
    """
    done, name = plan, made.name

    def choose(old: list[DatasetRecord]) -> Commit:
        nonlocal done, name
        known = {other.uid for other in old}
        # The row of this store is in the registry already and would be its own duplicate.
        there = [row for row in GEOMETRY_ASSETS.read(catalog) if row.uid != record.uid and is_visible(row, known)]
        done = check_duplicates(plan, record, there, options)
        if done.skipped:
            return Commit(())
        name = dataset_name(old, done, options)
        return Commit((made.model_copy(update={"name": name}),), frozenset(row.uid for row in done.replaces) & known)

    commit_records(catalog, choose)
    return done, name


def _clear_replaced(catalog: Catalog, gone: Sequence[GeometryRecord]) -> None:
    """Remove the rows, cells and pointers of replaced geometry."""
    if gone:
        uids = {record.uid for record in gone}
        GEOMETRY_ASSETS.change(catalog, lambda old: [record for record in old if record.uid not in uids])
        delete_cells_of_datasets(catalog, [record.uid for record in gone if record.uid in record.cells_of])
        clear_orphaned_pointers(catalog)


def _commit_row(catalog: Catalog, record: GeometryRecord, plan: GeometryPlan, options: GeometryOptions) -> GeometryPlan:
    """Write the row of the registry, in the place of those that it replaces; return the plan as it was done.

    Raises
    ------
    DuplicateError
        If another process has added geometry of that name to the same cells since they were looked at.
    """
    done = plan

    def change(old: list[GeometryRecord]) -> list[GeometryRecord]:
        nonlocal done
        if any(row.uid == record.uid for row in old):
            return old  # The commit before was done although its answer was lost.
        known = {dataset.uid for dataset in read_records(catalog)}
        done = check_duplicates(plan, record, [row for row in old if is_visible(row, known)], options)
        gone = {row.uid for row in done.replaces}
        return old if done.skipped else [*(row for row in old if row.uid not in gone), record]

    GEOMETRY_ASSETS.change(catalog, change)
    return done


def discard(catalog: Catalog, uid: str) -> None:
    """Remove what did not become visible; where the tables cannot be read, `repair` will do so."""
    with contextlib.suppress(AtlasError):
        own = [record for record in GEOMETRY_ASSETS.read(catalog) if record.uid == uid]
        # The commit raised although it was done, for instance because its answer was lost.
        if own and is_visible(own[0], {record.uid for record in read_records(catalog)}):
            return
        if own:
            GEOMETRY_ASSETS.change(catalog, lambda old: [record for record in old if record.uid != uid])
        catalog.tables.delete(CELLS, equals("dataset_uid", uid))
        catalog.arrays.child(uid).delete_prefix()
        clear_orphaned_pointers(catalog)


def geometry_report(
    plan: GeometryPlan, status: Literal["added", "skipped", "replaced", "dry run"], fresh: NewCells | None = None
) -> GeometryReport:
    """Return the report of what a plan did, or would do."""
    record = plan.record
    n_new = 0 if fresh is None else fresh.n
    done = status in ("added", "replaced")
    n_datasets = len({*record.cells_of, *([record.uid] if n_new else [])})
    return GeometryReport(
        name=record.name, space=record.space, column=record.column, zarr_group=record.zarr_group if done else "",
        types=tuple(record.types), n_objects=record.n_objects, n_vertices=record.n_vertices, n_levels=record.n_levels,
        n_cells=len(plan.uids) + n_new, n_new_cells=n_new, n_datasets=n_datasets, status=status, n_bytes=record.n_bytes,
        dataset_uid=record.uid if n_new and done else "", content_hash=record.content_hash, source=record.source,
        notes=(*plan.notes, *(() if fresh is None else fresh.notes)),
    )  # fmt: skip


def plan_cells(catalog: Catalog, plan: GeometryPlan, options: GeometryOptions) -> NewCells:
    """Decide what the new cells of a plan will be.

    Raises
    ------
    SchemaError
        If an attribute clashes with a cell column.
    DuplicateError
        If a dataset is called so already, or the same cells were made before.
    """
    if not len(plan.fresh):
        return NewCells(0, "", pa.table({}))
    shapes = plan.source.shapes
    assert shapes.ids is not None
    # A link has one pair; without a link, names come from the attribute `cells` or from the ids.
    ((_, attribute),) = plan.record.linked.items() or [("", "")]
    label = attribute or options.cells if (attribute or options.cells) in shapes.object_attributes else ""
    names = shapes.object_attributes[label].values[plan.fresh] if label else shapes.ids[plan.fresh]
    frame = {INDEX: pa.array([str(name) for name in names.tolist()])}
    left: list[str] = []
    for name, values in sorted(shapes.object_attributes.items()):
        if values.n_channels == 1 and name != label:
            frame[name] = pa.array(
                values.values[plan.fresh].tolist() if values.values.dtype.kind in "US" else values.values[plan.fresh]
            )
        elif name != label:
            left.append(name)
    table = pa.table(frame)
    plans, _ = plan_columns(table.schema, catalog.tables.schema(CELLS), IngestOptions(), [plan.record.column])
    name = dataset_name(read_records(catalog), plan, options)
    return NewCells(len(plan.fresh), name, table, plans, tuple(left))


def dataset_name(there: Iterable[DatasetRecord], plan: GeometryPlan, options: GeometryOptions) -> str:
    """Choose the name of the dataset of new cells, given the existing datasets.

    Raises
    ------
    DuplicateError
        If the name that the caller chose is taken.
    """
    gone = {old.uid for old in plan.replaces}
    taken = {record.name for record in there if record.uid not in gone}
    asked = options.dataset if options.link is None else None
    if asked is not None and asked in taken:
        raise DuplicateError(f"A dataset is called {asked!r} already; choose another name with dataset=...")
    base = name = asked or plan.source.name
    n = 2
    while name in taken:
        name, n = f"{base}-{n}", n + 1
    return name


GENE, CELL = "gene", "cell_id"


@checked
def make_transcripts(
    positions: ArrayLike, genes: Sequence[str], cells: Sequence[Any], *, attributes: dict[str, ArrayLike] | None = None
) -> Shapes:
    """Return a table of transcripts as shapes, ready to be added to an atlas or written as a store.

    Parameters
    ----------
    positions : (N, D) array
        Position of each transcript.
    genes : (N,) sequence of str
        Its gene.
    cells : (N,) sequence of int or str
        Its cell. Whole numbers stay as they are; text becomes categories.
    attributes : mapping of str to (N,) array, or None
        Further numbers, e.g. a quality.

    Returns
    -------
    Shapes
        A point cloud without objects, with the vertex attributes ``gene`` and ``cell_id``; text is kept as categories
        (``encoding="dictionary"``).

    Raises
    ------
    SourceError
        If the columns are not of one length.

    Examples
    --------
    >>> spots = make_transcripts([[0.0, 0], [1, 1], [9, 9]], ["ACTB", "CD3E", "ACTB"], ["a", "a", "UNASSIGNED"])
    >>> spots.vertex_attributes["gene"].metadata["categories"]
    ['ACTB', 'CD3E']
    """
    more = {name: Attribute(np.asarray(values)) for name, values in (attributes or {}).items()}
    own = {GENE: _attribute(genes), CELL: _attribute(cells)}
    return Shapes("point_cloud", np.asarray(positions), vertex_attributes={**more, **own})


def _attribute(values: Sequence[Any]) -> Attribute:
    """Return integers unchanged, and text as categories."""
    column = np.asarray(values)
    if column.dtype.kind in "iu":
        return Attribute(column)
    labels, codes = np.unique(column.astype(str), return_inverse=True)
    metadata = {"encoding": "dictionary", "categories": labels.tolist(), "ordered": False}
    return Attribute(codes.astype(np.int32), metadata=metadata)


@checked
def transcripts_to_counts(
    source: Any,  # noqa: ANN401  (Shapes, Geometry, str or path)
    *,
    genes: str = GENE,
    cells: str = "",
    unassigned: Any = None,  # noqa: ANN401  (a value of the attribute)
    gene_names: Sequence[str] | None = None,
) -> "AnnData":
    """Count transcripts by cell and gene, exactly.

    Parameters
    ----------
    source : Shapes, Geometry, str or path
        Points with a gene; their cells are the objects, or a vertex attribute.
    genes : str
        Vertex attribute of the gene: categories, or whole numbers that count from 0 in `gene_names`.
    cells : str
        Vertex attribute of the cell. Empty: the objects are cells; points in memory without objects, as `make_transcripts` makes them,
        are counted by their ``cell_id``.
    unassigned : value, or list of values, or None
        Its value where there is no cell, in addition to negative numbers, the greatest unsigned one, and missing ones.
    gene_names : sequence of str or None
        Names of the genes, where they are plain numbers.

    Returns
    -------
    anndata.AnnData
        `X` CSR of whole numbers, one row for each cell that has a transcript (or is an object), named by its number or category; all
        genes in the order of their categories. `obs` has ``n_transcripts``, ``obsm["spatial"]`` the mean of their places, and
        ``uns["transcripts"]`` how many there were and how many belong to no cell.

    Raises
    ------
    NotFoundError
        If there is no such attribute.
    SourceError
        If genes have no names, or points no objects and no `cells` is named.
    CorruptError
        If a gene's number is beyond the names.

    Examples
    --------
    >>> spots = make_transcripts([[0.0, 0], [1, 1], [9, 9]], ["ACTB", "CD3E", "ACTB"], ["a", "a", "UNASSIGNED"])
    >>> counts = transcripts_to_counts(spots, unassigned="UNASSIGNED")
    >>> counts.obs_names.tolist(), counts.X.toarray().tolist(), counts.uns["transcripts"]["n_unassigned"]
    (['a'], [[1, 1]], 1)
    """
    if not cells and isinstance(source, Shapes) and source.ids is None and CELL in source.vertex_attributes:
        cells = CELL
    return count(open_geometry(source, cells, unassigned), genes, cells, gene_names)


def count(
    source: GeometrySource, genes: str = GENE, cells: str = "", gene_names: Sequence[str] | None = None
) -> "AnnData":
    """Count the transcripts of a source that was read; see `transcripts_to_counts`."""
    import pandas as pd
    from anndata import AnnData
    from scipy.sparse import csr_matrix

    shapes = source.shapes
    codes, names = gene_codes(shapes, genes, gene_names)
    if shapes.ids is None:
        raise SourceError(
            f"The points of {source.uri} have no objects; name the attribute of their cell with cells=..."
        )
    n_genes = len(names)
    row = np.repeat(np.arange(shapes.n_objects), shapes.vertex_counts)
    # One key for each cell and gene: sorted keys are in CSR order, and repeats are the counts.
    keys, values = np.unique(row * n_genes + codes, return_counts=True)
    # Row i begins at the first key from i * n_genes on.
    indptr = np.searchsorted(keys, np.arange(shapes.n_objects + 1) * n_genes)
    dtype = np.uint32 if values.max(initial=0) <= np.iinfo(np.uint32).max else np.uint64
    matrix = csr_matrix((values.astype(dtype), keys % max(1, n_genes), indptr), shape=(shapes.n_objects, n_genes))
    label = shapes.object_attributes.get(cells)
    index = [str(name) for name in (shapes.ids if label is None else label.values).tolist()]
    numbers = {
        name: attribute.values
        for name, attribute in shapes.object_attributes.items()
        if name != cells and attribute.n_channels == 1
    }
    obs = pd.DataFrame({**numbers, "n_transcripts": shapes.vertex_counts}, index=pd.Index(index, dtype=str))
    facts = {"n_transcripts": shapes.n_vertices + source.n_unassigned, "n_unassigned": source.n_unassigned}
    return AnnData(
        matrix, obs=obs, var=pd.DataFrame(index=pd.Index(names, dtype=str)),
        obsm={"spatial": object_centroids(shapes)}, uns={"transcripts": facts},
    )  # fmt: skip


def gene_codes(
    shapes: Shapes, genes: str, gene_names: Sequence[str] | None = None
) -> tuple[NDArray[np.int64], list[str]]:
    """Return the gene of every transcript as a number, and the names of the numbers.

    Raises
    ------
    NotFoundError, SourceError, CorruptError
        As in `transcripts_to_counts`.
    """
    attribute = shapes.vertex_attributes.get(genes)
    if attribute is None or attribute.n_channels != 1:
        raise NotFoundError(
            f"The points have no attribute {genes!r} of one value each that tells their gene; they have {sorted(shapes.vertex_attributes)}."
        )
    # Read like owners: a missing gene is -1, which is refused below.
    codes, labels = owner_codes(attribute, genes) if attribute.values.size else (np.zeros(0, np.int64), None)
    categories = attribute.metadata.get("categories") if labels is None else labels
    if categories is None and gene_names is None:
        raise SourceError(
            f"The attribute {genes!r} holds numbers without names; name the genes with gene_names=[...], or keep them as categories."
        )
    names = [str(name) for name in (gene_names if categories is None else categories)]  # type: ignore[union-attr]
    if codes.size and (codes.min() < 0 or codes.max() >= len(names)):
        bad = int(np.count_nonzero((codes < 0) | (codes >= len(names))))
        raise CorruptError(
            f"{bad:,} transcripts name a gene that is none of the {len(names):,} of {genes!r}; leave them out, or fix the names."
        )
    return codes, names


def add_transcripts(
    catalog: Catalog,
    source: Any,  # noqa: ANN401  (Shapes, Geometry, or a store)
    choices: Mapping[str, Any],
    progress: Progress | bool | None = None,  # noqa: FBT001  (passed on as the caller gave it)
) -> GeometryReport:
    """Add transcripts with their counts: new cells with expression that point to their transcripts.

    The counts are a dataset like that of a file: their genes are registered features, found by the same rules. The record of
    this dataset is the last write, and makes cells, counts and transcripts visible at once.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    source : Shapes, Geometry, str or path
        Points with a gene and a cell.
    choices : mapping
        Keyword arguments of `GeometryOptions`; ``dataset`` is the name of the counts.
    progress : callable, bool or None
        A callback ``(step, done, total)``; else nothing is shown.

    Returns
    -------
    GeometryReport
        ``dataset_uid`` is that of the counts.

    Raises
    ------
    AtlasError
        As `transcripts_to_counts`, and as adding a file or geometry refuses. The atlas is as it was.
    """
    catalog.require_tip("add()")
    options = read_options(GeometryOptions, choices, "add() of geometry")
    check_options(options)
    callback = progress if callable(progress) else no_progress
    callback("plan", 0, 1)
    opened = open_geometry(source, options.cells, options.unassigned, options.layout)
    plan = plan_geometry(catalog, opened, replace(options, space=options.space or "transcripts"))
    if plan.skipped:
        return geometry_report(plan, "skipped")
    data = count(opened, options.genes, options.cells)
    asked = IngestOptions(
        name=options.dataset or opened.name,
        on_duplicate=options.on_duplicate,
        dry_run=options.dry_run,
        organism=options.organism,
    )
    if options.dry_run:
        reports = add_sources(catalog, [_Opener(data)], asked, callback)
        return _geometry_report(plan, reports[0])
    uid = plan.record.uid
    try:
        take_lease(catalog, uid)
        callback("lease", 1, 1)
        # No existing cell gets a pointer, so this only adds the column that `_Pointers` fills.
        written = write_pointers(catalog, plan, write_store(catalog, plan))
        callback("store", 1, 1)
        reports = add_sources(catalog, [_Opener(data)], asked, callback, attached=_Pointers(catalog, plan, written))
    except BaseException:
        discard(catalog, uid)
        raise
    if reports[0].status == "skipped":
        discard(catalog, uid)
    with contextlib.suppress(StoreError):
        release_lease(catalog, uid)
    return _geometry_report(replace(plan, record=written), reports[0])


@dataclass(frozen=True)
class _Pointers:
    """Pointers to transcripts, committed with the cells of their counts."""

    catalog: Catalog
    plan: GeometryPlan
    record: GeometryRecord

    def columns(self) -> dict[str, tuple[pa.Field, pa.Array]]:
        """Return the pointers of all cells, in the order of the objects."""
        field = pointer_field(self.record.column, PointerKind.GEOMETRY, self.record.space)
        # `count` makes one cell of each object in order, and without a link `fresh` has all objects.
        return {field.name: (field, pointer_values(self.plan.source, self.plan.fresh, self.record.zarr_group))}

    def before_record(self, uid: str) -> None:
        """Write the row of the registry, which the dataset's record makes visible."""
        cells = json.dumps({uid: len(self.plan.fresh)})
        register_geometry(self.catalog, self.record.model_copy(update={"datasets": cells}))


@dataclass(frozen=True)
class _Opener:
    """Opens counts in memory."""

    data: "AnnData"
    notes: tuple[str, ...] = ()

    def __call__(self) -> Source:
        """Open them."""
        return open_source(self.data)

    def explain(self, error: AtlasError) -> AtlasError:
        """Return the error unchanged."""
        return error


def _geometry_report(plan: GeometryPlan, counts: IngestReport) -> GeometryReport:
    made = geometry_report(plan, counts.status)
    notes = (*plan.notes, f"counts: {counts.name}, {counts.n_cells:,} cells", *counts.notes)
    return replace(
        made, dataset_uid=counts.dataset_uid, notes=notes, n_cells=counts.n_cells, n_new_cells=counts.n_cells, n_datasets=1
    )  # fmt: skip
