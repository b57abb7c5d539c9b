"""The file of a dataset's small files: its bytes, and that each is read by its range."""

import hashlib
import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.errors import CorruptError, NotFoundError
from raggedatlas.model.arrays import ArraySpec
from raggedatlas.store.arrays import ArrayWriter
from raggedatlas.store.bundle import BUNDLE_BYTES, FILE, MEMBER_BYTES, Bundle
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader, read_all, verify

NAMES = st.text("abc/._-", min_size=1, max_size=30).map("d1/x{}".format)


def test_the_bytes_of_a_bundle_do_not_change(tmp_path: Path) -> None:
    """The same files give the bytes that the first release with bundles wrote, on every platform."""
    bundle, location = Bundle("d1"), Location(str(tmp_path))
    bundle.add({"d1/frames/obs.arrow": b"ARROW1", "d1/a/c/0": bytes(range(100))})
    bundle.add({"d1/empty": b""})
    bundle.write(location)
    data = (tmp_path / "d1" / FILE).read_bytes()
    assert data[:4] == b"PK\3\4"
    assert (bundle.n_bytes, bundle.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert bundle.sha256 == "8d31dba4dc60ed338da8a0e9d0b24f73e8b19aa25d42fab1b6e1a28a69836c09"


@given(st.lists(st.dictionaries(NAMES, st.binary(max_size=200), min_size=1, max_size=3), min_size=1, max_size=4))
def test_files_are_read_by_their_range_and_by_any_zip_reader(
    tmp_path_factory: pytest.TempPathFactory, added: list[dict[str, bytes]]
) -> None:
    """Each file begins at a multiple of 64 bytes, and is what was added."""
    location, bundle, last = Location(str(tmp_path_factory.mktemp("store"))), Bundle("d1"), dict[str, bytes]()
    for files in added:
        new = {path: data for path, data in files.items() if path not in last}
        last |= new
        assert bundle.add(new) == {path: bundle.spans[path] for path in new}
    bundle.write(location)
    for path, span in bundle.spans.items():
        assert span.offset % 64 == 0
        assert location.read_range(span.file, span.offset, span.n_bytes) == last[path]
    with zipfile.ZipFile(io.BytesIO(location.read_bytes(f"d1/{FILE}"))) as archive:
        assert archive.testzip() is None
        assert {f"d1/{name}": archive.read(name) for name in archive.namelist()} == last
    again = pickle.loads(pickle.dumps(bundle))
    assert (again.spans, again.sha256, again.n_bytes) == (bundle.spans, bundle.sha256, bundle.n_bytes)


def test_large_files_are_not_taken(tmp_path: Path) -> None:
    """Neither a file that is large alone nor one too many, and of files added together all or none."""
    bundle = Bundle("d1")
    assert bundle.add({"d1/a": bytes(MEMBER_BYTES + 1)}) is None
    assert bundle.add({"d1/a": b"1", "d1/b": bytes(MEMBER_BYTES)}) is None
    bundle.write(Location(str(tmp_path)))
    assert not list(tmp_path.iterdir())
    n = 0
    while bundle.add({f"d1/{n}": bytes(MEMBER_BYTES)}) is not None:
        n += 1
    assert n == BUNDLE_BYTES // MEMBER_BYTES - 1


def test_a_bundle_that_was_written_takes_no_more(tmp_path: Path) -> None:
    """What comes later, in another process too, is not said to be in the file."""
    bundle = Bundle("d1")
    bundle.add({"d1/a": b"1"})
    bundle.write(Location(str(tmp_path)))
    for written in (bundle, pickle.loads(pickle.dumps(bundle))):
        assert written.add({"d1/b": b"2"}) is None
        assert list(written.spans) == ["d1/a"]


@pytest.mark.parametrize("profile", ["packed", "standard", "archive"])
def test_an_array_in_a_bundle_is_an_array(tmp_path: Path, profile: str) -> None:
    """It has the values that were written, in the reader here and in zarr-python's of ZIP files, and the hash of one in a file of its own."""
    location, bundle = Location(str(tmp_path)), Bundle("d1")
    values = {"d1/g/n": np.arange(40_000, dtype=np.int64), "d1/g/m": np.ones((3, 2), np.float32)}
    specs, hashes = {}, {}
    for path, array in values.items():
        writer = ArrayWriter(location, path, array.dtype, array.shape[1:], profile=profile)
        writer.append(array)
        specs[path] = writer.close(listed=True, bundle=bundle)
        alone = ArrayWriter(location, "alone", array.dtype, array.shape[1:], profile=profile)
        alone.append(array)
        alone.close(listed=True)
        hashes[path] = alone.checksums("x")["x/c"]
        assert writer.checksums(path)[f"{path}/c"] == hashes[path]
        location.child("alone").delete_prefix()
    bundle.write(location)
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()] == [f"d1/{FILE}"]
    for path, array in values.items():
        spec = ArraySpec.from_json(specs[path].to_json())
        assert spec == specs[path]
        assert verify(ArrayReader(location, spec)).shards == hashes[path]
        assert np.array_equal(read_all(ArrayReader(location, spec)), array)
        with zarr.storage.ZipStore(tmp_path / "d1" / FILE, mode="r") as store:
            stored = zarr.open_array(store, path=path.removeprefix("d1/"), mode="r")
            assert np.array_equal(stored[:], array)


def test_a_large_array_does_not_go_into_a_bundle(tmp_path: Path) -> None:
    """Neither does one of several shards, nor one without values."""
    location, bundle = Location(str(tmp_path)), Bundle("d1")
    noise = np.random.default_rng(0).random(MEMBER_BYTES // 4)
    for name, values, shard in (("large", noise, None), ("shards", noise[:100], 10), ("empty", noise[:0], None)):
        writer = ArrayWriter(location, f"d1/{name}", "float64", chunk_rows=shard, shard_rows=shard)
        writer.append(values)
        spec = writer.close(bundle=bundle)
        assert spec.within is None
        assert np.array_equal(read_all(ArrayReader(location, spec)), values)


def test_a_range_that_is_not_there_is_refused(tmp_path: Path, s3: Location) -> None:
    """A file that was cut short, or is gone, gives an error that says so."""
    for location in (Location(str(tmp_path)), s3):
        location.write_bytes("d1/x", b"12345")
        assert location.read_range("d1/x", 1, 3) == b"234"
        for offset, n in ((3, 3), (5, 1), (9, 2)):
            with pytest.raises(CorruptError, match="cut short"):
                location.read_range("d1/x", offset, n)
        with pytest.raises(NotFoundError):
            location.read_range("d1/y", 0, 1)
