"""Files of a level in both layouts: 0.7 (seed 002) has an array for each chunk of a family, 0.9 one array for all of them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.vectors.chunking import (
    chunk_coordinates,
    encode_keys,
    run_starts,
    smallest_unsigned_dtype,
    stable_order,
)
from raggedatlas.vectors.geometry import CrossLinks, Geometry, Level, level_chunk_shape, level_json, level_scale
from raggedatlas.vectors.shapes import Attribute, Attributes, Groups, counts_to_offsets, fill_value
from raggedatlas.vectors.storage.codecs import (
    STRINGS,
    Blobs,
    are_tiles,
    encode_groups,
    encode_manifests,
    encode_ragged,
    encode_records,
    encode_single_groups,
    to_bytes,
)
from raggedatlas.vectors.storage.cross_links import OffsetSegment, delta_name, encode_cross_links, select_links
from raggedatlas.vectors.storage.zarr_writer import (
    ArrayData,
    CellGridOptions,
    File,
    attribute_metadata,
    cell_array,
    chunk_arrays,
    encode_rows,
    group_json,
    plain_array,
    present_families,
    vlen_array,
)

MIN_RANGE_LENGTH = 16
"""Minimum number of consecutive ids for which a group is stored as a range in ``group_ranges``."""

_ROWS = 65_536
"""Rows of a chunk of a table in layout 0.9."""


def level_files(geometry: Geometry, k: int, layout: str, *, shards: bool, compression: str | None) -> Iterator[File]:
    """Yield the files of one level."""
    if layout == "0.7":
        return _level_files_07(geometry, k, compression)
    return _level_files_09(geometry, k, shards=shards, compression=compression)


def with_parent_groups(files: Iterable[File]) -> Iterator[File]:
    """Yield files, followed by those of the groups above their nodes that are not among them."""
    nodes: set[str] = set()
    for key, pieces in files:
        if key.endswith("/zarr.json"):
            nodes.add(key.removesuffix("/zarr.json"))
        yield key, pieces
    parents = {"/".join(parts[:i]) for parts in (node.split("/") for node in nodes) for i in range(1, len(parts))}
    for parent in sorted(parents - nodes):
        yield group_json(parent, {})


# Layout 0.7


def _level_files_07(geometry: Geometry, k: int, compression: str | None) -> Iterator[File]:
    level, root = geometry.levels[k], str(k)
    has_links = level.links is not None and level.encoding != "draco"  # Draco cells include the faces
    has_links = has_links or any(not _crosses_chunks(links).all() for links in level.cross_links)
    present = [name for name in present_families(level) if name != "links" or has_links]
    if any(_crosses_chunks(links).any() for links in level.cross_links):
        present += ["cross_chunk_links"]
    yield group_json(root, level_json(level, k, present))
    names = [".".join(map(str, key)) for key in level.chunks.tolist()]
    for family in chunk_arrays(level):
        yield group_json(f"{root}/{family.path}", family.attributes)
        for i, name in enumerate(names):
            blob = family.blobs[i]
            # The arrays of a group are the list of its chunks, so an empty chunk must not have one.
            if not blob.size:
                continue
            values = blob if family.dtype is None else blob.view(family.dtype.newbyteorder("<"))
            if family.columns is not None and family.dtype is not None:
                values = values.reshape(-1, family.columns)
            codec = None if family.dtype is None else compression
            yield from plain_array(f"{root}/{family.path}/{name}", values, {}, codec)
    for links in level.cross_links:
        yield from _cross_files_07(root, links, compression)
    yield from _object_files_07(root, level, compression)


def _crosses_chunks(links: CrossLinks) -> NDArray[np.bool_]:
    """Return which links are stored in ``cross_chunk_links``: those whose ends have different chunk keys."""
    # All links of delta 0 are stored there, also those whose ends share a chunk (V081 is a `should`).
    if links.delta == 0:
        return np.ones(links.n_links, bool)
    return np.asarray((links.chunks != links.chunks[:, :1]).any(axis=(1, 2)))


def _cross_files_07(root: str, links: CrossLinks, compression: str | None) -> Iterator[File]:
    """Yield links across chunks, and those across levels within one chunk key, in the order of their ends.

    Layout 0.9 sorts links by chunk and does not preserve their order, so any other order would be lost there.
    """
    ends = encode_records(links.chunks, links.rows).reshape(links.n_links, -1)
    # The last key of `lexsort` counts first, so the columns are reversed.
    links = select_links(links, np.lexsort(ends.T[::-1]) if links.n_links else np.zeros(0, np.int64))
    crosses_chunks, name = _crosses_chunks(links), delta_name(links.delta)
    block: dict[str, Any] = {"level_delta": links.delta, "link_width": links.width}
    inner = select_links(links, np.flatnonzero(~crosses_chunks))
    links = select_links(links, np.flatnonzero(crosses_chunks))
    if links.n_links:
        own: dict[str, Any] = {"num_links": links.n_links, "sid_ndim": int(links.chunks.shape[2])}
        if links.directed or links.store != "canonical":
            own |= {"directed": links.directed, "store": links.store}
        yield group_json(f"{root}/cross_chunk_links/{name}", {"zv_array": "cross_chunk_links", **block, **own})
        records = encode_records(links.chunks, links.rows)
        yield from plain_array(f"{root}/cross_chunk_links/{name}/data", records, {}, compression)
        for title, attribute in links.attributes.items():
            path = f"{root}/cross_chunk_link_attributes/{title}/{name}"
            facts = attribute_metadata("cross_chunk_link_attribute", title, attribute, list(attribute.values.shape))
            yield group_json(path, facts | {"num_links": links.n_links, "level_delta": links.delta})
            yield from plain_array(f"{path}/data", attribute.values, {}, compression)
    if inner.n_links:
        facts = {"num_links": inner.n_links, "dtype": "int64", "record_encoding": "ragged_rows"}
        yield group_json(f"{root}/links/{name}", {"zv_array": "links", **block, **facts})
        yield from _level_links_07(root, inner, compression)


def _level_links_07(root: str, links: CrossLinks, compression: str | None) -> Iterator[File]:
    """Yield links across levels whose ends have the same chunk key: rows in that chunk, as an inline stream."""
    name = delta_name(links.delta)
    codes, top = encode_keys(links.chunks[:, 0])
    links = select_links(links, stable_order(codes, top))
    # Sorted codes have the same runs as the links, which are sorted by these codes.
    first = run_starts(np.sort(codes))
    parts = [slice(int(a), int(b)) for a, b in zip(first, [*first[1:], links.n_links], strict=True)]
    keys = [".".join(map(str, links.chunks[part.start, 0].tolist())) for part in parts]
    for key, part in zip(keys, parts, strict=True):
        stream = np.frombuffer(encode_ragged(to_bytes(links.rows[part])), np.uint8)
        yield from plain_array(f"{root}/links/{name}/{key}", stream, {}, None)
    for title, attribute in links.attributes.items():
        path = f"{root}/link_attributes/{title}/{name}"
        own = attribute_metadata("link_attribute", title, attribute, list(attribute.values.shape[1:]))
        yield group_json(path, own | {"level_delta": links.delta})
        for key, part in zip(keys, parts, strict=True):
            yield from plain_array(f"{path}/{key}", attribute.values[part], {}, compression)


def _object_files_07(root: str, level: Level, compression: str | None) -> Iterator[File]:
    """Yield the object index, the groups, their sidecars, and the attributes of both."""
    objects, groups = level.objects, level.groups
    if objects is not None:
        block = {"num_objects": objects.n_objects, "sid_ndim": int(objects.chunks.shape[1])}
        yield group_json(f"{root}/object_index", {"zv_array": "object_index", **block})
        blobs = encode_manifests(objects)
        yield from plain_array(f"{root}/object_index/data", blobs.data, {}, None)
        # Optional for readers of this package, but zarr-vectors 0.2.0 needs them to find a manifest.
        yield from plain_array(f"{root}/object_index/offsets", blobs.bounds[:-1], {}, None)
        if not objects.has_dense_ids:
            yield from plain_array(f"{root}/object_index/object_ids", objects.ids, {}, None)
    yield from _tables_07(f"{root}/object_attributes", "object_attribute", level.object_attributes, compression)
    if groups is not None:
        yield group_json(f"{root}/groups", {"zv_array": "groups", "num_groups": groups.n_groups})
        data, starts = encode_groups(groups.offsets, groups.ids)
        yield from plain_array(f"{root}/groups/data", np.frombuffer(data, np.uint8), {}, None)
        yield from plain_array(f"{root}/groups/offsets", starts, {}, None)
        yield from _tables_07(f"{root}/group_attributes", "groupings_attribute", groups.attributes, compression)


def _tables_07(path: str, kind: str, attributes: Attributes, compression: str | None) -> Iterator[File]:
    """Yield attributes of objects or groups; strings are encoded as codes with categories."""
    for name, attribute in attributes.items():
        result = _encode_strings(attribute)
        block = attribute_metadata(kind, name, result, list(result.values.shape))
        if result.present is not None:
            block["has_present_mask"] = True
            yield from plain_array(f"{path}/{name}/present_mask", result.present.astype(np.uint8), {}, None)
        yield group_json(f"{path}/{name}", block)
        yield from plain_array(f"{path}/{name}/data", _filled(result), {}, compression)


def _filled(attribute: Attribute) -> NDArray[Any]:
    """Return the values of an attribute, with the fill value in absent rows."""
    if attribute.present is None:
        return attribute.values
    # The attribute may hold an array of the caller, which must not change.
    values = attribute.values.copy()
    values[~attribute.present] = fill_value(values.dtype)
    return values


def _encode_strings(attribute: Attribute) -> Attribute:
    """Return strings as codes; other attributes are unchanged."""
    if attribute.values.dtype.kind not in "UTO":
        return attribute
    texts = attribute.values.astype(str)
    categories, codes = np.unique(texts.reshape(-1), return_inverse=True)
    own = {"encoding": "dictionary", "categories": categories.tolist(), "ordered": False, STRINGS: True}
    values = codes.reshape(texts.shape).astype(np.int32)
    return Attribute(values, attribute.channels, attribute.present, {**attribute.metadata, **own})


# Layout 0.9


def _level_files_09(geometry: Geometry, k: int, *, shards: bool, compression: str | None) -> Iterator[File]:
    level, root = geometry.levels[k], str(k)
    # By default, `_compression` chooses for each family, and links across chunks are not compressed.
    grid = _grid_of(geometry, level, shards=shards, compression=None if compression == "default" else compression)
    facts = level_json(level, k, present_families(level))
    if level.fragments is not None and are_tiles(level.fragments, level.bounds):
        facts["zarr_vectors_level"]["fragments_tile"] = True
    yield group_json(root, facts)
    zero = ".".join("0" for _ in range(level.chunks.shape[1]))
    for family in chunk_arrays(level):
        path, block = _array_09(family, level, zero)
        own = replace(grid, compression=_compression(level, family, compression))
        yield from cell_array(f"{root}/{path}", level.chunks, family.blobs, block, own)
    yield from _link_files_09(geometry, k, grid)
    yield from _object_files_09(root, level)


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


def _grid_of(geometry: Geometry, level: Level, *, shards: bool, compression: str | None) -> CellGridOptions:
    """Return the grid of a level: from the first to the last chunk of bounds and data."""
    shape = level_chunk_shape(geometry, level.metadata)
    ends = chunk_coordinates(np.asarray(geometry.bounds, np.float64), shape)
    lead = level.chunks.shape[1] - len(shape)
    corners = np.concatenate([np.zeros((2, lead), np.int64), ends], axis=1)
    # Vertices may be outside the bounds (V112 is a `should`), so the grid spans both.
    all_keys = np.concatenate([corners, level.chunks])
    low, high = all_keys.min(axis=0), all_keys.max(axis=0)
    return CellGridOptions(low, high - low + 1, shards, compression)


def _array_09(family: ArrayData, level: Level, zero: str) -> tuple[str, dict[str, Any]]:
    """Return path and attributes of a family in layout 0.9."""
    path, block = family.path, dict(family.attributes)
    if path in {"vertex_fragments", "link_fragments"}:
        block["encoding"] = "fragment_index_v1"
    if block["zv_array"] in {"attribute", "fragment_attribute", "link_attribute"}:
        block["row_shape"] = block.pop("shape")
    if path == "links/0" or path.startswith("link_attributes/"):
        width = 1 if level.links is None else level.links.width
        path += "/" + ("_".join([zero] * (width - 1)) or "self")
        block["offsets"] = [[0] * level.chunks.shape[1]] * (width - 1)
        # The number of links is declared once, by the group of the delta, see `_link_files_09`.
        block.pop("num_links", None)
        if family.path == "links/0":
            block["has_perm"] = False
    return path, block


def _link_files_09(geometry: Geometry, k: int, grid: CellGridOptions) -> Iterator[File]:
    """Yield the groups of links, and the arrays of those across chunks and levels."""
    level, root = geometry.levels[k], str(k)
    crossing = {links.delta: links for links in level.cross_links}
    n_parts = level.chunks.shape[1]
    for delta in sorted({*crossing, *([0] if level.links is not None else [])}):
        links = crossing.get(delta)
        inner = level.links if delta == 0 else None
        parts = [part for part in (links, inner) if part is not None]
        n_links = n_records = sum(len(part.rows) for part in parts)
        if links is not None:
            other = geometry.levels[k + delta] if 0 <= k + delta < len(geometry.levels) else level
            scales = level_scale(geometry, level.metadata, n_parts), level_scale(geometry, other.metadata, n_parts)
            segments = encode_cross_links(
                links.chunks, links.rows, delta, scales, directed=links.directed, store=links.store
            )
            n_records += sum(len(segment.rows) for segment in segments) - links.n_links
            yield from _segment_files_09(root, links, segments, grid)
        block = {
            "zv_array": "links_family",
            "level_delta": delta,
            "link_width": parts[0].width,
            "directed": bool(links.directed) if links is not None else False,
            "store": links.store if links is not None else "canonical",
            "sid_ndim": int(n_parts),
            "num_links": n_links,
            "num_physical_records": n_records,
        }
        yield group_json(f"{root}/links/{delta_name(delta)}", block)
        for name in sorted({name for part in parts for name in part.attributes}):
            facts = {"zv_array": "link_attribute_family", "name": name, "level_delta": delta, "num_links": n_links}
            yield group_json(f"{root}/link_attributes/{name}/{delta_name(delta)}", facts)


def _segment_files_09(
    root: str, links: CrossLinks, segments: list[OffsetSegment], grid: CellGridOptions
) -> Iterator[File]:
    """Yield the arrays of links across chunks, and of their attributes."""
    # Of the records, not of `links.rows`: their first column may be a permutation number, up to width! - 1.
    kind = smallest_unsigned_dtype(max((int(segment.rows.max(initial=0)) for segment in segments), default=0) + 1)
    for segment in segments:
        tail = f"{delta_name(links.delta)}/{segment.name}"
        block: dict[str, Any] = {"offsets": segment.offsets.tolist(), "level_delta": links.delta}
        own = {"has_perm": segment.has_permutation, "link_width": links.width}
        blobs = encode_single_groups(encode_rows(segment.rows.astype(kind), segment.bounds))
        facts = {"zv_array": "links", "dtype": kind.name, **block, **own}
        yield from cell_array(f"{root}/links/{tail}", segment.cells, blobs, facts, grid)
        for name, attribute in links.attributes.items():
            values = attribute.values[segment.record]
            facts = attribute_metadata("link_attribute", name, attribute, list(values.shape[1:]))
            facts = {**facts, "row_shape": facts.pop("shape"), **block}
            path = f"{root}/link_attributes/{name}/{tail}"
            yield from cell_array(path, segment.cells, encode_rows(values, segment.bounds), facts, grid)


def _object_files_09(root: str, level: Level) -> Iterator[File]:
    """Yield the object index, the groups, and the attributes of both."""
    objects, groups = level.objects, level.groups
    if objects is not None:
        block: dict[str, Any] = {
            "zv_array": "object_index",
            "num_objects": objects.n_objects,
            "num_present": int(np.count_nonzero(np.diff(objects.bounds))),
            "sid_ndim": int(objects.chunks.shape[1]),
            "layout": "vlen_manifests_v1" if objects.has_dense_ids else "vlen_manifests_v2",
        }
        if not objects.has_dense_ids:
            block["object_ids_sorted"] = True
            yield from plain_array(f"{root}/object_index/object_ids", objects.ids, {}, "zstd", _ROWS)
        yield group_json(f"{root}/object_index", block)
        yield from vlen_array(f"{root}/object_index/manifests", encode_manifests(objects), {})
    yield from _tables_09(f"{root}/object_attributes", "object_attribute", level.object_attributes)
    if groups is not None:
        yield from _group_files_09(root, groups)
        yield from _tables_09(f"{root}/group_attributes", "groupings_attribute", groups.attributes)


def _tables_09(path: str, kind: str, attributes: Attributes) -> Iterator[File]:
    """Yield attributes as plain arrays; absent rows hold the array's fill value."""
    for name, attribute in attributes.items():
        block = attribute_metadata(kind, name, attribute, list(attribute.values.shape))
        # Readers then take every row equal to the fill value as absent, even if it was given as a value. Attributes of groups
        # have the key only if a row is absent.
        if kind == "object_attribute" or attribute.present is not None:
            block["fill_sentinel_meaning"] = "absent"
        fill = fill_value(attribute.values.dtype)
        yield from plain_array(f"{path}/{name}", _filled(attribute), block, "zstd", _ROWS, fill)


def _group_files_09(root: str, groups: Groups) -> Iterator[File]:
    """Yield the groups of objects: a row of ids each, or a range of ids in the attributes."""
    block: dict[str, Any] = {"zv_array": "groups", "num_groups": groups.n_groups}
    run = _is_range(groups)
    firsts = groups.offsets[:-1][run]
    ranges = np.stack([groups.ids[firsts], groups.ids[groups.offsets[1:][run] - 1] + 1], axis=1)
    if run.any():
        block["group_ranges"] = dict(zip(map(str, np.flatnonzero(run).tolist()), ranges.tolist(), strict=True))
    counts = np.diff(groups.offsets)
    # A group stored as a range keeps an empty row, so the numbers of the other groups do not change.
    listed = groups.ids[~np.repeat(run, counts)]
    yield from vlen_array(
        f"{root}/groups", Blobs(to_bytes(listed), counts_to_offsets(np.where(run, 0, counts)) * 8), block
    )


def _is_range(groups: Groups) -> NDArray[np.bool_]:
    """Return which groups are consecutive ids and long enough to be stored as a range: (G,) bool."""
    first, counts = groups.offsets[:-1], np.diff(groups.offsets)
    run = counts >= MIN_RANGE_LENGTH
    # Counts the steps other than 1: ids are consecutive between two places with equal counts.
    broken = np.concatenate([[0], np.cumsum(np.diff(groups.ids) != 1)])
    run[run] = broken[first[run]] == broken[first[run] + counts[run] - 1]
    return np.asarray(run)
