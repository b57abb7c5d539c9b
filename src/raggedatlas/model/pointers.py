"""Pointers: where in the Zarr store one cell's values of one feature space lie (seed 000, pointer types)."""

from enum import StrEnum
from typing import ClassVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, model_validator

SPACE_KEY = b"raggedatlas.feature_space"
"""Arrow field metadata key that names the feature space of a pointer column."""


class PointerKind(StrEnum):
    """Whether a group holds a sparse or a dense matrix."""

    SPARSE = "sparse"
    DENSE = "dense"


class SparseZarrPointer(BaseModel):
    """One cell's entries in a sparse group (seed 000, ``SparseZarrPointer``).

    Attributes
    ----------
    zarr_group : str
        Path of the group in the Zarr store.
    start, end : int
        Element positions into ``csr/indices`` and every ``csr/layers/<layer>``: ``[start, end)`` are the cell's entries.
    zarr_row : int
        0-based row of the cell in the group; the row id stored in ``csc/indices``.

    Examples
    --------
    >>> SparseZarrPointer(zarr_group="a1/gene_expression", start=0, end=3, zarr_row=0).end
    3
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: ClassVar[PointerKind] = PointerKind.SPARSE
    arrow_type: ClassVar[pa.DataType] = pa.struct(
        [("zarr_group", pa.string()), ("start", pa.int64()), ("end", pa.int64()), ("zarr_row", pa.int64())]
    )

    zarr_group: str
    start: int
    end: int
    zarr_row: int

    @model_validator(mode="after")
    def _ordered(self) -> "SparseZarrPointer":
        if not 0 <= self.start <= self.end or self.zarr_row < 0:
            raise ValueError(f"0 <= start <= end and zarr_row >= 0 must hold, got {self}")
        return self


class DenseZarrPointer(BaseModel):
    """One cell's row in a dense group (seed 000, ``DenseZarrPointer``).

    Attributes
    ----------
    zarr_group : str
        Path of the group in the Zarr store.
    position : int
        0-based row in the group's arrays.

    Examples
    --------
    >>> DenseZarrPointer(zarr_group="a1/protein_abundance", position=7).position
    7
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: ClassVar[PointerKind] = PointerKind.DENSE
    arrow_type: ClassVar[pa.DataType] = pa.struct([("zarr_group", pa.string()), ("position", pa.int64())])

    zarr_group: str
    position: int

    @model_validator(mode="after")
    def _inside(self) -> "DenseZarrPointer":
        if self.position < 0:
            raise ValueError(f"position must be >= 0, got {self.position}")
        return self


POINTERS: dict[PointerKind, type[SparseZarrPointer] | type[DenseZarrPointer]] = {
    PointerKind.SPARSE: SparseZarrPointer,
    PointerKind.DENSE: DenseZarrPointer,
}


def pointer_field(name: str, kind: PointerKind, space: str) -> pa.Field:
    """Describe a pointer column: a nullable struct that carries its feature space as field metadata.

    Parameters
    ----------
    name : str
        Column name.
    kind : PointerKind
        Sparse or dense.
    space : str
        Feature space.

    Examples
    --------
    >>> pointer_field("gene_expression", PointerKind.SPARSE, "gene_expression").type.num_fields
    4
    """
    return pa.field(name, POINTERS[kind].arrow_type, metadata={SPACE_KEY: space.encode()})


def pointer_columns(schema: pa.Schema) -> dict[str, tuple[str, PointerKind]]:
    """Find the pointer columns of a cell table.

    Returns
    -------
    dict
        Column name -> (feature space, kind), in column order.

    Examples
    --------
    >>> pointer_columns(pa.schema([pointer_field("gene_expression", PointerKind.SPARSE, "gene_expression")]))
    {'gene_expression': ('gene_expression', <PointerKind.SPARSE: 'sparse'>)}
    """
    found = {}
    for field in schema:
        space = (field.metadata or {}).get(SPACE_KEY)
        if space is not None:
            children = {field.type.field(i).name for i in range(field.type.num_fields)}
            kind = PointerKind.SPARSE if "zarr_row" in children else PointerKind.DENSE
            found[field.name] = (space.decode(), kind)
    return found
