"""Verbs ``ls``, ``info``, ``features`` and ``find``."""

import shlex
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from raggedatlas.cli.app import EXIT_FAILURE, INSPECT, command
from raggedatlas.cli.options import AtlasOptions, AtSnapshot, Space, argument
from raggedatlas.cli.printing import minute, print_error, print_facts, print_json, print_table, print_text


@command(INSPECT, "ls pbmc.atlas")
def ls(atlas_options: AtlasOptions, at: AtSnapshot = None) -> None:
    """List the datasets."""
    # Reads tables only, so that `ls` starts without queries, formats and pandas.
    from raggedatlas.catalog.assets import dataset_rows

    rows = dataset_rows(atlas_options.catalog(at))
    if atlas_options.as_json:
        for row in rows:
            row |= {name: [one for one in row[name].split(", ") if one] for name in ("spaces", "layers", "n_features")}
            row["n_features"] = [int(n) for n in row["n_features"]]
        print_json(rows)
        return
    empty = f"No datasets yet; run: raggedatlas add {shlex.quote(atlas_options.atlas)} FILE"
    print_table([summary_row(row) for row in rows], summary_columns(rows), empty=empty)


def summary_columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the columns of a table of datasets; where none is linked, that of files is left out."""
    linked = ["linked"] if any(row["linked"] for row in rows) else []
    return ["name", "cells", "features", "layers", *linked, "added", "uid"]


def summary_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a dataset that fit on a line."""
    counts = [int(n) for n in row["n_features"].split(", ") if n]
    return {
        "name": row["name"],
        "cells": row["n_cells"],
        "features": counts[0] if len(counts) == 1 else counts,
        "layers": row["layers"],
        "linked": row["linked"],
        "added": minute(row["created_at"]),
        "uid": row["uid"],
    }


@command(INSPECT, "info pbmc.atlas --at first")
def info(atlas_options: AtlasOptions, at: AtSnapshot = None) -> None:
    """Summarize an atlas: counts, feature spaces, cell columns, geometry, results, snapshots."""
    from raggedatlas.catalog.assets import asset_kinds, dataset_rows, source_rows
    from raggedatlas.catalog.catalog import CELLS
    from raggedatlas.catalog.features import read_registry
    from raggedatlas.catalog.versions import list_versions, registry_tables
    from raggedatlas.model.frames import metadata_columns

    catalog = atlas_options.catalog(at)
    listed = dataset_rows(catalog)
    attached = {
        kind.table[1:]: kind.frame(catalog).reset_index().groupby("name", sort=False)["n_cells"].sum()
        for kind in asset_kinds()
    }
    used = {name for row in listed for name in row["spaces"].split(", ")}
    columns = metadata_columns(catalog.tables.schema(CELLS))
    facts: dict[str, Any] = {
        "atlas": catalog.location.uri,
        "at": "newest state" if catalog.snapshot is None else f"snapshot {catalog.snapshot.version}",
        "datasets": len(listed),
        "cells": sum(row["n_cells"] for row in listed),
        "features": {s: read_registry(catalog, s).table.num_rows for s in registry_tables(catalog) if s in used},
        "spaces without features": sorted(used - set(registry_tables(catalog))),
        "columns": [facts.name for facts in columns.values()],
        "assets": {kind: counts.to_dict() for kind, counts in attached.items() if len(counts)},
        "snapshots": [record.label or record.version for record in list_versions(catalog)],
        "codec": catalog.codec(),
        "linked files": source_rows(catalog),
    }
    if atlas_options.as_json:
        print_json(facts)
        return
    counts = [f"{space}: {n:,}" for space, n in facts["features"].items()]
    shown = {kind: [f"{name}: {n:,} cells" for name, n in found.items()] for kind, found in facts.pop("assets").items()}
    sources = [
        f"{row['address']} ({row['n_bytes']:,} bytes, {minute(row['modified']) or 'of unknown time'}), in datasets: {row['n_datasets']:,}"
        for row in facts["linked files"]
    ]
    facts_shown = {**facts, "linked files": sources, "features": counts or "none", **shown}
    print_facts({key: value for key, value in facts_shown.items() if value != []})


@command(INSPECT, "features pbmc.atlas CD79A MS4A1")
def features(
    atlas_options: AtlasOptions,
    names: Annotated[list[str] | None, argument("Symbols, ids or uids; by default list the registry")] = None,
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
        print_error(f"unknown in {space}: {', '.join(found.unknown)}{registry.nearest(found.unknown)}")
    for name, candidates in ambiguous.items():
        print_error(f"{name} is any of {', '.join(candidates)}")
    if found.unknown or ambiguous:
        raise typer.Exit(EXIT_FAILURE)


@command(INSPECT, "find pbmc.atlas CD79A MS4A1")
def find(
    atlas_options: AtlasOptions,
    names: Annotated[list[str], argument("Symbols, ids or uids")],
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


LISTS: dict[str, tuple[str, str, str]] = {
    "results": (
        "List the model results of an atlas.",
        "name kind space width dtype n_cells model added",
        "No results yet; run: raggedatlas add {} RESULTS --name NAME",
    ),
    "geometries": (
        "List the geometry of an atlas.",
        "name space types axes n_cells datasets n_objects n_vertices n_levels added",
        "No geometry yet; run: raggedatlas add {} STORE --link-by COLUMN --space SPACE",
    ),
    "annotations": (
        "List the annotations of an atlas.",
        "name columns n_cells n_values source snapshot added",
        "No annotations yet; run: raggedatlas annotate {} FILE",
    ),
}
"""Command that lists assets, which is also the method of an atlas -> its help, the columns that it shows, and what it prints if there are none."""


def _add_list_command(kind: str) -> None:
    # A function for each command: closures made in one loop would all see its last entry.
    text, columns, empty = LISTS[kind]

    def list_assets(atlas_options: AtlasOptions, at: AtSnapshot = None) -> None:
        rows = getattr(atlas_options.open_at(at), kind)().reset_index().to_dict("records")
        if not atlas_options.as_json:
            rows = [{**row, "added": minute(row["created_at"])} for row in rows]
        print_table(
            rows, columns.split(), empty=empty.format(shlex.quote(atlas_options.atlas)), as_json=atlas_options.as_json
        )

    list_assets.__doc__ = text
    command(INSPECT, f"{kind} pbmc.atlas", name=kind)(list_assets)


for _kind in LISTS:
    _add_list_command(_kind)
