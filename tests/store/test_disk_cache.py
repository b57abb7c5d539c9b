"""The disk cache of remote arrays: nothing is asked twice, nothing wrong is given, and it takes no more than it may."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raggedatlas.errors import CorruptError, StoreError
from raggedatlas.model.arrays import ArraySpec
from raggedatlas.store import cache_folder, disk_cache
from raggedatlas.store.arrays import ArrayWriter
from raggedatlas.store.cache_folder import parse_size, user_cache
from raggedatlas.store.disk_cache import DiskCache
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader, read_rows, read_slice, verify
from raggedatlas.store.runtime import process_cache
from raggedatlas.wings.cxg.explorer import find_explorer, install_folder

pytestmark = pytest.mark.s3
N = 4000
VALUES = np.random.default_rng(0).integers(0, 1000, N).astype("uint32")


@pytest.fixture
def spec(s3: Location) -> ArraySpec:
    """Write an array in four shards of 1,000 values, 50 to a chunk."""
    writer = ArrayWriter(s3, "d1/csr/indices", "uint32", profile="packed", chunk_rows=50, shard_rows=1000)
    writer.append(VALUES)
    return writer.close()


def cached(location: Location, folder: Path, size: str = "10GB") -> Location:
    return replace(location, storage_options={**location.storage_options, "cache_dir": str(folder), "cache_size": size})


def fresh(reader: ArrayReader) -> ArrayReader:
    """Give the reader as another process has it: no index is known."""
    process_cache("indexes").entries.clear()
    return reader


@pytest.mark.long
def test_nothing_is_asked_twice(s3: Location, spec: ArraySpec, s3_proxy, tmp_path: Path) -> None:  # noqa: ANN001
    """What one process has read, another one reads without a request, and of the rest only what is missing is asked for."""
    reader = ArrayReader(cached(s3, tmp_path), spec)
    before = len(s3_proxy.requests)
    np.testing.assert_array_equal(read_rows(reader, [3, 1700, 60]), VALUES[[3, 1700, 60]])
    assert len(s3_proxy.requests) - before == 4  # two shards: an index and a range each
    before = len(s3_proxy.requests)
    np.testing.assert_array_equal(read_rows(fresh(reader), [1701, 4, 99, 50]), VALUES[[1701, 4, 99, 50]])
    assert len(s3_proxy.requests) == before
    np.testing.assert_array_equal(read_slice(fresh(reader), 0, 200), VALUES[:200])
    assert len(s3_proxy.requests) - before == 1
    plain = ArrayReader(s3, spec)
    np.testing.assert_array_equal(read_slice(fresh(plain), 0, N), VALUES)
    assert len(s3_proxy.requests) - before > 1
    assert [path.name for path in tmp_path.iterdir()] == ["raggedatlas"]
    assert stat.S_IMODE((tmp_path / "raggedatlas" / "shards").stat().st_mode) == 0o700


def test_damage_in_the_cache_is_mended(s3: Location, spec: ArraySpec, s3_proxy, tmp_path: Path) -> None:  # noqa: ANN001
    """Changed chunks, changed indexes and cut copies are fetched again; what was asked for is always given."""
    reader = ArrayReader(cached(s3, tmp_path), spec)
    read_slice(reader, 0, 1000)
    (file,) = (tmp_path / "raggedatlas" / "shards").iterdir()
    good = file.read_bytes()
    changed = bytes([good[40] ^ 1])
    for damaged in (
        good[:40] + changed + good[41:],
        good[:-20] + changed + good[-19:],
        good[:300],
        b"",
        bytes(len(good)),
    ):
        file.write_bytes(damaged)
        np.testing.assert_array_equal(read_slice(fresh(reader), 0, 1000), VALUES[:1000])
        before = len(s3_proxy.requests)
        np.testing.assert_array_equal(read_slice(fresh(reader), 0, 1000), VALUES[:1000])
        assert len(s3_proxy.requests) == before
        assert file.read_bytes() == good
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    np.testing.assert_array_equal(read_slice(fresh(reader), 0, 1000), VALUES[:1000])
    assert not (tmp_path / "elsewhere").exists()


def test_a_failing_disk_and_a_removed_folder_cost_requests_alone(
    s3: Location, spec: ArraySpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read or removed, and a folder that another process removes at any time, fail no read."""
    reader = ArrayReader(cached(s3, tmp_path), spec)
    read_slice(reader, 0, 1000)

    def fails(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", fails)
        np.testing.assert_array_equal(read_slice(fresh(reader), 0, 1000), VALUES[:1000])
    (file,) = (tmp_path / "raggedatlas" / "shards").iterdir()
    file.write_bytes(bytes(file.stat().st_size))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", fails)
        np.testing.assert_array_equal(read_slice(fresh(reader), 0, 1000), VALUES[:1000])
    process_cache("allowances").entries.clear()
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", fails)
        np.testing.assert_array_equal(read_slice(fresh(reader), 1000, 2000), VALUES[1000:2000])


@pytest.mark.long
def test_damage_in_the_bucket_is_seen(s3: Location, spec: ArraySpec, tmp_path: Path) -> None:
    """Verifying goes past the cache, and damaged bytes of the bucket are never held."""
    reader = ArrayReader(cached(s3, tmp_path), spec)
    assert verify(reader)[0] == []
    assert not (tmp_path / "raggedatlas" / "shards").exists()
    read_slice(reader, 0, 50)
    good = s3.read_bytes("d1/csr/indices/c/0")
    for at in (45, 400):
        s3.write_bytes("d1/csr/indices/c/0", good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert "damaged" in " ".join(verify(fresh(reader))[0])
    np.testing.assert_array_equal(read_slice(reader, 0, 50), VALUES[:50])
    for _ in range(2):
        with pytest.raises(CorruptError, match="damaged"):
            read_slice(fresh(reader), 50, 1000)
    s3.write_bytes("d1/csr/indices/c/0", good)
    np.testing.assert_array_equal(read_slice(reader, 0, 1000), VALUES[:1000])


def test_it_takes_no_more_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies used longest ago go first, whole, and nothing of anybody else's does."""
    monkeypatch.setattr(disk_cache, "_LEAST_STEP", 1)
    cache = DiskCache(tmp_path / "raggedatlas" / "shards", 60 * 4096)
    other = tmp_path / "mine.shard"
    other.write_bytes(bytes(2**20))
    rng = np.random.default_rng(1)

    def write(name: str) -> None:
        index = np.array([[0, 8 * 4096]])
        cache.write_chunks(name, index, [rng.integers(0, 256, 8 * 4096, np.uint8)], 9 * 4096, b"tail")

    for number in range(6):
        write(f"shard{number}")
        os.utime(cache.file(disk_cache._key(f"shard{number}")), (number, number))
    assert cache.read_tail("shard0", 4) == (b"tail", 9 * 4096)
    cache.read_chunks("shard0", np.array([[0, 10]]), 9 * 4096)  # makes it the youngest
    write("shard6")
    held = {name for name in (f"shard{n}" for n in range(7)) if cache.read_tail(name, 4)}
    assert "shard0" in held
    assert "shard6" in held
    assert "shard1" not in held
    assert sum(path.stat().st_blocks * 512 for path in cache.folder.iterdir()) <= 60 * 4096
    assert other.exists()


def test_many_at_once(s3: Location, spec: ArraySpec, tmp_path: Path) -> None:
    """Readers that write and remove the same copies at the same time give what was written."""
    reader = ArrayReader(cached(s3, tmp_path, "20KB"), spec)

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(5):
            rows = rng.integers(0, N, 20)
            np.testing.assert_array_equal(read_rows(reader, rows), VALUES[rows])
            reader.location.disk_cache.make_room()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))


def test_options_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options go before the environment, none of them reaches Lance, and what means nothing is refused."""
    asked = Location("s3://b/a", {"aws_region": "x", "cache_dir": str(tmp_path), "cache_size": "2KB"})
    assert asked.child("c").disk_cache == DiskCache(tmp_path / "raggedatlas" / "shards", 2000)
    assert asked.lance_options() == {"aws_region": "x"}
    assert asked.uncached().disk_cache is None
    assert Location("s3://b/a").disk_cache is None
    monkeypatch.setenv("RAGGEDATLAS_CACHE_DIR", str(tmp_path / "env"))
    assert Location("s3://b/a").disk_cache == DiskCache(tmp_path / "env" / "raggedatlas" / "shards", 10**10)
    assert asked.disk_cache.folder == tmp_path / "raggedatlas" / "shards"
    assert Location("s3://b/a", {"cache_dir": ""}).disk_cache is None
    assert Location(str(tmp_path), {"cache_dir": str(tmp_path)}).disk_cache is None
    for text in ("", "many", "-1", "1.2.3GB", "5iB"):
        with pytest.raises(StoreError, match="no size of a cache"):
            parse_size(text)
    with pytest.raises(StoreError, match="no size of a cache"):
        Location("s3://b/a", {"cache_size": "lots"})
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "raggedatlas" / "shards", 1)
    with pytest.raises(StoreError, match="name another one by cache_dir"):
        cache.write_chunks("x", np.array([[0, 1]]), [np.zeros(1, np.uint8)], 9, b"tail")


def test_a_system_without_pread_and_open_flags_keeps_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows lacks `pread`, `pwrite`, `O_NOFOLLOW`, `O_CLOEXEC` and times by handle."""
    for name in ("pread", "pwrite"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(cache_folder, "_OPEN_FLAGS", 0)
    cache = DiskCache(tmp_path / "cache", 2**20)
    data = np.arange(60, dtype=np.uint8)
    monkeypatch.setattr(disk_cache, "has_checksum", lambda chunk: True)
    cache.write_chunks("shard", np.array([[10, 60]]), [data], 100, b"the index!")
    assert cache.read_tail("shard", 10) == (b"the index!", 100)
    (found,) = cache.read_chunks("shard", np.array([[10, 60]]), 100)
    np.testing.assert_array_equal(found, data)


def test_a_user_without_a_home_can_do_without_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing names a folder and there is no home, nothing is kept; what needs a folder says how to name one."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert user_cache() is None
    with pytest.raises(StoreError, match="XDG_DATA_HOME"):
        install_folder()
    find_explorer()
    with pytest.raises(StoreError, match="cache_dir"):
        DiskCache.of_options({"cache_dir": "~no-such-user-here/cache"})
