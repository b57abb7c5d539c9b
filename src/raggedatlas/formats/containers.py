"""Open HDF5 files and Zarr folders for reading, with every member checked before it is returned."""

import math
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raggedatlas.errors import LimitError, MissingExtraError, NotFoundError, SourceError, StoreError
from raggedatlas.store.location import AnyPath, Location, refuse_symlinks
from raggedatlas.store.runtime import close_at_exit
from raggedatlas.store.storage_errors import failure, is_remote_error
from raggedatlas.store.untrusted import guarded_zarr_store

MAX_CHUNK = 1 << 30
"""Maximum decoded size of one chunk in bytes; a chunk is always decoded completely, however few rows are requested."""

MAX_WHOLE = 16 << 30
"""Maximum size in bytes of an array that is read completely: an index, a column, row pointers."""

MAX_ELEMENT_BYTES = 1 << 30
"""Maximum size in bytes of all elements of a file that are read completely and are no matrices, such as those of `uns`."""

MAX_RATIO = 100_000
"""Maximum ratio of declared to stored bytes, for arrays over `BOMB_FROM` bytes."""

BOMB_FROM = 1 << 30
"""Arrays smaller than this are never treated as decompression bombs."""

MAX_DEPTH = 64
"""Maximum depth of groups within groups."""

READ_ERRORS = (
    OSError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    IndexError,
    OverflowError,
    NotImplementedError,
    zipfile.BadZipFile,
)
"""Exceptions that libraries raise on damaged files."""


MEMBERS: dict[str, tuple[str, ...]] = {
    "X": ("obs", "var"), "layers": ("obs", "var"), "obs": ("obs",), "obsm": ("obs",), "obsp": ("obs", "obs"), "raw": (),
    "uns": (), "var": ("var",), "varm": ("var",), "varp": ("var", "var"),
}  # fmt: skip
"""Member of an AnnData -> the tables whose rows its axes begin with."""

GROUPS = ("layers", "obsm", "obsp", "uns", "varm", "varp")
"""Those of them that hold elements by name."""


def axes_of(key: str) -> tuple[str, ...]:
    """Return the tables whose rows the axes of an element begin with; ``""`` for one that is no table of the AnnData.

    Examples
    --------
    >>> axes_of("layers/counts"), axes_of("raw/X"), axes_of("raw/var")
    (('obs', 'var'), ('obs', ''), ())
    """
    return ("obs", "") if key == "raw/X" else MEMBERS.get(key.split("/", maxsplit=1)[0], ())


FETCH_AGAIN = "; fetch or write the file again if it was damaged or cut short."
"""Advice on what a library cannot read, where there is no better one."""

Places = dict[tuple[int, int], str]
"""Path by which each object of an HDF5 file was reached first, by its address."""


@dataclass(frozen=True, slots=True)
class Container:
    """An open file or folder."""

    uri: str  # path or URI; every message starts with it
    root: Any  # of h5py or zarr
    close: Callable[[], None]
    _found: dict[str, Any] = field(default_factory=dict, repr=False)
    _places: Places = field(default_factory=dict, repr=False)
    _declared: dict[str, int] = field(default_factory=dict, repr=False)

    def get(self, path: str) -> Any:  # noqa: ANN401  (a group or an array of either library)
        """Return the group or array at a path such as ``"mod/rna/X"``, or None if it does not exist; checked as by `open_member`."""
        if path in self._found:
            return self._found[path]
        above, _, name = path.rpartition("/")
        node = self.get(above) if above else self.root
        if node is None or is_array(node):
            return None
        with readable(self.uri, path):
            node = open_member(self.uri, node, name, path, self._places)
        if node is not None and not (hasattr(node, "id") and is_array(node)):
            # Objects of zarr-python are expensive to create and cheap to keep, like groups of HDF5, each of which is on many paths.
            self._found[path] = node
        return node

    def names(self, path: str) -> tuple[str, ...]:
        """Return the sorted names of a group's members; empty if there is no such group."""
        node = self.get(path) if path else self.root
        if node is None or is_array(node):
            return ()
        with readable(self.uri, path or "the root"):
            return tuple(sorted(str(name) for name in node))

    def whole(self, path: str, n_rows: int | None = None) -> Any:  # noqa: ANN401  (a numpy array)
        """Read a complete array after checking its declared size, and its length if `n_rows` is given."""
        node = self.get(path)
        if node is None or not is_array(node):
            raise SourceError(f"{self.uri}: there is no array {path!r}; the file is not complete.")
        check_whole(self.uri, path, node, n_rows)
        with readable(self.uri, path):
            return node[...]


def check_elements(container: Container, paths: Iterable[str], limit: int) -> None:
    """Raise `LimitError` if elements that are to be read completely declare more than `limit` bytes.

    Those of earlier calls for the container count too.
    """
    for path in paths:
        container._declared[path] = declared_bytes(container, path)
    total = sum(container._declared.values())
    if total > limit:
        largest = max(container._declared, key=container._declared.__getitem__)
        raise LimitError(
            f"{container.uri}: elements outside of matrices declare {total:,} bytes, {largest} {container._declared[largest]:,} of "
            f"them; they are read whole, and the limit is {limit:,}. Leave them out of the file, or pass "
            "open_source(path, max_element_bytes=...) in place of the path."
        )


def declared_bytes(container: Container, path: str) -> int:
    """Return the declared size of an array, or of all arrays in a group."""
    node = container.get(path)
    if node is None or (is_array(node) and node.shape is None):
        return 0
    if not is_array(node):
        return sum(declared_bytes(container, f"{path}/{name}") for name in container.names(path))
    return _n_bytes(node, node.shape)


def _n_bytes(array: Any, shape: Iterable[int]) -> int:  # noqa: ANN401
    """Return the size of values of the dtype of an array."""
    # Python integers, because a product of declared sizes could overflow int64 and look small.
    return math.prod(map(int, shape)) * int(array.dtype.itemsize)


def is_array(node: Any) -> bool:  # noqa: ANN401
    """Return True for arrays and False for groups, for both h5py and zarr."""
    return hasattr(node, "dtype")


def attribute(node: Any, name: str, default: str = "") -> str:  # noqa: ANN401
    """Read an attribute as text; old writers stored bytes."""
    value = node.attrs.get(name, default)
    return value.decode() if isinstance(value, bytes) else str(value)


def decode_texts(values: Iterable[Any], what: str) -> list[str]:
    """Return values as text, bytes decoded as UTF-8; bytes that are not UTF-8 are refused, because replaced ones could make two names equal."""
    values = list(values)
    try:
        return [value.decode() if isinstance(value, bytes) else str(value) for value in values]
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{what} has the text {error.object[:80]!r}, which is not UTF-8; write the file again with its text in UTF-8."
        ) from None


@contextmanager
def readable(uri: str, path: str) -> Iterator[None]:
    """Convert exceptions that libraries raise on damaged data into a `SourceError` that names the element.

    A failure of an object store is no damage and becomes a `StoreError`.
    """
    try:
        yield
    # `SourceError` is a `ValueError`, and `StoreError` an `OSError`, which the next clause would wrap once more.
    except (SourceError, LimitError, MissingExtraError, NotFoundError, StoreError):
        raise
    except READ_ERRORS as error:
        text = str(error).strip("'\"").splitlines()
        reason = text[0] if text else type(error).__name__
        raise SourceError(f"{uri}: {path} cannot be read ({reason}){FETCH_AGAIN}") from error
    except Exception as error:
        if not is_remote_error(error):
            raise
        raise StoreError(f"{uri}: {path} cannot be read: {failure(error)}") from error


def unknown_encoding() -> type[Exception]:
    """Return the exception class that anndata raises for an element without a registered reader or writer."""
    from anndata._io.specs.registry import IORegistryError

    found: type[Exception] = IORegistryError
    return found


def open_hdf5(path: AnyPath) -> Container:
    """Open an HDF5 file for reading."""
    import h5py

    opened: Any = path
    if isinstance(path, Location):
        opened = path.open()
    elif not path.exists():
        raise NotFoundError(f"There is no file {path}; check the path.")
    elif path.is_dir():
        raise SourceError(f"{path} is a folder, where an HDF5 file was expected; give the file itself.")
    else:
        # Tried first, because every `OSError` of h5py below is reported as damage.
        try:
            path.open("rb").close()
        except PermissionError as error:
            raise SourceError(f"{path} may not be read by this user; change its permissions.") from error
    try:
        file = h5py.File(opened, "r")
    except StoreError:
        raise
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise SourceError(
            f"{path} cannot be opened as HDF5 ({reason}); it is damaged, cut short or of another kind. "
            "Fetch or write it again."
        ) from error
    if opened is not path:
        # HDF5 would call the file object after the interpreter has ended, and crash.
        close_at_exit(file)
    return Container(str(path), file, file.close)


def open_zarr(path: AnyPath, *, consolidated: bool = True) -> Container:
    """Open a Zarr folder or a ``.zarr.zip`` file for reading, format 2 or 3, after checking its metadata.

    `consolidated` uses consolidated metadata if present, as zarr-python and anndata do by default: one read then
    returns all nodes. Validators read the metadata of each node instead. The checks of `zarr_store_of` apply.
    """
    import zarr

    if isinstance(path, Path) and not path.exists():
        raise NotFoundError(f"There is no file or folder {path}; check the path.")
    try:
        with readable(str(path), "its metadata") if isinstance(path, Location) else nullcontext():
            store = zarr_store_of(path)
            try:
                # None uses consolidated metadata if there are any; True would refuse a store without them.
                use = None if consolidated else False
                group = zarr.open_group(store=store, mode="r", use_consolidated=use)
            except zarr.errors.GroupNotFoundError:
                # A local path exists, as checked above, so that it is of another kind.
                if not isinstance(path, Location):
                    raise
                raise NotFoundError(
                    f"There is no Zarr group and no geometry store at {path}: it has neither zarr.json nor .zgroup; check the address."
                ) from None
    except (SourceError, LimitError, NotFoundError, StoreError):
        raise
    except (*READ_ERRORS, zarr.errors.BaseZarrError) as error:
        raise SourceError(
            f"{path} cannot be opened as a Zarr group ({error}); give the folder, or the zip file of the folder, that holds "
            "zarr.json or .zgroup."
        ) from error
    return Container(str(path), group, store.close if is_zip(path) else lambda: None)


def is_zip(path: AnyPath) -> bool:
    """Return whether a path is a file with the suffix ``.zip``, such as a zipped Zarr folder."""
    return path.suffix == ".zip" and path.is_file()


HDF5_ENDINGS = (".h5ad", ".h5mu", ".h5", ".hdf5", ".loom")


def is_tree(path: AnyPath) -> bool:
    """Return whether a path is opened as Zarr rather than HDF5; of a remote path the ending decides, which costs no request."""
    if isinstance(path, Location):
        return path.suffix not in HDF5_ENDINGS
    return path.is_dir() or is_zip(path)


def zarr_store_of(path: AnyPath) -> Any:  # noqa: ANN401  (a store of zarr-python)
    """Return the guarded store of a Zarr folder or zip file.

    Refused are symlinks below the folder (`StoreError`), and in a zip file members that share their bytes or, if
    compressed, declare more than a chunk may hold.
    """
    import zarr

    if isinstance(path, Location):
        return guarded_zarr_store(path.zarr_store())
    if path.is_dir():
        refuse_symlinks(Location(str(path)))
        return guarded_zarr_store(zarr.storage.LocalStore(path, read_only=True))
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    offsets: dict[int, str] = {}
    for member in members:
        if offsets.setdefault(member.header_offset, member.filename) != member.filename:
            raise SourceError(
                f"{path}: {member.filename} has the bytes of {offsets[member.header_offset]}, and each member is read under one "
                "name; write the zip file again."
            )
    # `ZipStore` inflates a compressed member completely before the guard can check the chunk in it.
    large = [i for i in members if i.compress_type != zipfile.ZIP_STORED and i.file_size > MAX_CHUNK]
    if large:
        raise LimitError(
            f"{path}: {large[0].filename} is compressed and declares {large[0].file_size:,} bytes; the limit is {MAX_CHUNK:,}. "
            "Write the zip file without compression of its own, or give the unpacked folder."
        )
    return guarded_zarr_store(zarr.storage.ZipStore(path, mode="r", read_only=True))


def open_object(node: Any) -> Container:  # noqa: ANN401  (an h5py.Group or zarr.Group)
    """Wrap an open h5py or zarr group as a container; the caller remains responsible for closing it.

    A group in a folder with a symlink below is refused (`StoreError`).
    """
    if hasattr(node, "id"):
        if not node:
            raise SourceError("The h5py object is closed; open it again, or pass the path of the file.")
        inner = node.name.strip("/")
        return Container(f"{node.file.filename}{':' + inner if inner else ''}", node, lambda: None)
    import zarr

    # Opened again through the guard, because the store of the given group returns chunks unchecked.
    uri, folder = str(node.store_path), getattr(node.store_path.store, "root", None)
    if isinstance(folder, Path):
        refuse_symlinks(Location(str(folder)))
    with readable(uri, "the group"):
        store = guarded_zarr_store(node.store_path.store)
        group = zarr.open_group(store=store, path=node.store_path.path, mode="r")
    return Container(uri, group, lambda: None)


def open_member(uri: str, group: Any, name: str, at: str, places: Places) -> Any:  # noqa: ANN401
    """Open a member of a group after checking it; None if there is none.

    `name` is that in `group`, `at` the path in the file `uri`. `places` has the paths by which the objects of the file
    were reached so far, and is extended. Raises `SourceError` for an object that is in another file (an external link,
    a virtual or externally stored dataset), was reached by another path, or lies deeper than `MAX_DEPTH`; `LimitError`
    for a chunk or declared size over the limits; `MissingExtraError` for a filter whose plugin is not installed.
    """
    if at.count("/") > MAX_DEPTH:
        raise SourceError(f"{uri}: {at:.200} lies more than {MAX_DEPTH} groups deep; the file is damaged.")
    if not hasattr(group, "id"):
        if name in ("", ".", ".."):
            return None
        try:
            node = group[name]
        except KeyError:
            return None
        if is_array(node):
            _check_chunk(uri, at, node, node.chunks)
        return node
    import h5py

    # The link is examined before it is followed: opening an external link opens the other file.
    link = group.get(name, getlink=True)
    if link is None:
        return None
    if isinstance(link, h5py.ExternalLink):
        raise SourceError(
            f"{uri}: {at} is a link to another file ({link.filename}), which is never followed; "
            "write the file with its contents inside, e.g. by h5repack or AnnData.write_h5ad."
        )
    if not places:
        places[object_address(group)] = at.removesuffix(name).rstrip("/")
    node = group[name]
    # Hard and soft links make cycles, and n groups, each linked twice, 2**n paths.
    first = places.setdefault(object_address(node), at)
    if first != at:
        raise SourceError(
            f"{uri}: {at:.200} is a second link to {first or 'the root'}, and each object is read under one name; remove the "
            "link, or store a copy in its place, as AnnData.write_h5ad does."
        )
    if not isinstance(node, h5py.Dataset):
        return node
    if node.is_virtual or node.external:
        raise SourceError(
            f"{uri}: {at} keeps its values in other files, which are never opened; write the file with its contents inside."
        )
    if node.shape is None:
        return node
    _check_chunk(uri, at, node, node.chunks)
    declared = _n_bytes(node, node.shape)
    if declared > BOMB_FROM and declared > MAX_RATIO * max(node.id.get_storage_size(), 1):
        raise LimitError(
            f"{uri}: {at} declares {declared:,} bytes but stores {node.id.get_storage_size():,}; "
            f"more than {MAX_RATIO:,} to one is refused. Write it as a sparse matrix, or leave it out of the file."
        )
    plist = node.id.get_create_plist()
    for i in range(plist.get_nfilters()):
        code, _, _, label = plist.get_filter(i)
        if not filter_available(code):
            stated = label.decode(errors="replace") if isinstance(label, bytes) else str(label)
            raise MissingExtraError(
                f"{uri}: {at} is compressed with HDF5 filter {code} ({stated or 'unnamed'}), which is not installed; "
                "install raggedatlas[plugins]."
            )
    return node


def object_address(node: Any) -> tuple[int, int]:  # noqa: ANN401
    """Return the address of an h5py object: equal for all links to it."""
    import h5py

    info = h5py.h5o.get_info(node.id)
    return info.fileno, info.addr


def _check_chunk(uri: str, at: str, node: Any, chunks: tuple[int, ...] | None) -> None:  # noqa: ANN401
    n_bytes = _n_bytes(node, chunks or ())
    if chunks and n_bytes > MAX_CHUNK:
        raise LimitError(
            f"{uri}: {at} has chunks of {n_bytes:,} bytes, each of which must be decoded whole; the limit is {MAX_CHUNK:,}. "
            "Write it again with smaller chunks."
        )


def filter_available(code: int) -> bool:
    """Return whether HDF5 can use the filter with this number, loading the plugins of the extra `plugins` if necessary."""
    import h5py

    if h5py.h5z.filter_avail(code):
        return True
    try:
        import hdf5plugin  # noqa: F401  (its import registers the filters)
    except ImportError:
        return False
    return bool(h5py.h5z.filter_avail(code))


def check_whole(uri: str, path: str, node: Any, n_rows: int | None) -> None:  # noqa: ANN401
    """Raise if an array that is about to be read completely is not of length `n_rows` (None: any) or larger than `MAX_WHOLE` bytes."""
    shape = node.shape or ()
    if n_rows is not None and (not shape or shape[0] != n_rows):
        raise SourceError(
            f"{uri}: {path} has shape {tuple(shape)} where {n_rows:,} rows were expected; "
            "the file does not fit together. Write it again."
        )
    n_bytes = _n_bytes(node, shape)
    if n_bytes > MAX_WHOLE:
        raise LimitError(
            f"{uri}: {path} declares {n_bytes:,} bytes and would have to be read whole; the limit is {MAX_WHOLE:,}."
        )
