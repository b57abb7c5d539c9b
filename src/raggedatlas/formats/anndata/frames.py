"""Frames of a stored AnnData: every layout that anndata has written since 0.5."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from raggedatlas.errors import SourceError
from raggedatlas.formats.anndata.elements import columns_listed, read_element
from raggedatlas.formats.containers import Container, attribute, check_whole, is_array

if TYPE_CHECKING:
    import pandas as pd


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


def unlisted_columns(container: Container, path: str) -> Mapping[str, str]:
    """Return the members of a frame that are no columns of it by its own list."""
    node = container.get(path)
    if node is None or is_array(node) or "column-order" not in node.attrs:
        return {}
    listed = {*columns_listed(node), index_name(node), "__categories"}
    return {f"{path}/{n}": "column that column-order does not list" for n in container.names(path) if n not in listed}


def _as_text(index: "pd.Index[Any]") -> "pd.Index[Any]":
    import pandas as pd

    if isinstance(index.dtype, np.dtype) and index.dtype.kind == "O":
        return pd.Index([v.decode() if isinstance(v, bytes) else str(v) for v in index], dtype=object, name=index.name)
    if isinstance(index.dtype, pd.StringDtype):
        return index
    return index.astype(str)


def _check_members(container: Container, path: str, n_rows: int) -> None:
    for name in container.names(path):
        at = f"{path}/{name}"
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
