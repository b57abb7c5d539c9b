"""How chunks are encoded: the three codec profiles, and whole runs of chunks on the decoding threads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from raggedatlas.errors import StoreError
from raggedatlas.store.checksums import with_checksum
from raggedatlas.store.codecs import PACKED
from raggedatlas.store.packing import encode_packed, encode_packed_run
from raggedatlas.store.runs import ChunkRun
from raggedatlas.store.threads import DECODE_THREADS, map_decode

_SLAB_BYTES = 4 * 2**20
_SLAB_CHUNKS = 64
_CRC: dict[str, Any] = {"name": "crc32c"}
NO_BREAKS = np.empty(0, np.int64)
"""No row is known to begin anywhere."""


@dataclass(frozen=True)
class BloscEncoder:
    """Encodes one chunk: bytes (little endian), Blosc with byte shuffle, crc32c.

    The checksum comes last, so that a reader checks it before it decompresses anything.

    Parameters
    ----------
    itemsize : int
        Bytes of what is shuffled.
    chunk_elements, shard_elements : int
        Elements of a chunk and of a shard of a 1-D array.
    name : str
        Compressor inside Blosc.
    delta : str
        Dtype of the elements where differences are stored, e.g. ``"<u4"``; else empty.
    """

    itemsize: int
    chunk_elements: int = 4096
    shard_elements: int = 4 * 2**20
    name: str = "lz4"
    delta: str = ""

    def __call__(self, values: NDArray[Any]) -> bytes:
        """Return the encoded bytes of a contiguous array."""
        from numcodecs import blosc

        plain = values.reshape(-1)
        if self.delta:
            plain = np.diff(plain, prepend=plain.dtype.type(0))
        packed = blosc.compress(plain.view(f"u{min(self.itemsize, 8)}"), self.name.encode(), 5, blosc.SHUFFLE)
        return with_checksum(packed)

    def codecs(self) -> list[dict[str, Any]]:
        """Return the codecs of a chunk as they stand in ``zarr.json``."""
        settings = {
            "typesize": self.itemsize,
            "cname": self.name,
            "clevel": 5,
            "shuffle": "shuffle",
            "blocksize": 0,
        }
        little: dict[str, Any] = {"name": "bytes"}
        if self.itemsize > 1:
            little["configuration"] = {"endian": "little"}
        before = [{"name": "numcodecs.delta", "configuration": {"dtype": self.delta}}] if self.delta else []
        return [*before, little, {"name": "blosc", "configuration": settings}, _CRC]


@dataclass(frozen=True)
class PackedEncoder:
    """Encodes one chunk of unsigned integers with the packed codec and crc32c.

    Parameters
    ----------
    itemsize : int
        Bytes of an element: 1, 2, 4 or 8.
    chunk_elements, shard_elements : int
        Elements of a chunk and of a shard.
    """

    itemsize: int
    chunk_elements: int = 16384
    shard_elements: int = 16 * 2**20

    def __call__(self, values: NDArray[Any]) -> bytes:
        """Return the encoded bytes of a contiguous array."""
        return encode_packed_chunk(values, NO_BREAKS)

    def codecs(self) -> list[dict[str, Any]]:
        """Return the codecs of a chunk as they stand in ``zarr.json``."""
        return [{"name": PACKED}, _CRC]


ChunkEncoder: TypeAlias = BloscEncoder | PackedEncoder
"""How one chunk becomes bytes."""


def _standard(dtype: np.dtype[Any], delta: str) -> ChunkEncoder:
    """Return the encoder of the profile every Zarr v3 reader can follow."""
    return BloscEncoder(dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize)


def _packed(dtype: np.dtype[Any], delta: str) -> ChunkEncoder:
    """Return the encoder of the profile whose blocks are read one by one."""
    return PackedEncoder(dtype.itemsize) if dtype.kind == "u" else _standard(dtype, delta)


def _archive(dtype: np.dtype[Any], delta: str) -> ChunkEncoder:
    """Return the encoder of the smallest profile."""
    if dtype.kind != "u":
        return _standard(dtype, delta)
    return BloscEncoder(dtype.itemsize, 65536, 16 * 2**20, "zstd", delta)


PROFILES: dict[str, Callable[[np.dtype[Any], str], ChunkEncoder]] = {
    "packed": _packed,
    "standard": _standard,
    "archive": _archive,
}
"""What may be chosen for an atlas: fast random reads, codecs that any Zarr v3 reader knows, or the fewest bytes."""


def chunk_encoder(profile: str, dtype: DTypeLike, first: NDArray[Any] | None = None) -> ChunkEncoder:
    """Return the encoder of a profile for one element type.

    Parameters
    ----------
    profile : str
        One of `PROFILES`.
    dtype : dtype
        Element type. Unsigned integers of 1-D arrays go by the profile, all else is written as in ``"standard"``.
    first : (k, ...) array, optional
        The first values, or none of them but with their shape: what ascends is stored as differences in ``"archive"``.

    Raises
    ------
    StoreError
        If the profile is unknown.
    """
    if profile not in PROFILES:
        raise StoreError(f"Unknown codec profile {profile!r}; known are {', '.join(PROFILES)}.")
    kind = np.dtype(dtype)
    values = np.empty(0, kind) if first is None else first
    ascents = values[1:] > values[:-1]
    ascending = len(ascents) and np.count_nonzero(ascents) * 8 >= ascents.size * 7
    delta = kind.newbyteorder("<").str if ascending else ""
    return PROFILES[profile if values.ndim == 1 else "standard"](kind, delta)


def array_codecs(profile: str, dtype: DTypeLike, first: NDArray[Any] | None = None) -> dict[str, Any]:
    """Return the arguments of zarr-python's ``create_array`` that write a 1-D array as `chunk_encoder` does."""
    from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec
    from zarr.registry import get_codec_class

    known: dict[str, Any] = {"blosc": BloscCodec, "crc32c": Crc32cCodec, "bytes": BytesCodec}
    codecs = chunk_encoder(profile, dtype, first).codecs()
    made = [known.get(item["name"]) or get_codec_class(item["name"]) for item in codecs]
    built = [kind.from_dict(item) for kind, item in zip(made, codecs, strict=True)]
    place = next(i for i, item in enumerate(codecs) if item["name"] in {"bytes", PACKED})
    return {"filters": built[:place] or None, "serializer": built[place], "compressors": built[place + 1 :]}


def encode_packed_chunk(values: NDArray[Any], breaks: NDArray[np.int64]) -> bytes:
    """Pack one chunk and add its crc32c; `breaks` are the places, ascending, where rows begin."""
    return with_checksum(encode_packed(np.ascontiguousarray(values).reshape(-1), breaks).tobytes())


def encode_run(
    encoder: ChunkEncoder, values: NDArray[Any], chunk_rows: int, breaks: NDArray[np.int64] = NO_BREAKS
) -> list[ChunkRun]:
    """Encode whole chunks of rows on the decoding threads.

    Parameters
    ----------
    encoder : ChunkEncoder
        How one chunk is encoded.
    values : (c * chunk_rows, ...)
        Contiguous rows.
    chunk_rows : int
        Rows of one chunk.
    breaks : (k,) int64
        Places in `values`, ascending, where rows of a matrix begin; packed blocks follow them.

    Returns
    -------
    list of ChunkRun
        Of c chunks together.
    """
    n_chunks = len(values) // chunk_rows
    if not n_chunks:
        return []
    if isinstance(encoder, PackedEncoder):
        return _pack_run(values[: n_chunks * chunk_rows].reshape(-1), chunk_rows, breaks)
    per_slab = max(1, min(_SLAB_BYTES * n_chunks // max(1, values.nbytes), -(-n_chunks // DECODE_THREADS)))

    def encode(first: int) -> ChunkRun:
        last = min(first + per_slab, n_chunks)
        chunks = [encoder(values[i * chunk_rows : (i + 1) * chunk_rows]) for i in range(first, last)]
        return ChunkRun(b"".join(chunks), np.cumsum([len(chunk) for chunk in chunks], dtype=np.int64))

    return map_decode(encode, range(0, n_chunks, per_slab))


def _pack_run(values: NDArray[Any], chunk_rows: int, breaks: NDArray[np.int64]) -> list[ChunkRun]:
    """Pack chunks, some at a time."""
    n_chunks = values.size // chunk_rows
    per_slab = max(1, min(_SLAB_CHUNKS, -(-n_chunks // DECODE_THREADS)))
    starts = list(range(0, n_chunks, per_slab))
    edges = np.searchsorted(breaks, np.array([*starts, n_chunks]) * chunk_rows)

    def pack(i: int) -> ChunkRun:
        first = starts[i] * chunk_rows
        inside = breaks[edges[i] : edges[i + 1]] - first
        return encode_packed_run(values[first : first + per_slab * chunk_rows], chunk_rows, inside)

    return map_decode(pack, range(len(starts)))
