"""Laws of the elements that an atlas stores as one file: anndata reads the same, and bytes that are damaged or made up are refused."""

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import zarr
from anndata.io import read_elem

from raggedatlas.errors import CorruptError, SchemaError
from raggedatlas.formats.anndata.packing import pack, unpack
from support.anndata_strategies import assert_equal

pytestmark = pytest.mark.fast

ELEMENTS = {
    "uns/note": {"text": "kept " * 20, "numbers": np.arange(20), "list": ["a", "b"], "none": None},
    "uns/n": np.float32(0.5),
    "uns/records": np.array([("a", 1)], dtype=[("name", "O"), ("n", "i8")]),
    "uns/integers": pd.array([1, None], dtype="Int64"),
    "varp/empty": np.empty((2, 0), np.float32),
    "obsm/table": pd.DataFrame({"CD4/CD8": [1, 2], "b": pd.Categorical(["x", None])}, index=["i", "j"]),
    "mod/rna/uns/flag": True,
}


def test_anndata_reads_what_is_packed(tmp_path: Path) -> None:
    """The bytes are those of a file that anndata opens, whatever the order of the elements, and both readers agree."""
    data = pack(ELEMENTS)
    assert data == pack(dict(reversed(ELEMENTS.items())))
    found = unpack(data)
    assert list(found) == sorted(ELEMENTS)
    (tmp_path / "x.zarr.zip").write_bytes(data)
    store = zarr.storage.ZipStore(tmp_path / "x.zarr.zip", mode="r")
    file = zarr.open_group(store, mode="r")
    for key, read in found.items():
        assert_equal(read_elem(file[key]), read())
    store.close()


@pytest.mark.parametrize(
    ("elements", "named"),
    [
        ({"uns/a": {"b": {1, 2}}}, "uns/a"),
        ({"uns/a": {"b/c": 1}}, "b/c"),
        ({"uns/a": {}, "uns/a/b": 1}, "uns/a/b"),
        ({"uns/a//b": 1}, "uns/a//b"),
        ({"uns/a": np.ma.MaskedArray([1, 2], [True, False])}, "uns/a"),
        ({"uns/a": [1, {"b": 2}]}, "uns/a"),
        ({"uns/a": (1, 2)}, "tuple"),
        ({"uns/a\0b": 1, "uns/a": 2}, "no file can hold"),
        ({"uns/a": {"b\0": 1}}, "no file can hold"),
        ({"uns/\udc80": 1}, "no file can hold"),
        ({"uns/a\\b": 1}, "backslash"),
        ({"uns/a": {"b": {"c\\d": 1}}}, "backslash"),
        ({"uns/a": pd.DataFrame({"b\\c": [1]})}, "backslash"),
    ],
)
def test_what_anndata_cannot_write_is_refused_by_name(elements: dict[str, Any], named: str) -> None:
    """No element is left out, changed, or written where another one is."""
    with pytest.raises(SchemaError, match=named):
        pack(elements)


def read_all(data: bytes) -> dict[str, Any]:
    return {key: read() for key, read in unpack(data).items()}


def test_a_flipped_bit_is_refused_or_changes_nothing() -> None:
    """Whichever bit is flipped, in a member, a name or the directory: `CorruptError`, or equal elements."""
    data = pack(ELEMENTS)
    refused = 0
    for bit in range(0, 8 * len(data), 811):
        other = bytearray(data)
        other[bit // 8] ^= 1 << bit % 8
        try:
            found = read_all(bytes(other))
        except CorruptError:
            refused += 1
        else:
            assert found.keys() <= ELEMENTS.keys()
    assert refused > len(data) // 200


def zip_of(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def changed(
    change: Callable[[dict[str, Any]], Any], path: str = "uns/x", compression: int = zipfile.ZIP_STORED
) -> bytes:
    """Return packed elements with changed metadata of one node."""
    with zipfile.ZipFile(io.BytesIO(pack({"uns/x": np.arange(3), "uns/y": {"z": 1}}))) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    root = json.loads(files["zarr.json"])
    change(root["consolidated_metadata"]["metadata"][path])
    files["zarr.json"] = json.dumps(root).encode()
    return zip_of(files, compression)


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "no zip": b"PK\3\4",
    "no root": zip_of({"a": b""}),
    "nested without end": zip_of({"zarr.json": b'{"a":' * 100_000}),
    "no object": changed(lambda node: node.clear()),
    "unknown encoding": changed(lambda node: node["attributes"].update({"encoding-type": "pickle"})),
    "a pickle": changed(lambda node: node.update(codecs=[{"name": "numcodecs.pickle", "configuration": {}}])),
    "zeros without end": changed(lambda node: node.update(shape=[2**40])),
    "a large chunk": changed(
        lambda node: node.update(chunk_grid={"name": "regular", "configuration": {"chunk_shape": [2**40]}})
    ),
    "a table without columns": changed(
        lambda node: node["attributes"].update({"encoding-type": "dataframe", "encoding-version": "0.2.0"}), "uns/y"
    ),
    "compressed members": changed(dict, compression=zipfile.ZIP_DEFLATED),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_made_up_file_is_refused(data: bytes) -> None:
    """A file that `pack` would not write is `CorruptError`, and takes no memory that it only claims."""
    with pytest.raises(CorruptError):
        read_all(data)
