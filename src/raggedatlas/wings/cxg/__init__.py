"""CXG, the format of CELLxGENE Explorer on TileDB: read in every version, written in the two that are served."""

from raggedatlas.wings.cxg.inspection import CxgInspection, inspect
from raggedatlas.wings.cxg.rules import RULES
from raggedatlas.wings.cxg.validation import validate

__all__ = ["RULES", "CxgInspection", "inspect", "validate"]
