"""Example of an extension of raggedatlas: CRISPR guide counts."""

from raggedatlas.model.wings import Wing

WING = Wing(
    name="guides",
    readers={".guides": "raggedatlas_myformat.guides:GuideSource"},
    writers={".guides": "raggedatlas_myformat.guides:GuideSink"},
    spaces={"guide_counts": "raggedatlas_myformat.spaces:GUIDE_COUNTS"},
    assets={"libraries": "raggedatlas_myformat.libraries:LIBRARIES"},
    commands={"top-guides": "raggedatlas_myformat.command:top_guides"},
)
"""What the entry point in ``pyproject.toml`` names; importing it imports nothing else of this package."""
