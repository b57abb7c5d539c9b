"""A headless Chromium for tests and benchmarks of the viewer's page, driven by playwright."""

import os
import shutil
import time
from pathlib import Path
from typing import Any, Self

from playwright.sync_api import ConsoleMessage, Error, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist", "--disable-dev-shm-usage")
TIMEOUT = 120.0
READY = "() => document.body?.classList.contains('ready')"


def find_browser() -> str | None:
    """Find a Chromium on this machine; the variable CHROMIUM may name one."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a headless Chromium.

    Parameters
    ----------
    program : str
        Path of Chromium, as `find_browser` returns it.
    width, height : int
        Size of the page in pixels.
    """

    def __init__(self, program: str, *, width: int = 1280, height: int = 800) -> None:
        self.messages: list[str] = []
        """Errors, refused loads and console output of the page."""
        self.requests: list[str] = []
        """Addresses that the page requested."""
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(
            executable_path=program, args=list(FLAGS), chromium_sandbox=False
        )
        self._page = self._browser.new_page(viewport={"width": width, "height": height})
        self._page.set_default_timeout(TIMEOUT * 1000)
        self._page.on("console", self._log)
        self._page.on("pageerror", lambda error: self.messages.append(str(error)))
        self._page.on("request", lambda request: self.requests.append(request.url))
        self._session = self._page.context.new_cdp_session(self._page)

    def _log(self, message: ConsoleMessage) -> None:
        if not message.text.startswith("[.WebGL"):  # the software renderer's remarks on its own speed
            self.messages.append(message.text)

    def go(self, address: str) -> None:
        """Go to a page; messages and requests of the previous one are dropped."""
        self.messages.clear()
        self.requests.clear()
        self._page.goto(address, wait_until="commit")

    def open(self, address: str) -> None:
        """Go to a page and wait until its script has set the class ``ready``."""
        self._page.goto(address, wait_until="commit")
        self._page.wait_for_function(READY)

    def before_pages(self, script: str) -> None:
        """Run a script in every page opened from here on, before the page's own."""
        self._page.add_init_script(script)

    def run(self, script: str) -> Any:
        """Evaluate a JavaScript expression in the page, wait for its promise and return its value.

        Raises
        ------
        RuntimeError
            If it throws.
        """
        try:
            return self._page.evaluate(script)
        except Error as error:
            raise RuntimeError(str(error)) from error

    def wait(self, script: str) -> None:
        """Wait until a JavaScript expression is true.

        Raises
        ------
        TimeoutError
            If it stays false; with the last messages of the page.
        """
        end = time.monotonic() + TIMEOUT
        while not self.run(script):
            if time.monotonic() > end:
                raise TimeoutError(f"{script} stayed false. Messages of the page: {self.messages[-5:]}")
            self._page.wait_for_timeout(100)

    def picture(self, path: Path) -> Path:
        """Save a screenshot as PNG."""
        self._page.screenshot(path=path)
        return path

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the DevTools protocol on the page."""
        return self._session.send(method, parameters)

    def __enter__(self) -> Self:
        """Return the browser."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the browser."""
        self._browser.close()
        self._playwright.stop()
