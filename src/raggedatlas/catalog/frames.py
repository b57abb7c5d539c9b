"""Each dataset's own obs and var frames, kept whole as one Arrow file each beside its arrays."""

import pyarrow as pa

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import NotFoundError


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
        writer.write_table(table)
    catalog.arrays.child(dataset_uid).write_bytes(f"frames/{name}.arrow", memoryview(sink.getvalue()))


def read_frame(catalog: Catalog, dataset_uid: str, name: str) -> pa.Table:
    """Read a frame of a dataset.

    Raises
    ------
    NotFoundError
        If the dataset keeps no frame of that name.
    """
    place = catalog.arrays.child(dataset_uid)
    try:
        data = place.read_bytes(f"frames/{name}.arrow")
    except NotFoundError as error:
        raise NotFoundError(
            f"Dataset {dataset_uid} keeps no frame {name!r} in {place.uri}; run validate('rows')."
        ) from error
    with pa.ipc.open_file(pa.BufferReader(data)) as reader:
        return reader.read_all()
