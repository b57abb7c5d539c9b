"""Pointers, the location of the values of one cell, and the feature spaces that they point into."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pkgutil import resolve_name
from typing import ClassVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, model_validator

from raggedatlas.errors import SchemaError
from raggedatlas.model.arguments import checked
from raggedatlas.model.ids import check_name
from raggedatlas.model.records import read_json
from raggedatlas.model.wings import installed_wings

SPACE_KEY = b"raggedatlas.feature_space"
"""Arrow field metadata key that names the feature space of a pointer column."""


class PointerKind(StrEnum):
    """Whether a group holds a sparse matrix, a dense one, or shapes."""

    SPARSE = "sparse"
    DENSE = "dense"
    GEOMETRY = "geometry"


class SparseZarrPointer(BaseModel):
    """One cell's entries in a sparse group.

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
    """One cell's row in a dense group.

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
    """One cell's shape in a geometry store, with what a box query needs of it.

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
        Its centroid: of a polygon or closed line the centre of area, else the mean of its vertices.

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
            # `not least <= greatest` also refuses NaN, for which `least > greatest` is false.
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
    """Describe a pointer column: a nullable struct that carries its feature space as field metadata."""
    return pa.field(name, POINTERS[kind].arrow_type, metadata={SPACE_KEY: space.encode()})


def pointer_columns(schema: pa.Schema) -> dict[str, tuple[str, PointerKind]]:
    """Find the pointer columns of a cell table: column name -> (feature space, kind), in column order."""
    columns = {}
    for field in schema:
        space = (field.metadata or {}).get(SPACE_KEY)
        if space is not None:
            children = {field.type.field(i).name for i in range(field.type.num_fields)}
            flat = PointerKind.SPARSE if "zarr_row" in children else PointerKind.DENSE
            columns[field.name] = (space.decode(), PointerKind.GEOMETRY if "object_id" in children else flat)
    return columns


def geometry_columns(schema: pa.Schema) -> list[str]:
    """Return the columns of a cell table that hold pointers to geometry."""
    return [name for name, (_, kind) in pointer_columns(schema).items() if kind is PointerKind.GEOMETRY]


@dataclass(frozen=True, slots=True)
class FeatureSpace:
    """One kind of measurement.

    Parameters
    ----------
    name : str
        Letters, digits and ``_``; also the default name of the pointer column.
    kind : PointerKind
        ``sparse`` groups hold CSR parts, ``dense`` groups hold arrays with one row per cell, ``geometry`` groups are geometry stores
        with one object per cell.
    has_features : bool
        Whether columns are named features with a registry (genes, proteins, peaks). Embeddings and tiles have none.
    is_counts : bool
        Whether non-negative integer matrices of this space go to a layer ``counts``.
    rank : int
        Rank of one cell's value: 1 for a vector, 3 for an image tile ``(C, Y, X)``.
    description : str
        One line for people.

    Examples
    --------
    >>> FeatureSpace("tf_activity", PointerKind.DENSE).registry
    'tf_activity_registry'
    """

    name: str
    kind: PointerKind
    has_features: bool = True
    is_counts: bool = True
    rank: int = 1
    description: str = ""

    def __post_init__(self) -> None:
        """Check the definition."""
        check_name(self.name, "feature space")
        # `__` separates space and layer in pointer columns and groups (`<space>__<layer>`).
        if not self.name.isidentifier() or "__" in self.name:
            raise SchemaError(
                f"The feature space name {self.name!r} must be an identifier without a double underscore, "
                "because it names a column; choose another, e.g. 'gene_expression'."
            )
        # A definition may give the kind as text, which the `is` comparisons below would miss.
        object.__setattr__(self, "kind", PointerKind(self.kind))
        if self.kind is PointerKind.GEOMETRY and (self.has_features or self.is_counts or self.rank != 1):
            raise SchemaError(
                f"Feature space {self.name!r}: a geometry space has shapes, no features, no counts and rank 1; got "
                f"has_features={self.has_features}, is_counts={self.is_counts}, rank={self.rank}."
            )
        if self.rank < 1 or (self.kind is PointerKind.SPARSE and (self.rank != 1 or not self.has_features)):
            raise SchemaError(
                f"Feature space {self.name!r}: a sparse space has rank 1 and features, and ranks start at 1; "
                f"got kind={self.kind.value!r}, rank={self.rank}, has_features={self.has_features}."
            )

    @property
    def registry(self) -> str:
        """Name of the registry table of this space."""
        return f"{self.name}_registry"

    def to_json(self) -> str:
        """Write the definition as JSON, the form in which an atlas stores it."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "FeatureSpace":
        """Read the form that `to_json` writes.

        Raises
        ------
        CorruptError
            If the text is no such definition.
        """
        return read_json(cls, text, "datasets", "table metadata", "feature space")


def _shapes(name: str, description: str) -> FeatureSpace:
    return FeatureSpace(name, PointerKind.GEOMETRY, has_features=False, is_counts=False, description=description)


BUILT_IN = (
    FeatureSpace("gene_expression", PointerKind.SPARSE, description="Transcript counts or values per gene."),
    FeatureSpace("chromatin_accessibility", PointerKind.SPARSE, description="Fragment or cut counts per peak."),
    FeatureSpace(
        "protein_abundance", PointerKind.DENSE, description="Antibody-derived tag counts or values per protein."
    ),
    FeatureSpace(
        "embedding", PointerKind.DENSE, has_features=False, is_counts=False, description="One vector per cell."
    ),
    FeatureSpace(
        "image_tiles",
        PointerKind.DENSE,
        has_features=False,
        is_counts=False,
        rank=3,
        description="One (C, Y, X) tile per cell.",
    ),
    _shapes("morphology", "One skeleton, graph or mesh per cell: a traced neuron."),
    _shapes("segmentation_mesh", "One surface mesh per cell."),
    _shapes("segmentation_boundary", "One outline (polyline or flat mesh) per cell."),
    _shapes("transcripts", "The points of one cell's transcripts, with their genes."),
    _shapes("position", "One point per cell."),
    _shapes("tract", "One streamline per cell: an axon's course."),
)
"""The spaces that every process knows."""

GEOMETRY_TYPES = {
    "morphology": ("skeleton", "graph", "mesh", "line", "polyline"),
    "segmentation_mesh": ("mesh",),
    "segmentation_boundary": ("polyline", "line", "mesh", "graph"),
    "transcripts": ("point_cloud",),
    "position": ("point_cloud",),
    "tract": ("streamline", "polyline", "line"),
}
"""Geometry types that a built-in space takes; a space of your own takes any."""

_KNOWN: dict[str, FeatureSpace] = {space.name: space for space in BUILT_IN}


@checked
def register_space(space: FeatureSpace) -> FeatureSpace:
    """Register a space in this process, so that schema classes can refer to it.

    Parameters
    ----------
    space : FeatureSpace
        The definition. An atlas stores the definitions it uses; readers need no registration.

    Returns
    -------
    FeatureSpace
        The same definition.

    Raises
    ------
    SchemaError
        If the name is taken by another definition.

    Examples
    --------
    >>> register_space(FeatureSpace("tf_activity", PointerKind.DENSE, is_counts=False)).name
    'tf_activity'
    """
    # One atomic step, so of two threads that register a name the second sees the first.
    registered = _KNOWN.setdefault(space.name, space)
    if registered != space:
        raise SchemaError(
            f"The feature space {space.name!r} is defined already, as {registered}; choose another name or use that definition."
        )
    return space


def known_spaces() -> dict[str, FeatureSpace]:
    """Return the spaces known to this process, by name: built in, registered, and those of installed extensions."""
    for name, where in (item for wing in installed_wings() for item in wing.spaces.items()):
        if name not in _KNOWN:
            register_space(resolve_name(where))
    return dict(_KNOWN)
