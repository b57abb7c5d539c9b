"""Verification: every byte against what was recorded, all of it or what changed since, by one call for atlases and snapshots."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raggedatlas as ra
from campaigns.mutation_campaign import live_files, make_atlas
from command import ask, done, refused
from command import read as read_json
from raggedatlas.catalog import assets, file_checks, purge, snapshots
from raggedatlas.catalog.catalog import VERSIONS, Catalog, open_catalog
from raggedatlas.catalog.inventory import Inventory
from raggedatlas.catalog.validation import validate
from raggedatlas.catalog.versions import change_versions, list_versions
from raggedatlas.errors import ArgumentError
from raggedatlas.ingest.csc import add_csc
from raggedatlas.model.reports import FileDifference
from raggedatlas.store.arrays import ArrayWriter
from raggedatlas.store.codecs import extend_checksum
from raggedatlas.store.ledger import Ledger
from raggedatlas.store.location import Location
from raggedatlas.store.read import read_all
from support.atlases import verify, write_dataset

Two = tuple[Catalog, str, str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An atlas with every kind of file."""
    return make_atlas(tmp_path_factory.mktemp("rich"))


def flipped(file: Path, chance: random.Random) -> bytes:
    """Flip one bit of a file, and return what it was."""
    before = file.read_bytes()
    data = bytearray(before)
    bit = chance.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    return before


def find(rich: Path, keys: list[str], seed: int) -> list[str]:
    """Flip a bit of each of some files, one after the other; return those that verification takes for sound or does not name."""
    atlas, chance, missed = ra.RaggedAtlas.open(rich), random.Random(seed), []
    for key in keys:
        before = flipped(rich / key, chance)
        found = atlas.verify()
        (rich / key).write_bytes(before)
        named = " ".join(f"{problem.path} {problem.message}" for problem in found)
        store, table, *_ = key.split("/")
        # Of tables the file, of the Zarr store the dataset with the array; manifests and the list of snapshots have texts of their own.
        if table in {"_manifests", "atlas_versions.lance"}:
            known = ["snapshot", "atlas_versions"]
        else:
            known = [table if store == "zarr_store" else key.removeprefix("lance_db/")]
        if found.sound or not any(name in named for name in known):
            missed.append(key)
    return missed


@pytest.mark.long
def test_a_flipped_bit_of_any_kind_of_file_is_found(rich: Path) -> None:
    """A file of every seventh kind; the campaign flips bits of all."""
    kinds = live_files(rich)
    assert len(kinds) > 60
    chosen = sorted(kinds)[::7]
    assert find(rich, [random.Random(kind).choice(kinds[kind]) for kind in chosen], seed=0) == []


@pytest.mark.nightly
def test_a_flipped_bit_of_every_file_is_found(rich: Path) -> None:
    """Every file that a snapshot reaches."""
    assert find(rich, [key for keys in live_files(rich).values() for key in keys], seed=1) == []


@pytest.mark.long
def test_metadata_above_a_geometry_store_is_verified(rich: Path, tmp_path: Path) -> None:
    """The group of the dataset, which lies outside of the store and its digest."""
    path = Path(shutil.copytree(rich, tmp_path / "atlas"))
    (store,) = (path / "zarr_store").glob("*/transcripts")
    (store.parent / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {"other": 1}}')
    assert [p.rule for p in ra.RaggedAtlas.open(path).verify()] == ["group-metadata"]


@pytest.mark.long
def test_all_arrays_have_hashes_of_their_shards(rich: Path, tmp_path: Path) -> None:
    """Those of datasets, of column-sorted copies, of results, of what is in bundles, and what a purge writes anew."""
    path = Path(shutil.copytree(rich, tmp_path / "atlas"))
    atlas = ra.RaggedAtlas.open(path)
    for purged in ("d1", ""):
        catalog = open_catalog(Location(str(path)))
        results = Inventory(catalog).asset_groups
        assert results
        for record in [*assets.read_records(catalog), *results]:
            assert {f"{name}/c" for name in record.array_specs} <= record.array_checksums.keys()
        assert atlas.verify() == []
        if purged:
            atlas.purge(purged)


def forge(values: np.ndarray[Any, Any]) -> None:
    """Change some of the first 33 values so that their crc32c stays: the checksums of 33 changes are linearly dependent."""
    sound, known = extend_checksum(0, values), dict[int, tuple[int, int]]()
    for at in range(33):
        values[at] ^= 1
        rest, places = extend_checksum(0, values) ^ sound, 1 << at
        values[at] ^= 1
        while rest and (found := known.get(rest.bit_length())):
            rest, places = rest ^ found[0], places ^ found[1]
        known[rest.bit_length()] = rest, places
    values[:33] ^= np.array([places >> at & 1 for at in range(33)], values.dtype)
    assert extend_checksum(0, values) == sound


def test_values_that_were_changed_with_all_their_checksums_are_found(two: Two) -> None:
    """In chunks, index and record."""
    catalog, first, _ = two
    snapshots.snapshot(catalog)
    (group,) = [group for group in assets.read_records(catalog) if group.uid == first]
    assert verify(catalog) == []
    reader = assets.array_readers(catalog, group)["csr/layers/counts"]
    before = read_all(reader)
    values = before.copy()
    forge(values)
    writer = ArrayWriter(catalog.arrays, reader.spec.path, values.dtype, profile=catalog.codec())
    writer.append(values)
    assert writer.close() == reader.spec
    # Readers take the values for those that were written.
    assert read_all(reader).tolist() == values.tolist() != before.tolist()
    for found in (verify(catalog), verify(catalog, 1), validate(catalog, "deep")):
        assert [(p.rule, p.path, "csr/layers/counts" in p.message) for p in found] == [
            ("shards", group.zarr_group, True)
        ]


def test_snapshots_have_root_hashes_that_cover_their_record(two: Two) -> None:
    """Two records that differ have different roots, a changed record is found, and equal ones have equal roots."""
    catalog = two[0]
    first = snapshots.snapshot(catalog, "one")
    second = snapshots.snapshot(catalog)
    assert first.manifest == second.manifest
    assert first.root != second.root
    assert (
        [record.root for record in list_versions(catalog)]
        == [first.root, second.root]
        == [first.root_hash, second.root_hash]
    )
    found = verify(catalog)
    assert (found.sound, dict(found.snapshots)) == (True, {1: first.root, 2: second.root})
    forged = first.model_copy(update={"label": "another"})
    change_versions(catalog, lambda old: [forged, *old[1:]])
    problems = verify(catalog)
    assert ("root", "snapshot 1") in {(problem.rule, problem.path) for problem in problems}
    assert verify(catalog, 2).sound
    assert not verify(catalog, "another").sound


def test_a_purge_gives_snapshots_another_root(two: Two) -> None:
    """What a snapshot contains changes, so its root does, and it verifies."""
    catalog, first, _ = two
    before = snapshots.snapshot(catalog).root
    purge.purge(catalog, first)
    (record,) = list_versions(catalog)
    assert record.root not in {before, ""}
    assert verify(catalog).sound


def test_what_only_an_old_snapshot_reaches_is_verified(two: Two) -> None:
    """Arrays of a dropped dataset are damaged: the newest state does not reach them, but the atlas and the snapshot do."""
    catalog, first, _ = two
    snapshots.snapshot(catalog)
    assets.drop_dataset(catalog, first)
    last = snapshots.snapshot(catalog)
    shard = next(path for path in (catalog.arrays.path / first).rglob("c/*") if path.is_file())
    flipped(shard, random.Random(0))
    for problems in (verify(catalog), validate(catalog, "deep"), verify(catalog, 1)):
        assert any(first in problem.path for problem in problems if problem.level == "must")
    assert verify(catalog, last.version).sound


def test_what_a_sound_snapshot_has_is_not_looked_at(two: Two, read: list[str]) -> None:
    """Of files and of cells: damage of what it reaches is not seen, damage of what came since is, and less is read."""
    catalog, first, _ = two
    snapshots.snapshot(catalog)
    third = write_dataset(catalog, "c", ["A", "D"], np.ones((4, 2), "u1"), {"kind": ["z"] * 4})
    snapshots.snapshot(catalog)
    read.clear()
    assert verify(catalog, 2, since=1) == validate(catalog.at(list_versions(catalog)[1]), "deep", since=1) == []
    assert third in read
    assert first not in read
    for uid, level in ((first, "files"), (third, "deep")):
        shard = next(path for path in (catalog.arrays.path / uid).rglob("c/*") if path.is_file())
        flipped(shard, random.Random(0))
        found = [problem.path for problem in validate(catalog, level, since=1) if problem.level == "must"]
        assert [path.split("/")[0] for path in found] == ([] if uid == first else [third])
    assert {problem.path.split("/")[0] for problem in verify(catalog)} == {first, third}


def test_a_snapshot_is_compared_with_a_root_hash(two: Two) -> None:
    """The one that was noted, and another; the newest state has none."""
    catalog = two[0]
    root = snapshots.snapshot(catalog).root
    path = catalog.location.path
    for level in ("quick", "files"):
        view = catalog.at(list_versions(catalog)[0])
        assert validate(view, level, root_hash=root) == []
        assert [(p.rule, p.path) for p in validate(view, level, root_hash="0" * 64)] == [("root", "snapshot 1")]
    with pytest.raises(ArgumentError, match=r"root_hash=\.\.\. is that of a snapshot"):
        validate(catalog, root_hash=root)
    assert root in done("verify", path, "--snapshot", 1, "--root-hash", root)
    result = ask("validate", path, "--at", 1, "--root-hash", "0" * 64)
    assert (result.exit_code, "was expected" in result.stdout) == (1, True)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Table files and groups that are read."""
    seen: list[str] = []
    compare, check = file_checks.compare_files, file_checks.check_bytes
    monkeypatch.setattr(file_checks, "compare_files", lambda place, files: seen.extend(files) or compare(place, files))
    monkeypatch.setattr(
        file_checks, "check_bytes", lambda place, record: seen.append(record.uid) or check(place, record)
    )
    return seen


def test_incremental_verification_reads_what_is_new(two: Two, read: list[str]) -> None:
    """The first call reads all, the next nothing, and later ones what was added or changed; validation shares what is known."""
    catalog, first, second = two
    snapshots.snapshot(catalog)
    every = verify(catalog, incremental=True)
    assert every.n_skipped == 0
    assert {first, second} < set(read)
    read.clear()
    again = verify(catalog, incremental=True)
    assert (read, again.n_files, again.n_skipped) == ([], 0, every.n_files)
    assert again.skipped_since <= verify(catalog, incremental=True).skipped_since
    assert validate(catalog, "deep", incremental=True) == []
    assert read == []
    third = write_dataset(catalog, "c", ["A", "D"], np.ones((4, 2), "u1"), {"kind": ["z"] * 4})
    add_csc(catalog, first, "gene_expression", None)
    snapshots.snapshot(catalog)
    found = verify(catalog, incremental=True)
    assert found.sound
    assert {uid for uid in (first, second, third) if uid in read} == {first, third}
    read.clear()
    verify(catalog)
    assert {first, second, third} < set(read)


def _touch(file: Path) -> None:
    """Put other bytes of the same length there, with the old times."""
    info = file.stat()
    flipped(file, random.Random(3))
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))


@pytest.mark.parametrize("change", [_touch, Path.unlink, lambda file: file.write_bytes(b"")])
@pytest.mark.parametrize(
    "pattern",
    [
        "zarr_store/*/gene_expression/csr/indices/c/*",
        "zarr_store/*/gene_expression/csr/indptr/zarr.json",
        "lance_db/cells.lance/data/*",
    ],
)
def test_incremental_verification_finds_files_that_were_replaced(
    two: Two, pattern: str, change: Callable[[Path], object]
) -> None:
    """Even where length and time of modification are as before; once restored, the atlas is sound again."""
    catalog = two[0]
    snapshots.snapshot(catalog)
    assert verify(catalog, incremental=True).sound
    file = next(path for path in sorted(catalog.location.path.glob(pattern)) if _reached(catalog, path))
    before = file.read_bytes()
    change(file)
    assert not verify(catalog, incremental=True).sound
    assert not verify(catalog, incremental=True).sound
    file.write_bytes(before)
    assert verify(catalog, incremental=True).sound


def _reached(catalog: Catalog, path: Path) -> bool:
    from raggedatlas.store.manifests import read_manifest

    key = path.relative_to(catalog.location.path).as_posix().removeprefix("lance_db/")
    return "zarr_store" in key or key in read_manifest(catalog.tables.location, list_versions(catalog)[-1].manifest)


def test_a_copy_is_not_taken_for_verified(two: Two, read: list[str], tmp_path: Path) -> None:
    """An atlas at another address, and one that was put in its place with all times kept, are read again."""
    catalog, first, second = two
    snapshots.snapshot(catalog)
    verify(catalog, incremental=True)
    shutil.copytree(catalog.location.path, tmp_path / "copy")
    read.clear()
    verify(
        Catalog(
            Location(tmp_path / "copy"),
            type(catalog.tables)(Location(tmp_path / "copy").child("lance_db")),
            Location(tmp_path / "copy").child("zarr_store"),
        ),
        incremental=True,
    )
    assert {first, second} < set(read)
    shutil.rmtree(catalog.location.path)
    shutil.copytree(tmp_path / "copy", catalog.location.path)
    read.clear()
    verify(catalog, incremental=True)
    assert {first, second} < set(read)


def test_a_ledger_that_is_damaged_or_cannot_be_written_only_means_more_reading(
    two: Two, read: list[str], cache: Path
) -> None:
    """Verification of an atlas that cannot be written works, and writes nothing there."""
    catalog = two[0]
    snapshots.snapshot(catalog)
    before = {path: path.stat().st_mtime_ns for path in catalog.location.path.rglob("*")}
    cache.write_text("no folder")
    assert verify(catalog, incremental=True).sound
    cache.unlink()
    verify(catalog, incremental=True)
    (file,) = (cache / "raggedatlas" / "checks").iterdir()
    for text in (b"", b"[]", b'{"sound": 1}', b"\xff"):
        file.write_bytes(text)
        read.clear()
        assert verify(catalog, incremental=True).sound
        assert read
    assert {path: path.stat().st_mtime_ns for path in catalog.location.path.rglob("*")} == before


def test_what_was_removed_from_an_atlas_is_forgotten(two: Two) -> None:
    """The ledger holds what the atlas holds; a call for one snapshot keeps what it says of the others."""
    catalog, first, _ = two
    snapshots.snapshot(catalog)
    verify(catalog, incremental=True)
    known = Ledger(catalog.location).found
    verify(catalog, 1, incremental=True)
    assert Ledger(catalog.location).found.keys() == known.keys()
    assets.drop_dataset(catalog, first)
    snapshots.drop_snapshot(catalog, 1)
    snapshots.snapshot(catalog)
    verify(catalog, incremental=True)
    assert not Ledger(catalog.location).found.keys() >= known.keys()


def test_incremental_is_of_deep_validation(two: Two) -> None:
    """Other levels read no bytes that could be skipped."""
    with pytest.raises(ArgumentError, match="incremental=True is of validate"):
        validate(two[0], "rows", incremental=True)


def test_an_atlas_whose_list_of_snapshots_is_damaged_is_not_sound(two: Two) -> None:
    """The damage is reported, not raised."""
    catalog = two[0]
    snapshots.snapshot(catalog)
    for file in (catalog.tables.location.path / f"{VERSIONS}.lance" / "data").iterdir():
        file.write_bytes(b"")
    assert not verify(catalog).sound


def test_damage_that_comes_while_an_atlas_is_open_is_reported(two: Two) -> None:
    """Of the file by which the list of snapshots is opened, which every call reads first."""
    snapshots.snapshot(two[0])
    atlas = ra.RaggedAtlas.open(two[0].location.path)
    newest = min((two[0].tables.location.path / f"{VERSIONS}.lance" / "_versions").glob("*.manifest"))
    newest.write_bytes(b"x" * newest.stat().st_size)
    assert not atlas.verify().sound
    assert {problem.rule for problem in atlas.validate("deep")} == {"unreadable"}


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FileDifference]:
    """`diff_files` in an atlas whose cells and arrays cannot be read."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError

    def compared(*words: Any) -> FileDifference:
        with monkeypatch.context() as patch:
            for name in ("catalog.snapshots._compare_cells", "store.read.read_slice", "store.location.digest_file"):
                patch.setattr(f"raggedatlas.{name}", refuse)
            return snapshots.diff_files(*words)

    return compared


def test_files_of_snapshots_are_compared_by_what_is_recorded(
    two: Two, compare: Callable[..., FileDifference], tmp_path: Path
) -> None:
    """Equal but for the record, then with a dataset more, then with other arrays; an equal copy elsewhere has the same root."""
    catalog, first, _ = two
    snapshots.snapshot(catalog)
    snapshots.snapshot(catalog)
    found = compare(catalog, 1, 2)
    assert (found.equal, found.old_root == found.new_root) == (True, False)
    third = write_dataset(catalog, "c", ["A", "D"], np.ones((4, 2), "u1"), {"kind": ["z"] * 4})
    snapshots.snapshot(catalog)
    found = compare(catalog, 2, 3)
    assert f"zarr_store/{third}/gene_expression/csr/indices" in found.added
    assert any(path.startswith("lance_db/cells.lance/data/") for path in found.added)
    assert not [path for path in (*found.removed, *found.changed) if path.startswith("zarr_store")]
    add_csc(catalog, first, "gene_expression", None)
    snapshots.snapshot(catalog)
    arrays = [path for path in compare(catalog, 3, 4).added if path.startswith("zarr_store")]
    assert {path.split("/")[1] for path in arrays} == {first}
    shutil.copytree(catalog.location.path, tmp_path / "copy")
    other = open_catalog(Location(tmp_path / "copy"))
    same = compare(catalog, 4, 4, other)
    assert (same.equal, same.old_root == same.new_root) == (True, True)
    assert compare(catalog, 4, 2, other).removed


def test_the_command_compares_files_of_two_places(two: Two, tmp_path: Path) -> None:
    """With one line where nothing differs, and the paths of what does."""
    catalog = two[0]
    snapshots.snapshot(catalog)
    write_dataset(catalog, "c", ["A", "D"], np.ones((4, 2), "u1"), {"kind": ["z"] * 4})
    snapshots.snapshot(catalog)
    path = catalog.location.path
    shutil.copytree(path, tmp_path / "copy")
    assert "do not differ" in done("diff", path, 2, 2, "--files", "--other", tmp_path / "copy")
    assert "zarr_store/" in done("diff", path, 1, 2, "--files")
    assert "with --files" in refused("diff", path, 1, 2, "--other", tmp_path / "copy", code=2)
    assert read_json("diff", path, 2, 1, "--files", "--other", tmp_path / "copy")["removed"]


@pytest.mark.parametrize("name", ["aws_endpoint", "azure_storage_account_name"])
def test_places_of_two_owners_are_told_apart(name: str, tmp_path: Path) -> None:
    """Buckets of two servers and containers of two accounts, of one name, are verified each for itself."""
    one, other = (Location("az://container/a", {name: who, "cache_dir": str(tmp_path)}) for who in ("one", "other"))
    Ledger(one).save({"a": "now"})
    assert Ledger(one).found == {"a": "now"}
    assert Ledger(other).found == {}


def test_without_a_home_nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user has no home directory, as in containers, what was found sound is not kept, and nothing is raised."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.delenv(name, raising=False)

    def homeless(*_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    ledger = Ledger(Location(str(tmp_path)))
    ledger.save({"a": "now"})
    assert Ledger(Location(str(tmp_path))).found == {}
