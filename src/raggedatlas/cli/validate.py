"""Verbs ``validate`` and ``inspect``: atlases, files, CXG, results and geometry stores."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from raggedatlas.cli.app import EXIT_FAILURE, INSPECT, MAINTENANCE, command, to_command_line
from raggedatlas.cli.options import (
    AtlasOptions,
    AtSnapshot,
    RootHash,
    SinceSnapshot,
    WorkerCount,
    argument,
    parse_version,
    process_pool,
    value_option,
)
from raggedatlas.cli.printing import print_json, print_text
from raggedatlas.model.wings import FileKind, answer, built_in_wings

if TYPE_CHECKING:
    from raggedatlas.model.reports import Inspection
    from raggedatlas.model.validation import Problems
    from raggedatlas.store.location import Address, AnyPath

ZARR_ROOTS = ("zarr.json", ".zgroup", ".zarray")
"""Files that distinguish a Zarr folder from an atlas."""

REMOTE_ENDINGS = (".h5ad", ".h5mu", ".h5", ".hdf5", ".zarr", ".cxg")
"""Endings of files and folders in object stores that are no atlases."""

AnyLevel = Literal[
    "quick", "rows", "files", "deep", "metadata", "full", "structure", "consistency", "conformance", "pyramid"
]  # fmt: skip


ValidateTarget = Annotated[
    AtlasOptions,
    argument(
        "An atlas, a file or Zarr folder of AnnData, a CXG, a folder of results, or a geometry store; here, on s3://, gs://, az:// or https://",
        "ATLAS|FILE",
    ),
]
InspectTarget = Annotated[
    AtlasOptions,
    argument(
        "A file or Zarr folder of AnnData or MuData, a CXG, or a geometry store; here, on s3://, gs://, az:// or https://",
        "FILE",
    ),
]


@command(MAINTENANCE, "validate pbmc.h5ad --level full")
def validate(
    atlas_options: ValidateTarget,
    level: Annotated[
        AnyLevel | None,
        value_option(
            None,
            "Of an atlas: quick compares tables, rows every cell's pointers too, files reads every byte, deep is all of that. "
            "Of a file: metadata looks at its structure, full reads every value. "
            "Of results: quick compares sizes, deep every byte. "
            "Of a geometry store: structure, metadata, consistency, conformance, pyramid, each with those before it",
            default="quick, metadata, deep or pyramid",
        ),
    ] = None,
    at: AtSnapshot = None,
    schema: Annotated[
        Literal["cellxgene"] | None,
        value_option(
            "SCHEMA", "Check a file by the program cellxgene-schema instead, which is installed apart", "--schema"
        ),
    ] = None,
    workers: WorkerCount = 1,
    since: SinceSnapshot = None,
    root_hash: RootHash = "",
    incremental: Annotated[
        bool,
        typer.Option(
            "--incremental",
            help="Of an atlas, with --level files or deep: skip files that an earlier such call found sound.",
        ),
    ] = False,
) -> None:
    """Validate an atlas, a file or results; exit code 1 if problems are found."""
    from raggedatlas.catalog.published import serves_atlas

    if schema is not None:
        if (level, at, workers, since, root_hash, incremental) != (None, None, 1, None, "", False):
            raise typer.BadParameter("is used without the options of an atlas and --level", param_hint="--schema")
        _show_problems(atlas_options, answer("validate_schema")(atlas_options.atlas, schema), schema)
        return
    # Kinds of wings first: a geometry store is also a Zarr folder, and results have a folder `lance_db` like an atlas.
    kind = _kind_of(atlas_options)
    # One option has the levels of all targets, so typer cannot refuse those of another target.
    if level is not None and level not in kind.levels:
        raise typer.BadParameter(
            f"{level} is not a level of {kind.noun}; choose {' or '.join(kind.levels)}", param_hint="--level"
        )
    of_atlas = dict.fromkeys(("--at", "--since", "--root-hash"), "a file has no snapshots") if kind is not ATLAS else {}
    refusals = {**of_atlas, **kind.refusals}
    for name, given in (
        ("--at", at is not None),
        ("--workers", workers > 1),
        ("--since", since is not None),
        ("--root-hash", bool(root_hash)),
    ):
        if given and name in refusals:
            raise typer.BadParameter(refusals[name], param_hint=name)
    if incremental and (kind is not ATLAS or level not in ("files", "deep")):
        raise typer.BadParameter("is used with an atlas and --level files or deep", param_hint="--incremental")
    if root_hash and at is None and not serves_atlas(atlas_options.atlas):
        raise typer.BadParameter("is that of a snapshot; name it with --at", param_hint="--root-hash")
    if kind is ATLAS:
        with process_pool(workers) as executor:
            opened = atlas_options.open_at(at)
            problems = opened.validate(
                cast("Any", level or kind.default),
                since=None if since is None else parse_version(since),
                root_hash=root_hash,
                incremental=incremental,
                executor=executor,
            )
        _show_problems(atlas_options, problems, level or kind.default)
    else:
        check = _check_file if kind is FILE else resolve_name(kind.validate)
        _show_problems(atlas_options, check(atlas_options.path, level or kind.default), level or kind.default)


@command(MAINTENANCE, "fix pbmc.h5ad fixed.h5ad")
def fix(
    atlas_options: Annotated[AtlasOptions, argument("A file or Zarr folder of AnnData or MuData", "FILE")],
    copy: Annotated[str, argument("The repaired copy, which is written", "COPY")],
    level: Annotated[
        Literal["metadata", "full"], value_option(None, "metadata looks at the structure, full reads every value")
    ] = "full",
) -> None:
    """Write a repaired copy of a file of AnnData or MuData."""
    from raggedatlas.formats.anndata.fixes import repair
    from raggedatlas.model.validation import Problems

    if reason := _kind_of(atlas_options).refusals.get("fix"):
        raise typer.BadParameter(reason, param_hint="FILE")
    # a file that exceeds the limits of the check would exceed them in the repair too, which runs in this process
    before = _check_file(atlas_options.path, level)
    # Ends the command, since A00 is a `must` and `_show_problems` exits with an error.
    if any(problem.rule == "A00" and not problem.path for problem in before):
        _show_problems(atlas_options, before, level)
    done = repair(atlas_options.atlas, copy, level)
    left = Problems(done.left)
    if atlas_options.as_json:
        print_json({"written": copy, "fixed": done.fixed, "left": left.to_dict()})
    else:
        for line in done.fixed:
            print_text(f"fixed: {line}")
        for problem in left:
            print_text(f"left: {problem}")
        print_text(f"Wrote {copy}: {len(done.fixed):,} fixed; left: {left.summary()}.")


def _check_file(path: "AnyPath", level: Any) -> "Problems":  # noqa: ANN401
    from raggedatlas.formats.anndata.validation import Limits
    from raggedatlas.formats.anndata.validation import validate as validate_file

    return validate_file(path, level, limits=Limits.of(path))


ATLAS = FileKind(
    noun="an atlas", accepts="", validate="", levels=("quick", "rows", "files", "deep"), default="quick",
    refusals={"fix": "only files can be repaired by a copy; see raggedatlas repair"},
)  # fmt: skip
FILE = FileKind(
    noun="a file", accepts="", validate="", levels=("metadata", "full"), default="metadata",
    refusals={"--workers": "a file is read by one process"},
)  # fmt: skip


def _kind_of(atlas_options: AtlasOptions) -> FileKind:
    from raggedatlas.catalog.published import serves_atlas

    if serves_atlas(atlas_options.atlas):
        return ATLAS
    path = atlas_options.path
    return _kind_of_wing(path) or (FILE if is_file_or_store(path) else ATLAS)


def _kind_of_wing(path: "AnyPath") -> FileKind | None:
    kinds = (kind for wing in built_in_wings() for kind in wing.files)
    return next((kind for kind in kinds if resolve_name(kind.accepts)(path)), None)


def is_file_or_store(what: "Address") -> bool:
    """Return whether a path is a file, a Zarr folder or another folder of cells, and not an atlas; of a remote path the ending decides."""
    from raggedatlas.catalog.published import serves_atlas
    from raggedatlas.formats.tenx import is_market
    from raggedatlas.store.location import Location, as_path

    if serves_atlas(str(what)):
        return False
    path = as_path(what)
    if isinstance(path, Location):
        return path.is_web or path.suffix in REMOTE_ENDINGS
    # A name with such an ending, where nothing is, is that of a file.
    if (
        path.is_file()
        or (path.suffix in REMOTE_ENDINGS and not path.exists())
        or any((path / name).is_file() for name in ZARR_ROOTS)
    ):
        return True
    wings = built_in_wings()
    if any(path.suffix in wing.writers for wing in wings):
        return True
    return is_market(path) or any(resolve_name(detect)(path) for wing in wings for detect in wing.detectors.values())


def is_cell_file(what: str, *, at: str | None, selected: bool) -> bool:
    """Return whether a path is a file or folder of cells, and refuse options that only an atlas accepts.

    `at` is the requested snapshot; `selected` says whether cells, features or layers are selected.
    """
    if not is_file_or_store(what):
        return False
    if selected:
        raise typer.BadParameter(
            f"{what} is a file, which is always shown completely; select cells with raggedatlas convert",
            param_hint="--where",
        )
    if at is not None:
        raise typer.BadParameter("a file has no snapshots", param_hint="--at")
    return True


def _show_problems(atlas_options: AtlasOptions, problems: "Problems", level: str) -> None:
    if atlas_options.as_json:
        print_json(problems.to_dict())
    else:
        print_text(to_command_line(f"{str(problems).removesuffix('.')} ({level})."))
    # Problems of lower levels are printed, but the exit code stays 0.
    if problems.breaks_must:
        raise typer.Exit(EXIT_FAILURE)


@command(INSPECT, "inspect pbmc.h5ad --depth 1")
def inspect(
    atlas_options: InspectTarget,
    depth: Annotated[int | None, value_option("LEVELS", "Maximum depth", min=1)] = None,
) -> tuple[Any, str]:
    """Print the contents of a file: elements, encodings, shapes, types, chunks, compression, sizes."""
    from raggedatlas.catalog.catalog import is_atlas
    from raggedatlas.formats.anndata.validation import inspect as inspect_file

    kind = _kind_of_wing(atlas_options.path)
    if kind is None and not is_file_or_store(atlas_options.path) and is_atlas(atlas_options.location):
        raise typer.BadParameter("an atlas is shown by raggedatlas info", param_hint="FILE")
    describe = inspect_file if kind is None or not kind.inspect else resolve_name(kind.inspect)
    found: Inspection = describe(atlas_options.path)
    return found.to_dict(), found.text(depth)
