"""Whole members of a file that is written: names that readers find again, text that old readers know, columns in chunks of one size."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError, SchemaError
from raggedatlas.formats.containers import unknown_encoding
from raggedatlas.model.batch import machine_dtype, sparse_dtype
from raggedatlas.model.frames import TEXT_ROWS, ColumnTable, TableColumn, Texts, is_pandas
from raggedatlas.model.ids import is_unicode
from raggedatlas.store.runtime import release_unused_memory, warnings_as

COLUMN_CHUNK = TEXT_ROWS
"""Rows per chunk of the columns of a table; shorter columns are one chunk."""

TABLE_ENCODING = {"encoding-type": "dataframe", "encoding-version": "0.2.0"}

OBJECTS: dict[str, Any] = {"boolean": "boolean", "integer": "Int64", "floating": "float64"}
"""What pandas infers of a column of objects -> the dtype that it is written with."""

ZARR_NAMES = {"zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata"}
"""Metadata files of a Zarr group, whose names no member can have."""

MAX_NAME = 255
"""Maximum length of a file name in bytes on the usual file systems, and so of a member of a Zarr group."""

MAX_INLINE_COLUMNS = 5_000
"""Tables with more columns are written by anndata, because their column-order exceeds the default size of an HDF5 attribute."""


def write_element(group: Any, path: str, value: Any, options: dict[str, Any]) -> None:  # noqa: ANN401
    """Write an element in anndata's encoding, text as plain string arrays, which all readers since 0.8 support.

    A `ColumnTable` is read column by column. `group` is one of h5py or zarr, `path` the path below it. `options` are the dataset options of arrays; without any,
    HDF5 arrays are contiguous. Raises `SchemaError`, which names the element, for one that cannot be written or would
    be read back differently.
    """
    if isinstance(value, ColumnTable):
        write_table(group, path, value, options)
        return
    check_names(path, value, slashes=not hasattr(group, "store"))
    parent, _, name = path.rpartition("/")
    within = group.require_group(parent) if parent else group
    with refused(path):
        plain = plain_value(value, inferred=not hasattr(group, "store"))
    write_member(within, (name, path), plain, options)


def write_member(group: Any, where: tuple[str, str], value: Any, options: dict[str, Any]) -> None:  # noqa: ANN401
    """Write a value whose names were checked, in anndata's encoding.

    `where` is the name in the group and the path in the file for messages; see `write_element` for the others.
    """
    name, path = where
    if not hasattr(group, "store"):
        # Importing anndata takes longer than writing these.
        with refused(path):
            grouped, array = members_of(value), _plain_array(value)
            if name in group and (grouped is not None or array is not None):
                del group[name]
            if grouped is not None:
                members, attributes = grouped
                made = group.create_group(name)
                for key, inner in members.items():
                    write_member(made, (key, f"{path}/{key}"), inner, options)
                made.attrs.update(attributes)
                return
            if array is not None:
                values, encoding = array
                kept = options if values.ndim else {}
                if kept and values.ndim == 1 and len(values):
                    kept = {**kept, "chunks": (min(len(values), COLUMN_CHUNK),)}
                made = group.create_dataset(name, data=values, dtype=values.dtype, **kept)
                made.attrs.update({"encoding-type": encoding, "encoding-version": "0.2.0"})
                return
    import anndata
    from anndata.experimental import write_dispatched

    def write_value(write: Callable[..., None], store: Any, key: str, value: Any, **given: Any) -> None:  # noqa: ANN401
        kept = dict(given["dataset_kwargs"])
        if hasattr(group, "store") or options:
            if isinstance(value, np.ndarray) and value.dtype.char in "qQ":
                value = value.astype(machine_dtype(value.dtype))
            # Chunks by rows: libraries choose chunks by bytes, so columns of one table would differ.
            if isinstance(value, np.ndarray) and value.ndim == 1 and len(value) and value.dtype.names is None:
                kept["chunks"] = (min(len(value), COLUMN_CHUNK),)
        write(store, key, value, dataset_kwargs=kept)

    # Remaining slashes are in column names in HDF5, which all versions of anndata read although 0.13 does not write them.
    allowed = {"allow_write_nullable_strings": True, "disallow_forward_slash_in_h5ad": False}
    with warnings_as("ignore"), anndata.settings.override(**allowed), refused(path):
        write_dispatched(group, name, value, callback=write_value, dataset_kwargs=options)


def members_of(value: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:  # noqa: ANN401
    """Return the members and attributes of a mapping, a categorical or a table; None for anything else."""
    if type(value) is dict and all(type(key) is str for key in value):
        return value, {"encoding-type": "dict", "encoding-version": "0.1.0"}
    if is_pandas(value, "Categorical"):
        return _categorical(value.codes, value.categories.to_numpy(), ordered=value.ordered)
    if isinstance(value, pa.DictionaryArray):
        # The width that pandas chooses.
        codes = value.indices.fill_null(-1).to_numpy().astype(np.min_scalar_type(-len(value.dictionary) - 2))
        return _categorical(codes, value.dictionary.to_numpy(zero_copy_only=False), ordered=value.type.ordered)
    if not is_pandas(value, "DataFrame") or value.index.name in value.columns or value.shape[1] > MAX_INLINE_COLUMNS:
        return None
    index = "_index" if value.index.name is None else str(value.index.name)
    columns = {name: bare(value.iloc[:, i].array) for i, name in enumerate(value.columns)}
    return {**columns, index: bare(value.index.array)}, {**TABLE_ENCODING, "column-order": [*columns], "_index": index}


def _categorical(
    codes: NDArray[Any], categories: NDArray[Any], *, ordered: bool | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    attributes = {"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": bool(ordered)}
    return {"codes": codes, "categories": categories}, attributes


def bare(column: Any) -> Any:  # noqa: ANN401  (a pandas array)
    """Return the NumPy array of a plain pandas array; text arrays are a subclass, may have missing values and are returned unchanged."""
    import pandas as pd

    return column.to_numpy() if type(column) is pd.arrays.NumpyExtensionArray else column


def _plain_array(value: Any) -> tuple[NDArray[Any], str] | None:  # noqa: ANN401
    """Convert a number, a text, or an array of either for HDF5 and return it with its encoding type; None for anything else."""
    import h5py

    if isinstance(value, str):
        return np.array(value, h5py.string_dtype()), "string"
    if isinstance(value, bool | int | float | np.generic) and np.array(value).dtype.kind in "biuf":
        return np.array(value), "numeric-scalar"
    if type(value) is not np.ndarray or not value.ndim:
        return None
    if value.dtype.kind in "biuf":
        return value, "array"
    is_text = value.dtype == object and value.ndim == 1 and all(issubclass(kind, str) for kind in set(map(type, value)))
    return (value.astype(h5py.string_dtype()), "string-array") if is_text else None


@contextmanager
def refused(path: str) -> Iterator[None]:
    """Convert exceptions that libraries raise on values that cannot be written into a `SchemaError` that names the element."""
    try:
        yield
    except AtlasError:  # of a member, which it names
        raise
    except (TypeError, ValueError, NotImplementedError, AttributeError, OverflowError, unknown_encoding()) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        where = next((note for note in getattr(error, "__notes__", []) if "key" in note), path)
        raise SchemaError(
            f"{path} cannot be written ({reason}; {where}); convert or remove what it holds, then write again."
        ) from error


def check_names(path: str, value: Any, *, slashes: bool) -> None:  # noqa: ANN401
    """Raise for keys of mappings and columns of tables that would be read back under another name or not at all.

    `slashes` tells whether names of columns may have slashes, as HDF5 finds them again by the list of columns.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(name, str):
                check_name(name, f"{path}: the key {name!a}", zarr=not slashes)
            check_names(f"{path}/{name}", inner, slashes=slashes)
    elif is_pandas(value, "DataFrame"):
        named = [*value.columns, *([] if value.index.name is None else [value.index.name])]
        odd = [name for name in named if not isinstance(name, str)]
        if odd:
            raise SchemaError(f"{path} has the column {odd[0]!r}, whose name is no text; rename it, then write again.")
        index = None if value.index.name is None else str(value.index.name)
        check_columns(path, [str(name) for name in value.columns], index, slashes=slashes)


def check_columns(path: str, names: Sequence[str], index: str | None, *, slashes: bool) -> None:
    """Raise for column names that would be read back differently or not at all.

    `index` is the name of the index, None if it has none; `slashes` is as of `check_names`.
    """
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    members = {*names, "_index" if index is None else index}
    for name in (*names, *([] if index is None else [index])):
        above = name.split("/")
        holder = next(("/".join(above[:i]) for i in range(1, len(above)) if "/".join(above[:i]) in members), None)
        for part in above if slashes else [name]:
            check_name(part, f"{path}: the column {name!a}", zarr=not slashes)
        for wrong, why in (
            (name == twice, "is duplicated"),
            (name == "_index" and name in names, "bears the name that AnnData keeps for the index"),
            (holder is not None, f"has a name that HDF5 takes for a member of {holder!r}"),
        ):
            if wrong:
                raise SchemaError(f"{path}: the column {name!a} {why}; rename it, then write again.")


def check_name(name: str, what: str, *, zarr: bool) -> None:
    """Raise if a member of a Zarr or HDF5 group with this name would be read back under another name or not at all; `what` has the name.

    Examples
    --------
    >>> check_name("a/b", "The layer 'a/b'", zarr=False)
    Traceback (most recent call last):
    raggedatlas.errors.SchemaError: The layer 'a/b' has a name that HDF5 takes for groups within groups; rename it, then write again.
    """
    library = "Zarr" if zarr else "HDF5"
    for wrong, why in (
        (is_nested(name) or (zarr and "\\" in name), f"has a name that {library} takes for groups within groups"),
        ("\0" in name or not is_unicode(name), "has a name that no file can hold"),
        (zarr and name in ZARR_NAMES, "has a name that Zarr keeps for metadata"),
        (zarr and len(name.encode(errors="replace")) > MAX_NAME, f"has a name of more than {MAX_NAME} bytes"),
    ):
        if wrong:
            raise SchemaError(f"{what} {why}; rename it, then write again.")


def is_nested(name: str) -> bool:
    """Return whether a name would be interpreted as a path."""
    return "/" in name or name in ("", ".", "..")


def plain_text(frame: Any, *, inferred: bool = True) -> Any:  # noqa: ANN401  (a pandas frame)
    """Return a frame with text columns converted for writing; see `plain_column`."""
    import pandas as pd

    columns = {name: plain_column(frame.iloc[:, i], inferred=inferred) for i, name in enumerate(frame.columns)}
    # The dtype is given per column because pandas 3 infers text from objects; no copy, because tables can be large.
    series = {
        str(name): pd.Series(v, dtype=object if isinstance(v, np.ndarray) and v.dtype == object else None, copy=False)
        for name, v in columns.items()
    }
    out = pd.DataFrame(series, index=range(len(frame)), copy=False)
    out.index = plain_index(frame.index)
    return out


def plain_column(column: Any, *, inferred: bool = True) -> Any:  # noqa: ANN401  (a pandas Series; an array)
    """Convert a column (a pandas Series) to the array that is written.

    Text without missing values becomes an object array, which is written as a plain string array that every reader
    since anndata 0.8 knows, wherever it is read back with the dtype that it has here. Text of pandas' nullable type
    stays that. AnnData has no encoding of times, which become ISO text, nor of nullable floating-point numbers, which
    become plain ones with NaN.

    `inferred` tells whether a plain string array is read back with the dtype that pandas infers for text, as from HDF5.
    From Zarr it is read as ``object``, so that ``str``, the default of pandas 3, must be written as anndata does.
    Raises `TypeError`, which `refused` converts, for objects that are neither text, numbers, booleans nor times, and
    for types that no file has.
    """
    import pandas as pd

    column = time_texts(column)
    dtype: Any = column.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        kept = plain_index(column.cat.categories.rename(column.name))
        return pd.Categorical.from_codes(column.cat.codes.to_numpy(), kept, ordered=bool(column.cat.ordered))
    if isinstance(dtype, pd.StringDtype):
        # The dtype cannot be inferred from an empty column.
        as_plain = inferred and len(column) and dtype == pd.Series(["text"]).dtype and not column.isna().any()
        return column.to_numpy(object) if as_plain else column.array
    if str(dtype) in ("Float32", "Float64"):
        return column.to_numpy(str(dtype).lower(), na_value=np.nan)
    if dtype != np.dtype(object):
        # Of pandas' own types, AnnData has encodings of nullable integers and booleans.
        if not isinstance(dtype, np.dtype) and type(column.array) not in (
            pd.arrays.IntegerArray,
            pd.arrays.BooleanArray,
        ):
            raise TypeError(f"{column.name!r}: no file holds values of type {dtype}")
        return column.array
    numbers = OBJECTS.get(pd.api.types.infer_dtype(column, skipna=True))
    if numbers is not None:
        return column.astype(numbers).array
    known = column.dropna().to_numpy(object)
    # h5py and Zarr decode bytes; pandas, which represents missing values, does not.
    _require_text(known, column.name, str if len(known) < len(column) else str | bytes)
    return column.astype("string").array if len(known) < len(column) else column.to_numpy(object)


def time_texts(values: Any) -> Any:  # noqa: ANN401  (a pandas Series or Index)
    """Return dates, times and time spans as ISO 8601 text, missing ones as None; other values unchanged.

    Examples
    --------
    >>> import pandas as pd
    >>> time_texts(pd.Series(pd.to_datetime(["2026-01-31", None]))).tolist()
    ['2026-01-31T00:00:00', None]
    """
    import pandas as pd

    kinds = ("date", "datetime", "datetime64", "time", "timedelta", "timedelta64")
    is_object = values.dtype == np.dtype(object)
    if values.dtype.kind not in "mM" and not (is_object and pd.api.types.infer_dtype(values, skipna=True) in kinds):
        return values
    # Many cells share few times. The code of a missing one is -1, which takes the last text.
    codes, known = pd.factorize(values)
    texts = [value.isoformat() if hasattr(value, "isoformat") else pd.Timedelta(value).isoformat() for value in known]
    objects = np.array([*texts, None], dtype=object)[codes]
    return (pd.Index if isinstance(values, pd.Index) else pd.Series)(objects, dtype=object, name=values.name)


def _require_text(objects: NDArray[np.object_], name: Any = None, kinds: Any = str | bytes) -> None:  # noqa: ANN401
    """Raise for values that pandas or Zarr would convert to their representation as text."""
    odd = [value for value in objects.ravel().tolist() if not isinstance(value, kinds)][:1]
    if odd:
        column = "" if name is None else f"{name!r}: "
        raise TypeError(f"{column}the value {odd[0]!r:.40} is no text but of type {type(odd[0]).__name__}")


def plain_value(value: Any, *, inferred: bool) -> Any:  # noqa: ANN401
    """Return a value in the types that are written, text as of `plain_column`; raise what `refused` converts if there are none."""
    if isinstance(value, dict):
        return {name: plain_value(inner, inferred=inferred) for name, inner in value.items()}
    if type(value) is complex:
        # anndata reads a Python complex number but writes only a NumPy one.
        return np.complex128(value)
    if isinstance(value, int | np.generic) and (number := np.asarray(value)).dtype.char in "qQ":
        # NumPy makes these of Python's integers from 2**63 on.
        return number.astype(machine_dtype(number.dtype))[()]
    if type(value).__module__.startswith("scipy.sparse"):  # avoids importing SciPy
        return value.astype(sparse_dtype(value.dtype), copy=False)
    if isinstance(value, list) and np.array(value).dtype.kind in "OSU":
        _require_text(np.array(value, object))
    if type(value) is np.ndarray and value.dtype == object:
        _require_text(value)
    if type(value).__module__.startswith("numpy.ma"):  # as above
        if value.mask.any():
            raise TypeError("no file holds the mask of a masked array")
        return value.data
    return plain_text(value, inferred=inferred) if is_pandas(value, "DataFrame") else value


def plain_index(index: Any) -> Any:  # noqa: ANN401  (a pandas index)
    """Convert an index for writing: numbers unchanged, else objects, unless they would be read back with another dtype."""
    import pandas as pd

    index = time_texts(index)
    if isinstance(index.dtype, np.dtype) and index.dtype.kind in "biuf":
        return index
    # Readers infer the dtype of object names as pandas' default, which needs at least one name.
    if isinstance(index.dtype, pd.StringDtype) and not (len(index) and index.dtype == pd.Series(["text"]).dtype):
        return index
    if not isinstance(index.dtype, np.dtype) and index.dtype.kind in "biuf" and not index.hasnans:
        return pd.Index(index.to_numpy(f"{index.dtype.kind}{index.dtype.itemsize}"), name=index.name)
    objects = index.to_numpy(object)
    _require_text(objects, index.name)
    return pd.Index(objects, dtype=object, name=index.name)


def write_table(group: Any, path: str, table: ColumnTable, options: dict[str, Any]) -> None:  # noqa: ANN401
    """Write a table as AnnData's data frame, with the values that `write_element` writes of the same frame.

    Index and columns are read one after the other; `options` are as of `write_element`.
    """
    names = [str(column.name) for column in table.columns]
    is_zarr = hasattr(group, "store")
    check_columns(path, names, table.index.name, slashes=not is_zarr)
    if table.index.name in names:
        # One member for both, which only anndata may decide.
        write_element(group, path, table.frame(), options)
        return
    index = "_index" if table.index.name is None else table.index.name
    # HDF5 refuses an attribute over 64 KiB, as `column-order` is then, unless creation order is tracked.
    tracked = {"track_order": True} if len(names) > MAX_INLINE_COLUMNS and not is_zarr else {}
    made = group.create_group(path, **tracked)
    made.attrs.update({**TABLE_ENCODING, "column-order": names, "_index": index})
    for column, name in zip((table.index, *table.columns), (index, *names), strict=True):
        _write_column(made, (name, f"{path}/{name}"), column, options, is_index=column is table.index)
        if len(table) > COLUMN_CHUNK:
            release_unused_memory()


def _write_column(
    group: Any,  # noqa: ANN401
    where: tuple[str, str],
    column: TableColumn,
    options: dict[str, Any],
    *,
    is_index: bool,
) -> None:
    inferred = not hasattr(group, "store")
    plain = column.arrow() if inferred and column.arrow is not None else None
    if plain is not None:
        is_dictionary = isinstance(plain, pa.DictionaryArray)
        write_member(group, where, plain if is_dictionary else plain.to_numpy(zero_copy_only=False), options)
        return
    values = column.read()
    if isinstance(values, Texts) and values.n_rows > COLUMN_CHUNK:
        if inferred or values.dtype == object or is_index:
            _write_texts(group, where, values, options)
            return
        import pandas as pd

        # As anndata writes pandas' dtype `str`: values, and a mask of those that are missing, none here. It writes the
        # group with its attributes for an empty array; its two members are then replaced.
        write_member(group, where, pd.array([], dtype=values.dtype), options)
        made = group[where[0]]
        for inner in ("values", "mask"):
            del made[inner]
        _write_texts(made, ("values", f"{where[1]}/values"), values, options)
        write_member(made, ("mask", f"{where[1]}/mask"), np.zeros(values.n_rows, np.bool_), options)
        return
    if isinstance(values, Texts):
        import pandas as pd

        values = pd.Index(values.whole(), dtype=object) if is_index else pd.Series(values.whole(), dtype=values.dtype)
    with refused(where[1]):
        plain = bare(plain_index(values).array if is_index else plain_column(values, inferred=inferred))
    write_member(group, where, plain, options)


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
        import h5py

        chunks = {"chunks": (COLUMN_CHUNK,)} if options else {}
        made = group.create_dataset(name, (texts.n_rows,), h5py.string_dtype(), **options, **chunks)
        made.attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})
    for block in blocks:
        with refused(path):
            made[start : start + len(block)] = block
        start += len(block)
