"""Some fragments out of their chunks: only their rows are copied, and of a fragment index only their entries are read."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.store.native import library
from raggedatlas.vectors.assembly import LinkRules, mask_repeated_rows
from raggedatlas.vectors.blobs import Bytes, counts_to_offsets, from_bytes
from raggedatlas.vectors.fragment_index import corrupt_index_error, locate_fragments
from raggedatlas.vectors.level_reader import (
    EMPTY_INDEX,
    AttributeFilter,
    AttributeStorage,
    LevelReader,
    attribute_storage,
    declared_dtype,
)
from raggedatlas.vectors.shapes import SEQUENTIAL, Attribute


@dataclass(frozen=True)
class FragmentRequest:
    """Which fragments of a level are wanted.

    Parameters
    ----------
    keys : (n, K) int64
        Chunks that hold some of them, ascending.
    place : (P,) int64
        Which of `keys` each fragment lies in.
    fragments : (P,) int64
        The number of each in its chunk.
    """

    keys: NDArray[np.int64]
    place: NDArray[np.int64]
    fragments: NDArray[np.int64]


@dataclass(frozen=True)
class ChunkIndexes:
    """The fragment indexes of some chunks.

    Parameters
    ----------
    blobs : list of uint8 arrays or None
        The blob of each chunk; None where the level stores none, so that a chunk is one fragment.
    n_fragments : (n,) int64
        How many fragments each chunk has.
    """

    blobs: list[Bytes] | None
    n_fragments: NDArray[np.int64]


def read_chunk_indexes(reader: LevelReader, keys: NDArray[np.int64]) -> ChunkIndexes:
    """Read the fragment indexes of some chunks, and how many fragments they have.

    Raises
    ------
    CorruptError
        If the head of an index does not agree with its bytes.
    """
    family = reader.family("vertex_fragments")
    if family is None:
        return ChunkIndexes(None, np.ones(len(keys), np.int64))
    blobs = [EMPTY_INDEX if blob is None or not blob.size else blob for blob in family.read(keys)]
    none = np.zeros(0, np.int64)
    for blob in blobs:
        locate_fragments(blob, none, 0, np.zeros((0, 3), np.int64), f"{reader.where}/vertex_fragments")
    return ChunkIndexes(blobs, np.array([int.from_bytes(blob[8:12].tobytes(), "little") for blob in blobs], np.int64))


@dataclass(frozen=True)
class FragmentRows:
    """Vertices of some fragments, one after the other, in the order in which they were asked for.

    Parameters
    ----------
    positions : (N, D) array
        Vertices.
    bounds : (P + 1,) int64
        Those of each fragment.
    vertex_attributes, fragment_attributes : dict of str to Attribute
        N and P rows.
    """

    positions: NDArray[np.generic]
    bounds: NDArray[np.int64]
    vertex_attributes: dict[str, Attribute]
    fragment_attributes: dict[str, Attribute]


@dataclass(frozen=True)
class _FragmentSpans:
    """Where fragments lie, chunk by chunk: of chunk `c` those from `cuts[c]` to `cuts[c + 1]`.

    Parameters
    ----------
    order : (P,) int64
        Which of the wanted fragments each is.
    cuts : list of int
        The first of each chunk.
    blobs : list of uint8 arrays
        The fragment index of each chunk.
    n_fragments : (n,) int64
        How many fragments each chunk has.
    spans : (P, 3) int64
        As `locate_fragments` gives them.
    """

    order: NDArray[np.int64]
    cuts: list[int]
    blobs: list[Bytes]
    n_fragments: NDArray[np.int64]
    spans: NDArray[np.int64]


def read_fragments(
    reader: LevelReader, parts: FragmentRequest, indexes: ChunkIndexes, wanted: AttributeFilter
) -> FragmentRows:
    """Return vertices and attributes of some fragments of a level whose vertices are stored raw.

    Raises
    ------
    CorruptError
        If a chunk does not have a fragment, or what is read of it does not hold together.
    """
    where = f"{reader.where}/vertices"
    family = reader.vertices
    raw = [] if family is None else [_bytes_or_empty(blob) for blob in family.read(parts.keys)]
    n_dims = len(reader.root.axes)
    dtype = np.dtype(np.float32) if family is None else declared_dtype(family.attributes, where)
    size = dtype.itemsize * n_dims
    if any(blob.size % size for blob in raw):
        raise CorruptError(f"{where} has a chunk that is no whole number of rows of {size} bytes.")
    rows = np.array([blob.size // size for blob in raw], np.int64)
    located = _locate_spans(reader, parts, indexes, rows)
    counts = np.empty(len(parts.fragments), np.int64)
    counts[located.order] = located.spans[:, 2]
    bounds = counts_to_offsets(counts)
    places = bounds[:-1][located.order]
    positions = from_bytes(_copy_rows(raw, located, places, size, int(bounds[-1])), dtype, n_dims)
    own = {}
    for name in filter(wanted, reader.attribute_names("vertex_attributes")):
        found = _read_attribute(reader, f"vertex_attributes/{name}", parts.keys, rows)
        if found is not None:
            form, cells = found
            own[name] = form.attribute(_copy_rows(cells, located, places, form.size, int(bounds[-1])))
    own |= reader.read_partition_attribute(parts.keys[parts.place], counts, wanted)
    return FragmentRows(positions, bounds, own, _read_fragment_attributes(reader, parts, located, wanted))


def _read_fragment_attributes(
    reader: LevelReader, parts: FragmentRequest, located: _FragmentSpans, wanted: AttributeFilter
) -> dict[str, Attribute]:
    """Return the attributes of the fragments themselves."""
    made = {}
    spans = np.ones((len(parts.fragments), 3), np.int64)
    spans[:, 0] = parts.fragments[located.order]
    each = replace(located, spans=spans)
    for name in filter(wanted, reader.attribute_names("fragment_attributes")):
        found = _read_attribute(reader, f"fragment_attributes/{name}", parts.keys, located.n_fragments)
        if found is not None:
            form, cells = found
            made[name] = form.attribute(_copy_rows(cells, each, located.order, form.size, len(spans)))
    return made


def _bytes_or_empty(blob: Bytes | None) -> Bytes:
    return np.zeros(0, np.uint8) if blob is None else blob


def _locate_spans(
    reader: LevelReader, parts: FragmentRequest, indexes: ChunkIndexes, rows: NDArray[np.int64]
) -> _FragmentSpans:
    """Find fragments in the indexes of their chunks; where no index is stored, a chunk is one fragment."""
    order = np.lexsort((parts.fragments, parts.place))
    cuts = np.searchsorted(parts.place[order], np.arange(len(parts.keys) + 1)).tolist()
    fragments, where = parts.fragments[order], f"{reader.where}/vertex_fragments"
    spans = np.zeros((len(fragments), 3), np.int64)
    if indexes.blobs is None:
        spans[:, 2] = rows[parts.place[order]]
        return _FragmentSpans(order, cuts, [EMPTY_INDEX] * len(rows), indexes.n_fragments, spans)
    for blob, n_rows, (a, b) in zip(indexes.blobs, rows.tolist(), pairwise(cuts), strict=True):
        locate_fragments(blob, fragments[a:b], n_rows, spans[a:b], where)
    return _FragmentSpans(order, cuts, indexes.blobs, indexes.n_fragments, spans)


def _copy_rows(cells: list[Bytes], located: _FragmentSpans, places: NDArray[np.int64], size: int, n_rows: int) -> Bytes:
    """Copy rows of all fragments to their places."""
    out = np.empty(n_rows * size, np.uint8)
    for cell, blob, (a, b) in zip(cells, located.blobs, pairwise(located.cuts), strict=True):
        contents, index = np.ascontiguousarray(cell), np.ascontiguousarray(blob)
        fault = library().ra_copy_fragments(
            index, index.size, contents, contents.size, located.spans[a:b], places[a:b], b - a, size, out, out.size
        )
        if fault:
            raise corrupt_index_error(fault, blob, "A fragment index")
    return out


def _read_attribute(
    reader: LevelReader, path: str, keys: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[AttributeStorage, list[Bytes]] | None:
    """Return how an attribute is stored, and its cells of some chunks; None where it is not there."""
    family = reader.family(path)
    if family is None:
        return None
    cells = [_bytes_or_empty(blob) for blob in family.read(keys)]
    return attribute_storage(family.attributes, cells, rows, f"{reader.where}/{path}"), cells


def drop_repeated_rows(picked: FragmentRows, objects: NDArray[np.int64], rules: LinkRules) -> FragmentRows:
    """Leave out the vertices that stand twice where a polyline goes on in the next chunk, if the store repeats them.

    Parameters
    ----------
    picked : Picked
        Fragments in order of traversal.
    objects : (B + 1,) int64
        The fragments of each object.
    rules : Rules
        Kind and conventions of the store.
    """
    if rules.kind not in SEQUENTIAL or rules.boundary == "explicit_links":
        return picked
    kept = mask_repeated_rows(picked.positions, np.arange(len(picked.positions)), picked.bounds, objects)
    rows = np.flatnonzero(kept)
    attributes = {name: attribute.take(rows) for name, attribute in picked.vertex_attributes.items()}
    bounds = counts_to_offsets(np.diff(counts_to_offsets(kept)[picked.bounds]))
    return FragmentRows(np.take(picked.positions, rows, axis=0), bounds, attributes, picked.fragment_attributes)
