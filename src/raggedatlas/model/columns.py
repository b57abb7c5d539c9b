"""Columns of the cell table: which hold metadata, and by which names a result shows them."""

from collections.abc import Mapping

import pyarrow as pa

from raggedatlas.model.annotations import annotation_columns
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
    """Return the metadata columns that results show: stored name -> facts.

    These are all columns but ids, pointers and results, and of several columns of one name only the newest (see `column_stacks`).
    """
    tops = {stack[0] for stack in column_stacks(schema).values()}
    return {name: facts for name, facts in _stored_columns(schema).items() if name in tops}


def column_stacks(schema: pa.Schema) -> dict[str, tuple[str, ...]]:
    """Return the columns of each name that results show: name -> stored names, newest first.

    A name has several columns where an annotation gave values to a column that was there. The newest holds the values of all of
    them; the older ones are shown again when it is dropped.

    Examples
    --------
    >>> from raggedatlas.model.annotations import AnnotationRecord
    >>> file = pa.field("stage", pa.string())
    >>> facts = ColumnFacts("stage", "string").to_metadata()
    >>> mine = AnnotationRecord(uid="0" * 16, name="mine").mark(
    ...     pa.field("stage__00000000", pa.string(), metadata=facts)
    ... )
    >>> column_stacks(pa.schema([file, mine]))
    {'stage': ('stage__00000000', 'stage')}
    """
    annotated = annotation_columns(schema)
    facts = _stored_columns(schema)
    shown = _shown({name: facts[name] for name in facts if name not in annotated})
    stacks: dict[str, tuple[str, ...]] = {name: (stored,) for stored, name in shown.items()}
    for stored in annotated:
        name = facts[stored].name
        stacks[name] = (stored, *stacks.get(name, ()))
    return stacks


def _stored_columns(schema: pa.Schema) -> dict[str, ColumnFacts]:
    others = {*pointer_columns(schema), *result_columns(schema), *IDS}
    return {f.name: facts_of(f) or ColumnFacts(f.name, "") for f in schema if f.name not in others}


def _shown(columns: Mapping[str, ColumnFacts]) -> dict[str, str]:
    taken = {"uid", "cell_name", DATASET}
    shown: dict[str, str] = {}
    for stored, facts in columns.items():
        name = facts.name if facts.name and facts.name not in taken else stored
        while name in taken:
            name += "_"
        shown[stored] = name
        taken.add(name)
    return shown


def shown_names(schema: pa.Schema) -> dict[str, str]:
    """Return the name under which a result shows each metadata column: stored name -> shown name.

    A column is shown under the name that it had in its file, unless an earlier column or the atlas uses that name.

    Examples
    --------
    >>> percent = pa.field("percent_mt", pa.float64(), metadata=ColumnFacts("percent.mt", "float64").to_metadata())
    >>> shown_names(pa.schema([percent, ("n", pa.int64())]))
    {'percent_mt': 'percent.mt', 'n': 'n'}
    """
    shown = {stack[0]: name for name, stack in column_stacks(schema).items()}
    return {stored: shown[stored] for stored in schema.names if stored in shown}


def find_column(schema: pa.Schema, name: str) -> str | None:
    """Return the stored column of a name: the name that results show, the stored name, or the name in a file; else None."""
    stack = column_stacks(schema).get(name)
    if stack is not None:
        return stack[0]
    if name in schema.names:
        return name
    return next((stored for stored, facts in metadata_columns(schema).items() if facts.name == name), None)
