"""zarr-vectors (seed 002): points, lines, graphs, skeletons and meshes in spatial chunks."""

from raggedatlas.wings.vectors.inspection import VectorInspection, inspect
from raggedatlas.wings.vectors.validation import validate
from raggedatlas.wings.vectors.validation.rules import RULES

__all__ = ["RULES", "VectorInspection", "inspect", "validate"]
