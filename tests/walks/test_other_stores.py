"""Files and atlases in the stores of Amazon, Google and Azure; test_s3.py has more of the first.

Google's store is played by `GoogleStorage`. Azure's needs its emulator, the command ``azurite-blob`` of the npm package ``azurite``: on the
path, or named by ``RAGGEDATLAS_AZURITE``; ``scripts/test-stores`` installs it.
"""

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import IO, Any, cast

import anndata as ad
import numpy as np
import pytest
from anndata.tests.helpers import assert_equal

import raggedatlas as ra
from raggedatlas.errors import DuplicateError, NotFoundError, StaleSourceError, StoreError
from raggedatlas.formats.anndata import inspect, validate
from raggedatlas.store.location import Location
from raggedatlas.store.ranges import BLOCK
from raggedatlas.store.runtime import process_cache
from raggedatlas.wings import cxg
from support.atlases import small_anndata
from support.cxg_files import write_cxg
from support.object_store import FaultyProxy, GoogleStorage, Remote, google_options

DATA = Path(__file__).parent.parent / "data"
AZURITE = os.environ.get("RAGGEDATLAS_AZURITE") or shutil.which("azurite-blob")
ACCOUNT, KEY = (
    "devstoreaccount1",
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
)
"""Those of every emulator."""


@dataclass(frozen=True)
class Home:
    """A bucket or container, and how to reach it: well, and with faults."""

    uri: str
    proxy: FaultyProxy
    options: dict[str, str]
    wrong: dict[str, str]
    dead: dict[str, str]


@contextmanager
def google(folder: Path) -> Iterator[Home]:
    """Run Google's store; the file of its service account names the proxy."""

    with GoogleStorage() as server, FaultyProxy(server.address) as proxy:
        server.buckets["cells"] = {}
        right = google_options(folder / "right.json", proxy.address)
        wrong = {**right, "google_service_account": str(folder / "none.json")}
        yield Home("gs://cells", proxy, right, wrong, google_options(folder / "dead.json", "http://127.0.0.1:9"))


SERVE = """
import sys
from support.object_store import GoogleStorage
with GoogleStorage() as server:
    server.buckets["cells"] = {}
    print(server.address, flush=True)
    sys.stdin.read()
"""


@contextmanager
def direct(home: Home, folder: Path) -> Iterator[dict[str, str]]:
    """Give options that lead to a server in another process: TileDB keeps the lock of the interpreter while it reads."""
    if home.uri.startswith("az"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AZURITE_BLOB_STORAGE_URL", home.proxy.upstream)
            yield home.options
        return
    words = [sys.executable, "-c", SERVE]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield google_options(folder / "direct.json", cast("IO[str]", server.stdout).readline().strip())
        server.terminate()


@contextmanager
def azure(folder: Path) -> Iterator[Home]:
    """Run the emulator of Azure's store, and make a container."""
    if AZURITE is None:
        pytest.skip("the emulator of Azure's store is not installed: run scripts/test-stores")
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    words = [AZURITE, "--blobPort", str(port), "--location", str(folder), "--silent", "--skipApiVersionCheck"]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        _make_container(address, "cells")
        options = {"azure_storage_use_emulator": "true", "allow_http": "true"}
        wrong = {**options, "azure_storage_account_key": base64.b64encode(b"wrong").decode()}
        dead = {**options, "timeout": "1s"}
        with FaultyProxy(address) as proxy, pytest.MonkeyPatch.context() as patch:
            patch.setenv("AZURITE_BLOB_STORAGE_URL", proxy.address)
            yield Home("az://cells", proxy, options, wrong, dead)
    finally:
        server.terminate()
        server.wait()


def _make_container(address: str, name: str) -> None:
    """Ask the emulator for a container, as soon as it answers."""
    told = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in told.items())]
    signed = "\n".join([*lines, f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"])
    digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    told["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"{address}/{ACCOUNT}/{name}?restype=container"
    for _ in range(600):
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=told)).close()
        except ConnectionError:
            time.sleep(0.05)
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError):
                raise
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the emulator of Azure's store did not start")


@contextmanager
def amazon(proxy: FaultyProxy) -> Iterator[Home]:
    """Make a bucket of an S3 server."""
    remote = Remote.make(proxy)
    yield Home(
        f"s3://{remote.bucket}", proxy, remote.options, {}, {**remote.options, "aws_endpoint": "http://127.0.0.1:9"}
    )


@pytest.fixture(scope="module", params=["s3", "gs", "az"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    if request.param == "s3":
        made = amazon(request.getfixturevalue("s3_proxy"))
    else:
        made = {"gs": google, "az": azure}[request.param](tmp_path_factory.mktemp(request.param))
    with made as home:
        yield home


@pytest.fixture
def home(running: Home) -> Iterator[Home]:
    """Give the store; no fault outlives the test."""
    running.proxy.forget()
    yield running
    running.proxy.forget()


@pytest.mark.long
@pytest.mark.parametrize("name", ["a.h5ad", "a.zarr", "long.h5ad"])
def test_a_file_is_written_and_read(name: str, home: Home, tmp_path: Path) -> None:
    """What was written is read equal, by ranges and not as a whole; a second write is refused, and an atlas takes the file."""
    if name.startswith("long"):
        values = np.random.default_rng(0).normal(size=(3_000, 1_000)).astype(np.float32)
        adata, sink = ad.AnnData(values), {"compression": None}
    else:
        adata, sink = ra.read(DATA / "pbmc68k_reduced.h5ad"), {}
    target = f"{home.uri}/files/{name}"
    assert ra.copy(adata, ra.open_sink(target, storage_options=home.options, **sink)) == target
    home.proxy.forget()
    assert_equal(ra.read(target, storage_options=home.options), ra.read(ra.copy(adata, tmp_path / name)))
    if name.endswith(".h5ad"):
        assert {(r.method, r.status) for r in home.proxy.requests} == {("GET", 206)}
        assert len(home.proxy.requests) <= max(2, Location(target, home.options).stat().st_size // BLOCK)
    path = Location(target, home.options)
    assert validate(path) == validate(tmp_path / name)
    assert [part.path for part in inspect(path).root.children] == [
        part.path for part in inspect(tmp_path / name).root.children
    ]
    with pytest.raises(DuplicateError, match="overwrite=True"):
        ra.copy(adata, target, storage_options=home.options)
    atlas = ra.RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(target, storage_options=home.options, progress=False)
    assert atlas.list_datasets()[["name", "source"]].iloc[0].tolist() == [Path(name).stem, target]


@pytest.mark.long
@pytest.mark.parametrize(
    "running", ["gs", "az"], indirect=True
)  # test_remote_files.py has S3, by a server in another process
def test_a_cxg_is_written_and_read(home: Home, tmp_path: Path) -> None:
    """TileDB reads there what it reads in a folder, with the same options; an atlas takes it."""
    source = write_cxg(tmp_path / "source.cxg")
    local = ra.copy(source, tmp_path / "small.cxg")
    target = f"{home.uri}/small.cxg"
    with direct(home, tmp_path) as options:
        assert ra.copy(source, target, storage_options=options) == target
        assert_equal(ra.read(target, storage_options=options), ra.read(local))
        assert cxg.validate(Location(target, options)) == cxg.validate(local)
        ra.copy(target, tmp_path / "back.h5ad", storage_options=options)
        atlas = ra.RaggedAtlas.create(str(tmp_path / "atlas"))
        atlas.add(target, storage_options=options, progress=False)
        assert atlas.list_datasets()[["name", "source"]].iloc[0].tolist() == ["small", target]
        with pytest.raises(NotFoundError, match="There is no file or folder"):
            ra.read(f"{home.uri}/none.cxg", storage_options=options)


@pytest.mark.long
def test_an_atlas_lives_there(home: Home, tmp_path: Path) -> None:
    """An atlas is made, added to, pinned, asked and cleared as in a folder, and a query of it is written beside it."""
    results: list[Any] = []
    for uri, options in ((f"{home.uri}/my.atlas", home.options), (str(tmp_path / "my.atlas"), None)):
        atlas = ra.RaggedAtlas.create(uri, storage_options=options)
        for seed in (1, 2):
            atlas.add(small_anndata(seed), f"d{seed}", organism="human")
        atlas.snapshot("both")
        atlas.drop_dataset("d2")
        view = ra.RaggedAtlas.checkout_latest(uri, storage_options=options)
        results.append(view.query().where("n_genes > 3").to_anndata())
        written = view.query().where(dataset="d1").write(f"{uri.removesuffix('my.atlas')}d1.h5ad")
        results.append(ra.read(written, storage_options=options))
        assert [problem for problem in view.validate("deep") if problem.level == "must"] == []
        assert (len(atlas.list_datasets()), len(view.list_datasets())) == (1, 2)
    for remote, local in zip(results[:2], results[2:], strict=True):
        np.testing.assert_array_equal(remote.X.toarray(), local.X.toarray())
        assert remote.obs["cell_name"].tolist() == local.obs["cell_name"].tolist()


FAULTS = {
    "no credentials": ("", "x.h5ad", "service account of Google is missing|refuses access"),
    "refused": ("", "x.h5ad", "refuses access"),
    "dead endpoint": ("", "x.h5ad", "no answer from 127.0.0.1:9"),
    "missing bucket": ("nobody", "x.h5ad", "no such bucket"),
    "missing object": ("", "none.h5ad", "There is no file"),
    "missing folder": ("", "none.zarr", "There is no file or folder"),
}


@pytest.mark.parametrize("by_column", [False, True])
def test_a_file_there_is_linked(home: Home, tmp_path: Path, *, by_column: bool) -> None:
    """Its values are read from there, and none once the file has changed."""
    adata = small_anndata(1, 60)
    adata.X = adata.X.tocsc() if by_column else adata.X
    # The store outlives one test, and a directory of a test may have the name of the one before.
    address = f"{home.uri}/linked-by-{'column' if by_column else 'row'}.h5ad"
    ra.copy(adata, ra.open_sink(address, storage_options=home.options))
    atlas = ra.RaggedAtlas.create(tmp_path / "atlas")
    atlas.add(address, "d", organism="human", copy=False, storage_options=home.options, progress=False)
    view = atlas.checkout(atlas.snapshot())
    found, genes = view.dataset("d").to_anndata(), list(adata.var_names[:2])
    np.testing.assert_array_equal(found.X.toarray(), adata.X.toarray())
    assert view.query().features(genes).to_anndata().X.sum() == adata[:, genes].X.sum()
    assert [problem for problem in atlas.validate("deep") if problem.level == "must"] == []
    ra.copy(small_anndata(2, 60), ra.open_sink(address, overwrite=True, storage_options=home.options))
    # Decoded chunks that the process kept are those of the file as it was.
    process_cache("chunks").entries.clear()
    with pytest.raises(StaleSourceError, match="'d'"):
        view.query().to_anndata()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_fails_is_named_in_one_line(
    fault: str, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault is one line with the address and the reason, and the atlas is as it was."""
    bucket, name, words = FAULTS[fault]
    if fault == "no credentials" and not home.wrong:
        pytest.skip("the S3 server takes any")
    uri = f"{home.uri}{bucket}/{name}"
    options = {"no credentials": home.wrong, "dead endpoint": home.dead}.get(fault, home.options)
    if fault == "refused":
        home.proxy.refuse("GET", 403, "AccessDenied")
    if fault == "dead endpoint":
        monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", "http://127.0.0.1:9")
    atlas = ra.RaggedAtlas.create(str(tmp_path / "atlas"))
    with pytest.raises((StoreError, NotFoundError), match=words) as caught:
        atlas.add(uri, storage_options=options, progress=False)
    assert uri in str(caught.value) or fault == "no credentials"
    assert "\n" not in str(caught.value)
    assert len(atlas.list_datasets()) == 0


@pytest.mark.parametrize("running", ["s3", "gs"], indirect=True)
def test_a_store_without_conditions_is_refused(home: Home) -> None:
    """An atlas is made in no store that ignores create-if-absent. (On Azure the condition is signed, and the proxy cannot take it away.)"""
    home.proxy.ignore_conditions = True
    with pytest.raises(StoreError, match="accepted two create-if-absent writes"):
        ra.RaggedAtlas.create(f"{home.uri}/careless.atlas", storage_options=home.options)
