"""Laws of the order: every epoch is covered exactly once, is a pure function of its key, and is as random as it says."""

from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.errors import QueryError
from raggedatlas.loader import order as orders
from raggedatlas.loader.order import (
    GROUPED,
    WEIGHTED,
    Batches,
    Order,
    Permutation,
    Share,
    Strategy,
    count_batches,
    epoch_batches,
    read_units,
    worker_batches,
)

shuffles = st.sampled_from(["full", "blocks", None])
sizes = st.integers(1, 200)


def lists(batches: Batches) -> list[list[int]]:
    return [batches.rows[a:b].tolist() for a, b in pairwise(batches.bounds.tolist())]


def whole(order: Order, epoch: int) -> Batches:
    """All batches of an epoch, taken in two parts of which the second comes first."""
    lazy = epoch_batches(order, epoch)
    half = len(lazy) // 2
    last, first = lazy.take(np.arange(half, len(lazy))), lazy.take(np.arange(half))
    return Batches(
        np.concatenate([first.rows, last.rows]), np.append(first.bounds[:-1], last.bounds + first.bounds[-1])
    )


@pytest.fixture(params=["table", "computed"])
def permutations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of permutations; the computed one on few items, where it is furthest from random."""
    if request.param == "computed":
        monkeypatch.setattr("raggedatlas.loader.order._TABLE", 0)


def ranks(n: int, batch: int, world: int, shuffle: Any, strategy: Strategy | None = None, **share: Any) -> list[Order]:
    return [
        Order(n, batch, 5, shuffle, 4, 16, strategy or Strategy(), Share(rank, world, **share)) for rank in range(world)
    ]


@given(n=sizes, batch=st.integers(1, 40), world=st.integers(1, 5), shuffle=shuffles, epoch=st.integers(0, 3))
def test_all_ranks_cover_an_epoch_exactly_once(n: int, batch: int, world: int, shuffle: Any, epoch: int) -> None:
    """Every cell is in exactly one batch of one rank, and only the last batch of a rank is short."""
    found = []
    for order in ranks(n, batch, world, shuffle):
        own = lists(whole(order, epoch))
        assert len(own) == count_batches(order)
        assert [len(one) for one in own[:-1]] == [batch] * len(own[:-1])
        found += [cell for one in own for cell in one]
    assert sorted(found) == list(range(n))


@given(
    n=sizes, batch=st.integers(1, 40), world=st.integers(1, 5), shuffle=shuffles, even=st.sampled_from(["pad", "drop"])
)
def test_even_ranks_have_as_much_each(n: int, batch: int, world: int, shuffle: Any, even: Any) -> None:
    """With `even`, ranks have the same sizes of batches; padding misses no cell, dropping repeats none and misses few."""
    orders = ranks(n, batch, world, shuffle, even=even)
    own = [lists(whole(order, 1)) for order in orders]
    assert len({tuple(map(len, one)) for one in own}) == 1
    assert {count_batches(order) for order in orders} == {len(own[0])}
    found = [cell for one in own for batch_ in one for cell in batch_]
    if even == "pad":
        assert set(found) == set(range(n))
        assert len(found) < n + world
    else:
        assert len(set(found)) == len(found) > n - world


@given(
    n=sizes,
    batch=st.integers(1, 40),
    world=st.integers(1, 5),
    shuffle=shuffles,
    even=st.sampled_from([None, "pad", "drop"]),
)
def test_dropping_the_last_leaves_whole_batches(n: int, batch: int, world: int, shuffle: Any, even: Any) -> None:
    """With `drop_last`, every batch is whole and every rank has as many; each misses less than a batch."""
    orders = ranks(n, batch, world, shuffle, even=even, drop_last=True)
    own = [lists(whole(order, 1)) for order in orders]
    each = -(-n // world) if even == "pad" else n // world
    assert [len(one) for one in own] == [count_batches(order) for order in orders] == [each // batch] * world
    assert all(len(one) == batch for rank in own for one in rank)
    found = [cell for rank in own for one in rank for cell in one]
    assert even == "pad" or len(set(found)) == len(found)


@given(n=sizes, batch=st.integers(1, 20), shuffle=shuffles, workers=st.integers(1, 5), start=st.integers(0, 12))
def test_workers_in_turn_give_the_batches_of_one(n: int, batch: int, shuffle: Any, workers: int, start: int) -> None:
    """However many workers share a rank, asking them in turn gives the same batches in the same order, from any start."""
    order = Order(n, batch, 3, shuffle, 4, 16)
    every = epoch_batches(order, 2)
    dealt = [lists(every.take(worker_batches(len(every), start, w, workers))) for w in range(workers)]
    in_turn = [one.pop(0) for _ in range(len(every)) for one in dealt if one]
    assert in_turn == lists(whole(order, 2))[start:]


@given(
    groups=st.lists(st.integers(-1, 5), min_size=1, max_size=150),
    batch=st.integers(1, 20),
    world=st.integers(1, 4),
    drop_last=st.booleans(),
    shuffle=st.sampled_from(["full", None]),
)
def test_groups_stay_together(groups: list[int], batch: int, world: int, drop_last: bool, shuffle: Any) -> None:
    """A batch holds cells of one group; all ranks together hold every cell that has a group once, or only whole batches."""
    codes = np.array(groups)
    found = []
    for order in ranks(len(codes), batch, world, shuffle, Strategy("grouped", codes), drop_last=drop_last):
        own = lists(whole(order, 0))
        assert len(own) == count_batches(order)
        assert all(len({groups[cell] for cell in one}) == 1 for one in own)
        assert not drop_last or all(len(one) == batch for one in own)
        found += [cell for one in own for cell in one]
    wanted = np.flatnonzero(codes >= 0).tolist()
    assert len(set(found)) == len(found)
    assert set(found) <= set(wanted) if drop_last else sorted(found) == wanted


@given(lengths=st.lists(st.integers(1, 30), max_size=40), n_rows=st.integers(1, 64))
def test_reads_join_neighbouring_batches(lengths: list[int], n_rows: int) -> None:
    """Reads cover all batches in order, none is empty, and none starts more than `n_rows` after its first."""
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    units = list(pairwise(read_units(np.array(lengths, np.int64), n_rows).tolist()))
    assert [b for first, last in units for b in range(first, last)] == list(range(len(lengths)))
    assert all(last > first and bounds[last - 1] - bounds[first] < n_rows for first, last in units)


@pytest.mark.parametrize("shuffle", ["full", "blocks"])
def test_the_order_is_a_pure_function_of_its_key(shuffle: Any) -> None:
    """Equal keys give equal epochs; another seed, epoch or rank gives another."""

    def cells(seed: int = 0, epoch: int = 0, rank: int = 0) -> list[int]:
        order = Order(300, 32, seed, shuffle, 8, 64, share=Share(rank, 2))
        return whole(order, epoch).rows.tolist()

    assert cells() == cells()
    others = [cells(seed=1), cells(epoch=1), cells(rank=1)]
    assert all(other != cells() for other in others)


def test_blocks_stay_near_each_other() -> None:
    """Within a buffer of a block shuffle there are no more blocks than fit, and the one cut at each end."""
    order = Order(10_000, 100, 1, "blocks", 20, 400, share=Share(1, 3))
    rows = whole(order, 0).rows
    touched = [len(np.unique(rows[i : i + 400] // 20)) for i in range(0, len(rows), 400)]
    assert max(touched) <= 400 // 20 + 2


def z_of(values: list[float], mean: float, variance: float) -> float:
    """How many standard errors the mean of independent values lies from what it should be."""
    return abs(np.mean(values) - mean) / np.sqrt(variance / len(values))


@given(n=st.integers(1, 5000), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
def test_a_computed_permutation_has_every_item_once(n: int, seed: int, epoch: int) -> None:
    """Also where it is not a table, at any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raggedatlas.loader.order._TABLE", 0)
        assert sorted(Permutation(n, seed, epoch)(np.arange(n)).tolist()) == list(range(n))


def test_a_computed_permutation_of_many_items() -> None:
    """It takes no memory, so 10**15 items are permuted like few; equal keys give the same, and items are spread evenly."""
    n = 10**15
    items = Permutation(n, 3, 1)(np.arange(20_000))
    assert len(set(items.tolist())) == 20_000
    assert 0 <= items.min() <= items.max() < n
    np.testing.assert_array_equal(items[500:600], Permutation(n, 3, 1)(np.arange(500, 600)))
    assert not np.array_equal(items[:100], Permutation(n, 3, 2)(np.arange(100)))
    counts = np.histogram(items, 100, (0, n))[0]
    assert abs(((counts - 200) ** 2 / 200).sum() - 99) < 4 * np.sqrt(2 * 99)


@pytest.mark.usefixtures("permutations")
def test_no_order_statistic_tells_an_epoch_from_a_uniform_permutation() -> None:
    """Over many epochs every statistic of the order has the mean that it has over uniform permutations."""
    n, epochs = 100, 1500
    drawn = [whole(Order(n, 16, 11), epoch).rows for epoch in range(epochs)]
    place = np.arange(n)
    found = {
        "ascents": ([float((np.diff(p) > 0).sum()) for p in drawn], (n - 1) / 2, (n + 1) / 12),
        "fixed points": ([float((p == place).sum()) for p in drawn], 1.0, 1.0),
        "successors": ([float((np.diff(p) == 1).sum()) for p in drawn], (n - 1) / n, 1.0),
        "inversions": (
            [float(np.triu(p[:, None] > p[None, :], 1).sum()) for p in drawn],
            n * (n - 1) / 4,
            n * (n - 1) * (2 * n + 5) / 72,
        ),
        "displacement": (
            [float(np.abs(p - place).sum()) for p in drawn],
            (n * n - 1) / 3,
            (n + 1) * (2 * n * n + 7) / 45,
        ),
        "records": (
            [float((np.maximum.accumulate(p) == p).sum()) for p in drawn],
            float((1 / (place + 1)).sum()),
            float((1 / (place + 1) - 1 / (place + 1) ** 2).sum()),
        ),
        "correlation with the epoch before": (
            [float(np.corrcoef(p, q)[0, 1]) for p, q in pairwise(drawn)],
            0.0,
            1 / (n - 1),
        ),
    }
    assert {name: z_of(*facts) for name, facts in found.items() if z_of(*facts) > 3.5} == {}


@pytest.mark.usefixtures("permutations")
def test_every_cell_comes_anywhere_in_the_epoch() -> None:
    """Each cell is equally likely at each place, in a full shuffle over several ranks: chi square stays in its bounds."""
    n, epochs = 60, 3000
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        orders = ranks(n, 7, 3, "full")
        counts[np.concatenate([whole(o, epoch).rows for o in orders]), np.arange(n)] += 1
    chi = float(((counts - epochs / n) ** 2 / (epochs / n)).sum())
    freedom = (n - 1) ** 2
    assert abs(chi - freedom) < 4 * np.sqrt(2 * freedom)


def test_draws_follow_their_weights() -> None:
    """Weighted cells come in proportion to their weight and never with none; balanced groups come equally often."""
    weights = np.array([0.0, 1, 2, 3, 0, 4])
    rows = whole(Order(6, 100, 2, strategy=Strategy("weighted", weights, 50_000)), 0).rows
    counts = np.bincount(rows, minlength=6)
    np.testing.assert_allclose(counts / 50_000, weights / 10, atol=0.01)
    assert counts[[0, 4]].tolist() == [0, 0]
    codes = np.array([2] * 50 + [0] * 5 + [-1] * 20 + [5])
    rows = whole(Order(76, 100, 2, strategy=Strategy("balanced", codes, 60_000)), 0).rows
    np.testing.assert_allclose(np.bincount(codes[rows], minlength=6)[[0, 2, 5]] / 60_000, 1 / 3, atol=0.01)
    within = np.bincount(rows[codes[rows] == 2], minlength=50)[:50] / 20_000
    np.testing.assert_allclose(within, 1 / 50, atol=0.005)
    assert (codes[rows] >= 0).all()


@given(
    st.lists(st.sampled_from([0.0, 0.1, 1e-9, 3.0, 1e9]), min_size=1, max_size=300).filter(any),
    st.lists(st.integers(-1, 9), min_size=1, max_size=300).filter(lambda codes: max(codes) >= 0),
)
def test_strategies_are_those_of_all_values_at_once(weights: list[float], codes: list[int]) -> None:
    """Values that are looked at a block at a time give the draws, groups and identifiers of sums and sorts over all cells."""
    values, groups = np.array(weights), np.array(codes, np.int32)
    drawn, grouped = Strategy(WEIGHTED, values, 500), Strategy(GROUPED, groups, len(codes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orders, "_BLOCK", 50)
        patch.setattr("raggedatlas.store.runtime._SCRATCH_BYTES", 100)
        total = np.cumsum(values)
        assert drawn.cumulated.tolist() == total.tolist()
        found = epoch_batches(Order(len(values), 500, seed=5, strategy=drawn), 1).take(np.array([0])).rows
        chance = orders.uniform(np.arange(500), 5, 1) * total[-1]
        expected = np.minimum(np.searchsorted(total, chance, side="right"), np.flatnonzero(values)[-1])
        assert found.tolist() == expected.tolist()
        assert grouped.by_group.tolist() == [
            cell for cell in np.argsort(groups, kind="stable").tolist() if codes[cell] >= 0
        ]
        assert grouped.sizes.tolist() == np.bincount(groups[groups >= 0]).tolist()
        for one, given_values in ((drawn, values), (grouped, groups.astype(np.int64))):
            assert one.digest().split()[1] == blake2b(given_values.tobytes(), digest_size=8).hexdigest()


def test_a_strategy_of_the_callers_own_is_checked() -> None:
    """A sampler gets the epoch's generator; what is no row is refused."""

    def backwards(n: int, rng: np.random.Generator) -> Any:
        return np.arange(n)[::-1] if rng is not None else None

    given_ = Order(5, 2, strategy=Strategy("own", None, 5, backwards))
    assert lists(whole(given_, 0)) == [[4, 3], [2, 1], [0]]
    for wrong in (np.array([0.5] * 5), np.arange(4), np.arange(1, 6), np.arange(-1, 4)):
        order = Order(5, 2, strategy=Strategy("own", None, 5, lambda n, rng, w=wrong: w))
        with pytest.raises(QueryError, match="whole numbers from 0 to 4"):
            epoch_batches(order, 0)


def test_ranks_draw_different_cells() -> None:
    """All ranks together have one epoch's draws, shared out."""
    weights = np.ones(10)
    orders = ranks(10, 4, 3, "full", Strategy("weighted", weights, 20))
    alone = whole(Order(10, 4, 5, strategy=Strategy("weighted", weights, 20)), 0).rows.tolist()
    assert [cell for order in orders for cell in whole(order, 0).rows.tolist()] == alone
