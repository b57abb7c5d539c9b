"""Content of a geometry file in any format, and what a format can represent."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError, ValuesError
from raggedatlas.vectors.geometry import Axis
from raggedatlas.vectors.shapes import KINDS, SEQUENTIAL, Attribute, Attributes, Shapes

OBJECT_ID = "object_id"
"""Column that stores object ids in formats without ids."""


@dataclass(frozen=True)
class Content:
    """Content of a geometry file.

    Parameters
    ----------
    shapes : Shapes
        The geometry.
    metadata : mapping
        Metadata of the file, for the root of a store: ``crs``, ``tractogram``, ``directed``, ...
    axes : tuple of Axis or None
        Names and units of the axes; None if the file has none.
    left : tuple of str
        What was not read, one line each.
    """

    shapes: Shapes
    metadata: Mapping[str, Any] = field(default_factory=dict)
    axes: tuple[Axis, ...] | None = None
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class Capabilities:
    """What a format can represent; anything else is reported as a loss, or refused if nothing would remain.

    Parameters
    ----------
    kinds : tuple of str
        Geometry types that can be written.
    dims : tuple of int
        Numbers of axes that can be written.
    links : bool
        Whether links are written; links implied by the order of vertices need not be.
    objects : str
        ``"many"``; ``"one"``: objects are joined and lose their ids; ``"anonymous"``: objects stay separate and lose their ids.
    vertex, link, object : tuple of str or None
        Names of the attributes that are written; None writes all.
    strings : bool
        Whether strings are written.
    groups : bool
        Whether groups are written.
    """

    kinds: tuple[str, ...] = KINDS
    dims: tuple[int, ...] = (2, 3, 4)
    links: bool = True
    objects: str = "many"
    vertex: tuple[str, ...] | None = None
    link: tuple[str, ...] | None = None
    object: tuple[str, ...] | None = None
    strings: bool = True
    groups: bool = False

    def check(self, shapes: Shapes, name: str) -> None:
        """Raise for shapes that the format cannot represent.

        Raises
        ------
        SourceError
            Naming the format, the kind and what can be written.
        """
        if shapes.kind not in self.kinds:
            raise SourceError(
                f"{name} holds no {shapes.kind}; it holds {', '.join(self.kinds)}. Choose another format."
            )
        if shapes.n_dims not in self.dims:
            raise SourceError(
                f"{name} holds no positions of {shapes.n_dims} axes; expected {' or '.join(map(str, self.dims))}."
            )

    def losses(self, shapes: Shapes) -> Iterator[str]:
        """Yield the losses, one line each."""
        if shapes.links is not None and not self.links and shapes.kind not in SEQUENTIAL:
            yield f"links: {shapes.n_links} are left out"
        if shapes.ids is not None and self.objects != "many":
            if self.objects == "one" and shapes.n_objects > 1:
                yield f"objects: {shapes.n_objects} are joined into one"
            # Also reached where a format of one object gets exactly one: its id is lost unless it is 0.
            elif not np.array_equal(shapes.ids, np.arange(shapes.n_objects)):
                yield "objects: their ids are left out; they are numbered from 0"
        if self.objects != "one" and shapes.offsets[-1] < shapes.n_vertices:
            yield f"vertices: {shapes.n_vertices - shapes.offsets[-1]} of no object are left out"
        for family, kept in (("vertex", self.vertex), ("link", self.link), ("object", self.object)):
            yield from self._attributes(family, getattr(shapes, f"{family}_attributes"), kept)
        if shapes.groups is not None and not self.groups:
            yield f"groups: {shapes.groups.n_groups} are left out"

    def _attributes(self, family: str, attributes: Attributes, kept: tuple[str, ...] | None) -> Iterator[str]:
        for name, attribute in attributes.items():
            if kept is not None and name not in kept:
                yield f"{family} attribute {name!r} is left out"
            elif is_text(attribute) and not self.strings:
                yield f"{family} attribute {name!r} is left out: it is text"


def is_text(attribute: Attribute) -> bool:
    """Return whether an attribute is text, as strings or as codes of categories."""
    return attribute.values.dtype.kind not in "iufb" or "categories" in attribute.metadata


def is_id(text: str) -> bool:
    """Return whether a text is an id as it is written: decimal digits without leading zeros, below 2**63.

    Examples
    --------
    >>> is_id("7"), is_id("007"), is_id(str(2**63))
    (True, False, False)
    """
    return text.isdecimal() and len(text) < 20 and str(int(text)) == text and int(text) < 2**63


def encode_categories(texts: NDArray[Any]) -> Attribute:
    """Return strings as codes of their sorted categories; None becomes -1.

    Examples
    --------
    >>> made = encode_categories(np.array(["b", None, "a"], object))
    >>> made.values.tolist(), made.metadata["categories"]
    ([1, -1, 0], ['a', 'b'])
    """
    there = np.array([text is not None for text in texts], bool)
    categories, codes = np.unique(np.array([str(text) for text in texts[there]], dtype=str), return_inverse=True)
    width: type[np.signedinteger[Any]] = np.int16 if len(categories) < 2**15 else np.int32
    values = np.full(len(texts), -1, width)
    values[there] = codes
    metadata = {"encoding": "dictionary", "categories": categories.tolist(), "ordered": False, "_FillValue": -1}
    return Attribute(values, metadata=metadata)


def decode_categories(attribute: Attribute) -> NDArray[Any]:
    """Return the values of an attribute; codes of categories become their strings, or None."""
    if "categories" not in attribute.metadata:
        return attribute.values
    # Codes out of range, such as -1 for a missing text, select the None at the end.
    categories = np.array([*attribute.metadata["categories"], None], object)
    codes = attribute.values.astype(np.int64)
    return categories[np.where((codes >= 0) & (codes < len(categories) - 1), codes, len(categories) - 1)]


def group_vertices(kind: str, positions: NDArray[Any], owner: NDArray[Any], columns: Attributes) -> Shapes:
    """Group vertices by object; the order within each object is kept.

    Parameters
    ----------
    kind : str
        Geometry type.
    positions : (N, D) array
        Vertices in any order.
    owner : (N,) array
        Ids (integers, not negative) or names of the objects.
    columns : mapping
        Vertex attributes.

    Returns
    -------
    Shapes
        Objects in ascending order; names become the object attribute ``name``.
    """
    names, codes = np.unique(owner, return_inverse=True)
    # Stable. `_by_object` in `graphs` sorts its owners the same way to renumber links; both must give one order.
    order = np.argsort(codes, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(codes, minlength=len(names)))]).astype(np.int64)
    numbers = names.dtype.kind in "iu"
    return Shapes(
        kind,
        positions[order],
        offsets,
        names if numbers else np.arange(len(names)),
        vertex_attributes={name: column.take(order) for name, column in columns.items()},
        object_attributes={} if numbers else {"name": Attribute(names)},
    )


def check_content(shapes: Shapes, what: str) -> None:
    """Raise for positions that are not finite and links to vertices that do not exist.

    Raises
    ------
    ValuesError
        Naming the first vertex and its object.
    SourceError
        Naming the first link and its ends.
    """
    bad = ~np.isfinite(shapes.positions).all(1) if shapes.positions.dtype.kind == "f" else np.zeros(0, bool)
    if bad.any():
        row = int(np.argmax(bad))
        owner = (
            "" if shapes.ids is None or row >= shapes.offsets[-1] else f" of object {shapes.ids[_owner(shapes, row)]}"
        )
        raise ValuesError(
            f"{what}: vertex {row}{owner} lies at {shapes.positions[row].tolist()}; expected finite numbers. "
            "Correct or remove this vertex."
        )
    if shapes.links is None or not shapes.n_links:
        return
    out = (shapes.links < 0) | (shapes.links >= shapes.n_vertices)
    if out.any():
        row = int(np.argmax(out.any(1)))
        raise SourceError(
            f"{what}: link {row} has the ends {shapes.links[row].tolist()}; expected rows of the {shapes.n_vertices} "
            "vertices, counted from 0."
        )


def _owner(shapes: Shapes, row: int) -> int:
    # With "right", an empty object never owns the first vertex of the next one.
    return int(np.searchsorted(shapes.offsets, row, side="right")) - 1
