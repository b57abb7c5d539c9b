"""Readers of arrays in files outside of an atlas, with references made by hand: of HDF5 as h5py tells where chunks are."""

import hashlib
import json
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from raggedatlas.model.arrays import ArraySpec
from raggedatlas.model.records import Link, Span
from raggedatlas.store.linked import LinkedSource, file_probe
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader
from raggedatlas.store.references import ChunkTable, References, SourceObjects

FILTERS = {1: "numcodecs.zlib", 3: "numcodecs.fletcher32", 32000: "numcodecs.lzf"}
DATASET = "pbmc"


def link_hdf5(
    store: Path, file: Path, name: str, *, place: Location | None = None, etag: str = "", **facts: object
) -> ArrayReader:
    """Return a reader of a dataset of an HDF5 file.

    Parameters
    ----------
    store, file : Path
        The Zarr store of the atlas, and the file.
    name : str
        The dataset.
    place : Location, optional
        Where the file is reached, if not where it is.
    etag : str
        Recorded ETag.
    **facts
        Of the `Link`.
    """
    with h5py.File(file) as opened:
        array = opened[name]
        plist = array.id.get_create_plist()
        codecs: list[dict[str, Any]] = [
            {"name": "bytes", "configuration": {"endian": "big" if array.dtype.byteorder == ">" else "little"}}
        ]
        for i in range(plist.get_nfilters()):
            number = plist.get_filter(i)[0]
            shuffled = {"name": "numcodecs.shuffle", "configuration": {"elementsize": array.dtype.itemsize}}
            codecs.append(shuffled if number == 2 else {"name": FILTERS[number]})
        if array.chunks is None:
            offset = array.id.get_offset()
            made = [(offset or 0, array.nbytes if offset is not None else -1)]
            rows = max(1, min(array.shape[0], 2**16 // max(1, array.nbytes // max(1, array.shape[0]))))
            chunks = (rows, *array.shape[1:])
        else:
            chunks = array.chunks
            starts = [range(0, n, c) for n, c in zip(array.shape, chunks, strict=True)]
            found = dict.fromkeys(product(*starts), (0, -1))
            array.id.chunk_iter(lambda info: found.update({info.chunk_offset: (info.byte_offset, info.size)}))
            made = list(found.values())
        fill = array.fillvalue.item()
        dtype, shape = array.dtype.newbyteorder("=").name, array.shape
    offsets, sizes = np.array(made, np.int64).T.copy()
    table = ChunkTable(np.zeros(len(sizes), np.int32), offsets, sizes)
    data = file.read_bytes()
    objects = SourceObjects(
        ("",), np.array([len(data)]), np.array([0 if place else file.stat().st_mtime_ns]), (etag,),
        file_probe(lambda at, n: data[at : at + n], len(data)),
    )  # fmt: skip
    references = References(objects, {name: table})
    return linked_reader(
        store, place or Location(str(file)), references, name, shape=shape, dtype=dtype, chunks=chunks, codecs=codecs,
        fill=fill, **facts,
    )  # fmt: skip


def linked_reader(
    store: Path,
    place: Location,
    references: References,
    name: str,
    *,
    shape: tuple[int, ...],
    dtype: str,
    chunks: tuple[int, ...],
    codecs: list[dict[str, Any]],
    fill: Any = 0,
    **facts: object,
) -> ArrayReader:
    """Write references below a Zarr store, and return the reader of one array."""
    data = references.to_bytes()
    location = Location(str(store))
    with tempfile.NamedTemporaryFile(prefix="refs-", dir=store) as file:
        key = Path(file.name).name
    location.write_bytes(key, data)
    link = Link("x.h5ad", name, Span(key, 0, len(data)), hashlib.sha256(data).hexdigest(), **facts)  # type: ignore[arg-type]
    spec = ArraySpec("x", shape, dtype, chunks, None, json.dumps(codecs), json.dumps(fill), linked=link)
    return ArrayReader(location, spec, source=LinkedSource(place, DATASET))


def relinked(reader: ArrayReader, **changes: Any) -> ArrayReader:
    """Return a reader whose spec says something else."""
    return replace(reader, spec=replace(reader.spec, **changes))


def slices(values: NDArray[Any], asked: list[tuple[int, int]]) -> NDArray[Any]:
    """Return what ranges of rows are, as NumPy reads them."""
    return np.concatenate([values[a:b] for a, b in asked] or [values[:0]])
