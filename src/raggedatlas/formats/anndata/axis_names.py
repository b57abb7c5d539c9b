"""Names of cells and features in a stored frame: compared by hashes, so that eight bytes a name are held and no text."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.formats.anndata.checking import Checker, index_node
from raggedatlas.formats.anndata.file_tree import Node

Hashes = NDArray[np.uint64]


def names_node(frame: Node) -> Node | None:
    """Return the array that holds the names of a frame's rows; None if there is none that can be read."""
    index = index_node(frame)
    if index is not None and not index.is_array:
        index = index.child("values")
    readable = index is not None and index.is_array and not index.fault and len(index.shape or ()) == 1
    return index if readable else None


def name_hashes(frame: Node) -> Hashes | None:
    """Read the names of a frame's rows as hashes, (n,) uint64; None if there are none.

    Raises
    ------
    SourceError
        If they cannot be read.
    """
    index = names_node(frame)
    return None if index is None else joined([hash_names(values) for _, values in index.blocks()])


def hash_names(values: NDArray[Any]) -> Hashes:
    """Hash names, (n,) uint64; text and its UTF-8 bytes have one hash."""
    import pandas as pd

    flat = values.astype(object) if values.dtype.kind in "SUT" else values
    found: Hashes = pd.util.hash_array(flat, categorize=False)
    return found


def joined(parts: list[Hashes]) -> Hashes:
    """Put the hashes of blocks together."""
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def check_unique_names(checking: Checker, frame: Node) -> Hashes | None:
    """Say if a name of a frame's rows is there twice (A29), and return the hashes of all."""
    index = names_node(frame)
    if index is None:
        return None
    parts = checking.read_names.pop(index.path, [])
    hashes = joined(parts)
    if len(hashes) != (index.shape or (0,))[0]:
        hashes = joined([hash_names(values) for _, values in index.blocks()])
    ordered = np.sort(hashes)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        _report_twice(checking, index, hashes, twice)
    return hashes


def _report_twice(checking: Checker, index: Node, hashes: Hashes, twice: Hashes) -> None:
    """Let the names themselves decide: equal hashes may be of different names."""
    known: set[object] = set()
    for start, values in index.blocks():
        for at in np.flatnonzero(np.isin(hashes[start : start + len(values)], twice)):
            name = values[at]
            if name in known:
                said = name.decode("utf-8", errors="replace") if isinstance(name, bytes) else str(name)
                checking.report("A29", index, f"the name {said!r} is there more than once.")
                return
            known.add(name)
