"""zarr-vectors (seed 002): points, lines, graphs, skeletons and meshes in spatial chunks."""

from raggedatlas.vectors.inspection import VectorInspection, inspect
from raggedatlas.vectors.validation import validate
from raggedatlas.vectors.validation.rules import RULES

__all__ = ["RULES", "VectorInspection", "inspect", "validate"]
