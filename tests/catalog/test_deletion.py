"""Deletion of cells: exact, all or nothing, in everything that is attached to them; and the file given back names what is missing."""

import contextlib
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from scipy import sparse

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.catalog import deletion, maintenance, optimization
from raggedatlas.catalog.catalog import CELLS, DELETIONS_KEY, VERSIONS, Catalog
from raggedatlas.catalog.cells import write_frame
from raggedatlas.errors import ArgumentError, AtlasError, ConflictError, CorruptError, NotFoundError, QueryError
from raggedatlas.model.records import PurgeMark
from raggedatlas.store.filters import col
from raggedatlas.store.tables import PURGE_KEY, Tables
from support.anndata_strategies import assert_equal
from support.atlases import GENES, small_anndata, write_results
from support.processes import started
from support.spatial import make_slide

Dying = Callable[[int], contextlib.AbstractContextManager[list[str]]]


@pytest.fixture(autouse=True)
def _keep_categories() -> Iterator[None]:
    """Let AnnData subset as the atlas does: categories that no cell has any more stay."""
    with ad.settings.override(remove_unused_categories=False):
        yield


def problems(atlas: Any) -> list[str]:
    """Return what validation finds at the level that includes the others, but for table files that no snapshot has hashed yet."""
    return [str(p) for p in atlas.validate("deep") if p.rule != "unassigned-index"]


def rich() -> ad.AnnData:
    """Make a dataset with every kind of element that goes by cells."""
    made, rng = small_anndata(3, 30, extra="score"), np.random.default_rng(0)
    made.layers["scaled"] = np.asarray(rng.random(made.shape))
    made.layers["columns"] = sparse.csc_matrix(made.X)
    made.raw = small_anndata(3, 30, GENES[:20])
    members: dict[str, Any] = {
        "X_pca": rng.random((30, 4)), "tiles": rng.random((30, 2, 3)), "sparse": sparse.random(30, 5, 0.3, format="csr", rng=rng),
        "frame": pd.DataFrame({"a": np.arange(30), "b": list("xyz") * 10}, index=made.obs_names),
    }  # fmt: skip
    made.obsm.update(members)
    made.obsp.update({"distances": sparse.random(30, 30, 0.2, format="csr", rng=rng), "dense": rng.random((30, 30))})
    made.varm["PCs"] = rng.random((12, 3))
    made.uns["note"] = {"n": 1}
    return made


def bare() -> ad.AnnData:
    """Make a dataset of cells without a matrix, two of which share a name."""
    return ad.AnnData(obs=pd.DataFrame({"n": np.arange(6)}, index=["a", "b", "a", "c", "d", "e"]))


SOURCES: dict[str, Callable[[], ad.AnnData]] = {"rich": rich, "bare": bare}


@pytest.mark.filterwarnings("ignore:Observation names are not unique")
@pytest.mark.parametrize("name", SOURCES)
def test_the_file_given_back_lacks_the_cells_and_names_them(tmp_path: Path, name: str) -> None:
    """In memory, as h5ad and as a source, it equals AnnData's subset of the file; two deletions add up, and a snapshot from before has all."""
    atlas, given = RaggedAtlas.create(str(tmp_path / "atlas")), SOURCES[name]()
    # Another dataset before and behind, so that rows of the table are not rows of the file.
    atlas.add(small_anndata(1, 5), "before", organism="human", progress=False)
    atlas.add(given, name, organism="human", obs="all", progress=False)
    atlas.add(small_anndata(2, 7), "behind", organism="human", progress=False)
    before = atlas.snapshot()
    uids = np.array(atlas.checkout(before).query().where(dataset=name).obs("cell_name").to_pandas().index)
    rows = [[0, 3], [1]] if name == "bare" else [[1, 4, 5, 29], [0, 2, 20]]
    for own in rows:
        assert atlas.delete_cells(uids=uids[own]).n_cells == len(own)
    kept = np.setdiff1d(np.arange(len(given)), np.concatenate(rows))
    expected, dataset = given[kept].copy(), atlas.dataset(name)
    assert dataset.n_cells == len(dataset.obs) == len(kept)
    assert atlas.list_datasets().set_index("name").loc[name, "n_cells"] == len(kept)
    for found in (dataset.to_anndata(), ad.read_h5ad(dataset.write(tmp_path / "x.h5ad"))):
        missing = found.uns.pop("deleted_cells")
        assert list(missing["cell_name"]) == [given.obs_names[i] for i in sorted(itertools.chain(*rows))]
        assert list(missing["n_cells"]) == [len(own) for own in rows] == [d.n_cells for d in dataset.deletions]
        assert_equal(expected, found)
    again = RaggedAtlas.create(str(tmp_path / "again"))
    again.add(dataset.source(), name, organism="human", progress=False)
    assert again.dataset(name).n_cells == len(kept)
    assert_equal(given, atlas.checkout(before).dataset(name).to_anndata())
    view = atlas.checkout(atlas.snapshot())
    assert_equal(dataset.to_anndata(), view.dataset(name).to_anndata())
    assert view.query().where(dataset=name).count() == len(kept)
    assert (view.record.n_cells, atlas.diff(before, view.version).cells_removed) == (
        12 + len(kept),
        sum(map(len, rows)),
    )
    assert problems(atlas) == problems(view) == []


@pytest.mark.filterwarnings("ignore")
def test_modalities_follow(tmp_path: Path, data_dir: Path) -> None:
    """Cells of a MuData file go from every modality that has them, from its maps and shared elements."""
    mudata = pytest.importorskip("mudata")
    path = data_dir / "wu2020.h5mu"
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(path, organism="human", progress=False)
    dataset = atlas.dataset("wu2020")
    whole = dataset.to_mudata()
    view = atlas.checkout(atlas.snapshot())
    uids = view.query().obs("cell_name").to_pandas()
    gone = whole.obs_names[::7]
    assert atlas.delete_cells(uids=uids.index[::7]).n_cells == len(gone)
    kept = np.setdiff1d(np.arange(whole.n_obs), np.arange(whole.n_obs)[::7])
    for found in (dataset_of(atlas).to_mudata(), mudata.read_h5mu(dataset_of(atlas).write(tmp_path / "x.h5mu"))):
        assert list(found.obs_names) == list(whole.obs_names[kept])
        assert list(found.uns["deleted_cells"]["cell_name"]) == list(gone)
        assert list(found.mod) == list(whole.mod)
        for name, expected in whole.mod.items():
            assert_equal(expected[~expected.obs_names.isin(gone)].copy(), found.mod[name])
        for name in whole.mod:
            mapped = np.asarray(found.obsmap[name]).ravel()
            names = found.mod[name].obs_names
            assert [names[i - 1] for i in mapped if i] == list(found.obs_names[mapped > 0])
    assert "deleted_cells" in dataset_of(atlas).to_anndata().uns
    assert problems(atlas) == []


def dataset_of(atlas: RaggedAtlas) -> Any:
    (uid,) = atlas.list_datasets().index
    return atlas.dataset(uid)


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An atlas with a snapshot, with results in both forms, geometry, an annotation and a column-sorted copy."""
    folder = tmp_path_factory.mktemp("attached")
    atlas = RaggedAtlas.create(str(folder / "atlas"))
    slide = make_slide(20, seed=1)
    atlas.add(small_anndata(1, 12), "first", organism="human", progress=False)
    atlas.add(small_anndata(2, 15, GENES[4:14]), "second", organism="human", progress=False)
    atlas.add(slide.transcripts, "slide", dataset="slide", cells="cell_id", counts=True, progress=False)
    cells = atlas._catalog.tables.read(CELLS, ["uid"]).column(0).to_pylist()
    values = np.arange(2.0 * len(cells), dtype=np.float32).reshape(-1, 2)
    for form in ("space", "vector"):
        folder_of = write_results(folder / form, cells[::2], values[::2])
        atlas.add(folder_of, form, as_=form, progress=False)
    atlas.annotate(
        pa.table({"uid": cells[1:], "label": ["odd", "even"] * (len(cells) // 2) + ["odd"] * (len(cells) % 2 - 1)})
    )
    atlas.add_csc("first")
    atlas.snapshot("before")
    return folder / "atlas"


@pytest.fixture
def atlas(attached: Path, tmp_path: Path) -> RaggedAtlas:
    return RaggedAtlas.open(str(shutil.copytree(attached, tmp_path / "atlas")))


def test_what_is_attached_to_cells_follows(atlas: RaggedAtlas) -> None:
    """Values of the cells that are left stay theirs: counts, results, annotations, shapes, samples, and copies made before and after."""
    view = atlas.checkout("before")
    old = view.query().with_results("space", "vector").to_anndata()
    gone = old.obs_names[[0, 2, 3, 11, 14, 20, 27, 28, 40]]
    report = atlas.delete_cells(uids=list(gone))
    assert (
        dict(report.datasets)
        == old.obs.loc[gone]
        .groupby(
            old.obs["dataset"].map({r["name"]: uid for uid, r in view.list_datasets().iterrows()}).loc[gone],
            observed=True,
        )
        .size()
        .to_dict()
    )
    atlas.add_csc("second")
    new = atlas.checkout(atlas.snapshot())
    found = new.query().with_results("space", "vector").to_anndata()
    kept = [uid for uid in old.obs_names if uid not in set(gone)]
    assert list(found.obs_names) == kept
    assert_equal(old[kept].copy().X, found.X)
    pd.testing.assert_frame_equal(old[kept].obs, found.obs)
    for name in ("space", "vector"):
        np.testing.assert_array_equal(found.obsm[name], old[kept].obsm[name])
        assert new.results().loc[name, "n_cells"] == int((~np.isnan(found.obsm[name][:, 0])).sum())
    few = new.query().features("GENE5", "GENE6")
    np.testing.assert_array_equal(
        few.to_anndata().X.toarray(), view.query().features("GENE5", "GENE6").to_anndata()[kept].X.toarray()
    )
    assert new.query().count() == len(kept) == len(new.query().limit(1000).to_pandas())
    assert set(new.query().sample(10, seed=1).to_pandas().index) <= set(kept)
    pd.testing.assert_frame_equal(new.presence(), view.presence())
    assert int(new.geometries()["n_cells"].iloc[0]) == int((found.obs["dataset"] == "slide").sum())
    assert new.query().where(dataset="slide").geometry().n_objects == new.geometries()["n_cells"].iloc[0]
    assert problems(atlas) == problems(new) == problems(view) == []
    atlas.restore("before")
    assert problems(atlas) == []
    assert list(atlas.checkout(atlas.snapshot()).query().to_pandas().index) == list(old.obs_names)
    # Deleted, restored and deleted again: the record of the first deletion went with the cells' return.
    assert atlas.delete_cells(uids=list(gone[:4])).n_cells == 4
    assert sum(atlas._catalog.n_deleted().values()) == 4
    assert problems(atlas) == []


@pytest.mark.parametrize(
    "action",
    ["drop_result", "drop_geometry", "drop_annotation", "drop_dataset", "purge", "optimize", "rename", "replace"],
)
def test_later_calls_know_of_it(atlas: RaggedAtlas, action: str) -> None:
    """What is dropped, purged, compacted, renamed or added again after a deletion leaves an atlas without a problem."""
    first = atlas._catalog.tables.read(CELLS, ["uid"]).column(0).to_pylist()
    atlas.delete_cells(uids=[first[0], first[13], first[30]])
    calls: dict[str, Callable[[], Any]] = {
        "drop_result": lambda: [atlas.drop_result("space"), atlas.drop_result("vector")],
        "drop_geometry": lambda: atlas.drop_geometry("slide"),
        "drop_annotation": lambda: atlas.drop_annotation(atlas.annotations().index[0]),
        "drop_dataset": lambda: atlas.drop_dataset("first"),
        "purge": lambda: atlas.purge("second"),
        "optimize": atlas.optimize,
        "rename": lambda: atlas.rename_dataset("first", "1st"),
        "replace": lambda: atlas.add(small_anndata(1, 12), "first", organism="human", on_duplicate="replace", progress=False),
    }  # fmt: skip
    calls[action]()
    assert problems(atlas) == []
    names = atlas.list_datasets().set_index("name")["n_cells"]
    kept = {"first": 11, "1st": 11, "second": 14, "slide": 19} | ({"first": 12} if action == "replace" else {})
    assert dict(names) == {name: kept[name] for name in names.index}
    assert atlas._catalog.tables.count(CELLS) == names.sum()
    for name in names.index:
        assert atlas.dataset(name).to_anndata().n_obs == names[name]
    with contextlib.suppress(NotFoundError):
        atlas.restore("before")
    assert problems(atlas) == []


@pytest.mark.long
def test_gc_frees_files_of_a_deletion_that_was_never_recorded(atlas: RaggedAtlas, dying: Dying) -> None:
    """Once they are older than the grace; files that the tip or a snapshot names stay."""
    uids = state_of(atlas)[0]

    def files() -> set[str]:
        return {key for key, _, _ in atlas._catalog.arrays.list_objects() if "/frames/deleted." in key}

    def delete(*cells: int) -> set[str]:
        before = files()
        atlas.delete_cells(uids=[uids[i] for i in cells])
        return files() - before

    of_snapshot = delete(1, 13)
    atlas.snapshot("without")
    atlas.restore("before")
    of_tip = delete(2)
    with dying(0):
        delete(3, 14)
    assert (len(of_snapshot), len(of_tip), len(files())) == (2, 1, 5)
    maintenance.gc(atlas._catalog, dry_run=False)
    assert len(files()) == 5
    assert maintenance.gc(atlas._catalog, dry_run=False, grace=timedelta(0)).n_bytes > 0
    assert files() == of_snapshot | of_tip
    assert atlas.checkout("without").dataset("first").n_cells == atlas.dataset("first").n_cells == 11
    atlas.drop_snapshot("without")
    maintenance.gc(atlas._catalog, dry_run=False, grace=timedelta(0))
    assert files() == of_tip
    assert problems(atlas) == []


def test_a_drop_of_geometry_reports_the_cells_that_are_left(atlas: RaggedAtlas) -> None:
    """Cells that were deleted before are not among those that lose their shapes."""
    slide = atlas.checkout("before").query().where(dataset="slide").obs([]).to_arrow().column("uid").to_pylist()
    atlas.delete_cells(uids=[slide[0], slide[5]])
    assert atlas.geometries()["n_cells"].tolist() == [18]
    assert atlas.drop_geometry("slide", dataset="slide").n_cells == 18


def test_the_same_file_is_still_recognized(atlas: RaggedAtlas) -> None:
    """A dataset that lost cells is a duplicate of the file that it was added from."""
    uid = atlas._catalog.tables.read(CELLS, ["uid"]).column(0)[0].as_py()
    atlas.delete_cells(uids=[uid])
    with pytest.raises(AtlasError, match="the same cells, features and values"):
        atlas.add(small_anndata(1, 12), "again", organism="human", progress=False)


def state_of(atlas: RaggedAtlas) -> tuple[Any, ...]:
    """Read the cells and the datasets given back."""
    names = list(atlas.list_datasets()["name"])
    cells = [list(atlas.dataset(name).obs.index) for name in names]
    return atlas._catalog.tables.read(CELLS, ["uid"]).column(0).to_pylist(), names, cells


@pytest.mark.long
def test_a_deletion_that_dies_left_all_cells_or_none(atlas: RaggedAtlas, dying: Dying, tmp_path: Path) -> None:
    """Whatever write it dies before, nothing or all is deleted, and validate tells it from damage; repair removes the record of what
    did not happen, and the same call, with or without a repair, deletes the cells."""
    before, folder = state_of(atlas), Path(atlas.uri)
    uids = [before[0][i] for i in (0, 3, 14, 30)]
    lengths = set()
    for n in itertools.count():
        own = RaggedAtlas.open(str(shutil.copytree(folder, tmp_path / str(n))))
        finished = False
        with dying(n) as done:
            own.delete_cells(uids=uids)
            finished = True
        now = state_of(own)
        lengths.add(len(now[0]))
        assert len(now[0]) in (len(before[0]), len(before[0]) - 4), done
        assert len(now[0]) == sum(map(len, now[2])), done
        rules = {p.rule for p in own.validate("deep")}
        assert rules == ({"unfinished-deletion"} if n and not finished else set()), done
        view = own.checkout(own.snapshot())
        assert view.query().count() == len(now[0])
        assert problems(view) == []
        if n % 2:
            assert [note for note in own.repair().notes if "4 cells" in note] == [] if finished else True
            assert state_of(own) == now, done
        report = own.delete_cells(uids=uids)
        assert report.n_cells == len(now[0]) - len(before[0]) + 4
        assert len(state_of(own)[0]) == len(before[0]) - 4
        assert problems(own) == []
        if finished:
            break
    assert done == [f"update_metadata_if {CELLS}", f"delete_at {CELLS}"]
    assert len(lengths) == 2


@pytest.mark.parametrize("between", ["annotate", "add", "optimize", "delete", "restore", "drop"])
def test_a_commit_in_between_does_not_matter(atlas: RaggedAtlas, between: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer that commits after the record was written and before the cells go is seen: the deletion is planned again."""
    uids = atlas._catalog.tables.read(CELLS, ["uid"]).column(0).to_pylist()
    other = RaggedAtlas.open(atlas.uri)
    calls: dict[str, Callable[[], Any]] = {
        "annotate": lambda: other.annotate(pa.table({"uid": uids, "new": ["x"] * len(uids)})),
        "add": lambda: other.add(small_anndata(9, 6), "new", organism="human", progress=False),
        "optimize": other.optimize,
        "delete": lambda: other._catalog.tables.delete_rows(CELLS, pa.array([1 << 40], pa.uint64())),
        # Below the check for running deletions, as if it had come a moment earlier.
        "restore": lambda: other._catalog.tables.restore(CELLS, other.checkout("before").record.table_versions[CELLS]),
        "drop": lambda: other.drop_dataset("slide"),
    }  # fmt: skip
    usual, done = Tables.delete_at, []

    def late(self: Tables, *args: Any, **given: Any) -> None:
        if not done:
            done.append(True)
            calls[between]()
        usual(self, *args, **given)

    monkeypatch.setattr(Tables, "delete_at", late)
    assert atlas.delete_cells(uids=[uids[1], uids[13]]).n_cells == 2
    monkeypatch.undo()
    left = atlas._catalog.tables.read(CELLS, ["uid"]).column(0).to_pylist()
    assert [uid for uid in left if uid in set(uids)] == [
        u for u in uids[: 27 if between == "drop" else None] if u not in (uids[1], uids[13])
    ]
    assert problems(atlas) == []
    assert atlas.dataset("first").n_cells == 11


@pytest.mark.long
def test_one_deletion_at_a_time(atlas: RaggedAtlas, dying: Dying, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the process of a deletion lives, another deletion, restore and purge are refused and repair leaves its record; it ends with the process."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    uid = atlas._catalog.tables.read(CELLS, ["uid"]).column(0)[0].as_py()
    with dying(1):
        atlas.delete_cells(uids=[uid])
    catalog: Catalog = atlas._catalog
    (record,) = catalog.recorded_deletions()
    assert catalog.deletions() == ()
    with started([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        start = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
        running = record.model_copy(update={"owner": {**record.owner, "pid": other.pid, "process_start": start}})
        catalog.tables.update_metadata(CELLS, {DELETIONS_KEY: json.dumps([running.model_dump(mode="json")])})
        for call in (
            lambda: atlas.delete_cells(uids=[uid]),
            lambda: atlas.restore("before"),
            lambda: atlas.purge("slide"),
        ):
            with pytest.raises(ConflictError):
                call()
        atlas.repair()
        assert catalog.recorded_deletions() == (running,)
    assert [note for note in atlas.repair().notes if "had died" in note]
    assert catalog.recorded_deletions() == ()
    assert atlas.delete_cells(uids=[uid]).n_cells == 1


@pytest.mark.long
def test_a_purge_that_began_meanwhile_refuses_it(atlas: RaggedAtlas, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is taken back, and nothing is deleted."""
    before = state_of(atlas)
    monkeypatch.setattr(deletion, "write_frame", lambda *args: begin(atlas) or write_frame(*args))
    with pytest.raises(ConflictError, match="unfinished-purge"):
        atlas.delete_cells(uids=before[0][:1])
    monkeypatch.undo()
    atlas.repair()
    assert atlas._catalog.recorded_deletions() == ()
    assert [uid for uid in before[0] if uid in state_of(atlas)[0]] == state_of(atlas)[0]


def begin(atlas: RaggedAtlas) -> None:
    """Leave the mark of a purge of the slide."""
    uid = atlas.dataset("slide").uid
    atlas._catalog.tables.update_metadata(VERSIONS, {PURGE_KEY: PurgeMark(uid=uid, name="slide").model_dump_json()})


@pytest.mark.long
def test_damage_is_not_taken_for_a_deletion(atlas: RaggedAtlas) -> None:
    """A lost cell is a wrong count, a damaged list of deleted rows is found and refused, and a record that does not parse too."""
    tables, first = atlas._catalog.tables, atlas._catalog.tables.read(CELLS, ["uid"]).column(0).to_pylist()
    atlas.delete_cells(uids=first[:2])
    version = tables.version(CELLS)
    tables.delete(CELLS, f"uid = '{first[5]}'")
    assert "cell-count" in {p.rule for p in atlas.validate("rows")}
    with pytest.raises(CorruptError, match=r"9 cells .*, 10 are recorded"):
        atlas.delete_cells(uids=first[6:7])
    tables.restore(CELLS, version)
    assert problems(atlas) == []
    (path,) = Path(atlas.uri).glob("zarr_store/*/frames/deleted.*.arrow")
    good = path.read_bytes()
    path.write_bytes(good[:200] + bytes([good[200] ^ 1]) + good[201:])
    assert {p.rule for p in atlas.validate("deep") if p.level == "must"} == {"deleted-rows"}
    with pytest.raises(CorruptError, match="SHA-256"):
        atlas.dataset("first").to_anndata()
    path.unlink()
    assert {p.rule for p in atlas.validate("deep") if p.level == "must"} == {"deleted-rows"}
    path.write_bytes(good)
    tables.update_metadata(CELLS, {DELETIONS_KEY: "[{]"})
    with pytest.raises(CorruptError, match=DELETIONS_KEY):
        atlas.list_datasets()
    assert {p.rule for p in atlas.validate() if p.level == "must"} == {"unreadable"}


@pytest.mark.long
def test_bytes_are_freed(tmp_path: Path) -> None:
    """Once no snapshot has the cells, optimize and gc free their rows of the table; the arrays keep theirs until the dataset is purged."""
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    made = small_anndata(1, 3000, GENES[:5])
    made.obs["text"] = [f"{i:064x}" for i in np.random.default_rng(0).integers(0, 2**62, 3000)]
    atlas.add(made, "large", organism="human", progress=False)
    old = atlas.snapshot()
    catalog = atlas._catalog

    def sizes() -> tuple[int, int]:
        return catalog.tables.location.child(f"{CELLS}.lance", "data").size(), catalog.arrays.size()

    before = sizes()
    rows = atlas.checkout(old).query().obs("cell_name").to_pandas().index
    atlas.delete_cells(uids=rows[:2700])
    assert sizes()[0] == before[0]
    atlas.snapshot()
    atlas.drop_snapshot(old)
    optimization.optimize(catalog)
    report = maintenance.gc(catalog, dry_run=False, keep=timedelta(0))
    after = sizes()
    assert report.n_bytes > 0.8 * before[0]
    assert after[0] < 0.3 * before[0]
    assert after[1] >= before[1]
    assert atlas.dataset("large").n_cells == 300
    assert problems(atlas) == []
    atlas.purge("large")
    assert sizes()[1] < 0.1 * before[1]


WRONG: dict[str, tuple[Callable[[RaggedAtlas, list[str]], Any], type[AtlasError], str]] = {
    "nothing given": (lambda a, _: a.delete_cells(), ArgumentError, "a condition or uids"),
    "both given": (lambda a, u: a.delete_cells("n_genes < 3", uids=u[:1]), ArgumentError, "one of them"),
    "unknown column": (lambda a, _: a.delete_cells(cell_typ="B"), QueryError, "Did you mean 'cell_type'"),
    "SQL that does not parse": (lambda a, _: a.delete_cells("n_genes <"), QueryError, "sql parser error"),
    "all cells of a dataset": (lambda a, _: a.delete_cells(dataset="first"), QueryError, r"All 12 cells .* drop_dataset\('"),
    "all cells": (lambda a, _: a.delete_cells("n_genes >= 0"), QueryError, "and all of"),
    "a foreign uid": (lambda a, u: a.delete_cells(uids=[u[0], "f" * 16]), NotFoundError, r"1 of the uids .*\['f{16}'\]"),
    "a number for a uid": (lambda a, _: a.delete_cells(uids=[12]), AtlasError, "texts of 16 hexadecimal digits, not int64"),
    "a missing uid": (lambda a, u: a.delete_cells(uids=[u[0], None]), AtlasError, "1 of the 2 uids are missing"),
    "a table without uids": (lambda a, u: a.delete_cells(uids=pa.table({"cell": u})), AtlasError, "no column 'uid'"),
    "no file": (lambda a, _: a.delete_cells(uids="nowhere.txt"), AtlasError, "nowhere.txt"),
    "a snapshot": (lambda a, u: a.checkout("before").delete_cells(uids=u[:1]), AtlasError, "snapshot 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused_and_nothing_deleted(atlas: RaggedAtlas, case: str) -> None:
    """One refusal per way to be wrong; no table has a new version."""
    call, error, message = WRONG[case]
    uids = atlas._catalog.tables.read(CELLS, ["uid"]).column(0).to_pylist()
    version = atlas._catalog.tables.version(CELLS)
    for given in (call, lambda a, u: a.delete_cells(uids=u[:1], dry_run=True)):
        with pytest.raises(error, match=message) if given is call else contextlib.nullcontext():
            given(atlas, uids)
    assert atlas._catalog.tables.version(CELLS) == version


def test_every_way_to_name_cells(atlas: RaggedAtlas, tmp_path: Path) -> None:
    """Conditions and uids in any form mean the same cells; a dry run reports what the call then deletes; deleted cells are passed over."""
    view = atlas.checkout("before")
    found = view.query().where(col("cell_type") == "B").to_anndata()
    uids = found.obs_names
    (tmp_path / "uids.txt").write_text("\n".join(uids) + "\n")
    pd.DataFrame({"uid": uids}).to_csv(tmp_path / "uids.csv", index=False)
    ways: dict[str, dict[str, Any]] = {
        name: {"uids": given}
        for name, given in {
            "list": list(uids), "array": np.array(uids), "index": uids, "series": pd.Series(uids), "arrow": pa.array(uids.to_list()),
            "set": set(uids), "repeated": [*uids, *uids], "frame": found.obs, "anndata": found, "text": tmp_path / "uids.txt",
            "csv": str(tmp_path / "uids.csv"),
        }.items()
    }  # fmt: skip
    reports = {name: atlas.delete_cells(**given, dry_run=True) for name, given in ways.items()}
    reports["sql"] = atlas.delete_cells("cell_type = 'B'", dry_run=True)
    reports["mapping"] = atlas.delete_cells({"cell_type": "B"}, dry_run=True)
    reports["names"] = atlas.delete_cells(cell_type="B", dry_run=True)
    done = atlas.delete_cells(col("cell_type") == "B")
    assert {name: (r.n_cells, dict(r.datasets), r.notes) for name, r in reports.items()} == dict.fromkeys(
        reports, (len(uids), dict(done.datasets), done.notes)
    )
    assert done.n_cells == len(uids)
    with pytest.warns(UserWarning, match="cell_type"):
        assert atlas.delete_cells(cell_type="b").n_cells == 0
    again = atlas.delete_cells(uids=uids)
    assert (again.n_cells, dict(again.datasets)) == (0, {})
    assert f"{len(uids)} of the cells were deleted before" in again.notes


def test_the_cells_of_a_query_are_deleted(tmp_path: Path) -> None:
    """A query of a snapshot names its cells; with a condition beside it, it is refused."""
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(small_anndata(1, 5), "one", organism="human", progress=False)
    query = atlas.checkout(atlas.snapshot()).query().limit(2)
    with pytest.raises(ArgumentError, match="one of them"):
        atlas.delete_cells(query, uids=["5a3e8c0f12d4b697"])
    assert atlas.delete_cells(query).n_cells == 2
    assert set(atlas.checkout(atlas.snapshot()).query().to_pandas().index).isdisjoint(query.to_pandas().index)


def test_an_annotation_of_deleted_cells_says_when_and_by_what_they_went(tmp_path: Path) -> None:
    """The refusal counts the ids that each deletion took, apart from those that were never cells."""
    atlas = RaggedAtlas.create(tmp_path / "atlas")
    atlas.add(small_anndata(1, 12), "one", organism="human")
    frame = atlas.checkout(atlas.snapshot()).query().to_pandas()
    uids = list(frame.index)
    atlas.delete_cells(uids=uids[:2])
    atlas.delete_cells(col("n_genes") == frame["n_genes"].iloc[5])
    n = int((frame["n_genes"].iloc[2:] == frame["n_genes"].iloc[5]).sum())
    labels = {"uid": [*uids, "0" * 16], "label": ["B"] * (len(uids) + 1)}
    with pytest.raises(AtlasError, match=f"{n + 3} of 13 rows") as refused:
        atlas.annotate(labels, name="labels")
    first, second = atlas._opened.deletions()
    assert f"2 of them were deleted at {first.created_at[:19]} (given uids); {n} of them" in str(refused.value)
    assert f"deleted at {second.created_at[:19]} ({second.where})" in str(refused.value)
    with pytest.raises(AtlasError, match=r"None of the 2 rows .* 2 of them were deleted"):
        atlas.annotate({"uid": uids[:2], "label": ["A", "B"]}, name="labels")
    assert atlas.annotate(labels, name="labels", unknown="skip").n_cells == 12 - n - 2
