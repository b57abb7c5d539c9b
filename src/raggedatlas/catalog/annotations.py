"""Annotations of an atlas: list them, drop them, and fill them with values added later to the columns that they cover."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pyarrow as pa

from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.cells import CellColumn, add_cell_columns, fit_values, text_of
from raggedatlas.errors import ConflictError, NotFoundError
from raggedatlas.model.assets import AnnotationRecord, annotation_columns
from raggedatlas.model.frames import ColumnFacts, column_stacks, facts_of
from raggedatlas.model.reports import MaintenanceReport
from raggedatlas.store.sql import all_of, is_not_null, is_null
from raggedatlas.store.tables import Tables, update_columns


def read_annotations(catalog: Catalog) -> list[AnnotationRecord]:
    """Return the annotations of an atlas, oldest first.

    Raises
    ------
    CorruptError
        If a record is damaged.
    """
    found = {record.uid: record for record in annotation_columns(catalog.tables.schema(CELLS)).values()}
    return list(found.values())


def drop_annotation(catalog: Catalog, name: str) -> MaintenanceReport:
    """Remove the columns of an annotation, in one commit; the columns that they covered become visible again. Snapshots keep their columns.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    name : str
        The annotation.

    Raises
    ------
    NotFoundError
        If there is no annotation of that name.
    ConflictError
        If a later annotation gave values to one of its columns.
    """
    catalog.require_tip("drop_annotation")
    schema = catalog.tables.schema(CELLS)
    columns = annotation_columns(schema)
    own = [column for column, record in columns.items() if record.name == name]
    if not own:
        names = sorted({record.name for record in columns.values()})
        raise NotFoundError(f"{catalog.location.uri} has no annotation {name!r}; it has {names}.")
    for shown, stack in column_stacks(schema).items():
        later = [columns[column].name for column in stack if column in columns and column not in own]
        if set(own) & set(stack) and stack[0] not in own:
            raise ConflictError(
                f"The annotation {later[0]!r} gave values to the column {shown!r} after {name!r} did; drop {later[0]!r} first."
            )
    catalog.tables.drop_columns(CELLS, own)
    return MaintenanceReport(notes=(f"{len(own)} columns were removed; snapshots that have them keep them",))


def complete_annotations(catalog: Catalog) -> int:
    """Copy values that were added to covered columns since into the covering columns of annotations.

    `add` writes the column of the file, which an annotation of the same name covers. A snapshot calls this before it records
    the cells, so that the covering column has the values of all of them.

    Returns
    -------
    int
        Number of values filled in.
    """
    n_filled = 0
    for upper, lower in incomplete_columns(catalog):
        field = catalog.tables.schema(CELLS).field(lower)
        facts = replace(facts_of(field) or ColumnFacts(lower, ""), name=_shown_name(catalog, upper))
        add_cell_columns(catalog, [CellColumn(upper, field.type, facts)], [])
        n_filled += catalog.tables.retry(CELLS, partial(_fill, catalog, upper, lower))
    return n_filled


def incomplete_columns(catalog: Catalog) -> list[tuple[str, str]]:
    """Return the columns of annotations that lack values of the column below them, lowest first: pairs of stored names."""
    stacks = column_stacks(catalog.tables.schema(CELLS)).values()
    pairs = [pair for stack in stacks for pair in reversed(list(pairwise(stack)))]
    # A column is complete only if the one below it is, so those above an incomplete one are completed with it.
    found: list[tuple[str, str]] = []
    for upper, lower in pairs:
        if lower in {pair[0] for pair in found} or catalog.tables.count(
            CELLS, all_of(is_null(upper), is_not_null(lower))
        ):
            found.append((upper, lower))
    return found


def _shown_name(catalog: Catalog, column: str) -> str:
    facts = facts_of(catalog.tables.schema(CELLS).field(column))
    return column if facts is None else facts.name


def _fill(catalog: Catalog, upper: str, lower: str) -> int:
    at = catalog.tables.version(CELLS)
    then = Tables(catalog.tables.location, {CELLS: at})
    schema = then.schema(CELLS)
    if upper not in schema.names or lower not in schema.names:
        return 0  # The annotation was dropped in the meantime.
    rows = then.read(CELLS, ["uid", lower], all_of(is_null(upper), is_not_null(lower)))
    if rows.num_rows:
        target, values = schema.field(upper).type, rows.column(lower)
        values = text_of(values) if pa.types.is_string(target) else fit_values(lower, values, target)
        fields = [rows.schema.field("uid"), pa.field(upper, target)]
        update_columns(
            catalog.tables, CELLS, "uid", pa.table([rows.column("uid"), values], schema=pa.schema(fields)), at
        )
    return int(rows.num_rows)
