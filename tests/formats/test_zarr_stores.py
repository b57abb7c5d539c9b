"""Zarr stores of other people: folders, zip files and open groups are read alike, with few reads of metadata; ours are plain Zarr."""

import warnings
import zipfile
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr

from raggedatlas import read
from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import LimitError, NotFoundError, SchemaError, SourceError
from raggedatlas.formats.anndata import validate
from raggedatlas.formats.copying import copy
from raggedatlas.formats.registry import detect, open_sink, open_source
from raggedatlas.model.batch import CsrBlock, DenseBlock
from raggedatlas.model.protocols import SinkMatrix
from reading import read_anndata
from support.anndata_strategies import assert_equal

DATA = Path(__file__).parent.parent / "data"
RECORDS = DATA / "records_anndata_0.13.zarr.zip"


def made(n_elements: int = 3) -> ad.AnnData:
    """Return an AnnData with as many elements beside its matrix."""
    obs = pd.DataFrame({f"n{i}": np.arange(6) for i in range(n_elements)}, index=[f"c{i}" for i in range(6)])
    adata = ad.AnnData(sp.csr_matrix(np.eye(6, 4, dtype=np.float32)), obs=obs)
    adata.uns = {f"u{i}": {"x": np.arange(3), "y": "text"} for i in range(n_elements)}
    return adata


def stored(adata: ad.AnnData, path: Path, zarr_format: int = 3) -> Path:
    with warnings.catch_warnings(action="ignore"), ad.settings.override(zarr_write_format=zarr_format):
        adata.write_h5ad(path) if path.suffix == ".h5ad" else adata.write_zarr(path)
    return path


def zipped(folder: Path, to: Path, how: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(to, "w", how) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder))
    return to


@pytest.mark.long
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_zip_file_is_read_like_its_folder(tmp_path: Path, zarr_format: int) -> None:
    """`.zarr.zip`, compressed or not, is found, validated, copied, added and read into memory as the folder is."""
    folder = stored(made(), tmp_path / "x.zarr", zarr_format)
    wanted = read_anndata(folder)
    for how in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path = zipped(folder, tmp_path / f"{how}.zarr.zip", how)
        assert [str(p) for p in validate(path, "full")] == []
        assert_equal(wanted, read(path))
        assert_equal(wanted, read_anndata(copy(path, open_sink(tmp_path / "y.h5ad", overwrite=True))))
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    assert atlas.add(path, progress=False).name == path.name.removesuffix(".zarr.zip")
    assert_equal(wanted, atlas.dataset(path.name.removesuffix(".zarr.zip")).to_anndata())


def test_zip_files_that_hold_no_zarr_or_too_much_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another zip file, a damaged one, and one whose compressed members declare more than a chunk may hold get errors of ours."""
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    (tmp_path / "bad.zarr.zip").write_bytes(RECORDS.read_bytes()[:-30])
    for name, said in (("other.zip", r"no zarr\.json or \.zgroup"), ("bad.zarr.zip", "cannot be read")):
        with pytest.raises(SourceError, match=said):
            read(tmp_path / name)
    monkeypatch.setattr("raggedatlas.formats.containers.MAX_CHUNK", 100)
    with pytest.raises(LimitError, match="declares"):
        read(RECORDS)


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_what_the_root_declares_counts(tmp_path: Path, zarr_format: int) -> None:
    """A folder or zip file that declares to be an AnnData is one, also with a member `mod`; with `mod` and no declaration it is a MuData."""
    folder = stored(made(), tmp_path / "x.zarr", zarr_format)
    zarr.open_group(folder, mode="a", use_consolidated=False).create_group("mod")
    zarr.consolidate_metadata(folder)
    for path in (folder, zipped(folder, tmp_path / "x.zarr.zip")):
        assert detect(path) == "zarr"
        assert read(path).shape == (6, 4)
    root = zarr.open_group(folder, mode="a", use_consolidated=False)
    del root.attrs["encoding-type"]
    zarr.consolidate_metadata(folder)
    for path in (folder, zipped(folder, tmp_path / "y.zarr.zip")):
        assert detect(path) == "h5mu"


@pytest.mark.long
def test_open_groups_are_sources(tmp_path: Path) -> None:
    """An open `h5py.File` or `zarr.Group`, also one within a file, is read and added like its path, and stays open."""
    h5ad, folder = stored(made(), tmp_path / "x.h5ad"), stored(made(), tmp_path / "x.zarr")
    with h5py.File(h5ad) as file, h5py.File(tmp_path / "outer.h5", "w") as outer:
        file.copy(file, outer, "inner")
        for group in (file, outer["inner"]):
            assert_equal(read_anndata(h5ad), read(group))
        atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
        atlas.add(file, "d", progress=False)
        assert file["obs"]
    assert_equal(read_anndata(h5ad), atlas.dataset("d").to_anndata())
    assert_equal(read_anndata(folder), read(zarr.open_group(folder, mode="r")))
    with pytest.raises(SourceError, match="closed"):
        read(file)


@pytest.mark.nightly
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_metadata_of_a_store_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zarr_format: int) -> None:
    """Opening a store with consolidated metadata takes as many reads whether it holds ten arrays or a hundred."""
    reads: list[str] = []
    get = zarr.storage.LocalStore.get

    async def counted(self: Any, key: str, *args: Any, **more: Any) -> Any:
        reads.append(key)
        return await get(self, key, *args, **more)

    monkeypatch.setattr(zarr.storage.LocalStore, "get", counted)
    counts = []
    for n in (1, 30):
        path = stored(made(n), tmp_path / f"{n}.zarr", zarr_format)
        reads.clear()
        open_source(path).close()
        counts.append(len(reads))
    assert counts[0] == counts[1] <= 5


@pytest.mark.parametrize("compression", ["zstd", "blosc", "gzip:3", None])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_what_threads_encode_is_what_zarr_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zarr_format: int, compression: str | None
) -> None:
    """Chunks encoded here, of lengths known and unknown, whole files and parts, on one axis and two, are read by zarr-python."""
    rng = np.random.default_rng(0)
    monkeypatch.setattr("raggedatlas.formats.output_files.CHUNK", 128)
    monkeypatch.setattr("raggedatlas.formats.output_files.SHARD_CHUNKS", 4)
    n, step = 3_000, 1_111
    long = sp.csr_matrix(
        (rng.integers(1, 9, n).astype(np.int16), np.zeros(n, np.int32), np.arange(n + 1)), shape=(n, 3)
    )
    dense = rng.normal(size=(n, 3)).astype(np.float16)
    sink = open_sink(tmp_path / "x.zarr", zarr_format=zarr_format, compression=compression)
    sink.begin((SinkMatrix.of("X", "csr", np.int16, (n, 3)), SinkMatrix.of("obsm/d", "dense", np.float16, (n, 3))))
    for start in range(0, n, step):
        rows = long[start : start + step]
        sink.write("X", CsrBlock(rows.indptr.astype(np.int64), rows.indices, {"values": rows.data}, 3))
        sink.write("obsm/d", DenseBlock({"values": dense[start : start + rows.shape[0]]}))
    sink.element("obs", pd.DataFrame(index=pd.RangeIndex(n).astype(str)))
    sink.element("var", pd.DataFrame(index=["a", "b", "c"]))
    sink.commit()
    root = zarr.open_group(tmp_path / "x.zarr", mode="r")
    np.testing.assert_array_equal(root["X/data"][:], long.data)
    np.testing.assert_array_equal(root["X/indices"][:], long.indices)
    np.testing.assert_array_equal(root["obsm/d"][:], dense)


@pytest.mark.long
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_integers_are_shuffled_and_floats_are_not(tmp_path: Path, zarr_format: int) -> None:
    """By default indices go through Blosc's shuffled zstd and floats through plain zstd, and the store is no larger than our h5ad."""
    matrix = sp.random(500, 20_000, 0.02, "csr", np.float32, random_state=0, data_rvs=lambda n: np.arange(n) % 7 + 1.0)
    adata = ad.AnnData(matrix)
    path = copy(adata, open_sink(tmp_path / "x.zarr", zarr_format=zarr_format))
    root = zarr.open_group(path, mode="r")
    for name, wanted in (("indices", ("blosc", "shuffle")), ("indptr", ("blosc", "shuffle")), ("data", ("zstd",))):
        (codec,) = root[f"X/{name}"].compressors
        said = f"{codec}".lower()
        assert all(word in said for word in wanted), said
        assert np.prod(root[f"X/{name}"].chunks) <= 1 << 18
    size = sum(file.stat().st_size for file in Path(path, "X").rglob("*") if file.is_file())
    with h5py.File(copy(adata, tmp_path / "x.h5ad")) as file:
        assert size < 1.05 * sum(array.id.get_storage_size() for array in file["X"].values())


def test_objects_of_read_lazy_are_refused_by_what_they_are(tmp_path: Path) -> None:
    """An AnnData of `read_lazy` has no tables in memory; the error says so and names the way out."""
    pytest.importorskip("xarray")
    pytest.importorskip("dask")
    from anndata.experimental import read_lazy

    with warnings.catch_warnings(action="ignore"):
        lazy = read_lazy(stored(made(), tmp_path / "x.zarr"))
        with pytest.raises(SourceError, match=r"read_lazy.*to_memory"):
            copy(lazy, tmp_path / "y.h5ad")


def test_names_of_columns_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """A column called b'c' is refused like by anndata, instead of becoming one called "b'c'"."""
    for name in (b"c", 1):
        adata = ad.AnnData(np.ones((2, 1), np.float32), uns={"t": pd.DataFrame({name: [1, 2]})})
        with pytest.raises(SchemaError, match=r"uns/t has the column .*whose name is no text"):
            copy(adata, tmp_path / "x.h5ad")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "shape"), [("pbmc68k_reduced.h5ad", (300, 765)), ("lung_C144.h5", (250, 33_539)), (RECORDS.name, (3, 4))]
)
def test_a_file_is_read_into_memory(name: str, shape: tuple[int, int]) -> None:
    """`read` gives an AnnData of a file of any format, without an atlas."""
    found = read(DATA / name)
    assert isinstance(found, ad.AnnData)
    assert found.shape == shape
    if name.endswith(".h5ad"):
        wanted = read_anndata(DATA / name)
        wanted.varm["PCs"], found.varm["PCs"] = (np.nan_to_num(a.varm["PCs"]) for a in (wanted, found))
        assert_equal(wanted, found)


def test_a_modality_is_read_into_memory() -> None:
    """Of a MuData `read` gives all modalities, or the one that is named."""
    pytest.importorskip("mudata")
    pytest.importorskip("awkward")
    with warnings.catch_warnings(action="ignore"):
        assert list(read(DATA / "wu2020.h5mu").mod) == ["gex", "airr"]
        assert read(DATA / "wu2020.h5mu", modality="gex").shape == (60, 10_243)
        with pytest.raises(NotFoundError, match="no modality 'rna'"):
            read(DATA / "wu2020.h5mu", modality="rna")
