"""The atlas's own rows: datasets, feature layouts, snapshots (seed 000)."""

import datetime as dt
import json
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field


def utc_now() -> str:
    """Give the time as an ISO 8601 text in UTC, with microseconds.

    Examples
    --------
    >>> utc_now().endswith("+00:00")
    True
    """
    return dt.datetime.now(dt.UTC).isoformat(timespec="microseconds")


class DatasetRecord(BaseModel):
    """One Zarr group of one dataset; its row is the commit point of an `add` (seed 000, datasets table).

    A dataset with k modalities has k records that share `uid`; `zarr_group` is the key of a row.

    Attributes
    ----------
    uid : str
        Dataset uid, shared by the records of one dataset.
    zarr_group : str
        ``<uid>/<space>`` or, for a layer with entries of its own, ``<uid>/<space>__<layer>``.
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
        JSON: path below the group -> checksum over the decoded values.
    facts : str
        JSON: what must come back as it was (source form of the matrix, organism, report).

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
        """`arrays`, read."""
        specs: dict[str, dict[str, Any]] = json.loads(self.arrays)
        return specs


COLUMNS = "columns"
"""Array of a sparse group whose columns are not in the file's order: the stored column of every column of the file, (n_features,) uint32."""

EXTRAS = "extras"
"""Group below a dataset's first group that keeps what the source held beside cells, features and layers."""

ELEMENTS = "extras/elements"
"""Array of the bytes of the file in which elements are kept whole, (n_bytes,) uint8; see ``raggedatlas.formats.bundle``."""

DATASETS_SCHEMA = pa.schema(
    [
        pa.field("uid", pa.string(), nullable=False),
        pa.field("zarr_group", pa.string(), nullable=False),
        pa.field("feature_space", pa.string(), nullable=False),
        pa.field("n_cells", pa.int64(), nullable=False),
        ("created_at", pa.string()),
        ("layout_uid", pa.string()),
        ("pointer", pa.string()),
        ("name", pa.string()),
        ("source", pa.string()),
        ("content_hash", pa.string()),
        ("n_features", pa.int64()),
        ("n_entries", pa.int64()),
        ("layers", pa.list_(pa.string())),
        ("arrays", pa.string()),
        ("checksums", pa.string()),
        ("facts", pa.string()),
    ]
)
"""Arrow schema of the table `datasets`."""


class FeatureLayout(BaseModel):
    """One (layout, feature) pair (seed 000, ``_feature_layouts``).

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


LAYOUTS_SCHEMA = pa.schema(
    [
        pa.field("layout_uid", pa.string(), nullable=False),
        pa.field("feature_uid", pa.string(), nullable=False),
        pa.field("local_index", pa.int32(), nullable=False),
        ("global_index", pa.int64()),
    ]
)
"""Arrow schema of the table `_feature_layouts`."""


class AtlasVersionRecord(BaseModel):
    """One snapshot: the exact version of every table (seed 000, versioning).

    Attributes
    ----------
    version : int
        1, 2, 3, ... in the order of recording.
    label : str or None
        A name that people gave.
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

    Examples
    --------
    >>> AtlasVersionRecord(version=1, table_versions={"cells": 3}).label is None
    True
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int
    label: str | None = None
    created_at: str = Field(default_factory=utc_now)
    table_versions: dict[str, int] = Field(default_factory=dict)
    spaces: dict[str, str] = Field(default_factory=dict)
    n_cells: int = 0
    n_datasets: int = 0
    ignored: list[str] = Field(default_factory=list)

    @property
    def tag(self) -> str:
        """The Lance tag that keeps this snapshot's table versions."""
        return f"atlas-v{self.version}"


VERSIONS_SCHEMA = pa.schema(
    [
        pa.field("version", pa.int64(), nullable=False),
        ("label", pa.string()),
        ("created_at", pa.string()),
        ("table_versions", pa.string()),
        ("spaces", pa.string()),
        ("n_cells", pa.int64()),
        ("n_datasets", pa.int64()),
        ("ignored", pa.list_(pa.string())),
    ]
)
"""Arrow schema of the table `atlas_versions`."""

JSON_COLUMNS = ("table_versions", "spaces")


def versions_to_table(records: list[AtlasVersionRecord]) -> pa.Table:
    """Write snapshots as rows of `atlas_versions`.

    Examples
    --------
    >>> versions_to_table([AtlasVersionRecord(version=1)]).num_rows
    1
    """
    rows = []
    for record in records:
        row = record.model_dump()
        rows.append({**row, **{key: json.dumps(row[key], sort_keys=True) for key in JSON_COLUMNS}})
    return pa.Table.from_pylist(rows, schema=VERSIONS_SCHEMA)


def versions_from_table(table: pa.Table) -> list[AtlasVersionRecord]:
    """Read rows of `atlas_versions`, sorted by number.

    Examples
    --------
    >>> versions_from_table(versions_to_table([AtlasVersionRecord(version=2)]))[0].tag
    'atlas-v2'
    """
    rows = [{**row, **{key: json.loads(row[key] or "{}") for key in JSON_COLUMNS}} for row in table.to_pylist()]
    return sorted(
        (AtlasVersionRecord(**{**row, "ignored": row["ignored"] or []}) for row in rows), key=lambda r: r.version
    )
