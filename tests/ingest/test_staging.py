"""Several sources in one call: the next is planned while one is written, and none of it shows."""

import contextlib
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import example, given
from hypothesis import strategies as st

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import AtlasError, SourceError, StoreError
from raggedatlas.formats.registry import open_source
from raggedatlas.ingest import add as adding
from raggedatlas.ingest.group_writer import PendingWrite
from raggedatlas.model.options import IngestOptions
from raggedatlas.model.protocols import Source
from support.hypothesis_profile import examples

KINDS = ("good", "repeated", "same cells", "bad plan", "bad values", "does not open", "disk is full")
"""What a source is; the first of a call is none of those that look back."""

UNWRITABLE = 7
"""Cells of a source whose arrays cannot be written to their end."""


def made(kind: str, number: int) -> ad.AnnData:
    """Make a source; numbers tell cells, features and values apart."""
    rng = np.random.default_rng(number)
    n = UNWRITABLE if kind == "disk is full" else 6
    values = rng.poisson(1, (n, 4)).astype(np.float32)
    values[0, 0] = 1
    if kind == "bad values":
        values[2, 1] = np.nan
    obs = pd.DataFrame({"n": [str(number)] * n}, index=[f"c{number}_{i}" for i in range(n)])
    if kind == "bad plan":
        obs["n_cells"] = pd.arrays.IntervalArray.from_breaks(range(n + 1))
    return ad.AnnData(sp.csr_matrix(values), obs=obs, var=pd.DataFrame(index=[f"g{number % 3}{i}" for i in range(4)]))


def sources(kinds: list[str]) -> list[ad.AnnData]:
    """Make the sources of a call, some like the one before them."""
    found: list[ad.AnnData] = []
    for number, kind in enumerate(kinds):
        if found and kind == "repeated":
            found.append(found[-1].copy())
        elif found and kind == "same cells":
            found.append(found[-1].copy())
            found[-1].X = found[-1].X * 2
        else:
            found.append(made(kind, number))
    return found


class Opener:
    """Opens an object in memory, and counts what was opened and closed."""

    notes: tuple[str, ...] = ()
    place = None

    def __init__(self, data: ad.AnnData, kind: str, name: str, count: Counter[str]) -> None:
        self.data, self.kind, self.name, self.count = data, kind, name, count

    def __call__(self) -> Source:
        if self.kind == "does not open":
            raise SourceError("does not open")
        source = open_source(self.data)
        named, close = replace(source.describe(), name=self.name), source.close
        source.describe = lambda: named  # type: ignore[method-assign]
        self.count["open"] += 1

        def counted() -> None:
            self.count["closed"] += 1
            close()

        source.close = counted  # type: ignore[method-assign]
        return source

    def explain(self, error: AtlasError) -> AtlasError:
        return error


def state(atlas: RaggedAtlas) -> list[tuple[Any, ...]]:
    """Tell what is in an atlas, but for uids and times."""
    found = []
    for uid, row in atlas.list_datasets().iterrows():
        data = atlas.dataset(str(uid)).to_anndata()
        found.append((row["name"], data.obs_names.tolist(), data.var_names.tolist(), data.X.toarray().tolist()))
    return found


def fill_the_disk(patch: pytest.MonkeyPatch) -> None:
    """Let the disk be full when the arrays of some sources are ended, while the source after them is read."""
    finish = PendingWrite.finish

    def full(self: PendingWrite) -> None:
        if self.written.n_rows == UNWRITABLE:
            raise StoreError("No space left on device.")
        finish(self)

    patch.setattr(PendingWrite, "finish", full)


@pytest.mark.nightly
@examples(8)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    together=st.sampled_from([1, 2, 100]),
    choice=st.sampled_from(["error", "skip", "replace"]),
    by_workers=st.booleans(),
)
@example(kinds=["disk is full"], together=1, choice="error", by_workers=False)
def test_one_call_comes_to_what_many_calls_come_to(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], together: int, choice: str, by_workers: bool
) -> None:
    """Whatever is refused or repeated between them, sources of one call are added, skipped and refused as one by one."""
    folder = tmp_path_factory.mktemp("several")
    options = IngestOptions(on_duplicate=choice)  # type: ignore[arg-type]
    given_sources = sources(kinds)
    count: Counter[str] = Counter()
    openers = [
        Opener(data, kind, f"d{i}", count) for i, (data, kind) in enumerate(zip(given_sources, kinds, strict=True))
    ]
    one, many = RaggedAtlas.create(str(folder / "one")), RaggedAtlas.create(str(folder / "many"))
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool, contextlib.suppress(AtlasError):
        patch.setattr(adding, "COMMIT_DATASETS", together)
        fill_the_disk(patch)
        adding.add_sources(one._catalog, openers, options, executor=pool if by_workers else None)
    for opener in openers:
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(AtlasError):
            fill_the_disk(patch)
            adding.add_sources(many._catalog, [opener], options)
    assert count["open"] == count["closed"]
    assert sorted(row[1:] for row in state(one)) == sorted(row[1:] for row in state(many))
    if choice != "replace":  # what was visible and is replaced stays until `gc`
        assert set(one._catalog.arrays.list_children()) - {"zarr.json"} == set(one.list_datasets().index)
    one.gc(dry_run=False, grace=timedelta(0))
    assert set(one._catalog.arrays.list_children()) - {"zarr.json"} == set(one.list_datasets().index)


def test_values_are_read_again_only_where_cells_and_features_agree(
    atlas: RaggedAtlas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for the same content reads no values of a source whose cells or features nobody has, here or in the atlas."""
    walked: list[str] = []
    walk = adding.iterate_blocks

    def told(source: Source, info: Any) -> Any:
        walked.append(info.key)
        return walk(source, info)

    monkeypatch.setattr(adding, "iterate_blocks", told)
    other_cells, other_genes = made("good", 3), made("good", 0)
    other_genes.var_names = [f"x{i}" for i in range(4)]
    atlas.add([made("good", 0), other_cells, other_genes], progress=False)
    assert not walked
    again = made("good", 3)[:, ::-1].copy()
    again.obs_names = [f"d{i}" for i in range(6)]
    atlas.add(again, progress=False)
    assert not walked
    skipped = atlas.add(made("good", 3), on_duplicate="skip", progress=False)
    assert skipped.status == "skipped"
    assert len(walked) == 1
    assert not any("is taken" in note for note in skipped.notes)  # a dataset that is not added gets no name


def opened_in_order(monkeypatch: pytest.MonkeyPatch, then: Any = lambda name: None) -> list[str]:
    """Note the names of files as they are opened."""
    opened: list[str] = []
    call = adding.Opener.__call__

    def noted(self: adding.Opener) -> Source:
        opened.append(Path(self.what).name)
        then(opened[-1])
        return call(self)

    monkeypatch.setattr(adding.Opener, "__call__", noted)
    return opened


def test_the_next_source_is_planned_while_one_is_written(
    atlas: RaggedAtlas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second source is opened before the arrays of the first are written, the third is not; each is opened once."""
    for i in range(3):
        made("good", i).write_h5ad(tmp_path / f"{i}.h5ad")
    began = Event()
    opened = opened_in_order(monkeypatch, lambda name: began.set() if name == "1.h5ad" else None)
    told: list[tuple[str, ...]] = []

    def wait(step: str, i: int, n: int) -> None:
        if step == "lease":
            assert began.wait(60)
        if step == "arrays":
            told.append(tuple(opened))

    atlas.add(tmp_path, progress=wait)
    assert told[0] == ("0.h5ad", "1.h5ad")
    assert opened == ["0.h5ad", "1.h5ad", "2.h5ad"]


def test_a_refused_source_is_opened_once(atlas: RaggedAtlas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the next source is refused for while one is written is said in its turn, without opening it again."""
    made("good", 0).write_h5ad(tmp_path / "a.h5ad")
    (tmp_path / "b.h5ad").write_bytes(b"not HDF5")
    made("good", 2).write_h5ad(tmp_path / "c.h5ad")
    opened = opened_in_order(monkeypatch)
    with pytest.raises(SourceError, match=r"1 of 3 sources were refused.*b\.h5ad"):
        atlas.add(tmp_path, progress=False)
    assert opened == ["a.h5ad", "b.h5ad", "c.h5ad"]
    assert atlas.list_datasets()["name"].tolist() == ["a", "c"]


@pytest.mark.long
def test_what_cannot_be_finished_is_taken_back(atlas: RaggedAtlas, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that cannot be written to its end is refused by name with nothing left of it; the one after it is added all the same."""
    fill_the_disk(monkeypatch)
    given_sources = [made("good", 0), made("disk is full", 1), made("good", 2)]
    with pytest.raises(SourceError, match=r"1 of 3 sources were refused, the other 2 .*No space left"):
        atlas.add(given_sources, progress=False)
    assert sorted(row[1] for row in state(atlas)) == [given_sources[i].obs_names.tolist() for i in (0, 2)]
    assert set(atlas._catalog.arrays.list_children()) - {"zarr.json"} == set(atlas.list_datasets().index)
    atlas.optimize()
    assert not atlas.validate("deep")
    with pytest.raises(StoreError, match="No space left"):
        atlas.add(given_sources[1], progress=False)


def test_an_interrupt_waits_for_what_is_finished_behind_it(
    atlas: RaggedAtlas, unchanged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who stops a call while a source before is still being finished finds the atlas as it was, and no thread writes on."""
    finish = adding.StagedDataset.finish
    monkeypatch.setattr(adding.StagedDataset, "finish", lambda self: (time.sleep(0.2), finish(self)))

    def stop(step: str, i: int, n: int) -> None:
        blocks.append(step == "block")
        if sum(blocks) == 2:
            raise KeyboardInterrupt

    blocks: list[bool] = []
    with unchanged(atlas), pytest.raises(KeyboardInterrupt):
        atlas.add([made("good", 0), made("good", 1)], progress=stop)
    assert not atlas._catalog.arrays.list_children() or set(atlas._catalog.arrays.list_children()) == {"zarr.json"}
