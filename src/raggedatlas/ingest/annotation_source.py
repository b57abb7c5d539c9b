"""What an annotation is read from: frames, Arrow tables, CSV and Parquet files, and everything that `add` takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError, SchemaError, SourceError, StoreError
from raggedatlas.formats.registry import open_source
from raggedatlas.ingest.content_hash import block_rows
from raggedatlas.ingest.other_elements import merge_colors
from raggedatlas.model.frames import INDEX, ColumnFacts, facts_of, frame_to_arrow
from raggedatlas.model.protocols import Source, SourceSchema

TABLE_ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
_MISSING = ["", "NA", "N/A", "NaN", "nan", "None", "null", "NULL", "<NA>"]


@dataclass(frozen=True)
class AnnotationSource:
    """A table of cells with what is known of its origin.

    Parameters
    ----------
    table : pyarrow.Table
        One row per cell; the column ``_index``, where there is one, holds the names of the rows. Columns carry their `ColumnFacts`.
    name : str
        Default name of the annotation; empty where the source has none.
    uri : str
        The file, or the type of the object.
    colors : mapping of str to (mapping of str to str)
        Column -> category -> color.
    origin : mapping of str to object
        ``uns["atlas"]`` of a query's result; else empty.
    obsm : mapping of str to array
        The asked members of `obsm`, (n_cells, ...).
    """

    table: pa.Table
    name: str = ""
    uri: str = ""
    colors: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    obsm: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def read_annotation_source(source: Any, text_columns: tuple[str, ...], obsm: Sequence[str] = ()) -> AnnotationSource:  # noqa: ANN401
    """Read the columns of cells from a file or an object.

    Parameters
    ----------
    source : path, DataFrame, Series, Arrow table, mapping, AnnData, or anything that `add` takes
        A mapping holds columns. Of AnnData and files of it, `obs` is read.
    text_columns : tuple of str
        Columns of a CSV file that are text whatever their values look like.
    obsm : sequence of str
        Members of `obsm` to read.

    Raises
    ------
    SourceError
        If it is of no known kind, or cannot be parsed.
    """
    kind = type(source).__name__
    table = _read_table_source(source, kind, text_columns)
    if table is None:
        return _read_cells(source, kind, obsm)
    if obsm:
        raise SourceError(
            f"obsm={list(obsm)} names members of an AnnData, and a {kind} has none; pass an AnnData, or a file of one."
        )
    return table


def _read_table_source(source: Any, kind: str, text_columns: tuple[str, ...]) -> AnnotationSource | None:  # noqa: ANN401
    """Read what is a table and no more; None for all else."""
    import pandas as pd

    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        ending = next((e for e in TABLE_ENDINGS if path.name.lower().endswith(e)), None)
        if ending is not None:
            return AnnotationSource(
                _read_table(path, ending, text_columns), path.name[: -len(ending)], str(path.absolute())
            )
    elif isinstance(source, pd.DataFrame):
        return AnnotationSource(frame_to_arrow(source), uri=kind)
    elif isinstance(source, pd.Series):
        if source.name is None:
            raise SourceError("The Series has no name, which names the column; set one with series.rename('leiden').")
        return AnnotationSource(frame_to_arrow(source.to_frame()), uri=kind)
    elif isinstance(source, Mapping) or hasattr(source, "__arrow_c_stream__"):
        try:
            is_mapping = isinstance(source, Mapping)
            # NaN among texts is a missing value, as in pandas.
            columns = {str(k): pa.array(v, from_pandas=True) for k, v in source.items()} if is_mapping else source
            table = pa.table(columns)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise SourceError(f"The {kind} is no table of columns of one length and type each: {error}.") from error
        return AnnotationSource(with_facts(table), uri=kind)
    return None


def _read_cells(source: Any, kind: str, obsm: Sequence[str]) -> AnnotationSource:  # noqa: ANN401
    opened = open_source(source)
    try:
        schema, cells = opened.describe(), opened.cells()
        colors = merge_colors(opened, cells, [key for key in schema.elements if key.endswith("_colors")])
        origin = opened.element("uns/atlas") if "uns/atlas" in schema.elements else {}
        is_path = isinstance(source, str | Path)
        return AnnotationSource(
            cells, schema.name if is_path else "", schema.uri if is_path else kind, colors,
            origin if isinstance(origin, Mapping) else {}, {key: _member(opened, schema, key) for key in obsm},
        )  # fmt: skip
    finally:
        opened.close()


def _member(opened: Source, schema: SourceSchema, key: str) -> NDArray[Any]:
    info = schema.matrix(f"obsm/{key}")
    if info is None or info.form != "dense":
        there = [
            m.key.removeprefix("obsm/") for m in schema.matrices if m.key.startswith("obsm/") and m.form == "dense"
        ]
        raise NotFoundError(f"The annotation has no array {key!r} in obsm; it has {there}.")
    blocks = [np.asarray(block.layers["values"]) for (block,) in opened.blocks((info.key,), block_rows(info))]
    return np.concatenate(blocks) if blocks else np.empty(info.shape, info.dtype)


def _read_table(path: Path, ending: str, text_columns: tuple[str, ...]) -> pa.Table:
    import pyarrow.csv
    import pyarrow.parquet

    try:
        if ending == ".parquet":
            table = pyarrow.parquet.read_table(path)
            index = (table.schema.pandas_metadata or {}).get("index_columns", [])
            # A RangeIndex of pandas is described by a dict, which names no column. An index called `uid` keeps
            # its name, so that it is never taken for names of cells.
            names = {index[0]: INDEX} if len(index) == 1 and isinstance(index[0], str) and index[0] != "uid" else {}
            return with_facts(table.rename_columns([names.get(name, name) for name in table.column_names]))
        table = pyarrow.csv.read_csv(
            path,
            parse_options=pyarrow.csv.ParseOptions(delimiter="\t" if ending.startswith(".tsv") else ","),
            convert_options=pyarrow.csv.ConvertOptions(
                # The column without a header has the names of rows, which are text also where they look like numbers.
                column_types=dict.fromkeys((*text_columns, ""), pa.string()),
                null_values=_MISSING, strings_can_be_null=True, quoted_strings_can_be_null=False,
            ),
        )  # fmt: skip
    except FileNotFoundError as error:
        raise StoreError(f"There is no file {path}.") from error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SourceError(f"{path} cannot be read as {ending}: {error}.") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}.") from error
    # pandas and R write the names of rows under an empty header.
    return with_facts(table.rename_columns([name or INDEX for name in table.column_names]))


def with_facts(table: pa.Table) -> pa.Table:
    """Return a table whose columns carry the facts that their Arrow types tell.

    Examples
    --------
    >>> facts_of(with_facts(pa.table({"a": pa.array(["x"]).dictionary_encode()})).schema.field("a")).kind
    'categorical'
    """
    repeated = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if repeated:
        raise SchemaError(f"The columns {repeated} appear twice; rename them.")
    fields = [
        f if facts_of(f) else f.with_metadata(_facts(table.column(f.name), f).to_metadata()) for f in table.schema
    ]
    # This cast changes the metadata of fields only, no type.
    return table.replace_schema_metadata(None).cast(pa.schema(fields))


def _facts(column: pa.ChunkedArray, named: pa.Field) -> ColumnFacts:
    kind = named.type
    if pa.types.is_dictionary(kind) and column.num_chunks:
        unified = column.unify_dictionaries()
        values = unified.chunk(0).dictionary
        return ColumnFacts(named.name, "categorical", tuple(values.to_pylist()), kind.ordered, _kind(values.type))
    facts = ColumnFacts(named.name, _kind(kind))
    if column.null_count and pa.types.is_integer(kind):
        # `int8` becomes `Int8` and `uint8` becomes `UInt8`, the nullable types of pandas.
        return replace(facts, kind=str(kind).replace("int", "Int").replace("uI", "UI"))
    return replace(facts, kind="boolean") if column.null_count and pa.types.is_boolean(kind) else facts


def _kind(arrow: pa.DataType) -> str:
    if pa.types.is_string(arrow) or pa.types.is_large_string(arrow) or pa.types.is_string_view(arrow):
        return "string"
    return "" if pa.types.is_nested(arrow) or pa.types.is_temporal(arrow) else str(np.dtype(arrow.to_pandas_dtype()))


def text_of_column(table: pa.Table, name: str, what: str) -> pa.Array:
    """Return a column of names as text.

    Raises
    ------
    SourceError
        If a row has none.
    """
    column = table.column(name)
    values = pc.cast(column, pa.string()).combine_chunks()
    if values.null_count:
        row = int(np.argmin(values.is_valid().to_numpy(zero_copy_only=False)))
        raise SourceError(
            f"Row {row:,} has no {what} in the column {name!r}, so its cell is not known; remove such rows."
        )
    return values
