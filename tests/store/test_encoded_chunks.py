"""Laws of runs of encoded chunks: however they are parted, the chunks stay what they were, in their order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.store.codecs import EncodedChunks, count_chunks, split_chunks
from raggedatlas.store.shards import compose_shard, index_bytes, parse_index

pytestmark = pytest.mark.fast

CHUNKS = st.lists(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=5), min_size=1, max_size=6)


def run_of(chunks: list[bytes]) -> EncodedChunks:
    return EncodedChunks(memoryview(b"".join(chunks)), np.cumsum([len(chunk) for chunk in chunks]))


def listed(runs: list[EncodedChunks]) -> list[bytes]:
    return [bytes(chunk) for run in runs for chunk in run.chunks()]


@given(CHUNKS, st.data())
def test_runs_parted_anywhere_hold_the_same_chunks(groups, data) -> None:  # noqa: ANN001
    """The first n chunks stand before the cut and the others behind it, for every n from none to all."""
    runs, flat = [run_of(chunks) for chunks in groups], [chunk for chunks in groups for chunk in chunks]
    n = data.draw(st.integers(0, len(flat)))
    before, after = split_chunks(runs, n)
    assert (count_chunks(before), count_chunks(after)) == (n, len(flat) - n)
    assert (listed(before), listed(after)) == (flat[:n], flat[n:])


@given(CHUNKS, st.integers(0, 3))
def test_a_shard_is_its_chunks_and_where_they_are(groups, spare) -> None:  # noqa: ANN001
    """The index of a shard points at every chunk of every run, and at none in the slots that are left."""
    flat = [chunk for chunks in groups for chunk in chunks]
    n_slots = len(flat) + spare
    shard = b"".join(compose_shard([run_of(chunks) for chunks in groups], n_slots))
    index = parse_index(shard[-index_bytes(n_slots) :], len(shard), "shard").tolist()
    assert [shard[start : start + size] for start, size in index[: len(flat)]] == flat
    assert all(size == -1 for _, size in index[len(flat) :])
