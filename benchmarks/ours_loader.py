"""Measure the training loader of raggedatlas, one setting per process.

``python benchmarks/ours_loader.py loader --data FOLDER --atlas FOLDER --setting JSON`` prints one
JSON line. The setting takes the fields of ``epochs.Pace`` and ``threads``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import epochs
import measuring

if TYPE_CHECKING:
    from collections.abc import Iterator

    from measuring import Asked, Figure

OBS = ["cell_type", "donor"]
MADE_AT_ONCE = 4


def _query(asked: Asked) -> Any:
    from raggedatlas import RaggedAtlas

    epochs.touch(asked.atlas)
    return RaggedAtlas.checkout_latest(str(asked.atlas)).query()


def measure_loader(asked: Asked, figure: Figure) -> None:
    """Iterate over shuffled or ordered batches with two columns of cell metadata."""
    from raggedatlas import Loader

    pace = epochs.pace_of(asked)
    shuffle = "full" if pace.shuffled else None
    threads = asked.setting.get("threads", 2)
    query = _query(asked)
    started = time.perf_counter()
    loader = Loader(query, batch_size=pace.batch, shuffle=shuffle, seed=pace.seed, obs=OBS, threads=threads)
    figure.extra["plan_seconds"] = time.perf_counter() - started

    def epoch(number: int) -> Iterator[tuple[int, int]]:
        loader.set_epoch(number)
        for batch in loader:
            yield len(batch), batch.X.nnz

    epochs.timed_epochs(figure, pace, epoch)


def measure_row(asked: Asked, figure: Figure) -> None:
    """Fetch single random cells from the map-style dataset."""
    from raggedatlas import CellDataset

    dataset = CellDataset(_query(asked), obs=OBS)

    def fetch(rows: Any) -> tuple[int, int]:
        batch = dataset.__getitems__(rows.tolist())
        return len(batch), batch.X.nnz

    epochs.timed_rows(figure, epochs.pace_of(asked), fetch, len(dataset))


def measure_build(asked: Asked, figure: Figure) -> None:
    """Make the datasets of a recipe, a few at a time, and add them; one entry of seconds per call of `add`."""
    import h5py

    from raggedatlas import RaggedAtlas

    recipe, at_once = asked.setting["recipe"], asked.setting.get("at_once", 1)
    atlas = RaggedAtlas.create(str(asked.atlas))
    numbers = range(len(recipe["genes"]))
    made_at_once = max(MADE_AT_ONCE, at_once)
    for first in numbers[::made_at_once]:
        paths = _make_apart(asked.data, recipe, numbers[first : first + made_at_once])
        for path in paths:
            with h5py.File(path) as file:
                figure.nnz += int(file["X/indptr"][-1])
        for start in range(0, len(paths), at_once):
            with measuring.timed(figure):
                atlas.add([str(path) for path in paths[start : start + at_once]], progress=False)
        figure.cells += recipe["cells"] * len(paths)
        for path in paths:
            path.unlink()
    atlas.snapshot()
    figure.extra["datasets"] = len(numbers)


def _make_apart(folder: Path, recipe: dict[str, Any], numbers: range) -> list[Path]:
    """Make some datasets in a separate process, whose memory is not ours."""
    folder.mkdir(parents=True, exist_ok=True)
    code = (
        "import json, sys; from pathlib import Path; from maker import Recipe, write_dataset\n"
        "recipe = Recipe(**{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(sys.argv[1]).items()})\n"
        "for number in map(int, sys.argv[3:]): write_dataset(recipe, number, Path(sys.argv[2]) / f'd{number}.h5ad')"
    )
    command = [sys.executable, "-c", code, json.dumps(recipe), str(folder), *map(str, numbers)]
    subprocess.run(command, cwd=Path(__file__).parent, check=True)
    return [folder / f"d{number}.h5ad" for number in numbers]


if __name__ == "__main__":
    measuring.run("raggedatlas", {"loader": measure_loader, "row": measure_row, "build": measure_build})
