"""Checks of fragment indexes, one blob at a time where a step of them does not decode."""

import numpy as np
from numpy.typing import NDArray

from raggedatlas.vectors.blobs import HEADER_BYTES, MAGIC, VERSION, Blobs, Bytes, concat_blobs
from raggedatlas.vectors.fragment_index import decode_fragments
from raggedatlas.vectors.geometry import Fragments
from raggedatlas.vectors.level_reader import EMPTY_INDEX
from raggedatlas.vectors.validation.context import DAMAGE, CheckLocation, ValidationContext


def decode_fragment_indexes(
    checking: ValidationContext, place: CheckLocation, keys: NDArray[np.int64], raw: list[Bytes | None]
) -> list[Fragments | None]:
    """Return the fragments of each chunk; None, which is told, where a blob does not decode."""
    blobs = [EMPTY_INDEX if blob is None or not blob.size else blob for blob in raw]
    try:
        together = decode_fragments(concat_blobs(blobs))
    except DAMAGE:
        return [_decode(checking, place.at(key), blob) for key, blob in zip(keys, blobs, strict=True)]
    return [_chunk_fragments(together, c) for c in range(len(blobs))]


def _chunk_fragments(fragments: Fragments, c: int) -> Fragments:
    """Return the fragments of one chunk; explicit lists keep their place in all rows."""
    a, b = int(fragments.bounds[c]), int(fragments.bounds[c + 1])
    part = slice(a, b)
    return Fragments(
        *(
            np.array([0, b - a]),
            fragments.is_range[part],
            fragments.starts[part],
            fragments.counts[part],
            fragments.rows,
        )
    )


def _decode(checking: ValidationContext, place: CheckLocation, blob: Bytes) -> Fragments | None:
    """Decode one blob; what is wrong with it is told by the rule that it breaks."""
    fault = find_fault(blob)
    if fault is not None:
        checking.report(fault[0], place, fault[1])
        return None
    with checking.guarded("V041", place):
        return decode_fragments(Blobs(blob, np.array([0, blob.size])))
    return None


def find_fault(blob: Bytes) -> tuple[str, str] | None:
    """Return the rule that a blob breaks and what was found; None where it decodes."""
    if blob.size < HEADER_BYTES:
        return "V026", f"it has {blob.size} bytes; its head alone has {HEADER_BYTES}."
    magic, packed, n_all, n_runs = (int(value) for value in np.ascontiguousarray(blob[:HEADER_BYTES]).view("<u4"))
    if (magic, packed) != (MAGIC, VERSION):
        text = f"it begins with {magic:#010x}, version {packed & 0xFFFF}, flags {packed >> 16}"
        return "V026", f"{text}; expected {MAGIC:#010x}, 1, 0."
    if n_runs > n_all:
        return "V027", f"it declares {n_runs} runs among {n_all} fragments."
    if not n_all:
        return None if blob.size == HEADER_BYTES else ("V031", f"without fragments it has {blob.size} bytes.")
    padded = (n_all + 63) // 64 * 8
    n_lists = n_all - n_runs
    at_rows = HEADER_BYTES + padded + 16 * n_runs + 4 * (n_lists + 1)
    if blob.size < at_rows:
        return "V041", f"it has {blob.size} bytes; {n_all} fragments, {n_runs} of them runs, need {at_rows} or more."
    bits = np.unpackbits(blob[HEADER_BYTES : HEADER_BYTES + padded], bitorder="little")
    if bits[n_all:].any():
        return "V028", "bits behind the last fragment are set."
    if int(bits.sum()) != n_runs:
        return "V027", f"{int(bits.sum())} bits are set, and {n_runs} runs declared."
    return _fault_of_lists(blob, at_rows, n_lists)


def _fault_of_lists(blob: Bytes, at_rows: int, n_lists: int) -> tuple[str, str] | None:
    """Check offsets, the number of rows, and signs."""
    offsets = np.ascontiguousarray(blob[at_rows - 4 * (n_lists + 1) : at_rows]).view("<u4").astype(np.int64)
    if offsets[0] != 0 or (np.diff(offsets) < 0).any():
        return "V030", f"its offsets are {offsets[:8].tolist()}."
    if blob.size != at_rows + 8 * int(offsets[-1]):
        return "V041", f"it has {blob.size} bytes; its explicit fragments ask for {at_rows + 8 * int(offsets[-1])}."
    return None


def names_missing_rows(fragments: Fragments, n_rows: int) -> bool:
    """Tell whether a fragment names a row at or beyond `n_rows`, or a negative one."""
    runs = fragments.is_range
    starts, counts = fragments.starts[runs], fragments.counts[runs]
    if ((starts < 0) | (counts < 0) | (starts > n_rows) | (counts > n_rows - starts)).any():
        return True
    listed = _listed(fragments)
    return bool(listed.size) and bool(((listed < 0) | (listed >= n_rows)).any())


def _listed(fragments: Fragments) -> NDArray[np.int64]:
    """Return the rows of all explicit fragments of a chunk."""
    lists = np.flatnonzero(~fragments.is_range)
    if not lists.size:
        return np.zeros(0, np.int64)
    first, last = int(lists[0]), int(lists[-1])
    return fragments.rows[fragments.starts[first] : fragments.starts[last] + fragments.counts[last]]


def covers_once(fragments: Fragments, n_rows: int) -> bool:
    """Tell whether fragments, whose rows are there, hold every row once."""
    steps = np.zeros(n_rows + 1, np.int64)
    runs = fragments.is_range
    np.add.at(steps, fragments.starts[runs], 1)
    np.add.at(steps, fragments.starts[runs] + fragments.counts[runs], -1)
    times = np.cumsum(steps)[:-1]
    np.add.at(times, _listed(fragments), 1)
    return bool((times == 1).all())


def tiles(fragments: Fragments, n_rows: int) -> bool:
    """Tell whether fragments are the rows of a chunk in order."""
    ends = np.cumsum(fragments.counts)
    return bool(fragments.is_range.all() and (fragments.starts == ends - fragments.counts).all()) and n_rows == (
        int(ends[-1]) if len(ends) else 0
    )
