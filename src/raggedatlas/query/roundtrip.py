"""A stored dataset as a source: row readers in the order of the file, its tables, and all other elements."""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.assets import array_readers
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.frames import open_frame, read_frame
from raggedatlas.errors import CorruptError
from raggedatlas.formats.archive import unpack
from raggedatlas.formats.composite_source import CompositeSource, MatrixPart, SourceParts
from raggedatlas.formats.matrix_readers import BLOCK_BYTES, ENTRIES, stop_by_entries
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock
from raggedatlas.model.frames import ColumnTable, arrow_table, arrow_to_frame
from raggedatlas.model.protocols import NO_MATRIX, MatrixForm
from raggedatlas.model.records import COLUMNS, ELEMENTS, DatasetRecord, ExtraFacts, MatrixFacts
from raggedatlas.store.read import ArrayReader, read_all, read_bounds, read_slice
from raggedatlas.store.sparse import remap_csr

if TYPE_CHECKING:
    import pandas as pd

PRESENT = "present/"


class StoredDataset:
    """The content a dataset was added with, read on access.

    Parameters
    ----------
    catalog : Catalog
        At the tip or pinned.
    records : sequence of DatasetRecord
        Its groups; the first holds the other elements.
    """

    def __init__(self, catalog: Catalog, records: Sequence[DatasetRecord]) -> None:
        self._catalog, self._records = catalog, records
        self._facts = [record.file_facts for record in records]
        self._readers = [_Readers(record.zarr_group, array_readers(catalog.arrays, record)) for record in records]

    @cached_property
    def elements(self) -> dict[str, Any]:
        """Elements stored as one archive: key -> element; treat them as read-only."""
        reader = self._readers[0].arrays.get(ELEMENTS)
        return {} if reader is None else unpack(read_all(reader).tobytes())

    @property
    def arrays(self) -> Mapping[str, ExtraFacts]:
        """Elements stored as arrays: key -> facts."""
        return self._facts[0].extras

    def source(self) -> CompositeSource:
        """Return a source equal to the file that was added."""
        record, facts = self._records[0], self._facts[0]
        matrices, tables = [], {}
        for i, group in enumerate(self._records):
            shape = (group.n_cells, group.n_features)
            shared = _Entries(self._readers[i], "csr", shape) if "csr/indices" in self._readers[i].arrays else None
            for layer in group.layers:
                part = self._layer(i, layer, shared)
                if part.info.key == NO_MATRIX:
                    continue
                matrices.append(part)
                if part.info.features:
                    tables[part.info.features] = partial(self._table, f"var.{group.pointer}")
        others = [self._other_matrix(key, facts) for key, facts in self.arrays.items()]
        elements = {key: value for key, value in self.elements.items() if not key.startswith(PRESENT)}
        present = {key.removeprefix(PRESENT): cells for key, cells in self.elements.items() if key.startswith(PRESENT)}
        n_cells = record.n_cells if facts.n_cells is None else facts.n_cells
        for part in matrices:
            cells = present.get("/".join([*part.info.key.split("/")[:2], "obs"]))
            if cells is not None and not np.array_equal(cells, np.arange(n_cells)):
                present[part.info.key] = cells
        parts = SourceParts(
            n_cells,
            partial(self._table, "obs"),
            tuple(matrices),
            tables,
            present=present,
            others=tuple(others),
            elements={key: partial(_same, value) for key, value in elements.items()},
            tables={"obs": partial(self._cells, n_cells)},
        )
        return CompositeSource(parts, name=record.name, uri=record.source, format=facts.format)

    def _table(self, name: str) -> "pd.DataFrame":
        return arrow_to_frame(read_frame(self._catalog, self._records[0], name))

    def _cells(self, n_cells: int) -> ColumnTable:
        frame = open_frame(self._catalog, self._records[0], "obs")
        return arrow_table(frame.schema, n_cells, frame.chunks)

    def _layer(self, i: int, layer: str, entries: "_Entries | None") -> MatrixPart:
        record, readers = self._records[i], self._readers[i]
        fact = self._facts[i].layers.get(layer)
        if fact is None:
            raise CorruptError(
                f"The facts of {record.zarr_group} in table 'datasets' have no layer {layer!r}, only {list(self._facts[i].layers)}; "
                "run validate()."
            )
        if entries is not None:
            rows = _GroupRows(entries, readers.get(f"csr/layers/{layer}"), fact, entries.shape)
        else:
            reader = readers.get(f"layers/{layer}")
            rows = _GroupRows(None, reader, fact, reader.spec.shape)
        features = _usual_features(fact.key) if fact.features is None else fact.features
        return MatrixPart.of(fact.key, rows, features if record.layout_uid else "", record.feature_space)

    def _other_matrix(self, key: str, facts: ExtraFacts) -> MatrixPart:
        readers = self._readers[0]
        data = readers.get(f"{facts.path}/data")
        entries = None
        if facts.form != "dense":
            if len(facts.shape) != 2:
                raise CorruptError(
                    f"{data.name} is recorded as a sparse matrix of shape {facts.shape}; run validate()."
                )
            entries = _Entries(readers, facts.path, (facts.shape[0], facts.shape[1]))
        elif facts.shape != data.spec.shape:
            raise CorruptError(f"{data.name} has shape {data.spec.shape}, {facts.shape} is recorded; run validate().")
        return MatrixPart.of(key, _GroupRows(entries, data, facts, facts.shape))


class _Readers:
    """The arrays of one group."""

    def __init__(self, group: str, arrays: Mapping[str, ArrayReader]) -> None:
        self.group, self.arrays = group, arrays

    def get(self, path: str) -> ArrayReader:
        """Return the reader of one array; `CorruptError` if the record has none."""
        if path not in self.arrays:
            raise CorruptError(
                f"The group {self.group} has no array {path!r}, only {sorted(self.arrays)}; run validate()."
            )
        return self.arrays[path]


class _Entries:
    """The entries of a sparse group, which its layers share; the last rows are kept for the next layer."""

    def __init__(self, readers: _Readers, folder: str, shape: tuple[int, int]) -> None:
        self._indices, self._indptr = readers.get(f"{folder}/indices"), readers.get(f"{folder}/indptr")
        self._columns = readers.arrays.get(COLUMNS) if folder == "csr" else None
        self._last: tuple[tuple[int, int], tuple[NDArray[Any], NDArray[Any] | None]] | None = None
        self.shape, self.n_entries = shape, self._indices.spec.n_rows

    @cached_property
    def indptr(self) -> NDArray[np.int64]:
        """Bounds of the rows, (n_rows + 1,) int64."""
        return read_bounds(self._indptr, self.shape[0], self.n_entries)

    @cached_property
    def _of_file(self) -> NDArray[np.int64] | None:
        if self._columns is None:
            return None
        stored = read_all(self._columns)
        order = np.argsort(stored, kind="stable")
        if not np.array_equal(stored[order], np.arange(self.shape[1])):
            raise CorruptError(
                f"{self._columns.name} does not give each of {self.shape[1]:,} columns a place of its own; restore it from a copy."
            )
        return order

    def rows(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Return the columns of some rows as the file has them, and which stored entry each one is (None for its own)."""
        if self._last is not None and self._last[0] == (start, stop):
            return self._last[1]
        bounds = self.indptr[start : stop + 1]
        indices, order = read_slice(self._indices, int(bounds[0]), int(bounds[-1])), None
        # A column beyond the last would let SciPy's compiled loops leave their memory.
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < self.shape[1]:
            raise CorruptError(
                f"{self._indices.name} names a column outside of its {self.shape[1]:,}; run validate('deep')."
            )
        if self._of_file is not None:
            pointers = bounds - bounds[0]
            places = np.arange(len(indices), dtype=np.int32 if len(indices) < 2**31 else np.int64)
            _, indices, order = remap_csr(pointers, indices, places, self._of_file, len(self._of_file))
        self._last = ((start, stop), (indices.astype(np.int32, copy=False), order))
        return self._last[1]


class _GroupRows:
    """One layer of a group, or another stored matrix, in its original form and dtype."""

    def __init__(
        self,
        entries: _Entries | None,
        values: ArrayReader,
        facts: MatrixFacts,
        shape: tuple[int, ...],
    ) -> None:
        self._entries, self._values, self.shape = entries, partial(read_slice, values), shape
        self.form: MatrixForm = facts.form
        self.dtype: np.dtype[Any] = np.dtype(facts.dtype)
        self.wide: tuple[bool, bool] = facts.wide
        if entries is not None and values.spec.shape != (entries.n_entries,):
            raise CorruptError(
                f"{values.name} has shape {values.spec.shape} for {entries.n_entries:,} entries; run validate()."
            )
        sparse = entries is not None and self.form != "dense"
        self.n_entries: int | None = entries.n_entries if sparse and entries is not None else None

    def stop(self, start: int, stop: int) -> int:
        """Return the end of one step."""
        if self.n_entries is None:
            width = max(1, int(np.prod(self.shape[1:], dtype=object)))
            stop = min(stop, start + max(1, BLOCK_BYTES // (width * self.dtype.itemsize)))
        return stop if self._entries is None else stop_by_entries(self._entries.indptr, start, stop, ENTRIES)

    def read(self, start: int, stop: int) -> Block:
        """Read rows ``[start, stop)``."""
        if self._entries is None:
            dense = self._values(start, stop).astype(self.dtype, copy=False)
            return DenseBlock({"values": dense}) if self.form == "dense" else _sparse(dense)
        bounds = self._entries.indptr[start : stop + 1]
        values = self._values(int(bounds[0]), int(bounds[-1]))
        indices, order = self._entries.rows(start, stop)
        values = (values if order is None else values[order]).astype(self.dtype, copy=False)
        pointers = bounds - bounds[0]
        if self.form != "dense":
            return CsrBlock(pointers, indices.copy(), {"values": values}, self.shape[1])
        made = np.zeros((stop - start, self.shape[1]), self.dtype)
        made[np.repeat(np.arange(stop - start), np.diff(pointers)), indices] = values
        return DenseBlock({"values": made})

    def close(self) -> None:
        """Keep nothing."""


def _sparse(dense: NDArray[Any]) -> CsrBlock:
    rows, columns = np.nonzero(dense)
    pointers = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))])
    return CsrBlock(pointers, columns.astype(np.int32), {"values": dense[rows, columns]}, dense.shape[1])


def _usual_features(key: str) -> str:
    """Return the feature table of a matrix in datasets added before it was recorded."""
    parts = key.split("/")
    prefix = "/".join(parts[:2]) + "/" if parts[0] == "mod" else ""
    own = key.removeprefix(prefix)
    return f"{prefix}raw/var" if own == "raw/X" else key if own.startswith("obsm/") else f"{prefix}var"


def _same(value: Any) -> Any:  # noqa: ANN401
    return value
