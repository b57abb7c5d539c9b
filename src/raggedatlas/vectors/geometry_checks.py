"""What is refused before a geometry is written: arrays that do not fit together (seed 002 §7)."""

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError, ValuesError
from raggedatlas.vectors.fragment_index import fragment_rows
from raggedatlas.vectors.geometry import CrossLinks, Fragments, Geometry, Level, Objects
from raggedatlas.vectors.grids import KeyIndex
from raggedatlas.vectors.manifests import LIST, find_missing_blocks
from raggedatlas.vectors.publish import validate_key
from raggedatlas.vectors.shapes import POSITION_TYPES, Attributes, check_rows


def check_geometry(geometry: Geometry) -> None:
    """Refuse a geometry whose arrays do not fit together.

    Raises
    ------
    SourceError
        Naming the level and the array.
    ValuesError
        If a position is not finite.
    """
    if not geometry.levels:
        raise SourceError("A geometry store has one level or more.")
    for k, level in enumerate(geometry.levels):
        _check_level(level, f"Level {k}", geometry.n_dims)
        deltas = [links.delta for links in level.cross_links]
        if len(set(deltas)) < len(deltas):
            raise SourceError(
                f"Level {k} has links across chunks twice for one of the differences {deltas}; join them."
            )
        for links in level.cross_links:
            if not 0 <= k + links.delta < len(geometry.levels):
                raise SourceError(f"Level {k} has links to level {k + links.delta}, which is not there.")
            if links.delta and geometry.cross_level_storage == "none":
                raise SourceError(f"Level {k} has links across levels, but cross_level_storage is 'none'.")
            _check_ends(geometry, k, links)
    one_chunk = all(len(level.chunks) <= 1 for level in geometry.levels)
    if geometry.index_convention == "identity" and not one_chunk:
        raise SourceError("The identity convention needs exactly one chunk; write an object index.")


def _check_level(level: Level, where: str, n_dims: int) -> None:
    """Check the arrays of one level."""
    positions = level.positions
    if positions.ndim != 2 or positions.shape[1] != n_dims or positions.dtype.name not in POSITION_TYPES:
        raise SourceError(
            f"{where}: positions are {positions.dtype} of the shape {positions.shape}; expected (N, {n_dims})."
        )
    if positions.dtype.kind == "f" and not np.isfinite(positions).all():
        raise ValuesError(f"{where}: a position is not finite.")
    _check_bounds(level.bounds, len(level.chunks), len(positions), f"{where}: vertices")
    if len(level.chunks) > 1 and not _is_ascending(level.chunks):
        raise SourceError(f"{where}: chunk keys do not ascend.")
    check_rows(level.vertex_attributes, len(positions), "vertex")
    sizes = np.diff(level.bounds)
    if level.fragments is not None:
        _check_fragments(level.fragments, sizes, f"{where}: vertex_fragments")
        check_rows(level.fragment_attributes, level.fragments.n_fragments, "fragment")
    links = level.links
    if links is not None:
        _check_bounds(links.bounds, len(level.chunks), len(links.rows), f"{where}: links")
        limit = np.repeat(sizes, np.diff(links.bounds))
        if ((links.rows < 0) | (links.rows >= limit[:, None])).any():
            raise SourceError(f"{where}: a link names a row that its chunk does not have.")
        check_rows(links.attributes, len(links.rows), "link")
        if links.fragments is not None:
            _check_fragments(links.fragments, np.diff(links.bounds), f"{where}: link_fragments")
    if level.objects is not None:
        check_rows(level.object_attributes, level.objects.n_objects, "object")
        _check_objects(level, level.objects, where)
    if level.groups is not None:
        check_rows(level.groups.attributes, level.groups.n_groups, "group")
    _check_names(level)


def _check_objects(level: Level, objects: Objects, where: str) -> None:
    """Refuse an object index that names chunks or fragments that are not there."""
    n_blocks, n_parts = len(objects.starts), level.chunks.shape[1]
    _check_bounds(objects.bounds, objects.n_objects, n_blocks, f"{where}: object index")
    lengths = {len(objects.modes), len(objects.counts), len(objects.chunks)}
    if lengths != {n_blocks} or objects.chunks.shape[1:] != (n_parts,):
        raise SourceError(
            f"{where}: the object index has {n_blocks} starts, and chunks of the shape {objects.chunks.shape}; expected modes, counts "
            f"and chunks for each, of {n_parts} parts."
        )
    listed = objects.modes == LIST
    if (objects.modes > LIST).any() or (objects.counts < 0).any() or (objects.starts < 0).any():
        raise SourceError(f"{where}: the object index has an unknown mode, or a negative start or count.")
    if (objects.starts[listed] > len(objects.fragments) - objects.counts[listed]).any():
        raise SourceError(f"{where}: a list of the object index goes beyond the fragments that are given.")
    at = KeyIndex(level.chunks).find(objects.chunks) if len(level.chunks) else np.full(n_blocks, -1)
    ones = np.ones(len(level.chunks), np.int64)
    sizes = ones if level.fragments is None else np.diff(level.fragments.bounds)
    bad = np.flatnonzero(find_missing_blocks(objects, np.append(sizes, 0)[at]))
    if bad.size:
        owner = objects.ids[np.searchsorted(objects.bounds, bad[0], side="right") - 1]
        raise SourceError(
            f"{where}: object {owner} names a fragment of chunk {objects.chunks[bad[0]].tolist()} that is not there; expected one of "
            f"the {np.append(sizes, 0)[at[bad[0]]]} fragments of that chunk."
        )


def _check_names(level: Level) -> None:
    """Refuse names of attributes that may not become part of a path."""
    families: list[Attributes] = [level.vertex_attributes, level.fragment_attributes, level.object_attributes]
    families += [links.attributes for links in (level.links, *level.cross_links) if links is not None]
    if level.groups is not None:
        families.append(level.groups.attributes)
    for names in families:
        for name in names:
            validate_key(name.replace("/", "\\"))


def _check_ends(geometry: Geometry, k: int, links: CrossLinks) -> None:
    """Refuse links across chunks whose arrays do not go together, or that name a chunk or a row that is not there."""
    level = geometry.levels[k]
    n_parts = level.chunks.shape[1]
    if links.rows.ndim != 2 or links.chunks.shape != (*links.rows.shape, n_parts):
        raise SourceError(
            f"Level {k}: links across chunks have rows of the shape {links.rows.shape} and chunks of {links.chunks.shape}; "
            f"expected (links, ends) and (links, ends, {n_parts})."
        )
    check_rows(links.attributes, links.n_links, "cross-chunk link")
    for end in range(links.width):
        target = level if end == 0 else geometry.levels[k + links.delta]
        place = KeyIndex(target.chunks).find(links.chunks[:, end])
        rows = links.rows[:, end]
        sizes = np.append(np.diff(target.bounds), 0)
        if ((place < 0) | (rows < 0) | (rows >= sizes[place])).any():
            raise SourceError(f"Level {k}: a link across chunks names a chunk or a row that is not there.")


def _check_bounds(bounds: NDArray[np.int64], n_chunks: int, total: int, what: str) -> None:
    """Refuse bounds that do not go from 0 to the number of rows."""
    fits = len(bounds) == n_chunks + 1 and bounds[0] == 0 and bounds[-1] == total and (np.diff(bounds) >= 0).all()
    if not fits:
        raise SourceError(f"{what}: bounds do not cut {total} rows into {n_chunks} chunks.")


def _check_fragments(fragments: Fragments, sizes: NDArray[np.int64], what: str) -> None:
    """Refuse fragments with rows that their chunk does not have."""
    _check_bounds(fragments.bounds, len(sizes), fragments.n_fragments, what)
    if (fragments.starts < 0).any() or (fragments.counts < 0).any():
        raise SourceError(f"{what}: a start or a count is negative.")
    limit = np.repeat(sizes, np.diff(fragments.bounds))
    ends = fragments.starts + fragments.counts
    if (ends[fragments.is_range] > limit[fragments.is_range]).any():
        raise SourceError(f"{what}: a run goes beyond the rows of its chunk.")
    listed = np.flatnonzero(~fragments.is_range)
    if (ends[listed] > len(fragments.rows)).any():
        raise SourceError(f"{what}: a list goes beyond the rows that are given.")
    rows, counts = fragment_rows(fragments, listed)
    if ((rows < 0) | (rows >= np.repeat(limit[listed], counts))).any():
        raise SourceError(f"{what}: a list names a row that its chunk does not have.")


def _is_ascending(keys: NDArray[np.int64]) -> bool:
    """Tell whether keys ascend, first part first, each once."""
    steps = np.diff(keys, axis=0)
    first = (steps != 0).argmax(axis=1)
    return bool((steps[np.arange(len(steps)), first] > 0).all())
