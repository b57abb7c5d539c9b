"""Links filed as across chunks whose ends lie in one: layout 0.9 keeps them with the links of that chunk."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.blobs import counts_to_offsets
from raggedatlas.vectors.chunking import smallest_unsigned_dtype
from raggedatlas.vectors.fragment_index import fragment_rows
from raggedatlas.vectors.geometry import CrossLinks, Fragments, Level, Links
from raggedatlas.vectors.grids import KeyIndex
from raggedatlas.vectors.shapes import Attributes, concat_attributes


def merge_local_links(level: Level) -> Level:
    """Return a level whose links of delta 0 across chunks have ends in several chunks.

    Raises
    ------
    SourceError
        If links within chunks have another number of ends than those across them.
    """
    crossing = next((links for links in level.cross_links if links.delta == 0), None)
    if crossing is None:
        return level
    apart = (crossing.chunks != crossing.chunks[:, :1]).any(axis=(1, 2))
    if apart.all():
        return level
    others = tuple(links for links in level.cross_links if links.delta)
    left = () if not apart.any() else (_select_links(crossing, np.flatnonzero(apart)),)
    return replace(
        level,
        links=_append_local_links(level, _select_links(crossing, np.flatnonzero(~apart))),
        cross_links=(*left, *others),
    )


def _select_links(links: CrossLinks, which: NDArray[np.int64]) -> CrossLinks:
    """Return some of the links."""
    attributes = {name: attribute.take(which) for name, attribute in links.attributes.items()}
    return replace(links, chunks=links.chunks[which], rows=links.rows[which], attributes=attributes)


def _append_local_links(level: Level, more: CrossLinks) -> Links:
    """Return the links within chunks with these among them, sorted by the fragment of their first end."""
    chunk = KeyIndex(level.chunks).find(more.chunks[:, 0])
    own = level.links
    rows, places, attributes, counts = [more.rows], [chunk], [more.attributes], [more.n_links]
    if own is not None:
        if own.width != more.width:
            raise SourceError(
                f"Links within chunks have {own.width} ends, those across them {more.width}; expected the same."
            )
        rows.insert(0, own.rows.astype(np.int64))
        places.insert(0, np.repeat(np.arange(len(level.chunks)), np.diff(own.bounds)))
        attributes.insert(0, own.attributes)
        counts.insert(0, len(own.rows))
    ends, chunk = np.concatenate(rows), np.concatenate(places)
    values: Attributes = concat_attributes(attributes, counts)
    fragments = level.fragments
    if fragments is None:
        ones = np.arange(len(level.chunks) + 1)
        fragments = Fragments(ones, np.ones(len(ones) - 1, bool), 0 * ones[1:], np.diff(level.bounds), ones[:0])
    owner = _vertex_fragments(level, fragments)[level.bounds[chunk] + ends[:, 0]]
    order = np.lexsort((owner, chunk))
    bounds = np.searchsorted(chunk[order], np.arange(len(level.chunks) + 1)).astype(np.int64)
    sizes = np.bincount(owner, minlength=fragments.n_fragments).astype(np.int64)
    starts = counts_to_offsets(sizes)[:-1] - np.repeat(bounds[:-1], np.diff(fragments.bounds))
    parts = Fragments(fragments.bounds, np.ones(len(sizes), bool), starts, sizes, np.zeros(0, np.int64))
    kind = smallest_unsigned_dtype(int(np.diff(level.bounds).max(initial=0)))
    return Links(bounds, ends[order].astype(kind), parts, {name: value.take(order) for name, value in values.items()})


def _vertex_fragments(level: Level, fragments: Fragments) -> NDArray[np.int64]:
    """Return the first fragment of each vertex; that of its chunk where it is in none."""
    every = np.arange(fragments.n_fragments)
    local, counts = fragment_rows(fragments, every)
    chunk = np.repeat(np.arange(len(level.chunks)), np.diff(fragments.bounds))
    rows = local + np.repeat(level.bounds[chunk], counts)
    owner = np.repeat(fragments.bounds[:-1], np.diff(level.bounds))
    owner[rows[::-1]] = np.repeat(every, counts)[::-1]
    return owner
