"""Ranges of the files of a web server: few requests at once, repeated as the server asks, redirected to public servers alone."""

import ipaddress
import json
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from raggedatlas.errors import AtlasError, CorruptError, LimitError, MissingExtraError, NotFoundError, StoreError
from raggedatlas.store.runtime import share

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

T = TypeVar("T")

MOST_AT_ONCE, MOST_PER_HOST = 16, 6
"""Requests under way at the same time: in all, and to one host, as browsers limit them."""

ATTEMPTS, LONGEST_WAIT = 6, 60.0
"""How often a request is made, and how many seconds are waited at most before the next attempt."""

RESOLVED_SECONDS = 3600.0
"""How long the address is used to which a server redirected; signed addresses are valid for about so long."""

_MEASURED_BYTES, _WEIGHT = 1 << 18, 0.2
"""Bytes from which on a body tells the bandwidth, and how much each answer counts."""

_MOST_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_BUSY = (408, 425, 429, 500, 502, 503, 504)

ZENODO = "https://zenodo.org"
_ZENODO_DOI = "10.5281/zenodo."


@dataclass(frozen=True)
class WebFolder:
    """A folder of files on a web server."""

    address: str  # the folder, as messages show it
    before: str  # what stands before the name of a file in its address
    after: str = ""  # what stands after it
    # Of each request to the host of the folder, such as a token; no other host gets them
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    any_redirect: bool = False  # follow redirects to servers of this machine and of private networks, too
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False, compare=False)  # waits for some seconds
    # Seconds until an answer begins, and bytes a second of its body; each the mean of the last ones.
    _pace: list[float] = field(default_factory=lambda: [0.05, 20e6], init=False, repr=False, compare=False)
    # Address of a file -> the one that it was redirected to, and when.
    _resolved: dict[str, tuple[str, float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, address: str, *, any_redirect: bool = False) -> "WebFolder":
        """Return the folder at an address: ``https://``, ``http://``, ``hf://datasets/owner/name``, or ``doi:`` of a record of Zenodo."""
        scheme = address.partition(":")[0].lower()
        if scheme == "hf":
            return cls._of_hub(address, any_redirect=any_redirect)
        if scheme == "doi" or address.lower().startswith(("https://doi.org/", "http://doi.org/")):
            return cls._of_doi(address, any_redirect=any_redirect)
        if not urlsplit(address).hostname:
            raise StoreError(f"{address!r} names no host; expected e.g. 'https://lab.org/lung.atlas'.")
        folder, _, query = address.partition("?")
        return cls(folder, f"{folder.rstrip('/')}/", f"?{query}" if query else "", any_redirect=any_redirect)

    @classmethod
    def _of_hub(cls, address: str, *, any_redirect: bool) -> "WebFolder":
        try:
            from huggingface_hub import constants, get_token
        except ImportError as error:
            raise MissingExtraError(
                "hf:// needs huggingface_hub; install it with pip install 'raggedatlas[hub]'."
            ) from error
        kind, owner, name, *folders = [*address.partition("://")[2].strip("/").split("/"), "", "", ""]
        if kind not in {"datasets", "models", "spaces"} or not owner or not name:
            raise StoreError(
                f"{address!r} is no folder of the Hub; expected 'hf://datasets/<owner>/<name>[/<folder>]'."
            )
        name, _, revision = name.partition("@")
        repository = f"{owner}/{name}" if kind == "models" else f"{kind}/{owner}/{name}"
        below = "".join(f"{quote(part)}/" for part in folders if part)
        token = get_token()
        return cls(
            address, f"{constants.ENDPOINT}/{repository}/resolve/{quote(revision or 'main', safe='')}/{below}",
            headers={"Authorization": f"Bearer {token}"} if token else {}, any_redirect=any_redirect,
        )  # fmt: skip

    @classmethod
    def _of_doi(cls, address: str, *, any_redirect: bool) -> "WebFolder":
        doi = address.partition("doi.org/")[2] if "doi.org/" in address else address.partition(":")[2]
        number = doi.strip("/ ").lower().removeprefix(_ZENODO_DOI)
        if not number.isdecimal():
            raise StoreError(
                f"{address!r} is no DOI of Zenodo; expected 'doi:{_ZENODO_DOI}<number>'. Of other archives give the address of the folder."
            )
        records = cls(address, f"{ZENODO}/api/records/", any_redirect=any_redirect)
        # The DOI of all versions of a record leads to its newest.
        try:
            found = json.loads(records.read(number, 1 << 22))
            newest = int(found["id"])
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptError(
                f"{ZENODO} answered for {address} with something else than a record; try again."
            ) from error
        return cls(address, f"{ZENODO}/api/records/{newest}/files/", "/content", any_redirect=any_redirect)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out connections, and addresses that may be signatures."""
        return {k: v for k, v in vars(self).items() if not k.startswith("_")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Begin without connections."""
        vars(self).update(state, _resolved={}, _pace=[0.05, 20e6])

    @property
    def merged_gap(self) -> int:
        """Bytes that are fetched in the time of another request, by the last answers."""
        return int(min(max(self._pace[0] * self._pace[1], 1 << 14), 1 << 22))

    def url(self, name: str) -> str:
        """Return the address of a file."""
        return f"{self.before}{quote(name)}{self.after}"

    def read(self, name: str, most: int) -> bytes:
        """Return all bytes of a small file; `LimitError` if it has more than `most`."""
        shown = self._shown(name)

        def take(answer: "BaseHTTPResponse") -> bytes:
            if answer.status != 200:
                raise StoreError(f"{shown}: the server answered {answer.status}, not with the file; check the address.")
            _refuse_encoded(shown, answer)
            data, declared = answer.read(most + 1, decode_content=False), answer.headers.get("Content-Length", "")
            if len(data) > most:
                raise LimitError(f"{shown} has more than {most:,} bytes; a file of this kind has fewer.")
            if declared.isdecimal() and int(declared) != len(data):
                raise _IncompleteError(f"{shown}: the server sent {len(data):,} of {declared} bytes.")
            return bytes(data)

        return self._get(name, {}, take)

    def read_range(self, name: str, start: int, stop: int, size: int) -> bytes:
        """Return the bytes of a file from `start` to `stop`; the server must confirm that the whole file has `size`."""
        shown = self._shown(name)

        def take(answer: "BaseHTTPResponse") -> bytes:
            if answer.status == 416:
                raise CorruptError(
                    f"{shown} has fewer than {stop:,} bytes; {size:,} are listed. It was replaced or cut short."
                )
            _refuse_encoded(shown, answer)
            if answer.status == 206:
                unit, _, span = answer.headers.get("Content-Range", "").partition(" ")
                said, _, total = span.partition("/")
                if unit.lower() != "bytes" or said != f"{start}-{min(stop, size) - 1}":
                    raise StoreError(
                        f"{shown}: the server answered with other bytes ({span or 'no range'}) than {start}-{stop - 1}."
                    )
                if total not in {"*", str(size)}:
                    raise CorruptError(
                        f"{shown} has {total} bytes, {size:,} are listed: it was replaced. Open the atlas again."
                    )
            elif start != 0 or stop != size:
                raise StoreError(
                    f"{shown}: the server does not serve parts of a file (HTTP ranges), which are needed to read it without copying it; "
                    "copy the folder to this machine, or put it on a server with ranges."
                )
            room, most, began = bytearray(), stop - start, time.perf_counter()
            # One byte more than wanted tells a body that is too long.
            while len(room) <= most and (piece := answer.read(most + 1 - len(room), decode_content=False)):
                room += piece
            if len(room) < most:
                raise _IncompleteError(f"{shown}: the server sent {len(room):,} of {most:,} bytes at byte {start:,}.")
            if len(room) > most:
                raise CorruptError(f"{shown}: the server sent more than the {most:,} bytes that were asked for.")
            if len(room) > _MEASURED_BYTES:
                self._note(1, len(room) / max(time.perf_counter() - began, 1e-6))
            return bytes(room)

        return self._get(name, {"Range": f"bytes={start}-{stop - 1}"}, take)

    def _note(self, which: int, value: float) -> None:
        self._pace[which] += _WEIGHT * (value - self._pace[which])

    def _get(self, name: str, headers: Mapping[str, str], take: "Callable[[BaseHTTPResponse], T]") -> T:
        """Return what is taken of an answer; the request is made again where the server is busy or the connection breaks."""
        from urllib3.exceptions import HTTPError, SSLError

        first, reason, wait = self.url(name), "", 0.0
        for attempt in range(ATTEMPTS):
            if attempt:
                self.sleep(wait)
            wait = min(LONGEST_WAIT, 0.25 * 2.0 ** (attempt + 1)) * random.uniform(0.5, 1.0)
            try:
                # Few enough requests are under way, in all and to the host.
                host = urlsplit(self._resolved.get(first, (first, 0.0))[0]).netloc
                with share(f"requests to {host}", lambda: threading.BoundedSemaphore(MOST_PER_HOST)), _AT_ONCE:
                    answer = self._follow(first, headers)
                    try:
                        if answer.status not in _BUSY:
                            self._check_status(name, answer.status)
                            return take(answer)
                    finally:
                        answer.close()
                    reason = f"the server answered {answer.status}"
                    asked = _retry_after(answer.headers.get("Retry-After"))
                    wait = wait if asked is None else asked
            except _IncompleteError as error:
                reason = str(error)
            # urllib3 lets a `ValueError` about a body through whose parts have impossible lengths.
            except (HTTPError, ValueError) as error:
                # What refused an address is passed on as the cause of a failed connection.
                refusal = next((one for one in (error, *error.args) if isinstance(one, AtlasError)), None)
                if refusal is not None:
                    raise refusal from None
                if isinstance(error, SSLError) or isinstance(error.__cause__, SSLError):
                    raise StoreError(
                        f"{self._shown(name)}: the certificate of the server is not accepted ({error})."
                    ) from error
                self._resolved.pop(first, None)
                reason = _plain(error)
        raise StoreError(f"{self._shown(name)} cannot be read: {reason}; so in {ATTEMPTS} attempts. Try again later.")

    def _check_status(self, name: str, status: int) -> None:
        if status in {404, 410}:
            raise NotFoundError(f"There is no file {self._shown(name)}; check the address.")
        if status in {401, 403}:
            raise StoreError(
                f"{self._shown(name)}: the server refuses access ({status}). Check the address, and the login where it needs one."
            )
        if status not in {200, 206, 416}:
            raise StoreError(f"{self._shown(name)}: the server answered {status}; check the address.")

    def _follow(self, first: str, headers: Mapping[str, str]) -> "BaseHTTPResponse":
        """Make one request, follow redirects, and remember where they lead."""
        known = self._resolved.get(first)
        if known is not None and time.monotonic() - known[1] < RESOLVED_SECONDS:
            answer = self._ask(known[0], headers)
            if answer.status in {200, 206, 416, *_BUSY}:
                return answer
            # The signature has expired (some stores say 400), or the file has moved.
            answer.close()
        self._resolved.pop(first, None)
        url, permanent = first, False
        for _ in range(_MOST_REDIRECTS + 1):
            answer = self._ask(url, headers)
            if answer.status not in _REDIRECTS:
                if permanent:
                    self._resolved[first] = url, time.monotonic()
                return answer
            answer.close()
            url, permanent = self._redirected(url, answer.headers.get("Location", "")), True
        raise StoreError(f"{self.address} redirects more than {_MOST_REDIRECTS} times; check the address.")

    def _redirected(self, source: str, location: str) -> str:
        """Return where a redirect leads; refuse what is no address of a web server, and what leaves https."""
        try:
            target = urljoin(source, location)
            before, after = urlsplit(source), urlsplit(target)
        except ValueError as error:
            raise StoreError(f"{self.address} redirects to {location!a}, which is no address: {error}.") from error
        if (
            after.scheme not in {"http", "https"}
            or not after.hostname
            or (before.scheme, after.scheme) == ("https", "http")
        ):
            raise StoreError(
                f"{self.address} redirects to {after.scheme}://{after.hostname or ''}, which is not followed; only web servers are, "
                "and from https only to https."
            )
        return target

    def _ask(self, url: str, headers: Mapping[str, str]) -> "BaseHTTPResponse":
        """Make one request; only the host of the folder gets the login."""
        own = urlsplit(self.before)
        parts = urlsplit(url)
        same = (parts.scheme, parts.netloc) == (own.scheme, own.netloc)
        # A host in a private network is asked where the user named one there; no redirect leads to another.
        manager: PoolManager = self._managers[not (same or self.any_redirect)]
        if self._proxied is not None and not proxy_bypass(parts.hostname or ""):
            # The proxy connects, and decides which networks can be reached.
            manager = self._proxied
        sent = {"Accept-Encoding": "identity", "User-Agent": "raggedatlas", **headers, **(self.headers if same else {})}
        began = time.perf_counter()
        answer = manager.request("GET", url, headers=sent, redirect=False, retries=False, preload_content=False)
        self._note(0, time.perf_counter() - began)
        return answer

    @cached_property
    def _managers(self) -> "dict[bool, PoolManager]":
        """Pools of connections, of which that of True refuses addresses of this machine and of private networks."""
        import urllib3

        def guarded(pool: Any) -> Any:  # noqa: ANN401  (a class of urllib3)
            class Connection(pool.ConnectionCls):  # type: ignore[misc]
                def _new_conn(self) -> Any:  # noqa: ANN401  (a socket)
                    socket = super()._new_conn()
                    # The address that was connected to is looked at, not the one that a name had before: names can be given other addresses meanwhile.
                    address = ipaddress.ip_address(socket.getpeername()[0].partition("%")[0])
                    if not (getattr(address, "ipv4_mapped", None) or address).is_global:
                        socket.close()
                        raise StoreError(
                            f"The server redirects to {self.host}, which is in this machine or a private network ({address}); that is not "
                            "followed. Give allow_redirects=True if you trust it."
                        )
                    return socket

            return type(pool.__name__, (pool,), {"ConnectionCls": Connection})

        any_address, public = (urllib3.PoolManager(**_pool_settings()) for _ in range(2))
        pools = public.pool_classes_by_scheme
        public.pool_classes_by_scheme = {scheme: guarded(pool) for scheme, pool in pools.items()}
        return {False: any_address, True: public}

    @cached_property
    def _proxied(self) -> "PoolManager | None":
        import urllib3

        found = getproxies()
        proxy = found.get("https") or found.get("http")
        return urllib3.ProxyManager(proxy, **_pool_settings()) if proxy and proxy.startswith("http") else None

    def _shown(self, name: str) -> str:
        return f"{self.address.partition('?')[0].rstrip('/')}/{name}"


def _refuse_encoded(shown: str, answer: "BaseHTTPResponse") -> None:
    if answer.headers.get("Content-Encoding", "identity").lower() not in {"identity", ""}:
        raise StoreError(f"{shown}: the server compresses what it sends, although it was asked for plain bytes.")


class _IncompleteError(StoreError):
    """A body that ended early; the request is made again."""


_AT_ONCE = threading.BoundedSemaphore(MOST_AT_ONCE)


def _pool_settings() -> dict[str, Any]:
    import urllib3

    return {"num_pools": 32, "maxsize": MOST_PER_HOST, "timeout": urllib3.Timeout(connect=15, read=60)}


def _retry_after(text: str | None) -> float | None:
    """Return how many seconds a server asks to wait; None where it does not say."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            when = parsedate_to_datetime(text)
        except (ValueError, OverflowError):
            return None
        seconds = (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), LONGEST_WAIT) if math.isfinite(seconds) else None


def _plain(error: BaseException) -> str:
    """Return why a connection failed, without the objects that urllib3 prints."""
    text = str(error.__cause__ or error)
    return text.rpartition(">: ")[2] or text
