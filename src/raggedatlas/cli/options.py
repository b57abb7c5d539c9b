"""Options of typer in the forms that verbs share: one value, or many."""

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raggedatlas.cli.printing import say
from raggedatlas.errors import UnknownValueWarning

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from raggedatlas.atlas import AtlasView, RaggedAtlas
    from raggedatlas.catalog.catalog import Catalog
    from raggedatlas.formats.cxg.options import ConversionLoss
    from raggedatlas.query.query import Query
    from raggedatlas.store.location import Location

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")]
Words = list[str]
"""The values of an option that is given many times."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
"""How a verb is told to print for scripts."""


def one(metavar: str | None, text: str, *names: str, default: str | bool = False) -> Any:  # noqa: ANN401 - an option of typer
    """Return an option that takes one value; `default` says in the help what stands for none.

    Examples
    --------
    >>> one("NAME", "Of a file", "--name", "-n").metavar
    'NAME'
    """
    return typer.Option(*names, metavar=metavar, help=f"{text}.", show_default=default)


def subject(metavar: str, text: str) -> Any:  # noqa: ANN401 - an argument of typer
    """Return the argument that says what a verb works on.

    Examples
    --------
    >>> subject("FILE", "A file").help
    'A file.'
    """
    return typer.Argument(metavar=metavar, help=f"{text}.", show_default=False)


def many(metavar: str, text: str, *names: str) -> Any:  # noqa: ANN401 - an option of typer
    """Return an option that may be given many times, whose values are `Words`.

    Examples
    --------
    >>> many("NAME", "Keep a column").help
    'Keep a column; repeatable.'
    """
    return one(metavar, f"{text}; repeatable", *names)


def _refuse_unknown(asked: bool) -> bool:
    if asked:
        warnings.simplefilter("error", UnknownValueWarning)
    return asked


Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        callback=_refuse_unknown,
        help="Refuse values in conditions that no cell has, and a .cxg that would lose or change anything.",
    ),
]


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
            "unassigned": _parse_label(self.unassigned),
        }
        named["link"] = None if self.link is None else ({column: attribute} if sign else column)
        return found | {key: value for key, value in named.items() if value is not None}


def _parse_label(text: str | None) -> int | str | None:
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


DEBUG = "raggedatlas.debug"


def unfold(verb: Callable[..., None]) -> Callable[..., None]:
    """Make a verb whose parameters may be dataclasses into a command that has their fields as parameters.

    Parameters
    ----------
    verb : callable
        Annotated; parameters that are dataclasses are built from the command's.

    Returns
    -------
    callable
        For `typer.Typer.command`. A field that several dataclasses have is one option, whose value they share.
    """
    given_parameters = inspect.signature(verb).parameters
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in given_parameters.items()
        if dataclasses.is_dataclass(parameter.annotation)
    }
    unfolded: dict[str, inspect.Parameter] = {}
    for name, parameter in given_parameters.items():
        if name in groups:
            unfolded |= {part.name: _parameter(part) for part in dataclasses.fields(groups[name])}
        else:
            unfolded[name] = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)

    @wraps(verb)
    def command(**given: Any) -> None:  # noqa: ANN401  (the values of all options)
        own = {name: value for name, value in given.items() if name in given_parameters}
        for name, group in groups.items():
            own[name] = group(**{part.name: given[part.name] for part in dataclasses.fields(group)})
        verb(**own)

    command.__signature__ = inspect.Signature([*unfolded.values()])  # type: ignore[attr-defined]
    command.__annotations__ = {name: parameter.annotation for name, parameter in unfolded.items()}
    del command.__wrapped__  # its hints are not the command's
    return command


def _parameter(part: "dataclasses.Field[Any]") -> inspect.Parameter:
    default: Any = inspect.Parameter.empty
    if part.default is not dataclasses.MISSING:
        default = part.default
    elif part.default_factory is not dataclasses.MISSING:
        default = part.default_factory()
    return inspect.Parameter(part.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=part.type)


def pairs(given: list[str], option: str) -> dict[str, str]:
    """Read ``key=value`` texts; the first equals sign divides.

    Raises
    ------
    typer.BadParameter
        If there is none.

    Examples
    --------
    >>> pairs(["endpoint=http://a?b=c"], "--storage-option")
    {'endpoint': 'http://a?b=c'}
    """
    found = {}
    for text in given:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise typer.BadParameter(f"{text!r} is not of the form key=value", param_hint=option)
        found[key] = value
    return found


def version_of(text: str) -> int | str:
    """Tell the number of a snapshot from its label (labels are never numbers)."""
    return int(text) if text.isdecimal() else text


def _debugging(ctx: typer.Context, asked: bool) -> bool:
    if asked:
        ctx.meta[DEBUG] = True
    return asked


@dataclass(frozen=True)
class Place:
    """Which atlas, and how to print."""

    atlas: Annotated[
        str, typer.Argument(help="Folder or address (s3://, gs://, az://) of the atlas.", show_default=False)
    ]
    storage_option: Annotated[Words, many("KEY=VALUE", "Credential or endpoint of an object store")] = field(
        default_factory=list
    )
    as_json: AsJson = False
    debug: Annotated[bool, typer.Option("--debug", callback=_debugging, help="Show the traceback of an error.")] = False

    @property
    def storage_options(self) -> dict[str, str]:
        """The storage options, read."""
        return pairs(self.storage_option, "--storage-option")

    @property
    def location(self) -> "Location":
        """Where it lies."""
        from raggedatlas.store.location import Location

        return Location(self.atlas, self.storage_options)

    def open(self) -> "RaggedAtlas":
        """Open the atlas for reading and writing."""
        from raggedatlas.atlas import RaggedAtlas

        return RaggedAtlas.open(self.atlas, storage_options=self.storage_options)

    def open_at(self, at: str | None) -> "RaggedAtlas | AtlasView":
        """Open the newest state, or a snapshot where one is named."""
        return self.open() if at is None else self.open().checkout(version_of(at))

    def open_snapshot(self, at: str | None) -> "AtlasView":
        """Open a snapshot, the newest where none is named.

        Raises
        ------
        NotFoundError
            If there is none.
        """
        from raggedatlas.errors import NotFoundError

        atlas = self.open()
        if at is not None:
            return atlas.checkout(version_of(at))
        known = atlas.list_versions()
        if not known:
            raise NotFoundError(
                f"{self.atlas} has no snapshot to ask, so that its answer can be had again; run: raggedatlas snapshot {self.atlas}"
            )
        return atlas.checkout(known[-1].version)

    def catalog(self, at: str | None) -> "Catalog":
        """Open the tables of the newest state, or of a snapshot."""
        from raggedatlas.catalog.catalog import open_catalog
        from raggedatlas.catalog.snapshots import find_version, open_snapshot

        catalog = open_catalog(self.location)
        return catalog.current() if at is None else open_snapshot(catalog, find_version(catalog, version_of(at)))


At = Annotated[str | None, one("SNAPSHOT", "Number or label of a snapshot")]
Space = Annotated[str, typer.Option(help="Feature space.")]
Processes = Annotated[int, typer.Option("--workers", min=1, help="How many processes share the work.")]


@contextmanager
def shared_by(workers: int) -> "Iterator[Executor | None]":
    """Start processes for a verb, unless it is alone."""
    if workers == 1:
        yield None
        return
    from raggedatlas.store.executors import spawned

    with spawned(workers) as executor:
        yield executor


@dataclass(frozen=True)
class Selection:
    """Which cells, features and layers."""

    where: Annotated[Words, many("SQL", "Keep cells that meet a condition, as SQL", "--where", "-w")] = field(
        default_factory=list
    )
    strict: Strict = False
    features: Annotated[
        Words, many("NAME", "Keep features, by symbol, id or uid, in this order", "--features", "-f")
    ] = field(default_factory=list)
    space: Annotated[Words, many("SPACE", "Read a feature space")] = field(default_factory=list)
    layers: Annotated[Words, many("LAYER", "Read a layer; the first becomes X", "--layers", "-l")] = field(
        default_factory=list
    )
    join: Annotated[
        str, typer.Option(metavar="HOW", help="union, intersection, or how many datasets must have measured a feature.")
    ] = "union"
    missing: Annotated[
        Literal["zero", "nan", "drop"], typer.Option(help="What stands for a feature that a dataset did not measure.")
    ] = "zero"
    identity: Annotated[
        str,
        typer.Option(metavar="MAPPING", help="Which features are the same: default, as-given, or as in a snapshot."),
    ] = "default"
    on_merge: Annotated[
        Literal["counts", "sum", "refuse", "apart"],
        typer.Option(help="Several columns of a dataset for one feature: add up counts, any layer, refuse, keep."),
    ] = "counts"
    orthologs: Annotated[str | None, one("ORGANISM", "Let one-to-one orthologs count as genes of one organism")] = None
    obs: Annotated[Words, many("COLUMN", "Keep cell columns")] = field(default_factory=list)
    with_results: Annotated[Words, many("NAME", "Take a model's result along, as obsm")] = field(default_factory=list)
    order_by: Annotated[Words, many("COLUMN", "Sort cells")] = field(default_factory=list)
    descending: Annotated[bool, typer.Option("--descending", help="Sort downwards.")] = False
    sample: Annotated[
        int | None, typer.Option(min=0, help="Keep so many cells, chosen by chance.", show_default=False)
    ] = None
    sample_by: Annotated[str | None, one("COLUMN", "Sample so many of each value of a column")] = None
    seed: Annotated[int, typer.Option(help="Another seed samples other cells.")] = 0
    limit: Annotated[
        int | None, typer.Option(min=0, help="Keep at most the first so many cells.", show_default=False)
    ] = None

    def ask(self, view: "AtlasView") -> "Query":
        """Make the query of a snapshot that asks for all of it."""
        query = view.query(identity=self.identity, on_merge=self.on_merge)
        for condition in self.where:
            query = query.where(condition)
        query = query.join(min_datasets=int(self.join)) if self.join.isdecimal() else query.join(self.join)
        query = query if self.orthologs is None else query.join(orthologs=self.orthologs)
        query = self._narrow_features(query).missing(self.missing)
        return self._narrow_cells(query)

    def _narrow_features(self, query: "Query") -> "Query":
        shapes = geometry_names(query, self.space)
        spaces = [name for name in self.space if name not in shapes]
        if spaces:
            query = query.spaces(*spaces)
        if self.features:
            query = query.features(*self.features, space=spaces[0] if len(spaces) == 1 else None)
        return query.layers(*self.layers) if self.layers else query

    def _narrow_cells(self, query: "Query") -> "Query":
        if self.sample_by is not None and self.sample is None:
            raise typer.BadParameter(
                "it says how to take the cells of --sample, which is missing", param_hint="--sample-by"
            )
        if self.obs:
            query = query.obs(*self.obs)
        if self.with_results:
            query = query.with_results(*self.with_results)
        if self.order_by:
            query = query.order_by(*self.order_by, descending=self.descending)
        if self.sample is not None:
            query = query.sample(self.sample, by=self.sample_by, seed=self.seed)
        return query if self.limit is None else query.limit(self.limit)


ENDING = ".cxg"

_SPELLED = {"embeddings": "--embedding", "layout": "--dense or --sparse"}
"""Options whose names are others than those of `open_sink`."""


class CxgProfile(StrEnum):
    """Profiles of a CXG."""

    NEW = "0.3.0"
    OLD = "0.2.0"


class Method(StrEnum):
    """Ways to compute an embedding."""

    PCA = "pca"
    UMAP = "umap"


class WideIntegers(StrEnum):
    """What becomes of integers that 32 bits do not hold."""

    REFUSE = "refuse"
    TEXT = "text"


@dataclass(frozen=True)
class AsCxg:
    """How a CXG is written."""

    profile: Annotated[
        CxgProfile | None,
        typer.Option(
            help="Of a .cxg: 0.3.0 for the Explorer of today, 0.2.0 for cellxgene 0.15 to 0.16.8.", show_default="0.3.0"
        ),
    ] = None
    strict: Strict = False
    title: Annotated[str | None, typer.Option(help="Title in a .cxg.", show_default=False)] = None
    about: Annotated[
        str | None, typer.Option(metavar="URL", help="Address of more about it, in a .cxg.", show_default=False)
    ] = None
    compute_embedding: Annotated[
        Method | None,
        typer.Option(help="Compute an embedding for a .cxg; umap needs the extra umap.", show_default=False),
    ] = None
    dense: Annotated[
        bool | None,
        typer.Option("--dense/--sparse", help="Of the matrix of a .cxg.", show_default="by its share of non-zeros"),
    ] = None
    sparse_below: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            help="Share of non-zeros below which a .cxg is sparse.",
            show_default="25",
            min=0,
            max=100,
        ),
    ] = None
    x: Annotated[str | None, one("MATRIX", "What a .cxg has for its matrix: X, or layers/NAME", "--x", default="X")] = (
        None
    )
    embedding: Annotated[
        Words,
        many("NAME", "Member of obsm that a .cxg takes, such as X_umap; others are left out", "--embedding", "-e"),
    ] = field(default_factory=list)
    var_index: Annotated[
        str | None, one("COLUMN", "Column of var by whose names a .cxg shows features", "--var-index")
    ] = None
    sort_categories: Annotated[bool, typer.Option("--sort-categories", help="Sort categories by name in a .cxg.")] = (
        False
    )
    wide_integers: Annotated[
        WideIntegers | None,
        typer.Option(help="Integers beyond 32 bits, which a .cxg does not hold.", show_default="refuse"),
    ] = None

    def options(self, target: str, told: Callable[[tuple["ConversionLoss", ...]], None]) -> dict[str, Any]:
        """Give the options of `open_sink` for a target.

        Parameters
        ----------
        target : str
            Where to; options of a CXG are refused for anything else.
        told : callable
            Is given what does not come through.
        """
        given = {
            "profile": None if self.profile is None else self.profile.value,
            "title": self.title,
            "about": self.about,
            "compute_embedding": None if self.compute_embedding is None else self._embedder(),
            "layout": {None: None, True: "dense", False: "sparse"}[self.dense],
            "sparse_below": self.sparse_below,
            "x": self.x,
            "embeddings": self.embedding or None,
            "var_index": self.var_index,
            "sort_categories": self.sort_categories or None,
            "wide_integers": None if self.wide_integers is None else self.wide_integers.value,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if Path(target).suffix != ENDING:
            if given:
                names = ", ".join(_SPELLED.get(name, f"--{name.replace('_', '-')}") for name in given)
                raise typer.BadParameter(f"{names} are options of a .cxg; {target} is none")
            return {}
        return {**given, **({"strict": True} if self.strict else {}), "on_losses": told}

    def _embedder(self) -> Any:  # noqa: ANN401
        from raggedatlas.verbs.reduction import embedder

        assert self.compute_embedding is not None
        return embedder(self.compute_embedding.value)


def tell_losses(losses: tuple["ConversionLoss", ...]) -> None:
    """Say on stderr, line by line, what a CXG does not hold."""
    for loss in losses:
        say(str(loss))
