"""Uniform view of the tree in an HDF5 file or Zarr folder: nodes with attributes, shapes, types, and blocks of rows."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError, StoreError
from raggedatlas.formats.containers import (
    READ_ERRORS,
    Places,
    is_array,
    is_tree,
    object_address,
    open_hdf5,
    open_member,
    open_zarr,
    readable,
    zarr_store_of,
)
from raggedatlas.formats.hdf5_chunks import Hdf5ChunkReader, open_chunk_reader
from raggedatlas.store.copies import local_copy
from raggedatlas.store.location import AnyPath, Location
from raggedatlas.store.runtime import warnings_as

Kind = Literal["bool", "integer", "real", "complex", "text", "bytes", "record", "other", "nothing"]

BLOCK_BYTES = 8 << 20
"""Bytes read at once, or one row of chunks if that is more."""

TEXT_BYTES = 32
"""Assumed size of a text of unknown length."""

ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")
"""Names of the metadata of a Zarr node."""

_KINDS: dict[str, Kind] = {"b": "bool", "i": "integer", "u": "integer", "f": "real", "c": "complex"}


@dataclass(frozen=True, slots=True)
class Text:
    """How text is stored."""

    variable: bool  # whether each text has a length of its own
    utf8: bool  # whether it is declared to be unicode


class Node:
    """One group or array, opened or not.

    `path` is the path in the file `uri`, ``""`` for the root. `stored` is the object of h5py or zarr; None if it cannot
    be opened. `fault` tells why its members or values cannot be read, ``""`` if they can. `parent` is its group.
    """

    def __init__(self, uri: str, path: str, stored: Any, fault: str = "", parent: "Node | None" = None) -> None:  # noqa: ANN401
        self.uri, self.path, self.stored, self.fault, self.parent = uri, path, stored, fault, parent
        self.places: Places = {} if parent is None else parent.places

    def __str__(self) -> str:
        """Return the path."""
        return self.path

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]

    @property
    def is_array(self) -> bool:
        """Whether it is an array rather than a group."""
        return self.stored is not None and is_array(self.stored)

    @property
    def in_hdf5(self) -> bool:
        """Whether it is in HDF5 rather than Zarr."""
        return hasattr(self.stored, "id")

    @cached_property
    def attrs(self) -> Mapping[str, Any]:
        """Its attributes, as the library returns them; unreadable ones are omitted."""
        if self.stored is None:
            return {}
        attributes = {}
        with readable(self.uri, f"the attributes of {self.path or 'the root'}"):
            names = list(self.stored.attrs)
        for name in names:
            try:
                attributes[str(name)] = self.stored.attrs[name]
            except READ_ERRORS:
                continue
        return attributes

    @cached_property
    def children(self) -> Mapping[str, "Node"]:
        """Its members by name, sorted; none for an array."""
        if self.stored is None or self.is_array:
            return {}
        folder = Path(self.uri) / self.path
        if self.in_hdf5 or not folder.is_dir():
            with readable(self.uri, self.path or "the root"):
                names = [str(name) for name in self.stored]
        else:
            # The folder is listed, because one member with broken metadata would end zarr-python's own listing.
            names = [at.name for at in folder.iterdir() if any((at / name).exists() for name in ZARR_FILES)]
        return {name: self._opened(name) for name in sorted(names)}

    def _opened(self, name: str) -> "Node":
        """Open a member; one whose values cannot be read is opened for its metadata."""
        path = f"{self.path}/{name}".lstrip("/")
        fault, stored = "", None
        try:
            with readable(self.uri, path):
                stored = open_member(self.uri, self.stored, name, path, self.places)
        except AtlasError as error:
            fault = str(error).removeprefix(f"{self.uri}: ")
            if self.in_hdf5:
                import h5py

                # Never one in another file, nor one that has another path.
                try:
                    hard = isinstance(self.stored.get(name, getlink=True), h5py.HardLink)
                    found = self.stored[name] if hard else None
                except READ_ERRORS:
                    found = None
                stored = found if found is not None and self.places.get(object_address(found)) == path else None
        if stored is None:
            return Node(self.uri, path, None, fault or "it cannot be opened.", self)
        node = Node(self.uri, path, stored, fault, self)
        head = node._head_fault()
        return Node(self.uri, path, None, head, self) if head else node

    def _head_fault(self) -> str:
        """Return why its metadata cannot be read, ``""`` if they can; later accesses then cannot fail."""
        if self.in_hdf5:
            import h5py

            if isinstance(self.stored, h5py.Datatype):
                return "it is a named datatype; expected an array or a group."
        try:
            with readable(self.uri, self.path):
                _ = self.attrs, self.shape, self.chunks, self.kind
                if not self.is_array and self.in_hdf5:
                    _ = len(self.stored)
        except AtlasError as error:
            return str(error).removeprefix(f"{self.uri}: ")
        return ""

    def child(self, name: str) -> "Node | None":
        """Return a member by name or path, or None."""
        at: Node | None = self
        for part in name.split("/"):
            at = at.children.get(part) if at is not None else None
        return at

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Its shape; None for a group and for HDF5's empty dataspace."""
        return None if not self.is_array or self.stored.shape is None else tuple(int(n) for n in self.stored.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of its values."""
        dtype: np.dtype[Any] = self.stored.dtype
        return dtype

    @cached_property
    def kind(self) -> Kind:
        """Kind of its values."""
        if not self.is_array or self.stored.shape is None:
            return "nothing"
        if self.text is not None:
            return "text" if self.text.variable or self.dtype.kind == "U" else "bytes"
        if self.dtype.names is not None:
            return "record"
        return _KINDS.get(self.dtype.kind, "other")

    @cached_property
    def text(self) -> Text | None:
        """How its text is stored; None if it is not text."""
        if not self.is_array or self.stored.shape is None:
            return None
        if self.in_hdf5:
            import h5py

            info = h5py.check_string_dtype(self.dtype)
            return None if info is None else Text(info.length is None, info.encoding == "utf-8")
        letter, metadata = self.dtype.kind, self.stored.metadata
        if letter == "O":
            # Zarr format 2 names the encoding of text in the filters, format 3 in the data type.
            named = [*(getattr(metadata, "filters", None) or ()), getattr(metadata, "data_type", "")]
            said = repr(named).lower()
            return Text(variable=True, utf8="vlenutf8" in said or "string" in said)
        return Text(variable=letter == "T", utf8=letter != "S") if letter in "UST" else None

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """Shape of its shards if it has any, else of its chunks."""
        chunks = getattr(self.stored, "shards", None) or getattr(self.stored, "chunks", None)
        return tuple(chunks) if chunks else None

    def whole(self) -> Any:  # noqa: ANN401  (an array, or the one value of an array without axes)
        """Read all values."""
        with readable(self.uri, self.path or "the root"), warnings_as("ignore"):
            return self.stored[()] if self.shape == () else self.stored[...]

    def part(self, start: int, stop: int) -> NDArray[Any]:
        """Read rows ``[start, stop)``."""
        with readable(self.uri, self.path):
            if self._direct is not None:
                return self._direct.read(start, stop)
            return np.asarray(self.stored[start:stop])

    @cached_property
    def _direct(self) -> Hdf5ChunkReader | None:
        """A reader that does not use HDF5's library, if one supports the array."""
        return None if self.fault else open_chunk_reader(self.stored)

    def step(self) -> int:
        """Return the number of rows read at once: complete rows of chunks, about `BLOCK_BYTES`."""
        shape = self.shape or (1,)
        width = TEXT_BYTES if self.text is not None and self.text.variable else max(1, self.dtype.itemsize)
        for size in shape[1:]:
            width *= max(1, size)
        rows = max(1, BLOCK_BYTES // width)
        unit = self.chunks[0] if self.chunks and self.chunks[0] else 1
        return max(unit, rows - rows % unit)

    def blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Read all values from the first row to the last: the first row of each block, and its rows; an array without axes is one row."""
        if not self.shape:
            if self.shape is not None:
                yield 0, np.asarray(self.whole())[None]
            return
        step = self.step()
        for start in range(0, self.shape[0], step):
            yield start, self.part(start, min(start + step, self.shape[0]))


@contextmanager
def open_tree(path: AnyPath) -> Iterator[Node]:
    """Open a file or folder as a tree of nodes: an HDF5 file, or a Zarr folder or zip file, whose root may also be an array."""
    if isinstance(path, Location) and path.suffix == ".zip":
        with local_copy(path) as local, open_tree(local) as root:
            yield root
        return
    if is_tree(path):
        root = _zarr_root(path)
        try:
            yield root
        finally:
            root.stored.store.close()
        return
    container = open_hdf5(path)
    try:
        yield Node(container.uri, "", container.root)
    finally:
        container.close()


def _zarr_root(path: AnyPath) -> Node:
    import zarr

    try:
        # Each node is a request of a remote store, and a web server cannot list them.
        return Node(str(path), "", open_zarr(path, consolidated=isinstance(path, Location)).root)
    except StoreError:
        raise
    except AtlasError:
        # The root may also be an array; if it is neither, the error about the group is raised.
        try:
            return Node(str(path), "", zarr.open_array(store=zarr_store_of(path), mode="r"))
        except (*READ_ERRORS, AtlasError, zarr.errors.BaseZarrError):
            pass
        raise


def disk_bytes(path: AnyPath) -> int:
    """Return the size of a file, or of all files in a folder; 0 for a folder on a web server, which cannot be listed."""
    if isinstance(path, Location):
        return int(path.stat().st_size)
    files = [path] if path.is_file() else (file for file in path.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in files)


def plain_attribute(value: Any) -> Any:  # noqa: ANN401  (any value of an attribute)
    """Return the value of an attribute as plain Python, bytes as they are."""
    if isinstance(value, np.bytes_):
        return bytes(value)
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
