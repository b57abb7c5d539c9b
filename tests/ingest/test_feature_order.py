"""Laws of the stored column order: frequent first, shared by equal feature sets, invisible in what comes back."""

import json
from itertools import pairwise
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.catalog.assets import array_columns, read_specs
from raggedatlas.catalog.catalog import DATASETS
from raggedatlas.catalog.features import read_layouts
from raggedatlas.errors import DuplicateError, SourceError, StoreError
from raggedatlas.formats.registry import open_source
from raggedatlas.ingest import group_writer, values
from raggedatlas.ingest.group_writer import reorder_columns
from raggedatlas.model.arrays import ArraySpec
from raggedatlas.model.batch import CsrBlock
from raggedatlas.model.protocols import MatrixInfo
from raggedatlas.model.records import DATASETS_SCHEMA
from raggedatlas.store.arrays import ArrayWriter, describe_group, read_group
from raggedatlas.store.read import ArrayReader, read_slice
from raggedatlas.store.sparse import canonicalize
from support.anndata_strategies import assert_same

GENES = ["rare", "common", "absent", "half", "also_half"]
PRESENT = {"rare": 1, "common": 8, "absent": 0, "half": 4, "also_half": 4}


def made(genes: list[str], n: int = 8) -> ad.AnnData:
    """Cell i has gene g where i < PRESENT[g], with values that tell entries apart; a layer shares the entries, raw has more genes."""
    x = np.array([[(i + 1) * (GENES.index(g) + 1) * (i < PRESENT[g]) for g in genes] for i in range(n)], np.float32)
    obs, var = pd.DataFrame(index=[f"c{i}" for i in range(n)]), pd.DataFrame({"n": range(len(genes))}, index=genes)
    adata = ad.AnnData(sp.csr_matrix(x), obs=obs, var=var, layers={"part": sp.csr_matrix(x / 2)})
    more = pd.DataFrame(index=["extra", *reversed(genes)])
    adata.raw = ad.AnnData(sp.csr_matrix(np.hstack([np.ones((n, 1), np.float32), x[:, ::-1]])), obs=obs, var=more)
    return adata


def stored_names(atlas: RaggedAtlas, name: str, group: int = 0) -> list[str]:
    record = atlas.dataset(name).records[group]
    uids = read_layouts(atlas._catalog, [record.layout_uid])[record.layout_uid].features
    return [atlas.features().loc[uid, "feature_id"] for uid in uids]


def read(atlas: RaggedAtlas, name: str, path: str) -> np.ndarray:
    record = atlas.dataset(name).records[0]
    spec = ArraySpec.from_json(json.dumps(record.array_specs[path]))
    return read_slice(ArrayReader(atlas._catalog.arrays, spec), 0, spec.n_rows)


@given(st.lists(st.integers(0, 5), max_size=30))
def test_ranks_are_places_by_falling_count(counts: list[int]) -> None:
    """Every column gets one place; counts fall along the places; equal ones stay in the file's order."""
    places = values.rank_columns(np.array(counts, np.int64))
    ranked = np.argsort(places)
    assert sorted(places) == list(range(len(counts)))
    assert ranked.tolist() == sorted(range(len(counts)), key=lambda j: (-counts[j], j))


def test_the_report_of_tiles_names_no_features(atlas: RaggedAtlas) -> None:
    """A space without features has channels, which are none."""
    adata = made(GENES)
    adata.obsm["tiles"] = np.zeros((adata.n_obs, 3, 4, 4), np.uint8)
    text = repr(atlas.add(adata, "d", spaces={"obsm/tiles": "image_tiles"}, progress=False))
    assert f"image_tiles (X): {adata.n_obs * 48} entries" in text
    assert "5 features (5 new)" in text


def test_frequent_genes_come_first_and_every_row_ascends(atlas: RaggedAtlas) -> None:
    """The layout lists genes by falling number of cells, the absent last; stored rows ascend; the report says so."""
    report = atlas.add(made(GENES), "d", progress=False)
    assert stored_names(atlas, "d") == ["common", "half", "also_half", "rare", "absent"]
    indices, indptr = read(atlas, "d", "csr/indices"), read(atlas, "d", "csr/indptr")
    assert all((np.diff(indices[a:b]) > 0).all() for a, b in pairwise(indptr))
    assert {s.column_order for s in report.spaces} == {"detected"}
    assert "columns ordered by detection" in repr(report)
    assert_same(made(GENES), atlas.dataset("d").to_anndata())
    assert [p for p in atlas.validate("deep") if p.rule != "unassigned-index"] == []


@pytest.mark.long
@pytest.mark.parametrize("together", [True, False])
def test_the_same_genes_in_any_order_share_one_layout(atlas: RaggedAtlas, tmp_path: Path, together: bool) -> None:
    """Added together or one by one: one layout for X and one for raw, and each file comes back in its own order."""
    orders = [GENES, GENES[::-1], sorted(GENES)]
    files = [made(genes) for genes in orders]
    for i, file in enumerate(files):
        file.X[0, orders[i].index("common")] = 90 + i  # other values, so that they are other datasets
        file.write_h5ad(tmp_path / f"{i}.h5ad")
    paths = [tmp_path / f"{i}.h5ad" for i in range(3)]
    reports = atlas.add(paths, progress=False) if together else [atlas.add(p, progress=False) for p in paths]
    assert [{s.column_order for s in r.spaces} for r in reports] == [{"detected"}, {"shared"}, {"shared"}]
    for group in (0, 1):
        assert len({atlas.dataset(str(i)).records[group].layout_uid for i in range(3)}) == 1
    for i, path in enumerate(paths):
        assert_same(ad.read_h5ad(path), atlas.dataset(str(i)).to_anndata())
    view = atlas.checkout(atlas.snapshot())
    found = view.query().where("dataset_uid = '" + atlas.dataset("2").uid + "'").layers("counts").to_anndata()
    cells, ids = found.obs["cell_name"].tolist(), found.var["feature_id"].tolist()
    at = np.ix_([cells.index(c) for c in files[2].obs_names], [ids.index(g) for g in orders[2]])
    np.testing.assert_array_equal(found.X.toarray()[at], files[2].X.toarray())


def test_the_files_order_can_be_kept(atlas: RaggedAtlas) -> None:
    """With column_order="file" nothing is renumbered, and the same content is still recognised either way."""
    report = atlas.add(made(GENES), "d", column_order="file", progress=False)
    assert stored_names(atlas, "d") == GENES
    assert {s.column_order for s in report.spaces} == {"file"}
    assert "columns" not in atlas.dataset("d").records[0].array_specs
    with pytest.raises(DuplicateError, match="same cells"):
        atlas.add(made(GENES), "e", progress=False)
    other = atlas.add(made(GENES[::-1]), "other", progress=False)
    assert {s.column_order for s in other.spaces} == {"shared"}
    assert stored_names(atlas, "other") == GENES
    assert_same(made(GENES[::-1]), atlas.dataset("other").to_anndata())


@pytest.mark.long
def test_older_snapshots_and_restored_datasets_come_back_in_the_files_order(atlas: RaggedAtlas) -> None:
    """The order is kept with the dataset: after drop, restore and in old snapshots it is the file's again."""
    atlas.add(made(GENES), "d", progress=False)
    first = atlas.snapshot()
    atlas.drop_dataset("d")
    atlas.add(made(GENES[::-1]), "later", progress=False)
    assert_same(made(GENES), atlas.checkout(first).dataset("d").to_anndata())
    atlas.restore(first)
    assert_same(made(GENES), atlas.dataset("d").to_anndata())


def test_a_large_matrix_is_sampled_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of rows spread from the first to the last, the same each time, and no more entries than asked; small: all rows."""
    info = MatrixInfo("X", "csr", np.dtype("f4"), (100_000, 50), "var", n_entries=10**9)
    runs, limit = values.plan_sample(info)
    assert runs[0][0] == 0
    assert runs[-1][1] == 100_000
    assert len(runs) == values.SLABS
    assert sum(stop - start for start, stop in runs) * 10_000 <= values.SAMPLE_ENTRIES
    assert limit * values.SLABS <= 2 * values.SAMPLE_ENTRIES
    made(GENES).write_h5ad(tmp_path / "a.h5ad")
    source = open_source(tmp_path / "a.h5ad")
    main = source.describe().matrices[0]
    assert values.sample_counts(source, main).tolist() == [1, 8, 0, 4, 4]
    monkeypatch.setattr(values, "SAMPLE_ENTRIES", 5)
    monkeypatch.setattr(values, "SLABS", 2)
    assert values.sample_counts(source, main).tolist() == values.sample_counts(source, main).tolist() == [1, 2, 0, 1, 1]
    source.close()


def test_a_damaged_order_is_found(atlas: RaggedAtlas) -> None:
    """An array `columns` that gives two columns one place is a problem of its own."""
    atlas.add(made(GENES), "d", progress=False)
    record = atlas.dataset("d").records[0]
    arrays = atlas._catalog.arrays
    writer = ArrayWriter(arrays, f"{record.zarr_group}/columns", np.uint32, profile=atlas._catalog.codec())
    writer.append(np.array([0, 0, 1, 2, 3], np.uint32))
    specs = read_specs(record) | {"columns": writer.close(listed=True)}
    describe_group(arrays, record.zarr_group, read_group(arrays, record.zarr_group).attributes, specs)
    row = record.model_dump() | array_columns(specs, record.array_checksums | writer.checksums("columns"))
    rows = pa.Table.from_pylist([row], schema=DATASETS_SCHEMA)
    atlas._catalog.tables.merge(DATASETS, ["zarr_group"], rows, update=True)
    assert {p.rule for p in atlas.validate("deep")} - {"unassigned-index"} == {"column-order"}


def test_the_codec_is_kept_with_the_atlas(tmp_path: Path) -> None:
    """Every later writer uses the codec that `create` named; an unknown one is refused before anything is made."""
    place = str(tmp_path / "a")
    with pytest.raises(StoreError, match="nope"):
        RaggedAtlas.create(place, codec="nope")
    assert not Path(place).exists()
    RaggedAtlas.create(place, codec="standard")
    atlas = RaggedAtlas.open(place)
    assert atlas._catalog.codec() == "standard"
    atlas.add(made(GENES), "d", progress=False)
    specs = atlas.dataset("d").records[0].array_specs
    assert all(json.loads(spec["codecs"])[0]["name"] == "bytes" for spec in specs.values())


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.uint32, np.int64])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.6])
def test_entries_move_to_their_stored_columns(dtype: type, density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renumbering is choosing the columns of a matrix in another order, for every layer, whoever does which rows."""
    monkeypatch.setattr(group_writer, "SPAN_ENTRIES", 50)
    rng = np.random.default_rng(3)
    m = sp.random(70, 130, density, "csr", np.float32, rng, data_rvs=lambda n: rng.integers(1, 200, n))
    places = rng.permutation(130)
    block = CsrBlock(m.indptr.astype(np.int64), m.indices.astype(np.uint32), {"values": m.data}, 130)
    columns, (stored, halves) = reorder_columns(block, [(m.data, dtype), (m.data / 2, np.float32)], places)
    assert (columns.dtype, stored.dtype, halves.dtype) == (np.uint32, dtype, np.float32)
    wanted = m[:, np.argsort(places)].sorted_indices()
    np.testing.assert_array_equal(columns, wanted.indices)
    np.testing.assert_array_equal(stored, wanted.data)
    np.testing.assert_array_equal(halves, wanted.data / 2)


def test_a_column_beyond_the_map_is_refused() -> None:
    """A source that names a column that it does not have is refused, not followed out of bounds."""
    block = CsrBlock(np.array([0, 1]), np.array([3], np.uint32), {}, 3)
    with pytest.raises(SourceError, match="column index 3"):
        reorder_columns(block, [(np.ones(1), np.uint8)], np.array([2, 0, 1]))


def test_a_negative_column_is_refused() -> None:
    """A negative column, which ascends before the others and looks large without its sign, is refused too."""
    block = CsrBlock(np.array([0, 1, 3]), np.array([1, -5, 2], np.int32), {"values": np.ones(3)}, 3)
    with pytest.raises(SourceError, match="outside its 3 columns"):
        canonicalize(block, "X", 0, sum_duplicates=False)


@pytest.mark.parametrize("pointers", [[0, 2**40, 3], [0, 3, 1], [-1, 1, 3], [0, 1, 4]])
def test_pointers_that_leave_the_entries_are_refused(pointers: list[int]) -> None:
    """Pointers that fall, are negative or lie beyond the entries are refused with the matrix named, never followed."""
    block = CsrBlock(np.array(pointers), np.array([0, 1, 2], np.int32), {"values": np.ones(3)}, 3)
    with pytest.raises(SourceError, match="X has pointers that fall or go beyond"):
        canonicalize(block, "X", 0, sum_duplicates=False)


@pytest.mark.parametrize("kind", [np.float32, np.int64])
def test_more_columns_than_sixteen_bits_count(kind: type) -> None:
    """A permutation of more than 65,536 columns moves entries as a smaller one does."""
    rng = np.random.default_rng(5)
    m = sp.random(9, 70_000, 0.003, "csr", np.float32, rng, data_rvs=lambda n: rng.integers(1, 2**16, n))
    places = rng.permutation(70_000)
    block = CsrBlock(m.indptr.astype(np.int64), m.indices.astype(np.uint32), {"values": m.data}, 70_000)
    columns, (stored,) = reorder_columns(block, [(m.data.astype(kind), np.uint16)], places)
    wanted = m[:, np.argsort(places)].sorted_indices()
    np.testing.assert_array_equal(columns, wanted.indices)
    np.testing.assert_array_equal(stored, wanted.data)
