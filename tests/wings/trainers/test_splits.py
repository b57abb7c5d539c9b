"""Laws of splits: nobody is lost, nobody moves, values stay together, and parts read what the whole reads."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from raggedatlas import Loader
from raggedatlas.errors import MissingExtraError, QueryError
from raggedatlas.loader.order import Share
from raggedatlas.wings.trainers.lightning import (
    AtlasDataModule,
    Split,
    align_query,
    split_loader,
    split_rows,
    with_lightning,
)
from raggedatlas.wings.trainers.scvi import ScviDataModule

pytestmark = pytest.mark.fast

hashes = hnp.arrays(np.uint64, st.integers(0, 200))
shares = st.floats(0, 0.49)


def cells(part: Any) -> list[str]:
    return [uid for batch in part for uid in batch.uids]


@given(hashes, st.integers(0, 200), shares, shares)
def test_nobody_is_lost_and_nobody_moves(found: Any, n: int, val: float, test: float) -> None:
    """Every row is in one part, and stays there when others come."""
    split = Split(val, test)
    parts = split_rows(found, split)
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(found)))
    for name, rows in split_rows(found[:n], split).items():
        np.testing.assert_array_equal(rows, parts[name][parts[name] < n])


def test_parts_hold_their_shares() -> None:
    """Shares are those asked for, up to chance; another seed gives another split."""
    spread = np.random.default_rng(1).integers(0, 2**64, 20_000, np.uint64)
    parts = split_rows(spread, Split(val=0.2, test=0.1))
    np.testing.assert_allclose([len(rows) / 20_000 for rows in parts.values()], [0.7, 0.2, 0.1], atol=0.02)


@pytest.mark.long
def test_parts_read_what_the_whole_reads(small: Any) -> None:
    """Parts together give every cell once, with its own values, and the features and codes of the whole."""
    loader = Loader(small.query, 8, obs=["kind"], seed=4)
    parts = split_loader(loader, Split(val=0.3, test=0.2))
    assert sorted(uid for part in parts.values() for uid in cells(part)) == sorted(cells(loader))
    place = {uid: i for i, uid in enumerate(small.obs.index)}
    for part in parts.values():
        np.testing.assert_array_equal(part.features["gene_expression"], loader.features["gene_expression"])
        for batch in part:
            assert batch.categories["kind"] is loader.categories["kind"]
            np.testing.assert_array_equal(batch.X.toarray(), small.counts[[place[uid] for uid in batch.uids]])
    held_out = [place[uid] for uid in cells(parts["val"])]
    assert held_out == sorted(held_out)
    again = split_loader(Loader(small.query, 16), Split(val=0.3, test=0.2))
    assert cells(again["val"]) == cells(parts["val"])
    assert sorted(cells(again["train"])) == sorted(cells(parts["train"]))
    other = split_loader(loader, Split(val=0.3, test=0.2, seed=1))
    assert cells(other["val"]) != cells(parts["val"])


def test_a_split_of_a_sample_is_a_split(small: Any) -> None:
    """`Query.sample` keeps the lowest hashes, which are not those that a split goes by."""
    part = split_loader(Loader(small.query.sample(40), 8), Split(val=0.5))["val"]
    assert 3 < part.n_cells < 37


def test_values_stay_together(small: Any) -> None:
    """No value of the column is in two parts, whether text or numbers, and it has its part in a narrower query too."""
    for by in ("plate", "donor"):
        loader = Loader(small.query, 8, obs=[by])
        seed = next(s for s in range(100) if _splits(loader, Split(0.4, by=by, seed=s)))
        split = Split(0.4, by=by, seed=seed)
        found = {name: _values(part, by) for name, part in split_loader(loader, split).items()}
        assert not found["train"] & found["val"]
        narrow = split_loader(Loader(small.query.where("dataset_uid IS NOT NULL").limit(35), 8, obs=[by]), split)
        assert all(_values(part, by) <= found[name] for name, part in narrow.items())


def _values(part: Loader, by: str) -> set[Any]:
    return {
        value for batch in part for value in (batch.labels(by) if by in batch.categories else batch.obs[by].tolist())
    }


def _splits(loader: Loader, split: Split) -> bool:
    try:
        return bool(split_loader(loader, split))
    except QueryError:
        return False


def test_a_part_draws_as_its_loader_does(small: Any) -> None:
    """Training parts keep weights, balance and groups of their own cells; held-out parts give each cell once."""
    weights = np.arange(70) % 2
    parts = split_loader(Loader(small.query, 10, obs=["donor"], weights=weights, seed=3), Split(0.3))
    place = {uid: i for i, uid in enumerate(small.obs.index)}
    assert {place[uid] % 2 for uid in cells(parts["train"])} == {1}
    assert len(cells(parts["train"])) == parts["train"].n_cells
    assert len(set(cells(parts["val"]))) == parts["val"].n_cells == len(cells(parts["val"]))
    grouped = split_loader(Loader(small.query, 10, obs=["donor"], group="donor"), Split(0.3))["train"]
    assert all(len(set(batch.labels("donor"))) == 1 for batch in grouped)
    drawn = Loader(small.query, 10, balance="donor", n_samples=25)
    assert len(cells(split_loader(drawn, Split(0.3))["train"])) == 25


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


def test_what_cannot_be_split_is_refused(small: Any) -> None:
    """Shares that leave nothing, columns that are not there or not known of every cell, and empty parts are refused."""
    for val, test in ((1.0, 0.0), (-0.1, 0.0), (0.5, 0.5), (float("nan"), 0.0)):
        with pytest.raises(QueryError, match=r"from 0 to below 1|val as a number, not nan"):
            Split(val, test)
    loader = Loader(small.query, 8, obs=["kind", "n", "donor"])
    for by, message in {"plate": "add 'plate'", "kind": "have no 'kind'", "n": "have no 'n'"}.items():
        with pytest.raises(QueryError, match=message):
            split_loader(loader, Split(by=by))
    with pytest.raises(QueryError, match="none of 70 cells for 'val'"):
        split_loader(loader, Split(1e-9))
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
