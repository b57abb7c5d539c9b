"""Measure slafdb, one operation per process; run by the interpreter of ``.venv-peers-3.11``.

On one dataset only, as tiledbsoma-ml. Its default loader (a mixture of 16 scanners) in raw mode: tables of
(cell, gene, count), no tokens.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import epochs
import measuring
from maker import ONE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from measuring import Asked, Figure


def measure_add(asked: Asked, figure: Figure) -> None:
    """Convert one file with slafdb's defaults."""
    from slaf.data.converter import SLAFConverter

    made = measuring.manifest(asked.data)
    number = made["files"].index(ONE)
    with contextlib.redirect_stdout(sys.stderr), measuring.timed(figure):
        SLAFConverter().convert(str(asked.data / ONE), str(asked.atlas))
    figure.cells, figure.nnz = made["cells"][number], made["nnz"][number]


def measure_loader(asked: Asked, figure: Figure) -> None:
    """Iterate over raw batches; never cut, because it delivers a buffer at a time."""
    from slaf.core.slaf import SLAFArray
    from slaf.ml.dataloaders import SLAFDataLoader

    pace = epochs.pace_of(asked, seconds=None)
    epochs.touch(asked.atlas)
    array = SLAFArray(str(asked.atlas))

    def epoch(number: int) -> Iterator[tuple[int, int]]:
        del number
        loader = SLAFDataLoader(array, batch_size=pace.batch, raw_mode=True, verbose=False)
        left = array.shape[0]
        for batch in loader:
            yield len(batch["cell_ids"]), len(batch["x"])
            left -= len(batch["cell_ids"])
            if not left:  # its end of an epoch is a wait of a minute for more, which we do not count
                return

    with contextlib.redirect_stdout(sys.stderr):
        epochs.timed_epochs(figure, pace, epoch)


if __name__ == "__main__":
    measuring.run("slafdb", {"add": measure_add, "loader": measure_loader})
