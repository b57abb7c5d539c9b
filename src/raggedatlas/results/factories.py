"""Which class writes or reads a result folder: what lies in it decides, and no configuration (seed 003, step 3)."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raggedatlas.errors import NotFoundError
from raggedatlas.model.arguments import checked
from raggedatlas.results.discovery import find_results
from raggedatlas.results.folder import DATABASE, is_begun, is_committed
from raggedatlas.results.npy import has_npy_results

if TYPE_CHECKING:
    from raggedatlas.results.dataset import ResultDataset
    from raggedatlas.results.inference import InferenceDataSet
    from raggedatlas.results.writer import ResultDatasetWriter


@checked
def create_results_writer(result_dir: str | os.PathLike[str]) -> "ResultDatasetWriter":
    """Make the writer of new results, which are always a Lance table.

    Parameters
    ----------
    result_dir : str or path
        Result folder.

    Examples
    --------
    >>> import tempfile
    >>> create_results_writer(tempfile.mkdtemp()).columns
    ()
    """
    from raggedatlas.results.writer import ResultDatasetWriter

    return ResultDatasetWriter(result_dir)


@checked
def load_results_dataset(
    config: Mapping[str, Any], results_dir: str | os.PathLike[str] | None = None, verb: str | None = None
) -> "ResultDataset | InferenceDataSet":
    """Open results, whichever way they are stored.

    Parameters
    ----------
    config : mapping
        Configuration.
    results_dir : str, path or None
        Result folder; None takes the one that the configuration names, or the newest of `verb` (`find_results`).
    verb : str or None
        Kind of run to look for; None looks for ``infer``.

    Returns
    -------
    ResultDataset or InferenceDataSet
        The Lance table where one was committed, else the ``.npy`` files, also beside a table that was never committed.

    Raises
    ------
    NotFoundError
        If there are neither, or only what an unfinished run left.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> folder = tempfile.mkdtemp()
    >>> with create_results_writer(folder) as writer:
    ...     writer.write_batch(["a"], np.zeros((1, 3)))
    >>> load_results_dataset({}, folder).get_data(0)
    array([0., 0., 0.])
    """
    from raggedatlas.results.dataset import ResultDataset
    from raggedatlas.results.inference import InferenceDataSet

    if isinstance(results_dir, str) and "://" in results_dir:
        return ResultDataset(config, results_dir)
    folder = find_results(config, results_dir, verb)
    if is_committed(folder):
        return ResultDataset(config, folder)
    if has_npy_results(folder):
        return InferenceDataSet(config, folder)
    if is_begun(folder):
        raise NotFoundError(
            f"{folder} holds incomplete results: a run began to write {DATABASE} and did not commit. Run it again into this folder."
        )
    raise NotFoundError(
        f"{folder} holds no results: neither a table in {DATABASE} nor .npy files. Run the model first."
    )
