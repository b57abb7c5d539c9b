"""References to the chunks of arrays in files outside of the atlas, and the compact file that holds them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError

_COLUMNS = {
    "key": pa.string(),
    "n_bytes": pa.int64(),
    "modified": pa.int64(),
    "etag": pa.string(),
    "array": pa.list_(pa.int32()),
    "chunk": pa.list_(pa.int64()),
    "gap": pa.list_(pa.int64()),
    "size": pa.list_(pa.int64()),
}
MOST_CHUNKS = 2**24
"""Chunks of all arrays of a source; a damaged file that declares more would take much memory."""

_NAMES, _LENGTHS, _PROBE = b"raggedatlas.arrays", b"raggedatlas.n_chunks", b"raggedatlas.probe"


def references_file(uid: str, sha256: str) -> str:
    """Return the path of a dataset's references below the Zarr store; in a bundle, the name of their member."""
    # By content: references that a later call writes replace none that a snapshot reads.
    return f"{uid}/references.{sha256[:16]}.arrow"


@dataclass(frozen=True, eq=False)
class SourceObjects:
    """The files or objects that make up a source, as they were when it was linked."""

    keys: tuple[str, ...]  # path of each below the source; a source that is one file has one object, ``""``
    n_bytes: NDArray[np.int64]  # (n,): size of each
    # (n,): when each was written, in nanoseconds since 1970 (UTC); 0 where that is not known
    modified: NDArray[np.int64]
    etags: tuple[str, ...]  # ETag of each, as the store or server gave it; empty where there is none
    probe: str = ""  # SHA-256 of the first and last 4,096 bytes of a source that is one file; empty for others


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """Where the chunks of one array are, in the C order of their grid.

    An array that is stored in one piece without codecs (HDF5: contiguous) has one entry, of the size of the whole
    array.
    """

    objects: NDArray[np.int32]  # (n,): number of the object that each is in
    offsets: NDArray[np.int64]  # (n,): its first byte there
    sizes: NDArray[np.int64]  # (n,): its stored bytes; -1 where it is not stored, which means fill values


@dataclass(frozen=True, eq=False)
class References:
    """The references of one source."""

    objects: SourceObjects
    arrays: Mapping[str, ChunkTable]  # name of each array -> its chunks

    @property
    def nbytes(self) -> int:
        """About the bytes of memory that they take."""
        tables = sum(table.objects.nbytes + table.offsets.nbytes + table.sizes.nbytes for table in self.arrays.values())
        texts = sum(map(len, (*self.objects.keys, *self.objects.etags))) + 200 * len(self.objects.keys)
        return tables + texts

    def to_bytes(self) -> bytes:
        """Return the references as a compressed Arrow file: one row for each object, with its chunks as lists of differences."""
        tables = [*self.arrays.values()]
        lengths = [len(table.sizes) for table in tables]
        array = np.repeat(np.arange(len(tables), dtype=np.int32), lengths)
        chunk = np.concatenate([np.empty(0, np.int64), *(np.arange(n) for n in lengths)])
        objects = np.concatenate([np.empty(0, np.int32), *(table.objects for table in tables)])
        offsets = np.concatenate([np.empty(0, np.int64), *(table.offsets for table in tables)])
        sizes = np.concatenate([np.empty(0, np.int64), *(table.sizes for table in tables)])
        stored = np.flatnonzero(sizes >= 0)
        # By object, then by array and chunk: neighbours in a file are neighbours here, and differences are small.
        order = stored[np.argsort(objects[stored], kind="stable")]
        bounds = np.searchsorted(objects[order], np.arange(len(self.objects.keys) + 1)).astype(np.int32)
        ends = (offsets + sizes)[order]
        lists = {
            "array": array[order],
            "chunk": np.diff(chunk[order], prepend=np.zeros(1, chunk.dtype)),
            "gap": offsets[order] - np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]]),
            "size": sizes[order],
        }
        columns = {
            "key": pa.array(self.objects.keys, pa.string()),
            "n_bytes": self.objects.n_bytes,
            "modified": self.objects.modified,
            "etag": pa.array(self.objects.etags, pa.string()),
            **{name: pa.ListArray.from_arrays(pa.array(bounds), pa.array(values)) for name, values in lists.items()},
        }
        metadata = {
            _NAMES: "\n".join(self.arrays).encode(),
            _LENGTHS: "\n".join(map(str, lengths)).encode(),
            _PROBE: self.objects.probe.encode(),
        }
        schema = pa.schema([pa.field(name, kind) for name, kind in _COLUMNS.items()], metadata)
        arrays = [pa.array(columns[name], kind) for name, kind in _COLUMNS.items()]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
        return bytes(sink.getvalue())

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "References":
        """Read what `to_bytes` wrote; `where` names it in messages. A chunk outside of its object is a `CorruptError`, too."""
        try:
            return cls._parse(data)
        except (pa.ArrowException, KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
            raise CorruptError(
                f"The references in {where} are damaged: {error}. Restore the file from a copy, or link the dataset again."
            ) from error

    @classmethod
    def _parse(cls, data: bytes) -> "References":
        with pa.ipc.open_file(data) as reader:
            table = reader.read_all().combine_chunks()
        table.validate(full=True)
        if {field.name: field.type for field in table.schema} != _COLUMNS:
            raise ValueError("they have other columns")
        metadata = table.schema.metadata or {}
        names = metadata[_NAMES].decode().split("\n") if metadata[_NAMES] else []
        lengths = [int(text) for text in metadata[_LENGTHS].split(b"\n")] if names else []
        n_bytes = _integers(table.column("n_bytes"))
        objects = SourceObjects(
            tuple(table.column("key").to_pylist()), n_bytes, _integers(table.column("modified")),
            tuple(table.column("etag").to_pylist()), metadata[_PROBE].decode(),
        )  # fmt: skip
        if None in objects.keys or None in objects.etags or (n_bytes < 0).any():
            raise ValueError("an object has no key or a negative size")
        owner = np.repeat(
            np.arange(table.num_rows, dtype=np.int32), _integers(pc.list_value_length(table.column("array")))
        )
        array, chunk, gap, size = (
            _integers(pc.list_flatten(table.column(name))) for name in ("array", "chunk", "gap", "size")
        )
        if len({len(owner), len(array), len(chunk), len(gap), len(size)}) > 1:
            raise ValueError("the lists of an object differ in length")
        chunk = np.cumsum(chunk)
        ends = np.cumsum(gap + size)
        offsets = ends - size
        # Sums may wrap around in int64, so that each number is compared by itself.
        if (
            len(size)
            and ((size < 0) | (offsets < 0) | (offsets > n_bytes[owner]) | (size > n_bytes[owner] - offsets)).any()
        ):
            raise ValueError("a chunk is outside of its object")
        if (
            sum(lengths) < len(array)
            or len(names) != len(lengths)
            or min(lengths, default=0) < 0
            or sum(lengths) > MOST_CHUNKS
        ):
            raise ValueError("there are other chunks than the arrays have")
        if len(array) and (array.min() < 0 or array.max() >= len(names)):
            raise ValueError("a chunk is of no array")
        if len(chunk) and (chunk < 0).any() | (chunk >= np.array(lengths)[array]).any():
            raise ValueError("a chunk is outside of the grid of its array")
        arrays = {}
        for number, (name, n) in enumerate(zip(names, lengths, strict=True)):
            own = array == number
            made = ChunkTable(np.zeros(n, np.int32), np.zeros(n, np.int64), np.full(n, -1, np.int64))
            for column, values in ((made.objects, owner), (made.offsets, offsets), (made.sizes, size)):
                column[chunk[own]] = values[own]
            arrays[name] = made
        return cls(objects, arrays)


def _integers(column: pa.ChunkedArray | pa.Array) -> NDArray[np.int64]:
    """Return a column of integers without nulls."""
    if column.null_count:
        raise ValueError("a number is missing")
    values: NDArray[np.int64] = np.asarray(column.to_numpy()).astype(np.int64)
    return values
