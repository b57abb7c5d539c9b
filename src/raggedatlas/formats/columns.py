"""Tables that are written one column at a time, long text in blocks: what is held of them is one column."""

from typing import Any

import numpy as np

from raggedatlas.formats.element_writer import (
    COLUMN_CHUNK,
    MANY,
    TABLE_ENCODING,
    bare,
    check_columns,
    plain_column,
    plain_index,
    refused,
    write_element,
    write_member,
)
from raggedatlas.model.tables import Column, ColumnTable, Texts
from raggedatlas.store.runtime import release_unused_memory

TEXT_ENCODING = {"encoding-type": "string-array", "encoding-version": "0.2.0"}


def write_any(group: Any, path: str, value: Any, options: dict[str, Any]) -> None:  # noqa: ANN401
    """Write an element or a `ColumnTable`; parameters and errors as of `write_element`."""
    write = write_table if isinstance(value, ColumnTable) else write_element
    write(group, path, value, options)


def write_table(group: Any, path: str, table: ColumnTable, options: dict[str, Any]) -> None:  # noqa: ANN401
    """Write a table as AnnData's data frame, with the values that `write_element` writes of the same frame.

    Parameters
    ----------
    group : h5py.Group or zarr.Group
        Where to.
    path : str
        Below the group.
    table : ColumnTable
        Its index and columns are read one after the other.
    options : dict
        As of `write_element`.

    Raises
    ------
    SchemaError
        If a column cannot be written, or a reader would not find it again; the message names it.
    """
    names = [str(column.name) for column in table.columns]
    is_zarr = hasattr(group, "store")
    check_columns(path, names, table.index.name, slashes=not is_zarr)
    if table.index.name in names:
        # One member for both, which only anndata may decide.
        write_element(group, path, table.frame(), options)
        return
    index = "_index" if table.index.name is None else table.index.name
    tracked = {"track_order": True} if len(names) > MANY and not is_zarr else {}
    made = group.create_group(path, **tracked)
    for key, value in {**TABLE_ENCODING, "column-order": names, "_index": index}.items():
        made.attrs[key] = value
    for column, name in zip((table.index, *table.columns), (index, *names), strict=True):
        _write_column(made, (name, f"{path}/{name}"), column, options, is_index=column is table.index)
        if len(table) > COLUMN_CHUNK:
            release_unused_memory()


def _write_column(
    group: Any,  # noqa: ANN401
    where: tuple[str, str],
    column: Column,
    options: dict[str, Any],
    *,
    is_index: bool,
) -> None:
    import pandas as pd

    values = column.read()
    inferred = not hasattr(group, "store")
    if isinstance(values, Texts) and values.n_rows > COLUMN_CHUNK:
        write = _write_texts if inferred or values.dtype == object or is_index else _write_nullable_texts
        write(group, where, values, options)
        return
    if isinstance(values, Texts):
        values = pd.Index(values.whole(), dtype=object) if is_index else pd.Series(values.whole(), dtype=values.dtype)
    plain = bare(plain_index(values).array if is_index else plain_column(values, inferred=inferred))
    write_member(group, where, plain, options)


def _write_nullable_texts(group: Any, where: tuple[str, str], texts: Texts, options: dict[str, Any]) -> None:  # noqa: ANN401
    """Write long text of pandas' dtype ``str`` as anndata does: values, and a mask of those that are missing, none here."""
    import pandas as pd

    name, path = where
    write_member(group, where, pd.array([], dtype=texts.dtype), options)
    made = group[name]
    for inner in ("values", "mask"):
        del made[inner]
    _write_texts(made, ("values", f"{path}/values"), texts, options)
    write_member(made, ("mask", f"{path}/mask"), np.zeros(texts.n_rows, np.bool_), options)


def _write_texts(group: Any, where: tuple[str, str], texts: Texts, options: dict[str, Any]) -> None:  # noqa: ANN401
    """Write text of several chunks, one at a time."""
    name, path = where
    blocks = texts.even(COLUMN_CHUNK)
    start = 0
    if hasattr(group, "store"):
        # anndata knows the types of every generation of Zarr; what it makes of one chunk is lengthened.
        first = next(blocks)
        write_member(group, where, first, options)
        made, start = group[name], len(first)
        made.resize((texts.n_rows,))
    else:
        made = _made_texts(group, name, texts.n_rows, options)
    for block in blocks:
        with refused(path):
            made[start : start + len(block)] = block
        start += len(block)


def _made_texts(group: Any, name: str, n_rows: int, options: dict[str, Any]) -> Any:  # noqa: ANN401  (h5py)
    import h5py

    chunks = {"chunks": (COLUMN_CHUNK,)} if options else {}
    made = group.create_dataset(name, (n_rows,), h5py.string_dtype(), **options, **chunks)
    for key, value in TEXT_ENCODING.items():
        made.attrs[key] = value
    return made
