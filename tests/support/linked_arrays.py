"""Readers of arrays in files outside of an atlas."""

import hashlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raggedatlas.formats.composite_source import CompositeSource, MatrixPart, SourceParts
from raggedatlas.formats.linking import Linker
from raggedatlas.formats.matrix_readers import DenseRows, MatrixLocation
from raggedatlas.model.arrays import ArraySpec
from raggedatlas.model.frames import frame_to_arrow
from raggedatlas.model.records import Link, Span
from raggedatlas.store.linked import LinkedSource
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader
from raggedatlas.store.references import References

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
        linker = Linker(source_of(opened[name]), file)
        (spec,) = linker.add("X").values()
        made = linker.references()
    # A place on a server has no time that the file here has.
    objects = replace(made.objects, etags=(etag,), modified=np.array([0]) if place else made.objects.modified)
    references = References(objects, {name: made.arrays["X/data"]})
    return linked_reader(
        store, place or Location(str(file)), references, name, shape=spec.shape, dtype=spec.dtype, chunks=spec.chunk_shape,
        codecs=json.loads(spec.codecs), fill=json.loads(spec.fill_value), **facts,
    )  # fmt: skip


def source_of(array: Any, uri: str = "x") -> CompositeSource:
    """Return a source of which one array is the matrix X."""
    part = MatrixPart.of("X", DenseRows(array, MatrixLocation(uri, "X", str)))
    none = frame_to_arrow(pd.DataFrame())
    return CompositeSource(SourceParts(array.shape[0], lambda: none, (part,), {}), name="x", uri=uri, format="h5ad")


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
