"""Functions of values alone, one example each."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raggedatlas.errors import CorruptError, QueryError
from raggedatlas.model.batch import sparse_dtype
from raggedatlas.model.frames import nan_to_null
from raggedatlas.model.ids import free_name, is_unicode, layout_uid, repeated_uids, uid_numbers
from raggedatlas.model.shown import as_table
from raggedatlas.store.byte_filters import decode_lzf, shuffle, unshuffle
from raggedatlas.store.filters import suggest
from raggedatlas.store.shards import hash_shard, shards_below
from raggedatlas.store.sql import all_of, any_of, equals, is_null, negation, parenthesized
from raggedatlas.store.storage_errors import served_error

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (sparse_dtype(np.dtype("float16")), np.dtype("float32")),
        (sparse_dtype(np.dtype(">i4")), np.dtype("int32")),
        (nan_to_null(pa.chunked_array([[1.0, float("nan"), None]])).null_count, 2),
        (repeated_uids(["a", "b", "a"])[:2], ["a", "b"]),
        (len(set(repeated_uids(["a", "a", "a"]))), 3),
        (layout_uid(["a", "b"]) == layout_uid(["ab"]), False),
        (layout_uid(["a", "b"]) == layout_uid(["b", "a"]), False),
        ([part.tolist() for part in uid_numbers(pa.array(["00000000000000ff", "no uid", None]))], [[255, 0, 0], [True, False, False]]),
        (free_name("pbmc", {"pbmc", "pbmc-2"}, "-"), "pbmc-3"),
        ((is_unicode("ü"), is_unicode(chr(0xD800))), (True, False)),
        (shards_below("csr/indices/c", ["csr/indices/c/0", "csr/indices/zarr.json"]), {0: "csr/indices/c/0"}),
        (hash_shard([b"ab", b"c"]), hash_shard([b"abc"])),
        (suggest("b", ["B cell", "T cell"]), "Did you mean 'B cell'?"),
        (suggest("x", ["B cell"]), "Values are 'B cell'."),
        (all_of(equals("n", 1), is_null("uid")), "(`n` = 1) AND (`uid` IS NULL)"),
        ((all_of(), any_of(), negation("a")), ("TRUE", "FALSE", "NOT (a)")),
        (parenthesized("tissue = 'a)' AND (n > 1)"), "(tissue = 'a)' AND (n > 1))"),
    ],
)  # fmt: skip
def test_a_function_of_values_returns_what_is_written_here(found: Any, wanted: Any) -> None:
    """Each function gives the value beside its call."""
    assert found == wanted


def test_bytes_come_back_from_their_filters() -> None:
    """`unshuffle` reverses `shuffle`, and an LZF stream gives the bytes that it was made of."""
    numbers = np.array([1, 513], "<u2")
    out = np.empty(2, "<u2")
    unshuffle(shuffle(numbers).tobytes(), out)
    assert out.tolist() == [1, 513]
    room = np.empty(6, np.uint8)
    decode_lzf(np.frombuffer(b"\x01ab\x40\x01", np.uint8), room)
    assert room.tobytes() == b"ababab"


def test_a_condition_that_closes_a_parenthesis_early_is_refused() -> None:
    """Lance would ignore what follows it."""
    with pytest.raises(QueryError, match="parenthesis"):
        parenthesized("n = 1) or so")


def test_an_error_that_the_gateway_served_is_raised_again() -> None:
    """Its class is named by the code, its text is unescaped."""
    found = served_error(OSError("<Code>RaggedAtlasCorruptError</Code><Message>It has 2 &lt; 3 bytes.</Message>"))
    assert isinstance(found, CorruptError)
    assert str(found) == "It has 2 < 3 bytes."


def test_lines_of_text_become_a_table() -> None:
    """The first line is the head, and a line ``name: value`` has two columns."""
    made = as_table("Snapshots 1 and 2:\n  cells added: 450")
    assert made.startswith('<table><thead><tr><th colspan="2"')
    assert [part.partition("<")[0] for part in made.split('left">')[1:]] == ["Snapshots 1 and 2", "cells added", "450"]
