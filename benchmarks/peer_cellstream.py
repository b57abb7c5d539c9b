"""Measure cellstream, one operation per process; run by the interpreter of ``.venv-peers``.

It keeps one matrix over all genes and has no loader, so that ``gather_rows`` is called for each batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import epochs
import measuring
from union import UNION

if TYPE_CHECKING:
    from collections.abc import Callable

    from measuring import Asked, Figure


def measure_add(asked: Asked, figure: Figure) -> None:
    """Write the union file as an archive of cells, streamed from its path."""
    import cellstream

    made = measuring.manifest(asked.data)
    with measuring.timed(figure):
        cellstream.write_sharded(str(asked.data / UNION), str(asked.atlas), layout="cell", overwrite=True)
    figure.cells, figure.nnz = sum(made["cells"]), sum(made["nnz"])


def _reader(asked: Asked) -> tuple[Callable[[Any], tuple[int, int]], int]:
    import cellstream

    epochs.touch(asked.atlas)
    store = cellstream.open(str(asked.atlas))
    n_threads = asked.setting.get("n_threads", 1)

    def fetch(rows: Any) -> tuple[int, int]:
        found = store.gather_rows(rows, n_threads=n_threads)
        return found.shape[0], found.nnz

    return fetch, store.shape[0]


def measure_gather(asked: Asked, figure: Figure) -> None:
    """Gather the rows of each batch."""
    fetch, n_rows = _reader(asked)
    epochs.timed_callers(figure, epochs.pace_of(asked), fetch, n_rows)


def measure_row(asked: Asked, figure: Figure) -> None:
    """Gather single random rows."""
    fetch, n_rows = _reader(asked)
    epochs.timed_rows(figure, epochs.pace_of(asked), fetch, n_rows)


def measure_cell_type(asked: Asked, figure: Figure) -> None:
    """Take every cell of one cell type to AnnData."""
    import cellstream
    import numpy as np

    made = measuring.manifest(asked.data)
    store = cellstream.open(str(asked.atlas))
    for _ in range(asked.repeats):
        with measuring.timed(figure):
            rows = np.flatnonzero(store.obs["cell_type"] == made["cell_type"])
            adata = store.gather_rows_adata(rows, n_threads=2)
        figure.answer = measuring.matrix_answer(adata)
    figure.cells, figure.nnz = figure.answer["cells"], figure.answer["nnz"]


MEASURES = {"add": measure_add, "gather": measure_gather, "row": measure_row, "cell_type": measure_cell_type}

if __name__ == "__main__":
    measuring.run("cellstream", MEASURES)
