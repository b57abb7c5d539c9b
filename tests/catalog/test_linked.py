"""Linked datasets in the calls that keep an atlas: only their references are files of the store, and all else is as with copied ones."""

import itertools
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import pytest

import raggedatlas as ra
from raggedatlas.catalog import mirror as mirroring
from raggedatlas.catalog.assets import find_dataset, read_links, read_records
from raggedatlas.catalog.snapshots import diff_files
from raggedatlas.errors import NotFoundError, StaleSourceError
from raggedatlas.store.bundle import SHARED
from support.atlases import small_anndata

N_CELLS, SPACE = 20, "gene_expression"
N_DATASETS, WORTH = 6, 4
NOW = timedelta(0)


def made(number: int) -> ad.AnnData:
    """Return a dataset with several layers and other elements."""
    adata = small_anndata(number, N_CELLS)
    adata.layers["half"] = adata.X * 0.5
    adata.obsm["X_pca"] = np.arange(N_CELLS * 2, dtype=np.float32).reshape(-1, 2) + number
    adata.uns["note"] = {"text": f"note {number}"}
    return adata


def linked_atlas(folder: Path, numbers: range) -> ra.RaggedAtlas:
    """Create an atlas ``atlas`` of datasets ``d<number>`` that are linked to files beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        made(number).write_h5ad(folder / f"d{number}.h5ad")
    atlas = ra.RaggedAtlas.create(str(folder / "atlas"))
    atlas.add([folder / f"d{number}.h5ad" for number in numbers], copy=False, progress=False)
    return atlas


@pytest.fixture(autouse=True)
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack fewer datasets than is usual, which takes less time."""
    monkeypatch.setattr("raggedatlas.catalog.bundles.WORTH", WORTH)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an atlas of linked datasets, which a snapshot has, and their files."""
    folder = tmp_path_factory.mktemp("linked") / "given"
    linked_atlas(folder, range(N_DATASETS)).snapshot()
    return folder


@pytest.fixture
def atlas(given: Path, tmp_path: Path) -> ra.RaggedAtlas:
    # With the times of the files, by which a process recognizes them.
    shutil.copytree(given, tmp_path / "place")
    return ra.RaggedAtlas.open(str(tmp_path / "place" / "atlas"))


def store(atlas: ra.RaggedAtlas) -> Path:
    return Path(atlas.uri) / "zarr_store"


def problems(atlas: ra.RaggedAtlas, level: str = "deep") -> list[str]:
    return [problem.rule for problem in atlas.validate(level) if problem.level == "must"]  # type: ignore[arg-type]


def assert_content(there: ra.RaggedAtlas | ra.AtlasView, numbers: range | list[int]) -> None:
    from anndata.tests.helpers import assert_equal

    for number in numbers:
        assert_equal(there.dataset(f"d{number}").to_anndata(), made(number), exact=True)


def shared(atlas: ra.RaggedAtlas) -> list[str]:
    return [name for name in atlas._catalog.arrays.list_children() if SHARED.fullmatch(name)]


def references(atlas: ra.RaggedAtlas) -> set[str]:
    return {link.references.file for r in read_records(atlas._catalog) for link in read_links(r).values()}


def test_their_references_are_all_that_is_stored_of_matrices(atlas: ra.RaggedAtlas) -> None:
    """No array of a linked matrix has a file in the store, and validation of every level finds nothing wrong."""
    assert not [path for path in store(atlas).rglob("c") if path.is_dir()]
    for level in ("quick", "rows", "files", "deep"):
        assert problems(atlas, level) == []


@pytest.mark.parametrize("large", [False, True])
def test_references_move_with_the_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    """Small datasets share files after `optimize`, those too whose references were files of their own; every dataset can be purged."""
    with monkeypatch.context() as patch:
        if large:
            patch.setattr("raggedatlas.store.bundle.MEMBER_BYTES", 2000)
        atlas = linked_atlas(tmp_path / "place", range(N_DATASETS))
    atlas.snapshot()
    assert any("references" in file for file in references(atlas)) == large
    assert problems(atlas) == []
    view = atlas.checkout(1)
    atlas.optimize()
    assert len(shared(atlas)) == 1
    assert references(atlas) == {f"{shared(atlas)[0]}/bundle.zip"}
    atlas.snapshot()
    assert not [path for path in diff_files(atlas._catalog, 1, 2).changed if path.startswith("zarr_store")]
    assert problems(atlas) == []
    assert_content(view, range(N_DATASETS))
    atlas.drop_snapshot(1)
    atlas.gc(dry_run=False, grace=NOW)
    assert {path.name for path in store(atlas).iterdir()} == {"zarr.json", *shared(atlas)}
    assert_content(atlas, range(N_DATASETS))
    atlas.purge("d2")
    assert_content(atlas, [0, 1, 3, 4, 5])
    assert_content(atlas.checkout(2), [0, 1, 3, 4, 5])
    assert problems(atlas) == []
    assert b"note 2" not in b"".join(path.read_bytes() for path in store(atlas).rglob("bundle.zip"))


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def cut(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.truncate(at)


def remove(path: Path, _at: int) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [damage, cut, remove])
@pytest.mark.parametrize("large", [False, True])
def test_damaged_references_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path, int], None], large: bool
) -> None:
    """By `verify`, whether they are a file of their own or part of a bundle; a lost file by validate('rows'), too."""
    with monkeypatch.context() as patch:
        if large:
            patch.setattr("raggedatlas.store.bundle.MEMBER_BYTES", 2000)
        atlas = linked_atlas(tmp_path / "place", range(2))
    record = read_records(atlas._catalog)[0]
    span = read_links(record)["csr/indices"].references
    harm(store(atlas) / span.file, span.offset + span.n_bytes // 2)
    found = [problem for problem in atlas.verify() if problem.rule == "references"]
    assert {problem.path for problem in found} == {record.zarr_group}
    lost = {p.path for p in atlas.validate("rows") if p.rule == "missing-array"}
    assert lost == (set() if harm is damage else {record.zarr_group})


def test_they_are_dropped_freed_restored_and_renamed(atlas: ra.RaggedAtlas) -> None:
    """As other datasets, and the files stay untouched."""
    before = {path: path.stat() for path in Path(atlas.uri).parent.glob("*.h5ad")}
    atlas.rename_dataset("d0", "first")
    atlas.drop_dataset("d1")
    atlas.gc(dry_run=False, grace=NOW)
    atlas.snapshot()
    assert [name.split()[0] for name in atlas.diff(1, 2).datasets_removed] == ["d1"]
    assert_content(atlas, [2, 3])
    atlas.restore(1)
    assert_content(atlas, range(N_DATASETS))
    assert atlas.repair().notes == ()
    atlas.drop_dataset("d1")
    atlas.drop_snapshot(1)
    freed = atlas.gc(dry_run=False, grace=NOW)
    assert len(freed.groups) == 1
    assert problems(atlas) == []
    after = {path: path.stat() for path in Path(atlas.uri).parent.glob("*.h5ad")}
    assert {path: stat.st_mtime_ns for path, stat in before.items()} == {
        path: stat.st_mtime_ns for path, stat in after.items()
    }


def test_a_killed_materialize_leaves_the_old_or_the_new(
    given: Path, tmp_path: Path, dying: Callable[..., AbstractContextManager[list[str]]]
) -> None:
    """Before any of its writes: the dataset reads the same, and the next call completes it."""
    n_killed = 0
    for n in itertools.count():
        shutil.copytree(given, tmp_path / str(n))
        atlas = ra.RaggedAtlas.open(str(tmp_path / str(n) / "atlas"))
        with dying(n, files=True) as done:
            atlas.materialize("d1")
        n_killed += len(done) == n
        atlas = ra.RaggedAtlas.open(atlas.uri)
        assert_content(atlas, [1])
        atlas.materialize("d1")
        assert not any(map(read_links, atlas.dataset("d1").records))
        assert_content(atlas, [1])
        assert_content(atlas.checkout(1), [1])
        assert problems(atlas, "files") == []
        shutil.rmtree(tmp_path / str(n))
        if len(done) < n:
            break
    assert n_killed > 5


@pytest.mark.parametrize(
    ("harm", "rule"),
    [
        (lambda path: os.utime(path, (0, 0)), "source-changed"),
        (lambda path: path.unlink(), "source-changed"),
        (lambda path: made(9).write_h5ad(path), "source-changed"),
    ],
)
def test_a_changed_source_is_a_problem_of_its_dataset_only(
    atlas: ra.RaggedAtlas, harm: Callable[[Path], object], rule: str
) -> None:
    """Found by validate('deep'), which reads the files; the others read none."""
    record = atlas.dataset("d3").records[0]
    harm(Path(atlas.uri).parent / "d3.h5ad")
    for level in ("quick", "rows", "files"):
        assert problems(atlas, level) == []
    found = [(p.rule, p.path) for p in atlas.validate("deep") if p.level == "must"]
    assert found == [(rule, record.zarr_group)]
    assert_content(atlas, [2])


def test_values_are_compared_with_a_hash_of_all(tmp_path: Path) -> None:
    """Where it was recorded: bytes that were changed so that nothing of the file shows it are found."""
    place = tmp_path / "d.h5ad"
    made(0).write_h5ad(place)
    atlas = ra.RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(place, copy=False, hash="full", progress=False)
    assert problems(atlas) == []
    times = place.stat()
    with h5py.File(place, "r+") as file:
        file["X/data"][3] += 1
    with place.open("r+b") as opened:
        opened.truncate(times.st_size)
    os.utime(place, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert problems(atlas) == ["content-hash"]


def test_columns_beyond_the_matrix_are_found(tmp_path: Path) -> None:
    """By validate('deep'), with what no sample has looked at."""
    place = tmp_path / "d.h5ad"
    adata = small_anndata(0, 200)
    adata.write_h5ad(place)
    with h5py.File(place, "r+") as file:
        file["X/indices"][adata.X.indptr[31]] = 99
    atlas = ra.RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(place, copy=False, progress=False)
    assert problems(atlas) == ["feature-bounds"]


def test_what_removes_data_says_that_files_stay(atlas: ra.RaggedAtlas) -> None:
    """`delete_cells` and `purge` leave the values in the files, and name these; copied datasets have no such note."""
    atlas.materialize("d4")
    for number in (3, 4):
        told = [
            *atlas.delete_cells(f"cell_name = 'CELL{number}-2'").notes,
            *atlas.purge(f"d{number}").notes,
        ]
        named = [note for note in told if f"../d{number}.h5ad" in note]
        # An older snapshot has it linked.
        assert len(named) == (2 if number == 3 else 1), told
    assert (Path(atlas.uri).parent / "d3.h5ad").exists()
    assert problems(atlas) == []
    assert_content(atlas, [0, 1, 2, 5])


def test_deleted_cells_stay_deleted(atlas: ra.RaggedAtlas) -> None:
    """Linked, after `materialize`, and in a column-sorted copy; rows keep their places."""
    atlas.delete_cells("cell_name LIKE 'CELL1-1%'")
    left = atlas.dataset("d1").to_anndata()
    assert left.n_obs == N_CELLS - 11
    atlas.materialize("d1")
    np.testing.assert_array_equal(atlas.dataset("d1").to_anndata().X.toarray(), left.X.toarray())
    assert problems(atlas) == []


def test_a_mirror_has_the_references(atlas: ra.RaggedAtlas, tmp_path: Path) -> None:
    """It reads the files where these lie at the same place from there; elsewhere, it says what to do, and never reads another file."""
    near, far = Path(atlas.uri).parent / "mirror", tmp_path / "far" / "mirror"
    assert any("stay in 6 linked file(s)" in note and "sync(values=True)" in note for note in atlas.sync(near).notes)
    atlas.sync(far)
    assert_content(ra.RaggedAtlas.open(str(near)), range(N_DATASETS))
    assert problems(ra.RaggedAtlas.open(str(near))) == []
    mirror = ra.RaggedAtlas.open(str(far))
    assert problems(mirror, "files") == []
    made(7).write_h5ad(far.parent / "d1.h5ad")
    for number in (0, 1):
        with pytest.raises(StaleSourceError, match="relink"):
            mirror.dataset(f"d{number}").to_anndata()
    atlas.materialize()
    atlas.snapshot()
    assert atlas.sync(far).n_bytes > 0
    mirror = ra.RaggedAtlas.open(str(far))
    assert_content(mirror, range(N_DATASETS))
    assert problems(mirror) == []


def test_a_mirror_with_values_needs_no_source(given: Path, atlas: ra.RaggedAtlas, tmp_path: Path) -> None:
    """All of its snapshots are read from its own copies, with the root hashes of the original; what it has is not copied again."""
    first, far = atlas.list_versions()[-1], tmp_path / "far" / "mirror"
    n_bytes = sum(path.stat().st_size for path in given.glob("*.h5ad"))
    atlas.sync(far)
    planned = atlas.sync(far, values=True, dry_run=True)
    assert planned.n_bytes == n_bytes
    assert not any("stay in" in note for note in planned.notes)
    assert atlas.sync(far, values=True).n_bytes == n_bytes
    assert atlas.sync(far, values=True).n_bytes == 0
    atlas.materialize("d0")
    atlas.snapshot()
    report = atlas.sync(far)
    assert 0 < report.n_bytes < n_bytes
    assert not any("linked" in note for note in report.notes)
    shutil.rmtree(Path(atlas.uri).parent)
    mirror = ra.RaggedAtlas.open(str(far), sources="deny")
    assert_content(mirror, range(N_DATASETS))
    assert_content(mirror.checkout(first.version), range(N_DATASETS))
    assert mirror.checkout(first.version).record.root_hash == first.root_hash
    mirror.gc(dry_run=False, grace=NOW)
    assert problems(mirror) == []
    again = tmp_path / "again"
    mirror.sync(again, values=True)
    assert_content(ra.RaggedAtlas.open(str(again), sources="deny"), range(N_DATASETS))


@pytest.mark.parametrize("harm", [damage, cut, remove])
def test_damaged_copies_of_a_mirror_are_found(
    atlas: ra.RaggedAtlas, tmp_path: Path, harm: Callable[[Path, int], None]
) -> None:
    far = tmp_path / "far" / "mirror"
    atlas.sync(far, values=True)
    copy = min(path for path in far.glob("zarr_store/*/source.*") if path.suffix != ".json")
    assert ra.RaggedAtlas.open(str(far)).verify(incremental=True).sound
    # A byte in the middle is no part of what readers compare.
    harm(copy, copy.stat().st_size // 2)
    mirror = ra.RaggedAtlas.open(str(far))
    assert problems(mirror, "files") == ["source-copy"]
    assert [problem.rule for problem in mirror.verify(incremental=True)] == ["source-copy"]
    assert problems(mirror, "deep")[0] == "source-copy"
    copy.unlink(missing_ok=True)
    with pytest.raises(StaleSourceError, match=r"sync\(values=True\)"):
        mirror.dataset(copy.parent.name).to_anndata()
    atlas.sync(far, values=True)
    assert problems(ra.RaggedAtlas.open(str(far))) == []


def test_copies_of_a_mirror_go_with_their_dataset(atlas: ra.RaggedAtlas) -> None:
    """Where a later snapshot has the dataset again, the mirror reads the file, until `sync` copies it again."""
    near, uid = Path(atlas.uri).parent / "mirror", find_dataset(atlas._catalog, "d1")[0].uid
    copied = lambda: [*near.glob(f"zarr_store/{uid}/source.*")]  # noqa: E731
    first = atlas.list_versions()[-1].version
    atlas.sync(near, values=True)
    assert copied()
    atlas.drop_dataset("d1")
    atlas.snapshot()
    atlas.sync(near)
    atlas.restore(first)
    atlas.drop_snapshot(first)
    atlas.sync(near)
    ra.RaggedAtlas.open(str(near)).gc(dry_run=False, grace=NOW)
    assert not copied()
    atlas.snapshot()
    atlas.sync(near)
    assert_content(ra.RaggedAtlas.open(str(near)), range(N_DATASETS))
    atlas.sync(near, values=True)
    assert copied()
    assert_content(ra.RaggedAtlas.open(str(near), sources="deny"), range(N_DATASETS))


def test_a_mirror_with_values_names_what_is_lost(atlas: ra.RaggedAtlas, tmp_path: Path) -> None:
    """A file that is gone is an error if the newest snapshot has it, and before anything of that snapshot is visible; else it is reported."""
    far, gone = tmp_path / "far" / "mirror", Path(atlas.uri).parent / "d1.h5ad"
    gone.rename(tmp_path / "d1.h5ad")
    with pytest.raises(StaleSourceError, match=r"'d1' is linked to .*missing"):
        atlas.sync(far, values=True)
    with pytest.raises(NotFoundError):
        ra.RaggedAtlas.open(str(far))
    atlas.relink("d1", tmp_path / "d1.h5ad")
    atlas.materialize("d1")
    second = atlas.snapshot()
    (lost,) = [note for note in atlas.sync(far, values=True).notes if "older snapshots" in note]
    assert str(gone) in lost
    mirror = ra.RaggedAtlas.open(str(far), sources="deny")
    assert_content(mirror.checkout(second), range(N_DATASETS))
    assert_content(mirror.checkout(1), [0, 2, 3, 4, 5])


@pytest.mark.parametrize("n_written", range(3))
def test_a_killed_sync_of_values_goes_on(
    atlas: ra.RaggedAtlas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_written: int
) -> None:
    """Killed at any file, the mirror shows what it showed before, and the next call copies what is missing."""
    far, write, calls = tmp_path / "far" / "mirror", mirroring.write_blocks, itertools.count()
    atlas.sync(far)

    def dying(*words: object) -> object:
        if next(calls) == n_written:
            raise KeyboardInterrupt
        return write(*words)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(mirroring, "write_blocks", dying)
        with pytest.raises(KeyboardInterrupt):
            atlas.sync(far, values=True)
    assert ra.RaggedAtlas.open(str(far)).checkout(1).query().count() == N_CELLS * N_DATASETS
    sizes = sorted(path.stat().st_size for path in Path(atlas.uri).parent.glob("*.h5ad"))
    assert sum(sizes[:-n_written] if n_written else sizes) >= atlas.sync(far, values=True).n_bytes > 0
    assert_content(ra.RaggedAtlas.open(str(far), sources="deny"), range(N_DATASETS))
    assert problems(ra.RaggedAtlas.open(str(far))) == []
