"""CXG, the format of CELLxGENE Explorer on TileDB: read in every version, written in the two that are served."""

from typing import TYPE_CHECKING

from raggedatlas.model.wings import FileKind, Wing, lazy_attributes

if TYPE_CHECKING:
    from raggedatlas.wings.cxg.inspection import CxgInspection, inspect
    from raggedatlas.wings.cxg.rules import RULES
    from raggedatlas.wings.cxg.validation import validate

WING = Wing(
    name="cxg",
    readers={"cxg": "raggedatlas.wings.cxg.source:cxg_source"},
    detectors={"cxg": "raggedatlas.wings.cxg.inspection:is_cxg"},
    writers={".cxg": "raggedatlas.wings.cxg.sink:cxg_sink"},
    answers={
        "curation_sink": "raggedatlas.wings.cxg.curation:CurationSink",
        "missing_facts": "raggedatlas.wings.cxg.curation:missing_facts",
        "validate_schema": "raggedatlas.wings.cxg.curation:validate_schema",
    },
    commands={"serve": "raggedatlas.wings.cxg.commands:serve"},
    files=(
        FileKind(
            noun="a file",
            accepts="raggedatlas.wings.cxg.inspection:is_named_cxg",
            validate="raggedatlas.wings.cxg.validation:validate",
            levels=("metadata", "full"),
            default="metadata",
            inspect="raggedatlas.wings.cxg.inspection:inspect",
            refusals={
                "fix": "a CXG cannot be repaired; write it again from its source",
                "--workers": "a file is read by one process",
            },
        ),
    ),
)

_HOMES = {
    "CxgInspection": "raggedatlas.wings.cxg.inspection",
    "RULES": "raggedatlas.wings.cxg.rules",
    "inspect": "raggedatlas.wings.cxg.inspection",
    "validate": "raggedatlas.wings.cxg.validation",
}

__all__ = [
    "RULES",
    "WING",
    "CxgInspection",
    "inspect",
    "validate",
]

__getattr__ = lazy_attributes(__name__, _HOMES)
