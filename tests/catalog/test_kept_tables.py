"""Marker tables that are kept with a snapshot: read again, never stale, found when damaged, and treated as the snapshot by all that copies or frees."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import raggedatlas as ra
from raggedatlas.catalog.kept_tables import MARKERS
from raggedatlas.errors import ConflictError, CorruptError, NotFoundError
from raggedatlas.query import markers as module
from support.atlases import small_anndata


@pytest.fixture
def atlas(tmp_path: Path) -> ra.RaggedAtlas:
    made = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    for seed in (1, 2):
        made.add(small_anndata(seed, 30), f"d{seed}", organism="human", progress=False)
    made.snapshot("first")
    return made


def files_of(atlas: ra.RaggedAtlas) -> list[Path]:
    return sorted(Path(atlas.uri, "lance_db", MARKERS).rglob("*.arrow"))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each time that markers are computed."""
    made, computed = module.markers, list[Any]()

    def markers(*given: Any) -> pd.DataFrame:
        computed.append(given)
        return made(*given)

    monkeypatch.setattr(module, "markers", markers)
    return computed


def test_the_second_call_reads_what_the_first_has_kept(atlas: ra.RaggedAtlas, counted: list[Any]) -> None:
    """With the same types and facts, also through a view; a view alone keeps nothing."""
    view = atlas.checkout("first")
    computed = view.markers("cell_type")
    assert files_of(atlas) == []
    first = atlas.markers("cell_type")
    assert len(counted) == 2
    (file,) = files_of(atlas)
    assert file.parent.name == view.record.root_hash
    for again in (
        atlas.markers("cell_type"),
        view.markers("cell_type"),
        ra.RaggedAtlas.open(atlas.uri).markers("cell_type", snapshot=1),
    ):
        pd.testing.assert_frame_equal(again, first, check_exact=True)
        assert again.attrs == first.attrs == computed.attrs
    pd.testing.assert_frame_equal(first, computed, check_exact=True)
    assert len(counted) == 2
    assert len(files_of(atlas)) == 1
    pd.testing.assert_frame_equal(first, view.query().markers("cell_type"), check_exact=True)
    assert len(counted) == 3


def test_other_options_and_snapshots_are_other_tables(atlas: ra.RaggedAtlas, counted: list[Any]) -> None:
    first = atlas.markers("cell_type")
    atlas.markers("cell_type", within="dataset")
    atlas.markers("dataset")
    atlas.markers("cell_type", layer="counts")
    atlas.markers("cell_type", normalize=False)
    assert len(counted) == len(files_of(atlas)) == 5
    atlas.add(small_anndata(3, 30), "d3", organism="human", progress=False)
    atlas.snapshot("second")
    assert len(atlas.markers("cell_type")) > 0
    assert len(counted) == len(files_of(atlas)) == 6
    second = atlas.markers("cell_type", snapshot="second")
    assert second.attrs["markers"]["n_cells"] == first.attrs["markers"]["n_cells"] + 30
    pd.testing.assert_frame_equal(atlas.markers("cell_type", snapshot="first"), first)
    assert len(counted) == 6


def test_tables_of_another_form_are_computed_again(
    atlas: ra.RaggedAtlas, counted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    atlas.markers("cell_type")
    monkeypatch.setattr(module, "_FORM", 2)
    atlas.markers("cell_type")
    assert len(counted) == 2


@pytest.mark.long
def test_gc_frees_the_tables_of_dropped_snapshots(atlas: ra.RaggedAtlas) -> None:
    atlas.markers("cell_type")
    atlas.add(small_anndata(3, 30), "d3", organism="human", progress=False)
    atlas.snapshot("second")
    atlas.markers("cell_type")
    kept = {file.parent.name for file in files_of(atlas)}
    atlas.gc(dry_run=False)
    assert {file.parent.name for file in files_of(atlas)} == kept
    atlas.drop_snapshot("first")
    n_bytes = (
        next(file for file in files_of(atlas) if file.parent.name != atlas.checkout("second").record.root_hash)
        .stat()
        .st_size
    )
    assert atlas.gc(dry_run=True).n_bytes >= n_bytes
    assert len(files_of(atlas)) == 2
    atlas.gc(dry_run=False)
    assert [file.parent.name for file in files_of(atlas)] == [atlas.checkout("second").record.root_hash]
    assert [folder.name for folder in Path(atlas.uri, "lance_db", MARKERS).iterdir()] == [
        atlas.checkout("second").record.root_hash
    ]


def test_a_purge_takes_the_tables_of_purged_cells(atlas: ra.RaggedAtlas, counted: list[Any]) -> None:
    """The table of the snapshot after it is of the cells that are left."""
    before = atlas.markers("dataset")
    assert {*before["group"]} == {"d1", "d2"}
    atlas.purge("d2")
    assert files_of(atlas) == []
    assert atlas.markers("cell_type").attrs["markers"]["n_cells"] == 30
    assert len(counted) == 2


def test_what_is_computed_while_a_snapshot_is_dropped_is_not_kept(
    atlas: ra.RaggedAtlas, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Callable[..., pd.DataFrame] = module.markers
    atlas.add(small_anndata(3, 30), "d3", organism="human", progress=False)
    atlas.snapshot("second")

    def markers(*given: Any) -> pd.DataFrame:
        atlas.drop_snapshot("first")
        return made(*given)

    monkeypatch.setattr(module, "markers", markers)
    assert len(atlas.markers("cell_type", snapshot="first"))
    assert files_of(atlas) == []


def test_a_process_that_dies_leaves_nothing_that_counts(atlas: ra.RaggedAtlas) -> None:
    """Its temporary file is freed with the snapshot."""
    atlas.markers("cell_type")
    (file,) = files_of(atlas)
    left = file.with_name(f".{file.name}.0123abcd.tmp")
    left.write_bytes(b"part")
    file.unlink()
    assert not atlas.validate("deep")
    atlas.markers("cell_type")
    assert len(files_of(atlas)) == 1
    atlas.add(small_anndata(3, 30), "d3", organism="human", progress=False)
    atlas.snapshot("second")
    atlas.drop_snapshot("first")
    atlas.gc(dry_run=False)
    assert not left.exists()


def test_a_snapshot_that_is_gone_is_named(atlas: ra.RaggedAtlas, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call cannot read because another dropped it is a conflict; other errors stay what they are."""

    def markers(*_: Any) -> pd.DataFrame:
        raise NotFoundError("a version is gone")

    atlas.add(small_anndata(3, 30), "d3", organism="human", progress=False)
    atlas.snapshot("second")
    monkeypatch.setattr(module, "markers", markers)
    with pytest.raises(NotFoundError, match="a version is gone"):
        atlas.markers("cell_type", snapshot="first")

    def dropped(*_: Any) -> pd.DataFrame:
        atlas.drop_snapshot("first")
        raise NotFoundError("a version is gone")

    monkeypatch.setattr(module, "markers", dropped)
    with pytest.raises(ConflictError, match="Another process dropped snapshot 1"):
        atlas.markers("cell_type", snapshot="first")


def test_damage_is_found(atlas: ra.RaggedAtlas) -> None:
    """By the call that reads it, and by validation; without the file the table is computed again."""
    first = atlas.markers("cell_type")
    (file,) = files_of(atlas)
    assert atlas.verify(incremental=True).n_files > 0
    assert not atlas.validate("deep")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    for read in (atlas.markers, atlas.checkout("first").markers):
        with pytest.raises(CorruptError, match=r"_markers/.*SHA-256 in its name. Delete the file"):
            read("cell_type")
    for found in (
        atlas.validate("files"),
        atlas.validate("deep"),
        atlas.verify("first"),
        atlas.verify(incremental=True),
    ):
        assert [(problem.rule, problem.path) for problem in found] == [
            ("marker-table", file.relative_to(Path(atlas.uri, "lance_db")).as_posix())
        ]
    file.unlink()
    pd.testing.assert_frame_equal(atlas.markers("cell_type"), first)
    assert not atlas.validate("deep")


def test_mirrors_have_the_tables(atlas: ra.RaggedAtlas, tmp_path: Path, counted: list[Any]) -> None:
    first = atlas.markers("cell_type")
    atlas.sync(tmp_path / "mirror")
    mirror = ra.RaggedAtlas.open(tmp_path / "mirror")
    pd.testing.assert_frame_equal(mirror.markers("cell_type"), first)
    atlas.markers("dataset")
    atlas.sync(tmp_path / "mirror")
    assert len(mirror.markers("dataset"))
    assert len(counted) == 2
    # One that the mirror computes stays in the way of nothing.
    mirror.markers("cell_type", within="dataset")
    atlas.sync(tmp_path / "mirror")
    assert not mirror.validate("deep")
    shutil.move(tmp_path / "mirror", tmp_path / "moved")
    pd.testing.assert_frame_equal(ra.RaggedAtlas.open(tmp_path / "moved").markers("cell_type"), first)
    assert len(counted) == 3


def test_published_atlases_and_clones_have_the_tables(
    atlas: ra.RaggedAtlas, tmp_path: Path, counted: list[Any]
) -> None:
    """An atlas that is opened by the root hash alone reads none, as the hash does not cover them."""
    atlas.set_license("d1", "CC0-1.0")
    atlas.set_license("d2", "CC0-1.0")
    atlas.snapshot("second")
    first, root = atlas.markers("cell_type"), atlas.checkout("second").record.root_hash
    atlas.publish(tmp_path / "web")
    view = ra.open(tmp_path / "web")
    pd.testing.assert_frame_equal(view.markers("cell_type"), first)
    assert len(counted) == 1
    assert not view.validate("deep")
    pd.testing.assert_frame_equal(ra.open(f"{tmp_path / 'web'}@sha256:{root}").markers("cell_type"), first)
    assert len(counted) == 2
    ra.clone(tmp_path / "web", tmp_path / "clone")
    pd.testing.assert_frame_equal(ra.RaggedAtlas.open(tmp_path / "clone").markers("cell_type"), first)
    assert len(counted) == 2
    atlas.markers("dataset")
    atlas.publish(tmp_path / "web")
    assert len(ra.open(tmp_path / "web").markers("dataset"))
    assert len(counted) == 3


def test_what_cannot_be_kept_is_refused(atlas: ra.RaggedAtlas, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError, match="'nothing'"):
        atlas.markers("cell_type", snapshot="nothing")
    empty = ra.RaggedAtlas.create(f"{atlas.uri}2")
    with pytest.raises(NotFoundError, match="snapshot"):
        empty.markers("cell_type")
    monkeypatch.setattr("raggedatlas.catalog.purge.Sweep.run", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        atlas.purge("d2")
    with pytest.raises(ConflictError, match="purge"):
        atlas.markers("cell_type")
