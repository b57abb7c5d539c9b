"""Datasets linked to files on a web server and in an object store: the values of copies, or an error that names the file, whatever is done to it."""

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
from anndata.tests.helpers import assert_equal

import raggedatlas as ra
from raggedatlas.errors import SourceError, StaleSourceError, StoreError
from raggedatlas.store.runtime import CacheKind, process_cache
from support.atlases import GENES, small_anndata
from support.linked_files import write_file
from support.object_store import FaultyProxy, Remote, WebServer
from support.processes import processes

KINDS = ("gzip.h5ad", "plain.h5ad", "lzf.h5ad", "tiled.h5ad", "v2.zarr", "sharded.zarr")
"""Kinds of files, one of each."""

ASKED = list(GENES[2:7])

Values = dict[str, dict[str, float]]


@dataclass
class Served:
    """Files that a server serves, and what may happen to them.

    Parameters
    ----------
    server : WebServer or FaultyProxy
        Where requests come by.
    base : str
        Address of the folder.
    options : dict of str to str
        Storage options to read with.
    write : callable
        Takes the name of a file and its bytes.
    remove : callable
        Takes the name of a file.
    folder : Path
        The files as they were written first.
    """

    server: WebServer | FaultyProxy
    base: str
    options: dict[str, str]
    write: Callable[[str, bytes], None]
    remove: Callable[[str], None]
    folder: Path

    @property
    def addresses(self) -> list[str]:
        """Addresses of the files and Zarr folders."""
        return [f"{self.base}/{path.name}" for path in sorted(self.folder.iterdir())]

    def sources(self, address: str) -> "bool | dict[str, str]":
        """Answer `sources=` with the storage options."""
        assert address.startswith(self.base)
        return self.options or True

    def mend(self, name: str) -> None:
        """Put a file back as it was, and take all faults of the server away."""
        self.write(name, (self.folder / name).read_bytes())
        if isinstance(self.server, FaultyProxy):
            self.server.forget()
            return
        self.server.before, self.server.ranges, self.server.sent, self.server.ignore_conditions = (
            None,
            True,
            None,
            False,
        )
        # A web server tells files by their times, an object store by their bytes.
        os.utime(self.server.folder / name, ns=(0, (self.folder / name).stat().st_mtime_ns))

    def open(self, atlas: Path) -> ra.RaggedAtlas:
        """Open an atlas as a process that knows nothing of the files does."""
        return ra.RaggedAtlas.open(atlas, sources=self.sources)

    def link(self, atlas: Path) -> "ra.AtlasView":
        """Link all files, and open the atlas anew."""
        made = ra.RaggedAtlas.create(atlas)
        made.add(self.addresses, copy=False, organism="human", storage_options=self.options, progress=False)
        made.snapshot("linked")
        return self.open(atlas).checkout("linked")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of each kind."""
    folder = tmp_path_factory.mktemp("files")
    for seed, kind in enumerate(KINDS):
        write_file(small_anndata(seed, 30 + seed), folder, str(seed), kind)
    return folder


@pytest.fixture(scope="module")
def copied(files: Path, tmp_path_factory: pytest.TempPathFactory) -> "ra.AtlasView":
    """An atlas with copies of the files."""
    atlas = ra.RaggedAtlas.create(tmp_path_factory.mktemp("copied") / "atlas")
    atlas.add(files, organism="human", progress=False)
    return atlas.checkout(atlas.snapshot())


@pytest.fixture(params=["web", "s3"])
def served(files: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Serve the files."""
    if request.param == "web":
        folder = tmp_path / "web"
        shutil.copytree(files, folder)

        def write(name: str, data: bytes) -> None:
            before = (folder / name).stat() if (folder / name).exists() else None
            # A new file, as those that serve files put one: what was opened before stays as it was.
            (folder / "new").write_bytes(data)
            if before is not None:
                os.utime(folder / "new", ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
            (folder / "new").replace(folder / name)

        with WebServer(folder, stamps=True) as server:
            yield Served(server, server.address, {}, write, lambda name: (folder / name).unlink(), files)
        return
    remote: Remote = request.getfixturevalue("remote")
    remote.upload(files)

    def put(name: str, data: bytes) -> None:
        import obstore

        obstore.put(remote._store(), name, data)

    def delete(name: str) -> None:
        import obstore

        obstore.delete(remote._store(), name)

    yield Served(remote.proxy, remote.uri, remote.options, put, delete, files)


@pytest.fixture(autouse=True)
def _requests_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Request each chunk by itself, as those of large files, and keep none of an earlier test."""
    monkeypatch.setattr("raggedatlas.store.linked._MOST_BETWEEN", -1)
    forget()


def forget() -> None:
    """Empty the caches of values, as in a process that has just started."""
    kinds: tuple[CacheKind, ...] = ("chunks", "probed")
    for kind in kinds:
        process_cache(kind).entries.clear()
        process_cache(kind).weight = 0


def values_of(adata: ad.AnnData) -> Values:
    """Return the values by cell and gene."""
    x = adata.X.toarray() if hasattr(adata.X, "toarray") else np.asarray(adata.X)
    genes = adata.var.get("symbol", adata.var_names)
    return {
        str(cell): dict(zip(genes, row.tolist(), strict=True))
        for cell, row in zip(adata.obs["cell_name"], x, strict=True)
    }


def batches_of(loader: ra.Loader) -> Iterator[dict[str, list[float]]]:
    """Yield the values of each batch by cell, columns in the order of the features' uids."""
    order = np.argsort(loader.features["gene_expression"])
    for batch in loader:
        rows = batch.X.toarray()[:, order]
        yield dict(zip(map(str, batch.labels("cell_name")), rows.tolist(), strict=True))


def loaded(loader: ra.Loader) -> dict[str, list[float]]:
    """Return what a loader yields of each cell."""
    return dict(item for batch in batches_of(loader) for item in batch.items())


def loader_of(query: "ra.Query") -> ra.Loader:
    """Return a loader of small batches."""
    return ra.Loader(query, 16, obs=["cell_name"], seed=0)


def test_remote_files_answer_as_copies(served: Served, copied: "ra.AtlasView", tmp_path: Path) -> None:
    """Queries, datasets, loaders and checks; once the values are copied, here or into a mirror, the files are not needed any more."""
    view = served.link(tmp_path / "atlas")

    def compare(mine: "ra.AtlasView") -> None:
        def queries(view: "ra.AtlasView") -> list[ra.Query]:
            all_cells = view.query()
            some = all_cells.where(dataset=["0-gzip", "4-v2"])
            return [all_cells, all_cells.where(cell_type="B"), all_cells.features(ASKED), some.features(ASKED[:1])]

        for found, expected in zip(
            *([query.to_anndata() for query in queries(v)] for v in (mine, copied)), strict=True
        ):
            assert values_of(found) == values_of(expected)
        for name in copied.list_datasets()["name"]:
            found, expected = (v.dataset(name).to_anndata() for v in (mine, copied))
            assert_equal(found, expected)
        assert loaded(loader_of(mine.query())) == loaded(loader_of(copied.query()))

    assert view.list_datasets()["name"].tolist() == copied.list_datasets()["name"].tolist()
    compare(view)
    assert "from the linked files of" in view.query().explain()
    atlas = served.open(tmp_path / "atlas")
    assert list(atlas.validate("deep")) == []
    mirror = f"{served.base}/mirror" if served.options else str(tmp_path / "mirror")
    atlas.sync(mirror, values=True, storage_options=served.options)
    atlas.materialize()
    latest = atlas.checkout(atlas.snapshot())
    for path in served.folder.rglob("*"):
        if path.is_file():
            served.remove(path.relative_to(served.folder).as_posix())
    forget()
    served.server.requests.clear()
    compare(latest)
    assert "linked" not in latest.query().explain()
    assert served.server.requests == []
    with pytest.raises(StaleSourceError, match="it is missing"):
        view.query().to_anndata()
    copy = ra.RaggedAtlas.open(mirror, storage_options=served.options, sources="deny")
    compare(copy.checkout("linked"))
    assert list(copy.validate("deep")) == []


# ---- changes of the files ----

GZIP, SHARD = "0-gzip.h5ad", "5-sharded.zarr/X/data/c/2"
"""A file, and an object of a Zarr folder."""


def replaced(served: Served, name: str) -> None:
    """Put other bytes of the same number into a file."""
    data = bytearray((served.folder / name).read_bytes())
    data[len(data) // 2 :: 7] = bytes(byte ^ 255 for byte in data[len(data) // 2 :: 7])
    served.write(name, bytes(data))


def cut(served: Served, name: str, share: float) -> None:
    """Keep the beginning of a file."""
    data = (served.folder / name).read_bytes()
    served.write(name, data[: int(len(data) * share)])


def moved(served: Served, name: str) -> None:
    """Answer with a page, as servers do whose files are gone."""
    served.write(name, b"<html>We have moved.</html>")


def deaf(served: Served, name: str) -> None:
    """Put other bytes into a file, on a server that ignores conditions."""
    served.server.ignore_conditions = True
    replaced(served, name)


def without_ranges(served: Served, name: str) -> None:
    """Serve complete files only; object stores serve ranges always, so that a request fails."""
    if isinstance(served.server, WebServer):
        served.server.ranges = False
    else:
        served.server.refuse("GET", 403, "AccessDenied")


def cut_answers(served: Served, name: str) -> None:
    """Close connections before the end."""
    if isinstance(served.server, WebServer):
        served.server.sent = 0
    else:
        served.server.shorten_every = 1


CHANGES: dict[str, Callable[[Served, str], None]] = {
    "replaced": replaced,
    "deaf": deaf,
    "removed": lambda served, name: served.remove(name),
    "cut": lambda served, name: cut(served, name, 0.9),
    "cut early": lambda served, name: cut(served, name, 0.1),
    "emptied": lambda served, name: cut(served, name, 0),
    "moved": moved,
    "without ranges": without_ranges,
    "answers cut": cut_answers,
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "name"), [*((change, GZIP) for change in CHANGES), ("deaf", SHARD), ("removed", SHARD), ("cut", SHARD)]
)
def test_a_file_that_changes_at_any_request(
    served: Served, change: str, name: str, copied: "ra.AtlasView", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first and between any two requests of a query or a loader: values are right, or there is our error."""
    monkeypatch.setattr("raggedatlas.store.location.RETRIES", {"max_retries": 0})
    file = name.partition("/")[0]
    atlas = ra.RaggedAtlas.create(tmp_path / "atlas")
    atlas.add(f"{served.base}/{file}", copy=False, organism="human", storage_options=served.options, progress=False)
    atlas.snapshot("linked")
    same = copied.query().where(dataset=Path(file).stem)
    expected = values_of(same.to_anndata())
    batches = loaded(loader_of(same))

    def query(view: "ra.AtlasView") -> None:
        assert values_of(view.query().to_anndata()) == expected

    def load(view: "ra.AtlasView") -> None:
        for batch in batches_of(loader_of(view.query())):
            assert batch.items() <= batches.items()

    refused = 0
    for read, moment in ((query, 0), (query, 1), (query, 4), (load, 0), (load, 2), (load, 5)):
        view, first = served.open(tmp_path / "atlas").checkout("linked"), count(served.server)
        forget()

        def happen(n: int, at: int = first + moment) -> None:
            if n == at:
                CHANGES[change](served, name)

        served.server.before, told = happen, None
        try:
            read(view)
        except StoreError as error:
            told = error
        served.mend(name)
        # What was decoded before the change is kept.
        assert told is not None or moment > 0
        if told is not None:
            refused += 1
            assert name in str(told)
            assert isinstance(told, StaleSourceError) == (change not in ("without ranges", "answers cut"))
    assert refused >= 3


def count(server: WebServer | FaultyProxy) -> int:
    """Return how many requests a server has seen."""
    return len(server.requests) if isinstance(server, WebServer) else server._seen


def test_a_file_that_is_gone_leaves_the_others(served: Served, copied: "ra.AtlasView", tmp_path: Path) -> None:
    """Cells and the values of all other datasets are as before; the error names the dataset, its file, and what to do."""
    view = served.link(tmp_path / "atlas")
    served.remove(GZIP)
    others = [name for name in view.list_datasets()["name"] if name != "0-gzip"]
    found, expected = (v.query().where(dataset=others).to_anndata() for v in (view, copied))
    assert values_of(found) == values_of(expected)
    assert view.query().count() == copied.query().count()
    assert view.query().to_pandas()["cell_name"].tolist() == copied.query().to_pandas()["cell_name"].tolist()
    with pytest.raises(
        StaleSourceError, match=rf"'0-gzip' is linked to {served.base}/{GZIP}, .*missing.*relink\('0-gzip'"
    ):
        view.query().features(ASKED).to_anndata()
    problems = served.open(tmp_path / "atlas").validate("deep")
    assert {GZIP in str(problem) for problem in problems} == {True}
    # Where it is put back, it is read again.
    served.mend(GZIP)
    assert values_of(view.query().to_anndata()) == values_of(copied.query().to_anndata())


# ---- other processes ----


def read_loader(data: bytes) -> dict[str, list[float]]:
    """Return what a loader yields that came from another process."""
    return loaded(pickle.loads(data))


def read_atlas(atlas: Path, base: str, options: dict[str, str], environment: dict[str, str]) -> Values:
    """Return what a process of its own reads, with options or with those of its environment."""
    os.environ.update(environment)
    sources: Any = (lambda address: options if address.startswith(base) else False) if options else "allow"
    return values_of(
        ra.RaggedAtlas.open(atlas, sources=sources).checkout("linked").query().features(ASKED).to_anndata()
    )


@pytest.mark.parametrize("served", ["s3"], indirect=True)
def test_other_processes_read_the_files(served: Served, copied: "ra.AtlasView", tmp_path: Path) -> None:
    """By the options that `sources=` returns, by those of the environment, and by those that came with a loader."""
    view = served.link(tmp_path / "atlas")
    expected = values_of(copied.query().features(ASKED).to_anndata())
    environment = {key.upper(): value for key, value in served.options.items()}
    environment["AWS_ALLOW_HTTP"] = environment.pop("ALLOW_HTTP")
    with processes() as pool:
        came = pool.submit(read_loader, pickle.dumps(loader_of(view.query())))
        named = pool.submit(read_atlas, tmp_path / "atlas", served.base, served.options, {})
        assert came.result() == loaded(loader_of(copied.query()))
        assert named.result() == expected
        assert pool.submit(read_atlas, tmp_path / "atlas", served.base, {}, environment).result() == expected


def test_sources_that_may_not_be_read(served: Served, tmp_path: Path) -> None:
    """Nothing is requested from a server that `sources=` refuses, and cells are read all the same."""
    served.link(tmp_path / "atlas")
    served.server.requests.clear()
    for sources in ("deny", lambda address: False):
        view = ra.RaggedAtlas.open(tmp_path / "atlas", sources=sources).checkout("linked")
        assert view.query().count() > 0
        with pytest.raises(StoreError, match=f"'0-gzip' is linked to {served.base}/{GZIP}, which may not be read"):
            view.query().to_anndata()
    assert served.server.requests == []


@pytest.mark.parametrize("served", ["web"], indirect=True)
@pytest.mark.parametrize("ending", ["?X-Amz-Signature=s3cr3t", "?sig=s3cr3t&se=2030", "?token=s3cr3t"])
def test_a_signed_address_is_refused(served: Served, ending: str, tmp_path: Path) -> None:
    """It is neither stored nor shown, and nothing is added."""
    atlas = ra.RaggedAtlas.create(tmp_path / "atlas")
    with pytest.raises(SourceError, match="parameters that may be a secret") as refused:
        atlas.add(f"{served.base}/{GZIP}{ending}", copy=False, organism="human", progress=False)
    assert "s3cr3t" not in str(refused.value)
    assert atlas.list_datasets().empty
    assert not any(b"s3cr3t" in path.read_bytes() for path in (tmp_path / "atlas").rglob("*") if path.is_file())
