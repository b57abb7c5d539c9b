"""Elements that are read whole: a registry of what stands in a store as which type and version, and its readers."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import MissingExtraError, SourceError
from raggedatlas.formats.containers import Container, attribute, check_whole, is_array, readable, unknown_encoding
from raggedatlas.model.batch import sparse_dtype
from raggedatlas.store.runtime import warnings_as

Reader = Callable[[Container, str], Any]

DEEPEST = 64
"""Groups within groups beyond which a mapping is refused."""


def store_kind(node: Any) -> str:  # noqa: ANN401  (a group or an array of either library)
    """Say which store a group or array lives in: ``"hdf5"`` or ``"zarr"``."""
    return "hdf5" if hasattr(node, "id") else "zarr"


def read_element(container: Container, path: str) -> Any:  # noqa: ANN401  (any element that AnnData knows)
    """Read an element whole, as anndata would give it.

    Parameters
    ----------
    container : Container
        The opened file.
    path : str
        Where it stands.

    Raises
    ------
    SourceError
        If there is none, it is damaged, or its encoding is not registered.
    LimitError
        If it declares more than may be read whole.
    MissingExtraError
        If it takes a package that is not installed.
    """
    node = container.get(path)
    if node is None:
        raise SourceError(f"{container.uri}: there is no element {path!r}; the file is not complete.")
    with readable(container.uri, path):
        spec = attribute(node, "encoding-type"), attribute(node, "encoding-version")
        reader = ELEMENTS.get((store_kind(node), *spec))
    if reader is None:
        known = sorted(version for _, name, version in ELEMENTS if name == spec[0])
        said = f"of version {spec[1]!r}; known are {sorted(set(known))}" if known else "which nothing is registered for"
        raise SourceError(
            f"{container.uri}: {path} is encoded as {spec[0]!r} {said}. Remove the element, or write it again with a known one."
        )
    if path.count("/") > DEEPEST:
        raise SourceError(f"{container.uri}: {path:.200} lies more than {DEEPEST} groups deep; the file is damaged.")
    return reader(container, path)


def _by_anndata(container: Container, path: str) -> Any:  # noqa: ANN401
    """Read through anndata, once the declared sizes of its arrays were found acceptable."""
    from anndata.io import read_elem

    _check_arrays(container, path)
    with warnings_as("ignore"), readable(container.uri, path):
        try:
            return read_elem(container.get(path))
        except unknown_encoding() as error:
            raise SourceError(
                f"{container.uri}: {path} has an encoding that anndata does not know ({str(error).splitlines()[0]}); "
                "remove the element, or write it again with a known one."
            ) from error


def _check_arrays(container: Container, path: str) -> None:
    node = container.get(path)
    if not is_array(node):
        for name in container.names(path):
            _check_arrays(container, f"{path}/{name}")
    elif node.shape is not None:
        check_whole(container.uri, path, node, None)


def _array(container: Container, path: str) -> Any:  # noqa: ANN401
    """Read an array; truth values of other writers come as truth values."""
    node = container.get(path)
    truths = _truths(node)
    if truths is None:
        return _by_anndata(container, path)
    import pandas as pd

    values = container.whole(path)
    known = np.isin(values, list(truths.values()))
    if not known.all() and len(truths) < 3:
        raise SourceError(f"{container.uri}: {path} has values that are neither false nor true; the file is damaged.")
    plain = values == truths["TRUE"]
    missing = values == truths["NA"] if "NA" in truths else np.zeros(values.shape, np.bool_)
    return pd.arrays.BooleanArray(plain, missing) if missing.any() and values.ndim == 1 else plain


def _texts(container: Container, path: str) -> Any:  # noqa: ANN401
    """Read an array of text; text of fixed length may be UTF-8 too."""
    node = container.get(path)
    if store_kind(node) == "zarr" or getattr(node.dtype, "kind", "") not in "SO" or not node.shape:
        return _by_anndata(container, path)
    with readable(container.uri, path):
        values = container.whole(path)
        return _decoded(values.ravel()).reshape(values.shape)


def _decoded(values: NDArray[Any]) -> NDArray[np.object_]:
    """Decode UTF-8 byte strings, all in one call."""
    import pyarrow as pa

    texts = pa.array(values.astype(object), pa.large_binary()).cast(pa.large_string())
    return np.asarray(texts.to_numpy(zero_copy_only=False), dtype=object)


def _truths(node: Any) -> dict[str, int] | None:  # noqa: ANN401
    """Return the numbers of an HDF5 enumeration of FALSE, TRUE and perhaps NA that h5py does not take for truth values."""
    if store_kind(node) == "zarr" or node.shape is None or node.dtype.kind not in "iu":
        return None
    import h5py

    members = h5py.check_enum_dtype(node.dtype)
    named = {str(name).upper(): int(number) for name, number in (members or {}).items()}
    return named if set(named) in ({"FALSE", "TRUE"}, {"FALSE", "TRUE", "NA"}) else None


def _mapping(container: Container, path: str) -> dict[str, Any]:
    return {name: read_element(container, f"{path}/{name}") for name in container.names(path)}


def _legacy(container: Container, path: str) -> Any:  # noqa: ANN401
    """Read what has no encoding: arrays, sparse groups and mappings of anndata before 0.8."""
    node = container.get(path)
    if is_array(node):
        text = node.dtype.kind == "S" and node.shape not in ((), (1,))
        return _texts(container, path) if text else _array(container, path)
    return _sparse(container, path) if "h5sparse_format" in node.attrs else _mapping(container, path)


def _sparse(container: Container, path: str) -> Any:  # noqa: ANN401
    node = container.get(path)
    check_sparse(container, path, node)
    stored = container.get(f"{path}/data")
    if stored.dtype.kind not in "iufc" or sparse_dtype(stored.dtype) == stored.dtype:
        return _by_anndata(container, path)
    from scipy.sparse import csc_matrix, csr_matrix

    values, indices, indptr = (container.whole(f"{path}/{name}") for name in ("data", "indices", "indptr"))
    kind = csr_matrix if _sparse_form(node) == "csr_matrix" else csc_matrix
    return kind((values.astype(sparse_dtype(values.dtype)), indices, indptr), _sparse_shape(node))


def check_sparse(container: Container, path: str, node: Any) -> None:  # noqa: ANN401
    """Refuse a small sparse group whose parts do not fit together; SciPy would read outside its memory.

    Raises
    ------
    SourceError
        Saying what is wrong.
    """
    form, shape = _sparse_form(node), _sparse_shape(node)
    indptr, indices = (container.whole(f"{path}/{name}") for name in ("indptr", "indices"))
    data = container.get(f"{path}/data")
    fits = shape is not None and len(shape) == 2 and is_array(data) and data.shape == indices.shape
    if fits:
        major, minor = (int(n) for n in (shape if form == "csr_matrix" else shape[::-1]))
        fits = entries_fit(indptr, indices, (major, minor))
    if not fits:
        raise SourceError(
            f"{container.uri}: {path} is a sparse matrix whose pointers, indices, values and shape do not fit together; "
            "the file is damaged. Write it again."
        )


def _sparse_form(node: Any) -> str:  # noqa: ANN401
    return attribute(node, "encoding-type") or f"{attribute(node, 'h5sparse_format')}_matrix"


def _sparse_shape(node: Any) -> Any:  # noqa: ANN401
    return node.attrs.get("shape", node.attrs.get("h5sparse_shape"))


def entries_fit(indptr: NDArray[Any], indices: NDArray[Any], shape: tuple[int, int]) -> bool:
    """Say whether pointers and indices describe a sparse matrix with so many rows and columns (CSC: columns and rows).

    Examples
    --------
    >>> entries_fit(np.array([0, 1, 2]), np.array([0, 5]), (2, 3))
    False
    """
    whole = (
        indptr.shape == (shape[0] + 1,)
        and indices.ndim == 1
        and indptr.dtype.kind in "iu"
        and indices.dtype.kind in "iu"
    )
    return (
        whole
        and _pointers_fit(indptr, len(indices))
        and (not len(indices) or (int(indices.min()) >= 0 and int(indices.max()) < shape[1]))
    )


def _pointers_fit(indptr: NDArray[Any], n_entries: int) -> bool:
    return bool(int(indptr[0]) == 0 and int(indptr[-1]) == n_entries and (indptr[1:] >= indptr[:-1]).all())


def _categorical(container: Container, path: str) -> Any:  # noqa: ANN401
    """Read a categorical; a missing `ordered` means that it is not."""
    import pandas as pd

    node = container.get(path)
    codes, categories = (read_element(container, f"{path}/{name}") for name in ("codes", "categories"))
    codes = np.asarray(codes)
    if codes.dtype.kind not in "iu" or codes.ndim != 1:
        raise SourceError(f"{container.uri}: {path} has codes of type {codes.dtype}, where a row of integers belongs.")
    # Unsigned codes may exceed the signed type of their width.
    signed = codes.astype(np.int64) if codes.dtype.kind == "u" else codes
    if signed.size and (signed.max() >= len(categories) or signed.min() < -1):
        raise SourceError(
            f"{container.uri}: {path} has a code outside its {len(categories):,} categories; write it again."
        )
    with readable(container.uri, path):
        index: Any = pd.Index(categories)
        return pd.Categorical.from_codes(signed, index, ordered=bool(node.attrs.get("ordered", False)))


def _frame(container: Container, path: str) -> Any:  # noqa: ANN401
    """Read a table of version 0.2.0."""
    import pandas as pd

    node = container.get(path)
    index_name = attribute(node, "_index", "_index")
    columns = columns_listed(node)
    read = {name: read_element(container, f"{path}/{name}") for name in columns}
    index = read_element(container, f"{path}/{index_name}")
    with readable(container.uri, path):
        frame = pd.DataFrame(read, index=pd.Index(index), columns=columns or None)
        frame.index.name = None if index_name == "_index" else index_name
    return frame


def columns_listed(node: Any) -> list[str]:  # noqa: ANN401
    """Return the columns that a stored table lists, in order."""
    stated = node.attrs.get("column-order", [])
    return [name.decode() if isinstance(name, bytes) else str(name) for name in np.atleast_1d(stated)]


def _awkward(container: Container, path: str) -> Any:  # noqa: ANN401
    try:
        import awkward  # noqa: F401  (anndata needs it to read these)
    except ImportError as error:
        raise MissingExtraError(
            f"{container.uri}: {path} holds records of varying length, which take a package; install raggedatlas[awkward]."
        ) from error
    return _by_anndata(container, path)


_ANYWHERE: dict[tuple[str, str], Reader] = {
    ("", ""): _legacy,
    ("anndata", "0.1.0"): _by_anndata,
    ("array", "0.2.0"): _array,
    ("awkward-array", "0.1.0"): _awkward,
    ("bytes", "0.2.0"): _by_anndata,
    ("categorical", "0.2.0"): _categorical,
    ("csc_matrix", "0.1.0"): _sparse,
    ("csr_matrix", "0.1.0"): _sparse,
    ("dataframe", "0.1.0"): _by_anndata,
    ("dataframe", "0.2.0"): _frame,
    ("dict", "0.1.0"): _mapping,
    ("null", "0.1.0"): _by_anndata,
    ("nullable-boolean", "0.1.0"): _by_anndata,
    ("nullable-integer", "0.1.0"): _by_anndata,
    ("nullable-string-array", "0.1.0"): _by_anndata,
    ("numeric-scalar", "0.2.0"): _by_anndata,
    ("raw", "0.1.0"): _by_anndata,
    ("rec-array", "0.2.0"): _by_anndata,
    ("string", "0.2.0"): _by_anndata,
    ("string-array", "0.2.0"): _texts,
}

ELEMENTS: dict[tuple[str, str, str], Reader] = {
    (kind, *spec): reader for kind in ("hdf5", "zarr") for spec, reader in _ANYWHERE.items()
}
"""(Store kind, encoding type, encoding version) -> what reads such an element."""
