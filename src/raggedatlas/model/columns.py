"""Columns of the cell table: which hold metadata, and by which names a result shows them."""

import pyarrow as pa

from raggedatlas.model.frames import ColumnFacts, facts_of
from raggedatlas.model.pointers import pointer_columns
from raggedatlas.model.results import result_columns

DATASET = "dataset"
"""Column of a result that holds the name of each cell's dataset; the cell table stores ``dataset_uid``."""

LAYOUT = "layout_uid"
"""Column of a result that holds the feature layout of each cell's dataset."""

IDS = ("uid", "cell_name", "dataset_uid")
"""Columns of every cell table that identify cells."""


def metadata_columns(schema: pa.Schema) -> dict[str, ColumnFacts]:
    """Return the metadata columns of a cell table (all but ids, pointers and results): stored name -> facts."""
    others = {*pointer_columns(schema), *result_columns(schema), *IDS}
    return {f.name: facts_of(f) or ColumnFacts(f.name, "") for f in schema if f.name not in others}


def shown_names(schema: pa.Schema) -> dict[str, str]:
    """Return the name under which a result shows each metadata column: stored name -> shown name.

    A column is shown under the name that it had in its file, unless an earlier column or the atlas uses that name.

    Examples
    --------
    >>> percent = pa.field("percent_mt", pa.float64(), metadata=ColumnFacts("percent.mt", "float64").to_metadata())
    >>> shown_names(pa.schema([percent, ("n", pa.int64())]))
    {'percent_mt': 'percent.mt', 'n': 'n'}
    """
    taken = {"uid", "cell_name", DATASET}
    shown: dict[str, str] = {}
    for stored, facts in metadata_columns(schema).items():
        shown[stored] = facts.name if facts.name and facts.name not in taken else stored
        taken.add(shown[stored])
    return shown


def find_column(schema: pa.Schema, name: str) -> str | None:
    """Return the stored column of a name: the name that results show, the stored name, or the name in a file; else None."""
    for stored, shown in shown_names(schema).items():
        if shown == name:
            return stored
    if name in schema.names:
        return name
    return next((stored for stored, facts in metadata_columns(schema).items() if facts.name == name), None)
