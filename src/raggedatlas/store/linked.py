"""Arrays in files outside of the atlas: ranges of bytes of the recorded files, checked, and the chunks that they hold."""

import hashlib
import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, LimitError, NotFoundError, StaleSourceError, StoreError
from raggedatlas.model.arrays import ArraySpec
from raggedatlas.model.records import Link
from raggedatlas.store.codecs import ChunkDecoder
from raggedatlas.store.file_arrays import FileArray, Ranges, read_file
from raggedatlas.store.location import Location
from raggedatlas.store.ranges import explained, quoted_tag
from raggedatlas.store.references import References, SourceObjects
from raggedatlas.store.runtime import FETCH_THREADS, map_decode, map_fetches, map_requests, process_cache
from raggedatlas.store.storage_errors import store_errors

if TYPE_CHECKING:
    from obstore import GetOptions

REQUEST_SECONDS, BYTES_PER_SECOND = 0.03, 100e6
"""What a request takes before its first byte comes, and how many bytes come in a second: of object stores as they are usually reached."""

_MOST_BETWEEN = int(REQUEST_SECONDS / FETCH_THREADS * BYTES_PER_SECOND)
"""Bytes between two ranges that are fetched rather than asked for apart: as requests run side by side, one costs only its share of the time."""

REQUEST_BYTES = 8 << 20
"""Most bytes of one request; longer ranges are several, side by side."""

_HELD_BYTES = 64 << 20
"""Bytes of all requests from which on fewer of them run at once, since their answers are held in memory."""

LOCAL_BYTES = 8 << 20
"""Bytes of a local file that one thread reads before it takes the next part."""

PROBE_BYTES = 4096
"""Bytes at the beginning and at the end of a file that tell it from another of the same size and time."""

_SLACK_BYTES = 64 * 2**10
_MODIFIED_WITHIN = 10**6
"""Nanoseconds by which a time may differ that was once written as text."""

_OPEN_FLAGS = (
    os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)  # waits for no FIFO
)  # fmt: skip

Stamp: TypeAlias = tuple[int, int, int, int]
"""What tells a local file from another: device, inode, size, time of the last change."""


@dataclass(frozen=True)
class LinkedSource:
    """The file or Zarr folder that a dataset is linked to, as this process reaches it."""

    location: Location
    dataset: str  # name of the dataset, for messages
    # Whether these are the copies that `sync` made in a mirror, which have the recorded content, other times and ETags.
    is_copy: bool = False

    @property
    def remedy(self) -> str:
        """What to do where the file is not as it should be, as a sentence."""
        if self.is_copy:
            return "This copy is part of a mirror; delete it and repeat sync(values=True) of the original atlas."
        return (
            f"Put an unchanged copy of the file there, or name one with atlas.relink({self.dataset!r}, path); otherwise drop the dataset "
            "and add the file again."
        )

    def name_array(self, array: str) -> str:
        """Return an array with its file and dataset, for messages."""
        return f"{array} in {self.location} (linked by the dataset {self.dataset!r})"

    def shown(self, key: str) -> str:
        """Return the address of one of its objects, for messages."""
        return f"{self.location}/{key}" if key else str(self.location)


def open_linked(location: Location, spec: ArraySpec, source: LinkedSource, decoder: ChunkDecoder | None) -> FileArray:
    """Look up the chunks of a linked array.

    `location` is the Zarr store of the atlas, which has the references; `decoder` is None where chunks of this kind
    cannot be decoded.
    """
    link = spec.linked
    assert link is not None
    if decoder is None:
        raise StoreError(
            f"{link.array} in {source.location} is stored with {spec.codecs}, which is not read where it is; drop the dataset "
            f"{source.dataset!r} and add the file with copy=True."
        )
    references = load_references(location, link)
    where = f"The references of {link.array} in {source.location} ({link.references.file})"
    table = references.arrays.get(link.array)
    if table is None:
        raise CorruptError(f"{where} do not name it; restore them from a copy, or link the dataset again.")
    dtype, chunk_shape = np.dtype(spec.dtype), spec.chunk_shape
    n_stored, n_chunks = len(table.sizes), math.prod(-(-n // c) for n, c in zip(spec.shape, chunk_shape, strict=True))
    # One piece that has as many bytes as the array. If nothing is stored of it, it is told by the missing chunks.
    is_all = n_stored == 1 and table.sizes[0] == dtype.itemsize * math.prod(spec.shape)
    if decoder.is_plain and (is_all or (n_stored == 1 != n_chunks and table.sizes[0] < 0)):
        chunk_shape = tuple(max(1, n) for n in spec.shape)
    elif n_stored != n_chunks:
        raise CorruptError(
            f"{where} have {n_stored:,} chunks, but it is declared with {n_chunks:,}; restore them from a copy, or link the dataset again."
        )
    # A chunk may be kept longer than the reader lives, and is found by all that it depends on.
    key = source.location.uri, link.sha256, link.array, spec.shape, spec.dtype, chunk_shape, spec.codecs
    fetch = partial(fetch_ranges, source, references.objects)
    fault, kept = partial(damaged_chunk, source, link.array), process_cache("chunks")
    return FileArray(spec.shape, dtype, chunk_shape, table, decoder, spec.fill(), fetch, fault, kept, key)


def damaged_chunk(source: LinkedSource, array: str, number: int, fault: str) -> CorruptError:
    """Return the error of a chunk that does not decode."""
    return CorruptError(
        f"Chunk {number} of {source.name_array(array)} is damaged: {fault.rstrip('.')}. {source.remedy}"
    )


def load_references(location: Location, link: Link) -> References:
    """Return the references of a source, which the process keeps by their hash."""
    span = link.references

    def load() -> References:
        where = f"{location}/{span.file}"
        try:
            data = location.read_range(span.file, span.offset, span.n_bytes)
        except NotFoundError:
            raise CorruptError(
                f"The references in {where} are missing; restore the file from a copy, or link the dataset again."
            ) from None
        if hashlib.sha256(data).hexdigest() != link.sha256:
            raise CorruptError(
                f"The references in {where} do not match their SHA-256; restore the file from a copy, or link the dataset again."
            )
        return References.from_bytes(data, where)

    found: References = process_cache("references").get_or_make(link.sha256, load)
    return found


def keep_references(sha256: str, references: References) -> None:
    """Keep references that are not stored yet, so that arrays of their source can be read."""
    process_cache("references").get_or_make(sha256, lambda: references)


def check_sizes(source: LinkedSource, array: FileArray, name: str, numbers: NDArray[np.int64]) -> None:
    """Refuse chunks that are larger than they can be, or stored as they are in another size, before memory is taken for them."""
    sizes = array.table.sizes[numbers]
    stored = sizes[sizes >= 0]
    if array.decoder.is_plain:
        if (stored != array.n_bytes).any():
            raise CorruptError(
                f"A chunk of {name} has {int(stored[stored != array.n_bytes][0]):,} bytes according to its references; its shape needs "
                f"{array.n_bytes:,}. Link the dataset {source.dataset!r} again."
            )
    elif stored.size and stored.max() > 2 * array.n_bytes + _SLACK_BYTES:
        raise LimitError(
            f"A chunk of {name} has {int(stored.max()):,} bytes according to its references and decodes to {array.n_bytes:,}; no codec makes "
            f"that of it. The references are damaged or made to exhaust memory; link the dataset {source.dataset!r} again."
        )


def file_probe(read: Callable[[int, int], bytes], n_bytes: int) -> str:
    """Return the SHA-256 of the first and the last bytes of a file, `PROBE_BYTES` each.

    `read` takes an offset and a number of bytes. All bytes of a file shorter than `PROBE_BYTES` are hashed twice.
    """
    n = min(n_bytes, PROBE_BYTES)
    return hashlib.sha256(read(0, n) + read(n_bytes - n, n)).hexdigest()


def fetch_ranges(source: LinkedSource, objects: SourceObjects, ranges: Ranges, touched: Sequence[int] = ()) -> None:
    """Read ranges of bytes of the recorded files, several at once.

    `objects` are the files as they were when they were linked; `touched` are those whose values are already held, which
    are compared too where that takes no request. Raises `StaleSourceError` if a file is not the recorded one; what was
    written is then of no use.
    """
    local = source.location.is_local
    numbers = sorted({*np.unique(ranges.numbers).tolist(), *(touched if local else ())})
    for number in numbers:
        _check_key(source, objects.keys[number])
    stamps = {number: _look_up(source, objects, number) for number in numbers} if local else {}
    # Names and times can be the same although the content is not. The strong ETag of a store says as much.
    ends: Ranges | None = None
    seen: tuple[object, ...] = ()
    compared = local or source.is_copy or not (objects.etags and _is_strong(objects.etags[0]))
    if objects.probe and compared and numbers == [0] and len(objects.keys) == 1:
        n_bytes, etag = int(objects.n_bytes[0]), objects.etags[0]
        seen = source.location.uri, n_bytes, int(objects.modified[0]), etag, objects.probe, *stamps.values()
        if not process_cache("probed").get(seen):
            n = min(n_bytes, PROBE_BYTES)
            offsets, targets = np.array([0, n_bytes - n]), np.array([0, n])
            ends = Ranges.of(np.zeros(2), offsets, np.full(2, n), targets, np.empty(2 * n, np.uint8))
    wanted = [part.ordered() for part in (ranges, *([ends] if ends else ()))]
    if local:
        jobs = [job for part in wanted for job in part.jobs(LOCAL_BYTES)]
        map_decode(lambda job: _read_local(source, objects, job, stamps[int(job.numbers[0])][0]), jobs)
    else:
        jobs = [job for part in wanted for job in _joined(part)]
        total = sum(int(job.sizes.sum()) for job in jobs)
        (map_fetches if total <= _HELD_BYTES else map_requests)(lambda job: _read_remote(source, objects, job), jobs)
    if ends is not None:
        first, last = (half.tobytes() for half in np.split(ends.room, 2))
        if file_probe(lambda offset, _: last if offset else first, int(objects.n_bytes[0])) != objects.probe:
            raise _stale(source, objects, 0, "its size and time are those recorded, but it begins or ends differently")
        process_cache("probed").put(seen, value=True)


def iterate_object(source: LinkedSource, objects: SourceObjects, number: int) -> Iterator[memoryview]:
    """Read one of the recorded files from its beginning to its end.

    Yields at most 8 MiB at once, or 64 MiB of a source that is one file, as those of several are read side by side.
    """
    n_bytes, step = int(objects.n_bytes[number]), REQUEST_BYTES if len(objects.keys) > 1 else _HELD_BYTES
    for start in range(0, n_bytes, step):
        room = np.empty(min(step, n_bytes - start), np.uint8)
        part = Ranges.of(np.array([number]), np.array([start]), np.array([len(room)]), np.zeros(1), room)
        fetch_ranges(source, objects, part)
        yield room.data


def _is_strong(etag: str) -> bool:
    """Tell whether an ETag stands for the bytes of an object; a weak one does not."""
    return bool(etag) and not etag.startswith("W/")


def _check_key(source: LinkedSource, key: str) -> None:
    """Refuse a key that leads out of its source."""
    # A backslash and a colon mean something on Windows only, where they would lead out.
    parts = key.split("/")
    bad = any(part in {"", ".", ".."} for part in parts) or "\0" in key or (os.name == "nt" and set("\\:") & set(key))
    if key and bad:
        raise CorruptError(
            f"The references of the dataset {source.dataset!r} name {key!r}, which is not below {source.location}; they are damaged or "
            "made to read other files. Drop the dataset."
        )


def _stale(source: LinkedSource, objects: SourceObjects, number: int, what: str) -> StaleSourceError:
    return StaleSourceError(
        f"The dataset {source.dataset!r} is linked to {source.shown(objects.keys[number])}, which is not the file that was linked: "
        f"{what}. {source.remedy}"
    )


def _compare(source: LinkedSource, objects: SourceObjects, number: int, *, size: int, modified: int) -> None:
    """Refuse a file of another size, or written at another time where that is known."""
    recorded, then = int(objects.n_bytes[number]), int(objects.modified[number])
    if size != recorded:
        raise _stale(source, objects, number, f"it has {size:,} bytes instead of {recorded:,}")
    if then and not source.is_copy and abs(modified - then) > _MODIFIED_WITHIN * (not source.location.is_local):
        times = [_shown_time(t) for t in (modified, then)]
        raise _stale(source, objects, number, f"it was written on {times[0]} instead of {times[1]}")


def _shown_time(nanoseconds: int) -> str:
    try:
        return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(sep=" ")
    except (ValueError, OverflowError, OSError):
        # Of a year that has more than four digits.
        return f"second {nanoseconds // 10**9:,} after 1970"


def _compare_local(source: LinkedSource, objects: SourceObjects, number: int, info: os.stat_result) -> Stamp:
    if not stat.S_ISREG(info.st_mode):
        raise _stale(source, objects, number, "it is no regular file")
    _compare(source, objects, number, size=info.st_size, modified=info.st_mtime_ns)
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def _may_be_symlink(source: LinkedSource, key: str) -> bool:
    """Return whether a symlink is followed: only where the user named it, and not below a folder or in the atlas."""
    return not key and not source.is_copy


def _path(source: LinkedSource, key: str) -> Path:
    return source.location.path / key if key else source.location.path


def _look_up(source: LinkedSource, objects: SourceObjects, number: int) -> tuple[Stamp, int]:
    """Compare a local file with its record without opening it; also return when its entry was changed, which tells when it was exchanged."""
    key = objects.keys[number]
    try:
        with store_errors(f"read {source.shown(key)}, to which the dataset {source.dataset!r} is linked"):
            info = _path(source, key).stat(follow_symlinks=_may_be_symlink(source, key))
    except FileNotFoundError:
        raise _stale(source, objects, number, "it is missing") from None
    return _compare_local(source, objects, number, info), info.st_ctime_ns


def _read_local(source: LinkedSource, objects: SourceObjects, job: Ranges, stamp: Stamp) -> None:
    """Read ranges of one local file, which must be the recorded one before and after."""
    number = int(job.numbers[0])
    key = objects.keys[number]
    flags = _OPEN_FLAGS | (0 if _may_be_symlink(source, key) else getattr(os, "O_NOFOLLOW", 0))
    try:
        with (
            store_errors(f"read {source.shown(key)}, to which the dataset {source.dataset!r} is linked"),
            os.fdopen(os.open(_path(source, key), flags), "rb", buffering=0) as file,
        ):

            def check() -> None:
                if _compare_local(source, objects, number, os.fstat(file.fileno())) != stamp:
                    raise _stale(source, objects, number, "it was replaced while it was read")

            check()
            complete = read_file(file.fileno(), job)
            # What was read is of the recorded file only if nobody wrote to it meanwhile.
            check()
            if not complete:
                raise _stale(source, objects, number, "it ends within a chunk")
    except FileNotFoundError:
        raise _stale(source, objects, number, "it is missing") from None


def _joined(ranges: Ranges) -> list[Ranges]:
    """Divide ordered ranges into requests: neighbours share one if the bytes between them cost less than another."""
    parts = ranges.split(REQUEST_BYTES)
    edges: list[int] = []
    start = end = last = -1
    columns = (column.tolist() for column in (parts.numbers, parts.offsets, parts.offsets + parts.sizes))
    for i, (number, offset, stop) in enumerate(zip(*columns, strict=True)):
        near = number == last and offset - end <= _MOST_BETWEEN
        if near and max(stop, end) - start <= REQUEST_BYTES:
            end = max(end, stop)
        else:
            edges.append(i)
            last, start, end = number, offset, stop
    return [parts.take(slice(first, stop)) for first, stop in pairwise([*edges, len(parts)])]


def _read_remote(source: LinkedSource, objects: SourceObjects, job: Ranges) -> None:
    """Read neighbouring ranges of one remote object in one request."""
    start, stop = int(job.offsets[0]), int((job.offsets + job.sizes).max())
    data = np.frombuffer(_request(source, objects, int(job.numbers[0]), start, stop), np.uint8)
    for offset, size, target in zip(job.offsets.tolist(), job.sizes.tolist(), job.targets.tolist(), strict=True):
        job.room[target : target + size] = data[offset - start : offset - start + size]


def _request(source: LinkedSource, objects: SourceObjects, number: int, start: int, stop: int) -> memoryview:
    """Request bytes of a remote object, on the condition that it is the recorded one."""
    import obstore
    from obstore.exceptions import BaseError, PreconditionError

    key, etag = objects.keys[number], "" if source.is_copy else objects.etags[number]
    shown = source.shown(key)
    store, name = (source.location / key if key else source.location).bucket()
    # Servers compare weak ETags with none.
    options: GetOptions = {"range": (start, stop)}
    if _is_strong(etag):
        options["if_match"] = etag
    try:
        with store_errors(f"read {shown}, to which the dataset {source.dataset!r} is linked"):
            try:
                try:
                    answer = obstore.get(store, name, options=options)
                except PreconditionError:
                    # A server whose ETags lack their quotes takes none for its own. What it answers is compared below.
                    answer = obstore.get(store, name, options={"range": (start, stop)})
                meta, data = answer.meta, memoryview(answer.bytes())
            except BaseError as error:
                if "status code: 416" in str(error):
                    raise _stale(source, objects, number, "it is shorter") from None
                raise explained(shown, error) from error
    except FileNotFoundError:
        raise _stale(source, objects, number, "it is missing") from None
    if etag and (found := quoted_tag(meta["e_tag"] or "")) != etag:
        raise _stale(source, objects, number, f"its ETag is {found or 'missing'} instead of {etag}")
    # Where a strong ETag says that the bytes are the same, it does not matter when they were put there.
    written = (meta["last_modified"] - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000
    modified = int(objects.modified[number]) if _is_strong(etag) else written
    _compare(source, objects, number, size=int(meta["size"]), modified=modified)
    if len(data) != stop - start:
        raise StoreError(
            f"{shown}: the server sent {len(data):,} of {stop - start:,} bytes at byte {start:,}; run it again."
        )
    return data
