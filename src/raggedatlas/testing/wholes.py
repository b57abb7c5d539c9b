"""AnnData objects with everything beside their matrices, and what "equal, all of it" means."""

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any
from unittest import mock

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
from hypothesis import strategies as st

from raggedatlas.testing.anndatas import anndatas

KEYS = ("a", "B b", "x.y", "ü", "0", "_index", "data", "mean (log)", "X_pca", "CamelCase", "-", "#1")
"""Names of elements: with spaces, dots, signs, and such as encodings use themselves."""

Maker = Callable[[np.random.Generator, int], Any]


def _awkward(rng: np.random.Generator, n: int) -> Any:  # noqa: ANN401
    import awkward as ak

    lengths = rng.integers(0, 3, n)
    # Never without any record: the type of one is not known then.
    rows = [[{"chain": "TRA", "n": int(k)} for k in range(length)] for length in [*lengths[:-1], 1]]
    return ak.Array(rows)


def _frame(rng: np.random.Generator, n: int) -> pd.DataFrame:
    columns = {
        "number": rng.normal(size=n),
        "kind": pd.Categorical(rng.choice(["T", "B"], n), categories=["T", "none", "B"]),
        "maybe": pd.array([None, *rng.integers(0, 9, n - 1).tolist()], dtype="Int8"),
        "text": pd.Series(rng.choice(["a", "", "ü;'\""], n), dtype=object),
    }
    return pd.DataFrame(columns).set_axis([f"row {i}" for i in range(n)])


def _records(rng: np.random.Generator, n: int) -> Any:  # noqa: ANN401
    made = np.zeros(n, dtype=[("name", "O"), ("score", "f4"), ("n", "i8")])
    made["name"], made["score"] = [f"g{i}" for i in range(n)], rng.normal(size=n)
    return made


ALIGNED: dict[str, Maker] = {
    "floats": lambda rng, n: rng.normal(size=(n, 3)).astype(np.float32),
    "doubles": lambda rng, n: rng.normal(size=(n, 2)),
    "truths": lambda rng, n: rng.random((n, 2)) < 0.5,
    "cube": lambda rng, n: rng.integers(0, 255, (n, 2, 3)).astype(np.uint8),
    "half": lambda rng, n: rng.normal(size=(n, 2)).astype(np.float16),
    "no columns": lambda rng, n: np.empty((n, 0), np.float32),
    "csr": lambda rng, n: sp.random(n, 4, 0.4, "csr", np.float32, rng),
    "csc": lambda rng, n: sp.csc_matrix(sp.random(n, 4, 0.4, "csc", np.float64, rng)),
    "awkward": _awkward,
}
"""What may stand in obsm and varm, but for tables, whose index is that of the axis."""

PAIRED: dict[str, Maker] = {
    "csr": lambda rng, n: sp.random(n, n, 0.3, "csr", np.float64, rng),
    "csc": lambda rng, n: sp.csc_matrix(sp.random(n, n, 0.3, "csc", np.float32, rng)),
    "dense": lambda rng, n: rng.normal(size=(n, n)),
    "empty": lambda rng, n: sp.csr_matrix(np.zeros((n, n), np.float32)),
}
"""What may stand in obsp and varp."""

LEAVES: dict[str, Maker] = {
    **ALIGNED,
    "int": lambda rng, n: int(rng.integers(-(2**40), 2**40)),
    "float": lambda rng, n: float(rng.normal()),
    "bool": lambda rng, n: bool(rng.random() < 0.5),
    "str": lambda rng, n: str(rng.choice(["", "text", "ü\nü"])),
    "none": lambda rng, n: None,
    "scalar": lambda rng, n: np.float32(rng.normal()),
    "vector": lambda rng, n: rng.integers(0, 9, n),
    "texts": lambda rng, n: np.array([f"t{i}" for i in range(n)], dtype=object),
    "no texts": lambda rng, n: np.array([], dtype=object),
    "nothing": lambda rng, n: np.empty((0, 2), np.int16),
    "complex": lambda rng, n: rng.normal(size=n) + 1j,
    "frame": _frame,
    "no frame": lambda rng, n: pd.DataFrame(index=pd.Index([f"r{i}" for i in range(n)])),
    "records": _records,
    "categorical": lambda rng, n: pd.Categorical(rng.choice(["x", "y"], n), categories=["y", "z", "x"], ordered=True),
    "nullable": lambda rng, n: pd.array([None, *range(n - 1)], dtype="Int64"),
    "nullable truths": lambda rng, n: pd.array([None, *[True] * (n - 1)], dtype="boolean"),
    "no dict": lambda rng, n: {},
}
"""What may stand in uns."""


@st.composite
def wholes(draw: st.DrawFn) -> ad.AnnData:
    """Draw an AnnData with members of every kind in obsm, varm, obsp, varp, raw.varm and, nested, in uns.

    Parameters
    ----------
    draw : callable
        Given by hypothesis.
    """
    adata = draw(anndatas())
    matrix: Any = adata.X
    if getattr(matrix, "format", ""):
        # Repeated entries come back as their sum; what that is has laws of its own.
        matrix.sum_duplicates()
    # Missing text has a type of its own in files.
    adata.obs["text"] = pd.array(adata.obs["text"].to_numpy(object), dtype="string")
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    for group, makers, names in (
        ("obsm", ALIGNED, adata.obs_names), ("varm", ALIGNED, adata.var_names),
        ("obsp", PAIRED, adata.obs_names), ("varp", PAIRED, adata.var_names),
    ):  # fmt: skip
        for key, kind in _chosen(draw, [*makers, "table"] if makers is ALIGNED else [*makers]).items():
            value = _frame(rng, len(names)).set_axis(names) if kind == "table" else makers[kind](rng, len(names))
            getattr(adata, group)[key] = value
    if adata.raw is not None:
        adata.raw.varm["loadings"] = rng.normal(size=(adata.raw.n_vars, 2))
    adata.uns = {key: LEAVES[kind](rng, draw(st.integers(1, 5))) for key, kind in _chosen(draw, [*LEAVES]).items()}
    nested = {key: LEAVES[kind](rng, 2) for key, kind in _chosen(draw, [*LEAVES]).items()}
    adata.uns["params"] = {"deeper": nested, "n": 1}
    if draw(st.booleans()):
        adata.uns["type_colors"] = np.array(["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728"], dtype=object)
    return adata


def _chosen(draw: st.DrawFn, kinds: list[str]) -> dict[str, str]:
    drawn: dict[str, str] = draw(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(kinds), max_size=3))
    return drawn


def assert_equal(given: Any, back: Any, *, exact: bool = True) -> None:  # noqa: ANN401
    """Compare by anndata's own function, exactly unless told otherwise.

    The module that has it asks for the version of dask since anndata 0.13, for what is not used here.

    Raises
    ------
    AssertionError
        Naming the first element that differs.
    """
    real = metadata.version
    with mock.patch.object(metadata, "version", lambda name: "0" if name == "dask" else real(name)):
        from anndata.tests import helpers
    helpers.assert_equal(given, back, exact=exact)


def assert_identical(path: str, given: Any, back: Any) -> None:  # noqa: ANN401
    """Assert that elements are the same to the last bit: classes, dtypes, order of keys, missing values.

    Raises
    ------
    AssertionError
        Naming the first element that differs.
    """
    assert type(given) is type(back) or isinstance(given, Mapping), (path, type(given), type(back))
    if isinstance(given, Mapping):
        assert sorted(given) == sorted(back), path
        for key in given:
            assert_identical(f"{path}/{key}", given[key], back[key])
    elif isinstance(given, pd.DataFrame):
        pd.testing.assert_frame_equal(given, back, check_exact=True, check_column_type=True, check_index_type=True)
        assert given.index.name == back.index.name, path
    elif sp.issparse(given):
        for name in ("shape", "format"):
            assert getattr(given, name) == getattr(back, name), path
        for name in ("data", "indices", "indptr"):
            assert_identical(f"{path}.{name}", getattr(given, name), getattr(back, name))
    elif isinstance(given, np.ndarray) and given.dtype.names is None:
        assert (given.dtype, given.shape) == (back.dtype, back.shape), path
        np.testing.assert_array_equal(given, back, err_msg=path)
    else:
        assert_equal(given, back)
