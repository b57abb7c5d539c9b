"""A process that dies between any two requests of a call: nothing is lost, nothing is there twice, and the call can be made again."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest

import raggedatlas as ra
from raggedatlas.errors import AtlasError, DuplicateError
from support.atlases import GENES, small_anndata
from support.object_store import Remote

pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An atlas of two datasets and a snapshot, in a folder; a third dataset is in no snapshot."""
    folder = tmp_path_factory.mktemp("begun") / "my.atlas"
    atlas = ra.RaggedAtlas.create(folder)
    for seed in (1, 2, 3):
        atlas.add(small_anndata(seed, 6), f"d{seed}", organism="human", progress=False)
        if seed == 2:
            atlas.snapshot("first")
    return folder


def add(atlas: ra.RaggedAtlas) -> None:
    """Add a dataset with other features and a new column."""
    with suppress(DuplicateError):
        atlas.add(small_anndata(4, 6, GENES[5:15], extra="age"), "d4", organism="human", progress=False)


def annotate(atlas: ra.RaggedAtlas) -> None:
    """Write one column."""
    cells = atlas._catalog.tables.read("cells", ["uid"]).column(0).to_pylist()
    atlas.annotate(pd.DataFrame({"score": [1.5] * len(cells)}, index=cells), on_conflict="replace")


def purge(atlas: ra.RaggedAtlas) -> None:
    """Purge a dataset, or nothing where that was done."""
    if "d2" in {*atlas.list_datasets()["name"]} | {*atlas.checkout("first").list_datasets()["name"]}:
        atlas.purge("d2")


def check(atlas: ra.RaggedAtlas, call: str) -> None:
    """The atlas is what the call makes of it."""
    assert [problem for problem in atlas.validate("deep") if problem.level == "must"] == []
    wanted = {"add": ["d1", "d2", "d3", "d4"], "purge": ["d1", "d3"]}.get(call, ["d1", "d2", "d3"])
    listed = atlas.list_datasets()
    assert sorted(listed["name"]) == wanted
    # What a cut `add` left has no record, and is not visible; its lease is of this process, so `repair` keeps it.
    held = atlas._catalog.tables.read("cells", ["dataset_uid"]).column(0).to_pylist()
    assert len([uid for uid in held if uid in {*listed.index}]) == 6 * len(wanted)
    versions = [record.label for record in atlas.list_versions()]
    assert versions == (["first", "second"] if call == "snapshot" else ["first"])
    assert len(atlas.checkout("first").query().to_anndata()) == (6 if call == "purge" else 12)
    if call == "annotate":
        shown = atlas.checkout(atlas.snapshot()).query().obs(["score"]).to_pandas()
        assert (shown["score"] == 1.5).all()


def snapshot(atlas: ra.RaggedAtlas) -> None:
    """Take the second snapshot, unless it is there."""
    if "second" not in {record.label for record in atlas.list_versions()}:
        atlas.snapshot("second")


CALLS: dict[str, Callable[[ra.RaggedAtlas], None]] = {
    "add": add,
    "snapshot": snapshot,
    "annotate": annotate,
    "purge": purge,
}


@pytest.mark.parametrize(
    ("call", "step"),
    [
        *(pytest.param(call, 1, marks=[pytest.mark.nightly, pytest.mark.timeout(7200)]) for call in CALLS),
        *(
            pytest.param(call, step, marks=pytest.mark.long)
            for call, step in {"add": 17, "snapshot": 53, "annotate": 9, "purge": 151}.items()
        ),
    ],
)
def test_a_call_that_ends_after_any_request(remote: Remote, begun: Path, tmp_path: Path, call: str, step: int) -> None:
    """After every request of the call, or every so many, no other is answered; the next process makes the call again."""
    n, done = step // 2, False
    while not done:
        place = Remote.make(remote.proxy)
        place.upload(begun)
        opened = ra.RaggedAtlas.open(place.uri, storage_options=place.options)
        place.proxy.stop_after(n)
        try:
            CALLS[call](opened)
            done = True
        except (AtlasError, OSError):
            pass
        finally:
            place.proxy.forget()
        again = ra.RaggedAtlas.open(place.uri, storage_options=place.options)
        visible = ra.RaggedAtlas.checkout(again, "first")
        assert [problem for problem in visible.validate("rows") if problem.level == "must"] == []
        CALLS[call](again)
        again.repair()
        folder = tmp_path / str(n)
        check(ra.RaggedAtlas.open(place.download(folder)), call)
        shutil.rmtree(folder)
        n += step
    assert n > step
