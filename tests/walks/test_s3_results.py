"""Results of a model read from an object store as from a folder."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from raggedatlas import ResultDataset, ResultDatasetWriter
from raggedatlas.errors import NotFoundError, StoreError
from support.object_store import Remote

pytestmark = pytest.mark.s3
VALUES = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)


def test_results_in_a_bucket(remote: Remote, tmp_path: Path) -> None:
    """C32, C35: a table that was copied into a bucket gives the same rows, in order, walked and pickled; nothing is mapped."""
    with ResultDatasetWriter(tmp_path) as writer:
        writer.write_batch(range(50), VALUES)
    remote.upload(tmp_path)
    options = remote.options
    there = ResultDataset({}, remote.uri, storage_options=options)
    assert not there.is_mapped()
    rows = [7, 7, 3, 49]
    for dataset in (there, pickle.loads(pickle.dumps(there)), ResultDataset({}, remote.uri, mapped=False, storage_options=options)):  # fmt: skip
        assert np.array_equal(dataset.get_data(rows), VALUES[rows])
        assert np.array_equal([np.asarray(row) for row in dataset], VALUES)
        assert np.array_equal([dataset.get_data(i) for i in range(50)], VALUES)
        assert list(dataset.ids()) == [str(i) for i in range(50)]
    with pytest.raises(NotFoundError):
        ResultDataset({}, f"{remote.uri}/elsewhere", storage_options=options)
    with pytest.raises(StoreError, match="no local path"):
        ResultDatasetWriter(remote.uri)
