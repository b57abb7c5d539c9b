"""Each dataset's own obs and var frames, kept whole as one Arrow file each beside its arrays."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import NotFoundError
from raggedatlas.model.tables import TEXT_ROWS


def write_frame(catalog: Catalog, dataset_uid: str, name: str, table: pa.Table) -> None:
    """Keep a frame of a dataset, with the facts that make it come back exactly.

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
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table, max_chunksize=TEXT_ROWS)
    catalog.arrays.child(dataset_uid).write_bytes(f"frames/{name}.arrow", memoryview(sink.getvalue()))


def read_frame(catalog: Catalog, dataset_uid: str, name: str) -> pa.Table:
    """Read a frame of a dataset.

    Raises
    ------
    NotFoundError
        If the dataset keeps no frame of that name.
    """
    with pa.ipc.open_file(_bytes(catalog, dataset_uid, name)) as reader:
        return reader.read_all()


@dataclass(frozen=True)
class KeptFrame:
    """A kept frame whose columns are read one by one.

    Parameters
    ----------
    schema : pyarrow.Schema
        Its columns with their facts.
    data : pyarrow.Buffer
        The file: mapped where it is local.
    """

    schema: pa.Schema
    data: pa.Buffer

    def chunks(self, column: int) -> Iterator[pa.Array]:
        """Walk down one column; the others are not unpacked."""
        options = pa.ipc.IpcReadOptions(included_fields=[column])
        with pa.ipc.open_file(self.data, options=options) as reader:
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i).column(0)


def open_frame(catalog: Catalog, dataset_uid: str, name: str) -> KeptFrame:
    """Open a frame of a dataset; parameters and errors as of `read_frame`."""
    data = _bytes(catalog, dataset_uid, name)
    with pa.ipc.open_file(data) as reader:
        return KeptFrame(reader.schema, data)


def _bytes(catalog: Catalog, dataset_uid: str, name: str) -> pa.Buffer:
    place, key = catalog.arrays.child(dataset_uid), f"frames/{name}.arrow"
    try:
        if not place.is_local:
            return pa.py_buffer(place.read_bytes(key))
        with pa.memory_map(str(place.path / key)) as file:
            return file.read_buffer()
    except (NotFoundError, FileNotFoundError) as error:
        raise NotFoundError(
            f"Dataset {dataset_uid} keeps no frame {name!r} in {place.uri}; run validate('rows')."
        ) from error
