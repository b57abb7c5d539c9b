"""The original obs and var frames of each dataset, stored as one Arrow file each next to its arrays."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from raggedatlas.catalog.assets import group_by_dataset
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import AtlasError, CorruptError, NotFoundError
from raggedatlas.model.frames import TEXT_ROWS
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.validation import AtlasProblem


def write_frame(catalog: Catalog, dataset_uid: str, name: str, table: pa.Table) -> str:
    """Store a frame of a dataset, with the metadata that restores it exactly.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    dataset_uid : str
        The dataset.
    name : str
        ``"obs"``, or ``"var.<pointer>"``.
    table : pyarrow.Table
        As `model.frames.frame_to_arrow` makes it.

    Returns
    -------
    str
        SHA-256 of the file, for `DatasetFacts.frames`.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table, max_chunksize=TEXT_ROWS)
    data = memoryview(sink.getvalue())
    catalog.arrays.child(dataset_uid).write_bytes(f"frames/{name}.arrow", data)
    return hashlib.sha256(data).hexdigest()


def read_frame(catalog: Catalog, record: DatasetRecord, name: str) -> pa.Table:
    """Read a frame of a dataset, after comparing the hash of its file with the recorded one.

    Parameters
    ----------
    catalog : Catalog
        At the tip or pinned.
    record : DatasetRecord
        The dataset's first record, whose facts have the hashes.
    name : str
        ``"obs"``, or ``"var.<pointer>"``.

    Raises
    ------
    NotFoundError
        If the dataset keeps no frame of that name.
    CorruptError
        If the file is not the one that was written, or is no valid Arrow file.
    """
    data = _bytes(catalog, record, name)
    with _arrow_errors(catalog, record, name), pa.ipc.open_file(data) as reader:
        table = reader.read_all()
        table.validate(full=True)
        return table


def check_frames(catalog: Catalog, records: Iterable[DatasetRecord]) -> list[AtlasProblem]:
    """Read every frame that has a recorded hash to the end.

    Returns
    -------
    list of AtlasProblem
        Rule ``frame``, and the note ``unverified-files`` for datasets that were added before hashes were recorded.
    """
    problems = []
    for uid, group in group_by_dataset(records).items():
        try:
            names = group[0].file_facts.frames
            if not names and catalog.arrays.child(uid, "frames").exists():
                text = "its frames have no recorded hashes, because it was added before they were recorded"
                problems.append(
                    AtlasProblem("unverified-files", uid, text, "Add it again with on_duplicate='replace'.")
                )
        except CorruptError:
            continue  # rule array-spec
        for name in names:
            try:
                read_frame(catalog, group[0], name)
            except AtlasError as error:
                text = "Restore the file from a copy, or drop the dataset and add it again."
                problems.append(AtlasProblem("frame", uid, str(error), text))
    return problems


@dataclass(frozen=True)
class StoredFrame:
    """A stored frame whose columns are read one by one.

    Parameters
    ----------
    schema : pyarrow.Schema
        Its columns with their facts.
    data : pyarrow.Buffer
        The file, its hash compared: mapped where it is local.
    catalog, record, name : Catalog, DatasetRecord, str
        Its origin, for messages.
    """

    schema: pa.Schema
    data: pa.Buffer
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


def _bytes(catalog: Catalog, record: DatasetRecord, name: str) -> pa.Buffer:
    place, key = catalog.arrays.child(record.uid, "frames"), f"{name}.arrow"
    try:
        if place.is_local:
            with pa.memory_map(str(place.child(key).checked_path())) as file:
                data = file.read_buffer()
        else:
            data = pa.py_buffer(place.read_bytes(key))
    except (NotFoundError, FileNotFoundError) as error:
        raise NotFoundError(
            f"Dataset {record.uid} keeps no frame {name!r} in {place.uri}; run validate('rows')."
        ) from error
    known = record.file_facts.frames.get(name)
    if known is not None and hashlib.sha256(data).hexdigest() != known:
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
    return CorruptError(
        f"The frame {catalog.arrays.uri}/{record.uid}/frames/{name}.arrow is damaged: {reason}. Run validate('deep'), which reads it "
        "again: only if it is found there too, restore the file from a copy, or drop the dataset and add it again."
    )
