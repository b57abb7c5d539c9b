"""Laws of the running hash of a dataset's numbers."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.ingest.values import HASH_LANES, StreamingHash

pytestmark = pytest.mark.fast

NUMBERS = st.lists(st.integers(0, 255), max_size=70)
KINDS = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64, np.float32])


def hashed(*parts: np.ndarray) -> bytes:
    stream = StreamingHash()
    for part in parts:
        stream.update(part)
    return stream.digest()


def plainly(values: list[int]) -> bytes:
    """The hash as it is described, number by number."""
    mask = 2**64 - 1
    lanes = [i * 0x243F6A8885A308D3 & mask for i in range(HASH_LANES)]
    for i, value in enumerate(values):
        mixed = (lanes[i % HASH_LANES] ^ value) * 0x9E3779B97F4A7C15 & mask
        lanes[i % HASH_LANES] = mixed ^ mixed >> 29
    return hashlib.sha256(np.array([*lanes, len(values)], np.uint64).tobytes()).digest()[:16]


@given(NUMBERS, st.lists(st.integers(0, 70), max_size=5), st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]))
def test_blocks_make_no_difference(numbers: list[int], cuts: list[int], kind: type) -> None:
    """Wherever a stream is cut, and whatever the width of its numbers, its hash is that of the numbers one by one."""
    values = np.array(numbers, kind)
    assert hashed(*np.split(values, sorted(min(cut, len(numbers)) for cut in cuts))) == plainly(numbers)


@given(NUMBERS, NUMBERS, KINDS)
def test_other_numbers_have_another_hash(one: list[int], other: list[int], kind: type) -> None:
    """Equal numbers in equal order have equal hashes; others, also of another order or length, have others."""
    assert (hashed(np.array(one, kind)) == hashed(np.array(other, kind))) is (one == other)


@given(NUMBERS.filter(lambda numbers: len(set(numbers)) > 1), st.randoms())
def test_order_counts(numbers: list[int], random) -> None:  # noqa: ANN001
    """The same numbers in another order have another hash."""
    shuffled = list(numbers)
    random.shuffle(shuffled)
    values = hashed(np.array(numbers)), hashed(np.array(shuffled))
    assert (values[0] == values[1]) is (shuffled == numbers)
