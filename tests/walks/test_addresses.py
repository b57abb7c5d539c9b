"""Every public call that takes a path reads each form of an address alike.

Forms are text, `Path`, `os.PathLike`, ``~``, ``file://``, relative, ``s3://`` and ``http://``.
"""

import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as papq
import pytest

import raggedatlas as ra
from raggedatlas.errors import LimitError, StoreError
from raggedatlas.formats import anndata as anndata_rules
from raggedatlas.formats.gene_sets import read_gmt
from raggedatlas.formats.gene_tables import read_gene_tables
from raggedatlas.ingest.annotations import read_uids
from raggedatlas.query.split import Split
from raggedatlas.store import copies
from raggedatlas.store.ontologies import read_term_table
from raggedatlas.wings.results.data_request import absolute_location
from raggedatlas.wings.results.folder import find_results
from raggedatlas.wings.results.validation import validate_results
from raggedatlas.wings.results.verbs.models import import_object
from raggedatlas.wings.results.verbs.reduction import PcaModel, load_pca
from raggedatlas.wings.vectors.builder import make_geometry
from raggedatlas.wings.vectors.converters.convert import Conversion, convert, is_store, read_file, write_file
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.writer import write as write_vectors
from raggedatlas.wings.viewer.verbs import visualize
from support.atlases import npy_run, small_anndata, write_results
from support.object_store import FaultyProxy, Remote, WebServer
from support.spatial import spots

Given = str | os.PathLike[str]


@dataclass
class Named:
    """A path of another class than `Path`."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)


FORMS: dict[str, Callable[[Path], Given]] = {
    "text": str,
    "pathlike": Named,
    "home": lambda path: f"~/{os.path.relpath(path)}",
    "file": lambda path: f"file://{quote(str(path))}",
    "relative": os.path.relpath,
}
"""Form -> the address of a file in the folder that is the home and the current one."""


@dataclass
class Places:
    """A folder with a file of each kind, and an atlas."""

    folder: Path
    atlas: ra.RaggedAtlas


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Make the files, in a folder whose name needs escapes in a URL."""
    folder = tmp_path_factory.mktemp("a b%20")
    atlas = ra.RaggedAtlas.create(folder / "atlas")
    atlas.add(small_anndata(1, 12), "d1", organism="human")
    atlas.snapshot("first")
    small_anndata(3, 6).write_h5ad(folder / "third.h5ad")
    uids = atlas.checkout("first").query().to_pandas().index.to_numpy(dtype=object)
    write_results(folder / "z", uids, np.arange(24, dtype=np.float32).reshape(-1, 2), model="m")
    npy_run(folder / "npy", [(["a", "b"], np.ones((2, 3), np.float32))])
    write_vectors(make_geometry(spots()), str(folder / "spots.zv"))
    write_file(spots(), folder / "spots.csv")
    papq.write_table(pa.table({"x": [1.0], "y": [2.0], "gene": ["A"]}), folder / "points.parquet")
    (folder / "uids.txt").write_text("\n".join(uids[:2]))
    for ending in ("csv", "toml"):
        split_of(atlas).write(folder / f"split.{ending}")
    (folder / "sets.gmt").write_text("B cells\t\tCD79A\tMS4A1\n")
    (folder / "labels.csv").write_text(f"uid,label\n{uids[0]},B\n")
    (folder / "terms.csv").write_text("id,name\nMY:1,arm\n")
    (folder / "confirm.csv").write_text("label,term\nB cell,\n")
    (folder / "model.py").write_text("answer = 42\n")
    genes = Path(__file__).parents[1] / "data" / "gene_tables" / "hgnc_complete_set_extract.txt"
    (folder / "genes.txt").write_bytes(genes.read_bytes())
    small_spatial().write_h5ad(folder / "spatial.h5ad")
    (folder / "several").mkdir()
    for seed in (3, 4):
        small_anndata(seed, 6).write_h5ad(folder / "several" / f"{seed}.h5ad")
    ra.copy(small_anndata(3, 6), folder / "zipped.zarr")
    shutil.make_archive(str(folder / "third.zarr"), "zip", folder / "zipped.zarr")
    shutil.rmtree(folder / "zipped.zarr")
    (folder / "sample").mkdir()
    (folder / "sample" / "matrix.mtx").write_text(
        "%%MatrixMarket matrix coordinate integer general\n2 3 2\n1 1 5\n2 3 7\n"
    )
    (folder / "sample" / "barcodes.tsv").write_text("a\nb\nc\n")
    (folder / "sample" / "genes.tsv").write_text("g1\tG1\ng2\tG2\n")
    (folder / "cells.geojson").write_text(
        '{"type": "FeatureCollection", "features": [{"type": "Feature", "properties": {}, "geometry": '
        '{"type": "Polygon", "coordinates": [[[0, 0], [1, 0], [1, 1], [0, 0]]]}}]}'
    )
    two = np.arange(4.0).reshape(2, 2)
    PcaModel(two[0], two, two[0], two[0], np.array(["g1", "g2"]), 1e4, 0, 2).save(folder / "pca.npz")
    write_file(spots(), folder / "sdata.zarr", format="spatialdata")
    return Places(folder, atlas)


READS: dict[str, tuple[str, Callable[[Places, Any], Any]]] = {
    "read": ("third.h5ad", lambda p, at: ra.read(at).X.sum()),
    "open_source": ("third.h5ad", lambda p, at: ra.open_source(at).describe().name),
    "inspect": ("third.h5ad", lambda p, at: str(anndata_rules.inspect(at))),
    "validate": ("third.h5ad", lambda p, at: list(anndata_rules.validate(at))),
    "add": ("third.h5ad", lambda p, at: p.atlas.add(at, dry_run=True).n_cells),
    "add points": ("points.parquet", lambda p, at: refusal(p.atlas.add, at, dry_run=True).partition("parquet")[2]),
    "add geometry": ("spots.zv", lambda p, at: p.atlas.add(at, dry_run=True).name),
    "add results": ("z", lambda p, at: p.atlas.add(at, dry_run=True).name),
    "add a folder": ("several", lambda p, at: [r.n_cells for r in p.atlas.add(at, dry_run=True)]),
    "add a zip file": ("third.zarr.zip", lambda p, at: p.atlas.add(at, dry_run=True).n_cells),
    "add a sample": ("sample", lambda p, at: p.atlas.add(at, dry_run=True).n_cells),
    "read a zip file": ("third.zarr.zip", lambda p, at: ra.read(at).X.sum()),
    "validate a zip file": ("third.zarr.zip", lambda p, at: list(anndata_rules.validate(at))),
    "read a matrix": ("sample/matrix.mtx", lambda p, at: ra.read(at).X.toarray().tolist()),
    "annotate": ("labels.csv", lambda p, at: str(p.atlas.annotate(at, name="n", dry_run=True))),
    "delete_cells": ("uids.txt", lambda p, at: p.atlas.delete_cells(uids=at, dry_run=True).n_cells),
    "read_uids": ("uids.txt", lambda p, at: read_uids(at).to_pylist()),
    "Split.from_frame": ("split.csv", lambda p, at: Split.from_frame(at).parts),
    "Split.from_toml": ("split.toml", lambda p, at: Split.from_toml(at).parts),
    "read_gmt": ("sets.gmt", lambda p, at: read_gmt(at)),
    "load_terms": ("terms.csv", lambda p, at: read_term_table(at).version),
    "map_terms": (
        "confirm.csv",
        lambda p, at: str(p.atlas.map_terms("cell_type", ontology="CL", confirm=at, dry_run=True)),
    ),
    "open": ("atlas", lambda p, at: ra.RaggedAtlas.open(at).uri),
    "checkout_latest": ("atlas", lambda p, at: ra.RaggedAtlas.checkout_latest(at).query().count()),
    "sync": ("atlas", lambda p, at: refusal(p.atlas.sync, at, dry_run=True)),
    "diff_files": ("atlas", lambda p, at: str(p.atlas.diff_files("first", "first", other=at))),
    "ResultDataset": ("z", lambda p, at: ra.ResultDataset({}, at).get_data(3).tolist()),
    "load_results_dataset": ("z", lambda p, at: len(ra.load_results_dataset({}, at))),
    "find_results": ("z", lambda p, at: find_results({"results": {"inference_dir": at}}).resolve()),
    "data_location": ("z", lambda p, at: absolute_location(at)),
    "InferenceDataSet": ("npy", lambda p, at: len(ra.InferenceDataSet({}, at))),
    "validate_results": ("z", lambda p, at: list(validate_results(at))),
    "read_gene_tables": ("genes.txt", lambda p, at: [str(table.info) for table in read_gene_tables(at)]),
    "read_points": ("points.parquet", lambda p, at: len(ra.read_points(at).positions)),
    "open_vectors": ("spots.zv", lambda p, at: open_vectors(at).n_levels),
    "is_store": ("spots.zv", lambda p, at: is_store(at)),
    "read_file": ("spots.csv", lambda p, at: read_file(at).shapes.n_vertices),
    "read_file of polygons": ("cells.geojson", lambda p, at: read_file(at).shapes.positions.tolist()),
    "read_file of SpatialData": ("sdata.zarr", lambda p, at: read_file(at).shapes.positions.tolist()),
    "add SpatialData": ("sdata.zarr", lambda p, at: str(p.atlas.add(at, dry_run=True))),
    "add polygons": ("cells.geojson", lambda p, at: str(p.atlas.add(at, dry_run=True))),
    "convert from": ("spots.csv", lambda p, at: convert(at, p.folder / "from.zv", Conversion(overwrite=True))),
    "identity.load": ("genes.txt", lambda p, at: len(p.atlas.identity.load(at))),
    "load_pca": ("pca.npz", lambda p, at: load_pca(at).components.tolist()),
    "visualize": (
        "spatial.h5ad",
        lambda p, at: visualize("spatial", at, path=p.folder / "m.html", overwrite=True).name,
    ),
    "import_object": ("model.py", lambda p, at: import_object(f"{os.fspath(at)}:answer")),
}
"""Call -> the file that it is given, and what comes of it."""

WRITES: dict[str, tuple[str, Callable[[Places, Any], Any]]] = {
    "query.write": ("out.h5ad", lambda p, at: p.atlas.checkout("first").query().write(at)),
    "dataset.write": ("out.h5ad", lambda p, at: p.atlas.checkout("first").dataset("d1").write(at)),
    "copy": ("out.zarr", lambda p, at: ra.copy(small_anndata(3, 6), at)),
    "create": ("out.atlas", lambda p, at: ra.RaggedAtlas.create(at)),
    "write_file": ("out.csv", lambda p, at: write_file(spots(), at)),
    "convert": ("out.zv", lambda p, at: convert(p.folder / "spots.csv", at)),
    "write_vectors": ("out.zv", lambda p, at: write_vectors(make_geometry(spots()), at)),
    "results": ("out", lambda p, at: write_results(at, ["a"], np.ones((1, 2)))),
    "terms": (
        "out.csv",
        lambda p, at: p.atlas.map_terms("cell_type", ontology="CL", dry_run=True).write(at),
    ),
    "Split.write": ("out.toml", lambda p, at: split_of(p.atlas).write(at)),
    "visualize": ("out.html", lambda p, at: visualize("spatial", small_spatial(), path=at)),
}
"""Call -> the name that it writes."""


def refusal(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Return what a call is refused with."""
    with pytest.raises(ra.AtlasError) as refused:
        call(*args, **options)
    return str(refused.value)


def split_of(atlas: ra.RaggedAtlas) -> Split:
    """Assign the cells of an atlas to parts."""
    return Split.by(atlas.checkout("first").query(), "uid")


def small_spatial() -> Any:
    """Make cells with coordinates."""
    adata = small_anndata(3, 6)
    adata.obsm["spatial"] = np.arange(12, dtype=float).reshape(6, 2)
    return adata


@pytest.fixture
def at_home(places: Places, monkeypatch: pytest.MonkeyPatch) -> Places:
    """Make the folder the home and the current folder."""
    monkeypatch.setenv("HOME", str(places.folder))
    monkeypatch.chdir(places.folder)
    return places


@pytest.mark.filterwarnings("ignore:InferenceDataSet reads")
@pytest.mark.parametrize("call", READS)
def test_every_form_of_an_address_is_read_alike(call: str, at_home: Places) -> None:
    """Whatever form a path has, a call answers as for a `Path`."""
    name, run = READS[call]
    path = at_home.folder / name
    expected = run(at_home, path)
    for form, make in FORMS.items():
        assert run(at_home, make(path)) == expected, form


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", WRITES)
def test_every_form_of_an_address_is_written_alike(call: str, form: str, at_home: Places) -> None:
    """Whatever form a path has, what is written lies where it says, and nothing beside it."""
    name, run = WRITES[call]
    before = {path.name for path in at_home.folder.iterdir()}
    run(at_home, FORMS[form](at_home.folder / name))
    made = {path.name for path in at_home.folder.iterdir()} - before
    for made_path in (at_home.folder / each for each in made):
        made_path.rename(made_path.with_name(f"done-{call}-{form}-{made_path.name}"))
    assert made == {name}


def test_what_is_copied_has_a_bound_and_needs_no_ranges(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that sends complete files alone serves those that are copied; one that is too large is refused by its size."""
    with WebServer(places.folder, ranges=False) as server:
        at = f"{server.address}/terms.csv"
        assert read_term_table(at).version == read_term_table(places.folder / "terms.csv").version
        monkeypatch.setattr(copies, "MOST_COPIED", 10)
        with pytest.raises(LimitError, match=r"has \d+ bytes.*download it"):
            read_term_table(at)
        with pytest.raises(ra.AtlasError, match=f"{server.address}/absent.csv; check the address"):
            read_term_table(f"{server.address}/absent.csv")


def test_a_home_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `~` that cannot be expanded is an error of ours."""
    with pytest.raises(StoreError, match="write the path out in full"):
        ra.read("~no-such-user-here/x.h5ad")


REMOTE_REFUSALS = {
    "import_object": "not on this machine",
    "InferenceDataSet": "not on this machine",
    "find_results": "not on this machine",
}
"""Calls that take no address of an object store -> what they say: code and memory-mapped files are local."""

LISTED = {"add a folder", "add a sample", "add geometry", "add results", "add SpatialData", "read_file of SpatialData",
          "open", "checkout_latest", "diff_files", "ResultDataset", "load_results_dataset", "open_vectors", "validate_results"}  # fmt: skip
"""Calls whose folder a web server cannot list, or whose tables need an object store."""


@pytest.fixture
def in_bucket(at_home: Places, s3_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    """Make a bucket that is reached by the settings of the environment."""
    remote = Remote.make(s3_proxy)
    for key, value in remote.options.items():
        monkeypatch.setenv(key.upper() if key.startswith("aws") else f"AWS_{key.upper()}", value)
    yield remote
    s3_proxy.forget()


def shown(answer: object, address: object) -> str:
    """Return an answer as text in which the address does not show."""
    return str(answer).replace(str(address), "HERE")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:InferenceDataSet reads")
@pytest.mark.parametrize("call", sorted(set(READS) - {"sync", "data_location"}))
def test_an_object_store_and_a_web_server_are_read_as_a_folder(
    call: str, at_home: Places, in_bucket: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read from an address is what is read from the path, or is refused in one line; no temporary file stays."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    name, run = READS[call]
    expected = shown(run(at_home, at_home.folder / name), at_home.folder / name)
    in_bucket.upload(at_home.folder / name.partition("/")[0], name.partition("/")[0])
    at = f"s3://{in_bucket.bucket}/my.atlas/{name}"
    if call in REMOTE_REFUSALS:
        assert REMOTE_REFUSALS[call] in refusal(run, at_home, at)
    else:
        assert shown(run(at_home, at), at) == expected
    with WebServer(at_home.folder) as server:
        at = f"{server.address}/{name}"
        if call in {*REMOTE_REFUSALS, *LISTED}:
            assert "\n" not in refusal(run, at_home, at)
        else:
            assert shown(run(at_home, at), at) == expected
            # What follows the question mark may be a signature.
            assert shown(run(at_home, f"{at}?token=secret"), at) == expected
    gc.collect()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("call", WRITES)
def test_an_object_store_is_written_and_a_web_server_refused(call: str, at_home: Places, in_bucket: Remote) -> None:
    """What is written to an object store is there under the name; a web server is refused before anything is done."""
    name, run = WRITES[call]
    at = f"s3://{in_bucket.bucket}/my.atlas/{name}"
    # A run of a model writes to a local folder.
    if call == "results":
        assert "has no local path" in refusal(run, at_home, at)
    else:
        run(at_home, at)
        assert {key.partition("/")[0] for key in in_bucket.listed()} == {name}
    with WebServer(at_home.folder) as server:
        assert "\n" not in refusal(run, at_home, f"{server.address}/{name}")
        assert not server.requests
