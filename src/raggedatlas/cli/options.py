"""Options shared by several verbs, as frozen dataclasses that are expanded into the parameters of a command."""

import dataclasses
import inspect
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from raggedatlas.cli.printing import print_status
from raggedatlas.errors import UnknownValueWarning
from raggedatlas.model.choices import By, FeatureNames, Missing, OnMerge, Profile, WideIntegers

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from raggedatlas.atlas import AtlasView, RaggedAtlas
    from raggedatlas.catalog.catalog import Catalog
    from raggedatlas.query.query import Query
    from raggedatlas.store.location import AnyPath, Location

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")]
Strings = list[str]
"""Values of a repeatable option."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
"""Option for output that scripts read."""


def value_option(metavar: str | None, text: str, *names: str, default: str | bool = False, **limits: Any) -> Any:  # noqa: ANN401 - an option of typer
    """Return an option with one value; `default` is shown in the help as its default, and `limits` are those of typer."""
    return typer.Option(*names, metavar=metavar, help=f"{text}.", show_default=default, **limits)


def argument(text: str, metavar: str | None = None) -> Any:  # noqa: ANN401 - an argument of typer
    """Return an argument."""
    return typer.Argument(metavar=metavar, help=f"{text}.", show_default=False)


def repeatable_option(metavar: str | None, text: str, *names: str) -> Any:  # noqa: ANN401 - an option of typer
    """Return an option that may be given many times, whose values are `Strings`."""
    return value_option(metavar, f"{text}; repeatable", *names)


def option(
    metavar: str | None,
    text: str,
    *names: str,
    default: Any = None,  # noqa: ANN401
    show: str | None = None,
    **limits: float,
) -> Any:  # noqa: ANN401 - the field of a dataclass
    """Return a field of an option group that is an option with one value; `show` is shown in the help as its default."""
    shown = default is not None if show is None else show
    return field(default=default, metadata={"option": value_option(metavar, text, *names, default=shown, **limits)})


def flag(name: str, text: str) -> Any:  # noqa: ANN401 - the field of a dataclass
    """Return a field of an option group that is False unless the option is given."""
    return option(None, text, name, default=False)


def repeatable(metavar: str | None, text: str, *names: str) -> Any:  # noqa: ANN401 - the field of a dataclass
    """Return a field of an option group that lists the values of an option given many times."""
    return field(default_factory=list, metadata={"option": repeatable_option(metavar, text, *names)})


def like(kind: Any, name: str, *names: str, metavar: str | None = None, text: str = "", **limits: float) -> Any:  # noqa: ANN401
    """Return a field of an option group that is an option of a Python call, with its type and its default.

    `kind` is a dataclass with the options of the call. `name` is the option, and also the name of the field, which
    `arguments_of` passes on. `text` is the help; by default the first sentence of the description of the option, as
    `described` finds it.
    """
    part = kind.__dataclass_fields__[name]
    if part.default is False:
        names = names or (f"--{name.replace('_', '-')}",)
    made = value_option(metavar, text or described(name), *names, default=part.default is not None, **limits)
    return field(default=part.default, metadata={"option": made, "type": part.type})


def described(name: str) -> str:
    """Return the first sentence of the description of an option of `add`, without its full stop."""
    # Here, as most commands do without.
    from raggedatlas.model.options import AddChoices, AddOptions

    docs = "\n".join(inspect.getdoc(kind) or "" for kind in (AddOptions, AddChoices))
    # Absent with `python -OO`.
    _, _, entry = docs.partition(f"\n{name} : ")
    sentence = re.split(r"\.(?:\s|$)", " ".join(entry.partition("\n")[2].split()))[0]
    return re.sub(r'`+"?|"?`+', "", sentence)


def arguments_of(kind: Any, *groups: Any) -> dict[str, Any]:  # noqa: ANN401 - dataclasses
    """Return the values of fields made by `like` that are options of a call, except None, which leaves the default to the call."""
    return {
        part.name: value
        for group in groups
        for part in dataclasses.fields(group)
        if "type" in part.metadata
        and part.name in kind.__dataclass_fields__
        and (value := getattr(group, part.name)) is not None
    }


def refuse_unused(why: str, group: Any, names: Collection[str]) -> None:  # noqa: ANN401 - a dataclass
    """Refuse options of a group that were given and have no effect, as the calls of Python do; `why` says when they have none."""
    given = [
        spelled(part)
        for part in dataclasses.fields(group)
        if part.name in names
        and getattr(group, part.name)
        != (part.default if part.default_factory is dataclasses.MISSING else part.default_factory())
    ]
    if given:
        has, it = ("has", "it") if len(given) == 1 else ("have", "them")
        raise typer.BadParameter(f"{has} no effect {why}; leave {it} out", param_hint=", ".join(given))


def spelled(part: "dataclasses.Field[Any]") -> str:
    """Return the option that a field of a group is: its own long name, or one made of the name of the field."""
    made = part.metadata.get("option")
    # typer keeps the first name as the default of an option until the command is made.
    names = (getattr(made, "default", None), *(getattr(made, "param_decls", None) or ()))
    own = (name for name in names if isinstance(name, str) and name.startswith("--"))
    return next(own, f"--{part.name.strip('_').replace('_', '-')}")


def _make_unknown_values_errors(asked: bool) -> bool:
    if asked:
        # Within the `catch_warnings` of `Commands.invoke`, which restores the filters.
        warnings.simplefilter("error", UnknownValueWarning)
    return asked


Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        callback=_make_unknown_values_errors,
        help="Treat values in conditions that no cell has as errors, and refuse to write a .cxg that loses or changes anything.",
    ),
]


@dataclass(frozen=True)
class BoxOptions:
    """Options that select cells by a bounding box."""

    within: str | None = option(
        "XMIN,YMIN,XMAX,YMAX",
        "Keep cells whose shape intersects a box (6 or 8 numbers for 3 or 4 axes); --space names the geometry",
    )
    within_by: By = option(None, "Part of a shape that must intersect the box", default="bbox")
    centroids: str | None = option("GEOMETRY", "Add centroids as obsm['spatial']")

    def narrow(self, query: "Query", spaces: list[str]) -> "Query":
        """Return the query restricted to the box, in the first of the named spaces that is a geometry."""
        if self.centroids is not None:
            query = query.with_centroids(self.centroids)
        if self.within is None:
            refuse_unused("without --within", self, ("within_by",))
            return query
        try:
            box = [float(number) for number in self.within.split(",")]
        except ValueError as error:
            raise typer.BadParameter(f"{self.within!r} is not a list of numbers", param_hint="--within") from error
        of = geometry_names(query, spaces)
        return query.within(box, of[0] if of else None, by=self.within_by)


def geometry_names(query: "Query", spaces: list[str]) -> list[str]:
    """Return the names that are geometry."""
    from raggedatlas.catalog.assets import asset_kind

    known = (
        {name for record in asset_kind("geometry").visible(query.catalog) for name in (record.name, record.space)}
        if spaces
        else set()
    )
    return [name for name in spaces if name in known]


DEBUG = "raggedatlas.debug"


Verb = Callable[..., Any]
"""Function of a command: prints and returns None, or returns a report, or what ``--json`` prints and the text that is printed otherwise."""


def expand_option_groups(verb: Verb, show: Callable[[Any, bool], None]) -> Callable[..., None]:
    """Return a command whose parameters are those of a verb, with dataclasses replaced by their fields.

    Parameters that are dataclasses are built from those of the command; a field of several dataclasses becomes one
    option, whose value they share. The help shows the options of a dataclass with an attribute `panel` under that
    heading. `show` prints what the verb returns; its second argument says whether as JSON. The result is for `typer.Typer.command`.
    """
    given_parameters = inspect.signature(verb).parameters
    # Needs annotations that are classes: with `from __future__ import annotations` they would be text.
    groups: dict[str, Any] = {}
    unfolded: dict[str, inspect.Parameter] = {}
    for name, parameter in given_parameters.items():
        # `Annotated[AtlasOptions, argument(...)]` describes the group's argument in other words.
        group, *described = get_args(parameter.annotation) or [parameter.annotation]
        if dataclasses.is_dataclass(group):
            groups[name] = group
            # A field of a later group replaces one of the same name, so both must be declared alike.
            unfolded |= {
                part.name: _field_parameter(part, getattr(group, "panel", None)) for part in dataclasses.fields(group)
            }
            if described:
                first = dataclasses.fields(group)[0].name
                unfolded[first] = unfolded[first].replace(annotation=Annotated[str, described[0]])
        else:
            # Keyword-only, because a parameter without a default may then follow one with a default.
            unfolded[name] = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)

    @wraps(verb)
    def command(**given: Any) -> None:  # noqa: ANN401  (the values of all options)
        own = {name: value for name, value in given.items() if name in given_parameters}
        for name, group in groups.items():
            own[name] = group(**{part.name: given[part.name] for part in dataclasses.fields(group)})
        answer = verb(**own)
        if answer is not None:
            show(answer, given["as_json"])

    command.__signature__ = inspect.Signature([*unfolded.values()])  # type: ignore[attr-defined]
    command.__annotations__ = {name: parameter.annotation for name, parameter in unfolded.items()}
    del command.__wrapped__  # its hints are not the command's
    return command


def _field_parameter(part: "dataclasses.Field[Any]", panel: str | None) -> inspect.Parameter:
    default: Any = inspect.Parameter.empty
    if part.default is not dataclasses.MISSING:
        default = part.default
    elif part.default_factory is not dataclasses.MISSING:
        default = part.default_factory()
    # Fields made by `option` and its like; others have the option in their annotation.
    annotation = part.type
    if part.metadata:
        made = part.metadata["option"]
        made.rich_help_panel = panel
        annotation = Annotated[part.metadata.get("type", part.type), made]
    return inspect.Parameter(part.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def parse_pairs(given: list[str], option: str) -> dict[str, str]:
    """Parse ``key=value`` texts, split at the first equals sign."""
    found = {}
    for text in given:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise typer.BadParameter(f"{text!r} is not of the form key=value", param_hint=option)
        found[key] = value
    return found


def parse_integer(text: str) -> int | str:
    """Parse an integer, perhaps a negative one; return any other text unchanged."""
    return int(text) if text.lstrip("-").isdecimal() else text


def parse_version(text: str) -> int | str:
    """Parse the number or label of a snapshot (labels are never numbers)."""
    return int(text) if text.isdecimal() else text


def _enable_debug(ctx: typer.Context, asked: bool) -> bool:
    if asked:
        # Shared with the context of `Commands.invoke`. Never set to False, as `--debug` may come before the verb.
        ctx.meta[DEBUG] = True
    return asked


@dataclass(frozen=True)
class AtlasOptions:
    """Options of every verb on an atlas: address, credentials, output format."""

    atlas: Annotated[str, argument("Folder or address (s3://, gs://, az://) of the atlas")]
    storage_option: Strings = repeatable("KEY=VALUE", "Credential or endpoint of an object store")
    sources: Literal["allow", "deny", "ask"] = option(
        None, "Whether files that datasets are linked to may be read", default="allow"
    )
    as_json: AsJson = False
    debug: Annotated[bool, typer.Option("--debug", callback=_enable_debug, help="Show the traceback of an error.")] = (
        False
    )

    @property
    def storage_options(self) -> dict[str, str]:
        """Storage options as a dictionary."""
        return parse_pairs(self.storage_option, "--storage-option")

    @property
    def path(self) -> "AnyPath":
        """Path of a file or folder, here, in an object store or on a web server."""
        from raggedatlas.store.location import as_path

        return as_path(self.atlas, self.storage_options)

    @property
    def location(self) -> "Location":
        """Location of the atlas."""
        from raggedatlas.store.location import Location

        return Location(self.atlas, self.storage_options)

    def open(self) -> "RaggedAtlas":
        """Open the atlas for reading and writing."""
        from raggedatlas.atlas import RaggedAtlas

        # Asked on stderr, as stdout may be read as JSON.
        rule = _ask if self.sources == "ask" else self.sources
        return RaggedAtlas.open(self.atlas, storage_options=self.storage_options, sources=rule)

    @property
    def published(self) -> "tuple[str, str | None] | None":
        """Address and snapshot of a published atlas, or None for an atlas of one's own."""
        from raggedatlas.catalog.published import is_published, split_address

        address, at = split_address(self.atlas)
        return (address, at) if is_published(address, self.storage_options) else None

    def open_published(self, at: str | None) -> "AtlasView | None":
        """Open a snapshot of a published atlas; None for an atlas of one's own."""
        found = self.published
        if found is None:
            return None
        from raggedatlas.atlas import open as open_address

        named = at if at is not None else found[1]
        sources = None if self.sources == "allow" else (_ask if self.sources == "ask" else self.sources)
        return open_address(f"{found[0]}@{named or 'latest'}", storage_options=self.storage_options, sources=sources)

    def open_at(self, at: str | None) -> "RaggedAtlas | AtlasView":
        """Open the newest state, or the named snapshot."""
        published = self.open_published(at)
        if published is not None:
            return published
        return self.open() if at is None else self.open().checkout(parse_version(at))

    def open_snapshot(self, at: str | None) -> "AtlasView":
        """Open the named snapshot, or the newest; raise `NotFoundError` if there is none."""
        from raggedatlas.atlas import RaggedAtlas
        from raggedatlas.errors import NotFoundError

        atlas = self.open_at(at)
        if not isinstance(atlas, RaggedAtlas):
            return atlas
        known = atlas.list_versions()
        if not known:
            raise NotFoundError(
                f"{self.atlas} has no snapshot to ask, so that its answer can be had again; run: raggedatlas snapshot {shlex.quote(self.atlas)}"
            )
        return atlas.checkout(known[-1].version)

    def catalog(self, at: str | None) -> "Catalog":
        """Open the tables of the newest state, or of a snapshot."""
        # Not through `RaggedAtlas`, whose imports commands that only list do not need.
        from raggedatlas.catalog.catalog import open_catalog

        found = self.published
        if found is not None:
            from raggedatlas.catalog.published import open_published

            return open_published(found[0], at or found[1], storage_options=self.storage_options)
        catalog = open_catalog(self.location)
        if at is None:
            return catalog.current()
        from raggedatlas.catalog.versions import find_version

        return catalog.at(find_version(catalog, parse_version(at)))


def _ask(address: str) -> bool:
    return sys.stdin.isatty() and typer.confirm(f"The atlas is linked to {address}. Read it?", err=True)


AtSnapshot = Annotated[str | None, value_option("SNAPSHOT", "Number or label of a snapshot")]
Space = Annotated[str, typer.Option(help="Feature space.")]
SinceSnapshot = Annotated[
    str | None,
    value_option(
        "SNAPSHOT", "Of an atlas: snapshot known to be sound; what it has unchanged is not looked at", "--since"
    ),
]
RootHash = Annotated[
    str, value_option("HASH", "Of an atlas, at a snapshot: its root hash, as it was noted or signed", "--root-hash")
]
WorkerCount = Annotated[int, typer.Option("--workers", min=1, help="Number of processes.")]


@contextmanager
def process_pool(workers: int) -> "Iterator[Executor | None]":
    """Start worker processes, or yield None for one worker."""
    if workers == 1:
        yield None
        return
    from raggedatlas.store.executors import spawned

    with spawned(workers) as executor:
        yield executor


@dataclass(frozen=True)
class Selection:
    """Options that select cells, features and layers."""

    where: Strings = repeatable("SQL", "Keep cells that meet a condition, as SQL", "--where", "-w")
    under: Strings = repeatable(
        "COLUMN=TERM", "Keep cells under a term of an ontology, by name, synonym or id, e.g. cell_type='T cell'"
    )
    strict: Strict = False
    features: Strings = repeatable("NAME", "Keep features, by symbol, id or uid, in this order", "--features", "-f")
    space: Strings = repeatable("SPACE", "Read a feature space")
    layers: Strings = repeatable("LAYER", "Read a layer; the first becomes X", "--layers", "-l")
    join: str = option("HOW", "union, intersection, or how many datasets must have measured a feature", default="union")
    missing: Missing = option(None, "Value of a feature that a dataset did not measure", default="zero")
    identity: str = option(
        "MAPPING", "Which features are the same: default, as-given, or as in a snapshot", default="default"
    )
    on_merge: OnMerge = option(
        None, "Several columns of a dataset for one feature: add up counts, any layer, refuse, keep", default="counts"
    )
    names: FeatureNames = option(None, "Name features by their ids, or by their symbols, made unique", default="id")
    orthologs: str | None = option("ORGANISM", "Let one-to-one orthologs count as genes of one organism")
    obs: Strings = repeatable("COLUMN", "Keep cell columns")
    with_results: Strings = repeatable("NAME", "Take a model's result along, as obsm")
    order_by: Strings = repeatable("COLUMN", "Sort cells")
    descending: bool = flag("--descending", "Sort in descending order")
    sample: int | None = option(None, "Keep a random sample of this many cells", min=0)
    sample_by: str | None = option("COLUMN", "Sample this many cells for each value of a column")
    seed: int = option(None, "Seed of the random sample", default=0)
    limit: int | None = option(None, "Keep at most this many cells, the first ones", min=0)

    def ask(self, view: "AtlasView") -> "Query":
        """Build the query of a snapshot."""
        from raggedatlas.store.filters import under

        query = view.query(identity=self.identity, on_merge=self.on_merge, names=self.names)
        for condition in self.where:
            query = query.where(condition)
        for text in self.under:
            for column, term in parse_pairs([text], "--under").items():
                query = query.where({column: under(term)})
        query = query.join(min_datasets=int(self.join)) if self.join.isdecimal() else query.join(self.join)
        query = query if self.orthologs is None else query.join(orthologs=self.orthologs)
        shapes = geometry_names(query, self.space)
        # `--space` also names geometry, which `BoxOptions.narrow` takes and which is no feature space.
        spaces = [name for name in self.space if name not in shapes]
        if spaces:
            query = query.spaces(*spaces)
        if self.features:
            query = query.features(*self.features, space=spaces[0] if len(spaces) == 1 else None)
        query = (query.layers(*self.layers) if self.layers else query).missing(self.missing)
        if self.sample is None:
            refuse_unused("without --sample", self, ("sample_by", "seed"))
        if not self.order_by:
            refuse_unused("without --order-by", self, ("descending",))
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
"""Options with other names than in `open_sink`."""


_SAME_IN_SINK = ("profile", "title", "about", "sparse_below", "x", "var_index", "wide_integers")
"""Options with the names of `open_sink`."""


Method = Literal["pca", "umap"]
"""Ways to compute an embedding."""


@dataclass(frozen=True)
class CxgOptions:
    """Options that write a CXG."""

    profile: Profile | None = option(
        None, "Version of a .cxg: 0.3.0 for the current Explorer, 0.2.0 for cellxgene 0.15 to 0.16.8", show="0.3.0"
    )
    strict: Strict = False
    title: str | None = option(None, "Title of a .cxg")
    about: str | None = option("URL", "Address with more information, in a .cxg")
    compute_embedding: Method | None = option(None, "Compute an embedding for a .cxg; umap needs the extra umap")
    dense: bool | None = option(
        None, "Layout of the matrix in a .cxg", "--dense/--sparse", show="by its share of non-zeros"
    )
    sparse_below: float | None = option(
        "PERCENT", "Share of non-zeros below which a .cxg is sparse", show="25", min=0, max=100
    )
    x: str | None = option("MATRIX", "Matrix of a .cxg: X, or layers/NAME", "--x", show="X")
    embedding: Strings = repeatable(
        "NAME", "Member of obsm to write to a .cxg, such as X_umap; others are left out", "--embedding", "-e"
    )
    var_index: str | None = option("COLUMN", "Column of var with the feature names of a .cxg", "--var-index")
    sort_categories: bool = flag("--sort-categories", "Sort categories by name in a .cxg")
    wide_integers: WideIntegers | None = option(
        None, "What to do with integers beyond 32 bits, which a .cxg cannot hold", show="refuse"
    )

    def options(self, target: str, on_losses: Callable[[tuple[Any, ...]], None]) -> dict[str, Any]:
        """Return the options of `open_sink` for a target; options of a CXG are refused for any other format.

        `on_losses` is called with what the CXG loses or changes.
        """
        given = {
            **{name: getattr(self, name) for name in _SAME_IN_SINK},
            "compute_embedding": make_embedder(self.compute_embedding),
            "layout": {None: None, True: "dense", False: "sparse"}[self.dense],
            "embeddings": self.embedding or None,
            # None instead of False: a flag that is not set must not count as an option of a CXG below.
            "sort_categories": self.sort_categories or None,
        }
        given = {name: value for name, value in given.items() if value is not None}
        # `--strict` is not in `given`: for any target it also turns unknown values into errors.
        if Path(target).suffix != ENDING:
            if given:
                names = ", ".join(_SPELLED.get(name, f"--{name.replace('_', '-')}") for name in given)
                raise typer.BadParameter(f"only for a .cxg, which {target} is not", param_hint=names)
            return {}
        return {**given, **({"strict": True} if self.strict else {}), "on_losses": on_losses}


def make_embedder(method: Method | None) -> Any:  # noqa: ANN401  (an Embedder or None)
    """Return what computes the embedding of a CXG, or None."""
    if method is None:
        return None
    from raggedatlas.model.wings import answer

    return answer("embedder")(method)


def print_losses(losses: tuple[Any, ...]) -> None:
    """Print what a CXG loses or changes, one line each, on stderr."""
    for loss in losses:
        print_status(str(loss))
