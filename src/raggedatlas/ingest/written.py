"""What writing one group leaves: arrays, of which the last rows may still be on their way, and what is known of them."""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import StoreError
from raggedatlas.ingest.plan import GroupPlan, LayerPlan
from raggedatlas.store.arrays import ArraySpec


@dataclass
class WrittenGroup:
    """What writing one group found out.

    Parameters
    ----------
    group : GroupPlan
        What was planned.
    path : str
        Where it is.
    layers : dict
        Layer name -> the plan it came from.
    stored : dict
        Layer name -> dtype that it is stored in.
    specs, checksums : dict
        Path below the group -> array description, checksum.
    indptr : (n_rows + 1,) int64 or None
        Bounds of the rows' entries; None for dense groups.
    present : (n_rows,) int64 or None
        Cell of each row; None when row i is cell i.
    n_rows, n_entries, n_summed, n_new_features : int
        Rows, entries or values, entries summed away, and features that the registry did not know.
    """

    group: GroupPlan
    path: str
    layers: dict[str, LayerPlan] = field(default_factory=dict)
    stored: dict[str, np.dtype[Any]] = field(default_factory=dict)
    specs: dict[str, ArraySpec] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    indptr: NDArray[np.int64] | None = None
    n_rows: int = 0
    n_entries: int = 0
    n_summed: int = 0
    present: NDArray[np.int64] | None = None
    n_new_features: int = 0


def specs_json(specs: Mapping[str, ArraySpec]) -> str:
    """Write array descriptions as a record keeps them."""
    return json.dumps({path: json.loads(spec.to_json()) for path, spec in specs.items()}, sort_keys=True)


class Unfinished:
    """A group whose source has been read, and whose last rows are still on their way into its arrays.

    Parameters
    ----------
    written : WrittenGroup
        Complete but for `specs` and `checksums`.
    steps : ExitStack
        The steps of the pipeline that still run.
    close : callable
        Ends the arrays, once all rows are in them, and notes what they are.
    """

    def __init__(self, written: WrittenGroup, steps: contextlib.ExitStack, close: Callable[[], None]) -> None:
        self.written, self._steps, self._close = written, steps, close

    def __reduce__(self) -> tuple[Callable[[WrittenGroup], "Unfinished"], tuple[WrittenGroup]]:
        """Pickle a group that is finished."""
        return _finished, (self.written,)

    def finish(self) -> None:
        """Wait for the last rows and end the arrays, if that was not done yet; on any thread.

        Raises
        ------
        StoreError
            If something could not be written; the caller removes the group.
        """
        close, self._close = self._close, _nothing_left
        with self._steps:
            close()

    def abandon(self) -> None:
        """Wait for what is being written right now, and write nothing more."""
        self._steps.__exit__(StoreError, StoreError("abandoned"), None)


def _finished(written: WrittenGroup) -> Unfinished:
    return Unfinished(written, contextlib.ExitStack(), _nothing_left)


def _nothing_left() -> None:
    """Do nothing."""
