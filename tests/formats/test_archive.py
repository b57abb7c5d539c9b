"""Laws of the kept elements: what was packed comes back equal, and bytes that are damaged or made up are refused."""

import io
import json
import zipfile
from typing import Any

import numpy as np
import pandas as pd
import pytest

from raggedatlas.errors import CorruptError
from raggedatlas.formats.archive import TREE, pack, unpack
from support.anndata_strategies import assert_equal

pytestmark = pytest.mark.fast

ELEMENTS = {
    "uns/note": {"text": "kept " * 20, "numbers": np.arange(20)},
    "obsm/table": pd.DataFrame({"a": [1, 2], "b": ["x", None]}),
}


def test_a_flipped_bit_is_refused_or_changes_nothing() -> None:
    """Whichever bit is flipped, in a deflate stream (zlib.error), in a name or in a head of the archive: `CorruptError`, or equal elements."""
    data = pack(ELEMENTS)
    refused = 0
    for bit in range(0, 8 * len(data), 13):
        other = bytearray(data)
        other[bit // 8] ^= 1 << bit % 8
        try:
            found = unpack(bytes(other))
        except CorruptError:
            refused += 1
        else:
            assert_equal(ELEMENTS, found)
    assert refused > len(data) // 4


HOSTILE: dict[str, Any] = {
    "no object": None,
    "a list": [],
    "no kind": {},
    "unknown kind": {"is": "pickle"},
    "items of no list": {"is": "dict", "items": None},
    "not a member": {"is": "array", "at": "gone"},
    "an index of text": {"is": "frame", "at": "0", "index": "abc", "no_columns": ""},
    "a class of its own": {"is": "sparse", "class": "dict", "shape": [1, 1], "data": {}, "indices": {}, "indptr": {}},
    "nested without end": '{"is":"list","items":[' * 100_000,
    "records without end": {
        "is": "records",
        "shape": [2**40],
        "records": False,
        "fields": {"x": {"is": "array", "at": "0"}},
    },
    "a mask of another length": {
        "is": "masked",
        "data": {"is": "array", "at": "0"},
        "mask": {"is": "value", "value": [True, False]},
    },
}


@pytest.mark.parametrize("node", HOSTILE.values(), ids=HOSTILE)
def test_a_made_up_tree_is_refused(node: Any) -> None:
    """A tree that `pack` would not write, in a sound archive, is `CorruptError`, and takes no memory that it only claims."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(TREE, f'{{"uns/x": {node if isinstance(node, str) else json.dumps(node)}}}')
        array = io.BytesIO()
        np.save(array, np.arange(3))
        archive.writestr("0", array.getvalue())
    with pytest.raises(CorruptError):
        unpack(buffer.getvalue())
