"""The bytes of Neuroglancer's annotations: places, values and ids of all five types, one at a time or in lists."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.content import decode_categories, encode_categories
from raggedatlas.vectors.converters.precomputed import TYPES, stored_type, take_bytes
from raggedatlas.vectors.shapes import Attribute, Attributes, counts_to_offsets, gather_rows

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


PROPERTY = "annotation_property"
"""The key of an attribute's metadata with what its property says beside its name and type."""

NAME = re.compile(r"[a-z][a-zA-Z0-9_]*")
"""Names that properties may have."""


def as_attribute(values: NDArray[Any], said: dict[str, Any], taken: set[str]) -> tuple[str, Attribute]:
    """Return the name and values of a property; what it says beside its name and type is kept as metadata.

    Parameters
    ----------
    values : (N,) structured array
        With a field of its name.
    said : dict
        What the info says of it.
    taken : set of str
        Names that mean something else in the geometry; a property of such a name gets a ``_`` behind it, and its own back on writing.
    """
    name = str(said["id"])
    title = name
    while title in taken or (title != name and title in (values.dtype.names or ())):
        title += "_"
    rest = {key: value for key, value in said.items() if key != "id" or title != name}
    metadata: dict[str, Any] = {PROPERTY: rest} if len(rest) > 1 else {}
    column = values[name].astype(values[name].dtype.newbyteorder("="))
    if said["type"] in COLOURS:
        return title, Attribute(column, ("red", "green", "blue", "alpha")[: COLOURS[said["type"]]], metadata=metadata)
    labels, codes = said.get("enum_labels"), said.get("enum_values")
    if not labels or not codes or len(labels) != len(codes) or not np.isin(column, codes).all():
        return title, Attribute(column, metadata=metadata)
    order = np.argsort(codes, kind="stable")
    found = order[np.searchsorted(np.array(codes)[order], column)]
    metadata |= {
        "encoding": "dictionary",
        "categories": [str(label) for label in labels],
        "ordered": False,
        "_FillValue": -1,
    }
    return title, Attribute(found.astype(np.int32), metadata=metadata)


def written(attributes: Attributes) -> Iterator[tuple[str, Attribute]]:
    """Yield the attributes that the format holds; texts as codes."""
    for name, attribute in attributes.items():
        made = attribute
        if attribute.values.dtype.kind not in "iuf":
            made = encode_categories(attribute.values.astype(object))
        colour = made.values.dtype == np.uint8 and made.n_channels in COLOURS.values()
        if NAME.fullmatch(name) and (colour if made.values.ndim == 2 else stored_type(made)):
            yield name, made


def as_property(name: str, attribute: Attribute) -> tuple[dict[str, Any], NDArray[Any]]:
    """Return what the info says of one of the `written` attributes, and its values."""
    before = dict(attribute.metadata.get(PROPERTY, {}))
    name = str(before.pop("id", name))
    if attribute.values.ndim == 2:
        return {**before, "id": name, "type": "rgb" if attribute.n_channels == 3 else "rgba"}, attribute.values
    kind = str(before.get("type"))
    if "categories" not in attribute.metadata:
        stored = str(stored_type(attribute))
        rest = {key: value for key, value in before.items() if stored == kind or not key.startswith("enum_")}
        return {**rest, "id": name, "type": stored}, attribute.values.astype(stored)
    labels = [str(label) for label in attribute.metadata["categories"]]
    missing = [""] if any(value is None for value in decode_categories(attribute)) else []
    codes = before.get("enum_values", ())
    if not missing and kind in TYPES and before.get("enum_labels") == labels and len(codes) == len(labels):
        return {**before, "id": name}, np.array(codes)[attribute.values].astype(kind)
    rest = {key: value for key, value in before.items() if not key.startswith("enum_")}
    values = np.where(attribute.values < 0, len(labels), attribute.values).astype(np.int32)
    every = {"enum_values": [*range(len(labels) + len(missing))], "enum_labels": labels + missing}
    return {**rest, "id": name, "type": "int32", **every}, values


PER_CELL = 5_000
"""About how many annotations a cell of the spatial index holds."""

MOST_SPREAD, MOST_BITS = 8, 48
"""Cells become no finer where an annotation lies in so many of them, or their numbers have so many bits."""

Boxes = tuple[NDArray[np.float64], NDArray[np.float64]]


def write_cells(
    path: Path, annotations: tuple[NDArray[np.uint64], list[bytes]], boxes: Boxes, bounds: Boxes
) -> list[dict[str, Any]]:
    """Write the spatial index; each annotation stands on one level, in all cells that its box touches.

    Parameters
    ----------
    path : Path
        The folder of the annotations; a folder for each level is made in it.
    annotations : ((N,) uint64, list of N bytes)
        Ids and records.
    boxes : ((N, D) float64, (N, D) float64)
        Least and greatest coordinates of each.
    bounds : ((D,) float64, (D,) float64)
        Of all of them; the grid fills them.

    Returns
    -------
    list of dict
        What the info says of each level.
    """
    ids, records = annotations
    low, high = bounds
    left = np.random.default_rng(0).permutation(len(ids))
    shape = np.ones(len(low), np.int64)
    levels: list[dict[str, Any]] = []
    while len(left) or not levels:
        size = (high - low) / shape
        first, last = (np.clip(((corner[left] - low) / size).astype(np.int64), 0, shape - 1) for corner in boxes)
        taken = left[: _how_many(first, last, shape)]
        key = f"spatial{len(levels)}"
        (path / key).mkdir()
        codes, rows = _touched(first[: len(taken)], last[: len(taken)], shape)
        cells, starts = np.unique(codes, return_index=True)
        limit = 1
        for cell, members in zip(cells, np.split(taken[rows], starts[1:]), strict=False):
            name = "_".join(map(str, np.unravel_index(cell, tuple(shape))))
            (path / key / name).write_bytes(pack_list(ids, records, members))
            limit = max(limit, len(members))
        levels.append({"key": key, "grid_shape": shape.tolist(), "chunk_size": size.tolist(), "limit": limit})
        left = left[len(taken) :]
        shape = np.where(size >= size.max() / 2, shape * 2, shape)
    return levels


def _how_many(first: NDArray[np.int64], last: NDArray[np.int64], shape: NDArray[np.int64]) -> int:
    """Return how many of the annotations that are left stand on a level: all, where finer cells would not help."""
    if not len(first):
        return 0
    codes = np.ravel_multi_index(tuple(first.T), tuple(shape))
    most = int(np.unique(codes, return_counts=True)[1].max())
    spreads = float(np.prod(last - first + 1, axis=1).mean())
    if most <= PER_CELL or spreads > MOST_SPREAD or np.log2(shape).sum() >= MOST_BITS:
        return len(first)
    return int(len(first) * PER_CELL / most)


def _touched(
    first: NDArray[np.int64], last: NDArray[np.int64], shape: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return codes of the cells that boxes of cells touch, ascending, and the row of the box at each."""
    spans = last - first + 1
    counts = np.prod(spans, axis=1).astype(np.int64)
    rows = np.repeat(np.arange(len(first)), counts)
    within = np.arange(len(rows)) - np.repeat(counts_to_offsets(counts)[:-1], counts)
    cells = np.empty((len(rows), len(shape)), np.int64)
    for axis in range(len(shape) - 1, -1, -1):
        cells[:, axis] = first[rows, axis] + within % spans[rows, axis]
        within //= spans[rows, axis]
    codes = np.asarray(np.ravel_multi_index(tuple(cells.T), tuple(shape)), np.int64)
    order = np.argsort(codes, kind="stable")
    return codes[order], rows[order]
