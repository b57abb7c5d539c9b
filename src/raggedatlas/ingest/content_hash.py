"""Passes over a source that write nothing: hashes of its entries and of its content."""

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.ingest.values import canonicalize, to_csr
from raggedatlas.model.batch import Block, CsrBlock
from raggedatlas.model.frames import FACTS_KEY
from raggedatlas.model.protocols import MatrixInfo, Source
from raggedatlas.store.native import library
from raggedatlas.store.runtime import submit

BLOCK_BYTES = 32 * 2**20
"""About how many bytes of values and indices one step holds; the bound on an `add`'s working memory is a small multiple.

Small enough that memory is used again instead of being asked from the system for every block.
"""


def block_rows(info: MatrixInfo) -> int:
    """Choose how many rows one step takes, from how wide or full the rows are."""
    if info.form == "dense":
        per_row = max(1, int(np.prod(info.shape[1:]))) * info.dtype.itemsize
    else:
        # A tenth is assumed to be stored where the source does not say; 8 bytes allow for 64-bit indices.
        entries = info.n_entries if info.n_entries is not None else info.shape[0] * info.shape[1] // 10
        per_row = max(1, entries // max(1, info.shape[0])) * (info.dtype.itemsize + 8)
    return int(min(65_536, max(16, BLOCK_BYTES // max(1, per_row))))


def iterate_blocks(source: Source, info: MatrixInfo) -> Iterator[tuple[int, Block]]:
    """Iterate over one matrix: first row and block of each step."""
    row = 0
    for (block,) in source.blocks((info.key,), block_rows(info)):
        yield row, block
        row += block.n_rows


HASH_LANES = 16
"""Hashes that are computed side by side, each of every sixteenth number."""


class StreamingHash:
    """A running hash of numbers that come in blocks.

    It tells different contents apart, not forged ones: a cryptographic hash would take most of the time of an `add`.
    """

    def __init__(self) -> None:
        """Start with nothing taken in."""
        self._state = np.arange(HASH_LANES + 1, dtype=np.uint64) * np.uint64(0x243F6A8885A308D3)
        # The last element counts the numbers so far, from which `ra_mix` knows the next lane.
        self._state[HASH_LANES] = 0

    def update(self, values: NDArray[Any]) -> None:
        """Update the hash with the bits of numbers of at most eight bytes each."""
        bits = as_bits(values)
        library().ra_mix(bits, bits.size, bits.itemsize, self._state)

    def digest(self) -> bytes:
        """Return the hash of everything so far, 16 bytes."""
        return hashlib.sha256(self._state.tobytes()).digest()[:16]


def as_bits(values: NDArray[Any]) -> NDArray[Any]:
    """Look at numbers as unsigned integers of their size, which is what compiled loops take; no copy where contiguous.

    Examples
    --------
    >>> as_bits(np.array([0.0, -1.0], np.float16))
    array([    0, 48128], dtype=uint16)
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    return flat.view(f"u{flat.dtype.itemsize}")


def entry_hash(source: Source, info: MatrixInfo) -> bytes:
    """Hash which entries a matrix has, whatever their values; two layers with equal hashes can share their indices."""
    lengths, columns = StreamingHash(), StreamingHash()
    for row, block in iterate_blocks(source, info):
        sparse, _ = canonicalize(to_csr(block), info.key, row, sum_duplicates=True)
        # Lengths, because pointers start again at 0 in each block and would depend on the size of blocks.
        lengths.update(np.diff(sparse.indptr))
        columns.update(sparse.indices)
    return lengths.digest() + columns.digest()


class ContentHash:
    """Hash of what a dataset is: features, cells, and its main matrix; the same for the same file.

    Parameters
    ----------
    cells : pyarrow.Table
        The source's cells.
    features : tuple of str
        Feature uids of the main matrix.
    """

    def __init__(self, cells: pa.Table, features: tuple[str, ...]) -> None:
        """Start with what is known before the values, on another thread."""
        self._lengths, self._columns, self._values = StreamingHash(), StreamingHash(), StreamingHash()
        self._names = submit(partial(_hash_names, cells), features)

    def update(self, block: Block) -> None:
        """Add the next rows, in canonical form, with the layer ``"values"``."""
        if isinstance(block, CsrBlock):
            self._lengths.update(np.diff(block.indptr))
            self._columns.update(block.indices)
        self._values.update(block.layers["values"])

    def hexdigest(self) -> str:
        """Return the hash of everything so far, 32 hex digits."""
        # Without the copy a second call would hash the streams twice.
        digest = self._names.result().copy()
        for stream in (self._lengths, self._columns, self._values):
            digest.update(stream.digest())
        return str(digest.hexdigest()[:32])


def _hash_names(cells: pa.Table, features: Sequence[str]) -> Any:  # noqa: ANN401  (hashlib's objects have no public type)
    digest = hashlib.sha256()
    digest.update("\0".join([*features, ""]).encode())
    for field, column in zip(cells.schema, cells.columns, strict=True):
        digest.update(field.name.encode() + b"\0" + (field.metadata or {}).get(FACTS_KEY, b"") + b"\0")
        # The chunks of a column depend on its reader and must not change the hash.
        values = column.combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, pa.schema([("v", pa.string())])) as writer:
            writer.write_batch(pa.record_batch([values.cast(pa.string())], names=["v"]))
        digest.update(sink.getvalue())
    return digest
