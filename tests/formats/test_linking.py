"""Laws of linking: what is read by references is what HDF5 and zarr-python read; all else is refused."""

import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import anndata as ad
import h5py
import mudata
import numcodecs
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import raggedatlas as ra
from raggedatlas.errors import CorruptError, NotFoundError, SourceError, StoreError
from raggedatlas.formats import linking
from raggedatlas.formats.linking import Linker, decodable
from raggedatlas.formats.registry import open_sink, open_source
from raggedatlas.model.arrays import ArraySpec
from raggedatlas.model.protocols import Source
from raggedatlas.store.location import AnyPath, Location
from raggedatlas.store.ranges import SMALL_BLOCK
from raggedatlas.store.read import read_all
from raggedatlas.store.references import References
from support.hypothesis_profile import examples
from support.linked_arrays import linked_reader, source_of
from support.object_store import FaultyProxy, GoogleStorage, WebServer, google_options

DATA = Path(__file__).parent.parent / "data"


def stored_values(references: References, spec: ArraySpec, place: Path) -> NDArray[Any]:
    """Read an array by its references, as an atlas that links the file does."""
    with TemporaryDirectory() as store:
        reader = linked_reader(
            Path(store), Location(str(place)), references, spec.path, shape=spec.shape, dtype=spec.dtype,
            chunks=spec.chunk_shape, codecs=json.loads(spec.codecs), fill=json.loads(spec.fill_value),
        )  # fmt: skip
        return read_all(reader)


def linked(source: Source, place: AnyPath, *keys: str) -> tuple[References, dict[str, ArraySpec]]:
    """Link matrices; the references survive being written."""
    linker = Linker(source, place)
    specs = {spec.path: spec for key in keys for spec in linker.add(key).values()}
    references = References.from_bytes(linker.references().to_bytes(), "a test")
    assert set(references.arrays) == set(specs)
    return references, specs


DTYPES = ["u1", "?", "i2", ">i4", "u8", "f2", "f4", ">f8", "c8"]
LAYERS: list[dict[str, Any]] = [
    {},
    {"compression": "gzip"},
    {"compression": "lzf"},
    {"compression": 32_001, "compression_opts": (0, 0, 0, 0, 5, 1, 1)},
    {"compression": 32_015},
]


@st.composite
def written(draw: st.DrawFn) -> dict[str, Any]:
    """Return an array of one to three axes, how it is chunked, and which rows are written."""
    shape = tuple(draw(st.lists(st.integers(1, 30), min_size=1, max_size=3)))
    values = np.random.default_rng(draw(st.integers(0, 99))).integers(
        0, draw(st.sampled_from([2, 100, 1 << 30])), shape
    )
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    return {
        "values": values.astype(dtype) if dtype.kind == "b" else (values % (1 << min(30, 8 * dtype.itemsize - 1))).astype(dtype),
        "chunks": tuple(draw(st.integers(1, n)) for n in shape),
        "n_rows": draw(st.integers(0, shape[0])),
        "fill": draw(st.sampled_from([0, 1])),
    }  # fmt: skip


@given(
    case=written(), layer=st.sampled_from(LAYERS), shuffled=st.booleans(), checked=st.booleans(), chunked=st.booleans(),
    userblock=st.sampled_from([0, 512]),
)  # fmt: skip
@examples(60)
def test_bytes_of_an_hdf5_file_are_its_values(
    tmp_path_factory: pytest.TempPathFactory,
    case: dict[str, Any],
    layer: dict[str, Any],
    *,
    shuffled: bool,
    checked: bool,
    chunked: bool,
    userblock: int,
) -> None:
    """Any shape, chunks, filters, type, user block, and rows that were never written."""
    pytest.importorskip("hdf5plugin")
    values = case["values"]
    path = tmp_path_factory.mktemp("x") / "x.h5"
    options = {**layer, "shuffle": shuffled, "fletcher32": checked, "chunks": case["chunks"]} if chunked else {}
    with h5py.File(path, "w", userblock_size=userblock) as file:
        fill = values.dtype.type(case["fill"])
        dataset = file.create_dataset("x", values.shape, values.dtype, fillvalue=fill, **options)
        if case["n_rows"]:
            dataset[: case["n_rows"]] = values[: case["n_rows"]]
    with h5py.File(path) as file:
        try:
            references, specs = linked(source_of(file["x"]), path, "X")
        except SourceError as error:
            # Blosc skips what it does not make smaller.
            if layer.get("compression") == 32_001 and "skipped a filter" in str(error):
                return
            raise
        np.testing.assert_array_equal(stored_values(references, specs["X/data"], path), file["x"][...])
    spec = specs["X/data"]
    assert spec.linked is None
    assert spec.shard_shape is None
    assert (spec.dtype, spec.shape) == (values.dtype.newbyteorder("=").name, values.shape)
    assert len(references.arrays["X/data"].sizes) == 1 or spec.chunk_shape == case["chunks"]


ENCODED: dict[str, dict[str, Any]] = {
    "none": {"compressors": None},
    "blosc": {"compressors": zarr.codecs.BloscCodec(cname="lz4", shuffle="shuffle")},
    "zstd": {"compressors": zarr.codecs.ZstdCodec(level=3, checksum=True)},
    "gzip": {"compressors": zarr.codecs.GzipCodec()},
    "checked": {"compressors": [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()]},
    "big-endian": {"compressors": None, "serializer": zarr.codecs.BytesCodec(endian="big")},
}
ENCODED_2: dict[str, dict[str, Any]] = {
    "none": {"compressors": None},
    "blosc": {"compressors": numcodecs.Blosc("zstd", shuffle=numcodecs.Blosc.AUTOSHUFFLE)},
    "zstd": {"compressors": numcodecs.Zstd()},
    "gzip": {"compressors": numcodecs.GZip()},
    "zlib": {"compressors": numcodecs.Zlib()},
    "lz4": {"compressors": numcodecs.LZ4()},
}


@given(
    case=written(), encoding=st.sampled_from([*ENCODED]), times=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    location=st.sampled_from(["start", "end", ""]), checked=st.booleans(),
)  # fmt: skip
@examples(40)
def test_bytes_of_a_zarr_folder_are_its_values(
    tmp_path_factory: pytest.TempPathFactory,
    case: dict[str, Any],
    encoding: str,
    times: list[int],
    location: str,
    *,
    checked: bool,
) -> None:
    """Any shape, chunks, codecs and type, in shards with the index at either end or without, and chunks that are not stored."""
    path, values, chunks = tmp_path_factory.mktemp("x") / "x.zarr", case["values"], case["chunks"]
    options: dict[str, Any] = {"chunks": chunks, **ENCODED[encoding]}
    if location:
        shards = tuple(n * times[i] for i, n in enumerate(chunks))
        index = [zarr.codecs.BytesCodec(), *([zarr.codecs.Crc32cCodec()] if checked else [])]
        serializer = options.pop("serializer", zarr.codecs.BytesCodec())
        compressors = options["compressors"] or []
        inner = [serializer, *(compressors if isinstance(compressors, list) else [compressors])]
        sharding = zarr.codecs.ShardingCodec(
            chunk_shape=chunks, codecs=inner, index_codecs=index, index_location=location
        )
        options = {"chunks": shards, "serializer": sharding, "compressors": None}
    check_zarr(path, values, case, options, zarr_format=3)


@given(
    case=written(), encoding=st.sampled_from([*ENCODED_2]), separator=st.sampled_from("./"), delta=st.booleans(),
    shuffled=st.booleans(),
)  # fmt: skip
@examples(30)
def test_bytes_of_zarr_format_2_are_its_values(
    tmp_path_factory: pytest.TempPathFactory,
    case: dict[str, Any],
    encoding: str,
    separator: str,
    *,
    delta: bool,
    shuffled: bool,
) -> None:
    """Any shape, chunks, compressor, filters and type of format 2, and chunks that are not stored."""
    values = case["values"]
    filters: list[Any] = [numcodecs.Delta(values.dtype.str)] if delta and values.dtype.kind in "iu" else []
    filters += [numcodecs.Shuffle(values.dtype.itemsize)] if shuffled else []
    options = {
        "chunks": case["chunks"],
        "filters": filters or None,
        "chunk_key_encoding": {"name": "v2", "separator": separator},
        **ENCODED_2[encoding],
    }
    check_zarr(tmp_path_factory.mktemp("x") / "x.zarr", values, case, options, zarr_format=2)


def check_zarr(
    path: Path, values: NDArray[Any], case: dict[str, Any], options: dict[str, Any], zarr_format: Any
) -> None:
    """Write an array, link it, and read it by its references."""
    group = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    array = group.create_array("a/b", shape=values.shape, dtype=values.dtype, fill_value=case["fill"], **options)
    if case["n_rows"]:
        array[: case["n_rows"]] = values[: case["n_rows"]]
    array = zarr.open_group(path, mode="r")["a/b"]
    references, specs = linked(source_of(array), path, "X")
    spec = specs["X/data"]
    assert (spec.chunk_shape, spec.shard_shape) == (case["chunks"], None)
    np.testing.assert_array_equal(stored_values(references, spec, path), array[...])
    keys = references.objects.keys
    assert all(
        (path / key).stat().st_mtime_ns == when for key, when in zip(keys, references.objects.modified, strict=True)
    )


@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf, 1.5])
def test_fill_values_are_kept(tmp_path: Path, fill: float) -> None:
    """Also those that JSON has no numbers for, and those of complex numbers."""
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("x", shape=(4,), dtype="f4", fill_value=fill, chunks=(2,), compressors=None)
    group.create_array("z", shape=(4,), dtype="c8", fill_value=complex(0, fill), chunks=(2,), compressors=None)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (4,), "f4", fillvalue=fill)
    with h5py.File(tmp_path / "x.h5") as file:
        specs = [
            linked(source_of(group["x"]), tmp_path / "x.zarr", "X")[1]["X/data"],
            linked(source_of(group["z"]), tmp_path / "x.zarr", "X")[1]["X/data"],
            linked(source_of(file["x"]), tmp_path / "x.h5", "X")[1]["X/data"],
        ]
    for spec, expected in zip(specs, [fill, complex(0, fill), fill], strict=True):
        np.testing.assert_array_equal(spec.fill(), np.array(expected, spec.dtype))


def small_anndata() -> ad.AnnData:
    rng = np.random.default_rng(0)
    matrix = sp.random_array((300, 40), density=0.2, format="csr", dtype=np.float32, rng=rng)
    adata = ad.AnnData(matrix)
    adata.layers["columns"] = matrix.tocsc()
    adata.layers["dense"] = matrix.toarray()
    adata.layers["zeros"] = np.zeros((300, 40), np.float32)
    adata.raw = adata.copy()
    adata.obsm["X_pca"] = rng.normal(size=(300, 3))
    adata.varp["graph"] = sp.random_array((40, 40), density=0.1, format="csr", rng=rng)
    return adata


KEYS = ("X", "layers/columns", "layers/dense", "layers/zeros", "raw/X", "obsm/X_pca", "varp/graph")

WRITERS: dict[str, Callable[[ad.AnnData, Path], None]] = {
    "plain.h5ad": lambda adata, path: adata.write_h5ad(path),
    "gzip.h5ad": lambda adata, path: adata.write_h5ad(path, compression="gzip"),
    "lzf.h5ad": lambda adata, path: adata.write_h5ad(path, compression="lzf"),
    "own.h5ad": lambda adata, path: write_copy(adata, path, "gzip"),
    "zstd.h5ad": lambda adata, path: write_copy(adata, path, "zstd"),
    "blosc.h5ad": lambda adata, path: write_copy(adata, path, "blosc"),
    "two.zarr": lambda adata, path: write_zarr(adata, path, 2),
    "three.zarr": lambda adata, path: write_zarr(adata, path, 3),
    "sharded.zarr": lambda adata, path: write_copy(adata, path, None),
}


def write_copy(adata: ad.AnnData, path: Path, compression: str | None) -> None:
    pytest.importorskip("hdf5plugin")
    ra.copy(adata, open_sink(path, **({"compression": compression} if compression else {})))


def write_zarr(adata: ad.AnnData, path: Path, zarr_format: Any) -> None:
    with warnings.catch_warnings(action="ignore"), ad.settings.override(zarr_write_format=zarr_format):
        adata.write_zarr(path)


@pytest.mark.parametrize("name", WRITERS)
def test_every_matrix_of_an_anndata_is_linked(name: str, tmp_path: Path) -> None:
    """CSR, CSC and dense matrices, those of raw, obsm and varp, as anndata and this package write them."""
    WRITERS[name](small_anndata(), tmp_path / name)
    source = open_source(tmp_path / name)
    references, specs = linked(source, tmp_path / name, *KEYS)
    check_source(source, references, specs, tmp_path / name, KEYS)
    assert set(specs) == {
        *(f"{key}/data" for key in KEYS),
        *(f"{key}/indices" for key in ("X", "layers/columns", "raw/X", "varp/graph")),
    }
    source.close()


def check_source(
    source: Source, references: References, specs: Mapping[str, ArraySpec], place: Path, keys: tuple[str, ...]
) -> None:
    """Compare what references give with what the source reads."""
    for key in keys:
        matrix = source.element(key)
        for name in ("data", "indices"):
            if f"{key}/{name}" in specs:
                expected = getattr(matrix, name) if sp.issparse(matrix) else matrix
                np.testing.assert_array_equal(stored_values(references, specs[f"{key}/{name}"], place), expected)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("pbmc68k_reduced.h5ad", ("X", "raw/X", "obsm/X_pca")),
        ("lung_C144.h5", ("X",)),
        ("wu2020.h5mu", ("mod/gex/X", "mod/gex/obsm/X_umap_orig")),
    ],
)
def test_files_of_others_are_linked(name: str, keys: tuple[str, ...]) -> None:
    """AnnData of old writers, a 10x file, and modalities of a MuData."""
    source = open_source(DATA / name)
    references, specs = linked(source, DATA / name, *keys)
    check_source(source, references, specs, DATA / name, keys)
    source.close()


def test_a_mudata_in_a_zarr_folder_is_linked(tmp_path: Path) -> None:
    """Keys of its objects are relative to the folder of all modalities."""
    adata = small_anndata()
    with warnings.catch_warnings(action="ignore"):
        mudata.MuData({"rna": adata, "prot": adata[:, :5].copy()}).write_zarr(tmp_path / "x.zarr")
    source = open_source(tmp_path / "x.zarr")
    keys = ("mod/rna/X", "mod/prot/X")
    references, specs = linked(source, tmp_path / "x.zarr", *keys)
    check_source(source, references, specs, tmp_path / "x.zarr", keys)
    source.close()


def test_the_record_of_a_file_is_that_of_the_system(tmp_path: Path) -> None:
    """One object without a key, its size and time, and the hash of both ends, which overlap in a short one."""
    import hashlib

    small_anndata().write_h5ad(tmp_path / "x.h5ad")
    with closing(open_source(tmp_path / "x.h5ad")) as source:
        objects = linked(source, tmp_path / "x.h5ad", "X")[0].objects
    data, info = (tmp_path / "x.h5ad").read_bytes(), (tmp_path / "x.h5ad").stat()
    assert (objects.keys, objects.etags) == (("",), ("",))
    assert (objects.n_bytes.tolist(), objects.modified.tolist()) == ([info.st_size], [info.st_mtime_ns])
    assert objects.probe == hashlib.sha256(data[:4096] + data[-4096:]).hexdigest()
    # A time that does not fit is not known.
    os.utime(tmp_path / "x.h5ad", (1.2e10, 1.2e10))
    with closing(open_source(tmp_path / "x.h5ad")) as source:
        assert linked(source, tmp_path / "x.h5ad", "X")[0].objects.modified.tolist() == [0]
    with h5py.File(tmp_path / "short.h5", "w") as file:
        file["x"] = np.arange(10)
    with h5py.File(tmp_path / "short.h5") as file:
        probe = linked(source_of(file["x"]), tmp_path / "short.h5", "X")[0].objects.probe
    data = (tmp_path / "short.h5").read_bytes()
    assert len(data) < 4096
    assert probe == hashlib.sha256(data + data).hexdigest()


def test_an_array_in_one_piece_is_read_by_rows(tmp_path: Path) -> None:
    """About 64 KiB of rows, at least one, at most all."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, shape in {"long": (100_000, 4), "wide": (3, 100_000), "short": (7,), "empty": (0, 5)}.items():
            file[name] = np.zeros(shape, np.float32)
    with h5py.File(tmp_path / "x.h5") as file:
        found = {name: linked(source_of(file[name]), tmp_path / "x.h5", "X") for name in file}
    shapes = {name: specs["X/data"].chunk_shape for name, (_, specs) in found.items()}
    assert shapes == {"long": (4096, 4), "wide": (1, 100_000), "short": (7,), "empty": (1, 5)}
    sizes = {name: references.arrays["X/data"].sizes.tolist() for name, (references, _) in found.items()}
    assert sizes == {"long": [1_600_000], "wide": [1_200_000], "short": [28], "empty": [-1]}


def write_skipping(file: h5py.File) -> None:
    dataset = file.create_dataset("x", (64,), "i4", chunks=(32,), compression="gzip", shuffle=True)
    dataset[:32] = 1
    dataset.id.write_direct_chunk((32,), zlib.compress(bytes(128)), filter_mask=1)


def write_compact(file: h5py.File) -> None:
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple((4,))
    h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, space, plist).write(space, space, np.arange(4, dtype="i4"))


def write_odd_type(file: h5py.File) -> None:
    kind = h5py.h5t.NATIVE_INT32.copy()
    kind.set_precision(20)
    h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((4,)))


REFUSED: dict[str, tuple[str, Callable[[h5py.File], Any]]] = {
    "szip": ("filter 4 \\(szip\\)", lambda f: f.create_dataset("x", data=np.arange(64), chunks=(32,), compression="szip")),
    "scaleoffset": ("filter 6", lambda f: f.create_dataset("x", data=np.arange(64), chunks=(32,), scaleoffset=8)),
    "lz4": ("filter 32004", lambda f: f.create_dataset("x", data=np.arange(64), chunks=(32,), compression=32_004)),
    "bitshuffle": ("filter 32008", lambda f: f.create_dataset("x", data=np.arange(64), chunks=(32,), compression=32_008)),
    "skipped": ("1 of its 2 chunks skipped a filter", write_skipping),
    "compact": ("compact", write_compact),
    "odd type": ("a type of HDF5's own", write_odd_type),
    "chunks": ("more than|most", lambda f: f.create_dataset("x", (1 << 20, 1 << 10), "u1", chunks=(1, 1))),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_hdf5_reads_is_refused(name: str, tmp_path: Path) -> None:
    """Each with its reason and the way out."""
    pytest.importorskip("hdf5plugin")
    said, write = REFUSED[name]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        try:
            write(file)
        except ValueError as error:
            pytest.skip(str(error))
    with h5py.File(tmp_path / "x.h5") as file:
        linker = Linker(source_of(file["x"]), tmp_path / "x.h5")
        with pytest.raises(SourceError, match=rf"x\.h5: X/data cannot be linked: .*({said}).*copy=True"):
            linker.add("X")


def test_codecs_whose_settings_are_left_out(tmp_path: Path) -> None:
    """numcodecs takes its own defaults for settings that metadata of format 3 leave out, as for Blosc."""
    import numcodecs.zarr3

    group, values = zarr.open_group(tmp_path, mode="w", zarr_format=3), np.arange(12.0).reshape(3, 4)
    with warnings.catch_warnings(action="ignore"):
        group.create_array("a", data=values, compressors=numcodecs.zarr3.Blosc())
        array = zarr.open_group(tmp_path, mode="r")["a"]
    references, specs = linked(source_of(array), tmp_path, "X")
    np.testing.assert_array_equal(stored_values(references, specs["X/data"], tmp_path), values)


def test_encodings_that_are_not_decoded_are_refused(tmp_path: Path) -> None:
    """The codecs decide, and each is named."""
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
    values = np.arange(12.0).reshape(3, 4)
    group.create_array("bz2", data=values, compressors=numcodecs.BZ2())
    group.create_array("fortran", data=values, order="F")
    group.create_array("first", data=values, filters=[numcodecs.CRC32C(location="start")], compressors=None)
    for dtype in ("<i8", ">f8", "<f4"):
        group.create_array(dtype, data=values, filters=[numcodecs.Delta(dtype)], compressors=None)
    three = zarr.open_group(tmp_path / "y.zarr", mode="w")
    three.create_array("transposed", data=values, filters=zarr.codecs.TransposeCodec(order=(1, 0)))
    for array, said in (
        (group["bz2"], "bytes, bz2"),
        (group["fortran"], "Fortran"),
        (group["first"], "crc32c"),
        *((group[dtype], "differences of another type") for dtype in ("<i8", ">f8", "<f4")),
        (three["transposed"], "exchanged"),
    ):
        place = tmp_path / ("y.zarr" if array.name == "/transposed" else "x.zarr")
        with pytest.raises(SourceError, match=rf"X/data cannot be linked: .*{said}.*copy=True"):
            Linker(source_of(array), place).add("X")
    assert decodable([{"name": "bytes"}])
    assert not decodable([{"name": "bytes"}, {"name": "numcodecs.pickle"}])


def test_matrices_that_are_no_arrays_of_the_file_are_refused(tmp_path: Path) -> None:
    """Objects in memory, views, tables of columns, fields of records, subsets of columns, and files of text."""
    adata = small_anndata()
    adata.obsm["table"] = adata.obs.assign(a=1.0, b=2.0)
    adata.write_h5ad(tmp_path / "x.h5ad")
    with pytest.raises(SourceError, match=r"obsm/table/data cannot be linked: .*a Columns.*copy=True"):
        Linker(open_source(tmp_path / "x.h5ad"), tmp_path / "x.h5ad").add("obsm/table")
    with pytest.raises(SourceError, match=r"X/(data|indices) cannot be linked: .*a ndarray.*copy=True"):
        Linker(open_source(adata), tmp_path / "x.h5ad").add("X")
    with pytest.raises(SourceError, match=r"X cannot be linked: .*anndata.*copy=True"):
        Linker(open_source(adata[:3]), tmp_path / "x.h5ad").add("X")
    with pytest.raises(NotFoundError, match="no matrix 'layers/none'"):
        Linker(open_source(tmp_path / "x.h5ad"), tmp_path / "x.h5ad").add("layers/none")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.zeros(5, [("a", "f4"), ("b", "i4")])
        file["matrix/data"], file["matrix/indices"] = np.ones(4, np.int32), np.array([0, 1, 0, 1])
        file["matrix/indptr"], file["matrix/shape"] = np.array([0, 2, 4]), np.array([2, 2])
        file["matrix/barcodes"], file["matrix/features/id"] = np.array([b"a", b"b"]), np.array([b"A", b"B"])
        file["matrix/features/name"] = np.array([b"A", b"B"])
        file["matrix/features/feature_type"] = np.array([b"Gene Expression", b"Antibody Capture"])
    with closing(open_source(tmp_path / "x.h5")) as source, pytest.raises(SourceError, match=r"10x-h5.*copy=True"):
        Linker(source, tmp_path / "x.h5").add("X:Gene Expression")
    (tmp_path / "text").mkdir()
    (tmp_path / "text/matrix.mtx").write_text("%%MatrixMarket matrix coordinate integer general\n2 2 1\n1 1 3\n")
    (tmp_path / "text/barcodes.tsv").write_text("a\nb\n")
    (tmp_path / "text/genes.tsv").write_text("A\tA\nB\tB\n")
    with closing(open_source(tmp_path / "text")) as source, pytest.raises(SourceError, match=r"10x-mtx.*copy=True"):
        Linker(source, tmp_path / "text").add("X")
    strange: Any = SimpleNamespace(describe=lambda: SimpleNamespace(format="of a wing"))
    with pytest.raises(SourceError, match=r"of a wing.*copy=True"):
        Linker(strange, tmp_path / "x.h5").add("X")


def test_loom_files_are_refused(tmp_path: Path) -> None:
    """Their rows are features."""
    with h5py.File(tmp_path / "x.loom", "w") as file:
        file["matrix"] = np.zeros((3, 2), np.float32)
        file["row_attrs/Gene"], file["col_attrs/CellID"] = np.array([b"A", b"B", b"C"]), np.array([b"a", b"b"])
    with closing(open_source(tmp_path / "x.loom")) as source, pytest.raises(SourceError, match=r"loom.*copy=True"):
        Linker(source, tmp_path / "x.loom").add("X")


def test_types_without_numbers_and_files_that_are_no_plain_files_are_refused(tmp_path: Path) -> None:
    """Text, no axes, a file open for writing, a file in memory, values in other files, another file, and a zip file."""
    place = tmp_path / "x.h5"

    def refused(array: Any, said: str, at: AnyPath = place) -> None:
        source: Any = SimpleNamespace(
            arrays=lambda key: {"data": array}, describe=lambda: SimpleNamespace(format="h5ad")
        )
        with pytest.raises(SourceError, match=rf"cannot be linked: .*{said}.*copy=True"):
            Linker(source, at).add("X")

    (tmp_path / "raw").write_bytes(bytes(16))
    with h5py.File(place, "w") as file:
        file["text"], file["one"], file["x"] = np.array([b"a"]), 1.0, np.arange(4)
        file.create_dataset("outside", (4,), "i4", external=[(str(tmp_path / "raw"), 0, 16)])
        layout = h5py.VirtualLayout((4,), "i8")
        layout[:] = h5py.VirtualSource(file["x"])
        file.create_virtual_dataset("virtual", layout)
        refused(file["x"], "open for writing")
    with h5py.File(place) as file, h5py.File(tmp_path / "y.h5", "w") as other:
        refused(file["text"], "type")
        refused(file["one"], "no axes")
        refused(file["outside"], "other files")
        refused(file["virtual"], "other files")
        refused(file["x"], "zip", tmp_path / "x.zarr.zip")
        refused(file["x"], "a Dataset", tmp_path)
        refused(file["x"], "the source reads", Location("https://example.org/x.h5"))
        other["x"] = 1
    with h5py.File(place, driver="core") as file:
        refused(file["x"], "driver 'core'")
    array = zarr.create_array(zarr.storage.MemoryStore(), name="x", data=np.arange(4))
    refused(array, "another folder", tmp_path)
    with pytest.raises(SourceError, match=r"several lines.*copy=True"):
        Linker(source_of_lines(array), tmp_path).add("a\nb")


def source_of_lines(array: Any) -> Any:
    return SimpleNamespace(arrays=lambda key: {"data": array})


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(10))


def touch(path: Path) -> None:
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


def replace(path: Path) -> None:
    """Put an equal file in its place, of the same size and time."""
    info, copy = path.stat(), path.with_suffix(".new")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(info.st_atime_ns, info.st_mtime_ns))
    copy.replace(path)


@pytest.mark.parametrize("change", [grow, touch, replace])
@pytest.mark.parametrize("when", ["opened", "linked"])
def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, change: Callable[[Path], None], when: str) -> None:
    """Between opening and linking, and between linking and recording."""
    path = tmp_path / "x.h5ad"
    small_anndata().write_h5ad(path)
    with closing(open_source(path)) as source:
        if when == "opened":
            linker = Linker(source, path)
            change(path)
            other = Linker(source, path)
            if change is replace:
                with pytest.raises(SourceError, match="changed while it was read"):
                    other.add("X")
        else:
            linker = Linker(source, path)
            linker.add("X")
            change(path)
        with pytest.raises(SourceError, match="changed while it was read"):
            linker.references()


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    """Before linking, and after it."""
    small_anndata().write_h5ad(tmp_path / "x.h5ad")
    with closing(open_source(tmp_path / "x.h5ad")) as source:
        linker = Linker(source, tmp_path / "x.h5ad")
        linker.add("X")
        (tmp_path / "x.h5ad").unlink()
        for link in (linker.references, lambda: Linker(source, tmp_path / "x.h5ad")):
            with pytest.raises(StoreError, match=r"no such file"):
                link()


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    """A chunk beyond the end cannot be referred to."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(10_000)
    with h5py.File(tmp_path / "x.h5") as file:
        source = source_of(file["x"])
        with (tmp_path / "x.h5").open("r+b") as opened:
            opened.truncate(20_000)
        linker = Linker(source, tmp_path / "x.h5")
        linker.add("X")
        with pytest.raises(SourceError, match=r"cut short"):
            linker.references()


def test_damaged_shards_are_told(tmp_path: Path) -> None:
    """An index that does not match its checksum, and a shard too short for one."""
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("x", data=np.arange(64), chunks=(4,), shards=(32,))
    shard = tmp_path / "x.zarr/x/c/0"
    data = bytearray(shard.read_bytes())
    data[-9] ^= 1
    array = zarr.open_group(tmp_path / "x.zarr", mode="r")["x"]
    for damaged, said in ((data, "crc32c"), (data[:10], "no room")):
        shard.write_bytes(damaged)
        with pytest.raises(CorruptError, match=said):
            Linker(source_of(array), tmp_path / "x.zarr").add("X")


def test_a_shard_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index must be that of the file whose size and time are recorded."""
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("x", data=np.arange(64), chunks=(4,), shards=(32,))
    found = linking._file_facts

    def look(place: Path, keys: Sequence[str]) -> Any:
        facts = found(place, keys)
        for key in keys:
            if key.endswith("/1"):
                touch(place / key)
        return facts

    monkeypatch.setattr(linking, "_file_facts", look)
    with pytest.raises(SourceError, match=r"x/c/1 changed while it was read"):
        Linker(source_of(zarr.open_group(tmp_path / "x.zarr", mode="r")["x"]), tmp_path / "x.zarr").add("X")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files to serve."""
    folder = tmp_path_factory.mktemp("served")
    rng = np.random.default_rng(0)
    matrix = sp.random_array((3_000, 2_000), density=0.2, format="csr", dtype=np.float32, rng=rng)
    adata = ad.AnnData(matrix)
    adata.obs["depth"] = rng.normal(size=3_000)
    adata.write_h5ad(folder / "large.h5ad", compression="gzip")
    ra.copy(small_anndata(), folder / "sharded.zarr")
    write_zarr(small_anndata(), folder / "plain.zarr", 3)
    return folder


@pytest.fixture
def web(folder: Path) -> Iterator[WebServer]:
    """Serve them."""
    with WebServer(folder) as server:
        yield server


@pytest.mark.parametrize("name", ["large.h5ad", "sharded.zarr", "plain.zarr"])
def test_what_a_web_server_serves_is_linked_as_a_local_file(name: str, folder: Path, web: WebServer) -> None:
    """The same places of the same bytes; servers that tell neither time nor ETag leave them empty."""
    place = Location(f"{web.address}/{name}").in_small_blocks()
    # Of zeros, Zarr folders have no chunk at all.
    keys = ("X", "layers/zeros") if name.endswith(".zarr") else ("X",)
    with closing(open_source(place)) as source, closing(open_source(folder / name)) as local:
        found, specs = linked(source, place, *keys)
        expected, same = linked(local, folder / name, *keys)
    assert specs == same
    assert name != "plain.zarr" or (expected.arrays["layers/zeros/data"].sizes == -1).all()
    assert found.objects.keys == expected.objects.keys
    assert found.objects.probe == expected.objects.probe
    assert found.objects.n_bytes.tolist() == expected.objects.n_bytes.tolist()
    assert not found.objects.modified.any()
    assert not any(found.objects.etags)
    for path, table in expected.arrays.items():
        for field in ("objects", "offsets", "sizes"):
            np.testing.assert_array_equal(getattr(found.arrays[path], field), getattr(table, field))


def test_linking_over_a_network_takes_a_small_part_of_the_file(folder: Path, web: WebServer) -> None:
    """Tables, cells and features are a small part of the bytes, in few requests."""
    size = (folder / "large.h5ad").stat().st_size
    place = Location(f"{web.address}/large.h5ad").in_small_blocks()
    with closing(open_source(place)) as source:
        source.cells()
        source.features("var")
        linked(source, place, "X")
    ranges = [request.rpartition("=")[2].split("-") for request in web.requests]
    n_bytes = sum(min(int(stop), size - 1) - int(start) + 1 for start, stop in ranges)
    assert n_bytes < size / 8
    assert len(ranges) < 40
    assert any(int(stop) - int(start) + 1 == SMALL_BLOCK for start, stop in ranges)


def test_one_listing_tells_of_all_objects_in_a_store(folder: Path, tmp_path: Path) -> None:
    """Sizes, ETags and times are those that requests for the objects answer."""
    with GoogleStorage() as server, FaultyProxy(server.address) as proxy:
        server.buckets["cells"] = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                server.put("cells", path.relative_to(folder).as_posix(), path.read_bytes())
        options = google_options(tmp_path / "account.json", proxy.address)
        place = Location("gs://cells/sharded.zarr", options)
        with closing(open_source(place)) as source:
            proxy.forget()
            found, _ = linked(source, place, "X")
        stored = server.buckets["cells"]
        for key, etag, when in zip(found.objects.keys, found.objects.etags, found.objects.modified, strict=True):
            kept = stored[f"sharded.zarr/{key}"]
            assert etag == f'"{kept.generation}"'
            assert when == int(kept.when) * 10**9
        assert found.objects.n_bytes.tolist() == [
            (folder / "sharded.zarr" / key).stat().st_size for key in found.objects.keys
        ]
        one = Location("gs://cells/large.h5ad", options)
        with closing(open_source(one)) as source:
            objects = linked(source, one, "X")[0].objects
        assert objects.etags[0] == f'"{stored["large.h5ad"].generation}"'
        assert objects.modified.tolist() == [int(stored["large.h5ad"].when) * 10**9]
