"""A small atlas of two datasets, and results of a model for most of its cells."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.testing.annotated import GENES, small_anndata

if TYPE_CHECKING:
    import pandas as pd

    from raggedatlas.atlas import RaggedAtlas


@dataclass(frozen=True, repr=False)
class Modelled:
    """An atlas and what a model said of its cells.

    Parameters
    ----------
    folder : Path
        Where the atlas lies, as ``atlas``, and the results, as ``z``.
    uids : (n_cells,) object array of str
        All cells, in table order.
    known : (n_known,) int64
        Which of these have a result, in the order of the results.
    values : (n_known, width) float32
        The results.
    """

    folder: Path
    uids: NDArray[Any]
    known: NDArray[np.int64]
    values: NDArray[np.float32]

    def open(self) -> "RaggedAtlas":
        """Open the atlas."""
        from raggedatlas.atlas import RaggedAtlas

        return RaggedAtlas.open(str(self.folder / "atlas"))

    def moved(self, folder: Path) -> "Modelled":
        """Copy everything to a folder that a test may change."""
        import shutil

        shutil.copytree(self.folder, folder)
        return Modelled(folder, self.uids, self.known, self.values)

    def expected(self, values: NDArray[Any] | None = None) -> "pd.DataFrame":
        """Give the results of all cells in table order, NaN where there is none."""
        import pandas as pd

        return pd.DataFrame(self.values if values is None else values, index=self.uids[self.known]).reindex(self.uids)


def write_results(folder: Path, uids: Any, values: Any, **facts: str) -> Path:  # noqa: ANN401  (what a writer takes)
    """Write and commit results.

    Parameters
    ----------
    folder : Path
        Result folder.
    uids : sequence of str
        Ids.
    values : array, or mapping of str to array
        Outputs.
    **facts
        What made them: ``model``, ``model_hash``, ``verb``.
    """
    from raggedatlas.results.writer import ResultDatasetWriter

    told = {f"result:{name}": text for name, text in facts.items()}
    with ResultDatasetWriter(folder, facts=told) as writer:
        writer.original_dataset_config = {"atlas": {"query": "all cells"}}
        writer.write_batch(list(uids), values)
    return folder


def make_modelled(folder: Path, n_cells: tuple[int, int] = (14, 11), width: int = 5) -> Modelled:
    """Make the atlas with one snapshot, and results for four of five of its cells, in an order by chance.

    Examples
    --------
    >>> import tempfile
    >>> made = make_modelled(Path(tempfile.mkdtemp()))
    >>> made.values.shape
    (20, 5)
    """
    from raggedatlas.atlas import RaggedAtlas

    rng = np.random.default_rng(0)
    atlas = RaggedAtlas.create(str(folder / "atlas"))
    for i, n in enumerate(n_cells):
        atlas.add(small_anndata(i, n, GENES[3 * i : 3 * i + 8]), f"data-{i}", organism="human", progress=False)
    uids = atlas.checkout(atlas.snapshot("before")).query().to_pandas().index.to_numpy(dtype=object)
    known = rng.permutation(len(uids))[: len(uids) * 4 // 5]
    values = rng.normal(size=(len(known), width)).astype(np.float32)
    write_results(
        folder / "z", uids[known], values, model="encoder", model_hash="ab" * 32, verb="infer", parent="runs/y"
    )
    return Modelled(folder, uids, known, values)
