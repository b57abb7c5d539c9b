"""Files in object stores and on web servers as file objects, which fetch ranges through a cache of blocks."""

import contextlib
import gc
import io
import os
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from raggedatlas.errors import AtlasError, NotFoundError, StoreError
from raggedatlas.store.runtime import share, submit_request
from raggedatlas.store.storage_errors import store_errors

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

BLOCK = 1 << 20
"""Bytes of one block of the cache; requests fetch complete blocks."""

SMALL_BLOCK = 1 << 14
"""Bytes of one block where only what a file says of itself is read, which lies all over it."""

_REQUEST_BYTES = 4 << 20
"""Most bytes of one request: neighbouring blocks are fetched together up to this size, larger spans by several requests at once."""

BRIDGED_BYTES = 1 << 16
"""Bytes that are held, or not wanted, between blocks of one request: another request would take longer than fetching them."""

CACHE_BYTES = 128 << 20
"""Bytes of one file that are held at most."""

NEAR_BYTES = 1 << 17
"""Bytes that are fetched in small blocks next to some that are held: what a file says of its members lies together, but for its indexes."""

AHEAD_BYTES = 8 << 20
"""Bytes that are read ahead at most where a file is read from one block to the next."""

LOADED_BYTES = 32 << 20
"""Bytes that one long read asks for at once: a quarter of the cache, so that readers do not push out each other's blocks."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

STEP_SECONDS, PATIENCE_STEPS = 0.001, 2_000
"""How often is looked for a block that is on its way, and how many times before it is fetched anew."""


class ObjectFacts(NamedTuple):
    """What a store or server says of an object."""

    n_bytes: int
    modified: int  # when it was written, in whole seconds since 1970 (UTC), as nanoseconds; 0 where that is not known
    etag: str  # empty where there is none

    @classmethod
    def of(cls, meta: "ObjectMeta") -> "ObjectFacts":
        """Take them from what obstore returns with an object or lists of it."""
        # Listings have milliseconds, answers to requests for the object have seconds.
        seconds = (meta["last_modified"] - _EPOCH) // timedelta(seconds=1)
        return cls(meta["size"], seconds * 10**9, quoted_tag(meta["e_tag"] or ""))

    def is_same(self, other: "ObjectFacts") -> bool:
        """Return whether both are of one version of an object: by the ETag, and without one by the time."""
        return self.n_bytes == other.n_bytes and self.etag == other.etag and (bool(self.etag) or self == other)


def quoted_tag(tag: str) -> str:
    """Return an ETag with the quotes that are part of it, which listings of some stores and some servers leave out.

    Examples
    --------
    >>> quoted_tag("abc"), quoted_tag('"abc"'), quoted_tag("W/abc")
    ('"abc"', '"abc"', 'W/"abc"')
    """
    if not tag or tag.endswith('"'):
        return tag
    return f'W/"{tag[2:]}"' if tag.startswith("W/") else f'"{tag}"'


class Blocks:
    """The blocks of one remote file that are held, and the numbers of those on their way.

    Opening fetches the first block; `facts` is what this answer said of the file. `shown` is its address in messages,
    `block` the number of bytes of one block. Blocks that were fetched first are removed first.

    Without locks: h5py calls a file object while it holds the lock of its library. A thread that would wait there for a
    lock of ours never gets it if its holder, in a collection of garbage, waits for that of h5py. Operations on one key
    of a dictionary are atomic, and two threads that fetch one block store equal bytes.
    """

    def __init__(self, store: "ObjectStore", key: str, shown: str, block: int = BLOCK) -> None:
        self._store, self._key, self.shown, self.block = store, key, shown, block
        self._held: dict[int, memoryview] = {}
        self._coming: set[int] = set()
        # One request opens a file: the response with the first block has the size.
        head, self.facts = self._get(0, block)
        self.size = self.facts.n_bytes
        if len(head) != min(self.size, block):
            raise StoreError(
                f"{shown}: the server sent {len(head):,} of {min(self.size, block):,} bytes; the file was cut short there."
            )
        self._keep(0, memoryview(head))

    def load(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Begin to fetch the blocks of byte ranges ``(offset, length)`` that are not held, several requests at once."""
        wanted = {
            block
            for offset, length in ranges
            for block in range(offset // self.block, -(-min(offset + length, self.size) // self.block))
        }
        self._load(_spans([block for block in sorted(wanted) if not self.holds(block)], self.block))

    def _load(self, spans: Iterable[range]) -> None:
        for span in spans:
            self._coming.update(block for block in span if block not in self._held)
            submit_request(self._try, span)

    def read_into(self, offset: int, room: memoryview) -> int:
        """Copy bytes to `room`; return their number, fewer at the end of the file."""
        n_bytes = max(0, min(len(room), self.size - offset))
        done = 0
        while done < n_bytes:
            block, start = divmod(offset + done, self.block)
            part = self._block(block, -(-(start + n_bytes - done) // self.block))[start : start + n_bytes - done]
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
        near = NEAR_BYTES // self.block
        # As many ahead as are held before it: a file is read in order, as a long index is, also by turns with other parts of it.
        ahead = 1
        while ahead < AHEAD_BYTES // self.block and ahead <= block and self.holds(block - ahead):
            ahead += 1
        if any(self.holds(other) for other in range(block - near, block + near)):
            ahead = max(ahead, near)
        n_blocks = min(max(n_blocks, ahead), (_REQUEST_BYTES + LOADED_BYTES) // self.block)
        stop = min(block + n_blocks, -(-self.size // self.block))
        own, *others = _spans([block, *(i for i in range(block + 1, stop) if not self.holds(i))], self.block)
        self._load(others)
        return self._fetch(own)[: self.block]

    def _try(self, span: range) -> None:
        # An error is raised to who reads the block, who then fetches it again.
        try:
            self._fetch(span)
        except AtlasError:
            pass
        finally:
            self._coming.difference_update(span)

    def _fetch(self, span: range) -> memoryview:
        start, stop = span.start * self.block, min(span.stop * self.block, self.size)
        data, facts = self._get(start, stop)
        if not facts.is_same(self.facts):
            raise StoreError(f"{self.shown} was replaced while it was read; run it again.")
        if len(data) != stop - start:
            raise StoreError(
                f"{self.shown}: the server sent {len(data):,} of {stop - start:,} bytes at byte {start:,}; the file was cut short there."
            )
        whole = memoryview(data)
        self._keep(span.start, whole)
        return whole

    def _keep(self, first: int, whole: memoryview) -> None:
        for i in range(-(-len(whole) // self.block)):
            self._held[first + i] = whole[i * self.block : (i + 1) * self.block]
        while len(self._held) > CACHE_BYTES // self.block:
            # Another thread may remove the same one, or add one between the two calls.
            with contextlib.suppress(RuntimeError, StopIteration):
                self._held.pop(next(iter(self._held)), None)

    def _get(self, start: int, stop: int) -> tuple[bytes, "ObjectFacts"]:
        """Return bytes of the object, and what the answer says of it."""
        import obstore
        from obstore.exceptions import BaseError

        try:
            with store_errors(f"read {self.shown}"):
                try:
                    answer = obstore.get(self._store, self._key, options={"range": (start, stop)})
                    return memoryview(answer.bytes()).tobytes(), ObjectFacts.of(answer.meta)
                except BaseError as error:
                    raise explained(self.shown, error) from error
        except FileNotFoundError:
            raise NotFoundError(f"There is no file {self.shown}; check the address.") from None


def _spans(blocks: list[int], size: int) -> list[range]:
    """Join neighbouring blocks of a size into requests of at most `_REQUEST_BYTES`."""
    most, gap = _REQUEST_BYTES // size, BRIDGED_BYTES // size
    spans: list[range] = []
    for block in blocks:
        if spans and block - spans[-1].stop <= gap and block - spans[-1].start < most:
            spans[-1] = range(spans[-1].start, block + 1)
        else:
            spans.append(range(block, block + 1))
    return spans


def explained(path: str, error: BaseException) -> BaseException:
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

    All open files of one `Location` share their `Blocks`.
    """

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self._blocks, self._position = blocks, 0
        # h5py names its file by the `repr` of the file object, through which readers of chunks find this one again.
        share(f"file {self!r}", lambda: self)

    @property
    def facts(self) -> ObjectFacts:
        """What the server said of the file when it was opened; parts of another version are refused."""
        return self._blocks.facts

    def is_of(self, address: str) -> bool:
        """Return whether this is the file at an address."""
        return self._blocks.shown == address

    def __repr__(self) -> str:
        """Return the class, the address and the identity."""
        return ascii(f"<RemoteFile {self._blocks.shown} {id(self)}>")

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
        """Read into a buffer from an offset and return the number of bytes; several threads may call this at once."""
        return self._blocks.read_into(offset, room)

    def load(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Begin to fetch byte ranges ``(offset, length)`` into the cache, several requests at once; their errors come when they are read."""
        self._blocks.load(ranges)
