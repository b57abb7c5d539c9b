"""How chunks are encoded: the three codec profiles, and whole runs of chunks on the decoding threads."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from raggedatlas.errors import CorruptError, StoreError
from raggedatlas.store.codecs import PACKED
from raggedatlas.store.runs import ChunkRun
from raggedatlas.store.threads import DECODE_THREADS, map_decode

if TYPE_CHECKING:
    from raggedatlas.store.chunks import NativeFunctions

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
        import google_crc32c
        from numcodecs import blosc

        plain = values.reshape(-1)
        if self.delta:
            plain = np.diff(plain, prepend=plain.dtype.type(0))
        packed = blosc.compress(plain.view(f"u{min(self.itemsize, 8)}"), self.name.encode(), 5, blosc.SHUFFLE)
        return bytes(packed) + struct.pack("<I", google_crc32c.value(packed))

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
    import google_crc32c

    from raggedatlas.store.packing import encode_packed, packed_bound

    plain = np.ascontiguousarray(values).reshape(-1)
    out = np.empty(packed_bound(plain.size, plain.itemsize), np.uint8)
    packed = out[: encode_packed(plain, breaks, out)]
    return packed.tobytes() + struct.pack("<I", google_crc32c.value(packed))


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
    from raggedatlas.store.chunks import native_functions

    n_chunks = len(values) // chunk_rows
    if not n_chunks:
        return []
    starts = list(range(0, n_chunks * chunk_rows, chunk_rows))
    native = native_functions()
    if isinstance(encoder, PackedEncoder):
        return _pack_run(values[: n_chunks * chunk_rows].reshape(-1), chunk_rows, breaks, native)
    if native is None or encoder.name != "lz4" or encoder.delta:
        return map_decode(lambda start: ChunkRun.of(encoder(values[start : start + chunk_rows])), starts)
    raw = values.reshape(-1).view(np.uint8)
    n_bytes = raw.size // n_chunks
    per_slab = max(1, min(_SLAB_BYTES // n_bytes, -(-n_chunks // DECODE_THREADS)))
    slabs = [raw[i * n_bytes : (i + per_slab) * n_bytes] for i in range(0, n_chunks, per_slab)]
    return map_decode(lambda slab: _encode_slab(slab, n_bytes, encoder.itemsize, native), slabs)


def _pack_run(
    values: NDArray[Any], chunk_rows: int, breaks: NDArray[np.int64], native: "NativeFunctions | None"
) -> list[ChunkRun]:
    """Pack chunks, some at a time where the checksum can be called from compiled code."""
    from raggedatlas.store.packing import encode_packed_run

    n_chunks = values.size // chunk_rows
    per_slab = 1 if native is None else max(1, min(_SLAB_CHUNKS, -(-n_chunks // DECODE_THREADS)))
    starts = list(range(0, n_chunks, per_slab))
    edges = np.searchsorted(breaks, np.array([*starts, n_chunks]) * chunk_rows)

    def pack(i: int) -> ChunkRun:
        first = starts[i] * chunk_rows
        part = values[first : first + per_slab * chunk_rows]
        inside = breaks[edges[i] : edges[i + 1]] - first
        if native is None:
            return ChunkRun.of(encode_packed_chunk(part, inside))
        return encode_packed_run(part, chunk_rows, inside, native.crc32c)

    return map_decode(pack, range(len(starts)))


def _encode_slab(raw: NDArray[np.uint8], n_bytes: int, width: int, native: "NativeFunctions") -> ChunkRun:
    """Encode chunks that lie one behind the other."""
    from raggedatlas.store.chunks import LZ4_NAME, encode_chunks

    out = np.empty(raw.size // n_bytes * (n_bytes + 20), np.uint8)
    sizes = encode_chunks(raw, n_bytes, width, (native.compress, LZ4_NAME, native.crc32c), out)
    if (sizes < 0).any():
        raise CorruptError("Blosc refused to encode a chunk; report this with the dtype and shape of the array.")
    ends = np.cumsum(sizes)
    return ChunkRun(out[: ends[-1]].copy().data, ends)
