"""Records of an atlas (datasets, feature layouts, snapshots) and their conversion to and from Arrow rows, the one place that parses them."""

import contextlib
import datetime as dt
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, Self, TypeVar, cast, get_origin

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from raggedatlas.errors import ConflictError, CorruptError
from raggedatlas.model.protocols import NARROW, MatrixForm

Record = TypeVar("Record", bound=BaseModel)
T = TypeVar("T")


def entries_schema(record: type[BaseModel], kinds: Mapping[str, pa.DataType], needed: Collection[str]) -> pa.Schema:
    """Return the Arrow schema of a table of records: text, but for the fields that `kinds` names; `needed` are never null."""
    return pa.schema(
        [pa.field(name, kinds.get(name, pa.string()), nullable=name not in needed) for name in record.model_fields]
    )


def record_from_row(record: type[Record], row: Mapping[str, Any], table: str, key: str) -> Record:
    """Read one row of a table; a null is the field's default.

    Raises `CorruptError`, which names `table`, the row's value in the column `key`, and the field, if a value is not
    what the record has there.
    """
    try:
        # Rows from before a column was added are null there, and get the default of the field.
        return record(**{name: value for name, value in row.items() if value is not None})
    except (ValidationError, UnicodeDecodeError) as error:
        raise _damaged(error, table, row.get(key)) from error


def read_json(kind: type[T], text: str, table: str, row: object, field: str) -> T:
    """Read the JSON text of one field of a row; the text of a frozen object is parsed once.

    `kind` is a frozen pydantic model or dataclass, or a type such as ``dict[str, int]``. Empty text means an empty
    object. Raises `CorruptError`, which names `table`, `row` and `field`, if the text is no JSON or holds something
    else.
    """
    try:
        # A dict is the caller's own; objects are frozen and can be shared.
        parse = _parse if get_origin(kind) is dict else _parsed
        return cast("T", parse(kind, text or "{}"))
    except (ValidationError, TypeError) as error:
        raise _damaged(error, table, row, field) from error


_adapter: Any = lru_cache(maxsize=64)(TypeAdapter)


def _parse(kind: Any, text: str) -> Any:  # noqa: ANN401
    return _adapter(kind).validate_json(text)


_parsed: Any = lru_cache(maxsize=1024)(_parse)


def _damaged(error: Exception, table: str, row: object, field: str = "") -> CorruptError:
    """Return an error that names the table, row and field that do not parse."""
    first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
    place = ".".join([field, *map(str, first["loc"])]).strip(".")
    return CorruptError(
        f"Table {table!r}, row {str(row)!r}: the field {place!r} is damaged: {first['msg']}. Run validate('deep'), and "
        "restore the atlas from a copy or a snapshot with restore()."
    )


def entries_to_table(records: Sequence[BaseModel], schema: pa.Schema) -> pa.Table:
    """Convert records to rows of a table."""
    return pa.Table.from_pylist([record.model_dump() for record in records], schema=schema)


def entries_from_table(record: type[Record], table: pa.Table, name: str) -> list[Record]:
    """Read rows of a table as records, in the order of adding (``created_at``); a null means the field's default."""
    records = [record_from_row(record, row, name, "uid") for row in rows_of(table, name)]
    # Times of `utc_now` have one zone and one width, so their texts sort as the times do.
    return sorted(records, key=lambda entry: str(getattr(entry, "created_at")))  # noqa: B009 - records have one; their base has not


def rows_of(table: pa.Table, name: str) -> list[dict[str, Any]]:
    """Return the rows of a table as Python objects; raises `CorruptError`, which names the table by `name`, for text that is not UTF-8."""
    try:
        return cast("list[dict[str, Any]]", table.to_pylist())
    except UnicodeDecodeError as error:
        raise CorruptError(
            f"Table {name!r} holds text that is not UTF-8 ({error}); restore the atlas from a copy or a snapshot with restore()."
        ) from error


TableVersion = Annotated[int, Field(ge=0, lt=2**63)]
"""Version of a Lance table; what a damaged record has beyond 64 bits is refused when the record is parsed."""


def utc_now() -> str:
    """Return the current time as ISO 8601 text in UTC, with microseconds."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="microseconds")


class MatrixFacts(BaseModel):
    """In which form a stored matrix comes back."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    form: MatrixForm  # as it was in the file
    dtype: str  # NumPy dtype that it had
    wide: tuple[bool, bool] = NARROW  # whether its pointers and its indices had 64 bits

    @field_validator("dtype")
    @classmethod
    def _is_dtype(cls, value: str) -> str:
        try:
            return str(np.dtype(value))
        # pydantic reports a `ValueError` with its field, but lets a `TypeError` through.
        except TypeError as error:
            raise ValueError(str(error)) from error


class LayerFacts(MatrixFacts):
    """One layer of a group."""

    key: str  # which matrix of the file it was, such as "raw/X"
    features: str = ""  # key of the table of its columns; empty for a matrix whose columns are no features


class ExtraFacts(MatrixFacts):
    """A matrix that is kept next to the layers."""

    path: str  # where it is below the dataset's first group
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """Where a small file is inside one that holds several."""

    file: str  # path of the larger file below the Zarr store
    offset: int  # of the first byte
    n_bytes: int

    def __post_init__(self) -> None:
        """Check what may come from a damaged record."""
        numbers = (self.offset, self.n_bytes)
        if type(self.file) is not str or any(type(n) is not int or not 0 <= n < 2**62 for n in numbers):
            raise ValueError(f"{self} is no part of a file")


@dataclass(frozen=True)
class Link:
    """Where the bytes of an array are that stay in a file outside of the atlas."""

    # Address of the file or Zarr folder: absolute, or of a local file relative to the folder of the atlas.
    source: str
    array: str  # name of the array among the references, such as "X/data"
    references: Span  # where the references are, which have the place of every chunk
    sha256: str  # of the references
    # Whether only a sample shows that the values are counts; then they are checked whenever they are read.
    sampled: bool = False
    # Shape in the file, and shape of its chunks, where rows of a dense matrix are read as entries, one after the other.
    matrix: tuple[int, int] | None = None
    chunks: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Check what may come from a damaged record."""
        for name in ("matrix", "chunks"):
            sizes: object = getattr(self, name)
            if sizes is not None:
                sizes = tuple(sizes) if isinstance(sizes, list | tuple) else ()
                if len(sizes) != 2 or any(type(n) is not int or not 0 < n < 2**62 for n in sizes):
                    raise ValueError(f"{name} is {sizes}, which is no shape of a matrix")
                object.__setattr__(self, name, sizes)
        if (self.matrix is None) != (self.chunks is None):
            raise ValueError("matrix and chunks come together")
        if isinstance(self.references, dict):
            object.__setattr__(self, "references", Span(**self.references))
        texts: tuple[object, ...] = (self.source, self.array, self.sha256)
        sampled: object = self.sampled
        if any(type(text) is not str for text in texts) or type(sampled) is not bool or not self.source:
            raise ValueError(f"{self} is no link to a file")


class BundleFacts(BaseModel):
    """The file that holds the small files of a dataset; see ``raggedatlas.store.bundle``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    n_bytes: int = Field(ge=0)
    sha256: str
    file: str = ""  # path below the Zarr store if it is shared, else empty
    n_datasets: int = 1  # datasets that it was written with
    # Kept frame -> where it is in there; those of arrays are in their descriptions.
    frames: dict[str, Span] = Field(default_factory=dict)


class SourceFacts(BaseModel):
    """The file or folder that a dataset is linked to, as it was then."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    address: str  # of a local file near the atlas relative to its folder
    n_bytes: int = Field(ge=0)  # size of what is referenced
    n_objects: int = Field(default=1, ge=0)  # number of files of what is referenced
    modified: str = ""  # when the newest of them was written (UTC, ISO); empty where that is not known
    etag: str = ""  # ETag of a file in a store or on a server
    # What the content hash of the dataset covers.
    hashed: Literal["metadata", "full"] = "metadata"


class DatasetFacts(BaseModel):
    """What is known of a dataset's file; the column `facts` holds it as JSON."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: str = ""
    n_cells: int | None = None  # cells of the file; None where the record says it
    layers: dict[str, LayerFacts] = Field(default_factory=dict)
    # What the atlas did not take of the file: element -> what it is.
    left_out: dict[str, str] = Field(default_factory=dict)
    # Matrices of the file that are kept next to the layers, by key.
    extras: dict[str, ExtraFacts] = Field(default_factory=dict)
    # Column -> category -> color.
    colors: dict[str, dict[str, str]] = Field(default_factory=dict)
    column_order: str = ""  # how the columns are stored
    feature_set: str = ""  # hash of the features, independent of their order
    cell_names: str = ""  # hash of the names of the file's cells, in its order
    frames: dict[str, str] = Field(default_factory=dict)  # kept frame -> SHA-256 of its file
    bundle: BundleFacts | None = None  # the file of the dataset's small files; None where each is a file of its own
    # The file that the dataset is linked to; None where its values are in the atlas.
    linked: SourceFacts | None = None
    license: str = ""  # as the file or whoever added it named it; empty where neither did

    def to_json(self) -> str:
        """Return the JSON of the column."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True), sort_keys=True)


class DatasetRecord(BaseModel):
    """One Zarr group of one dataset; its row is the commit point of an `add`.

    A dataset with k modalities has k records that share `uid`; `zarr_group` is the key of a row.

    Attributes
    ----------
    uid : str
        Dataset uid, shared by the records of one dataset.
    zarr_group : str
        ``<uid>/<space>`` or, for a layer with separate entries, ``<uid>/<space>__<layer>``.
    feature_space : str
        The group's feature space.
    n_cells : int
        Rows of the group.
    created_at : str
        UTC ISO timestamp.
    layout_uid : str
        The ordered feature list; empty for spaces without features.
    pointer : str
        The cell column that points into this group.
    name, source : str
        What people call the dataset, and where it came from.
    content_hash : str
        Hash of features, cells and values; the same for the same file.
    n_features, n_entries : int
        Columns, and stored entries (sparse) or values (dense).
    layers : list of str
        Layers in this group.
    arrays : str
        JSON: path below the group -> array description, so that opening needs no request per group.
    checksums : str
        JSON: path of an array below the group -> crc32c over its values; path of its shards, ``<array>/c``, -> hash over them.
    facts : str
        JSON of `DatasetFacts`: what must come back as it was.

    Examples
    --------
    >>> record = DatasetRecord(uid="0" * 16, zarr_group="0/gene_expression", feature_space="gene_expression", n_cells=3)
    >>> record.layers
    []
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    uid: str
    zarr_group: str
    feature_space: str
    n_cells: int
    created_at: str = Field(default_factory=utc_now)
    layout_uid: str = ""
    pointer: str = ""
    name: str = ""
    source: str = ""
    content_hash: str = ""
    n_features: int = 0
    n_entries: int = 0
    layers: list[str] = Field(default_factory=list)
    arrays: str = "{}"
    checksums: str = "{}"
    facts: str = "{}"

    @property
    def array_specs(self) -> dict[str, dict[str, Any]]:
        """`arrays`, read; raises `CorruptError` if it is damaged, as the next two do."""
        return read_json(dict[str, dict[str, Any]], self.arrays, "datasets", self.zarr_group, "arrays")

    @property
    def array_checksums(self) -> dict[str, str]:
        """`checksums`, read."""
        return read_json(dict[str, str], self.checksums, "datasets", self.zarr_group, "checksums")

    @property
    def file_facts(self) -> DatasetFacts:
        """`facts`, read."""
        return read_json(DatasetFacts, self.facts, "datasets", self.zarr_group, "facts")

    # Those that every `add` asks of all datasets are kept; whole facts of thousands of them would take much memory.
    @cached_property
    def n_cells_added(self) -> int:
        """Number of cells that the dataset was added with, in this space or not."""
        n_cells = self._fact("n_cells", int)
        return self.n_cells if n_cells is None else n_cells

    @cached_property
    def feature_set(self) -> str:
        """Hash of the set of features."""
        return self._fact("feature_set", str) or ""

    @cached_property
    def cell_names(self) -> str:
        """Hash of the names of the file's cells."""
        return self._fact("cell_names", str) or ""

    def _fact(self, name: str, kind: type[T]) -> T | None:
        """Return one of `facts`; checking the others takes some ten times as long."""
        with contextlib.suppress(ValueError, AttributeError):
            value = json.loads(self.facts).get(name)
            if value is None or type(value) is kind:
                return value
        return cast("T | None", getattr(self.file_facts, name))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced, without what was kept of the old ones."""
        made = super().model_copy(update=update, deep=deep)
        for name in ("n_cells_added", "feature_set", "cell_names"):
            made.__dict__.pop(name, None)
        return made


def datasets_from_table(table: pa.Table) -> list[DatasetRecord]:
    """Read rows of `datasets`, in their order."""
    return [record_from_row(DatasetRecord, row, "datasets", "zarr_group") for row in rows_of(table, "datasets")]


COLUMNS = "columns"
"""Array of a sparse group whose columns are not in the file's order: the stored column of every column of the file, (n_features,) uint32."""

EXTRAS = "extras"
"""Group below a dataset's first group that keeps everything of the source except cells, features and layers."""

ELEMENTS = "extras/elements"
"""Array of the bytes of the zip file that holds the other elements, (n_bytes,) uint8; see ``raggedatlas.formats.anndata.packing``."""

DATASETS_SCHEMA = entries_schema(
    DatasetRecord,
    {**dict.fromkeys(("n_cells", "n_features", "n_entries"), pa.int64()), "layers": pa.list_(pa.string())},
    ("uid", "zarr_group", "feature_space", "n_cells"),
)
"""Arrow schema of the table `datasets`."""


class FeatureLayout(BaseModel):
    """One (layout, feature) pair.

    Attributes
    ----------
    layout_uid : str
        Content hash of the ordered feature list.
    feature_uid : str
        Registry uid.
    local_index : int
        Column of the feature in the group's arrays.
    global_index : int or None
        The registry's index; None until ``reindex_registry()`` has run.

    Examples
    --------
    >>> FeatureLayout(layout_uid="a", feature_uid="b", local_index=0).global_index is None
    True
    """

    model_config = ConfigDict(frozen=True)

    layout_uid: str
    feature_uid: str
    local_index: int
    global_index: int | None = None


LAYOUTS_SCHEMA = entries_schema(
    FeatureLayout,
    {"local_index": pa.int32(), "global_index": pa.int64()},
    ("layout_uid", "feature_uid", "local_index"),
)
"""Arrow schema of the table `_feature_layouts`."""


class AtlasVersionRecord(BaseModel):
    """One snapshot: the exact version of every table.

    Attributes
    ----------
    version : int
        1, 2, 3, ... in the order of recording.
    label : str or None
        A user-supplied name.
    created_at : str
        UTC ISO timestamp.
    table_versions : dict
        Table name -> Lance version.
    spaces : dict
        Feature space name -> its definition as JSON.
    n_cells, n_datasets : int
        Counts at that moment.
    ignored : list of str
        Uids of datasets whose cells stood in the table without a record (an `add` under way); readers leave them out.
    manifest : str
        SHA-256 of the manifest, which lists every table file that the snapshot reaches with its length and hash; empty until
        the snapshot is recorded.
    root : str
        `root_hash` when the snapshot was recorded.

    Examples
    --------
    >>> AtlasVersionRecord(version=1, table_versions={"cells": 3}).label is None
    True
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int
    label: str | None = None
    created_at: str = Field(default_factory=utc_now)
    table_versions: dict[str, TableVersion] = Field(default_factory=dict)
    spaces: dict[str, str] = Field(default_factory=dict)
    n_cells: int = 0
    n_datasets: int = 0
    ignored: list[str] = Field(default_factory=list)
    manifest: str = ""
    root: str = ""

    def __repr__(self) -> str:
        """Say in a line what it is."""
        label = f" ({self.label})" if self.label else ""
        return f"Snapshot {self.version}{label}: {self.n_cells:,} cells of {self.n_datasets:,} datasets, {self.created_at[:16].replace('T', ' ')} UTC"

    __str__ = __repr__

    @property
    def tag(self) -> str:
        """The Lance tag that keeps this snapshot's table versions."""
        return f"atlas-v{self.version}"

    @property
    def root_hash(self) -> str:
        """SHA-256 over all that is recorded of the snapshot, `root` excepted; empty without a manifest.

        It covers the manifest's hash, by that the table files, and by these the checksums of everything else: snapshots of equal root
        hashes are equal.
        """
        if not self.manifest:
            return ""
        # Without what is empty, so that a field that is added later does not change the hash of a snapshot that lacks it.
        known = {name: value for name, value in self.model_dump(exclude={"root"}).items() if value}
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    def sealed(self) -> Self:
        """Return the record with its root hash."""
        return self.model_copy(update={"root": self.root_hash})


class PurgeMark(BaseModel):
    """What the atlas notes of a purge from its first write to its last.

    In the stage ``begun`` nothing is changed yet; in ``rewriting`` snapshots and tables are being rewritten; in
    ``deleting`` nothing refers to the dataset any more, and its arrays are being deleted.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    uid: str  # of the dataset
    name: str = ""
    stage: Literal["begun", "rewriting", "deleting"] = "begun"
    # While rewriting: table -> version with its current content; the newest version may hold that of an old snapshot.
    tables: dict[str, TableVersion] = Field(default_factory=dict)
    # While deleting: geometry stores that are deleted with the dataset.
    stores: list[str] = Field(default_factory=list)
    # The process that runs the purge, as in a lease.
    owner: dict[str, Any] = Field(default_factory=dict)

    def refusal(self, action: str, place: str) -> ConflictError:
        """Return the error of what cannot be done at a place while the purge is unfinished."""
        return ConflictError(
            f"{action} is refused, because the purge of dataset {self.shown} in {place} is not finished. If no process "
            f"is running it, finish it with purge({self.uid!r}) or repair(), then try again [unfinished-purge]."
        )

    @classmethod
    def from_json(cls, text: str) -> "PurgeMark | None":
        """Parse a mark; ``null`` means none."""
        if text == "null":
            return None
        given = read_json(dict[str, Any], text, "atlas_versions", "table metadata", "raggedatlas.purging")
        return record_from_row(cls, given, "atlas_versions", "uid")

    @property
    def shown(self) -> str:
        """Name and uid, for messages."""
        return f"{self.name!r} ({self.uid})" if self.name else self.uid


VERSIONS_SCHEMA = entries_schema(
    AtlasVersionRecord,
    {**dict.fromkeys(("version", "n_cells", "n_datasets"), pa.int64()), "ignored": pa.list_(pa.string())},
    ("version",),
)
"""Arrow schema of the table `atlas_versions`."""

JSON_COLUMNS = ("table_versions", "spaces")


def versions_to_table(records: list[AtlasVersionRecord]) -> pa.Table:
    """Write snapshots as rows of `atlas_versions`."""
    rows = []
    for record in records:
        row = record.model_dump()
        rows.append({**row, **{key: json.dumps(row[key], sort_keys=True) for key in JSON_COLUMNS}})
    return pa.Table.from_pylist(rows, schema=VERSIONS_SCHEMA)


def versions_from_table(table: pa.Table) -> list[AtlasVersionRecord]:
    """Read rows of `atlas_versions`, sorted by number."""
    name = "atlas_versions"
    if missing := sorted({"version", *JSON_COLUMNS} - set(table.column_names)):
        raise CorruptError(f"Table {name!r} has no columns {missing}; restore the atlas from a copy.")
    rows = [
        row | {key: read_json(dict[str, Any], row[key] or "", name, row["version"], key) for key in JSON_COLUMNS}
        for row in rows_of(table, name)
    ]
    return sorted((record_from_row(AtlasVersionRecord, row, name, "version") for row in rows), key=lambda r: r.version)
