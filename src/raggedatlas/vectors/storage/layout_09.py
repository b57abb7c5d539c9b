"""Writer of layout 0.9: one array for each family of a level, with one byte string per chunk."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.vectors.chunking import smallest_unsigned_dtype
from raggedatlas.vectors.geometry import CrossLinks, Fragments, Geometry, Level
from raggedatlas.vectors.grids import chunk_coordinates
from raggedatlas.vectors.metadata import level_chunk_shape, level_json, level_scale
from raggedatlas.vectors.shapes import Attributes, Groups, counts_to_offsets, fill_value
from raggedatlas.vectors.storage.codecs import Blobs, encode_manifests, encode_single_groups, to_bytes
from raggedatlas.vectors.storage.cross_links import encode_cross_links
from raggedatlas.vectors.storage.zarr_writer import (
    ArrayData,
    CellGridOptions,
    File,
    attribute_metadata,
    cell_array,
    chunk_arrays,
    encode_rows,
    group_json,
    present_families,
    small_array,
    vlen_array,
)

MIN_RANGE_LENGTH = 16
"""Minimum number of consecutive ids for which a group is stored as a range in ``group_ranges``."""

_FRAMED = {"vertex_fragments", "link_fragments"}


def level_files(geometry: Geometry, k: int, options: CellGridOptions) -> Iterator[File]:
    """Yield the files of one level; `options` give the file layout of cells, without the grid, which is added here."""
    level = geometry.levels[k]
    grid = _grid_of(geometry, level, options)
    # By default, `_compression` chooses for each family, and links across chunks are not compressed.
    if grid.compression == "default":
        grid = replace(grid, compression=None)
    root = str(k)
    facts = level_json(level, k, present_families(level))
    if level.fragments is not None and _fragments_tile(level.fragments, level):
        facts["zarr_vectors_level"]["fragments_tile"] = True
    yield group_json(root, facts)
    result: set[str] = set()
    zero = ".".join("0" for _ in range(level.chunks.shape[1]))
    for family in chunk_arrays(level):
        path, block = _layout_array(family, level, zero)
        # Local files are created with mode "x", so a key that is yielded twice is an error.
        for parent in _parents(path):
            if parent not in result and not _is_link_group(parent):
                result.add(parent)
                yield group_json(f"{root}/{parent}", {})
        own = replace(grid, compression=_compression(level, family, options.compression))
        yield from cell_array(f"{root}/{path}", level.chunks, family.blobs, block, own)
    yield from _link_files(geometry, k, grid, result)
    yield from _object_files(root, level)
    yield from _group_files(root, level)


def _compression(level: Level, family: ArrayData, asked: str | None) -> str | None:
    """Return the compression of the chunks of a family.

    By default only vertex attributes of points without objects are compressed: they are read by chunk (those of objects by row,
    directly from the file), and their values, such as the genes of transcripts, are often small integers.
    """
    if family.dtype is None:
        return None
    if asked != "default":
        return asked
    return "lz4" if level.objects is None and family.path.startswith("vertex_attributes/") else None


def _parents(path: str) -> list[str]:
    """Return the groups above an array, below its level."""
    parts = path.split("/")
    return ["/".join(parts[:i]) for i in range(1, len(parts))]


def _is_link_group(path: str) -> bool:
    """Return whether a group has metadata of links and is written with them."""
    parts = path.split("/")
    return (parts[0] == "links" and len(parts) == 2) or (parts[0] == "link_attributes" and len(parts) == 3)


def _grid_of(geometry: Geometry, level: Level, options: CellGridOptions) -> CellGridOptions:
    """Return the grid of a level: from the first to the last chunk of bounds and data."""
    shape = level_chunk_shape(geometry, level.metadata)
    ends = chunk_coordinates(np.asarray(geometry.bounds, np.float64), shape)
    lead = level.chunks.shape[1] - len(shape)
    corners = np.concatenate([np.zeros((2, lead), np.int64), ends], axis=1)
    # Vertices may be outside the bounds (V112 is a `should`), so the grid spans both.
    all_keys = np.concatenate([corners, level.chunks])
    low, high = all_keys.min(axis=0), all_keys.max(axis=0)
    return replace(options, origin=low, shape=high - low + 1)


def _fragments_tile(fragments: Fragments, level: Level) -> bool:
    """Return whether the fragments of every chunk are its rows in order."""
    if not fragments.is_range.all() or len(fragments.bounds) != len(level.bounds):
        return False
    ends = counts_to_offsets(fragments.counts)
    counted = np.diff(ends[fragments.bounds])
    # Starts are chunk-local, while `ends` counts through all chunks.
    base = np.repeat(ends[fragments.bounds[:-1]], np.diff(fragments.bounds))
    return bool((counted == np.diff(level.bounds)).all() and (fragments.starts == ends[:-1] - base).all())


def _layout_array(family: ArrayData, level: Level, zero: str) -> tuple[str, dict[str, Any]]:
    """Return path and attributes of a family in this layout."""
    path, block = family.path, dict(family.attributes)
    if path in _FRAMED:
        block["encoding"] = "fragment_index_v1"
    if block["zv_array"] in {"attribute", "fragment_attribute", "link_attribute"}:
        block["row_shape"] = block.pop("shape")
    if path == "links/0" or path.startswith("link_attributes/"):
        width = 1 if level.links is None else level.links.width
        offsets = [[0] * level.chunks.shape[1]] * (width - 1)
        path += "/" + ("_".join([zero] * (width - 1)) or "self")
        block["offsets"] = offsets
        # The number of links is declared once, by the group of the delta, see `_link_files`.
        block.pop("num_links", None)
        if family.path == "links/0":
            block["has_perm"] = False
    return path, block


def _link_files(geometry: Geometry, k: int, grid: CellGridOptions, made: set[str]) -> Iterator[File]:
    """Yield the groups of links, and the arrays of those across chunks and levels."""
    level, root = geometry.levels[k], str(k)
    crossing = {links.delta: links for links in level.cross_links}
    deltas = sorted({*crossing, *([0] if level.links is not None else [])})
    if deltas and "links" not in made:
        yield group_json(f"{root}/links", {})
    names: set[str] = set()
    for delta in deltas:
        links = crossing.get(delta)
        inner = level.links if delta == 0 else None
        n_inner = 0 if inner is None else len(inner.rows)
        width = links.width if links is not None else inner.width if inner is not None else 2
        own = {name for part in (inner, links) if part is not None for name in part.attributes}
        n_links = n_inner + (0 if links is None else links.n_links)
        n_records = n_inner
        if links is not None:
            scales = _level_scale(geometry, level, k), _level_scale(geometry, level, k + delta)
            segments = encode_cross_links(
                links.chunks, links.rows, delta, scales, directed=links.directed, store=links.store
            )
            n_records += sum(len(segment.rows) for segment in segments)
            yield from _segment_files(root, links, segments, grid)
        yield group_json(
            f"{root}/links/{delta_name(delta)}",
            {
                "zv_array": "links_family",
                "level_delta": delta,
                "link_width": width,
                "directed": bool(links.directed) if links is not None else False,
                "store": links.store if links is not None else "canonical",
                "sid_ndim": int(level.chunks.shape[1]),
                "num_links": n_links,
                "num_physical_records": n_records,
            },
        )
        names |= own
        for name in sorted(own):
            facts = {"zv_array": "link_attribute_family", "name": name, "level_delta": delta, "num_links": n_links}
            yield group_json(f"{root}/link_attributes/{name}/{delta_name(delta)}", facts)
    if names and "link_attributes" not in made:
        yield group_json(f"{root}/link_attributes", {})
    for name in sorted(names):
        if f"link_attributes/{name}" not in made:
            yield group_json(f"{root}/link_attributes/{name}", {})


def _level_scale(geometry: Geometry, level: Level, k: int) -> Any:  # noqa: ANN401 - an array
    """Return the scale of level `k` if it exists, otherwise that of `level`."""
    metadata = geometry.levels[k].metadata if 0 <= k < len(geometry.levels) else level.metadata
    return level_scale(geometry, metadata, level.chunks.shape[1])


def delta_name(delta: int) -> str:
    """Format a level difference: 0, +1, -1."""
    return f"{delta:+d}" if delta else "0"


def _segment_files(root: str, links: CrossLinks, segments: list[Any], grid: CellGridOptions) -> Iterator[File]:
    """Yield the arrays of links across chunks, and of their attributes."""
    # Of the records, not of `links.rows`: their first column may be a permutation number, up to width! - 1.
    kind = smallest_unsigned_dtype(max((int(segment.rows.max(initial=0)) for segment in segments), default=0) + 1)
    for segment in segments:
        path = f"{root}/links/{delta_name(links.delta)}/{segment.name}"
        block = {
            "zv_array": "links",
            "dtype": kind.name,
            "offsets": segment.offsets.tolist(),
            "has_perm": segment.has_permutation,
            "link_width": links.width,
            "level_delta": links.delta,
        }
        rows = segment.rows.astype(kind)
        blobs = encode_single_groups(encode_rows(rows, segment.bounds))
        yield from cell_array(path, segment.cells, blobs, block, grid)
        for name, attribute in links.attributes.items():
            values = attribute.values[segment.record]
            own = attribute_metadata("link_attribute", name, attribute, list(values.shape[1:]))
            own["row_shape"] = own.pop("shape")
            own |= {"offsets": segment.offsets.tolist(), "level_delta": links.delta}
            at = f"{root}/link_attributes/{name}/{delta_name(links.delta)}/{segment.name}"
            yield from cell_array(at, segment.cells, encode_rows(values, segment.bounds), own, grid)


def _object_files(root: str, level: Level) -> Iterator[File]:
    """Yield the object index and the attributes of objects."""
    objects = level.objects
    if objects is not None:
        n_dims = int(objects.chunks.shape[1])
        block: dict[str, Any] = {
            "zv_array": "object_index",
            "num_objects": objects.n_objects,
            "num_present": int(np.count_nonzero(np.diff(objects.bounds))),
            "sid_ndim": n_dims,
            "layout": "vlen_manifests_v1" if objects.has_dense_ids else "vlen_manifests_v2",
        }
        if not objects.has_dense_ids:
            block["object_ids_sorted"] = True
            yield from small_array(f"{root}/object_index/object_ids", objects.ids, {})
        yield group_json(f"{root}/object_index", block)
        yield from vlen_array(f"{root}/object_index/manifests", encode_manifests(objects), {})
    yield from _tables(root, "object_attributes", "object_attribute", level.object_attributes)


def _tables(root: str, family: str, kind: str, attributes: Attributes) -> Iterator[File]:
    """Yield attributes as plain arrays; absent rows hold the array's fill value."""
    if attributes:
        yield group_json(f"{root}/{family}", {})
    for name, attribute in attributes.items():
        block = attribute_metadata(kind, name, attribute, list(attribute.values.shape))
        values, fill = attribute.values, fill_value(attribute.values.dtype)
        # Readers then take every row equal to the fill value as absent, even if it was given as a value. Attributes of groups
        # have the key only if a row is absent.
        if kind == "object_attribute" or attribute.present is not None:
            block["fill_sentinel_meaning"] = "absent"
        if attribute.present is not None:
            values = values.copy()
            values[~attribute.present] = fill
        yield from small_array(f"{root}/{family}/{name}", values, block, fill)


def _group_files(root: str, level: Level) -> Iterator[File]:
    """Yield the groups of objects and their attributes."""
    groups = level.groups
    if groups is None:
        return
    block: dict[str, Any] = {"zv_array": "groups", "num_groups": groups.n_groups}
    run = _is_range(groups)
    firsts = groups.offsets[:-1][run]
    ranges = np.stack([groups.ids[firsts], groups.ids[groups.offsets[1:][run] - 1] + 1], axis=1)
    if run.any():
        block["group_ranges"] = dict(zip(map(str, np.flatnonzero(run).tolist()), ranges.tolist(), strict=True))
    counts = np.diff(groups.offsets)
    # A group stored as a range keeps an empty row, so the numbers of the other groups do not change.
    listed = groups.ids[~np.repeat(run, counts)]
    blobs = Blobs(to_bytes(listed), counts_to_offsets(np.where(run, 0, counts)) * 8)
    yield from vlen_array(f"{root}/groups", blobs, block)
    yield from _tables(root, "group_attributes", "groupings_attribute", groups.attributes)


def _is_range(groups: Groups) -> NDArray[np.bool_]:
    """Return which groups are consecutive ids and long enough to be stored as a range: (G,) bool."""
    first, counts = groups.offsets[:-1], np.diff(groups.offsets)
    run = counts >= MIN_RANGE_LENGTH
    # Counts the steps other than 1: ids are consecutive between two places with equal counts.
    broken = np.concatenate([[0], np.cumsum(np.diff(groups.ids) != 1)])
    run[run] = broken[first[run]] == broken[first[run] + counts[run] - 1]
    return np.asarray(run)
