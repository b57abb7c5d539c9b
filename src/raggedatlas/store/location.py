"""The one type of an address: a local folder, a place in an object store or on a web server, and the files there."""

import contextlib
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from raggedatlas.errors import CorruptError, NameRefusedError, NotFoundError, SourceError, StoreError
from raggedatlas.store.cache_folder import CACHE_OPTIONS, parse_size
from raggedatlas.store.codecs import Buffers, Piece
from raggedatlas.store.disk_cache import DiskCache
from raggedatlas.store.ranges import BLOCK, SMALL_BLOCK, Blocks, ObjectFacts, RemoteFile
from raggedatlas.store.runtime import REQUEST_THREADS, LRUCache, map_requests, prefetch_map, process_cache
from raggedatlas.store.storage_errors import plain_reason, store_errors

if TYPE_CHECKING:
    from obstore.store import ObjectStore
    from zarr.abc.store import Store

T = TypeVar("T")

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
"""What one part of a path below a location may look like."""

REMOTE_SCHEMES = ("s3", "gs", "az")
WEB_SCHEMES = ("http", "https")

S3_OPTIONS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "aws_region": "region",
    "aws_endpoint": "endpoint",
    "aws_skip_signature": "skip_signature",
}
GCS_OPTIONS = {"google_service_account": "service_account", "google_skip_signature": "skip_signature"}
AZURE_OPTIONS = {
    "azure_storage_account_name": "account_name",
    "azure_storage_account_key": "account_key",
    "azure_storage_use_emulator": "use_emulator",
    "azure_skip_signature": "skip_signature",
}
CLIENT_OPTIONS = ("allow_http", "timeout")
OPTION_NAMES = (*CLIENT_OPTIONS, *S3_OPTIONS, *GCS_OPTIONS, *AZURE_OPTIONS, *CACHE_OPTIONS)
"""All storage options a user may pass; except those of the cache, they are spelled as in Lance."""

_LONGEST_NAME = 255
"""Bytes of one part of a local path; no common file system takes more."""

TRUE_WORDS = ("1", "true", "yes", "on")
"""What switches a storage option on, in any case of letters."""

EMULATED_ACCOUNT = "devstoreaccount1"
"""The account that every emulator of Azure's store has; obstore knows it, Lance and TileDB do not."""


RETRIES: dict[str, Any] = {
    "max_retries": 5,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}
"""How long a request is repeated; shorter than for atlases, because nothing is lost by running a failed read again."""

MAX_LISTED = 100_000
"""Objects below a folder that are listed at most."""


class ObjectServer(Protocol):
    """What serves the files of a published atlas as a bucket; see `store.gateway`."""

    address: str
    bucket: str

    @property
    def files(self) -> Any:  # noqa: ANN401  (`PublishedFiles`, which is made of this module)
        """The files."""

    @property
    def merged_gap(self) -> int:
        """Bytes that are fetched in the time of another request."""

    def options(self) -> dict[str, str]:
        """Return the storage options with which the bucket is read."""


@cache
def _first_user() -> int:
    """Return the pid of the process that used an object store first; a forked child inherits it."""
    return os.getpid()


@dataclass(frozen=True, repr=False)
class Location:
    """A place for bytes: a local folder, a prefix or object of an object store, or a file of a web server; frozen and picklable.

    Every call that takes a path takes a `Location`, which is how options are given where a call has none.

    Parameters
    ----------
    uri : str
        A path (made absolute, ``~`` expanded), ``file://``, ``s3://bucket/prefix``, ``gs://``, ``az://``, ``https://`` or ``http://``.
    storage_options : mapping of str to str
        Credentials and endpoint of an object store, and the disk cache for it, by the names in `OPTION_NAMES`. What is not given
        is taken from the environment by the libraries themselves.
    server : ObjectServer or None
        Of a published atlas: what serves its files. `uri` is then where it was published, or below.

    Raises
    ------
    StoreError
        If the scheme or an option is unknown.

    Notes
    -----
    An atlas and other stores of this package reach what is below by `child` and keys; each call asks the store anew. Readers of other
    people's files use the methods that `pathlib.Path` has too (``/``, `is_file`, `is_dir`, `iterdir`, `open`, ...), on what is not local.
    For them one object reads one version of its file: once a part was read, an object with another size or ETag is refused. Members share
    the listing of their folder, and open files of one object share their blocks.

    Examples
    --------
    >>> Location("s3://atlases/lung").child("zarr_store").uri
    's3://atlases/lung/zarr_store'
    """

    uri: str
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    server: ObjectServer | None = field(default=None, repr=False, compare=False)
    # Number of parts that `child` added, among which `checked_path` refuses symlinks; not compared.
    depth: int = field(default=0, repr=False, compare=False)
    # Bytes of one block of an open file.
    _block: int = field(default=BLOCK, init=False, repr=False, compare=False)
    # The folder that ``/`` began at, and the name below it; what readers have seen of this.
    _top: "Location | None" = field(default=None, init=False, compare=False)
    _below: str = field(default="", init=False, compare=False)
    _seen: dict[str, Any] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        """Normalise the URI and check the option names."""
        uri = os.fspath(self.uri)
        if self.server is not None:
            return
        _check_address(uri)
        scheme = uri.split("://", 1)[0].lower() if "://" in uri else ""
        if scheme in REMOTE_SCHEMES:
            parts = urlsplit(uri)
            if not parts.netloc:
                raise StoreError(f"{uri!r} names no bucket or container; expected e.g. '{scheme}://bucket/prefix'.")
            prefix = [part for part in parts.path.split("/") if part]
            if any(part in {".", ".."} for part in prefix):
                raise NameRefusedError(f"{uri!r} holds '.' or '..'; write the prefix out in full.")
            uri = "/".join([f"{scheme}://{parts.netloc}", *prefix])
        elif scheme in WEB_SCHEMES:
            if not urlsplit(uri).hostname:
                raise StoreError(f"{scheme}:// is no address of a file; expected e.g. '{scheme}://host/file.h5ad'.")
        elif scheme in {"", "file"}:
            uri = os.path.abspath(parse_local(uri))  # noqa: PTH100 - must not resolve symlinks
        else:
            raise StoreError(
                f"{uri!r} has the scheme {scheme!r}; expected a path, file://, s3://, gs://, az:// or, of a file to read, https://."
            )
        unknown = sorted(set(self.storage_options) - set(OPTION_NAMES))
        if unknown:
            raise StoreError(f"Unknown storage option {unknown[0]!r} for {self}; known are {', '.join(OPTION_NAMES)}.")
        options = {key: str(value) for key, value in self.storage_options.items()}
        # Called for its error, which `DiskCache.of_options` would raise only at the first read.
        if options.get("cache_size"):
            parse_size(options["cache_size"])
        object.__setattr__(self, "uri", uri)
        object.__setattr__(self, "storage_options", options)

    @classmethod
    def of(
        cls, address: "str | os.PathLike[str] | Location", storage_options: Mapping[str, str] | None = None
    ) -> "Location":
        """Return the location of a store at an address passed by a user; options are added to those that a `Location` has.

        Raises
        ------
        StoreError
            If the address is neither text nor a path or on a web server, or the options are no mapping.
        """
        if not isinstance(address, str | os.PathLike):
            raise StoreError(f"{address!r} is no address; expected a path or a URI, e.g. 's3://bucket/prefix'.")
        if not isinstance(storage_options or {}, Mapping):
            raise StoreError(
                f"Storage options are a mapping of names to texts, e.g. {{'aws_region': 'eu-central-1'}}; got a "
                f"{type(storage_options).__name__}."
            )
        options = dict(storage_options or {})
        place = address if isinstance(address, Location) else cls(os.fspath(address))
        if options:
            place = replace(place, storage_options={**place.storage_options, **options})
        if place.is_web:
            raise StoreError(
                f"{place} is on a web server, which takes nothing; expected a path, file://, s3://, gs:// or az://. A published atlas there is "
                "read with raggedatlas.open."
            )
        return place

    def __str__(self) -> str:
        """Return the address, that of a web server without its query, which may be a signature."""
        return self.uri.partition("?")[0] if self.is_web else self.uri

    def __fspath__(self) -> str:
        """Return the address as `str` does."""
        return str(self)

    def __repr__(self) -> str:
        """Return the class and the address."""
        return f"Location({str(self)!r})"

    def __lt__(self, other: "Location") -> bool:
        """Order by address."""
        return str(self) < str(other)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was read; processes read for themselves."""
        return {**vars(self), "_seen": {}}

    @property
    def is_local(self) -> bool:
        """Whether the location is a local folder."""
        return self.server is None and "://" not in self.uri

    @property
    def is_web(self) -> bool:
        """Whether the location is on a web server, which serves files, lists none and takes none."""
        return self.server is None and self.uri.partition("://")[0].lower() in WEB_SCHEMES and "://" in self.uri

    @property
    def path(self) -> Path:
        """The local folder; `StoreError` for an object store."""
        if not self.is_local:
            raise StoreError(f"{self} is an object store and has no local path.")
        return Path(self.uri)

    @property
    def name(self) -> str:
        """The last part of the address."""
        name = str(self).rstrip("/").rpartition("/")[2]
        return unquote(name) if self.is_web else name

    @property
    def suffix(self) -> str:
        """Ending of the name, as of `Path`."""
        return Path(self.name).suffix

    @property
    def stem(self) -> str:
        """Name without its ending, as of `Path`."""
        return Path(self.name).stem

    @property
    def prefix(self) -> str:
        """The part of an object-store URI after the bucket, without slashes at its ends."""
        if self.server is not None:
            return self.uri.removeprefix(self.server.address).strip("/")
        return self.uri.partition("://")[2].partition("/")[2].strip("/")

    def child(self, *parts: str) -> "Location":
        """Return the location below; every part is checked.

        Raises
        ------
        NameRefusedError
            If a part is empty, starts with a dot, or holds anything but letters, digits, ``_``, ``.`` and ``-``.
        """
        for part in parts:
            if not NAME.fullmatch(part) or ".." in part:
                raise NameRefusedError(
                    f"{part!r} may not become part of a path below {self.uri}; expected letters, digits, '_', '-' and "
                    "'.', not starting with a dot, no '..'. Choose another name."
                )
        return replace(self, uri="/".join([self.uri.rstrip("/"), *parts]), depth=self.depth + len(parts))

    def checked_path(self) -> Path:
        """Return the local path after refusing a symlink in any part that `child` added.

        Raises
        ------
        StoreError
            If such a part is a symlink.
        """
        path = self.path
        # The folder that the user named may be reached by symlinks; below it none is followed.
        for part in (path, *path.parents)[: self.depth]:
            refuse_symlink(part)
        return path

    def store(self, retries: Mapping[str, Any] | None = None) -> "ObjectStore":
        """Return the obstore store rooted here, cached per process.

        Parameters
        ----------
        retries : mapping, optional
            How failed requests are repeated, as obstore's ``retry_config``; by default as obstore does.

        Raises
        ------
        StoreError
            In a forked child whose parent used an object store, or if the store cannot be made.
        """
        if self.is_local:
            from obstore.store import LocalStore

            return LocalStore(self.checked_path(), mkdir=True)
        if _first_user() != os.getpid():
            raise StoreError(
                f"{self.uri} is opened in a forked child of process {_first_user()}, which used an object store before "
                "the fork; that hangs. Start workers with the spawn method, e.g. "
                "multiprocessing.get_context('spawn') or DataLoader(..., multiprocessing_context='spawn')."
            )
        stores: LRUCache[ObjectStore] = process_cache("stores")
        key = (self.lance_uri(), retries is None, *sorted(self.lance_options().items()))
        return stores.get_or_make(key, lambda: _open_remote(self, retries))

    def bucket(self) -> "tuple[ObjectStore, str]":
        """Return the obstore store of the bucket or server, with the retries of a reader, and the key of this in it."""
        if self.is_web:
            return (self._top or self).store(RETRIES), self._below
        if self.server is not None:
            return replace(self, uri=self.server.address).store(RETRIES), self.prefix
        whole = Location(self.uri.removesuffix(self.prefix).rstrip("/"), self.storage_options)
        return whole.store(RETRIES), self.prefix

    def zarr_store(self, *, read_only: bool = True, retries: Mapping[str, Any] | None = None) -> "Store":
        """Return the zarr-python store rooted here; `retries` as of `store`."""
        from zarr.storage import LocalStore, ObjectStore

        if self.is_local:
            return LocalStore(self.checked_path(), read_only=read_only)
        return cast("Store", ObjectStore(self.store(retries), read_only=read_only))

    def lance_uri(self) -> str:
        """Return the URI in Lance's spelling."""
        return self.uri if self.server is None else f"s3://{self.server.bucket}/{self.prefix}".rstrip("/")

    def lance_options(self) -> dict[str, str]:
        """Return the storage options in Lance's spelling."""
        if self.server is not None:
            return self.server.options()
        options = {name: value for name, value in self.storage_options.items() if name not in CACHE_OPTIONS}
        if (
            options.get("azure_storage_use_emulator", "").lower() in TRUE_WORDS
            and "AZURE_STORAGE_ACCOUNT_NAME" not in os.environ
        ):
            options.setdefault("azure_storage_account_name", EMULATED_ACCOUNT)
        return options

    @cached_property
    def disk_cache(self) -> DiskCache | None:
        """Where chunks of an object store are kept on a local disk, if that is asked for."""
        cache = None if self.is_local else DiskCache.of_options(self.storage_options)
        return None if cache is None or cache.folder is None else cache

    def uncached(self) -> "Location":
        """Return the same location without its disk cache."""
        if self.disk_cache is None:
            return self
        return replace(self, storage_options={**self.storage_options, "cache_dir": ""})

    def holds_files(self) -> bool:
        """Return whether there is any file below, or a local file here."""
        if self.is_local:
            with store_errors(f"look for {self.uri}"):
                return self.path.exists()
        return any(True for _ in self._objects())

    def list_children(self) -> list[str]:
        """Return the sorted names of the direct sub-folders (prefixes)."""
        if self.is_local:
            with store_errors(f"list {self.uri}"), contextlib.suppress(FileNotFoundError):
                return sorted(entry.name for entry in os.scandir(self.checked_path()) if entry.is_dir())
            return []
        import obstore

        with store_errors(f"list {self.uri}"):
            listing = obstore.list_with_delimiter(self.store())
        return sorted(prefix.rstrip("/").rsplit("/", 1)[-1] for prefix in listing["common_prefixes"])

    def list_objects(self) -> list[tuple[str, int, datetime]]:
        """List every object below: (key, bytes, time when it was written in UTC), in any order."""
        return list(self._objects())

    def delete_objects(self, keys: Sequence[str]) -> None:
        """Remove some of the objects below; those that are gone already are no matter."""
        if not keys:
            return
        with store_errors(f"remove objects of {self.uri}"):
            if self.is_local:
                for key in keys:
                    # Also a temporary file of a killed writer, whose name no object has.
                    check_file_key(self, key)
                    local_file(self, key).unlink(missing_ok=True)
                return
            import obstore

            obstore.delete(self.store(), [_checked_key(self, key) for key in keys])

    def last_modified(self) -> datetime | None:
        """Return when the newest object below was written (UTC), or None where there is none."""
        return max((when for _, _, when in self._objects()), default=None)

    def size(self) -> int:
        """Return the number of bytes of all objects below."""
        return sum(size for _, size, _ in self._objects())

    def delete_prefix(self) -> int:
        """Remove everything here and below; return the bytes freed (0 where there is nothing).

        Raises
        ------
        StoreError
            If the location is a whole bucket or drive, a symlink, or cannot be removed.
        """
        objects = self.list_objects()
        freed = sum(size for _, size, _ in objects)
        if self.is_local:
            path = self.checked_path()
            # `checked_path` looks only at parts that `child` added, so the location itself is checked here.
            if path.is_symlink() or path.parent == path:
                raise StoreError(f"{path} is a symlink or a whole drive and is not removed; name the folder itself.")
            with store_errors(f"remove {self.uri}"), contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)
            return freed
        import obstore

        if not self.prefix:
            raise StoreError(f"{self.uri} is a whole bucket and is not removed; name a prefix below it.")
        with store_errors(f"remove {self.uri}"):
            if objects:
                obstore.delete(self.store(), [key for key, _, _ in objects])
        return freed

    def read_bytes(self, key: str = "") -> bytes:
        """Return the bytes of one object below; without a key, of the file that this is itself, as its readers see it.

        Raises
        ------
        NotFoundError
            If there is no such object.
        """
        if not key and not self.is_local:
            return self.open().read()
        try:
            with store_errors(f"read {self.uri}/{key}".rstrip("/")):
                if self.is_local:
                    return (self._file(key) if key else self.path).read_bytes()
                import obstore

                return bytes(obstore.get(self.store(), _checked_key(self, key)).bytes())
        except FileNotFoundError:
            raise NotFoundError(f"There is no {key!r} in {self.uri}." if key else f"There is no file {self}.") from None

    def read_range(self, key: str, offset: int, n_bytes: int) -> bytes:
        """Return some bytes of one object.

        Raises
        ------
        NotFoundError
            If there is no such object.
        CorruptError
            If it is shorter.
        """
        data = b""
        try:
            with store_errors(f"read {self.uri}/{key}"):
                if self.is_local:
                    with self._file(key).open("rb") as opened:
                        opened.seek(offset)
                        data = opened.read(n_bytes)
                elif n_bytes:
                    import obstore

                    data = bytes(obstore.get_range(self.store(), _checked_key(self, key), start=offset, length=n_bytes))
        except FileNotFoundError:
            raise NotFoundError(f"There is no {key!r} in {self.uri}.") from None
        except StoreError as error:
            # "Range not satisfiable": the object ends before the first byte.
            if "answered 416" not in str(error):
                raise
        if len(data) != n_bytes:
            raise CorruptError(
                f"{self.uri}/{key} has no {n_bytes:,} bytes from byte {offset:,} on: it was cut short. Restore it from a copy, or drop "
                "its dataset and add it again."
            )
        return data

    def write_bytes(self, key: str, data: Buffers, *, only_if_absent: bool = False) -> bool:
        """Write one object atomically: readers see the old or the new bytes, never a mixture.

        Parameters
        ----------
        key : str
            Slash-separated name below this location.
        data : bytes, memoryview, or list of these
            The content, in one piece or in several that need not be joined first.
        only_if_absent : bool
            Do not overwrite an existing object.

        Returns
        -------
        bool
            Whether the object now holds exactly `data`. So a repeated create whose first acknowledgement was lost
            still answers True.
        """
        if self.is_local:
            with store_errors(f"write {self.uri}/{key}"):
                return write_file(self._file(key), data, only_if_absent=only_if_absent)
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with store_errors(f"write {self.uri}/{key}"):
            try:
                obstore.put(
                    self.store(),
                    _checked_key(self, key),
                    joined(data),
                    mode="create" if only_if_absent else "overwrite",
                )
            except AlreadyExistsError:
                return self.read_bytes(key) == joined(data)
        return True

    def side_by_side(self, steps: Sequence[Callable[[], T]]) -> list[T]:
        """Run steps that each make a few requests: at the same time where these wait for an object store, one after the other on a disk.

        The threads are their own, so that a step may use any of the pools. The first error is raised after all have ended.
        """
        threads = 0 if self.is_local else min(len(steps), REQUEST_THREADS)
        return [*prefetch_map(lambda step: step(), steps, threads=threads, depth=len(steps))]

    def ensure_bytes(self, key: str, data: bytes) -> None:
        """Write one object if it does not exist; an existing one is neither read nor changed."""
        if self.is_local:
            with store_errors(f"write {self.uri}/{key}"):
                file = self._file(key)
                if not file.exists():
                    write_file(file, data, only_if_absent=True)
            return
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with store_errors(f"write {self.uri}/{key}"), contextlib.suppress(AlreadyExistsError):
            obstore.put(self.store(), _checked_key(self, key), data, mode="create")

    def _file(self, key: str) -> Path:
        """Return the local file of a key, after the name and symlink checks."""
        return self.child(*_checked_key(self, key).split("/")).checked_path()

    def __truediv__(self, name: str) -> "Location":
        """Return a member of a folder, whose name may be any."""
        top = self._top or self
        below = "/".join(part for part in (self._below, *name.split("/")) if part)
        inner = object.__new__(Location)
        # Not parsed: a name may hold what means something in an address.
        vars(inner).update(
            uri=f"{str(top).rstrip('/')}/{below}" if below else top.uri, storage_options=self.storage_options, server=self.server,
            depth=0, _block=self._block, _top=top, _below=below, _seen={},
        )  # fmt: skip
        return inner

    @property
    def parent(self) -> "Location":
        """The folder of a file or member."""
        if self._below:
            top = self._top or self
            return top / self._below.rpartition("/")[0] if "/" in self._below else top
        whole = str(self).rstrip("/")
        if self.server is not None:
            return replace(self, uri=whole.rpartition("/")[0]) if self.prefix else self
        return Location(whole.rpartition("/")[0], self.storage_options) if whole.count("/") > 2 else self

    def with_name(self, name: str) -> "Location":
        """Return another member of the same folder."""
        return self.parent / name

    def absolute(self) -> "Location":
        """Return this location."""
        return self

    def exists(self) -> bool:
        """Return whether there is such a file or folder.

        Raises
        ------
        StoreError
            If the store cannot be asked.
        """
        return self.path.exists() if self.is_local else self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Return whether there is an object of this name."""
        if self.is_local:
            return self.path.is_file()
        # The listing has what is below the top, and is empty where that is a file.
        if self.is_listed and self._listed:
            return self._below in self._listed
        try:
            _ = self._blocks
        except NotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Return whether there are objects below; always False on web servers, which do not list them."""
        if self.is_local:
            return self.path.is_dir()
        return not self.is_web and next(self.below(), None) is not None

    def iterdir(self) -> "Iterator[Location]":
        """Iterate over the members of the folder."""
        names = {key.partition("/")[0] for key, _ in self.below()}
        return (self / name for name in sorted(names) if name)

    def below(self) -> "Iterator[tuple[str, int]]":
        """Iterate over key and bytes of every object below the folder."""
        below = f"{self._below}/" if self._below else ""
        return (
            (key[len(below) :], facts.n_bytes)
            for key, facts in self._listed.items()
            if key.startswith(below) and key != below
        )

    def rglob(self, pattern: str) -> "Iterator[Location]":
        """Iterate over all files below whose name matches a pattern."""
        return (self / key for key, _ in self.below() if fnmatchcase(key.rpartition("/")[2], pattern))

    def glob(self, pattern: str) -> "Iterator[Location]":
        """Iterate over the files whose name matches a pattern, in the folder or, after ``**/``, below."""
        deep = pattern.startswith("**/")
        found = self.rglob(pattern.removeprefix("**/"))
        return (path for path in found if deep or path.parent == self)

    def stat(self) -> SimpleNamespace:
        """Return the size of the file, or of all files of a folder that can be listed, as `Path.stat` does."""
        if self.is_file():
            known = self._listed.get(self._below) if self.is_listed else None
            return SimpleNamespace(st_size=self._blocks.size if known is None else known.n_bytes)
        return SimpleNamespace(st_size=0 if self.is_web else sum(size for _, size in self.below()))

    def facts(self, keys: Sequence[str]) -> list[ObjectFacts | None]:
        """Return size, time and ETag of objects below the folder, None for those that do not exist: of a store that lists from its listing.

        Raises
        ------
        StoreError
            If the store cannot be asked.
        """
        if not self.is_web:
            below = f"{self._below}/" if self._below else ""
            return [self._listed.get(below + key) for key in keys]
        return map_requests(lambda key: (self / key)._ask(), keys)

    def _ask(self) -> ObjectFacts | None:
        import obstore

        with store_errors(f"read {self}"):
            try:
                return ObjectFacts.of(obstore.head(*self.bucket()))
            except FileNotFoundError:
                return None

    def in_small_blocks(self) -> "Location":
        """Return the same location, of which files are fetched in blocks of `SMALL_BLOCK`: for reading what they say of themselves."""
        small = replace(self) if self._top is None else self._top.in_small_blocks() / self._below
        vars(small)["_block"] = SMALL_BLOCK
        return small

    def open(self, mode: str = "rb") -> RemoteFile:
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
        return RemoteFile(self._blocks)

    # What was read is kept without a lock, unlike in `cached_property` of Python 3.11, where all wait for each other's requests.
    # Two threads that read at once read the same; the first that is done is kept, so that both share its blocks.
    @property
    def _blocks(self) -> Blocks:
        blocks: Blocks | None = self._seen.get("blocks")
        return blocks or self._seen.setdefault("blocks", Blocks(*self.bucket(), str(self), self._block))

    @property
    def is_listed(self) -> bool:
        """Whether the listing of the folder is known, so that what is below needs no request."""
        return "listed" in (self._top or self)._seen

    @property
    def _listed(self) -> dict[str, ObjectFacts]:
        """Facts of each object below the top by key; kept by the top, since its members share it."""
        top = self._top or self
        if "listed" not in top._seen:
            top._seen["listed"] = top._list()
        listed: dict[str, ObjectFacts] = top._seen["listed"]
        return listed

    def _list(self) -> dict[str, ObjectFacts]:
        import obstore

        if self.is_web:
            raise SourceError(
                f"{self} is on a web server, which does not list folders; give a file, a Zarr folder with consolidated metadata, or the "
                "address of the folder in its object store."
            )
        listed: dict[str, ObjectFacts] = {}
        store, prefix = self.bucket()
        with store_errors(f"list {self}"):
            for page in obstore.list(store, prefix=f"{prefix}/" if prefix else None):
                listed |= {item["path"][len(prefix) :].lstrip("/"): ObjectFacts.of(item) for item in page}
                if len(listed) > MAX_LISTED:
                    raise SourceError(
                        f"{self} holds more than {MAX_LISTED:,} objects; name one file or folder of them."
                    )
        return listed

    def _objects(self) -> Iterator[tuple[str, int, datetime]]:
        """Yield (key, size, modification time) of every object below."""
        if self.is_local:
            root = self.checked_path()
            for folder, _, names in os.walk(root):
                for name in names:
                    # Other writers rename temporary files and remove groups during the walk.
                    with contextlib.suppress(FileNotFoundError):
                        file = Path(folder, name)
                        info = file.lstat()
                        when = datetime.fromtimestamp(info.st_mtime, UTC)
                        yield str(file.relative_to(root)), info.st_size, when
            return
        import obstore

        with store_errors(f"list {self.uri}"):
            for page in obstore.list(self.store()):
                for item in page:
                    yield item["path"], item["size"], item["last_modified"]


def refuse_symlink(path: Path) -> None:
    """Refuse a symlink inside a store: it would lead reads and writes out of it."""
    if path.is_symlink():
        raise StoreError(
            f"{path} is a symlink; inside a store only real files and folders are read or written. Replace it by what it points to."
        )


def probe_conditional_puts(location: Location) -> None:
    """Refuse a place that cannot hold an atlas: a store that ignores create-if-absent, or a read-only folder.

    Such a store loses rows without a word when two writers meet, so it is tried once, when an atlas is created.
    """
    if location.is_local:
        with store_errors(f"write into {location.uri}"):
            location.checked_path().mkdir(parents=True, exist_ok=True)
            probe = location.path / f"_probe_{uuid4().hex}"
            probe.touch()
            probe.unlink()
        return
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError

    store, key = location.store(), f"_probe_{uuid4().hex}"
    way_out = "Use a store with conditional writes (AWS S3, GCS, Azure, MinIO, Ceph) or a local folder."
    try:
        with store_errors(f"write to {location.uri}"):
            obstore.put(store, key, b"1", mode="create")
        try:
            # A store that ignores the condition overwrites here; `AlreadyExistsError` is the only good outcome.
            obstore.put(store, key, b"2", mode="create")
        except AlreadyExistsError:
            return
        except BaseError as error:
            raise StoreError(
                f"{location.uri} does not answer create-if-absent writes: {plain_reason(error)}. {way_out}"
            ) from error
        raise StoreError(
            f"{location.uri} accepted two create-if-absent writes of one key, so parallel writers would lose "
            f"data. {way_out}"
        )
    finally:
        with contextlib.suppress(BaseError, FileNotFoundError):
            obstore.delete(store, key)


def parse_local(address: str) -> Path:
    """Return the path that a text or a ``file://`` address names, its ``~`` or ``~user`` expanded.

    Examples
    --------
    >>> parse_local("file:///data/a%20b").as_posix()
    '/data/a b'
    """
    _check_address(address)
    scheme = "://" in address
    if scheme and urlsplit(address).netloc not in {"", "localhost"}:
        raise StoreError(f"{address!r} names a host; expected file:///folder, or a path without file://.")
    path = unquote(urlsplit(address).path) if scheme else address
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.split("/")):
        raise StoreError(
            f"The address of {len(path)} characters holds a name longer than {_LONGEST_NAME} bytes, which file systems "
            "do not take; expected a shorter path."
        )
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise StoreError(
            f"{path!r} begins with the home directory of a user who has none; write the path out in full."
        ) from error


AnyPath = Path | Location
"""What readers of files take."""

Address = str | os.PathLike[str]
"""What users may give where a file or folder is named; `as_path` and `local_path` read it."""


def as_path(address: Address, storage_options: Mapping[str, str] | None = None) -> AnyPath:
    """Return the path of an address: local, or in an object store or on a web server.

    `address` is a path (``~`` is expanded), ``file://``, or the address of an object store or web server;
    `storage_options` are as of `Location`. Of a `Location` only its own options count, as they are those of another
    place often.

    Examples
    --------
    >>> as_path("s3://bucket/lung/pbmc.h5ad").stem
    'pbmc'
    """
    if isinstance(address, Location):
        return address.path if address.is_local else address
    text = os.fspath(address)
    if not isinstance(text, str):
        raise StoreError(f"The path {text!r} is bytes; expected text, as os.fsdecode() gives it.")
    if "://" not in text:
        return parse_local(text)
    place = Location(text, dict(storage_options or {}))
    return place.path if place.is_local else place


def as_location(path: AnyPath) -> Location:
    """Return the location of what `as_path` made."""
    return path if isinstance(path, Location) else Location(str(path))


def anonymous_options(address: str) -> dict[str, str]:
    """Return the storage option to read the object store of an address without credentials; none for other addresses.

    Examples
    --------
    >>> anonymous_options("gs://bucket/lung.atlas"), anonymous_options("https://lab.org")
    ({'google_skip_signature': 'true'}, {})
    """
    names = {"s3": "aws_skip_signature", "gs": "google_skip_signature", "az": "azure_skip_signature"}
    name = names.get(address.partition("://")[0].lower())
    return {} if name is None else {name: "true"}


def with_options(what: Any, storage_options: Mapping[str, str]) -> Any:  # noqa: ANN401  (an address, or anything)
    """Return the address of an object store or web server as a path with these options, and all else as it is.

    Examples
    --------
    >>> with_options("s3://bucket/pbmc.h5ad", {"aws_region": "eu-central-1"}), with_options("pbmc.h5ad", {})
    (Location('s3://bucket/pbmc.h5ad'), 'pbmc.h5ad')
    """
    return as_path(what, storage_options) if isinstance(what, str) and "://" in what else what


def local_path(address: Address) -> Path:
    """Return the path of an address that must be on this machine.

    Examples
    --------
    >>> local_path("file:///data/pbmc.h5ad").name
    'pbmc.h5ad'
    """
    path = as_path(address)
    if isinstance(path, Location):
        raise StoreError(
            f"{path} is not on this machine; expected a local path or file://. Copy it to this machine first."
        )
    return path


def _check_address(uri: str) -> None:
    """Refuse an address that is empty, cannot be a path, or holds a login."""
    if not uri.strip() or "\0" in uri:
        raise StoreError(f"{uri!r} is no address; expected a path or a URI, e.g. 's3://bucket/prefix'.")
    host = urlsplit(uri).netloc if "://" in uri else ""
    if "@" in host:
        raise StoreError(
            f"The address of {host.rpartition('@')[2]!r} holds a login before the '@'; give keys as storage options "
            "(aws_access_key_id, aws_secret_access_key) or in the environment."
        )


def _checked_key(location: Location, key: str) -> str:
    """Return `key` after checking every part of it."""
    location.child(*key.split("/"))
    return key


def _open_remote(location: Location, retries: Mapping[str, Any] | None) -> "ObjectStore":
    """Open the obstore store of an object-store location."""
    from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

    if location.is_web:
        settings = {
            "allow_http": location.uri.lower().startswith("http:"),
            "timeout": location.storage_options.get("timeout", "60s"),
        }
        with store_errors(f"open {location}"):
            made = HTTPStore.from_url(
                location.uri, client_options=cast("Any", settings), retry_config=cast("Any", retries)
            )
            return cast("ObjectStore", made)
    address = location.lance_uri()
    scheme, bucket = address.split("://", 1)[0], urlsplit(address).netloc
    makers: dict[str, tuple[Any, dict[str, str]]] = {
        "s3": (S3Store, S3_OPTIONS),
        "gs": (GCSStore, GCS_OPTIONS),
        "az": (AzureStore, AZURE_OPTIONS),
    }
    make, names = makers[scheme]
    given = location.storage_options if location.server is None else location.lance_options()
    options: dict[str, Any] = {names[key]: value for key, value in given.items() if key in names}
    for name in ("use_emulator", "skip_signature"):
        if name in options:
            options[name] = options[name].lower() in TRUE_WORDS
    client: dict[str, Any] = {"timeout": given["timeout"]} if "timeout" in given else {}
    if "allow_http" in given:
        client["allow_http"] = given["allow_http"].lower() in TRUE_WORDS
    if retries is not None:
        options["retry_config"] = retries
    with store_errors(f"open {location.uri}"):
        return cast(
            "ObjectStore", make(bucket, prefix=location.prefix or None, client_options=client or None, **options)
        )


_MOST_PIECES = 1024
"""Pieces of one call of ``writev``; systems take no more."""


def joined(data: Buffers) -> bytes:
    """Return the buffers as one bytes object."""
    return b"".join(data) if isinstance(data, list) else bytes(data)


def write_pieces(descriptor: int, pieces: Iterable[Piece]) -> None:
    """Write many buffers to an open file: joining them would allocate memory while holding the interpreter's lock."""
    made = iter(pieces)
    # In batches, because pieces may be made while they are written.
    while batch := list(islice(made, _MOST_PIECES)):
        waiting, at = [memoryview(piece).cast("B") for piece in batch if len(piece)], 0
        left = sum(map(len, waiting))
        while left:
            # Both may write less than they were given and stop inside a piece; Windows has only `write`.
            rest = waiting[at:]
            written = os.writev(descriptor, rest) if hasattr(os, "writev") else os.write(descriptor, rest[0])
            left -= written
            while left and written >= len(waiting[at]):
                written -= len(waiting[at])
                at += 1
            if left and written:
                waiting[at] = waiting[at][written:]


def write_file(file: Path, data: Buffers, *, only_if_absent: bool) -> bool:
    """Write a local file through a temporary file in the same folder and a rename (a hard link for create-if-absent)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_dir() or (file.exists() and not stat.S_ISREG(file.lstat().st_mode)):
        raise StoreError(f"{file} is not a plain file and is not overwritten.")
    if only_if_absent and file.exists():
        return file.read_bytes() == joined(data)
    # `NAME` allows no dot at the start of a key, so the temporary name is never that of an object.
    temporary = file.with_name(f".{file.name}.{uuid4().hex[:8]}.tmp")
    try:
        if isinstance(data, list):
            with temporary.open("wb", buffering=0) as opened:
                write_pieces(opened.fileno(), data)
        else:
            temporary.write_bytes(data)
        if not only_if_absent:
            temporary.replace(file)
            return True
        try:
            # Unlike a rename, a hard link fails where the name exists, so two writers cannot both succeed.
            file.hardlink_to(temporary)
        except FileExistsError:
            return file.read_bytes() == joined(data)
        return True
    finally:
        temporary.unlink(missing_ok=True)


_PIECE = 2**20
"""Bytes of a file that are hashed at once."""


def list_files(location: Location) -> list[tuple[str, int]]:
    """List all files below a location as sorted (key, size) pairs; of a local one all must be regular files."""
    return sorted(_walk(location))


def digest_file(location: Location, key: str) -> tuple[int, str]:
    """Read one file in blocks and return its size and its SHA-256.

    Examples
    --------
    >>> import tempfile
    >>> place = Location(tempfile.mkdtemp())
    >>> _ = place.write_bytes("a", b"123")
    >>> digest_file(place, "a")[1][:8]
    'a665a459'
    """
    content, n_bytes = hashlib.sha256(), 0
    for block in read_blocks(location, key):
        content.update(block)
        n_bytes += len(block)
    return n_bytes, content.hexdigest()


def read_blocks(location: Location, key: str) -> Iterator[bytes | memoryview]:
    """Yield the bytes of one file in blocks."""
    check_file_key(location, key)
    try:
        with store_errors(f"read {location.uri}/{key}"):
            if location.is_local:
                with local_file(location, key).open("rb") as opened:
                    while block := opened.read(_PIECE):
                        yield block
            else:
                import obstore

                for fetched in obstore.get(location.store(), key).stream(min_chunk_size=_PIECE):
                    yield memoryview(fetched)
    except FileNotFoundError:
        raise NotFoundError(f"There is no {key!r} in {location.uri}.") from None


def check_file_key(location: Location, key: str) -> None:
    """Refuse a key that leads out of a location; unlike `Location.child` it may have names of geometry stores, such as ``0.+1``."""
    if any(not part.strip(".") or "\\" in part for part in key.split("/")):
        raise NameRefusedError(f"{key!r} is no file below {location.uri}: a part is empty or leads out of it.")


def local_file(location: Location, key: str) -> Path:
    """Return the local file of a key that `check_file_key` has passed, after refusing symlinks on the way to it."""
    path = location.checked_path()
    for part in key.split("/"):
        refuse_symlink(path := path / part)
    return path


def digest_files(location: Location) -> tuple[int, int, str]:
    """Read all files and return their number, total size, and a SHA-256 over names and contents.

    Examples
    --------
    >>> import tempfile
    >>> place = Location(tempfile.mkdtemp())
    >>> _ = place.write_bytes("a/b", b"123")
    >>> digest_files(place)[:2]
    (1, 3)
    """
    entries = {key: digest_file(location, key) for key, _ in list_files(location)}
    return len(entries), sum(size for size, _ in entries.values()), digest_entries(entries)


def digest_entries(entries: Mapping[str, tuple[int, str]]) -> str:
    """Return the SHA-256 over names and contents of files, of which sizes and SHA-256 are known; see `digest_files`."""
    content = hashlib.sha256()
    for key, (size, digest) in sorted(entries.items()):
        # Name and length are delimited, so bytes that move from one file to the next change the digest.
        content.update(f"{key}\0{size}\0".encode())
        content.update(bytes.fromhex(digest))
    return content.hexdigest()


def refuse_symlinks(location: Location) -> None:
    """Refuse a local tree that holds a symlink; folders that have not changed since are not listed again."""
    if location.is_local:
        with store_errors(f"list {location.uri}"), contextlib.suppress(FileNotFoundError):
            _refuse_links(str(location.checked_path()))


_TICK_NS = 2 * 10**9
"""Nanoseconds after which the next change of a folder has another time, in every file system."""


def _refuse_links(folder: str) -> None:
    # Read before the scan: after a change during the scan the time differs, and the folder is listed again.
    changed = os.stat(folder).st_mtime_ns  # noqa: PTH116 - at every opening of a table
    # when a folder was changed last, and the folders in it, as they were when it was found to hold no symlink
    folders: LRUCache[tuple[int, list[str]]] = process_cache("folders")
    cached = folders.get(folder)
    if cached is None or cached[0] != changed:
        inside = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_symlink():
                    refuse_symlink(Path(entry.path))
                if entry.is_dir(follow_symlinks=False):
                    inside.append(entry.path)
        cached = (changed, inside)
        # Else the time may be the same after the next change.
        if time.time_ns() - changed > _TICK_NS:
            folders.put(folder, cached)
    for path in cached[1]:
        with contextlib.suppress(FileNotFoundError):
            _refuse_links(path)


def _walk(location: Location) -> Iterator[tuple[str, int]]:
    if not location.is_local:
        yield from ((key, size) for key, size, _ in location._objects())
        return
    root = location.checked_path()
    for folder, folders, names in os.walk(root):
        for name in [*folders, *names]:
            file = Path(folder, name)
            # `os.walk` lists symlinks to folders among `folders`, without following them.
            if file.is_symlink() or not (file.is_file() or name in folders):
                raise StoreError(f"{file} is no plain file; a store that is copied holds files and folders alone.")
        for name in names:
            file = Path(folder, name)
            yield file.relative_to(root).as_posix(), file.stat().st_size


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a local file in hex."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise NotFoundError(f"There is no file {os.fspath(path)}.") from error
    except OSError as error:
        raise StoreError(f"{os.fspath(path)} cannot be read: {error.strerror or error}.") from error
