"""What a stored TileDB array says of itself: axes, attributes, tiles, filters, cells and bytes, without its values."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from raggedatlas.formats.cxg.engine import answering, context, open_array, open_tiledb, uri_of

MOST_BOXES = 1 << 26
"""Boxes into which fragments cut an array, beyond which only their outer bounds are looked at."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension.

    Parameters
    ----------
    name : str
        ``""`` is possible.
    dtype : numpy.dtype
        Of its coordinates.
    low, high : any
        Inclusive bounds; None unless it is of numbers.
    tile : any
        Extent of a tile; None unless it is of numbers.
    filters : str
        In the order of writing.
    """

    name: str
    dtype: np.dtype[Any]
    low: Any
    high: Any
    tile: Any
    filters: str

    @property
    def size(self) -> int:
        """How many coordinates it has; 0 for text, times and fractions, which are not counted."""
        return int(self.high) - int(self.low) + 1 if self.dtype.kind in "iu" else 0


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute.

    Parameters
    ----------
    name : str
        ``""`` for the anonymous one.
    dtype : numpy.dtype
        Of one value.
    variable : bool
        Whether values are of any length, as text is.
    nullable : bool
        Whether a value may be missing.
    filters : str
        In the order of writing.
    """

    name: str
    dtype: np.dtype[Any]
    variable: bool
    nullable: bool
    filters: str

    @property
    def is_text(self) -> bool:
        """Whether it holds text."""
        return self.dtype.kind in "US"

    @property
    def is_number(self) -> bool:
        """Whether it holds one real number per cell."""
        return self.dtype.kind in "fiu" and not self.variable


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array.

    Parameters
    ----------
    sparse : bool
        Whether cells that were not written are absent.
    axes : tuple of Axis
        Its dimensions.
    attributes : tuple of Attribute
        What each cell holds.
    capacity : int
        Cells per tile of a sparse array.
    duplicates : bool
        Whether a place may be written twice.
    written : tuple of tuple of int, optional
        First and last written coordinate of each axis; None where nothing is.
    is_whole : bool
        Whether every cell of a dense array is written.
    metadata : dict of str to any
        Its metadata.
    """

    sparse: bool
    axes: tuple[Axis, ...]
    attributes: tuple[Attribute, ...]
    capacity: int
    duplicates: bool
    written: tuple[tuple[Any, Any], ...] | None
    is_whole: bool
    metadata: dict[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its axes."""
        return tuple(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its attributes, in order."""
        return tuple(attribute.name for attribute in self.attributes)

    @property
    def tile(self) -> tuple[int, ...]:
        """Extents of a tile."""
        return tuple(int(axis.tile or 0) if axis.dtype.kind in "iu" else 0 for axis in self.axes)

    @property
    def is_readable(self) -> bool:
        """Whether it is dense, begins at 0, and has no place that was not written."""
        return not self.sparse and self.is_whole and all(axis.low == 0 for axis in self.axes)

    @property
    def tile_bytes(self) -> int:
        """Decoded size of the largest attribute of a tile, text not counted."""
        cells = self.capacity if self.sparse else prod(self.tile)
        return cells * max((a.dtype.itemsize for a in self.attributes if not a.variable), default=0)

    def attribute(self, name: str) -> Attribute | None:
        """Find an attribute."""
        return next((one for one in self.attributes if one.name == name), None)


def look_at(path: Path) -> StoredArray:
    """Read what an array says of itself.

    Raises
    ------
    SourceError
        If it cannot be opened (C00).
    """
    with open_array(path) as array:
        schema = array.schema
        domain = schema.domain
        axes = tuple(_axis(domain.dim(i)) for i in range(domain.ndim))
        attributes = tuple(_attribute(schema.attr(i)) for i in range(schema.nattr))
        written = array.nonempty_domain()
        metadata = dict(array.meta.items())
        whole = not schema.sparse and is_whole(path, schema)
    spans = None if written is None else tuple((_plain(a), _plain(b)) for a, b in written)
    duplicates = bool(schema.sparse and schema.allows_duplicates)
    return StoredArray(bool(schema.sparse), axes, attributes, int(schema.capacity), duplicates, spans, whole, metadata)


def is_whole(path: Path, schema: Any) -> bool:  # noqa: ANN401  (a tiledb.ArraySchema)
    """Say whether the fragments of a dense array cover it: TileDB reads fill values where a fragment is missing.

    Parameters
    ----------
    path : Path
        Of the array.
    schema : tiledb.ArraySchema
        Its schema.

    Raises
    ------
    SourceError
        If the fragments cannot be opened (C00).
    """
    with answering(path):
        boxes = open_tiledb().array_fragments(uri_of(path), ctx=context()).nonempty_domain
    axes = [schema.domain.dim(i) for i in range(schema.domain.ndim)]
    if any(np.dtype(axis.dtype).kind not in "iu" for axis in axes):  # of times, which no array of the format has
        return bool(boxes)
    ends = [axis.domain for axis in axes]
    # The edges of all fragments cut the array into boxes, each of which is written as a whole or not at all.
    cuts = []
    for axis, (low, high) in enumerate(ends):
        edges = {
            int(low),
            int(high) + 1,
            *(int(box[axis][0]) for box in boxes),
            *(int(box[axis][1]) + 1 for box in boxes),
        }
        cuts.append(np.array(sorted(edges)))
    shape = [len(edges) - 1 for edges in cuts]
    if prod(shape) > MOST_BOXES:
        return all((int(low), int(high)) == _span(boxes, axis) for axis, (low, high) in enumerate(ends))
    covered = np.zeros(shape, bool)
    for box in boxes:
        covered[
            tuple(
                slice(*np.searchsorted(edges, (int(low), int(high) + 1)))
                for edges, (low, high) in zip(cuts, box, strict=True)
            )
        ] = True
    return bool(covered.all())


def _span(boxes: Any, axis: int) -> tuple[int, int]:  # noqa: ANN401  (bounds of axes of fragments)
    return min(int(box[axis][0]) for box in boxes), max(int(box[axis][1]) for box in boxes)


def written_cells(path: Path) -> int:
    """Count the written cells of an array, by what its fragments say.

    Raises
    ------
    SourceError
        If it cannot be opened (C00).
    """
    with answering(path):
        return int(sum(open_tiledb().array_fragments(uri_of(path), ctx=context()).cell_num))


def stored_bytes(path: Path) -> int:
    """Sum the sizes of all files below a folder."""
    return sum(at.stat().st_size for at in path.rglob("*") if at.is_file())


def filters_text(filters: Any) -> str:  # noqa: ANN401  (a tiledb.FilterList)
    """Name filters in the order of writing."""
    return " + ".join(_filter_text(filters[i]) for i in range(len(filters)))


def _filter_text(one: Any) -> str:  # noqa: ANN401
    name = type(one).__name__.removesuffix("Filter").lower()
    level = getattr(one, "level", None)
    return name if level is None else f"{name} {level}"


def _axis(dim: Any) -> Axis:  # noqa: ANN401
    dtype = np.dtype(dim.dtype)
    low, high, tile = (*dim.domain, dim.tile) if dtype.kind in "iuf" else (None, None, None)
    return Axis(dim.name, dtype, _plain(low), _plain(high), _plain(tile), filters_text(dim.filters))


def _attribute(attr: Any) -> Attribute:  # noqa: ANN401
    return Attribute(
        attr.name, np.dtype(attr.dtype), bool(attr.isvar), bool(attr.isnullable), filters_text(attr.filters)
    )


def _plain(value: Any) -> Any:  # noqa: ANN401
    return value.item() if isinstance(value, np.generic) else value
