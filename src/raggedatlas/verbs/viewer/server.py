"""A server on loopback for one page: its address holds a secret, and genes are read when they are asked for."""

import hmac
import json
import secrets
import threading
from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit

from raggedatlas.errors import ArgumentError, AtlasError, StoreError
from raggedatlas.verbs.viewer.arrow_streams import column_part, ids_part, numbers_part, points_part
from raggedatlas.verbs.viewer.page import PROGRAM, STYLE, bundled, policy, served_page
from raggedatlas.verbs.viewer.scene import Scene

LOOPBACK = "127.0.0.1"
_TOKEN_BYTES = 24
_KEPT_GENES = 32
_MOST_FOUND = 50
_LONGEST = 512

Answer = tuple[bytes, str]


class ViewerServer:
    """Serves one scene on loopback until it is closed.

    Every address begins with a token that is new each time. It stands in the path and not in a cookie, because browsers send
    the cookies of one port of a host to every other port.

    Parameters
    ----------
    scene : Scene
        What is shown.
    port : int
        Port; 0 takes a free one.

    Raises
    ------
    StoreError
        If the port is taken.

    Examples
    --------
    >>> from raggedatlas.verbs.viewer.scene import make_scene
    >>> with ViewerServer(make_scene(["a"], [[0.0, 1.0]])) as server:
    ...     server.url.startswith("http://127.0.0.1:")
    True
    """

    def __init__(self, scene: Scene, port: int = 0) -> None:
        if not 0 <= port < 2**16:
            raise ArgumentError(f"The port {port} is none; expected 0 (a free one) to 65535.")
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        handler: type[_Handler] = type("Handler", (_Handler,), {"token": self.token, "answers": _Answers(scene)})
        try:
            self._server = ThreadingHTTPServer((LOOPBACK, port), handler)
        except OSError as error:
            raise StoreError(
                f"Port {port} of {LOOPBACK} cannot be served on: {error.strerror}; 0 takes a free one."
            ) from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_port)
        handler.hosts = frozenset({f"{LOOPBACK}:{self.port}", f"localhost:{self.port}"})
        self._thread = threading.Thread(target=self._server.serve_forever, name="viewer", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the page, with its secret."""
        return f"http://{LOOPBACK}:{self.port}/{self.token}/"

    def wait(self) -> None:
        """Serve until Ctrl-C."""
        try:
            while self._thread.is_alive():
                self._thread.join(1)
        except KeyboardInterrupt:
            self.close()

    def close(self) -> None:
        """Stop serving; the address is dead then."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        """Serve within a block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop at its end."""
        self.close()

    def __repr__(self) -> str:
        """Say where the page is."""
        return f"ViewerServer at {self.url}"


class _Answers:
    """What the server can say of a scene."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._lock = threading.Lock()
        self._gene = lru_cache(_KEPT_GENES)(self._read_gene)
        self._fixed: dict[str, Callable[[], Answer]] = {
            "": lambda: (served_page(scene).encode(), "text/html; charset=utf-8"),
            PROGRAM: lambda: (bundled(PROGRAM).encode(), "text/javascript; charset=utf-8"),
            STYLE: lambda: (bundled(STYLE).encode(), "text/css; charset=utf-8"),
            "parts/points": lambda: (points_part(scene), _ARROW),
            "parts/ids": lambda: (ids_part(scene), _ARROW),
            **{f"parts/c{i}": self._column(i) for i in range(len(scene.columns))},
        }

    def find(self, path: str, query: dict[str, list[str]]) -> Answer | None:
        """Answer a path beneath the token; None where there is nothing."""
        if path in self._fixed:
            return self._fixed[path]()
        if path == "parts/gene":
            with self._lock:
                return self._gene(_one(query, "name")), _ARROW
        if path == "genes" and self._scene.genes is not None:
            most = _one(query, "most")
            few = min(int(most), _MOST_FOUND) if most.isdecimal() else _MOST_FOUND
            found = self._scene.genes.find(_one(query, "q"), few)
            listed = [{"name": name, "note": note} for name, note in found]
            return json.dumps(listed).encode(), "application/json"
        return None

    def _column(self, i: int) -> Callable[[], Answer]:
        return lambda: (column_part(self._scene.columns[i]), _ARROW)

    def _read_gene(self, name: str) -> bytes:
        return numbers_part(self._scene.gene(name))


_ARROW = "application/vnd.apache.arrow.stream"


def _one(query: dict[str, list[str]], name: str) -> str:
    return query.get(name, [""])[0][:_LONGEST]


class _Handler(BaseHTTPRequestHandler):
    token: str
    hosts: frozenset[str]
    answers: _Answers
    server_version, sys_version = "raggedatlas", ""
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Answer, where the host is ours and the path begins with the token."""
        address = urlsplit(self.path)
        token, _, path = address.path.removeprefix("/").partition("/")
        if not self._is_ours() or not hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode()):
            self._refuse(
                HTTPStatus.FORBIDDEN, "This address needs its token; open the one that raggedatlas view printed."
            )
            return
        try:
            answer = self.answers.find(path, parse_qs(address.query))
        except AtlasError as error:
            self._refuse(HTTPStatus.NOT_FOUND, str(error.args[0]) if error.args else type(error).__name__)
            return
        if answer is None:
            self._refuse(HTTPStatus.NOT_FOUND, "There is nothing at this address.")
        else:
            self._send(HTTPStatus.OK, *answer)

    do_HEAD = do_GET

    def _is_ours(self) -> bool:
        """Refuse names that another site has pointed at this machine."""
        return self.headers.get("Host") in self.hosts

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(status, why.encode(), "text/plain; charset=utf-8")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy("'self'", "'self'", "'self'") + "; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing of requests."""
