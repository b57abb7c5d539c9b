"""Arrays in files of others: rows as NumPy slices them whatever the filters, and no value of a file that is not the recorded one."""

import contextlib
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numcodecs.fletcher32 import Fletcher32
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, LimitError, StaleSourceError, StoreError, ValuesError
from raggedatlas.model.arrays import DTYPES
from raggedatlas.store import file_arrays, linked
from raggedatlas.store.arrays import ArrayWriter
from raggedatlas.store.codecs import ChunkDecoder, chunk_decoder, extend_checksum, with_checksum
from raggedatlas.store.file_arrays import Ranges
from raggedatlas.store.gather import RowGatherer, RowGroup
from raggedatlas.store.linked import LinkedSource, fetch_ranges
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader, iterate_slices, read_all, read_ranges, read_rows, read_slice, verify
from raggedatlas.store.references import ChunkTable, References, SourceObjects
from raggedatlas.store.runtime import CacheKind, process_cache
from support.hypothesis_profile import examples
from support.linked_arrays import DATASET, link_hdf5, linked_reader, relinked, slices
from support.object_store import WebServer

KINDS = [name for name in DTYPES if name != "bool" and not name.startswith("complex")]
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "gzip": {"compression": "gzip"},
    "shuffled": {"compression": "gzip", "shuffle": True},
    "lzf": {"compression": "lzf"},
    "checked": {"compression": "lzf", "shuffle": True, "fletcher32": True},
    "fletcher": {"fletcher32": True},
}


@pytest.fixture(autouse=True)
def _forget() -> None:
    """Every test reads anew."""
    kinds: tuple[CacheKind, ...] = ("references", "chunks", "probed")
    for kind in kinds:
        empty(kind)


def empty(kind: CacheKind) -> None:
    """Empty a cache of this process."""
    cache = process_cache(kind)
    cache.entries.clear()
    cache.weight = 0


def references_of(reader: ArrayReader) -> References:
    """Return the references that a reader finds."""
    assert reader.spec.linked is not None
    return linked.load_references(reader.location, reader.spec.linked)


def write_hdf5(file: Path, values: NDArray[Any], **settings: Any) -> None:
    with h5py.File(file, "w") as opened:
        opened.create_dataset("X/data", data=values, **settings)


def drawn_values(data: st.DataObject, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    return rng.integers(0, data.draw(st.sampled_from([3, 100])), shape).astype(dtype)


@pytest.mark.long
@examples(60)
@given(data=st.data())
def test_ranges_are_those_of_numpy(data: st.DataObject) -> None:
    """Any ranges of arrays of any type, filters and chunks, also narrower than rows or not stored at all."""
    dtype = data.draw(st.sampled_from([*KINDS, ">i4", ">f8", ">u2"]))
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    values = drawn_values(data, shape, dtype)
    settings: dict[str, Any] = dict(FILTERS[data.draw(st.sampled_from(sorted(FILTERS)))])
    chunked: bool = data.draw(st.booleans())
    if settings or chunked:
        settings["chunks"] = tuple(data.draw(st.integers(1, n)) for n in shape)
    n = shape[0]
    one = st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda pair: (min(pair), max(pair)))
    asked = data.draw(st.lists(one, max_size=12))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder) / "x.h5"
        if data.draw(st.booleans()):
            # Chunks beyond the first rows are never written.
            with h5py.File(file, "w") as opened:
                array = opened.create_dataset("X/data", shape, dtype, fillvalue=7, **settings)
                written = data.draw(st.integers(0, n))
                if written:
                    array[:written] = values[:written]
                values[written:] = 7
        else:
            write_hdf5(file, values, **settings)
        reader = link_hdf5(Path(folder), file, "X/data")
        reader = replace(reader, threads=data.draw(st.integers(1, 4)))
        patch.setattr(file_arrays, "WAVE_BYTES", data.draw(st.sampled_from([1, 300, 2**20])))
        patch.setattr(file_arrays, "_BYTES_PER_TASK", 1)
        patch.setattr(linked, "LOCAL_BYTES", data.draw(st.sampled_from([5, 2**20])))
        for _ in range(2):
            found = read_ranges(reader, [a for a, _ in asked], [b for _, b in asked])
            np.testing.assert_array_equal(found, slices(values, asked))
            assert found.dtype == np.dtype(dtype).newbyteorder("=")
        native = values.astype(found.dtype)
        assert verify(reader) == ([], f"{extend_checksum(0, native):08x}", None)
        np.testing.assert_array_equal(np.concatenate(list(iterate_slices(reader))), values)


ZARR_CODECS: dict[str, tuple[list[dict[str, Any]], Callable[[bytes], bytes]]] = {
    "blosc": ([{"name": "blosc"}], numcodecs.Blosc("zstd", shuffle=2).encode),
    "zstd": ([{"name": "zstd"}], numcodecs.Zstd().encode),
    "gzip": ([{"name": "gzip"}, {"name": "crc32c"}], lambda data: with_checksum(numcodecs.GZip().encode(data))),
    "lz4": ([{"name": "numcodecs.lz4"}], numcodecs.LZ4().encode),
    "checked": ([{"name": "crc32c"}], with_checksum),
    "fletcher": ([{"name": "numcodecs.fletcher32"}], lambda data: bytes(Fletcher32().encode(data))),
    "shuffled": (
        [{"name": "numcodecs.shuffle", "configuration": {"elementsize": 4}}, {"name": "numcodecs.zstd"}],
        lambda data: numcodecs.Zstd().encode(numcodecs.Shuffle(4).encode(data)),
    ),
}


def link_zarr(folder: Path, values: NDArray[Any], chunk: int, codecs: str, endian: str = "little") -> ArrayReader:
    """Write the chunks of a 1-D array as files of a folder, two of them one behind the other in each, and link it."""
    source = folder / "matrix.zarr"
    names, encode = ZARR_CODECS[codecs]
    order = {"little": "<", "big": ">"}[endian]
    padded = np.zeros(-(-len(values) // chunk) * chunk, values.dtype)
    padded[: len(values)] = values
    stored = [encode(part.astype(part.dtype.newbyteorder(order)).tobytes()) for part in padded.reshape(-1, chunk)]
    (source / "c").mkdir(parents=True)
    keys = [f"c/{i}" for i in range(-(-len(stored) // 2))]
    for i, key in enumerate(keys):
        (source / key).write_bytes(b"".join(stored[2 * i : 2 * i + 2]))
    stats = [(source / key).stat() for key in keys]
    objects = SourceObjects(
        tuple(keys),
        np.array([info.st_size for info in stats]),
        np.array([info.st_mtime_ns for info in stats]),
        ("",) * len(keys),
    )
    sizes = np.array([len(item) for item in stored], np.int64)
    numbers = np.arange(len(sizes), dtype=np.int32) // 2
    table = ChunkTable(numbers, np.where(np.arange(len(sizes)) % 2, np.roll(sizes, 1), 0), sizes)
    return linked_reader(
        folder, Location(str(source)), References(objects, {"data": table}), "data", shape=values.shape,
        dtype=values.dtype.name, chunks=(chunk,), codecs=[{"name": "bytes", "configuration": {"endian": endian}}, *names],
    )  # fmt: skip


@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize("codecs", sorted(ZARR_CODECS))
def test_chunks_of_zarr_in_several_files(codecs: str, endian: str, tmp_path: Path) -> None:
    """Chunks of every codec, several in one file as shards have them, are decoded; damage is found where the codec checks."""
    values = np.random.default_rng(0).integers(0, 9, 1050).astype("int32")
    reader = link_zarr(tmp_path, values, 100, codecs, endian)
    np.testing.assert_array_equal(read_all(reader), values)
    np.testing.assert_array_equal(read_rows(reader, [3, 1049, 500, 3]), values[[3, 1049, 500, 3]])
    file = tmp_path / "matrix.zarr/c/1"
    info, data = file.stat(), bytearray(file.read_bytes())
    data[4] ^= 0x5A
    file.write_bytes(data)
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    empty("chunks")
    if codecs not in {"lz4", "shuffled", "zstd", "blosc"}:
        with pytest.raises(CorruptError, match=rf"Chunk 2 of data in .*matrix.zarr.*{DATASET}.*atlas.relink"):
            read_slice(reader, 150, 250)
        assert "Chunk 2" in verify(reader).problems[0]


def test_only_the_rows_are_read_where_nothing_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of contiguous arrays and uncompressed chunks exactly the bytes of the rows are read, of neighbouring rows at once."""
    values = np.arange(100_000, dtype="u4")
    asked: list[tuple[int, int]] = []

    def noted(source: Any, objects: Any, ranges: Any, touched: Any = ()) -> None:
        asked.extend(zip(ranges.offsets.tolist(), ranges.sizes.tolist(), strict=True))
        fetch_ranges(source, objects, ranges, touched)

    monkeypatch.setattr(linked, "fetch_ranges", noted)
    for settings in ({}, {"chunks": (1000,)}):
        write_hdf5(tmp_path / "x.h5", values, **settings)
        reader = link_hdf5(tmp_path, tmp_path / "x.h5", "X/data")
        asked.clear()
        starts, sizes = np.array([5, 90_000, 10, 700]), np.array([5, 10, 90, 600])
        found = read_ranges(reader, starts, starts + sizes)
        np.testing.assert_array_equal(found, slices(values, [*zip(starts, starts + sizes, strict=True)]))
        assert sum(n for _, n in asked) == found.nbytes
        assert len(asked) == 4
        asked.clear()
        read_ranges(reader, np.arange(50), np.arange(50) + 1)
        assert [n for _, n in asked] == [200]
        assert not process_cache("chunks").entries


def test_neighbouring_batches_decode_a_chunk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of which a part was read is kept; what was read whole is not; the cache has a limit in bytes."""
    values = np.arange(4000, dtype="u4")
    write_hdf5(tmp_path / "x.h5", values, chunks=(1000,), compression="gzip")
    reader = link_hdf5(tmp_path, tmp_path / "x.h5", "X/data")
    decoded: list[int] = []
    call = ChunkDecoder.__call__

    def noted(self: ChunkDecoder, raw: Any, out: NDArray[Any]) -> None:
        decoded.append(len(raw))
        call(self, raw, out)

    monkeypatch.setattr(ChunkDecoder, "__call__", noted)
    for start in range(0, 1000, 100):
        np.testing.assert_array_equal(read_slice(reader, start, start + 100), values[start : start + 100])
    assert len(decoded) == 1
    read_slice(reader, 1000, 3000)
    read_slice(reader, 1000, 3000)
    assert len(decoded) == 5
    cache = process_cache("chunks")
    assert (len(cache.entries), cache.weight) == (1, 4000)
    monkeypatch.setattr(cache, "size", 10_000)
    for start in range(0, 4000, 500):
        read_slice(reader, start, start + 500)
    assert len(cache.entries) == 2
    assert cache.weight == 8000


# ---- stale sources ----


def touch(file: Path) -> None:
    os.utime(file)


def truncate(file: Path) -> None:
    info = file.stat()
    os.truncate(file, info.st_size // 2)
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))


def grow(file: Path) -> None:
    info = file.stat()
    with file.open("ab") as opened:
        opened.write(b"more")
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))


def replace_quietly(file: Path) -> None:
    """Put another file there, of the same size and time."""
    info = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    other = file.with_suffix(".new")
    other.write_bytes(data)
    os.utime(other, ns=(info.st_atime_ns, info.st_mtime_ns))
    other.replace(file)


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def make_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def touch_far(file: Path) -> None:
    """Set a time of a year of five digits, as far as the file system has it."""
    os.utime(file, (9e11, 9e11))


CHANGES: dict[Callable[[Path], None], str] = {
    touch: "it was written on",
    touch_far: "it was written on",
    truncate: "bytes instead of",
    grow: "bytes instead of",
    replace_quietly: "begins or ends differently",
    Path.unlink: "it is missing",
    make_folder: "it is no regular file",
    make_fifo: "it is no regular file",
}


@pytest.mark.parametrize("settings", [{}, {"chunks": (100,), "compression": "gzip"}], ids=["plain", "gzip"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_file_is_refused(change: Callable[[Path], None], settings: dict[str, Any], tmp_path: Path) -> None:
    """However a file was changed, before the first read or between two, also where its chunks are held."""
    file = tmp_path / "x.h5"
    write_hdf5(file, np.arange(10_000, dtype="u4"), **settings)
    reader = link_hdf5(tmp_path, file, "X/data")
    pattern = rf"'{DATASET}' is linked to .*x\.h5, .*{CHANGES[change]}.*atlas\.relink\('{DATASET}', path\).*drop"
    assert read_slice(reader, 10, 20).tolist() == list(range(10, 20))
    change(file)
    for _ in range(2):
        with pytest.raises(StaleSourceError, match=pattern):
            read_slice(reader, 10, 20)
    assert "is linked to" in verify(reader).problems[0]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write between the first look and the last byte, and a file that was exchanged after it was looked up."""
    file = tmp_path / "x.h5"
    write_hdf5(file, np.arange(10_000, dtype="u4"))
    reader = link_hdf5(tmp_path, file, "X/data")
    read_file, look_up = linked.read_file, linked._look_up

    def written_to(*args: Any) -> bool:
        complete = read_file(*args)
        touch(file)
        return complete

    with monkeypatch.context() as patch:
        patch.setattr(linked, "read_file", written_to)
        with pytest.raises(StaleSourceError, match="it was written on"):
            read_slice(reader, 0, 10)
    reader = link_hdf5(tmp_path, file, "X/data")

    def exchanged(*args: Any) -> Any:
        seen = look_up(*args)
        shutil.copy2(file, tmp_path / "copy")
        (tmp_path / "copy").replace(file)
        return seen

    monkeypatch.setattr(linked, "_look_up", exchanged)
    with pytest.raises(StaleSourceError, match="replaced while it was read"):
        read_slice(reader, 0, 10)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose permissions are missing is told the file and the dataset."""
    write_hdf5(tmp_path / "x.h5", np.arange(10, dtype="u4"))
    reader = link_hdf5(tmp_path, tmp_path / "x.h5", "X/data")

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreError, match=rf"x\.h5, to which the dataset '{DATASET}' is linked: Permission denied"):
        read_all(reader)


def test_a_reader_goes_to_another_process(tmp_path: Path) -> None:
    """A reader is pickled without what it has read, and a symlink to the file is one way to it."""
    write_hdf5(tmp_path / "x.h5", np.arange(10, dtype="u4"))
    (tmp_path / "way.h5").symlink_to(tmp_path / "x.h5")
    reader = link_hdf5(tmp_path, tmp_path / "way.h5", "X/data")
    read_all(reader)
    assert read_all(pickle.loads(pickle.dumps(reader))).tolist() == list(range(10))


# ---- damage and hostile records ----


def test_damaged_chunks_are_named(tmp_path: Path) -> None:
    """A chunk that does not decode, holds too little or too much is an error that names it, and nothing of it is given."""
    values = np.arange(1000, dtype="u4") // 10
    for settings in FILTERS.values():
        if not settings:
            continue
        file = tmp_path / "x.h5"
        write_hdf5(file, values, chunks=(100,), **settings)
        reader = link_hdf5(tmp_path, file, "X/data")
        (table,) = references_of(reader).arrays.values()
        data = bytearray(file.read_bytes())
        at, size = int(table.offsets[3]), int(table.sizes[3])
        data[at : at + size] = bytes(range(1, 256))[:size] + b"\xff" * max(0, size - 255)
        file.write_bytes(data)
        reader = link_hdf5(tmp_path, file, "X/data")
        with pytest.raises(CorruptError, match=rf"Chunk 3 of X/data in .*x\.h5 .*{DATASET}"):
            read_slice(reader, 350, 360)
        assert read_slice(reader, 400, 410).tolist() == [40] * 10


@pytest.mark.parametrize("name", ["gzip", "numcodecs.zlib", "numcodecs.lz4", "zstd", "blosc", "numcodecs.lzf"])
@pytest.mark.parametrize("n", [63, 65, 10**7])
def test_no_frame_decodes_to_another_size(name: str, n: int) -> None:
    """Frames of too few, too many or very many bytes are refused."""
    data = bytes(n)
    encoders: dict[str, Callable[[bytes], bytes]] = {
        "gzip": numcodecs.GZip().encode,
        "numcodecs.zlib": numcodecs.Zlib().encode,
        "numcodecs.lz4": numcodecs.LZ4().encode,
        "zstd": numcodecs.Zstd().encode,
        "blosc": numcodecs.Blosc().encode,
        # One zero, then copies of it.
        "numcodecs.lzf": lambda data: b"\0\0" + b"\xe0\x38\0" * (len(data) // 65) + b"\0\0" * ((len(data) - 1) % 65),
    }
    decoder = chunk_decoder([{"name": "bytes"}, {"name": name}])
    assert decoder is not None
    with pytest.raises(CorruptError):
        decoder(encoders[name](data), np.empty(64, "u1"))


def test_zstd_frames_may_leave_out_their_size() -> None:
    """What streaming writers write is read, alone or after a frame with a size, if it fills the chunk exactly."""
    values = np.arange(60_000, dtype="i4") % 50
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(values.tobytes())
    frame = sink.getvalue().to_pybytes()
    decoder = chunk_decoder([{"name": "bytes"}, {"name": "zstd"}])
    assert decoder is not None
    for data, expected in ((frame, values), (numcodecs.Zstd().encode(values) + frame, np.tile(values, 2))):
        out = np.empty_like(expected)
        decoder(data, out)
        np.testing.assert_array_equal(out, expected)
        for n in (1, len(expected) - 1, len(expected) + 1, 2**20):
            with pytest.raises(CorruptError):
                decoder(data, np.empty(n, "i4"))
        with pytest.raises(CorruptError):
            decoder(data[:-9], out)


@examples(200)
@given(data=st.binary(max_size=60), n=st.integers(1, 200))
def test_any_bytes_are_an_lzf_stream_or_an_error(data: bytes, n: int) -> None:
    """Hostile LZF streams end in an error or fill the chunk; memory behind it is not touched."""
    decoder = ChunkDecoder("lzf", checksum=False)
    memory = np.full(n + 64, 99, np.uint8)
    with contextlib.suppress(CorruptError):
        decoder(data, memory[:n])
    assert (memory[n:] == 99).all()


def test_lzf_chunks_that_would_not_get_smaller(tmp_path: Path) -> None:
    """HDF5 stores what LZF cannot compress as it is; it is told by its size."""
    values = np.frombuffer(np.random.default_rng(0).bytes(4000), "u4")
    write_hdf5(tmp_path / "x.h5", values, chunks=(100,), compression="lzf", shuffle=True)
    reader = link_hdf5(tmp_path, tmp_path / "x.h5", "X/data")
    np.testing.assert_array_equal(read_all(reader), values)
    # A literal, and a copy of three bytes: four bytes that are a stream of four.
    with pytest.raises(CorruptError, match="left as they were"):
        ChunkDecoder("lzf", checksum=False)(b"\0a\x20\0", np.empty(4, "u1"))


def hostile(reader: ArrayReader, change: Callable[[References], References]) -> ArrayReader:
    """Return the reader with other references, whose hash the record has."""
    spec = reader.spec
    assert spec.linked is not None
    assert reader.source is not None
    references = change(references_of(reader))
    other = linked_reader(
        reader.location.path, reader.source.location, references, spec.linked.array, shape=spec.shape, dtype=spec.dtype,
        chunks=spec.chunk_shape, codecs=[], fill=0,
    )  # fmt: skip
    return relinked(other, codecs=spec.codecs)


def with_table(**changes: NDArray[Any]) -> Callable[[References], References]:
    """Return a change of the chunks."""
    return lambda old: References(old.objects, {name: replace(table, **changes) for name, table in old.arrays.items()})


def test_hostile_references_are_refused(tmp_path: Path) -> None:
    """References that are missing, damaged, of another array, or name sizes and files that cannot be."""
    file = tmp_path / "x.h5"
    write_hdf5(file, np.arange(1000, dtype="u4"), chunks=(100,), compression="gzip")
    reader = link_hdf5(tmp_path, file, "X/data")
    link = reader.spec.linked
    assert link is not None
    many = with_table(objects=np.zeros(9, np.int32), offsets=np.zeros(9, np.int64), sizes=np.ones(9, np.int64))
    cases = {
        "do not name it": lambda old: References(old.objects, {"other": old.arrays["X/data"]}),
        "have 9 chunks, but it is declared with 10": many,
    }
    for pattern, change in cases.items():
        with pytest.raises(CorruptError, match=pattern):
            read_all(hostile(reader, change))
    with pytest.raises(CorruptError, match="SHA-256"):
        read_all(relinked(reader, linked=replace(link, sha256="0" * 64)))
    with pytest.raises(CorruptError, match=r"references in .* are missing"):
        read_all(
            relinked(reader, linked=replace(link, sha256="1" * 64, references=replace(link.references, file="none")))
        )
    with pytest.raises(StoreError, match=r"not read where it is.*copy=True"):
        read_all(relinked(reader, codecs='[{"name": "bytes"}, {"name": "bz2"}]'))
    big = tmp_path / "big.h5"
    write_hdf5(big, np.random.default_rng(0).integers(0, 2**32, 10**5, "u4"))
    reader = link_hdf5(tmp_path, big, "X/data")
    with pytest.raises(LimitError, match="no codec makes that"):
        read_slice(
            relinked(reader, shape=(10,), chunk_shape=(10,), codecs='[{"name": "bytes"}, {"name": "zstd"}]'), 0, 1
        )
    with pytest.raises(CorruptError, match="has 400,000 bytes according to its references; its shape needs 40"):
        read_slice(relinked(reader, shape=(10,), chunk_shape=(10,)), 0, 1)
    empty = with_table(objects=np.zeros(128, np.int32), offsets=np.zeros(128, np.int64), sizes=np.full(128, -1))
    with pytest.raises(LimitError, match="cannot come from"):
        read_all(hostile(relinked(reader, shape=(2**33,), chunk_shape=(2**26,)), empty))


@pytest.mark.parametrize("key", ["../secret", "/etc/passwd", "c/../../secret", "c//0", "./c", "c/\0"])
def test_keys_stay_below_their_source(key: str, tmp_path: Path) -> None:
    """No key leads out of the folder that was linked, and no symlink in it is followed."""
    values = np.arange(100, dtype="i4")
    reader = link_zarr(tmp_path, values, 100, "zstd")
    with pytest.raises(CorruptError, match="not below"):
        read_all(hostile(reader, lambda old: References(replace(old.objects, keys=(key,)), old.arrays)))
    file = tmp_path / "matrix.zarr/c/0"
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    with pytest.raises(StaleSourceError, match="no regular file"):
        read_all(reader)


@pytest.mark.parametrize("bad", [0.5, -1.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4"])
def test_values_of_which_a_sample_was_seen_are_checked(dtype: str, bad: float, tmp_path: Path) -> None:
    """What is no count is refused when it is read, with the way out; its neighbours are read."""
    if dtype == "i4" and bad != -1:
        bad = -5
    values = np.arange(1000).astype(dtype)
    values[500] = bad
    write_hdf5(tmp_path / "x.h5", values)
    reader = link_hdf5(tmp_path, tmp_path / "x.h5", "X/data", sampled=True)
    np.testing.assert_array_equal(read_slice(reader, 0, 500), values[:500])
    with pytest.raises(ValuesError, match=rf"X/data in .*x\.h5.*{DATASET}.*no counts.*copy=True.*layers="):
        read_slice(reader, 499, 502)
    assert "no counts" in verify(reader).problems[0]
    unchecked = link_hdf5(tmp_path, tmp_path / "x.h5", "X/data")
    np.testing.assert_array_equal(read_all(unchecked), values)


# ---- the gather ----


def rows_of(rng: np.random.Generator, n_rows: int, n_cols: int, *, ascend: bool) -> tuple[NDArray[Any], ...]:
    """Draw bounds, columns and values of sparse rows."""
    rows = [rng.choice(n_cols, rng.integers(0, n_cols), replace=False) for _ in range(n_rows)]
    bounds = np.cumsum([0, *map(len, rows)])
    columns = np.concatenate([np.sort(row) if ascend else row for row in rows])
    return bounds, columns, rng.integers(1, 100, len(columns))


@pytest.mark.long
@examples(40)
@given(data=st.data())
def test_the_gather_of_linked_groups_is_that_of_stored_ones(data: st.DataObject) -> None:
    """Rows of linked and stored groups, mixed, of any type, filters, selections and orders."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    n_cols = 40
    sort = data.draw(st.booleans())
    result = np.dtype(data.draw(st.sampled_from(["f4", "u4", "f8"])))
    kept = np.full(n_cols, -1, np.int64)
    chosen = rng.permutation(n_cols)[: data.draw(st.sampled_from([5, n_cols]))]
    kept[chosen] = np.arange(len(chosen))
    with tempfile.TemporaryDirectory() as folder:
        stored, linked_groups, starts, ends, group = [], [], [], [], []
        for g in range(data.draw(st.integers(1, 3))):
            # Stored rows ascend where they come as stored.
            bounds, columns, values = rows_of(rng, 8, n_cols, ascend=not sort)
            file = Path(folder) / f"{g}.h5"
            settings = FILTERS[data.draw(st.sampled_from(sorted(FILTERS)))]
            chunks = {"chunks": (data.draw(st.integers(1, 50)),)} if settings and len(columns) else {}
            with h5py.File(file, "w") as opened:
                opened.create_dataset("i", data=columns.astype(data.draw(st.sampled_from(["i4", "i8", "u2", ">i4"]))), **(settings if chunks else {}))  # fmt: skip
                opened.create_dataset("v", data=values.astype(data.draw(st.sampled_from(["f4", "u1", "i4"]))), **(settings if chunks else {}), **chunks)  # fmt: skip
            readers = [link_hdf5(Path(folder), file, name) for name in ("i", "v")]
            stored_readers = []
            for name, held in (("i", columns.astype("u4")), ("v", values.astype("u4"))):
                writer = ArrayWriter(
                    Location(folder), f"{name}{g}", held.dtype, profile="packed", chunk_rows=50, shard_rows=100
                )
                writer.append(held)
                stored_readers.append(ArrayReader(Location(folder), writer.close()))
            mixed = readers if data.draw(st.booleans()) else stored_readers
            linked_groups.append(RowGroup(mixed[0], {"v": mixed[1]}, kept))
            stored.append(RowGroup(stored_readers[0], {"v": stored_readers[1]}, kept))
            asked = rng.integers(0, 8, 5)
            starts.append(bounds[asked])
            ends.append(bounds[asked + 1])
            group.append(np.full(5, g, np.int32))
        where = [np.concatenate(part) for part in (group, starts, ends)]
        order = rng.permutation(len(where[0]))
        found = [
            RowGatherer(groups, len(chosen), {"v": result}).gather(*(part[order] for part in where), sort=sort)
            for groups in (linked_groups, stored)
        ]
    if not sort and len(chosen) == n_cols:
        # Stored rows come as they are, those of linked groups sorted.
        for indptr, indices, layers in found:
            for a, b in pairwise(indptr):
                by = np.argsort(indices[a:b])
                indices[a:b], layers["v"][a:b] = indices[a:b][by], layers["v"][a:b][by]
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])
    np.testing.assert_array_equal(found[0][2]["v"], found[1][2]["v"])


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize(
    ("columns", "fault"),
    [([3, 1, 3], "a feature twice in one cell"), ([1, 2, 9], "has not got"), ([1, -2, 3], "has not got"), (range(11), "twice, or one")],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["i4", "i8"])
def test_wrong_columns_of_a_file_are_refused(columns: Any, fault: str, sort: bool, dtype: str, tmp_path: Path) -> None:
    """A repeated, negative or too large column is an error that names the file and what to do, also where rows come as stored."""
    n = len(columns)
    with h5py.File(tmp_path / "x.h5", "w") as opened:
        opened.create_dataset("i", data=np.array(columns, dtype))
        opened.create_dataset("v", data=np.ones(n, "f4"))
    readers = [link_hdf5(tmp_path, tmp_path / "x.h5", name) for name in ("i", "v")]
    group = RowGroup(readers[0], {"v": readers[1]}, np.arange(9))
    gatherer = RowGatherer([group], 9, {"v": np.dtype("f4")})
    assert not gatherer.in_place
    with pytest.raises(CorruptError, match=rf"i in .*x\.h5.*{DATASET}.*{fault}.*copy=True") as caught:
        gatherer.gather(np.zeros(1, np.int32), np.array([0]), np.array([n]), sort=sort)
    assert "restore" not in str(caught.value).lower()


# ---- remote files ----


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[WebServer, ArrayReader, NDArray[Any]]]:
    """A file on a web server with ETags, chunks compressed."""
    values = np.random.default_rng(0).integers(0, 50, 20_000).astype("f4")
    (tmp_path / "web").mkdir()
    write_hdf5(tmp_path / "web/x.h5", values, chunks=(1000,), compression="gzip")
    with WebServer(tmp_path / "web", headers={"ETag": '"one"'}) as server:
        place = Location(f"{server.address}/x.h5")
        yield server, link_hdf5(tmp_path, tmp_path / "web/x.h5", "X/data", place=place, etag='"one"'), values


def test_rows_of_a_remote_file(served: Any) -> None:
    """Ranges are requested with the recorded ETag; what was decoded before takes no request."""
    server, reader, values = served
    np.testing.assert_array_equal(read_rows(reader, [5, 19_000, 7]), values[[5, 19_000, 7]])
    np.testing.assert_array_equal(read_all(reader), values)
    n = len(server.requests)
    read_rows(reader, [5, 19_000])
    assert len(server.requests) == n
    assert verify(reader).problems == []
    assert len(server.requests) > n


@pytest.mark.parametrize("ignore", [True, False])
def test_a_remote_file_with_another_etag_is_refused(served: Any, ignore: bool) -> None:
    """Whether the server compares the ETag or ignores the condition, or gives none any more."""
    server, reader, _ = served
    server.ignore_conditions = ignore
    read_slice(reader, 0, 10)
    for headers in ({"ETag": '"two"'}, {}):
        server.headers = headers
        with pytest.raises(StaleSourceError, match=rf"'{DATASET}' is linked to http://.*x\.h5, .*ETag is"):
            read_slice(reader, 5000, 5010)


@pytest.mark.parametrize("ignore", [True, False])
def test_etags_may_lack_their_quotes(served: Any, ignore: bool) -> None:
    """A server that leaves out the quotes of an ETag serves the recorded file, whatever it makes of the condition."""
    server, reader, values = served
    server.headers, server.ignore_conditions = {"ETag": "one"}, ignore
    np.testing.assert_array_equal(read_slice(reader, 0, 10), values[:10])
    server.headers = {"ETag": "two"}
    with pytest.raises(StaleSourceError, match='its ETag is "two" instead of "one"'):
        read_slice(reader, 5000, 5010)


def test_a_remote_file_that_is_gone_or_cut_short(served: Any, tmp_path: Path) -> None:
    """A missing file and one of another size, also where the server says that nothing has changed."""
    server, reader, _ = served
    file = tmp_path / "web/x.h5"
    data = file.read_bytes()
    for size in (len(data) - 5, 10):
        file.write_bytes(data[:size])
        with pytest.raises(StaleSourceError, match=r"bytes instead of|it is shorter"):
            read_slice(reader, 19_500, 20_000)
    file.unlink()
    with pytest.raises(StaleSourceError, match="it is missing"):
        read_slice(reader, 0, 10)
    file.write_bytes(data)
    server.sent = 10
    with pytest.raises(StoreError, match=r"x\.h5"):
        read_slice(reader, 0, 10)


@pytest.mark.parametrize("etag", ["", 'W/"one"'])
def test_without_a_strong_etag_the_beginning_and_end_are_compared(etag: str, tmp_path: Path) -> None:
    """Where no ETag stands for the bytes, time, size and the probe do: once per process, in the requests of the first read."""
    values = np.arange(100_000, dtype="u4")
    (tmp_path / "web").mkdir()
    file = tmp_path / "web/x.h5"
    write_hdf5(file, values, chunks=(1000,), compression="gzip")
    headers = {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"} | ({"ETag": etag} if etag else {})
    with WebServer(tmp_path / "web", headers=headers) as server:
        place = Location(f"{server.address}/x.h5")
        reader = link_hdf5(tmp_path, file, "X/data", place=place, etag=etag)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(StaleSourceError, match="begins or ends differently"):
            read_slice(reader, 50_000, 50_010)
        data[-1] ^= 1
        file.write_bytes(data)
        for n in (3, 1):
            server.requests.clear()
            empty("chunks")
            np.testing.assert_array_equal(read_slice(reader, 50_000, 50_010), values[50_000:50_010])
            assert len(server.requests) == n
        recorded = hostile(
            reader, lambda old: References(replace(old.objects, modified=np.array([10**18])), old.arrays)
        )
        with pytest.raises(StaleSourceError, match=r"2015-10-21 07:28:00.*instead of 2001-09-09"):
            read_slice(recorded, 60_000, 60_010)


def test_a_server_without_ranges(served: Any) -> None:
    """It is told that such a server cannot be read from."""
    server, reader, _ = served
    server.ranges = False
    with pytest.raises(StoreError, match="does not serve parts of a file") as caught:
        read_slice(reader, 0, 10)
    assert not isinstance(caught.value, StaleSourceError)


def test_requests_fetch_little_more_than_is_needed(tmp_path: Path) -> None:
    """Far ranges are requested apart and near ones together, long ones in several requests; all at once."""
    objects = SourceObjects(("",), np.array([10**9]), np.array([0]), ('"one"',))
    rng = np.random.default_rng(0)
    seen: list[tuple[int, int]] = []
    lock = threading.Lock()

    def request(source: Any, objects: Any, number: int, start: int, stop: int) -> memoryview:
        with lock:
            seen.append((start, stop))
        return memoryview(bytes(stop - start))

    def fetched(offsets: list[int], size: int) -> tuple[int, int]:
        seen.clear()
        n, sizes = len(offsets), np.full(len(offsets), size)
        ranges = Ranges.of(np.zeros(n), np.array(offsets), sizes, np.arange(n) * size, np.empty(n * size, np.uint8))
        linked.fetch_ranges(LinkedSource(Location("https://host/x.h5ad"), DATASET), objects, ranges)
        return len(seen), sum(stop - start for start, stop in seen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linked, "_request", request)
        needed = 134 * 24_000
        n, n_bytes = fetched(rng.integers(0, 10**9 - 24_000, 134).tolist(), 24_000)
        assert n <= 134
        assert n_bytes < 1.5 * needed
        # One behind the other: as few requests as their size allows.
        n, n_bytes = fetched(list(range(0, needed, 24_000)), 24_000)
        assert (n, n_bytes) == (1, needed)
        n, n_bytes = fetched(list(range(0, 10 * needed, 24_000)), 24_000)
        assert n_bytes == 10 * needed
        assert n == -(-10 * needed // (linked.REQUEST_BYTES // 24_000 * 24_000))
        assert fetched([5], 3 * linked.REQUEST_BYTES) == (3, 3 * linked.REQUEST_BYTES)


def test_a_folder_of_objects_in_a_store(s3: Location, tmp_path: Path) -> None:
    """Chunks of a Zarr folder in an object store are requested from their own objects, each with its ETag."""
    import obstore

    values = np.random.default_rng(0).integers(0, 9, 1050).astype("int32")
    reader = link_zarr(tmp_path, values, 100, "zstd")
    store, etags, references = s3.store(), list[str](), references_of(reader)
    for key in references.objects.keys:
        data = (tmp_path / "matrix.zarr" / key).read_bytes()
        etags.append(obstore.put(store, f"m.zarr/{key}", data)["e_tag"] or "")
    there = hostile(
        replace(reader, source=LinkedSource(s3 / "m.zarr", DATASET)),
        lambda old: References(replace(old.objects, etags=tuple(etags)), old.arrays),
    )
    np.testing.assert_array_equal(read_all(there), values)
    obstore.put(store, f"m.zarr/{references.objects.keys[2]}", b"other")
    with pytest.raises(StaleSourceError, match=r"m\.zarr/c/2, which is not the file"):
        read_all(there)


def test_ranges_of_an_open_file(tmp_path: Path) -> None:
    """Any ranges, in any order, by one call or in turn; what is outside of the room or of the file is refused."""
    rng = np.random.default_rng(0)
    content = rng.integers(0, 256, 10_000, np.uint8)
    (tmp_path / "x").write_bytes(content.tobytes())
    sizes = rng.integers(0, 50, 40)
    offsets, targets = rng.integers(0, 9_900, 40), np.cumsum(sizes) - sizes
    expected = np.concatenate([content[at : at + n] for at, n in zip(offsets, sizes, strict=True)])
    with (tmp_path / "x").open("rb") as file:
        for read in (file_arrays.read_file, file_arrays._read_in_turn):
            ranges = Ranges.of(np.zeros(40), offsets, sizes, targets, np.zeros(expected.size, np.uint8))
            assert read(file.fileno(), ranges)
            np.testing.assert_array_equal(ranges.room, expected)
            behind = Ranges.of(np.zeros(1), np.array([9_990]), np.array([20]), np.zeros(1), np.zeros(20, np.uint8))
            assert not read(file.fileno(), behind)
        for offset, size, target in ((-1, 5, 0), (0, 5, 16), (0, 5, -1), (0, 30, 0), (2**63 - 2, 5, 0)):
            wrong = Ranges.of(
                np.zeros(1), np.array([offset]), np.array([size]), np.array([target]), np.zeros(20, np.uint8)
            )
            with pytest.raises(CorruptError, match="outside"):
                file_arrays.read_file(file.fileno(), wrong)
        closed = os.dup(file.fileno())
        os.close(closed)
        with pytest.raises(OSError, match=r"[Bb]ad file"):
            file_arrays.read_file(closed, ranges)
