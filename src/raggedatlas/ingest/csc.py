"""The column-sorted copy of a sparse group: streamed, idempotent, layer by layer."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import DATASETS, Catalog
from raggedatlas.catalog.datasets import find_dataset
from raggedatlas.errors import NotFoundError, QueryError
from raggedatlas.model.pointers import PointerKind
from raggedatlas.model.records import DATASETS_SCHEMA, DatasetRecord
from raggedatlas.store.arrays import ArraySpec, ArrayWriter, create_group
from raggedatlas.store.ranges import ArrayReader, read_slice

BAND_ENTRIES = 16 * 2**20
"""Entries that are held and sorted at once; the bound on memory is a small multiple of this many values and row numbers."""

STEP_ENTRIES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Band:
    """Columns ``[first, last)``, whose entries fit in memory together.

    Parameters
    ----------
    first, last : int
        Columns.
    n_entries : int
        Entries in them.
    """

    first: int
    last: int
    n_entries: int


def add_csc(catalog: Catalog, dataset: str, space: str, layers: Sequence[str] | None = None) -> tuple[str, ...]:
    """Write column-sorted copies of a dataset's sparse layers (seed 000, sparse groups).

    Every row of the group is in the copy, also rows whose cells were deleted since, so ``zarr_row`` keeps its meaning.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    dataset : str
        Name or uid.
    space : str
        A sparse feature space.
    layers : sequence of str or None
        Which layers; None takes all.

    Returns
    -------
    tuple of str
        The layers written now; those that had a copy are left as they are.

    Raises
    ------
    QueryError
        If the space is dense.
    NotFoundError
        If the dataset has no such space or layer.
    """
    catalog.require_tip("add_csc()")
    if catalog.space(space).kind is not PointerKind.SPARSE:
        raise QueryError(
            f"The feature space {space!r} is dense: its arrays are read by row and by column alike; add_csc() is for sparse ones."
        )
    records = [r for r in find_dataset(catalog, dataset) if r.feature_space == space]
    there = [layer for r in records for layer in r.layers]
    unknown = sorted(set(layers or ()) - set(there))
    if not records or unknown:
        raise NotFoundError(f"Dataset {dataset!r} has the {space!r} layers {there}, not {unknown or 'any'}.")
    written: list[str] = []
    for record in records:
        wanted = [layer for layer in record.layers if layers is None or layer in layers]
        written += _copy_group(catalog, record, wanted)
    return tuple(written)


def _copy_group(catalog: Catalog, record: DatasetRecord, wanted: Sequence[str]) -> list[str]:
    specs = {path: ArraySpec.from_json(json.dumps(spec)) for path, spec in record.array_specs.items()}
    missing = [layer for layer in wanted if f"csc/layers/{layer}" not in specs]
    if not missing:
        return []
    group = catalog.arrays.child(*record.zarr_group.split("/"))
    targets = [f"csc/layers/{layer}" for layer in missing]
    if "csc/indptr" not in specs:
        targets += ["csc/indptr", "csc/indices"]
    for path in targets:
        group.child(*path.split("/")).delete_prefix()
    create_group(catalog.arrays, f"{record.zarr_group}/csc/layers")
    indptr = _read_all(catalog, specs["csr/indptr"])
    sorter = _Sorter(catalog, record, specs, indptr)
    made: dict[str, ArrayWriter] = {}
    if "csc/indptr" in targets:
        made["csc/indptr"] = ArrayWriter(
            catalog.arrays, f"{record.zarr_group}/csc/indptr", np.int64, profile=catalog.codec()
        )
        made["csc/indptr"].append(sorter.column_bounds)
        made["csc/indices"] = sorter.write(f"{record.zarr_group}/csc/indices", None)
    for layer in missing:
        made[f"csc/layers/{layer}"] = sorter.write(f"{record.zarr_group}/csc/layers/{layer}", layer)
    _commit(catalog, record, made)
    return missing


def _read_all(catalog: Catalog, spec: ArraySpec) -> NDArray[Any]:
    values: NDArray[Any] = read_slice(ArrayReader(catalog.arrays, spec), 0, spec.shape[0])
    return values


def _commit(catalog: Catalog, record: DatasetRecord, made: Mapping[str, ArrayWriter]) -> None:
    specs = {path: json.loads(writer.close().to_json()) for path, writer in made.items()}
    checksums = {path: writer.checksum for path, writer in made.items()}

    def once() -> None:
        version = catalog.tables.version(DATASETS)
        rows = catalog.tables.read(DATASETS, where=f"zarr_group = '{record.zarr_group}'").to_pylist()
        for row in rows:
            row["arrays"] = json.dumps(json.loads(row["arrays"]) | specs, sort_keys=True)
            row["checksums"] = json.dumps(json.loads(row["checksums"]) | checksums, sort_keys=True)
        changed = pa.Table.from_pylist(rows, schema=DATASETS_SCHEMA)
        catalog.tables.merge(DATASETS, ["zarr_group"], changed, update=True, retry=False, read_version=version)

    catalog.tables.retry(DATASETS, once)


class _Sorter:
    """Sorts a group's entries by column, in bands that fit in memory; further bands wait on disk."""

    def __init__(
        self, catalog: Catalog, record: DatasetRecord, specs: Mapping[str, ArraySpec], indptr: NDArray[np.int64]
    ) -> None:
        self.catalog, self.specs, self.indptr = catalog, specs, indptr
        counts = np.zeros(record.n_features, np.int64)
        for _, indices in self._walk("csr/indices"):
            counts += np.bincount(indices, minlength=record.n_features)
        self.column_bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self.bands = _bands(self.column_bounds)

    def write(self, path: str, layer: str | None) -> ArrayWriter:
        """Write the row numbers (`layer` None) or a layer's values in column order."""
        dtype = np.dtype(np.uint32) if layer is None else self.specs[f"csr/layers/{layer}"].dtype
        writer = ArrayWriter(self.catalog.arrays, path, dtype, profile=self.catalog.codec())
        with tempfile.TemporaryDirectory(prefix="raggedatlas-csc-") as folder:
            files = self._spill(Path(folder), layer, np.dtype(dtype))
            for band, (columns, values) in zip(self.bands, files, strict=True):
                at = np.fromfile(columns, np.uint32)
                order = np.argsort(at, kind="stable")
                writer.append(np.fromfile(values, dtype)[order])
                if len(at) != band.n_entries:
                    raise NotFoundError(
                        f"{path}: {len(at)} of {band.n_entries} entries were read back; run validate('deep')."
                    )
        return writer

    def _spill(self, folder: Path, layer: str | None, dtype: np.dtype[Any]) -> list[tuple[Path, Path]]:
        files = [(folder / f"{i}.columns", folder / f"{i}.values") for i in range(len(self.bands))]
        for columns, values in files:
            columns.touch()
            values.touch()
        values_at = None if layer is None else ArrayReader(self.catalog.arrays, self.specs[f"csr/layers/{layer}"])
        for start, indices in self._walk("csr/indices"):
            stop = start + len(indices)
            kept = self._rows(start, stop) if values_at is None else read_slice(values_at, start, stop)
            for band, (columns, values) in zip(self.bands, files, strict=True):
                inside = slice(None) if len(self.bands) == 1 else (indices >= band.first) & (indices < band.last)
                with columns.open("ab") as file:
                    indices[inside].astype(np.uint32, copy=False).tofile(file)
                with values.open("ab") as file:
                    kept[inside].astype(dtype, copy=False).tofile(file)
        return files

    def _rows(self, start: int, stop: int) -> NDArray[np.uint32]:
        first = int(np.searchsorted(self.indptr, start, side="right")) - 1
        last = int(np.searchsorted(self.indptr, stop, side="left"))
        bounds = np.clip(self.indptr[first : last + 1], start, stop)
        return np.repeat(np.arange(first, last, dtype=np.uint32), np.diff(bounds))

    def _walk(self, path: str) -> Iterator[tuple[int, NDArray[Any]]]:
        reader = ArrayReader(self.catalog.arrays, self.specs[path])
        n = self.specs[path].shape[0]
        for start in range(0, n, STEP_ENTRIES):
            yield start, read_slice(reader, start, min(n, start + STEP_ENTRIES))


def _bands(bounds: NDArray[np.int64]) -> list[Band]:
    bands, first = [], 0
    n = len(bounds) - 1
    while first < n:
        last = int(np.searchsorted(bounds, bounds[first] + BAND_ENTRIES, side="right")) - 1
        last = min(n, max(first + 1, last))
        bands.append(Band(first, last, int(bounds[last] - bounds[first])))
        first = last
    return bands
