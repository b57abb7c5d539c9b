"""Writer of layout 0.7 (seed 002): a group for each family of a level, with one array per chunk."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.vectors.geometry import CrossLinks, Geometry, Level
from raggedatlas.vectors.grids import encode_keys, run_starts, stable_order
from raggedatlas.vectors.metadata import level_json
from raggedatlas.vectors.shapes import Attribute, Attributes, fill_value
from raggedatlas.vectors.storage.codecs import encode_groups, encode_manifests, encode_ragged, encode_records, to_bytes
from raggedatlas.vectors.storage.layout_09 import delta_name
from raggedatlas.vectors.storage.zarr_writer import (
    BYTES_CODEC,
    File,
    array_json,
    attribute_metadata,
    chunk_arrays,
    compress,
    compressor_codec,
    group_json,
    present_families,
)


def level_files(geometry: Geometry, k: int, compression: str | None) -> Iterator[File]:
    """Yield the files of one level."""
    level, root = geometry.levels[k], str(k)
    has_links = level.links is not None and level.encoding != "draco"  # Draco cells include the faces
    has_links = has_links or any(not _crosses_chunks(links).all() for links in level.cross_links)
    present = [name for name in present_families(level) if name != "links" or has_links]
    crossing = [links for links in level.cross_links if _crosses_chunks(links).any()]
    if crossing:
        present += ["cross_chunk_links"]
    yield group_json(root, level_json(level, k, present))
    result: set[str] = set()
    for family in chunk_arrays(level):
        yield from _parent_groups(root, family.path, result)
        yield group_json(f"{root}/{family.path}", family.attributes)
        names = [".".join(map(str, key)) for key in level.chunks.tolist()]
        for i, name in enumerate(names):
            blob = family.blobs[i]
            # The arrays of a group are the list of its chunks, so an empty chunk must not have one.
            if not blob.size:
                continue
            values = blob if family.dtype is None else blob.view(family.dtype.newbyteorder("<"))
            if family.columns is not None and family.dtype is not None:
                values = values.reshape(-1, family.columns)
            codec = None if family.dtype is None else compression
            yield from array_node(f"{root}/{family.path}/{name}", values, codec)
    for links in level.cross_links:
        yield from _cross_files(root, links, result, compression)
    yield from _object_files(root, level, compression)
    yield from _group_files(root, level, compression)


def array_node(path: str, values: NDArray[Any], compression: str | None) -> Iterator[File]:
    """Yield an array with one chunk."""
    codecs: list[dict[str, Any]] = [BYTES_CODEC] if values.dtype.itemsize > 1 else [{"name": "bytes"}]
    if compression is not None:
        codecs.append(compressor_codec(compression, values.dtype.itemsize))
    # Zarr does not allow chunks of length 0, not even for an empty array.
    chunk = [max(1, size) for size in values.shape]
    yield f"{path}/zarr.json", [array_json(values.shape, chunk, values.dtype.name, codecs, {})]
    if values.size:
        data = to_bytes(values)
        key = "/".join([path, "c", *("0" for _ in values.shape)])
        yield key, [compress(data.data, compression, values.dtype.itemsize)]


def _parent_groups(root: str, path: str, made: set[str]) -> Iterator[File]:
    """Yield the groups above a family that are not yet written."""
    parts = path.split("/")
    for i in range(1, len(parts)):
        parent = "/".join(parts[:i])
        if parent not in made:
            made.add(parent)
            yield group_json(f"{root}/{parent}", {})


def _crosses_chunks(links: CrossLinks) -> NDArray[np.bool_]:
    """Return which links are stored in ``cross_chunk_links``: those whose ends have different chunk keys."""
    # All links of delta 0 are stored there, also those whose ends share a chunk (V081 is a `should`).
    if links.delta == 0:
        return np.ones(links.n_links, bool)
    return np.asarray((links.chunks != links.chunks[:, :1]).any(axis=(1, 2)))


def _cross_files(root: str, links: CrossLinks, made: set[str], compression: str | None) -> Iterator[File]:
    """Yield links across chunks, and those across levels within one chunk key, in the order of their ends.

    Layout 0.9 sorts links by chunk and does not preserve their order, so any other order would be lost there.
    """
    ends = encode_records(links.chunks, links.rows).reshape(links.n_links, -1)
    # The last key of `lexsort` counts first, so the columns are reversed.
    order = np.lexsort(ends.T[::-1]) if links.n_links else np.zeros(0, np.int64)
    links = replace(
        links,
        chunks=links.chunks[order],
        rows=links.rows[order],
        attributes={title: attribute.take(order) for title, attribute in links.attributes.items()},
    )
    crosses_chunks, name = _crosses_chunks(links), delta_name(links.delta)
    if crosses_chunks.any():
        yield from _parent_groups(root, f"cross_chunk_links/{name}", made)
        block = {
            "zv_array": "cross_chunk_links",
            "level_delta": links.delta,
            "link_width": links.width,
            "num_links": int(crosses_chunks.sum()),
            "sid_ndim": int(links.chunks.shape[2]),
        }
        if links.directed or links.store != "canonical":
            block |= {"directed": links.directed, "store": links.store}
        yield group_json(f"{root}/cross_chunk_links/{name}", block)
        records = encode_records(links.chunks[crosses_chunks], links.rows[crosses_chunks])
        yield from array_node(f"{root}/cross_chunk_links/{name}/data", records, compression)
        for title, attribute in links.attributes.items():
            values = attribute.values[crosses_chunks]
            path = f"cross_chunk_link_attributes/{title}/{name}"
            yield from _parent_groups(root, path, made)
            own = attribute_metadata("cross_chunk_link_attribute", title, attribute, list(values.shape))
            yield group_json(f"{root}/{path}", own | {"num_links": len(values), "level_delta": links.delta})
            yield from array_node(f"{root}/{path}/data", values, compression)
    if not crosses_chunks.all():
        yield from _level_links(root, links, np.flatnonzero(~crosses_chunks), made, compression)


def _level_links(
    root: str, links: CrossLinks, inner: NDArray[np.int64], made: set[str], compression: str | None
) -> Iterator[File]:
    """Yield links across levels whose ends have the same chunk key: rows in that chunk, as an inline stream."""
    name = delta_name(links.delta)
    yield from _parent_groups(root, f"links/{name}", made)
    block = {
        "zv_array": "links",
        "level_delta": links.delta,
        "link_width": links.width,
        "num_links": len(inner),
        "dtype": "int64",
        "record_encoding": "ragged_rows",
    }
    yield group_json(f"{root}/links/{name}", block)
    codes, top = encode_keys(links.chunks[inner, 0])
    order = inner[stable_order(codes, top)]
    # Sorted codes have the same runs as `order`, which sorts the links by these codes.
    first = run_starts(np.sort(codes))
    parts = [(int(a), int(b)) for a, b in zip(first, [*first[1:], len(order)], strict=True)]
    keys = [".".join(map(str, links.chunks[order[a], 0].tolist())) for a, _ in parts]
    for key, (a, b) in zip(keys, parts, strict=True):
        stream = np.frombuffer(encode_ragged(to_bytes(links.rows[order[a:b]])), np.uint8)
        yield from array_node(f"{root}/links/{name}/{key}", stream, None)
    for title, attribute in links.attributes.items():
        path = f"link_attributes/{title}/{name}"
        yield from _parent_groups(root, path, made)
        own = attribute_metadata("link_attribute", title, attribute, list(attribute.values.shape[1:]))
        yield group_json(f"{root}/{path}", own | {"level_delta": links.delta})
        for key, (a, b) in zip(keys, parts, strict=True):
            yield from array_node(f"{root}/{path}/{key}", attribute.values[order[a:b]], compression)


def _object_files(root: str, level: Level, compression: str | None) -> Iterator[File]:
    """Yield the object index, its sidecars, and the attributes of objects."""
    objects = level.objects
    if objects is not None:
        block = {
            "zv_array": "object_index",
            "num_objects": objects.n_objects,
            "sid_ndim": int(objects.chunks.shape[1]),
        }
        yield group_json(f"{root}/object_index", block)
        blobs = encode_manifests(objects)
        yield from array_node(f"{root}/object_index/data", blobs.data, None)
        # Optional for readers of this package, but zarr-vectors 0.2.0 needs them to find a manifest.
        yield from array_node(f"{root}/object_index/offsets", blobs.bounds[:-1], None)
        if not objects.has_dense_ids:
            yield from array_node(f"{root}/object_index/object_ids", objects.ids, None)
    yield from _tables(root, "object_attributes", "object_attribute", level.object_attributes, compression)


def _group_files(root: str, level: Level, compression: str | None) -> Iterator[File]:
    """Yield the groups of objects, their sidecar and attributes."""
    groups = level.groups
    if groups is None:
        return
    yield group_json(f"{root}/groups", {"zv_array": "groups", "num_groups": groups.n_groups})
    data, starts = encode_groups(groups.offsets, groups.ids)
    yield from array_node(f"{root}/groups/data", np.frombuffer(data, np.uint8), None)
    yield from array_node(f"{root}/groups/offsets", starts, None)
    yield from _tables(root, "group_attributes", "groupings_attribute", groups.attributes, compression)


def _tables(root: str, family: str, kind: str, attributes: Attributes, compression: str | None) -> Iterator[File]:
    """Yield attributes of objects or groups; strings are encoded as codes with categories."""
    if attributes:
        yield group_json(f"{root}/{family}", {})
    for name, attribute in attributes.items():
        result = _encode_strings(attribute)
        values = result.values
        block = attribute_metadata(kind, name, result, list(values.shape))
        if result.present is not None:
            # The attribute may hold an array of the caller, which must not change.
            values = values.copy()
            values[~result.present] = fill_value(values.dtype)
            block["has_present_mask"] = True
        yield group_json(f"{root}/{family}/{name}", block)
        yield from array_node(f"{root}/{family}/{name}/data", values, compression)
        if result.present is not None:
            yield from array_node(f"{root}/{family}/{name}/present_mask", result.present.astype(np.uint8), None)


STRINGS = "raggedatlas_strings"
"""Key that marks codes made from strings, as opposed to codes given as such."""


def _encode_strings(attribute: Attribute) -> Attribute:
    """Return strings as codes; other attributes are unchanged."""
    if attribute.values.dtype.kind not in "UTO":
        return attribute
    texts = attribute.values.astype(str)
    categories, codes = np.unique(texts.reshape(-1), return_inverse=True)
    metadata = {
        **attribute.metadata,
        "encoding": "dictionary",
        "categories": categories.tolist(),
        "ordered": False,
        STRINGS: True,
    }
    return Attribute(codes.reshape(texts.shape).astype(np.int32), attribute.channels, attribute.present, metadata)
