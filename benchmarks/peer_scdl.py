"""Measure bionemo-scdl, one operation per process; run by the interpreter of ``.venv-peers-3.11``.

On one dataset only (``ONE``): its arrays take 8 bytes for each non-zero.
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
    """Convert one file to memory-mapped arrays."""
    from bionemo.scdl.io.single_cell_memmap_dataset import SingleCellMemMapDataset

    made = measuring.manifest(asked.data)
    number = made["files"].index(ONE)
    with measuring.timed(figure):
        SingleCellMemMapDataset(str(asked.atlas), h5ad_path=str(asked.data / ONE), use_X_not_raw=True).save()
    figure.cells, figure.nnz = made["cells"][number], made["nnz"][number]


def measure_loader(asked: Asked, figure: Figure) -> None:
    """Iterate by torch's DataLoader over cells in a random order, collated to CSR."""
    import torch
    from bionemo.scdl.io.single_cell_memmap_dataset import SingleCellMemMapDataset
    from bionemo.scdl.util.torch_dataloader_utils import collate_sparse_matrix_batch

    pace = epochs.pace_of(asked)
    epochs.touch(asked.atlas)
    loader = torch.utils.data.DataLoader(
        SingleCellMemMapDataset(str(asked.atlas)),
        batch_size=pace.batch,
        shuffle=True,
        generator=torch.Generator().manual_seed(pace.seed),
        collate_fn=collate_sparse_matrix_batch,
    )

    def epoch(number: int) -> Iterator[tuple[int, int]]:
        del number
        for batch in loader:
            yield batch.shape[0], batch.values().shape[0]

    epochs.timed_epochs(figure, pace, epoch)


if __name__ == "__main__":
    measuring.run("bionemo-scdl", {"add": measure_add, "loader": measure_loader})
