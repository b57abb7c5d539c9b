"""CXG, the format of CELLxGENE Explorer on TileDB: read in every version, written in the two that are served."""

from raggedatlas.formats.cxg.checks import validate
from raggedatlas.formats.cxg.inspection import CxgInspection, inspect
from raggedatlas.formats.cxg.rules import RULES

__all__ = ["RULES", "CxgInspection", "inspect", "validate"]
