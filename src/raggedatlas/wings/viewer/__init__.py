"""The viewer: maps of cells as a page, a picture, or served on this machine."""

from typing import TYPE_CHECKING

from raggedatlas.model.wings import Wing, lazy_attributes

if TYPE_CHECKING:
    from raggedatlas.wings.viewer.verbs import make_view, view, visualize

WING = Wing(
    name="viewer",
    commands={
        "view": "raggedatlas.wings.viewer.commands:view",
        "visualize": "raggedatlas.wings.viewer.commands:visualize",
    },
)

_HOMES = {
    "make_view": "raggedatlas.wings.viewer.verbs",
    "view": "raggedatlas.wings.viewer.verbs",
    "visualize": "raggedatlas.wings.viewer.verbs",
}

__all__ = [
    "WING",
    "make_view",
    "view",
    "visualize",
]

__getattr__ = lazy_attributes(__name__, _HOMES)
