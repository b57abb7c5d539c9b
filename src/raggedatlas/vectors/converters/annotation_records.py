"""The bytes of Neuroglancer's annotations: places, values and ids of all five types, one at a time or in lists."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.precomputed import TYPES, take_bytes
from raggedatlas.vectors.selection import counts_to_offsets, gather_rows

VECTORS = {"POINT": 1, "LINE": 2, "AXIS_ALIGNED_BOUNDING_BOX": 2, "ELLIPSOID": 2, "POLYLINE": None}
"""Annotation type -> how many vectors each of its annotations has; None: as many as it says, two or more."""

COLOURS = {"rgb": 3, "rgba": 4}
"""Types of colours -> their bytes."""


@dataclass(frozen=True)
class Form:
    """How the annotations of a folder stand in bytes.

    Parameters
    ----------
    kind : str
        A key of `VECTORS`.
    rank : int
        How many axes there are.
    values : numpy.dtype
        Values by falling width, filled up to four bytes; a field for each property, by its name.
    """

    kind: str
    rank: int
    values: np.dtype[Any]

    @property
    def least(self) -> int:
        """How many bytes an annotation has at least; all have as many but polylines."""
        return 4 * self.rank * (VECTORS[self.kind] or 0) + 4 * (VECTORS[self.kind] is None) + self.values.itemsize


@dataclass(frozen=True)
class Annotations:
    """Annotations in memory.

    Parameters
    ----------
    ids : (N,) uint64
        Their ids.
    offsets : (N + 1,) int64
        Vectors of annotation ``i``.
    vectors : (V, D) float32
        Positions; for ellipsoids the centre and the radii.
    values : (N,) structured array
        Of the type `Form.values`.
    related : tuple of ((N + 1,) int64, (R,) uint64)
        For each relationship, the ids that each annotation names, in their order.
    """

    ids: NDArray[np.uint64]
    offsets: NDArray[np.int64]
    vectors: NDArray[np.float32]
    values: NDArray[Any]
    related: tuple[tuple[NDArray[np.int64], NDArray[np.uint64]], ...] = ()

    def take(self, rows: NDArray[np.int64]) -> "Annotations":
        """Return some of them, in the given order."""
        related = tuple(
            (counts_to_offsets(np.diff(ends)[rows]), flat[gather_rows(ends, rows)]) for ends, flat in self.related
        )
        vectors = self.vectors[gather_rows(self.offsets, rows)]
        return Annotations(
            self.ids[rows], counts_to_offsets(np.diff(self.offsets)[rows]), vectors, self.values[rows], related
        )


def form_of(kind: str, rank: int, properties: Iterable[dict[str, Any]], where: str) -> Form:
    """Return how annotations stand in bytes, by what the info says of them.

    Raises
    ------
    SourceError
        For a property of another type, or two of one name.

    Examples
    --------
    >>> form = form_of("POINT", 3, [{"id": "a", "type": "uint8"}, {"id": "b", "type": "float32"}], "info")
    >>> form.least, [form.values.fields[name][1] for name in "ab"]
    (20, [4, 0])
    """
    widths: dict[int, list[Any]] = {4: [], 2: [], 1: []}
    for said in properties:
        name, stored = str(said.get("id")), str(said.get("type"))
        if stored in COLOURS:
            widths[1].append((name, "u1", (COLOURS[stored],)))
        elif stored in TYPES:
            made = np.dtype(stored).newbyteorder("<")
            widths[made.itemsize].append((name, made))
        else:
            raise SourceError(f"{where} says the property {said}; expected a type of {', '.join((*TYPES, *COLOURS))}.")
    fields = widths[4] + widths[2] + widths[1]
    names = [name for name, *_ in fields]
    twice = next((name for name in names if names.count(name) > 1 or not name), None)
    if twice is not None:
        raise SourceError(f"{where} says two properties {twice!r}; expected a name of its own for each.")
    size = np.dtype(fields).itemsize
    return Form(kind, rank, np.dtype([*fields, ("\0", "u1", (-size % 4,))]))


def joined(parts: list[Annotations], form: Form, n_related: int = 0) -> Annotations:
    """Put annotations one after the other; each has `n_related` relationships."""
    none = np.zeros(0, np.uint64)
    counts = [np.zeros(0, np.int64), *(np.diff(part.offsets) for part in parts)]
    related = tuple(
        (
            counts_to_offsets(
                np.concatenate([np.zeros(0, np.int64), *(np.diff(part.related[k][0]) for part in parts)])
            ),
            np.concatenate([none, *(part.related[k][1] for part in parts)]),
        )
        for k in range(n_related)
    )
    return Annotations(
        np.concatenate([none, *(part.ids for part in parts)]),
        counts_to_offsets(np.concatenate(counts)),
        np.concatenate([np.zeros((0, form.rank), np.float32), *(part.vectors for part in parts)]),
        np.concatenate([np.zeros(0, form.values), *(part.values for part in parts)]),
        related,
    )


def records_of(annotations: Annotations, form: Form) -> list[bytes]:
    """Return the bytes of each annotation, without what it is related to.

    Examples
    --------
    >>> form = form_of("POLYLINE", 2, [], "info")
    >>> two = Annotations(np.array([5]), np.array([0, 2]), np.ones((2, 2), np.float32), np.zeros(1, form.values))
    >>> records_of(two, form)[0].hex()
    '020000000000803f0000803f0000803f0000803f'
    """
    counts = np.diff(annotations.offsets)
    n, lead = len(counts), int(VECTORS[form.kind] is None)
    words = form.values.itemsize // 4
    starts = counts_to_offsets(lead + form.rank * counts + words)
    flat = np.zeros(starts[-1], "<u4")
    if lead:
        flat[starts[:-1]] = counts
    inside = np.arange(form.rank * len(annotations.vectors)) - np.repeat(
        form.rank * annotations.offsets[:-1], form.rank * counts
    )
    flat[np.repeat(starts[:-1] + lead, form.rank * counts) + inside] = (
        annotations.vectors.astype("<f4").view("<u4").ravel()
    )
    values = np.frombuffer(annotations.values.tobytes(), "<u4").reshape(n, words)
    flat[(starts[1:, None] - words + np.arange(words)).astype(np.int64)] = values
    data, ends = flat.tobytes(), (4 * starts).tolist()
    return [data[a:b] for a, b in pairwise(ends)]


def pack_list(ids: NDArray[np.uint64], records: list[bytes], rows: NDArray[np.int64]) -> bytes:
    """Return a list of annotations as bytes: how many, their records, their ids."""
    body = b"".join([records[row] for row in rows.tolist()])
    return np.uint64(len(rows)).tobytes() + body + ids[rows].astype("<u8").tobytes()


def unpack_list(data: bytes, form: Form, where: str) -> Annotations:
    """Read a list of annotations.

    Raises
    ------
    SourceError
        If it is cut off or longer than it says.
    """
    (count,), at = take_bytes(data, 0, 1, "<u8", where)
    if int(count) * (form.least + 8) + 8 > len(data):
        raise SourceError(
            f"{where} has {len(data)} bytes; expected {int(count) * (form.least + 8) + 8} or more. It is cut off."
        )
    found, at = _unpack(data, int(count), at, form, where)
    if at + 8 * int(count) != len(data):
        raise SourceError(f"{where} has {len(data)} bytes; expected {at + 8 * int(count)}. It is cut off, or too long.")
    offsets, vectors, values = found
    return Annotations(np.frombuffer(data, "<u8", int(count), at).astype(np.uint64), offsets, vectors, values)


def unpack_one(key: int, data: bytes, form: Form, n_related: int, where: str) -> Annotations:
    """Read one annotation and what it is related to.

    Raises
    ------
    SourceError
        If it is cut off or longer than it says.
    """
    if len(data) < form.least:
        raise SourceError(f"{where} has {len(data)} bytes; expected {form.least} or more. It is cut off.")
    (offsets, vectors, values), at = _unpack(data, 1, 0, form, where)
    related = []
    for _ in range(n_related):
        (count,), at = take_bytes(data, at, 1, "<u4", where)
        named, at = take_bytes(data, at, int(count), "<u8", where)
        related.append((np.array([0, len(named)]), named.astype(np.uint64)))
    if at != len(data):
        raise SourceError(f"{where} has {len(data)} bytes; expected {at} by its info.")
    return Annotations(np.array([key], np.uint64), offsets, vectors, values, tuple(related))


def _unpack(
    data: bytes, count: int, at: int, form: Form, where: str
) -> tuple[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[Any]], int]:
    """Return offsets, vectors and values of records that stand one after the other, and the place behind them."""
    fixed = VECTORS[form.kind]
    if fixed is not None:
        whole = np.dtype([("vectors", "<f4", (fixed * form.rank,)), ("values", form.values)])
        rows = np.frombuffer(data, whole, count, at)
        vectors = rows["vectors"].reshape(-1, form.rank).astype(np.float32)
        return (np.arange(count + 1) * fixed, vectors, rows["values"]), at + count * whole.itemsize
    counts, places, values = [], [np.zeros(0, np.float32)], np.zeros(count, form.values)
    for row in range(count):
        (n,), at = take_bytes(data, at, 1, "<u4", where)
        if n < 2:
            raise SourceError(f"{where} has a polyline of {n} points; expected two or more.")
        flat, at = take_bytes(data, at, int(n) * form.rank, "<f4", where)
        stored, at = take_bytes(data, at, form.values.itemsize, "u1", where)
        values[row : row + 1] = stored.view(form.values) if form.values.itemsize else values[row : row + 1]
        counts.append(int(n))
        places.append(flat)
    return (
        counts_to_offsets(np.array(counts, np.int64)),
        np.concatenate(places).reshape(-1, form.rank).astype(np.float32),
        values,
    ), at
