"""Codecs: which may be read, how chunks are checked and decoded, and how the codec profiles encode them."""

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from raggedatlas.errors import CorruptError, SourceError, StoreError
from raggedatlas.model.arrays import ArraySpec
from raggedatlas.store.byte_filters import decode_lzf, inflate, unshuffle
from raggedatlas.store.native import GOOD, library
from raggedatlas.store.runtime import DECODE_THREADS, map_decode, shared_pool

Stored: TypeAlias = bytes | memoryview | NDArray[np.uint8]
"""Stored bytes as they come from a file, a store or a memory map."""

Piece: TypeAlias = bytes | memoryview
"""Bytes that are or will be a part of an object."""

Buffers: TypeAlias = Piece | list[Piece]
"""Bytes to write, in one piece or several."""

KNOWN_CODECS = frozenset(
    {
        # Zarr v3
        "bytes", "blosc", "crc32c", "gzip", "zstd", "transpose", "sharding_indexed", "vlen-utf8", "vlen-bytes",
        # Zarr v2 (numcodecs); as v3 extensions they carry the prefix "numcodecs."
        "adler32", "astype", "bitround", "bz2", "crc32", "delta", "fixedscaleoffset", "fletcher32", "lz4", "lzma",
        "packbits", "quantize", "shuffle", "zlib", "categorize",
        # HDF5, of files that are read where they are
        "lzf",
        # ours
        "raggedatlas.packed",
    }
)  # fmt: skip
"""Codecs allowed in foreign arrays; anything else, above all pickle, is refused by name."""

PACKED = "raggedatlas.packed"
"""Name of the packed codec in ``zarr.json``."""

BLOSC_HEADER = struct.Struct("<BBBBIII")
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_LARGEST_ELEMENT = 255
"""Bytes of an element whose bytes may be shuffled."""
_ZSTD_BLOCK = 128 * 1024
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"


@dataclass(frozen=True)
class ChunkDecoder:
    """Decodes the bytes of one chunk, every check first."""

    # "none", "packed" or one of Zarr, numcodecs or HDF5: "blosc", "zstd", "gzip", "zlib", "lz4", "lzf".
    compressor: str
    checksum: bool  # whether the last four bytes are the crc32c of those before
    delta: bool = False  # whether differences are stored
    compiled: bool = False  # whether the library decodes the compressor: of Blosc, LZ4 with or without shuffled bytes
    # Bytes of the elements whose bytes were sorted by their place before they were compressed; 1 where they were not.
    shuffled: int = 1
    fletcher: bool = False  # whether the last four bytes are the Fletcher checksum of those before, as HDF5 computes it
    swapped: bool = False  # whether numbers are stored with their highest byte first

    @property
    def is_plain(self) -> bool:
        """Whether a chunk is its elements one after the other and nothing else, so that any part of it can be read alone."""
        checked = self.checksum or self.fletcher
        return self.compressor == "none" and not (checked or self.delta) and self.shuffled == 1

    def __call__(self, raw: Stored, out: NDArray[Any]) -> None:
        """Decode `raw` into the contiguous array `out` of exactly the decoded size, which may be half written after a `CorruptError`."""
        data = raw if isinstance(raw, np.ndarray) else np.frombuffer(raw, dtype=np.uint8)
        if self.checksum:
            if data.size < 4:
                raise CorruptError(f"A chunk of {data.size} bytes has no room for its checksum.")
            if not has_checksum(data):
                raise CorruptError("The crc32c of a chunk does not match its bytes.")
            data = data[:-4]
        if self.compressor == "packed":
            decode_packed(data, out.reshape(-1))
            return
        room = out.reshape(-1).view(np.uint8)
        if self.fletcher:
            data = _without_fletcher(data)
        try:
            if self.shuffled > 1:
                unshuffle(
                    _decompress(self.compressor, data, np.empty(room.size, np.uint8)), room.view(f"V{self.shuffled}")
                )
            else:
                decoded = _decompress(self.compressor, data, room)
                if decoded is not room:
                    room[:] = decoded
        except (RuntimeError, ValueError) as error:
            if isinstance(error, CorruptError):
                raise
            raise CorruptError(f"A {self.compressor} frame does not decode: {error}") from error
        if self.swapped:
            out.byteswap(inplace=True)
        if self.delta:
            # Unsigned differences wrap around, and their sums wrap back; without `dtype` NumPy would add in 64 bits.
            np.cumsum(out.reshape(-1), out=out.reshape(-1), dtype=out.dtype)


def chunk_decoder(codecs: Sequence[dict[str, Any]]) -> ChunkDecoder | None:
    """Return the decoder of one (inner) chunk with codecs as ``zarr.json`` lists them, or None where only zarr-python knows it."""
    refuse_unknown_codecs(codecs)
    stages = [(item["name"].removeprefix("numcodecs."), item.get("configuration") or {}) for item in codecs]
    settings = stages[0][1] if stages else {}
    delta = [name for name, _ in stages[:1]] == ["delta"] and settings.get("astype") in {None, settings.get("dtype")}
    if delta:
        stages.pop(0)
    names = [name for name, _ in stages]
    checksum, fletcher = names[-1:] == ["crc32c"], names[-1:] == ["fletcher32"]
    if checksum and stages[-1][1].get("location") not in {None, "end"}:
        return None
    if checksum or fletcher:
        names.pop()
    if names == [PACKED] and not (delta or fletcher):
        return ChunkDecoder("packed", checksum, compiled=True)
    if names[:1] != ["bytes"]:
        return None
    # Of one-byte types no endianness is named.
    endian = stages[0][1].get("endian", "little")
    shuffled = stages[1][1].get("elementsize", 4) if names[1:2] == ["shuffle"] else 1
    compressor = names[1 + (names[1:2] == ["shuffle"]) :]
    if (
        endian not in {"little", "big"}
        or len(compressor) > 1
        or (compressor and compressor[0] not in {*_DECODERS, *_INFLATED})
    ):
        return None
    if type(shuffled) is not int or not 1 <= shuffled <= _LARGEST_ELEMENT:
        return None
    blosc = stages[1][1] if compressor == ["blosc"] and names[1:] == ["blosc"] else {}
    known = names[1:] == [] or (blosc.get("cname") == "lz4" and blosc.get("shuffle") != "bitshuffle")
    compiled = known and endian == "little" and not fletcher
    name = compressor[0] if compressor else "none"
    return ChunkDecoder(name, checksum, delta, compiled, shuffled, fletcher, endian == "big")


def array_decoder(spec: ArraySpec) -> ChunkDecoder | None:
    """Return the decoder of one chunk of an array, or None where chunks must go through zarr-python; unknown codecs are refused."""
    if spec.is_columns:
        return None
    codecs = json.loads(spec.codecs)
    refuse_unknown_codecs(codecs, spec.path)
    outer = spec.shard_shape
    # A chunk decodes directly into a slice of the output only if it holds complete rows.
    whole_rows = outer is not None and outer[1:] == spec.chunk_shape[1:] == spec.row_shape
    return chunk_decoder(codecs) if whole_rows or spec.linked is not None else None


def refuse_unknown_codecs(codecs: Sequence[Any], where: str = "a Zarr array") -> None:
    """Refuse a codec that is not in `KNOWN_CODECS`, also inside shards."""
    for item in codecs:
        settings = item.get("configuration") or {} if isinstance(item, dict) else {}
        name = str(item.get("name", item.get("id")) if isinstance(item, dict) else item)
        if name.removeprefix("numcodecs.") not in KNOWN_CODECS:
            raise SourceError(
                f"{where} is encoded with {name!r}, which is not among the codecs that are read (pickle never is). "
                "Write it again with a standard codec such as blosc or zstd."
            )
        if name == "sharding_indexed":
            refuse_unknown_codecs(settings.get("codecs", []), where)
            refuse_unknown_codecs(settings.get("index_codecs", []), where)


def is_exact(narrow: DTypeLike, wide: DTypeLike) -> bool:
    """Return whether every value of one element type is a value of the other (float64 does not hold all int64)."""
    old, new = np.dtype(narrow), np.dtype(wide)
    # `np.can_cast` calls int64 to float64 safe, although float64 is exact only up to 2**53.
    if old.kind in "iu" and new.kind in "fc":
        part = np.empty(0, new).real.dtype
        return old.itemsize * 8 - (old.kind == "i") <= np.finfo(part).nmant + 1
    return bool(np.can_cast(old, new, "safe"))


def codecs_json(codecs: Sequence[dict[str, Any]]) -> str:
    """Return codecs as compact JSON with sorted keys."""
    return json.dumps(list(codecs), sort_keys=True, separators=(",", ":"))


def blosc_declared_bytes(data: NDArray[np.uint8]) -> int:
    """Return the declared decoded size of a Blosc frame, after checking its header against the stored bytes."""
    if data.size < BLOSC_HEADER.size:
        raise CorruptError(f"A Blosc frame of {data.size} bytes is shorter than its head of {BLOSC_HEADER.size}.")
    *_, n_bytes, _, n_compressed = BLOSC_HEADER.unpack(data[: BLOSC_HEADER.size].tobytes())
    if n_compressed != data.size:
        raise CorruptError(f"A Blosc frame says it takes {n_compressed} bytes, {data.size} are stored.")
    return int(n_bytes)


def zstd_declared_bytes(data: NDArray[np.uint8]) -> int:
    """Return the decoded size of the zstd frames in `data`, or an upper bound where one declares none, without decoding them."""
    if data.size < 6 or data[:4].tobytes() != ZSTD_MAGIC:
        raise CorruptError("A zstd frame does not start with the zstd magic number.")
    total = at = 0
    # zstd decodes all frames that follow one another, not only the first.
    while at + 6 <= data.size:
        magic = data[at : at + 4].tobytes()
        if magic[0] >> 4 == 5 and magic[1:] == _ZSTD_SKIPPABLE:
            at += 8 + int.from_bytes(data[at + 4 : at + 8].tobytes(), "little")
            continue
        if magic != ZSTD_MAGIC:
            break
        flags = int(data[at + 4])
        single, size_code = bool(flags & 0x20), flags >> 6
        # Magic (4), descriptor (1), window (none in a single segment), dictionary id, then the content size.
        position = at + 5 + (not single) + (0, 1, 2, 4)[flags & 3]
        width = (int(single), 2, 4, 8)[size_code]
        declared = int.from_bytes(data[position : position + width].tobytes(), "little") + (256 if width == 2 else 0)
        bound, at = _bound_zstd_blocks(data, position + width)
        total += declared if width else bound
        # A checksum of 4 bytes may follow the blocks.
        at += flags & 4
    return total


def _bound_zstd_blocks(data: NDArray[np.uint8], position: int) -> tuple[int, int]:
    """Return an upper bound on the decoded size of the blocks of a zstd frame, and where they end."""
    total, last = 0, False
    while not last and position + 3 <= data.size:
        head = int.from_bytes(data[position : position + 3].tobytes(), "little")
        last, kind, size = bool(head & 1), head >> 1 & 3, head >> 3
        # Raw and run-length blocks say their decoded size; a compressed one (2) decodes to at most 128 KiB.
        total += _ZSTD_BLOCK if kind == 2 else size
        position += 3 + (1 if kind == 1 else size)
    return total, position


def _expect(declared: int, out: NDArray[np.uint8], kind: str) -> None:
    """Refuse a frame that would not fill `out` exactly, before any of it is decoded."""
    if declared != out.size:
        raise CorruptError(f"A {kind} chunk declares {declared} bytes where {out.size} were expected.")


def _decode_blosc(data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Decompress a Blosc chunk."""
    from numcodecs import blosc

    _expect(blosc_declared_bytes(data), out, "Blosc")
    blosc.decompress(data, out)


def _decode_zstd(data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Decompress a zstd chunk."""
    import pyarrow as pa
    from numcodecs import zstd

    declared = zstd_declared_bytes(data)
    if declared <= out.size:
        _expect(declared, out, "zstd")
        zstd.decompress(data, out)
        return
    # Streaming writers leave the size out, and only a bound is known. No more is decoded than fits.
    try:
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
            decoded = stream.read(out.size + 1)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(str(error)) from error
    _expect(len(decoded), out, "zstd")
    out[:] = np.frombuffer(decoded, np.uint8)


def decode_packed(data: NDArray[np.uint8], out: NDArray[Any]) -> None:
    """Check and unpack one packed chunk, without its checksum, into a contiguous 1-D array of exactly its size.

    After a `CorruptError` nothing was written.
    """
    raw = np.ascontiguousarray(data)
    if out.dtype.kind != "u" or library().ra_unpack(raw, raw.size, out.size, out.itemsize, out) != GOOD:
        raise CorruptError(f"A packed chunk of {raw.size:,} bytes is not one of {out.size:,} {out.dtype} values.")


def _decode_lz4(data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Decompress an LZ4 chunk as numcodecs writes it, its size in front."""
    from numcodecs import lz4

    _expect(int.from_bytes(data[:4].tobytes(), "little"), out, "LZ4")
    lz4.decompress(data, out)


def _decode_lzf(data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Decompress an LZF chunk; HDF5 stores one as it is that would not get smaller, with the size that it has."""
    if data.size != out.size:
        decode_lzf(data, out)
        return
    try:
        decode_lzf(data, out)
    except ValueError:
        out[:] = data
    else:
        raise CorruptError("A chunk may be an LZF stream or bytes that were left as they were; they have one length.")


def _without_fletcher(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Check the Fletcher checksum at the end of a chunk, and return what is before."""
    from numcodecs.fletcher32 import Fletcher32

    if data.size < 5:
        raise CorruptError(f"A chunk of {data.size} bytes has no room for its checksum.")
    try:
        return np.frombuffer(Fletcher32().decode(data), np.uint8)
    except RuntimeError:
        raise CorruptError("The Fletcher checksum of a chunk does not match its bytes.") from None


_DECODERS: dict[str, Callable[[NDArray[np.uint8], NDArray[np.uint8]], None]] = {
    "blosc": _decode_blosc,
    "zstd": _decode_zstd,
    "lz4": _decode_lz4,
    "lzf": _decode_lzf,
}
_INFLATED = ("gzip", "zlib")
"""Compressors that write to memory of their own."""


def _decompress(compressor: str, data: NDArray[np.uint8], room: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Decompress bytes to exactly the size of some room; return this, or other memory that they are already in."""
    if compressor in _INFLATED:
        return np.frombuffer(inflate(data, room.size, wrapped=compressor == "gzip"), np.uint8)
    if compressor == "none":
        _expect(data.size, room, "plain")
        return data
    _DECODERS[compressor](data, room)
    return room


def crc32c(data: bytes | bytearray | memoryview | NDArray[np.uint8]) -> int:
    """Return the crc32c of contiguous bytes."""
    raw = np.frombuffer(data, np.uint8)
    return int(library().ra_crc32c(0, raw, raw.size))


def extend_checksum(crc: int, values: NDArray[Any]) -> int:
    """Update a crc32c with the little-endian bytes of values."""
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return int(library().ra_crc32c(crc, raw, raw.size))


def has_checksum(data: NDArray[np.uint8]) -> bool:
    """Return whether bytes end with the crc32c of the preceding ones."""
    return data.size >= 4 and crc32c(np.ascontiguousarray(data[:-4])) == int.from_bytes(data[-4:].tobytes(), "little")


def with_checksum(data: bytes) -> bytes:
    """Append their crc32c to bytes."""
    return data + crc32c(data).to_bytes(4, "little")


@dataclass(frozen=True, slots=True, eq=False)
class EncodedChunks:
    """Consecutive encoded chunks in one buffer; a Python object per chunk would cost more than writing it."""

    data: Piece  # the chunks, concatenated
    ends: NDArray[np.int64]  # (n_chunks,): where each ends in `data`; the next begins there

    @classmethod
    def single(cls, chunk: bytes) -> Self:
        """Wrap one encoded chunk."""
        return cls(chunk, np.array([len(chunk)], np.int64))

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.ends)

    def chunks(self) -> list[memoryview]:
        """Return the chunks as separate views."""
        data = memoryview(self.data)
        return [data[start:stop] for start, stop in pairwise([0, *self.ends.tolist()])]

    def split(self, n: int) -> tuple[Self, Self]:
        """Split off the first `n` chunks, 0 < n < len(self)."""
        data, offset = memoryview(self.data), int(self.ends[n - 1])
        return type(self)(data[:offset], self.ends[:n]), type(self)(data[offset:], self.ends[n:] - offset)


def count_chunks(runs: Sequence[EncodedChunks]) -> int:
    """Count the chunks of a list."""
    return sum(map(len, runs))


def split_chunks(runs: Sequence[EncodedChunks], n: int) -> tuple[list[EncodedChunks], list[EncodedChunks]]:
    """Split off the first `n` chunks of a list."""
    before: list[EncodedChunks] = []
    left = n
    for i, run in enumerate(runs):
        if left >= len(run):
            before.append(run)
            left -= len(run)
        elif left:
            first, rest = run.split(left)
            return [*before, first], [rest, *runs[i + 1 :]]
        else:
            return before, list(runs[i:])
    return before, []


def encode_packed(values: NDArray[Any], breaks: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Pack one chunk of unsigned integers, at least one, without a checksum.

    `breaks` are places, ascending, where a block should begin if the chunk does not ascend; they only make it smaller
    and faster.
    """
    out = np.empty(library().ra_packed_room(values.size, values.itemsize), np.uint8)
    n = library().ra_pack(values, values.size, values.itemsize, breaks, breaks.size, out, out.size)
    return out[:n]


def encode_packed_run(values: NDArray[Any], chunk: int, breaks: NDArray[np.int64]) -> EncodedChunks:
    """Pack chunks, each followed by its crc32c, in one call that releases the interpreter's lock.

    `values` are consecutive chunks of `chunk` unsigned integers each. `breaks` are places in `values`, ascending, as
    `encode_packed` takes them.
    """
    n_chunks = values.size // chunk
    # Most of the buffer is never touched, and reused memory need not be cleared by the system.
    room = n_chunks * (library().ra_packed_room(chunk, values.itemsize) + 4)
    out = shared_pool().take(room, np.dtype(np.uint8))
    ends, row_starts = np.empty(n_chunks, np.int64), breaks.copy()
    n = library().ra_pack_chunks(
        values, n_chunks, chunk, values.itemsize, row_starts, row_starts.size, out, out.size, ends
    )
    # NumPy releases the interpreter's lock while it copies.
    return EncodedChunks(out[:n].copy().data, ends)


_SLAB_BYTES = 4 * 2**20
_SLAB_CHUNKS = 64
_CRC: dict[str, Any] = {"name": "crc32c"}
NO_BREAKS = np.empty(0, np.int64)
"""Empty list of row starts."""


@dataclass(frozen=True)
class ChunkEncoder:
    """How chunks are encoded: packed, or as bytes (little endian) by Blosc with byte shuffle; a crc32c follows.

    The checksum comes last, so that a reader checks it before it decompresses anything.
    """

    compressor: str  # "packed", or of Blosc: "lz4" or "zstd"
    itemsize: int  # bytes of an element, or of what is shuffled
    chunk_elements: int = 4096  # of a 1-D array, as `shard_elements`
    shard_elements: int = 4 * 2**20
    delta: str = ""  # dtype of the elements where differences are stored, e.g. "<u4"; else empty

    def codecs(self) -> list[dict[str, Any]]:
        """Return the codecs of a chunk for ``zarr.json``."""
        if self.compressor == "packed":
            return [{"name": PACKED}, _CRC]
        settings = {
            "typesize": self.itemsize,
            "cname": self.compressor,
            "clevel": 5,
            "shuffle": "shuffle",
            "blocksize": 0,
        }
        little: dict[str, Any] = {"name": "bytes"}
        if self.itemsize > 1:
            little["configuration"] = {"endian": "little"}
        before = [{"name": "numcodecs.delta", "configuration": {"dtype": self.delta}}] if self.delta else []
        return [*before, little, {"name": "blosc", "configuration": settings}, _CRC]

    def compress(self, values: NDArray[Any]) -> bytes:
        """Return a contiguous chunk as Blosc compresses it, with its crc32c."""
        from numcodecs import blosc

        plain = values.reshape(-1)
        if self.delta:
            plain = np.diff(plain, prepend=plain.dtype.type(0))
        # Blosc shuffles by the item size of the buffer.
        packed = blosc.compress(plain.view(f"u{self.itemsize}"), self.compressor.encode(), 5, blosc.SHUFFLE)
        return with_checksum(packed)


STANDARD = "standard"

PROFILES = ("packed", STANDARD, "archive")
"""The codec profiles of an atlas: fast random reads, codecs that any Zarr v3 reader knows, or the fewest bytes."""


def chunk_encoder(profile: str, dtype: DTypeLike, first: NDArray[Any] | None = None) -> ChunkEncoder:
    """Return the encoder of a profile for one element type.

    Unsigned integers of 1-D arrays go by the profile, all else is written as in ``"standard"``. `first` has the first
    values, or none of them but with their shape: what ascends is stored as differences in ``"archive"``.
    """
    if profile not in PROFILES:
        raise StoreError(f"Unknown codec profile {profile!r}; known are {', '.join(PROFILES)}.")
    kind = np.dtype(dtype)
    values = np.empty(0, kind) if first is None else first
    if profile == STANDARD or kind.kind != "u" or values.ndim != 1:
        # The parts of complex numbers are shuffled.
        return ChunkEncoder("lz4", kind.itemsize // 2 if kind.kind == "c" else kind.itemsize)
    if profile == "packed":
        return ChunkEncoder("packed", kind.itemsize, 16384, 16 * 2**20)
    ascents = values[1:] > values[:-1]
    ascending = len(ascents) and np.count_nonzero(ascents) * 8 >= ascents.size * 7
    delta = kind.newbyteorder("<").str if ascending else ""
    return ChunkEncoder("zstd", kind.itemsize, 65536, 16 * 2**20, delta)


def encode_run(
    encoder: ChunkEncoder, values: NDArray[Any], chunk_rows: int, breaks: NDArray[np.int64] = NO_BREAKS
) -> list[EncodedChunks]:
    """Encode full chunks of rows on the decoding threads.

    `values` are contiguous rows, (c * chunk_rows, ...). `breaks` are places in them, ascending, where rows of a matrix
    begin; packed blocks follow these. The result holds c chunks together.
    """
    n_chunks, is_packed = len(values) // chunk_rows, encoder.compressor == "packed"
    most = _SLAB_CHUNKS if is_packed else _SLAB_BYTES * n_chunks // max(1, values.nbytes)
    per_slab = max(1, min(most, -(-n_chunks // DECODE_THREADS)))
    starts = range(0, n_chunks, per_slab)
    edges = np.searchsorted(breaks, np.array([*starts, n_chunks]) * chunk_rows)

    def encode(i: int) -> EncodedChunks:
        first = starts[i] * chunk_rows
        slab = values[first : min(first + per_slab * chunk_rows, n_chunks * chunk_rows)]
        if is_packed:
            return encode_packed_run(slab.reshape(-1), chunk_rows, breaks[edges[i] : edges[i + 1]] - first)
        chunks = [encoder.compress(slab[at : at + chunk_rows]) for at in range(0, len(slab), chunk_rows)]
        return EncodedChunks(b"".join(chunks), np.cumsum([len(chunk) for chunk in chunks], dtype=np.int64))

    return map_decode(encode, range(len(starts)))
