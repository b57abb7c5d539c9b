"""From the chunks of a level back to shapes: fragments in the order of their objects, links by their new rows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.vectors.blobs import concat_ranges, counts_to_offsets
from raggedatlas.vectors.chunk_arrays import KeyLookup
from raggedatlas.vectors.fragment_index import fragment_rows
from raggedatlas.vectors.geometry import CrossLinks, Level
from raggedatlas.vectors.shapes import KINDS, SEQUENTIAL, Attribute, Attributes, Shapes, concat_attributes


@dataclass(frozen=True)
class FragmentSelection:
    """Which fragments are wanted, object after object.

    Parameters
    ----------
    fragments : (P,) int64
        Fragments of the level at hand, in order of traversal.
    bounds : (B + 1,) int64
        Those of each object; fragments beyond the last bound belong to none.
    ids : (B,) int64 or None
        Ids of the objects; None without objects.
    """

    fragments: NDArray[np.int64]
    bounds: NDArray[np.int64]
    ids: NDArray[np.int64] | None


@dataclass(frozen=True)
class LinkRules:
    """How the links of a store are meant.

    Parameters
    ----------
    kind : str
        Geometry type.
    convention : str
        Which links are not stored.
    boundary : str
        Policy for links across chunks.
    """

    kind: str
    convention: str
    boundary: str


def assemble_shapes(
    level: Level, chosen: FragmentSelection, rules: LinkRules, cross: CrossLinks | None = None
) -> Shapes:
    """Return shapes of some fragments of a level.

    Parameters
    ----------
    level : Level
        Chunks with their fragments, and links if the kind has some.
    chosen : Chosen
        Which fragments.
    rules : Rules
        Kind and conventions.
    cross : CrossLinks or None
        Links across chunks; those with an end elsewhere are left out.
    """
    fragments = level.fragments
    assert fragments is not None
    local, counts = fragment_rows(fragments, chosen.fragments)
    chunk = np.searchsorted(fragments.bounds, chosen.fragments, side="right") - 1
    rows = local + np.repeat(level.bounds[chunk], counts)
    bounds = counts_to_offsets(counts)
    if rules.kind in SEQUENTIAL and rules.boundary != "explicit_links":
        kept = mask_repeated_rows(level.positions, rows, bounds, chosen.bounds)
        counts = np.diff(counts_to_offsets(kept)[bounds])
        rows, bounds = rows[kept], counts_to_offsets(counts)
    shapes = Shapes(
        rules.kind if rules.kind in KINDS else "graph",
        np.take(level.positions, rows, axis=0),
        offsets=bounds[chosen.bounds],
        ids=chosen.ids,
        vertex_attributes=_take_attributes(level.vertex_attributes, rows),
        fragment_offsets=bounds,
        fragment_attributes=_take_attributes(level.fragment_attributes, chosen.fragments),
    )
    if rules.kind in SEQUENTIAL or (level.links is None and cross is None):
        return _with_empty_links(shapes)
    return _add_links(shapes, level, (rows, chosen, counts), rules, cross)


def _with_empty_links(shapes: Shapes) -> Shapes:
    """Return shapes whose kind needs links with an empty array of them."""
    if shapes.kind in {"graph", "skeleton", "mesh"}:
        width = 3 if shapes.kind == "mesh" else 2
        return replace(
            shapes, links=np.zeros((0, width), np.int64), link_offsets=np.zeros(len(shapes.offsets), np.int64)
        )
    return shapes


def mask_repeated_rows(
    positions: NDArray[Any], rows: NDArray[np.int64], bounds: NDArray[np.int64], objects: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Tell which rows to keep of polylines whose pieces end with the vertex that the next one begins with.

    Parameters
    ----------
    positions : (N, D) array
        Vertices.
    rows : (R,) int64
        Those of all fragments, in order of traversal.
    bounds : (P + 1,) int64
        The rows of each fragment.
    objects : (B + 1,) int64
        The fragments of each object.
    """
    kept = np.ones(len(rows), bool)
    first = np.setdiff1d(np.arange(1, len(bounds) - 1), objects)
    first = first[(bounds[first] < bounds[first + 1]) & (bounds[first - 1] < bounds[first])]
    begin = bounds[first]
    same = (positions[rows[begin]] == positions[rows[begin - 1]]).all(axis=1)
    kept[begin[same] - 1] = False
    return kept


def _take_attributes(attributes: Attributes, rows: NDArray[np.int64]) -> dict[str, Attribute]:
    """Return attributes for some rows."""
    return {name: attribute.take(rows) for name, attribute in attributes.items()}


def _add_links(
    shapes: Shapes,
    level: Level,
    placed: tuple[NDArray[np.int64], FragmentSelection, NDArray[np.int64]],
    rules: LinkRules,
    cross: CrossLinks | None,
) -> Shapes:
    """Add the links whose ends are all among the vertices, object by object."""
    rows = placed[0]
    finder = RowLookup(rows, shapes.offsets, level.n_vertices)
    parts: list[tuple[NDArray[np.int64], Attributes]] = []
    if level.links is not None:
        base = np.repeat(level.bounds[:-1], np.diff(level.links.bounds))
        parts.append((level.links.rows.astype(np.int64) + base[:, None], level.links.attributes))
        limit = np.repeat(level.bounds[1:], np.diff(level.links.bounds))
        if (parts[0][0] >= limit[:, None]).any() or (level.links.rows < 0).any():
            raise CorruptError("A link names a row that its chunk does not have. Restore the store from a copy.")
    if cross is not None and rules.boundary != "both":
        parts.append((_global_rows(level, cross), cross.attributes))
    found = [finder.place(ends) for ends, _ in parts]
    placed_links = [ends for ends, _ in found]
    values = [_take_attributes(own, kept) for (_, own), (_, kept) in zip(parts, found, strict=True)]
    if rules.convention == "implicit_sequential_with_branches":
        placed_links.append(_implicit_links(shapes, np.concatenate([np.zeros((0, 2), np.int64), *placed_links])))
        values.append({})
    links = np.concatenate(placed_links) if placed_links else np.zeros((0, 2), np.int64)
    attributes = concat_attributes(values, [len(ends) for ends in placed_links])
    owner = np.searchsorted(shapes.offsets, links[:, 0], side="right") - 1
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=len(shapes.offsets))[: len(shapes.offsets) - 1]
    bounds = counts_to_offsets(counts)
    return replace(
        shapes,
        links=links[order],
        link_offsets=bounds,
        link_attributes={name: attribute.take(order) for name, attribute in attributes.items()},
    )


def _global_rows(level: Level, cross: CrossLinks) -> NDArray[np.int64]:
    """Return the rows of ends among all vertices of the level at hand; -1 in chunks that are not."""
    place = KeyLookup(level.chunks).find(cross.chunks.reshape(-1, cross.chunks.shape[2])).reshape(cross.rows.shape)
    sizes = np.append(np.diff(level.bounds), 0)
    if ((place >= 0) & (cross.rows >= sizes[place])).any():
        raise CorruptError(
            "A link across chunks names a row that its chunk does not have. Restore the store from a copy."
        )
    return np.where(place >= 0, level.bounds[place] + cross.rows, -1)


def _implicit_links(shapes: Shapes, links: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the links that are not stored: each vertex and the one before it in its fragment, if no link names another parent."""
    begins = np.zeros(shapes.n_vertices + 1, bool)
    assert shapes.fragment_offsets is not None
    begins[shapes.fragment_offsets] = True
    begins[links[:, 0]] = True
    child = np.flatnonzero(~begins[:-1])
    return np.stack([child, child - 1], axis=1)


class RowLookup:
    """Finds where rows of a level went, also where several objects share them.

    Parameters
    ----------
    rows : (N,) int64
        The row of the level that each vertex of the shapes is.
    offsets : (B + 1,) int64
        Vertices of each object.
    n_rows : int
        How many rows the level has.
    """

    def __init__(self, rows: NDArray[np.int64], offsets: NDArray[np.int64], n_rows: int) -> None:
        self._place = np.full(n_rows + 1, -1, np.int64)
        self._place[rows[::-1]] = np.arange(len(rows))[::-1]
        self.n_rows = n_rows
        self.is_shared = int(np.count_nonzero(self._place >= 0)) < len(rows)
        if self.is_shared:
            owner = np.searchsorted(offsets, np.arange(len(rows)), side="right") - 1
            self._owner = owner
            code = owner * n_rows + rows
            self._order = np.argsort(code, kind="stable")
            self._codes = code[self._order]
            by_row = np.argsort(rows, kind="stable")
            self._by_row, self._sorted_rows = by_row, rows[by_row]

    def _simple(self, ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return links by the first place of their ends."""
        found = self._place[ends]
        kept = np.flatnonzero((found >= 0).all(axis=1))
        return found[kept], kept

    def _within(self, ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return links once for each object that has all their ends."""
        first = np.searchsorted(self._sorted_rows, ends[:, 0], side="left")
        count = np.searchsorted(self._sorted_rows, ends[:, 0], side="right") - first
        count[ends[:, 0] < 0] = 0
        which = np.repeat(np.arange(len(ends)), count)
        start = self._by_row[concat_ranges(first, count)]
        owner = self._owner[start]
        code = owner[:, None] * self.n_rows + ends[which]
        at = np.minimum(np.searchsorted(self._codes, code), len(self._codes) - 1)
        good = ((self._codes[at] == code) & (ends[which] >= 0)).all(axis=1)
        placed = self._order[at]
        _, unique = np.unique(np.stack([which, owner], axis=1)[good], axis=0, return_index=True)
        kept = np.flatnonzero(good)[unique]
        return placed[kept], which[kept]

    def place(self, ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return links whose ends are all there, by their new rows, and which of the given links they are.

        Where objects share rows, a link comes once for each object that has all its ends; those between objects follow.
        """
        if not self.is_shared:
            return self._simple(ends)
        inside, which = self._within(ends)
        left = np.setdiff1d(np.arange(len(ends)), which)
        across, kept = self._simple(ends[left])
        return np.concatenate([inside, across]), np.concatenate([which, left[kept]])


def clip_shapes(shapes: Shapes, inside: NDArray[np.bool_]) -> Shapes:
    """Return the vertices that are inside, and the links between them; objects that have none left are gone.

    Lines, polylines and streamlines get the links between neighbours that are both inside, as they may now be in pieces.
    """
    place = np.cumsum(inside) - 1
    kept = np.flatnonzero(inside)
    counted = counts_to_offsets(inside)
    counts = np.diff(counted[shapes.offsets])
    some = counts > 0 if shapes.ids is not None else np.ones(len(counts), bool)
    links = shapes.links
    if links is None and shapes.kind in SEQUENTIAL:
        last = np.ones(shapes.n_vertices, bool)
        last[shapes.offsets[1:][shapes.vertex_counts > 0] - 1] = False
        here = np.flatnonzero(last)
        links = np.stack([here, here + 1], axis=1)
    new: dict[str, object] = {"links": None, "link_offsets": None}
    if links is not None:
        good = np.flatnonzero(inside[links].all(axis=1))
        ends = place[links[good]]
        offsets = counts_to_offsets(counts[some])
        owner = np.searchsorted(offsets, ends[:, 0], side="right") - 1
        order = np.argsort(owner, kind="stable")
        sizes = np.bincount(owner, minlength=len(offsets))[: len(offsets) - 1]
        new = {
            "links": ends[order],
            "link_offsets": counts_to_offsets(sizes),
            "link_attributes": _take_attributes(shapes.link_attributes, good[order]),
        }
    pieces, values = shapes.fragment_offsets, shapes.fragment_attributes
    if pieces is not None:
        sizes = np.diff(counted[pieces])
        values = _take_attributes(values, np.flatnonzero(sizes > 0))
        pieces = counts_to_offsets(sizes[sizes > 0])
    return replace(
        shapes,
        positions=np.take(shapes.positions, kept, axis=0),
        offsets=counts_to_offsets(counts[some]),
        ids=None if shapes.ids is None else shapes.ids[some],
        vertex_attributes=_take_attributes(shapes.vertex_attributes, kept),
        object_attributes=_take_attributes(shapes.object_attributes, np.flatnonzero(some)),
        fragment_offsets=pieces,
        fragment_attributes=values,
        **new,  # type: ignore[arg-type]
    )


def with_object_attributes(shapes: Shapes, attributes: Mapping[str, Attribute]) -> Shapes:
    """Return shapes with the attributes of their objects."""
    return replace(shapes, object_attributes=dict(attributes))
