"""Functions of values alone, one example each."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raggedatlas.loader.cells import obs_column
from raggedatlas.query.compare import number_cells
from raggedatlas.query.modalities import join_dtypes, sum_dtype
from raggedatlas.query.search import distances, text_scores
from raggedatlas.query.spec import check_count, flatten_names
from raggedatlas.query.sql import _told_apart

pytestmark = pytest.mark.fast
DONORS = obs_column(pa.table({"donor": ["b", None, "a"]}), "donor")


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (number_cells(pa.array(["a", "b", "c", "d"]), pa.array(["a", "b"]), None).tolist(), [0, 0, 1, 1]),
        (sum_dtype(np.dtype("uint8"), 2), np.dtype("uint16")),
        (sum_dtype(np.dtype("uint64"), 2), None),
        (join_dtypes({np.dtype("uint8"), np.dtype("uint32")}), np.dtype("uint32")),
        (join_dtypes({np.dtype("uint16"), np.dtype("float32")}), np.dtype("float32")),
        (join_dtypes({np.dtype("uint64")}, nan=True), None),
        (join_dtypes({np.dtype("uint64")}, nan=True, largest=2**40), np.dtype("float64")),
        (distances(np.array([[0.0, 3.0], [1.0, 0.0]]), np.array([1.0, 0.0]), "l2").tolist(), [10, 0]),
        (distances(np.array([[0.0, 3.0], [1.0, 0.0]]), np.array([1.0, 0.0]), "cosine").tolist(), [1, 0]),
        (int(text_scores(["B cell", "T cell, naive", None], "naive t").argmax()), 1),
        ((flatten_names("obs", (["a", "b"],)), flatten_names("obs", ("a",))), (("a", "b"), ("a",))),
        (check_count("limit", np.int8(3)), 3),
        (_told_apart(["donor", "Donor"]), {"donor": "donor", "Donor": "Donor_"}),
        (DONORS.values.tolist(), [1, -1, 0]),
        ([] if DONORS.categories is None else DONORS.categories.tolist(), ["a", "b"]),
    ],
)
def test_a_function_of_values_returns_what_is_written_here(found: Any, wanted: Any) -> None:
    """Each function gives the value beside its call."""
    assert found == wanted
