"""Which result folder a verb means: the one that was told, or the newest run of a verb under the results root."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raggedatlas.errors import NotFoundError

_RUN = re.compile(r"(\d{8})-(\d{6})-(.+)-[\w-]{4}")
_ROOT = "./results"


def find_results(
    config: Mapping[str, Any], results_dir: str | os.PathLike[str] | None = None, verb: str | None = None
) -> Path:
    """Find a result folder; only verbs and factories search, a dataset is told its place.

    Parameters
    ----------
    config : mapping
        Configuration: ``results.inference_dir`` names a folder, ``general.results_dir`` the root of all runs (``./results``).
    results_dir : str, path or None
        The folder, if it is known.
    verb : str or None
        Kind of run to look for; None looks for ``infer``.

    Returns
    -------
    pathlib.Path
        What was told; else what the configuration names; else the newest ``<YYYYMMDD>-<HHMMSS>-<verb>-<four letters>``.

    Raises
    ------
    NotFoundError
        If there is no such folder.
    """
    named = results_dir if results_dir is not None else config.get("results", {}).get("inference_dir")
    if named:
        folder = Path(named).expanduser()
        if not folder.is_dir():
            raise NotFoundError(f"There is no result folder {folder}; check the path.")
        return folder
    wanted = verb or "infer"
    root = Path(config.get("general", {}).get("results_dir") or _ROOT).expanduser()
    found = newest_run(root, wanted)
    if found is None:
        raise NotFoundError(
            f"There is no run of {wanted} in {root}; run it first, or name its folder by results_dir or results.inference_dir."
        )
    return found


def newest_run(root: Path, verb: str) -> Path | None:
    """Find the newest run of a verb; None where there is none. Of two in one second the last by name is taken."""
    runs = [
        (hit[1], hit[2], path.name, path)
        for path in (root.iterdir() if root.is_dir() else ())
        if (hit := _RUN.fullmatch(path.name)) and hit[3] == verb and path.is_dir()
    ]
    return max(runs)[-1] if runs else None
