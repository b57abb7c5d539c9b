"""Feature spaces as data: what a pointer column may point at (seed 000, feature spaces)."""

import json
from dataclasses import asdict, dataclass

from raggedatlas.errors import SchemaError
from raggedatlas.model.arguments import checked
from raggedatlas.model.ids import check_name
from raggedatlas.model.plugins import SPACES, plugins
from raggedatlas.model.pointers import PointerKind
from raggedatlas.model.records import read_json


@dataclass(frozen=True, slots=True)
class FeatureSpace:
    """One kind of measurement.

    Parameters
    ----------
    name : str
        Letters, digits and ``_``; also the default name of the pointer column.
    kind : PointerKind
        ``sparse`` groups hold CSR parts, ``dense`` groups hold arrays with one row per cell, ``geometry`` groups are geometry stores
        (seed 002) with one object per cell.
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
        if not self.name.isidentifier() or "__" in self.name:
            raise SchemaError(
                f"The feature space name {self.name!r} must be an identifier without a double underscore, "
                "because it names a column; choose another, e.g. 'gene_expression'."
            )
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
    registered = _KNOWN.setdefault(space.name, space)
    if registered != space:
        raise SchemaError(
            f"The feature space {space.name!r} is defined already, as {registered}; choose another name or use that definition."
        )
    return space


def known_spaces() -> dict[str, FeatureSpace]:
    """Return the spaces known to this process, by name: built in, registered, and those of installed extensions.

    Examples
    --------
    >>> "gene_expression" in known_spaces()
    True
    """
    for name, entry in plugins(SPACES).items():
        if name not in _KNOWN:
            register_space(entry.load())
    return dict(_KNOWN)
