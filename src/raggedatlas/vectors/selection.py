"""Parts of shapes: some of the objects, or some of the vertices."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.vectors.shapes import Attributes, Shapes


def counts_to_offsets(counts: NDArray[np.integer[Any] | np.bool_]) -> NDArray[np.int64]:
    """Return the offsets of lists of these lengths.

    Examples
    --------
    >>> counts_to_offsets(np.array([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def gather_rows(offsets: NDArray[np.int64], lists: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return the rows of some lists, list after list.

    Examples
    --------
    >>> gather_rows(np.array([0, 2, 5]), np.array([1, 0])).tolist()
    [2, 3, 4, 0, 1]
    """
    counts = np.diff(offsets)[lists]
    starts = counts_to_offsets(counts)
    rows: NDArray[np.int64] = np.arange(starts[-1]) + np.repeat(offsets[:-1][lists] - starts[:-1], counts)
    return rows


def take_attributes(attributes: Attributes, rows: NDArray[Any]) -> dict[str, Any]:
    """Return attributes of some rows."""
    return {name: attribute.take(rows) for name, attribute in attributes.items()}


def object_rows(shapes: Shapes) -> NDArray[np.int64]:
    """Return, for each vertex, the row of its object, (N,)."""
    return np.repeat(np.arange(len(shapes.offsets) - 1), np.diff(shapes.offsets))


def take_objects(shapes: Shapes, rows: NDArray[np.integer[Any]]) -> Shapes:
    """Return some of the objects, in the given order, with their links, attributes and all groups.

    Parameters
    ----------
    shapes : Shapes
        With objects.
    rows : (K,) integers
        Rows of the objects (not ids), each at most once.

    Returns
    -------
    Shapes
        Links with an end in another object are left out.

    Examples
    --------
    >>> both = Shapes("line", np.arange(8.0).reshape(4, 2), offsets=np.array([0, 2, 4]))
    >>> take_objects(both, np.array([1])).positions.tolist()
    [[4.0, 5.0], [6.0, 7.0]]
    """
    rows = np.asarray(rows)
    vertices = gather_rows(shapes.offsets, rows)
    links, chosen, link_offsets = shapes.links, np.zeros(0, np.int64), None
    if links is not None:
        renumbered = np.full(shapes.n_vertices, -1, np.int64)
        renumbered[vertices] = np.arange(len(vertices))
        if shapes.link_offsets is not None:
            chosen = gather_rows(shapes.link_offsets, rows)
            link_offsets = counts_to_offsets(np.diff(shapes.link_offsets)[rows])
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


def take_vertices(shapes: Shapes, kept: NDArray[np.bool_], links: NDArray[Any] | None = None) -> Shapes:
    """Return the same objects with some of their vertices, and with other links.

    Parameters
    ----------
    shapes : Shapes
        Any; its links and their attributes are not taken.
    kept : (N,) bool
        Which vertices.
    links : (M, L) integers or None
        The new links, as rows of the old vertices that are all kept.
    """
    counts = counts_to_offsets(kept)
    return replace(
        shapes,
        positions=shapes.positions[kept],
        offsets=counts[shapes.offsets],
        links=None if links is None else counts[links],
        link_offsets=None,
        vertex_attributes=take_attributes(shapes.vertex_attributes, np.flatnonzero(kept)),
        link_attributes={},
        fragment_offsets=None,
        fragment_attributes={},
    )
