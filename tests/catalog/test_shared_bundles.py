"""Small datasets share files after `optimize`: nothing that can be seen changes, and each can still be taken out to the last byte."""

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import zarr

import raggedatlas as ra
from raggedatlas.catalog import bundles
from raggedatlas.catalog.assets import read_records
from raggedatlas.catalog.bundles import pack_datasets
from raggedatlas.catalog.catalog import DATASETS, shares_bundles
from raggedatlas.catalog.snapshots import diff_files
from raggedatlas.errors import AtlasError, ConflictError
from raggedatlas.store.bundle import SHARED
from raggedatlas.store.tables import Tables
from support.atlases import small_anndata

N_CELLS, SPACE = 20, "gene_expression"
N_DATASETS, WORTH = 6, 4
NOW = timedelta(0)


def made(number: int) -> ad.AnnData:
    """Return a dataset with elements of every kind."""
    adata = small_anndata(number, N_CELLS)
    if number % 2:
        adata.obsp["near"] = sp.random(N_CELLS, N_CELLS, 0.2, "csr", np.float32, random_state=number)
        adata.obsm["pca"] = np.arange(N_CELLS * 2, dtype=np.float32).reshape(-1, 2)
    adata.uns["note"] = {"text": f"note {number}"}
    return adata


def add(atlas: ra.RaggedAtlas, numbers: range, folder: Path) -> None:
    """Add datasets ``d<number>`` in one call."""
    for number in numbers:
        made(number).write_h5ad(folder / f"d{number}.h5ad")
    atlas.add([folder / f"d{number}.h5ad" for number in numbers], progress=False)


@pytest.fixture(autouse=True)
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack fewer datasets than is usual, which takes less time."""
    monkeypatch.setattr("raggedatlas.catalog.bundles.WORTH", WORTH)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an atlas of small datasets, which a snapshot has."""
    place = tmp_path_factory.mktemp("shared") / "atlas"
    atlas = ra.RaggedAtlas.create(str(place))
    add(atlas, range(N_DATASETS), place.parent)
    atlas.snapshot()
    return place


@pytest.fixture
def atlas(given: Path, tmp_path: Path) -> ra.RaggedAtlas:
    shutil.copytree(given, tmp_path / "atlas")
    return ra.RaggedAtlas.open(str(tmp_path / "atlas"))


def store(atlas: ra.RaggedAtlas) -> Path:
    return Path(atlas.uri) / "zarr_store"


def files(atlas: ra.RaggedAtlas) -> set[str]:
    return {key for key, _, _ in atlas._catalog.arrays.list_objects()}


def bytes_of(atlas: ra.RaggedAtlas, name: str) -> bytes:
    """Return some bytes that only the files of a dataset have."""
    content = (store(atlas) / atlas.dataset(name).records[0].zarr_group / "csr" / "indices" / "c" / "0").read_bytes()
    return content[len(content) // 2 :][:40]


def shared(atlas: ra.RaggedAtlas) -> list[str]:
    return [name for name in atlas._catalog.arrays.list_children() if SHARED.fullmatch(name)]


def problems(atlas: ra.RaggedAtlas) -> list[str]:
    return [str(problem) for problem in atlas.validate("deep") if problem.level == "must"]


def assert_equal(one: ad.AnnData, other: ad.AnnData) -> None:
    from anndata.tests.helpers import assert_equal as equal

    equal(one, other, exact=True)


def assert_content(there: ra.RaggedAtlas | ra.AtlasView, numbers: range | list[int]) -> None:
    """Compare datasets, and queries over all of them, with what was added."""
    for number in numbers:
        assert_equal(there.dataset(f"d{number}").to_anndata(), made(number))
    if isinstance(there, ra.AtlasView):
        found = there.query().to_anndata()
        total = sum(int(made(number).X.sum()) for number in numbers)
        assert found.n_obs == N_CELLS * len(numbers)
        assert int(found.X.sum()) == total


def test_datasets_share_files_and_read_the_same(atlas: ra.RaggedAtlas) -> None:
    """At the tip and in all snapshots, before and after their old files are freed; a second call does nothing."""
    numbers = range(N_DATASETS)
    before = files(atlas)
    view, dataset = atlas.checkout(1), atlas.dataset("d3")
    root = atlas.list_versions()[0].root_hash
    atlas.optimize()
    assert shares_bundles(atlas._catalog)
    assert files(atlas) - before == {f"{name}/{file}" for name in shared(atlas) for file in ("zarr.json", "bundle.zip")}
    assert len(shared(atlas)) == 1
    assert before < files(atlas)
    version = atlas._catalog.tables.version(DATASETS)
    atlas.optimize()
    assert atlas._catalog.tables.version(DATASETS) == version
    assert_content(atlas, numbers)
    assert_content(view, numbers)
    assert_content(atlas.checkout(1), numbers)
    assert atlas.verify(1).snapshots == {1: root}
    atlas.snapshot()
    changed = diff_files(atlas._catalog, 1, 2).changed
    assert not [path for path in changed if path.startswith("zarr_store")]
    assert problems(atlas) == []
    # The first snapshot needs its files.
    assert before < files(atlas)
    atlas.gc(dry_run=False, grace=NOW)
    assert before < files(atlas)
    assert_content(view, numbers)
    assert_equal(dataset.to_anndata(), made(3))
    atlas.drop_snapshot(1)
    # What was opened before may still be reading.
    atlas.gc(dry_run=False)
    assert before < files(atlas)
    assert atlas.gc(dry_run=True, grace=NOW).n_bytes > 0
    atlas.gc(dry_run=False, grace=NOW)
    assert files(atlas) == {"zarr.json", f"{shared(atlas)[0]}/zarr.json", f"{shared(atlas)[0]}/bundle.zip"}
    assert len(list(store(atlas).iterdir())) == 2
    assert_content(atlas, numbers)
    assert_content(atlas.checkout(2), numbers)
    assert problems(atlas) == []
    assert atlas.repair().notes == ()


def test_zarr_python_opens_a_group_in_the_bundle(atlas: ra.RaggedAtlas) -> None:
    """By its path, with all of its arrays."""
    atlas.optimize()
    record = next(record for record in read_records(atlas._catalog) if record.name == "d0")
    with zarr.storage.ZipStore(store(atlas) / shared(atlas)[0] / "bundle.zip", mode="r") as held:
        group = zarr.open_group(held, path=record.zarr_group, mode="r")
        assert group.attrs["raggedatlas"] == {"feature_space": SPACE, "kind": "sparse"}
        parts = [group[f"csr/{name}"][:] for name in ("layers/counts", "indices", "indptr")]
        columns = group["columns"][:] if "columns" in group else slice(None)
    whole = made(0)
    assert np.array_equal(sp.csr_matrix(tuple(parts), shape=whole.shape).toarray()[:, columns], whole.X.toarray())


def test_a_purge_between_reading_and_writing(atlas: ra.RaggedAtlas, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that were read of a dataset are not written after it was purged; the next call packs the others."""
    content, take = bytes_of(atlas, "d1"), bundles.take_lease

    def purging(*given: Any) -> None:
        ra.RaggedAtlas.open(atlas.uri).purge("d1")
        take(*given)

    monkeypatch.setattr(bundles, "take_lease", purging)
    atlas.optimize()
    assert shared(atlas) == []
    monkeypatch.setattr(bundles, "take_lease", take)
    atlas.optimize()
    assert len(shared(atlas)) == 1
    assert not [path for path in Path(atlas.uri).rglob("*") if path.is_file() and content in path.read_bytes()]
    assert_content(atlas, [number for number in range(N_DATASETS) if number != 1])
    assert problems(atlas) == []


def test_few_or_large_datasets_keep_their_files(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so do those of an atlas of standard codecs, whose readers find each array by its path."""
    few = ra.RaggedAtlas.create(str(tmp_path / "few"))
    add(few, range(WORTH - 1), tmp_path)
    standard = ra.RaggedAtlas.create(str(tmp_path / "standard"), codec="standard")
    add(standard, range(WORTH), tmp_path)
    shutil.copytree(given, tmp_path / "large")
    large = ra.RaggedAtlas.open(str(tmp_path / "large"))
    monkeypatch.setattr("raggedatlas.catalog.bundles.SMALL_BYTES", 1000)
    for atlas in (few, standard, large):
        before = files(atlas)
        atlas.optimize()
        assert files(atlas) == before
        assert not shares_bundles(atlas._catalog)


def test_small_bundles_are_written_again_together(atlas: ra.RaggedAtlas, tmp_path: Path) -> None:
    """When what is new is as much, or when most datasets of one are gone; the files before are freed."""
    numbers = [*range(N_DATASETS)]
    atlas.optimize()
    first = shared(atlas)
    more = range(100, 100 + 2 * N_DATASETS)
    add(atlas, more, tmp_path)
    atlas.optimize()
    atlas.drop_snapshot(1)
    atlas.gc(dry_run=False, grace=NOW)
    [second] = shared(atlas)
    assert [second] != first
    assert len(files(atlas)) == 3
    assert_content(atlas, [*numbers, *more])
    for number in more:
        atlas.drop_dataset(f"d{number}")
    atlas.optimize()
    atlas.gc(dry_run=False, grace=NOW)
    assert shared(atlas) not in ([second], [])
    assert_content(atlas, numbers)
    assert problems(atlas) == []


def test_a_dropped_dataset_leaves_the_others_as_they_are(atlas: ra.RaggedAtlas) -> None:
    """It comes back with a snapshot; its name can be given again."""
    numbers = [i for i in range(N_DATASETS) if i != 4]
    atlas.optimize()
    atlas.snapshot()
    atlas.drop_dataset("d4")
    atlas.gc(dry_run=False, grace=NOW)
    assert_content(atlas, numbers)
    assert_content(atlas.checkout(2), range(N_DATASETS))
    atlas.restore(1)
    assert_content(atlas, range(N_DATASETS))
    atlas.restore(2)
    assert_content(atlas, range(N_DATASETS))
    assert problems(atlas) == []


@pytest.mark.parametrize("taken", ["before", "after", "dropped"])
def test_a_purge_takes_every_byte(atlas: ra.RaggedAtlas, taken: str) -> None:
    """Of a dataset in a shared bundle, whether snapshots have it there, in files of its own, or not any more; the others stay."""
    numbers = [i for i in range(N_DATASETS) if i != 5]
    marker = bytes_of(atlas, "d5")
    uid, others = atlas.dataset("d5").uid, {f"d{i}": atlas.dataset(f"d{i}").uid for i in numbers}
    atlas.optimize()
    if taken != "before":
        atlas.snapshot()
    if taken == "dropped":
        # The first snapshot has it, in files of its own, and the last one names the bundle for others.
        atlas.drop_snapshot(2)
        atlas.drop_dataset("d5")
        atlas.snapshot()
    assert any(marker in path.read_bytes() for path in store(atlas).rglob("*.zip"))
    atlas.purge("d5")
    for path in Path(atlas.uri).rglob("*"):
        if path.is_file() and "zarr_store" in path.parts:
            content = path.read_bytes()
            assert marker not in content
            assert uid.encode() not in content
    assert_content(atlas, numbers)
    assert {name: atlas.dataset(name).uid for name in others} == others
    for record in atlas.list_versions():
        assert_content(atlas.checkout(record.version), numbers)
    assert problems(atlas) == []
    assert atlas.verify() == []
    # The new bundle is named by records, however young it is, so that no `add` is waited for.
    atlas.restore(1)
    assert_content(atlas, numbers)


def test_a_purge_that_dies_is_finished(atlas: ra.RaggedAtlas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it died, `repair` leaves no byte of the dataset."""
    numbers, marker = [i for i in range(N_DATASETS) if i != 5], bytes_of(atlas, "d5")
    atlas.optimize()
    atlas.snapshot()

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for place in ("purge.change_versions", "collectors.bundles_with"):
        with monkeypatch.context() as patched:
            patched.setattr(f"raggedatlas.catalog.{place}", die)
            with pytest.raises(KeyboardInterrupt):
                ra.RaggedAtlas.open(atlas.uri).purge("d5")
    atlas.repair()
    assert not any(marker in path.read_bytes() for path in store(atlas).rglob("*.zip"))
    assert_content(atlas, numbers)
    assert_content(atlas.checkout(2), numbers)
    atlas.gc(dry_run=False, grace=NOW)
    assert problems(atlas) == []


def test_a_process_that_dies_leaves_the_datasets_as_they_were(
    atlas: ra.RaggedAtlas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the bundle and the records; what it left is removed."""
    before = files(atlas)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("raggedatlas.store.tables.Tables.merge", die)
        with pytest.raises(KeyboardInterrupt):
            atlas.optimize()
    assert len(shared(atlas)) == 1
    assert_content(atlas, range(N_DATASETS))
    # This process still runs, so its bundle counts as being written.
    atlas.repair()
    assert len(shared(atlas)) == 1
    monkeypatch.setattr("raggedatlas.catalog.assets._runs", lambda *_: False)
    atlas.repair()
    assert files(atlas) == before
    assert problems(atlas) == []


@pytest.mark.parametrize("lost", [1, 100])
def test_a_commit_whose_response_is_lost_keeps_the_bundle(
    atlas: ra.RaggedAtlas, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """Whether the next attempt succeeds or all seem to fail, the records name a bundle that is there."""
    merge, left = Tables.merge, [lost]

    def lose(self: Tables, *args: Any, **kwargs: Any) -> None:
        merge(self, *args, **kwargs)
        left[0] -= 1
        if left[0] >= 0:
            raise ConflictError("another writer was faster")

    monkeypatch.setattr(Tables, "merge", lose)
    monkeypatch.setattr("raggedatlas.store.tables.time.sleep", lambda _: None)
    atlas.optimize()
    assert len(shared(atlas)) == 1
    assert "shared-" in atlas.dataset("d1").records[0].arrays
    assert_content(atlas, range(N_DATASETS))
    assert problems(atlas) == []


def test_what_others_change_meanwhile_stays(atlas: ra.RaggedAtlas, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset that is renamed keeps the new name, one that is dropped or gets a copy stays out of the bundle."""
    from raggedatlas.catalog import bundles

    write, other = bundles.Bundle.write, ra.RaggedAtlas.open(atlas.uri)

    def then(self: bundles.Bundle, place: object) -> None:
        write(self, place)  # type: ignore[arg-type]
        other.rename_dataset("d1", "renamed")
        other.drop_dataset("d2")
        other.add_csc("d3", space=SPACE)

    monkeypatch.setattr(bundles.Bundle, "write", then)
    atlas.optimize()
    names = list(atlas.list_datasets()["name"])
    assert "renamed" in names
    assert "d2" not in names
    record = atlas.dataset("d3").records[0]
    assert "csc/indptr" in record.array_specs
    assert "shared-" not in record.arrays
    assert "shared-" in atlas.dataset("renamed").records[0].arrays
    assert_equal(atlas.dataset("renamed").to_anndata(), made(1))
    assert_content(atlas, [i for i in range(N_DATASETS) if i not in (1, 2)])
    assert problems(atlas) == []


def test_writing_calls_take_datasets_in_bundles(atlas: ra.RaggedAtlas) -> None:
    """Copies, deleted cells, replacing and annotating, with the old files there and without."""
    atlas.optimize()
    atlas.add_csc("d0", space=SPACE)
    assert problems(atlas) == []
    atlas.snapshot()
    atlas.drop_snapshot(1)
    atlas.gc(dry_run=False, grace=NOW)
    assert problems(atlas) == []
    atlas.add_csc("d1", space=SPACE)
    uids = list(atlas.checkout(2).query().where("dataset = 'd2'").to_pandas().index[:5])
    atlas.delete_cells(uids=uids)
    atlas.add(made(50), "d3", on_duplicate="replace", progress=False)
    atlas.gc(dry_run=False, grace=NOW)
    assert problems(atlas) == []
    assert atlas.dataset("d2").to_anndata().n_obs == N_CELLS - 5
    assert_equal(atlas.dataset("d3").to_anndata(), made(50))
    assert_content(atlas, [0, 1, *range(4, N_DATASETS)])
    atlas.snapshot()
    view = atlas.checkout_latest(atlas.uri)
    by_column = view.query().features(list(view.features().index[:3])).to_anndata()
    assert by_column.n_obs == N_CELLS * N_DATASETS - 5


def test_a_mirror_has_the_bundle_once(atlas: ra.RaggedAtlas, tmp_path: Path) -> None:
    """Without what no snapshot reads, and it can be brought up to date."""
    atlas.optimize()
    atlas.snapshot()
    atlas.drop_snapshot(1)
    target = str(tmp_path / "mirror")
    atlas.sync(target)
    mirror = ra.RaggedAtlas.open(target)
    assert files(mirror) == {f"{shared(atlas)[0]}/zarr.json", f"{shared(atlas)[0]}/bundle.zip"}
    assert_content(mirror, range(N_DATASETS))
    assert problems(mirror) == []
    atlas.purge("d5")
    atlas.sync(target)
    assert_content(ra.RaggedAtlas.open(target), [i for i in range(N_DATASETS) if i != 5])


def test_a_flipped_bit_is_found_and_named(atlas: ra.RaggedAtlas) -> None:
    """In any member and between them, with the bundle; a damaged file does not get into one."""
    atlas.optimize()
    file = store(atlas) / shared(atlas)[0] / "bundle.zip"
    content = bytearray(file.read_bytes())
    for at in (40, len(content) // 2, len(content) - 100):
        damaged = bytearray(content)
        damaged[at] ^= 1
        file.write_bytes(damaged)
        found = [str(problem) for problem in atlas.verify()]
        assert any(f"{shared(atlas)[0]}/bundle.zip" in text for text in found), found
    file.write_bytes(content)
    assert atlas.verify() == []


def test_a_damaged_dataset_keeps_its_files(atlas: ra.RaggedAtlas) -> None:
    """Its damage would be in the bundle, which has a hash of its own."""
    record = atlas.dataset("d0").records[0]
    file = store(atlas) / record.zarr_group / "csr" / "indices" / "c" / "0"
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)
    assert any("d0 were left as they are" in note for note in pack_datasets(atlas._catalog))
    assert "shared-" not in atlas.dataset("d0").records[0].arrays
    assert "shared-" in atlas.dataset("d1").records[0].arrays


def test_another_format_is_refused(atlas: ra.RaggedAtlas) -> None:
    atlas._catalog.tables.update_metadata(DATASETS, {"raggedatlas.format": "2"})
    with pytest.raises(AtlasError, match=r"format '2', and .* reads '1'; use the version"):
        ra.RaggedAtlas.open(atlas.uri)
