"""Local copies of files and folders that lie elsewhere, to read them, and to write them before they are uploaded."""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from raggedatlas.errors import AtlasError, DuplicateError, LimitError, NotFoundError, StoreError
from raggedatlas.store.location import Address, Location, as_path
from raggedatlas.store.ranges import BLOCK
from raggedatlas.store.runtime import map_requests
from raggedatlas.store.storage_errors import failure, store_errors

MOST_COPIED = 8 << 30
"""Bytes of a file or folder that are copied to this machine at most, where it cannot be read by ranges."""

LAST = ("obs/", "__tiledb_group.tdb", "__group/", ".zmetadata", ".zgroup", "zarr.json")
"""What readers recognise a folder by: these files of its root are uploaded after all others, in this order, and removed first."""


@contextlib.contextmanager
def local_copy(address: Address, *, beside: Iterable[str] = ()) -> Iterator[Path]:
    """Give the local path of a file or folder; one that is remote is copied for as long as the block runs.

    `beside` names files in the same folder, which are copied as well where they exist. Whether a local path exists is
    not checked. Raises `LimitError` for more than `MOST_COPIED` bytes, before they are fetched.
    """
    path = as_path(address)
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
def naming(local: Path, path: Location) -> Iterator[None]:
    """Let messages of errors name a remote path, and not the local copy of it."""
    try:
        yield
    except AtlasError as error:
        error.args = tuple(
            each.replace(str(local), str(path)) if isinstance(each, str) else each for each in error.args
        )
        raise


def _fetch(path: Location, target: Path) -> None:
    """Copy a file, or a folder of an object store, to this machine; errors as of `local_copy`."""
    try:
        # What is listed already needs no request to tell a folder from a file.
        if path.is_web or not (path.is_listed and path.is_dir()):
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


def _fetch_file(path: Location, target: Path) -> None:
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


def _too_large(path: Location, n_bytes: int) -> LimitError:
    return LimitError(
        f"{path} has {n_bytes:,} bytes, and files of its kind are copied before they are read, up to {MOST_COPIED:,} bytes; download it and "
        "give the local path."
    )


def _local_parts(path: Location, key: str) -> list[str]:
    parts = key.split("/")
    if any(not part.strip(".") or "\\" in part or "\0" in part for part in parts):
        raise StoreError(f"{path} holds {key!r}, which is no name of a local file; rename it.")
    return parts


@contextlib.contextmanager
def local_target(address: Address, *, overwrite: bool = False) -> Iterator[Path]:
    """Give the local path to write a file or folder to; for an object store a temporary one, uploaded at the end.

    `overwrite` says whether what is in the object store may be replaced, which is checked before and after the block;
    for a local target the block decides. A web server is refused before anything is written.
    """
    path = as_path(address)
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


def refuse_target(path: Location, *, overwrite: bool) -> None:
    """Refuse a target that is on a web server, or that exists and may not be replaced."""
    if path.is_web:
        raise StoreError(
            f"{path} is on a web server, where nothing can be written; give a path, s3://, gs:// or az://."
        )
    # Asked of a path of its own: a path keeps what it has seen.
    if not overwrite and Location(path.uri, path.storage_options).exists():
        raise DuplicateError(f"{path} exists; choose another name, or pass overwrite=True to replace it.")


def upload(local: Path, target: Location) -> None:
    """Upload a file, which appears when it is complete, or a folder, whose root metadata come last.

    What was in the folder, and a file of its name, are removed before. If the store fails, what was uploaded of the
    folder is removed.
    """
    if not local.is_dir():
        _put_file(target, local)
        return
    listed = sorted(_rank(file.relative_to(local).as_posix()) for file in local.rglob("*") if file.is_file())
    before = Location(target.uri, target.storage_options)
    old = sorted((_rank(key) for key, _ in before.below()), reverse=True)
    # One call for each rank: a store removes the objects of one call in any order.
    for rank in range(len(LAST), -1, -1):
        _delete_below(target, [key for at, key in old if at == rank])
    # Readers would take a file of this name before the folder.
    _delete_below(target, [""])
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


def _put_file(path: Location, file: Path) -> None:
    import obstore

    store, key = path.bucket()
    with store_errors(f"write {path}"), file.open("rb") as opened:
        obstore.put(store, key, opened)


def _delete_below(path: Location, keys: Iterable[str]) -> None:
    import obstore

    listed = [(path / key).bucket()[1] for key in keys]
    if listed:
        with store_errors(f"remove {path}"), contextlib.suppress(FileNotFoundError):
            obstore.delete(path.bucket()[0], listed)
