"""What runs in the background and what is shared by a process: thread pools, pipelines, reused memory, warning filters."""

import atexit
import ctypes
import os
import tempfile
import threading
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cache
from itertools import repeat
from operator import attrgetter
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from raggedatlas.errors import StoreError

A = TypeVar("A")
B = TypeVar("B")
V = TypeVar("V")

DECODE_THREADS = min(4, os.cpu_count() or 1)
REQUEST_THREADS = 16
GROUP_THREADS = 32
FETCH_THREADS = 64

SHARED_BYTES = 2**28
"""Free memory that the shared pool holds at most: about what one `add` uses at once, so that none is allocated twice."""

SHARED_BUFFERS = 48
"""Free buffers that the shared pool holds at most."""

_SCRATCH_BYTES = 2**24
"""A scratch array that is larger is a file."""


@cache
def _pool(pid: int, kind: str) -> ThreadPoolExecutor:
    """Return the thread pool of a kind; a forked child has another pid and so its own pools."""
    # The calling thread works too in `map_decode`, so the pool has one thread less.
    sizes = {"decode": max(1, DECODE_THREADS - 1), "groups": GROUP_THREADS, "fetches": FETCH_THREADS}
    return ThreadPoolExecutor(sizes.get(kind, REQUEST_THREADS), thread_name_prefix=f"raggedatlas-{kind}")


def map_decode(function: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """Apply `function` to every item on the calling thread and the decoding threads, together as many as cores.

    Every thread takes the next item when it has finished one, so calls may be nested. The error of the first failed
    item is raised after all items have been processed.
    """
    if len(items) == 1:
        return [function(items[0])]
    outcomes: list[Future[B]] = [Future() for _ in items]
    waiting = deque(zip(outcomes, items, strict=True))
    helpers = [
        _pool(os.getpid(), "decode").submit(_work, function, waiting)
        for _ in range(min(DECODE_THREADS, len(items)) - 1)
    ]
    _work(function, waiting)
    for helper in helpers:
        # A helper that has not started would find nothing to do; waiting for it could deadlock nested calls.
        if not helper.cancel():
            helper.result()
    return [outcome.result() for outcome in outcomes]


def _work(function: Callable[[A], B], waiting: "deque[tuple[Future[B], A]]") -> None:
    """Process items until none is left."""
    while True:
        try:
            # `popleft` is atomic, so the threads share the items without a lock.
            outcome, item = waiting.popleft()
        except IndexError:
            return
        try:
            outcome.set_result(function(item))
        except Exception as error:  # noqa: BLE001  (the caller raises it)
            outcome.set_exception(error)


def map_requests(function: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """Apply `function` to every item on the threads that wait for object stores, at most 16 at once."""
    return _map("requests", function, items)


def map_groups(function: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """Apply `function` to every item on separate threads, at most 32 at once; it may use the other pools."""
    return _map("groups", function, items)


def map_fetches(function: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """Apply `function` to every item on threads that wait for object stores, at most 64 at once: for small requests, or where all answers are held anyway."""
    return _map("fetches", function, items)


def submit(function: Callable[[A], B], item: A) -> "Future[B]":
    """Apply `function` on another thread while the caller continues; it must not use the threads of `map_groups`."""
    return _pool(os.getpid(), "groups").submit(function, item)


def submit_request(function: Callable[[A], B], item: A) -> "Future[B]":
    """Apply `function` on a thread that waits for object stores; it must not wait for another of these threads."""
    return _pool(os.getpid(), "requests").submit(function, item)


def _map(kind: str, function: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """Apply `function` to items in order; the first error is raised after all have ended."""
    if len(items) <= 1:
        return [function(item) for item in items]
    futures = [_pool(os.getpid(), kind).submit(function, item) for item in items]
    # All are awaited before an error is raised: a task that still runs may write into arrays of the caller.
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]


def prefetch(items: Iterable[A], depth: int = 1) -> Generator[A, None, None]:
    """Iterate while the next items are produced on a background thread.

    `items` is used from the background thread alone; what it raises is raised here, in its turn. `depth` items may be
    ready before the caller asks for them. Close the generator (`contextlib.closing`) where the iteration may end early;
    an item in production is waited for.
    """
    iterator = iter(items)
    # A future cannot raise StopIteration, and an item may be falsy, so each comes in a tuple, of which () is the end.
    pairs = prefetch_map(lambda _: next(((item,) for item in iterator), ()), repeat(None), threads=1, depth=depth)
    with closing(pairs) as taken:
        for item in taken:
            if not item:
                return
            yield item[0]


def prefetch_map(
    function: Callable[[A], B], items: Iterable[A], *, threads: int, depth: int
) -> Generator[B, None, None]:
    """Apply `function` to items on background threads, a bounded number ahead, and yield the results in order.

    `items` is iterated on the caller's thread; with `threads` of 0 the results are computed there, too, on demand.
    `depth` results are finished or being computed beyond the one handed over. What `function` raised is raised when its
    turn comes; nothing is started after it.
    """
    if threads == 0:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="raggedatlas-prefetch")
    waiting: deque[Future[B]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class BackgroundWriter:
    """Runs jobs one after the other on one background thread while the caller prepares the next.

    At most `depth` jobs are unfinished. Leaving the context waits for all jobs and raises the error of a failed one. If
    the context is left with an error, the running job is waited for, the others are cancelled, and their errors are
    dropped.
    """

    def __init__(self, depth: int = 1) -> None:
        self._depth = depth
        self._running: deque[Future[None]] = deque()
        self._failed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="raggedatlas-write")

    def __enter__(self) -> Self:
        """Start without a job."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all jobs, or after an error for the running one."""
        try:
            if kind is None:
                self.join()
        finally:
            self._failed = True
            self._pool.shutdown(cancel_futures=True)

    def __call__(self, job: Callable[[], object]) -> None:
        """Queue a job; block until the oldest has finished where `depth` jobs are unfinished.

        What an earlier job raised is raised here; no job is started after it.
        """
        if len(self._running) == self._depth:
            self._running.popleft().result()
        self._running.append(self._pool.submit(self._run, job))

    def join(self) -> None:
        """Wait until all jobs have finished; raise what one of them raised."""
        while self._running:
            self._running.popleft().result()

    def _run(self, job: Callable[[], object]) -> None:
        # Jobs build on earlier ones, as `zarr.json` does on its shards, so none runs after a failure.
        if self._failed:
            return
        try:
            job()
        except BaseException:
            self._failed = True
            raise


class LRUCache(Generic[V]):
    """A thread-safe dictionary that keeps the most recently used entries.

    `size` limits the sum of what `weigh` returns for the entries; without `weigh`, their number.
    """

    def __init__(self, size: int, weigh: Callable[[V], int] | None = None) -> None:
        self.size, self.weigh, self.weight = size, weigh, 0
        self.lock = threading.Lock()
        self.entries: OrderedDict[object, V] = OrderedDict()
        self._making: dict[object, threading.Lock] = {}

    def get(self, key: object) -> V | None:
        """Return an entry and mark it as used, or return None."""
        with self.lock:
            if key not in self.entries:
                return None
            self.entries.move_to_end(key)
            return self.entries[key]

    def put(self, key: object, value: V) -> None:
        """Store an entry and evict the oldest ones beyond the size."""
        with self.lock:
            if key in self.entries:
                self._count(self.entries.pop(key), -1)
            self.entries[key] = value
            self._count(value, 1)
            while self.entries and (self.weight if self.weigh else len(self.entries)) > self.size:
                self._count(self.entries.popitem(last=False)[1], -1)

    def _count(self, value: V, sign: int) -> None:
        self.weight += sign * self.weigh(value) if self.weigh else 0

    def get_or_make(self, key: object, make: Callable[[], V]) -> V:
        """Return an entry; where there is none one thread makes it, and others that want it wait for that one."""
        value = self.get(key)
        if value is not None:
            return value
        with self.lock:
            making = self._making.setdefault(key, threading.Lock())
        try:
            with making:
                value = self.get(key)
                if value is None:
                    value = make()
                    self.put(key, value)
            return value
        finally:
            with self.lock:
                self._making.pop(key, None)


CacheKind = Literal[
    "mappings", "bundles", "indexes", "parts", "stores", "folders", "allowances", "references", "chunks", "probed"
]

CACHE_SIZES: dict[CacheKind, int] = {
    "mappings": 256,
    "bundles": 64,
    "indexes": 4096,
    "parts": 32,
    "stores": 4096,
    "folders": 4096,
    "allowances": 256,
    "references": 2**28,
    "chunks": 2**28,
    "probed": 65536,
}
"""Entries that each cache of the process keeps: mapped local shards and bundles, indexes of remote shards (with the
shard, if it has at most 32 KiB), shards that are part of a remote file (4 MiB at most), object stores, local folders without symlinks,
bytes that may be written to a disk cache before its folder is measured, and files outside of the atlas whose beginning and end were compared.
Of `WEIGHED` caches these are bytes: references to linked files, and decoded chunks of these files that were read in part."""

WEIGHED: tuple[CacheKind, ...] = ("references", "chunks")
"""Caches whose entries count by their `nbytes`."""


@cache
def process_cache(kind: CacheKind) -> LRUCache[Any]:
    """Return a cache that all readers of this process share: they are frozen and hold nothing themselves."""
    return LRUCache(CACHE_SIZES[kind], attrgetter("nbytes") if kind in WEIGHED else None)


class ScratchFile:
    """Array of unknown length in a temporary file, which disappears with the array.

    Its memory belongs to the page cache, which the system may write out and reuse.
    """

    def __init__(self, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        self.dtype, self.row_shape, self.n_rows = np.dtype(dtype), row_shape, 0
        with _scratch_errors():
            self._file = tempfile.TemporaryFile(prefix="raggedatlas-")  # noqa: SIM115  (closed by `__exit__`)

    def __enter__(self) -> Self:
        """Return the file."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the file; an array of it stays valid."""
        self._file.close()

    def append(self, values: NDArray[Any]) -> None:
        """Append rows, converted to the dtype of the file."""
        with _scratch_errors():
            self._file.write(np.ascontiguousarray(values, self.dtype).reshape(-1).view(np.uint8).data)
        self.n_rows += len(values)

    def allocate(self, n_rows: int) -> None:
        """Append rows of any content. Space is reserved here: a mapped file on a full disk ends the process."""
        size = n_rows * int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize
        with _scratch_errors():
            if hasattr(os, "posix_fallocate") and size:
                os.posix_fallocate(self._file.fileno(), self._file.tell(), size)
                self._file.seek(size, os.SEEK_CUR)
            else:
                for start in range(0, size, _SCRATCH_BYTES):
                    self._file.write(bytes(min(_SCRATCH_BYTES, size - start)))
        self.n_rows += n_rows

    def array(self) -> NDArray[Any]:
        """Return what was appended, as an array that stays valid when the file is closed."""
        shape = (self.n_rows, *self.row_shape)
        # An empty file cannot be mapped.
        if not self.n_rows:
            return np.empty(shape, self.dtype)
        with _scratch_errors():
            self._file.flush()
            return np.asarray(np.memmap(self._file, self.dtype, "r+", shape=shape))


def scratch_array(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array of any content, of at least one axis: in memory if it is small, else in a `ScratchFile`."""
    kind = np.dtype(dtype)
    if int(np.prod(shape, dtype=np.int64)) * kind.itemsize <= _SCRATCH_BYTES:
        return np.empty(shape, kind)
    with ScratchFile(kind, shape[1:]) as file:
        file.allocate(shape[0])
        return file.array()


@contextmanager
def _scratch_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"Temporary disk space is needed, and writing to {tempfile.gettempdir()} failed ({error}); free some space, or set "
            "TMPDIR to a larger disk."
        ) from error


class BufferPool:
    """Memory of results that is reused once no array refers to it.

    An array from `take` owns its memory as long as it or any view of it lives, so a batch that is kept never changes;
    only released memory is handed out again. Fresh memory costs a page fault per 4 KiB, which takes as long as reading.
    At most `n_kept` free buffers, of `most_bytes` in all, are kept; 0 disables reuse.
    """

    def __init__(self, n_kept: int = 8, most_bytes: int | None = None) -> None:
        self.n_kept, self.most_bytes = n_kept, most_bytes
        # An array may be finalized inside `take`, on the same thread, so the lock is reentrant.
        self.lock = threading.RLock()
        self.free: list[NDArray[np.uint8]] = []

    def take(self, n: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialized (n,) array."""
        n_bytes = n * dtype.itemsize
        if not self.n_kept or n_bytes < 2**16:
            return np.empty(n, dtype)
        with self.lock:
            suitable = [i for i, item in enumerate(self.free) if n_bytes <= item.size <= 4 * n_bytes]
            memory = self.free.pop(min(suitable, key=lambda i: self.free[i].size)) if suitable else None
        if memory is None:
            # An eighth more, so that a slightly larger result can reuse the buffer.
            memory = np.empty(n_bytes + n_bytes // 8, np.uint8)
        # Chains of `base` end at the array made by frombuffer; once it is gone, nothing can refer to the memory. The owner has
        # exactly the size of the result, because SciPy copies arrays that are a small part of their base.
        owner = np.frombuffer(memoryview(memory.data), dtype, n)
        weakref.finalize(owner, self._release, memory).atexit = False
        return owner.view()

    def _release(self, memory: NDArray[np.uint8]) -> None:
        """Keep released memory for reuse."""
        with self.lock:
            n_bytes = sum(item.size for item in self.free) + memory.size
            if len(self.free) < self.n_kept and (self.most_bytes is None or n_bytes <= self.most_bytes):
                self.free.append(memory)


_shared: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


def share(name: str, make: Callable[[], V]) -> V:
    """Return what this process shares under a name, made where nothing is; it lives as long as something else refers to it."""
    with _sharing:
        value: V | None = _shared.get(name)
        if value is None:
            value = _shared[name] = make()
        return value


def find_shared(name: str) -> Any | None:  # noqa: ANN401  (what `share` was given)
    """Return what this process shares under a name, or None."""
    return _shared.get(name)


def shared_pool() -> BufferPool:
    """Return the pool shared by all that process large blocks at the same time; it lives while one of them does."""
    return share("blocks", lambda: BufferPool(SHARED_BUFFERS, SHARED_BYTES))


_closed_at_exit: weakref.WeakSet[Any] = weakref.WeakSet()


def close_at_exit(opened: Any) -> None:  # noqa: ANN401  (anything with a method `close`)
    """Close something when the process ends, if it still exists then."""
    if not _closed_at_exit:
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _closed_at_exit.add(opened)


def _close_all() -> None:
    for opened in list(_closed_at_exit):
        opened.close()


_WARNING_FILTERS = threading.RLock()


@contextmanager
def warnings_as(
    action: Literal["ignore", "error"], category: type[Warning] = Warning, message: str = ""
) -> Iterator[None]:
    """Ignore warnings, or raise them as errors, inside the context.

    Python has one list of warning filters for all threads: two threads that changed it at the same time would restore
    each other's, permanently. So only one thread at a time may be inside.

    `message` is a regular expression that matches the beginning of a warning's message.
    """
    with _WARNING_FILTERS, warnings.catch_warnings():
        warnings.filterwarnings(action, message, category)
        yield


def release_unused_memory() -> None:
    """Return freed memory of Arrow's pool, and of the C library where it supports that, to the system.

    Reading a long column leaves many small freed blocks, which the C library keeps for the thread that allocated them;
    other threads would allocate new memory instead of reusing it.
    """
    pa.default_memory_pool().release_unused()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:  # noqa: ANN401  (a foreign function)
    """Return `malloc_trim` of glibc, or None with another C library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
