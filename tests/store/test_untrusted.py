"""Foreign Zarr files: pickle is refused, absurd sizes and bombs are refused before memory is taken."""

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr
from numcodecs import blosc, lz4, zstd

from raggedatlas.errors import AtlasError, CorruptError, LimitError, SourceError
from raggedatlas.store.codecs import EncodedChunks, refuse_unknown_codecs, with_checksum, zstd_declared_bytes
from raggedatlas.store.shards import compose_shard
from raggedatlas.store.untrusted import StoredArray, check_array_metadata, check_frames, guarded_zarr_store

pytestmark = pytest.mark.fast

ZEROS = bytes(2**22)
BOMBS: dict[str, Callable[[bytes], bytes]] = {
    "blosc": lambda data: blosc.compress(data, b"lz4", 5, 1, typesize=1),
    "zstd": lambda data: zstd.compress(data, 1),
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "lz4": lz4.compress,
    "bz2": bz2.compress,
    "lzma": lzma.compress,
}

V2 = {"zarr_format": 2, "shape": [10], "chunks": [5], "dtype": "<i4", "compressor": None, "filters": None}
V3 = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [10],
    "data_type": "int32",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [5]}},
    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
}


def sharded(inner: list[dict[str, str]]) -> dict[str, object]:
    """Return the metadata of a sharded array with these inner codecs."""
    settings = {"chunk_shape": [5], "codecs": inner, "index_codecs": [{"name": "bytes"}, {"name": "crc32c"}]}
    return V3 | {
        "chunk_grid": {"configuration": {"chunk_shape": [10]}},
        "codecs": [{"name": "sharding_indexed", "configuration": settings}],
    }


@pytest.mark.parametrize(
    "metadata",
    [
        V2 | {"compressor": {"id": "pickle"}},
        V2 | {"filters": [{"id": "pickle"}]},
        V2 | {"filters": [{"id": "delta", "dtype": "<i4"}, {"id": "pickle"}]},
        V2 | {"filters": [{"id": "json2"}]},
        V3 | {"codecs": [{"name": "pickle"}]},
        V3 | {"codecs": [{"name": "numcodecs.pickle"}]},
        sharded([{"name": "numcodecs.pickle"}]),
    ],
)
def test_pickle_and_unknown_codecs_are_refused(metadata: dict[str, object]) -> None:
    """A codec that is not on the list is refused by name, however it is wrapped."""
    with pytest.raises(SourceError, match="pickle"):
        check_array_metadata("x", metadata)


def test_codecs_given_as_names_are_checked() -> None:
    """A codec given as a bare name is checked like one given as an object."""
    refuse_unknown_codecs(["bytes", {"name": "numcodecs.zlib"}])
    with pytest.raises(SourceError, match="'pickle'"):
        refuse_unknown_codecs(["pickle"])


@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        (V2 | {"shape": [10**12], "chunks": [10**12]}, LimitError),
        (V3 | {"chunk_grid": {"configuration": {"chunk_shape": [10**12]}}}, LimitError),
        (V3 | {"data_type": {"name": "fixed_length_utf32", "configuration": {"length_bytes": 10**9}}}, LimitError),
        (V2 | {"chunks": [-5]}, None),
        (V2 | {"dtype": "nonsense"}, CorruptError),
        (V2 | {"compressor": "blosc"}, CorruptError),
        ({"zarr_format": 2}, CorruptError),
        ({}, CorruptError),
        (V3 | {"codecs": []}, CorruptError),
        (V3 | {"shape": [1, 2]}, CorruptError),
    ],
)
def test_absurd_metadata_are_refused(metadata: dict[str, object], error: type[AtlasError] | None) -> None:
    """Declared sizes beyond the limits and metadata that do not parse get an error of ours."""
    with pytest.raises(error or AtlasError):
        check_array_metadata("x", metadata)


def test_records_count_by_their_fields() -> None:
    """An element of a record has the bytes of all its fields, in both spellings and nested; other types are refused by name."""
    text = {"name": "fixed_length_utf32", "configuration": {"length_bytes": 48}}
    inner = {"name": "structured", "configuration": {"fields": [["a", "float64"], ["b", text]]}}
    fields = [{"name": "x", "data_type": inner}, {"name": "y", "data_type": "int32"}]
    outer = V3 | {"data_type": {"name": "struct", "configuration": {"fields": fields}}}
    assert check_array_metadata("x", outer).chunk_bytes == 5 * (8 + 48 + 4)
    nested = V2 | {"dtype": [["x", [["a", "<f8"], ["b", "<U12"]]], ["y", "<i4", [2]]]}
    assert check_array_metadata("x", nested).chunk_bytes == 5 * (8 + 48 + 8)
    with pytest.raises(SourceError, match="bfloat16"):
        check_array_metadata("x", V3 | {"data_type": "bfloat16"})


def test_a_long_array_in_small_chunks_is_fine() -> None:
    """A declared length alone costs nothing."""
    assert check_array_metadata("x", V2 | {"shape": [10**12]}).chunk_bytes == 20


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_and_honest_frames_pass(name: str) -> None:
    """A frame of a few kilobytes that holds megabytes is refused where a chunk has less; an honest one passes."""
    bomb = np.frombuffer(BOMBS[name](ZEROS), np.uint8)
    assert bomb.size < len(ZEROS) / 100
    check_frames(StoredArray("x", len(ZEROS), (name,)), bomb)
    with pytest.raises(CorruptError, match=f"{name} frame"):
        check_frames(StoredArray("x", 2**12, (name,)), bomb)
    shard = b"".join(
        compose_shard([EncodedChunks.single(BOMBS[name](bytes(64))), EncodedChunks.single(bomb.tobytes())], 4)
    )
    with pytest.raises(CorruptError, match=f"{name} frame"):
        check_frames(StoredArray("x", 2**12, (name,), slots=4), np.frombuffer(shard, np.uint8))
    with pytest.raises(CorruptError):
        check_frames(StoredArray("x", 2**12, (name,), slots=400), bomb[:50])


@pytest.mark.parametrize("name", ["zstd", "gzip", "bz2", "lzma"])
@pytest.mark.parametrize("between", [b"", bytes(200_000)])
def test_bombs_behind_an_honest_stream_are_refused(name: str, between: bytes) -> None:
    """All streams of a chunk count, also behind padding, as decoders decode them all; a checksum behind them is none."""
    if name == "zstd":
        between = between and (0x184D2A50).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    honest, array = BOMBS[name](bytes(2**10)), StoredArray("x", 2**12, (name,))
    check_frames(array, np.frombuffer(honest + between + honest + b"abcd", np.uint8))
    for data in (honest + between + BOMBS[name](ZEROS), honest * 5):
        with pytest.raises(CorruptError, match=f"{name} frame"):
            check_frames(array, np.frombuffer(data, np.uint8))


def test_zstd_frames_without_a_size_are_bounded() -> None:
    """A streamed zstd frame does not say its size; its blocks bound it."""
    frame = np.frombuffer(zstd.compress(ZEROS, 1), np.uint8)
    assert zstd_declared_bytes(frame) == len(ZEROS)
    raw_block = (5 << 3 | 1).to_bytes(3, "little") + b"hello"
    assert zstd_declared_bytes(np.frombuffer(b"\x28\xb5\x2f\xfd\x00\x58" + raw_block, np.uint8)) == 5
    long_run = (2**20 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"x"
    assert zstd_declared_bytes(np.frombuffer(b"\x28\xb5\x2f\xfd\x00\x58" + long_run, np.uint8)) == 2**20
    with pytest.raises(CorruptError, match="magic"):
        zstd_declared_bytes(np.frombuffer(b"notzstd", np.uint8))


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("shards", [None, (40,)])
@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.filterwarnings("ignore:Consolidated metadata:UserWarning")
def test_guarded_stores_read_what_plain_ones_read(
    tmp_path: Path, zarr_format: int, shards: tuple[int, ...] | None, consolidated: bool
) -> None:
    """Honest files read through the guard as they do without, whole and in part."""
    store = zarr.storage.LocalStore(tmp_path)
    group = zarr.open_group(store, mode="w", zarr_format=zarr_format)
    extra = {"shards": shards} if shards and zarr_format == 3 else {}
    values = np.arange(100) % 7
    group.create_array("a/x", shape=(100,), chunks=(10,), dtype="int64", **extra)[:] = values
    group.create_array("empty", shape=(0,), chunks=(1,), dtype="float32")
    group.create_array("scalar", shape=(), dtype="float32")[...] = 3
    if consolidated:
        zarr.consolidate_metadata(store)
    found = zarr.open_group(guarded_zarr_store(store), mode="r")
    np.testing.assert_array_equal(found["a/x"][:], values)
    np.testing.assert_array_equal(found["a/x"][13:57], values[13:57])
    np.testing.assert_array_equal(found["a/x"].oindex[np.array([3, 99, 41])], values[[3, 99, 41]])
    assert found["empty"].shape == (0,)
    assert found["scalar"][()] == 3


@pytest.mark.parametrize("shards", [None, (40,)])
@pytest.mark.parametrize("part", [slice(None), slice(0, 3), slice(12, 33)])
def test_guarded_stores_refuse_bombs(tmp_path: Path, shards: tuple[int, ...] | None, part: slice) -> None:
    """A chunk replaced by a bomb is refused through zarr-python, read whole or in part."""
    store = zarr.storage.LocalStore(tmp_path)
    array = zarr.create_array(store, shape=(40,), chunks=(10,), shards=shards, dtype="int64", fill_value=-1)
    array[:] = np.arange(40)
    bomb = zstd.compress(ZEROS, 1)
    chunk = b"".join(compose_shard([EncodedChunks.single(bomb)] * 4, 4)) if shards else bomb
    for file in (tmp_path / "c").iterdir():
        file.write_bytes(chunk)
    guarded = zarr.open_array(guarded_zarr_store(store), mode="r")
    with pytest.raises(Exception, match="zstd frame") as caught:  # zarr 3.4 may wrap it in a group
        guarded[part]
    assert isinstance(caught.value, CorruptError | ExceptionGroup)


def test_guarded_stores_refuse_metadata(tmp_path: Path) -> None:
    """Bad metadata are refused as they are read, in `.zarray`, `zarr.json` and consolidated ones."""
    for name, metadata in {
        ".zarray": V2 | {"compressor": {"id": "pickle"}},
        ".zmetadata": {"metadata": {"x/.zarray": V2 | {"filters": [{"id": "pickle"}]}}},
        "zarr.json": {
            "zarr_format": 3,
            "node_type": "group",
            "consolidated_metadata": {"metadata": {"x": V3 | {"codecs": [{"name": "pickle"}]}}},
        },
    }.items():
        folder = tmp_path / name.strip(".")
        folder.mkdir()
        (folder / name).write_text(json.dumps(metadata))
        with pytest.raises(SourceError, match="pickle"):
            zarr.open(guarded_zarr_store(zarr.storage.LocalStore(folder)), mode="r", use_consolidated=None)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "zarr.json").write_text("{")
    with pytest.raises(CorruptError, match="not Zarr metadata"):
        zarr.open(guarded_zarr_store(zarr.storage.LocalStore(tmp_path / "broken")), mode="r")


@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("part", [slice(None), slice(0, 3), slice(12, 33)])
def test_shards_with_another_index_are_checked(tmp_path: Path, location: str, checksum: bool, part: slice) -> None:
    """Shards whose index comes first or has no checksum read as without the guard; a bomb in them is refused."""
    codec = zarr.codecs.ShardingCodec(
        chunk_shape=(10,),
        codecs=[zarr.codecs.BytesCodec(), zarr.codecs.ZstdCodec()],
        index_codecs=[zarr.codecs.BytesCodec(), *([zarr.codecs.Crc32cCodec()] if checksum else [])],
        index_location=location,
    )
    array = zarr.create_array(
        zarr.storage.LocalStore(tmp_path), shape=(40,), chunks=(40,), dtype="int64", serializer=codec, compressors=None
    )
    array[:] = np.arange(40)
    guarded = zarr.open_array(guarded_zarr_store(zarr.storage.LocalStore(tmp_path)), mode="r")
    np.testing.assert_array_equal(guarded[part], np.arange(40)[part])
    bomb, n = zstd.compress(ZEROS, 1), 4 * 16 + 4 * checksum
    index = np.array([[n * (location == "start"), len(bomb)]] * 4, "<u8").tobytes()
    index = with_checksum(index) if checksum else index
    (tmp_path / "c" / "0").write_bytes(index + bomb if location == "start" else bomb + index)
    with pytest.raises(Exception, match="zstd frame") as caught:  # zarr 3.4 may wrap it in a group
        guarded[part]
    assert isinstance(caught.value, CorruptError | ExceptionGroup)


def test_other_shard_indexes_are_refused() -> None:
    """A chunk inside the index of its shard is refused, and an index with other codecs by name."""
    array = StoredArray("x", 2**12, ("zstd",), slots=1, index_first=True)
    shard = with_checksum(np.array([[4, 10]], "<u8").tobytes()) + bytes(50)
    with pytest.raises(CorruptError, match="inside the index"):
        check_frames(array, np.frombuffer(shard, np.uint8))
    metadata = sharded([{"name": "bytes"}])
    metadata["codecs"][0]["configuration"]["index_codecs"] = [{"name": "bytes"}, {"name": "gzip"}]  # type: ignore[index]
    with pytest.raises(SourceError, match="gzip"):
        check_array_metadata("x", metadata)
