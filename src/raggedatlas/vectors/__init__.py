"""zarr-vectors: points, lines, graphs, skeletons and meshes in Zarr, cut by space, whole in memory (seed 002)."""

from raggedatlas.vectors.inspection import VectorInspection, inspect
from raggedatlas.vectors.validation.rules import RULES
from raggedatlas.vectors.validation.validator import validate

__all__ = ["RULES", "VectorInspection", "inspect", "validate"]
