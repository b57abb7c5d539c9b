"""Reader of ``obs`` and ``var``: typed attributes, decoded with the hints in ``cxg_schema``."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import LimitError, SourceError
from raggedatlas.formats.cxg.schema import HINTS, INDEX, MISSING_TEXT, TRUTHS
from raggedatlas.formats.cxg.tiledb_arrays import attribute_files, check_text_offsets, is_fully_written, open_array
from raggedatlas.formats.cxg.unstructured import parse_json
from raggedatlas.model.frames import TEXT_ROWS, Column, ColumnTable, Texts

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS = 2**31
"""Maximum number of rows; larger tables are rejected before memory is allocated."""

NUMBERED = re.compile(r"name_(\d+)")


@dataclass(frozen=True, slots=True)
class TableInfo:
    """Description of a table, without its values.

    Parameters
    ----------
    path : Path
        Path of the array.
    n_rows : int
        Number of rows.
    columns : tuple of str
        Attribute names, in order.
    hints : mapping
        The parsed ``cxg_schema``; empty if there is none.
    metadata : mapping of str to any
        Other metadata.
    """

    path: Path
    n_rows: int
    columns: tuple[str, ...]
    hints: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str | None:
        """The column that viewers use as the index; None if the hints name no existing column."""
        named = self.hints.get(INDEX)
        return named if isinstance(named, str) and named in self.columns else None

    @property
    def index(self) -> str | None:
        """The column with the original index of the table.

        Writers of CXG store the index in a column ``name_0`` (or ``name_1`` and so on if that is taken) even if viewers are to show
        another column.
        """
        shown = self.shown
        numbered = sorted((int(m[1]), name) for name in self.columns if (m := NUMBERED.fullmatch(name)))
        if shown is not None and (NUMBERED.fullmatch(shown) or not numbered):
            return shown
        return numbered[-1][1] if numbered else None


def read_table_info(path: Path) -> TableInfo:
    """Read the description of a table.

    Raises
    ------
    SourceError
        By rule id: C00 for damage, C02 if the array is not one-dimensional from 0, C30 if the hints are not a JSON object.
    LimitError
        If it declares too many rows.
    """
    with open_array(path) as array:
        low, high = _domain(path, array)
        n_rows = high - low + 1
        # The size is declared in an untrusted schema: checked before anything is allocated by it.
        if n_rows > MAX_ROWS:
            raise LimitError(f"{path} declares {n_rows:,} rows; at most {MAX_ROWS:,} are read.")
        if not is_fully_written(path, array.schema):
            raise SourceError(
                f"C00: {path} declares {n_rows:,} rows, but not all of them are written; it is damaged or incomplete. Fetch or write "
                "the CXG again."
            )
        columns = tuple(array.schema.attr(i).name for i in range(array.schema.nattr))
        metadata = dict(array.meta.items())
    hints = parse_object(path, HINTS, metadata.pop(HINTS, "{}"), "C30")
    return TableInfo(path, n_rows, columns, hints, metadata)


def _domain(path: Path, array: Any) -> tuple[int, int]:  # noqa: ANN401
    domain = array.schema.domain
    if array.schema.sparse or domain.ndim != 1 or domain.dim(0).dtype.kind not in "iu" or int(domain.dim(0).domain[0]):
        raise SourceError(f"C02: {path} is not a one-dimensional dense array that starts at 0. Write the CXG again.")
    return int(domain.dim(0).domain[0]), int(domain.dim(0).domain[1])


def parse_object(path: Path, key: str, stored: Any, rule: str) -> dict[str, Any]:  # noqa: ANN401
    """Parse a metadata value as a JSON object; null is treated as empty.

    Raises
    ------
    SourceError
        With the rule id, if it is not a JSON object.
    """
    try:
        value = parse_json(stored)
    except (TypeError, ValueError) as error:
        raise SourceError(f"{rule}: {path}: the metadata {key} is not valid JSON ({error}); write it again.") from error
    if value is not None and not isinstance(value, dict):
        raise SourceError(f"{rule}: {path}: the metadata {key} is not a JSON object; write it again.")
    return value or {}


def read_dataframe(stored: TableInfo) -> "pd.DataFrame":
    """Read a table, with the index of the original file.

    Raises
    ------
    SourceError
        By rule id: C00 for damage, C13 for codes without categories, C30 for invalid categories, C31 for codes out of range.
    """
    import pandas as pd

    at = stored.index
    values = _read(stored)
    columns = {
        name: decode_column(f"{stored.path.name} column {name!r} of {stored.path.parent}", read, stored.hints.get(name))
        for name, read in values.items()
        if name != at
    }
    # A range matches the index of the columns and gives a table without any its rows; names would match nothing.
    frame = pd.DataFrame({name: pd.Series(column) for name, column in columns.items()}, index=range(stored.n_rows))
    names = np.array([str(i) for i in range(stored.n_rows)], object) if at is None else _texts(values[at])
    frame.index = pd.Index(names, dtype=object, name=_label(stored))
    return frame


def open_column_table(stored: TableInfo) -> ColumnTable:
    """Open a table for reading column by column, long text in blocks; values and errors are those of `read_dataframe`."""
    at = stored.index
    columns = [Column(name, partial(_column, stored, name)) for name in stored.columns if name != at]
    return ColumnTable(stored.n_rows, Column(_label(stored), partial(_index, stored)), tuple(columns))


def _label(stored: TableInfo) -> str | None:
    return None if stored.index is None or NUMBERED.fullmatch(stored.index) else stored.index


def _index(stored: TableInfo) -> "pd.Index[Any] | Texts":
    import pandas as pd

    if stored.index is None:
        return pd.Index([str(i) for i in range(stored.n_rows)], dtype=object)
    if _is_long_text(stored, stored.index):
        return Texts(stored.n_rows, partial(_text_blocks, stored, stored.index))
    return pd.Index(_texts(_attribute(stored, stored.index)), dtype=object)


def _column(stored: TableInfo, name: str) -> "pd.Series[Any] | Texts":
    import pandas as pd

    hint = stored.hints.get(name)
    # Categories need the complete column; only plain text can be read in blocks.
    is_text = not isinstance(hint, dict) or (hint.get("type") != "categorical" and "categories" not in hint)
    if is_text and _is_long_text(stored, name):
        # A short column is read as objects, whose dtype pandas infers.
        return Texts(stored.n_rows, partial(_text_blocks, stored, name), pd.Series(["text"]).dtype)
    return pd.Series(read_column(stored, name))


def _is_long_text(stored: TableInfo, name: str) -> bool:
    if stored.n_rows <= TEXT_ROWS:
        return False
    with open_array(stored.path) as array:
        return array.schema.attr(name).dtype.kind in "OUS"


def _text_blocks(stored: TableInfo, name: str) -> Iterator[NDArray[np.object_]]:
    with open_array(stored.path) as array:
        check_text_offsets(stored.path, array.schema, attribute_files(array.schema, name))
        query = array.query(attrs=[name])
        for start in range(0, stored.n_rows, TEXT_ROWS):
            yield _texts(_plain(query[start : min(start + TEXT_ROWS, stored.n_rows)], name))


def read_column(stored: TableInfo, name: str) -> Any:  # noqa: ANN401  (an array or pandas.Categorical)
    """Read and decode one column."""
    values = _attribute(stored, name)
    return decode_column(f"{stored.path.name} column {name!r} of {stored.path.parent}", values, stored.hints.get(name))


def _attribute(stored: TableInfo, name: str) -> NDArray[Any]:
    with open_array(stored.path) as array:
        check_text_offsets(stored.path, array.schema, attribute_files(array.schema, name))
        return _plain(array.query(attrs=[name])[:], name)


def _read(stored: TableInfo) -> dict[str, NDArray[Any]]:
    """Read all columns, one by one: reading several columns of a damaged array at once crashes TileDB."""
    with open_array(stored.path) as array:
        check_text_offsets(stored.path, array.schema)
        return {name: _plain(array.query(attrs=[name])[:], name) for name in stored.columns}


def _plain(read: Any, name: str) -> NDArray[Any]:  # noqa: ANN401
    return np.asarray(read[name] if isinstance(read, dict) else read)


def decode_column(what: str, values: NDArray[Any], hint: Any) -> Any:  # noqa: ANN401  (an array or pandas.Categorical)
    """Decode a stored column with its hint.

    Parameters
    ----------
    what : str
        Name of the column, for error messages.
    values : (n,) array
        Stored codes, numbers or text.
    hint : mapping or None
        ``{"type": ..., "categories": [...]}``.

    Returns
    -------
    (n,) array or pandas.Categorical
        Decoded values; text as objects.

    Raises
    ------
    SourceError
        See `read_dataframe`.

    Examples
    --------
    >>> list(decode_column("x", np.array([1, -1], np.int8), {"type": "categorical", "categories": ["B", "T"]}))
    ['T', nan]
    """
    hint = hint if isinstance(hint, dict) else {}
    kind, categories = hint.get("type"), _categories(what, hint.get("categories"))
    text = values.dtype.kind in "OUS"
    plain: NDArray[Any] = _texts(values) if text else values
    if kind == "categorical":
        if categories is None:
            return _enumerated(what, plain)
        return _text_to_categorical(plain, categories) if text else _codes_to_categorical(what, plain, categories)
    if kind == "boolean" and plain.dtype.kind in "iub":
        return plain != 0
    return plain


def _categories(what: str, categories: Any) -> list[str] | None:  # noqa: ANN401
    if categories is None:
        return None
    unique = isinstance(categories, list) and len({str(name) for name in categories}) == len(categories)
    if not unique or not all(isinstance(name, str | int | float) for name in categories):
        raise SourceError(
            f"C30: the categories of {what} are not a list of unique strings; correct the metadata {HINTS}."
        )
    return [str(name) for name in categories]


def _enumerated(what: str, values: NDArray[Any]) -> Any:  # noqa: ANN401
    import pandas as pd

    # Numbers are stored as int32 or wider; narrower signed integers are codes, which mean nothing without a list.
    if values.dtype.kind == "i" and values.dtype.itemsize < 4:
        raise SourceError(
            f"C13: {what} holds codes ({values.dtype}), but the metadata {HINTS} lists no categories for them, so their meaning is "
            "unknown. Write the CXG again from its source."
        )
    return pd.Categorical(values)


def _text_to_categorical(values: NDArray[Any], categories: list[str]) -> Any:  # noqa: ANN401
    """Convert text to categories; unlisted values are appended, except the text of a missing value."""
    import pandas as pd

    distinct, listed = dict.fromkeys(values.tolist()), set(categories)
    unlisted = [value for value in distinct if value not in listed and value != MISSING_TEXT]
    names = pd.Index([*categories, *unlisted], dtype=object)
    # `get_indexer` returns -1 for the only text that is not among the names, `nan`: a missing value.
    return pd.Categorical.from_codes(names.get_indexer(pd.Index(values, dtype=object)), categories=names)


def _codes_to_categorical(what: str, values: NDArray[Any], categories: list[str]) -> Any:  # noqa: ANN401
    import pandas as pd

    if values.dtype.kind not in "iub":
        return pd.Categorical(values)
    # Codes may be unsigned; as int64 all types compare with -1 alike.
    codes = values.astype(np.int64)
    # Booleans of a column without a False (`_Encoder._booleans`); codes of pandas are signed, so the type tells.
    if values.dtype == np.uint8 and tuple(categories) == TRUTHS:
        return codes != 0
    wrong = np.flatnonzero((codes < -1) | (codes >= len(categories)))
    if len(wrong):
        raise SourceError(
            f"C31: {what} has code {int(codes[wrong[0]])} in row {int(wrong[0]):,}, but there are {len(categories):,} categories; "
            "write the CXG again from its source."
        )
    return pd.Categorical.from_codes(codes, categories=pd.Index(categories, dtype=object))


def _texts(values: NDArray[Any]) -> NDArray[np.object_]:
    out = np.empty(len(values), object)
    out[:] = [v.decode("utf-8", errors="replace") if isinstance(v, bytes) else str(v) for v in values.tolist()]
    return out
