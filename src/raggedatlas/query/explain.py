"""What a query would read, described for people."""

from dataclasses import replace

import numpy as np

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.features import OrthologFeatures, read_registry
from raggedatlas.errors import QueryError
from raggedatlas.query.cells import cell_columns
from raggedatlas.query.modalities import merged_columns
from raggedatlas.query.plan import apply_identity, expansions, plan_read
from raggedatlas.query.read import choose_column_copies, is_one_block
from raggedatlas.query.read_plan import PartPlan, QuerySpec, SpacePlan
from raggedatlas.store.sql_parser import to_sql

_SHOWN = 5
"""How many names are listed."""


def explain(spec: QuerySpec, catalog: Catalog) -> str:
    """Describe the cells, groups, arrays and columns that a query reads, with an estimate of bytes.

    Returns
    -------
    str
        Several lines.
    """
    try:
        plan, refusal = plan_read(spec, catalog), []
    except QueryError as error:
        if spec.layers or spec.features:
            raise
        # What is wrong with the values is what a person wants to be told here, beside the cells.
        bare = replace(spec, spaces=(), features=(), layers=(), results=())
        plan, refusal = plan_read(bare, catalog), [f"values cannot be read: {error}"]
    at = f"snapshot {plan.provenance['snapshot']}" if plan.provenance["snapshot"] else "the tip"
    lines = [
        f"{catalog.location.uri} at {at}",
        f"asked: {spec.describe()}",
        f"filter: {to_sql(spec.filters, cell_columns(catalog)) or 'none'}",
        *(one.describe() for several in expansions(spec, catalog).values() for one in several),
        f"cells: {plan.n_cells:,}"
        + (f" ({plan.n_without:,} more have none of these spaces)" if plan.n_without else ""),
    ]
    for space in plan.spaces.values():
        lines += _space_lines(space, spec)
        if len(space.repeated):
            lines.append(_merged_line(space, spec, catalog))
        if spec.orthologs is not None and space.space.has_features:
            _, orthologs = apply_identity(spec, catalog, space.space.name)
            lines += [] if orthologs is None else [_orthologs_line(orthologs, space, spec.orthologs)]
    return "\n".join([*lines, *refusal])


def _space_lines(space: SpacePlan, spec: QuerySpec) -> list[str]:
    form = "CSR" if space.sparse else "dense"
    join = spec.join if isinstance(spec.join, str) else f"in at least {spec.join} datasets"
    layers = ", ".join(f"{layer} ({dtype})" for layer, dtype in space.dtypes.items())
    chosen = "asked for" if spec.layers else "chosen by rule"
    lines = [
        f"space {space.name}: {int(space.present.sum()):,} cells, {space.n_cols:,} columns ({join}), {form}",
        f"  layers: {layers}, {chosen}; what was not measured: {spec.missing}",
    ]
    lines += [_part_line(space, part) for part in space.parts]
    lines.append(f"  result: at most {int(space.row_bytes().sum()):,} bytes")
    return lines


def _part_line(space: SpacePlan, part: PartPlan) -> str:
    read = np.bincount(
        part.code[part.code >= 0], weights=(part.end - part.start)[part.code >= 0], minlength=len(part.groups)
    )
    touched = np.unique(part.code[part.code >= 0])
    arrays = len(touched) * (len(part.layers) + (1 if space.sparse else 0))
    n_bytes = sum(int(read[g]) * part.groups[g].entry_bytes for g in touched.tolist())
    what = "entries" if space.sparse else "rows"
    copies = len(choose_column_copies(space, part))
    by_column = f"; {copies:,} groups by column, from their column-sorted copies" if copies else ""
    if copies and not is_one_block(space):
        by_column += ", for a result in memory only"
    return (
        f"  reads {', '.join(part.layers)}: {len(touched):,} groups, {arrays:,} arrays, {int(read.sum()):,} {what}, "
        f"{n_bytes:,} bytes decoded{by_column}"
    )


def _orthologs_line(orthologs: OrthologFeatures, space: SpacePlan, organism: str) -> str:
    """Describe how many columns are joined by orthologs, and how many genes have no one-to-one ortholog."""
    row_of, targets = orthologs.registry.row_of, orthologs.registry.targets
    ends = {orthologs.registry.uids[targets[row_of[uid]]] for uid in orthologs.joined}
    n_columns = sum(uid in ends for uid in space.features.tolist())
    n_left = sum(uid in orthologs.several for uid in space.features.tolist())
    return f"  orthologs: {n_columns:,} columns are genes of {organism} by orthologs one to one; {n_left:,} are genes with others, and stand alone"


def _merged_line(space: SpacePlan, spec: QuerySpec, catalog: Catalog) -> str:
    """Describe the features with several columns in one dataset."""
    names = read_registry(catalog, space.space.name).names_of(space.features[space.repeated[:_SHOWN]])
    shown = ", ".join(names) + (", ..." if len(space.repeated) > _SHOWN else "")
    if spec.on_merge == "apart":
        return f"  kept apart: {len(space.repeated):,} columns that are the same feature as another one of their dataset ({shown})"
    used = {uid: merged_columns(m, space.merged, space.n_cols) for uid, m in space.column_maps.items()}
    n_columns = sum(len(local) for sums in used.values() for local in sums.values())
    n_layouts = sum(map(bool, used.values()))
    return f"  added up: {n_columns:,} columns of {n_layouts:,} feature lists in {len(space.repeated):,} features ({shown})"
