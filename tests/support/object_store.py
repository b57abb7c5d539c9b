"""Servers on loopback for tests: a proxy with faults on demand to stand before an object store, web files, and Google's object store."""

import contextlib
import json
import os
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import formatdate
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self, cast
from urllib.parse import parse_qsl, unquote, urlsplit
from uuid import uuid4
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from obstore.store import S3Store

_CONDITIONS = {"if-none-match", "if-match", "x-goog-if-generation-match"}
_PER_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "server", "date"}
_ERROR = "<Error><Code>{code}</Code><Message>Refused.</Message></Error>"


@dataclass(frozen=True)
class Request:
    """One request that a `FaultyProxy` saw.

    Parameters
    ----------
    method : str
        ``GET``, ``PUT`` ...
    path : str
        Decoded path, without the query.
    query : str
        What follows the question mark.
    status : int
        What was answered; 0 where the answer was cut off.
    began, ended : float
        When it arrived and when it was answered, in seconds of a monotonic clock.
    n_bytes : int
        Of its body and of the body that was answered.
    """

    method: str
    path: str
    query: str
    status: int
    began: float = 0.0
    ended: float = 0.0
    n_bytes: int = 0


def count_in_sequence(requests: Iterable[Request]) -> int:
    """Return how many requests came one after the other: the longest series of which each began after the one before had ended.

    The clock that this takes is that number times the latency of the store, which should be longer than the work in between.

    Examples
    --------
    >>> times = [(0.0, 1.0), (0.1, 1.1), (2.0, 3.0)]
    >>> count_in_sequence(Request("GET", "/", "", 200, *time) for time in times)
    2
    """
    n, free = 0, -1.0
    # Taking the request that ends first leaves the most time for others.
    for request in sorted(requests, key=lambda request: request.ended):
        if request.began >= free:
            n, free = n + 1, request.ended
    return n


class _Loopback:
    """A server on loopback, as a context manager."""

    def _bind(self, handler: type[BaseHTTPRequestHandler]) -> None:
        """Bind a free port; requests are answered within the context."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        # Clients keep connections open; `server_close` would wait for their threads.
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def address(self) -> str:
        """Where clients reach the server."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        """Start to answer."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop to answer."""
        self._server.shutdown()
        self._server.server_close()


@dataclass
class FaultyProxy(_Loopback):
    """An HTTP proxy on loopback, to be used as a context manager; its faults may be changed while it runs.

    Parameters
    ----------
    upstream : str
        Address of the server behind, e.g. ``http://127.0.0.1:5000``.
    fail_every : int
        Answer every n-th request with an error without passing it on; 0 never.
    failure : (int, str)
        Status and code of that error.
    shorten_every : int
        Close the connection in the middle of the body of every n-th GET; 0 never.
    ignore_conditions : bool
        Pass requests on without the conditions of S3 and Google: a store without conditional puts.
    latency : float
        Seconds to wait before each answer.
    before : callable or None
        Called with the number of the requests that came before, before each is passed on.
    requests : list of Request
        Log of what was seen, oldest first; clear it with `forget`.
    lost : list of Request
        What the server has done although its answer was cut off.
    most_at_once : int
        How many requests were under way at the same time, at most.

    Examples
    --------
    >>> with FaultyProxy("http://127.0.0.1:9") as proxy:
    ...     proxy.address.startswith("http://127.0.0.1:")
    True
    """

    upstream: str
    fail_every: int = 0
    failure: tuple[int, str] = (503, "SlowDown")
    shorten_every: int = 0
    ignore_conditions: bool = False
    latency: float = 0.0
    before: Callable[[int], None] | None = None
    requests: list[Request] = field(default_factory=list)
    lost: list[Request] = field(default_factory=list)
    most_at_once: int = 0
    _left: float = float("inf")
    _running: int = 0
    _cuts: list[tuple[str, re.Pattern[str]]] = field(default_factory=list)
    _refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    _seen: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        """Bind a free port; requests are answered from `start` on."""
        proxy = self

        # The server makes a handler for each connection itself, so the proxy must be found by its class.
        class Handler(_Handler):
            owner = proxy

        self._bind(Handler)

    def cut_after(self, method: str, pattern: str) -> None:
        """Cut the connection after the server has done the next request of a method on a matching path, once.

        Parameters
        ----------
        method : str
            ``PUT`` ...
        pattern : str
            Regular expression, searched for in the decoded path.
        """
        self._cuts.append((method, re.compile(pattern)))

    def stop_after(self, n: int) -> None:
        """Refuse all requests but the next `n`, as if the process that sends them had died."""
        self._left = n

    def refuse(self, method: str, status: int, code: str) -> None:
        """Answer all requests of a method with an error, without passing them on.

        Parameters
        ----------
        method : str
            ``PUT`` ...
        status : int
            HTTP status.
        code : str
            S3's name of the error, e.g. ``AccessDenied``.
        """
        self._refused[method] = (status, code)

    def forget(self) -> None:
        """Empty the logs, and take all faults away."""
        with self._lock:
            self.requests.clear()
            self.lost.clear()
            self._cuts.clear()
            self._refused.clear()
            self.fail_every, self.failure, self.shorten_every = 0, (503, "SlowDown"), 0
            self.ignore_conditions, self.latency, self._left, self.before = False, 0.0, float("inf"), None

    def begin(self, method: str) -> tuple[int, str] | None:
        """Count a request, and return the status and the code that it is refused with, if it is."""
        with self._lock:
            if self.before is not None:
                self.before(self._seen)
            self._seen += 1
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            self._left -= 1
            if self._left < 0:
                return 403, "AccessDenied"
            busy = self.fail_every > 0 and self._seen % self.fail_every == 0
            return self.failure if busy else self._refused.get(method)

    def shortens(self, method: str) -> bool:
        """Tell whether the body of an answer is to be cut off in its middle."""
        return self.shorten_every > 0 and method == "GET" and self._seen % self.shorten_every == 0

    def end(self) -> None:
        """Count a request as answered."""
        with self._lock:
            self._running -= 1

    def note(self, request: Request) -> bool:
        """Log a request, and tell whether its answer is to be cut off."""
        with self._lock:
            for cut in self._cuts:
                if request.method == cut[0] and request.status < 300 and cut[1].search(request.path):
                    # Safe within the loop, which this branch leaves; removed, so that a retry gets through.
                    self._cuts.remove(cut)
                    self.lost.append(request)
                    self.requests.append(replace(request, status=0))
                    return True
            self.requests.append(request)
            return False


class _Handler(BaseHTTPRequestHandler):
    """Passes one connection's requests on."""

    owner: FaultyProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    # Buffered, so that headers and body leave together.
    wbufsize = -1

    def __getattr__(self, name: str) -> object:
        """Answer every method alike."""
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def handle_expect_100(self) -> bool:
        """Let a client that asks first send its body."""
        there = super().handle_expect_100()
        self.wfile.flush()
        return there

    def _answer(self) -> None:
        self._began = time.monotonic()
        refused = self.owner.begin(self.command)
        try:
            # Read even if the request is refused: on a kept connection it would be taken for the next request.
            body = self._read_body()
            self._n_sent = len(body)
            if refused:
                body = _ERROR.format(code=refused[1]).encode()
                self._finish(refused[0], {"Content-Type": "application/xml"}, body)
            else:
                self._pass_on(body)
        finally:
            self.owner.end()

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while n_bytes := int(self.rfile.readline().partition(b";")[0], 16):
            body += self.rfile.read(n_bytes)
            self.rfile.readline()
        # The trailer ends with an empty line.
        while self.rfile.readline().strip():
            pass
        return body

    def _pass_on(self, body: bytes) -> None:
        skipped = {"expect", "transfer-encoding", *(_CONDITIONS if self.owner.ignore_conditions else ())}
        headers = {key: value for key, value in self.headers.items() if key.lower() not in skipped}
        server = HTTPConnection(urlsplit(self.owner.upstream).netloc, timeout=60)
        try:
            server.request(self.command, self.path, body, headers)
            answer = server.getresponse()
            data = answer.read()
        except (OSError, HTTPException):
            self._finish(502, {}, b"")
            return
        finally:
            server.close()
        self._finish(answer.status, dict(answer.getheaders()), data)

    def _finish(self, status: int, headers: dict[str, str], data: bytes) -> None:
        """Log the request and answer it, or cut the connection."""
        path, _, query = self.path.partition("?")
        time.sleep(self.owner.latency)
        n_bytes = self._n_sent + (len(data) if self.command != "HEAD" else 0)
        # Logged before the answer leaves: a test that has it finds the request in the log.
        if self.owner.note(Request(self.command, unquote(path), query, status, self._began, time.monotonic(), n_bytes)):
            self.close_connection = True
            return
        self.send_response_only(status)
        for key, value in headers.items():
            if key.lower() not in _PER_HOP:
                self.send_header(key, value)
        # The answer to HEAD has the length of a body that is not sent.
        lengths = [value for key, value in headers.items() if key.lower() == "content-length"]
        length = (*lengths, "0")[0] if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.owner.shortens(self.command):
            self.close_connection = True
            data = data[: len(data) // 2]
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing here; the proxy keeps the log."""


_LOGIN = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}


@dataclass(frozen=True)
class Remote:
    """A prefix in a bucket of its own, with the proxy in front of it.

    Parameters
    ----------
    bucket : str
        Its name.
    proxy : FaultyProxy
        In front of an S3 server.
    """

    bucket: str
    proxy: FaultyProxy

    @classmethod
    def make(cls, proxy: FaultyProxy) -> "Remote":
        """Create an empty bucket; the proxy forgets what it has seen."""
        bucket = f"walk-{uuid4().hex[:12]}"
        request = urllib.request.Request(f"{proxy.upstream}/{bucket}", method="PUT")
        with urllib.request.urlopen(request):
            proxy.forget()
        return cls(bucket, proxy)

    @property
    def uri(self) -> str:
        """Address of the atlas."""
        return f"s3://{self.bucket}/my.atlas"

    @property
    def options(self) -> dict[str, str]:
        """Storage options that lead through the proxy."""
        login = {f"aws_{key}": value for key, value in _LOGIN.items()}
        return login | {"aws_endpoint": self.proxy.address, "allow_http": "true"}

    def upload(self, place: Path, name: str = "") -> None:
        """Copy an atlas from a folder to here, or a file or folder to a name, past the proxy."""
        import obstore

        store = self._store()
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.is_file():
                parts = [name, path.relative_to(place).as_posix()]
                obstore.put(store, "/".join(part for part in parts if part not in {"", "."}), path.read_bytes())

    def listed(self) -> list[str]:
        """List what is here, past the proxy."""
        import obstore

        return [item["path"] for page in obstore.list(self._store()) for item in page]

    def download(self, folder: Path) -> Path:
        """Copy the atlas from here to a folder, past the proxy, and return the folder."""
        import obstore

        store = self._store()
        for page in obstore.list(store):
            for item in page:
                path = folder / item["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(obstore.get(store, item["path"]).bytes())
        return folder

    def _store(self) -> "S3Store":
        from obstore.store import S3Store

        options: dict[str, Any] = {**_LOGIN, "endpoint": self.proxy.upstream, "client_options": {"allow_http": True}}
        return S3Store(self.bucket, prefix="my.atlas", **options)


@dataclass
class WebServer(_Loopback):
    """A web server on loopback for the files of a folder, to be used as a context manager; its faults may be changed while it runs.

    Parameters
    ----------
    folder : Path
        What is served.
    ranges : bool
        Whether parts of files are served; if not, every request gets the complete file.
    sent : int or None
        Bytes of a body after which the connection is closed; None sends all.
    latency : float
        Seconds to wait before each answer.
    headers : dict of str to str
        Sent with every file, e.g. ``ETag``.
    stamps : bool
        Send an ``ETag`` of size and time, and ``Last-Modified``, with every file.
    ignore_conditions : bool
        Serve a file whose ETag is not the one that ``If-Match`` names.
    before : callable or None
        Called with the number of the requests that came before, before each is answered.
    requests : list of str
        Method, path and range of each request, oldest first.
    answered : list of Request
        The same with their times and bytes, those that were answered.

    Examples
    --------
    >>> with WebServer(Path("tests/data")) as server:
    ...     server.address.startswith("http://127.0.0.1:")
    True
    """

    folder: Path
    ranges: bool = True
    sent: int | None = None
    latency: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    stamps: bool = False
    ignore_conditions: bool = False
    before: Callable[[int], None] | None = None
    requests: list[str] = field(default_factory=list)
    answered: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        """Bind a free port."""
        web = self

        class Handler(_FileHandler):
            owner = web

        self._bind(Handler)


class _Serving(BaseHTTPRequestHandler):
    """Answers one connection's requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    # Buffered, so that headers and body leave together.
    wbufsize = -1
    sent: int | None = None
    told = (0, 0)

    def do_HEAD(self) -> None:
        """Send what `do_GET` does without the body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Send what is asked for."""
        raise NotImplementedError

    def send_part(self, file: BinaryIO, headers: dict[str, str], asked: str) -> None:
        """Send the part of a file that a ``Range`` names; everything where it names none."""
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", asked)
        if match is None:
            self.send(200, file.read(), headers)
            return
        size = file.seek(0, os.SEEK_END)
        # Without the first number the second one says how many of the last bytes are wanted.
        start = int(match[1]) if match[1] else max(0, size - int(match[2]))
        stop = min(int(match[2]) + 1, size) if match[1] and match[2] else size
        if start >= size:
            self.send(416, b"", {"Content-Range": f"bytes */{size}"})
            return
        file.seek(start)
        self.send(206, file.read(stop - start), {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        """Send an answer, the first `sent` bytes of its body."""
        self.told = status, len(body)
        self.send_response_only(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.sent is not None and len(body) > self.sent:
            body = body[: self.sent]
            self.close_connection = True
        # A client that finds a response wrong closes the connection.
        with contextlib.suppress(OSError):
            self.wfile.write(b"" if self.command == "HEAD" else body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing here; the servers keep logs."""


class _FileHandler(_Serving):
    """Serves the files of one connection."""

    owner: WebServer

    def do_GET(self) -> None:
        """Send a file or a part of it."""
        began = time.monotonic()
        try:
            self._answer()
        finally:
            path, status, n_bytes = unquote(self.path), *self.told
            request = Request(
                self.command, path, self.headers.get("Range", ""), status, began, time.monotonic(), n_bytes
            )
            self.owner.answered.append(request)

    def _answer(self) -> None:
        asked = self.headers.get("Range", "")
        with self.owner.lock:
            if self.owner.before is not None:
                self.owner.before(len(self.owner.requests))
            self.owner.requests.append(f"{self.command} {self.path} {asked}")
        time.sleep(self.owner.latency)
        self.sent = self.owner.sent
        file = self.owner.folder / unquote(urlsplit(self.path).path).lstrip("/")
        # A file may be removed at any time.
        try:
            opened = file.open("rb")
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            self.send(404, b"", {})
            return
        with opened:
            headers, condition = self.owner.headers, self.headers.get("If-Match")
            if self.owner.stamps:
                info = os.fstat(opened.fileno())
                headers = {
                    "ETag": f'"{info.st_mtime_ns:x}-{info.st_size:x}"',
                    "Last-Modified": formatdate(info.st_mtime, usegmt=True),
                    **headers,
                }
            if condition is not None and condition != headers.get("ETag") and not self.owner.ignore_conditions:
                self.send(412, b"", {})
                return
            self.send_part(opened, headers, asked if self.owner.ranges else "")


@dataclass(frozen=True)
class _Stored:
    """An object of `GoogleStorage`."""

    data: bytes
    generation: int
    when: float = field(default_factory=time.time)

    def headers(self) -> dict[str, str]:
        """Return what answers say of the object."""
        number = str(self.generation)
        return {"ETag": f'"{number}"', "x-goog-generation": number, "Last-Modified": formatdate(self.when, usegmt=True)}


def google_options(file: Path, address: str) -> dict[str, str]:
    """Write the file of a service account that names a server of one's own, and return the options with it."""
    account = {
        "gcs_base_url": address,
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    file.write_text(json.dumps(account))
    return {"google_service_account": str(file), "allow_http": "true"}


def _item(key: str, stored: _Stored) -> dict[str, str]:
    """Return what the JSON API tells of an object."""
    return {"kind": "storage#object", "name": key, "size": str(len(stored.data)), "generation": str(stored.generation)}


@dataclass
class GoogleStorage(_Loopback):
    """Google Cloud Storage in memory, to be used as a context manager: what object_store uses of its XML API, and reads by its JSON API, as TileDB's.

    Objects and ranges of them, lists, copies, uploads in parts, and writes under a condition on the generation. Who asks is not checked.

    Parameters
    ----------
    buckets : dict of str to dict
        Name of a bucket -> its objects by key.

    Examples
    --------
    >>> with GoogleStorage() as server:
    ...     server.buckets["cells"] = {}
    """

    buckets: dict[str, dict[str, _Stored]] = field(default_factory=dict)
    _uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    _generation: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        """Bind a free port."""
        storage = self

        class Handler(_GoogleHandler):
            owner = storage

        self._bind(Handler)

    def put(self, bucket: str, key: str, data: bytes, generation: int | None = None) -> _Stored | None:
        """Store an object and return it; None where its generation is another than the one given (0 stands for no object)."""
        with self._lock:
            old = self.buckets[bucket].get(key)
            if generation is not None and generation != (old.generation if old else 0):
                return None
            self._generation += 1
            self.buckets[bucket][key] = stored = _Stored(data, self._generation)
            return stored


class _GoogleHandler(_Serving):
    """Answers one connection's requests to a `GoogleStorage`."""

    owner: GoogleStorage
    _json: re.Match[str] | None = None

    def do_GET(self) -> None:
        """Send an object, a part of it, or a list."""
        bucket, key, query, _ = self._request()
        if self._json:
            self._tell(bucket, key, query)
        elif not key and bucket in self.owner.buckets:
            self._list(self.owner.buckets[bucket], query)
        elif stored := self._find(bucket, key):
            self.send_part(BytesIO(stored.data), stored.headers(), self.headers.get("Range", ""))

    def do_PUT(self) -> None:
        """Store an object, a copy, or a part of an upload."""
        bucket, key, query, body = self._request()
        if "uploadId" in query:
            self.owner._uploads[query["uploadId"]][int(query["partNumber"])] = body
            self.send(200, b"", {"ETag": f'"{query["partNumber"]}"'})
            return
        if "x-goog-copy-source" in self.headers:
            source = self._find(*unquote(self.headers["x-goog-copy-source"]).split("/", 1))
            if source is None:
                return
            body = source.data
        if bucket not in self.owner.buckets:
            self._refuse(404, "NoSuchBucket")
            return
        condition = self.headers.get("x-goog-if-generation-match")
        stored = self.owner.put(bucket, key, body, None if condition is None else int(condition))
        if stored is None:
            self._refuse(412, "PreconditionFailed")
        else:
            self.send(200, b"", stored.headers())

    def do_POST(self) -> None:
        """Begin an upload in parts, or complete one."""
        bucket, key, query, _ = self._request()
        if bucket not in self.owner.buckets:
            self._refuse(404, "NoSuchBucket")
        elif "uploads" in query:
            name = uuid4().hex
            self.owner._uploads[name] = {}
            self._send_xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
        else:
            parts = self.owner._uploads.pop(query["uploadId"])
            stored = cast("_Stored", self.owner.put(bucket, key, b"".join(parts[n] for n in sorted(parts))))
            self._send_xml("CompleteMultipartUploadResult", f"<ETag>{stored.generation}</ETag>", stored.headers())

    def do_DELETE(self) -> None:
        """Remove an object, or give up an upload."""
        bucket, key, query, _ = self._request()
        if "uploadId" in query:
            self.owner._uploads.pop(query["uploadId"], None)
        elif self._find(bucket, key):
            self.owner.buckets[bucket].pop(key, None)
        else:
            return
        self.send(204, b"", {})

    def _request(self) -> tuple[str, str, dict[str, str], bytes]:
        """Return bucket, key, query and body of the request."""
        parts = urlsplit(self.path)
        bucket, _, key = parts.path.lstrip("/").partition("/")
        # In the JSON API: /storage/v1/b/BUCKET/o/KEY, the slashes of the key quoted.
        self._json = re.fullmatch(r"/(?:download/)?storage/v1/b/([^/]+)(?:/o(?:/([^/]+))?)?", parts.path)
        if self._json:
            bucket, key = self._json[1], self._json[2] or ""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return unquote(bucket), unquote(key), dict(parse_qsl(parts.query, keep_blank_values=True)), body

    def _find(self, bucket: str, key: str) -> _Stored | None:
        """Return an object; None where there is none, which has been answered then."""
        stored = self.owner.buckets.get(bucket, {}).get(key)
        if stored is None:
            self._refuse(404, "NoSuchKey" if bucket in self.owner.buckets else "NoSuchBucket")
        return stored

    def _tell(self, bucket: str, key: str, query: dict[str, str]) -> None:
        """Answer a request to read by the JSON API: an object, what is known of it, or all that begin with a prefix."""
        if key:
            stored = self._find(bucket, key)
            if stored and query.get("alt") == "media":
                self.send_part(BytesIO(stored.data), stored.headers(), self.headers.get("Range", ""))
            elif stored:
                self._send_json(_item(key, stored))
            return
        objects, prefix, delimiter = self.owner.buckets.get(bucket, {}), query.get("prefix", ""), query.get("delimiter")
        listed = [key for key in sorted(objects) if key.startswith(prefix)]
        cut = {key: key[len(prefix) :].partition(delimiter or "\0") for key in listed}
        items = [_item(key, objects[key]) for key in listed if not cut[key][1]]
        folders = sorted({f"{prefix}{first}{divided}" for first, divided, _ in cut.values() if divided})
        self._send_json({"kind": "storage#objects", "items": items, "prefixes": folders})

    def _send_json(self, told: dict[str, Any]) -> None:
        self.send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

    def _list(self, objects: dict[str, _Stored], query: dict[str, str]) -> None:
        """Send a page of the objects with a prefix; what comes before a delimiter stands for all that begin with it."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = max(query.get("start-after", ""), query.get("continuation-token", ""))
        keys = [key for key in sorted(objects) if key.startswith(prefix) and key > after]
        page = keys[: int(query.get("max-keys", 1000))]
        found: dict[str, None] = {}
        for key in page:
            folder, divided, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if divided:
                found[f"<CommonPrefixes><Prefix>{escape(prefix + folder)}/</Prefix></CommonPrefixes>"] = None
                continue
            when = datetime.fromtimestamp(objects[key].when, UTC).isoformat().replace("+00:00", "Z")
            told = f"<Key>{escape(key)}</Key><LastModified>{when}</LastModified><Size>{len(objects[key].data)}</Size>"
            found[f"<Contents>{told}<ETag>{objects[key].generation}</ETag></Contents>"] = None
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(page) < len(keys) else ""
        self._send_xml("ListBucketResult", "".join(found) + more)

    def _send_xml(self, name: str, inside: str, headers: dict[str, str] | None = None) -> None:
        told = {"Content-Type": "application/xml", **(headers or {})}
        self.send(200, f"<{name}>{inside}</{name}>".encode(), told)

    def _refuse(self, status: int, code: str) -> None:
        self.send(status, _ERROR.format(code=code).encode(), {"Content-Type": "application/xml"})
