"""Verbs ``ls``, ``info``, ``features`` and ``find``."""

from typing import Annotated, Any

import typer

from raggedatlas.cli.app import EXIT_FAILURE, INSPECT, app
from raggedatlas.cli.options import AtlasOptions, AtSnapshot, Space, expand_option_groups
from raggedatlas.cli.printing import print_error, print_facts, print_json, print_table, print_text


@app.command(rich_help_panel=INSPECT, epilog="Example: raggedatlas ls pbmc.atlas")
@expand_option_groups
def ls(atlas_options: AtlasOptions, at: AtSnapshot = None) -> None:
    """List the datasets."""
    # Reads tables only, so that `ls` starts without queries, formats and pandas.
    from raggedatlas.catalog.assets import dataset_rows

    rows = dataset_rows(atlas_options.catalog(at))
    print_table(
        [summary_row(row) for row in rows],
        SUMMARY_COLUMNS,
        empty=f"No datasets yet; run: raggedatlas add {atlas_options.atlas} FILE",
        as_json=atlas_options.as_json,
    )


SUMMARY_COLUMNS = ["name", "cells", "features", "layers", "added", "uid"]


def summary_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a dataset that fit on a line."""
    counts = [int(n) for n in row["n_features"].split(", ") if n]
    return {
        "name": row["name"],
        "cells": row["n_cells"],
        "features": counts[0] if len(counts) == 1 else counts,
        "layers": row["layers"],
        "added": str(row["created_at"])[:16].replace("T", " "),
        "uid": row["uid"],
    }


@app.command(rich_help_panel=INSPECT, epilog="Example: raggedatlas info pbmc.atlas --at first")
@expand_option_groups
def info(atlas_options: AtlasOptions, at: AtSnapshot = None) -> None:
    """Summarize an atlas: counts, feature spaces, cell columns, geometry, results, snapshots."""
    from raggedatlas.catalog.assets import RESULT_ASSETS
    from raggedatlas.catalog.catalog import CELLS
    from raggedatlas.catalog.features import read_registry
    from raggedatlas.catalog.versions import list_versions, registry_tables
    from raggedatlas.model.frames import metadata_columns
    from raggedatlas.query.browse import list_datasets, list_geometries

    catalog = atlas_options.catalog(at)
    listed = list_datasets(catalog)
    shapes = list_geometries(catalog).groupby("name", sort=False)[["n_cells"]].sum()
    used = {name for names in listed["spaces"] for name in names.split(", ")}
    columns = metadata_columns(catalog.tables.schema(CELLS))
    facts: dict[str, Any] = {
        "atlas": catalog.location.uri,
        "at": "newest state" if catalog.snapshot is None else f"snapshot {catalog.snapshot.version}",
        "datasets": len(listed),
        "cells": int(listed["n_cells"].sum()),
        "features": {s: read_registry(catalog, s).table.num_rows for s in registry_tables(catalog) if s in used},
        "spaces without features": sorted(used - set(registry_tables(catalog))),
        "columns": [facts.name for facts in columns.values()],
        "geometries": {str(name): int(n) for name, n in shapes["n_cells"].items()},
        "results": [record.name for record in RESULT_ASSETS.read(catalog)],
        "snapshots": [record.label or record.version for record in list_versions(catalog)],
        "codec": catalog.codec(),
    }
    if atlas_options.as_json:
        print_json(facts)
        return
    counts = [f"{space}: {n:,}" for space, n in facts["features"].items()]
    pointed = [f"{name}: {n:,} cells" for name, n in facts["geometries"].items()]
    facts_shown = {**facts, "features": counts or "none", "geometries": pointed}
    print_facts({key: value for key, value in facts_shown.items() if value != []})


@app.command(rich_help_panel=INSPECT, epilog="Example: raggedatlas features pbmc.atlas CD79A MS4A1")
@expand_option_groups
def features(
    atlas_options: AtlasOptions,
    names: Annotated[
        list[str] | None, typer.Argument(help="Symbols, ids or uids; by default list the registry.", show_default=False)
    ] = None,
    space: Space = "gene_expression",
    at: AtSnapshot = None,
    limit: Annotated[int, typer.Option(min=0, help="Number of features to list.")] = 20,
) -> None:
    """Look up or list features; exit code 1 if a name is unknown or ambiguous."""
    import pyarrow as pa

    from raggedatlas.catalog.features import read_registry

    registry = read_registry(atlas_options.catalog(at), space)
    columns = ["uid", "feature_id", "symbol", "organism", "global_index"]
    if not names:
        rows = registry.table.slice(0, limit).select(columns).to_pylist()
        if atlas_options.as_json:
            print_json(rows)
            return
        print_table(rows, columns, empty=f"No features in {space}.")
        if registry.table.num_rows > len(rows) > 0:
            print_text(f"... {registry.table.num_rows:,} in all")
        return
    found = registry.resolve(names)
    ambiguous = {name: [registry.describe(uid) for uid in uids] for name, uids in (found.ambiguous or {}).items()}
    # `resolve` keeps the order of the names that it finds, so these correspond to `found.uids`.
    asked = [name for name in names if name not in found.unknown and name not in ambiguous]
    at_row = pa.array([registry.row_of[uid] for uid in found.uids], pa.int64())
    rows = [
        {"asked": name, "matched by": how, **row}
        for name, how, row in zip(
            asked, found.matched_by, registry.table.take(at_row).select(columns).to_pylist(), strict=True
        )
    ]
    if atlas_options.as_json:
        print_json({"found": rows, "unknown": found.unknown, "ambiguous": ambiguous})
    else:
        print_table(rows, ["asked", "matched by", *columns], empty="None of these is known.")
    # On stderr, so that stdout is one JSON document also if names are unknown.
    if found.unknown:
        print_error(f"unknown in {space}: {', '.join(found.unknown)}")
    for name, candidates in ambiguous.items():
        print_error(f"{name} is any of {', '.join(candidates)}")
    if found.unknown or ambiguous:
        raise typer.Exit(EXIT_FAILURE)


@app.command(rich_help_panel=INSPECT, epilog="Example: raggedatlas find pbmc.atlas CD79A MS4A1")
@expand_option_groups
def find(
    atlas_options: AtlasOptions,
    names: Annotated[list[str], typer.Argument(help="Symbols, ids or uids.", show_default=False)],
    space: Space = "gene_expression",
    some: Annotated[bool, typer.Option("--any", help="Find datasets with any of the features, not all.")] = False,
    at: AtSnapshot = None,
) -> None:
    """Find datasets that measured features, without reading values."""
    atlas = atlas_options.open_at(at)
    found = atlas.find_datasets_with_features(names, space=space, every=not some)
    titles = atlas.list_datasets()["name"].to_dict()
    rows = [{"uid": uid, "name": titles.get(uid), "measured": list(measured)} for uid, measured in found.items()]
    print_table(rows, ["name", "uid", "measured"], empty="No dataset measured them.", as_json=atlas_options.as_json)
