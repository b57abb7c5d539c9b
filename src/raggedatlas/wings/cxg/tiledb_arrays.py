"""Access to TileDB arrays: the library, its context, checks of untrusted files, and array metadata."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from struct import Struct
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError, MissingExtraError, SourceError, StoreError
from raggedatlas.store.location import EMULATED_ACCOUNT, TRUE_WORDS, AnyPath, Location
from raggedatlas.store.ranges import RemoteFile
from raggedatlas.store.runtime import DECODE_THREADS

BUFFER_BYTES = 1 << 20
"""Initial read buffer per attribute; point reads are several times slower with the library's default of 10 MB."""


def import_tiledb() -> Any:  # noqa: ANN401  (a module)
    """Import TileDB; raise `MissingExtraError` if it is not installed.

    Examples
    --------
    >>> import_tiledb().__name__
    'tiledb'
    """
    try:
        import tiledb
    except ImportError as error:
        raise MissingExtraError(
            "Reading and writing CXG needs the package tiledb; install it with: pip install 'raggedatlas[cxg]'."
        ) from error
    return tiledb


def context(path: AnyPath | None = None) -> Any:  # noqa: ANN401  (a tiledb.Ctx)
    """Return the TileDB context of this process for an array, with few threads and small buffers.

    A forked child has its own process id and so its own context; the threads of its parent's context would never
    respond.
    """
    return _context(os.getpid(), tuple(_vfs_settings(path).items()) if isinstance(path, Location) else ())


def _vfs_settings(path: Location) -> dict[str, str]:
    """Return the settings of TileDB's own access to an object store that correspond to storage options."""
    given = path.storage_options
    settings = {_VFS_SETTINGS[name]: value for name, value in given.items() if name in _VFS_SETTINGS}
    if "google_service_account" in given:
        # obstore has read the file before, and refused one that is missing or no JSON.
        account = Path(given["google_service_account"]).read_text("utf-8")
        told = json.loads(account)
        # Keys of object_store, by which the file of an emulator is known; TileDB sends no credentials where an endpoint is set.
        if "gcs_base_url" in told:
            settings["vfs.gcs.endpoint"] = told["gcs_base_url"]
        if not told.get("disable_oauth"):
            settings["vfs.gcs.service_account_key"] = account
    if given.get("azure_storage_use_emulator", "").lower() in TRUE_WORDS:
        address = os.environ.get("AZURITE_BLOB_STORAGE_URL", "http://127.0.0.1:10000").rstrip("/")
        name = given.get("azure_storage_account_name", EMULATED_ACCOUNT)
        settings |= {
            "vfs.azure.blob_endpoint": f"{address}/{name}",
            "vfs.azure.storage_account_name": name,
            "vfs.azure.storage_account_key": given.get("azure_storage_account_key", _EMULATED_KEY),
        }
    if "aws_endpoint" in given:
        scheme, _, host = given["aws_endpoint"].rpartition("://")
        settings |= {
            "vfs.s3.endpoint_override": host.rstrip("/"),
            "vfs.s3.scheme": scheme or "https",
            "vfs.s3.use_virtual_addressing": "false",
        }
    # The default of five tries waits for minutes where nothing answers.
    return {"vfs.s3.connect_max_tries": "3", "vfs.s3.connect_timeout_ms": "10000", **settings}


_EMULATED_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The published key of the account that every emulator of Azure's store has."""

_VFS_SETTINGS = {
    "aws_access_key_id": "vfs.s3.aws_access_key_id",
    "aws_secret_access_key": "vfs.s3.aws_secret_access_key",
    "aws_session_token": "vfs.s3.aws_session_token",
    "aws_region": "vfs.s3.region",
    "aws_skip_signature": "vfs.s3.no_sign_request",
    "azure_storage_account_name": "vfs.azure.storage_account_name",
    "azure_storage_account_key": "vfs.azure.storage_account_key",
}
"""Storage option -> TileDB's name of it."""


@cache
def _context(pid: int, settings: tuple[tuple[str, str], ...]) -> Any:  # noqa: ANN401
    del pid
    tiledb = import_tiledb()
    return tiledb.Ctx(
        {
            "sm.compute_concurrency_level": str(DECODE_THREADS),
            "sm.io_concurrency_level": str(DECODE_THREADS),
            "py.init_buffer_bytes": str(BUFFER_BYTES),
            # Its Ctrl-C handler calls the previous handler, and crashes if there is none, as in jobs started by a script.
            "sm.enable_signal_handlers": "false",
            **dict(settings),
        }
    )


def low_level_module() -> Any:  # noqa: ANN401  (a module)
    """Return the library's low-level module if it supports writes in global order, else None.

    This uses a private name, `Query._submit`, which a release may remove.
    """
    engine = getattr(import_tiledb(), "libtiledb", None)
    names = ("Query", "QueryType", "LayoutType")
    supported = all(hasattr(engine, name) for name in names) and hasattr(getattr(engine, "Query", None), "_submit")
    return engine if supported else None


def absolute_uri(path: AnyPath) -> str:
    """Return the absolute URI of a path: TileDB resolves relative paths against the working directory of its first use."""
    uri = str(path.absolute())
    return f"azure://{uri.removeprefix('az://')}" if uri.startswith("az://") else uri


@contextmanager
def open_array(path: AnyPath, mode: str = "r") -> Iterator[Any]:
    """Open an array for reading (``"r"``) or writing (``"w"``), and close it at the end.

    TileDB's errors, also those within the ``with`` block, become `SourceError` (C00) for reads and `StoreError` for
    writes.
    """
    tiledb = import_tiledb()
    with tiledb_errors(path, writes=mode == "w"):
        # Only arrays that are read are untrusted; those open for writing were made by this process.
        if mode == "r":
            check_file_sizes(path)
        opened = tiledb.open(absolute_uri(path), mode, ctx=context(path))
        try:
            yield opened
        finally:
            opened.close()


def attribute_names(schema: Any) -> list[str]:  # noqa: ANN401  (a tiledb.ArraySchema)
    """Return the names of the attributes of an array, with ``""`` for the anonymous one.

    ``schema.has_attr("")`` is False for arrays that TileDB 1 wrote, where the anonymous attribute is stored under
    another name.
    """
    return [schema.attr(i).name for i in range(schema.nattr)]


def query_attributes(array: Any, *names: str, **options: Any) -> Any:  # noqa: ANN401  (a tiledb.Array, a tiledb query)
    """Return a query of attributes of an array that is open for reading; `options` are arguments of ``Array.query``.

    If all attributes are read, none is named, since TileDB does not find the anonymous attribute of arrays of TileDB 1
    by name.
    """
    every = set(names) == set(attribute_names(array.schema))
    return array.query(attrs=None if every else list(names), **options)


def values_of(read: Any, name: str = "") -> NDArray[Any]:  # noqa: ANN401  (an array, or arrays by attribute)
    """Return the values of one attribute of what a query read, which TileDB returns bare if it is the only one and anonymous."""
    return np.asarray(read[name] if isinstance(read, dict) else read)


@contextmanager
def tiledb_errors(path: AnyPath, *, writes: bool = False) -> Iterator[None]:
    """Translate TileDB errors: damage for reads, failure for writes."""
    tiledb = import_tiledb()
    try:
        yield
    # First, since `StoreError` is an `OSError` and would be wrapped again.
    except AtlasError:
        raise
    except (tiledb.TileDBError, OSError, UnicodeError) as error:
        text = " ".join(str(error).split())
        if writes:
            raise StoreError(
                f"C01: {path} cannot be written ({text:.300}), so no TileDB group can be created; check the folder, its permissions and free space."
            ) from error
        if isinstance(path, Location) and _STORE_FAILURE.search(text):
            raise StoreError(
                f"{path} cannot be read by TileDB ({text:.300}); check the credentials, the endpoint and the network."
            ) from error
        raise SourceError(
            f"C00: {path} cannot be opened or decoded ({text:.300}); it is damaged or incomplete. Fetch or write the CXG again."
        ) from error


_STORE_FAILURE = re.compile(r"Error while \w+|HTTP|curl|AWS|Exception:|credential", re.IGNORECASE)
"""Words of TileDB's messages about an object store that does not answer or refuses."""

TEXT_SUFFIX = "_var.tdb"
"""Suffix of the file with the text of a field; the file with its offsets has the same name without it."""

MAX_CHUNK_BYTES = 64 << 20
"""Maximum size of a decoded chunk in bytes; larger sizes mean damage, since the library writes 64 KiB, or one cell."""

_FRAGMENTS = "__fragments"
# Version, stored and decoded size, type, size of a cell, encryption, size of the filters, which follow it.
_HEADER = Struct("<IQQBQBI")
# Chunks of a tile; decoded, stored and described size of a chunk; numbers of parts; decoded and stored size
# of a part.
_TILE, _CHUNK, _PARTS, _PART = Struct("<Q"), Struct("<III"), Struct("<II"), Struct("<II")

_CHECKSUM_BYTES = 24
"""Size of a length and an MD5 checksum."""


class _CorruptFileError(Exception):
    """A file is damaged; the message is a short reason."""


def check_file_sizes(path: AnyPath) -> None:
    """Raise C00, with the name of the file, for files of an array or group that TileDB should not open.

    TileDB would block on pipes and devices, and allocate the sizes declared in schemas and metadata even beyond the
    file size.
    """
    special = None if isinstance(path, Location) else _find_special_file(path)
    if special is not None:
        raise _damage_error(path, special, "is not a regular file but a pipe, a device or a broken link")
    folders = [path / name for name in ("__schema", "__group", "__meta") if (path / name).is_dir()]
    inner: list[AnyPath] = sorted((file for folder in folders for file in folder.iterdir()), key=str)
    for file in (path / "__array_schema.tdb", *inner):
        if not file.is_file():
            continue
        with file.open("rb") as opened:
            head, size = opened.read(_HEADER.size), file.stat().st_size
        if len(head) == _HEADER.size:
            _, stored, _, _, _, _, filters = _HEADER.unpack(head)
            if _HEADER.size + filters + stored > size:
                raise _damage_error(path, file, f"declares {filters + stored:,} bytes, but has {size - _HEADER.size:,}")


def check_text_offsets(path: AnyPath, schema: Any, fields: tuple[str, ...] = ()) -> None:  # noqa: ANN401  (a tiledb.ArraySchema)
    """Raise C00 if offsets of text are out of bounds or decreasing: TileDB would read invalid memory.

    Offsets are only checked if compressed with zstd, with or without checksums. `fields` are file names without suffix,
    see `attribute_files`; all if empty.
    """
    packed = [type(schema.offsets_filters[i]).__name__ for i in range(len(schema.offsets_filters))]
    if packed[:1] not in ([], ["ZstdFilter"]) or packed[1:] not in ([], ["ChecksumMD5Filter"]):
        return
    every: list[AnyPath] = [*path.glob(f"**/*{TEXT_SUFFIX}")]
    for texts in sorted(every, key=str):
        field = texts.name.removesuffix(TEXT_SUFFIX)
        bounds = texts.with_name(f"{field}.tdb")
        # Before 2020 files were named after attributes, whose name may itself end in the suffix.
        of_numbers = schema.has_attr(field) and not schema.attr(field).isvar and bounds.parent.parent.name != _FRAGMENTS
        if (not fields or field in fields) and bounds.is_file() and not of_numbers:
            try:
                _check_offsets(bounds, texts, checked=len(packed) > 1)
            except _CorruptFileError as error:
                raise _damage_error(path, bounds, str(error)) from error


def attribute_files(schema: Any, attribute: str) -> tuple[str, ...]:  # noqa: ANN401
    """Return the file names of an attribute without suffix, in current releases and those before 2020."""
    number = next(i for i in range(schema.nattr) if schema.attr(i).name == attribute)
    return f"a{number}", attribute


def _find_special_file(path: Path) -> Path | None:
    """Return the first entry below a folder that is neither a file nor a folder; links are followed."""
    folders, seen = [path], set()
    while folders:
        folder = folders.pop()
        # A link to a folder above would otherwise be followed without end.
        real = os.path.realpath(folder)
        if real in seen:
            continue
        seen.add(real)
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders.append(Path(entry.path))
                elif not entry.is_file():
                    return Path(entry.path)
    return None


def _damage_error(path: AnyPath, file: AnyPath, what: str) -> SourceError:
    return SourceError(
        f"C00: {path} is damaged: {str(file).removeprefix(f'{path}/')} {what}. Fetch or write the CXG again."
    )  # fmt: skip


def _check_offsets(bounds: AnyPath, texts: AnyPath, *, checked: bool) -> None:
    """Compare the offsets of each tile with the length of its text; `checked` states whether chunks have checksums."""
    with bounds.open("rb") as of_bounds, texts.open("rb") as of_texts:
        tiles = _tiles(of_texts, bounds=False)
        for begin in _tiles(of_bounds, bounds=True, checked=checked):
            length = next(tiles, None)
            if length is None:
                raise _CorruptFileError("has more tiles than its text file")
            offsets = begin.view(np.uint64)
            if not len(offsets):
                continue
            # In the old fragment layout the first offset of a tile is not necessarily 0.
            first = np.uint64(0) if bounds.parent.parent.name == _FRAGMENTS else offsets[0]
            # Compared, not subtracted: differences of uint64 wrap. The last offset equals the length if the last text
            # is empty.
            if (offsets[1:] < offsets[:-1]).any() or offsets[0] != first or offsets[-1] - first > length[0]:
                raise _CorruptFileError("has offsets that decrease or exceed its text")


def _tiles(file: IO[bytes] | RemoteFile, *, bounds: bool, checked: bool = False) -> Iterator[NDArray[Any]]:
    """Iterate over the tiles of a file: decoded bytes if `bounds`, else the decoded size."""
    end = file.seek(0, 2)
    file.seek(0)
    while file.tell() < end:
        (n,) = _read_struct(file, _TILE, end)
        # `n` is untrusted; no file has more chunks than bytes, and `_read_struct` stops at the end.
        chunks = [_chunk(file, end, decoded=bounds, checked=checked) for _ in range(min(n, end))]
        if bounds:
            values = np.concatenate([np.empty(0, np.uint8), *chunks])
            if len(values) % 8:
                raise _CorruptFileError("has a tile that ends within an offset")
            yield values
        else:
            yield np.array([sum(int(chunk[0]) for chunk in chunks)], np.uint64)


def _read_struct(file: IO[bytes] | RemoteFile, form: Struct, end: int) -> tuple[int, ...]:
    if file.tell() + form.size > end:
        raise _CorruptFileError("is truncated")
    return form.unpack(file.read(form.size))


def _chunk(file: IO[bytes] | RemoteFile, end: int, *, decoded: bool, checked: bool) -> NDArray[Any]:
    """Read the next chunk: its content, or its decoded size."""
    length, stored, described = _read_struct(file, _CHUNK, end)
    if file.tell() + described + stored > end or (length > MAX_CHUNK_BYTES and decoded):
        raise _CorruptFileError("declares more bytes than it has")
    if not decoded:
        file.seek(described + stored, 1)
        return np.array([length], np.uint64)
    parts = _parts(file.read(described), stored, checked=checked) if described else []
    if (sum(part[0] for part in parts) if described else stored) != length:
        raise _CorruptFileError("has a chunk whose length differs from its header")
    values = file.read(stored)
    if not described:
        return np.frombuffer(values, np.uint8)
    from numcodecs import zstd

    out_parts, offset = [np.empty(0, np.uint8)], 0
    for part_length, size in parts:
        try:
            out = bytes(zstd.decompress(values[offset : offset + size]))
        except (RuntimeError, ValueError, MemoryError) as error:
            raise _CorruptFileError(f"cannot be decoded ({error})") from error
        if len(out) != part_length:
            raise _CorruptFileError("has a part whose length differs from its header")
        out_parts.append(np.frombuffer(out, np.uint8))
        offset += size
    return np.concatenate(out_parts)


def _parts(described: bytes, stored: int, *, checked: bool) -> list[tuple[int, int]]:
    """Return decoded and stored lengths of the parts of a compressed chunk; checksums, verified by TileDB, come first."""
    if checked:
        n_sums = sum(_PARTS.unpack_from(described)) if len(described) >= _PARTS.size else 0
        described = described[_PARTS.size + n_sums * _CHECKSUM_BYTES :]
    # The first number counts headers of earlier filters that were compressed too; here zstd is the first.
    n_described, n = _PARTS.unpack_from(described) if len(described) >= _PARTS.size else (1, 0)
    if n_described or len(described) != _PARTS.size + n * _PART.size:
        raise _CorruptFileError("has a chunk with an invalid header")
    parts = [_PART.unpack_from(described, _PARTS.size + i * _PART.size) for i in range(n)]
    if sum(part[1] for part in parts) != stored:
        raise _CorruptFileError("has a chunk whose parts do not add up to its size")
    return [(int(length), int(size)) for length, size in parts]


MAX_BOXES = 1 << 26
"""Maximum number of boxes into which fragments cut an array; beyond it only outer bounds are compared."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension of an array."""

    name: str  # may be ``""``
    dtype: np.dtype[Any]
    low: Any  # inclusive, like `high`; both are None unless numeric
    high: Any
    tile: Any  # extent; None unless numeric

    @property
    def size(self) -> int:
        """Number of coordinates; 0 for text, times and floats, which are not counted."""
        return int(self.high) - int(self.low) + 1 if self.dtype.kind in "iu" else 0


@dataclass(frozen=True, slots=True)
class ArrayAttribute:
    """An attribute of an array."""

    name: str  # ``""`` for the anonymous one
    dtype: np.dtype[Any]  # of one value
    variable: bool  # whether values have variable length, like text
    nullable: bool
    filters: str  # in the order of writing

    @property
    def is_text(self) -> bool:
        """Whether it holds text."""
        return self.dtype.kind in "US"

    @property
    def is_number(self) -> bool:
        """Whether it holds one real number per cell."""
        return self.dtype.kind in "fiu" and not self.variable


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """Schema and metadata of an array."""

    sparse: bool
    axes: tuple[Dimension, ...]
    attributes: tuple[ArrayAttribute, ...]
    capacity: int  # cells per tile of a sparse array
    written: tuple[tuple[Any, Any], ...] | None  # first and last written coordinate of each dimension; None if empty
    is_fully_written: bool  # whether every cell of a dense array is written
    metadata: dict[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return tuple(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the attributes, in order."""
        return tuple(attribute.name for attribute in self.attributes)

    @property
    def tile(self) -> tuple[int, ...]:
        """Tile extents."""
        return tuple(int(axis.tile or 0) if axis.dtype.kind in "iu" else 0 for axis in self.axes)

    @property
    def is_readable(self) -> bool:
        """Whether it is dense, starts at 0, and is fully written."""
        return not self.sparse and self.is_fully_written and all(axis.low == 0 for axis in self.axes)

    @property
    def tile_bytes(self) -> int:
        """Decoded size of the largest attribute of a tile, without text."""
        cells = self.capacity if self.sparse else prod(self.tile)
        return cells * max((a.dtype.itemsize for a in self.attributes if not a.variable), default=0)

    def attribute(self, name: str) -> ArrayAttribute | None:
        """Return an attribute by name, or None."""
        return next((one for one in self.attributes if one.name == name), None)


def read_array_info(path: AnyPath) -> ArrayInfo:
    """Read schema and metadata of an array; raise C00 if it cannot be opened."""
    with open_array(path) as array:
        schema = array.schema
        domain = schema.domain
        axes = []
        for dim in (domain.dim(i) for i in range(domain.ndim)):
            dtype = np.dtype(dim.dtype)
            low, high, tile = (*dim.domain, dim.tile) if dtype.kind in "iuf" else (None, None, None)
            axes.append(Dimension(dim.name, dtype, _to_python(low), _to_python(high), _to_python(tile)))
        attributes = []
        for attr in (schema.attr(i) for i in range(schema.nattr)):
            filters = " + ".join(_filter_text(attr.filters[i]) for i in range(len(attr.filters)))
            dtype = np.dtype(attr.dtype)
            attributes.append(ArrayAttribute(attr.name, dtype, bool(attr.isvar), bool(attr.isnullable), filters))
        written = array.nonempty_domain()
        metadata = dict(array.meta.items())
        fully_written = not schema.sparse and is_fully_written(path, schema)
    spans = None if written is None else tuple((_to_python(a), _to_python(b)) for a, b in written)
    return ArrayInfo(
        bool(schema.sparse), tuple(axes), tuple(attributes), int(schema.capacity), spans, fully_written, metadata
    )


def is_fully_written(path: AnyPath, schema: Any) -> bool:  # noqa: ANN401  (a tiledb.ArraySchema)
    """Return whether the fragments of a dense array cover it; TileDB reads fill values where a fragment is missing."""
    with tiledb_errors(path):
        boxes = import_tiledb().array_fragments(absolute_uri(path), ctx=context(path)).nonempty_domain
    axes = [schema.domain.dim(i) for i in range(schema.domain.ndim)]
    if any(np.dtype(axis.dtype).kind not in "iu" for axis in axes):  # of times, which no array of the format has
        return bool(boxes)
    ends = [axis.domain for axis in axes]
    # The edges of all fragments divide the array into boxes, each of which is either fully written or not at all.
    cuts = []
    for axis, (low, high) in enumerate(ends):
        edges = {
            int(low),
            int(high) + 1,
            *(int(box[axis][0]) for box in boxes),
            *(int(box[axis][1]) + 1 for box in boxes),
        }
        cuts.append(np.array(sorted(edges)))
    shape = [len(edges) - 1 for edges in cuts]
    if prod(shape) > MAX_BOXES:
        return all(
            (int(low), int(high)) == (min(int(box[axis][0]) for box in boxes), max(int(box[axis][1]) for box in boxes))
            for axis, (low, high) in enumerate(ends)
        )
    covered = np.zeros(shape, bool)
    for box in boxes:
        covered[
            tuple(
                # Both bounds are among the edges, so `searchsorted` finds them exactly.
                slice(*np.searchsorted(edges, (int(low), int(high) + 1)))
                for edges, (low, high) in zip(cuts, box, strict=True)
            )
        ] = True
    return bool(covered.all())


def written_cells(path: AnyPath) -> int:
    """Return the number of written cells of an array, from the metadata of its fragments."""
    with tiledb_errors(path):
        fragments = import_tiledb().array_fragments(absolute_uri(path), ctx=context(path))
        return int(sum(fragments.cell_num)) if len(fragments) else 0


def stored_bytes(path: AnyPath) -> int:
    """Return the total size of all files below a folder."""
    return sum(at.stat().st_size for at in path.rglob("*") if at.is_file())


def _filter_text(one: Any) -> str:  # noqa: ANN401  (a tiledb.Filter)
    name = type(one).__name__.removesuffix("Filter").lower()
    level = getattr(one, "level", None)
    return name if level is None else f"{name} {level}"


def _to_python(value: Any) -> Any:  # noqa: ANN401
    return value.item() if isinstance(value, np.generic) else value
