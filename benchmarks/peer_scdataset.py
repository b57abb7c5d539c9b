"""Measure scDataset on the union h5ad, which it reads in place; run by the interpreter of ``.venv-peers-3.11``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import epochs
import measuring
from union import UNION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from measuring import Asked, Figure


def measure_loader(asked: Asked, figure: Figure) -> None:
    """Iterate over shuffled blocks of cells, fetched many batches at a time; never cut, because it delivers a fetch at a time."""
    import anndata
    from scdataset import BlockShuffling, scDataset

    pace = epochs.pace_of(asked, seconds=None)
    epochs.touch(asked.data / UNION)
    cells = anndata.read_h5ad(asked.data / UNION, backed="r")

    def fetch(collection: Any, rows: Any) -> Any:
        return collection.X[rows]

    loader = scDataset(
        cells,
        BlockShuffling(block_size=asked.setting["block"]),
        batch_size=pace.batch,
        fetch_factor=asked.setting["fetch"],
        fetch_callback=fetch,
        seed=pace.seed,
    )

    def epoch(number: int) -> Iterator[tuple[int, int]]:
        del number
        for batch in loader:
            yield batch.shape[0], batch.nnz

    epochs.timed_epochs(figure, pace, epoch)


if __name__ == "__main__":
    measuring.run("scdataset", {"loader": measure_loader})
