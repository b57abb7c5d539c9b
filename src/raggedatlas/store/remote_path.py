"""Files of other people in object stores and on web servers: paths, and file objects that fetch ranges through a block cache."""

import contextlib
import gc
import io
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

from raggedatlas.errors import AtlasError, DuplicateError, LimitError, NotFoundError, SourceError, StoreError
from raggedatlas.store.location import REMOTE_SCHEMES, Location, parse_local, store_errors
from raggedatlas.store.runtime import LRUCache, map_requests, process_cache, share, submit_request
from raggedatlas.store.storage_errors import failure

if TYPE_CHECKING:
    from obstore.store import ObjectStore
    from zarr.abc.store import Store

WEB_SCHEMES = ("http", "https")

BLOCK = 1 << 20
"""Bytes of one block of the cache; requests fetch complete blocks."""

REQUEST_BYTES = 4 << 20
"""Most bytes of one request: neighbouring blocks are fetched together up to this size, larger spans by several requests at once."""

CACHE_BYTES = 128 << 20
"""Bytes of one file that are held at most."""

MOST_AHEAD = 8
"""Blocks that are read ahead where a file is read from one block to the next."""

LOADED_BLOCKS = 32
"""Blocks that one long read asks for at once: a quarter of the cache, so that readers do not push out each other's blocks."""

STEP_SECONDS, PATIENCE_STEPS = 0.001, 2_000
"""How often is looked for a block that is on its way, and how many times before it is fetched anew."""

RETRIES: dict[str, Any] = {
    "max_retries": 5,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}
"""How long a request is repeated; shorter than for atlases, because nothing is lost by running a failed read again."""

MAX_LISTED = 100_000
"""Objects below a folder that are listed at most."""

MOST_COPIED = 8 << 30
"""Bytes of a file or folder that are copied to this machine at most, where it cannot be read by ranges."""

LAST = ("obs/", "__tiledb_group.tdb", "__group/", ".zmetadata", ".zgroup", "zarr.json")
"""What readers recognise a folder by: these files of its root are uploaded after all others, in this order, and removed first."""


class RemotePath:
    """A file or folder in an object store or on a web server, with the methods of `pathlib.Path` that readers of files use.

    Parameters
    ----------
    uri : str
        ``s3://bucket/key``, ``gs://``, ``az://``, ``https://`` or ``http://``.
    storage_options : mapping of str to str, optional
        As of `Location`; web servers use none of them.

    Notes
    -----
    One path object reads one version of its file: once a part was read, an object with another size or ETag is refused. Open files of one
    path share their blocks.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(uri)
        self.scheme = parts.scheme.lower()
        self.storage_options = dict(storage_options or {})
        self.is_web = self.scheme in WEB_SCHEMES
        if self.is_web:
            if not parts.hostname or "@" in parts.netloc:
                raise StoreError(f"{parts.scheme}://{parts.hostname or ''} is no address of a file, or holds a login.")
            # The query stays in `uri`, since it may sign the address; it is in no message and no record.
            self.uri, self._shown = uri, f"{self.scheme}://{parts.netloc}{parts.path}"
        else:
            self.uri = self._shown = Location(uri, self.storage_options).uri
        self._top: RemotePath = self
        self._below = ""
        self._read: dict[str, Any] = {}

    def __str__(self) -> str:
        """Return the address without its query."""
        return self._shown

    def __fspath__(self) -> str:
        """Return the address without its query."""
        return self._shown

    def __repr__(self) -> str:
        """Return the class and the address."""
        return f"RemotePath({self._shown!r})"

    def __eq__(self, other: object) -> bool:
        """Compare addresses."""
        return isinstance(other, RemotePath) and (self.uri, self._below) == (other.uri, other._below)

    def __hash__(self) -> int:
        """Return the hash of the address."""
        return hash((self.uri, self._below))

    def __lt__(self, other: "RemotePath") -> bool:
        """Order by address."""
        return str(self) < str(other)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was read; processes read for themselves."""
        return {**vars(self), "_read": {}}

    def __truediv__(self, name: "str | RemotePath") -> "RemotePath":
        """Return the path of a member."""
        inner = RemotePath.__new__(RemotePath)
        vars(inner).update(self.__getstate__())
        inner._below = "/".join(part for part in (self._below, *str(name).split("/")) if part)
        inner._shown = f"{str(self._top).rstrip('/')}/{inner._below}"
        inner._top = self._top
        return inner

    @property
    def name(self) -> str:
        """The last part of the path."""
        return unquote(urlsplit(self._shown).path.rstrip("/").rpartition("/")[2])

    @property
    def suffix(self) -> str:
        """Ending of the name, as of `Path`."""
        return Path(self.name).suffix

    @property
    def stem(self) -> str:
        """Name without its ending, as of `Path`."""
        return Path(self.name).stem

    @property
    def parent(self) -> "RemotePath":
        """The folder of a file or member."""
        if self._below:
            return self._top / self._below.rpartition("/")[0] if "/" in self._below else self._top
        if not urlsplit(self._shown).path.strip("/"):
            return self
        return RemotePath(self._shown.rstrip("/").rpartition("/")[0], self.storage_options)

    @property
    def parents(self) -> "list[RemotePath]":
        """The folders above a member, the nearest first."""
        above, path = [], self
        while path._below:
            path = path.parent
            above.append(path)
        return above

    def with_name(self, name: str) -> "RemotePath":
        """Return another member of the same folder."""
        return self.parent / name

    def relative_to(self, other: "RemotePath") -> str:
        """Return the path below another one."""
        return self._below.removeprefix(other._below).lstrip("/")

    def absolute(self) -> "RemotePath":
        """Return this path."""
        return self

    def exists(self) -> bool:
        """Return whether there is such a file or folder.

        Raises
        ------
        StoreError
            If the store cannot be asked.
        """
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Return whether there is an object of this name."""
        # The listing has what is below the top path, and is empty where that is a file.
        if self._top._is_listed() and self._top._listed:
            return self._below in self._top._listed
        try:
            _ = self._contents
        except NotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Return whether there are objects below; always False on web servers, which do not list them."""
        return not self.is_web and next(self.below(), None) is not None

    def is_symlink(self) -> bool:
        """Return False: object stores have no links."""
        return False

    def iterdir(self) -> "Iterator[RemotePath]":
        """Iterate over the members of the folder."""
        names = {key.partition("/")[0] for key, _ in self.below()}
        return (self / name for name in sorted(names) if name)

    def below(self) -> "Iterator[tuple[str, int]]":
        """Iterate over key and bytes of every object below the folder."""
        below = f"{self._below}/" if self._below else ""
        return (
            (key[len(below) :], size)
            for key, size in self._top._listed.items()
            if key.startswith(below) and key != below
        )

    def rglob(self, pattern: str) -> "Iterator[RemotePath]":
        """Iterate over all files below whose name matches a pattern."""
        from fnmatch import fnmatchcase

        return (self / key for key, _ in self.below() if fnmatchcase(key.rpartition("/")[2], pattern))

    def glob(self, pattern: str) -> "Iterator[RemotePath]":
        """Iterate over the files whose name matches a pattern, in the folder or, after ``**/``, below."""
        found = self.rglob(pattern.removeprefix("**/"))
        return found if pattern.startswith("**/") else (path for path in found if path.parent == self)

    @property
    def size(self) -> int:
        """Bytes of the file, or of all files of a folder that can be listed."""
        if self.is_file():
            known = self._top._listed.get(self._below) if self._top._is_listed() else None
            return self._contents.size if known is None else known
        return 0 if self.is_web else sum(size for _, size in self.below())

    def stat(self) -> SimpleNamespace:
        """Return the size as `Path.stat` does."""
        return SimpleNamespace(st_size=self.size)

    def open(self, mode: str = "rb") -> "RemoteFile":
        """Open the file for reading.

        Raises
        ------
        NotFoundError
            If there is no such file.
        StoreError
            If the store cannot be reached, refuses access, or does not serve ranges.
        """
        if mode != "rb":
            raise StoreError(f"{self} cannot be opened with mode {mode!r}; remote files are opened for reading bytes.")
        return RemoteFile(self._contents)

    def read_bytes(self) -> bytes:
        """Return the complete content."""
        with self.open() as file:
            return file.read()

    def zarr_store(self) -> "Store":
        """Return the zarr-python store of the folder."""
        from zarr.storage import ObjectStore

        store = self._web_store() if self.is_web else Location(self.uri, self.storage_options).store(retries=RETRIES)
        return cast("Store", ObjectStore(store, read_only=True))

    def bucket(self) -> "tuple[ObjectStore, str]":
        """Return the store that holds the object and its key there."""
        if self.is_web:
            return self._web_store(), self._below
        place = Location(self.uri, self.storage_options)
        whole = Location(self.uri.removesuffix(place.prefix).rstrip("/"), self.storage_options)
        return whole.store(retries=RETRIES), "/".join(part for part in (place.prefix, self._below) if part)

    def _web_store(self) -> "ObjectStore":
        from obstore.store import HTTPStore

        client = {"allow_http": self.scheme == "http", "timeout": self.storage_options.get("timeout", "60s")}
        stores: LRUCache[ObjectStore] = process_cache("stores")
        with store_errors(f"open {self}"):
            return stores.get_or_make(
                (self.uri, client["timeout"]),
                lambda: cast("Any", HTTPStore).from_url(self.uri, client_options=client, retry_config=RETRIES),
            )

    # What was read is kept without a lock, unlike in `cached_property` of Python 3.11, where all paths wait for each other's requests.
    # Two threads that read at once read the same; the first that is done is kept, so that both share its blocks.
    @property
    def _contents(self) -> "_Blocks":
        blocks: _Blocks = self._read.get("contents") or self._read.setdefault("contents", _Blocks.of(self))
        return blocks

    def _is_listed(self) -> bool:
        return "listed" in self._read

    @property
    def _listed(self) -> dict[str, int]:
        """Size of each object below the top folder by key; of the top path alone, since its members share it."""
        if not self._is_listed():
            self._read["listed"] = self._list()
        listed: dict[str, int] = self._read["listed"]
        return listed

    def _list(self) -> dict[str, int]:
        import obstore

        if self.is_web:
            raise SourceError(
                f"{self} is on a web server, which does not list folders; give a file, a Zarr folder with consolidated metadata, or the "
                "address of the folder in its object store."
            )
        listed: dict[str, int] = {}
        store, prefix = self.bucket()
        with store_errors(f"list {self}"):
            for page in obstore.list(store, prefix=f"{prefix}/" if prefix else None):
                listed |= {item["path"][len(prefix) :].lstrip("/"): item["size"] for item in page}
                if len(listed) > MAX_LISTED:
                    raise SourceError(
                        f"{self} holds more than {MAX_LISTED:,} objects; name one file or folder of them."
                    )
        return listed


AnyPath = Path | RemotePath
"""What readers of files take."""

Address = str | os.PathLike[str] | RemotePath
"""What users may give where a file or folder is named; `as_path` and `local_path` read it."""


def is_remote(address: object) -> bool:
    """Return whether an address is that of an object store or a web server.

    Examples
    --------
    >>> is_remote("s3://bucket/pbmc.h5ad"), is_remote("pbmc.h5ad")
    (True, False)
    """
    if isinstance(address, RemotePath):
        return True
    return (
        isinstance(address, str)
        and address.partition("://")[0].lower() in (*REMOTE_SCHEMES, *WEB_SCHEMES)
        and "://" in address
    )


def as_path(address: Address, storage_options: Mapping[str, str] | None = None) -> AnyPath:
    """Return the path of an address: local, or in an object store or on a web server.

    Parameters
    ----------
    address : str or os.PathLike
        A path (``~`` is expanded), ``file://``, or the address of an object store or web server.
    storage_options : mapping of str to str, optional
        As of `Location`.

    Raises
    ------
    StoreError
        If the address has a scheme that is not known, or an option is none.

    Examples
    --------
    >>> as_path("s3://bucket/lung/pbmc.h5ad").stem
    'pbmc'
    """
    if isinstance(address, RemotePath):
        return address
    text = os.fspath(address)
    if not isinstance(text, str):
        raise StoreError(f"The path {text!r} is bytes; expected text, as os.fsdecode() gives it.")
    if is_remote(text):
        return RemotePath(text, storage_options)
    # `Location` normalises ``file://``, and refuses what is no scheme.
    return Location(text).path if "://" in text else parse_local(text)


def with_options(what: Any, storage_options: Mapping[str, str]) -> Any:  # noqa: ANN401  (an address, or anything)
    """Return the address of an object store or web server as a path with these options, and all else as it is.

    Examples
    --------
    >>> with_options("s3://bucket/pbmc.h5ad", {"aws_region": "eu-central-1"}), with_options("pbmc.h5ad", {})
    (RemotePath('s3://bucket/pbmc.h5ad'), 'pbmc.h5ad')
    """
    return as_path(what, storage_options) if is_remote(what) else what


def local_path(address: Address) -> Path:
    """Return the path of an address that must be on this machine.

    Parameters
    ----------
    address : str or os.PathLike
        As of `as_path`.

    Raises
    ------
    StoreError
        If it is in an object store or on a web server.

    Examples
    --------
    >>> local_path("file:///data/pbmc.h5ad").name
    'pbmc.h5ad'
    """
    path = as_path(address)
    if isinstance(path, RemotePath):
        raise StoreError(
            f"{path} is not on this machine; expected a local path or file://. Copy it to this machine first."
        )
    return path


@dataclass(frozen=True)
class _Span:
    """Neighbouring blocks that one request fetches."""

    first: int
    last: int


class _Blocks:
    """The blocks of one remote file that are held, those fetched first removed first, and the numbers of those on their way.

    Without locks: h5py calls a file object while it holds the lock of its library. A thread that would wait there for a lock of ours never
    gets it if its holder, in a collection of garbage, waits for that of h5py. Operations on one key of a dictionary are atomic, and two
    threads that fetch one block store equal bytes.
    """

    def __init__(self, path: RemotePath, size: int, tag: str | None, head: bytes) -> None:
        self.path, self.size, self._tag = path, size, tag
        self._store, self._key = path.bucket()
        self._held: dict[int, memoryview] = {}
        self._coming: set[int] = set()
        self._keep(0, memoryview(head))

    @classmethod
    def of(cls, path: RemotePath) -> "_Blocks":
        """Fetch the first block, whose response also has the size: one request opens a file."""
        store, key = path.bucket()
        data, size, tag = _get_range(path, store, key, 0, BLOCK)
        if len(data) != min(size, BLOCK):
            raise StoreError(
                f"{path}: the server sent {len(data):,} of {min(size, BLOCK):,} bytes; the file was cut short there."
            )
        return cls(path, size, tag, data)

    def load(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Begin to fetch the blocks of byte ranges ``(offset, length)`` that are not held, several requests at once."""
        wanted = {
            block
            for offset, length in ranges
            for block in range(offset // BLOCK, -(-min(offset + length, self.size) // BLOCK))
        }
        missing = [block for block in sorted(wanted) if not self.holds(block)]
        self._coming.update(missing)
        for span in _spans(missing):
            submit_request(self._try, span)

    def read_into(self, offset: int, room: memoryview, ahead: int) -> int:
        """Copy bytes to `room`; return their number, fewer at the end of the file."""
        n_bytes = max(0, min(len(room), self.size - offset))
        done = 0
        while done < n_bytes:
            block, start = divmod(offset + done, BLOCK)
            n_blocks = max(-(-(start + n_bytes - done) // BLOCK), ahead)
            part = self._block(block, n_blocks)[start : start + n_bytes - done]
            room[done : done + len(part)] = part
            done += len(part)
        return n_bytes

    def holds(self, block: int) -> bool:
        """Return whether a block is held or on its way."""
        return block in self._held or block in self._coming

    def _block(self, block: int, n_blocks: int) -> memoryview:
        """Return a block; where it has to be fetched, with those after it that will be read."""
        waited = 0
        while block in self._coming and block not in self._held and waited < PATIENCE_STEPS:
            # Polled: see the note of the class. A thread that does not come on is not waited for.
            time.sleep(STEP_SECONDS)
            waited += 1
        data = self._held.get(block)
        if data is not None:
            return data
        last = block + 1
        most = min(block + min(n_blocks, REQUEST_BYTES // BLOCK), -(-self.size // BLOCK))
        while last < most and not self.holds(last):
            last += 1
        if n_blocks > last - block:
            self.load([(last * BLOCK, min(n_blocks - (last - block), LOADED_BLOCKS) * BLOCK)])
        return self._fetch(_Span(block, last))[:BLOCK]

    def _try(self, span: _Span) -> None:
        # An error is raised to who reads the block, who then fetches it again.
        try:
            self._fetch(span)
        except AtlasError:
            pass
        finally:
            self._coming.difference_update(range(span.first, span.last))

    def _fetch(self, span: _Span) -> memoryview:
        start, stop = span.first * BLOCK, min(span.last * BLOCK, self.size)
        data, size, tag = _get_range(self.path, self._store, self._key, start, stop)
        if (size, tag) != (self.size, self._tag):
            raise StoreError(f"{self.path} was replaced while it was read; run it again.")
        if len(data) != stop - start:
            raise StoreError(
                f"{self.path}: the server sent {len(data):,} of {stop - start:,} bytes at byte {start:,}; the file was cut short there."
            )
        whole = memoryview(data)
        self._keep(span.first, whole)
        return whole

    def _keep(self, first: int, whole: memoryview) -> None:
        for i in range(-(-len(whole) // BLOCK)):
            self._held[first + i] = whole[i * BLOCK : (i + 1) * BLOCK]
        while len(self._held) > CACHE_BYTES // BLOCK:
            # Another thread may remove the same one, or add one between the two calls.
            with contextlib.suppress(RuntimeError, StopIteration):
                self._held.pop(next(iter(self._held)), None)


def _spans(blocks: list[int]) -> list[_Span]:
    """Join neighbouring blocks into requests of at most `REQUEST_BYTES`."""
    spans: list[_Span] = []
    for block in blocks:
        if spans and spans[-1].last == block and block - spans[-1].first < REQUEST_BYTES // BLOCK:
            spans[-1] = _Span(spans[-1].first, block + 1)
        else:
            spans.append(_Span(block, block + 1))
    return spans


def _get_range(
    path: RemotePath, store: "ObjectStore", key: str, start: int, stop: int
) -> tuple[bytes, int, str | None]:
    """Return bytes of an object, its size and its ETag."""
    import obstore
    from obstore.exceptions import BaseError

    try:
        with store_errors(f"read {path}"):
            try:
                answer = obstore.get(store, key, options={"range": (start, stop)})
                return memoryview(answer.bytes()).tobytes(), answer.meta["size"], answer.meta["e_tag"]
            except BaseError as error:
                raise _explained(path, error) from error
    except FileNotFoundError:
        raise NotFoundError(f"There is no file {path}; check the address.") from None


def _explained(path: RemotePath, error: BaseException) -> BaseException:
    """Return what a failed request for a range means, where the general text would not say it."""
    text = str(error)
    if "Range request not supported" in text or "content-range" in text.lower():
        return StoreError(
            f"{path}: the server does not serve parts of a file (HTTP ranges), which are needed to read it without copying it; "
            "download it first."
        )
    if "status code: 416" in text:
        return StoreError(f"{path} is empty or shorter than it was; fetch or write it again.")
    return error


class RemoteFile(io.RawIOBase):
    """A remote file as a file object of bytes; reads that follow each other fetch growing pieces ahead.

    Parameters
    ----------
    blocks : _Blocks
        Shared by all open files of one `RemotePath`.
    """

    def __init__(self, blocks: _Blocks) -> None:
        super().__init__()
        self._blocks, self._position, self._ahead = blocks, 0, 1
        # h5py names its file by the `repr` of the file object, through which readers of chunks find this one again.
        share(f"file {self!r}", lambda: self)

    def __repr__(self) -> str:
        """Return the class, the address and the identity."""
        return ascii(f"<RemoteFile {self._blocks.path} {id(self)}>")

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position and return it."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._blocks.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, room: Any) -> int:  # noqa: ANN401  (any writable buffer)
        """Read into a buffer; return the number of bytes."""
        # h5py calls this while it holds its lock. A collection of garbage in another thread, such as one that fetches, would wait for that
        # lock if it came upon objects of h5py.
        collects = gc.isenabled()
        gc.disable()
        try:
            n_bytes = self.read_at(self._position, memoryview(room).cast("B"))
        finally:
            if collects:
                gc.enable()
        self._position += n_bytes
        return n_bytes

    def readall(self) -> bytes:
        """Return everything from the position on."""
        room = bytearray(max(0, self._blocks.size - self._position))
        self.readinto(room)
        return bytes(room)

    def read_at(self, offset: int, room: memoryview) -> int:
        """Read into a buffer from an offset, for several threads at once; return the number of bytes.

        Raises
        ------
        StoreError
            If the store fails, or the file was replaced or cut short.
        """
        block = offset // BLOCK
        if not self._blocks.holds(block):
            # The block before is held where the file is read in order, as a long index is.
            self._ahead = min(2 * self._ahead, MOST_AHEAD) if block and self._blocks.holds(block - 1) else 1
        return self._blocks.read_into(offset, room, self._ahead)

    def load(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Begin to fetch byte ranges ``(offset, length)`` into the cache, several requests at once; their errors come when they are read."""
        self._blocks.load(ranges)


@contextlib.contextmanager
def local_copy(
    address: Address, storage_options: Mapping[str, str] | None = None, *, beside: Iterable[str] = ()
) -> Iterator[Path]:
    """Give the local path of a file or folder; one in an object store or on a web server is copied for as long as the block runs.

    Parameters
    ----------
    address, storage_options
        As of `as_path`.
    beside : iterable of str
        Names of files in the same folder, which are copied as well where they exist.

    Raises
    ------
    NotFoundError
        If there is no such file or folder in the object store or on the server.
    LimitError
        If it has more than `MOST_COPIED` bytes, before they are fetched.
    StoreError
        If the store or the disk fails.

    Examples
    --------
    >>> with local_copy("file:///data/labels.csv") as path:
    ...     path.name
    'labels.csv'
    """
    path = as_path(address, storage_options)
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="raggedatlas-copy-") as folder:
        # With the name of its folder, which tells the kind of an element of SpatialData.
        copied = Path(folder, path.parent.name, path.name)
        _fetch(path, copied)
        for name in beside:
            with contextlib.suppress(NotFoundError):
                _fetch(path.with_name(name), copied.with_name(name))
        with naming(copied, path):
            yield copied


@contextlib.contextmanager
def naming(local: Path, path: RemotePath) -> Iterator[None]:
    """Let messages of errors name a remote path, and not the local copy of it."""
    try:
        yield
    except AtlasError as error:
        error.args = tuple(
            each.replace(str(local), str(path)) if isinstance(each, str) else each for each in error.args
        )
        raise


def _fetch(path: RemotePath, target: Path) -> None:
    """Copy a file, or a folder of an object store, to this machine; errors as of `local_copy`."""
    try:
        # What is listed already needs no request to tell a folder from a file.
        if path.is_web or not (path._top._is_listed() and path.is_dir()):
            try:
                _fetch_file(path, target)
                return
            except NotFoundError:
                if path.is_web or not path.is_dir():
                    raise
        listed = [(key, size) for key, size in path.below() if not key.endswith("/")]
        n_bytes = sum(size for _, size in listed)
        if n_bytes > MOST_COPIED:
            raise _too_large(path, n_bytes)
        map_requests(
            lambda key: _fetch_file(path / key, target.joinpath(*_local_parts(path, key))), [key for key, _ in listed]
        )
    # `StoreError` is an `OSError` too.
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be copied to the folder for temporary files: {failure(error)}") from error


def _fetch_file(path: RemotePath, target: Path) -> None:
    import obstore

    store, key = path.bucket()
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        # A request for the complete file, which every web server answers.
        with store_errors(f"read {path}"):
            answer = obstore.get(store, key)
            if answer.meta["size"] > MOST_COPIED:
                raise _too_large(path, answer.meta["size"])
            with target.open("wb") as file:
                for piece in answer.stream(min_chunk_size=BLOCK):
                    file.write(memoryview(piece))
    except FileNotFoundError:
        raise NotFoundError(f"There is no file or folder {path}; check the address.") from None


def _too_large(path: RemotePath, n_bytes: int) -> LimitError:
    return LimitError(
        f"{path} has {n_bytes:,} bytes, and files of its kind are copied before they are read, up to {MOST_COPIED:,} bytes; download it and "
        "give the local path."
    )


def _local_parts(path: RemotePath, key: str) -> list[str]:
    parts = key.split("/")
    if any(not part.strip(".") or "\\" in part or "\0" in part for part in parts):
        raise StoreError(f"{path} holds {key!r}, which is no name of a local file; rename it.")
    return parts


@contextlib.contextmanager
def local_target(
    address: Address, storage_options: Mapping[str, str] | None = None, *, overwrite: bool = False
) -> Iterator[Path]:
    """Give the local path to write a file or folder to; for an object store a temporary one, which is uploaded at the end of the block.

    Parameters
    ----------
    address, storage_options
        As of `as_path`.
    overwrite : bool
        Whether what is in the object store may be replaced; of a local target the block decides.

    Raises
    ------
    DuplicateError
        If something is in the object store and may not be replaced.
    StoreError
        If the target is on a web server, before anything is written, or if the store fails.

    Examples
    --------
    >>> with local_target("file:///data/labels.csv") as path:
    ...     path.name
    'labels.csv'
    """
    path = as_path(address, storage_options)
    if isinstance(path, Path):
        yield path
        return
    refuse_target(path, overwrite=overwrite)
    with tempfile.TemporaryDirectory(prefix="raggedatlas-upload-") as folder:
        local = Path(folder, path.name)
        with naming(local, path):
            yield local
        # Again, since writing may have taken hours.
        refuse_target(path, overwrite=overwrite)
        # Files that belong to it come first.
        for part in sorted(local.parent.iterdir(), key=lambda part: part == local):
            upload(part, path if part == local else path.with_name(part.name))


def refuse_target(path: RemotePath, *, overwrite: bool) -> None:
    """Raise for a target that cannot be written.

    Raises
    ------
    DuplicateError
        If something is there and may not be replaced.
    StoreError
        If it is on a web server, or the store cannot be asked.
    """
    if path.is_web:
        raise StoreError(
            f"{path} is on a web server, where nothing can be written; give a path, s3://, gs:// or az://."
        )
    # Asked of a path of its own: a path keeps what it has seen.
    if not overwrite and RemotePath(path.uri, path.storage_options).exists():
        raise DuplicateError(f"{path} exists; choose another name, or pass overwrite=True to replace it.")


def upload(local: Path, target: RemotePath) -> None:
    """Upload a file, which appears when it is complete, or a folder, whose root metadata come last; what was there is removed before.

    Raises
    ------
    StoreError
        If the store fails; what was uploaded is removed then.
    """
    if not local.is_dir():
        _put_file(target, local)
        return
    listed = sorted(_rank(file.relative_to(local).as_posix()) for file in local.rglob("*") if file.is_file())
    before = RemotePath(target.uri, target.storage_options)
    old = sorted((_rank(key) for key, _ in before.below()), reverse=True)
    # One call for each rank: a store removes the objects of one call in any order.
    for rank in range(len(LAST), -1, -1):
        _delete_below(target, [key for at, key in old if at == rank])
    sent: list[str] = []

    def send(key: str) -> None:
        sent.append(key)
        _put_file(target / key, local / key)

    try:
        for rank in range(len(LAST) + 1):
            map_requests(send, [key for at, key in listed if at == rank])
    except BaseException:
        _delete_below(target, sorted(sent, key=_rank, reverse=True))
        raise


def _rank(key: str) -> tuple[int, str]:
    """Return when a file is uploaded: 0 for all that readers do not recognise a folder by."""
    ranks = (i for i, name in enumerate(LAST, 1) if key == name or (name.endswith("/") and key.startswith(name)))
    return next(ranks, 0), key


def _put_file(path: RemotePath, file: Path) -> None:
    import obstore

    store, key = path.bucket()
    with store_errors(f"write {path}"), file.open("rb") as opened:
        obstore.put(store, key, opened)


def _delete_below(path: RemotePath, keys: Iterable[str]) -> None:
    import obstore

    listed = [(path / key).bucket()[1] for key in keys]
    if listed:
        with store_errors(f"remove {path}"), contextlib.suppress(FileNotFoundError):
            obstore.delete(path.bucket()[0], listed)
