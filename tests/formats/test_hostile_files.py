"""Damaged and hostile files: each is refused by name, before memory is taken."""

import json
import os
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

import raggedatlas as ra
from raggedatlas.errors import LimitError, MissingExtraError, NotFoundError, SourceError, StoreError
from raggedatlas.formats.anndata.validation import validate
from raggedatlas.formats.containers import open_hdf5
from raggedatlas.formats.registry import detect, list_sources, open_source

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture
def h5ad(tmp_path: Path) -> Path:
    """A small good file."""
    obs = pd.DataFrame({"kind": pd.Categorical(list("TBT"))}, index=["c0", "c1", "c2"])
    adata = ad.AnnData(sp.csr_matrix(np.eye(3, 4, dtype=np.float32)), obs=obs, var=pd.DataFrame(index=list("abcd")))
    adata.layers["l"] = np.ones((3, 4), np.float32)
    adata.obsm["e"] = np.ones((3, 2))
    adata.write_h5ad(tmp_path / "x.h5ad")
    return tmp_path / "x.h5ad"


def use(path: Path) -> None:
    """Read everything a file offers."""
    source = open_source(path)
    try:
        source.cells()
        for matrix in source.describe().matrices:
            source.features(matrix.features) if matrix.features else None
            list(source.blocks((matrix.key,), 2))
    finally:
        source.close()


def replace(file: h5py.File, name: str, values: Any, **options: Any) -> None:
    attributes = dict(file[name].attrs)
    del file[name]
    made = file.create_dataset(name, data=values, **options)
    made.attrs.update(attributes)


CHANGES: dict[str, tuple[str, Any]] = {
    "pointers go down": ("X.*decrease at cell 'c1'", lambda f: replace(f, "X/indptr", np.array([0, 2, 1, 3]))),
    "pointers end early": ("X.*end at 2", lambda f: replace(f, "X/indptr", np.array([0, 1, 2, 2]))),
    "column out of range": ("cell 'c1'", lambda f: replace(f, "X/indices", np.array([0, 9, 2]))),
    "shape of X": ("X has shape", lambda f: f["X"].attrs.__setitem__("shape", np.array([4, 4]))),
    "shape of layer": ("layers/l has shape", lambda f: replace(f, "layers/l", np.ones((3, 5)))),
    "shape of obsm": ("obsm/e has shape", lambda f: replace(f, "obsm/e", np.ones((2, 2)))),
    "unknown encoding of X": ("X is stored as", lambda f: f["X"].attrs.__setitem__("encoding-type", "coo")),
    "no data": ("lacks one of", lambda f: f.__delitem__("X/data")),
    "no obs": ("no AnnData", lambda f: f.__delitem__("obs")),
    "obs is an array": ("table belongs", lambda f: (f.__delitem__("obs"), f.__setitem__("obs", np.ones(3)))),
    "no index": ("no index column", lambda f: f.__delitem__("obs/_index")),
    "short column": ("obs/kind/codes", lambda f: replace(f, "obs/kind/codes", np.zeros(2, np.int8))),
    "code out of range": ("obs", lambda f: replace(f, "obs/kind/codes", np.array([0, 7, 1], np.int8))),
    "unknown column encoding": ("obs", lambda f: f["obs/kind"].attrs.__setitem__("encoding-type", "odd")),
    "text as values": ("type", lambda f: replace(f, "layers/l", np.full((3, 4), b"x"))),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_damaged_files_are_refused_by_name(h5ad: Path, name: str) -> None:
    """Each way to damage a file is told with its path, the element and, where there is one, the first cell."""
    said, change = CHANGES[name]
    with h5py.File(h5ad, "r+") as file:
        change(file)
    with pytest.raises(SourceError, match=said) as caught:
        use(h5ad)
    assert str(h5ad) in str(caught.value)


def test_links_out_of_the_file_are_never_followed(h5ad: Path, tmp_path: Path) -> None:
    """External links, external storage and virtual datasets are refused by element."""
    (tmp_path / "secret").write_bytes(b"\x01" * 96)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.ones((3, 4))
    layout = h5py.VirtualLayout(shape=(3, 4), dtype="f8")
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", shape=(3, 4))
    makers = [
        lambda f: f.__setitem__("layers/bad", h5py.ExternalLink(str(tmp_path / "other.h5"), "x")),
        lambda f: f.create_virtual_dataset("layers/bad", layout),
        lambda f: f.create_dataset("layers/bad", (3, 4), "f8", external=[(str(tmp_path / "secret"), 0, 96)]),
    ]
    for make in makers:
        with h5py.File(h5ad, "r+") as file:
            make(file)
        with pytest.raises(SourceError, match="layers/bad"):
            use(h5ad)
        with h5py.File(h5ad, "r+") as file:
            del file["layers/bad"]
    use(h5ad)


def nest(file: h5py.File) -> None:
    """Make 30 groups, each linked twice: 2**30 paths."""
    group = file["uns"]
    for _ in range(30):
        inner = group.create_group("a")
        inner.attrs.update({"encoding-type": "dict", "encoding-version": "0.1.0"})
        group["b"] = inner
        group = inner


LINKS: dict[str, tuple[str, Any]] = {
    "root": ("uns/x is a second link to the root", lambda f: f.__setitem__("uns/x", f["/"])),
    "parent": ("uns/x is a second link to uns,", lambda f: f.__setitem__("uns/x", f["uns"])),
    "array": ("uns/x is a second link to layers/l,", lambda f: f.__setitem__("uns/x", f["layers/l"])),
    "soft": ("uns/x is a second link to layers/l,", lambda f: f.__setitem__("uns/x", h5py.SoftLink("/layers/l"))),
    "in a frame": ("is a second link to obsm/e,", lambda f: f.__setitem__("obsm/f", f["obsm/e"])),
    "nested": ("uns/b is a second link to uns/a,", nest),
    "nothing": ("uns/x", lambda f: f.__setitem__("uns/x", h5py.SoftLink("/absent"))),
}


@pytest.mark.parametrize("name", list(LINKS))
@pytest.mark.timeout(30)
def test_an_object_with_two_names_is_refused(h5ad: Path, name: str) -> None:
    """Links to what has a name already would make a file endless: reading names the second one, and so does validation."""
    said, change = LINKS[name]
    with h5py.File(h5ad, "r+") as file:
        change(file)
    for read in (use, ra.read):
        with pytest.raises(SourceError, match=said):
            read(h5ad)
    problems = validate(h5ad)
    assert {problem.rule for problem in problems} == {"A00"}
    assert len(problems) <= 30


def test_members_of_a_zip_file_that_share_bytes_are_refused(h5ad: Path, tmp_path: Path) -> None:
    """A directory of a zip file can name the same bytes again and again."""
    path = tmp_path / "x.zarr.zip"
    with warnings.catch_warnings(action="ignore"), zarr.storage.ZipStore(path, mode="w") as store:
        ad.io.write_elem(zarr.open_group(store, mode="w"), "/", ad.read_h5ad(h5ad))
    use(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("new", b"x")
        first = archive.infolist()[0]
        archive.getinfo("new").header_offset = first.header_offset
    with pytest.raises(SourceError, match="new has the bytes of"):
        use(path)


@pytest.mark.parametrize("place", ["layers/l", "layers/l/c/0/0", "obs", "uns/x"])
def test_symlinks_in_zarr_folders_are_refused(h5ad: Path, tmp_path: Path, place: str) -> None:
    """A group, array or chunk that is elsewhere is not followed, by path or in an open group; the folder itself may be a link."""
    folder, moved = tmp_path / "x.zarr", tmp_path / "moved"
    with warnings.catch_warnings(action="ignore"):
        ad.io.write_elem(zarr.open_group(folder, mode="w", zarr_format=3), "/", ad.read_h5ad(h5ad))
    (tmp_path / "link.zarr").symlink_to(folder)
    use(tmp_path / "link.zarr")
    (folder / place).rename(moved) if (folder / place).exists() else (folder / "layers" / "l").rename(moved)
    (folder / place).symlink_to(moved)
    for read in (lambda: use(folder), lambda: open_source(zarr.open_group(folder, mode="r")), lambda: validate(folder)):
        with pytest.raises(StoreError, match=f"{place} is a symlink"):
            read()


def test_elements_outside_of_matrices_have_a_limit_of_their_own(h5ad: Path) -> None:
    """Eight arrays of 200 MB in `uns` are refused before one is read; the argument lets them in."""
    with h5py.File(h5ad, "r+") as file:
        for i in range(8):
            file.create_dataset(f"uns/g/{i}", (25_000_000,), "f8", chunks=(1 << 20,), compression="gzip")
        file["uns/g"].attrs.update({"encoding-type": "dict", "encoding-version": "0.1.0"})
    for read in (use, ra.read):
        with pytest.raises(LimitError, match=r"uns/g 1,600,000,000 of them.*max_element_bytes"):
            read(h5ad)
    open_source(h5ad, max_element_bytes=1 << 31).close()


def test_declared_sizes_are_checked_before_memory_is_taken(h5ad: Path) -> None:
    """Arrays of 10**12 declared elements and giant chunks are refused, wherever they stand."""
    huge = {"shape": (10**12,), "dtype": "f8", "chunks": (1 << 16,), "compression": "gzip"}
    places: dict[str, dict[str, Any]] = {
        "layers/bad": {**huge, "shape": (10**6, 10**6), "chunks": (1 << 8, 1 << 8)},
        "obs/bad": huge,
        "X/data": huge,
        "obsm/bad": {"shape": (3, 1 << 28), "dtype": "f8", "chunks": (3, 1 << 27), "compression": "gzip"},
    }
    for name, options in places.items():
        with h5py.File(h5ad, "r+") as file:
            kept = file[name][()] if name in file else None
            if kept is not None:
                del file[name]
            file.create_dataset(name, **options)
            columns = file["obs"].attrs["column-order"]
            file["obs"].attrs["column-order"] = [*columns, "bad"] if name == "obs/bad" else columns
        with pytest.raises(LimitError, match=name):
            use(h5ad)
        with h5py.File(h5ad, "r+") as file:
            del file[name]
            file["obs"].attrs["column-order"] = columns
            if kept is not None:
                file[name] = kept
    use(h5ad)


def test_a_row_longer_than_sense_is_refused(h5ad: Path) -> None:
    """A row that claims millions of entries in a few columns is told by its cell."""
    n = 1 << 21
    with h5py.File(h5ad, "r+") as file:
        replace(file, "X/indptr", np.array([0, 1, n, n]))
        replace(file, "X/indices", np.zeros(n, np.int32), compression="gzip")
        replace(file, "X/data", np.zeros(n, np.float32), compression="gzip")
    with pytest.raises(LimitError, match="cell 'c1'"):
        use(h5ad)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.7, 0.97])
def test_cut_files_are_refused(tmp_path: Path, kept: float) -> None:
    """A file cut anywhere is refused by name, never with another error."""
    whole = (DATA / "pbmc68k_reduced.h5ad").read_bytes()
    path = tmp_path / "cut.h5ad"
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(SourceError, match=r"cut\.h5ad"):
        use(path)


def test_flipped_bytes_never_raise_anything_else(tmp_path: Path) -> None:
    """Bytes overwritten at random places give the data, or a refusal of ours."""
    whole = bytearray((DATA / "pbmc68k_reduced.h5ad").read_bytes())
    rng = np.random.default_rng(0)
    for _ in range(25):
        damaged = bytearray(whole)
        for position in rng.integers(0, len(whole), 40):
            damaged[position] = int(rng.integers(0, 256))
        (tmp_path / "x.h5ad").write_bytes(damaged)
        try:
            use(tmp_path / "x.h5ad")
        except (SourceError, LimitError, MissingExtraError):
            continue


def test_missing_plugin_names_the_extra(h5ad: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter that is not installed is told with the extra that brings it; an installed one just works."""
    hdf5plugin = pytest.importorskip("hdf5plugin")
    with h5py.File(h5ad, "r+") as file:
        replace(file, "layers/l", np.ones((3, 4), np.float32), **hdf5plugin.Zstd())
    use(h5ad)
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: code < 32000 and code <= 3)
    with pytest.raises(MissingExtraError, match=r"raggedatlas\[plugins\]"):
        use(h5ad)


@pytest.mark.parametrize(
    ("array", "change", "said"),
    [
        ("obs/kind/codes", {"filters": [{"id": "pickle"}]}, "pickle"),
        ("layers/l", {"chunks": [3, 10**10]}, "layers/l"),
    ],
)
def test_zarr_arrays_that_run_code_or_take_too_much_are_refused(
    h5ad: Path, tmp_path: Path, array: str, change: Any, said: str
) -> None:
    """A Zarr array with a pickle filter, and one whose chunks decode to more than memory may hold, are refused before a byte is decoded."""
    with warnings.catch_warnings(action="ignore"):
        group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
        ad.io.write_elem(group, "/", ad.read_h5ad(h5ad))
    use(tmp_path / "x.zarr")
    place = tmp_path / "x.zarr" / array / ".zarray"
    place.write_text(json.dumps(json.loads(place.read_text()) | change))
    with pytest.raises((SourceError, LimitError), match=said):
        use(tmp_path / "x.zarr")


def test_unknown_things_are_told_what_is_supported(tmp_path: Path) -> None:
    """Absent paths, unknown endings, folders and objects are refused with the list of what can be read."""
    (tmp_path / "x.csv").write_text("a,b")
    (tmp_path / "x.h5ad").write_text("no HDF5")
    (tmp_path / "empty").mkdir()
    for path, kind in (
        (tmp_path / "no.h5ad", NotFoundError),
        (tmp_path / "x.csv", SourceError),
        (tmp_path / "empty", SourceError),
        (tmp_path / "x.h5ad", SourceError),
    ):
        with pytest.raises(kind, match=path.name):
            open_source(path)
    with pytest.raises(SourceError, match=r"\.h5ad"):
        open_source(42)
    with pytest.raises(SourceError, match="means nothing"):
        open_source(DATA / "lung_C144.h5", colour="red")
    with pytest.raises(SourceError, match="folder"):
        open_hdf5(tmp_path / "empty")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_files_are_refused(h5ad: Path) -> None:
    """A file without read permission is told."""
    h5ad.chmod(0)
    with pytest.raises(SourceError, match="permissions"):
        open_source(h5ad)


def test_folders_list_what_they_hold(tmp_path: Path) -> None:
    """A folder of files lists every recognised one, sorted; a 10x folder or a Zarr folder is one source."""
    assert [p.name for p in list_sources(DATA)] == sorted(
        p.name for p in DATA.iterdir() if p.suffix in (".h5", ".h5ad", ".h5mu") or p.name.endswith(".zarr.zip")
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "matrix.mtx").touch()
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr" / ".zgroup").touch()
    assert list_sources(tmp_path / "run") == [tmp_path / "run"]
    assert list_sources(tmp_path) == [tmp_path / "a.zarr", tmp_path / "run"]
    assert [detect(p) for p in list_sources(tmp_path)] == ["zarr", "10x-mtx"]
    with pytest.raises(NotFoundError, match="absent"):
        list_sources(tmp_path / "absent")
    (tmp_path / "none").mkdir()
    with pytest.raises(SourceError, match="nothing"):
        list_sources(tmp_path / "none")


def test_what_is_a_source_already_is_taken() -> None:
    """A source is returned as it is."""
    source = open_source(DATA / "lung_C144.h5")
    assert open_source(source) is source
    source.close()
    with pytest.raises(NotFoundError, match="no matrix"):
        source.blocks(("layers/none",), 1)
    with pytest.raises(NotFoundError, match="no features"):
        source.features("layers/none")
