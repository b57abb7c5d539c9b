"""Damaged and hostile atlases: every read gives the values that were written or `CorruptError`, never a crash or a foreign error."""

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp
from hypothesis import settings

import raggedatlas as ra
from campaigns.mutation_campaign import digest, make_atlas, run_campaign
from raggedatlas.catalog.array_checks import check_bytes
from raggedatlas.catalog.assets import array_columns, read_records, read_specs
from raggedatlas.catalog.catalog import DATASETS, Catalog, open_catalog
from raggedatlas.catalog.cells import check_bundle
from raggedatlas.catalog.validation import validate
from raggedatlas.errors import AtlasError, CorruptError, NameRefusedError, NotFoundError, StoreError
from raggedatlas.model.arrays import ArraySpec
from raggedatlas.model.records import DATASETS_SCHEMA, DatasetRecord
from raggedatlas.query.query import Query
from raggedatlas.store.arrays import ArrayWriter, describe_group, read_group
from raggedatlas.store.location import Location
from raggedatlas.store.manifests import read_manifest
from raggedatlas.store.read import ArrayReader, read_slice
from support.atlases import GENES, small_anndata

N_CELLS = 40


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An atlas of one dataset with a column-sorted copy, a sparse matrix and an element next to its layers, and a snapshot."""
    made = small_anndata(1, N_CELLS, GENES)
    made.obsp["near"] = sp.random(N_CELLS, N_CELLS, 0.2, "csr", np.float32, random_state=0)
    made.obsm["pca"] = np.arange(N_CELLS * 2, dtype=np.float32).reshape(-1, 2)
    made.uns["note"] = {"text": "kept"}
    folder = tmp_path_factory.mktemp("sound")
    made.write_h5ad(folder / "d.h5ad")
    path = folder / "atlas"
    atlas = ra.RaggedAtlas.create(str(path))
    atlas.add(folder / "d.h5ad", name="d", progress=False)
    atlas.add_csc("d", space="gene_expression")
    # A snapshot alone makes no index for so few cells.
    atlas.optimize()
    atlas.snapshot()
    return path


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(sound, tmp_path / "atlas"))


def change_record(path: Path, change: Callable[[DatasetRecord], dict[str, Any]]) -> Catalog:
    """Rewrite the only record of an atlas."""
    catalog = open_catalog(Location(str(path)))
    (record,) = read_records(catalog)
    changed = record.model_copy(update=change(record))
    rows = pa.Table.from_pylist([changed.model_dump()], schema=DATASETS_SCHEMA)
    assert catalog.tables.overwrite_if(DATASETS, rows, catalog.tables.version(DATASETS))
    return catalog


def rewrite_array(
    path: Path, name: str, change: Callable[[np.ndarray[Any, Any]], object], *, noted: bool = True
) -> None:
    """Write an array of the dataset anew with other values and valid checksums, those of the values in the record if `noted`."""
    catalog = open_catalog(Location(str(path)))
    (record,) = read_records(catalog)
    spec = ArraySpec.from_json(json.dumps(record.array_specs[name]))
    values = read_slice(ArrayReader(catalog.arrays, spec), 0, spec.n_rows)
    change(values)
    shutil.rmtree(path / "zarr_store" / spec.path, ignore_errors=True)
    writer = ArrayWriter(catalog.arrays, spec.path, values.dtype, spec.row_shape, profile=catalog.codec())
    writer.append(values)
    specs = read_specs(record) | {name: writer.close(listed=True)}
    group = read_group(catalog.arrays, record.zarr_group)
    describe_group(catalog.arrays, record.zarr_group, group.attributes, specs)
    checksums = record.array_checksums | (writer.checksums(name) if noted else {})
    change_record(path, lambda _: array_columns(specs, checksums))


def at(row: int, value: int) -> Callable[[np.ndarray[Any, Any]], None]:
    def change(values: np.ndarray[Any, Any]) -> None:
        values[row] = value

    return change


def swapped(values: np.ndarray[Any, Any]) -> None:
    steps = np.flatnonzero(np.diff(values))
    values[[steps[0], steps[0] + 1]] = values[[steps[0] + 1, steps[0]]]


HOSTILE = {
    "far": at(1, 2**40),
    "negative": at(5, -(2**40)),
    "swapped": swapped,
    "late": at(0, 1),
    "long": at(-1, 2**50),
}


def uses(path: Path, folder: Path) -> dict[str, Callable[[], Any]]:
    """Everything that may read bounds of rows or columns, as calls that give a matrix."""
    atlas = ra.RaggedAtlas.open(str(path))
    query = atlas.checkout(atlas.snapshot()).query

    def few() -> Any:
        return query().features(list(GENES[:2]))

    def loaded(some: Any) -> Any:
        return np.concatenate([batch.X.toarray() for batch in ra.Loader(some, batch_size=16, shuffle=None)])

    def written(source: Any, name: str) -> Any:
        source.write(folder / name)
        return ad.read_h5ad(folder / name).X

    return {
        "dataset": lambda: atlas.dataset("d").to_anndata().X,
        "dataset write": lambda: written(atlas.dataset("d"), "dataset.h5ad"),
        "element": lambda: atlas.dataset("d").element("obsp/near"),
        "query": lambda: query().to_anndata().X,
        "query write": lambda: written(query(), "query.h5ad"),
        "few features": lambda: few().to_anndata().X,
        "few features write": lambda: written(few(), "few.h5ad"),
        "aggregate": lambda: few().aggregate(["cell_type"]),
        "loader": lambda: loaded(query()),
        "loader of few features": lambda: loaded(few()),
    }


@pytest.fixture(scope="module")
def expected(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the uses give before anything is damaged, hashed."""
    folder = tmp_path_factory.mktemp("expected")
    path = Path(shutil.copytree(sound, folder / "atlas"))
    return {name: digest(use()) for name, use in uses(path, folder).items()}


READERS = {
    "csr/indptr": {"dataset", "dataset write"},
    "csc/indptr": {"few features", "few features write", "aggregate"},
    "extras/1/indptr": {"dataset", "dataset write", "element"},
}
"""Array of bounds -> what reads it. Queries and loaders take the rows' bounds from the cells, and only queries use columns."""


@pytest.mark.parametrize("kind", list(HOSTILE))
@pytest.mark.parametrize("path", list(READERS))
def test_bounds_that_do_not_ascend_are_refused_by_every_reader(
    expected: dict[str, str], copied: Path, tmp_path: Path, path: str, kind: str
) -> None:
    """Bounds with valid checksums that leave the entries give `CorruptError`, or are not read; validation finds them."""
    rewrite_array(copied, path, HOSTILE[kind])
    for name, use in uses(copied, tmp_path).items():
        if name in READERS[path]:
            with pytest.raises(CorruptError, match=r"bounds in .*indptr"):
                use()
        elif kind == "swapped":
            assert digest(use()) == expected[name], name
    problems = validate(open_catalog(Location(str(copied))), "deep")
    found = {p.rule: p.message for p in problems}
    assert path in found["entry-bounds"]
    # The snapshot from before the change has the former checksum, and the former description of the array.
    assert found.keys() <= {"entry-bounds", "checksum", "array-metadata", "group-metadata", "table-file"}


@pytest.mark.parametrize("kind", list(HOSTILE))
def test_a_copy_is_not_made_of_bounds_that_do_not_ascend(copied: Path, kind: str) -> None:
    """`add_csc` refuses the bounds of the rows that it copies."""

    def without_copy(record: DatasetRecord) -> dict[str, Any]:
        return {"arrays": json.dumps({k: v for k, v in record.array_specs.items() if not k.startswith("csc/")})}

    # A copy that a snapshot has would be taken.
    for version in ra.RaggedAtlas.open(str(copied)).list_versions():
        ra.RaggedAtlas.open(str(copied)).drop_snapshot(version.version)
    change_record(copied, without_copy)
    rewrite_array(copied, "csr/indptr", HOSTILE[kind])
    with pytest.raises(CorruptError, match=r"bounds in .*indptr"):
        ra.RaggedAtlas.open(str(copied)).add_csc("d", space="gene_expression")


def test_a_copy_is_not_made_of_a_layer_without_an_array(copied: Path) -> None:
    """`add_csc` refuses a record that names a layer, and no array of it; KeyError came out."""
    change_record(copied, lambda _: {"layers": ["\0"]})
    with pytest.raises(CorruptError, match=r"names no array 'csr/layers/"):
        ra.RaggedAtlas.open(str(copied)).add_csc("d", space="gene_expression")


def test_columns_beyond_the_features_are_refused(copied: Path) -> None:
    """An entry in a column that the dataset has not got is never handed to SciPy."""
    rewrite_array(copied, "csr/indices", at(3, 2**31))
    atlas = ra.RaggedAtlas.open(str(copied))
    for use in (atlas.dataset("d").to_anndata, lambda: atlas.checkout(atlas.snapshot()).query().to_anndata()):
        with pytest.raises(CorruptError):
            use()


@pytest.mark.parametrize("path", ["csr/indptr", "columns", "extras/elements"])
def test_arrays_that_are_read_at_once_are_compared_with_their_recorded_checksum(copied: Path, path: str) -> None:
    """Valid other values under valid chunk checksums are found when they are read, before deep validation."""

    def change(values: np.ndarray[Any, Any]) -> None:
        if path == "columns":
            values[:2] = values[1::-1].copy()
        else:
            values[len(values) // 2] += 1

    rewrite_array(copied, path, change, noted=False)
    with pytest.raises(CorruptError, match="checksum"):
        ra.RaggedAtlas.open(str(copied)).dataset("d").to_anndata()


def test_every_flipped_bit_of_a_kept_frame_is_found_when_it_is_read(copied: Path) -> None:
    """No reader sees a frame whose bytes are not those that were written."""
    (record,) = read_records(open_catalog(Location(str(copied))))
    assert record.file_facts.bundle is not None
    for name, span in record.file_facts.bundle.frames.items():
        file = copied / "zarr_store" / span.file
        data = file.read_bytes()
        for bit in np.random.default_rng(0).integers(8 * span.offset, 8 * (span.offset + span.n_bytes), 40).tolist():
            flip(file, data, bit)
            dataset = ra.RaggedAtlas.open(str(copied)).dataset("d")
            with pytest.raises(CorruptError, match="SHA-256"):
                _ = dataset.obs if name == "obs" else dataset.var()
        file.write_bytes(data)


def test_every_flipped_bit_of_a_bundle_is_found(copied: Path) -> None:
    """Deep validation covers what no reader looks at, such as the directory and the padding."""
    catalog = open_catalog(Location(str(copied)))
    (record,) = read_records(catalog)
    facts = record.file_facts.bundle
    assert facts is not None
    check = partial(check_bundle, catalog.arrays, f"{record.uid}/bundle.zip", facts)
    assert check() == []
    (file,) = (copied / "zarr_store").glob("*/bundle.zip")
    data = file.read_bytes()
    for bit in np.random.default_rng(1).integers(0, 8 * len(data), 200).tolist():
        flip(file, data, bit)
        assert "bundle" in {problem.rule for problem in check()}
    for cut in (data[:-1], data + b"\0", b""):
        file.write_bytes(cut)
        assert "bundle" in {problem.rule for problem in check()}
    file.unlink()
    assert {"missing-array", "frame", "bundle"} <= {problem.rule for problem in validate(catalog, "deep")}
    with pytest.raises((CorruptError, NotFoundError)):
        ra.RaggedAtlas.open(str(copied)).dataset("d").to_anndata()


def test_every_changed_name_or_number_in_the_metadata_of_a_group_is_found(copied: Path) -> None:
    """A group lists its arrays, and nothing of the list can change unnoticed."""
    catalog = open_catalog(Location(str(copied)))
    (file,) = (copied / "zarr_store").glob("*/gene_expression/zarr.json")
    data = file.read_bytes()
    (record,) = read_records(catalog)
    # White space is the only thing that may differ.
    solid = [i for i, byte in enumerate(data) if not chr(byte).isspace()]
    for at_byte in np.random.default_rng(2).choice(solid, 60).tolist():
        flip(file, data, 8 * at_byte)
        problems = check_bytes(catalog.arrays, record)
        assert {problem.rule for problem in problems} & {"group-metadata", "array-metadata", "array-damaged"}, at_byte


def flip(file: Path, data: bytes, bit: int) -> None:
    """Write some bytes with one bit flipped."""
    other = bytearray(data)
    other[bit // 8] ^= 1 << bit % 8
    file.write_bytes(other)


SPANS = {
    "beyond the end": {"offset": 2**40},
    "too long": {"n_bytes": 2**40},
    "negative": {"offset": -1},
    "no number": {"offset": "0"},
    "elsewhere": {"file": "../../secret"},
    "another file": {"file": "missing/bundle.zip"},
    "no part": {"offset": 0, "n_bytes": 0},
}


@pytest.mark.parametrize("kind", list(SPANS))
def test_a_part_that_is_not_in_its_file_is_refused(copied: Path, kind: str) -> None:
    """Wherever a record says that small arrays and frames are, nothing outside the file is read."""

    def moved(record: DatasetRecord) -> dict[str, Any]:
        facts, arrays = json.loads(record.facts), record.array_specs
        facts["bundle"]["frames"]["obs"] |= SPANS[kind]
        arrays["csr/indptr"]["within"] |= SPANS[kind]
        return {"facts": json.dumps(facts), "arrays": json.dumps(arrays)}

    catalog = change_record(copied, moved)
    with pytest.raises((CorruptError, NotFoundError, NameRefusedError)):
        ra.RaggedAtlas.open(str(copied)).dataset("d").to_anndata()
    assert {problem.rule for problem in validate(catalog, "rows")} & {"missing-array", "array-spec"}


def test_a_frame_without_a_recorded_hash_is_refused(copied: Path) -> None:
    """A record that has lost the hashes of the frames is damaged."""

    def unhashed(record: DatasetRecord) -> dict[str, Any]:
        facts = json.loads(record.facts)
        del facts["frames"]
        return {"facts": json.dumps(facts)}

    change_record(copied, unhashed)
    with pytest.raises(CorruptError, match=r"its SHA-256 is not the one that was recorded"):
        _ = ra.RaggedAtlas.open(str(copied)).dataset("d").obs


DAMAGED_FIELDS: dict[str, dict[str, Any]] = {
    "no JSON": {"facts": "{"},
    "a list": {"facts": "[]"},
    "a number of cells that is text": {"facts": '{"n_cells": "many"}'},
    "no dtype": {"facts": '{"layers": {"counts": {"key": "X", "form": "csr", "dtype": "float33"}}}'},
    "no form": {"facts": '{"layers": {"counts": {"key": "X", "form": "coo", "dtype": "<f4"}}}'},
    "no key": {"facts": '{"layers": {"counts": {"form": "csr", "dtype": "<f4"}}}'},
    "arrays of numbers": {"arrays": "[1]"},
    "an array of nothing": {"arrays": '{"csr/indices": {}}'},
    "a shape of text": {"arrays": '{"csr/indices": {"path": "a", "shape": "x", "dtype": "u1"}}'},
    "checksums of numbers": {"checksums": '{"csr/indptr": 1}'},
}


@pytest.mark.parametrize("name", list(DAMAGED_FIELDS))
def test_a_damaged_field_of_a_record_is_named(copied: Path, name: str) -> None:
    """Whatever a field holds, readers raise `CorruptError`, which names table and row, and validation reports it."""
    change_record(copied, lambda _: DAMAGED_FIELDS[name])
    atlas = ra.RaggedAtlas.open(str(copied))
    with pytest.raises(CorruptError, match=r"datasets|array"):
        atlas.dataset("d").to_anndata()
    assert {problem.rule for problem in validate(open_catalog(Location(str(copied))), "deep")} & {"array-spec"}


@pytest.mark.parametrize("kind", ["where", "frame"])
def test_categories_of_text_that_are_numbers_are_refused(copied: Path, kind: str) -> None:
    """Metadata of a column whose categories are not of their declared kind give `CorruptError`, also in filters."""
    catalog = open_catalog(Location(str(copied)))
    (key, text) = next(iter(catalog.tables.schema("cells").field("cell_type").metadata.items()))
    facts = json.loads(text)
    facts["categories"][0] = 1e308
    changed = {"cell_type": {key: json.dumps(facts).encode()}}
    catalog.tables.update_field_metadata("cells", lambda _: changed)
    atlas = ra.RaggedAtlas.open(str(copied))

    def use() -> object:
        query = atlas.checkout(atlas.snapshot()).query()
        return (query.where("cell_type = 'B'") if kind == "where" else query).to_pandas()

    with pytest.raises(CorruptError, match=r"(?s)cell_type.*1e\+308"):
        use()


def test_a_sound_atlas_comes_back_equal(sound: Path) -> None:
    """What the other tests damage was added as it is."""
    back = ra.RaggedAtlas.open(str(sound)).dataset("d").to_anndata()
    assert isinstance(back, ad.AnnData)
    assert back.shape == (N_CELLS, len(GENES))


LINKS = {
    "a table": "lance_db/cells.lance",
    "the data of a table": "lance_db/cells.lance/data",
    "a data file": "lance_db/cells.lance/data/*.lance",
    "a version of a table": "lance_db/cells.lance/_versions/*.manifest",
    "an index": "lance_db/cells.lance/_indices/*",
    "a dataset": "zarr_store/*",
    "a group": "zarr_store/*/gene_expression",
    "an array": "zarr_store/*/gene_expression/csr/indices",
    "a folder of chunks": "zarr_store/*/gene_expression/csr/indices/c",
    "a shard": "zarr_store/*/gene_expression/csr/indices/c/0",
    "a bundle": "zarr_store/*/bundle.zip",
    "all arrays": "zarr_store",
    "all tables": "lance_db",
}


@pytest.mark.parametrize("name", list(LINKS))
def test_symlinks_inside_a_store_are_refused(copied: Path, tmp_path: Path, name: str) -> None:
    """Whatever in an atlas is a symlink, even to the same bytes, is not followed."""
    path = next(p for p in sorted(copied.glob(LINKS[name])) if p.name != "zarr.json")
    moved = tmp_path / "moved"
    path.rename(moved)
    path.symlink_to(moved)

    def use() -> object:
        atlas = ra.RaggedAtlas.open(str(copied))
        return atlas.dataset("d").to_anndata(), atlas.checkout(1).query().to_anndata()

    with pytest.raises(StoreError, match="is a symlink"):
        use()


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The atlas of the campaign, whose features are mapped to each other."""
    return make_atlas(tmp_path_factory.mktemp("mapped"))


@pytest.mark.long
@pytest.mark.parametrize(
    "table", ["_feature_layouts", "atlas_versions", "gene_expression_registry", "_feature_identity"]
)
def test_a_table_without_one_of_its_columns_is_refused(mapped: Path, tmp_path: Path, table: str) -> None:
    """Names of columns are in a file of the table; one that is damaged there gives an error of ours, whoever reads it first."""
    names = open_catalog(Location(str(mapped))).tables.schema(table).names
    for n, name in enumerate(names):
        path = Path(shutil.copytree(mapped, tmp_path / str(n)))
        tables = open_catalog(Location(str(path))).tables
        rows = tables.read(table)
        rows = rows.rename_columns([f"x{there}" if there == name else there for there in rows.column_names])
        assert tables.overwrite_if(table, rows, tables.version(table))
        atlas = ra.RaggedAtlas.open(str(path))
        for use in (atlas.list_versions, atlas.features, atlas.dataset("d1").to_anndata, atlas.repair, atlas.validate):
            with contextlib.suppress(AtlasError):
                use()
        shutil.rmtree(path)


@pytest.mark.long
def test_flipped_bits_in_the_metadata_of_a_geometry_store_are_refused_or_change_nothing(
    mapped: Path, tmp_path: Path
) -> None:
    """A dozen of each file: a key that is gone, another codec, another type; no error of another class."""
    path = Path(shutil.copytree(mapped, tmp_path / "atlas"))
    chance, n_refused = random.Random(0), 0
    files = sorted((path / "zarr_store").glob("*/transcripts/**/zarr.json"))
    assert len(files) > 10
    for file in files * 12:
        good = file.read_bytes()
        bit = chance.randrange(8 * len(good))
        file.write_bytes(good[: bit // 8] + bytes([good[bit // 8] ^ 1 << bit % 8]) + good[bit // 8 + 1 :])
        try:
            # Anew, as what was opened is kept.
            ra.RaggedAtlas.open(str(path)).checkout("all").query().geometry()
        except AtlasError:
            n_refused += 1
        file.write_bytes(good)
    assert n_refused > len(files)


@pytest.mark.long
def test_flipped_bits_in_tables_that_are_read_whole_are_refused(mapped: Path, tmp_path: Path) -> None:
    """Datasets, registries, feature lists, identities, ontologies and results: by the next view, naming the file."""
    path = tmp_path / "my.atlas"
    shutil.copytree(mapped, path)
    atlas = ra.RaggedAtlas.open(str(path))
    record = atlas.checkout(atlas.snapshot()).record

    def read() -> None:
        view = ra.RaggedAtlas.checkout_latest(str(path))
        view.query().to_anndata()
        for part in (view.features, view.results, view.geometries, view.identity.history, view.identity.tables):
            part()
        # What the queries for terms and gene names ask for.
        view._catalog.tables.open_all([*record.table_versions])

    read()
    rng = np.random.default_rng(0)
    for table in sorted(record.table_versions.keys() - {"cells"}):
        for file in (path / "lance_db" / f"{table}.lance" / "data").iterdir():
            if f"{table}.lance/data/{file.name}" not in read_manifest(atlas._catalog.tables.location, record.manifest):
                continue
            data = file.read_bytes()
            flip(file, data, int(rng.integers(8 * len(data))))
            with pytest.raises(CorruptError, match=rf"{table}\.lance/data/{file.name} is damaged"):
                read()
            file.write_bytes(data)
    read()


def test_a_record_that_names_too_many_features_is_refused(copied: Path) -> None:
    """Before memory is taken for them."""
    change_record(copied, lambda _: {"n_features": 2**33})
    with pytest.raises(CorruptError, match="a place of its own"):
        ra.RaggedAtlas.open(str(copied)).dataset("d").to_anndata()


@pytest.mark.long
def test_a_record_that_names_pointers_of_another_kind_is_found(mapped: Path, tmp_path: Path) -> None:
    """Deep validation says so, and goes on."""
    path = Path(shutil.copytree(mapped, tmp_path / "atlas"))
    catalog = open_catalog(Location(str(path)))
    rows = catalog.tables.read(DATASETS).to_pylist()
    rows[0]["pointer"] = "shapes"
    catalog.tables.overwrite_if(DATASETS, pa.Table.from_pylist(rows, DATASETS_SCHEMA), catalog.tables.version(DATASETS))
    assert rows[0]["zarr_group"] in " ".join(problem.message for problem in validate(catalog, "deep"))


@pytest.mark.long
def test_pointers_without_one_of_their_parts_are_found(mapped: Path, tmp_path: Path) -> None:
    """Of every kind of pointer, by validation before anything is indexed by them."""
    there = open_catalog(Location(str(mapped))).tables.schema("cells")
    columns = [field for field in there if pa.types.is_struct(field.type)]
    assert len(columns) > 2
    for n, field in enumerate(columns):
        path = Path(shutil.copytree(mapped, tmp_path / str(n)))
        tables = open_catalog(Location(str(path))).tables
        rows = tables.read("cells")
        at = rows.column_names.index(field.name)
        values = rows.column(at).combine_chunks()
        last = field.type[field.type.num_fields - 1].name
        parts = [part.with_name("other") if part.name == last else part for part in field.type]
        made = pa.StructArray.from_arrays(values.flatten(), fields=parts, mask=values.is_null())
        rows = rows.set_column(at, pa.field(field.name, made.type, metadata=field.metadata), made)
        assert tables.overwrite_if("cells", rows, tables.version("cells"))
        problems = validate(open_catalog(Location(str(path))), "deep")
        assert (field.name, "table-columns") in {
            (p.message.split("'")[1], p.rule) for p in problems if "'" in p.message
        }


@pytest.mark.parametrize("hostile", ["../../outside", "..", "/etc", "a/../../b", ".git"])
def test_group_names_never_leave_the_store(copied: Path, tmp_path: Path, hostile: str) -> None:
    """A record that names a group outside the store is refused, and nothing there is removed; the snapshot from before is read."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "keep").write_text("")
    view = ra.RaggedAtlas.open(str(copied)).checkout(1)
    change_record(copied, lambda old: {"zarr_group": hostile, "arrays": old.arrays.replace(old.zarr_group, hostile)})
    tampered = ra.RaggedAtlas.open(str(copied))
    with pytest.raises(AtlasError):
        tampered.dataset("d").to_anndata()
    with contextlib.suppress(AtlasError):
        assert tampered.validate("deep")
    with contextlib.suppress(AtlasError):
        tampered.repair()
        tampered.gc(dry_run=False)
    assert (tmp_path / "outside" / "keep").exists()
    assert view.query().to_anndata().n_obs == N_CELLS


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Assert that the process never held much more memory inside than before."""

    def held(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024

    Path("/proc/self/clear_refs").write_text("5")
    before = held("VmRSS")
    yield
    assert held("VmHWM") - before < 96 * 2**20


def test_pointers_beyond_the_arrays_are_refused(copied: Path) -> None:
    """Cells that claim 10^12 entries are refused before memory is taken."""
    atlas = ra.RaggedAtlas.open(str(copied))
    tables = atlas._catalog.tables
    pointers = tables.read("cells", ["gene_expression"]).column("gene_expression").combine_chunks()
    parts = ", ".join(
        f"'{field.name}', " + ("1000000000000" if field.name == "end" else f"gene_expression['{field.name}']")
        for field in pointers.type
    )
    tables.open("cells").update({"gene_expression": f"named_struct({parts})"})
    with little_memory(), pytest.raises(AtlasError):
        Query(atlas._catalog).to_anndata()
    with little_memory():
        assert "pointer" in str(atlas.validate("rows"))
    with pytest.raises(AtlasError):
        atlas.snapshot()


FOUND = {
    20166: "a record with the uid of another dataset, some of whose cells were deleted",
    20589: "the name of a column of the list of snapshots",
    50104: "a result with the other kind of column",
    70398: "a path of an array that is a number",
    20738: "an attribute of points that the store lacks",
}
"""Mutations with which a run of the campaign found an error of no class of ours."""


@pytest.mark.long
def test_a_few_mutated_atlases_are_read_refused_or_found() -> None:
    """Those that found something once, and a few more: no crash, no foreign error, no silent other value, every flipped bit found."""
    tally = run_campaign([*FOUND, 11, 12])
    assert tally.failures == []
    assert (tally.n_bits, tally.n_values) == (2, 5)
    assert tally.outcomes["found"] == tally.n_bits


@pytest.mark.nightly
def test_mutated_atlases_are_read_refused_or_found() -> None:
    """As many as there are examples; ``scripts/mutate_atlases 10000`` goes on from there."""
    tally = run_campaign(range(100_000, 100_000 + settings.default.max_examples))
    assert tally.failures == []
    assert tally.outcomes["found"] == tally.n_bits
