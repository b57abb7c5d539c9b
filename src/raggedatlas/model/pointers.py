"""Pointers: the location of one cell's values of one feature space in the Zarr store."""

from enum import StrEnum
from typing import ClassVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, model_validator

SPACE_KEY = b"raggedatlas.feature_space"
"""Arrow field metadata key that names the feature space of a pointer column."""


class PointerKind(StrEnum):
    """Whether a group holds a sparse matrix, a dense one, or shapes."""

    SPARSE = "sparse"
    DENSE = "dense"
    GEOMETRY = "geometry"


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


AXES = ("x", "y", "z", "t")
"""Names under which a geometry pointer keeps the axes of its store, in their order; a store of two axes leaves ``z`` and ``t`` null."""


class GeometryPointer(BaseModel):
    """One cell's shape in a geometry store (seed 002), with what a box query needs of it.

    Attributes
    ----------
    zarr_group : str
        Path of the geometry store in the Zarr store.
    object_id : int
        Id of the object there, 0 to 2**63 - 1.
    level : int
        Coarsest level that still holds the object; 0 is the finest.
    x_min, x_max, y_min, y_max, z_min, z_max, t_min, t_max : float or None
        Its bounding box in world units, both ends inclusive; None for axes that the store lacks, and for an object without vertices.
    x, y, z, t : float or None
        Its centroid: the mean of its vertices.

    Examples
    --------
    >>> pointer = GeometryPointer(zarr_group="a1/morphology", object_id=7, x_min=0, x_max=2, y_min=1, y_max=3, x=1, y=2)
    >>> pointer.bbox, pointer.centroid
    (((0.0, 1.0), (2.0, 3.0)), (1.0, 2.0))
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: ClassVar[PointerKind] = PointerKind.GEOMETRY
    arrow_type: ClassVar[pa.DataType] = pa.struct(
        [("zarr_group", pa.string()), ("object_id", pa.int64()), ("level", pa.int16())]
        + [(f"{axis}_{end}", pa.float64()) for axis in AXES for end in ("min", "max")]
        + [(axis, pa.float64()) for axis in AXES]
    )

    zarr_group: str
    object_id: int
    level: int = 0
    x_min: float | None = None
    x_max: float | None = None
    y_min: float | None = None
    y_max: float | None = None
    z_min: float | None = None
    z_max: float | None = None
    t_min: float | None = None
    t_max: float | None = None
    x: float | None = None
    y: float | None = None
    z: float | None = None
    t: float | None = None

    @model_validator(mode="after")
    def _ordered(self) -> "GeometryPointer":
        if self.object_id < 0 or self.level < 0:
            raise ValueError(f"object_id and level must be >= 0, got {self}")
        for axis in AXES:
            least, greatest = getattr(self, f"{axis}_min"), getattr(self, f"{axis}_max")
            if (least is None) != (greatest is None) or (least is not None and not least <= greatest):
                raise ValueError(f"{axis}_min <= {axis}_max must hold, or neither be there, got {self}")
        return self

    @property
    def bbox(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Least and greatest corner; None for an object without vertices."""
        axes = [axis for axis in AXES if getattr(self, f"{axis}_min") is not None]
        if not axes:
            return None
        return tuple(getattr(self, f"{a}_min") for a in axes), tuple(getattr(self, f"{a}_max") for a in axes)

    @property
    def centroid(self) -> tuple[float, ...] | None:
        """Mean of the vertices; None for an object without any."""
        values = tuple(getattr(self, axis) for axis in AXES if getattr(self, axis) is not None)
        return values or None


POINTERS: dict[PointerKind, type[SparseZarrPointer] | type[DenseZarrPointer] | type[GeometryPointer]] = {
    PointerKind.SPARSE: SparseZarrPointer,
    PointerKind.DENSE: DenseZarrPointer,
    PointerKind.GEOMETRY: GeometryPointer,
}


def pointer_field(name: str, kind: PointerKind, space: str) -> pa.Field:
    """Describe a pointer column: a nullable struct that carries its feature space as field metadata.

    Parameters
    ----------
    name : str
        Column name.
    kind : PointerKind
        Sparse, dense or geometry.
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
    columns = {}
    for field in schema:
        space = (field.metadata or {}).get(SPACE_KEY)
        if space is not None:
            children = {field.type.field(i).name for i in range(field.type.num_fields)}
            columns[field.name] = (space.decode(), _kind(children))
    return columns


def _kind(children: set[str]) -> PointerKind:
    """Return the kind of a pointer by the fields of its struct."""
    if "object_id" in children:
        return PointerKind.GEOMETRY
    return PointerKind.SPARSE if "zarr_row" in children else PointerKind.DENSE
