"""The packed codec: lossless, as documented byte by byte, read in part, and never led astray by damaged bytes."""

import struct
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, SchemaError
from raggedatlas.store.arrays import ArrayWriter, read_spec
from raggedatlas.store.codecs import (
    PROFILES,
    ChunkEncoder,
    decode_packed,
    encode_packed,
    encode_run,
    with_checksum,
)
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader, read_ranges, verify
from support.zarr_codecs import array_codecs

pytestmark = pytest.mark.fast

DTYPES = ("u1", "u2", "u4", "u8")


def pack(values: NDArray[Any], breaks: tuple[int, ...] = ()) -> bytes:
    """Pack values without a checksum."""
    return encode_packed(values, np.array(breaks, np.int64)).tobytes()


def unpack(raw: bytes, n: int, dtype: str) -> NDArray[Any]:
    """Unpack with the package."""
    out = np.empty(n, dtype)
    decode_packed(np.frombuffer(raw, np.uint8), out)
    return out


def bits_of(data: bytes, n: int, width: int) -> list[int]:
    """Cut a stream of bits into numbers."""
    whole = int.from_bytes(data, "little")
    return [whole >> (i * width) & ((1 << width) - 1) for i in range(n)]


def lanes_of(data: bytes, n: int, width: int) -> list[int]:
    """Cut eight lanes of words into numbers."""
    words = np.frombuffer(data, "<u4").reshape(-1, 8)
    lanes = [bits_of(words[:, lane].tobytes(), -(-n // 8), width) for lane in range(8)]
    return [lanes[i % 8][i // 8] for i in range(n)]


def body_of(body: bytes, n: int, kind: int, third: int, itemsize: int) -> tuple[list[int], int]:
    """Read the differences of one block and the bytes it takes."""
    width = kind & 63
    if width == 33:
        places = [i for i in range(8 * third) if body[i // 8] >> (i % 8) & 1]
        return [0, *(b - a - 1 for a, b in pairwise(places))], third
    if width == 34:
        return [int.from_bytes(body[i * itemsize : (i + 1) * itemsize], "little") for i in range(n)], n * itemsize
    size = -(-n * width // 8) if n < 64 else 32 * -(-(-(-n // 8) * width) // 32)
    x = bits_of(body[:size], n, width) if n < 64 else lanes_of(body[:size], n, width)
    high = 1 << (kind >> 6)
    for i in range(third):
        start = size + third + i * high
        x[body[size + i]] |= int.from_bytes(body[start : start + high], "little") << width
    return x, size + third * (1 + high)


def reference(raw: bytes) -> list[int]:
    """Unpack by the documentation alone, in plain Python and NumPy."""
    magic, version, flags, n, n_blocks, size = struct.unpack("<2sBBIII", raw[:16])
    assert (magic, version, size) == (b"rp", 1, len(raw))
    itemsize, ascending, base_bytes = 1 << (flags & 3), flags >> 2 & 1, 1 << (flags >> 3 & 3)
    at = 16 + 8 * -(-n_blocks // 8)
    table = np.frombuffer(raw, np.uint8, 3 * n_blocks, at).reshape(3, n_blocks).T.tolist()
    skips = np.frombuffer(raw, "<u4", 2 * -(-n_blocks // 8), 16).reshape(-1, 2).tolist()
    at = first = at + 3 * n_blocks
    values: list[int] = []
    for block, (length, kind, third) in enumerate(table):
        if block % 8 == 0:
            assert skips[block // 8] == [len(values), at - first]
        base = int.from_bytes(raw[at : at + base_bytes], "little")
        x, taken = body_of(raw[at + base_bytes :], length + 1, kind, third, itemsize)
        at += base_bytes + taken
        values += [base + (sum(x[: i + 1]) + i if ascending else x[i]) for i in range(length + 1)]
    assert raw[at:] == bytes(8)
    assert len(values) == n
    return values


@st.composite
def chunks(draw: st.DrawFn) -> NDArray[Any]:
    """Draw values of every shape that a writer can meet: noise, runs, rows, constants, a few giants."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(1, 900))
    top = min(draw(st.sampled_from([0, 1, 3, 40, 300, 70_000, 2**32 - 1, 2**64 - 1])), int(np.iinfo(dtype).max))
    values = rng.integers(0, top, n, dtype=dtype, endpoint=True)
    shape = draw(st.sampled_from(["noise", "run", "rows", "giants"]))
    if shape == "run":
        values = np.unique(values)
    elif shape == "rows":
        values = np.concatenate([np.unique(part) for part in np.array_split(values, 1 + n // 100)])
    elif shape == "giants":
        values = np.minimum(values, 3).astype(dtype)
        values[rng.integers(0, n, 1 + n // 50)] = np.iinfo(dtype).max
    return values


@pytest.mark.usefixtures("level")
@given(values=chunks(), data=st.data())
def test_any_content_comes_back(values: NDArray[Any], data: st.DataObject) -> None:
    """What is packed is unpacked unchanged, by us and by the documentation, wherever blocks are made to break."""
    breaks = data.draw(st.lists(st.integers(0, values.size), max_size=8).map(sorted))
    raw = pack(values, tuple(breaks))
    assert np.array_equal(unpack(raw, values.size, values.dtype.str), values)
    assert reference(raw) == values.tolist()


def test_ascending_chunk_has_the_documented_bytes() -> None:
    """Two short rows: a head, a skip, two entries (a bitmap, a stream of one bit), two payloads, eight zeros."""
    raw = pack(np.array([5, 6, 7, 8, 9, 13, 14, 15, 16, 17, 2, 4], "u4"))
    head = b"rp" + bytes([1, 2 | 4, 12, 0, 0, 0, 2, 0, 0, 0, len(raw), 0, 0, 0])
    table = bytes([9, 1, 33, 1, 2, 0])
    first = bytes([5, 0b00011111, 0b00011111])
    second = bytes([2, 0b00000010])
    assert raw == head + bytes(8) + table + first + second + bytes(8)


def test_other_chunk_has_the_documented_bytes() -> None:
    """Small numbers with one giant: two bits a value, one exception with its place and its high bits."""
    raw = pack(np.array([1, 4, 2, 3, 300, 1, 2, 1, 4, 4, 2, 1], "u2"))
    head = b"rp" + bytes([1, 1, 12, 0, 0, 0, 1, 0, 0, 0, len(raw), 0, 0, 0])
    x = [0, 3, 1, 2, 299 & 3, 0, 1, 0, 3, 3, 1, 0]
    stream = sum(value << (2 * i) for i, value in enumerate(x)).to_bytes(3, "little")
    body = bytes([1]) + stream + bytes([4, 299 >> 2])
    assert raw == head + bytes(8) + bytes([11, 2, 1]) + body + bytes(8)


def test_lanes_have_the_documented_words() -> None:
    """A full block of three bits: 24 words of eight interleaved lanes."""
    raw = pack(np.tile(np.arange(8, dtype="u1")[::-1], 32))
    word = [sum(((7 - lane) << (3 * p)) for p in range(32)) for lane in range(8)]
    expected = b"".join(struct.pack("<I", word[lane] >> (32 * k) & 0xFFFFFFFF) for k in range(3) for lane in range(8))
    assert raw[16 + 8 + 3 + 1 : -8] == expected


@pytest.mark.usefixtures("level")
@given(values=chunks(), data=st.data())
def test_parts_are_read_as_the_whole(values: NDArray[Any], data: st.DataObject) -> None:
    """Any ranges of a packed array equal those of the array, in any order, with repeats."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        writer = ArrayWriter(Location(folder), "a/b", values.dtype, profile="packed", chunk_rows=200, shard_rows=600)
        cut = data.draw(st.integers(0, values.size))
        writer.append(values[:cut], np.arange(0, cut, 50))
        writer.append(values[cut:])
        reader = ArrayReader(Location(folder), writer.close())
        bounds = data.draw(st.lists(st.tuples(*[st.integers(0, values.size)] * 2).map(sorted), max_size=12))
        found = read_ranges(reader, [a for a, _ in bounds], [b for _, b in bounds])
        assert found.tolist() == [v for a, b in bounds for v in values[a:b].tolist()]
        assert verify(reader) == ([], *writer.checksums("").values())


def damage(raw: bytes, rng: np.random.Generator) -> bytes:
    """Change, cut or lengthen some bytes."""
    made = bytearray(raw)
    for _ in range(rng.integers(1, 4)):
        made[int(rng.integers(0, min(len(made), 60 if rng.random() < 0.7 else len(made))))] = int(rng.integers(0, 256))
    return bytes(made[: int(rng.integers(0, len(made)))] if rng.random() < 0.1 else made)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES)
def test_damaged_chunks_never_reach_beyond(dtype: str) -> None:
    """Damaged bytes are refused or give wrong values, but nothing beside the output is ever written."""
    rng = np.random.default_rng(7)
    refused = 0
    for i in range(600):
        n = int(rng.integers(1, 700))
        values = np.sort(rng.integers(0, 200, n)) if i % 2 else rng.integers(0, 9, n)
        raw = np.frombuffer(damage(pack(values.astype(dtype)), rng), np.uint8)
        room = np.full(n + 1024, 173, dtype)
        try:
            decode_packed(raw, room[512 : 512 + n])
        except CorruptError:
            refused += 1
        assert (room[:512] == 173).all()
        assert (room[512 + n :] == 173).all()
    assert refused > 200


def test_wrong_width_or_length_is_refused() -> None:
    """A chunk is refused where the array says another element width or number of values."""
    raw = pack(np.arange(300, dtype="u4"))
    for n, dtype in ((299, "u4"), (300, "u2"), (300, "i4")):
        with pytest.raises(CorruptError, match="packed chunk"):
            unpack(raw, n, dtype)


def test_plain_blocks_have_no_exceptions() -> None:
    """A plain block that claims exceptions is refused: their places would lie behind the chunk."""
    raw = bytearray(pack(np.random.default_rng(3).integers(0, 2**32, 100, "u4")))
    assert raw[24:27] == bytes([99, 34, 0])
    raw[26] = 190
    with pytest.raises(CorruptError, match="packed chunk"):
        unpack(bytes(raw), 100, "u4")


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_zarr_python_reads_and_writes(profile: str, dtype: str, tmp_path: Path) -> None:
    """zarr-python reads what we write, and we read what it writes, in every profile."""
    import zarr

    values = np.sort(np.random.default_rng(1).integers(0, 250, (40, 60)), axis=1).astype(dtype).ravel()
    location = Location(str(tmp_path))
    writer = ArrayWriter(location, "ours", dtype, profile=profile, chunk_rows=500, shard_rows=1000)
    writer.append(values)
    spec = writer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr-python notes that codecs beyond its own are not standard
        assert np.array_equal(zarr.open_array(location.zarr_store(), path="ours", mode="r")[:], values)
        made = zarr.create_array(
            zarr.storage.LocalStore(tmp_path), name="theirs", shape=values.shape, chunks=(500,), shards=(1000,), dtype=dtype,
            **array_codecs(profile, dtype, values),
        )  # fmt: skip
        made[:] = values
    theirs = read_spec(location, "theirs")
    assert theirs.codecs == spec.codecs
    assert np.array_equal(read_ranges(ArrayReader(location, theirs), [3], [2000]), values[3:2000])


def test_zarr_python_refuses_other_types() -> None:
    """Floats and signed integers are refused when an array is made, and so are settings."""
    import zarr

    from raggedatlas.store.packed import PackedCodec

    for dtype in ("float32", "int32"):
        with pytest.raises(SchemaError, match="unsigned"):
            zarr.create_array({}, shape=(4,), chunks=(4,), dtype=dtype, serializer=PackedCodec(), compressors=None)
    with pytest.raises(SchemaError, match="no settings"):
        PackedCodec.from_dict({"name": "raggedatlas.packed", "configuration": {"block": 3}})


def test_damaged_packed_file_is_named(tmp_path: Path) -> None:
    """A changed byte of a stored chunk is found by its checksum, and the file is named."""
    location = Location(str(tmp_path))
    writer = ArrayWriter(location, "a/b", "uint16", profile="packed", chunk_rows=100, shard_rows=300)
    writer.append(np.arange(250, dtype="uint16") % 7)
    reader = ArrayReader(location, writer.close())
    file = tmp_path / "a" / "b" / "c" / "0"
    raw = bytearray(file.read_bytes())
    raw[40] ^= 1
    file.write_bytes(bytes(raw))
    with pytest.raises(CorruptError, match=r"c/0.*crc32c"):
        read_ranges(reader, [0], [10])


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_run_of_chunks_is_each_chunk_by_itself(dtype: str) -> None:
    """However many chunks are packed in one call, every one has the bytes and checksum that it has alone, row breaks and all."""
    rng = np.random.default_rng(5)
    chunk, n_chunks = 600, 35
    values = rng.geometric(0.05, chunk * n_chunks).astype(dtype)
    values[: 9 * chunk] = np.sort(values[: 9 * chunk])
    breaks = np.flatnonzero(rng.random(values.size) < 0.01)
    alone = [
        with_checksum(
            encode_packed(values[at : at + chunk], breaks[(breaks >= at) & (breaks < at + chunk)] - at).tobytes()
        )
        for at in range(0, values.size, chunk)
    ]
    runs = encode_run(ChunkEncoder("packed", values.itemsize, chunk), values, chunk, breaks)
    assert [chunk for run in runs for chunk in run.chunks()] == alone
