"""Elements as one zip file of a Zarr folder in AnnData's encoding: what an atlas stores of a dataset besides tables and large matrices."""

import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, LimitError, SchemaError, SourceError
from raggedatlas.formats.anndata.elements import read_element
from raggedatlas.formats.containers import READ_ERRORS, attribute, declared_bytes, is_array, open_object
from raggedatlas.formats.element_writer import check_name, check_names, members_of, plain_value, refused, write_member

METADATA = "zarr.json"

MAX_PLAIN_BYTES = 64 << 20
"""Arrays of at most so many bytes are one chunk, written here; all others are written by anndata."""


def pack(elements: Mapping[str, Any]) -> bytes:
    """Pack elements in AnnData's encoding, so that `unpack` reads what anndata reads of them from an h5ad file.

    Keys are paths such as ``"uns/neighbors"``, values any elements that AnnData can write. The result is a zip file
    without compression, the same for the same elements. Groups without an encoding only hold elements. Raises
    `SchemaError`, which names the element, for one that cannot be written.

    Examples
    --------
    >>> elements = unpack(pack({"uns/a": {"name": "b", "empty": {}}}))
    >>> elements["uns/a"]()
    {'empty': {}, 'name': 'b'}
    """
    files: dict[str, bytes] = {}
    # Sorted, so that a path comes after those that it continues.
    for key in sorted(elements):
        taken = any(files.get(f"{path}/{METADATA}", GROUP) != GROUP for path in _above(key))
        if taken:
            raise SchemaError(f"{key!r} has a '/' in its name, which files take for groups within groups; rename it.")
        for name in key.split("/"):
            check_name(name, f"{key!a}", zarr=False)
        check_names(key, elements[key], slashes=True)
        with refused(key):
            value = plain_value(elements[key], inferred=False)
        _write(files, key, value)
    # Of what Zarr does not take, a zip file has all but these.
    if divided := [path for path in files if "\\" in path]:
        raise SchemaError(
            f"{divided[0].removesuffix(f'/{METADATA}')} has a name with a backslash, which Zarr takes for groups within groups; rename it."
        )
    nodes = [path.removesuffix(f"/{METADATA}") for path in files if path.endswith(f"/{METADATA}")]
    # Members of a group follow each other: zarr-python reads consolidated metadata in another order as those of other groups.
    listed = {
        path: json.loads(files[f"{path}/{METADATA}"])
        for path in sorted(nodes, key=lambda path: (path.count("/"), path))
    }
    files[METADATA] = _node(
        "group", {}, consolidated_metadata={"kind": "inline", "must_understand": False, "metadata": listed}
    )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in sorted(files):
            # The default time of a `ZipInfo` is 1980-01-01.
            archive.writestr(zipfile.ZipInfo(path), files[path])
    return buffer.getvalue()


def _node(kind: str, attributes: Mapping[str, Any], **more: Any) -> bytes:  # noqa: ANN401
    return json.dumps({"zarr_format": 3, "node_type": kind, "attributes": attributes, **more}).encode()


GROUP = _node("group", {})
"""Metadata of a group that only holds elements."""


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def _write(files: dict[str, bytes], path: str, value: Any) -> None:  # noqa: ANN401
    """Write a value: most without zarr-python, which takes milliseconds for each group and array, in the same encoding."""
    # A column of a table may have a '/' in its name.
    files |= {f"{group}/{METADATA}": GROUP for group in _above(path) if f"{group}/{METADATA}" not in files}
    grouped = members_of(value)
    if grouped is not None:
        members, attributes = grouped
        files[f"{path}/{METADATA}"] = _node("group", attributes)
        for name, inner in members.items():
            _write(files, f"{path}/{name}", inner)
        return
    with refused(path):
        found = _encoded(value)
    if found is None:
        import zarr

        stored: dict[str, Any] = {}
        root = zarr.open_group(store=zarr.storage.MemoryStore(stored), mode="w", zarr_format=3)
        # Every byte that is declared is there, by which `unpack` knows others.
        with zarr.config.set({"array.write_empty_chunks": True}):
            write_member(root, ("element", path), value, {"compressors": None})
        for name, data in stored.items():
            if "/" in name:
                files[f"{path}{name.removeprefix('element')}"] = data.to_bytes()
        return
    array, encoding, version = found
    is_text = array.dtype == object
    codec: dict[str, Any] = {"name": "vlen-utf8" if is_text else "bytes"}
    if array.dtype.itemsize > 1 and not is_text:
        codec["configuration"] = {"endian": "little"}
    files[f"{path}/{METADATA}"] = _node(
        "array",
        {"encoding-type": encoding, "encoding-version": version},
        shape=array.shape,
        data_type="string" if is_text else array.dtype.name,
        chunk_grid={"name": "regular", "configuration": {"chunk_shape": [max(1, n) for n in array.shape]}},
        chunk_key_encoding={"name": "default", "configuration": {"separator": "/"}},
        fill_value="" if is_text else array.dtype.type(0).item(),
        codecs=[codec],
    )
    if array.size:
        chunk = "/".join([path, "c", *("0" for _ in array.shape)])
        with refused(path):
            if is_text:
                from numcodecs import VLenUTF8

                files[chunk] = bytes(VLenUTF8().encode(array))
            else:
                files[chunk] = array.astype(array.dtype.newbyteorder("<")).tobytes()


def _encoded(value: Any) -> tuple[NDArray[Any], str, str] | None:  # noqa: ANN401
    """Return the array of a number, a text, None, or an array of numbers or text, with its encoding; None for anything else."""
    if value is None:
        return np.array(False), "null", "0.1.0"  # noqa: FBT003
    if isinstance(value, str):
        # `str` of it, as a scalar of NumPy is a text too, but no `str` to the codec.
        return np.array(str(value), object), "string", "0.2.0"
    if isinstance(value, bool | int | float | np.generic) and _is_plain(np.array(value)):
        return np.array(value), "numeric-scalar", "0.2.0"
    if type(value) is not np.ndarray or not value.ndim or value.nbytes > MAX_PLAIN_BYTES:
        return None
    if value.dtype.kind == "U" or (value.dtype == object and all(type(text) is str for text in value.flat)):
        return value.astype(object), "string-array", "0.2.0"
    return (value, "array", "0.2.0") if _is_plain(value) else None


def _is_plain(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "biuf" and array.dtype.itemsize <= np.dtype(np.float64).itemsize


def unpack(data: bytes) -> dict[str, Callable[[], Any]]:
    """Open the elements that `pack` packed: path -> function that reads the element, sorted.

    Bytes that are not what was written raise `CorruptError`, here or from a function; a function also raises it for an
    element that declares more than the file holds, and `MissingExtraError` for one that takes a package that is not
    installed.
    """
    import zarr

    with _unharmed():
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
            if compressed or sum(member.file_size for member in members) > len(data):
                raise LimitError("its members are compressed, or share their bytes")
            buffer = zarr.core.buffer.default_buffer_prototype().buffer
            files = {member.filename: buffer.from_bytes(archive.read(member)) for member in members}
        container = open_object(zarr.open_group(store=zarr.storage.MemoryStore(files, read_only=True), mode="r"))

        def keys(path: str) -> Iterator[str]:
            for name in container.names(path):
                at = f"{path}/{name}".lstrip("/")
                node = container.get(at)
                if is_array(node) or attribute(node, "encoding-type"):
                    yield at
                else:
                    yield from keys(at)

        def read(key: str) -> Any:  # noqa: ANN401
            with _unharmed():
                # A text of length 0 takes 4 bytes in the file and 16 in memory.
                if declared_bytes(container, key) > 4 * len(data):
                    raise LimitError(f"{key} declares more than the file holds")
                return _with_objects(read_element(container, key))

        return {key: partial(read, key) for key in keys("")}


def _with_objects(value: Any) -> Any:  # noqa: ANN401
    """Return a value with arrays of text as objects, as HDF5 and users have them; from Zarr they have NumPy's `StringDType`."""
    if isinstance(value, dict):
        return {name: _with_objects(inner) for name, inner in value.items()}
    return value.astype(object) if isinstance(value, np.ndarray) and value.dtype.kind == "T" else value


@contextmanager
def _unharmed() -> Iterator[None]:
    import zarr

    try:
        yield
    except (SourceError, LimitError, MemoryError, zarr.errors.BaseZarrError, *READ_ERRORS) as error:
        raise CorruptError(
            f"The stored elements of the dataset cannot be read ({error}); put the file back from a copy."
        ) from error
