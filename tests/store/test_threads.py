"""Threads: work shared in order, errors and all; prefetching, never more than one too early, and no thread left behind."""

import threading
from collections.abc import Iterator

import pytest

from raggedatlas.errors import ValuesError
from raggedatlas.store.runtime import DECODE_THREADS, map_decode, prefetch

pytestmark = pytest.mark.fast


def counted(n: int, made: list[int]) -> Iterator[int]:
    for i in range(n):
        made.append(i)
        yield i


@pytest.mark.parametrize("n", [0, 1, 5])
def test_items_come_in_order_and_one_early(n: int) -> None:
    """All items come, those that count as false too; while one is used at most the next has been asked for."""
    made: list[int] = []
    for i in prefetch(counted(n, made)):
        assert i in (len(made) - 1, len(made) - 2)
    assert made == list(range(n))


def test_the_next_item_is_made_meanwhile() -> None:
    """The next item is being made while one is used: neither waits for the other to end."""
    begun = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        begun.set()
        yield 2

    for item in prefetch(items()):
        assert item == 2 or begun.wait(10)


def test_errors_come_when_it_is_their_turn() -> None:
    """What the iterator raises is raised after the items before it were given."""

    def items() -> Iterator[int]:
        yield 1
        raise ValueError("the second")

    walk = prefetch(items())
    assert next(walk) == 1
    with pytest.raises(ValueError, match="the second"):
        next(walk)
    assert next(walk, None) is None


@pytest.mark.parametrize("n", [0, 1, 2, 7, 100])
def test_shared_work_gives_results_in_order(n: int) -> None:
    """Whoever takes an item, its result stands in its place; no more threads than cores take part, the caller's among them."""
    seen = set()

    def square(i: int) -> int:
        seen.add(threading.get_ident())
        return i * i

    assert map_decode(square, range(n)) == [i * i for i in range(n)]
    assert len(seen) <= DECODE_THREADS


def test_shared_work_may_share_its_own() -> None:
    """Work within work ends, however few threads there are."""
    assert map_decode(lambda i: sum(map_decode(lambda j: i * j, range(20))), range(20)) == [190 * i for i in range(20)]


def test_the_first_error_of_shared_work_is_raised_after_all_ended() -> None:
    """Of several errors the one of the first item is raised, and all items were worked on."""
    done = []

    def work(i: int) -> None:
        done.append(i)
        if i in (3, 7):
            raise ValuesError(f"item {i}")

    with pytest.raises(ValuesError, match="item 3"):
        map_decode(work, range(20))
    assert sorted(done) == list(range(20))
