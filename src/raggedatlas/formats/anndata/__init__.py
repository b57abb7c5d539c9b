"""AnnData on disk and in memory: read and written in row blocks, validated, mended, and looked at."""

from raggedatlas.formats.anndata.inspection import Element, Inspection, inspect
from raggedatlas.formats.anndata.repair import Repair, repair
from raggedatlas.formats.anndata.rules import RULES, Problem, Rule
from raggedatlas.formats.anndata.validation import refuse_broken, validate, with_rule

__all__ = [
    "RULES",
    "Element",
    "Inspection",
    "Problem",
    "Repair",
    "Rule",
    "inspect",
    "refuse_broken",
    "repair",
    "validate",
    "with_rule",
]
