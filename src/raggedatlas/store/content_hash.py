"""Hash of what a dataset is, whatever file it comes from."""

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.model.batch import Block, CsrBlock
from raggedatlas.model.frames import FACTS_KEY
from raggedatlas.store.native import library
from raggedatlas.store.runtime import submit

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
    """Look at numbers as unsigned integers of their size, which is what compiled loops take; no copy where contiguous."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return flat.view(f"u{flat.dtype.itemsize}")


class ContentHash:
    """Hash of what a dataset is: features, cells, and its main matrix; the same for the same file."""

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
    for own, column in zip(cells.schema, cells.columns, strict=True):
        digest.update(own.name.encode() + b"\0" + (own.metadata or {}).get(FACTS_KEY, b"") + b"\0")
        # The chunks of a column depend on its reader and must not change the hash.
        values = column.combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, pa.schema([("v", pa.string())])) as writer:
            writer.write_batch(pa.record_batch([values.cast(pa.string())], names=["v"]))
        digest.update(sink.getvalue())
    return digest
