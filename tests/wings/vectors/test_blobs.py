"""The byte codecs: golden bytes, round trips of whatever there may be, and every malformed blob refused (zarr-vectors §7.3 to §7.7)."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.errors import CorruptError
from raggedatlas.wings.vectors.geometry import Fragments, Objects
from raggedatlas.wings.vectors.shapes import concat_ranges, counts_to_offsets
from raggedatlas.wings.vectors.storage.codecs import (
    Blobs,
    concat_blobs,
    decode_fragments,
    decode_groups,
    decode_manifests,
    decode_ragged,
    decode_records,
    decode_single_item,
    decode_vlen,
    encode_fragments,
    encode_groups,
    encode_manifests,
    encode_ragged,
    encode_records,
    encode_single_groups,
    encode_vlen,
    expand_manifests,
    fragment_rows,
    from_bytes,
    interleave,
    split_manifests,
    take_manifests,
    to_bytes,
)
from support.geometry_stores import FragmentIndex
from support.hypothesis_profile import examples

pytestmark = pytest.mark.fast

FEW = examples(60)
NONE = np.zeros(0, np.int64)


def fragments_of(chunks: list[list[object]]) -> Fragments:
    """Fragments of chunks: a (start, count) or a list of rows each."""
    flat = [fragment for chunk in chunks for fragment in chunk]
    rows = [fragment for fragment in flat if isinstance(fragment, list)]
    is_range = np.array([isinstance(fragment, tuple) for fragment in flat], bool)
    starts = np.array([fragment[0] if isinstance(fragment, tuple) else 0 for fragment in flat], np.int64)
    counts = np.array([f[1] if isinstance(f, tuple) else len(f) for f in flat], np.int64)
    starts[~is_range] = counts_to_offsets(counts[~is_range])[:-1]
    every = np.array([row for part in rows for row in part], np.int64)
    return Fragments(counts_to_offsets(np.array([len(chunk) for chunk in chunks])), is_range, starts, counts, every)


def blob(raw: bytes) -> Blobs:
    return concat_blobs([raw])


def same(a: Fragments, b: Fragments) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("bounds", "is_range", "starts", "counts", "rows")
    )


FRAGMENTS = st.lists(
    st.lists(
        st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)) | st.lists(st.integers(0, 2**62), max_size=5),
        max_size=70,
    ),
    max_size=4,
)

GOLDEN = (
    b"GFVZ\x01\0\0\0" + struct.pack("<II", 3, 2) + b"\x05" + bytes(7)
    + struct.pack("<4q", 0, 4, 9, 1) + struct.pack("<2I", 0, 2) + struct.pack("<2q", 7, 7)
)  # fmt: skip


def test_golden_bytes_of_a_fragment_index() -> None:
    """Items 26, 28, 29, 30, 32: head, bitmap with the lowest bit first and zeros behind, runs in order, offsets and rows."""
    made = fragments_of([[(0, 4), [7, 7], (9, 1)]])
    assert encode_fragments(made).data.tobytes() == GOLDEN
    assert same(decode_fragments(blob(GOLDEN)), made)


def test_no_fragments_are_a_head_alone() -> None:
    """Item 31: no fragments take exactly 16 bytes; 31 and 41: one run takes 44, eight runs 156."""
    assert encode_fragments(fragments_of([[]])).data.tobytes() == b"GFVZ\x01\0\0\0" + bytes(8)
    assert len(encode_fragments(fragments_of([[(0, 1)]]))[0]) == 44
    assert len(encode_fragments(fragments_of([[(0, 1)] * 8]))[0]) == 156


@FEW
@given(FRAGMENTS)
def test_fragments_come_back(chunks: list[list[object]]) -> None:
    """Items 26 to 33, 37, 41: runs and lists in any mixture, also shared, repeated and out of order, come back; sizes are as the formula."""
    made = fragments_of(chunks)
    blobs = encode_fragments(made)
    assert same(decode_fragments(blobs), made)
    for i, chunk in enumerate(chunks):
        n_runs = sum(isinstance(fragment, tuple) for fragment in chunk)
        rows = sum(len(fragment) for fragment in chunk if isinstance(fragment, list))
        size = 16 + 8 * -(-len(chunk) // 64) + 16 * n_runs + 4 * (len(chunk) - n_runs + 1) + 8 * rows if chunk else 16
        assert len(blobs[i]) == size
        one = decode_fragments(Blobs(blobs[i], np.array([0, size])))
        assert np.array_equal(one.counts, made.counts[made.bounds[i] : made.bounds[i + 1]])


def test_random_access() -> None:
    """Item 35: each fragment is located alone, a run or a list, and one that is not there is refused."""
    index = FragmentIndex(blob(GOLDEN).data)
    assert [index.is_range(f) for f in range(3)] == [True, False, True]
    assert index.range(2) == (9, 1)
    assert [index.indices(f).tolist() for f in range(3)] == [[0, 1, 2, 3], [7, 7], [9]]
    with pytest.raises(CorruptError, match="does not have a requested fragment"):
        index.indices(3)


@FEW
@given(FRAGMENTS)
def test_one_fragment_is_that_of_all(chunks: list[list[object]]) -> None:
    """Item 35: what random access finds of each fragment is what decoding all of them finds."""
    made = fragments_of(chunks)
    blobs = encode_fragments(made)
    for c in range(len(blobs)):
        index = FragmentIndex(blobs[c])
        first = int(made.bounds[c])
        assert index.n_fragments == made.bounds[c + 1] - first
        for f in range(index.n_fragments):
            start, count = int(made.starts[first + f]), int(made.counts[first + f])
            assert index.is_range(f) == made.is_range[first + f]
            if index.is_range(f):
                assert index.range(f) == (start, count)
            else:
                assert np.array_equal(index.indices(f), made.rows[start : start + count])


def test_random_access_reads_no_other_fragment() -> None:
    """Item 35: damage in the entry of another fragment does not matter to the one that is asked for, but in its own it does."""
    raw = bytearray(GOLDEN)
    raw[24:32] = struct.pack("<q", -1)
    index = FragmentIndex(np.frombuffer(bytes(raw), np.uint8))
    assert (index.range(2), index.indices(1).tolist()) == ((9, 1), [7, 7])
    with pytest.raises(CorruptError, match="negative"):
        index.indices(0)
    with pytest.raises(CorruptError, match="negative"):
        decode_fragments(blob(bytes(raw)))
    falling = bytearray(GOLDEN)
    falling[56:64] = struct.pack("<2I", 3, 2)
    with pytest.raises(CorruptError, match="offsets"):
        FragmentIndex(np.frombuffer(bytes(falling), np.uint8)).indices(1)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (GOLDEN[:15], "shorter than its head"),
        (b"ZVFG" + GOLDEN[4:], "magic"),
        (GOLDEN[:4] + b"\x02" + GOLDEN[5:], "version 2"),
        (GOLDEN[:6] + b"\x01" + GOLDEN[7:], "flags 1"),
        (GOLDEN[:12] + b"\x04" + GOLDEN[13:], "more runs than fragments"),
        (GOLDEN[:12] + b"\x01" + GOLDEN[13:], "bitmap"),
        (GOLDEN[:16] + b"\x01" + GOLDEN[17:], "bitmap"),
        (GOLDEN[:16] + b"\x0d" + GOLDEN[17:], "bitmap"),
        (GOLDEN[:-1], "explicit lists"),
        (GOLDEN + b"\0", "explicit lists"),
        (GOLDEN[:40], "truncated"),
        (GOLDEN[:24] + struct.pack("<q", -1) + GOLDEN[32:], "negative"),
        (GOLDEN[:32] + struct.pack("<q", -4) + GOLDEN[40:], "negative"),
        (GOLDEN[:-8] + struct.pack("<q", -7), "negative"),
        (GOLDEN[:56] + struct.pack("<2I", 1, 2) + GOLDEN[64:], "offsets"),
    ],
)
def test_malformed_fragment_indexes_are_refused(raw: bytes, says: str) -> None:
    """Items 26, 27, 30: every way in which an index can be wrong is refused by name."""
    with pytest.raises(CorruptError, match=says):
        decode_fragments(blob(raw))


def test_falling_offsets_are_refused() -> None:
    """Item 30: offsets of explicit lists never fall."""
    raw = bytearray(encode_fragments(fragments_of([[[1, 2], [3]]])).data.tobytes())
    at = raw.index(struct.pack("<3I", 0, 2, 3))
    raw[at : at + 12] = struct.pack("<3I", 0, 4, 3)
    with pytest.raises(CorruptError, match="decrease"):
        decode_fragments(blob(bytes(raw)))


def objects_of(manifests: list[list[tuple[tuple[int, ...], int, object]]], n_dims: int) -> Objects:
    blocks = [block for manifest in manifests for block in manifest]
    modes = np.array([mode for _, mode, _ in blocks], np.uint8)
    lists = [value for _, mode, value in blocks if mode == 2]
    starts = np.array([v[0] if m == 1 else v if m == 0 else 0 for _, m, v in blocks], np.int64)
    counts = np.array([v[1] if m == 1 else 1 if m == 0 else len(v) for _, m, v in blocks], np.int64)
    starts[modes == 2] = counts_to_offsets(counts[modes == 2])[:-1]
    return Objects(
        np.arange(len(manifests)),
        counts_to_offsets(np.array([len(manifest) for manifest in manifests])),
        np.array([chunk for chunk, _, _ in blocks], np.int64).reshape(-1, n_dims),
        modes,
        starts,
        counts,
        np.array([i for part in lists for i in part], np.int64),
    )


def test_golden_bytes_of_manifests() -> None:
    """Items 65, 66, 69, 74: modes 0, 1 and 2, an empty manifest of four bytes, negative chunks; 37 bytes for one block of three axes."""
    made = objects_of([[((1, -2, 3), 0, 7)], [], [((0, 0, 0), 1, (2, 5)), ((0, 0, 0), 2, [9, 8])]], 3)
    one = struct.pack("<I3qBq", 1, 1, -2, 3, 0, 7)
    two = struct.pack("<I3qBqq3qBI2q", 2, 0, 0, 0, 1, 2, 5, 0, 0, 0, 2, 2, 9, 8)
    blobs = encode_manifests(made)
    assert [bytes(blobs[i]) for i in range(3)] == [one, bytes(4), two]
    assert len(one) == 37
    _, fragments, bounds = expand_manifests(made, np.full(len(made.modes), 10), "0")
    assert fragments.tolist() == [7, 2, 3, 4, 5, 6, 9, 8]
    assert bounds.tolist() == [0, 1, 1, 8]


CHUNK = st.tuples(st.integers(-(2**62), 2**62), st.integers(-3, 3))
BLOCK = st.one_of(
    st.tuples(CHUNK, st.just(0), st.integers(0, 2**62)),
    st.tuples(CHUNK, st.just(1), st.tuples(st.integers(0, 2**62), st.integers(0, 2**62))),
    st.tuples(CHUNK, st.just(2), st.lists(st.integers(0, 2**62), max_size=4)),
)


@FEW
@given(st.lists(st.lists(BLOCK, max_size=4), max_size=6))
def test_manifests_come_back(manifests: list[list[tuple[tuple[int, ...], int, object]]]) -> None:
    """Items 65, 66, 69, 72, 74: any manifests come back, cut by offsets or found by scanning, all or some of them."""
    made = objects_of(manifests, 2)
    blobs = encode_manifests(made)
    assert np.array_equal(split_manifests(blobs.data, 2, len(manifests)).bounds, blobs.bounds)
    found = decode_manifests(blobs, 2, made.ids)
    for name in ("bounds", "chunks", "modes", "starts", "counts", "fragments"):
        assert np.array_equal(getattr(found, name), getattr(made, name)), name
    back = take_manifests(made, np.arange(len(manifests))[::-1])
    assert [bytes(encode_manifests(back)[i]) for i in range(len(blobs))] == [
        bytes(blobs[i]) for i in range(len(blobs))
    ][::-1]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"\x01\0\0", "truncated"),
        (struct.pack("<I2qBq", 2, 0, 0, 0, 1), "truncated"),
        (struct.pack("<I2qBq", 1, 0, 0, 3, 1), "unknown mode"),
        (struct.pack("<I2qBq", 1, 0, 0, 0, -1), "negative"),
        (struct.pack("<I2qBqq", 1, 0, 0, 1, 0, -1), "negative"),
        (struct.pack("<I2qBqB", 1, 0, 0, 0, 1, 0), "bytes follow"),
        (struct.pack("<I2qBI", 1, 0, 0, 2, 2**31), "truncated"),
        (struct.pack("<I", 2**31), "truncated"),
    ],
)
def test_malformed_manifests_are_refused(raw: bytes, says: str) -> None:
    """Item 66: an unknown mode, a cut, bytes that follow and negative numbers are refused by name, also when manifests are scanned."""
    with pytest.raises(CorruptError, match=says):
        decode_manifests(blob(raw), 2, np.array([5]))
    with pytest.raises(CorruptError, match=says):
        split_manifests(np.frombuffer(raw, np.uint8), 2, 1)


@FEW
@given(st.lists(st.binary(max_size=9), max_size=9))
def test_byte_strings_come_back(items: list[bytes]) -> None:
    """Item 4: vlen-bytes chunks come back, and have the layout of the Zarr codec."""
    raw = encode_vlen(concat_blobs(items))
    assert raw == struct.pack("<I", len(items)) + b"".join(struct.pack("<I", len(item)) + item for item in items)
    found = decode_vlen(np.frombuffer(raw, np.uint8))
    assert [bytes(found[i]) for i in range(len(found))] == items


@pytest.mark.parametrize(
    "raw", [b"", b"\x01\0\0\0", b"\x01\0\0\0\x05\0\0\0ab", b"\x01\0\0\0\x01\0\0\0ab", struct.pack("<I", 2**31)]
)
def test_malformed_byte_strings_are_refused(raw: bytes) -> None:
    """Item 4: a vlen-bytes chunk that is cut short or goes on is refused, of many items or of one."""
    data = np.frombuffer(raw, np.uint8)
    with pytest.raises(CorruptError):
        decode_vlen(data)
    with pytest.raises(CorruptError):
        decode_single_item(data)


def test_golden_bytes_of_a_stream_of_rows() -> None:
    """Items 46, 64: i64 K, K offsets, rows; many streams are made at once."""
    rows = to_bytes(np.array([[1, 2], [3, 4]], np.uint8))
    raw = struct.pack("<2q4B", 1, 0, 1, 2, 3, 4)
    assert encode_ragged(rows) == raw
    assert bytes(decode_ragged(np.frombuffer(raw, np.uint8))[0]) == bytes([1, 2, 3, 4])
    both = encode_single_groups(Blobs(rows, np.array([0, 4, 4])))
    assert [bytes(both[i]) for i in range(2)] == [raw, struct.pack("<2q", 1, 0)]
    two = decode_ragged(np.frombuffer(struct.pack("<3q3B", 2, 0, 1, 7, 8, 9), np.uint8))
    assert [bytes(two[i]) for i in range(2)] == [b"\x07", b"\x08\x09"]


@pytest.mark.parametrize(
    "raw",
    [
        b"abc",
        struct.pack("<q", -1),
        struct.pack("<q", 3),
        struct.pack("<2qB", 1, 5, 0),
        struct.pack("<3qB", 2, 0, 9, 1),
        struct.pack("<qB", 0, 1),
    ],
)
def test_malformed_streams_are_refused(raw: bytes) -> None:
    """Item 64: streams with negative counts, offsets that fall or point outside are refused."""
    with pytest.raises(CorruptError):
        decode_ragged(np.frombuffer(raw, np.uint8))


@FEW
@given(st.lists(st.lists(st.integers(0, 2**62), max_size=4), max_size=5))
def test_groups_come_back(groups: list[list[int]]) -> None:
    """Items 42, 46: groups of any length come back from the prefix alone, from prefix and sidecar, and from bare ids with a sidecar."""
    offsets = counts_to_offsets(np.array([len(group) for group in groups]))
    ids = np.array([i for group in groups for i in group], np.int64)
    raw, starts = encode_groups(offsets, ids)
    data = np.frombuffer(raw, np.uint8)
    assert raw == struct.pack(f"<{1 + len(groups)}q", len(groups), *(8 * offsets[:-1]).tolist()) + ids.tobytes()
    assert starts.tolist() == (8 * (1 + len(groups)) + 8 * offsets[:-1]).tolist()
    for blobs, sidecar in ((data, None), (data, starts), (to_bytes(ids), 8 * offsets[:-1])):
        if groups or sidecar is None:
            found = decode_groups(blobs, sidecar, len(groups))
            assert np.array_equal(found[0], offsets)
            assert np.array_equal(found[1], ids)


def test_groups_that_are_not_there_are_refused() -> None:
    """Item 43: the declared number of groups is the stored one."""
    raw, starts = encode_groups(np.array([0, 1]), np.array([5]))
    for sidecar in (None, starts):
        with pytest.raises(CorruptError, match="2 declared groups"):
            decode_groups(np.frombuffer(raw, np.uint8), sidecar, 2)


def test_groups_begin_at_whole_ids() -> None:
    """A start inside an id is not rounded down to the id's start, in either encoding."""
    ids = to_bytes(np.array([5, 6]))
    for begin in (np.array([0, 4]), np.array([0, 12])):
        stream = np.frombuffer(encode_ragged(ids, begin), np.uint8)
        for data, starts in ((ids, begin), (stream, None)):
            with pytest.raises(CorruptError, match="2 declared groups"):
                decode_groups(data, starts, 2)


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_records_come_back(width: int) -> None:
    """Items 75, 76, 78: records of links across chunks, 8 * L * (D + 1) bytes each, of any width; a negative row is refused."""
    rng = np.random.default_rng(width)
    chunks, rows = rng.integers(-9, 9, (4, width, 3)), rng.integers(0, 9, (4, width))
    raw = to_bytes(encode_records(chunks, rows))
    assert raw.size == 4 * 8 * width * 4
    assert raw[:32].tobytes() == struct.pack("<4q", *chunks[0, 0].tolist(), int(rows[0, 0]))
    found = decode_records(raw, width, 3, "x")
    assert np.array_equal(found[0], chunks)
    assert np.array_equal(found[1], rows)
    with pytest.raises(CorruptError, match="a multiple of"):
        decode_records(raw[:-8], width, 3, "x")
    with pytest.raises(CorruptError, match="negative"):
        decode_records(to_bytes(encode_records(chunks, rows - 99)), width, 3, "x")


def test_pieces_in_turn() -> None:
    """Sections are joined blob by blob, ranges of rows written out, and bytes that are no whole rows refused."""
    made = interleave(concat_blobs([b"a", b"b"]), concat_blobs([b"", b"cd"]))
    assert [bytes(made[i]) for i in range(2)] == [b"a", b"bcd"]
    assert concat_ranges(NONE, NONE).tolist() == []
    with pytest.raises(CorruptError, match="a multiple of"):
        from_bytes(np.zeros(7, np.uint8), "<f4", 2)


def test_lists_are_stored_by_their_starts() -> None:
    """Lists may be in any order among the rows, share some and leave others out; each is stored as its fragment names it."""
    rows = np.array([9, 5, 3, 9, 1])
    of = Fragments(np.array([0, 2, 3]), np.array([False, True, False]), np.array([3, 7, 1]), np.array([2, 4, 3]), rows)
    found = decode_fragments(encode_fragments(of))
    assert fragment_rows(found, np.arange(3))[0].tolist() == [9, 1, 7, 8, 9, 10, 5, 3, 9]
    assert found.counts.tolist() == [2, 4, 3]
