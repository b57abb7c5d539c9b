"""Arrays on an object store: the same values, in a counted number of requests."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zarr

from raggedatlas.errors import CorruptError
from raggedatlas.model.arrays import ArraySpec
from raggedatlas.model.records import Span
from raggedatlas.store import read
from raggedatlas.store.arrays import ArrayWriter, create_group, read_spec
from raggedatlas.store.bundle import Bundle
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader, read_ranges, read_slice, verify

pytestmark = pytest.mark.s3
N = 2000
VALUES = np.random.default_rng(0).integers(0, 1000, N).astype("uint32")


def write(location: Location) -> ArraySpec:
    """Write the array in four shards."""
    writer = ArrayWriter(location, "d1/csr/indices", "uint32", chunk_rows=16, shard_rows=512)
    for part in np.array_split(VALUES, 5):
        writer.append(part)
    spec = writer.close()
    assert read_spec(location, "d1/csr/indices") == spec
    assert verify(ArrayReader(location, spec)) == ([], *writer.checksums("").values())
    return spec


def test_a_remote_array_reads_as_a_local_one(s3: Location) -> None:
    """Ranges, slices and zarr-python give the values that were written."""
    reader = ArrayReader(s3, write(s3))
    rng = np.random.default_rng(1)
    starts = rng.integers(0, N, 40)
    ends = np.minimum(starts + rng.integers(0, 90, 40), N)
    expected = np.concatenate([VALUES[a:b] for a, b in zip(starts, ends, strict=True)])
    np.testing.assert_array_equal(read_ranges(reader, starts, ends), expected)
    np.testing.assert_array_equal(zarr.open_group(s3.zarr_store(), mode="r")["d1/csr/indices"][:], VALUES)


@pytest.mark.parametrize(("small", "expected"), [(0, (4, 2, 0)), (None, (2, 0, 0))])
def test_requests_are_few(s3: Location, s3_proxy, monkeypatch, small, expected) -> None:  # noqa: ANN001
    """A shard costs one request to write; a read costs one per touched shard, and one for each new index, with which a small shard comes."""
    if small is not None:
        monkeypatch.setattr("raggedatlas.store.shards.SMALL_SHARD", small)
    before = len(s3_proxy.requests)
    writer = ArrayWriter(s3, "x", "uint32", chunk_rows=16, shard_rows=512)
    writer.append(VALUES)
    spec = writer.close()
    assert [request.method for request in s3_proxy.requests[before:]] == ["PUT"] * 6  # 4 shards, root, zarr.json
    reader = ArrayReader(s3, spec)
    for asked, n_requests in zip(([0, 100, 1600], [3, 200, 1900], []), expected, strict=True):
        before = len(s3_proxy.requests)
        found = read_ranges(reader, asked, np.array(asked, int) + 20)
        assert found.tolist() == [VALUES[row + i] for row in asked for i in range(20)]
        assert len(s3_proxy.requests) - before == n_requests
    before = len(s3_proxy.requests)
    create_group(s3, "d2/gene_expression", {"n": 1})
    assert len(s3_proxy.requests) - before == 3


def test_indexes_of_a_large_read_are_asked_for_together(s3: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a large read takes memory, the indexes of its shards are fetched side by side, not each after the other."""
    spec = write(s3)
    monkeypatch.setattr("raggedatlas.store.read._LARGE_BYTES", 0)
    n_shards = -(-spec.n_rows // spec.shard_shape[0])
    together = threading.Barrier(n_shards)
    fetch = read.fetch_index

    def waiting(*given: Any) -> Any:
        together.wait(10)
        return fetch(*given)

    monkeypatch.setattr(read, "fetch_index", waiting)
    np.testing.assert_array_equal(read_slice(ArrayReader(s3, spec), 0, spec.n_rows), VALUES)
    assert n_shards > 1


def test_remote_damage_raises(s3: Location) -> None:
    """A missing, cut or changed remote shard is named and never read as values."""
    write(s3)
    good = s3.read_bytes("d1/csr/indices/c/0")
    for number, (data, message) in enumerate(
        {
            bytes([good[0] ^ 1]) + good[1:]: "damaged",
            good[:5] + bytes([good[5] ^ 1]) + good[6:]: "damaged",
            good[:-1]: "index of shard",
            good[:100]: "cut short",
        }.items()
    ):
        place = f"copy{number}"
        for key in ("zarr.json", "c/1", "c/2", "c/3"):
            s3.write_bytes(f"{place}/{key}", s3.read_bytes(f"d1/csr/indices/{key}"))
        s3.write_bytes(f"{place}/c/0", data)
        reader = ArrayReader(s3, read_spec(s3, place))
        with pytest.raises(CorruptError, match=message):
            read_slice(reader, 0, 20)
        np.testing.assert_array_equal(read_slice(reader, 512, N), VALUES[512:])
    spec = read_spec(s3, "copy0")
    gone = ArrayReader(s3, dataclasses.replace(spec, path="gone"))
    with pytest.raises(CorruptError, match="gone/c/0 is missing"):
        read_slice(gone, 0, 20)


def bundled(location: Location) -> ArraySpec:
    """Write the array as a part of a bundle."""
    writer, bundle = ArrayWriter(location, "d1/csr/indices", "uint32", chunk_rows=16), Bundle("d1")
    writer.append(VALUES)
    spec = writer.close(bundle=bundle)
    bundle.write(location)
    return spec


@pytest.mark.parametrize("make", [write, bundled])
def test_verify_reads_a_small_shard_again(s3: Location, make: Callable[[Location], ArraySpec]) -> None:
    """Damage that comes after a shard was read is found by `verify`, and not hidden by what this process keeps."""
    reader = ArrayReader(s3, make(s3))
    assert read_slice(reader, 0, N).tolist() == VALUES.tolist()
    span = reader.spec.within or Span("d1/csr/indices/c/0", 0, 0)
    good = s3.read_bytes(span.file)
    s3.write_bytes(span.file, good[: span.offset] + bytes([good[span.offset] ^ 1]) + good[span.offset + 1 :])
    assert verify(reader)[0]
    s3.write_bytes(span.file, good)
    assert verify(reader)[0] == []
