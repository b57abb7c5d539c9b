"""Verbs that build: ``create`` and ``add``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raggedatlas.cli.app import BUILD, app
from raggedatlas.cli.options import Linking, Place, Processes, Words, many, pairs, shared_by, unfold
from raggedatlas.cli.printing import progress, show, show_json, show_table

if TYPE_CHECKING:
    from raggedatlas.model.reports import IngestReport


@dataclass(frozen=True)
class AddOptions:
    """What is added, and how."""

    files: Annotated[
        list[str],
        typer.Argument(
            help="h5ad, h5mu, AnnData zarr, CXG, 10x h5, Market-matrix folder, a folder of these, a geometry store, or a folder of a model's results.",
            show_default=False,
        ),
    ]
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the dataset, result or geometry; else the file's, or the space's.", show_default=False
        ),
    ] = None
    on_duplicate: Annotated[
        Literal["error", "skip", "replace"], typer.Option(help="What to do with content that is there already.")
    ] = "error"
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and report; write nothing.")] = False
    obs: Annotated[
        Words, many("COLUMN or OLD=NEW", "Take only these cell columns; with =, rename these and take all")
    ] = field(default_factory=list)
    cast: Annotated[Words, many("COLUMN=TYPE", "Convert a column to str, int, float or bool")] = field(
        default_factory=list
    )
    layer: Annotated[
        Words, many("KEY or KEY=NAME", "Take only these matrices (X, raw/X, layers/spliced), and name the layer")
    ] = field(default_factory=list)
    space: Annotated[
        Words,
        many("KEY=SPACE or SPACE", "Feature space of a matrix or modality; of a result or shapes, its name alone"),
    ] = field(default_factory=list)
    embedding: Annotated[
        Words,
        many(
            "KEY or KEY=NAME",
            "Make a member of obsm, such as X_umap, an embedding to view and search",
            "--embedding",
            "-e",
        ),
    ] = field(default_factory=list)
    feature_id: Annotated[Words, many("COLUMN or SPACE=COLUMN", "Column that holds the feature ids, or index")] = field(
        default_factory=list
    )
    organism: Annotated[str, typer.Option(help="Organism; auto reads it off Ensembl ids.")] = "auto"
    nonfinite: Annotated[Literal["refuse", "keep"], typer.Option(help="What to do with NaN and infinities.")] = "refuse"
    duplicate_entries: Annotated[
        Literal["sum", "refuse"], typer.Option(help="What to do where a sparse row names a column twice.")
    ] = "sum"
    on_clash: Annotated[
        Literal["error", "text", "rename"],
        typer.Option(help="What to do with a column whose type clashes with the cell column of that name."),
    ] = "error"
    max_columns: Annotated[int, typer.Option(min=0, help="More cell columns than this ask for a choice.")] = 200
    column_order: Annotated[
        Literal["detected", "file"], typer.Option(help="How sparse columns are kept: detected is smallest.")
    ] = "detected"
    as_: Annotated[
        Literal["space", "vector"],
        typer.Option("--as", help="A result becomes an array, or vectors in the cell table with an index."),
    ] = "space"
    result_output: Annotated[
        str | None, typer.Option("--output", metavar="NAME", help="Which output of a result.", show_default=False)
    ] = None
    unknown: Annotated[
        Literal["error", "skip"], typer.Option(help="What to do with ids of a result or shapes that are no cells.")
    ] = "error"
    metric: Annotated[
        Literal["l2", "cosine", "dot"],
        typer.Option(
            help="By which distance the index of a result's vectors answers: squared Euclidean (l2), cosine or dot."
        ),
    ] = "l2"

    def of_result(self) -> dict[str, Any]:
        """Give the keyword arguments of `RaggedAtlas.add` for a model's result."""
        if len(self.space) > 1 or "=" in "".join(self.space):
            raise typer.BadParameter("a result becomes one feature space, e.g. --space embedding", param_hint="--space")
        found: dict[str, Any] = {"on_duplicate": self.on_duplicate, "dry_run": self.dry_run, "as_": self.as_}
        found |= {"unknown": self.unknown, "metric": self.metric}
        named = {"space": next(iter(self.space), None), "output": self.result_output}
        return found | {key: value for key, value in named.items() if value is not None}

    def choices(self) -> dict[str, Any]:
        """Give the keyword arguments of `RaggedAtlas.add`."""
        found: dict[str, Any] = {
            "on_duplicate": self.on_duplicate,
            "dry_run": self.dry_run,
            "organism": self.organism,
            "nonfinite": self.nonfinite,
            "duplicate_entries": self.duplicate_entries,
            "max_columns": self.max_columns,
            "on_clash": self.on_clash,
            "column_order": self.column_order,
            "cast": pairs(self.cast, "--cast"),
            "spaces": pairs(self.space, "--space"),
        }
        if self.obs:
            found["obs"] = _all_or_none(self.obs, "--obs")
        if self.layer:
            found["layers"] = _all_or_none(self.layer, "--layer")
        if self.embedding:
            found["embeddings"] = _all_or_none(self.embedding, "--embedding")
        if self.feature_id:
            ids = _all_or_none(self.feature_id, "--feature-id")
            if not isinstance(ids, dict) and len(ids) > 1:
                raise typer.BadParameter(
                    "one column at most, or SPACE=COLUMN for each space", param_hint="--feature-id"
                )
            found["feature_id"] = ids if isinstance(ids, dict) else ids[0]
        return found


def _all_or_none(given: list[str], option: str) -> dict[str, str] | list[str]:
    named = [text for text in given if "=" in text]
    if named and len(named) < len(given):
        raise typer.BadParameter("write all of them with =, or none", param_hint=option)
    return pairs(given, option) if named else given


Codec = Annotated[
    Literal["packed", "standard", "archive"] | None,
    typer.Option(
        help="How arrays are written: packed (the default) reads fastest, standard needs no plug-in, archive is smallest.",
        show_default=False,
    ),
]


@app.command(rich_help_panel=BUILD, epilog="Example: raggedatlas create pbmc.atlas")
@unfold
def create(place: Place, codec: Codec = None) -> None:
    """Create an empty atlas."""
    from raggedatlas.atlas import RaggedAtlas
    from raggedatlas.catalog.catalog import DEFAULT_CODEC

    atlas = RaggedAtlas.create(place.atlas, codec=codec or DEFAULT_CODEC, storage_options=place.storage_options)
    if place.as_json:
        show_json({"uri": atlas.uri})
    else:
        show(f"Created {atlas.uri}")


@app.command(rich_help_panel=BUILD, epilog="Example: raggedatlas add pbmc.atlas a.h5ad b.h5ad --organism human")
@unfold
def add(place: Place, options: AddOptions, linking: Linking, workers: Processes = 1) -> None:
    """Add files, geometry stores, or a model's results for cells that are there; what is refused leaves the atlas as it was."""
    from raggedatlas.ingest.geometry_detecting import is_geometry
    from raggedatlas.ingest.results import is_results

    if workers > 1 and len(options.files) == 1 and (is_geometry(options.files[0]) or is_results(options.files[0])):
        raise typer.BadParameter("results and geometry are added by one process", param_hint="--workers")
    if len(options.files) == 1 and is_geometry(options.files[0]):
        chosen = linking.choices(options.space, options.unknown, options.organism)
        _add_one(place, options, {"on_duplicate": options.on_duplicate, "dry_run": options.dry_run, **chosen})
        return
    if len(options.files) == 1 and is_results(options.files[0]):
        _add_one(place, options, options.of_result())
        return
    choices = options.choices()
    atlas = place.open()
    source: str | list[str] = options.files if len(options.files) > 1 else options.files[0]
    with progress("add") as callback, shared_by(workers) as executor:
        added = atlas.add(source, options.name, progress=callback, executor=executor, **choices)
    reports = added if isinstance(added, list) else [added]
    if place.as_json:
        show_json([report.to_dict() for report in reports])
    else:
        _show_reports(reports)


def _add_one(place: Place, options: AddOptions, choices: dict[str, Any]) -> None:
    with progress("add") as callback:
        report = place.open().add(options.files[0], options.name, progress=callback, **choices)
    if place.as_json:
        show_json(report.to_dict())
    else:
        show(repr(report))


def _show_reports(reports: "Sequence[IngestReport]") -> None:
    rows = [
        {
            "dataset": r.name,
            "status": r.status,
            "cells": r.n_cells,
            "features": [s.n_features for s in r.spaces],
            "new": [s.n_new_features for s in r.spaces],
            "layers": [f"{s.space}/{layer}" for s in r.spaces for layer in s.layers],
        }
        for r in reports
    ]
    show_table(rows, ["dataset", "status", "cells", "features", "new", "layers"], empty="Nothing to add.")
    for report in reports:
        told = repr(report).split("\n")[1 + len(report.spaces) :]
        if told:
            show("\n".join(["", report.name, *told]))
