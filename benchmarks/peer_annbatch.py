"""Measure annbatch, one operation per process; run by the interpreter of ``.venv-peers``.

Its own collection, shuffled while it is written, read by its own loader through the zarrs pipeline; batches
stay scipy CSR with two columns of cell metadata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import epochs
import measuring
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from measuring import Asked, Figure

OBS = ["cell_type", "donor"]


def _switch_on_zarrs() -> None:
    import zarr
    import zarrs  # noqa: F401  (registers the pipeline)

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})


def measure_add(asked: Asked, figure: Figure) -> None:
    """Write the shuffled collection of every file, with annbatch's defaults."""
    import annbatch

    _switch_on_zarrs()
    made = measuring.manifest(asked.data)
    with measuring.timed(figure):
        collection = annbatch.DatasetCollection(str(asked.atlas))
        paths = [str(asked.data / name) for name in made["files"]]
        collection.add_adatas(paths, shuffle=True, rng=np.random.default_rng(0))
    figure.cells, figure.nnz = sum(made["cells"]), sum(made["nnz"])


def _load(group: Any) -> Any:
    import anndata as ad

    return ad.AnnData(X=ad.io.sparse_dataset(group["X"]), obs=ad.io.read_elem(group["obs"])[OBS])


def measure_loader(asked: Asked, figure: Figure) -> None:
    """Iterate over batches of random or consecutive runs of cells."""
    import annbatch

    _switch_on_zarrs()
    pace = epochs.pace_of(asked)
    epochs.touch(asked.atlas)
    collection = annbatch.DatasetCollection(str(asked.atlas))
    loader = annbatch.Loader(
        batch_size=pace.batch,
        chunk_size=asked.setting["chunk"],
        preload_nchunks=asked.setting["preload"],
        shuffle=pace.shuffled,
        preload_to_gpu=False,
        rng=np.random.default_rng(pace.seed) if pace.shuffled else None,
    ).use_collection(collection, load_adata=_load)

    def epoch(number: int) -> Iterator[tuple[int, int]]:
        del number
        for batch in loader:
            yield batch["X"].shape[0], batch["X"].nnz

    epochs.timed_epochs(figure, pace, epoch)


if __name__ == "__main__":
    measuring.run("annbatch", {"add": measure_add, "loader": measure_loader})
