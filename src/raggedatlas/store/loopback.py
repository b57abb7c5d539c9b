"""The base class of everything that is served on loopback."""

import threading
from abc import ABC, abstractmethod
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from raggedatlas.errors import ArgumentError, StoreError

LOOPBACK = "127.0.0.1"


class LoopbackServer(ABC):
    """Server for browsers on this machine, usable as a context manager that stops it at the end."""

    port: int
    token = ""
    """First part of the path of every address, where the server has a secret."""

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{LOOPBACK}:{self.port}/{self.token and self.token + '/'}"

    def wait(self) -> None:
        """Serve until Ctrl-C, or until the server ends."""
        try:
            self._join()
        except KeyboardInterrupt:
            self.close()

    @abstractmethod
    def _join(self) -> None:
        """Wait until the server ends."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving."""

    def __enter__(self) -> Self:
        """Return the running server."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop serving."""
        self.close()

    def __repr__(self) -> str:
        """Return the class and the address."""
        return f"{type(self).__name__} at {self.url}"


class ThreadedServer(LoopbackServer):
    """A server whose requests are answered on threads of this process."""

    def _start(self, handler: type[BaseHTTPRequestHandler], port: int, name: str) -> None:
        """Listen on a port, 0 for a free one, and begin to answer."""
        if not 0 <= port < 2**16:
            raise ArgumentError(f"port={port} is out of range; expected 0 (any free port) to 65535.")
        try:
            self._server = ThreadingHTTPServer((LOOPBACK, port), handler)
        except OSError as error:
            raise StoreError(
                f"Cannot listen on port {port} of {LOOPBACK}: {error.strerror}; port 0 picks a free one."
            ) from error
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name=name, daemon=True)
        self._thread.start()

    def _join(self) -> None:
        while self._thread.is_alive():
            # In steps, so that Ctrl-C arrives on every platform.
            self._thread.join(1)

    def close(self) -> None:
        """Stop serving."""
        # Returns once `serve_forever` has ended; only then may its socket be closed.
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
