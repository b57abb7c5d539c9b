"""Files in object stores and on web servers as file objects, which fetch ranges through a cache of blocks."""

import contextlib
import gc
import io
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raggedatlas.errors import AtlasError, NotFoundError, StoreError
from raggedatlas.store.runtime import share, submit_request
from raggedatlas.store.storage_errors import store_errors

if TYPE_CHECKING:
    from obstore.store import ObjectStore

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


@dataclass(frozen=True)
class _Span:
    """Neighbouring blocks that one request fetches."""

    first: int
    last: int


class Blocks:
    """The blocks of one remote file that are held, those fetched first removed first, and the numbers of those on their way.

    Without locks: h5py calls a file object while it holds the lock of its library. A thread that would wait there for a lock of ours never
    gets it if its holder, in a collection of garbage, waits for that of h5py. Operations on one key of a dictionary are atomic, and two
    threads that fetch one block store equal bytes.

    Parameters
    ----------
    store, key : ObjectStore, str
        Where the file is.
    shown : str
        Its address in messages.

    Raises
    ------
    NotFoundError
        If there is no such file.
    StoreError
        If the store cannot be reached, refuses access, or does not serve ranges.
    """

    def __init__(self, store: "ObjectStore", key: str, shown: str) -> None:
        self._store, self._key, self.shown = store, key, shown
        self._held: dict[int, memoryview] = {}
        self._coming: set[int] = set()
        # One request opens a file: the response with the first block has the size.
        head, self.size, self._tag = self._get(0, BLOCK)
        if len(head) != min(self.size, BLOCK):
            raise StoreError(
                f"{shown}: the server sent {len(head):,} of {min(self.size, BLOCK):,} bytes; the file was cut short there."
            )
        self._keep(0, memoryview(head))

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
        data, size, tag = self._get(start, stop)
        if (size, tag) != (self.size, self._tag):
            raise StoreError(f"{self.shown} was replaced while it was read; run it again.")
        if len(data) != stop - start:
            raise StoreError(
                f"{self.shown}: the server sent {len(data):,} of {stop - start:,} bytes at byte {start:,}; the file was cut short there."
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

    def _get(self, start: int, stop: int) -> tuple[bytes, int, str | None]:
        """Return bytes of the object, its size and its ETag."""
        import obstore
        from obstore.exceptions import BaseError

        try:
            with store_errors(f"read {self.shown}"):
                try:
                    answer = obstore.get(self._store, self._key, options={"range": (start, stop)})
                    return memoryview(answer.bytes()).tobytes(), answer.meta["size"], answer.meta["e_tag"]
                except BaseError as error:
                    raise explained(self.shown, error) from error
        except FileNotFoundError:
            raise NotFoundError(f"There is no file {self.shown}; check the address.") from None


def _spans(blocks: list[int]) -> list[_Span]:
    """Join neighbouring blocks into requests of at most `REQUEST_BYTES`."""
    spans: list[_Span] = []
    for block in blocks:
        if spans and spans[-1].last == block and block - spans[-1].first < REQUEST_BYTES // BLOCK:
            spans[-1] = _Span(spans[-1].first, block + 1)
        else:
            spans.append(_Span(block, block + 1))
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

    Parameters
    ----------
    blocks : Blocks
        Shared by all open files of one `Location`.
    """

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self._blocks, self._position, self._ahead = blocks, 0, 1
        # h5py names its file by the `repr` of the file object, through which readers of chunks find this one again.
        share(f"file {self!r}", lambda: self)

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
