"""Transcripts, points with a gene and a cell: made of columns, counted exactly, and added with their counts."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from raggedatlas.catalog.assets import release_lease, take_lease
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import AtlasError, CorruptError, NotFoundError, SourceError, StoreError
from raggedatlas.formats.registry import open_source
from raggedatlas.ingest.commit import add_sources
from raggedatlas.ingest.geometries import (
    discard,
    geometry_report,
    pointer_values,
    register_geometry,
    write_pointers,
    write_store,
)
from raggedatlas.ingest.geometry_plan import GeometryOptions, GeometryPlan, check_options, plan_geometry
from raggedatlas.ingest.geometry_source import GeometrySource, object_centroids, open_geometry, owner_codes
from raggedatlas.ingest.options import IngestOptions, read_options
from raggedatlas.model.arguments import Progress, checked, no_progress
from raggedatlas.model.assets import GeometryRecord
from raggedatlas.model.protocols import Source
from raggedatlas.model.reports import GeometryReport, IngestReport
from raggedatlas.model.spaces import PointerKind, pointer_field
from raggedatlas.vectors.shapes import Attribute, Shapes

if TYPE_CHECKING:
    from anndata import AnnData

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
    own = {GENE: _column(genes), CELL: _column(cells)}
    return Shapes("point_cloud", np.asarray(positions), vertex_attributes={**more, **own})


def _column(values: Sequence[Any]) -> Attribute:
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
