"""Files that break a rule of their format never reach an atlas: refused by rule, or for a reason that says the way out."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from raggedatlas import RaggedAtlas
from raggedatlas.errors import AtlasError, DuplicateError, MissingExtraError, SourceError, ValuesError
from support.anndata_faults import damage, put, write_good
from support.atlases import small_anndata

Change = Callable[[Any], None]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def compressed(path: Path) -> None:
    """Compress a layer by a filter that only a plugin knows."""
    hdf5plugin = pytest.importorskip("hdf5plugin")
    with h5py.File(path, "r+") as file:
        kept = dict(file["layers/dense"].attrs)
        values = file["layers/dense"][...]
        del file["layers/dense"]
        file.create_dataset("layers/dense", data=values, **hdf5plugin.Zstd()).attrs.update(kept)


def changed(change: Change) -> Callable[[Path], None]:
    return lambda path: damage(path, change)


def outside(root: Any) -> None:
    root["X/indices"][3] = 99


def three_axes(root: Any) -> None:
    put(root, "layers/dense", np.ones((3, 4, 2)))


def lists_outside(root: Any) -> None:
    root["obs/kind/codes"][1] = 7


def wrong_names(root: Any) -> None:
    put(root, "obsm/frame/_index", np.array([b"c1", b"c3", b"c2"]))


BROKEN: dict[str, tuple[Callable[[Path], None], type[AtlasError], str]] = {
    "an index out of range": (changed(outside), SourceError, r"X has an entry .*outside its 4 columns.*\(rule A58\)"),
    "a layer of three axes": (changed(three_axes), SourceError, "A17 must: layers/dense: its shape is"),
    "a code out of range": (changed(lists_outside), SourceError, r"obs/kind has a code .*\(rule A104\)"),
    "a frame of other names": (changed(wrong_names), SourceError, "A19 must: obsm/frame: its row 1 has another name"),
    "a cut file": (cut, SourceError, "truncated"),
    "a filter that is not installed": (compressed, MissingExtraError, r"install raggedatlas\[plugins\]"),
}


def files_of(atlas: RaggedAtlas) -> set[Path]:
    return {at for at in Path(atlas.uri).rglob("*") if at.is_file()}


@pytest.mark.parametrize("name", list(BROKEN))
def test_broken_files_never_reach_an_atlas(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused by rule or reason, no file of the atlas is more or less after it, and the good one of two is added."""
    harm, kind, said = BROKEN[name]
    bad, good = (write_good(tmp_path / f"{label}.h5ad", "hdf5") for label in ("bad", "good"))
    harm(bad)
    damage(good, lambda root: put(root, "layers/dense", np.full((3, 4), 2.0)))
    if harm is compressed:
        monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: code < 32000)
    atlas = RaggedAtlas.create(tmp_path / "a.atlas")
    before = files_of(atlas)
    with pytest.raises(kind, match=said) as caught:
        atlas.add(bad, progress=False)
    assert str(bad) in str(caught.value)
    assert files_of(atlas) == before
    with pytest.raises(SourceError, match=f"1 of 2 sources were refused.*{said}"):
        atlas.add([bad, good], progress=False)
    assert atlas.list_datasets()["name"].tolist() == ["good"]


def test_a_rule_is_named_only_where_it_is_the_reason(tmp_path: Path) -> None:
    """A refusal of values names no rule though the file breaks one; a broken rule that stops nothing is in the report."""
    path = write_good(tmp_path / "x.h5ad", "hdf5")
    damage(path, lambda root: root["layers/dense"].attrs.__delitem__("encoding-type"))
    atlas = RaggedAtlas.create(tmp_path / "a.atlas")
    report = atlas.add(path, dry_run=True, progress=False)
    (note,) = (note for note in report.notes if note.startswith("breaks "))
    assert note.startswith("breaks A01 must: layers/dense: ")
    damage(path, lambda root: root["layers/dense"].__setitem__((0, 0), np.nan))
    with pytest.raises(ValuesError, match="dense") as caught:
        atlas.add(path, progress=False)
    assert "A01" not in str(caught.value)


@pytest.mark.parametrize("form", ["memory", "h5ad", "zarr"])
def test_cells_of_a_query_are_not_added_again(
    atlas: RaggedAtlas, unchanged: Callable[[RaggedAtlas], AbstractContextManager[None]], tmp_path: Path, form: str
) -> None:
    """What a query gave, also as a file and in part, is refused with the way out; under other names it is added."""
    atlas.add(small_anndata(0, 6), "d", organism="human", progress=False)
    query = atlas.checkout(atlas.snapshot()).query()
    given: Any = query.to_anndata() if form == "memory" else query.write(str(tmp_path / f"x.{form}"))
    with (
        unchanged(atlas),
        pytest.raises(DuplicateError, match=r"6 of its 6 cells by uids.*annotate.*obs_names"),
    ):
        atlas.add(given, "again", progress=False)
    if form == "memory":
        mixed = given.copy()
        mixed.obs_names = [given.obs_names[0], *(f"cell {i}" for i in range(5))]
        with unchanged(atlas), pytest.raises(DuplicateError, match="1 of its 6 cells"):
            atlas.add(mixed, "again", progress=False)
        mixed.obs_names = given.obs["cell_name"].astype(str)
        assert atlas.add(mixed, "again", progress=False).status == "added"
        atlas.drop_dataset("d")
        assert atlas.add(given, "instead", organism="human", progress=False).status == "added"
