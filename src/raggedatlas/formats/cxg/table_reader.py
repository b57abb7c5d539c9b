"""Tables of cells and features as they are stored: typed attributes, and hints that say what the types cannot."""

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
"""Tables of more rows are refused before memory is taken."""

NUMBERED = re.compile(r"name_(\d+)")


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table, known without reading its values.

    Parameters
    ----------
    path : Path
        Of the array.
    n_rows : int
        Its length.
    columns : tuple of str
        Attributes in order.
    hints : mapping
        The parsed ``cxg_schema``; empty where there is none.
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
        """The column that viewers take for the index; None where the hints name none that is there."""
        named = self.hints.get(INDEX)
        return named if isinstance(named, str) and named in self.columns else None

    @property
    def index(self) -> str | None:
        """The column that was the index of the table once.

        What writes CXG files puts the index into a column ``name_0`` (or ``name_1`` and so on where that was taken) even when
        another column is the one that is shown.
        """
        shown = self.shown
        numbered = sorted((int(m[1]), name) for name in self.columns if (m := NUMBERED.fullmatch(name)))
        if shown is not None and (NUMBERED.fullmatch(shown) or not numbered):
            return shown
        return numbered[-1][1] if numbered else None


def read_table_info(path: Path) -> TableInfo:
    """Describe a table.

    Raises
    ------
    SourceError
        By rule id: C00 for damage, C02 for another domain than one axis from 0, C30 for hints that are no JSON object.
    LimitError
        If it declares more rows than may be.
    """
    with open_array(path) as array:
        low, high = _domain(path, array)
        n_rows = high - low + 1
        if n_rows > MAX_ROWS:
            raise LimitError(f"{path} declares {n_rows:,} rows; at most {MAX_ROWS:,} are read.")
        if not is_fully_written(path, array.schema):
            raise SourceError(
                f"C00: {path} declares {n_rows:,} rows, and not all of them are written; it is damaged or incomplete. Fetch or write "
                "the CXG again."
            )
        columns = tuple(array.schema.attr(i).name for i in range(array.schema.nattr))
        metadata = dict(array.meta.items())
    hints = parse_object(path, HINTS, metadata.pop(HINTS, "{}"), "C30")
    return TableInfo(path, n_rows, columns, hints, metadata)


def _domain(path: Path, array: Any) -> tuple[int, int]:  # noqa: ANN401
    domain = array.schema.domain
    if array.schema.sparse or domain.ndim != 1 or domain.dim(0).dtype.kind not in "iu" or int(domain.dim(0).domain[0]):
        raise SourceError(f"C02: {path} is no dense array of one axis that begins at 0. Write the CXG again.")
    return int(domain.dim(0).domain[0]), int(domain.dim(0).domain[1])


def parse_object(path: Path, key: str, stored: Any, rule: str) -> dict[str, Any]:  # noqa: ANN401
    """Parse a metadata value that is to be a JSON object; null is an empty one.

    Raises
    ------
    SourceError
        By the rule, if it is none.
    """
    try:
        value = parse_json(stored)
    except (TypeError, ValueError) as error:
        raise SourceError(f"{rule}: {path}: the metadata {key} is no JSON ({error}); write it again.") from error
    if value is not None and not isinstance(value, dict):
        raise SourceError(f"{rule}: {path}: the metadata {key} is JSON but no object; write it again.")
    return value or {}


def read_dataframe(stored: TableInfo) -> "pd.DataFrame":
    """Read a table; its index is what it was in the file that the CXG was made of.

    Raises
    ------
    SourceError
        By rule id: C00 for damage, C13 for codes without categories, C30 for categories that are no unique texts, C31 for codes beyond
        them.
    """
    import pandas as pd

    at = stored.index
    values = _read(stored)
    columns = {
        name: decode_column(f"{stored.path.name} column {name!r} of {stored.path.parent}", read, stored.hints.get(name))
        for name, read in values.items()
        if name != at
    }
    frame = pd.DataFrame({name: pd.Series(column) for name, column in columns.items()}, index=range(stored.n_rows))
    names = np.array([str(i) for i in range(stored.n_rows)], object) if at is None else _texts(values[at])
    frame.index = pd.Index(names, dtype=object, name=_label(stored))
    return frame


def open_column_table(stored: TableInfo) -> ColumnTable:
    """Open a table to be read one column at a time, long text in blocks; it has the values of `read_dataframe`, and its errors."""
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
    of_text = not isinstance(hint, dict) or (hint.get("type") != "categorical" and "categories" not in hint)
    if of_text and _is_long_text(stored, name):
        # A short column comes as objects, whose dtype pandas infers.
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
    """Read one column, decoded."""
    values = _attribute(stored, name)
    return decode_column(f"{stored.path.name} column {name!r} of {stored.path.parent}", values, stored.hints.get(name))


def _attribute(stored: TableInfo, name: str) -> NDArray[Any]:
    with open_array(stored.path) as array:
        check_text_offsets(stored.path, array.schema, attribute_files(array.schema, name))
        return _plain(array.query(attrs=[name])[:], name)


def _read(stored: TableInfo) -> dict[str, NDArray[Any]]:
    """Read columns one by one: asked for several of a damaged array at once, the library crashes the process."""
    with open_array(stored.path) as array:
        check_text_offsets(stored.path, array.schema)
        return {name: _plain(array.query(attrs=[name])[:], name) for name in stored.columns}


def _plain(read: Any, name: str) -> NDArray[Any]:  # noqa: ANN401
    return np.asarray(read[name] if isinstance(read, dict) else read)


def decode_column(what: str, values: NDArray[Any], hint: Any) -> Any:  # noqa: ANN401  (an array or pandas.Categorical)
    """Turn a stored column into what it was, by its hint.

    Parameters
    ----------
    what : str
        For messages.
    values : (n,) array
        As stored: codes, numbers or text.
    hint : mapping or None
        ``{"type": ..., "categories": [...]}``.

    Returns
    -------
    (n,) array or pandas.Categorical
        Text as objects.

    Raises
    ------
    SourceError
        See `read_dataframe`.

    Examples
    --------
    >>> list(decoded("x", np.array([1, -1], np.int8), {"type": "categorical", "categories": ["B", "T"]}))
    ['T', nan]
    """
    hint = hint if isinstance(hint, dict) else {}
    kind, listed = hint.get("type"), _categories(what, hint.get("categories"))
    text = values.dtype.kind in "OUS"
    plain: NDArray[Any] = _texts(values) if text else values
    if kind == "categorical":
        if listed is None:
            return _enumerated(what, plain)
        return _of_text(plain, listed) if text else _of_codes(what, plain, listed)
    if kind == "boolean" and plain.dtype.kind in "iub":
        return plain != 0
    return plain


def _categories(what: str, listed: Any) -> list[str] | None:  # noqa: ANN401
    if listed is None:
        return None
    unique = isinstance(listed, list) and len({str(name) for name in listed}) == len(listed)
    if not unique or not all(isinstance(name, str | int | float) for name in listed):
        raise SourceError(f"C30: the categories of {what} are no list of unique texts; correct the metadata {HINTS}.")
    return [str(name) for name in listed]


def _enumerated(what: str, values: NDArray[Any]) -> Any:  # noqa: ANN401
    import pandas as pd

    if values.dtype.kind == "i" and values.dtype.itemsize < 4:
        raise SourceError(
            f"C13: {what} holds codes ({values.dtype}) and the metadata {HINTS} lists no categories for them; nothing tells what they "
            "mean. Write the CXG again from its source."
        )
    return pd.Categorical(values)


def _of_text(values: NDArray[Any], listed: list[str]) -> Any:  # noqa: ANN401
    """Take text as categories: a value that is not listed joins them, but for the text of a missing one."""
    import pandas as pd

    found = dict.fromkeys(values.tolist())
    more = [value for value in found if value not in set(listed) and value != MISSING_TEXT]
    names = pd.Index([*listed, *more], dtype=object)
    return pd.Categorical.from_codes(names.get_indexer(pd.Index(values, dtype=object)), categories=names)


def _of_codes(what: str, values: NDArray[Any], listed: list[str]) -> Any:  # noqa: ANN401
    import pandas as pd

    if values.dtype.kind not in "iub":
        return pd.Categorical(values)
    codes = values.astype(np.int64)
    if values.dtype == np.uint8 and tuple(listed) == TRUTHS:
        return codes != 0
    wrong = np.flatnonzero((codes < -1) | (codes >= len(listed)))
    if len(wrong):
        raise SourceError(
            f"C31: {what} has the code {int(codes[wrong[0]])} in row {int(wrong[0]):,}, and there are {len(listed):,} categories; "
            "write the CXG again from its source."
        )
    return pd.Categorical.from_codes(codes, categories=pd.Index(listed, dtype=object))


def _texts(values: NDArray[Any]) -> NDArray[np.object_]:
    out = np.empty(len(values), object)
    out[:] = [v.decode("utf-8", errors="replace") if isinstance(v, bytes) else str(v) for v in values.tolist()]
    return out
