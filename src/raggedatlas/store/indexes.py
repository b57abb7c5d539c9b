"""Indexes of Lance: those of a table, and when they serve a filter."""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lance

_GROUPS = re.compile(r"\b(?:dataset|layout)_uid\b")
"""Indexed columns of which many rows share a value; the other ones are unique ids, of which filters name a few."""

_SHORT = 500
"""Characters of the row ids of a fragment without holes, with room for some ranges."""


WHOLE_VALUES: dict[str, Any] = {
    "base_tokenizer": "raw",
    "lower_case": False,
    "stem": False,
    "remove_stop_words": False,
    "ascii_folding": False,
}
"""Full-text indexes on uids index exact values; those on other columns index words."""


def index_serves(table: "lance.LanceDataset", where: str | None) -> bool:
    """Return whether Lance is to look for an index before it scans the columns of a filter.

    Lance finds each row that an index names in the list of row ids of its fragment. Where rows were deleted between the others (by deletion of
    cells, or of a dataset among others that were compacted with it), that is a bitmap that Lance counts through from its beginning, for
    every single row: seconds for 100,000 rows, where a scan takes milliseconds.
    """
    if where is None or not _GROUPS.search(where):
        return True
    return not any(_has_holes(fragment) for fragment in table.get_fragments())


def _has_holes(fragment: "lance.LanceFragment") -> bool:
    # Row ids without holes are one range of some bytes; long lists of them are in a file of their own.
    meta = fragment.metadata.row_id_meta
    ids = "" if meta is None else meta.json()
    return len(ids) > _SHORT or "External" in ids


def indexes_of(table: "lance.LanceDataset") -> list[dict[str, Any]]:
    """List the name and columns of each index."""
    return [{"name": i.name, "fields": [str(f) for f in i.field_names]} for i in table.describe_indices()]
