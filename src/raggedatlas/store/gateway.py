"""An object store on loopback, read-only, whose objects are the files of a published atlas.

Lance and obstore read object stores, and no web servers whose files are parts of others. This is their door to `PublishedFiles`, within the process:
listings and sizes are answered from the index, ranges are fetched. All that read one published atlas in a process, and the workers that it starts,
share it, and so its connections, its limits and its cache.
"""

import os
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import uuid4
from xml.sax.saxutils import escape

from raggedatlas.errors import AtlasError, NotFoundError
from raggedatlas.store.loopback import LOOPBACK
from raggedatlas.store.published import PublishedFiles
from raggedatlas.store.storage_errors import SERVED_ERROR

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_PAGE = 1000
_MERGED_GAP = 1 << 20


class Gateway:
    """A published atlas as a bucket on loopback.

    Pickled, it leads to the process that made it while that lives, else it is made anew. `address` is that of the
    published atlas, as messages show it; `make` opens the files, and is picklable. The name of the bucket, `bucket`,
    cannot be guessed, so that other users of this machine cannot read what a private atlas holds.
    """

    def __init__(self, address: str, make: Callable[[], PublishedFiles]) -> None:
        self.address, self._make = address, make
        self._lock, self._opening = threading.Lock(), threading.Lock()
        self._files: PublishedFiles | None = make()
        self._trusted: Mapping[str, str] | None = None
        self.bucket, self._port, self._process = uuid4().hex, 0, 0

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process, except where it is served."""
        _ = self.endpoint
        return {
            "address": self.address, "_make": self._make, "bucket": self.bucket, "_port": self._port, "_trusted": self._trusted,
        }  # fmt: skip

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Use the server of the process that pickled it."""
        vars(self).update(state, _files=None, _process=0, _lock=threading.Lock(), _opening=threading.Lock())

    @property
    def files(self) -> PublishedFiles:
        """The files, opened where another process has them."""
        # Threads that answer requests come at once.
        with self._opening:
            if self._files is None:
                made = self._make()
                if self._trusted is not None:
                    made.trust(self._trusted)
                self._files = made
            return self._files

    def trust(self, hashes: Mapping[str, str]) -> None:
        """Serve only files that have these hashes, path -> SHA-256, also where another process opens them anew."""
        self._trusted = hashes
        self.files.trust(hashes)

    @property
    def trusts_hashes(self) -> bool:
        """Whether only files are served that have certain hashes."""
        return self._trusted is not None

    @property
    def endpoint(self) -> str:
        """Address of the server, which is started where none answers."""
        with self._lock:
            if self._process != os.getpid():
                if not (self._port and _answers(self._port, self.bucket)):
                    self._port = self._serve()
                self._process = os.getpid()
        return f"http://{LOOPBACK}:{self._port}"

    @property
    def merged_gap(self) -> int:
        """Bytes that are fetched in the time of another request, as far as this process has measured it."""
        return _MERGED_GAP if self._files is None else self._files.merged_gap

    def options(self) -> dict[str, str]:
        """Return the storage options with which Lance and obstore read the bucket."""
        return {
            "aws_endpoint": self.endpoint, "aws_region": "us-east-1", "aws_skip_signature": "true", "allow_http": "true", "timeout": "600s",
        }  # fmt: skip

    def _serve(self) -> int:
        # The server must not keep what it serves: it ends with the last view that reads through it.
        handler = type("Handler", (_BucketHandler,), {"gateway": weakref.ref(self)})
        server = _Server((LOOPBACK, 0), handler)
        threading.Thread(target=server.serve_forever, name="gateway", daemon=True).start()

        def stop() -> None:
            server.shutdown()
            server.server_close()

        def end() -> None:
            # On a thread, as that waits, and this runs in a collection of garbage. One made before would not start in a fork.
            threading.Thread(target=stop, name="gateway", daemon=True).start()

        weakref.finalize(self, end).atexit = False
        return int(server.server_address[1])


def _answers(port: int, bucket: str) -> bool:
    """Return whether the server of a gateway is at a port."""
    from http.client import HTTPConnection, HTTPException

    connection = HTTPConnection(LOOPBACK, port, timeout=2)
    try:
        connection.request("HEAD", f"/{bucket}/")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


class _Server(ThreadingHTTPServer):
    block_on_close = False
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  (as in the base class)
        """Say nothing of clients that hang up."""


class _BucketHandler(BaseHTTPRequestHandler):
    """Answers of an object store to GET, HEAD and listings; all else is refused."""

    gateway: "weakref.ref[Gateway]"
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def log_message(self, *_: Any) -> None:  # noqa: ANN401  (as in the base class)
        """Log nothing."""

    def do_GET(self) -> None:
        """Answer with a listing, or with a range of a file."""
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = parse_qs(parts.query, keep_blank_values=True)
        owner = self.gateway()
        if owner is None or bucket != owner.bucket:
            self._refuse(403, "AccessDenied", "This is no public server.")
        elif "list-type" in query:
            self._list(owner, query)
        else:
            self._send(owner, key)

    do_HEAD = do_GET

    def _deny(self) -> None:
        self.close_connection = True
        self._refuse(403, "AccessDenied", "A published atlas is read-only.")

    do_PUT = do_POST = do_DELETE = _deny

    def _send(self, owner: Gateway, key: str) -> None:
        try:
            files = owner.files
            place = files.places.get(key)
            if not key:
                self._respond(200, b"")
                return
            if place is None:
                raise NotFoundError(key)
            size, asked = place.n_bytes, _RANGE.fullmatch(self.headers.get("Range", ""))
            start, stop = 0, size
            if asked is not None and asked[1]:
                start, stop = int(asked[1]), min(size, int(asked[2]) + 1) if asked[2] else size
            elif asked is not None and asked[2]:
                start = max(0, size - int(asked[2]))
            if asked is not None and start >= stop:
                self._refuse(416, "InvalidRange", "The range is not in the file.")
                return
            data = b"" if self.command == "HEAD" else files.read(key, start, stop)
        except NotFoundError:
            self._refuse(404, "NoSuchKey", "There is no such file.")
            return
        except (AtlasError, OSError, MemoryError) as error:
            # Of the scratch disk, say. Without an answer the client would ask again and again.
            self._refuse(400, f"{SERVED_ERROR}{type(error).__name__}", str(error))
            return
        headers = {
            "ETag": f'"{place.sha256[:32]}"',
            "Last-Modified": formatdate(0, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if asked is not None:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self._respond(200 if asked is None else 206, data, headers, length=stop - start)

    def _list(self, owner: Gateway, query: Mapping[str, list[str]]) -> None:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        try:
            files = owner.files
        except AtlasError as error:
            self._refuse(400, f"{SERVED_ERROR}{type(error).__name__}", str(error))
            return
        lines: list[str] = []
        folder, last, more = "", "", False
        for path in files.below(prefix):
            end = path.find(delimiter, len(prefix)) if delimiter else -1
            name = path if end < 0 else path[: end + 1]
            if name == folder or name <= after:
                continue
            if len(lines) == _PAGE:
                more = True
                break
            shown, last = escape(name), name
            if end >= 0:
                folder = name
                lines.append(f"<CommonPrefixes><Prefix>{shown}</Prefix></CommonPrefixes>")
                continue
            place = files.places[path]
            lines.append(
                f"<Contents><Key>{shown}</Key><Size>{place.n_bytes}</Size><ETag>&quot;{place.sha256[:32]}&quot;</ETag>"
                "<LastModified>1970-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if more else ""
        text = (
            f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Prefix>{escape(prefix)}</Prefix>'
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(lines)}</ListBucketResult>"
        )
        self._respond(200, text.encode(), {"Content-Type": "application/xml"})

    def _refuse(self, status: int, code: str, message: str) -> None:
        text = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>'
        self._respond(status, text.encode(), {"Content-Type": "application/xml"})

    def _respond(
        self, status: int, data: bytes | memoryview, headers: Mapping[str, str] | None = None, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
