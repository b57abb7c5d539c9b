"""Options of geometry: what ``add`` links, and how ``query`` and ``export`` ask for a box."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raggedatlas.cli.parameters import one

if TYPE_CHECKING:
    from raggedatlas.query.query import Query


@dataclass(frozen=True)
class Linking:
    """How a geometry store is linked with cells."""

    link: Annotated[
        str | None,
        one(
            "COLUMN or COLUMN=ATTRIBUTE",
            "Geometry: the cell column that holds the objects' ids (or an attribute of theirs); else objects become new cells",
        ),
    ] = None
    dataset: Annotated[
        str | None,
        one("DATASET", "Geometry: whose cells are meant; without --link, what the new dataset is called"),
    ] = None
    new_cells: Annotated[
        bool, typer.Option("--new-cells", help="Geometry: objects without a cell become new cells.")
    ] = False
    lacking: Annotated[
        Literal["error", "allow"], typer.Option(help="Geometry: what to do where cells of a dataset have no shape.")
    ] = "error"
    counts: Annotated[bool, typer.Option("--counts", help="Transcripts: add their counts as expression too.")] = False
    genes: Annotated[str, typer.Option(metavar="ATTRIBUTE", help="Transcripts: what tells the gene.")] = "gene"
    cells: Annotated[
        str, typer.Option(metavar="ATTRIBUTE", help="Transcripts: what tells the cell; else the objects.")
    ] = ""
    unassigned: Annotated[str | None, one("VALUE", "Transcripts: what stands for no cell")] = None

    def choices(self, spaces: list[str], unknown: str, organism: str) -> dict[str, Any]:
        """Give the keyword arguments of `RaggedAtlas.add` for geometry."""
        if len(spaces) > 1 or "=" in "".join(spaces):
            raise typer.BadParameter("shapes become one feature space, e.g. --space morphology", param_hint="--space")
        found: dict[str, Any] = {
            "new_cells": self.new_cells, "lacking": self.lacking, "counts": self.counts, "genes": self.genes, "cells": self.cells,
            "unknown": unknown, "organism": organism,
        }  # fmt: skip
        column, sign, attribute = (self.link or "").partition("=")
        named: dict[str, Any] = {
            "space": next(iter(spaces), None),
            "dataset": self.dataset,
            "unassigned": _value(self.unassigned),
        }
        named["link"] = None if self.link is None else ({column: attribute} if sign else column)
        return found | {key: value for key, value in named.items() if value is not None}


def _value(text: str | None) -> int | str | None:
    """Read a whole number as such, all else as text."""
    return text if text is None or not text.lstrip("-").isdecimal() else int(text)


@dataclass(frozen=True)
class Inside:
    """A box, and what is compared with it."""

    within: Annotated[
        str | None,
        one(
            "XMIN,YMIN,XMAX,YMAX",
            "Keep cells whose shape meets a box (6 or 8 numbers for 3 or 4 axes); --space names the geometry",
        ),
    ] = None
    within_by: Annotated[
        Literal["bbox", "centroid", "exact"], typer.Option(help="What of a shape must meet the box.")
    ] = "bbox"
    centroids: Annotated[
        str | None,
        one("GEOMETRY", "Take centroids along, as obsm['spatial']"),
    ] = None

    def narrow(self, query: "Query", spaces: list[str]) -> "Query":
        """Put the box to a query; of the named spaces, one that is a geometry is meant."""
        if self.centroids is not None:
            query = query.with_centroids(self.centroids)
        if self.within is None:
            return query
        try:
            box = [float(number) for number in self.within.split(",")]
        except ValueError as error:
            raise typer.BadParameter(f"{self.within!r} is no list of numbers", param_hint="--within") from error
        of = geometry_names(query, spaces)
        return query.within(box, of[0] if of else None, by=self.within_by)


def geometry_names(query: "Query", spaces: list[str]) -> list[str]:
    """Give those of some names that are geometry, not values."""
    from raggedatlas.catalog.geometries import read_geometries

    known = (
        {name for record in read_geometries(query.catalog) for name in (record.name, record.space)} if spaces else set()
    )
    return [name for name in spaces if name in known]
