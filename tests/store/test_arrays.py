"""Laws of written arrays: every reader of Zarr v3 gets the values back, in bounded pieces."""

import hashlib
import json
import struct
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.errors import CorruptError, LimitError, NameRefusedError, NotFoundError, SchemaError, StoreError
from raggedatlas.model.arrays import COLUMNS_CODEC, DTYPES, ArraySpec
from raggedatlas.store.arrays import (
    ArrayWriter,
    GroupMetadata,
    create_group,
    read_group,
    read_spec,
    write_group_attributes,
)
from raggedatlas.store.codecs import array_decoder, extend_checksum, is_exact
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader, read_slice, verify
from raggedatlas.store.runtime import BackgroundWriter
from support.hypothesis_profile import examples
from support.zarr_codecs import array_codecs

pytestmark = pytest.mark.fast

WIDENINGS = [(a, b) for a in DTYPES for b in DTYPES if a != b and is_exact(a, b)]


def make_values(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return random values that use the whole range of an element type."""
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
    if dtype == "bool":
        return (raw[..., 0] & 1).astype(bool)
    if np.dtype(dtype).kind in "fc":
        return raw.sum(axis=-1).astype(dtype)
    return raw.reshape(-1).view(dtype).reshape(shape)


def write_parts(writer: ArrayWriter, values: np.ndarray, cuts: list[int]) -> None:
    """Append values in parts that end at `cuts`."""
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    for start, stop in pairwise(edges):
        writer.append(values[start:stop])


@pytest.mark.nightly
@examples(60)
@given(
    dtype=st.sampled_from(DTYPES),
    row_shape=st.lists(st.integers(1, 4), max_size=2).map(tuple),
    n=st.integers(0, 200),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    chunk_rows=st.integers(1, 40),
    shard_rows=st.integers(1, 120),
)
def test_what_is_appended_is_read(dtype, row_shape, n, cuts, chunk_rows, shard_rows) -> None:  # noqa: ANN001
    """Any append pattern of any element type and rank reads back equal, by us and by zarr-python."""
    values = make_values(dtype, (n, *row_shape), n)
    with tempfile.TemporaryDirectory() as folder:
        location = Location(folder)
        writer = ArrayWriter(location, "d1/x", dtype, row_shape, chunk_rows=chunk_rows, shard_rows=shard_rows)
        write_parts(writer, values, cuts)
        spec = writer.close()
        assert read_spec(location, "d1/x") == spec == ArraySpec.from_json(spec.to_json())
        assert spec.shape == values.shape
        stored = zarr.open_group(location.zarr_store(), mode="r")["d1"]["x"]
        assert stored.dtype == values.dtype
        np.testing.assert_array_equal(stored[:], values)
        reader = ArrayReader(location, spec)
        np.testing.assert_array_equal(read_slice(reader, 0, n), values)
        assert verify(reader) == ([], *writer.checksums("").values())
        assert writer.checksum == f"{extend_checksum(0, values):08x}"


@examples(40)
@given(
    step=st.sampled_from(WIDENINGS),
    n=st.integers(0, 150),
    at=st.integers(0, 150),
    cuts=st.lists(st.integers(0, 150), max_size=4),
)
def test_promotion_is_exact(step: tuple[str, str], n: int, at: int, cuts: list[int]) -> None:
    """An array promoted at any moment holds what it would hold had it been wide from the start."""
    narrow, wide = step
    values, at = make_values(narrow, (n,), n), min(at, n)
    with tempfile.TemporaryDirectory() as folder:
        location = Location(folder)
        writer = ArrayWriter(location, "x", narrow, chunk_rows=8, shard_rows=32)
        write_parts(writer, values[:at], cuts)
        writer.promote(wide)
        writer.promote(wide)
        writer.append(values[at:])
        reader = ArrayReader(location, writer.close())
        found = read_slice(reader, 0, n)
        assert found.dtype == wide
        np.testing.assert_array_equal(found, values.astype(wide))
        assert verify(reader) == ([], *writer.checksums("").values())
        assert writer.checksums("x") == {
            "x": f"{extend_checksum(0, values.astype(wide)):08x}",
            "x/c": hash_of_files(location.path / "x" / "c"),
        }


def hash_of_files(folder: Path) -> str:
    """What a record holds of a folder of shards, said anew: SHA-256 over length and SHA-256 of each, in the order of their numbers."""
    content = hashlib.sha256()
    for file in sorted(folder.glob("*"), key=lambda file: int(file.name)):
        data = file.read_bytes()
        content.update(struct.pack("<Q", len(data)) + hashlib.sha256(data).digest())
    return content.hexdigest()


def test_shards_written_behind_the_caller_are_hashed(local: Location) -> None:
    """The hash waits for the shards; more than ten of them, also when a promotion rewrites them."""
    with BackgroundWriter(2) as send:
        writer = ArrayWriter(local, "x", "uint8", chunk_rows=10, shard_rows=10).behind(send)
        writer.append(np.arange(125, dtype="uint8"))
        writer.promote("uint16")
        writer.append(np.arange(300, dtype="uint16"))
        writer.close()
        found = writer.checksums("x")["x/c"]
    assert len(list((local.path / "x" / "c").iterdir())) == 43
    assert found == hash_of_files(local.path / "x" / "c")


@pytest.mark.parametrize(
    ("narrow", "wide", "exact"),
    [
        ("uint32", "float32", False),
        ("uint16", "float32", True),
        ("int64", "float64", False),
        ("uint32", "float64", True),
        ("int8", "uint16", False),
        ("uint64", "int64", False),
        ("uint32", "int64", True),
        ("float32", "uint8", False),
        ("int32", "complex128", True),
    ],
)
def test_only_exact_widenings_are_made(local: Location, narrow: str, wide: str, exact: bool) -> None:
    """A type that cannot hold every value of the old one is refused, and the array goes on as it was."""
    writer = ArrayWriter(local, "x", narrow)
    writer.append(np.array([1, 2], narrow))
    if exact:
        writer.promote(wide)
        assert writer.dtype == wide
    else:
        with pytest.raises(SchemaError, match="wider type"):
            writer.promote(wide)
        with pytest.raises(SchemaError, match="promote"):
            ArrayWriter(local, "y", wide).append(np.array([1], narrow))
        assert writer.close().dtype == narrow


def test_shards_follow_the_data(local: Location) -> None:
    """A small array takes one shard of its own size; an empty one none; a large one shards of the asked size."""
    small = ArrayWriter(local, "small", "uint8")
    small.append(np.arange(10, dtype="uint8"))
    assert small.close().shard_shape == (10,)
    middle = ArrayWriter(local, "middle", "uint8")
    middle.append(np.zeros(5000, "uint8"))
    assert middle.close().shard_shape == (8192,)
    empty = ArrayWriter(local, "empty", "float32", (3,)).close()
    assert empty.shape == (0, 3)
    assert not (local.path / "empty" / "c").exists()
    large = ArrayWriter(local, "large", "uint8", chunk_rows=10, shard_rows=95)
    large.append(np.zeros(250, "uint8"))
    assert large.close().shard_shape == (100,)
    assert sorted(file.name for file in (local.path / "large" / "c").iterdir()) == ["0", "1", "2"]


def test_an_unfinished_array_is_none(local: Location) -> None:
    """Before close there is no metadata, so a killed writer leaves no array behind."""
    writer = ArrayWriter(local, "d1/x", "uint8", chunk_rows=2, shard_rows=4)
    writer.append(np.zeros(100, "uint8"))
    assert (local.path / "d1/x/c/3").exists()
    with pytest.raises(NotFoundError):
        read_spec(local, "d1/x")
    writer.close()
    assert read_spec(local, "d1/x").shape == (100,)
    for late in (writer.close, lambda: writer.append(np.zeros(1, "uint8")), lambda: writer.promote("uint16")):
        with pytest.raises(StoreError, match="closed"):
            late()


def test_wrong_rows_and_types_are_refused(local: Location) -> None:
    """Rows of another shape, element types that cannot be stored and unknown profiles are refused by name."""
    writer = ArrayWriter(local, "x", "float32", (3,))
    for values in (np.zeros((2, 4), "float32"), np.zeros(3, "float32"), np.float32(1)):
        with pytest.raises(SchemaError, match=r"rows of shape \(3,\)"):
            writer.append(np.asarray(values))
    for dtype in ("U5", "object", "datetime64[ns]"):
        with pytest.raises(SchemaError, match="cannot hold"):
            ArrayWriter(local, "y", dtype)
    with pytest.raises(SchemaError, match="no elements"):
        ArrayWriter(local, "y", "float32", (0,))
    with pytest.raises(StoreError, match="profile"):
        ArrayWriter(local, "y", "float32", profile="magic")


@pytest.mark.parametrize("path", ["", "a//b", "../a", "/a", "a\\b", "a/.b", "a/..", "a/b/"])
def test_paths_that_leave_the_store_are_refused(local: Location, path: str) -> None:
    """A bad array or group path is refused before anything is written."""
    with pytest.raises(NameRefusedError):
        ArrayWriter(local, path, "uint8")
    if path:
        with pytest.raises(NameRefusedError):
            create_group(local, path, {})
    assert not local.path.exists()


def test_arrays_below_a_symlink_are_refused(local: Location, tmp_path: Path) -> None:
    """A group that is a symlink is neither written into nor read from."""
    (tmp_path / "outside").mkdir()
    local.path.mkdir()
    (local.path / "d1").symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError, match="symlink"):
        ArrayWriter(local, "d1/x", "uint8")
    with pytest.raises(StoreError, match="symlink"):
        read_spec(local, "d1/x")
    with pytest.raises(StoreError, match="symlink"):
        create_group(local, "d1/y", {})
    assert not list((tmp_path / "outside").iterdir())


def test_groups_are_walked(local: Location) -> None:
    """Groups and those above them carry metadata; attributes are read back and replaced whole."""
    create_group(local, "d1/gene_expression", {"space": "gene_expression"})
    create_group(local, "d1/gene_expression/csr")
    create_group(local, "d1/gene_expression")
    assert read_group(local, "d1/gene_expression").attributes == {"space": "gene_expression"}
    assert read_group(local, "d1") == read_group(local, "") == GroupMetadata({}, None)
    write_group_attributes(local, "d1", {"n": 1})
    assert dict(zarr.open_group(local.zarr_store(), mode="r")["d1"].attrs) == {"n": 1}
    with pytest.raises(NotFoundError):
        read_group(local, "d2")
    ArrayWriter(local, "d1/x", "uint8").close()
    with pytest.raises(CorruptError, match="not a group"):
        read_group(local, "d1/x")


def test_golden_bytes_of_a_tiny_array(local: Location) -> None:
    """A tiny array is these bytes: a Blosc frame with its crc32c, the index, the index's crc32c; and this JSON."""
    writer = ArrayWriter(local, "x", "uint8")
    writer.append(np.array([7, 8, 9], "uint8"))
    spec = writer.close()
    shard = (local.path / "x" / "c" / "0").read_bytes()
    blosc = "02013301030000000300000013000000070809"  # head: 3 bytes in blocks of 3, stored in 19
    index = "00000000000000001700000000000000"  # one chunk at 0, 23 bytes with its crc32c
    assert shard.hex() == blosc + "babe784f" + index + "5a965f3c"
    metadata = json.loads((local.path / "x" / "zarr.json").read_text())
    assert metadata["codecs"][0]["configuration"]["codecs"] == [
        {"name": "bytes"},
        {
            "name": "blosc",
            "configuration": {"typesize": 1, "cname": "lz4", "clevel": 5, "shuffle": "shuffle", "blocksize": 0},
        },
        {"name": "crc32c"},
    ]
    assert (metadata["shape"], metadata["data_type"], metadata["fill_value"]) == ([3], "uint8", 0)
    assert spec.fill_value == "0"


def test_zarr_python_writes_the_same_codecs(local: Location) -> None:
    """`array_codecs` makes zarr-python write arrays that are read directly, with the same spec."""
    values = np.arange(100, dtype="uint32")
    group = zarr.open_group(local.zarr_store(read_only=False), mode="w")
    array = group.create_array(
        "z", shape=(100,), chunks=(8,), shards=(40,), dtype="uint32", **array_codecs("standard", "uint32")
    )
    array[:] = values
    writer = ArrayWriter(local, "z2", "uint32", chunk_rows=8, shard_rows=40)
    writer.append(values)
    spec, ours = read_spec(local, "z"), writer.close()
    assert (spec.codecs, spec.chunk_shape, spec.shard_shape) == (ours.codecs, ours.chunk_shape, ours.shard_shape)
    assert array_decoder(spec) is not None
    np.testing.assert_array_equal(read_slice(ArrayReader(local, spec), 0, 100), values)


def spec_with(**changes: object) -> ArraySpec:
    """Return a small spec with some fields changed."""
    fields = {
        "path": "x",
        "shape": (10,),
        "dtype": "uint8",
        "chunk_shape": (4,),
        "shard_shape": (8,),
        "codecs": "[]",
    }
    return ArraySpec(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"shape": (-1,)}, CorruptError),
        ({"shape": (10, 2)}, CorruptError),
        ({"shape": (1.5,)}, CorruptError),
        ({"chunk_shape": (0,)}, CorruptError),
        ({"shard_shape": (9,)}, CorruptError),
        ({"shape": (2**61,)}, LimitError),
        ({"shape": (), "chunk_shape": (), "shard_shape": None}, LimitError),
        ({"shape": (1,) * 33, "chunk_shape": (1,) * 33, "shard_shape": None}, LimitError),
        ({"chunk_shape": (2**30,), "shard_shape": (2**30,)}, LimitError),
        ({"shard_shape": (2**40,)}, LimitError),
        ({"dtype": "object"}, SchemaError),
    ],
)
def test_absurd_metadata_is_refused(changes: dict[str, object], error: type[Exception]) -> None:
    """Shapes that are none, chunks beyond 512 MiB and shard indexes beyond memory are refused."""
    with pytest.raises(error, match="x"):
        spec_with(**changes)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"node_type": "array", "zarr_format": 3}', "\xff"])
def test_metadata_that_do_not_parse_are_corrupt(local: Location, text: str) -> None:
    """Broken metadata give one error of ours that names the file."""
    local.write_bytes("x/zarr.json", text.encode("latin-1"))
    with pytest.raises(CorruptError, match=r"x/zarr\.json"):
        read_spec(local, "x")
    with pytest.raises(CorruptError, match=r"x/zarr\.json|not a group"):
        read_group(local, "x")


@pytest.mark.parametrize("change", [{"path": 1.5}, {"codecs": COLUMNS_CODEC}, {"codecs": None}])
def test_a_damaged_description_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """A damaged record is refused when it is parsed: what reads it later would not name it, and no record describes columns that are not stored."""
    writer = ArrayWriter(Location(tmp_path), "d1/x", np.uint8, (), profile="packed")
    writer.append(np.arange(3, dtype=np.uint8))
    text = json.dumps({**json.loads(writer.close().to_json()), **change})
    with pytest.raises(CorruptError, match="does not parse"):
        ArraySpec.from_json(text)


@pytest.mark.parametrize("codec", ["bytes", {"id": "bytes"}, {"name": "bytes", "configuration": 5}])
def test_codecs_that_do_not_parse_are_refused_with_the_name_of_the_file(local: Location, codec: object) -> None:
    """Also those of the chunks inside a shard."""
    writer = ArrayWriter(local, "d1/x", np.uint8, ())
    writer.append(np.arange(3, dtype=np.uint8))
    writer.close()
    metadata = json.loads(local.read_bytes("d1/x/zarr.json"))
    metadata["codecs"][0]["configuration"]["codecs"] = [codec]
    local.write_bytes("d1/x/zarr.json", json.dumps(metadata).encode())
    with pytest.raises(CorruptError, match=r"d1/x/zarr\.json is not Zarr v3 array metadata"):
        read_spec(local, "d1/x")
