"""Laws of batched reads: equal to numpy, whatever is asked; damage is never read as values."""

import json
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.errors import CorruptError, LimitError, SchemaError
from raggedatlas.store import read
from raggedatlas.store.arrays import ArrayWriter, read_spec
from raggedatlas.store.codecs import array_decoder
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader, iterate_slices, read_ranges, read_rows, read_slice, verify
from support.hypothesis_profile import examples

N = 1000


def write(location: Location, values: np.ndarray, path: str = "x", **sizes: int) -> ArrayReader:
    """Write an array in small chunks and shards and open it."""
    writer = ArrayWriter(
        location, path, values.dtype, values.shape[1:], **({"chunk_rows": 16, "shard_rows": 128} | sizes)
    )
    writer.append(values)
    return ArrayReader(location, writer.close())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Location:
    return Location(str(tmp_path_factory.mktemp("ranges")))


@pytest.fixture(scope="module")
def flat(folder: Location) -> tuple[np.ndarray, list[ArrayReader]]:
    """One array of 1,000 values behind every kind of reader: native, zstd, plain, foreign."""
    values = np.random.default_rng(0).integers(0, 1000, N).astype("uint32")
    readers = [write(folder, values)]
    group = zarr.open_group(folder.zarr_store(read_only=False), mode="a")
    for name, settings_ in {
        "zstd": {"compressors": [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()]},
        "plain": {"compressors": [zarr.codecs.Crc32cCodec()]},
        "bare": {"compressors": None},
        "gzip": {"compressors": [zarr.codecs.GzipCodec()]},
        "unsharded": {"shards": None},
    }.items():
        array = group.create_array(
            name, **({"shape": (N,), "chunks": (16,), "shards": (128,), "dtype": "uint32"} | settings_)
        )
        array[:] = values
        readers.append(ArrayReader(folder, read_spec(folder, name)))
    return values, readers


some_ranges = st.lists(
    st.tuples(st.integers(0, N), st.integers(0, N)).map(lambda pair: (min(pair), max(pair))), max_size=30
)


@pytest.mark.long
@examples(20)
@given(asked=some_ranges, threads=st.integers(1, 4), wave=st.sampled_from([1, 300, 2**20]), which=st.integers(0, 5))
def test_ranges_are_those_of_numpy(flat, asked, threads, wave, which) -> None:  # noqa: ANN001
    """Any ranges, in any order, overlapping, repeated or empty, for any codec, threads and wave size."""
    values, readers = flat
    reader = ArrayReader(readers[which].location, readers[which].spec, threads)
    starts, ends = [a for a, _ in asked], [b for _, b in asked]
    expected = np.concatenate([values[a:b] for a, b in asked] or [values[:0]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "WAVE_BYTES", wave)
        patch.setattr(read, "_CHUNKS_PER_TASK", 1)
        np.testing.assert_array_equal(read_ranges(reader, starts, ends), expected)
        assert verify(reader)[0] == []


@examples(30)
@given(rows=st.lists(st.integers(0, 99), max_size=50), dtype=st.sampled_from(["uint8", "float32", "complex128"]))
def test_rows_are_those_of_numpy(rows: list[int], dtype: str) -> None:
    """Rows of N-d arrays come in the asked order, with repeats."""
    values = np.random.default_rng(1).integers(0, 200, (100, 3, 5)).astype(dtype)
    with tempfile.TemporaryDirectory() as folder:
        reader = write(Location(folder), values, chunk_rows=7, shard_rows=21)
        np.testing.assert_array_equal(read_rows(reader, rows), values[np.array(rows, dtype=int)])


@pytest.mark.parametrize("chunks", [(4, 2, 5), (4, 3, 2), (100, 1, 1)])
def test_chunks_across_columns_are_read(folder: Location, chunks: tuple[int, ...]) -> None:
    """An array of another writer whose chunks hold parts of rows reads as it was written."""
    values = np.arange(10 * 15, dtype="int32").reshape(10, 3, 5)
    group = zarr.open_group(folder.zarr_store(read_only=False), mode="a")
    group.create_array("narrow", shape=values.shape, chunks=chunks, dtype="int32", overwrite=True)[:] = values
    reader = ArrayReader(folder, read_spec(folder, "narrow"))
    np.testing.assert_array_equal(read_rows(reader, [9, 3, 3, 0]), values[[9, 3, 3, 0]])
    np.testing.assert_array_equal(read_slice(reader, 0, 10), values)


def test_output_is_filled_in_place(flat) -> None:  # noqa: ANN001
    """A given output is filled and returned; one that does not fit is refused."""
    values, (reader, *_) = flat
    out = np.zeros(20, "uint32")
    assert read_slice(reader, 5, 25, out) is out
    np.testing.assert_array_equal(out, values[5:25])
    for wrong in (np.zeros(19, "uint32"), np.zeros(20, "int32"), np.zeros(40, "uint32")[::2]):
        with pytest.raises(SchemaError, match="is read into"):
            read_slice(reader, 5, 25, wrong)


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 4), (0, N + 1), (N + 1, N + 1)])
def test_ranges_outside_are_refused(flat, start: int, stop: int) -> None:  # noqa: ANN001
    """A range outside the array names itself and the array."""
    _, (reader, *_) = flat
    with pytest.raises(CorruptError, match=r"Range 1 is \[.*1000 rows"):
        read_ranges(reader, [0, start], [1, stop])
    with pytest.raises(SchemaError, match="equally long"):
        read_ranges(reader, [0, 1], [1])


def test_readers_are_picklable_values(flat) -> None:  # noqa: ANN001
    """A reader that has read travels to another process and reads the same."""
    values, (reader, *_) = flat
    read_slice(reader, 0, N)
    copy = pickle.loads(pickle.dumps(reader))
    assert copy == reader
    np.testing.assert_array_equal(read_slice(copy, 0, N), values)


def test_slices_cover_the_array(flat) -> None:  # noqa: ANN001
    """Iterated slices are whole chunks and join to the array."""
    values, (reader, *_) = flat
    pieces = list(iterate_slices(reader, n_bytes=300))
    assert {len(piece) % 16 for piece in pieces[:-1]} == {0}
    np.testing.assert_array_equal(np.concatenate(pieces), values)


def test_chunks_that_are_not_stored_hold_the_fill_value(local: Location) -> None:
    """zarr-python leaves out chunks that hold nothing but the fill value; they read as it."""
    group = zarr.open_group(local.zarr_store(read_only=False), mode="w")
    array = group.create_array("x", shape=(100,), chunks=(10,), shards=(100,), dtype="float32", fill_value=np.nan)
    array[35:45] = 1
    spec = read_spec(local, "x")
    assert array_decoder(spec) is not None
    np.testing.assert_array_equal(read_slice(ArrayReader(local, spec), 0, 100), array[:])
    np.testing.assert_array_equal(read_slice(ArrayReader(local, spec), 33, 41), array[33:41])


@examples(150)
@given(data=st.data())
def test_a_changed_byte_is_never_read_as_a_value(damaged_shard: tuple[ArrayReader, Path, bytes], data) -> None:  # noqa: ANN001
    """Flip any byte of a shard: the read raises, or the byte was of a chunk that was not asked for."""
    reader, file, good = damaged_shard
    at = data.draw(st.integers(0, len(good) - 1))
    flip = data.draw(st.integers(1, 255))
    file.write_bytes(good[:at] + bytes([good[at] ^ flip]) + good[at + 1 :])
    with pytest.raises(CorruptError, match=r"damaged|index of shard"):
        read_slice(reader, 0, 64)
    problems, *hashes = verify(reader)
    assert problems
    assert hashes == [None, None]


@pytest.fixture(scope="module")
def damaged_shard(folder: Location) -> tuple[ArrayReader, Path, bytes]:
    """Return a reader, its one shard file, and the good bytes of it."""
    values = np.arange(64, dtype="uint16") // 3
    reader = write(folder, values, "damaged", shard_rows=64)
    file = folder.path / "damaged" / "c" / "0"
    return reader, file, file.read_bytes()


@examples(40)
@given(data=st.data())
def test_a_shard_cut_short_raises(damaged_shard: tuple[ArrayReader, Path, bytes], data) -> None:  # noqa: ANN001
    """A shard that lost its end, at whatever byte, is reported and never read."""
    reader, file, good = damaged_shard
    file.write_bytes(good[: data.draw(st.integers(0, len(good) - 1))])
    with pytest.raises(CorruptError, match=r"cut short|index of shard"):
        read_slice(reader, 0, 1)


def test_a_missing_shard_raises(local: Location) -> None:
    """A shard that is gone is named; its neighbours still read."""
    values = np.arange(300, dtype="uint32")
    reader = write(local, values)
    (local.path / "x" / "c" / "1").unlink()
    np.testing.assert_array_equal(read_slice(reader, 0, 128), values[:128])
    with pytest.raises(CorruptError, match=r"x/c/1 is missing"):
        read_slice(reader, 100, 140)
    problems, _, _ = verify(reader)
    assert len(problems) == 1


def test_a_huge_declared_array_takes_no_memory(local: Location) -> None:
    """An array that declares 10^12 elements opens, and a read of all of them is refused before memory is taken."""
    write(local, np.arange(100, dtype="uint32"), shard_rows=2**20, chunk_rows=2**18)
    file = local.path / "x" / "zarr.json"
    metadata = json.loads(file.read_text())
    metadata["shape"] = [10**12]
    metadata["chunk_grid"]["configuration"]["chunk_shape"] = [100 * 10**6]
    metadata["codecs"][0]["configuration"]["chunk_shape"] = [100 * 10**6]
    file.write_text(json.dumps(metadata))
    reader = ArrayReader(local, read_spec(local, "x"))
    with pytest.raises(CorruptError, match=r"missing|index of shard"):
        read_slice(reader, 0, 10**12)
    hollow = (2**64 - 1).to_bytes(8, "little") * 2
    import google_crc32c

    shard = hollow + int(google_crc32c.value(hollow)).to_bytes(4, "little")
    for number in range(5):
        (local.path / "x" / "c" / str(number)).write_bytes(shard)
    with pytest.raises(LimitError, match="cannot come from"):
        read_slice(reader, 0, 5 * 10**8)


def test_a_frame_that_declares_more_is_refused(local: Location) -> None:
    """A chunk whose Blosc or zstd frame declares more than the chunk is refused before it is decompressed."""
    import google_crc32c
    from numcodecs import blosc, zstd

    from raggedatlas.store.codecs import ChunkDecoder, EncodedChunks
    from raggedatlas.store.shards import compose_shard

    reader = write(local, np.arange(16, dtype="uint32"), shard_rows=16)
    bomb = np.zeros(2**24, "uint8")
    frame = blosc.compress(bomb, b"lz4", 5, 1)
    sealed = frame + int(google_crc32c.value(frame)).to_bytes(4, "little")
    (local.path / "x" / "c" / "0").write_bytes(b"".join(compose_shard([EncodedChunks.single(sealed)], 1)))
    with pytest.raises(CorruptError, match="does not have the size"):
        read_slice(reader, 0, 16)
    out = np.empty(16, "uint32")
    for kind, data in (("blosc", frame), ("zstd", zstd.compress(bomb, 1)), ("none", b"123")):
        with pytest.raises(CorruptError, match="64 were expected"):
            ChunkDecoder(kind, checksum=False)(data, out)
