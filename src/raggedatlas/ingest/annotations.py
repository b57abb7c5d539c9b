"""Annotations: what an analysis found out about cells, written back as cell columns in one commit."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import find_dataset, group_by_dataset, read_records
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.cells import CellColumn, add_cell_columns, column_conflict, fit_values, in_datasets, join_facts
from raggedatlas.catalog.deletion import describe_deleted
from raggedatlas.errors import (
    ArgumentError,
    DuplicateError,
    NameRefusedError,
    NotFoundError,
    SchemaError,
    SourceError,
    StoreError,
)
from raggedatlas.formats.registry import open_source
from raggedatlas.ingest.columns import FILLED, cast_advice, cell_column, column_values, merge_colors
from raggedatlas.ingest.values import block_rows
from raggedatlas.model.assets import (
    RECIPE_KEY,
    AnnotatedColumn,
    AnnotationRecord,
    annotation_columns,
    annotation_of,
    result_columns,
)
from raggedatlas.model.frames import INDEX, ColumnFacts, column_stacks, facts_of, frame_to_arrow, is_text
from raggedatlas.model.ids import (
    UidIndex,
    check_given_name,
    check_length,
    column_name,
    fit_name,
    free_name,
    integer_ids,
    new_uid,
)
from raggedatlas.model.options import AnnotateOptions
from raggedatlas.model.reports import AnnotationColumnReport, AnnotationReport
from raggedatlas.model.spaces import pointer_columns
from raggedatlas.model.wings import answer
from raggedatlas.store.copies import local_copy
from raggedatlas.store.location import AnyPath, as_path, with_options
from raggedatlas.store.tables import Tables

TABLE_ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")


_MISSING = ["", "NA", "N/A", "NaN", "nan", "None", "null", "NULL", "<NA>"]


@dataclass(frozen=True)
class AnnotationSource:
    """A table of cells with what is known of its origin.

    `table` has one row per cell and `ColumnFacts` in its columns; its column ``_index``, where there is one, holds the
    names of the rows.
    """

    table: pa.Table
    name: str = ""  # default name of the annotation; empty where the source has none
    uri: str = ""  # the file, or the type of the object
    # Column -> category -> color.
    colors: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # `uns["atlas"]` of a query's result; else empty.
    origin: Mapping[str, Any] = field(default_factory=dict)
    # The members of `obsm` that were asked for, (n_cells, ...).
    obsm: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    recipe: str = ""  # how it was made, as JSON, where the source says so


def read_annotation_source(source: Any, text_columns: tuple[str, ...], obsm: Sequence[str] = ()) -> AnnotationSource:  # noqa: ANN401
    """Read the columns of cells from a file or an object.

    `source` is a path, DataFrame, Series, Arrow table, AnnData, AnnotationSource, anything that `add` takes, or a
    mapping, which holds columns. Of AnnData and files of it, `obs` and the members of `obsm` that are named are read.
    `text_columns` are columns of a CSV file that are text whatever their values look like.
    """
    kind = type(source).__name__
    table = source if isinstance(source, AnnotationSource) else _read_table_source(source, kind, text_columns)
    if table is not None:
        if obsm:
            raise SourceError(
                f"obsm={list(obsm)} names members of an AnnData, and a {kind} has none; pass an AnnData, or a file of one."
            )
        return table
    with closing(open_source(source)) as opened:
        schema, cells = opened.describe(), opened.cells()
        colors = merge_colors(opened, cells, [key for key in schema.elements if key.endswith("_colors")])
        origin = opened.element("uns/atlas") if "uns/atlas" in schema.elements else {}
        dense = {info.key.removeprefix("obsm/"): info for info in schema.matrices if info.form == "dense"}
        dense = {key: info for key, info in dense.items() if info.key.startswith("obsm/")}
        members: dict[str, NDArray[Any]] = {}
        for key in obsm:
            if key not in dense:
                raise NotFoundError(f"The annotation has no array {key!r} in obsm; it has {[*dense]}.")
            info = dense[key]
            blocks = [np.asarray(block.layers["values"]) for (block,) in opened.blocks((info.key,), block_rows(info))]
            members[key] = np.concatenate(blocks) if blocks else np.empty(info.shape, info.dtype)
    is_path = isinstance(source, str | os.PathLike)
    return AnnotationSource(
        cells, schema.name if is_path else "", schema.uri if is_path else kind, colors,
        origin if isinstance(origin, Mapping) else {}, members,
    )  # fmt: skip


def read_uids(source: Any) -> pa.Array:  # noqa: ANN401
    """Read uids of cells.

    `source` is a list, array, Series or Index of uids, a table, mapping, AnnData or path of a table with a column
    ``uid`` or with uids as its index, or a text file (``.txt``) with one uid a line.

    Examples
    --------
    >>> read_uids(["5a3e8c0f12d4b697"]).to_pylist()
    ['5a3e8c0f12d4b697']
    """
    import pandas as pd

    if isinstance(source, str | os.PathLike) and as_path(source).suffix == ".txt":
        try:
            with local_copy(source) as path:
                source = path.read_text(encoding="utf-8").split()
        except StoreError:
            raise
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"{source} cannot be read: {error}.") from error
    uids: Any = source
    if isinstance(source, list | tuple | set | frozenset | np.ndarray | pd.Series | pd.Index):
        uids = list(source)
    elif not isinstance(source, pa.Array | pa.ChunkedArray):
        table = read_annotation_source(source, ("uid",)).table
        if "uid" not in table.column_names and INDEX not in table.column_names:
            raise SourceError(f"It has no column 'uid', only {table.column_names}; name the cells by uid.")
        uids = table.column("uid" if "uid" in table.column_names else INDEX)
    try:
        uids = pa.table({"uid": pa.array(uids, from_pandas=True) if isinstance(uids, list) else uids}).column(0)
    except pa.ArrowException as error:
        raise SourceError(f"uids are texts of 16 hexadecimal digits: {error}.") from error
    # A number has lost the leading zeros of its uid.
    if len(uids) and _kind(uids.type) != "string" and not pa.types.is_dictionary(uids.type):
        raise SourceError(f"uids are texts of 16 hexadecimal digits, not {uids.type}.")
    if uids.null_count:
        raise SourceError(f"{uids.null_count:,} of the {len(uids):,} uids are missing.")
    return pc.cast(uids, pa.string()).combine_chunks()


def _read_table_source(source: Any, kind: str, text_columns: tuple[str, ...]) -> AnnotationSource | None:  # noqa: ANN401
    """Read what is a table and no more; None for all else."""
    import pandas as pd

    if isinstance(source, str | os.PathLike):
        path = as_path(source)
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
        recipe = (table.schema.metadata or {}).get(RECIPE_KEY, b"").decode(errors="replace")
        return AnnotationSource(with_facts(table), uri=kind, recipe=recipe)
    return None


def _read_table(path: AnyPath, ending: str, text_columns: tuple[str, ...]) -> pa.Table:
    import pyarrow.csv
    import pyarrow.parquet

    try:
        with local_copy(path) as local:
            if ending == ".parquet":
                table = pyarrow.parquet.read_table(local)
            else:
                labels = _quoted_labels(local) if ending == ".csv" else ()
                table = pyarrow.csv.read_csv(
                    local,
                    parse_options=pyarrow.csv.ParseOptions(delimiter="\t" if ending.startswith(".tsv") else ","),
                    convert_options=pyarrow.csv.ConvertOptions(
                        # The column without a header has the names of rows, which are text also where they look like numbers.
                        column_types=dict.fromkeys((*text_columns, *labels, ""), pa.string()),
                        null_values=_MISSING, strings_can_be_null=True, quoted_strings_can_be_null=False,
                    ),
                )  # fmt: skip
    except StoreError:
        raise
    except FileNotFoundError as error:
        raise StoreError(f"There is no file {path}.") from error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SourceError(f"{path} cannot be read as {ending}: {error}.") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}.") from error
    index = (table.schema.pandas_metadata or {}).get("index_columns", [])
    # A RangeIndex of pandas is described by a dict, which names no column. An index called `uid` keeps
    # its name, so that it is never taken for names of cells.
    names = {index[0]: INDEX} if len(index) == 1 and isinstance(index[0], str) and index[0] != "uid" else {}
    if ending != ".parquet":
        # pandas and R write the names of rows under an empty header.
        names = {"": INDEX}
    return with_facts(table.rename_columns([names.get(name, name) for name in table.column_names]))


def _quoted_labels(path: Path) -> tuple[str, ...]:
    """Return the column of labels of a file as the viewer saves it: two columns by uid or name of cell, all in quotes."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header, first = file.readline(4096), file.readline(4096)
    names = re.fullmatch(r'"(?:uid|cell_name)","((?:[^"]|"")*)"\r?\n', header)
    # Arrow ignores quotes when it looks for numbers, so a label "1" would become a number.
    is_quoted = re.fullmatch(r'"(?:[^"]|"")*","(?:[^"]|"")*"(?:\r?\n)?', first)
    return (names[1].replace('""', '"'),) if names and is_quoted else ()


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
    fields = []
    for named in table.schema:
        column, kind = table.column(named.name), named.type
        if facts_of(named):
            fields.append(named)
            continue
        if pa.types.is_dictionary(kind):
            chunks = column.unify_dictionaries().chunks
            values = chunks[0].dictionary if chunks else pa.array([], kind.value_type)
            facts = ColumnFacts(named.name, "categorical", tuple(values.to_pylist()), kind.ordered, _kind(values.type))
        elif column.null_count and pa.types.is_integer(kind):
            # `int8` becomes `Int8` and `uint8` becomes `UInt8`, the nullable types of pandas.
            facts = ColumnFacts(named.name, str(kind).replace("int", "Int").replace("uI", "UI"))
        else:
            is_nullable = column.null_count and pa.types.is_boolean(kind)
            facts = ColumnFacts(named.name, "boolean" if is_nullable else _kind(kind))
        fields.append(named.with_metadata(facts.to_metadata()))
    # This cast changes the metadata of fields only, no type.
    return table.replace_schema_metadata(None).cast(pa.schema(fields))


def _kind(arrow: pa.DataType) -> str:
    if pa.types.is_string(arrow) or pa.types.is_large_string(arrow) or pa.types.is_string_view(arrow):
        return "string"
    return "" if pa.types.is_nested(arrow) or pa.types.is_temporal(arrow) else str(np.dtype(arrow.to_pandas_dtype()))


def text_of_column(table: pa.Table, name: str, what: str) -> pa.Array:
    """Return a column of names as text; a row without one is refused, and `what` says in the message what it lacks."""
    column = table.column(name)
    values = column.combine_chunks()
    values = (integer_ids(values, f"The values of {name!r}") if pa.types.is_floating(values.type) else values).cast(
        pa.string()
    )
    if values.null_count:
        row = int(np.argmin(values.is_valid().to_numpy(zero_copy_only=False)))
        raise SourceError(
            f"Row {row:,} has no {what} in the column {name!r}, so its cell is not known; remove such rows."
        )
    return values


@dataclass(frozen=True, eq=False)
class _NewColumn:
    """Values of one column for the cells that the source names, in its order; missing values say nothing."""

    column: CellColumn
    values: pa.Array
    colors: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.column.facts.name


@dataclass(frozen=True, eq=False)
class _Cells:
    """The rows of the source that name cells of the atlas, the uids of these, and how many other rows there are."""

    rows: NDArray[np.int64]
    uids: pa.Array
    index: UidIndex
    n_unknown: int


@dataclass(frozen=True, eq=False)
class _Merge:
    """One column at one version of the cells: the column that it covers, and what it becomes."""

    new: _NewColumn
    under: str | None
    field: pa.Field
    report: AnnotationColumnReport


def annotate(catalog: Catalog, source: Any, options: AnnotateOptions) -> AnnotationReport:  # noqa: ANN401
    """Write values of cells back into the atlas, as `RaggedAtlas.annotate` describes.

    The new columns, their values and the record of the annotation are one commit of the cell table. Columns that were
    there are not changed: the new ones cover them (`column_stacks`).
    """
    catalog = catalog.session("annotate()")
    if options.name is not None:
        check_given_name(options.name, "name of an annotation")
    # In a CSV file, a uid of digits alone or such as `12e4567890123456` would be read as a number.
    source = with_options(source, catalog.location.storage_options)
    texts = [name for name, kind in options.cast.items() if kind == "str"]
    given = read_annotation_source(source, ("uid", "cell_name", "dataset", *texts), options.obsm)
    if not given.table.num_rows:
        raise SourceError("The annotation has no rows; there is nothing to write.")
    cells = _find_cells(catalog, given.table, options)
    add_vectors = answer("add_vectors")
    vectors = [(key, values[cells.rows], cells.uids, given.origin) for key, values in given.obsm.items()]
    # Results are commits of their own: they are tried first, so that one that is refused stops the call before
    # columns are written.
    results = tuple(add_vectors(catalog, *one, options, dry_run=True) for one in vectors)
    columns = _chosen(given.table, options)
    snapshot = given.origin.get("snapshot")
    report = AnnotationReport("", "unchanged", len(cells.rows), cells.n_unknown, (), given.uri, snapshot)
    if columns:
        new = _new_columns(catalog, given, cells, columns, options)
        record = AnnotationRecord(
            uid=new_uid(), name=options.name or (given.name and fit_name(given.name)), source=given.uri, snapshot=snapshot,
            query=str(given.origin.get("summary", "")), recipe=given.recipe, on_conflict=options.on_conflict, n_cells=len(cells.rows),
        )  # fmt: skip
        report = _write(catalog, record, cells, new, options)
    if columns and not options.dry_run:
        # Covered columns without values get the type of the annotation, so that values added later are of one type with it.
        schema = catalog.tables.schema(CELLS)
        stacks = column_stacks(schema)
        for column in new:
            for stored in stacks.get(column.name, ())[1:]:
                facts = facts_of(schema.field(stored))
                if facts is not None and facts.empty:
                    add_cell_columns(catalog, [replace(column.column, stored=stored)], [])
    if not options.dry_run:
        results = tuple(add_vectors(catalog, *one, options, dry_run=False) for one in vectors)
        if any(result.status != "skipped" for result in results):
            report = replace(report, status="added")
    return replace(report, results=results, status="dry run" if options.dry_run else report.status)


def _write(
    catalog: Catalog, planned: AnnotationRecord, cells: _Cells, columns: Sequence[_NewColumn], options: AnnotateOptions
) -> AnnotationReport:
    """Commit the columns, compared with the cells at the version that the commit is based on."""
    reports: list[AnnotationReport] = []
    replaces = options.on_conflict == "replace"

    def batches(at: Tables, merges: Sequence[_Merge], places: pa.Array, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the new columns for all rows of the cell table, a bounded number of rows at a time."""
        start = 0
        for batch in at.batches(CELLS, ["uid", *(merge.under for merge in merges if merge.under is not None)]):
            arrays = []
            for merge in merges:
                new = merge.new.values.take(places.slice(start, batch.num_rows))
                if merge.under is not None:
                    old = batch.column(merge.under)
                    new = pc.coalesce(new, old) if replaces else pc.coalesce(old, new)
                arrays.append(new)
            start += batch.num_rows
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def make(at: Tables) -> pa.RecordBatchReader | None:
        # Where the new values of each row of the cell table are, null for none, in the order of `batches`.
        blocks = [cells.index.find(batch).astype(np.int32) for batch in _visible(catalog, at)]
        # Without cells there are no blocks, and `concatenate` refuses an empty list.
        found = np.concatenate([np.zeros(0, np.int32), *blocks])
        places = pa.array(found, mask=found < 0)
        schema = at.schema(CELLS)
        merges = [_merge_column(planned.uid, options, at, column, places) for column in columns]
        written = {m.new.name: m for m in merges if m.report.status in ("new", "merged")}
        taken = [record.name for record in annotation_columns(schema).values()]
        # The same call again is no second annotation; it may still have members of obsm to write.
        if options.name is not None and options.name in taken and written:
            raise DuplicateError(
                f"{catalog.location.uri} has an annotation {options.name!r} already; choose another name, or drop it with "
                f"drop_annotation({options.name!r})."
            )
        name = options.name
        if name is None or written:
            name = free_name(planned.name or (next(iter(written)) if len(written) == 1 else "annotation"), taken, "-")
        record = planned.model_copy(
            update={
                "name": name,
                "columns": {
                    shown: AnnotatedColumn(
                        n_values=m.report.n_values, n_replaced=m.report.n_replaced, colors=dict(m.new.colors)
                    )
                    for shown, m in written.items()
                },
            }
        )
        status: Any = "dry run" if options.dry_run else ("added" if written else "unchanged")
        # `fill_columns` calls `make` again after a lost race; the last report is that of the commit.
        reports[:] = [
            AnnotationReport(
                name=name, status=status, n_cells=len(places) - places.null_count, n_unknown=cells.n_unknown,
                columns=tuple(merge.report for merge in merges), source=record.source, snapshot=record.snapshot,
            )
        ]  # fmt: skip
        if options.dry_run or not written:
            return None
        fields = pa.schema([record.mark(merge.field) for merge in written.values()])
        return pa.RecordBatchReader.from_batches(fields, batches(at, [*written.values()], places, fields))

    catalog.tables.fill_columns(CELLS, make)
    return reports[0]


def _chosen(table: pa.Table, options: AnnotateOptions) -> dict[str, str]:
    """Return which columns are written, and under which names: name in the source -> shown name."""
    offered = [name for name in table.column_names if name != INDEX and name not in FILLED]
    asked = offered if options.columns is None else options.columns
    absent = sorted({*asked, *options.cast} - {*offered})
    if absent:
        raise NotFoundError(f"The annotation has no columns {absent} that can be written; it has {offered}.")
    if not asked and not options.obsm:
        raise SourceError(f"The annotation has no columns besides those that identify cells ({table.column_names}).")
    chosen = dict(asked) if isinstance(asked, Mapping) else {name: name for name in asked}
    shown = list(chosen.values())
    repeated = sorted({name for name in shown if shown.count(name) > 1})
    if repeated:
        raise NameRefusedError(
            f"Two columns of the annotation are to be called {repeated[0]!r}; give them different names."
        )
    return chosen


def _new_columns(
    catalog: Catalog, given: AnnotationSource, cells: _Cells, columns: Mapping[str, str], options: AnnotateOptions
) -> list[_NewColumn]:
    """Return the columns that have a value for a cell, each with its values for the cells that are named."""
    schema = catalog.tables.schema(CELLS)
    results = result_columns(schema)
    taken = {*FILLED, *catalog.spaces(), *pointer_columns(schema), *results, *(name for _, name in results.values())}
    table = given.table.take(cells.rows) if cells.n_unknown else given.table
    made = []
    for source, shown in columns.items():
        check_length(shown, "name of a column")
        if shown in taken:
            raise NameRefusedError(
                f"The name {shown!r} is taken by a feature space, a result or the atlas itself; write the column under another with "
                f"columns={{{source!r}: {shown + '_2'!r}}}."
            )
        field = table.schema.field(source)
        if pa.types.is_nested(field.type):
            raise SchemaError(
                f"The column {source!r} holds {field.type}, and a cell column holds one value for each cell; write vectors with "
                "atlas.add(ResultDataset) or annotate(adata, obsm=['X_umap'])."
            )
        column, _ = cell_column(field, column_name(shown), shown, options.cast.get(source))
        values = column_values(column, table, column.type).combine_chunks()
        if values.null_count < len(values):
            made.append(_NewColumn(column, values, given.colors.get(source, {})))
    if not made:
        raise SourceError(
            f"The columns {[*columns]} have no values for cells of this atlas; there is nothing to write."
        )
    return made


def _uids(catalog: Catalog, table: pa.Table, options: AnnotateOptions) -> pa.Array:
    """Return the uid of the cell that each row names; null where no cell has that name."""
    key = options.on if options.on in table.column_names else INDEX
    if key not in table.column_names:
        raise SourceError(
            f"The annotation has no column {options.on!r} and no index; name the cells in one of them, by uid or with on='cell_name'."
        )
    names = text_of_column(table, key, options.on)
    if options.on == "uid":
        if options.dataset is not None:
            raise ArgumentError("dataset=... names the dataset of cell names; pass on='cell_name' with it.")
        return names
    by_name = {records[0].name: uid for uid, records in group_by_dataset(read_records(catalog)).items()}
    if options.dataset is not None:
        uid = find_dataset(catalog, options.dataset)[0].uid
        datasets = pa.array([uid] * len(names), pa.string())
    elif "dataset" in table.column_names:
        given = text_of_column(table, "dataset", "dataset")
        unknown = sorted({*pc.unique(given).to_pylist()} - {*by_name})
        if unknown:
            raise NotFoundError(f"The atlas has no datasets {unknown[:5]}; it has {sorted(by_name)[:10]}.")
        datasets = pc.take(pa.array(list(by_name.values())), pc.index_in(given, value_set=pa.array(list(by_name))))
    else:
        raise SourceError(
            "on='cell_name' needs the dataset of each cell, as names are unique within one only: a column 'dataset', or dataset='NAME'."
        )
    cells = catalog.tables.read(CELLS, ["uid", "dataset_uid", "cell_name"])
    cells = cells.filter(in_datasets(cells, pc.unique(datasets).to_pylist()))
    # Dataset and name in one text, since `index_in` looks up single columns.
    keys = pc.binary_join_element_wise(cells.column("dataset_uid"), cells.column("cell_name"), "\0").combine_chunks()
    asked = pc.binary_join_element_wise(datasets, names, "\0")
    wanted = keys.filter(pc.is_in(keys, value_set=asked))
    if len(wanted) > pc.count_distinct(wanted).as_py():
        raise SourceError("Several cells of one dataset have the same name; name the cells by uid.")
    return cells.column("uid").combine_chunks().take(pc.index_in(asked, value_set=keys))


def _find_cells(catalog: Catalog, table: pa.Table, options: AnnotateOptions) -> _Cells:
    """Look up the cells that rows name, and refuse rows that name none, or one that another row names too."""
    uids = _uids(catalog, table, options)
    index, n_cells = UidIndex(uids), 0
    known = np.zeros(len(uids), bool)
    for batch in _visible(catalog, catalog.tables):
        n_cells += len(batch) - batch.null_count
        found = index.find(batch)
        known[found[found >= 0]] = True
    # `find` marks only the first row of each uid as known; the rows that repeat it follow it here.
    again, first = index.repeated()
    known[again] = known[first]
    n_unknown = len(uids) - int(known.sum())
    refused = n_unknown == len(uids) or (n_unknown and options.unknown == "error")
    deleted = describe_deleted(catalog, uids.filter(pa.array(~known))) if refused else ""
    deleted = f" {deleted}." if deleted else ""
    if n_unknown == len(uids):
        raise SourceError(
            f"None of the {len(uids):,} rows names one of the {n_cells:,} cells of this atlas by {options.on}; the first row "
            f"says {uids[0].as_py()!r}.{deleted} Cells are named by uid, or by name within a dataset with on='cell_name'."
        )
    if n_unknown and options.unknown == "error":
        row = int(np.argmin(known))
        raise SourceError(
            f"{n_unknown:,} of {len(uids):,} rows name no cell of this atlas, first row {row:,} ({uids[row].as_py()!r}).{deleted} "
            "Pass unknown='skip' to leave them out."
        )
    # Rows that repeat an unknown uid are merely unknown; `unknown="skip"` leaves them out.
    if known[again].any():
        twice = first[known[again]][0]
        n_rows = 1 + int((first == twice).sum())
        raise SourceError(f"The cell {uids[twice].as_py()!r} has {n_rows:,} rows; a cell has one.")
    if n_unknown:
        uids = uids.filter(pa.array(known))
        index = UidIndex(uids)
    return _Cells(np.flatnonzero(known), uids, index, n_unknown)


def _visible(catalog: Catalog, at: Tables) -> Iterator[pa.Array]:
    """Yield the uids of all cells, batch by batch; null for cells of a dataset that is not in the atlas."""
    visible = {record.uid for record in read_records(catalog)}
    for batch in at.batches(CELLS, ["uid", "dataset_uid"]):
        yield pc.if_else(in_datasets(batch, visible), batch.column("uid"), None)


def _merge_column(uid: str, options: AnnotateOptions, at: Tables, new: _NewColumn, places: pa.Array) -> _Merge:
    """Compare new and old values of a column at one version of the cells, and refuse what the caller did not allow."""
    schema = at.schema(CELLS)
    under = column_stacks(schema).get(new.name, (None,))[0]
    # A name of its own, so that the covered column stays and is shown again by `drop_annotation`.
    stored = f"{new.column.stored}__{uid[:8]}"
    was = ColumnFacts(new.name, "") if under is None else facts_of(schema.field(under)) or ColumnFacts(new.name, "")
    if under is None or was.empty:
        n_values = len(places) - new.values.take(places).null_count
        report = AnnotationColumnReport(new.name, "new", n_values=n_values)
        return _Merge(new, None, pa.field(stored, new.column.type, metadata=new.column.facts.to_metadata()), report)
    there = schema.field(under)
    reason, values = column_conflict(there, new.column), pa.chunked_array([new.values])
    if reason is not None:
        raise SchemaError(
            f"{new.name!r} cannot be written: {reason}. {cast_advice(new.name, values, there.type).capitalize()}or write it under "
            f"another name with columns={{{new.name!r}: {new.name + '_2'!r}}}."
        )
    # In the type of the covered column, whose values the new column takes over.
    new = replace(new, values=fit_values(new.name, values, there.type, "columns").combine_chunks())
    # Cells without an old value, with the same, with another, and with no new one.
    n_fresh = n_same = n_different = n_kept = start = 0
    uid_there, old_there, new_here = "", None, None
    for batch in at.batches(CELLS, ["uid", under]):
        old = batch.column(under)
        given = new.values.take(places.slice(start, batch.num_rows))
        start += batch.num_rows
        both = pc.and_(old.is_valid(), given.is_valid())
        # `not_equal` is null where either value is missing; those rows count as fresh or kept below.
        differs = pc.fill_null(pc.not_equal(old, given), False)  # noqa: FBT003
        n_both, n_other = (int(pc.sum(mask).as_py() or 0) for mask in (both, differs))
        if n_other and not n_different:
            row = int(np.argmax(differs.to_numpy(zero_copy_only=False)))
            uid_there, old_there, new_here = (column[row].as_py() for column in (batch.column("uid"), old, given))
        n_fresh += len(given) - given.null_count - n_both
        n_same += n_both - n_other
        n_different += n_other
        n_kept += len(old) - old.null_count - n_both
    if n_different and options.on_conflict == "error":
        raise SourceError(
            f"{n_different:,} cells have another value of {new.name!r} already, first {uid_there!r}: {old_there!r} in the "
            f"atlas, {new_here!r} here. Pass on_conflict='replace' or 'keep', or write it under another name with "
            f"columns={{{new.name!r}: {new.name + '_2'!r}}}."
        )
    replaces = options.on_conflict == "replace"
    facts = new.column.facts
    if n_kept or not replaces:
        if was.kind == "categorical" and is_text(was.category_kind) and is_text(facts.kind):
            # Text that joins categories becomes some of them.
            known = was.categories or ()
            fresh = sorted({*pc.unique(new.values).drop_null().to_pylist()} - {*known})
            facts = replace(was, categories=(*known, *fresh))
        else:
            facts = join_facts(was, facts)
    n_values = n_fresh + (n_different if replaces else 0)
    record = annotation_of(there)
    colors = {} if record is None or new.name not in record.columns else record.columns[new.name].colors
    # Categories, their order or their colors may change although no value does.
    restyled = replace(facts, name=was.name) != facts_of(there) or (bool(new.colors) and dict(new.colors) != colors)
    is_restyled = options.columns is not None and replaces and restyled
    report = AnnotationColumnReport(
        new.name, "merged" if n_values or is_restyled else "unchanged", n_values=n_values, n_same=n_same,
        n_replaced=n_different if replaces else 0, n_kept=0 if replaces else n_different,
    )  # fmt: skip
    return _Merge(
        new, under, pa.field(stored, there.type, metadata=replace(facts, name=new.name).to_metadata()), report
    )
