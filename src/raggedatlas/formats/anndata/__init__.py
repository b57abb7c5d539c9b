"""Read, write, validate, fix and inspect AnnData on disk and in memory."""

from raggedatlas.formats.anndata.fixes import Repair, repair
from raggedatlas.formats.anndata.rules import RULES
from raggedatlas.formats.anndata.validation import Limits, inspect, raise_if_invalid, validate, with_rule_id
from raggedatlas.model.reports import Element, Inspection
from raggedatlas.model.validation import Problem, Rule

__all__ = [
    "RULES",
    "Element",
    "Inspection",
    "Limits",
    "Problem",
    "Repair",
    "Rule",
    "inspect",
    "raise_if_invalid",
    "repair",
    "validate",
    "with_rule_id",
]
