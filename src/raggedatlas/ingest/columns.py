"""Which obs columns become cell columns, under which names and types; every refusal names its fix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import pyarrow as pa

from raggedatlas.catalog.cells import CellColumn, column_conflict, fit_values, stored_type
from raggedatlas.errors import NotFoundError, SchemaError
from raggedatlas.ingest.options import IngestOptions, OnClash
from raggedatlas.model.assets import annotation_columns, result_columns
from raggedatlas.model.frames import INDEX, ColumnFacts, facts_of
from raggedatlas.model.ids import column_name
from raggedatlas.model.reports import ColumnReport
from raggedatlas.model.spaces import pointer_columns

FILLED = ("uid", "dataset_uid", "cell_name", "dataset", "layout_uid")
"""Names that the atlas or a query's result fills; a file's column of that name gets the prefix ``obs_``."""

_CASTS: dict[str, tuple[pa.DataType, str]] = {
    "str": (pa.string(), "string"),
    "int": (pa.int64(), "int64"),
    "float": (pa.float64(), "float64"),
    "bool": (pa.bool_(), "bool"),
}


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """One obs column on its way into the cell table.

    Parameters
    ----------
    source : str
        Its name in the file.
    column : CellColumn
        What it becomes.
    """

    source: str
    column: CellColumn


def plan_columns(
    cells: pa.Schema, table: pa.Schema, options: IngestOptions, spaces: Sequence[str]
) -> tuple[tuple[ColumnPlan, ...], tuple[ColumnReport, ...]]:
    """Decide what becomes of every obs column.

    Parameters
    ----------
    cells : pyarrow.Schema
        Of the source's cells, index first.
    table : pyarrow.Schema
        Of the atlas's cell table as it is now.
    options : IngestOptions
        The caller's choices.
    spaces : sequence of str
        Names of pointer columns that this `add` brings.

    Returns
    -------
    tuple
        The plans, and a report line for every column of the file.

    Raises
    ------
    SchemaError
        If a type clashes with the stored column, a needed column is missing, or there are too many columns to take unasked.
    NotFoundError
        If a chosen column is not in the file.
    """
    if options.on_clash not in get_args(OnClash):
        raise SchemaError(f"on_clash={options.on_clash!r} is not understood; use one of {list(get_args(OnClash))}.")
    offered = [f for f in cells if f.name != INDEX]
    absent = sorted(set(options.cast) - {f.name for f in offered})
    if absent:
        raise NotFoundError(
            f"cast={{...}} names {absent}, which are no obs columns of the source; it has {[f.name for f in offered]}."
        )
    chosen = _chosen(offered, options)
    results = result_columns(table)
    # Columns that files brought are not among them: datasets share the column of a name if the types agree.
    taken = {*FILLED, *spaces, *pointer_columns(table), *results, *(name for _, name in results.values())}
    taken |= {*annotation_columns(table)}
    plans, reports = [], []
    problems: list[str] = []
    for field in offered:
        if field.name not in chosen:
            reports.append(
                ColumnReport(field.name, "left out", "", "not among obs=...; it stays in the dataset's own frame")
            )
            continue
        stored = _stored_name(chosen[field.name], taken, explicit=chosen[field.name] != field.name)
        taken.add(stored)
        column, note = cell_column(field, stored, chosen[field.name], options.cast.get(field.name))
        reason = column_conflict(table.field(stored), column) if stored in table.names else None
        if reason is not None and options.on_clash != "error":
            column, note, reason = _settled(column, table, taken, reason, options.on_clash)
            stored = column.stored
            taken.add(stored)
        if reason is not None:
            problems.append(
                f"{field.name!r} cannot go into the cell column {stored!r}: {reason}. Rename it with obs={{{field.name!r}: "
                f"'{stored}_2'}}, cast it with cast={{{field.name!r}: {_cast_for(table.field(stored).type)!r}}}, or choose for all such columns "
                "with on_clash='text' or 'rename'"
            )
            continue
        # Here the types differ and fit, such as integers into a double column; `column_values` refuses a value that
        # would change.
        if stored in table.names and table.field(stored).type != column.type and not pa.types.is_string(column.type):
            note = note or f"stored as {table.field(stored).type} like the column that is there"
            column = replace(column, type=table.field(stored).type)
        plans.append(ColumnPlan(field.name, column))
        fate = "cast" if note else ("renamed" if stored != field.name else "kept")
        reports.append(ColumnReport(field.name, "cast" if note else fate, stored, note))  # type: ignore[arg-type]
    problems += _missing_required(table, {p.column.stored for p in plans})
    if problems:
        raise SchemaError(f"{len(problems)} column(s) cannot be added: {'; '.join(problems)}.")
    return tuple(plans), tuple(reports)


def _settled(
    column: CellColumn, table: pa.Schema, taken: set[str], reason: str, policy: OnClash
) -> tuple[CellColumn, str, str | None]:
    """Return a clashing column as the policy has it, a note for the report, and why it is refused all the same."""
    there = table.field(column.stored)
    if policy == "rename":
        base = stored = f"{column.stored}_{_family(column.type)}"
        n = 2
        # A column made for an earlier clash is used again if this one fits it.
        while stored in taken or (
            stored in table.names and column_conflict(table.field(stored), replace(column, stored=stored)) is not None
        ):
            stored, n = f"{base}_{n}", n + 1
        return replace(column, stored=stored), f"{reason}; kept apart as on_clash='rename' asks", None
    if not _becomes_text(column.type) or not _becomes_text(there.type):
        return column, "", f"{reason}, of which one does not become text"
    # A column without facts was declared by the schema class of the atlas, not brought by a file.
    if not pa.types.is_string(there.type) and facts_of(there) is None:
        return column, "", f"{reason}, as the schema of the atlas declares it"
    facts = column.facts if pa.types.is_string(column.type) else ColumnFacts(column.facts.name, "string")
    done = (
        "stored as text" if pa.types.is_string(there.type) else f"the cell column, of type {there.type}, becomes text"
    )
    return replace(column, type=pa.string(), facts=facts), f"{reason}; {done} as on_clash='text' asks", None


def _becomes_text(arrow: pa.DataType) -> bool:
    is_text_or_number = pa.types.is_string(arrow) or pa.types.is_integer(arrow) or pa.types.is_floating(arrow)
    return bool(is_text_or_number or pa.types.is_boolean(arrow) or pa.types.is_temporal(arrow))


def _family(arrow: pa.DataType) -> str:
    """Return a word for a type, by which a column that is kept apart is called."""
    families = {"text": pa.types.is_string, "int": pa.types.is_integer, "float": pa.types.is_floating}
    families |= {"bool": pa.types.is_boolean, "time": pa.types.is_temporal}
    return next((word for word, fits in families.items() if fits(arrow)), "other")


def column_values(plan: ColumnPlan, cells: pa.Table) -> pa.ChunkedArray:
    """Return a planned column of the source's cells, in its stored type.

    Raises
    ------
    SchemaError
        If a value would change.
    """
    values = cells.column(plan.source)
    target = plan.column.type
    if pa.types.is_string(target) and not pa.types.is_string(values.type) and pa.types.is_boolean(values.type):
        return values.cast(pa.string())
    return fit_values(plan.source, values, target)


def _chosen(offered: Sequence[pa.Field], options: IngestOptions) -> Mapping[str, str]:
    names = [f.name for f in offered]
    if isinstance(options.obs, str):
        if options.obs != "all":
            raise SchemaError(f"obs={options.obs!r} is not understood; pass 'all', a list of columns, or {{old: new}}.")
        if len(names) > options.max_columns:
            raise SchemaError(
                f"The source has {len(names)} obs columns, more than max_columns={options.max_columns}; choose some with obs=[...], none "
                "with obs=[], or raise max_columns. Those not chosen stay in the dataset's own frame."
            )
        return {name: name for name in names}
    wanted = dict(options.obs) if isinstance(options.obs, Mapping) else {name: name for name in options.obs}
    absent = sorted(set(wanted) - set(names))
    if absent:
        raise NotFoundError(f"The source has no obs columns {absent}; it has {names}.")
    if isinstance(options.obs, Mapping):
        return {name: wanted.get(name, name) for name in names}
    return wanted


def _stored_name(name: str, taken: set[str], *, explicit: bool) -> str:
    stored = column_name(name)
    if stored in taken and explicit:
        raise SchemaError(
            f"The cell column {stored!r} is taken by the atlas or by another column of the file; choose another name."
        )
    base = f"obs_{stored}" if stored in taken else stored
    stored, n = base, 2
    while stored in taken:
        stored, n = f"{base}_{n}", n + 1
    return stored


def cell_column(field: pa.Field, stored: str, name: str, cast: str | None) -> tuple[CellColumn, str]:
    """Return the cell column that a column of a file becomes, and a note for the report.

    Parameters
    ----------
    field : pyarrow.Field
        The column.
    stored : str
        Name in the cell table.
    name : str
        Name under which results show it.
    cast : str or None
        The type it is cast to, one of ``"str"``, ``"int"``, ``"float"``, ``"bool"``.

    Raises
    ------
    SchemaError
        If there is no such type.
    """
    facts = replace(facts_of(field) or ColumnFacts(name, ""), name=name)
    if cast is None:
        return CellColumn(stored, stored_type(field.type), facts), ""
    if cast not in _CASTS:
        raise SchemaError(f"cast={{{field.name!r}: {cast!r}}} is not understood; use one of {sorted(_CASTS)}.")
    arrow, kind = _CASTS[cast]
    return CellColumn(stored, arrow, ColumnFacts(name, kind)), f"cast to {cast} as asked"


def _cast_for(stored: pa.DataType) -> str:
    return next((name for name, (arrow, _) in _CASTS.items() if arrow == stored), "str")


def _missing_required(table: pa.Schema, given: set[str]) -> list[str]:
    needed: list[Any] = [f.name for f in table if not f.nullable and f.name not in ("uid", "dataset_uid")]
    return [
        f"the schema needs {name!r}, which the source lacks; name the column that holds it with obs={{'its_name': {name!r}}}"
        for name in needed
        if name not in given
    ]
