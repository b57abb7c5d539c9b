"""Colours of categories, distinguishable with each common kind of colour vision, on white and on black."""

import re
from collections.abc import Mapping, Sequence

from raggedatlas.errors import QueryError

CATEGORICAL = (
    "#3573b9", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#94284c", "#4cdcac",
    "#5840a0", "#7c88f4", "#a04c10", "#885888", "#88b87c", "#70d0dc", "#407c58", "#acd064",
    "#88287c", "#d08840", "#c4a0b8", "#10a0d0", "#ac6494", "#c44c40", "#6470dc", "#e8647c",
    "#5858c4", "#4c88d0", "#94341c", "#e8b810", "#f49464", "#4c58a0", "#b87c58", "#70a0f4",
    "#acc488", "#7c4064", "#647cac", "#7cc4f4", "#10a0ac", "#a06470", "#10c4d0", "#7c5864",
    "#7064a0", "#88ac94", "#a04040", "#1c8834", "#285888", "#70c4a0", "#ac88dc", "#d09410",
)  # fmt: skip
"""Each as far as can be from all before it, also as red-blind and green-blind eyes see them."""

MISSING = "#d3d5da"

_HEX = re.compile(r"#[0-9a-fA-F]{6}(?:[0-9a-fA-F]{2})?")


def is_color(text: object) -> bool:
    """Return whether a text is a colour as ``#rrggbb`` or ``#rrggbbaa``.

    Examples
    --------
    >>> is_color("#1f77b4"), is_color("#1f77b4ff"), is_color("red;}")
    (True, True, False)
    """
    return isinstance(text, str) and _HEX.fullmatch(text) is not None


def read_colors(given: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Check colours that a caller names: column -> value -> ``#rrggbb``; for others raise `QueryError`.

    Examples
    --------
    >>> read_colors({"cell_type": {"B": "#FF0000FF"}})
    {'cell_type': {'B': '#ff0000'}}
    """
    found: dict[str, dict[str, str]] = {}
    for column, colors in given.items():
        for value, color in colors.items():
            if not is_color(color):
                raise QueryError(
                    f"colors[{column!r}][{value!r}] is {color!r}; write it as '#rrggbb', e.g. {CATEGORICAL[0]!r}."
                )
            found.setdefault(column, {})[str(value)] = color[:7].lower()
    return found


def category_colors(labels: Sequence[str], given: Mapping[str, str]) -> list[str]:
    """Return the colour of each category: the given one, else the next of the palette.

    Examples
    --------
    >>> category_colors(["B", "T", "NK"], {"T": "#123456"})
    ['#3573b9', '#123456', '#e69f00']
    """
    unnamed = (label for label in labels if label not in given)
    # Only labels without a colour are counted; beyond the end of the palette colours repeat.
    following = {label: CATEGORICAL[i % len(CATEGORICAL)] for i, label in enumerate(unnamed)}
    return [given[label] if label in given else following[label] for label in labels]
