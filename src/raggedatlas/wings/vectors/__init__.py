"""zarr-vectors: points, lines, graphs, skeletons and meshes in spatial chunks, and the geometry of cells."""

from typing import TYPE_CHECKING

from raggedatlas.model.wings import FileKind, Wing, lazy_attributes

if TYPE_CHECKING:
    from raggedatlas.wings.vectors.inspection import VectorInspection, inspect
    from raggedatlas.wings.vectors.validation.rules import RULES
    from raggedatlas.wings.vectors.validation.validator import validate

WING = Wing(
    name="vectors",
    assets={"geometry": "raggedatlas.wings.vectors.assets:GEOMETRY"},
    answers={
        "within": "raggedatlas.wings.vectors.cell_geometry:within",
        "read_shapes": "raggedatlas.wings.vectors.cell_geometry:read_shapes",
        "choose_centroids": "raggedatlas.wings.vectors.cell_geometry:choose_centroids",
        "read_centroids": "raggedatlas.wings.vectors.cell_geometry:read_centroids",
    },
    files=(
        FileKind(
            noun="a geometry store",
            accepts="raggedatlas.wings.vectors.inspection:is_store_path",
            validate="raggedatlas.wings.vectors.validation.validator:validate",
            levels=("structure", "metadata", "consistency", "conformance", "pyramid"),
            default="pyramid",
            inspect="raggedatlas.wings.vectors.inspection:inspect",
            refusals={
                "fix": "a geometry store cannot be repaired; write it again from its source",
                "--workers": "a geometry store is read by one process",
            },
        ),
    ),
    conversion="raggedatlas.wings.vectors.commands:GeometryConversion",
)

_HOMES = {
    "RULES": "raggedatlas.wings.vectors.validation.rules",
    "VectorInspection": "raggedatlas.wings.vectors.inspection",
    "inspect": "raggedatlas.wings.vectors.inspection",
    "validate": "raggedatlas.wings.vectors.validation.validator",
}

__all__ = [
    "RULES",
    "WING",
    "VectorInspection",
    "inspect",
    "validate",
]

__getattr__ = lazy_attributes(__name__, _HOMES)
