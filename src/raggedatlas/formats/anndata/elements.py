"""Readers of complete elements: a registry by encoding type and version, and tables column by column."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import MissingExtraError, SourceError
from raggedatlas.formats.containers import (
    Container,
    attribute,
    check_whole,
    decode_texts,
    is_array,
    readable,
    unknown_encoding,
)
from raggedatlas.model.batch import sparse_dtype
from raggedatlas.model.frames import TEXT_ROWS, ColumnTable, TableColumn, Texts
from raggedatlas.store.runtime import warnings_as

if TYPE_CHECKING:
    import pandas as pd

Reader = Callable[[Container, str], Any]


def in_hdf5(node: Any) -> bool:  # noqa: ANN401  (a group or an array of either library)
    """Return whether a group or array is in HDF5 rather than Zarr."""
    return hasattr(node, "id")


def read_element(container: Container, path: str) -> Any:  # noqa: ANN401  (any element that AnnData knows)
    """Read a complete element as anndata does.

    Every failure is a `SourceError` (absent, damaged or of unknown encoding), a `LimitError` or a `MissingExtraError`.
    """
    node = container.get(path)
    if node is None:
        raise SourceError(f"{container.uri}: there is no element {path!r}; the file is not complete.")
    with readable(container.uri, path):
        spec = attribute(node, "encoding-type"), attribute(node, "encoding-version")
        reader = ELEMENTS.get(spec)
    if reader is None:
        known = sorted(version for name, version in ELEMENTS if name == spec[0])
        reason = f"of version {spec[1]!r}; known are {known}" if known else "which nothing is registered for"
        raise SourceError(
            f"{container.uri}: {path} is encoded as {spec[0]!r} {reason}. Remove the element, or write it again with a known one."
        )
    return reader(container, path)


def _by_anndata(container: Container, path: str) -> Any:  # noqa: ANN401
    """Read with anndata, after checking the declared sizes of the arrays."""
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
    """Read an array; enumerations of FALSE and TRUE, as R writes them, become booleans."""
    node = container.get(path)
    truths = None
    if in_hdf5(node) and node.shape is not None and node.dtype.kind in "iu":
        import h5py

        # Those that h5py does not read as booleans.
        members = h5py.check_enum_dtype(node.dtype)
        named = {str(name).upper(): int(number) for name, number in (members or {}).items()}
        truths = named if set(named) in ({"FALSE", "TRUE"}, {"FALSE", "TRUE", "NA"}) else None
    if truths is None:
        # Most arrays are numbers, and importing anndata takes as long as reading most tables of cells.
        return container.whole(path) if node.shape and node.dtype.kind in "biufc" else _by_anndata(container, path)
    import pandas as pd

    values = container.whole(path)
    known = np.isin(values, list(truths.values()))
    if not known.all():
        raise SourceError(
            f"{container.uri}: {path} has values that are none of {', '.join(truths)}; the file is damaged. Fetch or write it again."
        )
    plain = values == truths["TRUE"]
    missing = values == truths["NA"] if "NA" in truths else np.zeros(values.shape, np.bool_)
    if not missing.any():
        return plain
    # AnnData has missing booleans on one axis only; elsewhere they are NaN among 0 and 1.
    return pd.arrays.BooleanArray(plain, missing) if values.ndim == 1 else np.where(missing, np.nan, plain)


def _texts(container: Container, path: str) -> Any:  # noqa: ANN401
    """Read an array of text; text of fixed length may be UTF-8 too."""
    node = container.get(path)
    if not in_hdf5(node) or getattr(node.dtype, "kind", "") not in "SO" or not node.shape:
        return _by_anndata(container, path)
    import pyarrow as pa

    with readable(container.uri, path):
        values = container.whole(path)
        # Large types, because the others have 32-bit offsets, which end at 2 GiB of text.
        texts = pa.array(values.ravel().astype(object), pa.large_binary()).cast(pa.large_string())
        return np.asarray(texts.to_numpy(zero_copy_only=False), dtype=object).reshape(values.shape)


def _mapping(container: Container, path: str) -> dict[str, Any]:
    return {name: read_element(container, f"{path}/{name}") for name in container.names(path)}


def _legacy(container: Container, path: str) -> Any:  # noqa: ANN401
    """Read an element without an encoding, as before anndata 0.8: an array, sparse group or mapping."""
    node = container.get(path)
    if is_array(node):
        # Old files have a single text as an array of length 1, which anndata reads as a scalar.
        text = node.dtype.kind == "S" and node.shape not in ((), (1,))
        return _texts(container, path) if text else _array(container, path)
    return _sparse(container, path) if "h5sparse_format" in node.attrs else _mapping(container, path)


def _sparse(container: Container, path: str) -> Any:  # noqa: ANN401
    node = container.get(path)
    check_sparse(container, path, node)
    stored = container.get(f"{path}/data")
    # Others are cast below, because SciPy has no float16 and no foreign byte order.
    if stored.dtype.kind not in "iufc" or sparse_dtype(stored.dtype) == stored.dtype:
        return _by_anndata(container, path)
    from scipy.sparse import csc_matrix, csr_matrix

    values, indices, indptr = (container.whole(f"{path}/{name}") for name in ("data", "indices", "indptr"))
    kind = csr_matrix if sparse_form(node) == "csr_matrix" else csc_matrix
    return kind((values.astype(sparse_dtype(values.dtype)), indices, indptr), stated_shape(node))


def check_sparse(container: Container, path: str, node: Any) -> None:  # noqa: ANN401
    """Raise for a sparse group whose parts do not fit together; SciPy would read invalid memory."""
    form, shape = sparse_form(node), stated_shape(node)
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


def sparse_form(node: Any) -> str:  # noqa: ANN401
    """Return the encoding-type of a group, also as anndata 0.7 stated it for sparse matrices."""
    return attribute(node, "encoding-type") or f"{attribute(node, 'h5sparse_format')}_matrix"


def stated_shape(node: Any) -> Any:  # noqa: ANN401
    """Return the shape that a sparse group states, unchecked; None if there is none."""
    return node.attrs.get("shape", node.attrs.get("h5sparse_shape"))


def entries_fit(indptr: NDArray[Any], indices: NDArray[Any], shape: tuple[int, int]) -> bool:
    """Return whether pointers and indices describe a sparse matrix of this shape, for CSC columns by rows."""
    whole = (
        indptr.shape == (shape[0] + 1,)
        and indices.ndim == 1
        and indptr.dtype.kind in "iu"
        and indices.dtype.kind in "iu"
    )
    # Pointers are compared, not subtracted: differences of unsigned ones would wrap around.
    return (
        whole
        and bool(int(indptr[0]) == 0 and int(indptr[-1]) == len(indices) and (indptr[1:] >= indptr[:-1]).all())
        and (not len(indices) or (int(indices.min()) >= 0 and int(indices.max()) < shape[1]))
    )


def _categorical(container: Container, path: str) -> Any:  # noqa: ANN401
    """Read a categorical; a missing `ordered` means that it is not."""
    import pandas as pd

    node = container.get(path)
    codes, categories = (read_element(container, f"{path}/{name}") for name in ("codes", "categories"))
    codes = np.asarray(codes)
    if np.ndim(categories) != 1:
        raise SourceError(f"{container.uri}: {path}/categories is no row of values; write it again.")
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
    n_rows = frame_length(container, path)
    assert n_rows is not None
    _check_members(container, path, n_rows)
    columns, own = columns_listed(node), index_name(node)
    read = {name: read_element(container, f"{path}/{name}") for name in columns}
    index = read_element(container, f"{path}/{own}")
    with readable(container.uri, path):
        frame = pd.DataFrame(read, index=pd.Index(index), columns=columns or None)
        frame.index.name = None if own == "_index" else own
    return frame


def columns_listed(node: Any) -> list[str]:  # noqa: ANN401
    """Return the columns that a stored table lists, in order."""
    names = np.atleast_1d(node.attrs.get("column-order", []))
    return decode_texts(names, f"column-order of {node.name}")


def _awkward(container: Container, path: str) -> Any:  # noqa: ANN401
    try:
        import awkward  # noqa: F401  (anndata needs it to read these)
    except ImportError as error:
        raise MissingExtraError(
            f"{container.uri}: {path} holds records of varying length, which take a package; install raggedatlas[awkward]."
        ) from error
    return _by_anndata(container, path)


ELEMENTS: dict[tuple[str, str], Reader] = {
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

"""(Encoding type, encoding version) -> reader of such an element."""


FRAME = ("dataframe", "0.2.0")
"""Type and version of a table whose columns are elements of their own."""


def frame_length(container: Container, path: str) -> int | None:
    """Return the number of rows of a stored frame or old structured array from its metadata; None if there is no such element."""
    node = container.get(path)
    if node is None:
        return None
    if is_array(node):
        if len(node.shape or ()) != 1 or node.dtype.names is None:
            raise SourceError(
                f"{container.uri}: {path} is an array of shape {node.shape} and type {node.dtype}, where a table belongs."
            )
        return int(node.shape[0])
    name = index_name(node)
    index = container.get(f"{path}/{name}")
    if index is not None and not is_array(index):
        inner = next((n for n in ("values", "codes") if n in index), "")
        index = container.get(f"{path}/{name}/{inner}") if inner else None
    if index is None or not is_array(index) or len(index.shape or ()) != 1:
        raise SourceError(f"{container.uri}: {path} has no index column {name!r}; it is no table that AnnData wrote.")
    return int(index.shape[0])


def index_name(group: Any) -> str:  # noqa: ANN401
    """Return the name of the member that is a frame's index."""
    return attribute(group, "_index", "_index")


def read_frame(container: Container, path: str, categories_in: str = "") -> "pd.DataFrame":
    """Read a stored frame with text as its index.

    `categories_in` is the group with ``<column>_categories``, where structured arrays of anndata 0.5 and 0.6 have them.
    """
    node = container.get(path)
    n_rows = frame_length(container, path)
    if node is None or n_rows is None:
        raise SourceError(f"{container.uri}: there is no table {path!r}.")
    if is_array(node):
        frame = _read_structured(container, path, categories_in)
    else:
        if (attribute(node, "encoding-type"), attribute(node, "encoding-version")) != FRAME:
            _check_members(container, path, n_rows)
        frame = read_element(container, path)
    if len(frame) != n_rows:
        raise SourceError(f"{container.uri}: {path} has columns of different lengths; write the file again.")
    frame.index = _as_text(frame.index, f"{container.uri}: {path}")
    return frame


def open_table(container: Container, path: str) -> ColumnTable | None:
    """Open a stored frame to be read column by column; `container` must stay open.

    None if there is none, or it is of a kind that only `read_frame` supports. Errors that only the values show are
    raised when a column is read.
    """
    node = container.get(path)
    n_rows = frame_length(container, path)
    if node is None or n_rows is None or is_array(node):
        return None
    names = columns_listed(node)
    if (attribute(node, "encoding-type"), attribute(node, "encoding-version")) != FRAME:
        return None
    for column in (container.get(f"{path}/{name}") for name in names):
        kind = "" if column is None or is_array(column) else attribute(column, "encoding-type")
        if column is None or not (is_array(column) or kind == "categorical" or kind.startswith("nullable-")):
            return None
    _check_members(container, path, n_rows)
    index = index_name(node)
    read = partial(_read_column, container, n_rows)
    columns = tuple(TableColumn(name, partial(read, f"{path}/{name}", is_index=False)) for name in names)
    names_of_rows = partial(read, f"{path}/{index}", is_index=True)
    return ColumnTable(n_rows, TableColumn(None if index == "_index" else index, names_of_rows), columns)


def unlisted_columns(container: Container, path: str) -> Mapping[str, str]:
    """Return the members of a frame that its column-order does not list, with the reason."""
    node = container.get(path)
    if node is None or is_array(node) or "column-order" not in node.attrs:
        return {}
    listed = {*columns_listed(node), index_name(node), "__categories"}
    return {f"{path}/{n}": "column that column-order does not list" for n in container.names(path) if n not in listed}


def _read_column(container: Container, n_rows: int, path: str, *, is_index: bool) -> Any:  # noqa: ANN401
    """Read a column as pandas has it in a frame; long text comes in blocks."""
    import pandas as pd

    node = container.get(path)
    if n_rows > TEXT_ROWS and _is_text(node):
        # As `read_element` gives the same column: text of HDF5 comes as objects, whose dtype pandas infers.
        dtype = pd.Series(["text"]).dtype if in_hdf5(node) else object
        return Texts(n_rows, partial(_text_blocks, container, path), dtype)
    values = read_element(container, path)
    with readable(container.uri, path):
        column: Any = (
            _as_text(pd.Index(values), f"{container.uri}: {path}") if is_index else pd.Series(values, copy=False)
        )
    if len(column) != n_rows:
        raise SourceError(f"{container.uri}: {path} has {len(column):,} values, where {n_rows:,} were expected.")
    return column


def _is_text(node: Any) -> bool:  # noqa: ANN401
    """Return whether a node is an array of variable-length text without missing values."""
    if not is_array(node) or attribute(node, "encoding-type") != "string-array" or node.ndim != 1:
        return False
    if not in_hdf5(node):
        return bool(node.dtype.kind in "OT")
    import h5py

    kind = h5py.check_string_dtype(node.dtype)
    return kind is not None and kind.length is None


def _text_blocks(container: Container, path: str) -> Iterator[NDArray[np.object_]]:
    """Read text in blocks of whole chunks, so that none is decoded twice."""
    node = container.get(path)
    chunk = 1 if node.chunks is None else node.chunks[0]
    step = chunk * max(1, TEXT_ROWS // chunk)
    rows = node.asstr() if in_hdf5(node) else node
    for start in range(0, node.shape[0], step):
        with readable(container.uri, path):
            block = np.asarray(rows[start : start + step]).astype(object, copy=False)
        yield block


def _as_text(index: "pd.Index[Any]", what: str) -> "pd.Index[Any]":
    import pandas as pd

    if isinstance(index.dtype, np.dtype) and index.dtype.kind == "O":
        if pd.api.types.infer_dtype(index, skipna=False) == "string":
            return index
        return pd.Index(decode_texts(index, what), dtype=object, name=index.name)
    if isinstance(index.dtype, pd.StringDtype):
        return index
    return index.astype(str)


def _check_members(container: Container, path: str, n_rows: int) -> None:
    ignored = unlisted_columns(container, path)
    for name in container.names(path):
        at = f"{path}/{name}"
        if at in ignored:
            continue
        member = container.get(at)
        if is_array(member):
            _check_column(container, at, member, n_rows)
            continue
        for inner in container.names(at):
            array = container.get(f"{at}/{inner}")
            if is_array(array):
                # Members of `__categories` are named after columns, which may be called codes or values.
                by_row = inner in ("codes", "values", "mask") and name != "__categories"
                if by_row:
                    _check_column(container, f"{at}/{inner}", array, n_rows)
                else:
                    check_whole(container.uri, f"{at}/{inner}", array, None)


def _check_column(container: Container, path: str, node: Any, n_rows: int) -> None:  # noqa: ANN401
    check_whole(container.uri, path, node, n_rows)
    if len(node.shape) != 1:
        raise SourceError(f"{container.uri}: {path} has shape {node.shape}, where a column of {n_rows:,} rows belongs.")


def _read_structured(container: Container, path: str, categories_in: str) -> "pd.DataFrame":
    import pandas as pd

    records = container.whole(path)
    names = list(records.dtype.names)
    # Tables of anndata 0.5 and 0.6 state no index; the first field is taken where none has a usual name.
    index_field = next((n for n in ("index", "_index") if n in names), names[0])
    columns: dict[str, Any] = {}
    for name in names:
        if records.dtype[name].shape:
            raise SourceError(f"{container.uri}: column {name!r} of {path} has more than one value per row.")
        values = _decode_column(records[name], f"{container.uri}: {path}")
        known = container.get(f"{categories_in}/{name}_categories") if categories_in and name != index_field else None
        if known is not None and values.dtype.kind in "iu":
            at = f"{categories_in}/{name}_categories"
            categories = _decode_column(np.atleast_1d(container.whole(at)), f"{container.uri}: {at}")
            if values.max(initial=-1) >= len(categories) or values.min(initial=0) < -1:
                raise SourceError(
                    f"{container.uri}: column {name!r} of {path} has a code outside its {len(categories)} categories."
                )
            columns[name] = pd.Categorical.from_codes(values, categories=pd.Index(categories))
        else:
            columns[name] = values
    index = columns.pop(index_field)
    return pd.DataFrame(columns, index=pd.Index(index, name=index_field))


def _decode_column(values: Any, what: str) -> Any:  # noqa: ANN401
    if values.dtype.kind in "SO":
        return np.array(decode_texts(values, what), dtype=object)
    return values
