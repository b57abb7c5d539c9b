"""Calls that are traced: which functions of the package each enters, for the page how-it-works and `scripts/count`."""

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import raggedatlas as ra

PACKAGE = f"{Path(ra.__file__).parent}/"
GROUND = {"model", "errors.py"}
"""What things are: a reader of a walk knows them."""


class Entered(NamedTuple):
    """A function of the package: its file below `src/raggedatlas`, and its name with those of its class and of functions around it."""

    file: str
    name: str


def trace(call: Callable[[], object]) -> list[Entered]:
    """Run a call, and list the functions of the package that it enters in the order of first entries, also in threads that start meanwhile."""
    seen: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.setdefault(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    codes = [code for code in seen if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")]
    return [Entered(code.co_filename.removeprefix(PACKAGE), code.co_qualname) for code in codes]


def trace_walks(data: Path, folder: Path) -> dict[str, list[Entered]]:
    """Trace each walk of the page on two real datasets, after it has run once, so that imports are not in the way.

    Parameters
    ----------
    data : Path
        `tests/data`.
    folder : Path
        Where the atlas is made.
    """
    first, second = (data / f"pbmc_{size}_protein_v3.h5ad" for size in ("5k", "10k"))
    atlas = ra.RaggedAtlas.create(str(folder / "atlas"))
    atlas.add(first, progress=False)
    atlas.snapshot()
    found = {
        "add": trace(partial(atlas.add, second, progress=False)),
        "snapshot": trace(atlas.snapshot),
    }
    view = atlas.checkout(2)
    cells = view.query().to_anndata().obs
    found["query"] = trace(lambda: view.query().where(dataset=second.stem).to_anndata())
    batches = iter(ra.Loader(view.query(), 32, seed=0, threads=0))
    found["batch"] = trace(lambda: next(batches))
    names = cells["cell_name"].astype(str).tolist()
    atlas.delete_cells(cell_name=names[:1])
    found["delete_cells"] = trace(lambda: atlas.delete_cells(cell_name=names[1:2]))
    ra.copy(first, folder / "first.zarr")
    found["copy"] = trace(lambda: ra.copy(second, folder / "second.zarr"))
    return found


def files_entered(walk: list[Entered]) -> set[str]:
    """Name the files of a walk above the ground floor, `GROUND`."""
    return {entered.file for entered in walk} - {e.file for e in walk if e.file.split("/", 1)[0] in GROUND}
