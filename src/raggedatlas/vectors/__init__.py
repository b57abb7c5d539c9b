"""zarr-vectors (seed 002): points, lines, graphs, skeletons and meshes in spatial chunks."""

from raggedatlas.vectors.inspection import VectorInspection, inspect
from raggedatlas.vectors.validation.rules import RULES
from raggedatlas.vectors.validation.validator import validate

__all__ = ["RULES", "VectorInspection", "inspect", "validate"]
