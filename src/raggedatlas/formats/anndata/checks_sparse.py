"""Checks of sparse matrices (A50 to A61): their parts, and every entry in one pass of bounded memory."""

from collections.abc import Iterator
from ctypes import byref

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, LimitError
from raggedatlas.formats.anndata.checking import Checker, decode, encoding_of, sparse_shape
from raggedatlas.formats.anndata.checks_arrays import NUMBERS
from raggedatlas.formats.anndata.file_tree import Node
from raggedatlas.model.batch import sparse_dtype
from raggedatlas.store.native import csr_of, library

PARTS = ("indptr", "indices", "data")

MOST_SEEN = 1 << 28
"""Longest minor axis whose places are all remembered to find entries that are there twice (eight bytes each)."""

POINTERS = 1 << 20
"""Pointers that are held at once."""


def check_sparse(checking: Checker, node: Node) -> None:
    """Check a group of encoding csr_matrix or csc_matrix."""
    parts = [node.child(name) for name in PARTS]
    whole = True
    for name, part in zip(PARTS, parts, strict=True):
        if part is None or not part.is_array or len(part.shape or ()) != 1:
            said = "is missing" if part is None or part.stored is None else f"has shape {part.shape}"
            checking.report("A51", node, f"{name} {said}.")
            whole = False
        elif part.fault:
            checking.unreadable(part, part.fault)
    shape = sparse_shape(node)
    if shape is None:
        stated = node.attrs.get("shape", node.attrs.get("h5sparse_shape"))
        checking.report("A54", node, f"its shape is {_said(stated)}, where two integers belong.")
    if not whole or shape is None:
        return
    by_rows = encoding_of(node) == "csr_matrix"
    indptr, indices, data = (part for part in parts if part is not None)
    if data.kind not in NUMBERS:
        checking.report("A51", node, f"data are of type {data.dtype}, where numbers or booleans belong.")
    elif sparse_dtype(data.dtype) != data.dtype:
        checking.report("A61", data, f"data are of type {data.dtype.str}, of which SciPy makes no sparse matrix.")
    if _check_types(checking, indptr, indices) and _check_lengths(checking, node, shape[0 if by_rows else 1]):
        if checking.full and not (indptr.fault or indices.fault):
            _check_entries(checking, node, shape[1 if by_rows else 0], by_rows=by_rows)
        checking.guarded(data, decode)


def _said(value: object) -> str:
    return "missing" if value is None else str(value)


def _check_types(checking: Checker, indptr: Node, indices: Node) -> bool:
    """Tell whether the pointers and indices are integers."""
    for part in (indptr, indices):
        if part.kind != "integer":
            checking.report("A60", part, f"{part.name} are of type {part.dtype}, where integers belong.")
    if indptr.kind == "integer" and indptr.dtype.kind == "u":
        # scipy refuses pointers of unsigned type outright.
        checking.report("A60", indptr, f"indptr is of type {indptr.dtype}, where a signed one belongs.", "practice")
    if indices.kind == "integer" and indices.dtype.kind == "u":
        checking.report("A60", indices, f"indices are of type {indices.dtype}, where a signed one belongs.", "practice")
    return indptr.kind == indices.kind == "integer"


def _check_lengths(checking: Checker, node: Node, n_major: int) -> bool:
    """Compare the lengths of the parts and the last pointer."""
    n_pointers, n_indices, n_data = (_length(node.children[name]) for name in PARTS)
    if n_pointers != n_major + 1:
        checking.report("A55", node, f"there are {n_pointers:,} pointers, where {n_major + 1:,} belong.")
        return False
    indptr = node.children["indptr"]
    last = -1 if indptr.fault else int(indptr.part(n_pointers - 1, n_pointers)[0])
    if n_indices != n_data or (not indptr.fault and last != n_indices):
        checking.report(
            "A57", node, f"the last pointer is {last:,}, but there are {n_indices:,} indices and {n_data:,} values."
        )
    return True


def _length(node: Node) -> int:
    return node.shape[0] if node.shape else 0


def _check_entries(checking: Checker, node: Node, n_minor: int, *, by_rows: bool) -> None:
    if n_minor > 2**48:
        raise LimitError(f"{node.uri}: {node.path} declares an axis of {n_minor:,}, more than can be checked.")
    seen = np.zeros(n_minor if n_minor <= MOST_SEEN else 0, np.int64)
    found = np.array([0, 0, 0, -1, -1, -1, -1], np.int64)
    for first, bounds, indices in _entry_blocks(checking, node):
        if not first.continues:
            found[6] = -1
        wide = indices if indices.dtype in (np.int32, np.int64) else indices.astype(np.int64)
        given = csr_of(bounds, np.ascontiguousarray(wide))
        if library().ra_scan_entries(byref(given), first.row, seen if seen.size else None, n_minor, found):
            raise CorruptError(f"{node.uri}: {node.path}/indptr changed while it was read; let nothing write the file.")
    outside, twice, fallen, *rows, _ = (int(n) for n in found)
    line, across = ("row", "column") if by_rows else ("column", "row")
    if outside:
        checking.report(
            "A58", node, f"{outside:,} indices lie outside its {n_minor:,} {across}s, the first in {line} {rows[0]:,}."
        )
    if twice:
        checking.report("A59", node, f"{twice:,} entries are there twice or more, the first in {line} {rows[1]:,}.")
    if fallen:
        checking.report(
            "A59", node, f"indices do not ascend in {fallen:,} places, the first in {line} {rows[2]:,}; readers cope."
        )


class _Start:
    """Where a block of entries starts: its first row, and whether that row began in the block before."""

    __slots__ = ("continues", "row")

    def __init__(self, row: int, *, continues: bool) -> None:
        self.row, self.continues = row, continues


def _entry_blocks(checking: Checker, node: Node) -> Iterator[tuple[_Start, NDArray[np.int64], NDArray[np.integer]]]:
    """Yield the entries in order, a block at a time, with where rows begin in each; stop where the pointers are wrong."""
    indices = node.children["indices"]
    step, n_entries = indices.step(), _length(indices)
    held, held_at = np.empty(0, np.int64), 0
    for row, pointers in _pointer_blocks(checking, node, n_entries):
        at, end = int(pointers[0]), int(pointers[-1])
        while at < end:
            if not held_at <= at < held_at + len(held):
                held_at = at - at % step
                held = indices.part(held_at, min(held_at + step, n_entries))
            stop = min(end, held_at + len(held))
            low = int(np.searchsorted(pointers, at, side="right")) - 1
            high = int(np.searchsorted(pointers, stop, side="left"))
            bounds = np.clip(pointers[low : high + 1], at, stop) - at
            yield _Start(row + low, continues=int(pointers[low]) < at), bounds, held[at - held_at : stop - held_at]
            at = stop


def _pointer_blocks(checking: Checker, node: Node, n_entries: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield blocks of pointers, each beginning with the last of the one before, until one is wrong."""
    indptr = node.children["indptr"]
    n = _length(indptr)
    unit = indptr.chunks[0] if indptr.chunks else 1
    step = max(unit, POINTERS - POINTERS % unit)
    before = 0
    for start in range(0, n, step):
        read = indptr.part(start, min(start + step, n)).astype(np.int64)
        pointers = read if start == 0 else np.concatenate([[before], read])
        if start == 0 and pointers[0] != 0:
            checking.report("A56", node, f"the first pointer is {int(pointers[0]):,} instead of 0.")
            return
        falls = np.flatnonzero(pointers[1:] < pointers[:-1])
        if len(falls):
            line = max(0, start - 1) + int(falls[0])
            checking.report("A56", node, f"pointers go down from place {line:,} to the next.")
            return
        before = int(pointers[-1])
        if before > n_entries:
            return
        yield max(0, start - 1), pointers
