"""A repaired copy of a file: what breaks a rule is mended where the mend is certain, and told where it is not."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from raggedatlas.errors import AtlasError, DuplicateError, StoreError
from raggedatlas.formats.anndata.file_tree import Node
from raggedatlas.formats.anndata.fixes import FIXES
from raggedatlas.formats.anndata.validation import check_root, validate
from raggedatlas.formats.containers import READ_ERRORS, unknown_encoding
from raggedatlas.formats.output_files import writable
from raggedatlas.model.problems import Depth, Problem
from raggedatlas.store.runtime import warnings_as

MOST_ROUNDS = 10
"""A mend can bring another problem to light; so often is the copy looked through again."""


@dataclass(frozen=True, slots=True)
class Repair:
    """What `repair` did.

    Parameters
    ----------
    path : str
        The copy.
    mended : tuple of str
        What was mended, a line each, beginning with the rule and the element.
    left : tuple of Problem
        What is still wrong with the copy.
    """

    path: str
    mended: tuple[str, ...]
    left: tuple[Problem, ...]


def repair(path: str | Path, target: str | Path, level: Depth = "full") -> Repair:
    """Write a copy of an AnnData file in which what can be mended is.

    Values are never guessed: a file whose pointers or indices are wrong keeps them, and the report says so. The copy appears
    under its name when it is done; the file itself is only read.

    Parameters
    ----------
    path : str or Path
        An `.h5ad` or `.h5mu` file, or a Zarr folder.
    target : str or Path
        Where the copy goes; of the same kind as the file.
    level : {"metadata", "full"}
        How far problems are looked for.

    Returns
    -------
    Repair
        What was mended and what was left.

    Raises
    ------
    NotFoundError, SourceError
        If the file cannot be opened.
    DuplicateError
        If the target exists.
    StoreError
        If the copy cannot be written.

    Examples
    --------
    >>> repair("broken.h5ad", "mended.h5ad").mended  # doctest: +SKIP
    ('A02 uns/k: declared as array 0.2.0',)
    """
    path, target = Path(path), Path(target)
    if target.exists():
        raise DuplicateError(f"{target} exists; choose another name for the repaired copy.")
    if not target.parent.is_dir():
        raise StoreError(f"{target} cannot be written: there is no folder {target.parent}; make it first.")
    left = validate(path, level)
    mended: list[str] = []
    hidden = target.with_name(f".{target.name}.{uuid4().hex[:8]}.partial")
    try:
        with writable(target):
            _copy(path, hidden)
            if any(problem.rule in FIXES for problem in left):
                with _opened_for_writing(hidden) as root:
                    mended, left = _fix(root, left, full=level == "full")
        _publish(hidden, target)
    except BaseException:
        shutil.rmtree(hidden) if hidden.is_dir() else hidden.unlink(missing_ok=True)
        raise
    return Repair(str(target), tuple(mended), tuple(left))


def _fix(root: Node, found: list[Problem], *, full: bool) -> tuple[list[str], list[Problem]]:
    """Mend what can be mended, and look again until nothing more can; return what was done, and what is left."""
    done: list[str] = []
    tried: set[tuple[str, str, str]] = set()
    for _ in range(MOST_ROUNDS):
        todo = [p for p in found if p.rule in FIXES and (p.rule, p.path, p.message) not in tried]
        if not todo:
            break
        for problem in todo:
            tried.add((problem.rule, problem.path, problem.message))
            said = _fix_one(root, problem)
            if said:
                done.append(f"{problem.rule} {problem.path or 'the root'}: {said}")
        found = check_root(Node(root.uri, "", root.stored), full=full)
    return done, found


def _fix_one(root: Node, problem: Problem) -> str:
    """Mend one problem; nothing is said where that cannot be done."""
    try:
        node = Node(root.uri, problem.path, root.stored[problem.path] if problem.path else root.stored)
        with warnings_as("ignore"):
            return FIXES[problem.rule](node, problem, root)
    except (AtlasError, unknown_encoding(), *READ_ERRORS) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        return ""


def _copy(path: Path, hidden: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, hidden)
    else:
        shutil.copyfile(path, hidden)
        hidden.chmod(hidden.stat().st_mode | 0o600)


@contextmanager
def _opened_for_writing(hidden: Path) -> Iterator[Node]:
    if hidden.is_file():
        import h5py

        with h5py.File(hidden, "r+") as file:
            yield Node(str(hidden), "", file)
        return
    import zarr

    from raggedatlas.store.untrusted import guarded_zarr_store

    consolidated = _unconsolidated(hidden)
    store = guarded_zarr_store(zarr.storage.LocalStore(hidden))
    yield Node(str(hidden), "", zarr.open_group(store=store, mode="r+", use_consolidated=False))
    if consolidated:
        with warnings_as("ignore"):
            zarr.consolidate_metadata(zarr.storage.LocalStore(hidden))


def _unconsolidated(folder: Path) -> bool:
    """Remove consolidated metadata, which what is mended would contradict, and say whether there were any."""
    gathered, head = folder / ".zmetadata", folder / "zarr.json"
    found = gathered.exists()
    gathered.unlink(missing_ok=True)
    if head.exists():
        stated = json.loads(head.read_bytes())
        if stated.pop("consolidated_metadata", None) is not None:
            head.write_text(json.dumps(stated, indent=2))
            found = True
    return found


def _publish(hidden: Path, target: Path) -> None:
    with writable(target):
        if hidden.is_file():
            with hidden.open("r+b") as file:
                os.fsync(file.fileno())
        if target.exists():
            raise DuplicateError(f"{target} exists by now; choose another name for the repaired copy.")
        hidden.rename(target)
