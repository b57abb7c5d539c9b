"""A published atlas: written once, opened by its address, read politely, verified, cloned; and servers and folders that are not what they should be."""

import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import pickle
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from urllib.error import HTTPError
from urllib.request import Request as WebRequest
from urllib.request import urlopen

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.command import ask as call
from tests.command import done, refused

import raggedatlas as ra
from raggedatlas.catalog import mirror, published, publishing
from raggedatlas.errors import (
    ArgumentError,
    AtlasError,
    CorruptError,
    LimitError,
    NotFoundError,
    ReadOnlyError,
    SourceError,
    StaleSourceError,
    StoreError,
)  # fmt: skip
from raggedatlas.store import gateway, web
from raggedatlas.store.location import Location
from raggedatlas.store.published import (
    HEAD,
    Head,
    KeptBlocks,
    PackedFile,
    PublishedFiles,
    StoredFolder,
    parse_index,
    plan_packs,
    write_index,
)
from raggedatlas.store.shards import cheap_gap
from raggedatlas.store.web import WebFolder
from support.atlases import write_results
from support.object_store import Remote, WebServer, count_in_sequence
from support.processes import started
from support.spatial import make_slide

N_DATASETS, N_CELLS = 4, 60


def make_file(k: int, n_cells: int = N_CELLS) -> ad.AnnData:
    rng = np.random.default_rng(k)
    x = sp.random(n_cells, 50, 0.2, format="csr", random_state=k)
    x.data = np.ceil(x.data * 9).astype(np.float32)
    obs = pd.DataFrame(
        {"cell_type": rng.choice(["T", "B"], n_cells), "donor": f"d{k}"}, index=[f"c{k}_{i}" for i in range(n_cells)]
    )
    made = ad.AnnData(x, obs=obs, var=pd.DataFrame(index=[f"G{j + 10 * k}" for j in range(50)]))
    made.obsm["X_umap"] = rng.random((n_cells, 2), dtype=np.float32)
    if k % 2:
        made.uns["license"] = "CC-BY-4.0"
    return made


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> ra.RaggedAtlas:
    """An atlas of four datasets with one snapshot, ``v1``."""
    atlas = ra.RaggedAtlas.create(tmp_path_factory.mktemp("original") / "lung.atlas")
    atlas.add([make_file(k) for k in range(N_DATASETS)])
    atlas.snapshot("v1")
    return atlas


@pytest.fixture(scope="module")
def folder(original: ra.RaggedAtlas, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, published; not to be changed."""
    made = tmp_path_factory.mktemp("published") / "lung.atlas"
    original.publish(made, "v1", license="CC0-1.0", readme="About *lungs*.", citation="Doe 2026.")
    return made


@pytest.fixture
def server(folder: Path) -> Iterator[WebServer]:
    with WebServer(folder) as running:
        yield running


@pytest.fixture
def changed(folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(folder, tmp_path / "changed"))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Requests are repeated at once; returns how long would have been waited."""
    waited: list[float] = []
    made = WebFolder.of

    def of(address: str, *, any_redirect: bool = False) -> WebFolder:
        folder = made(address, any_redirect=any_redirect)
        object.__setattr__(folder, "sleep", waited.append)
        return folder

    monkeypatch.setattr(WebFolder, "of", of)
    return waited


def ask(view: ra.AtlasView) -> ad.AnnData:
    return view.query().where(cell_type="T").features(["G30", "G31"]).to_anndata()


def assert_equal(one: ra.AtlasView, other: ra.AtlasView) -> None:
    assert one.record.root_hash == other.record.root_hash
    found, expected = ask(one), ask(other)
    pd.testing.assert_frame_equal(found.obs, expected.obs)
    pd.testing.assert_frame_equal(found.var, expected.var)
    np.testing.assert_array_equal(found.X.toarray(), expected.X.toarray())
    np.testing.assert_array_equal(found.varm["measured"], expected.varm["measured"])
    np.testing.assert_array_equal(found.obsm["X_umap"], expected.obsm["X_umap"])
    assert one.list_datasets().equals(other.list_datasets())


# What is there


def test_reads_the_same_from_a_folder_and_from_a_web_server(
    original: ra.RaggedAtlas, folder: Path, server: WebServer
) -> None:
    expected = original.checkout("v1")
    for address in (folder, f"{folder}@v1", f"{folder}@1", server.address, f"{server.address}/@v1"):
        assert_equal(ra.open(address), expected)
    view = ra.open(server.address)
    assert view.verify().sound
    back = view.dataset("anndata-2").to_anndata()
    assert back.uns["license"] == "CC-BY-4.0"
    np.testing.assert_array_equal(back.X.toarray(), make_file(1).X.toarray())
    assert [record.label for record in view.list_versions()] == ["v1"]


def test_commands_take_addresses(folder: Path, server: WebServer, tmp_path: Path) -> None:
    for address in (str(folder), f"{server.address}@v1"):
        for words in (
            ["info"], ["ls"], ["versions"], ["verify"], ["query", "cell_type = 'T'"], ["checkout", "v1"], ["validate"],
            ["sql", "SELECT count(*) AS n FROM cells"],
            ["export", str(tmp_path / f"{len(address)}.h5ad")],
        ):  # fmt: skip
            done(words[0], address, *words[1:])
        # It is opened as an atlas, and not taken for a file.
        assert "has no embedding to show" in call("visualize", address, "--output", tmp_path / "x.html").output
        assert call("drop", address, "anndata").exit_code == 1
    done("clone", f"{server.address}@v1", tmp_path / "mine", "--dataset", "anndata-2")
    assert len(ra.RaggedAtlas.open(tmp_path / "mine").list_datasets()) == 1


def test_opens_an_atlas_of_ones_own_too(original: ra.RaggedAtlas) -> None:
    assert ra.open(original.uri).version == ra.open(f"{original.uri}@v1").version == 1
    with pytest.raises(ArgumentError, match="published atlases"):
        ra.open(original.uri, cache="1 GB")
    with pytest.raises(NotFoundError, match="'v9'"):
        ra.open(f"{original.uri}@v9")


def test_opening_and_a_first_query_take_few_requests_and_no_listing(server: WebServer) -> None:
    server.latency = 0.02
    view = ra.open(server.address)
    assert len(server.requests) <= 6
    ask(view)
    assert len(server.requests) <= 30
    assert count_in_sequence(server.answered) <= 9
    assert all(re.fullmatch(r"GET /(head\.json|index-\w+\.tsv\.zst|data-\w+\.pack) .*", one) for one in server.requests)


def test_an_epoch_gives_every_cell_and_fetches_little_more(server: WebServer, folder: Path) -> None:
    loader = ra.Loader(ra.open(server.address).query(), batch_size=16, shuffle="full", seed=1)
    assert sum(len(batch) for batch in loader) == N_DATASETS * N_CELLS
    assert sum(one.n_bytes for one in server.answered) <= 1.3 * sum(file.stat().st_size for file in folder.iterdir())


def read_elsewhere(pickled: bytes, sent: Any) -> None:
    view = pickle.loads(pickled)
    sent.put(ask(view).X.toarray())


def test_other_processes_read_through_the_one_that_opened_it(server: WebServer) -> None:
    view = ra.open(server.address)
    expected = ask(view).X.toarray()
    n_before = len(server.requests)
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    process = spawn.Process(target=read_elsewhere, args=(pickle.dumps(view), queue))
    process.start()
    np.testing.assert_array_equal(queue.get(timeout=120), expected)
    process.join()
    assert len(server.requests) == n_before


def test_a_process_without_the_one_that_opened_it_opens_it_anew(server: WebServer) -> None:
    view = ra.open(server.address)
    expected = ask(view).X.toarray()
    other: ra.AtlasView = pickle.loads(pickle.dumps(view))
    gateway: Any = other._opened.location.server
    gateway._port = 1
    np.testing.assert_array_equal(ask(other).X.toarray(), expected)


def test_a_process_that_opens_it_anew_compares_with_the_root_hash_too(changed: Path) -> None:
    view = ra.open(f"{changed}@sha256:{ra.open(changed).record.root_hash}")
    other: ra.AtlasView = pickle.loads(pickle.dumps(view))
    gateway: Any = other._opened.location.server
    gateway._port = 1
    head = Head.parse((changed / HEAD).read_bytes(), "x")
    places = parse_index((changed / head.index).read_bytes(), head, "x")
    # Another file, in an index that agrees with it.
    path = next(one for one in places if one.startswith("zarr_store/") and not one.endswith("zarr.json"))
    place = places[path]
    pack = bytearray((changed / place.pack).read_bytes())
    pack[place.offset] ^= 1
    sha256 = hashlib.sha256(pack[place.offset : place.offset + place.n_bytes]).hexdigest()
    republish(changed, head, {**places, path: place._replace(sha256=sha256)}, {place.pack: bytes(pack)})
    with pytest.raises(CorruptError, match="is not the file that the root hash"):
        other.query().to_anndata()


def test_members_of_a_published_atlas_are_read_through_its_gateway(server: WebServer) -> None:
    place = ra.open(server.address)._opened.location
    arrays = place / "zarr_store"
    key = next(key for key, _ in arrays.below())
    assert (arrays / key).read_bytes() == place.child("zarr_store").read_bytes(key)
    assert (place.child("zarr_store").parent / "zarr_store" / key).is_file()
    assert place.parent == place


def test_the_gateway_answers_nobody_who_does_not_know_its_bucket(server: WebServer) -> None:
    view = ra.open(server.address)
    gateway: Any = view._opened.location.server
    for path in ("", "/", "/x/head.json", f"/{gateway.bucket[:-1]}/lance_db"):
        with pytest.raises(OSError, match="403"):
            urlopen(f"{gateway.endpoint}{path}")
    with pytest.raises(OSError, match="403"):
        urlopen(WebRequest(f"{gateway.endpoint}/{gateway.bucket}/x", data=b"1", method="PUT"))
    with pytest.raises(OSError, match="404"):
        urlopen(f"{gateway.endpoint}/{gateway.bucket}/../../etc/passwd")


FORK = """
import gc, os, time
from raggedatlas.store.gateway import Gateway
gateway = Gateway("x", lambda: None)
gateway.endpoint
child = os.fork()
if child:
    os.waitpid(child, 0)
else:
    del gateway
    gc.collect()
    time.sleep(0.1)
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_says_nothing_when_it_drops_a_gateway() -> None:
    """From Python 3.13 on, a thread that was made before a fork does not start after it."""
    with started([sys.executable, "-W", "ignore", "-c", FORK]) as process:
        assert process.communicate(timeout=60)[1] == ""


def test_the_server_ends_with_the_last_view(server: WebServer) -> None:
    view = ra.open(server.address)
    ask(view)
    gateway: Any = view._opened.location.server
    endpoint = gateway.endpoint
    del view, gateway
    gc.collect()
    for _ in range(100):
        try:
            urlopen(endpoint, timeout=2)
        except HTTPError:
            time.sleep(0.1)
        except OSError:
            return
    pytest.fail("the gateway still answers")


def test_a_proxy_is_asked_unless_the_host_is_exempt(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WebServer(tmp_path) as proxy:
        monkeypatch.setenv("http_proxy", proxy.address)
        monkeypatch.setenv("no_proxy", "")
        with pytest.raises(NotFoundError):
            ra.open("http://lab.example/lung.atlas")
        assert proxy.requests[0].split()[1] == "http://lab.example/lung.atlas/head.json"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert ra.open(server.address).version == 1


def test_a_published_atlas_is_not_verified_in_part(folder: Path) -> None:
    """What an earlier call found sound cannot be skipped: the tags of members are those of the index, whatever became of the packs."""
    with pytest.raises(ArgumentError, match="incremental=True has no effect for a published atlas"):
        ra.open(folder).verify(incremental=True)
    assert "--incremental has no effect" in refused("verify", folder, "--incremental")


def test_nothing_is_written_into_a_published_atlas(folder: Path, server: WebServer) -> None:
    with pytest.raises(ReadOnlyError, match="clone"):
        ra.RaggedAtlas.open(folder)
    with pytest.raises(StoreError, match=r"raggedatlas\.open"):
        ra.RaggedAtlas.open(server.address)
    with pytest.raises(ReadOnlyError):
        ra.open(folder).add  # noqa: B018  (the attribute is refused)


def test_shapes_results_annotations_and_deletions_are_published_and_cloned(tmp_path: Path) -> None:
    slide = make_slide()
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    atlas.add(slide.data, "slide", organism="human")
    atlas.add(slide.outlines, link="segment_id", space="segmentation_boundary")
    atlas.add(slide.transcripts, link="segment_id", space="transcripts", cells="cell_id")
    uids = atlas.checkout(atlas.snapshot()).query().to_pandas().index.to_numpy(dtype=object)
    values = np.arange(2 * len(uids), dtype=np.float32).reshape(-1, 2)
    atlas.add(ra.ResultDataset({}, write_results(tmp_path / "z", uids, values, model="m")), "emb")
    atlas.annotate({"uid": uids, "label": [f"l{i % 3}" for i in range(len(uids))]}, "label")
    atlas.delete_cells("label = 'l2'")
    atlas.optimize()
    atlas.snapshot("v")
    atlas.publish(tmp_path / "x")
    expected = atlas.checkout("v")
    root = expected.record.root_hash

    def find(view: ra.AtlasView) -> ra.Query:
        return view.query().within((20, 30, 70, 60), "segmentation_boundary", by="exact").with_results("emb")

    mirrored = tmp_path / "mirror"
    atlas.sync(mirrored)
    copies = [ra.clone(tmp_path / "x", tmp_path / "c.atlas").uri, str(mirrored)]
    for address in (tmp_path / "x", f"{tmp_path / 'x'}@sha256:{root}", *(f"{one}@v" for one in copies)):
        view = ra.open(address)
        found, wanted = find(view), find(expected)
        pd.testing.assert_frame_equal(found.to_anndata().obs, wanted.to_anndata().obs)
        np.testing.assert_array_equal(found.to_anndata().obsm["emb"], wanted.to_anndata().obsm["emb"])
        one, other = found.geometry("transcripts"), wanted.geometry("transcripts")
        np.testing.assert_array_equal(one.positions, other.positions)
        assert view.verify().sound
    part = ra.clone(tmp_path / "x", tmp_path / "part.atlas", where="label = 'l0'").checkout("latest")
    assert part.query().count() == 20
    assert part.validate("deep").sound


# Publishing


def test_publishing_again_writes_nothing_and_another_snapshot_what_is_new(tmp_path: Path) -> None:
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    atlas.add(make_file(0, 2000))
    atlas.snapshot("v1")
    target = tmp_path / "published"
    assert "2 pack(s)" in str(atlas.publish(target, dry_run=True))
    assert not target.exists()
    atlas.publish(target)
    before = {file.name: file.stat().st_mtime_ns for file in target.iterdir() if file.suffix == ".pack"}
    assert "0 pack(s) written" in str(atlas.publish(target))
    assert before == {file.name: file.stat().st_mtime_ns for file in target.iterdir() if file.suffix == ".pack"}
    atlas.add(make_file(1))
    atlas.snapshot("v2")
    atlas.publish(target, keep=["v1"])
    head = json.loads((target / HEAD).read_bytes())
    kept = before.keys() & head["packs"].keys()
    assert sum((target / name).stat().st_size for name in kept) > 10_000
    for label in ("v1", "v2"):
        assert_equal(ra.open(f"{target}@{label}"), atlas.checkout(label)) if label == "v2" else None
        assert ra.open(f"{target}@{label}").query().count() == atlas.checkout(label).query().count()
        assert ra.open(f"{target}@{label}").verify().sound
    # Without `keep` the earlier one cannot be opened any more; its files stay for those who have it open.
    atlas.publish(target)
    with pytest.raises(NotFoundError, match="published are 2"):
        ra.open(f"{target}@v1")
    for file in target.iterdir():
        os.utime(file, (0, 0))
    atlas.publish(target)
    head = json.loads((target / HEAD).read_bytes())
    assert {file.name for file in target.iterdir() if file.suffix in {".pack", ".zst"}} == {
        *head["packs"],
        head["index"],
    }


def test_a_call_that_died_is_taken_up_again(
    original: ra.RaggedAtlas, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_writes, written = 0, list[str]()
    target = tmp_path / "published"
    while True:
        written.clear()
        n_writes += 1
        put = published.Location.write_bytes

        def dying(self: Any, key: str, *args: Any, put: Callable[..., bool] = put, **kwargs: Any) -> bool:
            if str(target) in self.uri:
                written.append(key)
                if len(written) == n_writes:  # noqa: B023 - it is called within the pass of the loop
                    raise KeyboardInterrupt
            return put(self, key, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(published.Location, "write_bytes", dying)
            try:
                original.publish(target)
                break
            except KeyboardInterrupt:
                with pytest.raises(AtlasError):
                    ra.open(target)
    assert n_writes > 4
    assert_equal(ra.open(target), original.checkout("v1"))
    assert not (target / mirror.PARTIAL).exists()


def test_licences_are_those_of_files_and_people(original: ra.RaggedAtlas, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"2 dataset\(s\).*anndata, anndata-3.*set_license"):
        original.publish(tmp_path / "x", require_license=True)
    assert not (tmp_path / "x").exists()
    atlas = ra.RaggedAtlas.create(tmp_path / "b.atlas")
    atlas.add(make_file(0), license="CC0-1.0", name="a")
    atlas.add(make_file(2), name="b")
    atlas.set_license("b", "ODbL-1.0")
    atlas.snapshot()
    atlas.publish(tmp_path / "x", require_license=True)
    card = (tmp_path / "x" / "README.md").read_text()
    assert "| a | 60 | gene\\_expression | CC0-1.0 |" in card
    assert "| b | 60 | gene\\_expression | ODbL-1.0 |" in card
    with pytest.raises(NotFoundError):
        atlas.set_license("c", "CC0-1.0")


def test_the_card_says_what_is_there_and_escapes_names(tmp_path: Path) -> None:
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    name = "a|b <script>alert(1) [x](javascript:1) `c`"
    atlas.add(make_file(1), name=name)
    atlas.snapshot('v"1')
    (tmp_path / "about.md").write_text("# From a file")
    atlas.publish(tmp_path / "x", readme=tmp_path / "about.md", citation='Doe: "Lungs"\n2026')
    card = (tmp_path / "x" / "README.md").read_text()
    row = next(line for line in card.splitlines() if line.startswith("| a"))
    assert "<script>" not in card
    assert "](javascript" not in row
    assert row.count("|") - row.count("\\|") == 5
    assert "# From a file" in card
    assert "1 datasets" in card
    assert "60 cells" in card
    citation = (tmp_path / "x" / "CITATION.cff").read_text()
    import yaml

    assert yaml.safe_load(citation)["message"] == 'Doe: "Lungs"\n2026'
    assert yaml.safe_load(card.split("---")[1])["tags"] == ["single-cell", "raggedatlas"]
    for line in (tmp_path / "x" / "checksums.sha256").read_text().splitlines():
        sha256, file = line.split("  ")
        assert hashlib.sha256((tmp_path / "x" / file).read_bytes()).hexdigest() == sha256
    # What others wrote stays.
    (tmp_path / "x" / "README.md").write_text("mine")
    assert "stays as it is" in str(atlas.publish(tmp_path / "x"))
    assert (tmp_path / "x" / "README.md").read_text() == "mine"


def test_refuses_places_that_hold_something_else(original: ra.RaggedAtlas, folder: Path, tmp_path: Path) -> None:
    other = ra.RaggedAtlas.create(tmp_path / "other.atlas")
    other.add(make_file(9))
    other.snapshot()
    with pytest.raises(StoreError, match="no snapshot in common"):
        other.publish(folder)
    with pytest.raises(StoreError, match="is an atlas"):
        other.publish(original.uri)
    with pytest.raises(StoreError, match="within the other"):
        other.publish(tmp_path / "other.atlas" / "published")
    with pytest.raises(NotFoundError, match="v7"):
        other.publish(tmp_path / "x", "v7")
    with pytest.raises(StoreError, match="There is no file"):
        other.publish(tmp_path / "y", readme=tmp_path / "none.md")


def test_refuses_linked_datasets(tmp_path: Path) -> None:
    make_file(1, 3000).write_h5ad(tmp_path / "a.h5ad")
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    atlas.add(tmp_path / "a.h5ad", copy=False)
    atlas.snapshot()
    with pytest.raises(StoreError, match="materialize"):
        atlas.publish(tmp_path / "x")


def test_a_published_atlas_leads_to_no_other_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was made to."""
    make_file(1, 3000).write_h5ad(tmp_path / "a.h5ad")
    with WebServer(tmp_path, stamps=True) as elsewhere:
        atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
        atlas.add(f"{elsewhere.address}/a.h5ad", copy=False)
        atlas.snapshot()
        monkeypatch.setattr(publishing, "read_links", lambda record: {})
        atlas.publish(tmp_path / "x")
        elsewhere.requests.clear()
        view = ra.open(tmp_path / "x")
        assert view.query().count() == 3000
        with pytest.raises(StoreError, match="sources"):
            view.query().to_anndata()
        assert not elsewhere.requests
        assert ra.open(tmp_path / "x", sources="allow").query().to_anndata().n_obs == 3000


def test_a_public_bucket_is_read_without_credentials(folder: Path) -> None:
    with bucket_of(folder) as (address, options):
        view = ra.open(f"{address}@v1", anonymous=True, storage_options=options)
        assert_equal(view, ra.open(folder))
        with pytest.raises(NotFoundError, match="v3"):
            ra.open(f"{address}@v3", anonymous=True, storage_options=options)


@contextlib.contextmanager
def bucket_of(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Serve a folder as a bucket that asks for no signature."""
    with WebServer(folder.parent) as server:
        handler: Any = server._server.RequestHandlerClass
        plain = handler._answer

        def answer(this: Any) -> None:
            assert "Authorization" not in this.headers
            this.path = this.path.removeprefix("/bucket")
            plain(this)

        handler._answer = answer
        server.headers = {"Last-Modified": "Thu, 01 Jan 1970 00:00:00 GMT", "ETag": '"x"'}
        yield (
            f"s3://bucket/{folder.name}",
            {"aws_endpoint": server.address, "aws_region": "us-east-1", "allow_http": "true"},
        )


def test_refuses_to_publish_what_is_damaged(tmp_path: Path) -> None:
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    atlas.add(make_file(1, 3000))
    atlas.snapshot()
    file = max((tmp_path / "a.atlas" / "zarr_store").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="verify"):
        atlas.publish(tmp_path / "x")
    assert not (tmp_path / "x" / HEAD).exists()


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=30), st.integers(1, 60))
def test_every_file_is_in_one_pack(sizes: list[tuple[int, bool]], most: int) -> None:
    files = [(f"f{i}", n, "a" * 64 if known else "") for i, (n, known) in enumerate(sizes)]
    packs = plan_packs(files, most)
    assert [path for paths in packs.values() for path in paths] == [path for path, _, _ in files]
    by_path = {path: n for path, n, _ in files}
    for paths in packs.values():
        assert sum(by_path[path] for path in paths) <= most or sum(by_path[path] > 0 for path in paths) == 1
    assert plan_packs(files, most) == packs


# The root hash


def test_the_root_hash_is_compared_with_everything(original: ra.RaggedAtlas, folder: Path, server: WebServer) -> None:
    root = original.checkout("v1").record.root_hash
    for address in (folder, server.address):
        assert_equal(ra.open(f"{address}@sha256:{root}"), original.checkout("v1"))
    with pytest.raises(NotFoundError, match="root hash"):
        ra.open(f"{folder}@sha256:{'0' * 64}")


@pytest.mark.long
@settings(max_examples=40)
@given(data=st.data())
def test_with_the_root_hash_no_changed_byte_is_read(
    data: st.DataObject, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    view = ra.open(folder)
    expected, root = ask(view), view.record.root_hash
    damaged = Path(shutil.copytree(folder, tmp_path_factory.mktemp("flip") / "x"))
    pack = data.draw(st.sampled_from(sorted(p.name for p in damaged.glob("*.pack"))))
    content = bytearray((damaged / pack).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    (damaged / pack).write_bytes(content)
    try:
        found = ask(ra.open(f"{damaged}@sha256:{root}"))
    except CorruptError:
        return
    finally:
        shutil.rmtree(damaged)
    np.testing.assert_array_equal(found.X.toarray(), expected.X.toarray())
    pd.testing.assert_frame_equal(found.obs, expected.obs)


def test_an_index_that_agrees_with_changed_bytes_is_found_by_the_root_hash(changed: Path) -> None:
    root = ra.open(changed).record.root_hash
    head = Head.parse((changed / HEAD).read_bytes(), "x")
    places = parse_index((changed / head.index).read_bytes(), head, "x")
    path, place = max(
        ((p, q) for p, q in places.items() if p.startswith("zarr_store/")), key=lambda item: item[1].n_bytes
    )
    pack = bytearray((changed / place.pack).read_bytes())
    pack[place.offset + 100] ^= 1
    sha256 = hashlib.sha256(pack[place.offset : place.offset + place.n_bytes]).hexdigest()
    republish(changed, head, {**places, path: place._replace(sha256=sha256)}, {place.pack: bytes(pack)})
    with pytest.raises(CorruptError, match="SHA-256"):
        ra.open(f"{changed}@sha256:{root}")


def republish(folder: Path, head: Head, places: dict[str, PackedFile], packs: dict[str, bytes]) -> None:
    """Write an index and a head that are consistent with changed places and packs."""
    index, n_index = write_index(places)
    name = f"index-{hashlib.sha256(index).hexdigest()[:16]}.tsv.zst"
    (folder / name).write_bytes(index)
    entries = dict(head.packs)
    for pack, data in packs.items():
        (folder / pack).write_bytes(data)
        entries[pack] = type(head.index_entry)(len(data), hashlib.sha256(data).hexdigest())
    entry = type(head.index_entry)(len(index), hashlib.sha256(index).hexdigest())
    change = {"index": name, "index_entry": entry, "index_bytes": n_index, "packs": entries}
    (folder / HEAD).write_bytes(head.model_copy(update=change).to_bytes())


# Folders that lie


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"format": "9"}, AtlasError, "form '9'"),
        ({"atlas_format": "9"}, AtlasError, "format '9'"),
        ({"index": "../index-0123456789abcdef.tsv.zst"}, CorruptError, "no file of a published atlas"),
        ({"index": "https://evil.org/index-0123456789abcdef.tsv.zst"}, CorruptError, "no file of a published atlas"),
        ({"packs": {"http://127.0.0.1/x.pack": [1, "a"]}}, CorruptError, "no file of a published atlas"),
        ({"packs": {}}, CorruptError, "no file of a published atlas"),
        ({"index_entry": [1 << 62, "0" * 64]}, CorruptError, "impossible length"),
        ({"index_entry": [10, "0" * 64]}, AtlasError, "index"),
        ({"index_bytes": 1 << 40}, CorruptError, "impossible length"),
        ({"index_bytes": 10}, CorruptError, "is not the index"),
        ({"index_bytes": 100_000}, CorruptError, "is not the index"),
        ({"snapshots": []}, CorruptError, "published atlas"),
        ({"opening": ["x", 5]}, CorruptError, "no file"),
    ],
)
def test_a_head_that_lies_is_refused(changed: Path, change: dict[str, Any], error: type[Exception], text: str) -> None:
    head = json.loads((changed / HEAD).read_bytes()) | change
    (changed / HEAD).write_text(json.dumps(head))
    with pytest.raises(error, match=re.escape(text)):
        ra.open(changed)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b"<html>not found</html>"])
def test_a_head_that_is_something_else_is_refused(changed: Path, content: bytes) -> None:
    (changed / HEAD).write_bytes(content)
    with pytest.raises(CorruptError, match="not that of a published atlas"):
        ra.open(changed)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("../../etc/passwd", {}),
        ("zarr_store/../x", {}),
        ("lance_db//x", {}),
        ("other/x", {}),
        ("zarr_store/a", {"offset": -1}),
        ("zarr_store/a", {"n_bytes": 1 << 50}),
        ("zarr_store/a", {"offset": 1 << 62, "n_bytes": 1 << 62}),
    ],
)
def test_an_index_that_lies_is_refused(changed: Path, path: str, place: dict[str, int]) -> None:
    head = Head.parse((changed / HEAD).read_bytes(), "x")
    places = parse_index((changed / head.index).read_bytes(), head, "x")
    one = next(iter(places.values()))
    republish(changed, head, {**places, path: one._replace(**place)}, {})
    with pytest.raises(CorruptError, match="index-"):
        ra.open(changed)


@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_index_gives_an_error(
    data: st.DataObject, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    head = Head.parse((folder / HEAD).read_bytes(), "x")
    index = bytearray((folder / head.index).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        index[data.draw(st.integers(0, len(index) - 1))] = data.draw(st.integers(0, 255))
    entry = type(head.index_entry)(len(index), hashlib.sha256(index).hexdigest())
    with contextlib.suppress(CorruptError):
        parse_index(bytes(index), head.model_copy(update={"index_entry": entry}), "x")


def test_a_folder_without_anything_is_said_so(tmp_path: Path, server: WebServer) -> None:
    with pytest.raises(NotFoundError, match=r"head\.json"):
        ra.open(f"{server.address}/nothing")
    with pytest.raises(NotFoundError, match="There is no atlas"):
        ra.open(tmp_path / "nothing")


# Servers that fail


def test_servers_that_cut_fail_and_lie_give_right_values_or_our_errors(
    folder: Path, server: WebServer, no_waiting: list[float]
) -> None:
    expected = ask(ra.open(folder)).X.toarray()
    server.sent = 3000
    with pytest.raises(StoreError, match="of"):
        ask(ra.open(server.address))
    server.sent, server.ranges = None, False
    pack = next(folder.glob("*.pack"))
    with pytest.raises(StoreError, match="HTTP ranges"):
        WebFolder.of(server.address).read_range(pack.name, 10, 20, pack.stat().st_size)
    server.ranges = True
    server.headers = {"Content-Encoding": "gzip"}
    with pytest.raises(StoreError, match="compresses"):
        ask(ra.open(server.address))
    server.headers = {"ETag": '"changes with every answer"'}
    np.testing.assert_array_equal(ask(ra.open(server.address)).X.toarray(), expected)


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("fault", ["busy", "short", "garbled", "reset"])
def test_faults_after_every_nth_request(
    folder: Path, tmp_path: Path, every: int, fault: str, no_waiting: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Faulty(folder) as server:
        server.every, server.fault = every, fault
        expected = ask(ra.open(folder)).X.toarray()
        try:
            found = ask(ra.open(server.address)).X.toarray()
        except AtlasError:
            assert fault == "garbled"
        else:
            np.testing.assert_array_equal(found, expected)
    if fault == "busy":
        assert 7.0 in no_waiting


class Faulty(WebServer):
    """A web server that fails after every n-th request."""

    every, fault, n = 0, "", 0

    def __post_init__(self) -> None:
        super().__post_init__()
        handler: Any = self._server.RequestHandlerClass
        plain, faulty = handler.send, self

        def send(this: Any, status: int, body: bytes, headers: dict[str, str]) -> None:
            faulty.n += 1
            if not faulty.every or faulty.n % faulty.every:
                plain(this, status, body, headers)
            elif faulty.fault == "busy":
                plain(this, 429 if faulty.n % 2 else 503, b"later", {"Retry-After": "7"})
            elif faulty.fault == "short":
                this.sent = len(body) // 2
                plain(this, status, body, headers)
            elif faulty.fault == "garbled":
                plain(this, status, body, {**headers, "Content-Range": "bytes 5-10/11"} if status == 206 else headers)
            else:
                this.close_connection = True

        handler.send = send


class Redirecting(WebServer):
    """A web server that redirects each file to another address."""

    target = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        handler: Any = self._server.RequestHandlerClass
        redirecting = self

        def answer(this: Any) -> None:
            redirecting.requests.append(f"{this.path} {this.headers.get('Authorization', '')}")
            this.send(302, b"", {"Location": redirecting.target + this.path})

        handler._answer = answer


def test_redirects_within_this_machine_and_to_files_are_refused_unless_allowed(folder: Path, server: WebServer) -> None:
    expected = ask(ra.open(folder)).X.toarray()
    with Redirecting(folder) as other:
        other.target = server.address.replace("127.0.0.1", "localhost")
        with pytest.raises(StoreError, match=r"^The server redirects to localhost, .*private network"):
            ra.open(other.address)
        assert len(other.requests) == 1
        assert not server.requests
        np.testing.assert_array_equal(ask(ra.open(other.address, allow_redirects=True)).X.toarray(), expected)
        for target in ("file:///etc/passwd#", "ftp://127.0.0.1", "gopher://x", "http://[x"):
            other.target = target
            with pytest.raises(StoreError, match="no address" if "[" in target else "not followed"):
                ra.open(other.address, allow_redirects=True)
        other.target = other.address
        with pytest.raises(StoreError, match="redirects more than"):
            ra.open(other.address, allow_redirects=True)


def test_redirects_are_resolved_once_and_get_no_login(
    folder: Path, server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = ModuleType("huggingface_hub")
    with Redirecting(folder) as other:
        other.target = server.address.replace("127.0.0.1", "localhost")
        hub.constants = type("constants", (), {"ENDPOINT": other.address})  # type: ignore[attr-defined]
        hub.get_token = lambda: "secret"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        # What the Hub calls a file is below its repository; the server has it at its root.
        handler: Any = other._server.RequestHandlerClass
        prefix = "/datasets/lab/lung/resolve/main"

        def answer(this: Any) -> None:
            other.requests.append(f"{this.path} {this.headers.get('Authorization', '')}")
            assert this.path.startswith(prefix)
            this.send(302, b"", {"Location": other.target + this.path.removeprefix(prefix)})

        handler._answer = answer
        view = ra.open("hf://datasets/lab/lung@v1", allow_redirects=True)
        ask(view)
        n_resolved = len(other.requests)
        list(ra.Loader(view.query(), batch_size=16))
        files = {one.split()[0] for one in other.requests}
        assert n_resolved == len(other.requests) == len(files)
        assert all(one.endswith("Bearer secret") for one in other.requests)
        assert "secret" not in pickle.dumps(view._opened.location.server).decode("latin1")
        with pytest.raises(StoreError, match="no folder of the Hub"):
            ra.open("hf://lung")


def test_the_hub_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"raggedatlas\[hub\]"):
        ra.open("hf://datasets/lab/lung")


def test_a_doi_leads_to_the_newest_version_of_a_record(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tmp_path / "api" / "records"
    (records / "8" / "files").mkdir(parents=True)
    (records / "7").write_text(json.dumps({"id": 8}))
    for file in folder.iterdir():
        (records / "8" / "files" / file.name).mkdir()
        shutil.copy(file, records / "8" / "files" / file.name / "content")
    with WebServer(tmp_path) as server:
        monkeypatch.setattr(web, "ZENODO", server.address)
        assert_equal(ra.open("doi:10.5281/zenodo.7@v1"), ra.open(folder))
        assert ra.open("https://doi.org/10.5281/zenodo.7").query().count() == N_DATASETS * N_CELLS
        for address in ("doi:10.1000/182", "doi:10.5281/zenodo.x"):
            with pytest.raises(StoreError, match="no DOI of Zenodo"):
                ra.open(address)
        (records / "7").write_text("<html>")
        with pytest.raises(CorruptError, match="record"):
            ra.open("doi:10.5281/zenodo.7")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 5.0),
        ("0", 0.0),
        ("9999", web.LONGEST_WAIT),
        ("-3", 0.0),
        ("soon", None),
        ("nan", None),
        (None, None),
        ("Fri, 31 Dec 99999999999999999999 23:59:59 GMT", None),
        ("Fri, 31 Dec 2020 23:59:59 +99999999999999", None),
    ],
)
def test_retry_after_is_respected(text: str | None, seconds: float | None) -> None:
    assert web._retry_after(text) == seconds


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("204 No Content\r\n", "answered 204"), ("206 OK\r\nContent-Length: 3\r\n\r\n{}", "answered 206, not with the file"),
        ("300 OK\r\nContent-Length: 2\r\n\r\n{}", "answered 300"), ("304 OK\r\n", "answered 304"),
        ("416 OK\r\nContent-Length: 2\r\n\r\n{}", "answered 416"),
        ("200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", "compresses"),
        ("200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n{}", "in 6 attempts"),
    ],
)  # fmt: skip
def test_answers_that_are_no_file_are_refused(folder: Path, answer: str, text: str) -> None:
    """Only a complete answer with plain bytes is a file; anything else is our error, which says what was answered."""
    with WebServer(folder) as other:
        handler: Any = other._server.RequestHandlerClass

        def send(this: Any) -> None:
            this.wfile.write(f"HTTP/1.1 {answer}\r\n\r\n".encode())
            this.close_connection = True

        handler._answer = send
        with pytest.raises(StoreError, match=text):
            ra.open(other.address)


@pytest.mark.parametrize("gone", [True, False])
def test_a_redirect_that_leads_nowhere_any_more_is_resolved_again(folder: Path, *, gone: bool) -> None:
    """Where the address that a server redirected to fails, the server is asked again: it may name another."""
    with WebServer(folder) as server, WebServer(folder) as first, Redirecting(folder) as other:
        other.target = first.address
        files = WebFolder.of(other.address, any_redirect=True)
        expected = files.read(HEAD, 1 << 20)
        other.target = server.address
        handler: Any = first._server.RequestHandlerClass
        handler._answer = lambda this: setattr(this, "close_connection", True) if gone else this.send(400, b"", {})
        assert files.read(HEAD, 1 << 20) == expected


def test_a_host_gets_six_requests_at_once(folder: Path) -> None:
    at_once, most, lock = 0, 0, threading.Lock()
    with WebServer(folder, latency=0.05) as server:
        handler: Any = server._server.RequestHandlerClass
        plain = handler._answer

        def answer(this: Any) -> None:
            nonlocal at_once, most
            with lock:
                at_once += 1
                most = max(most, at_once)
            plain(this)
            with lock:
                at_once -= 1

        handler._answer = answer
        there = WebFolder.of(server.address)
        threads = [threading.Thread(target=there.read, args=(HEAD, 1 << 20)) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == web.MOST_PER_HOST


# The cache


def test_what_is_cached_is_read_without_a_connection(folder: Path, tmp_path: Path) -> None:
    options = {"cache_dir": str(tmp_path / "cache")}
    with WebServer(folder) as server:
        view = ra.open(server.address, cache="1 GB", storage_options=options)
        expected = ask(view).X.toarray()
        address = server.address
    view = ra.open(address, offline=True, storage_options=options)
    np.testing.assert_array_equal(ask(view).X.toarray(), expected)
    with pytest.raises(StoreError, match="not in the cache"):
        ra.open(f"{address}/other", offline=True, storage_options=options)
    # A damaged block counts as one that is not held.
    for file in (tmp_path / "cache").rglob("*.block"):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(StoreError, match="not in the cache"):
        ra.open(address, offline=True, storage_options=options)


def test_a_second_process_asks_for_the_head_alone(server: WebServer, tmp_path: Path) -> None:
    options = {"cache_dir": str(tmp_path / "cache"), "cache_size": "1GB"}
    ask(ra.open(server.address, storage_options=options))
    server.requests.clear()
    ask(ra.open(server.address, storage_options=options))
    assert [one.split()[1] for one in server.requests] == [f"/{HEAD}"]


def test_what_one_address_serves_is_not_taken_for_what_another_has(folder: Path, changed: Path, tmp_path: Path) -> None:
    """Who publishes packs under names that another atlas has changes nothing of what is read of that one."""
    options = {"cache_dir": str(tmp_path / "cache"), "cache_size": "1GB"}
    for file in changed.glob("*.pack"):
        file.write_bytes(bytes(file.stat().st_size))
    with WebServer(changed) as hostile, WebServer(folder) as server:
        with pytest.raises(AtlasError):
            ask(ra.open(hostile.address, storage_options=options))
        expected = ask(ra.open(folder)).X.toarray()
        np.testing.assert_array_equal(ask(ra.open(server.address, storage_options=options)).X.toarray(), expected)


# Clones


def test_a_clone_is_an_atlas_that_can_be_written(original: ra.RaggedAtlas, server: WebServer, tmp_path: Path) -> None:
    atlas = ra.clone(f"{server.address}@v1", tmp_path / "mine.atlas")
    assert_equal(atlas.checkout("v1"), original.checkout("v1"))
    assert atlas.verify().sound
    atlas.add(make_file(7), name="mine")
    atlas.snapshot("v2")
    assert ra.open(f"{tmp_path}/mine.atlas@v2").query().count() == (N_DATASETS + 1) * N_CELLS
    other = ra.RaggedAtlas.create(tmp_path / "other")
    other.add(make_file(8))
    other.snapshot()
    with pytest.raises(StoreError, match="another atlas"):
        ra.clone(server.address, tmp_path / "other")


@pytest.mark.parametrize("state", ["empty", "added", "clone", "clone with a snapshot", "part"])
def test_a_clone_replaces_no_atlas_of_somebody(folder: Path, tmp_path: Path, state: str) -> None:
    """An atlas without snapshots, or with more than was published, is refused and keeps what it has."""
    target = tmp_path / "mine.atlas"
    if state in {"empty", "added"}:
        mine = ra.RaggedAtlas.create(target)
    else:
        mine = ra.clone(folder, target, datasets=["anndata-3"] if state == "part" else None)
    if state != "empty":
        mine.add(make_file(7), name="mine")
    if state == "part":
        mine.drop_snapshot("latest")
    if state == "clone with a snapshot":
        mine.snapshot("mine")
    versions, names = mine.list_versions(), [*mine.list_datasets()["name"]]
    for datasets in (None, ["anndata"]):
        with pytest.raises(StoreError, match="another atlas"):
            ra.clone(folder, target, datasets=datasets)
    again = ra.RaggedAtlas.open(target)
    assert again.list_versions() == versions
    assert [*again.list_datasets()["name"]] == names
    assert again.validate("deep").sound


def test_many_files_are_planned_in_seconds() -> None:
    """An atlas of hundreds of snapshots has thousands of small files; they are not gone through once for each other file."""
    small = {f"lance_db/t.lance/{i}": 20 for i in range(5_000)}
    large = {f"zarr_store/{i:016x}/c": 10 << 20 for i in range(30_000)}
    files = {path: publishing._NeededFile(Location("."), path, n) for path, n in (small | large).items()}
    start = time.process_time()
    _, packs = publishing._plan(files, {})
    assert time.process_time() - start < 10
    assert sorted(path for paths in packs.values() for path in paths) == sorted(files)


def test_a_part_is_cloned(original: ra.RaggedAtlas, server: WebServer, tmp_path: Path) -> None:
    atlas = ra.clone(server.address, tmp_path / "one", datasets=["anndata-3"])
    assert [*atlas.list_datasets()["name"]] == ["anndata-3"]
    assert atlas.validate("deep").sound
    np.testing.assert_array_equal(atlas.dataset("anndata-3").to_anndata().X.toarray(), make_file(2).X.toarray())
    atlas = ra.clone(server.address, tmp_path / "cells", where={"cell_type": "B", "donor": ["d0", "d1"]})
    view = atlas.checkout("latest")
    expected = original.checkout("v1").query().where(cell_type="B", donor=["d0", "d1"])
    assert view.query().count() == expected.count()
    assert {*view.query().obs(["donor"]).to_pandas()["donor"]} == {"d0", "d1"}
    assert {*view.query().to_pandas().index} == {*expected.to_pandas().index}
    assert atlas.validate("deep").sound
    assert len(atlas.list_versions()) == 1
    with pytest.raises(AtlasError, match="No cell"):
        ra.clone(server.address, tmp_path / "none", where="cell_type = 'T' and cell_type = 'B'")
    with pytest.raises(NotFoundError):
        ra.clone(server.address, tmp_path / "none", datasets=["nobody"])
    assert not (tmp_path / "none").exists()


def test_a_clone_that_died_is_taken_up_again(server: WebServer, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    for n_allowed in range(3, 40):

        def stop(n: int, n_allowed: int = n_allowed) -> None:
            if n >= n_allowed:
                raise ConnectionResetError

        server.requests.clear()
        server.before = stop
        try:
            atlas = ra.clone(server.address, target, where={"cell_type": "B"})
            break
        except AtlasError:
            with pytest.raises(AtlasError):
                ra.open(target)
    server.before = None
    assert atlas.verify().sound
    assert atlas.checkout("latest").query().count() == ra.open(server.address).query().where(cell_type="B").count()


def test_a_changed_byte_is_not_cloned(changed: Path, tmp_path: Path) -> None:
    head = Head.parse((changed / HEAD).read_bytes(), "x")
    pack = next(iter(head.packs))
    data = bytearray((changed / pack).read_bytes())
    data[len(data) // 2] ^= 4
    (changed / pack).write_bytes(data)
    with pytest.raises(AtlasError):
        ra.clone(changed, tmp_path / "mine")
    with pytest.raises(AtlasError):
        ra.RaggedAtlas.open(tmp_path / "mine").checkout("v1")


# Links to datasets of a published atlas


def test_datasets_of_a_published_atlas_are_linked_into_ones_own(
    original: ra.RaggedAtlas, changed: Path, tmp_path: Path
) -> None:
    expected = original.checkout("v1").query()
    mine = ra.RaggedAtlas.create(tmp_path / "mine.atlas")
    mine.add(make_file(9), "own")
    with WebServer(changed, stamps=True) as server:
        view = ra.open(server.address)
        report = mine.add(view.dataset("anndata-2"), copy=False)
        assert "linked" in str(report)
        mine.add([view.dataset("anndata-3"), view.dataset("anndata-4")], copy=False)
        mine.add(view.dataset("anndata"), copy=True)
        linked = mine.checkout(mine.snapshot())
        names = ("anndata", "anndata-2", "anndata-3", "anndata-4")
        assert linked.query().count("dataset").to_dict() == dict.fromkeys(["own", *names], N_CELLS)
        for k, name in enumerate(names):
            given, found = make_file(k), linked.dataset(name).to_anndata()
            np.testing.assert_array_equal(found[:, given.var_names].X.toarray(), given.X.toarray())
            pd.testing.assert_frame_equal(found.obs, given.obs)
            np.testing.assert_array_equal(found.obsm["X_umap"], given.obsm["X_umap"])
        ours = linked.query().where("dataset != 'own'").features(["G30", "G42"]).aggregate("dataset").to_df("mean")
        theirs = expected.features(["G30", "G42"]).aggregate("dataset").to_df("mean")
        pd.testing.assert_frame_equal(ours, theirs, check_like=True)
        assert linked.validate("deep").sound
        assert sum(len(batch) for batch in ra.Loader(linked.query(), 32, shuffle="full")) == 5 * N_CELLS
        assert mine.list_datasets()["linked"].str.contains(server.address).sum() == 3
        # Another file at the address of a pack is refused.
        for pack in changed.glob("*.pack"):
            os.utime(pack)
        with pytest.raises(StaleSourceError):
            ra.open(mine.uri).query().where("dataset = 'anndata-2'").to_anndata()


def test_linked_datasets_are_materialized(folder: Path, tmp_path: Path) -> None:
    mine = ra.RaggedAtlas.create(tmp_path / "mine.atlas")
    mine.add(ra.open(folder).dataset("anndata-3"), copy=False)
    mine.materialize()
    assert not mine.list_datasets()["linked"].any()
    found = mine.dataset("anndata-3").to_anndata()
    np.testing.assert_array_equal(found[:, make_file(2).var_names].X.toarray(), make_file(2).X.toarray())
    assert mine.validate("deep").sound


def test_what_cannot_be_linked_is_refused(original: ra.RaggedAtlas, tmp_path: Path) -> None:
    mine = ra.RaggedAtlas.create(tmp_path / "mine.atlas")
    with pytest.raises(SourceError, match="not published"):
        mine.add(original.dataset("anndata"), copy=False)
    other = ra.RaggedAtlas.create(tmp_path / "other.atlas")
    other.add(make_file(0), "a")
    other.delete_cells("cell_type = 'T'")
    other.snapshot()
    other.publish(tmp_path / "x")
    with pytest.raises(SourceError, match="were deleted"):
        mine.add(ra.open(tmp_path / "x").dataset("a"), copy=False)
    assert len(mine.list_datasets()) == 0


def test_reads_of_stored_folders_are_checked(folder: Path) -> None:
    there = StoredFolder(ra.open(folder)._opened.location.__class__(str(folder)))
    with pytest.raises(LimitError, match="more than 10 bytes"):
        there.read(HEAD, 10)
    with pytest.raises(NotFoundError):
        there.read("none.json", 10)


@pytest.mark.parametrize("name", ["load", "keep", "submit"])
def test_nobody_waits_for_a_block_that_was_given_up(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong is raised where the blocks were asked for; who asks again gets them."""

    def fails(*_: object) -> bytes:
        raise MemoryError("no memory")

    for limit in ("BLOCK", "_REQUEST_BYTES"):
        monkeypatch.setattr(f"raggedatlas.store.published.{limit}", 4096)
    files = PublishedFiles(StoredFolder(Location(str(folder))), KeptBlocks(tmp_path, 10**9))
    files._held.entries.clear()
    for kept in tmp_path.glob("*.block"):
        kept.unlink()
    pack = next(iter(files.head.packs))
    with monkeypatch.context() as patched:
        patched.setattr(ThreadPoolExecutor if name == "submit" else KeptBlocks, name, fails)
        with pytest.raises(MemoryError, match="no memory"):
            files._load(pack, range(3))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(files._load, pack, range(3))
        assert b"".join(asked.result(30)) == (folder / pack).read_bytes()[: 3 * 4096]


def test_an_atlas_is_published_into_a_bucket_and_cloned_into_another(
    original: ra.RaggedAtlas, remote: Remote, tmp_path: Path
) -> None:
    target = f"{remote.uri}/published"
    original.publish(target, storage_options=remote.options)
    assert "0 pack(s)" in str(original.publish(target, storage_options=remote.options))
    view = ra.open(f"{target}@v1", storage_options=remote.options)
    assert_equal(view, original.checkout("v1"))
    remote.proxy.fail_every = 3
    assert_equal(ra.open(target, storage_options=remote.options), view)
    remote.proxy.fail_every = 0
    assert ra.clone(target, tmp_path / "mine", storage_options=remote.options).verify().sound


def test_a_damaged_pack_is_published_again(original: ra.RaggedAtlas, changed: Path) -> None:
    pack = max(changed.glob("*.pack"), key=lambda file: file.stat().st_size)
    pack.unlink()
    original.publish(changed)
    assert_equal(ra.open(changed), original.checkout("v1"))
    assert ra.open(changed).verify().sound


def test_an_atlas_without_cells_is_published(tmp_path: Path) -> None:
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    atlas.snapshot("empty")
    atlas.publish(tmp_path / "x")
    assert ra.open(tmp_path / "x").query().count() == 0
    assert ra.clone(tmp_path / "x", tmp_path / "b.atlas").verify().sound


@settings(max_examples=30)
@given(
    st.sets(
        st.lists(st.sampled_from(["a", "b.lance", "0.+1", "ä", "c&d", "x y"]), min_size=1, max_size=3).map("/".join)
    ),
    st.integers(1, 4),
)
def test_listings_are_those_of_the_index(names: set[str], page: int) -> None:
    """By pages of any size, with and without a delimiter."""
    # A file is no folder.
    names = {name for name in names if not any(other.startswith(f"{name}/") for other in names)}
    places = {f"lance_db/{name}": PackedFile("p", 0, len(name), "0" * 64) for name in names}
    server = gateway.Gateway("x", lambda: cast("PublishedFiles", ListedFiles(places)))
    before, gateway._PAGE = gateway._PAGE, page
    try:
        place = Location("x", {}, server).child("lance_db")
        assert {key: size for key, size, _ in place.list_objects()} == {name: len(name) for name in names}
        assert place.list_children() == sorted({name.partition("/")[0] for name in names if "/" in name})
    finally:
        gateway._PAGE = before


def test_threads_that_come_at_once_open_the_files_once() -> None:
    made: list[ListedFiles] = []

    def make() -> PublishedFiles:
        made.append(ListedFiles({}))
        time.sleep(0.05)
        return cast("PublishedFiles", made[-1])

    server = gateway.Gateway("x", make)
    elsewhere = gateway.Gateway.__new__(gateway.Gateway)
    elsewhere.__setstate__(server.__getstate__())
    with ThreadPoolExecutor(4) as pool:
        assert len({id(files) for files in pool.map(lambda _: elsewhere.files, range(4))}) == 1
    assert len(made) == 2


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=12), st.integers(0, 60))
def test_little_is_fetched_that_was_not_asked_for(parts: list[tuple[int, int]], most: int) -> None:
    """Ranges are joined over gaps of any sizes, equal ones too, that together have a fifth of what is asked for at most."""
    gaps, sizes = np.array(parts).T
    starts = np.cumsum(gaps + sizes) - sizes
    gap = cheap_gap(starts, starts + sizes, most)
    assert gap <= most
    between = starts[1:] - (starts + sizes)[:-1]
    assert between[between <= gap].sum() <= 0.2 * sizes.sum()


class ListedFiles:
    """What a gateway asks of the files that it lists."""

    below, merged_gap = PublishedFiles.below, 0

    def __init__(self, places: dict[str, PackedFile]) -> None:
        self.places, self.paths = places, sorted(places)
