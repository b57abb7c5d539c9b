"""Measure homeobox's loaders, one setting per process; run by the interpreter of ``.venv-peers``.

Its own ``make_loader`` over torch's DataLoader with no workers; batches stay its ``SparseBatch``. Where torch
cannot be had, the same calls are made with the same orders by a few lines that do less than a DataLoader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import epochs
import measuring
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from measuring import Asked, Figure

OBS = ["cell_type", "donor"]
SPACE = "gene_expression"


def _query(asked: Asked) -> Any:
    import homeobox as hox

    epochs.touch(asked.atlas)
    return hox.RaggedAtlas.checkout_latest(str(asked.atlas)).query()


def _columns(asked: Asked) -> list[str] | None:
    return OBS if asked.setting.get("obs") else None


def _batches(dataset: Any, pace: epochs.Pace, figure: Figure, number: int) -> Iterable[Any]:
    """One epoch of batches of a map-style dataset, by its own loader where torch is there."""
    try:
        import torch
        from homeobox.dataloader import make_loader
    except ImportError:
        figure.extra["driver"] = "without torch: __getitems__ of each batch of a permutation"
        return _without_torch(dataset, pace, number)
    figure.extra["driver"] = "make_loader, torch DataLoader"
    torch.manual_seed(pace.seed + number)
    found: Iterable[Any] = make_loader(dataset, batch_size=pace.batch, shuffle=pace.shuffled)
    return found


def _without_torch(dataset: Any, pace: epochs.Pace, number: int) -> Iterator[Any]:
    rng = np.random.default_rng([pace.seed, number])
    order = rng.permutation(len(dataset)) if pace.shuffled else np.arange(len(dataset))
    for start in range(0, order.size, pace.batch):
        yield dataset.__getitems__(order[start : start + pace.batch].tolist())


def _counted(batches: Iterable[Any]) -> Iterator[tuple[int, int]]:
    for batch in batches:
        yield len(batch), len(batch.indices)


def measure_map(asked: Asked, figure: Figure) -> None:
    """Iterate over the map-style dataset, one read per batch."""
    pace = epochs.pace_of(asked)
    dataset = _query(asked).to_unimodal_dataset(SPACE, ["counts"], metadata_columns=_columns(asked))
    epochs.timed_epochs(figure, pace, lambda number: _counted(_batches(dataset, pace, figure, number)))


def measure_iterable(asked: Asked, figure: Figure) -> None:
    """Iterate over the buffered dataset; never cut, because it delivers a buffer at a time."""
    pace = epochs.pace_of(asked, seconds=None)
    query = _query(asked)

    def epoch(number: int, io: int = asked.setting["io"], prefetch: int = 2) -> Iterator[tuple[int, int]]:
        dataset = query.to_unimodal_dataset(
            SPACE,
            ["counts"],
            metadata_columns=_columns(asked),
            mode="iterable",
            batch_size=pace.batch,
            io_batch_size=io,
            prefetch=prefetch,
            shuffle=pace.shuffled,
            seed=pace.seed + number,
        )
        try:
            from homeobox.dataloader import make_loader

            batches = make_loader(dataset)
            figure.extra["driver"] = "make_loader, torch DataLoader"
        except ImportError:
            batches = dataset
            figure.extra["driver"] = "without torch: the dataset's own iterator"
        return _counted(batches)

    # Small buffers warm the code up without reading two large ones that nobody counts.
    epochs.timed_epochs(figure, pace, epoch, warm=lambda number: epoch(number, io=pace.batch, prefetch=1))


def measure_row(asked: Asked, figure: Figure) -> None:
    """Fetch single random cells from the map-style dataset."""
    dataset = _query(asked).to_unimodal_dataset(SPACE, ["counts"], metadata_columns=_columns(asked))

    def fetch(rows: Any) -> tuple[int, int]:
        batch = dataset.__getitems__(rows.tolist())
        return len(batch), len(batch.indices)

    epochs.timed_rows(figure, epochs.pace_of(asked), fetch, len(dataset))


if __name__ == "__main__":
    measuring.run("homeobox", {"map": measure_map, "iterable": measure_iterable, "row": measure_row})
