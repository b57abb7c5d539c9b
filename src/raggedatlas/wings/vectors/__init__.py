"""zarr-vectors (seed 002): points, lines, graphs, skeletons and meshes in spatial chunks, and the geometry of cells."""

from typing import TYPE_CHECKING

from raggedatlas.model.wings import AssetKind, Wing, lazy_attributes

if TYPE_CHECKING:
    from raggedatlas.wings.vectors.inspection import VectorInspection, inspect
    from raggedatlas.wings.vectors.validation.rules import RULES
    from raggedatlas.wings.vectors.validation.validator import validate

WING = Wing(
    name="vectors",
    assets=(
        AssetKind(
            noun="geometry",
            accepts="raggedatlas.wings.vectors.sources:is_geometry",
            attachment="raggedatlas.wings.vectors.attachment:geometry_attachment",
        ),
    ),
    answers={
        "within": "raggedatlas.wings.vectors.cell_geometry:within",
        "read_shapes": "raggedatlas.wings.vectors.cell_geometry:read_shapes",
    },
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
