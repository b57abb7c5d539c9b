"""Measure tiledbsoma-ml, one operation per process; run by the interpreter of ``.venv-peers-3.11``.

On one dataset only (``ONE``): writing all of them takes minutes and more memory than most machines have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import epochs
import measuring
from maker import ONE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from measuring import Asked, Figure


def measure_add(asked: Asked, figure: Figure) -> None:
    """Write one file as a SOMA experiment."""
    import tiledbsoma.io

    made = measuring.manifest(asked.data)
    number = made["files"].index(ONE)
    with measuring.timed(figure):
        tiledbsoma.io.from_h5ad(str(asked.atlas), str(asked.data / ONE), measurement_name="RNA")
    figure.cells, figure.nnz = made["cells"][number], made["nnz"][number]


def measure_loader(asked: Asked, figure: Figure) -> None:
    """Iterate over shuffled runs of 64 cells; never cut, because it delivers a buffer at a time."""
    import tiledbsoma
    import tiledbsoma_ml

    pace = epochs.pace_of(asked, seconds=None)
    epochs.touch(asked.atlas)
    with (
        tiledbsoma.Experiment.open(str(asked.atlas)) as experiment,
        experiment.axis_query(measurement_name="RNA") as query,
    ):

        def epoch(number: int, io: int = asked.setting["io"]) -> Iterator[tuple[int, int]]:
            dataset = tiledbsoma_ml.ExperimentDataset(
                query,
                layer_name="data",
                obs_column_names=["cell_type", "donor"],
                batch_size=pace.batch,
                io_batch_size=io,
                shuffle=pace.shuffled,
                seed=pace.seed + number,
                return_sparse_X=True,
            )
            for matrix, _ in tiledbsoma_ml.experiment_dataloader(dataset):
                yield matrix.shape[0], matrix.nnz

        epochs.timed_epochs(figure, pace, epoch, warm=lambda number: epoch(number, io=pace.batch))


if __name__ == "__main__":
    measuring.run("tiledbsoma-ml", {"add": measure_add, "loader": measure_loader})
