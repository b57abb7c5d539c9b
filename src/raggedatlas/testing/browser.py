"""A headless Chromium to look at pages with, driven through a pipe: for tests of what a person sees."""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--ignore-gpu-blocklist",
    "--remote-debugging-pipe",
)
_DRIVER = "[.WebGL"  # what the driver says of its own speed
_FREE = 10
_READ_SIZE = 2**20
_PATIENCE = 120.0


def find_browser() -> str | None:
    """Find a Chromium on this machine; the variable CHROMIUM may name one."""
    return os.environ.get("CHROMIUM") or next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a headless Chromium.

    Parameters
    ----------
    program : str
        What `find_browser` gives.
    width, height : int
        Size of the page in pixels.
    scale : float
        Pixels of the picture per pixel of the page.

    Examples
    --------
    >>> with Browser(find_browser()) as browser:  # doctest: +SKIP
    ...     browser.open("file:///tmp/page.html")
    ...     browser.run("document.title")
    """

    def __init__(self, program: str, *, width: int = 1280, height: int = 800, scale: float = 1.0) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        pipes = [*os.pipe(), *os.pipe()]
        inward, self._out, self._in, outward = (fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, _FREE) for pipe in pipes)
        for pipe in pipes:
            os.close(pipe)
        flags = [*_FLAGS, f"--user-data-dir={self._folder.name}", f"--window-size={width},{height}"]
        # Chromium reads file 3 and writes file 4; here the pipes have higher numbers, so that none is in the way.
        line = ["bash", "-c", f'exec "$0" "$@" 3<&{inward} 4>&{outward}', program, *flags, "about:blank"]
        self._process = subprocess.Popen(
            line,
            pass_fds=(inward, outward),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(inward)
        os.close(outward)
        self._rest = b""
        self._last = 0
        self.messages: list[str] = []
        """What the page said: errors, refused loads, texts of its console."""
        self.requests: list[str] = []
        """Addresses that the page asked for."""
        try:
            self._begin(width, height, scale)
        except BaseException:
            self.close()
            raise

    def _begin(self, width: int, height: int, scale: float) -> None:
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for room in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{room}.enable")
        size = {"width": width, "height": height, "screenWidth": width, "screenHeight": height}
        self.call("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=scale, mobile=False)

    def go(self, address: str) -> None:
        """Go to a page, and forget what the one before said and asked for."""
        self.messages.clear()
        self.requests.clear()
        self.call("Page.navigate", url=address)

    def open(self, address: str) -> None:
        """Go to a page, and wait until its program says that it is ready."""
        self.call("Page.navigate", url=address)
        wait = "new Promise(r => { const t = setInterval(() => { if (document.body?.classList.contains('ready')) { clearInterval(t); r(true) } }, 30) })"
        self.run(wait)

    def run(self, script: str) -> Any:  # noqa: ANN401  (whatever the script gives)
        """Evaluate JavaScript in the page, wait for its promise, and give its value.

        Raises
        ------
        RuntimeError
            If it throws.
        """
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = _PATIENCE) -> None:
        """Wait until JavaScript in the page gives something true.

        Raises
        ------
        TimeoutError
            If it does not; with what the page said.
        """
        end = time.monotonic() + seconds
        while not self.run(script):
            if time.monotonic() > end:
                raise TimeoutError(f"{script} stayed false. The page said: {self.messages[-5:]}")
            self.run("new Promise(r => setTimeout(r, 100))")

    def picture(self, path: Path) -> Path:
        """Save what the page shows as PNG."""
        self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return path

    def call(self, method: str, **parameters: Any) -> Any:  # noqa: ANN401
        """Call a method of the DevTools protocol on the page."""
        return self._ask(method, self._session, **parameters)

    def _ask(self, method: str, session: str | None = None, **parameters: Any) -> Any:  # noqa: ANN401
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("Chromium did not answer.")
            piece = os.read(self._in, _READ_SIZE)
            if not piece:
                raise RuntimeError("Chromium has ended.")
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, given = event.get("method", ""), event.get("params", {})
        if method == "Log.entryAdded":
            if given["entry"]["text"].startswith(_DRIVER):
                return
            self.messages.append(given["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(" ".join(str(item.get("value", item.get("description"))) for item in given["args"]))
        elif method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(given["exceptionDetails"])[:2000])
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])

    def close(self) -> None:
        """End the browser, and remove its folder."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._folder.cleanup()

    def __enter__(self) -> Self:
        """Use it within a block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.close()
