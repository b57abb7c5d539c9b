"""Annotations: cell columns that were written back from an analysis, each with the record of where its values came from."""

from typing import Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from raggedatlas.model.entries import read_json
from raggedatlas.model.records import utc_now

ANNOTATION_KEY = b"raggedatlas.annotation"
"""Arrow field metadata key of a cell column that an annotation brought: its `AnnotationRecord` as JSON."""

OnConflict = Literal["error", "replace", "keep"]


class AnnotatedColumn(BaseModel):
    """One column of an annotation.

    Attributes
    ----------
    n_values : int
        Cells that got a value from the annotation: they had none, or another one.
    n_replaced : int
        How many of them had another value.
    colors : dict of str to str
        Category -> color; empty where none were given.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    n_values: int = Field(0, ge=0)
    n_replaced: int = Field(0, ge=0)
    colors: dict[str, str] = Field(default_factory=dict)


class AnnotationRecord(BaseModel):
    """One call of `annotate`.

    The record is stored in the metadata of the columns that it describes, so that values and record become visible in one commit.

    Attributes
    ----------
    uid : str
        16 hex digits; new for each annotation.
    name : str
        Unique in the atlas.
    created_at : str
        UTC ISO timestamp.
    source : str
        The file, or the type of the object.
    snapshot : int or None
        Snapshot from which the annotated cells were queried, where the source says so.
    query : str
        That query as text.
    on_conflict : {"error", "replace", "keep"}
        What was done where a cell had another value.
    n_cells : int
        Cells of the atlas that the source names.
    columns : dict of str to AnnotatedColumn
        Name of a column, as results show it -> what was written.

    Examples
    --------
    >>> AnnotationRecord(uid="0" * 16, name="leiden").columns
    {}
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    uid: str
    name: str
    created_at: str = Field(default_factory=utc_now)
    source: str = ""
    snapshot: int | None = None
    query: str = ""
    on_conflict: OnConflict = "error"
    n_cells: int = Field(0, ge=0)
    columns: dict[str, AnnotatedColumn] = Field(default_factory=dict)

    def mark(self, field: pa.Field) -> pa.Field:
        """Return a cell column that carries this record in its metadata."""
        return field.with_metadata({**(field.metadata or {}), ANNOTATION_KEY: self.model_dump_json().encode()})


def annotation_of(field: pa.Field) -> AnnotationRecord | None:
    """Return the record of a cell column, or None if no annotation brought the column.

    Raises
    ------
    CorruptError
        If the record does not parse.

    Examples
    --------
    >>> annotation_of(pa.field("leiden", pa.string())) is None
    True
    """
    text = (field.metadata or {}).get(ANNOTATION_KEY)
    if text is None:
        return None
    return read_json(
        AnnotationRecord, text.decode(errors="replace"), "the schema of cells", field.name, ANNOTATION_KEY.decode()
    )


def annotation_columns(schema: pa.Schema) -> dict[str, AnnotationRecord]:
    """Return the cell columns that annotations brought, oldest first: stored name -> record."""
    found = ((field.name, annotation_of(field)) for field in schema)
    return {name: record for name, record in found if record is not None}
