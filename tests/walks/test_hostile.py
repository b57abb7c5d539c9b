"""Hostile names, values and files, through the calls that people make."""

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pytest
import zarr
from hypothesis import example, given
from hypothesis import strategies as st
from numcodecs import Zstd

import raggedatlas as ra
from raggedatlas.catalog.assets import read_records
from raggedatlas.catalog.catalog import CELLS, DATASETS
from raggedatlas.query.query import Query
from support.atlases import small_anndata

NASTY = [
    "x' OR 1=1 --",
    "'; DROP TABLE cells; --",
    '"',
    "`",
    "\\'",
    "\x00",
    "%",
    "_",
    "",
    "null",
    "é\u202e☃",
    "a\nb",
    "1",
]
texts = st.sampled_from(NASTY) | st.text(max_size=12)
FEW = 96 * 2**20


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Assert that the process never held much more memory inside than before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    yield
    assert resident("VmHWM") - before < FEW


def resident(field: str) -> int:
    """Read a field of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> ra.AtlasView:
    """A view of cells whose notes and names are hostile texts."""
    source = small_anndata(1, len(NASTY))
    source.obs["note"] = [text.replace("\x00", "0") for text in NASTY]
    source.obs["<script>alert(1)"] = NASTY[0]
    source.obs["a`b'c\"d"] = np.arange(len(NASTY))
    atlas = ra.RaggedAtlas.create(str(tmp_path_factory.mktemp("nasty") / "my.atlas"))
    atlas.add(source, "<script>alert(2)", organism="human")
    return atlas.checkout(atlas.snapshot("<b>label"))


@given(st.lists(texts, min_size=1, max_size=3))
@example(["x' OR 1=1 --"])
@example(["\x00"])
@pytest.mark.filterwarnings("ignore::raggedatlas.errors.UnknownValueWarning")
def test_values_are_never_sql(nasty: ra.AtlasView, values: list[str]) -> None:
    """Whatever text is asked for, by mapping or expression, the cells that hold exactly it are chosen."""
    notes = nasty.query().to_pandas()["note"]
    for condition, chosen in (
        ({"note": values}, notes.isin(values)),
        (ra.col("note") == values[0], notes == values[0]),
        (~(ra.col("note") == values[0]), notes != values[0]),
        (ra.col("note").isin(values), notes.isin(values)),
    ):
        assert nasty.query().where(condition).to_pandas().index.tolist() == notes.index[chosen].tolist()


@given(texts)
def test_names_are_never_sql(nasty: ra.AtlasView, name: str) -> None:
    """A name that is no column is refused; one with quotes and backticks that is one is compared with."""
    columns = set(nasty.query().to_pandas().columns) | {"uid", "dataset_uid"}
    if name not in columns:
        with pytest.raises(ra.AtlasError):
            nasty.query().where({name: 1}).count()
    assert nasty.query().where({"a`b'c\"d": [1, 3]}).count() == 2


@pytest.mark.parametrize("name", ["../evil", "a/b", "..", "/etc/passwd", ".hidden", "<b>", "a\x00b", "' OR 1=1 --"])
def test_names_of_datasets_never_become_paths(tmp_path: Path, name: str) -> None:
    """A dataset may be called anything or is refused; nothing is written outside the atlas, and it is found again."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "in" / "my.atlas"))
    with contextlib.suppress(ra.AtlasError):
        atlas.add(small_anndata(1), name, organism="human")
        assert atlas.dataset(name).to_anndata().n_obs == 10
        atlas.drop_dataset(name)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["my.atlas"]
    assert len(atlas.list_datasets()) == 0


@pytest.fixture
def atlas(tmp_path: Path) -> ra.RaggedAtlas:
    """An atlas of one small dataset."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "my.atlas"))
    atlas.add(small_anndata(1), "one", organism="human")
    atlas.optimize()
    return atlas


def group_of(atlas: ra.RaggedAtlas) -> tuple[str, Path]:
    """Return the group of the only dataset and its folder."""
    group = read_records(atlas._catalog)[0].zarr_group
    return group, Path(atlas.uri, "zarr_store", *group.split("/"))


@pytest.mark.parametrize("hostile", ["../../outside", "..", "/etc", "a/../../b", ".git"])
def test_group_names_never_leave_the_store(atlas: ra.RaggedAtlas, tmp_path: Path, hostile: str) -> None:
    """A record or a cell that names a group outside the store is refused, and nothing there is removed."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "keep").write_text("")
    view = atlas.checkout(atlas.snapshot("good"))
    tables = atlas._catalog.tables
    good, _ = group_of(atlas)
    tables.open(DATASETS).update({"zarr_group": f"'{hostile}'", "arrays": f"replace(arrays, '{good}', '{hostile}')"})
    tampered = ra.RaggedAtlas.open(atlas.uri)
    with pytest.raises(ra.AtlasError):
        tampered.dataset("one").to_anndata()
    with contextlib.suppress(ra.AtlasError):
        assert tampered.validate("deep")
    with contextlib.suppress(ra.AtlasError):
        tampered.repair()
        tampered.gc(dry_run=False)
    assert (tmp_path / "outside" / "keep").exists()
    assert view.query().to_anndata().n_obs == 10


def test_symlinks_in_the_store_are_refused(atlas: ra.RaggedAtlas, tmp_path: Path) -> None:
    """A group that is a link to another place is neither read nor removed."""
    view = atlas.checkout(atlas.snapshot("good"))
    _, folder = group_of(atlas)
    moved = folder.parent.rename(tmp_path / "moved")
    folder.parent.symlink_to(moved)
    with pytest.raises(ra.AtlasError, match="symlink"):
        view.query().to_anndata()
    with contextlib.suppress(ra.AtlasError):
        atlas.purge("one")
    assert (moved / folder.name / "csr" / "indices" / "c" / "0").exists()


def test_a_bomb_in_the_atlas_is_refused(atlas: ra.RaggedAtlas) -> None:
    """A stored array whose bytes were replaced by ones that decode to a gigabyte is corrupt, before memory is taken."""
    view = atlas.checkout(atlas.snapshot("good"))
    _, folder = group_of(atlas)
    bomb = bytes(Zstd(3).encode(np.zeros(2**26, np.uint8)))
    (folder / "csr" / "indices" / "c" / "0").write_bytes(bomb)
    with little_memory(), pytest.raises(ra.AtlasError):
        view.query().to_anndata()


def test_pointers_beyond_the_arrays_are_refused(atlas: ra.RaggedAtlas) -> None:
    """Cells that claim 10^12 entries are refused before memory is taken."""
    tables = atlas._catalog.tables
    pointers = tables.read(CELLS, ["gene_expression"]).column("gene_expression").combine_chunks()
    fields = ", ".join(
        f"'{f.name}', " + ("1000000000000" if f.name == "end" else f"gene_expression['{f.name}']")
        for f in pointers.type
    )
    tables.open(CELLS).update({"gene_expression": f"named_struct({fields})"})
    with little_memory(), pytest.raises(ra.AtlasError):
        Query(atlas._catalog).to_anndata()
    with little_memory():
        assert "pointer" in str(atlas.validate("rows"))
    with pytest.raises(ra.AtlasError):
        atlas.snapshot()


def refused(atlas: ra.RaggedAtlas, path: Path) -> None:
    """Assert that a file is refused in little memory, and that the atlas is as it was."""
    groups = sorted(entry.name for entry in Path(atlas.uri, "zarr_store").iterdir())
    with little_memory(), pytest.raises(ra.AtlasError):
        atlas.add(path, organism="human")
    assert atlas.list_datasets()["name"].tolist() == ["one"]
    assert sorted(entry.name for entry in Path(atlas.uri, "zarr_store").iterdir()) == groups


def test_huge_arrays_in_h5ad_are_refused(atlas: ra.RaggedAtlas, tmp_path: Path) -> None:
    """10^12 declared elements in X, or in its parts, are refused."""
    for name, shape, place in (
        ("dense.h5ad", (10**6, 10**6), "X"),
        ("sparse.h5ad", (10**12,), "X/data"),
    ):
        path = tmp_path / name
        source = small_anndata(2)
        with warnings.catch_warnings(action="ignore"):
            source.write_h5ad(path)
        with h5py.File(path, "r+") as file:
            attributes = dict(file[place].attrs)
            del file[place]
            made = file.create_dataset(place, shape, "f4", chunks=tuple(min(n, 256) for n in shape), compression="gzip")
            made.attrs.update(attributes if place != "X" else {"encoding-type": "array", "encoding-version": "0.2.0"})
        refused(atlas, path)


def edited(tmp_path: Path, place: str, change: Any) -> Path:
    """Write an AnnData Zarr folder, and change the metadata of one of its arrays."""
    path = tmp_path / "x.zarr"
    with warnings.catch_warnings(action="ignore"):
        small_anndata(2).write_zarr(path)
    (path / ".zmetadata").unlink(missing_ok=True)
    version = 3 if (path / "zarr.json").exists() else 2
    root = path / "zarr.json"
    if version == 3:
        metadata = json.loads(root.read_text())
        metadata.pop("consolidated_metadata", None)
        root.write_text(json.dumps(metadata))
    file = path / place / ("zarr.json" if version == 3 else ".zarray")
    metadata = json.loads(file.read_text())
    change(metadata, version)
    file.write_text(json.dumps(metadata))
    return path


def declare_much(metadata: dict[str, Any], version: int) -> None:
    metadata["shape"] = [10**12]
    if version == 3:
        metadata["chunk_grid"]["configuration"]["chunk_shape"] = [10**12]
    else:
        metadata["chunks"] = [10**12]


def pickle_codec(metadata: dict[str, Any], version: int) -> None:
    if version == 3:
        metadata["codecs"] = [{"name": "numcodecs.pickle", "configuration": {}}]
    else:
        metadata["filters"] = [{"id": "pickle", "protocol": 5}]


@pytest.mark.parametrize("change", [declare_much, pickle_codec])
@pytest.mark.parametrize("place", ["X/data", "X/indices"])
def test_hostile_zarr_metadata_are_refused(atlas: ra.RaggedAtlas, tmp_path: Path, place: str, change: Any) -> None:
    """A declared chunk of 10^12 elements and a pickle codec in a Zarr source are refused."""
    refused(atlas, edited(tmp_path, place, change))


def test_pickled_objects_in_zarr_are_refused(atlas: ra.RaggedAtlas, tmp_path: Path) -> None:
    """A Zarr v2 column of objects behind a pickle filter is refused, and its code does not run."""
    path = tmp_path / "x.zarr"
    with warnings.catch_warnings(action="ignore"), ad.settings.override(zarr_write_format=2):
        small_anndata(2).write_zarr(path)
    obs = path / "obs"
    names = zarr.open_group(path, mode="r")["obs"].attrs["column-order"]
    target = obs / str(names[1])
    for file in target.glob("*"):
        if file.is_file():
            file.unlink()
    metadata = {
        "zarr_format": 2, "shape": [10], "chunks": [10], "dtype": "|O", "fill_value": None, "order": "C",
        "compressor": None, "filters": [{"id": "pickle", "protocol": 5}],
    }  # fmt: skip
    (target / ".zarray").write_text(json.dumps(metadata))
    (target / "0").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    for file in (path / ".zmetadata",):
        file.unlink(missing_ok=True)
    with pytest.raises(ra.AtlasError):
        atlas.add(path, organism="human")
    assert not (tmp_path / "ran").exists()
