"""The door for stored bytes: which codecs may be read, and how chunks are checked before they are decoded."""

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from raggedatlas.errors import CorruptError, SourceError
from raggedatlas.store.checksums import has_checksum
from raggedatlas.store.native import GOOD, library

Stored: TypeAlias = bytes | memoryview | NDArray[np.uint8]
"""Stored bytes as they come from a file, a store or a memory map."""

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
"""Element types of the arrays that are read and written in ranges."""

KNOWN_CODECS = frozenset(
    {
        # Zarr v3
        "bytes", "blosc", "crc32c", "gzip", "zstd", "transpose", "sharding_indexed", "vlen-utf8", "vlen-bytes",
        # Zarr v2 (numcodecs); as v3 extensions they carry the prefix "numcodecs."
        "adler32", "astype", "bitround", "bz2", "crc32", "delta", "fixedscaleoffset", "fletcher32", "lz4", "lzma",
        "packbits", "quantize", "shuffle", "zlib", "categorize",
        # ours
        "raggedatlas.packed",
    }
)  # fmt: skip
"""Codecs that may stand in a foreign array; anything else, above all pickle, is refused by name."""

PACKED = "raggedatlas.packed"
"""Name of the packed codec in ``zarr.json``."""

BLOSC_HEADER = struct.Struct("<BBBBIII")
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_BLOCK = 128 * 1024


@dataclass(frozen=True)
class ChunkDecoder:
    """Decodes the bytes of one chunk, every check first.

    Parameters
    ----------
    compressor : str
        ``"none"``, ``"blosc"``, ``"zstd"`` or ``"packed"``.
    checksum : bool
        Whether the last four bytes are the crc32c of those before.
    delta : bool
        Whether differences are stored.
    """

    compressor: str
    checksum: bool
    delta: bool = False

    def __call__(self, raw: Stored, out: NDArray[Any]) -> None:
        """Decode `raw` into the contiguous array `out`, which must have exactly the decoded size.

        Raises
        ------
        CorruptError
            If the checksum, the declared size or the compressed frame is wrong. `out` may then be half written.
        """
        data = np.frombuffer(raw, dtype=np.uint8)
        if self.checksum:
            data = _without_checksum(data)
        if self.compressor == "packed":
            decode_packed(data, out.reshape(-1))
            return
        try:
            _DECODERS[self.compressor](data, out.reshape(-1).view(np.uint8))
        except (RuntimeError, ValueError) as error:
            if isinstance(error, CorruptError):
                raise
            raise CorruptError(f"A {self.compressor} frame does not decode: {error}") from error
        if self.delta:
            np.cumsum(out.reshape(-1), out=out.reshape(-1), dtype=out.dtype)


def chunk_decoder(codecs: Sequence[dict[str, Any]]) -> ChunkDecoder | None:
    """Return the decoder of a chunk pipeline, or None where only zarr-python knows it.

    Parameters
    ----------
    codecs : sequence of dict
        Codecs of one (inner) chunk as they stand in ``zarr.json``.

    Raises
    ------
    SourceError
        If a codec is not among those that may be read at all.
    """
    refuse_unknown_codecs(codecs)
    names = [item["name"] for item in codecs]
    settings = (codecs[0].get("configuration") or {}) if codecs else {}
    delta = names[:1] == ["numcodecs.delta"] and settings.get("astype") in {None, settings.get("dtype")}
    if delta:
        names.pop(0)
    checksum = names[-1:] == ["crc32c"]
    if checksum:
        names.pop()
    if names == [PACKED] and not delta:
        return ChunkDecoder("packed", checksum)
    endian = (codecs[delta].get("configuration") or {}).get("endian", "little") if names else "big"
    if names[:1] != ["bytes"] or endian != "little" or names[1:] not in ([], ["blosc"], ["zstd"]):
        return None
    return ChunkDecoder(names[1] if names[1:] else "none", checksum, delta)


def refuse_unknown_codecs(codecs: Sequence[Any], where: str = "a Zarr array") -> None:
    """Refuse a codec that is not in `KNOWN_CODECS`, also inside shards.

    Raises
    ------
    SourceError
        Naming the codec.
    """
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
    """Tell whether every value of one element type is a value of the other (float64 does not hold all int64)."""
    old, new = np.dtype(narrow), np.dtype(wide)
    if old.kind in "iu" and new.kind in "fc":
        part = np.empty(0, new).real.dtype
        return old.itemsize * 8 - (old.kind == "i") <= np.finfo(part).nmant + 1
    return bool(np.can_cast(old, new, "safe"))


def codecs_json(codecs: Sequence[dict[str, Any]]) -> str:
    """Return codecs as compact JSON with sorted keys."""
    return json.dumps(list(codecs), sort_keys=True, separators=(",", ":"))


def blosc_declared_bytes(data: NDArray[np.uint8]) -> int:
    """Return how many bytes a Blosc frame says it holds, after checking its head against the bytes at hand."""
    if data.size < BLOSC_HEADER.size:
        raise CorruptError(f"A Blosc frame of {data.size} bytes is shorter than its head of {BLOSC_HEADER.size}.")
    *_, n_bytes, _, n_compressed = BLOSC_HEADER.unpack(data[: BLOSC_HEADER.size].tobytes())
    if n_compressed != data.size:
        raise CorruptError(f"A Blosc frame says it takes {n_compressed} bytes, {data.size} are stored.")
    return int(n_bytes)


def zstd_declared_bytes(data: NDArray[np.uint8]) -> int:
    """Return how many bytes a zstd frame holds, or at most holds where it does not say, without decoding it."""
    if data.size < 6 or data[:4].tobytes() != ZSTD_MAGIC:
        raise CorruptError("A zstd frame does not start with the zstd magic number.")
    flags = int(data[4])
    single, size_code = bool(flags & 0x20), flags >> 6
    position = 5 + (not single) + (0, 1, 2, 4)[flags & 3]
    width = (int(single), 2, 4, 8)[size_code]
    if width:
        field = data[position : position + width].tobytes()
        return int.from_bytes(field, "little") + (256 if width == 2 else 0)
    return _bound_zstd_blocks(data, position)


def _bound_zstd_blocks(data: NDArray[np.uint8], position: int) -> int:
    """Add up what the blocks of a zstd frame can hold at most."""
    total, last = 0, False
    while not last and position + 3 <= data.size:
        head = int.from_bytes(data[position : position + 3].tobytes(), "little")
        last, kind, size = bool(head & 1), head >> 1 & 3, head >> 3
        total += _ZSTD_BLOCK if kind == 2 else size
        position += 3 + (1 if kind == 1 else size)
    return total


def _without_checksum(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the bytes before a trailing crc32c, after checking it."""
    if data.size < 4:
        raise CorruptError(f"A chunk of {data.size} bytes has no room for its checksum.")
    if not has_checksum(data):
        raise CorruptError("The crc32c of a chunk does not match its bytes.")
    return data[:-4]


def _expect(declared: int, out: NDArray[np.uint8], kind: str) -> None:
    """Refuse a frame that would not fill `out` exactly, before any of it is decoded."""
    if declared != out.size:
        raise CorruptError(f"A {kind} chunk declares {declared} bytes where {out.size} were expected.")


def _decode_plain(data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Copy an uncompressed chunk."""
    _expect(data.size, out, "plain")
    out[:] = data


def _decode_blosc(data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Decompress a Blosc chunk."""
    from numcodecs import blosc

    _expect(blosc_declared_bytes(data), out, "Blosc")
    blosc.decompress(data, out)


def _decode_zstd(data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Decompress a zstd chunk whose frame says its size."""
    from numcodecs import zstd

    _expect(zstd_declared_bytes(data), out, "zstd")
    zstd.decompress(data, out)


def decode_packed(data: NDArray[np.uint8], out: NDArray[Any]) -> None:
    """Check and unpack one packed chunk, without its checksum, into a contiguous 1-D array of exactly its size.

    Raises
    ------
    CorruptError
        If its head or its tables are not in order, or `out` does not fit; nothing was written then.
    """
    raw = np.ascontiguousarray(data)
    if out.dtype.kind != "u" or library().ra_unpack(raw, raw.size, out.size, out.itemsize, out) != GOOD:
        raise CorruptError(f"A packed chunk of {raw.size:,} bytes is not one of {out.size:,} {out.dtype} values.")


_DECODERS: dict[str, Callable[[NDArray[np.uint8], NDArray[np.uint8]], None]] = {
    "none": _decode_plain,
    "blosc": _decode_blosc,
    "zstd": _decode_zstd,
}
