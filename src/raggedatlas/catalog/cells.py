"""The cell table: its columns, the frames of files that are kept with the datasets, and annotations."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from raggedatlas.catalog.assets import group_by_dataset, read_records
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.errors import AtlasError, ConflictError, CorruptError, NotFoundError, SchemaError
from raggedatlas.model.assets import AnnotationRecord, annotation_columns
from raggedatlas.model.frames import TEXT_ROWS, ColumnFacts, column_stacks, facts_of, is_text, nan_to_null
from raggedatlas.model.ids import free_name
from raggedatlas.model.records import BundleFacts, DatasetRecord
from raggedatlas.model.validation import Problem
from raggedatlas.store.bundle import Bundle, bundle_file
from raggedatlas.store.location import Location, digest_file
from raggedatlas.store.sql import all_of, is_not_null, is_null
from raggedatlas.store.tables import Tables, update_columns, walk

if TYPE_CHECKING:
    from raggedatlas.model.reports import MaintenanceReport


@dataclass(frozen=True, slots=True)
class CellColumn:
    """A metadata column of an `add`."""

    stored: str  # its name in the cell table
    type: pa.DataType  # its stored type
    facts: ColumnFacts  # its type and categories in the file
    source: str = ""  # its name in the file


def in_datasets(cells: pa.Table | pa.RecordBatch, uids: Iterable[str]) -> Any:  # noqa: ANN401 - a mask, chunked as the cells are
    """Return for each cell whether its dataset is one of those.

    With the uids of all records, these are the visible cells: the table also has cells of adds that are under way or
    died, and of datasets that are being dropped.
    """
    return pc.is_in(cells.column("dataset_uid"), value_set=pa.array(list(uids), pa.string()))


def visible_cells(catalog: Catalog, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Walk over some columns of the visible cells, with ``dataset_uid``, in bounded memory."""
    uids = {record.uid for record in read_records(catalog)}
    for batch in walk(catalog.tables, CELLS, list(dict.fromkeys([*columns, "dataset_uid"]))):
        yield batch.filter(in_datasets(batch, uids))


def cells_per_dataset(catalog: Catalog) -> dict[str, int]:
    """Count the rows of the cell table: dataset uid -> cells, in table order, including datasets without a record."""
    found: dict[str, int] = {}
    for batch in catalog.tables.batches(CELLS, ["dataset_uid"]):
        count_cells(batch.column("dataset_uid"), found)
    return found


def count_cells(datasets: pa.Array, counts: dict[str, int]) -> None:
    """Add the cells of each dataset to `counts`, by the column of the datasets."""
    for entry in pc.value_counts(datasets).to_pylist():
        # Text also where nothing is named, which only something other than this library writes.
        uid = str(entry["values"])
        counts[uid] = counts.get(uid, 0) + entry["counts"]


def stored_type(arrow: pa.DataType) -> pa.DataType:
    """Return the type in which the cell table stores a column: the widest of its family, so that later files fit.

    Examples
    --------
    >>> stored_type(pa.int8()), stored_type(pa.float32()), stored_type(pa.uint64())
    (DataType(int64), DataType(double), DataType(uint64))
    >>> stored_type(pa.date32()), stored_type(pa.timestamp("s", "Europe/Berlin"))
    (TimestampType(timestamp[ns]), TimestampType(timestamp[ns, tz=UTC]))
    """
    if pa.types.is_date(arrow):
        return pa.timestamp("ns")
    if pa.types.is_timestamp(arrow):
        return pa.timestamp("ns", None if arrow.tz is None else "UTC")
    if pa.types.is_duration(arrow):
        return pa.duration("ns")
    if pa.types.is_dictionary(arrow):
        return stored_type(arrow.value_type)
    if pa.types.is_integer(arrow):
        return pa.uint64() if arrow == pa.uint64() else pa.int64()
    if pa.types.is_floating(arrow):
        return pa.float64()
    return pa.string() if pa.types.is_large_string(arrow) or pa.types.is_string_view(arrow) else arrow


def column_conflict(field: pa.Field, column: CellColumn) -> str | None:
    """Return why a column cannot be appended to an existing one without changing a value, or None if it can."""
    there = facts_of(field)
    if field.type == column.type or column.facts.empty or (there is not None and there.empty):
        return None
    # Types that may differ: `fit_values` then refuses single values that would change, such as -1 as uint64.
    both = {str(field.type), str(column.type)}
    if both <= {"int64", "uint64"} or (str(field.type) == "double" and pa.types.is_integer(column.type)):
        return None
    return f"it is {column.type} here and {field.type} in the atlas"


def takes_over(was: pa.DataType, facts: ColumnFacts | None, column: CellColumn) -> bool:
    """Return whether a column of a file decides the type of the cell column: values do where there are none, and text anywhere."""
    if column.facts.empty:
        return False
    return (facts is not None and facts.empty) or (pa.types.is_string(column.type) and not pa.types.is_string(was))


def fit_values(name: str, values: pa.ChunkedArray, target: pa.DataType, argument: str = "obs") -> pa.ChunkedArray:
    """Cast a column to its stored type without changing a value; whatever a missing value is there, it is null here.

    `argument` is the caller's argument by which a column gets another name. The `SchemaError` that is raised if a value
    would change names it and the column.

    Examples
    --------
    >>> fit_values("n", pa.chunked_array([[1.5, float("nan"), 2.0]]), pa.string()).to_pylist()
    ['1.5', None, '2']
    """
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    values = nan_to_null(values)
    if values.null_count == len(values):
        return pa.chunked_array([pa.nulls(len(values), target)])
    try:
        # Again, as the text "nan" becomes NaN.
        return nan_to_null(values.cast(target, safe=True))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(
            f"Column {name!r} does not fit a column of type {target} without changing a value ({error}); leave it out of cast={{...}}, or give "
            f"it a column of its own with {argument}={{{name!r}: {name + '_2'!r}}}."
        ) from error


def add_cell_columns(catalog: Catalog, columns: Sequence[CellColumn], pointers: Sequence[pa.Field]) -> None:
    """Add the metadata and pointer columns that the cell table lacks, and join the facts of those it has.

    `pointers` are as `pointer_field` makes them.
    """
    schema = catalog.tables.schema(CELLS)
    # Each once: files of one commit may have a column of one name.
    once: dict[str, CellColumn] = {}
    for column in columns:
        known = once.get(column.stored)
        if known is None:
            once[column.stored] = column
        else:
            kind = column.type if takes_over(known.type, known.facts, column) else known.type
            once[column.stored] = CellColumn(known.stored, kind, join_facts(known.facts, column.facts))
    columns = [*once.values()]
    fresh = [
        pa.field(c.stored, c.type, metadata=c.facts.to_metadata()) for c in columns if c.stored not in schema.names
    ]
    fresh += [p for p in pointers if p.name not in schema.names]
    if fresh:
        catalog.tables.add_columns(CELLS, fresh)
    for column in columns:
        there = catalog.tables.schema(CELLS).field(column.stored)
        if there.type != column.type and takes_over(there.type, facts_of(there), column):
            _convert(catalog, column.stored, column.type)

    def joined(now: pa.Schema) -> Mapping[str, Mapping[bytes, bytes]]:
        updates = {}
        for column in columns:
            was = facts_of(now.field(column.stored))
            # A column that the schema class of the atlas declares has a type without values too.
            facts = replace(column.facts, empty=False) if was is None else join_facts(was, column.facts)
            if facts != was:
                updates[column.stored] = facts.to_metadata()
        return updates

    if joined(catalog.tables.schema(CELLS)):
        catalog.tables.update_field_metadata(CELLS, joined)


def _convert(catalog: Catalog, name: str, target: pa.DataType) -> None:
    """Convert a column to text, or one without values to any type.

    The old column keeps its values under another name until the new one is complete, so that a writer that
    commits in between loses nothing; rows added after the columns are renamed are refused by their type.
    """
    tables = catalog.tables
    was = tables.schema(CELLS).field(name)
    fresh, old = (free_name(f"{name}__{word}", tables.schema(CELLS).names) for word in ("after", "before"))

    schema = pa.schema([pa.field(fresh, target, metadata=was.metadata)])

    def fitted(column: pa.Array) -> pa.Array:
        return fit_values(name, pa.chunked_array([column]), target).combine_chunks()

    def converted(at: Tables) -> pa.RecordBatchReader:
        batches = (pa.record_batch([fitted(batch.column(0))], schema) for batch in at.batches(CELLS, [name]))
        return pa.RecordBatchReader.from_batches(schema, batches)

    tables.fill_columns(CELLS, converted)
    # One commit for both renames: every version of the table has a column of this name.
    tables.rename_columns(CELLS, {name: old, fresh: name})
    # Rows appended between the two commits have a value in the old column and none in the new one.
    late = tables.read(CELLS, ["uid", old], all_of(is_null(name), is_not_null(old)))
    if late.num_rows:
        try:
            rows = pa.table({"uid": late.column("uid"), name: fit_values(name, late.column(old), target)})
        except SchemaError:
            # Both columns had no type before, and the other writer's values came first.
            tables.rename_columns(CELLS, {name: fresh, old: name})
            tables.drop_columns(CELLS, [fresh])
            raise
        tables.merge(CELLS, ["uid"], rows, update=True)
    tables.drop_columns(CELLS, [old])


def join_facts(old: ColumnFacts, new: ColumnFacts) -> ColumnFacts:
    """Combine the facts of one column from two files.

    Categories keep the older order and append new ones; they stay ordered only if both are ordered and neither
    contradicts the other's order. Different kinds of number, also as categories, join to what holds both. Text and
    anything else join to text: the column holds text from then on. A column without values leaves the facts of the
    other as they are.

    Examples
    --------
    >>> a = ColumnFacts("stage", "categorical", ("I", "II"), ordered=True)
    >>> b = ColumnFacts("stage", "categorical", ("II", "III"), ordered=True)
    >>> join_facts(a, b).categories, join_facts(a, b).ordered
    (('I', 'II', 'III'), True)
    """
    if old.empty or new.empty:
        return old if new.empty else replace(new, name=old.name)
    if old.kind == new.kind == "categorical":
        return _join_categoricals(old, new)
    if old.kind == new.kind:
        return old
    kinds = [facts.category_kind if facts.kind == "categorical" else facts.kind for facts in (old, new)]
    plain = replace(old, categories=None, ordered=False, category_kind="string")
    if any(map(is_text, kinds)):
        return replace(plain, kind="string")
    with contextlib.suppress(TypeError, KeyError):
        import numpy as np

        return replace(plain, kind=str(np.result_type(*kinds)))
    return replace(plain, kind="")


def _join_categoricals(old: ColumnFacts, new: ColumnFacts) -> ColumnFacts:
    texts = is_text(old.category_kind), is_text(new.category_kind)
    if any(texts) and not all(texts):
        # The column holds text from now on, of which categories that are numbers would match nothing.
        return replace(old, kind="string", categories=None, ordered=False, category_kind="string")
    known, added, kind = old.categories or (), new.categories or (), old.category_kind
    if not all(texts) and old.category_kind != new.category_kind:
        import numpy as np

        kind = str(np.result_type(old.category_kind, new.category_kind))
        known, added = (tuple(np.array(listed, kind).tolist()) for listed in (known, added))
    merged, consistent = _merge_categories(known, added)
    ordered = old.ordered and new.ordered and consistent
    return replace(old, categories=merged, ordered=ordered, category_kind=kind)


def _merge_categories(old: tuple[Any, ...], new: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool]:
    if old == new:
        return old, True
    position = {value: i for i, value in enumerate(old)}
    shared = [position[value] for value in new if value in position]
    consistent = shared == sorted(shared)
    # Without a shared value, nothing says how the two orders interleave.
    if not consistent or not shared:
        return (*old, *(v for v in new if v not in position)), False
    # A new value before a shared one goes in front of it; after the last shared one it follows all of `old`.
    end = max(i for i, value in enumerate(new) if value in position) + 1
    merged, at = list[Any](), 0
    for value in new[:end]:
        if value in position:
            merged += old[at : position[value] + 1]
            at = position[value] + 1
        else:
            merged.append(value)
    return (*merged, *old[at:], *new[end:]), True


def cell_rows(schema: pa.Schema, columns: Mapping[str, Any], n: int) -> pa.Table:
    """Return columns as `n` rows of the cell table; missing columns are null.

    `columns` maps a stored name to values, or to what makes them for the type of the column, which can differ from the
    plan's: it became text, or another writer added it first.
    """
    there = {*schema.names}
    lost = [name for name in columns if name not in there]
    if lost:
        raise ConflictError(f"Another process has removed the columns {lost} of the cells meanwhile; run it again.")
    given = {name: made(schema.field(name).type) if callable(made) else made for name, made in columns.items()}
    arrays = [given[f.name] if f.name in given else pa.nulls(n, f.type) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema.remove_metadata())


def frame_file(dataset_uid: str, name: str) -> str:
    """Return the path of a frame below the Zarr store; one in a bundle has it there, below the dataset."""
    return f"{dataset_uid}/frames/{name}.arrow"


def write_frame(catalog: Catalog, dataset_uid: str, name: str, table: pa.Table, bundle: Bundle | None = None) -> str:
    """Store a frame of a dataset, with the metadata that restores it exactly; return the SHA-256 of its file.

    `name` is ``"obs"``, ``"var.<pointer>"``, or the frame of a deletion; `table` is as `model.frames.frame_to_arrow`
    makes it. `bundle` takes the frame if it is small; otherwise the frame becomes a file of its own. The hash is for
    `DatasetFacts.frames`, or the record of the deletion.
    """
    data = encode_frame(table)
    file = frame_file(dataset_uid, name)
    if bundle is None or bundle.add({file: data}) is None:
        catalog.arrays.write_bytes(file, data)
    return hashlib.sha256(data).hexdigest()


def encode_frame(table: pa.Table) -> memoryview:
    """Return an Arrow file, compressed with Zstandard."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        # Bounded batches, because `StoredFrame.chunks` decodes one batch of a column at a time.
        writer.write_table(table, max_chunksize=TEXT_ROWS)
    return memoryview(sink.getvalue())


def read_frame(catalog: Catalog, record: DatasetRecord, name: str, digest: str | None = None) -> pa.Table:
    """Read a frame of a dataset, after comparing the hash of its file with the recorded one.

    `record` is the first one of the dataset, whose facts have the hashes; `digest` is the hash of a frame that is not
    in these, as that of a deletion. Raises `NotFoundError` if the file is missing, and `CorruptError` if it is not the
    one that was written, or is no valid Arrow file.
    """
    data = _bytes(catalog, record, name, digest)
    with _arrow_errors(catalog, record, name), pa.ipc.open_file(data) as reader:
        table = reader.read_all()
        table.validate(full=True)
        return table


_WAY_OUT = "Restore the file from a copy, or drop the dataset and add it again."


def check_frames(catalog: Catalog, records: Iterable[DatasetRecord]) -> list[Problem]:
    """Read every frame that has a recorded hash to the end (rule ``frame``)."""
    problems = []
    for uid, group in group_by_dataset(records).items():
        try:
            names = group[0].file_facts.frames
        except CorruptError:
            continue  # rule array-spec
        for name in names:
            try:
                read_frame(catalog, group[0], name)
            except AtlasError as error:
                problems.append(Problem("frame", "must", uid, str(error), _WAY_OUT))
    return problems


def check_bundle(arrays: Location, file: str, facts: BundleFacts) -> list[Problem]:
    """Compare the file that holds the small files of a dataset, or of many, with what is recorded of it (rule ``bundle``)."""
    try:
        n_bytes, sha256 = digest_file(arrays, file)
        text = f"the SHA-256 of {file} is not the one that was recorded" if sha256 != facts.sha256 else ""
        if n_bytes != facts.n_bytes:
            text = f"{file} has {n_bytes:,} bytes, {facts.n_bytes:,} were written"
    except AtlasError as error:
        text = str(error)
    return [Problem("bundle", "must", file.partition("/")[0], text, _WAY_OUT)] if text else []


@dataclass(frozen=True)
class StoredFrame:
    """A stored frame whose columns are read one by one; `catalog`, `record` and `name` are its origin, for messages."""

    schema: pa.Schema  # its columns with their facts
    data: pa.Buffer  # the file, its hash compared; mapped where it is local
    catalog: Catalog
    record: DatasetRecord
    name: str

    def chunks(self, column: int) -> Iterator[pa.Array]:
        """Iterate over the chunks of one column, without decompressing the others."""
        options = pa.ipc.IpcReadOptions(included_fields=[column])
        with (
            _arrow_errors(self.catalog, self.record, self.name),
            pa.ipc.open_file(self.data, options=options) as reader,
        ):
            for i in range(reader.num_record_batches):
                values = reader.get_batch(i).column(0)
                values.validate(full=True)
                yield values


def open_frame(catalog: Catalog, record: DatasetRecord, name: str) -> StoredFrame:
    """Open a frame of a dataset; see `read_frame` for parameters and errors."""
    data = _bytes(catalog, record, name)
    with _arrow_errors(catalog, record, name), pa.ipc.open_file(data) as reader:
        return StoredFrame(reader.schema, data, catalog, record, name)


def _bytes(catalog: Catalog, record: DatasetRecord, name: str, digest: str | None = None) -> pa.Buffer:
    facts = record.file_facts
    span = None if facts.bundle is None else facts.bundle.frames.get(name)
    file = frame_file(record.uid, name) if span is None else span.file
    try:
        if catalog.arrays.is_local:
            with pa.memory_map(str(catalog.arrays.child(*file.split("/")).checked_path())) as opened:
                if span is not None:
                    if opened.size() < span.offset + span.n_bytes:
                        raise _damaged(catalog, record, name, "it was cut short")
                    opened.seek(span.offset)
                # Not a copy: the buffer keeps the mapping after the file is closed.
                data = opened.read_buffer(None if span is None else span.n_bytes)
        elif span is None:
            data = pa.py_buffer(catalog.arrays.read_bytes(file))
        else:
            data = pa.py_buffer(catalog.arrays.read_range(file, span.offset, span.n_bytes))
    except (NotFoundError, FileNotFoundError) as error:
        raise NotFoundError(
            f"Dataset {record.uid} keeps no frame {name!r} in {catalog.arrays.uri}/{file}; run validate('rows')."
        ) from error
    known = digest or facts.frames.get(name)
    if hashlib.sha256(data).hexdigest() != known:
        raise _damaged(catalog, record, name, "its SHA-256 is not the one that was recorded")
    return data


@contextlib.contextmanager
def _arrow_errors(catalog: Catalog, record: DatasetRecord, name: str) -> Iterator[None]:
    """Raise errors of an invalid file as `CorruptError`."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(catalog, record, name, str(error).split("\n", 1)[0]) from error


def _damaged(catalog: Catalog, record: DatasetRecord, name: str, reason: str) -> CorruptError:
    bundle = record.file_facts.bundle
    in_bundle = bundle is not None and name in bundle.frames
    file = bundle_file(record.uid, bundle) if bundle and in_bundle else frame_file(record.uid, name)
    return CorruptError(
        f"The frame {name!r} in {catalog.arrays.uri}/{file} is damaged: {reason}. Run validate('deep'), which reads it "
        "again: only if it is found there too, restore the file from a copy, or drop the dataset and add it again."
    )


def read_annotations(catalog: Catalog) -> list[AnnotationRecord]:
    """Return the annotations of an atlas, oldest first."""
    found = {record.uid: record for record in annotation_columns(catalog.tables.schema(CELLS)).values()}
    return list(found.values())


def drop_annotation(catalog: Catalog, name: str) -> "MaintenanceReport":
    """Remove the columns of an annotation, in one commit; the columns that they covered become visible again. Snapshots keep their columns."""
    catalog = catalog.session("drop_annotation()")
    schema = catalog.tables.schema(CELLS)
    columns = annotation_columns(schema)
    own = [column for column, record in columns.items() if record.name == name]
    if not own:
        names = sorted({record.name for record in columns.values()})
        raise NotFoundError(f"{catalog.location.uri} has no annotation {name!r}; it has {names}.")
    # A later annotation's column has copies of the values below it, which would remain visible.
    for shown, stack in column_stacks(schema).items():
        later = [columns[column].name for column in stack if column in columns and column not in own]
        if set(own) & set(stack) and stack[0] not in own:
            raise ConflictError(
                f"The annotation {later[0]!r} gave values to the column {shown!r} after {name!r} did; drop {later[0]!r} first."
            )
    if not catalog.tables.drop_columns(CELLS, own):
        # Another process has dropped it meanwhile.
        return drop_annotation(catalog, name)
    from raggedatlas.model.reports import MaintenanceReport

    return MaintenanceReport(notes=(f"{len(own)} columns were removed; snapshots that have them keep them",))


def complete_annotations(catalog: Catalog) -> int:
    """Copy values that were added to covered columns since into the covering columns of annotations; return how many.

    `add` writes the column of the file, which an annotation of the same name covers. A snapshot calls this before it
    records the cells, so that the covering column has the values of all of them.
    """
    n_filled = 0
    for upper, lower in incomplete_columns(catalog):
        field = catalog.tables.schema(CELLS).field(lower)
        shown = facts_of(catalog.tables.schema(CELLS).field(upper))
        facts = replace(facts_of(field) or ColumnFacts(lower, ""), name=upper if shown is None else shown.name)
        # First the facts and type: the upper column may lack categories, or be numeric where the lower one is text.
        add_cell_columns(catalog, [CellColumn(upper, field.type, facts)], [])
        n_filled += catalog.tables.retry(CELLS, partial(_fill, catalog, upper, lower))
    return n_filled


def incomplete_columns(catalog: Catalog) -> list[tuple[str, str]]:
    """Return the columns of annotations that lack values of the column below them, lowest first: pairs of stored names."""
    stacks = column_stacks(catalog.tables.schema(CELLS)).values()
    pairs = [pair for stack in stacks for pair in reversed(list(pairwise(stack)))]
    # A column is complete only if the one below it is, so those above an incomplete one are completed with it.
    found: list[tuple[str, str]] = []
    for upper, lower in pairs:
        if lower in {pair[0] for pair in found} or catalog.tables.count(
            CELLS, all_of(is_null(upper), is_not_null(lower))
        ):
            found.append((upper, lower))
    return found


def _fill(catalog: Catalog, upper: str, lower: str) -> int:
    at = catalog.tables.version(CELLS)
    then = catalog.tables.at({CELLS: at})
    schema = then.schema(CELLS)
    if upper not in schema.names or lower not in schema.names:
        return 0  # The annotation was dropped in the meantime.
    rows = then.read(CELLS, ["uid", lower], all_of(is_null(upper), is_not_null(lower)))
    if rows.num_rows:
        target = schema.field(upper).type
        values = fit_values(lower, rows.column(lower), target)
        fields = [rows.schema.field("uid"), pa.field(upper, target)]
        update_columns(
            catalog.tables, CELLS, "uid", pa.table([rows.column("uid"), values], schema=pa.schema(fields)), at
        )
    return int(rows.num_rows)
