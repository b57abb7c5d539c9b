"""Shapes in memory: flat arrays in object order, with attributes and groups."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from raggedatlas.errors import RowTypeError, SourceError

KINDS = ("point_cloud", "line", "polyline", "streamline", "graph", "skeleton", "mesh")
"""The geometry types."""

SEQUENTIAL = ("line", "polyline", "streamline")
"""Kinds whose links are not stored: within an object, vertex ``i`` is linked to vertex ``i + 1``."""

POSITION_TYPES = (
    *("float16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
"""Dtypes of positions."""

Strings = tuple[str, ...]


@dataclass(frozen=True)
class Attribute:
    """A column of values for vertices, fragments, links, objects or groups.

    `metadata` has additional keys of the array's attributes, preserved unchanged: ``channel_dtype``, and for
    dictionary-encoded values ``encoding="dictionary"``, ``categories``, ``ordered``, ``_FillValue``.
    """

    # (rows,) or (rows, C): numbers, booleans as uint8; for objects and groups also strings (a NumPy string array)
    values: NDArray[Any]
    channels: Strings = ()  # names of the C channels, or empty
    # (rows,): rows that have a value (objects dropped from a coarse level have none); None: all
    present: NDArray[np.bool_] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Convert the values to an array; refuse more than two axes or the wrong number of channel names."""
        values = np.asarray(self.values)
        if values.dtype == bool:
            values = values.view(np.uint8)
        object.__setattr__(self, "values", values)
        if values.ndim not in (1, 2):
            raise SourceError(f"An attribute has shape {values.shape}; expected (rows,) or (rows, channels).")
        if self.channels and len(self.channels) != self.n_channels:
            raise SourceError(f"An attribute of {self.n_channels} channels has {len(self.channels)} channel names.")

    @property
    def n_channels(self) -> int:
        """Number of values per row (1 for a scalar attribute)."""
        return 1 if self.values.ndim == 1 else int(self.values.shape[1])

    def take(self, rows: NDArray[np.integer[Any]] | slice) -> "Attribute":
        """Return the attribute of some rows: (n,) integers in any order, possibly repeated, or a slice.

        Masks are not accepted: anything but integers is a `RowTypeError`.

        Examples
        --------
        >>> Attribute(np.array([5, 6, 7])).take(np.array([2, 0])).values.tolist()
        [7, 5]
        """
        # A mask would be taken for the rows 0 and 1.
        if not isinstance(rows, slice) and (kind := np.asarray(rows).dtype).kind not in "iu":
            raise RowTypeError(
                f"Rows of an attribute are selected by {kind} values; expected row numbers or a slice. "
                "np.flatnonzero(mask) gives the row numbers of a mask."
            )
        present = None if self.present is None else self.present[rows]
        values = self.values[rows] if isinstance(rows, slice) else np.take(self.values, rows, axis=0)
        return replace(self, values=values, present=present)


Attributes = Mapping[str, Attribute]


def as_attributes(values: Mapping[str, Any]) -> dict[str, Attribute]:
    """Return a mapping of `Attribute`; plain arrays are converted."""
    return {name: one if isinstance(one, Attribute) else Attribute(np.asarray(one)) for name, one in values.items()}


def concat_attributes(parts: Sequence[Attributes], counts: Sequence[int]) -> dict[str, Attribute]:
    """Concatenate the rows of attributes; if a part lacks one, its rows are absent.

    `counts` are the numbers of rows of the parts. Codes are translated if the parts have different categories; the
    other metadata is that of the first part with the attribute. Raises `SourceError` if an attribute has categories in
    some parts and plain values in others.
    """
    result: dict[str, Attribute] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        coded = iter(_with_same_categories(name, [part[name] for part in parts if name in part]))
        own = [next(coded) if name in part else None for part in parts]
        first = next(one for one in own if one is not None)
        dtype = np.result_type(*(one.values.dtype for one in own if one is not None))
        nothing = Attribute(np.full((1, *first.values.shape[1:]), fill_value(dtype), dtype), present=np.zeros(1, bool))
        filled = [
            nothing.take(np.zeros(n, np.int64)) if one is None else one for one, n in zip(own, counts, strict=True)
        ]
        there = [np.ones(len(one.values), bool) if one.present is None else one.present for one in filled]
        present = np.concatenate(there)
        values = np.concatenate([one.values for one in filled])
        result[name] = replace(first, values=values, present=None if present.all() else present)
    return result


def _with_same_categories(name: str, parts: list[Attribute]) -> list[Attribute]:
    """Return the parts of an attribute with codes of the union of their categories, in order of appearance."""
    if all(part.metadata.get("categories") == parts[0].metadata.get("categories") for part in parts):
        return parts
    try:
        place = {label: i for i, label in enumerate(dict.fromkeys(c for p in parts for c in p.metadata["categories"]))}
    except (KeyError, TypeError):
        raise SourceError(
            f"The attribute {name!r} has categories in some parts but none, or no list of texts, in others; expected a list in "
            "each. Leave the attribute out, or store its values with categories everywhere."
        ) from None
    # Parts may order the same categories differently, so the union has no order.
    metadata = {**parts[0].metadata, "categories": list(place), "ordered": False, "_FillValue": -1}
    coded = [
        translate_codes(part.values, [place[label] for label in part.metadata["categories"]], -1, np.int32)
        for part in parts
    ]
    return [replace(part, values=codes, metadata=metadata) for part, codes in zip(parts, coded, strict=True)]


def translate_codes(codes: NDArray[Any], entries: Iterable[Any], absent: Any, dtype: DTypeLike) -> NDArray[Any]:  # noqa: ANN401
    """Return the entries that codes name, in an array of `dtype`; `absent` for codes that name none, such as -1."""
    table = np.array([*entries, absent], dtype)
    at = np.full(codes.shape, len(table) - 1)
    # The codes may be of a type that is too narrow for the number of entries, or has no -1.
    named = (codes >= 0) & (codes < len(table) - 1)
    at[named] = codes[named]
    return np.asarray(table[at])


def pad_attribute(attribute: Attribute, at: NDArray[np.int64], n_rows: int) -> Attribute:
    """Return an attribute with more rows, absent except at the given rows."""
    values = np.full((n_rows, *attribute.values.shape[1:]), fill_value(attribute.values.dtype), attribute.values.dtype)
    values[at] = attribute.values
    present = np.zeros(n_rows, bool)
    present[at] = True if attribute.present is None else attribute.present
    return replace(attribute, values=values, present=None if present.all() else present)


@dataclass(frozen=True)
class Groups:
    """Sets of objects: any number, of any length, possibly overlapping (§7.4).

    Parameters
    ----------
    offsets : (G + 1,) int64
        Group ``g`` has ``ids[offsets[g]:offsets[g + 1]]``.
    ids : (T,) int64
        Object ids, group by group, in the given order.
    attributes : mapping of str to Attribute
        G rows each, e.g. ``name``, ``super_type``, ``parent``.

    References
    ----------
    zarr-vectors §7.4 (groups).
    """

    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]
    attributes: Attributes = field(default_factory=dict)

    @property
    def n_groups(self) -> int:
        """Number of groups."""
        return len(self.offsets) - 1

    def members(self, group: int) -> NDArray[np.int64]:
        """Return the object ids of one group."""
        return self.ids[self.offsets[group] : self.offsets[group + 1]]


@dataclass(frozen=True)
class Shapes:
    """Shapes in flat arrays, in object order. Converters return them, and so does reading.

    Parameters
    ----------
    kind : str
        A member of `KINDS`.
    positions : (N, D) array
        Vertices in world units, D >= 2, of a dtype in `POSITION_TYPES`; the vertices of an object are contiguous.
    offsets : (B + 1,) int64 or None
        Vertices of object ``i`` are ``positions[offsets[i]:offsets[i + 1]]``; an object may be empty; vertices from ``offsets[B]`` on
        belong to no object. None: all vertices are one object, or, in a point cloud, they belong to no object.
    ids : (B,) int64 or None
        Ids of the objects, unique, in any order, not negative. None: 0 to B - 1, or, in a point cloud whose `offsets` are None
        too, no objects.
    links : (M, L) integer array or None
        Rows of `positions`: edges (L = 2) or faces (L = 3; also more). None for points, and for lines, polylines and streamlines,
        whose vertices are linked in order. Skeletons: edges as (child, parent).
    link_offsets : (B + 1,) int64 or None
        Links of object ``i``. None if links are not in object order, or some belong to no object; their objects are then found
        from their vertices.
    vertex_attributes, link_attributes, object_attributes : mapping of str to Attribute (or array)
        N, M and B rows.
    fragment_offsets : (F + 1,) int64 or None
        In shapes that were read: start of each fragment among the vertices; None in shapes to be written.
    fragment_attributes : mapping of str to Attribute
        F rows, in shapes that were read.
    groups : Groups or None
        Sets of object ids.

    Raises
    ------
    SourceError
        If a shape, a length or an id is inconsistent; `make_geometry` also checks values (faces out of range, NaN).

    References
    ----------
    zarr-vectors §7.1 (vertices), §7.2 (vertex attributes), §7.5 (links), §7.8, §7.10 (attributes of links and objects).

    Examples
    --------
    >>> import numpy as np
    >>> two = Shapes("streamline", np.zeros((5, 3), np.float32), offsets=np.array([0, 2, 5]), ids=np.array([7, 9]))
    >>> two.n_objects, two.vertex_counts.tolist()
    (2, [2, 3])
    """

    kind: str
    positions: NDArray[Any]
    offsets: NDArray[np.int64] = field(default=None)  # type: ignore[arg-type]
    ids: NDArray[np.int64] | None = None
    links: NDArray[Any] | None = None
    link_offsets: NDArray[np.int64] | None = None
    vertex_attributes: Attributes = field(default_factory=dict)
    link_attributes: Attributes = field(default_factory=dict)
    object_attributes: Attributes = field(default_factory=dict)
    fragment_offsets: NDArray[np.int64] | None = None
    fragment_attributes: Attributes = field(default_factory=dict)
    groups: Groups | None = None

    def __post_init__(self) -> None:
        """Convert to arrays and validate them."""
        if self.kind not in KINDS:
            raise SourceError(f"Unknown geometry type {self.kind!r}; expected one of {', '.join(KINDS)}.")
        positions = np.asarray(self.positions)
        if positions.ndim != 2 or positions.dtype.name not in POSITION_TYPES:
            raise SourceError(
                f"Positions have shape {positions.shape} and dtype {positions.dtype}; expected rows of coordinates, (N, D), "
                "of floats or integers. Rows of different lengths cannot form such an array."
            )
        # Noted before offsets are filled in: a cloud without offsets has no objects.
        no_offsets = self.offsets is None
        if self.ids is None and not (no_offsets and self.kind == "point_cloud"):
            object.__setattr__(self, "ids", np.arange(1 if no_offsets else len(self.offsets) - 1))
        offsets = np.array([0, len(positions)]) if no_offsets else self.offsets
        object.__setattr__(self, "positions", positions)
        object.__setattr__(
            self, "offsets", check_offsets(offsets, len(positions), "The vertices of the objects", partly=True)
        )
        if self.ids is not None:
            object.__setattr__(self, "ids", check_ids(self.ids, len(self.offsets) - 1))
        if self.links is not None:
            links = np.asarray(self.links)
            if links.ndim != 2 or links.dtype.kind not in "iu" or not links.shape[1]:
                raise SourceError(f"Links are {links.dtype} of shape {links.shape}; expected (links, ends) integers.")
            object.__setattr__(self, "links", links)
        if self.link_offsets is not None:
            bounds = check_offsets(self.link_offsets, self.n_links, "The links of the objects")
            object.__setattr__(self, "link_offsets", bounds)
        rows = {"vertex": len(positions), "link": self.n_links, "object": self.n_objects}
        for family, expected in rows.items():
            result = as_attributes(getattr(self, f"{family}_attributes"))
            object.__setattr__(self, f"{family}_attributes", result)
            check_rows(result, expected, family)

    @property
    def n_vertices(self) -> int:
        """Number of vertices."""
        return len(self.positions)

    @property
    def n_links(self) -> int:
        """Number of stored links (0 if they follow from the order)."""
        return 0 if self.links is None else len(self.links)

    def edges(self, width: int = 2) -> NDArray[np.int64]:
        """Return the stored links as (M, L) int64; (0, `width`) if there are none."""
        return np.zeros((0, width), np.int64) if self.links is None else np.asarray(self.links, np.int64)

    @property
    def n_objects(self) -> int:
        """Number of objects; 0 in a point cloud without objects."""
        return 0 if self.ids is None else len(self.offsets) - 1

    @property
    def n_dims(self) -> int:
        """Number of space axes."""
        return int(self.positions.shape[1])

    @property
    def vertex_counts(self) -> NDArray[np.int64]:
        """Number of vertices of each object, (B,)."""
        return np.diff(self.offsets)


def check_offsets(offsets: Any, total: int, what: str, *, partly: bool = False) -> NDArray[np.int64]:  # noqa: ANN401
    """Return offsets as int64 after checking that they start at 0, never decrease and end at `total` (or before, if `partly`)."""
    result = np.asarray(offsets)
    if result.ndim != 1 or not result.size or result.dtype.kind not in "iu":
        raise SourceError(
            f"{what}: offsets are {result.dtype} of shape {result.shape}; expected (objects + 1,) integers."
        )
    result = result.astype(np.int64)
    ends = result[-1] == total or (partly and result[-1] < total)
    if result[0] != 0 or not ends or (np.diff(result) < 0).any():
        raise SourceError(
            f"{what}: offsets go from {result[0]} to {result[-1]}; expected 0 to {total}, never decreasing."
        )
    return result


def check_ids(ids: Any, n_objects: int) -> NDArray[np.int64]:  # noqa: ANN401 - any array-like
    """Return object ids as int64 after checking that there are `n_objects`, none negative and none repeated."""
    result = np.asarray(ids)
    if result.shape != (n_objects,) or (result.size and result.dtype.kind not in "iu"):
        raise SourceError(f"Object ids are {result.dtype} of shape {result.shape}; expected {n_objects} integers.")
    # An id of uint64 above this limit would become negative.
    if result.size and (result.min() < 0 or result.max() > np.iinfo(np.int64).max):
        raise SourceError(f"Object ids go from {result.min()} to {result.max()}; expected 0 to 2**63 - 1.")
    if n_objects > 1 and len(np.unique(result)) != n_objects:
        raise SourceError("An object id occurs twice; ids must be unique.")
    return result.astype(np.int64)


def check_rows(attributes: Attributes, expected: int, family: str) -> None:
    """Refuse attributes that do not have one row per vertex, link or object."""
    for name, attribute in attributes.items():
        if len(attribute.values) != expected:
            raise SourceError(
                f"The {family} attribute {name!r} has {len(attribute.values)} rows; expected {expected}, one per {family}."
            )


def fill_value(dtype: np.dtype[Any]) -> Any:  # noqa: ANN401 - a scalar of that dtype
    """Return the value of absent rows: NaN, the smallest signed integer, the largest unsigned one, or an empty string."""
    if dtype.kind == "f":
        return np.nan
    if dtype.kind in "iu":
        return np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max
    return ""


def counts_to_offsets(counts: NDArray[Any]) -> NDArray[np.int64]:
    """Return the offsets of lists with lengths `counts`: (n + 1,) int64, from 0 to their sum.

    Examples
    --------
    >>> counts_to_offsets(np.array([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def concat_ranges(starts: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.int64]:
    """Return ``starts[i], starts[i] + 1, ...``, `counts[i]` of them for each ``i``, concatenated.

    Examples
    --------
    >>> concat_ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    offsets = counts_to_offsets(counts)
    # Each range is shifted by the ranges before it, so one `arange` counts through all of them.
    return np.repeat(np.asarray(starts, np.int64) - offsets[:-1], counts) + np.arange(offsets[-1])


def gather_rows(offsets: NDArray[np.int64], lists: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return the rows of some lists, concatenated.

    Examples
    --------
    >>> gather_rows(np.array([0, 2, 5]), np.array([1, 0])).tolist()
    [2, 3, 4, 0, 1]
    """
    return concat_ranges(offsets[:-1][lists], np.diff(offsets)[lists])


def take_attributes(attributes: Attributes, rows: NDArray[Any]) -> dict[str, Attribute]:
    """Return some rows of each attribute."""
    return {name: attribute.take(rows) for name, attribute in attributes.items()}


def object_rows(shapes: Shapes) -> NDArray[np.int64]:
    """Return, for each vertex, the row of its object, or the number of objects if it belongs to none: (N,) int64."""
    counts = np.append(shapes.vertex_counts, shapes.n_vertices - shapes.offsets[-1])
    return np.repeat(np.arange(len(counts)), counts)


def sequence_links(shapes: Shapes) -> NDArray[np.int64]:
    """Return the links between vertices that follow one another in an object, (M, 2)."""
    owner = object_rows(shapes)
    first = np.flatnonzero((owner[1:] == owner[:-1]) & (owner[1:] < len(shapes.offsets) - 1))
    return np.stack([first, first + 1], axis=1)


def take_objects(shapes: Shapes, rows: NDArray[np.integer[Any]]) -> Shapes:
    """Return some of the objects, in the given order, with their links, attributes and all groups.

    `rows` are rows of the objects (not ids), each at most once. Links with an end that is not in one of them are
    dropped.
    """
    rows = np.asarray(rows)
    vertices = gather_rows(shapes.offsets, rows)
    links, chosen, link_offsets = shapes.links, np.zeros(0, np.int64), None
    if links is not None:
        renumbered = np.full(shapes.n_vertices, -1, np.int64)
        renumbered[vertices] = np.arange(len(vertices))
        if shapes.link_offsets is not None:
            chosen = gather_rows(shapes.link_offsets, rows)
            complete = (renumbered[links[chosen]] >= 0).all(1)
            # The number of remaining links before each link, read at the first link of each object.
            link_offsets = counts_to_offsets(complete)[counts_to_offsets(np.diff(shapes.link_offsets)[rows])]
            chosen = chosen[complete]
        else:
            chosen = np.flatnonzero((renumbered[links] >= 0).all(1))
        links = renumbered[links[chosen]]
    return replace(
        shapes,
        positions=shapes.positions[vertices],
        offsets=counts_to_offsets(np.diff(shapes.offsets)[rows]),
        ids=None if shapes.ids is None else shapes.ids[rows],
        links=links,
        link_offsets=link_offsets,
        vertex_attributes=take_attributes(shapes.vertex_attributes, vertices),
        link_attributes=take_attributes(shapes.link_attributes, chosen),
        object_attributes=take_attributes(shapes.object_attributes, rows),
        fragment_offsets=None,
        fragment_attributes={},
    )


def join_shapes(parts: Sequence[Shapes]) -> Shapes:
    """Put the objects of shapes of one kind after one another, with ids from 0; their links, if any, have `link_offsets`."""
    starts = counts_to_offsets(np.array([part.n_vertices for part in parts], np.int64))
    links = [part.edges() + start for part, start in zip(parts, starts, strict=False) if part.links is not None]
    per_object = [np.diff(part.link_offsets) for part in parts if part.link_offsets is not None]
    return Shapes(
        parts[0].kind,
        np.concatenate([part.positions for part in parts]),
        counts_to_offsets(np.concatenate([part.vertex_counts for part in parts])),
        links=np.concatenate(links) if links else None,
        link_offsets=counts_to_offsets(np.concatenate(per_object)) if links else None,
        vertex_attributes=concat_attributes([p.vertex_attributes for p in parts], [p.n_vertices for p in parts]),
        link_attributes=concat_attributes([p.link_attributes for p in parts], [p.n_links for p in parts]),
        object_attributes=concat_attributes([p.object_attributes for p in parts], [p.n_objects for p in parts]),
    )


def each_object(shapes: Shapes) -> Iterator[tuple[int, Shapes]]:
    """Yield the id of each object, and the object alone."""
    for row, number in enumerate(np.asarray(shapes.ids).tolist()):
        yield number, take_objects(shapes, np.array([row]))


def take_vertices(shapes: Shapes, kept: NDArray[np.bool_], links: NDArray[Any] | None = None) -> Shapes:
    """Return the same objects with the vertices that `kept`, (N,), marks, and with other links.

    The old links and link attributes are dropped. The new ones are given as rows of the old vertices, all of them kept.
    """
    # The number of kept vertices before each vertex: its new row, and the new value of an offset.
    counts = counts_to_offsets(kept)
    return replace(
        shapes,
        positions=shapes.positions[kept],
        offsets=counts[shapes.offsets],
        links=None if links is None else counts[links],
        link_offsets=None,
        vertex_attributes=take_attributes(shapes.vertex_attributes, np.flatnonzero(kept)),
        link_attributes={},
        fragment_offsets=None if shapes.fragment_offsets is None else counts[shapes.fragment_offsets],
    )


def links_by_object(
    offsets: NDArray[np.int64], links: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return the order of links by the object of their first end, and their offsets, as `Shapes.link_offsets`."""
    owner = np.searchsorted(offsets, links[:, 0], side="right") - 1
    counts = np.bincount(owner, minlength=len(offsets))
    # Links between vertices without an object follow those of the last object; no offsets can describe them.
    return np.argsort(owner, kind="stable"), None if counts[-1] else counts_to_offsets(counts[:-1])
