"""Loaders of the parts of a split: together they read what the whole reads, and held-out parts give each cell once."""

from typing import Any

import numpy as np
import pytest

from raggedatlas import Loader, Split
from raggedatlas.errors import MissingExtraError, QueryError
from raggedatlas.loader.order import Share
from raggedatlas.wings.trainers.lightning import (
    AtlasDataModule,
    align_query,
    split_loader,
    with_lightning,
)
from raggedatlas.wings.trainers.scvi import ScviDataModule

pytestmark = pytest.mark.fast


def shares(val: float, test: float = 0.0) -> dict[str, float]:
    named = {"train": 1 - val - test, "val": val, "test": test}
    return {part: share for part, share in named.items() if share}


def cells(part: Any) -> list[str]:
    return [uid for batch in part for uid in batch.uids]


@pytest.mark.long
def test_parts_read_what_the_whole_reads(small: Any) -> None:
    """Parts together give every cell once, with its own values, and the features and codes of the whole."""
    loader = Loader(small.query, 8, obs=["kind"], seed=4)
    parts = split_loader(loader, Split.by(small.query, None, shares(0.3, 0.2)))
    assert sorted(uid for part in parts.values() for uid in cells(part)) == sorted(cells(loader))
    place = {uid: i for i, uid in enumerate(small.obs.index)}
    for part in parts.values():
        np.testing.assert_array_equal(part.features["gene_expression"], loader.features["gene_expression"])
        for batch in part:
            assert batch.categories["kind"] is loader.categories["kind"]
            np.testing.assert_array_equal(batch.X.toarray(), small.counts[[place[uid] for uid in batch.uids]])
    held_out = [place[uid] for uid in cells(parts["val"])]
    assert held_out == sorted(held_out)
    again = split_loader(Loader(small.query, 16), Split.by(small.query, None, shares(0.3, 0.2)))
    assert cells(again["val"]) == cells(parts["val"])
    assert sorted(cells(again["train"])) == sorted(cells(parts["train"]))
    other = split_loader(loader, Split.by(small.query, None, shares(0.3, 0.2), seed=1))
    assert cells(other["val"]) != cells(parts["val"])


def test_a_split_of_a_sample_is_a_split(small: Any) -> None:
    """`Query.sample` keeps the lowest hashes, which are not those that a split goes by."""
    part = split_loader(Loader(small.query.sample(40), 8), Split.by(small.query.sample(40), None, shares(0.5)))["val"]
    assert 3 < part.n_cells < 37


def test_a_part_draws_as_its_loader_does(small: Any) -> None:
    """Training parts keep weights, balance and groups of their own cells; held-out parts give each cell once."""
    weights, split = np.arange(70) % 2, Split.by(small.query, None, shares(0.3))
    parts = split_loader(Loader(small.query, 10, obs=["donor"], weights=weights, seed=3), split)
    place = {uid: i for i, uid in enumerate(small.obs.index)}
    assert {place[uid] % 2 for uid in cells(parts["train"])} == {1}
    assert len(cells(parts["train"])) == parts["train"].n_cells
    assert len(set(cells(parts["val"]))) == parts["val"].n_cells == len(cells(parts["val"]))
    grouped = split_loader(Loader(small.query, 10, obs=["donor"], group="donor"), split)["train"]
    assert all(len(set(batch.labels("donor"))) == 1 for batch in grouped)
    drawn = Loader(small.query, 10, balance="donor", n_samples=25)
    assert len(cells(split_loader(drawn, split)["train"])) == 25


def test_a_part_resumes_only_itself(small: Any) -> None:
    """The state of a part fits the same part on any rank, and no other cells, be they as many."""
    loader = Loader(small.query, 8, seed=2)
    rows = np.arange(0, 40)
    first, second = (loader.part(rows, drawn=True, share=Share(rank, 2, "pad")) for rank in range(2))
    second.load_state_dict(first.state_dict())
    with pytest.raises(QueryError, match="taken with query"):
        loader.part(rows + 1, drawn=True, share=Share(0, 2, "pad")).load_state_dict(first.state_dict())


def test_other_cells_are_read_alike(small: Any) -> None:
    """An aligned query has the columns of the loader, also those that its own datasets did not measure."""
    loader = Loader(small.query.layers("log"), 8)
    other = Loader(align_query(small.query.where({"dataset": "second"}).join("intersection"), loader), 8)
    np.testing.assert_array_equal(other.features["gene_expression"], loader.features["gene_expression"])
    batch = next(iter(other))
    assert list(batch.spaces["gene_expression"].block.layers) == ["log"]
    assert not batch.spaces["gene_expression"].measured().all()


def test_parts_without_cells_are_refused(small: Any) -> None:
    """A part of which the loader has no cell is named, and so is one that leaves no batch."""
    loader = Loader(small.query, 8)
    split = Split.from_frame({"uid": ["0" * 16, small.obs.index[0]], "split": ["test", "train"]})
    with pytest.raises(QueryError, match="none of the loader's 70 cells in the part 'test'"):
        split_loader(loader, split)
    with pytest.raises(QueryError, match="no batch for rank 0"):
        loader.part(np.arange(3), drawn=True, share=Share(0, 1, None, drop_last=True))


@pytest.mark.parametrize("module", [AtlasDataModule, ScviDataModule])
def test_missing_extras_are_named(small: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Lightning or scvi-tools the error says what to install."""
    for name in ("lightning", "lightning.pytorch", "scvi"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with_lightning.cache_clear()
    with pytest.raises(MissingExtraError, match=r"raggedatlas\[lightning\]"):
        module(small.query)
    with_lightning.cache_clear()
