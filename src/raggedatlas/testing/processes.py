"""Processes that a test starts: whatever the test does, none of them outlives it."""

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def started(words: Sequence[str | Path], **options: Any) -> Iterator["subprocess.Popen[str]"]:  # noqa: ANN401
    """Start a process that writes text into pipes, and kill it at the end of the block where it still runs.

    Parameters
    ----------
    words : sequence of str or Path
        What to run.
    **options
        Of `subprocess.Popen`; ``stdout`` and ``stderr`` are pipes unless they are given.

    Yields
    ------
    subprocess.Popen
        It has been waited for after the block, also where that ended by an error or a test's time was over.

    Examples
    --------
    >>> with started(["sleep", "60"]) as process:
    ...     pass
    >>> process.returncode
    -9
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with _interruptible():
        made = subprocess.Popen(words, text=True, **{**pipes, **options})
    with made as process:
        try:
            yield process
        finally:
            # Without this an error within the block would wait for a process that goes on.
            process.kill()
            process.wait()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Have processes heed Ctrl-C that are started within, also by a run in the background, which ignores it and hands that on."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
