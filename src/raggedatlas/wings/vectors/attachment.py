"""Add geometry, and transcripts with their counts: the store first, then the pointers of cells, the record last."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from raggedatlas.catalog.assets import Commit, commit_records, delete_cells_of_datasets, read_records
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.cells import CellColumn, add_cell_columns, cell_rows, write_frame
from raggedatlas.errors import ConflictError, CorruptError, DuplicateError, NotFoundError, SourceError
from raggedatlas.ingest.add import Opener, add_sources
from raggedatlas.ingest.attachment import Attachment
from raggedatlas.ingest.columns import column_values, plan_columns
from raggedatlas.model.arguments import Progress, checked, no_progress
from raggedatlas.model.assets import GeometryRecord
from raggedatlas.model.frames import INDEX
from raggedatlas.model.ids import check_given_name, fit_name, free_name, integer_ids, new_uids
from raggedatlas.model.options import GeometryOptions, IngestOptions, read_options
from raggedatlas.model.records import DatasetFacts, DatasetRecord
from raggedatlas.model.reports import Done, GeometryReport, Status
from raggedatlas.model.spaces import AXES, GeometryPointer, PointerKind, pointer_field
from raggedatlas.store.location import digest_files, list_files, read_blocks
from raggedatlas.store.runtime import ScratchFile
from raggedatlas.store.sql import equals, is_not_null
from raggedatlas.store.tables import update_columns
from raggedatlas.wings.vectors.assets import GEOMETRY, clear_orphaned_pointers, groups_in_use
from raggedatlas.wings.vectors.attachment_plan import (
    GeometryPlan,
    GeometrySource,
    attribute_array,
    find_replaced,
    object_centroids,
    open_geometry,
    owner_codes,
    owner_labels,
    plan_geometry,
)
from raggedatlas.wings.vectors.chunking import object_blocks
from raggedatlas.wings.vectors.shapes import Attribute, Shapes, counts_to_offsets
from raggedatlas.wings.vectors.writer import publish_files, write

if TYPE_CHECKING:
    from anndata import AnnData
    from scipy.sparse import csr_matrix


def write_store(catalog: Catalog, plan: GeometryPlan) -> GeometryRecord:
    """Write the store to its group; a store on disk is copied byte for byte, and refused with `ConflictError` if it changed since."""
    record, source = plan.record, plan.source
    place = catalog.arrays.child(*record.zarr_group.split("/"))
    if source.location is not None:
        origin = source.location
        files = [key for key, _ in list_files(origin)]
        publish_files(place, ((key, read_blocks(origin, key)) for key in files), overwrite=False)
    elif source.geometry is not None:
        write(source.geometry, place, layout=source.layout)
    # Of the copy: it differs from the digest of the source if that changed since it was read.
    n_files, n_bytes, digest = digest_files(place)
    if source.location is not None and digest != source.digest:
        raise ConflictError(f"{source.uri} changed while it was added; nothing of it is visible. Run it again.")
    return record.model_copy(update={"n_files": n_files, "n_bytes": n_bytes, "digest": digest})


def pointer_values(source: GeometrySource, rows: NDArray[np.int64], record: GeometryRecord) -> pa.StructArray:
    """Build pointers to the objects in some rows of a store."""
    ids = source.shapes.ids
    assert ids is not None
    lo, hi = source.bounds
    middle = object_centroids(source.shapes, closed=record.space == "segmentation_boundary")
    parts: dict[str, Any] = {
        "zarr_group": pa.array([record.zarr_group] * len(rows), pa.string()),
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
    """Write the pointers of existing cells in one commit, and return the record with the column that was taken.

    No pointer to another store that can be seen is overwritten.
    """
    uids = plan.uids
    pointers = pointer_values(plan.source, plan.objects, record)

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
    tables = catalog.tables if version is None else catalog.tables.at({CELLS: version})
    if record.name not in tables.schema(CELLS).names or not len(uids):
        return record.name
    group = f"{record.name}.zarr_group"
    rows = tables.read(CELLS, ["uid", group], is_not_null(group))
    there = rows.column(1).filter(pc.is_in(rows.column(0), value_set=uids))
    groups = [group for group in pc.unique(there).to_pylist() if group != record.zarr_group]
    # Pointers to groups that are neither registered nor being written lead nowhere and may be overwritten.
    return f"{record.name}_{record.uid[:8]}" if groups_in_use(catalog, groups) else record.name


@dataclass(frozen=True)
class NewCells:
    """Cells that are made of objects, a dataset of their own."""

    name: str = ""  # of their dataset
    frame: pa.Table = field(default_factory=lambda: pa.table({}))  # names and attributes, one row for each cell
    plans: Sequence[CellColumn] = ()  # what becomes of the attributes
    left: tuple[str, ...] = ()  # attributes that become no columns

    @property
    def n(self) -> int:
        """How many; 0 for none."""
        return int(self.frame.num_rows)

    @property
    def notes(self) -> list[str]:
        """Lines for the report."""
        notes = [f"{self.n:,} new cells in the dataset {self.name!r}"] if self.n else []
        if self.left:
            notes.append(
                f"object attributes of several channels are no cell columns, they stay in the store: {list(self.left)}"
            )
        return notes


class GeometryAttachment(Attachment[GeometryReport]):
    """A geometry store, or shapes in memory, whose objects cells point to.

    `source` is Shapes, a Geometry, or the path or URI of a zarr-vectors store of either layout or of a file of shapes.
    `catalog` is at the tip. The store is copied as it is under a group of its own, then cells get their pointers in one
    commit, then its row in ``_geometry`` makes it visible (with new cells: the record of their dataset, after it).
    """

    def __init__(self, catalog: Catalog, source: Any, options: GeometryOptions) -> None:  # noqa: ANN401
        super().__init__(catalog, options)
        self.source, self.choices = source, options
        self.cells = NewCells()

    def plan(self) -> bool:
        """Read the shapes, and decide which cells get which; return False where duplicates are skipped."""
        choices = self.choices
        self.shapes = open_geometry(self.source, choices.cells, choices.unassigned, choices.layout)
        self.decided = plan_geometry(self.catalog, self.shapes, choices)
        self.record, self.uid = self.decided.record, self.decided.record.uid
        self.replaces = self._replaced(GEOMETRY.visible(self.catalog))
        if self.replaces is not None:
            self.plan_cells(self.replaces)
        return self.replaces is not None

    def plan_cells(self, replaces: Sequence[GeometryRecord]) -> None:
        """Decide what the new cells will be.

        Raises `SchemaError` if an attribute clashes with a cell column, and `DuplicateError` if a dataset has the name
        already.
        """
        fresh, shapes = self.decided.fresh, self.shapes.shapes
        if not len(fresh):
            return
        assert shapes.ids is not None
        # A link has one pair; without a link, names come from the attribute `cells` or from the ids.
        ((_, attribute),) = self.record.linked.items() or [("", "")]
        owner = attribute or self.choices.cells
        label = owner if owner in shapes.object_attributes else ""
        names = shapes.object_attributes[label].values[fresh] if label else shapes.ids[fresh]
        frame = {INDEX: pa.array([str(name) for name in names.tolist()])}
        others = {name: values for name, values in sorted(shapes.object_attributes.items()) if name != label}
        for name, attributes in others.items():
            if attributes.n_channels == 1:
                frame[name] = attribute_array(attributes.take(fresh))
        table = pa.table(frame)
        plans, _ = plan_columns(table, self.catalog.tables.schema(CELLS), IngestOptions(), [self.record.column])
        left = tuple(name for name in others if name not in frame)
        self.cells = NewCells(self._dataset_name(read_records(self.catalog), replaces), table, plans, left)

    def stage(self, progress: Progress) -> None:
        """Write the store, and the pointers of cells that are there."""
        catalog = self.catalog
        self.record = write_store(catalog, self.decided)
        progress("store", 1, 1)
        add_cell_columns(catalog, self.cells.plans, [])
        progress("columns", 1, 1)
        self.record = write_pointers(catalog, self.decided, self.record)
        progress("pointers", 1, 1)
        # Another process may have taken some of the cells since they were looked at.
        n = len(self.decided.uids)
        n_moved = n and n - catalog.tables.count(
            CELLS, equals(f"{self.record.column}.zarr_group", self.record.zarr_group)
        )
        if n_moved:
            raise ConflictError(
                f"{n_moved:,} cells were dropped or pointed elsewhere while {self.shapes.uri} was added; run it again."
            )

    def commit(self, progress: Progress) -> Done:
        """Write the row of the registry, or after it the record of the dataset of new cells."""

        def with_row(old: list[GeometryRecord]) -> list[GeometryRecord]:
            if any(row.uid == self.uid for row in old):
                return old  # The commit before was done although its answer was lost.
            datasets = {dataset.uid for dataset in read_records(self.catalog)}
            self.replaces = self._replaced(row for row in old if GEOMETRY.is_visible(row, datasets))
            if self.replaces is None:
                return old
            gone = {row.uid for row in self.replaces}
            return [*(row for row in old if row.uid not in gone), self.record]

        if self.cells.n:
            self._commit_cells(progress)
        else:
            progress("cells", 1, 1)
            GEOMETRY.change(self.catalog, with_row)
        return "skipped" if self.replaces is None else "replaced" if self.replaces else "added"

    def _commit_cells(self, progress: Progress) -> None:
        """Append the new cells, and commit the record of their dataset, which makes all of it visible."""
        catalog, cells = self.catalog, self.cells
        self.record = self.record.model_copy(
            update={"datasets": json.dumps({**self.record.cells_of, self.uid: cells.n})}
        )
        record = self.record
        # This row is invisible until the record of its dataset is committed.
        GEOMETRY.change(catalog, lambda old: [*old, record])
        progress("cells", 0, 1)
        digest = write_frame(catalog, self.uid, "obs", cells.frame)
        schema = catalog.tables.schema(CELLS)
        columns = {
            "uid": new_uids(cells.n),
            "dataset_uid": pa.repeat(self.uid, cells.n),
            "cell_name": cells.frame.column(INDEX).cast(pa.string()),
            record.column: pointer_values(self.shapes, self.decided.fresh, record),
        }
        for plan in cells.plans:
            columns[plan.stored] = partial(column_values, plan, cells.frame)
        catalog.tables.append(CELLS, cell_rows(schema, columns, cells.n))
        dataset = DatasetRecord(
            uid=self.uid, zarr_group=record.zarr_group, feature_space=record.space, n_cells=cells.n, pointer=record.column,
            name=cells.name, source=record.source, content_hash=record.content_hash,
            facts=DatasetFacts(format="zarr-vectors", n_cells=cells.n, frames={"obs": digest}).to_json(),
        )  # fmt: skip

        def choose(old: list[DatasetRecord]) -> Commit:
            datasets = {other.uid for other in old}
            # The row of this store is in the registry already and would be its own duplicate.
            rows = [row for row in GEOMETRY.read(catalog) if row.uid != self.uid and GEOMETRY.is_visible(row, datasets)]
            self.replaces = self._replaced(rows)
            if self.replaces is None:
                return Commit(())
            self.cells = replace(cells, name=self._dataset_name(old, self.replaces))
            gone = frozenset(row.uid for row in self.replaces) & datasets
            return Commit((dataset.model_copy(update={"name": self.cells.name}),), gone)

        commit_records(catalog, choose)

    def _replaced(self, old: Iterable[GeometryRecord]) -> list[GeometryRecord] | None:
        return find_replaced(self.record, list(old), self.choices)

    def _dataset_name(self, datasets: Iterable[DatasetRecord], replaces: Sequence[GeometryRecord]) -> str:
        """Choose the name of the dataset of new cells; raise `DuplicateError` if the name that the caller chose is taken."""
        gone = {old.uid for old in replaces}
        taken = {record.name for record in datasets if record.uid not in gone}
        asked = self.choices.dataset if self.choices.link is None else None
        if asked is not None and asked in taken:
            raise DuplicateError(f"A dataset is called {asked!r} already; choose another name with dataset=...")
        return free_name(
            fit_name(self.shapes.name) if asked is None else check_given_name(asked, "name of a dataset"), taken, "-"
        )

    def finish(self) -> None:
        """Remove the rows, cells and pointers of replaced geometry."""
        if self.replaces:
            uids = {record.uid for record in self.replaces}
            GEOMETRY.remove(self.catalog, uids)
            delete_cells_of_datasets(
                self.catalog, [record.uid for record in self.replaces if record.uid in record.cells_of]
            )
            clear_orphaned_pointers(self.catalog)

    def discard(self) -> None:
        """Remove what did not become visible."""
        own = [record for record in GEOMETRY.read(self.catalog) if record.uid == self.uid]
        # The commit raised although it was done, for instance because its answer was lost.
        if own and GEOMETRY.is_visible(own[0], {record.uid for record in read_records(self.catalog)}):
            return
        if own:
            GEOMETRY.remove(self.catalog, {self.uid})
        self.catalog.tables.delete(CELLS, equals("dataset_uid", self.uid))
        self.catalog.arrays.child(self.uid).delete_prefix()
        clear_orphaned_pointers(self.catalog)

    def report(self, status: Status) -> GeometryReport:
        """Return the report of what was done, or would be done."""
        skipped, done = status == "skipped", status in ("added", "replaced")
        record, cells = (self.decided.record, NewCells()) if skipped else (self.record, self.cells)
        notes = ["the same shapes of the same cells are in the atlas already"] if skipped else cells.notes
        return GeometryReport(
            name=record.name, space=record.space, column=record.column, zarr_group=record.zarr_group if done else "",
            types=tuple(record.types), n_objects=record.n_objects, n_vertices=record.n_vertices, n_levels=record.n_levels,
            n_cells=len(self.decided.uids) + cells.n, n_new_cells=cells.n,
            n_datasets=len({*record.cells_of, *([record.uid] if cells.n else [])}), status=status, n_bytes=record.n_bytes,
            dataset_uid=record.uid if cells.n and done else "", content_hash=record.content_hash, source=record.source,
            notes=(*self.decided.notes, *notes),
        )  # fmt: skip


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
    """Return integers unchanged, and text as categories; missing values become -1."""
    import pandas as pd

    column = np.asarray(values)
    if column.dtype.kind in "iu":
        return Attribute(column)
    if column.dtype.kind == "f":
        return Attribute(integer_ids(column, "The cells").fill_null(-1).to_numpy())
    there = ~pd.isna(column)
    codes = np.full(len(column), -1, np.int32)
    labels, codes[there] = np.unique(column[there].astype(str), return_inverse=True)
    # As `read_points` codes the same points of a file.
    return Attribute(codes, metadata={"encoding": "dictionary", "categories": labels.tolist(), "ordered": False})


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

    shapes = source.shapes
    assert shapes.ids is not None  # `open_geometry` refuses points that tell no cell
    matrix, names = _count_genes(shapes, genes, gene_names)
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


def _count_genes(shapes: Shapes, genes: str, gene_names: Sequence[str] | None) -> "tuple[csr_matrix[Any], list[str]]":
    """Count the points of every object by gene, a bounded number of points at once; errors are as in `transcripts_to_counts`."""
    from scipy.sparse import csr_matrix

    attribute = shapes.vertex_attributes.get(genes)
    if attribute is None or attribute.n_channels != 1:
        raise NotFoundError(
            f"The points have no attribute {genes!r} of one value each that tells their gene; they have {sorted(shapes.vertex_attributes)}."
        )
    labels = owner_labels(attribute)
    if labels is None and gene_names is None:
        raise SourceError(
            f"The attribute {genes!r} holds numbers without names; name the genes with gene_names=[...], or keep them as categories."
        )
    names = [str(name) for name in (gene_names if labels is None else labels)]  # type: ignore[union-attr]
    n_genes, n_bad, lengths = max(1, len(names)), 0, np.zeros(shapes.n_objects, np.int64)
    with ScratchFile(np.int32) as columns, ScratchFile(np.uint32) as values:
        for objects in object_blocks(shapes.offsets):
            offsets = shapes.offsets[objects.start : objects.stop + 1]
            # Read like owners: a missing gene is -1, which is refused below.
            codes = owner_codes(attribute.take(slice(offsets[0], offsets[-1])), genes, labels)
            bad = (codes < 0) | (codes >= len(names))
            n_bad += int(np.count_nonzero(bad))
            row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
            # One key for each cell and gene: sorted keys are in CSR order, and repeats are the counts.
            keys, counts = np.unique((row * n_genes + codes)[~bad], return_counts=True)
            lengths[objects] = np.bincount(keys // n_genes, minlength=len(offsets) - 1)
            columns.append(keys % n_genes)
            values.append(counts)
        parts = values.array(), columns.array(), counts_to_offsets(lengths)
    if n_bad:
        raise CorruptError(
            f"{n_bad:,} transcripts name a gene that is none of the {len(names):,} of {genes!r}; leave them out, or fix the names."
        )
    return csr_matrix(parts, shape=(shapes.n_objects, len(names))), names


class TranscriptAttachment(GeometryAttachment):
    """Transcripts with their counts: new cells with expression that point to their transcripts.

    The counts are a dataset like that of a file: their genes are registered features, found by the same rules. The
    record of this dataset is the last write, and makes cells, counts and transcripts visible at once.
    """

    def __init__(self, catalog: Catalog, source: Any, options: GeometryOptions) -> None:  # noqa: ANN401
        super().__init__(catalog, source, replace(options, space=options.space or "transcripts"))

    def plan_cells(self, replaces: Sequence[GeometryRecord]) -> None:
        """Count the transcripts; with ``dry_run`` also try to add the counts."""
        self.counts = count(self.shapes, self.choices.genes, self.choices.cells)
        if self.choices.dry_run:
            self._add_counts(no_progress)

    def _add_counts(self, progress: Progress) -> None:
        asked = self.choices
        options = IngestOptions(
            name=asked.dataset or self.shapes.name, on_duplicate=asked.on_duplicate, dry_run=asked.dry_run,
            organism=asked.organism,
        )  # fmt: skip
        (self.added,) = add_sources(
            self.catalog, [Opener(self.counts)], options, progress, further=self.columns, before_record=self.before_record
        )  # fmt: skip

    def stage(self, progress: Progress) -> None:
        """Write the store, and the column of pointers."""
        # No existing cell gets a pointer, so this only adds the column that `columns` fills.
        self.record = write_pointers(self.catalog, self.decided, write_store(self.catalog, self.decided))
        progress("store", 1, 1)

    def commit(self, progress: Progress) -> Done:
        """Add the counts, whose record makes the transcripts visible too."""
        self._add_counts(progress)
        return cast("Done", self.added.status)

    def columns(self) -> dict[str, tuple[pa.Field, pa.Array]]:
        """Return the pointers of all cells, in the order of the objects."""
        pointers = pointer_field(self.record.column, PointerKind.GEOMETRY, self.record.space)
        # `count` makes one cell of each object in order, and without a link `fresh` has all objects.
        return {pointers.name: (pointers, pointer_values(self.shapes, self.decided.fresh, self.record))}

    def before_record(self, uid: str) -> None:
        """Write the row of the registry, which the dataset's record makes visible."""
        record = self.record.model_copy(update={"datasets": json.dumps({uid: len(self.decided.fresh)})})
        GEOMETRY.change(self.catalog, lambda old: [*old, record])

    def finish(self) -> None:
        """Do nothing: rows of the registry go with the datasets that the counts replace."""

    def report(self, status: Status) -> GeometryReport:
        """Return the report of what was done to the transcripts, with the notes about the counts."""
        report = super().report(status)
        if self.replaces is None:
            return report
        counts = self.added
        notes = (*self.decided.notes, f"counts: {counts.name}, {counts.n_cells:,} cells", *counts.notes)
        return replace(
            report, dataset_uid=counts.dataset_uid, notes=notes, n_cells=counts.n_cells, n_new_cells=counts.n_cells, n_datasets=1
        )  # fmt: skip


def geometry_attachment(
    catalog: Catalog,
    source: Any,  # noqa: ANN401  (what `GeometryKind.accepts` takes)
    choices: Mapping[str, Any],
) -> GeometryAttachment:
    """Prepare to add geometry, or transcripts with their counts."""
    options = read_options(GeometryOptions, choices, "add() of geometry")
    return (TranscriptAttachment if options.counts else GeometryAttachment)(catalog, source, options)
