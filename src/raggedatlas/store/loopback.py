"""The base class of everything that is served on loopback."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

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
