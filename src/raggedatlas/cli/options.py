"""Options that verbs share, as frozen dataclasses that are unfolded into a command's parameters."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raggedatlas.cli.parameters import AsJson, Strict, Words, many, one
from raggedatlas.cli.shapes import geometry_names

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from raggedatlas.atlas import AtlasView, RaggedAtlas
    from raggedatlas.catalog.catalog import Catalog
    from raggedatlas.query.query import Query
    from raggedatlas.store.location import Location

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
