"""CXG, the format of CELLxGENE Explorer on TileDB: read in every version, written in the two that are served."""

from raggedatlas.formats.cxg.inspection import CxgInspection, inspect
from raggedatlas.formats.cxg.rules import RULES
from raggedatlas.formats.cxg.validation import validate

__all__ = ["RULES", "CxgInspection", "inspect", "validate"]
