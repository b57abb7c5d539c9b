"""Frames of a stored AnnData: every layout that anndata has written since 0.5."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.formats.anndata.elements import columns_listed, read_element, store_kind
from raggedatlas.formats.containers import Container, attribute, check_whole, is_array, readable
from raggedatlas.model.tables import TEXT_ROWS, Column, ColumnTable, Texts

if TYPE_CHECKING:
    import pandas as pd

FRAME = ("dataframe", "0.2.0")
"""Type and version of a table whose columns are elements of their own."""


def frame_length(container: Container, path: str) -> int | None:
    """Say how many rows a stored frame has, without reading it; None if there is no such frame.

    Raises
    ------
    SourceError
        If it is neither a frame nor an old structured array, or lacks its index.
    """
    node = container.get(path)
    if node is None:
        return None
    if is_array(node):
        if len(node.shape or ()) != 1 or node.dtype.names is None:
            raise SourceError(
                f"{container.uri}: {path} is an array of shape {node.shape} and type {node.dtype}, where a table belongs."
            )
        return int(node.shape[0])
    index = container.get(f"{path}/{index_name(node)}")
    if index is not None and not is_array(index):
        inner = next((n for n in ("values", "codes") if n in index), "")
        index = container.get(f"{path}/{index_name(node)}/{inner}") if inner else None
    if index is None or len(index.shape or ()) != 1:
        raise SourceError(
            f"{container.uri}: {path} has no index column {index_name(node)!r}; it is no table that AnnData wrote."
        )
    return int(index.shape[0])


def index_name(group: Any) -> str:  # noqa: ANN401
    """Return the name of the member that is a frame's index."""
    return attribute(group, "_index", "_index")


def read_frame(container: Container, path: str, categories_in: str = "") -> "pd.DataFrame":
    """Read a stored frame with text as its index.

    Parameters
    ----------
    container : Container
        The opened file.
    path : str
        Where the frame stands.
    categories_in : str
        Group with ``<column>_categories``, where structured arrays of anndata 0.5 and 0.6 have them.

    Raises
    ------
    SourceError
        If a column is damaged, of another length, or encoded in a way that nothing knows.
    LimitError
        If a column declares more than may be read whole.
    """
    node = container.get(path)
    n_rows = frame_length(container, path)
    if node is None or n_rows is None:
        raise SourceError(f"{container.uri}: there is no table {path!r}.")
    if is_array(node):
        frame = _read_structured(container, path, categories_in)
    else:
        _check_members(container, path, n_rows)
        frame = read_element(container, path)
    if len(frame) != n_rows:
        raise SourceError(f"{container.uri}: {path} has columns of different lengths; write the file again.")
    frame.index = _as_text(frame.index)
    return frame


def open_table(container: Container, path: str) -> ColumnTable | None:
    """Open a stored frame to be read column by column.

    Parameters
    ----------
    container : Container
        The opened file, which must stay open.
    path : str
        Where the frame stands.

    Returns
    -------
    ColumnTable or None
        None if there is none, or it is of a kind that `read_frame` must read whole.

    Raises
    ------
    SourceError, LimitError
        As of `read_frame`; what only values show, when a column is read.
    """
    node = container.get(path)
    n_rows = frame_length(container, path)
    if node is None or n_rows is None or is_array(node):
        return None
    names = columns_listed(node)
    if (attribute(node, "encoding-type"), attribute(node, "encoding-version")) != FRAME or not all(
        _is_column(container.get(f"{path}/{name}")) for name in names
    ):
        return None
    _check_members(container, path, n_rows)
    index = index_name(node)
    read = partial(_read_column, container, n_rows)
    columns = tuple(Column(name, partial(read, f"{path}/{name}", is_index=False)) for name in names)
    names_of_rows = partial(read, f"{path}/{index}", is_index=True)
    return ColumnTable(n_rows, Column(None if index == "_index" else index, names_of_rows), columns)


def unlisted_columns(container: Container, path: str) -> Mapping[str, str]:
    """Return the members of a frame that are no columns of it by its own list."""
    node = container.get(path)
    if node is None or is_array(node) or "column-order" not in node.attrs:
        return {}
    listed = {*columns_listed(node), index_name(node), "__categories"}
    return {f"{path}/{n}": "column that column-order does not list" for n in container.names(path) if n not in listed}


def _is_column(node: Any) -> bool:  # noqa: ANN401  (a group or an array of either library)
    if node is None or is_array(node):
        return node is not None
    encoding = attribute(node, "encoding-type")
    return encoding == "categorical" or encoding.startswith("nullable-")


def _read_column(container: Container, n_rows: int, path: str, *, is_index: bool) -> Any:  # noqa: ANN401
    """Read a column as pandas has it in a frame; long text comes in blocks."""
    import pandas as pd

    node = container.get(path)
    if n_rows > TEXT_ROWS and _is_text(node):
        # As `read_element` gives the same column: text of HDF5 comes as objects, whose dtype pandas infers.
        dtype = pd.Series(["text"]).dtype if store_kind(node) == "hdf5" else object
        return Texts(n_rows, partial(_text_blocks, container, path), dtype)
    values = read_element(container, path)
    with readable(container.uri, path):
        column: Any = _as_text(pd.Index(values)) if is_index else pd.Series(values, copy=False)
    if len(column) != n_rows:
        raise SourceError(f"{container.uri}: {path} has {len(column):,} values, where {n_rows:,} were expected.")
    return column


def _is_text(node: Any) -> bool:  # noqa: ANN401
    """Say whether a node is an array of text of any length, without missing values."""
    if not is_array(node) or attribute(node, "encoding-type") != "string-array" or node.ndim != 1:
        return False
    if store_kind(node) == "zarr":
        return bool(node.dtype.kind in "OT")
    import h5py

    kind = h5py.check_string_dtype(node.dtype)
    return kind is not None and kind.length is None


def _text_blocks(container: Container, path: str) -> Iterator[NDArray[np.object_]]:
    """Read text in blocks of whole chunks, so that none is decoded twice."""
    node = container.get(path)
    chunk = 1 if node.chunks is None else node.chunks[0]
    step = chunk * max(1, TEXT_ROWS // chunk)
    rows = node if store_kind(node) == "zarr" else node.asstr()
    for start in range(0, node.shape[0], step):
        with readable(container.uri, path):
            block = np.asarray(rows[start : start + step]).astype(object, copy=False)
        yield block


def _as_text(index: "pd.Index[Any]") -> "pd.Index[Any]":
    import pandas as pd

    if isinstance(index.dtype, np.dtype) and index.dtype.kind == "O":
        if pd.api.types.infer_dtype(index, skipna=False) == "string":
            return index
        return pd.Index([v.decode() if isinstance(v, bytes) else str(v) for v in index], dtype=object, name=index.name)
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
            check_whole(container.uri, at, member, n_rows)
            continue
        for inner in container.names(at):
            array = container.get(f"{at}/{inner}")
            if is_array(array):
                rows = n_rows if inner in ("codes", "values", "mask") and name != "__categories" else None
                check_whole(container.uri, f"{at}/{inner}", array, rows)


def _read_structured(container: Container, path: str, categories_in: str) -> "pd.DataFrame":
    import pandas as pd

    records = container.whole(path)
    names = list(records.dtype.names)
    index_field = next((n for n in ("index", "_index") if n in names), names[0])
    columns: dict[str, Any] = {}
    for name in names:
        if records.dtype[name].shape:
            raise SourceError(f"{container.uri}: column {name!r} of {path} has more than one value per row.")
        values = _decoded(records[name])
        known = container.get(f"{categories_in}/{name}_categories") if categories_in and name != index_field else None
        if known is not None and values.dtype.kind in "iu":
            categories = _decoded(np.atleast_1d(container.whole(f"{categories_in}/{name}_categories")))
            if values.max(initial=-1) >= len(categories) or values.min(initial=0) < -1:
                raise SourceError(
                    f"{container.uri}: column {name!r} of {path} has a code outside its {len(categories)} categories."
                )
            columns[name] = pd.Categorical.from_codes(values, categories=pd.Index(categories))
        else:
            columns[name] = values
    index = columns.pop(index_field)
    return pd.DataFrame(columns, index=pd.Index(index, name=index_field))


def _decoded(values: Any) -> Any:  # noqa: ANN401
    if values.dtype.kind in "SO":
        return np.array([v.decode() if isinstance(v, bytes) else str(v) for v in values], dtype=object)
    return values
