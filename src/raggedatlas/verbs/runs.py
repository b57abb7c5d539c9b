"""Folders of runs under one root, named by when they began and what they did."""

import base64
import os
from datetime import UTC, datetime
from pathlib import Path


def new_run(root: str | os.PathLike[str], verb: str) -> Path:
    """Name a folder that is not there yet, for a run that begins now: ``<root>/<YYYYMMDD-HHMMSS>-<verb>-<4 letters>`` (UTC).

    Examples
    --------
    >>> new_run("results", "infer").name.split("-")[2]
    'infer'
    """
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    while True:
        letters = base64.urlsafe_b64encode(os.urandom(3)).decode()
        made = Path(root) / f"{now}-{verb}-{letters}"
        if not made.exists():
            return made
