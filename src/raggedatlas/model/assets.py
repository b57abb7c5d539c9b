"""What is attached to cells: records of results, geometry stores and annotations, the marks on their cell columns, and of what was deleted."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from raggedatlas.model.choices import OnConflict, StoredAs
from raggedatlas.model.records import DatasetRecord, entries_schema, read_json, utc_now

RESULT_KEY = b"raggedatlas.result"
"""Arrow field metadata key of a cell column that holds a result: the result's uid."""

RESULT_NAME_KEY = b"raggedatlas.result_name"
"""Arrow field metadata key of such a column: the result's name."""

VALUES = "values"
"""The one layer of a result, and of a member of `obsm`."""


class IndexFacts(BaseModel):
    """What is known of the index over a column of vectors."""

    # Ignored fields may come from a later version, whose records stay readable.
    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: str = ""  # Lance's name of it
    n_partitions: int = Field(0, ge=0)
    nprobes: int = Field(1, ge=1)  # partitions that a search reads
    # Share of the `k` nearest that is found, measured over `n_queries` cells.
    recall: float = 0.0
    k: int = 0
    n_queries: int = 0


class AssetRecord(BaseModel):
    """What the records of all kinds have that are attached to cells; the row of a record in the table of its kind is the commit point of its `add`.

    Attributes
    ----------
    uid : str
        16 hex digits, another each time that something is added; also the folder of its files.
    name : str
        What queries call it.
    column, zarr_group : str
        The cell column of its values or pointers, and the group ``<uid>/<name>`` of its files; empty if it has none.
    datasets : str
        JSON: dataset uid -> how many of its cells had a value when it was added.
    content_hash : str
        Of what was added; tells the same content.
    source : str
        Where it came from.
    created_at : str
        UTC ISO timestamp.

    Examples
    --------
    >>> AssetRecord(uid="0" * 16, name="scvi", column="scvi", datasets='{"a": 3}').cells_of
    {'a': 3}
    """

    # Before 2.10 pydantic reserves all names that begin with `model_`, such as `model_hash`, and warns of them.
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    table: ClassVar[str] = ""
    """Table that has the records of the kind."""

    uid: str
    name: str
    column: str = ""
    zarr_group: str = ""
    datasets: str = "{}"
    content_hash: str = ""
    source: str = ""
    created_at: str = Field(default_factory=utc_now)

    @property
    def cells_of(self) -> dict[str, int]:
        """`datasets`, read: dataset uid -> cells."""
        return read_json(dict[str, int], self.datasets, self.table, self.uid, "datasets")


class ResultRecord(AssetRecord):
    """One result of a model for cells of the atlas; its name is unique in the atlas."""

    table: ClassVar[str] = "_results"

    # "space": values are rows of an array that a pointer column points into; "vector": they are in the cell table.
    kind: StoredAs
    dtype: str
    # Of a "space": feature space of its group, which has the array `layers/values`; else empty.
    space: str = ""
    width: int = 1  # values of a cell, along the first axis
    metric: str = ""  # of a "vector": by which distance an index answers
    n_cells: int = 0  # cells that had a result when it was added
    output: str = ""  # column of the results table that it came from
    # What computed it (to `parent`): of which cells, at which snapshot, from which results; empty where unknown.
    verb: str = ""
    model: str = ""
    model_hash: str = ""
    query: str = ""
    snapshot: str = ""
    parent: str = ""
    # The content of the `original_dataset_config.toml` in the result folder as JSON.
    config: str = "{}"
    arrays: str = "{}"  # JSON: path below the group -> array description
    checksums: str = "{}"  # JSON, as of a `DatasetRecord`
    index: str = "{}"  # JSON: `IndexFacts` of a vector index

    @property
    def index_facts(self) -> IndexFacts | None:
        """`index`, read; None where every row is compared."""
        facts = read_json(IndexFacts, self.index, self.table, self.uid, "index")
        return facts if facts.n_partitions else None

    @property
    def array_specs(self) -> dict[str, dict[str, Any]]:
        """`arrays`, read."""
        return read_json(dict[str, dict[str, Any]], self.arrays, self.table, self.uid, "arrays")

    @property
    def n_rows(self) -> int:
        """Rows of the array of a ``space``; more than `n_cells` where a dataset was purged."""
        shapes = [spec.get("shape") or [0] for spec in self.array_specs.values()]
        return int(shapes[0][0]) if shapes else 0

    def as_group(self, *, stored: bool = False) -> DatasetRecord:
        """Describe the group of a ``space`` like a group of a dataset, for code that reads and checks those.

        The array goes by the name of the layer; if `stored`, by the name that it has on disk, which a purge changes.
        """
        specs = self.array_specs
        names = [path.removeprefix("layers/") for path in specs] if stored else [VALUES]
        described = {f"layers/{name}": spec for name, spec in zip(names, specs.values(), strict=False)}
        return DatasetRecord(
            uid=self.uid,
            zarr_group=self.zarr_group,
            feature_space=self.space,
            n_cells=self.n_rows,
            pointer=self.column,
            name=self.name,
            source=self.source,
            n_features=self.width,
            n_entries=self.n_rows * self.width,
            layers=names,
            arrays=json.dumps(described),
            checksums=self.checksums,
            created_at=self.created_at,
        )


RESULTS_SCHEMA = entries_schema(
    ResultRecord, {"width": pa.int64(), "n_cells": pa.int64()}, ("uid", "name", "kind", "column")
)
"""Arrow schema of the table `_results`."""


def result_columns(schema: pa.Schema) -> dict[str, tuple[str, str]]:
    """Find the cell columns that hold results, visible or not: column -> uid and name of the result."""
    marked = [(field.name, field.metadata or {}) for field in schema]
    return {
        name: (facts[RESULT_KEY].decode(), facts.get(RESULT_NAME_KEY, b"").decode())
        for name, facts in marked
        if RESULT_KEY in facts
    }


def mark_result(field: pa.Field, uid: str, name: str) -> pa.Field:
    """Mark a cell column as one that holds a result."""
    return field.with_metadata({**(field.metadata or {}), RESULT_KEY: uid.encode(), RESULT_NAME_KEY: name.encode()})


class Corners(NamedTuple):
    """Least and greatest corner of a box."""

    lo: tuple[float, ...]
    hi: tuple[float, ...]


class GeometryRecord(AssetRecord):
    """One geometry store whose objects are cells of the atlas.

    Its group is ``<uid>/<space>``, the store as it was added. Its name is by default its feature space. Stores of
    several datasets share a name; a dataset has one of a name.
    """

    table: ClassVar[str] = "_geometry"

    space: str
    types: list[str] = Field(default_factory=list)
    axes: list[str] = Field(default_factory=list)  # names of the space axes
    layout: str = ""  # "0.9" or "0.7"
    n_objects: int = 0
    n_vertices: int = 0  # at the finest level
    n_levels: int = 1
    bounds: str = "[[], []]"  # JSON: least and greatest corner over all objects; empty lists where there is no vertex
    # JSON: the cell column and the object attribute (empty: the ids) whose values were matched.
    link: str = "{}"
    # Of transcripts: the vertex attributes that tell the cell (empty where objects are cells) and the gene.
    owner: str = ""
    genes: str = ""
    # Files and bytes of the group.
    n_files: int = 0
    n_bytes: int = 0
    digest: str = ""  # SHA-256 over names and bytes of its files

    @property
    def n_cells(self) -> int:
        """Cells of all datasets that have an object here."""
        return sum(self.cells_of.values())

    @property
    def extent(self) -> Corners:
        """`bounds`, read."""
        return read_json(Corners, self.bounds, self.table, self.uid, "bounds")

    @property
    def linked(self) -> dict[str, str]:
        """`link`, read."""
        return read_json(dict[str, str], self.link, self.table, self.uid, "link")


_NUMBERS = dict.fromkeys(("n_objects", "n_vertices", "n_levels", "n_files", "n_bytes"), pa.int64())
_LISTS = dict.fromkeys(("types", "axes"), pa.list_(pa.string()))
GEOMETRY_SCHEMA = entries_schema(
    GeometryRecord, {**_NUMBERS, **_LISTS}, ("uid", "name", "space", "column", "zarr_group")
)
"""Arrow schema of the table `_geometry`."""


ANNOTATION_KEY = b"raggedatlas.annotation"
"""Arrow field metadata key of a cell column that an annotation brought: its `AnnotationRecord` as JSON."""

RECIPE_KEY = b"raggedatlas.recipe"
"""Arrow schema metadata key of a table that tells how it was made, which `AnnotationRecord.recipe` keeps."""


class AnnotatedColumn(BaseModel):
    """One column of an annotation."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    # Cells that got a value from the annotation: they had none, or another one.
    n_values: int = Field(0, ge=0)
    n_replaced: int = Field(0, ge=0)  # how many of them had another value
    colors: dict[str, str] = Field(default_factory=dict)  # category -> color; empty where none were given


class AnnotationRecord(BaseModel):
    """One call of `annotate`.

    The record is stored in the metadata of the columns that it describes, so that values and record become visible in
    one commit.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    uid: str  # 16 hex digits; new for each annotation
    name: str  # unique in the atlas
    created_at: str = Field(default_factory=utc_now)  # UTC ISO timestamp
    source: str = ""  # the file, or the type of the object
    # Snapshot from which the annotated cells were queried, where the source says so.
    snapshot: int | None = None
    query: str = ""  # that query as text
    recipe: str = ""  # how the source says that it was made, as JSON; of a split
    on_conflict: OnConflict = "error"  # what was done where a cell had another value
    n_cells: int = Field(0, ge=0)  # cells of the atlas that the source names
    # Name of a column, as results show it -> what was written.
    columns: dict[str, AnnotatedColumn] = Field(default_factory=dict)

    def mark(self, field: pa.Field) -> pa.Field:
        """Return a cell column that carries this record in its metadata."""
        return field.with_metadata({**(field.metadata or {}), ANNOTATION_KEY: self.model_dump_json().encode()})


def annotation_of(field: pa.Field) -> AnnotationRecord | None:
    """Return the record of a cell column, or None if no annotation brought the column.

    Raises `CorruptError` if the record does not parse.
    """
    text = (field.metadata or {}).get(ANNOTATION_KEY)
    if text is None:
        return None
    # Bytes that are no UTF-8 are replaced, so that damage becomes the parser's `CorruptError`.
    return read_json(
        AnnotationRecord, text.decode(errors="replace"), "the schema of cells", field.name, ANNOTATION_KEY.decode()
    )


def annotation_columns(schema: pa.Schema) -> dict[str, AnnotationRecord]:
    """Return the cell columns that annotations brought, oldest first: stored name -> record."""
    # Lance appends new columns at the end of the schema, so its order is that of the annotations.
    records = ((field.name, annotation_of(field)) for field in schema)
    return {name: record for name, record in records if record is not None}


class DeletedCells(BaseModel):
    """The cells of one dataset that a deletion removed.

    `counts` maps a group, or the uid of a result that is stored as vectors, to the deleted cells that had a row or a
    value there, and the stored entries of these rows. What was recorded of groups, results and geometry before the
    deletion stays as it is.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    n_cells: int = Field(ge=0)
    # Uid of one of them. As all go in one commit, the table of cells has all of them or none.
    witness: str
    rows: str  # SHA-256 of the file that lists their rows in the dataset, and their uids
    counts: dict[str, tuple[int, int]] = Field(default_factory=dict)


class DeletionRecord(BaseModel):
    """One call of `delete_cells`.

    The records are metadata of the table of cells: a version of it, and so a snapshot, has the record of every cell
    that it lacks. A record is written before its cells are deleted.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    uid: str  # 16 hex digits; the files of rows are called `frames/deleted.<uid>.arrow`
    created_at: str = Field(default_factory=utc_now)  # UTC ISO timestamp
    where: str = ""  # the condition, or how the cells were given
    datasets: dict[str, DeletedCells] = Field(default_factory=dict)  # dataset uid -> its cells
    # The process that deletes, as in a lease; empty once the cells are deleted.
    owner: dict[str, Any] = Field(default_factory=dict)

    @property
    def n_cells(self) -> int:
        """Deleted cells of all datasets."""
        return sum(cells.n_cells for cells in self.datasets.values())

    @property
    def frame(self) -> str:
        """Name of the frame of a dataset that lists its deleted rows."""
        return f"deleted.{self.uid}"

    def of(self, datasets: Collection[str]) -> "DeletionRecord":
        """Return the record of some of its datasets."""
        return self.model_copy(update={"datasets": {uid: c for uid, c in self.datasets.items() if uid in datasets}})


def without_deleted(cells_of: Mapping[str, int], deletions: Sequence[DeletionRecord], key: str) -> dict[str, int]:
    """Return how many cells of each dataset have something, as recorded when it was added, less those deleted since.

    `cells_of` has the recorded cells by dataset uid. `key` is a group, or the uid of a result that is stored as
    vectors.

    Examples
    --------
    >>> gone = DeletedCells(n_cells=2, witness="", rows="", counts={"z": (1, 0)})
    >>> without_deleted({"a": 5, "b": 3}, [DeletionRecord(uid="1", datasets={"a": gone})], "z")
    {'a': 4, 'b': 3}
    """
    return {uid: n - deleted_counts(deletions, uid, key)[0] for uid, n in cells_of.items()}


def deleted_counts(deletions: Sequence[DeletionRecord], dataset: str, key: str) -> tuple[int, int]:
    """Return how many deleted cells of a dataset had a row or value in something, and their stored entries."""
    own = [d.datasets[dataset].counts.get(key, (0, 0)) for d in deletions if dataset in d.datasets]
    return sum(n for n, _ in own), sum(n for _, n in own)
