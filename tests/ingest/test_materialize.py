"""Laws of `materialize`: the dataset that `add` would have made of the file, whatever was linked, and the old or the new one at any time."""

import os
import tempfile
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import anndata as ad
import mudata as md
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata.tests.helpers import assert_equal
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.catalog import assets, linked_values, purge
from raggedatlas.catalog.assets import array_readers, read_links
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import (
    ConflictError,
    DuplicateError,
    NotFoundError,
    SourceError,
    StaleSourceError,
    StoreError,
    ValuesError,
)
from raggedatlas.ingest import csc, materialize
from raggedatlas.ingest.linking import SAMPLE_ROWS, SMALL_BYTES
from raggedatlas.query.browse import AtlasView
from raggedatlas.store.read import read_all
from support.atlases import small_anndata

N_CELLS = SAMPLE_ROWS * 8


def made(n: int = 40, width: int = 9, seed: int = 0, dtype: str = "f4") -> ad.AnnData:
    """Return counts, a layer of other values with the same entries, and an embedding."""
    x = sp.random(n, width, 0.3, "csr", random_state=seed)
    x.data = np.ceil(x.data * 300).astype(dtype)
    obs, var = pd.DataFrame(index=[f"c{i}" for i in range(n)]), pd.DataFrame(index=[f"g{j}" for j in range(width)])
    embedding = np.random.default_rng(seed).random((n, 3)).astype("f4")
    return ad.AnnData(x, obs=obs, var=var, layers={"half": x * 0.5}, obsm={"X_pca": embedding})


def arrays_of(atlas: RaggedAtlas, name: str) -> dict[str, tuple[str, np.ndarray]]:
    """Return the values of all arrays of a dataset, with their dtypes."""
    found = {}
    for record in atlas.dataset(name).records:
        for path, reader in array_readers(atlas._catalog, record).items():
            found[f"{record.zarr_group.partition('/')[2]}/{path}"] = (reader.spec.dtype, read_all(reader))
    return found


def assert_alike(one: RaggedAtlas, other: RaggedAtlas, name: str = "d") -> None:
    """Compare two datasets: values, dtypes, hash, form, and what is said of the values."""
    ours, theirs = arrays_of(one, name), arrays_of(other, name)
    assert ours.keys() == theirs.keys()
    for path, (dtype, values) in ours.items():
        assert dtype == theirs[path][0], path
        np.testing.assert_array_equal(values, theirs[path][1], err_msg=path)
    for mine, their in zip(one.dataset(name).records, other.dataset(name).records, strict=True):
        assert (mine.content_hash, mine.layers, mine.n_entries) == (their.content_hash, their.layers, their.n_entries)
        assert mine.file_facts.layers == their.file_facts.layers
        largest = [{path: spec.get("largest") for path, spec in r.array_specs.items()} for r in (mine, their)]
        assert largest[0] == largest[1]
    assert_equal(one.dataset(name).to_anndata(), other.dataset(name).to_anndata(), exact=True)


def is_linked(atlas: RaggedAtlas | AtlasView, name: str = "d") -> bool:
    records = atlas.dataset(name).records
    linked = any(map(read_links, records))
    assert linked == (records[0].file_facts.linked is not None)
    return linked


def problems(atlas: RaggedAtlas) -> list[str]:
    return [str(problem) for problem in atlas.validate("deep") if problem.level == "must"]


@given(
    n=st.integers(1, 60), width=st.integers(1, 12), seed=st.integers(0, 99), dtype=st.sampled_from(["f4", "f8", "i4", "i8", "u2"]),
    embedded=st.booleans(), full=st.booleans(), step=st.integers(1, 400), gzip=st.booleans(),
)  # fmt: skip
def test_it_equals_what_add_would_have_made(
    n: int, width: int, seed: int, dtype: str, embedded: bool, full: bool, step: int, gzip: bool
) -> None:
    """Whatever the form, dtypes, chunks and steps: the arrays, their types, the hash, and the dataset as it is read back."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(linked_values, "STEP_BYTES", step)
        place = Path(folder) / "d.h5ad"
        adata = made(n, width, seed, dtype)
        adata.write_h5ad(place, compression="gzip" if gzip else None)
        options = {"embeddings": ["X_pca"]} if embedded else {}
        linked, copied = (RaggedAtlas.create(f"{folder}/{name}") for name in ("linked", "copied"))
        linked.add(place, copy=False, hash="full" if full else "metadata", progress=False, **options)
        copied.add(place, column_order="file", progress=False, **options)
        before = linked.dataset("d").to_anndata()
        was = linked.dataset("d").records
        assert linked.materialize() == ("d",)
        assert not is_linked(linked)
        assert [record.uid for record in linked.dataset("d").records] == [record.uid for record in was]
        assert_equal(linked.dataset("d").to_anndata(), before, exact=True)
        assert_alike(linked, copied)
        assert problems(linked) == []


@pytest.fixture
def linked(tmp_path: Path) -> RaggedAtlas:
    """An atlas with the linked dataset ``d``."""
    made(N_CELLS).write_h5ad(tmp_path / "d.h5ad")
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(tmp_path / "d.h5ad", copy=False, progress=False)
    return atlas


def spoiled(tmp_path: Path, spoil: Callable[[ad.AnnData], object]) -> RaggedAtlas:
    """Link a file that was spoiled where no sample looks."""
    adata = made(N_CELLS)
    spoil(adata)
    adata.write_h5ad(tmp_path / "spoiled.h5ad")
    atlas = RaggedAtlas.create(str(tmp_path / "spoiled"))
    atlas.add(tmp_path / "spoiled.h5ad", "d", copy=False, progress=False)
    return atlas


def fraction(adata: ad.AnnData) -> None:
    row = SAMPLE_ROWS + 3
    adata.X.data[adata.X.indptr[row]] = 0.5


def negative(adata: ad.AnnData) -> None:
    row = SAMPLE_ROWS + 3
    adata.X.data[adata.X.indptr[row]] = -2


def not_finite(adata: ad.AnnData) -> None:
    row = SAMPLE_ROWS + 3
    adata.layers["half"].data[adata.X.indptr[row]] = np.nan


def twice(adata: ad.AnnData) -> None:
    for matrix in (adata.X, adata.layers["half"]):
        start = matrix.indptr[SAMPLE_ROWS + 3]
        matrix.indices[start + 1] = matrix.indices[start]


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (fraction, ValuesError, rf"0\.5 at cell 'c{SAMPLE_ROWS + 3}' .*feature 'g"),
        (negative, ValuesError, rf"-2 at cell 'c{SAMPLE_ROWS + 3}' .*feature 'g"),
        (not_finite, ValuesError, rf"nan at cell 'c{SAMPLE_ROWS + 3}' .*feature 'g"),
        (twice, SourceError, rf"feature \d twice in cell {SAMPLE_ROWS + 3}"),
    ],
)
def test_what_add_refuses_stays_linked(
    tmp_path: Path, unchanged: Callable[[RaggedAtlas], AbstractContextManager[None]], spoil: Callable[[ad.AnnData], None],
    error: type[Exception], text: str,
) -> None:  # fmt: skip
    """Counts that are none, values that are not finite and repeated features, each with its place; validate('deep') knows them, too."""
    atlas = spoiled(tmp_path, spoil)
    with unchanged(atlas), pytest.raises(error, match=text):
        atlas.materialize()
    assert is_linked(atlas)
    found = {problem.rule for problem in atlas.validate("deep") if problem.level == "must"}
    assert found == {fraction: {"counts"}, negative: {"counts"}, not_finite: set(), twice: {"repeated-entries"}}[spoil]


def test_a_fraction_that_follows_counts_makes_floats(tmp_path: Path) -> None:
    """In a layer that is no counts: it has the dtype that `add` gives it."""
    adata = made(N_CELLS)
    # More than float32 holds of whole numbers, so that they are not widened to it.
    adata.layers["half"].data = np.full(adata.X.nnz, 2.0**31, "f4")
    adata.layers["half"].data[-1] = 0.5
    adata.write_h5ad(tmp_path / "d.h5ad")
    atlas, copied = (RaggedAtlas.create(str(tmp_path / name)) for name in ("linked", "copied"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linked_values, "STEP_BYTES", 200)
        atlas.add(tmp_path / "d.h5ad", layers={"X": "counts", "layers/half": "half"}, copy=False, progress=False)
        copied.add(
            tmp_path / "d.h5ad", layers={"X": "counts", "layers/half": "half"}, column_order="file", progress=False
        )
        assert atlas.materialize() == ("d",)
    assert_alike(atlas, copied)


def test_a_large_matrix_of_the_extras_comes_too(tmp_path: Path) -> None:
    """Dense and sparse, as it was in the file."""
    adata = made(N_CELLS)
    adata.obsm["wide"] = np.random.default_rng(0).random((N_CELLS, SMALL_BYTES // N_CELLS // 4)).astype("f4")
    adata.varm["loadings"] = np.ones((adata.n_vars, 2))
    adata.write_h5ad(tmp_path / "d.h5ad")
    atlas, copied = (RaggedAtlas.create(str(tmp_path / name)) for name in ("linked", "copied"))
    atlas.add(tmp_path / "d.h5ad", copy=False, progress=False)
    copied.add(tmp_path / "d.h5ad", column_order="file", progress=False)
    assert len(read_links(atlas.dataset("d").records[0])) == 4
    assert atlas.materialize() == ("d",)
    assert_alike(atlas, copied)
    assert problems(atlas) == []


def test_it_is_idempotent_and_keeps_what_snapshots_have(
    linked: RaggedAtlas, unchanged: Callable[[RaggedAtlas], AbstractContextManager[None]]
) -> None:
    """The old snapshot stays linked; `restore` links again, and what the newer one has is taken, not written over."""
    linked.snapshot()
    before = linked.dataset("d").to_anndata()
    assert linked.materialize(["d"]) == ("d",)
    with unchanged(linked):
        assert linked.materialize() == linked.materialize("d") == ()
    linked.snapshot()
    assert [is_linked(linked.checkout(number)) for number in (1, 2)] == [True, False]
    # With the uids of the cells, which are the index.
    one, two = (linked.checkout(number).query() for number in (1, 2))
    for ask in (lambda q: q, lambda q: q.layers("half").features(["g3", "g1"]).where("cell_name < 'c3'")):
        found = [ask(query).to_anndata() for query in (one, two)]
        for adata in found:
            del adata.uns["atlas"]  # the snapshot
        assert_equal(found[1], found[0])
    assert linked.diff(1, 2).cells_added == 0
    shards = {path: path.stat().st_ino for path in Path(linked.uri).rglob("c/0")}
    linked.restore(1)
    assert is_linked(linked)
    assert problems(linked) == []
    Path(linked.uri).with_name("d.h5ad").unlink()
    assert linked.materialize() == ("d",)
    assert {path: path.stat().st_ino for path in Path(linked.uri).rglob("c/0")} == shards
    for there in (linked, linked.checkout(2)):
        assert_equal(there.dataset("d").to_anndata(), before, exact=True)
    assert problems(linked) == []


def test_the_bundle_that_values_were_taken_from_stays(linked: RaggedAtlas, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gc` keeps a shared bundle that only arrays of a snapshot are in, and not the frames of the dataset."""
    monkeypatch.setattr("raggedatlas.catalog.bundles.WORTH", 1)
    before = linked.dataset("d").to_anndata()
    linked.snapshot()
    linked.materialize()
    linked.optimize()
    linked.snapshot()
    linked.restore(1)
    assert linked.materialize() == ("d",)
    linked.drop_snapshot(2)
    linked.snapshot("taken")
    linked.restore(1)
    linked.gc(dry_run=False, grace=timedelta(0))
    view = linked.checkout("taken")
    assert [problem for problem in view.validate("deep") if problem.level == "must"] == []
    assert_equal(view.dataset("d").to_anndata(), before, exact=True)


def test_a_column_sorted_copy_is_made_of_linked_values_and_stays(linked: RaggedAtlas) -> None:
    """`add_csc` reads through the link; the copy is of the same rows afterwards."""
    assert set(linked.add_csc("d")) == {"counts", "half"}
    assert problems(linked) == []
    columns = {path: values for path, values in arrays_of(linked, "d").items() if "/csc/" in path}
    expected = sp.csc_matrix(made(N_CELLS).X)
    np.testing.assert_array_equal(columns["gene_expression/csc/layers/counts"][1], expected.data)
    assert linked.materialize() == ("d",)
    assert linked.add_csc("d") == ()
    after = arrays_of(linked, "d")
    for path, (_, values) in columns.items():
        np.testing.assert_array_equal(after[path][1], values)
    assert problems(linked) == []


@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=pytest.mark.long)])
def test_workers_write(tmp_path: Path, kind: str) -> None:
    """A dataset each; one that is refused keeps no other from it."""
    for number in range(3):
        made(N_CELLS, seed=number).write_h5ad(tmp_path / f"d{number}.h5ad")
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add([tmp_path / f"d{number}.h5ad" for number in range(3)], copy=False, progress=False)
    os.utime(tmp_path / "d1.h5ad", (0, 0))
    with ThreadPoolExecutor(2) if kind == "threads" else ProcessPoolExecutor(2) as pool:
        with pytest.raises(StaleSourceError):
            atlas.materialize(executor=pool)
        assert [is_linked(atlas, f"d{number}") for number in range(3)] == [False, True, False]
        assert atlas.materialize(["d0", "d2"], executor=pool) == ()
    for number in (0, 2):
        assert_equal(atlas.dataset(f"d{number}").to_anndata(), made(N_CELLS, seed=number), exact=True)


def test_a_clean_up_that_fails_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is that of the refused dataset, and the datasets after it are copied; the next call writes over what is left."""
    for number in range(3):
        made(N_CELLS, seed=number).write_h5ad(tmp_path / f"d{number}.h5ad")
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add([tmp_path / f"d{number}.h5ad" for number in range(3)], copy=False, progress=False)
    before = (tmp_path / "d1.h5ad").stat()
    os.utime(tmp_path / "d1.h5ad", (0, 0))
    remove, seen, uid = materialize._remove, list[str](), atlas.dataset("d1").records[0].uid

    def fail(catalog: Catalog, group: str, paths: Iterable[str]) -> None:
        # The first time is before anything is written there.
        if group.startswith(uid) and group in seen:
            raise StoreError("no permission")
        seen.append(group)
        remove(catalog, group, paths)

    monkeypatch.setattr(materialize, "_remove", fail)
    with pytest.raises(StaleSourceError, match="not the file that was linked"):
        atlas.materialize()
    assert [is_linked(atlas, f"d{number}") for number in range(3)] == [False, True, False]
    monkeypatch.undo()
    os.utime(tmp_path / "d1.h5ad", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert atlas.materialize() == ("d1",)
    assert_equal(atlas.dataset("d1").to_anndata(), made(N_CELLS, seed=1), exact=True)


def test_it_is_refused(
    linked: RaggedAtlas, tmp_path: Path, unchanged: Callable[[RaggedAtlas], AbstractContextManager[None]]
) -> None:
    """An unknown dataset; content that another dataset has; a file that is gone."""
    with unchanged(linked), pytest.raises(NotFoundError, match="nope"):
        linked.materialize(["d", "nope"])
    linked.add(tmp_path / "d.h5ad", "copy", progress=False)
    with unchanged(linked), pytest.raises(DuplicateError, match="'copy'"):
        linked.materialize()
    linked.drop_dataset("copy")
    (tmp_path / "d.h5ad").unlink()
    with pytest.raises(StaleSourceError):
        linked.materialize()
    assert is_linked(linked)


WRITING: dict[str, Callable[[RaggedAtlas], object]] = {
    "materialize": lambda atlas: atlas.materialize(),
    "add_csc": lambda atlas: atlas.add_csc("d", space="gene_expression"),
    "relink": lambda atlas: atlas.relink("d"),
}
"""Calls that write arrays of a dataset, or their references."""


@pytest.mark.parametrize("call", WRITING)
def test_another_process_is_waited_for(linked: RaggedAtlas, call: str) -> None:
    """While it lives, on whatever machine; what it has written when it dies is written again."""
    uid, here = linked.dataset("d").records[0].uid, assets.this_process()
    parent = {**here, "pid": os.getppid(), "process_start": assets._process_start(os.getppid())}
    # Containers on two machines often have the same pids.
    for owner in (parent, {**here, "host": "elsewhere"}):
        assets.take_lease(linked._catalog, uid, owner)
        with pytest.raises(ConflictError, match=str(owner["pid"])):
            WRITING[call](linked)
        held = assets.read_lease(linked._catalog, uid)
        assert held is not None
        assert held["host"] == owner["host"]
    assets.take_lease(linked._catalog, uid, {**parent, "process_start": -1})
    WRITING[call](linked)
    assert assets.read_lease(linked._catalog, uid) == {}
    assert problems(linked) == []


@pytest.mark.parametrize("call", WRITING)
def test_another_thread_is_refused(linked: RaggedAtlas, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """While one call writes, each of the others is refused, and what the first one writes is whole."""
    copy, refused = materialize._copy_dataset, list[str]()

    def meanwhile(*args: Any) -> Any:
        with ThreadPoolExecutor(1) as pool, pytest.raises(ConflictError, match="writes arrays of the dataset 'd'"):
            pool.submit(WRITING[call], RaggedAtlas.open(linked.uri)).result()
        refused.append(call)
        return copy(*args)

    monkeypatch.setattr(materialize, "_copy_dataset", meanwhile)
    assert linked.materialize() == ("d",)
    assert refused == [call]
    assert problems(linked) == []


@pytest.mark.parametrize("at", ["before", "mark"])
def test_a_purge_is_refused_meanwhile(linked: RaggedAtlas, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Or values of the dataset would be written after all of it was deleted; also where the purge looks before the lease is there."""
    copy, other, refused = csc._copy_group, RaggedAtlas.open(linked.uri), list[str]()

    def meanwhile(*args: Any) -> Any:
        with pytest.raises(ConflictError, match="writes arrays of the dataset 'd'"):
            other.purge("d")
        refused.append(at)
        return copy(*args)

    monkeypatch.setattr(csc, "_copy_group", meanwhile)
    if at == "mark":
        look, looked = purge.refuse_held, list[str]()

        def late(*args: Any) -> None:
            # The first look is before the mark.
            if looked:
                look(*args)
            looked.append(at)

        monkeypatch.setattr(purge, "refuse_held", late)
    assert set(linked.add_csc("d")) == {"counts", "half"}
    assert refused == [at]
    assert problems(linked) == []
    monkeypatch.undo()
    other.purge("d")
    assert len(linked.list_datasets()) == 0


def test_what_another_call_has_written_is_not_written_again(
    linked: RaggedAtlas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that finished between the plan and the lease of another has done its work."""
    hold, other = assets.hold_lease, RaggedAtlas.open(linked.uri)

    def after(call: str) -> Callable[..., AbstractContextManager[Callable[[], None]]]:
        def held(*args: Any) -> AbstractContextManager[Callable[[], None]]:
            monkeypatch.setattr(f"raggedatlas.ingest.{modules[call]}.hold_lease", hold)
            WRITING[call](other)
            return hold(*args)

        return held

    modules = {"materialize": "materialize", "add_csc": "csc"}
    for call, module in modules.items():
        monkeypatch.setattr(f"raggedatlas.ingest.{module}.hold_lease", after(call))
        assert WRITING[call](linked) == ()
        assert problems(linked) == []


@pytest.mark.parametrize("codec", ["packed", "standard"])
@pytest.mark.parametrize("form", ["dense", "two modalities"])
def test_other_groups_and_codecs(tmp_path: Path, codec: str, form: str) -> None:
    """A dense matrix of counts, and a file of two modalities: read the same before and after, with the hash that `add` gives."""
    one, two = small_anndata(0, N_CELLS), small_anndata(1, N_CELLS, [f"P{number}" for number in range(5)])
    two.obs_names = one.obs_names
    place = tmp_path / ("d.h5mu" if form == "two modalities" else "d.h5ad")
    if form == "two modalities":
        two.X = two.X.toarray()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            md.MuData({"rna": one, "prot": two}).write(place)
    else:
        one.X = one.X.toarray()
        one.write_h5ad(place)
    atlas, copied = (RaggedAtlas.create(str(tmp_path / name), codec=codec) for name in ("linked", "copied"))
    atlas.add(place, copy=False, progress=False)
    copied.add(place, column_order="file", progress=False)
    before = {path: values for path, (_, values) in arrays_of(atlas, "d").items()}
    assert atlas.materialize() == ("d",)
    assert not is_linked(atlas)
    after = arrays_of(atlas, "d")
    assert before.keys() == after.keys()
    for path, values in before.items():
        np.testing.assert_array_equal(after[path][1], values, err_msg=path)
    hashes = [record.content_hash for record in atlas.dataset("d").records]
    assert hashes == [record.content_hash for record in copied.dataset("d").records]
    assert problems(atlas) == []


def test_a_sparse_matrix_of_a_dense_space_is_not_linked(tmp_path: Path) -> None:
    """Its rows are not in the file; it is refused before anything is written, where they would be read as something else."""
    two = small_anndata(1, N_CELLS, [f"P{number}" for number in range(5)])
    one = small_anndata(0, N_CELLS)
    two.obs_names = one.obs_names
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        md.MuData({"rna": one, "prot": two}).write(tmp_path / "d.h5mu")
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    with pytest.raises(SourceError, match="protein_abundance"):
        atlas.add(tmp_path / "d.h5mu", copy=False, progress=False)
    assert atlas.list_datasets().empty
