"""Putting the files of a store in place: all of them, or none."""

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

from raggedatlas.errors import DuplicateError, NameRefusedError
from raggedatlas.store.location import Location, store_errors
from raggedatlas.store.read import forget_indexes
from raggedatlas.store.runtime import map_requests
from raggedatlas.vectors.zarr_nodes import File

_PUT_BATCH = 64
_PUT_BATCH_BYTES = 64 << 20
"""How many objects, and bytes of them, are put together: memory is bounded by these."""


def publish_files(location: Location, files: Iterable[File], *, overwrite: bool) -> None:
    """Write files below a location so that readers see all of them or none.

    A local folder is staged beside its place and moved there. In an object store the root's ``zarr.json`` is written last,
    and what was written is removed again if something fails.

    Raises
    ------
    DuplicateError
        If something is there and `overwrite` is not asked.
    StoreError
        If the place cannot be written.
    """
    if not overwrite and location.exists():
        raise DuplicateError(
            f"There is something at {location.uri} already; choose another place, or pass overwrite=True."
        )
    if location.is_local:
        _publish_local(location, files)
    else:
        _publish_remote(location, files)


def _publish_local(location: Location, files: Iterable[File]) -> None:
    """Stage a folder, and move it to its name."""
    target = location.checked_path()
    mark = uuid4().hex[:8]
    stage, old = (target.with_name(f".{target.name}.{mark}.{end}") for end in ("tmp", "old"))
    with store_errors(f"write {location.uri}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_all(stage, files)
            if target.exists():
                target.rename(old)
            stage.rename(target)
        except BaseException:
            if old.exists() and not target.exists():
                old.rename(target)
            shutil.rmtree(stage, ignore_errors=True)
            raise
    shutil.rmtree(old, ignore_errors=True)


def _write_all(stage: Path, files: Iterable[File]) -> None:
    """Write files below a fresh folder."""
    stage.mkdir()
    made: set[str] = set()
    for key, pieces in files:
        path = f"{stage}/{validate_key(key)}"
        folder = path.rpartition("/")[0]
        if folder not in made:
            Path(folder).mkdir(parents=True, exist_ok=True)
            made.add(folder)
        with open(path, "xb", buffering=0) as file:  # noqa: PTH123 - thousands of them
            _write_pieces(file.fileno(), pieces)


def _write_pieces(descriptor: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write pieces one after the other, many in one call."""
    waiting = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    at = 0
    while at < len(waiting):
        written = os.writev(descriptor, waiting[at : at + 512])
        while at < len(waiting) and written >= len(waiting[at]):
            written -= len(waiting[at])
            at += 1
        if written:
            waiting[at] = waiting[at][written:]


def _publish_remote(location: Location, files: Iterable[File]) -> None:
    """Put objects, the root's metadata last; a store that was there loses its root first."""
    import obstore

    store = location.store()
    last: bytes | None = None
    waiting: list[tuple[str, bytes]] = []

    def put(waiting: list[tuple[str, bytes]]) -> None:
        map_requests(lambda item: obstore.put(store, *item), waiting)
        waiting.clear()

    if location.exists():
        with contextlib.suppress(FileNotFoundError):
            obstore.delete(store, "zarr.json")
        location.delete_prefix()
        forget_indexes(location)
    try:
        with store_errors(f"write {location.uri}"):
            for key, pieces in files:
                data = b"".join(pieces)
                if key == "zarr.json":
                    last = data
                    continue
                waiting.append((validate_key(key), data))
                if len(waiting) == _PUT_BATCH or sum(len(data) for _, data in waiting) >= _PUT_BATCH_BYTES:
                    put(waiting)
            put(waiting)
            if last is not None:
                obstore.put(store, "zarr.json", last)
    except BaseException:
        location.delete_prefix()
        raise


def validate_key(key: str) -> str:
    """Return a key after refusing parts that could leave the store."""
    for part in key.split("/"):
        if (
            not part
            or part.startswith(".")
            or part in {".", ".."}
            or any(ord(sign) < 32 or sign in '\\:*?"<>|' for sign in part)
        ):
            raise NameRefusedError(
                f"{part!r} may not become part of a path in a store; expected a name without slashes, colons, quotes, "
                "question marks, stars or control characters that does not begin with a dot."
            )
    return key
