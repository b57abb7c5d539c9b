"""Reader of the object index, groups and tables of objects of one level."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, NotFoundError, SourceError
from raggedatlas.vectors.geometry import Objects
from raggedatlas.vectors.shapes import Attribute, Groups, counts_to_offsets
from raggedatlas.vectors.storage.codecs import (
    Blobs,
    decode_groups,
    decode_manifests,
    from_bytes,
    split_manifests,
    take_manifests,
)
from raggedatlas.vectors.storage.layout_07 import STRINGS
from raggedatlas.vectors.storage.level_reader import LevelReader, extra_metadata
from raggedatlas.vectors.storage.zarr_reader import VlenArray, node_attributes, read_small_array, read_table


class ObjectIndex:
    """The objects of a level and their fragments.

    Parameters
    ----------
    level : LevelReader
        The level.
    """

    def __init__(self, level: LevelReader) -> None:
        self.level = level
        self.path = f"{level.number}/object_index"
        node = level.files.node(self.path)
        self.block: dict[str, Any] = {} if node is None else node_attributes(node)
        self.is_there = node is not None
        layout = str(self.block.get("layout", ""))
        if layout not in {"", "vlen_manifests_v1", "vlen_manifests_v2"}:
            raise SourceError(f"{level.where}/object_index has layout {layout!r}; versions 1 and 2 are supported.")

    @cached_property
    def n_dims(self) -> int:
        """Number of coordinates of a chunk in a manifest."""
        # The keys of a level without chunks have no columns.
        width = self.level.keys.keys.shape[1] or len(self.level.chunk_shape)
        n_dims = self.block.get("sid_ndim") or width
        if n_dims != width:
            raise CorruptError(
                f"{self.level.where}/object_index declares sid_ndim {n_dims!r}; expected {width}, as in chunk keys."
            )
        return width

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """Ids of all objects, ascending: (B,) int64."""
        stored = self._stored_ids
        return np.arange(self.n_objects) if stored is None else np.sort(stored)

    @cached_property
    def _stored_ids(self) -> NDArray[np.int64] | None:
        """Ids in manifest order, if they are not row numbers."""
        found = read_table(self.level.files, f"{self.path}/object_ids") if self.is_there else None
        if found is None:
            return None
        ids = found.astype(np.int64)
        if len(ids) != self.n_objects or len(np.unique(ids)) != len(ids):
            raise CorruptError(
                f"{self.level.where}/object_index/object_ids does not hold {self.n_objects} distinct ids."
            )
        return ids

    @cached_property
    def _order(self) -> NDArray[np.int64] | None:
        """Manifest of each object by ascending id, if they are stored in another order."""
        stored = self._stored_ids
        # Ids need not be stored in ascending order, while `ids`, `every` and `rows_of` are by ascending id.
        if stored is None or (np.diff(stored) > 0).all():
            return None
        return np.argsort(stored)

    @cached_property
    def n_objects(self) -> int:
        """Number of objects."""
        declared = self.block.get("num_objects", 0 if self.items is None else self.items.n_items)
        # A boolean is an instance of int, but no number of objects.
        if type(declared) is not int or declared < 0 or (self.items is not None and declared != self.items.n_items):
            stored = "" if self.items is None else f" and holds {self.items.n_items} manifests"
            raise CorruptError(
                f"{self.level.where}/object_index declares {declared!r} objects{stored}. Restore the store from a copy."
            )
        return declared

    @cached_property
    def items(self) -> VlenArray | None:
        """The manifests as an array of byte strings, if they are stored as one."""
        path = f"{self.path}/manifests"
        node = self.level.files.node(path) if self.is_there else None
        return None if node is None else VlenArray(self.level.files, path, node)

    @cached_property
    def _flat(self) -> Blobs:
        """The manifests of ``object_index/data``, split by the sidecar or by scanning."""
        data = read_small_array(self.level.files, f"{self.path}/data")
        if data is None:
            if self.n_objects:
                raise CorruptError(
                    f"{self.level.where}/object_index declares {self.n_objects} objects, but has no manifests."
                )
            return Blobs(np.zeros(0, np.uint8), np.zeros(1, np.int64))
        starts = read_small_array(self.level.files, f"{self.path}/offsets")
        if starts is None:
            return split_manifests(data, self.n_dims, self.n_objects)
        bounds = np.append(from_bytes(starts, np.int64), data.size)
        if len(bounds) != self.n_objects + 1 or bounds[0] != 0 or (np.diff(bounds) < 0).any():
            raise CorruptError(
                f"{self.level.where}/object_index/offsets does not split the data into {self.n_objects} manifests."
            )
        return Blobs(data, bounds)

    @cached_property
    def every(self) -> Objects:
        """The complete index."""
        blobs = self._flat if self.items is None else self.items.read()
        if self._order is not None:
            blobs = _take_blobs(blobs, self._order)
        return decode_manifests(blobs, self.n_dims, self.ids)

    def rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index rows of objects.

        Raises
        ------
        NotFoundError
            If an id does not exist.
        """
        if self._stored_ids is None:
            rows, good = ids, (ids >= 0) & (ids < self.n_objects)
        else:
            # An id above all others is placed after the last row; the comparison refuses it.
            rows = np.minimum(np.searchsorted(self.ids, ids), max(len(self.ids) - 1, 0))
            good = self.ids[rows] == ids if len(self.ids) else np.zeros(len(ids), bool)
        if not good.all():
            raise NotFoundError(
                f"Object {ids[~good][0]} does not exist in {self.level.where}; it has {self.n_objects:,} objects."
            )
        return rows

    def take(self, ids: NDArray[np.int64]) -> Objects:
        """Return the index of some objects, in the given order; only their manifests are read."""
        rows = self.rows_of(ids)
        at = rows if self._order is None else self._order[rows]
        blobs = _take_blobs(self._flat, at) if self.items is None else self.items.read(at)
        return decode_manifests(blobs, self.n_dims, ids)

    @cached_property
    def by_chunk(self) -> tuple[NDArray[np.int64], Objects]:
        """All blocks in chunk order.

        Row of each block's chunk among those of the level (-1: absent), and an index whose entries are one block each, with the
        id of its object.
        """
        every = self.every
        chunk = self.level.keys.find(every.chunks)
        # Chunks ascend in the result, because `LevelQuery._owners` searches it by bisection.
        order = np.argsort(chunk, kind="stable")
        ids = np.repeat(every.ids, np.diff(every.bounds))
        alone = replace(every, ids=ids, bounds=np.arange(len(ids) + 1))
        return chunk[order], take_manifests(alone, order)


def _take_blobs(blobs: Blobs, rows: NDArray[np.int64]) -> Blobs:
    """Return some byte strings, in the given order."""
    from raggedatlas.vectors.storage.codecs import slice_bytes

    starts, sizes = blobs.bounds[rows], np.diff(blobs.bounds)[rows]
    return Blobs(slice_bytes(blobs.data, starts, sizes), counts_to_offsets(sizes))


def read_groups(level: LevelReader) -> Groups | None:
    """Return the groups of a level, or None if it has none."""
    path = f"{level.number}/groups"
    node = level.files.node(path)
    if node is None:
        return None
    block = node_attributes(node)
    if level.layout == "0.9":
        offsets, ids = _expand_ranged_groups(VlenArray(level.files, path, node).read(), block, level)
    else:
        data = read_small_array(level.files, f"{path}/data")
        starts = read_small_array(level.files, f"{path}/offsets")
        found = np.zeros(0, np.uint8) if data is None else data
        begin = None if starts is None else from_bytes(starts, np.int64)
        offsets, ids = decode_groups(found, begin, int(block.get("num_groups", 0)))
    return Groups(offsets, ids, read_tables(level, "group_attributes"))


def _expand_ranged_groups(
    blobs: Blobs, block: Mapping[str, Any], level: LevelReader
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return groups of layout 0.9, with ranges of ids expanded."""
    where = level.where
    # Group by group: sizes that are no multiples of 8 may add up to one.
    if not (blobs.bounds % 8).any() and not block.get("group_ranges"):
        return blobs.bounds // 8, from_bytes(blobs.data, np.int64, what=f"{where}/groups")
    parts = [from_bytes(blobs[i], np.int64, what=f"{where}/groups") for i in range(len(blobs))]
    n_objects = _max_objects(level)
    for group, (start, stop) in (block.get("group_ranges") or {}).items():
        # The length is limited before `arange` allocates memory for a damaged range.
        if not 0 <= int(group) < len(parts) or not 0 <= int(start) <= int(stop) <= int(start) + n_objects:
            raise CorruptError(
                f"{where}/groups has a range {start} to {stop} for group {group}; expected groups 0 to {len(parts) - 1} and at "
                f"most {n_objects:,} objects. Restore the store from a copy."
            )
        parts[int(group)] = np.arange(int(start), int(stop))
    return counts_to_offsets(np.array([len(part) for part in parts], np.int64)), np.concatenate(parts)


def _max_objects(level: LevelReader) -> int:
    """Return the maximum number of objects of a level: that of its index, or one per vertex without an index."""
    index = ObjectIndex(level)
    return index.n_objects if index.is_there else level.n_vertices


def read_tables(level: LevelReader, family: str) -> dict[str, Attribute]:
    """Return the attributes of objects or groups."""
    result = {}
    for name in level.attribute_names(family):
        attribute = read_table_attribute(level, family, name)
        if attribute is not None:
            result[name] = attribute
    return result


def read_table_attribute(level: LevelReader, family: str, name: str) -> Attribute | None:
    """Return one attribute of objects or groups."""
    path = f"{level.number}/{family}/{name}"
    node = level.files.node(path)
    if node is None:
        return None
    block = node_attributes(node)
    channels = tuple(str(channel) for channel in block.get("channel_names") or ())
    if node["node_type"] == "array":
        values = read_table(level.files, path)
        if values is None:
            return None
        present = None
        if block.get("fill_sentinel_meaning") == "absent":
            present = _present_rows(values, node.get("fill_value"))
        return Attribute(values, channels, present, extra_metadata(block))
    raw = read_small_array(level.files, f"{path}/data")
    if raw is None:
        return None
    dtype = str(block.get("dtype"))
    shape = block.get("shape") or [-1]
    columns = int(np.prod(shape[1:])) if len(shape) > 1 else None
    values = from_bytes(raw, np.dtype(dtype).newbyteorder("<"), columns, f"{level.where}/{family}/{name}")
    mask = read_small_array(level.files, f"{path}/present_mask") if block.get("has_present_mask") else None
    attribute = Attribute(values, channels, None if mask is None else mask.astype(bool), extra_metadata(block))
    return _decode_categories(attribute) if block.get(STRINGS) else attribute


def _decode_categories(attribute: Attribute) -> Attribute:
    """Return codes as the strings that they encode."""
    kept = {key: value for key, value in attribute.metadata.items() if key not in _CODED}
    # The appended empty string is what the code -1 of absent rows selects.
    categories = np.array([*attribute.metadata["categories"], ""], dtype=str)
    codes = attribute.values
    if attribute.present is not None:
        codes = np.where(attribute.present if codes.ndim == 1 else attribute.present[:, None], codes, -1)
    return Attribute(categories[codes], attribute.channels, attribute.present, kept)


_CODED = {"encoding", "categories", "ordered", STRINGS}


def _present_rows(values: NDArray[Any], fill: Any) -> NDArray[np.bool_] | None:  # noqa: ANN401 - any JSON value
    """Return which rows are not entirely the fill value; None if there are no such rows."""
    if values.dtype.kind == "f":
        absent = np.isnan(values) if fill in {"NaN", None} else values == float(fill)
    else:
        absent = values == np.asarray(fill).astype(values.dtype)
    rows = ~absent.reshape(len(values), -1).all(axis=1) if len(values) else np.zeros(0, bool)
    return None if rows.all() else rows
