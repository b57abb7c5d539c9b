"""Files in object stores and on web servers: read by ranges as from a local disk, written without a visible half, refused in one line."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from anndata.tests.helpers import assert_equal
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import raggedatlas as ra
from raggedatlas.cli.commands import app
from raggedatlas.errors import DuplicateError, NotFoundError, SourceError, StoreError
from raggedatlas.formats.anndata import inspect, validate
from raggedatlas.store.copies import local_copy, upload
from raggedatlas.store.location import Location
from raggedatlas.store.ranges import BLOCK, SMALL_BLOCK
from raggedatlas.wings import cxg
from support.cxg_files import write_cxg
from support.hypothesis_profile import examples
from support.object_store import FaultyProxy, Remote, WebServer

pytestmark = pytest.mark.filterwarnings("ignore:Support for Awkward Arrays")

DATA = Path(__file__).parent.parent / "data"


@dataclass(frozen=True)
class Bucket:
    """A bucket with the files of a folder: past a proxy that counts, and directly."""

    remote: Remote
    uri: str

    @property
    def options(self) -> dict[str, str]:
        """Storage options that lead through the proxy."""
        return self.remote.options

    @property
    def direct(self) -> dict[str, str]:
        """Storage options past the proxy: TileDB keeps the lock of the interpreter while it reads, so that a proxy in this process hangs."""
        return {**self.remote.options, "aws_endpoint": self.remote.proxy.upstream}

    def options_of(self, name: str) -> dict[str, str]:
        """Return the storage options to read a file with."""
        return self.direct if name.endswith(".cxg") else self.options


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of each format."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("pbmc68k_reduced.h5ad", "lung_C144.h5", "wu2020.h5mu"):
        shutil.copy(DATA / name, folder / name)
    rng = np.random.default_rng(0)
    adata = ad.AnnData(sp.random_array((300, 40), density=0.2, format="csr", dtype=np.float32, rng=rng))
    adata.obsm["X_pca"] = rng.normal(size=(300, 3))
    ra.copy(adata, folder / "small.zarr")
    shutil.make_archive(str(folder / "packed.zarr"), "zip", folder / "small.zarr")
    write_cxg(folder / "small.cxg")
    return folder


@pytest.fixture(scope="module")
def bucket(files: Path) -> Iterator[Bucket]:
    """Start an S3 server in a process of its own, and upload the files."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host, port = probe.getsockname()
    words = [sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(host, port)
        with FaultyProxy(f"http://{host}:{port}") as proxy:
            remote = Remote.make(proxy)
            remote.upload(files)
            yield Bucket(remote, remote.uri)
    finally:
        server.terminate()
        server.wait()


def _wait_for(host: str, port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection((host, port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the S3 server did not start")


@pytest.fixture(autouse=True)
def no_fault_outlives(request: pytest.FixtureRequest) -> Iterator[None]:
    """Take the faults of the proxy away after each test."""
    yield
    if "bucket" in request.fixturenames:
        request.getfixturevalue("bucket").remote.proxy.forget()


FILES = ("pbmc68k_reduced.h5ad", "lung_C144.h5", "wu2020.h5mu", "small.zarr", "small.cxg")


@pytest.mark.parametrize("name", [*FILES, "packed.zarr.zip"])
def test_a_file_in_a_bucket_is_read_as_a_local_one(name: str, files: Path, bucket: Bucket) -> None:
    """`read`, `inspect` and `validate` of every format give what they give of the local file."""
    options = bucket.options_of(name)
    expected, found = ra.read(files / name), ra.read(f"{bucket.uri}/{name}", storage_options=options)
    if isinstance(expected, ad.AnnData):
        assert_equal(found, expected)
    else:
        assert list(found.mod) == list(expected.mod)
        for modality in expected.mod:
            assert_equal(found[modality], expected[modality])
    path = Location(f"{bucket.uri}/{name}", options)
    own = cxg if name.endswith(".cxg") else None
    if name.endswith((".h5", ".loom")):
        for place in (path, files / name):
            with pytest.raises(SourceError, match="the numbered rules are of AnnData and MuData"):
                validate(place, "full")
    else:
        found_problems = (own.validate if own else validate)(path, "full")
        assert found_problems == (own.validate if own else validate)(files / name, "full")
    seen, here = (own.inspect if own else inspect)(path), (own.inspect if own else inspect)(files / name)
    assert (seen.root, seen.n_bytes) == (here.root, here.n_bytes)


def test_wrong_arguments_to_a_copied_file_are_told_in_the_call(bucket: Bucket) -> None:
    """`blocks` of a file that is copied first refuses wrong arguments before the first step, as of any other, and names its address."""
    source = ra.open_source(f"{bucket.uri}/packed.zarr.zip", storage_options=bucket.options)
    with pytest.raises(SourceError, match=r"^Rows 0 to 301"):
        source.blocks(("X",), 10, (0, 301))
    with pytest.raises(NotFoundError, match=rf"^{bucket.uri}/packed\.zarr\.zip has no matrix 'Y'"):
        source.blocks(("Y",), 10)
    assert [block.n_rows for (block,) in source.blocks(("X",), 200)] == [200, 100]
    source.close()


@pytest.mark.parametrize("name", FILES)
def test_a_file_in_a_bucket_is_added_as_a_local_one(name: str, files: Path, bucket: Bucket, tmp_path: Path) -> None:
    """Both adds have the same content hash; name and source come from the address."""
    options = bucket.options_of(name)
    atlas = ra.RaggedAtlas.create(str(tmp_path / "a"))
    uri = f"{bucket.uri}/{name}"
    atlas.add(uri, storage_options=options, progress=False)
    with pytest.raises(DuplicateError):
        atlas.add(files / name, progress=False)
    record = atlas.list_datasets().iloc[0]
    assert (record["name"], record["source"]) == (Path(name).stem, uri)


def test_few_requests_open_and_read_a_file(bucket: Bucket) -> None:
    """A small file is opened by one request, and no block of it is fetched twice by an add."""
    proxy = bucket.remote.proxy
    proxy.requests.clear()
    size = (DATA / "pbmc68k_reduced.h5ad").stat().st_size
    ra.read(f"{bucket.uri}/pbmc68k_reduced.h5ad", storage_options=bucket.options)
    assert 1 <= len(proxy.requests) <= -(-size // BLOCK)
    assert {(r.method, r.status) for r in proxy.requests} == {("GET", 206)}
    proxy.requests.clear()
    ra.read(f"{bucket.uri}/lung_C144.h5", storage_options=bucket.options)
    assert len(proxy.requests) == -(-(DATA / "lung_C144.h5").stat().st_size // BLOCK)


@pytest.mark.parametrize("name", ["pbmc68k_reduced.h5ad", "small.zarr", "wu2020.h5mu"])
def test_a_web_server_serves_files(name: str, files: Path) -> None:
    """A file is read by ranges, a Zarr folder through its consolidated metadata; a query of the address is in no record."""
    with WebServer(files) as server:
        source = ra.open_source(f"{server.address}/{name}?signature=secret")
        schema = source.describe()
        assert (schema.name, schema.uri) == (Path(name).stem, f"{server.address}/{name}")
        source.close()
        found, expected = ra.read(f"{server.address}/{name}"), ra.read(files / name)
        if isinstance(expected, ad.AnnData):
            assert_equal(found, expected)
        ranged = [r for r in server.requests if "bytes=" in r]
        assert name.endswith(".zarr") or len(ranged) == len(server.requests)
        assert validate(f"{server.address}/{name}") == validate(files / name)
        assert inspect(f"{server.address}/{name}").root.children


def test_a_long_file_is_read_in_blocks_with_read_ahead(tmp_path: Path) -> None:
    """Chunks, contiguous arrays and text of a file of many blocks are read right, whatever the order of rows."""
    rng = np.random.default_rng(1)
    adata = ad.AnnData(sp.random_array((3_000, 2_000), density=0.25, format="csr", dtype=np.float32, rng=rng))
    adata.layers["dense"] = rng.normal(size=(3_000, 2_000)).astype(np.float32)
    adata.obs_names = [f"cell {i} {'x' * 40}" for i in range(3_000)]
    for name, compression in (("packed.h5ad", "gzip"), ("plain.h5ad", None)):
        ra.copy(adata, ra.open_sink(tmp_path / name, compression=compression))
    with WebServer(tmp_path) as server:
        for name in ("packed.h5ad", "plain.h5ad"):
            size = (tmp_path / name).stat().st_size
            assert size > 8 * BLOCK
            server.requests.clear()
            assert_equal(ra.read(f"{server.address}/{name}"), adata)
            # Every block once, several in one request.
            assert len(server.requests) < size / BLOCK
            source = ra.open_source(f"{server.address}/{name}")
            for start in (2_500, 100, 1_700):
                (block,) = next(iter(source.blocks(("layers/dense",), 50, (start, start + 50))))
                np.testing.assert_array_equal(block.layers["values"], adata.layers["dense"][start : start + 50])
            source.close()


@given(
    starts=st.lists(st.integers(0, 2**20), min_size=1, max_size=3),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50_000)), max_size=60),
    small=st.booleans(),
)
@examples(25)
def test_parts_of_a_file_read_by_turns_are_its_bytes(
    tmp_path_factory: pytest.TempPathFactory, starts: list[int], steps: list[tuple[int, int]], *, small: bool
) -> None:
    """Whatever is read from several places by turns, in blocks of either size."""
    folder = tmp_path_factory.mktemp("x")
    data = np.random.default_rng(0).bytes(2**20 + 12_345)
    (folder / "x").write_bytes(data)
    with WebServer(folder) as server:
        place = Location(f"{server.address}/x")
        file, at = (place.in_small_blocks() if small else place).open(), list(starts)
        for turn, n_bytes in steps:
            number = turn % len(at)
            room = bytearray(n_bytes)
            n = file.read_at(at[number], memoryview(room))
            assert room[:n] == data[at[number] : at[number] + n_bytes]
            at[number] += n


def test_a_file_in_small_blocks_is_read_in_few_requests(tmp_path: Path) -> None:
    """Reads in order fetch growing pieces, each byte once, also where blocks between were read before and two places take turns."""
    (tmp_path / "x").write_bytes(bytes(8 << 20))
    with WebServer(tmp_path) as server:
        file = Location(f"{server.address}/x").in_small_blocks().open()
        assert len(server.requests) == 1
        for offset in range(1 << 20, 8 << 20, 1 << 20):
            file.read_at(offset, memoryview(bytearray(10)))
        assert len(server.requests) == 8
        for offset in range(0, 4 << 20, 4096):
            for start in (0, 4 << 20):
                file.read_at(start + offset, memoryview(bytearray(4096)))
        spans = [request.rpartition("=")[2].split("-") for request in server.requests]
        n_bytes = sum(int(stop) - int(start) + 1 for start, stop in spans)
    assert len(spans) < 40
    assert n_bytes <= (8 << 20) + 8 * SMALL_BLOCK


def test_an_open_remote_file_does_not_crash_the_end_of_a_process(files: Path) -> None:
    """A source that nobody closes is closed before the interpreter ends."""
    with WebServer(files) as server:
        code = f"import raggedatlas as ra; s = ra.open_source({server.address + '/pbmc68k_reduced.h5ad'!r}); print(s.describe().n_cells)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "300"), done.stderr


WRITTEN = ("copy.h5ad", "copy.zarr", "copy.cxg")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_is_written_to_a_bucket(name: str, files: Path, bucket: Bucket) -> None:
    """What was written is read equal; a second write is refused, and replaces it if asked."""
    options, target = bucket.options_of(name), f"{bucket.uri}/{name}"
    assert ra.copy(files / "small.zarr", target, storage_options=options) == target
    expected = ra.read(files / "small.zarr")
    np.testing.assert_array_equal(ra.read(target, storage_options=options).X.toarray(), expected.X.toarray())
    with pytest.raises(DuplicateError, match="overwrite=True"):
        ra.copy(files / "small.zarr", target, storage_options=options)
    some = ra.copy(
        expected[:100].copy(), ra.open_sink(target, storage_options=options, overwrite=True), storage_options=options
    )
    assert ra.read(some, storage_options=options).n_obs == 100


def test_a_multimodal_file_is_written_to_a_bucket(files: Path, bucket: Bucket) -> None:
    """An h5mu that was written to a bucket is read equal, modality by modality."""
    target = ra.copy(files / "wu2020.h5mu", f"{bucket.uri}/copy.h5mu", modality=None, storage_options=bucket.options)
    expected = ra.read(files / "wu2020.h5mu", modality=None)
    result = ra.read(target, modality=None, storage_options=bucket.options)
    assert list(result.mod) == list(expected.mod)
    assert_equal(result.obs, expected.obs)
    for modality in expected.mod:
        assert_equal(result[modality], expected[modality])


@pytest.mark.parametrize("name", WRITTEN[:2])
def test_an_upload_that_fails_leaves_nothing_visible(name: str, files: Path, bucket: Bucket) -> None:
    """After a refused write there is no object below the target, and no local spool is left."""
    target = f"{bucket.uri}/failed-{name}"
    bucket.remote.proxy.refuse("PUT", 403, "AccessDenied")
    with pytest.raises(StoreError, match="refuses access"):
        ra.copy(files / "small.zarr", target, storage_options=bucket.options)
    bucket.remote.proxy.forget()
    assert not Location(target, bucket.options).exists()


def test_a_folder_is_visible_only_when_it_is_complete(files: Path, bucket: Bucket) -> None:
    """The root metadata of a Zarr folder are uploaded after all other objects."""
    proxy = bucket.remote.proxy
    proxy.requests.clear()
    ra.copy(files / "small.zarr", f"{bucket.uri}/order.zarr", storage_options=bucket.options)
    put = [r.path for r in proxy.requests if r.method == "PUT"]
    assert len(put) > 10
    assert put[-1].endswith("order.zarr/zarr.json")


def test_a_folder_takes_the_place_of_a_file(bucket: Bucket, tmp_path: Path) -> None:
    """A folder that is uploaded over a file is what is read afterwards."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "zarr.json").write_text("{}")
    (tmp_path / "old").write_text("old")
    target = Location(f"{bucket.uri}/once-a-file", bucket.options)
    upload(tmp_path / "old", target)
    upload(tmp_path / "new", target)
    with local_copy(Location(target.uri, bucket.options)) as copied:
        assert [path.name for path in copied.iterdir()] == ["zarr.json"]


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_a_server_that_never_answers_is_given_up(scheme: str, tmp_path: Path) -> None:
    """A server that accepts connections and stays silent ends after `timeout` and a few retries, in one line; the atlas is as it was."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "a"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        uri = f"http://{address}/x.h5ad" if scheme == "http" else "s3://bucket/x.h5ad"
        options = {
            "aws_endpoint": f"http://{address}",
            "aws_region": "us-east-1",
            "allow_http": "true",
            "timeout": "100ms",
        }
        options |= {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
        began = time.monotonic()
        with pytest.raises(StoreError) as caught:
            atlas.add(uri, storage_options=options, progress=False)
    assert time.monotonic() - began < 20
    text = str(caught.value)
    assert uri in text
    assert f"no answer from {address}" in text
    assert "\n" not in text
    assert len(atlas.list_datasets()) == 0


def _no_ranges(server: WebServer) -> None:
    server.ranges = False


def _cut(server: WebServer) -> None:
    server.sent = 1000


WEB_FAULTS: dict[str, tuple[Callable[[WebServer], None], str]] = {
    "no ranges": (_no_ranges, "does not serve parts of a file"),
    "bodies that end early": (_cut, "big.h5ad"),
}


@pytest.mark.parametrize("fault", WEB_FAULTS)
def test_a_web_server_that_fails_is_named_in_one_line(fault: str, files: Path, tmp_path: Path) -> None:
    """A server without ranges, or whose answers are cut, is named; nothing is written."""
    shutil.copy(files / "pbmc68k_reduced.h5ad", tmp_path / "big.h5ad")
    with WebServer(tmp_path) as server:
        prepare, words = WEB_FAULTS[fault]
        prepare(server)
        with pytest.raises(StoreError, match=words) as caught:
            ra.copy(f"{server.address}/big.h5ad", tmp_path / "copy.h5ad")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "copy.h5ad").exists()


@pytest.mark.parametrize("kept", [0, 100, 200_000, 1_100_000])
def test_a_truncated_remote_file_is_refused(kept: int, files: Path, tmp_path: Path) -> None:
    """A file that was cut short in the store is refused as the local one is, whatever is left of it."""
    data = (files / "pbmc68k_reduced.h5ad").read_bytes()
    assert len(data) > kept
    (tmp_path / "cut.h5ad").write_bytes(data[:kept])
    atlas = ra.RaggedAtlas.create(str(tmp_path / "a"))
    with WebServer(tmp_path) as server, pytest.raises((SourceError, StoreError), match=r"cut\.h5ad") as caught:
        atlas.add(f"{server.address}/cut.h5ad", progress=False)
    assert "\n" not in str(caught.value)
    assert len(atlas.list_datasets()) == 0


def test_a_file_that_is_replaced_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """Blocks of two versions of a file are never mixed."""
    values = np.random.default_rng(0).normal(size=(4 * BLOCK // 1_000, 250)).astype(np.float32)
    ra.copy(ad.AnnData(values), ra.open_sink(tmp_path / "a.h5ad", compression=None))
    with WebServer(tmp_path) as server:
        source = ra.open_source(f"{server.address}/a.h5ad")
        (tmp_path / "a.h5ad").write_bytes((tmp_path / "a.h5ad").read_bytes() + b"more")
        keys = tuple(info.key for info in source.describe().matrices)
        with pytest.raises(StoreError, match="replaced while it was read"):
            list(source.blocks(keys, 100))
        source.close()


REFUSED = {
    "a target on a web server": (lambda address: ra.open_sink(f"{address}/x.h5ad"), "nothing can be written"),
    "a zip file that is not there": (lambda address: ra.open_source(f"{address}/x.zarr.zip"), "check the address"),
    "a folder that cannot be listed": (lambda address: ra.open_source(f"{address}/small.cxg"), "Check the address"),
    "an unknown scheme": (lambda _: ra.open_source("ftp://host/x.h5ad"), "scheme"),
    "no account of Azure": (lambda _: ra.open_source("az://b/x.h5ad"), "azure_storage_account_name"),
    "an atlas without an account of Azure": (lambda _: ra.RaggedAtlas.create("az://b/x"), "azure_storage_account_name"),
    "no service account of Google": (
        lambda _: ra.open_source("gs://b/x.h5ad", storage_options={"google_service_account": "/none.json"}), "google_service_account"),
    "an unknown option": (lambda _: ra.open_source("s3://b/x.h5ad", storage_options={"key": "x"}), "Unknown storage option"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_addresses_that_cannot_be_used_are_refused(case: str, files: Path) -> None:
    """Each is named with what can be used instead."""
    call, words = REFUSED[case]
    with WebServer(files) as server, pytest.raises((SourceError, StoreError, NotFoundError), match=words):
        call(server.address)


def test_the_commands_take_addresses(files: Path, bucket: Bucket, tmp_path: Path) -> None:
    """``add``, ``validate``, ``inspect`` and ``convert`` read and write an object store with ``--storage-option``."""
    options = [word for key, value in bucket.options.items() for word in ("--storage-option", f"{key}={value}")]
    uri = f"{bucket.uri}/pbmc68k_reduced.h5ad"
    atlas, runner = str(tmp_path / "a"), CliRunner()

    def call(*words: Any) -> str:
        result = runner.invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, (words, result.output)
        return result.output

    call("create", atlas)
    assert "pbmc68k_reduced" in call("add", atlas, uri, *options)
    assert "pbmc68k_reduced.h5ad" in call("inspect", uri, "--depth", "1", *options)
    assert call("validate", uri, *options) == call("validate", files / "pbmc68k_reduced.h5ad")
    call("convert", uri, f"{bucket.uri}/command.zarr", "-l", "X", *options)
    call("convert", f"{bucket.uri}/command.zarr", tmp_path / "back.h5ad", *options)
    assert ra.read(tmp_path / "back.h5ad").shape == (300, 765)
