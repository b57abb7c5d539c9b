"""Hypothesis strategies for AnnData objects of every shape that files have, and what "came back equal" means."""

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any
from unittest import mock

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
from hypothesis import strategies as st
from numpy.typing import NDArray

DTYPES = ("bool", "uint8", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64")
KINDS = ("counts", "large", "fractions", "signed", "late")
FORMS = ("csr", "csc", "dense", "csr64", "shuffled", "repeated")

NAMES = (
    "percent.mt",
    "2nd pass",
    "uid",
    "dataset",
    "cell_name",
    "layout_uid",
    "gene_expression",
    "obs_uid",
    "a b",
    "a_b",
)
"""Column names that a table cannot hold as they are, or that the atlas uses itself."""


def make_values(kind: str, dtype: str, shape: tuple[int, int], rng: np.random.Generator) -> NDArray[Any]:
    """Create a matrix of one kind of values: as far as its dtype can hold them.

    Parameters
    ----------
    kind : str
        One of `KINDS`; ``"late"`` has its only fraction in the last row.
    dtype : str
        One of `DTYPES`.
    shape : tuple of int
        Cells, features.
    rng : numpy.random.Generator
        Where chance comes from.
    """
    target = np.dtype(dtype)
    values: NDArray[Any] = rng.poisson(0.6, shape).astype(np.float64)
    if kind == "large":
        top = 2000 if dtype == "float16" else 2**20
        values *= rng.choice([1, 200, top], shape)
    if target.kind == "f" and kind == "fractions":
        values *= 0.5
    if target.kind == "f" and kind == "late":
        values[0] *= 2**11 if dtype == "float16" else 2**20
        values[-1, -1] = 0.5
    if target.kind == "f" and kind == "signed":
        values = np.where(values > 0, rng.normal(size=shape), 0)
    if target.kind in "bu":
        # Half of the maximum: an entry that `in_form` repeats still fits as a sum, except for booleans.
        values = np.minimum(values, 1 if target.kind == "b" else np.iinfo(target).max // 2)
    return values.astype(target)


def in_form(values: NDArray[Any], form: str, rng: np.random.Generator) -> Any:
    """Return a matrix the form that some file has it in: one of `FORMS`."""
    # SciPy has no sparse matrices of float16.
    if form == "dense" or values.dtype == np.float16:
        return values
    if form == "csc":
        return sp.csc_matrix(values)
    matrix = sp.csr_matrix(values)
    if form == "shuffled":
        for start, stop in zip(matrix.indptr[:-1], matrix.indptr[1:], strict=True):
            order = rng.permutation(stop - start) + start
            matrix.indices[start:stop], matrix.data[start:stop] = matrix.indices[order], matrix.data[order]
        # SciPy caches this flag and would go on taking the indices for sorted.
        matrix.has_sorted_indices = False
    if form == "repeated":
        rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
        parts = (np.tile(matrix.data, 2), np.concatenate([matrix.indices, matrix.indices[::-1]]))
        twice = np.concatenate([rows, rows[::-1]])
        # The second copy runs backwards, so each row has its columns up and down again.
        parts[0][len(rows) :] = matrix.data[::-1]
        order = np.argsort(twice, kind="stable")
        indptr = np.concatenate([[0], np.cumsum(np.bincount(twice, minlength=matrix.shape[0]))])
        # Given as CSR, repeated entries stay; a conversion from COO would sum them.
        matrix = sp.csr_matrix((parts[0][order], parts[1][order], indptr), shape=matrix.shape)
    if form == "csr64":
        matrix.indptr, matrix.indices = matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64)
    return matrix


def make_obs(n: int, rng: np.random.Generator, names: tuple[str, ...] = ()) -> pd.DataFrame:
    """Create a frame of cells with one column of every kind, and columns of some given names."""
    gap = rng.random(n) < 0.3

    def holed(values: list[Any]) -> list[Any]:
        return [None if missing else value for value, missing in zip(values, gap, strict=True)]

    # What pandas infers for text: objects before pandas 3, `str` since.
    of_text: Any = pd.Series(["a"]).dtype
    labels = ["late", "early", "it's"]
    columns: dict[str, Any] = {
        "type": pd.Categorical(holed(rng.choice(labels, n).tolist()), categories=["early", "unused", "late", "it's"]),
        "stage": pd.Categorical(rng.choice(labels[:2], n), categories=["late", "early"], ordered=True),
        "cluster": pd.Categorical(rng.integers(0, 3, n), categories=[2, 0, 1, 7]),
        "text": pd.array(holed(rng.choice(["a", "", "ü;'\""], n).tolist()), dtype=of_text),
        "score": np.where(gap, np.nan, rng.normal(size=n)),
        "small": rng.normal(size=n).astype(np.float32),
        "flag": rng.random(n) < 0.5,
        "maybe": pd.array(holed((rng.random(n) < 0.5).tolist()), dtype="boolean"),
        "count": rng.integers(-5, 5, n).astype(np.int32),
        "byte": rng.integers(0, 255, n).astype(np.uint8),
        "big": rng.integers(2**60, 2**62, n),
        "holes": pd.array(holed(rng.integers(0, 9, n).tolist()), dtype="Int16"),
    }
    columns |= {name: rng.integers(0, 9, n) for name in names}
    return pd.DataFrame(columns, index=pd.Index([f"cell {i}" for i in range(n)], name="barcode"))


@st.composite
def anndatas(draw: st.DrawFn, *, layers: bool = True) -> ad.AnnData:
    """Draw an AnnData: any form and dtype of X, layers with equal and different entries, raw with other features.

    Parameters
    ----------
    draw : callable
        Given by hypothesis.
    layers : bool
        Whether it may have layers and raw.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, m = draw(st.integers(1, 40)), draw(st.integers(1, 9))
    values = make_values(draw(st.sampled_from(KINDS)), draw(st.sampled_from(DTYPES)), (n, m), rng)
    x = in_form(values, draw(st.sampled_from(FORMS)), rng)
    obs = make_obs(n, rng, tuple(draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4))))
    var = pd.DataFrame(
        {"n": rng.integers(0, 9, m), "chrom": pd.Categorical(["x"] * m)}, index=[f"g{i}" for i in range(m)]
    )
    adata = ad.AnnData(x, obs=obs, var=var)
    if not layers:
        return adata
    for name in draw(st.lists(st.sampled_from(["counts", "X", "raw", "spliced", "log.norm"]), unique=True, max_size=2)):
        same = draw(st.booleans())
        dtype = "float32" if same else draw(st.sampled_from(["uint8", "float32", "float64"]))
        kind = "counts" if name == "counts" else draw(st.sampled_from(KINDS))
        other = (np.asarray(values, np.float32) * 3).astype(dtype) if same else make_values(kind, dtype, (n, m), rng)
        if name != "counts" or (np.all(other >= 0) and np.all(other == np.floor(other))):
            adata.layers[name] = in_form(other, draw(st.sampled_from(FORMS[:4])), rng)
    if draw(st.booleans()):
        raw = make_values("counts", "float32", (n, m + 2), rng)
        adata.raw = ad.AnnData(sp.csr_matrix(raw), obs=obs[[]], var=pd.DataFrame(index=[f"g{i}" for i in range(m + 2)]))
    return adata


def assert_same(given: ad.AnnData, back: ad.AnnData) -> None:
    """Assert that an AnnData came back as it was: frames, forms, dtypes, values, layers, raw.

    Raises
    ------
    AssertionError
        Naming the first thing that differs.
    """
    pd.testing.assert_frame_equal(back.obs, given.obs)
    pd.testing.assert_frame_equal(back.var, given.var)
    assert_same_matrix("X", given.X, back.X)
    names = [name for name in given.layers if name is not None]
    assert sorted(names) == sorted(name for name in back.layers if name is not None)
    for name in names:
        assert_same_matrix(name, given.layers[name], back.layers[name])
    assert (given.raw is None) == (back.raw is None)
    if given.raw is not None and back.raw is not None:
        pd.testing.assert_frame_equal(back.raw.var, given.raw.var)
        assert_same_matrix("raw", given.raw.X, back.raw.X)


def assert_same_matrix(what: str, given: Any, back: Any) -> None:
    """Assert equal form, dtype and values; repeated entries count as their sum, in whatever dtype holds it.

    Raises
    ------
    AssertionError
        Naming the matrix.
    """
    if given is None or back is None:
        assert given is back, what
        return
    assert getattr(given, "format", "dense") == getattr(back, "format", "dense"), what
    exact = _exact(given)
    if np.array_equal(exact.astype(given.dtype), exact):
        assert back.dtype == given.dtype, (what, given.dtype, back.dtype)
    np.testing.assert_array_equal(_exact(back), exact, err_msg=what)


def _exact(matrix: Any) -> NDArray[Any]:
    wide = {"b": np.uint64, "u": np.uint64, "i": np.int64}.get(matrix.dtype.kind, matrix.dtype)
    out = np.zeros(matrix.shape, wide)
    if isinstance(matrix, np.ndarray):
        return matrix.astype(wide)
    parts = matrix.tocoo()
    # `out[row, col] += data` would add repeated entries once.
    np.add.at(out, (parts.row, parts.col), parts.data.astype(wide))
    return out


KEYS = ("a", "B b", "x.y", "ü", "0", "_index", "data", "mean (log)", "X_pca", "CamelCase", "-", "#1")
"""Names of elements: with spaces, dots, signs, and such as encodings use themselves."""

Maker = Callable[[np.random.Generator, int], Any]


def _awkward(rng: np.random.Generator, n: int) -> Any:
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


def _records(rng: np.random.Generator, n: int) -> Any:
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


def assert_equal(given: Any, back: Any, *, exact: bool = True) -> None:
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


def assert_identical(path: str, given: Any, back: Any) -> None:
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
