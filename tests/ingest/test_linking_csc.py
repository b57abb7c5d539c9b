"""Laws of CSC matrices that stay in the file: with rows copied as any add writes them (`copy="rows"`), and without (`copy=False`)."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata.tests.helpers import assert_equal
from hypothesis import given
from hypothesis import strategies as st

import raggedatlas as ra
from raggedatlas.catalog.assets import array_readers, read_links, read_specs
from raggedatlas.errors import ArgumentError, CorruptError, SourceError, StaleSourceError, ValuesError
from raggedatlas.query import read
from raggedatlas.store.read import read_all
from support.hypothesis_profile import examples
from support.linked_files import WRITERS, write_file
from support.object_store import WebServer

SPACE = "gene_expression"
KINDS = sorted(kind for kind in WRITERS if "dense" not in kind and "tiled" not in kind)


def made(n: int = 40, width: int = 9, seed: int = 0, dtype: str = "f4", density: float = 0.3) -> ad.AnnData:
    """Return counts by column, and a layer of other values with the same entries."""
    x: Any = sp.random(n, width, density, "csc", random_state=seed)
    x.data = np.ceil(x.data * 300).astype(dtype)
    x.sort_indices()
    obs, var = pd.DataFrame(index=[f"c{i}" for i in range(n)]), pd.DataFrame(index=[f"g{j}" for j in range(width)])
    obs["half"] = ["even" if i % 2 == 0 else "odd" for i in range(n)]
    return ad.AnnData(x, obs=obs, var=var, layers={"half": x * 0.5})


def added(folder: Path, file: Path, **options: Any) -> ra.RaggedAtlas:
    atlas = ra.RaggedAtlas.create(str(folder / "atlas"), codec=options.pop("codec", None) or "packed")
    atlas.add(file, "d", copy=options.pop("copy", "rows"), progress=False, **options)
    return atlas


def query(atlas: ra.RaggedAtlas) -> ra.Query:
    return atlas.checkout(atlas.snapshot()).query()


def problems(atlas: ra.RaggedAtlas) -> list[str]:
    return [str(problem) for problem in atlas.validate("deep") if problem.level == "must"]


def links(atlas: ra.RaggedAtlas) -> set[str]:
    return {path for record in atlas.dataset("d").records for path in read_links(record)}


@pytest.fixture
def by_column(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Read genes from column-sorted copies whatever the estimate is, and count the calls."""
    prefer_columns(monkeypatch)
    calls: list[int] = []
    found = read.read_column_copies

    def counted(*given: Any) -> Any:
        answer = found(*given)
        calls.append(1)
        return answer

    monkeypatch.setattr(read, "read_column_copies", counted)
    return calls


def prefer_columns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(read, "_estimate_decoded", lambda reader, *_: 0 if "/csc/" in reader.spec.path else 1)


@pytest.mark.long
@examples(12)
@given(
    n=st.integers(1, 40), width=st.integers(2, 12), seed=st.integers(0, 99), density=st.floats(0, 1),
    dtype=st.sampled_from(["f4", "f8", "i4", "i8", "u2"]), kind=st.sampled_from(KINDS), half=st.booleans(),
    copy=st.sampled_from(["rows", "by row", "by column"]), at_once=st.sampled_from([1, 20, 2**22]), data=st.data(),
)  # fmt: skip
def test_genes_equal_those_of_a_copied_atlas(
    n: int, width: int, seed: int, density: float, dtype: str, kind: str, half: bool, copy: str, at_once: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    """However the file stores its columns: genes of all or of some cells are those of a copy that `add_csc` has sorted, to the dtype."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        prefer_columns(patch)
        patch.setattr("raggedatlas.store.read._COLUMN_ENTRIES", at_once)
        if copy == "by row":
            patch.setattr(read, "choose_column_copies", lambda *_: {})
        adata = made(n, width, seed, dtype, density)
        # HDF5 has no chunks of no entries.
        file = write_file(adata, Path(folder), "d", kind if adata.X.nnz else "plain.h5ad")
        options = {} if copy == "rows" else {"copy": False, "hash": "full"}
        linked = added(Path(folder), file, **options)
        copied = ra.RaggedAtlas.create(f"{folder}/copied")
        copied.add(file, "d", column_order="file", progress=False)
        copied.add_csc("d")
        assert {"csc/indices", *(f"csc/layers/{layer}" for layer in linked.dataset("d").records[0].layers)} == links(
            linked
        )
        genes = data.draw(st.lists(st.sampled_from(list(adata.var_names)), min_size=1, max_size=width, unique=True))
        for layer in linked.dataset("d").records[0].layers:
            answers = []
            for atlas in (linked, copied):
                asked = query(atlas).layers(layer).features(genes)
                answers.append((asked.where({"half": "even"}) if half else asked).to_anndata())
            ours, theirs = (answer[np.argsort(answer.obs["cell_name"].astype(str))] for answer in answers)
            assert list(ours.obs["cell_name"]) == list(theirs.obs["cell_name"])
            assert_equal(ours.X, theirs.X, exact=True)
            assert_equal(ours.var, theirs.var, exact=True)
        assert_equal(linked.dataset("d").to_anndata(), copied.dataset("d").to_anndata(), exact=True)
        assert linked.dataset("d").records[0].content_hash == copied.dataset("d").records[0].content_hash
        assert problems(linked) == []
        assert linked.add_csc("d") == ()
        assert linked.materialize() == ("d",)
        mine, others = (
            {path: read_all(reader) for path, reader in array_readers(a._catalog, a.dataset("d").records[0]).items()}
            for a in (linked, copied)
        )
        assert mine.keys() == others.keys()
        for path, values in mine.items():
            assert values.dtype == others[path].dtype, path
            np.testing.assert_array_equal(values, others[path], err_msg=path)
        assert links(linked) == set()
        assert problems(linked) == []


@pytest.mark.parametrize("codec", ["packed", "standard", "archive"])
def test_genes_are_read_from_the_file_and_all_else_from_the_atlas(
    tmp_path: Path, by_column: list[int], codec: str
) -> None:
    adata = made()
    adata.write_h5ad(tmp_path / "d.h5ad")
    atlas = added(tmp_path, tmp_path / "d.h5ad", codec=codec)
    assert problems(atlas) == []
    assert atlas.dataset("d").records[0].file_facts.linked is not None
    found = query(atlas).layers("counts").features(["g3"]).to_anndata()
    np.testing.assert_array_equal(found.X.toarray(), adata.X[:, [3]].toarray())
    assert by_column == [1]
    np.testing.assert_array_equal(atlas.dataset("d").to_anndata().X.toarray(), adata.X.toarray())
    assert by_column == [1]


def test_the_copy_is_read_where_it_decodes_less(tmp_path: Path) -> None:
    """By the estimate alone, without the help of the tests above."""
    write_file(made(600, 40), tmp_path, "d", "gzip.h5ad")
    atlas = added(tmp_path, tmp_path / "d-gzip.h5ad")
    assert "1 groups by column" in query(atlas).layers("counts").features(["g3"]).explain()
    assert "by column" not in query(atlas).layers("counts").explain()


def change(file: Path) -> None:
    os.utime(file)


def remove(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("spoil", [change, remove])
def test_a_file_that_changed_or_is_gone_is_done_without(tmp_path: Path, by_column: list[int], spoil: Any) -> None:
    """Its values are in the rows; `validate` tells of it."""
    adata = made()
    adata.write_h5ad(tmp_path / "d.h5ad")
    atlas = added(tmp_path, tmp_path / "d.h5ad")
    spoil(tmp_path / "d.h5ad")
    found = query(atlas).layers("half").features(["g1", "g3"]).to_anndata()
    np.testing.assert_array_equal(found.X.toarray(), adata.layers["half"][:, [1, 3]].toarray())
    assert by_column == []
    assert {problem.rule for problem in atlas.validate("deep") if problem.level == "must"} == {"source-changed"}
    atlas.drop_dataset("d")
    assert problems(atlas) == []


def test_a_file_that_may_not_be_read_is_done_without(tmp_path: Path, by_column: list[int]) -> None:
    adata = made()
    adata.write_h5ad(tmp_path / "d.h5ad")
    added(tmp_path, tmp_path / "d.h5ad")
    denied = ra.RaggedAtlas.open(str(tmp_path / "atlas"), sources="deny")
    found = query(denied).layers("counts").features(["g1", "g3"]).to_anndata()
    np.testing.assert_array_equal(found.X.toarray(), adata.X[:, [1, 3]].toarray())
    np.testing.assert_array_equal(denied.dataset("d").to_anndata().X.toarray(), adata.X.toarray())
    assert by_column == []
    assert denied.add_csc("d") == ()
    with pytest.raises(OSError, match="sources='deny'"):
        denied.materialize()
    assert {problem.rule for problem in denied.validate("deep") if problem.level == "must"} == {"source-missing"}


@pytest.mark.parametrize("dtype", ["i4", "i8"])
@pytest.mark.parametrize("wrong", [-1, -40, 40, 2**31 - 1])
def test_row_numbers_outside_of_the_matrix_are_refused(
    tmp_path: Path, by_column: list[int], wrong: int, dtype: str
) -> None:
    """Also if size and time of the file are those that were recorded."""
    file = tmp_path / "d.h5ad"
    made(400, 9, density=0.9).write_h5ad(file)
    with h5py.File(file, "r+") as opened:
        values, attributes = opened["X/indices"][...].astype(dtype), dict(opened["X/indices"].attrs)
        del opened["X/indices"]
        opened.create_dataset("X/indices", data=values).attrs.update(attributes)
    atlas, facts = added(tmp_path, file), file.stat()
    with h5py.File(file, "r+") as opened:
        opened["X/indices"][len(values) // 2] = wrong if wrong != 40 else 400
        column = int(np.searchsorted(opened["X/indptr"][...], len(values) // 2, side="right")) - 1
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert file.stat().st_size == facts.st_size
    with pytest.raises(CorruptError, match="names a row that the group has not got"):
        query(atlas).layers("counts").features([f"g{column}"]).to_anndata()
    assert {problem.rule for problem in atlas.validate("deep") if problem.level == "must"} == {"feature-bounds"}
    with pytest.raises(SourceError, match=r"names columns or rows that the matrix does not have.* stays linked"):
        atlas.materialize()


def test_a_file_that_was_moved_is_followed(tmp_path: Path, by_column: list[int]) -> None:
    """Or another with the same columns, while the old one can be read."""
    adata = made()
    adata.write_h5ad(tmp_path / "d.h5ad")
    atlas = added(tmp_path, tmp_path / "d.h5ad")
    adata.write_h5ad(tmp_path / "zipped.h5ad", compression="gzip")
    atlas.relink("d", tmp_path / "zipped.h5ad")
    (tmp_path / "zipped.h5ad").rename(tmp_path / "moved.h5ad")
    atlas.relink("d", tmp_path / "moved.h5ad")
    found = query(atlas).layers("counts").features(["g3"]).to_anndata()
    np.testing.assert_array_equal(found.X.toarray(), adata.X[:, [3]].toarray())
    assert by_column == [1]
    assert problems(atlas) == []
    adata.X.data[3] += 1
    adata.write_h5ad(tmp_path / "other.h5ad")
    with pytest.raises(SourceError, match="is not the file of the dataset 'd'"):
        atlas.relink("d", tmp_path / "other.h5ad")
    with pytest.raises(OSError, match="opened with sources='deny'"):
        ra.RaggedAtlas.open(str(tmp_path / "atlas"), sources="deny").relink("d", tmp_path / "other.h5ad")


def test_layers_that_are_stored_by_row_are_only_copied(tmp_path: Path, by_column: list[int]) -> None:
    """`add_csc` sorts these, beside what is linked."""
    adata = made()
    adata.layers["half"] = adata.layers["half"].tocsr()
    adata.write_h5ad(tmp_path / "d.h5ad")
    atlas = added(tmp_path, tmp_path / "d.h5ad")
    assert links(atlas) == {"csc/indices", "csc/layers/counts"}
    assert atlas.add_csc("d") == ("half",)
    found = query(atlas).layers("half", "counts").features(["g2"]).to_anndata()
    np.testing.assert_array_equal(found.X.toarray(), adata.layers["half"][:, [2]].toarray())
    np.testing.assert_array_equal(found.layers["counts"].toarray(), adata.X[:, [2]].toarray())
    assert by_column == [1]
    assert problems(atlas) == []
    atlas.materialize()
    assert set(read_specs(atlas.dataset("d").records[0])) >= {"csc/indices", "csc/layers/counts", "csc/layers/half"}
    assert problems(atlas) == []


def test_snapshots_and_packed_files_keep_the_link(
    tmp_path: Path, by_column: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raggedatlas.catalog.bundles.WORTH", 1)
    atlas = ra.RaggedAtlas.create(str(tmp_path / "atlas"))
    for seed in range(3):
        made(seed=seed).write_h5ad(tmp_path / f"d{seed}.h5ad")
    atlas.add([tmp_path / f"d{seed}.h5ad" for seed in range(3)], copy="rows", progress=False)
    version = atlas.snapshot()
    atlas.optimize()
    expected = np.concatenate([made(seed=seed).X[:, [4]].toarray() for seed in range(3)])
    for view in (atlas.checkout(atlas.snapshot()), atlas.checkout(version)):
        np.testing.assert_array_equal(view.query().layers("counts").features(["g4"]).to_anndata().X.toarray(), expected)
    assert by_column == [1, 1]
    assert problems(atlas) == []


def unsorted(adata: ad.AnnData) -> None:
    start, stop = adata.X.indptr[2:4]
    adata.X.indices[start:stop] = adata.X.indices[start:stop][::-1]


def twice(adata: ad.AnnData) -> None:
    start = adata.X.indptr[2]
    adata.X.indices[start + 1] = adata.X.indices[start]


def by_row(adata: ad.AnnData) -> None:
    adata.X = adata.X.tocsr()


def outside(adata: ad.AnnData) -> None:
    adata.X.indices[adata.X.indptr[3] - 1] = 2**20


def fraction(adata: ad.AnnData) -> None:
    adata.X.data[0] = np.inf


@pytest.mark.parametrize(
    ("copy", "spoil", "text"),
    [
        ("rows", unsorted, "rows do not ascend.*copy=True.*sum_duplicates"),
        ("rows", twice, "rows do not ascend.*copy=True.*sum_duplicates"),
        ("rows", by_row, "has no CSC matrix.*copy=False"),
        (False, unsorted, "rows do not ascend.*copy=True.*sum_duplicates"),
        (False, twice, "rows do not ascend.*copy=True.*sum_duplicates"),
        (False, outside, "entry for row 1,048,576, outside its 40 cells"),
        (False, fraction, "holds inf at cell [0-9]+, feature 0"),
    ],
)
def test_what_cannot_be_linked_by_column_is_refused(tmp_path: Path, copy: Any, spoil: Any, text: str) -> None:
    adata = made()
    del adata.layers["half"]
    spoil(adata)
    adata.write_h5ad(tmp_path / "d.h5ad")
    atlas = ra.RaggedAtlas.create(str(tmp_path / "atlas"))
    with pytest.raises((SourceError, ValuesError), match=text):
        atlas.add(tmp_path / "d.h5ad", copy=copy, progress=False)
    assert len(atlas.list_datasets()) == 0
    assert problems(atlas) == []


def test_other_refusals(tmp_path: Path) -> None:
    atlas, adata = ra.RaggedAtlas.create(str(tmp_path / "atlas")), made()
    adata.write_h5ad(tmp_path / "d.h5ad")
    with pytest.raises(SourceError, match=r"in memory.*copy=True"):
        atlas.add(adata, copy="rows", progress=False)
    with pytest.raises(ArgumentError, match=r"hash=.*no effect"):
        atlas.add(tmp_path / "d.h5ad", copy="rows", hash="full", progress=False)
    with pytest.raises(ArgumentError, match="copy as True or False or 'rows', not 'columns'"):
        atlas.add(tmp_path / "d.h5ad", copy="columns", progress=False)  # type: ignore[call-overload]
    assert len(atlas.list_datasets()) == 0
    report = atlas.add(tmp_path / "d.h5ad", copy="rows", dry_run=True, progress=False)
    assert report.status == "dry run"
    assert any("columns are linked to" in note for note in report.notes)


@contextmanager
def served(tmp_path: Path, copy: Any) -> "Iterator[tuple[ra.RaggedAtlas, ad.AnnData, Path]]":
    """Give an atlas that is linked to a file on a web server, what is in the file, and the folder that is served."""
    folder, adata = tmp_path / "served", made(300, 9)
    folder.mkdir()
    file = write_file(adata, folder, "d", "gzip.h5ad")
    with WebServer(folder, stamps=True) as server:
        atlas = ra.RaggedAtlas.create(str(tmp_path / "atlas"))
        atlas.add(f"{server.address}/{file.name}", "d", copy=copy, progress=False)
        yield atlas, adata, folder


def test_columns_are_read_from_a_web_server(tmp_path: Path, by_column: list[int]) -> None:
    """And done without where the server has another file."""
    with served(tmp_path, "rows") as (atlas, adata, folder):
        found = query(atlas).layers("counts").features(["g3"]).to_anndata()
        np.testing.assert_array_equal(found.X.toarray(), adata.X[:, [3]].toarray())
        assert by_column == [1]
        assert problems(atlas) == []
        write_file(made(300, 9, seed=1), folder, "d", "gzip.h5ad")
        found = query(atlas).layers("half").features(["g5"]).to_anndata()
        np.testing.assert_array_equal(found.X.toarray(), adata.layers["half"][:, [5]].toarray())
        assert by_column == [1]


def cells_in_order(found: ad.AnnData, adata: ad.AnnData) -> Any:
    """Return the values of a result in the order of a file."""
    place = {name: row for row, name in enumerate(found.obs["cell_name"].astype(str))}
    return found[[place[name] for name in adata.obs_names]][:, list(adata.var_names)].X.toarray()


def test_a_matrix_that_is_linked_by_column_stores_no_values(tmp_path: Path) -> None:
    """Only the bounds of rows and columns; rows are read from the file, too."""
    adata = made(900, 30)
    write_file(adata, tmp_path, "d", "gzip.h5ad")
    atlas = added(tmp_path, tmp_path / "d-gzip.h5ad", copy=False)
    report = ra.RaggedAtlas.create(str(tmp_path / "b")).add(tmp_path / "d-gzip.h5ad", copy=False, progress=False)
    assert "by column: cells are read by a walk" in str(report)
    (record,) = atlas.dataset("d").records
    assert {*read_specs(record)} == {"csr/indptr", "csc/indptr", "csc/indices", "csc/layers/counts", "csc/layers/half"}
    assert links(atlas) == {"csc/indices", "csc/layers/counts", "csc/layers/half"}
    view = query(atlas)
    some, every = (view.layers("counts").features(genes).explain() for genes in (["g3"], list(adata.var_names)))
    fetched = [int(text.split(" bytes fetched")[0].rpartition(" ")[2].replace(",", "")) for text in (some, every)]
    assert 0 < 10 * fetched[0] < fetched[1] < (tmp_path / "d-gzip.h5ad").stat().st_size
    np.testing.assert_array_equal(cells_in_order(view.layers("counts").to_anndata(), adata), adata.X.toarray())
    np.testing.assert_array_equal(
        cells_in_order(view.layers("half").to_anndata(), adata), adata.layers["half"].toarray()
    )
    atlas.delete_cells({"half": "odd"})
    left = query(atlas).layers("counts").to_anndata()
    kept = adata[adata.obs["half"] == "even"]
    np.testing.assert_array_equal(cells_in_order(left, kept), kept.X.toarray())
    assert problems(atlas) == []


def test_layers_by_row_and_by_column_are_linked_each_as_it_is(tmp_path: Path) -> None:
    adata = made()
    adata.layers["half"] = adata.layers["half"].tocsr()
    adata.write_h5ad(tmp_path / "d.h5ad")
    atlas = added(tmp_path, tmp_path / "d.h5ad", copy=False)
    assert links(atlas) == {"csc/indices", "csc/layers/counts", "csr/indices", "csr/layers/half"}
    for layer in ("counts", "half"):
        expected = adata.X if layer == "counts" else adata.layers["half"]
        np.testing.assert_array_equal(
            cells_in_order(query(atlas).layers(layer).to_anndata(), adata), expected.toarray()
        )
    both = query(atlas).layers("half", "counts").to_anndata()
    np.testing.assert_array_equal(both.X.toarray() * 2, both.layers["counts"].toarray())
    assert problems(atlas) == []


@pytest.mark.parametrize("by_column", [False, True])
def test_rows_of_a_column_are_checked_whenever_they_are_read(
    tmp_path: Path, by_column: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a file with the recorded size and time."""
    if not by_column:
        monkeypatch.setattr(read, "choose_column_copies", lambda *_: {})
    file = tmp_path / "d.h5ad"
    made(400, 9, density=0.9).write_h5ad(file)
    atlas, facts = added(tmp_path, file, copy=False), file.stat()
    # By column, another row of the matrix cannot be told from the right one.
    for wrong in (400, -1) if by_column else (400, -1, 0):
        with h5py.File(file, "r+") as opened:
            middle = opened["X/indptr"][4] - 1
            before, opened["X/indices"][middle] = int(opened["X/indices"][middle]), wrong
        os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        with pytest.raises(CorruptError, match=r"other rows than|twice|the group has not got|does not have"):
            query(atlas).layers("counts").to_anndata()
        assert {problem.rule for problem in atlas.validate("deep") if problem.level == "must"} <= {
            "array-damaged",
            "feature-bounds",
        }
        assert problems(atlas)
        with pytest.raises((SourceError, CorruptError)):
            atlas.materialize()
        with h5py.File(file, "r+") as opened:
            opened["X/indices"][middle] = before
        os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert problems(atlas) == []


def test_counts_by_a_sample_are_checked_in_columns(tmp_path: Path) -> None:
    """Of columns that no sample looked at."""
    adata = made(600, 400, density=0.9)
    adata.X.data[adata.X.indptr[100]] = 0.5
    adata.write_h5ad(tmp_path / "d.h5ad")
    atlas = added(tmp_path, tmp_path / "d.h5ad", copy=False)
    found = query(atlas).layers("counts")
    assert found.features(["g3"]).to_anndata().X.nnz
    with pytest.raises(ValuesError, match="are no counts"):
        found.features(["g100"]).to_anndata()
    with pytest.raises(ValuesError, match="are no counts"):
        found.to_anndata()
    assert {problem.rule for problem in atlas.validate("deep") if problem.level == "must"} == {"counts"}


def test_a_file_by_column_is_moved_changed_packed_and_restored(tmp_path: Path) -> None:
    adata = made()
    adata.write_h5ad(tmp_path / "d.h5ad")
    atlas = added(tmp_path, tmp_path / "d.h5ad", copy=False)
    first = atlas.snapshot()
    adata.write_h5ad(tmp_path / "zipped.h5ad", compression="gzip")
    atlas.relink("d", tmp_path / "zipped.h5ad", hash="full")
    (tmp_path / "d.h5ad").unlink()
    assert problems(atlas) == []
    with pytest.raises(StaleSourceError):
        atlas.checkout(first).query().layers("counts").to_anndata()
    assert atlas.materialize() == ("d",)
    atlas.snapshot()
    (tmp_path / "zipped.h5ad").rename(tmp_path / "d.h5ad")
    np.testing.assert_array_equal(cells_in_order(query(atlas).layers("counts").to_anndata(), adata), adata.X.toarray())
    atlas.restore(first)
    assert links(atlas) == {"csc/indices", "csc/layers/counts", "csc/layers/half"}
    assert atlas.materialize() == ("d",)
    assert {*read_specs(atlas.dataset("d").records[0])} >= {"csr/indices", "csr/layers/counts", "csc/layers/counts"}
    np.testing.assert_array_equal(cells_in_order(query(atlas).layers("counts").to_anndata(), adata), adata.X.toarray())
    assert problems(atlas) == []


def test_a_file_by_column_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    """Nothing stands in for it: its rows are nowhere else."""
    made().write_h5ad(tmp_path / "d.h5ad")
    added(tmp_path, tmp_path / "d.h5ad", copy=False).snapshot()
    denied = ra.RaggedAtlas.open(str(tmp_path / "atlas"), sources="deny")
    with pytest.raises(OSError, match=r"'d' is linked to.*sources='deny'"):
        denied.checkout(1).query().layers("counts").features(["g1"]).to_anndata()
    assert {problem.rule for problem in denied.validate("deep") if problem.level == "must"} == {"source-missing"}


def test_rows_of_columns_behind_a_web_server(tmp_path: Path) -> None:
    with served(tmp_path, copy=False) as (atlas, adata, folder):
        found = query(atlas).layers("counts").to_anndata()
        np.testing.assert_array_equal(cells_in_order(found, adata), adata.X.toarray())
        with pytest.warns(UserWarning, match="linked by column"):
            loader = ra.Loader(query(atlas).layers("counts"), 64, shuffle=None)
        batches = [*loader]
        assert sum(batch.X.nnz for batch in batches) == adata.X.nnz
        write_file(made(300, 9, seed=1), folder, "d", "gzip.h5ad")
        with pytest.raises(StaleSourceError):
            query(atlas).layers("counts").to_anndata()
