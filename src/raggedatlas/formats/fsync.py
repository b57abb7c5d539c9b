"""A file's way to the disk, begun while it is still written, so that the wait at the end is short."""

import os
from concurrent.futures import Future
from pathlib import Path

from raggedatlas.store.runtime import submit

STEP_BYTES = 128 << 20
"""New bytes after which they are sent to the disk."""


class PageFlusher:
    """Sends what is new in a file to the disk on another thread, some of it at a time.

    Parameters
    ----------
    path : Path
        A file that is being written, by this or another descriptor.
    """

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_RDWR)
        self._waiting = 0
        self._running: Future[None] | None = None

    def note(self, n_bytes: int) -> None:
        """Say that so many bytes are new.

        Raises
        ------
        OSError
            If earlier ones could not be written.
        """
        self._waiting += n_bytes
        if self._waiting >= STEP_BYTES and (self._running is None or self._running.done()):
            self._settle()
            self._waiting = 0
            self._running = submit(_send, self.file)

    def finish(self, header: bytes = b"") -> None:
        """Put a header at the front, wait until all of the file is on the disk, and let go of it.

        Raises
        ------
        OSError
            If any of it could not be written.
        """
        try:
            self._settle()
            os.pwrite(self.file, header, 0)
            os.fsync(self.file)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the file; what is under way is waited for."""
        if self._running is not None:
            self._running.exception()
            self._running = None
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def _settle(self) -> None:
        """Wait for what is under way; a system tells of a failed write only once, so it must be asked about."""
        if self._running is not None:
            self._running.result()
            self._running = None


def _send(file: int) -> None:
    # macOS has no fdatasync.
    getattr(os, "fdatasync", os.fsync)(file)
