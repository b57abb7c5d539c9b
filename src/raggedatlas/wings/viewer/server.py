"""Server of one viewer page on loopback: its address contains a secret, and genes are read on request."""

import hmac
import json
import secrets
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from raggedatlas.errors import ArgumentError, AtlasError, ReadOnlyError
from raggedatlas.store.loopback import LOOPBACK, ThreadedServer
from raggedatlas.wings.viewer.analysis import MOST_SETS, Analysis
from raggedatlas.wings.viewer.arrow_streams import column_part, ids_part, numbers_part, points_part
from raggedatlas.wings.viewer.page import PROGRAM, STYLE, bundled, policy, served_page
from raggedatlas.wings.viewer.scene import Scene

_TOKEN_BYTES = 24
_CACHED_GENES = 32
_MAX_MATCHES = 50
_MAX_QUERY_LENGTH = 512
_MAX_BODY = 2**16
"""Bytes of a request without its sets of points."""

Response = tuple[bytes, str]


class ViewerServer(ThreadedServer):
    """Server of one scene on loopback; port 0 picks a free one.

    Every address begins with a new random token. The token is part of the path instead of a cookie, because browsers
    send the cookies of one port of a host to every other port.

    With `allow_annotate`, the page may write labels into the atlas.

    Examples
    --------
    >>> from raggedatlas.wings.viewer.scene import make_scene
    >>> with ViewerServer(make_scene(["a"], [[0.0, 1.0]])) as server:
    ...     server.url.startswith("http://127.0.0.1:")
    True
    """

    def __init__(self, scene: Scene, port: int = 0, *, allow_annotate: bool = False) -> None:
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        # A class for this server: `http.server` creates the handlers itself, so values are passed as attributes.
        handler: type[_Handler] = type(
            "Handler",
            (_Handler,),
            {"token": self.token, "answers": _SceneResponses(scene, Analysis(scene, allow_annotate))},
        )
        self._start(handler, port, "viewer")
        handler.hosts = frozenset({f"{LOOPBACK}:{self.port}", f"localhost:{self.port}"})


class _SceneResponses:
    """Responses of the server for one scene."""

    def __init__(self, scene: Scene, analysis: Analysis) -> None:
        self._scene, self._analysis = scene, analysis
        # Of eight points a byte, which is 4/3 bytes in base64.
        self.most_bytes = _MAX_BODY + MOST_SETS * (scene.n // 6 + 8)
        self._lock = threading.Lock()
        self._gene = lru_cache(_CACHED_GENES)(lambda name: numbers_part(scene.gene(name)))
        self._fixed: dict[str, Callable[[], Response]] = {
            "": lambda: (
                served_page(scene, allow_annotate=analysis.allow_annotate).encode(),
                "text/html; charset=utf-8",
            ),
            PROGRAM: lambda: (bundled(PROGRAM).encode(), "text/javascript; charset=utf-8"),
            STYLE: lambda: (bundled(STYLE).encode(), "text/css; charset=utf-8"),
            "parts/points": lambda: (points_part(scene), _ARROW),
            "parts/ids": lambda: (ids_part(scene), _ARROW),
            **{f"parts/c{i}": partial(lambda own: (column_part(own), _ARROW), c) for i, c in enumerate(scene.columns)},
        }

    def find(self, path: str, query: dict[str, list[str]]) -> Response | None:
        """Return the response to a path below the token, or None if there is none."""
        if path in self._fixed:
            return self._fixed[path]()
        if path == "parts/gene":
            # Requests come in threads, and `lru_cache` lets two of them read the same gene at once.
            with self._lock:
                return self._gene(_first_value(query, "name")), _ARROW
        if path == "genes" and self._scene.genes is not None:
            most = _first_value(query, "most")
            few = min(int(most), _MAX_MATCHES) if most.isdecimal() else _MAX_MATCHES
            found = self._scene.genes.find(_first_value(query, "q"), few)
            listed = [{"name": name, "note": note} for name, note in found]
            return json.dumps(listed).encode(), "application/json"
        return None

    def respond(self, path: str, body: bytes) -> Response | None:
        """Return the response to a request with a body, one at a time; None if there is no such path."""
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise ArgumentError("The body of this request is no JSON object.")
        with self._lock:
            found = self._analysis.respond(path, parsed)
        return None if found is None else (json.dumps(found, allow_nan=False).encode(), "application/json")


_ARROW = "application/vnd.apache.arrow.stream"


def _first_value(query: dict[str, list[str]], name: str) -> str:
    return query.get(name, [""])[0][:_MAX_QUERY_LENGTH]


class _Handler(BaseHTTPRequestHandler):
    token: str
    hosts: frozenset[str] = frozenset()
    answers: _SceneResponses
    server_version, sys_version = "raggedatlas", ""
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Respond if the host is this server and the path begins with the token."""
        self._answer(self.answers.find, HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        """Respond to JSON from the page itself; what another site's page can send without asking has another type."""
        self.close_connection = True  # a refused body stays unread
        length = self.headers.get("Content-Length", "")
        origin = self.headers.get("Origin")
        if self.headers.get_content_type() != "application/json" or (
            origin is not None and origin.removeprefix("http://") not in self.hosts
        ):
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Only the page of this server may ask, with JSON.")
        elif not length.isdecimal() or int(length) > self.answers.most_bytes:
            self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"A request has at most {self.answers.most_bytes:,} bytes."
            )
        else:
            self._answer(
                lambda path, _: self.answers.respond(path, self.rfile.read(int(length))), HTTPStatus.BAD_REQUEST
            )

    def _answer(self, find: "Callable[[str, dict[str, list[str]]], Response | None]", refused: HTTPStatus) -> None:
        address = urlsplit(self.path)
        token, _, path = address.path.removeprefix("/").partition("/")
        # In constant time, and as bytes, because `compare_digest` refuses text that is not ASCII.
        if self.headers.get("Host") not in self.hosts or not hmac.compare_digest(
            token.encode("utf-8", "replace"), self.token.encode()
        ):
            self._refuse(
                HTTPStatus.FORBIDDEN, "This address requires its token; open the address that raggedatlas view printed."
            )
            return
        try:
            answer = find(path, parse_qs(address.query))
        except AtlasError as error:
            self._refuse(
                HTTPStatus.FORBIDDEN if isinstance(error, ReadOnlyError) else refused,
                str(error.args[0]) if error.args else type(error).__name__,
            )
            return
        if answer is None:
            self._refuse(HTTPStatus.NOT_FOUND, "Not found.")
        else:
            self._send(HTTPStatus.OK, *answer)

    do_HEAD = do_GET

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(status, why.encode(), "text/plain; charset=utf-8")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            # Browsers ignore `frame-ancestors` in a `meta` element, so only the server sends it.
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
        """Log nothing."""
