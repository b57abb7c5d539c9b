"""Verbs ``validate`` and ``inspect``: atlases, files, CXG, results and geometry stores."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
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
from raggedatlas.cli.printing import console, print_json, print_text

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


@command(MAINTENANCE, "validate pbmc.h5ad --level full --fix fixed.h5ad")
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
            default="quick, metadata, deep or pyramid; full with --fix",
        ),
    ] = None,
    at: AtSnapshot = None,
    fix: Annotated[
        str | None,
        value_option("FILE", "Write a repaired copy of the file"),
    ] = None,
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
    if schema is not None:
        if (level, at, fix, workers, since, root_hash, incremental) != (None, None, None, 1, None, "", False):
            raise typer.BadParameter(
                "is used without the options of an atlas, --level and --fix", param_hint="--schema"
            )
        from raggedatlas.wings.cxg.curation import validate_schema

        _show_problems(atlas_options, validate_schema(atlas_options.atlas, schema), schema)
        return
    kind = _kind_of(atlas_options)
    # One option has the levels of all targets, so typer cannot refuse those of another target.
    if level is not None and level not in kind.levels:
        raise typer.BadParameter(
            f"{level} is not a level of {kind.name}; choose {' or '.join(kind.levels)}", param_hint="--level"
        )
    for name, given, refusal in (
        ("--fix", fix is not None, kind.no_fix),
        ("--at", at is not None, kind.no_snapshots),
        ("--workers", workers > 1, kind.no_workers),
        ("--since", since is not None, kind.no_snapshots),
        ("--root-hash", bool(root_hash), kind.no_snapshots),
    ):
        if given and refusal:
            raise typer.BadParameter(refusal, param_hint=name)
    if incremental and (kind is not ATLAS or level not in ("files", "deep")):
        raise typer.BadParameter("is used with an atlas and --level files or deep", param_hint="--incremental")
    if fix is not None:
        _fix_file(atlas_options, fix, level or "full")
    elif kind is ATLAS:
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
        assert kind.check is not None
        _show_problems(atlas_options, kind.check(atlas_options, level or kind.default), level or kind.default)


def _check_results(atlas_options: AtlasOptions, level: Any) -> "Problems":  # noqa: ANN401  (a literal)
    from raggedatlas.wings.results.validation import validate_results

    return validate_results(atlas_options.atlas, level)


def _check_geometry(atlas_options: AtlasOptions, level: Any) -> "Problems":  # noqa: ANN401
    from raggedatlas.wings.vectors import validate as validate_geometry

    return validate_geometry(atlas_options.location, level)


def _check_cxg(atlas_options: AtlasOptions, level: Any) -> "Problems":  # noqa: ANN401
    from raggedatlas.wings import cxg

    return cxg.validate(atlas_options.path, level)


def _check_file(atlas_options: AtlasOptions, level: Any) -> "Problems":  # noqa: ANN401
    from raggedatlas.formats.anndata.validation import Limits
    from raggedatlas.formats.anndata.validation import validate as validate_file

    return validate_file(atlas_options.path, level, limits=Limits.of(atlas_options.path))


@dataclass(frozen=True)
class TargetKind:
    """What ``validate`` takes of one kind of target.

    Parameters
    ----------
    name : str
        Name in messages.
    levels : tuple of str
        Levels of the check; `default` is one of them.
    check : callable or None
        Returns the problems at a level; None for an atlas, which is opened at a snapshot.
    no_fix, no_snapshots, no_workers : str
        Why ``--fix``, ``--at`` and ``--workers`` are refused; empty where they are taken.
    """

    name: str
    levels: tuple[str, ...]
    default: str
    check: Callable[[AtlasOptions, str], "Problems"] | None = None
    no_fix: str = ""
    no_snapshots: str = "a file has no snapshots"
    no_workers: str = ""


_REWRITE = "a {} cannot be repaired; write it again from its source"
FILE_LEVELS = ("metadata", "full")
ATLAS = TargetKind(
    "an atlas", ("quick", "rows", "files", "deep"), "quick",
    no_fix="only files can be repaired by a copy; see raggedatlas repair", no_snapshots="",
)  # fmt: skip
FILE = TargetKind("a file", FILE_LEVELS, "metadata", _check_file, no_workers="a file is read by one process")
CXG = replace(FILE, check=_check_cxg, no_fix=_REWRITE.format("CXG"))
GEOMETRY = TargetKind(
    "a geometry store", ("structure", "metadata", "consistency", "conformance", "pyramid"), "pyramid", _check_geometry,
    no_fix=_REWRITE.format("geometry store"), no_workers="a geometry store is read by one process",
)  # fmt: skip
RESULTS = TargetKind(
    "results", ("quick", "deep"), "deep", _check_results, no_fix="results cannot be repaired; run the model again",
    no_snapshots="results have no snapshots", no_workers="results are read by one process",
)  # fmt: skip


def _kind_of(atlas_options: AtlasOptions) -> TargetKind:
    from raggedatlas.wings.results.sources import is_results

    # First, because results have a folder `lance_db` like an atlas.
    if "://" not in atlas_options.atlas and is_results(atlas_options.atlas):
        return RESULTS
    # Before files, because a geometry store is also a Zarr folder.
    if _is_vectors(atlas_options):
        return GEOMETRY
    if _is_cxg(atlas_options.path):
        return CXG
    return FILE if is_file_or_store(atlas_options.path) else ATLAS


def is_file_or_store(what: "Address") -> bool:
    """Return whether a path is a file, Zarr folder or CXG, and not an atlas; of a remote path the ending decides."""
    from raggedatlas.store.location import Location, as_path

    path = as_path(what)
    if isinstance(path, Location):
        return path.is_web or path.suffix in REMOTE_ENDINGS
    return path.is_file() or any((path / name).is_file() for name in ZARR_ROOTS) or _is_cxg(path)


def is_cell_file(what: str, *, at: str | None, selected: bool) -> bool:
    """Return whether a path is a file or folder of cells, and refuse options that only an atlas accepts.

    Parameters
    ----------
    what : str
        Path or address.
    at : str or None
        Requested snapshot.
    selected : bool
        Whether cells, features or layers are selected.

    Raises
    ------
    typer.BadParameter
        If a snapshot or a selection is requested of a file.
    """
    # A Market-matrix folder has no metadata; it is recognized by the name of its matrix.
    if not is_file_or_store(what) and not any(Path(what, name).is_file() for name in ("matrix.mtx", "matrix.mtx.gz")):
        return False
    if selected:
        raise typer.BadParameter(
            f"{what} is a file, which is always shown completely; select cells with raggedatlas convert",
            param_hint="--where",
        )
    if at is not None:
        raise typer.BadParameter("a file has no snapshots", param_hint="--at")
    return True


def _is_cxg(path: "AnyPath") -> bool:
    from raggedatlas.wings.cxg.inspection import is_cxg

    # In an object store the ending decides: to look for members would list an atlas.
    return path.suffix == ".cxg" or (isinstance(path, Path) and is_cxg(path))


def _is_vectors(atlas_options: AtlasOptions) -> bool:
    from raggedatlas.store.location import Location
    from raggedatlas.wings.vectors.inspection import is_geometry_store

    path = atlas_options.path
    # Without a request where the ending decides; and web servers have no geometry stores.
    if isinstance(path, Location) and (path.is_web or path.suffix in set(REMOTE_ENDINGS) - {".zarr"}):
        return False
    return is_geometry_store(atlas_options.location)


def _show_problems(atlas_options: AtlasOptions, problems: "Problems", level: str) -> None:
    if atlas_options.as_json:
        print_json(problems.to_dict())
    else:
        for problem in problems:
            print_text(to_command_line(str(problem)))
        print_text(f"{problems.summary()} ({level}).")
    # Problems of lower levels are printed, but the exit code stays 0.
    if problems.breaks_must:
        raise typer.Exit(EXIT_FAILURE)


def _fix_file(atlas_options: AtlasOptions, target: str, level: Any) -> None:  # noqa: ANN401  (a literal)
    from raggedatlas.formats.anndata.fixes import repair
    from raggedatlas.model.validation import Problems

    # a file that exceeds the limits of the check would exceed them in the repair too, which runs in this process
    before = _check_file(atlas_options, level)
    # Ends the command, since A00 is a `must` and `_show_problems` exits with an error.
    if any(problem.rule == "A00" and not problem.path for problem in before):
        _show_problems(atlas_options, before, level)
    done = repair(atlas_options.atlas, target, level)
    left = Problems(done.left)
    if atlas_options.as_json:
        print_json({"written": target, "fixed": done.fixed, "left": left.to_dict()})
    else:
        for line in done.fixed:
            print_text(f"fixed: {line}")
        for problem in left:
            print_text(f"left: {problem}")
        print_text(f"Wrote {target}: {len(done.fixed):,} fixed; left: {left.summary()}.")


@command(INSPECT, "inspect pbmc.h5ad --depth 1")
def inspect(
    atlas_options: InspectTarget,
    depth: Annotated[int | None, value_option("LEVELS", "Maximum depth", min=1)] = None,
) -> None:
    """Print the contents of a file: elements, encodings, shapes, types, chunks, compression, sizes."""
    from rich.text import Text

    from raggedatlas.cli.printing import printable
    from raggedatlas.formats.anndata.validation import inspect as inspect_file
    from raggedatlas.model.reports import size_text
    from raggedatlas.wings import cxg
    from raggedatlas.wings.vectors.inspection import inspect as inspect_geometry

    found: Inspection
    if _is_vectors(atlas_options):
        found = inspect_geometry(atlas_options.location)
    else:
        path = atlas_options.path
        found = (cxg.inspect if _is_cxg(path) else inspect_file)(path)
    if atlas_options.as_json:
        print_json(found.to_dict())
        return
    out = console()
    style = Text.assemble
    head = style(
        (printable(atlas_options.path.name), "bold"),
        f"  {found.store}, {size_text(found.n_bytes)}, {found.root.facts()}",
    )
    out.print(head, no_wrap=True, overflow="ellipsis")
    for branch, element in found.lines(depth):
        facts = printable(element.facts())
        line = style(branch, (printable(element.name), "bold"), "  ", (facts, "red" if element.fault else "dim"))
        out.print(line, no_wrap=True, overflow="ellipsis")
