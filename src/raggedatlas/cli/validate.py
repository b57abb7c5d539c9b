"""Verbs for files, CXG and geometry stores: ``validate``, which also takes an atlas, and ``inspect``."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from raggedatlas.cli.app import CARE, LOOK, WRONG, app, as_commands
from raggedatlas.cli.options import At, Place, Processes, shared_by, subject, unfold
from raggedatlas.cli.printing import console, show, show_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from raggedatlas.model.reports import Inspection, Problem

ZARR_ROOTS = ("zarr.json", ".zgroup", ".zarray")
"""Names that tell a Zarr folder from that of an atlas."""

ATLAS_LEVELS = ("quick", "rows", "deep")
FILE_LEVELS = ("metadata", "full")
RESULT_LEVELS = ("quick", "deep")
GEOMETRY_LEVELS = ("structure", "metadata", "consistency", "conformance", "pyramid")

AtlasLevel = Literal["quick", "rows", "deep"]
FileLevel = Literal["metadata", "full"]
GeometryLevel = Literal["structure", "metadata", "consistency", "conformance", "pyramid"]
AnyLevel = Literal[
    "quick", "rows", "deep", "metadata", "full", "structure", "consistency", "conformance", "pyramid"
]  # fmt: skip


@dataclass(frozen=True)
class Checked(Place):
    """What is to be validated, and how to print."""

    atlas: Annotated[
        str,
        subject(
            "ATLAS|FILE",
            "An atlas, a file or Zarr folder of AnnData, a CXG, a folder of results, or a geometry store (here or in an object store)",
        ),
    ]


@dataclass(frozen=True)
class Looked(Place):
    """What is to be looked into, and how to print."""

    atlas: Annotated[
        str,
        subject(
            "FILE",
            "A file or Zarr folder of AnnData or MuData, a CXG, or a geometry store (here or in an object store)",
        ),
    ]


@app.command(rich_help_panel=CARE, epilog="Example: raggedatlas validate pbmc.h5ad --level full --fix mended.h5ad")
@unfold
def validate(
    place: Checked,
    level: Annotated[
        AnyLevel | None,
        typer.Option(
            help="Of an atlas: quick compares tables, rows every cell's pointers too, deep reads every byte. "
            "Of a file: metadata looks at its structure, full reads every value. "
            "Of results: quick compares sizes, deep every byte. "
            "Of a geometry store: structure, metadata, consistency, conformance, pyramid, each with those before it.",
            show_default="quick, metadata, deep or pyramid; full with --fix",
        ),
    ] = None,
    at: At = None,
    fix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a copy of the file with what can be mended.", show_default=False),
    ] = None,
    workers: Processes = 1,
) -> None:
    """Look for anything wrong in an atlas, a file or results; exit code 1 if there is."""
    if _is_results(place):
        _validate_results(place, level, at, fix)
        return
    geometry = _is_vectors(place)
    is_file = geometry or is_one_file(place.atlas)
    what, levels = _levels_of(is_file=is_file, geometry=geometry)
    if level is not None and level not in levels:
        raise typer.BadParameter(f"{level} is no level of {what}; choose {' or '.join(levels)}", param_hint="--level")
    _refuse_fix(place, fix, is_file=is_file)
    if is_file and at is not None:
        raise typer.BadParameter("a file has no snapshots", param_hint="--at")
    if workers > 1 and is_file:
        raise typer.BadParameter(f"{what} is read by one process", param_hint="--workers")
    if not is_file:
        _validate_atlas(place, cast("AtlasLevel", level or "quick"), at, workers)
    elif geometry:
        _validate_geometry(place, cast("GeometryLevel", level or "pyramid"))
    elif fix is None:
        _validate_file(place, cast("FileLevel", level or "metadata"))
    else:
        _mend_file(place, fix, cast("FileLevel", level or "full"))


def _is_results(place: Place) -> bool:
    from raggedatlas.ingest.results import is_results

    return place.location.is_local and is_results(place.atlas)


def _validate_results(place: Place, level: AnyLevel | None, at: str | None, fix: Path | None) -> None:
    from raggedatlas.results.validation import validate_results

    chosen = level or "deep"
    if chosen not in RESULT_LEVELS:
        raise typer.BadParameter(f"{chosen} is no level of results; choose quick or deep", param_hint="--level")
    if at is not None:
        raise typer.BadParameter("results have no snapshots", param_hint="--at")
    if fix is not None:
        raise typer.BadParameter("results are not mended; run the model again", param_hint="--fix")
    _show_problems(place, validate_results(place.atlas, cast("Literal['quick', 'deep']", chosen)), chosen)


def _levels_of(*, is_file: bool, geometry: bool) -> tuple[str, tuple[str, ...]]:
    if geometry:
        return "a geometry store", GEOMETRY_LEVELS
    return ("a file", FILE_LEVELS) if is_file else ("an atlas", ATLAS_LEVELS)


def _refuse_fix(place: Place, fix: Path | None, *, is_file: bool) -> None:
    if fix is None:
        return
    if not is_file:
        raise typer.BadParameter("only files are mended by a copy; see raggedatlas repair", param_hint="--fix")
    for name, is_so in (("CXG", _is_cxg(Path(place.atlas))), ("geometry store", _is_vectors(place))):
        if is_so:
            raise typer.BadParameter(f"a {name} is not mended; write it again from its source", param_hint="--fix")


def is_one_file(what: str) -> bool:
    """Tell a file, Zarr folder, CXG or geometry store from an atlas, by what lies there."""
    path = Path(what)
    return path.is_file() or any((path / name).is_file() for name in ZARR_ROOTS) or _is_cxg(path)


def is_cell_file(what: str, *, at: str | None, selected: bool) -> bool:
    """Tell a file or folder of cells from an atlas, and refuse the options that only an atlas takes.

    Parameters
    ----------
    what : str
        Path or address.
    at : str or None
        Snapshot that was asked for.
    selected : bool
        Whether some cells, features or layers were chosen.

    Raises
    ------
    typer.BadParameter
        If a file is asked for a snapshot or a selection.
    """
    if not is_one_file(what) and not any(Path(what, name).is_file() for name in ("matrix.mtx", "matrix.mtx.gz")):
        return False
    if selected:
        raise typer.BadParameter(
            f"{what} is a file, of which every cell is shown; choose some with raggedatlas convert",
            param_hint="--where",
        )
    if at is not None:
        raise typer.BadParameter("a file has no snapshots", param_hint="--at")
    return True


def _is_cxg(path: Path) -> bool:
    from raggedatlas.formats.cxg.inspection import is_cxg

    return path.suffix == ".cxg" or is_cxg(path)


def _is_vectors(place: Place) -> bool:
    from raggedatlas.vectors.inspection import is_geometry_store

    return is_geometry_store(place.location)


def _validate_atlas(place: Place, level: AtlasLevel, at: str | None, workers: int) -> None:
    from raggedatlas.catalog.checks import is_note

    with shared_by(workers) as executor:
        problems = place.open_at(at).validate(level, executor=executor)
    if place.as_json:
        show_json([{**asdict(problem), "note": is_note(problem)} for problem in problems])
    else:
        for problem in problems:
            show(as_commands(f"{'note: ' if is_note(problem) else ''}{problem}"))
        wrong = sum(not is_note(problem) for problem in problems)
        show(f"{wrong:,} problems found ({level})." if wrong else f"Nothing is wrong ({level}).")
    if not all(is_note(problem) for problem in problems):
        raise typer.Exit(WRONG)


def _validate_file(place: Place, level: FileLevel) -> None:
    from raggedatlas.formats import cxg
    from raggedatlas.formats.anndata.validation import Limits
    from raggedatlas.formats.anndata.validation import validate as validate_file

    if _is_cxg(Path(place.atlas)):
        problems = cxg.validate(place.atlas, level)
    else:
        problems = validate_file(place.atlas, level, limits=Limits.of(place.atlas))
    _show_problems(place, problems, level)


def _validate_geometry(place: Place, level: GeometryLevel) -> None:
    from raggedatlas.vectors import validate as validate_geometry

    _show_problems(place, validate_geometry(place.location, level), level)


def _show_problems(place: Place, problems: "list[Problem]", level: str) -> None:
    if place.as_json:
        show_json([asdict(problem) for problem in problems])
    else:
        for problem in problems:
            show(str(problem))
        show(f"{_counted(problems)} ({level}).")
    _exit_if_broken(problems)


def _mend_file(place: Place, target: Path, level: FileLevel) -> None:
    from raggedatlas.formats.anndata.fixes import repair
    from raggedatlas.formats.anndata.validation import Limits
    from raggedatlas.formats.anndata.validation import validate as validate_file

    # a file that exceeds the limits of its check would do so again in the repair, in this process
    before = validate_file(place.atlas, level, limits=Limits.of(place.atlas))
    if any(problem.rule == "A00" and not problem.path for problem in before):
        _show_problems(place, before, level)
    done = repair(place.atlas, target, level)
    if place.as_json:
        show_json({"written": str(target), "mended": done.mended, "left": [asdict(problem) for problem in done.left]})
    else:
        for line in done.mended:
            show(f"mended: {line}")
        for problem in done.left:
            show(f"left: {problem}")
        show(f"Wrote {target}: {len(done.mended):,} mended; left: {_counted(done.left)}.")
    _exit_if_broken(done.left)


def _counted(problems: "Iterable[Problem]") -> str:
    levels = [problem.level for problem in problems]
    if not levels:
        return "Nothing is wrong"
    return ", ".join(f"{levels.count(level):,} {level}" for level in ("must", "should", "practice") if level in levels)


def _exit_if_broken(problems: "Iterable[Problem]") -> None:
    if any(problem.level == "must" for problem in problems):
        raise typer.Exit(WRONG)


@app.command(rich_help_panel=LOOK, epilog="Example: raggedatlas inspect pbmc.h5ad --depth 1")
@unfold
def inspect(
    place: Looked,
    depth: Annotated[
        int | None, typer.Option(min=1, metavar="LEVELS", help="How far down to go.", show_default=False)
    ] = None,
) -> None:
    """Draw what stands in a file: elements, encodings, shapes, types, chunks, compression, sizes."""
    from rich.text import Text

    from raggedatlas.cli.printing import printable
    from raggedatlas.errors import NotFoundError
    from raggedatlas.formats import cxg
    from raggedatlas.formats.anndata.inspection import inspect as inspect_file
    from raggedatlas.model.reports import size_text
    from raggedatlas.vectors.inspection import inspect as inspect_geometry

    found: Inspection
    if _is_vectors(place):
        found = inspect_geometry(place.location)
    elif not place.location.is_local:
        raise NotFoundError(
            f"There is no geometry store at {place.atlas}; in an object store only these are looked into. Copy a file here first."
        )
    else:
        found = (cxg.inspect if _is_cxg(Path(place.atlas)) else inspect_file)(place.atlas)
    if place.as_json:
        show_json(found.to_dict())
        return
    out = console()
    style = Text.assemble
    head = style(
        (printable(Path(place.atlas).name), "bold"),
        f"  {found.store}, {size_text(found.n_bytes)}, {found.root.facts()}",
    )
    out.print(head, no_wrap=True, overflow="ellipsis")
    for branch, element in found.lines(depth):
        facts = printable(element.facts())
        line = style(branch, (printable(element.name), "bold"), "  ", (facts, "red" if element.fault else "dim"))
        out.print(line, no_wrap=True, overflow="ellipsis")
