"""Locations: a local folder or an object-store prefix, and reading, writing, listing and hashing the files below it."""

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from raggedatlas.errors import CorruptError, MissingFileError, NameRefusedError, NotFoundError, StoreError
from raggedatlas.store.codecs import Buffers, Piece
from raggedatlas.store.disk_cache import CACHE_OPTIONS, DiskCache, parse_size
from raggedatlas.store.runtime import LRUCache, process_cache
from raggedatlas.store.storage_errors import failure, is_missing_bucket, plain_reason

if TYPE_CHECKING:
    from obstore.store import ObjectStore
    from zarr.abc.store import Store

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
"""What one part of a path below a location may look like."""

REMOTE_SCHEMES = ("s3", "gs", "az")

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


@cache
def _first_user() -> int:
    """Return the pid of the process that used an object store first; a forked child inherits it."""
    return os.getpid()


@dataclass(frozen=True)
class Location:
    """A place for bytes: a local folder or a prefix of an object store; frozen and picklable.

    Parameters
    ----------
    uri : str
        A path (made absolute, ``~`` expanded), ``file://``, ``s3://bucket/prefix``, ``gs://`` or ``az://``.
    storage_options : mapping of str to str
        Credentials and endpoint of an object store, and the disk cache for it, by the names in `OPTION_NAMES`. What is not given
        is taken from the environment by the libraries themselves.

    Raises
    ------
    StoreError
        If the scheme or an option is unknown.

    Examples
    --------
    >>> Location("s3://atlases/lung").child("zarr_store").uri
    's3://atlases/lung/zarr_store'
    """

    uri: str
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    # Number of parts that `child` added, among which `checked_path` refuses symlinks; not compared.
    depth: int = field(default=0, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Normalise the URI and check the option names."""
        uri = os.fspath(self.uri)
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
        elif scheme in {"", "file"}:
            uri = os.path.abspath(parse_local(uri))  # noqa: PTH100 - must not resolve symlinks
        else:
            raise StoreError(f"{uri!r} has the scheme {scheme!r}; expected a path, file://, s3://, gs:// or az://.")
        unknown = sorted(set(self.storage_options) - set(OPTION_NAMES))
        if unknown:
            raise StoreError(f"Unknown storage option {unknown[0]!r} for {uri}; known are {', '.join(OPTION_NAMES)}.")
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
        """Return the location of an address passed by a user.

        Raises
        ------
        StoreError
            If the address is neither text nor a path, or the options are no mapping.
        """
        if isinstance(address, Location):
            return address
        if not isinstance(address, str | os.PathLike):
            raise StoreError(f"{address!r} is no address; expected a path or a URI, e.g. 's3://bucket/prefix'.")
        if not isinstance(storage_options or {}, Mapping):
            raise StoreError(
                f"Storage options are a mapping of names to texts, e.g. {{'aws_region': 'eu-central-1'}}; got a "
                f"{type(storage_options).__name__}."
            )
        return cls(os.fspath(address), dict(storage_options or getattr(address, "storage_options", {})))

    @property
    def is_local(self) -> bool:
        """Whether the location is a local folder."""
        return "://" not in self.uri

    @property
    def path(self) -> Path:
        """The local folder; `StoreError` for an object store."""
        if not self.is_local:
            raise StoreError(f"{self.uri} is an object store and has no local path.")
        return Path(self.uri)

    @property
    def name(self) -> str:
        """The last part of the URI."""
        return self.uri.rstrip("/").rsplit("/", 1)[-1]

    @property
    def prefix(self) -> str:
        """The part of an object-store URI after the bucket, without slashes at its ends."""
        return urlsplit(self.uri).path.strip("/")

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
        key = (self.uri, retries is None, *sorted(self.lance_options().items()))
        return stores.get_or_make(key, lambda: _open_remote(self, retries))

    def zarr_store(self, *, read_only: bool = True) -> "Store":
        """Return the zarr-python store rooted here."""
        from zarr.storage import LocalStore, ObjectStore

        if self.is_local:
            return LocalStore(self.checked_path(), read_only=read_only)
        return cast("Store", ObjectStore(self.store(), read_only=read_only))

    def lance_uri(self) -> str:
        """Return the URI in Lance's spelling."""
        return self.uri

    def lance_options(self) -> dict[str, str]:
        """Return the storage options in Lance's spelling."""
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
        return None if self.is_local else DiskCache.of_options(self.storage_options)

    def uncached(self) -> "Location":
        """Return the same location without its disk cache."""
        if self.disk_cache is None:
            return self
        return replace(self, storage_options={**self.storage_options, "cache_dir": ""})

    def exists(self) -> bool:
        """Return whether there is any file below."""
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
                    self._file(key).unlink(missing_ok=True)
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
        freed = self.size()
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
            keys = [key for key, _, _ in self._objects()]
            if keys:
                obstore.delete(self.store(), keys)
        return freed

    def read_bytes(self, key: str) -> bytes:
        """Return the bytes of one object.

        Raises
        ------
        NotFoundError
            If there is no such object.
        """
        try:
            with store_errors(f"read {self.uri}/{key}"):
                if self.is_local:
                    return self._file(key).read_bytes()
                import obstore

                return bytes(obstore.get(self.store(), _checked_key(self, key)).bytes())
        except FileNotFoundError:
            raise NotFoundError(f"There is no {key!r} in {self.uri}.") from None

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
    """Refuse a symlink inside a store: it would lead reads and writes out of it.

    Raises
    ------
    StoreError
        If the path is one.
    """
    if path.is_symlink():
        raise StoreError(
            f"{path} is a symlink; inside a store only real files and folders are read or written. Replace it by what it points to."
        )


@contextlib.contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Convert errors of the operating system and of obstore to `StoreError`, `MissingFileError` where a file or object is missing."""
    from obstore.exceptions import BaseError

    try:
        yield
    # `StoreError` is an `OSError` too: in nested contexts the message of the inner one stays.
    except StoreError:
        raise
    except FileNotFoundError as error:
        # Callers take `MissingFileError` as "nothing is there", which is not true of a bucket that does not exist.
        if is_missing_bucket(error):
            raise StoreError(f"Could not {what}: {failure(error)}") from error
        raise MissingFileError(f"Could not {what}: there is no such file, object or folder.") from error
    except (OSError, BaseError) as error:
        raise StoreError(f"Could not {what}: {failure(error)}") from error


def probe_conditional_puts(location: Location) -> None:
    """Refuse a place that cannot hold an atlas: a store that ignores create-if-absent, or a read-only folder.

    Such a store loses rows without a word when two writers meet, so it is tried once, when an atlas is created.

    Raises
    ------
    StoreError
        Naming the store and the way out.
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

    Raises
    ------
    StoreError
        If it is empty, names a host, holds a name that file systems do not take, or there is no such home.

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
    from obstore.store import AzureStore, GCSStore, S3Store

    scheme, bucket = location.uri.split("://", 1)[0], urlsplit(location.uri).netloc
    makers: dict[str, tuple[Any, dict[str, str]]] = {
        "s3": (S3Store, S3_OPTIONS),
        "gs": (GCSStore, GCS_OPTIONS),
        "az": (AzureStore, AZURE_OPTIONS),
    }
    make, names = makers[scheme]
    given = location.storage_options
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
    """List all files below a location as sorted (key, size) pairs.

    Raises
    ------
    StoreError
        If one of them is not a regular file.
    """
    return sorted(_walk(location))


def digest_file(location: Location, key: str) -> tuple[int, str]:
    """Read one file in blocks and return its size and its SHA-256.

    Raises
    ------
    NotFoundError
        If there is no such file.
    StoreError
        If it cannot be read, or is a symlink.

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
    """Yield the bytes of one file in blocks.

    Raises
    ------
    NotFoundError
        If there is no such file.
    """
    # Keys of geometry stores hold names that `child` does not allow, such as ``+1.0``.
    parts = key.split("/")
    if any(not part.strip(".") or "\\" in part for part in parts):
        raise NameRefusedError(f"{key!r} is no file below {location.uri}: a part is empty or leads out of it.")
    try:
        with store_errors(f"read {location.uri}/{key}"):
            if location.is_local:
                path = location.checked_path()
                for part in parts:
                    refuse_symlink(path := path / part)
                with path.open("rb") as opened:
                    while block := opened.read(_PIECE):
                        yield block
            else:
                import obstore

                for fetched in obstore.get(location.store(), key).stream(min_chunk_size=_PIECE):
                    yield memoryview(fetched)
    except FileNotFoundError:
        raise NotFoundError(f"There is no {key!r} in {location.uri}.") from None


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
    content = hashlib.sha256()
    n_bytes = 0
    files = list_files(location)
    for key, _ in files:
        size, digest = digest_file(location, key)
        n_bytes += size
        # Name and length are delimited, so bytes that move from one file to the next change the digest.
        content.update(f"{key}\0{size}\0".encode())
        content.update(bytes.fromhex(digest))
    return len(files), n_bytes, content.hexdigest()


def refuse_symlinks(location: Location) -> None:
    """Refuse a local tree that holds a symlink; folders that have not changed since are not listed again.

    Raises
    ------
    StoreError
        Naming the symlink.
    """
    if location.is_local:
        with store_errors(f"list {location.uri}"), contextlib.suppress(FileNotFoundError):
            _refuse_links(str(location.checked_path()))


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
    """Return the SHA-256 of a file in hex.

    Raises
    ------
    NotFoundError
        If there is no such file.
    StoreError
        If it cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise NotFoundError(f"There is no file {os.fspath(path)}.") from error
    except OSError as error:
        raise StoreError(f"{os.fspath(path)} cannot be read: {error.strerror or error}.") from error
