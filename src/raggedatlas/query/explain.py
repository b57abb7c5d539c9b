"""What a query would read, described for people."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.features import read_registry
from raggedatlas.errors import QueryError
from raggedatlas.query.cells import cell_columns
from raggedatlas.query.modalities import merged_columns
from raggedatlas.query.plan import apply_identity, expansions, plan_read
from raggedatlas.query.read import PartPlan, SpacePlan, choose_column_copies, is_one_block
from raggedatlas.query.spec import QuerySpec
from raggedatlas.store.filters import to_sql
from raggedatlas.store.read import LinkedCost, linked_cost

_SHOWN = 5
"""How many names are listed."""


def _linked_lines(space: SpacePlan, part: PartPlan, chosen: Mapping[int, NDArray[np.int64]]) -> list[str]:
    """Say what a part reads from files that datasets are linked to, by the references to their chunks; `chosen` are the groups read by column."""
    names, costs = dict[str, None](), list[LinkedCost]()
    for code in np.unique(part.code[part.code >= 0]).tolist():
        group = part.groups[code]
        here, readers = part.code == code, [*group.layers.values(), *([] if group.indices is None else [group.indices])]
        ranges = part.start[here], part.end[here]
        if code in chosen and group.copy is not None:
            columns = np.flatnonzero(space.column_maps[group.layout_uid] >= 0)
            ranges = chosen[code][columns], chosen[code][columns + 1]
            readers = [group.copy.indices, *group.copy.layers.values()]
        linked = [reader for reader in readers if reader.source is not None]
        names |= {reader.source.dataset: None for reader in linked if reader.source is not None}
        costs += [linked_cost(reader, *ranges) for reader in linked]
    if not names:
        return []
    shown = ", ".join([*names][:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    n_chunks, n_fetched, n_used = (sum(column) for column in zip(*costs, strict=True))
    return [
        f"  from the linked files of {shown}: {n_chunks:,} chunks, {n_fetched:,} bytes fetched for {n_used:,} bytes used"
    ]


def explain(spec: QuerySpec, catalog: Catalog) -> str:
    """Describe the cells, groups, arrays and columns that a query reads, with an estimate of bytes; see `Query.explain`."""
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
        join = spec.join if isinstance(spec.join, str) else f"in at least {spec.join} datasets"
        layers = ", ".join(f"{layer} ({dtype})" for layer, dtype in space.dtypes.items())
        lines += [
            f"space {space.name}: {int(space.present.sum()):,} cells, {space.n_cols:,} columns ({join}), {'CSR' if space.sparse else 'dense'}",
            f"  layers: {layers}, {'asked for' if spec.layers else 'chosen by rule'}; what was not measured: {spec.missing}",
        ]
        for part in space.parts:
            having = part.code >= 0
            code, lengths = part.code[having], (part.end - part.start)[having]
            read, touched = np.bincount(code, weights=lengths, minlength=len(part.groups)), np.unique(code)
            arrays = len(touched) * (len(part.layers) + (1 if space.sparse else 0))
            n_bytes = sum(int(read[g]) * part.groups[g].entry_bytes for g in touched.tolist())
            chosen = choose_column_copies(space, part)
            copies = len(chosen)
            by_column = f"; {copies:,} groups by column, from their column-sorted copies" if copies else ""
            if copies and not is_one_block(space):
                by_column += ", for a result in memory only"
            lines.append(
                f"  reads {', '.join(part.layers)}: {len(touched):,} groups, {arrays:,} arrays, {int(read.sum()):,} "
                f"{'entries' if space.sparse else 'rows'}, {n_bytes:,} bytes decoded{by_column}"
            )
            lines += _linked_lines(space, part, chosen if is_one_block(space) else {})
        lines.append(f"  result: at most {int(space.row_bytes().sum()):,} bytes")
        if len(space.repeated):
            # Features with several columns in one dataset.
            names = read_registry(catalog, space.space.name).names_of(space.features[space.repeated[:_SHOWN]])
            shown = ", ".join(names) + (", ..." if len(space.repeated) > _SHOWN else "")
            used = [merged_columns(m, space.merged, space.n_cols) for m in space.column_maps.values()]
            n_columns = sum(len(local) for sums in used for local in sums.values())
            lines.append(
                f"  kept apart: {len(space.repeated):,} columns that are the same feature as another one of their dataset ({shown})"
                if spec.on_merge == "apart"
                else f"  added up: {n_columns:,} columns of {sum(map(bool, used)):,} feature lists in {len(space.repeated):,} features ({shown})"
            )
        orthologs = None
        if spec.orthologs is not None and space.space.has_features:
            _, orthologs = apply_identity(spec, catalog, space.space.name)
        if orthologs is not None:
            registry, features = orthologs.registry, space.features.tolist()
            ends = {registry.uids[registry.targets[registry.row_of[uid]]] for uid in orthologs.joined}
            n_left = sum(uid in orthologs.several for uid in features)
            lines.append(
                f"  orthologs: {sum(uid in ends for uid in features):,} columns are genes of {spec.orthologs} by orthologs one to one; "
                f"{n_left:,} are genes with others, and stand alone"
            )
    return "\n".join([*lines, *refusal])
