"""Laws of the reading past HDF5's library: what it reads is what the library reads, and damage is told."""

import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.errors import SourceError
from raggedatlas.formats import hdf5_chunks
from raggedatlas.formats.hdf5_chunks import Hdf5ChunkReader, open_chunk_reader
from raggedatlas.formats.matrix_readers import DenseRows, MatrixLocation
from raggedatlas.store import byte_filters
from raggedatlas.store.byte_filters import inflate
from support.hypothesis_profile import examples

FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "gzip": {"compression": "gzip", "compression_opts": 4},
    "shuffled gzip": {"compression": "gzip", "shuffle": True},
}
ENGINES = ["isal", "zlib"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Decompress with ISA-L, or without it."""
    if request.param == "isal":
        pytest.importorskip("isal")
        assert byte_filters.deflater() is not zlib
    else:
        monkeypatch.setattr(byte_filters, "deflater", lambda: zlib)
    return str(request.param)


def opened(path: Path, array: np.ndarray, options: dict[str, Any], *, userblock: int = 0) -> h5py.Dataset:
    with h5py.File(path, "w", userblock_size=userblock) as file:
        file.create_dataset("x", data=array, **options)
    return h5py.File(path)["x"]


@st.composite
def stored(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, Any]]:
    """Return an array of one or two axes, and how it is stored."""
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=2)))
    dtype = np.dtype(draw(st.sampled_from(["u1", "i2", ">i4", "u8", "f2", "f4", ">f8"])))
    options = dict(FILTERS[draw(st.sampled_from(list(FILTERS)))])
    if options or draw(st.booleans()):
        options["chunks"] = tuple(draw(st.integers(1, n)) for n in shape)
    values = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 100, shape).astype(dtype)
    return values, options


@given(case=stored(), cuts=st.lists(st.integers(0, 40), max_size=5), userblock=st.sampled_from([0, 512]))
@examples(40)
def test_what_is_read_past_the_library_is_what_it_reads(
    tmp_path_factory: pytest.TempPathFactory, case: Any, cuts: list[int], userblock: int
) -> None:
    """Any filters, chunks, type and steps down the rows give the library's values."""
    array, options = case
    path = tmp_path_factory.mktemp("x") / "x.h5"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hdf5_chunks, "SMALLEST", 1)
        dataset = opened(path, array, options, userblock=userblock)
        rows = open_chunk_reader(dataset)
    assert isinstance(rows, Hdf5ChunkReader)
    edges = sorted({0, len(array), *(cut for cut in cuts if cut < len(array))})
    for start, stop in pairwise(edges):
        np.testing.assert_array_equal(rows.read(start, stop), dataset[start:stop])
    np.testing.assert_array_equal(rows.read(0, len(array)), array)
    dataset.file.close()


@pytest.mark.parametrize("filters", list(FILTERS))
def test_several_threads_and_both_engines_read_equal(tmp_path: Path, engine: str, filters: str) -> None:
    """Enough chunks for several threads give the library's values, whichever library inflates."""
    del engine
    values = np.random.default_rng(0).poisson(1.0, 3_000_000).astype(np.float32)
    dataset = opened(tmp_path / "x.h5", values, {**FILTERS[filters], "chunks": (65_536,)})
    rows = open_chunk_reader(dataset)
    assert rows is not None
    np.testing.assert_array_equal(
        np.concatenate([rows.read(a, min(a + 777_777, len(values))) for a in range(0, len(values), 777_777)]), values
    )
    dataset.file.close()


def test_chunks_that_were_never_written_hold_the_fill_value(tmp_path: Path) -> None:
    """Chunks without storage, and chunks whose filters were skipped, are read as the library reads them."""
    values = np.arange(40_000, dtype=np.int32)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("x", (40_000,), "i4", chunks=(10_000,), fillvalue=7, **FILTERS["shuffled gzip"])
        dataset[10_000:20_000] = values[10_000:20_000]
        dataset.id.write_direct_chunk((30_000,), values[30_000:].tobytes(), filter_mask=3)
    with h5py.File(tmp_path / "x.h5") as file:
        rows = open_chunk_reader(file["x"])
        assert rows is not None
        np.testing.assert_array_equal(rows.read(0, 40_000), file["x"][...])
        assert rows.read(5, 6)[0] == 7


def test_what_does_not_fit_is_left_to_the_library(tmp_path: Path) -> None:
    """Other filters, types and drivers, tiny chunks and files open for writing are not read past the library."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = np.zeros(20_000, np.int32)
        file.create_dataset("lzf", data=data, chunks=(10_000,), compression="lzf")
        file.create_dataset("checked", data=data, chunks=(10_000,), fletcher32=True)
        file.create_dataset("tiny", data=data, chunks=(10,))
        file.create_dataset("truth", data=data > 0, chunks=(10_000,))
        file.create_dataset("none", data=np.zeros(0, np.int32))
        file.create_dataset("good", data=data, chunks=(10_000,))
        assert open_chunk_reader(file["good"]) is None
    with h5py.File(tmp_path / "x.h5") as file:
        fit = {name: open_chunk_reader(file[name]) is not None for name in file}
    assert fit == {name: name == "good" for name in fit}
    with h5py.File("x", "w", driver="core", backing_store=False) as file:
        assert open_chunk_reader(file.create_dataset("x", data=data, chunks=(10_000,))) is None
    assert open_chunk_reader(data) is None


@pytest.mark.parametrize("filters", ["gzip", "shuffled gzip"])
def test_damaged_and_missing_bytes_are_told(tmp_path: Path, engine: str, filters: str) -> None:
    """A flipped byte in a compressed chunk, a file cut short and a closed file become errors that name the element."""
    del engine
    values = np.random.default_rng(0).integers(0, 9, 100_000).astype(np.int32)
    dataset = opened(tmp_path / "x.h5", values, {**FILTERS[filters], "chunks": (50_000,)})
    place = MatrixLocation("x.h5", "X", str)
    info = dataset.id.get_chunk_info(1)
    dataset.file.close()
    whole = bytearray((tmp_path / "x.h5").read_bytes())
    whole[info.byte_offset + info.size // 2] ^= 0xFF
    (tmp_path / "flipped.h5").write_bytes(whole)
    with h5py.File(tmp_path / "flipped.h5") as file:
        rows = DenseRows(file["x"], place)
        np.testing.assert_array_equal(rows.read(0, 50_000).layers["values"], values[:50_000])
        with pytest.raises(SourceError, match=r"x\.h5: X cannot be read"):
            rows.read(0, 100_000)
    file = h5py.File(tmp_path / "x.h5")
    rows = DenseRows(file["x"], place)
    file.close()
    with pytest.raises(SourceError, match="closed"):
        rows.read(0, 10)


def test_a_file_that_loses_its_end_is_told(tmp_path: Path) -> None:
    """Plain values that the file no longer has are missed, not made up."""
    dataset = opened(tmp_path / "x.h5", np.arange(100_000), {})
    rows = DenseRows(dataset, MatrixLocation("x.h5", "X", str))
    with (tmp_path / "x.h5").open("r+b") as file:
        file.truncate(300_000)
    with pytest.raises(SourceError, match="ends within a chunk"):
        rows.read(0, 100_000)
    dataset.file.close()


def test_streams_that_hold_more_or_less_are_refused(engine: str) -> None:
    """A compressed chunk must become exactly its size, and no more than that is ever made."""
    del engine
    data = zlib.compress(bytes(10_000))
    assert inflate(data, 10_000) == bytes(10_000)
    for n_bytes, said in ((9_999, "more"), (10_001, "fewer")):
        with pytest.raises(ValueError, match=said):
            inflate(data, n_bytes)
    with pytest.raises(ValueError, match=r"damaged|fewer|more"):
        inflate(data[:-6] + b"abcdef", 10_000)


@pytest.mark.parametrize("layout", [{}, {"chunks": (1 << 16,), "compression": "gzip"}])
def test_held_blocks_stay_as_they_are(tmp_path: Path, layout: dict[str, Any]) -> None:
    """Memory of a block is used again only once nothing looks at it: a held one, or a view of one, never changes."""
    data = np.arange(1 << 20, dtype=np.float32)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("y", data=data, **layout)
    with h5py.File(tmp_path / "x.h5", "r") as file:
        rows = open_chunk_reader(file["y"])
        assert rows is not None
        step, held = 1 << 17, rows.read(0, 1 << 17)
        part = rows.read(step, 2 * step)[7:]
        for start in range(2 * step, len(data), step):
            assert np.array_equal(rows.read(start, start + step), data[start : start + step])
        assert np.array_equal(held, data[:step])
        assert np.array_equal(part, data[step + 7 : 2 * step])
